"""The file to start from: a complete experiment with DDP, to copy for a data set and a model of your own.

It classifies images. All processes train and evaluate, gradients are accumulated, the run resumes from its last
snapshot, and it is tracked. The number of processes changes the speed and not the result, except for rounding, dropout,
BatchNorm and random augmentation. Each step takes one global batch of B samples of a shuffled order. Each process takes
its share, and splits it into K micro-batches, where K is --accumulate:

    2 processes, --accumulate 2

    rank 0   forward backward   forward backward --+-- all-reduce --- clip --- optimizer --- next step
    rank 1   forward backward   forward backward --+-- all-reduce --- clip --- optimizer --- next step
             (no_sync)          on every rank the gradient is  g = 1/B * sum of the gradients of all B samples

What you change stands first, under CHANGE HERE: data, model, loss, metric and optimizer. Keep the rest. Choose
min_DDP.py to learn DDP, flyte_workflow.py to run this experiment as the task of an orchestrator, and
multinode_torchrun.py for machines that come and go.

Cost per process, for P float32 parameters trained by SGD with momentum on N processes: 12·P bytes for parameters,
gradients and momentum, and the activations of one micro-batch. Each step sends 2·(N-1)/N · 4·P bytes, for any K.

    python mnist_DDP.py                                           # all visible GPUs; on the CPU add --nproc 2
    python mnist_DDP.py --snapshot-path snapshot.pt               # save snapshots; the same command again resumes
    python mnist_DDP.py --data mnist                              # the real MNIST, 99 % after five epochs
    python mnist_DDP.py --accumulate 4 --bf16 --compile           # four micro-batches per step, bfloat16, compiled
    WANDB_MODE=offline python mnist_DDP.py --wandb                # Weights & Biases, without an account
    python mnist_DDP.py --tensorboard runs --output runs/cnn.pt   # TensorBoard: tensorboard --logdir runs
    torchrun --standalone --nproc-per-node 2 mnist_DDP.py         # processes started by torchrun

At the end it writes mnist_cnn.pt, the state_dict of the plain model, and mnist_cnn_accuracies.json and
mnist_cnn_losses.json, lists of what the test gave after each epoch.
"""

import contextlib
import json
import math
import os
import random

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

import checkpoint
import distributed as dist
import mnist
import options
import tracking
import watch

# ---- CHANGE HERE: data, model, loss, metric, optimizer ------------------------------------------------------------


def load_datasets(args):
    """Any two Datasets with a length, whose samples are (input, label). Change their options in `make_parser` too.

    Every rank calls this. If you download, let one process per machine do it while the others wait, as mnist.load_data
    does. Augment with torch's random numbers: each micro-batch has a seed of its own. A `collate_fn` of your own takes
    the place of mnist.collate and default_collate, in four lines.
    """
    # A folder for each class, with images of any size and colour:
    # from torchvision import datasets, transforms
    # steps = [transforms.Grayscale(), transforms.Resize((28, 28)), transforms.PILToTensor()]
    # folders = [datasets.ImageFolder(folder, transforms.Compose(steps)) for folder in ("images/train", "images/test")]
    # return folders
    train_set = mnist.load_data(args.data, args.data_dir, train=True, seed=args.seed)
    test_set = mnist.load_data(args.data, args.data_dir, train=False, seed=args.seed)
    return train_set, test_set


def make_model(train_set, args):
    """Any nn.Module. The number of its outputs is the data's."""
    return mnist.SimpleCNN(len(train_set.classes))


def forward(model, inputs, labels, device, bf16):
    """Outputs, labels and losses of a batch, on `device`. If `inputs` is a dict, move each of its tensors.

    There is one loss per sample, not their mean, since ranks may have unequal shares.
    """
    inputs = inputs.to(device, non_blocking=True)
    labels = labels.to(device, non_blocking=True)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        outputs = model(mnist.normalize(inputs))  # bytes become floats; leave it out if yours are floats already
        losses = F.cross_entropy(outputs, labels, reduction="none")
    return outputs, labels, losses


def count_hits(outputs, labels):
    """The number of correct predictions in a batch. Its sum over all samples is the accuracy."""
    return (outputs.argmax(dim=1) == labels).sum()


def make_optimizer(model, lr, steps):
    """The optimizer, and a scheduler that is stepped after each of `steps` steps."""
    # fused=True is faster, but not every optimizer has it.
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=True)

    def cosine(step):
        """The learning rate of `step`, as a fraction of --lr."""
        return (1 + math.cos(math.pi * step / steps)) / 2

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)


# ---- one step: several micro-batches, one all-reduce --------------------------------------------------------------


def train_step(model, optimizer, batches, step, device, args):
    """Train on one global batch. Returns the sum of the losses of this rank's share, on the device."""
    world_size = dist.get_world_size()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    model.train()
    optimizer.zero_grad()
    for k in range(args.accumulate):
        inputs, labels = next(batches)
        torch.manual_seed(seed_of("dropout", args.seed, step, k, dist.get_rank()))  # differs between ranks
        is_last = k == args.accumulate - 1
        sync = contextlib.nullcontext()
        if not is_last and world_size > 1:
            sync = model.no_sync()  # only the last micro-batch needs the all-reduce
        with sync:  # around forward too, or every backward sends
            _, _, losses = forward(model, inputs, labels, device, args.bf16)
            # DDP divides the sum over all ranks by their number. So this makes the mean over the global batch.
            loss = losses.sum() * world_size / args.global_batch_size
            loss.backward()
        loss_sum += losses.detach().sum()
    if args.clip > 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    return loss_sum


# ---- batches that a resumed run repeats exactly -------------------------------------------------------------------


def load_batches(train_set, first_step, steps, device, args):
    """An iterator over the micro-batches of this rank, from `first_step` on, of `steps` steps in all."""
    loader = DataLoader(
        SeededBatches(train_set),
        batch_size=None,  # each item is a whole micro-batch
        sampler=micro_batches(len(train_set), first_step, steps, args),
        num_workers=args.num_workers,
        pin_memory=device.type != "cpu",
    )
    return checkpoint.shielded(loader)  # its processes do not get a SIGTERM


def micro_batches(n, first_step, steps, args):
    """The seed and the indices of each micro-batch of this rank. `n` is the number of training samples.

    The order of the samples depends on --seed and epoch alone, so any number of ranks trains on the same global
    batches, also after a resume. The samples that do not fill a last global batch are left out. They differ from
    epoch to epoch.
    """
    rank = dist.get_rank()
    for step in range(first_step, steps):
        epoch, position = divmod(step, n // args.global_batch_size)
        if step == first_step or position == 0:
            generator = torch.Generator().manual_seed(args.seed + epoch)
            order = torch.randperm(n, generator=generator).tolist()
        start = position * args.global_batch_size
        global_batch = order[start : start + args.global_batch_size]
        share = global_batch[rank :: dist.get_world_size()]
        for k in range(args.accumulate):
            seed = seed_of("augmentation", args.seed, step, k, rank)
            micro_batch = share[k :: args.accumulate]
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


# ---- training -----------------------------------------------------------------------------------------------------


def train(model, optimizer, scheduler, train_set, test_set, args):
    """Train from the snapshot on, if there is one, and write the result. Steps count over all epochs."""
    device = dist.get_device()
    net = dist.unwrapped(model)
    steps_per_epoch = len(train_set) // args.global_batch_size
    steps = args.epochs * steps_per_epoch
    settings = settings_of(args, len(train_set))
    first_step, results, run_id = resume(model, optimizer, scheduler, settings, steps_per_epoch, args)
    tracker = tracking.Tracker("mnist_DDP", args, first_step * args.global_batch_size, run_id)
    preemption = checkpoint.Preemption() if args.snapshot_path else None
    batches = load_batches(train_set, first_step, steps, device, args)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)  # on the device, to avoid a sync every step
    last_line = first_step
    for step in range(first_step, steps):
        loss_sum += train_step(model, optimizer, batches, step, device, args)
        done = step + 1
        samples = done * args.global_batch_size  # the x-axis of everything that is tracked
        ends_epoch = done % steps_per_epoch == 0
        preempted = preemption is not None and preemption.agreed()  # has any process received SIGTERM?
        saves = preemption is not None and (preempted or ends_epoch or done % args.save_every == 0)
        # Print before each snapshot too: then a resumed run averages over the same steps.
        if saves or ends_epoch or done % args.log_every == 0:
            loss = dist.all_reduce(loss_sum).item() / ((done - last_line) * args.global_batch_size)
            dist.print_primary(f"step {done}/{steps} | loss {loss:.4f}", flush=True)
            tracker.log(samples, loss=loss, lr=scheduler.get_last_lr()[0])
            loss_sum.zero_()
            last_line = done
        if ends_epoch:
            dist.check_in_sync(net)  # stops if the weights of two processes differ
            epoch = done // steps_per_epoch
            loss, hits, n = evaluate(net, test_set, device, args)
            line = f"epoch {epoch}/{args.epochs} | held-out {loss:.4f} | accuracy {hits / n:.4f} ({hits}/{n})"
            dist.print_primary(line, flush=True)
            tracker.log(samples, test_loss=loss, accuracy=hits / n, epoch=epoch)
            results["losses"].append(loss)
            results["accuracies"].append(hits / n)
        scheduler.step()
        if saves:
            values = {"results": results, "run_id": tracker.run_id, "epochs": args.epochs}
            checkpoint.save(args.snapshot_path, model, optimizer, scheduler, step=done, settings=settings, **values)
        if preempted and done < steps:
            tracker.close()
            dist.barrier()  # rank 0 may upload for minutes
            preemption.leave()
    if dist.is_primary():
        write_result(args.output, net, results)
    tracker.close()


@torch.no_grad()
def evaluate(net, test_set, device, args):
    """Mean loss, correct predictions and samples. Over all processes each sample counts once."""
    net.eval()
    dist.sync_params(net.buffers())  # BatchNorm's differ between ranks; rank 0's are saved
    loader = DataLoader(
        test_set,
        args.test_batch_size,
        sampler=dist.data_sampler(test_set, True, shuffle=False, pad=False),
        collate_fn=mnist.collate,
        num_workers=args.num_workers,
        pin_memory=device.type != "cpu",
    )
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    hits = torch.zeros((), dtype=torch.float64, device=device)
    for inputs, labels in checkpoint.shielded(loader):
        outputs, labels, losses = forward(net, inputs, labels, device, args.bf16)
        loss_sum += losses.sum(dtype=torch.float64)
        hits += count_hits(outputs, labels)
    loss_sum, hits = dist.all_reduce(torch.stack([loss_sum, hits])).tolist()
    n = len(test_set)
    return loss_sum / n, int(hits), n


def write_result(path, net, results):
    """Write the weights of the plain model to `path`, and the results of each epoch beside it."""
    weights = {name: tensor.cpu() for name, tensor in net.state_dict().items()}  # load them without a GPU
    with checkpoint.atomic(path) as file:
        torch.save(weights, file)
    for name, values in results.items():
        with checkpoint.atomic(f"{os.path.splitext(path)[0]}_{name}.json") as file:
            file.write(json.dumps(values).encode())


# ---- snapshots ----------------------------------------------------------------------------------------------------


def settings_of(args, n):
    """What a resumed run must share, on `n` training samples."""
    names = ("global_batch_size", "lr", "clip", "bf16", "seed")
    settings = {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
    settings["training samples"] = n
    return settings


def resume(model, optimizer, scheduler, settings, steps_per_epoch, args):
    """Load the snapshot, if there is one. Returns the step to run next, the results so far, and the run of W&B."""
    path = args.snapshot_path
    results = {"losses": [], "accuracies": []}
    if path is None:
        return 0, results, None
    # Epoch, which is not used, and step; then the values in the order in which they are named here.
    _, step, results, run_id, epochs = checkpoint.load(
        path, model, optimizer, scheduler, settings, results=results, run_id=None, epochs=args.epochs
    )
    # A run that is complete may get more epochs. Its first step then still has the old learning rate, which is 0.
    if args.epochs != epochs and step < epochs * steps_per_epoch:
        line = f"--epochs {args.epochs}: {path} is at step {step} of {epochs} epochs, and its learning rate would jump"
        raise dist.DistributedError(f"{line}: finish them first, with --epochs {epochs}")
    if step > 0:
        dist.print_primary(f"Resuming from {path} at step {step}", flush=True)
    return step, results, run_id


# ---- options ------------------------------------------------------------------------------------------------------


def make_parser(doc):
    """The options of an experiment, wherever it runs."""
    parser = options.ArgumentParser(doc)
    mnist.add_data_options(parser)
    help_text = "samples per step, over all processes"
    parser.add_argument("--global-batch-size", type=options.whole_number(1), default=128, help=help_text)
    parser.add_argument("--accumulate", type=options.whole_number(1), default=1, help="micro-batches per step")
    help_text = "samples per process and step of the test"
    parser.add_argument("--test-batch-size", type=options.whole_number(1), default=1000, help=help_text)
    parser.add_argument("--num-workers", type=options.whole_number(0), default=0, help="loader processes per rank")
    parser.add_argument("--epochs", type=options.whole_number(1), default=5, help="passes over the data")
    parser.add_argument("--lr", type=options.positive_number, default=0.05, help="learning rate")
    help_text = "largest norm of the gradient; 0 does not clip"
    parser.add_argument("--clip", type=options.number(0), default=0.0, help=help_text)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, keep parameters in float32")
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    parser.add_argument("--seed", type=options.whole_number(0, 2**32 - 1), default=0, help="random seed")
    help_text = "steps between lines of progress"
    parser.add_argument("--log-every", type=options.whole_number(1), default=100, help=help_text)
    parser.add_argument("--save-every", type=options.whole_number(1), default=500, help="steps between snapshots")
    parser.add_argument("--wandb", action="store_true", help="track with Weights & Biases")
    parser.add_argument("--tensorboard", help="track with TensorBoard, in this folder")
    return parser


def parse_args(words=None):
    parser = make_parser(__doc__)
    parser.add_argument("--snapshot-path", help="save to this file, and resume from it")
    parser.add_argument("--output", default="mnist_cnn.pt", help="write the trained model to this file")
    parser.add_nproc()
    args = parser.parse_args(words)
    micro_batches = args.nproc * args.accumulate
    if args.global_batch_size < micro_batches:
        how = f"the micro-batches of {args.nproc} x --accumulate {args.accumulate}"
        parser.error(f"argument --global-batch-size: {args.global_batch_size} is less than {micro_batches}, {how}")
    tracking.check_installed(args)
    if args.tensorboard is not None:
        checkpoint.check_writable("--tensorboard", os.path.join(args.tensorboard, "events"))
    checkpoint.check_writable("--output", args.output)
    if args.snapshot_path is not None:
        if os.path.realpath(args.snapshot_path) == os.path.realpath(args.output):
            parser.error(f"argument --output: {args.output} is the file of --snapshot-path too: name another one")
        checkpoint.check_writable("--snapshot-path", args.snapshot_path)
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    watch.start()  # if the job hangs, one line says where each rank is
    device = dist.get_device()
    dist.print_primary(f"Training on {world_size} x {device.type}, global batch {args.global_batch_size}", flush=True)
    run(args, load_datasets(args))


def run(args, data, make_model=make_model, make_optimizer=make_optimizer):
    """Train on `data`, a training set and a test set, and write the result."""
    train_set, test_set = data
    device = dist.get_device()
    steps_per_epoch = len(train_set) // args.global_batch_size
    if steps_per_epoch == 0:
        line = f"--global-batch-size {args.global_batch_size} is more than all training samples, {len(train_set)}"
        raise dist.DistributedError(line)
    if steps_per_epoch < 10:
        line = f"An epoch has only {steps_per_epoch} steps: a smaller --global-batch-size learns more in it"
        dist.print_primary(line)
    steps = args.epochs * steps_per_epoch
    torch.manual_seed(args.seed)
    net = make_model(train_set, args).to(device)
    model = dist.prepare_ddp_model(net, gradient_as_bucket_view=True)  # needs no copy of the gradients
    if args.compile:
        model.compile()  # after DDP: torch then splits the graph where DDP's buckets end
    optimizer, scheduler = make_optimizer(net, args.lr, steps)

    def loss_of_a_micro_batch():
        # A real batch: with --compile, another size would cost another compilation.
        inputs, labels = next(load_batches(train_set, 0, steps, device, args))
        _, _, losses = forward(model, inputs, labels, device, args.bf16)
        return losses.sum()

    # DDP arranges its buckets in the first backward. Do that before the first step, as each resumed run does: the
    # buckets decide in which order gradients are summed, and so their last bits.
    checkpoint.rebuild_buckets(model, loss_of_a_micro_batch)
    train(model, optimizer, scheduler, train_set, test_set, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
