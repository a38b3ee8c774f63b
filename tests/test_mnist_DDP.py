"""The experiment: any number of processes equals one, a killed run resumes exactly, results are whole and tracked."""

import argparse
import contextlib
import errno
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import signal
import struct
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest import mock

import images
import numpy as np
import pytest
import torch
from conftest import MNIST_ROOT, Left, Watch, exit_message, float64, guards, leaving_is_an_error, needs_mnist, run
from images import (
    OPTIMIZERS,
    Net,
    Normed,
    Plain,
    Typed,
    assert_equal_states,
    check_forward,
    check_full_disk,
    digits,
    halves,
    host_reads,
    result_of,
    write_mnist,
)
from PIL import Image
from torch.distributed.run import get_args_parser
from torch.multiprocessing import ProcessExitedException

import distributed as dist
import mnist
import mnist_DDP
import spawn
import tracking

SCRIPT = "mnist_DDP.py"
DEFAULTS = vars(mnist_DDP.make_parser("").parse_args([]))
TRAIN_LINE = re.compile(r"step (\d+)/(\d+) \| loss (\d+\.\d{4})")
TEST_LINE = re.compile(r"epoch (\d+)/(\d+) \| held-out (\d+\.\d{4}) \| accuracy (\d\.\d{4}) \((\d+)/(\d+)\)")


def settings(**changes):
    assert changes.keys() <= DEFAULTS.keys()
    return argparse.Namespace(**{**DEFAULTS, **changes})


def train(hp, folder, model=mnist.SimpleCNN, data=None, make_optimizer=mnist_DDP.make_optimizer, snapshot_path=None):
    """The script's own `run`, on a few samples."""
    dist.init_process_group()
    places = {"output": f"{folder}/mnist_cnn.pt", "snapshot_path": snapshot_path}
    args = argparse.Namespace(**vars(hp), **places)
    mnist_DDP.run(args, data or halves(320, 101), lambda train_set, args: model(), make_optimizer)
    if dist.get_world_size() > 1 and not (hp.wandb or hp.tensorboard):
        assert not {"wandb", "tensorboard", "flytekit"} & sys.modules.keys(), "extras are for who asks for them"


@float64()
def train_exactly(hp, folder, model=Net, kind=lambda whole: whole, **options):
    """In float64, on 300 and 101 samples."""
    train(hp, folder, model, halves(*SIZES, kind), **options)


def acting(build, at, act, training_only=False):
    """Builds a model that calls `act` in its `at`-th forward pass."""
    calls = itertools.count(1)

    def before(net, inputs):
        if (net.training or not training_only) and next(calls) == at:
            act()

    def make():
        net = build()
        net.register_forward_pre_hook(before)
        return net

    return make


def weights_of(folder):
    return torch.load(Path(folder) / "mnist_cnn.pt", weights_only=True)


def accuracies_of(folder):
    return json.loads((Path(folder) / "mnist_cnn_accuracies.json").read_text())


def losses_of(folder):
    return json.loads((Path(folder) / "mnist_cnn_losses.json").read_text())


# ---- the command ----------------------------------------------------------------------------------------------------


def check_wandb(folder, seen, losses, accuracies):
    """The history and the configuration."""
    rows, config, metrics = read_wandb(folder)
    assert metrics == {"*": "samples"}, "the x-axis"
    assert config["epochs"] == len(accuracies) and config["lr"] == 0.05
    logged = [row for row in rows if "loss" in row]
    assert [row["samples"] for row in logged] == seen
    assert [row["loss"] for row in logged] == pytest.approx(losses, abs=6e-5)
    tested = [row for row in rows if "accuracy" in row]
    assert [row["accuracy"] for row in tested] == accuracies and tested[-1]["samples"] == seen[-1]
    assert all(row["test_loss"] > 0 for row in tested)


def check_tensorboard(folder, seen, accuracies):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert len(list(folder.iterdir())) == 1, "one process writes"
    events = EventAccumulator(str(folder)).Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "lr", "epoch", "test_loss", "accuracy"}
    assert [event.step for event in events.Scalars("loss")] == seen
    assert [event.value for event in events.Scalars("accuracy")] == pytest.approx(accuracies)


def wandb_offline(folder):
    """Variables with which nothing is sent, nor written elsewhere."""
    places = ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR")
    return {"WANDB_MODE": "offline", **dict.fromkeys(places, str(folder))}


def read_wandb(folder):
    """History, config and metrics of the only run.

    A run's file is a LevelDB log: records in blocks of 32 KiB.
    """
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, position, record = path.read_bytes(), 7, b""
    rows, config, metrics = [], {}, {}
    while position < len(data):
        left = 32768 - position % 32768
        if left < 7:  # the rest of a block that has no room for a header
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # the whole of a record, or its end
            message = wandb_internal_pb2.Record.FromString(record)
            record = b""
            items = message.history.item
            if items:
                rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
            config.update({item.key: json.loads(item.value_json) for item in message.run.config.update})
            if message.metric.glob_name:
                metrics[message.metric.glob_name] = message.metric.step_metric
    return rows, config, metrics


@needs_mnist
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_mnist(tmp_path):
    environment = {"BENCHMARK_RESULTS": str(tmp_path)}
    command = ("-m", "benchmarks.mnist_accuracy", "--data-dir", MNIST_ROOT)
    status, _, stderr = run(*command, timeout=880, env=environment)
    assert status == 0, stderr
    record = json.loads((tmp_path / "mnist_accuracy.json").read_text())
    assert record["accuracies"][0] >= 0.98 and max(record["accuracies"]) >= 0.99


# ---- options --------------------------------------------------------------------------------------------------------


def test_the_options_are_what_the_experiment_gets(tmp_path):
    places = ["--output", str(tmp_path / "model.pt"), "--snapshot-path", str(tmp_path / "snapshot.pt")]
    given = {"data": "mnist", "data_dir": "there", "bf16": True, "compile": True, "wandb": True}
    given.update(tensorboard=str(tmp_path), lr=0.5, clip=2.5)
    for name in DEFAULTS:
        given.setdefault(name, 7)
    words = []
    for name, value in given.items():
        option = "--" + name.replace("_", "-")
        words += [option] if value is True else [option, str(value)]
    args = vars(mnist_DDP.parse_args([*words, *places]))
    where = {"nproc": 1, "output": str(tmp_path / "model.pt"), "snapshot_path": str(tmp_path / "snapshot.pt")}
    assert args == {**given, **where}
    assert vars(mnist_DDP.parse_args(places)) == {**DEFAULTS, **where}


def test_torchrun_leaves_the_options_to_the_script():
    words = [word for name in [*DEFAULTS, "output", "snapshot_path"] for word in (f"--{name.replace('_', '-')}", "7")]
    assert get_args_parser().parse_args(["--standalone", SCRIPT, *words]).training_script_args == words


@pytest.mark.parametrize(("package", "found"), [("wandb", None), ("tensorboard", "a folder")])
def test_a_missing_package_is_one_line(package, found, main_of, monkeypatch, tmp_path):
    spec = ModuleSpec(package, None) if found else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    options = ["--wandb"] if package == "wandb" else ["--tensorboard", str(tmp_path)]
    message = f"--{package}: {package} is not installed: pip install -r requirements-tracking.txt"
    assert main_of(SCRIPT, *options) == (message, "")


@pytest.mark.slow
def test_without_an_account_it_is_one_line(tmp_path):
    environment = {**wandb_offline(tmp_path), "WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path)}
    status, _, stderr = run(SCRIPT, "--wandb", "--output", tmp_path / "mnist_cnn.pt", env=environment)
    assert status == 1 and "Traceback" not in stderr
    assert stderr.splitlines()[-1].startswith("--wandb: ") and "WANDB_MODE=offline" in stderr.splitlines()[-1], stderr


# ---- training -------------------------------------------------------------------------------------------------------

SIZES = (300, 101)
TRICKS = {"accumulate": 3, "clip": 4.0}


def hyperparameters(name, **changes):
    """13 steps of 22 samples per epoch: 14 samples are left out, and 4 ranks have unequal shares."""
    values = {"global_batch_size": 22, "lr": 0.003 if name == "layerwise" else 0.02, "epochs": 3, "seed": 3}
    return settings(**{**values, "test_batch_size": 11, "log_every": 1, **changes})


def layerwise(net, lr, steps):
    """The optimizer of that name, with the script's schedule. It gets the plain model."""
    assert type(net) is Net
    optimizer = OPTIMIZERS["layerwise"](net.parameters(), lr, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_of(step / steps))


def rate_of(done):
    return (1 + math.cos(math.pi * done)) / 2


CASES = {  # the optimizer, options, and what `run` gets
    "plain": ("sgd", {}, {}),
    "sgd": ("sgd", TRICKS, {}),
    "adamw": ("layerwise", TRICKS, {"make_optimizer": layerwise}),
    "rare": ("sgd", {**TRICKS, "log_every": 100}, {"kind": Plain}),
}


def train_alone(name, hp):
    """Plain PyTorch in one process and float64: weights, loss of every step, result after every epoch."""
    clipped = []
    per_epoch = SIZES[0] // hp.global_batch_size

    def order_of(epoch):
        order = torch.randperm(SIZES[0], generator=torch.Generator().manual_seed(hp.seed + epoch))
        return order[: per_epoch * hp.global_batch_size]

    def before_step(net, optimizer):
        factor = rate_of(len(clipped) / (hp.epochs * per_epoch))
        for group in optimizer.param_groups:
            group.setdefault("initial", group["lr"])
            group["lr"] = group["initial"] * factor
        norm = sum((param.grad**2).sum() for param in net.parameters()).sqrt()
        clipped.append(bool(hp.clip and norm > hp.clip))
        if clipped[-1]:
            for param in net.parameters():
                param.grad *= hp.clip / (norm + 1e-6)  # as torch adds it

    how = {"seed": hp.seed, "order_of": order_of, "before_step": before_step}
    rates = [hp.lr] * hp.epochs
    state, losses, tests = images.train_alone(OPTIMIZERS[name], rates, SIZES, hp.global_batch_size, **how)
    assert not hp.clip or 0 < sum(clipped) < len(clipped), "some steps are clipped"
    return state, [loss for loss, _ in losses], tests


def cases_worker(local_rank, world_size, folder):
    """Of every rank and case: the all-reduces and their bytes, host reads, what was printed, and what was drawn."""
    given = {}
    for case, (name, changes, given_to_run) in CASES.items():
        Net.drawn.clear()
        Net.sizes.clear()
        os.makedirs(f"{folder}/{case}", exist_ok=True)
        hp = hyperparameters(name, **changes)
        with host_reads() as reads, Watch() as watch, contextlib.redirect_stdout(io.StringIO()) as stdout:
            train_exactly(hp, f"{folder}/{case}", **given_to_run)
        smallest = hp.global_batch_size // (world_size * hp.accumulate)
        assert min(Net.sizes) >= smallest, "the first backward too, or a model would be compiled once more for it"
        sent = (watch.counts["c10d.allreduce_"], watch.sent["all-reduce"])
        given[case] = (sent, len(reads), stdout.getvalue(), [*map(float, Net.drawn)])
    return dist.gather_objects(given)


@pytest.mark.guard
@pytest.mark.parametrize("nprocs", [2, *guards(1, 4)])
def test_equals_one_process(nprocs, tmp_path):
    job = dist.launch(cases_worker, str(tmp_path), nprocs=nprocs)
    for case, (name, changes, _) in CASES.items():
        hp = hyperparameters(name, **changes)
        state, losses, tests = train_alone(name, hp)
        assert_equal_states(weights_of(tmp_path / case), state)
        assert accuracies_of(tmp_path / case) == [hits / n for _, hits, n in tests]
        assert losses_of(tmp_path / case) == pytest.approx([loss for loss, _, _ in tests], abs=1e-9)
        ranks = [given[case] for given in job]
        sent, n_reads, stdout, _ = ranks[0]
        assert not any(output for _, _, output, _ in ranks[1:]), "rank 0 alone prints"
        every = 13 if case == "rare" else 1  # steps between lines; an epoch ends with one
        n_lines = len(losses) // every
        if nprocs > 1:
            # All gradients in one bucket, once per step and once before; a number per line; two per evaluation.
            n_steps = 1 + len(losses)
            assert sent == (n_steps + n_lines + 3, 8 * (19_090 * n_steps + n_lines + 3 * 2))
        before = int(nprocs > 1)  # forward passes to arrange DDP's buckets
        drawn = [number for *_, numbers in ranks for number in numbers[before:]]
        assert len(drawn) == nprocs * hp.accumulate * len(losses)
        assert len(set(drawn)) == len(drawn), "dropout differs between ranks, steps and micro-batches"

        trained = [(int(step), float(loss)) for step, _, loss in TRAIN_LINE.findall(stdout)]
        means = [sum(losses[i : i + every]) / every for i in range(0, len(losses), every)]
        assert trained == [(every * (i + 1), pytest.approx(mean, abs=6e-5)) for i, mean in enumerate(means)]
        assert n_reads <= n_lines + 60, "some per line and epoch, none per step"
        tested = [(float(loss), int(hits), int(n)) for _, _, loss, _, hits, n in TEST_LINE.findall(stdout)]
        assert tested == [(pytest.approx(loss, abs=6e-5), *counts) for loss, *counts in tests], "each sample once"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_it_is_the_same(tmp_path):
    hp = hyperparameters("sgd", **{**TRICKS, "epochs": 1, "clip": 8.0, "compile": True})
    dist.launch(compiled_worker, hp, str(tmp_path), nprocs=2)
    assert_equal_states(weights_of(tmp_path), train_alone("sgd", hp)[0])


class Quiet(Net):
    """Net without random numbers, which a compiled model cannot put into a list."""

    def forward(self, x):
        x = self.first(x.flatten(1)).relu()
        if self.training:
            x = 2 * x
        return self.second(x)


def compiled_worker(local_rank, world_size, hp, folder):
    from torch._dynamo.utils import counters

    train_exactly(hp, folder, Quiet)
    assert counters["stats"]["unique_graphs"] > 0, "it was compiled"


# ---- killed and resumed ---------------------------------------------------------------------------------------------


class Noisy(Plain):
    """Noise from torch's random numbers, drawn by whichever process loads a sample."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return (image + torch.randint(20, image.shape, dtype=torch.uint8)).clamp(max=255), label


def killed_worker(local_rank, world_size, at, hp, folder, model, data, exact):
    """Train with snapshots. The last rank is killed in its `at`-th forward pass, in training or in evaluation."""
    if local_rank == world_size - 1:
        model = acting(model, at, partial(signal.raise_signal, signal.SIGKILL))
    with float64() if exact else contextlib.nullcontext():
        train(hp, folder, model, data, snapshot_path=f"{folder}/snapshot.pt")


def train_killed(nprocs, moments, hp, *args):
    """Kill it at these `moments`, and then let it end. `nprocs` is a number per run."""
    for n, at in zip(nprocs, [*moments, None], strict=True):
        work = (killed_worker, at, hp, *args)
        if at is None:
            spawn.run_processes(dist._run_worker, work, n)
        else:
            with pytest.raises(ProcessExitedException, match=f"^rank {n - 1} was killed by SIGKILL$"):
                spawn.run_processes(dist._run_worker, work, n)


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_ten_times_and_resumed_by_other_numbers_of_processes(tmp_path, capfd):
    """The same curve, accuracies and weights as one process has that nobody kills."""
    draw = random.Random(1)
    changes = {**TRICKS, "accumulate": 2, "save_every": 1}
    hp = hyperparameters("sgd", **changes)
    moments = [draw.randint(3, 20) for _ in range(10)]
    nprocs = [1, 2, 3, 2, 1, 3, 3, 1, 2, 3, 2]
    train_killed(nprocs, moments, hp, str(tmp_path), Net, halves(*SIZES), True)
    state, losses, tests = train_alone("sgd", hp)
    assert_equal_states(weights_of(tmp_path), state)
    assert accuracies_of(tmp_path) == [hits / n for _, hits, n in tests]

    stdout = capfd.readouterr().out
    resumed = re.findall(r"Resuming from \S+ at step (\d+)\n", stdout)
    assert len(resumed) >= 9 and len(set(resumed)) > 5, "each run came further"
    curve = {int(step): set() for step, *_ in TRAIN_LINE.findall(stdout)}
    for step, _, loss in TRAIN_LINE.findall(stdout):
        curve[int(step)].add(float(loss))
    assert sorted(curve) == [*range(1, 40)]
    assert [min(curve[where]) for where in sorted(curve)] == pytest.approx(losses, abs=6e-5)
    assert [max(curve[where]) for where in sorted(curve)] == pytest.approx(losses, abs=6e-5)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_killed_and_resumed_it_ends_with_the_same_bits(nprocs, tmp_path, capfd):
    """With batch norm, dropout, augmentation in workers, and printed lines between the snapshots."""
    draw = random.Random(nprocs)
    for folder, moments, num_workers in (("killed", [draw.randint(8, 30) for _ in range(4)], 1), ("whole", [], 0)):
        changes = {**TRICKS, "accumulate": 2, "global_batch_size": 24, "log_every": 3, "save_every": 2}
        hp = hyperparameters("sgd", **{**changes, "num_workers": num_workers})
        (tmp_path / folder).mkdir()
        train_set, test_set = halves(*SIZES)
        data = Noisy(train_set), Plain(test_set)
        train_killed([nprocs] * (1 + len(moments)), moments, hp, str(tmp_path / folder), Normed, data, False)
        lines = {line[:2]: line for line in TRAIN_LINE.findall(capfd.readouterr().out)}
        if folder == "killed":
            killed_lines = lines
    assert killed_lines == lines
    name = "mnist_cnn.pt"
    assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    snapshots = [torch.load(tmp_path / folder / "snapshot.pt", weights_only=True) for folder in ("killed", "whole")]
    killed, whole = (snapshot["optimizer"]["state"] for snapshot in snapshots)
    assert all(torch.equal(killed[i]["momentum_buffer"], whole[i]["momentum_buffer"]) for i in whole)


def test_a_snapshot_of_other_settings_is_refused(tmp_path, capfd):
    path = str(tmp_path / "snapshot.pt")

    def resume(data=halves(*SIZES), **changes):  # noqa: B008
        train(hyperparameters("sgd", **changes), tmp_path, Net, data, snapshot_path=path)

    resume(epochs=1)
    for name, value in {"global_batch_size": 20, "lr": 0.5, "clip": 0.5, "bf16": True, "seed": 7}.items():
        message = exit_message(resume, **{name: value})
        assert (
            message.startswith(f"{path} was saved with --{name.replace('_', '-')} ") and f", not {value}: " in message
        )
    message = exit_message(resume, data=halves(330, 101))
    assert message.startswith(f"{path} was saved with training samples 300, not 330")
    capfd.readouterr()
    resume(epochs=1)
    assert capfd.readouterr().out == f"Resuming from {path} at step 13\n", "all is done: nothing is trained"


def test_a_global_batch_of_too_many_samples_is_refused_or_said(tmp_path, capsys):
    message = exit_message(train, settings(global_batch_size=321), tmp_path)
    assert message == "--global-batch-size 321 is more than all training samples, 320"
    for size, said in ((64, True), (32, False)):
        train(settings(epochs=1, global_batch_size=size), tmp_path)
        assert ("An epoch has only 5 steps: " in capsys.readouterr().out) == said


def test_a_folder_of_images_as_the_comment_says(tmp_path, monkeypatch):
    """Images of three classes in colour and of several sizes: the model gets as many outputs."""
    (comment,) = re.findall(
        r"^    # A folder for each class.*?\n((?:    # .*\n)+)", Path(mnist_DDP.__file__).read_text(), re.M
    )
    load = "def load_datasets(args):\n" + comment.replace("    # ", "    ")
    draw = np.random.default_rng(0)
    for half, name, number in itertools.product(("train", "test"), "abc", range(4)):
        folder = tmp_path / "images" / half / name
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (20 + number, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(load, found)
    args = settings(epochs=1, global_batch_size=4, test_batch_size=5)
    args = argparse.Namespace(**vars(args), output="cnn.pt", snapshot_path=None)
    mnist_DDP.run(args, found["load_datasets"](args))
    assert len(torch.load("cnn.pt", weights_only=True)["fc.bias"]) == 3


class Curious(Net):
    """Notes the step of the snapshot at each forward pass."""

    steps = []  # noqa: RUF012

    def forward(self, x):
        self.steps.append(saved_step("snapshot.pt"))
        return super().forward(x)


def saved_step(path):
    return torch.load(path, weights_only=True)["step"] if os.path.exists(path) else 0


@pytest.mark.parametrize(("save_every", "expected"), [(5, [5, 10, 13, 15, 20, 25, 26]), (13, [13, 26])])
def test_it_saves_after_every_so_many_steps_and_after_each_epoch(save_every, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Curious.steps.clear()
    hp = hyperparameters("sgd", save_every=save_every, log_every=100, epochs=2)
    train(hp, tmp_path, Curious, halves(*SIZES), snapshot_path="snapshot.pt")
    assert sorted({*Curious.steps, saved_step("snapshot.pt")}) == [0, *expected]
    steps = [int(step) for step, *_ in TRAIN_LINE.findall(capsys.readouterr().out)]
    assert steps == expected, "a line before each snapshot, or a resumed run prints another mean"


def preempted(at):
    """Builds a model that gets a SIGTERM in its `at`-th training step."""
    return acting(Net, at, partial(signal.raise_signal, signal.SIGTERM), training_only=True)


@pytest.mark.parametrize(("at", "expected"), [(2, 2), (3, None)])
def test_after_sigterm_in_the_last_step_of_an_epoch_it_leaves_unless_all_is_done(at, expected, tmp_path):
    """Each of the three epochs has one step, after which the epoch is evaluated and saved."""
    path = tmp_path / "snapshot.pt"
    hp = hyperparameters("sgd", global_batch_size=SIZES[0])
    with leaving_is_an_error(), pytest.raises(Left) if expected else contextlib.nullcontext():
        train(hp, tmp_path, preempted(at), halves(*SIZES), snapshot_path=path)
    assert saved_step(path) == (expected or 3)
    assert (tmp_path / "mnist_cnn.pt").exists() == (expected is None)


def test_more_epochs_are_refused_while_steps_are_left(tmp_path, capsys):
    """The learning rate falls over all epochs, so it would jump up."""
    path = tmp_path / "snapshot.pt"

    def resume(epochs, model=Net):
        train(hyperparameters("sgd", epochs=epochs), tmp_path, model, halves(*SIZES), snapshot_path=path)

    with leaving_is_an_error(), pytest.raises(Left):
        resume(2, preempted(2))
    for epochs in (1, 4):
        message = exit_message(resume, epochs)
        assert message.startswith(f"--epochs {epochs}: {path} is at step 2 of 2 epochs"), message
        assert message.endswith("with --epochs 2")
    capsys.readouterr()
    with leaving_is_an_error():
        for epochs, steps in ((2, range(3, 27)), (3, range(27, 40))):  # then it is complete, and may go on
            resume(epochs)
            assert [int(step) for step, *_ in TRAIN_LINE.findall(capsys.readouterr().out)] == [*steps]
            assert len(accuracies_of(tmp_path)) == epochs


class Terminating(Net):
    """In an evaluation it sends SIGTERM to the processes that load, as a scheduler does to all of a job."""

    terminated = []  # noqa: RUF012

    def forward(self, x):
        for loading in [] if self.training else multiprocessing.active_children():
            self.terminated.append(loading.pid)
            os.kill(loading.pid, signal.SIGTERM)
        return super().forward(x)


def test_sigterm_to_the_processes_that_load_does_not_end_an_evaluation(tmp_path):
    train(hyperparameters("sgd", num_workers=1, epochs=1), tmp_path, Terminating, halves(*SIZES))
    assert Terminating.terminated and (tmp_path / "mnist_cnn.pt").exists()


# ---- the rest -------------------------------------------------------------------------------------------------------


def more_worker(local_rank, world_size, folder):
    """Batch norm, and what the seed and the tracking decide."""
    tracking = {"log_every": 1, "wandb": True, "tensorboard": f"{folder}/runs"}
    runs = {
        "normed": (settings(epochs=2, global_batch_size=16, test_batch_size=5, lr=0.01), {"model": Normed}),
        "first": (settings(epochs=2), {}),
        "other": (settings(epochs=2, seed=1), {}),
        "tracked": (settings(epochs=2, **tracking), {"data": halves(320, 101, Plain)}),
    }
    for name, (hp, options) in runs.items():
        os.makedirs(f"{folder}/{name}", exist_ok=True)
        train(hp, f"{folder}/{name}", **options)
    if local_rank == 0:
        assert sys.modules["wandb"].run is None, "the run is finished before the process ends"


@pytest.mark.guard
@pytest.mark.slow
def test_batch_norm_the_seed_and_tracking(tmp_path, monkeypatch, capfd):
    for name, value in wandb_offline(tmp_path).items():
        monkeypatch.setenv(name, value)
    dist.launch(more_worker, str(tmp_path), nprocs=2)

    net = Normed()
    net.load_state_dict(weights_of(tmp_path / "normed"))
    accuracies = accuracies_of(tmp_path / "normed")
    assert len(accuracies) == 2 and accuracies[-1] == result_of(net, digits(101))[1] / 101 > 0.3
    assert {path.name for path in (tmp_path / "normed").iterdir()} == {
        f"mnist_cnn{end}" for end in (".pt", "_accuracies.json", "_losses.json")
    }

    first, tracked, other = ((tmp_path / name / "mnist_cnn.pt").read_bytes() for name in ("first", "tracked", "other"))
    assert first == tracked != other, "also with a data set that has no whole batches"
    accuracies = accuracies_of(tmp_path / "tracked")
    losses = [float(line[-1]) for line in TRAIN_LINE.findall(capfd.readouterr().out)][-4:]
    check_wandb(tmp_path, [128, 256, 384, 512], losses, accuracies)
    check_tensorboard(tmp_path / "runs", [128, 256, 384, 512], accuracies)


def test_bf16_reaches_where_it_counts(tmp_path):
    """In two steps and an evaluation."""
    check_forward(mnist_DDP.forward)
    for bf16, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        Typed.types.clear()
        train(settings(epochs=1, bf16=bf16), tmp_path, Typed)
        assert Typed.types == [dtype] * 3


def test_the_command_trains_the_model_and_the_data_of_its_options(job_of, tmp_path):
    write_mnist(tmp_path, 320, 101)
    words = ("--data", "mnist", "--data-dir", tmp_path, "--epochs", 1, "--seed", 3)
    stdout = job_of(SCRIPT, *words, "--output", tmp_path / "command.pt")
    assert stdout.startswith("Training on 1 x cpu, global batch 128\n")
    train(settings(epochs=1, seed=3), tmp_path)
    for end in (".pt", "_losses.json"):  # these losses are of the test
        assert (tmp_path / f"command{end}").read_bytes() == (tmp_path / f"mnist_cnn{end}").read_bytes()


# ---- tracking -------------------------------------------------------------------------------------------------------


def test_a_tracker_that_cannot_write_says_so_once_and_training_goes_on(capsys):
    tracker = tracking.Tracker("project", argparse.Namespace(wandb=False, tensorboard=None))
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    full = mock.Mock(**{f"{name}.side_effect": error for name in ("log", "add_scalar", "add_images", "close")})

    def log():
        tracker.log(1, loss=0.5)

    for name, call in (("run", log), ("writer", log), ("writer", tracker.close)):
        setattr(tracker, name, full)
        call()
        call()
        line = r"(W&B|TensorBoard) cannot write \(No space left on device\): .*\n"
        assert re.fullmatch(line, capsys.readouterr().err)


def test_tensorboard_alone(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    hp = settings(epochs=1, log_every=1, tensorboard=str(tmp_path / "runs"))
    train(hp, tmp_path)
    check_tensorboard(tmp_path / "runs", [128, 256], accuracies_of(tmp_path))
    rates = [event.value for event in EventAccumulator(str(tmp_path / "runs")).Reload().Scalars("lr")]
    assert rates == pytest.approx([hp.lr, hp.lr / 2]), "those of the steps that were taken"


# ---- results --------------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_file(tmp_path, capfd):
    check_full_disk(tmp_path / "mnist_cnn.pt", train, settings(epochs=1), tmp_path)
    assert len(TEST_LINE.findall(capfd.readouterr().out)) == 1, "the accuracy is known"
