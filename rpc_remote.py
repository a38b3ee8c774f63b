"""Remote calls for the RPC scripts: start torch.distributed.rpc, call other processes, notice when one is lost, end.

    # in the process that the others depend on
    rpc_remote.join("server", timeout=60)  # every process joins, under a name of its own
    rpc_remote.watch("worker1")  # notices when worker1 dies
    rpc_remote.end()  # waits until each watched process has left; raises DistributedError if one is lost

    # in the other processes
    rpc_remote.join("worker1", timeout=60)
    answer = rpc_remote.call("server", function, 1, 2)  # runs function(1, 2) in the server's process
    rpc_remote.leave("server")  # waits until the server ends the job

PyTorch maintains torch.distributed.rpc but no longer develops it. RPC has no authentication and executes what it
receives. On one machine it listens on loopback only. On several machines, name the interface of a network that you
trust in TP_SOCKET_IFNAME and GLOO_SOCKET_IFNAME. Otherwise it listens on the address of the machine's host name.
"""

import contextlib
import os
import queue
import socket
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as torch_dist
from torch.distributed import rpc

import distributed as dist
import options


def add_timeout(parser):
    """Add --timeout, the second argument of `join`."""
    seconds = options.whole_number(1, 2_000_000)  # RPC counts milliseconds in 32 bits, which last for 24 days
    help_text = "seconds to wait for all processes, or for an answer"
    parser.add_argument("--timeout", type=seconds, default=60, help=help_text)


def get_device():
    """This process's device, which becomes torch's current one. Several processes share a GPU if there are too few."""
    gpus = dist.device_count()
    if gpus == 0:
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator().type, dist.get_local_rank() % gpus)
    torch.accelerator.set_device_index(device)  # else torch would also use GPU 0
    return device


# ---- join ---------------------------------------------------------------------------------------------------------


def join(name, timeout):
    """Start RPC in this process under `name`, and a process group of gloo. An answer may take `timeout` seconds.

    All processes must call it. Raises DistributedError if not all of them do within `timeout` seconds.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    _choose_interface()
    # init_rpc makes a process group of its own, which would wait 24 days for a process that died meanwhile.
    rpc.constants.DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(seconds=timeout)
    # The default transport, shared memory, polls busily and takes the cores that training needs. "uv" is TCP. On one
    # machine "cma" lets the kernel copy tensors from process to process.
    settings = rpc.TensorPipeRpcBackendOptions(rpc_timeout=timeout, _transports=["uv"], _channels=["cma", "basic"])
    # init_rpc itself uses the process group in a way that torch deprecates. The caller cannot change that.
    warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
    try:
        torch_dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=settings)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        line = f"rank {rank}: not all {world_size} processes have joined within {timeout:g} s: {reason}"
        raise dist.DistributedError(line) from None


def _choose_interface():
    """Listen on loopback if all processes are on one machine and the user has named no interface."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME") or "lo"
        os.environ["TP_SOCKET_IFNAME"] = os.environ.get("TP_SOCKET_IFNAME") or "lo"
    interface = os.environ.get("TP_SOCKET_IFNAME", f"the address of {socket.gethostname()}")
    if dist.is_primary() and not interface.startswith("lo"):
        print(f"warning: RPC listens on {interface}, without authentication: trust its network", file=sys.stderr)


# ---- call ---------------------------------------------------------------------------------------------------------


def call(name, function, *args, timeout=rpc.constants.UNSET_RPC_TIMEOUT):
    """Run `function(*args)` in the process `name` and return the result. A `timeout` of 0 waits forever.

    Raises DistributedError if that process is lost or does not answer in time, and what `function` raises.
    """
    return wait(name, rpc.rpc_async(name, function, args, timeout=timeout))


def wait(name, answer):
    """The result of `answer`, the Future of an rpc.rpc_async to the process `name`; raises what `call` does."""
    try:
        return answer.wait()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if reason.startswith("On WorkerInfo"):  # the function itself has failed
            raise
        if "timeout" in reason:
            problem = f"{name} does not answer: it hangs, or waits for a process that hangs"
        else:
            problem = f"{name} is lost"
        raise failure(f"rank {dist.get_rank()}: {problem}: {reason}") from None


def failure(line):
    """A DistributedError to raise. RPC is shut down, because its threads may crash a process while Python ends."""
    rpc.shutdown(graceful=False)
    return dist.DistributedError(line)


# ---- watch, leave and end -----------------------------------------------------------------------------------------

# To watch a process, call it. It answers only when it leaves, and the call fails at once if the process dies.
_watched = {}  # name: the call
_gone = queue.SimpleQueue()  # (name, is it lost?) of each watched process that has done its work or died
_end = torch.futures.Future()  # set when this process may shut RPC down


def watch(name, on_loss=None, *args):
    """Notice when the process `name` dies before the end of the job, and call `on_loss(*args)` in another thread."""

    def note_end(_):
        if _end.done():
            return
        if on_loss is not None:
            on_loss(*args)  # before `end` may return, because its caller then reports who was lost
        _gone.put((name, True))

    _watched[name] = rpc.rpc_async(name, _stay, timeout=0)
    _watched[name].add_done_callback(note_end)


@rpc.functions.async_execution
def _stay():
    return _end


@rpc.functions.async_execution
def _say_goodbye(name):
    """Called by a process that leaves. The Future answers it at the end of the job."""
    _gone.put((name, False))
    return _end


def end(tolerate_lost=False):
    """Wait until each watched process has left or is lost, and shut RPC down.

    Raises DistributedError as soon as a process is lost, unless `tolerate_lost`.
    """
    nobody_is_lost = True
    staying = set(_watched)
    while staying:
        name, is_lost = _gone.get()
        staying.discard(name)
        if is_lost and not tolerate_lost:
            raise failure(f"{name} is lost")
        if is_lost:
            nobody_is_lost = False
    _end.set_result(nobody_is_lost)
    for answer in _watched.values():
        with contextlib.suppress(RuntimeError):  # this one is lost
            answer.wait()  # until the process has learnt of the end
    _shut_down(nobody_is_lost)


def leave(name):
    """Answer calls until the process `name` ends the job. Then shut RPC down. `name` watches this process."""
    nobody_is_lost = call(name, _say_goodbye, rpc.get_worker_info().name, timeout=0)
    _end.set_result(None)
    _shut_down(nobody_is_lost)


def _shut_down(nobody_is_lost):
    """A graceful shutdown waits for all processes, so it fails if one is lost."""
    with contextlib.suppress(RuntimeError):  # a process may be lost in this very moment
        rpc.shutdown(graceful=nobody_is_lost, timeout=60)
