"""Shard the optimizer's state: the minimum working example of ZeRO stage 1.

Every process holds all parameters and gradients, as with DDP, but only 1/N of the optimizer's state. All parameters are
views of one flat vector, which is cut into N parts of equal length. Process r owns part r. With N = 4, this is a step
of process 1:

    gradients    | part 0 | part 1 | part 2 | part 3 |    computed on this process's share of the batch
                              |
                              |     1. reduce-scatter: part 1 of the gradients, averaged over all processes
                          | part 1 |
                              |     2. the optimizer steps part 1, the only part whose state this process holds
                          | part 1 |
                              |     3. all-gather: every process receives the new parameters of all parts
    parameters   | part 0 | part 1 | part 2 | part 3 |    the same on every process again

Choose it over min_DDP.py when the model fits on one device, but not together with Adam's state. If parameters and
gradients do not fit either, choose min_FSDP.py, which shards these as well.

Cost per process, for P float32 parameters on N processes: 8·P bytes of parameters and gradients and 8·P/N bytes of
Adam's state. DDP needs 16·P, FSDP 16·P/N. Each step sends (N-1)/N · 4·P bytes of gradients and as many of parameters,
which is what DDP sends in total (gloo's reduce-scatter sends twice as much). DDP sends during backward, but this
script sends after it.

A part may start and end in the middle of a matrix. So the optimizer must treat every element by itself, as SGD and
AdamW do. For other optimizers combine DDP with torch.distributed.optim.ZeroRedundancyOptimizer, which keeps whole
parameters together. It sends 1.5 times the bytes, because every process receives all gradients. If parameters need
different options, make one ZeRO for each group of them. Each of these clips its own gradients.

    python min_ZeRO.py                                      # one process per visible GPU, or one on the CPU
    python min_ZeRO.py --nproc 2                            # two processes
    torchrun --standalone --nproc-per-node 2 min_ZeRO.py    # torchrun starts the processes
"""

import math

import torch
import torch.distributed as torch_dist
from torch import nn

import distributed as dist
import gpt

# Before torch 2.13 they have other names.
all_gather_single = getattr(torch_dist, "all_gather_single", torch_dist.all_gather_into_tensor)
reduce_scatter_single = getattr(torch_dist, "reduce_scatter_single", torch_dist.reduce_scatter_tensor)


# ---- an optimizer whose state is sharded --------------------------------------------------------------------------


class ZeRO:
    """An optimizer whose state is split over all processes. A learning-rate scheduler takes its attribute `optim`.

    `optim_class` and `defaults` make the optimizer of the part that this process owns. `clip`, if given, is the largest
    norm of all gradients together. Freeze parameters before you make it. One that is neither frozen nor used has a
    gradient of 0, so weight decay shrinks it.
    """

    def __init__(self, params, optim_class, clip=None, **defaults):
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        self.clip = clip
        params = list(params)
        dist.sync_params(params)  # start from rank 0's weights, as DDP does
        self.flat, self.grad = flatten(params, world_size)  # all parameters and all gradients
        self.own = self.flat.chunk(world_size)[rank]  # views of this process's part
        self.own_grad = self.grad.chunk(world_size)[rank]
        part = nn.Parameter(self.own)
        part.grad = self.own_grad
        self.optim = optim_class([part], **defaults)

    def step(self):
        if dist.get_world_size() > 1:
            reduce_scatter_single(self.own_grad, self.grad)  # 1. the sum over all processes
            self.own_grad /= dist.get_world_size()
        if self.clip:
            self.clip_gradients()
        self.optim.step()  # 2.
        if dist.get_world_size() > 1:
            all_gather_single(self.flat, self.own)  # 3.

    def zero_grad(self):
        self.grad.zero_()  # model.zero_grad() would set the gradients to None: they must stay views of `grad`

    def clip_gradients(self):
        """As nn.utils.clip_grad_norm_, by the norm over the parts of all processes."""
        norm = dist.all_reduce(self.own_grad.square().sum()).sqrt()
        self.own_grad *= (self.clip / (norm + 1e-6)).clamp(max=1)


def flatten(params, world_size):
    """Move all trained parameters into one vector, and their gradients into another, of which they become views.

    Returns both vectors. Zeros after the last parameter make all parts equally long.
    """
    params = [param for param in params if param.requires_grad]  # weight decay would change a frozen one
    if len({param.dtype for param in params}) > 1:
        raise ValueError("the parameters have several types, and one vector has one: use an optimizer for each type")
    part_size = math.ceil(sum(param.numel() for param in params) / world_size)
    flat = params[0].detach().new_zeros(world_size * part_size)
    grad = torch.zeros_like(flat)
    start = 0
    for param in params:
        stop = start + param.numel()
        flat[start:stop] = param.detach().flatten()
        param.data = flat[start:stop].view_as(param)
        param.grad = grad[start:stop].view_as(param)
        start = stop
    return flat, grad


# ---- training -----------------------------------------------------------------------------------------------------


def train(model, optimizer, data, args):
    """Returns the loss of every step over all processes, (steps,)."""
    progress = gpt.Progress(model, data, args)
    for step in range(args.steps):
        x, y = data.batch(step)
        optimizer.zero_grad()
        loss = gpt.loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        progress(step, loss)
    return progress.losses


def report_state(optim, model):
    """Print the bytes of Adam's state on each process, and with DDP. All processes have parts of one length."""
    held = 0
    for state in optim.state.values():
        held += sum(value.nbytes for value in state.values() if value.dim())  # the step number has no dimension
    total = 8 * sum(param.numel() for param in model.parameters())
    dist.print_primary(f"optimizer state held: {held:,} of {total:,} bytes ({held / total:.3f})")


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
    optimizer = ZeRO(model.parameters(), torch.optim.AdamW, args.clip, lr=args.lr, fused=True)
    train(model, optimizer, data, args)
    report_state(optimizer.optim, model)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
