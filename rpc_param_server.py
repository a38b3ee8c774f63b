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
each way per trainer, so 8·P·N through the server, where an all-reduce sends 2·(N-1)/N · 4·P per process: the server
limits the number of trainers.

    python rpc_param_server.py                                        # a server and two trainers on this machine
    python rpc_param_server.py --trainers 4 --mode sync
    torchrun --standalone --nproc-per-node 3 rpc_param_server.py      # rank 0 is the server
    python rpc_param_server.py --rank R --world-size 3 --master-addr 10.0.0.1 --master-port 29500   # by hand

A trainer that is killed, or sends nothing for `--timeout` seconds, is taken for lost and the others go on without its
share of the data; one that was only slow is taken back at its next gradient. (torchrun itself ends a job that lost
a process.) A trainer that loses the server ends. RPC has no authentication and executes what it receives: keep it to
networks that you trust. The first form listens on loopback only, the last on the interface that leads to the server.

It prints a line per epoch, `Epoch 1 - loss: 0.0754 - acc: 0.9765 (9765/10000) - 74.2 updates/s - 29.8 MB/s -
staleness: 0.71`: loss and accuracy on all test samples, gradients and parameters sent, and how many updates the server
made, on average, between a trainer's pull and push. The last line says who was lost. None of mnist's models has
buffers (as batch norm would): parameters are all that is sent.
"""

import argparse
import contextlib
import datetime
import fcntl
import ipaddress
import os
import queue
import socket
import struct
import sys
import threading
import time

import torch
from torch.distributed import TCPStore, init_process_group, rpc
from torch.multiprocessing import ProcessExitedException
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import distributed as dist
import mnist


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        usage=argparse.SUPPRESS,  # so that an error is one line
    )
    parser.add_argument("--trainers", type=dist.at_least(1), default=2, help="processes beside the server")
    parser.add_argument("--mode", choices=("hogwild", "sync"), default="hogwild", help="when the server updates")
    parser.add_argument("--model", choices=mnist.MODELS, default="simple", help="the network")
    parser.add_argument("--epochs", type=dist.at_least(1), default=2, help="passes over the data")
    parser.add_argument("--batch-size", "--batch_size", type=dist.at_least(1), default=32, help="samples per trainer")
    parser.add_argument("--lr", type=dist.positive, default=0.01, help="learning rate of SGD with momentum 0.9")
    parser.add_argument("--seed", type=int, default=0, help="of the data, the weights and the order of samples")
    parser.add_argument("--timeout", type=dist.positive, default=60, help="seconds after which a process is lost")
    mnist.add_data_options(parser)
    parser.add_argument("--rank", type=dist.at_least(0), help="run this role only; 0 is the server")
    parser.add_argument("--world-size", "--world_size", type=dist.at_least(2), help="with --rank: trainers + 1")
    parser.add_argument("--master-addr", "--master_addr", default="127.0.0.1", help="with --rank: the server's address")
    parser.add_argument("--master-port", "--master_port", type=dist.at_least(1), default=29500, help="with --rank")
    args = parser.parse_args()
    if (args.rank is None) != (args.world_size is None):
        parser.error("arguments --rank and --world-size: give both, or neither to start every role here")
    if args.rank is not None and args.rank >= args.world_size:
        parser.error(
            f"argument --rank: {args.rank} is not in the range 0 to {args.world_size - 1}, "
            f"for --world-size {args.world_size}"
        )
    if args.master_addr in ("", "0.0.0.0", "::"):
        parser.error(f"argument --master-addr/--master_addr: {args.master_addr!r} is not the address of one machine")
    if args.master_port > 65535:
        parser.error(f"argument --master-port/--master_port: {args.master_port} is not in the range 1 to 65535")
    if int(os.environ.get("WORLD_SIZE", 2)) < 2:
        parser.error("WORLD_SIZE: 1 process is too few for a server and a trainer")
    return args


# ---- the server ---------------------------------------------------------------------------------------------------


class Server:
    """The parameters, as one flat tensor, and what is known about the trainers, whose ranks are `ranks`."""

    def __init__(self, model, ranks, lr, timeout):
        self.params = parameters_to_vector(model.parameters()).detach().cpu()
        self.optimizer = torch.optim.SGD([self.params], lr=lr, momentum=0.9, fused=True)
        self.changed = threading.Condition()  # guards all of this but the reading of the parameters
        self.timeout = timeout
        self.heard = dict.fromkeys(ranks, time.monotonic())  # when the trainers at work were last heard of
        self.done, self.gone = set(), set()  # those that have no more work, and those that have left
        self.lost = set()
        self.ending = None  # at the end, the list of those lost
        self.steps = None  # of each trainer in an epoch
        self.pushes = dict.fromkeys(ranks, 0)
        self.seen = dict.fromkeys(ranks, 0)  # updates in the parameters that a trainer computes with
        self.updates = self.staleness = 0
        self.gradients = {}  # sync: those of this round
        self.answer = torch.futures.Future()
        self.epochs = queue.Queue()  # finished ones, to be evaluated; None at the end
        self.finished_epochs = 0

    def receive(self, rank):
        self.heard[rank] = time.monotonic()
        self.lost.discard(rank)  # it was only slow
        self.pushes[rank] += 1
        self.staleness += self.updates - self.seen[rank]

    def update(self, gradient):
        self.params.grad = gradient
        self.optimizer.step()
        self.updates += 1

    def finish_round(self):
        if not self.gradients or self.heard.keys() - self.done - self.gradients.keys():
            return
        total, *others = (self.gradients[rank] for rank in sorted(self.gradients))
        for gradient in others:
            total += gradient  # in place: new memory would cost more than the sum
        self.update(total.div_(len(self.gradients)))
        self.finish_epochs()
        for rank in self.gradients:
            self.heard[rank], self.seen[rank] = time.monotonic(), self.updates
        self.gradients = {}
        answer, self.answer = self.answer, torch.futures.Future()
        answer.set_result(self.params)  # no copy: the next update waits for those who wait for these

    def finish_epochs(self):
        """Hand over a copy of the parameters when every trainer has done its share of an epoch. The others go on."""
        pushes = [n for rank, n in self.pushes.items() if rank not in self.lost]
        while pushes and self.steps and min(pushes) >= (self.finished_epochs + 1) * self.steps:
            self.finished_epochs += 1
            counts = (time.monotonic(), self.updates, sum(self.pushes.values()), self.staleness)
            self.epochs.put((self.params.clone(), counts))

    def end(self):
        """Tell every trainer that all is done; returns the ranks of those lost."""
        with self.changed:
            self.ending = sorted(self.lost)
            if self.lost:  # else the graceful shutdown waits for them
                self.changed.wait_for(lambda: self.gone >= self.heard.keys(), self.timeout)
            return self.ending

    def watch(self):
        """Until no trainer has work left, take those for lost that were not heard of for `timeout` seconds."""
        with self.changed:
            self.heard = dict.fromkeys(self.heard, time.monotonic())
            while self.heard.keys() - self.done:
                self.changed.wait(self.timeout / 10)
                now = time.monotonic()
                for rank in list(self.heard):  # those with a gradient here wait, and are heard anew when answered
                    if rank not in self.gradients and now - self.heard[rank] > self.timeout:
                        print(f"trainer {rank} is lost: nothing came from it for {self.timeout:g} s", flush=True)
                        del self.heard[rank]
                        self.lost.add(rank)
                        self.finish_round()
                        self.finish_epochs()
        self.epochs.put(None)


server = None  # in the server's process, where the next five functions run, in threads of RPC


def pull(rank, steps):
    """The first parameters of a trainer that takes `steps` steps in an epoch."""
    with server.changed:
        server.heard[rank] = time.monotonic()
        server.steps = steps
        server.seen[rank] = server.updates
    return server.params


def push(rank, gradient):
    """Hogwild: apply the gradient at once. Gives the parameters."""
    with server.changed:
        server.receive(rank)
        server.update(gradient)
        server.seen[rank] = server.updates
        server.finish_epochs()
    return server.params  # sent as they are in memory, while others may change them


@rpc.functions.async_execution
def push_and_wait(rank, gradient):
    """Sync: a Future of the parameters after the update with the average gradient of all trainers at work."""
    with server.changed:
        server.receive(rank)
        server.gradients[rank] = gradient
        answer = server.answer
        server.finish_round()
    return answer


def finish(rank):
    """A trainer has no more work. Gives the ranks of those lost, or None while others are at work."""
    with server.changed:
        server.heard[rank] = time.monotonic()
        server.lost.discard(rank)
        server.done.add(rank)
        server.finish_round()  # nobody need wait for it
        server.changed.notify_all()
        return server.ending


def leave(rank):
    """A trainer knows that all is done."""
    with server.changed:
        server.gone.add(rank)
        server.changed.notify_all()


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
    global server
    server = Server(model, ranks, args.lr, args.timeout)
    start_rpc("server", args)
    threading.Thread(target=server.watch, daemon=True).start()
    print(f"Training on {len(ranks)} x {device.type}, {args.mode}, batch {args.batch_size} each", flush=True)
    loader = DataLoader(dataset, 1000, collate_fn=tuple)
    before = (time.monotonic(), 0, 0, 0)
    for epoch, (params, counts) in enumerate(iter(server.epochs.get, None)):
        vector_to_parameters(params.to(device), model.parameters())
        loss, hits, n = evaluate(model, loader, device)
        seconds, updates, pushes, staleness = (b - a for a, b in zip(before, counts, strict=True))
        megabytes = 2 * pushes * params.numel() * params.element_size() / 1e6
        print(
            f"Epoch {epoch + 1} - loss: {loss / n:.4f} - acc: {hits / n:.4f} ({hits:.0f}/{n:.0f}) - "
            f"{updates / seconds:.1f} updates/s - {megabytes / seconds:.1f} MB/s - staleness: {staleness / pushes:.2f}",
            flush=True,
        )
        before = counts
    lost = server.end()
    stop_rpc(lost, args.timeout)
    lost = ", ".join(f"trainer {rank}" for rank in lost) or "no trainer"
    if server.finished_epochs < args.epochs:
        sys.exit(f"every trainer is lost, after {server.updates} updates")
    print(f"Finished: {server.updates} updates, {lost} lost")


# ---- a trainer ----------------------------------------------------------------------------------------------------


def call_server(function, *args):
    """Call one of the functions above in the server. Raises SystemExit if the server is lost."""
    try:
        return rpc.rpc_sync("server", function, args)
    except RuntimeError as error:
        if str(error).startswith("On WorkerInfo"):  # raised by the function itself
            raise
        rpc.shutdown(graceful=False)  # or its threads, which still run when the interpreter ends, may abort
        sys.exit(f"rank {dist.get_rank()}: the server is lost: {str(error).splitlines()[0]}")


def train(model, dataset, device, rank, trainers, args):
    start_rpc(f"trainer{rank}", args)
    sampler = DistributedSampler(dataset, trainers, rank - 1, seed=args.seed)
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
    while (lost := call_server(finish, rank)) is None:
        time.sleep(0.2)
    if lost:
        with contextlib.suppress(RuntimeError):  # the server need not stay to answer
            rpc.rpc_sync("server", leave, (rank,))
    stop_rpc(lost, args.timeout)


# ---- start --------------------------------------------------------------------------------------------------------


def set_environment(args):
    """Set what torchrun would, for the one role of `--rank`. The server listens now, a trainer waits until it does.

    Returns the store of the job, on the server, which must keep it. Raises SystemExit with one line if the port cannot
    be had or there is no server within the timeout.
    """
    address = (args.master_addr, args.master_port)
    os.environ.update(RANK=str(args.rank), WORLD_SIZE=str(args.world_size), LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR=args.master_addr, MASTER_PORT=str(args.master_port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # all join the store below as clients
    if args.rank == 0:
        try:
            listener = socket.create_server(address)  # not on all interfaces, as a TCPStore of its own does
        except OSError as error:
            reason = error.strerror.partition(" (")[0]  # without the address, which Python may add
            sys.exit(f"the server cannot listen on {args.master_addr}:{args.master_port}: {reason}")
        return TCPStore(*address, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    deadline = time.monotonic() + args.timeout
    while True:
        try:
            return socket.create_connection(address, timeout=args.timeout).close()
        except OSError as error:
            if time.monotonic() > deadline:
                where = f"{args.master_addr}:{args.master_port} within {args.timeout:g} s"
                sys.exit(f"rank {args.rank}: no server at {where}: {error.strerror or error}")
            time.sleep(0.2)


def use_interface_to(address):
    """Let gloo and RPC listen only on the interface that leads to `address`, unless the user has named one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                request = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                if socket.inet_ntoa(request[20:24]) == own:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                    os.environ.setdefault("TP_SOCKET_IFNAME", name)
    if "TP_SOCKET_IFNAME" not in os.environ:
        sys.exit(f"no interface of this machine has the address {own}: name one in TP_SOCKET_IFNAME")
    if not ipaddress.ip_address(own).is_loopback and dist.is_primary():
        print(
            f"warning: RPC listens on {own}. It has no authentication and executes what it receives: "
            "use it on trusted networks only",
            file=sys.stderr,
        )


def start_rpc(name, args):
    options = rpc.TensorPipeRpcBackendOptions(
        rpc_timeout=2 * args.timeout,  # in sync, an answer may take one timeout
        # The default transport, shared memory, polls busily: it takes the cores that the trainers need. This is TCP;
        # on one machine, the tensors' bytes are copied from process to process by the kernel.
        _transports=["uv"],
        _channels=["cma", "basic"],
    )
    rpc.init_rpc(name, rank=dist.get_rank(), world_size=dist.get_world_size(), rpc_backend_options=options)


def stop_rpc(lost, timeout):
    """Leave together, unless that would mean to wait for those `lost`. All work is done."""
    with contextlib.suppress(RuntimeError):  # one may be lost in this very moment; torch has logged it
        rpc.shutdown(graceful=not lost, timeout=timeout)


def get_device():
    """This process's device. Trainers share the GPUs if there are too few; the server needs one to evaluate only."""
    count = torch.cuda.device_count()
    return torch.device("cuda", dist.get_local_rank() % count) if count else torch.device("cpu")


def main_worker(local_rank, world_size, args):
    rank, device = dist.get_rank(), get_device()
    use_interface_to(os.environ["MASTER_ADDR"])
    init_process_group("gloo", timeout=datetime.timedelta(minutes=10))  # for the data; it is not used later
    dataset = mnist.load_data(args.data, args.data_dir, train=rank > 0, seed=args.seed)
    torch.manual_seed(args.seed + rank)  # dropout should differ; the weights are the server's
    model = mnist.MODELS[args.model]().to(device)
    if rank == 0:
        serve(model, dataset, device, range(1, world_size), args)
    else:
        train(model, dataset, device, rank, world_size - 1, args)


if __name__ == "__main__":
    cli_args = parse_args()
    store = set_environment(cli_args) if cli_args.rank is not None else None
    try:
        dist.launch(main_worker, cli_args, nprocs=cli_args.trainers + 1, tolerate_killed=True)
    except ProcessExitedException as error:
        sys.exit(f"the server is lost: {error}")
