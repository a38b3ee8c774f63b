"""Ranks that drift apart: each of these trainings ends without an error, and `check_in_sync` raises on every rank."""

import contextlib
import copy
import io
import os
import re
import socket
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from conftest import exit_message, finish, ip, start
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import init_device_mesh

import checkpoint
import distributed as dist

N_STEPS = 5


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 1))


def own_batches(n_steps=N_STEPS):
    """Other data on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(n_steps):
        x = torch.randn(4, 8, generator=generator)
        yield x, x.sum(dim=1, keepdim=True)


def train(trained, model, optimizer=None):
    """Call `trained`, a wrapped or a plain model, and step `model`'s parameters."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in own_batches():
        loss = nn.functional.mse_loss(trained(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


# ---- eight mistakes -------------------------------------------------------------------------------------------------


def a_layer_is_unfrozen_after_wrapping():
    model = make_model()
    model[0].requires_grad_(False)
    ddp_model = dist.prepare_ddp_model(model)
    model[0].requires_grad_(True)
    return train(ddp_model, model)


def the_model_is_converted_after_wrapping():
    model = make_model()
    ddp_model = dist.prepare_ddp_model(model)
    model.double()
    return train(lambda x: ddp_model(x.double()).float(), model)


def weights_are_initialised_after_wrapping():
    model = make_model()
    ddp_model = dist.prepare_ddp_model(model)
    torch.manual_seed(dist.get_rank())
    nn.init.normal_(model[3].weight)
    return train(ddp_model, model)


def left_over_micro_batches_are_stepped_inside_no_sync():
    model = make_model()
    ddp_model = dist.prepare_ddp_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = list(own_batches(3))
    for number, (x, y) in enumerate(batches):
        is_second = number % 2 == 1
        sync = contextlib.nullcontext() if is_second else ddp_model.no_sync()
        with sync:
            nn.functional.mse_loss(ddp_model(x), y).backward()
        if is_second or number == len(batches) - 1:
            optimizer.step()
            optimizer.zero_grad()
    return model


def a_penalty_has_a_backward_through_the_plain_model():
    model = make_model()
    ddp_model = dist.prepare_ddp_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in own_batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp_model(x), y).backward()
        x.requires_grad_(True)
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        (0.01 * gradient.square().mean()).backward()
        optimizer.step()
    return model


def the_plain_model_is_trained():
    model = make_model()
    dist.prepare_ddp_model(model)
    return train(model, model)


def an_average_is_copied_before_wrapping():
    model = make_model(seed=dist.get_rank())
    average = copy.deepcopy(model)
    train(dist.prepare_ddp_model(model), model)
    dist.check_in_sync(model)
    return average


def weights_are_loaded_on_one_rank():
    model = make_model()
    ddp_model = dist.prepare_ddp_model(model)
    if dist.is_primary():
        model.load_state_dict(make_model(seed=1).state_dict())
    return train(ddp_model, model)


MISTAKES = [
    a_layer_is_unfrozen_after_wrapping,
    the_model_is_converted_after_wrapping,
    weights_are_initialised_after_wrapping,
    left_over_micro_batches_are_stepped_inside_no_sync,
    a_penalty_has_a_backward_through_the_plain_model,
    the_plain_model_is_trained,
    an_average_is_copied_before_wrapping,
    weights_are_loaded_on_one_rank,
]


def check_mistakes(local_rank, world_size, folder):
    dist.init_process_group()
    for mistake in MISTAKES:
        model = mistake()  # ends without an error
        message = exit_message(dist.check_in_sync, model)
        first = next(name for name, param in model.named_parameters() if not torch.equal(*dist.gather(param)))
        theirs, ours = dist.gather(model.get_parameter(first))
        difference = (theirs - ours).abs().max().item()
        assert difference > 1e-3, mistake.__name__
        expected = f"{first} of rank 1 differs from rank 0's by up to {difference:.3g}"
        expected = f"the ranks hold different weights of Sequential: {expected}"
        assert message.startswith(expected), (mistake.__name__, message)
        # A snapshot of one of them is not written.
        path = f"{folder}/{mistake.__name__}"
        of_a_save = message.replace("of Sequential", "of model (Sequential)")
        assert exit_message(checkpoint.save, path, model, torch.optim.SGD(model.parameters())) == of_a_save
        assert exit_message(checkpoint.save_sharded, path, model, torch.optim.SGD(model.parameters()), 1) == message


def test_each_mistake_is_silent_and_the_check_names_it(tmp_path):
    dist.launch(check_mistakes, tmp_path, nprocs=2)
    assert not list(tmp_path.iterdir())


# ---- no false alarms, and every kind of tensor ----------------------------------------------------------------------


class Mixed(nn.Module):
    """Parameters of all sizes and types, and one that begins at a multiple of 4 bytes."""

    def __init__(self):
        super().__init__()
        flat = torch.arange(9.0)
        self.misaligned = nn.Parameter(flat[1:])
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        self.odd = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.float64 = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.complex64 = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.flags = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.register_buffer("count", torch.tensor(3))


def check_what_is_compared(local_rank, world_size):
    dist.init_process_group()
    model = train(dist.prepare_ddp_model(make_model()), make_model())
    ddp_model = dist.prepare_ddp_model(make_model())
    model = train(ddp_model, ddp_model.module)
    for same in (model, ddp_model, torch.compile(ddp_model, backend="eager"), nn.ReLU()):
        dist.check_in_sync(same)
    # Rank 1 has left out a call. Its next one is for another model.
    line = (
        r"^ranks call check_in_sync for different models: rank 0 for Sequential, rank 1 for ModuleList: all ranks must"
    )
    with pytest.raises(dist.DistributedError, match=line):
        dist.check_in_sync(nn.ModuleList(make_model(seed=1)) if local_rank == 1 else model)
    # Stages of a pipeline are different models, and have no parameter in common.
    dist.check_in_sync([model, nn.Linear(2, 2), nn.ModuleDict({"head": nn.Linear(1, 1)})][local_rank])
    # BatchNorm's statistics are each rank's own.
    with pytest.raises(dist.DistributedError, match=r"2\.running_mean of ranks 1 and 2 differs from rank 0's by up to"):
        dist.check_in_sync(ddp_model, buffers=True)

    mixed = Mixed()
    dist.check_in_sync(mixed, buffers=True)
    for name, tensor in [*mixed.named_parameters(), *mixed.named_buffers()]:
        if tensor.numel() == 0:
            continue
        with torch.no_grad():
            before = tensor.clone()
            if local_rank == 2:
                tensor[...] = 0
        with pytest.raises(dist.DistributedError, match=f"{name} of rank 2 differs from rank 0's"):
            dist.check_in_sync(mixed, buffers=True)
        with torch.no_grad():
            tensor.copy_(before)
    # Two values that change places are noticed too, though their sum is the same.
    if local_rank == 1:
        mixed.misaligned.data = mixed.misaligned.detach().flip(0)
    with pytest.raises(dist.DistributedError, match=r"misaligned of rank 1 differs .* by up to 7, and 1 of 8 tensors"):
        dist.check_in_sync(mixed)
    # Rows of 128 bytes that change places.
    linear = nn.Linear(32, 64)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(64.0 * 32).view(64, 32))
        linear.bias.zero_()
        if local_rank == 1:
            linear.weight[:2] = linear.weight[:2].flip(0)
    with pytest.raises(dist.DistributedError, match=r"weight of rank 1 differs from rank 0's by up to 32, and 1 of 2"):
        dist.check_in_sync(linear)
    # A sign is the highest bit of a word, also in the second row of 64 words.
    signs = nn.Linear(64, 2, bias=False).double()
    nn.init.ones_(signs.weight)
    if local_rank == 1:
        signs.weight.data[1, 5] = -1
    with pytest.raises(dist.DistributedError, match=r"weight of rank 1 differs from rank 0's by up to 2, and 1 of 1"):
        dist.check_in_sync(signs)
    # An order that each rank has drawn with a seed of its own.
    for n in (50, 1000):
        holder = nn.Module()
        holder.register_buffer("order", torch.randperm(n, generator=torch.Generator().manual_seed(local_rank)))
        with pytest.raises(dist.DistributedError, match="order of ranks 1 and 2 differs"):
            dist.check_in_sync(holder, buffers=True)


def check_shards(local_rank, world_size):
    """On a mesh of 2 replicas of 2 shards, ranks 0 and 2 hold the same shard, and so do 1 and 3."""
    dist.init_process_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make_model()
    fully_shard(model, mesh=mesh)
    dist.check_in_sync(model)
    if local_rank == 3:
        with torch.no_grad():
            model[0].weight.to_local()[0, 0] += 0.5
    with pytest.raises(
        dist.DistributedError, match=r"0\.weight of rank 3 differs from rank 1's by up to 0\.5, and 1 of"
    ):
        dist.check_in_sync(model)
    # After an evaluation the root has gathered its parameters in bfloat16, which hides a small difference.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    if local_rank == 3:
        with torch.no_grad():
            model[0].weight.to_local()[0, 0] *= 1.0005
    with torch.no_grad():
        model(torch.ones(4, 8))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(dist.DistributedError, match=r"0\.weight of rank 3 differs from rank 1's"):
        checkpoint.save_sharded("not written", model, optimizer, 1)


def test_equal_weights_are_no_alarm_and_any_tensor_is_compared():
    dist.launch(check_what_is_compared, nprocs=3)
    dist.check_in_sync(make_model())  # in one process it does nothing


def test_of_shards_those_that_should_be_equal_are_compared():
    dist.launch(check_shards, nprocs=4)


def test_ranks_are_named_shortly():
    assert [dist._names_of(list(range(1, n))) for n in (2, 3, 5, 9)] == [
        "rank 1",
        "ranks 1 and 2",
        "ranks 1, 2, 3 and 4",
        "ranks 1, 2, 3 and 5 more",
    ]


# ---- a rank that waits ----------------------------------------------------------------------------------------------


def call_unequally(local_rank, world_size, case, folder):
    """Rank 0 calls what rank 1 does not: nobody would ever say so. Or it comes late, which ends well."""
    dist.init_process_group()
    model = make_model()
    ddp_model = dist.prepare_ddp_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if case == "save" and dist.is_primary():
        checkpoint.save(f"{folder}/snapshot.pt", model, optimizer)
    if case == "forward" and dist.is_primary():
        for x, _ in own_batches():
            ddp_model(x)
    if case == "loss":
        for x, _ in own_batches(3 - dist.get_rank()):  # the shares of an evaluation differ
            dist.reduce(model(x).mean())
    if case == "download":
        while dist.is_primary() and not Path(folder, "downloaded").exists():
            time.sleep(0.05)  # the work of rank 0
        dist.barrier()
        return
    for _ in range(3):
        dist.reduce(torch.zeros(()))
        train(ddp_model, model, optimizer)


LINES = {
    "save": "rank 0 has waited {} s in checkpoint.save for rank 1: every rank must call it\n",
    "forward": "rank 1 has waited {} s in dist.reduce for rank 0: every rank must call it\n",
    "loss": "rank 0 has waited {} s in dist.reduce for rank 1: every rank must call it\n",
    "download": "rank 1 has waited {} s in dist.barrier for rank 0: every rank must call it\n",
}


@pytest.mark.slow
def test_a_rank_that_waits_says_for_whom_within_40_s(tmp_path):
    jobs = {case: start(__file__, case, tmp_path) for case in LINES}
    try:
        for case, expected in LINES.items():
            lines = [jobs[case].stderr.readline()]
            if case == "save":  # where rank 1 waits in another call
                lines.append(jobs[case].stderr.readline())
            for line in lines:
                waited = int(re.search(r"\d+(?= s in)", line)[0])
                assert 30 <= waited <= 40
            assert expected in [re.sub(r"\d+(?= s in)", "{}", line) for line in lines]
        (tmp_path / "downloaded").touch()
        assert finish(jobs["download"], timeout=60) == (0, "", "")
        assert [case for case in jobs if jobs[case].poll() is None] == ["save", "forward", "loss"], "they wait"
    finally:
        for job in jobs.values():
            job.kill()  # its workers end with it
            job.communicate(timeout=30)


def call_late(local_rank, world_size, folder):
    """Rank 1 calls each function only after rank 0 has said that it waits."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters())
    path = f"{folder}/snapshot.pt"
    calls = {
        "checkpoint.save": lambda: checkpoint.save(path, model, optimizer),
        "checkpoint.load": lambda: checkpoint.load(path, model, optimizer),
        "dist.reduce": lambda: dist.reduce(torch.ones(1)),
        "dist.gather_objects": lambda: dist.gather_objects(1),
        "dist.check_in_sync": lambda: dist.check_in_sync(model),
        "dist.barrier": dist.barrier,
    }
    stderr = io.StringIO()
    with mock.patch.object(dist, "WAIT_SECONDS", 1), contextlib.redirect_stderr(stderr):
        dist.init_process_group()
        store = torch.distributed.distributed_c10d._get_default_store()
        for number, function in enumerate(calls.values()):
            if local_rank == 1:
                while store.add("lines", 0) == number:
                    time.sleep(0.02)
            with mock.patch.object(sys.stderr, "flush", lambda: store.add("lines", 1)):
                function()
    lines = stderr.getvalue().splitlines()
    expected = [f"rank 0 has waited 1 s in {name} for rank 1: every rank must call it" for name in calls]
    assert lines == (expected if local_rank == 0 else [])
    if local_rank == 0:
        check_connections()
    dist.barrier()  # rank 1 must not leave before


def check_connections():
    """The kernel probes all connections of this process, and closes one that is silent for 5 minutes."""
    fds = [each.fd for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_ESTABLISHED]
    assert len(fds) >= 3, "to the store, and to rank 1 in two groups"
    for fd in fds:
        with socket.socket(fileno=os.dup(fd)) as connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 300_000


def test_every_call_of_ours_says_that_it_waits(tmp_path):
    dist.launch(call_late, tmp_path, nprocs=2)


def test_one_rank_says_who_is_missing_or_that_nobody_is(capsys):
    for rank in (0, 2):
        dist._say_who_is_missing("2,0,", rank, 8, "dist.gather", 30.4)
        dist._say_who_is_missing("2,0,", rank, 3, "dist.gather", 30.4)
        dist._say_who_is_missing("2,1,0,", rank, 3, "dist.gather", 30.4)
        dist._say_who_is_missing("2,1,0,", rank, 3, "checkpoint.save", 30.4)
    assert capsys.readouterr().err.splitlines() == [
        "rank 2 has waited 30 s in dist.gather for ranks 1, 3, 4 and 3 more: every rank must call it",
        "rank 2 has waited 30 s in dist.gather for rank 1: every rank must call it",
        "rank 2 has waited 30 s in dist.gather with all other ranks: the network is slow, or before it the ranks have "
        "called different collectives",
        "rank 2 has waited 30 s in checkpoint.save with all other ranks: the disk is slow, or before it the ranks have "
        "called different collectives",
    ]


# ---- a machine that is lost -----------------------------------------------------------------------------------------

FAST = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 6000}  # instead of minutes


def wait_for_a_lost_machine():
    """Ranks 0 and 2 save; the machine of rank 1 loses its network before it does."""
    dist.init_process_group()
    model = make_model()
    dist.patient_group()
    with mock.patch.object(dist, "WAIT_SECONDS", 10), mock.patch.object(dist, "KEEPALIVE", FAST):
        if dist.get_rank() == 1:
            print("ready", flush=True)
            time.sleep(600)
        checkpoint.save("snapshot.pt", model, torch.optim.SGD(model.parameters()))


@pytest.mark.slow
def test_a_machine_that_loses_its_network_is_noticed(machines, tmp_path):
    environment = {"MASTER_ADDR": "10.9.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}
    jobs = []
    try:
        for rank, (machine, cable) in enumerate([machines[0], machines[1], machines[0]]):
            environment |= {"RANK": str(rank), "GLOO_SOCKET_IFNAME": cable}
            prefix = ("ip", "netns", "exec", machine)
            jobs.append(start(__file__, "lost", cwd=tmp_path, env=dict(environment), prefix=prefix))
        assert jobs[1].stdout.readline() == "ready\n"
        ip("-n", machines[1][0], "link", "set", machines[1][1], "down")
        ends = [finish(job, timeout=60) for job in (jobs[0], jobs[2])]
        assert [status for status, _, _ in ends] == [1, 1]
        noticed = "Connection timed out|No route to host"
        assert any(re.search(noticed, stderr) for _, _, stderr in ends), "the other may notice that one has left"
        assert jobs[1].poll() is None
    finally:
        for job in jobs:
            job.kill()
            job.communicate(timeout=30)


if __name__ == "__main__":
    if sys.argv[1] == "lost":
        wait_for_a_lost_machine()
    else:
        dist.launch(call_unequally, *sys.argv[1:], nprocs=2)
