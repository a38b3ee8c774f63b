"""min_EP_FSDP.py and min_EP.py: frozen experts, and what is sent.

test_equal.py has what all scripts that train the GPT promise.
"""

import sys
from unittest import mock

import pytest
import references
import torch
import transformer
from conftest import Watch
from torch.distributed.tensor import DTensor

import distributed as dist
import gpt
import min_EP
import min_EP_FSDP


def arguments(expert_parallel=1, **changes):
    options = {"layers": 2, "experts": 4, "top": 2, "balance": "loss", "balance_weight": 0.1, "idle": ()}
    options["expert_parallel"] = expert_parallel
    return transformer.arguments(global_batch_size=12, **{**options, **changes})


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


def make_model(parallelize, args):
    model = gpt.make_meta_model(gpt.Config.from_args(args))
    parallelize(model, args)
    model.to_empty(device="cpu")
    gpt.fill([*model.named_parameters(), *model.named_buffers()], args.seed)
    return model


def clipped_gradients(module, frozen):
    """Of one step on this rank's share, by name, by the functions of min_EP or min_EP_FSDP."""
    args = arguments(dist.get_world_size())
    model = make_model(min_EP_FSDP.parallelize if module == "min_EP_FSDP" else min_EP.add_experts, args)
    freeze(model, frozen)
    share = (dist.get_rank(), dist.get_world_size())
    x, y = gpt.batch(transformer.small_text()[0], 0, args.global_batch_size, args.length, share=share)
    if module == "min_EP":
        min_EP.backward(model, gpt.loss_fn(model(x), y))
        min_EP.clip_gradients(model, 0.1)
    else:
        min_EP_FSDP.backward(model, gpt.loss_fn(model(x), y))
        min_EP_FSDP.clip_gradients(model, 0.1)
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


def test_frozen_experts_and_a_frozen_router_are_left_out(tmp_path):
    cases = [(module, frozen) for module in ("min_EP", "min_EP_FSDP") for frozen in FROZEN]
    ranks = transformer.train_on(2, clipped_gradients, cases, tmp_path)
    for number, (_, frozen) in enumerate(cases):
        args = arguments()
        with transformer.float64():
            model = references.dense_model(args)
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


MESHES = {2: [1, 2], 4: [1, 2, 4]}  # by number of ranks: ep. Along dp are as many as are left
EVEN = {"top": 4, "steps": 1}  # each token is routed to all experts, so all are used evenly


def watch_step(ep):
    torch.set_default_dtype(torch.float32)
    args = arguments(ep, **EVEN)
    model = make_model(min_EP_FSDP.parallelize, args)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    data = transformer.small_data(args)
    with mock.patch("gpt.Progress"), Watch() as watch:
        min_EP.train(model, optimizer, data, args, min_EP_FSDP.backward, min_EP_FSDP.clip_gradients)
    torch.set_default_dtype(torch.float64)
    parameters = watch.sent["gather"] + watch.sent["reduce"]
    known = {"_allgather_base_", "_reduce_scatter_base_", "alltoall_base_", "allreduce_"}
    assert watch.counts.keys() <= {f"c10d.{name}" for name in known}
    return parameters, watch.sent["all to all"], watch.sent["all-reduce"]


def formula(n, ep):
    """Bytes of parameters and of tokens, by the docstring."""
    args = arguments(**EVEN)
    model = make_model(min_EP.add_experts, args)
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
            sent_parameters, sent_tokens, reduced = results[number]
            assert (sent_parameters, sent_tokens) == pytest.approx((parameters, tokens))
            assert reduced < 1000, "counts"


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
