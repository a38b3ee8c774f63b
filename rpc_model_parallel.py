"""A model split over two workers: RRef, remote modules, distributed autograd, distributed optimizer.

PyTorch maintains torch.distributed.rpc but no longer develops it. For new work choose torch.distributed.pipelining to
split a model by layers, DTensor (tensor parallel) to split the layers, or FSDP2 (min_FSDP.py) to shard its memory. This
script shows the general mechanism: any worker may hold any part of a computation.

`worker0` drives and holds the convolutions of mnist.ShallowNet, `worker1` holds its linear layers. The four pillars:
- remote calls: `rpc.remote` creates the second part on worker1, `rpc_async` runs it there (`SplitModel`);
- RRef: a reference to what another worker holds: the second part, and every parameter (`SplitModel`);
- distributed autograd: one `backward` runs through both workers, and the gradients lie in its context, not in `.grad`
  (`train_epoch`);
- distributed optimizer: each worker steps the parameters that it holds (`main_worker`).
A batch is cut into micro-batches: while worker1 computes one of them, worker0 computes the next, and so in backward.
The gradient is that of the whole batch.

Cost, for P float32 parameters: a worker holds 12·P' bytes (parameters, gradients, momentum) for its own P' of them. A
step sends the activations at the cut and their gradients, here 2 · 4 · 9216 bytes per sample, and no parameters,
whatever P. Each micro-batch costs two round trips, so do not make them too small.

    python rpc_model_parallel.py                                       # both workers on this machine, loopback only
    python rpc_model_parallel.py --micro-batches 8 --batch-size 256
    torchrun --standalone --nproc-per-node 2 rpc_model_parallel.py
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 rpc_model_parallel.py
Each worker uses a GPU of its own where there is one. RPC has no authentication and executes what it receives: keep
torchrun jobs to networks that you trust, and name the interface to listen on in TP_SOCKET_IFNAME.

It prints a line per epoch, `Epoch 1 - loss: 0.4127 - acc: 0.9632 (9632/10000) - 731.4 samples/s`, with the average
training loss, the accuracy on all test samples and the speed of training.
"""

import os
import time

import torch
from torch import nn
from torch.distributed import autograd, init_process_group, rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional as F
from torch.utils.data import DataLoader

import distributed as dist
import mnist
import options


def parse_args():
    parser = options.ArgumentParser(__doc__)
    parser.add_argument("--epochs", type=options.whole_number(1), default=2, help="passes over the data")
    parser.add_argument("--batch-size", type=options.whole_number(1), default=64, help="samples per step")
    parser.add_argument(
        "--micro-batches", type=options.whole_number(1), default=4, help="parts of a batch, in flight at once"
    )
    parser.add_argument(
        "--lr", type=options.positive_number, default=0.05, help="learning rate of SGD with momentum 0.9"
    )
    parser.add_argument(
        "--seed", type=options.seed_number, default=0, help="of the data, the weights and the order of samples"
    )
    mnist.add_data_options(parser)
    args = parser.parse_args()
    if args.micro_batches > args.batch_size:
        bounds = f"the range 1 to {args.batch_size}, the --batch-size"
        parser.error(f"argument --micro-batches: {args.micro_batches} is not in {bounds}")
    if os.environ.get("WORLD_SIZE", "2") != "2":
        parser.error(f"WORLD_SIZE: {os.environ['WORLD_SIZE']} is not 2, the number of workers")
    return args


class Part(nn.Module):
    """Some of a model's layers, on their worker's device. Takes and gives tensors (n, ...) on the CPU."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.device = get_device()
        self.to(self.device)

    def forward(self, x):
        return self.layers(x.to(self.device)).cpu()

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def convolutions():
    """The first half of mnist.ShallowNet: normalized images (n, 1, 28, 28) to features (n, 9216)."""
    layers = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
    return Part(*layers, nn.Dropout(0.25), nn.Flatten())


def linear_layers(seed):
    """The second half: features (n, 9216) to logits (n, 10)."""
    torch.manual_seed(seed)
    return Part(nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10))


class SplitModel:
    """Two parts on two workers, used like one model."""

    def __init__(self, seed, micro_batches):
        torch.manual_seed(seed)
        self.first = convolutions()
        self.second = rpc.remote("worker1", linear_layers, (seed + 1,))  # returns at once: an RRef
        self.micro_batches = micro_batches

    def __call__(self, images):
        """Logits (n, 10), on the CPU, of uint8 images (n, 1, 28, 28)."""
        futures = [
            self.second.rpc_async().forward(self.first(mnist.normalize(micro_batch)))
            for micro_batch in images.chunk(self.micro_batches)
        ]
        return torch.cat(torch.futures.wait_all(futures))

    def train(self, mode=True):
        self.first.train(mode)
        self.second.rpc_sync().train(mode)  # the dropout there knows nothing of a flag here

    def parameter_rrefs(self):
        return self.first.parameter_rrefs() + self.second.rpc_sync().parameter_rrefs()


def train_epoch(model, loader, optimizer):
    """The average loss of the epoch's samples."""
    model.train()
    total = torch.zeros(())
    for images, labels in loader:
        with autograd.context() as context:  # holds this step's gradients on both workers
            loss = F.cross_entropy(model(images), labels)
            autograd.backward(context, [loss])
            optimizer.step(context)
        total += loss.detach() * len(labels)
    return total.item() / len(loader.dataset)


@torch.no_grad()
def evaluate(model, loader):
    """Correct predictions."""
    model.train(False)
    return sum((model(images).argmax(dim=1) == labels).sum() for images, labels in loader).item()


def get_device():
    """This worker's device. Two share a GPU if there is only one."""
    count = torch.cuda.device_count()
    return torch.device("cuda", dist.get_local_rank() % count) if count else torch.device("cpu")


def main_worker(local_rank, world_size, args):
    init_process_group("gloo")  # for the data; it is not used later
    # Only worker0 needs them, but all must call it.
    train_set, test_set = (mnist.load_data(args.data, args.data_dir, train, args.seed) for train in (True, False))
    # The default transport, shared memory, polls busily: it takes the cores that the workers need. This is TCP; on one
    # machine, the tensors' bytes are copied from process to process by the kernel.
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["cma", "basic"])
    rank = dist.get_rank()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        generator = torch.Generator().manual_seed(args.seed)
        loader = DataLoader(train_set, args.batch_size, shuffle=True, generator=generator, collate_fn=tuple)
        model = SplitModel(args.seed, args.micro_batches)
        optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_rrefs(), lr=args.lr, momentum=0.9)
        print(f"Training on 2 x {get_device().type}, {args.micro_batches} micro-batches", flush=True)
        for epoch in range(args.epochs):
            begin = time.perf_counter()
            loss = train_epoch(model, loader, optimizer)
            speed = len(train_set) / (time.perf_counter() - begin)
            hits, n = evaluate(model, DataLoader(test_set, 1000, collate_fn=tuple)), len(test_set)
            print(
                f"Epoch {epoch + 1} - loss: {loss:.4f} - acc: {hits / n:.4f} ({hits}/{n}) - {speed:.1f} samples/s",
                flush=True,
            )
    rpc.shutdown()  # worker1 waits here, and serves


if __name__ == "__main__":
    dist.launch(main_worker, parse_args(), nprocs=2)
