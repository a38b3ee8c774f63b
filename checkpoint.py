"""Save and resume: replicated state in one file, sharded state in a folder to which every rank writes.

    epoch, step = checkpoint.load(path, model, optimizer)            # (0, 0) if there is none
    checkpoint.save(path, model, optimizer, epoch=epoch + 1)         # every rank calls it

    epoch, step, best = checkpoint.load(path, model, optimizer, best=math.inf)    # plain values too
    checkpoint.save(path, model, optimizer, epoch=epoch + 1, best=best)

    epoch = checkpoint.load_sharded(folder, model, optimizer)        # 0 if there is none
    checkpoint.save_sharded(folder, model, optimizer, epoch + 1)

All four take a `scheduler` too.

Any number of processes can load what any number has saved. A kill at any moment leaves the old snapshot or the new one.
Disk and file errors are one-line messages, on every rank. A file is loaded with `weights_only=True`, so nothing in it
is executed; parts of a folder are pickles, so load only folders that you trust.
"""

import contextlib
import copy
import errno
import os
import re
import shutil
import socket
import tempfile
import threading
import warnings
import zipfile
from concurrent import futures

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distributed as dist

NO_SNAPSHOT = (-1, -1)  # instead of (epoch, step)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk full, quota exceeded, file too large


@contextlib.contextmanager
def atomic(path):
    """Write to a temporary file; rename it to `path` if the block succeeds. Gives the file, open to write and read.

    A power cut leaves the old file or the new one; a block that fails leaves the old one. A killed process also leaves
    the temporary file, `path.RANK.tmp`, which the next save of that rank writes over. Raises DistributedError if the
    disk is full or refuses. A second thread syncs during the write, which is faster than one sync at the end, and
    another one frees the old file.
    """
    temporary = f"{path}.{dist.get_rank()}.tmp"  # the rank, as nodes may share the folder
    written = threading.Event()
    try:
        with open(temporary, "w+b") as file, futures.ThreadPoolExecutor(max_workers=1) as pool:
            syncing = pool.submit(_sync_until, written, file.fileno())
            try:
                yield file
            finally:
                written.set()
            syncing.result()  # raises the error that the thread has met
            file.flush()
            os.fsync(file.fileno())
        _replace(temporary, path)
    except BaseException as failure:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        cause = _cause_of(failure)
        if not isinstance(cause, OSError):
            raise
        advice = "choose another path"
        if cause.errno in FULL:
            advice = "make room there, or choose another path"
        raise dist.DistributedError(f"cannot save {_location(path)}: {cause.strerror}: {advice}") from None


def _cause_of(failure):
    """The OSError of a full disk: torch.save raises a RuntimeError while it handles that."""
    if type(failure) is RuntimeError:
        return failure.__context__
    return failure


def _sync_until(written, fd):
    while not written.wait(timeout=0.1):
        os.fsync(fd)


def _replace(temporary, path):
    # Freeing a large file takes seconds. The system frees a replaced file when its last open descriptor is closed. So
    # keep one open, and close it in a thread.
    old = None
    if os.access(path, os.R_OK):
        old = os.open(path, os.O_RDONLY)
    try:
        os.replace(temporary, path)
        with contextlib.suppress(PermissionError):  # a folder that one may not read cannot be synced
            folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
    finally:
        if old is not None:
            threading.Thread(target=os.close, args=(old,)).start()


def check_writable(option, folder):
    """Make `folder`, before any training. Raises SystemExit, naming `option`, if nothing can be written there."""
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise SystemExit(f"{option}: cannot write to {os.path.abspath(folder)}: {error.strerror}") from None


def _location(path):
    return f"{os.path.abspath(path)} on {socket.gethostname()}"


# ---- one file, written by local rank 0 of every node ----------------------------------------------------------------


@dist.watched
def save(path, model, optimizer, scheduler=None, epoch=0, step=0, **more):
    """Save the states of model, optimizer, scheduler and `more`, and where to resume, `epoch` and `step`.

    The two are in the caller's units. No random state is saved: seed each epoch. `more` names further objects that have
    state_dict and load_state_dict, like a second model or a GradScaler. It also names plain values: numbers, strings,
    tensors, and lists and dicts of these. Rank 0's are saved. Every rank must call it. Models are saved unwrapped, so
    any number of processes can load them. Local rank 0 of each node writes to `path`. If nodes share a disk, rank 0
    alone writes, from the second save on. The model's buffers become rank 0's on all ranks, as in DDP. Raises
    DistributedError on every rank if weights differ between ranks, if the model is sharded, if a node cannot write, or
    if a value could not be loaded again, like a numpy number or a Path; that node's old file is then unchanged.
    """
    parts = _parts(model, optimizer, scheduler, more)
    for part in parts.values():
        if isinstance(part, nn.Module):
            dist.check_in_sync(part)  # rank 0's weights alone are saved
    dist.sync_params(parts["model"].buffers())  # so that all nodes save the same
    error = None
    if _is_writer(path):
        snapshot = {"epoch": epoch, "step": step}
        for name, part in parts.items():
            snapshot[name] = part.state_dict() if _has_state(part) else part
        try:
            _write(path, snapshot)
        except dist.DistributedError as failure:
            error = str(failure)
    dist.raise_on_all(error, dist.patient_group())


def _is_writer(path):
    """Is this local rank 0 of a node whose `path` is not the file that rank 0 sees? On rank 0 it is True."""
    identity = None
    with contextlib.suppress(OSError):
        found = os.stat(path)
        # A copy on another disk differs in at least one of these.
        identity = (found.st_ino, found.st_ctime_ns, found.st_size)
    identity_on_0 = dist.gather_objects(identity, dist.patient_group())[0]
    is_shared = identity is not None and identity == identity_on_0
    return dist.is_primary() or (dist.get_local_rank() == 0 and not is_shared)


def _write(path, snapshot):
    with atomic(path) as file:
        torch.save(snapshot, file)
        file.seek(0)
        refused = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(file))
        if refused:
            raise dist.DistributedError(
                f"cannot save {_location(path)}: it contains {refused}, which weights_only=True cannot load: "
                "make a plain number, string, list or dict of that"
            )


@dist.watched
def load(path, model, optimizer, scheduler=None, **more):
    """Find the snapshot with the highest (epoch, step) of all nodes, and restore it on every rank.

    Returns epoch and step, and then each plain value of `more`, in the order in which they are given. Without a
    snapshot anywhere it changes nothing and returns (0, 0) and the given values. Every rank must call it, with `more`
    as in `save`. Local rank 0 of each node looks for `path`. The node with the highest pair sends its file, tensor by
    tensor. Until it is restored, each rank holds the whole snapshot in the CPU's memory. The optimizer gets the
    learning rate of the snapshot, even if it was built with another. Raises DistributedError on every rank if a model
    is sharded, or if any node's file is damaged, cannot be read, or was saved from another model or other parts.
    """
    parts = _parts(model, optimizer, scheduler, more)
    snapshot, position, error = None, NO_SNAPSHOT, None
    if dist.get_local_rank() == 0:
        snapshot, position, error = _read(path)
    dist.raise_on_all(error, dist.patient_group())
    found = dist.gather_objects((position, dist.get_rank(), _location(path)), dist.patient_group())
    position, holder, location = max(found, key=lambda entry: entry[0])  # if several are equal, the lowest rank's
    if position == NO_SNAPSHOT:
        plain_values = [part for part in parts.values() if not _has_state(part)]
        return 0, 0, *plain_values
    if dist.get_rank() != holder:
        snapshot = None  # free the older snapshot before the newest is received
    if dist.get_world_size() > 1:
        snapshot = _send(snapshot, holder)
    _restore(parts, snapshot, location)
    plain_values = [snapshot[name] for name, part in parts.items() if not _has_state(part)]
    return *position, *plain_values


def _has_state(part):
    return hasattr(part, "state_dict")


def _restore(parts, snapshot, location):
    saved = " and ".join(sorted(snapshot.keys() - {"epoch", "step"}))
    wanted = " and ".join(sorted(parts))
    if saved != wanted:
        line = f"{location} holds the state of {saved}, not of {wanted}: save and load the same parts"
        raise dist.DistributedError(line, on_all_ranks=True)
    try:
        for name, part in parts.items():
            if _has_state(part):
                part.load_state_dict(snapshot[name])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as failure:
        cause = " ".join(str(failure).split())[:300]
        line = f"{location} was saved from another model or optimizer ({cause})"
        advice = "build what was saved, or choose another path"
        raise dist.DistributedError(f"{line}: {advice}", on_all_ranks=True) from None


def rebuild_buckets(model, compute_loss):
    """Run one backward of `compute_loss()`, a loss of `model` on any batch, so that DDP rebuilds its gradient buckets.

    Call it before training begins or resumes, and seed after it. DDP rebuilds its buckets once, after the first
    backward, and their layout decides in which order the gradients of three or more ranks are summed. So the first step
    of a resumed run would differ in the last bit from the uninterrupted run's. Parameters and buffers keep their
    values, gradients are cleared. Without DDP it does nothing.
    """
    if not isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel):
        return
    buffers = [buffer.clone() for buffer in model.buffers()]
    compute_loss().backward()
    model.zero_grad()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)


def _parts(model, optimizer, scheduler, more):
    """What to save, by name; models without torch.compile's and DDP's wrappers."""
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    given = {name: part for name, part in given.items() if part is not None}
    parts = {name: dist.unwrapped(part) for name, part in (given | more).items()}
    for name, part in parts.items():
        if isinstance(part, nn.Module) and any(hasattr(param, "to_local") for param in part.parameters()):
            line = (
                f"the {name} is sharded: use save_sharded and load_sharded, not save and load"  # a DTensor is a shard
            )
            raise dist.DistributedError(line)
    return parts


def _read(path):
    """Returns (snapshot, (epoch, step), None), or (None, NO_SNAPSHOT, an error message or None)."""
    location = _location(path)
    try:
        damaged = zipfile.ZipFile(path).testzip()  # torch.load compares no checksum
        if damaged:
            raise ValueError(f"checksum of {damaged}")
        refused = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        if refused:
            line = f"{location} contains {refused}, which weights_only=True cannot load"
            return None, NO_SNAPSHOT, f"{line}: convert it, or delete or rename the file"
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
        return snapshot, (int(snapshot["epoch"]), int(snapshot["step"])), None
    except FileNotFoundError:
        return None, NO_SNAPSHOT, None
    except OSError as failure:
        return None, NO_SNAPSHOT, f"cannot read {location}: {failure.strerror}: correct that, or delete or rename it"
    except Exception as failure:  # whatever the two readers raise on bytes that are no snapshot
        first_line = str(failure).partition("\n")[0][:200]
        error = f"{location} is damaged or not a snapshot ({type(failure).__name__}: {first_line}): delete or rename it"
        return None, NO_SNAPSHOT, error


def _send(snapshot, holder):
    """Rank `holder`'s `snapshot` on every rank: the containers at once, then one tensor after the other."""
    frame = _with_tensors(snapshot, lambda tensor: tensor.to("meta"))
    frame = dist.broadcast_object(frame, holder, dist.patient_group())
    if dist.get_rank() != holder:
        snapshot = _with_tensors(frame, lambda tensor: torch.empty_like(tensor, device="cpu"))
    dist.sync_params(_tensors_in(snapshot), src=holder)
    return snapshot


def _with_tensors(value, replace):
    """A copy of `value`, which `weights_only=True` has loaded, with `replace(tensor)` instead of each tensor."""
    if torch.is_tensor(value):
        return replace(value)
    if isinstance(value, dict):
        result = copy.copy(value)  # keeps a state_dict's versions of the modules, which are an attribute
        for key, part in value.items():
            result[key] = _with_tensors(part, replace)
        return result
    if isinstance(value, list | tuple):
        return type(value)([_with_tensors(part, replace) for part in value])
    return value


def _tensors_in(value):
    """Every tensor in nested containers, in the same order on every rank."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors_in(part)


# ---- a folder per epoch, to which every rank writes its part --------------------------------------------------------


@dist.watched
def save_sharded(folder, model, optimizer, epoch, scheduler=None, frozen=True):
    """Write `folder`/epoch-N: every rank writes its shards of a model that fully_shard or DDP has wrapped.

    `epoch` is the next one to run, at least 1, or else ValueError is raised. No random state is saved: seed each epoch.
    Its `.metadata` is written last, and a folder without it is ignored, so a kill does no harm. Older ones are kept.
    Without `frozen`, parameters that are not trained are left out: load it in the same way, into a model that has them.
    Raises DistributedError on every rank if weights that should be equal differ between ranks, or if one of them cannot
    write; what it has written is then removed.
    https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    """
    import torch.distributed.checkpoint as dcp  # takes 0.5 s

    if epoch < 1:
        raise ValueError(f"epoch must be at least 1, the next one to run, got {epoch}")
    dist.check_in_sync(model)
    path = os.path.join(os.path.abspath(folder), f"epoch-{epoch}")
    if dist.is_primary():  # remove what an interrupted save left, first `.metadata`, which marks a complete checkpoint
        with contextlib.suppress(OSError):  # if this fails, the save reports it
            os.remove(os.path.join(path, ".metadata"))
        shutil.rmtree(path, ignore_errors=True)
    _sync_buffers(model)
    dist.raise_on_all(None, dist.patient_group())  # wait until the folder is removed
    failure = _run_dcp(dcp.save, _sharded_state(model, optimizer, scheduler, frozen), path)
    if failure is not None:
        if dist.is_primary():
            shutil.rmtree(path, ignore_errors=True)
        cause = f"{type(failure).__name__}: {failure}".splitlines()[0]
        raise dist.DistributedError(f"cannot save {path}, is the disk full? ({cause})", on_all_ranks=True)


def _sync_buffers(model):
    """Buffers are not sharded: save rank 0's. If stages of a pipeline have different ones, leave them as they are."""
    buffers = [(name, buffer.shape) for name, buffer in model.named_buffers()]
    everyone = dist.gather_objects(buffers, dist.patient_group())
    if all(others == buffers for others in everyone):
        dist.sync_params(model.buffers())


@dist.watched
def load_sharded(folder, model, optimizer, scheduler=None, frozen=True):
    """Load the newest complete checkpoint, whatever the number of ranks then and now; returns the next epoch.

    Without a checkpoint it changes nothing and returns 0. The optimizer's learning rates are restored. Without a
    scheduler, they are multiplied by new / old if the optimizer is now built with another base rate. Raises
    DistributedError on every rank if the checkpoint cannot be read, is incomplete, does not match the model, or was
    saved with a scheduler and is loaded without one, or the reverse. It has no checksums: changed bits are not noticed.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    newest = max(dist.gather_objects(_newest_complete(folder), dist.patient_group()))
    if newest == 0:
        return 0
    path = os.path.join(os.path.abspath(folder), f"epoch-{newest}")
    optimizer.zero_grad()  # if there are gradients, torch loads no state into a new optimizer, and says nothing
    state = _sharded_state(model, optimizer, scheduler, frozen)
    base_rate = state["lr"]
    names = set()
    for names_of_rank in dist.gather_objects(list(state["model"]), dist.patient_group()):
        names.update(names_of_rank)
    saved, error = {}, None
    try:
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        _refuse_missing_in_model(saved, names)
    except Exception as failure:  # whatever unpickling raises on bytes that are no index
        error = _unreadable(path, failure)
    had_scheduler = any(key.partition(".")[0] == "scheduler" for key in saved)
    if error is None and had_scheduler != (scheduler is not None):
        how = "with" if had_scheduler else "without"
        error = f"{path} was saved {how} a scheduler: load it {how} one"
    dist.raise_on_all(error, dist.patient_group())
    # A parameter that has never had a gradient has no optimizer state in the checkpoint.
    moments = state["optimizer"]["state"]
    known = [name for name in moments if any(key.startswith(f"optimizer.state.{name}.") for key in saved)]
    state["optimizer"]["state"] = {name: moments[name] for name in known}
    failure = _run_dcp(dcp.load, state, path)
    if failure is not None:
        raise dist.DistributedError(_unreadable(path, failure), on_all_ranks=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        # Some parameters may have no optimizer state. dcp.load has already checked the rest.
        options=StateDictOptions(strict=False),
    )
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"][0])
    else:
        for group in optimizer.param_groups:
            group["lr"] *= base_rate / state["lr"]
    dist.print_primary(f"Resuming from {path}")
    return newest


def _newest_complete(folder):
    """The highest N of the folders epoch-N that have a `.metadata`, or 0."""
    if not os.path.isdir(folder):
        return 0
    newest = 0
    for name in os.listdir(folder):
        if re.fullmatch(r"epoch-\d+", name) and os.path.exists(os.path.join(folder, name, ".metadata")):
            newest = max(newest, int(name.removeprefix("epoch-")))
    return newest


def _refuse_missing_in_model(saved, names):
    """dcp.load would silently leave out what a bigger model has saved. `names` has the parameters of all ranks."""
    for key in saved:
        name = key.removeprefix("model.")
        if key.startswith("model.") and "_extra_state" not in key and name not in names:
            raise KeyError(f"the model has no {name}")


def _sharded_state(model, optimizer, scheduler, frozen):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(ignore_frozen_params=not frozen)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    if not frozen:  # torch keeps the second name of a tied weight
        for name, param in model.named_parameters(remove_duplicate=False):
            if not param.requires_grad:
                model_state.pop(name, None)
    # A rank of a pipeline has the parameters of its stage alone. But the options of the optimizer's groups are saved
    # once, and apply to the parameters that they name.
    groups = optimizer_state["param_groups"]
    everyone = dist.gather_objects([group["params"] for group in groups], dist.patient_group())
    for number, group in enumerate(groups):
        names = []
        for groups_of_rank in everyone:
            names.extend(groups_of_rank[number])
        group["params"] = list(dict.fromkeys(names))  # each one once
    state = {"model": model_state, "optimizer": optimizer_state, "lr": float(optimizer.defaults["lr"])}
    if scheduler is not None:
        state["scheduler"] = [scheduler.state_dict()]  # dcp saves a list as a whole, and a dict key by key
    return state


def _unreadable(path, cause):
    reason = "it is damaged, or of another model: name another folder"
    if isinstance(cause, FileNotFoundError):
        reason = "some shards are missing: all machines must share the folder"
    return f"cannot load {path}: {reason} ({type(cause).__name__}: {cause})".splitlines()[0]


def _run_dcp(function, state, path):
    """Run dcp.save or dcp.load on every rank; returns the first failure of any rank, or None."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in one process, where it is right
            function(state, checkpoint_id=path, process_group=dist.patient_group())
    except CheckpointException as failure:  # raised on every rank, after all have ended
        lowest_rank = min(failure.failures)
        cause, _ = failure.failures[lowest_rank]
        return cause
    return None
