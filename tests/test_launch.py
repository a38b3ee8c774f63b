"""`launch`: processes that see what the caller sees, fail loudly, listen to nobody and never outlive their launcher."""

import errno
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from conftest import Bomb, exit_message, finish, run, start, torchrun, wait_until
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import distributed as dist
import spawn

JOB = Path(__file__).parent / "job.py"


# ---- what a worker sees ---------------------------------------------------------------------------------------------


def state_of_each(local_rank, world_size):
    """What each rank sees."""
    dist.init_process_group()
    print(f"rank {local_rank};", end="")
    state = [os.environ[name] for name in ("COLOUR", "RANK", "LOCAL_RANK")]
    state += [os.getcwd(), torch.get_num_threads(), local_rank, world_size, multiprocessing.get_start_method()]
    return dist.gather_objects(state)


@pytest.fixture
def six_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(before)


def test_workers_see_what_the_caller_sees_at_each_launch(tmp_path, monkeypatch, capfd, six_threads):
    """Environment, folder, stdout; CPU threads are divided unless OMP_NUM_THREADS says otherwise.

    A DataLoader starts its processes as the platform does, not as `launch` has started this one.
    """
    platforms = multiprocessing.get_all_start_methods()[0]
    for colour, omp, threads in (("red", "", 3), ("", "5", 5)):
        folder = tmp_path / colour
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("COLOUR", colour)
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
        states = dist.launch(state_of_each, nprocs=2)
        assert sorted(capfd.readouterr().out.split(";")) == ["", "rank 0", "rank 1"]
        assert states == [[colour, str(r), str(r), str(folder), threads, r, 2, platforms] for r in range(2)]
    assert "RANK" not in os.environ


def test_the_workers_stay_on_loopback_and_share_the_threads(monkeypatch, six_threads):
    """An empty default is a missing one: a gloo with an empty interface would listen on the machine's address."""
    given = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "eth7", "CUDA_VISIBLE_DEVICES": ""}
    outer_torchrun = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": "outer"}
    for name, value in {**given, **outer_torchrun, "OMP_NUM_THREADS": ""}.items():
        monkeypatch.setenv(name, value)
    expected = {**given, "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    expected |= {"LOCAL_WORLD_SIZE": "2", "THP_MEM_ALLOC_ENABLE": "1"}
    environment = spawn._environment(2, port=1)
    assert environment.items() >= expected.items()
    assert [name for name in environment if name.startswith("TORCHELASTIC_")] == ["TORCHELASTIC_USE_AGENT_STORE"]
    threads = [spawn._environment(n, port=1)["OMP_NUM_THREADS"] for n in (2, 3, 4, 7)]
    assert threads == ["3", "2", "1", "1"], "each has one at least"


# ---- how many processes, and from where -----------------------------------------------------------------------------


def test_without_a_gpu_or_under_a_launcher_it_runs_in_this_process(monkeypatch, capsys, gpus):
    """What another one printed, capsys would not see."""
    gpus(0)
    dist.launch(print, "a")
    monkeypatch.setenv("WORLD_SIZE", "8")  # alone, it is left from something else
    dist.launch(print, "b", nprocs=1)
    for name, value in {"RANK": "5", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    dist.launch(print, "c", nprocs=8)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # as by `export RANK=$SLURM_PROCID` without SLURM
        monkeypatch.setenv(name, "")
    dist.launch(print, "d")
    assert capsys.readouterr().out == "0 1 a\n0 1 b\n1 8 c\n0 1 d\n"


def test_one_process_per_visible_gpu_by_default(gpus, capfd):
    gpus(3)
    dist.launch(print)
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 3", "1 3", "2 3"]


REFUSED = [  # variables of another launcher, the number that is asked for, and what the line names
    ({"RANK": "0", "WORLD_SIZE": "1"}, 2, "WORLD_SIZE=1"),
    ({"RANK": "1", "WORLD_SIZE": "2"}, None, "LOCAL_RANK"),  # all would take the first GPU, and write the same files
    ({"SLURM_STEP_NUM_TASKS": "4"}, None, "SLURM_STEP_NUM_TASKS is 4"),
    ({"OMPI_COMM_WORLD_SIZE": "4"}, None, "OMPI_COMM_WORLD_SIZE is 4"),
    ({"PMI_SIZE": "4"}, None, "PMI_SIZE is 4"),
]


@pytest.mark.parametrize(("variables", "nprocs", "named"), REFUSED)
def test_what_another_launcher_contradicts_is_one_line(variables, nprocs, named, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert named in exit_message(dist.launch, print, nprocs=nprocs)
    for name in variables:
        monkeypatch.setenv(name, "0" if name == "RANK" else "1")
    dist.launch(print)


PROGRAM = """
import distributed as dist

def main(local_rank, world_size):
    print("trained")

if __name__ == "__main__":
    dist.launch(main, nprocs=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "words"),
    [
        pytest.param(("-c", PROGRAM), "^launch needs a script: .*\n$", marks=pytest.mark.guard),  # as in a notebook
        (("job",), "^launch needs a script: "),
        (("at_import.py",), "if __name__ == '__main__':"),  # each of its workers would start workers
    ],
    ids=["-c", "a folder", "at import"],
)
def test_what_no_process_can_import_is_refused(command, words, tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "__main__.py").write_text(PROGRAM)
    (tmp_path / "at_import.py").write_text(PROGRAM.replace('if __name__ == "__main__":', "if True:"))
    status, stdout, stderr = run(*command, cwd=tmp_path)
    assert (status, stdout) == (1, "") and re.search(words, stderr), stderr


def test_without_a_loopback_interface_it_says_so_at_once(monkeypatch):
    monkeypatch.setattr(spawn.socket.socket, "connect_ex", lambda self, address: errno.ENETUNREACH)
    assert "the loopback interface is down" in exit_message(dist.launch, print, nprocs=2)


# ---- what comes back ------------------------------------------------------------------------------------------------


def compute(local_rank, world_size, given):
    dist.init_process_group()
    given += 1
    dist.barrier()
    big = torch.full((3_000_000,), local_rank + 7.0)  # 12 MB
    return {"loss": 0.5 + local_rank, "weights": big, "half": big[:2].bfloat16(), "given": dist.gather(given)}


@pytest.mark.parametrize("nprocs", [1, 3])
def test_launch_returns_what_rank_0s_function_returns(nprocs):
    """Each started process has its own copy of the arguments, also of tensors."""
    given = torch.zeros(1)
    value = dist.launch(compute, given, nprocs=nprocs)
    assert value["loss"] == 0.5 and value["weights"].shape == (3_000_000,) and (value["weights"] == 7).all()
    assert value["half"].dtype == torch.bfloat16 and value["given"] == [1] * nprocs
    assert given == (1 if nprocs == 1 else 0)


def meet_the_other_job(local_rank, world_size, folder, own, other):
    dist.init_process_group()
    Path(folder, f"{own} {local_rank}").touch()
    wait_until(Path(folder, f"{other} {local_rank}").exists)
    return own


def test_jobs_of_two_threads_run_side_by_side(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(dist.launch, meet_the_other_job, tmp_path, i, 1 - i, nprocs=2) for i in range(2)]
        assert [job.result(timeout=150) for job in jobs] == [0, 1]


def leave_without_a_value(local_rank, world_size):
    dist.init_process_group()
    sys.exit(0)


def draw_unseeded(local_rank, world_size):
    dist.init_process_group()
    draws = [torch.rand(()).item(), np.random.rand(), random.random()]
    for numbers in zip(*dist.gather_objects(draws), strict=True):
        assert len(set(numbers)) == world_size, "as under torchrun, where each process draws a seed of its own"


def join_by_hand(local_rank, world_size):
    """As processes that the caller has started."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    dist.init_process_group(local_rank, world_size)
    assert (dist.get_rank(), dist.get_local_rank(), dist.get_world_size()) == (local_rank, local_rank, world_size)
    # Processes of a DataLoader have no process group, and with another start method than fork nothing else.
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]) == (*2 * [str(local_rank)], "3")


@pytest.mark.parametrize("job", [leave_without_a_value, draw_unseeded, join_by_hand])
def test_a_job_ends_without_an_error(job):
    assert dist.launch(job, nprocs=3) is None


def join_slowly(local_rank, world_size, folder):
    connected, connect = Path(folder, "connected"), torch.distributed.init_process_group

    def connect_slowly(*args, **kwargs):
        connect(*args, **kwargs)
        time.sleep(0.5)
        connected.touch()

    if local_rank == 1:
        torch.distributed.init_process_group = connect_slowly
    dist.init_process_group()
    assert connected.exists(), "a rank that left now would fail one that still connects"


def test_no_rank_leaves_before_all_have_joined(tmp_path):
    with mock.patch.object(spawn.connection, "wait", wraps=spawn.connection.wait) as wait:
        dist.launch(join_slowly, str(tmp_path), nprocs=3)
    assert wait.call_count < 100, "the launcher sleeps until a rank ends"


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
        (partial(sys.exit, "x" * 9_000_000), SystemExit, "^x{9000000}$"),
        (partial(sys.exit, 4), SystemExit, "^rank 1 exited with status 4$"),
        (partial(os._exit, 3), ProcessExitedException, "^rank 1 exited with status 3$"),
        (partial(signal.raise_signal, signal.SIGKILL), ProcessExitedException, "^rank 1 was killed by SIGKILL$"),
    ],
)
def test_the_first_failure_ends_the_job_names_its_cause_and_loses_no_output(how, error, message, capfd):
    """Also of a message that is longer than a pipe. No process stays, and no connection of the launcher."""
    resource_tracker.ensure_running()  # a child that stays
    launcher, mark = psutil.Process(), uuid.uuid4().hex
    children, connections = launcher.children(recursive=True), launcher.net_connections()
    for _ in range(2):  # the peers' consequences must never be taken for the cause
        begin = time.monotonic()
        with pytest.raises(error, match=message):
            dist.launch(fail_while_others_wait, mark, how, nprocs=3)
        assert time.monotonic() - begin < 60
        assert sorted(capfd.readouterr().out.splitlines()) == [f"rank {rank} has begun" for rank in range(3)]
        wait_for_the_end_of(mark)
    assert set(launcher.children(recursive=True)) <= set(children)
    assert set(launcher.net_connections()) <= set(connections)


def end_first(local_rank, world_size, how):
    dist.init_process_group()
    if local_rank == 2:
        how()
    dist.barrier()  # the others fail


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        (partial(signal.raise_signal, signal.SIGKILL), ProcessExitedException, "^rank 2 was killed by SIGKILL$"),
        (partial(sys.exit, "the cause"), SystemExit, "^the cause$"),
    ],
)
def test_the_first_is_the_cause_although_its_peers_reports_are_read_at_the_same_time(how, error, message, monkeypatch):
    """The launcher looks after all three have ended, and reads the pipes in the order of the ranks."""
    wait = spawn.connection.wait

    def wait_for_all(pipes, timeout=None):
        for pipe in pipes:
            wait([pipe])
        return wait(pipes)

    monkeypatch.setattr(spawn.connection, "wait", wait_for_all)
    with pytest.raises(error, match=message):
        dist.launch(end_first, how, nprocs=3)


def die_beside_its_children(local_rank, world_size):
    if local_rank == 1:
        os.system("sleep 100 &")  # it inherits what is inheritable
        if os.fork():  # a fork, like a process of a DataLoader, has all that the rank has open
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


def return_a_function(local_rank, world_size):
    return lambda: None


def expect_one_line(local_rank, world_size):
    dist.init_process_group()
    try:
        dist.raise_on_all("no room" if local_rank == 1 else None)
    except Exception as error:  # as a user would catch it
        assert isinstance(error, RuntimeError) and str(error) == "no room"
    dist.raise_on_all("the disk is full" if local_rank == 1 else None)


@pytest.mark.parametrize(
    ("job", "error", "message"),
    [
        ((die_beside_its_children,), ProcessExitedException, "^rank 1 was killed by SIGKILL$"),
        ((return_a_function,), ProcessRaisedException, r"(?s)rank 0 raised:.*return_a_function\.<locals>\.<lambda>"),
        ((print, Bomb("/")), ProcessRaisedException, "FileExistsError"),  # an argument that cannot be loaded
        ((expect_one_line,), SystemExit, "^the disk is full$"),
    ],
    ids=lambda value: value[0].__name__ if isinstance(value, tuple) else "",
)
def test_the_cause_of_a_failure_is_raised_soon(job, error, message):
    begin = time.monotonic()
    with pytest.raises(error, match=message):
        dist.launch(*job, nprocs=2)
    assert time.monotonic() - begin < 50


# ---- seeds and imports ----------------------------------------------------------------------------------------------

COMMAND = """
import os, sys
import numpy as np
import psutil
import torch

if __name__ == "__main__":
    seed, on_gpu, functions = torch.initial_seed(), [], dict(vars(torch._C))
    for name in ("_cuda_getDeviceCount", "_cuda_init"):
        setattr(torch._C, name, lambda name=name: on_gpu.append(name) or 0)
    import mnist, torch._dynamo, torch.distributed.nn.functional, torchvision
    assert not on_gpu and not torch.cuda.is_initialized(), "no worker that is forked after that could use a GPU"
    assert torch.initial_seed() == seed, "imports have set a seed"
    assert len(os.listdir()) == 3, "imports have left files"
    vars(torch._C).update(functions)

import distributed as dist

torch.manual_seed(1234)
np.random.seed(1234)

def draw(local_rank, world_size):
    print(f"drawn: {torch.rand(1).item()} {np.random.rand()}\\n", end="")  # in one piece
    assert "torch._dynamo" in sys.modules, "the first optimizer of each process would import it"

def fail(local_rank, world_size):
    dist.init_process_group()
    if local_rank == 1:
        raise ZeroDivisionError("the cause")
    dist.all_reduce(torch.ones(1))

if __name__ == "__main__":
    for nprocs in (2, 2, 1):
        dist.launch(draw, nprocs=nprocs)
        assert not psutil.Process().children(), "each job has a server of its own, which ends with it"
    dist.launch(fail, nprocs=2)
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """`python script.py`, which starts four jobs, one after the other. The last one fails.

    The working folder has files with names of Python's modules, which no process may import.
    """
    folder = tmp_path_factory.mktemp("command")
    (folder / "script.py").write_text(COMMAND)
    (folder / "work").mkdir()
    for name in ("queue", "random", "token"):
        (folder / "work" / f"{name}.py").write_text("raise AssertionError('imported from the working folder')")
    return run(folder / "script.py", cwd=folder / "work")


@pytest.mark.guard
@pytest.mark.slow
def test_a_seed_at_the_top_level_of_a_script_stays_and_imports_have_no_side_effects(command):
    """The launcher and the two workers of each of two jobs draw the same numbers."""
    _, stdout, stderr = command
    drawn = re.findall("drawn: (.*)", stdout)
    assert len(drawn) == 2 * 2 + 1 and len(set(drawn)) == 1, stderr


@pytest.mark.guard
@pytest.mark.slow
def test_a_failed_command_prints_the_traceback_and_exits_non_zero(command):
    status, _, stderr = command
    assert status == 1
    assert stderr.count("ZeroDivisionError: the cause") == 1 and "in fail\n" in stderr
    assert "onnection" not in stderr


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


ENDS = {  # the job, and how its launcher ends: nobody can catch SIGKILL, nor is SIGTERM caught
    "SIGINT": ("train", signal.SIGINT, with_sigint("SIG_DFL")),
    "SIGTERM": ("train", signal.SIGTERM, with_sigint("SIG_DFL")),
    "SIGKILL, SIGINT ignored": ("train", signal.SIGKILL, with_sigint("SIG_IGN")),
    "SIGKILL, Python's lock is held": ("hold_the_lock", signal.SIGKILL, ()),
    "SIGKILL, and then a rank fails": ("fail_after_the_launcher", signal.SIGKILL, ()),
}


@pytest.fixture(scope="module")
def started():
    """Jobs that were started at once, and are all under way by now: {name: (process, mark)}."""
    started = {}
    for name, (job, _, prefix) in ENDS.items():
        mark = uuid.uuid4().hex
        started[name] = (start(*prefix, JOB, job, env={"JOB_MARK": mark}), mark)
    for process, _ in started.values():
        assert process.stdout.readline() == "under way\n", process.stderr.read()
    yield started
    for process, _ in started.values():
        process.kill()
        process.communicate(timeout=30)


@pytest.mark.guard
@pytest.mark.slow
def test_jobs_started_at_once_all_train_and_listen_on_loopback_only(started):
    for _, mark in started.values():
        assert listening(mark) == {"127.0.0.1"}


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_no_process_outlives_the_launcher(started, name):
    process, mark = started[name]
    assert len(members(mark)) == 1 + 1 + 2 + 2  # launcher, server, two workers, a process of each
    process.send_signal(ENDS[name][1])
    status, _, stderr = finish(process, timeout=60)
    assert status != 0
    if name == "SIGTERM":
        assert (status, stderr) == (-signal.SIGTERM, "")
    wait_for_the_end_of(mark)


@pytest.mark.guard
@pytest.mark.slow
def test_what_reads_the_output_of_a_job_ends_with_it():
    """`python script.py | cat` does not wait for the fork server, nor for a child of a process that has returned."""
    mark = uuid.uuid4().hex
    assert run(JOB, "begin", env={"JOB_MARK": mark}) == (0, "under way\n", "")
    wait_for_the_end_of(mark, seconds=5)


# ---- the end of a job under torchrun --------------------------------------------------------------------------------


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status", "printed", "error"),
    [
        ("ddp_step", 0, {"during:2", "after:0"}, ""),
        ("give_up", 1, set(), "^no room$"),
        ("fail_early", 1, set(), "ZeroDivisionError: the cause"),  # some versions of torch would wait for gloo for ever
    ],
)
def test_a_job_under_torchrun_ends_with_its_status_and_without_gloos_abort(name, status, printed, error):
    """What prevents the abort at exit: the threads are joined by then, or a process that fails leaves at once."""
    actual, stdout, stderr = torchrun(2, JOB, name)
    assert actual == status and re.search(error, stderr, re.M), stderr
    assert set(re.findall(r"[a-z]+:\d|waits for gloo", stdout)) == printed
    assert set(re.findall(r"exitcode\s*: (-?\d+)", stderr)) <= {"1", "-15"}, "torchrun may end the second first"
