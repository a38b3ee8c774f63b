import math
import re

import pytest
import torch
import transformer
from conftest import run, torchrun

import distributed as dist
import gpt
import min_ZeRO

# 44,979 parameters: the last part is shorter on 2 ranks and on 4.
ODD = {"layers": 2, "width": 33, "heads": 3, "length": 31, "clip": 0.5}
GROUPS = ({"lr": 0.02, "weight_decay": 0.3}, {"weight_decay": 0.0}, {"lr": 0.005})
WARMUP = 10


def groups_of(model):
    """One of a single bias, one that crosses the middle, and one that ends within the first part."""
    names = ("blocks.0.attention.out.bias", "token", "")
    params = dict(model.named_parameters())
    groups = [[params.pop(name) for name in list(params) if name.startswith(prefix)] for prefix in names]
    return [{"params": group, **options} for group, options in zip(reversed(groups), GROUPS, strict=True)]


def warm_up(optimizer):
    """A scheduler, as a user adds it, that is stepped after each of the optimizer's steps."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARMUP))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())


def trained(optimizer, has_groups=False, library=False, **changes):
    """Losses, parameters by name, and the sizes of the optimizer's state, of the script's own training.

    The one with groups has a scheduler too.
    """
    args = transformer.arguments(**{"nproc": dist.get_world_size(), "log_every": 20, "library": library, **changes})
    with transformer.float64():
        model = transformer.make_model(args)
        groups = groups_of(model) if has_groups else [{"params": list(model.parameters())}]
        made = transformer.make_optimizer(optimizer, model.parameters(), args.lr)  # for its options alone
        defaults = {name: made.defaults[name] for name in ("lr", "momentum", "fused") if name in made.defaults}
        model, optimizer = min_ZeRO.prepare(model, groups, args, type(made), **defaults)
        if has_groups:
            warm_up(optimizer if library else optimizer.optim)
        losses = min_ZeRO.train(model, optimizer, *transformer.small_text(), args)
        held = [value.numel() for state in optimizer.optim.state.values() for value in state.values() if value.dim()]
        return losses, transformer.full_parameters(model), sum(held)


def expected_with_groups(**changes):
    """Losses and parameters that one process of plain PyTorch gives."""
    args = transformer.arguments(**changes)
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


def train_all(local_rank, world_size, folder, cases):
    dist.init_process_group()
    for number, (optimizer, changes) in enumerate(cases):
        losses, parameters, held = trained(optimizer, **changes)
        for param in parameters.values():  # equal in every bit, not only nearly
            assert torch.equal(dist.all_reduce(param, "min"), dist.all_reduce(param, "max"))
        held = dist.gather(torch.tensor(held))
        if dist.is_primary():
            torch.save((losses, parameters, held), f"{folder}/{number}.pt")


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_it_gives_what_one_process_gives_and_holds_a_part_of_the_state(tmp_path, nprocs):
    cases = [("AdamW", ODD), ("SGD", ODD), ("AdamW", {**ODD, "has_groups": True})]
    if nprocs == 2:
        cases += [("SGD", {**ODD, "library": True}), ("AdamW", {**ODD, "has_groups": True, "library": True})]
    dist.launch(train_all, str(tmp_path), cases, nprocs=nprocs)
    for number, (optimizer, changes) in enumerate(cases):
        losses, parameters, held = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        shape = {name: value for name, value in changes.items() if name in ODD}
        grouped = "has_groups" in changes
        expected = expected_with_groups(**shape) if grouped else transformer.reference(optimizer, **shape)
        transformer.assert_equal(losses, parameters, expected)
        # AdamW has two numbers for each parameter, SGD with momentum one.
        n_params, each = sum(param.numel() for param in parameters.values()), 2 if optimizer == "AdamW" else 1
        assert sum(held) == each * n_params, "no element is stepped by two ranks, or by none"
        if "library" not in changes:
            assert n_params % 4, "the last part must be shorter"
            size = math.ceil(n_params / nprocs)
            assert held == [each * size] * (nprocs - 1) + [each * (n_params - size * (nprocs - 1))]


# ---- command line -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_by_hand_and_by_the_library():
    outputs = []
    for start, options in ((run, ("min_ZeRO.py",)), (torchrun, (2, "min_ZeRO.py", "--library"))):
        status, stdout, stderr = start(*options, "--steps", 2, "--clip", 1, "--global-batch-size", 2)
        assert status == 0, stderr
        outputs.append(stdout.splitlines())
    hand, library = outputs
    assert hand[0] == library[0] and re.fullmatch(r"parameters held: ([\d,]+) of \1 \(1.000\)", hand[0])
    assert [line.split(" | ")[:2] for line in hand[1:-1]] == [line.split(" | ")[:2] for line in library[1:-1]]
    held, total = re.fullmatch(r"optimizer state held: ([\d,]+) of ([\d,]+) bytes \(0.500\)", hand[-1]).groups()
    assert 2 * int(held.replace(",", "")) == int(total.replace(",", ""))
    assert re.fullmatch(r"optimizer state held: [\d,]+ of [\d,]+ bytes \(0.5\d\d\)", library[-1])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [(), ("--library",)])
def test_it_learns_with_its_defaults(options):
    status, stdout, stderr = run("min_ZeRO.py", "--nproc", 2, *options, timeout=600)
    assert status == 0, stderr
    held_out, bigram = re.findall(r"held-out ([\d.]+) nats per byte \(bigram ([\d.]+)", stdout)[-1]
    assert float(held_out) < float(bigram)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--nproc 3", "argument --batch-size: 16 is not a multiple of the 3 processes"),
        ("--batch-size 1", "argument --batch-size: 1 is not a multiple of the 2 processes"),
    ],
)
def test_bad_options_are_one_line(main_of, args, message):
    assert main_of("min_ZeRO.py", *args.split()) == (2, f"min_ZeRO.py: error: {message}\n")
