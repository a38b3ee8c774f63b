"""Start the processes of a job on this machine, and end them together. `distributed.launch` calls `run_processes`.

torch.multiprocessing.start_processes is not enough. Every process imports torch anew, which takes about a minute for 64
of them on two cores. With it, workers outlive a launcher that is killed, and a peer's error may be shown instead of
the first one. Here workers are forked from a server that has imported torch once, each ends when the launcher ends,
and the caller gets the first failure. It needs a POSIX system: Linux, macOS or WSL.
"""

import atexit
import contextlib
import gc
import json
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import weakref
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as torch_dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

# The fork server imports these once, so that the workers need not. Importing them does not initialize CUDA, which
# would not work in a process that is forked afterwards.
PRELOADED = ("torch", "torch._dynamo")  # each process's first optimizer would otherwise import torch._dynamo, for 1 s
PRELOADED_IF_IMPORTED = ("torch.distributed.nn.functional", "torchvision", "transformers.modeling_layers")


def _numpy_state():
    if "numpy.random" in sys.modules:
        return sys.modules["numpy.random"].get_state()[1].tobytes()
    return None


# A worker has these from the fork server. The script that it imports may set seeds of its own afterwards.
TORCH_SEED = torch.initial_seed()
NUMPY_STATE = _numpy_state()

IMPORTING_MAIN = 77  # exit status of a worker whose script calls `launch` while it is imported


def run_processes(worker_fn, args, nprocs, tolerate_killed=False):
    """Run `worker_fn(*args)` in `nprocs` new processes and wait until all are done.

    Each process has its own copy of `args`, and RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT in its environment. The first failure ends all processes, and is raised here:
    torch.multiprocessing.ProcessRaisedException with the worker's traceback, SystemExit with the message of
    `sys.exit(message)`, or ProcessExitedException with the rank and its signal or exit status. With
    `tolerate_killed` the others continue when a worker other than rank 0 is killed by a signal. The message of
    a later `sys.exit` then names that worker too.
    """
    work = _pickle_work(worker_fn, args)
    context = multiprocessing.get_context("forkserver")
    imported = [name for name in PRELOADED_IF_IMPORTED if name in sys.modules]
    context.set_forkserver_preload([*PRELOADED, *imported])
    store = start_store()
    environment = _worker_environment(nprocs, store.port)
    # A Connection can be sent to the fork server's children. These two are stdout and stderr.
    outputs = [Connection(os.dup(1), readable=False), Connection(os.dup(2), readable=False)]
    processes = []
    for rank in range(nprocs):
        processes.append(context.Process(target=_worker, args=(rank, work, environment, outputs)))
    to_end = list(processes)
    try:
        _start_fork_server()
        for process in processes:
            process.start()
        with _forwarded_sigterm(to_end):
            _wait_for(processes, to_end, store, tolerate_killed)
    except OSError as error:
        if str(error) != "AF_UNIX path too long":
            raise
        folder = tempfile.gettempdir()
        line = f"the path of TMPDIR, {folder}, is too long for a socket in it: choose one of at most 70 characters"
        raise SystemExit(line) from None
    finally:
        while to_end:
            try:
                _end(to_end[-1])
                to_end.pop()
            except KeyboardInterrupt:  # Ctrl-C once more: without this, a worker would be left, and waited for
                pass


def _start_fork_server():
    """Start it, unless it runs, with SIGTERM blocked. A scheduler may send SIGTERM to every process of a job.

    Without the fork server, which is their parent, nobody would learn that the workers have saved.
    """
    resource_tracker.ensure_running()  # the fork server needs it, and its start unblocks SIGTERM
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forkserver.ensure_running()  # it takes over the mask of this thread
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def _forwarded_sigterm(running):
    """Send SIGTERM on to the processes in the list `running`: one that handles it can save first, the others end.

    This process then ends as they do.
    """
    received = []

    def forward(number, frame):
        received.append(number)
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)

    is_ours = threading.current_thread() is threading.main_thread() and _has_default_sigterm()
    if is_ours:
        signal.signal(signal.SIGTERM, forward)
    try:
        yield
    except ProcessExitedException as failure:
        if received and failure.exit_code == 128 + signal.SIGTERM:  # saved by checkpoint.Preemption
            raise SystemExit(failure.exit_code) from None
        if received and failure.exit_code == -signal.SIGTERM:
            for process in running:
                _end(process)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        raise
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _has_default_sigterm():
    return signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def _pickle_work(worker_fn, args):
    """The function and its arguments as bytes: multiprocessing itself would put tensors into shared memory."""
    # multiprocessing sets this attribute in a child that is still importing the script.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(IMPORTING_MAIN)
    try:
        work = pickle.dumps((worker_fn, args))
    except (AttributeError, pickle.PicklingError) as error:
        if "local" in str(error) or "lambda" in str(error):
            line = "the function given to launch, and its arguments, must be defined at the top level of a file"
            raise SystemExit(f"{line}: {error}") from None
        raise
    # Neither `python -c` nor a notebook has a file. The file of `python < script.py` is called <stdin>.
    script = getattr(sys.modules["__main__"], "__file__", "")
    if b"__main__" in work and not os.path.exists(script):
        raise SystemExit("launch needs a script that new processes can import: save this code to a file, and run that")
    return work


def start_store():
    """A rendezvous store in this process, on a free port of loopback that no other job can take."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener_fd = listener.detach()
    return torch_dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener_fd)


def loopback():
    """The name of the loopback interface: "lo" on Linux, "lo0" on macOS."""
    for _, name in socket.if_nameindex():
        if name.startswith("lo"):
            return name
    raise RuntimeError("this machine has no loopback interface")


def _worker_environment(nprocs, port):
    interface = loopback()
    environment = {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // nprocs)),
        # Use huge pages on the CPU: FSDP2 allocates new memory for each gather, which is slow with small ones.
        "THP_MEM_ALLOC_ENABLE": "1",
    }
    environment.update(os.environ)  # the user's settings override the defaults above, but not the settings below
    environment.update(
        WORLD_SIZE=str(nprocs),
        LOCAL_WORLD_SIZE=str(nprocs),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # rank 0 joins the launcher's store, as under torchrun, and starts none
    )
    return environment


def _wait_for(processes, to_end, store, tolerate_killed):
    """Return when all processes have ended; raise the first failure. Takes those that have ended out of `to_end`."""
    while True:
        running = []
        for process in list(to_end):
            if process.exitcode is None:
                running.append(process.sentinel)
            else:
                _end(process)  # at once, before another program gets its process id
                to_end.remove(process)
        # Ask only after the loop. If nothing is running, every exit code has been read, so no failure is missed.
        if _failed(processes, tolerate_killed):
            break
        if not running:
            return
        wait(running)
    # A peer's exit may be reported before the exit that caused it. Wait for both.
    time.sleep(0.2)
    # No variable holds the failure here: a cycle with its traceback would keep the port of the store open.
    raise _failure(processes, store, tolerate_killed)


def _failure(processes, store, tolerate_killed):
    """The exception to raise for the processes that failed."""
    failed = _failed(processes, tolerate_killed)
    failure = _root_cause(failed, store)
    done = [rank for rank, process in enumerate(processes) if process.exitcode == 0]
    if done and isinstance(failure, ProcessRaisedException) and "onnection" in str(failure):
        ranks = ", ".join(map(str, done))
        note = f"finished without an error: {ranks}; did the ranks call different numbers of collectives?"
        failure = ProcessRaisedException(f"{failure}\n({note})", failure.error_index, failure.error_pid)
    killed = _failed(processes, tolerate_killed=False).keys() - failed.keys()
    if killed and isinstance(failure, SystemExit):
        notes = [_how_it_ended(rank, processes[rank]) for rank in sorted(killed)]
        failure = SystemExit(f"{failure} ({', '.join(notes)})")  # a killed worker may have caused the failure
    return failure


def _failed(processes, tolerate_killed):
    """The processes that failed, by rank."""
    failed = {}
    for rank, process in enumerate(processes):
        was_killed = process.exitcode is not None and process.exitcode < 0
        tolerated = tolerate_killed and rank > 0 and was_killed
        if process.exitcode and not tolerated:
            failed[rank] = process
    return failed


def _root_cause(failed, store):
    """The failure that came first: a worker that died without a report, or else the first report.

    A worker reports before its sockets close, and its peers fail when they close. So peers report later.
    """
    reports = []
    while store.queue_len("failures"):
        reports.append(json.loads(store.queue_pop("failures")))
    reported = {report["rank"] for report in reports}
    silent = sorted(failed.keys() - reported)
    # NCCL's watchdog aborts a process whose peer has failed. So an abort is the cause only if nothing else can be.
    aborted = [rank for rank in silent if failed[rank].exitcode == -signal.SIGABRT]
    others = [rank for rank in silent if rank not in aborted]
    if reports and not others:
        notes = [_how_it_ended(rank, failed[rank]) for rank in aborted]
        return _reported_failure(reports[0], notes)
    rank = (others or aborted)[0]
    process = failed[rank]
    if process.exitcode == IMPORTING_MAIN:
        return SystemExit('launch is called while a worker imports the script: put it under if __name__ == "__main__":')
    name = signal.Signals(-process.exitcode).name if process.exitcode < 0 else None
    return ProcessExitedException(_how_it_ended(rank, process), rank, process.pid, process.exitcode, name)


def _reported_failure(report, notes):
    """The exception to raise for what `_report` has sent. The notes are appended to its message."""
    rank, pid, message = report["rank"], report["pid"], report["message"]
    if notes:
        message = f"{message} ({', '.join(notes)})"
    if report["kind"] == "raised":
        return ProcessRaisedException(message, rank, pid)
    if report["kind"] == "status":
        return ProcessExitedException(message, rank, pid, report["status"])
    return SystemExit(message)


def _how_it_ended(rank, process):
    if process.exitcode < 0:
        return f"rank {rank} was killed by {signal.Signals(-process.exitcode).name}"
    return f"rank {rank} exited with status {process.exitcode}"


def _end(process):
    if not process.pid:  # interrupted before it was started
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter on macOS, for a process that has ended
        os.killpg(process.pid, signal.SIGKILL)  # its children too, which may outlive it
    process.kill()  # it may not yet lead a process group
    process.join()


# ---- in the started process ---------------------------------------------------------------------------------------


def _worker(rank, work, environment, outputs):
    """Run `worker_fn` with the caller's environment and outputs. Report what it raises.

    After a normal return or `sys.exit(0)`, run the handlers of atexit.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked in the fork server
    gc.freeze()  # a collection would visit, and so copy, 75 MB of objects that are shared with the fork server
    os.setsid()  # a process group of the worker and its children, which are ended together
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    _take_over_outputs(outputs)
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    _draw_seeds()
    multiprocessing.set_start_method(None, force=True)  # for a DataLoader: the platform's default, not the launcher's
    try:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"].split(",")[0]))
        worker_fn, args = pickle.loads(work)
        worker_fn(*args)
    except SystemExit as error:
        failed = error.code not in (None, 0)
        if failed and isinstance(error.code, int):
            _report(rank, "status", f"rank {rank} exited with status {error.code}", environment, error.code)
        elif failed:
            _report(rank, "message", str(error.code), environment)
    except BaseException:
        _report(rank, "raised", f"rank {rank} raised:\n\n{traceback.format_exc()[-30_000:]}", environment)
    # multiprocessing ends this process by os._exit, which skips the handlers. Libraries remove their temporary files
    # there. If a handler raises, its traceback is printed and the next handler runs.
    _forget_torch_libraries()
    atexit._run_exitfuncs()


def _draw_seeds():
    """Every worker has a copy of the fork server's random generators. Without this, all would draw the same numbers.

    A seed that the script has set at its top level stays, as under torchrun. `random` itself seeds anew after a fork.
    """
    if torch.initial_seed() == TORCH_SEED:
        torch.seed()
    if "numpy.random" in sys.modules and _numpy_state() == NUMPY_STATE:
        sys.modules["numpy.random"].seed()


def _forget_torch_libraries():
    """Do not unregister torch's operators one by one at the end of a process: that takes 45 ms in each."""
    for finalizer in list(weakref.finalize._registry):
        alive = finalizer.peek()  # object, function, arguments
        if alive and getattr(alive[1], "__module__", None) == "torch.library":
            finalizer.atexit = False


def _end_with_launcher():
    """Wait, in a daemon thread, until the launcher has ended for whatever reason; then end this process."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def _take_over_outputs(outputs):
    """Use the launcher's current stdout and stderr. The fork server's may be out of date."""
    for fd, output in enumerate(outputs, start=1):
        os.dup2(output.fileno(), fd)
    sys.stdout.reconfigure(line_buffering=True)  # nothing printed is lost when another rank's failure ends this one


def _report(rank, kind, message, environment, status=1):
    """Put the failure into the launcher's store, before this process's sockets close, and leave.

    It is JSON: other users of the machine can write to the store, and a pickle of theirs would be executed.
    """
    report = {"kind": kind, "rank": rank, "pid": os.getpid(), "message": message, "status": status}
    store = torch_dist.TCPStore("127.0.0.1", int(environment["MASTER_PORT"]), is_master=False)
    store.queue_push("failures", json.dumps(report))
    store.queue_len("failures")  # a round trip: the report has arrived
    sys.stdout.flush()
    os._exit(1)
