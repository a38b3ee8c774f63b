"""What the tests of the three rungs share: a model with everything to lose, and the plain training they must equal."""

import contextlib
from unittest import mock

import torch
from conftest import float64
from torch import nn
from torch.utils.data import Dataset

import distributed as dist
import single_gpu


class Augmented(Dataset):
    """A user's own: one sample at a time, with random noise."""

    def __init__(self):
        self.data = single_gpu.ToyDataset()

    def __len__(self):
        return 2048

    def __getitem__(self, index):
        x, y = self.data[index]
        return x + torch.randn(20), y


@contextlib.contextmanager
def no_seed_twice(settling=0):
    """Between ranks, epochs and steps, augmentation and dropout differ, but for the first `settling` seeds."""
    with mock.patch("torch.manual_seed", wraps=torch.manual_seed) as drawn:
        yield
    seeds = [call.args[0] for call in drawn.call_args_list[settling:]]
    seeds = torch.cat(dist.gather(torch.tensor(seeds))).tolist()
    assert len(set(seeds)) == len(seeds) > 0


def random_model():
    """Several layers for DDP to lay out, dropout, and buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 1))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 1))


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def linear():
    torch.manual_seed(0)
    return nn.Linear(20, 1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=5e-3)


BOTH = [(linear, sgd), (mlp, adam)]


def order(epoch):
    """The samples of an epoch as DistributedSampler deals them to the ranks."""
    return torch.randperm(2048, generator=torch.Generator().manual_seed(epoch))


@float64()
def train_alone(model, optimizer, epochs, batch_size, samples=2048, order=order):
    """Plain PyTorch on the whole of each batch: the parameters, and the average loss of each epoch."""
    (x, y), model, losses = single_gpu.ToyDataset().tensors, model(), []
    optimizer = optimizer(model)
    for epoch in range(epochs):
        losses.append(0)
        for batch in order(epoch)[:samples].split(batch_size):
            loss = (model(x[batch]) - y[batch]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1] += loss.item() * len(batch) / samples
    return model.state_dict(), losses


def assert_close(path, expected, tolerance=1e-12):
    """The model in a snapshot is the `expected` state, with equal names."""
    actual = torch.load(path, weights_only=True)["model"]
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=tolerance, atol=tolerance)


def assert_same_models(one, other):
    assert_close(one, torch.load(other, weights_only=True)["model"], tolerance=0)
