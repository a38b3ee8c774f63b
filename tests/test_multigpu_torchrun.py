"""The second rung: it learns, survives kills bit for bit, and differs from the first by what the README shows."""

import random
import re
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import exit_message, finish, float64, guards, run_under_launcher, start, wait_for, without_name_server
from ladder import (
    BOTH,
    Augmented,
    adam,
    assert_close,
    assert_same_models,
    linear,
    mlp,
    no_seed_twice,
    order,
    random_model,
    sgd,
    train_alone,
)
from torch.utils.data import DataLoader

import checkpoint
import distributed as dist
import multigpu_torchrun

SCRIPT = "multigpu_torchrun.py"
EPOCH_LINE = re.compile(r"\[(CPU|GPU\d+)\] Epoch (\d+) \| Batchsize: (\d+) \| Steps: (\d+) \| Loss: (\d+\.\d{4})")
SAVED_LINE = re.compile(r"Epoch (\d+) \| Snapshot saved at ")
RESUMED_LINE = re.compile(r"Resuming from .* at Epoch (\d+)")


def options(path, total_epochs, save_every=1, batch_size=32):
    return SimpleNamespace(
        total_epochs=total_epochs, save_every=save_every, batch_size=batch_size, snapshot_path=str(path)
    )


# ---- the command ----------------------------------------------------------------------------------------------------


def test_two_processes_learn_and_one_goes_on(tmp_path, capfd):
    path = tmp_path / "snapshot.pt"
    dist.launch(run_under_launcher, SCRIPT, 5, 2, "--batch_size", 64, "--snapshot-path", path, nprocs=2)
    stdout, stderr = capfd.readouterr()
    assert without_name_server(stderr) == ""
    epochs = EPOCH_LINE.findall(stdout)
    assert [line[1:4] for line in epochs] == [(str(epoch), "64", "16") for epoch in range(5)], stdout
    assert SAVED_LINE.findall(stdout) == ["1", "3", "4"]
    losses = [float(loss) for *_, loss in epochs]
    assert losses[-1] < losses[0] / 2

    dist.launch(multigpu_torchrun.main_worker, options(path, 7, 5), nprocs=1)
    stdout = capfd.readouterr().out
    assert f"Resuming from {path} at Epoch 5" in stdout
    assert [epoch for _, epoch, *_ in EPOCH_LINE.findall(stdout)] == ["5", "6"]
    assert float(EPOCH_LINE.findall(stdout)[-1][-1]) < losses[-1]


def test_what_cannot_be_resumed_is_one_line(tmp_path):
    path, model, samples = str(tmp_path / "snapshot.pt"), linear(), multigpu_torchrun.ToyDataset()
    trainer(model, sgd, path, samples).train(1)
    shorter = torch.utils.data.Subset(samples, range(1984))
    assert "training samples 2048, not 1984" in exit_message(trainer(model, sgd, path, shorter).train, 2)
    inside = {"epoch": 3, "step": 64, "settings": {"training samples": 2048}}
    checkpoint.save(path, model, torch.optim.SGD(model.parameters(), lr=5e-3), **inside)
    assert f"{path} was saved inside Epoch 3" in exit_message(trainer(model, sgd, path, samples).train, 5)


# ---- exact ----------------------------------------------------------------------------------------------------------


def trainer(model, optimizer, path, dataset=None, batch_size=32, **kwargs):
    dataset = dataset or multigpu_torchrun.ToyDataset()
    sampler = dist.data_sampler(dataset, True, shuffle=True)
    loader = DataLoader(dataset, batch_size, sampler=sampler, **kwargs)
    return multigpu_torchrun.Trainer(model, loader, optimizer(model), dist.get_device(), 1, str(path))


@float64()
def equal_worker(local_rank, world_size, by_sgd, by_adam):
    multigpu_torchrun.main_worker(local_rank, world_size, by_sgd)
    trainer(mlp(), adam, by_adam.snapshot_path, batch_size=by_adam.batch_size).train(by_adam.total_epochs)


@pytest.mark.parametrize("nprocs", [1, 2, *guards(3, 4)])
def test_n_processes_compute_what_one_computes(nprocs, tmp_path, capfd):
    """The parameters and the printed losses, with a last batch that does not fill."""
    by_sgd, by_adam = (options(tmp_path / name, 2, 2, 96 // nprocs) for name in ("sgd.pt", "adam.pt"))
    dist.launch(equal_worker, by_sgd, by_adam, nprocs=nprocs)
    total = -(-2048 // nprocs) * nprocs  # the first samples again, until all ranks have equally many
    runs = [train_alone(*what, 2, 96, total, lambda epoch: order(epoch).repeat(2)) for what in BOTH]
    assert_close(by_sgd.snapshot_path, runs[0][0])
    assert_close(by_adam.snapshot_path, runs[1][0])
    lines = EPOCH_LINE.findall(capfd.readouterr().out)
    assert [line[1:4] for line in lines] == [(epoch, str(96 // nprocs), "22") for epoch in "0101"]
    assert [float(line[-1]) for line in lines] == pytest.approx([*runs[0][1], *runs[1][1]], abs=5.1e-5)


def resume_worker(local_rank, world_size, *runs):
    """With all that is random: dropout, and noise that a worker process of the loader adds."""
    dist.init_process_group()
    loading = {"num_workers": 1 if world_size == 2 else 0}
    for path, total_epochs in runs:
        torch.manual_seed(total_epochs)  # no randomness from before the first epoch counts
        model = random_model()
        with no_seed_twice():
            trainer(model, adam, path, Augmented(), 128, **loading).train(total_epochs)
        assert model.training


@pytest.mark.parametrize("nprocs", [1, 2, *guards(3)])
def test_a_resumed_run_ends_where_the_uninterrupted_one_ends(nprocs, tmp_path):
    straight, resumed = str(tmp_path / "straight.pt"), str(tmp_path / "resumed.pt")
    dist.launch(resume_worker, (straight, 2), (resumed, 1), nprocs=nprocs)
    weights = [torch.load(path, weights_only=True)["model"]["0.weight"] for path in (straight, resumed)]
    assert not torch.equal(*weights)
    dist.launch(resume_worker, (resumed, 2), nprocs=nprocs)
    assert_same_models(resumed, straight)


@pytest.mark.guard
@pytest.mark.slow
def test_ten_kills_change_nothing(tmp_path):
    epochs, kills, rng = 60, 10, random.Random(0)
    expected, path, log = tmp_path / "expected.pt", tmp_path / "snapshot.pt", tmp_path / "log"
    temporary = tmp_path / "snapshot.pt.0.tmp"
    dist.launch(multigpu_torchrun.main_worker, options(expected, epochs, epochs), nprocs=2)
    arguments = ("--standalone", "--nproc-per-node", 2, "--max-restarts", kills, SCRIPT, epochs, 1)
    job = start("-m", "torch.distributed.run", *arguments, "--snapshot-path", path, log=log)
    try:
        hits = [kill_one(job, kill, rng, log, path, temporary) for kill in range(kills)]
        code, _, _ = finish(job)
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait(35)
    text = log.read_text()
    assert code == 0, text
    assert any(hits), "a kill must hit a save"
    assert_same_models(path, expected)

    # Every epoch was saved once and the one after it ran next. (A kill may come between a save and its line.)
    saved = [int(epoch) for epoch in SAVED_LINE.findall(text)]
    resumed = [int(epoch) for epoch in RESUMED_LINE.findall(text)]
    assert saved == sorted(set(saved))
    assert {*saved, *(epoch - 1 for epoch in resumed)} == set(range(epochs))
    assert len(resumed) == kills
    lives = text.split("Resuming from ")
    for first, life in zip([0, *resumed], lives, strict=True):
        ran = [int(epoch) for _, epoch, *_ in EPOCH_LINE.findall(life)]
        assert ran == list(range(first, first + len(ran)))
        assert "damaged" not in life


def kill_one(job, kill, rng, log, path, temporary):
    """Kill a random process at a random moment, or rank 0 in a save; returns whether it hit a save."""
    wait_for(path.exists if kill == 0 else lambda: len(RESUMED_LINE.findall(log.read_text())) == kill, job)
    epochs = len(EPOCH_LINE.findall(log.read_text())) + rng.randint(0, 2)
    wait_for(lambda: len(EPOCH_LINE.findall(log.read_text())) >= epochs, job)
    hit_a_save = kill % 2 == 1
    rank = "0" if hit_a_save else str(rng.randrange(2))
    # It takes longer to find a process than to save on a fast disk.
    victim = next(child for child in psutil.Process(job.pid).children() if child.environ()["RANK"] == rank)
    left_over = written_at(temporary)
    if hit_a_save:
        wait_for(lambda: written_at(temporary) not in (None, left_over), job)
    else:
        time.sleep(rng.uniform(0, 0.2))
    victim.kill()
    victim.wait(10)
    torch.load(path, weights_only=True)
    return written_at(temporary) not in (None, left_over)


def written_at(path):
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
