"""Save and resume: what all ranks hold alike in one file, what is sharded in a folder to which all ranks write.

    epoch, step = checkpoint.load(path, model, optimizer)            # (0, 0) if there is none
    checkpoint.save(path, model, optimizer, epoch=epoch + 1)         # every rank calls it

    epoch = checkpoint.load_sharded(folder, model, optimizer)        # 0 if there is none
    checkpoint.save_sharded(folder, model, optimizer, epoch + 1)

Both are read by any number of processes, whatever number has written. A kill at any moment leaves an older one or the
new one. What goes wrong with a disk or a file is one line, on every rank. A file is loaded with `weights_only=True`, so
nothing in it is executed; the index of a folder is a pickle: load only those that you trust.
"""

import contextlib
import copy
import functools
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
from torch.nn.parallel import DistributedDataParallel

import distributed as dist


@contextlib.contextmanager
def atomic(path):
    """A new file, to write and to read, which takes the place of `path` when the block ends well.

    A power cut leaves the old or the new one, a block that fails the old one. Raises SystemExit with one line if the
    disk is full or refuses. Quicker than to write and then to sync: the disk works while the block does, and the old
    file is freed in the background.
    """
    temporary = f"{path}.{dist.get_rank()}.tmp"  # nodes may share the folder
    writing = threading.Lock()
    try:
        with open(temporary, "w+b") as file, futures.ThreadPoolExecutor(max_workers=1) as pool:
            with writing:
                syncing = pool.submit(_sync_while, writing, file.fileno())
                yield file
            syncing.result()  # raises what it has met
            file.flush()
            os.fsync(file.fileno())
        old = os.open(path, os.O_RDONLY) if os.access(path, os.R_OK) else None  # held, so that replace frees nothing
        os.replace(temporary, path)
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        if old is not None:
            threading.Thread(target=os.close, args=(old,)).start()
    except BaseException as failure:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        # torch.save turns the OSError of a full disk into a RuntimeError.
        cause = failure.__context__ if isinstance(failure, RuntimeError) else failure
        if not isinstance(cause, OSError):
            raise
        reason = f"{cause.strerror}: make room there, or choose another path"
        raise SystemExit(f"cannot save {_location(path)}: {reason}") from None


def _sync_while(writing, fd):
    while not writing.acquire(timeout=0.1):
        os.fsync(fd)


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


def save(path, model, optimizer, scheduler=None, epoch=0, step=0):
    """Write to `path`, once per node, all that is needed to go on at `step` of `epoch`, the next to run.

    Every rank must call it. The model is saved unwrapped, as any number of processes can load it. Raises SystemExit
    with one line, on every rank, if a node cannot write, or if a state holds what could not be loaded again, as a
    numpy number or a Path; that node's old file is then as it was.
    """
    parts, error = _parts(model, optimizer, scheduler), None
    dist.sync_params(parts["model"].buffers())  # with rank 0's, as DDP does: all nodes save the same
    if dist.get_local_rank() == 0:
        states = {name: part.state_dict() for name, part in parts.items()}
        try:
            with atomic(path) as file:
                torch.save({**states, "epoch": epoch, "step": step}, file)
                file.seek(0)
                if refused := ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(file)):
                    line = f"cannot save {_location(path)}: it would hold {refused}, which is not loaded again"
                    raise SystemExit(f"{line}: make a plain number, string, list or dict of that")
        except SystemExit as failure:
            error = str(failure.code)
    dist.agree(error=error)


def load(path, model, optimizer, scheduler=None):
    """Restore the newest snapshot of all nodes on every rank; returns its (epoch, step), the next to run.

    Without one anywhere it changes nothing and returns (0, 0). Every rank must call it; local rank 0 of each node looks
    for `path`, and one that has the newest sends it to all, tensor by tensor. Raises SystemExit with one line, on
    every rank, if any node's file is damaged, cannot be read, or was saved from another model or other parts.
    """
    snapshot, position, error = _read(path) if dist.get_local_rank() == 0 else (None, (-1, -1), None)
    position, holder, location = max(dist.agree((position, dist.get_rank(), _location(path)), error))
    if position < (0, 0):
        return 0, 0
    if dist.get_rank() != holder:
        snapshot = None  # an older one makes room for the newest
    if dist.get_world_size() > 1:
        snapshot = _send(snapshot, holder)
    parts = _parts(model, optimizer, scheduler)
    saved, wanted = (" and ".join(sorted(names)) for names in (snapshot.keys() - {"epoch", "step"}, parts))
    if saved != wanted:
        raise SystemExit(f"{location} holds the state of {saved}, not of {wanted}: save and load the same parts")
    try:
        for name, part in parts.items():
            part.load_state_dict(snapshot[name])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as failure:
        cause = " ".join(str(failure).split())[:300]
        raise SystemExit(f"{location} is another model's ({cause}): move it away, or choose another path") from None
    return position


def settle_buckets(model, compute_loss):
    """Spend one backward of `compute_loss()`, a loss of `model` on any batch, before training begins or goes on.

    DDP lays out its gradient buckets anew after the first backward, and the layout decides in which order three or more
    ranks' gradients are summed: a resumed run's first step would differ in the last bit from the uninterrupted run's.
    Parameters and buffers stay as they are, gradients are cleared; seed after it. Without DDP it does nothing.
    """
    if not isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel):
        return
    buffers = [buffer.clone() for buffer in model.buffers()]
    compute_loss().backward()
    model.zero_grad()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)


def _parts(model, optimizer, scheduler):
    while hasattr(model, "_orig_mod") or isinstance(model, DistributedDataParallel):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module  # torch.compile's, or DDP's
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return {name: part for name, part in parts.items() if part is not None}


def _read(path):
    """A snapshot, its (epoch, step), or (-1, -1) if there is none, and what is wrong with it, or None."""
    location, nothing = _location(path), (None, (-1, -1))
    try:
        if damaged := zipfile.ZipFile(path).testzip():  # torch.load compares no checksum
            raise ValueError(f"checksum of {damaged}")
        if refused := ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(path)):
            return *nothing, f"{location} holds {refused}, which is not loaded: convert that, or move it away"
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
        return snapshot, (int(snapshot["epoch"]), int(snapshot["step"])), None
    except FileNotFoundError:
        return *nothing, None
    except OSError as failure:
        return *nothing, f"cannot read {location}: {failure.strerror}: correct that, or move it away"
    except Exception as failure:  # whatever the two readers raise on bytes that are no snapshot
        cause = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0][:200]}"
        return *nothing, f"{location} is damaged or no snapshot ({cause}): move it away, or put an intact copy there"


def _send(snapshot, holder):
    """Rank `holder`'s `snapshot` on every rank: the containers at once, then one tensor after the other."""
    frame = dist.agree(_over_tensors(lambda tensor: tensor.to("meta"), snapshot))[holder]
    if dist.get_rank() != holder:
        snapshot = _over_tensors(lambda tensor: torch.empty_like(tensor, device="cpu"), frame)
    tensors = []
    _over_tensors(tensors.append, snapshot)
    dist.sync_params(tensors, src=holder)
    return snapshot


def _over_tensors(function, value):
    """`value`, which `weights_only=True` has loaded, with `function` of every tensor in its place."""
    if torch.is_tensor(value):
        return function(value)
    if isinstance(value, dict):
        result = copy.copy(value)  # keeps a state_dict's versions of the modules, which are an attribute
        dict.update(result, ((key, _over_tensors(function, part)) for key, part in value.items()))  # a Counter's adds
        return result
    if isinstance(value, list | tuple):
        return type(value)([_over_tensors(function, part) for part in value])
    return value


# ---- a folder per epoch, to which every rank writes its part --------------------------------------------------------


def save_sharded(folder, model, optimizer, epoch):
    """Write `folder`/epoch-N, every rank its shards of a model as prepare_fsdp_model or prepare_ddp_model gives it.

    It counts once it has a `.metadata`, which is written last, so a kill does no harm. Older ones are kept. Raises
    SystemExit with one line, on every rank, if one of them cannot write; what it has written is then removed.
    https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    """
    import torch.distributed.checkpoint as dcp  # takes 0.5 s

    path = os.path.join(os.path.abspath(folder), f"epoch-{epoch}")
    if dist.is_primary():  # what an interrupted save left; first what makes it count
        with contextlib.suppress(OSError):  # of which the save will tell, if it matters
            os.remove(os.path.join(path, ".metadata"))
        shutil.rmtree(path, ignore_errors=True)
    dist.sync_params(model.buffers())  # which each rank has whole: rank 0's are saved
    dist.barrier()
    try:
        with _as_one_line(lambda cause: f"cannot save {path}, is the disk full? ({type(cause).__name__}: {cause})"):
            dcp.save(_sharded_state(model, optimizer), checkpoint_id=path)
    except SystemExit:
        if dist.is_primary():
            shutil.rmtree(path, ignore_errors=True)
        raise


def load_sharded(folder, model, optimizer):
    """Fill in the newest complete checkpoint, whatever the number of ranks then and now; returns the next epoch.

    Without one it changes nothing and returns 0. Every parameter group goes on with its learning rate of then, in
    proportion to the one that the optimizer is built with now. Raises SystemExit with one line, on every rank, if the
    checkpoint cannot be read, is not all there, or another model's. Changed bits are not noticed: it has no checksums.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    names = os.listdir(folder) if os.path.isdir(folder) else []
    complete = [name for name in names if os.path.exists(os.path.join(folder, name, ".metadata"))]
    epochs = [int(name.removeprefix("epoch-")) for name in complete if re.fullmatch(r"epoch-\d+", name)]
    newest = max(dist.agree(max(epochs, default=0)))
    if not newest:
        return 0
    path = os.path.join(os.path.abspath(folder), f"epoch-{newest}")
    state, rate = _sharded_state(model, optimizer), float(optimizer.defaults["lr"])
    saved, error = {}, None
    try:
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        names = {key.removeprefix("model.") for key in saved if key.startswith("model.") and "_extra_state" not in key}
        if extra := names - state["model"].keys():  # which dcp.load would leave out
            raise KeyError(f"the model has no {min(extra)}")
    except Exception as failure:  # whatever unpickling raises on bytes that are no index
        error = _unreadable(path, failure)
    dist.agree(error=error)
    # A parameter that has never had a gradient has no state of the optimizer in it.
    moments = state["optimizer"]["state"]
    known = [name for name in moments if any(key.startswith(f"optimizer.state.{name}.") for key in saved)]
    state["optimizer"]["state"] = {name: moments[name] for name in known}
    with _as_one_line(functools.partial(_unreadable, path)):
        dcp.load(state, checkpoint_id=path)
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(model, optimizer, **parts, options=StateDictOptions(strict=False))  # of `known`; dcp.load was
    for group in optimizer.param_groups:
        group["lr"] *= rate / state["lr"]
    dist.print_primary(f"Going on from {path}")
    return newest


def _sharded_state(model, optimizer):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "lr": float(optimizer.defaults["lr"])}


def _unreadable(path, cause):
    reason = "damaged, or of another model: name another folder"
    if isinstance(cause, FileNotFoundError):
        reason = "not all shards are here: all machines must share the folder"
    return f"cannot load {path}: {reason} ({type(cause).__name__}: {cause})".splitlines()[0]


@contextlib.contextmanager
def _as_one_line(describe):
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # by one process, as is meant
            yield
    except CheckpointException as failure:  # raised on every rank, after all have ended
        cause, _ = next(iter(failure.failures.values()))
        raise SystemExit(describe(cause).splitlines()[0]) from None
