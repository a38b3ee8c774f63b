"""Step time of DDP on 1 to 8 processes against a model of it. For many GPUs see plan.py.

    python -m benchmarks.scaling                           # 1 to 8 processes, or as many as there are GPUs
    python -m benchmarks.scaling --sizes 1 2 3 --rounds 10

The model, for P float32 parameters on N processes, each with the same batch (weak scaling):

    T(N) = s(N) · (t + 2·(N-1)/N · 4·P / B)

t is the step time of one process, measured at N = 1; B the bandwidth at which a process sends, measured by a ring
all-reduce of 4·P bytes between 2 processes; s = max(1, N/cores) on the CPU, where more processes than cores take turns
at computing and at copying alike, and 1 on GPUs. It lets nothing overlap, and knows neither latency nor stragglers.
Each process computes with one thread.
"""

import argparse
import os
import statistics

import torch
import torch.distributed as torch_dist
from torch.nn import functional as F

import distributed as dist
import mnist
import options
from benchmarks import common

BATCH, STEPS = 32, 4
MODEL = mnist.ShallowNet


def predicted(n, compute, n_params, bandwidth, slots=None):
    """Seconds of a step of `n` processes if `slots` processes can run at once: T(N) of the docstring."""
    sharing = max(1, n / slots) if slots else 1
    return sharing * (compute + 2 * (n - 1) / n * 4 * n_params / bandwidth)


def main_worker(local_rank, world_size, report):
    dist.init_process_group()
    torch.set_num_threads(1)
    device = dist.get_device()
    torch.manual_seed(dist.get_rank())
    model = dist.prepare_ddp_model(MODEL().to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    images = mnist.normalize(torch.randint(256, (BATCH, 1, 28, 28), device=device))
    labels = torch.randint(10, (BATCH,), device=device)
    flat = torch.zeros(sum(param.numel() for param in model.parameters()), device=device)

    def step(number):
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()

    def all_reduce(number):
        for _ in range(STEPS):
            torch_dist.all_reduce(flat)

    cases = {"step": step, **({"all-reduce": all_reduce} if world_size > 1 else {})}
    times = common.alternate_ranks(cases, 1, device)
    report({name: seconds / STEPS for name, (seconds,) in times.items()})


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    gpus = torch.cuda.device_count()
    sizes = [n for n in range(1, 9) if not gpus or n <= gpus]
    parser.add_argument(
        "--sizes", type=options.whole_number(1), nargs="+", default=sizes, help="processes; has 1 and 2"
    )
    parser.add_argument("--rounds", type=options.whole_number(1), default=3, help=f"of {STEPS} steps at each size")
    args = parser.parse_args()
    if not {1, 2} <= set(args.sizes) and gpus != 1:
        parser.error(f"argument --sizes: {args.sizes} must have 1 and 2, from which the model is measured")

    n_params = sum(param.numel() for param in MODEL().parameters())
    slots = None if gpus else os.cpu_count()
    steps, model, bandwidths = {n: [] for n in args.sizes}, {n: [] for n in args.sizes}, []
    for _ in range(args.rounds):
        times = {n: common.launch(main_worker, nprocs=n) for n in args.sizes}
        bandwidths.append(4 * n_params / times[2]["all-reduce"] if 2 in times else float("inf"))
        for n, row in times.items():  # each against what its own round predicts
            steps[n].append(1000 * row["step"])
            model[n].append(1000 * predicted(n, times[1]["step"], n_params, bandwidths[-1], slots))
    results = {
        "measured": {n: common.summary(values) for n, values in steps.items()},
        "model": {n: common.summary(values) for n, values in model.items()},
    }
    print(f"{MODEL.__name__}, P = {n_params:,}, B = {statistics.median(bandwidths) / 1e9:.2f} GB/s")
    for n in args.sizes:
        print(f"N = {n}:", *(f"{name} {row[n]['median']:7.1f} ms  " for name, row in results.items()))
    ratios = {f"N = {n}: measured / model": common.ratio(steps[n], model[n], "none") for n in args.sizes if n > 1}
    common.show(ratios)
    what = {"unit": "ms per step", "model": MODEL.__name__, "bandwidth": common.summary(bandwidths)}
    common.write("scaling", {**what, "results": results, "ratios": ratios})


if __name__ == "__main__":
    main()
