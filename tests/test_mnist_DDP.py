"""The experiment: gradients accumulated as in one batch, an exact accuracy, artefacts whole, and what is tracked."""

import contextlib
import dataclasses
import errno
import io
import json
import os
import re
import resource
import struct
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import MNIST_ROOT, ROOT, exit_message, needs_mnist, run, torchrun
from images import (
    OPTIMIZERS,
    Net,
    Normed,
    Plain,
    assert_equal_states,
    digits,
    few_digits,
    outputs_of,
    result_of,
    train_alone,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.run import get_args_parser

import distributed as dist
import mnist
import mnist_DDP
from mnist_DDP import Hyperparameters

SCRIPT = "mnist_DDP.py"
FIELDS = dataclasses.fields(Hyperparameters)
TRAIN_LINE = re.compile(r"Train Epoch: (\d+) \[(\d+)/(\d+) \((\d+)%\)\]\tloss=(\d+\.\d{4})")
TEST_LINE = re.compile(r"test_loss=(\d+\.\d{4}) accuracy=(\d\.\d{4}) \((\d+)/(\d+)\)")


def train_worker(local_rank, world_size, hp, output_dir, sizes=(320, 101), model=mnist.SimpleCNN, **options):
    options = {"dtype": torch.float32, **options}
    with few_digits(*sizes, **options), mock.patch("mnist.SimpleCNN", model):
        mnist_DDP.train_mnist(local_rank, world_size, hp, str(output_dir))
    if world_size > 1 and not (hp.wandb or hp.tensorboard):
        assert not {"wandb", "tensorboard", "flytekit"} & sys.modules.keys(), "extras are for who asks for them"


def weights_of(folder):
    return torch.load(Path(folder) / "mnist_cnn.pt", weights_only=True)


def accuracies_of(folder):
    return json.loads((Path(folder) / "mnist_cnn_accuracies.json").read_text())


# ---- the command ----------------------------------------------------------------------------------------------------


def check_output(stdout, epochs, size=20_000, global_batch=128):
    """One process prints; returns the accuracies."""
    lines = stdout.splitlines()
    assert lines[0] == f"Training on 2 x cpu, global batch {global_batch}"
    trained = [match.groups() for match in map(TRAIN_LINE.fullmatch, lines) if match]
    tested = [match.groups() for match in map(TEST_LINE.fullmatch, lines) if match]
    assert len(lines) == 1 + len(trained) + len(tested), stdout
    seen = [*range(100 * global_batch, size, 100 * global_batch), size]
    assert [(int(epoch), int(n)) for epoch, n, *_ in trained] == [(e + 1, n) for e in range(epochs) for n in seen]
    assert all(int(of) == size and percent == f"{100 * int(n) / size:.0f}" for _, n, of, percent, _ in trained)
    assert all(n == "10000" and accuracy == f"{int(hits) / 10_000:.4f}" for _, accuracy, hits, n in tested)
    assert len(tested) == epochs
    assert float(trained[0][-1]) > 2 * float(trained[-1][-1])
    return [int(hits) / 10_000 for _, _, hits, _ in tested]


@pytest.mark.slow
def test_the_command_tracked(tmp_path):
    options = ("--epochs", 1, "--wandb", "--tensorboard", tmp_path / "runs", "--output-dir", tmp_path / "results")
    status, stdout, stderr = run(SCRIPT, *options, env=wandb_offline(tmp_path))
    assert status == 0, stderr
    accuracies = check_output(stdout, 1)
    assert accuracies[0] > 0.95
    assert accuracies_of(tmp_path / "results") == accuracies
    net = mnist.SimpleCNN()
    net.load_state_dict(weights_of(tmp_path / "results"))
    test_set = mnist.load_data("synthetic", "", train=False)
    assert result_of(net, test_set)[1] == round(accuracies[0] * 10_000)
    losses = [float(line[-1]) for line in TRAIN_LINE.findall(stdout)]
    check_wandb(tmp_path, net, test_set, [12_800, 20_000], losses, accuracies)
    check_tensorboard(tmp_path / "runs", [12_800, 20_000], accuracies)


def check_wandb(folder, net, test_set, seen, losses, accuracies):
    """The history, the gradients of every layer, the configuration, and the table of the last epoch."""
    rows, config, tables = read_wandb(folder)
    assert config["epochs"] == len(accuracies) and config["lr"] == 0.05
    logged = [row for row in rows if "loss" in row]
    assert [row["samples"] for row in logged] == seen
    assert [row["loss"] for row in logged] == pytest.approx(losses, abs=6e-5)
    gradients = {key.rpartition(".")[0] for row in logged for key in row if key.startswith("gradients/")}
    assert gradients == {f"gradients/{name}" for name, _ in net.named_parameters()}
    tested = [row for row in rows if "accuracy" in row]
    assert [row["accuracy"] for row in tested] == accuracies and tested[-1]["samples"] == seen[-1]
    assert all(row["test_loss"] > 0 for row in tested)

    n = min(320, len(test_set))
    assert [len(table["data"]) for table in tables] == [n] * len(accuracies), "no more than there are"
    assert tables[-1]["columns"] == ["image", "guess", "truth", *(f"score_{digit}" for digit in range(10))]
    scores = outputs_of(net.eval(), test_set)[:n].softmax(dim=1)
    for (image, guess, truth, *row), label, expected in zip(tables[-1]["data"], test_set.labels, scores, strict=False):
        assert image["_type"] == "image-file" and (image["width"], image["height"]) == (28, 28)
        assert truth == label and row[guess] == max(row)
        assert (torch.tensor(row) - expected).abs().max() < 1e-4


def check_tensorboard(folder, seen, accuracies):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert len(list(folder.iterdir())) == 1, "one process writes"
    events = EventAccumulator(str(folder)).Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "epoch", "test_loss", "accuracy"}
    assert [event.step for event in events.Scalars("loss")] == seen
    assert [event.value for event in events.Scalars("accuracy")] == pytest.approx(accuracies)
    assert events.Images("test_images")[-1].step == seen[-1] and events.Images("test_images")[-1].width > 28


def wandb_offline(folder):
    """Variables with which nothing is sent, nor written elsewhere."""
    places = ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR")
    return {"WANDB_MODE": "offline", **dict.fromkeys(places, str(folder))}


def read_wandb(folder):
    """History, config and tables of the only run there, whose file is a LevelDB log: records in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, position, record = path.read_bytes(), 7, b""
    rows, config, tables = [], {}, []
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
            files = {file.path: file.local_path for file in message.artifact.manifest.contents}
            if "test_predictions.table.json" in files:
                table = json.loads(Path(files["test_predictions.table.json"]).read_text())
                assert {row[0]["path"] for row in table["data"]} < files.keys(), "the images are there"
                tables.append(table)
    return rows, config, tables


@pytest.mark.slow
def test_the_same_under_torchrun(tmp_path):
    options = ("--grad_accumulation", 2, "--epochs", 2, "--output_dir", tmp_path, "--amp")
    status, stdout, stderr = torchrun(2, SCRIPT, *options)
    assert status == 0, stderr
    assert accuracies_of(tmp_path) == check_output(stdout, 2, global_batch=256)
    assert accuracies_of(tmp_path)[-1] > 0.97


@needs_mnist
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_mnist(tmp_path):
    environment = {"BENCHMARK_RESULTS": str(tmp_path)}
    command = ("-m", "benchmarks.mnist_accuracy", "--data-dir", MNIST_ROOT)
    status, _, stderr = run(*command, timeout=880, env=environment)
    assert status == 0, stderr
    check_record(tmp_path / "mnist_accuracy.json")


def test_the_stored_log_is_of_these_defaults():
    check_record(ROOT / "benchmarks" / "results" / "mnist_accuracy.json")


def check_record(path):
    record = json.loads(path.read_text())
    defaults = dataclasses.asdict(Hyperparameters(data="mnist"))
    del defaults["data_dir"]
    assert record["hyperparameters"] == defaults and record["processes"] == 2 and defaults["batch_size"] == 64
    assert record["versions"]["torch"] and record["machine"]["cores"]
    accuracies = check_output("\n".join(record["log"]), 5, size=60_000)
    assert accuracies == record["accuracies"]
    assert accuracies[0] >= 0.98 and max(accuracies) >= 0.99


# ---- options --------------------------------------------------------------------------------------------------------


def parse(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", [SCRIPT, *map(str, options)])
    return mnist_DDP.parse_args()


def test_the_hyperparameters_are_the_command_line(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    hp, args = parse(monkeypatch)
    assert hp == Hyperparameters()
    assert (args.nproc, args.output_dir) == (2, ".")
    given = {"backend": "gloo", "amp": True, "wandb": True, "tensorboard": "runs", "data": "mnist", "data_dir": "there"}
    for field in FIELDS:
        given.setdefault(field.name, 0.5 if field.type is float else 7)
    for spelling in (str, lambda name: name.replace("_", "-")):
        options = []
        for name, value in given.items():
            options += [f"--{spelling(name)}"] if value is True else [f"--{spelling(name)}", value]
        hp, _ = parse(monkeypatch, *options)
        assert dataclasses.asdict(hp) == given


@pytest.mark.parametrize("name", [field.name for field in FIELDS] + ["output_dir"])
def test_torchrun_leaves_the_options_to_the_script(name):
    for option in (f"--{name}", f"--{name.replace('_', '-')}"):
        args = get_args_parser().parse_args(["--standalone", SCRIPT, option, "7"])
        assert args.training_script_args == [option, "7"]


@pytest.mark.parametrize(
    "wrong",
    [{"epochs": 0}, {"lr": float("nan")}, {"momentum": 1.0}, {"backend": "mpi"}, {"seed": -1}, {"batch_size": 1.5}],
)
def test_wrong_hyperparameters_are_refused_without_a_command_line_too(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: "):
        Hyperparameters(**wrong)


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
@pytest.mark.parametrize("found", [None, "a folder"])
def test_a_missing_package_is_one_line(package, found, main_of, monkeypatch, tmp_path):
    spec = ModuleSpec(package, None) if found else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    options = ["--wandb"] if package == "wandb" else ["--tensorboard", str(tmp_path)]
    message = f"--{package}: {package} is not installed: pip install -r requirements-tracking.txt"
    assert main_of(SCRIPT, *options) == (message, "")


@pytest.mark.slow
def test_without_an_account_it_is_one_line(tmp_path):
    environment = {**wandb_offline(tmp_path), "WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path)}
    status, _, stderr = run(SCRIPT, "--wandb", "--output-dir", tmp_path, env=environment)
    assert status == 1 and "Traceback" not in stderr
    assert stderr.splitlines()[-1].startswith("--wandb: ") and "WANDB_MODE=offline" in stderr.splitlines()[-1], stderr


# ---- training -------------------------------------------------------------------------------------------------------

RATES = {"sgd": 0.01, "adam": 0.003}
CASES = [(name, accumulation) for name in RATES for accumulation in (1, 3)]


def hyperparameters(name, accumulation, **changes):
    values = {"batch_size": 12 // accumulation, "grad_accumulation": accumulation, "lr": RATES[name]}
    return Hyperparameters(**{**values, "epochs": 3, "test_batch_size": 11, "log_interval": 1, "seed": 3, **changes})


def cases_worker(local_rank, world_size, folder):
    """Train in float64; record what was printed, drawn, sent and waited for. The last case prints less."""
    cases = [(f"{name}-{k}", name, hyperparameters(name, k)) for name, k in CASES]
    for case, name, hp in [*cases, ("rare", "sgd", hyperparameters("sgd", 1, log_interval=100))]:
        sent, waits, prepare = [], [], dist.prepare_ddp_model
        stdout = io.StringIO()
        Net.drawn.clear()

        def count_all_reduces(group, bucket, sent=sent):
            sent.append(bucket.buffer().numel())
            return allreduce_hook(group, bucket)

        def prepare_and_count(model, prepare=prepare, hook=count_all_reduces, **kwargs):
            model = prepare(model, **kwargs)
            if world_size > 1:
                model.register_comm_hook(None, hook)
            return model

        def counted(name, waits=waits):
            function = getattr(torch.Tensor, name)
            return mock.patch.object(torch.Tensor, name, lambda self: waits.append(name) or function(self))

        os.makedirs(f"{folder}/{case}", exist_ok=True)
        with (
            mock.patch("distributed.prepare_ddp_model", prepare_and_count),
            mock.patch("torch.optim.SGD", OPTIMIZERS[name]) if name != "sgd" else contextlib.nullcontext(),
            counted("item"),
            counted("tolist"),
            contextlib.redirect_stdout(stdout),
        ):
            options = {"model": Net, "dtype": torch.float64, **({"kind": Plain} if case == "rare" else {})}
            train_worker(local_rank, world_size, hp, f"{folder}/{case}", (300, 101), **options)
        torch.save((sent, waits, stdout.getvalue(), torch.stack(Net.drawn)), f"{folder}/{case}/{local_rank}.pt")


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_equals_one_process(nprocs, tmp_path):
    """300 samples in groups of 12 per process, the last one smaller; with 4 processes, one more than divides evenly."""
    dist.launch(cases_worker, str(tmp_path), nprocs=nprocs)
    for name, lr in RATES.items():
        reference = {"first_epoch": 1, "anneal": True, "ranks": nprocs}
        state, losses, tests = train_alone(OPTIMIZERS[name], [lr] * 3, (300, 101), 12 * nprocs, **reference)
        steps = len(losses) // 3
        for case in [f"{name}-{k}" for _, k in CASES] + ["rare"] * (name == "sgd"):
            assert_equal_states(weights_of(tmp_path / case), state)
            assert accuracies_of(tmp_path / case) == [hits / n for _, hits, n in tests]
            ranks = [torch.load(tmp_path / case / f"{rank}.pt", weights_only=True) for rank in range(nprocs)]
            sent, waits, stdout, _ = ranks[0]
            assert not any(output for _, _, output, _ in ranks[1:]), "rank 0 alone prints"
            if nprocs > 1:
                assert sent == [19_090] * len(losses), "one bucket of all gradients, once per step"
            drawn = torch.cat([numbers for *_, numbers in ranks]).tolist()
            assert len(set(drawn)) == len(drawn) >= nprocs * len(losses), "dropout differs between ranks and steps"

            trained = [(int(seen), float(loss)) for _, seen, _, _, loss in TRAIN_LINE.findall(stdout)]
            if case == "rare":
                epochs = [losses[i * steps : (i + 1) * steps] for i in range(3)]
                means = [sum(loss * n for loss, n in epoch) / sum(n for _, n in epoch) for epoch in epochs]
                assert [loss for _, loss in trained] == pytest.approx(means, abs=6e-5)
                assert len(waits) <= 15, "a few per epoch, none per step"
            else:
                assert [loss for _, loss in trained] == pytest.approx([loss for loss, _ in losses], abs=6e-5)
                assert [seen for seen, _ in trained] == [min(12 * nprocs * (i + 1), 300) for i in range(steps)] * 3
                assert len(waits) <= len(losses) + 15, "a wait per line, here per step"
            tested = [(float(loss), int(hits), int(n)) for loss, _, hits, n in TEST_LINE.findall(stdout)]
            assert [counts for _, *counts in tested] == [counts for _, *counts in tests], "each sample once"
            assert [loss for loss, *_ in tested] == pytest.approx([loss for loss, *_ in tests], abs=6e-5)


def more_worker(local_rank, world_size, folder):
    """Batch norm, and what the seed and the tracking decide."""
    tracking = {"log_interval": 1, "wandb": True, "tensorboard": f"{folder}/runs"}
    runs = {
        "normed": (Hyperparameters(epochs=2, batch_size=8, test_batch_size=5, lr=0.01), {"model": Normed}),
        "first": (Hyperparameters(epochs=2), {}),
        "other": (Hyperparameters(epochs=2, seed=1), {}),
        "tracked": (Hyperparameters(epochs=2, **tracking), {"kind": Plain}),
    }
    for name, (hp, options) in runs.items():
        os.makedirs(f"{folder}/{name}", exist_ok=True)
        train_worker(local_rank, world_size, hp, f"{folder}/{name}", **options)


def test_batch_norm_the_seed_and_tracking(tmp_path, monkeypatch, capfd):
    for name, value in wandb_offline(tmp_path).items():
        monkeypatch.setenv(name, value)
    dist.launch(more_worker, str(tmp_path), nprocs=2)

    net = Normed()
    net.load_state_dict(weights_of(tmp_path / "normed"))
    accuracies = accuracies_of(tmp_path / "normed")
    assert len(accuracies) == 2 and accuracies[-1] == result_of(net, digits(101))[1] / 101 > 0.3
    assert {path.name for path in (tmp_path / "normed").iterdir()} == {"mnist_cnn.pt", "mnist_cnn_accuracies.json"}

    first, tracked, other = ((tmp_path / name / "mnist_cnn.pt").read_bytes() for name in ("first", "tracked", "other"))
    assert first == tracked != other, "also with a data set that has no whole batches"
    net = mnist.SimpleCNN()
    net.load_state_dict(weights_of(tmp_path / "tracked"))
    accuracies = accuracies_of(tmp_path / "tracked")
    losses = [float(line[-1]) for line in TRAIN_LINE.findall(capfd.readouterr().out)][-6:]
    check_wandb(tmp_path, net, digits(101), [128, 256, 320, 448, 576, 640], losses, accuracies)
    check_tensorboard(tmp_path / "runs", [128, 256, 320, 448, 576, 640], accuracies)


def test_amp_and_the_backend_reach_where_they_count(tmp_path):
    seen, forward = [], mnist.forward
    with (
        mock.patch("mnist.forward", lambda *args: seen.append(args[4]) or forward(*args)),
        mock.patch("distributed.init_process_group") as init,
    ):
        train_worker(0, 1, Hyperparameters(epochs=1, amp=True, backend="gloo"), tmp_path)
    assert seen == [True] * (5 + 1) and init.mock_calls == [mock.call(backend="gloo")]


# ---- artefacts ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread
def test_a_full_disk_for_the_tracking_is_one_line_and_the_results_are_saved(tmp_path):
    close, (soft, hard) = mnist_DDP.Tracker.close, resource.getrlimit(resource.RLIMIT_FSIZE)

    def close_on_a_full_disk(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            close(self)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    hp = Hyperparameters(epochs=2, tensorboard=str(tmp_path / "runs"))
    with mock.patch("mnist_DDP.Tracker.close", close_on_a_full_disk):
        message = exit_message(train_worker, 0, 1, hp, tmp_path)
    assert message == f"--tensorboard: cannot write to {tmp_path / 'runs'}: File too large"
    assert len(accuracies_of(tmp_path)) == 2 and weights_of(tmp_path)


def test_a_folder_that_is_gone_at_the_end_is_one_line(tmp_path, capfd):
    message = exit_message(dist.launch, train_worker, Hyperparameters(epochs=2), tmp_path / "gone", nprocs=2)
    assert message.startswith(f"cannot save {tmp_path / 'gone'}/mnist_cnn") and "No such file" in message
    assert len(TEST_LINE.findall(capfd.readouterr().out)) == 2, "the accuracies are known"


FILES = ("mnist_cnn.pt", "mnist_cnn_accuracies.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("moment", ["write", "fsync"])
def test_both_files_are_written_or_neither(name, moment, tmp_path, monkeypatch):
    """Whichever of the two meets a full disk, and whenever it does."""
    for old in FILES:
        (tmp_path / old).write_text("old")
    temporary, fsync = tmp_path / f"{name}.0.tmp", os.fsync

    def fsync_full(descriptor):
        if os.path.realpath(f"/proc/self/fd/{descriptor}") == str(temporary):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    if moment == "write":  # which a few bytes learn of when they are flushed
        temporary.symlink_to("/dev/full")
    else:
        monkeypatch.setattr(os, "fsync", fsync_full)
    message = exit_message(mnist_DDP.save, tmp_path, mnist.SimpleCNN(), [0.5])
    assert message.startswith(f"cannot save {tmp_path / name}") and "No space left on device" in message
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(FILES, "old")
