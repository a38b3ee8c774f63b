"""Few images, small networks, and training of them: the scripts' own, and plain PyTorch in one process."""

import argparse
import contextlib
import itertools
import json
import math
import re
import signal
from pathlib import Path
from unittest import mock

import torch
from conftest import float64, whole
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import checkpoint
import distributed as dist
import mnist
import mnist_DDP
import mnist_FSDP
import multigpu_torchrun
import multinode_torchrun

# ---- data -----------------------------------------------------------------------------------------------------------


def digits(n, seed=0):
    """Noise, and a white row that tells the digit."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (n,), generator=generator)
    images = torch.randint(200, (n, 1, 28, 28), generator=generator, dtype=torch.uint8)
    images[torch.arange(n), 0, labels] = 255
    return mnist.Digits(images, labels)


class Plain(Dataset):
    """A data set as most people write one: one sample at a time, with a number as its label."""

    def __init__(self, whole):
        self.whole = whole
        self.classes = whole.classes

    def __len__(self):
        return len(self.whole)

    def __getitem__(self, index):
        return self.whole.images[index], int(self.whole.labels[index])


class Noisy(Plain):
    """Noise from torch's random numbers, drawn by whichever process loads a sample."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return (image + torch.randint(20, image.shape, dtype=torch.uint8)).clamp(max=255), label


class Pairs(Dataset):
    """Any of these data sets for the scripts of the ladder, whose models and targets are plain numbers."""

    def __init__(self, data):
        self.data = data if isinstance(data, Plain) else Plain(data)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image, label = self.data[index]
        x = normal(image)
        return x, F.one_hot(torch.tensor(label), 10).to(x)


def idx(tensor):
    """Bytes as a file of MNIST has them."""
    header = [0x800 + tensor.dim(), *tensor.shape]
    return b"".join(number.to_bytes(4, "big") for number in header) + tensor.numpy().tobytes()


def write_mnist(folder, train, test):
    """A training set and a test set of so many samples, as the files of MNIST."""
    raw = Path(folder, "MNIST", "raw")
    raw.mkdir(parents=True)
    for name, half in zip(("train", "t10k"), halves(train, test), strict=True):
        (raw / f"{name}-images-idx3-ubyte").write_bytes(idx(half.images[:, 0]))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(idx(half.labels.byte()))


def halves(train, test, kind=lambda whole: whole):
    """A training set and a test set with so many samples."""
    return kind(digits(train, 1)), kind(digits(test, 0))


@contextlib.contextmanager
def few_digits(train, test, dtype=torch.float64):
    """Replace the data sets by `train` and `test` samples, in float64."""

    def load(name="", data_dir="", train=True, seed=0):
        return digits(sizes[train], int(train))  # here, since a test may end the process that makes them

    sizes = {True: train, False: test}
    torch.set_default_dtype(dtype)
    try:
        with mock.patch("mnist.load_data", load):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


# ---- models and optimizers ------------------------------------------------------------------------------------------


class Net(nn.Module):
    """It behaves differently in training, draws random numbers as dropout would, and refuses an empty batch."""

    drawn = []  # noqa: RUF012  by this process

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(784, 24), nn.Linear(24, 10)

    def forward(self, x):
        assert len(x)
        x = self.first(x.flatten(1)).relu()
        if self.training:
            Net.drawn.append(torch.rand(()))
            x = 2 * x
        return self.second(x)


class Pooled(Net):
    """With a layer that never gets a gradient, like BERT's pooler."""

    def __init__(self):
        super().__init__()
        self.pooler = nn.Linear(24, 24)


class Stopped(Exception):
    """Instead of a kill."""


def stop():
    raise Stopped


class Normed(nn.Module):
    """With buffers that differ between ranks after a step, and with dropout."""

    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(784, momentum=1.0)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 784), norm, nn.Dropout(0.2), nn.Linear(784, 10))

    def forward(self, x):
        return self.layers(x)


def acting(at, act, model=Net, training=True):
    """Builds a model that calls `act` in its `at`-th forward pass of training, or of evaluation."""
    calls = itertools.count(1)

    def before(net, inputs):
        if net.training == training and next(calls) == at:
            act()

    def build():
        net = model()
        net.register_forward_pre_hook(before)
        return net

    return build


def make_sgd(params, lr, **_):
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def make_adam(params, lr, fused=False, **_):
    return torch.optim.Adam(params, lr=lr, fused=fused)


def make_layerwise(params, lr, fused=False, **_):
    """AdamW with one learning rate per layer, and a schedule for all of them."""
    params = list(params)
    groups = [{"params": params[:2], "lr": lr / 2}, {"params": params[2:]}]
    optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=0.1, fused=fused)

    def decay(*_):
        for group in optimizer.param_groups:
            group["lr"] *= 0.98

    optimizer.register_step_post_hook(decay)
    return optimizer


OPTIMIZERS = {"sgd": make_sgd, "adam": make_adam, "layerwise": make_layerwise}

# ---- a script's own training ----------------------------------------------------------------------------------------

SIZES = (303, 101)  # of training and test: no multiples of 2 or 4, nor of a batch
STEPS = 13  # of an epoch
LR = {"sgd": 0.02, "adam": 0.003, "layerwise": 0.003}
DEFAULTS = {"epochs": 2, "seed": 3, "log_every": 1, "save_every": 1, "num_workers": 0, "test_batch_size": 11}
DEFAULTS |= {"output": "model.pt", "snapshot_path": None, "checkpoint_dir": None}
OPTIONS = {
    "mnist_DDP": {**vars(mnist_DDP.make_parser("").parse_args([])), **DEFAULTS, "global_batch_size": 22},
    "mnist_FSDP": {**DEFAULTS, "strategy": "fsdp", "model": "net", "bf16": False, "min_num_params": 1000},
    "multigpu_torchrun": {**DEFAULTS, "snapshot_path": "snapshot.pt"},
    "multinode_torchrun": {**DEFAULTS, "snapshot_path": "snapshot.pt", "global_batch_size": 22},
}
LINE = re.compile(r"(?:step |Epoch )(\d+).* \| [lL]oss:? (\d+\.\d{4})$", re.M)
EPOCH_LINE = re.compile(r"CPU(?:\]| \|) Epoch (\d+) \| Batchsize: (\d+) \| Steps: (\d+) \| Loss: (\d+\.\d{4})")
TEST_LINE = re.compile(r"^epoch (\d+)/\d+ \|.* held-out (\d+\.\d{4}) \| accuracy (\d\.\d{4}) \((\d+)/(\d+)\)", re.M)


def train(script, optimizer="sgd", model=Net, data=None, **changes):
    """The whole weights that it trains, and for each epoch loss and accuracy of the test. All ranks must call it.

    `changes` are of its options. Those of other scripts are ignored.
    """
    assert changes.keys() <= set().union(*OPTIONS.values()), "an option of none"
    dist.init_process_group()
    Net.drawn.clear()
    args = argparse.Namespace(**{**OPTIONS[script], "lr": LR[optimizer], **changes})
    built = []

    def build(*_):
        built.append(model())
        return built[0]

    handler = signal.getsignal(signal.SIGTERM)
    try:
        results = TRAIN[script](args, data or halves(*SIZES), build, optimizer)
    finally:
        signal.signal(signal.SIGTERM, handler)  # which Preemption has replaced
    state = {name: whole(value).clone() for name, value in built[0].state_dict().items()}
    return state, results


def train_mnist_ddp(args, data, build, optimizer):
    def with_schedule(net, lr, steps):
        assert dist.unwrapped(net) is net, "parameters have their own names"
        chosen = OPTIMIZERS[optimizer](net.parameters(), lr, fused=True)
        return chosen, torch.optim.lr_scheduler.LambdaLR(chosen, lambda step: rate_of(step / steps))

    mnist_DDP.run(args, data, build, mnist_DDP.make_optimizer if optimizer == "sgd" else with_schedule)
    dist.barrier()  # rank 0 writes
    stem = args.output.removesuffix(".pt")
    losses, accuracies = (json.loads(Path(f"{stem}_{name}.json").read_text()) for name in ("losses", "accuracies"))
    return list(zip(losses, accuracies, strict=True))


def rate_of(done):
    """The learning rate of mnist_DDP.py after this fraction of all steps, as a fraction of --lr."""
    return (1 + math.cos(math.pi * done)) / 2


def train_mnist_fsdp(args, data, build, optimizer):
    args.batch_size = 24 // dist.get_world_size()
    _, results = mnist_FSDP.run(args, data, build, OPTIMIZERS[optimizer])
    return [(test_loss, hits / n) for _, test_loss, hits, n in results]


def train_multigpu(args, data, build, optimizer):
    samples = Pairs(data[0])
    sampler = dist.data_sampler(samples, True, shuffle=True, seed=args.seed)
    loader = DataLoader(samples, 24 // dist.get_world_size(), sampler=sampler, num_workers=args.num_workers)
    torch.manual_seed(args.seed)
    chosen = OPTIMIZERS[optimizer]((net := build()).parameters(), args.lr)
    trainer = multigpu_torchrun.Trainer(net, loader, chosen, dist.get_device(), args.save_every, args.snapshot_path)
    trainer.train(args.epochs)


def train_multinode(args, data, build, optimizer):
    torch.manual_seed(args.seed)
    chosen = OPTIMIZERS[optimizer]((net := build()).parameters(), args.lr)
    preemption = checkpoint.Preemption()
    trainer = multinode_torchrun.Trainer(net, Pairs(data[0]), chosen, dist.get_device(), preemption, args)
    if not trainer.train(args.epochs):
        preemption.leave()


TRAIN = {
    "mnist_DDP": train_mnist_ddp,
    "mnist_FSDP": train_mnist_fsdp,
    "multigpu_torchrun": train_multigpu,
    "multinode_torchrun": train_multinode,
}

# ---- plain PyTorch --------------------------------------------------------------------------------------------------


def normal(images):
    return (images.to(torch.get_default_dtype()) / 255 - 0.1307) / 0.3081


@torch.no_grad()
def result_of(net, dataset):
    """Mean loss, correct predictions and samples."""
    net.eval()
    outputs = torch.cat([net(normal(images)) for images in dataset.images.split(1000)])
    hits = (outputs.argmax(dim=1) == dataset.labels).sum().item()
    return F.cross_entropy(outputs, dataset.labels).item(), hits, len(dataset)


def squared_error(outputs, labels):
    """What the scripts of the ladder minimize."""
    return F.mse_loss(outputs, F.one_hot(labels, 10).to(outputs))


@float64()
def train_alone(
    make_optimizer, rates, sizes, batch, seed=3, model=Net, order_of=None, before_step=None, loss_of=F.cross_entropy
):
    """The reference: plain PyTorch in one process and float64, one epoch for each of `rates`, which are equal.

    Returns the weights, (loss, samples) of every step, and `result_of` after every epoch.
    """
    torch.manual_seed(seed)
    net, losses, tests = model(), [], []
    train_set, test_set = halves(*sizes)
    optimizer = make_optimizer(net.parameters(), rates[0])
    for epoch in range(len(rates)):
        generator = torch.Generator().manual_seed(seed + epoch)
        order = order_of(epoch) if order_of else torch.randperm(sizes[0], generator=generator)
        for index in order.split(batch):
            optimizer.zero_grad()
            loss = loss_of(net.train()(normal(train_set.images[index])), train_set.labels[index])
            loss.backward()
            if before_step:
                before_step(net, optimizer)
            optimizer.step()
            losses.append((loss.item(), len(index)))
        tests.append(result_of(net, test_set))
    learns = tests[-1][1] > 0.3 * sizes[1] if loss_of is F.cross_entropy else losses[-1][0] < losses[0][0] / 3
    assert learns, "or equality means little"
    return net.state_dict(), losses, tests


def assert_equal_states(actual, expected, tolerance=1e-9):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert type(actual[name]) is torch.Tensor and actual[name].dtype == expected[name].dtype
        assert (actual[name] - expected[name]).abs().max() <= tolerance, name


def assert_same_models(one, other, tolerance=0):
    """In two snapshots."""
    states = [torch.load(path, weights_only=True)["model"] for path in (one, other)]
    assert_equal_states(*states, tolerance)
