"""How long it takes to start N processes: `launch` against torch.multiprocessing.spawn and torchrun.

    python -m benchmarks.launch [--rounds 3]

Two jobs: "all-reduce" initialises, all-reduces once and leaves; "first step" takes one optimizer step of a DDP model,
which is where training begins. Each is measured as a whole command, whose floor is `import torch`, and as the call in
a fresh process; for `launch` also as a second call, which finds its fork server running.
"""

import argparse
import collections
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
    """Run it as a whole command; returns {what: seconds}."""
    prefix = [sys.executable, "-m"]
    if launcher == "torchrun":
        prefix += ["torch.distributed.run", "--standalone", f"--nproc-per-node={nprocs}", "-m"]
    arguments = ["benchmarks.launch", "--one", launcher, str(nprocs), job]
    if launcher == "import torch":
        prefix, arguments = [sys.executable, "-c"], ["import torch"]
    begin = time.perf_counter()
    process = subprocess.run([*prefix, *arguments], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    calls = [] if launcher == "torchrun" else [float(line) for line in process.stdout.split()]
    seconds = {"command": time.perf_counter() - begin - sum(calls[1:])}
    seconds.update(zip(("call", "second call"), calls, strict=False))
    return {f"{launcher} {nprocs}: {what}": value for what, value in seconds.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=dist.at_least(1), default=3, help="of each measurement")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        for _ in range(2 if args.one[0] == "launch" else 1):
            begin = time.perf_counter()
            start(args.one[0], int(args.one[1]), args.one[2])
            print(time.perf_counter() - begin)
        return

    cases = [("launch", n) for n in (2, 8, 16)] + [("spawn", 2), ("spawn", 8), ("torchrun", 8), ("import torch", 1)]
    results = {}
    for job in JOBS:
        times = collections.defaultdict(list)
        for _ in range(args.rounds):  # in turn: only times of the same rounds may be compared
            for launcher, nprocs in cases:
                for what, seconds in command(launcher, nprocs, job).items():
                    times[what].append(seconds)
        results[job] = {what: common.summary(values) for what, values in times.items()}
        medians = {what: row["median"] for what, row in results[job].items()}
        for what, median in medians.items():
            print(f"{job:12} {what:24} {median:6.2f} s")
        for one, other in (("launch 8", "launch 2"), ("launch 8", "spawn 8")):
            ratio = medians[f"{one}: call"] / medians[f"{other}: call"]
            print(f"{job:12} {one} / {other}, as calls: {ratio:.2f}")
    common.write("launch", {"unit": "s", "results": results})


if __name__ == "__main__":
    main()
