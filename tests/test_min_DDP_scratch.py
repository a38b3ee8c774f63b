"""min_DDP_scratch.py: any parameters, the bytes of a ring, sent during backward, and one line for each mistake.

test_equal.py has what all scripts that train the GPT promise.
"""

import contextlib
import functools
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
import transformer
from conftest import float64, guards, slow

import distributed as dist
import gpt
import min_DDP_scratch

STEPS = transformer.arguments().steps


def arguments(changes):
    return transformer.arguments(dist.get_world_size(), **{**transformer.ODD, "accumulate": 1, **changes})


@contextlib.contextmanager
def counted_sends():
    """A list that grows by the bytes of each send of this process."""
    sent, batch_isend_irecv = [], torch_dist.batch_isend_irecv

    def counted(operations):
        sent.extend(operation.tensor.nbytes for operation in operations if operation.op is torch_dist.isend)
        return batch_isend_irecv(operations)

    with mock.patch.object(torch_dist, "batch_isend_irecv", counted):
        yield sent


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


def reduce_too_early(self, param):
    """The bug: a bucket is reduced when one of its gradients has not arrived yet."""
    self.missing.pop(param, None)
    while self.to_start and len(self.missing.keys() & self.to_start[0]) <= 1:
        bucket = self.to_start.pop(0)
        for early in bucket:
            if early.grad is None:
                early.grad = torch.zeros_like(early)
        flat = min_DDP_scratch.flatten_gradients(bucket)
        flat /= dist.get_world_size()
        self.background.start(min_DDP_scratch.ring_all_reduce, flat)


def train_odd(case, optimizer):
    """Parameters, and the bytes sent."""
    args = arguments({"accumulate": 2 if case == "accumulated" else 1})
    model, optimizer = make_odd(args, optimizer)
    with torch.no_grad():
        for param in model.parameters():
            param += dist.get_rank()  # all must start from rank 0's
    data = transformer.small_data(args)
    with contextlib.ExitStack() as stack:
        sent = stack.enter_context(counted_sends())
        if case == "bug":
            stack.enter_context(mock.patch.object(min_DDP_scratch.Reducer, "on_gradient", reduce_too_early))
        reducer = min_DDP_scratch.Reducer(model, 20_000)
        min_DDP_scratch.train(model, optimizer, reducer, data, args)
    return transformer.full_parameters(model), sum(sent)


@functools.cache
def expected_odd(optimizer):
    """The parameters that one process gives."""
    args = arguments({})
    with float64():
        model, optimizer = make_odd(args, optimizer)
        for step in range(args.steps):
            x, y = gpt.batch(transformer.small_text()[0], step, args.global_batch_size, args.length, args.seed)
            transformer.take_step(model, optimizer, transformer.plain_loss(model, x, y))
    return transformer.full_parameters(model)


def largest_difference(parameters, others):
    return max((parameters[name] - others[name]).abs().max().item() for name in others)


@pytest.mark.parametrize("n", [2, *guards(4), *slow(3)])
def test_tied_and_frozen_parameters_and_a_scalar_equal_one_process_with_the_bytes_of_a_ring(n, tmp_path):
    cases = [("ring", "AdamW"), ("accumulated", "SGD"), ("bug", "SGD")]
    if n > 2:
        cases = cases[:1]
    ranks = transformer.train_on(n, train_odd, cases, tmp_path)
    for (case, optimizer), results in zip(cases, zip(*ranks, strict=True), strict=True):
        expected = expected_odd(optimizer)
        if case == "bug":
            differences = [largest_difference(parameters, expected) for parameters, _ in results]
            assert min(differences) > 1e-3, "the bug must be noticed on every rank"
            continue
        for parameters, _ in results:
            assert largest_difference(parameters, results[0][0]) == 0, "all ranks take the same step"
        assert largest_difference(results[0][0], expected) <= 1e-10
        n_params = sum(value.numel() for name, value in expected.items() if name != "gpt.position.weight")
        n_bytes = sum(sent for _, sent in results)
        assert n_bytes == STEPS * 2 * (n - 1) * 8 * n_params, "2 (N-1)/N of the gradients on each of N ranks"


# ---- during backward ------------------------------------------------------------------------------------------------


def first_step():
    """A model, its reducer, and a batch of 4 rows."""
    args = arguments({})
    model = transformer.make_model(args)
    batch = gpt.batch(transformer.small_text()[0], 0, 4, args.length)
    return model, min_DDP_scratch.Reducer(model, 20_000), *batch


def ring_moves_during_backward():
    """The ring may move only when backward has come to the first block, which then waits for the first bucket."""
    gate, send_and_receive = threading.Event(), min_DDP_scratch.send_and_receive

    def gated(*tensors):
        assert gate.wait(60), "the caller waits for the ring"
        return send_and_receive(*tensors)

    def first_block_is_reached(param):
        gate.set()
        reducer.background.calls[0].result(timeout=60)  # IndexError if nothing was started

    model, reducer, x, y = first_step()
    model.blocks[0].norm1.weight.register_post_accumulate_grad_hook(first_block_is_reached)
    with mock.patch.object(min_DDP_scratch, "send_and_receive", gated):
        min_DDP_scratch.backward(model, reducer, x, y, 1)
        reducer.wait()


SECOND = r"^a second gradient of head.weight before wait\(\): see `sync`$"


def mistakes():
    """Each is a line on this rank."""
    model, reducer, x, y = first_step()
    transformer.plain_loss(model, x, y).backward()
    for reducer.sync in (True, False):
        with pytest.raises(dist.DistributedError, match=SECOND):
            transformer.plain_loss(model, x, y).backward()
    reducer.wait()
    with pytest.raises(RuntimeError, match="unflatten"):  # 4 rows in 3 micro-batches would weigh differently
        min_DDP_scratch.backward(model, reducer, x, y, 3)

    model = transformer.make_model(arguments({}))
    model.unused = torch.nn.Parameter(torch.zeros(2))
    reducer = min_DDP_scratch.Reducer(model, 20_000)
    transformer.plain_loss(model, x, y).backward()
    with pytest.raises(dist.DistributedError, match=r"^backward has failed, or has not used unused$"):
        reducer.wait()
    reducer.background.wait()  # its ring must not meet the next one's


def failed_backward():
    """The lines after an exception in backward that the caller has caught."""
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


def lost_peer():
    """Rank 1 leaves before the step: rank 0 must not train on alone."""
    model, reducer, x, y = first_step()
    if dist.get_rank() == 1:
        raise dist.DistributedError("rank 1 gives up")
    transformer.plain_loss(model, x, y).backward()
    reducer.wait()


def call(name):
    globals()[name]()


def test_the_ring_moves_during_backward_and_mistakes_are_one_line(tmp_path):
    transformer.train_on(2, call, [("ring_moves_during_backward",), ("mistakes",), ("failed_backward",)], tmp_path)


def test_the_thread_runs_in_order_and_hands_over_errors():
    background, calls = min_DDP_scratch.BackgroundThread(), []
    for number in range(3):
        background.start(calls.append, number)
    background.wait()
    assert calls == [0, 1, 2]
    background.start([].remove, "what the ring lost")
    with pytest.raises(ValueError, match="not in list"):
        background.wait()


def test_a_failure_of_another_rank_ends_the_job(tmp_path):
    with pytest.raises(SystemExit, match=r"^rank 1 gives up$"):
        transformer.train_on(2, lost_peer, [()], tmp_path)
