"""A snapshot is whole or absent, is agreed on by all nodes, and a bad one stops every rank with one clear line."""

import contextlib
import copy
import errno
import multiprocessing
import os
import pickle
import signal
import stat
import threading
from collections import defaultdict
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from conftest import Bomb, agreed_message, exit_message, full_disk, guards, killed_in, on_processes, run, wait_until
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


@on_processes(1, *guards(3))
def test_a_snapshot_is_of_the_unwrapped_models_and_all_of_it_comes_back():
    """So any number of processes can load it."""
    model, optimizer, scheduler = objects(1)
    wrapped = torch.compile(dist.prepare_ddp_model(model), backend="eager")
    critic = nn.Linear(2, 2)
    nn.init.constant_(critic.weight, 5)
    second = torch.optim.SGD(critic.parameters(), lr=0.5)
    plain = {"best": 0.31, "names": ["a", {"b": None}], "table": torch.arange(3, dtype=torch.int16)}
    more = {"critic": dist.prepare_ddp_model(critic), "second": second, **plain}
    checkpoint.save("snapshot.pt", wrapped, optimizer, scheduler, 7, 3, settings={"--seed": 3}, **more)
    snapshot = torch.load("snapshot.pt", weights_only=True)
    assert snapshot["model"].keys() == model.state_dict().keys() and snapshot["critic"].keys() == {"weight", "bias"}
    trained = [value for name, value in snapshot["settings"].items() if name.startswith("optimizer parameter")]
    assert trained == [f"model.{name}" for name, _ in model.named_parameters()]

    parts, critic = objects(9), nn.Linear(2, 2)
    second = torch.optim.SGD(critic.parameters(), lr=0.1)
    more = {"critic": critic, "names": None, "table": None, "second": second, "best": 9}
    none = checkpoint.load("none.pt", *parts, {"--seed": 3}, **more)
    assert none == (0, 0, None, None, 9), "in the order in which they are given"
    epoch, step, names, table, best = checkpoint.load("snapshot.pt", *parts, {"--seed": 3}, **more)
    assert (epoch, step, names, best) == (7, 3, plain["names"], plain["best"])
    assert_same(table, plain["table"])
    assert_same_states(parts, objects(1))
    assert (critic.weight == 5).all() and second.param_groups[0]["lr"] == 0.5


# ---- many nodes -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_node(local_rank=0):
    """This rank has another folder and another local rank, as on a machine of its own."""
    folder, variable = os.getcwd(), os.environ["LOCAL_RANK"]
    os.makedirs(f"node{dist.get_rank()}", exist_ok=True)
    os.chdir(f"node{dist.get_rank()}")
    os.environ["LOCAL_RANK"] = str(local_rank)
    try:
        yield
    finally:
        os.chdir(folder)
        os.environ["LOCAL_RANK"] = variable


@on_processes(*guards(4))
def test_local_rank_0_of_each_node_writes_the_same_file():
    rank, parts, shared = dist.get_rank(), objects(), os.path.abspath("shared.pt")
    with own_node(local_rank=rank % 2):  # two nodes of two
        checkpoint.save("snapshot.pt", *parts, epoch=1)
        assert os.listdir() == ["snapshot.pt"] * (rank % 2 == 0)
    with own_node():
        for epoch in (2, 3):
            parts[0][1].running_mean.fill_(rank)  # batch norm's statistics differ by rank
            checkpoint.save("snapshot.pt", *parts, epoch=epoch)
            snapshot = torch.load("snapshot.pt", weights_only=True)
            assert snapshot["epoch"] == epoch and snapshot["model"]["1.running_mean"].eq(0).all()
        for epoch in range(1, 11):
            checkpoint.save(shared, *parts, epoch=epoch)  # a folder that all nodes share
            assert checkpoint.load(shared, *parts) == (epoch, 0)
    dist.barrier()
    assert not list(Path().rglob("*.tmp"))


@on_processes(*guards(4))
def test_the_newest_snapshot_of_any_node_is_loaded_on_all():
    """Also on a node that has none, and as older versions have written it, without settings."""
    position = [None, (2, 0), (2, 5), (1, 9)][dist.get_rank()]
    with own_node():
        parts = objects()
        assert checkpoint.load("snapshot.pt", *parts) == (0, 0)
        assert_same_states(parts, objects())
        if position:
            model, optimizer, scheduler = (part.state_dict() for part in objects(dist.get_rank()))
            states = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "settings": {}}
            torch.save({**states, "epoch": position[0], "step": position[1]}, "snapshot.pt")
        assert checkpoint.load("snapshot.pt", *parts) == (2, 5)
        assert_same_states(parts, objects(2))


@on_processes(*guards(4))
def test_a_node_that_cannot_read_or_write_stops_all():
    """Although the others' snapshots are intact: the history would be unclear."""
    bad, parts = os.path.abspath("node1/snapshot.pt"), objects()
    with own_node():
        checkpoint.save("snapshot.pt", *parts)
        if dist.get_rank() == 1:
            Path("snapshot.pt").write_bytes(b"")
        assert bad in agreed_message(checkpoint.load, "snapshot.pt", *parts)
        if dist.get_rank() == 1:
            os.remove("snapshot.pt")
            os.mkdir("snapshot.pt")
        assert bad in agreed_message(checkpoint.save, "snapshot.pt", *parts, epoch=3)
        assert os.listdir() == ["snapshot.pt"]


@on_processes(2)
def test_what_only_one_rank_holds_is_not_saved_as_if_all_did():
    """Each value that only rank 0's file would keep is refused. What is gathered is equal, and is saved."""
    rank = dist.get_rank()
    model, optimizer, _ = objects()
    average = torch.optim.swa_utils.AveragedModel(model)
    average.module[0].bias.data += rank
    for name, given in {
        "best": {"best": 0.5 + rank},
        "files": {"files": [4, 5 + rank]},
        "state.next": {"state": {"next": torch.tensor(rank)}},
        "epoch": {"epoch": rank},
        "average.module.0.bias": {"average": average},
        "optimizer.param_groups.0.lr": {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1 + rank)},
    }.items():
        message = agreed_message(checkpoint.save, "snapshot.pt", model, **{"optimizer": optimizer, **given})
        assert message.startswith(f"{name} of rank 1 differs from rank 0's")
    assert os.listdir() == []
    checkpoint.save("snapshot.pt", model, optimizer, files=dist.gather_objects([4, 5 + rank]))
    assert checkpoint.load("snapshot.pt", model, optimizer, files=None) == (0, 0, [[4, 5], [4, 6]])


@on_processes(2)
def test_a_parameter_outside_the_model_is_refused_unless_it_is_saved_too():
    model, _, _ = objects()
    temperature = nn.Parameter(torch.tensor(0.07 * (1 + dist.get_rank())))  # DDP does not know it
    parts = (model, torch.optim.SGD([*model.parameters(), temperature]))
    for function in (checkpoint.save, checkpoint.load):
        message = agreed_message(function, "snapshot.pt", *parts)
        assert message.startswith("an optimizer trains a parameter that would not be saved")
    message = agreed_message(checkpoint.save, "snapshot.pt", *parts, temperature=temperature)
    assert message.startswith("temperature of rank 1 differs from rank 0's")
    temperature.data.fill_(0.5)
    checkpoint.save("snapshot.pt", *parts, temperature=temperature)
    temperature.data.fill_(0.0)
    _, _, loaded = checkpoint.load("snapshot.pt", *parts, temperature=temperature)
    assert loaded is temperature and temperature.item() == 0.5, "the optimizer trains what is loaded"


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


# ---- bad snapshots, and disks that refuse ---------------------------------------------------------------------------


@on_processes(2)
def test_a_bad_snapshot_is_one_line_on_all_ranks_and_is_left_alone():
    model, optimizer, scheduler = objects()
    checkpoint.save("good", model, optimizer, scheduler, epoch=1)
    checkpoint.save("without scheduler", model, optimizer)
    checkpoint.save("wider", *objects(width=9))
    good, weight = Path("good").read_bytes(), model[0].weight.detach().numpy().tobytes()
    assert good.count(weight) == 1
    damaged = {f"{i} elevenths": good[: i * len(good) // 11] for i in range(11)}  # the first one is empty
    damaged["text"] = b"I am a text file.\n" * 100
    damaged["flipped bit"] = good.replace(weight, bytes([weight[0] ^ 1]) + weight[1:])
    damaged["pickle"] = pickle.dumps({"model": Bomb("exploded")})
    damaged["bomb"] = {"epoch": 1, "step": 0, "model": Bomb("exploded")}
    damaged["foreign"] = {"epoch": 1, "model": model.state_dict()}
    if dist.is_primary():
        os.mkdir("directory")
        for name, content in damaged.items():
            if isinstance(content, bytes):
                Path(name).write_bytes(content)
            else:
                torch.save(content, name)
    dist.barrier()
    before = {path: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    expected = dict.fromkeys(damaged, "is damaged or not a snapshot")
    expected["directory"] = "Is a directory"
    expected["without scheduler"] = "holds the state of model, optimizer, not of model, optimizer, scheduler"
    expected["wider"] = "was saved from another model or optimizer"
    for name, reason in expected.items():
        message = agreed_message(checkpoint.load, name, *objects())
        assert os.path.abspath(name) in message and reason in message
        is_right = reason.startswith(("holds the state", "was saved from"))  # nobody should delete it
        assert ("delete or rename" in message) != is_right
    message = agreed_message(checkpoint.load, "good", model, optimizer)
    assert "holds the state of model, optimizer, scheduler, not of model, optimizer:" in message
    assert {path: path.read_bytes() for path in before} == before and not os.path.exists("exploded")


@on_processes(2)
def test_a_full_disk_leaves_the_old_snapshot():
    checkpoint.save("snapshot.pt", *objects(1), epoch=1)
    parts = objects(2, width=2000)  # large enough for torch.save to write before the end
    with full_disk():
        message = agreed_message(checkpoint.save, "snapshot.pt", *parts, epoch=2)
    assert os.path.abspath("snapshot.pt") in message and os.strerror(errno.EFBIG) in message
    assert os.listdir() == ["snapshot.pt"]
    parts = objects(9)
    assert checkpoint.load("snapshot.pt", *parts) == (1, 0)
    assert_same_states(parts, objects(1))


def test_a_saving_error_that_is_not_the_disks_keeps_its_traceback(tmp_path):
    (tmp_path / "snapshot.pt").write_bytes(b"old")
    with pytest.raises(RuntimeError, match="CUDA error"), checkpoint.atomic(tmp_path / "snapshot.pt") as file:
        file.write(b"new")
        raise RuntimeError("CUDA error")
    assert os.listdir(tmp_path) == ["snapshot.pt"] and (tmp_path / "snapshot.pt").read_bytes() == b"old"


def refusing(name, when):
    """A patch with which a function of `os` raises an error for the arguments for which `when` is true."""
    function = getattr(os, name)

    def call(*args):
        if when(*args):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        return function(*args)

    return mock.patch.object(os, name, call)


def is_folder(fd):
    return stat.S_ISDIR(os.fstat(fd).st_mode)


def test_the_disk_has_the_file_and_its_name_before_the_save_ends(tmp_path):
    events = []  # append returns None, so nothing is refused
    flushed = refusing("fsync", lambda fd: events.append("folder" if is_folder(fd) else os.fstat(fd).st_size))
    renamed = refusing("replace", lambda *paths: events.append("rename"))
    with flushed, renamed, checkpoint.atomic(tmp_path / "file") as file:
        file.write(b"new")
    assert events == [3, "rename", "folder"], "3 bytes were there when it was flushed"


def test_a_folder_that_cannot_be_flushed_can_be_saved_to(tmp_path):
    """The new file is in place by then."""
    with refusing("fsync", is_folder):
        checkpoint.save(tmp_path / "snapshot.pt", *objects(1), epoch=1)
    assert checkpoint.load(tmp_path / "snapshot.pt", *objects()) == (1, 0)


REFUSALS = {
    "each rename, as a bucket does": ("replace", lambda *paths: True),
    "a rename onto a file": ("replace", lambda source, target: os.path.exists(target)),
    "to flush a file": ("fsync", lambda fd: True),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_the_check_before_training_names_what_a_folder_refuses(what, tmp_path):
    path = str(tmp_path / "result.pt")
    with refusing(*REFUSALS[what]):
        message = exit_message(checkpoint.check_writable, "--output", path)
    assert message.startswith(f"--output: cannot write to {tmp_path}: ") and "not implemented" in message
    checkpoint.check_writable("--output", path)
    assert os.listdir(tmp_path) == []


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    assert exit_message(checkpoint.save, pipe, *objects(1)) == f"cannot save {pipe}: it is not a regular file"
    for path in (pipe, "/dev/null", str(tmp_path)):
        assert "is not the name of a file" in exit_message(checkpoint.check_writable, "--save", path)
    # A script that loads first learns there that it cannot save.
    assert exit_message(checkpoint.load, "/sys/snapshot.pt", *objects()).startswith("cannot write to /sys: ")
    assert stat.S_ISFIFO(os.stat(pipe).st_mode) and os.listdir(tmp_path) == ["pipe"]


def test_a_save_keeps_the_mode(tmp_path):
    path = tmp_path / "snapshot.pt"
    for mode in (0o600, 0o664):
        path.touch()
        path.chmod(mode)
        checkpoint.check_writable("--output", path)
        checkpoint.save(path, *objects(1))
        assert stat.S_IMODE(path.stat().st_mode) == mode


CHECK = "import checkpoint; checkpoint.check_writable('--output', 'model.pt')"
AS_ANYBODY = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.getuid() == 0 else ()
MOUNTED = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
MOUNTED += ('mount --bind model.pt model.pt && exec "$0" "$@"',)


@pytest.mark.parametrize(
    ("prefix", "reason"), [(AS_ANYBODY, "Permission denied"), (MOUNTED, "is mounted as a file")], ids=["mode", "mount"]
)
def test_a_file_that_no_save_could_replace_is_refused(prefix, reason, tmp_path):
    """It is write-protected, or mounted as by `docker run -v model.pt:/data/model.pt`."""
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")
    path.chmod(0o444)
    status, _, stderr = run("-c", CHECK, prefix=prefix, cwd=tmp_path)
    assert (status, stderr.count("\n")) == (1, 1) and stderr.startswith("--output: ") and reason in stderr
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["model.pt"]


# ---- what a user may put in -----------------------------------------------------------------------------------------


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    path = tmp_path / "snapshot.pt"
    model, optimizer, _ = objects()
    checkpoint.save(path, model, optimizer, epoch=1)
    before = path.read_bytes()
    for value, words in (
        (np.float64(0.1), "numpy"),
        (np.float32(0.1), "float(note)"),
        (defaultdict(int), "collections.defaultdict"),
        ([1, {"where": Path("x")}], "note.1.where has a <class 'pathlib.PosixPath'>"),
    ):
        assert words in exit_message(checkpoint.save, path, model, optimizer, epoch=2, note=value)
    with pytest.raises(TypeError, match="Tensor is not JSON serializable"):
        checkpoint.save(path, model, optimizer, epoch=2, settings={"--clip": torch.ones(2)})
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["snapshot.pt"]


@on_processes(2)
def test_settling_the_buckets_leaves_no_trace():
    model, *_ = objects()
    ddp_model = dist.prepare_ddp_model(model)
    model[1].running_mean.fill_(dist.get_rank())
    before = copy.deepcopy(model.state_dict())

    def compute_loss():
        with torch.no_grad():
            model[0].weight.mul_(0.9)  # as a forward does that moves an average of other weights
        return ddp_model(torch.randn(4, 4)).sum()

    checkpoint.rebuild_buckets(ddp_model, compute_loss)
    assert_same(model.state_dict(), before)
    assert ddp_model.training and all(not param.grad.any() for param in model.parameters() if param.grad is not None)


def test_another_model_optimizer_scheduler_or_setting_is_one_line(tmp_path):
    """Else equal shapes would swap their states, float32 would be rounded, and AdamW would take the state of Adam."""
    path = tmp_path / "snapshot.pt"
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    settings = {"--seed": 3, "--clip": None, "--limit": float("nan"), "--sizes": [1, 2.5]}

    def adam(*names):
        return torch.optim.Adam([{"params": model[name].parameters()} for name in names])

    optimizer = adam("a", "b")
    step = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    checkpoint.save(path, model, optimizer, step, epoch=1, settings=settings)
    for words, *other in (
        ("optimizer parameter 0 of group 0 model.a.weight, not model.b.weight", adam("b", "a"), step, settings),
        ("optimizer class Adam, not SGD", torch.optim.SGD(model.parameters()), step, settings),
        ("optimizer class Adam, not AdamW", torch.optim.AdamW(model.parameters()), step, settings),
        ("scheduler class StepLR, not CosineAnnealingLR", optimizer, cosine, settings),
        ("--seed 3, not 4", optimizer, step, {**settings, "--seed": 4}),
        ("--seed 3, not None", optimizer, step, {**settings, "--seed": None}),
        ("--seed 3, not None", optimizer, step, {}),
        ("--amp None, not 1", optimizer, step, {**settings, "--amp": 1}),
    ):
        assert f"{path} was saved with {words}" in exit_message(checkpoint.load, path, model, *other)
    assert checkpoint.load(path, model, optimizer, step, settings) == (1, 0)
    del settings["--clip"]
    assert checkpoint.load(path, model, optimizer, step, settings) == (1, 0), "an option of value None is no other"
    line = exit_message(checkpoint.load, path, model.bfloat16(), optimizer, step, settings)
    assert "was saved from another model or optimizer (a.weight is torch.bfloat16, and was torch.float32)" in line


def test_a_symbolic_link_is_followed(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")  # left in the shell
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


def leave_while_a_loader_runs(pipe):
    never = {"collate_fn": lambda samples: threading.Event().wait(100), "multiprocessing_context": "fork"}
    _kept = checkpoint.shielded(torch.utils.data.DataLoader(range(2), num_workers=1, **never))
    pipe.send(multiprocessing.active_children()[0].pid)
    exit_at_once = os._exit
    # Late enough to notice its end: torch has a handler for that, which raises an error.
    with mock.patch("os._exit", lambda status: threading.Event().wait(1) or exit_at_once(status)):
        checkpoint.Preemption().leave()


def test_a_loaders_processes_end_with_a_preempted_process():
    """torchrun would start others beside them."""
    context = multiprocessing.get_context("forkserver")
    from_process, to_test = context.Pipe()
    process = context.Process(target=leave_while_a_loader_runs, args=(to_test,))
    process.start()
    try:
        assert from_process.poll(60)
        loading = from_process.recv()
        process.join(60)
        assert process.exitcode == 128 + signal.SIGTERM
    finally:
        process.kill()
    wait_until(lambda: not psutil.pid_exists(loading) or psutil.Process(loading).status() == psutil.STATUS_ZOMBIE, 30)


def test_sigterm_to_a_loaders_processes_that_have_just_started_loses_no_batch():
    """torchrun and schedulers send it to all processes of a job, at any moment."""

    def terminate_all(worker_id):
        signal.raise_signal(signal.SIGTERM)

    loader = torch.utils.data.DataLoader(range(4), num_workers=2, worker_init_fn=terminate_all)
    assert [batch.item() for batch in checkpoint.shielded(loader)] == [0, 1, 2, 3]
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
