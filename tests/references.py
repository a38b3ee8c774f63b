"""One process of plain PyTorch, for the scripts that train another model than gpt.GPT, or train it in another way."""

import re
from unittest import mock

import torch
import transformer
from conftest import float64
from torch.nn import functional as F

import gpt

# ---- experts --------------------------------------------------------------------------------------------------------


class DenseExperts(torch.nn.Module):
    """All experts see all tokens; the weights of those that are not chosen are 0."""

    def __init__(self, config, count, top):
        super().__init__()
        self.top = top
        self.router = torch.nn.Linear(config.width, count, bias=False)
        self.experts = torch.nn.ModuleList(gpt.MLP(config) for _ in range(count))
        self.register_buffer("bias", torch.zeros(count))

    def forward(self, x):
        probs = F.softmax(self.router(x), -1)
        biased = probs + self.bias
        least = biased.sort(-1, descending=True).values[..., self.top - 1 : self.top]
        chosen = (biased >= least).double()
        self.share = chosen.mean((0, 1)) / self.top
        self.balance = len(self.experts) * (self.share * probs.mean((0, 1))).sum()
        results = torch.stack([expert(x) for expert in self.experts], -1)
        return (results * (chosen * probs)[..., None, :]).sum(-1)


def leave_idle(idle):
    """A patch with which routers find no token for these experts: normalized features, plus 1, have a sum above 0."""
    initial_weights = gpt.initial_weights

    def changed(name, *more):
        weights = initial_weights(name, *more)
        if idle and name.endswith("norm2.bias"):
            weights.fill_(1)
        if name.endswith("router.weight"):
            weights[list(idle)] = -1
        return weights

    return mock.patch.object(gpt, "initial_weights", changed)


def dense_model(args):
    with float64(), leave_idle(args.idle):
        model = transformer.make_model(args)
        for block in model.blocks:
            block.mlp = DenseExperts(gpt.Config.from_args(args), args.experts, args.top)
        gpt.fill(model.named_parameters(), args.seed)
    return model


def experts(optimizer, args):
    """The losses are those without the load-balancing loss."""
    losses, shares = [], []

    def loss_of(model, x, y):
        loss = transformer.plain_loss(model, x, y)
        losses.append(loss.detach())
        shares.extend(block.mlp.share for block in model.blocks)
        if args.balance == "bias":
            for block in model.blocks:
                block.mlp.bias += args.bias_step * (1 / args.experts - block.mlp.share).sign()
            return loss
        return loss + args.balance_weight * sum(block.mlp.balance for block in model.blocks)

    _, parameters = transformer.train_alone(dense_model(args), optimizer, args, loss_of)
    for of_block in shares:
        assert of_block[list(args.idle)].sum() == 0 and of_block.max() > 1.2 * of_block.mean(), "uneven"
    return torch.stack(losses), parameters


# ---- documents ------------------------------------------------------------------------------------------------------


def paragraphs(row):
    """(start, end) of the documents of a row of bytes."""
    spans, start = [], 0
    for end in range(2, len(row) + 1):
        if end == len(row) or row[end - 2 : end].tolist() == [10, 10]:
            spans.append((start, end))
            start = end
    return spans


def loss_of_documents(model, x, y):
    """Each document goes through the model by itself."""
    total = 0
    for row, targets in zip(x, y, strict=True):
        for start, end in paragraphs(row):
            logits = model(row[None, start:end])
            total += F.cross_entropy(logits[0], targets[start:end], reduction="sum")
    return total / x.numel()


def documents(optimizer, args):
    with float64():
        model = transformer.make_model(args)
    return transformer.train_alone(model, optimizer, args, loss_of_documents)


# ---- processes that train in turn, or stop early --------------------------------------------------------------------


@float64()
def copies(optimizer, args):
    """Copies that one process trains in turn, and averages every so many steps as min_DiLoCo.py does."""
    n = args.nproc
    models = [transformer.make_model(args) for _ in range(n)]
    optimizers = [transformer.make_optimizer(optimizer, model.parameters(), args.lr) for model in models]
    start = transformer.full_parameters(models[0])
    velocity = {name: torch.zeros_like(value) for name, value in start.items()}
    losses = torch.zeros(args.steps, n)
    for step in range(args.steps):
        x, y = gpt.batch(transformer.small_text()[0], step, args.global_batch_size, args.length, args.seed)
        for rank, (model, each) in enumerate(zip(models, optimizers, strict=True)):
            loss = transformer.plain_loss(model, x.chunk(n)[rank], y.chunk(n)[rank])
            losses[step, rank], _ = transformer.take_step(model, each, loss, args.clip)
        if step % args.sync_every == args.sync_every - 1 or step == args.steps - 1:
            trained = [transformer.full_parameters(model) for model in models]
            for name, value in start.items():
                moved = sum(value - copy[name] for copy in trained) / n
                velocity[name] = velocity[name].mul(args.outer_momentum).add(moved)
                ahead = moved.add(velocity[name], alpha=args.outer_momentum)
                start[name] = value.add(ahead, alpha=-args.outer_lr)
            for model in models:
                model.load_state_dict(start)
    return losses.mean(1), start


BATCHES = {(1, 4): [10], (2, 4): [10, 4], (2, 0): [10, 0], (3, 4): [10, 7, 4]}  # by processes and --least, of 10 steps


def what_is_left(optimizer, args):
    """The parts of each batch that belong to a process which still has data, as in min_Join.py."""

    def part_of(step, *batch):
        ranks = [rank for rank, count in enumerate(BATCHES[args.nproc, args.least]) if step < count]
        return (torch.cat([part.chunk(args.nproc)[rank] for rank in ranks]) for part in batch)

    with float64():
        model = transformer.make_model(args)
    return transformer.train_alone(model, optimizer, args, part_of=part_of)


# ---- Muon -----------------------------------------------------------------------------------------------------------


def is_matrix(name):
    """Neither an embedding nor the head is among those that Muon steps."""
    return re.fullmatch(r"blocks\.\d\.(attention\.qkv|attention\.out|mlp\.up|mlp\.down)\.weight", name)


def by_singular_values(matrix, coefficients=(3.4445, -4.7750, 2.0315), steps=5, eps=1e-7):
    """What Newton-Schulz's products of matrices do to each singular value, in the matrix's own type."""
    a, b, c = coefficients
    u, s, vt = torch.linalg.svd(matrix / matrix.norm().clamp(min=eps), full_matrices=False)
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u * s @ vt


class Both:
    """Two optimizers, which step one after the other."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


def muon(optimizer, args):
    """torch.optim.Muon, which would compute in bfloat16, and AdamW or SGD for the rest."""

    def optimizers_of(model):
        matrices = [param for name, param in model.named_parameters() if is_matrix(name)]
        rest = [param for name, param in model.named_parameters() if not is_matrix(name)]
        muon = torch.optim.Muon(matrices, lr=args.muon_lr, momentum=0.95, weight_decay=0.01)
        return Both(muon, transformer.make_optimizer(optimizer, rest, args.lr))

    return train_with_muon(optimizers_of, args)


def train_with_muon(optimizers_of, args):
    with float64(), mock.patch("torch.optim._muon._zeropower_via_newtonschulz", by_singular_values):
        model = transformer.make_model(args)
        return transformer.train_alone(model, optimizers_of(model), args)
