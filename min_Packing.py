"""Pack documents of unequal length into rows, and weight every target token alike on all ranks and micro-batches.

Several documents share a row, so few positions are padding. A document must not attend to its neighbours: its positions
start at 0, and the mask of attention is block-diagonal and causal. Each document is a prompt (a function's signature
and docstring) and an answer (its body). Only the answer is in the loss.

    row            a a a a b b b c c c c c . .     three documents and padding
    document ids   0 0 0 0 1 1 1 2 2 2 2 2 - -
    position       0 1 2 3 0 1 2 0 1 2 3 4 0 0
    in loss        - - x x - - x - - - x x - -     targets in the answers

    mask    a a b b b
          a x                                      a position (row) sees itself and the earlier positions (columns)
          a x x                                    of its own document
          b     x
          b     x x
          b     x x x

Packed rows hold unequal numbers of targets, say 1 on rank 0 and 3 on rank 1. The mean of the two ranks' means would
weight rank 0's target three times as much as the others, and no error is raised. The loss is the mean of all 4 targets.
DDP divides the sum of the gradients by the number of ranks, N. So each rank's part of the loss is

    N · (sum of the losses of its own targets) / (number of the targets of all ranks and micro-batches)

Choose packing over padding (--pad) when lengths vary, because padding costs as much time as text. The mask here has
rows · length² bytes. For long rows on GPUs use torch's flex_attention, or its varlen_attn with cumulative lengths:
both store no mask, and skip what it hides. Besides, the cost is DDP's, and 8 bytes per step for the number of targets.

    python min_Packing.py --nproc 2                                      # two processes; without --nproc, all GPUs
    CUDA_VISIBLE_DEVICES=0,1 python min_Packing.py --accumulate 3        # two GPUs, three micro-batches per step
    torchrun --standalone --nproc-per-node 2 min_Packing.py --pad        # one document per row, to compare
"""

import ast
import contextlib
import functools
import random

import torch
from torch import nn
from torch.nn import functional as F

import distributed as dist
import gpt
import options

IGNORED = -100  # a target that is not in the loss
PADDING = -1  # the document id of a position that no document uses
TOKENS, POSITIONS, DOCUMENT_IDS, TARGETS = range(4)  # the second dimension of a tensor of rows


# ---- one loss for all ranks and micro-batches ---------------------------------------------------------------------


def backward(model, micro_batches):
    """Leave the global batch's gradients on every rank. Returns the sum of `loss_of` over this rank's micro-batches."""
    n_targets = dist.all_reduce(sum(count_targets(rows) for rows in micro_batches))  # of all ranks and micro-batches
    total = 0
    for number, rows in enumerate(micro_batches, 1):
        sync = contextlib.nullcontext()
        if number < len(micro_batches) and dist.get_world_size() > 1:
            sync = model.no_sync()  # only accumulate here; the last micro-batch's backward reduces the sum
        with sync:
            loss = loss_of(model, rows, n_targets)
            loss.backward()  # the micro-batches' gradients are summed, which needs no further division
        total += loss.detach()
    return total


def loss_of(model, rows, n_targets):
    """This process's sum of losses, times world size, divided by `n_targets`, the number of targets of all processes.

    DDP divides the sum of the gradients by the world size. The factor cancels that division.
    """
    tokens, positions, document_ids, targets = rows.unbind(1)
    logits = model(tokens, positions, document_ids)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total * dist.get_world_size() / n_targets


def count_targets(rows):
    return (rows[:, TARGETS] != IGNORED).sum()


class PackedGPT(gpt.GPT):
    """A GPT whose rows hold several documents. `document_ids`, (batch, length), has the document of each position."""

    def forward(self, tokens, positions, document_ids):
        mask = block_diagonal_mask(document_ids)
        for block in self.blocks:
            block.attention.attend = functools.partial(F.scaled_dot_product_attention, attn_mask=mask)
        return super().forward(tokens, positions)


def block_diagonal_mask(document_ids):
    """(batch, 1, query, key): each position sees itself and what precedes it in its own document.

    Padding is a document too: a position that sees nothing would become NaN.
    """
    same = document_ids[:, :, None] == document_ids[:, None, :]
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
    lists = []
    rooms = []
    for document in sorted(documents, key=n_positions, reverse=True):
        needed = n_positions(document)
        number = next((number for number, room in enumerate(rooms) if room >= needed), len(rooms))
        if number == len(rooms):
            lists.append([])
            rooms.append(length)
        lists[number].append(document)
        rooms[number] -= needed
    return lists


def fill_rows(lists, length):
    """(rows, 4, length), int64: tokens, positions, document ids and targets."""
    rows = torch.zeros(len(lists), 4, length, dtype=torch.long)
    rows[:, DOCUMENT_IDS] = PADDING
    rows[:, TARGETS] = IGNORED
    for row, documents in zip(rows, lists, strict=True):
        start = 0
        for number, document in enumerate(documents):
            prompt, answer = document
            text = torch.tensor(list(prompt + answer))
            end = start + n_positions(document)
            row[TOKENS, start:end] = text[:-1]
            row[POSITIONS, start:end] = torch.arange(end - start)
            row[DOCUMENT_IDS, start:end] = number
            n_targets = min(len(answer), end - start)  # without a prompt, nothing predicts the first byte
            row[TARGETS, end - n_targets : end] = text[len(text) - n_targets :]
            start = end
    return rows


class Data:
    """Gives this process its share of each global batch of rows, and of the rows held out, as gpt.Data does of text."""

    def __init__(self, documents, args):
        fitting = [document for document in documents if n_positions(document) <= args.length]
        n_held_out = len(fitting) // 20
        if n_held_out == 0:
            line = f"--length {args.length}: only {len(fitting)} documents fit, choose a larger one"
            raise dist.DistributedError(line)
        lists = [[document] for document in fitting[:-n_held_out]]
        if not args.pad:
            lists = pack(fitting[:-n_held_out], args.length)
        self.rows = fill_rows(lists, args.length)
        self.held_out = fill_rows(pack(fitting[-n_held_out:], args.length), args.length)
        self.args = args

    def batch(self, step):
        """The global batch depends on seed and step alone, so all ranks draw the same."""
        draw = random.Random(f"{self.args.seed} {step}")
        numbers = draw.choices(range(len(self.rows)), k=self.args.global_batch_size)
        return gpt.to_device(self.rows[numbers[dist.get_rank() :: dist.get_world_size()]], dist.get_device())

    def held_out_batches(self):
        own = self.held_out[dist.get_rank() :: dist.get_world_size()]
        return [(own.to(dist.get_device()), count_targets(self.held_out))]


# ---- training -----------------------------------------------------------------------------------------------------


def train(model, optimizer, data, args):
    """Returns the loss of every step over all processes, (steps,)."""
    progress = gpt.Progress(model, data, args, loss_of=loss_of)
    for step in range(args.steps):
        optimizer.zero_grad()
        loss = backward(model, data.batch(step).chunk(args.accumulate))
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        progress(step, loss)
    return progress.losses


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = gpt.make_parser(__doc__, length=512)
    parser.add_argument("--accumulate", type=options.whole_number(1), default=1, help="micro-batches per step")
    parser.add_argument("--pad", action="store_true", help="put one document into each row and fill it with padding")
    args = parser.parse_args()
    gpt.check_model_options(parser, args, batch=(args.nproc * args.accumulate, "processes times --accumulate"))
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    gpt.start(args)
    data = Data(load_documents(), args)
    padding = (data.rows[:, DOCUMENT_IDS] == PADDING).double().mean()
    dist.print_primary(f"{len(data.rows):,} rows, {100 * padding:.1f} % padding, which tokens/s counts too")
    model = PackedGPT(gpt.Config.from_args(args), args.seed).to(dist.get_device())
    model = dist.prepare_ddp_model(model, gradient_as_bucket_view=True)  # needs no copy of the gradients
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, data, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
