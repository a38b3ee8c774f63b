"""This project's functions beside the references of ParallelKernelBench, on gloo: the largest difference of each.

    git clone https://github.com/togethercomputer/ParallelKernelBench /tmp/pkb
    git -C /tmp/pkb checkout 3cc0f9b
    python -m tools.outside.kernels /tmp/pkb/reference --nproc 2

A reference is a file with a function `solution`. Each case of CASES gives pairs of what this project has and what the
reference has. Numbers are float64 where the reference keeps them.
"""

import functools
import importlib.util
from argparse import Namespace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn import functional as F

import distributed as dist
import gpt
import min_CP
import min_CP_ring
import min_EP
import min_FSDP_scratch
import min_Muon
import min_TP
import min_ZeRO
import options

WIDTH = 8


def drawn(*shape, seed=0, own=False):
    """The same numbers on all ranks, or this rank's own."""
    generator = torch.Generator().manual_seed(1000 * seed + (1 + dist.get_rank() if own else 0))
    return torch.randn(*shape, generator=generator)


def by_rank(tensor, dim=0):
    """This rank's equal part."""
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


# ---- experts ------------------------------------------------------------------------------------------------------


class SiluExpert(nn.Module):
    """The expert of references 31 and 49."""

    def __init__(self, config):
        super().__init__()
        self.gate, self.up, self.down = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def mixture(n_experts, top, expert=gpt.MLP):
    with mock.patch.object(gpt, "MLP", expert):
        model = min_EP.MixtureOfExperts(Namespace(width=WIDTH), n_experts, top)
    with torch.no_grad():
        model.router.weight.copy_(drawn(n_experts, WIDTH, seed=1))
        for number, held in model.experts.named_children():
            for place, param in enumerate(held.parameters()):
                param.copy_(drawn(*param.shape, seed=10 + 7 * int(number) + place))
    return model


def routing(model, x):
    probabilities = model.router(x).softmax(dim=-1)
    weights, chosen = probabilities.topk(model.top)
    mask = F.one_hot(chosen, model.n_experts).permute(2, 1, 0)  # (experts, top, tokens), as the references have it
    return weights, chosen, mask


def clip_norm(solution):
    model = nn.Module()
    model.shared, model.experts = nn.Linear(WIDTH, WIDTH), nn.Module()
    model.experts.add_module(str(dist.get_rank()), nn.Linear(WIDTH, WIDTH))
    layer = nn.ModuleDict({"mlp": model})
    shared, experts = min_EP.split_params(layer)
    for param in shared:
        param.grad = drawn(*param.shape, seed=2)
    for param in experts:
        param.grad = drawn(*param.shape, seed=3, own=True)
    theirs = [[param.grad.clone() for param in params] for params in (shared, experts)]
    solution(*theirs, max_norm=0.5, ep_size=1, ep_group=torch_dist.group.WORLD)
    min_EP.clip_gradients(layer, 0.5)
    return zip(min_EP.gradients(shared + experts), [*theirs[0], *theirs[1]], strict=True)


def balance(solution):
    """The last pair is one process with the tokens of all ranks."""
    model, top = mixture(8, 2), 2
    x = drawn(5, WIDTH, seed=4, own=True)
    model(x)
    ours = dist.reduce(model.balance_loss.detach())
    theirs = solution(model.router(x).detach(), 8, top) / top
    everything = torch.cat(dist.gather(model.router(x).detach()))
    with mock.patch.object(torch_dist, "is_initialized", lambda: False):
        whole = solution(everything, 8, top) / top
    return [(ours, theirs), (ours, whole)]


def preprocess(solution):
    model = mixture(8, 3)
    _, chosen, mask = routing(model, drawn(5, WIDTH, seed=5, own=True))
    counts = min_EP.count_routed(chosen, 8).view(dist.get_world_size(), -1, model.n_held)
    sent, received = counts[dist.get_rank()], counts[:, dist.get_rank()]
    return zip([sent.sum(1), received.sum(1), received, received.sum(0)], solution(mask, 8), strict=True)


def all_to_all(solution):
    n, rank = dist.get_world_size(), dist.get_rank()
    sent, received = [rank + to for to in range(n)], [start + rank for start in range(n)]
    rows = drawn(sum(sent), WIDTH, seed=6, own=True)
    return [(min_EP.AllToAll.apply(rows, sent, received, None), solution(rows, sent, received))]


def dispatch(pre, post, preprocess):
    """What the experts get, and what comes back: references 28 and 29, with 26 for the sizes."""
    model = mixture(8, 3)
    x, visits = drawn(5, WIDTH, seed=7, own=True), []
    weights, chosen, mask = routing(model, x)
    for expert in model.experts.children():
        expert.register_forward_pre_hook(lambda expert, given: visits.append(given[0]))
    ours = model(x)
    n_sent, n_received, per_expert, n_visits = preprocess(mask, 8)
    splits = (n_sent.tolist(), n_received.tolist(), per_expert)
    theirs, *rest = pre(x, mask, 8, *splits)
    experts = model.experts.children()
    outputs = [expert(part) for expert, part in zip(experts, theirs.split(n_visits.tolist()), strict=True)]
    theirs_back = post(torch.cat(outputs), weights, chosen, 8, *splits, *rest)
    return [(torch.cat(visits[: model.n_held]), theirs), (ours, theirs_back)]


def balanced(solution):
    """Forward, and the gradients of router and expert of a sum of squares."""
    n = dist.get_world_size()
    model = mixture(n, 2, SiluExpert)
    x = drawn(5, WIDTH, seed=8, own=True)
    (expert,) = model.experts.children()
    params = [*expert.parameters(), model.router.weight]
    ours = model(x)
    theirs = solution(x, model.router.weight, None, expert.gate, expert.up, expert.down, n, 2)
    grads = [torch.autograd.grad(result.square().sum(), params) for result in (ours, theirs)]
    return [(ours, theirs), *zip(*grads, strict=True)]


# ---- sequences ----------------------------------------------------------------------------------------------------


def exchange(solution, split, join):
    x = drawn(3, 4, 8, 4 * WIDTH, seed=9, own=True)
    return [(min_CP.exchange(x, split, join), solution(x, split, join))]


def ring(forward, backward):
    """Causal, over the whole sequence. The references have consecutive shares, this project pieces r and 2·N-1-r."""
    rows, heads, length = 2, 3, 8 * dist.get_world_size()
    q, k, v, grad = [drawn(rows, length, heads, WIDTH, seed=11 + i) for i in range(4)]
    theirs = forward(*[by_rank(tensor, 1) for tensor in (q, k, v)], causal=True)
    places = min_CP_ring.local_positions(length)
    own = [tensor[:, places].transpose(1, 2).contiguous().requires_grad_() for tensor in (q, k, v)]
    plan = min_CP_ring.make_plan(length // (2 * dist.get_world_size()))
    ours = min_CP_ring.RingAttention.apply(*own, plan, torch_dist.group.WORLD)
    ours_grads = torch.autograd.grad(ours, own, grad[:, places].transpose(1, 2))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * WIDTH**-0.5
    lse = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).logsumexp(-1)
    given = [by_rank(tensor, 1) for tensor in (grad, q, k, v)]
    theirs_grads = backward(*given, theirs, by_rank(lse, 2).float(), causal=True)  # it computes in float32
    whole = []
    for ours_part, theirs_part in zip([ours, *ours_grads], [theirs, *theirs_grads], strict=True):
        together = torch.empty(rows, length, heads, WIDTH)
        parts = zip(dist.gather(places), dist.gather(ours_part.detach().transpose(1, 2)), strict=True)
        for where, part in parts:
            together[:, where] = part
        whole.append((together, torch.cat(dist.gather(theirs_part), dim=1)))
    return whole


# ---- optimizers ---------------------------------------------------------------------------------------------------

ADAM = {"lr": 0.1, "eps": 1e-6}
BETAS = (0.9, 0.95)


def two_layers():
    """The network of references 41 and 47, in blocks as min_FSDP_scratch.py wants them."""
    model = nn.Module()
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
    model.blocks = nn.ModuleList([nn.Sequential(first, nn.ReLU()), nn.Sequential(second)])
    model.root = nn.Parameter(torch.zeros(1))  # the references have none, so its gradient is 0
    for number, param in enumerate(model.blocks.parameters()):
        param.data = drawn(*param.shape, seed=20 + number)

    def forward(x):
        for block in model.blocks:
            x = block(x)
        return x + 0 * model.root

    model.forward = forward
    return model


def batches():
    return [(drawn(3, WIDTH, seed=30 + step, own=True), drawn(3, 4, seed=40 + step, own=True)) for step in range(3)]


def zero1(solution):
    model = two_layers()
    params = list(model.blocks.parameters())
    theirs = [param.detach().clone() for param in params]
    part = sum(param.numel() for param in params) // dist.get_world_size()
    moments = [torch.zeros(part), torch.zeros(part)]
    optimizer = min_ZeRO.ZeRO(params, torch.optim.Adam, betas=BETAS, **ADAM)
    for step, (x, y) in enumerate(batches(), 1):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        *theirs, first, second = solution(x, y, *theirs, *moments, beta1=BETAS[0], beta2=BETAS[1], step=step, **ADAM)
        moments = [first, second]
    state = optimizer.optim.state[optimizer.optim.param_groups[0]["params"][0]]
    moments = [(state["exp_avg"], first), (state["exp_avg_sq"], second)]
    return [*zip(params, theirs, strict=True), *moments]


def fsdp(solution):
    model, decay = two_layers(), 0.1
    shapes = [param.shape for param in model.blocks.parameters()]
    shard = by_rank(nn.utils.parameters_to_vector(model.blocks.parameters()).detach())
    moments = [torch.zeros_like(shard), torch.zeros_like(shard)]
    zero = min_FSDP_scratch.ZeRO3(model)
    optimizer = torch.optim.AdamW(zero.pieces(), betas=BETAS, weight_decay=decay, **ADAM)
    for step, (x, y) in enumerate(batches(), 1):
        F.mse_loss(zero(x), y).backward()
        zero.finish_backward()
        optimizer.step()
        options_of_step = {"beta1": BETAS[0], "beta2": BETAS[1], "weight_decay": decay, "step": step, **ADAM}
        shard, *moments = solution(x, y, shard, shapes, *moments, **options_of_step)
    for unit in zero.units:
        unit.wait()
    return [(nn.utils.parameters_to_vector(model.blocks.parameters()), torch.cat(dist.gather(shard)))]


def split_cross_entropy(solution):
    """The last part of this project's vocabulary may be shorter, but the reference wants equal ones."""
    logits, targets = drawn(5, 4 * dist.get_world_size(), seed=60), torch.arange(5) % 4
    own = by_rank(logits, 1)
    ours = min_TP.SplitCrossEntropy.apply(own, targets - dist.get_rank() * own.shape[1])
    return [(ours, solution(own.clone(), targets))]


def muon(solution):
    matrix = drawn(4 * dist.get_world_size(), 12, seed=50)
    ours = min_Muon.orthogonalize_sharded([by_rank(matrix)], [matrix.shape])
    return [(ours[0], solution(by_rank(matrix), steps=5, coefficient_type="simple", partition_dim=0))]


# ---- the table ----------------------------------------------------------------------------------------------------

CASES = [
    ("22", "min_EP.clip_gradients", clip_norm),
    ("24", "min_EP.MixtureOfExperts.balance_loss; the same, and 24 in one process", balance),
    ("26", "min_EP.count_routed", preprocess),
    ("27", "min_EP.AllToAll", all_to_all),
    ("28 29 26", "min_EP.MixtureOfExperts: routed tokens, results", dispatch),
    ("49", "min_EP.MixtureOfExperts with its experts, and gradients", balanced),
    ("33", "min_CP.exchange", functools.partial(exchange, split=2, join=1)),
    ("36", "min_CP.exchange", lambda solution: exchange(lambda x, split, join: solution(x, join, split), 2, 1)),
    ("37", "min_CP.exchange", functools.partial(exchange, split=1, join=2)),
    ("54 57", "min_CP_ring.RingAttention, and gradients", ring),
    ("41", "min_ZeRO.ZeRO, three steps", zero1),
    ("47", "min_FSDP_scratch.ZeRO3, three steps", fsdp),
    ("73", "min_TP.SplitCrossEntropy", split_cross_entropy),
    ("86", "min_Muon.orthogonalize_sharded", muon),
]


def load_solution(folder, number):
    (path,) = Path(folder).glob(f"{number}_*.py")
    spec = importlib.util.spec_from_file_location(f"reference_{number}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.solution


def all_to_all_of_lists(received, sent, group=None):
    """gloo has none. All tensors have one shape."""
    result = torch.empty_like(torch.stack(sent))
    torch_dist.all_to_all_single(result, torch.stack(sent), group=group)
    for tensor, part in zip(received, result, strict=True):
        tensor.copy_(part)


def all_gather_of_any_shape(result, given, group=None):
    """gloo wants the shapes of both to fit."""
    torch_dist.all_gather(list(result.view(-1).chunk(torch_dist.get_world_size(group))), given.view(-1), group=group)


def main_worker(local_rank, world_size, folder):
    dist.init_process_group()
    torch.set_default_dtype(torch.float64)
    torch_dist.all_to_all = all_to_all_of_lists
    torch_dist.all_gather_into_tensor = all_gather_of_any_shape
    for numbers, name, compare in CASES:
        pairs = compare(*[load_solution(folder, number) for number in numbers.split()])
        differences = [(ours - theirs).abs().max().double().detach() for ours, theirs in pairs]
        largest = dist.all_reduce(torch.stack(differences), "max")
        dist.print_primary(f"| {numbers} | {name} | {', '.join(f'{value:.1e}' for value in largest)} |", flush=True)


if __name__ == "__main__":
    parser = options.ArgumentParser(__doc__)
    parser.add_argument("folder", help="the folder `reference` of ParallelKernelBench")
    parser.add_nproc()
    args = parser.parse_args()
    dist.launch(main_worker, args.folder, nprocs=args.nproc)
