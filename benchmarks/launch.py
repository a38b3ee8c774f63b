"""How long it takes to start N processes: `launch` against spawn, torchrun and `accelerate launch`.

    python -m benchmarks.launch                                  # 1, 2, 4, 8 and 16 processes, 3 rounds
    python -m benchmarks.launch --rounds 1 --sizes 2 8

Each is a whole command, from its start to its end, whose floor is `python -c "import torch"`. The job is the same for
all: initialise, take one step of training with DDP, and leave. For `launch` and spawn the time of the call in that
command is measured as well, and for `launch` a second call in the same process.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time

import torch

import distributed as dist
import options
from benchmarks import common

PROMISES = {8: 3, 16: 5}  # so many times faster than each peer, as whole commands


def first_step(local_rank, world_size, nprocs):
    dist.init_process_group()
    assert dist.get_world_size() == nprocs
    model = dist.prepare_ddp_model(torch.nn.Linear(20, 1).to(dist.get_device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.randn(32, 20, device=dist.get_device())).square().mean().backward()
    optimizer.step()
    dist.cleanup()


def spawned(local_rank, nprocs, port):
    rank = str(local_rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(nprocs))
    dist.launch(first_step, nprocs)  # one of the processes of the job, as under torchrun


def start(launcher, nprocs):
    """What the command does. torchrun and `accelerate launch` have started this process as one of theirs."""
    if launcher == "spawn":
        port = str(random.randrange(20_000, 30_000))  # as scripts do: chosen, and hoped to be free
        torch.multiprocessing.spawn(spawned, (nprocs, port), nprocs=nprocs)
    else:
        dist.launch(first_step, nprocs, nprocs=nprocs)


def prefix(launcher, nprocs):
    if launcher == "torchrun":
        return ["torch.distributed.run", "--standalone", f"--nproc-per-node={nprocs}", "-m"]
    if launcher == "accelerate":
        # On the CPU too: --cpu starts a single process, whatever --num_processes says, and --multi_gpu refuses one.
        kind = "--multi_gpu" if nprocs > 1 else "--cpu"
        options = [kind, f"--num_processes={nprocs}", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
        return ["accelerate.commands.launch", *options, "-m"]
    return []


def command(launcher, nprocs):
    """Run it as a whole command; returns {what: seconds}."""
    arguments = ["-m", *prefix(launcher, nprocs), "benchmarks.launch", "--one", launcher, str(nprocs)]
    if launcher == "import torch":
        arguments = ["-c", "import torch"]
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        begin = time.perf_counter()
        status = subprocess.run([sys.executable, *arguments], stdout=stdout, stderr=stderr).returncode
        seconds = time.perf_counter() - begin
        stdout.seek(0)
        stderr.seek(0)
        if status:
            raise SystemExit(f"{launcher} failed with {nprocs} processes:\n{stderr.read()[-3000:]}")
        calls = [float(line) for line in stdout] if launcher in ("launch", "spawn") else []
    names = (f"{launcher}: call", f"{launcher}: second call")
    return {launcher: seconds - sum(calls[1:]), **dict(zip(names, calls, strict=False))}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=options.whole_number(1), default=3, help="of each measurement")
    parser.add_argument("--sizes", type=options.whole_number(1), nargs="+", default=[1, 2, 4, 8, 16], help="processes")
    parser.add_argument("--no-peers", action="store_true", help="leave out what requirements-bench.txt installs")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        for _ in range(2 if args.one[0] == "launch" else 1):
            begin = time.perf_counter()
            start(args.one[0], int(args.one[1]))
            print(time.perf_counter() - begin)
        return
    peers = ["spawn", "torchrun"]
    if not args.no_peers:
        common.require("accelerate")
        peers.append("accelerate")

    gpus = torch.cuda.device_count()
    times = {}
    for _ in range(args.rounds):  # in turn: only times of the same rounds may be compared
        for nprocs in (n for n in args.sizes if not gpus or n <= gpus):
            for launcher in ("import torch", "launch", *peers):
                for what, seconds in command(launcher, nprocs).items():
                    times.setdefault(what, {}).setdefault(nprocs, []).append(seconds)
    results = {what: {n: common.summary(values) for n, values in row.items()} for what, row in times.items()}
    for what, row in results.items():
        print(f"{what:20}", *(f"{n}: {values['median']:6.2f} s  " for n, values in row.items()))
    pairs = [(peer, n) for n in PROMISES if n in times["launch"] for peer in peers]
    ratios = {
        f"{peer} / launch, {n} processes": common.ratio(times[peer][n], times["launch"][n], f"at least {PROMISES[n]}")
        for peer, n in pairs
    }
    common.show(ratios)
    common.write("launch", {"unit": "s", "results": results, "ratios": ratios})


if __name__ == "__main__":
    main()
