"""The data and the models of the image scripts: MNIST or digits drawn here, and three convolutional networks.

    import mnist

    mnist.add_data_options(parser)                                      # --data and --data-dir
    loader, test_loader = mnist.make_loaders(args, device)
    for images, labels in loader:                                       # uint8 (n, 1, 28, 28), int64 (n,)
        outputs, labels, losses = mnist.forward(model, images, labels, device)
    test_loss, hits, n = mnist.evaluate(model, test_loader, device)     # over all processes

A data set is two tensors in memory, from which a whole batch is taken at once, as bytes, and made a float on the
device. Taken sample by sample through `ToTensor` and `Normalize`, as is usual, the same data arrive 20 times slower.
To use data of your own, let `load_data` return any Dataset of images and labels, and change `normalize` to suit it.
"""

import contextlib
import glob
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

import distributed as dist

# ---- data ---------------------------------------------------------------------------------------------------------

MEAN, STD = 0.1307, 0.3081  # of MNIST's training images, as fractions of white

MNIST_FILES = {  # name: SHA-256, unpacked
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}

GLYPHS = """
.###. ..#.. .###. .###. ...#. ##### ..##. ##### .###. .###.
#...# .##.. #...# #...# ..##. #.... .#... ....# #...# #...#
#...# ..#.. ....# ....# .#.#. ####. #.... ...#. #...# #...#
#...# ..#.. ...#. ..##. #..#. ....# ####. ..#.. .###. .####
#...# ..#.. ..#.. ....# ##### ....# #...# .#... #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# .#... #...# ...#.
.###. .###. ##### .###. ...#. .###. .###. .#... .###. .##..
"""


class Digits(Dataset):
    """`images`, uint8 (n, 1, 28, 28), and `labels`, int64 (n,), given out in whole batches."""

    def __init__(self, images, labels):
        self.images = images
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitems__(self, indices):
        indices = torch.from_numpy(np.asarray(indices, dtype=np.int64))  # torch takes three times as long for a list
        # index_select copies whole images, images[indices] pixel by pixel, which takes twice as long.
        return self.images.index_select(0, indices), self.labels.index_select(0, indices)


def collate(batch):
    """What a DataLoader has fetched: a whole batch, as `Digits` gives it, or a list of samples, to be put together."""
    return batch if isinstance(batch, tuple) else default_collate(batch)


def add_data_options(parser):
    """Add --data and --data-dir, the first two arguments of `load_data`."""
    add = parser.add_argument
    add("--data", choices=("synthetic", "mnist"), default="synthetic", help="drawn here, or the real set")
    add("--data-dir", default="data", help="where MNIST is, or is downloaded to")


def load_data(name, data_dir, train, seed=0):
    """The training or the test half of a data set, as `Digits`.

    "synthetic": 20,000 or 10,000 digits drawn from `seed`, the same ones in every process and in every run. "mnist":
    the 60,000 or 10,000 of MNIST from `data_dir`/MNIST/raw, downloaded first if need be by one process per machine.
    For "mnist" every rank must call it. Raises SystemExit with one line, on every rank, if the files are missing and
    cannot be downloaded, or are not MNIST's, and ValueError for another `name`.
    http://yann.lecun.com/exdb/mnist/
    """
    if name == "synthetic":
        return _draw_digits(20_000 if train else 10_000, 2 * seed + train)
    if name != "mnist":
        raise ValueError(f"data must be 'synthetic' or 'mnist', got {name!r}")
    from torchvision.datasets import MNIST  # takes 0.4 s, which synthetic data need not wait for

    # The other ranks wait here, and learn from it if one has failed: none would come to a barrier that it skips.
    error = None
    if dist.get_local_rank() == 0:
        error = _fetch_mnist(MNIST, data_dir, train)
    dist.raise_on_all(error)
    data = MNIST(data_dir, train)
    return Digits(data.data[:, None], data.targets)


def _fetch_mnist(mnist_class, data_dir, train):
    """Download MNIST unless it is there, and check that half of it; returns what is wrong in one line, or None."""
    folder = os.path.join(os.path.abspath(data_dir), "MNIST", "raw")
    missing = [name for name in MNIST_FILES if not os.path.exists(os.path.join(folder, name))]
    try:
        if missing:
            os.makedirs(folder, exist_ok=True)
            # Unpacked out of sight, then renamed: a node that shares the folder finds a file whole, or not at all.
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                unpacked = os.path.join(temporary, "MNIST", "raw")
                os.makedirs(unpacked)
                for path in glob.glob(os.path.join(glob.escape(folder), "*.gz")):
                    shutil.copy(path, unpacked)
                mnist_class(temporary, download=True)
                for name in missing:
                    os.replace(os.path.join(unpacked, name), os.path.join(folder, name))
        for name in (name for name in MNIST_FILES if name.startswith("train") == train):
            content = Path(folder, name).read_bytes()
            if hashlib.sha256(content).hexdigest() != MNIST_FILES[name]:
                return f"{folder}/{name} is damaged or not MNIST's ({len(content)} bytes): delete it and start again"
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1]
        return (
            f"MNIST is not in {folder} and cannot be downloaded ({reason}): put {', '.join(MNIST_FILES)} there, "
            "as they are or as .gz, or use --data synthetic, which needs no files"
        )


def make_loaders(args, device):
    """This rank's DataLoaders of training and test data, in whole batches of images and labels.

    `args` has the options data, data_dir, seed, batch_size and test_batch_size. Call `loader.sampler.set_epoch(epoch)`.
    """
    train_set = load_data(args.data, args.data_dir, train=True, seed=args.seed)
    test_set = load_data(args.data, args.data_dir, train=False, seed=args.seed)
    # The sampler also for one process: the order, and so the result, is then the same for any number of them.
    sampler = dist.data_sampler(train_set, True, shuffle=True, seed=args.seed)
    test_sampler = dist.data_sampler(test_set, True, shuffle=False)
    options = {"collate_fn": collate, "pin_memory": device.type == "cuda"}
    return (
        DataLoader(train_set, args.batch_size, sampler=sampler, **options),
        DataLoader(test_set, args.test_batch_size, sampler=test_sampler, **options),
    )


def _draw_digits(n, seed):
    """`n` digits: a glyph shifted, scaled, turned, sheared, blurred and covered with noise, each at random."""
    rows = [row.split() for row in GLYPHS.split("\n")[1:-1]]  # 7 rows of each of the 10 glyphs
    glyphs = torch.tensor([[[pixel == "#" for pixel in row[digit]] for row in rows] for digit in range(10)])
    glyphs = glyphs.float()[:, None]
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (n,), generator=generator)
    images = torch.empty(n, 1, 28, 28, dtype=torch.uint8)

    def uniform(low, high):
        return low + (high - low) * torch.rand(len(digits), generator=generator, dtype=torch.float32)

    for part, digits in zip(images.split(2000), labels.split(2000), strict=True):  # 2000 at a time, to save memory
        # From a place in the image, -1 to 1 across, to a place in the glyph: so a larger scale is a smaller digit.
        angle, shear = uniform(-0.4, 0.4), uniform(-0.3, 0.3)
        width, height = uniform(1.4, 2.6), uniform(1.1, 2.0)
        turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=1).view(-1, 2, 2)
        stretch = torch.stack([width, shear, torch.zeros_like(width), height], dim=1).view(-1, 2, 2)
        shift = torch.stack([uniform(-0.6, 0.6), uniform(-0.4, 0.4)], dim=1)[..., None]
        grid = F.affine_grid(torch.cat([stretch @ turn, shift], dim=2), list(part.shape), align_corners=False)
        ink = F.grid_sample(glyphs[digits], grid, align_corners=False)
        ink = torch.lerp(ink, F.avg_pool2d(ink, 3, 1, 1), uniform(0, 1).view(-1, 1, 1, 1))
        noise = torch.randn(ink.shape, generator=generator, dtype=torch.float32) * uniform(0, 0.3).view(-1, 1, 1, 1)
        part.copy_((ink + noise).clamp(0, 1) * 255)
    return Digits(images, labels)


def normalize(images):
    """uint8 images of any shape as floats with MNIST's mean at 0 and its standard deviation at 1."""
    return images / (255 * STD) - MEAN / STD  # (images / 255 - MEAN) / STD with one pass less over the images


# ---- models: (n, 1, 28, 28) to (n, 10) ----------------------------------------------------------------------------


class SimpleCNN(nn.Module):
    """Two convolutions and one linear layer, without dropout: 50,186 parameters. Gives logits."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc = nn.Linear(3136, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


class ShallowNet(nn.Module):
    """Two convolutions and two linear layers, with dropout: 1,199,882 parameters. Gives log-probabilities."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


class DeepNet(nn.Module):
    """ShallowNet with four more linear layers: 94,104,234 parameters, 88 % of them in the first one."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 9000)
        self.fc2 = nn.Linear(9000, 1000)
        self.fc3 = nn.Linear(1000, 1000)
        self.fc4 = nn.Linear(1000, 1000)
        self.fc5 = nn.Linear(1000, 128)
        self.fc6 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        for layer in (self.fc1, self.fc2, self.fc3, self.fc4, self.fc5):
            x = F.relu(layer(x))
        return F.log_softmax(self.fc6(self.dropout2(x)), dim=1)


MODELS = {"simple": SimpleCNN, "shallow": ShallowNet, "deep": DeepNet}


# ---- forward and evaluation ---------------------------------------------------------------------------------------


def forward(model, images, labels, device, mixed_precision=False):
    """Outputs (n, 10), labels (n,) and losses (n,), on `device`."""
    images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
    # With enabled=False instead, it takes 1 % of a small model's step.
    autocast = torch.autocast(device.type, torch.bfloat16) if mixed_precision else contextlib.nullcontext()
    with autocast:  # the losses stay float32
        outputs = model(normalize(images))
        # For logits and for log-probabilities alike: the log-softmax in it leaves the latter as they are.
        return outputs, labels, F.cross_entropy(outputs, labels, reduction="none")


@torch.no_grad()
def evaluate(model, loader, device, mixed_precision=False):
    """Mean loss, correct predictions and samples, over all processes, each sample counted once.

    `loader` has a sampler of `dist.data_sampler`, or none in a single process. Padded, as in `make_loaders`, it gives
    all ranks equally many batches, which a sharded model needs; what it repeats to that end is not counted.
    """
    model.eval()
    dist.sync_params(model.buffers())  # batch norm's differ by rank: rank 0's are evaluated, as they are saved
    share = len(range(dist.get_rank(), len(loader.dataset), dist.get_world_size()))
    sums, n = torch.zeros(2, dtype=torch.float64, device=device), 0  # of losses and of hits
    for images, labels in loader:
        outputs, labels, losses = forward(model, images, labels, device, mixed_precision)
        new = min(len(labels), share - n)  # the others are repeated
        sums += torch.stack([losses[:new].sum(dtype=sums.dtype), (outputs.argmax(dim=1) == labels)[:new].sum()])
        n += new
    loss_sum, hits, n = dist.all_reduce(torch.cat([sums, sums.new_tensor([n])])).tolist()
    return loss_sum / n, int(hits), int(n)
