"""The parameter server, 2 trainers on ShallowNet: batches/s against the usual one, and against DDP without a server.

    python -m benchmarks.param_server [--rounds 5] [--steps 40]

Each case trains in processes of its own; it counts the batches of all trainers after a warm-up. "usual" is
the tutorial's parameter server: the model lives on the server, a trainer runs forward and backward there through
distributed autograd, fetches the gradients to assert that there are some, and steps with DistributedOptimizer. A lock,
which the tutorial lacks, keeps one trainer from changing the parameters that the other's backward needs. "same" is on
the transport of rpc_param_server.py, "lean" without the assertion. Every process computes with its share of the cores,
one thread on two cores; with "2 threads" the server has two. The cases alternate, and only ratios within a round mean
something.
https://docs.pytorch.org/tutorials/intermediate/rpc_param_server_tutorial.html
"""

import argparse
import functools
import os
import statistics
import tempfile
import threading
import time

import torch
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional as F

import distributed as dist
import mnist
import options
import rpc_param_server
from benchmarks import common

BATCH, LR, WARM_UP = 32, 0.01, 3
SAME = {"_transports": ["uv"], "_channels": ["cma", "basic"]}  # as in rpc_remote.py
RATIOS = [  # with the promise for each
    ("hogwild", "usual", "at least 6"),
    ("hogwild", "usual, same", "at least 2.5"),
    ("hogwild", "usual, same, lean", "above 1"),
    ("hogwild", "usual, same, 2 threads", "above 1"),
    ("hogwild", "DDP", "at least 0.9"),
    ("sync", "hogwild", "at least 0.85"),
    ("hogwild", "hogwild, 1 trainer", "above 1"),
]


def data(*args, **kwargs):
    return mnist.Digits(torch.randint(256, (BATCH, 1, 28, 28), dtype=torch.uint8), torch.randint(10, (BATCH,)))


class TimedBatches:
    """The same batch, again and again; how many there were per second, after the warm-up, is saved at the end."""

    def __init__(self, folder, steps):
        self.path, self.steps = f"{folder}/{dist.get_rank()}.pt", steps

    def __len__(self):
        return WARM_UP + self.steps

    def __iter__(self):
        digits = data()
        for step in range(len(self)):
            if step == WARM_UP:
                begin = time.perf_counter()
            yield digits.images, digits.labels
        torch.save(self.steps / (time.perf_counter() - begin), self.path)


def ours(local_rank, world_size, folder, steps, mode):
    args = argparse.Namespace(mode=mode, model="shallow", epochs=1, batch_size=BATCH, lr=LR, seed=0, timeout=60.0)
    args.data = args.data_dir = None
    mnist.load_data = data
    if local_rank:
        rpc_param_server.DataLoader = lambda *args, **kwargs: TimedBatches(folder, steps)
    rpc_param_server.print = lambda *args, **kwargs: None
    rpc_param_server.main_worker(local_rank, world_size, args)


class UsualServer:
    def __init__(self):
        self.model = mnist.ShallowNet()
        self.lock = threading.Lock()

    def forward(self, images):
        return self.model(mnist.normalize(images))

    def gradients(self, context):
        return autograd.get_gradients(context)  # keyed by the parameters, which are sent as well

    def acquire(self):
        self.lock.acquire()

    def release(self):
        self.lock.release()

    def parameter_rrefs(self):
        return [rpc.RRef(p) for p in self.model.parameters()]


@functools.cache
def usual_server():
    return UsualServer()


def usual(local_rank, world_size, folder, steps, transport, lean=False, server_threads=None):
    if server_threads and local_rank == 0:
        torch.set_num_threads(server_threads)
    usual_server()  # before the first call comes
    options = rpc.TensorPipeRpcBackendOptions(**transport)
    rpc.init_rpc(f"worker{local_rank}", rank=local_rank, world_size=world_size, rpc_backend_options=options)
    if local_rank:
        server = rpc.remote("worker0", usual_server)
        optimizer = DistributedOptimizer(torch.optim.SGD, server.rpc_sync().parameter_rrefs(), lr=LR, momentum=0.9)
        for images, labels in TimedBatches(folder, steps):
            server.rpc_sync().acquire()
            with autograd.context() as context:
                loss = F.cross_entropy(server.rpc_sync().forward(images), labels)
                autograd.backward(context, [loss])
                assert lean or server.rpc_sync().gradients(context)
                optimizer.step(context)
            server.rpc_sync().release()
    rpc.shutdown()


def ddp(local_rank, world_size, folder, steps):
    dist.init_process_group()
    device = dist.get_device()
    model = dist.prepare_ddp_model(mnist.ShallowNet().to(device), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for images, labels in TimedBatches(folder, steps):
        loss = F.cross_entropy(model(mnist.normalize(images.to(device))), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def measure(results, name, worker_fn, nprocs, *args):
    with tempfile.TemporaryDirectory() as folder:
        dist.launch(worker_fn, folder, *args, nprocs=nprocs)
        speeds = [torch.load(f"{folder}/{file}", weights_only=True) for file in os.listdir(folder)]
    results[name].append(sum(speeds))


def main():
    parser = options.ArgumentParser(__doc__)
    parser.add_argument("--rounds", type=options.whole_number(1), default=5, help="of each measurement")
    parser.add_argument(
        "--steps", type=options.whole_number(5), default=40, help="of each trainer; the usual server: a third"
    )
    args = parser.parse_args()

    few = max(1, args.steps // 3)
    jobs = {
        "hogwild": (ours, 3, args.steps, "hogwild"),
        "sync": (ours, 3, args.steps, "sync"),
        "DDP": (ddp, 2, args.steps),
        "hogwild, 1 trainer": (ours, 2, args.steps, "hogwild"),
        "usual": (usual, 3, few, {}),
        "usual, same": (usual, 3, few, SAME),
        "usual, same, lean": (usual, 3, few, SAME, True),
        "usual, same, 2 threads": (usual, 3, few, SAME, False, 2),
    }
    results = {name: [] for name in jobs}
    common.alternate({name: functools.partial(measure, results, name, *job) for name, job in jobs.items()}, args.rounds)
    for name, speeds in results.items():
        print(f"{name:22} {statistics.median(speeds):6.1f} batches/s ({min(speeds):.1f} to {max(speeds):.1f})")
    ratios = {}
    for one, other, promise in RATIOS:
        ratios[f"{one} / {other}"] = common.ratio(results[one], results[other], promise)
    common.show(ratios)
    speeds = {name: common.summary(values) for name, values in results.items()}
    common.write("param_server", {"unit": "batches/s", "results": speeds, "ratios": ratios})


if __name__ == "__main__":
    main()
