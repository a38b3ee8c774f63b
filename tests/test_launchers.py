"""The job files are well formed, and the SLURM script saves, requeues and resumes."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, finish, wait_for
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
from torch.distributed.run import get_args_parser

import multinode_torchrun

SLURM, KUBERNETES = ROOT / "launchers" / "slurm.sbatch", ROOT / "launchers" / "kubernetes.yaml"


# ---- SLURM ----------------------------------------------------------------------------------------------------------


def test_shellcheck():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    assert subprocess.run([shellcheck, SLURM], capture_output=True, text=True).stdout == ""


def test_the_directives_that_requeueing_needs():
    directives = re.findall(r"^#SBATCH --(\S+)$", SLURM.read_text(), re.M)
    assert {"requeue", "open-mode=append", "ntasks-per-node=1", "signal=B:USR1@120"} <= set(directives)


# srun starts the agent here instead of on every node; scancel signals it, as it would the step.
COMMANDS = {
    "scontrol": """[ "$1" = show ] && echo localhost || echo "scontrol $*" """,
    "srun": """[ "$1" = --kill-on-bad-exit=1 ]; shift; echo $$ > step.pid; exec "$@" """,
    "scancel": """echo "scancel $*"; kill -TERM "$(cat step.pid)" """,
    "torchrun": f"""exec {sys.executable} -m torch.distributed.run "$@" """,
}


@pytest.fixture
def start_job(tmp_path):
    for name, body in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "multinode_torchrun.py").symlink_to(ROOT / "multinode_torchrun.py")
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "localhost"}
    environment = {**os.environ, **slurm, "SLURM_GPUS_ON_NODE": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def start(*arguments):
        with open(tmp_path / "log", "a") as log:
            return subprocess.Popen(
                ["bash", SLURM, *map(str, arguments)], cwd=tmp_path, env=environment, stdout=log, stderr=log
            )

    return start


@pytest.mark.slow
@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, 1), (signal.SIGTERM, 0)])
def test_a_signal_saves_and_the_next_start_resumes(start_job, tmp_path, number, requeued):
    log = tmp_path / "log"
    arguments = (30, 1000, "--global-batch-size", 8)
    job = start_job(*arguments)
    wait_for(lambda: "Epoch 0 |" in log.read_text(), job)
    job.send_signal(number)
    code, _, _ = finish(job, timeout=40)
    text = log.read_text()
    assert code != 0
    assert text.count("Snapshot saved") == 1, text
    assert text.count(f"scontrol requeue {os.getpid()}") == requeued
    ((epoch, step),) = re.findall(r"next is Epoch (\d+), Step (\d+)", text)

    code, _, _ = finish(start_job(*arguments))
    text = log.read_text()
    assert code == 0, text
    assert f"Starting at Epoch {epoch}, Step {step}" in text
    assert "next is Epoch 30, Step 0" in text
    assert text.count("scontrol requeue") == requeued


# ---- Kubernetes -----------------------------------------------------------------------------------------------------


def test_the_trainjob_is_one_of_the_published_models():
    document = yaml.safe_load(KUBERNETES.read_text())
    # The models drop what they do not know, so that a misspelt field would show as a difference.
    assert TrainerV1alpha1TrainJob.from_dict(document).to_dict() == document
    assert (document["apiVersion"], document["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")


def test_the_trainjob_starts_the_script(monkeypatch):
    document = yaml.safe_load(KUBERNETES.read_text())
    trainer = document["spec"]["trainer"]
    assert trainer["command"] == ["torchrun"]
    monkeypatch.setenv("PET_NNODES", str(trainer["numNodes"]))
    args = get_args_parser().parse_args(trainer["args"])
    assert (args.nnodes, args.rdzv_backend, args.max_restarts) == ("2", "c10d", 3)
    assert args.training_script == "multinode_torchrun.py"
    monkeypatch.setattr(sys, "argv", [args.training_script, *args.training_script_args])
    assert multinode_torchrun.parse_args().snapshot_path == "/snapshots/multinode-torchrun.pt"

    (patch,) = document["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    mounts = [mount["mountPath"] for container in pod["containers"] for mount in container["volumeMounts"]]
    assert any(f"--snapshot-path={mount}/" in argument for mount in mounts for argument in trainer["args"])
    assert pod["terminationGracePeriodSeconds"] > 30, "longer than torchrun's own"
