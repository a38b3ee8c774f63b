"""What the tests of all transformer scripts share: a small case, and what one process of plain PyTorch makes of it."""

import argparse
import contextlib
import functools
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, finish, start
from torch.nn import functional as F

import distributed as dist
import gpt

HELD = re.compile(r"parameters held: ([\d,]+) of ([\d,]+) \((\d\.\d{3})\)")
LINE = re.compile(
    r"step (?P<step>\d+) \| loss (?P<loss>\d+\.\d{4}) \| held-out (?P<held_out>\d+\.\d{4}) nats per byte "
    r"\(bigram (?P<bigram>\d\.\d{4}), trigram (?P<trigram>\d\.\d{4})\) \| (?P<speed>[\d,]+) tokens/s \| "
    r"peak memory (?P<memory>\d+) MB"
)


def arguments(nprocs=1, **changes):
    """As a script's parse_args would give them: 4 layers and heads of little width, so that 4 ranks can share them."""
    values = {
        **{"layers": 4, "width": 32, "heads": 4, "length": 32, "batch_size": 8, "steps": 20, "log_every": 10},
        **{"lr": 0.01, "clip": None, "seed": 3, "nproc": nprocs},
    }
    return argparse.Namespace(**{**values, **changes})


@functools.cache
def small_text():
    """200 kB to train on and 20 kB held out, as load_text gives them: counted within milliseconds."""
    text, held_out = gpt.load_text()
    return text[:200_000], held_out[:20_000]


def make_optimizer(name, params, lr):
    """AdamW, or SGD, which shows a gradient of the wrong size as Adam does not. It has no fused form for DTensors."""
    if name == "SGD":
        return torch.optim.SGD(params, lr=10 * lr, momentum=0.5)
    return torch.optim.AdamW(params, lr=lr, fused=True)


@contextlib.contextmanager
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make_model(args):
    """The weights with which the reference starts."""
    torch.manual_seed(args.seed)
    return gpt.GPT(args.layers, args.width, args.heads, args.length)


def reference(optimizer="AdamW", **changes):
    """Every step's loss, (steps,), and the trained parameters by name, from one process without any of the helpers.

    `changes` are those of `arguments`. `optimizer` is a name that make_optimizer knows.
    """
    return _reference(optimizer, tuple(sorted(changes.items())))


@functools.cache
def _reference(optimizer_name, changes):
    args = arguments(**dict(changes))
    with float64():
        model = make_model(args)
        start = {name: param.detach().clone() for name, param in model.named_parameters()}
        optimizer = make_optimizer(optimizer_name, model.parameters(), args.lr)
        losses = []
        for step in range(args.steps):
            x, y = gpt.batch(small_text()[0], step, args.batch_size, args.length, args.seed)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            if args.clip:
                norm = torch.stack([param.grad.norm() for param in model.parameters()]).norm()
                for param in model.parameters():
                    param.grad *= min(1, args.clip / (norm + 1e-6))
            optimizer.step()
            losses.append(loss.detach())
        parameters = {name: param.detach() for name, param in model.named_parameters()}
    assert losses[-1] < losses[0] - 0.5, "the reference must learn, or equality means little"
    assert all((parameters[name] - start[name]).abs().max() > 1e-4 for name in start), "all parameters must move"
    return torch.stack(losses), parameters


def local(tensor):
    """What this process holds of a tensor or DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full_parameters(model):
    """By name, each one whole on every rank, whether it was a tensor or a DTensor: all ranks must call it."""
    model = getattr(model, "module", model)
    return {
        name: (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().clone()
        for name, param in model.named_parameters()
    }


def assert_equal(losses, parameters, expected, tolerance=1e-9):
    """That losses and parameters are those of a `reference`."""
    expected_losses, expected_parameters = expected
    assert losses.shape == expected_losses.shape and losses.dtype == torch.float64
    assert (losses - expected_losses).abs().max() <= tolerance, losses - expected_losses
    assert parameters.keys() == expected_parameters.keys()
    for name, value in expected_parameters.items():
        assert parameters[name].dtype == torch.float64 and parameters[name].shape == value.shape, name
        assert (parameters[name] - value).abs().max() <= tolerance, name


def progress_lines(stdout):
    """What each line of a script's progress says, as numbers by name."""
    matches = [LINE.fullmatch(line) for line in stdout.splitlines() if line.startswith("step ")]
    return [{name: float(value.replace(",", "")) for name, value in m.groupdict().items()} for m in matches]


def assert_learns(script, *args, seconds=120):
    """That a script with its defaults passes the bigram's held-out loss within two minutes."""
    status, stdout, stderr = finish(start(script, *args), timeout=seconds)
    assert (status, stderr) == (0, ""), stderr
    lines = progress_lines(stdout)
    assert lines[-1]["held_out"] < lines[-1]["bigram"] - 0.1, stdout
    assert lines[0]["held_out"] > lines[0]["bigram"], "it starts above"


# ---- bytes sent, counted where nobody else sends any ---------------------------------------------------------------


def sent_on_loopback():
    """Bytes that all processes of this network namespace have sent, headers included; all ranks must call it."""
    dist.barrier()
    with open("/proc/net/dev") as file:
        return next(int(line.split()[9]) for line in file if line.strip().startswith("lo:"))


def sent_per_step(train, args):
    """Bytes that one rank sends per step of `train(args)`: those of 6 steps less those of 2, and so without set-up."""
    totals = []
    for steps in (2, 2, 6):  # the first one also pays for what is set up once
        before = sent_on_loopback()
        train(argparse.Namespace(**{**vars(args), "steps": steps, "log_every": 100}))
        totals.append(sent_on_loopback() - before)
    return (totals[2] - totals[1]) / 4 / dist.get_world_size()


def run_in_namespace(module, function, *args):
    """Run a test module's function in a process of its own, in a network namespace of its own; returns its stdout."""
    unshare = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    if sys.platform != "linux" or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("network namespaces need Linux and root")
    code = f"import {module}; {module}.{function}(*{args!r})"
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    status, stdout, stderr = finish(start("-c", code, prefix=unshare, env=env))
    assert status == 0, stderr
    return stdout
