"""What every benchmark shares: alternating rounds, and results with the machine and the versions they came from."""

import datetime
import functools
import importlib.util
import json
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch

import distributed as dist

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


def alternate_ranks(cases, rounds, device):
    """`alternate` in every rank of a job: the slowest rank's seconds. A first round is not counted.

    A case is called with the number of the round. Their order is drawn anew for each round, so that none always
    follows the same one.
    """
    times, order = {name: [] for name in cases}, random.Random(0)
    for number in range(rounds + 1):
        for name, function in order.sample(list(cases.items()), len(cases)):
            wait_for(device)
            dist.barrier()
            begin = time.perf_counter()
            function(number)
            wait_for(device)
            seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device=device)
            times[name].append(dist.all_reduce(seconds, op="max").item())
    return {name: values[1:] for name, values in times.items()}


def wait_for(device):
    """For all that was started there. On the CPU nothing runs on when a function has returned."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def launch(worker_fn, *args, nprocs):
    """`dist.launch(worker_fn, *args, report, nprocs=nprocs)`; returns what rank 0 gives to `report`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        dist.launch(worker_fn, *args, functools.partial(_report, path), nprocs=nprocs)
        return json.loads(path.read_text())


def _report(path, value):
    if dist.is_primary():
        path.write_text(json.dumps(value))


def summary(values):
    return {"n": len(values), "median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(ones, others, promise):
    """The ratio of two cases in each round, summarized, and the promise for it."""
    return {**summary([one / other for one, other in zip(ones, others, strict=True)]), "promise": promise}


def show(ratios):
    """Print {"one / other": ratio(...)}, the promise beside each."""
    for name, row in ratios.items():
        print(f"{name} = {row['median']:.3g} ({row['min']:.3g} to {row['max']:.3g}), promised: {row['promise']}")


def require(*modules):
    """Exit with one line if a module of requirements-bench.txt is missing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"{', '.join(missing)} not installed: run `pip install -r requirements-bench.txt`")


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
