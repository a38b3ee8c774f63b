"""Two dimensions at once: replicate, shard and split the layers of one model, on one DeviceMesh.

Every process has a place in a mesh of R x S x T. Its T neighbours along `tensor` split each layer's work (min_TP.py)
and take the same sequences; the S along `shard` split what is left of parameters, gradients and optimizer state
(min_FSDP.py); the R along `replicate` hold the same as it does and average their gradients, as DDP would. Choose

- R x S, known as HSDP, when S processes, as those of one node, hold the model with ease: what goes from node to node is
  the gradient of a shard once a step, where min_FSDP.py over all of them would gather every layer twice across nodes.
- S x T when min_FSDP.py has more processes than the batch has sequences, or the activations of one do not fit.
- All three on many nodes. Tensor neighbours have consecutive ranks, and replicas the most distant: the mesh puts the
  most frequent talk on the fastest links.

Cost per process, for P float32 parameters: 16·P/(S·T) bytes (parameters 4, gradients 4, Adam 8; norms and the biases
after a sum are not split by T), and while a block of L parameters computes, up to 8·L/T more. Each step sends
3·(S-1)/S · 4·P/T bytes along shard, 2·(R-1)/R · 4·P/(S·T) along replicate, and along tensor 8·(T-1)/T · 4·a in each
block, where a = batch size / (R·S) · length · width are the features of its sequences. --checkpoint-activations holds
one such input, split by T, per block instead of all that is computed in it, computes a third more and sends 11 for 8.

    python min_2D.py --nproc 4 --replicate 2                            # HSDP: 2 copies of 2 shards; all GPUs, or CPU
    python min_2D.py --nproc 4 --tensor 2                               # FSDP x TP: 2 shards of layers split in 2
    python min_2D.py --nproc 8 --replicate 2 --shard 2 --tensor 2       # all three
    python min_2D.py --nproc 4 --tensor 2 --checkpoint-dir runs         # saves, and goes on where it was,
    python min_2D.py --nproc 1 --checkpoint-dir runs --steps 600        # also on another mesh, or in one process
    CUDA_VISIBLE_DEVICES=0,1 python min_2D.py --tensor 2                # two GPUs
    torchrun --standalone --nproc-per-node 4 min_2D.py --replicate 2    # processes started by torchrun

It prints the mesh, `parameters held: 120,128 of 478,720 (0.251)`, and every --log-every steps the losses, beside those
of guessing each byte from the one or the two before it, tokens/s and peak memory. Open only checkpoints that you trust.
"""

import functools
import logging
import warnings

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint as recompute

import checkpoint
import distributed as dist
import gpt
import options

# Operations in place on the logits would be wrong; the norm of all gradients takes two small reductions, not one.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def parse_args():
    parser = options.ArgumentParser(__doc__)
    gpt.add_model_options(parser)
    add, count = parser.add_argument, options.whole_number(1)
    add("--replicate", type=count, default=1, help="copies of the model")
    add("--shard", type=count, help="processes that share each copy by FSDP; None is all that the others leave")
    add("--tensor", type=count, default=1, help="processes that share each layer's work")
    add("--checkpoint-activations", action="store_true", help="compute each block again in backward, to save memory")
    add("--checkpoint-dir", help="save here, and go on from the newest there")
    add("--save-every", type=count, default=100, help="steps between two checkpoints")
    args = parser.parse_args()
    gpt.check_model_options(parser, args)

    args.shard = args.shard or max(1, args.nproc // (args.replicate * args.tensor))
    mesh = f"replicate {args.replicate} x shard {args.shard} x tensor {args.tensor}"
    if args.replicate * args.shard * args.tensor != args.nproc:
        parser.error(f"argument --shard: {mesh} is not the number of processes, {args.nproc}")
    if args.global_batch_size % (parts := args.replicate * args.shard):
        parser.error(f"argument --batch-size: {args.global_batch_size} is not a multiple of replicate x shard, {parts}")
    for option, value in (("--heads", args.heads), ("--length", args.length)):
        if value % args.tensor:
            parser.error(f"argument {option}: {value} is not a multiple of --tensor {args.tensor}")
    if args.checkpoint_dir:
        checkpoint.check_writable("--checkpoint-dir", args.checkpoint_dir)
    return args


def parallelize(model, args):
    """Lay out `model`, which is alike on all ranks, over the mesh. Build the optimizer afterwards."""
    if args.checkpoint_activations:
        for block in model.blocks:
            block.forward = functools.partial(recompute, block.forward, use_reentrant=False)
    if dist.get_world_size() == 1:
        return model
    names = ("replicate", "shard", "tensor")
    mesh = init_device_mesh(dist.get_device().type, (args.replicate, args.shard, args.tensor), mesh_dim_names=names)
    if args.tensor > 1:
        split_layers(model, mesh["tensor"])
    # From the inside out: each block is gathered when it computes, what is left by itself. Gathered is only what
    # this rank holds of the split layers.
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["replicate", "shard"])
    return model


def split_layers(model, mesh):
    """Tensor parallel, with features between the split layers split along the sequence, dimension 1.

    Every parameter is named, norms too: the norm of all gradients is taken over DTensors of one mesh.
    """
    sequence = Shard(1)
    plan = {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
        "position": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),  # has no dimension of a batch
        "blocks.*.norm1": SequenceParallel(),
        "blocks.*.attention.qkv": ColwiseParallel(input_layouts=sequence),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=sequence),
        "blocks.*.norm2": SequenceParallel(),
        "blocks.*.mlp.up": ColwiseParallel(input_layouts=sequence),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=sequence),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=sequence, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def local_loss(model, args, x, y):
    """The loss on this process's part of the batch (x, y), which is its tensor neighbours' too."""
    parts, part = args.replicate * args.shard, dist.get_rank() // args.tensor
    return gpt.loss_fn(model(x.chunk(parts)[part]), y.chunk(parts)[part])


def train(model, optimizer, text, held_out, args):
    """The loss of every step from the newest checkpoint on, over all processes."""
    device = dist.get_device()
    first_step = checkpoint.load_sharded(args.checkpoint_dir, model, optimizer) if args.checkpoint_dir else 0
    progress = gpt.Progress(functools.partial(local_loss, model, args), text, held_out, args, first_step)
    for step in range(first_step, args.steps):
        x, y = gpt.batch(text, step, args.global_batch_size, args.length, args.seed, device)
        loss = local_loss(model, args, x, y)
        optimizer.zero_grad()
        loss.backward()
        if args.clip:  # by the norm over all processes, as the gradients are DTensors
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        progress(loss)
        if args.checkpoint_dir and (progress.step % args.save_every == 0 or progress.step == args.steps):
            checkpoint.save_sharded(args.checkpoint_dir, model, optimizer, progress.step)
    return progress.losses[first_step:]


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    device = dist.get_device()
    text, held_out = gpt.load_text()
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = gpt.GPT(args.layers, args.width, args.heads, args.length).to(device)
    n_params = sum(param.numel() for param in model.parameters())
    model = parallelize(model, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    mesh = f"replicate {args.replicate} x shard {args.shard} x tensor {args.tensor}"
    dist.print_primary(f"Training on {world_size} x {device.type}: {mesh}")
    gpt.report_held(model.parameters(), n_params)
    train(model, optimizer, text, held_out, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
