"""Split the experts: the minimum working example of expert parallelism, for a mixture of experts.

In place of its MLP each block has --experts of them. A router sends every token (here a byte) to the --top it rates
best and adds up what they return, weighted: many more parameters, hardly more work. Each process trains on its share of
the batch and holds attention and all else whole, as with DDP (min_DDP.py), but 1/N of the experts: an all-to-all takes
tokens to their experts, another brings results back. Choose it where most parameters are experts and one device cannot
hold them; min_FSDP.py splits them too, but sends parameters instead of tokens. No token is dropped, so N processes
compute what one does. A loss evens out the use of experts, for which all wait: the sum of each one's share of tokens,
over all processes, times its mean probability (Switch, arXiv:2101.03961).
The host waits for the device once per block, forward: to make room for tokens, it has to know their number. Production
systems avoid that by a fixed capacity of each expert, which drops tokens or pads (GShard, Switch), or by an all-to-all
whose counts stay on the device (DeepEP, torchtitan), and loop over no experts (torch.nn.functional.grouped_mm).

Cost per process, for S float32 parameters that are shared and E of experts, L layers of width D, B sequences of T
bytes, N processes: 16·(S + E/N) bytes (parameters 4, gradients 4, Adam 8). Each step sends DDP's 2·(N-1)/N · 4·S bytes
and, forward and backward, for evenly used experts (N-1)/N · 16·L·top·D·B·T/N; uneven use can bring one N times that.

    CUDA_VISIBLE_DEVICES=0,1 python min_EP.py --experts 64 --top 4    # two GPUs
    python min_EP.py                                                  # all visible GPUs, or two CPU processes
    python min_EP.py --nproc 1                                        # the same training, plain
    torchrun --standalone --nproc-per-node 4 min_EP.py --experts 4 --top 1

It prints `parameters held: 1,271,040 of 2,324,736 (0.547)` and every --log-every steps the loss, balance included; the
loss on held-out text, without it, beside that of guesses from one or two bytes before; tokens per second; the largest
process's peak memory; and, block by block, how many tokens of that step's batch went to each expert.
"""

import functools

import torch
import torch.distributed as torch_dist
from torch import nn

import distributed as dist
import gpt
import options


def parse_args():
    parser = options.ArgumentParser(__doc__)
    gpt.add_model_options(parser)
    parser.add_argument("--experts", type=options.whole_number(1), default=8, help="of each block, over all processes")
    parser.add_argument("--top", type=options.whole_number(1), default=2, help="experts that each token goes to")
    parser.add_argument(
        "--balance", type=options.positive_number, default=0.01, help="weight of the loss for their even use"
    )
    args = parser.parse_args()
    gpt.check_model_options(parser, args)
    for option, value in (("experts", args.experts), ("batch-size", args.global_batch_size)):
        if value % args.nproc:
            parser.error(f"argument --{option}: {value} is not a multiple of the {args.nproc} processes")
    if args.top > args.experts:
        parser.error(f"argument --top: {args.top} is more than the {args.experts} experts")
    return args


class AllToAll(torch.autograd.Function):
    """The first sent[0] rows to rank 0, and so on; received[r] from rank r. Gradients go the same ways back."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.ways_back = received, sent
        result = rows.new_empty(sum(received), *rows.shape[1:])
        torch_dist.all_to_all_single(result, rows, received, sent)
        return result

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad.contiguous(), *ctx.ways_back), None, None


class MixtureOfExperts(nn.Module):
    """Rank r of N keeps `count` / N experts, from number r · count / N on. All ranks must make it from one seed."""

    def __init__(self, width, count, top):
        super().__init__()
        self.count, self.top = count, top
        self.router = nn.Linear(width, count, bias=False)
        held, experts = count // dist.get_world_size(), {str(i): gpt.MLP(width) for i in range(count)}
        self.experts = nn.ModuleDict({i: expert for i, expert in experts.items() if int(i) // held == dist.get_rank()})

    def forward(self, x):
        """Sets also `tokens`, of each expert on all ranks, and `balance`, a loss to be averaged over ranks as any."""
        tokens = x.flatten(0, -2)
        probs = self.router(tokens).softmax(-1)
        weights, chosen = probs.topk(self.top)
        counts = torch.zeros(dist.get_world_size(), self.count, dtype=torch.long, device=x.device)
        counts[dist.get_rank()].index_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
        counts = dist.all_reduce(counts)  # of each rank, for each expert
        self.tokens = counts.sum(0)
        self.balance = self.count * (self.tokens / self.tokens.sum() * probs.mean(0)).sum()
        order = chosen.flatten().argsort(stable=True)  # by expert, so by the rank that has it
        results = self.visit_experts(tokens[order // self.top], counts.cpu())  # the host waits
        return (weights.unsqueeze(-1) * results[order.argsort()].unflatten(0, chosen.shape)).sum(1).view_as(x)

    def visit_experts(self, rows, counts):
        """What its expert makes of each row; they are sorted by expert."""
        counts = counts.unflatten(1, (len(counts), -1))  # of each rank, for each rank, for each of its experts
        leave, come = counts[dist.get_rank()], counts[:, dist.get_rank()]
        sent, received = leave.sum(1).tolist(), come.sum(1).tolist()
        exchange = AllToAll.apply if len(counts) > 1 else lambda rows, *counts: rows
        # They come rank by rank, and from each of them expert by expert: now all of the first expert first.
        experts = torch.arange(len(self.experts)).repeat(len(counts)).repeat_interleave(come.flatten())
        order = experts.argsort(stable=True).to(rows.device)
        parts = exchange(rows, sent, received)[order].split(come.sum(0).tolist())
        # One without tokens too: without gradients, of zeros, AdamW would not let its weights decay.
        rows = torch.cat([expert(part) for expert, part in zip(self.experts.values(), parts, strict=True)])
        return exchange(rows[order.argsort()], received, sent)


def add_experts(model, args):
    """Put a mixture of experts in place of each MLP."""
    for block in model.blocks:
        block.mlp = MixtureOfExperts(args.width, args.experts, args.top)
    return model


def split_params(model):
    """What all ranks hold, and the experts' that only this one holds."""
    params = list(model.named_parameters())
    return [p for name, p in params if ".experts." not in name], [p for name, p in params if ".experts." in name]


def local_loss(model, x, y):
    """The mean over this process's share of the batch. Shares are equal, so the mean over processes is the batch's."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return gpt.loss_fn(model(x.chunk(world_size)[rank]), y.chunk(world_size)[rank])


def backward(model, loss):
    """The gradients of the mean of all ranks' losses. (DDP has no public way to leave the experts alone.)"""
    (loss / dist.get_world_size()).backward()  # all that experts need, who saw the tokens of all ranks
    grads = [param.grad for param in split_params(model)[0]]
    nn.utils.vector_to_parameters(dist.all_reduce(nn.utils.parameters_to_vector(grads)), grads)


def clip(model, max_norm):
    """As nn.utils.clip_grad_norm_, by the norm over the experts of all ranks, and of what they share once."""
    shared, experts = (nn.utils.get_total_norm([p.grad for p in params]) for params in split_params(model))
    norm = (shared**2 + dist.all_reduce(experts**2)).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)


def train(model, optimizer, text, held_out, args):
    """The loss of every step over the whole batch, balance included, (steps,)."""
    progress = gpt.Progress(functools.partial(local_loss, model), text, held_out, args)
    for step in range(args.steps):
        x, y = gpt.batch(text, step, args.global_batch_size, args.length, args.seed, dist.get_device())
        loss = local_loss(model, x, y) + args.balance * sum(block.mlp.balance for block in model.blocks)
        optimizer.zero_grad()
        backward(model, loss)
        if args.clip:
            clip(model, args.clip)
        optimizer.step()
        tokens = [block.mlp.tokens for block in model.blocks]  # before the held-out text is counted
        progress(loss)
        if (step + 1) % args.log_every == 0 or step + 1 == args.steps:
            dist.print_primary("    tokens per expert:", *(counts.tolist() for counts in tokens))
    return progress.losses


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    torch.manual_seed(args.seed)
    model = add_experts(gpt.GPT(args.layers, args.width, args.heads, args.length), args).to(dist.get_device())
    shared, experts = (sum(param.numel() for param in params) for params in split_params(model))
    gpt.report_held(model.parameters(), shared + dist.get_world_size() * experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, *gpt.load_text(), args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
