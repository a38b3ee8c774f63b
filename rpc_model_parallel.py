"""A model split over two workers: RRef, remote modules, distributed autograd, distributed optimizer.

`worker0` drives and holds the convolutions of mnist.ShallowNet, `worker1` holds its linear layers:

    worker0                                    worker1
    images -> convolutions -> features ------> linear layers -> logits
                                       <------
    loss                               ------> backward
    backward                           <------ gradients of the features
    step its own parameters            ------> step its own parameters

A batch is cut into micro-batches. While worker1 computes one of them, worker0 computes the next, in forward and in
backward. The gradient is the gradient of the whole batch. Four parts of torch.distributed make this short:
- remote calls: `rpc.remote` creates the second half on worker1, `rpc_async` runs it there (`SplitModel`);
- RRef: a reference to an object in another process, here the second half and every parameter (`SplitModel`);
- distributed autograd: one `backward` runs through both workers, and stores the gradients in its context instead of in
  `.grad` (`train_epoch`);
- distributed optimizer: each worker steps the parameters that it holds (`drive`).

Choose it to learn RPC: any worker may hold any part of a computation. To split a model for training, choose min_PP.py
(torch.distributed.pipelining) or min_TP.py (DTensor), or shard its memory with min_FSDP.py. PyTorch maintains
torch.distributed.rpc but no longer develops it.

Cost, for P float32 parameters: a worker holds 12·P' bytes (parameters, gradients, momentum) for its own P' of them. A
step sends the activations at the cut and their gradients, here 2 · 4 · 9216 bytes per sample, and no parameters,
whatever P. Each micro-batch costs two round trips, so do not make them too small.

    python rpc_model_parallel.py                                       # both workers on this machine, loopback only
    python rpc_model_parallel.py --micro-batches 8 --global-batch-size 256
    torchrun --standalone --nproc-per-node 2 rpc_model_parallel.py
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 rpc_model_parallel.py

Each worker uses a GPU of its own if there are two. For two machines see rpc_remote.py: RPC has no authentication.
"""

import logging
import time

import torch
from torch import nn
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional as F
from torch.utils.data import DataLoader

import distributed as dist
import mnist
import options
import rpc_remote

# ---- the model on two workers -------------------------------------------------------------------------------------


class SplitModel:
    """Two halves on two workers, used like one model."""

    def __init__(self, seed, micro_batches):
        torch.manual_seed(seed)
        self.first = convolutions()
        self.second = rpc.remote("worker1", linear_layers, (seed + 1,))  # an RRef: the layers exist on worker1 only
        self.micro_batches = micro_batches

    def __call__(self, images):
        """Logits (n, 10), on the CPU, of uint8 images (n, 1, 28, 28)."""
        answers = []
        for micro_batch in images.chunk(self.micro_batches):
            features = self.first(mnist.normalize(micro_batch))
            answers.append(self.second.rpc_async().forward(features))  # returns at once
        return torch.cat(torch.futures.wait_all(answers))

    def train(self, mode=True):
        self.first.train(mode)
        self.second.rpc_sync().train(mode)  # dropout runs on worker1, so its mode must be set there

    def parameter_rrefs(self):
        return self.first.parameter_rrefs() + self.second.rpc_sync().parameter_rrefs()


def train_epoch(model, loader, optimizer):
    """The average loss of the epoch's samples."""
    model.train()
    total = torch.zeros(())
    for images, labels in loader:
        with autograd.context() as context:  # holds this step's gradients, on each worker for its own parameters
            loss = F.cross_entropy(model(images), labels)
            autograd.backward(context, [loss])
            optimizer.step(context)
        total += loss.detach() * len(labels)
    return total.item() / len(loader.dataset)


class Half(nn.Module):
    """Some of a model's layers, on their worker's device. Takes and returns tensors (n, ...) on the CPU."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.device = rpc_remote.get_device()
        self.to(self.device)

    def forward(self, x):
        return self.layers(x.to(self.device)).cpu()

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def convolutions():
    """The first half of mnist.ShallowNet: normalized images (n, 1, 28, 28) to features (n, 9216)."""
    return Half(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
    )


def linear_layers(seed):
    """The second half: features (n, 9216) to logits (n, 10)."""
    torch.manual_seed(seed)
    return Half(nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10))


# ---- training -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model, loader):
    """The number of correct predictions."""
    model.train(False)
    hits = torch.zeros((), dtype=torch.int64)
    for images, labels in loader:
        hits += (model(images).argmax(dim=1) == labels).sum()
    return hits.item()


def make_optimizer(params, lr):
    """A worker's own optimizer."""
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def drive(train_set, test_set, args):
    """Train and evaluate from worker0."""
    generator = torch.Generator().manual_seed(args.seed)
    loader = DataLoader(train_set, args.global_batch_size, shuffle=True, generator=generator, collate_fn=tuple)
    test_loader = DataLoader(test_set, 1000, collate_fn=tuple)
    model = SplitModel(args.seed, args.micro_batches)
    # With the class torch.optim.SGD, torch uses a TorchScript version, and each worker warns that it is deprecated.
    # With a function, torch does not use TorchScript, and logs that.
    logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)
    optimizer = DistributedOptimizer(make_optimizer, model.parameter_rrefs(), lr=args.lr)
    print(f"Training on 2 x {rpc_remote.get_device().type}, {args.micro_batches} micro-batches", flush=True)
    for epoch in range(1, args.epochs + 1):
        begin = time.perf_counter()
        loss = train_epoch(model, loader, optimizer)
        speed = len(train_set) / (time.perf_counter() - begin)
        hits = evaluate(model, test_loader)
        n = len(test_set)
        accuracy = f"{hits / n:.4f} ({hits}/{n})"
        line = f"epoch {epoch}/{args.epochs} | loss {loss:.4f} | accuracy {accuracy} | {speed:,.0f} samples/s"
        print(line, flush=True)


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = options.ArgumentParser(__doc__)
    batch_help = "samples per step, over all processes"
    micro_batches_help = "parts of a batch, computed at the same time"
    parser.add_argument("--epochs", type=options.whole_number(1), default=2, help="passes over the data")
    parser.add_argument("--global-batch-size", type=options.whole_number(1), default=64, help=batch_help)
    parser.add_argument("--micro-batches", type=options.whole_number(1), default=4, help=micro_batches_help)
    parser.add_argument("--lr", type=options.positive_number, default=0.05, help="learning rate")
    parser.add_argument("--seed", type=options.whole_number(0), default=0, help="random seed")
    rpc_remote.add_timeout(parser)
    mnist.add_data_options(parser)
    args = parser.parse_args()
    if args.micro_batches > args.global_batch_size:
        bounds = f"the range 1 to {args.global_batch_size}, the --global-batch-size"
        parser.error(f"argument --micro-batches: {args.micro_batches} is not in {bounds}")
    if dist.is_launched() and dist.get_world_size() != 2:
        parser.error(f"WORLD_SIZE: {dist.get_world_size()} is not 2, the number of workers")
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    rank = dist.get_rank()
    rpc_remote.join(f"worker{rank}", args.timeout)
    # Only worker0 needs the data, but both must call load_data: it is a collective if MNIST has to be downloaded.
    train_set = mnist.load_data(args.data, args.data_dir, train=True, seed=args.seed)
    test_set = mnist.load_data(args.data, args.data_dir, train=False, seed=args.seed)
    if rank == 0:
        drive(train_set, test_set, args)
    rpc.shutdown()  # worker1 waits here until worker0 is done, and answers its calls


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=2)
