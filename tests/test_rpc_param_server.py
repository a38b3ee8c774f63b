"""The parameter server: exact when synchronous, nothing lost when not, and it survives the loss of trainers."""

import argparse
import contextlib
import functools
import os
import queue
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from conftest import (
    MNIST_ROOT,
    ROOT,
    killed_in,
    needs_mnist,
    run,
    start_forked,
    torchrun,
    wait_for,
    wait_until,
    without_name_server,
)
from images import digits, few_digits, make_sgd, result_of, train_alone
from test_launch import addresses_of
from torch.distributed import rpc
from torch.multiprocessing import ProcessExitedException
from torch.nn.utils import parameters_to_vector

import distributed as dist
import mnist
import rpc_param_server
import rpc_remote
import spawn

SCRIPT = ROOT / "rpc_param_server.py"
LINE = re.compile(
    r"epoch (\d+)/\d+ \| held-out (\d+\.\d{4}) \| accuracy (\d\.\d{4}) \((\d+)/(\d+)\) \| "
    r"[\d.]+ updates/s \| staleness (\d+\.\d{2})"
)
BATCH, EPOCHS, SEED, LR, SIZES = 8, 2, 3, 0.02, (192, 101)  # 2 trainers: 2 epochs of 192 / 16 = 12 steps


class PartlyFrozen(mnist.SimpleCNN):
    def __init__(self):
        super().__init__()
        self.conv1.bias.requires_grad_(False)


def run_role(local_rank, world_size, mode, timeout=60.0):
    """The script's own main_worker on few digits."""
    options = {"epochs": EPOCHS, "batch_size": BATCH, "lr": LR, "seed": SEED, "timeout": timeout, "model": "simple"}
    args = argparse.Namespace(mode=mode, data="synthetic", data_dir="data", **options)
    with few_digits(*SIZES, dtype=torch.get_default_dtype()):
        rpc_param_server.main_worker(local_rank, world_size, args)


def io_bytes():
    """Bytes that this process has read and written, sockets included."""
    numbers = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return torch.tensor([int(numbers["rchar"]), int(numbers["wchar"])])


def through_sockets():
    """As between machines: the kernel's copies from process to process are counted nowhere."""
    sockets = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
    init_rpc = rpc.init_rpc
    rpc.init_rpc = lambda *args, **kwargs: init_rpc(*args, **{**kwargs, "rpc_backend_options": sockets})


def train_and_record(local_rank, world_size, mode):
    """Returns for each rank its remote calls, with the bytes that they cost, and the parameters."""
    torch.set_default_dtype(torch.float64)
    call, calls = rpc_remote.call, []

    def recording_call(name, function, *args, **kwargs):
        before = io_bytes()
        answer = call(name, function, *args, **kwargs)
        calls.append((function.__name__, (io_bytes() - before).tolist()))
        return answer

    through_sockets()
    mnist.MODELS["simple"] = PartlyFrozen
    rpc_remote.call = recording_call
    run_role(local_rank, world_size, mode)
    return dist.gather_objects(calls), getattr(rpc_param_server.server, "params", None)


@pytest.mark.parametrize("mode", ["sync", "hogwild"])
def test_one_round_trip_a_step_and_sync_equals_one_process(mode, capfd):
    (_, *calls_of_trainers), params = dist.launch(train_and_record, mode, nprocs=3)
    stdout, stderr = capfd.readouterr()
    assert without_a_late_answer(stderr) == "", "a healthy job ends without a word of torch's"
    *lines, last = stdout.splitlines()[1:]
    updates = 24 if mode == "sync" else 48
    assert last == f"Finished: {updates} updates, no trainer lost"
    epochs = [LINE.fullmatch(line).groups() for line in lines]
    assert [(epoch[0], epoch[4]) for epoch in epochs] == [("1", "101"), ("2", "101")]
    if mode == "sync":
        state, _, tests = train_alone(make_sgd, [LR] * EPOCHS, SIZES, 2 * BATCH, seed=SEED, model=PartlyFrozen)
        assert (params - parameters_to_vector(state.values())).abs().max() <= 1e-9
        assert [(epoch[1], int(epoch[3])) for epoch in epochs] == [(f"{loss:.4f}", hits) for loss, hits, _ in tests]
        assert [epoch[5] for epoch in epochs] == ["0.00", "0.00"], "a synchronous gradient is never stale"

    payload = 8 * len(params)
    send = {"sync": "push_and_wait", "hogwild": "push"}[mode]
    for calls in calls_of_trainers:
        names = [name for name, _ in calls]
        assert names == ["pull", *([send] * 12 + ["finish_epoch"]) * EPOCHS, "_say_goodbye"], "one round trip a step"
        for received, sent in [cost for name, cost in calls if name == send]:
            assert payload <= received <= 1.01 * payload, "the parameters once"
            assert payload <= sent <= 1.01 * payload, "the gradient once"


def test_the_evaluation_is_without_dropout():
    net, dataset = mnist.ShallowNet(), digits(50)
    loss, hits = rpc_param_server.evaluate(net, dataset, torch.device("cpu"))
    expected = result_of(net, dataset)
    assert loss == pytest.approx(expected[0]) and hits == expected[1]


# ---- options of the four rpc_ scripts, on a machine with two GPUs ---------------------------------------------------


@pytest.mark.parametrize(
    ("script", "launched_processes", "options", "message"),
    [
        ("rpc_param_server.py", 1, (), "WORLD_SIZE: 1 process is too few for a server and a trainer"),
        ("rpc_actor_learner.py", 1, (), "WORLD_SIZE: 1 process is too few for a learner and an observer"),
        ("rpc_model_parallel.py", 3, (), "WORLD_SIZE: 3 is not 2, the number of workers"),
        ("rpc_ddp.py", 2, ("--servers", 2), "argument --servers: 2 "),
        ("rpc_ddp.py", None, ("--trainers", 3), "argument --trainers: 3 "),
        ("rpc_ddp.py", None, ("--global-batch-size", 5), "argument --global-batch-size: 5 "),
    ],
)
def test_a_mistake_is_one_line(script, launched_processes, options, message, main_of, gpus, monkeypatch):
    gpus(2)
    if launched_processes:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(launched_processes))
    status, line = main_of(script, *options)
    assert status == 2 and line.startswith(f"{script}: error: {message}") and line.count("\n") == 1


@pytest.mark.parametrize(
    ("script", "launched_processes", "options", "expected"),
    [
        ("rpc_param_server.py", 4, (), {"trainers": 3}),
        ("rpc_actor_learner.py", 3, (), {"observers": 2}),
        ("rpc_ddp.py", 5, ("--servers", 2), {"trainers": 3, "global_batch_size": 18}),
    ],
)
def test_a_launcher_says_how_many_there_are(script, launched_processes, options, expected, launched, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(launched_processes))
    assert vars(launched(script, *options).args[1]).items() >= expected.items()


# ---- the server's state ---------------------------------------------------------------------------------------------


def new_server(ranks):
    """Make a server in this process."""
    torch.manual_seed(0)
    rpc_param_server.server = rpc_param_server.Server(mnist.SimpleCNN(), ranks, lr=0.01)
    return rpc_param_server.server


def test_updates_from_many_threads_are_neither_lost_nor_torn():
    gradient = torch.ones(50_186)
    alone = new_server([1])
    for _ in range(200):
        rpc_param_server.push(gradient, 0)
    together = new_server(range(1, 9))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: rpc_param_server.push(gradient, 0), range(200)))
    assert together.updates == 200 and torch.equal(together.params, alone.params)


def test_staleness_counts_the_updates_between_pull_and_push():
    server, gradient = new_server([1, 2]), torch.zeros(50_186)
    updates_then = {rank: rpc_param_server.pull()[0] for rank in (1, 2)}
    for rank in (1, 1, 2, 2):  # the third was computed before the first two
        updates_then[rank], _ = rpc_param_server.push(gradient, updates_then[rank])
    assert (server.updates, server.staleness) == (4, 0 + 0 + 2 + 0)


def test_an_epoch_is_evaluated_when_every_trainer_at_work_has_finished_it():
    server = new_server([1, 2])
    rpc_param_server.finish_epoch(1)
    rpc_param_server.finish_epoch(1)
    rpc_param_server.finish_epoch(1)
    assert server.copies.empty(), "trainer 2 has not finished one"
    rpc_param_server.finish_epoch(2)
    before = server.params.clone()
    rpc_param_server.push(torch.ones(50_186), 0)
    params, _, updates, _ = server.copies.get_nowait()
    assert torch.equal(params, before) and not torch.equal(params, server.params) and updates == 0, "a copy"
    assert server.copies.empty()
    server.lose(2)
    for _ in range(2):
        assert torch.equal(server.copies.get_nowait()[0], server.params), "nobody waits for who is lost"
    server.lose(1)
    assert server.copies.get_nowait() is None, "every trainer is lost"


def test_sync_waits_for_the_trainers_at_work_only(capsys):
    server = new_server([1, 2, 3])
    start = server.params.clone()
    first = rpc_param_server.push_and_wait(torch.full((50_186,), 1.0), 1)
    second = rpc_param_server.push_and_wait(torch.full((50_186,), 3.0), 3)
    assert not first.done() and not second.done()
    server.lose(2)
    assert first.done() and second.done(), "nobody waits for who is lost"
    updates, params = first.wait()
    assert updates == 1 and torch.allclose(params, start - 0.01 * 2) and torch.equal(second.wait()[1], params)
    late = rpc_param_server.push_and_wait(torch.ones(50_186), 1)
    assert not late.done()
    server.lose(3)
    assert late.done() and server.updates == 2
    assert capsys.readouterr().out == "trainer 2 is lost\ntrainer 3 is lost\n"
    server.lose(1)
    assert server.copies.get_nowait() is None, "every trainer is lost, and no epoch has ended"


# ---- loss of a process ----------------------------------------------------------------------------------------------


def test_a_loss_wakes_the_process_that_waits_for_the_end():
    """It reports who was lost: `on_loss` must have noted it before."""
    answers = {name: torch.futures.Future() for name in ("trainer1", "trainer2", "trainer3")}
    fake = mock.Mock(rpc_async=lambda name, *args, **kwargs: answers[name])
    state = {"_watched": {}, "_gone": queue.SimpleQueue(), "_end": torch.futures.Future()}
    noted = []
    with mock.patch.multiple(rpc_remote, rpc=fake, **state), ThreadPoolExecutor() as pool:
        for name in answers:
            rpc_remote.watch(name, lambda: noted.append(rpc_remote._gone.empty()))
        rpc_remote._say_goodbye("trainer3")
        end = pool.submit(rpc_remote.end)  # trainer1 and trainer2 train on
        wait_until(rpc_remote._gone.empty)
        answers["trainer1"].set_exception(RuntimeError("the connection is closed"))
        with pytest.raises(dist.DistributedError, match=r"^trainer1 is lost$"):
            end.result(60)
    assert noted == [True]
    # RPC's threads might crash this process while Python ends, in about half of all jobs.
    fake.shutdown.assert_called_once_with(graceful=False)


def without_a_late_answer(stderr):
    """stderr without the line that torch's agent logs if the other side shuts down before it knows of its answer's end.

    It is a race inside of rpc.shutdown, rare on a busy machine and harmless: the other side has read the answer.
    """
    late_answer = r"\[rank\d\]:\[W.*RPC agent for .* when sending response to request .*: pipe closed .*\n"
    return re.sub(late_answer, "", without_name_server(stderr))


def own_lines(stderr):
    """stderr without the warnings of torch itself."""
    warning = re.compile(r"^(\[rank\d\]:)?\[W.*|.*(User|Deprecation)Warning: .*|^  .*")
    return [line for line in stderr.splitlines() if not warning.fullmatch(line)]


def lose_one(local_rank, world_size, mode, victim, moment, timeout=60.0):
    """`victim` is killed or stopped as killed_in does."""
    with killed_in(*moment) if local_rank == victim else contextlib.nullcontext():
        run_role(local_rank, world_size, mode, timeout)
    print(f"rank {local_rank} ends well")


STEP = ("rpc_param_server.parameters_to_vector", 10)  # the tenth of a trainer
UPDATE = ("rpc_param_server.Server.update", 10)
GOODBYE = ("rpc_remote.call", 1 + 24 + 2 + 1)  # the last call of each of two trainers


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "moment", "trainers", "updates"),
    [
        ("sync", STEP, 3, 16),
        ("hogwild", STEP, 3, 2 * 16 + 9),
        ("hogwild", GOODBYE, 2, 48),
        ("sync", ("mnist.Digits",), 3, 16),
    ],
)
def test_the_others_go_on_without_a_lost_trainer(mode, moment, trainers, updates, capfd):
    dist.launch(lose_one, mode, 2, moment, nprocs=trainers + 1, tolerate_killed=True)
    stdout, stderr = capfd.readouterr()
    assert own_lines(stderr) == []
    assert stdout.count("trainer 2 is lost\n") == 1
    assert f"\nFinished: {updates} updates, trainer 2 lost\n" in stdout
    assert [match[0] for match in LINE.findall(stdout)] == ["1", "2"]
    assert sorted(re.findall(r"rank (\d) ends well", stdout)) == [str(r) for r in range(trainers + 1) if r != 2]


JOIN = r"^rank \d: not all 3 processes have joined within 1 s: .+$"
HANG = r"^rank 1: server does not answer: it hangs, or waits for a process that hangs: .* timeout \(6000 ms\)"


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "victim", "moment", "timeout", "nprocs", "message"),
    [
        ("hogwild", 1, STEP, 60.0, 2, r"^every trainer is lost, after 9 updates$"),
        ("hogwild", 0, UPDATE, 60.0, 3, r"^rank 0 was killed by SIGKILL$"),
        ("sync", 0, UPDATE, 60.0, 3, r"^rank 0 was killed by SIGKILL$"),
        ("sync", 2, ("torch.distributed.init_process_group",), 1.0, 3, JOIN),
        ("sync", 2, ("torch.distributed.rpc.init_rpc",), 1.0, 3, JOIN),
        ("sync", 2, ("torch.distributed.rpc.backend_registry._init_process_group",), 1.0, 3, JOIN),
        ("sync", 2, ("torch.distributed.rpc.api._all_gather",), 1.0, 3, JOIN),
        ("sync", 2, ("torch.distributed.rpc.init_rpc", 1, False, signal.SIGSTOP), 1.0, 3, JOIN),
        ("sync", 2, (*STEP, False, signal.SIGSTOP), 6.0, 3, HANG),
    ],
)
def test_a_job_that_cannot_go_on_ends_with_one_line(mode, victim, moment, timeout, nprocs, message, capfd):
    begin = time.monotonic()
    with pytest.raises((SystemExit, ProcessExitedException), match=message):
        dist.launch(lose_one, mode, victim, moment, timeout, nprocs=nprocs, tolerate_killed=True)
    assert time.monotonic() - begin < 90 and "ends well" not in capfd.readouterr().out


# ---- where it listens, and what is left -----------------------------------------------------------------------------


def other_interface():
    """An interface of this machine that is not loopback, and its address."""
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return name, address.address
    pytest.skip("this machine has no address but loopback")


def start_on_machines(n, folder, script, *options, **more):
    """A process for each of `n` ranks, as torchrun's agents on machines of their own start them.

    Returns the store, which must live as long as they do, the processes, and their logs.
    """
    store = spawn.start_store()
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env |= {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1", **more}
    logs = [folder / f"rank {rank}" for rank in range(n)]
    jobs = [start_forked(log, script, *options, env={**env, "RANK": str(rank)}) for rank, log in enumerate(logs)]
    return store, jobs, logs


def test_it_listens_on_the_named_interface_only_and_trainers_end_with_their_server(tmp_path):
    name, address = other_interface()
    interfaces = {"TP_SOCKET_IFNAME": name, "GLOO_SOCKET_IFNAME": name}
    _store, jobs, logs = start_on_machines(3, tmp_path, SCRIPT, "--epochs", 1000, **interfaces)
    training = "Training on 2 x cpu, hogwild, batch 32 each\n"
    wait_for(lambda: logs[0].exists() and training in logs[0].read_text(), jobs[0])
    assert addresses_of(psutil.Process(job.pid) for job in jobs) == {address}, "neither loopback nor all interfaces"
    jobs[0].kill()
    for job in jobs:
        job.join(20)
    assert [job.exitcode for job in jobs] == [-signal.SIGKILL, 1, 1]
    warning = f"warning: RPC listens on {name}, without authentication: trust its network"
    first, second, *epochs = own_lines(logs[0].read_text())
    assert (first, second) == (warning, training.strip()) and all(map(LINE.fullmatch, epochs))
    for rank in (1, 2):
        (line,) = own_lines(logs[rank].read_text())
        assert line.startswith(f"rank {rank}: server is lost: ")


@pytest.mark.parametrize(
    ("here", "named", "warned"), [(3, None, False), (3, "eth1", True), (1, None, True), (1, "eth1", True)]
)
def test_on_one_machine_it_listens_on_loopback_unless_told_otherwise(here, named, warned, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    for name in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, named or "")
        if not named:
            monkeypatch.delenv(name)
    rpc_remote._choose_interface()
    expected = named or ("lo" if here == 3 else None)
    assert os.environ.get("TP_SOCKET_IFNAME") == os.environ.get("GLOO_SOCKET_IFNAME") == expected
    where = named or f"the address of {socket.gethostname()}"
    line = f"warning: RPC listens on {where}, without authentication: trust its network\n"
    assert capsys.readouterr().err == (line if warned else "")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("command", "options", "at_least"),
    [
        (run, ("--trainers", 1), 0.95),
        (run, ("--trainers", 4, "--epochs", 3), 0.95),  # after two, it has 0.90 to 0.97: gradients are stale
        (functools.partial(torchrun, 3), ("--mode", "sync", "--epochs", 1), 0.9),
        pytest.param(run, ("--epochs", 1, "--data", "mnist", "--data-dir", MNIST_ROOT), 0.97, marks=needs_mnist),
    ],
)
def test_it_learns(command, options, at_least):
    status, stdout, stderr = command(SCRIPT, *options, timeout=380)
    assert status == 0 and "warning: RPC" not in stderr, stderr
    *_, epoch, last = stdout.splitlines()
    assert re.fullmatch(r"Finished: \d+ updates, no trainer lost", last)
    assert float(LINE.fullmatch(epoch)[3]) == round(int(LINE.fullmatch(epoch)[4]) / 10_000, 4) >= at_least
