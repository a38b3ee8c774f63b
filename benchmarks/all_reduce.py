"""DDP from scratch beside PyTorch's, by the size of the buckets.

    python -m benchmarks.all_reduce                          # on all GPUs, or two CPU processes, in three minutes
    python -m benchmarks.all_reduce --widths 256 --rounds 5

The step of min_DDP_scratch.py, all cases in turn in the same processes, the slowest rank's time.
"""

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
    """{name: the megabytes of a bucket}; the buckets of the first two are as large."""
    mb = 0.5 * (width / 128) ** 2  # a quarter of the gradients, as by default
    return {LIBRARY: mb, "buckets": mb, "each parameter by itself": 0, "one bucket": ONE_BUCKET}


def worker(local_rank, world_size, width, rounds, report):
    dist.init_process_group()
    device = dist.get_device()
    text, _ = gpt.load_text()
    n_buckets, runs = {}, {}
    for name, mb in make_cases(width).items():
        model = gpt.GPT(gpt.Config(2, width, 4, 128)).to(device)
        if name == LIBRARY:
            reducer = None
            model = dist.prepare_ddp_model(model, bucket_cap_mb=mb * 1e6 / 2**20, gradient_as_bucket_view=True)
        else:
            reducer = min_DDP_scratch.Reducer(model, mb * 1e6)
            n_buckets[name] = len(reducer.buckets)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
        runs[name] = functools.partial(run, model, optimizer, reducer, text)
    times = common.alternate_ranks(runs, rounds, device)
    rows = {}
    for name, of_rounds in times.items():
        rows[name] = {"tokens/s": [STEPS * 8 * world_size * 128 / seconds for seconds in of_rounds]}
        if name in n_buckets:
            rows[name]["buckets"] = n_buckets[name]
    report(rows)


def run(model, optimizer, reducer, text, number):
    share = (dist.get_rank(), dist.get_world_size())
    for step in range(STEPS * number, STEPS * (number + 1)):
        x, y = gpt.batch(text, step, 8 * dist.get_world_size(), 128, device=dist.get_device(), share=share)
        optimizer.zero_grad()
        gpt.loss_fn(model(x), y).backward()
        if reducer is not None:  # PyTorch's DDP waits at the end of backward
            reducer.wait()
        optimizer.step()


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
            print(f"  buckets {row.get('buckets', '-')}")
            if name != LIBRARY:
                promise = "at least 0.7" if name == "buckets" else "none"
                ratio = common.ratio(speeds[name], speeds[LIBRARY], promise)
                ratios[f"width {width}: {name} / {LIBRARY}"] = ratio
    common.show(ratios)
    record = {"unit": "tokens/s", "processes": args.nproc, "results": results, "ratios": ratios}
    common.write("all_reduce", record)


if __name__ == "__main__":
    main()
