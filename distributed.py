"""The helper every script here shares: start processes, know one's rank and device, wrap, sample, reduce.

    import distributed as dist

    def main_worker(local_rank, world_size):
        dist.init_process_group()
        model = dist.prepare_ddp_model(Model().to(dist.get_device()))
        ...
        loss = dist.reduce(loss)               # the average over all processes, on every process
        dist.cleanup()

    if __name__ == "__main__":
        dist.launch(main_worker)

`python script.py` starts one process per visible GPU (`CUDA_VISIBLE_DEVICES=2,3 python script.py` two); under torchrun
the same file takes the processes it is given. In a single process the same calls work without communication, so a
script needs no `if`.
"""

import argparse
import atexit
import contextlib
import gc
import itertools
import math
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections import Counter
from datetime import timedelta
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as torch_dist

# Imported now, while there is no process group. DDP imports it too: then its functions keep the group, as a default
# argument, until the interpreter ends, and gloo's threads, of which one may abort it. torchrun calls that job failed.
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
    Otherwise `nprocs` processes are started on this machine, a POSIX system: by default one per visible GPU, or one in
    all. A single one is this process itself. Each has its own copy of `args`. Build the model inside `worker_fn`, so
    that it is freed on return. Tasks of srun or mpirun, which set neither, leave by SystemExit.

    The first failure ends the other workers, and is raised: torch.multiprocessing.ProcessRaisedException with its
    traceback, SystemExit with the message of `sys.exit(message)`, or ProcessExitedException with rank and cause. With
    `tolerate_killed` the job goes on when a worker other than rank 0 is killed.
    """
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if int(os.environ.get(name, 1)) > 1 and not _is_launched():
            line = f"{name} is {os.environ[name]}, but RANK and WORLD_SIZE are not set, so every task would train alone"
            raise SystemExit(f"{line}: start one torchrun per node instead, as launchers/slurm.sbatch does")
    if _is_launched():
        nprocs = 1
    elif nprocs is None:
        nprocs = max(1, torch.cuda.device_count())
    if nprocs < 1:
        raise ValueError(f"nprocs must be at least 1, got {nprocs}")
    if nprocs > 1:
        return _start_processes(worker_fn, args, nprocs, tolerate_killed)
    had_group = is_dist_avail_and_initialized()
    worker_fn(get_local_rank(), get_world_size(), *args)
    if not had_group:
        cleanup()
        _end_groups()


def _is_launched():
    """Has torchrun, `launch`, or another launcher started this process? RANK or WORLD_SIZE alone means nothing."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _start_processes(worker_fn, args, nprocs, tolerate_killed):
    if os.name != "posix":
        raise SystemExit("distributed.py starts processes on POSIX systems only: use Linux, macOS or WSL")
    # Forked from a server that has imported torch once, workers start in milliseconds, however many. It loads only
    # what this process has loaded too, and nothing that touches CUDA.
    context = multiprocessing.get_context("forkserver")
    libraries = ("torch", "torch.distributed.nn.functional", "torch._dynamo", "torchvision")
    context.set_forkserver_preload([name for name in libraries if name in sys.modules])
    # The rendezvous store lives here, on a port of loopback that is ours from the start: no other job can take it, and
    # nothing listens to the network. The workers join as clients, as they join torchrun's store.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    store = torch_dist.TCPStore("127.0.0.1", port, **server)
    work = pickle.dumps((worker_fn, args))  # by itself, Process would let all ranks share the memory of a model in it
    outputs = [Connection(os.dup(fd), readable=False) for fd in (1, 2)]  # which can be sent to the server's children
    worker_args = (nprocs, work, _worker_environment(nprocs, port), outputs)
    processes = [context.Process(target=_worker, args=(rank, *worker_args)) for rank in range(nprocs)]

    def failed():
        tolerated = [p for p in processes[1:] if tolerate_killed and (p.exitcode or 0) < 0]
        return {rank: p for rank, p in enumerate(processes) if p.exitcode and p not in tolerated}

    try:
        for process in processes:
            process.start()
        while (running := [p.sentinel for p in processes if p.exitcode is None]) and not failed():
            wait(running)
        if failed():
            time.sleep(0.2)  # the fork server may tell of a failure's consequence before it tells of the cause
            raise _first_failure(failed(), store)
    finally:
        for process in processes:
            if process.pid:  # else interrupted before it was started
                with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter: zombies on macOS
                    os.killpg(process.pid, signal.SIGKILL)  # its children too, which may outlive it
                process.kill()  # it may not yet be the leader of a group
                process.join()


def _worker_environment(nprocs, port):
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    return {
        **{f"{library}_SOCKET_IFNAME": loopback for library in ("GLOO", "NCCL", "TP")},
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // nprocs)),
        "THP_MEM_ALLOC_ENABLE": "1",  # huge pages on the CPU: what FSDP2 gathers is new memory each time
        **os.environ,  # wins over what stands above, and not over what follows
        **{"WORLD_SIZE": str(nprocs), "LOCAL_WORLD_SIZE": str(nprocs)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here: rank 0 must not start one
    }


def _first_failure(failed, store):
    """The exit of a worker that left no report, being killed, or else the first report: peers fail after the cause."""
    reports = dict(pickle.loads(store.queue_pop("failures")) for _ in range(store.queue_len("failures")))
    for rank in failed.keys() - reports.keys():
        code = failed[rank].exitcode
        name = signal.Signals(-code).name if code < 0 else None
        message = f"rank {rank} was killed by {name}" if name else f"rank {rank} exited with status {code}"
        return ProcessExitedException(message, rank, failed[rank].pid, code, name)
    return next(iter(reports.values()))


def _worker(rank, world_size, work, environment, outputs):
    """Run in a started process: `worker_fn` with the caller's environment, and a report of what it raised."""
    os.setsid()  # one group for the worker and its own children, which are ended together
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    # A fork server's children have the environment, stdout and stderr of the moment when the server was started, and
    # its number of threads.
    for fd, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), fd)
    sys.stdout.reconfigure(line_buffering=True)  # what was printed is out when another rank's failure ends this one
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    multiprocessing.set_start_method(None, force=True)  # the platform's, for a DataLoader; not the launcher's
    try:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"].split(",")[0]))
        worker_fn, args = pickle.loads(work)
        worker_fn(rank, world_size, *args)
        return cleanup()  # nothing to report
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            raise
        failure = SystemExit(str(error.code))
    except BaseException:
        message = f"rank {rank} raised:\n\n{traceback.format_exc()[-30_000:]}"
        failure = ProcessRaisedException(message, rank, os.getpid())
    # In the launcher's store, before this process ends and its sockets close, which is when peers fail: so the first
    # report tells the cause.
    store = torch_dist.TCPStore("127.0.0.1", int(environment["MASTER_PORT"]), is_master=False)
    store.queue_push("failures", pickle.dumps((rank, failure)))
    store.queue_len("failures")  # a round trip: the report is in the store by now
    sys.stdout.flush()
    os._exit(1)


def _end_with_launcher():
    """Wait, in a daemon thread of a worker, for the launcher to end for whatever reason, then end the worker."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


# ---- process group, rank, device ----------------------------------------------------------------------------------

_patient_group = None  # of gloo, for `agree`
_left_groups = []  # destroyed, but held until `_end_groups`: see `cleanup`
_numbers = itertools.count()  # of the groups, the same on all ranks


def init_process_group(rank=None, world_size=None, backend=None, timeout=None):
    """Bind this process to its device and join the job's process group: nccl for GPUs, gloo for CPU.

    RANK and WORLD_SIZE of a launcher win over what is given, so a caller may pass its local rank. Without a launcher
    `rank` is the local rank too, unless LOCAL_RANK says otherwise. A collective fails after `timeout`, a
    datetime.timedelta; None is torch's default. Joins none when one exists, or in one process without a launcher.
    """
    global _patient_group
    if is_dist_avail_and_initialized():
        return
    if _is_launched():
        rank, world_size = get_rank(), get_world_size()
    elif rank is not None:  # the caller has started its processes itself, on one machine
        os.environ.setdefault("LOCAL_RANK", str(rank))
    device = get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size is None or (world_size == 1 and "MASTER_ADDR" not in os.environ):
        return
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    device_id = device if backend == "nccl" else None
    ranks = {"rank": rank, "world_size": world_size}
    store = _fresh_store(**ranks, timeout=timeout or torch_dist.default_pg_timeout)
    torch_dist.init_process_group(backend, store=store, timeout=timeout, device_id=device_id, **ranks)
    # A rank waits in it for hours where another has slow work to do, and gloo tells it at once if that one is gone.
    _patient_group = torch_dist.new_group(backend="gloo", timeout=timedelta(hours=12))
    agree()  # connecting all pairs is no barrier: if this rank left now, a peer that still connects would fail


def _fresh_store(rank, world_size, timeout):
    """The job's store, under a prefix that no earlier start of its processes has used."""
    # torchrun keeps the store when it starts its processes again, and in it the addresses of those that are gone:
    # https://github.com/pytorch/pytorch/issues/135712
    store, *_ = next(torch_dist.rendezvous("env://", rank, world_size, timeout=timeout))
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return torch_dist.PrefixStore(f"group {next(_numbers)}", store)  # not the addresses of the last group
    own, end = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    store.set(f"rank {rank}", own)
    while time.monotonic() < end:  # until all have read the same names: a process that is gone has never read ours
        names = [name.decode() for name in store.multi_get([f"rank {peer}" for peer in range(world_size)])]
        prefix = uuid.uuid5(uuid.NAMESPACE_OID, "".join(names)).hex
        store.set(f"{prefix} read by {own}", "")
        if store.check([f"{prefix} read by {name}" for name in names]):
            return torch_dist.PrefixStore(prefix, store)
        time.sleep(0.01)
    raise TimeoutError(f"not all of {world_size} ranks have joined within {timeout}")


@atexit.register
def _end_groups():
    """Let gloo's threads end before the interpreter: one that drops its last tensors later aborts the process."""
    if is_dist_avail_and_initialized() and torch_dist.get_backend() == "gloo":  # no cleanup: sys.exit or an error
        if hasattr(sys, "last_type"):  # an error, its traceback is out: a clean end may wait for a peer for ever
            sys.stdout.flush()
            os._exit(1)
        cleanup()
    if _left_groups:
        gc.collect()  # the model, which holds a group and may be in a reference cycle
        _left_groups.clear()


def cleanup():
    """Destroy the process group; not while an exception is handled: peers would fail before it is reported."""
    global _patient_group
    if is_dist_avail_and_initialized() and sys.exc_info()[0] is None:
        # A DDP model must not be the last to hold the group: it would join gloo's threads with Python's lock in its
        # hands, which they may be waiting for (seen with torch 2.11).
        _left_groups.extend([torch_dist.group.WORLD, _patient_group])
        _patient_group = None
        torch_dist.destroy_process_group()


def is_dist_avail_and_initialized():
    """Is there a process group?"""
    return torch_dist.is_available() and torch_dist.is_initialized()


def get_rank():
    """This process's number in the whole job, 0 <= rank < world_size. It decides who prints and writes files."""
    if is_dist_avail_and_initialized():
        return torch_dist.get_rank()
    return int(os.environ["RANK"]) if _is_launched() else 0


def get_local_rank():
    """This process's number on its machine. It decides which GPU is used. SystemExit if a launcher has not set it."""
    if _is_launched() and get_world_size() > 1 and "LOCAL_RANK" not in os.environ:
        raise SystemExit("RANK is set, but LOCAL_RANK is not: set it to the process's number on its machine")
    return int(os.environ.get("LOCAL_RANK", 0))


def get_world_size():
    """The number of processes in the job."""
    if is_dist_avail_and_initialized():
        return torch_dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if _is_launched() else 1


def is_primary():
    """Is this rank 0? Call no collective under it: the other ranks would wait for ever."""
    return get_rank() == 0


def get_device():
    """GPU number `local_rank`, or the CPU if no GPU is visible. SystemExit if there are GPUs, but too few."""
    count = torch.cuda.device_count()
    if count and get_local_rank() >= count:
        line = f"local rank {get_local_rank()} has no GPU: start at most {count} processes on this machine"
        raise SystemExit(f"{line}, one per visible GPU, or let every task see all of its GPUs (srun --gpu-bind=none)")
    return torch.device("cuda", get_local_rank()) if count else torch.device("cpu")


def print_primary(*args, **kwargs):
    """`print` on rank 0 only."""
    if is_primary():
        print(*args, **kwargs)


# ---- data and model -----------------------------------------------------------------------------------------------


def data_sampler(dataset, distributed, shuffle, pad=True, seed=0):
    """A DistributedSampler that gives each rank its share of `dataset`; None if not `distributed`: shuffle there.

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
    are reduced, which saves a copy of them in memory and in time.
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
    if min_num_params < 1:
        raise ValueError(f"min_num_params must be at least 1, got {min_num_params}")
    if get_world_size() == 1:
        return model
    from torch.distributed.fsdp import fully_shard  # takes 0.7 s, which only this function needs
    from torch.distributed.tensor import DTensor, init_device_mesh

    kwargs = {"mesh": init_device_mesh(get_device().type, (get_world_size(),)), **kwargs}
    uses = Counter(param for _, param in model.named_parameters(remove_duplicate=False))
    for module in reversed(list(model.modules())):
        unsharded = [p for _, p in module.named_parameters(remove_duplicate=False) if not isinstance(p, DTensor)]
        # A unit is gathered when called: a ModuleList never is, attention only reads its output projection's weight.
        uncalled = type(module).forward is nn.Module.forward or isinstance(module, NonDynamicallyQuantizableLinear)
        shared = any(uses[param] > count for param, count in Counter(unsharded).items())
        if module is model or (sum(p.numel() for p in set(unsharded)) >= min_num_params and not (shared or uncalled)):
            sync_params(t for t in [*module.parameters(), *module.buffers()] if not isinstance(t, DTensor))
            fully_shard(module, **kwargs)
    return model


def sync_params(params, src=0):
    """Overwrite every tensor of `params` on every rank with rank `src`'s, on any device, of any strides."""
    if get_world_size() > 1:
        for param in params:
            sent = param.detach().to(get_device()).contiguous()
            torch_dist.broadcast(sent, src=src)
            param.detach().copy_(sent)


# ---- metrics ------------------------------------------------------------------------------------------------------

_REDUCE_OPS = {"avg": "SUM", "sum": "SUM", "min": "MIN", "max": "MAX"}  # gloo has no average


def reduce(tensor, op="avg"):
    """`all_reduce`, on every rank, with the average as default: what a loss needs."""
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
    that no rank waits for one that has given up. Waits up to 12 hours, for slow work on one rank, as to unpack data.
    """
    pairs = [(value, error)] * get_world_size()
    if get_world_size() > 1:
        torch_dist.all_gather_object(pairs, (value, error), group=_patient_group)  # None is the default group
    for _, line in pairs:
        if line:
            raise SystemExit(line)
    return [value for value, _ in pairs]


def barrier():
    """Wait until every rank is here."""
    if get_world_size() > 1:
        torch_dist.barrier()


wait_for_everyone = barrier  # its name in https://github.com/joh-fischer/distributed-pytorch


# ---- command line -------------------------------------------------------------------------------------------------


class ArgumentParser(argparse.ArgumentParser):
    """argparse with the first line of `doc` and the defaults in its help, errors of one line, and --a_b for --a-b."""

    def __init__(self, doc=None, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **kwargs):
        super().__init__(description=(doc or "").partition("\n")[0], formatter_class=formatter_class, **kwargs)

    def add_nproc(self, **kwargs):
        """Add --nproc, the number of processes of the job; under a launcher that is what it has started."""
        gpus, default, parse = torch.cuda.device_count(), get_world_size(), at_least(1)
        if not _is_launched():
            default, parse = gpus or 2, at_least(1, gpus or math.inf, ", the number of visible GPUs")
        options = {"type": parse, "default": default, "help": "processes, unless under torchrun"}
        self.add_argument("--nproc", **{**options, **kwargs})

    def parse_known_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else args
        hyphenated = [re.sub("^--[^=]+", lambda name: name[0].replace("_", "-"), arg) for arg in args]
        known = self._option_string_actions  # a script may have declared --a_b itself
        args = [new if new.split("=")[0] in known else old for old, new in zip(args, hyphenated, strict=True)]
        return super().parse_known_args(args, namespace)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def at_least(minimum, most=math.inf, why=""):
    """An argparse `type`: a whole number from `minimum` to `most`; `why` is added to the bounds in the error."""

    def parse(text):
        with contextlib.suppress(ValueError):
            if minimum <= int(text) <= most:
                return int(text)
        bounds = f"of at least {minimum}" if most == math.inf else f"from {minimum} to {most}{why}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {bounds}")

    return parse


seed = at_least(0, 2**32 - 1)  # an argparse `type`


def positive(text):
    """An argparse `type`: a finite number above 0."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
