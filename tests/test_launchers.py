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
from torch.distributed.run import get_args_parser

import multinode_torchrun

SLURM = ROOT / "launchers" / "slurm.sbatch"
TRAINJOB = yaml.safe_load((ROOT / "launchers" / "kubernetes.yaml").read_text())


# ---- SLURM ----------------------------------------------------------------------------------------------------------


def test_shellcheck():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    assert subprocess.run([shellcheck, SLURM], capture_output=True, text=True).stdout == ""


def test_the_directives_that_requeueing_needs():
    directives = re.findall(r"^#SBATCH --(\S+)$", SLURM.read_text(), re.M)
    assert {"requeue", "open-mode=append", "ntasks-per-node=1", "signal=B:USR1@120"} <= set(directives)
    (seconds,) = re.findall(r"^export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", SLURM.read_text(), re.M)
    assert 60 < int(seconds) < 120, "torchrun must have ended its processes when SLURM does"


# srun starts one node's command here, and scancel, which fails at first, signals it. (A real SLURM: test_slurm.py.)
COMMANDS = {
    "scontrol": """
case "$1-$2" in
  show-hostnames) echo localhost ;;
  show-job) echo "JobState=$STATE PreemptTime=$PREEMPTED" ;;
  *) echo "scontrol $*" ;;
esac""",
    "srun": """
echo "srun $*"; echo $$ > step.pid; while [ "$1" != bash ]; do shift; done
SLURM_GPUS_ON_NODE=2 exec "$@" # this node has less than the one of the job file""",
    "scancel": """[ -e failed ] || { touch failed; exit 1; }; kill -TERM "$(cat step.pid)" """,
    "torchrun": """
echo "torchrun $*; $TORCH_ELASTIC_SHUTDOWN_TIMEOUT s"
trap 'echo saved; exit 1' TERM
echo started
[ -n "$ENDS" ] && exit "$ENDS"
while sleep 0.05; do :; done""",
}


def run_job(folder, number=None, ends="", state="RUNNING", preempted="None", restarts="0", arguments=()):
    """Run the job file, signal it once it has started; returns its status and what was printed."""
    for name, body in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    slurm = {"JOB_ID": "7", "NNODES": "1", "JOB_NODELIST": "localhost", "GPUS_ON_NODE": "3", "CPUS_PER_TASK": "5"}
    environment = {f"SLURM_{name}": value for name, value in {**slurm, "RESTART_COUNT": restarts}.items()}
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "ENDS": ends, "STATE": state, "PREEMPTED": preempted}
    log = folder / "log"
    with open(log, "w") as file:
        environment = {**os.environ, **environment}
        job = subprocess.Popen(["bash", SLURM, *arguments], cwd=folder, env=environment, stdout=file, stderr=file)
    if number:
        wait_for(lambda: "started" in log.read_text(), job)
        job.send_signal(number)
    status, _, _ = finish(job, timeout=30)
    return status, log.read_text()


def test_usr1_saves_and_requeues_also_when_scancel_fails_once(tmp_path):
    status, text = run_job(tmp_path, signal.SIGUSR1)
    assert (status, text.count("saved"), text.count("scontrol requeue 7")) == (1, 1, 1)
    assert "--cpus-per-task 5" in text
    assert "torchrun --nproc-per-node 2 --nnodes 1 --max-restarts 3" in text
    assert "multinode_torchrun.py 50 10; 100 s" in text
    ports = re.findall(r"--rdzv-endpoint localhost:(\d+)", text)
    assert set(ports) == {"12007"}, "not a port that Linux gives to outgoing connections, from 32768 on"


@pytest.mark.parametrize(
    ("requeued", "how"),
    [
        (0, {"number": signal.SIGTERM}),
        (0, {"ends": "0"}),
        (0, {"ends": "1"}),
        (1, {"ends": "1", "state": "SIGNALING", "preempted": "2026-11-21T15:34:20"}),
        (0, {"ends": "0", "state": "SIGNALING", "preempted": "2026-11-21T15:34:20"}),
        (1, {"ends": "137"}),
        (0, {"ends": "137", "restarts": "10"}),
        (0, {"ends": "137", "state": "CANCELLED"}),
    ],
)
def test_what_is_requeued(requeued, how, tmp_path):
    """It starts any script."""
    status, text = run_job(tmp_path, **how, arguments=("min_FSDP.py", "--checkpoint-dir", "/shared/a folder"))
    assert status == int(how.get("ends", 1)), text
    assert text.count("scontrol requeue 7") == requeued, text
    assert "localhost:12007 min_FSDP.py --checkpoint-dir /shared/a folder; 100 s" in text


# ---- Kubernetes -----------------------------------------------------------------------------------------------------


def test_the_trainjob_is_one_of_the_published_models():
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob  # takes 1 s in each process of pytest

    # The models drop what they do not know, so that a misspelt field would show as a difference.
    assert TrainerV1alpha1TrainJob.from_dict(TRAINJOB).to_dict() == TRAINJOB


def test_the_trainjob_starts_the_script_and_mounts_where_it_saves(typed, monkeypatch, tmp_path):
    trainer = TRAINJOB["spec"]["trainer"]
    assert trainer["command"] == ["torchrun"]
    monkeypatch.setenv("PET_NNODES", str(trainer["numNodes"]))
    args = get_args_parser().parse_args([word.replace("/snapshots", str(tmp_path)) for word in trainer["args"]])
    assert (args.nnodes, args.rdzv_backend, args.max_restarts) == ("2", "c10d", 99)
    typed(args.training_script, *args.training_script_args)
    assert multinode_torchrun.parse_args().snapshot_path == f"{tmp_path}/multinode-torchrun.pt"

    (patch,) = TRAINJOB["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    mounts = {mount["mountPath"]: mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]}
    (shared_memory,) = [volume["name"] for volume in pod["volumes"] if "emptyDir" in volume]
    assert mounts == {"/snapshots": "snapshots", "/dev/shm": shared_memory}
    environment = {variable["name"]: variable["value"] for variable in trainer["env"]}
    assert 60 < int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
