"""The share of the time in which trainers and generators of min_GRPO_async.py work at once, with and without staleness.

    python -m benchmarks.grpo_async              # two processes, both cases in turn
    python -m benchmarks.grpo_async --nproc 3

Training is the time of `min_GRPO.update`, on the slowest trainer. Generation is that of `min_GRPO.draw_completions`.
"""

import argparse
import contextlib
import io
import time
from unittest import mock

import distributed as dist
import min_GRPO
import min_GRPO_async
import options
from benchmarks import common

CASES = {"staleness 0": 0, "staleness 1": 1}
OPTIONS = {"imitation_steps": 10, "prompts": 32, "group_size": 8, "temperature": 1.0, "inner_steps": 2, "clip_low": 0.2}
OPTIONS |= {"clip_high": 0.28, "lr": 0.0003, "seed": 0, "generators": 1, "log_every": 10**6, "output": None}


def parse_args():
    parser = options.ArgumentParser(__doc__)
    parser.add_argument("--nproc", type=options.whole_number(2), default=2, help="processes")
    parser.add_argument("--steps", type=options.whole_number(1), default=20, help="steps of each job")
    parser.add_argument("--rounds", type=options.whole_number(1), default=5, help="jobs of each case")
    return parser.parse_args()


def recorded(function, intervals):
    def call(*args):
        begin = time.perf_counter()
        result = function(*args)
        intervals.append((begin, time.perf_counter()))
        return result

    return call


def worker(local_rank, world_size, args, report):
    intervals = []
    with (
        mock.patch.object(min_GRPO, "update", recorded(min_GRPO.update, intervals)),
        mock.patch.object(min_GRPO, "draw_completions", recorded(min_GRPO.draw_completions, intervals)),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        min_GRPO_async.main_worker(local_rank, world_size, args)
    by_rank = dist.gather_objects(intervals)
    report([by_rank[0], by_rank[-1]])  # the trainers take their steps together


def share(training, generation):
    """The share of the training in which both work, and the seconds of a step. perf_counter is the machine's."""
    both = 0
    for begin, end in training:
        for other_begin, other_end in generation:
            both += max(0, min(end, other_end) - max(begin, other_begin))
    begin, end = training[0][0], training[-1][1]
    return both / (end - begin), (end - begin) / len(training)


def main():
    args = parse_args()
    shares = {name: [] for name in CASES}
    seconds = {name: [] for name in CASES}
    for _ in range(args.rounds):
        for name, staleness in CASES.items():
            job = argparse.Namespace(**OPTIONS, steps=args.steps, staleness=staleness)
            training, generation = common.launch(worker, job, nprocs=args.nproc)
            both, per_step = share(training, generation)
            shares[name].append(both)
            seconds[name].append(per_step)
    results = {}
    for name in CASES:
        results[name] = {
            "share of the time in which both work": common.summary(shares[name]),
            "seconds per step": common.summary(seconds[name]),
        }
        print(f"{name}: both work {results[name]['share of the time in which both work']['median']:.0%} of the time")
    ratios = {"step: staleness 1 / 0": common.ratio(*(seconds[name] for name in reversed(CASES)), "below 1")}
    common.show(ratios)
    common.write("grpo_async", {"nproc": args.nproc, "steps": args.steps, "results": results, "ratios": ratios})


if __name__ == "__main__":
    main()
