"""The file to start from: a complete experiment with DDP, to copy for a data set and a model of your own.

It classifies images. All processes train and evaluate, gradients are accumulated, the run resumes from its last
snapshot, and it is tracked. The number of processes changes the speed and not the result, except for rounding, dropout,
BatchNorm and random augmentation. Each step takes one global batch of B samples of a shuffled order. Each process takes
its share, and splits it into K micro-batches, where K is --grad-accumulation:

    2 processes, --grad-accumulation 2

    rank 0   forward backward   forward backward --+-- all-reduce --- clip --- optimizer --- next step
    rank 1   forward backward   forward backward --+
             (no_sync)          on every rank the gradient is  g = 1/B * sum of the gradients of all B samples

Begin at `Trainer.train_step`. Four places say CHANGE HERE: the data, the model, the loss, the optimizer. For another
task also change `evaluate`, which counts correct predictions. Keep the rest.

Choose min_DDP.py to learn DDP, flyte_workflow.py to run this experiment as the task of an orchestrator, and
multinode_torchrun.py for machines that come and go.

Cost per process, for P float32 parameters trained by SGD with momentum on N processes: 4·P bytes of parameters, 4·P of
gradients, 4·P of momentum, and the activations of one micro-batch. Each step sends 2·(N-1)/N · 4·P bytes, for any K.
A snapshot is 8·P bytes.

    python mnist_DDP.py                                           # all visible GPUs; on the CPU add --nproc 2
    python mnist_DDP.py --snapshot-path snapshot.pt               # save snapshots; the same command again resumes
    python mnist_DDP.py --data mnist                              # the real MNIST, 99 % after five epochs
    python mnist_DDP.py --grad-accumulation 4 --amp --compile     # four micro-batches per step, bfloat16, compiled
    WANDB_MODE=offline python mnist_DDP.py --wandb                # Weights & Biases, without an account
    python mnist_DDP.py --tensorboard runs --output-dir results   # TensorBoard: tensorboard --logdir runs
    torchrun --standalone --nproc-per-node 2 mnist_DDP.py         # processes started by torchrun

It prints `Train Epoch: 1 [12800/20000 (64%)]	loss=0.6582`, the mean loss of all samples since the line before, and
after each epoch `test_loss=0.0588 accuracy=0.9864 (9864/10000)`. At the end it writes mnist_cnn.pt, a dict: "model" is
the state_dict of the plain model, "accuracies" a list with the accuracy after each epoch.
"""

import contextlib
import importlib.util
import math
import os
import random
import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

import checkpoint
import distributed as dist
import mnist
import options
import tracking
import watch

# ---- training -----------------------------------------------------------------------------------------------------


class Trainer:
    """Steps are counted over all epochs, from 0."""

    def __init__(self, args, device):
        self.args = args
        self.device = device
        self.train_set, self.test_set = load_datasets(args)
        self.steps_per_epoch = len(self.train_set) // args.global_batch_size
        if self.steps_per_epoch == 0:
            line = f"--global-batch-size {args.global_batch_size} is more than all training samples"
            raise dist.DistributedError(f"{line}, {len(self.train_set)}")
        self.steps = args.epochs * self.steps_per_epoch
        # A resumed run must share these. It may have more --epochs. Then its first step still has the old learning
        # rate, and the later ones follow the new cosine.
        names = ("global_batch_size", "lr", "clip", "amp", "seed")
        self.settings = {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
        self.settings["training samples"] = len(self.train_set)
        torch.manual_seed(args.seed)
        self.net = make_model().to(device)
        self.model = dist.prepare_ddp_model(self.net, gradient_as_bucket_view=True)  # needs no copy of the gradients
        if args.compile:
            self.model.compile()  # after DDP: torch then splits the graph where DDP's buckets end
        self.optimizer, self.scheduler = make_optimizer(self.net, args.lr, self.steps)
        self.accuracies = []  # on the test set, after each epoch
        self.preemption = checkpoint.Preemption() if args.snapshot_path else None

    def train_step(self, batches, step):
        """Train on one global batch. Returns the sum of the losses of this rank's share."""
        world_size = dist.get_world_size()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.train()
        self.optimizer.zero_grad()
        for k in range(self.args.grad_accumulation):
            inputs, labels = next(batches)
            torch.manual_seed(seed_of("dropout", self.args.seed, step, k, dist.get_rank()))  # differs between ranks
            is_last = k == self.args.grad_accumulation - 1
            sync = contextlib.nullcontext()
            if not is_last and world_size > 1:
                sync = self.model.no_sync()  # only the last micro-batch needs the all-reduce
            with sync:  # around forward too, or every backward sends
                _, _, losses = forward(self.model, inputs, labels, self.device, self.args.amp)
                # DDP divides the sum over all ranks by their number. So this makes the mean over the global batch.
                loss = losses.sum() * world_size / self.args.global_batch_size
                loss.backward()
            loss_sum += losses.detach().sum()
        if self.args.clip > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.optimizer.step()
        return loss_sum

    def train(self):
        first_step = self.resume()
        batches = self.batches(first_step)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)  # on the device, to avoid a sync every step
        last_line = first_step
        for step in range(first_step, self.steps):
            loss_sum += self.train_step(batches, step)
            done = step % self.steps_per_epoch + 1  # steps of this epoch
            ends_epoch = done == self.steps_per_epoch
            preempted = self.preemption is not None and self.preemption.agreed()  # has any process received SIGTERM?
            saves = self.preemption is not None and (preempted or ends_epoch or done % self.args.save_every == 0)
            # Print before each snapshot too: then a resumed run averages over the same steps.
            if saves or ends_epoch or done % self.args.log_interval == 0:
                self.print_loss(step, loss_sum, step + 1 - last_line)
                loss_sum.zero_()
                last_line = step + 1
            if ends_epoch:
                dist.check_in_sync(self.net)  # stops if the weights of two processes differ
                self.test(step)
            self.scheduler.step()
            if saves:
                self.save_snapshot(step + 1)
            if preempted and step + 1 < self.steps:
                self.tracker.close()
                dist.barrier()  # rank 0 may upload for minutes
                self.preemption.leave()

    def print_loss(self, step, loss_sum, n_steps):
        """Print the mean loss of the last `n_steps` steps. `loss_sum` is this rank's."""
        epoch, position = divmod(step, self.steps_per_epoch)
        loss = dist.all_reduce(loss_sum).item() / (n_steps * self.args.global_batch_size)
        n = len(self.train_set)
        seen = (position + 1) * self.args.global_batch_size
        line = f"Train Epoch: {epoch + 1} [{seen}/{n} ({seen / n:.0%})]\tloss={loss:.4f}"
        dist.print_primary(line, flush=True)
        lr = self.scheduler.get_last_lr()[0]
        self.tracker.log(self.samples(step + 1), loss=loss, lr=lr, epoch=epoch + 1)

    def test(self, step):
        """Evaluate after `step`, the last one of an epoch."""
        test_loss, hits, n = self.evaluate()
        accuracy = hits / n
        self.accuracies.append(accuracy)
        dist.print_primary(f"test_loss={test_loss:.4f} accuracy={accuracy:.4f} ({hits}/{n})", flush=True)
        self.tracker.log(self.samples(step + 1), test_loss=test_loss, accuracy=accuracy, epoch=len(self.accuracies))

    @torch.no_grad()
    def evaluate(self):
        """Mean loss, correct predictions and samples. Over all processes each sample counts once."""
        self.net.eval()
        dist.sync_params(self.net.buffers())  # BatchNorm's differ between ranks; rank 0's are saved
        loader = DataLoader(
            self.test_set,
            self.args.test_batch_size,
            sampler=dist.data_sampler(self.test_set, True, shuffle=False, pad=False),
            collate_fn=mnist.collate,
            num_workers=self.args.num_workers,
            pin_memory=self.device.type == "cuda",
        )
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        hits = torch.zeros((), dtype=torch.float64, device=self.device)
        for inputs, labels in checkpoint.shielded(loader):
            outputs, labels, losses = forward(self.net, inputs, labels, self.device, self.args.amp)
            loss_sum += losses.sum(dtype=torch.float64)
            hits += (outputs.argmax(dim=1) == labels).sum()
        loss_sum, hits = dist.all_reduce(torch.stack([loss_sum, hits])).tolist()
        n = len(self.test_set)
        return loss_sum / n, int(hits), n

    def samples(self, steps):
        """The number of samples trained in `steps` steps: the x-axis of everything that is tracked."""
        return steps * self.args.global_batch_size

    # ---- snapshots ----

    def resume(self):
        """Load the snapshot, if there is one, and begin to track. Returns the step to run next."""
        # DDP arranges its buckets in the first backward. Do that before the first step, as each resumed run does: the
        # buckets decide in which order gradients are summed, and so their last bits.
        checkpoint.rebuild_buckets(self.model, self.loss_of_a_micro_batch)
        epoch = step = 0
        run_id = None
        path = self.args.snapshot_path
        if path:
            # The values come back in the order in which they are named here.
            epoch, step, self.accuracies, run_id = checkpoint.load(
                path, self.model, self.optimizer, self.scheduler, self.settings, accuracies=[], run_id=None
            )
        if (epoch, step) != (0, 0):
            dist.print_primary(f"Resuming from {path} at epoch {epoch + 1}, step {step}", flush=True)
        first_step = epoch * self.steps_per_epoch + step
        self.tracker = tracking.Tracker("mnist_DDP", self.args, self.samples(first_step), run_id)
        return first_step

    def save_snapshot(self, next_step):
        epoch, step = divmod(next_step, self.steps_per_epoch)
        parts = (self.model, self.optimizer, self.scheduler)
        values = {"settings": self.settings, "accuracies": self.accuracies, "run_id": self.tracker.run_id}
        checkpoint.save(self.args.snapshot_path, *parts, epoch=epoch, step=step, **values)

    def loss_of_a_micro_batch(self):
        # A real batch: with --compile, another size would cost another compilation.
        inputs, labels = next(self.batches(first_step=0))
        _, _, losses = forward(self.model, inputs, labels, self.device, self.args.amp)
        return losses.sum()

    # ---- batches that a resumed run repeats exactly ----

    def batches(self, first_step):
        """The micro-batches of this rank, from `first_step` on."""
        loader = DataLoader(
            SeededBatches(self.train_set),
            batch_size=None,  # each item is a whole micro-batch
            sampler=self.micro_batches(first_step),
            num_workers=self.args.num_workers,
            pin_memory=self.device.type == "cuda",
        )
        return checkpoint.shielded(loader)  # its processes do not get a SIGTERM

    def micro_batches(self, first_step):
        """The seed and the indices of each micro-batch of this rank, from `first_step` on.

        The order of the samples depends on --seed and epoch alone, so any number of ranks trains on the same global
        batches, also after a resume. The samples that do not fill a last global batch are left out. They differ from
        epoch to epoch.
        """
        args = self.args
        rank = dist.get_rank()
        for step in range(first_step, self.steps):
            epoch, position = divmod(step, self.steps_per_epoch)
            if step == first_step or position == 0:
                generator = torch.Generator().manual_seed(args.seed + epoch)
                order = torch.randperm(len(self.train_set), generator=generator).tolist()
            start = position * args.global_batch_size
            global_batch = order[start : start + args.global_batch_size]
            share = global_batch[rank :: dist.get_world_size()]
            for k in range(args.grad_accumulation):
                seed = seed_of("augmentation", args.seed, step, k, rank)
                micro_batch = share[k :: args.grad_accumulation]
                yield seed, micro_batch


class SeededBatches(Dataset):
    """A whole batch of `dataset` for each pair (seed, indices). What torch draws in it depends on the seed alone.

    So a run that resumes draws the same numbers as one that was not interrupted, with any number of worker processes.
    """

    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, seed_and_indices):
        seed, indices = seed_and_indices
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if hasattr(self.dataset, "__getitems__"):  # it may give a whole batch
                return mnist.collate(self.dataset.__getitems__(indices))
            return default_collate([self.dataset[index] for index in indices])


def seed_of(*parts):
    """A random seed that depends on all parts: a use of the numbers, and whole numbers."""
    return random.Random(str(parts)).getrandbits(63)


# ---- data, model, loss and optimizer ------------------------------------------------------------------------------


# CHANGE HERE, 1 of 4: the data, and its options in `make_parser`.
def load_datasets(args):
    """Any two Datasets with a length, whose samples are (input, label).

    Every rank calls this. If you download, let one process per machine do it while the others wait, as mnist.load_data
    does. Augment with torch's random numbers: each micro-batch has a seed of its own. A `collate_fn` of your own takes
    the place of mnist.collate and default_collate, in four lines.
    """
    train_set = mnist.load_data(args.data, args.data_dir, train=True, seed=args.seed)
    test_set = mnist.load_data(args.data, args.data_dir, train=False, seed=args.seed)
    return train_set, test_set


# CHANGE HERE, 2 of 4: the model. Any nn.Module.
def make_model():
    return mnist.SimpleCNN()


# CHANGE HERE, 3 of 4: the loss. One number per sample, not their mean, since ranks may have unequal shares.
def forward(model, inputs, labels, device, amp):
    """Outputs, labels and losses of a batch, on `device`. If `inputs` is a dict, move each of its tensors."""
    inputs = inputs.to(device, non_blocking=True)
    labels = labels.to(device, non_blocking=True)
    with torch.autocast(device.type, torch.bfloat16, enabled=amp):
        outputs = model(mnist.normalize(inputs))  # bytes become floats; leave it out if yours are floats already
        losses = F.cross_entropy(outputs, labels, reduction="none")
    return outputs, labels, losses


# CHANGE HERE, 4 of 4: the optimizer. fused=True is faster, but not every optimizer has it.
def make_optimizer(model, lr, steps):
    """The optimizer, and a scheduler that is stepped after each of `steps` steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=True)

    def cosine(step):
        """The learning rate of `step`, as a fraction of --lr."""
        return (1 + math.cos(math.pi * step / steps)) / 2

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)


# ---- options ------------------------------------------------------------------------------------------------------


def make_parser(doc):
    """The options of an experiment, wherever it runs."""
    parser = options.ArgumentParser(doc)
    count = options.whole_number(1)
    mnist.add_data_options(parser)
    parser.add_argument("--global-batch-size", type=count, default=128, help="samples per step, over all processes")
    parser.add_argument("--grad-accumulation", type=count, default=1, help="micro-batches per step and process")
    parser.add_argument("--test-batch-size", type=count, default=1000, help="samples per process and evaluation batch")
    parser.add_argument("--num-workers", type=options.whole_number(0), default=0, help="loading processes per process")
    parser.add_argument("--epochs", type=count, default=5, help="passes over the training data")
    parser.add_argument("--lr", type=options.positive_number, default=0.05, help="learning rate of the first step")
    parser.add_argument("--clip", type=options.number(0), default=0.0, help="largest gradient norm; 0 does not clip")
    parser.add_argument("--amp", action="store_true", help="compute in bfloat16 where it is safe")
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    parser.add_argument("--seed", type=options.whole_number(0, 2**32 - 1), default=0, help="random seed")
    parser.add_argument(
        "--log-interval", type=count, default=100, help="print every N steps of an epoch, and at its end"
    )
    parser.add_argument(
        "--save-every", type=count, default=500, help="save a snapshot every N steps of an epoch, and at its end"
    )
    parser.add_argument("--wandb", action="store_true", help="track with Weights & Biases")
    parser.add_argument("--tensorboard", help="track with TensorBoard, in this folder")
    return parser


def parse_args(words=None):
    parser = make_parser(__doc__)
    parser.add_argument("--snapshot-path", help="file to save snapshots to, and to resume from (default: none)")
    parser.add_argument("--output-dir", default=".", help="folder for mnist_cnn.pt")
    parser.add_nproc()
    args = parser.parse_args(words)
    micro_batches = args.nproc * args.grad_accumulation
    if args.global_batch_size < micro_batches:
        how = f"the micro-batches of {args.nproc} x --grad-accumulation {args.grad_accumulation}"
        parser.error(f"argument --global-batch-size: {args.global_batch_size} is less than {micro_batches}, {how}")
    if args.wandb:
        check_installed("wandb")
    if args.tensorboard is not None:
        check_installed("tensorboard")
        checkpoint.check_writable("--tensorboard", os.path.join(args.tensorboard, "events"))
    checkpoint.check_writable("--output-dir", os.path.join(args.output_dir, "mnist_cnn.pt"))
    if args.snapshot_path is not None:
        checkpoint.check_writable("--snapshot-path", args.snapshot_path)
    return args


def check_installed(package):
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # W&B makes a folder `wandb`, a package without an origin
        sys.exit(f"--{package}: {package} is not installed: pip install -r requirements-tracking.txt")


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    """Train and evaluate, then write the weights and the accuracies."""
    dist.init_process_group()
    watch.start()  # if the job stands still, one line says where each rank stands
    device = dist.get_device()
    dist.print_primary(f"Training on {world_size} x {device.type}, global batch {args.global_batch_size}", flush=True)
    trainer = Trainer(args, device)
    trainer.train()
    if dist.is_primary():
        weights = {name: tensor.cpu() for name, tensor in trainer.net.state_dict().items()}  # load it without a GPU
        with checkpoint.atomic(os.path.join(args.output_dir, "mnist_cnn.pt")) as file:
            torch.save({"model": weights, "accuracies": trainer.accuracies}, file)
    trainer.tracker.close()


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
