"""Stream documents from files in an order that one number describes, and resume on any number of processes.

The data are shards: .jsonl files whose lines are JSON objects with a "text", the documents. A longer document is cut to
--length + 1 bytes. Their order depends on seed, --buffer, epoch and position alone.

    shards, shuffled in each epoch      c c c c c|a a a|d|b b b b b b b
    cut into blocks of --buffer         c c c c|c a a a|d b b b|b b b b
    shuffled inside each block          c c c c|a c a a|b b d b|b b b b
    position                            0 1 2 3 4 5 6 7 8 ...            counts on through all epochs

Each step takes the next --global-batch-size positions, and each rank an equal share of them. The numbers of ranks and
loader processes decide which process reads a document, but never which one comes next. So the state to save is one
number, the position after the last step. What loader processes have fetched ahead is fetched again after a resume.

At each start the ranks share the shards, read them once, and tell each other where each document begins. So any
document can then be read by itself. The usual stream reads each shard from its first line through a shuffle buffer. Its
order depends on which process reads which shard, and a resumed run must either load saved buffers or read all earlier
documents again. Choose such a stream for files that cannot be read from the middle, such as compressed ones. Images in
a folder, or anything else with a length and an index, need neither: use `dist.data_sampler`, as min_DDP.py does.

Cost per process, for P float32 parameters on N processes: as with DDP, 16·P bytes with AdamW. Each step sends
2·(N-1)/N · 4·P bytes, and 8 bytes for the number of targets. The start reads 1/N of the shards. A process and each of
its loader processes hold 8 bytes for each document. A larger --buffer shuffles better, but scatters reads over more of
the disk.

    python min_Stream.py --nproc 2                                          # two processes; without --nproc, all GPUs
    CUDA_VISIBLE_DEVICES=0,1 python min_Stream.py --snapshot-path run.pt    # saves; rerun it with any --nproc to resume
    torchrun --standalone --nproc-per-node 2 min_Stream.py --data-dir shards --num-workers 2    # your own .jsonl files

Under torchrun it also saves on SIGTERM. If you resume with another number of processes, name --global-batch-size, whose
default is a multiple of it.
"""

import array
import functools
import json
import random
import zlib
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import checkpoint
import distributed as dist
import gpt
import options

IGNORED = -100  # a target that is not in the loss


# ---- the order ----------------------------------------------------------------------------------------------------


class Stream(Dataset):
    """`stream[position]` is this rank's share of the global batch that begins at `position`.

    `shards` are pairs (path, places). Document i of the shard at `path` has the bytes from places[i] to places[i + 1].
    """

    def __init__(self, shards, args):
        self.shards = shards
        self.args = args
        self.n_documents = sum(len(places) - 1 for _, places in shards)
        batch = torch.arange(args.global_batch_size)
        # Here, since a loader process belongs to no process group.
        self.own = gpt.own_share(batch, (dist.get_rank(), dist.get_world_size())).tolist()  # places in a global batch

    def __getitem__(self, position):
        texts = [read_document(*self.locate(position + place)) for place in self.own]
        return pad_texts(texts, self.args.length)

    def locate(self, position):
        """The path of the shard, and where in it the document at the global `position` begins and ends."""
        seed, buffer = self.args.seed, self.args.buffer
        epoch, place = divmod(position, self.n_documents)
        block, place_in_block = divmod(place, buffer)
        start = block * buffer
        size = min(buffer, self.n_documents - start)
        document = start + shuffled(size, seed, epoch, block)[place_in_block]
        for shard in shuffled(len(self.shards), seed, epoch):  # to the shard that has this document
            path, places = self.shards[shard]
            if document < len(places) - 1:
                return path, places[document], places[document + 1]
            document -= len(places) - 1


@functools.lru_cache(maxsize=4)  # orders of two blocks and of two epochs: a batch usually needs no more
def shuffled(n, *seeds):
    """The numbers below n in an order that depends on `seeds` alone."""
    order = list(range(n))
    random.Random(repr(seeds)).shuffle(order)
    return order


def make_loader(stream, position, args):
    """This rank's batches from a global position to the end of training."""
    end = args.steps * args.global_batch_size
    return DataLoader(
        stream,
        batch_size=None,  # an item of the stream is a batch
        sampler=range(position, end, args.global_batch_size),  # DataLoader keeps this order for any num_workers
        num_workers=args.num_workers,
        pin_memory=dist.get_device().type != "cpu",
    )


# ---- documents ----------------------------------------------------------------------------------------------------


def pad_texts(texts, length):
    """Tokens and targets (batch, length) of the first bytes of each text. Padding follows a text that is shorter."""
    rows = torch.full((len(texts), length + 1), IGNORED)
    for row, text in zip(rows, texts, strict=True):
        text = text[: length + 1]
        row[: len(text)] = torch.tensor(list(text))
    tokens = rows[:, :-1].clamp(min=0)  # at padding any token will do
    return tokens, rows[:, 1:]  # the target of a byte is the next one


def open_shards(paths):
    """The shards as `Stream` takes them. Every rank must call it, because each one reads some of the files."""
    dist.check_in_sync(None, **{"the list of shards": [(path.name, path.stat().st_size) for path in paths]})
    world_size = dist.get_world_size()
    own = [find_documents(path) for path in paths[dist.get_rank() :: world_size]]
    of_ranks = dist.gather_objects(own)
    return [(path, of_ranks[number % world_size][number // world_size]) for number, path in enumerate(paths)]


def find_documents(path):
    """The places in bytes at which the documents of a shard begin, and at which the last one ends."""
    places = array.array("q")
    end = 0
    with open(path, "rb") as shard:
        for line in shard:
            begins = not line.isspace()
            if path.suffix == ".py":  # an outermost class or function of the standard library, and what follows it
                begins = line.startswith((b"class ", b"def "))
            if begins:
                places.append(end)
            end += len(line)
    places.append(end)
    return places


def read_document(path, start, end):
    """The text, as bytes, of the document between two places of a shard."""
    with open(path, "rb") as shard:
        shard.seek(start)
        document = shard.read(end - start)
    if path.suffix == ".py":
        return document
    try:
        return json.loads(document)["text"].encode(errors="replace")
    except (ValueError, TypeError, KeyError, AttributeError):
        line = f'{path}: at byte {start} is no JSON object with a "text": was the file cut off or changed?'
        raise dist.DistributedError(line) from None


# ---- training -----------------------------------------------------------------------------------------------------


def train(model, optimizer, stream, position, args):
    """Train from a global position to the end.

    Returns the loss of every step over all processes, (steps,), which is 0 for earlier steps.
    """
    device = dist.get_device()
    preemption = checkpoint.Preemption()
    step = position // args.global_batch_size  # the number of steps that are done
    first_unprinted = step
    losses = torch.zeros(args.steps, device=device)  # this process's shares, on the device to avoid a sync every step
    # The loader's processes do not get a SIGTERM: the batches until the stop are needed.
    for tokens, targets in checkpoint.shielded(make_loader(stream, position, args)):
        tokens = tokens.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        # Ranks hold unequal numbers of targets, so divide by the number of all of them. See min_Packing.py.
        n_targets = dist.all_reduce((targets != IGNORED).sum()).clamp(min=1)
        optimizer.zero_grad()
        loss = sum_of_losses(model, tokens, targets) / n_targets
        (loss * dist.get_world_size()).backward()  # DDP divides by the world size
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        losses[step] = loss.detach()
        step += 1
        position += args.global_batch_size
        if step % args.log_every == 0 or step == args.steps:
            loss = dist.reduce(losses[first_unprinted:step], op="sum").mean().item()
            epoch = position / stream.n_documents
            dist.print_primary(f"step {step}/{args.steps} | loss {loss:.4f} | epoch {epoch:.2f}", flush=True)
            first_unprinted = step
        preempted = preemption.agreed()  # has any process received SIGTERM?
        if args.snapshot_path and (preempted or step % args.save_every == 0 or step == args.steps):
            # The position is saved as `step`: with another batch size, the same step would be another position.
            checkpoint.save(args.snapshot_path, model, optimizer, step=position, settings=settings_of(stream, args))
        if preempted and step < args.steps:
            preemption.leave()
    return dist.all_reduce(losses)


def sum_of_losses(model, tokens, targets):
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def settings_of(stream, args):
    """What a resumed run must share, though no shape depends on it. The last ones decide the order of the documents."""
    checksum = 0
    for path, places in stream.shards:
        checksum = zlib.crc32(path.name.encode() + places.tobytes(), checksum)
    settings = {f"--{name}": getattr(args, name) for name in ("heads", "lr", "clip", "seed", "buffer")}
    return {**settings, "documents": stream.n_documents, "shards (checksum)": checksum}


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = gpt.make_parser(__doc__)
    parser.add_argument("--data-dir", type=Path, help="folder of .jsonl shards (default: Python's standard library)")
    parser.add_argument("--buffer", type=options.whole_number(1), default=512, help="documents shuffled together")
    parser.add_argument("--num-workers", type=options.whole_number(0), default=1, help="loader processes per rank")
    parser.add_argument("--snapshot-path", help="save to this file, and resume from it")
    parser.add_argument("--save-every", type=options.whole_number(1), default=50, help="steps between snapshots")
    args = parser.parse_args()
    gpt.check_model_options(parser, args, batch=(args.nproc, "the number of processes"))
    checkpoint.check_writable("--snapshot-path", args.snapshot_path)
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    gpt.start(args)
    paths = gpt.LIBRARY.glob("*.py")
    if args.data_dir is not None:
        paths = args.data_dir.glob("*.jsonl")
    stream = Stream(open_shards(sorted(paths)), args)
    if stream.n_documents == 0:
        raise dist.DistributedError(f"--data-dir: {args.data_dir} has no .jsonl file with a document")
    dist.print_primary(f"{len(stream.shards):,} shards of {stream.n_documents:,} documents")

    model = gpt.GPT(gpt.Config.from_args(args), args.seed).to(dist.get_device())
    model = dist.prepare_ddp_model(model, gradient_as_bucket_view=True)  # needs no copy of the gradients
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    position = 0
    if args.snapshot_path:
        _, position = checkpoint.load(args.snapshot_path, model, optimizer, settings=settings_of(stream, args))
        if position > 0:
            dist.print_primary(f"Resuming at document {position:,}")
    tokens = torch.zeros(1, args.length, dtype=torch.long, device=dist.get_device())
    checkpoint.rebuild_buckets(model, lambda: model(tokens).sum())  # else a resumed run differs in the last bit
    train(model, optimizer, stream, position, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
