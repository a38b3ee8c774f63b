"""mnist.py: the models are the ones named, the data arrive whole, and a missing file is one line on every rank."""

import gzip
import hashlib
import http.server
import os
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import run
from torch.nn import functional as F
from torch.utils.data import DataLoader

import distributed as dist
import mnist

MNIST_ROOT = os.environ.get("MNIST_ROOT")
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
    assert not torch.equal((net := mnist.ShallowNet())(x), net(x)), "dropout"


# ---- data ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def halves():
    return mnist.load_data("synthetic", "nowhere", train=True, seed=5), mnist.load_data(
        "synthetic", "nowhere", False, 5
    )


def test_synthetic_digits(halves):
    for dataset, n in zip(halves, (20_000, 10_000), strict=True):
        assert dataset.images.shape == (n, 1, 28, 28) and dataset.images.dtype == torch.uint8
        assert dataset.labels.shape == (n,) and dataset.labels.dtype == torch.int64
        assert len(dataset) == n
        assert dataset.labels.bincount().min() > 0.08 * n and len(dataset.labels.bincount()) == 10


def test_synthetic_digits_are_seeded(halves):
    again = mnist.load_data("synthetic", "nowhere", train=False, seed=5)
    assert torch.equal(again.images, halves[1].images) and torch.equal(again.labels, halves[1].labels)
    drawn = {dataset.images[:50].numpy().tobytes() for dataset in halves}
    drawn |= {mnist.load_data("synthetic", "", train, 6).images[:50].numpy().tobytes() for train in (True, False)}
    assert len(drawn) == 4, "another seed, and the other half, are other digits"
    unique = torch.cat([dataset.images.flatten(1)[:2000] for dataset in halves]).unique(dim=0)
    assert len(unique) == 4000
    assert not torch.equal(halves[0].labels[:10_000], halves[1].labels)


def test_synthetic_digits_are_not_trivial(halves):
    """A linear model learns something, but far from everything; tests/test_min_FSDP.py shows that a CNN does."""
    train, test = halves
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is too small for more
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


def test_batches_are_whole(halves):
    class Counted(mnist.Digits):
        calls = 0

        def __getitems__(self, indices):
            self.calls += 1
            return super().__getitems__(indices)

    dataset = Counted(halves[1].images, halves[1].labels)
    sampler = dist.data_sampler(dataset, True, shuffle=True)
    batches = list(DataLoader(dataset, 64, sampler=sampler, collate_fn=tuple))
    assert dataset.calls == len(batches) == 157
    order = list(sampler)
    images, labels = batches[1]
    assert images.dtype == torch.uint8 and images.shape == (64, 1, 28, 28)
    assert torch.equal(images, dataset.images[order[64:128]]) and torch.equal(labels, dataset.labels[order[64:128]])
    empty, none = dataset.__getitems__([])
    assert empty.shape == (0, 1, 28, 28) and none.shape == (0,)


def test_normalize():
    images = torch.tensor([0, 255], dtype=torch.uint8)
    expected = torch.tensor([-0.1307 / 0.3081, (1 - 0.1307) / 0.3081])
    assert torch.allclose(mnist.normalize(images), expected)


def test_unknown_data():
    with pytest.raises(ValueError, match="data must be 'synthetic' or 'mnist', got 'cifar'"):
        mnist.load_data("cifar", "", True)


def test_import_does_nothing(tmp_path):
    code = "import sys, torch, mnist; assert 'torchvision' not in sys.modules; assert torch.initial_seed() == seed"
    code = f"import torch; seed = torch.initial_seed(); {code}"
    status, stdout, stderr = run("-c", code, cwd=tmp_path)
    assert (status, stdout, stderr) == (0, "", "") and not os.listdir(tmp_path)


# ---- the real set -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    """A web server with four files like MNIST's, all zeros: (url, checksums, what it was asked for)."""
    folder, requests = tmp_path_factory.mktemp("mirror"), []
    resources = []
    for name, size in mnist.MNIST_FILES.items():
        n = 60_000 if "train" in name else 10_000
        header = [0x803, n, 28, 28] if "images" in name else [0x801, n]
        content = b"".join(number.to_bytes(4, "big") for number in header)
        content += bytes(size - len(content))
        (folder / f"{name}.gz").write_bytes(compressed := gzip.compress(content, 1))
        resources.append((f"{name}.gz", hashlib.md5(compressed).hexdigest()))

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=folder)

        def log_message(self, *args):
            pass

        def do_GET(self):
            requests.append(Path(self.path).name)
            super().do_GET()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", resources, requests
        server.shutdown()


def load_worker(local_rank, world_size, url, resources, data_dir, folder):
    """Load both halves; what happened goes to a file per rank."""
    import torchvision

    dist.init_process_group()
    changes = {"mirrors": [url], "resources": resources or torchvision.datasets.MNIST.resources}
    with mock.patch.multiple(torchvision.datasets.MNIST, **changes):
        try:
            train, test = (mnist.load_data("mnist", data_dir, half) for half in (True, False))
            text = f"{tuple(train.images.shape)} {len(test)} {train.images.dtype} {train.labels.dtype}"
        except SystemExit as error:
            Path(f"{folder}/{local_rank}.txt").write_text(error.code)
            dist.barrier()  # so that all have written before the first one ends the others
            raise
    Path(f"{folder}/{local_rank}.txt").write_text(text)
    dist.cleanup()


def load(nprocs, url, resources, data_dir, folder):
    """What `load_data` did on each rank, and what `launch` exited with."""
    message = None
    try:
        dist.launch(load_worker, url, resources, str(data_dir), str(folder), nprocs=nprocs)
    except SystemExit as error:
        message = error.code
    return [Path(f"{folder}/{rank}.txt").read_text() for rank in range(nprocs)], message


def test_download_by_one_process_and_truncated_file(mirror, tmp_path):
    url, resources, requests = mirror
    load(1, url, resources, tmp_path / "alone", tmp_path)
    asked_by_one = requests[:]
    assert set(asked_by_one) == {f"{name}.gz" for name in mnist.MNIST_FILES}
    texts, message = load(2, url, resources, tmp_path / "data", tmp_path)
    assert message is None
    assert texts == ["(60000, 1, 28, 28) 10000 torch.uint8 torch.int64"] * 2
    assert requests == 2 * asked_by_one, "one of the two has downloaded"

    for name, size in (("t10k-labels-idx1-ubyte", 5_000), ("train-images-idx3-ubyte", 0)):
        path = tmp_path / "data" / "MNIST" / "raw" / name
        os.truncate(path, size)
        texts, message = load(2, url, resources, tmp_path / "data", tmp_path)
        expected = f"{path} is damaged: {size} bytes instead of {mnist.MNIST_FILES[name]}; delete it and start again"
        assert message == expected and texts == [expected] * 2
        assert os.path.getsize(path) == size, "the user's file is left alone"
        path.unlink()
    texts, message = load(2, url, resources, tmp_path / "data", tmp_path)
    assert message is None, "started again without them, it downloads them again"


@pytest.mark.parametrize("nprocs", [1, 3])
def test_no_network_is_one_line_on_every_rank(nprocs, tmp_path):
    texts, message = load(nprocs, NOWHERE, None, tmp_path / "data", tmp_path)
    assert "\n" not in message
    for word in (str(tmp_path / "data" / "MNIST" / "raw"), *mnist.MNIST_FILES, "--data synthetic", "refused"):
        assert word in message
    assert texts == [message] * nprocs


@pytest.mark.slow
def test_no_network_in_a_script(tmp_path):
    environment = {"http_proxy": NOWHERE, "https_proxy": NOWHERE}
    command = ("min_FSDP.py", "--data", "mnist", "--data-dir", tmp_path / "data", "--nproc", 2)
    status, _, stderr = run(*command, env=environment)
    assert status == 1
    assert stderr.startswith(f"MNIST is not in {tmp_path / 'data' / 'MNIST' / 'raw'} and cannot be downloaded"), stderr
    assert stderr.count("\n") == 1, stderr


def test_unwritable_data_folder(tmp_path):
    (tmp_path / "file").write_text("in the way")
    _, message = load(2, NOWHERE, None, tmp_path / "file", tmp_path)
    assert message.startswith(f"MNIST is not in {tmp_path / 'file'}") and "\n" not in message


@pytest.mark.skipif(not MNIST_ROOT, reason="MNIST_ROOT does not say where MNIST is")
def test_real_mnist():
    train, test = (mnist.load_data("mnist", MNIST_ROOT, half) for half in (True, False))
    assert (len(train), len(test)) == (60_000, 10_000)
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9] and test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    normal = mnist.normalize(train.images)
    assert abs(normal.mean()) < 1e-3 and abs(normal.std() - 1) < 1e-3


# ---- data path ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_data_path_is_20_times_faster(tmp_path):
    environment = {"BENCHMARK_RESULTS": str(tmp_path)}
    status, stdout, stderr = run("-m", "benchmarks.data_path", "--rounds", 3, timeout=110, env=environment)
    assert status == 0, stderr
    assert float(stdout.split("ratio")[1].split()[0]) >= 20, stdout
