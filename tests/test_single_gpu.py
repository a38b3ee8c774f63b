import contextlib
import re
from unittest import mock

import pytest
import torch
from conftest import float64
from ladder import BOTH, assert_close, mlp, mlp_and_adam, sgd, train_alone
from torch.utils.data import DataLoader

import single_gpu

LINE = re.compile(r"\[(?:CPU|GPU0)\] Epoch (\d+) \| Batchsize: (\d+) \| Steps: (\d+) \| Loss: (\d+\.\d{4})")


def test_it_learns_and_saves_every_few_epochs_and_at_the_last(job_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stdout = job_of("single_gpu.py", 7, 3)
    lines = stdout.splitlines()
    epochs, _, _, losses = zip(*LINE.findall(stdout), strict=True)
    assert list(map(int, epochs)) == list(range(7))
    assert float(losses[-1]) < 0.02 < 10 < float(losses[0])
    assert [line for line in lines if "saved" in line] == [
        f"Epoch {e} | Checkpoint saved at checkpoint.pt" for e in (2, 5, 6)
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["epoch"] == 7


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


@pytest.mark.parametrize(("model", "optimizer"), BOTH)
@float64()
def test_its_main_trains_on_all_samples(model, optimizer, tmp_path, monkeypatch, capsys):
    """In an order that a DataLoader's shuffle draws."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["single_gpu.py", "3", "5", "--batch_size", "96"])
    expected, losses = train_alone(
        model, optimizer, 3, 96, order=lambda epoch: torch.cat(list(DataLoader(range(2048), 96, shuffle=True)))
    )
    with mlp_and_adam() if model is mlp else contextlib.nullcontext():
        single_gpu.main(single_gpu.parse_args())
    assert_close("checkpoint.pt", expected)
    assert [float(loss) for *_, loss in LINE.findall(capsys.readouterr().out)] == pytest.approx(losses, abs=5.1e-5)


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
