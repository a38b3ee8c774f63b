"""watch.py: one line names where each rank stands, only if the job stands still."""

import contextlib
import inspect
import os
import re
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
from conftest import ROOT, exit_message, run_under_launcher, wait_until
from torch import nn
from torch.multiprocessing import ProcessExitedException

import checkpoint
import distributed as dist
import watch

SECONDS = 1  # without progress
LINE = re.compile(rf"^no progress for {SECONDS} s: (.*)$", re.MULTILINE)


def told(log):
    """What watch.py has written into the file `log`."""
    return LINE.findall(Path(log).read_text())


# ---- what the two ranks do ----------------------------------------------------------------------------------------


def backward_against_barrier(rank, log):
    model = dist.prepare_ddp_model(nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
    if rank == 0:
        torch_dist.barrier()
    loss.backward()


def collective_of_one_rank(rank, log):
    if dist.is_primary():
        dist.reduce(torch.ones(1))
    torch_dist.broadcast(torch.ones(1), src=1)


def long_computations(rank, log):
    """Of rank 0, of rank 1, and of rank 0 again."""
    for lines in (1, 2, 3):
        if rank == (lines - 1) % 2:
            end = time.monotonic() + 60
            while len(told(log)) < lines and time.monotonic() < end:
                torch.rand(100, 100) @ torch.rand(100, 100)
        dist.barrier()


def slow_steps(rank, log):
    """Whenever someone looks, rank 0 waits for rank 1 in the same line of backward."""
    model = dist.prepare_ddp_model(nn.Linear(4, 4))
    for _ in range(6):
        loss = model(torch.ones(2, 4)).sum()
        if rank == 1:
            time.sleep(0.3 * SECONDS)
        loss.backward()


def idle_steps(rank, log):
    """Steps that take no time of a thread, in a group of their own: whoever looks sees time.sleep."""
    group = torch_dist.new_group([0, 1])
    with mock.patch("time.clock_gettime", return_value=0):
        for _ in range(12):
            time.sleep(0.25 * SECONDS)
            torch_dist.barrier(group)


def script_that_hangs(rank, log):
    if rank == 1:
        checkpoint.load = lambda *args, **kwargs: threading.Event().wait()
    run_under_launcher(rank, 2, ROOT / "multigpu_torchrun.py", 1, 1, "--snapshot-path", log.with_name("snapshot.pt"))


def watching_threads():
    return [thread for thread in threading.enumerate() if thread.name.endswith("(_watch)")]


def leave(rank, log):
    """A second start replaces the first thread. The thread ends with the process group."""
    (first,) = watching_threads()
    watch.start()
    first.join(timeout=60)
    (thread,) = watching_threads()
    assert thread.daemon
    dist.cleanup()
    thread.join(timeout=60)
    assert not thread.is_alive()


def main_worker(local_rank, world_size, case, log, ends):
    sys.stderr = open(log, "a", buffering=1)  # noqa: SIM115 - open until the process ends
    if not ends and local_rank == 0:
        threading.Thread(target=end_when_told, args=(log,), daemon=True).start()
    if case is not script_that_hangs:  # it starts it itself
        dist.init_process_group()
        store = torch_dist.distributed_c10d._get_default_store()
        store.set(f"watch place {local_rank}", "1 in the processes before a restart")
        watch.start()
    case(local_rank, log)


def end_when_told(log):
    with contextlib.suppress(AssertionError):
        wait_until(lambda: told(log), seconds=60)
    os.kill(os.getpid(), signal.SIGKILL)


# ---- the jobs -----------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Run a job; returns what watch.py has told. If the job stands still, it ends once a line is told."""
    log = tmp_path / "job.log"
    log.touch()
    monkeypatch.setenv("WATCH_SECONDS", str(SECONDS))

    def call(case, ends=True):
        killed = pytest.raises(ProcessExitedException, match="rank 0 was killed by SIGKILL")
        with contextlib.nullcontext() if ends else killed:
            dist.launch(main_worker, case, log, ends, nprocs=2)
        return told(log)

    return call


def place(function, source):
    """How the line of `source` in `function` is described."""
    lines, first = inspect.getsourcelines(function)
    (number,) = [first + i for i, line in enumerate(lines) if line.strip() == source]
    return f"in {Path(__file__).name}:{number} {source}"


@pytest.mark.parametrize(
    ("case", "sources"),
    [
        (backward_against_barrier, ("torch_dist.barrier()", "loss.backward()")),
        (collective_of_one_rank, ("dist.reduce(torch.ones(1))", "torch_dist.broadcast(torch.ones(1), src=1)")),
    ],
)
def test_a_line_names_the_place_of_every_rank(case, sources, job):
    """The line of the script is named, also if it calls a helper or a library."""
    first, second = (place(case, source) for source in sources)
    assert job(case, ends=False) == [f"rank 0 {first} | rank 1 {second}"]


@pytest.mark.guard
@pytest.mark.slow
def test_a_rank_that_computes_for_long_is_named_and_the_job_continues(job):
    waits = place(long_computations, "dist.barrier()")
    computes = "computing, or ended"
    first, second = f"rank 0 {computes} | rank 1 {waits}", f"rank 0 {waits} | rank 1 {computes}"
    assert job(long_computations) == [first, second, first]


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("case", [slow_steps, idle_steps])
def test_a_loop_that_is_always_seen_at_the_same_place_is_not_called_still(case, job):
    assert job(case) == []


def test_one_thread_watches_and_ends_with_the_process_group(job):
    assert job(leave) == []


# ---- ranks that share a store, one look after the other -----------------------------------------------------------


LOOKS = {  # the ranks that look, one after the other, and where the ranks stand in each line: a, b, c, or unknown
    "one rank tells once": ("01" * 10, ["ab?"]),
    "two ranks ask at the same time": ("0+" + "01" * 10, ["ab?"]),  # at + the other one asks
    "another rank tells if the one that asked moves or ends": ("0" + "1" * 10, ["ab?"]),
    # Rank 0 was told, and then moved on, left the group or ended.
    "an answer to an older question is not told": ("01" * 10 + "12" * 10, ["ab?", "?bc"]),
    "a rank that answers too late asks again": ("000" + "01" * 10, ["a??", "ab?"]),
}


@pytest.mark.parametrize("case", LOOKS)
def test_one_of_three_ranks_tells_where_all_stand(case, capsys):
    looks, expected = LOOKS[case]
    store, ranks = torch_dist.HashStore(), {}
    with mock.patch.multiple(watch, STILL_SECONDS=0, ASK_SECONDS=0, _describe=lambda place: place):
        for look in looks:
            if look == "+":
                store.add("watch questions", 1)
                continue
            rank = ranks.setdefault(look, watch.Standstill(store, int(look), 3))
            rank.look("abc"[int(look)])
    lines = []
    for line in expected:
        places = ["computing, or ended" if place == "?" else f"in {place}" for place in line]
        lines.append("no progress for 0 s: rank 0 {} | rank 1 {} | rank 2 {}".format(*places))
    assert capsys.readouterr().err.splitlines() == lines


# ---- places -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [None, "torch._inductor.runtime.compile_tasks.c2fki7"])
def test_generated_code_is_no_place(module):
    """The frames of what torch.compile generates, from a file of its cache or from none."""
    generated = {"__name__": module}
    exec(
        compile("def call(function, *args): return function(*args)", "/tmp/torchinductor_me/c2fki7.py", "exec"),
        generated,
    )
    place = generated["call"](watch._place_of, threading.current_thread())
    assert "generated[" in watch._describe(place[1:])  # place[0] is in watch.py


def test_a_script_that_hangs_says_where(job):
    (line,) = job(script_that_hangs, ends=False)
    assert re.fullmatch(
        r"rank 0 in multigpu_torchrun\.py:\d+ .*checkpoint\.load\(.* \| rank 1 in test_watch\.py.*", line
    )


@pytest.mark.parametrize("script", ["llm_FSDP", "mnist_DDP", "mnist_FSDP", "multigpu_torchrun", "multinode_torchrun"])
def test_a_script_starts_it_once_the_group_is_made(script):
    source = (ROOT / f"{script}.py").read_text()
    assert re.search(r"\n    dist\.init_process_group\(.*\)\n    watch\.start\(\)", source)


def test_a_number_of_seconds_that_is_none_is_one_line(monkeypatch):
    for value in ("0", "0.0", "-1", "nan", "inf", "soon"):
        monkeypatch.setenv("WATCH_SECONDS", value)
        line = exit_message(runpy.run_path, watch.__file__)
        assert line.startswith(f"WATCH_SECONDS is '{value}': ")
    for value, seconds in {"": 30, "0.5": 0.5, "12": 12}.items():
        monkeypatch.setenv("WATCH_SECONDS", value)
        assert runpy.run_path(watch.__file__)["STILL_SECONDS"] == seconds
