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


def begin(local_rank=0, world_size=2):
    """Each worker starts a process of its own. Then the job says that it is under way."""
    dist.init_process_group()
    subprocess.Popen(["sleep", "600"])
    dist.barrier()
    dist.print_primary("under way", flush=True)


def train(local_rank, world_size):
    """All-reduce for ever."""
    begin()
    while True:
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)  # a step of training: several such jobs share the machine


def hold_the_lock(local_rank, world_size):
    """A regular expression that takes years, in which no thread of Python runs, on all ranks at once."""
    begin()
    os.nice(19)  # others share the machine
    re.match("(a+)+$", "a" * 60 + "b")


def fail_after_the_launcher(local_rank, world_size):
    """Fail because the launcher has ended."""
    begin()
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


def fail_early(local_rank, world_size):
    """Rank 1 fails while gloo waits for rank 0 in an all-reduce that rank 0 never joins."""
    Finalize(None, lambda: print("waits for gloo", flush=True), exitpriority=0)
    dist.init_process_group()
    if dist.get_rank() == 0:
        torch.distributed.distributed_c10d._get_default_store().wait(["what nobody sets"])
    torch.distributed.all_reduce(torch.ones(1), async_op=True)
    raise ZeroDivisionError("the cause")


def give_up(local_rank, world_size):
    """Exit right after all ranks have learnt of an error."""
    Finalize(None, lambda: print("waits for gloo", flush=True), exitpriority=0)
    dist.init_process_group()
    dist.raise_on_all("no room")


if __name__ == "__main__":
    spawn.PRELOADED = ["torch"]  # the fork server starts sooner
    dist.launch(globals()[sys.argv[1]], nprocs=2)
    if sys.argv[1] == "ddp_step":
        print(f"after:{gloo_threads()}", flush=True)
