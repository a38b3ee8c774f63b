"""Save and resume: replicated state in one file, sharded state in a folder to which every rank writes.

    epoch, step = checkpoint.load(path, model, optimizer)            # (0, 0) if there is none
    checkpoint.save(path, model, optimizer, epoch=epoch + 1)         # every rank calls it

    epoch, step, best = checkpoint.load(path, model, optimizer, best=math.inf)    # plain values too
    checkpoint.save(path, model, optimizer, epoch=epoch + 1, best=best)

    epoch = checkpoint.load_sharded(folder, model, optimizer)        # 0 if there is none
    checkpoint.save_sharded(folder, model, optimizer, epoch + 1)

    preemption = checkpoint.Preemption()
    preempted = preemption.agreed()                                  # after each step: has a rank received SIGTERM?

All four take a `scheduler`, and `settings`: options that a resumed run must share with the one that saved.

Any number of processes can load what any number has saved. A kill at any moment leaves the old snapshot or the new one;
but `save_sharded` first deletes a checkpoint of the same epoch or step.
Disk and file errors are one-line messages, on every rank. A file is loaded with `weights_only=True`, so nothing in it
is executed; parts of a folder are pickles, so load only folders that you trust.
"""

import contextlib
import copy
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
import zipfile
from concurrent import futures

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distributed as dist

NO_SNAPSHOT = (-1, -1)  # instead of (epoch, step)
NO_CHECKPOINT = (0, "")  # instead of (epoch or step, name of the folder)
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
        _sync_folder(os.path.dirname(os.path.abspath(path)))
    finally:
        if old is not None:
            threading.Thread(target=os.close, args=(old,)).start()


def _sync_folder(path):
    """Write a rename in the folder `path` to the disk, where that is possible."""
    try:
        folder = os.open(path, os.O_RDONLY)
    except PermissionError:  # this user may write to the folder, but not read it
        return
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(folder)


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
    alone writes, from the second save on. The buffers of all models become rank 0's on all ranks, as in DDP. Raises
    DistributedError on every rank if weights differ between ranks, if the model is sharded, if a node cannot write, or
    if a value could not be loaded again, like a numpy number or a Path; that node's old file is then unchanged.
    """
    parts = _parts(model, optimizer, scheduler, more)
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            dist.check_in_sync(part, name=name)  # rank 0's weights alone are saved
            dist.sync_params(part.buffers())  # so that all nodes save the same
    plain_values = {name: part for name, part in parts.items() if not _has_state(part)}
    plain_values = _with_tensors(plain_values, torch.Tensor.cpu)
    plain_values = dist.broadcast_object(plain_values, group=dist.patient_group())
    error = None
    if _is_writer(path):
        snapshot = {"epoch": epoch, "step": step, **plain_values}
        for name, part in parts.items():
            if _has_state(part):
                snapshot[name] = part.state_dict()
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
    as in `save`. Local rank 0 of each node reads the pair in `path`. The one with the highest pair then reads its whole
    file, checks it, and sends it, tensor by tensor. Until it is restored, each rank holds the whole snapshot in the
    CPU's memory. The optimizer gets the learning rate and all other options of the snapshot, even if it was built with
    others. Raises
    DistributedError on every rank if a model is sharded, if the newest file is damaged or was saved from another model
    or other parts, or if the pair in any node's file cannot be read.
    """
    parts = _parts(model, optimizer, scheduler, more)
    position, error = NO_SNAPSHOT, None
    if dist.get_local_rank() == 0:
        _, position, error = _read(path, only_position=True)
    dist.raise_on_all(error, dist.patient_group())
    found = dist.gather_objects((position, dist.get_rank(), _location(path)), dist.patient_group())
    position, holder, location = max(found, key=lambda entry: entry[0])  # if several are equal, the lowest rank's
    if position == NO_SNAPSHOT:
        plain_values = [part for part in parts.values() if not _has_state(part)]
        return 0, 0, *plain_values
    snapshot = None
    if dist.get_rank() == holder:
        snapshot, _, error = _read(path)
    dist.raise_on_all(error, dist.patient_group())
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
    except dist.DistributedError:
        raise
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
        is_model = isinstance(part, nn.Module)
        if is_model and any(hasattr(param, "to_local") for param in part.parameters()):  # a DTensor is a shard
            raise dist.DistributedError(f"the {name} is sharded: use save_sharded and load_sharded, not save and load")
    return parts


def _read(path, only_position=False):
    """Returns (snapshot, (epoch, step), None), or (None, NO_SNAPSHOT, an error message or None).

    With `only_position` it does not read the tensors, which are most of the file, and the snapshot is None.
    """
    location = _location(path)
    try:
        with zipfile.ZipFile(path) as archive:  # raises if the file was cut off
            damaged = None
            if not only_position:
                damaged = archive.testzip()  # torch.load compares no checksum
            if damaged:
                raise ValueError(f"checksum of {damaged}")
        refused = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        if refused:
            line = f"{location} contains {refused}, which weights_only=True cannot load"
            return None, NO_SNAPSHOT, f"{line}: convert it, or delete or rename the file"
        snapshot = torch.load(path, map_location="cpu", weights_only=True, mmap=only_position)
        position = int(snapshot["epoch"]), int(snapshot["step"])
        if only_position:
            snapshot = None
        return snapshot, position, None
    except FileNotFoundError:
        return None, NO_SNAPSHOT, None
    except OSError as failure:
        return None, NO_SNAPSHOT, f"cannot read {location}: {failure.strerror}: correct that, or delete or rename it"
    except KeyError as failure:
        line = f"{location} has no {failure}: checkpoint.save has not written it. Choose another path"
        return None, NO_SNAPSHOT, line
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


VISIBLE_SECONDS = 60  # so late may NFS show a new file to other machines


@dist.watched
def save_sharded(
    folder, model, optimizer, epoch=None, scheduler=None, frozen=True, step=None, keep=None, settings=None
):
    """Write `folder`/epoch-N or step-N: every rank writes its shards of a model that fully_shard or DDP has wrapped.

    `epoch` or `step` is the next one to run, at least 1. Give one of the two, or else ValueError is raised. No random
    state is saved: seed each epoch. Its `.metadata` is written last, and a folder without it is ignored, so a kill does
    no harm. Once it is complete, all but the newest `keep` checkpoints are deleted; None keeps all of them. Without
    `frozen`, parameters that are not trained are left out: load it in the same way, into a model that has them. Rank 0
    collects the plans of all ranks, so it needs a socket to each. Raises DistributedError on every rank if weights that
    should be equal differ between ranks, if the folder counts in the other unit, if a rank cannot write, or if machines
    do not share the folder; what was written is then removed.
    https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    """
    import torch.distributed.checkpoint as dcp  # takes 0.5 s

    if (epoch is None) == (step is None):
        raise ValueError("give epoch or step, and not both")
    if step is None:
        unit, number = "epoch", epoch
    else:
        unit, number = "step", step
    if number < 1:
        raise ValueError(f"{unit} must be at least 1, the next one to run, got {number}")
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be at least 1, or None, got {keep}")
    for module in model.modules():
        if hasattr(module, "reshard"):  # after an evaluation the root of FSDP is gathered, perhaps in bfloat16
            module.reshard()
    dist.check_in_sync(model)
    path = os.path.join(os.path.abspath(folder), f"{unit}-{number}")
    error = None
    if dist.is_primary():
        error = _refusal_of_two_units(folder, [f"{unit}-{number}"])
    dist.raise_on_all(error, dist.patient_group())
    if dist.is_primary():  # what an interrupted save left; if this fails, the save reports it
        _delete_checkpoint(path)
    _sync_buffers(model)
    dist.raise_on_all(None, dist.patient_group())  # wait until the folder is removed
    state = _sharded_state(model, optimizer, scheduler, settings, frozen)
    failure = _run_dcp(dcp.save, state, checkpoint_id=path)
    if failure is not None:
        if dist.is_primary():
            shutil.rmtree(path, ignore_errors=True)
        cause = f"{type(failure).__name__}: {failure}".splitlines()[0]
        raise dist.DistributedError(f"cannot save {path}, is the disk full? ({cause})", on_all_ranks=True)
    _refuse_separate_folders(path)
    if keep is not None and dist.is_primary():
        _delete_all_but_newest(folder, keep, path)


def _refuse_separate_folders(path):
    """Raises DistributedError on every rank if a rank does not see the index that rank 0 has just written."""
    end = time.monotonic() + VISIBLE_SECONDS
    index = os.path.join(path, ".metadata")
    while not os.path.exists(index) and time.monotonic() < end:
        time.sleep(0.1)
    error = None
    if not os.path.exists(index):
        line = f"rank {dist.get_rank()} does not see {index}, which rank 0 has written"
        error = f"{line}: all machines must share the folder"
    try:
        dist.raise_on_all(error, dist.patient_group())
    except dist.DistributedError:
        shutil.rmtree(path, ignore_errors=True)  # a part of the shards
        raise


def _refusal_of_two_units(folder, names=()):
    """An error message if `folder` and `names` together have epochs and steps: the newest could not be told."""
    names = [*names, *[name for _, name in _checkpoints(folder)]]
    if len({name.partition("-")[0] for name in names}) < 2:
        return None
    line = f"{os.path.abspath(folder)} has checkpoints of epochs and of steps, {names[0]} and {names[-1]}"
    return f"{line}: name a folder for one kind"


def _delete_checkpoint(path):
    with contextlib.suppress(OSError):
        os.remove(os.path.join(path, ".metadata"))  # first, because it marks a complete checkpoint
    shutil.rmtree(path, ignore_errors=True)


def _delete_all_but_newest(folder, keep, saved):
    """Delete the others, and what interrupted saves left. The one just `saved` stays even if others count further."""
    kept = [name for _, name in _checkpoints(folder)[:keep]]
    for _, name in _checkpoints(folder, complete=False):
        path = os.path.join(os.path.abspath(folder), name)
        if name not in kept and path != saved:
            _delete_checkpoint(path)


def _sync_buffers(model):
    """Buffers are not sharded: save rank 0's. If stages of a pipeline have different ones, leave them as they are."""
    buffers = [f"{name} {tuple(buffer.shape)}" for name, buffer in model.named_buffers()]
    if len(set(dist.gather_objects(_digest(buffers), dist.patient_group()))) == 1:
        dist.sync_params(model.buffers())


def _digest(names):
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def _names_of_all_ranks(names):
    """Every rank's names, each once. Each different list is sent once: all ranks of FSDP have the same one."""
    digests = dist.gather_objects(_digest(names), dist.patient_group())
    result = {}
    for digest in dict.fromkeys(digests):
        names_of_rank = dist.broadcast_object(names, digests.index(digest), dist.patient_group())
        result.update(dict.fromkeys(names_of_rank))
    return list(result)


@dist.watched
def load_sharded(folder, model, optimizer, scheduler=None, frozen=True, settings=None):
    """Load the newest complete checkpoint, whatever the number of ranks then and now; returns the next epoch or step.

    Without a checkpoint it changes nothing and returns 0. All options of the optimizer's groups are restored, such as
    weight decay. Without a scheduler, the learning rates are then multiplied by new / old if the optimizer is now built
    with another base rate. Raises DistributedError on every rank if the checkpoint cannot be read, is incomplete, does
    not match the model, has other `settings`, or was saved with a scheduler or settings and is loaded without, or the
    reverse. It has no checksums: changed bits are not noticed.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    dist.raise_on_all(_refusal_of_two_units(folder), dist.patient_group())
    complete = _checkpoints(folder)
    newest, name = max(dist.gather_objects(complete[0] if complete else NO_CHECKPOINT, dist.patient_group()))
    if newest == 0:
        return 0
    path = os.path.join(os.path.abspath(folder), name)
    if torch.is_tensor(optimizer.defaults["lr"]):
        optimizer.defaults["lr"] = optimizer.defaults["lr"].clone()  # the groups have the same tensor, which dcp fills
    optimizer.zero_grad()  # if there are gradients, torch loads no state into a new optimizer, and says nothing
    state = _sharded_state(model, optimizer, scheduler, settings, frozen)
    base_rate = state["lr"]
    names = set(_names_of_all_ranks(list(state["model"])))
    metadata, error = None, None
    if dist.is_primary():
        metadata, error = _read_metadata(path, names)
    dist.raise_on_all(error, dist.patient_group())
    metadata = dist.broadcast_object(metadata, group=dist.patient_group())
    saved = metadata.state_dict_metadata
    error = None
    for name, part in (("scheduler", scheduler), ("settings", settings)):
        was_saved = any(key.partition(".")[0] == name for key in saved)
        if was_saved != (part is not None):
            how = "with" if was_saved else "without"
            error = f"{path} was saved {how} `{name}`: load it {how} `{name}`"
    dist.raise_on_all(error, dist.patient_group())
    # A parameter that has never had a gradient has no optimizer state in the checkpoint.
    moments = state["optimizer"]["state"]
    prefixes = _prefixes(saved)
    known = {name: value for name, value in moments.items() if f"optimizer.state.{name}" in prefixes}
    state["optimizer"]["state"] = known
    failure = _run_dcp(dcp.load, state, storage_reader=_reader(path, metadata))
    if failure is not None:
        raise dist.DistributedError(_unreadable(path, failure), on_all_ranks=True)
    if settings is not None:
        settings.load_state_dict(state["settings"][0])
    for group in state["optimizer"]["param_groups"]:  # torch compares them with this rank's, if SGD has no state
        group["params"] = [name for name in group["params"] if name in state["model"]]
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


def _checkpoints(folder, complete=True):
    """(N, name) of the folders epoch-N and step-N, the highest N first. A complete one has a `.metadata`."""
    found = []
    if os.path.isdir(folder):
        for name in os.listdir(folder):
            is_complete = os.path.exists(os.path.join(folder, name, ".metadata"))
            if re.fullmatch(r"(epoch|step)-\d+", name) and (is_complete or not complete):
                found.append((int(name.partition("-")[2]), name))
    return sorted(found, reverse=True)


def _read_metadata(path, names):
    """Returns (metadata, None), or (None, an error message). Rank 0 reads it for all: it lists every shard."""
    from torch.distributed.checkpoint import FileSystemReader

    try:
        metadata = FileSystemReader(path).read_metadata()
        _refuse_missing_in_model(metadata.state_dict_metadata, names)
    except Exception as failure:  # whatever unpickling raises on bytes that are no index
        return None, _unreadable(path, failure)
    return metadata, None


def _reader(path, metadata):
    from torch.distributed.checkpoint import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *args, **kwargs):
            return metadata

    return Reader(path)


def _prefixes(keys):
    """ "a.b.c" has the prefixes "a.b" and "a". All of them, of all keys."""
    prefixes = set()
    for key in keys:
        while key:
            key = key.rpartition(".")[0]
            if key in prefixes:
                break
            prefixes.add(key)
    return prefixes


def _refuse_missing_in_model(saved, names):
    """dcp.load would silently leave out what a bigger model has saved. `names` has the parameters of all ranks."""
    for key in saved:
        name = key.removeprefix("model.")
        if key.startswith("model.") and "_extra_state" not in key and name not in names:
            raise KeyError(f"the model has no {name}")


def _sharded_state(model, optimizer, scheduler, settings, frozen):
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
    for group in groups:
        group["params"] = _names_of_all_ranks(group["params"])
    state = {"model": model_state, "optimizer": optimizer_state, "lr": float(optimizer.defaults["lr"])}
    for name, part in (("scheduler", scheduler), ("settings", settings)):
        if part is not None:
            state[name] = [part.state_dict()]  # dcp saves a list as a whole, and a dict key by key
    return state


def _unreadable(path, cause):
    reason = "it is damaged, or of another model: name another folder"
    if isinstance(cause, FileNotFoundError):
        reason = "some shards are missing: all machines must share the folder"
    return f"cannot load {path}: {reason} ({type(cause).__name__}: {cause})".splitlines()[0]


def _run_dcp(function, state, **where):
    """Run dcp.save or dcp.load on every rank; returns the first failure of any rank, or None."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in one process, where it is right
            function(state, process_group=dist.patient_group(), **where)
    except CheckpointException as failure:  # raised on every rank, after all have ended
        lowest_rank = min(failure.failures)
        cause, _ = failure.failures[lowest_rank]
        return cause
    return None


# ---- save before a machine is taken away ----------------------------------------------------------------------------

CHECK_SECONDS = 1  # between two steps after which the ranks read whether to stop

_preemptions = itertools.count()  # the same on all ranks


class Settings:
    """Values that a resumed run must share with the run that saved, by the names that an error message should have.

        settings = checkpoint.Settings({"--heads": args.heads, "--seed": args.seed})
        checkpoint.load(path, model, optimizer, settings=settings)

    No tensor's shape shows them, so another value would be a silent mistake. Loading raises DistributedError instead.
    """

    def __init__(self, values):
        self.values = values

    def state_dict(self):
        return dict(self.values)  # a copy, because dcp writes what it loads into this dict

    def load_state_dict(self, saved):
        for name, value in self.values.items():
            if saved[name] != value:
                line = f"the checkpoint was saved with {name} {saved[name]}, not {value}"
                raise dist.DistributedError(f"{line}: use the same, or save elsewhere", on_all_ranks=True)


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
    may stop alone, because the others would wait for it in the next step. So rank 0 decides. All ranks make a check
    after the same steps, about one second apart. At a check, each rank reads from the job's store what rank 0 wrote
    there at the check before:

        check after step    8                  16                            24
        rank 1              reads "go on"      has received SIGTERM,         reads "stop"
                                               writes that; reads "go on"
        rank 0              reads "go on",     reads "go on",                reads "stop"
                            writes "go on"     writes "stop"

    A rank waits only if it is a whole check ahead of rank 0. An all-reduce after each step would instead make all ranks
    wait for the slowest network connection of all. From SIGTERM to the last step it takes two or three seconds, or
    three steps if these are longer. Make one on every rank, in the main thread, once the process group is made.
    """

    def __init__(self):
        self.received = False
        self.step = 0  # steps since then
        self.number = 0  # of the next check
        self.next_check = 1  # its step
        self.last_check = (0, time.monotonic())
        self.store = None
        if dist.get_world_size() > 1:
            store = torch_dist.distributed_c10d._get_default_store()
            self.store = torch_dist.PrefixStore(f"preemption {next(_preemptions)}", store)
            if dist.is_primary():
                self.store.set("0", json.dumps({"stop": False, "next": 2}))
        signal.signal(signal.SIGTERM, self.receive)

    def receive(self, number, frame):
        self.received = True

    def agreed(self):
        """Call it after each step, on every rank. It returns True on all ranks after the same step."""
        self.step += 1
        if self.store is None:
            return self.received
        if self.step < self.next_check:
            return False
        if self.received:
            self.store.set("received", "")
        decision = json.loads(self.store.get(str(self.number)))
        if decision["stop"]:
            return True
        self.number += 1
        self.next_check = decision["next"]
        if dist.is_primary():
            self.decide()
        return False

    def decide(self):
        """Write what all ranks read at the next check: whether to stop there, and the step of the check after it."""
        step, when = self.last_check
        self.last_check = (self.step, time.monotonic())
        seconds_per_step = (time.monotonic() - when) / (self.step - step)
        steps = min(int(CHECK_SECONDS / seconds_per_step), 2 * (self.next_check - self.step))
        decision = {"stop": self.store.check(["received"]), "next": self.next_check + max(1, steps)}
        self.store.set(str(self.number), json.dumps(decision))
        if self.number >= 1000:
            self.store.delete_key(str(self.number - 1000))  # no rank is so far behind

    def leave(self):
        """Call it after the save, on every rank. It exits with status 143, so that torchrun restarts the processes."""
        dist.cleanup()  # as at the end of training: all ranks leave together
        sys.exit(128 + signal.SIGTERM)


def ignore_sigterm(worker_id):
    """The `worker_init_fn` of a DataLoader: its processes get SIGTERM too, but the ranks need more batches to save."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
