"""The parameter server: exact when synchronous, nothing lost when not, and it survives the loss of trainers."""

import argparse
import contextlib
import io
import os
import re
import signal
import socket
import threading
import time
import uuid
from pathlib import Path

import psutil
import pytest
import torch
from conftest import ROOT, finish, run, start, torchrun
from test_launch import members
from torch.distributed import rpc
from torch.multiprocessing import ProcessExitedException
from torch.nn import functional as F

import distributed as dist
import mnist
import rpc_param_server

SCRIPT = ROOT / "rpc_param_server.py"
MNIST_ROOT = os.environ.get("MNIST_ROOT")
LINE = re.compile(
    r"Epoch (\d+) - loss: (\d+\.\d{4}) - acc: (\d\.\d{4}) \((\d+)/(\d+)\) - "
    r"([\d.]+) updates/s - ([\d.]+) MB/s - staleness: (\d+\.\d{2})"
)
BATCH, EPOCHS, SEED, LR, SAMPLES = 8, 2, 3, 0.02, 192  # 2 trainers: 2 epochs of 192 / 16 = 12 steps


def small_data(*args, **kwargs):
    """Noise that is the brighter the greater the label."""
    generator = torch.Generator().manual_seed(SEED)
    labels = torch.randint(10, (SAMPLES,), generator=generator)
    noise = torch.randint(25, (SAMPLES, 1, 28, 28), generator=generator)
    return mnist.Digits((25 * labels[:, None, None, None] + noise).to(torch.uint8), labels)


def arguments(mode, **kwargs):
    defaults = {"epochs": EPOCHS, "batch_size": BATCH, "lr": LR, "seed": SEED, "timeout": 60.0, "model": "simple"}
    return argparse.Namespace(mode=mode, data="synthetic", data_dir="data", **{**defaults, **kwargs})


# ---- sync equals one process; what is sent --------------------------------------------------------------------------


def io_bytes():
    """Bytes that this process has read and written, sockets included."""
    numbers = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return torch.tensor([int(numbers["rchar"]), int(numbers["wchar"])])


def train_and_record(local_rank, world_size, folder, mode):
    """Save the parameters at each evaluation, or of each call of the server its function and the bytes it cost."""
    torch.set_default_dtype(torch.float64)
    mnist.load_data = small_data
    records = []
    rpc_sync, evaluate = rpc.rpc_sync, rpc_param_server.evaluate

    def recording_call(to, function, args):
        before = io_bytes()
        answer = rpc_sync(to, function, args)
        records.append((function.__name__, (io_bytes() - before).tolist()))
        return answer

    def recording_evaluate(model, loader, device):
        sums = evaluate(model, loader, device)
        records.append([p.detach().clone() for p in model.parameters()])
        assert not model.training and sums[2] == SAMPLES
        return sums

    # Through sockets, as between machines: the kernel's copies from process to process are counted nowhere.
    sockets = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
    init_rpc = rpc.init_rpc
    rpc.init_rpc = lambda *args, **kwargs: init_rpc(*args, **{**kwargs, "rpc_backend_options": sockets})
    rpc_param_server.rpc.rpc_sync = recording_call
    rpc_param_server.evaluate = recording_evaluate
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        rpc_param_server.main_worker(local_rank, world_size, arguments(mode))
    torch.save((records, stdout.getvalue()), f"{folder}/{local_rank}.pt")


def train_alone():
    """Plain PyTorch, without the server: the parameters after each epoch."""
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.float64)
    try:
        model = mnist.SimpleCNN()
    finally:
        torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    data = small_data()
    results, losses = [], []
    for epoch in range(EPOCHS):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED + epoch))
        for batch in order.split(2 * BATCH):
            images, labels = data.__getitems__(batch)
            optimizer.zero_grad()
            loss = F.cross_entropy(model((images.double() / 255 - mnist.MEAN) / mnist.STD), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        results.append([p.detach().clone() for p in model.parameters()])
    assert losses[-1] < 0.7 * losses[0], "the reference must learn, or equality means little"
    return results


@pytest.mark.parametrize("mode", ["sync", "hogwild"])
def test_one_round_trip_a_step_and_sync_equals_one_process(mode, tmp_path):
    dist.launch(train_and_record, str(tmp_path), mode, nprocs=3)
    params, stdout = torch.load(tmp_path / "0.pt", weights_only=True)
    *lines, last = stdout.splitlines()[1:]
    updates = 24 if mode == "sync" else 48
    assert last == f"Finished: {updates} updates, no trainer lost"
    epochs = [LINE.fullmatch(line).groups() for line in lines]
    assert [(epoch[0], epoch[4]) for epoch in epochs] == [("1", str(SAMPLES)), ("2", str(SAMPLES))]
    if mode == "sync":
        for actual, expected in zip(params, train_alone(), strict=True):
            for one, other in zip(actual, expected, strict=True):
                assert (one - other).abs().max() <= 1e-9
        assert [epoch[7] for epoch in epochs] == ["0.00", "0.00"], "a synchronous gradient is never stale"

    payload = 8 * sum(p.numel() for p in mnist.SimpleCNN().parameters())
    send = {"sync": "push_and_wait", "hogwild": "push"}[mode]
    for rank in (1, 2):
        calls, stdout = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert stdout == "", "only the primary prints"
        names = [name for name, _ in calls]
        assert names[:26] == ["pull"] + [send] * 24 + ["finish"], "one round trip a step"
        for name, (received, sent) in calls[1:25]:
            assert name == send
            assert payload <= received <= 1.01 * payload, "the parameters once"
            assert payload <= sent <= 1.01 * payload, "the gradient once"


# ---- the server's state ---------------------------------------------------------------------------------------------


@pytest.fixture
def new_server(monkeypatch):
    """Make a server in this process."""

    def new(ranks, timeout=60):
        torch.manual_seed(0)
        server = rpc_param_server.Server(mnist.SimpleCNN(), ranks, lr=0.01, timeout=timeout)
        monkeypatch.setattr(rpc_param_server, "server", server)
        return server

    return new


def test_updates_from_many_threads_are_neither_lost_nor_torn(new_server):
    gradient = torch.ones(50_186)
    alone = new_server([1])
    for _ in range(8 * 50):
        rpc_param_server.push(1, gradient)

    def push(rank):
        for _ in range(50):
            rpc_param_server.push(rank, gradient)

    together = new_server(range(1, 9))
    threads = [threading.Thread(target=push, args=(rank,)) for rank in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together.updates == 400 and torch.equal(together.params, alone.params)


def test_staleness_counts_the_updates_between_pull_and_push(new_server):
    server, gradient = new_server([1, 2]), torch.zeros(50_186)
    rpc_param_server.pull(1, steps=2)
    rpc_param_server.pull(2, steps=2)
    for rank in (1, 1, 2, 2):  # the third was computed before the first two
        rpc_param_server.push(rank, gradient)
    assert server.staleness == 0 + 0 + 2 + 0
    _, (_, updates, pushes, staleness) = server.epochs.get_nowait()
    assert (updates, pushes, staleness) == (4, 4, 2), "an epoch ends when every trainer has done its share"


def test_sync_waits_for_the_trainers_at_work_and_takes_a_slow_one_back(new_server):
    server = new_server([1, 2, 3], timeout=1)
    start = server.params.clone()
    for rank in (1, 2, 3):
        rpc_param_server.pull(rank, steps=10)
    first = rpc_param_server.push_and_wait(1, torch.full((50_186,), 1.0))
    second = rpc_param_server.push_and_wait(3, torch.full((50_186,), 3.0))
    assert not first.done() and not second.done()
    watch = threading.Thread(target=server.watch, daemon=True)
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        watch.start()
        answer = first.wait()  # once trainer 2 is lost
        assert torch.allclose(answer, start - 0.01 * 2) and torch.equal(second.wait(), answer)
        late = rpc_param_server.push_and_wait(2, torch.ones(50_186))
        assert not server.lost and server.heard.keys() == {1, 2, 3} and not late.done()
        for rank in (1, 3):
            rpc_param_server.finish(rank)
        assert late.done(), "no other trainer has work left"
        rpc_param_server.finish(2)
        watch.join(20)
    assert not watch.is_alive()
    assert stdout.getvalue() == "trainer 2 is lost: nothing came from it for 1 s\n", "who waits is not lost"


# ---- loss of a process ----------------------------------------------------------------------------------------------


def lose_one(local_rank, world_size, folder, mode, victim):
    """`victim` kills itself in the middle: at its tenth step, or the server at its tenth update."""
    mnist.load_data = small_data
    calls = []
    hook, name = (rpc_param_server.Server, "receive") if local_rank == 0 else (rpc_param_server, "parameters_to_vector")
    original = getattr(hook, name)

    def counting(*args):
        calls.append(1)
        if local_rank == victim and len(calls) == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(hook, name, counting)
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        rpc_param_server.main_worker(local_rank, world_size, arguments(mode, timeout=5.0))
    torch.save(stdout.getvalue(), f"{folder}/{local_rank}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hogwild", "sync"])
def test_the_others_go_on_without_a_lost_trainer(mode, tmp_path):
    dist.launch(lose_one, str(tmp_path), mode, 2, nprocs=4, tolerate_killed=True)
    stdout = torch.load(tmp_path / "0.pt", weights_only=True)
    updates = 16 if mode == "sync" else 2 * 16 + 9
    assert "trainer 2 is lost: nothing came from it for 5 s\n" in stdout
    assert stdout.endswith(f"Finished: {updates} updates, trainer 2 lost\n")
    assert [match[0] for match in LINE.findall(stdout)] == ["1", "2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.pt", "1.pt", "3.pt"]


def test_the_loss_of_every_trainer_ends_the_job(tmp_path):
    with pytest.raises(SystemExit, match=r"^every trainer is lost, after 9 updates$"):
        dist.launch(lose_one, str(tmp_path), "hogwild", 1, nprocs=2, tolerate_killed=True)


@pytest.mark.parametrize("mode", ["hogwild", "sync"])
def test_a_lost_server_ends_the_job_at_once(mode, tmp_path):
    begin = time.monotonic()
    with pytest.raises(ProcessExitedException, match=r"^rank 0 was killed by SIGKILL$"):
        dist.launch(lose_one, str(tmp_path), mode, 0, nprocs=3, tolerate_killed=True)
    assert time.monotonic() - begin < 20 and not list(tmp_path.iterdir())


def free_port(address):
    with socket.create_server((address, 0)) as listener:
        return listener.getsockname()[1]


def start_by_hand(address, *args, world_size=3):
    """One command per role, each with one thread: they share this machine."""
    options = ("--world-size", world_size, "--master-addr", address, "--master-port", free_port(address), *args)
    mark = uuid.uuid4().hex
    env = {"OMP_NUM_THREADS": "1", "JOB_MARK": mark}
    return mark, [start(SCRIPT, "--rank", rank, *options, env=env) for rank in range(world_size)]


def own_lines(stderr):
    """stderr without the warnings of torch itself."""
    warning = re.compile(r"^(\[rank\d\]:)?\[W.*|.*(User|Deprecation)Warning: .*|^  .*")
    return [line for line in stderr.splitlines() if not warning.fullmatch(line)]


def other_address():
    """An address of this machine that is not loopback."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address
    pytest.skip("this machine has no address but loopback")


def listening(mark):
    connections = [c for member in members(mark) for c in member.net_connections("inet")]
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


def test_one_role_per_command_and_the_loss_of_the_server():
    address = other_address()
    mark, jobs = start_by_hand(address, "--timeout", 5, "--epochs", 50)
    assert jobs[0].stdout.readline() == "Training on 2 x cpu, hogwild, batch 32 each\n"
    assert listening(mark) == {address}, "neither loopback nor all interfaces"
    jobs[0].kill()
    _, _, stderr = finish(jobs[0])
    assert own_lines(stderr) == [
        f"warning: RPC listens on {address}. It has no authentication and executes what it receives: "
        "use it on trusted networks only"
    ]
    for rank in (1, 2):
        status, stdout, stderr = finish(jobs[rank], timeout=20)
        lines = own_lines(stderr)
        assert len(lines) == 1, stderr
        (line,) = lines
        assert (status, stdout) == (1, "") and line.startswith(f"rank {rank}: the server is lost: ")


def workers(launcher):
    """The workers of a launcher, in the order of their ranks."""
    children = psutil.Process(launcher.pid).children(recursive=True)
    (server,) = (child for child in children if "forkserver" in " ".join(child.cmdline()) and child.children())
    return sorted(server.children(), key=lambda child: child.pid)


@pytest.mark.slow
def test_on_one_machine_it_listens_on_loopback_only_and_ends_with_its_server_or_launcher():
    marks = [uuid.uuid4().hex for _ in range(2)]
    jobs = [start(SCRIPT, "--epochs", 50, env={"JOB_MARK": mark}) for mark in marks]
    for job, mark in zip(jobs, marks, strict=True):
        assert job.stdout.readline() == "Training on 2 x cpu, hogwild, batch 32 each\n"
        assert listening(mark) == {"127.0.0.1"}
    workers(jobs[0])[0].kill()
    jobs[1].kill()
    status, _, stderr = finish(jobs[0], timeout=20)
    assert (status, own_lines(stderr)[-1]) == (1, "the server is lost: rank 0 was killed by SIGKILL")
    finish(jobs[1], timeout=20)
    deadline = time.monotonic() + 5
    while any(map(members, marks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(members, marks))


# ---- it learns ------------------------------------------------------------------------------------------------------


def check_output(stdout, trainers, mode, epochs, at_least):
    lines = stdout.splitlines()
    assert lines[0] == f"Training on {trainers} x cpu, {mode}, batch 32 each"
    matches = [LINE.fullmatch(line) for line in lines[1:-1]]
    assert [int(match.group(1)) for match in matches] == list(range(1, epochs + 1))
    assert re.fullmatch(r"Finished: \d+ updates, no trainer lost", lines[-1])
    assert float(matches[-1].group(3)) == round(int(matches[-1].group(4)) / 10_000, 4) >= at_least


@pytest.mark.slow
def test_the_same_file_under_torchrun():
    status, stdout, stderr = torchrun(3, SCRIPT, "--epochs", 1, "--mode", "sync", env={"OMP_NUM_THREADS": "1"})
    assert status == 0, stderr
    check_output(stdout, 2, "sync", 1, at_least=0.9)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("trainers", [1, 2, 4])
@pytest.mark.parametrize("mode", ["hogwild", "sync"])
def test_it_learns_with_the_defaults(mode, trainers):
    status, stdout, stderr = run(SCRIPT, "--mode", mode, "--trainers", trainers, timeout=380)
    assert status == 0, stderr
    check_output(stdout, trainers, mode, 2, at_least=0.95)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(MNIST_ROOT is None, reason="MNIST_ROOT does not say where the real MNIST is")
@pytest.mark.parametrize("mode", ["hogwild", "sync"])
def test_it_learns_the_real_mnist_in_one_epoch(mode):
    options = ("--mode", mode, "--epochs", 1, "--data", "mnist", "--data-dir", MNIST_ROOT)
    status, stdout, stderr = run(SCRIPT, *options, timeout=380)
    assert status == 0, stderr
    check_output(stdout, 2, mode, 1, at_least=0.97)


# ---- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--trainers", "0"), "argument --trainers: '0' is not a whole number of at least 1"),
        (("--mode", "fast"), "argument --mode: invalid choice: 'fast' (choose from hogwild, sync)"),
        (("--lr", "nan"), "argument --lr: 'nan' is not a finite number above 0"),
        (("--timeout", "0"), "argument --timeout: '0' is not a finite number above 0"),
        (("--batch-size", "0"), "argument --batch-size/--batch_size: '0' is not a whole number of at least 1"),
        (
            ("--rank", "3", "--world-size", "3"),
            "argument --rank: 3 is not in the range 0 to 2, for --world-size 3",
        ),
        (
            ("--rank", "0", "--world_size", "1"),
            "argument --world-size/--world_size: '1' is not a whole number of at least 2",
        ),
        (("--rank", "1"), "arguments --rank and --world-size: give both, or neither to start every role here"),
        (
            ("--rank", "0", "--world-size", "2", "--master-port", "70000"),
            "argument --master-port/--master_port: 70000 is not in the range 1 to 65535",
        ),
        (
            ("--rank", "0", "--world-size", "2", "--master-addr", "0.0.0.0"),
            "argument --master-addr/--master_addr: '0.0.0.0' is not the address of one machine",
        ),
    ],
)
def test_bad_options_are_one_line(main_of, args, message):
    status, stderr = main_of("rpc_param_server.py", *args)
    assert (status, stderr.replace("'hogwild', 'sync'", "hogwild, sync")) == (
        2,
        f"rpc_param_server.py: error: {message}\n",
    )


def test_a_world_without_trainers_is_one_line(main_of, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    message = "WORLD_SIZE: 1 process is too few for a server and a trainer"
    assert main_of("rpc_param_server.py") == (2, f"rpc_param_server.py: error: {message}\n")


def by_hand(main_of, monkeypatch, rank, port, address="127.0.0.1"):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "")  # restored at the end of the test
    monkeypatch.delenv("WORLD_SIZE")
    options = ("--master-addr", address, "--master-port", str(port), "--timeout", "0.5")
    return main_of("rpc_param_server.py", "--rank", str(rank), "--world-size", "2", *options)


def test_a_port_in_use_is_one_line(main_of, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code, _ = by_hand(main_of, monkeypatch, 0, port)
    assert code == f"the server cannot listen on 127.0.0.1:{port}: Address already in use"


def test_a_server_that_is_not_there_is_one_line_after_the_timeout(main_of, monkeypatch):
    port = free_port("127.0.0.1")
    begin = time.monotonic()
    code, _ = by_hand(main_of, monkeypatch, 1, port)
    assert code == f"rank 1: no server at 127.0.0.1:{port} within 0.5 s: Connection refused"
    assert time.monotonic() - begin < 10
