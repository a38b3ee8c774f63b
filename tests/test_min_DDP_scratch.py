"""min_DDP_scratch.py: any parameters, the bytes of a ring, sent during backward, and one line for each mistake.

test_equal.py has what all scripts that train the GPT promise.
"""

import contextlib
import functools
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
import transformer
from conftest import float64, guards, slow
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import distributed as dist
import gpt
import min_DDP_scratch

STEPS = transformer.arguments().steps


def arguments(changes):
    defaults = {"bucket_mb": 0.05, "accumulate": 1, "compress": "none"}
    return transformer.arguments(dist.get_world_size(), **{**transformer.ODD, **defaults, **changes})


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
    self.missing.discard(param)
    while self.to_start and len(self.missing.intersection(self.to_start[0])) <= 1:
        bucket = self.to_start.pop(0)
        for early in bucket:
            if early.grad is None:
                early.grad = torch.zeros_like(early)
        flat = min_DDP_scratch.flatten_gradients(bucket)
        self.background.start(functools.partial(self.average, flat))


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
            stack.enter_context(mock.patch.object(min_DDP_scratch.RingDDP, "on_gradient", reduce_too_early))
        wrapped = min_DDP_scratch.RingDDP(model, 20_000)
        min_DDP_scratch.train(wrapped, optimizer, data, args)
    assert wrapped.n_bytes == sum(sent)
    return transformer.full_parameters(wrapped), sum(sent)


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


# ---- compression ----------------------------------------------------------------------------------------------------


def train_compressed(case):
    """Losses, parameters, and the bytes sent. "ddp" is PyTorch's, with its own hook."""
    args = arguments({"compress": "none" if case == "none" else "bf16", "steps": 12})
    with counted_sends() as sent, contextlib.ExitStack() as stack:
        if case == "ddp":
            stack.enter_context(mock.patch.object(min_DDP_scratch, "parallelize", compressed_ddp))
            stack.enter_context(mock.patch.object(min_DDP_scratch, "report_communication"))
        result = transformer.run_main_worker(min_DDP_scratch, args, "SGD")
    return result.losses, transformer.full_parameters(result.model), sum(sent)


def compressed_ddp(model, args):
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    ddp.wait = lambda: None
    return ddp


@pytest.mark.guard
@pytest.mark.slow
def test_compressed_gradients(tmp_path):
    ranks = transformer.train_on(2, train_compressed, [("none",), ("bf16",), ("ddp",)], tmp_path)
    plain, ours, library = ranks[0]
    assert largest_difference(ours[1], library[1]) == 0, "two numbers have one sum, so no bit differs from DDP's hook"
    assert 1e-6 < largest_difference(ours[1], plain[1]) < 0.5, "gradients are rounded, but not wrong"
    assert ours[0][-1] < ours[0][0] - 0.5
    for first, second in zip(*ranks, strict=True):
        assert largest_difference(first[1], second[1]) == 0, "all ranks take the same step"
    sent = [sum(rank[number][2] for rank in ranks) for number in range(2)]
    assert sent[0] == 4 * sent[1] > 0, "2 bytes in place of 8"


# ---- during backward ------------------------------------------------------------------------------------------------


def step_with_watched_ring():
    """The ring may move only when backward has come to the first block, which then waits for the first bucket."""
    gate, send_and_receive = threading.Event(), min_DDP_scratch.send_and_receive

    def gated(*tensors):
        assert gate.wait(60), "the caller waits for the ring"
        return send_and_receive(*tensors)

    def watch(model):
        background = model.background

        def first_block_is_reached(param):
            gate.set()
            background.calls[0].result(timeout=60)  # IndexError if nothing was started

        model.module.blocks[0].norm1.weight.register_post_accumulate_grad_hook(first_block_is_reached)

    begin = time.perf_counter()
    with mock.patch.object(min_DDP_scratch, "send_and_receive", gated):
        result = transformer.run_main_worker(min_DDP_scratch, arguments({"steps": 1}), "SGD", before_training=watch)
    seconds = time.perf_counter() - begin
    assert 0 < result.model.busy < seconds and 0 < result.model.waited < seconds


def mistakes():
    """The lines that answer a user's mistakes on this rank."""
    args = arguments({})
    x, y = gpt.batch(transformer.small_text()[0], 0, 4, args.length)
    lines = []

    def refused(function):
        with pytest.raises(dist.DistributedError) as caught:
            function()
        lines.append(str(caught.value))

    model = min_DDP_scratch.RingDDP(transformer.make_model(args), 20_000)
    transformer.plain_loss(model, x, y).backward()
    refused(transformer.plain_loss(model, x, y).backward)
    model.sync = False
    refused(transformer.plain_loss(model, x, y).backward)
    model.wait()
    module = transformer.make_model(args)
    module.unused = torch.nn.Parameter(torch.zeros(2))
    model = min_DDP_scratch.RingDDP(module, 20_000)
    transformer.plain_loss(model, x, y).backward()
    refused(model.wait)
    model.background.wait()  # its ring must not meet the next model's
    with pytest.raises(RuntimeError, match="unflatten"):  # 4 rows in 3 micro-batches would weigh differently
        min_DDP_scratch.train_step(model, torch.optim.SGD(module.parameters()), x, y, arguments({"accumulate": 3}))
    return lines


def failed_backward():
    """The lines after an exception in backward that the caller has caught."""
    args = arguments({})
    x, y = gpt.batch(transformer.small_text()[0], 0, 4, args.length)
    model = min_DDP_scratch.RingDDP(transformer.make_model(args), 20_000)
    hook = model.module.blocks[0].mlp.up.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        transformer.plain_loss(model, x, y).backward()
    hook.remove()
    with pytest.raises(dist.DistributedError) as again:
        transformer.plain_loss(model, x, y).backward()
    with pytest.raises(dist.DistributedError) as wait:
        model.wait()
    model.background.wait()
    return [str(again.value), str(wait.value)]


def lost_peer():
    """Rank 1 leaves before the step: rank 0 must not train on alone."""
    args = arguments({})
    x, y = gpt.batch(transformer.small_text()[0], 0, 4, args.length)
    model = min_DDP_scratch.RingDDP(transformer.make_model(args), 20_000)
    if dist.get_rank() == 1:
        raise dist.DistributedError("rank 1 gives up")
    transformer.plain_loss(model, x, y).backward()
    model.wait()


def test_the_ring_moves_during_backward_and_mistakes_are_one_line(tmp_path):
    ranks = transformer.train_on(2, during_backward, [("ring",), ("mistakes",), ("failed",)], tmp_path)
    for _, (second, without_sync, unused), (again, wait) in ranks:
        for line in (second, without_sync, again):
            assert line.startswith("a second gradient of head.weight before wait(): ")
        assert second == without_sync != again, "who accumulates sets sync = False, and a job that has failed must end"
        assert unused.startswith("backward has failed, or has not used unused: ")
        assert wait.startswith("backward has failed, or has not used blocks.0.mlp.up.weight, ")


def during_backward(name):
    return {"ring": step_with_watched_ring, "mistakes": mistakes, "failed": failed_backward}[name]()


def test_the_thread_runs_in_order_and_hands_over_errors():
    background, calls = min_DDP_scratch.BackgroundThread(), []
    for number in range(3):
        background.start(functools.partial(calls.append, number))
    background.wait()
    assert calls == [0, 1, 2]
    background.start(functools.partial([].remove, "what the ring lost"))
    with pytest.raises(ValueError, match="not in list"):
        background.wait()


def test_a_failure_of_another_rank_ends_the_job(tmp_path):
    with pytest.raises(SystemExit, match=r"^rank 1 gives up$"):
        transformer.train_on(2, lost_peer, [()], tmp_path)
