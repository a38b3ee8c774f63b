"""min_Ring.py: equal to one process, equal work, nothing of other shares saved, and the bytes of its docstring sent."""

import contextlib
import runpy
import sys
from unittest import mock

import pytest
import torch
import transformer
from conftest import ROOT, run
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import distributed as dist
import gpt
import min_Ring

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
    result = transformer.run_main_worker(min_Ring, args, optimizer)
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

    mine = min_Ring.local_positions(shape[2], "cpu")
    exact = with_gradients(plain, q.double(), k.double(), v.double(), grad.double())
    plainly = with_gradients(plain, q, k, v, grad)
    ring = with_gradients(ring_attention, *(tensor[:, :, mine] for tensor in (q, k, v, grad)))
    assert all(tensor.dtype == dtype for tensor in ring)
    ring_errors = [(ours - one[:, :, mine]).abs().max().item() for ours, one in zip(ring, exact, strict=True)]
    plain_errors = [(ours - one).abs().max().item() for ours, one in zip(plainly, exact, strict=True)]
    return ring_errors, plain_errors


def ring_attention(q, k, v):
    return min_Ring.RingAttention.apply(q, k, v, None)


def with_gradients(attend, q, k, v, grad):
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    result = attend(*leaves)
    result.backward(grad)
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def probe_attention():
    if dist.get_world_size() == 1:
        return None
    with mock.patch.object(min_Ring, "choose_kernel", lambda q: min_Ring.Formula):
        by_formula = attention_errors(torch.float64)
    sent_types = []

    def noting_start_hop(tensor, group):
        sent_types.append(str(tensor.dtype))
        return start_hop(tensor, group)

    with mock.patch.object(min_Ring, "start_hop", noting_start_hop):
        in_bfloat16 = attention_errors(torch.bfloat16)
    return {
        "exact": attention_errors(torch.float64),
        "exact, by the formula": by_formula,
        "large logits": attention_errors(torch.float64, scale=1000.0),
        "large logits, float32": attention_errors(torch.float32, scale=1000.0),
        "bfloat16": in_bfloat16,
        "hops of bfloat16, in float32": (sent_types.count("torch.bfloat16"), sent_types.count("torch.float32")),
    }


def check_attention(probes, n):
    for name in ("exact", "exact, by the formula"):
        assert max(probes[name][0]) <= 1e-12, name
    assert max(probes["large logits"][0]) <= 1e-9
    for name in ("large logits, float32", "bfloat16"):
        ring, plain = probes[name]
        for ours, others in zip(ring, plain, strict=True):
            assert ours <= 1.5 * others, (name, ring, plain)
    assert probes["hops of bfloat16, in float32"] == (2 * (n - 1), n), "gradients are summed in float32"


# ---- costs ----------------------------------------------------------------------------------------------------------


def saved_bytes(length):
    """What a loss on one sequence saves in this process for its backward, parameters aside."""
    args = transformer.arguments(layers=2, width=64, length=length)
    model = min_Ring.parallelize(transformer.make_model(args).float())
    return transformer.saved_bytes(min_Ring, model, args)


class Recorder:
    """In the place of min_Ring's kernel and hops: what they do, in order, the pairs attended to, and the bytes sent."""

    def __init__(self):
        self.events = []
        self.pairs = {"forward": 0, "backward": 0}
        self.sent = 0

    def count(self, direction, q, k, causal):
        n_queries, n_keys = q.shape[2], k.shape[2]
        assert not causal or n_queries == n_keys
        self.pairs[direction] += n_queries * (n_queries + 1) // 2 if causal else n_queries * n_keys
        self.events.append(direction)

    def forward(self, q, k, v, causal):
        self.count("forward", q, k, causal)
        return min_Ring.FlashOnCPU.forward(q, k, v, causal)

    def backward(self, grad, q, k, v, out, lse, causal):
        self.count("backward", q, k, causal)
        return min_Ring.FlashOnCPU.backward(grad, q, k, v, out, lse, causal)

    def start_hop(self, tensor, group):
        self.events.append("start")
        self.sent += tensor.nbytes
        assert group not in (None, torch.distributed.group.WORLD), "DDP's gradients would be in the way"
        return start_hop(tensor, group)

    def finish_hop(self, hop):
        if hop[1]:
            self.events.append("finish")
        return finish_hop(hop)


start_hop, finish_hop = min_Ring.start_hop, min_Ring.finish_hop


def record_step(args):
    recorder = Recorder()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(min_Ring, "choose_kernel", lambda q: recorder))
        stack.enter_context(mock.patch.object(min_Ring, "start_hop", recorder.start_hop))
        stack.enter_context(mock.patch.object(min_Ring, "finish_hop", recorder.finish_hop))
        model = min_Ring.parallelize(transformer.make_model(args))
        x, y = gpt.batch(transformer.small_text()[0], 0, args.global_batch_size, args.length)
        min_Ring.local_loss(model, args, x, y).backward()
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
            check_attention(results[2], nprocs)
        check_costs([results[3] for results in ranks], plain_saved_bytes)


@pytest.mark.parametrize("causal", [False, True])
def test_kernel_of_the_cpu_is_the_formula(causal):
    """Also on slices, as the ring gives them."""
    q, k, v, grad = torch.randn(4, 2, 3, 20, 16, dtype=torch.float64)[:, :, :, 10:]
    k, v = k[:, :, : 10 if causal else 5], v[:, :, : 10 if causal else 5]
    results = {}
    for kernel in (min_Ring.Formula, min_Ring.FlashOnCPU):
        out, lse = kernel.forward(q, k, v, causal)
        # The backward gets the sums over more keys than the block has.
        all_lse = torch.logaddexp(lse, torch.zeros_like(lse))
        results[kernel] = [out, lse, *kernel.backward(grad, q, k, v, 0.5 * out, all_lse, causal)]
    for ours, others in zip(*results.values(), strict=True):
        assert (ours - others).abs().max() <= 1e-13


def test_kernel_of_gpus_gets_arguments_that_it_takes():
    """Shapes and types alone: on the device "meta" nothing is computed."""
    for kernel, dtype in ((min_Ring.EfficientOnGPU, torch.float32), (min_Ring.FlashOnGPU, torch.bfloat16)):
        q, k, v, grad = torch.empty(4, 2, 3, 20, 16, device="meta", dtype=dtype)
        for n_keys, causal in ((20, True), (10, False)):
            args = (q, k[:, :, :n_keys], v[:, :, :n_keys])
            out, lse = kernel.forward(*args, causal=causal)
            assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
            grads = kernel.backward(grad, *args, out, lse, causal=causal)
            assert [tensor.shape for tensor in grads] == [tensor.shape for tensor in args]


@pytest.mark.parametrize(
    "dtype, width, kernel",
    [
        (torch.float64, 32, min_Ring.Formula),
        (torch.float32, 32, min_Ring.EfficientOnGPU),
        (torch.bfloat16, 32, min_Ring.FlashOnGPU),
        (torch.float16, 8, min_Ring.FlashOnGPU),
        (torch.bfloat16, 12, min_Ring.EfficientOnGPU),  # flash takes multiples of 8
    ],
)
def test_kernels_of_gpus(dtype, width, kernel):
    with FakeTensorMode():
        assert min_Ring.choose_kernel(torch.empty(1, 1, 2, width, dtype=dtype, device="cuda")) is kernel


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_kernel_of_gpus_is_the_formula(causal, dtype):
    q, k, v, grad = torch.randn(4, 2, 3, 100, 16, device="cuda", dtype=dtype)
    args = (q[:, :, 50:], k[:, :, 50:], v[:, :, 50:], causal)
    out, lse = min_Ring.attention_to_nothing(args[0])
    kernel = min_Ring.choose_kernel(q)
    assert kernel is {torch.float32: min_Ring.EfficientOnGPU, torch.bfloat16: min_Ring.FlashOnGPU}[dtype]
    min_Ring.merge(out, lse, *kernel.forward(*args))
    exact_out, exact_lse = min_Ring.Formula.forward(*(tensor.double() for tensor in args[:3]), causal)
    grads = kernel.backward(grad[:, :, 50:], *args[:3], out.to(dtype), lse, causal)
    doubles = [tensor.double() for tensor in (grad[:, :, 50:], *args[:3], out, lse)]
    exact_grads = min_Ring.Formula.backward(*doubles, causal)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for ours, exact in zip([out, lse, *grads], [exact_out, exact_lse, *exact_grads], strict=True):
        assert (ours - exact).abs().max() <= tolerance


def test_length_must_be_two_equal_pieces_per_process(main_of):
    for length in (128, 3):
        message = f"argument --length: {length} is not a multiple of 6, twice the number of processes"
        assert main_of("min_Ring.py", "--nproc", "3", "--length", f"{length}") == (
            2,
            f"min_Ring.py: error: {message}\n",
        )


@pytest.mark.parametrize("nproc", [*range(1, 9), 16])
def test_defaults_suit_any_number_of_processes(nproc, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["min_Ring.py", "--nproc", str(nproc)])
    monkeypatch.setattr(dist, "launch", launch := mock.Mock())
    runpy.run_path(str(ROOT / "min_Ring.py"), run_name="__main__")
    args = launch.call_args.args[1]
    assert launch.call_args.kwargs == {"nprocs": nproc}
    assert args.length % (2 * nproc) == 0 and 128 <= args.length < 128 + 2 * nproc
    assert (args.heads, args.global_batch_size) == (4, 16)


@pytest.mark.slow
def test_more_processes_than_heads_print_how_they_learn():
    status, stdout, stderr = run("min_Ring.py", "--nproc", 3, "--heads", 1, "--steps", 3, "--log_every", 2)
    assert (status, stderr) == (0, "")
    assert stdout.startswith("parameters held: 479,232 of 479,232 (1.000)\n")
    assert [line["step"] for line in transformer.progress_lines(stdout)] == [2, 3]
