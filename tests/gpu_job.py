"""What the tests on GPUs let every rank do, and small jobs: python gpu_job.py NAME, or torchrun ... gpu_job.py NAME."""

import importlib
import os
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import distributed as dist


def fail(local_rank, world_size):
    """The last rank fails while the others wait for it in an all-reduce."""
    dist.init_process_group()
    one = torch.ones(1, device=dist.get_device())
    dist.all_reduce(one)
    if dist.get_rank() == world_size - 1:
        raise ZeroDivisionError("the cause")
    dist.all_reduce(one).item()


def share_one_gpu(local_rank, world_size):
    """Two ranks compute on GPU 0: that works only if the fork server has not used CUDA."""
    os.environ["LOCAL_RANK"] = "0"
    assert torch.ones(1, device=dist.get_device()).item() == 1


def train_without_waits(local_rank, world_size, script, args):
    """Run a script. Raise where its steps 3 to 5 wait for the device, and if it has used another rank's GPU."""
    n_steps = 0

    def after_step(optimizer, args, kwargs):
        nonlocal n_steps
        n_steps += 1
        if n_steps == 2:  # the steps before may still allocate, and build what they need only once
            torch.cuda.set_sync_debug_mode("error")
        if n_steps == 5:
            torch.cuda.set_sync_debug_mode("default")

    hook = register_optimizer_step_post_hook(after_step)
    try:
        importlib.import_module(script).main_worker(local_rank, world_size, *args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        hook.remove()
    assert n_steps >= 5
    used = [gpu for gpu in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(gpu)]
    assert used == [local_rank], f"local rank {local_rank} has memory on the GPUs {used}"


def train_deterministically(local_rank, world_size, script, args):
    torch.use_deterministic_algorithms(True)
    try:
        importlib.import_module(script).main_worker(local_rank, world_size, *args)
    finally:
        torch.use_deterministic_algorithms(False)


if __name__ == "__main__":
    nprocs = torch.accelerator.device_count()
    if sys.argv[1] == "share_one_gpu":
        nprocs = 2
    dist.launch(globals()[sys.argv[1]], nprocs=nprocs)
    print(f"CUDA used by the launcher: {torch.cuda.is_initialized()}")
