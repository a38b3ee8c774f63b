"""min_EP_FSDP.py: experts split over one dimension and sharded over the other equal one process without either."""

import functools
import re
import sys
from unittest import mock

import pytest
import test_min_EP
import torch
import transformer
from conftest import guards, slow
from test_min_EP import IDLE, DenseExperts, leave_idle
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import distributed as dist
import gpt
import min_EP
import min_EP_FSDP

CASES = [  # optimizer, changes and tolerance. Experts in IDLE get no token: with 4 ranks along ep, the last rank none
    ("SGD", {"idle": IDLE, "clip": 0.3}, 1e-12),
    ("AdamW", {"idle": IDLE, "clip": 0.3}, 1e-9),
    ("SGD", {"top": 3}, 1e-12),
]
BATCH = {"global_batch_size": 12}


def arguments(changes, expert_parallel=1):
    args = test_min_EP.arguments({**BATCH, **changes})
    args.expert_parallel = expert_parallel
    return args


@functools.cache
def expected(number):
    """Every step's loss, and the parameters by name, of one process in which all experts see all tokens."""
    optimizer, changes, _ = CASES[number]
    args = arguments(changes)
    with transformer.float64():
        model = transformer.make_model(args)
        for block in model.blocks:
            block.mlp = DenseExperts(args.width, args.experts, args.top)
    leave_idle(model, args.idle)
    losses, shares = [], []

    def loss_of(model, x, y):
        loss = transformer.plain_loss(model, x, y)
        losses.append(loss.detach())
        shares.extend(block.mlp.share for block in model.blocks)
        return loss + args.balance * sum(block.mlp.balance for block in model.blocks)

    _, parameters = transformer.train_alone(model, optimizer, args, loss_of)
    assert all(share[list(args.idle)].sum() == 0 and share.max() > 1.2 * share.mean() for share in shares), "uneven"
    return torch.stack(losses), parameters


# ---- the script's own training --------------------------------------------------------------------------------------


def train(optimizer, changes, expert_parallel):
    """Losses, whole parameters by name, the tokens of each block's experts, the number of elements held, and stdout."""
    args = arguments(changes, expert_parallel)
    add_experts = min_EP.add_experts
    held = []

    def add_and_leave_idle(model, *more):
        add_experts(model, *more)
        leave_idle(model, args.idle)

    def count(model):
        held.append(sum(transformer.local(param).numel() for param in model.parameters()))
        sharded = [isinstance(param, DTensor) for param in model.parameters()]
        assert all(sharded) or dist.get_world_size() == 1

    with mock.patch.object(min_EP_FSDP, "add_experts", add_and_leave_idle):
        run = transformer.run_main_worker(min_EP_FSDP, args, optimizer, count)
    tokens = [block.mlp.tokens_per_expert for block in run.model.blocks]
    return run.losses, transformer.full_parameters(run.model), tokens, held[0], run.stdout


MESHES = {1: [1], 2: [1, 2], 3: [1], 4: [1, 2, 4]}  # by number of ranks: ep. Along dp are as many as are left


@pytest.mark.parametrize("nprocs", [1, *guards(2), *slow(3, 4)])
def test_processes_do_what_one_does_and_hold_their_share(nprocs, tmp_path):
    n_cases = {1: 1, 2: 2}.get(nprocs, len(CASES))  # the quick tests have fewer
    cases = [(number, ep) for ep in MESHES[nprocs] for number in range(n_cases)]
    jobs = [(CASES[number][0], CASES[number][1], ep) for number, ep in cases]
    ranks = transformer.train_on(nprocs, train, jobs, tmp_path)
    for case, (number, ep) in enumerate(cases):
        _, changes, tolerance = CASES[number]
        args, whole = arguments(changes), {}
        for rank, results in enumerate(ranks):
            _, parameters, tokens, _, _ = results[case]
            held = {int(key.split(".")[4]) for key in parameters if ".experts." in key}
            assert held == set(range(rank % ep * 8 // ep, (rank % ep + 1) * 8 // ep))
            for key in whole.keys() & parameters.keys():
                assert torch.equal(whole[key], parameters[key]), f"{key} differs from rank to rank"
            whole.update(parameters)
            for counts in tokens:
                assert sum(counts.tolist()) == args.top * args.global_batch_size * args.length
                assert all(counts[list(args.idle)] == 0)
        for results in ranks:
            transformer.assert_equal(results[case][0], whole, expected(number), tolerance)
        total = sum(param.numel() for param in whole.values())
        held = [results[case][3] for results in ranks]
        assert sum(held) == total, "each element is on one rank"
        assert max(held) <= 1.03 * total / nprocs
        line = f"parameters held: {max(held):,} of {total:,} ({max(held) / total:.3f})\n"
        assert ranks[0][case][4].startswith(line)


# ---- frozen parameters ----------------------------------------------------------------------------------------------

FROZEN = [
    (".experts.",),
    (".router.",),
    (".experts.0.", ".experts.1.", "token"),
    ("token", "norm", "attention", "head"),
]


def freeze(model, names):
    for name, param in model.named_parameters():
        param.requires_grad_(not any(part in name for part in names))


def clipped_gradients(module, frozen):
    """Of one step on this rank's share, by name, by the functions of min_EP or min_EP_FSDP."""
    args = arguments({"experts": 4}, dist.get_world_size())
    model = transformer.make_model(args)
    (min_EP_FSDP.parallelize if module == "min_EP_FSDP" else min_EP.add_experts)(model, args)
    freeze(model, frozen)
    share = (dist.get_rank(), dist.get_world_size())
    x, y = gpt.batch(transformer.small_text()[0], 0, args.global_batch_size, args.length, share=share)
    if module == "min_EP":
        min_EP.backward(model, gpt.loss_fn(model(x), y))
        min_EP.clip_gradients(model, 0.1)
    else:
        min_EP_FSDP.backward(model, gpt.loss_fn(model(x), y), args.expert_parallel)
        min_EP_FSDP.clip_gradients(model, 0.1)
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


def test_frozen_experts_and_a_frozen_router_are_left_out(tmp_path):
    cases = [(module, frozen) for module in ("min_EP", "min_EP_FSDP") for frozen in FROZEN]
    ranks = transformer.train_on(2, clipped_gradients, cases, tmp_path)
    for number, (_, frozen) in enumerate(cases):
        args = arguments({"experts": 4})
        with transformer.float64():
            model = transformer.make_model(args)
            for block in model.blocks:
                block.mlp = DenseExperts(args.width, args.experts, args.top)
            freeze(model, frozen)
            x, y = gpt.batch(transformer.small_text()[0], 0, args.global_batch_size, args.length)
            transformer.plain_loss(model, x, y).backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        expected = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        assert expected.keys() == ranks[0][number].keys() | ranks[1][number].keys()
        for results in ranks:
            for name, grad in results[number].items():
                torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-12)


# ---- bytes sent -----------------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Counts the bytes that a rank sends in rings, from the sizes of what goes in and comes out."""

    def __init__(self):
        super().__init__()
        self.sent = {"parameters": 0, "tokens": 0, "counts": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its own operations on the shards come here next
        name = func.name()
        if "_allgather_base_" in name or "_reduce_scatter_base_" in name:
            sizes = [args[0].nbytes, args[1].nbytes]
            self.sent["parameters"] += max(sizes) - min(sizes)
        elif "alltoall_base_" in name:
            _, rows, group, _, n_sent, *_ = args
            others = sum(n_sent) - n_sent[torch.distributed.ProcessGroup.unbox(group).rank()]
            self.sent["tokens"] += others * rows[:1].nbytes
        elif "allreduce_" in name:
            self.sent["counts"] += sum(tensor.nbytes for tensor in args[0])
        elif name.startswith("c10d::"):
            raise AssertionError(f"{name} was not expected")
        return func(*args, **(kwargs or {}))


EVEN = {"experts": 4, "top": 4, "steps": 1}  # each token visits all experts, so all are used evenly


def watch_step(ep):
    torch.set_default_dtype(torch.float32)
    args = arguments(EVEN, ep)
    model = transformer.make_model(args)
    min_EP_FSDP.parallelize(model, args)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    data = transformer.small_data(args)
    with mock.patch("gpt.Progress"), Watch() as watch:
        min_EP_FSDP.train(model, optimizer, data, args)
    torch.set_default_dtype(torch.float64)
    return watch.sent


def formula(n, ep):
    """Bytes of parameters and of tokens, by the docstring."""
    args = arguments(EVEN)
    model = transformer.make_model(args)
    min_EP.add_experts(model, args)
    shared, experts = min_EP.split_params(model)
    n_shared = sum(param.numel() for param in shared)
    n_experts = sum(param.numel() for param in experts)
    n_blocks = sum(param.numel() for name, param in model.blocks.named_parameters() if ".experts." not in name)
    dp = n // ep
    parameters = (n - 1) / n * 4 * (3 * n_shared - (n_shared - n_blocks)) + 3 * (dp - 1) / dp * 4 * n_experts / ep
    tokens = (ep - 1) / ep * 16 * args.layers * args.top * args.width * args.global_batch_size * args.length / n
    return parameters, tokens


@pytest.mark.parametrize("nprocs", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_sends_what_the_docstring_says(nprocs, tmp_path):
    ranks = transformer.train_on(nprocs, watch_step, [(ep,) for ep in MESHES[nprocs]], tmp_path)
    for number, ep in enumerate(MESHES[nprocs]):
        parameters, tokens = formula(nprocs, ep)
        for results in ranks:
            sent = results[number]
            assert (sent["parameters"], sent["tokens"]) == pytest.approx((parameters, tokens))
            assert sent["counts"] < 1000


# ---- the command ----------------------------------------------------------------------------------------------------


def parse(monkeypatch, *typed):
    monkeypatch.setattr(sys, "argv", ["min_EP_FSDP.py", *map(str, typed)])
    return min_EP_FSDP.parse_args()


@pytest.mark.parametrize("nprocs", [*range(1, 9), 16])
def test_defaults_fit_any_number_of_processes(nprocs, monkeypatch):
    args = parse(monkeypatch, "--nproc", nprocs)
    assert args.expert_parallel == (1 if nprocs % 2 else 2)
    assert args.experts % args.expert_parallel == args.global_batch_size % nprocs == 0 and args.experts >= 8


def test_a_mesh_that_does_not_fit_is_one_line(main_of):
    refused = {
        ("--nproc", "4", "--expert-parallel", "3"): ("--expert-parallel", "3", "4, the number of processes"),
        ("--nproc", "4", "--expert-parallel", "4", "--experts", "6"): ("--experts", "6", "multiple of 4"),
        ("--nproc", "2", "--top", "9"): ("--top", "9", "8 experts"),
    }
    for typed, parts in refused.items():
        status, line = main_of("min_EP_FSDP.py", *typed)
        assert status == 2 and line.count("\n") == 1 and all(part in line for part in parts)


@pytest.mark.slow
def test_prints_what_it_holds_and_the_tokens_of_each_expert(job_of):
    small = ("--layers", 2, "--width", 16, "--heads", 2, "--length", 16, "--global-batch-size", 4, "--experts", 4)
    stdout = job_of("min_EP_FSDP.py", *small, "--nproc", 4, "--steps", 3, "--log-every", 2, "--clip", 1)
    first, *lines = stdout.splitlines()
    assert re.fullmatch(r"parameters held: [\d,]+ of [\d,]+ \(0\.250\)", first)
    tokens = "    tokens per expert:"
    assert [re.split(r"[/ ][|\[\d]", line)[0] for line in lines][1::2] == 2 * [tokens]
    assert [line["step"] for line in transformer.progress_lines(stdout)] == [2, 3]
