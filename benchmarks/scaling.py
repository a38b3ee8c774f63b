"""Step time of DDP on 1 to 8 processes against a model of it, and what the model says of up to 1024 GPUs.

    python -m benchmarks.scaling                           # 1 to 8 processes, or as many as there are GPUs
    python -m benchmarks.scaling --sizes 1 2 3 --rounds 10

The model, for P float32 parameters on N processes, each with the same batch (weak scaling):

    T(N) = s(N) · (t + 2·(N-1)/N · 4·P / B)

t is the step time of one process, measured at N = 1; B the bandwidth at which a process sends, measured by a ring
all-reduce of 4·P bytes between 2 processes; s = max(1, N/cores) on the CPU, where more processes than cores take turns
at computing and at copying alike, and 1 on GPUs. It lets nothing overlap, and knows neither latency nor stragglers.
Each process computes with one thread.

The projection is that formula and no measurement, for a transformer of P = 10⁹ on DGX H100 machines of 8 GPUs: t is
6·P floating-point operations for each of 8192 tokens at 40 % of the published 989·10¹² per second in bfloat16, B half
of NVLink's 900 GB/s (both directions) inside a machine, and beyond it what the eight 400 Gb/s InfiniBand ports of a
machine carry together, 400 GB/s, since NCCL runs a ring through each of them. FSDP sends 3·(N-1)/N · 4·P.
https://www.nvidia.com/en-us/data-center/h100/
https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html
"""

import argparse
import os
import statistics

import torch
import torch._dynamo  # the first optimizer needs it: imported here, the started processes have it already
import torch.distributed as torch_dist
from torch.nn import functional as F

import distributed as dist
import mnist
import options
from benchmarks import common

BATCH, STEPS = 32, 4
MODEL = mnist.ShallowNet
H100 = {"parameters": 1e9, "compute": 6e9 * 8192 / (0.4 * 989e12), "nvlink": 450e9, "infiniband": 8 * 400e9 / 8}


def predicted(n, compute, n_params, bandwidth, slots=None, sends=2):
    """Seconds of a step of `n` processes, of which `slots` can run at once: T(N) of the docstring."""
    sharing = max(1, n / slots) if slots else 1
    return sharing * (compute + sends * (n - 1) / n * 4 * n_params / bandwidth)


def projection():
    rows = {}
    for n in (2**i for i in range(11)):
        bandwidth = H100["nvlink"] if n <= 8 else H100["infiniband"]
        step = {
            name: predicted(n, H100["compute"], H100["parameters"], bandwidth, sends=sends)
            for name, sends in (("DDP", 2), ("FSDP", 3))
        }
        rows[n] = {name: {"ms": 1000 * t, "efficiency": H100["compute"] / t} for name, t in step.items()}
    return rows


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
    projected = projection()
    print("Projected, not measured: a step of 10^9 parameters on H100 GPUs, and its efficiency")
    for n, row in projected.items():
        print(f"N = {n:4}:", *(f"{name} {v['ms']:6.1f} ms, {100 * v['efficiency']:.0f} %  " for name, v in row.items()))
    assumed = {"note": "a projection by the model, not a measurement", **H100, "results": projected}
    what = {"unit": "ms per step", "model": MODEL.__name__, "bandwidth": common.summary(bandwidths)}
    common.write("scaling", {**what, "results": results, "ratios": ratios, "projection": assumed})


if __name__ == "__main__":
    main()
