"""min_FSDP.py: equal to one process, sharded for real, checkpoints that any number of ranks can read."""

import argparse
import contextlib
import io
import itertools
import json
import os
import re
import resource
import shutil
import signal
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
from conftest import run, torchrun
from images import OPTIMIZERS, Net, Normed, Plain, Pooled, assert_equal_states, few_digits, result_of, train_alone
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.tensor import DTensor
from torch.multiprocessing import ProcessExitedException
from torch.nn import functional as F

import checkpoint
import distributed as dist
import min_FSDP
import mnist

GLOBAL_BATCH, EPOCHS, SIZES, LR = 24, 2, (480, 250), 0.002  # 20 steps per epoch; 250 is no multiple of 3, 4 or a batch
MNIST_ROOT = os.environ.get("MNIST_ROOT")
DEEP = 94_104_234
EPOCH_LINE = (
    r"epoch: (\d+) \| train loss: ([\d.]+) \| test loss: ([\d.]+) \| test acc: (\d+)/(\d+) \(([\d.]+)\) "
    r"\| memory: (\d+) MB \| (\d+) samples/s"
)


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


def arguments(nprocs, **changes):
    """As parse_args would give them."""
    values = {
        **{"strategy": "fsdp", "model": "simple", "epochs": EPOCHS, "batch_size": GLOBAL_BATCH // nprocs},
        **{"test_batch_size": 21, "lr": LR, "min_num_params": 5000, "mixed_precision": False, "data": "synthetic"},
        **{"data_dir": "data", "checkpoint_dir": None, "export": None, "seed": 3, "nproc": nprocs},
    }
    return argparse.Namespace(**{**values, **changes})


def train(local_rank, world_size, folder, name="run", optimizer="adam", model=Net, kind=lambda whole: whole, **changes):
    """The script's own main_worker, in a worker; leaves NAME.pt, the export, and what each rank has printed and drawn.

    Every rank's peak of memory is another, and every epoch of training takes 10 seconds.
    """
    Net.drawn.clear()
    args = arguments(world_size, export=f"{folder}/{name}.pt", **changes)
    clock = mock.Mock(perf_counter=itertools.count(step=10).__next__)
    with (
        few_digits(*SIZES, kind=kind, dtype=torch.float32 if args.mixed_precision else torch.float64),
        mock.patch.dict(mnist.MODELS, simple=model),
        mock.patch.multiple("min_FSDP", time=clock, peak_memory=lambda device: (7 + local_rank) * 1_000_000),
        mock.patch("torch.optim.Adam", OPTIMIZERS[optimizer]) if optimizer != "adam" else contextlib.nullcontext(),
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", UserWarning)  # what a user would see at each checkpoint
        warnings.filterwarnings("ignore", "CUDA|cuda|TypedStorage")
        min_FSDP.main_worker(local_rank, world_size, args)
    Path(f"{folder}/{name}-{local_rank}.json").write_text(json.dumps([stdout.getvalue(), list(map(float, Net.drawn))]))


def trained(folder, name="run"):
    """Of what `train` has left: (state_dict, epoch lines, output, what was drawn on each rank)."""
    state = torch.load(f"{folder}/{name}.pt", weights_only=True)
    ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob(f"{name}-?.json"))]
    assert not any(output for output, _ in ranks[1:]), "rank 0 alone prints"
    return state, re.findall(EPOCH_LINE, ranks[0][0]), ranks[0][0], [drawn for _, drawn in ranks]


def assert_equal_lines(lines, expected, nprocs, first_epoch=0):
    """What was printed is what the reference has measured."""
    _, losses, tests = expected
    steps = len(losses) // len(tests)
    for i, line in enumerate(lines, first_epoch):
        epoch, train_loss, test_loss, hits, n, accuracy, memory, speed = line
        of_epoch = losses[i * steps : (i + 1) * steps]
        assert int(epoch) == i
        mean = sum(loss * count for loss, count in of_epoch) / sum(count for _, count in of_epoch)
        assert float(train_loss) == pytest.approx(mean, abs=6e-5)
        assert float(test_loss) == pytest.approx(tests[i][0], abs=6e-5)
        assert (int(hits), int(n)) == tests[i][1:], "every test sample once, for any number of ranks"
        assert accuracy == f"{tests[i][1] / tests[i][2]:.4f}"
        assert (int(memory), int(speed)) == (7 + nprocs - 1, SIZES[0] // 10)
    assert len(lines) == len(tests) - first_epoch


# ---- equal to one process -----------------------------------------------------------------------------------------

RATES = {"sgd": 0.01, "adam": LR, "layerwise": LR}
MODELS = {"sgd": Net, "adam": Net, "layerwise": Pooled}
CASES = {
    **{f"{strategy} {name}": (strategy, name) for strategy in ("fsdp", "ddp") for name in ("sgd", "adam")},
    "layerwise": ("fsdp", "layerwise"),
    "plain data": ("fsdp", "adam"),
}


@pytest.fixture(scope="module")
def references():
    """Plain PyTorch, without the helper, with each optimizer."""
    return {
        name: train_alone(make, [RATES[name]] * 2, SIZES, GLOBAL_BATCH, model=MODELS[name])
        for name, make in OPTIMIZERS.items()
    }


def cases_worker(local_rank, world_size, folder):
    for case, (strategy, name) in CASES.items():
        changes = {"strategy": strategy, "lr": RATES[name], "model": MODELS[name]}
        if case == "plain data":
            changes |= {"kind": Plain, "checkpoint_dir": f"{folder}/checkpoints"}
        train(local_rank, world_size, folder, case, name, **changes)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Three ranks train all cases, one of them with a checkpoint after each of its two epochs."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "checkpoints").mkdir()
    dist.launch(cases_worker, str(folder), nprocs=3)
    return folder


@pytest.mark.parametrize("nprocs", [1, slow(2), 3, slow(4)])
def test_equals_one_process(nprocs, references, tmp_path, request):
    folder = request.getfixturevalue("uninterrupted") if nprocs == 3 else tmp_path
    if nprocs != 3:
        (folder / "checkpoints").mkdir()
        dist.launch(cases_worker, str(folder), nprocs=nprocs)
    for case, (strategy, name) in CASES.items():
        state, lines, output, drawn = trained(folder, case)
        assert_equal_states(state, references[name][0])
        assert_equal_lines(lines, references[name], nprocs)
        assert output.startswith(f"Training on {nprocs} x cpu: {'local' if nprocs == 1 else strategy}\n")
        steps = [number for numbers in drawn for number in numbers]
        assert len(set(steps)) == len(steps) == nprocs * EPOCHS * 20, "dropout differs between ranks and between steps"
        n_params = sum(tensor.numel() for tensor in state.values())
        n_trained = sum(tensor.numel() for name, tensor in state.items() if not name.startswith("pooler"))
        share = 8 / nprocs if strategy == "fsdp" else 8  # bytes of a float64
        expected = [share * n_params, share * n_trained, share * n_trained * (1 if name == "sgd" else 2)]
        held = re.search(r"bytes: parameters (\S+) \| gradients (\S+) \| optimizer state (\S+) \| in all", output)
        held = [int(number.replace(",", "")) for number in held.groups()]
        assert held == pytest.approx(expected, rel=0.02)
        assert f"Model simple: {n_params:,} parameters, of which this process holds {held[0] // 8:,}\n" in output


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


def normed_worker(local_rank, world_size, folder):
    for name, mixed in (("exact", False), ("mixed", True)):
        train(
            local_rank, world_size, folder, name, model=Normed, mixed_precision=mixed, checkpoint_dir=f"{folder}/{name}"
        )
    model = min_FSDP.wrap(Normed(), "fsdp", dist.get_device(), 5000, False)
    for buffer in model.buffers():
        buffer.fill_(local_rank)
    checkpoint.save_sharded(f"{folder}/without evaluation", model, torch.optim.Adam(model.parameters()), 1)
    assert not any(buffer.any() for buffer in model.buffers()), "rank 0's are saved"


def test_batch_norm(tmp_path):
    """What was evaluated is what was exported and saved, on every rank, also in mixed precision."""
    for name in ("exact", "mixed"):
        (tmp_path / name).mkdir()
    dist.launch(normed_worker, str(tmp_path), nprocs=2)
    for name, dtype in (("exact", torch.float64), ("mixed", torch.float32)):
        state, lines, *_ = trained(tmp_path, name)
        with few_digits(*SIZES, dtype=dtype):
            net = Normed()
            net.load_state_dict(state)
            loss, hits, n = result_of(net, mnist.load_data(train=False, seed=3))
        assert {tensor.dtype for tensor in state.values() if tensor.is_floating_point()} == {dtype}
        if name == "exact":
            assert (int(lines[-1][3]), int(lines[-1][4])) == (hits, n)
        assert float(lines[-1][2]) == pytest.approx(loss, abs=6e-5 if name == "exact" else 0.02)
        dcp_to_torch_save(tmp_path / name / "epoch-2", tmp_path / "saved.pt")
        assert_equal_states(torch.load(tmp_path / "saved.pt", weights_only=True)["model"], state, 0)


# ---- sharded for real ---------------------------------------------------------------------------------------------


def steps_worker(local_rank, world_size, cases, folder):
    """Two steps of each case by the script's own functions; writes the bytes held, the peak, and the dtypes seen."""
    dist.init_process_group()
    results = {}
    for strategy, model_name, mixed in cases:
        torch.manual_seed(0)
        device = dist.get_device()
        seen = {"gathered": set(), "computed": set(), "reduced": set()}
        model = mnist.MODELS[model_name]()
        if strategy == "default ddp":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            model = min_FSDP.wrap(model, strategy, device, 20_000, mixed)
        plain = model if strategy == "fsdp" else model.module
        plain.fc1.register_forward_pre_hook(lambda fc, _, seen=seen: seen["gathered"].add(str(fc.weight.dtype)))
        plain.fc1.register_forward_hook(lambda _, inputs, output, seen=seen: seen["computed"].add(str(output.dtype)))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        loader = torch.utils.data.DataLoader(mnist._draw_digits(16, local_rank), 8, collate_fn=mnist.collate)
        name = "reduce_scatter_single" if hasattr(torch_dist, "reduce_scatter_single") else "reduce_scatter_tensor"
        reduce_scatter = getattr(torch_dist, name)

        def record(output, input, *args, seen=seen, function=reduce_scatter, **kwargs):
            seen["reduced"].add(str(input.dtype))
            return function(output, input, *args, **kwargs)

        with mock.patch.object(torch_dist, name, record):
            min_FSDP.train_epoch(model, loader, optimizer, device, mixed, 0)
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        tensors += [tensor for values in optimizer.state.values() for tensor in values.values()]
        results[f"{strategy} {mixed}"] = {
            "held": min_FSDP.held_by_this_rank(optimizer),
            "peak": min_FSDP.peak_memory(device),
            "kept": sorted({str(tensor.dtype) for tensor in tensors}),
            **{name: sorted(dtypes) for name, dtypes in seen.items()},
        }
    Path(f"{folder}/{local_rank}.json").write_text(json.dumps(results))


def steps(nprocs, folder, *cases):
    folder.mkdir(exist_ok=True)
    dist.launch(steps_worker, cases, str(folder), nprocs=nprocs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(nprocs)]


def test_each_rank_holds_its_share_and_computes_in_bfloat16_if_told_to(tmp_path):
    n_params = 1_199_882
    cases = [(strategy, "shallow", mixed) for strategy in ("fsdp", "ddp") for mixed in (False, True)]
    for result in steps(2, tmp_path, *cases):
        parameters, gradients, state = result["fsdp False"]["held"]
        assert parameters + gradients + state <= 1.02 * 16 * n_params / 2
        assert parameters == gradients and 2 * parameters <= state <= 2 * parameters + 4 * 8
        assert sum(result["ddp False"]["held"]) == pytest.approx(16 * n_params, rel=1e-4)
        for strategy in ("fsdp", "ddp"):
            mixed = result[f"{strategy} True"]
            assert (mixed["kept"], mixed["computed"]) == (["torch.float32"], ["torch.bfloat16"])
            assert mixed["gathered"] == ["torch.bfloat16" if strategy == "fsdp" else "torch.float32"]
            assert mixed["reduced"] == (["torch.float32"] if strategy == "fsdp" else [])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_deep_net_is_sharded(tmp_path):
    for result in steps(4, tmp_path, ("fsdp", "deep", False)):
        assert sum(result["fsdp False"]["held"]) <= 1.02 * 16 * DEEP / 4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_deep_net_needs_less_memory_than_ddp(tmp_path):
    """Resident memory with all that a process needs to run at all, 0.4 GB of it, and gloo's copy while it reduces."""
    peaks = {}
    for strategy in ("fsdp", "ddp", "default ddp"):
        results = [result[f"{strategy} False"] for result in steps(2, tmp_path / strategy, (strategy, "deep", False))]
        peaks[strategy] = max(result["peak"] for result in results)
        share = 16 * DEEP / (2 if strategy == "fsdp" else 1)
        assert sum(results[0]["held"]) == pytest.approx(share, rel=0.02 if strategy == "fsdp" else 1e-4)
    print(f"peak resident memory in MB: { {strategy: round(peak / 1e6) for strategy, peak in peaks.items()} }")
    assert peaks["fsdp"] <= 0.87 * peaks["default ddp"]
    assert peaks["fsdp"] <= 0.9 * peaks["ddp"]  # whose gradients are views of the buckets


def test_mixed_precision_is_for_training_and_evaluation(tmp_path):
    seen, forward = [], mnist.forward
    with mock.patch("mnist.forward", lambda *args: seen.append(args[4]) or forward(*args)):
        train(0, 1, tmp_path, epochs=1, mixed_precision=True)
    assert seen == [True] * (20 + 12)


# ---- checkpoints --------------------------------------------------------------------------------------------------


def first_epoch_of(uninterrupted, folder):
    """A checkpoint folder as it is after the first epoch."""
    shutil.copytree(uninterrupted / "checkpoints" / "epoch-1", Path(folder) / "epoch-1")
    return str(folder)


def exit_message(function, *args):
    """The one line with which `function` leaves."""
    with pytest.raises(SystemExit) as exit_info:
        function(*args)
    assert isinstance(exit_info.value.code, str) and "\n" not in exit_info.value.code
    return exit_info.value.code


def loaded_is_saved(folder, saved, strategy):
    """What load_sharded fills in is what was saved, bit for bit."""
    with few_digits(*SIZES):
        model = min_FSDP.wrap(Net(), strategy if dist.get_world_size() > 1 else "local", dist.get_device(), 5000, False)
        optimizer = torch.optim.Adam(model.parameters())
        assert checkpoint.load_sharded(folder, model, optimizer) == 1
        weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    saved = torch.load(saved, weights_only=True)
    assert weights.keys() == saved["model"].keys()
    assert moments["state"].keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, saved["model"][name])
    for name, values in moments["state"].items():
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(values[kind], saved["optimizer"]["state"][name][kind])
        assert values["step"] == 20 and values["exp_avg"].abs().max() > 0


def resume_worker(local_rank, world_size, folder, uninterrupted):
    """Go on after the first epoch: from the same state, to the same end, and with another rate; and from bad files."""
    dist.init_process_group()
    for strategy in ("fsdp", "ddp"):
        loaded_is_saved(f"{folder}/{strategy}", f"{folder}/saved.pt", strategy)
        train(local_rank, world_size, folder, strategy, strategy=strategy, checkpoint_dir=f"{folder}/{strategy}")
    train(local_rank, world_size, folder, "other rate", lr=3 * LR, checkpoint_dir=f"{folder}/other rate")

    # A checkpoint after an epoch of one run, gone on with by another, for each number of ranks.
    here = f"{folder}/layerwise"
    for part, (epochs, lr) in {"half": (1, LR), "whole": (2, 3 * LR)}.items():
        changes = {"model": Pooled, "epochs": epochs, "lr": lr, "checkpoint_dir": here}
        train(local_rank, world_size, folder, part, "layerwise", **changes)

    bad = Path(folder, "bad")
    expected = f"cannot load {bad / 'epoch-1'}: damaged, or of another model: name another folder"
    missing = f"cannot load {bad / 'epoch-1'}: not all shards are here: all machines must share the folder"
    assert exit_message(train_bad, local_rank, world_size, folder, mnist.ShallowNet).startswith(expected)
    files = {path: path.read_bytes() for path in bad.rglob("*") if path.is_file()}
    for name, content, message in (
        ("__0_0.distcp", lambda whole: whole[: len(whole) // 2], expected),
        (".metadata", lambda whole: whole[: len(whole) // 2], expected),
        (".metadata", lambda whole: b"I am a text file.\n" * 100, expected),
        (".metadata", lambda whole: b"", expected),
        ("__1_0.distcp", None, missing),
    ):
        path = bad / "epoch-1" / name
        dist.barrier()
        if local_rank == 0:
            path.write_bytes(content(files[path])) if content else path.unlink()
        dist.barrier()
        assert exit_message(train_bad, local_rank, world_size, folder).startswith(message), name
        dist.barrier()
        if local_rank == 0:
            path.write_bytes(files[path])
    dist.barrier()
    assert {path: path.read_bytes() for path in bad.rglob("*") if path.is_file()} == files

    if world_size > 1:  # another machine, without the folder of the first
        os.makedirs(f"{folder}/own {local_rank}/epoch-1", exist_ok=True)
        if local_rank == 0:
            shutil.copytree(bad / "epoch-1", f"{folder}/own 0/epoch-1", dirs_exist_ok=True)
        model = min_FSDP.wrap(Net(), "fsdp", dist.get_device(), 5000, False)
        message = exit_message(
            checkpoint.load_sharded, f"{folder}/own {local_rank}", model, OPTIMIZERS["adam"](model.parameters(), LR)
        )
        assert "not all shards are here" in message


def train_bad(local_rank, world_size, folder, model=Net):
    train(local_rank, world_size, folder, "never", model=model, checkpoint_dir=f"{folder}/bad")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("nprocs", [1, 2, slow(3)])
def test_resume_on_another_number_of_ranks(nprocs, uninterrupted, references, tmp_path):
    for name in ("fsdp", "ddp", "other rate", "bad", "layerwise"):
        (tmp_path / name).mkdir()
        if name != "layerwise":
            first_epoch_of(uninterrupted, tmp_path / name)
    dcp_to_torch_save(tmp_path / "fsdp" / "epoch-1", tmp_path / "saved.pt")
    dist.launch(resume_worker, str(tmp_path), str(uninterrupted), nprocs=nprocs)

    *_, drawn_before = trained(uninterrupted, "plain data")
    for strategy in ("fsdp", "ddp"):
        state, lines, output, drawn = trained(tmp_path, strategy)
        assert_equal_states(state, references["adam"][0])
        assert_equal_lines(lines, references["adam"], nprocs, first_epoch=1)
        assert f"Going on from {tmp_path / strategy / 'epoch-1'}\n" in output
        assert drawn == [numbers[20:] for numbers in drawn_before[:nprocs]], "as if it had not been interrupted"
    for name, optimizer, folder in (("other rate", "adam", "other rate"), ("whole", "layerwise", "layerwise")):
        state, lines, *_ = trained(tmp_path, name)
        expected = train_alone(OPTIMIZERS[optimizer], [LR, 3 * LR], SIZES, GLOBAL_BATCH, model=MODELS[optimizer])
        assert_equal_states(state, expected[0])
        assert_equal_lines(lines, expected, nprocs, first_epoch=1)
        assert sorted(os.listdir(tmp_path / folder)) == ["epoch-1", "epoch-2"]


def killed_worker(local_rank, world_size, folder, rank, moment):
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
    save = checkpoint.save_sharded

    def save_or_die(folder, model, optimizer, epoch):
        with mock.patch(target, replacement) if (epoch, local_rank) == (2, rank) else contextlib.nullcontext():
            save(folder, model, optimizer, epoch)

    with mock.patch("checkpoint.save_sharded", save_or_die):
        train(local_rank, world_size, folder, checkpoint_dir=folder)


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
def test_kill_in_a_save(rank, moment, epoch, uninterrupted, references, tmp_path):
    folder = first_epoch_of(uninterrupted, tmp_path)
    with pytest.raises(ProcessExitedException, match=f"rank {rank} was killed by SIGKILL"):
        dist.launch(killed_worker, folder, rank, moment, nprocs=2)
    assert (tmp_path / "epoch-2").is_dir()
    dist.launch(again_worker, folder, nprocs=2)
    state, lines, output, _ = trained(tmp_path)
    assert f"Going on from {tmp_path / f'epoch-{epoch}'}" in output and len(lines) == 2 - epoch
    assert_equal_states(state, references["adam"][0])
    dcp_to_torch_save(tmp_path / "epoch-2", tmp_path / "saved.pt")  # and it was completed
    assert_equal_states(torch.load(tmp_path / "saved.pt", weights_only=True)["model"], references["adam"][0])


def again_worker(local_rank, world_size, folder):
    train(local_rank, world_size, folder, checkpoint_dir=folder)


def full_disk_worker(local_rank, world_size, folder):
    """A disk that fills in the second save, on every rank, and in the export."""
    save = checkpoint.save_sharded

    def save_on_a_full_disk(*arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        save(*arguments)

    with mock.patch("checkpoint.save_sharded", save_on_a_full_disk):
        message = exit_message(again_worker, local_rank, world_size, f"{folder}")
    assert message.startswith(f"cannot save {folder}/epoch-2, is the disk full? ")
    with few_digits(*SIZES):
        model = min_FSDP.wrap(Net(), "fsdp", dist.get_device(), 5000, False)
    if local_rank == 0:
        message = exit_message(min_FSDP.export, f"{folder}/old.pt", model)
        assert message.startswith(f"cannot save {folder}/old.pt") and "File too large" in message
    else:
        min_FSDP.export(f"{folder}/old.pt", model)
    dist.barrier()


def test_full_disk(uninterrupted, tmp_path):
    folder = first_epoch_of(uninterrupted, tmp_path)
    (tmp_path / "old.pt").write_text("old")
    dist.launch(full_disk_worker, folder, nprocs=2)
    assert sorted(os.listdir(tmp_path)) == ["epoch-1", "old.pt"]  # nothing half-written, nothing lost
    assert (tmp_path / "old.pt").read_text() == "old"


# ---- the command --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    options = ("--epochs", 1, "--batch-size", 128, "--test-batch-size", 300, "--mixed-precision")
    status, stdout, stderr = torchrun(2, "min_FSDP.py", *options, "--export", tmp_path / "model.pt", timeout=110)
    assert status == 0, stderr
    assert "Training on 2 x cpu: fsdp" in stdout
    assert "Model simple: 50,186 parameters, of which this process holds 25,093" in stdout
    assert "gathered in bfloat16, gradients reduced in float32" in stdout
    ((epoch, train_loss, test_loss, hits, n, accuracy, *_),) = re.findall(EPOCH_LINE, stdout)
    assert int(epoch) == 0 and float(test_loss) < float(train_loss) < 2.3
    assert f"{int(hits) / 10_000:.4f}" == accuracy and int(n) == 10_000 and int(hits) > 5000
    held = "parameters 100,372 | gradients 100,372 | optimizer state 200,768 | in all 401,512, 8.00 per parameter"
    assert f"Held per process, in bytes: {held}" in stdout
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    mnist.SimpleCNN().load_state_dict(state)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_learns_with_the_defaults():
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
