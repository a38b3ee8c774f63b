"""Measure a cluster for plan.py: how fast its devices multiply matrices and its links send. Slow ranks by name.

    python -m benchmarks.check_cluster                                   # all GPUs of this machine, or one process
    python -m benchmarks.check_cluster --nproc 2 --compare               # two processes, against plan.py
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m benchmarks.check_cluster

- matrices: products of 2,048 tokens with matrices of several widths, in bfloat16 on GPUs, in float32 on CPUs.
- block: forward and backward of a block of gpt.py in each process alone. plan.py's formula divided by that time is its
  `efficiency`.
- links: bus bandwidth of all-gathers by message size, (N-1)/N · bytes / seconds, inside the machines and between them.
  Between machines, all processes of a machine send at the same time.

It writes cluster.json, which plan.py takes: `python plan.py --cluster cluster.json --model llama3-8b`. With --compare
it also trains the DDP, FSDP, TP and PP cases of benchmarks/transformer.py and prints what plan.py projects for them.
"""

import dataclasses
import functools
import json
import os
import platform
import statistics
import time

import torch
import torch._dynamo  # the first optimizer needs it: imported here, the started processes have it already
import torch.distributed as torch_dist

import distributed as dist
import gpt
import options
import plan
from benchmarks import common, transformer

# Its name before torch 2.13
all_gather_single = getattr(torch_dist, "all_gather_single", torch_dist.all_gather_into_tensor)

WIDTHS, TOKENS = (128, 512, 1024), 2048
BLOCK = {"width": 512, "heads": 8, "sequence": 256, "micro": 4}
MESSAGES = (2**12, 2**16, 2**20, 2**24, 2**26)  # bytes
SLOW = 0.9  # of the median
REPEATS = 24


def seconds_of(function, device):
    """The median of some calls, after one that is not counted: a step of training meets slow calls too."""
    times = []
    for _ in range(REPEATS + 1):
        common.wait_for(device)
        begin = time.perf_counter()
        function()
        common.wait_for(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


# ---- one device ---------------------------------------------------------------------------------------------------


def matrix_rates(device, dtype):
    """{width: operations per second} of (tokens, width) times (width, 4·width)."""
    rates = {}
    for width in WIDTHS:
        x = torch.randn(TOKENS, width, device=device, dtype=dtype)
        weight = torch.randn(width, 4 * width, device=device, dtype=dtype)
        product = functools.partial(torch.matmul, x, weight)
        rates[width] = 2 * TOKENS * width * 4 * width / seconds_of(product, device)
    return rates


def fit_rate(rates):
    """(rate, narrow) of plan.py's rate · width / (width + narrow), for the narrowest and the widest matrix."""
    first, last = min(rates), max(rates)
    slope = (1 / rates[first] - 1 / rates[last]) / (1 / first - 1 / last)  # of 1/rate over 1/width
    intercept = 1 / rates[last] - slope / last
    if slope <= 0 or intercept <= 0:
        return max(rates.values()), 0
    return 1 / intercept, slope / intercept


def memory_bandwidth(device):
    """Bytes read and written per second by a copy of 64 MB."""
    source = torch.ones(2**24, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(functools.partial(target.copy_, source), device)


def block_seconds(device, dtype):
    """Forward and backward of a block of gpt.py, as plan.block_seconds projects it."""
    block = gpt.Block(BLOCK["width"], BLOCK["heads"]).to(device)
    x = torch.randn(BLOCK["micro"], BLOCK["sequence"], BLOCK["width"], device=device, requires_grad=True)

    def step():
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            result = block(x)
        result.sum().backward()

    return seconds_of(step, device)


# ---- links --------------------------------------------------------------------------------------------------------


def gather_seconds(group, n_bytes, device):
    """Of an all-gather with `n_bytes` in its result: the slowest rank's."""
    size = group.size()
    part = torch.ones(n_bytes // 4 // size, device=device)
    whole = torch.empty(size * part.numel(), device=device)
    return slowest(seconds_of(functools.partial(all_gather_single, whole, part, group=group), device))


def slowest(seconds):
    value = torch.tensor(seconds, dtype=torch.float64, device=dist.get_device())
    return dist.all_reduce(value, "max").item()


def measure_links(group, device):
    """{"bandwidth", "latency", "by size"} of a group of more than one process."""
    size = group.size()
    times = {n_bytes: gather_seconds(group, n_bytes, device) for n_bytes in MESSAGES}
    bandwidths = {n_bytes: (size - 1) / size * n_bytes / seconds for n_bytes, seconds in times.items()}
    return {
        "bandwidth": max(bandwidths.values()),
        "latency": times[MESSAGES[0]] / (size - 1),
        "by size": bandwidths,
    }


def measure_all_links(device):
    """Links inside the machines and between them, where there are several processes. All ranks must call it."""
    world_size = dist.get_world_size()
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if world_size == 1:
        return {}, 1
    shape = (world_size // per_machine, per_machine)
    mesh = torch_dist.init_device_mesh(device.type, shape, mesh_dim_names=("between", "inside"))
    links = {}
    for name in ("inside", "between"):
        group = mesh.get_group(name)
        if group.size() > 1:
            links[name] = measure_links(group, device)
    return links, per_machine


# ---- all of it ----------------------------------------------------------------------------------------------------


def slow_ranks(rates):
    """Names of those whose rate is below 0.9 of the median. `rates` are (name, rate) of all ranks."""
    median = statistics.median(rate for _, rate in rates)
    return [f"{name} at {rate / median:.2f} of the median" for name, rate in rates if rate < SLOW * median]


def total_memory(device, per_machine):
    """Bytes of the GPU, or this process's share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / per_machine


def make_cluster(device, rates, links, per_machine, block, bandwidth):
    """The plan.Cluster of what was measured. Where no link was measured it takes the other one's, or an H100's."""
    on_gpu = device.type == "cuda"
    rate, narrow = fit_rate(rates)
    h100 = plan.GPUS["h100"]
    inside = links.get("inside", links.get("between", {}))
    between = links.get("between", inside)
    cluster = plan.Cluster(
        name=torch.cuda.get_device_name(device) if on_gpu else f"a core of {platform.machine()}",
        memory=total_memory(device, per_machine),
        flops=rate,
        bandwidth=bandwidth,
        inside=inside.get("bandwidth", h100.inside),
        between=between.get("bandwidth", h100.between),
        gpus_per_node=per_machine,
        latency_inside=inside.get("latency", h100.latency_inside),
        latency_between=between.get("latency", h100.latency_between),
        overlaps=on_gpu,  # on a CPU, sending takes the time of the cores that compute
        float32=h100.float32 if on_gpu else 1.0,
        reachable=1.0,
        reachable_link=1.0,
        narrow=round(narrow),
    )
    precision = "bfloat16" if on_gpu else "float32"
    width, heads = BLOCK["width"], BLOCK["heads"]
    model = plan.Model(1, width, heads, heads, 4 * width, 2, 256, sequence=BLOCK["sequence"])
    layout = plan.Layout(micro=BLOCK["micro"], precision=precision, fused=False)
    return dataclasses.replace(cluster, efficiency=plan.block_seconds(model, layout, cluster) / block)


def main_worker(local_rank, world_size, path, report):
    dist.init_process_group()
    device = dist.get_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dist.barrier()
    rates = matrix_rates(device, dtype)
    block = slowest(block_seconds(device, dtype))
    bandwidth = memory_bandwidth(device)
    links, per_machine = measure_all_links(device)
    name = f"rank {dist.get_rank()} on {platform.node()}"
    all_rates = dist.gather_objects((name, max(rates.values())))
    found = make_cluster(device, rates, links, per_machine, block, bandwidth)
    if dist.is_primary():
        print_measured(rates, block, bandwidth, links, slow_ranks(all_rates))
        record = {"gpus": world_size, **dataclasses.asdict(found)}
        with open(path, "w") as file:
            json.dump(record, file, indent=1)
        print(f"written to {path}: python plan.py --cluster {path} --model llama3-8b")
    report(dataclasses.asdict(found))


def print_measured(rates, block, bandwidth, links, slow):
    by_width = ", ".join(f"width {width}: {rate / 1e9:,.0f}" for width, rate in rates.items())
    print(f"matrices, GFLOP/s    {by_width}")
    print(f"block of width {BLOCK['width']}   {1000 * block:.1f} ms forward and backward")
    print(f"memory, GB/s         {bandwidth / 1e9:,.1f}")
    for name, found in links.items():
        by_size = ", ".join(f"{size // 1024:,} KB: {speed / 1e9:.2f}" for size, speed in found["by size"].items())
        print(f"links {name}, GB/s   {by_size}; latency {1e6 * found['latency']:.0f} us")
    print(f"slow ranks           {', '.join(slow) or 'none'}")


# ---- against plan.py ----------------------------------------------------------------------------------------------


def cases_for(n, steps):
    """{name: (case of benchmarks/transformer.py, its arguments, the layout that plan.py takes)}."""
    make = functools.partial(transformer.make_args, n, steps)
    layout = functools.partial(plan.Layout, precision="float32", fused=False)
    batch = transformer.BATCH
    cases = {}
    for width in (256, 512):
        cases[f"DDP, width {width}"] = ("DDP", make(width=width), layout(replicate=n, micro=batch // n))
        cases[f"FSDP, width {width}"] = ("FSDP", make(width=width), layout(shard=n, micro=batch // n))
        cases[f"TP, width {width}"] = ("TP", make(width=width), layout(tensor=n, micro=batch))
        pipeline = make(width=width, micro_batches=8, global_batch_size=16)
        cases[f"PP, width {width}"] = ("PP", pipeline, layout(stages=n, micro=2, count=8))
    return cases


def compare(cluster, n, rounds, steps):
    """Print and store measured and projected tokens/s of all processes. The fastest of the rounds counts."""
    cases = cases_for(n, steps)
    measured = transformer.measure({name: (case, args, None) for name, (case, args, _) in cases.items()}, rounds)
    rows = {}
    for name, (_, args, layout) in cases.items():
        shape = {"kv_heads": args.heads, "hidden": 4 * args.width, "matrices": 2, "vocabulary": 256}
        model = plan.Model(args.layers, args.width, args.heads, sequence=args.length, **shape)
        projected = n * plan.tokens_per_second(model, layout, plan.seconds(model, layout, cluster))
        row = measured[name]["tokens/s"]
        rows[name] = {"measured": row, "projected": projected}
        error = projected / row["max"] - 1
        print(f"{name:18} measured {row['max']:9,.0f} tokens/s, projected {projected:9,.0f}, {100 * error:+.0f} %")
    common.write("check_cluster", {"unit": "tokens/s", "cluster": dataclasses.asdict(cluster), "results": rows})


def main():
    parser = options.ArgumentParser(__doc__)
    parser.add_argument("--out", default="cluster.json", help="file to write, for plan.py", metavar="FILE")
    parser.add_argument("--compare", action="store_true", help="train, and print what plan.py projects beside it")
    parser.add_argument("--rounds", type=options.whole_number(1), default=2, help="of all cases, with --compare")
    parser.add_argument("--steps", type=options.whole_number(3), default=8, help="of each case, with --compare")
    parser.add_nproc()
    args = parser.parse_args()
    if args.compare and (dist.is_launched() or args.nproc not in (2, 4)):
        parser.error("argument --compare: needs --nproc 2 or 4 on one machine, without torchrun")
    if dist.is_launched():
        dist.launch(main_worker, args.out, print_nothing)
        return
    found = common.launch(main_worker, args.out, nprocs=args.nproc)
    if args.compare:
        compare(plan.Cluster(**found), args.nproc, args.rounds, args.steps)


def print_nothing(value):
    """A report that nobody reads."""


if __name__ == "__main__":
    main()
