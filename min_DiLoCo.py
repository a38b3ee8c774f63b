"""Communicate rarely: the minimum working example of DiLoCo, distributed low-communication training.

Every process trains its own copy of the model, on its share of each batch, with an optimizer of its own. After every H
steps (--sync-every) the copies are averaged. Let theta be the parameters from which all copies started, and theta_r the
parameters of process r after H steps. The average change serves as the gradient of one outer step, by SGD with Nesterov
momentum, and all copies continue from its result (arXiv:2311.08105):

    theta  <-  OuterSGD(theta, gradient = theta - mean_r theta_r)

    process 0    theta --- H steps of AdamW ---> theta_0 ---+
                                                            +---> outer step ---> theta of the next round
    process 1    theta --- H steps of AdamW ---> theta_1 ---+

Choose it when the links are too slow for an exchange in every step: between machines without a fast network, or between
sites. On fast links min_DDP.py learns more from each batch. Typical H are tens to hundreds of steps. The larger H is,
the further the copies drift apart. With the default outer options a small H learns more slowly too, because the outer
momentum of 0.9 is meant for rare outer steps.

With --sync-every 1 --outer-lr 1 --outer-momentum 0 the parameters are averaged after every step. With SGD as the inner
optimizer this equals DDP on the global batch, because the mean of the steps is the step along the mean gradient. It
does not with AdamW, which divides each process's gradients by their own size.

Cost per process, for P float32 parameters on N processes: 24·P bytes (parameters 4, gradients 4, AdamW 8, theta 4, the
outer momentum 4), and 8·P more during an outer step. An outer step sends 2·(N-1)/N · 4·P bytes (a ring all-reduce), as
DDP does in every step. So it sends 1/H of the bytes that DDP sends.

    python min_DiLoCo.py                                # one process per visible GPU, or one on the CPU
    python min_DiLoCo.py --nproc 2 --sync-every 50      # two processes
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 min_DiLoCo.py
"""

import torch
from torch import nn

import distributed as dist
import gpt
import options

# ---- the outer step -----------------------------------------------------------------------------------------------


class Outer:
    """`start` is theta, the parameters from which all copies started this round. It is the same on every rank."""

    def __init__(self, model, lr, momentum):
        self.params = list(model.parameters())
        dist.sync_params([*self.params, *model.buffers()])  # start from rank 0's weights, as DDP does
        self.start = nn.utils.parameters_to_vector(self.params).detach().requires_grad_()
        self.optimizer = torch.optim.SGD([self.start], lr, momentum, nesterov=momentum > 0)

    @torch.no_grad()
    def step(self):
        # A gradient points uphill, and the copies moved downhill: so it is start minus end, not end minus start.
        self.start.grad = dist.reduce(self.start - nn.utils.parameters_to_vector(self.params))
        self.optimizer.step()
        self.start.grad = None
        # vector_to_parameters makes the parameters views of the vector. A copy keeps `start` where it is.
        nn.utils.vector_to_parameters(self.start.clone(), self.params)


# ---- training -----------------------------------------------------------------------------------------------------


def train(model, optimizer, data, args):
    """Returns the loss of every step over all processes, (steps,)."""
    progress = gpt.Progress(model, data, args)
    outer = Outer(model, args.outer_lr, args.outer_momentum)
    for step in range(args.steps):
        x, y = data.batch(step)
        optimizer.zero_grad()
        loss = gpt.loss_fn(model(x), y)
        loss.backward()
        if args.clip:  # each process clips its own gradients
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()  # its state is never averaged, and never reset
        if (step + 1) % args.sync_every == 0 or step + 1 == args.steps:
            outer.step()
        progress(step, loss)
    return progress.losses


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = gpt.make_parser(__doc__)
    parser.set_defaults(steps=800, log_every=100, lr=0.001)
    every_help = "average all copies every H steps"
    parser.add_argument("--sync-every", type=options.whole_number(1), default=20, help=every_help, metavar="H")
    rate_help = "learning rate of the outer steps"
    parser.add_argument("--outer-lr", type=options.positive_number, default=0.7, help=rate_help)
    momentum_help = "Nesterov momentum of the outer steps"
    parser.add_argument("--outer-momentum", type=options.number(0, below=1), default=0.9, help=momentum_help)
    args = parser.parse_args()
    gpt.check_model_options(parser, args, batch=(args.nproc, "the number of processes"))
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    gpt.start(args)
    data = gpt.Data(args)  # this process's share of each global batch
    model = gpt.GPT(gpt.Config.from_args(args), args.seed).to(dist.get_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, data, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
