"""Split the sequence: the minimum working example of context parallelism.

Every process has the whole model and one piece, T/N bytes long, of every sequence of the batch. Embeddings, norms,
linear layers and the loss see each byte by itself, so only attention talks; gradients are averaged as ever, by DDP.
Choose it when one sequence with its activations does not fit into one device. Where the sequence fits and the batch
does not, share the batch (min_DDP.py). Parameters are whole on each process: min_FSDP.py is what splits those.

--attention ulysses (DeepSpeed's, arXiv:2309.14509): an all-to-all turns all heads of the own piece into some heads of
the whole sequence, and after attention another one turns the result back. All processes do the same work, and there
can be no more of them than heads. --attention all-gather (Llama 3's, arXiv:2407.21783): each process gathers the keys
and values of all pieces. Any number of processes, but keys and values are whole, the last piece attends to most, and on
the CPU (not on GPUs) a mask of T/N · T is saved for each layer.

Ring attention (arXiv:2310.01889) passes keys and values on from rank to rank while it computes. It wins where there
are more processes than heads (of keys: often 8), and where links are slow, whose time it hides. It has to merge
softmaxes and to deal out pieces of equal work: see `context_parallel` in torch.distributed.tensor.experimental, for
GPUs, or https://github.com/zhuzilin/ring-flash-attention.

Cost per process, for P float32 parameters, L layers of width D, B sequences of T bytes, N processes: 16·P bytes, as
with DDP, and 1/N of the activations. Each step sends DDP's 2·(N-1)/N · 4·P bytes and, for attention forward and
backward, (N-1)/N · 32·L·B·T·D/N bytes, or with all-gather (N-1)/N · 16·L·B·T·D (half as much again on the CPU, where
gloo's reduce-scatter is an all-reduce).

    CUDA_VISIBLE_DEVICES=0,1 python min_CP.py --length 8192    # two GPUs
    python min_CP.py                                           # all visible GPUs, or two CPU processes
    python min_CP.py --attention all-gather --nproc 4
    python min_CP.py --nproc 1                                 # the same training, plain
    torchrun --standalone --nproc-per-node 2 min_CP.py

It prints `parameters held: 478,720 of 478,720 (1.000)` and every --log-every steps the loss; the loss on text held
out, beside that of guesses from the one or two bytes before; tokens per second; the largest process's peak memory.
"""

import functools

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

import distributed as dist
import gpt
import options


def parse_args():
    parser = options.ArgumentParser(__doc__)
    gpt.add_model_options(parser)
    parser.add_argument("--attention", choices=tuple(ATTENTIONS), default="ulysses", help="what the processes exchange")
    args = parser.parse_args()
    gpt.check_model_options(parser, args)
    if args.length % args.nproc:
        parser.error(f"argument --length: {args.length} is not a multiple of the {args.nproc} processes")
    if args.attention == "ulysses" and args.heads % args.nproc:
        parser.error(f"argument --heads: {args.heads} is not a multiple of the {args.nproc} processes")
    return args


# ---- attention over all pieces: q, k and v are (batch, heads, piece, head width), and so is the result ------------


class AllToAll(torch.autograd.Function):
    """Row r of x to rank r; row r of the result is from rank r. What went there comes back: it is its own backward."""

    @staticmethod
    def forward(ctx, x):
        result = torch.empty_like(x)
        torch_dist.all_to_all_single(result, x)
        return result

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad.contiguous())


class AllGather(torch.autograd.Function):
    """x of every rank, as rows in rank order. All of them used mine, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x):
        result = x.new_empty(dist.get_world_size(), *x.shape)
        torch_dist.all_gather_into_tensor(result.flatten(0, 1), x)
        return result

    @staticmethod
    def backward(ctx, grad):
        result = grad.new_empty(grad.shape[1:])
        torch_dist.reduce_scatter_tensor(result, grad.flatten(0, 1))
        return result


def exchange(x, split, join):
    """Cut x along dimension `split`, a piece for each rank, and join the pieces that arrive along dimension `join`."""
    pieces = torch.stack(x.chunk(dist.get_world_size(), split))
    return torch.cat(AllToAll.apply(pieces).unbind(), join)


def ulysses(q, k, v):
    q, k, v = exchange(torch.stack([q, k, v]), split=2, join=3)  # all heads of my piece -> my heads of all pieces
    return exchange(F.scaled_dot_product_attention(q, k, v, is_causal=True), split=2, join=1)


def all_gather(q, k, v):
    k, v = torch.cat(AllGather.apply(torch.stack([k, v])).unbind(), 3)
    piece = q.shape[2]
    seen = (dist.get_rank() + 1) * piece  # bytes up to the end of my piece: its last one may look at all of them
    return F.scaled_dot_product_attention(q, k[:, :, :seen], v[:, :, :seen], causal_lower_right(piece, seen))


ATTENTIONS = {"ulysses": ulysses, "all-gather": all_gather}


# ---- training -----------------------------------------------------------------------------------------------------


def parallelize(model, attention):
    """Let attention reach all pieces, and DDP average the gradients of the pieces. One process: the model as it is."""
    if dist.get_world_size() > 1:
        for block in model.blocks:
            block.attention.attend = ATTENTIONS[attention]
    return dist.prepare_ddp_model(model)


def local_loss(model, x, y):
    """The mean over this process's piece. Pieces are of one length, so the mean over processes is that of the batch."""
    piece = torch.arange(x.shape[1], device=x.device).chunk(dist.get_world_size())[dist.get_rank()]
    return gpt.loss_fn(model(x[:, piece], piece), y[:, piece])  # each byte keeps its place in the whole sequence


def train(model, optimizer, text, held_out, args):
    """The loss of every step over the whole batch, (steps,)."""
    progress = gpt.Progress(functools.partial(local_loss, model), text, held_out, args)
    for step in range(args.steps):
        x, y = gpt.batch(text, step, args.global_batch_size, args.length, args.seed, dist.get_device())
        loss = local_loss(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        if args.clip:  # averaged by now, so every rank finds the same norm
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        progress(loss)
    return progress.losses


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    torch.manual_seed(args.seed)
    model = gpt.GPT(args.layers, args.width, args.heads, args.length).to(dist.get_device())
    gpt.report_held(model.parameters(), sum(param.numel() for param in model.parameters()))
    model = parallelize(model, args.attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, *gpt.load_text(), args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
