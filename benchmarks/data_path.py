"""Whole batches of bytes against the usual pipeline, sample by sample through `ToTensor` and `Normalize`.

    python -m benchmarks.data_path [--rounds 5]

Both read the same digits in the same order through a DataLoader with a DistributedSampler, in this process, up to a
normalized float batch of 64. The numbers are samples per second.
"""

import argparse

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

import distributed as dist
import mnist
import options
from benchmarks import common


class PerSample(Dataset):
    """The usual: what torchvision.datasets.MNIST does with `ToTensor` and `Normalize`."""

    def __init__(self, digits):
        self.images = digits.images[:, 0]
        self.labels = digits.labels
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((mnist.MEAN,), (mnist.STD,))])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = Image.fromarray(self.images[index].numpy())
        return self.transform(image), int(self.labels[index])


def read(loader, prepare):
    for images, _ in loader:
        prepare(images)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=options.whole_number(1), default=5, help="passes of each pipeline")
    args = parser.parse_args()
    torch.set_num_threads(1)  # a batch is small: more threads only wait for each other
    digits = mnist.load_data("synthetic", None, train=True)
    per_sample = PerSample(digits)
    batches = DataLoader(digits, 64, sampler=dist.data_sampler(digits, True, shuffle=True), collate_fn=mnist.collate)
    samples = DataLoader(per_sample, 64, sampler=dist.data_sampler(per_sample, True, shuffle=True))
    (ours, labels), (usual, usual_labels) = next(iter(batches)), next(iter(samples))
    assert torch.allclose(mnist.normalize(ours), usual, atol=1e-6) and torch.equal(labels, usual_labels)

    cases = {
        "whole batches": lambda: read(batches, mnist.normalize),
        "per sample": lambda: read(samples, lambda images: images),
    }
    times = common.alternate(cases, args.rounds)
    results = {name: common.summary([len(digits) / seconds for seconds in values]) for name, values in times.items()}
    for name, row in results.items():
        print(f"{name:16} {row['median']:10,.0f} samples/s")
    ratio = results["whole batches"]["median"] / results["per sample"]["median"]
    print(f"ratio {ratio:.1f} (promised: at least 20)")
    common.write("data_path", {"unit": "samples/s", "results": results, "ratio": ratio})


if __name__ == "__main__":
    main()
