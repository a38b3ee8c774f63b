"""mnist.py: the models are the ones named, the data arrive whole, a missing file is one line on every rank, and an
evaluation gives the same as one process."""

import functools
import gzip
import hashlib
import http.server
import os
import threading
from unittest import mock

import pytest
import torch
from conftest import MNIST_ROOT, exit_message, needs_mnist
from images import idx
from torch.nn import functional as F

import distributed as dist
import mnist

NOWHERE = "http://127.0.0.1:9/"  # the discard port: refused at once

# ---- models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, count", [("simple", 50_186), ("shallow", 1_199_882), ("deep", 94_104_234)])
def test_models(name, count):
    with torch.device("meta"):
        model = mnist.MODELS[name]().eval()
        outputs = model(torch.empty(3, 1, 28, 28))
    assert sum(param.numel() for param in model.parameters()) == count
    assert outputs.shape == (3, 10)


def test_shallow_net_has_two_dropouts_and_gives_log_probabilities():
    net, images = mnist.ShallowNet(), torch.randn(2, 1, 28, 28)
    for dropout in (net.dropout1, net.dropout2):
        net.eval()
        dropout.train()
        assert not torch.equal(net(images), net(images))
    assert torch.allclose(net(images).exp().sum(dim=1), torch.ones(2))


# ---- data ---------------------------------------------------------------------------------------------------------


def synthetic(train, seed):
    return mnist.load_data("synthetic", "nowhere", train, seed)


@pytest.mark.guard
@pytest.mark.slow
def test_synthetic_digits_are_seeded_and_all_different():
    halves = [synthetic(train=True, seed=5), synthetic(train=False, seed=5)]
    for dataset, n in zip(halves, (20_000, 10_000), strict=True):
        assert dataset.images.shape == (n, 1, 28, 28) and dataset.images.dtype == torch.uint8
        assert dataset.labels.shape == (n,) and dataset.labels.dtype == torch.int64
        assert dataset.labels.bincount().min() > 0.08 * n and len(dataset.labels.bincount()) == 10
    again = synthetic(train=False, seed=5)
    assert torch.equal(again.images, halves[1].images) and torch.equal(again.labels, halves[1].labels)
    drawn = [*halves, synthetic(train=True, seed=6), synthetic(train=False, seed=6)]
    assert len(torch.cat([dataset.images.flatten(1)[:1000] for dataset in drawn]).unique(dim=0)) == 4000


@pytest.mark.guard
@pytest.mark.slow
def test_synthetic_digits_are_not_trivial():
    """A linear model learns something, but far from everything."""
    torch.manual_seed(0)
    train, test = (synthetic(half, seed=5) for half in (True, False))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for batch in torch.randperm(3 * len(train)).split(100):
        index = batch % len(train)
        optimizer.zero_grad()
        F.cross_entropy(model(mnist.normalize(train.images[index])), train.labels[index]).backward()
        optimizer.step()
    accuracy = (model(mnist.normalize(test.images)).argmax(dim=1) == test.labels).double().mean()
    assert 0.4 < accuracy < 0.85


# ---- the real set -------------------------------------------------------------------------------------------------


def zeros(name):
    """A file in MNIST's format, with black images."""
    n = 60_000 if "train" in name else 10_000
    return idx(torch.zeros((n, 28, 28) if "images" in name else (n,), dtype=torch.uint8))


HALVES = ("train", "t10k")
FILES = [f"{half}-{kind}-ubyte" for half in HALVES for kind in ("images-idx3", "labels-idx1")]


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    """A web server with four black files: (url, names and checksums)."""
    folder, resources = tmp_path_factory.mktemp("mirror"), []
    for name in FILES:
        (folder / f"{name}.gz").write_bytes(compressed := gzip.compress(zeros(name), 1))
        resources.append((f"{name}.gz", hashlib.md5(compressed).hexdigest()))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", resources
        server.shutdown()


def load_worker(local_rank, world_size, url, resources, data_dir):
    """Load both halves, where rank 0 alone has a network."""
    import torchvision

    dist.init_process_group()
    mirrors = [NOWHERE if local_rank else url]
    changes = {"mirrors": mirrors, "resources": resources or torchvision.datasets.MNIST.resources}
    with mock.patch.multiple(torchvision.datasets.MNIST, **changes):
        try:
            train, test = (mnist.load_data("mnist", data_dir, half) for half in (True, False))
        except dist.DistributedError as error:
            assert set(dist.gather_objects(str(error))) == {str(error)}, "the same on every rank"
            raise
    assert train.images.shape == (60_000, 1, 28, 28) and len(test) == 10_000
    assert (train.images.dtype, train.labels.dtype) == (torch.uint8, torch.int64)


def load(nprocs, url, resources, data_dir):
    dist.launch(load_worker, url, resources, str(data_dir), nprocs=nprocs)


@pytest.mark.guard
@pytest.mark.slow
def test_download_by_one_process_and_wrong_files(mirror, tmp_path):
    url, resources = mirror
    load(2, url, resources, tmp_path / "data")
    raw = tmp_path / "data" / "MNIST" / "raw"
    assert {*FILES} <= {*os.listdir(raw)}
    for file in raw.glob("*.gz"):
        file.unlink()

    labels = zeros("t10k-labels")
    damages = [
        ("train-images-idx3-ubyte", b"", ""),
        ("t10k-images-idx3-ubyte", labels, ""),
        ("train-labels-idx1-ubyte", labels, "10000 labels for 60000 images"),
        ("t10k-labels-idx1-ubyte", labels[:5000], ""),
        ("t10k-labels-idx1-ubyte", labels[:-1] + bytes([10]), "label 10 is not a digit from 0 to 9"),
    ]
    for name, damaged, reason in damages:
        (raw / name).write_bytes(damaged)
        message = exit_message(load, 1, NOWHERE, resources, tmp_path / "data")
        assert message.startswith(f"cannot read {raw / name} ({reason}"), "which of the four files"
        assert message.endswith("): delete it if it is damaged, or use --data synthetic")
        assert (raw / name).read_bytes() == damaged, "the user's file is left alone"
        (raw / name).write_bytes(zeros(name))
    (raw / name).unlink()
    load(1, url, resources, tmp_path / "data")  # without it: downloaded again


@pytest.mark.parametrize("nprocs", [1, 3])
def test_no_network_is_one_line_on_every_rank(nprocs, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for folder, reason in ((tmp_path / "data", "refused"), (tmp_path / "file", "Not a directory")):
        message = exit_message(load, nprocs, NOWHERE, None, folder)
        for word in (str(folder / "MNIST" / "raw"), "--data synthetic", reason):
            assert word in message


@needs_mnist
def test_real_mnist():
    train, test = (mnist.load_data("mnist", MNIST_ROOT, half) for half in (True, False))
    assert (len(train), len(test)) == (60_000, 10_000)
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9] and test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    normal = mnist.normalize(train.images)
    assert abs(normal.mean()) < 1e-3 and abs(normal.std() - 1) < 1e-3
