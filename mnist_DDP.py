"""A complete experiment: DDP as one runs it for a result, with hyperparameters, evaluation, tracking and artefacts.

Every process trains on its share of the digits and evaluates on its share of the test images: the accuracy is that of
all of them, each counted once. Choose min_DDP.py to learn DDP, this file as the beginning of a project of your own,
flyte_workflow.py to run it as the task of an orchestrator, and multigpu_torchrun.py if it must survive a crash.

Cost per process, for P float32 parameters on N processes trained by SGD with momentum: 4·P bytes of parameters, 4·P of
gradients and 4·P of momentum, whatever N. Each optimizer step sends 2·(N-1)/N · 4·P bytes. --grad-accumulation K does
so for K batches at once: the step of a batch K times as large, in the memory of one.

    python mnist_DDP.py                                           # all visible GPUs; two CPU processes without one
    python mnist_DDP.py --data mnist                              # the real MNIST, 99 % after five epochs
    python mnist_DDP.py --grad-accumulation 4 --amp               # four batches per step, computed in bfloat16
    WANDB_MODE=offline python mnist_DDP.py --wandb                # tracked by Weights & Biases, without an account
    python mnist_DDP.py --tensorboard runs --output-dir results   # tracked by TensorBoard: tensorboard --logdir runs
    torchrun --standalone --nproc-per-node 2 mnist_DDP.py         # processes started by torchrun

It prints `Train Epoch: 1 [12800/60000 (21%)]	loss=0.1234`, the average loss of all processes' samples since the line
before, and after each epoch `test_loss=0.0512 accuracy=0.9837 (9837/10000)`. Last it writes mnist_cnn.pt, the plain
model's state_dict, and mnist_cnn_accuracies.json, the list of the accuracies after each epoch.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import sys

import torch
from torch.utils.data import DataLoader

import checkpoint
import distributed as dist
import mnist
import options

# ---- hyperparameters, which are the command line ------------------------------------------------------------------


def below_one(text):
    """An argparse `type`: a number from 0 to below 1."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")


def option(default, help, **how):
    """A field of `Hyperparameters` and, as its metadata, how argparse's add_argument is called for it."""
    how = {"action": "store_true"} if default is False else how
    return dataclasses.field(default=default, metadata={"help": help, **how})


@dataclasses.dataclass
class Hyperparameters:
    """What is trained and how it is watched. Raises ValueError for a value that the command line would refuse."""

    backend: str = option("auto", "auto is nccl for GPUs and gloo for CPUs", choices=("auto", "nccl", "gloo"))
    momentum: float = option(0.9, "of SGD", type=below_one)
    batch_size: int = option(64, "samples per process, in one forward pass", type=options.whole_number(1))
    test_batch_size: int = option(1000, "the same, for the evaluation", type=options.whole_number(1))
    epochs: int = option(5, "passes over the data", type=options.whole_number(1))
    lr: float = option(
        0.05, "learning rate of SGD at first; it falls to 0 as a cosine does", type=options.positive_number
    )
    log_interval: int = option(100, "steps between two lines", type=options.whole_number(1))
    seed: int = option(0, "of the drawn digits, the weights and the order of samples", type=options.seed_number)
    grad_accumulation: int = option(1, "batches per step", metavar="K", type=options.whole_number(1))
    amp: bool = option(False, "compute in bfloat16 where it is safe")
    wandb: bool = option(False, "track with Weights & Biases")
    tensorboard: str = option("", "track with TensorBoard, in this folder", metavar="DIR")
    data: str = "synthetic"  # this and the next as mnist.add_data_options has them
    data_dir: str = "data"

    def __post_init__(self):  # an orchestrator fills it in without argparse
        for field in dataclasses.fields(self):
            value, how = getattr(self, field.name), field.metadata
            try:
                how.get("type", str)(str(value))
            except (argparse.ArgumentTypeError, ValueError) as error:
                raise ValueError(f"{field.name}: {error}") from None
            if value not in how.get("choices", [value]):
                raise ValueError(f"{field.name}: {value!r} is not one of {', '.join(how['choices'])}")


def parse_hyperparameters(parser):
    """Add an option for every field of `Hyperparameters`, and parse; returns them, and all options."""
    fields = dataclasses.fields(Hyperparameters)
    for field in fields:
        if field.metadata:
            parser.add_argument(f"--{field.name.replace('_', '-')}", default=field.default, **field.metadata)
    mnist.add_data_options(parser)
    args = parser.parse_args()
    if args.backend == "nccl" and not torch.cuda.device_count():
        parser.error("argument --backend: 'nccl' needs a GPU, and none is visible: choose auto or gloo")
    for package in (name for name in ("wandb", "tensorboard") if getattr(args, name)):
        found = importlib.util.find_spec(package)
        if not (found and found.origin):  # without an origin it is a folder of that name, as wandb itself makes one
            sys.exit(f"--{package}: {package} is not installed: pip install -r requirements-tracking.txt")
    if args.tensorboard:
        checkpoint.check_writable("--tensorboard", args.tensorboard)
    return Hyperparameters(**{field.name: getattr(args, field.name) for field in fields}), args


def parse_args():
    parser = options.ArgumentParser(__doc__)
    parser.add_argument("--output-dir", default=".", help="where to write the weights and accuracies")
    parser.add_nproc()
    hp, args = parse_hyperparameters(parser)
    checkpoint.check_writable("--output-dir", args.output_dir)
    return hp, args


# ---- training -----------------------------------------------------------------------------------------------------


def train_epoch(model, loader, optimizer, scheduler, device, hp, epoch, tracker):
    model.train()
    size, steps = len(loader.dataset), -(-len(loader) // hp.grad_accumulation)
    loss_sum, count = torch.zeros((), dtype=torch.float64, device=device), 0  # on the device: no wait for it in a step
    batches = iter(loader)
    for step in range(1, steps + 1):
        group = list(itertools.islice(batches, hp.grad_accumulation))  # the last one of an epoch may have fewer
        n = sum(len(labels) for _, labels in group)
        optimizer.zero_grad()
        for i, (images, labels) in enumerate(group, 1):
            model.require_backward_grad_sync = i == len(group)  # DDP adds the others' up and sends nothing
            _, _, losses = mnist.forward(model, images, labels, device, hp.amp)
            (losses.sum() / n).backward()  # so that all of them make the mean of the group's samples
            loss_sum += losses.detach().sum()
        count += n
        optimizer.step()
        scheduler.step()

        if step % hp.log_interval == 0 or step == steps:
            total, n = dist.all_reduce(torch.stack([loss_sum, loss_sum.new_tensor(count)])).tolist()
            loss_sum, count = torch.zeros_like(loss_sum), 0
            seen = min(step * hp.grad_accumulation * hp.batch_size * dist.get_world_size(), size)
            line = f"Train Epoch: {epoch} [{seen}/{size} ({seen / size:.0%})]\tloss={total / n:.4f}"
            dist.print_primary(line, flush=True)
            tracker.log((epoch - 1) * size + seen, loss=total / n, epoch=epoch)


def train_mnist(rank, world_size, hp, output_dir="."):
    """Train, evaluate after every epoch, and write both files to `output_dir`. `rank` is the local one."""
    dist.init_process_group(backend=None if hp.backend == "auto" else hp.backend)
    device = dist.get_device()
    global_batch = world_size * hp.batch_size * hp.grad_accumulation
    dist.print_primary(f"Training on {world_size} x {device.type}, global batch {global_batch}", flush=True)

    loader, test_loader = mnist.make_loaders(hp, device)
    torch.manual_seed(hp.seed + dist.get_rank())  # dropout should differ; DDP starts all from rank 0's weights
    net = mnist.SimpleCNN().to(device)
    model = dist.prepare_ddp_model(net, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=hp.lr, momentum=hp.momentum, fused=True)
    steps = hp.epochs * -(-len(loader) // hp.grad_accumulation)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    tracker, accuracies = Tracker(hp, net), []

    for epoch in range(1, hp.epochs + 1):
        loader.sampler.set_epoch(epoch)  # another order in each epoch, the same on every rank
        train_epoch(model, loader, optimizer, scheduler, device, hp, epoch, tracker)
        test_loss, hits, n = mnist.evaluate(net, test_loader, device, hp.amp)
        accuracies.append(hits / n)
        dist.print_primary(f"test_loss={test_loss:.4f} accuracy={hits / n:.4f} ({hits}/{n})", flush=True)
        tracker.log(epoch * len(loader.dataset), test_loss=test_loss, accuracy=hits / n, epoch=epoch)
        tracker.log_predictions(epoch * len(loader.dataset), net, test_loader.dataset, device)
    if dist.is_primary():
        try:
            tracker.close()
        finally:
            save(output_dir, net, accuracies)


def save(folder, net, accuracies):
    """Write both files to `folder`, or neither. Raises SystemExit with one line if it cannot."""
    with checkpoint.atomic(os.path.join(folder, "mnist_cnn_accuracies.json")) as results:
        results.write(json.dumps(accuracies).encode())
        results.flush()
        os.fsync(results.fileno())  # a full disk is met before the other file takes its place
        with checkpoint.atomic(os.path.join(folder, "mnist_cnn.pt")) as weights:
            torch.save({name: tensor.cpu() for name, tensor in net.state_dict().items()}, weights)  # needs no GPU


# ---- tracking -----------------------------------------------------------------------------------------------------


class Tracker:
    """What --wandb and --tensorboard log, by the primary rank. Without them, and on other ranks, it does nothing."""

    def __init__(self, hp, net):
        self.run = self.writer = None
        if hp.wandb and dist.is_primary():
            import wandb

            try:
                self.run = wandb.init(project="mnist_DDP", config=dataclasses.asdict(hp))
            except wandb.Error as error:
                reason = str(error).partition("\n")[0]
                sys.exit(f"--wandb: {reason}: `wandb login` once, or set WANDB_MODE=offline")
            self.run.define_metric("*", step_metric="samples")
            self.run.watch(net, log="gradients", log_freq=hp.log_interval * hp.grad_accumulation)
        if hp.tensorboard and dist.is_primary():
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(hp.tensorboard)

    def log(self, samples, **scalars):
        """Log what is known after `samples` samples of training."""
        if self.run:
            self.run.log({"samples": samples, **scalars})
        if self.writer:
            for name, value in scalars.items():
                self.writer.add_scalar(name, value, samples)

    @torch.no_grad()
    def log_predictions(self, samples, net, test_set, device, n=10 * 32):
        """Log the first `n` test images, with guess, truth and class scores."""
        if not (self.run or self.writer):
            return
        images, labels = next(iter(DataLoader(test_set, n, collate_fn=mnist.collate)))
        if self.run:
            import wandb

            scores = net(mnist.normalize(images.to(device))).softmax(dim=1).cpu()
            table = wandb.Table(columns=["image", "guess", "truth", *(f"score_{digit}" for digit in range(10))])
            for image, label, row in zip(images, labels.tolist(), scores, strict=True):
                table.add_data(wandb.Image(image[0].numpy()), row.argmax().item(), label, *row.tolist())
            self.run.log({"samples": samples, "test_predictions": table})
        if self.writer:
            self.writer.add_images("test_images", images, samples)

    def close(self):
        if self.run:
            self.run.finish()
        if self.writer:
            try:
                self.writer.close()
            except OSError as error:
                sys.exit(f"--tensorboard: cannot write to {os.path.abspath(self.writer.log_dir)}: {error.strerror}")


if __name__ == "__main__":
    cli_hp, cli_args = parse_args()
    dist.launch(train_mnist, cli_hp, cli_args.output_dir, nprocs=cli_args.nproc)
