"""Few images, small networks and plain training, for the tests of the image scripts."""

import contextlib
import functools
from pathlib import Path
from unittest import mock

import torch
from conftest import exit_message
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import mnist


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
def few_digits(train, test, kind=lambda whole: whole, dtype=torch.float64):
    """Replace the data sets by `train` and `test` samples, in float64."""

    def load(name="", data_dir="", train=True, seed=0):
        return kind(digits(sizes[train], int(train)))  # here, since a test may end the process that makes them

    sizes = {True: train, False: test}
    torch.set_default_dtype(dtype)
    try:
        with mock.patch("mnist.load_data", load):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


class Net(nn.Module):
    """It behaves differently in training, draws random numbers as dropout would, and refuses an empty batch."""

    drawn = []  # noqa: RUF012  by this process
    sizes = []  # noqa: RUF012  of the batches that it trained on

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(784, 24), nn.Linear(24, 10)

    def forward(self, x):
        assert len(x)
        x = self.first(x.flatten(1)).relu()
        if self.training:
            Net.drawn.append(torch.rand(()))
            Net.sizes.append(len(x))
            x = 2 * x
        return self.second(x)


class Pooled(Net):
    """With a layer that never gets a gradient, like BERT's pooler."""

    def __init__(self):
        super().__init__()
        self.pooler = nn.Linear(24, 24)


class Typed(Net):
    """Notes the type of each output."""

    types = []  # noqa: RUF012

    def forward(self, x):
        outputs = super().forward(x)
        self.types.append(outputs.dtype)
        return outputs


class Normed(nn.Module):
    """With buffers that differ between ranks after a step, and with dropout."""

    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(784, momentum=1.0)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 784), norm, nn.Dropout(0.2), nn.Linear(784, 10))

    def forward(self, x):
        return self.layers(x)


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


@contextlib.contextmanager
def host_reads():
    """A list that grows each time the host reads a tensor's value."""
    reads = []
    with contextlib.ExitStack() as stack:
        for name in ("item", "tolist"):
            function = getattr(torch.Tensor, name)
            counted = functools.partialmethod(_read, reads, function)
            stack.enter_context(mock.patch.object(torch.Tensor, name, counted))
        yield reads


def _read(tensor, reads, function):
    reads.append(function.__name__)
    return function(tensor)


def normal(images):
    return (images.to(torch.get_default_dtype()) / 255 - 0.1307) / 0.3081


def outputs_of(net, dataset):
    """The outputs for all images of a data set, by plain PyTorch."""
    with torch.no_grad():
        return torch.cat([net(normal(images)) for images in dataset.images.split(1000)])


def result_of(net, dataset):
    """Mean loss, correct predictions and samples."""
    outputs = outputs_of(net.eval(), dataset)
    hits = (outputs.argmax(dim=1) == dataset.labels).sum().item()
    return F.cross_entropy(outputs, dataset.labels).item(), hits, len(dataset)


def train_alone(make_optimizer, rates, sizes, batch, ranks=1, seed=3, model=Net, order_of=None, before_step=None):
    """The reference: plain PyTorch in one process and float64, one epoch for each of `rates`.

    Returns the weights, (loss, samples) of every step, and `result_of` after every epoch.
    """
    with few_digits(*sizes):
        torch.manual_seed(seed)
        net, losses, tests = model(), [], []
        train_set, test_set = (mnist.load_data("", "", train=train, seed=seed) for train in (True, False))
        optimizer = make_optimizer(net.parameters(), rates[0])
        for epoch, rate in enumerate(rates):
            for group in optimizer.param_groups:
                group["lr"] *= rate / rates[max(0, epoch - 1)]
            generator = torch.Generator().manual_seed(seed + epoch)
            order = order_of(epoch) if order_of else torch.randperm(sizes[0], generator=generator)
            order = torch.cat([order, order[: -sizes[0] % ranks]])  # a sampler gives all ranks equally many
            for index in order.split(batch):
                optimizer.zero_grad()
                loss = F.cross_entropy(net.train()(normal(train_set.images[index])), train_set.labels[index])
                loss.backward()
                if before_step:
                    before_step(net, optimizer)
                optimizer.step()
                losses.append((loss.item(), len(index)))
            tests.append(result_of(net, test_set))
        assert tests[-1][1] > 0.3 * sizes[1], "the reference must learn, or equality means little"
        return net.state_dict(), losses, tests


def check_full_disk(path, train, *args, **kwargs):
    """The old file stays if `train` cannot write its result to `path`."""
    path.write_text("old")
    path.with_name(f"{path.name}.0.tmp").symlink_to("/dev/full")
    message = exit_message(train, *args, **kwargs)
    assert message.startswith(f"cannot save {path}") and "No space left on device" in message
    assert {file.name: file.read_text() for file in path.parent.iterdir()} == {path.name: "old"}


def check_forward(forward):
    """A script's `forward` computes in bfloat16 if it is told to, and its losses are float32."""
    images, labels = digits(8).__getitems__(range(8))
    net = mnist.SimpleCNN()
    expected = F.cross_entropy(net(mnist.normalize(images)), labels, reduction="none")
    for mixed, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        outputs, same, losses = forward(net, images, labels, torch.device("cpu"), mixed)
        assert (outputs.dtype, losses.dtype, losses.shape) == (dtype, torch.float32, (8,)) and same is labels
        assert torch.allclose(losses, expected, rtol=0.05 if mixed else 1e-6)


def assert_equal_states(actual, expected, tolerance=1e-9):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert type(actual[name]) is torch.Tensor and actual[name].dtype == expected[name].dtype
        assert (actual[name] - expected[name]).abs().max() <= tolerance, name
