"""Model, text and progress of the transformer scripts: a small GPT that reads Python's own standard library.

config = gpt.Config.from_args(args)
model = gpt.GPT(config, args.seed)             # the same weights on every process
data = gpt.Data(args)                          # this process's share of each global batch
progress = gpt.Progress(model, data, args)
for step in range(args.steps):
    x, y = data.batch(step)                    # bytes, and what follows each: (share of the batch, length)
    loss = gpt.loss_fn(model(x), y)            # the mean, in nats per byte
    ...                                        # backward, and the optimizer's step
    progress(step, loss)

Of held-out text a blind guess has a loss of log(256) = 5.545 nats per byte. Guesses by the frequencies of single bytes
have 3.15, by the byte before 2.46, and by the two bytes before 1.89.
"""

import dataclasses
import math
import random
import resource
import sysconfig
import time
import zlib
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import distributed as dist
import options

LIBRARY = Path(sysconfig.get_paths()["stdlib"])


# ---- model --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Config:
    """Sizes of a GPT: how many blocks, features per byte, heads per block, and the bytes of the longest sequence."""

    layers: int
    width: int
    heads: int
    length: int

    @classmethod
    def from_args(cls, args):
        """The sizes that `args` has, beside all other options of a script."""
        return cls(args.layers, args.width, args.heads, args.length)


class Attention(nn.Module):
    """Causal. `attend(q, k, v)`, each (batch, heads, length, width / heads), may be replaced on the instance."""

    def __init__(self, config):
        super().__init__()
        width, heads = config.width, config.heads
        assert width % heads == 0, f"a width of {width} is not a multiple of {heads} heads"
        self.head_width = width // heads
        self.qkv = nn.Linear(width, 3 * width)  # rows ordered by head, then q, k, v: a slice of rows is whole heads
        self.out = nn.Linear(width, width)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_width))  # (batch, length, heads, 3, head width)
        q, k, v = qkv.transpose(1, 2).unbind(3)
        attended = self.attend(q, k, v)
        return self.out(attended.transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Logits (batch, length, 256) of `tokens` (batch, length), whose positions are 0, 1, … if `positions` is None.

    `positions` are (length,), or (batch, length) where rows differ. Its weights come from `seed`, as `fill` says.
    Splitting a model with dropout or tied weights can change its result without an error. So it has neither.
    """

    def __init__(self, config, seed=0):
        super().__init__()
        self.token = nn.Embedding(256, config.width)
        self.position = nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, 256, bias=False)
        if not self.head.weight.is_meta:
            fill(self.named_parameters(), seed)

    def forward(self, tokens, positions=None):
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(logits, targets):
    """Mean over all bytes, in nats."""
    if logits.dtype == torch.bfloat16:
        logits = logits.float()  # bfloat16 has too few digits for a mean over thousands of bytes
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def model_loss(model, x, y):
    return loss_fn(model(x), y)


# ---- weights, also of a model that no process could hold ----------------------------------------------------------


def make_meta_model(config):
    """A GPT whose parameters have shapes, but no memory. Split it, call its `to_empty`, then `fill` it."""
    with torch.device("meta"):
        return GPT(config)


@torch.no_grad()
def fill(named_params, seed):
    """Give each parameter its initial weights. They depend on its name, its shape and `seed` alone.

    `named_params` are pairs of a name, as in the whole GPT, and a parameter. A DTensor receives its shard. So nothing
    is sent, each process fills its part in any order, and it holds no more than its part and one whole parameter.
    Raises ValueError if there are no weights for a parameter.
    """
    for name, param in named_params:
        weights = initial_weights(name, param.shape, param.dtype, seed)
        if hasattr(param, "to_local"):  # a DTensor
            from torch.distributed.tensor import distribute_tensor  # takes 0.5 s, which most scripts need not spend

            # With src_data_rank=None each process cuts its shard from its own tensor.
            weights = distribute_tensor(weights, param.device_mesh, param.placements, src_data_rank=None)
        param.copy_(weights)


def initial_weights(name, shape, dtype, seed):
    """The initial weights of the parameter `name`. For a pretrained model return the tensor of its file instead.

    `safe_open` of safetensors reads one tensor by its name.
    """
    weights = torch.empty(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    layer, _, kind = name.rpartition(".")
    if kind == "bias":
        return weights.zero_()
    if kind != "weight":
        raise ValueError(f"there are no weights for {name}")
    if layer in ("token", "position"):
        return weights.normal_(std=0.02, generator=generator)
    if len(shape) == 1:  # of a LayerNorm
        return weights.fill_(1)
    bound = shape[1] ** -0.5
    return weights.uniform_(-bound, bound, generator=generator)


# ---- text ---------------------------------------------------------------------------------------------------------


class Data:
    """Gives this process its share of each global batch of text: part i of n equal parts, for `share` (i, n).

    By default that is (rank, world size). As all shares are equally large, the mean of the losses over all processes
    is the loss of the global batch.
    """

    def __init__(self, args, share=None, device=None):
        self.text, self.held_out = load_text()
        self.args = args
        self.share = share or (dist.get_rank(), dist.get_world_size())
        self.device = device or dist.get_device()

    def batch(self, step):
        """(x, y) of this step: see the function `batch` below."""
        args = self.args
        return batch(self.text, step, args.global_batch_size, args.length, args.seed, self.device, self.share)

    def held_out_batches(self):
        """This process's share of 8 batches of held-out text, a list of (x, y) as `batch` gives them."""
        args = self.args
        starts = torch.linspace(0, len(self.held_out) - args.length - 1, 8 * args.global_batch_size).long()
        own_starts = own_share(starts.view(8, -1), self.share)  # (8, sequences of this process)
        rows = self.held_out[own_starts[:, :, None] + torch.arange(args.length + 1)].to(self.device).long()
        return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in rows]

    def settings(self):
        """The `settings` of a checkpoint: what a resumed run must share, and no tensor's shape would reveal."""
        names = ("heads", "global_batch_size", "seed", "lr", "clip")
        settings = {f"--{name.replace('_', '-')}": getattr(self.args, name) for name in names}
        return {**settings, "text (checksum)": zlib.crc32(self.text.numpy())}


def load_text():
    """Python's standard library as two uint8 tensors: nine tenths to train on, and the last tenth, held out.

    Every rank must call it. Raises DistributedError if the libraries of two ranks differ: use one version of Python.
    """
    text = b"".join(path.read_bytes() for path in sorted(LIBRARY.glob("*.py")))
    dist.check_in_sync(None, **{"Python's standard library": zlib.crc32(text)})
    n_held_out = len(text) // 10
    tensor = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tensor[:-n_held_out], tensor[-n_held_out:]


def batch(text, step, batch_size, length, seed=0, device="cpu", share=(0, 1)):
    """Bytes, and the byte that follows each, both int64 (batch_size / n, length): share i of n, for `share` (i, n).

    Where the sequences of the global batch start depends on `seed` and `step` alone. So all processes know it without
    communication, and each one reads only its share.
    """
    starts = random.Random(f"{seed} {step}").choices(range(len(text) - length), k=batch_size)
    own_starts = own_share(torch.tensor(starts), share)
    rows = text[own_starts[:, None] + torch.arange(length + 1)]
    rows = to_device(rows, device).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def own_share(tensor, share):
    """Share i of n, for `share` (i, n), of the last dimension. Raises DistributedError if shares are not equally long.

    Means over unequal shares would not average to the mean of the whole.
    """
    i, n = share
    if tensor.shape[-1] % n:
        raise dist.DistributedError(f"{tensor.shape[-1]} is not a multiple of {n}, the number of equal shares")
    return tensor.chunk(n, dim=-1)[i]


def to_device(tensor, device):
    """Copy to a GPU without blocking the CPU, which needs pinned memory. To the CPU it is an ordinary copy."""
    if torch.device(device).type != "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


# ---- start --------------------------------------------------------------------------------------------------------


def start(args, share=None):
    """Join the job's process group, seed this process, and let GPUs multiply matrices as TF32.

    One process has a group too, so that it can do all that several do. TF32 is far faster, with 10 bits of mantissa.
    The weights do not depend on the process's random numbers, and this model draws none. If yours has dropout,
    processes with different shares of the batch draw different masks. `share` is the number of this process's share, by
    default its rank.
    """
    dist.init_process_group(even_alone=True)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed + (dist.get_rank() if share is None else share))


# ---- progress -----------------------------------------------------------------------------------------------------


def peak_memory(device):
    """Bytes: the most that this process has had allocated on its GPU, or resident in memory on the CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def report_held(params, total=None):
    """Print and return the largest number of the `total` parameters that any process holds.

    Without `total` they add up to the whole model: a DTensor counts as the whole tensor.
    """
    params = list(params)
    total = total or sum(param.numel() for param in params)
    held = 0
    for param in params:
        shard = param.to_local() if hasattr(param, "to_local") else param
        held += shard.numel()
    held = dist.all_reduce(torch.tensor(held, device=dist.get_device()), "max").item()
    dist.print_primary(f"parameters held: {held:,} of {total:,} ({held / total:.3f})")
    return held


class Progress:
    """Every rank calls `progress(step, loss)` after each step, with its own loss. After some it prints a line.

    `loss_of(model, x, y)` gives a loss on this process whose mean over all processes is the loss of a global batch,
    where (x, y) is this process's share of the batch. It is used for held-out text. When all steps are done, `losses`,
    (steps,), has the loss of each step from `first_step` on, over all processes. Raises DistributedError if
    `first_step` is beyond `args.steps`.
    """

    def __init__(self, model, data, args, first_step=0, loss_of=model_loss):
        if first_step > args.steps:
            line = f"the checkpoint has {first_step} steps, more than --steps {args.steps}"
            raise dist.DistributedError(line)
        self.model = model
        self.loss_of = loss_of
        self.args = args
        self.held_out_batches = data.held_out_batches()
        self.first_step = first_step
        self.losses = torch.zeros(args.steps - first_step, device=dist.get_device())  # own ones, until they are printed
        self.first_unprinted = 0
        self.start = time.perf_counter()

    @torch.no_grad()
    def __call__(self, step, loss):
        self.losses[step - self.first_step] = loss
        if self.is_due(step):
            self.print_line(step + 1)

    def is_due(self, step):
        """Is a line printed after this step? After every `args.log_every` steps, and after the last one."""
        done = step + 1
        return done % self.args.log_every == 0 or done == self.args.steps

    def print_line(self, done):
        n_taken = done - self.first_step  # by this run
        recent = dist.reduce(self.losses[self.first_unprinted : n_taken])
        self.losses[self.first_unprinted : n_taken] = recent
        loss = recent.mean().item()  # waits for the device, so the clock is read after it
        tokens = len(recent) * self.args.global_batch_size * self.args.length
        speed = tokens / (time.perf_counter() - self.start)
        held_out = torch.stack([self.loss_of(self.model, x, y) for x, y in self.held_out_batches]).mean()
        held_out = dist.reduce(held_out).item()
        device = dist.get_device()
        peak = dist.all_reduce(torch.tensor(peak_memory(device), device=device), "max").item()
        dist.print_primary(
            f"step {done}/{self.args.steps} | loss {loss:.4f} | held-out {held_out:.4f} | "
            f"{speed:,.0f} tokens/s | {peak / 1e6:.0f} MB",
            flush=True,
        )
        self.first_unprinted = n_taken
        self.start = time.perf_counter()


# ---- options ------------------------------------------------------------------------------------------------------


def make_parser(doc, length=None):
    """A parser of the options that all transformer scripts share, of the model and of its training.

    `length` is the default of --length, for a script that does not split the sequence.
    """
    parser = options.ArgumentParser(doc)
    rounded = "rounded up so that the processes can split them evenly"
    width_help = "features per byte (default: 128, or the next multiple of --heads)"
    heads_help = f"attention heads per block (default: 4, {rounded})"
    length_help = "bytes per sequence"
    if length is None:
        length_help += f" (default: 128, {rounded})"
    batch_help = f"sequences per step, over all processes (default: 16, {rounded})"
    clip_help = "largest norm of the gradient; 0 does not clip"
    parser.add_argument("--layers", type=options.whole_number(1), default=2, help="blocks of attention and MLP")
    parser.add_argument("--width", type=options.whole_number(1), help=width_help)
    parser.add_argument("--heads", type=options.whole_number(1), help=heads_help)
    parser.add_argument("--length", type=options.whole_number(2, 2**16), default=length, help=length_help)
    parser.add_argument("--global-batch-size", type=options.whole_number(1), help=batch_help)
    parser.add_argument("--steps", type=options.whole_number(1), default=400, help="steps to train")
    parser.add_argument("--log-every", type=options.whole_number(1), default=50, help="steps between lines of progress")
    parser.add_argument("--lr", type=options.positive_number, default=0.003, help="learning rate")
    parser.add_argument("--clip", type=options.number(0), default=0.0, help=clip_help)
    parser.add_argument("--seed", type=options.whole_number(0), default=0, help="random seed")
    parser.add_nproc()
    return parser


NOT_SPLIT = (1, "one part")  # a divisor of every number, so no error has its name


def check_model_options(parser, args, batch=NOT_SPLIT, heads=NOT_SPLIT, length=NOT_SPLIT):
    """Check that a script can split the batch, the heads and the length, and fill in the options that were not given.

    `batch`, `heads` and `length` are pairs: the required divisor, and its name in the error. Ends the program with one
    line if an option does not fit.

        gpt.check_model_options(parser, args, batch=(args.nproc, "the number of processes"))
    """
    require_multiple(parser, args, "global_batch_size", *batch, default=16)
    require_multiple(parser, args, "heads", *heads, default=4)
    require_multiple(parser, args, "length", *length, default=128)
    require_multiple(parser, args, "width", args.heads, "the number of heads", default=128)


def require_multiple(parser, args, name, divisor, why, default):
    """If the option was not given, it becomes the smallest multiple of `divisor` that is at least `default`."""
    if getattr(args, name) is None:
        setattr(args, name, math.ceil(default / divisor) * divisor)
    if getattr(args, name) % divisor:
        option = "--" + name.replace("_", "-")
        parser.error(f"argument {option}: {getattr(args, name)} is not a multiple of {divisor}, {why}")
