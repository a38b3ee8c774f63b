"""min_AllReduce.py: equal to one process and to PyTorch's DDP, with the bytes of a ring, sent during backward."""

import contextlib
import functools
import gc
import re
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
import transformer
from conftest import float64, torchrun
from torch.nn.parallel import DistributedDataParallel

import distributed as dist
import gpt
import min_AllReduce

# 27,330 numbers in matrices of odd sizes: chunks of a ring are unequal on 2, 3 and 4 ranks.
ODD = {"layers": 2, "width": 33, "heads": 3, "length": 15, "global_batch_size": 24}
STEPS = transformer.arguments().steps
DEFAULTS = {"bucket_mb": 0.05, "accumulate": 1, "compress": "none", "library": False}
CASES = {
    "AdamW": ("AdamW", {}),
    "SGD, clipped": ("SGD", {"clip": 0.5}),
    "SGD, each parameter by itself": ("SGD", {"bucket_mb": 0}),
    "SGD, all at once": ("SGD", {"bucket_mb": 100}),
    "AdamW, accumulated": ("AdamW", {"accumulate": 2}),
    "SGD, accumulated": ("SGD", {"accumulate": 2}),
    "AdamW, library": ("AdamW", {"library": True}),
    "SGD, library, accumulated": ("SGD", {"library": True, "accumulate": 2}),
}


def arguments(changes):
    return transformer.arguments(dist.get_world_size(), **{**ODD, **DEFAULTS, "log_every": 100, **changes})


@contextlib.contextmanager
def counted_sends():
    """A list that grows by the bytes of each send of this process."""
    sent, batch_isend_irecv = [], torch_dist.batch_isend_irecv

    def counted(operations):
        sent.extend(operation.tensor.nbytes for operation in operations if operation.op is torch_dist.isend)
        return batch_isend_irecv(operations)

    with mock.patch.object(torch_dist, "batch_isend_irecv", counted):
        yield sent


def train(name):
    """Losses, parameters, the bytes that this rank has sent, and what the script printed, by its main_worker."""
    optimizer, changes = CASES[name]
    with counted_sends() as sent:
        result = transformer.run_main_worker(min_AllReduce, arguments(changes), optimizer)
    if not changes.get("library"):
        assert result.model.n_bytes == sum(sent)
    return result.losses, transformer.full_parameters(result.model), sum(sent), result.stdout


# ---- tied, frozen and unused parameters -----------------------------------------------------------------------------


class Odd(torch.nn.Module):
    """A GPT with a tied head and frozen positions, a scalar, and layers that are used never, or by some sequences."""

    def __init__(self, args):
        super().__init__()
        self.gpt = transformer.make_model(args)
        self.gpt.head.weight = self.gpt.token.weight
        self.gpt.position.weight.requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.never = torch.nn.Linear(3, 3)
        self.sometimes = torch.nn.Linear(256, 256)
        self.n_calls = []  # for each call, the number of sequences that use `sometimes`

    def forward(self, tokens):
        logits = self.scale * self.gpt(tokens)
        use = tokens[:, 0] == ord("e")
        if torch.is_grad_enabled():
            self.n_calls.append(use.sum().item())
        if use.any():
            logits = logits + use[:, None, None] * self.sometimes(logits)
        return logits


def make_odd(args, optimizer):
    model = Odd(args)
    params = [param for param in model.parameters() if param.requires_grad]
    return model, transformer.make_optimizer(optimizer, params, args.lr)


def wrap(case, model):
    """The model in RingDDP, in PyTorch's DDP, or in RingDDP with the reader's own bug."""
    if case == "library":
        return DistributedDataParallel(model, find_unused_parameters=True)
    return min_AllReduce.RingDDP(model, 20_000, find_unused=True)


def reduce_too_early(self, bucket, param):
    """The bug: a bucket is reduced when one of its gradients has not arrived yet."""
    bucket.missing.discard(param)
    while self.n_started < len(self.buckets) and len(self.buckets[self.n_started].missing) <= 1:
        self.start_next()


def train_odd(case, optimizer):
    """Parameters, the bytes sent, and by micro-batch the number of this rank's sequences that use `sometimes`."""
    accumulate = 2 if case == "accumulated" else 1
    args = arguments({"library": case == "library", "accumulate": accumulate})
    model, optimizer = make_odd(args, optimizer)
    with torch.no_grad():
        for param in model.parameters():
            param += dist.get_rank()  # all must start from rank 0's
    with contextlib.ExitStack() as stack:
        sent = stack.enter_context(counted_sends())
        if case == "bug":
            stack.enter_context(mock.patch.object(min_AllReduce.RingDDP, "on_gradient", reduce_too_early))
        wrapped = wrap(case, model)
        min_AllReduce.train(wrapped, optimizer, *transformer.small_text(), args)
    return transformer.full_parameters(wrapped), sum(sent), model.n_calls


@functools.cache
def expected_odd(optimizer):
    """The parameters that one process gives, and for each step the number of sequences that use `sometimes`."""
    args = arguments({})
    with float64():
        model, optimizer = make_odd(args, optimizer)
        for step in range(args.steps):
            x, y = gpt.batch(transformer.small_text()[0], step, args.global_batch_size, args.length, args.seed)
            transformer.take_step(model, optimizer, transformer.plain_loss(model, x, y))
    assert model.never.weight.grad is None
    return transformer.full_parameters(model), model.n_calls


ODD_CASES = [("ring", "AdamW"), ("accumulated", "SGD"), ("library", "AdamW"), ("bug", "SGD")]


def train_any(name, *rest):
    return train_odd(name, *rest) if rest else train(name)


def largest_difference(parameters, others):
    return max((parameters[name] - others[name]).abs().max().item() for name in others)


SOME = [("AdamW",), ("SGD, accumulated",), ("SGD, library, accumulated",), ("ring", "AdamW"), ("bug", "SGD")]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_equal_to_one_process_and_to_ddp(n, tmp_path):
    cases = [(name,) for name in CASES] + ODD_CASES if n == 2 else SOME
    ranks = transformer.train_on(n, train_any, cases, tmp_path)
    results = {case: [rank[number] for rank in ranks] for number, case in enumerate(cases)}
    for (name,) in [case for case in cases if len(case) == 1]:
        optimizer, changes = CASES[name]
        clip = {"clip": changes["clip"]} if "clip" in changes else {}
        expected = transformer.reference(optimizer, **ODD, **clip)
        for losses, parameters, *_ in results[name,]:
            transformer.assert_equal(losses, parameters, expected, 1e-10)
        n_params = sum(value.numel() for value in expected[1].values())
        n_bytes = sum(sent for _, _, sent, _ in results[name,])
        if changes.get("library"):
            assert n_bytes == 0
        else:
            assert n_bytes == STEPS * 2 * (n - 1) * 8 * n_params, "2 (N-1)/N of the gradients on each of N ranks"
    for case, optimizer in [case for case in cases if len(case) == 2]:
        expected, used_in_steps = expected_odd(optimizer)
        assert 0 in used_in_steps and max(used_in_steps) > 0, "in some steps no rank uses the layer"
        parameters, n_bytes, used = zip(*results[case, optimizer], strict=True)
        by_rank = torch.tensor(used).view(n, STEPS, -1).sum(2)
        assert by_rank.sum(0).tolist() == used_in_steps
        assert ((by_rank == 0).any(0) & (by_rank > 0).any(0)).any(), "in some steps only some ranks use the layer"
        differences = [largest_difference(of_rank, expected) for of_rank in parameters]
        if case == "bug":
            assert min(differences) > 1e-3, "the bug must be noticed on every rank"
            continue
        assert max(differences) <= 1e-10
        n_params = sum(value.numel() for name, value in expected.items() if name != "gpt.position.weight")
        if case != "library":
            assert sum(n_bytes) == STEPS * 2 * (n - 1) * 8 * n_params


# ---- compression ----------------------------------------------------------------------------------------------------


def train_compressed(library, compress):
    """Losses, parameters, and the bytes sent."""
    args = arguments({"library": library, "compress": compress, "steps": 12})
    with counted_sends() as sent:
        result = transformer.run_main_worker(min_AllReduce, args, "SGD")
    return result.losses, transformer.full_parameters(result.model), sum(sent)


def test_compressed_gradients(tmp_path):
    cases = [(False, "none"), (False, "bf16"), (True, "bf16"), (True, "powersgd")]
    ranks = transformer.train_on(2, train_compressed, cases, tmp_path)
    plain, ours, library, low_rank = ranks[0]
    assert largest_difference(ours[1], library[1]) == 0, "two numbers have one sum, so no bit differs from DDP's hook"
    for losses, parameters, _ in (ours, low_rank):
        assert 1e-6 < largest_difference(parameters, plain[1]) < 0.5, "gradients are rounded, but not wrong"
        assert losses[-1] < losses[0] - 0.5
    for first, second in zip(*ranks, strict=True):
        assert largest_difference(first[1], second[1]) == 0, "all ranks take the same step"
    sent = [sum(rank[number][2] for rank in ranks) for number in range(2)]
    assert sent[0] == 4 * sent[1] > 0, "2 bytes in place of 8"


# ---- during backward ------------------------------------------------------------------------------------------------


def step_with_watched_ring():
    """The ring may move only when backward has come to the first block, which then waits for the first bucket."""
    gate, send_and_receive = threading.Event(), min_AllReduce.send_and_receive

    def gated(*tensors):
        assert gate.wait(60), "the caller waits for the ring"
        return send_and_receive(*tensors)

    def watch(model):
        background = model.background

        def first_block_is_reached(param):
            gate.set()
            background.results.put(background.results.get(timeout=60))  # queue.Empty if nothing was started

        model.module.blocks[0].norm1.weight.register_post_accumulate_grad_hook(first_block_is_reached)

    with mock.patch.object(min_AllReduce, "send_and_receive", gated):
        transformer.run_main_worker(min_AllReduce, arguments({"steps": 1}), "SGD", before_training=watch)


def mistakes():
    """The lines that answer a user's mistakes on this rank."""
    args = arguments({})
    x, y = gpt.batch(transformer.small_text()[0], 0, 4, args.length)
    lines = []

    def refused(function):
        with pytest.raises(dist.DistributedError) as caught:
            function()
        lines.append(str(caught.value))

    model = min_AllReduce.RingDDP(transformer.make_model(args), 20_000)
    transformer.plain_loss(model, x, y).backward()
    refused(transformer.plain_loss(model, x, y).backward)
    with model.no_sync():
        refused(transformer.plain_loss(model, x, y).backward)
    model.wait()
    odd = make_odd(args, "SGD")[0]
    model = min_AllReduce.RingDDP(odd, 20_000)
    transformer.plain_loss(model, x, y).backward()
    refused(model.wait)
    odd.gpt.position.weight.requires_grad_(True)
    refused(model.wait)
    return lines


def lost_peer():
    """Rank 1 leaves before the step: rank 0 must not train on alone."""
    args = arguments({})
    x, y = gpt.batch(transformer.small_text()[0], 0, 4, args.length)
    model = min_AllReduce.RingDDP(transformer.make_model(args), 20_000)
    if dist.get_rank() == 1:
        raise dist.DistributedError("rank 1 gives up")
    transformer.plain_loss(model, x, y).backward()
    model.wait()


def test_the_ring_moves_during_backward_and_mistakes_are_one_line(tmp_path):
    ranks = transformer.train_on(2, during_backward, [("ring",), ("mistakes",)], tmp_path)
    for _, lines in ranks:
        *second, without, unfrozen = lines
        assert second == 2 * ["a second gradient of head.weight before wait(): see no_sync()"]
        assert re.fullmatch(r"no gradient of never.weight, never.bias(, sometimes.*)?: .* find_unused=True", without)
        assert unfrozen == "gpt.position.weight was frozen when RingDDP was made: unfreeze it before"


def during_backward(name):
    return {"ring": step_with_watched_ring, "mistakes": mistakes}[name]()


def test_the_thread_runs_in_order_hands_over_errors_and_ends():
    background, calls = min_AllReduce.BackgroundThread(), []
    before = threading.active_count()
    for number in range(3):
        background.start(functools.partial(calls.append, number))
    background.wait()
    assert calls == [0, 1, 2]
    background.start(functools.partial([].remove, "what the ring lost"))
    with pytest.raises(ValueError, match="not in list"):
        background.wait()
    busy, waited = background.seconds_per_step()
    assert busy > 0 and waited > 0
    (thread,) = [thread for thread in threading.enumerate() if thread.name.endswith("(run_jobs)")]
    del background
    gc.collect()
    thread.join(60)
    assert threading.active_count() == before - 1


# A script whose rank 1 fails in backward while its thread waits for rank 0, which waits for rank 1.
FAILS = """
import torch
import distributed as dist
import min_AllReduce

def main(local_rank, world_size):
    dist.init_process_group()
    model = min_AllReduce.RingDDP(torch.nn.Linear(2, 2), 0)
    if local_rank == 0:
        dist.barrier()
    model.module.weight.register_hook(lambda grad: 1 / 0)
    model(torch.ones(2)).sum().backward()

dist.launch(main)
"""


@pytest.mark.slow
def test_a_failure_in_backward_ends_a_process_whose_thread_waits(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    status, _, stderr = torchrun(2, tmp_path / "fails.py")
    assert status == 1 and "ZeroDivisionError" in stderr


def test_a_failure_of_another_rank_ends_the_job(tmp_path):
    with pytest.raises(SystemExit, match=r"^rank 1 gives up$"):
        transformer.train_on(2, lost_peer, [()], tmp_path)


# ---- what is printed ------------------------------------------------------------------------------------------------

LINE = re.compile(
    r"sent per step: ([\d,]+) bytes, (\d\.\d{3}) of the gradients \| buckets: (\d+) \| "
    r"communication: [\d.]+ ms, (\d+) % of it in backward"
)


@pytest.mark.slow
def test_says_what_it_sends_and_hides(job_of):
    options = ("--steps", 20, "--log-every", 10, "--nproc", 2)
    n_bytes = 4 * sum(param.numel() for param in gpt.GPT(2, 128, 4, 128).parameters())
    hidden = []
    for changes, times in (((), 1), (("--bucket-mb", 100), 1), (("--compress", "bf16", "--bucket-mb", 0), 0.5)):
        sent, share, buckets, percent = LINE.fullmatch(
            job_of("min_AllReduce.py", *options, *changes).splitlines()[-1]
        ).groups()
        assert int(sent.replace(",", "")) == n_bytes * times and float(share) == times
        hidden.append((int(percent), int(buckets)))
    (with_buckets, n), (without, one), (_, n_params) = hidden
    assert (one, n_params) == (1, 29) and 3 <= n <= 5
    assert with_buckets > without
