"""Data and models of the image scripts: MNIST, or digits drawn by this file, and three convolutional networks.

    import mnist

    mnist.add_data_options(parser)  # --data and --data-dir
    train_set = mnist.load_data(args.data, args.data_dir, train=True)
    loader = DataLoader(train_set, 64, sampler=sampler, collate_fn=mnist.collate)
    for images, labels in loader:  # uint8 (n, 1, 28, 28) and int64 (n,)
        outputs = model(mnist.normalize(images.to(device)))

A data set is two tensors in memory. A whole batch is taken from it at once, as bytes, and becomes float on the device.
This is about 60 times faster than the usual way, which sends sample by sample through `ToTensor` and `Normalize`
(`python -m benchmarks.data_path`). For data of your own, return any Dataset of images and labels from `load_data`, and
change `normalize` to suit it.
"""

import os

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

import distributed as dist

# ---- data ---------------------------------------------------------------------------------------------------------

# Mean and standard deviation of MNIST's training images. Black is 0 and white is 1.
MEAN = 0.1307
STD = 0.3081

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
    """`images`, uint8 (n, 1, 28, 28), and `labels`, int64 (n,). A DataLoader gets whole batches from it."""

    classes = tuple("0123456789")

    def __init__(self, images, labels):
        self.images = images
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitems__(self, indices):
        # The shorter forms are slower: torch.tensor(indices) takes three times as long, images[indices] twice as long.
        indices = torch.from_numpy(np.asarray(indices, dtype=np.int64))
        return self.images.index_select(0, indices), self.labels.index_select(0, indices)


def collate(batch):
    """A DataLoader's `collate_fn`: `Digits` gives a whole batch already, any other data set a list of samples."""
    if isinstance(batch, tuple):
        return batch
    return default_collate(batch)


def add_data_options(parser):
    """Add --data and --data-dir, the first two arguments of `load_data`."""
    help_text = "synthetic digits, or the real MNIST, downloaded once"
    parser.add_argument("--data", choices=("synthetic", "mnist"), default="synthetic", help=help_text)
    parser.add_argument("--data-dir", default="data", help="folder that holds MNIST, or to which it is downloaded")


def load_data(name, data_dir, train, seed=0):
    """The training set or the test set, as `Digits`.

    "synthetic" has 20,000 training and 10,000 test digits, drawn from `seed`: the same ones in every process and in
    every run. "mnist" has 60,000 and 10,000, read from `data_dir`/MNIST/raw, where torchvision keeps them. If files are
    missing there, one process per machine downloads them, so download first if machines share the folder. Every rank
    must call this function. Raises DistributedError on every rank if a file cannot be downloaded, or is damaged.
    """
    if name == "synthetic":
        if train:
            return _draw_digits(20_000, 2 * seed + 1)
        return _draw_digits(10_000, 2 * seed)
    from torchvision.datasets import MNIST  # takes 0.4 s, and synthetic data do not need it

    error = None
    if dist.get_local_rank() == 0:
        folder = os.path.join(os.path.abspath(data_dir), "MNIST", "raw")
        error = _problem_of(folder, "train" if train else "t10k")
        try:
            if error is None:
                MNIST(data_dir, train, download=True)
        except Exception as failure:  # whatever torchvision raises
            error = f"cannot download MNIST to {folder} ({_reason(failure)}): --data synthetic needs no files"
    dist.raise_on_all(error)  # here the other ranks wait for the download
    data = MNIST(data_dir, train)
    return Digits(data.data[:, None], data.targets)


def _problem_of(folder, half):
    """Which file of a half of MNIST is damaged, and how. None if both are whole, or if one is not there."""
    from torchvision.datasets.mnist import read_image_file, read_label_file

    try:
        path = os.path.join(folder, f"{half}-images-idx3-ubyte")
        images = read_image_file(path)
        path = os.path.join(folder, f"{half}-labels-idx1-ubyte")
        labels = read_label_file(path)
        if len(labels) != len(images):
            raise ValueError(f"{len(labels)} labels for {len(images)} images")
        if labels.max() > 9:
            raise ValueError(f"label {labels.max()} is not a digit from 0 to 9")
    except FileNotFoundError:
        return None
    except Exception as failure:  # whatever torchvision raises
        return f"cannot read {path} ({_reason(failure)}): delete it if it is damaged, or use --data synthetic"
    return None


def _reason(failure):
    """The last line of an error's message."""
    return str(failure).strip().rpartition("\n")[2] or type(failure).__name__


def _draw_digits(n, seed):
    """`n` digits: glyphs that are shifted, scaled, turned, sheared, blurred and covered with noise, all at random."""
    glyphs = _glyphs()
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (n,), generator=generator)
    images = torch.empty(n, 1, 28, 28, dtype=torch.uint8)
    for part, digits in zip(images.split(2000), labels.split(2000), strict=True):  # 2000 at a time, to save memory
        place = _random_place(len(digits), generator)
        grid = F.affine_grid(place, list(part.shape), align_corners=False)
        ink = F.grid_sample(glyphs[digits], grid, align_corners=False)
        blurred = F.avg_pool2d(ink, 3, 1, 1)
        ink = torch.lerp(ink, blurred, _uniform(0, 1, len(digits), generator).view(-1, 1, 1, 1))
        noise = torch.randn(ink.shape, generator=generator, dtype=torch.float32)
        strength = _uniform(0, 0.3, len(digits), generator).view(-1, 1, 1, 1)
        part.copy_((ink + noise * strength).clamp(0, 1) * 255)
    return Digits(images, labels)


def _glyphs():
    """The ten glyphs as images, float32 (10, 1, 7, 5)."""
    glyphs = torch.zeros(10, 1, 7, 5, dtype=torch.float32)
    for y, line in enumerate(GLYPHS.strip().split("\n")):
        for digit, row in enumerate(line.split()):  # row y of each glyph
            glyphs[digit, 0, y] = torch.tensor([pixel == "#" for pixel in row])
    return glyphs


def _random_place(n, generator):
    """`n` matrices (2, 3) for affine_grid. They map an image's coordinates, -1 to 1, to its glyph's coordinates."""
    angle = _uniform(-0.4, 0.4, n, generator)
    shear = _uniform(-0.3, 0.3, n, generator)
    width = _uniform(1.4, 2.6, n, generator)  # a larger number makes a smaller digit
    height = _uniform(1.1, 2.0, n, generator)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=1).view(n, 2, 2)
    stretch = torch.stack([width, shear, torch.zeros_like(width), height], dim=1).view(n, 2, 2)
    shift_x = _uniform(-0.6, 0.6, n, generator)
    shift_y = _uniform(-0.4, 0.4, n, generator)
    shift = torch.stack([shift_x, shift_y], dim=1)[..., None]
    return torch.cat([stretch @ turn, shift], dim=2)


def _uniform(low, high, n, generator):
    return low + (high - low) * torch.rand(n, generator=generator, dtype=torch.float32)


def normalize(images):
    """uint8 images of any shape as floats. Over MNIST, their mean is 0 and their standard deviation is 1."""
    # This is (images / 255 - MEAN) / STD, in two passes over the images instead of three.
    return images / (255 * STD) - MEAN / STD


# ---- models: (n, 1, 28, 28) to (n, classes) -----------------------------------------------------------------------


class SimpleCNN(nn.Module):
    """Two convolutions and one linear layer, without dropout: 50,186 parameters. Gives logits."""

    def __init__(self, n_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc = nn.Linear(3136, n_classes)

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

    def features(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return self.dropout1(F.max_pool2d(x, 2)).flatten(1)

    def forward(self, x):
        x = self.features(x)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


class DeepNet(ShallowNet):
    """ShallowNet with four more linear layers: 94,104,234 parameters, 88 % of them in the first one."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(9216, 9000)
        self.fc2 = nn.Linear(9000, 1000)
        self.fc3 = nn.Linear(1000, 1000)
        self.fc4 = nn.Linear(1000, 1000)
        self.fc5 = nn.Linear(1000, 128)
        self.fc6 = nn.Linear(128, 10)

    def forward(self, x):
        x = self.features(x)
        for layer in (self.fc1, self.fc2, self.fc3, self.fc4, self.fc5):
            x = F.relu(layer(x))
        return F.log_softmax(self.fc6(self.dropout2(x)), dim=1)


MODELS = {"simple": SimpleCNN, "shallow": ShallowNet, "deep": DeepNet}
