"""Replicate the model: the minimal example of DistributedDataParallel (DDP).

Every process holds the whole model and computes on its own share of each batch. During backward, DDP averages the
gradients of the N processes:

    g = (1/N) sum_r g_r        g_r is the gradient of the average loss over the share of rank r

    rank 0:  its share of the batch -> forward -> backward -> g_0 --+--> g -> optimizer step
                                                                    |
    rank 1:  its share of the batch -> forward -> backward -> g_1 --+--> g -> optimizer step

So every process takes the same step, and it is the step that one process would take on the whole batch. --batch-size
is the size of a share. N processes therefore take N times fewer steps per epoch, here with the same learning rate. For
the steps of one process, divide --batch-size by N.

Choose DDP when the model, its gradients and the optimizer's state fit into one GPU. If they do not, see min_FSDP.py.
If the run must survive a crash, see multigpu_torchrun.py.

Cost per process, for P float32 parameters on N processes: 4·P bytes of parameters, 4·P of gradients and 8·P of Adam's
state. Each step sends 2·(N-1)/N · 4·P bytes (a ring all-reduce).

    python min_DDP.py                                      # one process per visible GPU, or one on the CPU
    python min_DDP.py --nproc 2                            # two processes
    torchrun --standalone --nproc-per-node 2 min_DDP.py    # torchrun starts the processes

It prints its settings, and after each epoch the accuracy and the loss of the epoch's steps, once for all processes:
`Finish epoch 2 - acc: 0.9648 (247/256) - loss: 0.4350`. If the number of processes does not divide the samples, a few
samples are trained on twice, so that all processes have equally many. The accuracy at the end counts each sample once.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import distributed as dist

# ---- what every process does --------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    device = dist.get_device()

    dataset = DummyDataset(args.seed)
    sampler = dist.data_sampler(dataset, distributed=True, shuffle=True, seed=args.seed)  # this rank's share
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, pin_memory=device.type != "cpu")

    # Each rank has its own seed, so that dropout differs between ranks. DDP copies rank 0's weights to all ranks.
    torch.manual_seed(args.seed + dist.get_rank())
    model = DummyModel().to(device)
    # DDP averages the gradients in backward. With bucket views each gradient is a view of what is sent, which saves a
    # second copy of them. Clone a gradient that you keep: the next backward overwrites it.
    ddp_model = dist.prepare_ddp_model(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)

    settings = [f"{name} {value}" for name, value in vars(args).items()]
    dist.print_primary(f"Settings: {', '.join(settings)}")
    dist.print_primary(f"Training on {world_size} x {device.type}, global batch {world_size * args.batch_size}")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # a new order in each epoch, the same on every rank
        loss, hits, n = train_epoch(ddp_model, loader, optimizer, device)
        dist.print_primary(f"Finish epoch {epoch + 1} - acc: {hits / n:.4f} ({hits}/{n}) - loss: {loss:.4f}")

    # Not `ddp_model`: DDP may communicate in forward, and would hang if a rank has fewer batches. A real run evaluates
    # on a test set.
    correct = evaluate(model, dataset, args.batch_size, device)
    n = len(dataset)
    dist.print_primary(f"Finished: accuracy {correct / n:.4f} ({correct}/{n})")


# ---- training -----------------------------------------------------------------------------------------------------


def train_epoch(ddp_model, loader, optimizer, device):
    """Returns the mean loss of the steps, and how many samples were classified correctly, of how many, on all ranks."""
    ddp_model.train()
    losses = []
    # These stay on the GPU until the epoch ends. To read a number, the CPU would wait for the GPU in each step.
    correct = torch.zeros((), dtype=torch.long, device=device)
    total = torch.zeros_like(correct)
    for x, y in loader:
        x = x.to(device, non_blocking=True)
        y = y.to(device, non_blocking=True)
        optimizer.zero_grad()
        logits = ddp_model(x)
        loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        correct += (logits.argmax(dim=1) == y).sum()
        total += len(y)

    loss = dist.reduce(torch.stack(losses).mean())  # the average over all ranks
    correct, total = dist.all_reduce(torch.stack([correct, total])).tolist()  # the sums over all ranks
    return loss.item(), correct, total


@torch.no_grad()
def evaluate(model, dataset, batch_size, device):
    """Returns how many samples of the dataset the model classifies correctly. Every rank evaluates its share."""
    sampler = dist.data_sampler(dataset, distributed=True, shuffle=False, pad=False)  # no sample is counted twice
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    model.eval()
    correct = torch.zeros((), dtype=torch.long, device=device)
    for x, y in loader:
        predictions = model(x.to(device)).argmax(dim=1)
        correct += (predictions == y.to(device)).sum()
    return dist.all_reduce(correct, op="sum").item()


# ---- data and model -----------------------------------------------------------------------------------------------


class DummyDataset(Dataset):
    """Points with 8 features, scattered around the centres of 4 classes. The same seed gives the same data."""

    def __init__(self, seed, length=256):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(4, (length,), generator=generator)
        centres = 2 * torch.randn(4, 8, generator=generator)
        self.points = centres[self.labels] + torch.randn(length, 8, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.points[index], self.labels[index]


class DummyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        return self.layers(x)


# ---- options ------------------------------------------------------------------------------------------------------


def positive_int(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parse_args():
    # Without a usage, an error is one line.
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], usage=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=positive_int, default=5, help="passes over the data (default: %(default)s)")
    batch_help = "samples per process (default: %(default)s)"
    parser.add_argument("--batch-size", "--batch_size", type=positive_int, default=16, help=batch_help)
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--nproc", type=positive_int, help="processes to start (default: one per visible GPU, or 1)")
    return parser.parse_args()


# ---- start --------------------------------------------------------------------------------------------------------


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
