"""launchers/slurm.sbatch on a real SLURM of two nodes, both on this machine, each with a "GPU" that no library knows.

On Debian, as root: apt-get install slurm-wlm munge
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, free_port, wait_until
from images import assert_same_models
from test_multinode_torchrun import options

import distributed as dist
import multinode_torchrun

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        os.name != "posix" or os.geteuid() != 0 or not all(map(shutil.which, PROGRAMS)),
        reason="needs root, and slurm-wlm and munge installed",
    ),
]
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/%n
GresTypes=gpu
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000 Gres=gpu:2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000 Gres=gpu:1
PartitionName=low Nodes=n[1-2] Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=n[1-2] PriorityTier=10
"""
GPUS = "NodeName=n1 Name=gpu File=/dev/zero\nNodeName=n1 Name=gpu File=/dev/null\nNodeName=n2 Name=gpu File=/dev/full\n"


def command(*arguments):
    return subprocess.run(list(map(str, arguments)), check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "n1", "n2"):
        (folder / name).mkdir()
    names, hosts = "127.0.0.1 n1 n2\n", Path("/etc/hosts")
    before = hosts.read_text()
    hosts.write_text(before + names)  # in place: in a container it is a mount
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    host = socket.gethostname()
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(folder=folder, host=host, ports=[free_port() for _ in range(3)])
    )
    (folder / "gres.conf").write_text(GPUS)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    munge = {"--key-file": "key", "--socket": "munge.socket", "--pid-file": "munged.pid", "--log-file": "munged.log"}
    files = [f"{option}={folder / name}" for option, name in munge.items()]
    try:
        command("munged", "--force", *files, f"--seed-file={folder}/seed")
        command("slurmctld")
        for node in ("n1", "n2"):
            command("slurmd", "-N", node)
        wait_until(lambda: command("sinfo", "-h", "-p", "low", "-o", "%T") == "idle", 60)
        yield
    finally:
        for job in command("squeue", "-h", "-o", "%i").split():
            command("scancel", "--signal=KILL", "--full", job)
            command("scancel", job)
        wait_until(lambda: not command("squeue", "-h", "-o", "%i"), 60)
        daemons = [psutil.Process(int(path.read_text())) for path in folder.glob("*.pid")]
        for daemon in daemons:
            daemon.terminate()
        psutil.wait_procs(daemons, timeout=20)
        hosts.write_text(hosts.read_text().replace(names, ""))
        del os.environ["SLURM_CONF"]


class Job:
    """The job file, submitted as its first lines say, on less."""

    def __init__(self, folder, *arguments):
        for path in ROOT.glob("*.py"):
            shutil.copy(path, folder)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        less = ["--parsable", "--gpus-per-node", "1", "--cpus-per-task", "1", f"--chdir={folder}"]
        submit = ["sbatch", *less, ROOT / "launchers" / "slurm.sbatch", *map(str, arguments)]
        self.id = subprocess.run(submit, env=environment, check=True, capture_output=True, text=True).stdout.strip()
        self.log = Path(folder, f"multinode_torchrun-{self.id}.out")

    def text(self):
        return self.log.read_text() if self.log.exists() else ""

    def field(self, name):
        return re.search(rf"\b{name}=(\S+)", command("scontrol", "show", "job", self.id))[1]

    def wait_for_epochs(self, count):
        wait_until(lambda: self.text().count("| Epoch ") >= count or self.ended())

    def ended(self):
        return self.field("JobState") not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SIGNALING")

    def starts(self):
        return re.findall(r"\[rank 0/\d+ on \S+\] CPU \| Starting at Epoch (\d+), Step (\d+)", self.text())

    def start_again(self):
        """Wait until it is back in the queue, and spare it the wait there."""
        wait_until(lambda: self.field("Restarts") == "1")
        update = ["scontrol", "update", f"job={self.id}", "StartTime=now+10"]  # sooner, it is "revoked"
        wait_until(lambda: self.field("JobState") == "PENDING" and subprocess.run(update).returncode == 0)
        wait_until(lambda: len(self.starts()) == 2)


@pytest.mark.guard
def test_preempted_it_saves_is_requeued_resumes_at_that_step_and_finishes(cluster, tmp_path):
    job = Job(tmp_path, 6, 1000, "--global-batch-size", 8)
    job.wait_for_epochs(1)
    command("sbatch", "--partition=high", "--nodes=2", "--gpus-per-node=1", f"--chdir={tmp_path}", "--wrap=srun true")
    job.start_again()
    (saved,) = re.findall(r"next is Epoch (\d+), Step (\d+)", job.text().partition("Starting at Epoch 0")[2])[:1]
    assert saved != ("0", "0")
    assert job.starts() == [("0", "0"), saved]
    wait_until(job.ended)
    assert job.field("JobState") == "COMPLETED", job.text()
    assert "next is Epoch 6, Step 0" in job.text()
    dist.launch(multinode_torchrun.main_worker, options(tmp_path / "expected.pt", 6, global_batch_size=8), nprocs=2)
    assert_same_models(tmp_path / "snapshot.pt", tmp_path / "expected.pt")


def test_a_killed_agent_requeues_and_scancel_does_not(cluster, tmp_path):
    job = Job(tmp_path, 10**6, 1, "--global-batch-size", 8)
    job.wait_for_epochs(2)
    node = {"SLURM_JOB_ID": job.id, "SLURMD_NODENAME": "n2"}
    processes = [each for each in psutil.process_iter(["cmdline", "environ"]) if each.info["environ"]]
    of_node = [each for each in processes if node.items() <= each.info["environ"].items()]
    of_node = [each for each in of_node if "multinode_torchrun.py" in each.info["cmdline"]]
    assert len(of_node) == 2, of_node
    for process in of_node:  # the agent and its rank
        process.kill()
    job.start_again()
    (_, (epoch, step)) = job.starts()
    assert int(epoch) >= 2 and step == "0"
    command("scancel", job.id)
    wait_until(lambda: job.field("JobState") == "CANCELLED")
    assert job.field("Restarts") == "1"
