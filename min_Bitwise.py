"""Get the same weights, in every bit, on 1, 2, 4 or 8 processes: the minimum working example of a fixed sum order.

Sums of floats depend on their order. Here the order is a binary tree over the rows of the global batch, whichever
process has them. For 8 rows, where g_i is the gradient of the loss of row i:

    g = 1/8 · (((g_0 + g_1) + (g_2 + g_3)) + ((g_4 + g_5) + (g_6 + g_7)))

    row      0   1   2   3   4   5   6   7        one process    2 processes    4 processes
             '-+-'   '-+-'   '-+-'   '-+-'        inside         inside         inside each
               '---+---'       '---+---'          inside         inside         between neighbours
                   '-------+-------'              inside         between both   between pairs of neighbours

Each row is a micro-batch by itself, so kernels see the same shapes for any N. A process sums its rows by halves. Then
pairs of processes sum, nearest first. This is a reduce-scatter: each hop sends half as much as the one before. An
all-gather then copies the sums to all processes.

Choose it to tell a mistake from rounding when the number of processes changes, and to resume unnoticed on another
number. N must be a power of two, and divide the batch. min_DDP.py is equal up to rounding, for any N, and faster where
several short rows fit into one micro-batch. Another type of CPU or GPU, another version of torch, and another number of
threads (here 1) may give other bits. Kernels that add in any order, by atomics on GPUs, are forbidden here. If your
model has dropout, seed each row by its place in the global batch.

Cost per process, for P float32 parameters on N processes and R rows in each: 16·P bytes as with DDP (parameters 4,
gradients 4, AdamW 8), and up to 4·P·(2 + log2 R) for unfinished sums. Each step sends 2·(N-1)/N · 4·P bytes, as a ring
does, but not during backward.

    python min_Bitwise.py --nproc 2                           # two processes; without --nproc, all GPUs
    python min_Bitwise.py --nproc 4 --snapshot-path run.pt    # saves; rerun it with --nproc 2 to resume
    torchrun --standalone --nproc-per-node 2 min_Bitwise.py

Its last line is the same for any N: `checksum of the weights: 2901570469`.
"""

import os
import zlib

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn import functional as F

import checkpoint
import distributed as dist
import gpt
import options

# Before torch 2.13 it has another name.
all_gather_single = getattr(torch_dist, "all_gather_single", torch_dist.all_gather_into_tensor)


# ---- the tree -----------------------------------------------------------------------------------------------------


def sum_over_rows(model, x, y, bf16=False):
    """The loss of each row and its gradient, summed over the rows by halves: (1 + parameters,)."""
    if len(x) > 1:
        half = len(x) // 2
        total = sum_over_rows(model, x[:half], y[:half], bf16)
        total += sum_over_rows(model, x[half:], y[half:], bf16)
        return total
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
        loss = gpt.loss_fn(model(x), y)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return nn.utils.parameters_to_vector([loss.detach(), *grads])


def sum_over_ranks(vector):
    """The sum of `vector`, (elements,), over all ranks, on every rank."""
    padded = F.pad(vector, (0, -len(vector) % dist.get_world_size()))
    part = padded.new_empty(len(padded) // dist.get_world_size())
    reduce_scatter_by_halves(part, padded)
    all_gather_single(padded, part)  # copies, so no bit changes
    return padded[: len(vector)]


def reduce_scatter_by_halves(part, vector):
    """Sum `vector` over all ranks. Rank r gets part r of N equal parts of the sum, in `part`."""
    rank = dist.get_rank()
    parts = vector.view(dist.get_world_size(), -1)
    distance = 1  # to the other rank of the pair
    while len(parts) > 1:
        bit = rank // distance % 2
        own, given = parts[bit::2], parts[1 - bit :: 2]  # the parts of ranks with this rank's bit, and with the other
        received = exchange(given.contiguous(), rank ^ distance)
        parts = own + received  # a sum of two has the same bits in either order
        distance *= 2
    part.copy_(parts[0])


def exchange(given, other):
    """Send a tensor to the rank `other` while receiving one of its shape."""
    received = torch.empty_like(given)
    send = torch_dist.P2POp(torch_dist.isend, given, other)
    receive = torch_dist.P2POp(torch_dist.irecv, received, other)
    for transfer in torch_dist.batch_isend_irecv([send, receive]):
        transfer.wait()
    return received


# ---- training -----------------------------------------------------------------------------------------------------


def train(model, optimizer, data, first_step, args):
    """Returns the loss of every step from `first_step` on over all processes, (steps,)."""
    params = list(model.parameters())
    progress = gpt.Progress(model, data, args, first_step)
    for step in range(first_step, args.steps):
        optimizer.zero_grad()
        x, y = data.batch(step)  # this process's consecutive rows of the global batch
        mean = sum_over_ranks(sum_over_rows(model, x, y, args.bf16)) / args.global_batch_size
        set_gradients(params, mean[1:])
        if args.clip:
            nn.utils.clip_grad_norm_(params, args.clip)
        optimizer.step()
        progress(step, mean[0])
        done = step + 1
        if args.snapshot_path and (done % args.save_every == 0 or done == args.steps):
            checkpoint.save(args.snapshot_path, model, optimizer, step=done, settings=settings_of(data, args))
    return progress.losses


def set_gradients(params, vector):
    """The gradients become views of `vector`."""
    grads = vector.split([param.numel() for param in params])
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.view_as(param)


def settings_of(data, args):
    return {**data.settings(), "--bf16": args.bf16}


def checksum(model):
    """CRC-32 of all parameters. Two models have the same one by chance once in 4 billion."""
    value = 0
    for param in model.parameters():
        value = zlib.crc32(param.detach().cpu().numpy(), value)
    return value


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = gpt.make_parser(__doc__)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--snapshot-path", help="save to this file, and resume from it")
    parser.add_argument("--save-every", type=options.whole_number(1), default=50, help="steps between snapshots")
    args = parser.parse_args()
    if args.nproc & (args.nproc - 1):
        parser.error(f"argument --nproc: {args.nproc} is not a power of two, so it has no binary tree")
    gpt.check_model_options(parser, args, batch=(args.nproc, "the number of processes"))
    checkpoint.check_writable("--snapshot-path", args.snapshot_path)
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # else the next line forbids matrix products on GPUs
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # for any N: kernels sum in as many parts as there are threads
    gpt.start(args)
    data = gpt.Data(args)  # this process's share of each global batch
    model = gpt.GPT(gpt.Config.from_args(args), args.seed).to(dist.get_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    first_step = 0
    if args.snapshot_path:
        _, first_step = checkpoint.load(args.snapshot_path, model, optimizer, settings=settings_of(data, args))
    if first_step > 0:
        dist.print_primary(f"Resuming at step {first_step}")
    train(model, optimizer, data, first_step, args)
    dist.check_in_sync(model)
    dist.print_primary(f"checksum of the weights: {checksum(model)}")


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
