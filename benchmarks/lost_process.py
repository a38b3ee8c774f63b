"""How long training stops when a process is killed: min_FaultTolerant.py against a restart by torchrun.

    python -m benchmarks.lost_process                 # 8 processes, 5 kills of each kind
    python -m benchmarks.lost_process --nproc 2

- survivors: min_FaultTolerant.py, from the kill to the line of the next step.
- newcomer: the same, to the line of the first step of the new process.
- torchrun: multigpu_torchrun.py saves each epoch of some milliseconds, from the kill to the line of the next epoch.

Each kind trains a small model, so nearly all of the time is for the loss. The kinds alternate.
"""

import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

import options
from benchmarks import common

ROOT = Path(__file__).parent.parent
SMALL = ("--layers", 1, "--width", 32, "--heads", 2, "--length", 32, "--steps", 10**6, "--log-every", 1)


def parse_args():
    parser = options.ArgumentParser(__doc__)
    parser.add_argument("--nproc", type=options.whole_number(2), default=8, help="processes")
    parser.add_argument("--kills", type=options.whole_number(1), default=5, help="kills of each kind")
    return parser.parse_args()


class Job:
    """A command, and the lines that it prints, each with the time when it came."""

    def __init__(self, *command):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-u", *map(str, command)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines = []
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    def wait_for(self, pattern, after=0.0, seconds=300):
        """The time of the first line that came after `after` and matches."""
        end = time.monotonic() + seconds
        seen = 0
        while time.monotonic() < end and self.process.poll() is None:
            for moment, line in self.lines[seen:]:
                seen += 1
                if moment > after and re.match(pattern, line):
                    return moment
            time.sleep(0.005)
        raise RuntimeError(f"no line like {pattern} within {seconds} s: {self.lines[-5:]}")

    def end(self):
        self.process.terminate()
        self.process.wait(60)


def kill_one(pids):
    """Kill one of the processes; returns the time."""
    os.kill(random.choice(pids), signal.SIGKILL)
    return time.monotonic()


def lose_one(nproc):
    """Seconds from a kill to the next step of the others, and to the first step of the new process."""
    job = Job("min_FaultTolerant.py", "--nproc", nproc, *SMALL)
    job.wait_for("step 20/")
    matches = [re.match(r"process (\d+) trains", line) for _, line in job.lines]
    pids = [int(match[1]) for match in matches if match]
    killed = kill_one(pids)
    survivors = job.wait_for(r"quorum 1: ", killed) - killed
    newcomer = job.wait_for(r"quorum \d+: \d+ members, 1 of them new", killed) - killed
    job.end()
    return survivors, newcomer


def restart(nproc):
    """Seconds from a kill to the next epoch of processes that torchrun has restarted."""
    with tempfile.TemporaryDirectory() as folder:
        command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", nproc, "--max-restarts", 1)
        job = Job(*command, "multigpu_torchrun.py", 10**6, 1, "--snapshot-path", f"{folder}/snapshot.pt")
        job.wait_for(r".*Epoch 20 ")
        workers = psutil.Process(job.process.pid).children()
        killed = kill_one([worker.pid for worker in workers])
        psutil.wait_procs(workers, timeout=60)
        seconds = job.wait_for(r".*Epoch \d+ ", time.monotonic()) - killed
        job.end()
    return seconds


def main():
    args = parse_args()
    times = {"survivors": [], "newcomer": [], "torchrun": []}
    for _ in range(args.kills):
        survivors, newcomer = lose_one(args.nproc)
        times["survivors"].append(survivors)
        times["newcomer"].append(newcomer)
        times["torchrun"].append(restart(args.nproc))
    results = []
    for kind, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{kind:10} median {median:.2f} s, from {min(seconds):.2f} to {max(seconds):.2f}")
        results.append({"kind": kind, "nproc": args.nproc, "seconds": seconds, "median": median})
    ratio = statistics.median(times["torchrun"]) / statistics.median(times["survivors"])
    print(f"torchrun's restart takes {ratio:.0f} times as long")
    common.write("lost_process", {"unit": "seconds from the kill to the next step", "results": results})


if __name__ == "__main__":
    main()
