"""A parameter server: one process holds the parameters, trainers send it gradients over RPC.

Each trainer works on its own share of the data. A step is one remote call. The trainer sends its gradient, and the
answer is the new parameters, each as one flat tensor. With `--mode hogwild`, the default, the server applies each
gradient as soon as it comes, in the spirit of https://arxiv.org/abs/1106.5730:

    trainer 1               server                      trainer 2
    g = dL(w)
    push(g) --------------> w <- SGD(w, g)
            <-------------- w                           g' = dL(w)     with the w before trainer 1's update: stale
                            w <- SGD(w, g') <---------- push(g')
                            w               ---------->

With `--mode sync` it waits for a gradient of every trainer, applies their average and answers all. That equals DDP on
the same global batch:

    push(g) -------------->                 <---------- push(g')
            <-------------- w <- SGD(w, (g + g') / 2) ---------->

No update is lost, because the server updates under a lock. Reading takes no lock, so with hogwild an answer may hold a
part of the next update already.

Choose it when trainers should not wait for each other, or may get lost. Otherwise choose DDP (min_DDP.py), which is not
stale and has no server through which all data must go, or FSDP (min_FSDP.py) if the model does not fit. PyTorch
maintains torch.distributed.rpc but no longer develops it.

Cost, for P float32 parameters and N trainers: a trainer holds 12·P bytes (parameters, gradients, the flat gradient).
The server holds 16·P (parameters, momentum, a gradient, a copy to evaluate), with sync 12·P + 4·P·N. A step sends 4·P
bytes each way per trainer, so 8·P·N through the server, where an all-reduce sends 2·(N-1)/N · 4·P per process.

    python rpc_param_server.py                                        # a server and two trainers on this machine
    python rpc_param_server.py --trainers 4 --mode sync
    torchrun --standalone --nproc-per-node 3 rpc_param_server.py      # rank 0 is the server
    export TP_SOCKET_IFNAME=eth1 GLOO_SOCKET_IFNAME=eth1              # on each of three machines: see remote.py
    torchrun --nnodes 3 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 rpc_param_server.py

When a trainer is killed, the others continue without its share of the data. Under torchrun the job ends, because
torchrun ends a job that has lost a process. When the server is killed, all trainers end. A trainer that hangs without
dying does not count as lost: with sync the job ends after `--timeout` seconds, with hogwild the server waits for it for
ever.

It prints a line per epoch, `Epoch 1 - loss: 0.0667 - acc: 0.9801 (9801/10000) - 27.7 updates/s - 11.1 MB/s -
staleness: 0.87`: loss and accuracy on all test samples, updates and bytes per second, and how many updates the server
made, on average, between sending parameters to a trainer and receiving the gradient. Only parameters are sent, because
the models of mnist.py have no buffers.
"""

import os
import queue
import sys
import threading
import time

import torch
from torch.distributed import rpc
from torch.multiprocessing import ProcessExitedException
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import distributed as dist
import mnist
import options
import remote


def parse_args():
    parser = options.ArgumentParser(__doc__)
    trainers_help = "processes beside the server; ignored under torchrun"
    parser.add_argument("--trainers", type=options.whole_number(1), default=2, help=trainers_help)
    parser.add_argument(
        "--mode",
        choices=("hogwild", "sync"),
        default="hogwild",
        help="update with each gradient at once, or with the average over all trainers",
    )
    parser.add_argument("--model", choices=mnist.MODELS, default="simple", help="network to train")
    parser.add_argument("--epochs", type=options.whole_number(1), default=2, help="passes over the data")
    parser.add_argument("--batch-size", type=options.whole_number(1), default=32, help="samples per trainer and step")
    parser.add_argument("--lr", type=options.positive_number, default=0.01, help="learning rate; the momentum is 0.9")
    parser.add_argument("--seed", type=options.seed_number, default=0, help="random seed of data, weights and order")
    parser.add_argument(
        "--timeout", type=remote.timeout_seconds, default=60, help="seconds to wait for all processes, or for an answer"
    )
    mnist.add_data_options(parser)
    args = parser.parse_args()
    if os.environ.get("WORLD_SIZE") == "1":
        parser.error("WORLD_SIZE: 1 process is too few for a server and a trainer")
    return args


# ---- what trainers call in the server's process, each call in a thread of RPC -------------------------------------

server = None  # the Server, in the server's process


def pull(rank):
    """The first parameters of a trainer."""
    with server.lock:
        server.progress.answer(rank)
    return server.params


def push(rank, gradient):
    """Hogwild: update with this gradient at once. Returns the parameters."""
    with server.lock:
        server.progress.receive(rank)
        server.update(gradient)
        server.progress.answer(rank)
    return server.params


@rpc.functions.async_execution  # the trainer waits for the Future, while this thread serves other calls
def push_and_wait(rank, gradient):
    """Sync: update once all trainers have sent a gradient. Returns a Future of the parameters."""
    with server.lock:
        server.progress.receive(rank)
        server.gradients[rank] = gradient
        answer = server.answer
        server.update_if_all_have_sent()
    return answer


def finish_epoch(rank):
    """Note that a trainer has finished an epoch. The trainer does not wait for the others."""
    with server.lock:
        server.progress.finish_epoch(rank, server.params)


# ---- a trainer ----------------------------------------------------------------------------------------------------


def train(model, dataset, device, ranks, args):
    """Train on this trainer's share of the data."""
    rank = dist.get_rank()
    sampler = DistributedSampler(dataset, len(ranks), ranks.index(rank), seed=args.seed)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, collate_fn=tuple)
    send = push if args.mode == "hogwild" else push_and_wait
    params = remote.call("server", pull, rank)
    model.train()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch
        for images, labels in loader:
            vector_to_parameters(params.to(device), model.parameters())
            loss = F.cross_entropy(model(mnist.normalize(images.to(device))), labels.to(device))
            model.zero_grad()
            loss.backward()
            gradient = parameters_to_vector(p.grad for p in model.parameters())
            params = remote.call("server", send, rank, gradient.cpu())
        remote.call("server", finish_epoch, rank)
    remote.leave("server")


# ---- the server ---------------------------------------------------------------------------------------------------


class Server:
    """The parameters, as one flat tensor, and their optimizer. Hold `lock` to change anything here."""

    def __init__(self, model, ranks, lr):
        self.params = parameters_to_vector(model.parameters()).detach().cpu()
        self.optimizer = torch.optim.SGD([self.params], lr=lr, momentum=0.9, fused=True)
        self.lock = threading.Lock()
        self.trainers = set(ranks)  # the ranks of those that are not lost
        self.gradients = {}  # sync: the gradients of this step, by rank
        self.answer = torch.futures.Future()  # sync: the parameters after this step
        self.progress = Progress(ranks)

    def update(self, gradient):
        self.params.grad = gradient
        self.optimizer.step()
        self.progress.updates += 1

    def update_if_all_have_sent(self):
        """Sync: update with the average gradient and answer all trainers, if none is missing."""
        missing = self.trainers - self.gradients.keys()
        if missing or not self.gradients:
            return
        ranks = sorted(self.gradients)  # in this order, so that rounding is the same in each run
        total = self.gradients[ranks[0]]
        for rank in ranks[1:]:
            total += self.gradients[rank]  # in place: new memory would cost more than the sum
        total /= len(ranks)
        self.update(total)
        for rank in ranks:
            self.progress.answer(rank)
        answer = self.answer
        self.gradients = {}
        self.answer = torch.futures.Future()
        # Needs no copy: the next update starts only after every trainer has received this answer.
        answer.set_result(self.params)

    def lose(self, rank):
        """Continue without a trainer that has died."""
        with self.lock:
            print(f"trainer {rank} is lost", flush=True)
            self.trainers.discard(rank)
            self.update_if_all_have_sent()  # the others wait for it no longer
            self.progress.lose(rank, self.params)


class Progress:
    """What the server prints: how many updates, how stale, and which epochs are finished."""

    def __init__(self, ranks):
        self.begin = None  # when the first trainer began
        self.updates = 0
        self.pushes = 0  # gradients received
        self.staleness = 0  # summed over all pushes
        self.updates_seen = dict.fromkeys(ranks, 0)  # updates in the parameters that each trainer computes with
        self.epochs = dict.fromkeys(ranks, 0)  # epochs that each trainer has finished, if it is not lost
        self.snapshots = queue.Queue()  # for each epoch that all have finished, a copy of the parameters and counts()
        self.n_snapshots = 0

    def answer(self, rank):
        """A trainer gets the current parameters."""
        if self.begin is None:
            self.begin = time.monotonic()
        self.updates_seen[rank] = self.updates

    def receive(self, rank):
        """A trainer has sent a gradient."""
        self.pushes += 1
        self.staleness += self.updates - self.updates_seen[rank]

    def finish_epoch(self, rank, params):
        self.epochs[rank] += 1
        self.take_snapshots(params)

    def lose(self, rank, params):
        """Stop waiting for this trainer."""
        del self.epochs[rank]
        self.take_snapshots(params)
        if not self.epochs:
            self.snapshots.put(None)  # every trainer is lost

    def take_snapshots(self, params):
        """Copy the parameters if all trainers have finished another epoch."""
        finished = min(self.epochs.values(), default=0)
        while self.n_snapshots < finished:
            self.n_snapshots += 1
            self.snapshots.put((params.clone(), self.counts()))

    def counts(self):
        return time.monotonic() - self.begin, self.updates, self.pushes, self.staleness


def serve(model, dataset, device, ranks, args):
    """Evaluate each epoch while the trainers train."""
    for rank in ranks:
        remote.watch(f"trainer{rank}", server.lose, rank)
    print(f"Training on {len(ranks)} x {device.type}, {args.mode}, batch {args.batch_size} each", flush=True)
    loader = DataLoader(dataset, 1000, collate_fn=tuple)
    before = (0, 0, 0, 0)
    for epoch in range(1, args.epochs + 1):
        snapshot = server.progress.snapshots.get()
        if snapshot is None:
            raise dist.DistributedError(f"every trainer is lost, after {server.progress.updates} updates")
        params, counts = snapshot
        vector_to_parameters(params.to(device), model.parameters())
        loss, hits, n = evaluate(model, loader, device)
        print_epoch(epoch, loss / n, hits, n, before, counts, params.numel() * params.element_size())
        before = counts
    remote.end(tolerate_lost=True)
    lost = [f"trainer {rank}" for rank in ranks if rank not in server.trainers]
    print(f"Finished: {server.progress.updates} updates, {', '.join(lost) or 'no trainer'} lost")


@torch.no_grad()
def evaluate(model, loader, device):
    """Sum of the losses, correct predictions, samples."""
    model.eval()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    hits = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in loader:
        labels = labels.to(device)
        output = model(mnist.normalize(images.to(device)))
        loss_sum += F.cross_entropy(output, labels, reduction="sum")
        hits += (output.argmax(dim=1) == labels).sum()
    return loss_sum.item(), hits.item(), len(loader.dataset)


def print_epoch(epoch, loss, hits, n, before, counts, size):
    """Print the test results, and what has been done since `before`; the parameters have `size` bytes."""
    seconds = counts[0] - before[0]
    updates = counts[1] - before[1]
    pushes = counts[2] - before[2]
    staleness = counts[3] - before[3]
    megabytes = 2 * pushes * size / 1e6  # a gradient and an answer for each push
    average_staleness = staleness / max(1, pushes)  # two epochs end at once if a slow trainer is lost
    print(
        f"Epoch {epoch} - loss: {loss:.4f} - acc: {hits / n:.4f} ({hits}/{n}) - {updates / seconds:.1f} updates/s - "
        f"{megabytes / seconds:.1f} MB/s - staleness: {average_staleness:.2f}",
        flush=True,
    )


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    global server
    rank = dist.get_rank()
    ranks = range(1, world_size)  # the trainers'
    device = remote.get_device()  # the server needs one only to evaluate
    torch.manual_seed(args.seed + rank)  # dropout should differ; all weights come from the server
    model = mnist.MODELS[args.model]().to(device)
    if rank == 0:
        server = Server(model, ranks, args.lr)  # before it joins, because then the first call may come
        remote.join("server", args.timeout)
        test_set = mnist.load_data(args.data, args.data_dir, train=False, seed=args.seed)
        serve(model, test_set, device, ranks, args)
    else:
        remote.join(f"trainer{rank}", args.timeout)
        train_set = mnist.load_data(args.data, args.data_dir, train=True, seed=args.seed)
        train(model, train_set, device, ranks, args)


if __name__ == "__main__":
    cli_args = parse_args()
    try:
        dist.launch(main_worker, cli_args, nprocs=cli_args.trainers + 1, tolerate_killed=True)
    except ProcessExitedException as error:
        sys.exit(f"the server is lost: {error}")
