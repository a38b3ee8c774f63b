"""The accuracy that mnist_DDP.py reaches on the real MNIST with its defaults, in two CPU processes.

    python -m benchmarks.mnist_accuracy [--data-dir data] [--seed 0]

Its output, line by line, goes to benchmarks/results/mnist_accuracy.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mnist_DDP
import options
from benchmarks import common


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", default="data", help="where MNIST is, or is downloaded to")
    parser.add_argument("--seed", type=options.whole_number(0), default=0, help="random seed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "mnist_cnn.pt")
        flags = ["--data", "mnist", "--data-dir", args.data_dir, "--seed", str(args.seed), "--output", str(output)]
        begin, log = time.perf_counter(), []
        command = [sys.executable, mnist_DDP.__file__, "--nproc", "2", *flags]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            for line in process.stdout:
                print(line, end="", flush=True)
                log.append(line.rstrip("\n"))
        if process.returncode:
            sys.exit(process.returncode)
        seconds = time.perf_counter() - begin
        accuracies = json.loads(output.with_name("mnist_cnn_accuracies.json").read_text())
    hp = vars(mnist_DDP.make_parser("").parse_args(["--data", "mnist", "--seed", str(args.seed)]))
    del hp["data_dir"]
    results = {"processes": 2, "hyperparameters": hp, "seconds": seconds, "accuracies": accuracies, "log": log}
    common.write("mnist_accuracy", results)


if __name__ == "__main__":
    main()
