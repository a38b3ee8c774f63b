"""min_CP_ring.py: equal to one process, equal work, nothing of other shares saved, and bytes sent as it says."""

import math
import runpy
import sys
from unittest import mock

import pytest
import torch
import transformer
from conftest import ROOT, run
from torch.nn import functional as F

import distributed as dist
import gpt
import min_CP_ring

CASES = [("train", "AdamW", None), ("train", "SGD", 1.5), ("probe_attention",), ("probe_costs",)]
SMALL = {"layers": 2, "log_every": 100}
SHAPES = {  # of 2·N pieces; with 2 and 4 processes, fewer heads than processes, and with 3, heads that do not divide
    1: {"length": 32, "heads": 4},
    2: {"length": 32, "heads": 1},
    3: {"length": 36, "heads": 4},
    4: {"length": 32, "heads": 2},
}


def run_case(name, *args):
    return globals()[name](*args)


# ---- equal to one process -------------------------------------------------------------------------------------------


def train(optimizer, clip):
    """Losses and parameters of the script's main_worker."""
    args = transformer.arguments(clip=clip, **SMALL, **SHAPES[dist.get_world_size()])
    result = transformer.run_main_worker(min_CP_ring, args, optimizer)
    return result.losses, transformer.full_parameters(result.model)


# ---- attention by itself --------------------------------------------------------------------------------------------


def attention_errors(dtype, scale=1.0):
    """The largest errors of the result and of the gradients of q, k and v, beside attention on one process in float64.

    Two lists: the ring's errors, and the errors of plain attention in `dtype`. `scale` multiplies q.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, 24 * dist.get_world_size(), 16)
    q, k, v, grad = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
    q, k, v, grad = [tensor.to(dtype) for tensor in (scale * q, k, v, grad)]

    def plain(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    mine = min_CP_ring.local_positions(shape[2], "cpu")
    exact = with_gradients(plain, q.double(), k.double(), v.double(), grad.double())
    plainly = with_gradients(plain, q, k, v, grad)
    ring = with_gradients(ring_attention, *(tensor[:, :, mine] for tensor in (q, k, v, grad)))
    assert all(tensor.dtype == dtype for tensor in ring)
    ring_errors = [(ours - one[:, :, mine]).abs().max().item() for ours, one in zip(ring, exact, strict=True)]
    plain_errors = [(ours - one).abs().max().item() for ours, one in zip(plainly, exact, strict=True)]
    return ring_errors, plain_errors


def ring_attention(q, k, v):
    return min_CP_ring.RingAttention.apply(q, k, v, None)


def with_gradients(attend, q, k, v, grad):
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    result = attend(*leaves)
    result.backward(grad)
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def probe_attention():
    if dist.get_world_size() == 1:
        return None
    return {
        "exact": attention_errors(torch.float64),
        "large logits": attention_errors(torch.float64, scale=1000.0),
        "large logits, float32": attention_errors(torch.float32, scale=1000.0),
    }


def check_attention(probes):
    assert max(probes["exact"][0]) <= 1e-12
    assert max(probes["large logits"][0]) <= 1e-9
    for ours, others in zip(*probes["large logits, float32"], strict=True):
        assert ours <= 1.5 * others, probes


# ---- costs ----------------------------------------------------------------------------------------------------------


def saved_bytes(length):
    """What a loss on one sequence saves in this process for its backward, parameters aside."""
    args = transformer.arguments(layers=2, width=64, length=length)
    model = min_CP_ring.parallelize(transformer.make_model(args).float())
    return transformer.saved_bytes(min_CP_ring, model, args)


class Recorder:
    """In the place of min_CP_ring's functions: what they do, in order, the pairs attended to, and the bytes sent."""

    def __init__(self):
        self.events = []
        self.pairs = {"forward": 0, "backward": 0}
        self.sent = 0

    def count(self, direction, q, k, causal):
        n_queries, n_keys = q.shape[2], k.shape[2]
        assert not causal or n_queries == n_keys
        self.pairs[direction] += n_queries * (n_queries + 1) // 2 if causal else n_queries * n_keys
        self.events.append(direction)

    def attend_to_block(self, q, k, v, causal):
        self.count("forward", q, k, causal)
        return attend_to_block(q, k, v, causal)

    def gradients_of_block(self, grad, q, k, v, out, lse, causal):
        self.count("backward", q, k, causal)
        return gradients_of_block(grad, q, k, v, out, lse, causal)

    def start_hop(self, tensor, group):
        self.events.append("start")
        self.sent += tensor.nbytes
        assert group not in (None, torch.distributed.group.WORLD), "DDP's gradients would be in the way"
        return start_hop(tensor, group)

    def finish_hop(self, hop):
        self.events.append("finish")
        return finish_hop(hop)


REPLACED = ("attend_to_block", "gradients_of_block", "start_hop", "finish_hop")
attend_to_block, gradients_of_block, start_hop, finish_hop = (getattr(min_CP_ring, name) for name in REPLACED)


def record_step(args):
    recorder = Recorder()
    with mock.patch.multiple(min_CP_ring, **{name: getattr(recorder, name) for name in REPLACED}):
        model = min_CP_ring.parallelize(transformer.make_model(args))
        x, y = gpt.batch(transformer.small_text()[0], 0, args.global_batch_size, args.length)
        min_CP_ring.local_loss(model, x, y).backward()
    return recorder


def probe_costs():
    n = dist.get_world_size()
    saved = saved_bytes(1024 * n)
    if n == 1:
        return {"saved": saved}
    recorder = record_step(transformer.arguments(layers=1, **SHAPES[n]))
    return {"saved": saved, "pairs": recorder.pairs, "events": recorder.events, "sent": recorder.sent}


def check_costs(ranks, plain_saved_bytes):
    n = len(ranks)
    args = transformer.arguments(layers=1, **SHAPES[n])
    for costs in ranks:
        assert costs["saved"] <= 1.02 * plain_saved_bytes, "as much as one process saves of 1/N of the sequence"
        share_bytes = 2 * 8 * args.global_batch_size * args.length * args.width / n  # keys and values in float64
        assert costs["sent"] == (3 * n - 2) * share_bytes
        assert costs["events"] == expected_events(n)
    for direction in ("forward", "backward"):
        pairs = [costs["pairs"][direction] for costs in ranks]
        assert max(pairs) <= 1.05 * min(pairs)
        assert sum(pairs) == args.length * (args.length + 1) // 2, "all pairs under the causal mask, and no others"


def expected_events(n):
    """Every hop starts before the computation that hides it, and is awaited behind it."""
    events = ["start", "forward", "finish"] * (n - 1) + ["forward"]
    events += ["start", "backward", "start", "finish"]  # keys and values; then also their gradients
    events += ["start", "backward", "finish", "start", "finish"] * (n - 2)
    return [*events, "backward", "finish", "start", "finish"]


# ---- tests ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_saved_bytes():
    return saved_bytes(1024)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "nprocs", [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_equal_to_one_process_in_results_and_work(nprocs, tmp_path, plain_saved_bytes):
    ranks = transformer.train_on(nprocs, run_case, CASES, tmp_path)
    for (_, optimizer, clip), (losses, parameters) in zip(CASES[:2], ranks[-1], strict=False):
        expected = transformer.reference(optimizer, clip=clip, **SMALL, **SHAPES[nprocs])
        transformer.assert_equal(losses, parameters, expected)
    if nprocs > 1:
        for results in ranks:
            check_attention(results[2])
        check_costs([results[3] for results in ranks], plain_saved_bytes)


def by_formula(q, k, causal):
    """The scores of a block, as attention is defined."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores


def block_by_formula(grad, q, k, v, out, all_lse, causal):
    """`out` and lse of a block, and the gradients of q, k and v where `out` and `all_lse` are of more keys."""
    scores = by_formula(q, k, causal)
    weights = (scores - all_lse[..., None]).exp()
    grad_weights = grad @ v.transpose(-1, -2)
    grad_scores = weights * (grad_weights - (grad * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return scores.softmax(-1) @ v, grad_scores @ k, grad_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad


def check_block(q, k, v, grad, causal, tolerance):
    """The kernels of q's device on slices, as the ring gives them. The backward gets the lse of more keys."""
    q, grad = q[:, :, 10:], grad[:, :, 10:]
    k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
    if not causal:
        k, v = k[:, :, ::2], v[:, :, ::2]
    out, lse = min_CP_ring.attend_to_block(q, k, v, causal)
    assert (lse - by_formula(q, k, causal).logsumexp(-1)).abs().max() <= tolerance
    all_lse = torch.logaddexp(lse, torch.zeros_like(lse))
    results = [out, *min_CP_ring.gradients_of_block(grad, q, k, v, out, all_lse, causal)]
    for ours, exact in zip(results, block_by_formula(grad, q, k, v, out, all_lse, causal), strict=True):
        assert (ours - exact).abs().max() <= tolerance


@pytest.mark.parametrize("causal", [False, True])
def test_kernel_of_the_cpu_is_the_formula(causal):
    check_block(*torch.randn(4, 2, 3, 20, 16, dtype=torch.float64), causal, tolerance=1e-13)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")
@pytest.mark.parametrize("causal", [False, True])
def test_kernel_of_gpus_is_the_formula(causal):
    check_block(*torch.randn(4, 2, 3, 100, 16, device="cuda"), causal, tolerance=1e-4)


def test_kernel_of_gpus_gets_arguments_that_it_takes():
    """Shapes and types alone: on the device "meta" nothing is computed."""
    q, k, v, grad = torch.empty(4, 2, 3, 20, 16, device="meta")
    for n_keys, causal in ((20, True), (10, False)):
        args = (q, k[:, :, :n_keys], v[:, :, :n_keys])
        out, lse = min_CP_ring.attend_to_block(*args, causal=causal)
        assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
        grads = min_CP_ring.gradients_of_block(grad, *args, out, lse, causal=causal)
        assert [tensor.shape for tensor in grads] == [tensor.shape for tensor in args]


def test_length_must_be_two_equal_pieces_per_process(main_of):
    for length in (128, 3):
        message = f"argument --length: {length} is not a multiple of 6, twice the number of processes"
        assert main_of("min_CP_ring.py", "--nproc", "3", "--length", f"{length}") == (
            2,
            f"min_CP_ring.py: error: {message}\n",
        )


@pytest.mark.parametrize("nproc", [*range(1, 9), 16])
def test_defaults_suit_any_number_of_processes(nproc, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["min_CP_ring.py", "--nproc", str(nproc)])
    monkeypatch.setattr(dist, "launch", launch := mock.Mock())
    runpy.run_path(str(ROOT / "min_CP_ring.py"), run_name="__main__")
    args = launch.call_args.args[1]
    assert launch.call_args.kwargs == {"nprocs": nproc}
    assert args.length % (2 * nproc) == 0 and 128 <= args.length < 128 + 2 * nproc
    assert (args.heads, args.global_batch_size) == (4, 16)


@pytest.mark.slow
def test_more_processes_than_heads_print_how_they_learn():
    status, stdout, stderr = run("min_CP_ring.py", "--nproc", 3, "--heads", 1, "--steps", 3, "--log-every", 2)
    assert (status, stderr) == (0, "")
    assert stdout.startswith("parameters held: 479,232 of 479,232 (1.000)\n")
    assert [line["step"] for line in transformer.progress_lines(stdout)] == [2, 3]
