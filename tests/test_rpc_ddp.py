"""A table on servers and dense layers under DDP: as one process, with traffic of the batch's size, and no hang."""

import argparse
import statistics
import time
import uuid

import psutil
import pytest
import torch
from conftest import ROOT, finish, float64, slow_clock, start, wait_for
from test_launch import listening, wait_for_the_end_of
from test_rpc_param_server import io_bytes, own_lines, start_on_machines, through_sockets, without_a_late_answer
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook

import distributed as dist
import gpt
import rpc_ddp

SCRIPT = ROOT / "rpc_ddp.py"
ROWS, WIDTH, HIDDEN, LENGTH, BATCH, STEPS, SEED = 509, 64, 24, 16, 6, 6, 3
RATES = {"sgd": 0.7, "adagrad": 0.05}
TEXT = torch.randint(97, 110, (4000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def arguments(trainers, servers, optimizer):
    sizes = {"rows": ROWS, "width": WIDTH, "length": LENGTH, "global_batch_size": BATCH}
    run = {"steps": STEPS, "log_every": 4, "seed": SEED, "timeout": 60, "lr": RATES[optimizer]}
    return argparse.Namespace(trainers=trainers, servers=servers, optimizer=optimizer, **sizes, **run)


def few_words():
    return TEXT[:3000], TEXT[3000:]


def train_and_record(local_rank, world_size, args):
    """For each rank: its part of the table, its dense parameters, and what its calls cost for each byte of rows."""
    gpt.load_text = few_words
    rpc_ddp.time = slow_clock()
    rpc_ddp.HIDDEN = HIDDEN
    through_sockets()
    ratios, models = [], []

    def measured(function, ids_at):
        def call(*args):
            before = io_bytes()
            result = function(*args)
            n_rows = len(args[ids_at].unique())
            ratios.append((io_bytes() - before).sum().item() / (n_rows * (8 + 8 * WIDTH)))
            return result

        return call

    def record(module, inputs):
        if isinstance(module, rpc_ddp.Dense):
            models.append(module)

    rpc_ddp.look_up_everywhere = measured(rpc_ddp.look_up_everywhere, 0)
    rpc_ddp.push_everywhere = measured(rpc_ddp.push_everywhere, 1)
    with float64(), register_module_forward_pre_hook(record):
        rpc_ddp.main_worker(local_rank, world_size, args)
    table = getattr(rpc_ddp.table_server, "table", None)
    dense = [param.detach() for model in models[:1] for param in model.parameters()]
    return dist.gather_objects((table, dense, ratios))


def rows_of(sequence):
    """The rows for the 1 to 4 bytes that end at each place, by whole numbers of Python."""
    rows = []
    for place in range(len(sequence)):
        hashed = 0
        row = []
        for order in range(4):
            earlier = sequence[place - order] if place >= order else 0
            hashed = (hashed + earlier + 1) * 6364136223846793005 % 2**64
            signed = hashed - 2**64 if hashed >= 2**63 else hashed
            row.append((signed >> 24) % ROWS)
        rows.append(row)
    return rows


@float64()
def train_alone(optimizer):
    """The whole batch, an embedding and plain layers in one process."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(4 * WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 256))
    table = nn.Embedding(ROWS, WIDTH)
    nn.init.zeros_(table.weight)
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[optimizer]
    stepper = kind([*model.parameters(), table.weight], lr=RATES[optimizer])

    def loss_of(text, number):
        x, y = gpt.batch(text, number, BATCH, LENGTH, SEED)
        rows = torch.tensor([rows_of(sequence) for sequence in x.tolist()])
        return F.cross_entropy(model(table(rows).flatten(2)).flatten(0, 1), y.flatten())

    text, _ = few_words()
    losses = []
    for step in range(STEPS):
        loss = loss_of(text, step)
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        losses.append(loss.detach())
    parameters = [param.detach() for param in model.parameters()]
    return torch.stack(losses), parameters, table.weight.detach()


@pytest.mark.parametrize(
    ("trainers", "servers", "optimizer"),
    [(1, 2, "sgd"), (1, 1, "adagrad"), (2, 2, "adagrad"), (3, 2, "sgd")],
)
def test_it_equals_one_process_and_sends_the_rows_of_the_batch(trainers, servers, optimizer, capfd):
    losses, parameters, expected_table = train_alone(optimizer)
    assert losses[-1] < losses[0] - 0.1, "the reference must learn, or equality means little"
    args = arguments(trainers, servers, optimizer)
    of_ranks = dist.launch(train_and_record, args, nprocs=servers + trainers)
    stdout, stderr = capfd.readouterr()
    lines = [line.split(" | ") for line in stdout.splitlines()]
    assert without_a_late_answer(stderr) == "" and [line[0] for line in lines] == ["step 4/6", "step 6/6"]
    assert [line[1] for line in lines] == [f"loss {losses[:4].mean():.4f}", f"loss {losses[4:].mean():.4f}"]
    assert [line[2] for line in lines] == [f"{steps * BATCH * LENGTH / 2:.0f} tokens/s" for steps in (4, 2)]

    for server, (table, *_) in enumerate(of_ranks[:servers]):
        assert (table - expected_table[server::servers]).abs().max() <= 1e-9
    for table, dense, ratios in of_ranks[servers:]:
        assert table is None, "trainers hold no rows"
        for actual, expected in zip(dense, parameters, strict=True):
            assert (actual - expected).abs().max() <= 1e-9
        assert len(ratios) == 2 * STEPS, "of look_up and of push: ids, and as many rows"
        # All threads of the process are counted, and gloo may still send the end of DDP's all-reduce.
        assert statistics.median(ratios) == pytest.approx(1, rel=0.05)


def test_the_table_is_updated_once_when_all_have_pushed():
    server = rpc_ddp.table_server = rpc_ddp.TableServer(10, arguments(2, 1, "sgd"))
    try:
        first = rpc_ddp.push(1, torch.tensor([2, 3]), torch.full((2, WIDTH), 2.0))
        assert not first.done() and not server.table.any()
        second = rpc_ddp.push(0, torch.tensor([3, 7]), torch.full((2, WIDTH), 4.0))
        assert first.done() and second.done()
    finally:
        rpc_ddp.table_server = None
    expected = torch.zeros(10, WIDTH)
    for row, mean in {2: 1.0, 3: 3.0, 7: 2.0}.items():
        expected[row] = -RATES["sgd"] * mean
    assert torch.allclose(server.table, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "name"), [(3, "trainer1"), (1, "server1")])
def test_on_several_machines_a_killed_process_ends_all_others_and_is_named(victim, name, tmp_path):
    options = ("--servers", 2, "--steps", 100_000, "--rows", 1000, "--log-every", 1, "--timeout", 30)
    _store, jobs, logs = start_on_machines(4, tmp_path, SCRIPT, *options, LOCAL_WORLD_SIZE="4")
    wait_for(lambda: logs[2].exists() and "step 1/" in logs[2].read_text(), jobs[2])
    begin = time.monotonic()
    jobs[victim].kill()
    for rank in set(range(4)) - {victim}:
        jobs[rank].join(60)
        output = logs[rank].read_text()
        assert jobs[rank].exitcode == 1 and "Traceback" not in output, output
        # The line may stand in the middle of a warning that a thread of torch's logs at the same moment.
        assert output.count(" is lost") == 1, output
        if rank == 0:  # the others may notice first that rank 0 has left
            assert f"{name} is lost" in output
    assert time.monotonic() - begin < 30


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("victim", "name"), [(0, "server0"), (2, "trainer1")])
def test_the_command_listens_on_loopback_only_and_names_a_killed_process(victim, name):
    mark = uuid.uuid4().hex
    job = start(SCRIPT, "--steps", 100_000, "--log-every", 1, env={"JOB_MARK": mark})
    job.stdout.readline()
    assert listening(mark) == {"127.0.0.1"}
    (server,) = psutil.Process(job.pid).children()
    workers = sorted(server.children(), key=lambda child: child.pid)
    workers[victim].kill()
    status, _, stderr = finish(job, timeout=30)
    assert (status, own_lines(stderr)[-1]) == (1, f"{name} is lost: rank {victim} was killed by SIGKILL")
    wait_for_the_end_of(mark, 5)
