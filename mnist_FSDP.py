"""An experiment with FSDP: train one model sharded, replicated or in one process, and compare memory and speed.

Read min_FSDP.py first for the idea. Here the model knows nothing of FSDP: dist.prepare_fsdp_model makes a unit of each
layer that has at least --min-num-params parameters, and one of the rest. A unit is gathered before it computes, and
freed afterwards. The rest of the script is a complete experiment with data, evaluation, checkpoints and a result.

    --strategy local    one process holds everything and computes everything (with several GPUs add --nproc 1)
    --strategy ddp      each process holds everything and computes its share of each batch
    --strategy fsdp     each process holds 1/N and computes its share of each batch

Choose fsdp if the model does not fit into one device together with its gradients and Adam's state. If it fits, choose
ddp: it sends a third less.

Cost for P float32 parameters on N processes, trained by Adam: with fsdp a process holds 16·P/N bytes between two steps
(parameters 4, gradients 4, Adam 8). While a unit computes, it holds about 12 bytes more for each of the unit's
parameters: the unit, its gradients, and a buffer that is sent. With ddp a process holds 16·P bytes. A step sends up to
3·(N-1)/N · 4·P bytes with fsdp and 2·(N-1)/N · 4·P bytes with ddp. The last line shows what each process really holds.
The peak of --model deep is far above its share, because one layer has 88 % of its parameters.

    python mnist_FSDP.py --nproc 2 --model deep                               # two GPUs, or two processes on the CPU
    python mnist_FSDP.py --nproc 2 --model deep --strategy ddp                # the same training, replicated
    python mnist_FSDP.py --nproc 2 --bf16                                     # compute in bfloat16
    python mnist_FSDP.py --nproc 2 --checkpoint-dir runs/mnist --output a.pt  # save every epoch; rerun to resume
    python mnist_FSDP.py --nproc 1 --checkpoint-dir runs/mnist --epochs 4     # resume in one process
    torchrun --standalone --nproc-per-node 2 mnist_FSDP.py --data mnist       # the real MNIST

It prints the memory of the largest process. All machines must share --checkpoint-dir. Load only
checkpoints that you trust, because parts of them are pickles.
"""

import random
import resource
import time

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

import checkpoint
import checkpoint_sharded
import distributed as dist
import mnist
import options
import watch

# ---- local, DDP or FSDP -------------------------------------------------------------------------------------------


def wrap(model, strategy, device, bf16, min_num_params=20_000):
    """The model, ready to train on `device`. Build the optimizer afterwards: FSDP replaces the parameters."""
    if strategy != "fsdp":
        return dist.prepare_ddp_model(model.to(device), gradient_as_bucket_view=True)  # needs no copy of the gradients
    policy = MixedPrecisionPolicy()
    if bf16:
        # Parameters are gathered in bfloat16. The shards, which the optimizer updates, stay float32.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return dist.prepare_fsdp_model(model, min_num_params=min_num_params, mp_policy=policy)


# ---- what each process holds --------------------------------------------------------------------------------------


def print_held(optimizer, n_params, device):
    params, gradients, state = largest(held_by_this_rank(optimizer), device)
    total = params + gradients + state
    dist.print_primary(
        f"Held per process, in bytes: parameters {params:,} | gradients {gradients:,} | optimizer state {state:,} | "
        f"in all {total:,}, {total / n_params:.2f} per parameter"
    )


def peak_memory(device):
    """Bytes: the most that this process has had allocated on its GPU, or resident in memory on the CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def held_by_this_rank(optimizer):
    """Bytes of parameters, gradients and optimizer state that this process keeps between two steps."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params if param.grad is not None]
    state = [tensor for of_param in optimizer.state.values() for tensor in of_param.values()]
    return [nbytes(params), nbytes(gradients), nbytes(state)]


def nbytes(tensors):
    """Bytes of tensors, and of this process's shards of DTensors."""
    shards = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(shard.nbytes for shard in shards)


def largest(numbers, device):
    """The maximum of each number over all ranks."""
    return dist.all_reduce(torch.tensor(numbers, device=device), op="max").tolist()


# ---- training -----------------------------------------------------------------------------------------------------


def forward(model, images, labels, device, bf16):
    """Outputs (n, 10), labels (n,) and losses (n,), on `device`."""
    images = images.to(device, non_blocking=True)
    labels = labels.to(device, non_blocking=True)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):  # the losses stay float32
        outputs = model(mnist.normalize(images))
        # It takes log-probabilities too: the log-softmax in it does not change them.
        losses = F.cross_entropy(outputs, labels, reduction="none")
    return outputs, labels, losses


def train_epoch(model, loader, optimizer, device, bf16, epoch=0, epochs=1, log_every=50):
    """Mean loss, and samples per second, over all processes. Every so many steps it prints the loss so far."""
    model.train()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)  # kept on the GPU to avoid a sync every step
    n = 0
    start = time.perf_counter()
    for step, (images, labels) in enumerate(loader, epoch * len(loader) + 1):
        optimizer.zero_grad()  # before forward, where the old gradients would take memory
        _, _, losses = forward(model, images, labels, device, bf16)
        loss = losses.mean()
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach() * len(labels)
        n += len(labels)
        if step % log_every == 0:
            loss, _ = mean_over_ranks(loss_sum, n)
            dist.print_primary(f"step {step}/{epochs * len(loader)} | loss {loss:.4f}", flush=True)
    loss, n = mean_over_ranks(loss_sum, n)
    return loss, n / (time.perf_counter() - start)


def mean_over_ranks(loss_sum, n):
    """The mean loss over the samples of all processes, and their number."""
    loss_sum, n = dist.all_reduce(torch.stack([loss_sum, loss_sum.new_tensor(n)])).tolist()
    return loss_sum / n, n


@torch.no_grad()
def evaluate(model, loader, device, bf16):
    """Mean loss, number of correct predictions and number of samples, over all processes.

    `loader` has a sampler from `dist.data_sampler`; a single process needs none. The sampler of `make_loaders` pads:
    all ranks get equally many batches, which a sharded model needs. The repeated samples are not counted.
    """
    model.eval()
    dist.sync_params(model.buffers())  # BatchNorm's differ between ranks; rank 0's are saved
    n = len(loader.dataset)
    share = len(range(dist.get_rank(), n, dist.get_world_size()))  # samples of this rank
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    hits = torch.zeros((), dtype=torch.float64, device=device)
    seen = 0
    for images, labels in loader:
        outputs, labels, losses = forward(model, images, labels, device, bf16)
        new = min(len(labels), share - seen)  # the rest of the batch is repeated
        loss_sum += losses[:new].sum(dtype=torch.float64)
        hits += (outputs.argmax(dim=1) == labels)[:new].sum()
        seen += new
    loss_sum, hits = dist.all_reduce(torch.stack([loss_sum, hits])).tolist()
    return loss_sum / n, int(hits), n


def make_loaders(train_set, test_set, args, device):
    """Two DataLoaders that give this rank its share of each data set, in whole batches.

    `args` has seed, batch_size and test_batch_size. Call `loader.sampler.set_epoch(epoch)` before each epoch.
    """
    # One process uses a sampler too: the order, and so the result, is then the same for any number of processes.
    sampler = dist.data_sampler(train_set, True, shuffle=True, seed=args.seed)
    test_sampler = dist.data_sampler(test_set, True, shuffle=False)
    pin_memory = device.type != "cpu"
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, collate_fn=mnist.collate, pin_memory=pin_memory)
    test_loader = DataLoader(
        test_set, args.test_batch_size, sampler=test_sampler, collate_fn=mnist.collate, pin_memory=pin_memory
    )
    return loader, test_loader


def seed_of(*parts):
    """A random seed that depends on all parts: a use of the numbers, and whole numbers."""
    return random.Random(str(parts)).getrandbits(63)


def export(path, model):
    """Write the whole state_dict, as the plain model has it. All ranks must call it: they gather it for rank 0."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.is_primary():
        with checkpoint.atomic(path) as file:
            torch.save(state, file)
        print(f"Wrote {path}")


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = options.ArgumentParser(__doc__)
    strategies = ("fsdp", "ddp", "local")
    parser.add_argument("--strategy", choices=strategies, default="fsdp", help="shard, replicate, or use one process")
    help_text = "with fsdp, layers with at least so many parameters are units"
    parser.add_argument("--min-num-params", type=options.whole_number(1), default=20_000, help=help_text)
    parser.add_argument("--model", choices=mnist.MODELS, default="simple", help="50 k, 1.2 M or 94 M parameters")
    parser.add_argument("--epochs", type=options.whole_number(1), default=2, help="passes over the data")
    parser.add_argument("--batch-size", type=options.whole_number(1), default=64, help="samples per process")
    help_text = "samples per process and step of the test"
    parser.add_argument("--test-batch-size", type=options.whole_number(1), default=1000, help=help_text)
    parser.add_argument("--lr", type=options.positive_number, default=0.001, help="learning rate")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, keep parameters in float32")
    mnist.add_data_options(parser)
    help_text = "save in this folder, and resume from its newest checkpoint"
    parser.add_argument("--checkpoint-dir", help=help_text)
    parser.add_argument("--output", help="write the trained model to this file")
    help_text = "steps between lines of progress"
    parser.add_argument("--log-every", type=options.whole_number(1), default=50, help=help_text)
    parser.add_argument("--seed", type=options.whole_number(0, 2**32 - 1), default=0, help="random seed")
    parser.add_nproc()
    args = parser.parse_args()
    n = max(args.nproc, dist.get_world_size())
    if args.strategy == "local" and n > 1:
        parser.error(f"argument --strategy: local trains in 1 process, not in {n}")
    if args.checkpoint_dir is not None:
        checkpoint_sharded.check_folder("--checkpoint-dir", args.checkpoint_dir)
    checkpoint.check_writable("--output", args.output)
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    watch.start()  # if the job hangs, one line says where each rank is
    dist.print_primary(f"Training on {world_size} x {dist.get_device().type}: {args.strategy}")
    data = [mnist.load_data(args.data, args.data_dir, train=half, seed=args.seed) for half in (True, False)]
    run(args, data, mnist.MODELS[args.model])


def run(args, data, make_model, make_optimizer=torch.optim.Adam):
    """Train the model that `make_model` builds on `data`, a training set and a test set.

    Returns the model, and for each epoch the loss, the loss of the test, its correct predictions and its samples.
    """
    device = dist.get_device()
    loader, test_loader = make_loaders(*data, args, device)
    torch.manual_seed(args.seed)
    model = make_model()
    n_params = sum(param.numel() for param in model.parameters())
    dist.print_primary(f"Model {args.model}: {n_params:,} parameters")
    model = wrap(model, args.strategy, device, args.bf16, args.min_num_params)
    optimizer = make_optimizer(model.parameters(), lr=args.lr, fused=True)

    # What a resumed run must share. --batch-size may change with the number of processes.
    settings = {"--lr": args.lr, "--bf16": args.bf16, "--seed": args.seed, "training samples": len(loader.dataset)}
    first_epoch = 0
    if args.checkpoint_dir:
        first_epoch = checkpoint_sharded.load(args.checkpoint_dir, model, optimizer, settings=settings)
    results = []
    for epoch in range(first_epoch, args.epochs):
        loader.sampler.set_epoch(epoch)
        # All randomness of an epoch depends on seed, epoch and rank, so a resumed run draws the same numbers.
        torch.manual_seed(seed_of("dropout", args.seed, epoch, dist.get_rank()))
        loss, speed = train_epoch(model, loader, optimizer, device, args.bf16, epoch, args.epochs, args.log_every)
        test_loss, hits, n = evaluate(model, test_loader, device, args.bf16)
        results.append((loss, test_loss, hits, n))
        (memory,) = largest([peak_memory(device)], device)
        dist.print_primary(
            f"epoch {epoch + 1}/{args.epochs} | loss {loss:.4f} | held-out {test_loss:.4f} | "
            f"accuracy {hits / n:.4f} ({hits}/{n}) | {memory / 1e6:.0f} MB | {speed:,.0f} samples/s",
            flush=True,
        )
        if args.checkpoint_dir:
            checkpoint_sharded.save(args.checkpoint_dir, model, optimizer, epoch + 1, settings=settings)

    print_held(optimizer, n_params, device)
    if args.output:
        export(args.output, model)
    return model, results


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
