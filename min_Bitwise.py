"""Train on 1, 2, 4 or 8 processes and get the same weights, in every bit: the minimal example of a fixed order of sums.

Floating-point sums depend on their order: (a + b) + c is not a + (b + c). Here the order is a binary tree over the rows
of the global batch, which knows nothing of processes. For 8 rows g_0 to g_7:

    g = (((g_0 + g_1) + (g_2 + g_3)) + ((g_4 + g_5) + (g_6 + g_7))) / 8      g_i is the gradient of row i's loss

    row               0   1   2   3   4   5   6   7        2 processes           4 processes
                      '-+-'   '-+-'   '-+-'   '-+-'        in each process       in each process
                        '---+---'       '---+---'          in each process       between neighbours
                            '-------+-------'              between both          between pairs of neighbours

Each row is a micro-batch of its own, so that every kernel sees the same shapes for any N. A process sums its rows by
halves. Then processes sum theirs by pairs, nearest first, as a reduce-scatter in which each hop halves what is sent.

Choose it to tell a change of the number of processes from a mistake, and to resume on another number without a trace.
N must be a power of two that divides --global-batch-size. Otherwise min_DDP.py is equal but for rounding, and faster
where several short rows fit into one micro-batch. Also these change the bits: another CPU or GPU, another version of
torch, and another number of threads, which is 1 here. On GPUs, kernels with atomics would change them from run to run,
so they are forbidden. In a model with dropout, seed each row by itself.

Cost per process, for P float32 parameters on N processes, and R rows in each: 16·P bytes as in DDP (parameters 4,
gradients 4, AdamW 8), and up to 4·P·(2 + log2 R) more for the sums in progress. A step sends 2·(N-1)/N · 4·P bytes, as
a ring does, but after backward.

    python min_Bitwise.py --nproc 2                           # two processes; without --nproc, all GPUs
    python min_Bitwise.py --nproc 4 --snapshot-path run.pt    # saves; rerun it with --nproc 2 to resume
    torchrun --standalone --nproc-per-node 2 min_Bitwise.py --bf16

Its last line is the same for any N on one machine: `sha256 of the weights: 5f0c6f1ab2e4d3c7`.
"""

import hashlib
import os

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
        return sum_over_rows(model, x[:half], y[:half], bf16) + sum_over_rows(model, x[half:], y[half:], bf16)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
        loss = gpt.loss_fn(model(x), y)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return nn.utils.parameters_to_vector([loss.detach(), *grads])


def sum_over_ranks(vector):
    """The sum of `vector`, (elements,), over all ranks, on every rank."""
    if dist.get_world_size() == 1:
        return vector
    padded = F.pad(vector, (0, -len(vector) % dist.get_world_size()))
    part = padded.new_empty(len(padded) // dist.get_world_size())
    reduce_scatter_by_halves(part, padded)
    all_gather_single(padded, part)  # it only copies
    return padded[: len(vector)]


def reduce_scatter_by_halves(part, vector):
    """Fill `part` with this rank's part of the sum of `vector` over all ranks: part r of N equal ones, for rank r."""
    rank = dist.get_rank()
    parts = vector.view(dist.get_world_size(), -1)
    distance = 1  # to the other rank of the pair
    while len(parts) > 1:
        bit = rank // distance % 2
        own, given = parts[bit::2], parts[1 - bit :: 2]  # those of the ranks that agree with this one in this bit
        received = exchange(given.contiguous(), rank ^ distance)
        parts = own + received
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
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = options.ArgumentParser(__doc__)
    gpt.add_model_options(parser)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--snapshot-path", help="save to this file, and resume from it")
    parser.add_argument("--save-every", type=options.whole_number(1), default=50, help="steps between snapshots")
    args = parser.parse_args()
    if args.nproc & (args.nproc - 1):
        parser.error(f"argument --nproc: {args.nproc} is not a power of two, so it has no binary tree")
    gpt.check_model_options(parser, args, batch=(args.nproc, "the number of processes"))
    if args.snapshot_path is not None:
        checkpoint.check_writable("--snapshot-path", args.snapshot_path)
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # else the next line forbids matrix products on GPUs
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # for any N: kernels sum in as many parts as there are threads
    dist.init_process_group()
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs: far faster matrix products, with 10 bits of mantissa
    data = gpt.Data(args)  # this process's share of each global batch
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = gpt.GPT(args.layers, args.width, args.heads, args.length).to(dist.get_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    first_step = 0
    if args.snapshot_path:
        _, first_step = checkpoint.load(args.snapshot_path, model, optimizer, settings=settings_of(data, args))
    if first_step > 0:
        dist.print_primary(f"Resuming at step {first_step}")
    train(model, optimizer, data, first_step, args)
    dist.check_in_sync(model)
    dist.print_primary(f"sha256 of the weights: {checksum(model)}")


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
