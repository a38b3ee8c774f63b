"""Shard the optimizer's state: the minimum working example of ZeRO stage 1.

Every process holds all parameters and gradients, as with DDP, but 1/N of the optimizer's state. All parameters are one
flat vector: each process gets the averaged gradients of its part, steps that part, and gathers what others stepped.
Choose it over min_DDP.py when the model fits but Adam's state beside it does not; where 8·P bytes are still too many,
min_FSDP.py shards parameters and gradients as well, and sends while it computes.

Cost per process, for P float32 parameters on N processes: 8·P bytes of parameters and gradients and 8·P/N of Adam's
state; with DDP 16·P, with FSDP 16·P/N. Each step sends (N-1)/N · 4·P bytes of gradients and as many of new parameters,
in all what DDP sends; DDP does so while backward runs, this afterwards. A part may end in the middle of a matrix, which
suits SGD and AdamW. For optimizers that need whole ones, --library is DDP and torch.distributed.optim's
ZeroRedundancyOptimizer: parts are whole parameters, and half as much again is sent, as every rank gets all gradients.

    python min_ZeRO.py                                      # all visible GPUs; two CPU processes where there is none
    CUDA_VISIBLE_DEVICES=0,1 python min_ZeRO.py --clip 1    # two GPUs
    python min_ZeRO.py --nproc 4 --library                  # four processes, by ZeroRedundancyOptimizer
    torchrun --standalone --nproc-per-node 2 min_ZeRO.py    # processes started by torchrun

It prints losses, beside those of guessing each byte from the one or the two before it, tokens/s and peak memory every
--log-every steps, and last `optimizer state held: 1,914,880 of 3,829,760 bytes (0.500)`.
"""

import functools

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import distributed as dist
import gpt
import options


def parse_args():
    parser = options.ArgumentParser(__doc__)
    gpt.add_model_options(parser)
    parser.add_argument("--library", action="store_true", help="split the state by ZeroRedundancyOptimizer")
    args = parser.parse_args()
    gpt.check_model_options(parser, args)
    if args.global_batch_size % args.nproc:
        parser.error(f"argument --batch-size: {args.global_batch_size} is not a multiple of the {args.nproc} processes")
    args.library &= args.nproc > 1  # it cannot be without a process group
    return args


class ZeRO:
    """Steps all of `groups`, as torch.optim takes them, by `optim`, which has 1/N of them: schedule `optim`."""

    def __init__(self, groups, optim_class, clip=None, **defaults):
        self.clip, n_params = clip, sum(param.numel() for group in groups for param in group["params"])
        size = -(-n_params // dist.get_world_size())  # of a part; of the last, a few elements may be nobody's
        first = dist.get_rank() * size
        self.flat = groups[0]["params"][0].detach().new_zeros(size * dist.get_world_size())
        self.grad = torch.zeros_like(self.flat)
        self.zero_grad = self.grad.zero_  # all parameters' gradients are views of it
        self.own, self.own_grad = self.flat[first : first + size], self.grad[first : first + size]
        parts, end = [], 0
        for group in groups:
            start = end
            for param in group["params"]:
                here = slice(end, end := end + param.numel())
                self.flat[here] = param.detach().flatten()
                param.data, param.grad = self.flat[here].view_as(param), self.grad[here].view_as(param)
            part = slice(max(0, start - first), max(0, end - first))  # of the group; empty if it is all others'
            parts.append({**group, "params": [nn.Parameter(self.own[part])]})
            parts[-1]["params"][0].grad = self.own_grad[part]
        dist.sync_params([self.flat])  # all start from rank 0's weights, as with DDP
        self.optim = optim_class(parts, **defaults)

    def step(self):
        if dist.get_world_size() > 1:
            torch_dist.reduce_scatter_tensor(self.own_grad, self.grad)
            self.own_grad /= dist.get_world_size()
        if self.clip:  # by the norm over all parts
            norm = dist.all_reduce(self.own_grad.square().sum()).sqrt()
            self.own_grad *= (self.clip / (norm + 1e-6)).clamp(max=1)
        self.optim.step()
        if dist.get_world_size() > 1:
            torch_dist.all_gather_into_tensor(self.flat, self.own)


def prepare(model, groups, args, optim_class, **defaults):
    """The model, in DDP if it is needed, and the optimizer of its parameter groups."""
    if args.library:
        model = dist.prepare_ddp_model(model, device_ids=[dist.get_device()])
        return model, ZeroRedundancyOptimizer(groups, optim_class, parameters_as_bucket_view=True, **defaults)
    return model, ZeRO(groups, optim_class, args.clip, **defaults)


def local_loss(model, x, y):
    """The loss on this process's part of the batch (x, y)."""
    x, y = (whole.chunk(dist.get_world_size())[dist.get_rank()] for whole in (x, y))
    return gpt.loss_fn(model(x), y)


def train(model, optimizer, text, held_out, args):
    """The loss of every step, over all processes."""
    progress = gpt.Progress(functools.partial(local_loss, model), text, held_out, args)
    for step in range(args.steps):
        x, y = gpt.batch(text, step, args.global_batch_size, args.length, args.seed, dist.get_device())
        loss = local_loss(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        if args.library and args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        progress(loss)
    return progress.losses


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    torch.manual_seed(args.seed)
    model = gpt.GPT(args.layers, args.width, args.heads, args.length).to(dist.get_device())
    params = list(model.parameters())
    n_params = gpt.report_held(params, sum(param.numel() for param in params))
    model, optimizer = prepare(model, [{"params": params}], args, torch.optim.AdamW, lr=args.lr, fused=True)
    train(model, optimizer, *gpt.load_text(), args)
    states = (value for state in optimizer.optim.state.values() for value in state.values() if value.dim())
    held = dist.all_reduce(torch.tensor(sum(value.nbytes for value in states), device=dist.get_device()), "max").item()
    dist.print_primary(f"optimizer state held: {held:,} of {8 * n_params:,} bytes ({held / n_params / 8:.3f})")


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
