"""What `dist.check_in_sync` costs: beside an epoch of mnist_DDP.py, and for 100 million parameters.

    python -m benchmarks.drift_check                         # all GPUs, or two CPU processes
    python -m benchmarks.drift_check --rounds 10

The epoch is the script's own, with its default options: 20,000 digits, in two processes. Evaluation is not counted.
"""

import argparse

import torch
from torch import nn

import distributed as dist
import mnist_DDP
import options
from benchmarks import common

LAYERS, WIDTH = 25, 2000  # 100 million parameters
PROMISE = "under 0.01"


def main_worker(local_rank, world_size, args, report):
    dist.init_process_group()
    device = dist.get_device()
    experiment = mnist_DDP.parse_args([])
    train_set, _ = mnist_DDP.load_datasets(experiment)
    steps = len(train_set) // experiment.global_batch_size
    net = mnist_DDP.make_model(train_set, experiment).to(device)
    model = dist.prepare_ddp_model(net, gradient_as_bucket_view=True)
    optimizer, _ = mnist_DDP.make_optimizer(net, experiment.lr, steps)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    large = nn.Sequential(*layers).to(device)
    dist.sync_params(large.parameters())

    def epoch(number):
        batches = mnist_DDP.load_batches(train_set, 0, steps, device, experiment)
        for step in range(steps):
            mnist_DDP.train_step(model, optimizer, batches, step, device, experiment)

    def read(number):
        """The least that a check can cost: one sum over the weights in this process."""
        torch.stack([parameter.detach().sum() for parameter in large.parameters()]).tolist()

    cases = {
        "epoch of mnist_DDP.py": epoch,
        "check of its model": lambda number: dist.check_in_sync(net),
        "check of 100 M parameters": lambda number: dist.check_in_sync(large),
        "sum of 100 M parameters": read,
    }
    report(common.alternate_ranks(cases, args.rounds, device))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    gpus = torch.cuda.device_count()
    parser.add_argument("--rounds", type=options.whole_number(1), default=5, help="times of each case")
    parser.add_argument("--nproc", type=options.whole_number(2), default=gpus or 2, help="processes")
    args = parser.parse_args()
    times = common.launch(main_worker, args, nprocs=args.nproc)
    results = {name: common.summary([1000 * seconds for seconds in values]) for name, values in times.items()}
    for name, row in results.items():
        print(f"{name:28} {row['median']:,.1f} ms ({row['min']:,.1f} to {row['max']:,.1f})")
    ratios = {
        "check / epoch of mnist_DDP.py": common.ratio(
            times["check of its model"], times["epoch of mnist_DDP.py"], PROMISE
        )
    }
    common.show(ratios)
    common.write("drift_check", {"unit": "ms", "processes": args.nproc, "results": results, "ratios": ratios})


if __name__ == "__main__":
    main()
