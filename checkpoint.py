"""Save and resume replicated training: a snapshot in one file, and an agreed stop on SIGTERM.

    epoch, step = checkpoint.load(path, model, optimizer)            # (0, 0) if there is none
    checkpoint.save(path, model, optimizer, epoch=epoch + 1)         # every rank calls it

    epoch, step, best = checkpoint.load(path, model, optimizer, best=math.inf)    # plain values too
    checkpoint.save(path, model, optimizer, epoch=epoch + 1, best=best)

Any number of processes can load what any number has saved. A kill at any moment leaves the old snapshot or the new one.
Disk and file errors are one-line messages, on every rank. A file is loaded with `weights_only=True`, so nothing in it
is executed. For a model that fully_shard has sharded, see checkpoint_sharded.py.
"""

import contextlib
import json
import multiprocessing
import os
import pathlib
import signal
import stat
import sys
import tempfile
import zipfile

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distributed as dist

# ---- files ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic(path, instead=None):
    """Write to a temporary file, and rename it to `path` if the block succeeds. Gives the file, open to write and read.

    The new file has the mode of the old one. A kill or a power cut leaves the old file or the new one; a block that
    fails leaves the old one. A killed process also leaves the temporary file, `path.RANK.tmp`, which its next save
    writes over. Two jobs must not save to one path. To try out a save, `instead` names another file to replace.
    Raises DistributedError if the disk is full or refuses, or if `path` is write-protected, mounted, a folder or a
    device.
    """
    target = os.path.realpath(path)  # if `path` is a symbolic link, the file to which it points
    temporary = f"{target}.{dist.get_rank()}.tmp"  # the rank, because nodes may share the folder
    try:
        with open(temporary, "w+b") as file:
            _become_like(target, file)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, instead or target)
        with contextlib.suppress(OSError):  # the new file is in place, also if its folder cannot be read or flushed
            folder = os.open(os.path.dirname(target), os.O_RDONLY)
            try:
                os.fsync(folder)  # writes the rename to the disk
            finally:
                os.close(folder)
    except BaseException as failure:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        # torch.save raises a RuntimeError while it handles the OSError of a full disk.
        cause = failure.__context__ if type(failure) is RuntimeError else failure
        if isinstance(cause, OSError):
            raise dist.DistributedError(f"cannot save {target}: {cause.strerror}") from None
        raise


def _become_like(target, file):
    """Give `file` the mode of the file `target`, if there is one. Raises an error if that one cannot be replaced."""
    if not os.path.exists(target):
        return
    if not os.path.isfile(target):
        raise dist.DistributedError(f"cannot save {target}: it is not a regular file")
    with open(target, "r+b") as old:  # fails if it is write-protected
        os.chmod(file.fileno(), stat.S_IMODE(os.fstat(old.fileno()).st_mode))
    mounts = pathlib.Path("/proc/self/mountinfo")  # Linux
    if mounts.exists() and target in [line.split()[4] for line in mounts.read_text().splitlines()]:
        raise dist.DistributedError(f"cannot save {target}: it is mounted as a file, so mount its folder instead")


def check_writable(option, path):
    """Before any training: make the folder of the file `path`. Raises SystemExit, naming `option`, if no save can work.

    It does all that a save does, except that it replaces another file of the folder. None needs no check.
    """
    problem = None if path is None else _problem_of(path)
    if problem:
        raise SystemExit(f"{option}: {problem}")


def _problem_of(path):
    """Why the file `path` could not be written, or None. Makes its folder."""
    if not path or (os.path.exists(path) and not os.path.isfile(path)):
        return f"{path!r} is not the name of a file"
    folder = os.path.dirname(os.path.realpath(path))
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as existing, atomic(path, instead=existing.name) as file:
            file.write(b"as a save does")
    except (OSError, dist.DistributedError) as error:
        return f"cannot write to {folder}: {getattr(error, 'strerror', error)}"
    return None


# ---- snapshots ------------------------------------------------------------------------------------------------------


def save(path, model, optimizer, scheduler=None, epoch=0, step=0, settings=None, **more):
    """Save the states of model, optimizer, scheduler and `more`, and where to resume, `epoch` and `step`.

    Every rank calls it. Rank 0 writes, and local rank 0 of each node, so a lost node takes no snapshot with it. No
    random state is saved: seed each epoch. Models are saved unwrapped. `more` names further objects with state_dict and
    load_state_dict, like a second model, and plain values: numbers, strings, tensors, lists and dicts of these.
    `settings` is a dict of options that a resumed run must share. Buffers become rank 0's on all ranks, as in DDP.
    Raises DistributedError on every rank if anything to save differs between ranks or could not be loaded again, if an
    optimizer trains a parameter that is not saved, if the model is sharded, or if a node cannot write.
    """
    parts = _parts(model, optimizer, scheduler, more)
    snapshot = {"epoch": epoch, "step": step, "settings": (settings or {}) | _description(parts)}
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            dist.sync_params(part.buffers())
        snapshot[name] = part.state_dict() if _has_state(part) else part
    dist.check_in_sync(None, **_leaves(snapshot))  # without a model: its names would not say which part it is
    json.dumps(snapshot["settings"])  # raises TypeError for what `load` could not compare
    error = None
    if _has_file():
        try:
            with atomic(path) as file:
                torch.save(snapshot, file)
                _refuse_unloadable(file, path)
        except dist.DistributedError as failure:
            error = str(failure)
    dist.raise_on_all(error)


def _has_file():
    return dist.is_primary() or dist.get_local_rank() == 0


def _leaves(container, prefix=""):
    """All that nested dicts and lists hold, in one dict: {"model.0.weight": …}. A list of plain values is one value."""
    leaves = {}
    nested = (dict, list, tuple, torch.Tensor)
    for key, value in container.items():
        if isinstance(value, list | tuple) and any(isinstance(item, nested) for item in value):
            value = dict(enumerate(value))
        if isinstance(value, dict) and value:
            leaves |= _leaves(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _refuse_unloadable(file, path):
    file.seek(0)
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if refused:
        line = f"cannot save {path}: weights_only=True cannot load {', '.join(refused)}"
        raise dist.DistributedError(f"{line}; of a number of numpy pass float(…)")


def load(path, model, optimizer, scheduler=None, settings=None, **more):
    """Restore the newest snapshot of any node on every rank.

    Returns epoch and step, and then each plain value of `more`. If no node has a snapshot, it makes the folder for it,
    and returns (0, 0) and the given values. Every rank calls it, with the names in `more` as in `save`. A tensor that
    requires a gradient is filled, and returned. The optimizer gets the options of the snapshot, such as the learning
    rate. Raises DistributedError on every rank if a file is damaged, was saved from another model, other parts or other
    settings, or if that folder is not writable. All settings are compared, those of the snapshot and the given ones.
    """
    parts = _parts(model, optimizer, scheduler, more)
    settings = (settings or {}) | _description(parts)
    snapshot, error = None, None
    if _has_file():
        snapshot, error = _read(path)
    dist.raise_on_all(error)
    position = (snapshot["epoch"], snapshot["step"]) if snapshot else ()  # less than any other
    positions = dist.gather_objects(position)
    newest = max(positions)
    if not newest:
        return 0, 0, *[part for part in parts.values() if not _has_state(part)]
    snapshot = dist.broadcast_object(snapshot, src=positions.index(newest))
    _restore(parts, settings, snapshot, os.path.abspath(path))
    return *newest, *[snapshot[name] for name, part in parts.items() if not _has_state(part)]


def _read(path):
    """Returns (snapshot, None), (None, None) if there is none, or (None, an error message)."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():  # torch.load compares no checksum
                raise ValueError("a checksum is wrong")
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
        return {"epoch": snapshot["epoch"], "step": snapshot["step"], **snapshot}, None
    except FileNotFoundError:
        return None, _problem_of(path)
    except Exception as failure:  # whatever the readers raise on bytes that are no snapshot
        reason = f"{type(failure).__name__}: {failure}".partition("\n")[0][:200]
        return None, f"{os.path.abspath(path)} is damaged or not a snapshot ({reason}): delete or rename it"


def _restore(parts, settings, snapshot, path):
    saved = snapshot.keys() - {"epoch", "step", "settings"}
    if saved != parts.keys():
        line = f"{path} holds the state of {', '.join(sorted(saved))}, not of {', '.join(sorted(parts))}"
        raise dist.DistributedError(f"{line}: save and load the same parts")
    before = _description(parts) | snapshot["settings"]  # older snapshots have no description
    for name in before | settings:
        old, new = before.get(name), settings.get(name)
        if old != new and json.dumps(old) != json.dumps(new):  # as text, NaN is equal to NaN
            line = f"{path} was saved with {name} {before.get(name)}, not {settings.get(name)}"
            raise dist.DistributedError(f"{line}: use the same, or another path")
    try:
        for name, part in parts.items():
            if _has_state(part):
                _compare_types(part, snapshot[name])
                part.load_state_dict(snapshot[name])
            elif torch.is_tensor(part) and part.requires_grad:
                part.detach().copy_(snapshot[name])
                snapshot[name] = part  # the optimizer trains this one
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as failure:
        line = f"{path} was saved from another model or optimizer ({' '.join(str(failure).split())[:300]})"
        raise dist.DistributedError(f"{line}: build the same, or choose another path") from None


def _parts(model, optimizer, scheduler, more):
    """What to save, by name; models without the wrappers of torch.compile and DDP."""
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, **more}
    if scheduler is None:
        del parts["scheduler"]
    modules = [part for part in parts.values() if isinstance(part, nn.Module)]
    if any(hasattr(param, "to_local") for module in modules for param in module.parameters()):
        raise dist.DistributedError("the model is sharded: use checkpoint_sharded.save and checkpoint_sharded.load")
    return {name: dist.unwrapped(part) for name, part in parts.items()}


def _compare_types(part, saved):
    """Raise ValueError if a weight was saved in another type: load_state_dict would convert it."""
    for name, tensor in part.state_dict().items() if isinstance(part, nn.Module) else ():
        if torch.is_tensor(tensor) and saved.get(name, tensor).dtype != tensor.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, and was {saved[name].dtype}")


def _description(parts):
    """What must be the same again, or an optimizer would take another's state without an error, and train wrongly.

    It has the classes of optimizers and schedulers, and the names of each optimizer's parameters in their order.
    """
    names = {part: name for name, part in parts.items() if torch.is_tensor(part)}
    description = {}
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            names |= {param: f"{name}.{key}" for key, param in part.named_parameters()}
        elif _has_state(part):
            description[f"{name} class"] = type(part).__name__
    for name, part in parts.items():
        for number, group in enumerate(getattr(part, "param_groups", ())):
            for i, param in enumerate(group["params"]):
                if param not in names:
                    line = "an optimizer trains a parameter that would not be saved"
                    raise dist.DistributedError(
                        f"{line}: pass its module too, to save and load, as in save(…, head=head)"
                    )
                description[f"{name} parameter {i} of group {number}"] = names[param]
    return description


def _has_state(part):
    return hasattr(part, "state_dict")


def rebuild_buckets(model, compute_loss):
    """Run one backward of `compute_loss()`, a loss of `model` on any batch, so that DDP rebuilds its gradient buckets.

    Call it before training begins or resumes, and seed after it. DDP rebuilds its buckets once, after the first
    backward, and their layout decides in which order the gradients of three or more ranks are summed. So the first step
    of a resumed run would differ in the last bit from the uninterrupted run's. Parameters and buffers get their values
    back, gradients are cleared. Without DDP it does nothing.
    """
    if not isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel):
        return
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    before = [tensor.clone() for tensor in tensors]
    compute_loss().backward()
    model.zero_grad()
    for tensor, value in zip(tensors, before, strict=True):
        tensor.copy_(value)


# ---- save before a machine is taken away ----------------------------------------------------------------------------


class Preemption:
    """Tells all ranks after the same step that at least one of them has received SIGTERM.

        preemption = checkpoint.Preemption()
        for step in range(first_step, steps):
            ...
            preempted = preemption.agreed()  # after each step, on every rank
            if preempted or step % save_every == 0:
                checkpoint.save(...)
            if preempted:
                preemption.leave()

    A scheduler sends SIGTERM some time before it takes a machine away, and torchrun sends it when a node joins. No rank
    may stop alone, because the others would wait for it in the next step. Each call starts an all-reduce of a flag on
    the CPU, and reads the result of the call before, one step late. So a rank waits here only for ranks that have not
    ended the step before, and all stop after the step that follows the signal.
    Make one on every rank, in the main thread, once the process group is made.
    """

    def __init__(self):
        self.received = False
        self.flag = torch.zeros((), dtype=torch.int)
        self.all_reduce = None  # of the flag, in progress
        signal.signal(signal.SIGTERM, self.receive)

    def receive(self, number, frame):
        self.received = True

    def agreed(self):
        """Call it after each step, on every rank. It returns True on all ranks after the same step."""
        if dist.get_world_size() == 1:
            return self.received
        if self.all_reduce:
            self.all_reduce.wait()
        if self.flag.item() > 0:
            return True
        self.flag.fill_(self.received)
        self.all_reduce = torch_dist.all_reduce(self.flag, torch_dist.ReduceOp.MAX, async_op=True)
        return False

    def leave(self):
        """Call it after the save, on every rank. It exits with status 143, so that torchrun restarts the processes.

        It does not return, and nothing that Python would do at its end is done: close your log files before.
        """
        dist.cleanup()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # else torch raises an error here when a loader's process ends
        for process in multiprocessing.active_children():
            process.kill()
        sys.stdout.flush()
        # Python's own end would free DDP after the group, and may then wait forever in torch 2.11.
        os._exit(128 + signal.SIGTERM)


def shielded(loader):
    """`iter(loader)`, whose processes do not get SIGTERM. The ranks need their batches until they stop."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the processes inherit it
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
