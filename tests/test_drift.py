"""Ranks that drift apart: these trainings end without an error, and `check_in_sync` raises on every rank."""

import copy
import os

import numpy as np
import pytest
import torch
from conftest import exit_message, on_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import checkpoint
import checkpoint_sharded
import distributed as dist


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 1))


def own_batches():
    """Other data on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        x = torch.randn(4, 8, generator=generator)
        yield x, x.sum(dim=1, keepdim=True)


def train(trained, model):
    """Call `trained`, a wrapped or a plain model, and step `model`'s parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in own_batches():
        loss = nn.functional.mse_loss(trained(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


# ---- mistakes -------------------------------------------------------------------------------------------------------


def the_plain_model_is_trained():
    model = make_model()
    dist.prepare_ddp_model(model)
    return train(model, model)


def the_model_is_converted_after_wrapping():
    model = make_model()
    ddp_model = dist.prepare_ddp_model(model)
    model.double()
    return train(lambda x: ddp_model(x.double()).float(), model)


def an_average_is_copied_before_wrapping():
    model = make_model(seed=dist.get_rank())
    average = copy.deepcopy(model)
    train(dist.prepare_ddp_model(model), model)
    dist.check_in_sync(model)
    return average


MISTAKES = [the_plain_model_is_trained, the_model_is_converted_after_wrapping, an_average_is_copied_before_wrapping]


@on_processes(2)
def test_each_mistake_is_silent_and_the_check_names_it():
    for mistake in MISTAKES:
        model = mistake()  # ends without an error
        message = exit_message(dist.check_in_sync, model)
        first = next(name for name, param in model.named_parameters() if not torch.equal(*dist.gather(param)))
        theirs, ours = dist.gather(model.get_parameter(first))
        assert (theirs - ours).abs().max().item() > 1e-3, mistake.__name__
        expected = f"{first} of rank 1 differs from rank 0's: change and train it alike on all ranks, as DDP does"
        assert message == expected, mistake.__name__
        # A snapshot of one of them is not written.
        parts = mistake.__name__, model, torch.optim.SGD(model.parameters())
        assert exit_message(checkpoint.save, *parts) == f"model.{message}"
        assert exit_message(checkpoint_sharded.save, *parts, 1) == message
        assert not os.path.exists(mistake.__name__)


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


def check_what_is_compared(local_rank, world_size):
    dist.init_process_group()
    ddp_model = dist.prepare_ddp_model(make_model())
    model = train(ddp_model, ddp_model.module)  # BatchNorm's statistics are each rank's own
    for same in (model, ddp_model, torch.compile(ddp_model, backend="eager"), nn.ReLU()):
        dist.check_in_sync(same)
    # Stages of a pipeline are different models, and have no parameter in common.
    dist.check_in_sync([model, nn.Linear(2, 2), nn.ModuleDict({"head": nn.Linear(1, 1)})][local_rank])

    mixed = Mixed()
    dist.check_in_sync(mixed)
    for name, tensor in mixed.named_parameters():
        if tensor.numel() == 0:
            continue
        with torch.no_grad():
            before = tensor.clone()
            if local_rank == 2:
                tensor[...] = 0
        check_differs(f"{name} of rank 2", mixed)
        with torch.no_grad():
            tensor.copy_(before)
    # A sign is the highest bit of a word.
    signs = nn.Linear(64, 2, bias=False).double()
    nn.init.ones_(signs.weight)
    if local_rank == 1:
        signs.weight.data[1, 5] = -1
    check_differs("weight of rank 1", signs)

    # What the optimizer trains outside the model drifts: DDP does not know it.
    temperature = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    for x, y in own_batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp_model(x) * temperature, y).backward()
        optimizer.step()
    dist.check_in_sync(model)
    check_differs("parameter 6 of the optimizer of rank 1", model, optimizer)
    check_differs("best of rank 1", nn.ReLU(), best=local_rank > 0)
    # Equal bits in another shape, and a layer that one rank does not train.
    check_differs("average of rank 1", nn.ReLU(), average=torch.ones((2, 3) if local_rank == 1 else (3, 2)))
    frozen = nn.Linear(2, 2)
    dist.sync_params(frozen.parameters())
    frozen.bias.requires_grad_(local_rank != 1)
    check_differs("bias of rank 1", frozen)
    # A value with the name of a parameter hides nothing.
    for value in (local_rank, torch.tensor(local_rank)):
        with pytest.raises(dist.DistributedError, match="bias of rank"):
            dist.check_in_sync(nn.Linear(2, 2), bias=value)
    # What has no complete and equal text on all ranks is refused; tensors in lists are compared.
    for value in (frozen, {"a", "b"}, np.arange(9), [object()], {"x": np.int64(1)}, torch.float32):
        with pytest.raises(dist.DistributedError, match=r"^critic has a <class '.*'>: "):
            dist.check_in_sync(nn.ReLU(), critic=value)
    long = torch.zeros(5000)
    dist.check_in_sync(nn.ReLU(), history=[long, {"b": long}])
    if local_rank == 1:
        long[2500] = 1  # where a printed tensor has dots
    check_differs("history of rank 1", nn.ReLU(), history=[torch.ones(2), {"b": long}])
    dist.check_in_sync(nn.ReLU(), model=1, optimizer="Adam")
    # The same numbers in another order, or with another sign, and another type of the same memory.
    for ours, theirs in (
        (torch.arange(300.0).view(100, 3), torch.arange(300.0).view(100, 3)[[1, 0, *range(2, 100)]]),
        (torch.arange(560.0).double(), -torch.arange(560.0).double()),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    ):
        check_differs("classes of rank 1", nn.ReLU(), classes=theirs if local_rank == 1 else ours)
    # An optimizer whose outside parameter is at another place, as after list(set(…)), or on one rank alone.
    params = list(model.parameters())
    params.insert(2 + local_rank, temperature)
    check_differs("the list of names of rank 1", model, torch.optim.SGD(params))
    dist.check_in_sync(nn.ReLU(), names=("b", "a"), nothing=None, table={"a": [1, 2.5]})
    dist.check_in_sync(nn.ReLU(), loss=float("nan"))


@on_processes(2)
def test_what_is_sharded_or_replicated_is_compared():
    """Options by the names of parameters, and parts of DTensors that several ranks hold. Shards may differ."""
    rank = dist.get_rank()
    model = make_model()
    for name, value in (("lr", 0.1 * (1 + rank)), ("betas", (0.9, 0.9 + 0.01 * rank))):
        optimizer = torch.optim.Adam(model.parameters(), **{name: value})
        check_differs("an option for 0.weight of rank 1", model, optimizer)
    optimizer = torch.optim.SGD(list(model.parameters())[rank:], lr=0.1, dampening=0)  # as in ZeRO
    dist.check_in_sync(model, optimizer, torch.optim.Adam(model.parameters()))
    shards = init_device_mesh("cpu", (2,))
    hybrid = init_device_mesh("cpu", (1, 2))  # the second dimension replicates
    for mesh, placements, name in (
        (shards, [Replicate()], "norm"),
        (shards, [Shard(0)], None),
        (hybrid, [Shard(0), Replicate()], r"norm, part \[0\]"),
        (hybrid, [Replicate(), Shard(0)], None),
    ):
        layer = nn.Module()
        layer.norm = nn.Parameter(distribute_tensor(torch.ones(4), mesh, placements))
        dist.check_in_sync(layer)
        layer.norm.detach().to_local().add_(rank)  # as by a gradient that is not summed
        if name:
            check_differs(f"{name} of rank 1", layer)
            with pytest.raises(dist.DistributedError, match=f"{name} of rank 1 differs"):
                checkpoint_sharded.save("replicated", layer, torch.optim.SGD(layer.parameters(), lr=0.1), 1)
        else:
            dist.check_in_sync(layer)
    assert not os.path.exists("replicated")


def in_order(*names):
    return nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names})


def with_frozen_block(number):
    model = make_model()
    model[number].requires_grad_(False)
    return model


UNLIKE = [  # models that ranks build from what only they know, and what differs first
    (lambda rank: nn.Sequential(nn.Embedding(8 + 4 * rank, 4), nn.Linear(4, 4)), "0.weight"),
    (lambda rank: nn.Linear(4, 8, bias=False) if rank else nn.Linear(8, 4, bias=False), "weight"),
    (lambda rank: nn.Sequential(nn.Linear(4, 4, dtype=torch.float64 if rank else torch.float32)), "0.weight"),
    (lambda rank: with_frozen_block(3 * rank), "0.weight"),
    (lambda rank: in_order(*("ab" if rank else "ba")), "the order of parameters"),
]


@on_processes(2)
def test_unlike_models_are_refused_before_anything_is_sent():
    for build, name in UNLIKE:
        with pytest.raises(dist.DistributedError, match=f"^{name} of rank 1 differs from rank 0's"):
            dist.prepare_fsdp_model(build(dist.get_rank()))
    with pytest.raises(dist.DistributedError, match=r"^tensor 1 to copy of rank 1 differs"):
        dist.sync_params([torch.ones(2), torch.ones(2 + dist.get_rank())])
    with pytest.raises(dist.DistributedError, match=r"^the number of tensors to copy of rank 1 differs"):
        dist.sync_params([torch.ones(2)] * (1 + dist.get_rank()))


@on_processes(2)
def test_ignored_parameters_keep_each_ranks_values():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + dist.get_rank()))
    nn.init.constant_(model[1].weight, dist.get_rank())
    dist.prepare_fsdp_model(model, blocks=(nn.Linear,), ignored_params=set(model[1].parameters()))
    assert (model[1].weight == dist.get_rank()).all() and hasattr(model[0].weight, "to_local")


def check_differs(what, *args, **values):
    with pytest.raises(dist.DistributedError, match=f"{what} differs from rank 0's"):
        dist.check_in_sync(*args, **values)


def test_equal_weights_are_no_alarm_and_any_tensor_is_compared():
    dist.launch(check_what_is_compared, nprocs=3)
    dist.check_in_sync(make_model())  # in one process it does nothing
