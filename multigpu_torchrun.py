"""Rung 1 of the ladder: survive a crash. single_gpu.py for several GPUs, with snapshots that resume exactly.

torchrun starts the processes and, when one dies, starts all of them again; each then loads the last snapshot and goes
on at the epoch that it names. What was trained since is trained again, from the same weights in the same order, so the
run ends bit for bit where it would have ended without the crash. Choose it over min_DDP.py for a run that is too long
to lose, and multinode_torchrun.py when whole machines come and go. `diff single_gpu.py multigpu_torchrun.py` is all
there is to learn.

Cost per process, for P float32 parameters trained by SGD on N processes: 4·P bytes of parameters and 4·P of gradients;
each step sends 2·(N-1)/N · 4·P bytes (a ring all-reduce). A save stops training while 4·P bytes are written.

    torchrun --standalone --nproc_per_node gpu multigpu_torchrun.py 50 10   # 50 epochs, a snapshot at every 10th
    torchrun --standalone --nproc_per_node 2 multigpu_torchrun.py 50 10     # two processes, where there is no GPU
    torchrun --standalone --nproc_per_node gpu --max-restarts 3 multigpu_torchrun.py 50 10    # survive 3 crashes
    python multigpu_torchrun.py 50 10                                       # one process

It prints a line per epoch, `[GPU0] Epoch 0 | Batchsize: 32 | Steps: 32 | Loss: 17.2381`, with a process's batch size
and steps, and the average loss of all processes' samples. It says when it has saved and where it resumes.
"""

import os
import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import checkpoint
import distributed as dist
import options


def parse_args():
    parser = options.ArgumentParser(__doc__)
    parser.add_argument("total_epochs", type=options.whole_number(1), help="epochs to train")
    parser.add_argument("save_every", type=options.whole_number(1), help="epochs between snapshots")
    parser.add_argument("--batch-size", type=options.whole_number(1), default=32, help="samples per process")
    parser.add_argument("--snapshot-path", default="snapshot.pt", help="where to save and resume")
    args = parser.parse_args()
    checkpoint.check_writable("--snapshot-path", os.path.dirname(os.path.abspath(args.snapshot_path)))
    return args


class ToyDataset(Dataset):
    """2048 samples of 20 features; the target is a fixed linear function of them plus a little noise."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(2048, 20, generator=generator)
        weights = torch.randn(20, 1, generator=generator)
        self.y = self.x @ weights + 0.1 * torch.randn(2048, 1, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitems__(self, indices):
        return self.x[indices], self.y[indices]  # a whole batch at once


class Trainer:
    def __init__(self, model, loader, optimizer, device, save_every, snapshot_path):
        self.model = dist.prepare_ddp_model(model.to(device), device_ids=[device.index])
        self.loader = loader
        self.optimizer = optimizer
        self.device = device
        self.save_every = save_every
        self.snapshot_path = snapshot_path
        self.first_epoch, inside = checkpoint.load(snapshot_path, self.model, optimizer)
        if inside:
            sys.exit(f"{snapshot_path} was saved inside Epoch {self.first_epoch}: end it with multinode_torchrun.py")
        if self.first_epoch:
            dist.print_primary(f"Resuming from {snapshot_path} at Epoch {self.first_epoch}")

    def train(self, total_epochs):
        checkpoint.rebuild_buckets(self.model, lambda: self.compute_loss(*next(iter(self.loader))))
        for epoch in range(self.first_epoch, total_epochs):
            self.run_epoch(epoch)
            if (epoch + 1) % self.save_every == 0 or epoch + 1 == total_epochs:
                self.save_snapshot(epoch)

    def run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)  # another order in each epoch, the same after a restart
        torch.manual_seed(epoch * dist.get_world_size() + dist.get_rank())  # so with dropout, which differs by rank
        total_loss = torch.zeros((), device=self.device)  # stays on the device: no wait for it in the loop
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = self.compute_loss(x, y)
            loss.backward()
            self.optimizer.step()
            total_loss += loss.detach() * len(x)
        loss = dist.all_reduce(total_loss).item() / self.loader.sampler.total_size
        name = f"GPU{self.device.index}" if self.device.type == "cuda" else "CPU"
        batch_size, steps = self.loader.batch_size, len(self.loader)
        dist.print_primary(f"[{name}] Epoch {epoch} | Batchsize: {batch_size} | Steps: {steps} | Loss: {loss:.4f}")

    def compute_loss(self, x, y):
        x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
        return F.mse_loss(self.model(x), y)

    def save_snapshot(self, epoch):
        checkpoint.save(self.snapshot_path, self.model, self.optimizer, epoch=epoch + 1)
        dist.print_primary(f"Epoch {epoch} | Snapshot saved at {self.snapshot_path}")


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    device = dist.get_device()
    torch.manual_seed(0)
    dataset = ToyDataset()
    sampler = dist.data_sampler(dataset, True, shuffle=True)  # in one process too: its order can be repeated
    # collate_fn: __getitems__ has made the batch already
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, collate_fn=tuple, pin_memory=device.type == "cuda")
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3, fused=True)
    Trainer(model, loader, optimizer, device, args.save_every, args.snapshot_path).train(args.total_epochs)


if __name__ == "__main__":
    dist.launch(main_worker, parse_args(), nprocs=1)
