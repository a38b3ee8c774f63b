"""min_ZeRO.py: equal to one process, with a part of the optimizer's state on each process."""

import copy
import math
from unittest import mock

import pytest
import torch
import transformer

import distributed as dist
import gpt
import min_ZeRO

# 44,913 parameters: the last part is shorter on 2 and 4 ranks.
ODD = {"layers": 2, "width": 33, "heads": 3, "length": 29, "clip": 0.5}
GROUPS = ({"lr": 0.02, "weight_decay": 0.3}, {"lr": 0.005, "weight_decay": 0.0})  # the second one is a single bias
WARMUP = 5


def groups_of(model):
    alone = model.blocks[0].attention.out.bias
    return [param for param in model.parameters() if param is not alone], [alone]


class Both:
    """Two optimizers, which step one after the other."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


def elements_held(optim):
    return sum(value.numel() for state in optim.state.values() for value in state.values() if value.dim())


def train(optimizer):
    """Losses, parameters by name, and the elements of the optimizer's state on this process, by the main_worker."""
    args = transformer.arguments(dist.get_world_size(), log_every=4, **ODD)
    report, held = min_ZeRO.report_state, []

    def recorded_report(optim, model):
        held.append(elements_held(optim))
        report(optim, model)

    with mock.patch.object(min_ZeRO, "report_state", recorded_report):
        result = transformer.run_main_worker(min_ZeRO, args, optimizer)
    if dist.is_primary():
        n_params = sum(param.numel() for param in result.model.parameters())
        line = f"optimizer state held: {8 * held[0]:,} of {8 * n_params:,} bytes ({held[0] / n_params:.3f})\n"
        assert result.stdout.endswith(line), result.stdout
    return result.losses, transformer.full_parameters(result.model), held[0]


def train_groups():
    """The same with an optimizer for each group, a scheduler, and other weights on each rank. Rank 0's count."""
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
    losses = min_ZeRO.train(model, Both(*optimizers), transformer.small_data(args), args)
    return losses, transformer.full_parameters(model), sum(elements_held(optimizer.optim) for optimizer in optimizers)


def schedule(optimizer):
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARMUP))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())


def train_case(optimizer):
    return train_groups() if optimizer == "groups" else train(optimizer)


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


@pytest.mark.parametrize("nprocs", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_it_gives_what_one_process_gives_and_holds_a_part_of_the_state(tmp_path, nprocs):
    cases = ["AdamW", "SGD", "groups"]
    ranks = transformer.train_on(nprocs, train_case, [(case,) for case in cases], tmp_path)
    for number, case in enumerate(cases):
        losses, parameters, _ = ranks[0][number]
        expected = expected_with_groups() if case == "groups" else transformer.reference(case, **ODD)
        transformer.assert_equal(losses, parameters, expected)
        for other in ranks[1:]:  # equal in every bit, not only nearly
            assert all(torch.equal(other[number][1][name], value) for name, value in parameters.items())
        # AdamW has two numbers for each parameter, SGD with momentum one.
        n_params, each = sum(param.numel() for param in parameters.values()), 1 if case == "SGD" else 2
        held = [results[number][2] for results in ranks]
        groups = [n_params - 33, 33] if case == "groups" else [n_params]
        assert n_params % 2, "the last part must be shorter"
        padded = sum(nprocs * math.ceil(size / nprocs) for size in groups)
        assert held == [each * padded // nprocs] * nprocs, "each rank has the state of its part"


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
