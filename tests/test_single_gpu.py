import re

import pytest
import torch
from conftest import ROOT, finish, start

import single_gpu

LINE = re.compile(r"\[(CPU|GPU0)\] Epoch (\d+) \| Batchsize: 32 \| Steps: 64 \| Loss: (\d+\.\d{4})")


def test_it_learns_and_saves_every_few_epochs_and_at_the_last(tmp_path):
    job = start(ROOT / "single_gpu.py", 7, 3, cwd=tmp_path)
    status, stdout, stderr = finish(job)
    assert (status, stderr) == (0, "")
    lines = stdout.splitlines()
    epochs = [LINE.fullmatch(line) for line in lines if line.startswith("[")]
    assert [int(match.group(2)) for match in epochs] == list(range(7))
    assert float(epochs[-1].group(3)) < 0.02 < 10 < float(epochs[0].group(3))
    assert [line for line in lines if "saved" in line] == [
        f"Epoch {e} | Checkpoint saved at checkpoint.pt" for e in (2, 5, 6)
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert checkpoint["epoch"] == 7

    model = torch.nn.Linear(20, 1)
    model.load_state_dict(checkpoint["model"])
    dataset = single_gpu.ToyDataset()
    assert torch.nn.functional.mse_loss(model(dataset.x), dataset.y) < 0.02


def trainer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(20, 1)
    return single_gpu.Trainer(model, None, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"), 1)


def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    job = trainer(tmp_path, monkeypatch)
    job.save_checkpoint(0)
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def full_disk(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(SystemExit, match=r"^cannot save .*/checkpoint\.pt: .*No space left on device"):
        job.save_checkpoint(1)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_disk_that_fills_up_while_saving_is_one_line(tmp_path, monkeypatch):
    """torch.save turns the OSError into a RuntimeError without the reason."""
    job = trainer(tmp_path, monkeypatch)
    (tmp_path / "checkpoint.pt.tmp").symlink_to("/dev/full")
    job.model = torch.nn.Linear(200, 200)
    with pytest.raises(SystemExit, match=r"^cannot save .*/checkpoint\.pt: .*No space left on device"):
        job.save_checkpoint(1)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_one_line():
    status, _, stderr = finish(start(ROOT / "single_gpu.py", 1, 1, cwd="/sys"))
    assert (status, stderr.count("\n")) == (1, 1)
    assert stderr.startswith("cannot save /sys/checkpoint.pt: ")


@pytest.mark.parametrize(
    ("args", "name", "value"),
    [
        (("-5", "1"), "total_epochs", "-5"),
        (("5", "0"), "save_every", "0"),
        (("5", "x"), "save_every", "x"),
        (("5", "1", "--batch-size", "0"), "--batch-size/--batch_size", "0"),
        (("5", "1", "--batch_size=2.5"), "--batch-size/--batch_size", "2.5"),
    ],
)
def test_bad_arguments_are_one_line(main_of, args, name, value):
    message = f"single_gpu.py: error: argument {name}: '{value}' is not a whole number of at least 1\n"
    assert main_of("single_gpu.py", *args) == (2, message)
