"""min_EP.py: experts on several processes equal one process, in which every expert sees every token."""

import functools
import re

import pytest
import torch
import transformer
from conftest import guards, slow
from torch.nn import functional as F

import distributed as dist
import gpt
import min_EP

IDLE = (0, 6, 7)  # of 8: of 4 ranks, the last has no token and the first has some
CASES = [("AdamW", {"idle": IDLE}), ("SGD", {"top": 3}), ("SGD", {"clip": 0.3})]


def arguments(changes):
    options = {"layers": 2, "steps": 8, "log_every": 4, "experts": 8, "top": 2, "balance": 0.1, "idle": ()}
    return transformer.arguments(**{**options, **changes})


def leave_idle(model, idle):
    """Let the router find no token for these experts: normalized features, plus 1, have a sum far above 0."""
    if idle:
        with torch.no_grad():
            for block in model.blocks:
                block.norm2.bias.fill_(1)
                block.mlp.router.weight[list(idle)] = -1


def train(optimizer, changes):
    """Losses, parameters, and how many tokens each block's experts have had."""
    args = arguments(changes)
    run = transformer.run_main_worker(min_EP, args, optimizer, lambda model: leave_idle(model, args.idle))
    lines = re.findall("^    tokens per expert: (.*)$", run.stdout, re.M)
    assert len(lines) == (2 if dist.is_primary() else 0), "one below each line of progress"
    for counts in re.findall(r"\[(.*?)]", " ".join(lines)):
        assert sum(map(int, counts.split(", "))) == args.top * args.global_batch_size * args.length
    tokens = [block.mlp.tokens_per_expert for block in run.model.blocks]
    return run.losses, transformer.full_parameters(run.model), tokens


class DenseExperts(torch.nn.Module):
    """All experts see all tokens; the weights of those that are not chosen are 0."""

    def __init__(self, width, count, top):
        super().__init__()
        self.top = top
        self.router = torch.nn.Linear(width, count, bias=False)
        self.experts = torch.nn.ModuleList(gpt.MLP(width) for _ in range(count))

    def forward(self, x):
        probs = F.softmax(self.router(x), -1)
        least = probs.sort(-1, descending=True).values[..., self.top - 1 : self.top]
        chosen = (probs >= least).double()
        self.share = chosen.mean((0, 1)) / self.top
        self.balance = len(self.experts) * (self.share * probs.mean((0, 1))).sum()
        results = torch.stack([expert(x) for expert in self.experts], -1)
        return (results * (chosen * probs)[..., None, :]).sum(-1)


@functools.cache
def expected(number):
    """Every step's loss, and the parameters by name, of one process without any of the helpers."""
    optimizer, changes = CASES[number]
    args = arguments(changes)
    with transformer.float64():
        model = transformer.make_model(args)
        for block in model.blocks:
            block.mlp = DenseExperts(args.width, args.experts, args.top)
    leave_idle(model, args.idle)
    losses = []

    def loss_of(model, x, y):
        loss = transformer.plain_loss(model, x, y)
        losses.append(loss.detach())
        for block in model.blocks:
            assert all(block.mlp.share[list(args.idle)] == 0)
        return loss + args.balance * sum(block.mlp.balance for block in model.blocks)

    _, parameters = transformer.train_alone(model, optimizer, args, loss_of)
    return torch.stack(losses), parameters


@pytest.mark.parametrize("n", [*guards(2), *slow(1, 4)])
def test_processes_do_what_one_does(n, tmp_path):
    cases = CASES if n > 1 else CASES[:1]
    ranks = transformer.train_on(n, train, cases, tmp_path)
    for number, (_, changes) in enumerate(cases):
        args, whole = arguments(changes), {}
        for rank, results in enumerate(ranks):
            _, parameters, tokens = results[number]
            held = {int(key.split(".")[4]) for key in parameters if ".experts." in key}
            assert held == set(range(rank * 8 // n, (rank + 1) * 8 // n))
            for key in whole.keys() & parameters.keys():
                assert torch.equal(whole[key], parameters[key]), f"{key} differs from rank to rank"
            whole.update(parameters)
            for counts in tokens:
                assert sum(counts.tolist()) == args.top * args.global_batch_size * args.length
                assert all(counts[list(args.idle)] == 0)
        for results in ranks:
            transformer.assert_equal(results[number][0], whole, expected(number))
