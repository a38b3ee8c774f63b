"""min_EP_FSDP.py and min_EP.py: frozen experts.

test_equal.py has what all scripts that train the GPT promise.
"""

import pytest
import references
import torch
import transformer
from conftest import float64, on_processes, whole

import distributed as dist
import gpt
import min_EP
import min_EP_FSDP

FROZEN = [
    (".experts.",),
    (".router.",),
    (".experts.0.", ".experts.1.", "token"),
    ("token", "norm", "attention", "head"),
]
OPTIONS = {"layers": 2, "experts": 4, "top": 2, "balance": "loss", "balance_weight": 0.1, "idle": ()}


def freeze(model, names):
    for name, param in model.named_parameters():
        param.requires_grad_(not any(part in name for part in names))


def gradients_of(model):
    return {name: whole(param.grad) for name, param in model.named_parameters() if param.grad is not None}


@on_processes(2)
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("script", ["min_EP", "min_EP_FSDP"])
@float64()
def test_frozen_experts_and_a_frozen_router_are_left_out(script, frozen):
    args = transformer.arguments(global_batch_size=12, expert_parallel=1, **OPTIONS)
    expected = references.dense_model(args)
    freeze(expected, frozen)
    x, y = gpt.batch(transformer.small_text()[0], 0, args.global_batch_size, args.length)
    transformer.plain_loss(expected, x, y).backward()
    assert torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1) > 0.1

    module, parallelize = min_EP, min_EP.add_experts
    if script == "min_EP_FSDP":
        module, parallelize = min_EP_FSDP, min_EP_FSDP.parallelize
    model = gpt.make_meta_model(gpt.Config.from_args(args))
    parallelize(model, args)
    model.to_empty(device="cpu")
    gpt.fill([*model.named_parameters(), *model.named_buffers()], args.seed)
    freeze(model, frozen)
    own = slice(dist.get_rank(), None, dist.get_world_size())
    module.backward(model, gpt.loss_fn(model(x[own]), y[own]))
    module.clip_gradients(model, 0.1)

    gradients, expected = gradients_of(model), gradients_of(expected)
    assert set().union(*dist.gather_objects(set(gradients))) == expected.keys()
    for name, grad in gradients.items():
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-12)
