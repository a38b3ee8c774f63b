"""What only a GPU shows: NCCL, the fork server beside CUDA, memory. `make test-gpu`, on a machine with a GPU."""

import os

import pytest
import torch
import transformer
from conftest import ROOT, run, torchrun

import distributed as dist
import min_CP
import mnist

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible"),
    pytest.mark.timeout(300),
]

STEPS = ("--steps", 4, "--log-every", 2)
SCRIPTS = {
    "min_DDP.py": ("--epochs", 1),
    "mnist_FSDP.py": ("--epochs", 1, "--mixed-precision"),
    "mnist_DDP.py": ("--epochs", 1, "--amp"),
    "multigpu_torchrun.py": (2, 1),
    "multinode_torchrun.py": (2, 1),
    **dict.fromkeys(("min_TP.py", "min_CP.py", "min_PP.py", "min_2D.py", "min_ZeRO.py"), STEPS),
    **dict.fromkeys(("min_EP.py", "min_DiLoCo.py", "min_FSDP.py", "min_Join.py", "min_Ring.py"), STEPS),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_runs_under_torchrun_with_nccl(script, tmp_path):
    status, stdout, stderr = torchrun(1, ROOT / script, *SCRIPTS[script], cwd=tmp_path, timeout=200)
    assert status == 0, stderr
    assert "nan" not in stdout and stdout


def test_the_fork_server_starts_after_the_launcher_has_counted_gpus():
    """And the launcher takes no memory of a GPU: asking for their number makes no context."""
    code = """
import os, torch, distributed as dist
def worker(local_rank, world_size):
    os.environ["LOCAL_RANK"] = "0"
    assert torch.ones(1, device=dist.get_device()).item() == 1
if __name__ == "__main__":
    assert torch.cuda.device_count() >= 1
    dist.launch(worker, nprocs=2)
    print(torch.cuda.is_initialized())
"""
    path = ROOT / "tests" / "gpu_job.tmp.py"
    path.write_text(code)
    try:
        assert run(path, timeout=120)[:2] == (0, "False\n")
    finally:
        path.unlink()


def share_worker(local_rank, world_size, folder):
    os.environ["LOCAL_RANK"] = "0"  # both on one GPU, which NCCL refuses and gloo does not
    dist.init_process_group(backend="gloo")
    with transformer.float64():
        args = transformer.arguments(world_size)
        model = min_CP.parallelize(transformer.make_model(args).to(dist.get_device()), "all-gather")
        optimizer = transformer.make_optimizer("SGD", model.parameters(), args.lr)
        losses = min_CP.train(model, optimizer, *transformer.small_text(), args)
    if dist.is_primary():
        parameters = {name: value.cpu() for name, value in transformer.full_parameters(model).items()}
        torch.save((losses.cpu(), parameters), f"{folder}/result.pt")


def test_two_ranks_on_one_gpu_equal_one_process(tmp_path):
    dist.launch(share_worker, str(tmp_path), nprocs=2)
    losses, parameters = torch.load(tmp_path / "result.pt", weights_only=True)
    transformer.assert_equal(losses, parameters, transformer.reference("SGD"), 1e-9)


def test_adam_in_one_process_holds_16_bytes_per_parameter():
    device = torch.device("cuda", 0)
    before = torch.cuda.memory_allocated(device)
    model = mnist.DeepNet().to(device)
    n_params = sum(param.numel() for param in model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 1, 28, 28, device=device)).sum().backward()
        optimizer.step()
    held = (torch.cuda.memory_allocated(device) - before) / n_params
    assert 16 <= held <= 16.3
