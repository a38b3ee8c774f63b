"""What the tests on GPUs let every rank do. As a program it is a job of which the last rank fails."""

import importlib

import torch

import distributed as dist


def fail(local_rank, world_size):
    """The last rank fails while the others wait for it in an all-reduce."""
    dist.init_process_group()
    one = torch.ones(1, device=dist.get_device())
    dist.all_reduce(one)
    if dist.get_rank() == world_size - 1:
        raise ZeroDivisionError("the cause")
    dist.all_reduce(one).item()


def train_deterministically(local_rank, world_size, script, args):
    """Run a script. Raise if it has used another rank's GPU."""
    torch.use_deterministic_algorithms(True)
    try:
        importlib.import_module(script).main_worker(local_rank, world_size, args)
    finally:
        torch.use_deterministic_algorithms(False)
    used = [gpu for gpu in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(gpu)]
    assert used == [local_rank], f"local rank {local_rank} has memory on the GPUs {used}"


if __name__ == "__main__":
    dist.launch(fail)
