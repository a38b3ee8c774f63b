"""A snapshot is whole or absent, is agreed on by all nodes, and a bad one stops every rank with one clear line."""

import contextlib
import copy
import errno
import multiprocessing
import os
import pickle
import re
import resource
import signal
import stat
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from conftest import ROOT, Bomb, agreed_message, exit_message, killed_in, on_processes, run
from torch import nn
from torch.multiprocessing import ProcessExitedException

import checkpoint
import distributed as dist


def objects(seed=0, width=8, optimizer_class=torch.optim.Adam):
    """A model with buffers, its optimizer and a scheduler after some steps: the same in every process."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(seed + 2):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
        scheduler.step()
    model[1].running_mean.normal_()
    return model, optimizer, scheduler


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def assert_same_states(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert_same(one.state_dict(), other.state_dict())


# ---- whole, exact, interchangeable ----------------------------------------------------------------------------------


def save_worker(local_rank, world_size, path):
    dist.init_process_group()
    model, optimizer, scheduler = objects(1)
    wrapped = dist.prepare_ddp_model(model)
    if world_size == 2:
        wrapped = torch.compile(wrapped, backend="eager")
    critic = nn.Linear(2, 2)
    second = torch.optim.SGD(critic.parameters(), lr=0.5)
    nn.init.constant_(critic.weight, 5)
    more = {"critic": dist.prepare_ddp_model(critic), "second": second}
    plain = {"best": 0.31, "patience": 2, "names": ["a", {"b": None}], "table": torch.arange(3, dtype=torch.int16)}
    settings = {"--seed": 3}
    checkpoint.save(path, wrapped, optimizer, scheduler, epoch=7, step=3, settings=settings, **more, **plain)


def load_worker(local_rank, world_size, path):
    dist.init_process_group()
    model, optimizer, scheduler = objects(9)
    critic = nn.Linear(2, 2)
    second = torch.optim.SGD(critic.parameters(), lr=0.1)
    model_and_more = (dist.prepare_ddp_model(model), optimizer, scheduler)
    parts = {"critic": critic, "names": None, "table": None, "second": second, "best": 9, "patience": 0}
    none = checkpoint.load(f"{path}.none", *model_and_more, settings={"--seed": 4}, **parts)
    assert none == (0, 0, None, None, 9, 0), "in the order in which they are given"
    with pytest.raises(dist.DistributedError, match="was saved with --seed 3, not 4: use the same, or another path"):
        checkpoint.load(path, *model_and_more, settings={"--seed": 4}, **parts)
    epoch, step, names, table, best, patience = checkpoint.load(path, *model_and_more, settings={"--seed": 3}, **parts)
    assert (epoch, step, best, patience, names) == (7, 3, 0.31, 2, ["a", {"b": None}])
    assert table.dtype == torch.int16 and table.tolist() == [0, 1, 2]
    assert_same_states((model, optimizer, scheduler), objects(1))
    assert (critic.weight == 5).all() and second.param_groups[0]["lr"] == 0.5


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize(("savers", "loaders"), [(3, 1), (1, 3), (2, 3)])
def test_any_number_of_processes_loads_what_any_number_saved(savers, loaders, tmp_path):
    path = str(tmp_path / "snapshot.pt")
    dist.launch(save_worker, path, nprocs=savers)
    snapshot = torch.load(path, weights_only=True)
    plain = {"best", "patience", "names", "table"}
    own = {"epoch", "step", "settings"}
    assert snapshot.keys() == {"model", "optimizer", "scheduler", "critic", "second"} | own | plain
    assert snapshot["model"].keys() == objects()[0].state_dict().keys(), "of the unwrapped model"
    assert snapshot["critic"].keys() == {"weight", "bias"}, "of the unwrapped model"
    dist.launch(load_worker, path, nprocs=loaders)
    assert os.listdir(tmp_path) == ["snapshot.pt"]


# ---- many nodes -----------------------------------------------------------------------------------------------------


def nodes_worker(rank, world_size, folder):
    dist.init_process_group()
    node = Path(folder, f"node{rank}")
    node.mkdir()
    os.chdir(node)
    parts = objects()
    assert checkpoint.load("snapshot.pt", *parts) == (0, 0)
    assert_same_states(parts, objects())

    # Two nodes of two: local rank 0 of each writes.
    os.environ["LOCAL_RANK"] = str(rank % 2)
    checkpoint.save("snapshot.pt", *parts, epoch=1)
    assert os.listdir(node) == ["snapshot.pt"] * (rank % 2 == 0)
    os.environ["LOCAL_RANK"] = "0"  # from here on each rank is the only one of a node

    # Every node writes the same file, each time, also where batch norm's statistics differ by rank.
    for epoch in (2, 3):
        parts[0][1].running_mean.fill_(rank)
        checkpoint.save("snapshot.pt", *parts, epoch=epoch)
        snapshot = torch.load("snapshot.pt", weights_only=True)
        assert snapshot["epoch"] == epoch and snapshot["model"]["1.running_mean"].eq(0).all()

    # The newest wins, whoever has it, and a node without a disk's worth of history gets it too.
    os.remove("snapshot.pt")
    positions = [None, (2, 0), (2, 5), (1, 9)]
    if positions[rank] is not None:
        epoch, step = positions[rank]
        model, optimizer, scheduler = (part.state_dict() for part in objects(rank))
        states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        torch.save({**states, "epoch": epoch, "step": step, "settings": {}}, "snapshot.pt")
    parts = objects(9)
    assert checkpoint.load("snapshot.pt", *parts) == (2, 5)
    assert_same_states(parts, objects(2))

    # One folder that all nodes share: the file is whole each time.
    shared = Path(folder, "shared.pt")
    for epoch in range(1, 11):
        checkpoint.save(shared, *parts, epoch=epoch)
        assert checkpoint.load(shared, *parts) == (epoch, 0)
    dist.barrier()
    assert not list(Path(folder).glob("*.tmp"))

    # A bad file on one node stops all, though the others' are intact, rather than start with an unclear history.
    if rank == 1:
        Path("snapshot.pt").write_bytes(b"")
    message = agreed_message(checkpoint.load, "snapshot.pt", *parts)
    assert str(Path(folder, "node1", "snapshot.pt")) in message

    # A node that cannot save stops all.
    if rank == 1:
        os.remove("snapshot.pt")
        os.mkdir("snapshot.pt")
    message = agreed_message(checkpoint.save, "snapshot.pt", *parts, epoch=3)
    assert str(Path(folder, "node1", "snapshot.pt")) in message
    assert not list(Path.cwd().glob("*.tmp"))


class Noam:
    """A wrapper that is no torch.optim.Optimizer."""

    def __init__(self, optimizer):
        self.param_groups = optimizer.param_groups
        self.state_dict = optimizer.state_dict
        self.load_state_dict = optimizer.load_state_dict


@on_processes(2)
def test_what_only_one_rank_holds_is_not_saved_as_if_all_did():
    """Each value that only rank 0's file would keep is refused. What is gathered is equal, and is saved."""
    rank, path = dist.get_rank(), "snapshot.pt"
    model, optimizer, _ = objects()
    refused = {"best": 0.5 + rank, "files": [4, 5 + rank], "state": {"next": torch.tensor(rank)}, "epoch": rank}
    for name, value in refused.items():
        message = agreed_message(checkpoint.save, path, model, optimizer, **{name: value})
        assert message.startswith(f"{name}{'.next' * (name == 'state')} of rank 1 differs from rank 0's")
    files = dist.gather_objects(refused["files"])
    checkpoint.save(path, model, optimizer, files=files)
    assert checkpoint.load(path, model, optimizer, files=None) == (0, 0, [[4, 5], [4, 6]])
    # A parameter outside the model, which DDP does not know.
    temperature = nn.Parameter(torch.tensor(0.07 * (1 + rank)))
    optimizer = torch.optim.SGD([*model.parameters(), temperature])
    message = agreed_message(dist.check_in_sync, model, optimizer)
    assert message.startswith("parameter 6 of the optimizer of rank 1 differs from rank 0's")
    message = agreed_message(checkpoint.save, path, model, optimizer, temperature=temperature)
    assert message.startswith("temperature of rank 1 differs from rank 0's")
    for function in (checkpoint.save, checkpoint.load):
        for each in (optimizer, Noam(optimizer)):
            message = agreed_message(function, path, model, each)
            assert message.startswith("an optimizer trains a parameter that would not be saved: pass its module too")
    temperature.data.fill_(0.5)
    checkpoint.save(f"{path}.trained", model, optimizer, temperature=temperature)
    temperature.data.fill_(0.0)
    _, _, loaded = checkpoint.load(f"{path}.trained", model, optimizer, temperature=temperature)
    assert loaded is temperature and temperature.item() == 0.5, "the optimizer trains what is loaded"
    # The options of an optimizer.
    message = agreed_message(checkpoint.save, path, model, torch.optim.SGD(model.parameters(), lr=0.1 + rank))
    assert message.startswith("optimizer.param_groups.0.lr of rank 1 differs from rank 0's")
    # A second model is named.
    model, optimizer, _ = objects()
    average = torch.optim.swa_utils.AveragedModel(model)
    average.module[0].bias.data += rank
    message = agreed_message(checkpoint.save, path, model, optimizer, average=average)
    assert message.startswith("average.module.0.bias of rank 1 differs from rank 0's")


@on_processes(2)
def test_values_and_buffers_of_any_type_come_back():
    for dtype in (torch.bool, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64):
        model = nn.Linear(2, 2)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        model.register_buffer("flags", torch.tensor([1, 0]).to(dtype))
        optimizer = torch.optim.SGD(model.parameters())
        checkpoint.save("snapshot.pt", model.requires_grad_(False), optimizer, value=model.flags.clone())
        model.flags.zero_()
        _, _, value = checkpoint.load("snapshot.pt", model, optimizer, value=None)
        assert value.dtype == model.flags.dtype == dtype
        assert value.real.float().tolist() == model.flags.real.float().tolist() == [1, 0]


@pytest.mark.guard
@pytest.mark.slow
def test_nodes_agree(tmp_path):
    dist.launch(nodes_worker, str(tmp_path), nprocs=4)


# ---- a kill while saving --------------------------------------------------------------------------------------------


def kill_worker(local_rank, world_size, path, target, at_its_end):
    dist.init_process_group()
    with killed_in(target, at_its_end=at_its_end) if local_rank == 0 else contextlib.nullcontext():
        checkpoint.save(path, *objects(2), epoch=2)


@pytest.mark.parametrize(
    ("target", "at_its_end", "survivor"),
    [("torch.save", False, 1), ("os.fsync", False, 1), ("os.replace", False, 1), ("os.replace", True, 2)],
)
def test_a_kill_leaves_the_old_snapshot_or_the_new_one(target, at_its_end, survivor, tmp_path):
    path = str(tmp_path / "snapshot.pt")
    checkpoint.save(path, *objects(1), epoch=1)
    with pytest.raises(ProcessExitedException, match="rank 0 was killed by SIGKILL"):
        dist.launch(kill_worker, path, target, at_its_end, nprocs=2)
    parts = objects(9)
    assert checkpoint.load(path, *parts) == (survivor, 0)
    assert_same_states(parts, objects(survivor))
    checkpoint.save(path, *parts, epoch=3)  # takes the unfinished file's place
    assert os.listdir(tmp_path) == ["snapshot.pt"]


# ---- bad snapshots --------------------------------------------------------------------------------------------------


def bad_files(folder):
    """(name, what the line must say) of each bad file; they are made in `folder`."""
    model, optimizer, scheduler = objects()
    checkpoint.save(folder / "good", model, optimizer, scheduler, epoch=1)
    good = (folder / "good").read_bytes()
    cases = {f"truncated{i}": good[: i * len(good) // 11] for i in range(1, 11)}
    cases["empty"] = b""
    cases["text"] = b"I am a text file.\n" * 100
    weight = model[0].weight.detach().numpy().tobytes()
    assert good.count(weight) == 1
    cases["flipped"] = good.replace(weight, bytes([weight[0] ^ 1]) + weight[1:])
    cases["pickle"] = pickle.dumps({"model": Bomb("exploded")})
    for name, content in cases.items():
        (folder / name).write_bytes(content)
    torch.save({"epoch": 1, "step": 0, "model": Bomb("exploded")}, folder / "bomb")
    torch.save({"epoch": 1, "model": model.state_dict()}, folder / "foreign")
    torch.save(model[0].weight.detach(), folder / "tensor")
    expected = dict.fromkeys([*cases, "tensor"], "is damaged or not a snapshot")
    expected["foreign"] = "is damaged or not a snapshot (KeyError: 'step')"
    expected["bomb"] = "is damaged or not a snapshot (UnpicklingError: "
    (folder / "directory").mkdir()
    checkpoint.save(folder / "unreadable", model, optimizer, scheduler, epoch=1)
    (folder / "unreadable").chmod(0)
    expected |= {"directory": "Is a directory", "unreadable": "Permission denied"}
    checkpoint.save(folder / "wider", *objects(width=9), epoch=1)
    own = {"model": [], "optimizer": None, "scheduler": None, "epoch": 1, "step": 0, "settings": {}}
    torch.save(own, folder / "own")
    checkpoint.save(folder / "unscheduled", model, optimizer, epoch=1)
    without = "holds the state of model, optimizer, not of model, optimizer, scheduler"
    return expected | {
        "unscheduled": without,
        "wider": "was saved from another model or optimizer",
        "own": "was saved from another model or optimizer",
    }


def bad_worker(local_rank, world_size, folder, expected):
    dist.init_process_group()
    os.chdir(folder)
    if os.geteuid() == 0:
        os.seteuid(65534)  # root may read everything
    for name, reason in expected.items():
        message = agreed_message(checkpoint.load, name, *objects())
        assert str(Path(folder, name)) in message
        assert reason in message, name
        is_right = reason.startswith(("holds the state", "was saved from"))  # nobody should delete it
        assert ("delete or rename" in message) != is_right
    message = agreed_message(checkpoint.load, "good", *objects()[:2])
    assert "holds the state of model, optimizer, scheduler, not of model, optimizer:" in message


def test_bad_snapshots(tmp_path):
    tmp_path.chmod(0o777)  # what a file would execute could write here
    expected = bad_files(tmp_path)
    readable = [name for name in expected if name not in ("directory", "unreadable")]
    before = {name: (tmp_path / name).read_bytes() for name in readable}
    dist.launch(bad_worker, str(tmp_path), expected, nprocs=2)
    assert {name: (tmp_path / name).read_bytes() for name in readable} == before
    assert not (tmp_path / "exploded").exists()


def full_disk_worker(local_rank, world_size, path):
    dist.init_process_group()
    parts = objects(2, width=2000)  # large enough for torch.save to write before the end
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    message = agreed_message(checkpoint.save, path, *parts, epoch=2)
    assert path in message and os.strerror(errno.EFBIG) in message


def test_a_full_disk_leaves_the_old_snapshot(tmp_path):
    path = str(tmp_path / "snapshot.pt")
    checkpoint.save(path, *objects(1), epoch=1)
    dist.launch(full_disk_worker, path, nprocs=2)
    assert os.listdir(tmp_path) == ["snapshot.pt"]
    parts = objects(9)
    assert checkpoint.load(path, *parts) == (1, 0)
    assert_same_states(parts, objects(1))


def test_a_saving_error_that_is_not_the_disks_keeps_its_traceback(tmp_path):
    (tmp_path / "snapshot.pt").write_bytes(b"old")
    with pytest.raises(RuntimeError, match="CUDA error"), checkpoint.atomic(tmp_path / "snapshot.pt") as file:
        file.write(b"new")
        raise RuntimeError("CUDA error")
    assert os.listdir(tmp_path) == ["snapshot.pt"] and (tmp_path / "snapshot.pt").read_bytes() == b"old"


# ---- what a user may put in -----------------------------------------------------------------------------------------


class Extra(nn.Linear):
    def get_extra_state(self):
        return Path("x")


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    path = tmp_path / "snapshot.pt"
    model, optimizer, _ = objects()
    checkpoint.save(path, model, optimizer, epoch=1)
    before = path.read_bytes()
    for name, value in {"numpy": np.float64(0.1), "collections.defaultdict": defaultdict(int)}.items():
        message = exit_message(checkpoint.save, path, model, optimizer, epoch=2, note=value)
        assert message.startswith(f"cannot save {path}: weights_only=True cannot load ") and name in message
        assert path.read_bytes() == before
    message = exit_message(checkpoint.save, path, model, optimizer, epoch=2, note=[1, {"where": Path("x")}])
    assert message.startswith("note.1.where has a <class 'pathlib.PosixPath'>: ")
    model = Extra(1, 1)
    message = exit_message(checkpoint.save, path, model, torch.optim.SGD(model.parameters()), epoch=2)
    assert message.startswith("model._extra_state has a <class 'pathlib.PosixPath'>: ")
    assert os.listdir(tmp_path) == ["snapshot.pt"]


@on_processes(2)
def test_tensors_of_any_layout_are_synced():
    rank = dist.get_rank()
    whole, transposed = torch.full((4, 6), float(rank)), torch.full((2, 3), float(rank)).t()
    dist.sync_params([whole[:, 1], whole[::2, 3], transposed])
    expected = torch.full((4, 6), float(rank))
    expected[:, 1] = expected[::2, 3] = 0
    assert torch.equal(whole, expected), "its neighbours in memory are not touched"
    assert (transposed == 0).all()


class Awkward(nn.Module):
    """Batch norm, dropout, and a head that has outputs only in training."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])

    def forward(self, x):
        x = self.body(x)
        return [head(x) for head in self.heads] if self.training else [self.heads[0](x)]


@on_processes(2)
def test_settling_the_buckets_leaves_no_trace():
    torch.manual_seed(0)
    model = Awkward()
    ddp_model = dist.prepare_ddp_model(model)
    model.body[1].running_mean.fill_(dist.get_rank())
    before = copy.deepcopy(model.state_dict())

    def compute_loss():
        with torch.no_grad():
            model.body[0].weight.mul_(0.9)  # as a forward does that moves an average of other weights
        return sum(ddp_model(torch.randn(4, 4))).sum()

    checkpoint.rebuild_buckets(ddp_model, compute_loss)
    assert_same(model.state_dict(), before)
    assert ddp_model.training and all(not param.grad.any() for param in model.parameters() if param.grad is not None)
    assert sum(ddp_model(torch.randn(4, 4))).sum().backward() is None


def test_the_disk_has_the_file_and_its_name_before_the_save_ends(tmp_path):
    events, fsync, replace = [], os.fsync, os.replace

    def record_fsync(fd):
        status = os.fstat(fd)
        events.append("folder" if stat.S_ISDIR(status.st_mode) else f"file of {status.st_size} bytes")
        fsync(fd)

    def record_replace(*args):
        events.append("rename")
        replace(*args)

    recorded = mock.patch.multiple(os, fsync=record_fsync, replace=record_replace)
    with recorded, checkpoint.atomic(tmp_path / "file") as file:
        file.write(b"new")
    assert events[-3:] == ["file of 3 bytes", "rename", "folder"]


def test_a_folder_that_cannot_be_flushed_can_be_saved_to(tmp_path, monkeypatch):
    """The new file is in place by then. A folder may also be writable, but not readable."""
    fsync, open_folder, opened = os.fsync, os.open, []

    def fails_for_folders(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            opened.append(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    def no_folders(path, flags, *args, **kwargs):
        if path == str(tmp_path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_folder(path, flags, *args, **kwargs)

    path = tmp_path / "snapshot.pt"
    for step, (name, function) in enumerate((("fsync", fails_for_folders), ("open", no_folders)), start=1):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, function)
            checkpoint.save(path, *objects(1), epoch=step)
        assert checkpoint.load(path, *objects()) == (step, 0)
    with pytest.raises(OSError):
        os.fstat(opened[0])  # it is closed


def test_the_check_before_training_does_what_a_save_does(tmp_path, monkeypatch):
    """A folder may refuse each rename, as a bucket does, or one onto a file, or to flush a file."""
    path, replace = tmp_path / "result.pt", os.replace

    def refuse(*args):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    def refuse_if_it_exists(source, target):
        if os.path.exists(target):
            refuse()
        replace(source, target)

    for name, function in (("replace", refuse), ("replace", refuse_if_it_exists), ("fsync", refuse)):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, function)
            message = exit_message(checkpoint.check_writable, "--output", str(path))
        assert message.startswith(f"--output: cannot write to {tmp_path}: ") and "not implemented" in message
        assert os.listdir(tmp_path) == []
    checkpoint.check_writable("--output", str(path))


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    assert exit_message(checkpoint.check_writable, "--save", pipe) == f"--save: {pipe!r} is not the name of a file"
    assert exit_message(checkpoint.save, pipe, *objects(1)) == f"cannot save {pipe}: it is not a regular file"
    long = str(tmp_path / ("x" * 250))  # the temporary file has a longer name
    assert "File name too long" in exit_message(checkpoint.check_writable, "--save", long)
    for device in ("/dev/null", str(tmp_path)):
        assert "is not" in exit_message(checkpoint.check_writable, "--save", device)
    # A script that loads first learns there that it cannot save.
    assert exit_message(checkpoint.load, "/sys/snapshot.pt", *objects()).startswith("cannot write to /sys: ")
    assert stat.S_ISFIFO(os.stat(pipe).st_mode) and os.listdir(tmp_path) == ["pipe"]


def test_a_save_keeps_the_mode_and_refuses_what_is_write_protected(tmp_path):
    path = tmp_path / "snapshot.pt"
    for mode in (0o600, 0o664):
        path.touch()
        path.chmod(mode)
        checkpoint.check_writable("--output", path)
        checkpoint.save(path, *objects(1))
        assert stat.S_IMODE(path.stat().st_mode) == mode
    before = path.read_bytes()
    path.chmod(0o444)
    code = f"import checkpoint; checkpoint.check_writable('--output', {str(path)!r})"
    as_anybody = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.getuid() == 0 else ()
    status, _, stderr = run("-c", code, prefix=as_anybody)
    assert status == 1 and stderr.startswith("--output: ") and stderr.endswith("snapshot.pt: Permission denied\n")
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["snapshot.pt"]


def test_a_file_that_is_mounted_is_refused(tmp_path):
    """As by `docker run -v model.pt:/data/model.pt`: no rename can replace it."""
    (tmp_path / "model.pt").touch()
    code = "import checkpoint; checkpoint.check_writable('--output', 'model.pt')"
    command = f'mount --bind model.pt model.pt && PYTHONPATH={ROOT} {sys.executable} -c "{code}"'
    isolated = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command)
    done = subprocess.run(isolated, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and re.fullmatch("--output: .* is mounted as a file, .*\n", done.stderr), done.stderr


def test_one_process_writes_whatever_its_local_rank_is(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")  # left in the shell
    checkpoint.save(tmp_path / "snapshot.pt", *objects(1), epoch=3)
    assert checkpoint.load(tmp_path / "snapshot.pt", *objects()) == (3, 0)


def test_another_order_of_parameters_and_another_type_are_one_line(tmp_path):
    """Else equal shapes would swap their states, and float32 would be rounded."""
    path = tmp_path / "snapshot.pt"
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})

    def adam(*names):
        return torch.optim.Adam([{"params": model[name].parameters()} for name in names])

    checkpoint.save(path, model, adam("a", "b"), epoch=1)
    assert checkpoint.load(path, model, adam("a", "b")) == (1, 0)
    line = exit_message(checkpoint.load, path, model, adam("b", "a"))
    assert "was saved with optimizer parameter 0 of group 0 model.a.weight, not model.b.weight" in line
    line = exit_message(checkpoint.load, path, model.bfloat16(), adam("a", "b"))
    assert "was saved from another model or optimizer (a.weight is torch.bfloat16, and was torch.float32)" in line


def test_settings_are_equal_or_refused(tmp_path):
    parts, path = objects(), tmp_path / "snapshot.pt"
    for same in (float("nan"), [1, 2.5], {"a": None}):
        checkpoint.save(path, *parts, settings={"--clip": same})
        assert checkpoint.load(path, *parts, settings={"--clip": same}) == (0, 0)
    with pytest.raises(TypeError, match="Tensor is not JSON serializable"):
        checkpoint.save(path, *parts, settings={"--clip": torch.ones(2)})
    for number, hint in (
        (np.float32(1), r"pass .* float\(best\)"),
        (np.float64(1), r"of a number of numpy pass float"),
    ):
        with pytest.raises(dist.DistributedError, match=hint):
            checkpoint.save(path, *parts, best=number)


def test_another_optimizer_scheduler_or_settings_are_one_line(tmp_path):
    """Adam's state is taken by AdamW without an error, weight decay and all, and by SGD with one at its first step."""
    path = tmp_path / "snapshot.pt"
    model, optimizer, scheduler = objects()
    checkpoint.save(path, model, optimizer, scheduler, settings={"--seed": 3, "--clip": None})
    for other in (torch.optim.SGD, torch.optim.AdamW):
        line = exit_message(checkpoint.load, path, model, other(model.parameters(), lr=0.1), scheduler)
        assert f"{path} was saved with optimizer class Adam, not {other.__name__}" in line
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    settings = {"--seed": 3}
    assert "scheduler class StepLR, not Cosine" in exit_message(
        checkpoint.load, path, model, optimizer, cosine, settings
    )
    for given, name in (({}, "--seed 3, not None"), ({"--seed": 3, "--amp": 1}, "--amp None, not 1")):
        line = exit_message(checkpoint.load, path, model, optimizer, scheduler, given)
        assert f"was saved with {name}" in line
    assert checkpoint.load(path, model, optimizer, scheduler, settings) == (0, 0), "an option of value None is no other"
    snapshot = torch.load(path, weights_only=True)
    del snapshot["settings"]["optimizer class"], snapshot["settings"]["scheduler class"]
    torch.save(snapshot, path)
    assert checkpoint.load(path, model, optimizer, scheduler, settings) == (0, 0), "as older snapshots have none"


def test_a_symbolic_link_is_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "snapshot.pt"
    link.symlink_to(tmp_path / "disk" / "snapshot.pt")
    parts = objects(1)
    checkpoint.save(link, *parts, epoch=1)
    assert link.is_symlink() and os.listdir(tmp_path / "disk") == ["snapshot.pt"]
    assert checkpoint.load(link, *parts) == (1, 0)


@on_processes(2)
def test_a_sharded_model_is_refused():
    model = dist.prepare_fsdp_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for function in (checkpoint.save, checkpoint.load):
        message = agreed_message(function, "snapshot.pt", model, optimizer)
        assert message == "the model is sharded: use checkpoint_sharded.save and checkpoint_sharded.load"
    assert not os.path.exists("snapshot.pt")


# ---- SIGTERM --------------------------------------------------------------------------------------------------------


@on_processes(2)
def test_all_ranks_stop_after_the_same_step():
    for receiver in range(2):
        preemption = checkpoint.Preemption()
        stopped = None
        for step in range(20):
            if step == 5 and dist.get_rank() == receiver:
                signal.raise_signal(signal.SIGTERM)
            if preemption.agreed():
                stopped = step
                break
        assert dist.gather_objects(stopped) == [6, 6], "all stop after the same step, and lose none"


def leave_while_a_loader_runs(to_test):
    batches = checkpoint.shielded(
        torch.utils.data.DataLoader(range(100), num_workers=1, multiprocessing_context="fork")
    )
    next(batches)
    loading = psutil.Process(multiprocessing.active_children()[0].pid)
    to_test.send(loading.pid)
    to_test.recv()
    exit_at_once = os._exit

    def exit_late(status):
        """When its end has been noticed here: torch has a handler for that, which raises an error."""
        psutil.wait_procs([loading], timeout=10)
        exit_at_once(status)

    with mock.patch("os._exit", exit_late):
        checkpoint.Preemption().leave()


def test_a_loaders_processes_end_with_a_preempted_process():
    """By themselves they would notice its end after up to 5 s, and torchrun would start others meanwhile."""
    context = multiprocessing.get_context("forkserver")
    from_process, to_test = context.Pipe()
    process = context.Process(target=leave_while_a_loader_runs, args=(to_test,))
    process.start()
    try:
        assert from_process.poll(60)
        loading = psutil.Process(from_process.recv())
        from_process.send("leave")
        process.join(60)
        assert process.exitcode == 128 + signal.SIGTERM
    finally:
        process.kill()
    psutil.wait_procs([loading], timeout=1)
    assert not loading.is_running() or loading.status() == psutil.STATUS_ZOMBIE


def test_sigterm_to_a_loaders_processes_that_have_just_started_loses_no_batch():
    """torchrun and schedulers send it to all processes of a job, at any moment."""

    def terminate_all(worker_id):
        signal.raise_signal(signal.SIGTERM)

    loader = torch.utils.data.DataLoader(range(4), num_workers=2, worker_init_fn=terminate_all)
    assert [batch.item() for batch in checkpoint.shielded(loader)] == [0, 1, 2, 3]
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
