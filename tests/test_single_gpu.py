"""The first rung: it learns, computes what a plain loop computes, and saves whole checkpoints."""

import os
import re
from unittest import mock

import images
import pytest
import torch
from conftest import exit_message, float64
from images import EPOCH_LINE
from torch.utils.data import DataLoader

import single_gpu


def test_it_learns_and_saves_every_few_epochs_and_at_the_last(job_of, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    stdout = job_of("single_gpu.py", 7, 3, "--batch_size", 96)
    lines = EPOCH_LINE.findall(stdout)
    assert [line[:3] for line in lines] == [(str(epoch), "96", "22") for epoch in range(7)]
    assert float(lines[-1][-1]) < float(lines[0][-1]) / 5
    assert re.findall(r"Epoch (\d+) \| Checkpoint saved at checkpoint.pt", stdout) == ["2", "5", "6"]
    assert os.listdir() == ["checkpoint.pt"]
    assert torch.load("checkpoint.pt", weights_only=True)["epoch"] == 7

    torch.manual_seed(0)
    loader = DataLoader(single_gpu.ToyDataset(), 96, shuffle=True)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3, fused=True)
    single_gpu.Trainer(model, loader, optimizer, torch.device("cpu"), 3).train(7)
    assert capfd.readouterr().out == stdout, "shuffled, and the same in each run"


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@float64()
def test_it_computes_what_a_plain_loop_computes(optimizer, tmp_path, monkeypatch, capsys):
    """With a last batch that does not fill, and going on from the checkpoint, which holds all of it."""
    monkeypatch.chdir(tmp_path)
    make, lr, sizes = images.OPTIMIZERS[optimizer], images.LR[optimizer], images.SIZES
    how = {"order_of": lambda epoch: torch.arange(sizes[0]), "loss_of": images.squared_error}
    expected, losses, _ = images.train_alone(make, [lr] * 4, sizes, 24, **how)
    loader = DataLoader(images.Pairs(images.halves(*sizes)[0]), 24)
    for _ in range(2):
        torch.manual_seed(3)
        model = images.Net()
        trainer = single_gpu.Trainer(model, loader, make(model.parameters(), lr), torch.device("cpu"), 2)
        if os.path.exists("checkpoint.pt"):
            checkpoint = torch.load("checkpoint.pt", weights_only=True)
            model.load_state_dict(checkpoint["model"])
            trainer.optimizer.load_state_dict(checkpoint["optimizer"])
        trainer.train(2)
    images.assert_equal_states(torch.load("checkpoint.pt", weights_only=True)["model"], expected, 1e-12)
    lines = [(steps, float(loss)) for _, _, steps, loss in EPOCH_LINE.findall(capsys.readouterr().out)]
    means = [sum(loss * n for loss, n in losses[i : i + 13]) / sizes[0] for i in range(0, 52, 13)]
    assert lines == [("13", pytest.approx(mean, abs=5.1e-5)) for mean in means]


def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(200, 200)
    trainer = single_gpu.Trainer(model, None, torch.optim.SGD(model.parameters()), torch.device("cpu"), 1)
    trainer.save_checkpoint(0)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.pt.tmp").symlink_to("/dev/full")
    message = exit_message(trainer.save_checkpoint, 1)
    assert re.fullmatch(r"cannot save .*/checkpoint\.pt: .*No space left on device.*", message)
    with mock.patch("os.fsync", side_effect=OSError(28, "No space left on device")):
        assert exit_message(trainer.save_checkpoint, 1) == message
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
