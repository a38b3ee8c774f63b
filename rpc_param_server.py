"""A parameter server: one process holds the parameters, trainers send it gradients over RPC.

PyTorch maintains torch.distributed.rpc but no longer develops it. For new work choose DistributedDataParallel or FSDP2
(min_DDP.py, min_FSDP.py), torchft where machines get lost, and torch.distributed.pipelining or DTensor for models that
do not fit. A parameter server is still the plainest way to train asynchronously: no trainer waits for another.

Each trainer works on its own share of the data. A step is one round trip: it sends its gradient, one flat tensor, and
is answered with the parameters, another. The server either applies each gradient as it comes (`--mode hogwild`, the
default, in the spirit of https://arxiv.org/abs/1106.5730), or waits for one of every trainer, applies their average
and answers all (`--mode sync`), which equals DDP on the same global batch. The update is locked, so that none is lost.
Reading is not: an answer may hold a part of the update that another trainer's gradient is just making.

Cost, for P float32 parameters and N trainers: 12·P bytes on a trainer (parameters, gradients, the flat gradient); on
the server 16·P (parameters, momentum, a gradient, a copy to evaluate), for sync 12·P + 4·P·N. A step sends 4·P bytes
each way per trainer, so 8·P·N through the server, where an all-reduce sends 2·(N-1)/N · 4·P per process.

    python rpc_param_server.py                                        # a server and two trainers on this machine
    python rpc_param_server.py --trainers 4 --mode sync
    torchrun --standalone --nproc-per-node 3 rpc_param_server.py      # rank 0 is the server
    export TP_SOCKET_IFNAME=eth1 GLOO_SOCKET_IFNAME=eth1              # on each of three machines
    torchrun --nnodes 3 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 rpc_param_server.py

RPC has no authentication and executes what it receives. On one machine it listens on loopback only. On several, name
the interface of a network that you trust, as above: else it listens where the machine's own name leads.

When a trainer is killed, the others go on without its share of the data, unless under torchrun, which ends a job that
lost a process. A trainer that loses the server ends. One that hangs without dying, stopped or cut off, is not taken for
lost: with sync the job ends after `--timeout` seconds without an answer, with hogwild it waits at its end.

It prints a line per epoch, `Epoch 1 - loss: 0.0754 - acc: 0.9765 (9765/10000) - 74.2 updates/s - 29.8 MB/s -
staleness: 0.71`: loss and accuracy on all test samples, gradients and parameters sent, and how many updates the server
made, on average, between a trainer's pull and push. Parameters are all that is sent: mnist's models have no buffers.
"""

import contextlib
import os
import queue
import socket
import sys
import threading
import time
from datetime import timedelta

import torch
from torch.distributed import init_process_group, rpc
from torch.multiprocessing import ProcessExitedException
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import distributed as dist
import mnist
import options


def parse_args():
    parser = options.ArgumentParser(__doc__)
    parser.add_argument("--trainers", type=options.whole_number(1), default=2, help="processes beside the server")
    parser.add_argument("--mode", choices=("hogwild", "sync"), default="hogwild", help="when the server updates")
    parser.add_argument("--model", choices=mnist.MODELS, default="simple", help="the network")
    parser.add_argument("--epochs", type=options.whole_number(1), default=2, help="passes over the data")
    parser.add_argument("--batch-size", type=options.whole_number(1), default=32, help="samples per trainer")
    parser.add_argument(
        "--lr", type=options.positive_number, default=0.01, help="learning rate of SGD with momentum 0.9"
    )
    parser.add_argument(
        "--seed", type=options.seed_number, default=0, help="of the data, the weights and the order of samples"
    )
    parser.add_argument(
        "--timeout", type=options.positive_number, default=60, help="seconds for all to join, and for an answer"
    )
    mnist.add_data_options(parser)
    args = parser.parse_args()
    if os.environ.get("WORLD_SIZE") == "1":
        parser.error("WORLD_SIZE: 1 process is too few for a server and a trainer")
    return args


# ---- the server ---------------------------------------------------------------------------------------------------


class Server:
    """The parameters, as one flat tensor, and how far the trainers are, whose ranks are `ranks`."""

    def __init__(self, model, ranks, lr):
        self.params = parameters_to_vector(model.parameters()).detach().cpu()
        self.optimizer = torch.optim.SGD([self.params], lr=lr, momentum=0.9, fused=True)
        self.lock = threading.Lock()  # guards all of this but the reading of the parameters
        self.steps = self.begin = None  # steps of each trainer in an epoch; when the first one began
        self.at_work, self.lost = set(ranks), []
        self.taken = dict.fromkeys(ranks, 0)  # steps, by those who are not lost
        self.seen = dict.fromkeys(ranks, 0)  # updates in the parameters that a trainer computes with
        self.updates = self.pushes = self.staleness = 0
        self.gradients, self.answer = {}, torch.futures.Future()  # sync: those of this round
        self.epochs, self.finished_epochs = queue.Queue(), 0  # to be evaluated; None at the end
        self.end = torch.futures.Future()  # at the end of all work: is nobody lost?

    def receive(self, rank):
        self.taken[rank] += 1
        self.pushes += 1
        self.staleness += self.updates - self.seen[rank]

    def update(self, gradient):
        self.params.grad = gradient
        self.optimizer.step()
        self.updates += 1

    def finish_round(self):
        """Sync: update and answer, if all trainers at work have sent a gradient."""
        if not self.gradients or self.at_work - self.gradients.keys():
            return
        total, *others = (self.gradients[rank] for rank in sorted(self.gradients))
        for gradient in others:
            total += gradient  # in place: new memory would cost more than the sum
        self.update(total.div_(len(self.gradients)))
        self.finish_epochs()
        self.seen.update(dict.fromkeys(self.gradients, self.updates))
        answer, self.gradients, self.answer = self.answer, {}, torch.futures.Future()
        answer.set_result(self.params)  # no copy: the next update waits for those who wait for these

    def finish_epochs(self):
        """Hand over a copy of the parameters when every trainer has done its share of an epoch. The others go on."""
        while self.steps and min(self.taken.values(), default=0) >= (self.finished_epochs + 1) * self.steps:
            self.finished_epochs += 1
            counts = (time.monotonic() - self.begin, self.updates, self.pushes, self.staleness)
            self.epochs.put((self.params.clone(), counts))

    def leave(self, rank, lost):
        """A trainer has no more work, or is lost."""
        with self.lock:
            self.at_work.discard(rank)
            if lost:
                print(f"trainer {rank} is lost", flush=True)
                self.lost.append(rank)
                del self.taken[rank]
                self.finish_epochs()
            self.finish_round()  # nobody need wait for it
            if not self.at_work:
                self.epochs.put(None)


server = None  # in the server's process, where the next four functions run, in threads of RPC


def pull(rank, steps):
    """The first parameters of a trainer that takes `steps` steps in an epoch."""
    with server.lock:
        server.begin = server.begin or time.monotonic()
        server.steps, server.seen[rank] = steps, server.updates
    return server.params


def push(rank, gradient):
    """Hogwild: apply the gradient at once. Gives the parameters."""
    with server.lock:
        server.receive(rank)
        server.update(gradient)
        server.seen[rank] = server.updates
        server.finish_epochs()
    return server.params  # sent as they are in memory, while others may change them


@rpc.functions.async_execution
def push_and_wait(rank, gradient):
    """Sync: a Future of the parameters after the update with the average gradient of all trainers at work."""
    with server.lock:
        server.receive(rank)
        server.gradients[rank], answer = gradient, server.answer
        server.finish_round()
    return answer


@rpc.functions.async_execution
def finish(rank):
    """A trainer has no more work. Gives a Future, at the end of all work, of whether nobody is lost."""
    server.leave(rank, lost=False)
    return server.end


@torch.no_grad()
def evaluate(model, loader, device):
    """Sum of the losses, correct predictions, samples."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        output, labels = model(mnist.normalize(images.to(device))), labels.to(device)
        loss = F.cross_entropy(output, labels, reduction="sum")
        hits = (output.argmax(dim=1) == labels).sum()
        sums += torch.stack([loss, hits, torch.tensor(len(labels), device=device)])
    return sums.tolist()


def serve(model, dataset, device, ranks, args):
    """Evaluate each epoch while the trainers train. Returns whether nobody is lost."""
    calls = [rpc.rpc_async(f"trainer{rank}", wait_until_the_end, timeout=0) for rank in ranks]
    for rank, call in zip(ranks, calls, strict=True):  # one that ends before the end has failed: its trainer is lost
        call.add_done_callback(lambda _, rank=rank: server.end.done() or server.leave(rank, lost=True))
    print(f"Training on {len(ranks)} x {device.type}, {args.mode}, batch {args.batch_size} each", flush=True)
    loader = DataLoader(dataset, 1000, collate_fn=tuple)
    before = (0, 0, 0, 0)
    for epoch, (params, counts) in enumerate(iter(server.epochs.get, None)):
        vector_to_parameters(params.to(device), model.parameters())
        loss, hits, n = evaluate(model, loader, device)
        seconds, updates, pushes, staleness = (b - a for a, b in zip(before, counts, strict=True))
        megabytes = 2 * pushes * params.numel() * params.element_size() / 1e6
        staleness /= max(1, pushes)  # there are none if two epochs end at once, because a slow trainer is lost
        print(
            f"Epoch {epoch + 1} - loss: {loss / n:.4f} - acc: {hits / n:.4f} ({hits:.0f}/{n:.0f}) - "
            f"{updates / seconds:.1f} updates/s - {megabytes / seconds:.1f} MB/s - staleness: {staleness:.2f}",
            flush=True,
        )
        before = counts
    server.end.set_result(not server.lost)
    for call in calls:
        with contextlib.suppress(RuntimeError):
            call.wait()  # until its trainer has heard of the end
    if server.finished_epochs < args.epochs:
        rpc.shutdown(graceful=False)
        sys.exit(f"every trainer is lost, after {server.updates} updates")
    lost = ", ".join(f"trainer {rank}" for rank in sorted(server.lost)) or "no trainer"
    print(f"Finished: {server.updates} updates, {lost} lost")
    return not server.lost


# ---- a trainer ----------------------------------------------------------------------------------------------------

end = torch.futures.Future()


@rpc.functions.async_execution
def wait_until_the_end():
    """The server makes one such call of each trainer: it fails at once when the trainer dies."""
    return end


def call_server(function, *args, **kwargs):
    """Call one of the functions above in the server. Raises SystemExit if the server is lost."""
    try:
        return rpc.rpc_sync("server", function, args, **kwargs)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if reason.startswith("On WorkerInfo"):  # raised by the function itself
            raise
        rpc.shutdown(graceful=False)  # or its threads, which still run when the interpreter ends, may abort
        cause = "the server, or with sync another trainer, hangs" if "timeout" in reason else "the server is lost"
        sys.exit(f"rank {dist.get_rank()}: {cause}: {reason}")


def train(model, dataset, device, ranks, args):
    """Train on this trainer's share of the data. Returns, at the end of all work, whether nobody is lost."""
    rank = dist.get_rank()
    sampler = DistributedSampler(dataset, len(ranks), ranks.index(rank), seed=args.seed)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, collate_fn=tuple)
    send = push if args.mode == "hogwild" else push_and_wait
    params = call_server(pull, rank, len(loader))
    model.train()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch
        for images, labels in loader:
            vector_to_parameters(params.to(device), model.parameters())
            loss = F.cross_entropy(model(mnist.normalize(images.to(device))), labels.to(device))
            model.zero_grad()
            loss.backward()
            params = call_server(send, rank, parameters_to_vector(p.grad for p in model.parameters()).cpu())
    nobody_is_lost = call_server(finish, rank, timeout=0)
    end.set_result(None)
    return nobody_is_lost


# ---- start --------------------------------------------------------------------------------------------------------


def choose_interface():
    """On one machine loopback, unless the user has named another; on several what was named, with a warning."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("TP_SOCKET_IFNAME", loopback)
    interface = os.environ.get("TP_SOCKET_IFNAME", f"the address of {socket.gethostname()}")
    if dist.is_primary() and not interface.startswith("lo"):
        print(f"warning: RPC listens on {interface}, without authentication: trust its network", file=sys.stderr)


def join(name, rank, world_size, timeout):
    """Start RPC, and a process group for the data. SystemExit if not all are there within `timeout` seconds."""
    # init_rpc has a group of its own, for which it knows no other timeout than this one, of 24 days.
    rpc.constants.DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(seconds=timeout)
    # The default transport, shared memory, polls busily: it takes the cores that the trainers need. This is TCP; on one
    # machine, the tensors' bytes are copied from process to process by the kernel.
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=timeout, _transports=["uv"], _channels=["cma", "basic"])
    try:
        init_process_group("gloo", timeout=timedelta(seconds=timeout))
        rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    except RuntimeError as error:
        sys.exit(f"rank {rank}: not all {world_size} have joined within {timeout:g} s: {str(error).splitlines()[0]}")


def get_device():
    """This process's device. Trainers share the GPUs if there are too few; the server needs one to evaluate only."""
    count = torch.cuda.device_count()
    return torch.device("cuda", dist.get_local_rank() % count) if count else torch.device("cpu")


def main_worker(local_rank, world_size, args):
    global server
    rank, device, ranks = dist.get_rank(), get_device(), range(1, world_size)
    torch.manual_seed(args.seed + rank)  # dropout should differ; the weights are the server's
    model = mnist.MODELS[args.model]().to(device)
    server = Server(model, ranks, args.lr) if rank == 0 else None  # before the first call comes
    choose_interface()
    join(f"trainer{rank}" if rank else "server", rank, world_size, args.timeout)
    dataset = mnist.load_data(args.data, args.data_dir, train=rank > 0, seed=args.seed)
    nobody_is_lost = (train if rank else serve)(model, dataset, device, ranks, args)
    with contextlib.suppress(RuntimeError):  # one may be lost in this very moment
        rpc.shutdown(graceful=nobody_is_lost, timeout=args.timeout)


if __name__ == "__main__":
    cli_args = parse_args()
    try:
        dist.launch(main_worker, cli_args, nprocs=cli_args.trainers + 1, tolerate_killed=True)
    except ProcessExitedException as error:
        sys.exit(f"the server is lost: {error}")
