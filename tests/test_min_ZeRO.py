"""min_ZeRO.py: several optimizers, schedulers, and frozen parameters.

test_equal.py has what all scripts that train the GPT promise.
"""

import copy

import pytest
import references
import torch
import transformer
from conftest import float64, on_processes

import distributed as dist
import min_ZeRO

GROUPS = ({"lr": 0.02, "weight_decay": 0.3}, {"lr": 0.005, "weight_decay": 0.0})  # the second one is a single bias
WARMUP = 5


def groups_of(model):
    alone = model.blocks[0].attention.out.bias
    return [param for param in model.parameters() if param is not alone], [alone]


def schedule(optimizer):
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARMUP))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())


def clip(optimizer, *_):
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)


@on_processes(4)
@float64()
def test_an_optimizer_for_each_group_and_a_scheduler_give_what_one_process_gives():
    args = transformer.arguments(dist.get_world_size(), **transformer.ODD)
    plain, model = transformer.make_model(args), transformer.make_model(args)
    with torch.no_grad():
        for param in model.parameters():
            param += dist.get_rank()  # all must start from rank 0's
    expected, ours = [], []
    for params, plain_params, options in zip(groups_of(model), groups_of(plain), GROUPS, strict=True):
        expected.append(torch.optim.AdamW(plain_params, **options))
        expected[-1].register_step_pre_hook(clip)
        schedule(expected[-1])
        ours.append(min_ZeRO.ZeRO(params, torch.optim.AdamW, 0.5, fused=True, **options))
        schedule(ours[-1].optim)
    losses = min_ZeRO.train(model, references.Both(*ours), transformer.small_data(args), args)
    dist.check_in_sync(model)
    expected = transformer.train_alone(plain, references.Both(*expected), args)
    transformer.assert_equal(losses, transformer.full_parameters(model), expected)


def test_frozen_parameters_stay_and_several_types_are_refused():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    model[0].requires_grad_(False)
    before = copy.deepcopy(model)
    optimizer = min_ZeRO.ZeRO(model.parameters(), torch.optim.AdamW, lr=0.1, weight_decay=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for layer, is_equal in ((0, True), (1, False)):
        assert torch.equal(model[layer].weight, before[layer].weight) == is_equal
    model[1].bfloat16()
    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match="the parameters have several types"):
        min_ZeRO.ZeRO(model.parameters(), torch.optim.SGD, lr=0.1)
