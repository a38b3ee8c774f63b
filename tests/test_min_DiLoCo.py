"""min_DiLoCo.py: what is sent, and when it equals DDP.

test_equal.py has what all scripts that train the GPT promise.
"""

from unittest import mock

import references
import torch
import torch.distributed as torch_dist
import transformer

import distributed as dist
import min_DiLoCo


def arguments(nprocs=2, **options):
    defaults = {"layers": 1, "steps": 14, "outer_lr": 0.7, "outer_momentum": 0.9, "sync_every": 6}
    return transformer.arguments(nprocs, **{**defaults, **options})


def sent():
    """The sizes of what was sent by the script's main_worker."""
    args, sizes, all_reduce = arguments(), [], torch_dist.all_reduce

    def counted(tensor, *op):
        sizes.append(tensor.nbytes)
        all_reduce(tensor, *op)

    with mock.patch.object(torch_dist, "all_reduce", counted):
        transformer.run_main_worker(min_DiLoCo, args, "AdamW")
    # What reports, not the training, sends is tiny: it does not count.
    return [size for size in sizes if size > 1000]


def start_apart():
    model = transformer.make_model(arguments())
    with torch.no_grad():
        for param in model.parameters():
            param += dist.get_rank()
    min_DiLoCo.Outer(model, 0.7, 0.9)
    dist.check_in_sync(model)
    return transformer.full_parameters(model)


def call(function):
    return function()


def test_it_sends_all_parameters_in_each_round_and_starts_from_rank_0s_weights(tmp_path):
    with transformer.float64():
        initial = transformer.full_parameters(transformer.make_model(arguments()))
    n_bytes = 8 * sum(value.numel() for value in initial.values())
    for sizes, start in transformer.train_on(2, call, [(sent,), (start_apart,)], tmp_path):
        assert sizes == [n_bytes] * 3, "14 steps are two rounds of 6 and a short one"
        assert all(torch.equal(start[name], value) for name, value in initial.items())


def test_averaged_after_each_step_sgd_is_ddp_and_adamw_is_not():
    """The mean of SGD's steps is the step along the mean gradient."""
    args = arguments(sync_every=1, outer_momentum=0.0, outer_lr=1.0)
    losses, parameters = references.copies("SGD", args)
    transformer.assert_equal(losses, parameters, transformer.reference("SGD", layers=1, steps=14), 1e-12)
    losses, _ = references.copies("AdamW", args)
    assert (losses - transformer.reference("AdamW", layers=1, steps=14)[0]).abs().max() > 1e-3
