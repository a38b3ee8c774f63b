"""`launch`: processes that see what the caller sees, fail loudly, listen to nobody and never outlive their launcher."""

import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import job
import numpy as np
import psutil
import pytest
import torch
from conftest import ROOT, Bomb, exit_message, finish, run, start, torchrun, without_name_server
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import distributed as dist
import spawn

JOB = Path(__file__).parent / "job.py"


# ---- what a worker sees ---------------------------------------------------------------------------------------------


def write_state(local_rank, world_size, folder, *names):
    print(f"rank {local_rank}")
    state = {name: os.environ.get(name) for name in names}
    state |= {"cwd": os.getcwd(), "threads": torch.get_num_threads(), "args": (local_rank, world_size)}
    state["start method"] = multiprocessing.get_start_method()
    torch.save(state, f"{folder}/{local_rank}.pt")


def test_workers_see_what_the_caller_sees_at_each_launch(tmp_path, monkeypatch, capfd):
    """Environment, folder, stdout; CPU threads are divided unless OMP_NUM_THREADS says otherwise.

    A DataLoader starts its processes as the platform does, not as `launch` has started this one.
    """
    platforms = multiprocessing.get_all_start_methods()[0]
    expected = {"NCCL_SOCKET_IFNAME": "eth7", "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    expected |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    expected |= {"THP_MEM_ALLOC_ENABLE": "1"}
    expected |= {"NCCL_P2P_DISABLE": None}  # not set: GPUs would exchange data through the host's memory, which is slow
    for name in expected:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    for colour, omp, threads in (("red", None, 3), (None, "5", 5)):
        folder = tmp_path / str(colour)
        folder.mkdir()
        monkeypatch.chdir(folder)
        for name, value in (("COLOUR", colour), ("OMP_NUM_THREADS", omp)):
            monkeypatch.delenv(name, raising=False)
            if value:
                monkeypatch.setenv(name, value)
        dist.launch(write_state, str(folder), *expected, "COLOUR", "RANK", "LOCAL_RANK", nprocs=2)
        assert sorted(capfd.readouterr().out.splitlines()) == ["rank 0", "rank 1"]
        for rank in range(2):
            state = torch.load(folder / f"{rank}.pt", weights_only=True)
            own = {"COLOUR": colour, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            where = {"cwd": str(folder), "threads": threads, "args": (rank, 2), "start method": platforms}
            assert state == {**expected, **own, **where}
    assert "RANK" not in os.environ


def test_without_a_gpu_or_under_a_launcher_it_runs_in_this_process(monkeypatch, capsys):
    """What another one printed, capsys would not see."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    dist.launch(print, "a")
    monkeypatch.setenv("WORLD_SIZE", "8")  # alone, it is left from something else
    dist.launch(print, "b", nprocs=1)
    for name, value in {"RANK": "5", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    dist.launch(print, "c", nprocs=3)
    monkeypatch.delenv("WORLD_SIZE")
    dist.launch(lambda *_: print(dist.get_rank(), dist.get_world_size()))
    assert capsys.readouterr().out == "0 1 a\n0 1 b\n1 8 c\n0 1\n"


def test_quick_and_slow_tests_see_no_gpu():
    """Two ranks cannot share one under NCCL, nor does it take tensors of the CPU."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and not torch.cuda.is_available()


def test_one_process_per_visible_gpu_by_default(monkeypatch, capfd):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    dist.launch(print)
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 3", "1 3", "2 3"]


@pytest.mark.parametrize("nprocs", [0, "2", 2.0])
def test_nprocs_must_be_a_positive_whole_number(nprocs):
    with pytest.raises(SystemExit, match=f"^nprocs must be a whole number of at least 1, got {nprocs!r}$"):
        dist.launch(print, nprocs=nprocs)


def test_a_worker_function_without_the_two_arguments_is_one_line():
    def main(args):
        raise AssertionError("it is not called")

    for args in ((), (2, "x")):
        shown = ", ".join(["local_rank, world_size", *map(repr, args)])
        with pytest.raises(SystemExit) as error:
            dist.launch(main, *args)
        assert str(error.value).startswith(f"launch calls main({shown}), which main does not take (too many ")
        assert str(error.value).endswith(
            "write def main(local_rank, world_size), and give the number of processes as nprocs=N"
        )


def join_wrongly(local_rank, world_size):
    with pytest.raises(dist.DistributedError, match=r"^the backend nccl needs a GPU, and none is visible: choose gloo"):
        dist.init_process_group(backend="nccl")
    dist.init_process_group()
    model = dist.prepare_ddp_model(torch.nn.Linear(1, 1))
    with pytest.raises(dist.DistributedError, match=r"^the model is wrapped in DistributedDataParallel already"):
        dist.prepare_ddp_model(model)
    for size in (0, 3):
        line = f"the global batch size is {size}, not a multiple of the number of processes, 2"
        with pytest.raises(dist.DistributedError, match=line):
            dist.local_batch_size(size)
    assert dist.local_batch_size(6) == 3


def test_calls_that_torch_would_refuse_later_are_refused_in_a_line():
    dist.launch(join_wrongly, nprocs=2)


def leave_a_loop_early(local_rank, world_size):
    dist.init_process_group()
    for _ in range(3 - local_rank):
        dist.reduce(torch.ones(1))


def test_a_rank_that_finishes_early_is_named_beside_its_peers_error():
    with pytest.raises(ProcessRaisedException) as error:
        dist.launch(leave_a_loop_early, nprocs=2)
    line = "(finished without an error: 1; did the ranks call different numbers of collectives?)"
    assert str(error.value).endswith(line)


@pytest.mark.parametrize("given", [{"rank": 3}, {"world_size": 4}])
def test_a_rank_alone_is_refused(given):
    with pytest.raises(ValueError, match="give both rank and world_size, or neither"):
        dist.init_process_group(**given)


# ---- failures -------------------------------------------------------------------------------------------------------


def fail_while_others_wait(local_rank, world_size, mark, how):
    print(f"rank {local_rank} has begun")  # not flushed
    dist.init_process_group()
    if local_rank != 1:
        dist.all_reduce(torch.ones(1))  # waits for rank 1, and fails when its connection closes
    subprocess.Popen(["sleep", "600"], env={**os.environ, "JOB_MARK": mark})
    try:
        how()
    finally:
        dist.cleanup()


def fail(error):
    raise error


RAISED = "(?s)^rank 1 raised:.*in fail_while_others_wait.*"


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        (partial(fail, KeyError("the cause")), ProcessRaisedException, f"{RAISED}KeyError: 'the cause'"),
        (partial(fail, ValueError("語" * 30_000)), ProcessRaisedException, "(?s)^rank 1 raised:.*語語\n$"),
        (partial(sys.exit, "one clear line"), SystemExit, "^one clear line$"),
        (partial(sys.exit, "x" * 100_000), SystemExit, "^x{100000}$"),
        (partial(sys.exit, 4), ProcessExitedException, "^rank 1 exited with status 4$"),
        (partial(os._exit, 3), ProcessExitedException, "^rank 1 exited with status 3$"),
        (partial(signal.raise_signal, signal.SIGKILL), ProcessExitedException, "^rank 1 was killed by SIGKILL$"),
    ],
)
def test_the_first_failure_ends_the_job_names_its_cause_and_loses_no_output(how, error, message, capfd):
    """Also of a message that is longer than a pipe."""
    before, mark = set(psutil.Process().children(recursive=True)), uuid.uuid4().hex
    listened_before = listening_addresses()
    for _ in range(2):  # the peers' consequences must never be taken for the cause
        begin = time.monotonic()
        with pytest.raises(error, match=message):
            dist.launch(fail_while_others_wait, mark, how, nprocs=3)
        assert time.monotonic() - begin < 60
        assert sorted(capfd.readouterr().out.splitlines()) == [f"rank {rank} has begun" for rank in range(3)]
        wait_for_the_end_of(mark)
    left = [p.cmdline() for p in set(psutil.Process().children(recursive=True)) - before if p.status() != "zombie"]
    assert all("forkserver" in " ".join(c) or "resource_tracker" in " ".join(c) for c in left[:2]) and len(left) <= 2
    new = listening_addresses() - listened_before
    assert not new, "the launcher's own store is closed when its failure has been handled"


def listening_addresses():
    """Where this process listens: another test's store may be among them."""
    return {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}


def exit_after_the_peers_failure(local_rank, world_size):
    dist.init_process_group()
    if local_rank == 1:
        raise ValueError("the cause")
    try:
        dist.barrier()
    except RuntimeError:
        sys.exit(1)


def test_a_rank_that_exits_because_of_its_peer_is_not_the_cause():
    with pytest.raises(ProcessRaisedException, match="ValueError: the cause"):
        dist.launch(exit_after_the_peers_failure, nprocs=2)


def test_a_failure_counts_if_no_process_is_running_any_more():
    process = SimpleNamespace(exitcode=3, pid=None, sentinel=None)
    with pytest.raises(ProcessExitedException, match=r"^rank 0 exited with status 3$"):
        spawn._wait_for([process], [process], spawn.start_store(), tolerate_killed=False)


def leave_a_child_behind(local_rank, world_size, marks):
    dist.init_process_group()
    subprocess.Popen(["sleep", "600"], env={**os.environ, "JOB_MARK": marks[local_rank]})
    dist.barrier()
    if local_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_the_end_of(marks[1])  # while the job is running


def test_the_children_of_a_process_end_with_it():
    """Of rank 1, which is killed, and of rank 0, which returns."""
    marks = [uuid.uuid4().hex, uuid.uuid4().hex]
    dist.launch(leave_a_child_behind, marks, nprocs=2, tolerate_killed=True)
    wait_for_the_end_of(marks[0])


def sleep_long(local_rank, world_size):
    time.sleep(600)


def test_a_second_ctrl_c_leaves_no_process(monkeypatch):
    """The first comes as `launch` waits, and the second as it ends its processes: nothing else would end them."""
    interrupted = []

    def interrupt_once(function, *args):
        if function not in interrupted:
            interrupted.append(function)
            raise KeyboardInterrupt
        return function(*args)

    for name in ("wait", "_end"):
        monkeypatch.setattr(spawn, name, partial(interrupt_once, getattr(spawn, name)))
    with pytest.raises(KeyboardInterrupt):
        dist.launch(sleep_long, nprocs=2)
    assert len(interrupted) == 2 and not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("failure", "status"),
    [(KeyError(), 1), (SystemExit(), 0), (SystemExit(0), 0), (SystemExit(3), 3), (SystemExit("a message"), 1)],
)
def test_at_exit_a_failure_is_known_even_if_the_caller_handles_it(failure, status, monkeypatch):
    """So that this rank does not destroy the group, which would need its peers, and ends with its own status."""
    monkeypatch.setattr(dist, "_exit_status", None)
    with pytest.raises(type(failure)):
        dist.launch(fail_with, failure, nprocs=1)
    assert dist._exit_status == status


def fail_with(local_rank, world_size, failure):
    raise failure


def sleep_once(local_rank, world_size):
    time.sleep(2)


def test_the_launcher_sleeps_while_it_waits():
    begin = time.process_time()
    dist.launch(sleep_once, nprocs=2)
    assert time.process_time() - begin < 1, "seconds of a core, in two seconds of waiting"


@pytest.mark.parametrize(("nprocs", "threads"), [(2, 2), (3, 1), (4, 1), (5, 1), (64, 1)])
def test_the_workers_share_the_threads_and_each_has_one_at_least(nprocs, threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert spawn._worker_environment(nprocs, port=1)["OMP_NUM_THREADS"] == str(threads)


# ---- random numbers -------------------------------------------------------------------------------------------------


def draw_unseeded(local_rank, world_size):
    dist.init_process_group()
    draws = [torch.rand(()).item(), np.random.rand(), random.random()]
    for numbers in zip(*dist.gather_objects(draws), strict=True):
        assert len(set(numbers)) == world_size, "as under torchrun, where each process draws a seed of its own"


def test_without_a_seed_each_process_draws_its_own_numbers():
    dist.launch(draw_unseeded, nprocs=3)


# ---- arguments ------------------------------------------------------------------------------------------------------


def step_worker(local_rank, world_size, folder, model, params):
    optimizer = torch.optim.SGD(params, lr=1.0)
    for _ in range(3):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    torch.save(model.weight.detach(), f"{folder}/{local_rank}.pt")


def test_every_rank_has_its_own_copy_of_the_arguments(tmp_path):
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.weight)
    dist.launch(step_worker, str(tmp_path), model, list(model.parameters()), nprocs=4)
    assert [torch.load(tmp_path / f"{r}.pt", weights_only=True).tolist() for r in range(4)] == [[[-3.0, -3.0]]] * 4
    assert (model.weight == 0).all(), "the launcher's own model"


class Unloadable:
    def __reduce__(self):
        return int, ("what only a worker finds out",)


def test_an_argument_that_cannot_be_unpickled_is_a_workers_error():
    with pytest.raises(ProcessRaisedException, match="what only a worker finds out"):
        dist.launch(print, Unloadable(), nprocs=2)


def test_what_is_wrong_with_the_environment_is_a_workers_error(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(ProcessRaisedException, match="invalid literal for int"):
        dist.launch(print, nprocs=2)


# ---- joining, and leaving at once -----------------------------------------------------------------------------------


def join_slowly(local_rank, world_size, folder):
    connected, connect = Path(folder, "connected"), torch.distributed.init_process_group

    def connect_slowly(*args, **kwargs):
        connect(*args, **kwargs)
        time.sleep(0.5)
        connected.touch()

    if local_rank == 1:
        torch.distributed.init_process_group = connect_slowly
    dist.init_process_group(timeout=timedelta(seconds=3))
    assert connected.exists(), "a rank that left now would fail one that still connects"
    assert len(torch.distributed.distributed_c10d._world.pg_map) == 1, "a second group of all pairs"


def test_no_rank_leaves_before_all_have_joined_and_there_is_one_group(tmp_path):
    dist.launch(join_slowly, str(tmp_path), nprocs=3)


def lose_a_peer(local_rank, world_size):
    dist.init_process_group()
    if local_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        dist.raise_on_all(None)


def test_a_report_is_never_unpickled(tmp_path):
    """Other users of the machine can write to the store."""
    store = spawn.start_store()
    store.queue_push("failures", pickle.dumps(Bomb(str(tmp_path / "exploded"))))
    with pytest.raises(ValueError):
        spawn._root_cause({}, store)
    assert os.listdir(tmp_path) == []


def test_a_lost_peer_is_noticed_at_once():
    """As when a node is lost during a save. The other nodes' agents do not notice that."""
    begin = time.monotonic()
    dist.launch(lose_a_peer, nprocs=2, tolerate_killed=True)
    assert time.monotonic() - begin < 60


def expect_one_line(local_rank, world_size):
    dist.init_process_group()
    try:
        dist.raise_on_all("no room" if local_rank == 1 else None)
    except Exception as error:  # as a user would catch it
        assert isinstance(error, RuntimeError) and str(error) == "no room"
    dist.raise_on_all("the disk is full" if local_rank == 1 else None)


def test_an_expected_failure_is_an_exception_on_all_ranks_and_one_line_of_launch():
    with pytest.raises(SystemExit, match=r"^the disk is full$"):
        dist.launch(expect_one_line, nprocs=2)


def report_late_on_rank_0(local_rank, world_size):
    dist.init_process_group()
    try:
        dist.raise_on_all("no room")
    except dist.DistributedError:
        if local_rank == 0:
            threading.Event().wait(60)  # the launcher ends it before
        raise


def test_the_line_of_an_error_of_all_ranks_is_printed_whichever_rank_is_first():
    with pytest.raises(SystemExit, match=r"^no room$"):
        dist.launch(report_late_on_rank_0, nprocs=2)


@pytest.mark.parametrize(
    ("rank", "on_all_ranks", "status"), [(0, True, "no room"), (1, True, 1), (1, False, "no room")]
)
def test_under_torchrun_an_error_of_all_ranks_is_printed_once(rank, on_all_ranks, status, monkeypatch):
    monkeypatch.setattr(dist, "_exit_status", None)
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))

    def fail(*args):
        raise dist.DistributedError("no room", on_all_ranks)

    with pytest.raises(SystemExit) as error:
        dist.launch(fail)
    assert error.value.code == status


WORK = "def work(*args): pass\n"
BEGINNERS = [  # a script, its file as Python knows it, and the one line
    (f"def main():\n    {WORK}    dist.launch(work, nprocs=2)\nmain()", "script.py", "top level of a file"),
    (f"{WORK}dist.launch(work, nprocs=2)", "script.py", 'put it under if __name__ == "__main__":'),
    (f"{WORK}dist.launch(work, nprocs=2)", None, "launch needs a script that new processes can import: save this code"),
    (f"{WORK}dist.launch(work, nprocs=2)", "<stdin>", "launch needs a script that new processes can import: save this"),
    (
        "class Data(torch.utils.data.IterableDataset):\n    def __iter__(self): yield 0\n"
        "def work(*args): dist.data_sampler(Data(), True, True)\n"
        "if __name__ == '__main__': dist.launch(work, nprocs=2)",
        "script.py",
        "Data has no length to split",
    ),
]


@pytest.mark.parametrize(("code", "file", "line"), BEGINNERS)
def test_a_beginners_mistake_is_one_line(code, file, line, tmp_path, monkeypatch, capfd):
    """This process does what `python script.py`, `python -c` or `python < script.py` would do."""
    code = f"import torch\nimport distributed as dist\n{code}\n"
    (tmp_path / "script.py").write_text(code)
    main = ModuleType("__main__")
    if file:
        main.__file__ = str(tmp_path / file)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert line in exit_message(exec, code, main.__dict__)
    stdout, stderr = capfd.readouterr()
    assert (stdout, without_name_server(stderr)) == ("", "")


def test_a_folder_for_temporary_files_that_is_too_long_is_one_line(tmp_path, monkeypatch):
    """One fork server runs already. `launch` has to start another one here."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)
    monkeypatch.setattr(forkserver, "ensure_running", forkserver.ForkServer().ensure_running)
    line = f"the path of TMPDIR, {folder}, is too long for a socket in it: choose one of at most 70 characters"
    assert exit_message(dist.launch, print, nprocs=2) == line


def abort_after_a_report(local_rank, world_size):
    """Rank 1 fails; rank 0 is aborted, as by NCCL's watchdog, while the launcher looks for the cause."""
    dist.init_process_group()
    if local_rank == 1:
        raise ZeroDivisionError("the cause")
    with pytest.raises(RuntimeError):
        dist.barrier()
    signal.raise_signal(signal.SIGABRT)


def test_an_abort_beside_a_report_is_its_consequence():
    """It is named as well, since under gloo it may be the cause."""
    sleep = time.sleep

    def sleep_until_all_have_ended(seconds):
        while multiprocessing.active_children():
            sleep(0.01)

    with mock.patch("spawn.time.sleep", sleep_until_all_have_ended), pytest.raises(ProcessRaisedException) as error:
        dist.launch(abort_after_a_report, nprocs=2)
    assert re.search(r"ZeroDivisionError: the cause\s+\(rank 0 was killed by SIGABRT\)$", str(error.value))


def abort_after_a_kill(local_rank, world_size):
    dist.init_process_group()
    if local_rank == 1:
        signal.raise_signal(signal.SIGKILL)
    with pytest.raises(RuntimeError):
        dist.barrier()
    signal.raise_signal(signal.SIGABRT)


def test_an_abort_beside_a_kill_is_its_consequence():
    with pytest.raises(ProcessExitedException, match="rank 1 was killed by SIGKILL"):
        dist.launch(abort_after_a_kill, nprocs=2)


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_launcher_that_sets_no_rank_is_refused(name, monkeypatch):
    monkeypatch.setenv(name, "4")
    with pytest.raises(SystemExit, match=f"{name} is 4, but RANK and WORLD_SIZE are not set, .* start one torchrun"):
        dist.launch(print)
    monkeypatch.setenv(name, "1")
    dist.launch(print)


def test_a_launcher_that_sets_no_local_rank_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="RANK is set, but LOCAL_RANK is not: set it"):
        dist.launch(print)


def join_by_hand(local_rank, world_size):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    dist.init_process_group(local_rank, world_size)
    assert (dist.get_rank(), dist.get_local_rank(), dist.get_world_size()) == (local_rank, local_rank, world_size)


def test_processes_that_the_caller_has_started_use_a_gpu_each():
    dist.launch(join_by_hand, nprocs=2)


# ---- the end of a started process -----------------------------------------------------------------------------------

PRELOADED = """
import atexit
import os
import weakref

server = os.getpid()  # which runs the handler too, when it ends


class Thing:
    pass


thing = Thing()
weakref.finalize(thing, {1: 1}.__delitem__, 1)  # a function without __module__


def break_down():
    if os.getpid() != server:
        print("inherited")
        raise RuntimeError("the handler's own mistake")


atexit.register(break_down)
"""

COMMAND = """
import atexit, gc, os, sys, tempfile
import numpy as np
import torch

if __name__ == "__main__":
    seed, on_gpu, functions = torch.initial_seed(), [], dict(vars(torch._C))
    for name in ("_cuda_getDeviceCount", "_cuda_init"):
        setattr(torch._C, name, lambda name=name: on_gpu.append(name) or 0)
    import mnist
    print("torchvision:", "torchvision" in sys.modules)
    import torch._dynamo, torch.distributed.nn.functional, torchvision
    print("GPU:", on_gpu, torch.cuda.is_initialized())
    print("new seed:", torch.initial_seed() != seed)
    print("files:", os.listdir())
    vars(torch._C).update(functions)

import distributed as dist
import job
import preloaded
import spawn

spawn.PRELOADED = (*spawn.PRELOADED, "preloaded")
torch.manual_seed(1234)
np.random.seed(1234)

def draw(local_rank, world_size):
    print(f"drawn: {torch.rand(1).item()} {np.random.rand()}\\n", end="")  # in one piece

def worker(local_rank, world_size, folder, status):
    draw(local_rank, world_size)
    assert "torch._dynamo" in sys.modules, "the first optimizer of each process would import it"
    assert gc.get_freeze_count() > 100_000, "a collection would copy the objects of the fork server"
    dist.init_process_group()
    atexit.register(print, "handler of rank", local_rank)
    worker.temporary = tempfile.TemporaryDirectory(dir=folder)
    if status == "none":
        return
    dist.barrier()
    print("worker of rank", local_rank)
    dist.cleanup()
    sys.exit(int(status))

if __name__ == "__main__":
    atexit.unregister(preloaded.break_down)
    dist.launch(draw, nprocs=1)
    for status in ("none", "0", "3"):
        print("before", status, flush=True)
        try:
            dist.launch(worker, sys.argv[1], status, nprocs=2)
            print("after", status, flush=True)
        except torch.multiprocessing.ProcessExitedException as error:
            print(error, flush=True)
    dist.launch(job.fail, nprocs=2)
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """`python script.py`, which starts four jobs, one after the other. The last one fails."""
    folder = tmp_path_factory.mktemp("command")
    (folder / "preloaded.py").write_text(PRELOADED)
    (folder / "script.py").write_text(COMMAND)
    (folder / "temporary").mkdir()
    (folder / "empty").mkdir()
    environment = {"PYTHONPATH": f"{ROOT}:{JOB.parent}:{folder}"}
    status, stdout, stderr = run(folder / "script.py", folder / "temporary", cwd=folder / "empty", env=environment)
    print(stderr)  # for whoever reads why a test failed
    return SimpleNamespace(status=status, stdout=stdout, stderr=stderr, left=os.listdir(folder / "temporary"))


@pytest.mark.parametrize(("status", "backend", "destroys"), [(0, "nccl", 1), (None, "nccl", 0), (None, "gloo", 1)])
def test_at_exit_nccls_group_is_destroyed_only_after_success(status, backend, destroys, monkeypatch):
    monkeypatch.setattr(dist, "is_dist_avail_and_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "_exit_status", status)
    monkeypatch.delattr(sys, "last_type", raising=False)
    cleanup = mock.Mock()
    monkeypatch.setattr(dist, "cleanup", cleanup)
    dist._leave()
    assert cleanup.called == bool(destroys)


def test_imports_have_no_side_effects(command):
    """Preloaded modules must not touch the GPU: a fork after that would break CUDA in every worker."""
    lines = command.stdout.splitlines()[:4]
    # Who draws digits need not wait for torchvision.
    assert lines == ["torchvision: False", "GPU: [] False", "new seed: False", "files: []"]


def test_a_started_process_runs_its_exit_handlers_if_it_succeeds(command):
    """Also where a handler that the fork server had registered raises. A failed process leaves at once."""
    printed = []
    for part in re.split("before .*\n", command.stdout):
        # The ranks share a pipe: where output is not buffered, their lines may be mixed.
        printed.append(re.findall("after|inherited|(?:worker|handler) of rank", part))
    _, without_status, with_0, with_3 = printed
    for said, n_workers in ((without_status, 0), (with_0, 2)):
        assert said[-1] == "after"
        assert said.count("worker of rank") == n_workers
        assert said.count("handler of rank") == said.count("inherited") == 2
    assert set(with_3) == {"worker of rank"}
    assert re.search(r"^rank [01] exited with status 3$", command.stdout, re.M)
    mistakes = re.findall(r"""(?<!\(")the handler's own mistake""", command.stderr)  # without the lines of source code
    assert len(mistakes) == 4
    assert len(command.left) <= 2, "temporary files are removed, except where a worker failed"


def test_a_seed_at_the_top_level_of_a_script_stays_and_workers_share_what_is_imported(command):
    """The launcher and the two workers of each of three jobs draw the same numbers."""
    drawn = re.findall("drawn: (.*)", command.stdout)
    assert len(drawn) == 1 + 3 * 2 and len(set(drawn)) == 1


def test_a_failed_command_prints_the_traceback_and_exits_non_zero(command):
    assert command.status == 1
    assert command.stderr.count("ZeroDivisionError: the cause") == 1 and "in fail\n" in command.stderr
    assert "onnection" not in command.stderr


# ---- nothing left behind, nothing open, no collisions ---------------------------------------------------------------


def members(mark):
    """All living processes whose environment at their start held `mark`: a launcher and all that it started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("JOB_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            pass
    return found


def addresses_of(processes):
    """The addresses at which these processes listen."""
    connections = [c for process in processes for c in process.net_connections("inet")]
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


def listening(mark):
    return addresses_of(members(mark))


def wait_for_the_end_of(mark, seconds=30):
    end = time.monotonic() + seconds
    left = members(mark)
    while left:
        assert time.monotonic() < end, left
        time.sleep(0.02)
        left = members(mark)


def with_sigint(action):
    """Replace the process by the script with SIGINT handled by default, or ignored as by `nohup` or a shell's `&`."""
    code = f"import os, signal, sys; signal.signal(signal.SIGINT, signal.{action}); "
    return "-c", code + "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


SIGNALS = {  # nobody can catch the last one, nor is the one before caught
    "SIGINT": (signal.SIGINT, with_sigint("SIG_DFL")),
    "SIGTERM": (signal.SIGTERM, with_sigint("SIG_DFL")),
    "SIGKILL, SIGINT ignored": (signal.SIGKILL, with_sigint("SIG_IGN")),
}


@pytest.fixture(scope="module")
def jobs():
    """Jobs that were started at once, and all train by now: {name of the signal: (process, mark)}."""
    started = {}
    for name, (_, prefix) in SIGNALS.items():
        mark = uuid.uuid4().hex
        started[name] = (start(*prefix, JOB, "train", env={"JOB_MARK": mark}), mark)
    for process, _ in started.values():
        assert process.stdout.readline() == "training\n", process.stderr.read()
    yield started
    for process, _ in started.values():
        process.kill()
        process.communicate(timeout=30)


def test_jobs_started_at_once_all_train_and_listen_on_loopback_only(jobs):
    for _, mark in jobs.values():
        assert listening(mark) == {"127.0.0.1"}


@pytest.mark.parametrize("name", SIGNALS)
def test_no_process_outlives_the_launcher(jobs, name):
    process, mark = jobs[name]
    assert len(members(mark)) >= 1 + 2 + 2 + 2  # launcher, two servers, two workers, a process of each
    process.send_signal(SIGNALS[name][0])
    status, _, stderr = finish(process, timeout=60)
    assert status != 0
    if name == "SIGTERM":
        assert (status, stderr) == (-signal.SIGTERM, "")
    wait_for_the_end_of(mark)


def test_sigterm_to_all_processes_lets_workers_save():
    """As a scheduler sends it: also to the fork server and to multiprocessing's resource tracker."""
    mark = uuid.uuid4().hex
    process = start(JOB, "save_when_told", env={"JOB_MARK": mark})
    assert [process.stdout.readline() for _ in range(2)] == ["training\n"] * 2
    for receiver in members(mark):
        receiver.terminate()
    status, stdout, stderr = finish(process, timeout=60)
    assert (status, sorted(stdout.splitlines()), stderr) == (143, ["rank 0 saves", "rank 1 saves"], "")


def test_sigterm_to_the_launcher_lets_workers_save(capfd):
    """This process is the launcher."""
    left = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # another test may have left a handler
    try:
        with pytest.raises(SystemExit) as error:
            dist.launch(job.save_when_told, os.getpid(), nprocs=2)
    finally:
        signal.signal(signal.SIGTERM, left)
    assert error.value.code == 143
    stdout, stderr = capfd.readouterr()
    assert sorted(stdout.splitlines()) == ["rank 0 saves", "rank 1 saves", "training", "training"]
    assert without_name_server(stderr) == ""


# ---- the end of a job under torchrun --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status", "printed", "error"),
    [
        ("ddp_step", 0, {"during:2", "after:0"}, ""),
        ("leave_early", 0, {"after:0"}, ""),
        ("give_up", 1, set(), "no room\n"),
        ("fail_early", 1, set(), "ZeroDivisionError: the cause"),  # some versions of torch would wait for gloo for ever
    ],
)
def test_gloo_threads_end_before_the_interpreter(name, status, printed, error):
    """What prevents the abort at exit: the threads are joined by then, or a process that fails leaves at once."""
    actual, stdout, stderr = torchrun(2, JOB, name)
    assert actual == status and error in stderr, stderr
    assert set(re.findall(r"[a-z]+:\d|waits for gloo", stdout)) == printed
    assert set(re.findall(r"exitcode\s*: (-?\d+)", stderr)) <= {"1", "-15"}, "torchrun may end the second first"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_finished_torchrun_jobs_exit_with_status_0(request):
    """Every one of many short DDP jobs, which leave right after their last all-reduce, ends well."""
    runs = request.config.getoption("--torchrun-jobs")
    failed = [i for i in range(runs) if torchrun(2, JOB, "ddp_step")[0] != 0]
    assert not failed, f"{len(failed)} of {runs} failed"
