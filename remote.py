"""Remote calls for the RPC scripts: start torch.distributed.rpc, call other processes, notice when one is lost, end.

    # in the process that the others depend on
    remote.join("server", timeout=60)  # every process joins, under a name of its own
    remote.watch("worker1")  # notices when worker1 dies
    remote.end()  # waits until each watched process has left; raises DistributedError if one is lost

    # in the other processes
    remote.join("worker1", timeout=60)
    answer = remote.call("server", function, 1, 2)  # runs function(1, 2) in the server's process
    remote.leave("server")  # waits until the server ends the job

PyTorch maintains torch.distributed.rpc but no longer develops it. RPC has no authentication and executes what it
receives. On one machine it listens on loopback only. On several machines, name the interface of a network that you
trust in TP_SOCKET_IFNAME and GLOO_SOCKET_IFNAME. Otherwise it listens on the address of the machine's host name.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as torch_dist
from torch.distributed import rpc

import distributed as dist
import options
import spawn

# An option's type: RPC counts milliseconds in 32 bits, which last for 24 days.
timeout_seconds = options.whole_number(1, 2_000_000, "about 23 days")


def get_device():
    """This process's device, which becomes torch's current one. Several processes share a GPU if there are too few."""
    gpus = torch.cuda.device_count()
    if gpus == 0:
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_local_rank() % gpus)
    torch.cuda.set_device(device)  # else torch would also use GPU 0
    return device


# ---- join ---------------------------------------------------------------------------------------------------------


def join(name, timeout):
    """Start RPC in this process under `name`, and a process group of gloo. An answer may take `timeout` seconds.

    All processes must call it. Raises DistributedError if not all of them do within `timeout` seconds.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    _choose_interface()
    try:
        _wait_for_rank_0(timeout)
        torch_dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        _init_rpc(name, rank, world_size, timeout)
    except (OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        line = f"rank {rank}: not all {world_size} processes have joined within {timeout:g} s: {reason}"
        raise dist.DistributedError(line) from None


def _choose_interface():
    """Listen on loopback if all processes are on one machine and the user has named no interface."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        loopback = spawn.loopback()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("TP_SOCKET_IFNAME", loopback)
    interface = os.environ.get("TP_SOCKET_IFNAME", f"the address of {socket.gethostname()}")
    if dist.is_primary() and not interface.startswith("lo"):
        print(f"warning: RPC listens on {interface}, without authentication: trust its network", file=sys.stderr)


def _wait_for_rank_0(timeout):
    """Wait until rank 0 or the launcher listens. torch would wait too, but log 40 lines of C++ frames at the end."""
    if dist.get_rank() == 0:
        return
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection(address, timeout).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise OSError(f"nothing listens on {address[0]}:{address[1]} ({error.strerror or error})") from None
        time.sleep(0.1)


def _init_rpc(name, rank, world_size, timeout):
    """rpc.init_rpc, with the settings that it has no public argument for."""
    # init_rpc makes a process group of its own, which would wait 24 days for a process that died meanwhile.
    rpc.constants.DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(seconds=timeout)
    # The default transport, shared memory, polls busily and takes the cores that training needs. "uv" is TCP. On one
    # machine "cma" lets the kernel copy tensors from process to process.
    settings = rpc.TensorPipeRpcBackendOptions(rpc_timeout=timeout, _transports=["uv"], _channels=["cma", "basic"])
    with warnings.catch_warnings():
        # init_rpc itself uses the process group in a way that torch deprecates. The caller cannot change that.
        warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
        rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=settings)


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
        raise dist.DistributedError(f"rank {dist.get_rank()}: {problem}: {reason}") from None


# ---- watch, leave and end -----------------------------------------------------------------------------------------

# To watch a process, call it. It answers only when it leaves, and the call fails at once if the process dies.
_watched = {}  # name: the call
_left = set()  # names of watched processes that have done their work
_lost = set()  # names of watched processes that died before the end
_changed = threading.Condition()  # guards the two sets
_end = torch.futures.Future()  # set when this process may shut RPC down


def watch(name, on_loss=None, *args):
    """Notice when the process `name` dies before the end of the job, and call `on_loss(*args)` in another thread."""

    def note_end(_):
        if _end.done():
            return
        if on_loss is not None:
            on_loss(*args)  # before `end` may return, because its caller then reports who was lost
        with _changed:
            _lost.add(name)
            _changed.notify_all()

    _watched[name] = rpc.rpc_async(name, _stay, timeout=0)
    _watched[name].add_done_callback(note_end)


@rpc.functions.async_execution
def _stay():
    return _end


@rpc.functions.async_execution
def _say_goodbye(name):
    """Called by a process that leaves. The Future answers it at the end of the job."""
    with _changed:
        _left.add(name)
        _changed.notify_all()
    return _end


def end(tolerate_lost=False):
    """Wait until each watched process has left or is lost, and shut RPC down.

    Raises DistributedError as soon as a process is lost, unless `tolerate_lost`.
    """
    with _changed:
        while True:
            gone = _left | _lost
            if all(name in gone for name in _watched):
                break
            if _lost and not tolerate_lost:
                break
            _changed.wait()
        if _lost and not tolerate_lost:
            raise dist.DistributedError(f"{', '.join(sorted(_lost))} is lost")
    nobody_is_lost = not _lost
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
