"""Text, model and progress of the transformer scripts: Python's own standard library, read by a small GPT.

text, held_out = gpt.load_text()                            # bytes, the same on every rank
x, y = gpt.batch(text, step, args.batch_size, args.length)  # bytes, and what follows each: (batch_size, length)
model = gpt.GPT(args.layers, args.width, args.heads, args.length)
loss = gpt.loss_fn(model(x), y)                             # nats per byte: a blind guess has log(256) = 5.545
"""

import functools
import hashlib
import random
import resource
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch._dynamo  # every process's first optimizer takes a second to import it; the fork server has it then
from torch import nn
from torch.nn import functional as F

import distributed as dist

LIBRARY = Path(sysconfig.get_paths()["stdlib"])


def add_model_options(parser):
    """Add the options that all transformer scripts share, of the model and of its training."""
    add, count = parser.add_argument, dist.at_least(1)
    add("--layers", type=count, default=2, help="blocks of attention and MLP")
    add("--width", type=count, default=128, help="features of each byte")
    add("--heads", type=count, default=4, help="attention heads, a divisor of the width")
    add("--length", type=dist.at_least(2, 2**16), default=128, help="bytes of a sequence")
    add("--batch-size", type=count, default=16, help="sequences of a step, over all processes")
    add("--steps", type=count, default=400, help="steps to train")
    add("--log-every", type=count, default=50, help="steps from line to line")
    add("--lr", type=dist.positive, default=0.003, help="learning rate")
    add("--clip", type=dist.positive, help="largest norm of all gradients together")
    add("--seed", type=dist.seed, default=0, help="of the weights and the batches")
    parser.add_nproc()


def parse_args(parser):
    """`parser.parse_args()`; ends with one line if the heads do not divide the width, or there is no text."""
    args = parser.parse_args()
    if args.width % args.heads:
        parser.error(f"argument --heads: {args.heads} is not a divisor of --width {args.width}")
    if not any(LIBRARY.glob("*.py")):
        sys.exit(f"no text to train on: {LIBRARY} has no *.py files, the sources of Python's standard library")
    return args


def load_text():
    """Python's standard library, uint8: nine tenths to train on, and the last. SystemExit if that of a rank differs."""
    text = b"".join(path.read_bytes() for path in sorted(LIBRARY.glob("*.py")))
    hashes = dist.agree(hashlib.sha256(text).digest())
    for rank, value in enumerate(hashes):
        if value != hashes[0]:
            sys.exit(f"the standard library of rank {rank} is not that of rank 0: use one version of Python everywhere")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).split([len(text) - len(text) // 10, len(text) // 10])


def batch(text, step, batch_size, length, seed=0, device="cpu"):
    """Bytes, and the byte that follows each, int64 (batch_size, length): from (seed, step) alone, on every rank."""
    starts = random.Random(f"{seed} {step}").choices(range(len(text) - length), k=batch_size)
    at = torch.tensor(starts)[:, None] + torch.arange(length)
    return text[at].to(device).long(), text[at + 1].to(device).long()


def ngram_loss(text, rows, n):
    """Nats per byte of `rows` (r, length) where each byte is guessed from the n - 1 before it, as `text` has them."""
    digits = (256 ** torch.arange(n).flip(0)).int()  # n bytes in a row are those of one number
    seen, guessed = ((values.unfold(-1, n, 1) * digits).sum(-1, dtype=torch.int).flatten() for values in (text, rows))
    counts = torch.zeros(256**n, dtype=torch.int).index_add_(0, seen, torch.ones_like(seen))
    contexts = counts.view(-1, 256).sum(1, dtype=torch.int)
    return -((counts[guessed] + 0.01) / (contexts[guessed // 256] + 2.56)).log().mean().item()


class Attention(nn.Module):
    """Causal. `attend(q, k, v)`, each (batch, heads, length, width / heads), may be replaced on the instance."""

    attend = staticmethod(functools.partial(F.scaled_dot_product_attention, is_causal=True))

    def __init__(self, width, heads):
        super().__init__()
        self.head_width = width // heads
        self.qkv = nn.Linear(width, 3 * width)  # rows ordered by head, then q, k, v: a slice of rows is whole heads
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_width)).transpose(1, 2).unbind(3)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Logits (batch, length, 256) of `tokens` (batch, length), which stand at `positions` (length,): 0, 1, … if None.

    Neither dropout nor tied weights: both change silently where a model is split.
    """

    def __init__(self, layers, width, heads, length):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens, positions=None):
        positions = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(logits, targets):
    """Mean over all bytes, in nats."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def report_held(params, total):
    """Print, and return, how many of the `total` parameters the process that has most of them holds, shard by shard."""
    held = sum((param.to_local() if hasattr(param, "to_local") else param).numel() for param in params)
    held = dist.all_reduce(torch.tensor(held, device=dist.get_device()), "max").item()
    dist.print_primary(f"parameters held: {held:,} of {total:,} ({held / total:.3f})")
    return held


class Progress:
    """`progress(loss)` after each step, with this process's loss, prints a line every `args.log_every` steps.

    `local_loss(x, y)` gives a loss on this process whose mean over all processes is that of the batch (x, y): so it is
    computed of 8 batches of held-out text. `losses`, (steps,), are those over all processes after the last line.
    """

    def __init__(self, local_loss, text, held_out, args, first_step=0):
        self.local_loss, self.args, self.device = local_loss, args, dist.get_device()
        self.step = self.printed = first_step
        self.losses = torch.zeros(args.steps, device=self.device)  # this process's, until a line needs them
        starts = torch.linspace(0, len(held_out) - args.length - 1, 8 * args.batch_size).long()
        rows = held_out[starts[:, None] + torch.arange(args.length + 1)]
        self.batches = [(r[:, :-1], r[:, 1:]) for r in rows.to(self.device).long().split(args.batch_size)]
        self.bigram, self.trigram = (ngram_loss(text, rows, n) for n in (2, 3))
        self.start = time.perf_counter()

    @torch.no_grad()
    def __call__(self, loss):
        self.losses[self.step] = loss
        self.step += 1
        if self.step % self.args.log_every and self.step < self.args.steps:
            return
        recent = self.losses[self.printed : self.step]
        recent[:] = dist.reduce(recent)
        loss, self.printed = recent.mean().item(), self.step
        speed = len(recent) * self.args.batch_size * self.args.length / (time.perf_counter() - self.start)
        held_out = dist.reduce(torch.stack([self.local_loss(x, y) for x, y in self.batches]).mean()).item()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        peak = dist.all_reduce(torch.tensor(peak, device=self.device), "max").item()
        dist.print_primary(
            f"step {self.step} | loss {loss:.4f} | held-out {held_out:.4f} nats per byte "
            f"(bigram {self.bigram:.4f}, trigram {self.trigram:.4f}) | {speed:,.0f} tokens/s | "
            f"peak memory {peak / 1e6:.0f} MB"
        )
        self.start = time.perf_counter()
