"""What the scripts of torchrun's ladder print and save."""

import re

import torch

EPOCH_LINE = re.compile(r"\] (?:\S+ \| )?Epoch (\d+) \| Batchsize: (\d+) \| Steps: (\d+) \| Loss: (\d+\.\d{4})")


def assert_close(path, expected, tolerance=1e-12):
    """The model in a snapshot is the `expected` state, with equal names."""
    actual = torch.load(path, weights_only=True)["model"]
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=tolerance, atol=tolerance)


def assert_same_models(one, other):
    assert_close(one, torch.load(other, weights_only=True)["model"], tolerance=0)
