"""mnist_DDP.py and tracking.py: what is sent, compiled, saved and tracked. More is in tests/test_equal_images.py."""

import argparse
import contextlib
import errno
import io
import itertools
import json
import multiprocessing
import os
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest import mock

import images
import numpy as np
import pytest
import torch
from conftest import Left, Watch, exit_message, float64, guards, leaving_is_an_error, on_processes, run, slow
from images import LINE, STEPS, Stopped, acting, halves, stop
from PIL import Image
from torch import nn

import distributed as dist
import mnist_DDP
import tracking

SCRIPT = "mnist_DDP.py"


def train(**options):
    return images.train("mnist_DDP", **options)


def steps_of(stdout):
    return [int(step) for step, _ in LINE.findall(stdout)]


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("package", "is_folder"), [("wandb", False), ("tensorboard", True)])
def test_a_missing_package_is_one_line(package, is_folder, main_of, monkeypatch, tmp_path):
    """W&B makes a folder of its own name, which Python takes for a package."""
    folder = ModuleType(package)
    folder.__spec__ = ModuleSpec(package, None)
    monkeypatch.setitem(sys.modules, package, folder if is_folder else None)
    options = ["--wandb"] if package == "wandb" else ["--tensorboard", tmp_path]
    message = f"--{package}: {package} is not installed: pip install -r requirements-tracking.txt"
    assert main_of(SCRIPT, *options) == (message, "")


@pytest.mark.slow
def test_without_an_account_it_is_one_line(tmp_path):
    environment = {**wandb_offline(tmp_path), "WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path)}
    status, _, stderr = run(SCRIPT, "--wandb", "--output", tmp_path / "mnist_cnn.pt", env=environment)
    assert status == 1 and "Traceback" not in stderr
    assert stderr.splitlines()[-1].startswith("--wandb: ") and "WANDB_MODE=offline" in stderr.splitlines()[-1], stderr


def test_a_global_batch_of_too_many_samples_is_refused():
    message = exit_message(train, global_batch_size=304)
    assert message == "--global-batch-size 304 is more than all training samples, 303"


def test_a_folder_of_images_as_the_comment_says(tmp_path, monkeypatch):
    """Images of three classes in colour and of several sizes: the model gets as many outputs."""
    (comment,) = re.findall(
        r"^    # A folder for each class.*?\n((?:    # .*\n)+)", Path(mnist_DDP.__file__).read_text(), re.M
    )
    load = "def load_datasets(args):\n" + comment.replace("    # ", "    ")
    monkeypatch.chdir(tmp_path)
    for half, name, number in itertools.product(("train", "test"), "abc", range(4)):
        folder = Path("images", half, name)
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (20 + number, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    found = {}
    exec(load, found)
    args = argparse.Namespace(**{**images.OPTIONS["mnist_DDP"], "global_batch_size": 4})
    mnist_DDP.run(args, found["load_datasets"](args))
    assert len(torch.load("model.pt", weights_only=True)["fc.bias"]) == 3


# ---- steps ----------------------------------------------------------------------------------------------------------


@on_processes(2)
@float64()
def test_a_step_sends_each_gradient_once():
    """All gradients in one bucket, for any number of micro-batches, and once before; a number per line of progress."""
    with Watch() as watch:
        train(accumulate=3)
    n_steps, n_lines = 1 + 2 * STEPS, 2 * STEPS
    assert watch.counts["c10d.allreduce_"] == n_steps + n_lines + 2  # and one for each evaluation
    assert watch.sent["all-reduce"] == 8 * (19_090 * n_steps + n_lines + 2 * 2)
    assert not {"wandb", "tensorboard", "flytekit"} & sys.modules.keys(), "extras are for who asks for them"


class WithoutRandomNumbers(nn.Sequential):
    """It has a forward of its own, since under DDP torch compiles none of nn.Sequential."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(784, 24), nn.ReLU(), nn.Linear(24, 10))

    def forward(self, x):
        return super().forward(x)


@pytest.mark.timeout(600)
@on_processes(*slow(2))
@float64()
def test_compiled_it_is_the_same():
    from torch._dynamo.utils import counters

    options = {"model": WithoutRandomNumbers, "epochs": 1, "accumulate": 3, "clip": 4.0}
    expected, _ = train(**options)
    state, _ = train(**options, compile=True)
    assert counters["stats"]["unique_graphs"] > 0, "it was compiled"
    images.assert_equal_states(state, expected)


# ---- snapshots ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "saved"), [(6, [5]), (10, [5]), (15, [5, 10, 13]), (18, [5, 10, 13, 15])])
def test_it_saves_after_every_so_many_steps_and_after_each_epoch(at, saved, tmp_path, monkeypatch, capsys):
    """With a line before each snapshot, or a resumed run would print another mean."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Stopped):
        train(model=acting(at, stop), save_every=5, log_every=100, snapshot_path="snapshot.pt")
    assert torch.load("snapshot.pt", weights_only=True)["step"] == saved[-1]
    assert steps_of(capsys.readouterr().out) == saved


def test_more_epochs_are_refused_while_steps_are_left(tmp_path, monkeypatch, capsys):
    """The learning rate falls over all epochs, so it would jump up."""
    monkeypatch.chdir(tmp_path)
    options = {"snapshot_path": "snapshot.pt", "save_every": 100}
    with leaving_is_an_error(agreed=lambda preemption: True), pytest.raises(Left):
        train(**options, epochs=2)
    for epochs in (1, 4):
        message = exit_message(train, **options, epochs=epochs)
        assert message.startswith(f"--epochs {epochs}: snapshot.pt is at step 1 of 2 epochs"), message
        assert message.endswith("with --epochs 2")
    capsys.readouterr()
    for epochs, steps in ((2, range(2, 27)), (3, range(27, 40))):  # then it is complete, and may go on
        _, results = train(**options, epochs=epochs)
        assert steps_of(capsys.readouterr().out) == [*steps] and len(results) == epochs


def test_sigterm_to_the_processes_that_load_does_not_end_an_evaluation(tmp_path, monkeypatch):
    """A scheduler sends it to all processes of a job."""
    monkeypatch.chdir(tmp_path)
    terminated = []

    def terminate():
        for loading in multiprocessing.active_children():
            terminated.append(loading)
            loading.terminate()

    _, results = train(model=acting(1, terminate, training=False), num_workers=1, epochs=1)
    assert terminated and len(results) == 1


# ---- tracking -------------------------------------------------------------------------------------------------------


def wandb_offline(folder):
    """Variables with which nothing is sent, nor written elsewhere."""
    places = ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR")
    return {"WANDB_MODE": "offline", **dict.fromkeys(places, str(folder))}


def read_wandb(folder):
    """History, config and metrics of the only run. Its file has records, each after a checksum, a size and a kind."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, position = path.read_bytes(), 7
    rows, config, metrics = [], {}, {}
    assert len(data) < 32768, "longer files are divided into blocks"
    while position < len(data):
        size = int.from_bytes(data[position + 4 : position + 6], "little")
        message = wandb_internal_pb2.Record.FromString(data[position + 7 : position + 7 + size])
        position += 7 + size
        items = message.history.item
        if items:
            rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
        config.update({item.key: json.loads(item.value_json) for item in message.run.config.update})
        if message.metric.glob_name:
            metrics[message.metric.glob_name] = message.metric.step_metric
    return rows, config, metrics


def check_tensorboard(folder, seen, rates, results):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert len(list(folder.iterdir())) == 1, "one process writes"
    events = EventAccumulator(str(folder)).Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "lr", "epoch", "test_loss", "accuracy"}
    assert [event.step for event in events.Scalars("loss")] == seen
    assert [event.value for event in events.Scalars("lr")] == pytest.approx(rates), "of the steps that were taken"
    assert [event.value for event in events.Scalars("accuracy")] == pytest.approx([right for _, right in results])


@on_processes(*guards(2))
def test_tracking_changes_no_bit_and_the_seed_does():
    options = {"global_batch_size": 128, "lr": 0.05}
    expected, _ = train(**options)
    other, _ = train(**options, seed=4)
    assert not torch.equal(other["first.weight"], expected["first.weight"])
    os.environ.update(wandb_offline(Path.cwd()))
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        state, results = train(**options, wandb=True, tensorboard="runs", data=halves(303, 101, images.Plain))
    images.assert_equal_states(state, expected, 0)
    if dist.is_primary():
        check_tensorboard(Path("runs"), [128, 256, 384, 512], [0.05 * images.rate_of(i / 4) for i in range(4)], results)
        assert sys.modules["wandb"].run is None, "the run is finished before the process ends"
        rows, config, metrics = read_wandb(Path.cwd())
        assert metrics == {"*": "samples"}, "the x-axis"
        assert config["epochs"] == 2 and config["lr"] == 0.05
        assert [row["samples"] for row in rows if "loss" in row] == [128, 256, 384, 512]
        losses = [float(loss) for _, loss in LINE.findall(stdout.getvalue())]
        assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(losses, abs=6e-5)
        tested = [(row["samples"], row["test_loss"], row["accuracy"]) for row in rows if "accuracy" in row]
        assert tested == [(256, *results[0]), (512, *results[1])]


def test_a_tracker_that_cannot_write_says_so_once_and_training_goes_on(capsys):
    tracker = tracking.Tracker("project", argparse.Namespace(wandb=False, tensorboard=None))
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    full = mock.Mock(**{f"{name}.side_effect": error for name in ("log", "add_scalar", "close")})

    def log():
        tracker.log(1, loss=0.5)

    for name, call in (("run", log), ("writer", log), ("writer", tracker.close)):
        setattr(tracker, name, full)
        call()
        call()
        line = r"(W&B|TensorBoard) cannot write \(No space left on device\): .*\n"
        assert re.fullmatch(line, capsys.readouterr().err)
