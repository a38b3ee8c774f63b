"""The experiment: gradients accumulated as in one batch, an exact accuracy, artefacts whole, and what is tracked."""

import contextlib
import dataclasses
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
from conftest import ROOT, finish, run, start, torchrun
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.run import get_args_parser

import distributed as dist
import mnist
import mnist_DDP
from mnist_DDP import Hyperparameters

SCRIPT = "mnist_DDP.py"
MNIST_ROOT = os.environ.get("MNIST_ROOT")
FIELDS = dataclasses.fields(Hyperparameters)
TRAIN_LINE = re.compile(r"Train Epoch: (\d+) \[(\d+)/(\d+) \((\d+)%\)\]\tloss=(\d+\.\d{4})")
TEST_LINE = re.compile(r"test_loss=\d+\.\d{4} accuracy=(\d\.\d{4}) \((\d+)/(\d+)\)")


def digits(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (n,), generator=generator)
    images = torch.randint(256, (n, 1, 28, 28), generator=generator, dtype=torch.uint8)
    images[torch.arange(n), 0, labels] = 255  # what is to be learnt: a white row
    return mnist.Digits(images, labels)


def few_digits(train_size, test_size):
    return mock.patch("mnist.load_data", lambda *_, train, seed: digits(train_size if train else test_size, int(train)))


def train_worker(local_rank, world_size, hp, output_dir, sizes=(320, 101)):
    with few_digits(*sizes):
        mnist_DDP.train_mnist(local_rank, world_size, hp, str(output_dir))
    if world_size > 1 and not (hp.wandb or hp.tensorboard):
        assert not {"wandb", "tensorboard", "flytekit"} & sys.modules.keys(), "extras are for who asks for them"


def weights_of(folder):
    return torch.load(folder / "mnist_cnn.pt", weights_only=True)


def accuracies_of(folder):
    return json.loads((folder / "mnist_cnn_accuracies.json").read_text())


def hits_of(net, dataset):
    with torch.no_grad():
        outputs = [net(mnist.normalize(images)) for images in dataset.images.split(1000)]
    return (torch.cat(outputs).argmax(dim=1) == dataset.labels).sum().item()


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
    assert all(n == "10000" and accuracy == f"{int(hits) / 10_000:.4f}" for accuracy, hits, n in tested)
    assert len(tested) == epochs
    assert float(trained[0][-1]) > 2 * float(trained[-1][-1])
    return [int(hits) / 10_000 for _, hits, _ in tested]


def test_the_command_tracked(tmp_path):
    options = ("--epochs", 1, "--wandb", "--tensorboard", tmp_path / "runs", "--output-dir", tmp_path / "results")
    status, stdout, stderr = run(SCRIPT, *options, env=wandb_offline(tmp_path))
    assert status == 0, stderr
    accuracies = check_output(stdout, 1)
    assert accuracies[0] > 0.95
    assert accuracies_of(tmp_path / "results") == accuracies
    net = mnist.SimpleCNN()
    net.load_state_dict(weights_of(tmp_path / "results"))
    assert hits_of(net, mnist.load_data("synthetic", "", train=False)) == accuracies[0] * 10_000

    rows, config, (table,) = read_wandb(tmp_path)
    assert config["epochs"] == 1 and config["lr"] == 0.05
    losses = [row for row in rows if "loss" in row]
    assert [(row["epoch"], row["samples"]) for row in losses] == [(1, 12_800), (1, 20_000)]
    assert [f"{row['loss']:.4f}" for row in losses] == [line[-1] for line in TRAIN_LINE.findall(stdout)]
    gradients = {key.rpartition(".")[0] for key in losses[0] if key.startswith("gradients/")}
    assert gradients == {f"gradients/{name}" for name, _ in net.named_parameters()}
    (tested,) = (row for row in rows if "accuracy" in row)
    assert tested["accuracy"] == accuracies[0] and tested["samples"] == 20_000 and tested["test_loss"] > 0
    check_table(table, net)
    check_tensorboard(tmp_path / "runs", accuracies)


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


def check_table(table, net):
    assert table["columns"] == ["image", "guess", "truth", *(f"score_{digit}" for digit in range(10))]
    assert len(table["data"]) == 320
    test_set = mnist.load_data("synthetic", "", train=False)
    with torch.no_grad():
        scores = net(mnist.normalize(test_set.images[:320])).softmax(dim=1)
    for (image, guess, truth, *row), label, expected in zip(table["data"], test_set.labels, scores, strict=False):
        assert image["_type"] == "image-file" and (image["width"], image["height"]) == (28, 28)
        assert truth == label and row[guess] == max(row)
        assert (torch.tensor(row) - expected).abs().max() < 1e-4


def check_tensorboard(folder, accuracies):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert len(list(folder.iterdir())) == 1, "one process writes"
    events = EventAccumulator(str(folder)).Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "epoch", "test_loss", "accuracy"}
    assert [event.step for event in events.Scalars("loss")] == [12_800, 20_000]
    assert [event.value for event in events.Scalars("accuracy")] == pytest.approx(accuracies)
    (images,) = events.Images("test_images")
    assert images.step == 20_000 and images.width > 28


@pytest.mark.slow
def test_the_same_under_torchrun(tmp_path):
    options = ("--grad_accumulation", 2, "--epochs", 2, "--output_dir", tmp_path, "--amp")
    status, stdout, stderr = torchrun(2, SCRIPT, *options)
    assert status == 0, stderr
    assert accuracies_of(tmp_path) == check_output(stdout, 2, global_batch=256)
    assert accuracies_of(tmp_path)[-1] > 0.97


@pytest.mark.skipif(not MNIST_ROOT, reason="MNIST_ROOT does not say where MNIST is")
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


def test_help_shows_every_default(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(monkeypatch, "--help")
    text = " ".join(capsys.readouterr().out.split())
    for field in FIELDS:
        name = field.name.replace("_", "-")
        assert re.search(rf"--{name}\b[^()]*(\([^()]*\)[^()]*)?\(default: {re.escape(str(field.default))}\)", text), (
            name
        )


@pytest.mark.parametrize("name", [field.name for field in FIELDS] + ["output_dir"])
def test_torchrun_leaves_the_options_to_the_script(name):
    for option in (f"--{name}", f"--{name.replace('_', '-')}"):
        args = get_args_parser().parse_args(["--standalone", SCRIPT, option, "7"])
        assert args.training_script_args == [option, "7"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--epochs", "0"), "argument --epochs: '0' is not a whole number of at least 1"),
        (("--batch_size", "x"), "argument --batch-size/--batch_size: 'x' is not a whole number of at least 1"),
        (("--momentum", "1"), "argument --momentum: '1' is not a number from 0 to below 1"),
        (("--momentum", "nan"), "argument --momentum: 'nan' is not a number from 0 to below 1"),
        (("--lr", "-1"), "argument --lr: '-1' is not a finite number above 0"),
        (("--seed", "x"), "argument --seed: invalid int value: 'x'"),
        (("--grad-accumulation", "0"), "argument --grad-accumulation/--grad_accumulation: '0' is not a whole number"),
        (("--log-interval", "0"), "argument --log-interval/--log_interval: '0' is not a whole number of at least 1"),
        (("--backend", "mpi"), "argument --backend: invalid choice: 'mpi'"),
        (("--backend", "nccl"), "argument --backend: 'nccl' needs a GPU, and none is visible: choose auto or gloo"),
        (("--data", "cifar"), "argument --data: invalid choice: 'cifar'"),
        (("--nproc", "0"), "argument --nproc: '0' is not a whole number of at least 1"),
    ],
)
def test_a_wrong_option_is_one_line(main_of, options, message):
    code, stderr = main_of(SCRIPT, *options)
    assert code == 2 and len(stderr.splitlines()) == 1
    assert stderr.startswith(f"{SCRIPT}: error: {message}")


def test_more_processes_than_visible_gpus(main_of, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    message = "argument --nproc: 3 is not in the range 1 to 2, the number of visible GPUs"
    assert main_of(SCRIPT, "--nproc", "3") == (2, f"{SCRIPT}: error: {message}\n")


@pytest.mark.parametrize(
    "wrong",
    [{"epochs": 0}, {"lr": float("nan")}, {"momentum": 1.0}, {"backend": "mpi"}, {"seed": "x"}, {"batch_size": 1.5}],
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


@pytest.mark.parametrize("option", ["--output-dir", "--tensorboard"])
def test_an_unwritable_folder_is_found_before_the_training(option, main_of, tmp_path):
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "results"
    assert main_of(SCRIPT, option, str(folder)) == (f"{option}: cannot write to {folder}: Not a directory", "")


@pytest.mark.slow
def test_without_an_account_it_is_one_line(tmp_path):
    environment = {**wandb_offline(tmp_path), "WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path)}
    status, _, stderr = finish(start(SCRIPT, "--wandb", "--output-dir", tmp_path, env=environment))
    assert status == 1 and "Traceback" not in stderr
    assert stderr.splitlines()[-1].startswith("--wandb: ") and "WANDB_MODE=offline" in stderr.splitlines()[-1], stderr


# ---- training -------------------------------------------------------------------------------------------------------


def train_alone(hp, global_batch, size):
    """Plain PyTorch: the reference, with the loss of each step."""
    dataset = digits(size, seed=1)
    torch.manual_seed(hp.seed)
    net = mnist.SimpleCNN()
    optimizer = torch.optim.SGD(net.parameters(), lr=hp.lr, momentum=hp.momentum)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, hp.epochs * -(-size // global_batch))
    losses = []
    for epoch in range(1, hp.epochs + 1):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(hp.seed + epoch))
        for batch in order.split(global_batch):
            images, labels = dataset.__getitems__(batch)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(mnist.normalize(images)), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    return net.state_dict(), losses


def accumulate_worker(local_rank, world_size, hp, folder, size):
    """Train in float64; record the weights, what was printed, and what was sent and waited for."""
    sent, waits, prepare = [], [], dist.prepare_ddp_model

    def count_all_reduces(group, bucket):
        sent.append(bucket.buffer().numel())
        return allreduce_hook(group, bucket)

    def prepare_and_count(model, **kwargs):
        model = prepare(model, **kwargs)
        if world_size > 1:
            model.register_comm_hook(None, count_all_reduces)
        return model

    def counted(name):
        function = getattr(torch.Tensor, name)
        return mock.patch.object(torch.Tensor, name, lambda self: waits.append(name) or function(self))

    torch.set_default_dtype(torch.float64)
    stdout = io.StringIO()
    try:
        with (
            mock.patch("distributed.prepare_ddp_model", prepare_and_count),
            mock.patch("mnist_DDP.evaluate", lambda *_: (0, 0, 1)),
            counted("item"),
            counted("tolist"),
            contextlib.redirect_stdout(stdout),
        ):
            train_worker(local_rank, world_size, hp, folder, (size, 10))
    finally:
        torch.set_default_dtype(torch.float32)
    torch.save((sent, waits, stdout.getvalue()), f"{folder}/{local_rank}.pt")


@pytest.mark.parametrize("nprocs", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_accumulated_gradients_are_those_of_one_batch(accumulation, nprocs, tmp_path):
    """90 samples in groups of 12 per process: one of 3 + 3 batches is left at the end, with some smaller than 4."""
    hp = Hyperparameters(
        epochs=2, batch_size=12 // accumulation, grad_accumulation=accumulation, log_interval=1, lr=0.02, seed=3
    )
    torch.set_default_dtype(torch.float64)
    try:
        expected, losses = train_alone(hp, 12 * nprocs, 90)
    finally:
        torch.set_default_dtype(torch.float32)
    dist.launch(accumulate_worker, hp, str(tmp_path), 90, nprocs=nprocs)
    actual = weights_of(tmp_path)
    for name in expected:
        assert (actual[name] - expected[name]).abs().max() <= 1e-9, name

    sent, waits, stdout = torch.load(tmp_path / "0.pt", weights_only=True)
    if nprocs > 1:
        assert sent == [50_186] * len(losses), "one bucket of all gradients, once per step"
    assert [float(line[-1]) for line in TRAIN_LINE.findall(stdout)] == pytest.approx(losses, abs=6e-5)
    assert len(waits) <= len(losses) + 10, "a wait per line, here per step"


def test_the_steps_wait_for_nothing_between_two_lines(tmp_path):
    dist.launch(accumulate_worker, Hyperparameters(batch_size=4, epochs=1), str(tmp_path), 90, nprocs=1)
    _, waits, stdout = torch.load(tmp_path / "0.pt", weights_only=True)
    assert len(TRAIN_LINE.findall(stdout)) == 1 and len(waits) < 10, "in 23 steps"


class Normed(nn.Module):
    """With buffers, which after a step are those of each rank's own last batch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.BatchNorm1d(784, momentum=1.0), nn.Dropout(0.2), nn.Linear(784, 10)
        )

    def forward(self, x):
        return self.layers(x)


def normed_worker(local_rank, world_size, hp, output_dir):
    with mock.patch("mnist.SimpleCNN", Normed):
        train_worker(local_rank, world_size, hp, output_dir)


@pytest.mark.parametrize("nprocs", [1, 3])
def test_the_saved_weights_have_the_saved_accuracy(nprocs, tmp_path):
    hp = Hyperparameters(epochs=2, batch_size=8, test_batch_size=5, lr=0.01)
    dist.launch(normed_worker, hp, tmp_path, nprocs=nprocs)
    net = Normed().eval()
    net.load_state_dict(weights_of(tmp_path))
    accuracies = accuracies_of(tmp_path)
    assert len(accuracies) == 2 and accuracies[-1] == hits_of(net, digits(101)) / 101 > 0.3
    assert {path.name for path in tmp_path.iterdir()} == {"mnist_cnn.pt", "mnist_cnn_accuracies.json"}


def evaluate_worker(local_rank, world_size, hp, weights, folder):
    dist.init_process_group()
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    net.load_state_dict(torch.load(weights, weights_only=True))
    results = []
    for size in (10_000, 9_999):
        with few_digits(10, size):
            _, loader = mnist.make_loaders(hp, torch.device("cpu"))
        results.append(mnist_DDP.evaluate(net, loader, torch.device("cpu"), amp=False))
    torch.save(results, f"{folder}/{world_size}-{local_rank}.pt")


def test_1_2_and_3_ranks_see_the_same_accuracy(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    expected = [(hits_of(net, digits(n)), n) for n in (10_000, 9_999)]
    for nprocs in (1, 2, 3):
        dist.launch(evaluate_worker, Hyperparameters(), str(tmp_path / "weights.pt"), str(tmp_path), nprocs=nprocs)
        for rank in range(nprocs):
            results = torch.load(tmp_path / f"{nprocs}-{rank}.pt", weights_only=True)
            assert [(hits, n) for _, hits, n in results] == expected
            assert [loss for loss, *_ in results] == pytest.approx(
                [loss for loss, *_ in torch.load(tmp_path / "1-0.pt", weights_only=True)]
            )


def test_the_seed_decides_and_tracking_changes_nothing(tmp_path, monkeypatch):
    for name, value in wandb_offline(tmp_path).items():
        monkeypatch.setenv(name, value)
    cases = {
        "first": Hyperparameters(epochs=2),
        "again": Hyperparameters(epochs=2),
        "tracked": Hyperparameters(epochs=2, wandb=True, tensorboard=str(tmp_path / "runs")),
        "other": Hyperparameters(epochs=2, seed=1),
    }
    for name, hp in cases.items():
        (tmp_path / name).mkdir()
        dist.launch(train_worker, hp, tmp_path / name, nprocs=2)
    first, again, tracked, other = ((tmp_path / name / "mnist_cnn.pt").read_bytes() for name in cases)
    assert first == again == tracked
    assert first != other
    rows, _, tables = read_wandb(tmp_path)
    assert [row["samples"] for row in rows if "accuracy" in row] == [320, 640]
    assert [len(table["data"]) for table in tables] == [101, 101], "no more than there are"


def test_amp_computes_in_bfloat16():
    images, labels = digits(8).__getitems__(range(8))
    net, device = mnist.SimpleCNN(), torch.device("cpu")
    for amp, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        logits, _, loss = mnist_DDP.forward(net, images, labels, device, amp)
        assert (logits.dtype, loss.dtype) == (dtype, torch.float32)


# ---- artefacts ------------------------------------------------------------------------------------------------------


def full_disk_worker(local_rank, world_size, hp, output_dir):
    save = mnist_DDP.save

    def save_on_a_full_disk(*arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        save(*arguments)

    with mock.patch("mnist_DDP.save", save_on_a_full_disk):
        train_worker(local_rank, world_size, hp, output_dir)


def test_a_full_disk_is_one_line_and_leaves_the_old_files(tmp_path, capfd):
    for old in ("mnist_cnn.pt", "mnist_cnn_accuracies.json"):
        (tmp_path / old).write_text("old")
    with pytest.raises(SystemExit) as exit_info:
        dist.launch(full_disk_worker, Hyperparameters(epochs=2), tmp_path, nprocs=2)
    assert exit_info.value.code == f"cannot save {tmp_path / 'mnist_cnn.pt'}: File too large"
    assert len(TEST_LINE.findall(capfd.readouterr().out)) == 2, "the accuracies are known"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "mnist_cnn.pt": "old",
        "mnist_cnn_accuracies.json": "old",
    }


def full_logs_worker(local_rank, world_size, hp, output_dir):
    close, (soft, hard) = mnist_DDP.Tracker.close, resource.getrlimit(resource.RLIMIT_FSIZE)

    def close_on_a_full_disk(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            close(self)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with mock.patch("mnist_DDP.Tracker.close", close_on_a_full_disk):
        train_worker(local_rank, world_size, hp, output_dir)


def test_a_full_disk_for_the_tracking_is_one_line_and_the_results_are_saved(tmp_path):
    runs = tmp_path / "runs"
    with pytest.raises(SystemExit) as exit_info:
        dist.launch(full_logs_worker, Hyperparameters(epochs=2, tensorboard=str(runs)), tmp_path, nprocs=2)
    assert exit_info.value.code == f"--tensorboard: cannot write to {runs}: File too large"
    assert len(accuracies_of(tmp_path)) == 2 and weights_of(tmp_path)


def test_a_folder_that_is_gone_at_the_end_is_one_line(tmp_path, capfd):
    with pytest.raises(SystemExit) as exit_info:
        dist.launch(train_worker, Hyperparameters(epochs=1), tmp_path / "gone", nprocs=2)
    assert exit_info.value.code == f"cannot save {tmp_path / 'gone' / 'mnist_cnn.pt'}: No such file or directory"
    assert TEST_LINE.search(capfd.readouterr().out)


def test_both_files_are_written_or_neither(tmp_path):
    (tmp_path / "mnist_cnn.pt").write_text("old")
    (tmp_path / "mnist_cnn_accuracies.json.tmp").mkdir()
    with pytest.raises(SystemExit, match=r"mnist_cnn_accuracies.json: Is a directory$"):
        mnist_DDP.save(tmp_path, mnist.SimpleCNN(), [0.5])
    assert (tmp_path / "mnist_cnn.pt").read_text() == "old" and not (tmp_path / "mnist_cnn.pt.tmp").exists()


def test_files_are_synced_before_they_are_renamed(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        function = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, n=name, f=function: calls.append(n) or f(*args))
    mnist_DDP.save(tmp_path, mnist.SimpleCNN(), [0.5])
    assert calls == ["fsync", "fsync", "replace", "replace"]
    assert accuracies_of(tmp_path) == [0.5]
