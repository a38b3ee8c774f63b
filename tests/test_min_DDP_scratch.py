"""min_DDP_scratch.py: any parameters, sent during backward, and one line for each mistake.

test_equal.py has what all scripts that train the GPT promise.
"""

import threading
from unittest import mock

import pytest
import torch
import transformer
from conftest import float64, guards, on_processes, slow

import distributed as dist
import gpt
import min_DDP_scratch


def arguments(**changes):
    return transformer.arguments(dist.get_world_size(), **{**transformer.ODD, "accumulate": 1, **changes})


# ---- tied and frozen parameters, and a scalar -----------------------------------------------------------------------


class Odd(torch.nn.Module):
    """A GPT with a tied head, frozen positions and a scalar."""

    def __init__(self, args):
        super().__init__()
        self.gpt = transformer.make_model(args)
        self.gpt.head.weight = self.gpt.token.weight
        self.gpt.position.weight.requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens):
        return self.scale * self.gpt(tokens)


def make_odd(args, optimizer):
    model = Odd(args)
    params = [param for param in model.parameters() if param.requires_grad]
    return model, transformer.make_optimizer(optimizer, params, args.lr)


@on_processes(2, *guards(4), *slow(3))
@pytest.mark.parametrize(("optimizer", "accumulate"), [("AdamW", 1), ("SGD", 2)])
@float64()
def test_tied_and_frozen_parameters_and_a_scalar_equal_one_process(optimizer, accumulate):
    args = arguments(accumulate=accumulate)
    alone, plain_optimizer = make_odd(args, optimizer)
    for step in range(args.steps):
        x, y = gpt.batch(transformer.small_text()[0], step, args.global_batch_size, args.length, args.seed)
        transformer.take_step(alone, plain_optimizer, transformer.plain_loss(alone, x, y))
    model, optimizer = make_odd(args, optimizer)
    with torch.no_grad():
        for param in model.parameters():
            param += dist.get_rank()  # all must start from rank 0's
    reducer = min_DDP_scratch.Reducer(model, 20_000)
    min_DDP_scratch.train(model, optimizer, reducer, transformer.small_data(args), args)
    dist.check_in_sync(model)
    for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert (param - expected).abs().max() <= 1e-10


# ---- what is sent ---------------------------------------------------------------------------------------------------


@on_processes(*guards(4))
def test_a_ring_sends_less_than_twice_the_vector():
    hops = mock.patch.object(min_DDP_scratch, "send_and_receive", wraps=min_DDP_scratch.send_and_receive)
    with hops as hop:
        min_DDP_scratch.ring_all_reduce(torch.ones(400))
    assert [len(call.args[0]) for call in hop.call_args_list] == 6 * [100]


# ---- during backward ------------------------------------------------------------------------------------------------


def first_step():
    """A model, its reducer, and a batch of 4 rows."""
    args = arguments()
    model = transformer.make_model(args)
    batch = gpt.batch(transformer.small_text()[0], 0, 4, args.length)
    return model, min_DDP_scratch.Reducer(model, 20_000), *batch


@on_processes(2)
def test_the_ring_moves_during_backward():
    """It may move only when backward has come to the first block, which then waits for the first bucket."""
    model, reducer, x, y = first_step()
    gate = threading.Event()
    reducer.background.start(gate.wait, 60)

    def first_block_is_reached(param):
        gated, first_bucket, *_ = reducer.background.calls
        assert not gated.done(), "the caller waits for the ring"
        gate.set()
        first_bucket.result(timeout=60)

    model.blocks[0].norm1.weight.register_post_accumulate_grad_hook(first_block_is_reached)
    min_DDP_scratch.backward(model, reducer, x, y, 1)
    reducer.wait()


SECOND = r"^a second gradient of head.weight before wait\(\): see `sync`$"


@on_processes(2)
def test_a_second_backward_before_wait_is_an_error():
    model, reducer, x, y = first_step()
    transformer.plain_loss(model, x, y).backward()
    for reducer.sync in (True, False):
        with pytest.raises(dist.DistributedError, match=SECOND):
            transformer.plain_loss(model, x, y).backward()
    reducer.wait()


@on_processes(2)
def test_micro_batches_of_unequal_length_are_an_error():
    model, reducer, x, y = first_step()
    with pytest.raises(RuntimeError, match="unflatten"):
        min_DDP_scratch.backward(model, reducer, x, y, 3)


@on_processes(2)
def test_an_unused_parameter_is_an_error():
    args = arguments()
    model = transformer.make_model(args)
    x, y = gpt.batch(transformer.small_text()[0], 0, 4, args.length)
    model.unused = torch.nn.Parameter(torch.zeros(2))
    reducer = min_DDP_scratch.Reducer(model, 20_000)
    transformer.plain_loss(model, x, y).backward()
    with pytest.raises(dist.DistributedError, match=r"^backward has failed, or has not used unused$"):
        reducer.wait()
    reducer.background.wait()  # its ring must not meet the next one's


@on_processes(2)
def test_a_failed_backward_that_the_caller_has_caught_is_an_error_afterwards():
    model, reducer, x, y = first_step()
    hook = model.blocks[0].mlp.up.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        transformer.plain_loss(model, x, y).backward()
    hook.remove()
    with pytest.raises(dist.DistributedError, match=SECOND):
        transformer.plain_loss(model, x, y).backward()
    with pytest.raises(dist.DistributedError, match=r"^backward has failed, or has not used blocks.0.mlp.up.weight, "):
        reducer.wait()
    reducer.background.wait()  # its ring must not meet the next one's


def test_an_error_of_the_ring_is_raised_by_wait():
    background = min_DDP_scratch.BackgroundThread()
    background.start([].remove, "what the ring lost")
    with pytest.raises(ValueError, match="not in list"):
        background.wait()
