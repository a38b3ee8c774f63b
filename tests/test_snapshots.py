"""A snapshot is whole or absent, is agreed on by all nodes, and a bad one stops every rank with one clear line."""

import errno
import os
import pickle
import resource
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing import ProcessExitedException

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
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, list | tuple):
        for pair in zip(actual, expected, strict=True):
            assert_same(*pair)
    else:
        assert actual == expected


def assert_same_states(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert_same(one.state_dict(), other.state_dict())


def as_node(folder):
    """Make this rank the only one of a node with its own disk."""
    os.environ["LOCAL_RANK"] = "0"
    node = Path(folder, f"node{dist.get_rank()}")
    node.mkdir(exist_ok=True)
    os.chdir(node)


def exit_message(function, *args, **kwargs):
    """The message with which all ranks leave `function`, the same on each of them."""
    with pytest.raises(SystemExit) as exit_info:
        function(*args, **kwargs)
    messages = [exit_info.value.code] * dist.get_world_size()
    if dist.get_world_size() > 1:
        torch.distributed.all_gather_object(messages, exit_info.value.code)
    assert len(set(messages)) == 1
    assert isinstance(messages[0], str)
    assert len(messages[0].splitlines()) == 1
    return messages[0]


# ---- whole, exact, interchangeable ----------------------------------------------------------------------------------


def save_worker(local_rank, world_size, path, seed, epoch, step):
    dist.init_process_group()
    model, optimizer, scheduler = objects(seed)
    model = dist.prepare_ddp_model(model)
    dist.save_snapshot(path, model, optimizer, scheduler, epoch=epoch, step=step)


def load_worker(local_rank, world_size, path, seed, position):
    dist.init_process_group()
    model, optimizer, scheduler = objects(seed=9)
    wrapped = dist.prepare_ddp_model(model)
    assert dist.load_snapshot(path, wrapped, optimizer, scheduler) == position
    assert_same_states((model, optimizer, scheduler), objects(seed))


@pytest.mark.parametrize(("savers", "loaders"), [(1, 1), (3, 1), (1, 3), (2, 3)])
def test_any_number_of_processes_loads_what_any_number_saved(savers, loaders, tmp_path):
    path = str(tmp_path / "snapshot.pt")
    dist.launch(save_worker, path, 1, 7, 3, nprocs=savers)
    dist.launch(load_worker, path, 1, (7, 3), nprocs=loaders)
    assert os.listdir(tmp_path) == ["snapshot.pt"]


def test_it_holds_tensors_and_containers_of_the_unwrapped_model(tmp_path):
    path = str(tmp_path / "snapshot.pt")
    dist.launch(save_worker, path, 0, 1, 0, nprocs=2)
    snapshot = torch.load(path, weights_only=True)
    assert snapshot.keys() == {"model", "optimizer", "scheduler", "epoch", "step"}
    assert snapshot["model"].keys() == objects()[0].state_dict().keys()


def test_without_a_snapshot_nothing_changes(tmp_path):
    parts = objects()
    assert dist.load_snapshot(tmp_path / "snapshot.pt", *parts) == (0, 0)
    assert_same_states(parts, objects())


def big_worker(local_rank, world_size, path):
    dist.init_process_group()
    torch.manual_seed(local_rank)
    model = nn.Linear(4200, 4200)  # 67 MiB: more than is sent at once
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.save_snapshot(path, model, optimizer, epoch=1)
    weight = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    assert dist.load_snapshot(path, model, optimizer) == (1, 0)
    torch.distributed.broadcast(weight, src=0)
    assert torch.equal(model.weight, weight)


def test_a_large_snapshot_reaches_all_ranks(tmp_path):
    dist.launch(big_worker, str(tmp_path / "snapshot.pt"), nprocs=2)


# ---- many nodes -----------------------------------------------------------------------------------------------------


KINDS = ("model", "optimizer", "scheduler")


def nodes_worker(local_rank, world_size, folder):
    dist.init_process_group()
    as_node(folder)
    rank = dist.get_rank()
    parts = objects()
    assert dist.load_snapshot("snapshot.pt", *parts) == (0, 0)

    # Every node writes the same file, also where batch norm's statistics differ by rank.
    parts[0][1].running_mean.fill_(rank)
    dist.save_snapshot("snapshot.pt", *parts, epoch=1)
    assert torch.load("snapshot.pt", weights_only=True)["model"]["1.running_mean"].eq(0).all()

    # The newest wins, whoever has it, and a node without a disk's worth of history gets it too.
    os.remove("snapshot.pt")
    positions = [None, (2, 0), (2, 5), (1, 9)]
    if positions[rank] is not None:
        epoch, step = positions[rank]
        states = {name: part.state_dict() for name, part in zip(KINDS, objects(rank), strict=True)}
        torch.save({**states, "epoch": epoch, "step": step}, "snapshot.pt")
    parts = objects(9)
    assert dist.load_snapshot("snapshot.pt", *parts) == (2, 5)
    assert_same_states(parts, objects(2))

    # One folder that all nodes share: they write at the same time, and the file is whole each time.
    shared = Path(folder, "shared.pt")
    for epoch in range(1, 11):
        dist.save_snapshot(shared, *parts, epoch=epoch)
        assert dist.load_snapshot(shared, *parts) == (epoch, 0)
    dist.barrier()
    assert not list(Path(folder).glob("*.tmp"))

    # A bad file on one node stops all, though the others' are intact, rather than start with an unclear history.
    if rank == 1:
        Path("snapshot.pt").write_bytes(b"")
    message = exit_message(dist.load_snapshot, "snapshot.pt", *parts)
    assert str(Path(folder, "node1", "snapshot.pt")) in message

    # A node that cannot save stops all.
    if rank == 1:
        os.remove("snapshot.pt")
        os.mkdir("snapshot.pt")
    message = exit_message(dist.save_snapshot, "snapshot.pt", *parts, epoch=3)
    assert str(Path(folder, "node1", "snapshot.pt")) in message
    assert not list(Path.cwd().glob("*.tmp"))


def test_nodes_agree(tmp_path):
    dist.launch(nodes_worker, str(tmp_path), nprocs=4)


def once_per_node_worker(local_rank, world_size, folder):
    dist.init_process_group()
    os.environ["LOCAL_RANK"] = str(local_rank % 2)  # two nodes of two
    os.makedirs(f"{folder}/{local_rank}")
    os.chdir(f"{folder}/{local_rank}")
    dist.save_snapshot("snapshot.pt", *objects(), epoch=1)


def test_local_rank_0_of_each_node_writes(tmp_path):
    dist.launch(once_per_node_worker, str(tmp_path), nprocs=4)
    assert sorted(path.parent.name for path in tmp_path.glob("*/snapshot.pt")) == ["0", "2"]


# ---- a kill while saving --------------------------------------------------------------------------------------------


def kill_worker(local_rank, world_size, path, moment):
    dist.init_process_group()

    def killed(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    real_save, real_replace = torch.save, os.replace

    def partial_save(snapshot, file):
        real_save(snapshot, file)
        file.truncate(file.tell() // 2)
        file.flush()
        killed()

    def killed_after_replace(*args):
        real_replace(*args)
        killed()

    if local_rank == 0:
        if moment == "write":
            torch.save = partial_save
        elif moment == "fsync":
            os.fsync = killed
        elif moment == "replace":
            os.replace = killed
        elif moment == "replaced":
            os.replace = killed_after_replace
    dist.save_snapshot(path, *objects(2), epoch=2)


@pytest.mark.parametrize(("moment", "survivor"), [("write", 1), ("fsync", 1), ("replace", 1), ("replaced", 2)])
def test_a_kill_leaves_the_old_snapshot_or_the_new_one(moment, survivor, tmp_path):
    path = str(tmp_path / "snapshot.pt")
    dist.save_snapshot(path, *objects(1), epoch=1)
    with pytest.raises(ProcessExitedException, match="rank 0 was killed by SIGKILL"):
        dist.launch(kill_worker, path, moment, nprocs=2)
    parts = objects(9)
    assert dist.load_snapshot(path, *parts) == (survivor, 0)
    assert_same_states(parts, objects(survivor))
    dist.save_snapshot(path, *parts, epoch=3)  # takes the half-written file's place
    assert os.listdir(tmp_path) == ["snapshot.pt"]


# ---- bad snapshots --------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickled, it would make a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mknod, (self.target,)


def bad_files(folder):
    """(name, what the line must say) of each bad file; they are made in `folder`."""
    model, optimizer, scheduler = objects()
    dist.save_snapshot(folder / "good", model, optimizer, scheduler, epoch=1)
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
    expected = dict.fromkeys([*cases, "bomb", "foreign", "tensor"], "is damaged or no snapshot")
    (folder / "directory").mkdir()
    dist.save_snapshot(folder / "unreadable", model, optimizer, scheduler, epoch=1)
    (folder / "unreadable").chmod(0)
    expected |= {"directory": "Is a directory", "unreadable": "Permission denied"}
    dist.save_snapshot(folder / "wider", *objects(width=9), epoch=1)
    dist.save_snapshot(folder / "unscheduled", model, optimizer, epoch=1)
    another = nn.Linear(4, 1)
    dist.save_snapshot(folder / "another", another, torch.optim.Adam(another.parameters()), epoch=1)
    return expected | dict.fromkeys(["wider", "another", "unscheduled"], "is another model's")


def bad_worker(local_rank, world_size, folder, expected):
    dist.init_process_group()
    os.chdir(folder)
    if os.geteuid() == 0:
        os.seteuid(65534)  # root may read everything
    for name, reason in expected.items():
        message = exit_message(dist.load_snapshot, name, *objects())
        assert str(Path(folder, name)) in message
        assert reason in message, name
        assert "move it away" in message
    dist.cleanup()


def test_bad_snapshots(tmp_path):
    tmp_path.chmod(0o777)  # what a file would execute could write here
    expected = bad_files(tmp_path)
    readable = [name for name in expected if name not in ("directory", "unreadable")]
    before = {name: (tmp_path / name).read_bytes() for name in readable}
    dist.launch(bad_worker, str(tmp_path), expected, nprocs=2)
    assert {name: (tmp_path / name).read_bytes() for name in readable} == before
    assert not (tmp_path / "exploded").exists()


def full_disk_worker(local_rank, world_size, path, moment):
    dist.init_process_group()
    parts = objects(2, width=2000)  # large enough for torch.save to write before the end
    if moment == "write":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    elif local_rank == 0:

        def full(descriptor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.fsync = full
    message = exit_message(dist.save_snapshot, path, *parts, epoch=2)
    assert path in message
    assert os.strerror(errno.EFBIG if moment == "write" else errno.ENOSPC) in message
    assert "make room" in message


@pytest.mark.parametrize("moment", ["write", "fsync"])
def test_a_full_disk_leaves_the_old_snapshot(moment, tmp_path):
    path = str(tmp_path / "snapshot.pt")
    dist.save_snapshot(path, *objects(1), epoch=1)
    dist.launch(full_disk_worker, path, moment, nprocs=2)
    assert os.listdir(tmp_path) == ["snapshot.pt"]
    parts = objects(9)
    assert dist.load_snapshot(path, *parts) == (1, 0)
    assert_same_states(parts, objects(1))


def test_a_saving_error_that_is_not_the_disks_keeps_its_traceback(tmp_path, monkeypatch):
    def broken(*args):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(RuntimeError, match="CUDA error"):
        dist.save_snapshot(tmp_path / "snapshot.pt", *objects(), epoch=1)
    assert not os.listdir(tmp_path)
