"""Talk rarely: the minimum working example of DiLoCo, distributed low-communication training.

Every process trains its own copy of the model, on its share of each batch, with an optimizer of its own. After every
--sync-every H steps they average how far each has moved, and take that for the gradient of one outer step, SGD with
Nesterov momentum, which leads to where all of them go on from (arXiv:2311.08105). Choose it where the links are too
slow for an exchange in every step: between machines without a fast network, or between sites. Where they are not,
min_DDP.py learns more from each batch. H is tens to hundreds of steps: the larger it is, the further apart they drift.

With H = 1, --outer-lr 1 and --outer-momentum 0 it is averaging the parameters after every step. With SGD inside, with
momentum or without, that is DDP on the global batch: the mean of the steps is the step along the mean gradient. AdamW
scales each process's gradients by their own size, so with it this is something else than DDP.

Cost per process, for P float32 parameters on N processes: 24·P bytes (parameters 4, gradients 4, AdamW 8, the round's
start 4 and the outer momentum 4, which may wait in the host's memory), 8·P more during an outer step, and every H steps
2·(N-1)/N · 4·P bytes sent (a ring all-reduce): 1/H of what DDP sends.

    CUDA_VISIBLE_DEVICES=0,1 python min_DiLoCo.py --sync-every 50    # two GPUs
    python min_DiLoCo.py                                             # all visible GPUs, or two CPU processes
    python min_DiLoCo.py --sync-every 1 --outer-lr 1 --outer-momentum 0 --nproc 4
    python min_DiLoCo.py --nproc 1                                   # one copy alone, with outer steps
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 min_DiLoCo.py

It prints every --log-every steps the loss; the loss on text held out, beside that of guesses from the one or two bytes
before; tokens per second; the largest process's peak memory. Losses are means over the processes, each with its own
copy; after an outer step, as where H divides --log-every, the copies are one. Last, the bytes sent beside DDP's.
"""

import functools

import torch
from torch import nn

import distributed as dist
import gpt
import options


def parse_args():
    parser = options.ArgumentParser(__doc__)
    gpt.add_model_options(parser)
    parser.set_defaults(steps=800, log_every=100, lr=0.001)
    add = parser.add_argument
    add("--sync-every", type=options.whole_number(1), default=20, help="steps that each process takes alone")
    add("--outer-lr", type=options.positive_number, default=0.7, help="learning rate of the outer steps")
    add("--outer-momentum", type=float, default=0.9, help="Nesterov momentum of the outer steps")
    args = parser.parse_args()
    gpt.check_model_options(parser, args)
    if not 0 <= args.outer_momentum < 1:
        parser.error(f"argument --outer-momentum: {args.outer_momentum} is not a number from 0 to below 1")
    if args.global_batch_size % args.nproc:
        parser.error(f"argument --batch-size: {args.global_batch_size} is not a multiple of the {args.nproc} processes")
    return args


class Outer:
    """Where this round started, the same on every rank, and the optimizer that makes it the start of the next one."""

    def __init__(self, model, lr, momentum):
        self.params = list(model.parameters())
        self.start = nn.utils.parameters_to_vector(self.params).detach().requires_grad_()
        self.optimizer = torch.optim.SGD([self.start], lr, momentum, nesterov=momentum > 0)

    @torch.no_grad()
    def step(self):
        # Downhill is the way the copies went, so the gradient is what they have moved, backwards.
        self.start.grad = dist.reduce(self.start - nn.utils.parameters_to_vector(self.params))
        self.optimizer.step()
        self.start.grad = None
        # A copy: vector_to_parameters makes parameters views of the vector, and they are about to leave the start.
        nn.utils.vector_to_parameters(self.start.clone(), self.params)


def local_loss(model, x, y):
    """The mean over this process's share of the batch. Shares are equal, so the mean over processes is the batch's."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return gpt.loss_fn(model(x.chunk(world_size)[rank]), y.chunk(world_size)[rank])


def train(model, optimizer, text, held_out, args):
    """The loss of every step over all processes, (steps,)."""
    progress = gpt.Progress(functools.partial(local_loss, model), text, held_out, args)
    outer = Outer(model, args.outer_lr, args.outer_momentum)
    for step in range(args.steps):
        x, y = gpt.batch(text, step, args.global_batch_size, args.length, args.seed, dist.get_device())
        loss = local_loss(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        if args.clip:  # each process its own gradients
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()  # its state stays here, and is kept from round to round
        if (step + 1) % args.sync_every == 0 or step + 1 == args.steps:
            outer.step()
        progress(loss)
    return progress.losses


def report_sent(model, args):
    """Print, and return, the bytes that each process has sent; print what it would have sent with DDP."""
    n = dist.get_world_size()
    size = 2 * (n - 1) / n * sum(param.nbytes for param in model.parameters())
    rounds = -(-args.steps // args.sync_every)
    sent, ddp = rounds * size, args.steps * size
    dist.print_primary(f"sent by each process: {sent / 1e6:.1f} MB in {rounds} outer steps (DDP: {ddp / 1e6:.1f} MB)")
    return sent


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    torch.manual_seed(args.seed)  # the same weights on every rank
    model = gpt.GPT(args.layers, args.width, args.heads, args.length).to(dist.get_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, *gpt.load_text(), args)
    report_sent(model, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
