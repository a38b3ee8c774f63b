"""Small jobs, started as a user starts a script: python job.py NAME, or torchrun ... job.py NAME."""

import os
import re
import subprocess
import sys
import time
from multiprocessing.util import Finalize
from pathlib import Path

import psutil
import torch

import distributed as dist
import spawn


def train(local_rank, world_size):
    """All-reduce for ever, beside a process of each worker's own; says when it is under way."""
    dist.init_process_group()
    subprocess.Popen(["sleep", "600"])
    while True:
        dist.all_reduce(torch.ones(1))
        dist.print_primary("training", flush=True)
        time.sleep(0.05)  # a step of training: several such jobs share the machine


def meet(local_rank, world_size):
    dist.init_process_group()


def hold_the_lock(local_rank, world_size):
    """A regular expression that takes years, in which no thread of Python runs, on all ranks at once."""
    dist.init_process_group()
    process = subprocess.Popen(["sleep", "600"])
    pids = dist.gather_objects(process.pid)
    dist.print_primary("holding", *pids, flush=True)
    re.match("(a+)+$", "a" * 60 + "b")


def fail_after_the_launcher(local_rank, world_size):
    """Fail because the launcher has ended."""
    process = subprocess.Popen(["sleep", "600"])
    print(process.pid, flush=True)
    psutil.Process(os.getppid()).parent().wait()
    raise ValueError("its peers have ended")


def gloo_threads():
    return sum(path.read_text() == "pt_gloo_runloop\n" for path in Path("/proc/self/task").glob("*/comm"))


def ddp_step(local_rank, world_size):
    """Leave right after the last all-reduce, when gloo's threads still hold it."""
    dist.init_process_group()
    model = dist.prepare_ddp_model(torch.nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    print(f"during:{gloo_threads()}", flush=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(32, 20)).square().mean().backward()
        optimizer.step()
    dist.cleanup()


def leave_early(local_rank, world_size):
    """Rank 0 leaves while gloo still waits for rank 1 in an all-reduce that will drop a Python object at its end."""
    dist.init_process_group()
    model = dist.prepare_ddp_model(torch.nn.Linear(2, 1))
    x, y = torch.ones(2, requires_grad=True), torch.ones(1)
    store = torch.distributed.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 leaves"])
    x.register_hook(lambda grad: torch.distributed.all_reduce(y, async_op=True) and None)
    x.sum().backward()
    store.set("rank 0 leaves", "")
    dist.cleanup()
    del model


def fail_early(local_rank, world_size):
    """Rank 1 fails while gloo waits for rank 0 in an all-reduce that rank 0 never joins."""
    Finalize(None, lambda: print("waits for gloo", flush=True), exitpriority=0)  # as in give_up
    dist.init_process_group()
    if dist.get_rank() == 0:
        torch.distributed.distributed_c10d._get_default_store().wait(["what nobody sets"])
    torch.distributed.all_reduce(torch.ones(1), async_op=True)
    raise ZeroDivisionError("the cause")


def give_up(local_rank, world_size):
    """Exit right after all ranks have learnt of an error, when gloo's threads still hold what was exchanged."""
    # Of the interpreter's exit the last part in Python: multiprocessing was imported before distributed.py.
    Finalize(None, lambda: print(f"after:{gloo_threads()}", flush=True), exitpriority=0)
    dist.init_process_group()
    model = dist.prepare_ddp_model(torch.nn.Linear(2, 1))
    model.in_a_cycle = [model]
    dist.raise_on_all("no room")


def try_out(local_rank, world_size, trial):
    """One trial of a study."""
    return trial, world_size, os.getppid()


def study(trials):
    """As a search for parameters does: one job after the other, in one process."""
    for trial in range(int(trials)):
        nprocs = 2 + trial % 2
        *seen, server = dist.launch(try_out, trial, nprocs=nprocs)
        assert seen == [trial, nprocs]
        assert not Path(f"/proc/{server}").exists(), "it ends with its job"


if __name__ == "__main__":
    spawn.PRELOADED = ["torch"]  # the fork server starts sooner
    if sys.argv[1] == "study":
        sys.exit(study(*sys.argv[2:]))
    dist.launch(globals()[sys.argv[1]], *sys.argv[2:], nprocs=2)
    if sys.argv[1] in ("ddp_step", "leave_early"):
        print(f"after:{gloo_threads()}", flush=True)
