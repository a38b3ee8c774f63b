"""Split every layer: tensor parallelism (TP), with the sequence split between the layers.

Take two linear layers, V and W, with a function f between them. Cut V by columns and W by rows. If f acts on each part
of the columns by itself, the pair needs only one sum over the processes:

    Y = f(X V) W = Σ_i f(X V_i) W_i

                    cut by columns          cut by rows
    rank 0    X ──────► f(X V_0) ──────► f(X V_0) W_0 ──┐
                                                        +──► Y
    rank 1    X ──────► f(X V_1) ──────► f(X V_1) W_1 ──┘

In an MLP, V is `up`, f is GELU and W is `down`. In attention, V is `qkv`, f is the attention of each head and W is
`out`. Between these pairs each process holds 1/N of the positions of every sequence, for the norms and the residuals:
this is sequence parallelism. An all-gather joins the pieces to X. A reduce-scatter sums Y and leaves each process its
piece.

The head is cut by columns: each process has the logits of 1/N of the vocabulary, and nothing gathers them. The loss
needs two small all-reduces of numbers per byte: the largest logit, and the sum of exponentials (`SplitCrossEntropy`).

Choose it when a layer is too wide for one device, or when there are more devices than sequences in the batch. It
communicates inside every layer, so it needs fast links, as inside one machine. FSDP (min_FSDP.py) splits the parameters
too, but also divides the batch, and tolerates slower links. min_FSDP_TP.py combines both.

Cost per process, for P float32 parameters, L layers of width D, B sequences of T bytes and N processes:
    memory    16·P/N bytes (parameters 4, gradients 4, AdamW 8; norms and some biases, under 1 %, are whole). No process
              ever holds the whole model. Activations take 1/N, but for the input X of each pair, kept for backward.
    sent      (N-1)/N · ((8·L + 4)·B + 1) · 4·T·D bytes in each step, and (N-1)/N · 24·B·T for the loss. The CPU's gloo
              sends 12·L + 5 for 8·L + 4, because its reduce-scatter is an all-reduce.

    python min_TP.py --nproc 2 --width 512       # two processes; without --nproc, all GPUs
"""

import math

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import distributed as dist
import gpt

# ---- split layers -------------------------------------------------------------------------------------------------


def split_layers(model, mesh, logits=None):
    """Split the layers of a GPT in place over the N processes of `mesh`.

    By default each process gets the logits of its part of the vocabulary, with Replicate() all of them. The number of
    heads and the sequence length must be multiples of N. The plan names every layer, the LayerNorms too,
    because clipping needs DTensors of one mesh. Freeze parameters after this call: SequenceParallel unfreezes the
    LayerNorms' (torch 2.14). Then build the optimizer.
    """
    sequence = Shard(1)  # dimension 1 of (batch, length, width)
    # The comments give the shape of each layer's local output, for a batch (B, T) and a model of width D.
    plan = {
        "token": ColwiseParallel(output_layouts=Replicate()),  # (B, T, D)
        "position": ColwiseParallel(output_layouts=Replicate()),  # (T, D)
        "blocks.0": PrepareModuleInput(  # each process takes its piece of the embedded sequence, (B, T/N, D)
            input_layouts=Replicate(), desired_input_layouts=sequence, use_local_output=True
        ),
        "blocks.*.norm1": SequenceParallel(),  # (B, T/N, D)
        "blocks.*.attention.qkv": ColwiseParallel(input_layouts=sequence),  # (B, T, 3 D/N): whole heads, see gpt.py
        "blocks.*.attention.out": RowwiseParallel(output_layouts=sequence),  # (B, T/N, D)
        "blocks.*.norm2": SequenceParallel(),  # (B, T/N, D)
        "blocks.*.mlp.up": ColwiseParallel(input_layouts=sequence),  # (B, T, 4 D/N)
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=sequence),  # (B, T/N, D)
        "norm": SequenceParallel(),  # (B, T/N, D)
        "head": ColwiseParallel(input_layouts=sequence, output_layouts=logits),  # (B, T, 256/N)
    }
    parallelize_module(model, mesh, plan)


# ---- the loss of split logits -------------------------------------------------------------------------------------


class SplitCrossEntropy(torch.autograd.Function):
    """The cross-entropy of each row of `logits`, (rows, own part of the vocabulary): (rows,), on every process.

    `targets`, (rows,), count from the first logit of this process. Those outside of its part are another process's.
    """

    @staticmethod
    def forward(ctx, logits, targets):
        maximum = logits.amax(dim=1)
        torch_dist.all_reduce(maximum, torch_dist.ReduceOp.MAX)
        shifted = logits - maximum[:, None]
        is_own = (targets >= 0) & (targets < logits.shape[1])
        place = targets.clamp(0, logits.shape[1] - 1)[:, None]  # a valid index; is_own masks it below
        target_logits = shifted.gather(1, place)[:, 0] * is_own
        exponentials = shifted.exp()
        total, target_logits = dist.all_reduce(torch.stack([exponentials.sum(dim=1), target_logits]))
        ctx.save_for_backward(exponentials / total[:, None], place, is_own)
        return total.log() - target_logits

    @staticmethod
    def backward(ctx, grad):
        softmax, place, is_own = ctx.saved_tensors
        ones = is_own[:, None].to(softmax.dtype)
        return softmax.scatter_add(1, place, -ones) * grad[:, None], None


def split_loss(model, x, y):
    """The mean over all bytes, in nats, the same on every process."""
    logits = model(x).flatten(0, 1)
    largest_part = math.ceil(256 / dist.get_world_size())  # as torch.chunk cuts the vocabulary
    return SplitCrossEntropy.apply(logits, y.flatten() - dist.get_rank() * largest_part).mean()


# ---- training -----------------------------------------------------------------------------------------------------


def train(model, optimizer, data, args):
    """Returns the loss of every step over all processes, (steps,)."""
    progress = gpt.Progress(model, data, args, loss_of=split_loss)
    for step in range(args.steps):
        x, y = data.batch(step)
        optimizer.zero_grad()
        loss = split_loss(model, x, y)
        loss.backward()
        if args.clip:
            # The gradients are DTensors, so this is the norm over all processes. With foreach=True, torch 2.11 would
            # scale the gradients of the norms before they are summed over the processes, and forget the sum.
            nn.utils.clip_grad_norm_(model.parameters(), args.clip, foreach=False)
        optimizer.step()
        progress(step, loss)
    return progress.losses


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = gpt.make_parser(__doc__)
    args = parser.parse_args()
    processes = (args.nproc, "the number of processes")
    gpt.check_model_options(parser, args, heads=processes, length=processes)
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    gpt.start(args, share=0)  # one seed for all processes, because they work on the same sequences
    data = gpt.Data(args, share=(0, 1))  # each process takes the whole batch
    model = gpt.make_meta_model(gpt.Config.from_args(args))  # shapes without memory: no process holds it whole
    if world_size > 1:
        split_layers(model, init_device_mesh(dist.get_device().type, (world_size,)))
    model.to_empty(device=dist.get_device())  # memory for this process's part
    gpt.fill(model.named_parameters(), args.seed)
    gpt.report_held(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, data, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
