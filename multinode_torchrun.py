"""Rung 2 of the ladder: survive machines that come and go. multigpu_torchrun.py for an elastic job on many nodes.

A torchrun agent on every node; they meet at HOST:PORT and agree on the ranks. When a node is lost or joins, every agent
starts its processes again, as the new number of ranks, and these load the newest snapshot that any node has. Choose it
over multigpu_torchrun.py for several machines, spot instances, or a queue that preempts. What it adds:

- The global batch stays as it is when the number of ranks changes: each rank takes its share. A step sees the same
  samples on any number of ranks, so the run ends where it would have ended, up to rounding. What does not fill a last
  batch is left out, other samples in each epoch.
- SIGTERM, from a scheduler by way of torchrun or because a node joins: all ranks stop after the same step, save, and
  leave with status 143. torchrun kills them 30 s later; TORCH_ELASTIC_SHUTDOWN_TIMEOUT gives a slow save more, but not
  when a node joins, in torch 2.15.
- The snapshot knows its epoch and step: nothing done is lost. Going on is exact, also with dropout and an augmentation
  that draws from torch's generator, in any number of --num-workers: each batch and each step has its own seed.
- Every process says in every line which rank it is and where; @record puts its traceback into torchrun's report.

Cost per process, for P float32 parameters trained by SGD on N processes: 4·P bytes of parameters and 4·P of gradients;
each step sends 2·(N-1)/N · 4·P bytes, and in the background 4 bytes to learn of a SIGTERM. A resume sends the snapshot
once: 4·P bytes. --timeout bounds a step; a save may take hours, and so may data that local rank 0 unpacks before all
meet in dist.agree().

    # The same on 1 to 4 machines, HOST one of them; `--nproc_per_node 2` where there is no GPU. Without the variable,
    # agents of torch 2.15 time out when a machine joins later (https://github.com/pytorch/pytorch/issues/135712). If a
    # host's own name is not its address in the job's network, set GLOO_SOCKET_IFNAME there, beside NCCL_SOCKET_IFNAME.
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \
    torchrun --nnodes 1:4 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:PORT --nproc_per_node gpu \
        multinode_torchrun.py 50 10
    torchrun --standalone --nproc_per_node gpu multinode_torchrun.py 50 10    # one machine
    python multinode_torchrun.py 50 10                                        # one process
    sbatch launchers/slurm.sbatch                                             # or kubectl apply, see launchers/

It prints a line per rank when it starts, and from rank 0 one per epoch and one per snapshot, each with rank and host:
`[rank 0/4 on node1] GPU0 | Epoch 0 | Batchsize: 16 | Steps: 32 | Loss: 15.8971`, with the average loss of the samples
of these steps: after a preemption, of those that were left.
"""

import os
import signal
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as torch_dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

import checkpoint
import distributed as dist
import options


def log(message):
    line = f"[rank {dist.get_rank()}/{dist.get_world_size()} on {socket.gethostname()}] {message}\n"
    print(line, end="", flush=True)  # in one piece: the ranks share a terminal


def parse_args():
    parser = options.ArgumentParser(__doc__)
    parser.add_argument("total_epochs", type=options.whole_number(1), help="epochs to train")
    parser.add_argument("save_every", type=options.whole_number(1), help="epochs between snapshots")
    size = options.whole_number(1, len(ToyDataset()), ", the number of samples")
    parser.add_argument("--global-batch-size", type=size, default=64, help="samples per step, of all ranks")
    parser.add_argument("--snapshot-path", default="snapshot.pt", help="where to save and resume")
    parser.add_argument(
        "--num-workers", type=options.whole_number(0), default=0, help="processes that load data, per rank"
    )
    parser.add_argument("--timeout", type=options.whole_number(1), default=300, help="seconds that a step may wait")
    args = parser.parse_args()
    size, ranks = args.global_batch_size, dist.get_world_size()
    if size % ranks:
        parser.error(f"argument --global-batch-size: {size} is not a multiple of {ranks}, the number of ranks")
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


class SeededBatches(Dataset):
    """`dataset` by whole batches, each augmented with the seed that it comes with, in whichever process loads it."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, seed_and_indices):
        seed, indices = seed_and_indices
        torch.manual_seed(seed)
        many = hasattr(self.dataset, "__getitems__")
        batch = self.dataset.__getitems__(indices) if many else [self.dataset[index] for index in indices]
        return default_collate(batch) if isinstance(batch, list) else batch


def ignore_sigterm(worker_id):
    """For a DataLoader's worker, which is sent it too: the step after which all ranks save needs a batch."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Preemption:
    """Has any rank been sent SIGTERM? All ranks learn of it after the same step."""

    def __init__(self, timeout):
        self.signals, self.answer = [], None
        signal.signal(signal.SIGTERM, lambda number, frame: self.signals.append(number))
        # A group of its own on the CPU: asking never waits for a GPU, nor gets between DDP's collectives.
        self.group = torch_dist.new_group(backend="gloo", timeout=timeout) if dist.get_world_size() > 1 else None

    def agreed(self):
        """The answer to the question of the step before, and a new question, on its way while the next step runs."""
        if self.group is None:
            return bool(self.signals)
        if self.settle():
            return True
        self.any_signals = torch.tensor(float(bool(self.signals)))
        self.answer = torch_dist.all_reduce(self.any_signals, torch_dist.ReduceOp.MAX, self.group, async_op=True)
        return False

    def settle(self):
        """Wait for the answer that is on its way, if any."""
        answer, self.answer = self.answer, None
        return answer is not None and answer.wait() and bool(self.any_signals)


class Trainer:
    def __init__(
        self, model, dataset, global_batch_size, optimizer, device, save_every, snapshot_path, preemption, num_workers
    ):
        self.model = dist.prepare_ddp_model(model.to(device), device_ids=[device.index])
        self.batches = SeededBatches(dataset)
        self.sampler = dist.data_sampler(dataset, True, shuffle=True)  # in one process too: its order can be repeated
        self.global_batch_size = global_batch_size
        self.batch_size = global_batch_size // dist.get_world_size()
        self.steps = len(dataset) // global_batch_size  # the same for any number of ranks
        self.optimizer = optimizer
        self.device = device
        self.name = f"GPU{device.index}" if device.type == "cuda" else "CPU"
        self.save_every = save_every
        self.snapshot_path = snapshot_path
        self.preemption = preemption
        self.num_workers = num_workers
        self.first_epoch, samples = checkpoint.load(snapshot_path, self.model, optimizer)
        self.first_step, rest = divmod(samples, global_batch_size)
        if rest:
            sys.exit(f"{snapshot_path} is {samples} samples into an epoch: use a --global-batch-size that divides that")
        log(f"{self.name} | Starting at Epoch {self.first_epoch}, Step {self.first_step}")

    def train(self, total_epochs):
        """Returns whether all epochs are done; if not, a SIGTERM has come, and all that was done is saved."""
        checkpoint.rebuild_buckets(self.model, lambda: self.compute_loss(*next(iter(self.loader(0, 0)))))
        for epoch in range(self.first_epoch, total_epochs):
            step, preempted = self.run_epoch(epoch, self.first_step if epoch == self.first_epoch else 0)
            next_epoch, next_step = (epoch + 1, 0) if step == self.steps else (epoch, step)
            if preempted or next_epoch % self.save_every == 0 or next_epoch == total_epochs:
                self.save_snapshot(next_epoch, next_step)
            if preempted:
                return next_epoch == total_epochs
        self.preemption.settle()
        return True

    def seed(self, epoch, step):
        return (epoch * self.steps + step) * dist.get_world_size() + dist.get_rank()

    def loader(self, epoch, first_step):
        self.sampler.set_epoch(epoch)  # another order in each epoch, the same after a restart
        # Rank r of N has every Nth sample from the rth on: its first k batches are its part of the first k global ones.
        indices, size = list(self.sampler), self.batch_size
        steps = range(first_step, self.steps)
        batches = [(self.seed(epoch, step), indices[step * size : (step + 1) * size]) for step in steps]
        options = {"pin_memory": self.device.type == "cuda", "worker_init_fn": ignore_sigterm}
        return DataLoader(self.batches, None, sampler=batches, num_workers=self.num_workers, **options)

    def run_epoch(self, epoch, first_step):
        """Returns the step to go on with, and whether a SIGTERM has come."""
        total_loss = torch.zeros((), device=self.device)  # stays on the device: no wait for it in the loop
        for step, (x, y) in enumerate(self.loader(epoch, first_step), first_step):
            torch.manual_seed(~self.seed(epoch, step))  # of dropout: not the one of the batch
            self.optimizer.zero_grad()
            loss = self.compute_loss(x, y)
            loss.backward()
            self.optimizer.step()
            total_loss += loss.detach() * len(x)
            if preempted := self.preemption.agreed():
                break
        steps = step + 1 - first_step
        loss = dist.all_reduce(total_loss).item() / (steps * self.global_batch_size)
        if dist.is_primary():
            log(f"{self.name} | Epoch {epoch} | Batchsize: {self.batch_size} | Steps: {steps} | Loss: {loss:.4f}")
        return step + 1, preempted

    def compute_loss(self, x, y):
        x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
        return F.mse_loss(self.model(x), y)

    def save_snapshot(self, epoch, step):
        samples = step * self.global_batch_size  # not steps: another batch size may come
        checkpoint.save(self.snapshot_path, self.model, self.optimizer, epoch=epoch, step=samples)
        if dist.is_primary():
            log(f"Snapshot saved at {self.snapshot_path}: next is Epoch {epoch}, Step {step}")


@record
def main_worker(local_rank, world_size, args):
    timeout = timedelta(seconds=args.timeout)
    dist.init_process_group(timeout=timeout)
    device = dist.get_device()
    preemption = Preemption(timeout)
    torch.manual_seed(0)
    dataset = ToyDataset()
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3, fused=True)
    trainer_args = (args.save_every, args.snapshot_path, preemption, args.num_workers)
    trainer = Trainer(model, dataset, args.global_batch_size, optimizer, device, *trainer_args)
    if not trainer.train(args.total_epochs):
        sys.exit(128 + signal.SIGTERM)  # as if killed by it: an agent that goes on starts its processes again


if __name__ == "__main__":
    dist.launch(main_worker, parse_args(), nprocs=1)
