"""Split the experts: expert parallelism (EP), for a mixture of experts.

Each block has several MLPs, its experts, instead of one. A router gives every token (here a byte) a probability p_k for
each expert. The token is routed to the --top experts with the highest probabilities: y = Σ_k p_k E_k(x). So the model
has many more parameters than a token uses. Each process holds 1/N of the experts and all the rest, and trains on its
share of the batch. The path of 4 tokens a b c d on 2 ranks, with 4 experts and --top 2:

                             rank 0: experts 0 and 1             rank 1: experts 2 and 3
    route                    a to 0 and 2, b to 2 and 3          c to 0 and 1, d to 0 and 3
    sort by expert           a0 a2 b2 b3                         c0 d0 c1 d3
    dispatch (all-to-all)    a0 from rank 0, c0 d0 c1 from 1     a2 b2 b3 from rank 0, d3 from 1
    sort by expert again     a0 c0 d0 | c1                       a2 b2 | b3 d3
    experts                  E_0(a) E_0(c) E_0(d) | E_1(c)       E_2(a) E_2(b) | E_3(b) E_3(d)
    combine (all-to-all)     E_0(a) E_2(a) E_2(b) E_3(b)         E_0(c) E_0(d) E_1(c) E_3(d)
    weighted sum             a becomes p_0 E_0(a) + p_2 E_2(a)   d becomes p_0 E_0(d) + p_3 E_3(d)

No token is dropped, so N processes compute what one computes. All wait for the busiest expert, so --balance evens out
their use: by a loss (Switch, arXiv:2101.03961), or by a bias for each expert (arXiv:2408.15664). A bias changes only
which experts are chosen. After each step it falls if its expert had many tokens, and rises otherwise. The host waits
for the device once per block, for the number of tokens. GShard and Switch give each expert a fixed capacity instead,
and drop or pad tokens.

Choose it when most parameters are experts and one device cannot hold them. FSDP (min_FSDP.py) splits them too, but
sends parameters instead of tokens. min_EP_FSDP.py does both.

Cost per process, for S shared float32 parameters and X of experts, L layers of width D, B sequences of T bytes: memory
16·(S + X/N) bytes. Sent in each step 2·(N-1)/N · 4·S bytes for the shared gradients, and (N-1)/N · 16·L·top·D·B·T/N for
the tokens if all experts are used evenly. If all tokens are routed to one process, it sends N/2 times as much.

    python min_EP.py --nproc 2                          # two processes; without --nproc, all GPUs
    python min_EP.py --nproc 4 --experts 64 --top 4 --balance bias
"""

import torch
import torch.distributed as torch_dist
from torch import nn

import distributed as dist
import gpt
import options

# ---- routing: the way of a token to its experts and back ----------------------------------------------------------


class MixtureOfExperts(nn.Module):
    """Replaces an MLP. The ranks in the list `ranks`, by default all, split the experts evenly.

    ranks[p] holds `n_held` experts, from number p · n_held on. `group` is the process group of `ranks`.
    forward also sets `tokens_per_expert`, (experts,), of all ranks, and `balance_loss`.
    """

    def __init__(self, config, n_experts, top, ranks=None, group=None):
        super().__init__()
        self.ranks = ranks or list(range(dist.get_world_size()))
        self.place = self.ranks.index(dist.get_rank())
        self.group = group
        self.n_experts = n_experts
        self.top = top
        self.router = nn.Linear(config.width, n_experts, bias=False)
        self.register_buffer("bias", torch.zeros(n_experts))  # a state_dict has it, so it is saved
        self.n_held = n_experts // len(self.ranks)
        first = self.place * self.n_held
        self.experts = Experts({i: gpt.MLP(config) for i in range(first, first + self.n_held)})

    def forward(self, x):
        """Gives (batch, length, width), as `x`."""
        # Route.
        tokens = x.flatten(0, -2)  # (tokens, width)
        probabilities = self.router(tokens).softmax(dim=-1)  # (tokens, experts)
        chosen = (probabilities + self.bias).topk(self.top).indices  # (tokens, top)
        weights = probabilities.gather(1, chosen)
        counts = count_routed(chosen, self.n_experts)  # (ranks, experts)

        # Balance: smallest if all experts have as many tokens. Its mean over ranks is the loss of the batch.
        self.tokens_per_expert = counts.sum(dim=0)
        shares = self.tokens_per_expert / self.tokens_per_expert.sum()
        self.balance_loss = self.n_experts * (shares * probabilities.mean(dim=0)).sum()

        # Sort by expert, one row for each expert of a token. A rank holds consecutive experts, so this sorts by rank.
        order = chosen.flatten().argsort(stable=True)
        rows = tokens[order // self.top]  # (routed tokens of this rank, width)

        # Dispatch, experts, combine. The host waits for the counts, to allocate memory.
        by_rank = counts.cpu()[self.ranks].view(len(self.ranks), -1, self.n_held)  # (from rank, to rank, to its expert)
        sent = by_rank[self.place]  # (to rank, to its expert)
        received = by_rank[:, self.place]  # (from rank, to this rank's expert)
        n_sent = sent.sum(dim=1).tolist()
        n_received = received.sum(dim=1).tolist()
        dispatched = AllToAll.apply(rows, n_sent, n_received, self.group)  # (tokens for this rank's experts, width)
        results = self.experts(dispatched, received)  # the same shape
        results = AllToAll.apply(results, n_received, n_sent, self.group)  # as `rows`

        # Weighted sum: y = Σ_k p_k E_k(x).
        inverse = order.argsort()  # the inverse permutation: it undoes the sorting
        results = results[inverse].view(*chosen.shape, -1)  # (tokens, top, width)
        return (weights[..., None] * results).sum(dim=1).view_as(x)


class Experts(nn.Module):
    """The experts of a block that this rank holds, by number. In torch 2.11 fully_shard takes no kind of ModuleDict."""

    def __init__(self, experts):
        super().__init__()
        for number, expert in experts.items():
            self.add_module(str(number), expert)

    def forward(self, tokens, received):
        """Each expert's results, in the order of `tokens`, (tokens, width), which are sorted by rank, then by expert.

        `received`, (ranks, held experts), says how many tokens a rank has routed to an expert.
        """
        experts = list(self.children())
        numbers = torch.arange(len(experts)).repeat(len(received))  # the held experts, once per rank
        expert_of_row = numbers.repeat_interleave(received.flatten())
        order = gpt.to_device(expert_of_row.argsort(stable=True), tokens.device)  # without a wait
        inverse = order.argsort()
        parts = tokens[order].split(received.sum(dim=0).tolist())
        # An expert without tokens runs too: without a gradient of zeros, AdamW would skip its weight decay.
        results = [expert(part) for expert, part in zip(experts, parts, strict=True)]
        return torch.cat(results)[inverse]


def add_experts(model, args, ranks=None, group=None):
    """Replace each MLP by a mixture of experts, with shapes but without memory."""
    config = gpt.Config.from_args(args)
    with torch.device("meta"):
        for block in model.blocks:
            block.mlp = MixtureOfExperts(config, args.experts, args.top, ranks, group)


def move_biases(model, step):
    """Lower the bias of each expert with more tokens than the mean, and raise it for each expert with fewer."""
    for block in model.blocks:
        counts = block.mlp.tokens_per_expert
        block.mlp.bias += step * torch.sign(counts.sum() - len(counts) * counts)


# ---- gradients ----------------------------------------------------------------------------------------------------


def backward(model, loss):
    """The gradients of the mean of all ranks' losses. Call it once per step: it sums what is in the gradients."""
    # The experts' gradients are complete after this line: an expert has seen its tokens of all ranks.
    (loss / dist.get_world_size()).backward()
    # The shared parameters' gradients are summed over the ranks. DDP would send many at once, while backward computes.
    # But it has no public way to leave out the experts.
    shared, _ = split_params(model)
    for grad in gradients(shared):
        dist.all_reduce(grad)


def split_params(model):
    """Two lists: the parameters that all ranks share, and the parameters of the experts that only this rank holds."""
    shared = [param for name, param in model.named_parameters() if ".experts." not in name]
    experts = [param for name, param in model.named_parameters() if ".experts." in name]
    return shared, experts


def gradients(params):
    """Frozen parameters have none."""
    return [param.grad for param in params if param.grad is not None]


def clip_gradients(model, max_norm):
    """As nn.utils.clip_grad_norm_, with the experts of all ranks in the norm, and the shared parameters once."""
    shared, experts = split_params(model)
    shared_norm = nn.utils.get_total_norm(gradients(shared))
    experts_norm = nn.utils.get_total_norm(gradients(experts)).to(dist.get_device())  # if all are frozen, on the CPU
    norm = (shared_norm**2 + dist.all_reduce(experts_norm**2)).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)


# ---- all-to-all ---------------------------------------------------------------------------------------------------


def count_routed(chosen, n_experts):
    """How many tokens each rank sends to each expert, (ranks, experts), on every rank."""
    counts = torch.zeros(dist.get_world_size(), n_experts, dtype=torch.long, device=chosen.device)
    routed = chosen.flatten()
    counts[dist.get_rank()].index_add_(0, routed, torch.ones_like(routed))
    return dist.all_reduce(counts)


class AllToAll(torch.autograd.Function):
    """Send the first n_sent[0] rows to rank 0, the next n_sent[1] to rank 1, …; n_received[r] arrive from rank r.

    The backward is the reverse all-to-all: it returns the gradient of each row to the row's sender.
    """

    @staticmethod
    def forward(ctx, rows, n_sent, n_received, group):
        ctx.n_sent = n_sent
        ctx.n_received = n_received
        ctx.group = group
        result = rows.new_empty(sum(n_received), *rows.shape[1:])
        torch_dist.all_to_all_single(result, rows, n_received, n_sent, group)
        return result

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad.contiguous(), ctx.n_received, ctx.n_sent, ctx.group), None, None, None


# ---- training -----------------------------------------------------------------------------------------------------


def train(model, optimizer, data, args, backward=backward, clip_gradients=clip_gradients):
    """Returns the loss of every step over all processes, (steps,), without the load-balancing loss.

    min_EP_FSDP.py has another `backward` and another `clip_gradients`.
    """
    progress = gpt.Progress(model, data, args)
    for step in range(args.steps):
        x, y = data.batch(step)
        optimizer.zero_grad()
        loss = gpt.loss_fn(model(x), y)
        total = loss
        if args.balance == "loss":
            total = loss + args.balance_weight * sum(block.mlp.balance_loss for block in model.blocks)
        backward(model, total)
        if args.clip:
            clip_gradients(model, args.clip)
        optimizer.step()
        if args.balance == "bias":
            move_biases(model, args.bias_step)
        counts = [block.mlp.tokens_per_expert for block in model.blocks]  # taken here, because `progress` evaluates
        progress(step, loss)
        if progress.is_due(step):
            dist.print_primary("    tokens per expert:", *[of_block.tolist() for of_block in counts])
    return progress.losses


# ---- options ------------------------------------------------------------------------------------------------------


def add_options(parser):
    """Add the options that min_EP_FSDP.py has too."""
    experts_help = "experts per block (default: 8, or what can be split)"
    parser.add_argument("--experts", type=options.whole_number(1), help=experts_help)
    parser.add_argument("--top", type=options.whole_number(1), default=2, help="experts of each token")
    parser.add_argument("--balance", choices=("loss", "bias"), default="loss", help="what evens out the experts' use")
    parser.add_argument("--balance-weight", type=options.positive_number, default=0.01, help="weight of that loss")
    parser.add_argument("--bias-step", type=options.positive_number, default=0.001, help="how far a bias moves")


def check_options(parser, args, n_parts, name):
    """Check that the experts can be split in `n_parts`, and fill in the options that were not given."""
    gpt.check_model_options(parser, args, batch=(args.nproc, "the number of processes"))
    gpt.require_multiple(parser, args, "experts", n_parts, name, default=8)
    if args.top > args.experts:
        parser.error(f"argument --top: {args.top} is more than the {args.experts} experts")


def parse_args():
    parser = gpt.make_parser(__doc__)
    add_options(parser)
    args = parser.parse_args()
    check_options(parser, args, args.nproc, "the number of processes")
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    gpt.start(args)
    data = gpt.Data(args)  # this process's share of each global batch
    model = gpt.make_meta_model(gpt.Config.from_args(args))  # shapes without memory: no process holds it whole
    add_experts(model, args)
    model.to_empty(device=dist.get_device())  # memory for this process's part
    gpt.fill([*model.named_parameters(), *model.named_buffers()], args.seed)
    shared, experts = split_params(model)
    n_params = sum(param.numel() for param in shared) + world_size * sum(param.numel() for param in experts)
    gpt.report_held(model.parameters(), n_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, data, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
