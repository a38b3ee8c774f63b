"""Shard parameters, gradients and state: FSDP from scratch, the minimum working example of ZeRO stage 3.

This is what happens inside `fully_shard`, which min_FSDP.py calls. A unit is a block of the model. Its parameters are
views of one flat tensor, `full`, which has memory only while the block computes. Each process always holds 1/N of it,
`own`, and steps that part. Two functions stand around each block. Each has a forward and a backward, and together they
are this timeline:

                     forward                                     backward
    BeforeBlock      all-gather i, prefetch i+1    | compute |   free i, reduce-scatter the gradients of i
    AfterBlock       free i                        v block i ^   all-gather i, prefetch i-1

    network    gather 1 | gather 2  |           | gather 2 | gather 1   | reduce 2   | reduce 1 |
    compute             | forward 1 | forward 2 |          | backward 2 | backward 1 |          | step the parts
    free                            | 1         | 2        |            | 2          | 1        |

Two blocks at most have memory at the same time, and so do the gradients of two. What is outside the blocks, embeddings,
last norm and head, is one more unit, the root. It stays gathered from forward to backward, and is reduced last.

`fully_shard` (FSDP2) cuts each parameter along its first dimension, so each part keeps the name of its parameter, which
checkpoints need. One flat tensor per block needs no copies around an all-gather. But a part may begin in the middle of
a matrix, so the optimizer must treat every element by itself, as SGD and AdamW do.

Choose min_FSDP.py for real work: it also has mixed precision, checkpoints and models that no process could hold.

Cost per process, for P float32 parameters, R of them in the root, on N processes: 16·P/N bytes between two steps
(parameters 4, gradients 4, AdamW 8). While a block computes, up to 16 bytes more for each of its parameters, for two
blocks and their gradients, and 8·R for the root (gloo copies gradients: 12·R). A step sends (N-1)/N · 4·(3·P - R) bytes
and gloo sends the reduce-scatter twice. Sources: ZeRO (arXiv:1910.02054), FSDP (arXiv:2304.11277).

    python min_FSDP_scratch.py --nproc 2                              # two processes; without --nproc, all GPUs
    torchrun --standalone --nproc-per-node 2 min_FSDP_scratch.py      # torchrun starts the processes
"""

import functools

import torch
import torch.distributed as torch_dist
from torch import nn

import distributed as dist
import gpt

# Before torch 2.13 they have other names.
all_gather_single = getattr(torch_dist, "all_gather_single", torch_dist.all_gather_into_tensor)
reduce_scatter_single = getattr(torch_dist, "reduce_scatter_single", torch_dist.reduce_scatter_tensor)


# ---- around each block --------------------------------------------------------------------------------------------


class BeforeBlock(torch.autograd.Function):
    """When its backward is called, all gradients of the block's parameters are there.

    Of the operations that are ready, autograd always takes the last that was recorded in forward. It has recorded
    BeforeBlock before all operations of the block.
    """

    @staticmethod
    def forward(ctx, x, unit):
        ctx.unit = unit
        unit.wait()
        if unit.following:
            unit.following.gather()  # while this block computes
        return x

    @staticmethod
    def backward(ctx, gradient):
        if ctx.unit.following:
            ctx.unit.following.finish()  # it was sent while this block computed
        ctx.unit.reduce()  # while the previous block computes
        return gradient, None


class AfterBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, unit):
        ctx.unit = unit
        unit.free()
        return x

    @staticmethod
    def backward(ctx, gradient):
        ctx.unit.wait()
        if ctx.unit.previous:
            ctx.unit.previous.gather()  # while this block computes
        return gradient, None


# ---- units: parameters that are gathered and reduced together -----------------------------------------------------


class Freed(nn.Parameter):
    """A parameter that has no memory now. torch would read from address 0, or save a file without weights."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func == torch.Tensor.requires_grad_:  # to freeze it needs no memory
            return super().__torch_function__(func, types, args, kwargs or {})
        raise ValueError(f"{func}: a parameter has no memory until its unit computes, and units must not share one")


class Unit:
    """Parameters that are gathered and freed together. Each rank holds 1/N of them, `own`, and of their gradients.

    `pieces` are the pieces of the parameters in `own`, which the optimizer steps. There is one for each parameter,
    because the optimizer must skip frozen ones. `wait` adds `name` to `order`.
    """

    previous = following = None  # the units that compute before and after this one
    reducing = None  # the reduce-scatter in progress

    def __init__(self, name, params, order):
        if len({param.dtype for param in params}) > 1:
            raise ValueError("a block, or the root, has parameters of several types, and one vector has one")
        self.name = name
        self.params = params
        self.order = order
        flat = nn.utils.parameters_to_vector(params).detach()
        self.padding = flat.new_zeros(-len(flat) % dist.get_world_size())  # makes all parts equally long
        self.full = torch.cat([flat, self.padding])
        self.own = self.full.chunk(dist.get_world_size())[dist.get_rank()].clone()
        self.own_grad = torch.zeros_like(self.own)
        self.pieces = []
        self.piece_grads = []
        begin = dist.get_rank() * len(self.own)
        start = 0
        for param in params:
            stop = start + param.numel()
            param.data = self.full[start:stop].view_as(param)
            # Where this parameter is in `own`. A slice ends with `own`, and is empty if the parameter is elsewhere.
            place = slice(max(start - begin, 0), max(stop - begin, 0))
            self.pieces.append(nn.Parameter(self.own[place]))
            self.piece_grads.append(self.own_grad[place])
            start = stop
        self.free()

    def gather(self):
        """Start the all-gather, unless it has been started."""
        if self.full.untyped_storage().nbytes() == 0:
            self.full.untyped_storage().resize_(self.full.nbytes)
            self.gathering = all_gather_single(self.full, self.own, async_op=True)

    def wait(self):
        self.order.append(self.name)
        self.gather()
        self.gathering.wait()
        for param in self.params:
            param.__class__ = nn.Parameter

    def free(self):
        """The parameters keep their shapes, without memory. Until the next `wait` nothing may use them.

        Autograd has saved them for backward. It refuses a saved tensor that was changed in place. But `gather` changes
        `full`, and autograd does not know that the parameters share its memory.
        """
        self.full.untyped_storage().resize_(0)
        for param in self.params:
            param.__class__ = Freed

    def reduce(self):
        """Free the parameters. Start the reduce-scatter of the gradients of this rank's share of the batch."""
        grads = []
        for param, piece, piece_grad in zip(self.params, self.pieces, self.piece_grads, strict=True):
            # Another rank may have used a parameter that this one has not, so only frozen ones are not stepped.
            piece.grad = piece_grad if param.requires_grad else None
            grads.append(torch.zeros_like(param) if param.grad is None else param.grad)
            param.grad = None
        self.free()
        flat = nn.utils.parameters_to_vector([*grads, self.padding])
        self.reducing = reduce_scatter_single(self.own_grad, flat, async_op=True)

    def finish(self):
        """Wait for the reduce-scatter, and make its sum the mean over all ranks."""
        if self.reducing:  # else a block has not computed, which `end_step` reports
            self.reducing.wait()
        self.reducing = None  # frees the whole gradients
        self.own_grad /= dist.get_world_size()


class ZeRO3:
    """A GPT in units: one for each block, and the root for all other parameters.

    Its weights must be equal on all ranks. Each block must compute exactly once in a step, in the order of
    `model.blocks`, and `finish_backward` must follow each backward. To recompute activations, do it inside a block.
    Blocks must not share parameters, nor use a parameter of the root. The root may use one twice, as with tied weights.
    A parameter that no rank uses has a gradient of zeros: freeze it, or weight decay changes it.

    While a unit does not compute, its parameters are `Freed`: to use one raises ValueError. So evaluate with ZeRO3,
    give `pieces()` to the optimizer, clip with `clip_gradients`, and load weights before. To save, use min_FSDP.py.
    """

    def __init__(self, model):
        self.model = model
        self.order = []  # in which units were used in this step
        self.units = []
        named = model.named_parameters(remove_duplicate=False)
        in_root = dict.fromkeys(param for name, param in named if not name.startswith("blocks."))  # tied ones once
        self.root = Unit("root", list(in_root), self.order)
        for number, block in enumerate(model.blocks):
            unit = Unit(number, list(block.parameters()), self.order)
            if self.units:
                unit.previous = self.units[-1]
                unit.previous.following = unit
            self.units.append(unit)
            block.forward = functools.partial(self.compute, unit, block.forward)
        self.units.append(self.root)

    def compute(self, unit, forward, x):
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # else autograd would not call BeforeBlock.backward
        x = BeforeBlock.apply(x, unit)
        x = forward(x)
        return AfterBlock.apply(x, unit)

    def __call__(self, tokens):
        if self.order:
            raise dist.DistributedError("finish_backward must follow each forward and its backward")
        self.root.wait()
        logits = self.model(tokens)
        if torch.is_grad_enabled():
            logits.register_hook(lambda gradient: self.root.wait())  # if the graph is kept for another backward
        else:
            self.root.free()
            self.end_step(["root", *range(len(self.model.blocks))])
        return logits

    def finish_backward(self):
        """Call it after backward. Each piece then has its gradient, the mean over all ranks, without `zero_grad`."""
        self.root.reduce()
        blocks = range(len(self.model.blocks))
        self.end_step(["root", *blocks, "root", *reversed(blocks)])
        self.units[0].finish()
        self.root.finish()

    def end_step(self, expected):
        """Check that each block has computed once. Otherwise gradients would be wrong, and nothing would tell."""
        if self.order != expected:
            raise dist.DistributedError(f"a step used {self.order}, not {expected}: each block must compute once")
        self.order.clear()

    def pieces(self):
        """What this rank holds and the optimizer steps."""
        return [piece for unit in self.units for piece in unit.pieces if piece.numel() > 0]


# ---- training -----------------------------------------------------------------------------------------------------


def train(zero, optimizer, data, args):
    """Returns the loss of every step over all processes, (steps,)."""
    progress = gpt.Progress(zero, data, args)
    for step in range(args.steps):
        x, y = data.batch(step)
        loss = gpt.loss_fn(zero(x), y)
        loss.backward()
        zero.finish_backward()
        if args.clip:
            clip_gradients(zero, args.clip)
        optimizer.step()
        progress(step, loss)
    return progress.losses


def clip_gradients(zero, max_norm):
    """As nn.utils.clip_grad_norm_, by the norm over the parts of all ranks."""
    norm = dist.all_reduce(sum(unit.own_grad.square().sum() for unit in zero.units)).sqrt()
    for unit in zero.units:
        unit.own_grad *= (max_norm / (norm + 1e-6)).clamp(max=1)


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = gpt.make_parser(__doc__)
    args = parser.parse_args()
    gpt.check_model_options(parser, args, batch=(args.nproc, "the number of processes"))
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    gpt.start(args)
    data = gpt.Data(args)  # this process's share of each global batch
    model = gpt.GPT(gpt.Config.from_args(args), args.seed).to(dist.get_device())
    n_params = sum(param.numel() for param in model.parameters())
    zero = ZeRO3(model)
    gpt.report_held(zero.pieces(), n_params)
    optimizer = torch.optim.AdamW(zero.pieces(), lr=args.lr, fused=True)
    train(zero, optimizer, data, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
