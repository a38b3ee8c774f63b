"""What a step of min_Bitwise.py costs beside one of DDP, which sums in any order.

    python -m benchmarks.bitwise                     # two processes with one thread each, width 128 and 512

- "tree": min_Bitwise.py, each row a micro-batch.
- "DDP, rows": the same micro-batches. Backward adds up their gradients, and DDP averages them in the last one.
- "DDP": each process's share as one batch.
"""

import argparse
import contextlib
import functools

import torch
from torch.nn.parallel import DistributedDataParallel

import distributed as dist
import gpt
import min_Bitwise
import options
from benchmarks import common


def tree_step(model, optimizer, x, y, batch_size):
    optimizer.zero_grad()
    mean = min_Bitwise.sum_over_ranks(min_Bitwise.sum_over_rows(model, x, y)) / batch_size
    min_Bitwise.set_gradients(list(model.parameters()), mean[1:])
    optimizer.step()


def ddp_step(model, optimizer, x, y, rows):
    """`rows` is the size of a micro-batch."""
    optimizer.zero_grad()
    last = len(x) - rows
    for start in range(0, len(x), rows):
        with contextlib.nullcontext() if start == last else model.no_sync():
            loss = gpt.loss_fn(model(x[start : start + rows]), y[start : start + rows])
            (loss * rows / len(x)).backward()
    optimizer.step()


def main_worker(local_rank, world_size, width, rounds, report):
    dist.init_process_group()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    args = argparse.Namespace(global_batch_size=16, length=128, seed=0)
    x, y = gpt.Data(args).batch(0)

    def case(step, wrap, number):
        model = gpt.GPT(gpt.Config(2, width, 4, 128)).to(dist.get_device())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
        train = functools.partial(step, wrap(model), optimizer, x, y, number)
        return lambda number_of_round: train()

    ddp = functools.partial(DistributedDataParallel, gradient_as_bucket_view=True)
    cases = {
        "tree": case(tree_step, lambda model: model, args.global_batch_size),
        "DDP, rows": case(ddp_step, ddp, 1),
        "DDP": case(ddp_step, ddp, len(x)),
    }
    report(common.alternate_ranks(cases, rounds, dist.get_device()))


def main():
    parser = options.ArgumentParser(__doc__)
    parser.add_argument("--widths", type=options.whole_number(4), nargs="+", default=[128, 512], help="features")
    parser.add_argument("--rounds", type=options.whole_number(1), default=20, help="of all cases")
    args = parser.parse_args()
    results, ratios = {}, {}
    for width in args.widths:
        times = common.launch(main_worker, width, args.rounds, nprocs=2)
        for name, values in times.items():
            results[f"{name}, width {width}"] = common.summary([1000 * value for value in values])
        for other in ("DDP, rows", "DDP"):
            ratios[f"width {width}: tree / {other}"] = common.ratio(times["tree"], times[other], "none")
    for name, row in results.items():
        print(f"{name:22} {row['median']:8.1f} ms ({row['min']:.1f} to {row['max']:.1f})")
    common.show(ratios)
    common.write("bitwise", {"unit": "ms", "processes": 2, "results": results, "ratios": ratios})


if __name__ == "__main__":
    main()
