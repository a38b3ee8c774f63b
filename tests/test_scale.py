"""What a job of a thousand ranks needs: each rank asks, connects and reads little, whatever the number of ranks."""

import importlib
import math
import os
import resource
import shutil
import signal
import sys
import threading
import zipfile
from concurrent import futures
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
from conftest import exit_message
from images import few_digits
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import checkpoint
import distributed as dist
import spawn

# ---- the ranks meet -------------------------------------------------------------------------------------------------


own = threading.local()  # a rank is a thread, and has a connection of its own


class CountingStore:
    """A store that counts the keys that are asked for."""

    def __init__(self, store):
        self.store = store
        self.keys = 0

    def __getattr__(self, name):
        method = getattr(self.store, name)

        def call(keys, *rest):
            self.keys += 1 if isinstance(keys, str) else len(keys)
            return method(keys, *rest)

        return call


@pytest.fixture
def server(monkeypatch):
    """A store that stays when the ranks start anew, like torchrun's. It asks no name server who connects."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")

    def rendezvous(url, rank, world_size, timeout):
        yield own.store, rank, world_size

    monkeypatch.setattr(torch_dist, "rendezvous", rendezvous)
    monkeypatch.setattr(torch_dist, "PrefixStore", lambda prefix, store: (prefix, store.keys))
    return spawn.start_store()


def meet(server, world_size, before=lambda rank: None, timeout=20):
    """Every rank's prefix, and the number of keys that it asked for."""

    def join(rank):
        own.store = CountingStore(torch_dist.TCPStore("127.0.0.1", server.port, is_master=False))
        before(rank)
        return dist._fresh_store(rank, world_size, timedelta(seconds=timeout))

    with futures.ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(join, range(world_size)))


@pytest.mark.parametrize("world_size", [1, 2, 64])
def test_each_rank_asks_for_few_keys_to_meet(server, world_size):
    answers = meet(server, world_size)
    assert len({prefix for prefix, _ in answers}) == 1
    assert all(keys <= 4 for _, keys in answers[1:]), "not one for each other rank"


def test_names_of_ranks_that_have_ended_do_not_confuse_the_new_ones(server):
    """They were as many, fewer or more. The last rank comes after rank 0 has answered its old name."""
    prefixes = set()
    for world_size in (3, 3, 5, 2, 5):
        old_name = None
        if server.check([f"rank {world_size - 1}"]):
            old_name = server.get(f"rank {world_size - 1}").decode()
            server.delete_key(f"prefix for {old_name}")

        def come_last(rank, last=world_size - 1, old_name=old_name):
            if rank == last and old_name:
                server.wait([f"prefix for {old_name}"], timedelta(seconds=10))

        answers = {prefix for prefix, _ in meet(server, world_size, come_last)}
        assert len(answers) == 1 and not answers & prefixes
        prefixes |= answers


def test_a_rank_that_does_not_come_is_an_error_on_all_others(server):
    def meet_late(rank):
        if rank == 2:
            raise ValueError

    for _ in range(2):  # also while its name of an earlier meeting is in the store
        with pytest.raises(TimeoutError, match="not all of 3 ranks have joined within 0:00:01"):
            meet(server, 3, meet_late, timeout=1)
        meet(server, 3)


# ---- the ranks exchange objects -------------------------------------------------------------------------------------


def count_sockets():
    links = []
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.lexists(path):  # the listing's own is closed by now
            links.append(os.readlink(path))
    return sum(link.startswith("socket:") for link in links)


def exchange(local_rank, world_size):
    dist.init_process_group()
    before = count_sockets()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, most))
    group = dist.patient_group()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
    assert dist.gather_objects(local_rank, group) == list(range(world_size))
    for src in range(0, world_size, 5):
        assert dist.broadcast_object(local_rank, src, group) == src
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    sockets = dist.gather_objects(count_sockets() - before)
    assert max(sockets) <= 2 * math.log2(world_size) + 1, f"not one to each other rank: {sockets}"


def test_objects_need_few_sockets():
    dist.launch(exchange, nprocs=12)


# ---- save and load --------------------------------------------------------------------------------------------------


def make_parts(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def read_by_one(rank, world_size, folder):
    dist.init_process_group()
    os.environ["LOCAL_RANK"] = "0"  # each rank is the only one of its node
    model, optimizer = make_parts()
    path = f"{folder}/{rank}.pt"
    checkpoint.save(path, model, optimizer, epoch=1)
    other, other_optimizer = make_parts(seed=1)
    with mock.patch.object(zipfile.ZipFile, "testzip", autospec=True, side_effect=zipfile.ZipFile.testzip) as whole:
        assert checkpoint.load(path, other, other_optimizer) == (1, 0)
    assert dist.gather_objects(whole.call_count) == [1, 0, 0], "only the sender reads its whole file"
    assert torch.equal(other[0].weight, model[0].weight)

    checkpoint.save_sharded(f"{folder}/sharded", model, optimizer, 3)
    read = FileSystemReader.read_metadata
    with mock.patch.object(FileSystemReader, "read_metadata", autospec=True, side_effect=read) as reads:
        assert checkpoint.load_sharded(f"{folder}/sharded", other, other_optimizer) == 3
    assert dist.gather_objects(reads.call_count) == [1, 0, 0], "rank 0 reads the index for all"
    check_kept(f"{folder}/kept", model, optimizer)
    own = f"{folder}/disk of machine {rank}"  # as a path that each machine has for itself
    line = r"^rank 1 does not see .* of machine 1/epoch-1/.metadata, which rank 0 has written: all machines must share"
    with mock.patch.object(checkpoint, "VISIBLE_SECONDS", 1), pytest.raises(dist.DistributedError, match=line):
        checkpoint.save_sharded(own, model, optimizer, 1)
    assert os.listdir(own) == []


def check_kept(folder, model, optimizer):
    def names():
        dist.barrier()  # rank 0 has deleted what it deletes
        return sorted(os.listdir(folder), key=lambda name: int(name.partition("-")[2]))

    for step in (1, 2, 3):
        checkpoint.save_sharded(folder, model, optimizer, step=step)
    if dist.is_primary():
        os.mkdir(f"{folder}/step-4")  # left by a save that was interrupted
    assert names() == ["step-1", "step-2", "step-3", "step-4"], "without keep nothing is deleted"
    assert checkpoint.load_sharded(folder, model, optimizer) == 3
    checkpoint.save_sharded(folder, model, optimizer, step=10, keep=3)
    assert names() == ["step-2", "step-3", "step-10"]
    assert checkpoint.load_sharded(folder, model, optimizer) == 10

    def fail(*args, **kwargs):
        raise OSError("no room")

    with mock.patch.object(FileSystemWriter, "finish", fail), pytest.raises(dist.DistributedError, match="no room"):
        checkpoint.save_sharded(folder, model, optimizer, step=11, keep=1)
    assert names() == ["step-2", "step-3", "step-10"], "older ones are deleted once the new one is complete"
    checkpoint.save_sharded(folder, model, optimizer, step=11, keep=1)
    assert names() == ["step-11"]
    two_units = r"has checkpoints of epochs and of steps, epoch-\d and step-11: name a folder for one kind"
    with pytest.raises(dist.DistributedError, match=two_units):
        checkpoint.save_sharded(folder, model, optimizer, epoch=3)
    if dist.is_primary():
        shutil.copytree(f"{folder}/step-11", f"{folder}/epoch-4")
    assert names() == ["epoch-4", "step-11"]
    with pytest.raises(dist.DistributedError, match="step-11 and epoch-4"):
        checkpoint.load_sharded(folder, model, optimizer)
    for wrong, line in [
        ({}, "give epoch or step"),
        ({"epoch": 1, "step": 1}, "give epoch or step"),
        ({"step": 0}, "step must be at least 1"),
        ({"step": 1, "keep": 0}, "keep must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=line):
            checkpoint.save_sharded(folder, model, optimizer, **wrong)


def test_one_rank_reads_for_all_and_the_newest_are_kept(tmp_path):
    dist.launch(read_by_one, str(tmp_path), nprocs=3)


def test_prefixes_of_names_are_found_once():
    keys = ["optimizer.state.a.exp_avg", "optimizer.state.a.b.step", "optimizer.state.c"]
    expected = {"", "optimizer", "optimizer.state", "optimizer.state.a", "optimizer.state.a.b"}
    assert checkpoint._prefixes(keys) == expected


@pytest.mark.parametrize("name", ["min_FSDP", "min_2D", "min_3D"])
def test_what_no_shape_shows_must_be_the_same_after_a_resume(name, tmp_path, monkeypatch):
    script = importlib.import_module(name)

    def run(steps, *changes):
        options = [*SMALL[2:], "--nproc", "1", "--steps", str(steps), "--checkpoint-dir", str(tmp_path), *changes]
        monkeypatch.setattr(sys, "argv", [name, *options])
        dist.launch(script.main_worker, script.parse_args(), nprocs=1)

    run(1)
    for changes, line in (
        (("--heads", "4"), "--heads 2, not 4"),
        (("--global-batch-size", "16"), "--global-batch-size 8, not 16"),
        (("--seed", "7"), "--seed 0, not 7"),
    ):
        assert exit_message(run, 2, *changes).startswith(f"the checkpoint was saved with {line}: use the same")
    run(2)


# ---- SIGTERM --------------------------------------------------------------------------------------------------------

SMALL = ("--nproc", "2", "--layers", "2", "--width", "32", "--heads", "2", "--length", "32", "--global-batch-size", "8")
STEPS = 1000
SCRIPTS = {
    "min_FSDP": (*SMALL, "--checkpoint-dir", "{folder}", "--keep", "1"),
    "min_2D": (*SMALL, "--checkpoint-dir", "{folder}"),
    "min_3D": (*SMALL, "--stages", "2", "--micro-batches", "2", "--checkpoint-dir", "{folder}"),
    "min_Muon": (*SMALL, "--snapshot-path", "{folder}/run.pt"),
    "min_Stream": (*SMALL, "--snapshot-path", "{folder}/run.pt", "--data-dir", "{data}", "--num-workers", "1"),
    "mnist_DDP": ("--nproc", "2", "--snapshot-path", "{folder}/run.pt", "--output-dir", "{folder}"),
}


def arguments_of(name, folder):
    script = importlib.import_module(name)
    options = [option.format(folder=folder / name, data=folder / "data") for option in SCRIPTS[name]]
    if name == "mnist_DDP":
        options += ["--global-batch-size", "2000"]
    else:
        options += ["--steps", str(STEPS), "--save-every", str(STEPS), "--log-every", str(STEPS)]
    with mock.patch.object(sys, "argv", [name, *options]):
        args = script.parse_args()
    if name == "mnist_DDP":
        hp, args = args
        return hp, args.output_dir, args.snapshot_path
    return (args,)


def preempted(local_rank, world_size, name, args, receiver):
    """Run a script; `receiver` gets SIGTERM in its third step. Returns the number of steps until it left."""
    agreed, calls = checkpoint.Preemption.agreed, []

    def count(self):
        calls.append(None)
        if len(calls) == 3 and local_rank == receiver:
            signal.raise_signal(signal.SIGTERM)
        return agreed(self)

    with (
        mock.patch.object(checkpoint.Preemption, "agreed", count),
        mock.patch.object(checkpoint, "CHECK_SECONDS", 0),
        pytest.raises(SystemExit, match="143"),
    ):
        importlib.import_module(name).main_worker(local_rank, world_size, *args)
    assert not dist.is_dist_avail_and_initialized(), "all ranks leave together"
    assert 3 <= len(calls) <= 5
    return len(calls)


def saved_steps(name, folder):
    """The step at which the newest checkpoint of a script was saved."""
    if (folder / "run.pt").exists():
        saved = torch.load(folder / "run.pt", weights_only=True)["step"]
        return saved // 8 if name == "min_Stream" else saved
    return max(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def preempt_all(local_rank, world_size, folder, jobs):
    with few_digits(20_000, 100, dtype=torch.float32):
        for name, args in jobs.items():
            done = preempted(local_rank, world_size, name, args, receiver=1)
            assert saved_steps(name, folder / name) == done, f"{name} saves the step that all ranks have done"
            done += preempted(local_rank, world_size, name, args, receiver=0)
            assert saved_steps(name, folder / name) == done, f"{name} resumes there"


@pytest.mark.slow
def test_sigterm_to_one_rank_saves_in_every_script_that_can_save(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text('{"text": "a text of some words"}\n' * 100)
    jobs = {name: arguments_of(name, tmp_path) for name in SCRIPTS}
    dist.launch(preempt_all, tmp_path, jobs, nprocs=2)
