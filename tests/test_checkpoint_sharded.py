"""checkpoint_sharded.py: what any number of processes saved, any number loads bit by bit; kills, full disks, models."""

import contextlib
import copy
import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import agreed_message, exit_message, full_disk, killed_in, on_processes, whole, without_name_server
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.multiprocessing import ProcessExitedException

import checkpoint_sharded
import distributed as dist

RATE = 0.1
SETTINGS = {"--heads": 4, "--seed": 0}


class Net(nn.Module):
    """Tied weights, a buffer, and a parameter that has no gradient before the step `wakes`."""

    def __init__(self, layers=2, wakes=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        self.first = nn.Linear(6, 6, bias=False)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.late = nn.Parameter(torch.ones(6))
        self.register_buffer("seen", torch.zeros(()))
        self.wakes = wakes

    def forward(self, x, step=0):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).relu()
        if step >= self.wakes:
            x = x * self.late
        return self.last(x)


def make_optimizer(name, model, lr=RATE, weight_decay=0.01):
    """With two groups of parameters, which have different options."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() == 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0}]
    if name == "AdamW":
        return torch.optim.AdamW(groups, lr)
    return torch.optim.SGD(groups, lr, momentum=0.9 if name == "momentum" else 0)


def make_parts(name, kind="fsdp", seed=0, **options):
    torch.manual_seed(seed)
    model = Net().double()
    if kind == "fsdp":
        model = dist.prepare_fsdp_model(model)
    elif kind == "mixed":
        model = dist.prepare_fsdp_model(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    elif kind == "ddp":
        model = dist.prepare_ddp_model(model)
    optimizer = make_optimizer(name, model, **options)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


def train(model, optimizer, scheduler, first, last):
    """All ranks compute the same batch, so their number makes no difference."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x = torch.rand(4, 6, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        model(x, step).square().mean().backward()
        optimizer.step()
        scheduler.step()
        dist.unwrapped(model).seen += 1


def state_of(model, optimizer):
    """Copies of all values: weights, buffers, and the optimizer's state and options."""
    model = dist.unwrapped(model)
    names = {param: name for name, param in model.named_parameters()}
    state = {name: whole(value).clone() for name, value in model.state_dict().items()}
    for param, values in optimizer.state.items():
        state |= {f"{names[param]} {key}": whole(value).clone() for key, value in values.items()}
    for number, group in enumerate(optimizer.param_groups):
        state |= {f"{number} {key}": copy.copy(value) for key, value in group.items() if key != "params"}
    return state


def assert_equal(state, expected, tolerance=0):
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        if torch.is_tensor(value):
            torch.testing.assert_close(state[name], value, rtol=tolerance, atol=tolerance, msg=name)
        else:
            assert state[name] == value, name


# ---- resume -------------------------------------------------------------------------------------------------------


def test_a_saver_saves_when_it_is_due_and_loads_the_newest(tmp_path):
    args = SimpleNamespace(checkpoint_dir=str(tmp_path), save_every=2, keep=2, steps=5)
    parts = make_parts("AdamW", "plain")
    saver = checkpoint_sharded.Saver(*parts[:2], args, SETTINGS)
    assert saver.first_step == 0
    found = []
    for step in range(5):
        train(*parts, step, step + 1)
        saver.save_if_due(step + 1)
        found.append(sorted(os.listdir(tmp_path)))
    assert found == [[], ["step-2"], ["step-2"], ["step-2", "step-4"], ["step-4", "step-5"]], "the last one too"
    resumed = make_parts("AdamW", "plain", seed=1)
    assert checkpoint_sharded.Saver(*resumed[:2], args, SETTINGS).first_step == 5
    assert_equal(state_of(*resumed[:2]), state_of(*parts[:2]))
    line = exit_message(checkpoint_sharded.Saver, *resumed[:2], args, {**SETTINGS, "--heads": 8})
    assert line.startswith(f"{tmp_path}/step-5 was saved with --heads 4, not 8")
    args.checkpoint_dir = None
    saver = checkpoint_sharded.Saver(*resumed[:2], args, SETTINGS)
    saver.save_if_due(5)
    assert saver.first_step == 0, "no folder is named"


# Processes, how they wrap the model, and the step at which they stop.
SEGMENTS = [(1, "plain", 2), (2, "fsdp", 4), (2, "ddp", 5), (4, "fsdp", 6), (1, "plain", 7), (2, "mixed", 8)]
SEGMENTS += [(2, "mixed", 9), (1, "plain", 10)]
EXACT = 7  # the last step of float64
OPTIMIZERS = ("AdamW", "momentum", "SGD")


def segment_worker(local_rank, world_size, folder, kind, last):
    """Train from the newest checkpoint to the step `last`. What is loaded is what was saved, bit by bit."""
    dist.init_process_group()
    for name in OPTIMIZERS:
        where = f"{folder}/{name}"
        other = {"seed": last, "lr": 7, "weight_decay": 7} if last > 2 else {}
        parts = make_parts(name, kind, **other)
        parts[0](torch.ones(1, 6, dtype=torch.float64), last).sum().backward()  # gradients must not matter
        first = checkpoint_sharded.load(where, *parts, settings=SETTINGS)
        model, optimizer, scheduler = parts
        if first:
            before, rates = torch.load(f"{where}-{first}.pt", weights_only=True)
            assert_equal(state_of(model, optimizer), before)
            assert scheduler.state_dict() == rates
        train(*parts, first, last)
        with torch.no_grad():
            model(torch.ones(1, 6, dtype=torch.float64))  # the root stays gathered, perhaps in bfloat16
        checkpoint_sharded.save(where, model, optimizer, last, scheduler, settings=SETTINGS)
        state = state_of(model, optimizer)
        if dist.is_primary():
            torch.save((state, scheduler.state_dict()), f"{where}-{last}.pt")


@pytest.mark.guard
@pytest.mark.slow
def test_any_number_of_processes_resumes_what_any_number_saved(tmp_path, capfd):
    """FSDP, also in bfloat16, DDP and plain models; in a single process without a group, and without a warning."""
    for nprocs, kind, last in SEGMENTS:
        dist.launch(segment_worker, str(tmp_path), kind, last, nprocs=nprocs)
    stdout, stderr = capfd.readouterr()
    assert without_name_server(stderr) == ""
    steps = [last for *_, last in SEGMENTS]
    for name in OPTIMIZERS:
        resumed = [f"Resuming from {tmp_path}/{name}/step-{step}" for step in steps[:-1]]
        assert [line for line in stdout.splitlines() if f"/{name}/" in line] == resumed
        parts = make_parts(name, "plain")
        train(*parts, 0, EXACT)
        saved, _ = torch.load(tmp_path / f"{name}-{EXACT}.pt", weights_only=True)
        assert_equal(saved, state_of(*parts[:2]), tolerance=1e-12)


# ---- pipelines, buffers and frozen parameters ---------------------------------------------------------------------


class Stage(nn.Module):
    """The layers from `first` to `last` - 1, under their names in the whole model, each with a buffer of its own."""

    def __init__(self, first, last):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.BatchNorm1d(3) for i in range(first, last)})
        for i, layer in self.layers.items():
            layer.running_mean.fill_(int(i))
            nn.init.constant_(layer.weight, int(i) + 1)

    def step(self, name, lr):
        optimizer = make_optimizer(name, self, lr)
        for layer in self.layers.values():
            layer.eval()(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        return optimizer


def stages_worker(local_rank, world_size, folder, cuts):
    """Each rank has the layers between two of the `cuts`. The first job saves, the others load."""
    dist.init_process_group()
    for name in OPTIMIZERS:
        where = f"{folder}/{name}"
        model = Stage(cuts[local_rank], cuts[local_rank + 1])
        if not os.path.exists(where):
            optimizer = model.step(name, lr=0.5)
            checkpoint_sharded.save(where, model, optimizer, 1)
            continue
        for tensor in model.state_dict().values():
            tensor.zero_()
        optimizer = make_optimizer(name, model, lr=7, weight_decay=7)
        assert checkpoint_sharded.load(where, model, optimizer) == 1
        expected = Stage(cuts[local_rank], cuts[local_rank + 1])
        assert_equal(state_of(model, optimizer), state_of(expected, expected.step(name, lr=0.5)))


def test_stages_of_a_pipeline_are_loaded_with_other_cuts(tmp_path):
    for cuts in ((0, 1, 4), (0, 4), (0, 2, 3, 4)):
        dist.launch(stages_worker, str(tmp_path), cuts, nprocs=len(cuts) - 1)


@on_processes(2)
def test_rank_0s_buffers_are_saved_and_restored():
    model = dist.prepare_ddp_model(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    seen = dist.unwrapped(model).seen
    seen.fill_(10 + dist.get_rank())
    checkpoint_sharded.save("runs", model, optimizer, 1)
    assert seen == 10
    seen.fill_(0)
    assert (checkpoint_sharded.load("runs", model, optimizer), seen) == (1, 10)


@on_processes(2)
def test_frozen_parameters_may_be_left_out():
    model = Net()
    for param in [model.first.weight, *model.layers[0].parameters()]:
        param.requires_grad_(False)
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    model = dist.prepare_fsdp_model(model)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    checkpoint_sharded.save("runs", model, optimizer, 1, frozen=False)
    weights = {name for name in checkpoint_sharded._read_index("runs/step-1") if name.startswith("model.")}
    trained = {"model.layers.1.weight", "model.layers.1.bias", "model.late"}
    assert weights == trained | {"model.seen"}, "neither name of the tied weight"
    nn.init.zeros_(model.late)
    assert checkpoint_sharded.load("runs", model, optimizer, frozen=False) == 1
    assert whole(model.late).eq(1).all()


# ---- what cannot be loaded or saved -------------------------------------------------------------------------------


def linear(layers=2, make=torch.optim.AdamW, groups=1, **options):
    model = dist.prepare_fsdp_model(nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers))))
    params = list(model.parameters())
    groups = [{"params": params[i::groups]} for i in range(groups)]
    return model, make(groups, lr=RATE, **options)


@on_processes(2)
def test_what_does_not_fit_is_one_line_on_every_rank():
    sgd = torch.optim.SGD
    model, optimizer = linear()
    step = torch.optim.lr_scheduler.StepLR(sgd(model.parameters()), 1)
    assert checkpoint_sharded.load("AdamW", model, optimizer) == 0
    checkpoint_sharded.save("AdamW", model, optimizer, 1, settings=SETTINGS)
    model, optimizer = linear(make=sgd, groups=2)
    checkpoint_sharded.save("SGD", model, optimizer, 1, step)
    swapped = model, sgd(optimizer.param_groups[::-1])
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    half = model, sgd([{"params": list(model.parameters())[i::2]} for i in range(2)])
    missing = "RuntimeError: Missing key in checkpoint state_dict: "
    for folder, words, *given in (
        ("AdamW", "was saved with --heads 4, not 8", *linear(layers=3), None, {**SETTINGS, "--heads": 8}),
        ("AdamW", "was saved with --heads 4, not None", *linear(), None, None),
        ("AdamW", f"{missing}model.2.weight.", *linear(layers=3), None, SETTINGS),
        ("AdamW", "has model.1.bias, ", *linear(layers=1), None, SETTINGS),
        ("AdamW", f"{missing}optimizer.param_groups.1.lr.", *linear(groups=2), None, SETTINGS),
        ("AdamW", "was saved with optimizer class AdamW, not SGD", *linear(make=sgd), None, SETTINGS),
        # Adam would take AdamW's options without an error.
        ("AdamW", "was saved with optimizer class AdamW, not Adam", *linear(make=torch.optim.Adam), None, SETTINGS),
        ("AdamW", f"{missing}scheduler.", *linear(), step, SETTINGS),
        ("SGD", "has scheduler, ", *linear(make=sgd, groups=2), None, None),
        ("SGD", "has optimizer.param_groups.1.dampening, ", *linear(make=sgd), step, None),
        ("SGD", f"{missing}optimizer.", *linear(make=sgd, groups=2, momentum=0.9), step, None),
        ("SGD", "was saved with other parameters in a group of the optimizer", *swapped, step, None),
        ("SGD", "another model: 1.bias was torch.float32, and is torch.bfloat16", *half, step, None),
    ):
        line = agreed_message(checkpoint_sharded.load, folder, *given)
        assert os.path.abspath(f"{folder}/step-1") in line and words in line, line


@on_processes(2)
def test_what_is_damaged_or_not_shared_is_one_line_on_every_rank():
    """Files that are cut off, that are missing, and that one machine does not see."""
    rank, path = dist.get_rank(), Path("runs/step-3")
    checkpoint_sharded.save("runs", *linear(), 3)
    index = "its .metadata is damaged, or not on a shared disk"
    for name, content, words in (
        ("__0_0.distcp", (path / "__0_0.distcp").read_bytes()[:100], "cannot load "),
        (".metadata", (path / ".metadata").read_bytes()[:100], index),
        (".metadata", b"I am a text file.", index),
        (".metadata", b"", index),
        ("__1_0.distcp", None, "FileNotFoundError: "),
    ):
        dist.barrier()
        if rank == 0:
            shutil.copytree(path, "bad/step-3", dirs_exist_ok=True)
            Path("bad/step-3", name).unlink()
            if content is not None:
                Path("bad/step-3", name).write_bytes(content)
        dist.barrier()
        line = agreed_message(checkpoint_sharded.load, "bad", *linear())
        assert line.startswith(f"cannot load {os.path.abspath('bad/step-3')}: ") and words in line
    own = os.path.abspath(f"disk of machine {rank}")  # as a path that each machine has for itself
    assert agreed_message(checkpoint_sharded.save, own, *linear(), 1).startswith("rank 1 does not see ")
    if rank == 0:
        shutil.copytree(path, f"{own}/step-9")
    line = agreed_message(checkpoint_sharded.load, own, *linear())
    assert "disk of machine 1/step-9" in line and index in line


@on_processes(2)
def test_what_ranks_must_share_is_compared_and_further_values_come_back():
    parts, rank, nan = linear(), dist.get_rank(), float("nan")
    assert checkpoint_sharded.load("more", *parts, best=nan, counter=0)[0] == 0
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(parts[1])
    plateau.step(1.0 + rank)  # the loss of this rank's share
    for name, differs in (
        ("settings", {"settings": {"--seed": rank}}),
        ("scheduler", {"scheduler": plateau}),
        ("the value best", {"best": rank}),
    ):
        line = agreed_message(checkpoint_sharded.save, "more", *parts, 1, **differs)
        assert line.startswith(f"{name} of rank 1 differs from rank 0's")
    parts[1].param_groups[0]["lr"] = 0.1 + rank
    line = agreed_message(checkpoint_sharded.save, "more", *parts, 1)
    assert line.startswith("an option for 0.weight of rank 1 differs from rank 0's")
    assert not os.path.exists("more")
    weights = {name: param.detach().clone() for name, param in parts[0].named_parameters()}
    more = {"best": {"weights": weights, "loss": 0.5}, "counter": 3}
    parts[1].param_groups[0]["lr"] = 0.1
    checkpoint_sharded.save("more", *parts, 1, settings={"--clip": nan}, **more)
    empty = {"weights": {name: torch.zeros_like(weight) for name, weight in weights.items()}, "loss": None}
    loaded = checkpoint_sharded.load("more", *linear(), settings={"--clip": nan}, best=empty, counter=None)
    assert loaded[0] == 1 and loaded[2] == 3 and loaded[1]["loss"] == 0.5
    for name, weight in weights.items():
        assert torch.equal(whole(loaded[1]["weights"][name]), whole(weight))
    agreed_message(checkpoint_sharded.save, "more", *parts, 1, best=rank)
    assert checkpoint_sharded.load("more", *parts, settings={"--clip": nan}, **more)[0] == 1, "it is still there"


def test_a_folder_in_which_no_save_would_work(tmp_path):
    with mock.patch("pathlib.Path.rename", side_effect=OSError(errno.ENOSYS, "not implemented")):
        line = exit_message(checkpoint_sharded.check_folder, "--checkpoint-dir", tmp_path)
    assert line.startswith(f"--checkpoint-dir: cannot write to {tmp_path}: ") and "not implemented" in line
    assert os.listdir(tmp_path) == [], "the try leaves nothing"


# ---- which checkpoints there are ----------------------------------------------------------------------------------


@on_processes(2)
def test_the_newest_are_kept():
    parts, folder = linear(), os.path.abspath("runs")

    def names():
        dist.barrier()  # rank 0 has deleted what it deletes
        return sorted(os.listdir(folder), key=lambda name: int(name.partition("-")[2]))

    for step in (1, 2, 3):
        checkpoint_sharded.save(folder, *parts, step)
    if dist.is_primary():
        os.mkdir(f"{folder}/step-10")  # left by a save that was interrupted
        Path(folder, "step-10", "__7_0.distcp").touch()
    assert names() == ["step-1", "step-2", "step-3", "step-10"], "without keep nothing is deleted"
    assert checkpoint_sharded.load(folder, *parts) == 3
    checkpoint_sharded.save(folder, *parts, 10, keep=3)
    assert names() == ["step-2", "step-3", "step-10"]
    assert not os.path.exists(f"{folder}/step-10/__7_0.distcp")
    assert checkpoint_sharded.load(folder, *parts) == 10
    with full_disk():
        line = agreed_message(checkpoint_sharded.save, folder, *parts, 11, keep=1)
    assert line.startswith(f"cannot save {folder}/step-11: ") and "File too large" in line
    assert names() == ["step-2", "step-3", "step-10"], "the incomplete one is deleted, and no older one"
    checkpoint_sharded.save(folder, *parts, 11, keep=1)
    assert names() == ["step-11"]
    # The step just written stays, although an earlier run has left higher ones. A copy under another name is none.
    dist.barrier()
    if dist.is_primary():
        for name in ("step-4.bak", "step-012"):
            shutil.copytree(f"{folder}/step-11", f"{folder}/{name}")
    checkpoint_sharded.save(folder, *parts, 10, keep=2)
    checkpoint_sharded.save(folder, *parts, 1, keep=2)
    dist.barrier()
    assert set(os.listdir(folder)) == {"step-1", "step-11", "step-4.bak", "step-012"}
    for step, keep in ((0, None), (2, 0), (2, -1)):
        with pytest.raises(ValueError, match=f"must be at least 1, got {step} and {keep}"):
            checkpoint_sharded.save(folder, *parts, step, keep=keep)
    assert checkpoint_sharded.load(folder, *parts) == 11


@on_processes(2)
def test_a_save_behind_the_next_steps_has_the_state_of_its_call():
    """It is complete when its function returns, equals a save that waits, and its errors are raised there."""
    group = torch.distributed.new_group(backend="gloo")
    for mode in (group, None):
        parts = make_parts("AdamW")
        train(*parts, 0, 1)
        path = Path(f"runs {mode is None}").absolute()
        checkpoint_sharded.save(path, *parts[:2], 1)
        train(*parts, 1, 2)
        wait = checkpoint_sharded.save(path, *parts[:2], 2, keep=1, group=mode, counter=2)
        train(*parts, 2, 4)  # while it is written
        if mode is not None:
            wait()
        dist.barrier()
        assert os.listdir(path) == ["step-2"]
        expected = make_parts("AdamW")
        train(*expected, 0, 2)
        parts = make_parts("AdamW", seed=1)
        assert checkpoint_sharded.load(path, *parts[:2], counter=0) == (2, 2)
        assert_equal(state_of(*parts[:2]), state_of(*expected[:2]))
    with full_disk():
        wait = checkpoint_sharded.save(path, *parts[:2], 3, keep=1, group=group)
        line = agreed_message(wait)
    assert line.startswith(f"cannot save {path}/step-3: ") and "File too large" in line
    dist.barrier()
    assert os.listdir(path) == ["step-2"]


FILESYSTEM = "torch.distributed.checkpoint.filesystem"
KILLS = {  # the rank, how it is killed in the save of step 2, and the newest complete checkpoint
    "before the data": (1, (f"{FILESYSTEM}._write_files_from_queue",), 1),
    "in the data": (1, ("os.fsync",), 1),
    "in rank 0's data": (0, ("os.fsync",), 1),
    "in the index": (0, ("os.fsync", 2), 1),
    "before the rename": (0, (f"{FILESYSTEM}.FileSystem.rename",), 1),
    "after the rename": (0, (f"{FILESYSTEM}.FileSystem.rename", 1, True), 2),
    "before older ones are deleted": (0, ("checkpoint_sharded._steps",), 2),
    "while older ones are deleted": (0, ("os.unlink",), 2),
}


def killed_worker(local_rank, world_size, folder, rank, how, behind):
    dist.init_process_group()
    group = torch.distributed.new_group(backend="gloo") if behind else None
    parts = make_parts("AdamW")
    train(*parts, 0, 1)
    checkpoint_sharded.save(folder, *parts[:2], 1)
    train(*parts, 1, 2)
    with killed_in(*how) if local_rank == rank else contextlib.nullcontext():
        wait = checkpoint_sharded.save(folder, *parts[:2], 2, keep=1, group=group)
        if behind:
            train(*parts, 2, 3)
            wait()


def survivors_worker(local_rank, world_size, folder):
    dist.init_process_group()
    for moment, (_, _, step) in KILLS.items():
        where = f"{folder}/{moment}"
        expected = make_parts("AdamW")
        train(*expected, 0, step)
        parts = make_parts("AdamW", seed=1)
        assert checkpoint_sharded.load(where, *parts[:2]) == step, moment
        assert_equal(state_of(*parts[:2]), state_of(*expected[:2]))
        train(*parts, step, 2)
        checkpoint_sharded.save(where, *parts[:2], 2, keep=1)
        dist.barrier()
        assert os.listdir(where) == ["step-2"], moment


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("behind", [False, True])
def test_kill_in_a_save(behind, tmp_path):
    for moment, (rank, how, _) in KILLS.items():
        with pytest.raises(ProcessExitedException, match=f"rank {rank} was killed by SIGKILL"):
            dist.launch(killed_worker, str(tmp_path / moment), rank, how, behind, nprocs=2)
    dist.launch(survivors_worker, str(tmp_path), nprocs=2)
