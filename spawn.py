"""Start the processes of a job on this machine, and end them together. `distributed.launch` calls `run_processes`.

They are forked from a server that has imported torch once: with torch.multiprocessing.spawn each of them would import
it anew. Each ends when the launcher ends, however that ends, and so do its own children. The first failure ends all.
The rendezvous store listens on loopback, on a port that no other job can take. It needs Linux.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from multiprocessing import connection

import torch
import torch.distributed as torch_dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

# The fork server imports these once for all workers. A process's first optimizer would import torch._dynamo. Importing
# them does not initialize CUDA: a process that is forked after that could not use a GPU.
PRELOADED = ["torch", "torch._dynamo", "torch.distributed.nn.functional"]


def run_processes(worker_fn, args, nprocs, tolerate_killed=False):
    """Run `worker_fn(*args)` in `nprocs` new processes and wait until all are done.

    Each has its own copy of `args`, and in its environment what torchrun would set. The first failure is raised here:
    torch.multiprocessing.ProcessRaisedException with the worker's traceback, SystemExit with the message of
    `sys.exit(message)`, or ProcessExitedException with the rank and how it ended. With `tolerate_killed` the others
    continue when a worker other than rank 0 is killed by a signal. The fork server of this process ends with the job.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = start_store()
    work = pickle.dumps((worker_fn, args))  # a copy for each: multiprocessing would share the tensors in it
    shared = (work, _environment(nprocs, store.port), torch.initial_seed(), _numpy_state())
    processes = [context.Process(target=_worker, args=(rank, *shared)) for rank in range(nprocs)]
    try:
        for process in processes:
            process.start()
        _wait(processes, store, tolerate_killed)
    finally:
        for process in processes:
            _end(process)
        if store.check(["fork server"]):
            _end_fork_server(int(store.get("fork server")))


def start_store():
    """A rendezvous store in this process, on a port of loopback that no other job can take: it listens already."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    fd = listener.detach()
    return torch_dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def loopback():
    """The name of the loopback interface: "lo" on Linux, "lo0" on macOS."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _environment(nprocs, port):
    defaults = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), loopback())
    defaults["THP_MEM_ALLOC_ENABLE"] = "1"  # huge pages: FSDP allocates new memory for each gather
    defaults["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // nprocs))
    # With the agent's store rank 0 joins the launcher's, as it joins that of torchrun.
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    job |= {"WORLD_SIZE": str(nprocs), "LOCAL_WORLD_SIZE": str(nprocs)}
    return {**defaults, **os.environ, **job}


def _numpy_state():
    if "numpy.random" in sys.modules:
        return sys.modules["numpy.random"].get_state()[1].tolist()
    return None


def _wait(processes, store, tolerate_killed):
    """Wait until all processes have ended, or one has failed. Raises the failure that came first.

    A worker reports before its sockets close, and its peers fail after that. So the first report is the cause. A rank
    that has died without a report is the cause of all reports.
    """
    while True:
        running = [process.sentinel for process in processes if process.exitcode is None]
        if _failed(processes, tolerate_killed) or store.check(["first report"]):
            break
        if not running:
            return
        connection.wait(running)
    time.sleep(0.2)  # the end of a peer may be noticed before the end that caused it
    for rank in _failed(processes, tolerate_killed):
        if not store.check([f"rank {rank} has reported"]):
            code = processes[rank].exitcode
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
            raise ProcessExitedException(f"rank {rank} {how}", rank, processes[rank].pid, code)
    raise pickle.loads(store.get("first report"))


def _failed(processes, tolerate_killed):
    """The ranks that have failed. The exit code of a running process is None, and of a killed process is negative."""
    failed = [rank for rank, process in enumerate(processes) if process.exitcode]
    return [rank for rank in failed if not (tolerate_killed and rank > 0 and processes[rank].exitcode < 0)]


def _end(process):
    if process.pid is not None:  # it was started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its children too
        process.kill()  # it may not yet lead a group
        process.join()


def _end_fork_server(pid):
    """The fork server would live for seconds longer than the job, and hold stdout open."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # a worker is not its parent
        os.kill(pid, signal.SIGKILL)
        # Do not reap it: multiprocessing does, before it starts another one for the next job.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


# ---- in the started process ---------------------------------------------------------------------------------------


def _worker(rank, work, environment, torch_seed, numpy_state):
    server = os.getppid()
    os.setsid()  # its children end with it
    threading.Thread(target=_end_with_launcher, args=(server,), daemon=True).start()
    store = torch_dist.TCPStore("127.0.0.1", int(environment["MASTER_PORT"]), is_master=False)
    store.set("fork server", str(server))
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    # A seed that the script has set at its top level is the launcher's too, and stays. Others are copies of the fork
    # server's, equal on all ranks, so each rank draws a new one. (A seed of numpy does not stay if the launcher has
    # drawn numbers since: then set it in `worker_fn`.)
    if torch.initial_seed() != torch_seed:
        torch.seed()
    if _numpy_state() not in (None, numpy_state):
        sys.modules["numpy.random"].seed()
    multiprocessing.set_start_method(None, force=True)  # a DataLoader starts its processes as it does elsewhere
    sys.stdout.reconfigure(line_buffering=True)  # nothing printed is lost when another rank's failure ends this one
    failure = None
    try:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"].split(",")[0]))
        worker_fn, args = pickle.loads(work)
        worker_fn(*args)
    except SystemExit as error:
        if isinstance(error.code, str):
            failure = SystemExit(error.code)
        elif error.code:
            failure = SystemExit(f"rank {rank} exited with status {error.code}")
    except BaseException:
        trace = traceback.format_exc()[-1_000_000:]  # the store takes at most 8 MB
        failure = ProcessRaisedException(f"rank {rank} raised:\n\n{trace}", rank, os.getpid())
    if failure:
        sys.stdout.flush()
        with contextlib.suppress(RuntimeError):  # the launcher has ended
            store.compare_set("first report", "", pickle.dumps(failure))  # does nothing if there is one
            store.set(f"rank {rank} has reported", "")
        os.killpg(0, signal.SIGKILL)  # its children too, which the launcher would end only if it still lives


def _end_with_launcher(server):
    """Wait until the launcher has ended, for whatever reason, and end all that it has left."""
    multiprocessing.parent_process().join()
    _end_fork_server(server)
    os.killpg(0, signal.SIGKILL)
