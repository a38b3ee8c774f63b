"""How long training stops for a snapshot: `checkpoint.save` on N ranks against torch.save and fsync alone.

    python -m benchmarks.snapshot_stall                              # 1.1 GB, two processes, 7 saves of each kind
    python -m benchmarks.snapshot_stall --megabytes 100 --nproc 4

It prints the median and the range of both, and the median ratio of neighbours. The kinds alternate, also in which of
them comes first, so that a busy machine slows both.
"""

import os
import statistics
import tempfile
import time

import torch

import checkpoint
import distributed as dist
import options
from benchmarks import common


def parse_args():
    parser = options.ArgumentParser(__doc__)
    parser.add_argument("--megabytes", type=options.whole_number(1), default=1130, help="size of the snapshot")
    parser.add_argument("--nproc", type=options.whole_number(1), default=2, help="processes")
    parser.add_argument("--repeats", type=options.whole_number(1), default=7, help="saves of each kind")
    parser.add_argument("--folder", default=None, help="where to write; the system's temporary folder if not given")
    return parser.parse_args()


def plain_save(path, model, optimizer):
    if dist.is_primary():
        with open(path, "wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())


def forget(folder):
    """What earlier saves have left to the disk, and the memory that their files take as long as there is enough."""
    os.sync()
    for name in os.listdir(folder):
        with open(f"{folder}/{name}", "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def stall(folder, save, *args, **kwargs):
    """Seconds from the moment when all ranks are ready until this rank continues; the slowest rank's."""
    if dist.is_primary():
        forget(folder)
    dist.barrier()
    start = time.perf_counter()
    save(*args, **kwargs)
    return dist.all_reduce(torch.tensor(time.perf_counter() - start), op="max").item()


def main_worker(local_rank, world_size, args, folder):
    dist.init_process_group()
    side = int((args.megabytes * 1e6 / 12) ** 0.5) // 8 * 8  # float32 weights and Adam's two averages
    torch.manual_seed(0)
    model = torch.nn.Linear(side, side, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    plain, ours = [], []
    for repeat in range(args.repeats + 1):
        if dist.is_primary() and repeat:
            os.replace(f"{folder}/new.pt", f"{folder}/plain.pt")  # the old file is there meanwhile
        saves = [
            lambda: plain.append(stall(folder, plain_save, f"{folder}/new.pt", model, optimizer)),
            lambda: ours.append(stall(folder, checkpoint.save, f"{folder}/snapshot.pt", model, optimizer, epoch=1)),
        ]
        for save in saves if repeat % 2 else reversed(saves):
            save()
    if not dist.is_primary():
        return
    plain, ours = plain[1:], ours[1:]  # the first of each creates the files
    ratio = statistics.median(one / other for one, other in zip(ours, plain, strict=True))
    results = {"torch.save and fsync": common.summary(plain), "checkpoint.save": common.summary(ours)}
    for name, row in results.items():
        print(f"{name:20}  {row['median']:.3f} s  ({row['min']:.3f} to {row['max']:.3f})")
    print(f"ratio {ratio:.2f} (n = {args.repeats}, {args.megabytes} MB, N = {world_size}), promised: at most 1")
    what = {"unit": "s", "megabytes": args.megabytes, "processes": world_size}
    common.write(f"snapshot_stall_{args.megabytes}MB", {**what, "results": results, "ratio": ratio})


if __name__ == "__main__":
    cli_args = parse_args()
    with tempfile.TemporaryDirectory(dir=cli_args.folder) as scratch:
        dist.launch(main_worker, cli_args, scratch, nprocs=cli_args.nproc)
