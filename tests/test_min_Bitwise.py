"""min_Bitwise.py: one checksum for any number of processes, also when it changes on the way, and for shards.

test_equal.py has what all scripts that train the GPT promise. All here is float32.
"""

import functools
import re
from unittest import mock

import pytest
import torch
import transformer
from conftest import guards, on_processes, run, slow

import distributed as dist
import gpt
import min_Bitwise
import min_FSDP_scratch

SIZES = {"layers": 1, "width": 36, "heads": 3, "length": 33, "global_batch_size": 24, "lr": 0.01, "clip": 0.5}
COUNTS = (1, 2, 4, 8)  # of 24 rows, 8 processes have 3


def command(nprocs, steps, *more):
    words = [str(word) for name, value in SIZES.items() for word in (f"--{name.replace('_', '-')}", value)]
    return ("min_Bitwise.py", "--nproc", nprocs, "--steps", steps, "--log-every", steps, *words, *more)


def printed_at_the_end(stdout):
    return re.fullmatch(r"checksum of the weights: (\d+)", stdout.splitlines()[-1])[1]


def checksum(nprocs, steps, *more):
    status, stdout, stderr = run(*command(nprocs, steps, *more))
    assert (status, stderr) == (0, "")
    return printed_at_the_end(stdout)


@functools.cache
def of_one_process(steps):
    return checksum(1, steps)


@pytest.mark.parametrize("nprocs", COUNTS[1:])
def test_the_weights_of_any_number_of_processes_have_one_checksum(nprocs, job_of):
    assert printed_at_the_end(job_of(*command(nprocs, 6))) == of_one_process(6)


def test_the_checksum_sees_one_bit():
    model = torch.nn.Linear(3, 2)
    before = min_Bitwise.checksum(model)
    model.bias.data.view(torch.int32)[-1] ^= 1
    assert min_Bitwise.checksum(model) != before


@pytest.mark.guard
@pytest.mark.slow
def test_bfloat16_has_one_checksum_too():
    of_each = {checksum(nprocs, 6, "--bf16") for nprocs in COUNTS}
    assert len(of_each) == 1 and of_each != {of_one_process(6)}


@pytest.mark.guard
@pytest.mark.slow
def test_stopped_and_resumed_on_another_number_of_processes(tmp_path):
    path = tmp_path / "run.pt"
    for nprocs, steps in [(2, 2), (4, 3), (8, 4), (1, 6)]:
        assert checksum(nprocs, steps, "--snapshot-path", path) == of_one_process(steps)


def reduce_scatter(part, vector, async_op):
    """In place of the collective of min_FSDP_scratch.py."""
    min_Bitwise.reduce_scatter_by_halves(part, vector)


def mean_over_rows(zero, x, y):
    """This rank's part of the gradients of each unit, by halves as sum_over_rows has it."""
    if len(x) > 1:
        half = len(x) // 2
        first, second = mean_over_rows(zero, x[:half], y[:half]), mean_over_rows(zero, x[half:], y[half:])
        return [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    gpt.loss_fn(zero(x), y).backward()
    zero.finish_backward()
    return [unit.own_grad.clone() for unit in zero.units]


@on_processes(2, *guards(4), *slow(8))
def test_shards_have_the_bits_of_copies():
    """min_FSDP_scratch.py needs another reduce-scatter, one row in each backward, and an AdamW that is not fused.

    On CPUs the fused one rounds the last elements of a tensor otherwise, and a shard may end anywhere. The norm by
    which gradients are clipped is summed by shards, so nothing is clipped.
    """
    torch.set_num_threads(1)
    options = {**SIZES, "global_batch_size": 8, "clip": 0, "snapshot_path": None}
    args = transformer.arguments(dist.get_world_size(), **options)
    model = transformer.make_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    min_Bitwise.train(model, optimizer, transformer.small_data(args), 0, args)

    zero = min_FSDP_scratch.ZeRO3(transformer.make_model(args))
    optimizer = torch.optim.AdamW(zero.pieces(), lr=args.lr)
    own = slice(dist.get_rank(), None, dist.get_world_size())  # every N-th row: those of all ranks are summed first
    for step in range(args.steps):
        x, y = gpt.batch(transformer.small_text()[0], step, args.global_batch_size, args.length, args.seed)
        with mock.patch.object(min_FSDP_scratch, "reduce_scatter_single", reduce_scatter):
            gradients = mean_over_rows(zero, x[own], y[own])
        for unit, gradient in zip(zero.units, gradients, strict=True):
            unit.own_grad.copy_(gradient)
        optimizer.step()
    for unit in zero.units:
        unit.wait()
    assert min_Bitwise.checksum(zero.model) == min_Bitwise.checksum(model)
