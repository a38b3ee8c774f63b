"""The third rung: any number of ranks, SIGTERM at any moment, nodes that come and go; nothing done is lost."""

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import ROOT, finish, float64, guards, start, start_forked, wait_for
from ladder import (
    BOTH,
    adam,
    assert_close,
    assert_same_models,
    mlp,
    no_seed_twice,
    random_model,
    train_alone,
)
from torch import nn
from torch.multiprocessing import ProcessRaisedException

import checkpoint
import distributed as dist
import multinode_torchrun

SCRIPT = "multinode_torchrun.py"
EPOCH_LINE = re.compile(
    r"\[rank 0/(\d+) on \S+\] (?:CPU|GPU\d+) \| Epoch (\d+) \| Batchsize: (\d+) \| Steps: (\d+) \| Loss: (\d+\.\d{4})"
)
SAVED_LINE = re.compile(r"\[rank 0/\d+ on \S+\] Snapshot saved at .*: next is Epoch (\d+), Step (\d+)")
START_LINE = re.compile(r"\[rank (\d+)/(\d+) on \S+\] (?:CPU|GPU\d+) \| Starting at Epoch (\d+), Step (\d+)")


@pytest.fixture(autouse=True)
def sigterm():
    """Leave pytest's own handling of SIGTERM as it was."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def options(path, total_epochs, **changes):
    defaults = {"save_every": 1000, "global_batch_size": 64, "num_workers": 0, "timeout": 60}
    return SimpleNamespace(snapshot_path=str(path), total_epochs=total_epochs, **{**defaults, **changes})


def test_a_batch_of_more_than_all_samples_is_one_line(tmp_path):
    with pytest.raises(dist.DistributedError, match="--global-batch-size 96 is more than the 10 samples"):
        trainer(torch.nn.Linear(1, 1), lambda model: None, tmp_path / "run.pt", range(10), 0)


def trainer(model, optimizer, path, dataset, num_workers):
    args = options(path, None, global_batch_size=96, num_workers=num_workers)
    preemption = checkpoint.Preemption()
    return multinode_torchrun.Trainer(model, dataset, optimizer(model), dist.get_device(), preemption, args)


@float64()
def equal_worker(local_rank, world_size, by_sgd, by_adam):
    """The script's own, then Adam and a model of several layers, which three ranks leave inside an epoch."""
    multinode_torchrun.main_worker(local_rank, world_size, by_sgd)
    preemption = checkpoint.Preemption()
    preemption.received = world_size == 3 and local_rank == 2
    data, model = multinode_torchrun.ToyDataset(), mlp()
    job = multinode_torchrun.Trainer(model, data, adam(model), dist.get_device(), preemption, by_adam)
    assert job.train(by_adam.total_epochs) == (world_size != 3)


@pytest.mark.guard
@pytest.mark.slow
def test_the_number_of_ranks_may_change(tmp_path, capfd):
    """Parameters and printed losses equal plain training without a last batch that is not full.

    Shares differ: of 100 samples three ranks have 34, 33 and 33.
    """
    by_sgd, by_adam = (options(tmp_path / name, 0, global_batch_size=100) for name in ("sgd.pt", "adam.pt"))
    for nprocs in (4, 3, 2, 1):
        by_sgd.total_epochs += 1
        by_adam.total_epochs += 1
        dist.launch(equal_worker, by_sgd, by_adam, nprocs=nprocs)
    (of_sgd, sgd_losses), (of_adam, adam_losses) = (train_alone(*what, 4, 100, 2000) for what in BOTH)
    assert_close(by_sgd.snapshot_path, of_sgd)
    assert_close(by_adam.snapshot_path, of_adam)
    lines = [(*map(int, line), float(loss)) for *line, loss in EPOCH_LINE.findall(capfd.readouterr().out)]
    stopped = lines[3][3]
    assert stopped == 2, "all ranks learn of it after one step more"
    shown = [(4, 0, 100, 20), (4, 0, 100, 20), (3, 1, 100, 20), (3, 1, 100, stopped)]
    shown += [(2, 2, 100, 20), (2, 1, 100, 20 - stopped), (2, 2, 100, 20), (1, 3, 100, 20), (1, 3, 100, 20)]
    assert [line[:4] for line in lines] == shown
    losses = [line[-1] for line in lines]
    assert [losses[i] for i in (0, 2, 4, 7)] == pytest.approx(sgd_losses, abs=5.1e-5)
    inside = (stopped * losses[3] + (20 - stopped) * losses[5]) / 20
    assert [losses[1], inside, losses[6], losses[8]] == pytest.approx(adam_losses, abs=5.1e-5)


# ---- preemption -----------------------------------------------------------------------------------------------------


class AugmentedBatches(multinode_torchrun.ToyDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.randn(20), y


def preempted_worker(local_rank, world_size, path, total_epochs, at, num_workers):
    """Train with all that is random, and at the `at`-th step of this process send SIGTERM to the last rank alone."""
    dist.init_process_group()
    model, steps = random_model(), []
    torch.manual_seed(at or 0)  # no randomness from before a step counts
    dataset = multinode_torchrun.ToyDataset() if world_size == 2 else AugmentedBatches()  # see `Trainer.batches`
    job = trainer(model, adam, path, dataset, num_workers)

    def count(model, *rest):
        assert model.training
        steps.append(None)
        if len(steps) == at and num_workers:  # torchrun and SLURM signal it too
            (loading,) = multiprocessing.active_children()
            loading.terminate()
            loading.join(0.5)
            assert loading.is_alive()
        if len(steps) == at and local_rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    model.register_forward_hook(count)
    with no_seed_twice():
        finished = job.train(total_epochs)
    counts = dist.gather(torch.tensor(len(steps)))
    assert len({count.item() for count in counts}) == 1, "all ranks stop after the same step"
    if at:
        assert at <= len(steps) <= at + 1
    return finished


def preempted_jobs(local_rank, world_size, folder):
    """An uninterrupted run, and one that is sent SIGTERM inside an epoch of 21 steps, between two, and at the end."""
    assert preempted_worker(local_rank, world_size, f"{folder}/expected.pt", 3, None, 0)
    path = f"{folder}/snapshot.pt"
    done = 0
    settling = int(world_size > 1)  # the first step of each is spent on DDP's buckets
    for at in (30, 12, 5, None):
        at = at or 63 - done + settling  # in the last step
        finished = preempted_worker(local_rank, world_size, path, 3, at, int(world_size == 2 and at in (30, 5)))
        snapshot = torch.load(path, weights_only=True)
        position = 21 * snapshot["epoch"] + snapshot["step"] // 96
        late = position - (done + at - settling)
        assert late == int(world_size > 1) or position == 63, "several ranks agree in one step more"
        assert finished == (position == 63), "in the last step it comes too late"
        done = position
        dist.barrier()


@pytest.mark.parametrize("nprocs", [2, *guards(1, 3)])
def test_sigterm_loses_nothing(nprocs, tmp_path):
    dist.launch(preempted_jobs, str(tmp_path), nprocs=nprocs)
    assert_same_models(tmp_path / "snapshot.pt", tmp_path / "expected.pt")


def test_torchruns_report_has_the_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(AttributeError):
        multinode_torchrun.main_worker(0, 1, SimpleNamespace())
    assert "AttributeError" in (tmp_path / "error.json").read_text()


@pytest.mark.slow
def test_sigterm_to_torchrun(tmp_path):
    expected, path, log = tmp_path / "expected.pt", tmp_path / "disk" / "snapshot.pt", tmp_path / "log"
    arguments = (SCRIPT, 20, 1000, "--global-batch-size", 8, "--snapshot-path", path)
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, *arguments)
    job = start(*command, log=log)
    wait_for(lambda: EPOCH_LINE.search(log.read_text()), job)
    job.terminate()
    code, _, _ = finish(job)
    text = log.read_text()
    assert code == 1, text  # torchrun's own status after a signal
    assert "SIGKILL" not in text
    ((epoch, step),) = SAVED_LINE.findall(text)
    assert int(step) > 0, "not in the middle of an epoch"

    code, _, _ = finish(start(*command, log=log))
    text = log.read_text()
    assert code == 0, text
    assert START_LINE.findall(text)[-1][2:] == (epoch, step)
    assert {rank for rank, *_ in START_LINE.findall(text)} == {"0", "1"}
    dist.launch(multinode_torchrun.main_worker, options(expected, 20, global_batch_size=8), nprocs=2)
    assert_same_models(path, expected)


def test_sigterm_to_a_single_process(tmp_path):
    log = tmp_path / "log"
    job = start_forked(log, SCRIPT, 1000, 1000, "--snapshot-path", tmp_path / "snapshot.pt")
    wait_for(lambda: log.exists() and EPOCH_LINE.search(log.read_text()), job)
    job.terminate()
    job.join(60)
    text = log.read_text()
    assert job.exitcode == 128 + signal.SIGTERM, text
    assert "Traceback" not in text
    assert len(SAVED_LINE.findall(text)) == 1


def test_another_batch_size_inside_an_epoch_is_refused(tmp_path):
    path = str(tmp_path / "snapshot.pt")
    model = nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3)
    checkpoint.save(path, model, optimizer, epoch=1, step=1920, settings={"training samples": 2048})
    with pytest.raises(SystemExit, match=f"^{path} is 1920 samples into an epoch: use the --global-batch-size .*$"):
        dist.launch(multinode_torchrun.main_worker, options(path, 2, global_batch_size=50), nprocs=2)
    for wrong in (50, 1920, 960):  # no step begins there, or the epoch is over by then
        with pytest.raises(SystemExit, match="is 1920 samples into an epoch"):
            dist.launch(multinode_torchrun.main_worker, options(path, 2, global_batch_size=wrong), nprocs=1)
    dist.launch(multinode_torchrun.main_worker, options(path, 2, global_batch_size=48), nprocs=2)
    samples = torch.utils.data.Subset(multinode_torchrun.ToyDataset(), range(1984))
    args = options(path, 3, global_batch_size=48)
    other = multinode_torchrun.Trainer(model, samples, optimizer, dist.get_device(), None, args)
    with pytest.raises(dist.DistributedError, match="was saved with training samples 2048, not 1984: use the same"):
        other.load_snapshot()


def stopped_worker(local_rank, world_size, args):
    if local_rank == 1:

        def stop(*args):
            os.kill(os.getpid(), signal.SIGSTOP)

        multinode_torchrun.Trainer.train = stop
    multinode_torchrun.main_worker(local_rank, world_size, args)


def test_a_rank_that_hangs_ends_the_job_after_the_timeout(tmp_path):
    with pytest.raises(ProcessRaisedException, match=r"rank 0 raised(.|\n)*[Tt]imed out"):
        dist.launch(stopped_worker, options(tmp_path / "snapshot.pt", 5, timeout=2), nprocs=2)


@pytest.fixture
def nodes(tmp_path):
    """Two network namespaces joined by a veth pair: (name, interface, address, folder) of each."""
    nodes = [(f"n{i}-{os.getpid()}", f"v{i}-{os.getpid()}", f"10.99.0.{i + 1}", tmp_path / f"{i}") for i in (0, 1)]
    (one, here, *_), (other, there, *_) = nodes

    def ip(*arguments):
        subprocess.run(["ip", *arguments], check=True)

    if os.geteuid() != 0 or not shutil.which("ip") or subprocess.run(["ip", "netns", "add", one]).returncode:
        pytest.skip("network namespaces need root and ip (iproute2)")
    try:
        ip("netns", "add", other)
        ip("link", "add", here, "netns", one, "type", "veth", "peer", "name", there, "netns", other)
        for name, interface, address, _ in nodes:
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")
        yield nodes
    finally:
        for name, *_ in nodes:
            kill_node(name)
            subprocess.run(["ip", "netns", "delete", name])


def kill_node(name):
    """End every process of a node at once, as a power cut does."""
    pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
    processes = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, timeout=10)


def start_node(nodes, i, *arguments):
    name, interface, address, folder = nodes[i]
    folder.mkdir()
    command = ("-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", 1, "--max-restarts", 9)
    command += ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{nodes[0][2]}:29400", "--local-addr", address)
    command += ("--rdzv-conf", f"is_host={str(i == 0).lower()},last_call_timeout=1", ROOT / SCRIPT, *arguments)
    prefix = ("ip", "netns", "exec", name)
    env = {"GLOO_SOCKET_IFNAME": interface, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return start(*command, cwd=folder, env=env, log=folder / "log", prefix=prefix)


@pytest.mark.guard
@pytest.mark.slow
def test_two_nodes_of_which_one_is_lost_and_comes_back_empty(nodes, tmp_path):
    arguments = (10**6, 1, "--global-batch-size", 8)
    logs = [folder / "log" for *_, folder in nodes]

    def epochs_on(ranks):
        text = "".join(log.read_text() for log in logs if log.exists())
        return [int(epoch) for n, epoch, *_ in EPOCH_LINE.findall(text) if int(n) == ranks]

    survivor = start_node(nodes, 0, *arguments)
    wait_for(lambda: epochs_on(1), survivor)  # alone
    lost = start_node(nodes, 1, *arguments)
    wait_for(lambda: len(epochs_on(2)) > 2, survivor)  # the other has joined
    kill_node(nodes[1][0])
    lost.wait(10)
    assert (nodes[1][3] / "snapshot.pt").exists(), "every node writes its own"
    done = max(epochs_on(2))
    wait_for(lambda: max(epochs_on(1)) > done, survivor)  # alone again

    shutil.rmtree(nodes[1][3])
    back = start_node(nodes, 1, *arguments)
    wait_for(lambda: START_LINE.search(logs[1].read_text()), back)
    ((_, ranks, epoch, _), *_) = START_LINE.findall(logs[1].read_text())
    assert ranks == "2"
    assert int(epoch) > done, "it resumes from the other's snapshot"

    joined = max(epochs_on(2))
    wait_for(lambda: max(epochs_on(2)) > joined, survivor)
    for job in (survivor, back):
        job.terminate()
    for job in (survivor, back):
        finish(job, timeout=40)
    snapshots = [folder / "snapshot.pt" for *_, folder in nodes]
    assert_same_models(*snapshots)
    reached = torch.load(snapshots[0], weights_only=True)
    assert reached["epoch"] > int(epoch)
    end, expected = reached["epoch"] + 1, tmp_path / "expected.pt"
    dist.launch(multinode_torchrun.main_worker, options(snapshots[1], end, global_batch_size=8), nprocs=1)
    dist.launch(multinode_torchrun.main_worker, options(expected, end, global_batch_size=8), nprocs=1)
    assert_close(snapshots[1], torch.load(expected, weights_only=True)["model"], 1e-5)
