"""The second rung: it learns, and survives kills bit for bit. What else it computes is in test_equal_images.py."""

import random
import re
import time
from unittest import mock

import images
import psutil
import pytest
import torch
from conftest import exit_message, finish, run_under_launcher, start, wait_for, without_name_server
from images import EPOCH_LINE, assert_same_models
from torch.utils.data import DataLoader

import distributed as dist

SCRIPT = "multigpu_torchrun.py"
SAVED_LINE = re.compile(r"Epoch (\d+) \| Snapshot saved at ")
RESUMED_LINE = re.compile(r"Resuming from .* at Epoch (\d+)")


def test_two_processes_learn_and_one_goes_on(tmp_path, capfd, job_of):
    path = tmp_path / "snapshot.pt"
    dist.launch(run_under_launcher, SCRIPT, 5, 2, "--batch_size", 64, "--snapshot-path", path, nprocs=2)
    stdout, stderr = capfd.readouterr()
    assert without_name_server(stderr) == ""
    epochs = EPOCH_LINE.findall(stdout)
    assert [line[:3] for line in epochs] == [(str(epoch), "64", "16") for epoch in range(5)], stdout
    assert SAVED_LINE.findall(stdout) == ["1", "3", "4"]
    losses = [float(loss) for *_, loss in epochs]
    assert losses[-1] < losses[0] / 2

    with mock.patch("torch.utils.data.DataLoader", wraps=DataLoader) as loader:
        stdout = job_of(SCRIPT, 7, 5, "--snapshot-path", path)
    assert loader.call_args.kwargs["sampler"].shuffle
    assert f"Resuming from {path} at Epoch 5" in stdout
    assert [epoch for epoch, *_ in EPOCH_LINE.findall(stdout)] == ["5", "6"]
    assert float(EPOCH_LINE.findall(stdout)[-1][-1]) < losses[-1]


def test_a_snapshot_from_inside_an_epoch_is_refused(tmp_path):
    path = str(tmp_path / "snapshot.pt")
    images.train("multigpu_torchrun", epochs=1, snapshot_path=path)
    torch.save({**torch.load(path, weights_only=True), "step": 22}, path)
    message = exit_message(images.train, "multigpu_torchrun", snapshot_path=path)
    assert f"{path} was saved inside Epoch 1" in message


@pytest.mark.guard
@pytest.mark.slow
def test_ten_kills_change_nothing(tmp_path):
    epochs, kills, rng = 60, 10, random.Random(0)
    expected, path, log = tmp_path / "expected.pt", tmp_path / "snapshot.pt", tmp_path / "log"
    dist.launch(run_under_launcher, SCRIPT, epochs, epochs, "--snapshot-path", expected, nprocs=2)
    arguments = ("--standalone", "--nproc-per-node", 2, "--max-restarts", kills, SCRIPT, epochs, 1)
    job = start("-m", "torch.distributed.run", *arguments, "--snapshot-path", path, log=log)
    for kill in range(kills):
        kill_one(job, kill, rng, log, path)
    code, _, _ = finish(job)
    text = log.read_text()
    assert code == 0, text
    assert_same_models(path, expected)

    # Every epoch was saved once and the one after it ran next. (A kill may come between a save and its line.)
    saved = [int(epoch) for epoch in SAVED_LINE.findall(text)]
    resumed = [int(epoch) for epoch in RESUMED_LINE.findall(text)]
    assert saved == sorted(set(saved))
    assert {*saved, *(epoch - 1 for epoch in resumed)} == set(range(epochs))
    assert len(resumed) == kills
    lives = text.split("Resuming from ")
    for first, life in zip([0, *resumed], lives, strict=True):
        ran = [int(epoch) for epoch, *_ in EPOCH_LINE.findall(life)]
        assert ran == list(range(first, first + len(ran)))
        assert "damaged" not in life


def kill_one(job, kill, rng, log, path):
    """Kill a random process at a random moment, once the job has resumed from the kill before."""
    wait_for(lambda: path.exists() and len(RESUMED_LINE.findall(log.read_text())) == kill, job)
    time.sleep(rng.uniform(0, 0.5))
    rank = str(rng.randrange(2))
    victim = next(child for child in psutil.Process(job.pid).children() if child.environ()["RANK"] == rank)
    victim.kill()
    victim.wait(10)
    torch.load(path, weights_only=True)
