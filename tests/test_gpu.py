"""What only a GPU shows: NCCL, kernels, memory, waits. `make test-gpu`, on a machine with one GPU or several.

Nobody has run these tests yet, for want of a GPU. So a failure may be a test's own.
"""

import importlib
import os
import re
import time

import gpu_job
import pytest
import torch
import transformer
from conftest import ROOT, run, torchrun
from test_equal import OPTIONS
from torch.utils import _pytree as pytree

import distributed as dist
import min_CP

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible"),
    pytest.mark.timeout(300),
]

GPUS = torch.cuda.device_count()
JOB = ROOT / "tests" / "gpu_job.py"
STEPS = ("--steps", 20, "--log-every", 10)
TRANSFORMERS = [
    (f"{script}.py", *STEPS, "--clip", 1) for script in OPTIONS
]  # their losses are compared with those on CPUs
TRANSFORMERS += [
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
]
RPC = [
    ("rpc_actor_learner.py", "--updates", 5),
    ("rpc_ddp.py", "--steps", 50),
    ("rpc_model_parallel.py", "--epochs", 1),
]
RPC += [("rpc_param_server.py", "--epochs", 1), ("rpc_param_server.py", "--epochs", 1, "--mode", "sync")]


def name(case):
    return " ".join(map(str, case))


# ---- every script ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", OTHERS + RPC, ids=name)
def test_every_other_script_runs_on_all_gpus(case, tmp_path):
    status, stdout, stderr = run(ROOT / case[0], *case[1:], cwd=tmp_path)
    assert (status, stderr) == (0, "")
    assert stdout and not re.search(r"\bnan\b", stdout)


@pytest.mark.parametrize("case", TRANSFORMERS, ids=name)
def test_losses_are_those_of_cpus(case, tmp_path):
    """In float32, so that the kernels are those that users get."""
    printed = []
    for options, env in (((), {}), (("--nproc", GPUS), {"CUDA_VISIBLE_DEVICES": ""})):
        status, stdout, stderr = run(ROOT / case[0], *case[1:], *options, cwd=tmp_path, env=env)
        assert (status, stderr) == (0, "")
        printed.append([float(loss) for loss in re.findall(r"(?:loss|held-out) (\d\.\d+)", stdout)])
    assert len(printed[0]) >= 2
    assert printed[0] == pytest.approx(printed[1], abs=0.03)


# Two wait for the number of tokens of each expert. In min_Join.py DDP waits for the number of ranks with batches left.
WITHOUT_WAITS = [case for case in TRANSFORMERS if case[0] not in ("min_EP.py", "min_EP_FSDP.py", "min_Join.py")]
WITHOUT_WAITS += [("min_DDP.py", "--epochs", 1, "--batch-size", 2)]
WITHOUT_WAITS += [("mnist_DDP.py", "--epochs", 1), ("mnist_FSDP.py", "--epochs", 1), ("multigpu_torchrun.py", 1, 1)]


@pytest.mark.parametrize("case", WITHOUT_WAITS, ids=name)
def test_no_step_waits_for_the_device_and_a_rank_uses_its_gpu_alone(case, tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    typed(*case)
    dist.launch(gpu_job.train_without_waits, *parsed(case), nprocs=GPUS)


def parsed(case):
    """The module's name of a script whose command line is typed, and the arguments of its main_worker."""
    script = case[0].removesuffix(".py")
    return script, (importlib.import_module(script).parse_args(),)


# ---- launching and ending -------------------------------------------------------------------------------------------


def test_the_fork_server_starts_after_the_launcher_has_counted_gpus():
    """And the launcher takes no memory of a GPU: asking for their number makes no context."""
    assert run(JOB, "share_one_gpu", timeout=120) == (0, "CUDA used by the launcher: False\n", "")


@pytest.mark.parametrize("how", ["launch", "torchrun"])
def test_a_failed_rank_ends_the_job_soon_and_is_named(how):
    begin = time.perf_counter()
    if how == "launch":
        status, _, stderr = run(JOB, "fail", timeout=120)
    else:
        status, _, stderr = torchrun(GPUS, JOB, "fail", timeout=120)
    assert status == 1
    assert time.perf_counter() - begin < 60
    assert "ZeroDivisionError: the cause" in stderr
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
            dist.launch(gpu_job.train_deterministically, *parsed(case), nprocs=GPUS)
        saved.append(read(folder / "saved"))
    assert_bit_equal(*saved)


def read(path):
    """A snapshot, or the newest of a folder of sharded checkpoints."""
    if path.is_file():
        return torch.load(path, weights_only=True)
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(path / "step-8", path / "whole.pt")
    return torch.load(path / "whole.pt", weights_only=True)


# ---- numbers --------------------------------------------------------------------------------------------------------


def share_worker(local_rank, world_size):
    os.environ["LOCAL_RANK"] = "0"  # both on one GPU, which NCCL refuses and gloo does not
    dist.init_process_group(backend="gloo")
    with transformer.float64():
        args = transformer.arguments(world_size)
        model = min_CP.parallelize(transformer.make_model(args).to(dist.get_device()), "all-gather")
        optimizer = transformer.make_optimizer("SGD", model.parameters(), args.lr)
        losses = min_CP.train(model, optimizer, transformer.small_data(args, (0, 1)), args)
    return losses, transformer.full_parameters(model)


def test_two_ranks_on_one_gpu_equal_one_process():
    losses, parameters = dist.launch(share_worker, nprocs=2)
    transformer.assert_equal(losses, parameters, transformer.reference("SGD"), 1e-9)
