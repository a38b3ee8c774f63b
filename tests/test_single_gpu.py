import os
import re
from unittest import mock

import pytest
import torch
from conftest import float64
from ladder import BOTH, assert_close, linear, sgd, train_alone
from torch.utils.data import DataLoader

import single_gpu

LINE = re.compile(r"\[(?:CPU|GPU0)\] Epoch (\d+) \| Batchsize: (\d+) \| Steps: (\d+) \| Loss: (\d+\.\d{4})")


@float64()
def test_it_learns_and_saves_every_few_epochs_and_at_the_last(job_of, tmp_path, monkeypatch):
    """In an order that a DataLoader's shuffle draws. The last epoch is saved too."""
    monkeypatch.chdir(tmp_path)
    expected, losses = train_alone(
        linear, sgd, 7, 96, order=lambda epoch: torch.cat(list(DataLoader(range(2048), 96, shuffle=True)))
    )
    stdout = job_of("single_gpu.py", 7, 3, "--batch_size", 96)
    assert_close("checkpoint.pt", expected)
    lines = LINE.findall(stdout)
    assert [line[:3] for line in lines] == [(str(epoch), "96", "22") for epoch in range(7)]
    assert [float(loss) for *_, loss in lines] == pytest.approx(losses, abs=5.1e-5)
    assert losses[-1] < losses[0] / 5
    assert re.findall(r"Epoch (\d+) \| Checkpoint saved at checkpoint.pt", stdout) == ["2", "5", "6"]
    assert os.listdir() == ["checkpoint.pt"]
    assert torch.load("checkpoint.pt", weights_only=True)["epoch"] == 7


@pytest.mark.parametrize(("model", "optimizer"), BOTH)
@float64()
def test_it_computes_what_a_plain_loop_computes(model, optimizer, tmp_path, monkeypatch, capsys):
    """With a last batch that does not fill, and going on from the checkpoint, which holds all of it."""
    monkeypatch.chdir(tmp_path)
    expected, losses = train_alone(model, optimizer, 4, 96, order=lambda epoch: torch.arange(2048))
    loader = DataLoader(single_gpu.ToyDataset(), 96)
    for _ in range(2):
        trained = model()
        trainer = single_gpu.Trainer(trained, loader, optimizer(trained), torch.device("cpu"), 2)
        if (tmp_path / "checkpoint.pt").exists():
            checkpoint = torch.load("checkpoint.pt", weights_only=True)
            trained.load_state_dict(checkpoint["model"])
            trainer.optimizer.load_state_dict(checkpoint["optimizer"])
        trainer.train(2)
    assert_close("checkpoint.pt", expected)
    lines = LINE.findall(capsys.readouterr().out)
    assert [line[1:3] for line in lines] == [("96", "22")] * 4
    assert [float(loss) for *_, loss in lines] == pytest.approx(losses, abs=5.1e-5)


@pytest.mark.parametrize("moment", ["write", "fsync"])
def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_else(moment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(200, 200)
    trainer = single_gpu.Trainer(model, None, sgd(model), torch.device("cpu"), 1)
    trainer.save_checkpoint(0)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    if moment == "write":  # torch.save turns the OSError into a RuntimeError without the reason
        (tmp_path / "checkpoint.pt.tmp").symlink_to("/dev/full")
    else:
        monkeypatch.setattr("os.fsync", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(SystemExit, match=r"^cannot save .*/checkpoint\.pt: .*No space left on device"):
        trainer.save_checkpoint(1)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
