"""What grows with the number of ranks: the start, the sockets, and the exchanges of a save, a load and a preemption.

    python -m benchmarks.scale                                   # 8 and 64 processes; 256 and 1,024 simulated ranks
    python -m benchmarks.scale --processes 8 --simulated 256 1024 4096

The rows of --processes come from real processes of this machine, started by `launch`. A job of them saves and loads a
small model, so the time goes to the exchanges between ranks. The rows of --simulated come from ranks that are
threads in eight processes: each has a connection to the store and a gloo context of its own, as a process would have,
but shares the cores. The time to meet is counted from the last rank's start until all have the store. Their exchange is
a ring of messages, and the cores carry them one after the other: divide by the number of ranks per core for the work of
one rank. A process needs one open file per socket; the one that holds the store needs one for every rank.
"""

import argparse
import math
import multiprocessing
import os
import resource
import tempfile
import threading
import time
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as torch_dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

import checkpoint
import distributed as dist
import options
from benchmarks import common

SIMULATING = 8  # processes
MOST_GLOO = 1024  # each context has threads of its own
MOST_EXCHANGING = 256  # their ring takes n² messages, one after the other
TIMEOUT = timedelta(seconds=300)


def count_sockets():
    count = 0
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.lexists(path):  # the listing's own is closed by now
            count += os.readlink(path).startswith("socket:")
    return count


# ---- real processes -----------------------------------------------------------------------------------------------


def measure_job(local_rank, world_size, begin, folder, report):
    dist.init_process_group()
    result = {"start": time.time() - begin}
    before = count_sockets()
    dist.gather_objects(local_rank, dist.patient_group())
    dist.broadcast_object(local_rank, group=dist.patient_group())
    result["sockets"] = max(dist.gather_objects(count_sockets() - before))

    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    sharded = torch.nn.Linear(64, 64)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (world_size,)))
    sharded_optimizer = torch.optim.Adam(sharded.parameters())
    for one, its_optimizer in ((model, optimizer), (sharded, sharded_optimizer)):
        one(torch.ones(1, 64)).sum().backward()
        its_optimizer.step()
    preemption = checkpoint.Preemption()
    cases = {
        "exchange": lambda: dist.gather_objects(None, dist.patient_group()),
        "save": lambda: checkpoint.save(f"{folder}/snapshot.pt", model, optimizer, epoch=1),
        "load": lambda: checkpoint.load(f"{folder}/snapshot.pt", model, optimizer),
        "save_sharded": lambda: checkpoint.save_sharded(folder, sharded, sharded_optimizer, 1),
        "load_sharded": lambda: checkpoint.load_sharded(folder, sharded, sharded_optimizer),
        "preemption per step": lambda: [preemption.agreed() for _ in range(100)],
    }
    for name, function in cases.items():
        seconds = []
        for _ in range(3):
            dist.barrier()
            begin = time.perf_counter()
            function()
            dist.barrier()
            seconds.append(time.perf_counter() - begin)
        result[name] = min(seconds)
    result["preemption per step"] /= 100
    report(result)


# ---- simulated ranks ----------------------------------------------------------------------------------------------


def in_threads(function, ranks):
    threads = [threading.Thread(target=function, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def simulate_ranks(ranks, n, stores, ready, results):
    """In one of the processes: let its ranks meet, and connect as `patient_group` does."""
    os.environ.update(TORCHELASTIC_RUN_ID="simulated", TORCH_GLOO_LAZY_INIT="1")
    torch.set_num_threads(1)
    times, groups = [], {}

    def rendezvous(url, rank, world_size, timeout):
        yield stores[rank], rank, world_size

    def meet(rank):
        begin = time.time()
        dist._fresh_store(rank, n, TIMEOUT)
        times.append((begin, time.time()))

    def connect(rank):
        store = torch_dist.PrefixStore("gloo", stores[rank])
        groups[rank] = torch_dist.ProcessGroupGloo(store, rank, n, timeout=TIMEOUT)
        groups[rank].barrier().wait()
        groups[rank].broadcast([torch.ones(1)]).wait()

    def exchange(rank):
        """As `dist.gather_objects`: the sizes, then the objects."""
        for _ in range(2):
            gathered = [torch.empty(1) for _ in range(n)]
            groups[rank].allgather([gathered], [torch.ones(1)]).wait()

    ready.wait()
    with mock.patch.object(torch_dist, "rendezvous", rendezvous):
        in_threads(meet, ranks)
    before = count_sockets()
    seconds = 0
    ready.wait()
    if n <= MOST_GLOO:
        in_threads(connect, ranks)
    if n <= MOST_EXCHANGING:
        ready.wait()
        begin = time.time()
        in_threads(exchange, ranks)
        seconds = time.time() - begin
    results.put((times, (count_sockets() - before) / len(ranks), seconds))
    results.close()
    results.join_thread()
    ready.wait()  # no rank leaves before all have connected
    os._exit(0)


def simulate(n):
    server = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = []
    for _ in range(n):
        stores.append(torch_dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=TIMEOUT))
    context = multiprocessing.get_context("fork")
    results, ready = context.Queue(), context.Barrier(SIMULATING)
    for number in range(SIMULATING):
        ranks = range(number * n // SIMULATING, (number + 1) * n // SIMULATING)
        context.Process(target=simulate_ranks, args=(ranks, n, stores, ready, results), daemon=True).start()
    times = []
    sockets = []
    exchanges = []
    for _ in range(SIMULATING):
        of_process, per_rank, seconds = results.get(timeout=TIMEOUT.total_seconds())
        times += of_process
        sockets.append(per_rank)
        exchanges.append(seconds)
    begins, ends = zip(*times, strict=True)
    result = {"meeting": max(ends) - max(begins)}
    if n <= MOST_GLOO:
        result["sockets"] = math.ceil(max(sockets))
    if n <= MOST_EXCHANGING:
        result["exchange"] = max(exchanges)
    return result


def simulate_in_a_process(n):
    """In a new process, as the simulating ones are forked, and with as many open files as the system allows."""
    context = multiprocessing.get_context("spawn")
    result = context.SimpleQueue()
    process = context.Process(target=_simulate_best, args=(n, result))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit(f"simulating {n} ranks failed")
    return result.get()


def _simulate_best(n, result):
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    runs = [simulate(n) for _ in range(3)]
    result.put({name: min(run[name] for run in runs) for name in runs[0]})
    os._exit(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = options.whole_number(2)
    parser.add_argument("--processes", type=count, nargs="*", default=[8, 64], metavar="N", help="jobs of N processes")
    parser.add_argument("--simulated", type=count, nargs="*", default=[256, 1024], metavar="N", help="simulated ranks")
    args = parser.parse_args()
    rows = {}
    for n in args.processes:
        with tempfile.TemporaryDirectory() as folder:
            job = common.launch(measure_job, time.time(), folder, nprocs=n)
        rows[str(n)] = job
        rows[str(n)]["meeting"] = simulate_in_a_process(n)["meeting"]
    for n in args.simulated:
        rows[str(n)] = simulate_in_a_process(n)
    columns = ["start", "meeting", "sockets", "exchange", "save", "load", "save_sharded", "load_sharded"]
    columns.append("preemption per step")
    print(f"| N | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for n, row in rows.items():
        cells = [f"{row[name]:.4g}" if name in row else "" for name in columns]
        print(f"| {int(n):,} | {' | '.join(cells)} |")
    common.write("scale", {"unit": "seconds, and sockets", "results": rows})


if __name__ == "__main__":
    main()
