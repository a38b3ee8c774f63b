"""Memory per process of FSDP against DDP and against 16·P/N bytes, for N = 1, 2 and 4 processes.

    python -m benchmarks.fsdp_memory                       # 94 million parameters; DDP on 4 processes takes 12 GB
    python -m benchmarks.fsdp_memory --model shallow

Each case trains two steps of batch 8 by mnist_FSDP.py's own functions, in processes of its own, and reports its largest
process. "held" is what stays between two steps: parameters, gradients and Adam's state. "peak" is resident memory on
the CPU, where Python and torch take 0.4 GB, and allocated memory on a GPU. A single process trains locally.
"""

import argparse
import multiprocessing
import os
from concurrent import futures

import torch

import distributed as dist
import mnist
import mnist_FSDP
import options
from benchmarks import common

BATCH, STEPS = 8, 2


def main_worker(local_rank, world_size, model_name, strategy, report):
    dist.init_process_group()
    device = dist.get_device()
    torch.manual_seed(0)
    model = mnist.MODELS[model_name]()
    n_params = sum(param.numel() for param in model.parameters())
    model = mnist_FSDP.wrap(model, strategy, device, False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, fused=True)
    images = torch.randint(256, (BATCH * STEPS, 1, 28, 28), dtype=torch.uint8)
    digits = mnist.Digits(images, torch.randint(10, (BATCH * STEPS,)))
    loader = torch.utils.data.DataLoader(digits, BATCH, collate_fn=mnist.collate)
    mnist_FSDP.train_epoch(model, loader, optimizer, device, False)
    held = sum(mnist_FSDP.held_by_this_rank(optimizer))
    held, peak = mnist_FSDP.largest([held, mnist_FSDP.peak_memory(device)], device)
    report({"held": held, "peak": peak, "parameters": n_params})


def measure(model_name, strategy, nprocs):
    if nprocs > 1:
        return common.launch(main_worker, model_name, strategy, nprocs=nprocs)
    # `launch` would train in this very process, whose peak has other causes too.
    with futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(common.launch, main_worker, model_name, strategy, nprocs=1).result()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=tuple(mnist.MODELS), default="deep")
    parser.add_argument("--sizes", type=options.whole_number(1), nargs="+", default=[1, 2, 4], help="processes")
    args = parser.parse_args()
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # for one process too, as `launch` has it for several
    gpus = torch.cuda.device_count()
    results, ratios = {}, {}
    for nprocs in (n for n in args.sizes if not gpus or n <= gpus):
        strategies = ("ddp", "fsdp") if nprocs > 1 else ("local",)
        row = {name: measure(args.model, name, nprocs) for name in strategies}
        for strategy, sizes in row.items():
            share = 16 * sizes["parameters"] / nprocs
            values = {"held": sizes["held"] / 1e6, "peak": sizes["peak"] / 1e6, "16 P/N": share / 1e6}
            results.setdefault(strategy, {})[nprocs] = values
            print(f"N = {nprocs}, {strategy:5}:", *(f"{name} {value:5.0f} MB  " for name, value in values.items()))
            if strategy != "ddp":
                name = f"N = {nprocs}: held by {strategy} / (16 P/N)"
                ratios[name] = common.ratio([sizes["held"]], [share], "at most 1.02")
        if nprocs > 1 and args.model == "deep":
            peaks = [row["fsdp"]["peak"]], [row["ddp"]["peak"]]
            ratios[f"N = {nprocs}: peak of fsdp / of ddp"] = common.ratio(*peaks, "at most 0.9")
    common.show(ratios)
    common.write("fsdp_memory", {"unit": "MB", "model": args.model, "results": results, "ratios": ratios})


if __name__ == "__main__":
    main()
