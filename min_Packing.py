"""Pack documents of unequal length into rows, and weight every target token alike on all ranks and micro-batches.

Several documents share a row, so few positions are padding. A document must not attend to its neighbours: its positions
start at 0, and attention sees only earlier bytes of the same document. Each document is a prompt (a function's
signature and docstring) and an answer (its body). Only the answer is in the loss.

    row        a a a a b b b c c c c c . .     three documents and padding
    position   0 1 2 3 0 1 2 0 1 2 3 4 0 0
    in loss    - - x x - - x - - - x x - -     targets in the answers

    attention    a a b b b
               a x                             a position (row) sees itself and the earlier positions (columns)
               a x x                           of its own document
               b     x
               b     x x
               b     x x x

Packed rows hold unequal numbers of targets. A mean over ranks of means over micro-batches then weights some tokens more
than others, and no error is raised. The loss of a step is instead one fraction:

    loss = (sum of the losses of all targets of all ranks and micro-batches) / (number of all these targets)

Each step begins with an all-reduce of the denominator. So the gradients have the right scale after backward, and
clipping and the optimizer need no change. Choose packing over padding (--pad) when lengths vary, because padding costs
as much time as text. If documents may see each other, cut one long text into rows, as `gpt.batch` does: then nothing is
wasted, and no mask is needed.

Cost per process, for P float32 parameters on N processes: as with DDP, 16·P bytes with AdamW. Each step sends
2·(N-1)/N · 4·P bytes, once for all micro-batches, and 8 bytes more. The mask has rows · length² bytes for the rows of a
micro-batch. For long rows on GPUs use torch's flex_attention: it stores no mask and skips the blocks that it hides.

    python min_Packing.py --nproc 2                                      # two processes; without --nproc, all GPUs
    CUDA_VISIBLE_DEVICES=0,1 python min_Packing.py --accumulate 3        # two GPUs, three micro-batches per step
    torchrun --standalone --nproc-per-node 2 min_Packing.py --pad        # one document per row, to compare

It prints the rows and the share of wasted positions of both ways, and every --log-every steps a line like
`step 50/400 | loss 2.9913 | held-out 2.8087 | 5,709 tokens/s | wasted 1.9 %`. Padding is not counted in tokens/s.
"""

import ast
import contextlib
import functools
import random
import time

import torch
from torch import nn
from torch.nn import functional as F

import distributed as dist
import gpt
import options

IGNORED = -100  # a target that is not in the loss
PADDING = -1  # the owner of a position that no document uses
TOKENS, POSITIONS, OWNERS, TARGETS = range(4)  # the second dimension of a tensor of rows


# ---- one loss for all ranks and micro-batches ---------------------------------------------------------------------


def backward(model, micro_batches):
    """Leave the gradients of the global batch on every rank; returns this process's share of its loss."""
    n_targets = torch.stack([(rows[:, TARGETS] != IGNORED).sum() for rows in micro_batches]).sum()
    n_targets = dist.all_reduce(n_targets)  # now counts all ranks and micro-batches
    share = 0
    for number, rows in enumerate(micro_batches, 1):
        sync = contextlib.nullcontext()
        if number < len(micro_batches) and dist.get_world_size() > 1:
            sync = model.no_sync()  # only accumulate here; the last micro-batch's backward reduces the sum
        with sync:
            loss = sum_of_losses(model, rows) / n_targets
            # DDP divides by the world size, so multiply by it. The micro-batches' gradients are summed, which needs no
            # further division.
            (loss * dist.get_world_size()).backward()
        share += loss.detach()
    return share


def sum_of_losses(model, rows):
    tokens, positions, owners, targets = rows.unbind(1)
    logits = model(tokens, positions, owners)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


class PackedGPT(gpt.GPT):
    """A GPT whose rows hold several documents: `owners` (batch, length) numbers the document of each position."""

    def forward(self, tokens, positions, owners):
        attend = functools.partial(F.scaled_dot_product_attention, attn_mask=mask_of(owners))
        for block in self.blocks:
            block.attention.attend = attend
        return super().forward(tokens, positions)


def mask_of(owners):
    """(batch, 1, query, key): each position sees itself and what precedes it in its own document.

    Padding is a document too: a position that sees nothing would become NaN.
    """
    same = owners[:, :, None] == owners[:, None, :]
    return same.tril()[:, None]


# ---- documents and rows -------------------------------------------------------------------------------------------


def load_documents():
    """Pairs (prompt, answer) of bytes: functions of Python's standard library, in the order of its files.

    A prompt is a signature and a docstring, an answer a body and a zero byte, the end. Every rank must call it. Rank 0
    reads and sends, so all ranks have the same documents.
    """
    documents = []
    if dist.is_primary():
        for path in sorted(gpt.LIBRARY.glob("*.py")):
            documents += functions_in(path.read_bytes())
    return dist.broadcast_object(documents)


def functions_in(source):
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not ast.get_docstring(node):
            continue
        end_of_docstring = node.body[0].end_lineno
        prompt = b"".join(lines[node.lineno - 1 : end_of_docstring])
        answer = b"".join(lines[end_of_docstring : node.end_lineno])
        if answer:
            yield prompt, answer + b"\0"


def n_positions(document):
    """The positions that a document takes: its last byte is only a target."""
    prompt, answer = document
    return len(prompt) + len(answer) - 1


def pack(documents, length):
    """Lists of documents that share a row: each, the longest first, goes to the first row that has room for it."""
    lists = [[]]
    rooms = [length]
    for document in sorted(documents, key=n_positions, reverse=True):
        needed = n_positions(document)
        number = 0
        while rooms[number] < needed:
            number += 1
        if not lists[number]:  # the last row was empty, so that every document finds room
            lists.append([])
            rooms.append(length)
        lists[number].append(document)
        rooms[number] -= needed
    return lists[:-1]


def fill_rows(lists, length):
    """(rows, 4, length), int64: tokens, positions, owners and targets."""
    rows = torch.zeros(len(lists), 4, length, dtype=torch.long)
    rows[:, OWNERS] = PADDING
    rows[:, TARGETS] = IGNORED
    for row, documents in zip(rows, lists, strict=True):
        start = 0
        for number, document in enumerate(documents):
            prompt, answer = document
            text = torch.tensor(list(prompt + answer))
            end = start + n_positions(document)
            row[TOKENS, start:end] = text[:-1]
            row[POSITIONS, start:end] = torch.arange(end - start)
            row[OWNERS, start:end] = number
            n_targets = min(len(answer), end - start)  # without a prompt, nothing predicts the first byte
            row[TARGETS, end - n_targets : end] = text[len(text) - n_targets :]
            start = end
    return rows


def wasted(rows):
    """The share of positions that hold padding."""
    return (rows[:, OWNERS] == PADDING).double().mean().item()


def own_rows(rows, step, args):
    """This process's rows of a step. The global batch depends on seed and step alone, so all ranks draw the same."""
    numbers = random.Random(f"{args.seed} {step}").choices(range(len(rows)), k=args.global_batch_size)
    own = numbers[dist.get_rank() :: dist.get_world_size()]
    return gpt.to_device(rows[own], dist.get_device())


def prepare_rows(documents, args):
    """Rows to train on and rows held out. Documents that do not fit into a row are left out."""
    fitting = [document for document in documents if n_positions(document) <= args.length]
    if len(fitting) < 20:
        line = f"--length {args.length}: only {len(fitting)} documents fit, choose a larger one"
        raise dist.DistributedError(line)
    n_held_out = len(fitting) // 20
    packed = fill_rows(pack(fitting[:-n_held_out], args.length), args.length)
    padded = fill_rows([[document] for document in fitting[:-n_held_out]], args.length)
    dist.print_primary(
        f"{len(fitting):,} of {len(documents):,} documents fit; packed: {len(packed):,} rows, "
        f"{100 * wasted(packed):.1f} % wasted; padded: {len(padded):,} rows, {100 * wasted(padded):.1f} % wasted"
    )
    held_out = fill_rows(pack(fitting[-n_held_out:], args.length), args.length)
    if args.pad:
        return padded, held_out
    return packed, held_out


# ---- training -----------------------------------------------------------------------------------------------------


def train(model, optimizer, rows, held_out, args):
    """Returns the loss of every step over all processes, (steps,)."""
    device = dist.get_device()
    shares = torch.zeros(args.steps, device=device)  # this rank's part of each loss; on the device, to avoid a sync
    n_tokens = torch.zeros((), device=device)
    first_unprinted = 0
    start = time.perf_counter()
    for step in range(args.steps):
        own = own_rows(rows, step, args)
        optimizer.zero_grad()
        shares[step] = backward(model, own.chunk(args.accumulate))
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        n_tokens += (own[:, OWNERS] != PADDING).sum()
        if (step + 1) % args.log_every == 0 or step + 1 == args.steps:
            recent = shares[first_unprinted : step + 1]
            loss = dist.reduce(recent, op="sum").mean().item()  # waits for the device, so the clock is read after it
            speed = dist.all_reduce(n_tokens).item() / (time.perf_counter() - start)
            held_out_loss = evaluate(model, held_out)
            dist.print_primary(
                f"step {step + 1}/{args.steps} | loss {loss:.4f} | held-out {held_out_loss:.4f} | "
                f"{speed:,.0f} tokens/s | wasted {100 * wasted(rows):.1f} %",
                flush=True,
            )
            n_tokens.zero_()
            first_unprinted = step + 1
            start = time.perf_counter()
    return dist.all_reduce(shares)


@torch.no_grad()
def evaluate(model, rows):
    """The mean loss of all targets of `rows`. Processes may have different numbers of rows: the plain model is used."""
    model = dist.unwrapped(model)
    sums = torch.zeros(2, device=dist.get_device())
    own = rows[dist.get_rank() :: dist.get_world_size()]
    for first in range(0, len(own), 8):  # not at all on a process without rows
        part = own[first : first + 8].to(dist.get_device())
        sums[0] += sum_of_losses(model, part)
        sums[1] += (part[:, TARGETS] != IGNORED).sum()
    loss, n_targets = dist.all_reduce(sums).tolist()
    return loss / n_targets


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = options.ArgumentParser(__doc__)
    gpt.add_model_options(parser, length=512)
    parser.add_argument("--accumulate", type=options.whole_number(1), default=1, help="micro-batches per step")
    parser.add_argument("--pad", action="store_true", help="put one document into each row and fill it with padding")
    args = parser.parse_args()
    shares = args.nproc * args.accumulate
    gpt.check_model_options(parser, args, batch=(shares, "the number of processes times --accumulate"))
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    gpt.start(args)
    rows, held_out = prepare_rows(load_documents(), args)
    model = PackedGPT(gpt.Config.from_args(args), args.seed).to(dist.get_device())
    model = dist.prepare_ddp_model(model, gradient_as_bucket_view=True)  # needs no copy of the gradients
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, rows, held_out, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
