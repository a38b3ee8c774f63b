"""The third rung: SIGTERM, nodes that come and go; nothing done is lost. More is in tests/test_equal_images.py."""

import os
import re
import shutil
import signal
import subprocess
from types import SimpleNamespace

import images
import psutil
import pytest
import torch
from conftest import ROOT, exit_message, finish, run_under_launcher, start, start_forked, wait_for
from images import EPOCH_LINE, assert_same_models
from torch.multiprocessing import ProcessRaisedException

import distributed as dist
import multinode_torchrun

SCRIPT = "multinode_torchrun.py"
SAVED_LINE = re.compile(r"\[rank 0/\d+ on \S+\] Snapshot saved at .*: next is Epoch (\d+), Step (\d+)")
START_LINE = re.compile(r"\[rank (\d+)/(\d+) on \S+\] (?:CPU|GPU\d+) \| Starting at Epoch (\d+), Step (\d+)")


def options(path, total_epochs, **changes):
    defaults = {"save_every": 1000, "global_batch_size": 64, "num_workers": 0, "timeout": 60}
    return SimpleNamespace(snapshot_path=str(path), total_epochs=total_epochs, **{**defaults, **changes})


def test_the_command_learns(tmp_path, capfd):
    dist.launch(run_under_launcher, SCRIPT, 3, 2, "--snapshot-path", tmp_path / "snapshot.pt", nprocs=2)
    stdout = capfd.readouterr().out
    epochs = EPOCH_LINE.findall(stdout)
    assert [line[:3] for line in epochs] == [(str(epoch), "64", "32") for epoch in range(3)], stdout
    assert float(epochs[-1][-1]) < float(epochs[0][-1]) / 2
    assert SAVED_LINE.findall(stdout) == [("2", "0"), ("3", "0")]


def test_a_batch_of_more_than_all_samples_is_one_line():
    message = exit_message(images.train, "multinode_torchrun", global_batch_size=304)
    assert message == "--global-batch-size 304 is more than the 303 samples"


def test_another_batch_size_inside_an_epoch_is_refused(tmp_path):
    path = str(tmp_path / "snapshot.pt")

    def train(global_batch_size):
        images.train("multinode_torchrun", global_batch_size=global_batch_size, snapshot_path=path)

    images.train("multinode_torchrun", epochs=1, snapshot_path=path)
    torch.save({**torch.load(path, weights_only=True), "step": 240}, path)
    for wrong in (50, 240, 80):  # no step begins there, or the epoch is over by then
        message = exit_message(train, wrong)
        assert message.startswith(f"{path} is 240 samples into an epoch: use the --global-batch-size ")
    train(48)


# ---- preemption -----------------------------------------------------------------------------------------------------


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
        return [int(epoch) for epoch in re.findall(rf"rank 0/{ranks} on .* Epoch (\d+) \| Batchsize", text)]

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
    assert_same_models(snapshots[1], expected, 1e-5)
