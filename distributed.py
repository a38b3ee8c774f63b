"""The helper every script here shares: start processes, know one's rank and device, wrap, sample, reduce.

    import distributed as dist

    def main_worker(local_rank, world_size):
        dist.init_process_group()
        model = dist.prepare_ddp_model(model.to(dist.get_device()))
        ...
        loss = dist.reduce(loss.detach())      # the average over all processes, on every process
        dist.cleanup()

    if __name__ == "__main__":
        dist.launch(main_worker)

`python script.py` starts one process per visible GPU (`CUDA_VISIBLE_DEVICES=2,3 python script.py` two); under torchrun
the same file takes the processes it is given. In a single process every function is the identity or does nothing, so
a script needs no `if`.
"""

import argparse
import atexit
import gc
import io
import math
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
import zipfile
from collections import Counter
from concurrent import futures
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as torch_dist

# Imported before there is a process group: DDP imports it lazily, and its functions would then keep the group as a
# default argument. gloo's threads would outlive destroy_process_group, and one that drops the last all-reduce while
# the interpreter shuts down aborts the process, so that torchrun calls a finished job failed (1 in 20).
import torch.distributed.nn.functional
from torch import nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

# ---- start processes ----------------------------------------------------------------------------------------------


def launch(worker_fn, *args, nprocs=None, tolerate_killed=False):
    """Run `worker_fn(local_rank, world_size, *args)` in every process of the job and wait until all are done.

    Under torchrun, or any launcher that sets RANK and WORLD_SIZE, this process is one of them and `nprocs` is ignored.
    Otherwise `nprocs` processes are started on this machine: by default one per visible GPU. A single one is this
    process itself. `worker_fn` and `args` are pickled. Keep the model inside `worker_fn`, so that it goes with it.

    Raises torch.multiprocessing.ProcessRaisedException with the traceback of the first worker that raised,
    ProcessExitedException with rank and cause if one was killed or left through `os._exit`, and SystemExit with the
    message of a worker that called `sys.exit(message)`. The other workers are ended first. With `tolerate_killed` the
    job goes on when a worker other than rank 0 is killed by a signal: for workers that need one another, never.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        nprocs = 1
    elif nprocs is None:
        nprocs = max(1, torch.cuda.device_count())
    if nprocs < 1:
        raise ValueError(f"nprocs must be at least 1, got {nprocs}")
    if nprocs > 1:
        return _start_processes(worker_fn, args, nprocs, tolerate_killed)
    worker_fn(get_local_rank(), get_world_size(), *args)
    cleanup()
    _end_groups()


def _start_processes(worker_fn, args, nprocs, tolerate_killed):
    # Forked from a server that has imported torch once, workers start in milliseconds, however many. Only libraries
    # that this process has loaded too: nothing before the fork may touch CUDA. With more processes than cores, import
    # torch._dynamo in the script: the first optimizer of each process needs it, and takes a second to import it.
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        libraries = ("torch", "torch.distributed.nn.functional", "torch._dynamo", "torchvision")
        context.set_forkserver_preload([name for name in libraries if name in sys.modules])
    # The rendezvous store lives here, on a port of loopback that is ours from the start: no other job can take it, and
    # nothing listens to the network. The workers join as clients, as they join torchrun's store.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = torch_dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    environment = {
        **{f"{library}_SOCKET_IFNAME": loopback for library in ("GLOO", "NCCL", "TP")},
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // nprocs)),
        **os.environ,
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    outputs = [Connection(os.dup(fd), readable=False) for fd in (1, 2)] if method == "forkserver" else []
    processes, reports = [], []
    try:
        for rank in range(nprocs):
            reader, writer = context.Pipe(duplex=False)
            rank_environment = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            worker_args = (worker_fn, rank, nprocs, args, rank_environment, outputs, writer)
            processes.append(context.Process(target=_worker, args=worker_args, name=f"rank {rank}"))
            reports.append(reader)
            processes[rank].start()
            writer.close()
        _wait_for_workers(processes, reports, tolerate_killed)
    finally:
        for process in processes:
            _kill(process)
        del store


def _worker(worker_fn, rank, world_size, args, environment, outputs, report):
    """Run in a started process: `worker_fn` with the caller's environment, and a report of what it raised."""
    if os.name == "posix":
        os.setsid()  # one group for the worker and its own children, which are ended together
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    # A fork server's children inherit the environment, stdout and stderr of the moment when the server was started.
    for fd, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), fd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"].split(",")[0]))
    try:
        worker_fn(rank, world_size, *args)
        return cleanup()
    except SystemExit as error:
        if not error.code:
            return
        failure = SystemExit(str(error.code))
        if isinstance(error.code, int):
            message = f"rank {rank} exited with status {error.code}"
            failure = ProcessExitedException(message, rank, os.getpid(), error.code)
    except BaseException:
        message = f"rank {rank} raised:\n\n{traceback.format_exc()[-30_000:]}"
        failure = ProcessRaisedException(message, rank, os.getpid())
    # The time tells the cause from its consequences: peers fail only when this process ends and its sockets close.
    report.send((time.monotonic(), failure))
    sys.stdout.flush()
    os._exit(1)


def _end_with_launcher():
    """Wait, in a daemon thread of a worker, for the launcher to end for whatever reason, then end the worker."""
    multiprocessing.parent_process().join()
    if os.name == "posix":
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _wait_for_workers(processes, reports, tolerate_killed):
    """Return when every worker has ended well; raise the first failure soon after one has not."""

    def has_failed(process):
        return process.exitcode and not (tolerate_killed and process.exitcode < 0 and process is not processes[0])

    deadline = None
    while running := [process.sentinel for process in processes if process.exitcode is None]:
        if deadline is None and any(map(has_failed, processes)):
            deadline = time.monotonic() + 0.5  # the consequence of a failure may be seen before its cause
        if not wait(running, deadline and max(0, deadline - time.monotonic())):
            break
    failures = [_failure(rank, process, reports[rank]) for rank, process in enumerate(processes) if has_failed(process)]
    if failures:
        raise min(failures, key=lambda failure: failure[0])[1]


def _failure(rank, process, report):
    """When and why a worker failed. One that could not report was killed, which no failure of a peer does."""
    try:
        return report.recv()
    except EOFError:
        code = process.exitcode
        name = signal.Signals(-code).name if code < 0 else None
        message = f"rank {rank} was killed by {name}" if name else f"rank {rank} exited with status {code}"
        return 0, ProcessExitedException(message, rank, process.pid, code, name)


def _kill(process):
    if process.pid is None:  # interrupted before it was started
        return
    if process.is_alive():
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (AttributeError, ProcessLookupError):  # Windows, or not yet the leader of its group
            process.kill()
    process.join()


# ---- who am I -----------------------------------------------------------------------------------------------------


def init_process_group(rank=None, world_size=None, backend=None, timeout=None):
    """Bind this process to its device and join the job's process group: nccl for GPUs, gloo for CPU.

    `rank` and `world_size` are needed only without a launcher: RANK and WORLD_SIZE of the environment win, so that
    a local rank given here is right on several machines too. `timeout` is a datetime.timedelta after which a collective
    fails; None is torch's default. Does nothing when a group exists, or in a single process without a launcher.
    """
    if is_dist_avail_and_initialized():
        return
    device = get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world_size = get_rank(), get_world_size()
    if world_size is None or (world_size == 1 and "MASTER_ADDR" not in os.environ):
        return
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    device_id = device if backend == "nccl" else None
    store = _fresh_store(rank, world_size, timeout or torch_dist.default_pg_timeout)
    torch_dist.init_process_group(
        backend, store=store, timeout=timeout, rank=rank, world_size=world_size, device_id=device_id
    )


def _fresh_store(rank, world_size, timeout):
    """The job's store, under a prefix that no earlier start of its processes has used.

    torchrun keeps one store when it starts its processes again. A process may then find the address at which another
    one listened before it was killed, and fail to connect: https://github.com/pytorch/pytorch/issues/135712
    """
    store, *_ = next(torch_dist.rendezvous("env://", rank, world_size, timeout=timeout))
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return store
    name, end = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank > 0:
        store.set(f"rank {rank}", name)
        prefix = store.get(f"prefix for {name}").decode()
        store.add(f"{prefix} arrived", 1)
        return torch_dist.PrefixStore(prefix, store)
    while store.add(f"{name} arrived", 0) < world_size - 1:  # rank 0 answers also names of before, until all are here
        if time.monotonic() > end:
            raise TimeoutError(f"not all of {world_size} ranks have joined within {timeout}")
        for key in (f"rank {peer}" for peer in range(1, world_size)):
            if store.check([key]):
                store.set(f"prefix for {store.get(key).decode()}", name)
        time.sleep(0.01)
    return torch_dist.PrefixStore(name, store)


_left_groups = []


@atexit.register
def _end_groups():
    """Let gloo's threads end before the interpreter: one that drops its last tensors later aborts the process.

    So at exit too, after `sys.exit`, whose line is out by now. Not after an error, when gloo may wait for a peer.
    """
    if is_dist_avail_and_initialized() and torch_dist.get_backend() == "gloo" and not hasattr(sys, "last_type"):
        cleanup()
    if _left_groups:
        gc.collect()  # the model, which holds a group and may be in a reference cycle
        _left_groups.clear()


def cleanup():
    """Destroy the process group, if there is one.

    Not while an exception is on its way up (in a `finally`): the group then ends with the process, since closing it
    first would make the other ranks fail before this one has reported the cause.
    """
    if is_dist_avail_and_initialized() and sys.exc_info()[0] is None:
        # A DDP model must not be the last to hold the group: it would join gloo's threads with Python's lock in its
        # hands, which they may be waiting for (seen with torch 2.11).
        _left_groups.append(torch_dist.group.WORLD)
        torch_dist.destroy_process_group()


def is_dist_avail_and_initialized():
    """Is there a process group?"""
    return torch_dist.is_available() and torch_dist.is_initialized()


def get_rank():
    """This process's number in the whole job, 0 <= rank < world_size. It decides who prints and writes files."""
    return torch_dist.get_rank() if is_dist_avail_and_initialized() else int(os.environ.get("RANK", 0))


def get_local_rank():
    """This process's number on its machine. It decides which GPU is used."""
    return int(os.environ.get("LOCAL_RANK", 0))


def get_world_size():
    """The number of processes in the job."""
    return torch_dist.get_world_size() if is_dist_avail_and_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def is_primary():
    """Is this rank 0? Call no collective under it: the other ranks would wait for ever."""
    return get_rank() == 0


def get_device():
    """This process's device: GPU number `local_rank` of the visible ones, or the CPU where there is none.

    Raises SystemExit with one line if the machine has fewer GPUs than processes.
    """
    count = torch.cuda.device_count()
    if count and get_local_rank() >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise SystemExit(
            f"local rank {get_local_rank()} has no GPU: {count} visible (CUDA_VISIBLE_DEVICES: {visible}), "
            f"so start at most {count} processes on this machine"
        )
    return torch.device("cuda", get_local_rank()) if count else torch.device("cpu")


def print_primary(*args, **kwargs):
    """`print` on rank 0 only."""
    if is_primary():
        print(*args, **kwargs)


# ---- data and model -----------------------------------------------------------------------------------------------


def data_sampler(dataset, distributed, shuffle, pad=True, seed=0):
    """A DistributedSampler that gives each rank its share of `dataset`, or None when not `distributed`.

    With `pad` all ranks get equally many samples, some of them twice if the length does not divide evenly: training
    needs it, since every step is a collective. With `pad=False` every sample is seen exactly once over all ranks, as
    a metric needs. Call `sampler.set_epoch(epoch)` before each epoch: the order depends on seed and epoch alone.
    """
    if not distributed:
        return None
    rank, world_size = get_rank(), get_world_size()
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed)
    if not pad:
        sampler.total_size = len(dataset)
        sampler.num_samples = len(range(rank, len(dataset), world_size))
    return sampler


def prepare_ddp_model(model, device_ids=None, **kwargs):
    """`model`, already on its device, wrapped in DistributedDataParallel; `model` itself at world size 1.

    `device_ids` is ignored on the CPU; `kwargs` go to DistributedDataParallel. Gradients are views of the buckets that
    are reduced, which saves one copy of them in memory and in time.
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """
    if get_world_size() == 1:
        return model
    if next(model.parameters()).device.type == "cpu":
        device_ids = None
    return DistributedDataParallel(model, device_ids=device_ids, **{"gradient_as_bucket_view": True, **kwargs})


def prepare_fsdp_model(model, min_num_params=20_000, **kwargs):
    """`model` sharded in place over all ranks by FSDP2; `model` itself at world size 1. Build the optimizer afterwards.

    Children first, every submodule that holds at least `min_num_params` parameters not sharded with its children is
    made a unit: its parameters are gathered while it computes and freed again. What is left, and any parameter that
    two submodules share, is the root's. A unit moves to this process's device only when it is sharded, and all ranks
    start from rank 0's weights, as with DDP. `kwargs` go to fully_shard. Raises ValueError for `min_num_params` < 1.
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    from torch.distributed.fsdp import fully_shard  # takes 0.7 s, which only this function needs
    from torch.distributed.tensor import DTensor, init_device_mesh

    if min_num_params < 1:
        raise ValueError(f"min_num_params must be at least 1, got {min_num_params}")
    if get_world_size() == 1:
        return model
    device = get_device()
    kwargs = {"mesh": init_device_mesh(device.type, (get_world_size(),)), **kwargs}
    uses = Counter(param for _, param in model.named_parameters(remove_duplicate=False))
    for module in reversed(list(model.modules())):
        own = [p for _, p in module.named_parameters(remove_duplicate=False) if not isinstance(p, DTensor)]
        # Gathered when its forward is called: a ModuleList has none, attention does not call its output projection's.
        uncalled = type(module).forward is nn.Module.forward or isinstance(module, NonDynamicallyQuantizableLinear)
        shared = any(uses[param] > count for param, count in Counter(own).items())
        if module is model or (sum(p.numel() for p in set(own)) >= min_num_params and not (shared or uncalled)):
            module.to(device)
            sync_params(t for t in [*module.parameters(), *module.buffers()] if not isinstance(t, DTensor))
            fully_shard(module, **kwargs)
    return model


def sync_params(params):
    """Overwrite every tensor of `params` on every rank with rank 0's."""
    if get_world_size() > 1:
        for param in params:
            torch_dist.broadcast(param.detach(), src=0)


# ---- metrics ------------------------------------------------------------------------------------------------------

_REDUCE_OPS = {"avg": "SUM", "sum": "SUM", "min": "MIN", "max": "MAX"}  # gloo has no average


def reduce(tensor, op="avg"):
    """`all_reduce` with the average as default: what a loss needs."""
    return all_reduce(tensor, op)


def all_reduce(tensor, op="sum"):
    """A new tensor of the same shape and type: "sum", "avg", "min" or "max" of `tensor` over all ranks, on every rank.

    For metrics: no gradient flows through it. 16-bit floats are summed in float32. Raises ValueError for another `op`
    and for the average of integers, which would be rounded: sum them and divide, or convert them first.
    """
    if op not in _REDUCE_OPS:
        raise ValueError(f"op must be one of {', '.join(_REDUCE_OPS)}, got {op!r}")
    if op == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"the average of {tensor.dtype} would be rounded: use op='sum' or tensor.float()")
    dtype = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
    result = tensor.detach().to(dtype, copy=True).contiguous()
    if get_world_size() > 1:
        torch_dist.all_reduce(result, getattr(torch_dist.ReduceOp, _REDUCE_OPS[op]))
        if op == "avg":
            result /= get_world_size()
    return result.to(tensor.dtype)


def gather(tensor):
    """Every rank's `tensor`, as a list in rank order, on every rank. First dimensions may differ, also be 0."""
    tensor = tensor.detach().contiguous()
    if get_world_size() == 1:
        return [tensor.clone()]
    rows = tensor if tensor.dim() else tensor[None]
    length = torch.tensor(len(rows), device=tensor.device)
    lengths = [torch.empty_like(length) for _ in range(get_world_size())]
    torch_dist.all_gather(lengths, length)
    lengths = torch.stack(lengths).tolist()
    padded = rows.new_zeros(max(lengths), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in lengths]
    if padded.numel():
        torch_dist.all_gather(gathered, padded)
    return [part[:length] if tensor.dim() else part[0] for part, length in zip(gathered, lengths, strict=True)]


def agree(value=None, error=None):
    """Every rank's `value`, any that can be pickled, in rank order.

    Raises SystemExit(error) on every rank if one of them gives an `error`, a line that says what has failed there: so
    that no rank waits for one that has given up.
    """
    pairs = [(value, error)] * get_world_size()
    if get_world_size() > 1:
        torch_dist.all_gather_object(pairs, (value, error))
    for _, error in pairs:
        if error:
            raise SystemExit(error)
    return [value for value, _ in pairs]


def barrier():
    """Wait until every rank is here."""
    if get_world_size() > 1:
        torch_dist.barrier()


# ---- snapshots ----------------------------------------------------------------------------------------------------


def save_snapshot(path, model, optimizer, scheduler=None, epoch=0, step=0):
    """Write to `path`, once per node, all that is needed to go on at `step` of `epoch`, the next to run.

    Every rank must call it; local rank 0 of each node writes. The model is saved unwrapped, so any number of processes
    can load it. A kill at any moment leaves the old file or the new one. Raises SystemExit with one line, on every
    rank, if a node cannot write, say because its disk is full; its old file is then as it was.
    """
    parts, error = _parts(model, optimizer, scheduler), None
    sync_params(parts["model"].buffers())  # with rank 0's, as DDP does before each forward: all nodes write the same
    if get_local_rank() == 0:
        temporary = f"{path}.{get_rank()}.tmp"  # nodes may share the folder
        try:
            states = {name: part.state_dict() for name, part in parts.items()}
            _write(path, temporary, {**states, "epoch": epoch, "step": step})
        except (OSError, RuntimeError) as failure:  # torch.save turns the OSError of a full disk into a RuntimeError
            if os.path.exists(temporary):
                os.remove(temporary)
            cause = failure if isinstance(failure, OSError) else failure.__context__
            if not isinstance(cause, OSError):
                raise
            error = f"cannot save {_location(path)}: {cause.strerror}: make room there, or choose another path"
    agree(None, error)


def load_snapshot(path, model, optimizer, scheduler=None):
    """Restore the newest snapshot of all nodes on every rank; returns its (epoch, step), the next to run.

    Without one anywhere it changes nothing and returns (0, 0). Every rank must call it; local rank 0 of each node looks
    for `path`, and the first that has the newest sends it to all. Nothing in a file is executed. Raises SystemExit with
    one line, on every rank, if any node's file is damaged, cannot be read, or belongs to another model.
    """
    data, position, error = _read(path) if get_local_rank() == 0 else (b"", (-1, -1), None)
    seen = agree((position, len(data), _location(path)), error)
    holder = max(range(len(seen)), key=lambda rank: seen[rank][0])
    position, size, location = seen[holder]
    if position < (0, 0):
        return 0, 0
    data = bytearray(data if get_rank() == holder else size)
    if len(seen) > 1:
        for chunk in torch.frombuffer(data, dtype=torch.uint8).split(2**26):  # 64 MiB at a time on the device
            on_device = chunk.to(get_device())
            torch_dist.broadcast(on_device, src=holder)
            chunk.copy_(on_device)
    snapshot = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    try:
        for name, part in _parts(model, optimizer, scheduler).items():
            part.load_state_dict(snapshot[name])
    except (KeyError, RuntimeError, ValueError) as failure:
        cause = " ".join(str(failure).split())[:300]
        raise SystemExit(f"{location} is another model's ({cause}): move it away, or choose another path") from None
    return position


def _write(path, temporary, contents):
    """torch.save to `temporary`, and rename that to `path`, such that both survive a power cut.

    Quicker than torch.save and then fsync: the disk writes while torch.save is still at work, and the old file, which
    takes a tenth of that time to free, is freed in the background.
    """
    with open(temporary, "wb") as file, futures.ThreadPoolExecutor() as pool:
        saving = pool.submit(torch.save, contents, file)
        while futures.wait([saving], timeout=0.1).not_done:
            os.fsync(file.fileno())
        saving.result()  # raises what it has met
        file.flush()
        os.fsync(file.fileno())
    if os.name != "posix":
        return os.replace(temporary, path)
    old = os.open(path, os.O_RDONLY) if os.access(path, os.R_OK) else None
    os.replace(temporary, path)
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    if old is not None:
        threading.Thread(target=os.close, args=(old,)).start()


def _parts(model, optimizer, scheduler):
    model = model.module if isinstance(model, DistributedDataParallel) else model
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return {name: part for name, part in parts.items() if part is not None}


def _read(path):
    """A snapshot's bytes, its (epoch, step), or (-1, -1) if there is none, and what is wrong with it, or None."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return b"", (-1, -1), None
    except OSError as failure:
        return b"", (-1, -1), f"cannot read {_location(path)}: {failure.strerror}: correct that, or move it away"
    try:
        damaged = zipfile.ZipFile(io.BytesIO(data)).testzip()  # torch.load compares no checksum
        if damaged:
            raise ValueError(f"checksum of {damaged}")
        snapshot = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return data, (int(snapshot["epoch"]), int(snapshot["step"])), None
    except Exception as failure:  # whatever the two readers raise on bytes that are no snapshot
        cause = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0][:200]}"
        error = f"{_location(path)} is damaged or no snapshot ({cause}): move it away, or put an intact copy there"
        return b"", (-1, -1), error


def _location(path):
    return f"{os.path.abspath(path)} on {socket.gethostname()}"


# ---- command line -------------------------------------------------------------------------------------------------


def at_least(minimum):
    """An argparse `type`: a whole number of at least `minimum`."""

    def parse(text):
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
        return value

    return parse


def positive(text):
    """An argparse `type`: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return value


def check_writable(option, folder):
    """Make `folder`, before any training. Raises SystemExit with one line if nothing can be written there."""
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise SystemExit(f"{option}: cannot write to {os.path.abspath(folder)}: {error.strerror}") from None
