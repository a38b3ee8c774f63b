"""Actions per second of rpc_actor_learner.py: one batched forward pass for all observers, against one call for each.

    python -m benchmarks.actor_learner [--rounds 3] [--updates 4]

"batched" is the script. "each" answers every observer's call at once, with a forward pass of its own. The policy's
hidden layer has 64 or 1024 units. No episode ends before its 200 steps, so all observers always act. The time of
updates is counted too. It is the same in both. The cases alternate, and only ratios within a round mean something.
"""

import argparse
import functools
import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import torch

import distributed as dist
import options
import rpc_actor_learner
from benchmarks import common

OBSERVERS = (1, 2, 4, 8)
WIDTHS = (64, 1024)


@torch.no_grad()
def answer_each():
    learner = rpc_actor_learner.learner
    for state, answer in learner.requests.values():
        states = torch.tensor([state], device=learner.device)
        answer.set_result(learner.policy(states).sigmoid().item())
    learner.requests = {}


def act(local_rank, world_size, path, way, width, updates):
    args = argparse.Namespace(updates=1 + updates, hidden=width, lr=0.01, log_every=10**6, seed=0, timeout=600)
    rpc_actor_learner.GOAL = math.inf
    rpc_actor_learner.has_fallen = lambda state: False
    rpc_actor_learner.print = lambda *args, **kwargs: None
    if way == "each":
        rpc_actor_learner.answer_if_all_have_asked = answer_each
    times = []
    reinforce = rpc_actor_learner.reinforce

    def timed_reinforce(episodes):
        reinforce(episodes)
        times.append(time.perf_counter())

    rpc_actor_learner.reinforce = timed_reinforce
    rpc_actor_learner.main_worker(local_rank, world_size, args)
    if local_rank == 0:  # the first update is not counted
        actions = updates * (world_size - 1) * rpc_actor_learner.MAX_STEPS
        Path(path).write_text(json.dumps(actions / (times[-1] - times[0])))


def measure(results, name, observers, way, width, updates):
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/speed.json"
        dist.launch(act, path, way, width, updates, nprocs=observers + 1)
        results[name].append(json.loads(Path(path).read_text()))


def main():
    parser = options.ArgumentParser(__doc__)
    parser.add_argument("--rounds", type=options.whole_number(1), default=3, help="measurements of each case")
    parser.add_argument("--updates", type=options.whole_number(1), default=4, help="updates per measurement")
    args = parser.parse_args()

    results = {}
    cases = {}
    for width in WIDTHS:
        for observers in OBSERVERS:
            for way in ("batched", "each"):
                name = f"{way}, {observers} observers, width {width}"
                results[name] = []
                cases[name] = functools.partial(measure, results, name, observers, way, width, args.updates)
    common.alternate(cases, args.rounds)
    for name, speeds in results.items():
        print(f"{name:36} {statistics.median(speeds):7.0f} actions/s ({min(speeds):.0f} to {max(speeds):.0f})")
    ratios = {}
    for width in WIDTHS:
        for observers in OBSERVERS:
            suffix = f"{observers} observers, width {width}"
            batched, each = results[f"batched, {suffix}"], results[f"each, {suffix}"]
            ratios[f"batched / each, {suffix}"] = common.ratio(batched, each, "none")
    common.show(ratios)
    speeds = {name: common.summary(values) for name, values in results.items()}
    common.write("actor_learner", {"unit": "actions/s", "results": speeds, "ratios": ratios})


if __name__ == "__main__":
    main()
