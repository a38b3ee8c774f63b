"""The split model computes what the unsplit one does, and both of its workers work at once."""

import argparse
import functools
import os
import re
import threading

import pytest
import torch
from conftest import ROOT, run, torchrun
from test_rpc_param_server import REAL, small_data
from torch.distributed import rpc
from torch.nn import functional as F
from torch.utils.data import DataLoader

import distributed as dist
import mnist
import rpc_model_parallel

MNIST_ROOT = os.environ.get("MNIST_ROOT")
LINE = re.compile(r"Epoch (\d+) - loss: (\d\.\d{4}) - acc: (\d\.\d{4}) \((\d+)/10000\) - [\d.]+ samples/s")
BATCH, EPOCHS, SEED, LR = 8, 2, 3, 0.05  # 2 epochs of 192 / 8 = 24 steps


def arguments(**kwargs):
    defaults = {"epochs": EPOCHS, "batch_size": BATCH, "micro_batches": 3, "lr": LR, "seed": SEED}
    return argparse.Namespace(data="synthetic", data_dir="data", **{**defaults, **kwargs})


# ---- the same parameters --------------------------------------------------------------------------------------------


def train_split(local_rank, world_size, folder):
    torch.set_default_dtype(torch.float64)
    rpc_model_parallel.nn.Dropout = lambda p: torch.nn.Identity()
    mnist.load_data = small_data
    train_epoch = rpc_model_parallel.train_epoch
    params = []

    def train_and_record(model, loader, optimizer):
        params.append([rref.to_here().detach().clone() for rref in model.parameter_rrefs()])
        loss = train_epoch(model, loader, optimizer)
        params.append([rref.to_here().detach().clone() for rref in model.parameter_rrefs()] + [torch.tensor(loss)])
        return loss

    rpc_model_parallel.train_epoch = train_and_record
    rpc_model_parallel.main_worker(local_rank, world_size, arguments())
    if local_rank == 0:
        torch.save((params[0], params[1], params[-1]), f"{folder}/params.pt")


def train_alone(initial):
    """Plain PyTorch on mnist.ShallowNet: parameters and average loss after each epoch."""
    model = mnist.ShallowNet().double()
    model.dropout1.p = model.dropout2.p = 0
    for parameter, value in zip(model.parameters(), initial, strict=True):
        parameter.data.copy_(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    data = small_data()
    loader = DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(SEED), collate_fn=tuple)
    results = []
    for _ in range(EPOCHS):
        losses = []
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model((images.double() / 255 - mnist.MEAN) / mnist.STD), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        results.append([p.detach().clone() for p in model.parameters()] + [torch.stack(losses).mean()])
    return results


def test_it_equals_the_unsplit_model(tmp_path):
    dist.launch(train_split, str(tmp_path), nprocs=2)
    initial, first, last = torch.load(tmp_path / "params.pt", weights_only=True)
    expected_first, expected_last = train_alone(initial)
    assert expected_last[-1] < expected_first[-1] - 0.01, "the reference must learn, or equality means little"
    for actual, expected in ((first, expected_first), (last, expected_last)):
        for one, other in zip(actual, expected, strict=True):
            assert (one - other).abs().max() <= 1e-9


# ---- both workers at once, and dropout on both ----------------------------------------------------------------------

next_has_begun = threading.Event()


def tell_that_the_next_has_begun():
    next_has_begun.set()


def overlap(local_rank, world_size, folder):
    """worker1 finishes its first micro-batch only after worker0 has begun the second."""
    forward = rpc_model_parallel.Part.forward
    calls, waited = [], []

    def watched(part, x):
        calls.append((len(x), part.training))
        if local_rank == 0 and len(calls) == 2:
            rpc.rpc_sync("worker1", tell_that_the_next_has_begun)
        if local_rank == 1 and len(calls) == 1:
            waited.append(next_has_begun.wait(20))
        return forward(part, x)

    rpc_model_parallel.Part.forward = watched
    mnist.load_data = small_data
    rpc_model_parallel.main_worker(local_rank, world_size, arguments(epochs=1, batch_size=96, micro_batches=4))
    torch.save((calls, waited), f"{folder}/{local_rank}.pt")


def test_micro_batches_are_in_flight_at_once_and_evaluation_reaches_the_remote_dropout(tmp_path):
    dist.launch(overlap, str(tmp_path), nprocs=2)
    for rank in range(2):
        calls, waited = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert calls == [(24, True)] * 8 + [(48, False)] * 4, "two steps, then all test samples in eval mode"
    assert waited == [True]


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("command", "options", "epochs", "at_least"),
    [
        (run, (), 2, 0.95),
        (functools.partial(torchrun, 2), ("--epochs", 1), 1, 0.93),
        pytest.param(run, ("--epochs", 1, "--data", "mnist", "--data-dir", MNIST_ROOT), 1, 0.97, marks=REAL),
    ],
)
def test_it_learns(command, options, epochs, at_least):
    status, stdout, stderr = command(ROOT / "rpc_model_parallel.py", *options, timeout=380)
    assert status == 0, stderr
    first, *lines = stdout.splitlines()
    assert first == "Training on 2 x cpu, 4 micro-batches"
    matches = [LINE.fullmatch(line) for line in lines]
    assert [int(match.group(1)) for match in matches] == list(range(1, epochs + 1))
    assert float(matches[-1].group(3)) == round(int(matches[-1].group(4)) / 10_000, 4) >= at_least


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--epochs", "0"), "argument --epochs: '0' is not a whole number of at least 1"),
        (("--lr", "-1"), "argument --lr: '-1' is not a finite number above 0"),
        (("--seed", "-1"), "argument --seed: '-1' is not a whole number from 0 to 4294967295"),
        (("--micro_batches", "0"), "argument --micro-batches: '0' is not a whole number of at least 1"),
        (
            ("--batch-size", "4", "--micro-batches", "5"),
            "argument --micro-batches: 5 is not in the range 1 to 4, the --batch-size",
        ),
        ((), "WORLD_SIZE: 3 is not 2, the number of workers"),
    ],
)
def test_bad_options_are_one_line(main_of, monkeypatch, args, message):
    monkeypatch.setenv("WORLD_SIZE", "3" if "WORLD_SIZE" in message else "2")
    assert main_of("rpc_model_parallel.py", *args) == (2, f"rpc_model_parallel.py: error: {message}\n")
