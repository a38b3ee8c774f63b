"""DDP from scratch beside PyTorch's, by the size of the buckets.

    python -m benchmarks.all_reduce                          # on all GPUs, or two CPU processes, in three minutes
    python -m benchmarks.all_reduce --widths 256 --rounds 5

The step of min_DDP_scratch.py, all cases in turn in the same processes, the slowest rank's time. "hidden" is the share
of the time for communication that passes during backward, where a process that waits for a slower one communicates
too. It is measured on CPUs only.
"""

import argparse
import functools

import torch

import distributed as dist
import gpt
import min_DDP_scratch
import options
from benchmarks import common

LIBRARY = "PyTorch's DDP"
ONE_BUCKET = 10_000  # more megabytes than the gradients have
STEPS = 3  # of a round


def make_cases(width):
    """{name: the changed options}; the buckets of the first two are as large."""
    mb = 0.5 * (width / 128) ** 2  # a quarter of the gradients, as by default
    cases = {
        LIBRARY: {"bucket_mb": mb},
        "buckets": {"bucket_mb": mb},
        "each parameter by itself": {"bucket_mb": 0},
        "one bucket": {"bucket_mb": ONE_BUCKET},
    }
    defaults = {"compress": "none", "accumulate": 1, "clip": None}
    return {name: argparse.Namespace(**{**defaults, **changes}) for name, changes in cases.items()}


def worker(local_rank, world_size, width, rounds, report):
    dist.init_process_group()
    device = dist.get_device()
    text, _ = gpt.load_text()
    models, runs = {}, {}
    for name, args in make_cases(width).items():
        model = gpt.GPT(gpt.Config(2, width, 4, 128)).to(device)
        if name == LIBRARY:
            mebibytes = args.bucket_mb * 1e6 / 2**20
            model = dist.prepare_ddp_model(model, bucket_cap_mb=mebibytes, gradient_as_bucket_view=True)
            model.wait = already_averaged
        else:
            model = min_DDP_scratch.parallelize(model, args)
        models[name] = model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
        runs[name] = functools.partial(run, model, optimizer, text, args)
    times = common.alternate_ranks(runs, rounds, device)
    rows = {}
    for name, model in models.items():
        rows[name] = {"tokens/s": [STEPS * 8 * world_size * 128 / seconds for seconds in times[name]]}
        if name != LIBRARY:
            rows[name]["buckets"] = len(model.buckets)
        if name != LIBRARY and device.type == "cpu":
            busy, waited = dist.reduce(torch.tensor([model.busy, model.waited])).tolist()
            rows[name]["hidden"] = round(max(0, 1 - waited / busy), 3)
    report(rows)


def already_averaged():
    """PyTorch's DDP waits at the end of backward."""


def run(model, optimizer, text, args, number):
    share = (dist.get_rank(), dist.get_world_size())
    for step in range(STEPS * number, STEPS * (number + 1)):
        x, y = gpt.batch(text, step, 8 * dist.get_world_size(), 128, device=dist.get_device(), share=share)
        min_DDP_scratch.train_step(model, optimizer, x, y, args)


def main():
    parser = options.ArgumentParser(__doc__)
    count = options.whole_number(1)
    parser.add_argument(
        "--nproc", type=options.whole_number(2), default=torch.cuda.device_count() or 2, help="processes to start"
    )
    parser.add_argument("--widths", type=count, nargs="+", default=[128, 512], help="features per byte")
    parser.add_argument("--rounds", type=count, default=8, help="rounds of all cases")
    args = parser.parse_args()
    results, ratios = {}, {}
    for width in args.widths:
        rows = common.launch(worker, width, args.rounds, nprocs=args.nproc)
        speeds = {name: row["tokens/s"] for name, row in rows.items()}
        for name, row in rows.items():
            row["tokens/s"] = common.summary(speeds[name])
            results[f"width {width}: {name}"] = row
            print(f"width {width}: {name:25} {row['tokens/s']['median']:8,.0f} tokens/s", end="")
            print(f"  buckets {row.get('buckets', '-')}, hidden {row.get('hidden', '-')}")
            if name != LIBRARY:
                promise = "at least 0.7" if name == "buckets" else "none"
                ratio = common.ratio(speeds[name], speeds[LIBRARY], promise)
                ratios[f"width {width}: {name} / {LIBRARY}"] = ratio
    common.show(ratios)
    record = {"unit": "tokens/s", "processes": args.nproc, "results": results, "ratios": ratios}
    common.write("all_reduce", record)


if __name__ == "__main__":
    main()
