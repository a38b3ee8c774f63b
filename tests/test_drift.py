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


def train(trained, model, *others):
    """Call `trained`, a wrapped or a plain model, with other data on each rank; step the parameters of `model`."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD([*model.parameters(), *others], lr=0.05)
    for _ in range(5):
        x = torch.randn(4, 8, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(trained(x), x.sum(dim=1, keepdim=True)).backward()
        optimizer.step()
    return model


def check_differs(what, *args, **values):
    with pytest.raises(dist.DistributedError, match=f"{what} differs from rank 0's"):
        dist.check_in_sync(*args, **values)


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
@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_silent_and_the_check_names_it(mistake):
    model = mistake()  # ends without an error
    first = next(name for name, param in model.named_parameters() if not torch.equal(*dist.gather(param)))
    theirs, ours = dist.gather(model.get_parameter(first))
    assert (theirs - ours).abs().max().item() > 1e-3
    message = f"{first} of rank 1 differs from rank 0's: change and train it alike on all ranks, as DDP does"
    assert exit_message(dist.check_in_sync, model) == message
    # A snapshot of one of them is not written.
    parts = "snapshot", model, torch.optim.SGD(model.parameters())
    assert exit_message(checkpoint.save, *parts) == f"model.{message}"
    assert exit_message(checkpoint_sharded.save, *parts, 1) == message
    assert not os.path.exists("snapshot")


# ---- no false alarms, and every kind of tensor ----------------------------------------------------------------------


@on_processes(3)
def test_equal_weights_are_no_alarm_and_any_tensor_is_compared():
    rank = dist.get_rank()
    ddp_model = dist.prepare_ddp_model(make_model())
    model = train(ddp_model, ddp_model.module)  # BatchNorm's statistics are each rank's own
    for same in (model, ddp_model, torch.compile(ddp_model, backend="eager"), nn.ReLU()):
        dist.check_in_sync(same)
    # Stages of a pipeline are different models, and have no parameter in common.
    dist.check_in_sync([model, nn.Linear(2, 2), nn.ModuleDict({"head": nn.Linear(1, 1)})][rank])

    tensors = {
        "misaligned": torch.arange(9.0)[1:],  # it does not begin at a multiple of 8 bytes
        "scalar": torch.tensor(1.0),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "odd": torch.ones(3, dtype=torch.bfloat16),
        "float64": torch.ones(2, dtype=torch.float64),
        "complex64": torch.ones(2, dtype=torch.complex64),
        "flags": torch.tensor([True, False, True]),
    }
    params = {name: nn.Parameter(tensor, requires_grad=name != "flags") for name, tensor in tensors.items()}
    mixed = nn.ParameterDict({**params, "empty": nn.Parameter(torch.empty(0, 3))})
    dist.check_in_sync(mixed)
    for name, param in params.items():
        before = param.detach().clone()
        if rank == 2:
            param.detach().zero_()
        check_differs(f"{name} of rank 2", mixed)
        param.detach().copy_(before)


@on_processes(2)
def test_values_of_all_kinds_are_compared():
    rank = dist.get_rank()
    layer = nn.ReLU()  # it has no parameters
    long = torch.zeros(5000)
    changed = long.clone()
    changed[2500] = 1  # where a printed tensor has dots
    rows = torch.arange(300.0).view(100, 3)
    numbers = torch.arange(560.0).double()
    for equal, other in (
        (False, True),
        (torch.ones(3, 2), torch.ones(2, 3)),
        ([torch.ones(2), {"b": long}], [torch.ones(2), {"b": changed}]),
        # The same numbers in another order, or with another sign, and another type of the same memory.
        (rows, rows[[1, 0, *range(2, 100)]]),
        (numbers, -numbers),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    ):
        dist.check_in_sync(layer, best=equal)
        check_differs("best of rank 1", layer, best=other if rank else equal)
    dist.check_in_sync(layer, names=("b", "a"), nothing=None, table={"a": [1, 2.5]}, loss=float("nan"))
    dist.check_in_sync(layer, model=1, optimizer="Adam")
    check_differs("bias of rank 0", nn.Linear(2, 2), bias=0)  # a value does not replace the parameter of this name
    # What has no complete and equal text on all ranks is refused.
    for value in (layer, {"a", "b"}, np.arange(9), [object()], {"x": np.int64(1)}, torch.float32):
        with pytest.raises(dist.DistributedError, match=r"^critic has a <class '.*'>: "):
            dist.check_in_sync(layer, critic=value)


@on_processes(2)
def test_what_an_optimizer_trains_and_its_options_are_compared():
    """Options by the names of parameters. What it trains outside of the model drifts, because DDP does not know it."""
    rank = dist.get_rank()
    model = make_model()
    ddp_model = dist.prepare_ddp_model(model)
    temperature = nn.Parameter(torch.ones(()))
    train(lambda x: ddp_model(x) * temperature, model, temperature)
    dist.check_in_sync(model)
    check_differs("parameter 6 of the optimizer of rank 1", model, torch.optim.SGD([*model.parameters(), temperature]))
    params = list(model.parameters())
    params.insert(2 + rank, temperature)  # as after list(set(…)), or on one rank alone
    check_differs("the list of names of rank 1", model, torch.optim.SGD(params))

    for name, value in (("lr", 0.1 * (1 + rank)), ("betas", (0.9, 0.9 + 0.01 * rank))):
        optimizer = torch.optim.Adam(model.parameters(), **{name: value})
        check_differs("an option for 0.weight of rank 1", model, optimizer)
    optimizer = torch.optim.SGD(list(model.parameters())[rank:], lr=0.1)  # as in ZeRO
    dist.check_in_sync(model, optimizer, torch.optim.Adam(model.parameters()))
    model[3].bias.requires_grad_(rank == 0)
    check_differs("3.bias of rank 1", model)


@on_processes(2)
def test_what_is_replicated_is_compared_and_shards_may_differ():
    """The parts of DTensors that several ranks hold."""
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
        layer.norm.detach().to_local().add_(dist.get_rank())  # as by a gradient that is not summed
        if name:
            check_differs(f"{name} of rank 1", layer)
            with pytest.raises(dist.DistributedError, match=f"{name} of rank 1 differs"):
                checkpoint_sharded.save("replicated", layer, torch.optim.SGD(layer.parameters(), lr=0.1), 1)
        else:
            dist.check_in_sync(layer)
    assert not os.path.exists("replicated")


# ---- models that ranks build from what only they know ---------------------------------------------------------------


def in_order(*names):
    return nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names})


def with_frozen_block(number):
    model = make_model()
    model[number].requires_grad_(False)
    return model


UNLIKE = [  # and what differs first
    (lambda rank: nn.Sequential(nn.Embedding(8 + 4 * rank, 4), nn.Linear(4, 4)), "0.weight"),
    (lambda rank: nn.Linear(4, 8, bias=False) if rank else nn.Linear(8, 4, bias=False), "weight"),
    (lambda rank: nn.Linear(4, 4, dtype=torch.float64 if rank else torch.float32), "weight"),
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
