"""Shard the model: the minimum working example of fully sharded data parallelism (FSDP2).

Every process works on its own share of each batch, as with DDP, but holds only 1/N of the parameters, the gradients
and the optimizer's state. A layer is gathered just before it computes and freed after it. Choose it when the model with
its optimizer does not fit into one device; if it fits, min_DDP.py sends a third less.

Cost per process, for P float32 parameters on N processes trained by Adam: 16·P/N bytes (parameters 4, gradients 4,
Adam 8), and while the largest layer of L parameters computes, up to 8·L more; with DDP it is 16·P. Each step sends
up to 3·(N-1)/N · 4·P bytes: parameters gathered for forward and again for backward, gradients reduced. DDP sends two
thirds of that. On the CPU two fifths of a step of --model deep are new pages of 4 KB for what is gathered: under
torchrun, ask for huge pages by THP_MEM_ALLOC_ENABLE=1, as dist.launch does.

    CUDA_VISIBLE_DEVICES=0,1 python min_FSDP.py --model deep           # two GPUs, 94 million parameters
    python min_FSDP.py                                                 # all visible GPUs, or two CPU processes
    python min_FSDP.py --strategy ddp                                  # the same training, replicated; also: local
    python min_FSDP.py --model shallow --mixed-precision               # gathered and computed in bfloat16
    python min_FSDP.py --checkpoint-dir runs --export digits.pt        # saves every epoch, and goes on where it was,
    python min_FSDP.py --checkpoint-dir runs --epochs 4 --nproc 1      # also with another --nproc or --strategy
    torchrun --standalone --nproc-per-node 2 min_FSDP.py --data mnist  # processes started by torchrun, the real MNIST

It prints how many parameters the model has and how many of them this process holds, a line per epoch, `epoch: 0 | train
loss: 0.6352 | test loss: 0.1403 | test acc: 9617/10000 (0.9617) | memory: 771 MB | 4120 samples/s`, and last what each
process holds in bytes. Loss and accuracy are of all samples, memory is the peak of the largest process: resident, or
allocated on the GPU. Open only checkpoints that you trust: their index is a pickle. Machines must share the folder.
"""

import os
import random
import resource
import sys
import threading
import time

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from tqdm import tqdm

import checkpoint
import distributed as dist
import mnist
import options

tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a process that is killed would leave behind


def parse_args():
    parser, count = options.ArgumentParser(__doc__), options.whole_number(1)
    add = parser.add_argument
    add("--strategy", choices=("fsdp", "ddp", "local"), default="fsdp", help="shard, replicate, or use one process")
    add("--model", choices=tuple(mnist.MODELS), default="simple", help="50 thousand, 1.2 or 94 million parameters")
    add("--epochs", type=count, default=2, help="passes over the data")
    add("--batch-size", type=count, default=64, help="samples per step and process")
    add("--test-batch-size", type=count, default=1000, help="the same, for the evaluation")
    add(
        "--lr",
        type=options.positive_number,
        default=0.001,
        help="learning rate of Adam, also when going on from a checkpoint",
    )
    add("--min-num-params", type=count, default=20_000, help="smallest part sharded by itself")
    add("--mixed-precision", action="store_true", help="compute in bfloat16")
    mnist.add_data_options(parser)
    add("--checkpoint-dir", help="save here after every epoch, and go on from the newest one")
    add("--export", metavar="FILE", help="write the whole state_dict here, for model.load_state_dict in plain PyTorch")
    add("--seed", type=options.seed_number, default=0, help="of the drawn digits, the weights and the order of samples")
    parser.add_nproc(help="processes, unless under torchrun; 1 if local")
    args = parser.parse_args()
    if args.strategy == "local" and dist.get_world_size() == 1:  # of torchrun, if it has started this
        parser.set_defaults(nproc=1)
        args = parser.parse_args()

    if args.strategy == "local" and args.nproc > 1:
        parser.error(f"argument --strategy: local trains in 1 process, not in {args.nproc}")
    if args.export and os.path.isdir(args.export):
        parser.error(f"argument --export: {args.export!r} is a folder, not a file")
    if args.checkpoint_dir:
        checkpoint.check_writable("--checkpoint-dir", args.checkpoint_dir)
    if args.export:
        checkpoint.check_writable("--export", os.path.dirname(os.path.abspath(args.export)))
    return args


# ---- training -----------------------------------------------------------------------------------------------------


def wrap(model, strategy, device, min_num_params, mixed_precision):
    if strategy == "fsdp":
        policy = MixedPrecisionPolicy()
        if mixed_precision:
            # The optimizer sees the shards, which stay float32; what is gathered and computed with is bfloat16, but for
            # batch norm, whose statistics are float32: the CPU wants its weights to be the same.
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    dist.prepare_fsdp_model(module)
        return dist.prepare_fsdp_model(model, min_num_params, mp_policy=policy)
    model = model.to(device)
    return dist.prepare_ddp_model(model, device_ids=[device]) if strategy == "ddp" else model


def train_epoch(model, loader, optimizer, device, mixed_precision, epoch):
    """Mean loss, and samples per second, over all processes."""
    model.train()
    loss_sum, n = torch.zeros((), dtype=torch.float64, device=device), 0  # on the device: no wait for it in the loop
    start = time.perf_counter()
    for images, labels in tqdm(loader, f"epoch {epoch}", leave=False, disable=None if dist.is_primary() else True):
        optimizer.zero_grad()
        _, _, losses = mnist.forward(model, images, labels, device, mixed_precision)
        loss = losses.mean()
        loss.backward()
        optimizer.step()
        loss_sum.add_(loss.detach(), alpha=len(labels))
        n += len(labels)
    loss_sum, n = dist.all_reduce(torch.stack([loss_sum, loss_sum.new_tensor(n)])).tolist()
    return loss_sum / n, n / (time.perf_counter() - start)


def held_by_this_rank(optimizer):
    """Bytes of parameters, gradients and optimizer state that this process keeps between two steps."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params if param.grad is not None]
    state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    return [sum(local(tensor).nbytes for tensor in tensors) for tensors in (params, gradients, state)]


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def peak_memory(device):
    """Bytes: the most that this process has had allocated on its GPU, or resident in memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def largest(numbers, device):
    """Each of a list of numbers as it is on the rank where it is largest."""
    return dist.all_reduce(torch.tensor(numbers, device=device), op="max").tolist()


def export(path, model):
    """Write the whole state_dict, as the plain model has it: gathered by all ranks, and kept by rank 0."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.is_primary():
        with checkpoint.atomic(path) as file:
            torch.save(state, file)
        print(f"Exported to {path}")


# ---- put together -------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    device, mixed = dist.get_device(), args.mixed_precision
    strategy = args.strategy if world_size > 1 else "local"
    dist.print_primary(f"Training on {world_size} x {device.type}: {strategy}")
    if strategy != args.strategy:
        dist.print_primary(f"A single device: there is nothing to share, so --strategy {args.strategy} trains locally")
    if mixed:
        how = "gathered in bfloat16, gradients reduced in float32" if strategy == "fsdp" else "by autocast"
        dist.print_primary(f"Mixed precision: computing in bfloat16 ({how}); float32 parameters and optimizer state")

    loader, test_loader = mnist.make_loaders(args, device)
    torch.manual_seed(args.seed)
    model = mnist.MODELS[args.model]()
    n_params = sum(param.numel() for param in model.parameters())
    model = wrap(model, strategy, device, args.min_num_params, mixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)  # of the shards: built after the wrapping
    n_held = sum(local(param).numel() for param in model.parameters())
    dist.print_primary(f"Model {args.model}: {n_params:,} parameters, of which this process holds {n_held:,}")

    first_epoch = checkpoint.load_sharded(args.checkpoint_dir, model, optimizer) if args.checkpoint_dir else 0
    for epoch in range(first_epoch, args.epochs):
        loader.sampler.set_epoch(epoch)
        # All randomness of an epoch comes from these three, so a resumed run draws what the uninterrupted one draws.
        torch.manual_seed(random.Random(f"{args.seed} {epoch} {dist.get_rank()}").getrandbits(63))
        train_loss, speed = train_epoch(model, loader, optimizer, device, mixed, epoch)
        test_loss, hits, n = mnist.evaluate(model, test_loader, device, mixed)
        (memory,) = largest([peak_memory(device)], device)
        dist.print_primary(
            f"epoch: {epoch} | train loss: {train_loss:.4f} | test loss: {test_loss:.4f} | test acc: {hits}/{n} "
            f"({hits / n:.4f}) | memory: {memory / 1e6:.0f} MB | {speed:.0f} samples/s"
        )
        if args.checkpoint_dir:
            checkpoint.save_sharded(args.checkpoint_dir, model, optimizer, epoch + 1)

    params, gradients, state = largest(held_by_this_rank(optimizer), device)
    dist.print_primary(
        f"Held per process, in bytes: parameters {params:,} | gradients {gradients:,} | optimizer state {state:,} | "
        f"in all {params + gradients + state:,}, {(params + gradients + state) / n_params:.2f} per parameter"
    )
    if args.export:
        export(args.export, model)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)  # and leave the process group, once the model has gone
