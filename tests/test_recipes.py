"""Every block of docs/recipes.md runs on two processes, and keeps what the page promises.

All recipes that are selected run in one job of two processes, one after the other. A recipe that fails does not stop
the others: its processes leave the process group, and all meet in a new one, or in a new job.
"""

import contextlib
import copy
import datetime
import functools
import gzip
import io
import json
import linecache
import math
import os
import pty
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from conftest import ROOT, CollectiveCounter, float64, free_port, run, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset
from tqdm import tqdm
from transformer import full_parameters

import checkpoint
import checkpoint_sharded
import distributed as dist

PAGE = ROOT / "docs" / "recipes.md"
RATE = 0.1
RECIPES = {}  # the functions that check them, by their names


def recipe(check):
    RECIPES[check.__name__] = check
    return check


# ---- the page -------------------------------------------------------------------------------------------------------


def blocks_of(heading, language="python"):
    """The code blocks under a heading of the page, each as it is printed."""
    section = PAGE.read_text().partition(f"\n### {heading}\n")[2]
    section = re.split(r"^##", section, maxsplit=1, flags=re.M)[0]
    blocks = re.findall(rf"^```{language}\n(.*?)^```", section, re.M | re.S)
    assert blocks, f"no {language} under {heading!r}"
    return blocks


def execute(block, **names):
    """Run a block with the names of the page's table and with `names`; returns all that it has defined."""
    namespace = {
        **{"torch": torch, "nn": nn, "F": F, "DataLoader": DataLoader, "dist": dist, "torch_dist": torch_dist},
        **{"rank": dist.get_rank(), "world_size": dist.get_world_size(), "device": dist.get_device()},
        **{"loss_fn": F.cross_entropy, **names},
    }
    path = f"<{block.splitlines()[0]} of docs/recipes.md>"
    linecache.cache[path] = (len(block), None, block.splitlines(keepends=True), path)  # so that tracebacks show lines
    exec(compile(block, path, "exec"), namespace)
    return types.SimpleNamespace(**namespace)


# ---- a job of two processes -----------------------------------------------------------------------------------------


def run_recipes(local_rank, world_size, names, folder):
    os.chdir(folder)
    for name in names:
        dist.init_process_group(timeout=datetime.timedelta(seconds=60))
        torch.manual_seed(0)
        try:
            with float64():
                RECIPES[name]()
        except (Exception, pytest.fail.Exception) as error:
            raise RuntimeError(f"the recipe {name} on rank {local_rank}") from error
        Path(f"{name} {local_rank}").touch()


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    """The folder where all recipes that are selected have run. Those after one that fails do not run."""
    items = [item for item in request.session.items if item.path == request.path and "name" in item.fixturenames]
    names = list(dict.fromkeys(item.callspec.params["name"] for item in items))
    folder = tmp_path_factory.mktemp("recipes")
    try:
        dist.launch(run_recipes, names, str(folder), nprocs=2)
    except Exception:
        (folder / "error.txt").write_text(traceback.format_exc())
    return folder


def check_no_error(folder, name):
    assert all((folder / f"{name} {rank}").exists() for rank in range(2)), (folder / "error.txt").read_text()


# ---- what the recipes train -----------------------------------------------------------------------------------------


class Net(nn.Module):
    """Six numbers to five classes."""

    def __init__(self, width=16, outputs=5):
        super().__init__()
        self.inner = nn.Linear(6, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))
        self.outer = nn.Linear(width, outputs)

    def forward(self, x):
        x = self.inner(x).tanh()
        for block in self.blocks:
            x = block(x)
        return self.outer(x)


def make_model(**sizes):
    torch.manual_seed(1)
    return Net(**sizes)


def shard(model, mesh=None, **kwargs):
    from torch.distributed.fsdp import fully_shard

    mesh = mesh or make_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)
    return model


def make_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def make_batch(n=12, seed=2):
    """A global batch, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=generator), torch.randint(5, (n,), generator=generator)


def own(*tensors):
    """This rank's share of a global batch."""
    return [tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in tensors]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=RATE)


def take_step(optimizer, outputs, targets):
    optimizer.zero_grad()
    F.cross_entropy(outputs, targets).backward()
    optimizer.step()


def train_alone(model, loss, steps=1):
    """One process of plain PyTorch; returns the parameters."""
    optimizer = sgd(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    return full_parameters(model)


def plain_step(n=12):
    """The parameters after one step of one process on the whole batch."""
    x, y = make_batch(n)
    return train_alone(make_model(), lambda model: F.cross_entropy(model(x), y))


def check_equal(actual, expected, tolerance=1e-12):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        difference = (actual[name] - value).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference}"


def check_same_on_all_ranks(values):
    for name, value in values.items():
        for other in dist.gather(value):
            assert torch.equal(other, value), name


@contextlib.contextmanager
def count_collectives():
    """How often each collective is called in the block, and the type of what the last call sent, by name."""
    counts = {}
    with CollectiveCounter() as counter:
        yield counts
    for operation, count in counter.counts.items():
        name = operation.partition(".")[2].strip("_").replace("_base", "")
        counts[name] = counts.get(name, 0) + count


def n_all_reduces(counts):
    return counts.get("allreduce", 0)


# ---- first of all ---------------------------------------------------------------------------------------------------


@recipe
def equal_to_one_process():
    """And the block sees a model that is not."""
    block, _ = blocks_of("How do I check that my script still computes the same?")
    expected = plain_steps(16)
    if dist.is_primary():
        torch.save(expected, "weights_of_one_process.pt")
    dist.barrier()
    model = make_model()
    train_steps(dist.prepare_ddp_model(model))
    wrong = make_model()
    train_steps(wrong)
    for trained, largest in ((model, (0, 1e-12)), (wrong, (1e-5, 1))):
        load = mock.Mock(wraps=torch.load)
        with contextlib.redirect_stdout(io.StringIO()) as stdout, mock.patch.object(torch, "load", load):
            execute(block, model=trained)
        assert load.call_args.kwargs == {"map_location": dist.get_device()}
        differences = [float(number) for number in re.findall(r" differs by (.*)\n", stdout.getvalue())]
        if dist.is_primary():
            assert len(differences) == len(expected) and largest[0] <= max(differences) <= largest[1]
        else:
            assert not stdout.getvalue()


@recipe
def the_order_of_one_process():
    """With shuffling, each step of two processes has the samples of a step of the original, in two epochs."""
    _, block = blocks_of("How do I check that my script still computes the same?")
    expected = []
    train_set = range(128)
    execute(block, train_set=train_set, epochs=2, train_step=lambda batch: expected.append(sorted(batch.tolist())))
    sampler = dist.data_sampler(train_set, distributed=True, shuffle=True)
    own_batches = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        loader = DataLoader(train_set, batch_size=64 // dist.get_world_size(), sampler=sampler)
        own_batches.extend(batch.tolist() for batch in loader)
    steps = zip(*dist.gather_objects(own_batches), strict=True)
    assert [sorted(first + second) for first, second in steps] == expected
    assert expected[0] != list(range(64)) and expected[0] != expected[2]


# ---- the training step ----------------------------------------------------------------------------------------------


def own_micro_batches():
    """Three of this rank, which together with the other's are the global batch."""
    x, y = own(*make_batch())
    return list(zip(x.chunk(3), y.chunk(3), strict=True))


@recipe
def accumulation_under_fsdp():
    (block,) = blocks_of("How do I accumulate gradients under FSDP2?")
    model = shard(make_model())
    with count_collectives() as counts:
        execute(block, fsdp_model=model, optimizer=sgd(model), micro_batches=own_micro_batches())
    check_equal(full_parameters(model), plain_step())
    assert counts["reduce_scatter"] == 3, "for each of three units once"


@recipe
def accumulation_under_hsdp():
    """Two replicas of one shard each."""
    (block,) = blocks_of("How do I accumulate gradients under HSDP?")
    model = shard(make_model(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
    with count_collectives() as counts:
        execute(block, hsdp_model=model, optimizer=sgd(model), micro_batches=own_micro_batches())
    check_equal(full_parameters(model), plain_step())
    assert n_all_reduces(counts) == 3, "each of three units once"


@recipe
def unequal_numbers():
    """Rank 0 has 2 samples and rank 1 has 10."""
    block, _ = blocks_of("My batches have unequal numbers of samples or tokens. How do I average the loss?")
    model = make_model()
    x, y = (tensor.split([2, 10])[dist.get_rank()] for tensor in make_batch())
    result = execute(block, ddp_model=dist.prepare_ddp_model(model), optimizer=sgd(model), x=x, y=y)
    check_equal(full_parameters(model), plain_step())
    x, y = make_batch()
    assert (result.total_loss - F.cross_entropy(make_model()(x), y)).abs() < 1e-12


@recipe
def unequal_numbers_of_batches():
    """Rank 0 has two batches, and rank 1 has three, in two epochs."""
    _, block = blocks_of("My batches have unequal numbers of samples or tokens. How do I average the loss?")
    x, y = make_batch(13)
    shares = [[slice(0, 2), slice(2, 4)], [slice(4, 8), slice(8, 12), slice(12, 13)]]
    model = make_model()
    ddp_model = dist.prepare_ddp_model(model)
    loader = [(x[part], y[part]) for part in shares[dist.get_rank()]]
    for _ in range(2):
        execute(block, ddp_model=ddp_model, optimizer=sgd(model), loader=loader)
    dist.check_in_sync(model)
    alone = make_model()
    for rows in 2 * ([0, 1, 4, 5, 6, 7], [2, 3, 8, 9, 10, 11], [12]):
        expected = train_alone(alone, lambda model, rows=rows: F.cross_entropy(model(x[rows]), y[rows]))
    check_equal(full_parameters(model), expected)


@recipe
def norm_of_gradients():
    """Clipped: the norm is above 0.1."""
    (block,) = blocks_of("How do I clip gradients and log their norm?")
    x, y = make_batch()
    alone = make_model()
    optimizer = sgd(alone)
    F.cross_entropy(alone(x), y).backward()
    norm = torch.cat([param.grad.flatten() for param in alone.parameters()]).norm()
    assert norm > 0.2
    for param in alone.parameters():
        param.grad *= 0.1 / (norm + 1e-6)
    optimizer.step()

    model = shard(make_model())
    x, y = own(x, y)
    F.cross_entropy(model(x), y).backward()
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        result = execute(block, fsdp_model=model, optimizer=sgd(model))
    check_equal(full_parameters(model), full_parameters(alone))
    assert type(result.norm) is torch.Tensor and (result.norm - norm).abs() < 1e-12
    assert stdout.getvalue() == (f"gradient norm {norm:.4f}\n" if dist.is_primary() else "")


def float32_step(tolerance_of):
    """The parameters of one process in float32, and how far one step moves them."""
    x, y = make_batch()
    model = make_model().float()
    before = full_parameters(model)
    after = train_alone(model, lambda model: F.cross_entropy(model(x.float()), y))
    return after, max((after[name] - before[name]).abs().max().item() for name in before) * tolerance_of


class TwoBranches(nn.Module):
    """Which branch a batch takes depends on its size."""

    def __init__(self):
        super().__init__()
        self.small = nn.Linear(4, 3)
        self.large = nn.Linear(4, 3)

    def forward(self, x):
        if len(x) < 3:
            return self.small(x)
        return self.large(x)


@recipe
def unused_parameters():
    """Each rank takes another branch."""
    (block,) = blocks_of("DDP says that it expected to have finished reduction. What is wrong?")
    parts = [(torch.ones(2, 4), torch.zeros(2, dtype=torch.long)), (torch.ones(4, 4), torch.ones(4, dtype=torch.long))]
    x, y = parts[dist.get_rank()]
    torch.manual_seed(0)
    model = TwoBranches()
    result = execute(block, model=model, x=x, y=y)
    F.cross_entropy(result.ddp_model(x), y).backward()  # a second one
    gradients = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    for _ in range(2):
        for x_part, y_part in parts:
            (F.cross_entropy(model(x_part), y_part) / len(parts)).backward()
    check_equal(gradients, {name: param.grad for name, param in model.named_parameters()})


@recipe
def bfloat16_under_ddp():
    (block,) = blocks_of("How do I use bfloat16 under DDP?")
    expected, tolerance = float32_step(0.02)
    model = make_model().float()
    types_seen = set()
    model.outer.register_forward_hook(lambda module, inputs, output: types_seen.add(output.dtype))
    x, y = own(*make_batch())
    execute(block, ddp_model=dist.prepare_ddp_model(model), optimizer=sgd(model), x=x.float(), y=y)
    check_equal(full_parameters(model), expected, tolerance)
    assert types_seen == {torch.bfloat16}
    assert {tensor.dtype for param in model.parameters() for tensor in (param, param.grad)} == {torch.float32}


@recipe
def drawing_under_fsdp():
    """Rank 1 takes five forwards, and rank 0 one."""
    (block,) = blocks_of("How do I draw answers or samples from a model under FSDP2?")
    model = shard(make_model())
    plain_model = make_model()
    train_steps(model)
    x, _ = make_batch()
    collectives = []

    def draw(model):
        with count_collectives() as counts:
            outputs = [model(x) for _ in range(1 + 4 * dist.get_rank())]
        collectives.append(counts)
        return outputs[0]

    result = execute(block, fsdp_model=model, plain_model=plain_model, draw=draw)
    check_equal(full_parameters(plain_model), full_parameters(model))
    assert collectives == [{}]
    assert (result.answers - model(x)).abs().max() < 1e-12
    assert (result.answers - make_model()(x)).abs().max() > 1e-3, "the model has moved"


@recipe
def bfloat16_under_fsdp():
    (block,) = blocks_of("How do I use bfloat16 under FSDP2?")
    expected, tolerance = float32_step(0.02)
    model = make_model().float()
    execute(block, model=model, mesh=make_mesh())
    types_seen = set()
    model.outer.register_forward_hook(lambda module, inputs, output: types_seen.add(module.weight.dtype))
    optimizer = sgd(model)
    x, y = own(*make_batch())
    take_step(optimizer, model(x.float()).float(), y)
    check_equal(full_parameters(model), expected, tolerance)
    assert types_seen == {torch.bfloat16}, "gathered in half of the bytes"
    assert {tensor.dtype for param in model.parameters() for tensor in (param, param.grad)} == {torch.float32}


class TwoTowers(nn.Module):
    """Features of two kinds, as of images and of texts."""

    def __init__(self):
        super().__init__()
        self.images = nn.Linear(6, 4)
        self.texts = nn.Linear(6, 4)

    def forward(self, x):
        return self.images(x), self.texts(x.flip(1))


@recipe
def contrastive_loss():
    """With a learnable temperature and without one."""
    block, temperature = blocks_of("My loss compares each sample with all others (contrastive loss). What do I gather?")
    x, _ = make_batch()

    def whole_loss(model):
        images, texts = model(x)
        targets = torch.arange(len(x))
        return F.cross_entropy(images @ texts.T, targets) + F.cross_entropy(texts @ images.T, targets)

    def plain():
        torch.manual_seed(1)
        return TwoTowers()

    def with_temperature():
        return execute(temperature, model=plain()).model

    (x_own,) = own(x)
    for build in (plain, with_temperature):
        expected = train_alone(build(), whole_loss)
        model = build()
        optimizer = sgd(model)
        execute(block, ddp_model=dist.prepare_ddp_model(model), x=x_own)
        optimizer.step()
        check_equal(full_parameters(model), expected)
    assert abs(expected["log_scale"] - math.log(1 / 0.07)) > 1e-3


@recipe
def global_sums():
    """The Dice loss of a batch of which rank 1 has another share of ones."""
    (block,) = blocks_of("A loss over the global batch")
    x, y = make_batch()
    target = (y > 2).double()[:, None].expand(-1, 5)

    def dice(model):
        probability = model(x).sigmoid()
        return 1 - 2 * (probability * target).sum() / (probability.sum() + target.sum())

    expected = train_alone(make_model(), dice)
    model = make_model()
    optimizer = sgd(model)
    x_own, y_own = own(x, target)
    result = execute(block, ddp_model=dist.prepare_ddp_model(model), x=x_own, y=y_own)
    assert abs(result.loss.item() - dice(make_model()).item()) < 1e-15
    optimizer.step()
    check_equal(full_parameters(model), expected)


@recipe
def batch_norm():
    """The statistics of the global batch, forward and backward, with shares of 7 and 5 samples."""
    block, _ = blocks_of("How do I use BatchNorm?")
    (sums,) = blocks_of("A loss over the global batch")
    (quoted,) = re.findall(r"such a model raises `(.*?)`", " ".join(PAGE.read_text().split()))
    classes = execute(sums.partition("\n\n\n")[0] + "\n\n\n" + block)
    x, y = make_batch()

    def network(layer):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 4), layer(4), nn.Linear(4, 5))

    reference = network(nn.BatchNorm1d)
    expected = train_alone(reference, lambda model: F.cross_entropy(model(x), y), steps=3)
    model = network(classes.GlobalBatchNorm1d)
    ddp_model = dist.prepare_ddp_model(model)
    optimizer = sgd(model)
    share = slice(0, 7) if dist.is_primary() else slice(7, 12)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp_model(x[share]), y[share], reduction="sum") / 12
        (loss * dist.get_world_size()).backward()
        optimizer.step()
    check_equal(full_parameters(model), expected)
    check_equal(dict(model.named_buffers()), dict(reference.named_buffers()))
    assert torch.allclose(model.eval()(x), reference.eval()(x), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=quoted):
        dist.prepare_ddp_model(nn.SyncBatchNorm.convert_sync_batchnorm(network(nn.BatchNorm1d)))


def check_resumed_average(block, make, batches, expected):
    """Two epochs of two steps each; each is run by a model and an average that are new."""
    block = block.replace("snapshot.pt", "average.pt")  # other recipes begin without a snapshot
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    for epochs in (1, 2):
        model = make().eval()
        optimizer = sgd(model)
        ddp_model = dist.prepare_ddp_model(model)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
        trained = []

        def train_epoch(epoch, optimizer=optimizer, ddp_model=ddp_model, ema=ema, trained=trained):
            for x, y in batches[2 * epoch :][:2]:
                take_step(optimizer, ddp_model(x), y)
                ema.update_parameters(ddp_model.module)
            trained.append(epoch)

        names = {"ddp_model": ddp_model, "optimizer": optimizer, "ema": ema}
        execute(block, **names, train_epoch=train_epoch, epochs=epochs)
        assert trained == [epochs - 1]
    check_equal(dict(ema.module.state_dict()), expected)


@recipe
def statistics_of_an_average():
    *_, block = blocks_of("How do I use BatchNorm?")
    train_set = list(torch.randn(64, 3))
    average = nn.Sequential(nn.BatchNorm1d(3))
    expected = copy.deepcopy(average)
    execute(block, train_set=train_set, swa_model=average)
    expected.train()
    expected[0].momentum = None
    expected(torch.stack(train_set))
    check_equal(dict(average.state_dict()), dict(expected.state_dict()))


@recipe
def buffers_of_forward():
    (block,) = blocks_of("My forward updates buffers: a codebook, centres, a queue")
    codebook = execute(block).Codebook(8, 4)

    class Autoencoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(4, 4)
            self.codebook = copy.deepcopy(codebook)

        def forward(self, x):
            quantized, loss = self.codebook(self.encoder(x))
            return F.mse_loss(quantized, x) + loss

    model = Autoencoder()
    alone = copy.deepcopy(model)
    ddp_model = dist.prepare_ddp_model(model)
    batches = [torch.randn(12, 4) for _ in range(5)]

    def train(model, ddp_model, part_of):
        optimizer = sgd(model)
        for x in batches:
            optimizer.zero_grad()
            ddp_model(part_of(x)).backward()
            optimizer.step()
        return dict(model.state_dict())

    with mock.patch.object(dist, "all_reduce", lambda tensor: tensor):
        expected = train(alone, alone, lambda x: x)
    check_equal(train(model, ddp_model, lambda x: own(x)[0]), expected)


@recipe
def environments():
    (block,) = blocks_of("My data are played in environments (PPO). What must differ between processes?")
    names = execute(block, make_env=lambda seed: seed, seed=5)
    assert names.env == torch.initial_seed() == 5 + dist.get_rank()
    own_advantages = torch.randn(6 + dist.get_rank()) + dist.get_rank()
    everything = torch.cat(dist.gather(own_advantages))
    expected = (everything - everything.mean()) / (everything.std() + 1e-8)
    check_equal({"": torch.cat(dist.gather(names.normalized(own_advantages)))}, {"": expected})


@recipe
def noise_of_the_global_batch():
    (block,) = blocks_of("My model gets noise or random times (diffusion)")
    names = {"seed": 3, "step": 4, "global_batch_size": 6}
    found = execute(block, x=torch.zeros(3, 2, 5), **names)
    whole = execute(block, x=torch.zeros(6, 2, 5), **names, rank=0, world_size=1)
    assert found.noise.shape == (3, 2, 5) and found.times.shape == (3,)
    assert torch.equal(found.noise, whole.noise[dist.get_rank() :: 2])
    assert torch.equal(found.times, whole.times[dist.get_rank() :: 2])


@recipe
def moving_average():
    replicated, resumed, sharded = blocks_of("How do I keep an exponential moving average (EMA) of the weights?")

    def make():
        torch.manual_seed(1)
        return nn.Sequential(Net(), nn.BatchNorm1d(5))

    batches = [make_batch(seed=seed) for seed in range(4)]
    alone, model = make().eval(), make().eval()  # statistics of its own batch would differ from rank to rank
    average = {name: value.detach().clone() for name, value in alone.state_dict().items()}
    for number, (x, y) in enumerate(batches):
        train_alone(alone, lambda model, x=x, y=y: F.cross_entropy(model(x), y))
        for name, value in alone.state_dict().items():
            keep = 0.99 if number and value.is_floating_point() else 0  # the first average is the model itself
            average[name] = (keep * average[name] + (1 - keep) * value).to(value.dtype)
    own_batches = [own(*batch) for batch in batches]
    ddp_model = dist.prepare_ddp_model(model)
    with count_collectives() as counts:
        execute(replicated, model=model, ddp_model=ddp_model, optimizer=sgd(model), batches=own_batches)
    dist.barrier()
    check_equal(torch.load("ema.pt", weights_only=True), average)
    assert n_all_reduces(counts) == len(batches), "the average sends nothing"
    check_resumed_average(resumed, make, own_batches, average)

    def make_sharded():
        from torch.distributed.fsdp import fully_shard

        return fully_shard(make().eval(), mesh=make_mesh())

    alone, model, ema_model = make().eval(), make_sharded(), make_sharded()
    average = full_parameters(alone)
    optimizer = sgd(model)
    for number, (x, y) in enumerate(batches):
        after = train_alone(alone, lambda model, x=x, y=y: F.cross_entropy(model(x), y))
        average = {name: 0.99 * average[name] + 0.01 * after[name] for name in average}
        x, y = own(x, y)
        take_step(optimizer, model(x), y)
        model[1].num_batches_tracked.fill_(number)
        with count_collectives() as counts:
            execute(sharded, fsdp_model=model, ema_model=ema_model)
        assert not counts, "the average sends nothing"
        check_equal(full_parameters(ema_model), average)
        assert ema_model[1].num_batches_tracked == number
    moved = max((average[name] - start).abs().max() for name, start in full_parameters(make()).items())
    assert moved > 1e-4


def critic_loss(scores):
    """The first half of the scores are of real samples."""
    real, fake = scores.chunk(2)
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def generator_loss(scores):
    return F.softplus(-scores).mean()


@recipe
def two_optimizers():
    block, sampling = blocks_of("My script has two models and two optimizers, like a GAN. What do I wrap?")
    torch.manual_seed(3)
    batches = [(torch.randn(8, 6), torch.randn(8, 6)) for _ in range(3)]

    def make():
        generator, critic = make_model(outputs=6), make_model(outputs=1)
        return {"generator": generator, "critic": critic}, sgd(generator), sgd(critic)

    alone, generator_optimizer, critic_optimizer = make()
    for real, noise in batches:
        fake = alone["generator"](noise)
        critic_optimizer.zero_grad()
        critic_loss(torch.cat([alone["critic"](real), alone["critic"](fake.detach())])).backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        generator_loss(alone["critic"](fake)).backward()
        generator_optimizer.step()

    models, generator_optimizer, critic_optimizer = make()
    computed = []
    models["critic"].outer.bias.register_post_accumulate_grad_hook(computed.append)
    with count_collectives() as counts:
        execute(
            block,
            **models,
            generator_optimizer=generator_optimizer,
            critic_optimizer=critic_optimizer,
            generator_loss=generator_loss,
            critic_loss=critic_loss,
            batches=[own(*batch) for batch in batches],
        )
    for name, model in models.items():
        check_equal(full_parameters(model), full_parameters(alone[name]))
    assert n_all_reduces(counts) == 2 * len(batches), "one of each model per step"

    assert len(computed) == len(batches), "the generator's step needs no gradients of the critic"
    with count_collectives() as counts:
        names = execute(sampling, generator=models["generator"], fixed_noise=batches[0][1])
    assert not counts and hasattr(names, "samples") == dist.is_primary()


@recipe
def gradient_penalty():
    """The step equals one process's."""
    (block,) = blocks_of("My critic has a gradient penalty. How do I compute it?")
    torch.manual_seed(3)
    real, fake, mixing = torch.randn(8, 6), torch.randn(8, 6), torch.rand(8, 1)

    def loss_and_penalty(critic):
        mixed = (real + mixing * (fake - real)).requires_grad_()
        (slopes,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        scores = critic(torch.cat([real, fake]))
        return critic_loss(scores) + 10 * (slopes.norm(dim=1) - 1).square().mean()

    def step(block):
        critic = make_model(outputs=1)
        names = {"critic": critic, "ddp_critic": dist.prepare_ddp_model(critic), "critic_optimizer": sgd(critic)}
        own_real, own_fake, own_mixing = own(real, fake, mixing)
        execute(block, **names, real=own_real, fake=own_fake, mixing=own_mixing, critic_loss=critic_loss)
        return critic

    critic = step(block)
    check_equal(full_parameters(critic), train_alone(make_model(outputs=1), loss_and_penalty))
    dist.check_in_sync(critic)


@recipe
def unfreezing():
    """Two steps with a frozen layer, and two more with all layers, equal one process's."""
    (block,) = blocks_of("How do I unfreeze layers during training?")
    x, y = make_batch()

    def train(model, trained, optimizer, x, y):
        for _ in range(2):
            take_step(optimizer, trained(x), y)

    def make():
        model = make_model()
        model.inner.requires_grad_(False)
        return model, torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=RATE)

    alone, optimizer = make()
    train(alone, alone, optimizer, x, y)
    alone.inner.requires_grad_(True)
    optimizer.add_param_group({"params": alone.inner.parameters()})
    train(alone, alone, optimizer, x, y)

    model, optimizer = make()
    ddp_model = dist.prepare_ddp_model(model)
    train(model, ddp_model, optimizer, *own(x, y))
    ddp_model = execute(block, model=model, ddp_model=ddp_model, optimizer=optimizer).ddp_model
    train(model, ddp_model, optimizer, *own(x, y))
    check_equal(full_parameters(model), full_parameters(alone))
    dist.check_in_sync(model)
    assert not torch.equal(model.inner.weight, make_model().inner.weight)


@recipe
def evaluation():
    """65 samples, so that ranks have unequal numbers of batches."""
    (block,) = blocks_of("How do I evaluate on each sample exactly once?")
    x, y = make_batch(129)
    model = make_model()
    result = execute(block, model=model, test_set=TensorDataset(x, y))
    with torch.no_grad():
        outputs = model(x)
    assert abs(result.loss - F.cross_entropy(outputs, y).item()) < 1e-12
    assert abs(result.accuracy - (outputs.argmax(dim=1) == y).double().mean().item()) < 1e-12
    assert len({len(batches) for batches in dist.gather_objects(list(result.loader))}) == 2


def area_under_curve(labels, scores):
    """In how many pairs of a sample of class 1 and another one the first has the higher score."""
    scores = scores.softmax(dim=1)[:, 1]
    return (scores[labels == 1][:, None] > scores[labels != 1]).double().mean().item()


@recipe
def metric_of_all_predictions():
    gathered, ordered = blocks_of("My metric needs all predictions (AUC, F1)")
    model = make_model()
    for n in (2, 37, 128, 129, 131):
        x, y = make_batch(n)
        y[:2] = torch.tensor([0, 1])  # the area needs both kinds
        first = execute(gathered, model=model, test_set=TensorDataset(x, y), metric=area_under_curve)
        second = execute(ordered, shares=first.shares, all_scores=first.all_scores)
        with torch.no_grad():
            scores = model(x)
        assert first.result == area_under_curve(y, scores)
        assert first.all_labels.tolist() == y[0::2].tolist() + y[1::2].tolist()
        check_equal({"scores": second.ordered_scores}, {"scores": scores})


# ---- data, batch size and learning rate -----------------------------------------------------------------------------


@recipe
def download():
    """One process downloads, and all read after that."""
    (block,) = blocks_of("My script downloads or prepares its data. Which process should do it?")
    calls = []

    def fake_mnist(folder, download=False):
        calls.append("download" if download else "read")

    with (
        mock.patch.dict(sys.modules, {"torchvision.datasets": types.SimpleNamespace(MNIST=fake_mnist)}),
        mock.patch.object(dist, "barrier", lambda: calls.append("barrier")),
    ):
        execute(block)
    assert calls == ["download", "barrier", "read"][dist.get_local_rank() :]


@recipe
def number_of_gpus():
    """The same steps as one process; and at N times the batch and rate, nearly as N steps."""
    keep, scale, followed = blocks_of("The number of GPUs changes. What about batch size and learning rate?")
    x, y = make_batch(200)
    result = execute(keep, train_set=TensorDataset(x, torch.arange(200)))
    result.sampler.set_epoch(1)
    steps = [torch.cat(dist.gather(indices)) for _, indices in result.loader]
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    assert [sorted(step.tolist()) for step in steps] == [sorted(step.tolist()) for step in order.split(64)[:3]]
    with pytest.raises(dist.DistributedError, match="64 samples cannot be split evenly among 3 processes"):
        execute(keep, train_set=TensorDataset(x, y), world_size=3)

    rate = 1e-4
    small_steps = make_model()
    optimizer = torch.optim.SGD(small_steps.parameters(), lr=rate)
    for part_x, part_y in zip(x.chunk(4), y.chunk(4), strict=True):
        take_step(optimizer, small_steps(part_x), part_y)
    one_step = make_model()
    before = full_parameters(one_step)
    optimizer = torch.optim.SGD(one_step.parameters(), lr=rate)
    result = execute(scale, optimizer=optimizer, global_batch_size=50, new_global_batch_size=200)
    assert abs(optimizer.param_groups[0]["lr"] - rate) < 1e-12, "the first step is of the old rate"
    for _ in range(100):
        optimizer.step()
        result.warmup.step()
    assert abs(optimizer.param_groups[0]["lr"] - 4 * rate) < 1e-12
    check_schedule_after_warmup(scale, followed)
    F.cross_entropy(one_step(x), y).backward()
    optimizer.step()
    expected, actual = full_parameters(small_steps), full_parameters(one_step)
    for name, start_value in before.items():
        moved = (expected[name] - start_value).norm()
        assert (actual[name] - expected[name]).norm() < 0.01 * moved, name


def check_schedule_after_warmup(scale, followed):
    """From a quarter of the new rate up to it in 100 steps, then 200 steps of half a cosine."""
    optimizer = torch.optim.SGD(make_model().parameters(), lr=1.0)
    first = execute(scale, optimizer=optimizer, global_batch_size=50, new_global_batch_size=200)
    second = execute(followed, optimizer=optimizer, warmup=first.warmup, n_steps=300)
    rates = []
    for _ in range(301):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        second.scheduler.step()
    rising = [1 + 3 * step / 100 for step in range(100)]
    falling = [2 + 2 * math.cos(math.pi * step / 200) for step in range(201)]
    assert rates == pytest.approx(rising + falling, abs=1e-9)


@recipe
def own_sampler():
    """The steps of one process, in any epoch first. The rest is dropped."""
    (block,) = blocks_of("I have a sampler of my own (`WeightedRandomSampler`, buckets)")
    weights = torch.arange(1, 132) / 131
    names = {"train_set": TensorDataset(torch.arange(131)), "weights": weights, "global_batch_size": 10}
    orders = []
    for epoch in (3, 0, 1):
        result = execute(block, **names)
        torch.manual_seed(dist.get_rank())  # the order does not depend on it
        result.sampler.set_epoch(epoch)
        shares = dist.gather_objects([batch.tolist() for (batch,) in result.loader])
        steps = [sorted(first + second) for first, second in zip(*shares, strict=True)]
        order = weights.multinomial(131, True, generator=torch.Generator().manual_seed(epoch))
        assert steps == [sorted(step.tolist()) for step in order.split(10)[:13]]
        assert len(result.sampler) == len(list(result.sampler)) == 65
        assert list(result.sampler) == order[dist.get_rank() : 130 : 2].tolist()
        orders.append(order.tolist())
    assert orders[0] != orders[1] != orders[2]

    buckets = BatchSampler(result.weighted, batch_size=4, drop_last=False)  # 33 of them
    sampler = result.ShareOfOrder(buckets, result.generator)
    shares = dist.gather_objects([batch.tolist() for (batch,) in DataLoader(names["train_set"], batch_sampler=sampler)])
    order = weights.multinomial(131, True, generator=torch.Generator().manual_seed(0)).split(4)
    assert shares == [[bucket.tolist() for bucket in order[rank:32:2]] for rank in range(2)]


class Augmented(Dataset):
    """Each sample is random numbers of three kinds."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()])


@recipe
def loader_processes():
    """No two samples of two ranks with two loader processes each draw the same, in two epochs."""
    block, _ = blocks_of("How many loader processes, and how do I seed augmentation?")
    torch.manual_seed(0)  # the same on all ranks
    sampler = dist.data_sampler(Augmented(), distributed=True, shuffle=True)
    result = execute(block, train_set=Augmented(), sampler=sampler, seed=0)
    drawn = torch.cat([batch for _ in range(2) for batch in result.train_loader])
    drawn = torch.cat(dist.gather(drawn))
    assert drawn.shape == (128, 3)
    for kind in drawn.T:
        assert len(kind.unique()) == 128


@recipe
def augmentation_without_loader_processes():
    """No two samples of two ranks draw the same, in two epochs."""
    _, block = blocks_of("How many loader processes, and how do I seed augmentation?")
    sampler = dist.data_sampler(Augmented(), distributed=True, shuffle=True)
    loader = DataLoader(Augmented(), batch_size=8, sampler=sampler)
    drawn = []

    def train_epoch(epoch):
        drawn.extend(loader)

    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)  # the same on all ranks
    execute(block, epochs=2, train_epoch=train_epoch)
    for kind in torch.cat(dist.gather(torch.cat(drawn))).T:
        assert len(kind.unique()) == len(kind) == 128


@recipe
def iterable_data_set():
    """1003 samples, for two loader processes on each of two ranks: the steps of one process, and each sample once."""
    (block,) = blocks_of("My data set is an `IterableDataset`")
    result = execute(block)
    batches = dist.gather_objects([batch.tolist() for batch in result.loader])
    steps = [sorted(first + second) for first, second in zip(*batches, strict=True)]
    even, odd = (list(range(1003))[reader::2] for reader in range(2))  # of the two loader processes of one process
    assert steps == [part[start : start + 20] for start in range(0, 500, 20) for part in (even, odd)]
    tested = dist.gather_objects([number for batch in result.test_loader for number in batch.tolist()])
    assert tested == [list(range(0, 1003, 2)), list(range(1, 1003, 2))]

    for n in range(81):  # with any number of samples, all ranks take equally many steps, and as many as one process
        result.Stream.samples = lambda stream, n=n: iter(range(n))
        n_steps = len(list(DataLoader(result.Stream(), batch_size=10, drop_last=True)))
        assert dist.gather_objects(n_steps) == [n // 20] * 2


# ---- save, load and resume ------------------------------------------------------------------------------------------


STOP_EARLY = "How do I keep the best weights, stop early, or lower the learning rate when the loss stops falling?"


@recipe
def early_stop():
    """One half of the validation set never gets better, and the other always does: all stop where the mean does.

    The run is interrupted after 3 and after 7 epochs, and continues with the best loss, the count and the rate.
    """
    block, ending = blocks_of(STOP_EARLY)
    block = block.replace("snapshot.pt", "early_stop.pt")
    means = [5, 4, 3, 3.5, 3.5, 2, 3, 3, 3, 3, 1, 1]
    rates = [RATE] * 5 + [RATE / 10] * 3 + [RATE / 100] * 2  # lowered after two epochs that are no better
    losses = [torch.tensor([mean + epoch, mean - epoch] * 4) for epoch, mean in enumerate(means)]  # of eight samples
    trained = []

    def sum_of_validation_losses():
        return losses[trained[-1][0]][dist.get_rank() :: dist.get_world_size()].sum()

    def run(epochs):
        model = make_model()
        optimizer = sgd(model)

        def train_epoch(epoch):
            trained.append((epoch, optimizer.param_groups[0]["lr"]))
            with torch.no_grad():
                model.outer.bias.fill_(epoch)

        names = {"model": model, "ddp_model": dist.prepare_ddp_model(model), "optimizer": optimizer}
        names |= {"train_epoch": train_epoch, "sum_of_validation_losses": sum_of_validation_losses}
        return model, execute(block, **names, epochs=epochs, validation_set=range(8))

    for epochs in (3, 7, len(means), len(means)):  # the last one has stopped already
        model, done = run(epochs)
    assert [epoch for epoch, _ in trained] == list(range(10)), "four epochs after the best one"
    assert [rate for _, rate in trained] == pytest.approx(rates)
    assert (done.best_loss, done.bad_epochs) == (2, 4)
    assert (model.outer.bias == 9).all()
    result = execute(ending, model=model, evaluate=lambda model: model.outer.bias[0].item())
    assert result.test_loss == 5 and (model.outer.bias == 5).all(), "of the best epoch, on all ranks"


@recipe
def two_models():
    """Interrupted after three epochs, both models and optimizers continue."""
    (block,) = blocks_of("How do I resume two models?")
    trained = []

    def run(path, epochs):
        generator, critic = make_model(outputs=6), make_model(outputs=1)
        optimizers = [torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9) for model in (generator, critic)]

        def train_epoch(epoch):
            x, _ = make_batch(seed=epoch)
            for model, optimizer in zip((generator, critic), optimizers, strict=True):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            trained.append(epoch)

        wrapped = {"ddp_generator": dist.prepare_ddp_model(generator), "ddp_critic": dist.prepare_ddp_model(critic)}
        names = {**wrapped, "generator_optimizer": optimizers[0], "critic_optimizer": optimizers[1]}
        execute(block.replace("snapshot.pt", path), **names, train_epoch=train_epoch, epochs=epochs)
        return full_parameters(generator), full_parameters(critic)

    run("two_models.pt", 3)
    resumed = run("two_models.pt", 5)
    assert trained == list(range(5))
    for actual, expected in zip(resumed, run("two_models_at_once.pt", 5), strict=True):
        check_equal(actual, expected, tolerance=0)


class Left(Exception):
    """Instead of the process's end."""


@recipe
def preemption():
    """Preempted in two epochs, and at the end of one, the run ends where one that was not ends, bit for bit."""
    (block,) = blocks_of("How do I save on SIGTERM (preemption) in my own script?")
    before = signal.getsignal(signal.SIGTERM)
    x, y = make_batch(100)
    data = TensorDataset(x[:96], y[:96])  # four steps of two micro-batches of 12 samples
    seen = []

    def run(path, stop_after):
        """Until the end, or until so many steps are done. Returns the parameters."""
        model = make_model()
        torch.manual_seed(17)  # a resumed process draws another first dropout than the others
        ddp_model = dist.prepare_ddp_model(nn.Sequential(model, nn.Dropout(0.5)))
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 12)
        sampler = dist.data_sampler(data, distributed=True, shuffle=True)
        loader = DataLoader(data, batch_size=12 // dist.get_world_size(), sampler=sampler)
        steps = []

        def train_step(micro_batches):
            micro_batches = list(micro_batches)
            assert len(micro_batches) == 2
            optimizer.zero_grad()
            for x, y in micro_batches:
                (F.cross_entropy(ddp_model(x), y) / 2).backward()
                seen.append(x)
            optimizer.step()
            scheduler.step()
            steps.append(optimizer.param_groups[0]["lr"])

        names = {"ddp_model": ddp_model, "optimizer": optimizer, "scheduler": scheduler, "train_step": train_step}
        agreed = mock.Mock(side_effect=lambda: len(steps) == stop_after)
        with (
            mock.patch.object(checkpoint.Preemption, "agreed", agreed),
            mock.patch.object(checkpoint.Preemption, "leave", mock.Mock(side_effect=Left)),
        ):
            left = pytest.raises(Left) if stop_after else contextlib.nullcontext()
            with left:
                execute(block.replace("snapshot.pt", path), **names, sampler=sampler, loader=loader, K=2, epochs=3)
        assert agreed.call_count == len(steps)
        assert signal.getsignal(signal.SIGTERM).__func__ is checkpoint.Preemption.receive
        signal.signal(signal.SIGTERM, before)
        return full_parameters(model)

    try:
        expected = run("not_preempted.pt", None)
        orders = [torch.randperm(96, generator=torch.Generator().manual_seed(epoch)) for epoch in range(3)]
        samples = x[torch.cat([order[dist.get_rank() :: dist.get_world_size()] for order in orders])]
        assert torch.equal(torch.cat(seen), samples)
        seen.clear()
        # In the first epoch, in the second, at its end, and no more. The last run finds that all is done.
        for stop_after in (2, 4, 2, None, None):
            resumed = run("preempted.pt", stop_after)
        check_equal(resumed, expected, tolerance=0)
        assert torch.equal(torch.cat(seen), samples), "each sample once in each epoch"
        check_same_on_all_ranks(resumed)
    finally:
        signal.signal(signal.SIGTERM, before)


def resume(epochs):
    """Run the recipe to resume, to epoch `epochs`, with momentum and a schedule; returns parameters and epochs."""
    block, _ = blocks_of("How do I resume, perhaps with another number of GPUs?")
    torch.manual_seed(dist.get_rank())  # rank 0's weights are taken
    model = Net()
    ddp_model = dist.prepare_ddp_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    trained = []

    def train_epoch(epoch):
        x, y = own(*make_batch(seed=epoch))
        take_step(optimizer, ddp_model(x), y)
        scheduler.step()
        trained.append(epoch)

    names = {"ddp_model": ddp_model, "optimizer": optimizer, "scheduler": scheduler}
    execute(block, **names, train_epoch=train_epoch, epochs=epochs)
    return full_parameters(model), trained


@recipe
def another_number_of_gpus():
    """Two epochs of two processes here. `test_a_run_is_resumed_by_one_process` does the rest."""
    parameters, trained = resume(2)
    assert trained == [0, 1]
    parameters, trained = resume(2)
    assert trained == [], "the next epoch is stored"
    check_same_on_all_ranks(parameters)


@recipe
def resumed_with_another_number_of_epochs():
    """It is refused."""
    _, block = blocks_of("How do I resume, perhaps with another number of GPUs?")
    model = make_model()
    names = {"ddp_model": dist.prepare_ddp_model(model), "seed": 0}

    def rates_of(epochs):
        found = []
        optimizer = sgd(model)

        def train_epoch(epoch):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()

        text = block.replace("snapshot.pt", "with_epochs.pt")
        execute(text, **names, optimizer=optimizer, train_epoch=train_epoch, epochs=epochs)
        return [round(rate / RATE, 3) for rate in found]

    assert rates_of(2) == [1, 0.5]
    with pytest.raises(dist.DistributedError, match="was saved with --epochs 2, not 4"):
        rates_of(4)


@recipe
def asynchronous_save():
    """The checkpoint holds the model of its step, although steps follow at once."""
    block, loading = blocks_of("How do I save without stopping the training?")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = shard(make_model(width=400))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = own(*make_batch())
    history = []

    def train_step():
        take_step(optimizer, model(x), y)
        history.append(full_parameters(model))

    execute(block, fsdp_model=model, optimizer=optimizer, train_step=train_step, steps=9, save_every=3)
    assert len(history) == 9
    for step in (3, 6, 9):
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=f"runs/step-{step}")
        loaded = {name: value.full_tensor() for name, value in state["model"].items()}
        check_equal(loaded, history[step - 1], tolerance=0)

    torch.manual_seed(9)
    resumed = shard(Net(width=400))
    new_optimizer = torch.optim.AdamW(resumed.parameters(), lr=0.5)
    execute(loading, fsdp_model=resumed, optimizer=new_optimizer, last_step=6)
    check_equal(full_parameters(resumed), history[5], tolerance=0)
    for expected in history[6:]:
        take_step(new_optimizer, resumed(x), y)
        check_equal(full_parameters(resumed), expected, tolerance=0)


def split_two_layers(model):
    """Tensor parallel: the first layer by columns, the second by rows."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, make_mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})


def two_layers(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


SHARDED = {"FSDP2": dist.prepare_fsdp_model, "TP": split_two_layers}


@recipe
def weights_of_somebody_else():
    replicated, sharded = blocks_of("How do I load weights that somebody else has saved?")
    weights = two_layers(seed=7).state_dict()
    x, _ = make_batch()
    expected = two_layers(seed=7)(x)
    if dist.is_primary():
        torch.save({f"module.{name}": value for name, value in weights.items()}, "weights.pt")
    model = two_layers(seed=dist.get_rank())
    result = execute(replicated, model=model)
    check_equal(full_parameters(model), weights, tolerance=0)
    assert isinstance(result.ddp_model, nn.parallel.DistributedDataParallel)

    if dist.is_primary():
        torch.save(weights, "weights.pt")
    for name, wrap in SHARDED.items():
        model = wrap(two_layers(seed=dist.get_rank()))
        execute(sharded, sharded_model=model)
        check_equal(full_parameters(model), weights, tolerance=0)
        assert (model(x) - expected).abs().max() < 1e-12, name
        with pytest.raises(RuntimeError):
            model.load_state_dict(weights)


@recipe
def continue_from_one_process():
    """Two steps in one process and two in two processes are four steps in one, with momentum."""
    (block,) = blocks_of("How do I continue from the checkpoint of my script for one GPU?")

    def train(model, optimizer, x, y, steps):
        for _ in range(steps):
            take_step(optimizer, model(x), y)

    x, y = make_batch()
    reference = two_layers(seed=7)
    optimizer = torch.optim.SGD(reference.parameters(), lr=RATE, momentum=0.9)
    train(reference, optimizer, x, y, steps=2)
    if dist.is_primary():
        torch.save({"model": reference.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}, "old.pt")
    dist.barrier()
    train(reference, optimizer, x, y, steps=2)

    model = two_layers(seed=dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    result = execute(block, model=model, optimizer=optimizer)
    assert result.first_epoch == 2
    share = slice(dist.get_rank(), None, dist.get_world_size())
    train(result.ddp_model, optimizer, x[share], y[share], steps=2)
    check_equal(full_parameters(model), full_parameters(reference))


@recipe
def export():
    gathered, converted = blocks_of("How do I export one plain file?")
    os.makedirs("export", exist_ok=True)
    os.chdir("export")  # beside it is a folder "runs" with the steps of another recipe
    for name, wrap in SHARDED.items():
        model = wrap(two_layers(seed=7))
        if name == "FSDP2":
            checkpoint_sharded.save("runs", model, sgd(model), 1)
        execute(gathered, sharded_model=model)
        if dist.is_primary():
            check_equal(torch.load("model.pt", weights_only=True), two_layers(seed=7).state_dict(), tolerance=0)
    if dist.is_primary():
        result = execute(converted)
        check_equal(result.weights, two_layers(seed=7).state_dict(), tolerance=0)
    dist.barrier()
    os.chdir("..")


# ---- memory and speed -----------------------------------------------------------------------------------------------


def train_steps(model, steps=2):
    """Some steps of this rank on its share of a batch."""
    optimizer = sgd(model)
    x, y = own(*make_batch())
    for _ in range(steps):
        take_step(optimizer, model(x), y)
    return full_parameters(model)


def plain_steps(width, steps=2):
    x, y = make_batch()
    return train_alone(make_model(width=width), lambda model: F.cross_entropy(model(x), y), steps)


def compile_with(backend):
    """Let torch.compile use this backend."""
    torch._dynamo.reset()
    return mock.patch.object(torch, "compile", lambda model, *args, **kwargs: COMPILE(model, backend=backend))


COMPILE = torch.compile


@recipe
def compile_under_ddp():
    """The graph is cut at the buckets: more than one MB of gradients needs a second one."""
    from torch._dynamo.testing import CompileCounter

    block, _ = blocks_of("Where do I put `torch.compile`?")
    counter = CompileCounter()
    with compile_with(counter):
        model = make_model(width=400)
        result = execute(block, model=model)
        check_equal(train_steps(result.ddp_model), plain_steps(400))
    assert counter.frame_count > 1, "one graph for each bucket"
    assert list(result.ddp_model.state_dict()) == [f"module.{name}" for name in make_model().state_dict()]


@recipe
def compile_under_fsdp():
    """The two blocks share one graph, and are computed again in backward."""
    from torch._dynamo.testing import CompileCounter

    _, block = blocks_of("Where do I put `torch.compile`?")
    (definition,) = blocks_of("How do I recompute activations in backward to save memory (activation checkpointing)?")
    recompute_in_backward = execute(definition, model=make_model()).recompute_in_backward
    counter = CompileCounter()
    with compile_with(counter):
        model = make_model()
        execute(block, model=model, mesh=make_mesh(), recompute_in_backward=recompute_in_backward)
        check_equal(train_steps(model), plain_steps(16))
    assert counter.frame_count == 1


def recompute_blocks(model):
    (block,) = blocks_of("How do I recompute activations in backward to save memory (activation checkpointing)?")
    execute(block, model=model)


@recipe
def activation_checkpointing():
    """The same gradients under DDP. A block runs again in backward."""
    model, calls = make_model(), []
    model.blocks[0][0].register_forward_pre_hook(lambda *_: calls.append(None))
    recompute_blocks(model)
    check_equal(train_steps(dist.prepare_ddp_model(model)), plain_steps(16))
    assert len(calls) == 2 * 2, "in each of two steps twice"


@recipe
def offload():
    """Each tensor that backward needs is packed."""
    (block,) = blocks_of("How do I move activations to the CPU's memory?")
    model = make_model()
    optimizer = sgd(model)
    packed = []
    save_on_cpu = torch.autograd.graph.save_on_cpu

    class Counting(save_on_cpu):
        def __init__(self, pin_memory):
            super().__init__(pin_memory)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: packed.append(pack(tensor)) or packed[-1]

    x, y = own(*make_batch())
    with mock.patch.object(torch.autograd.graph, "save_on_cpu", Counting):
        execute(block, ddp_model=dist.prepare_ddp_model(model), x=x, y=y)
    optimizer.step()
    check_equal(full_parameters(model), plain_step())
    assert len(packed) > 5


@recipe
def out_of_memory():
    """What each rank holds."""
    (block,) = blocks_of("I am out of memory. What do I do, in which order?")
    model = shard(make_model())
    optimizer = torch.optim.Adam(model.parameters())
    x, y = own(*make_batch())
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    n_params = sum(param.numel() for param in make_model().parameters())
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        result = execute(block, model=model, optimizer=optimizer)
    held = sum(dist.gather_objects(result.megabytes(result.params)))
    assert abs(held - 8 * n_params / 1e6) < 1e-9, "float64, half of it on each of two ranks"
    numbers = re.findall(r"[a-z]+ (\d+\.\d)", stdout.getvalue())
    assert stdout.getvalue().startswith(f"rank {dist.get_rank()}: parameters ") and len(numbers) == 3
    assert abs(result.megabytes(result.gradients) - result.megabytes(result.params)) < 1e-9
    assert abs(result.megabytes(result.state) - 2 * result.megabytes(result.params)) < 0.001


# ---- language models ------------------------------------------------------------------------------------------------


def tiny_llama(change=None):
    """The shards of llm_FSDP.py, the whole model, and the configuration."""
    import language

    import llm_FSDP
    import llm_hub

    config = language.CONFIGS["llama"]()
    config.dtype = torch.float64
    torch.manual_seed(0)
    whole = llm_hub.build_model(config, torch.float64)
    args = types.SimpleNamespace(lora=None, bf16=False, attention="sdpa", recompute=False, compile=False)
    with mock.patch.object(llm_hub, "build_model", changed(llm_hub.build_model, change)):
        if change:
            whole = change(whole) or whole
        return llm_FSDP.make_model(whole, config, llm_hub.types_of(whole), args), copy.deepcopy(whole), args


def changed(build, change):
    def build_changed(*args):
        model = build(*args)
        if change:
            model = change(model) or model
        return model

    return build_changed


def pairs():
    """4 rows of two documents of 10 and 12 tokens. The last 4 and 3 of them are answers."""
    import llm_documents

    draw = torch.Generator().manual_seed(1)
    lists = []
    for _ in range(4):
        found = []
        for length, n_answer in ((10, 4), (12, 3)):
            tokens = torch.randint(0, 256, (length + 1,), generator=draw, dtype=torch.int32).numpy()
            targets = tokens[1:].copy()
            targets[:-n_answer] = llm_documents.IGNORED
            found.append((tokens[:-1], targets))
        lists.append(found)
    return lists, llm_documents.make_rows(lists, 30)


def own_pairs(rows):
    import llm_documents

    return list(llm_documents.share_of(rows, range(len(rows))))


def answer_log_probability(model, document):
    tokens, targets = (torch.tensor(part, dtype=torch.long) for part in document)
    logits = model(tokens[None]).logits[0]
    return -F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def whole_gradients(model):
    return {name: whole(param.grad) for name, param in model.named_parameters() if param.grad is not None}


PREFERENCES = "How do I train on preferences (DPO)?"


@recipe
def preferences():
    """DPO with adapters, against the pairs one after the other, beside a copy of the model as the reference."""
    import llm_hub

    _, block = blocks_of(PREFERENCES)
    names = execute(block)

    def add(model):
        torch.manual_seed(3)
        model = llm_hub.add_lora(model, 2, 4.0)
        for name, param in model.named_parameters():
            if "lora_B" in name and param.device.type != "meta":
                nn.init.normal_(param, std=0.3)
        return model

    model, whole, _ = tiny_llama(add)
    lists, rows = pairs()
    share = names.backward(model, own_pairs(rows))
    loss = 0
    for chosen, rejected in lists:
        with torch.no_grad(), whole.disable_adapter():
            reference = answer_log_probability(whole, chosen) - answer_log_probability(whole, rejected)
        difference = answer_log_probability(whole, chosen) - answer_log_probability(whole, rejected) - reference
        loss = loss - F.logsigmoid(0.1 * difference) / len(lists)
    loss.backward()
    assert abs(dist.all_reduce(share) - loss) < 1e-7 and abs(loss - math.log(2)) > 1e-3
    check_equal(whole_gradients(model), whole_gradients(whole), 1e-7)


@recipe
def reward_model():
    block = blocks_of("How do I train a reward model?")[0]
    names = execute(block)
    model, whole, _ = tiny_llama(names.with_reward_head)
    lists, rows = pairs()
    loss = 0
    for row in own_pairs(rows):
        loss = loss + names.reward_loss(model, row) / len(lists) * dist.get_world_size()
    loss.backward()
    expected = 0
    for found in lists:
        chosen, rejected = (whole(torch.tensor(tokens, dtype=torch.long)[None]).logits[0, -1, 0] for tokens, _ in found)
        expected = expected - F.logsigmoid(chosen - rejected) / len(lists)
    expected.backward()
    check_equal(whole_gradients(model), whole_gradients(whole), 1e-7)


@recipe
def frozen_layers():

    import llm_hub

    (block,) = blocks_of("How do I freeze some layers?")
    names = execute(block, llm_hub=llm_hub)
    model, _, args = tiny_llama(lambda model: names.freeze_first_layers(model, 1))
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if "layers.0." in name or "embed_tokens" in name}
    before = full_parameters(model)
    step_of(model, args)
    for name, value in full_parameters(model).items():
        assert torch.equal(value, before[name]) == (name in frozen), name


def step_of(model, args):
    """One step of SGD on rows of texts; returns the losses' shares."""
    import llm_FSDP

    _, rows = pairs()
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=RATE)
    llm_FSDP.backward(model, own_pairs(rows))
    optimizer.step()


@recipe
def longer_context():
    import language

    import llm_hub

    (block,) = blocks_of("How do I train on a longer context than the model was trained on?")
    config = execute(block).stretch(language.CONFIGS["llama"](), 4)
    assert config.max_position_embeddings == 1024
    plain = llm_hub.build_model(language.CONFIGS["llama"](), torch.float64)
    stretched = llm_hub.build_model(config, torch.float64)
    assert not torch.equal(plain.model.rotary_emb.inv_freq, stretched.model.rotary_emb.inv_freq)
    assert stretched(torch.arange(200).repeat(4)[None]).logits.isfinite().all()


@recipe
def hsdp_of_a_language_model():
    """Two replicas of one shard each give the gradients of two shards."""
    (block,) = blocks_of("How do I shard within a machine and replicate between machines?")
    names = execute(block, init_device_mesh=init_device_mesh)
    expected, _, args = tiny_llama()
    step_of(expected, args)
    with mock.patch("llm_FSDP.init_device_mesh", lambda *sizes: names.make_mesh(2)):
        model, _, _ = tiny_llama()
    placements = next(model.parameters()).placements
    assert [type(placement).__name__ for placement in placements] == ["Replicate", "Shard"]
    step_of(model, args)
    check_equal(full_parameters(model), full_parameters(expected), 1e-7)


# ---- watch, debug and measure ---------------------------------------------------------------------------------------


@recipe
def weights_and_biases():
    """One run, of rank 0, with the mean loss of both ranks."""
    (block,) = blocks_of("How do I use Weights & Biases with several processes?")
    calls = []

    class Run:
        def log(self, values):
            calls.append(values)

        def finish(self):
            calls.append("finished")

    def init(project, config):
        calls.append(project)
        return Run()

    def train_step(x, y):
        return torch.tensor(x + dist.get_rank(), requires_grad=True, dtype=torch.float64)

    batches = [(step, None) for step in range(11)]
    with mock.patch.dict(sys.modules, wandb=types.SimpleNamespace(init=init)):
        execute(block, batches=batches, train_step=train_step)
    expected = ["my project", {"loss": 0.5}, {"loss": 10.5}, "finished"]
    assert calls == (expected if dist.is_primary() else [])


@recipe
def profile_of_a_run():
    """A trace of each rank, of its own: three steps, which all-reduce."""
    (block,) = blocks_of("How do I profile a distributed run?")
    model = dist.prepare_ddp_model(make_model())
    execute(block, train_step=lambda: train_steps(model, 1))
    dist.barrier()
    for rank in range(dist.get_world_size()):
        trace = json.loads(Path(f"trace-{rank}.json").read_text())
        assert trace["distributedInfo"]["rank"] == rank
        names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
        assert names.count("gloo:all_reduce") == 3, names


@recipe
def communication_that_is_not_hidden():
    """Each all-reduce takes 50 ms longer, after backward has computed."""
    (block,) = blocks_of("How much communication is not hidden behind computation?")
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    def slow_hook(state, bucket):
        time.sleep(0.05)
        return allreduce_hook(state, bucket)

    ddp_model = dist.prepare_ddp_model(make_model())
    ddp_model.register_comm_hook(None, slow_hook)
    x, y = own(*make_batch())
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        result = execute(block, ddp_model=ddp_model, x=x, y=y)
    assert all(param.grad.norm() > 0 for param in ddp_model.parameters()), "sums of gradients, as the page says"
    assert 0.04 < result.total - result.alone < 1
    assert result.alone < 0.04
    printed = r"\d\.\d{4} s per step, \d\.\d{4} s of it wait for communication\n"
    assert re.fullmatch(printed if dist.is_primary() else "", stdout.getvalue())


@recipe
def progress_bar():
    """Rank 0 alone draws."""
    (block,) = blocks_of("How do I show one progress bar, and not one per process?")
    drawn = io.StringIO()
    execute(block, tqdm=functools.partial(tqdm, file=drawn), loader=[(1, 2)] * 3)
    assert ("3/3" in drawn.getvalue()) == dist.is_primary()
    assert bool(drawn.getvalue()) == dist.is_primary()


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name, job):
    check_no_error(job, name)


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("name", ["another_number_of_gpus"])
def test_a_run_is_resumed_by_one_process(name, job, tmp_path, monkeypatch):
    """Two epochs of two processes and two of one end where four epochs of one do."""
    check_no_error(job, name)
    with float64():
        monkeypatch.chdir(job)
        resumed, trained = resume(4)
        assert trained == [2, 3]
        monkeypatch.chdir(tmp_path)
        alone, trained = resume(4)
        assert trained == [0, 1, 2, 3]
    check_equal(resumed, alone)


# ---- the data of language models, in one process --------------------------------------------------------------------

CONVERSATION = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4 ü."}]
PAIRS = [{"prompt": f"{n}+1?", "chosen": f"{n + 1}.", "rejected": "No " * n + "idea."} for n in range(60)]


def converted(number, written="chats.jsonl"):
    """The lines that a block under the recipe about formats writes."""
    execute(blocks_of("My data have another format")[number])
    return [json.loads(line) for line in Path(written).read_text().splitlines()]


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_seven_other_formats(in_folder):
    import language

    import llm_documents

    system = {"role": "system", "content": "Be kind."}
    question, answer = (message["content"] for message in CONVERSATION)
    language.write_jsonl(Path("completions.jsonl"), [{"prompt": question, "completion": answer}])
    assert converted(0) == [{"messages": CONVERSATION}]
    turns = zip(("system", "human", "gpt"), (system["content"], question, answer), strict=True)
    turns = [{"from": role, "value": words} for role, words in turns]
    Path("sharegpt.json").write_text(json.dumps([{"id": "1", "conversations": turns}]))
    assert converted(1) == [{"messages": [system, *CONVERSATION]}]
    alpaca = [{"instruction": "Add.", "input": question, "output": answer}]
    alpaca.append({"instruction": question, "input": "", "output": answer})
    Path("alpaca.json").write_text(json.dumps(alpaca))
    asked = {"role": "user", "content": "Add.\n\n2+2?"}
    assert converted(2) == [{"messages": [asked, CONVERSATION[1]]}, {"messages": CONVERSATION}]
    records = list(language.records(5))
    Path("chats.json").write_text(json.dumps(records))
    assert converted(4) == records
    with gzip.open("chats.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in records[:3])
    assert converted(5) == records[:3]
    language.write_jsonl(Path("export.jsonl"), [{"id": 1, "messages": CONVERSATION, "source": "web"}])
    assert converted(6) == [{"messages": CONVERSATION}]
    assert llm_documents.read(llm_documents.lines_of(["chats.jsonl"]), language.byte_tokenizer(), 200)


def test_answers_in_a_prompt_that_is_a_list():
    """The page says how to write them, and what is in the loss then."""
    import language

    import llm_documents

    def in_loss(prompt):
        lines = [("line", json.dumps({"messages": [*prompt, *CONVERSATION]}))]
        (((_, targets),),) = llm_documents.read(lines, language.byte_tokenizer(), 200)
        return language.byte_tokenizer().decode(targets[targets != llm_documents.IGNORED])

    said = CONVERSATION[1]["content"] + "<|end|>"
    assert in_loss(CONVERSATION) == 2 * said
    assert in_loss([{**message, "weight": 0} for message in CONVERSATION]) == said


def test_preference_pairs_become_rows_of_two_documents(in_folder):
    """One in 20 is held out. The longest do not fit, and are left out as a pair."""
    import language

    import llm_documents

    language.write_jsonl(Path("preferences.jsonl"), PAIRS)
    chosen = converted(3, "chosen.jsonl")
    rejected = converted(3, "rejected.jsonl")
    assert [line["messages"][1]["content"] for line in chosen] == [pair["chosen"] for pair in PAIRS]
    assert [line["messages"][1]["content"] for line in rejected] == [pair["rejected"] for pair in PAIRS]
    loading, _ = blocks_of(PREFERENCES)
    names = execute(loading, llm_documents=llm_documents)
    tokenizer = language.byte_tokenizer()
    training, held_out = names.load_documents(tokenizer, ["chosen.jsonl", "rejected.jsonl"], None, 300)
    texts = []
    for row in names.rows_of(training, 300, False).tolist() + names.rows_of(held_out, 300, False).tolist():
        tokens, positions, _ = row
        starts = [place for place, position in enumerate(positions) if position == 0]
        documents_of_row = [tokens[: starts[1]], tokens[starts[1] : starts[2]]]
        texts.append([tokenizer.decode(document) for document in documents_of_row])
        assert set(tokens[starts[2] :]) == {llm_documents.PADDING}
    numbers = [n for n in range(46) if n % 20] + [0, 20, 40]
    expected = []
    for n in numbers:
        prompt = f"<|user|>{n}+1?<|end|><|assistant|>"
        expected.append([f"{prompt}{n + 1}.", f"{prompt}{'No ' * n}idea."])
    assert texts == expected


def test_the_best_checkpoint_becomes_the_newest(in_folder):
    """In a run that was resumed after step 20. Step 25 is not saved."""
    folder = Path("runs/a")
    for step in (10, 20, 30, 40):
        (folder / f"step-{step}").mkdir(parents=True)
    losses = {0: 4.0, 10: 3.0, 20: 2.0001, 25: 0.5, 30: 2.5, 40: 10.0}
    lines = [f"step {step}/40 | held-out {loss:.4f}\n" for step, loss in losses.items()]
    (folder / "held-out.txt").write_text("".join([*lines[:3], *lines[2:]]))
    (block,) = blocks_of("How do I write the result of the best checkpoint?")
    assert execute(block).best == 20
    names = {path.name for path in folder.glob("*[0-9]")}
    assert names == {"step-10", "step-20", "behind-the-best-30", "behind-the-best-40"}


def logits_of(model, n_tokens=259):
    with torch.no_grad():
        return model(torch.arange(40)[None]).logits[..., :n_tokens]


def test_adapters_are_merged(in_folder):
    import language
    import peft
    import transformers

    language.make_folder("llama", Path("base"))
    model = transformers.AutoModelForCausalLM.from_pretrained("base")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    model.save_pretrained("adapters")
    language.byte_tokenizer().save_pretrained("adapters")
    (block,) = blocks_of("How do I merge adapters, or train them further?")
    execute(block)
    merged = transformers.AutoModelForCausalLM.from_pretrained("merged")
    assert (logits_of(merged) - logits_of(model.eval())).abs().max() < 1e-4
    assert not torch.allclose(logits_of(merged), logits_of(model.unload()), atol=0.1)
    assert transformers.AutoTokenizer.from_pretrained("merged").chat_template


def test_tokens_are_added(in_folder):
    import language
    import transformers

    language.make_folder("llama", Path("model"))
    (block,) = blocks_of("How do I add tokens?")
    execute(block)
    model, extended = (transformers.AutoModelForCausalLM.from_pretrained(path) for path in ("model", "extended"))
    assert extended.get_input_embeddings().num_embeddings == 261
    assert torch.equal(logits_of(extended), logits_of(model))
    assert transformers.AutoTokenizer.from_pretrained("extended")("</plan>").input_ids == [260]


# ---- accumulation, on one, two and three processes ------------------------------------------------------------------

ACCUMULATION = "How do I accumulate gradients over several batches?"


def accumulate(local_rank, world_size):
    """Two epochs of the page's two loops. Micro-batches have 12 samples over all processes."""
    dist.init_process_group()
    load, drop, keep = blocks_of(ACCUMULATION)
    results = {}

    def train(name, block, loader, k):
        model = make_model()
        optimizer = sgd(model)
        steps = []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        names = {"ddp_model": dist.prepare_ddp_model(model), "optimizer": optimizer}
        with count_collectives() as counts:
            for epoch in range(2):
                if isinstance(loader, DataLoader):
                    loader.sampler.set_epoch(epoch)
                execute(block, **names, loader=loader, K=k)
        dist.check_in_sync(model)
        results[name] = {"parameters": full_parameters(model), "steps": len(steps), "sent": n_all_reduces(counts)}

    def load_by(block, n_samples, k):
        return execute(block, train_set=TensorDataset(x[:n_samples], y[:n_samples]), K=k, batch_size=12).loader

    def own_parts():
        parts = zip(x[:36].split(12), y[:36].split(12), strict=True)
        return [(part_x[local_rank::world_size], part_y[local_rank::world_size]) for part_x, part_y in parts]

    cut = "len(train_set) // global_batch_size * global_batch_size"
    cut_to_processes = "len(train_set) // world_size * world_size"
    assert f"`Subset(train_set, range({cut_to_processes}))`" in PAGE.read_text() and load.count(cut) == 1
    with float64():
        x, y = make_batch(335)
        train("cut", drop, load_by(load, 119, 2), 2)
        train("left over", drop, own_parts(), 2)  # one micro-batch more than a step has
        train("all samples", keep, load_by(load.replace(cut, cut_to_processes), 126, 3), 3)
    return dist.gather_objects(results)


def steps_of_one_process(n_samples, global_batch_size):
    """The samples of each step of two epochs, the last step with the samples that are left."""
    orders = [torch.randperm(n_samples, generator=torch.Generator().manual_seed(epoch)) for epoch in range(2)]
    return [indices for order in orders for indices in order.split(global_batch_size)]


def train_steps_of(indices_of_steps):
    x, y = make_batch(335)
    model = make_model()
    for indices in indices_of_steps:
        train_alone(model, lambda model, at=indices: F.cross_entropy(model(x[at]), y[at]))
    return full_parameters(model)


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_accumulation(nprocs):
    """Equal to one process that does not accumulate, with one all-reduce of the gradients per step."""
    ranks = dist.launch(accumulate, nprocs=nprocs)
    with float64():
        cut = train_steps_of(steps_of_one_process(119 // 24 * 24, 24))
        left_over = train_steps_of(2 * [torch.arange(24)])
        all_samples = train_steps_of(steps_of_one_process(126, 36))
    sends = nprocs > 1
    for results in ranks:
        check_equal(results["cut"]["parameters"], cut)
        assert (results["cut"]["steps"], results["cut"]["sent"]) == (8, 8 * sends)
        check_equal(results["left over"]["parameters"], left_over)
        assert results["left over"]["steps"] == 2
        check_equal(results["all samples"]["parameters"], all_samples)
        assert (results["all samples"]["steps"], results["all samples"]["sent"]) == (8, 2 * 8 * sends)


# ---- as a user would type it ----------------------------------------------------------------------------------------


def write_script(folder, source):
    """A folder with train.py, and the two files beside it that it needs."""
    for name in ("distributed.py", "spawn.py"):
        shutil.copy(ROOT / name, folder)
    (folder / "train.py").write_text(source)


@pytest.mark.slow
def test_two_cells_of_a_notebook(tmp_path):
    first, second = blocks_of("How do I train on several GPUs from a notebook?", "text")
    magic, _, source = first.partition("\n")
    assert magic == "%%writefile train.py" and second == "!python train.py\n"
    write_script(tmp_path, source)
    status, stdout, stderr = run("train.py", cwd=tmp_path, env={"PYTHONPATH": ""})
    assert status == 0 and not stderr, stderr
    assert sorted(re.findall(r"rank \d of 2", stdout)) == ["rank 0 of 2", "rank 1 of 2"]


class Trial:
    """Instead of Optuna's: what the recipe uses of it."""

    def __init__(self, lr):
        self.lr = lr

    def suggest_float(self, name, low, high, log):
        assert (name, log) == ("lr", True) and low <= self.lr <= high
        return self.lr


class Study:
    def optimize(self, objective, n_trials):
        assert n_trials == 20
        losses = {lr: objective(Trial(lr)) for lr in (0.002, 0.1)}
        self.best_params = {"lr": min(losses, key=losses.get)}


def test_a_search_for_hyperparameters(tmp_path, monkeypatch, capfd):
    """Each trial is a job of two processes, and its loss comes back."""
    (block,) = blocks_of("How do I search for hyperparameters (Optuna)?")
    (tmp_path / "search.py").write_text(block.replace('if __name__ == "__main__":', "def search():"))
    (tmp_path / "optuna.py").write_text("create_study = None")
    monkeypatch.syspath_prepend(tmp_path)
    import optuna
    import search

    monkeypatch.setattr(optuna, "create_study", Study)
    search.search()
    assert capfd.readouterr().out == "{'lr': 0.1}\n"


SCRIPT_TO_DEBUG = """import torch.distributed as torch_dist

import distributed as dist


def main(local_rank, world_size):
    dist.init_process_group()
    value = 40 + local_rank
    {line}
    print(f"rank {local_rank} continues", flush=True)


if __name__ == "__main__":
    dist.launch(main, nprocs=2)
"""


@pytest.mark.slow
def test_a_breakpoint_on_one_rank(tmp_path):
    """In a terminal."""
    (block,) = blocks_of("How do I stop in a debugger on one rank?")
    write_script(tmp_path, SCRIPT_TO_DEBUG.replace("{line}", block.strip()))
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": ""}
    command = [sys.executable, "train.py"]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, **streams)
    os.close(theirs)
    try:
        read_until(ours, "(Pdb) ")
        for line, answer in (("up", "-> torch_dist.breakpoint(rank=1)"), ("p value * 2", "82")):
            os.write(ours, f"{line}\n".encode())
            assert answer in read_until(ours, "(Pdb) ")
        os.write(ours, b"c\n")
        printed = read_until(ours, "continues", 2)
        assert "rank 0 continues" in printed and "rank 1 continues" in printed
        assert process.wait(timeout=60) == 0
    finally:
        process.terminate()
        os.close(ours)


def read_until(terminal, text, times=1):
    """What a terminal prints until it has printed `text`."""
    printed = ""
    end = time.monotonic() + 120
    while printed.count(text) < times:
        assert time.monotonic() < end, printed
        if select.select([terminal], [], [], 1)[0]:
            printed += os.read(terminal, 4096).decode()
    return printed


@pytest.mark.slow
def test_two_terminals(tmp_path):
    (block,) = blocks_of("How do I stop in a debugger on one rank?", "text")
    write_script(tmp_path, SCRIPT_TO_DEBUG.replace("{line}", "pass"))
    first, second = block.replace("29500", str(free_port())).replace("python", sys.executable).splitlines()
    environment = {**os.environ, "PYTHONPATH": ""}
    options = {"cwd": tmp_path, "env": environment, "text": True, "shell": True, "stdout": subprocess.PIPE}
    with subprocess.Popen(first, stdin=subprocess.DEVNULL, **options) as rank_0:
        rank_1 = subprocess.run(second, input="b 9\nc\np value * 2\nc\nq\n", timeout=120, **options)
        stdout, _ = rank_0.communicate(timeout=60)
    assert stdout == "rank 0 continues\n" and rank_0.returncode == 0
    assert "(Pdb) 82\n" in rank_1.stdout and "rank 1 continues" in rank_1.stdout
