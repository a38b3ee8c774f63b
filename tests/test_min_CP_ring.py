"""min_CP_ring.py and min_CP_packed.py: each document alone, nothing of other shares saved, hops left out.

test_equal.py has what all scripts that train the GPT promise.
"""

import functools
import math
import random
import runpy
import sys
from unittest import mock

import pytest
import references
import torch
import transformer
from conftest import ROOT, guards, run, slow
from torch.nn import functional as F

import distributed as dist
import gpt
import min_CP_packed
import min_CP_ring
import min_Packing

CASES = [("probe_attention",), ("probe_costs",), ("mistakes",)]


def run_case(name, *args):
    dist.init_process_group(even_alone=True)  # as main_worker does
    return globals()[name](*args)


# ---- attention by itself --------------------------------------------------------------------------------------------


def owners_of(rows):
    """(rows, length): the document of each position. A row is given by the lengths of its documents."""
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])


def every_border(length):
    """Rows of up to three documents: one from `start` to `end`, for all starts and ends, and what is beside it."""
    rows = []
    for start in range(length):
        for end in range(start + 1, length + 1):
            rows.append([part for part in (start, end - start, length - end) if part])
    return owners_of(rows)


def packed_rows(length):
    """The rows of min_Packing.py, with padding: documents of 1 to `length` positions."""
    draw = random.Random(0)
    documents = [(b"p", bytes(draw.randint(1, length))) for _ in range(20)]
    rows = min_Packing.fill_rows(min_Packing.pack(documents, length), length)
    owners = rows[:, min_Packing.DOCUMENT_IDS]
    assert (owners == min_CP_packed.PADDING).any()
    return owners


def attention_alone(q, k, v, owners):
    """Each document by itself. Padding has a result of 0."""
    result = torch.zeros_like(q)
    for row in range(len(owners)):
        for number in owners[row].unique().tolist():
            mine = owners[row] == number
            if number != min_CP_packed.PADDING:
                alone = F.scaled_dot_product_attention(
                    q[row, :, mine], k[row, :, mine], v[row, :, mine], is_causal=True
                )
                result[row, :, mine] = alone
    return result


def attention_errors(owners, dtype=torch.float64, scale=1.0):
    """The largest errors of the result and of the gradients of q, k and v, beside attention on one process in float64.

    Two lists: the ring's errors, and the errors of plain attention in `dtype`. `scale` multiplies q.
    """
    generator = torch.Generator().manual_seed(0)
    rows, length = owners.shape
    q, k, v, grad = [torch.randn(rows, 2, length, 8, generator=generator, dtype=torch.float64) for _ in range(4)]
    q, k, v, grad = [tensor.to(dtype) for tensor in (scale * q, k, v, grad)]
    mine = min_CP_ring.local_positions(length)
    plan = min_CP_packed.make_plan(owners)
    alone = functools.partial(attention_alone, owners=owners)

    def ring(q, k, v):
        return min_CP_ring.RingAttention.apply(q, k, v, plan, None)

    exact = with_gradients(alone, q.double(), k.double(), v.double(), grad.double())
    plainly = with_gradients(alone, q, k, v, grad)
    results = with_gradients(ring, *(tensor[:, :, mine] for tensor in (q, k, v, grad)))
    assert all(tensor.dtype == dtype for tensor in results)
    ring_errors = [(ours - one[:, :, mine]).abs().max().item() for ours, one in zip(results, exact, strict=True)]
    plain_errors = [(ours - one).abs().max().item() for ours, one in zip(plainly, exact, strict=True)]
    return ring_errors, plain_errors


def with_gradients(attend, q, k, v, grad):
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    result = attend(*leaves)
    result.backward(grad)
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def refused(function, *args):
    with pytest.raises(dist.DistributedError) as caught:
        function(*args)
    return str(caught.value)


def mistakes():
    """The lines that answer a length that 2·N does not divide, and 16-bit numbers."""
    length = 2 * dist.get_world_size() + 1
    q = torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16)
    return [
        refused(min_CP_ring.local_positions, length),
        refused(min_CP_packed.make_plan, owners_of([[length]])),
        refused(min_CP_ring.RingAttention.apply, q, q, q, [], None),
    ]


def probe_attention():
    n = dist.get_world_size()
    whole = owners_of(2 * [[24 * n]])
    return {
        "every border": attention_errors(every_border(6 * n)),
        "documents of one position": attention_errors(owners_of([4 * n * [1], [1, 4 * n - 1], [4 * n - 1, 1]])),
        "rows of min_Packing.py": attention_errors(packed_rows(8 * n)),
        "rows that are alike": attention_errors(owners_of(2 * [[3, 6 * n - 3]] + 3 * [[6 * n]])),
        "one document": attention_errors(whole),
        "large logits": attention_errors(whole, scale=1000.0),
        "large logits, float32": attention_errors(whole, torch.float32, scale=1000.0),
    }


def check_attention(probes):
    large = probes.pop("large logits"), probes.pop("large logits, float32")
    for name, (errors, _) in probes.items():
        assert max(errors) <= 1e-12, name
    assert max(large[0][0]) <= 1e-9
    for ours, others in zip(*large[1], strict=True):
        assert ours <= (1.5 if torch.__version__ >= "2.12" else 10) * others, large


# ---- costs ----------------------------------------------------------------------------------------------------------


def saved_bytes(length):
    """What a loss on one sequence saves in this process for its backward, parameters aside."""
    args = transformer.arguments(layers=2, width=64, length=length)
    model = min_CP_ring.parallelize(transformer.make_model(args).float(), length)
    return transformer.saved_bytes(min_CP_ring.local_loss, model, args)


class Recorder:
    """In the place of min_CP_ring's functions: what they do, in order, the pairs attended to, and what is sent."""

    def __init__(self):
        self.events = []
        self.pairs = {"forward": 0, "backward": 0}
        self.hops = 0
        self.sent = 0

    def count(self, direction, q, k, causal):
        rows, _, n_queries, _ = q.shape
        n_keys = k.shape[2]
        assert not causal or n_queries == n_keys
        self.pairs[direction] += rows * (n_queries * (n_queries + 1) // 2 if causal else n_queries * n_keys)
        self.events.append(direction)

    def attend_to_block(self, q, k, v, causal):
        self.count("forward", q, k, causal)
        return attend_to_block(q, k, v, causal)

    def gradients_of_block(self, grad, q, k, v, out, lse, causal):
        self.count("backward", q, k, causal)
        return gradients_of_block(grad, q, k, v, out, lse, causal)

    def start_hop(self, tensor, distance, sends, receives, group):
        if distance:
            self.events.append("start")
            self.hops += sends
            self.sent += sends * tensor.nbytes
        assert group not in (None, torch.distributed.group.WORLD), "DDP's gradients would be in the way"
        return start_hop(tensor, distance, sends, receives, group)

    def finish_hop(self, hop):
        if hop[1]:
            self.events.append("finish")
        return finish_hop(hop)


REPLACED = ("attend_to_block", "gradients_of_block", "start_hop", "finish_hop")
attend_to_block, gradients_of_block, start_hop, finish_hop = (getattr(min_CP_ring, name) for name in REPLACED)


def record_step(owners, alone=False):
    """One layer, with documents as `owners` has them, or with one document in each row by min_CP_ring.py alone."""
    rows, length = owners.shape
    args = transformer.arguments(layers=1, length=length, heads=1)
    recorder = Recorder()
    replaced = {name: getattr(recorder, name) for name in REPLACED}

    def number(x):
        return owners

    x, y = gpt.batch(transformer.small_text()[0], 0, rows, length)
    config = gpt.Config.from_args(args)
    with mock.patch.multiple(min_CP_ring, **replaced), mock.patch.object(min_CP_packed, "number_documents", number):
        if alone:
            min_CP_ring.local_loss(min_CP_ring.parallelize(gpt.GPT(config), length), x, y).backward()
        else:
            packed = min_CP_packed.parallelize(min_CP_packed.PackedRingGPT(config))
            min_CP_packed.local_loss(packed, x, y).backward()
    return {name: getattr(recorder, name) for name in ("events", "pairs", "hops", "sent")}


def rows_to_count(n):
    """By name, two rows of documents, in units of which a piece has four."""
    length = 8 * n
    return {
        "one document": owners_of(2 * [[length]]),
        "a piece each": owners_of(2 * [2 * n * [4]]),
        "over each border": owners_of(2 * [[2, *((2 * n - 1) * [4]), 2]]),
        "the first border": owners_of([[3, 4, length - 8, 1], 2 * n * [4]]) if n > 1 else owners_of(2 * [[8]]),
    }


def probe_costs():
    n = dist.get_world_size()
    recorded = {name: record_step(owners) for name, owners in rows_to_count(n).items()}
    assert record_step(rows_to_count(n)["one document"], alone=True) == recorded["one document"]
    return {"saved": saved_bytes(1024 * n), **recorded}


def check_costs(ranks, plain_saved_bytes):
    n = len(ranks)
    share_bytes = 2 * 8 * 2 * 8 * 32  # keys and values in float64, of 2 rows of 8 positions of width 32
    for costs in ranks:
        assert costs["saved"] <= 1.02 * plain_saved_bytes, "as much as one process saves of 1/N of the sequence"
        assert costs["one document"]["sent"] == 3 * (n - 1) * share_bytes
        assert costs["one document"]["events"] == expected_events(n)
    for name, owners in rows_to_count(n).items():
        hops = sum(costs[name]["hops"] for costs in ranks)
        assert hops == 3 * hops_needed(owners, n), name  # keys in forward and in backward, and their gradients
        assert sum(costs[name]["sent"] for costs in ranks) == hops * share_bytes
        lengths = torch.cat([row.unique(return_counts=True)[1] for row in owners])
        for direction in ("forward", "backward"):
            pairs = [costs[name]["pairs"][direction] for costs in ranks]
            assert sum(pairs) == (lengths * (lengths + 1) // 2).sum(), "all pairs in documents, and no others"
            assert name != "one document" or max(pairs) <= 1.2 * min(pairs)
    all_hops = [sum(costs[name]["hops"] for costs in ranks) for name in rows_to_count(n)]
    expected = [3 * n * (n - 1), 0, 3 * (2 * n - 2), 3 * 3]  # two neighbours; of "the first border" see below
    assert all_hops[:3] == expected[:3]


def hops_needed(owners, n):
    """How many pairs of two ranks have a query of one that sees a key of the other."""
    length = owners.shape[1]
    same = owners[:, :, None] == owners[:, None, :]
    seen = same.tril().any(0)  # (query, key)
    pieces = torch.arange(length).div(length // (2 * n), rounding_mode="floor")
    ranks = torch.minimum(pieces, 2 * n - 1 - pieces)
    pairs = {(ranks[query].item(), ranks[key].item()) for query, key in seen.nonzero().tolist()}
    return sum(reader != owner for reader, owner in pairs)


def expected_events(n):
    """Every hop starts before the computation that hides it, and is awaited behind it."""
    if n == 1:
        return ["forward", "backward"]
    events = ["start", "forward", "finish"] * (n - 1) + ["forward"]
    events += ["start", "backward", "finish"]  # keys and values; then also gradients of the keys of other ranks
    for step in range(1, n):
        keys_travel = step < n - 1
        events += keys_travel * ["start"] + ["backward"]
        events += (step > 1) * ["finish"] + ["start"] + keys_travel * ["finish"]
    return [*events, "finish"]


# ---- tests ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_saved_bytes():
    args = transformer.arguments(layers=2, width=64, length=1024)
    return transformer.saved_bytes(transformer.plain_loss, transformer.make_model(args).float(), args)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("nprocs", [2, *guards(3), *slow(1, 4)])
def test_documents_are_attended_to_alone_and_no_more_is_sent_or_computed(nprocs, tmp_path, plain_saved_bytes):
    ranks = transformer.train_on(nprocs, run_case, CASES, tmp_path)
    for attention, _, (*lines, of_type) in ranks:
        check_attention(attention)
        assert lines == 2 * [f"{2 * nprocs + 1} is not a multiple of {2 * nprocs}, the number of equal shares"]
        assert of_type == "RingAttention takes float32 and float64, not torch.bfloat16: leave out autocast"
    check_costs([costs for _, costs, _ in ranks], plain_saved_bytes)


def test_a_blank_line_ends_a_document():
    row = torch.tensor(list(b"a\n\nbc\n\n\n\nd\n"))
    assert min_CP_packed.number_documents(row[None]).tolist() == [[0, 0, 0, 3, 3, 3, 3, 7, 8, 9, 9]]
    assert references.paragraphs(row) == [(0, 3), (3, 7), (7, 8), (8, 9), (9, 11)]


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
    status, stdout, stderr = run("min_CP_packed.py", "--nproc", 3, "--heads", 1, "--steps", 3, "--log-every", 2)
    assert (status, stderr) == (0, "")
    assert [line["step"] for line in transformer.progress_lines(stdout)] == [2, 3]
