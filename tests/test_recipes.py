"""Every block of docs/recipes.md runs on two processes, and keeps what the page promises.

All recipes that are selected run in one job, one after the other.
"""

import contextlib
import copy
import io
import linecache
import random
import re
import shutil
import signal
import sys
import time
import types
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from conftest import ROOT, Left, Watch, float64, leaving_is_an_error, on_processes, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset
from transformer import full_parameters

import checkpoint_sharded
import distributed as dist

PAGE = ROOT / "docs" / "recipes.md"
RATE = 0.1


def recipe(check):
    """A guard, in float64."""
    test = on_processes(2)(float64()(check))
    return pytest.mark.guard(pytest.mark.slow(test))


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
    with Watch() as counter:
        yield counts
    for operation, count in counter.counts.items():
        name = operation.partition(".")[2].strip("_").replace("_base", "")
        counts[name] = counts.get(name, 0) + count


def n_all_reduces(counts):
    return counts.get("allreduce", 0)


# ---- the training step ----------------------------------------------------------------------------------------------


def own_micro_batches():
    """Three of this rank, which together with the other's are the global batch."""
    x, y = own(*make_batch())
    return list(zip(x.chunk(3), y.chunk(3), strict=True))


@recipe
def test_accumulation():
    """Two epochs equal one process that does not accumulate, with one all-reduce per step. Also without DDP."""
    load, block = blocks_of("How do I accumulate gradients over several batches?")
    x, y = make_batch(119)  # four steps of 24 samples, and the rest
    loader = execute(load, train_set=TensorDataset(x, y), K=2, batch_size=12).loader
    cut = []
    steps = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        cut.append(list(loader))
        steps += torch.randperm(96, generator=torch.Generator().manual_seed(epoch)).split(24)
    three = list(zip(x[:36].split(12), y[:36].split(12), strict=True))  # one more than a step has
    left_over = 2 * [[own(*micro_batch) for micro_batch in three]]
    plain = 2 * [torch.arange(24)]
    cases = [(cut, steps, 2, len(steps)), (left_over, plain, 2, 2), (2 * [three], plain, 1, 0)]
    for epochs, steps, n_processes, n_sends in cases:
        model, alone, stepped = make_model(), make_model(), []
        ddp_model = dist.prepare_ddp_model(model) if n_processes > 1 else model
        optimizer = sgd(model)
        optimizer.register_step_post_hook(lambda *_, stepped=stepped: stepped.append(1))
        with count_collectives() as counts:
            for batches in epochs:
                names = {"optimizer": optimizer, "loader": batches, "K": 2, "world_size": n_processes}
                execute(block, ddp_model=ddp_model, **names)
        for indices in steps:
            train_alone(alone, lambda model, at=indices: F.cross_entropy(model(x[at]), y[at]))
        check_equal(full_parameters(model), full_parameters(alone))
        assert (len(stepped), n_all_reduces(counts)) == (len(steps), n_sends)


@recipe
def test_accumulation_under_fsdp():
    """And under HSDP, with two replicas of one shard each: each of three units is sent once."""
    (block,) = blocks_of("How do I accumulate gradients under FSDP2?")
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    changed = block.replace("set_requires_gradient_sync", "set_requires_all_reduce")
    for text, mesh, sent in ((block, None, "reduce_scatter"), (changed, replicas, "allreduce")):
        model = shard(make_model(), mesh)
        with count_collectives() as counts:
            execute(text, fsdp_model=model, optimizer=sgd(model), micro_batches=own_micro_batches())
        check_equal(full_parameters(model), plain_step())
        assert counts[sent] == 3


@recipe
def test_unequal_numbers():
    """Rank 0 has 2 samples and rank 1 has 10."""
    (block,) = blocks_of("My batches have unequal numbers of samples or tokens. How do I average the loss?")
    model = make_model()
    x, y = (tensor.split([2, 10])[dist.get_rank()] for tensor in make_batch())
    result = execute(block, ddp_model=dist.prepare_ddp_model(model), optimizer=sgd(model), x=x, y=y)
    check_equal(full_parameters(model), plain_step())
    x, y = make_batch()
    assert (result.total_loss - F.cross_entropy(make_model()(x), y)).abs() < 1e-12


@recipe
def test_norm_of_gradients():
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
def test_unused_parameters():
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
def test_drawing_under_fsdp():
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


class TwoTowers(nn.Module):
    """Features of two kinds, as of images and of texts."""

    def __init__(self):
        super().__init__()
        self.images = nn.Linear(6, 4)
        self.texts = nn.Linear(6, 4)

    def forward(self, x):
        return self.images(x), self.texts(x.flip(1))


@recipe
def test_contrastive_loss():
    (block,) = blocks_of("My loss compares each sample with all others (contrastive loss). What do I gather?")
    x, _ = make_batch()

    def whole_loss(model):
        images, texts = model(x)
        targets = torch.arange(len(x))
        return F.cross_entropy(images @ texts.T, targets) + F.cross_entropy(texts @ images.T, targets)

    def make():
        torch.manual_seed(1)
        return TwoTowers()

    model = make()
    optimizer = sgd(model)
    (x_own,) = own(x)
    execute(block, ddp_model=dist.prepare_ddp_model(model), x=x_own)
    optimizer.step()
    check_equal(full_parameters(model), train_alone(make(), whole_loss))


@recipe
def test_global_sums():
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


def batch_norms():
    """The classes of the recipe."""
    (block,) = blocks_of("How do I use BatchNorm?")
    (sums,) = blocks_of("A loss over the global batch")
    return execute(sums.partition("\n\n\n")[0] + "\n\n\n" + block)


@recipe
def test_batch_norm_of_images_and_under_autocast():
    """Images as torch's layer does; under autocast the statistics are float32, and the output has the input's type."""
    classes = batch_norms()
    images = torch.randn(12, 4, 3, 5, generator=torch.Generator().manual_seed(1))
    alone, layer = nn.BatchNorm2d(4), classes.GlobalBatchNorm2d(4)
    share = slice(0, 7) if dist.is_primary() else slice(7, 12)
    assert torch.allclose(layer(images[share]), alone(images)[share], rtol=0, atol=1e-12)
    check_equal(dict(layer.named_buffers()), dict(alone.named_buffers()))
    assert torch.allclose(layer.eval()(images), alone.eval()(images), rtol=0, atol=1e-12)
    model = nn.Sequential(nn.Linear(4, 4), classes.GlobalBatchNorm1d(4)).float()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(torch.randn(8, 4, dtype=torch.float32))
    outputs.sum().backward()
    assert outputs.dtype == torch.bfloat16 and model[1].running_mean.dtype == torch.float32


@recipe
def test_batch_norm():
    """The statistics of the global batch, forward and backward, with shares of 7 and 5 samples."""
    (quoted,) = re.findall(r"such a model raises `(.*?)`", " ".join(PAGE.read_text().split()))
    classes = batch_norms()
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


@recipe
def test_buffers_of_forward():
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
def test_noise_of_the_global_batch():
    (block,) = blocks_of("My model gets noise or random times (diffusion)")
    names = {"seed": 3, "step": 4, "global_batch_size": 6}
    found = execute(block, x=torch.zeros(3, 2, 5), **names)
    whole = execute(block, x=torch.zeros(6, 2, 5), **names, rank=0, world_size=1)
    assert found.noise.shape == (3, 2, 5) and found.times.shape == (3,)
    assert torch.equal(found.noise, whole.noise[dist.get_rank() :: 2])
    assert torch.equal(found.times, whole.times[dist.get_rank() :: 2])


@recipe
def test_moving_average():
    """Of a sharded model and of BatchNorm's buffers."""
    (sharded,) = blocks_of("How do I keep an exponential moving average (EMA) of the weights?")

    def make():
        torch.manual_seed(1)
        return nn.Sequential(Net(), nn.BatchNorm1d(5))

    batches = [make_batch(seed=seed) for seed in range(4)]

    def make_sharded():
        return fully_shard(make().eval(), mesh=make_mesh())

    alone, model, ema_model = make().eval(), make_sharded(), make_sharded()
    start = {name: param.detach().clone() for name, param in alone.named_parameters()}
    average = start
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
        averaged = full_parameters(ema_model)
        check_equal({name: averaged[name] for name in average}, average)
        assert ema_model[1].num_batches_tracked == number
    moved = max((average[name] - start[name]).abs().max() for name in average)
    assert moved > 1e-4


def critic_loss(scores):
    """The first half of the scores are of real samples."""
    real, fake = scores.chunk(2)
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def generator_loss(scores):
    return F.softplus(-scores).mean()


@recipe
def test_two_optimizers():
    block, _ = blocks_of("My script has two models and two optimizers, like a GAN. What do I wrap?")
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


@recipe
def test_samples_of_a_generator_that_communicates():
    """Rank 0 alone draws them, and does not wait for rank 1."""
    _, block = blocks_of("My script has two models and two optimizers, like a GAN. What do I wrap?")
    generator = nn.Sequential(nn.Linear(3, 4), batch_norms().GlobalBatchNorm1d(4))
    fixed_noise = torch.randn(5, 3)
    if dist.is_primary():
        samples = execute(block, generator=generator, fixed_noise=fixed_noise).samples
        assert torch.equal(samples, generator.eval()(fixed_noise)) and not samples.requires_grad


@recipe
def test_grad_scaler():
    """Equal to one process without a scaler; an overflow on rank 1 makes both skip the step, and halves both scales."""
    (block,) = blocks_of("How do I train in float16 with a GradScaler?")
    x, y = make_batch()
    alone = make_model()
    optimizer = sgd(alone)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), max_norm=0.1)
        optimizer.step()
    expected = full_parameters(alone)
    model = make_model()
    names = {"model": model, "ddp_model": dist.prepare_ddp_model(model), "optimizer": sgd(model)}
    own_batch = own(x, y)
    execute(block.replace("torch.float16", "torch.float16, enabled=False"), batches=3 * [own_batch], **names)
    check_equal(full_parameters(model), expected)
    overflow = own_batch[0] / (0 if dist.get_rank() == 1 else 1), own_batch[1]
    found = execute(block.replace("torch.float16", "torch.float16, enabled=False"), batches=[overflow], **names)
    check_equal(full_parameters(model), expected)
    assert found.epoch == 1 and found.scaler.get_scale() == 2.0**15


@recipe
def test_unfreezing():
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


def area_under_curve(labels, scores):
    """In how many pairs of a sample of class 1 and another one the first has the higher score."""
    scores = scores.softmax(dim=1)[:, 1]
    return (scores[labels == 1][:, None] > scores[labels != 1]).double().mean().item()


@recipe
def test_metric_of_all_predictions():
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
def test_download():
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
def test_own_sampler():
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
def test_loader_processes():
    """No two samples of two ranks with two loader processes each draw the same, in two epochs."""
    (block,) = blocks_of("How many loader processes, and how do I seed augmentation?")
    torch.manual_seed(0)  # the same on all ranks
    sampler = dist.data_sampler(Augmented(), distributed=True, shuffle=True)
    result = execute(block, train_set=Augmented(), sampler=sampler, seed=0)
    drawn = torch.cat([batch for _ in range(2) for batch in result.train_loader])
    drawn = torch.cat(dist.gather(drawn))
    assert drawn.shape == (128, 3)
    for kind in drawn.T:
        assert len(kind.unique()) == 128


@recipe
def test_iterable_data_set():
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
def test_early_stop():
    """One half of the validation set never gets better, and the other always does: all stop where the mean does.

    The run is interrupted after 3 and after 7 epochs, and continues with the best loss, the count and the rate.
    """
    block, ending = blocks_of(STOP_EARLY)
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
def test_preemption():
    """Preempted in two epochs, and at the end of one, the run ends where one that was not ends, bit for bit."""
    (block,) = blocks_of("How do I save on SIGTERM (preemption) in my own script?")
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
            if len(steps) + 1 == stop_after and dist.is_primary():  # all ranks stop one step later
                signal.raise_signal(signal.SIGTERM)

        names = {"ddp_model": ddp_model, "optimizer": optimizer, "scheduler": scheduler, "train_step": train_step}
        names |= {"sampler": sampler, "loader": loader}
        with leaving_is_an_error(), pytest.raises(Left) if stop_after else contextlib.nullcontext():
            execute(block.replace("snapshot.pt", path), **names, K=2, epochs=3)
        assert not stop_after or len(steps) == stop_after
        return full_parameters(model)

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


@recipe
def test_another_number_of_gpus():
    """Two epochs of two processes, and two of one, end where four epochs of one do."""
    (block,) = blocks_of("How do I resume, perhaps with another number of GPUs?")

    def resume(epochs, path, alone=False):
        """Run the recipe to epoch `epochs`, with momentum and a schedule; returns parameters and epochs.

        To train `alone`, each process computes the whole batch.
        """
        torch.manual_seed(0 if alone else dist.get_rank())  # rank 0's weights are taken
        model, trained = Net(), []
        ddp_model = model if alone else dist.prepare_ddp_model(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        def train_epoch(epoch):
            batch = make_batch(seed=epoch)
            x, y = batch if alone else own(*batch)
            take_step(optimizer, ddp_model(x), y)
            scheduler.step()
            trained.append(epoch)

        names = {"ddp_model": ddp_model, "optimizer": optimizer, "scheduler": scheduler}
        execute(block.replace("snapshot.pt", path), **names, train_epoch=train_epoch, epochs=epochs)
        return full_parameters(model), trained

    assert resume(2, "two.pt")[1] == [0, 1]
    parameters, trained = resume(2, "two.pt")
    assert trained == [], "the next epoch is stored"
    check_same_on_all_ranks(parameters)
    resumed, trained = resume(4, "two.pt", alone=True)
    assert trained == [2, 3]
    expected, trained = resume(4, "one.pt", alone=True)
    assert trained == [0, 1, 2, 3]
    check_equal(resumed, expected)


def split_two_layers(model):
    """Tensor parallel: the first layer by columns, the second by rows."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, make_mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})


def two_layers(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


SHARDED = {"FSDP2": dist.prepare_fsdp_model, "TP": split_two_layers}


@recipe
def test_weights_of_somebody_else():
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
def test_export():
    gathered, converted = blocks_of("How do I export one plain file?")
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
def test_compile_under_ddp():
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
def test_compile_under_fsdp():
    """The two blocks share one graph, and are computed again in backward. torch compiles no partial."""
    from torch._dynamo.testing import CompileCounter

    _, block = blocks_of("Where do I put `torch.compile`?")
    partial = "import functools\n\n" + block.replace(
        "recompute_in_backward(block)\n    block.compile",
        "block.forward = functools.partial(recompute, block.forward, use_reentrant=False)\n    block.compile",
    )
    assert partial.count("partial") == 1
    for text, n_graphs in ((block, 1), (partial, 0)):
        counter = CompileCounter()
        with compile_with(counter):
            model = make_model()
            names = execute(text, model=model, mesh=make_mesh())
            check_equal(train_steps(model), plain_steps(16))
        assert counter.frame_count == n_graphs

    model, calls = make_model(), []
    model.blocks[0][0].register_forward_pre_hook(lambda *_: calls.append(None))
    for each in model.blocks:
        names.recompute_in_backward(each)
    check_equal(train_steps(dist.prepare_ddp_model(model)), plain_steps(16))
    assert len(calls) == 2 * 2, "in each of two steps twice"


# ---- watch, debug and measure ---------------------------------------------------------------------------------------


@recipe
def test_communication_that_is_not_hidden():
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


# ---- as a user would type it ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_cells_of_a_notebook(tmp_path):
    first, second = blocks_of("How do I train on several GPUs from a notebook?", "text")
    magic, _, source = first.partition("\n")
    assert magic == "%%writefile train.py" and second == "!python train.py\n"
    for name in ("distributed.py", "spawn.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "train.py").write_text(source)
    status, stdout, stderr = run("train.py", cwd=tmp_path, env={"PYTHONPATH": ""})
    assert status == 0 and not stderr, stderr
    assert sorted(re.findall(r"rank \d of 2", stdout)) == ["rank 0 of 2", "rank 1 of 2"]
