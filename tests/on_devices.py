"""Train scripts one after the other, on simulated GPUs or on CPU processes, and save what each process has trained.

    SIM_DEVICES=2 python -m tests.on_devices FOLDER '[["min_FSDP", "--steps", 3], ...]' [without_waits]

FOLDER/N-RANK.pt is a Result of the Nth script. Data are small. Numbers are float64 where the script allows it.
"""

import contextlib
import gc
import importlib
import json
import os
import sys
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import distributed as dist


def train(local_rank, world_size, cases, folder, meanwhile=contextlib.nullcontext):
    lines = [json.dumps({"text": f"{i} times {i + 1} is {i * i + i}. " * 8}) for i in range(64)]
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(f"{folder}/documents-{local_rank}.jsonl").write_text("\n".join(lines))
    for i, case in enumerate(cases):
        os.makedirs(f"{folder}/{i}", exist_ok=True)
        os.chdir(f"{folder}/{i}")
        with meanwhile():
            result = train_one(local_rank, world_size, *case)
        torch.save(result, f"{folder}/{i}-{local_rank}.pt")


def train_one(local_rank, world_size, script, *options):
    """Run main_worker. Returns this process's part of each trained parameter, and its device's peak of memory."""
    module = importlib.import_module(script)
    make_data_small()
    sys.argv = [f"{script}.py", *map(str, options)]
    args = module.parse_args()
    is_on_device = torch.accelerator.is_available()
    if is_on_device:
        torch.accelerator.reset_peak_memory_stats(local_rank)
    torch.set_default_dtype(torch.float32 if "--bf16" in options else torch.float64)
    optimizers = {}  # all that make a step, in order
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: optimizers.setdefault(optimizer))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        module.main_worker(local_rank, world_size, args)
    hook.remove()
    params = [param for each in optimizers for group in each.param_groups for param in group["params"]]
    parts = [param.to_local() if hasattr(param, "to_local") else param for param in params]
    result = {"params": [part.detach().cpu().clone() for part in parts], "peak": 0}
    if is_on_device:
        result["peak"] = torch.accelerator.max_memory_allocated(local_rank)
    optimizers.clear()
    del params, parts
    dist.cleanup()
    gc.collect()  # DDP's models hold groups
    return result


@contextlib.contextmanager
def without_waits():
    """Raise where steps 3 to 5 of a script make the host wait for the device."""
    n_steps = 0

    def after_step(optimizer, args, kwargs):
        nonlocal n_steps
        n_steps += 1
        if n_steps in (2, 5):
            torch.sim.set_sync_debug_mode("error" if n_steps == 2 else "default")

    hook = register_optimizer_step_post_hook(after_step)
    yield
    hook.remove()
    assert n_steps >= 5


def make_data_small():
    if "gpt" in sys.modules:
        library = sys.modules["gpt"].LIBRARY
        sys.modules["gpt"].LIBRARY = library if library.name == "email" else library / "email"
    if "mnist" in sys.modules and not hasattr(sys.modules["mnist"], "draw_all_digits"):
        mnist = sys.modules["mnist"]
        mnist.draw_all_digits = mnist._draw_digits
        mnist._draw_digits = lambda n, seed: mnist.draw_all_digits(n // 100, seed)


def read(folder, cases, n_processes):
    """By case, what `train` has saved for each rank. None for cases that have not ended."""
    paths = [[Path(f"{folder}/{i}-{rank}.pt") for rank in range(n_processes)] for i in range(len(cases))]
    return [all(map(Path.exists, of)) and [torch.load(path, weights_only=True) for path in of] for of in paths]


if __name__ == "__main__":
    meanwhile = without_waits if "without_waits" in sys.argv else contextlib.nullcontext
    dist.launch(train, json.loads(sys.argv[2]), sys.argv[1], meanwhile, nprocs=torch.accelerator.device_count())
