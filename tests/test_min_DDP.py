"""min_DDP.py itself: its parameters, its printed numbers, and what it does with options."""

import argparse
import contextlib
import io
import re
import sys
from pathlib import Path

import pytest
import seed_snippet
import torch
from conftest import ROOT, finish, start, torchrun

import distributed as dist
import min_DDP

SNIPPET = Path(seed_snippet.__file__)
ITERATION = re.compile(r"Finish iteration \d+ - acc: (\d\.\d{4}) \((\d+)/(\d+)\) - loss: (\d+\.\d{4})")


def test_the_snippet_gives_the_metrics_of_one_process_on_1_2_and_4():
    x, y = seed_snippet.data().tensors
    output = seed_snippet.build_model()(x)
    correct = (output.argmax(dim=1) == y).sum().item()
    expected = f"{torch.nn.functional.cross_entropy(output, y).item():.6f} {correct}/24\n"
    jobs = [start(SNIPPET, *args) for args in ((), (2,), (4,))]
    for job in jobs:
        assert finish(job)[:2] == (0, expected)


# ---- equal to one process -------------------------------------------------------------------------------------------


def arguments(nprocs, data_size):
    """Of a global batch of 16, for any number of processes."""
    options = {"epochs": 3, "n_classes": 4, "hidden_dim": 8, "lr": 0.05, "seed": 3}
    return argparse.Namespace(**options, batch_size=16 // nprocs, data_size=data_size)


def train_alone(optimizer_class, args, nprocs):
    """Plain PyTorch on the global batches of `nprocs` ranks; the state_dict and the lines that are to be printed."""
    torch.manual_seed(args.seed)
    model = min_DDP.DummyModel(args.hidden_dim, args.n_classes)
    optimizer = optimizer_class(model.parameters(), lr=args.lr)
    data = min_DDP.DummyDataset(args.data_size, args.n_classes, args.seed)
    lines = []
    for epoch in range(args.epochs):
        lines.append(f"------- Epoch {epoch + 1}")
        generator = torch.Generator().manual_seed(args.seed + epoch)
        order = torch.randperm(args.data_size, generator=generator)
        order = torch.cat([order, order[: -args.data_size % nprocs]])  # ranks take turns, and get equally many
        for iteration, batch in enumerate(order.split(args.batch_size * nprocs)):
            logits, y = model(data.points[batch]), data.labels[batch]
            loss = torch.nn.functional.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits, n = (logits.argmax(dim=1) == y).sum().item(), len(batch)
            lines.append(f"Finish iteration {iteration} - acc: {hits / n:.4f} ({hits}/{n}) - loss: {loss.item():.4f}")
    hits, n = (model(data.points).argmax(dim=1) == data.labels).sum().item(), args.data_size
    lines.append(f"Finished: accuracy {hits / n:.4f} ({hits}/{n})")
    return model.state_dict(), lines


def train_worker(local_rank, world_size, folder, optimizer_name, data_size):
    torch.set_default_dtype(torch.float64)
    torch.optim.Adam = getattr(torch.optim, optimizer_name)
    evaluate, stdout = min_DDP.evaluate, io.StringIO()

    def save_and_evaluate(model, *args):
        torch.save(model.state_dict(), f"{folder}/{local_rank}.pt")
        result = evaluate(model, *args)
        assert not model.training, "dropout would be at work"
        return result

    min_DDP.evaluate = save_and_evaluate
    with contextlib.redirect_stdout(stdout):
        min_DDP.main_worker(local_rank, world_size, arguments(world_size, data_size))
    Path(folder, f"{local_rank}.txt").write_text(stdout.getvalue())


@pytest.mark.parametrize("optimizer_name", ["SGD", "Adam"])
@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_it_trains_and_prints_as_one_process_does(nprocs, optimizer_name, tmp_path):
    data_size = 126  # no multiple of 4: two samples are drawn twice, and counted once
    dist.launch(train_once, train_worker, str(tmp_path), optimizer_name, data_size, nprocs=nprocs)
    torch.set_default_dtype(torch.float64)
    try:
        optimizer_class = getattr(torch.optim, optimizer_name)
        expected, lines = train_alone(optimizer_class, arguments(nprocs, data_size), nprocs)
    finally:
        torch.set_default_dtype(torch.float32)
    for rank in range(nprocs):
        state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert state.keys() == expected.keys()
        assert all((state[name] - expected[name]).abs().max() <= 1e-9 for name in expected)
    assert (tmp_path / "0.txt").read_text().splitlines()[1:] == lines
    assert all(not (tmp_path / f"{rank}.txt").read_text() for rank in range(1, nprocs)), "only the primary rank prints"


def train_once(local_rank, world_size, worker_fn, *args):
    """Leave this process as it was: with one process, the test's own."""
    adam, evaluate = torch.optim.Adam, min_DDP.evaluate
    try:
        worker_fn(local_rank, world_size, *args)
    finally:
        torch.optim.Adam, min_DDP.evaluate = adam, evaluate
        torch.set_default_dtype(torch.float32)


# ---- as a user runs it ----------------------------------------------------------------------------------------------


def check_learning(stdout, epochs, iterations, global_batch):
    lines = stdout.splitlines()
    matches = [ITERATION.fullmatch(line) for line in lines if line.startswith("Finish iteration")]
    assert len(matches) == epochs * iterations
    assert {match[3] for match in matches} == {str(global_batch)}
    accuracy, n = re.fullmatch(r"Finished: accuracy (\d\.\d{4}) \(\d+/(\d+)\)", lines[-1]).groups()
    assert n == "256" and float(accuracy) > 0.95
    assert int(matches[0][2]) < 0.6 * global_batch, "it starts near chance"


def test_defaults_start_two_processes_and_learn():
    status, stdout, stderr = finish(start("min_DDP.py"))
    assert (status, stderr) == (0, "")
    assert stdout.startswith("Training on 2 x cpu, global batch 32\n")
    check_learning(stdout, epochs=5, iterations=8, global_batch=32)


def test_the_same_file_under_torchrun():
    status, stdout, stderr = torchrun(2, ROOT / "min_DDP.py", "--batch_size", 32, "--lr", 0.02)
    assert status == 0, stderr
    check_learning(stdout, epochs=5, iterations=4, global_batch=64)


def test_nproc_is_the_number_of_processes():
    status, stdout, stderr = finish(start("min_DDP.py", "--nproc", 3, "--epochs", 1))
    assert status == 0, stderr
    assert stdout.startswith("Training on 3 x cpu, global batch 48\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--epochs", "0"), "argument --epochs: '0' is not a whole number of at least 1"),
        (("--batch-size", "-1"), "argument --batch-size: '-1' is not a whole number of at least 1"),
        (("--data_size", "0"), "argument --data-size: '0' is not a whole number of at least 1"),
        (("--n_classes=1",), "argument --n-classes: '1' is not a whole number of at least 2"),
        (("--lr", "nan"), "argument --lr: 'nan' is not a finite number above 0"),
        (("--lr", "inf"), "argument --lr: 'inf' is not a finite number above 0"),
        (("--seed", str(10**30)), f"argument --seed: '{10**30}' is not a whole number from 0 to 4294967295"),
        (("--nproc", "0"), "argument --nproc: '0' is not a whole number of at least 1"),
        (("--nproc", "a_b"), "argument --nproc: 'a_b' is not a whole number of at least 1"),
        (("--frobnicate",), "unrecognized arguments: --frobnicate"),
    ],
)
def test_bad_options_are_one_line(main_of, args, message):
    assert main_of("min_DDP.py", *args) == (2, f"min_DDP.py: error: {message}\n")


def test_more_processes_than_visible_gpus(main_of, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    message = "argument --nproc: '3' is not a whole number from 1 to 2, the number of visible GPUs"
    assert main_of("min_DDP.py", "--nproc", "3") == (2, f"min_DDP.py: error: {message}\n")


def test_help_shows_usage_and_defaults(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["min_DDP.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        min_DDP.parse_args()
    help_text = capsys.readouterr().out
    assert help_text.startswith("usage: min_DDP.py [-h] [--epochs EPOCHS]")
    assert min_DDP.__doc__.partition("\n")[0] in " ".join(help_text.split())
    for option in ("epochs", "batch-size", "n-classes", "data-size", "hidden-dim", "lr", "seed", "nproc"):
        assert re.search(rf"--{option}\b[^-]*\(default:\s[\d.]+\)", help_text), option


def test_the_data_are_the_same_on_every_rank_and_in_every_run():
    first, again = min_DDP.DummyDataset(50, 4, seed=1), min_DDP.DummyDataset(50, 4, seed=1)
    torch.manual_seed(7)
    assert torch.equal(first.points, again.points) and torch.equal(first.labels, again.labels)
    assert not torch.equal(first.points, min_DDP.DummyDataset(50, 4, seed=2).points)
