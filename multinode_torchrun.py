"""The third of three trainers: survive machines that come and go. multigpu_torchrun.py for an elastic job.

A torchrun agent runs on every node. When a node is lost or joins, all agents restart their processes with the new
number of ranks, and these resume from the newest snapshot that any node has. Two things are new:

1. The global batch does not depend on the number of ranks. Each rank takes its share of it:

       order of the samples:   |  global batch 0   |  global batch 1   |  global batch 2   | rest: not used
       share of rank 1 of 4:   | . x . . . x . . . | . x . . . x . . . | . x . . . x . . . |

   So a step computes the same on any number of ranks, up to rounding, and the run ends where it would have ended.
   (BatchNorm, dropout and random augmentation see the shares. With them this holds only for one number of ranks.)

2. A SIGTERM loses no step. A scheduler sends it before it takes a node away. torchrun sends it when a node joins.
   After each step all ranks read whether one of them has received it, and so leave together. `checkpoint.Preemption`
   shows how:

       rank 0   | step 16            | step 17 | save, exit with status 143
       rank 1   | step 16, SIGTERM   | step 17 | exit with status 143

   torchrun kills the processes 30 s after SIGTERM. From torch 2.12 on, TORCH_ELASTIC_SHUTDOWN_TIMEOUT gives a slow
   save more seconds.

Choose it over multigpu_torchrun.py for several machines, for spot instances, or for a queue that preempts jobs.
`diff multigpu_torchrun.py multinode_torchrun.py` shows everything that is new.

Cost per process, for P float32 parameters trained by SGD on N processes: 4·P bytes of parameters and 4·P of gradients.
Each step sends 2·(N-1)/N · 4·P bytes (a ring all-reduce). A resume sends the snapshot, 4·P bytes.

    torchrun --standalone --nproc-per-node gpu multinode_torchrun.py 50 10    # one machine
    sbatch launchers/slurm.sbatch                                             # SLURM; Kubernetes: see launchers/

    # One to four machines: the same command on each. HOST is one of them: if it is lost, the job ends. Each preempted
    # or lost machine costs one of --max-restarts. The variable lets machines join later
    # (https://github.com/pytorch/pytorch/issues/135712).
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \
    torchrun --nnodes 1:4 --max-restarts 99 --rdzv-backend c10d --rdzv-endpoint HOST:PORT --nproc-per-node gpu \
        multinode_torchrun.py 50 10

Each rank prints where it starts, and rank 0 prints the average loss of each epoch and a line for each snapshot:
`[rank 0/4 on node1] CPU | Epoch 0 | Batchsize: 64 | Steps: 32 | Loss: 15.8992`. The batch size is the global one.
"""

import argparse
import os
import socket
from datetime import timedelta

import torch
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import checkpoint
import distributed as dist
import watch

# ---- training -----------------------------------------------------------------------------------------------------


class Trainer:
    def __init__(self, model, dataset, optimizer, device, preemption, args):
        self.model = dist.prepare_ddp_model(model, gradient_as_bucket_view=True)  # needs no copy of the gradients
        self.dataset = dataset
        self.optimizer = optimizer
        self.device = device
        self.name = f"GPU{device.index}" if device.type != "cpu" else "CPU"
        self.preemption = preemption
        self.global_batch_size = args.global_batch_size
        self.steps = len(dataset) // args.global_batch_size  # per epoch
        if self.steps == 0:
            line = f"--global-batch-size {args.global_batch_size} is more than the {len(dataset)} samples"
            raise dist.DistributedError(line)
        self.num_workers = args.num_workers
        self.save_every = args.save_every
        self.snapshot_path = args.snapshot_path
        self.settings = {"training samples": len(dataset)}

    def loader(self, epoch, first_step):
        """Loads this rank's share of each global batch of the epoch, from `first_step` on."""
        order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(epoch))
        global_batches = order.split(self.global_batch_size)[first_step : self.steps]
        shares = [batch[dist.get_rank() :: dist.get_world_size()].tolist() for batch in global_batches]
        return DataLoader(
            self.dataset,
            batch_sampler=shares,
            num_workers=self.num_workers,
            pin_memory=self.device.type != "cpu",
        )

    def batches(self, epoch, first_step):
        """This rank's share of each batch. The seed before each one is for augmentation and dropout.

        So these differ between steps and ranks, and a resumed run repeats them. But loader processes draw from a seed
        of their own: if you use them, let augmentation depend on the index of the sample.
        """
        batches = checkpoint.shielded(self.loader(epoch, first_step))
        for step in range(epoch * self.steps + first_step, (epoch + 1) * self.steps):
            torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
            yield next(batches)

    def run_epoch(self, epoch, first_step):
        """Trains to the end of the epoch, or until a SIGTERM. Returns the next step, and whether a SIGTERM came."""
        step = first_step
        total_loss = torch.zeros((), device=self.device)  # stays on the GPU, so no step waits for it
        for x, y in self.batches(epoch, first_step):
            self.optimizer.zero_grad()
            loss = self.compute_loss(x, y)
            # DDP averages over ranks. The weight makes that the average over samples, as shares may differ by a sample.
            weight = len(x) * dist.get_world_size() / self.global_batch_size
            (weight * loss).backward()
            self.optimizer.step()
            total_loss += loss.detach() * len(x)
            step += 1
            preempted = self.preemption.agreed()
            if preempted:
                break
        steps = step - first_step
        loss = dist.all_reduce(total_loss).item() / (steps * self.global_batch_size)
        line = f"Epoch {epoch} | Batchsize: {self.global_batch_size} | Steps: {steps} | Loss: {loss:.4f}"
        if dist.is_primary():
            log(f"{self.name} | {line}")
        return step, preempted

    def compute_loss(self, x, y):
        x = x.to(self.device, non_blocking=True)
        y = y.to(self.device, non_blocking=True)
        return F.mse_loss(self.model(x), y)

    def load_snapshot(self):
        """Returns the next epoch and step to run."""
        epoch, samples = checkpoint.load(self.snapshot_path, self.model, self.optimizer, settings=self.settings)
        step = samples // self.global_batch_size
        if samples % self.global_batch_size != 0 or step >= self.steps:
            raise dist.DistributedError(
                f"{self.snapshot_path} is {samples} samples into an epoch: "
                f"use the --global-batch-size that it was saved with, or one that divides {samples} "
                f"and is at most {len(self.dataset) - samples}"
            )
        log(f"{self.name} | Starting at Epoch {epoch}, Step {step}")
        return epoch, step

    def train(self, total_epochs):
        """Returns True if all epochs are done, and False after a SIGTERM. Every step is then in the snapshot."""
        epoch, step = self.load_snapshot()
        checkpoint.rebuild_buckets(self.model, self.first_loss)  # else a resumed run differs in the last bit
        preempted = False
        while epoch < total_epochs and not preempted:
            step, preempted = self.run_epoch(epoch, step)
            if step == self.steps:
                epoch += 1
                step = 0
            if preempted or epoch % self.save_every == 0 or epoch == total_epochs:
                self.save_snapshot(epoch, step)
        return epoch >= total_epochs

    def first_loss(self):
        x, y = next(checkpoint.shielded(self.loader(epoch=0, first_step=0)))
        return self.compute_loss(x, y)

    def save_snapshot(self, epoch, step):
        samples = step * self.global_batch_size  # samples, as the next run may have another batch size
        position = {"epoch": epoch, "step": samples}
        checkpoint.save(self.snapshot_path, self.model, self.optimizer, settings=self.settings, **position)
        if dist.is_primary():
            log(f"Snapshot saved at {self.snapshot_path}: next is Epoch {epoch}, Step {step}")


def log(message):
    line = f"[rank {dist.get_rank()}/{dist.get_world_size()} on {socket.gethostname()}] {message}\n"
    print(line, end="", flush=True)  # one write, so that lines of ranks that share a terminal do not mix


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
    batch_help = "samples per step, over all processes (default: %(default)s)"
    parser.add_argument("--global-batch-size", "--global_batch_size", type=positive_int, default=64, help=batch_help)
    path_help = "save to this file, and resume from it (default: %(default)s)"
    parser.add_argument("--snapshot-path", "--snapshot_path", default="snapshot.pt", help=path_help)
    workers_help = "loader processes per rank (default: %(default)s)"
    parser.add_argument("--num-workers", "--num_workers", type=int, default=0, help=workers_help)
    timeout_help = "seconds until a hung step fails (default: %(default)s)"
    parser.add_argument("--timeout", type=positive_int, default=300, help=timeout_help)
    args = parser.parse_args()
    size = args.global_batch_size
    if size < dist.get_world_size():
        parser.error(f"argument --global-batch-size: {size} is less than {dist.get_world_size()}, the number of ranks")
    if args.num_workers < 0:
        parser.error(f"argument --num-workers: {args.num_workers} is less than 0")
    args.snapshot_path = os.path.expanduser(args.snapshot_path)
    checkpoint.check_writable("--snapshot-path", args.snapshot_path)
    return args


# ---- start --------------------------------------------------------------------------------------------------------


@record  # puts a traceback into torchrun's report
def main_worker(local_rank, world_size, args):
    timeout = timedelta(seconds=args.timeout)
    dist.init_process_group(timeout=timeout)
    watch.start()  # if the job hangs, one line says where each rank is
    device = dist.get_device()
    preemption = checkpoint.Preemption()
    torch.manual_seed(0)
    dataset = ToyDataset()
    model = torch.nn.Linear(20, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3, fused=True)
    trainer = Trainer(model, dataset, optimizer, device, preemption, args)
    finished = trainer.train(args.total_epochs)
    if not finished:
        preemption.leave()


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=1)
