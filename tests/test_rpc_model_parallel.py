"""The split model computes what the unsplit one does, and both of its workers work at once."""

import argparse
import threading

import pytest
import torch
from conftest import slow_clock
from images import assert_equal_states, few_digits, make_sgd, train_alone
from test_rpc_param_server import without_a_late_answer
from torch.distributed import rpc
from torch.utils.data import DataLoader

import distributed as dist
import mnist
import rpc_model_parallel

BATCH, EPOCHS, SEED, LR, SIZES = 8, 2, 3, 0.05, (48, 51)  # 2 epochs of 48 / 8 = 6 steps


def arguments(**kwargs):
    defaults = {"epochs": EPOCHS, "global_batch_size": BATCH, "micro_batches": 3, "lr": LR, "seed": SEED, "timeout": 60}
    return argparse.Namespace(data="synthetic", data_dir="data", **{**defaults, **kwargs})


def test_a_launcher_must_start_two_processes(main_of, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    message = "WORLD_SIZE: 3 is not 2, the number of workers"
    assert main_of("rpc_model_parallel.py") == (2, f"rpc_model_parallel.py: error: {message}\n")


def train_split(local_rank, world_size, folder):
    rpc_model_parallel.nn.Dropout = lambda p: torch.nn.Identity()
    train_epoch = rpc_model_parallel.train_epoch
    params, losses = [], []

    def train_and_record(model, loader, optimizer):
        params.append([rref.to_here().detach().clone() for rref in model.parameter_rrefs()])
        losses.append(train_epoch(model, loader, optimizer))
        params.append([rref.to_here().detach().clone() for rref in model.parameter_rrefs()])
        return losses[-1]

    rpc_model_parallel.train_epoch = train_and_record
    rpc_model_parallel.time = slow_clock()
    with few_digits(*SIZES):
        rpc_model_parallel.main_worker(local_rank, world_size, arguments())
    if local_rank == 0:
        torch.save((params[0], params[-1], losses), f"{folder}/params.pt")


def test_it_equals_the_unsplit_model(tmp_path, capfd):
    dist.launch(train_split, str(tmp_path), nprocs=2)
    stdout, stderr = capfd.readouterr()
    assert without_a_late_answer(stderr) == "", "a healthy job ends without a word of torch's"
    assert stdout.count(f" | {SIZES[0] / 2:.0f} samples/s\n") == EPOCHS
    initial, last, losses = torch.load(tmp_path / "params.pt", weights_only=True)

    def unsplit():
        model = mnist.ShallowNet()
        model.dropout1.p = model.dropout2.p = 0
        for parameter, value in zip(model.parameters(), initial, strict=True):
            parameter.data.copy_(value)
        return model

    loader = DataLoader(range(SIZES[0]), BATCH, shuffle=True, generator=torch.Generator().manual_seed(SEED))
    how = {"model": unsplit, "order_of": lambda epoch: torch.cat(list(loader))}
    state, expected, _ = train_alone(make_sgd, [LR] * EPOCHS, SIZES, BATCH, **how)
    assert_equal_states(dict(zip(state, last, strict=True)), state)
    steps = torch.tensor([loss for loss, _ in expected]).view(EPOCHS, -1)
    assert losses == pytest.approx(steps.mean(1).tolist(), abs=1e-6)


next_has_begun = threading.Event()


def tell_that_the_next_has_begun():
    next_has_begun.set()


def overlap(local_rank, world_size, folder):
    """worker1 finishes its first micro-batch only after worker0 has begun the second."""
    forward = rpc_model_parallel.Half.forward
    calls, waited = [], []

    def watched(part, x):
        calls.append((len(x), part.training))
        if local_rank == 0 and len(calls) == 2:
            rpc.rpc_sync("worker1", tell_that_the_next_has_begun)
        if local_rank == 1 and len(calls) == 1:
            waited.append(next_has_begun.wait(20))
        return forward(part, x)

    rpc_model_parallel.Half.forward = watched
    with few_digits(48, 48):
        rpc_model_parallel.main_worker(
            local_rank, world_size, arguments(epochs=1, global_batch_size=24, micro_batches=4)
        )
    torch.save((calls, waited), f"{folder}/{local_rank}.pt")


def test_micro_batches_are_in_flight_at_once_and_evaluation_reaches_the_remote_dropout(tmp_path):
    dist.launch(overlap, str(tmp_path), nprocs=2)
    for rank in range(2):
        calls, waited = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert calls == [(6, True)] * 8 + [(12, False)] * 4, "two steps, then all test samples in eval mode"
    assert waited == [True]
