"""min_ZeRO.py: several optimizers, schedulers, and frozen parameters.

test_equal.py has what all scripts that train the GPT promise.
"""

import copy
import math

import pytest
import references
import torch
import transformer

import distributed as dist
import gpt
import min_ZeRO

ODD = {**transformer.ODD, "clip": 0.5}
GROUPS = ({"lr": 0.02, "weight_decay": 0.3}, {"lr": 0.005, "weight_decay": 0.0})  # the second one is a single bias
WARMUP = 5


def groups_of(model):
    alone = model.blocks[0].attention.out.bias
    return [param for param in model.parameters() if param is not alone], [alone]


def elements_held(optim):
    return sum(value.numel() for state in optim.state.values() for value in state.values() if value.dim())


def train_groups():
    """Losses, parameters by name, and the elements of the optimizers' state on this process.

    There is an optimizer for each group, a scheduler, and other weights on each rank.
    """
    args = transformer.arguments(dist.get_world_size(), log_every=4, **ODD)
    model = transformer.make_model(args)
    with torch.no_grad():
        for param in model.parameters():
            param += dist.get_rank()
    optimizers = []
    for params, options in zip(groups_of(model), GROUPS, strict=True):
        optimizer = min_ZeRO.ZeRO(params, torch.optim.AdamW, args.clip, fused=True, **options)
        schedule(optimizer.optim)
        optimizers.append(optimizer)
    losses = min_ZeRO.train(model, references.Both(*optimizers), transformer.small_data(args), args)
    return losses, transformer.full_parameters(model), sum(elements_held(optimizer.optim) for optimizer in optimizers)


def schedule(optimizer):
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARMUP))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())


def expected_with_groups():
    """Losses and parameters that one process of plain PyTorch gives."""
    args = transformer.arguments(**ODD)
    with transformer.float64():
        model = transformer.make_model(args)
        optimizers = []
        for params, options in zip(groups_of(model), GROUPS, strict=True):
            optimizers.append(torch.optim.AdamW(params, **options))
            schedule(optimizers[-1])
        losses = []
        for step in range(args.steps):
            x, y = gpt.batch(transformer.small_text()[0], step, args.global_batch_size, args.length, args.seed)
            loss = gpt.loss_fn(model(x), y)
            model.zero_grad()
            loss.backward()
            for params, optimizer in zip(groups_of(model), optimizers, strict=True):
                torch.nn.utils.clip_grad_norm_(params, args.clip)
                optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses), {name: param.detach() for name, param in model.named_parameters()}


def test_an_optimizer_for_each_group_and_a_scheduler_give_what_one_process_gives(tmp_path):
    ranks = transformer.train_on(4, train_groups, [()], tmp_path)
    for ((losses, parameters, held),) in ranks:
        transformer.assert_equal(losses, parameters, expected_with_groups())
        assert all(torch.equal(ranks[0][0][1][name], value) for name, value in parameters.items())
        n_params = sum(param.numel() for param in parameters.values())
        alone = transformer.ODD["width"]  # the second group's numbers
        assert held == 2 * (math.ceil((n_params - alone) / 4) + math.ceil(alone / 4)), "each rank has its part"


def test_frozen_parameters_stay():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    model[0].requires_grad_(False)
    before = copy.deepcopy(model)
    optimizer = min_ZeRO.ZeRO(model.parameters(), torch.optim.AdamW, lr=0.1, weight_decay=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for layer, is_equal in ((0, True), (1, False)):
        assert torch.equal(model[layer].weight, before[layer].weight) == is_equal
    model[1].bfloat16().requires_grad_(True)
    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match="the parameters have several types"):
        min_ZeRO.ZeRO(model.parameters(), torch.optim.SGD, lr=0.1)
