"""What distributed scripts share: find this process's rank and device, wrap the model, split data, reduce metrics.

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import distributed as dist


    def main_worker(local_rank, world_size):  # runs in every process
        dist.init_process_group()  # nccl for GPUs, gloo for CPUs
        device = dist.get_device()  # the GPU of this process, or the CPU

        torch.manual_seed(0)  # every process draws the same data
        inputs = torch.randn(1024, 8)
        dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        sampler = dist.data_sampler(dataset, distributed=True, shuffle=True)  # gives each process its share
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)

        model = dist.prepare_ddp_model(torch.nn.Linear(8, 1).to(device))  # averages gradients over all processes
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for epoch in range(3):
            sampler.set_epoch(epoch)  # another order in each epoch
            for x, y in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
                loss.backward()
                optimizer.step()
            dist.check_in_sync(model)  # stops if the weights of two processes differ
            loss = dist.reduce(loss.detach())  # the average over all processes, on every process
            dist.print_primary(f"epoch {epoch}: loss {loss.item():.4f}")  # printed once


    if __name__ == "__main__":
        dist.launch(main_worker)

`python script.py` starts one process per visible GPU, so `CUDA_VISIBLE_DEVICES=2,3 python script.py` starts two. Under
torchrun the same file uses the processes that torchrun started. In a single process these functions work too, without
communication. Only `all_gather_single`, `reduce_scatter_single` and methods of DDP, like `no_sync`, need an
`if world_size > 1`.
"""

import atexit
import contextlib
import functools
import gc
import hashlib
import inspect
import itertools
import multiprocessing
import os
import resource
import socket
import stat
import sys
import threading
import time
import uuid
import weakref
import zlib
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as torch_dist

# DDP imports this module when it is first used. If a process group exists by then, default arguments in it keep the
# group alive until the interpreter ends, and gloo's threads may abort (see `_drop_destroyed_groups`).
import torch.distributed.nn.functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, Sampler, default_collate
from torch.utils.data.distributed import DistributedSampler

import spawn


class DistributedError(RuntimeError):
    """An expected failure, described in one line. `launch` prints the line and exits with status 1.

    With `on_all_ranks` every rank raises the same error, and under torchrun rank 0 alone prints it.
    """

    def __init__(self, line, on_all_ranks=False):
        super().__init__(line)
        self.on_all_ranks = on_all_ranks


# ---- rank and device ----------------------------------------------------------------------------------------------


def is_launched():
    """Did torchrun, `launch` or another launcher start this process? Both RANK and WORLD_SIZE must be set."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def get_rank():
    """This process's number in the whole job, 0 <= rank < world_size. It decides who prints and writes files."""
    if is_dist_avail_and_initialized():
        return torch_dist.get_rank()
    return int(os.environ["RANK"]) if is_launched() else 0


def get_local_rank():
    """This process's number on its machine. It decides which GPU is used.

    Raises DistributedError if a launcher of several processes has set RANK but not LOCAL_RANK.
    """
    if is_launched() and get_world_size() > 1 and "LOCAL_RANK" not in os.environ:
        raise DistributedError("RANK is set, but LOCAL_RANK is not: set it to the process's number on its machine")
    return int(os.environ.get("LOCAL_RANK", 0))


def get_world_size():
    """The number of processes in the job."""
    if is_dist_avail_and_initialized():
        return torch_dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def is_primary():
    """Is this rank 0? Do not call a collective under `if is_primary()`: the others would not take part."""
    return get_rank() == 0


def print_primary(*args, **kwargs):
    """`print` on rank 0 only."""
    if is_primary():
        print(*args, **kwargs)


def get_device():
    """GPU number `local_rank`, or the CPU if no GPU is visible. Raises DistributedError if there are too few GPUs."""
    gpus = torch.cuda.device_count()
    if gpus == 0:
        return torch.device("cpu")
    local_rank = get_local_rank()
    if local_rank >= gpus:
        raise DistributedError(
            f"local rank {local_rank} has no GPU: start no more processes on this machine than its visible GPUs, {gpus}"
            ", or let every task see all of its GPUs (srun --gpu-bind=none)"
        )
    return torch.device("cuda", local_rank)


# ---- a rank that waits --------------------------------------------------------------------------------------------

WAIT_SECONDS = 30  # after so long in one call, a rank says for whom it waits

_current_call = None  # (function, how many calls of it there have been, the time) of the `watched` call in progress
_waiting_ended = None  # the event that ends the watching thread of the current process group


def watched(function):
    """A decorator for a function that every rank must call: a rank that waits in it for long says so on stderr.

    The line names the function and the ranks that have not called it: `rank 0 has waited 30 s in checkpoint.save for
    rank 1: every rank must call it`. Each rank has one thread, which sleeps. A call itself only notes that it began.
    """
    module = function.__module__.rpartition(".")[2]
    if function.__module__ == __name__:
        module = "dist"
    name = f"{module}.{function.__name__}"
    calls = itertools.count(1)

    @functools.wraps(function)
    def watched_function(*args, **kwargs):
        global _current_call
        if _current_call is not None:  # a watched function has called this one
            return function(*args, **kwargs)
        _current_call = (name, next(calls), time.monotonic())
        try:
            return function(*args, **kwargs)
        finally:
            _current_call = None

    return watched_function


def _start_watching(store):
    global _waiting_ended
    _stop_watching()
    _waiting_ended = threading.Event()
    # The store's own connection is in use while this process waits for a key.
    arguments = (store.clone(), get_rank(), get_world_size(), _waiting_ended)
    threading.Thread(target=_watch, args=arguments, daemon=True).start()


def _stop_watching():
    if _waiting_ended is not None:
        _waiting_ended.set()


def _watch(store, rank, world_size, ended):
    """A rank that waits notes it in the store. Later the first of them reads which ranks have not."""
    noted = None
    printed = None
    while not ended.wait(WAIT_SECONDS / 10):
        call = _current_call
        if call is None:
            continue
        name, number, start = call
        key = f"waiting in {name} {number}"
        waited = time.monotonic() - start
        try:
            if waited > WAIT_SECONDS / 10:
                _probe_idle_connections()
                if noted != call:
                    noted = call
                    store.append(key, f"{rank},")
            if printed != call and waited > WAIT_SECONDS:
                printed = call
                _say_who_is_missing(store.get(key).decode(), rank, world_size, name, waited)
        except RuntimeError:  # the store is gone: the job is ending
            return


def _say_who_is_missing(noted, rank, world_size, name, waited):
    """`noted` has the ranks that wait in the same call, like "2,0,". Only the first of them prints."""
    waiting = [int(number) for number in noted.split(",") if number]
    missing = sorted(set(range(world_size)) - set(waiting))
    if missing:
        reason = f"for {_names_of(missing)}: every rank must call it"
    else:
        slow = "network" if name.startswith("dist.") else "disk"
        reason = f"with all other ranks: the {slow} is slow, or before it the ranks have called different collectives"
    if waiting[0] == rank:
        print(f"rank {rank} has waited {waited:.0f} s in {name} {reason}", file=sys.stderr, flush=True)


KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 12, "TCP_USER_TIMEOUT": 300_000}


def _probe_idle_connections():
    """Let the kernel ask the other end of each connection whether it is alive, and close it after 5 minutes of silence.

    A process that dies closes its connections, and its peers notice at once. A machine that loses its power or its
    network closes nothing, and its peers would wait for as long as their group allows. See `man 7 tcp`.
    """
    if socket.getdefaulttimeout() is not None:
        return  # the user's default would be set on each of these connections
    for fd in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # it has been closed by now
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as connection:
                    _probe(connection)


def _probe(connection):
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # macOS lacks some
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _names_of(ranks):
    """'rank 1', 'ranks 1 and 2', or 'ranks 1, 2, 3 and 5 more'."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= 4:
        return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:3]))} and {len(ranks) - 3} more"


# ---- process group ------------------------------------------------------------------------------------------------


def init_process_group(rank=None, world_size=None, backend=None, timeout=None):
    """Bind this process to its device and join the job's process group: nccl for GPUs, gloo for CPUs.

    Under a launcher, `rank` and `world_size` are ignored. Otherwise they are put into the environment, where the
    processes of a DataLoader find them, and `rank` is also used as the local rank, unless LOCAL_RANK is set. A
    collective fails after `timeout`, a datetime.timedelta; None is torch's default, 10 minutes for nccl and 30 for
    gloo. Pass more if one rank prepares data for longer while the others wait. It does nothing if a group exists. In
    one process without a launcher it binds the device and makes no group. Raises DistributedError for nccl without a
    GPU.
    """
    if is_dist_avail_and_initialized():
        return
    if is_launched():
        rank, world_size = get_rank(), get_world_size()
    elif (rank is None) != (world_size is None):
        raise ValueError("give both rank and world_size, or neither")
    elif rank is not None:  # the caller has started its processes itself, on one machine
        os.environ.setdefault("LOCAL_RANK", str(rank))
    device = get_device()
    if backend is not None and "nccl" in backend and device.type == "cpu":
        raise DistributedError(f"the backend {backend} needs a GPU, and none is visible: choose gloo, or leave it out")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size is None or (world_size == 1 and "MASTER_ADDR" not in os.environ):
        return
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    store = _fresh_store(rank, world_size, timeout or torch_dist.default_pg_timeout)
    torch_dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    # Wait until all ranks are connected. If a rank exits before that, the others fail.
    torch_dist.barrier()
    _start_watching(store)
    if world_size > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))  # for loader processes, which have no group


def is_dist_avail_and_initialized():
    """Is there a process group?"""
    return torch_dist.is_available() and torch_dist.is_initialized()


_patient_groups = weakref.WeakKeyDictionary()  # by the job's group, which may be destroyed and made again


def patient_group():
    """A gloo group of all ranks that waits for up to 2 hours, made at first use; None if there is no process group.

    It is used while saving and loading, when one rank may write for minutes. Under NCCL, torch.distributed.checkpoint
    would otherwise exchange objects on the GPUs, and NCCL would abort the job after 10 minutes. A peer that dies is
    noticed at once. A machine that loses its power or its network is noticed within 6 minutes by a rank that waits for
    it in a `watched` function. All ranks must call it.
    """
    if not is_dist_avail_and_initialized():
        return None
    world = torch_dist.group.WORLD
    if world not in _patient_groups:
        _patient_groups[world] = _sparse_gloo_group(timedelta(hours=2))
    return _patient_groups[world]


def pipeline_backend(dim):
    """For `backend_override` of init_device_mesh: a backend that suits pipelines, whose stages are dimension `dim`.

    In torch 2.15 "nccl" builds a ProcessGroupNCCL2, unless TORCH_DIST_USE_NCCL2=0. It sends to all ranks on one stream,
    so what goes to one neighbour waits for what goes to the other. "nccl-lazy" has a communicator and a stream for each
    pair of ranks. Returns {dim: "nccl-lazy"}, or None with gloo, in a single process, and with torch before 2.15, which
    has no such backend.
    """
    if not is_dist_avail_and_initialized():
        return None
    if torch_dist.get_backend() == "nccl" and torch_dist.is_backend_available("nccl-lazy"):
        return {dim: "nccl-lazy"}
    return None


def cleanup():
    """Destroy the process group. All ranks must call it; `launch` does when `worker_fn` returns.

    It does nothing inside an `except` block, or a `finally` after an error, so that this rank's error is reported
    before its peers fail.
    """
    error, _, _ = sys.exc_info()  # the error that is being handled
    if is_dist_avail_and_initialized() and error is None:
        _stop_watching()
        world = torch_dist.group.WORLD
        _destroyed_groups.append(world)
        _destroyed_groups.append(_patient_groups.pop(world, None))
        torch_dist.destroy_process_group()


@watched
def barrier():
    """Wait until every rank is here."""
    if get_world_size() > 1:
        torch_dist.barrier()


wait_for_everyone = barrier  # its name in https://github.com/joh-fischer/distributed-pytorch


# ---- data and model -----------------------------------------------------------------------------------------------


def data_sampler(dataset, distributed, shuffle, pad=True, seed=0):
    """A sampler that gives each rank its share of `dataset`.

    With `pad` all ranks get equally many samples, some of them twice if the length does not divide evenly: training
    needs it, since every step is a collective. With `pad=False` every sample is seen exactly once over all ranks, as
    a metric needs. Call `sampler.set_epoch(epoch)` before each epoch: the order depends on seed and epoch alone.
    Returns None if not `distributed`; pass shuffle=True to the DataLoader instead. Raises DistributedError if the data
    set has no length.
    """
    if not distributed:
        return None
    if not hasattr(dataset, "__len__"):
        name = type(dataset).__name__
        raise DistributedError(f"{name} has no length to split: see IterableDataset in docs/recipes.md")
    rank, world_size = get_rank(), get_world_size()
    if pad:
        return DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed)
    return _UnpaddedSampler(len(dataset), rank, world_size, shuffle, seed)


class _UnpaddedSampler(Sampler):
    """Every N-th index from the rank on, N being the world size, in the order in which DistributedSampler shuffles."""

    def __init__(self, length, rank, world_size, shuffle, seed):
        self.length = length
        self.own_places = range(rank, length, world_size)
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def __len__(self):
        return len(self.own_places)

    def __iter__(self):
        order = range(self.length)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.length, generator=generator).tolist()
        return (order[place] for place in self.own_places)

    def set_epoch(self, epoch):
        self.epoch = epoch


def local_batch_size(global_batch_size):
    """The batch size of this process, for a DataLoader: `global_batch_size` divided by the number of processes.

    Raises DistributedError if the global batch size is not a multiple of the number of processes.
    """
    world_size = get_world_size()
    if global_batch_size < 1 or global_batch_size % world_size:
        line = f"the global batch size is {global_batch_size}, not a multiple of the number of processes, {world_size}"
        raise DistributedError(line)
    return global_batch_size // world_size


class SeededBatches(Dataset):
    """A whole batch of `dataset` for each pair (seed, indices). What torch draws in it depends on the seed alone.

    A run that resumes within an epoch then draws the same numbers as one that was not interrupted, with any number of
    worker processes. Give the DataLoader a list of such pairs as its sampler, and `batch_size=None`.
    """

    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, seed_and_indices):
        seed, indices = seed_and_indices
        with torch.random.fork_rng(devices=[]):  # without worker processes, dropout draws from this generator too
            torch.default_generator.manual_seed(seed)
            if hasattr(self.dataset, "__getitems__"):  # it may give a whole batch
                batch = self.dataset.__getitems__(indices)
            else:
                batch = [self.dataset[index] for index in indices]
        if isinstance(batch, list):
            batch = default_collate(batch)
        return batch


def prepare_ddp_model(model, device_ids=None, **kwargs):
    """`model`, which must be on its device, wrapped in DistributedDataParallel; `model` itself at world size 1.

    `kwargs` go to DistributedDataParallel. `device_ids` may be left out: it is for scripts that pass it, and is ignored
    on the CPU. Gradients are views of the buckets that are reduced, which saves memory and the time of a copy. Raises
    DistributedError if the model is wrapped already.
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """
    if get_world_size() == 1:
        return model
    if isinstance(model, DistributedDataParallel):
        raise DistributedError("the model is wrapped in DistributedDataParallel already: wrap the plain model, once")
    if next(model.parameters()).device.type == "cpu":
        device_ids = None
    kwargs.setdefault("gradient_as_bucket_view", True)
    return DistributedDataParallel(model, device_ids=device_ids, **kwargs)


def prepare_fsdp_model(model, min_num_params=20_000, blocks=(), **kwargs):
    """Move `model` to this process's device, sharded in place over all ranks by FSDP2. Build the optimizer afterwards.

    At world size 1 it is not sharded, and `kwargs` are ignored. Use this for a model that you did not write. For your
    own model, call fully_shard on its blocks, as min_FSDP.py does. Every process begins with the whole model in the
    CPU's memory, which min_FSDP.py avoids.

    FSDP shards the parameters of a unit together: every process gathers all of them before the unit computes, and frees
    them afterwards. The units are the model's blocks: the modules of the classes `blocks`, for instance
    `(LlamaDecoderLayer,)`. By default they are the entries of its ModuleList, ModuleDict and Sequential containers. If
    containers are nested, the outer entries count, unless an entry holds more than a quarter of the model. Then its own
    entries count. A block with fewer than `min_num_params` parameters is no unit. A module outside of the blocks is a
    unit if it has at least `min_num_params` parameters that no unit inside it holds. All other parameters form the last
    unit. A shared parameter belongs to the smallest unit that contains all its uses.

    The units move to this process's device one after the other, so the whole model need not fit there. All ranks start
    from rank 0's weights, as with DDP.
    `kwargs` go to fully_shard. Raises ValueError for `min_num_params` < 1.
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    if min_num_params < 1:
        raise ValueError(f"min_num_params must be at least 1, got {min_num_params}")
    if get_world_size() == 1:
        return model.to(get_device())
    from torch.distributed.tensor import init_device_mesh

    if "mesh" not in kwargs:
        kwargs["mesh"] = init_device_mesh(get_device().type, (get_world_size(),))
    sync_params(model.buffers())
    uses = Counter(param for _, param in model.named_parameters(remove_duplicate=False))
    for module in _candidates(model, tuple(blocks), min_num_params, uses):
        if _can_be_unit(module, min_num_params, uses):
            _shard_unit(module, kwargs)
    _shard_unit(model, kwargs)
    return model


def _shard_unit(module, kwargs):
    from torch.distributed.fsdp import fully_shard  # takes 0.7 s, which only prepare_fsdp_model needs

    sync_params(dict.fromkeys(_unsharded_params(module)))  # each once, in the same order on all ranks
    fully_shard(module, **kwargs)


def _candidates(module, blocks, min_num_params, uses):
    """The submodules that may become units, inner ones first. A block stays whole: nothing inside of it is listed."""
    candidates = []
    for child in module.children():
        is_unit = _is_block(child, module, blocks, uses) and _can_be_unit(child, min_num_params, uses)
        if not is_unit:
            candidates += _candidates(child, blocks, min_num_params, uses)
        candidates.append(child)
    return candidates


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def _is_block(module, parent, blocks, uses):
    """Is it of the classes that the caller has named, or else an entry of a container?"""
    if blocks:
        return isinstance(module, blocks)
    n_params_of_model = sum(param.numel() for param in uses)
    return isinstance(parent, _CONTAINERS) and not _has_blocks_of_its_own(module, n_params_of_model)


def _has_blocks_of_its_own(module, n_params_of_model):
    """Is it large, and mostly containers, as a backbone in a Sequential or a stage of a Swin Transformer is?"""
    n_params = sum(param.numel() for param in module.parameters())
    contained = set()
    for submodule in module.modules():
        if isinstance(submodule, _CONTAINERS):
            contained.update(submodule.parameters())
    n_contained = sum(param.numel() for param in contained)
    return n_params > n_params_of_model / 4 and n_contained > n_params / 2


def _can_be_unit(module, min_num_params, uses):
    """Is it called, is enough of it not sharded yet, and has it no parameter that is also used outside of it?"""
    unsharded = _unsharded_params(module)
    own_uses = Counter(unsharded)
    n_params = sum(param.numel() for param in own_uses)
    used_outside = any(uses[param] > own_uses[param] for param in own_uses)
    return n_params >= min_num_params and _is_called(module) and not used_outside


def _unsharded_params(module):
    """The parameters of `module` that are not sharded yet. A parameter that two submodules share is listed twice."""
    from torch.distributed.tensor import DTensor

    params = [param for _, param in module.named_parameters(remove_duplicate=False)]
    return [param for param in params if not isinstance(param, DTensor)]


def _is_called(module):
    """Does its forward run? FSDP gathers a unit when it is called."""
    has_forward = type(module).forward is not nn.Module.forward  # a ModuleList has none
    # nn.MultiheadAttention reads the weight of its output projection without calling it. torch uses this class nowhere
    # else.
    is_attention_output = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return has_forward and not is_attention_output


@watched
def sync_params(params, src=0):
    """Copy each tensor of `params` from rank `src` to all ranks. It may be on any device, and transposed or a view."""
    if get_world_size() > 1:
        for param in params:
            sent = param.detach().to(get_device()).contiguous()
            torch_dist.broadcast(sent, src=src)
            param.detach().copy_(sent)


@watched
def check_in_sync(model, buffers=False, name=None):
    """Raise DistributedError on every rank if weights that all ranks should hold alike differ between ranks.

    Every rank must call it, for example after each epoch. `model` may be wrapped. The error names the model by `name`
    and its class, the first parameter that differs, the ranks, and the largest difference. For a DTensor, only ranks
    that hold the same shard are compared. A parameter that only one rank has is not compared. With `buffers` they are
    compared too; BatchNorm's differ between ranks by design. Ranks compare checksums of the parameters' bits. So the
    optimizer must run on equal hardware: another kind of GPU may round differently. The cost is one read of the
    weights, and about 30 bytes sent per tensor.
    """
    if get_world_size() == 1:
        return
    named = dict(unwrapped(model).named_parameters())
    if buffers:
        named.update(unwrapped(model).named_buffers())
    held = {}  # the tensors of this rank, or its shards of them, by the number of name and shard
    names = {}
    checksums = []
    for param_name, tensor in named.items():
        shard = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
        label = f"{param_name} {_shard_coordinates(tensor)}"
        number = int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "big")
        held[number] = shard
        names[number] = param_name
        checksums.append(_checksum(shard).to(get_device()))
    checksums = torch.stack(checksums).tolist() if checksums else []  # the only wait for the device
    kind = type(unwrapped(model)).__name__
    if name:
        kind = f"{name} ({kind})"
    gathered = gather_objects((kind, list(zip(held, checksums, strict=True))))
    first = {}  # the first rank that holds a shard, and its checksum there
    different = {}  # the ranks whose checksum is another
    for rank, (_, checksums_of_rank) in enumerate(gathered):
        for number, checksum in checksums_of_rank:
            first.setdefault(number, (rank, checksum))
            if checksum != first[number][1]:
                different.setdefault(number, []).append(rank)
    if different:
        _refuse_other_models([kind_of_rank for kind_of_rank, _ in gathered])
        number, ranks = next(iter(different.items()))  # of the first tensor that differs
        how_many = f"{len(different)} of {len(held)} tensors differ"
        _raise_difference(kind, names.get(number), held.get(number), first[number][0], ranks, how_many)


def _refuse_other_models(kinds):
    """`kinds` has the model of each rank's call. If a rank leaves out a call, its next one may be for another model.

    Pipeline stages may be of different kinds too. But they have no parameter in common that could differ.
    """
    first_rank = {}
    for rank, kind in enumerate(kinds):
        first_rank.setdefault(kind, rank)
    if len(first_rank) > 1:
        calls = ", ".join(f"rank {rank} for {kind}" for kind, rank in first_rank.items())
        line = f"ranks call check_in_sync for different models: {calls}: all ranks must make the same calls"
        raise DistributedError(line, on_all_ranks=True)


def _shard_coordinates(tensor):
    """For a DTensor, where its shard lies in the mesh. Ranks with the same coordinates hold the same values."""
    if not hasattr(tensor, "to_local"):
        return ""
    coordinates = zip(tensor.placements, tensor.device_mesh.get_coordinate(), strict=True)
    return str(["replicated" if placement.is_replicate() else index for placement, index in coordinates])


def _checksum(tensor):
    """Depends on a tensor's bytes and on their order. Sums of integers are exact."""
    flat = tensor.contiguous().flatten()
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()  # a view as int64 must start at a multiple of 8 bytes
    data = flat.view(torch.uint8)
    whole = len(data) // 512 * 512
    words = data[:whole].view(torch.int64).view(-1, 64)
    n_rows = len(words)
    rows = torch.arange(n_rows, device=data.device)
    columns = torch.arange(64, device=data.device)
    rest = torch.arange(len(data) - whole, device=data.device)
    # Word (i, j) has the weight 2·(i + n_rows·j) + 1, which no other word has. To sum rows and columns first needs no
    # memory of the tensor's size. Weights are odd: an even one would lose the highest bit of an int64.
    of_rows = (words.sum(dim=1) * (2 * rows + 1)).sum()
    of_columns = (words.sum(dim=0) * (2 * n_rows * columns)).sum()
    of_rest = (data[whole:].to(torch.int64) * (2 * rest + 1)).sum()
    return of_rows + of_columns + of_rest


def _raise_difference(kind, name, shard, holder, ranks, how_many):
    """Every rank calls it. `ranks` differ from rank `holder` in a tensor, and say by how much."""
    sent = None
    if get_rank() == holder:
        sent = name, shard.cpu()
    name, expected = broadcast_object(sent, holder)
    difference = None
    if get_rank() in ranks:
        difference = (shard.cpu().to(torch.complex128) - expected.to(torch.complex128)).abs().max().item()  # any type
    differences = [value for value in gather_objects(difference) if value is not None]
    where = f"{name} of {_names_of(ranks)} differs from rank {holder}'s by up to {max(differences):.3g}"
    line = f"the ranks hold different weights of {kind}: {where}, and {how_many}"
    raise DistributedError(f'{line}: see "Ranks drift apart" in docs/mistakes.md', on_all_ranks=True)


def unwrapped(model):
    """The module inside the wrappers of torch.compile and DDP. Any other object is returned as it is."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


# ---- metrics ------------------------------------------------------------------------------------------------------

_REDUCE_OPS = {
    "avg": torch_dist.ReduceOp.SUM,  # divided afterwards: gloo has no average
    "sum": torch_dist.ReduceOp.SUM,
    "min": torch_dist.ReduceOp.MIN,
    "max": torch_dist.ReduceOp.MAX,
}


@watched
def reduce(tensor, op="avg"):
    """A new tensor: the average of `tensor` over all ranks, as for a loss, on every rank. `tensor` keeps its value.

    `op`, the types and the errors are as in `all_reduce`.
    """
    _refuse_other_than_tensor("reduce", tensor)
    return all_reduce(tensor.detach().clone(), op)


@watched
def all_reduce(tensor, op="sum"):
    """Change `tensor` into its "sum", "avg", "min" or "max" over all ranks, on every rank; returns `tensor`.

    `tensor` is on this process's device. For metrics: no gradient flows through it. 16-bit floats are summed in
    float32. Raises ValueError for another `op`, for the average of integers, which would be rounded, for the sum of
    integers of 8 or 16 bits, which may overflow, and for the sum of booleans, which would be their "or": convert them
    first. Raises TypeError for a number.
    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.all_reduce
    """
    _refuse_other_than_tensor("all_reduce", tensor)
    if op not in _REDUCE_OPS:
        raise ValueError(f"op must be one of {', '.join(_REDUCE_OPS)}, got {op!r}")
    if op == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"the average of {tensor.dtype} would be rounded: use op='sum' or tensor.float()")
    if op == "sum" and tensor.dtype == torch.bool:
        raise ValueError("the sum of torch.bool would be an 'or': use tensor.int(), or op='max'")
    if op == "sum" and tensor.dtype in (torch.uint8, torch.int8, torch.int16):
        raise ValueError(f"the sum of {tensor.dtype} may overflow: use tensor.int()")
    if get_world_size() == 1:
        return tensor
    dtype = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
    result = tensor.detach().to(dtype).contiguous()  # `tensor` itself, if it has that type and layout
    torch_dist.all_reduce(result, _REDUCE_OPS[op])
    if op == "avg":
        result /= get_world_size()
    tensor.detach().copy_(result)
    return tensor


def _refuse_other_than_tensor(name, value):
    if not torch.is_tensor(value):
        line = f"dist.{name} takes a tensor on this process's device, got {type(value).__name__}"
        raise TypeError(f"{line}: use torch.tensor(value, device=dist.get_device())")


@watched
def gather(tensor):
    """Every rank's `tensor`, as a list in rank order, on every rank. Their first dimensions may differ, and may be 0.

    `tensor` is on this process's device. For metrics: no gradient flows through it. Raises ValueError on every rank if
    the types, the numbers of dimensions or the sizes of the other dimensions differ, and TypeError for a number.
    """
    _refuse_other_than_tensor("gather", tensor)
    tensor = tensor.detach().contiguous()
    if get_world_size() == 1:
        return [tensor.clone()]
    rows = tensor if tensor.dim() else tensor[None]
    kind = f"{tensor.dtype}, {tensor.dim()} dimensions, {tuple(rows.shape[1:])} after the first"
    header = torch.tensor([len(rows), zlib.crc32(kind.encode())], device=tensor.device)
    headers = [torch.empty_like(header) for _ in range(get_world_size())]
    torch_dist.all_gather(headers, header)
    lengths, kinds = torch.stack(headers).T.tolist()
    if len(set(kinds)) > 1:
        raise ValueError(f"the tensors to gather differ in more than their lengths: rank {get_rank()} has {kind}")
    padded = rows.new_zeros(max(lengths), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in lengths]
    if padded.numel():
        torch_dist.all_gather(gathered, padded)
    if tensor.dim() == 0:
        return [part[0] for part in gathered]
    return [part[:length] for part, length in zip(gathered, lengths, strict=True)]


@watched
def gather_objects(value, group=None):
    """Every rank's `value`, any that can be pickled, as a list in rank order, on every rank.

    It is a collective over `group`, a group of all ranks, by default the job's own, and fails after its timeout. Under
    gloo it fails at once if a peer has died; under nccl at the timeout, unless the launcher ends this process before.
    """
    if get_world_size() == 1:
        return [value]
    values = [None] * get_world_size()
    torch_dist.all_gather_object(values, value, group=group)
    return values


@watched
def broadcast_object(value, src=0, group=None):
    """Rank `src`'s `value`, any that can be pickled, on every rank. The `value` of the others is not used.

    All ranks must call it; see `gather_objects` for `group` and the timeout.
    """
    values = [value]
    if get_world_size() > 1:
        torch_dist.broadcast_object_list(values, src=src, group=group)
    return values[0]


@watched
def raise_on_all(error, group=None):
    """Raise DistributedError(error) on every rank if any rank passes an error message. Pass None if there is none.

    So no rank waits for one that has given up. All ranks must call it; see `gather_objects` for the timeout.
    """
    for line in gather_objects(error, group):
        if line:
            raise DistributedError(line, on_all_ranks=True)


def peak_memory(device):
    """Bytes: the most that this process has had allocated on its GPU, or resident in memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


# ---- start the processes ------------------------------------------------------------------------------------------


def launch(worker_fn, *args, nprocs=None, tolerate_killed=False):
    """Run `worker_fn(local_rank, world_size, *args)` in every process of the job and wait until all are done.

    Under torchrun, or any launcher that sets RANK and WORLD_SIZE, this process is one of them and `nprocs` is ignored.
    Otherwise `nprocs` processes are started on this machine: by default one per visible GPU, or one without a GPU. Each
    started process has its own copy of `args`. It imports the script first. RANK and the other variables are set only
    when `worker_fn` runs, so call nothing of this module at the top level of a file. With one process, `worker_fn` runs
    in the calling process. Build the model inside `worker_fn`, so that it is freed on return.

    A DistributedError ends the job with one line and status 1. Any other failure of a started process ends the others,
    and is raised here: torch.multiprocessing.ProcessRaisedException with the worker's traceback, SystemExit with the
    message of `sys.exit(message)`, or ProcessExitedException with the rank and how it ended. With `tolerate_killed` the
    job continues when a worker other than rank 0 is killed. Ctrl-C ends the workers at once, without their
    `finally` blocks. So does SIGTERM, which is sent on to the workers, unless they handle it, as checkpoint.Preemption
    does. A process that a worker has started ends with it. If srun or mpirun has started this process
    directly, `launch` exits with one line, because they do not set RANK and WORLD_SIZE.
    """
    _refuse_tasks_without_rank()
    if nprocs is None:
        nprocs = max(1, torch.cuda.device_count())
    if not isinstance(nprocs, int) or nprocs < 1:
        raise SystemExit(f"nprocs must be a whole number of at least 1, got {nprocs!r}")
    _refuse_other_arguments(worker_fn, args)
    if is_launched() or nprocs == 1:
        _run_worker(worker_fn, *args)
    else:
        spawn.run_processes(_run_worker, (worker_fn, *args), nprocs, tolerate_killed)


def _refuse_other_arguments(worker_fn, args):
    """Exit with one line if `worker_fn` cannot take the two numbers and `args`."""
    try:
        inspect.signature(worker_fn).bind(0, 1, *args)
    except TypeError as error:
        name = getattr(worker_fn, "__name__", worker_fn)
        passed = ", ".join(["local_rank, world_size", *(repr(arg)[:30] for arg in args)])
        line = f"launch calls {name}({passed}), which {name} does not take ({error}): write def {name}(local_rank, "
        raise SystemExit(line + "world_size), and give the number of processes as nprocs=N") from None
    except ValueError:  # a function of C has no signature
        return


def _run_worker(worker_fn, *args):
    """Run `worker_fn` in this process, and turn an expected failure into one line and status 1."""
    had_group = is_dist_avail_and_initialized()
    _note_exit_status(0)
    try:
        worker_fn(get_local_rank(), get_world_size(), *args)
    except DistributedError as error:
        _note_exit_status(1)
        # The workers of `launch` all report it: the launcher prints the first report, whichever rank it is from.
        under_torchrun = multiprocessing.parent_process() is None
        if error.on_all_ranks and under_torchrun and not is_primary():
            raise SystemExit(1) from None
        raise SystemExit(str(error)) from None
    except SystemExit as error:
        _note_exit_status(error.code)
        raise
    except BaseException:
        _note_exit_status(1)  # even if the caller handles it: this rank no longer takes part
        raise
    if not had_group:
        cleanup()
        _drop_destroyed_groups()


def _refuse_tasks_without_rank():
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if int(os.environ.get(name, 1)) > 1 and not is_launched():
            raise SystemExit(
                f"{name} is {os.environ[name]}, but RANK and WORLD_SIZE are not set, so every task would train alone: "
                "start one torchrun per node instead, as launchers/slurm.sbatch does"
            )


# ---- work-arounds for torch ---------------------------------------------------------------------------------------

# Renamed in torch 2.13, where the old names warn. Delete when 2.12 is no longer supported.
if hasattr(torch_dist, "all_gather_single"):
    all_gather_single = torch_dist.all_gather_single
    reduce_scatter_single = torch_dist.reduce_scatter_single
else:
    all_gather_single = torch_dist.all_gather_into_tensor
    reduce_scatter_single = torch_dist.reduce_scatter_tensor


_group_numbers = itertools.count()  # the same on all ranks


def _fresh_store(rank, world_size, timeout):
    """The job's rendezvous store, under a prefix that no earlier process group has used.

    torchrun keeps its store when it restarts the processes. The store still holds the addresses of the processes that
    have ended, and new processes would connect to these: https://github.com/pytorch/pytorch/issues/135712, seen in
    torch 2.11 to 2.15. Delete when torchrun gives each restart a store of its own.
    """
    rendezvous = torch_dist.rendezvous("env://", rank, world_size, timeout=timeout)
    store, _, _ = next(rendezvous)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return torch_dist.PrefixStore(f"group {next(_group_numbers)}", store)  # a new prefix for each group
    try:
        if rank == 0:
            return torch_dist.PrefixStore(_tell_prefix(store, world_size, timeout), store)
        return torch_dist.PrefixStore(_ask_for_prefix(store, rank, timeout), store)
    except torch_dist.DistStoreError:
        raise TimeoutError(f"not all of {world_size} ranks have joined within {timeout}") from None


def _ask_for_prefix(store, rank, timeout):
    """Write a new name, and wait for rank 0's answer to this name. Each rank reads one key, however many there are."""
    name = uuid.uuid4().hex
    store.set(f"rank {rank}", name)
    answer = f"prefix for {name}"
    store.wait([answer], timeout)
    prefix = store.get(answer).decode()
    store.set(f"{prefix} received by rank {rank}", "")
    return prefix


def _tell_prefix(store, world_size, timeout):
    """Answer every name, even if its process has ended, until every rank has received the answer."""
    prefix = uuid.uuid4().hex
    names = [f"rank {rank}" for rank in range(1, world_size)]
    receipts = [f"{prefix} received by {name}" for name in names]
    answered = set()
    deadline = time.monotonic() + timeout.total_seconds()
    pause = 0.002
    store.wait(names, timeout)
    while not store.check(receipts):
        if time.monotonic() > deadline:
            raise torch_dist.DistStoreError("a rank has not received its answer")
        new = {value.decode() for value in store.multi_get(names)} - answered
        store.multi_set([f"prefix for {name}" for name in new], [prefix] * len(new))
        answered |= new
        time.sleep(pause)
        pause = min(2 * pause, 0.1)  # do not keep the store busy while a rank is late
    return prefix


def _sparse_gloo_group(timeout):
    """A gloo group of all ranks in which two ranks connect when they first communicate.

    gloo otherwise connects every pair at once: of 1,024 ranks each would have 1,023 sockets, as many as the usual limit
    of open files. With this, a barrier, a gather and a broadcast of objects together take about 2·log2(N). No argument
    of new_group says so, in torch 2.11 to 2.15, so the variable is set for its call alone. Delete when there is one.
    torch.distributed.checkpoint collects a plan of every rank on rank 0, which so gets a socket for each.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY:  # as on macOS, which refuses it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    before = os.environ.get("TORCH_GLOO_LAZY_INIT")
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    try:
        group = torch_dist.new_group(backend="gloo", timeout=timeout)
    finally:
        del os.environ["TORCH_GLOO_LAZY_INIT"]
        if before is not None:
            os.environ["TORCH_GLOO_LAZY_INIT"] = before
    torch_dist.barrier(group)  # connects the pairs that later calls need, so that they notice at once if a peer dies
    return group


_exit_status = None  # of `worker_fn`; None before `launch` has called it
_destroyed_groups = []


def _note_exit_status(code):
    """Store the exit status of a worker for `_leave`."""
    global _exit_status
    if code is None:
        _exit_status = 0
    elif isinstance(code, int):
        _exit_status = code
    else:
        _exit_status = 1


@atexit.register
def _leave():
    """At exit: leave a failed process at once, since its peers have not noticed yet. Else destroy the process group.

    Under NCCL, destroying the process group needs all ranks. If it is not destroyed, NCCL warns, and gloo may wait for
    a peer (torch 2.11 and 2.13). So a rank that fails leaves at once. Exit handlers that were registered before this
    module was imported are then skipped. Without `launch` nobody knows the status of `sys.exit(status)` here: then only
    gloo's group is destroyed. Delete when one rank can leave a group alone.
    """
    status = _exit_status
    if _traceback_was_printed():
        status = 1
    if is_dist_avail_and_initialized() and status not in (0, None):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if is_dist_avail_and_initialized() and (status == 0 or torch_dist.get_backend() == "gloo"):
        cleanup()
    _drop_destroyed_groups()


def _traceback_was_printed():
    """Has an exception ended the main thread? Python then sets this attribute."""
    return hasattr(sys, "last_type")


def _drop_destroyed_groups():
    """Free the destroyed groups now: a thread of gloo that still runs when Python ends aborts the process.

    Its status is then -6, and torchrun calls a finished job failed: https://github.com/pytorch/pytorch/issues/190489,
    torch 2.11 to 2.15. Freeing a group waits for gloo's threads. If a DDP model held the last reference, it would be
    freed while this thread holds Python's lock, which gloo's threads may need: a deadlock (torch 2.11). So `cleanup`
    keeps a reference until here. Delete when jobs of DDP under torchrun end well without it.
    """
    # Workers of `launch` end by os._exit, so they need no cleaning up. gc.collect would write to every object, and so
    # copy the memory that they share since the fork.
    if _destroyed_groups and multiprocessing.parent_process() is None:
        gc.collect()  # the model holds the group too, and may be in a reference cycle
        _destroyed_groups.clear()
