"""min_DDP.py itself: its parameters, its printed numbers, and what it does with options."""

import argparse
import contextlib
import functools
import io
import re
from unittest import mock

import pytest
import seed_snippet
import torch
from conftest import float64, on_processes
from images import assert_equal_states

import distributed as dist
import min_DDP


def test_the_snippet_gives_the_metrics_of_one_process_on_1_2_and_4(capfd, gpus):
    x, y = seed_snippet.data().tensors
    output = seed_snippet.build_model()(x)
    correct = (output.argmax(dim=1) == y).sum().item()
    expected = f"{torch.nn.functional.cross_entropy(output, y).item():.6f} {correct}/24\n"
    gpus(0)
    for options in ({}, {"nprocs": 2}, {"nprocs": 4}):
        dist.launch(seed_snippet.main_worker, **options)
        assert capfd.readouterr().out == expected


def repeat_the_snippet(local_rank, world_size):
    for _ in range(30):
        seed_snippet.main_worker(local_rank, world_size)


def test_the_snippet_may_run_again_and_again_in_a_job(capfd):
    """It ends the group while it still holds the model. In torch 2.11 one of the ends could wait for ever."""
    dist.launch(repeat_the_snippet, nprocs=3)
    assert len(capfd.readouterr().out.splitlines()) == 30


def arguments(nprocs):
    """Of a global batch of 16, for any number of processes."""
    return argparse.Namespace(epochs=3, seed=3, batch_size=16 // nprocs)


def train_alone(optimizer_class, args, nprocs, data_size):
    """Plain PyTorch on the global batches of `nprocs` ranks; the state_dict and the lines that are to be printed."""
    torch.manual_seed(args.seed)
    model = min_DDP.DummyModel()
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    data = min_DDP.DummyDataset(args.seed, data_size)
    lines = []
    for epoch in range(args.epochs):
        losses, hits, n = [], 0, 0
        generator = torch.Generator().manual_seed(args.seed + epoch)
        order = torch.randperm(data_size, generator=generator)
        order = torch.cat([order, order[: -data_size % nprocs]])  # ranks take turns, and get equally many
        for batch in order.split(args.batch_size * nprocs):
            logits, y = model(data.points[batch]), data.labels[batch]
            loss = torch.nn.functional.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            hits += (logits.argmax(dim=1) == y).sum().item()
            n += len(batch)
        loss = sum(losses) / len(losses)
        lines.append(f"Finish epoch {epoch + 1} - acc: {hits / n:.4f} ({hits}/{n}) - loss: {loss:.4f}")
    hits, n = (model(data.points).argmax(dim=1) == data.labels).sum().item(), data_size
    lines.append(f"Finished: accuracy {hits / n:.4f} ({hits}/{n})")
    return model.state_dict(), lines


@on_processes(1, 2, 4)
@pytest.mark.parametrize("optimizer_name", ["SGD", "Adam"])
@float64()
def test_it_trains_and_prints_as_one_process_does(optimizer_name):
    n_processes = dist.get_world_size()
    args = arguments(n_processes)
    data_size = 126  # no multiple of 4: two samples are drawn twice, and counted once
    expected, lines = train_alone(getattr(torch.optim, optimizer_name), args, n_processes, data_size)
    evaluate, models = min_DDP.evaluate, []

    def recorded_evaluate(model, *rest):
        models.append(model)
        return evaluate(model, *rest)

    dataset = functools.partial(min_DDP.DummyDataset, length=data_size)
    with (
        mock.patch.multiple("min_DDP", DummyDataset=dataset, evaluate=recorded_evaluate),
        mock.patch("torch.optim.Adam", getattr(torch.optim, optimizer_name)),
        contextlib.redirect_stdout(io.StringIO()) as stdout,
    ):
        min_DDP.main_worker(dist.get_local_rank(), n_processes, args)
    assert_equal_states(models[0].state_dict(), expected)
    assert not models[0].training, "dropout would be at work in the evaluation"
    assert stdout.getvalue().splitlines()[2:] == (lines if dist.is_primary() else [])


def test_it_starts_two_processes_and_learns(job_of):
    settings, first, *lines, last = job_of("min_DDP.py", "--nproc", 2).splitlines()
    assert settings == "Settings: epochs 5, batch_size 16, seed 0, nproc 2"
    assert first == "Training on 2 x cpu, global batch 32"
    losses = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(losses) == 5 and losses[-1] < losses[0] / 2
    assert float(re.fullmatch(r"Finished: accuracy (\d\.\d{4}) \(\d+/256\)", last)[1]) > 0.95


def test_the_data_are_the_same_on_every_rank_and_in_every_run():
    first, again = min_DDP.DummyDataset(1), min_DDP.DummyDataset(1)
    torch.manual_seed(7)
    assert torch.equal(first.points, again.points) and torch.equal(first.labels, again.labels)
    assert not torch.equal(first.points, min_DDP.DummyDataset(2).points)
