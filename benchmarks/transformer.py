"""The ways to split a transformer, side by side: speed, peak memory, and what each is meant to save.

    python -m benchmarks.transformer                        # on all GPUs, or two CPU processes
    python -m benchmarks.transformer --rounds 3 --steps 12
    python -m benchmarks.transformer --only length          # prints the cases of one kind and stores nothing

Each case is the script's own training function on the same batches, in processes of its own; rounds of all cases
alternate. The first two steps are not timed. Memory is the largest process's peak: resident, or allocated on the GPU.

- width: one process (with the threads of one rank or of all ranks), DDP, FSDP and TP, by the model's width.
- pipeline: 1F1B by the number of micro-batches, beside the time that a bubble of (N-1)/(M+N-1) leaves of the longest.
- length: one process, CP (Ulysses), CP by all-gather, and ring attention, by the length of the sequences: speed, peak
  memory, bytes saved for the backward pass, bytes that attention sends by the formulas of the docstrings, and
  the share of the time in which attention waits for messages (on CPUs).
"""

import argparse
import functools
import multiprocessing
import os
import time
from concurrent import futures

import torch
import torch.distributed as torch_dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh

import distributed as dist
import gpt
import min_CP
import min_CP_ring
import min_FSDP_TP
import min_PP
import min_TP
import options
from benchmarks import common

WIDTHS, MICRO_BATCHES, LENGTHS = (128, 256, 512, 1024), (2, 4, 8, 16), (512, 2048, 8192)
LAYERS, LENGTH, BATCH, WARM_UP = 4, 256, 8, 2


class Clock:
    """In the place of gpt.Progress: when each step ended."""

    def __init__(self, *args, **kwargs):
        self.losses = []

    def __call__(self, step, loss):
        common.wait_for(dist.get_device())
        self.losses.append(time.perf_counter())


def make_args(nproc, steps, **changes):
    shape = {"layers": LAYERS, "width": 128, "heads": 4, "length": LENGTH, "global_batch_size": BATCH}
    split = {"replicate": 1, "shard": nproc, "tensor": 1, "checkpoint_dir": None, "recompute": False}
    split |= {"attention": "ulysses", "schedule": "1F1B", "micro_batches": 8, "tie": False, "log_every": steps}
    training = {"steps": steps, "lr": 0.001, "clip": None, "seed": 0, "nproc": nproc, "bf16": False}
    return argparse.Namespace(**{**shape, **split, **training, **changes})


def whole(args):
    return gpt.GPT(gpt.Config.from_args(args), args.seed).to(dist.get_device())


def split(how, args):
    """What this process holds of a model that no process ever holds whole, as the scripts make it."""
    model = gpt.make_meta_model(gpt.Config.from_args(args))
    how(model)
    model.to_empty(device=dist.get_device())
    gpt.fill(model.named_parameters(), args.seed)
    return model


SHARES = ("one process", "DDP", "FSDP")  # each process takes its share of a batch


def tensor_parallel(model):
    min_TP.split_layers(model, init_device_mesh(dist.get_device().type, (dist.get_world_size(),)))


train_ring = functools.partial(min_CP_ring.train, loss_of=min_CP_ring.local_loss)

# How the model is made, and what trains it.
CASES = {
    "one process": (whole, min_FSDP_TP.train),
    "DDP": (lambda args: dist.prepare_ddp_model(whole(args), gradient_as_bucket_view=True), min_FSDP_TP.train),
    "FSDP": (lambda args: split(functools.partial(min_FSDP_TP.parallelize, args=args), args), min_FSDP_TP.train),
    "TP": (lambda args: split(tensor_parallel, args), min_TP.train),
    "PP": (lambda args: min_PP.make_pipeline(gpt.make_meta_model(gpt.Config.from_args(args)), args), min_PP.train),
    "CP": (lambda args: min_CP.parallelize(whole(args), args.attention), min_CP.train),
    "all-gather": (lambda args: min_CP.parallelize(whole(args), "all-gather"), min_CP.train),
    "ring": (lambda args: min_CP_ring.parallelize(whole(args), args.length), train_ring),
}

# What attention waits in: DDP, which averages the gradients in all these cases, uses none of them.
WAITS_IN = {
    "CP": [(torch_dist, "all_to_all_single")],
    "all-gather": [(torch_dist, "all_to_all_single")],
    "ring": [(min_CP_ring, "start_hop"), (min_CP_ring, "finish_hop")],
}


class Waits:
    """When each call of the functions in WAITS_IN ended, and the seconds it took."""

    def __init__(self, case):
        self.calls = []
        for module, name in WAITS_IN.get(case, []):
            setattr(module, name, self.timed(getattr(module, name)))

    def timed(self, function):
        @functools.wraps(function)
        def call(*args):
            begin = time.perf_counter()
            result = function(*args)
            end = time.perf_counter()
            self.calls.append((end, end - begin))
            return result

        return call

    def percent(self, begin, end):
        """Of the time from `begin` to `end`. On a GPU the calls return before anything is sent, so it is not known."""
        if dist.get_device().type == "cuda":
            return 0.0
        return 100 * sum(seconds for ended, seconds in self.calls if begin < ended <= end) / (end - begin)


def sent_by_attention(case, args):
    """Bytes that one process sends per step, by the docstrings of min_CP.py and min_CP_ring.py. Tests count them."""
    n = args.nproc
    features = args.layers * args.global_batch_size * args.length * args.width
    formulas = {
        "CP": (n - 1) / n * 32 * features / n,
        "all-gather": (n - 1) / n * 16 * features,
        "ring": 3 * (n - 1) * 8 * features / n,
    }
    return formulas.get(case, 0)


def worker(local_rank, world_size, case, args, threads, report):
    gpt.Progress = Clock
    dist.init_process_group()
    if threads:
        torch.set_num_threads(threads)
    make, train = CASES[case]
    model = make(args)
    optimizer = torch.optim.AdamW((model.model if case == "PP" else model).parameters(), lr=args.lr, fused=True)
    data = gpt.Data(args, share=None if case in SHARES else (0, 1))
    waits = Waits(case)
    times = train(model, optimizer, data, args)
    waiting = waits.percent(times[WARM_UP - 1], times[-1])
    steps_per_second = (len(times) - WARM_UP) / (times[-1] - times[WARM_UP - 1])
    speed = steps_per_second * args.global_batch_size * args.length
    loss_of = {
        "one process": functools.partial(gpt.model_loss, model),
        "CP": functools.partial(min_CP.local_loss, model),
        "all-gather": functools.partial(min_CP.local_loss, model),
        "ring": functools.partial(min_CP_ring.local_loss, model),
    }
    saved = saved_bytes(loss_of[case], data) if case in loss_of else 0
    device = dist.get_device()
    numbers = torch.tensor([gpt.peak_memory(device), saved, waiting], dtype=torch.float64, device=device)
    peak, saved, waiting = dist.all_reduce(numbers, "max").tolist()
    report([speed, peak / 1e6, saved / 1e6, sent_by_attention(case, args) / 1e6, waiting])


def saved_bytes(local_loss, data):
    """What a forward pass keeps for the backward pass, without the parameters; each storage once."""
    x, y = data.batch(0)
    sizes = {}

    def pack(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        local_loss(x, y)
    return sum(sizes.values())


def measure(cases, rounds):
    """{name: (case, args, threads)} in turn; {name: {what: summary}}."""
    rows = {name: [] for name in cases}
    for _ in range(rounds):
        for name, (case, args, threads) in cases.items():
            launch = functools.partial(common.launch, worker, case, args, threads, nprocs=args.nproc)
            # One process would be this one, and its peak of memory includes all cases before.
            with futures.ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
                rows[name].append(pool.submit(launch).result() if args.nproc == 1 else launch())
    columns = ("tokens/s", "peak MB", "saved MB", "MB sent by attention", "% waiting")
    return {
        name: {what: common.summary(values) for what, values in zip(columns, zip(*row, strict=True), strict=True)}
        for name, row in rows.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    gpus = torch.cuda.device_count()
    parser.add_argument("--rounds", type=options.whole_number(1), default=2, help="of all cases")
    parser.add_argument("--steps", type=options.whole_number(WARM_UP + 1), default=8, help="of each case")
    parser.add_argument("--nproc", type=options.whole_number(2), default=gpus or 2, help="processes")
    parser.add_argument("--small", action="store_true", help="one of each, to see that it runs")
    parser.add_argument("--only", choices=("width", "micro-batches", "length"), help="the kind of cases (default: all)")
    args = parser.parse_args()
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # for one process too, as `launch` has it for several
    n, make = args.nproc, functools.partial(make_args, steps=args.steps)
    widths, micro, lengths = (values[: 1 if args.small else None] for values in (WIDTHS, MICRO_BATCHES, LENGTHS))
    cases = {}
    for width in widths:
        threads = torch.get_num_threads()
        cases[f"width {width}: one process, 1 thread"] = ("one process", make(1, width=width), 1)
        cases[f"width {width}: one process, {threads} threads"] = ("one process", make(1, width=width), threads)
        for case in ("DDP", "FSDP", "TP"):
            cases[f"width {width}: {case}"] = (case, make(n, width=width), None)
    for m in micro:
        cases[f"micro-batches {m}: PP"] = ("PP", make(n, micro_batches=m, global_batch_size=16), None)
    for length in lengths:
        shape = {"length": length, "global_batch_size": 1}
        cases[f"length {length}: one process"] = ("one process", make(1, **shape), None)
        for case in WAITS_IN:
            cases[f"length {length}: {case}"] = (case, make(n, **shape), None)
    if args.only:
        cases = {name: case for name, case in cases.items() if name.startswith(args.only)}
    results = measure(cases, args.rounds)
    for name, row in results.items():
        print(f"{name:35}", *(f"{value['median']:10,.0f} {what}" for what, value in row.items()))
    if args.only:
        return
    longest = results[f"micro-batches {micro[-1]}: PP"]["tokens/s"]["median"] / micro[-1] * (micro[-1] + n - 1)
    bubbles = {m: longest * m / (m + n - 1) for m in micro}
    print("PP without waiting but for the bubble:", *(f"{m}: {speed:,.0f} tokens/s " for m, speed in bubbles.items()))
    what = {"unit": "tokens/s, MB", "processes": n, "layers": LAYERS, "tokens of a step": BATCH * LENGTH}
    common.write("transformer", {**what, "results": results, "tokens/s but for the bubble": bubbles})


if __name__ == "__main__":
    main()
