"""What `distributed.py` costs: a training step of a tiny model with it, and the same written on plain torch.

    python -m benchmarks.overhead                            # all GPUs, or two CPU processes
    python -m benchmarks.overhead --rounds 100

Both train the same model on the same batches in memory, in the same processes and in alternation. One takes sampler,
wrapping and metrics from `distributed.py`; the other calls DistributedSampler, DistributedDataParallel with
gradient_as_bucket_view, and all_reduce of the loss's sum and of the number of samples at the same log interval.
"""

import argparse

import torch
import torch.distributed as torch_dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import distributed as dist
import mnist
import options
from benchmarks import common
from benchmarks.throughput import MODELS

STEPS, LOG_EVERY = 60, 10
PROMISE = "at most 1.03"


def with_helper(model, digits, device):
    sampler = dist.data_sampler(digits, True, shuffle=True)
    model = dist.prepare_ddp_model(model, device_ids=[dist.get_local_rank()])

    def averaged(loss_sum, n):
        loss_sum, n = dist.all_reduce(torch.stack([loss_sum, loss_sum.new_tensor(n)])).tolist()
        return loss_sum / n

    return model, sampler, averaged


def without_helper(model, digits, device):
    sampler = DistributedSampler(digits, shuffle=True, seed=0)
    device_ids = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)

    def averaged(loss_sum, n):
        sums = torch.stack([loss_sum, loss_sum.new_tensor(n)])
        torch_dist.all_reduce(sums)
        loss_sum, n = sums.tolist()
        return loss_sum / n

    return model, sampler, averaged


def trainer(wrap, digits, batch_size, device):
    torch.manual_seed(0)
    model, sampler, averaged = wrap(MODELS["tiny"][0]().to(device), digits, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    loader = DataLoader(digits, batch_size, sampler=sampler, collate_fn=tuple, pin_memory=device.type == "cuda")

    def epoch(number):
        sampler.set_epoch(number)
        loss_sum, n = torch.zeros((), device=device), 0
        for step, (images, labels) in enumerate(loader, 1):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(mnist.normalize(images)), labels)
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(labels)
            n += len(labels)
            if step % LOG_EVERY == 0:
                averaged(loss_sum, n)
        assert step == STEPS

    return epoch


def main_worker(local_rank, world_size, args, report):
    dist.init_process_group()
    device, batch_size = dist.get_device(), MODELS["tiny"][1]
    n = STEPS * batch_size * world_size
    drawn = mnist.load_data("synthetic", None, train=True)
    index = torch.arange(n) % len(drawn)
    digits = mnist.Digits(drawn.images[index], drawn.labels[index])
    makers = {"with distributed.py": with_helper, "plain torch": without_helper}
    cases = {name: trainer(wrap, digits, batch_size, device) for name, wrap in makers.items()}
    times = common.alternate_ranks(cases, args.rounds, device)
    report({name: [1000 * seconds / STEPS for seconds in values] for name, values in times.items()})


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    gpus = torch.cuda.device_count()
    parser.add_argument("--rounds", type=options.whole_number(1), default=40, help=f"of {STEPS} steps of each kind")
    parser.add_argument("--nproc", type=options.whole_number(2), default=gpus or 2, help="processes")
    args = parser.parse_args()
    times = common.launch(main_worker, args, nprocs=args.nproc)
    results = {name: common.summary(values) for name, values in times.items()}
    for name, row in results.items():
        print(f"{name:20} {row['median']:.3f} ms per step ({row['min']:.3f} to {row['max']:.3f})")
    ratios = {"with distributed.py / plain torch": common.ratio(*times.values(), PROMISE)}
    common.show(ratios)
    common.write("overhead", {"unit": "ms per step", "processes": args.nproc, "results": results, "ratios": ratios})


if __name__ == "__main__":
    main()
