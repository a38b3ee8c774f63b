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

The next block is gathered while this one computes, so two blocks at most have memory at the same time, and so do the
gradients of two. What is outside the blocks, embeddings, last norm and head, is one more unit, the root. It stays
gathered from forward to backward, and its gradients are sent last. No computation hides the gather of the root, the
first block's gather in each direction and the last reduce-scatter.

With `fully_shard(block, reshard_after_forward=False)` there is nothing like AfterBlock: no second gather, but all
blocks stay in memory until their backward, 4·P bytes. With `set_requires_gradient_sync(False)` there is no
reduce-scatter, to sum the gradients of several micro-batches first. Each process then holds all gradients, 4·P bytes.

`fully_shard` (FSDP2) cuts each parameter along its first dimension, so each part keeps the name of its parameter, which
checkpoints need. This script has one flat tensor per block. It needs no copies around an all-gather, and each
collective is one line. A part may begin in the middle of a matrix, so the optimizer must treat every element by itself,
as SGD and AdamW do.

Choose min_FSDP.py for real work: it also has mixed precision, checkpoints and models that no process could hold.

Cost per process, for P float32 parameters, R of them in the root, on N processes: 16·P/N bytes between two steps
(parameters 4, gradients 4, AdamW 8). While a block computes, up to 16 bytes more for each of its parameters, for two
blocks and their gradients, and 8·R for the root. A step sends (N-1)/N · 4·(3·P - R) bytes. Of these, gloo sends those
of the reduce-scatter twice, which is not printed. Sources: ZeRO (https://arxiv.org/abs/1910.02054), FSDP
(https://arxiv.org/abs/2304.11277).

    python min_FSDP_scratch.py --nproc 2                                      # two processes; without --nproc, all GPUs
    torchrun --standalone --nproc-per-node 2 min_FSDP_scratch.py              # torchrun starts the processes

It prints `parameters held: 239,360 of 478,720 (0.500)`, as min_FSDP.py does, lines of progress, and at the end
`sent per step: 2,707,968 bytes | waited for the network and other ranks: 8 of 120 ms`. On GPUs both times are those of
the host, which does not wait.
"""

import functools
import time

import torch
import torch.distributed as torch_dist
from torch import nn

import distributed as dist
import gpt
import options

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


# ---- what is gathered and reduced together ------------------------------------------------------------------------


class Freed(nn.Parameter):
    """A parameter that has no memory now. torch would read from address 0, or save a file without weights."""

    # They need no memory. parity.py calls most of them.
    allowed = (torch.Tensor.numel, torch.Tensor.untyped_storage, torch.Tensor.requires_grad_)
    allowed += (torch.Tensor.grad.__get__, torch.Tensor.nbytes.__get__, torch.Tensor.requires_grad.__get__)
    allowed += (torch.Tensor.dtype.__get__, torch.Tensor.layout.__get__)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in cls.allowed:
            return super().__torch_function__(func, types, args, kwargs or {})
        name = torch.overrides.resolve_name(func)
        raise ValueError(f"{name}: a parameter has no memory until its unit computes, and units must not share one")


class Unit:
    """Parameters that are gathered and freed together. Each rank holds 1/N of them, `own`, and of their gradients.

    `pieces` are the pieces of the parameters in `own`, which the optimizer steps. There is one for each parameter,
    because the optimizer must skip those without a gradient.
    """

    previous = following = None  # the units that compute before and after this one
    reducing = None  # the reduce-scatter in progress

    def __init__(self, params, network):
        if len({param.dtype for param in params}) > 1:
            raise ValueError("a block, or the root, has parameters of several types, and one vector has one")
        self.params = params
        self.classes = [param.__class__ for param in params]
        self.network = network
        flat = nn.utils.parameters_to_vector(params).detach()
        self.padding = flat.new_zeros(-len(flat) % dist.get_world_size())  # makes all parts equally long
        self.full = torch.cat([flat, self.padding])
        n_own = len(self.full) // dist.get_world_size()
        begin = dist.get_rank() * n_own
        self.own = self.full[begin : begin + n_own].clone()
        self.own_grad = torch.zeros_like(self.own)
        self.pieces = []
        self.piece_grads = []
        start = 0
        for param in params:
            stop = start + param.numel()
            param.data = self.full[start:stop].view_as(param)
            # Where this parameter is in `own`. A slice ends with `own`, and is empty if the parameter is elsewhere.
            place = slice(max(start - begin, 0), max(stop - begin, 0))
            self.pieces.append(nn.Parameter(self.own[place]))
            self.piece_grads.append(self.own_grad[place])
            start = stop
        self.events = []
        self.free()
        self.events = []  # what it did in this step

    def gather(self):
        """Start the all-gather, unless it has been started."""
        if self.full.untyped_storage().nbytes() == 0:
            self.events.append("gather")
            self.full.untyped_storage().resize_(self.full.nbytes)
            self.gathering = self.network.start(all_gather_single, self.full, self.own)

    def wait(self):
        self.gather()
        self.network.wait(self.gathering)
        for param, its_class in zip(self.params, self.classes, strict=True):
            param.__class__ = its_class

    def free(self):
        """The parameters keep their shapes, without memory. Until the next `wait` nothing may use them.

        Autograd has saved them for backward. It refuses a saved tensor that was changed in place. But `gather` changes
        `full`, and autograd does not know that the parameters share its memory.
        """
        self.events.append("free")
        self.full.untyped_storage().resize_(0)
        for param in self.params:
            param.__class__ = Freed

    def reduce(self):
        """Free the parameters. Start the reduce-scatter of the gradients of this rank's share of the batch."""
        grads = []
        for param, piece, piece_grad in zip(self.params, self.pieces, self.piece_grads, strict=True):
            piece.grad = None if param.grad is None else piece_grad  # a gradient is on all ranks or on none
            grads.append(torch.zeros_like(param) if param.grad is None else param.grad)
            param.grad = None
        self.free()
        self.events.append("reduce")
        flat = nn.utils.parameters_to_vector([*grads, self.padding])
        self.reducing = self.network.start(reduce_scatter_single, self.own_grad, flat)

    def finish(self):
        """Wait for the reduce-scatter, and make its sum the mean over all ranks."""
        self.network.wait(self.reducing)
        self.reducing = None  # frees the whole gradients
        self.own_grad /= dist.get_world_size()


class ZeRO3:
    """A GPT in units: one for each block, and the root for all other parameters.

    Its weights must be equal on all ranks. Each block must compute exactly once in a step, in the order of
    `model.blocks`, and `finish_backward` must follow each backward. To recompute activations, do it inside a block.
    A parameter must have a gradient on all ranks, or on none. Blocks must not share parameters, nor use a parameter of
    the root. The root may use one twice, as with tied weights.

    While a unit does not compute, its parameters are `Freed`: to use one raises ValueError. So evaluate with ZeRO3,
    give `pieces()` to the optimizer, clip with `clip_gradients`, and load weights before. To save, use min_FSDP.py.
    """

    def __init__(self, model):
        self.model = model
        self.network = Network()
        self.units = []
        named = model.named_parameters(remove_duplicate=False)
        in_root = dict.fromkeys(param for name, param in named if not name.startswith("blocks."))  # tied ones once
        self.root = Unit(list(in_root), self.network)
        for block in model.blocks:
            unit = Unit(list(block.parameters()), self.network)
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
        if self.root.events:
            raise dist.DistributedError("finish_backward must follow each forward and its backward")
        self.root.wait()
        logits = self.model(tokens)
        if torch.is_grad_enabled():
            logits.register_hook(lambda gradient: self.root.wait())  # if the graph is kept for another backward
        else:
            self.root.free()
            self.end_step(["gather", "free"])
        return logits

    def finish_backward(self):
        """Call it after backward. Each piece then has its gradient, the mean over all ranks, without `zero_grad`."""
        self.root.reduce()
        self.end_step(["gather", "free", "gather", "free", "reduce"])
        self.units[0].finish()
        self.root.finish()

    def end_step(self, expected):
        """Check that each block has computed once. Otherwise gradients would be wrong, and nothing would tell."""
        for number, unit in enumerate(self.units):
            if unit is not self.root and unit.events != expected:
                line = f"block {number} did {unit.events} in a step, and not {expected}"
                raise dist.DistributedError(f"{line}: each block must compute once, in the order of model.blocks")
            unit.events = []

    def pieces(self):
        """What this rank holds and the optimizer steps."""
        return [piece for unit in self.units for piece in unit.pieces if piece.numel() > 0]


class Network:
    """Starts collectives and waits for them. It counts what this rank sends, and how long it waits."""

    def __init__(self):
        self.sent = 0  # bytes
        self.waited = 0.0  # seconds

    def start(self, collective, output, given):
        """`collective(output, given)` in the background. In one process it is a copy."""
        if dist.get_world_size() == 1:
            output.copy_(given)
            return None
        part = min(output.nbytes, given.nbytes)
        self.sent += (dist.get_world_size() - 1) * part  # a ring sends all parts but one
        return collective(output, given, async_op=True)

    def wait(self, work):
        if work is not None:
            start = time.perf_counter()
            work.wait()
            self.waited += time.perf_counter() - start


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


def report_communication(zero, data):
    """Print what a rank sends in a step, and how long it waits for the network. On the CPU the rest is hidden."""
    x, y = data.batch(0)
    zero.network.sent = zero.network.waited = 0
    start = time.perf_counter()
    gpt.loss_fn(zero(x), y).backward()
    zero.finish_backward()
    times = f"{1000 * zero.network.waited:.0f} of {1000 * (time.perf_counter() - start):.0f} ms"
    dist.print_primary(f"sent per step: {zero.network.sent:,} bytes | waited for the network and other ranks: {times}")


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = options.ArgumentParser(__doc__)
    gpt.add_model_options(parser)
    args = parser.parse_args()
    gpt.check_model_options(parser, args, batch=(args.nproc, "the number of processes"))
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    gpt.start(args)
    data = gpt.Data(args)  # this process's share of each global batch
    model = gpt.GPT(gpt.Config.from_args(args), args.seed).to(dist.get_device())
    zero = ZeRO3(model)
    gpt.report_held(zero.pieces(), sum(param.numel() for param in model.parameters()))
    optimizer = torch.optim.AdamW(zero.pieces(), lr=args.lr, fused=True)
    train(zero, optimizer, data, args)
    report_communication(zero, data)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
