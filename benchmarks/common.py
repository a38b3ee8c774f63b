"""What every benchmark shares: alternating rounds, and results with the machine and the versions they came from."""

import datetime
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", Path(__file__).parent / "results"))


def alternate(cases, rounds):
    """Call every case of {name: function} in turn, `rounds` times; returns {name: [seconds, ...]}.

    On a shared machine only times of the same rounds may be compared.
    """
    times = {name: [] for name in cases}
    for _ in range(rounds):
        for name, function in cases.items():
            begin = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - begin)
    return times


def summary(values):
    return {"n": len(values), "median": statistics.median(values), "min": min(values), "max": max(values)}


def write(name, results):
    """Write benchmarks/results/{name}.json, or into the folder BENCHMARK_RESULTS, and print its path."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    record = {
        "date": datetime.date.today().isoformat(),
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "gpus": gpus},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        **results,
    }
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path}")
