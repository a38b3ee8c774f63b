"""min_DiLoCo.py: equal to copies that one process trains in turn, and to DDP where it should be."""

from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
import transformer
from transformer import full_parameters, make_model, make_optimizer, small_text, take_step

import distributed as dist
import gpt
import min_DiLoCo

CASES = {
    "AdamW": ("AdamW", {"sync_every": 4}),
    "SGD, and a short last round": ("SGD", {"sync_every": 6}),
    "clipped, no momentum": ("AdamW", {"sync_every": 5, "outer_momentum": 0.0, "outer_lr": 0.8, "clip": 0.5}),
    "averaged every step": ("SGD", {"sync_every": 1, "outer_momentum": 0.0, "outer_lr": 1.0}),
    "averaged every step, AdamW": ("AdamW", {"sync_every": 1, "outer_momentum": 0.0, "outer_lr": 1.0}),
}


def arguments(changes):
    options = {"layers": 1, "steps": 14, "log_every": 100, "outer_lr": 0.7, "outer_momentum": 0.9}
    return transformer.arguments(**{**options, **changes})


def train(name):
    """Losses and parameters of the script's main_worker, the sizes of what was sent, and the bytes that it reports."""
    optimizer, changes = CASES[name]
    args = arguments(changes)
    sent, all_reduce = [], torch_dist.all_reduce

    def counted(tensor, *op):
        sent.append(tensor.nbytes)
        all_reduce(tensor, *op)

    with mock.patch.object(torch_dist, "all_reduce", counted):
        result = transformer.run_main_worker(min_DiLoCo, args, optimizer)
    # What reports, not the training, sends is tiny: it does not count.
    sent = [size for size in sent if size > 1000]
    return result.losses, full_parameters(result.model), sent, min_DiLoCo.report_sent(result.model, args)


@transformer.float64()
def simulate(n, name):
    """Every step's loss, and the parameters by name, of `n` copies that one process trains in turn."""
    optimizer, changes = CASES[name]
    args = arguments(changes)
    models = [make_model(args) for _ in range(n)]
    optimizers = [make_optimizer(optimizer, model.parameters(), args.lr) for model in models]
    start = full_parameters(models[0])
    velocity = {name: torch.zeros_like(value) for name, value in start.items()}
    losses = torch.zeros(args.steps, n)
    for step in range(args.steps):
        x, y = gpt.batch(small_text()[0], step, args.global_batch_size, args.length, args.seed)
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            own = slice(rank * args.global_batch_size // n, (rank + 1) * args.global_batch_size // n)
            loss = transformer.plain_loss(model, x[own], y[own])
            losses[step, rank], _ = take_step(model, optimizer, loss, args.clip)
        if step % args.sync_every == args.sync_every - 1 or step == args.steps - 1:
            copies = [full_parameters(model) for model in models]
            for name, value in start.items():
                moved = sum(value - copy[name] for copy in copies) / n
                velocity[name] = velocity[name].mul(args.outer_momentum).add(moved)
                ahead = moved.add(velocity[name], alpha=args.outer_momentum)  # rounds once, as a * b + c does not
                start[name] = value.add(ahead, alpha=-args.outer_lr)
            for model in models:
                model.load_state_dict(start)
    return losses.sum(1) / n, start


def start_apart():
    model = make_model(arguments({}))
    with torch.no_grad():
        for param in model.parameters():
            param += dist.get_rank()
    min_DiLoCo.Outer(model, 0.7, 0.9)
    dist.check_in_sync(model)
    return full_parameters(model)


def call(name):
    return start_apart() if name == "start apart" else train(name)


FOUR = pytest.param(4, ["AdamW", "SGD, and a short last round"], marks=pytest.mark.slow)


@pytest.mark.parametrize(("n", "names"), [(2, list(CASES)), FOUR])
def test_processes_do_what_one_does_with_a_copy_after_the_other(n, names, tmp_path):
    ranks = transformer.train_on(n, call, [(name,) for name in [*names, "start apart"]], tmp_path)
    for i, name in enumerate(names):
        expected, (optimizer, changes) = simulate(n, name), CASES[name]
        # Two numbers have one sum, in whatever order; four have several. AdamW makes a direction of that difference
        # where the gradient is 0 but for rounding, as for the keys' biases, which all keys share.
        exact = n == 2 and "clip" not in changes
        for results in ranks:
            losses, parameters, sent, reported = results[i]
            tolerance = 0 if exact else 1e-12 if optimizer == "SGD" else 1e-9
            transformer.assert_equal(losses, parameters, expected, tolerance)
            rounds = -(-len(losses) // changes["sync_every"])
            assert sent == [8 * sum(value.numel() for value in parameters.values())] * rounds
            assert reported == pytest.approx(2 * (n - 1) / n * sum(sent)), "a ring all-reduce"
    with transformer.float64():
        initial = full_parameters(make_model(arguments({})))
    assert all(torch.equal(ranks[1][-1][name], value) for name, value in initial.items()), "rank 0's weights"
    if n == 2:
        # The mean of SGD's steps is the step along the mean gradient, but AdamW's is not.
        (losses, parameters, *_), (of_adam, *_) = ranks[0][-3:-1]
        transformer.assert_equal(losses, parameters, transformer.reference("SGD", layers=1, steps=14), 1e-12)
        assert (of_adam - transformer.reference("AdamW", layers=1, steps=14)[0]).abs().max() > 1e-3
