"""What the tests' fork server does once, after its imports and before any fork, so that not every worker does it."""

import ctypes
import functools
import gc
import importlib.metadata
from pathlib import Path

import tests.shared_server  # noqa: F401 - the processes that are forked may start jobs too

MADV_COLLAPSE = 25  # Linux 6.1 and later
MEMORY = Path("/proc/self/maps")


def use_huge_pages():
    """Move the memory of this process into huge pages. A fork copies a table with one entry for each page.

    There are 500 times fewer huge pages than small ones. The move takes 0.7 s. A fork that does nothing then takes
    35 ms of a core instead of 65. A kernel that does not know the request refuses it, and nothing changes.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in MEMORY.read_text().splitlines():
        addresses, permissions, _, _, file_number, *_ = line.split()
        if permissions == "rw-p" and file_number == "0":
            start, end = (int(address, 16) for address in addresses.split("-"))
            madvise(start, end - start, MADV_COLLAPSE)


# Each process group looks for its backend among the entry points of all installed packages, which takes 15 ms.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
importlib.metadata.entry_points(group="torch.distributed.backends")

if MEMORY.exists():
    use_huge_pages()

# Each visit of a worker's garbage collector to all that is imported here would take 0.3 s, and copy its memory.
gc.collect()
gc.freeze()
