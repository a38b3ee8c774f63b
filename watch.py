"""Where does each rank stand? If the job stands still, one line on stderr names the place of every rank.

    torch.distributed.init_process_group()
    watch.start()  # on every rank

    no progress for 30 s: rank 0 in train.py:41 loss = dist.reduce(loss) | rank 1 in train.py:57 loss.backward()

Ranks in different places have called different collectives, and each waits for the other. It works for every call that
waits: a collective, DDP's backward, a copy from a GPU to the CPU, a DataLoader. The job continues in any case, for
example if rank 0 computes for long while the others wait. Set WATCH_SECONDS to another number of seconds than 30. The
line comes up to half as many seconds later, when all ranks that stand still have said so.

This file needs only torch, so it can be copied into any script that torchrun starts. In each process a sleeping thread
looks every few seconds where the main thread is. Only a rank that stands still writes into the job's store.
"""

import linecache
import os
import sys
import sysconfig
import threading
import time

import torch
import torch.distributed as torch_dist

STILL_SECONDS = float(os.environ.get("WATCH_SECONDS", 30))
LOOK_SECONDS = STILL_SECONDS / 10
INSTALLED = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"), "<frozen")
HELPERS = ("distributed.py", "checkpoint.py", "checkpoint_sharded.py", "spawn.py")  # the line that calls them says more


def start():
    """Watch the calling thread until the process group is destroyed. In a single process it does nothing.

    Call it on every rank, once the process group is made. The job's store must be at MASTER_ADDR and MASTER_PORT.
    """
    if not torch_dist.is_initialized() or torch_dist.get_world_size() == 1:
        return
    # A connection of its own, because the group's is busy while the main thread waits for the store.
    store = torch_dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank = torch_dist.get_rank()
    store.set(f"watch place {rank}", "")  # torchrun keeps the store when it restarts the processes
    args = (store, rank, torch_dist.get_world_size(), threading.get_ident())
    threading.Thread(target=_watch, args=args, daemon=True).start()


def _watch(store, rank, world_size, thread):
    clock = time.CLOCK_PROCESS_CPUTIME_ID
    if hasattr(time, "pthread_getcpuclockid"):  # not on macOS
        clock = time.pthread_getcpuclockid(thread)
    before, work_before = None, 0
    last_move = time.monotonic()
    is_known = is_told = False  # the store has this rank's place; this rank, or one that stopped later, has told it
    while torch_dist.is_initialized():
        place, work = _place_of(thread), _work_done(clock)
        still = time.monotonic() - last_move
        try:
            if place != before or work - work_before > LOOK_SECONDS / 1000:
                last_move = time.monotonic()
                if is_known:
                    store.set(f"watch place {rank}", "")
                is_known = is_told = False
            elif still > STILL_SECONDS and not is_known:
                store.set(f"watch place {rank}", f"in {_describe(place)}")
                store.set("watch last", str(rank))
                is_known = True
            elif still > 1.3 * STILL_SECONDS and not is_told:  # others may have stopped a little later
                if _read(store, "watch last") == str(rank):  # one tells for all
                    _tell(store, world_size)
                is_told = True
        except RuntimeError:  # the store has ended, with the job
            return
        before, work_before = place, work
        time.sleep(LOOK_SECONDS)


def _place_of(thread):
    """The calls in which the thread is, innermost first: the code, its instruction, and the number of the line."""
    frame = sys._current_frames().get(thread)
    place = []
    while frame is not None:
        place.append((frame.f_code, frame.f_lasti, frame.f_lineno))
        frame = frame.f_back
    return place


def _work_done(clock):
    """A number that grows while the thread computes: a loop may be at the same place at each look.

    It is the thread's time, in seconds. But a thread that waits for a GPU spins, so there it is the number of tensors
    that were allocated.
    """
    if torch.cuda.is_initialized():
        gpus = range(torch.cuda.device_count())
        return sum(torch.cuda.memory_stats(gpu)["allocation.all.allocated"] for gpu in gpus)
    return time.clock_gettime(clock)


def _describe(place):
    """The innermost line that is not in an installed package, and not in a helper if a script has called that."""
    lines = [(code.co_filename, number) for code, _, number in place]
    own = [line for line in lines if not any(part in line[0] for part in INSTALLED)]
    calling = [line for line in own if os.path.basename(line[0]) not in HELPERS]
    path, number = (calling or own or lines)[0]
    return f"{os.path.basename(path)}:{number} {linecache.getline(path, number).strip()[:80]}"


def _tell(store, world_size):
    ranks = []
    for rank in range(world_size):
        place = _read(store, f"watch place {rank}") or "computing, or ended"
        ranks.append(f"rank {rank} {place}")
    print(f"no progress for {STILL_SECONDS:g} s: {' | '.join(ranks)}", file=sys.stderr, flush=True)


def _read(store, key):
    if not store.check([key]):  # without this, `get` would wait for it
        return ""
    return store.get(key).decode()
