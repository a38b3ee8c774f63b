"""Scripts on GPUs that are not there (see gpu_dry.py), one rank after the other.

A run fails where tensors of two devices meet, where NCCL is handed a tensor of the CPU, of another rank's GPU or with
gaps, and where the host needs a size that only the device knows.

It cannot see what happens in C++, in other processes or on the device: DDP's reducer (a hook makes its all-reduce
here), how groups are made from others (split_group), what PipelineStage tells its neighbours about shapes, what Join
answers for a rank without batches, how FSDP moves a module from the CPU (it is moved before), files of snapshots,
torch.distributed.checkpoint, RPC, torch.compile, autocast, and kernels such as flex_attention. The host gets the same
numbers from the device on all ranks, so no branch depends on them. multinode_torchrun.py, min_FaultTolerant.py,
min_Generate.py and the RPC scripts have no case here.
"""

import multiprocessing
import pickle

import pytest
from conftest import guards

try:
    import gpu_dry
except ImportError as error:
    pytest.skip(f"this torch lacks a private function that pretends a GPU: {error}", allow_module_level=True)

N_STEPS = 3
STEPS = ("--steps", N_STEPS, "--log-every", N_STEPS, "--clip", 1, "--width", 32, "--layers", 1)
EXPERTS = ("--length", 4, "--global-batch-size", 2)  # the 4 bytes of each rank visit 8 experts: 1 each
IMAGES = ("--epochs", 1, "--test-batch-size", 20)
BATCHES = ("--batch-size", 256)
CASES = [
    ("min_DDP", 2, "--epochs", 1),
    ("min_Join", 2, *STEPS, "--least", N_STEPS),
    ("min_Join", 2, *STEPS, "--least", 0, "--method", "weights"),
    ("min_ZeRO", 2, *STEPS),
    ("min_FSDP_scratch", 2, *STEPS),
    ("min_FSDP_TP", 4, *STEPS, "--replicate", 2, "--recompute"),
    ("min_FSDP_TP", 4, *STEPS, "--tensor", 2),
    ("min_PP_FSDP_TP", 8, *STEPS, "--layers", 2, "--micro-batches", 2),
    ("min_PP_FSDP_TP", 4, *STEPS, "--layers", 4, "--micro-batches", 2, "--schedule", "Interleaved1F1B"),
    ("min_DDP_scratch", 4, *STEPS, "--bucket-mb", 0.01),
    ("min_DDP_scratch", 2, *STEPS, "--compress", "bf16", "--accumulate", 2),
    ("min_CP", 2, *STEPS),
    ("min_CP", 2, *STEPS, "--attention", "all-gather"),
    ("min_DiLoCo", 2, *STEPS, "--sync-every", 2),
    ("min_EP", 2, *STEPS, *EXPERTS),
    ("min_EP_FSDP", 4, *STEPS, "--length", 4, "--global-batch-size", 4),  # the same
    ("min_FSDP", 2, *STEPS),
    ("min_GRPO", 2, "--steps", N_STEPS, "--prompts", 4, "--imitation-steps", 3, "--output", "model.pt"),
    ("min_GRPO", 2, "--steps", N_STEPS, "--prompts", 4, "--imitation-steps", 3, "--inner-steps", 2, "--kl", 0.1),
    ("min_Muon", 2, *STEPS, "--layers", 2),  # so that both ranks own matrices of one size
    ("min_PP", 2, *STEPS, "--layers", 2),
    ("min_PP", 2, *STEPS, "--layers", 4, "--schedule", "ZBVZeroBubble"),
    ("min_PP", 4, *STEPS, "--layers", 4, "--schedule", "Interleaved1F1B"),
    ("min_Packing", 2, *STEPS, "--accumulate", 2),
    ("min_CP_ring", 2, *STEPS),
    ("min_Stream", 2, *STEPS, "--num-workers", 0, "--snapshot-path", "snapshot.pt"),
    ("min_TP", 2, *STEPS),
    ("mnist_DDP", 2, *IMAGES, "--global-batch-size", 64, "--accumulate", 2, "--clip", 1),
    ("mnist_FSDP", 2, *IMAGES, "--batch-size", 32),
    ("multigpu_torchrun", 2, 2, 1, *BATCHES),
]
QUICK, OTHERS = CASES[:4], CASES[4:]
# What each number is that the host gets from the device. min_DDP: the samples of each rank. min_Join: the ranks that
# have batches left, so Join ends at once.
FROM_DEVICE = {"min_DDP": 128, "min_Join": 0}


def name(case):
    return " ".join(map(str, case))


@pytest.mark.parametrize(
    "case", [*guards(*QUICK), *[pytest.param(case, marks=pytest.mark.slow) for case in OTHERS]], ids=name
)
def test_it_runs_on_gpus(case):
    script, world_size, *options = case
    sent_by_rank_0 = []
    for rank in range(world_size):
        here, there = multiprocessing.Pipe()
        args = (there, script, options, rank, world_size, sent_by_rank_0, FROM_DEVICE.get(script, 1))
        process = multiprocessing.get_context("forkserver").Process(target=gpu_dry.run, args=args)
        process.start()
        there.close()
        result = pickle.loads(here.recv_bytes())
        process.join()
        assert not result.error, f"rank {rank}: {result.error}"
        assert result.n_calls
        if rank == 0:
            sent_by_rank_0 = result.sent_by_rank_0
