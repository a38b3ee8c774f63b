"""The second of three trainers: survive a crash. single_gpu.py for several GPUs, with snapshots that resume exactly.

torchrun starts one process per GPU. When a process dies, torchrun restarts all of them, and they resume from the last
snapshot:

    epochs 0 to 9 | save | epochs 10 to 14 | crash
                         | restart, load | epochs 10 to 19 | save | epochs 20 to 29 | ...

The epochs since the snapshot are trained again, from the same weights and on the same samples in the same order. So the
run ends bit for bit where it would have ended without the crash, if the number of processes is the same, and on GPUs if
the kernels are deterministic (torch.use_deterministic_algorithms). The snapshot stores model, optimizer and the next
epoch. All randomness of an epoch follows from its number and the rank.

Choose it over min_DDP.py when the run is too long to lose. Choose multinode_torchrun.py when whole machines come and
go. `diff single_gpu.py multigpu_torchrun.py` shows everything that is new.

Cost per process, for P float32 parameters trained by SGD on N processes: 4·P bytes of parameters and 4·P of gradients.
Each step sends 2·(N-1)/N · 4·P bytes (a ring all-reduce). A save stops training while 4·P bytes are written.

    torchrun --standalone --nproc-per-node gpu multigpu_torchrun.py 50 10    # train 50 epochs, save every 10 epochs
    torchrun --standalone --nproc-per-node gpu --max-restarts 3 multigpu_torchrun.py 50 10    # survive three crashes
    torchrun --standalone --nproc-per-node 2 multigpu_torchrun.py 50 10      # two processes, on GPUs or on the CPU

It prints the average loss of each epoch, `[CPU] Epoch 0 | Batchsize: 32 | Steps: 32 | Loss: 15.8992`, over the samples
of all processes, and a line for each snapshot. Batch size and steps are per process.
"""

import argparse
import os

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import checkpoint
import distributed as dist
import watch

# ---- training -----------------------------------------------------------------------------------------------------


class Trainer:
    def __init__(self, model, loader, optimizer, device, save_every, snapshot_path):
        self.model = dist.prepare_ddp_model(model, gradient_as_bucket_view=True)  # needs no copy of the gradients
        self.loader = loader
        self.optimizer = optimizer
        self.device = device
        self.name = f"GPU{device.index}" if device.type != "cpu" else "CPU"
        self.save_every = save_every
        self.snapshot_path = snapshot_path
        self.settings = {"training samples": len(loader.dataset)}

    def run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)  # a new order in each epoch, the same after a restart
        # Dropout differs between ranks and between epochs, and a restart repeats it.
        torch.manual_seed(epoch * dist.get_world_size() + dist.get_rank())
        total_loss = torch.zeros((), device=self.device)  # stays on the GPU, so no step waits for it
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = self.compute_loss(x, y)
            loss.backward()
            self.optimizer.step()
            total_loss += loss.detach() * len(x)
        loss = dist.reduce(total_loss).item() / len(self.loader.sampler)  # every rank has equally many samples
        line = f"Epoch {epoch} | Batchsize: {self.loader.batch_size} | Steps: {len(self.loader)} | Loss: {loss:.4f}"
        dist.print_primary(f"[{self.name}] {line}")

    def compute_loss(self, x, y):
        x = x.to(self.device, non_blocking=True)
        y = y.to(self.device, non_blocking=True)
        return F.mse_loss(self.model(x), y)

    def load_snapshot(self):
        """Returns the next epoch to run."""
        epoch, step = checkpoint.load(self.snapshot_path, self.model, self.optimizer, settings=self.settings)
        if step > 0:
            raise dist.DistributedError(
                f"{self.snapshot_path} was saved inside Epoch {epoch}: resume it with multinode_torchrun.py"
            )
        if epoch > 0:
            dist.print_primary(f"Resuming from {self.snapshot_path} at Epoch {epoch}")
        return epoch

    def train(self, total_epochs):
        first_epoch = self.load_snapshot()
        checkpoint.rebuild_buckets(self.model, self.first_loss)  # else a resumed run differs in the last bit
        for epoch in range(first_epoch, total_epochs):
            self.run_epoch(epoch)
            if (epoch + 1) % self.save_every == 0 or epoch + 1 == total_epochs:
                self.save_snapshot(epoch)

    def first_loss(self):
        x, y = next(iter(self.loader))
        return self.compute_loss(x, y)

    def save_snapshot(self, epoch):
        # Its epoch is the next one to run.
        checkpoint.save(self.snapshot_path, self.model, self.optimizer, epoch=epoch + 1, settings=self.settings)
        dist.print_primary(f"Epoch {epoch} | Snapshot saved at {self.snapshot_path}")


# ---- data ---------------------------------------------------------------------------------------------------------


class ToyDataset(TensorDataset):
    """2048 samples of 20 features. The target is a fixed linear function of the features plus a little noise."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2048, 20, generator=generator)
        weights = torch.randn(20, 1, generator=generator)
        super().__init__(x, x @ weights + 0.1 * torch.randn(2048, 1, generator=generator))


# ---- options ------------------------------------------------------------------------------------------------------


def positive_int(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parse_args():
    # Without a usage, an error is one line.
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], usage=argparse.SUPPRESS)
    parser.add_argument("total_epochs", type=positive_int, help="passes over the data")
    parser.add_argument("save_every", type=positive_int, help="epochs between snapshots")
    batch_help = "samples per process (default: %(default)s)"
    parser.add_argument("--batch-size", "--batch_size", type=positive_int, default=32, help=batch_help)
    path_help = "save to this file, and resume from it (default: %(default)s)"
    parser.add_argument("--snapshot-path", "--snapshot_path", default="snapshot.pt", help=path_help)
    args = parser.parse_args()
    args.snapshot_path = os.path.expanduser(args.snapshot_path)
    checkpoint.check_writable("--snapshot-path", args.snapshot_path)
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    watch.start()  # if the job hangs, one line says where each rank is
    device = dist.get_device()
    torch.manual_seed(0)
    dataset = ToyDataset()
    loader = DataLoader(
        dataset,
        args.batch_size,
        sampler=dist.data_sampler(dataset, distributed=True, shuffle=True),  # this rank's share
        pin_memory=device.type != "cpu",
    )
    model = torch.nn.Linear(20, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3, fused=True)
    trainer = Trainer(model, loader, optimizer, device, args.save_every, args.snapshot_path)
    trainer.train(args.total_epochs)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=1)
