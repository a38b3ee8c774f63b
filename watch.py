"""Where does each rank stand? If the job hangs, one line on stderr names the place of every rank.

    torch.distributed.init_process_group()
    watch.start()  # on every rank

    no progress for 30 s: rank 0 in train.py:41 loss = dist.reduce(loss) | rank 1 in train.py:57 loss.backward()

Ranks in different places have called different collectives, and each waits for the other. It works for every call that
waits: a collective, DDP's backward, a copy from a GPU to the CPU, a DataLoader. The job continues in any case, for
example if rank 0 computes for long while the others wait. Set WATCH_SECONDS to another number of seconds than 30. The
line comes up to half as many seconds later, when all ranks that hang have said so.

This file needs only torch, so it can be copied into any script that torchrun starts. In each process a sleeping thread
looks every second or two whether the main thread is in another line, has computed, or has called a collective. Only a
rank that hangs uses the job's store.
"""

import contextlib
import linecache
import os
import sys
import sysconfig
import threading
import time
import traceback

import torch
import torch.distributed as torch_dist

_SECONDS = os.environ.get("WATCH_SECONDS") or "30"
if not _SECONDS.replace(".", "", 1).isdecimal() or float(_SECONDS) == 0:
    raise SystemExit(f"WATCH_SECONDS is {_SECONDS!r}: it must be a number of seconds above 0, such as 30 or 0.5")
STILL_SECONDS = float(_SECONDS)
ASK_SECONDS = 1.3 * STILL_SECONDS  # other ranks may have stopped a little later
LOOK_SECONDS = STILL_SECONDS / 20
INSTALLED = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"), "<frozen")
# The line that calls them says more.
HELPERS = ("distributed.py", "checkpoint.py", "checkpoint_sharded.py", "spawn.py", "parity.py")
# macOS has no clock for each thread.
CLOCK_OF = getattr(time, "pthread_getcpuclockid", lambda thread: time.CLOCK_PROCESS_CPUTIME_ID)

_stop = threading.Event()  # ends the thread of the last `start`


def start():
    """Watch the calling thread until the process group is destroyed. In a single process it does nothing.

    Call it on every rank, once the process group is made. A second call replaces the first.
    """
    global _stop
    _stop.set()
    if not torch_dist.is_initialized() or torch_dist.get_world_size() == 1:
        return
    _stop = threading.Event()
    # A connection of its own, because the group's is busy while the main thread waits for the store.
    store = torch_dist.distributed_c10d._get_default_store().clone()
    rank = torch_dist.get_rank()
    store.set(f"watch place {rank}", "")  # torchrun keeps the store when it restarts the processes
    args = (threading.current_thread(), store, rank, torch_dist.get_world_size(), _stop)
    threading.Thread(target=_watch, args=args, daemon=True).start()


def _watch(thread, store, rank, world_size, stop):
    clock = CLOCK_OF(thread.ident)
    before, work_before = None, 0
    with contextlib.suppress(torch_dist.DistError):  # the store ends with the job
        while not stop.wait(LOOK_SECONDS) and torch_dist.is_initialized() and thread.is_alive():
            place, work = _place_of(thread), _work_done(clock)
            if place != before or work - work_before > LOOK_SECONDS / 1000:
                standstill = Standstill(store, rank, world_size)
            else:
                standstill.look(place)
            before, work_before = place, work


# ---- what a rank does while it hangs -----------------------------------------------------------------------


class Standstill:
    """One rank asks where all ranks stand. Those that hang answer. One of these tells the answers.

    A question is a number in the store. An answer to an older question does not count: its rank may have moved on, left
    the group or ended since.
    """

    def __init__(self, store, rank, world_size):
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.begin = time.monotonic()
        self.question = 0  # the newest that this rank has answered
        self.looks = None  # since it has answered, if nobody had told the answers yet

    def look(self, place):
        """The rank is still in this place."""
        seconds = time.monotonic() - self.begin
        if seconds < STILL_SECONDS:
            return
        newest = self.store.add("watch questions", 0)
        if newest == self.question and self.looks is None and seconds > ASK_SECONDS:
            newest = self.store.add("watch questions", 1)
        if newest > self.question:
            self.question = newest
            self.store.set(f"watch place {self.rank}", f"{newest} in {_describe(place)}")
            is_told = self.store.add(f"watch told {newest}", 0) > 0
            self.looks = None if is_told else 0
        elif self.looks is not None:
            self.looks += 1
            if self.looks == 2 and self.store.add(f"watch told {newest}", 1) == 1:  # one tells for all
                self.tell()

    def tell(self):
        ranks = []
        for rank in range(self.world_size):
            # Reads what is there, where `get` would wait for a rank that has never answered.
            answer = self.store.compare_set(f"watch place {rank}", "", "").decode()
            question, _, place = answer.partition(" ")
            is_current = question == str(self.question)
            ranks.append(f"rank {rank} {place if is_current else 'computing, or ended'}")
        print(f"no progress for {STILL_SECONDS:g} s: {' | '.join(ranks)}", file=sys.stderr, flush=True)


# ---- where a rank is, and what it has done ------------------------------------------------------------------------


def _place_of(thread):
    """The calls in which the thread is, innermost first: code, its instruction, number of the line, and module."""
    stack = traceback.walk_stack(sys._current_frames().get(thread.ident))
    return [(frame.f_code, frame.f_lasti, number, frame.f_globals.get("__name__")) for frame, number in stack]


def _work_done(clock):
    """A number that grows while the thread computes or calls collectives: a loop may be at the same place at each look.

    It counts collectives, and the seconds that the thread computes. But a thread that waits for a GPU spins, so there
    it counts the tensors that were allocated instead of the seconds.
    """
    work = 0
    for group in list(torch_dist.distributed_c10d._world.pg_map):
        for device in group._device_types:
            with contextlib.suppress(RuntimeError):  # this backend does not count
                work += group._get_backend(device)._get_sequence_number_for_group()
    gpus = [torch.accelerator.memory_stats(gpu) for gpu in range(torch.accelerator.device_count())]
    allocated = sum(stats.get("allocation.all.allocated", 0) for stats in gpus)
    return work + (allocated or time.clock_gettime(clock))


def _describe(place):
    """The innermost line that is not in an installed package, and not in a helper if a script has called that."""
    own = [call for call in place if _is_own(call)]
    calling = [call for call in own if os.path.basename(call[0].co_filename) not in HELPERS]
    code, _, number, _ = (calling or own or place)[0]
    line = linecache.getline(code.co_filename, number).strip()[:80]
    return f"{os.path.basename(code.co_filename)}:{number} {line}"


def _is_own(call):
    code, _, _, module = call
    is_generated = module is None or module.startswith("torch.")  # by torch.compile
    return not is_generated and not any(part in code.co_filename for part in INSTALLED)
