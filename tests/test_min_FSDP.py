"""min_FSDP.py: equal to one process, sharded for real, checkpoints that any number of ranks can read."""

import argparse
import contextlib
import json
import os
import re
import resource
import runpy
import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
from conftest import ROOT, run, torchrun
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.tensor import DTensor
from torch.multiprocessing import ProcessExitedException
from torch.nn import functional as F

import distributed as dist
import min_FSDP
import mnist

GLOBAL_BATCH, EPOCHS, TRAIN, TEST = 24, 2, 480, 250  # 20 steps per epoch; 250 is no multiple of 3, 4 or a batch
MNIST_ROOT = os.environ.get("MNIST_ROOT")
DEEP = 94_104_234
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def arguments(nprocs, **changes):
    """As parse_args would give them."""
    values = {
        **{"strategy": "fsdp", "model": "simple", "epochs": EPOCHS, "batch_size": GLOBAL_BATCH // nprocs},
        **{"test_batch_size": 62, "lr": 0.002, "min_num_params": 5000, "mixed_precision": False, "data": "synthetic"},
        **{"data_dir": "data", "checkpoint_dir": None, "export": None, "seed": 3, "nproc": nprocs},
    }
    return argparse.Namespace(**{**values, **changes})


def few_digits(name, data_dir, train, seed):
    return mnist._draw_digits(TRAIN if train else TEST, 2 * seed + train)


@contextlib.contextmanager
def small_and_exact():
    """Few digits, in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        with mock.patch("mnist.load_data", few_digits):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def recorder(function, results):
    def call(*args, **kwargs):
        results.append(function(*args, **kwargs))
        return results[-1]

    return call


def train_worker(local_rank, world_size, args, record=None):
    """The script's own main_worker; what load_checkpoint and evaluate returned goes to the file `record`."""
    results = []
    evaluate, load_checkpoint = (recorder(f, results) for f in (min_FSDP.evaluate, min_FSDP.load_checkpoint))
    with small_and_exact(), mock.patch.multiple(min_FSDP, evaluate=evaluate, load_checkpoint=load_checkpoint):
        min_FSDP.main_worker(local_rank, world_size, args)
    if record and local_rank == 0:
        Path(record).write_text(json.dumps(results))


def train(nprocs, folder, name="run", **changes):
    """Train with `nprocs` processes; returns the exported state_dict and the results that were recorded."""
    record, exported = f"{folder}/{name}.json", f"{folder}/{name}.pt"
    dist.launch(train_worker, arguments(nprocs, export=exported, **changes), record, nprocs=nprocs)
    return torch.load(exported, weights_only=True), json.loads(Path(record).read_text())


def assert_equal_states(actual, expected, tolerance=1e-9):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert type(actual[name]) is torch.Tensor and actual[name].dtype == expected[name].dtype
        assert (actual[name] - expected[name]).abs().max() <= tolerance, name


# ---- equal to one process -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference():
    """Plain PyTorch, without the helper: the final state_dict, and (loss, hits, n) of the test set after each epoch."""
    with small_and_exact():
        torch.manual_seed(3)
        model = mnist.SimpleCNN()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
        train_set, test_set = few_digits("", "", True, 3), few_digits("", "", False, 3)
        results = []
        for epoch in range(EPOCHS):
            order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(3 + epoch))
            for batch in order.split(GLOBAL_BATCH):
                optimizer.zero_grad()
                x = (train_set.images[batch].double() / 255 - 0.1307) / 0.3081
                F.cross_entropy(model(x), train_set.labels[batch]).backward()
                optimizer.step()
            with torch.no_grad():
                outputs = model((test_set.images.double() / 255 - 0.1307) / 0.3081)
            loss = F.cross_entropy(outputs, test_set.labels).item()
            results.append([loss, (outputs.argmax(dim=1) == test_set.labels).sum().item(), TEST])
        assert results[-1][1] > 0.3 * TEST, "the reference must learn, or equality means little"
        return model.state_dict(), results


@pytest.mark.parametrize(
    "nprocs, strategy", [(2, "fsdp"), (3, "fsdp"), (4, "fsdp"), (2, "ddp"), (1, "fsdp"), (1, "local")]
)
def test_equals_one_process(nprocs, strategy, reference, tmp_path):
    state, results = train(nprocs, tmp_path, strategy=strategy)
    expected_state, expected_results = reference
    assert_equal_states(state, expected_state)
    for (loss, hits, n), (expected_loss, expected_hits, expected_n) in zip(results, expected_results, strict=True):
        assert loss == pytest.approx(expected_loss, abs=1e-9)
        assert (hits, n) == (expected_hits, expected_n)  # every test sample once, for any number of ranks
    with small_and_exact():
        mnist.SimpleCNN().load_state_dict(state)  # the names and shapes of the plain model


class Awkward(nn.Module):
    """What a sharding by size stumbles over: tied weights, a ModuleList, attention, a small rest, a buffer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        layer = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(2))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(1))

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * (1 + self.scale)


def awkward_worker(local_rank, world_size):
    dist.init_process_group()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    reference = Awkward()
    torch.manual_seed(dist.get_rank())  # all ranks must start from rank 0's weights
    model = Awkward()
    assert dist.prepare_fsdp_model(model, min_num_params=200) is model
    units = {name for name, module in model.named_modules() if type(module).__name__.startswith("FSDP")}
    layers = ("self_attn", "linear1", "linear2")
    assert units == {"", *(f"blocks.{i}.{layer}" for i in range(2) for layer in layers)}
    assert all(isinstance(param, DTensor) for param in model.parameters())
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in (reference, model)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        x = torch.randint(50, (4 * world_size, 5), generator=generator)
        for net, part, optimizer in zip((reference, model), (x, x[local_rank::world_size]), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(net(part).flatten(0, 1), (part * 7 % 50).flatten()).backward()
            optimizer.step()
    for (name, expected), actual in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert (actual.full_tensor() - expected).abs().max() <= 1e-9, name
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.scale, reference.scale)


@pytest.mark.filterwarnings("ignore")
def test_prepare_fsdp_model_with_an_awkward_model():
    dist.launch(awkward_worker, nprocs=2)


def test_prepare_fsdp_model_in_one_process():
    model = nn.Linear(3, 2)
    assert dist.prepare_fsdp_model(model) is model and type(model) is nn.Linear
    with pytest.raises(ValueError, match="min_num_params must be at least 1, got 0"):
        dist.prepare_fsdp_model(model, min_num_params=0)


def randomness_worker(local_rank, world_size, folder, first_epoch):
    """Draw, where an epoch would be trained and dropout would draw, and record it."""
    drawn = []
    args = arguments(world_size, checkpoint_dir=folder)
    stubs = {
        "train_epoch": lambda *_: (drawn.append(torch.rand(8)), (0.0, 0.0))[1],
        "load_checkpoint": lambda *_: first_epoch,
        "save_checkpoint": lambda *_: None,
    }
    with small_and_exact(), mock.patch.multiple(min_FSDP, **stubs):
        min_FSDP.main_worker(local_rank, world_size, args)
    torch.save(torch.stack(drawn), f"{folder}/{local_rank}.pt")


def test_randomness_comes_from_epoch_and_rank(tmp_path):
    """It differs between ranks, as dropout must, and a resumed run draws what the uninterrupted one drew."""

    def drawn(first_epoch):
        dist.launch(randomness_worker, str(tmp_path), first_epoch, nprocs=2)
        return torch.stack([torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)])

    uninterrupted, resumed = drawn(0), drawn(1)
    assert len(uninterrupted.flatten(0, 1).unique(dim=0)) == 2 * EPOCHS
    assert torch.equal(uninterrupted[:, 1:], resumed)


# ---- sharded for real ---------------------------------------------------------------------------------------------


def steps_worker(local_rank, world_size, strategy, model_name, mixed, folder, steps):
    """A few steps by the script's own functions; writes the bytes held, the peak, and the dtypes that were seen."""
    dist.init_process_group()
    torch.manual_seed(0)
    device = dist.get_device()
    seen = {"reduced": set(), "computed": set()}
    model = mnist.MODELS[model_name]()
    if strategy == "default ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        model = min_FSDP.wrap(model, strategy, device, 20_000, mixed)
    plain = model if strategy == "fsdp" else model.module
    plain.fc1.register_forward_hook(lambda module, inputs, output: seen["computed"].add(str(output.dtype)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    digits = mnist._draw_digits(8 * steps, local_rank)
    loader = torch.utils.data.DataLoader(digits, 8, collate_fn=tuple)
    name = "reduce_scatter_single" if hasattr(torch_dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    reduce_scatter = getattr(torch_dist, name)

    def record_reduce_scatter(output, input, *args, **kwargs):
        seen["reduced"].add(str(input.dtype))
        return reduce_scatter(output, input, *args, **kwargs)

    with mock.patch.object(torch_dist, name, record_reduce_scatter):
        min_FSDP.train_epoch(model, loader, optimizer, device, mixed, 0)
    held = min_FSDP.held_by_this_rank(optimizer)
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    tensors += [tensor for values in optimizer.state.values() for tensor in values.values()]
    result = {
        "held": held,
        "peak": min_FSDP.peak_memory(device),
        "kept": sorted({str(tensor.dtype) for tensor in tensors}),
        **{name: sorted(dtypes) for name, dtypes in seen.items()},
    }
    Path(f"{folder}/{local_rank}.json").write_text(json.dumps(result))


def steps(nprocs, folder, strategy, model="shallow", mixed=False, steps=2):
    folder.mkdir(exist_ok=True)
    dist.launch(steps_worker, strategy, model, mixed, str(folder), steps, nprocs=nprocs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(nprocs)]


@pytest.mark.parametrize("nprocs", [2, 4])
def test_each_rank_holds_its_share(nprocs, tmp_path):
    n_params = 1_199_882
    for result in steps(nprocs, tmp_path, "fsdp"):
        parameters, gradients, state = result["held"]
        assert parameters + gradients + state <= 1.02 * 16 * n_params / nprocs
        assert parameters == gradients and 2 * parameters <= state <= 2 * parameters + 4 * 8


def test_ddp_holds_everything(tmp_path):
    for result in steps(2, tmp_path, "ddp"):
        assert sum(result["held"]) == pytest.approx(16 * 1_199_882, rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("nprocs", [2, 4])
def test_deep_net_is_sharded(nprocs, tmp_path):
    for result in steps(nprocs, tmp_path, "fsdp", "deep"):
        assert sum(result["held"]) <= 1.02 * 16 * DEEP / nprocs


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_deep_net_needs_less_memory_than_ddp(tmp_path):
    """Resident memory with all that a process needs to run at all, 0.4 GB of it, and gloo's copy while it reduces."""
    peaks = {}
    for strategy in ("fsdp", "ddp", "default ddp"):
        results = steps(2, tmp_path / strategy, strategy, "deep")
        peaks[strategy] = max(result["peak"] for result in results)
        if strategy != "fsdp":
            assert sum(results[0]["held"]) == pytest.approx(16 * DEEP, rel=1e-4)
    print(f"peak resident memory in MB: { {strategy: round(peak / 1e6) for strategy, peak in peaks.items()} }")
    assert peaks["fsdp"] <= 0.65 * peaks["default ddp"]
    assert peaks["fsdp"] <= 0.75 * peaks["ddp"]  # whose gradients are views of the buckets


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_mixed_precision(strategy, tmp_path):
    for result in steps(2, tmp_path, strategy, mixed=True):
        assert result["kept"] == ["torch.float32"]
        assert result["computed"] == ["torch.bfloat16"]
        assert result["reduced"] == (["torch.float32"] if strategy == "fsdp" else [])


# ---- checkpoints --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Four ranks, two epochs, a checkpoint after each: (folder, state_dict at the end)."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    state, _ = train(4, folder, checkpoint_dir=str(folder))
    return folder, state


def first_epoch_of(uninterrupted, folder):
    """A checkpoint folder as it is after the first epoch."""
    shutil.copytree(uninterrupted[0] / "epoch-1", folder / "epoch-1")
    return str(folder)


def load_worker(local_rank, world_size, checkpoint_dir, saved, strategy):
    """What load_checkpoint fills in is what was saved, bit for bit."""
    dist.init_process_group()
    torch.set_default_dtype(torch.float64)
    try:
        device = dist.get_device()
        model = mnist.SimpleCNN()
        model = min_FSDP.wrap(model, strategy if world_size > 1 else "local", device, 5000, False)
        optimizer = torch.optim.Adam(model.parameters())
        assert min_FSDP.load_checkpoint(checkpoint_dir, model, optimizer, device) == 1
        weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    finally:
        torch.set_default_dtype(torch.float32)
    saved = torch.load(saved, weights_only=True)
    assert weights.keys() == saved["model"].keys() and moments["state"].keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, saved["model"][name])
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(moments["state"][name][kind], saved["optimizer"]["state"][name][kind])
        assert (
            moments["state"][name]["step"] == TRAIN // GLOBAL_BATCH
            and moments["state"][name]["exp_avg"].abs().max() > 0
        )


@pytest.mark.parametrize("nprocs, strategy", [(1, "local"), (2, "fsdp"), (3, "fsdp"), (2, "ddp")])
def test_resume_on_another_number_of_ranks(nprocs, strategy, uninterrupted, tmp_path):
    checkpoint_dir = first_epoch_of(uninterrupted, tmp_path)
    dcp_to_torch_save(f"{checkpoint_dir}/epoch-1", f"{tmp_path}/saved.pt")
    dist.launch(load_worker, checkpoint_dir, f"{tmp_path}/saved.pt", strategy, nprocs=nprocs)
    state, results = train(nprocs, tmp_path, checkpoint_dir=checkpoint_dir, strategy=strategy)
    assert results[0] == 1 and len(results) == 2  # one epoch was loaded, one was run
    assert_equal_states(state, uninterrupted[1])


def killed_worker(local_rank, world_size, args, rank, moment):
    """Train, and leave by kill -9 in the second save, on `rank`, at `moment`."""

    def kill(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    rename, fsync, syncs = FileSystem.rename, os.fsync, []

    def rename_and_die(*args):
        rename(*args)
        kill()

    def die_at_second_fsync(descriptor):  # rank 0's first is of its data, its second of the metadata
        fsync(descriptor)
        syncs.append(descriptor)
        if len(syncs) == 2:
            kill()

    target, replacement = {
        "before the data": ("torch.distributed.checkpoint.filesystem._write_files_from_queue", kill),
        "in the data": ("os.fsync", kill),
        "in the metadata": ("os.fsync", die_at_second_fsync),
        "before the rename": ("torch.distributed.checkpoint.filesystem.FileSystem.rename", kill),
        "after the rename": ("torch.distributed.checkpoint.filesystem.FileSystem.rename", rename_and_die),
    }[moment]
    save = min_FSDP.save_checkpoint

    def save_or_die(folder, model, optimizer, epoch):
        with mock.patch(target, replacement) if (epoch, local_rank) == (2, rank) else contextlib.nullcontext():
            save(folder, model, optimizer, epoch)

    with mock.patch("min_FSDP.save_checkpoint", save_or_die):
        train_worker(local_rank, world_size, args)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rank, moment, epoch",
    [
        (1, "before the data", 1),
        (1, "in the data", 1),
        (0, "in the data", 1),
        (0, "in the metadata", 1),
        (0, "before the rename", 1),
        (0, "after the rename", 2),
    ],
)
def test_kill_in_a_save(rank, moment, epoch, uninterrupted, tmp_path):
    checkpoint_dir = first_epoch_of(uninterrupted, tmp_path)
    with pytest.raises(ProcessExitedException, match=f"rank {rank} was killed by SIGKILL"):
        dist.launch(killed_worker, arguments(2, checkpoint_dir=checkpoint_dir), rank, moment, nprocs=2)
    assert (tmp_path / "epoch-2").is_dir()
    state, results = train(2, tmp_path, checkpoint_dir=checkpoint_dir)
    assert results[0] == epoch  # the newest complete one
    assert_equal_states(state, uninterrupted[1])
    dcp_to_torch_save(f"{checkpoint_dir}/epoch-2", f"{tmp_path}/saved.pt")  # and it was completed
    assert_equal_states(torch.load(tmp_path / "saved.pt", weights_only=True)["model"], uninterrupted[1])


def full_disk_worker(local_rank, world_size, args):
    save = min_FSDP.save_checkpoint

    def save_on_a_full_disk(*arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        save(*arguments)

    with mock.patch("min_FSDP.save_checkpoint", save_on_a_full_disk):
        train_worker(local_rank, world_size, args)


def test_full_disk(uninterrupted, tmp_path):
    checkpoint_dir = first_epoch_of(uninterrupted, tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        dist.launch(full_disk_worker, arguments(2, checkpoint_dir=checkpoint_dir), nprocs=2)
    message = exit_info.value.code
    assert message.startswith(f"cannot save {tmp_path / 'epoch-2'}, is the disk full? ") and "\n" not in message
    assert os.listdir(tmp_path) == ["epoch-1"]  # nothing half-written, nothing lost


@pytest.mark.parametrize("nprocs", [1, 2])
def test_checkpoint_that_cannot_be_loaded(nprocs, uninterrupted, tmp_path):
    checkpoint_dir = first_epoch_of(uninterrupted, tmp_path)

    def message(**changes):
        with pytest.raises(SystemExit) as exit_info:
            dist.launch(train_worker, arguments(nprocs, checkpoint_dir=checkpoint_dir, **changes), nprocs=nprocs)
        assert "\n" not in exit_info.value.code
        return exit_info.value.code

    files = {path: path.read_bytes() for path in Path(checkpoint_dir).rglob("*") if path.is_file()}
    expected = f"cannot load {tmp_path / 'epoch-1'}: it is damaged or of another --model"
    assert message(model="shallow").startswith(expected)
    assert {path: path.read_bytes() for path in Path(checkpoint_dir).rglob("*") if path.is_file()} == files
    for name in ("__0_0.distcp", ".metadata"):
        path = tmp_path / "epoch-1" / name
        path.write_bytes(files[path][: len(files[path]) // 2])
        assert message().startswith(expected)
        path.write_bytes(files[path])


# ---- the command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (["--model", "huge"], ["--model", "'huge'", "simple", "shallow", "deep"]),
        (["--strategy", "zero"], ["--strategy", "'zero'", "fsdp", "ddp", "local"]),
        (["--min-num-params", "0"], ["--min-num-params", "'0'", "at least 1"]),
        (["--min_num_params", "-3"], ["--min_num_params", "'-3'", "at least 1"]),
        (["--batch-size", "0"], ["--batch-size", "'0'", "at least 1"]),
        (["--test_batch_size", "x"], ["--test_batch_size", "'x'", "at least 1"]),
        (["--epochs", "0"], ["--epochs", "'0'", "at least 1"]),
        (["--lr", "nan"], ["--lr", "'nan'", "above 0"]),
        (["--nproc", "0"], ["--nproc", "'0'", "at least 1"]),
        (["--data", "imagenet"], ["--data", "'imagenet'", "synthetic", "mnist"]),
        (["--strategy", "local", "--nproc", "2"], ["--strategy", "local", "1 process", "2"]),
        (["--export", "tests"], ["--export", "'tests'", "folder"]),
    ],
)
def test_wrong_option_is_one_line(options, words, main_of):
    status, error = main_of("min_FSDP.py", *options)
    assert status == 2 and error.count("\n") == 1, error
    assert all(word in error for word in words), error


@pytest.mark.parametrize("option", ["--checkpoint-dir", "--export"])
def test_unwritable_folder_is_one_line(option, main_of, tmp_path):
    (tmp_path / "file").write_text("in the way")
    message, _ = main_of("min_FSDP.py", option, str(tmp_path / "file" / "name"))
    assert message.startswith(f"{option}: cannot write to {tmp_path / 'file'}") and "\n" not in message
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize("options, nprocs", [((), 2), (("--strategy", "local"), 1), (("--nproc", "3"), 3)])
def test_number_of_processes(options, nprocs, monkeypatch):
    monkeypatch.setattr("sys.argv", ["min_FSDP.py", *options])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    launch = mock.Mock()
    monkeypatch.setattr(dist, "launch", launch)
    runpy.run_path(str(ROOT / "min_FSDP.py"), run_name="__main__")
    assert launch.call_args.kwargs == {"nprocs": nprocs}


def test_local_under_torchrun_is_refused(main_of, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, error = main_of("min_FSDP.py", "--strategy", "local")
    assert status == 2 and "local trains in 1 process, not in 2" in error


EPOCH_LINE = (
    r"epoch: (\d+) \| train loss: ([\d.]+) \| test loss: ([\d.]+) \| test acc: (\d+)/10000 \(([\d.]+)\) "
    r"\| memory: (\d+) MB \| (\d+) samples/s"
)


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    options = ("--epochs", 1, "--batch-size", 128, "--test-batch-size", 300, "--mixed-precision")
    status, stdout, stderr = torchrun(2, "min_FSDP.py", *options, "--export", tmp_path / "model.pt", timeout=110)
    assert status == 0, stderr
    assert "Training on 2 x cpu: fsdp" in stdout
    assert "Model simple: 50,186 parameters, of which this process holds 25,093" in stdout
    assert "gathered in bfloat16, gradients reduced in float32" in stdout
    ((epoch, train_loss, test_loss, hits, accuracy, *_),) = re.findall(EPOCH_LINE, stdout)
    assert int(epoch) == 0 and float(test_loss) < float(train_loss) < 2.3
    assert f"{int(hits) / 10_000:.4f}" == accuracy and int(hits) > 5000
    held = "parameters 100,372 | gradients 100,372 | optimizer state 200,768 | in all 401,512, 8.00 per parameter"
    assert f"Held per process, in bytes: {held}" in stdout
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    mnist.SimpleCNN().load_state_dict(state)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_learns_with_the_defaults(tmp_path):
    status, stdout, stderr = run("min_FSDP.py", timeout=60)
    assert status == 0, stderr
    lines = re.findall(EPOCH_LINE, stdout)
    assert [int(line[0]) for line in lines] == [0, 1]
    assert int(lines[-1][3]) >= 9500, stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not MNIST_ROOT, reason="MNIST_ROOT does not say where MNIST is")
def test_learns_mnist():
    options = ("--nproc", 2, "--model", "shallow", "--epochs", 1, "--data", "mnist", "--data-dir", MNIST_ROOT)
    status, stdout, stderr = run("min_FSDP.py", *options, timeout=280)
    assert status == 0, stderr
    (line,) = re.findall(EPOCH_LINE, stdout)
    assert int(line[3]) >= 9800, stdout
