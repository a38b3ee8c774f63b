"""Every block of docs/recipes.md runs on two processes, and two of docs/port.md. They keep what the pages promise.

All recipes that are selected run in one job, one after the other.
"""

import contextlib
import functools
import linecache
import random
import re
import shutil
import signal
import time
import types

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from conftest import ROOT, Left, Watch, float64, leaving_is_an_error, on_processes, run, whole
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset
from transformer import full_parameters

import checkpoint_sharded
import distributed as dist

PAGES = "\n".join((ROOT / "docs" / name).read_text() for name in ("recipes.md", "port.md"))
RATE = 0.1


# ---- the page -------------------------------------------------------------------------------------------------------


def blocks_of(heading, language="python"):
    """The code blocks under a heading of the pages, each as it is printed."""
    section = re.split(rf"^##+ {re.escape(heading)}\n", PAGES, maxsplit=1, flags=re.M)[1]
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
    path = f"<{block.splitlines()[0]} of the docs>"
    linecache.cache[path] = (len(block), None, block.splitlines(keepends=True), path)  # so that tracebacks show lines
    exec(compile(block, path, "exec"), namespace)
    return types.SimpleNamespace(**namespace)


def recipe(heading, *numbers):
    """Make a guard of a function of the blocks under a heading, in float64. Two ranks call it, or so many."""

    def decorate(check):
        bound = functools.partial(float64()(check), *blocks_of(heading))
        functools.update_wrapper(bound, check)
        del bound.__wrapped__  # else inspect.signature would show the blocks as parameters that pytest must give
        return pytest.mark.guard(pytest.mark.slow(on_processes(*(numbers or [2]))(bound)))

    return decorate


# ---- what the recipes train, and one process of plain PyTorch -------------------------------------------------------


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


def make(build, *args, seed=1, **kwargs):
    """The same weights each time."""
    torch.manual_seed(seed)
    return build(*args, **kwargs)


def make_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard(model, mesh=None):
    mesh = mesh or make_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_batch(n=12, seed=2):
    """A global batch, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=generator), torch.randint(5, (n,), generator=generator)


def own(*tensors):
    """This rank's share of a global batch."""
    return [tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in tensors]


def unequal(*tensors):
    """A share of a global batch of twelve: rank 0 has two samples, and rank 1 has ten."""
    return [tensor.split([2, 10])[dist.get_rank()] for tensor in tensors]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=RATE)


def loss_of(model, x, y):
    return F.cross_entropy(model(x), y)


def train(model, batches, optimizer=None, loss_of=loss_of):
    """A step on each batch; returns the parameters. If the model is wrapped or sharded, all ranks call it."""
    optimizer = optimizer or sgd(model)
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return full_parameters(model)


def gradients(model):
    return {name: whole(param.grad) for name, param in model.named_parameters()}


def check_equal(actual, expected, tolerance=1e-12):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        difference = (actual[name] - value).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference}"


# ---- the training step ----------------------------------------------------------------------------------------------


@recipe("How do I accumulate gradients over several batches?", 1, 2)
def test_accumulation(load, block):
    """Two epochs equal a loop that does not accumulate, with one all-reduce per step. What is left over is dropped."""
    x, y = make_batch(119)  # four steps of 24 samples, and the rest
    loader = execute(load, train_set=TensorDataset(x, y), K=2, batch_size=12).loader
    model = make(Net)
    names = {"ddp_model": dist.prepare_ddp_model(model), "optimizer": sgd(model), "K": 2}
    steps = []
    with Watch() as watch:
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            execute(block, **names, loader=[*loader, own(*make_batch())])
            steps += torch.randperm(96, generator=torch.Generator().manual_seed(epoch)).split(24)
    check_equal(full_parameters(model), train(make(Net), [(x[samples], y[samples]) for samples in steps]))
    assert watch.counts["c10d.allreduce_"] == (len(steps) if dist.get_world_size() > 1 else 0)


@recipe("How do I accumulate gradients under FSDP2?")
def test_accumulation_under_fsdp(block):
    """And under HSDP, with two replicas of one shard each: each of three units is sent once."""
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    changed = block.replace("set_requires_gradient_sync", "set_requires_all_reduce")
    micro_batches = list(zip(*[part.chunk(3) for part in own(*make_batch())], strict=True))
    for text, mesh, sent in ((block, None, "_reduce_scatter_base_"), (changed, replicas, "allreduce_")):
        model = shard(make(Net), mesh)
        with Watch() as watch:
            execute(text, fsdp_model=model, optimizer=sgd(model), micro_batches=micro_batches)
        check_equal(full_parameters(model), train(make(Net), [make_batch()]))
        assert watch.counts[f"c10d.{sent}"] == 3


@recipe("My batches have unequal numbers of samples or tokens. How do I average the loss?")
def test_unequal_numbers(block):
    model = make(Net)
    x, y = unequal(*make_batch())
    result = execute(block, ddp_model=dist.prepare_ddp_model(model), optimizer=sgd(model), x=x, y=y)
    check_equal(full_parameters(model), train(make(Net), [make_batch()]))
    assert (result.total_loss - loss_of(make(Net), *make_batch())).abs() < 1e-12


@recipe("How do I clip gradients and log their norm?")
def test_norm_of_gradients(block):
    alone, model = make(Net), shard(make(Net))
    loss_of(alone, *make_batch()).backward()
    norm = nn.utils.clip_grad_norm_(alone.parameters(), max_norm=0.1)
    assert norm > 0.2, "they are clipped"
    sgd(alone).step()

    loss_of(model, *own(*make_batch())).backward()
    result = execute(block, fsdp_model=model, optimizer=sgd(model))
    check_equal(full_parameters(model), full_parameters(alone))
    assert type(result.norm) is torch.Tensor and (result.norm - norm).abs() < 1e-12


class SkipsBlocks(Net):
    """If the batch is small."""

    def forward(self, x):
        return self.outer(self.inner(x)) if len(x) < 3 else super().forward(x)


@recipe("DDP says that it expected to have finished reduction. What is wrong?")
def test_unused_parameters(block):
    """Rank 0 does not use the blocks."""
    alone, model = make(SkipsBlocks), make(SkipsBlocks)
    x, y = unequal(*make_batch())
    result = execute(block, model=model, x=x, y=y)
    loss_of(result.ddp_model, x, y).backward()  # a second one
    for share in 2 * dist.gather_objects((x, y)):
        (loss_of(alone, *share) / 2).backward()
    check_equal(gradients(model), gradients(alone))


@recipe("How do I draw answers or samples from a model under FSDP2?")
def test_drawing_under_fsdp(block):
    """Rank 1 takes five forwards, and rank 0 one."""
    model, plain_model = shard(make(Net)), make(Net, seed=2)
    x, _ = make_batch()
    watch = Watch()

    def draw(model):
        with watch:
            for _ in range(4 * dist.get_rank()):
                model(x)
            return model(x)

    result = execute(block, fsdp_model=model, plain_model=plain_model, draw=draw)
    assert not watch.counts, "it communicates nothing"
    check_equal(full_parameters(plain_model), full_parameters(model))
    assert (result.answers - model(x)).abs().max() < 1e-12


class TwoTowers(nn.Module):
    """Features of two kinds, as of images and of texts."""

    def __init__(self):
        super().__init__()
        self.images = nn.Linear(6, 4)
        self.texts = nn.Linear(6, 4)

    def forward(self, x):
        return self.images(x), self.texts(x.flip(1))


@recipe("My loss compares each sample with all others (contrastive loss). What do I gather?")
def test_contrastive_loss(block):
    alone, model = make(TwoTowers), make(TwoTowers)
    x, _ = make_batch()
    images, texts = alone(x)
    targets = torch.arange(len(x))
    (F.cross_entropy(images @ texts.T, targets) + F.cross_entropy(texts @ images.T, targets)).backward()
    execute(block, ddp_model=dist.prepare_ddp_model(model), x=own(x)[0])
    check_equal(gradients(model), gradients(alone))


SUMS = "A loss over the global batch"


@recipe(SUMS)
def test_global_sums(block):
    """The Dice loss of a batch of which rank 1 has another share of ones."""
    alone, model = make(Net, outputs=1), make(Net, outputs=1)
    x, y = make_batch()
    y = (y > 2).double()[:, None]
    probability = alone(x).sigmoid()
    loss = 1 - 2 * (probability * y).sum() / (probability.sum() + y.sum())
    loss.backward()
    x, y = own(x, y)
    result = execute(block, ddp_model=dist.prepare_ddp_model(model), x=x, y=y)
    assert (result.loss - loss).abs() < 1e-15
    check_equal(gradients(model), gradients(alone))


def batch_norms(block):
    """The classes of the recipe."""
    (sums,) = blocks_of(SUMS)
    return execute(sums.partition("\n\n\n")[0] + "\n\n\n" + block)


BATCH_NORM = "How do I use BatchNorm?"


@recipe(BATCH_NORM)
@pytest.mark.parametrize("shape", [(24,), (4, 2, 3)])
def test_batch_norm(block, shape):
    """The statistics of the global batch, forward and backward, of features and of images, with unequal shares."""

    def network(layer):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 24), nn.Unflatten(1, shape), layer, nn.Flatten(), nn.Linear(24, 5))

    def mean_loss(model, x, y):
        return F.cross_entropy(model(x), y, reduction="sum") / 12 * dist.get_world_size()

    kind = "BatchNorm2d" if len(shape) > 1 else "BatchNorm1d"
    alone = network(getattr(nn, kind)(shape[0]))
    model = network(getattr(batch_norms(block), f"Global{kind}")(shape[0]))
    x, y = make_batch()
    expected = train(alone, 3 * [(x, y)])
    check_equal(train(dist.prepare_ddp_model(model), 3 * [unequal(x, y)], loss_of=mean_loss), expected)
    assert torch.allclose(model.eval()(x), alone.eval()(x), rtol=0, atol=1e-12)


@recipe(BATCH_NORM)
def test_batch_norm_under_autocast(block):
    """The statistics are float32, and the output has the input's type."""
    model = nn.Sequential(nn.Linear(4, 4), batch_norms(block).GlobalBatchNorm1d(4)).float()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(torch.randn(8, 4, dtype=torch.float32))
    outputs.sum().backward()
    assert outputs.dtype == torch.bfloat16 and model[1].running_mean.dtype == torch.float32


@recipe("My forward updates buffers: a codebook, centres, a queue")
def test_buffers_of_forward(block):
    """A codebook of which each process has seen a share."""

    class Autoencoder(nn.Module):
        def __init__(self, dist):
            super().__init__()
            self.encoder = nn.Linear(6, 6)
            self.codebook = execute(block, dist=dist).Codebook(8, 6)

        def forward(self, x):
            return self.codebook(self.encoder(x))

    def loss_of(model, x, y):
        quantized, loss = model(x)
        return F.mse_loss(quantized, x) + loss

    batches = [make_batch(seed=seed) for seed in range(5)]
    one_process = types.SimpleNamespace(all_reduce=lambda tensor: tensor)
    expected = train(make(Autoencoder, one_process), batches, loss_of=loss_of)
    ddp_model = dist.prepare_ddp_model(make(Autoencoder, dist))
    check_equal(train(ddp_model, [own(*batch) for batch in batches], loss_of=loss_of), expected)


@recipe("My model gets noise or random times (diffusion)")
def test_noise_of_the_global_batch(block):
    names = {"seed": 3, "step": 4, "global_batch_size": 6}
    found = execute(block, x=torch.zeros(3, 2, 5), **names)
    expected = execute(block, x=torch.zeros(6, 2, 5), **names, rank=0, world_size=1)
    assert found.noise.shape == (3, 2, 5) and found.times.shape == (3,)
    assert torch.equal(found.noise, expected.noise[dist.get_rank() :: 2])
    assert torch.equal(found.times, expected.times[dist.get_rank() :: 2])


@recipe("How do I keep an exponential moving average (EMA) of the weights?")
def test_moving_average(block):
    """Of a sharded model and of BatchNorm's buffers."""

    def make_network():
        torch.manual_seed(1)
        return nn.Sequential(Net(), nn.BatchNorm1d(5)).eval()

    alone = make_network()
    average = full_parameters(alone)
    model, ema_model = (fully_shard(make_network(), mesh=make_mesh()) for _ in range(2))
    for seed in range(4):
        batch = make_batch(seed=seed)
        after = train(alone, [batch])
        average = {name: 0.99 * average[name] + 0.01 * after[name] for name in average}
        average["1.num_batches_tracked"] = seed
        train(model, [own(*batch)])
        model[1].num_batches_tracked.fill_(seed)
        with Watch() as watch:
            execute(block, fsdp_model=model, ema_model=ema_model)
        assert not watch.counts, "the average sends nothing"
        check_equal(full_parameters(ema_model), average)


def critic_loss(scores):
    """The first half of the scores are of real samples."""
    real, fake = scores.chunk(2)
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def generator_loss(scores):
    return F.softplus(-scores).mean()


GAN = "My script has two models and two optimizers, like a GAN. What do I wrap?"


@recipe(GAN)
def test_two_optimizers(block, _):
    batches = [(make_batch(8, seed)[0], make_batch(8, seed + 9)[0]) for seed in range(3)]

    def make_both():
        generator, critic = make(Net, outputs=6), make(Net, outputs=1)
        return generator, critic, sgd(generator), sgd(critic)

    alone, alone_critic, generator_optimizer, critic_optimizer = make_both()
    for real, noise in batches:
        fake = alone(noise)
        critic_optimizer.zero_grad()
        critic_loss(alone_critic(torch.cat([real, fake.detach()]))).backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        generator_loss(alone_critic(fake)).backward()
        generator_optimizer.step()

    generator, critic, generator_optimizer, critic_optimizer = make_both()
    computed = []
    critic.outer.bias.register_post_accumulate_grad_hook(computed.append)
    names = {"generator": generator, "generator_optimizer": generator_optimizer, "generator_loss": generator_loss}
    names |= {"critic": critic, "critic_optimizer": critic_optimizer, "critic_loss": critic_loss}
    with Watch() as watch:
        execute(block, **names, batches=[own(*batch) for batch in batches])
    check_equal(full_parameters(generator), full_parameters(alone))
    check_equal(full_parameters(critic), full_parameters(alone_critic))
    assert watch.counts["c10d.allreduce_"] == 2 * len(batches), "one of each model per step"
    assert len(computed) == len(batches), "the generator's step needs no gradients of the critic"


@recipe(GAN)
def test_samples_of_a_generator_that_communicates(_, block):
    """Rank 0 alone draws them, and does not wait for rank 1."""
    generator = nn.Sequential(nn.Linear(3, 4), batch_norms(*blocks_of(BATCH_NORM)).GlobalBatchNorm1d(4))
    fixed_noise = torch.randn(5, 3)
    if dist.is_primary():
        samples = execute(block, generator=generator, fixed_noise=fixed_noise).samples
        assert torch.equal(samples, generator.eval()(fixed_noise))


@recipe("How do I train in float16 with a GradScaler?")
def test_grad_scaler(block):
    """Equal to one process without a scaler; an overflow on rank 1 makes both skip the step, and halves both scales."""
    block = block.replace("torch.float16", "torch.float16, enabled=False")  # only the scale is left of float16
    alone, model = make(Net), make(Net)
    optimizer = sgd(alone)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(alone, *make_batch()).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), max_norm=0.1)
        optimizer.step()
    names = {"model": model, "ddp_model": dist.prepare_ddp_model(model), "optimizer": sgd(model)}
    x, y = own(*make_batch())
    execute(block, batches=3 * [(x, y)], **names)
    check_equal(full_parameters(model), full_parameters(alone))
    found = execute(block, batches=[(x / (0 if dist.get_rank() == 1 else 1), y)], **names)
    check_equal(full_parameters(model), full_parameters(alone))
    assert found.epoch == 1 and found.scaler.get_scale() == 2.0**15


@recipe("How do I unfreeze layers during training?")
def test_unfreezing(block):
    """Two steps with a frozen layer, and two more with all layers, equal one process's."""

    def make_frozen():
        model = make(Net)
        model.inner.requires_grad_(False)
        return model, torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=RATE)

    alone, optimizer = make_frozen()
    train(alone, 2 * [make_batch()], optimizer)
    alone.inner.requires_grad_(True)
    optimizer.add_param_group({"params": alone.inner.parameters()})
    expected = train(alone, 2 * [make_batch()], optimizer)

    model, optimizer = make_frozen()
    ddp_model = dist.prepare_ddp_model(model)
    train(ddp_model, 2 * [own(*make_batch())], optimizer)
    result = execute(block, model=model, ddp_model=ddp_model, optimizer=optimizer)
    check_equal(train(result.ddp_model, 2 * [own(*make_batch())], optimizer), expected)


def area_under_curve(labels, scores):
    """In how many pairs of a sample of class 1 and another one the first has the higher score."""
    scores = scores.softmax(dim=1)[:, 1]
    return (scores[labels == 1][:, None] > scores[labels != 1]).double().mean().item()


@recipe("My metric needs all predictions (AUC, F1)")
@pytest.mark.parametrize("n", [2, 37, 128, 129, 131])
def test_metric_of_all_predictions(gathered, ordered, n):
    model = make(Net)
    x, y = make_batch(n)
    y[:2] = torch.tensor([0, 1])  # the area needs both kinds
    first = execute(gathered, model=model, test_set=TensorDataset(x, y), metric=area_under_curve)
    second = execute(ordered, shares=first.shares, all_scores=first.all_scores)
    scores = model(x)
    assert first.result == area_under_curve(y, scores)
    assert first.all_labels.tolist() == y[0::2].tolist() + y[1::2].tolist()
    check_equal({"scores": second.ordered_scores}, {"scores": scores})


@recipe("Evaluation")
def test_the_evaluation_counts_each_sample_once(block):
    """Of docs/port.md."""
    model = make(Net)
    x, _ = make_batch(101)
    result = execute(block, model=model, test_set=TensorDataset(x, model(x).argmax(dim=1)))
    assert result.hits == 101


# ---- data, batch size and learning rate -----------------------------------------------------------------------------


@recipe("My script downloads or prepares its data. Which process should do it?")
def test_download(block):
    """One process downloads, and all read after that."""
    calls = []

    def fake_mnist(folder, download=False):
        calls.append("download" if download else "read")

    fake_dist = types.SimpleNamespace(get_local_rank=dist.get_local_rank, barrier=lambda: calls.append("barrier"))
    without_import = block.replace("from torchvision.datasets import MNIST\n", "")
    execute(without_import, MNIST=fake_mnist, dist=fake_dist)
    assert calls == ["download", "barrier", "read"][dist.get_local_rank() :]


@recipe("I have a sampler of my own (`WeightedRandomSampler`, buckets)")
def test_own_sampler(block):
    """The steps of one process, in any epoch first. The rest is dropped."""
    weights = torch.arange(1, 132) / 131
    train_set = TensorDataset(torch.arange(131))

    def shares(loader):
        return dist.gather_objects([batch.tolist() for (batch,) in loader])

    for epoch in (3, 0, 1):
        result = execute(block, train_set=train_set, weights=weights, global_batch_size=10)
        torch.manual_seed(dist.get_rank())  # the order does not depend on it
        result.sampler.set_epoch(epoch)
        steps = [sorted(first + second) for first, second in zip(*shares(result.loader), strict=True)]
        order = weights.multinomial(131, True, generator=torch.Generator().manual_seed(epoch))
        assert steps == [sorted(step.tolist()) for step in order.split(10)[:13]]
        assert len(result.sampler) == len(list(result.sampler)) == 65

    buckets = BatchSampler(result.weighted, batch_size=4, drop_last=False)  # 33 of them
    sampler = result.ShareOfOrder(buckets, result.generator)
    order = weights.multinomial(131, True, generator=torch.Generator().manual_seed(0)).split(4)
    expected = [[bucket.tolist() for bucket in order[rank:32:2]] for rank in range(2)]
    assert shares(DataLoader(train_set, batch_sampler=sampler)) == expected


class Augmented(Dataset):
    """Each sample is random numbers of three kinds."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()])


@recipe("How many loader processes, and how do I seed augmentation?")
def test_loader_processes(block):
    """No two samples of two ranks with two loader processes each draw the same, in two epochs."""
    torch.manual_seed(0)  # the same on all ranks
    sampler = dist.data_sampler(Augmented(), distributed=True, shuffle=True)
    result = execute(block, train_set=Augmented(), sampler=sampler, seed=0)
    drawn = torch.cat([batch for _ in range(2) for batch in result.train_loader])
    for kind in torch.cat(dist.gather(drawn)).T:
        assert len(kind.unique()) == 128


@recipe("My data set is an `IterableDataset`")
def test_iterable_data_set(block):
    """1003 samples, for two loader processes on each of two ranks: the steps of one process, and each sample once."""
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


@recipe(STOP_EARLY)
def test_early_stop(block, ending):
    """One half of the validation set never gets better, and the other always does: all stop where the mean does.

    The run is interrupted after 3 and after 7 epochs, and continues with the best loss, the count and the rate.
    """
    means = [5, 4, 3, 3.5, 3.5, 2, 3, 3, 3, 3, 1, 1]
    rates = [RATE] * 5 + [RATE / 10] * 3 + [RATE / 100] * 2  # lowered after two epochs that are no better
    trained = []

    def resume(epochs):
        model = make(Net)
        optimizer = sgd(model)

        def train_epoch(epoch):
            trained.append((epoch, optimizer.param_groups[0]["lr"]))
            with torch.no_grad():
                model.outer.bias.fill_(epoch)

        def sum_of_validation_losses():  # of four of eight samples
            epoch, _ = trained[-1]
            return torch.tensor(4.0 * (means[epoch] + (epoch if dist.is_primary() else -epoch)))

        names = {"model": model, "ddp_model": dist.prepare_ddp_model(model), "optimizer": optimizer}
        names |= {"train_epoch": train_epoch, "sum_of_validation_losses": sum_of_validation_losses}
        return model, execute(block, **names, epochs=epochs, validation_set=range(8))

    for epochs in (3, 7, len(means), len(means)):  # the last one has stopped already
        model, done = resume(epochs)
    assert [epoch for epoch, _ in trained] == list(range(10)), "four epochs after the best one"
    assert [rate for _, rate in trained] == pytest.approx(rates)
    assert (done.best_loss, done.bad_epochs) == (2, 4)
    assert (model.outer.bias == 9).all()
    result = execute(ending, model=model, evaluate=lambda model: model.outer.bias[0].item())
    assert result.test_loss == 5 and (model.outer.bias == 5).all(), "of the best epoch, on all ranks"


@recipe("How do I save on SIGTERM (preemption) in my own script?")
def test_preemption(block):
    """Preempted in two epochs, and at the end of one, the run ends where one that was not ends, bit for bit."""
    x, y = make_batch(96)  # four steps of two micro-batches of 12 samples
    data = TensorDataset(x, y)
    seen = []

    def resume(path, stop_after=None):
        """To the end, or until so many steps are done. Returns the parameters."""
        model = make(Net)
        torch.manual_seed(17)  # a resumed process draws another first dropout than the others
        ddp_model = dist.prepare_ddp_model(nn.Sequential(model, nn.Dropout(0.5)))
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 12)
        sampler = dist.data_sampler(data, distributed=True, shuffle=True)
        loader = DataLoader(data, batch_size=12 // dist.get_world_size(), sampler=sampler)
        steps = []

        def train_step(micro_batches):
            optimizer.zero_grad()
            for x, y in micro_batches:
                (loss_of(ddp_model, x, y) / 2).backward()
                seen.append(x)
            optimizer.step()
            scheduler.step()
            steps.append(1)
            if len(steps) + 1 == stop_after and dist.is_primary():  # all ranks stop one step later
                signal.raise_signal(signal.SIGTERM)

        names = {"ddp_model": ddp_model, "optimizer": optimizer, "scheduler": scheduler, "train_step": train_step}
        names |= {"sampler": sampler, "loader": loader}
        with leaving_is_an_error(), pytest.raises(Left) if stop_after else contextlib.nullcontext():
            execute(block.replace("snapshot.pt", path), **names, K=2, epochs=3)
        assert not stop_after or len(steps) == stop_after
        return full_parameters(model)

    expected = resume("not_preempted.pt")
    orders = [torch.randperm(96, generator=torch.Generator().manual_seed(epoch)) for epoch in range(3)]
    samples = x[torch.cat([order[dist.get_rank() :: dist.get_world_size()] for order in orders])]
    assert torch.equal(torch.cat(seen), samples)
    seen.clear()
    # In the first epoch, in the second, at its end, and no more. The last run finds that all is done.
    for stop_after in (2, 4, 2, None, None):
        resumed = resume("preempted.pt", stop_after)
    check_equal(resumed, expected, tolerance=0)
    assert torch.equal(torch.cat(seen), samples), "each sample once in each epoch"


@recipe("How do I resume, perhaps with another number of GPUs?")
def test_another_number_of_gpus(block):
    """Two epochs of two processes, and two of one, end where four epochs of one do."""

    def resume(epochs, path, alone):
        """To epoch `epochs`, with momentum and a schedule; returns the parameters, and which epochs were trained.

        To train `alone`, each process computes the whole batch.
        """
        model, trained = make(Net, seed=0 if alone else dist.get_rank()), []  # rank 0's weights are taken
        ddp_model = model if alone else dist.prepare_ddp_model(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        def train_epoch(epoch):
            batch = make_batch(seed=epoch)
            train(ddp_model, [batch if alone else own(*batch)], optimizer)
            scheduler.step()
            trained.append(epoch)

        names = {"ddp_model": ddp_model, "optimizer": optimizer, "scheduler": scheduler}
        execute(block.replace("snapshot.pt", path), **names, train_epoch=train_epoch, epochs=epochs)
        return full_parameters(model), trained

    assert resume(2, "two.pt", alone=False)[1] == [0, 1]
    resumed, trained = resume(4, "two.pt", alone=True)
    assert trained == [2, 3], "the next epoch is stored"
    expected, _ = resume(4, "one.pt", alone=True)
    check_equal(resumed, expected)


def two_layers():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def split(model, how):
    """Under TP the first layer by columns, the second by rows."""
    if how == "FSDP2":
        return dist.prepare_fsdp_model(model)
    return parallelize_module(model, make_mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})


@recipe("How do I load weights that somebody else has saved?")
@pytest.mark.parametrize("how", ["DDP", "FSDP2", "TP"])
def test_weights_of_somebody_else(plain, sharded, how):
    """A wrapped model has saved those that a plain one loads."""
    weights = make(two_layers).state_dict()
    prefix = "module." if how == "DDP" else ""
    if dist.is_primary():
        torch.save({f"{prefix}{name}": value for name, value in weights.items()}, "weights.pt")
    model = make(two_layers, seed=2 + dist.get_rank())
    if how == "DDP":
        execute(plain, model=model)
    else:
        model = split(model, how)
        execute(sharded, sharded_model=model)
    check_equal(full_parameters(model), weights, tolerance=0)


@recipe("How do I export one plain file?")
@pytest.mark.parametrize("how", ["FSDP2", "TP"])
def test_export(gathered, converted, how):
    weights = make(two_layers).state_dict()
    model = split(make(two_layers), how)
    execute(gathered, sharded_model=model)
    if how == "FSDP2":
        checkpoint_sharded.save("runs", model, sgd(model), 1)
    if dist.is_primary():
        check_equal(torch.load("model.pt", weights_only=True), weights, tolerance=0)
        if how == "FSDP2":
            check_equal(execute(converted).weights, weights, tolerance=0)


@recipe("From DDP to FSDP")
def test_from_ddp_to_fsdp(block):
    """Of docs/port.md: stopped after four epochs, it has the losses and the best weights of a plain loop."""
    x, y = make_batch(13, seed=1)  # one sample is repeated
    losses = []

    def train_epoch(model, optimizer, epoch):
        train(model, [own(*make_batch(seed=epoch))], optimizer)
        losses.append(names.evaluate(model))

    parts = {"make_model": lambda: make(two_layers), "make_test_set": lambda: TensorDataset(x, y)}
    for epochs in (4, 20):
        names = execute(block.replace("epoch < 20", f"epoch < {epochs}"), **parts, train_epoch=train_epoch)
        names.main(dist.get_local_rank(), dist.get_world_size())

    alone = make(two_layers)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.02)
    expected = []
    weights = []
    while len(expected) < 20 and (len(expected) < 4 or min(expected) in expected[-3:]):
        weights.append(train(alone, [make_batch(seed=len(expected))], optimizer))
        expected.append(loss_of(alone, x, y).item())
    assert losses == pytest.approx(expected, abs=1e-12) and len(losses) < 20
    best = expected.index(min(expected))
    check_equal(torch.load("best.pt", weights_only=True), weights[best], tolerance=1e-10)


# ---- memory and speed -----------------------------------------------------------------------------------------------


def compiled_by(counter, block, **names):
    """Run a block that compiles, with another backend."""
    torch._dynamo.reset()
    return execute(block.replace(".compile()", ".compile(backend=counter)"), counter=counter, **names)


@recipe("Where do I put `torch.compile`?")
def test_compile_under_ddp(block, _):
    """The graph is cut at the buckets: more than one MB of gradients needs a second one."""
    counter = CompileCounter()
    result = compiled_by(counter, block, model=make(Net, width=400))
    actual = train(result.ddp_model, 2 * [own(*make_batch())])
    check_equal(actual, train(make(Net, width=400), 2 * [make_batch()]))
    assert counter.frame_count > 1, "one graph for each bucket"
    assert list(result.ddp_model.state_dict()) == [f"module.{name}" for name in Net().state_dict()]


@recipe("Where do I put `torch.compile`?")
def test_compile_under_fsdp(_, block):
    """The two blocks share one graph, and are computed again in backward."""
    counter, model = CompileCounter(), make(Net)
    names = compiled_by(counter, block, model=model, mesh=make_mesh())
    expected = train(make(Net), 2 * [make_batch()])
    check_equal(train(model, 2 * [own(*make_batch())]), expected)
    assert counter.frame_count == 1

    model, calls = make(Net), []
    model.blocks[0][0].register_forward_pre_hook(lambda *_: calls.append(None))
    for each in model.blocks:
        names.recompute_in_backward(each)
    check_equal(train(model, 2 * [make_batch()]), expected)
    assert len(calls) == 2 * 2, "in each of two steps twice"


# ---- start and measure ----------------------------------------------------------------------------------------------


@recipe("How much communication is not hidden behind computation?")
def test_communication_that_is_not_hidden(block):
    """Each all-reduce takes 50 ms longer, after backward has computed."""

    def slow_hook(state, bucket):
        time.sleep(0.05)
        return allreduce_hook(state, bucket)

    ddp_model = dist.prepare_ddp_model(make(Net))
    ddp_model.register_comm_hook(None, slow_hook)
    x, y = own(*make_batch())
    result = execute(block, ddp_model=ddp_model, x=x, y=y)
    assert all(param.grad.norm() > 0 for param in ddp_model.parameters()), "sums of gradients, as the page says"
    assert result.alone < 0.04 < result.total - result.alone < 1


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
