"""Start the processes of a job on this machine, and end them together. `distributed.launch` calls `run_processes`.

    launcher ── the job, and how a worker has ended ──▶ server ── forks ──▶ workers
    launcher ◀───────── a result or a failure ────────────────────────────── each worker

Both lines are pipes. No other process can write to them, so the launcher may unpickle what they bring.

The server imports torch once for all workers: with torch.multiprocessing.spawn each of them would import it anew. When
the launcher has ended, however it ended, the server's pipe ends too. Then the server ends all workers and their
children. It does the same after the first failure. Only children that left the worker's process group stay, for
instance those started with `start_new_session=True`. It needs Linux.
"""

import contextlib
import ctypes
import fcntl
import importlib
import io
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from multiprocessing import connection
from multiprocessing import spawn as mp_spawn

import torch
import torch.distributed as torch_dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

# The server imports these once for all workers. A process's first optimizer would import torch._dynamo. Importing them
# does not initialize CUDA: a process that is forked after that could not use a GPU.
PRELOADED = ["torch._dynamo", "torch.distributed.nn.functional"]


def run_processes(worker_fn, args, nprocs, tolerate_killed=False):
    """Run `worker_fn(*args)` in `nprocs` new processes and wait until all are done. Returns what it returns on rank 0.

    Each has its own copy of `args`, and in its environment what torchrun would set. The first failure is raised here:
    torch.multiprocessing.ProcessRaisedException with the worker's traceback, SystemExit with the message of
    `sys.exit(message)`, or ProcessExitedException with the rank and how it ended. With `tolerate_killed` the others
    continue when a worker other than rank 0 is killed by a signal.
    """
    main = mp_spawn.get_preparation_data("worker")  # from which multiprocessing imports the script in a new process
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    is_importable = os.path.isfile(script) and os.path.basename(script) != "__main__.py"
    if not is_importable and any(getattr(each, "__module__", None) == "__main__" for each in (worker_fn, *args)):
        raise SystemExit("launch needs a script: new processes import worker_fn from a .py file other than __main__.py")
    # The key cannot be sent. Without the method, a worker may still choose how it starts processes of its own.
    del main["authkey"], main["start_method"]
    job = pickle.dumps((worker_fn, args))  # a copy for each: multiprocessing would share the tensors in it
    store = start_store()
    channel, servers_end = multiprocessing.Pipe()
    reports, workers_ends = zip(*(multiprocessing.Pipe(duplex=False) for _ in range(nprocs)), strict=True)
    server = start_server(_environment(nprocs, store.port), servers_end, *workers_ends)
    try:
        channel.send((PRELOADED, main, job))
        return _wait(channel, reports, tolerate_killed)
    finally:
        channel.close()  # then the server ends the workers and itself
        server.wait()
        del store  # closes it, although the traceback of a failure may keep this function's names


def start_server(environment, *ends):
    """Start a process that calls `_serve` with its ends of the pipes, and close them here."""
    fds = [end.fileno() for end in ends]
    # It imports from where this process does. With `-c` alone it would import from the working folder too.
    code = f"import sys; sys.path[:] = {list(map(str, sys.path))}; import spawn; spawn._serve(*{fds})"
    command = [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", code]
    # Ctrl-C is for the launcher, so the session is a new one.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, env=environment, start_new_session=True)
    for end in ends:
        end.close()
    return server


def start_store():
    """A rendezvous store in this process, on a port of loopback that no other job can take: it listens already."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        if probe.connect_ex(address):  # sends nothing
            raise SystemExit("the loopback interface is down, over which the processes talk: `ip link set lo up`")
    return torch_dist.TCPStore(*address, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _environment(nprocs, port):
    """The workers' variables. An empty default is a missing one, and those of an outer torchrun are for another job."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    defaults = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "lo")
    defaults["THP_MEM_ALLOC_ENABLE"] = "1"  # huge pages: FSDP allocates new memory for each gather
    defaults["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // nprocs))
    environment |= {name: environment.get(name) or value for name, value in defaults.items()}
    # With this flag rank 0 connects to the launcher's store instead of opening one, as it does under torchrun.
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return environment | job | {"WORLD_SIZE": str(nprocs), "LOCAL_WORLD_SIZE": str(nprocs)}


def _wait(channel, reports, tolerate_killed):
    """Wait until all workers have reported. Raises the failure that came first; returns rank 0's value.

    The end of a process closes its pipe before its sockets, see `_serve`, and its peers fail after that. So where a
    pipe has ended without a report, that worker is the cause of each failure that can be read at the same time.
    """
    value, waiting = None, {report: rank for rank, report in enumerate(reports)}
    while waiting:
        connection.wait(waiting)
        failures = {}  # by the time at which they were reported
        for report in connection.wait(waiting, timeout=0):  # all that can be read by now
            rank = waiting.pop(report)
            try:
                seconds, failure, result = report.recv()
            except (EOFError, OSError):
                _check_exit(rank, channel, tolerate_killed)
                continue
            if failure:
                failures[seconds] = failure
            elif result:
                value = torch.load(io.BytesIO(result), map_location="cpu", weights_only=False)
        if failures:
            raise failures[min(failures)]
    return value


def _check_exit(rank, channel, tolerate_killed):
    """Raise ProcessExitedException if this worker, which has not reported, has failed."""
    channel.send(rank)
    pid, code = channel.recv()
    if code == 0 or (code < 0 < rank and tolerate_killed):
        return
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    raise ProcessExitedException(f"rank {rank} {how}", rank, pid, code)


# ---- in the started processes --------------------------------------------------------------------------------------


def _serve(*fds):
    """Fork the workers, tell the launcher how they have ended, and end them when the launcher ends."""
    sys.stdout.reconfigure(line_buffering=True)  # nothing printed is lost when another rank's failure ends a worker
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # were it ignored, the exit codes of workers would be lost
    # Commands that a worker starts do not inherit these, and Linux closes the highest of a process first.
    channel, *reports = [connection.Connection(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 256)) for fd in fds]
    for fd in fds:
        os.close(fd)
    preloaded, main, job = channel.recv()
    for name in preloaded:
        importlib.import_module(name)
    pids = []
    for rank, report in enumerate(reports):
        pid = os.fork()
        if pid == 0:
            for other in (channel, *reports[rank + 1 :]):
                other.close()
            _work(rank, report, main, job)
        os.setpgid(pid, pid)
        report.close()
        pids.append(pid)
    with contextlib.suppress(EOFError, ConnectionError):  # the launcher has closed its end
        while True:
            pid = pids[channel.recv()]
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            channel.send((pid, end.si_status if end.si_code == os.CLD_EXITED else -end.si_status))
    # No worker has been waited for, so no other process can have the number of one that has ended.
    for pid in pids:
        os.killpg(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    os._exit(0)


def _work(rank, report, main, job):
    """Run the job's function in this process, report how it went, and leave."""
    os.setpgid(0, 0)  # its children are in this group too. The server does the same, whoever comes first
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends if the server does
    os.register_at_fork(after_in_child=report.close)  # the pipe ends with this process, and not with its children
    torch.set_num_threads(torch.get_num_threads())  # the threads that the server may have are not in a fork
    # Each rank draws numbers of its own, unless the script has a seed at its top level.
    torch.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    failure, result = None, io.BytesIO()
    try:
        multiprocessing.current_process()._inheriting = True  # refuses a script that calls `launch` at its import
        mp_spawn.prepare(main)
        multiprocessing.current_process()._inheriting = False
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        worker_fn, args = pickle.loads(job)
        value = worker_fn(*args)
        if rank == 0 and value is not None:
            torch.save(value, result)
        threading._shutdown()  # waits for threads, as Python does at its end
    except SystemExit as error:
        message = error.code if isinstance(error.code, str) else f"rank {rank} exited with status {error.code}"
        failure = SystemExit(message) if error.code else None
    except BaseException:
        failure = ProcessRaisedException(f"rank {rank} raised:\n\n{traceback.format_exc()}", rank, os.getpid())
    with contextlib.suppress(OSError, ValueError):  # stdout is closed
        sys.stdout.flush()
    with contextlib.suppress(BrokenPipeError):  # the launcher has ended
        report.send((time.monotonic(), failure, result.getvalue()))
    os._exit(0)
