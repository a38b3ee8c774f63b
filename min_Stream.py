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
ahead is not part of it: the resumed run fetches that again. Begin to read at `Stream`.

At each start the ranks share the shards, read them once, and tell each other where each line begins. So any document
can then be read by itself. The usual stream reads each shard from its first line through a shuffle buffer. Its order
depends on which process reads which shard, and a resumed run must either load saved buffers or read all earlier
documents again. Choose such a stream, not this script, for files that cannot be read from the middle, such as
compressed ones, and for so many files that to read them once takes too long. Images in a folder, or anything else with
a length and an index, need neither stream: use `dist.data_sampler`, as min_DDP.py does. The sampler keeps one number
per sample in memory.

Cost per process, for P float32 parameters on N processes: as with DDP, 16·P bytes with AdamW, and 2·(N-1)/N · 4·P bytes
sent in each step, and 8 bytes for the loss. The start reads 1/N of the shards, and 8 bytes per document stay in memory.
After that a process reads only its own documents. Each loader process adds up to 4 times --buffer numbers, one number
per shard, and the batches fetched ahead. A larger --buffer shuffles better, but scatters reads over more of the disk.

    python min_Stream.py --nproc 2                                          # two processes; without --nproc, all GPUs
    CUDA_VISIBLE_DEVICES=0,1 python min_Stream.py --snapshot-path run.pt    # saves; rerun it with any --nproc to resume
    torchrun --standalone --nproc-per-node 2 min_Stream.py --data-dir shards --num-workers 2    # your own .jsonl files

It prints every --log-every steps a line like `step 400 | epoch 3.57 | loss 2.0411 | 310 documents/s`. Without
--data-dir the shards are made at the first start from Python's standard library. Under torchrun it also saves when any
process receives SIGTERM.
"""

import array
import bisect
import functools
import hashlib
import itertools
import json
import random
import time
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


# ---- the order ----------------------------------------------------------------------------------------------------


class Stream(Dataset):
    """`stream[position]` is this rank's share of the global batch that begins at `position`.

    `shards` are pairs: a path, and the places in bytes at which its documents begin and at which the last one ends.
    """

    def __init__(self, shards, args):
        self.shards = shards
        self.counts = [len(places) - 1 for _, places in shards]
        self.n_documents = sum(self.counts)
        self.seed = args.seed
        self.buffer = args.buffer
        self.length = args.length
        self.share = args.global_batch_size // dist.get_world_size()
        self.rank = dist.get_rank()  # here, since a loader process belongs to no process group
        self.epoch = None

    def __getitem__(self, position):
        first = position + self.rank * self.share
        texts = []
        for own_position in range(first, first + self.share):
            shard, line = self.locate(own_position)
            path, places = self.shards[shard]
            texts.append(read_document(path, places[line], places[line + 1]))
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


# ---- training -----------------------------------------------------------------------------------------------------


def train(model, optimizer, stream, position, args):
    """Train from a global position to the end. Returns the loss of every step of this run, over all processes."""
    device = dist.get_device()
    first_step = position // args.global_batch_size
    step = first_step  # the number of steps that are done
    first_unprinted = first_step
    losses = torch.zeros(args.steps, device=device)  # this process's shares, on the device to avoid a sync every step
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
            loss = dist.reduce(losses[first_unprinted:step], "sum").mean().item()
            speed = (step - first_unprinted) * args.global_batch_size / (time.perf_counter() - start)
            epoch = position / stream.n_documents
            dist.print_primary(
                f"step {step} | epoch {epoch:.2f} | loss {loss:.4f} | {speed:,.0f} documents/s", flush=True
            )
            first_unprinted = step
            start = time.perf_counter()
        if args.snapshot_path:
            preempted = preemption.agreed()  # has any process received SIGTERM?
            if preempted or step % args.save_every == 0 or step == args.steps:
                settings = settings_of(stream, args)
                checkpoint.save(args.snapshot_path, model, optimizer, step=position, settings=settings)
            if preempted:
                preemption.leave()
    return dist.all_reduce(losses[first_step:])


def sum_of_losses(model, tokens, targets):
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def settings_of(stream, args):
    """What a resumed run must share, since the order depends on it, or no shape does."""
    digest = hashlib.sha256()
    for path, places in stream.shards:
        digest.update(path.name.encode() + places.tobytes())
    settings = {"--heads": args.heads, "--lr": args.lr, "--seed": args.seed, "--buffer": args.buffer}
    return {**settings, "documents": stream.n_documents, "shards": digest.hexdigest()[:12]}


# ---- documents ----------------------------------------------------------------------------------------------------


def make_rows(texts, length):
    """Tokens and targets (batch, length) of the first bytes of each text. Padding follows a text that is shorter."""
    texts = [text[: length + 1] for text in texts]
    padded = b"".join(text.ljust(length + 1, b"\0") for text in texts)
    rows = torch.frombuffer(bytearray(padded), dtype=torch.uint8).view(-1, length + 1).long()
    sizes = torch.tensor([len(text) for text in texts])
    is_padding = torch.arange(1, length + 1) >= sizes[:, None]
    return rows[:, :-1].contiguous(), rows[:, 1:].masked_fill(is_padding, IGNORED)


def read_document(path, start, end):
    with open(path, "rb") as shard:
        shard.seek(start)
        return parse(shard.read(end - start))


def parse(line):
    """The text of a line, in bytes. Raises ValueError if the line is no document."""
    document = json.loads(line)
    if not isinstance(document, dict) or not isinstance(document.get("text"), str):
        raise ValueError
    return document["text"].encode(errors="replace")


def find_documents(path):
    """The places in bytes at which the documents of a shard begin, and at which the last one ends."""
    places = array.array("q")
    end = 0
    with open(path, "rb") as shard:
        for number, line in enumerate(shard, 1):
            if line.strip():
                try:
                    parse(line)
                except (ValueError, RecursionError):
                    message = f'{path}: line {number} is not a JSON object with a "text": was the file cut off?'
                    raise dist.DistributedError(message) from None
                places.append(end)
            end += len(line)
    places.append(end)
    return places


def open_shards(folder):
    """Pairs, as `Stream` takes them. Every rank must call it: each one reads some of the shards."""
    sizes, found, error = {}, {}, None
    try:
        paths = sorted(folder.glob("*.jsonl"))
        for number, path in enumerate(paths):
            sizes[path.name] = path.stat().st_size
            if number % dist.get_world_size() == dist.get_rank():
                found[path.name] = find_documents(path)
    except OSError as failure:
        error = f"cannot read {failure.filename}: {failure.strerror}"
    except dist.DistributedError as failure:
        error = str(failure)
    dist.raise_on_all(error)
    gathered = dist.gather_objects((sizes, found))
    for rank, (sizes_there, found_there) in enumerate(gathered):
        if sizes_there != gathered[0][0]:
            raise dist.DistributedError(f"rank {rank} does not see the shards of rank 0 in {folder}", on_all_ranks=True)
        found.update(found_there)
    return [(path, found[path.name]) for path in paths]


def make_library_shards(folder):
    """Local rank 0 of each machine writes a shard for each file of the standard library, unless it is there.

    A document is a class or a function. Machines that share the folder may write at the same time.
    """
    if dist.get_local_rank() == 0:
        for source in sorted(gpt.LIBRARY.glob("*.py")):
            path = folder / f"{source.stem}.jsonl"
            if not path.exists():
                text = source.read_text(encoding="utf-8", errors="replace")
                with checkpoint.atomic(path) as shard:
                    for definition in text.split("\n\n\n"):  # two blank lines
                        shard.write(json.dumps({"text": definition.strip("\n") + "\n"}).encode() + b"\n")
    dist.barrier()


# ---- the job ------------------------------------------------------------------------------------------------------


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
    if not args.data_dir:
        checkpoint.check_writable("--data-dir", f"{LIBRARY_SHARDS}/os.jsonl")
    if args.snapshot_path is not None:
        checkpoint.check_writable("--snapshot-path", args.snapshot_path)
    return args


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs: far faster matrix products, with 10 bits of mantissa
    if not args.data_dir:
        args.data_dir = Path(LIBRARY_SHARDS)
        make_library_shards(args.data_dir)
    stream = Stream(open_shards(args.data_dir), args)
    if stream.n_documents == 0:
        raise dist.DistributedError(
            f"--data-dir: {args.data_dir} has no .jsonl file with a document", on_all_ranks=True
        )
    dist.print_primary(f"{len(stream.shards):,} shards of {stream.n_documents:,} documents")

    torch.manual_seed(args.seed)
    model = gpt.GPT(args.layers, args.width, args.heads, args.length).to(dist.get_device())
    model = dist.prepare_ddp_model(model, gradient_as_bucket_view=True)  # saves a copy of the gradients
    torch.manual_seed(args.seed + dist.get_rank())  # this model has no dropout; in yours, each process draws its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    position = 0
    if args.snapshot_path:
        _, position = checkpoint.load(args.snapshot_path, model, optimizer, settings=settings_of(stream, args))
    end = args.steps * args.global_batch_size
    if position - args.global_batch_size >= end:
        line = f"{args.snapshot_path} is at document {position:,}, and --steps {args.steps} ends at {end:,}"
        raise dist.DistributedError(line, on_all_ranks=True)
    if position > 0:
        dist.print_primary(f"Resuming at document {position:,}")

    def first_loss():
        batch = [tensor.to(dist.get_device()) for tensor in stream[position]]
        return sum_of_losses(model, *batch)

    checkpoint.rebuild_buckets(model, first_loss)
    train(model, optimizer, stream, position, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
