"""How long it takes to start N processes: `launch` against torch.multiprocessing.spawn and torchrun.

    python -m benchmarks.launch [--rounds 3]

Two jobs: "all-reduce" initialises, all-reduces once and leaves; "first step" takes one optimizer step of a DDP model,
which is where training begins. Measured as calls from a living process, whose first launch also starts the fork
server, and as whole commands, whose floor is `import torch`.
"""

import argparse
import os
import random
import subprocess
import sys
import time

import torch

import distributed as dist
from benchmarks import common


def all_reduce(local_rank, world_size):
    dist.init_process_group()
    assert dist.all_reduce(torch.tensor(1)).item() == world_size
    dist.cleanup()


def first_step(local_rank, world_size):
    dist.init_process_group()
    model = dist.prepare_ddp_model(torch.nn.Linear(20, 1).to(dist.get_device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.randn(32, 20, device=dist.get_device())).square().mean().backward()
    optimizer.step()
    dist.cleanup()


JOBS = {"all-reduce": all_reduce, "first step": first_step}


def spawned(local_rank, world_size, port, job):
    rank = str(local_rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(world_size))
    JOBS[job](local_rank, world_size)


def start(launcher, nprocs, job):
    if launcher == "spawn":
        port = str(random.randrange(20_000, 30_000))  # as scripts do: chosen, and hoped to be free
        torch.multiprocessing.spawn(spawned, (nprocs, port, job), nprocs=nprocs)
    else:
        dist.launch(JOBS[job], nprocs=nprocs)


def command(launcher, nprocs, job):
    """Run the same as a whole command."""
    prefix = [sys.executable, "-m"]
    if launcher == "torchrun":
        prefix += ["torch.distributed.run", "--standalone", f"--nproc-per-node={nprocs}", "-m"]
    arguments = ["benchmarks.launch", "--one", launcher, str(nprocs), job]
    if launcher == "import torch":
        prefix, arguments = [sys.executable, "-c"], ["import torch"]
    subprocess.run([*prefix, *arguments], check=True, stderr=subprocess.DEVNULL)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=dist.at_least(1), default=3, help="of each measurement")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return start(args.one[0], int(args.one[1]), args.one[2])

    begin = time.perf_counter()
    start("launch", 2, "all-reduce")
    results = {"first launch, 2 processes": common.summary([time.perf_counter() - begin])}
    for job in JOBS:
        calls = [("launch", 2), ("launch", 8), ("spawn", 2), ("spawn", 8)]
        cases = {f"{name} {n}": lambda name=name, n=n, job=job: start(name, n, job) for name, n in calls}
        commands = [("launch", n) for n in (2, 8, 16)] + [(name, 8) for name in ("spawn", "torchrun", "import torch")]
        for name, n in commands:
            cases[f"command {name} {n}"] = lambda name=name, n=n, job=job: command(name, n, job)
        results[job] = {name: common.summary(times) for name, times in common.alternate(cases, args.rounds).items()}
        medians = {name: numbers["median"] for name, numbers in results[job].items()}
        for name, median in medians.items():
            print(f"{job:12} {name:24} {median:6.2f} s")
        for one, other in (
            ("launch 8", "launch 2"),
            ("spawn 8", "launch 8"),
            ("command spawn 8", "command launch 8"),
            ("command torchrun 8", "command launch 8"),
        ):
            print(f"{job:12} {one} / {other} = {medians[one] / medians[other]:.2f}")
    common.write("launch", {"unit": "s", "results": results})


if __name__ == "__main__":
    main()
