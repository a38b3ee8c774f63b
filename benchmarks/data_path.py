"""Whole batches of bytes against the usual pipeline, sample by sample through `ToTensor` and `Normalize`.

    python benchmarks/data_path.py                              # both read 64 digits at a time, in turn, 5 times
    python benchmarks/data_path.py --json benchmarks/results    # and write data_path.json there

Both read the same digits in the same order through a DataLoader with a DistributedSampler, in this process, up to a
normalized float batch. It prints samples per second (median, lowest and highest of the repeats) and the ratio of the
medians.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import torchvision
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import distributed as dist
import mnist


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        usage=argparse.SUPPRESS,  # so that an error is one line
    )
    parser.add_argument("--batch-size", "--batch_size", type=dist.at_least(1), default=64, help="samples per batch")
    parser.add_argument("--repeats", type=dist.at_least(1), default=5, help="passes of each pipeline")
    parser.add_argument("--json", metavar="FOLDER", help="write data_path.json to this folder")
    mnist.add_data_options(parser)
    return parser.parse_args()


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


def samples_per_second(loader, prepare, epoch):
    loader.sampler.set_epoch(epoch)
    start = time.perf_counter()
    for images, _ in loader:
        prepare(images)
    return len(loader.dataset) / (time.perf_counter() - start)


def main(args):
    torch.set_num_threads(1)  # a batch is small: more threads only wait for each other
    digits = mnist.load_data(args.data, args.data_dir, train=True)
    per_sample = PerSample(digits)
    batches = DataLoader(
        digits, args.batch_size, sampler=dist.data_sampler(digits, True, shuffle=True), collate_fn=tuple
    )
    samples = DataLoader(per_sample, args.batch_size, sampler=dist.data_sampler(per_sample, True, shuffle=True))
    for (ours, labels), (usual, usual_labels) in zip(batches, samples, strict=True):
        assert torch.allclose(mnist.normalize(ours), usual, atol=1e-6) and torch.equal(labels, usual_labels)
        break  # the same batch, so the same work

    speeds = {"whole batches": [], "per sample": []}
    for epoch in range(args.repeats):  # in turn: what else the machine does then touches both alike
        speeds["whole batches"].append(samples_per_second(batches, mnist.normalize, epoch))
        speeds["per sample"].append(samples_per_second(samples, lambda images: images, epoch))

    print(f"{'samples/s':<16}{'n':>4}{'median':>12}{'min':>12}{'max':>12}")
    rows = {}
    for name, values in speeds.items():
        row = {"n": len(values), "median": statistics.median(values), "min": min(values), "max": max(values)}
        rows[name] = {key: round(value) for key, value in row.items()}
        print(f"{name:<16}{row['n']:>4}{row['median']:>12,.0f}{row['min']:>12,.0f}{row['max']:>12,.0f}")
    ratio = rows["whole batches"]["median"] / rows["per sample"]["median"]
    print(f"ratio {ratio:.1f}")
    if args.json:
        result = {
            "what": f"samples/s of {args.data} digits, batch {args.batch_size}, one process, one thread",
            "date": datetime.date.today().isoformat(),
            "machine": f"{os.cpu_count()} x {platform.machine()}, {platform.system()}",
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "torchvision": torchvision.__version__,
            },
            "rows": rows,
            "ratio": round(ratio, 1),
        }
        os.makedirs(args.json, exist_ok=True)
        Path(args.json, "data_path.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(parse_args())
