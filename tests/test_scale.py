"""What a job of a thousand ranks needs: each rank asks, connects and reads little, whatever the number of ranks."""

import math
import os
import threading
from concurrent import futures
from datetime import timedelta

import pytest
import torch.distributed as torch_dist

import distributed as dist

# ---- the ranks meet -------------------------------------------------------------------------------------------------


own = threading.local()  # a rank is a thread, and has a connection of its own


class CountingStore:
    """A store that counts the keys that are asked for."""

    def __init__(self, store):
        self.store = store
        self.keys = 0

    def __getattr__(self, name):
        method = getattr(self.store, name)

        def call(keys, *rest):
            self.keys += 1 if isinstance(keys, str) else len(keys)
            return method(keys, *rest)

        return call


@pytest.fixture
def server(monkeypatch):
    """torchrun's store, which is kept when the ranks start anew."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")

    def rendezvous(url, rank, world_size, timeout):
        yield own.store, rank, world_size

    monkeypatch.setattr(torch_dist, "rendezvous", rendezvous)
    monkeypatch.setattr(torch_dist, "PrefixStore", lambda prefix, store: (prefix, store.keys))
    return torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet(server, world_size, before=lambda rank: None, timeout=20):
    """Every rank's prefix, and the number of keys that it asked for."""

    def join(rank):
        own.store = CountingStore(torch_dist.TCPStore("127.0.0.1", server.port, is_master=False))
        before(rank)
        return dist._fresh_store(rank, world_size, timedelta(seconds=timeout))

    with futures.ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(join, range(world_size)))


@pytest.mark.parametrize("world_size", [1, 2, 64])
def test_each_rank_asks_for_few_keys_to_meet(server, world_size):
    answers = meet(server, world_size)
    assert len({prefix for prefix, _ in answers}) == 1
    assert all(keys <= 4 for _, keys in answers[1:]), "not one for each other rank"


def test_names_of_ranks_that_have_ended_do_not_confuse_the_new_ones(server):
    """They were as many, fewer or more. The last rank comes after rank 0 has answered its old name."""
    prefixes = set()
    for world_size in (3, 3, 5, 2, 5):
        old_name = None
        if server.check([f"rank {world_size - 1}"]):
            old_name = server.get(f"rank {world_size - 1}").decode()
            server.delete_key(f"prefix for {old_name}")

        def come_last(rank, last=world_size - 1, old_name=old_name):
            if rank == last and old_name:
                server.wait([f"prefix for {old_name}"], timedelta(seconds=10))

        answers = {prefix for prefix, _ in meet(server, world_size, come_last)}
        assert len(answers) == 1 and not answers & prefixes
        prefixes |= answers


def test_a_rank_that_does_not_come_is_an_error_on_all_others(server):
    def meet_late(rank):
        if rank == 2:
            raise ValueError

    for _ in range(2):  # also while its name of an earlier meeting is in the store
        with pytest.raises(TimeoutError, match="not all of 3 ranks have joined within 0:00:01"):
            meet(server, 3, meet_late, timeout=1)
        meet(server, 3)


# ---- the ranks exchange objects -------------------------------------------------------------------------------------


def count_sockets():
    links = []
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.lexists(path):  # the listing's own is closed by now
            links.append(os.readlink(path))
    return sum(link.startswith("socket:") for link in links)


def exchange(local_rank, world_size):
    dist.init_process_group()
    before = count_sockets()
    group = dist.patient_group()
    assert dist.gather_objects(local_rank, group) == list(range(world_size))
    for src in range(0, world_size, 5):
        assert dist.broadcast_object(local_rank, src, group) == src
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    sockets = dist.gather_objects(count_sockets() - before)
    assert max(sockets) <= 2 * math.log2(world_size) + 1, f"not one to each other rank: {sockets}"


def test_objects_need_few_sockets():
    dist.launch(exchange, nprocs=12)
