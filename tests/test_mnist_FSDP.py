"""mnist_FSDP.py: what each process holds, and computes in. What it trains is in tests/test_equal_images.py."""

import contextlib
import io
import re
from unittest import mock

import images
import pytest
import torch
from conftest import Watch, float64, guards, on_processes, slow_clock
from images import SIZES

import distributed as dist
import mnist
import mnist_FSDP


@on_processes(2, *guards(1, 4))
@pytest.mark.parametrize(("strategy", "optimizer"), [("fsdp", "adam"), ("fsdp", "sgd"), ("ddp", "adam")])
@float64()
def test_the_bytes_held_are_those_of_the_docstring(strategy, optimizer):
    """And it says so, of the largest process. Of a layer that gets no gradient only the parameters are held."""
    rank, n = dist.get_rank(), dist.get_world_size()
    model = images.Pooled if strategy == "fsdp" else images.Net  # DDP wants a gradient of each layer
    known = mock.patch.multiple(mnist_FSDP, time=slow_clock(10), peak_memory=lambda device: (7 + rank) * 10**6)
    with contextlib.redirect_stdout(io.StringIO()) as stdout, known:
        state, _ = images.train("mnist_FSDP", optimizer, model, strategy=strategy)
    if not dist.is_primary():
        return
    numbers = r"bytes: parameters (\S+) \| gradients (\S+) \| optimizer state (\S+) \| in all"
    held = [int(number.replace(",", "")) for number in re.search(numbers, stdout.getvalue()).groups()]
    n_params = sum(tensor.numel() for tensor in state.values())
    n_trained = sum(tensor.numel() for name, tensor in state.items() if not name.startswith("pooler"))
    share = 8 / n if strategy == "fsdp" else 8  # bytes of a float64
    moments = {"adam": 2, "sgd": 1}[optimizer]
    assert held == pytest.approx([share * n_params, share * n_trained, share * n_trained * moments], rel=0.02)
    assert f"Model net: {n_params:,} parameters\n" in stdout.getvalue()
    samples = -(-SIZES[0] // n) * n
    assert stdout.getvalue().count(f" | {6 + n} MB | {samples / 10:,.0f} samples/s\n") == 2, "in each epoch"


@on_processes(*guards(2))
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_each_rank_computes_in_bfloat16_if_told_to(strategy):
    """Parameters, optimizer and the sum of gradients stay in float32."""
    gathered, computed = set(), set()
    model = mnist_FSDP.wrap(mnist.ShallowNet(), strategy, dist.get_device(), True)
    layer = dist.unwrapped(model).fc1
    layer.register_forward_pre_hook(lambda fc, _: gathered.add(fc.weight.dtype))
    layer.register_forward_hook(lambda _, inputs, output: computed.add(output.dtype))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    loader = torch.utils.data.DataLoader(images.digits(16, dist.get_rank()), 8, collate_fn=mnist.collate)
    with Watch() as watch:
        mnist_FSDP.train_epoch(model, loader, optimizer, dist.get_device(), True)
    kept = [*model.parameters(), *(tensor for values in optimizer.state.values() for tensor in values.values())]
    assert {tensor.dtype for tensor in kept} == {torch.float32}
    assert computed == {torch.bfloat16}
    assert set(watch.types_of("reduce")) == ({"torch.float32"} if strategy == "fsdp" else set())
    assert gathered == {torch.bfloat16 if strategy == "fsdp" else torch.float32}
