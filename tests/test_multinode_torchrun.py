"""The third rung: any number of ranks, SIGTERM at any moment, nodes that come and go; nothing done is lost."""

import os
import re
import shutil
import signal
import subprocess
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import ROOT, finish, start, wait_for
from torch import nn
from torch.multiprocessing import ProcessRaisedException

import distributed as dist
import multinode_torchrun

SCRIPT = "multinode_torchrun.py"
EPOCH_LINE = re.compile(
    r"\[rank 0/(\d+) on \S+\] (?:CPU|GPU\d+) \| Epoch (\d+) \| Batchsize: (\d+) \| Steps: (\d+) \| Loss: (\d+\.\d{4})"
)
SAVED_LINE = re.compile(r"\[rank 0/\d+ on \S+\] Snapshot saved at .*: next is Epoch (\d+), Step (\d+)")
START_LINE = re.compile(r"\[rank (\d+)/(\d+) on \S+\] (?:CPU|GPU\d+) \| Starting at Epoch (\d+), Step (\d+)")


@pytest.fixture(autouse=True)
def sigterm(monkeypatch):
    """Leave pytest's own handling of SIGTERM as it was."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(multinode_torchrun, "signals", [])
    yield
    signal.signal(signal.SIGTERM, handler)


def options(path, total_epochs, save_every=1000, global_batch_size=64, timeout=60):
    return SimpleNamespace(
        total_epochs=total_epochs,
        save_every=save_every,
        global_batch_size=global_batch_size,
        snapshot_path=str(path),
        timeout=timeout,
    )


def model_of(path):
    return torch.load(path, weights_only=True)["model"]


def difference(path, expected):
    pairs = ((model_of(path)[name], tensor) for name, tensor in model_of(expected).items())
    return max((one.double() - other.double()).abs().max().item() for one, other in pairs)


# ---- the number of ranks may change ---------------------------------------------------------------------------------


def test_the_number_of_ranks_may_change(tmp_path, capfd):
    expected, path = tmp_path / "expected.pt", tmp_path / "snapshot.pt"
    dist.launch(multinode_torchrun.main_worker, options(expected, 30), nprocs=1)
    capfd.readouterr()
    for nprocs, total_epochs in [(4, 10), (2, 20), (1, 30)]:
        dist.launch(multinode_torchrun.main_worker, options(path, total_epochs), nprocs=nprocs)
    assert difference(path, expected) <= 1e-5
    lines = EPOCH_LINE.findall(capfd.readouterr().out)
    assert [(int(epoch), int(ranks), int(batch), int(steps)) for ranks, epoch, batch, steps, _ in lines] == [
        (epoch, ranks, 64 // ranks, 32) for epoch, ranks in enumerate([4] * 10 + [2] * 10 + [1] * 10)
    ]
    assert float(lines[-1][-1]) < float(lines[0][-1]) / 100


def test_a_last_batch_that_does_not_fill_is_left_out(tmp_path):
    for nprocs in (1, 3):  # 2048 = 21 * 96 + 32, and 32 is no multiple of 3
        dist.launch(multinode_torchrun.main_worker, options(tmp_path / f"{nprocs}.pt", 2, 1, 96), nprocs=nprocs)
    assert difference(tmp_path / "1.pt", tmp_path / "3.pt") <= 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--global-batch-size", "64"), "argument --global-batch-size: 64 is not a multiple of 3, the number of ranks"),
        (("--global_batch_size", "0"), "--global-batch-size/--global_batch_size"),
        (("--global-batch-size", "2049"), "2049 is not in the range 1 to 2048"),
        (("--timeout", "0"), "--timeout"),
    ],
)
def test_a_wrong_option_is_one_line(main_of, monkeypatch, arguments, message):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    code, stderr = main_of(SCRIPT, "5", "1", *arguments)
    assert code == 2
    assert len(stderr.splitlines()) == 1
    assert message in stderr


# ---- preemption -----------------------------------------------------------------------------------------------------


def preempted_worker(local_rank, world_size, path, total_epochs, at):
    """Train, and at the `at`-th step of this process send SIGTERM to the last rank alone."""
    dist.init_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters())
    multinode_torchrun.signals.clear()
    preemption = multinode_torchrun.Preemption(None)
    dataset, device = multinode_torchrun.ToyDataset(), dist.get_device()
    trainer = multinode_torchrun.Trainer(model, dataset, 96, optimizer, device, 1000, path, preemption)
    steps = []

    def count(*args):
        steps.append(model.training)
        if sum(steps) == at and local_rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    model.register_forward_hook(count)
    finished = trainer.train(total_epochs)
    counts = dist.gather(torch.tensor(sum(steps)))
    assert len({count.item() for count in counts}) == 1, "all ranks stop after the same step"
    assert finished == (at is None)
    if at:
        assert at <= sum(steps) <= at + 1


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_sigterm_loses_nothing(nprocs, tmp_path):
    expected, path = str(tmp_path / "expected.pt"), str(tmp_path / "snapshot.pt")
    dist.launch(preempted_worker, expected, 3, None, nprocs=nprocs)
    lag = int(nprocs > 1)  # the other ranks learn of it one step later
    for at, position in [(30, (1, 9)), (12, (2, 0)), (5, (2, 5))]:  # of 21 steps: inside an epoch, between two, inside
        dist.launch(preempted_worker, path, 3, at - lag, nprocs=nprocs)
        snapshot = torch.load(path, weights_only=True)
        assert (snapshot["epoch"], snapshot["step"] / 96) == position
    dist.launch(preempted_worker, path, 3, None, nprocs=nprocs)
    for name, tensor in model_of(expected).items():
        assert torch.equal(model_of(path)[name], tensor), name


@pytest.mark.slow
def test_sigterm_to_torchrun(tmp_path):
    expected, path, log = tmp_path / "expected.pt", tmp_path / "disk" / "snapshot.pt", tmp_path / "log"
    arguments = (SCRIPT, 4, 1000, "--global-batch-size", 8, "--snapshot-path", path)
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, *arguments)
    job = start(*command, log=log)
    wait_for(lambda: EPOCH_LINE.search(log.read_text()), job)
    job.terminate()
    code, _, _ = finish(job, timeout=30)
    text = log.read_text()
    assert code == 1, text  # torchrun's own status after a signal
    assert "SIGKILL" not in text
    (epoch, step), *more = SAVED_LINE.findall(text)
    assert not more
    assert int(step) > 0, "not in the middle of an epoch"

    code, _, _ = finish(start(*command, log=log))
    text = log.read_text()
    assert code == 0, text
    assert START_LINE.findall(text)[-1][2:] == (epoch, step)
    assert {rank for rank, *_ in START_LINE.findall(text)} == {"0", "1"}
    dist.launch(multinode_torchrun.main_worker, options(expected, 4, 1000, 8), nprocs=2)
    assert difference(path, expected) == 0


def test_sigterm_to_a_single_process(tmp_path):
    log = tmp_path / "log"
    arguments = (SCRIPT, 1000, 1000, "--snapshot-path", tmp_path / "snapshot.pt")
    job = start(*arguments, log=log)
    wait_for(lambda: EPOCH_LINE.search(log.read_text()), job)
    job.terminate()
    code, _, _ = finish(job, timeout=30)
    text = log.read_text()
    assert code == 128 + signal.SIGTERM, text
    assert "Traceback" not in text
    assert len(SAVED_LINE.findall(text)) == 1


def test_another_batch_size_inside_an_epoch_is_refused(tmp_path):
    path = str(tmp_path / "snapshot.pt")
    model = nn.Linear(20, 1)
    dist.save_snapshot(path, model, torch.optim.SGD(model.parameters(), lr=5e-3), epoch=1, step=96)
    with pytest.raises(SystemExit, match=f"{path} was saved 96 samples into an epoch.*64 is no divisor"):
        dist.launch(multinode_torchrun.main_worker, options(path, 2), nprocs=2)
    dist.launch(multinode_torchrun.main_worker, options(path, 2, global_batch_size=48), nprocs=2)


# ---- the machine ----------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "snapshot.pt"
    with pytest.raises(SystemExit, match=f"cannot make the folder of {path} on .*: File exists"):
        dist.launch(multinode_torchrun.main_worker, options(path, 1), nprocs=2)


def stopped_worker(local_rank, world_size, args):
    if local_rank == 1:
        train = multinode_torchrun.Trainer.train

        def stop(*args):
            os.kill(os.getpid(), signal.SIGSTOP)
            return train(*args)

        multinode_torchrun.Trainer.train = stop
    multinode_torchrun.main_worker(local_rank, world_size, args)


def test_a_rank_that_hangs_ends_the_job_after_the_timeout(tmp_path):
    with pytest.raises(ProcessRaisedException, match=r"rank 0 raised(.|\n)*[Tt]imed out"):
        dist.launch(stopped_worker, options(tmp_path / "snapshot.pt", 5, timeout=2), nprocs=2)


# ---- two nodes ------------------------------------------------------------------------------------------------------


def can_make_namespaces():
    name = f"probe{os.getpid()}"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return made


@pytest.fixture
def nodes(tmp_path):
    """Two network namespaces joined by a veth pair: (name, interface, address, folder) of each."""
    if not can_make_namespaces():
        pytest.skip("network namespaces need root and ip (iproute2)")
    tag = os.getpid()
    names = [f"node{i}-{tag}" for i in range(2)]

    def ip(*arguments):
        subprocess.run(["ip", *arguments], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", f"va{tag}", "netns", names[0], "type", "veth", "peer", "name", f"vb{tag}", "netns", names[1])
        nodes = []
        for i, (name, interface) in enumerate(zip(names, (f"va{tag}", f"vb{tag}"), strict=True)):
            ip("-n", name, "address", "add", f"10.99.0.{i + 1}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")
            nodes.append((name, interface, f"10.99.0.{i + 1}", tmp_path / f"node{i}"))
        yield nodes
    finally:
        for name in names:
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


@pytest.mark.slow
def test_two_nodes_of_which_one_is_lost_and_comes_back_empty(nodes, tmp_path):
    arguments = (10**6, 1, "--global-batch-size", 8)
    logs = [folder / "log" for *_, folder in nodes]

    def epochs_on(ranks):
        return [
            int(epoch)
            for log in logs
            if log.exists()
            for n, epoch, *_ in EPOCH_LINE.findall(log.read_text())
            if int(n) == ranks
        ]

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
    assert difference(*snapshots) == 0
    reached = torch.load(snapshots[0], weights_only=True)
    assert reached["epoch"] > int(epoch)
    end, expected = reached["epoch"] + 1, tmp_path / "expected.pt"
    dist.launch(multinode_torchrun.main_worker, options(snapshots[1], end, global_batch_size=8), nprocs=1)
    dist.launch(multinode_torchrun.main_worker, options(expected, end, global_batch_size=8), nprocs=1)
    assert difference(snapshots[1], expected) <= 1e-5
