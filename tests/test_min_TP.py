"""min_TP.py: equal to one process, and split for real."""

import sys
from unittest import mock

import pytest
import transformer
from conftest import slow
from torch.distributed.device_mesh import init_device_mesh

import distributed as dist
import gpt
import min_TP

CASES = [("AdamW", None), ("SGD", None), ("SGD", 1.5)]  # the last one clips about half of the steps
SIZES = {
    1: {"layers": 1},
    2: {"layers": 1},
    3: {"layers": 1, "heads": 3, "width": 36, "length": 33},  # 256 bytes are not a multiple of 3
    4: {"layers": 2},
}
MOST_HELD = {1: 1, 2: 0.52, 3: 0.36, 4: 0.27}


def train(nprocs, optimizer, clip):
    args = transformer.arguments(clip=clip, log_every=100, **SIZES[nprocs])
    run = transformer.run_main_worker(min_TP, args, optimizer)
    params = list(run.model.parameters())  # of the model that main_worker has trained; a DTensor's numel is the whole's
    held = [sum(transformer.local(param).numel() for param in params) / sum(param.numel() for param in params)]
    if optimizer == "AdamW":
        held += held_fractions()
    return run.losses, transformer.full_parameters(run.model), held


def held_fractions():
    """Of parameters, gradients and Adam's state, that this process holds with the default options."""
    with mock.patch.object(sys, "argv", ["min_TP.py"]):
        args = min_TP.parse_args()
    model = transformer.make_model(args)
    total = sum(param.numel() for param in model.parameters())
    min_TP.split_layers(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = transformer.make_optimizer("AdamW", model.parameters(), args.lr)
    x, y = gpt.batch(transformer.small_text()[0], 0, 1, args.length)
    gpt.loss_fn(model(x), y).backward()
    optimizer.step()
    gradients = sum(transformer.local(param.grad).numel() for param in model.parameters())
    moments = [values[name] for values in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    state = sum(transformer.local(moment).numel() for moment in moments)
    return gpt.report_held(model.parameters(), total) / total, gradients / total, state / (2 * total)


@pytest.mark.parametrize("nprocs", [2, *slow(1, 3, 4)])
def test_equal_to_one_process_and_split_for_real(nprocs, tmp_path):
    cases = [(nprocs, *case) for case in CASES]
    results = transformer.train_on(nprocs, train, cases, tmp_path)[-1]
    for (_, optimizer, clip), (losses, parameters, held) in zip(cases, results, strict=True):
        expected = transformer.reference(optimizer, clip=clip, log_every=100, **SIZES[nprocs])
        transformer.assert_equal(losses, parameters, expected)
        assert all(1 / nprocs <= fraction <= MOST_HELD[nprocs] for fraction in held), held
