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


def train_split(local_rank, world_size):
    """The loss of each epoch, and the parameters after the last one."""
    rpc_model_parallel.nn.Dropout = lambda p: torch.nn.Identity()
    train_epoch = rpc_model_parallel.train_epoch
    losses, params = [], []

    def train_and_record(model, loader, optimizer):
        losses.append(train_epoch(model, loader, optimizer))
        params[:] = [rref.to_here().detach().clone() for rref in model.parameter_rrefs()]
        return losses[-1]

    rpc_model_parallel.train_epoch = train_and_record
    rpc_model_parallel.time = slow_clock()
    with few_digits(*SIZES):
        rpc_model_parallel.main_worker(local_rank, world_size, arguments())
    return losses, params


def unsplit():
    """With the weights with which the halves begin, and without dropout."""
    model = mnist.ShallowNet()
    model.dropout1.p = model.dropout2.p = 0
    torch.manual_seed(SEED)
    halves = [rpc_model_parallel.convolutions(), rpc_model_parallel.linear_layers(SEED + 1)]
    for parameter, value in zip(model.parameters(), torch.nn.ModuleList(halves).parameters(), strict=True):
        parameter.data.copy_(value)
    return model


def test_it_equals_the_unsplit_model(capfd):
    losses, params = dist.launch(train_split, nprocs=2)
    stdout, stderr = capfd.readouterr()
    assert without_a_late_answer(stderr) == "", "a healthy job ends without a word of torch's"
    assert stdout.count(f" | {SIZES[0] / 2:.0f} samples/s\n") == EPOCHS
    loader = DataLoader(range(SIZES[0]), BATCH, shuffle=True, generator=torch.Generator().manual_seed(SEED))
    how = {"model": unsplit, "order_of": lambda epoch: torch.cat(list(loader))}
    state, expected, _ = train_alone(make_sgd, [LR] * EPOCHS, SIZES, BATCH, **how)
    assert_equal_states(dict(zip(state, params, strict=True)), state)
    steps = torch.tensor([loss for loss, _ in expected]).view(EPOCHS, -1)
    assert losses == pytest.approx(steps.mean(1).tolist(), abs=1e-6)


next_has_begun = threading.Event()


def tell_that_the_next_has_begun():
    next_has_begun.set()


def overlap(local_rank, world_size):
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
    args = arguments(epochs=1, global_batch_size=24, micro_batches=4)
    with few_digits(48, 48):
        rpc_model_parallel.main_worker(local_rank, world_size, args)
    assert calls == [(6, True)] * 8 + [(12, False)] * 4, "two steps, then all test samples in eval mode"
    assert waited == [True] * local_rank


def test_micro_batches_are_in_flight_at_once_and_evaluation_reaches_the_remote_dropout():
    dist.launch(overlap, nprocs=2)
