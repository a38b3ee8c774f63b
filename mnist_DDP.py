"""The file to start from: a complete experiment with DDP, to copy for a data set and a model of your own.

It classifies images. Four places say CHANGE HERE: the data, the model, the loss, the optimizer. For another task also
change `evaluate`, which counts correct predictions, and `log_predictions`, which tracks them. Keep the rest. All
processes train and evaluate, gradients are accumulated, the run resumes from its last snapshot, and it is tracked. The
number of processes changes the speed and not the result, except for rounding, dropout, BatchNorm and random
augmentation. Each step takes one global batch of B samples of a shuffled order. Each process takes its share, and
splits it into K micro-batches, where K is --grad-accumulation:

    2 processes, --grad-accumulation 2

    rank 0   forward backward   forward backward --+-- all-reduce --- clip --- optimizer --- next step
    rank 1   forward backward   forward backward --+
             (no_sync)          on every rank the gradient is  g = 1/B * sum of the gradients of all B samples

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
after each epoch `test_loss=0.0588 accuracy=0.9864 (9864/10000)`. At the end it writes mnist_cnn.pt, the state_dict of
the plain model, and mnist_cnn_accuracies.json, the accuracy after each epoch.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import sys

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

import checkpoint
import distributed as dist
import mnist
import options
import tracking
import watch

# ---- data, model, loss and optimizer ------------------------------------------------------------------------------


# CHANGE HERE, 1 of 4: the data, in `load_datasets` and `prepare`.
def load_datasets(hp):
    """Any two Datasets with a length, whose samples are (input, label).

    Every rank calls this. If you download, let one process per machine do it while the others wait, as mnist.load_data
    does. Augment with torch's random numbers: each micro-batch has a seed of its own. A `collate_fn` of your own takes
    the place of mnist.collate, in three lines.
    """
    train_set = mnist.load_data(hp.data, hp.data_dir, train=True, seed=hp.seed)
    test_set = mnist.load_data(hp.data, hp.data_dir, train=False, seed=hp.seed)
    return train_set, test_set


def prepare(inputs):
    """The model's input from a batch of the datasets' inputs, on the device. Here bytes become normalized floats."""
    return mnist.normalize(inputs)  # if your inputs are ready for the model, return them unchanged


def make_model():
    # CHANGE HERE, 2 of 4: the model. Any nn.Module.
    return mnist.SimpleCNN()


def forward(model, inputs, labels, device, amp):
    """Outputs, labels and losses of a batch, on `device`. If `inputs` is a dict, move each of its tensors."""
    inputs = inputs.to(device, non_blocking=True)
    labels = labels.to(device, non_blocking=True)
    autocast = contextlib.nullcontext()
    if amp:
        autocast = torch.autocast(device.type, torch.bfloat16)
    with autocast:
        # CHANGE HERE, 3 of 4: the loss. One number per sample, not their mean, since ranks may have unequal shares.
        outputs = model(prepare(inputs))
        losses = F.cross_entropy(outputs, labels, reduction="none")
    return outputs, labels, losses


def make_optimizer(model, hp, steps):
    """The optimizer, and a scheduler that is stepped after each of `steps` steps."""
    # CHANGE HERE, 4 of 4: the optimizer. fused=True is faster, but not every optimizer has it.
    optimizer = torch.optim.SGD(model.parameters(), lr=hp.lr, momentum=hp.momentum, fused=True)

    def factor(step):
        """The learning rate of `step`, as a fraction of --lr."""
        if step < hp.warmup:
            return (step + 1) / hp.warmup
        progress = (step - hp.warmup) / max(1, steps - hp.warmup)
        return (1 + math.cos(math.pi * progress)) / 2

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


# ---- training -----------------------------------------------------------------------------------------------------


class Trainer:
    def __init__(self, hp, device, snapshot_path):
        self.hp = hp
        self.device = device
        self.snapshot_path = snapshot_path
        if snapshot_path:
            self.preemption = checkpoint.Preemption()
        self.train_set, self.test_set = load_datasets(hp)
        self.steps = len(self.train_set) // hp.global_batch_size  # per epoch
        if self.steps == 0:
            line = f"--global-batch-size {hp.global_batch_size} is more than the {len(self.train_set)} training samples"
            raise dist.DistributedError(line)
        torch.manual_seed(hp.seed)
        self.net = make_model().to(device)
        self.model = dist.prepare_ddp_model(self.net, gradient_as_bucket_view=True)  # saves a copy of the gradients
        if hp.compile:
            self.model.compile()  # after DDP: torch then splits the graph where DDP's buckets end
        self.optimizer, self.scheduler = make_optimizer(self.net, hp, hp.epochs * self.steps)
        self.tracker = tracking.Tracker("mnist_DDP", hp.wandb, hp.tensorboard, hp.watch_gradients)

    def train_step(self, batches, epoch, step):
        """Train on the next global batch. Returns the sum of the losses of this rank's share."""
        hp = self.hp
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.optimizer.zero_grad()
        for k in range(hp.grad_accumulation):
            inputs, labels = next(batches)
            # Dropout differs between ranks.
            seed_generators(self.device, seed_of(hp.seed, epoch, step, k, dist.get_rank(), DROPOUT))
            is_last = k == hp.grad_accumulation - 1
            sync = contextlib.nullcontext()
            if not is_last and dist.get_world_size() > 1:
                sync = self.model.no_sync()  # only the last micro-batch needs the all-reduce
            with sync:  # around forward too, or every backward sends
                _, _, losses = forward(self.model, inputs, labels, self.device, hp.amp)
                # DDP divides the sum over all ranks by their number. So this makes the mean over the global batch.
                loss = losses.sum() * dist.get_world_size() / hp.global_batch_size
                loss.backward()
            loss_sum += losses.detach().sum()
        if hp.clip > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), hp.clip)
        self.optimizer.step()
        self.scheduler.step()
        return loss_sum

    def train_epoch(self, epoch, first_step):
        """Returns whether a SIGTERM came after the last step. After another step it saves and leaves."""
        self.model.train()
        n = len(self.train_set)
        loader = DataLoader(
            SeededBatches(self.train_set),
            batch_size=None,  # each item is a whole micro-batch
            sampler=micro_batches(n, self.hp, epoch, first_step),
            num_workers=self.hp.num_workers,
            pin_memory=self.device.type == "cuda",
        )
        batches = checkpoint.shielded(loader)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)  # on the device, to avoid a sync every step
        last_line = first_step
        for step in range(first_step + 1, self.steps + 1):
            loss_sum += self.train_step(batches, epoch, step - 1)
            preempted = bool(self.snapshot_path) and self.preemption.agreed()  # has any process received SIGTERM?
            saves = bool(self.snapshot_path) and (preempted or step % self.hp.save_every == 0) and step < self.steps
            # Print before each snapshot too: then a resumed run averages over the same steps.
            if step % self.hp.log_interval == 0 or step == self.steps or saves:
                samples = (step - last_line) * self.hp.global_batch_size
                loss = dist.all_reduce(loss_sum).item() / samples
                loss_sum.zero_()
                last_line = step
                seen = step * self.hp.global_batch_size
                line = f"Train Epoch: {epoch + 1} [{seen}/{n} ({seen / n:.0%})]\tloss={loss:.4f}"
                dist.print_primary(line, flush=True)
                lr = self.scheduler.get_last_lr()[0]
                self.tracker.log(self.samples(epoch, step), loss=loss, lr=lr, epoch=epoch + 1)
            if saves:
                self.save_snapshot(epoch, step)
            if preempted and saves:
                self.leave()
        return preempted

    def train(self):
        """Returns the accuracy after each epoch."""
        epoch, step = self.resume()
        self.tracker.start(self.net, self.hp, self.samples(epoch, step))
        while epoch < self.hp.epochs:
            preempted = self.train_epoch(epoch, step)
            dist.check_in_sync(self.net)  # stops if the weights of two processes differ
            self.test_epoch(epoch)
            epoch += 1
            step = 0
            self.save_snapshot(epoch, step)
            if preempted and epoch < self.hp.epochs:
                self.leave()
        return self.tracker.accuracies

    def leave(self):
        self.tracker.close()
        self.preemption.leave()

    def test_epoch(self, epoch):
        test_loss, hits, n = self.evaluate()
        accuracy = hits / n
        dist.print_primary(f"test_loss={test_loss:.4f} accuracy={accuracy:.4f} ({hits}/{n})", flush=True)
        samples = self.samples(epoch + 1, 0)
        self.tracker.accuracies.append(accuracy)
        self.tracker.log(samples, test_loss=test_loss, accuracy=accuracy, epoch=epoch + 1)
        if self.tracker.is_active():
            self.log_predictions(samples)

    @torch.no_grad()
    def evaluate(self):
        """Mean loss, correct predictions and samples. Over all processes each sample counts once."""
        self.net.eval()
        dist.sync_params(self.net.buffers())  # BatchNorm's differ between ranks; rank 0's are saved
        loader = DataLoader(
            self.test_set,
            self.hp.test_batch_size,
            sampler=dist.data_sampler(self.test_set, True, shuffle=False, pad=False),
            collate_fn=mnist.collate,
            num_workers=self.hp.num_workers,
            pin_memory=self.device.type == "cuda",
        )
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        hits = torch.zeros((), dtype=torch.float64, device=self.device)
        for inputs, labels in checkpoint.shielded(loader):
            outputs, labels, losses = forward(self.net, inputs, labels, self.device, self.hp.amp)
            loss_sum += losses.sum(dtype=torch.float64)
            hits += (outputs.argmax(dim=1) == labels).sum()
        loss_sum, hits = dist.all_reduce(torch.stack([loss_sum, hits])).tolist()
        n = len(self.test_set)
        return loss_sum / n, int(hits), n

    @torch.no_grad()
    def log_predictions(self, samples, n=320):
        """Log the first `n` test images with their labels and the model's scores. Rank 0 alone calls it."""
        images, labels = next(iter(DataLoader(self.test_set, n, collate_fn=mnist.collate)))
        outputs, _, _ = forward(self.net, images, labels, self.device, self.hp.amp)
        self.tracker.log_predictions(samples, images, labels, outputs.float().softmax(dim=1).cpu())

    def samples(self, epoch, step):
        """The number of samples trained before `step` of `epoch`: the x-axis of everything that is tracked."""
        return (epoch * self.steps + step) * self.hp.global_batch_size

    def resume(self):
        """Load the snapshot, if there is one. Returns the epoch and the step to run next."""
        # DDP arranges its buckets in the first backward. Do that before the first step, as each resumed run does: the
        # buckets decide in which order gradients are summed, and so their last bits.
        checkpoint.rebuild_buckets(self.model, self.loss_of_a_micro_batch)
        if not self.snapshot_path:
            return 0, 0
        parts = {"scheduler": self.scheduler, "tracker": self.tracker}
        epoch, step = checkpoint.load(self.snapshot_path, self.model, self.optimizer, **parts)
        if self.scheduler.last_epoch != epoch * self.steps + step:
            raise dist.DistributedError(
                f"{self.snapshot_path} was saved with another --global-batch-size or another number of samples: "
                "use the same, or choose another path"
            )
        if (epoch, step) != (0, 0):
            dist.print_primary(f"Resuming from {self.snapshot_path} at epoch {epoch + 1}, step {step}", flush=True)
        return epoch, step

    def loss_of_a_micro_batch(self):
        # A real one: with --compile the model would be compiled for any other size too.
        seed, indices = next(micro_batches(len(self.train_set), self.hp, epoch=0, first_step=0))
        inputs, labels = SeededBatches(self.train_set)[seed, indices]
        _, _, losses = forward(self.model, inputs, labels, self.device, self.hp.amp)
        return losses.sum()

    def save_snapshot(self, epoch, step):
        if self.snapshot_path:
            parts = {"scheduler": self.scheduler, "tracker": self.tracker}
            checkpoint.save(self.snapshot_path, self.model, self.optimizer, epoch=epoch, step=step, **parts)


# ---- batches that a resumed run repeats exactly -------------------------------------------------------------------


class SeededBatches(Dataset):
    """A whole batch of `dataset` for each pair (seed, indices). What torch draws in it depends on the seed alone.

    A run that resumes within an epoch then draws the same numbers as one that was not interrupted, with any number of
    worker processes. Give the DataLoader a list of such pairs as its sampler, and `batch_size=None`.
    """

    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, seed_and_indices):
        seed, indices = seed_and_indices
        with torch.random.fork_rng(devices=[]):  # without worker processes, dropout draws from this generator too
            torch.default_generator.manual_seed(seed)
            if hasattr(self.dataset, "__getitems__"):  # it may give a whole batch
                batch = self.dataset.__getitems__(indices)
            else:
                batch = [self.dataset[index] for index in indices]
        if isinstance(batch, list):
            batch = default_collate(batch)
        return batch


# The last number of a seed: its use.
AUGMENTATION = 0
DROPOUT = 1


def seed_of(*numbers):
    """A random seed that depends on all these whole numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def seed_generators(device, seed):
    """Seed the random numbers of the CPU and of `device`.

    torch.manual_seed also notes the seed for every other kind of device, which takes 0.2 ms.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def micro_batches(n, hp, epoch, first_step):
    """The seed and the indices of each micro-batch of this rank, from `first_step` of `epoch` on.

    The order of the `n` samples depends on --seed and epoch alone, so any number of ranks trains on the same global
    batches, also after a resume. The samples that do not fill a last global batch are left out. They differ from epoch
    to epoch.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    generator = torch.Generator().manual_seed(hp.seed + epoch)
    order = torch.randperm(n, generator=generator).tolist()
    for step in range(first_step, n // hp.global_batch_size):
        start = step * hp.global_batch_size
        global_batch = order[start : start + hp.global_batch_size]
        share = global_batch[rank::world_size]
        for k in range(hp.grad_accumulation):
            seed = seed_of(hp.seed, epoch, step, k, rank, AUGMENTATION)
            yield seed, share[k :: hp.grad_accumulation]


# ---- weights and accuracies ---------------------------------------------------------------------------------------


def save_results(folder, net, accuracies):
    """Write the weights and the accuracies to `folder`. Raises DistributedError on every rank if rank 0 cannot."""
    error = None
    if dist.is_primary():
        try:
            write_results(folder, net, accuracies)
        except dist.DistributedError as failure:
            error = str(failure)
    dist.raise_on_all(error)


def write_results(folder, net, accuracies):
    """A failure to write leaves both old files. A kill between the two renames leaves one new and one old file."""
    weights = {name: tensor.cpu() for name, tensor in net.state_dict().items()}  # to be loaded without a GPU
    with checkpoint.atomic(os.path.join(folder, "mnist_cnn_accuracies.json")) as results_file:
        results_file.write(json.dumps(accuracies).encode())
        results_file.flush()
        os.fsync(results_file.fileno())  # a full disk is noticed here, before the other file is replaced
        with checkpoint.atomic(os.path.join(folder, "mnist_cnn.pt")) as weights_file:
            torch.save(weights, weights_file)


# ---- hyperparameters: one line is one option of the command line --------------------------------------------------


def option(default, check, help):
    """A field of `Hyperparameters`: its default, the function that checks it (an argparse `type`), and its help."""
    return dataclasses.field(default=default, metadata={"check": check, "help": help})


def one_of(*names):
    """An argparse `type`: one of `names`."""

    def parse(text):
        if text in names:
            return text
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")

    return parse


@dataclasses.dataclass
class Hyperparameters:
    """The settings of a run. Raises ValueError for a number that is out of its range, or an unknown choice.

    Values are checked as if they came from the command line. Only the command line checks that GPUs and packages are
    there.
    """

    data: str = option("synthetic", one_of(*mnist.DATA_SETS), "synthetic digits, or mnist, downloaded once")
    data_dir: str = option("data", str, "folder that holds MNIST, or to which it is downloaded")
    global_batch_size: int = option(128, options.whole_number(1), "samples per step, over all processes")
    grad_accumulation: int = option(1, options.whole_number(1), "micro-batches per step and process")
    test_batch_size: int = option(1000, options.whole_number(1), "samples per process and batch of the evaluation")
    num_workers: int = option(0, options.whole_number(0), "processes that load data, per training process")
    epochs: int = option(5, options.whole_number(1), "passes over the training data")
    lr: float = option(0.05, options.positive_number, "largest learning rate; it falls to 0 along a cosine")
    warmup: int = option(0, options.whole_number(0), "steps in which the learning rate rises to --lr")
    momentum: float = option(0.9, options.number(0, below=1), "momentum of SGD")
    clip: float = option(0.0, options.number(0), "clip the global gradient norm to this; 0 does not clip")
    amp: bool = option(False, bool, "compute in bfloat16 where it is safe")
    compile: bool = option(False, bool, "compile the model with torch.compile")
    seed: int = option(0, options.whole_number(0, 2**32 - 1), "random seed")
    log_interval: int = option(100, options.whole_number(1), "print every N steps")
    save_every: int = option(500, options.whole_number(1), "save a snapshot every N steps, and after each epoch")
    backend: str = option("auto", one_of("auto", "nccl", "gloo"), "auto, nccl or gloo; auto is nccl for GPUs")
    wandb: bool = option(False, bool, "track with Weights & Biases")
    tensorboard: str = option("", str, "track with TensorBoard, in this folder")
    watch_gradients: bool = option(False, bool, "with --wandb, log histograms of all gradients, which takes time")

    def __post_init__(self):
        """Check each value by itself: an orchestrator fills them in without a command line."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            check = field.metadata["check"]
            try:
                check(str(value))
            except argparse.ArgumentTypeError as error:
                raise ValueError(f"{field.name}: {error}") from None


def parse_hyperparameters(parser):
    """Add an option for every field of `Hyperparameters`, and parse. Returns the hyperparameters and all options."""
    fields = dataclasses.fields(Hyperparameters)
    for field in fields:
        name = "--" + field.name.replace("_", "-")
        help = field.metadata["help"]
        if field.type is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default, help=help)
        else:
            parser.add_argument(name, type=field.metadata["check"], default=field.default, help=help)
    args = parser.parse_args()
    hp = Hyperparameters(**{field.name: getattr(args, field.name) for field in fields})
    if hp.backend == "nccl" and not torch.cuda.device_count():
        parser.error("argument --backend: 'nccl' needs a GPU, and none is visible: choose auto or gloo")
    if hp.wandb:
        check_installed("wandb")
    if hp.tensorboard:
        check_installed("tensorboard")
        checkpoint.check_writable("--tensorboard", os.path.join(hp.tensorboard, "events"))
    return hp, args


def check_installed(package):
    spec = importlib.util.find_spec(package)
    is_folder = spec is not None and spec.origin is None  # W&B makes a folder `wandb`, which Python takes for a package
    if spec is None or is_folder:
        sys.exit(f"--{package}: {package} is not installed: pip install -r requirements-tracking.txt")


def parse_args():
    parser = options.ArgumentParser(__doc__)
    parser.add_nproc()
    parser.add_argument("--output-dir", default=".", help="folder for the weights and the accuracies")
    parser.add_argument(
        "--snapshot-path",
        help="file to save snapshots to, and to resume from (default: no snapshots)",
    )
    hp, args = parse_hyperparameters(parser)
    problem = batch_size_problem(hp, args.nproc)
    if problem:
        parser.error(f"argument --global-batch-size: {problem}")
    checkpoint.check_writable("--output-dir", os.path.join(args.output_dir, "mnist_cnn.pt"))
    if args.snapshot_path is not None:
        checkpoint.check_writable("--snapshot-path", args.snapshot_path)
    return hp, args


def batch_size_problem(hp, world_size):
    """Why the global batch is too small, in a line; None if it is not."""
    micro_batches = world_size * hp.grad_accumulation
    if hp.global_batch_size >= micro_batches:
        return None
    return (
        f"{hp.global_batch_size} is less than {micro_batches}, "
        f"the micro-batches of {world_size} x --grad-accumulation {hp.grad_accumulation}"
    )


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, hp, output_dir=".", snapshot_path=None):
    """Train and evaluate, then write the weights and the accuracies to `output_dir`."""
    problem = batch_size_problem(hp, world_size)
    if problem:
        raise dist.DistributedError(f"global_batch_size: {problem}")
    backend = hp.backend
    if backend == "auto":
        backend = None
    dist.init_process_group(backend=backend)
    watch.start()  # if the job stands still, one line says where each rank stands
    device = dist.get_device()
    line = f"Training on {world_size} x {device.type}, global batch {hp.global_batch_size}"
    dist.print_primary(line, flush=True)

    trainer = Trainer(hp, device, snapshot_path)
    accuracies = trainer.train()
    save_results(output_dir, trainer.net, accuracies)
    trainer.tracker.close()


if __name__ == "__main__":
    cli_hp, cli_args = parse_args()
    dist.launch(main_worker, cli_hp, cli_args.output_dir, cli_args.snapshot_path, nprocs=cli_args.nproc)
