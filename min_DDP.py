"""Replicate the model: the minimum working example of DistributedDataParallel (DDP).

Every process holds the whole model and works on its own share of each batch; while it runs backward, DDP averages the
gradients over all processes, so that all of them take the same step. Choose it when the model with its optimizer fits
into one device; if it does not, see min_FSDP.py, and to survive a crash, multigpu_torchrun.py.

Cost per process, for P float32 parameters on N processes: 4·P bytes of parameters, 4·P of gradients and 8·P of Adam
state, whatever N; each step sends 2·(N-1)/N · 4·P bytes (a ring all-reduce).

    python min_DDP.py                                      # all visible GPUs; two CPU processes where there is none
    CUDA_VISIBLE_DEVICES=2,3 python min_DDP.py             # GPUs 2 and 3
    CUDA_VISIBLE_DEVICES=2 python min_DDP.py               # one GPU, no process group
    python min_DDP.py --nproc 4 --epochs 3                 # four processes
    torchrun --standalone --nproc-per-node 2 min_DDP.py    # processes started by torchrun

It prints, once for all processes, `------- Epoch 1`, for each iteration the accuracy and the average loss over the
whole global batch, `Finish iteration 3 - acc: 0.8125 (26/32) - loss: 0.5912`, and last the accuracy on all samples.
Reducing and gathering in each iteration is this script's lesson; a real loop does it once per epoch.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import distributed as dist
import options


def parse_args():
    parser = options.ArgumentParser(__doc__)
    parser.add_argument("--epochs", type=options.whole_number(1), default=5, help="passes over the data")
    parser.add_argument("--batch-size", type=options.whole_number(1), default=16, help="samples per process")
    parser.add_argument("--n-classes", type=options.whole_number(2), default=4, help="classes to tell apart")
    parser.add_argument("--data-size", type=options.whole_number(1), default=256, help="samples in all")
    parser.add_argument("--hidden-dim", type=options.whole_number(1), default=32, help="width of the model")
    parser.add_argument("--lr", type=options.positive_number, default=0.01, help="learning rate of Adam")
    parser.add_argument(
        "--seed", type=options.seed_number, default=0, help="of the data, the weights and the order of samples"
    )
    parser.add_nproc()
    return parser.parse_args()


class DummyDataset(Dataset):
    """`length` points of 8 features, scattered around one centre per class. The same seed gives the same data."""

    def __init__(self, length, n_classes, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(n_classes, (length,), generator=generator)
        centres = 2 * torch.randn(n_classes, 8, generator=generator)
        self.points = centres[self.labels] + torch.randn(length, 8, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.points[index], self.labels[index]


class DummyModel(nn.Module):
    def __init__(self, hidden_dim, n_classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, n_classes))

    def forward(self, x):
        return self.layers(x)


def train_epoch(model, loader, optimizer, device):
    model.train()
    for iteration, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        loss = dist.reduce(loss)  # the average over all processes, on each of them
        correct = torch.cat(dist.gather(logits.argmax(dim=1) == y))  # every sample of the global batch
        hits, n = correct.sum().item(), len(correct)
        dist.print_primary(f"Finish iteration {iteration} - acc: {hits / n:.4f} ({hits}/{n}) - loss: {loss.item():.4f}")


@torch.no_grad()
def evaluate(model, loader, device):
    """[correct predictions, samples] over all ranks. `model` is the one without DDP: shares may differ in length."""
    model.eval()
    hits, n = torch.zeros((), dtype=torch.long, device=device), 0  # hits stay on the device: no wait in the loop
    for x, y in loader:
        hits += (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
        n += len(y)
    return dist.all_reduce(torch.stack([hits, hits.new_tensor(n)]), op="sum").tolist()


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    device = dist.get_device()

    dataset = DummyDataset(args.data_size, args.n_classes, args.seed)
    # The sampler for one process too: any number of them then shares one order of the samples.
    sampler = dist.data_sampler(dataset, distributed=True, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler)
    eval_sampler = dist.data_sampler(dataset, distributed=True, shuffle=False, pad=False)  # each sample exactly once
    eval_loader = DataLoader(dataset, args.batch_size, sampler=eval_sampler)

    torch.manual_seed(args.seed + dist.get_rank())  # for dropout, if you add it; DDP starts all from rank 0's weights
    model = DummyModel(args.hidden_dim, args.n_classes).to(device)
    ddp_model = dist.prepare_ddp_model(model, device_ids=[local_rank])
    optimizer = torch.optim.Adam(ddp_model.parameters(), lr=args.lr, fused=True)

    dist.print_primary(f"Training on {world_size} x {device.type}, global batch {world_size * args.batch_size}")
    for epoch in range(args.epochs):
        dist.print_primary(f"------- Epoch {epoch + 1}")
        sampler.set_epoch(epoch)  # another order in each epoch, the same on every rank
        train_epoch(ddp_model, loader, optimizer, device)
    hits, n = evaluate(model, eval_loader, device)
    dist.print_primary(f"Finished: accuracy {hits / n:.4f} ({hits}/{n})")
    dist.cleanup()


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
