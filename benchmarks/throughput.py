"""Training throughput: the scripts' own loop against hand-written DDP, the usual tutorial loop, Accelerate and Fabric.

    python -m benchmarks.throughput                            # all GPUs, or two CPU processes; both models
    python -m benchmarks.throughput --model tiny --rounds 20

Same model, batch, optimizer, device, threads and number of steps; samples per second over all processes, the slowest
one's time counting. A round is an epoch of each case in turn, in the same processes, on the same digits; the first
round is not counted. Data path and, where a loop has it, the reading of the loss are included. The cases in memory
differ by a hundredth while single epochs differ by a tenth, so they are measured in more rounds, among themselves.

- "hand-written": DDP as its documentation has it, on bytes in memory that are indexed and normalized by the batch.
  Nothing else is in the loop. "hand-written, fused": the same with Adam's `fused=True`: it is the limit.
- "ours": `mnist_FSDP.train_epoch` with its DataLoader, as mnist_FSDP.py runs it with --strategy ddp.
- "tutorial": a dataset that takes each sample through ToTensor and Normalize, and `loss.item()` in every step.
- "Accelerate", "Fabric": their documented loops, on that same dataset.
- "... in memory": those loops, on the whole batches that "ours" reads.
"""

import argparse
import functools

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import distributed as dist
import mnist
import mnist_FSDP
import options
from benchmarks import common
from benchmarks.data_path import PerSample

LR = 0.001
IN_MEMORY_PEERS = ("Accelerate in memory", "Fabric in memory")
PROMISES = {  # of ours / case: samples per second
    "small": {"hand-written, fused": "at least 0.98", **dict.fromkeys(IN_MEMORY_PEERS, "at least 1")},
    "tiny": {
        "hand-written, fused": "at least 0.98",
        **dict.fromkeys(("tutorial", "Accelerate", "Fabric"), "at least 4"),
        **dict.fromkeys(IN_MEMORY_PEERS, "at least 1"),
    },
}


class TinyNet(nn.Sequential):
    """784-128-10: 101,770 parameters."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


MODELS = {"small": (mnist.SimpleCNN, 64, 25), "tiny": (TinyNet, 256, 40)}  # with batch per process, steps of an epoch
PEERS = ("Accelerate", "Fabric")
MORE_ROUNDS = {"small": 2, "tiny": 15}  # of the cases in memory, for one of all


# ---- each makes its own model and returns a function that trains an epoch -----------------------------------------


def hand_written(model, digits, batch_size, device, workers, **options):
    model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, **options)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels = digits.images.to(device), digits.labels.to(device)

    def epoch(number):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(number)).to(device)
        for index in order[rank::world_size].split(batch_size):
            batch = mnist.normalize(images.index_select(0, index))
            optimizer.zero_grad()
            F.cross_entropy(model(batch), labels.index_select(0, index)).backward()
            optimizer.step()

    return epoch


def ours(model, digits, batch_size, device, workers):
    sampler = dist.data_sampler(digits, True, shuffle=True)
    loader = DataLoader(digits, batch_size, sampler=sampler, collate_fn=tuple, pin_memory=device.type == "cuda")
    model = mnist_FSDP.wrap(model, "ddp", device, False)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, fused=True)

    def epoch(number):
        sampler.set_epoch(number)
        mnist_FSDP.train_epoch(model, loader, optimizer, device, False)

    return epoch


def tutorial(model, digits, batch_size, device, workers):
    dataset = PerSample(digits)
    sampler = DistributedSampler(dataset)
    pin_memory = device.type == "cuda"
    loader = DataLoader(dataset, batch_size, sampler=sampler, num_workers=workers, pin_memory=pin_memory)
    model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)

    def epoch(number):
        sampler.set_epoch(number)
        total = 0.0
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()

    return epoch


def plain_loader(digits, batch_size, device, workers, in_memory):
    """A DataLoader without ranks, and the function to apply to its images."""
    options = {"shuffle": True, "pin_memory": device.type == "cuda"}
    if in_memory:
        return DataLoader(digits, batch_size, collate_fn=tuple, **options), mnist.normalize
    return DataLoader(PerSample(digits), batch_size, num_workers=workers, **options), lambda images: images


def accelerate(model, digits, batch_size, device, workers, in_memory=False):
    from accelerate import Accelerator

    loader, prepare = plain_loader(digits, batch_size, device, workers, in_memory)
    accelerator = Accelerator(cpu=device.type == "cpu")  # otherwise it is a single process there
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=LR), loader)
    return peer_epoch(model, loader, optimizer, accelerator.backward, prepare, batch_size)


def fabric(model, digits, batch_size, device, workers, in_memory=False):
    from lightning.fabric import Fabric

    loader, prepare = plain_loader(digits, batch_size, device, workers, in_memory)
    runner = Fabric(accelerator=device.type, devices=dist.get_world_size(), strategy="ddp")
    runner.launch()
    model, optimizer = runner.setup(model, torch.optim.Adam(model.parameters(), lr=LR))
    loader = runner.setup_dataloaders(loader)
    return peer_epoch(model, loader, optimizer, runner.backward, prepare, batch_size)


def peer_epoch(model, loader, optimizer, backward, prepare, batch_size):
    """Both give the batches out on the device, in another order in each epoch."""

    def epoch(number):
        for images, labels in loader:
            optimizer.zero_grad()
            backward(F.cross_entropy(model(prepare(images)), labels))
            optimizer.step()

    # If they have missed that there are several processes, each trains alone, and on all the data.
    assert len(loader) == len(loader.dataset) // batch_size // dist.get_world_size()
    assert any(isinstance(module, DistributedDataParallel) for module in model.modules())
    return epoch


PER_SAMPLE = {"tutorial": tutorial, "Accelerate": accelerate, "Fabric": fabric}
IN_MEMORY = {
    "hand-written": hand_written,
    "hand-written, fused": functools.partial(hand_written, fused=True),
    "Accelerate in memory": functools.partial(accelerate, in_memory=True),
    "Fabric in memory": functools.partial(fabric, in_memory=True),
}


def main_worker(local_rank, world_size, args, name, report):
    dist.init_process_group()
    device = dist.get_device()
    model_class, batch_size, steps = MODELS[name]
    steps = args.steps or steps
    n = steps * batch_size * world_size
    drawn = mnist.load_data("synthetic", None, train=True)
    index = torch.arange(n) % len(drawn)
    digits = mnist.Digits(drawn.images[index], drawn.labels[index])
    speeds = []
    for others, rounds in ((IN_MEMORY, args.rounds * MORE_ROUNDS[name]), (PER_SAMPLE, args.rounds)):
        epochs = {}
        for case, make in {"ours": ours, **others}.items():
            if not (args.no_peers and case.startswith(PEERS)):
                torch.manual_seed(0)
                epochs[case] = make(model_class().to(device), digits, batch_size, device, args.workers)
        times = common.alternate_ranks(epochs, rounds, device)
        speeds.append({case: [n / seconds for seconds in values] for case, values in times.items()})
    report(speeds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    gpus = torch.cuda.device_count()
    parser.add_argument("--model", choices=tuple(MODELS), nargs="+", default=list(MODELS))
    parser.add_argument("--rounds", type=options.whole_number(1), default=8, help="epochs of each case, at least")
    parser.add_argument("--steps", type=options.whole_number(1), help="of an epoch (default: 25 of small, 40 of tiny)")
    parser.add_argument("--nproc", type=options.whole_number(2), default=gpus or 2, help="processes")
    parser.add_argument(
        "--workers",
        type=options.whole_number(0),
        default=4 if gpus else 0,
        help="per process, of the per-sample loaders",
    )
    parser.add_argument("--no-peers", action="store_true", help="leave out what requirements-bench.txt installs")
    args = parser.parse_args()
    if not args.no_peers:
        common.require("accelerate", "lightning")
    results, ratios = {}, {}
    for name in args.model:
        in_memory, per_sample = common.launch(main_worker, args, name, nprocs=args.nproc)
        results[name] = {case: common.summary(values) for case, values in {**per_sample, **in_memory}.items()}
        for case, row in results[name].items():
            print(f"{name:6} {case:21} {row['median']:10,.0f} samples/s ({row['min']:,.0f} to {row['max']:,.0f})")
        for speeds in (in_memory, per_sample):
            for case in (case for case in speeds if case != "ours"):
                promise = PROMISES[name].get(case, "above 1")
                ratios[f"{name}: ours / {case}"] = common.ratio(speeds["ours"], speeds[case], promise)
    common.show(ratios)
    batches = {name: MODELS[name][1] for name in args.model}
    what = {"unit": "samples/s", "processes": args.nproc, "batch per process": batches, "workers": args.workers}
    common.write("throughput", {**what, "results": results, "ratios": ratios})


if __name__ == "__main__":
    main()
