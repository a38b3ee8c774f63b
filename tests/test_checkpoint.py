"""A snapshot is whole or absent, is agreed on by all nodes, and a bad one stops every rank with one clear line."""

import contextlib
import copy
import errno
import os
import pickle
import re
import resource
import stat
import threading
from collections import Counter, defaultdict
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import Bomb, exit_message, killed_in
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


def agreed_message(function, *args, **kwargs):
    """The line with which all ranks leave `function`, the same on each of them."""
    message = exit_message(function, *args, **kwargs)
    assert set(dist.gather_objects(message)) == {message}
    return message


# ---- whole, exact, interchangeable ----------------------------------------------------------------------------------


def save_worker(local_rank, world_size, path):
    dist.init_process_group()
    model, optimizer, scheduler = objects(1)
    wrapped = dist.prepare_ddp_model(model)
    if world_size == 2:
        wrapped = torch.compile(wrapped, backend="eager")
    critic, second = nn.Linear(2, 2), torch.optim.SGD([torch.ones(1)], lr=0.5)
    nn.init.constant_(critic.weight, 5)
    more = {"critic": dist.prepare_ddp_model(critic), "second": second}
    plain = {"best": 0.31, "patience": 2, "names": ["a", {"b": None}], "table": torch.arange(3) + dist.get_rank()}
    checkpoint.save(path, wrapped, optimizer, scheduler, epoch=7, step=3, **more, **plain)


def load_worker(local_rank, world_size, path):
    dist.init_process_group()
    model, optimizer, scheduler = objects(9)
    critic, second = nn.Linear(2, 2), torch.optim.SGD([torch.ones(1)], lr=0.1)
    model_and_more = (dist.prepare_ddp_model(model), optimizer, scheduler)
    parts = {"critic": critic, "names": None, "table": None, "second": second, "best": 9, "patience": 0}
    none = checkpoint.load(f"{path}.none", *model_and_more, **parts)
    assert none == (0, 0, None, None, 9, 0), "in the order in which they are given"
    epoch, step, names, table, best, patience = checkpoint.load(path, *model_and_more, **parts)
    assert (epoch, step, best, patience, names) == (7, 3, 0.31, 2, ["a", {"b": None}])
    assert torch.equal(table, torch.arange(3)), "rank 0's"
    assert_same_states((model, optimizer, scheduler), objects(1))
    assert (critic.weight == 5).all() and second.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(("savers", "loaders"), [(1, 1), (3, 1), (1, 3), (2, 3)])
def test_any_number_of_processes_loads_what_any_number_saved(savers, loaders, tmp_path):
    path = str(tmp_path / "snapshot.pt")
    dist.launch(save_worker, path, nprocs=savers)
    snapshot = torch.load(path, weights_only=True)
    plain = {"best", "patience", "names", "table"}
    assert snapshot.keys() == {"model", "optimizer", "scheduler", "critic", "second", "epoch", "step"} | plain
    assert snapshot["model"].keys() == objects()[0].state_dict().keys(), "of the unwrapped model"
    assert snapshot["critic"].keys() == {"weight", "bias"}, "of the unwrapped model"
    dist.launch(load_worker, path, nprocs=loaders)
    assert os.listdir(tmp_path) == ["snapshot.pt"]


def peak():
    """Bytes resident at most, since it was set back."""
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def memory_worker(local_rank, world_size, folder):
    dist.init_process_group()
    os.environ["LOCAL_RANK"] = "0"  # the only one of a node
    path = f"{folder}/{local_rank}.pt"
    torch.manual_seed(local_rank)
    model = nn.Linear(4200, 4200)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    model(torch.ones(4200)).sum().backward()
    optimizer.step()
    with mock.patch.object(dist, "check_in_sync"):  # the nodes' files shall differ
        checkpoint.save(path, model, optimizer, epoch=2 - local_rank)
    weight = model.weight.detach().clone()
    model = model.requires_grad_(False)
    nn.init.zeros_(model.weight)
    del optimizer
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back
    before = peak()
    assert checkpoint.load(path, model, torch.optim.Adam(model.parameters())) == (2, 0)
    assert peak() - before < 1.4 * os.path.getsize(path), (peak() - before) / os.path.getsize(path)
    dist.sync_params([weight])
    assert torch.equal(model.weight, weight)


def test_loading_takes_the_size_of_the_file_where_an_older_one_was_too(tmp_path):
    dist.launch(memory_worker, str(tmp_path), nprocs=2)


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
        torch.save({**states, "epoch": epoch, "step": step}, "snapshot.pt")
    parts = objects(9)
    assert checkpoint.load("snapshot.pt", *parts) == (2, 5)
    assert_same_states(parts, objects(2))

    # One folder that all nodes share: the file is whole each time. From the second save on rank 0 alone writes.
    shared = Path(folder, "shared.pt")
    for epoch in range(1, 11):
        with mock.patch("checkpoint._write", wraps=checkpoint._write) as write:
            checkpoint.save(shared, *parts, epoch=epoch)
        assert write.called == (rank == 0 or epoch == 1)
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


def plain_values_worker(rank, world_size, folder):
    os.environ["LOCAL_RANK"] = "0"  # each rank is a node, with a disk of its own
    dist.init_process_group()
    path = f"{folder}/{rank}.pt"
    model, second = torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)
    second.running_mean.fill_(rank)
    values = {"best": 100 + rank, "table": [torch.tensor(float(rank))]}
    checkpoint.save(path, dist.prepare_ddp_model(model), torch.optim.SGD(model.parameters()), second=second, **values)
    saved = torch.load(path, weights_only=True)
    assert saved["best"] == 100 and saved["table"][0] == 0 and saved["second"]["running_mean"] == 0


def test_every_node_saves_rank_0s_values(tmp_path):
    dist.launch(plain_values_worker, str(tmp_path), nprocs=2)


def test_a_learning_rate_that_is_a_tensor_is_restored(tmp_path):
    """torch gives the tensor to the groups too, into which dcp loads."""
    model = torch.nn.Linear(1, 1)
    for step, expected in ((1, None), (2, 0.02), (3, 0.02)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01 if step == 1 else 0.02))
        checkpoint.load_sharded(tmp_path, model, optimizer)
        if expected:
            assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(expected)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        checkpoint.save_sharded(tmp_path, model, optimizer, step=step)


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
    cases = {f"truncated{i}": good[: i * len(good) // 51] for i in range(1, 51)}
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
    expected["foreign"] = "has no 'step': checkpoint.save has not written it. Choose another path"
    expected["bomb"] = f"contains {os.mknod.__module__}.mknod, which weights_only=True cannot load"
    (folder / "directory").mkdir()
    checkpoint.save(folder / "unreadable", model, optimizer, scheduler, epoch=1)
    (folder / "unreadable").chmod(0)
    expected |= {"directory": "Is a directory", "unreadable": "Permission denied"}
    checkpoint.save(folder / "wider", *objects(width=9), epoch=1)
    torch.save({"model": [], "optimizer": None, "scheduler": None, "epoch": 1, "step": 0}, folder / "own")
    checkpoint.save(folder / "unscheduled", model, optimizer, epoch=1)
    without = "holds the state of model and optimizer, not of model and optimizer and scheduler"
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
        advice = "delete or rename"
        if reason.startswith("holds the state"):
            advice = "save and load the same parts"
        if reason.startswith("was saved from"):
            advice = "build what was saved, or choose another path"  # the file is right: nobody should delete it
        if reason.startswith("has no"):
            advice = "Choose another path"
        assert advice in message
        assert ("delete" in message) == ("delete" in advice)
    message = agreed_message(checkpoint.load, "good", *objects()[:2])
    assert "holds the state of model and optimizer and scheduler, not of model and optimizer:" in message


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
    assert path in message and os.strerror(errno.EFBIG) in message and "make room" in message


def test_a_full_disk_leaves_the_old_snapshot(tmp_path):
    path = str(tmp_path / "snapshot.pt")
    checkpoint.save(path, *objects(1), epoch=1)
    dist.launch(full_disk_worker, path, nprocs=2)
    assert os.listdir(tmp_path) == ["snapshot.pt"]
    parts = objects(9)
    assert checkpoint.load(path, *parts) == (1, 0)
    assert_same_states(parts, objects(1))


def test_a_saving_error_that_is_not_the_disks_keeps_its_traceback(tmp_path, monkeypatch):
    def broken(snapshot, file):
        file.write(b"new")
        raise RuntimeError("CUDA error")

    (tmp_path / "snapshot.pt").write_bytes(b"old")
    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(RuntimeError, match="CUDA error"):
        checkpoint.save(tmp_path / "snapshot.pt", *objects(), epoch=1)
    assert os.listdir(tmp_path) == ["snapshot.pt"] and (tmp_path / "snapshot.pt").read_bytes() == b"old"


# ---- what a user may put in -----------------------------------------------------------------------------------------


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    path = tmp_path / "snapshot.pt"
    model, optimizer, _ = objects()
    checkpoint.save(path, model, optimizer, epoch=1)
    before = path.read_bytes()
    refused = {"numpy": np.float64(0.1), "pathlib": Path("x"), "collections.defaultdict": defaultdict(int)}
    for name, value in refused.items():
        optimizer.param_groups[0]["note"] = value
        message = exit_message(checkpoint.save, path, model, optimizer, epoch=2)
        assert str(path) in message and name in message and "make a plain number, string, list or dict" in message
        assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["snapshot.pt"]


def test_containers_are_sent_as_they_are():
    state = {
        "milestones": Counter([30, 80, 80]),
        "list": [1, (2, torch.ones(2))],
        "model": nn.BatchNorm1d(2).state_dict(),
    }
    sent = checkpoint._with_tensors(state, lambda tensor: tensor)
    assert_same(sent, state)
    assert sent is not state and type(sent["milestones"]) is Counter
    assert sent["model"]._metadata == state["model"]._metadata != {}


def sync_worker(local_rank, world_size):
    dist.init_process_group()
    whole, transposed = torch.full((4, 6), float(local_rank)), torch.full((2, 3), float(local_rank)).t()
    dist.sync_params([whole[:, 1], whole[::2, 3], transposed])
    expected = torch.full((4, 6), float(local_rank))
    expected[:, 1] = expected[::2, 3] = 0
    assert torch.equal(whole, expected), "its neighbours in memory are not touched"
    assert (transposed == 0).all()


def test_tensors_of_any_layout_are_synced():
    dist.launch(sync_worker, nprocs=2)


class Awkward(nn.Module):
    """Batch norm, dropout, and a head that has outputs only in training."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])

    def forward(self, x):
        x = self.body(x)
        return [head(x) for head in self.heads] if self.training else [self.heads[0](x)]


def settle_worker(local_rank, world_size):
    dist.init_process_group()
    torch.manual_seed(0)
    model = Awkward()
    ddp_model = dist.prepare_ddp_model(model)
    model.body[1].running_mean.fill_(local_rank)
    before = copy.deepcopy(model.state_dict())
    checkpoint.rebuild_buckets(ddp_model, lambda: sum(ddp_model(torch.randn(4, 4))).sum())
    assert_same(model.state_dict(), before)
    assert ddp_model.training and all(not param.grad.any() for param in model.parameters() if param.grad is not None)
    assert sum(ddp_model(torch.randn(4, 4))).sum().backward() is None


def test_settling_the_buckets_leaves_no_trace():
    dist.launch(settle_worker, nprocs=2)


def test_the_disk_has_the_file_and_its_name_before_the_save_ends(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def record_fsync(fd):
        status = os.fstat(fd)
        events.append("folder" if stat.S_ISDIR(status.st_mode) else f"file of {status.st_size} bytes")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", lambda *args: (events.append("rename"), replace(*args)))
    with checkpoint.atomic(tmp_path / "file") as file:
        file.write(b"new")
    assert events[-3:] == ["file of 3 bytes", "rename", "folder"]


def test_a_folder_that_may_be_written_but_not_read(tmp_path, monkeypatch):
    """It cannot be synced, but the file is saved."""
    os_open = os.open

    def refuse_folders(path, flags):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return os_open(path, flags)

    monkeypatch.setattr(os, "open", refuse_folders)
    with checkpoint.atomic(tmp_path / "file") as file:
        file.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


def sharded_parts():
    torch.manual_seed(0)
    model = dist.prepare_fsdp_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), min_num_params=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def train_scheduled(model, optimizer, scheduler, epochs):
    """The learning rates of the epochs."""
    rates = []
    for _ in range(epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return rates


def scheduled_worker(local_rank, world_size, folder):
    dist.init_process_group()
    whole = sharded_parts()
    rates = train_scheduled(*whole, 8)
    model, optimizer, scheduler = sharded_parts()
    assert train_scheduled(model, optimizer, scheduler, 5) == rates[:5]
    checkpoint.save_sharded(folder, model, optimizer, 5, scheduler)
    resumed = sharded_parts()
    assert checkpoint.load_sharded(folder, *resumed) == 5
    assert train_scheduled(*resumed, 3) == rates[5:], "the schedule continues"
    for actual, expected in zip(resumed[0].parameters(), whole[0].parameters(), strict=True):
        assert torch.equal(actual.full_tensor(), expected.full_tensor())

    message = agreed_message(checkpoint.load_sharded, folder, model, optimizer)
    assert message == f"{folder}/epoch-5 was saved with `scheduler`: load it with `scheduler`"
    checkpoint.save_sharded(folder, model, optimizer, 6)
    message = agreed_message(checkpoint.load_sharded, folder, model, optimizer, scheduler)
    assert message == f"{folder}/epoch-6 was saved without `scheduler`: load it without `scheduler`"
    with pytest.raises(ValueError, match="epoch must be at least 1, the next one to run, got 0"):
        checkpoint.save_sharded(folder, model, optimizer, 0)
    for function in (checkpoint.save, checkpoint.load):
        message = agreed_message(function, f"{folder}/snapshot.pt", model, optimizer)
        assert message.startswith("the model is sharded: use save_sharded and load_sharded")
    assert not Path(folder, "snapshot.pt").exists()


def test_a_sharded_run_resumes_with_its_scheduler(tmp_path):
    dist.launch(scheduled_worker, str(tmp_path), nprocs=2)


def test_an_error_that_only_the_background_sees_is_not_lost(tmp_path, monkeypatch):
    called, fsync = threading.Event(), os.fsync

    def fail_once(fd):
        if called.is_set():
            return fsync(fd)
        called.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))  # the kernel tells it to one fsync only

    monkeypatch.setattr(os, "fsync", fail_once)
    with (
        pytest.raises(dist.DistributedError, match=os.strerror(errno.EIO)),
        checkpoint.atomic(tmp_path / "file") as file,
    ):
        file.write(b"new")
        assert called.wait(30)
    assert not os.listdir(tmp_path)
