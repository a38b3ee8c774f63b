"""Mistakes that others have found, written anew for parity.py, one at a time.

    python parity.py tools/outside/mistakes.py megatron-3

Those named megatron-N are finding N of https://github.com/NVIDIA/Megatron-LM/issues/7452. The others are bugs of
https://github.com/OrderLab/TrainCheck. `right` and `right-split` have none. On one process each case is a plain loop.
What Megatron splits over tensor parallel ranks is here a part of the features or of the classes.
"""

import sys

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn import functional as F

CASE = sys.argv[1]
ROWS, WIDTH, CLASSES, STEPS = 16, 8, 6, 6
SPLIT = CASE in ("right-split", "megatron-1", "megatron-8", "megatron-11")  # ranks share the rows, and split the layers


class SumOverRanks(torch.autograd.Function):
    """All ranks have one loss, of which this is a part: its gradient is the gradient of each part."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        torch_dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(2))  # of each half of the features the same, as Megatron's out_norm
        self.last = nn.Linear(WIDTH, CLASSES, bias=False)
        self.own = 1  # for each feature, whether this rank computes with it

    def forward(self, x):
        hidden = torch.tanh(self.first(x)).view(-1, WIDTH // 2, 2) * self.scale
        return self.last(hidden.flatten(1) * self.own)


def smoothed_loss(log_probabilities, y, own_classes):
    """Cross entropy with label smoothing; finding 1 takes the mean over the classes of this rank alone."""
    smoothing = log_probabilities.mean(1)
    if CASE == "megatron-1":
        smoothing = (log_probabilities * own_classes).sum(1) / own_classes.sum()
    return F.nll_loss(log_probabilities, y) - 0.1 * smoothing.mean()


def loss_of(logits, y, counted, n):
    if CASE == "megatron-3":  # the mean over the counted rows of this rank; finding 9 does so with positions
        return F.cross_entropy(logits, y, reduction="none")[counted].mean()
    total = counted.sum()
    torch_dist.all_reduce(total)
    loss = F.cross_entropy(logits, y, reduction="none")[counted].sum() / total * n
    if CASE == "megatron-10":  # a penalty per row, scaled by the number of rows of all ranks and not of this one
        loss = loss + 0.1 * n * logits.logsumexp(1).square().mean()
    return loss


def backward(model, x, y, counted, rank, n):
    if SPLIT:
        model.own = torch.zeros(WIDTH, dtype=x.dtype).index_fill_(0, torch.arange(WIDTH).chunk(n)[rank], 1)
        own_classes = torch.zeros(CLASSES, dtype=x.dtype).index_fill_(0, torch.arange(CLASSES).chunk(n)[rank], 1)
        logits = SumOverRanks.apply(model(x))
        smoothed_loss(logits.log_softmax(1), y, own_classes).backward()
        return
    loss_of(model(x), y, counted, n).backward()


def sync_gradients(model, rank, n):
    for name, param in model.named_parameters():
        if CASE == "megatron-11" and name == "scale":  # each rank has the part of its features, and they are not summed
            continue
        torch_dist.all_reduce(param.grad)
        if not SPLIT:
            param.grad /= n
    if CASE == "pytorch-84803" and rank == 1:  # a transfer between two GPUs that brings zeros
        model.first.weight.grad.zero_()


def clip(model, rank, n):
    params = list(model.parameters())
    if CASE == "megatron-8":  # the norm has only this rank's part of one parameter
        own = [param.grad for param in params if param is not model.scale]
        norm = nn.utils.get_total_norm([*own, model.scale.grad[rank : rank + 1] if n > 1 else model.scale.grad])
        nn.utils.clip_grads_with_norm_(params, 0.05, norm)
    elif CASE == "deepspeed-1801" and rank == 0:  # rank 0 alone clips what all hold
        nn.utils.clip_grad_norm_(params, 0.05)


def main():
    torch_dist.init_process_group("gloo")
    rank, n = torch_dist.get_rank(), torch_dist.get_world_size()
    torch.manual_seed(0)
    model = Net()
    params = list(model.parameters())
    if CASE == "pytorch-forum-84911":  # what is trained has no gradient
        params = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer = torch.optim.AdamW(params, lr=0.01)
    ddp = nn.parallel.DistributedDataParallel(model) if CASE == "x-jxmnop-ddp-out-of-sync" else None
    for step in range(STEPS):
        x, y = torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))
        counted = torch.rand(ROWS) < torch.linspace(0.2, 1, ROWS)
        if not SPLIT:
            x, y, counted = x.chunk(n)[rank], y.chunk(n)[rank], counted.chunk(n)[rank]
        if CASE != "stackoverflow-60335387":
            optimizer.zero_grad()
        if ddp:  # wrapped in the first step only
            backward(ddp if step == 0 else model, x, y, counted, rank, n)
        else:
            backward(model, x, y, counted, rank, n)
            sync_gradients(model, rank, n)
        clip(model, rank, n)
        optimizer.step()
    torch_dist.destroy_process_group()


if __name__ == "__main__":
    main()
