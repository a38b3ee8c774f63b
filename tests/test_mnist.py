"""mnist.py: the models are the ones named, the data arrive whole, a missing file is one line on every rank, and an
evaluation gives the same as one process."""

import argparse
import functools
import gzip
import hashlib
import http.server
import os
import shutil
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import MNIST_ROOT, exit_message, needs_mnist, run
from images import Net, Normed, Plain, digits, few_digits, result_of
from torch.nn import functional as F
from torch.utils.data import Subset

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


def test_outputs():
    x = torch.randn(2, 1, 28, 28)
    assert torch.allclose(mnist.ShallowNet()(x).exp().sum(dim=1), torch.ones(2)), "log-probabilities"
    assert mnist.SimpleCNN()(x).max() > 0, "logits"
    net = mnist.ShallowNet()
    assert not torch.equal(net(x), net(x)), "dropout"


# ---- data ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def halves():
    return [mnist.load_data("synthetic", "nowhere", half, seed=5) for half in (True, False)]


def test_synthetic_digits(halves):
    for dataset, n in zip(halves, (20_000, 10_000), strict=True):
        assert dataset.images.shape == (n, 1, 28, 28) and dataset.images.dtype == torch.uint8
        assert dataset.labels.shape == (n,) and dataset.labels.dtype == torch.int64
        assert dataset.labels.bincount().min() > 0.08 * n and len(dataset.labels.bincount()) == 10


def test_synthetic_digits_are_seeded(halves):
    again = mnist.load_data("synthetic", "nowhere", train=False, seed=5)
    assert torch.equal(again.images, halves[1].images) and torch.equal(again.labels, halves[1].labels)
    drawn = {dataset.images[:50].numpy().tobytes() for dataset in halves}
    drawn |= {mnist.load_data("synthetic", "", train, 6).images[:50].numpy().tobytes() for train in (True, False)}
    assert len(drawn) == 4, "another seed, and the other half, are other digits"
    unique = torch.cat([dataset.images.flatten(1)[:2000] for dataset in halves]).unique(dim=0)
    assert len(unique) == 4000


def test_synthetic_digits_are_not_trivial(halves):
    """A linear model learns something, but far from everything; tests/test_mnist_FSDP.py shows that a CNN does."""
    train, test = halves
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for epoch in range(3):
        for batch in torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch)).split(100):
            optimizer.zero_grad()
            F.cross_entropy(model(mnist.normalize(train.images[batch])), train.labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(mnist.normalize(test.images)).argmax(dim=1) == test.labels).double().mean()
    assert 0.4 < accuracy < 0.85


def loaders(train_set, test_set=None):
    args = argparse.Namespace(data="name", data_dir="folder", seed=3, batch_size=64, test_batch_size=20)
    with mock.patch("mnist.load_data", side_effect=[train_set, test_set or train_set]) as load_data:
        both = mnist.make_loaders(args, torch.device("cpu"))
    assert load_data.mock_calls == [mock.call("name", "folder", train=half, seed=3) for half in (True, False)]
    return both


def test_batches_are_whole(halves):
    loader, _ = loaders(halves[1])
    fetch = mock.Mock(wraps=halves[1].__getitems__)
    with mock.patch("mnist.Digits.__getitems__", fetch):
        list(loader)
    assert [len(call.args[0]) for call in fetch.call_args_list] == [64] * 156 + [16]


def test_any_dataset_gives_the_same_batches():
    whole = digits(90)
    for dataset in (Plain(whole), Subset(whole, range(90)), Subset(Plain(whole), range(90))):
        for expected, actual in zip(loaders(whole), loaders(dataset), strict=True):
            for one, other in zip(expected, actual, strict=True):
                assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_unknown_data():
    with pytest.raises(ValueError, match="data must be 'synthetic' or 'mnist', got 'cifar'"):
        mnist.load_data("cifar", "", True)


# ---- the real set -------------------------------------------------------------------------------------------------


def zeros(name):
    """A file in MNIST's format, with black images."""
    n = 60_000 if "train" in name else 10_000
    header = [0x801, n]
    size = n
    if "images" in name:
        header = [0x803, n, 28, 28]
        size = n * 28 * 28
    return b"".join(number.to_bytes(4, "big") for number in header) + bytes(size)


ZEROS = {name: hashlib.sha256(zeros(name)).hexdigest() for name in mnist.MNIST_FILES}


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    """A web server with four black files: (url, names and checksums, its folder)."""
    folder, resources = tmp_path_factory.mktemp("mirror"), []
    for name in mnist.MNIST_FILES:
        (folder / f"{name}.gz").write_bytes(compressed := gzip.compress(zeros(name), 1))
        resources.append((f"{name}.gz", hashlib.md5(compressed).hexdigest()))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", resources, folder
        server.shutdown()


def load_worker(local_rank, world_size, url, resources, data_dir):
    """Load both halves, where rank 0 alone has a network."""
    import torchvision

    dist.init_process_group()
    mirrors = [NOWHERE if local_rank else url]
    changes = {"mirrors": mirrors, "resources": resources or torchvision.datasets.MNIST.resources}
    black = mock.patch.dict(mnist.MNIST_FILES, ZEROS)
    with mock.patch.multiple(torchvision.datasets.MNIST, **changes), black:
        try:
            train, test = (mnist.load_data("mnist", data_dir, half) for half in (True, False))
        except SystemExit as error:
            assert set(dist.gather_objects(error.code)) == {error.code}, "the same on every rank"
            raise
    assert train.images.shape == (60_000, 1, 28, 28) and len(test) == 10_000
    assert (train.images.dtype, train.labels.dtype) == (torch.uint8, torch.int64)


def load_test_set(local_rank, world_size, data_dir):
    with mock.patch.dict(mnist.MNIST_FILES, ZEROS):
        mnist.load_data("mnist", data_dir, train=False)


def load(nprocs, url, resources, data_dir):
    dist.launch(load_worker, url, resources, str(data_dir), nprocs=nprocs)


def test_download_by_one_process_and_wrong_files(mirror, tmp_path):
    url, resources, gz_folder = mirror
    load(2, url, resources, tmp_path / "data")
    raw = tmp_path / "data" / "MNIST" / "raw"
    assert sorted(os.listdir(raw)) == sorted(mnist.MNIST_FILES)

    for nprocs, name, change in (
        (2, "t10k-labels-idx1-ubyte", lambda whole: whole[:-1] + b"\1"),
        (1, "train-images-idx3-ubyte", lambda whole: whole[:5000]),
    ):
        content = change(zeros(name))
        (raw / name).write_bytes(content)
        message = exit_message(load, nprocs, url, resources, tmp_path / "data")
        assert message == f"{raw / name} is damaged or not MNIST's ({len(content)} bytes): delete it and start again"
        assert (raw / name).read_bytes() == content, "the user's file is left alone"
        assert exit_message(dist.launch, load_test_set, str(tmp_path / "data"), nprocs=1) == message, "of either half"
        (raw / name).unlink()
    load(1, url, resources, tmp_path / "data")  # without them: downloaded again

    shutil.copytree(gz_folder, tmp_path / "compressed" / "MNIST" / "raw")
    load(1, NOWHERE, resources, tmp_path / "compressed")


def test_a_node_that_unpacks_into_a_shared_folder(tmp_path, monkeypatch):
    """A second one comes when the first has unpacked half of the last file."""
    from torchvision.datasets import MNIST

    loaded = []

    def unpack(self):
        os.makedirs(self.raw_folder, exist_ok=True)
        for name in mnist.MNIST_FILES:
            path = Path(self.raw_folder, name)
            path.write_bytes(zeros(name)[:9_000])
            if name == list(mnist.MNIST_FILES)[-1] and not loaded:
                loaded.append(None)
                loaded[0] = mnist.load_data("mnist", tmp_path, train=False)
            path.write_bytes(zeros(name))

    monkeypatch.setattr(MNIST, "download", unpack)
    monkeypatch.setattr(mnist, "MNIST_FILES", ZEROS)
    loaded.append(mnist.load_data("mnist", tmp_path, train=False))
    assert [len(dataset) for dataset in loaded] == [10_000] * 2
    assert sorted(os.listdir(tmp_path / "MNIST" / "raw")) == sorted(mnist.MNIST_FILES)


@pytest.mark.parametrize("nprocs", [1, 3])
def test_no_network_is_one_line_on_every_rank(nprocs, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for folder, reason in ((tmp_path / "data", "refused"), (tmp_path / "file", "Not a directory")):
        message = exit_message(load, nprocs, NOWHERE, None, folder)
        for word in (str(folder / "MNIST" / "raw"), *mnist.MNIST_FILES, "--data synthetic", reason):
            assert word in message


@pytest.mark.slow
def test_no_network_in_a_script(tmp_path):
    environment = {"http_proxy": NOWHERE, "https_proxy": NOWHERE}
    command = ("mnist_FSDP.py", "--data", "mnist", "--data-dir", tmp_path / "data", "--nproc", 2)
    status, _, stderr = run(*command, env=environment)
    assert status == 1
    assert stderr.startswith(f"MNIST is not in {tmp_path / 'data' / 'MNIST' / 'raw'} and cannot be downloaded"), stderr
    assert stderr.count("\n") == 1, stderr


@needs_mnist
def test_real_mnist():
    train, test = (mnist.load_data("mnist", MNIST_ROOT, half) for half in (True, False))
    assert (len(train), len(test)) == (60_000, 10_000)
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9] and test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    normal = mnist.normalize(train.images)
    assert abs(normal.mean()) < 1e-3 and abs(normal.std() - 1) < 1e-3


# ---- forward and evaluation ---------------------------------------------------------------------------------------


def test_forward_computes_in_bfloat16_if_told_to():
    images, labels = digits(8).__getitems__(range(8))
    net = mnist.SimpleCNN()
    expected = F.cross_entropy(net(mnist.normalize(images)), labels, reduction="none")
    for mixed, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        outputs, same, losses = mnist.forward(net, images, labels, torch.device("cpu"), mixed)
        assert (outputs.dtype, losses.dtype, losses.shape) == (dtype, torch.float32, (8,)) and same is labels
        assert torch.allclose(losses, expected, rtol=0.05 if mixed else 1e-6)


def evaluate_worker(local_rank, world_size, folder):
    dist.init_process_group()
    results = []
    with few_digits(1, 1):
        for size in (101, 60, 2, 1):
            for kind in (digits, lambda n: Plain(digits(n))):
                for sharded in (False, True):
                    torch.manual_seed(4)
                    model = dist.prepare_fsdp_model(Net(), (torch.nn.Linear, torch.nn.Conv2d)) if sharded else Net()
                    results.append(mnist.evaluate(model, loaders(kind(size))[1], dist.get_device()))
        torch.manual_seed(4)
        net = Normed()
        net.layers[2].running_mean.fill_(local_rank)  # as it is after training, each rank with its own
        results.append(mnist.evaluate(net, loaders(digits(101))[1], dist.get_device()))
    torch.save(results, f"{folder}/{world_size}-{local_rank}.pt")


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_any_number_of_ranks_evaluates_as_one_process(nprocs, tmp_path):
    """Also fewer samples than ranks, and a sharded model, which no rank may leave early."""
    expected = []
    with few_digits(1, 1):
        for size in (101, 60, 2, 1):
            torch.manual_seed(4)
            expected += [result_of(Net(), digits(size))] * 4
        torch.manual_seed(4)
        expected.append(result_of(Normed(), digits(101)))
    dist.launch(evaluate_worker, str(tmp_path), nprocs=nprocs)
    for rank in range(nprocs):
        results = torch.load(tmp_path / f"{nprocs}-{rank}.pt", weights_only=True)
        assert [counts for _, *counts in results] == [counts for _, *counts in expected]
        assert [loss for loss, *_ in results] == pytest.approx([loss for loss, *_ in expected], rel=1e-12)


# ---- data path ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_data_path_is_20_times_faster(tmp_path):
    environment = {"BENCHMARK_RESULTS": str(tmp_path)}
    status, stdout, stderr = run("-m", "benchmarks.data_path", "--rounds", 3, timeout=110, env=environment)
    assert status == 0, stderr
    assert float(stdout.split("ratio")[1].split()[0]) >= 20, stdout
