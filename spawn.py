"""Start the processes of a job on this machine, and end them together. `distributed.launch` calls `run_processes`.

They are forked from a server that has imported torch once: with torch.multiprocessing.spawn each of them would import
it anew. All end when the launcher ends, however that ends, and so do their children. The first failure ends all. The
rendezvous store listens on loopback, on a port that no other job can take. It needs Linux.
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
from multiprocessing import connection, forkserver
from unittest import mock

import torch
import torch.distributed as torch_dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

# The fork server imports these once for all workers. A process's first optimizer would import torch._dynamo. Importing
# them does not initialize CUDA: a process that is forked after that could not use a GPU.
PRELOADED = ["torch", "torch._dynamo", "torch.distributed.nn.functional"]

_one_job = threading.Lock()  # multiprocessing has one fork server, and it ends with the job


def run_processes(worker_fn, args, nprocs, tolerate_killed=False):
    """Run `worker_fn(*args)` in `nprocs` new processes and wait until all are done. Returns what it returns on rank 0.

    Each has its own copy of `args`, and in its environment what torchrun would set. The first failure is raised here:
    torch.multiprocessing.ProcessRaisedException with the worker's traceback, SystemExit with the message of
    `sys.exit(message)`, or ProcessExitedException with the rank and how it ended. With `tolerate_killed` the others
    continue when a worker other than rank 0 is killed by a signal. The fork server of this process ends with the job.
    """
    result = os.path.join(multiprocessing.util.get_temp_dir(), "result")  # a file: the store takes at most 8 MB
    if len(os.fsencode(result)) > 96:  # multiprocessing's sockets have 11 bytes more, and the limit is 107
        raise SystemExit(f"TMPDIR is too long, a socket in it would be {result}: choose a shorter one")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = start_store()
    pids, report_pid = context.Pipe(duplex=False)
    guard = context.Process(target=_guard, args=(pids,))
    work = pickle.dumps((worker_fn, args))  # a copy for each: multiprocessing would share the tensors in it
    # pickle writes a name behind its length, so a text with the word in it does not count.
    if b"\x08__main__" in work and not os.path.isfile(getattr(sys.modules["__main__"], "__file__", "")):
        raise SystemExit("launch needs a script: write worker_fn into a .py file, from which new processes import it")
    shared = (work, result, report_pid, _environment(nprocs, store.port), torch.initial_seed(), _numpy_state())
    workers = [context.Process(target=_worker, args=(rank, *shared)) for rank in range(nprocs)]
    if not _one_job.acquire(blocking=False):
        raise RuntimeError("another thread runs a job: a process runs one job at a time")
    # The fork server hears of the end of a process by this signal, and inherits the caller's mask.
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    try:
        # Else the server would import modules from the working folder, such as a queue.py. Python 3.11 and later.
        with mock.patch.dict(os.environ, PYTHONSAFEPATH="1"):
            for process in (guard, *workers):
                process.start()
        _wait(workers, store, tolerate_killed)
        return torch.load(result, map_location="cpu", weights_only=False) if os.path.exists(result) else None
    finally:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            for process in workers:
                if process.pid:  # it has started
                    process.kill()
                    process.join()
            report_pid.close()  # then the guard ends their children and the fork server
            with contextlib.suppress(FileNotFoundError):
                os.remove(result)
            with contextlib.suppress(FileNotFoundError, ChildProcessError):
                # Wait for the server's end: the next job would take a server that is still about to end for alive.
                forkserver._forkserver._stop()
        finally:
            _one_job.release()


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
    environment |= {name: environment.get(name) or value for name, value in defaults.items()}
    if not environment.get("OMP_NUM_THREADS", "").split(",")[0].lstrip("0").isdecimal():  # OpenMP ignores it too
        environment["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // nprocs))
    # With this flag rank 0 connects to the launcher's store instead of opening one, as it does under torchrun.
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return environment | job | {"WORLD_SIZE": str(nprocs), "LOCAL_WORLD_SIZE": str(nprocs)}


def _numpy_state():
    return sys.modules["numpy.random"].get_state()[1].tolist() if "numpy.random" in sys.modules else None


def _wait(processes, store, tolerate_killed):
    """Wait until all processes have ended, or one has failed. Raises the failure that came first.

    A worker reports before its sockets close, and its peers fail after that. So the first report is the cause, unless a
    rank has died without a report: then that is the cause. Its peers may notice its death before this process does, so
    this process looks again after 0.2 s. That is long enough in practice, but no guarantee.
    """
    while True:
        running = [process.sentinel for process in processes if process.exitcode is None]
        if _failed(processes, tolerate_killed) or store.check(["first report"]):
            break
        if not running:
            return
        connection.wait(running)
    time.sleep(0.2)
    failed = _failed(processes, tolerate_killed)
    if not failed:
        raise pickle.loads(store.get("first report"))
    code = processes[failed[0]].exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    raise ProcessExitedException(f"rank {failed[0]} {how}", failed[0], processes[failed[0]].pid, code)


def _failed(processes, tolerate_killed):
    """The ranks that have died without a report. The exit code of a killed process is negative."""
    failed = [rank for rank, process in enumerate(processes) if process.exitcode]
    return [rank for rank in failed if not (tolerate_killed and rank > 0 and processes[rank].exitcode < 0)]


# ---- in the started processes --------------------------------------------------------------------------------------


def _guard(pids):
    """Wait until the launcher has ended or wants to, and end all that it has left. `pids` gives the workers' pids.

    This is a process: a thread of a worker could not run while the worker is in code that holds Python's lock (GIL).
    """
    os.setsid()  # Ctrl-C is for the launcher
    server = os.getppid()
    workers = []
    with contextlib.suppress(EOFError):  # the launcher has closed its end, and each worker too
        while True:
            workers.append(pids.recv())
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # the worker's children too
    if os.getppid() == server:  # otherwise the server has ended before, and the parent is the system's first process
        os.kill(server, signal.SIGKILL)  # it would live for seconds longer than the job, and hold stdout open


def _worker(rank, work, result, report_pid, environment, torch_seed, numpy_state):
    os.setsid()  # its children end with it
    report_pid.send(os.getpid())
    report_pid.close()
    store = torch_dist.TCPStore("127.0.0.1", int(environment["MASTER_PORT"]), is_master=False)
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    # A top-level `torch.manual_seed` is kept; otherwise each rank draws its own seed. Without that seed all ranks would
    # have the fork server's, and not the launcher's. (`np.random.seed` is kept unless the launcher has drawn numbers
    # since. In that case call it in `worker_fn`.)
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
        value = worker_fn(*args)
        if rank == 0 and value is not None:
            torch.save(value, result)
    except SystemExit as error:
        message = error.code if isinstance(error.code, str) else f"rank {rank} exited with status {error.code}"
        failure = SystemExit(message[:1_000_000]) if error.code else None  # the store takes at most 8 MB
    except BaseException:
        trace = traceback.format_exc()[-1_000_000:]
        failure = ProcessRaisedException(f"rank {rank} raised:\n\n{trace}", rank, os.getpid())
    if failure:
        sys.stdout.flush()
        with contextlib.suppress(RuntimeError):  # the launcher has ended
            store.compare_set("first report", "", pickle.dumps(failure))  # does nothing if there is one
        os._exit(0)  # at once; a rank that ends with another status has not reported
