"""`launch`: processes that see what the caller sees, fail loudly, listen to nobody and never outlive their launcher."""

import errno
import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from conftest import exit_message, finish, run, start, torchrun
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import distributed as dist
import spawn

JOB = Path(__file__).parent / "job.py"


# ---- what a worker sees ---------------------------------------------------------------------------------------------


def state_of_each(local_rank, world_size, *names):
    """What each rank sees."""
    dist.init_process_group()
    print(f"rank {local_rank}")
    state = {name: os.environ.get(name) for name in names}
    state |= {"cwd": os.getcwd(), "threads": torch.get_num_threads(), "args": (local_rank, world_size)}
    state["start method"] = multiprocessing.get_start_method()
    state["nccl"] = sorted(name for name in os.environ if name.startswith("NCCL_"))
    return dist.gather_objects(state)


@pytest.fixture
def six_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(before)


def test_workers_see_what_the_caller_sees_at_each_launch(tmp_path, monkeypatch, capfd, six_threads):
    """Environment, folder, stdout; CPU threads are divided unless OMP_NUM_THREADS says otherwise.

    A DataLoader starts its processes as the platform does, not as `launch` has started this one. Of NCCL's settings
    only the interface is set: NCCL knows best how GPUs exchange data.
    """
    platforms = multiprocessing.get_all_start_methods()[0]
    expected = {"NCCL_SOCKET_IFNAME": "eth7", "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    expected |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    expected |= {"THP_MEM_ALLOC_ENABLE": "1"}
    for name in [*expected, *(name for name in os.environ if name.startswith("NCCL_"))]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    for colour, omp, threads in (("red", "", 3), ("", "5", 5)):
        folder = tmp_path / colour
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("COLOUR", colour)
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
        states = dist.launch(state_of_each, *expected, "COLOUR", "RANK", "LOCAL_RANK", nprocs=2)
        assert sorted(capfd.readouterr().out.splitlines()) == ["rank 0", "rank 1"]
        for rank, state in enumerate(states):
            own = {"COLOUR": colour, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            where = {"cwd": str(folder), "threads": threads, "args": (rank, 2), "start method": platforms}
            assert state == {**expected, **own, **where, "nccl": ["NCCL_SOCKET_IFNAME"]}
    assert "RANK" not in os.environ


def test_without_a_gpu_or_under_a_launcher_it_runs_in_this_process(monkeypatch, capsys, gpus):
    """What another one printed, capsys would not see."""
    gpus(0)
    dist.launch(print, "a")
    monkeypatch.setenv("WORLD_SIZE", "8")  # alone, it is left from something else
    dist.launch(print, "b", nprocs=1)
    for name, value in {"RANK": "5", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    dist.launch(print, "c", nprocs=8)
    monkeypatch.delenv("WORLD_SIZE")
    dist.launch(lambda *_: print(dist.get_rank(), dist.get_world_size()))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # as by `export RANK=$SLURM_PROCID` without SLURM
        monkeypatch.setenv(name, "")
    dist.launch(print, "d")
    assert capsys.readouterr().out == "0 1 a\n0 1 b\n1 8 c\n0 1\n0 1 d\n"


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
    for alone in ("1", ""):
        for name in variables:
            monkeypatch.setenv(name, "0" if name == "RANK" and alone else alone)
        dist.launch(print)


def typed_in(local_rank, world_size):
    pass


def test_what_stands_in_no_file_is_refused(monkeypatch):
    """As in a notebook, `python -c` and `python -`. In one process it works."""
    monkeypatch.setattr(typed_in, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "typed_in", typed_in, raising=False)
    for file in (None, "<stdin>"):
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["__main__"], "__file__", file, raising=False)
            if file is None:
                patch.delattr(sys.modules["__main__"], "__file__")
            with pytest.raises(SystemExit, match=r"^launch needs a script: [^\n]*$"):
                dist.launch(typed_in, nprocs=2)
            dist.launch(typed_in, nprocs=1)
            if file is None:
                dist.launch(print, 'a text: if __name__ == "__main__":', nprocs=2)


PROGRAM = """
import distributed as dist

def main(local_rank, world_size):
    dist.init_process_group()
    dist.print_primary("trained on", world_size)

if __name__ == "__main__":
    dist.launch(main, nprocs=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", [("-m", "job"), ("job",)])
def test_a_main_file_of_a_folder_is_refused_in_one_line(tmp_path, command):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "__main__.py").write_text(PROGRAM)
    status, stdout, stderr = run(*command, cwd=tmp_path, env={"PYTHONPATH": str(JOB.parent.parent)})
    assert (status, stdout) == (1, "") and re.fullmatch(r"launch needs a script: .* other than __main__.py\n", stderr)


@pytest.mark.slow
def test_a_script_that_calls_launch_when_it_is_imported_is_refused(tmp_path):
    """Each of its workers would start workers."""
    (tmp_path / "script.py").write_text(PROGRAM.replace('if __name__ == "__main__":', "if True:"))
    status, stdout, stderr = run("script.py", cwd=tmp_path)
    assert (status, stdout) == (1, "") and "if __name__ == '__main__':" in stderr


LOGGED = """
import os, shutil, sys, tempfile
import distributed as dist

class Tee:
    def __init__(self):
        self.terminal, self.log = sys.stdout, open("log.txt", "a")

    def write(self, text):
        self.terminal.write(text)
        self.log.write(text)

    def flush(self):
        self.terminal.flush()
        self.log.flush()

sys.stdout = Tee()

def main(local_rank, world_size):
    dist.init_process_group()
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
    dist.print_primary("trained")
    return world_size

if __name__ == "__main__":
    print("returned", dist.launch(main, nprocs=2))
"""


@pytest.mark.guard
@pytest.mark.slow
def test_a_script_may_replace_stdout_and_needs_no_temporary_folder(tmp_path):
    """A cleaner may empty that folder while a job of many days runs."""
    (tmp_path / "script.py").write_text(LOGGED)
    (tmp_path / "tmp").mkdir()
    status, stdout, stderr = run("script.py", cwd=tmp_path, env={"TMPDIR": str(tmp_path / "tmp")})
    assert (status, stdout, stderr) == (0, "trained\nreturned 2\n", "")
    assert (tmp_path / "log.txt").read_text() == stdout


def test_fewer_processes_than_one_are_refused():
    for nprocs in (0, -1):
        with pytest.raises(ValueError, match=f"got {nprocs}$"):
            dist.launch(print, nprocs=nprocs)


# ---- what comes back ------------------------------------------------------------------------------------------------


def compute(local_rank, world_size, given):
    given.append(local_rank)  # a copy
    dist.init_process_group()
    big = torch.full((3_000_000,), local_rank + 7.0)  # 12 MB
    return {"loss": 0.5 + local_rank, "weights": big, "half": torch.ones(2, dtype=torch.bfloat16), "given": given}


@pytest.mark.parametrize("nprocs", [1, 3])
def test_launch_returns_what_rank_0s_function_returns(nprocs):
    given = ["a"]
    value = dist.launch(compute, given, nprocs=nprocs)
    assert value["loss"] == 0.5 and value["weights"].shape == (3_000_000,) and (value["weights"] == 7).all()
    assert value["half"].dtype == torch.bfloat16 and value["given"] == ["a", 0]
    assert given == (["a", 0] if nprocs == 1 else ["a"])


def meet_the_other_job(local_rank, world_size, path, own, other):
    dist.init_process_group()
    Path(f"{path}.{own}.{local_rank}").touch()
    while not Path(f"{path}.{other}.{local_rank}").exists():
        time.sleep(0.01)
    return own


def test_jobs_of_two_threads_run_side_by_side(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(dist.launch, meet_the_other_job, tmp_path / "job", own, 1 - own, nprocs=2) for own in (0, 1)
        ]
        assert [job.result(timeout=120) for job in jobs] == [0, 1]


def leave_without_a_value(local_rank, world_size):
    dist.init_process_group()
    sys.exit(0)


def close_stdout(local_rank, world_size):
    with open(os.devnull, "w") as sys.stdout:
        return "the value"


def tell_the_store(local_rank, world_size):
    """As a stranger does: the store takes what anyone writes who is on this machine. The launcher does not load it."""
    store, _, _ = next(torch.distributed.rendezvous("env://", 1, 2))
    store.set("first report", pickle.dumps(Unloadable()))
    return "trained"


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


@pytest.mark.parametrize(
    ("job", "value"),
    [
        (leave_without_a_value, None),
        (close_stdout, "the value"),
        (tell_the_store, "trained"),
        (draw_unseeded, None),
        (join_by_hand, None),
    ],
)
def test_a_job_returns_its_value(job, value):
    assert dist.launch(job, nprocs=3) == value


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
    monkeypatch.setattr(spawn.connection, "wait", lambda pipes, timeout=None: all(map(wait_for, pipes)) and wait(pipes))

    def wait_for(pipe):
        return wait([pipe])

    with pytest.raises(error, match=message):
        dist.launch(end_first, how, nprocs=3)


def die_beside_its_children(local_rank, world_size):
    if local_rank == 1:
        os.system("sleep 600 &")  # it inherits what is inheritable
        if os.fork():  # a fork, like a process of a DataLoader, has all that the rank has open
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def return_a_function(local_rank, world_size):
    dist.init_process_group()
    return lambda: None


class Unloadable:
    def __reduce__(self):
        return int, ("what only a worker finds out",)


def expect_one_line(local_rank, world_size):
    dist.init_process_group()
    try:
        dist.raise_on_all("no room" if local_rank == 1 else None)
    except Exception as error:  # as a user would catch it
        assert isinstance(error, RuntimeError) and str(error) == "no room"
    dist.raise_on_all("the disk is full" if local_rank == 1 else None)


def report_late_on_rank_0(local_rank, world_size):
    """The line of an error of all ranks is printed, whichever rank is first."""
    dist.init_process_group()
    try:
        dist.raise_on_all("no room")
    except dist.DistributedError:
        if local_rank == 0:
            threading.Event().wait(60)  # the launcher ends it before
        raise


@pytest.mark.parametrize(
    ("job", "error", "message"),
    [
        ((exit_after_the_peers_failure,), ProcessRaisedException, "ValueError: the cause"),
        ((die_beside_its_children,), ProcessExitedException, "^rank 1 was killed by SIGKILL$"),
        ((return_a_function,), ProcessRaisedException, r"(?s)rank 0 raised:.*return_a_function\.<locals>\.<lambda>"),
        ((print, Unloadable()), ProcessRaisedException, "what only a worker finds out"),
        ((expect_one_line,), SystemExit, "^the disk is full$"),
        ((report_late_on_rank_0,), SystemExit, "^no room$"),
    ],
    ids=lambda value: value[0].__name__ if isinstance(value, tuple) else "",
)
def test_the_cause_of_a_failure_is_raised_soon(job, error, message):
    begin = time.monotonic()
    with pytest.raises(error, match=message):
        dist.launch(*job, nprocs=2)
    assert time.monotonic() - begin < 50


def leave_a_child_behind(local_rank, world_size, marks):
    dist.init_process_group()
    subprocess.Popen(["sleep", "600"], env={**os.environ, "JOB_MARK": marks[local_rank]})
    dist.barrier()
    if local_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_children_of_the_processes_end_with_the_job():
    """Of rank 1, which is killed, and of rank 0, which returns."""
    marks = [uuid.uuid4().hex, uuid.uuid4().hex]
    dist.launch(leave_a_child_behind, marks, nprocs=2, tolerate_killed=True)
    for mark in marks:
        wait_for_the_end_of(mark)


def sleep_once(local_rank, world_size):
    time.sleep(2)


def test_the_launcher_sleeps_while_it_waits():
    begin = time.process_time()
    dist.launch(sleep_once, nprocs=2)
    assert time.process_time() - begin < 1, "seconds of a core, in two seconds of waiting"


def test_the_workers_share_the_threads_and_each_has_one_at_least(monkeypatch, six_threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [spawn._environment(n, port=1)["OMP_NUM_THREADS"] for n in (2, 3, 4, 7)] == ["3", "2", "1", "1"]


def test_workers_do_not_get_empty_defaults_nor_what_belongs_to_an_outer_torchrun(monkeypatch):
    """A gloo with an empty interface would listen on the machine's address."""
    given = {"GLOO_SOCKET_IFNAME": "", "CUDA_VISIBLE_DEVICES": "", "TORCHELASTIC_MAX_RESTARTS": "3"}
    for name, value in (given | {"TORCHELASTIC_RUN_ID": "outer"}).items():
        monkeypatch.setenv(name, value)
    environment = spawn._environment(2, port=1)
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert environment["CUDA_VISIBLE_DEVICES"] == "", "no GPU"
    assert [name for name in environment if name.startswith("TORCHELASTIC_")] == ["TORCHELASTIC_USE_AGENT_STORE"]


def test_without_a_loopback_interface_it_says_so_at_once(monkeypatch):
    monkeypatch.setattr(spawn.socket.socket, "connect_ex", lambda self, address: errno.ENETUNREACH)
    with pytest.raises(SystemExit, match=r"^the loopback interface is down[^\n]*$"):
        dist.launch(print, nprocs=2)


# ---- arguments ------------------------------------------------------------------------------------------------------


def change_params(local_rank, world_size, model, params):
    dist.init_process_group()
    with torch.no_grad():
        params[0] += 1
    dist.barrier()
    return [weight.tolist() for weight in dist.gather(model.weight)]


def test_every_rank_has_its_own_copy_of_the_arguments():
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.weight)
    assert dist.launch(change_params, model, list(model.parameters()), nprocs=4) == [[[1.0, 1.0]]] * 4
    assert (model.weight == 0).all(), "the launcher's own model"


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


def test_a_lost_peer_is_noticed_at_once():
    """As when a node is lost during a save. The other nodes' agents do not notice that."""
    begin = time.monotonic()
    dist.launch(lose_a_peer, nprocs=2, tolerate_killed=True)
    assert time.monotonic() - begin < 60


def test_under_torchrun_an_expected_failure_is_one_line_of_this_rank(monkeypatch, capsys):
    for name, value in (("RANK", 1), ("LOCAL_RANK", 1), ("WORLD_SIZE", 2), ("TORCHELASTIC_RUN_ID", "job")):
        monkeypatch.setenv(name, str(value))

    def fail(*args):
        raise dist.DistributedError("no room")

    with mock.patch("os._exit", side_effect=SystemExit) as leave, pytest.raises(SystemExit):
        dist.launch(fail)
    leave.assert_called_once_with(1)
    assert capsys.readouterr().err == "no room\n"


# ---- seeds and imports ----------------------------------------------------------------------------------------------

COMMAND = """
import os, signal, sys
import numpy as np
import torch

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGUSR1})
    seed, on_gpu, functions = torch.initial_seed(), [], dict(vars(torch._C))
    for name in ("_cuda_getDeviceCount", "_cuda_init"):
        setattr(torch._C, name, lambda name=name: on_gpu.append(name) or 0)
    import mnist
    print("torchvision:", "torchvision" in sys.modules)
    import torch._dynamo, torch.distributed.nn.functional, torchvision
    print("GPU:", on_gpu, torch.cuda.is_initialized())
    print("new seed:", torch.initial_seed() != seed)
    print("files:", len(os.listdir()))
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
    dist.launch(draw, nprocs=2)  # each job has a fork server of its own, which ends with it
    dist.launch(draw, nprocs=2)
    dist.launch(draw, nprocs=1)
    dist.launch(fail, nprocs=2)
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """`python script.py`, which starts four jobs, one after the other. The last one fails.

    The working folder has files with names of Python's modules, which no process may import. The signal for the end of
    a child is blocked.
    """
    folder = tmp_path_factory.mktemp("command")
    (folder / "script.py").write_text(COMMAND)
    (folder / "work").mkdir()
    for name in ("queue", "random", "token"):
        (folder / "work" / f"{name}.py").write_text("raise AssertionError('imported from the working folder')")
    status, stdout, stderr = run(folder / "script.py", cwd=folder / "work")
    print(stderr)  # for whoever reads why a test failed
    return SimpleNamespace(status=status, stdout=stdout, stderr=stderr)


@pytest.mark.guard
@pytest.mark.slow
def test_imports_have_no_side_effects(command):
    """Preloaded modules must not touch the GPU: a fork after that would break CUDA in every worker."""
    lines = command.stdout.splitlines()[:4]
    # Who draws digits need not wait for torchvision.
    assert lines == ["torchvision: False", "GPU: [] False", "new seed: False", "files: 3"]


@pytest.mark.guard
@pytest.mark.slow
def test_a_seed_at_the_top_level_of_a_script_stays_and_workers_share_what_is_imported(command):
    """The launcher and the two workers of each of two jobs draw the same numbers."""
    drawn = re.findall("drawn: (.*)", command.stdout)
    assert len(drawn) == 1 + 2 * 2 and len(set(drawn)) == 1


@pytest.mark.guard
@pytest.mark.slow
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


@pytest.mark.guard
@pytest.mark.slow
def test_jobs_started_at_once_all_train_and_listen_on_loopback_only(jobs):
    for _, mark in jobs.values():
        assert listening(mark) == {"127.0.0.1"}


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNALS)
def test_no_process_outlives_the_launcher(jobs, name):
    process, mark = jobs[name]
    assert len(members(mark)) == 1 + 1 + 2 + 2  # launcher, server, two workers, a process of each
    process.send_signal(SIGNALS[name][0])
    status, _, stderr = finish(process, timeout=60)
    assert status != 0
    if name == "SIGTERM":
        assert (status, stderr) == (-signal.SIGTERM, "")
    wait_for_the_end_of(mark)


@pytest.mark.guard
@pytest.mark.slow
def test_workers_that_hold_pythons_lock_end_with_the_launcher():
    mark = uuid.uuid4().hex
    process = start(JOB, "hold_the_lock", env={"JOB_MARK": mark})
    assert process.stdout.readline().startswith("holding "), process.stderr.read()
    process.kill()
    wait_for_the_end_of(mark)
    process.communicate(timeout=30)


@pytest.mark.guard
@pytest.mark.slow
def test_a_rank_that_fails_when_the_launcher_has_ended_leaves_no_child():
    process = start(JOB, "fail_after_the_launcher")
    children = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
    process.kill()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert all(child.status() == psutil.STATUS_ZOMBIE for child in alive)
    process.communicate(timeout=30)  # the fork server ends by itself


@pytest.mark.guard
@pytest.mark.slow
def test_what_reads_the_output_of_a_job_ends_with_it():
    """`python script.py | cat` does not wait for the fork server."""
    mark = uuid.uuid4().hex
    process = start(JOB, "meet", env={"JOB_MARK": mark})
    assert process.wait(timeout=240) == 0
    begin = time.monotonic()
    assert process.communicate(timeout=60) == ("", "")
    assert time.monotonic() - begin < 1
    wait_for_the_end_of(mark, seconds=2)


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize(("trials", "busy"), [pytest.param(5, 0, marks=pytest.mark.guard), (20, 2)])
def test_one_job_after_the_other_starts_in_a_process(trials, busy):
    """Each has a server of its own, which ends with it. `busy` processes make its end take longer."""
    load = [start("-c", "while True: pass") for _ in range(busy)]
    try:
        assert run(JOB, "study", trials, timeout=1200) == (0, "", "")
    finally:
        for process in load:
            process.kill()
            process.communicate(timeout=30)


# ---- the end of a job under torchrun --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status", "printed", "error"),
    [
        pytest.param("ddp_step", 0, {"during:2", "after:0"}, "", marks=pytest.mark.guard),
        ("leave_early", 0, {"after:0"}, ""),
        ("give_up", 1, set(), "no room\n"),
        # Some versions of torch would wait for gloo for ever.
        pytest.param("fail_early", 1, set(), "ZeroDivisionError: the cause", marks=pytest.mark.guard),
    ],
)
def test_gloo_threads_end_before_the_interpreter(name, status, printed, error):
    """What prevents the abort at exit: the threads are joined by then, or a process that fails leaves at once."""
    actual, stdout, stderr = torchrun(2, JOB, name)
    assert actual == status and error in stderr, stderr
    assert set(re.findall(r"[a-z]+:\d|waits for gloo", stdout)) == printed
    assert set(re.findall(r"exitcode\s*: (-?\d+)", stderr)) <= {"1", "-15"}, "torchrun may end the second first"
