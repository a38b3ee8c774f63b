"""Text, model, generation and progress of the transformer scripts: Python's own standard library, read by a small GPT.

text, held_out = gpt.load_text()                                   # bytes, the same on every rank
x, y = gpt.batch(text, step, args.global_batch_size, args.length)  # bytes, and what follows each: (batch, length)
x, y = gpt.batch(..., share=(rank, world_size))                    # this process's share of the global batch
model = gpt.GPT(args.layers, args.width, args.heads, args.length)
loss = gpt.loss_fn(model(x), y)                                    # nats per byte: a blind guess has log(256) = 5.545
"""

import functools
import hashlib
import itertools
import logging
import random
import sys
import sysconfig
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn import functional as F

import distributed as dist
import options

LIBRARY = Path(sysconfig.get_paths()["stdlib"])


# ---- options ------------------------------------------------------------------------------------------------------


def add_model_options(parser, length=None):
    """Add the options that all transformer scripts share, of the model and of its training.

    `length` is the default of --length, for a script that does not split the sequence.
    """
    count = options.whole_number(1)
    length_help = "bytes per sequence"
    if length is None:
        length_help += " (default: 128, rounded up so that the processes can split it evenly)"
    parser.add_argument("--layers", type=count, default=2, help="blocks of attention and MLP")
    parser.add_argument("--width", type=count, help="features per byte (default: 128, or the next multiple of --heads)")
    parser.add_argument(
        "--heads",
        type=count,
        help="attention heads per block (default: 4, rounded up so that the processes can split them evenly)",
    )
    parser.add_argument("--length", type=options.whole_number(2, 2**16), default=length, help=length_help)
    parser.add_argument(
        "--global-batch-size",
        type=count,
        help="sequences per step, over all processes (default: 16, rounded up so that these can split them evenly)",
    )
    parser.add_argument("--steps", type=count, default=400, help="steps to train")
    parser.add_argument("--log-every", type=count, default=50, help="print every N steps", metavar="N")
    parser.add_argument("--lr", type=options.positive_number, default=0.003, help="learning rate")
    parser.add_argument("--clip", type=options.positive_number, help="clip the global gradient norm to this value")
    parser.add_argument("--seed", type=options.seed_number, default=0, help="random seed of the weights and batches")
    parser.add_nproc()


def add_bf16_option(parser):
    """Add --bf16. A script that has it computes in bfloat16, and keeps the parameters in float32."""
    parser.add_argument(
        "--bf16",
        action="store_true",
        help="compute in bfloat16; parameters, their gradients and the optimizer's state stay float32",
    )


def check_model_options(parser, args, batch=(1, "1"), heads=(1, "1"), length=(1, "1")):
    """Check that a script can split the batch, the heads and the length, and fill in those that were not given.

    `batch`, `heads` and `length` are pairs: the required divisor, and its name in the error. Ends the program with one
    line if an option does not fit, or if there is no text to train on.

        gpt.check_model_options(parser, args, batch=(args.nproc, "the number of processes"))
    """
    parser.require_multiple(args, "global_batch_size", *batch, default=16)
    parser.require_multiple(args, "heads", *heads, default=4)
    parser.require_multiple(args, "length", *length, default=128)
    parser.require_multiple(args, "width", args.heads, "the number of heads", default=128)
    if not any(LIBRARY.glob("*.py")):
        sys.exit(f"no text to train on: {LIBRARY} has no *.py files, the sources of Python's standard library")


# ---- text ---------------------------------------------------------------------------------------------------------


def load_text():
    """Python's standard library as two uint8 tensors: nine tenths to train on, and the last tenth, held out.

    Every rank must call it. Raises DistributedError if the library differs from rank to rank.
    """
    text = b"".join(path.read_bytes() for path in sorted(LIBRARY.glob("*.py")))
    digests = dist.gather_objects(hashlib.sha256(text).digest())
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            line = f"the standard libraries of rank {rank} and rank 0 differ: use one version of Python everywhere"
            raise dist.DistributedError(line)
    n_held_out = len(text) // 10
    tensor = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tensor[:-n_held_out], tensor[-n_held_out:]


def batch(text, step, batch_size, length, seed=0, device="cpu", share=(0, 1)):
    """Bytes, and the byte that follows each, both int64 (batch_size / n, length): share i of n, for `share` (i, n).

    Where the sequences of the global batch start depends on `seed` and `step` alone. So all processes know it without
    communication, and each one reads only its share. `batch_size` must be a multiple of n.
    """
    starts = random.Random(f"{seed} {step}").choices(range(len(text) - length), k=batch_size)
    i, n = share
    own_starts = torch.tensor(starts).chunk(n)[i]
    rows = text[own_starts[:, None] + torch.arange(length + 1)]
    rows = to_device(rows, device).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def to_device(tensor, device):
    """Copy to a GPU without blocking the CPU, which needs pinned memory. To the CPU it is an ordinary copy."""
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def ngram_loss(text, rows, n):
    """Nats per byte of `rows` (r, length) if each byte is guessed from the n - 1 before it, as `text` has them."""
    place_values = (256 ** torch.arange(n).flip(0)).int()

    def as_numbers(values):  # n bytes in a row as one number
        return (values.unfold(-1, n, 1) * place_values).sum(-1, dtype=torch.int).flatten()

    seen = as_numbers(text).sort().values
    guessed = as_numbers(rows)
    context = guessed // 256 * 256  # the lowest number with these n - 1 bytes

    def count(low, high):  # how often a number from low up to, but not including, high is seen
        return torch.searchsorted(seen, high) - torch.searchsorted(seen, low)

    probability = (count(guessed, guessed + 1) + 0.01) / (count(context, context + 256) + 2.56)
    return -probability.log().mean().item()


# ---- model --------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal. `attend(q, k, v)`, each (batch, heads, length, width / heads), may be replaced on the instance."""

    def __init__(self, width, heads):
        super().__init__()
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
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Logits (batch, length, 256) of `tokens` (batch, length), whose positions are 0, 1, … if `positions` is None.

    `positions` are (length,), or (batch, length) where rows differ.
    Splitting a model with dropout or tied weights can change its result without an error. So it has neither.
    """

    def __init__(self, layers, width, heads, length):
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for embedding in (self.token, self.position):
            init_embedding(embedding)

    def forward(self, tokens, positions=None):
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def init_embedding(embedding):
    nn.init.normal_(embedding.weight, std=0.02)


def loss_fn(logits, targets):
    """Mean over all bytes, in nats."""
    if logits.dtype == torch.bfloat16:
        logits = logits.float()  # bfloat16 has too few digits for a mean over thousands of bytes
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


# ---- a model that no process could hold -----------------------------------------------------------------------------


def settings_of(args):
    """Options that a resumed run must share, though no tensor's shape depends on them. For checkpoint.Settings."""
    return {"--heads": args.heads, "--global-batch-size": args.global_batch_size, "--seed": args.seed}


def make_meta_model(args):
    """A GPT whose parameters have shapes, but no memory. Split it, call its `to_empty`, then `fill` it."""
    with torch.device("meta"):
        return GPT(args.layers, args.width, args.heads, args.length)


@torch.no_grad()
def fill(named_params, args):
    """Fill this process's part of a GPT with the weights that `torch.manual_seed(args.seed)` and GPT(...) give.

    `named_params` are pairs of a name, as in the whole GPT, and a parameter. A DTensor receives its shard. Every
    process draws the same numbers, one layer after the other, and keeps its part. So nothing is sent, and a process
    holds no more than its part and one layer. Raises ValueError if there are no weights for a parameter.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor  # takes 0.5 s, which most scripts need not spend

    own = dict(named_params)
    missing = set(own)
    for name, weights in initial_weights(args):
        if name in own:
            param = own[name]
            missing.discard(name)
            if isinstance(param, DTensor):
                # With src_data_rank=None each process cuts its shard from its own tensor.
                weights = distribute_tensor(weights, param.device_mesh, param.placements, src_data_rank=None)
            param.copy_(weights)
    if missing:  # of a layer that `initial_weights` does not know, or under another name
        raise ValueError(f"there are no weights for {', '.join(sorted(missing))}")


def initial_weights(args):
    """Yields name and tensor of all weights, layer after layer. A layer's memory is freed before the next one is made.

    For a pretrained model yield the tensors of its files instead. `safe_open` of safetensors reads them one by one.
    """
    torch.manual_seed(args.seed)
    model = make_meta_model(args)
    draws = []
    for prefix, layer in model.named_modules():
        if hasattr(layer, "reset_parameters"):  # the layers of torch, in the order in which GPT makes them
            draws.append((prefix, layer, type(layer).reset_parameters))
    draws.append(("token", model.token, init_embedding))
    draws.append(("position", model.position, init_embedding))
    for prefix, layer, draw in draws:
        layer.to_empty(device="cpu")
        draw(layer)
        for name, param in layer.named_parameters():
            yield f"{prefix}.{name}", param.detach()
        layer.to("meta")


# ---- tensor parallelism, for the scripts that combine it with others: min_TP.py has a plan of its own ----------------


def split_layers(model, mesh):
    """Split the layers of a GPT, or of a pipeline's stage of it, in place over the processes of `mesh`.

    Between the split layers features are split along the sequence, which is dimension 1. The plan names every
    parameter, in the norms too: the norm of the gradients needs DTensors of one mesh.
    """
    from torch.distributed.tensor import Replicate, Shard  # takes 0.5 s, which most scripts need not spend
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    sequence = Shard(1)
    plan = {
        "blocks.*.norm1": SequenceParallel(),
        "blocks.*.attention.qkv": ColwiseParallel(input_layouts=sequence),  # a slice is whole heads: see Attention
        "blocks.*.attention.out": RowwiseParallel(output_layouts=sequence),
        "blocks.*.norm2": SequenceParallel(),
        "blocks.*.mlp.up": ColwiseParallel(input_layouts=sequence),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=sequence),
    }
    if hasattr(model, "token"):  # the first stage
        plan["token"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence)
        # It has no batch dimension.
        plan["position"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    if hasattr(model, "head"):  # the last stage
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=sequence, output_layouts=Replicate())
    parallelize_module(model, mesh, plan)


def silence_false_alarms():
    """Two warnings that torch 2.15 gives when FSDP and tensor parallelism meet. Neither applies here."""
    # The logits are a view. To edit them in place would be wrong, and nothing here does.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    # The norm of all gradients is one number, summed in one all-reduce per mesh dimension, where one could do.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


# ---- gradients ----------------------------------------------------------------------------------------------------


def reduce_gradients(params, op="avg", group=None):
    """Replace the gradients of `params` by their "avg" or "sum" over the processes of `group`, in one all-reduce.

    By default `group` is the job's own. All its processes must call it, and all `params` need a gradient. DDP does
    this during backward. Use this function where DDP does not fit, because processes hold different parameters.
    """
    if dist.get_world_size() == 1:
        return
    grads = [param.grad for param in params]
    flat = nn.utils.parameters_to_vector(grads)
    torch_dist.all_reduce(flat, group=group)
    if op == "avg":
        flat /= torch_dist.get_world_size(group)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


# ---- generation ---------------------------------------------------------------------------------------------------


class KVCache:
    """Keys and values of all earlier positions. Inside `with`, the model's attention extends and reads them.

    So a new byte needs the forward of one position. Each row has positions of its own: prompts of unequal lengths all
    start at position 0 and are padded on the right. The padding is later than a row's last byte, so the row does not
    see it, and new bytes overwrite it. The cache takes 2 · layers · rows · length · width numbers.
    """

    def __init__(self, model, length):
        self.model = model
        self.attentions = [block.attention for block in model.blocks]
        self.length = length  # positions of the longest row
        self.stored = {}  # by layer: keys and values (2, rows, heads, length, head width)
        self.replaced = [vars(attention).get("attend") for attention in self.attentions]  # by min_CP.py, for instance

    def __enter__(self):
        for layer, attention in enumerate(self.attentions):
            attention.attend = functools.partial(self.attend, layer)
        return self

    def __exit__(self, *error):
        for attention, replaced in zip(self.attentions, self.replaced, strict=True):
            del attention.attend  # now the class's own is found again
            if replaced is not None:
                attention.attend = replaced

    def forward(self, tokens, positions, end):
        """Logits (rows, new, 256) of `tokens` at `positions`, both (rows, new). All positions are below `end`."""
        self.positions = positions
        self.end = end
        return self.model(tokens, positions)

    def attend(self, layer, q, k, v):
        if layer not in self.stored:
            n_rows, n_heads, _, head_width = k.shape  # if heads are split over processes, this process's
            self.stored[layer] = k.new_zeros(2, n_rows, n_heads, self.length, head_width)
        keys, values = self.stored[layer]
        rows = torch.arange(len(k), device=k.device)[:, None]
        keys[rows, :, self.positions] = k.transpose(1, 2)
        values[rows, :, self.positions] = v.transpose(1, 2)
        seen = torch.arange(self.end, device=k.device) <= self.positions[:, None, :, None]
        return F.scaled_dot_product_attention(q, keys[:, :, : self.end], values[:, :, : self.end], attn_mask=seen)

    def keep(self, rows):
        """Keep only these rows, in this order. A row may occur several times."""
        for layer, stored in self.stored.items():
            self.stored[layer] = stored[:, rows]


def choose(logits, drawn, temperature=1.0):
    """One byte for each row of `logits` (rows, 256), and its log-probability, both (rows,).

    The byte is the first one whose cumulative probability exceeds `drawn` (rows,), float64 numbers from [0, 1). So the
    same numbers draw the same bytes. At temperature 0 it is the most probable byte. It is 256 if the logits are NaN.
    """
    if temperature == 0:
        chosen = logits.argmax(-1, keepdim=True).masked_fill(logits.isnan().any(-1, keepdim=True), 256)
        log_probabilities = logits.log_softmax(-1)
    else:
        log_probabilities = (logits / temperature).log_softmax(-1)
        cumulative = log_probabilities.double().exp().cumsum(-1)  # in float32 the last sum may be below `drawn`
        chosen = torch.searchsorted(cumulative, drawn[:, None] * cumulative[:, -1:], right=True)
    chosen_log_probabilities = log_probabilities.gather(-1, chosen.clamp(max=255))
    return chosen[:, 0], chosen_log_probabilities[:, 0]


@torch.no_grad()  # not inference_mode: its tensors cannot take part in a loss
def generate(model, prompts, drawn, stop=None, temperature=1.0, samples=1, choose=choose):
    """Continue each of `prompts`, a list of bytes, `samples` times: by n bytes, or up to and with the byte `stop`.

    `drawn` (prompts · samples, n), float64 on the model's device, are numbers from [0, 1), as `uniform` gives them. A
    row's numbers alone decide what it draws, whatever rows are beside it. At temperature 0 only their shape is used.
    Pass the plain model, because a DDP model communicates in forward. `choose` may be replaced, see min_Generate.py.

    Returns tokens, generated and log-probabilities, all (prompts · samples, length). A row of `tokens` is a prompt, its
    continuation, and zeros. `generated` is True where a byte was generated, and log-probabilities are 0 elsewhere.

    Raises ValueError for an empty prompt, and for one that is too long for the model's positions. Raises
    DistributedError if the logits are NaN.
    """
    n_new = drawn.shape[1]
    device = drawn.device
    tokens, lengths, longest = pad_prompts(prompts, n_new, model.position.num_embeddings)
    tokens, lengths = to_device(tokens, device), to_device(lengths, device)
    with KVCache(model, longest + n_new) as cache:
        # Prefill: all bytes of the prompts at once. The samples of a prompt share it.
        row_numbers = torch.arange(len(prompts), device=device)
        positions = torch.arange(longest, device=device).expand(len(prompts), -1)
        logits = cache.forward(tokens[:, :longest], positions, longest)
        logits = logits[row_numbers, lengths - 1]  # after the last byte of each prompt
        repeated = row_numbers.repeat_interleave(samples)
        cache.keep(repeated)
        tokens, lengths, logits = tokens[repeated], lengths[repeated], logits[repeated]

        # Decode: one byte per row. Rows that have ended leave the batch.
        generated = torch.zeros_like(tokens, dtype=torch.bool)
        log_probabilities = logits.new_zeros(tokens.shape)
        rows = torch.arange(len(tokens), device=device)
        for number in range(n_new):
            chosen, chosen_log_probabilities = choose(logits, drawn[rows, number], temperature)
            positions = lengths[rows] + number
            tokens[rows, positions] = chosen
            generated[rows, positions] = True
            log_probabilities[rows, positions] = chosen_log_probabilities
            end = longest + number + 1
            unfinished = rows_without(stop, chosen)
            if len(unfinished) == 0 or number == n_new - 1:
                break
            if len(unfinished) < len(rows):
                unfinished = to_device(unfinished, device)
                rows, chosen, positions = rows[unfinished], chosen[unfinished], positions[unfinished]
                cache.keep(unfinished)
            logits = cache.forward(chosen[:, None], positions[:, None], end)[:, 0]
    return tokens[:, :end], generated[:, :end], log_probabilities[:, :end]


def pad_prompts(prompts, n_new, most):
    """Tokens (prompts, longest + n_new), zeros behind each prompt; the lengths (prompts,); and the longest of them."""
    lengths = [len(prompt) for prompt in prompts]
    if min(lengths) == 0:
        raise ValueError("a prompt is empty: the model needs at least one byte")
    longest = max(lengths)
    if longest + n_new > most:
        raise ValueError(f"a prompt of {longest} bytes and {n_new} new ones exceed the model's {most} positions")
    tokens = torch.zeros(len(prompts), longest + n_new, dtype=torch.long)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(list(prompt))
    return tokens, torch.tensor(lengths), longest


def rows_without(stop, chosen):
    """The numbers of the rows that continue, as a tensor on the CPU. This waits for the device, once per byte."""
    chosen = chosen.cpu()
    if (chosen > 255).any():
        raise dist.DistributedError("the model's logits are NaN, so no byte can be drawn: its training has diverged")
    if stop is None:
        return torch.arange(len(chosen))
    return (chosen != stop).nonzero()[:, 0]


def generated_bytes(tokens, generated):
    """The bytes that `generate` has generated: one bytes object per row."""
    answers = []
    for row, mask in zip(tokens.tolist(), generated.tolist(), strict=True):
        answers.append(bytes(itertools.compress(row, mask)))
    return answers


def uniform(name, rows, columns):
    """float64 numbers from [0, 1), (rows, columns), that depend on `name` alone.

    Make the name of the seed, the step and the prompt's number. Then neither the rank nor the number of processes
    changes the numbers.
    """
    generator = torch.Generator().manual_seed(random.Random(name).getrandbits(63))
    return torch.rand(rows, columns, dtype=torch.double, generator=generator)


# ---- progress -----------------------------------------------------------------------------------------------------


def report_held(params, total):
    """Print and return the largest number of the `total` parameters that any process holds."""
    held = 0
    for param in params:
        shard = param.to_local() if hasattr(param, "to_local") else param
        held += shard.numel()
    held = dist.all_reduce(torch.tensor(held, device=dist.get_device()), "max").item()
    dist.print_primary(f"parameters held: {held:,} of {total:,} ({held / total:.3f})")
    return held


class Progress:
    """Call `progress(loss)` after each step with this process's loss. It prints a line every `args.log_every` steps.

    `local_loss(x, y)` gives a loss on this process whose mean over all processes is the loss of a global batch, where
    (x, y) is this process's `share` of the batch, as `batch` takes it. It is used for the loss of 8 batches of held-out
    text. When all steps are done, `losses`, (steps,), has the loss of each step over all processes.
    Raises DistributedError if `first_step` is beyond `args.steps`.
    """

    def __init__(self, local_loss, text, held_out, args, first_step=0, share=(0, 1)):
        if first_step > args.steps:
            line = f"the checkpoint has {first_step} steps, more than --steps {args.steps}"
            raise dist.DistributedError(line, on_all_ranks=True)
        self.local_loss = local_loss
        self.args = args
        self.device = dist.get_device()
        self.step = first_step
        self.first_unprinted = first_step
        self.losses = torch.zeros(args.steps, device=self.device)  # this process's, until they are printed
        starts = torch.linspace(0, len(held_out) - args.length - 1, 8 * args.global_batch_size).long()
        positions = torch.arange(args.length + 1)
        i, n = share
        own_starts = starts.view(8, -1).chunk(n, dim=1)[i]  # (8, sequences of this process)
        rows = held_out[own_starts[:, :, None] + positions].to(self.device).long()
        self.batches = []
        for part in rows:
            self.batches.append((part[:, :-1], part[:, 1:]))
        if dist.is_primary():
            rows = held_out[starts[:, None] + positions]
            bigram = ngram_loss(text, rows, 2)
            trigram = ngram_loss(text, rows, 3)
            print(f"loss in nats per byte; guessing by bigrams {bigram:.4f}, by trigrams {trigram:.4f}", flush=True)
        self.start = time.perf_counter()

    @torch.no_grad()
    def __call__(self, loss):
        self.losses[self.step] = loss
        self.step += 1
        if self.step % self.args.log_every == 0 or self.step == self.args.steps:
            self.print_line()

    def print_line(self):
        recent = dist.reduce(self.losses[self.first_unprinted : self.step])
        self.losses[self.first_unprinted : self.step] = recent
        loss = recent.mean().item()  # waits for the device, so the clock is read after it
        tokens = len(recent) * self.args.global_batch_size * self.args.length
        speed = tokens / (time.perf_counter() - self.start)
        held_out = dist.reduce(torch.stack([self.local_loss(x, y) for x, y in self.batches]).mean()).item()
        peak = dist.all_reduce(torch.tensor(dist.peak_memory(self.device), device=self.device), "max").item()
        dist.print_primary(
            f"step {self.step} | loss {loss:.4f} | held-out {held_out:.4f} | {speed:,.0f} tokens/s | "
            f"{peak / 1e6:.0f} MB",
            flush=True,
        )
        self.first_unprinted = self.step
        self.start = time.perf_counter()
