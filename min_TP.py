"""Split every layer: the minimum working example of tensor parallelism, with sequence and loss parallelism.

Every process works on the whole batch with its part of each layer: some attention heads, some of the MLP's hidden
features, some columns of embeddings and logits. Of two matrices the first is split by columns and the second by
rows: what lies between needs no exchange, and one all-reduce adds up what comes out. Choose it when
layers are too wide for one device or the batch is too small to share, and links are fast: inside one machine.
min_FSDP.py splits the parameters too, shares the batch, and stands slow links better; min_2D.py does both at once.

--sequence-parallel splits what is between those layers as well, norms and residuals, along the sequence: an all-reduce
becomes a reduce-scatter and an all-gather, which send as much together. --loss-parallel leaves the logits split and
computes the loss of their parts; without it every process gathers them all.

Cost per process, for P float32 parameters, L layers of width D, B sequences of T bytes, N processes: 16·P/N bytes
(parameters 4, gradients 4, Adam 8; norms and half of the biases, under 1 %, are whole), 1/N of the activations inside
layers and, with --sequence-parallel, of those between. Each step sends (N-1)/N · ((8·L+3)·B + 1) · 4·T·D bytes, 4·L+1
all-reduces and the embeddings, and without --loss-parallel (N-1)/N · 4·B·T·256 for the logits. (On the CPU
--sequence-parallel sends half as much again, because gloo's reduce-scatter is an all-reduce.)

    CUDA_VISIBLE_DEVICES=0,1 python min_TP.py --width 2048 --heads 16    # two GPUs
    python min_TP.py                                                     # all visible GPUs, or two CPU processes
    python min_TP.py --sequence-parallel --loss-parallel --nproc 4
    python min_TP.py --nproc 1                                           # the same training, plain
    torchrun --standalone --nproc-per-node 2 min_TP.py

It prints `parameters held: 240,256 of 478,720 (0.502)` and every --log-every steps the loss; the loss on text held
out, beside that of guesses from the one or two bytes before; tokens per second; the largest process's peak memory.
"""

import functools
import logging

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

import distributed as dist
import gpt
import options

# On the CPU, DTensor's all-to-all is an all-gather, of which every process would tell.
logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)


def parse_args():
    parser = options.ArgumentParser(__doc__)
    gpt.add_model_options(parser)
    add = parser.add_argument
    add("--sequence-parallel", action="store_true", help="split norms and residuals as well, along the sequence")
    add("--loss-parallel", action="store_true", help="leave the logits split, and compute the loss of their parts")
    args = parser.parse_args()
    gpt.check_model_options(parser, args)
    if args.heads % args.nproc:
        parser.error(f"argument --heads: {args.heads} is not a multiple of the {args.nproc} processes")
    if args.sequence_parallel and args.length % args.nproc:
        parser.error(f"argument --length: {args.length} is not a multiple of the {args.nproc} processes")
    return args


def parallelize(model, args):
    """Split the layers of `model` in place. One process: the model as it is."""
    if dist.get_world_size() == 1:
        return model
    mesh = init_device_mesh(dist.get_device().type, (dist.get_world_size(),))
    whole = Replicate()
    between = Shard(1) if args.sequence_parallel else whole  # what goes from layer to layer: (batch, length, width)
    plan = {
        # By features, not by rows as is usual: half the bytes, and the gradients are split as well.
        "token": ColwiseParallel(output_layouts=between),
        "position": ColwiseParallel(output_layouts=Shard(0) if args.sequence_parallel else whole),  # (length, width)
        "blocks.*.attention.qkv": ColwiseParallel(input_layouts=between),  # whole heads: see gpt.Attention
        "blocks.*.attention.out": RowwiseParallel(output_layouts=between),
        "blocks.*.mlp.up": ColwiseParallel(input_layouts=between),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if args.loss_parallel else whole,
            use_local_output=not args.loss_parallel,
        ),
    }
    parallelize_module(model, mesh, plan)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            # Weights that are whole everywhere, but DTensors: clipping and fused AdamW refuse to mix tensors with them,
            # and where a rank sees a part of the sequence only, their gradients are summed over the ranks.
            distribute_module(
                module,
                mesh,
                input_fn=lambda _, inputs, mesh: DTensor.from_local(inputs[0], mesh, [between], run_check=False),
                output_fn=lambda _, output, mesh: output.to_local(),
            )
    return model


def local_loss(model, x, y):
    """The loss of the whole batch, on every process."""
    loss = gpt.loss_fn(model(x), y)
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


@loss_parallel()  # cross-entropy of logits that are split, and its backward, work inside this context only
def train(model, optimizer, text, held_out, args):
    """The loss of every step, (steps,)."""
    progress = gpt.Progress(functools.partial(local_loss, model), text, held_out, args)
    for step in range(args.steps):
        # The whole batch, on every process.
        x, y = gpt.batch(text, step, args.global_batch_size, args.length, args.seed, dist.get_device())
        loss = local_loss(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        if args.clip:  # the norm of a DTensor is that of all its parts
            # One by one: torch 2.11 would leave as they are, in a list, gradients still to be summed over the ranks.
            nn.utils.clip_grad_norm_(model.parameters(), args.clip, foreach=False)
        optimizer.step()
        progress(loss)
    return progress.losses


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    torch.manual_seed(args.seed)
    model = gpt.GPT(args.layers, args.width, args.heads, args.length).to(dist.get_device())
    n_params = sum(param.numel() for param in model.parameters())
    model = parallelize(model, args)
    gpt.report_held(model.parameters(), n_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, *gpt.load_text(), args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
