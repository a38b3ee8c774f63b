"""Documents per second of min_Stream.py and of documents in memory; tokens per second of packed and padded rows.

    python -m benchmarks.text_data [--rounds 3]

- "stream": the loader of min_Stream.py, without training, with 0, 1 and 2 loader processes.
- "in memory": the same documents in a list, in an order of their own, made into the same rows by a DataLoader.
- "packed", "padded": trainings of one process by min_Packing.py, without --pad and with it, without the padding.

The cases alternate, and only ratios within a round mean something.
"""

import argparse
import itertools
import re
import subprocess
import sys
import time
from pathlib import Path

from torch.utils.data import DataLoader, Dataset

import gpt
import min_Stream
import options
from benchmarks import common

SCRIPT = Path(__file__).parent.parent / "min_Packing.py"
STEPS, BATCH = 200, 16
TRAINING = ("--nproc", 1, "--steps", 40, "--log-every", 20)


class InMemory(Dataset):
    def __init__(self, texts, length):
        self.texts = texts
        self.length = length

    def __getitem__(self, numbers):
        return min_Stream.pad_texts([self.texts[number] for number in numbers], self.length)


def documents_per_second(loader):
    begin = time.perf_counter()
    batches = sum(1 for _ in loader)
    return batches * BATCH / (time.perf_counter() - begin)


def read(results, name, kind, num_workers, shards):
    args = argparse.Namespace(
        steps=STEPS, global_batch_size=BATCH, length=128, seed=0, buffer=512, num_workers=num_workers
    )
    stream = min_Stream.Stream(shards, args)
    if kind == "stream":
        loader = min_Stream.make_loader(stream, 0, args)
    else:
        texts = []
        for path, places in shards:
            texts += [min_Stream.read_document(path, start, end) for start, end in itertools.pairwise(places)]
        numbers = []
        while len(numbers) < STEPS * BATCH:  # epochs
            numbers += min_Stream.shuffled(len(texts), len(numbers))
        batches = [numbers[step * BATCH : (step + 1) * BATCH] for step in range(STEPS)]
        loader = DataLoader(InMemory(texts, args.length), batch_size=None, sampler=batches, num_workers=num_workers)
    results[name].append(documents_per_second(loader))


def train(results, waste, name, *given):
    command = [sys.executable, SCRIPT, *map(str, (*TRAINING, *given))]
    stdout = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600).stdout
    waste[name] = float(re.search(r"([\d.]+) % padding", stdout)[1])
    speed = float(re.findall(r"([\d,]+) tokens/s", stdout)[-1].replace(",", ""))
    results[name].append(speed * (1 - waste[name] / 100))


def main():
    parser = options.ArgumentParser(__doc__)
    parser.add_argument("--rounds", type=options.whole_number(1), default=3, help="measurements of each case")
    args = parser.parse_args()

    results, waste, cases = {}, {}, {}
    shards = min_Stream.open_shards(sorted(gpt.LIBRARY.glob("*.py")))
    for num_workers in (0, 1, 2):
        for kind in ("stream", "in memory"):
            name = f"{kind}, {num_workers} loader processes"
            results[name] = []
            cases[name] = lambda name=name, kind=kind, n=num_workers: read(results, name, kind, n, shards)
    for name, given in (("packed", ()), ("padded", ("--pad",))):
        results[name] = []
        cases[name] = lambda name=name, given=given: train(results, waste, name, *given)
    common.alternate(cases, args.rounds)

    ratios = {}
    for num_workers in (0, 1, 2):
        suffix = f"{num_workers} loader processes"
        stream, in_memory = results[f"stream, {suffix}"], results[f"in memory, {suffix}"]
        ratios[f"stream / in memory, {suffix}"] = common.ratio(stream, in_memory, "none")
    ratios["packed / padded"] = common.ratio(results["packed"], results["padded"], "above 1")
    common.show(ratios)
    for name, percent in waste.items():
        print(f"{name}: {percent} % of the positions are wasted")
    speeds = {name: common.summary(values) for name, values in results.items()}
    unit = "documents/s of loaders, tokens/s of trainings"
    common.write("text_data", {"unit": unit, "results": speeds, "ratios": ratios, "wasted %": waste})


if __name__ == "__main__":
    main()
