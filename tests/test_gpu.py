"""What only a GPU shows: NCCL, kernels, memory, waits. `make test-gpu`, on a machine with one GPU or several.

Nobody has run these tests yet, for want of a GPU. So a failure may be a test's own.
"""

import importlib
import re
from functools import partial

import gpu_job
import pytest
import torch
from conftest import ROOT, run, torchrun
from test_equal import OPTIONS
from torch.utils import _pytree as pytree

import distributed as dist

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible"),
    pytest.mark.timeout(300),
]

GPUS = torch.cuda.device_count()
JOB = ROOT / "tests" / "gpu_job.py"
STEPS = ("--steps", 20, "--log-every", 10)
WITH_LOSSES = [(f"{script}.py", *STEPS, "--clip", 1) for script in OPTIONS]
WITH_LOSSES += [
    ("min_FSDP_TP.py", *STEPS, "--tensor", GPUS, "--recompute"),
    ("min_CP.py", *STEPS, "--attention", "all-gather"),
    ("min_DiLoCo.py", *STEPS, "--sync-every", 5),
    ("min_FSDP.py", *STEPS),
    ("min_Join.py", *STEPS, "--method", "weights"),
    ("min_PP.py", *STEPS, "--schedule", "ZBVZeroBubble", "--clip", 1),
    ("min_Packing.py", *STEPS, "--accumulate", 2),
    ("min_Stream.py", *STEPS),
]
OTHERS = [
    ("min_DDP.py", "--epochs", 1),
    ("min_EP.py", *STEPS, "--experts", 64 * GPUS, "--top", 1, "--global-batch-size", GPUS, "--length", 2),  # most empty
    ("min_FSDP.py", *STEPS, "--bf16"),
    ("min_GRPO.py", *STEPS, "--imitation-steps", 100),
    ("min_GRPO.py", *STEPS, "--inner-steps", 2),
    ("min_Join.py", *STEPS, "--least", 0),
    ("min_Join.py", *STEPS, "--least", 0, "--method", "weights"),  # the last rank has empty batches alone
    ("mnist_DDP.py", "--epochs", 1, "--bf16", "--clip", 1),
    ("mnist_DDP.py", "--epochs", 1, "--compile"),
    ("mnist_FSDP.py", "--epochs", 1, "--bf16"),
    ("mnist_FSDP.py", "--epochs", 1, "--model", "deep"),
    ("rpc_actor_learner.py", "--updates", 5),
    ("rpc_ddp.py", "--steps", 50),
    ("rpc_model_parallel.py", "--epochs", 1),
    ("rpc_param_server.py", "--epochs", 1),
    ("rpc_param_server.py", "--epochs", 1, "--mode", "sync"),
]


def name(case):
    return " ".join(map(str, case))


# ---- every script ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", OTHERS, ids=name)
def test_every_other_script_runs_on_all_gpus(case, tmp_path):
    status, stdout, stderr = run(ROOT / case[0], *case[1:], cwd=tmp_path)
    assert (status, stderr) == (0, "")
    assert stdout and not re.search(r"\bnan\b", stdout)


@pytest.mark.parametrize("case", WITH_LOSSES, ids=name)
def test_losses_are_those_of_cpus(case, tmp_path):
    """In float32, so that the kernels are those that users get."""
    printed = []
    for options, env in (((), {}), (("--nproc", GPUS), {"CUDA_VISIBLE_DEVICES": ""})):
        status, stdout, stderr = run(ROOT / case[0], *case[1:], *options, cwd=tmp_path, env=env)
        assert (status, stderr) == (0, "")
        printed.append([float(loss) for loss in re.findall(r"(?:loss|held-out) (\d\.\d+)", stdout)])
    assert len(printed[0]) >= 2
    assert printed[0] == pytest.approx(printed[1], abs=0.03)


# ---- launching and ending -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [run, partial(torchrun, GPUS)], ids=["launch", "torchrun"])
def test_a_failed_rank_ends_the_job_soon_and_is_named(start):
    status, _, stderr = start(JOB, timeout=60)
    assert status == 1 and "ZeroDivisionError: the cause" in stderr
    assert not re.search("ProcessGroupNCCL|destroy_process_group|Warning", stderr), stderr


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def assert_bit_equal(first, second):
    first, second = pytree.tree_flatten(first), pytree.tree_flatten(second)
    assert first[1] == second[1]
    for a, b in zip(first[0], second[0], strict=True):
        assert torch.equal(a, b) if torch.is_tensor(a) else a == b


@pytest.mark.parametrize(
    "case, long, short",
    [
        (("multigpu_torchrun.py", "--snapshot-path", "saved"), (4, 2), (2, 2)),
        (("min_Stream.py", "--snapshot-path", "saved", "--save-every", 4), ("--steps", 8), ("--steps", 4)),
        (("min_FSDP.py", "--checkpoint-dir", "saved", "--save-every", 4), ("--steps", 8), ("--steps", 4)),
    ],
    ids=lambda value: value[0] if value[0] else None,
)
def test_a_resumed_run_ends_bit_for_bit_as_an_uninterrupted_one(case, long, short, tmp_path, monkeypatch, typed):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which cuBLAS is not deterministic
    saved = []
    for runs in ([long], [short, long]):
        folder = tmp_path / str(len(runs))
        folder.mkdir()
        monkeypatch.chdir(folder)
        for options in runs:
            typed(*case, *options)
            script = case[0].removesuffix(".py")
            args = importlib.import_module(script).parse_args()
            dist.launch(gpu_job.train_deterministically, script, args, nprocs=GPUS)
        saved.append(read(folder / "saved"))
    assert_bit_equal(*saved)
    assert not torch.cuda.is_initialized(), "the launcher itself takes no memory of a GPU"


def read(path):
    """A snapshot, or the newest of a folder of sharded checkpoints."""
    if path.is_file():
        return torch.load(path, map_location="cpu", weights_only=True)
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(path / "step-8", path / "whole.pt")
    return torch.load(path / "whole.pt", map_location="cpu", weights_only=True)
