"""min_ZeRO.py: equal to one process, with a part of the optimizer's state on each process."""

import copy
import math
import re
from unittest import mock

import pytest
import torch
import transformer
from conftest import run_under_launcher

import distributed as dist
import gpt
import min_ZeRO

# 44,913 parameters, 44,934 elements with the zeros between them: the last part is shorter on 4 ranks.
ODD = {"layers": 2, "width": 33, "heads": 3, "length": 29, "clip": 0.5}
GROUPS = ({"lr": 0.02, "weight_decay": 0.3}, {"weight_decay": 0.0}, {"lr": 0.005})
WARMUP = 5


def groups_of(model):
    """One of a single bias, one that crosses the middle, and one that ends within the first part."""
    names = ("blocks.0.attention.out.bias", "token", "")
    params = dict(model.named_parameters())
    groups = [[params.pop(name) for name in list(params) if name.startswith(prefix)] for prefix in names]
    return [{"params": group, **options} for group, options in zip(reversed(groups), GROUPS, strict=True)]


def elements_held(optim):
    return sum(value.numel() for state in optim.state.values() for value in state.values() if value.dim())


def train(optimizer):
    """Losses, parameters by name, and the elements of the optimizer's state on this process, by the main_worker."""
    args = transformer.arguments(dist.get_world_size(), log_every=20, **ODD)
    report, held = min_ZeRO.report_state, []

    def recorded_report(optim, n_params):
        held.append(elements_held(optim))
        report(optim, n_params)

    with mock.patch.object(min_ZeRO, "report_state", recorded_report):
        result = transformer.run_main_worker(min_ZeRO, args, optimizer)
    if dist.is_primary():
        n_params = sum(param.numel() for param in result.model.parameters())
        line = f"optimizer state held: {8 * held[0]:,} of {8 * n_params:,} bytes ({held[0] / n_params:.3f})\n"
        assert result.stdout.endswith(line), result.stdout
    for param in result.model.parameters():
        assert param.data_ptr() % 16 == 0 and param.grad.data_ptr() % 16 == 0, "of odd sizes too"
    return result.losses, transformer.full_parameters(result.model), held[0]


def train_groups():
    """The same with several groups, a scheduler, and other weights on each rank. Rank 0's count."""
    args = transformer.arguments(dist.get_world_size(), log_every=20, **ODD)
    model = transformer.make_model(args)
    with torch.no_grad():
        for param in model.parameters():
            param += dist.get_rank()
    optimizer = min_ZeRO.ZeRO(groups_of(model), torch.optim.AdamW, args.clip, lr=args.lr, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optim, lambda step: min(1, (step + 1) / WARMUP))
    optimizer.optim.register_step_post_hook(lambda *_: scheduler.step())
    losses = min_ZeRO.train(model, optimizer, *transformer.small_text(), args)
    return losses, transformer.full_parameters(model), elements_held(optimizer.optim)


def train_case(optimizer):
    return train_groups() if optimizer == "groups" else train(optimizer)


def expected_with_groups():
    """Losses and parameters that one process of plain PyTorch gives."""
    args = transformer.arguments(**ODD)
    with transformer.float64():
        model = transformer.make_model(args)
        optimizer = torch.optim.AdamW(groups_of(model), lr=args.lr)
        losses = []
        for step in range(args.steps):
            x, y = gpt.batch(transformer.small_text()[0], step, args.global_batch_size, args.length, args.seed)
            loss = gpt.loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            for group, options in zip(optimizer.param_groups, GROUPS, strict=True):
                group["lr"] = options.get("lr", args.lr) * min(1, (step + 1) / WARMUP)
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses), {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("nprocs", [1, 2, 4])
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
        # In float64 a parameter with an odd number of elements is followed by a zero.
        n_aligned = sum(2 * math.ceil(param.numel() / 2) for param in parameters.values())
        assert sum(held) == each * n_aligned, "no element is stepped by two ranks, or by none"
        assert n_aligned > n_params and n_aligned % 4, "the last part must be shorter"
        size = math.ceil(n_aligned / nprocs)
        assert held == [each * size] * (nprocs - 1) + [each * (n_aligned - size * (nprocs - 1))]


@pytest.mark.slow
def test_frozen_parameters_stay_and_an_iterator_is_a_group():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    model[0].requires_grad_(False)
    before = copy.deepcopy(model)
    optimizer = min_ZeRO.ZeRO([{"params": model.parameters()}], torch.optim.AdamW, lr=0.1, weight_decay=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for layer, is_equal in ((0, True), (1, False)):
        assert torch.equal(model[layer].weight, before[layer].weight) == is_equal
    groups = [{"params": torch.nn.Linear(2, 2, dtype=dtype).parameters()} for dtype in (torch.float32, torch.bfloat16)]
    with pytest.raises(ValueError, match="the parameters have several types"):
        min_ZeRO.ZeRO(groups, torch.optim.SGD, lr=0.1)


def test_the_script_prints_what_it_holds_however_it_is_started(job_of, capfd):
    command = ("min_ZeRO.py", "--steps", 2, "--clip", 1, "--global-batch-size", 2)
    outputs = [job_of(*command, "--nproc", 2)]
    dist.launch(run_under_launcher, *command, nprocs=2)
    outputs.append(capfd.readouterr().out)
    assert [line["loss"] for line in transformer.progress_lines(outputs[0])] == [
        line["loss"] for line in transformer.progress_lines(outputs[1])
    ]
    for first, *_, last in map(str.splitlines, outputs):
        assert re.fullmatch(r"parameters held: ([\d,]+) of \1 \(1.000\)", first)
        held, total = re.fullmatch(r"optimizer state held: ([\d,]+) of ([\d,]+) bytes \(0.500\)", last).groups()
        assert 2 * int(held.replace(",", "")) == int(total.replace(",", ""))
