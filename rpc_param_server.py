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

Choose it when trainers should not wait for each other, or may get lost. Otherwise choose DDP (min_DDP.py), which is not
stale and has no server through which all data must go, or FSDP (min_FSDP.py) if the model does not fit. PyTorch
maintains torch.distributed.rpc but no longer develops it.

Cost, for P float32 parameters and N trainers: a trainer holds 12·P bytes (parameters, gradients, the flat gradient).
The server holds 16·P (parameters, momentum, a gradient, a copy to evaluate), with sync 12·P + 4·P·N. A step sends 4·P
bytes each way per trainer, so 8·P·N through the server, where an all-reduce sends 2·(N-1)/N · 4·P per process.

    python rpc_param_server.py                                        # a server and two trainers on this machine
    python rpc_param_server.py --trainers 4 --mode sync
    torchrun --standalone --nproc-per-node 3 rpc_param_server.py      # rank 0 is the server
    export TP_SOCKET_IFNAME=eth1 GLOO_SOCKET_IFNAME=eth1              # on each of three machines: see rpc_remote.py
    torchrun --nnodes 3 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 rpc_param_server.py

When a trainer is killed, the others continue without its share of the data, except under torchrun. When the server is
killed, all trainers end. If a trainer hangs, sync ends after `--timeout` seconds, and hogwild waits for ever. Staleness
is how many updates the server made between sending parameters to a trainer and receiving the gradient.
"""

import queue
import threading
import time

import torch
from torch.distributed import rpc
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import distributed as dist
import mnist
import options
import rpc_remote

# ---- what trainers call in the server's process, each call in a thread of RPC -------------------------------------

server = None  # the Server, in the server's process


def pull():
    """The number of updates so far, and the parameters."""
    with server.lock:
        if server.begin is None:
            server.begin = time.monotonic()
        return server.updates, server.params


def push(gradient, updates_then):
    """Hogwild: update with this gradient at once. The trainer had the parameters after `updates_then` updates."""
    with server.lock:
        server.staleness += server.updates - updates_then
        server.update(gradient)
        return server.updates, server.params


@rpc.functions.async_execution  # the trainer waits for the Future, while this thread serves other calls
def push_and_wait(gradient, rank):
    """Sync: update once all trainers have sent a gradient. Returns a Future of what `pull` and `push` return."""
    with server.lock:
        server.gradients[rank] = gradient
        answer = server.answer
        server.update_if_all_have_sent()
    return answer


def finish_epoch(rank):
    """Note that a trainer has finished an epoch. The trainer does not wait for the others."""
    with server.lock:
        server.epochs[rank] += 1
        server.copy_if_all_have_finished()


# ---- training -----------------------------------------------------------------------------------------------------


def train(model, dataset, device, ranks, args):
    """Train on this trainer's share of the data."""
    rank = dist.get_rank()
    sampler = DistributedSampler(dataset, len(ranks), ranks.index(rank), seed=args.seed)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, collate_fn=tuple)
    updates, params = rpc_remote.call("server", pull)
    model.train()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch
        for images, labels in loader:
            vector_to_parameters(params.to(device), model.parameters())
            loss = F.cross_entropy(model(mnist.normalize(images.to(device))), labels.to(device))
            model.zero_grad()
            loss.backward()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]  # none if frozen
            gradient = parameters_to_vector(grads).cpu()
            if args.mode == "hogwild":
                updates, params = rpc_remote.call("server", push, gradient, updates)
            else:
                updates, params = rpc_remote.call("server", push_and_wait, gradient, rank)
        rpc_remote.call("server", finish_epoch, rank)
    rpc_remote.leave("server")


# ---- the server ---------------------------------------------------------------------------------------------------


class Server:
    """The parameters, as one flat tensor, and their optimizer. Hold `lock` to change anything here."""

    def __init__(self, model, ranks, lr):
        self.params = parameters_to_vector(model.parameters()).detach().cpu()
        self.optimizer = torch.optim.SGD([self.params], lr=lr, momentum=0.9, fused=True)
        self.lock = threading.Lock()
        self.begin = None  # when the first trainer began
        self.updates = 0
        self.staleness = 0  # summed over all updates
        self.gradients = {}  # sync: the gradients of this step, by rank
        self.answer = torch.futures.Future()  # sync: the answer to them
        self.epochs = dict.fromkeys(ranks, 0)  # epochs that each trainer has finished, if it is not lost
        self.copies = queue.SimpleQueue()  # for each epoch that all have finished: the parameters, time, and counts
        self.n_copies = 0

    def update(self, gradient):
        self.params.grad = gradient
        self.optimizer.step()
        self.updates += 1

    def update_if_all_have_sent(self):
        """Sync: update with the average gradient and answer all trainers, if none is missing."""
        missing = self.epochs.keys() - self.gradients.keys()
        if missing or not self.gradients:
            return
        ranks = sorted(self.gradients)  # in this order, so that rounding is the same in each run
        total = self.gradients[ranks[0]]
        for rank in ranks[1:]:
            total += self.gradients[rank]  # in place: new memory would cost more than the sum
        total /= len(ranks)
        self.update(total)
        answer = self.answer
        self.gradients = {}
        self.answer = torch.futures.Future()
        # Needs no copy: the next update starts only after every trainer has received this answer.
        answer.set_result((self.updates, self.params))

    def copy_if_all_have_finished(self):
        """Copy the parameters if all trainers have finished another epoch."""
        finished = min(self.epochs.values(), default=0)
        while self.n_copies < finished:  # two epochs end at once if a slow trainer is lost
            self.n_copies += 1
            self.copies.put((self.params.clone(), time.monotonic(), self.updates, self.staleness))

    def lose(self, rank):
        """Continue without a trainer that has died."""
        with self.lock:
            print(f"trainer {rank} is lost", flush=True)
            del self.epochs[rank]
            self.update_if_all_have_sent()  # the others wait for it no longer
            self.copy_if_all_have_finished()
            if not self.epochs:
                self.copies.put(None)  # every trainer is lost


def serve(model, dataset, device, ranks, args):
    """Evaluate each epoch while the trainers train."""
    for rank in ranks:
        rpc_remote.watch(f"trainer{rank}", server.lose, rank)
    print(f"Training on {len(ranks)} x {device.type}, {args.mode}, batch {args.batch_size} each", flush=True)
    for epoch in range(1, args.epochs + 1):
        copy = server.copies.get()
        if copy is None:
            raise rpc_remote.failure(f"every trainer is lost, after {server.updates} updates")
        params, end, updates, staleness = copy
        vector_to_parameters(params.to(device), model.parameters())
        loss, hits = evaluate(model, dataset, device)
        n = len(dataset)
        print(
            f"epoch {epoch}/{args.epochs} | held-out {loss:.4f} | accuracy {hits / n:.4f} ({hits}/{n}) | "
            f"{updates / (end - server.begin):.1f} updates/s | staleness {staleness / updates:.2f}",
            flush=True,
        )
    rpc_remote.end(tolerate_lost=True)
    lost = [f"trainer {rank}" for rank in ranks if rank not in server.epochs]
    print(f"Finished: {server.updates} updates, {', '.join(lost) or 'no trainer'} lost")


@torch.no_grad()
def evaluate(model, dataset, device):
    """The average loss and the number of correct predictions."""
    model.eval()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    hits = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in DataLoader(dataset, 1000, collate_fn=tuple):
        labels = labels.to(device)
        output = model(mnist.normalize(images.to(device)))
        loss_sum += F.cross_entropy(output, labels, reduction="sum")
        hits += (output.argmax(dim=1) == labels).sum()
    return loss_sum.item() / len(dataset), hits.item()


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = options.ArgumentParser(__doc__)
    trainers_help = "number of trainers; ignored under torchrun"
    mode_help = "update with each gradient at once, or with the average over all trainers"
    parser.add_argument("--trainers", type=options.whole_number(1), default=2, help=trainers_help)
    parser.add_argument("--mode", choices=("hogwild", "sync"), default="hogwild", help=mode_help)
    parser.add_argument("--model", choices=mnist.MODELS, default="simple", help="network to train")
    parser.add_argument("--epochs", type=options.whole_number(1), default=2, help="passes over the data")
    parser.add_argument("--batch-size", type=options.whole_number(1), default=32, help="samples per process")
    parser.add_argument("--lr", type=options.positive_number, default=0.01, help="learning rate")
    parser.add_argument("--seed", type=options.whole_number(0), default=0, help="random seed")
    rpc_remote.add_timeout(parser)
    mnist.add_data_options(parser)
    args = parser.parse_args()
    if dist.is_launched():
        args.trainers = dist.get_world_size() - 1
    if args.trainers < 1:
        parser.error("WORLD_SIZE: 1 process is too few for a server and a trainer")
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    global server
    rank = dist.get_rank()
    ranks = range(1, world_size)  # the trainers'
    device = rpc_remote.get_device()  # the server needs one only to evaluate
    torch.manual_seed(args.seed + rank)  # dropout should differ; all weights come from the server
    model = mnist.MODELS[args.model]().to(device)
    if rank == 0:
        server = Server(model, ranks, args.lr)  # before it joins, because then the first call may come
        rpc_remote.join("server", args.timeout)
        test_set = mnist.load_data(args.data, args.data_dir, train=False, seed=args.seed)
        serve(model, test_set, device, ranks, args)
    else:
        rpc_remote.join(f"trainer{rank}", args.timeout)
        train_set = mnist.load_data(args.data, args.data_dir, train=True, seed=args.seed)
        train(model, train_set, device, ranks, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.trainers + 1, tolerate_killed=True)
