"""Stream documents from files in an order that one number describes, and resume on any number of processes.

The data are shards: .jsonl files with a document per line. A longer document is cut to --length bytes. The order is a
function of seed, epoch and position alone.

    shards, shuffled in each epoch      c c c c c|a a a|d|b b b b b b b
    cut into blocks of --buffer         c c c c|c a a a|d b b b|b b b b
    shuffled inside each block          c c c c|a c a a|b b d b|b b b b
    position                            0 1 2 3 4 5 6 7 8 ...            counts on through all epochs

Each step takes the next --global-batch-size positions, and each rank an equal share of them. Its loader processes take
steps in turn. The numbers of ranks and loader processes decide which process reads a document, but never which one
comes next. So the state to save is one number, the position after the last step. What loader processes have fetched
ahead is not part of it: the resumed run fetches that again.

An index beside each shard holds the start of each line, so any document can be read by itself. The usual stream reads
each shard from its first line through a shuffle buffer. Its order depends on which process reads which shard, and a
resumed run must either load saved buffers or read all earlier documents again. Choose such a stream, not this script,
for files that cannot be read from the middle, such as compressed ones. Images in a folder, or anything else with a
length and an index, need neither stream: use `dist.data_sampler`, as min_DDP.py does. The sampler keeps one number per
sample in memory.

Cost per process, for P float32 parameters on N processes: as with DDP, 16·P bytes with AdamW, and 2·(N-1)/N · 4·P bytes
sent in each step, and 8 bytes for the loss. Each loader process adds up to 4 times --buffer numbers, one number per
shard, and the batches fetched ahead. The first start reads all shards once and writes the indexes, 8 bytes per
document. After that a process reads only its own documents. A larger --buffer shuffles better, but scatters reads over
more of the disk.

    python min_Stream.py --nproc 2                                          # two processes; without --nproc, all GPUs
    CUDA_VISIBLE_DEVICES=0,1 python min_Stream.py --snapshot-path run.pt    # saves; rerun it with any --nproc to resume
    torchrun --standalone --nproc-per-node 2 min_Stream.py --data-dir shards --num-workers 2    # your own .jsonl files

It prints every --log-every steps a line like `step 400 | epoch 3.57 | loss 2.0411 | 310 documents/s`. Without
--data-dir the shards are made at the first start from Python's standard library.
"""

import array
import bisect
import functools
import itertools
import json
import os
import random
import shutil
import struct
import time
import uuid
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import checkpoint
import distributed as dist
import gpt
import options

LIBRARY_SHARDS = "data/library"
IGNORED = -100  # a target that is not in the loss


def parse_args():
    count = options.whole_number(1)
    parser = options.ArgumentParser(__doc__)
    gpt.add_model_options(parser)
    parser.add_argument(
        "--data-dir",
        type=Path,
        help='folder of .jsonl shards, each line a JSON object with a "text" (default: the standard library)',
    )
    parser.add_argument("--buffer", type=count, default=512, help="documents that are shuffled among themselves")
    parser.add_argument(
        "--num-workers", type=options.whole_number(0), default=1, help="loader processes per training process"
    )
    parser.add_argument("--snapshot-path", help="save to this file, and resume from it (default: do not save)")
    parser.add_argument("--save-every", type=count, default=50, help="steps between two snapshots")
    args = parser.parse_args()
    gpt.check_model_options(parser, args, batch=(args.nproc, "the number of processes"))
    if args.data_dir and not any(args.data_dir.glob("*.jsonl")):
        parser.error(f"argument --data-dir: {str(args.data_dir)!r} has no .jsonl files")
    if args.snapshot_path is not None:
        checkpoint.check_writable("--snapshot-path", args.snapshot_path)
    return args


# ---- the order ----------------------------------------------------------------------------------------------------


class Stream(Dataset):
    """`stream[position]` is this rank's share of the global batch that begins at `position`.

    `counts` has the number of documents of each shard by its path.
    """

    def __init__(self, counts, args):
        self.paths = sorted(counts)
        self.counts = [counts[path] for path in self.paths]
        self.n_documents = sum(self.counts)
        self.seed = args.seed
        self.buffer = args.buffer
        self.length = args.length
        self.share = args.global_batch_size // dist.get_world_size()
        self.rank = dist.get_rank()  # here, since a loader process belongs to no process group
        self.epoch = None
        self.set_epoch(0)

    def __getitem__(self, position):
        first = position + self.rank * self.share
        texts = []
        for own_position in range(first, first + self.share):
            shard, line = self.locate(own_position)
            texts.append(read_document(self.paths[shard], line))
        return make_rows(texts, self.length)

    def locate(self, position):
        """Returns the number of the shard, and the line of the document at the global `position`."""
        epoch, place = divmod(position, self.n_documents)
        self.set_epoch(epoch)
        block, place_in_block = divmod(place, self.buffer)
        start = block * self.buffer
        size = min(self.buffer, self.n_documents - start)
        place = start + shuffled(size, self.seed, epoch, block)[place_in_block]
        turn = bisect.bisect_right(self.ends, place)  # passes over empty shards
        shard = self.order[turn]
        first_place = self.ends[turn] - self.counts[shard]
        return shard, place - first_place

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = shuffled(len(self.counts), self.seed, epoch)
            self.ends = list(itertools.accumulate(self.counts[shard] for shard in self.order))

    def state_dict(self):
        """What the order depends on: it must be the same when a run resumes."""
        shards = {}
        for path, count in zip(self.paths, self.counts, strict=True):
            shards[path.name] = [count, path.stat().st_size]
        return {"seed": self.seed, "buffer": self.buffer, "shards": shards}

    def load_state_dict(self, state):
        self.saved = state


@functools.lru_cache(maxsize=4)
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
        pin_memory=dist.get_device().type == "cuda",
    )


def make_rows(texts, length):
    """Tokens and targets (batch, length) of the first bytes of each text. Padding follows a text that is shorter."""
    texts = [text[: length + 1] for text in texts]
    padded = b"".join(text.ljust(length + 1, b"\0") for text in texts)
    rows = torch.frombuffer(bytearray(padded), dtype=torch.uint8).view(-1, length + 1).long()
    sizes = torch.tensor([len(text) for text in texts])
    is_padding = torch.arange(1, length + 1) >= sizes[:, None]
    return rows[:, :-1].contiguous(), rows[:, 1:].masked_fill(is_padding, IGNORED)


# ---- shards and their indexes -------------------------------------------------------------------------------------


def index_of(path):
    """The file that holds the start of each document in a shard, and the shard's end, as 64-bit numbers."""
    return path.with_name(path.name + ".index")


def read_document(path, line):
    with open(index_of(path), "rb") as index:
        index.seek(8 * line)
        start, end = struct.unpack("2q", index.read(16))
    with open(path, "rb") as shard:
        shard.seek(start)
        text = parse(shard.read(end - start))
    if text is None:
        raise dist.DistributedError(f"{path}: document {line} is no longer what its index says")
    return text


def parse(line):
    """The text of a line as bytes, or None if the line is no document."""
    try:
        document = json.loads(line)
    except ValueError:
        return None
    if not isinstance(document, dict) or not isinstance(document.get("text"), str):
        return None
    return document["text"].encode(errors="replace")


def build_index(path):
    """Write the index of a shard. Returns the number of its documents."""
    mtime = path.stat().st_mtime_ns
    starts = array.array("q")
    end = 0
    with open(path, "rb") as shard:
        for number, line in enumerate(shard, 1):
            if line.strip():
                if parse(line) is None:
                    message = f'{path}: line {number} is not a JSON object with a "text": was the file cut off?'
                    raise dist.DistributedError(message)
                starts.append(end)
            end += len(line)
    starts.append(end)
    temporary = unused_name(index_of(path))
    with checkpoint.atomic(temporary) as index:
        starts.tofile(index)
    os.utime(temporary, ns=(mtime, mtime))  # the shard's, so `read_count` notices each later change
    os.replace(temporary, index_of(path))
    return len(starts) - 1


def unused_name(path):
    """A name beside `path`. Another job, or another machine, may be writing the same file at the same time."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")


def read_count(path):
    """The number of documents according to the index, or None if there is no index or the shard has changed since."""
    index = index_of(path)
    if not index.exists() or index.stat().st_mtime_ns != path.stat().st_mtime_ns:
        return None
    with open(index, "rb") as file:
        file.seek(-8, os.SEEK_END)
        (end,) = struct.unpack("q", file.read(8))
        if end != path.stat().st_size:
            return None
    return index.stat().st_size // 8 - 1  # each 8 bytes are a start, the last ones the end


def open_shards(folder):
    """The number of documents of each shard by its path. Every rank must call it: together they build the indexes."""
    paths = sorted(folder.glob("*.jsonl"))
    first = dist.get_rank() * len(paths) // dist.get_world_size()
    counts, error = {}, None
    try:
        # Each rank begins elsewhere and skips what others have built. So machines may share the folder, but need not.
        for path in paths[first:] + paths[:first]:
            count = read_count(path)
            if count is None:
                count = build_index(path)
            counts[path] = count
    except OSError as failure:
        error = f"cannot read {failure.filename}: {failure.strerror}"
    except dist.DistributedError as failure:
        error = str(failure)
    # To index a large shard may take longer than NCCL's timeout.
    dist.raise_on_all(error)
    if sum(counts.values()) == 0:
        raise dist.DistributedError(f"{folder} has no documents: its .jsonl files are empty")
    return counts


def find_change(before, now):
    """A phrase that names the first difference between two state_dicts of a stream, or None."""
    for name in ("seed", "buffer"):
        if before[name] != now[name]:
            return f"--{name} was {before[name]} and is {now[name]}"
    for name in sorted(before["shards"] | now["shards"]):
        if name not in now["shards"]:
            return f"the shard {name} is gone"
        if name not in before["shards"]:
            return f"the shard {name} is new"
        count_before, bytes_before = before["shards"][name]
        count, n_bytes = now["shards"][name]
        if count_before != count:
            return f"the shard {name} had {count_before:,} documents and has {count:,}"
        if bytes_before != n_bytes:
            return f"the shard {name} had {bytes_before:,} bytes and has {n_bytes:,}"
    return None


def check_same(before, stream, situation):
    """Raise DistributedError on every rank unless all ranks' streams have the order that `before` describes."""
    change = find_change(before, stream.state_dict())
    error = None
    if change is not None:
        error = f"{situation}: {change}"
    dist.raise_on_all(error)


def make_library_shards(folder):
    """Make the folder of Python's standard library. All of its shards appear at once, or none."""
    temporary = unused_name(folder)
    try:
        write_library_shards(temporary)
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():  # if it is there, another job or machine was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_library_shards(folder):
    """8 files to a shard, a class or function to a document."""
    folder.mkdir(parents=True)
    sources = sorted(gpt.LIBRARY.glob("*.py"))
    for number in range(0, len(sources), 8):
        with open(folder / f"{number:04}.jsonl", "w") as shard:
            for source in sources[number : number + 8]:
                text = source.read_text(encoding="utf-8", errors="replace")
                for definition in text.split("\n\n\n"):  # two blank lines
                    shard.write(json.dumps({"text": definition.strip("\n") + "\n"}) + "\n")


def find_data(args):
    """The folder of the shards. Local rank 0 of each machine makes them if they are the default ones and missing."""
    folder = args.data_dir or Path(LIBRARY_SHARDS)
    error = None
    if not folder.exists() and dist.get_local_rank() == 0:
        try:
            make_library_shards(folder)
        except OSError as failure:
            error = f"cannot write {folder}: {failure.strerror}"
    dist.raise_on_all(error)
    return folder


# ---- training -----------------------------------------------------------------------------------------------------


def sum_of_losses(model, tokens, targets):
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def train(model, optimizer, stream, position, args):
    """Train from a global position to the end. Returns the loss of every step of this run, over all processes."""
    device = dist.get_device()
    losses = torch.zeros(args.steps, device=device)  # this process's shares, to avoid a sync every step
    first_step = position // args.global_batch_size
    step = first_step  # the number of steps that are done
    first_unprinted = first_step
    start = time.perf_counter()
    if args.snapshot_path:
        preemption = checkpoint.Preemption()
    for tokens, targets in checkpoint.shielded(make_loader(stream, position, args)):
        tokens = tokens.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        # Ranks hold unequal numbers of targets, so divide by the number of all of them. See min_Packing.py.
        n_targets = dist.all_reduce((targets != IGNORED).sum()).clamp(min=1)
        optimizer.zero_grad()
        loss = sum_of_losses(model, tokens, targets) / n_targets
        (loss * dist.get_world_size()).backward()  # DDP divides by the world size
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        losses[step] = loss.detach()
        step += 1
        position += args.global_batch_size
        if step % args.log_every == 0 or step == args.steps:
            loss = dist.reduce(losses[first_unprinted:step], op="sum").mean().item()
            speed = (step - first_unprinted) * args.global_batch_size / (time.perf_counter() - start)
            dist.print_primary(
                f"step {step} | epoch {position / stream.n_documents:.2f} | loss {loss:.4f} | {speed:,.0f} documents/s",
                flush=True,
            )
            first_unprinted = step
            start = time.perf_counter()
        if args.snapshot_path:
            preempted = preemption.agreed()  # has any process received SIGTERM?
            if preempted or step % args.save_every == 0 or step == args.steps:
                parts = {"stream": stream, "settings": settings_of(args)}
                checkpoint.save(args.snapshot_path, model, optimizer, step=position, **parts)
            if preempted:
                preemption.leave()
    return dist.all_reduce(losses[first_step:])


def settings_of(args):
    return {"--heads": args.heads, "--lr": args.lr}


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs: far faster matrix products, with 10 bits of mantissa
    counts = open_shards(find_data(args))
    stream = Stream(counts, args)
    expected = dist.broadcast_object(stream.state_dict())  # rank 0's
    check_same(expected, stream, f"rank {dist.get_rank()} does not have the data of rank 0")
    dist.print_primary(f"{len(counts):,} shards of {stream.n_documents:,} documents")

    torch.manual_seed(args.seed)
    model = gpt.GPT(args.layers, args.width, args.heads, args.length).to(dist.get_device())
    model = dist.prepare_ddp_model(model, gradient_as_bucket_view=True)  # saves a copy of the gradients
    torch.manual_seed(args.seed + dist.get_rank())  # this model has no dropout; in yours, each process draws its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    position = 0
    if args.snapshot_path:
        parts = {"stream": stream, "settings": settings_of(args)}
        _, position = checkpoint.load(args.snapshot_path, model, optimizer, **parts)
    if position > 0:
        check_same(stream.saved, stream, f"cannot resume from {args.snapshot_path}, the order would differ")
        end = args.steps * args.global_batch_size
        if position - args.global_batch_size >= end:
            line = f"{args.snapshot_path} is at document {position:,}, and --steps {args.steps} ends at {end:,}"
            raise dist.DistributedError(line)
        dist.print_primary(f"Resuming at document {position:,}")

    def first_loss():
        batch = [tensor.to(dist.get_device()) for tensor in stream[position]]
        return sum_of_losses(model, *batch)

    checkpoint.rebuild_buckets(model, first_loss)
    train(model, optimizer, stream, position, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
