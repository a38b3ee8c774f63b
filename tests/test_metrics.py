"""Metrics over all ranks are exact: reduce, gather and the sampler, on 1, 2 and 4 processes."""

from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
from conftest import on_processes

import distributed as dist


@on_processes(1, 2, 4)
def test_reduce_is_exact_and_all_reduce_changes_its_argument():
    rank, n = dist.get_rank(), dist.get_world_size()
    every = torch.stack([torch.tensor([r, -r, 2.0 * r + 1]) for r in range(n)])
    expected = {"avg": every.mean(dim=0), "sum": every.sum(dim=0), "min": every.amin(dim=0), "max": every.amax(dim=0)}
    for op, result in expected.items():
        value = every[rank].clone()
        assert torch.equal(dist.reduce(value, op), result)
        assert torch.equal(value, every[rank]), "reduce has changed its argument"
        assert dist.all_reduce(value, op=op) is value
        assert torch.equal(value, result), "all_reduce has not changed its argument"
    value = every[rank].clone()
    assert dist.reduce(value).data_ptr() != value.data_ptr()
    assert torch.equal(dist.reduce(value), expected["avg"]), "the default"
    assert torch.equal(dist.all_reduce(value), expected["sum"]), "the default"


@on_processes(1, 2, 4)
def test_tensors_of_any_type_and_layout_are_reduced():
    rank, n = dist.get_rank(), dist.get_world_size()
    scalar = dist.reduce(torch.tensor(float(rank)))
    assert scalar.shape == () and scalar == (n - 1) / 2
    integers = dist.all_reduce(torch.tensor([rank, 2**40]))
    assert integers.dtype == torch.int64 and integers.tolist() == [sum(range(n)), n * 2**40]
    # 256 + 1 is 256 in bf16: whichever rank is summed first, one of these sums would lose the ones.
    half = torch.ones(n, dtype=torch.bfloat16)
    half[rank] = 256
    assert torch.equal(dist.all_reduce(half), torch.full((n,), 255.0 + n).bfloat16())
    transposed = torch.arange(6.0).reshape(2, 3).t()
    dist.all_reduce(transposed)
    assert torch.equal(transposed, n * torch.arange(6.0).reshape(2, 3).t())
    rows = torch.ones(3, 2)
    dist.all_reduce(rows[1])
    assert rows.tolist() == [[1, 1], [n, n], [1, 1]], "of a view, the tensor that it views is changed"
    assert dist.all_reduce(torch.tensor(rank == 0), "max").item() is True
    assert dist.all_reduce(torch.tensor(100, dtype=torch.uint8), "min") == 100
    largest = dist.reduce(torch.tensor([rank, -rank], dtype=torch.int16), "max")
    assert largest.dtype == torch.int16 and largest.tolist() == [n - 1, 0]
    for op in ("min", "max"):
        for bad in range(n):
            number = torch.tensor([float("nan") if rank == bad else 1.0 + rank, rank])
            assert dist.reduce(number, op).isnan().tolist() == [True, False], "on each rank, whichever has it"


@on_processes(1, 2)
def test_what_would_be_a_wrong_number_is_refused():
    needs_grad, weight = torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2))
    for words, function, value, *op in (
        ("no gradient flows", dist.reduce, needs_grad),
        ("no gradient flows", dist.all_reduce, needs_grad * 2),
        ("no gradient flows", dist.gather, needs_grad),
        ("op must be one of", dist.reduce, torch.ones(1), "mean"),
        ("would be rounded", dist.reduce, torch.tensor(1)),
        ("may overflow", dist.all_reduce, torch.tensor(True)),
        ("may overflow", dist.all_reduce, torch.tensor(100, dtype=torch.int32)),
    ):
        with pytest.raises(ValueError, match=words):
            function(value, *op)
    with torch.no_grad():
        assert dist.reduce(needs_grad * 2).tolist() == [2, 2]
    assert len(dist.gather(weight)) == dist.get_world_size(), "one may look at weights"


@on_processes(1, 2, 4)
def test_gather_gives_every_part_to_every_rank():
    rank, n = dist.get_rank(), dist.get_world_size()
    kept = torch.zeros(1)
    dist.gather(kept)[rank].add_(1)
    assert kept == 0, "the parts are new tensors"
    rows = dist.gather(torch.full((rank, 2), rank))  # rank 0 has none
    assert [part.tolist() for part in rows] == [[[r, r]] * r for r in range(n)]
    assert [part.item() for part in dist.gather(torch.tensor(rank))] == list(range(n))
    for dtype in (torch.bool, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bfloat16, torch.complex64):
        values = dist.gather(torch.tensor([[rank, 2]]).to(dtype))
        expected = [torch.tensor([[r, 2]]).to(dtype).real.float().tolist() for r in range(n)]
        assert [part.real.float().tolist() for part in values] == expected and values[0].dtype == dtype


@on_processes(1, 2, 4)
def test_objects_reach_every_rank_and_their_tensors_not_the_gpu_of_the_sender():
    """Here there is none, and torch would raise an error."""
    rank, n = dist.get_rank(), dist.get_world_size()
    with mock.patch("torch.serialization.location_tag", lambda storage: f"cuda:{rank}"):
        values = dist.gather_objects({"scores": [torch.tensor([rank, 5])]})
        first, last = dist.broadcast_object((torch.tensor(rank), "a")), dist.broadcast_object(rank, src=n - 1)
    assert [value["scores"][0].tolist() for value in values] == [[r, 5] for r in range(n)]
    assert (first[0].item(), first[1], last) == (0, "a", n - 1)


@on_processes(1, 2, 4)
def test_sync_params_copies_tensors_of_any_type_and_layout():
    rank, n = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bfloat16, torch.complex64):
        value = torch.tensor(rank + 1.0).to(dtype)
        dist.sync_params([value], src=n - 1)
        assert value.real.float() == n
    whole, transposed = torch.full((4, 6), float(rank)), torch.full((2, 3), float(rank)).t()
    dist.sync_params([whole[:, 1], whole[::2, 3], transposed, torch.nn.Parameter(whole[1])])
    expected = torch.full((4, 6), float(rank))
    expected[:, 1] = expected[::2, 3] = expected[1] = 0
    assert torch.equal(whole, expected), "its neighbours in memory are not touched"
    assert (transposed == 0).all()
    if n > 1:
        shard = torch_dist.tensor.zeros(4, device_mesh=torch_dist.init_device_mesh("cpu", (n,)))
        for tensor in (shard, torch.ones(2, device="meta")):
            with pytest.raises(dist.DistributedError, match='a shard, nor a tensor on "meta"'):
                dist.sync_params([tensor])


@on_processes(1, 2, 4)
def test_the_sampler_deals_every_sample():
    n = dist.get_world_size()
    for length in (10, 2, 9_999):
        exact = dist.data_sampler(range(length), True, shuffle=False, pad=False)
        assert len(list(exact)) == len(exact)
        seen = torch.cat(dist.gather(torch.tensor(list(exact), dtype=torch.long)))
        assert sorted(seen.tolist()) == list(range(length))
    with pytest.raises(AssertionError, match="pad=False"):
        dist.data_sampler(range(10), True, shuffle=True, pad=False)
    padded = dist.data_sampler(range(10), True, shuffle=True, seed=5)
    first = list(padded)
    assert len(first) == -(-10 // n)
    padded.set_epoch(1)
    others = dist.data_sampler(range(10), True, shuffle=True, seed=6)
    assert first not in (list(padded), list(others))
    assert dist.data_sampler(range(10), False, shuffle=True) is None


@on_processes(2, 4)
def test_the_barrier_waits_for_every_rank():
    store = torch_dist.distributed_c10d._get_default_store()
    come = [f"rank {rank} has come" for rank in range(dist.get_world_size())]
    if dist.is_primary():
        store.wait(come[1:])  # so it is the last
    store.add(come[dist.get_rank()], 1)  # returns when the store has it; set does not wait for that
    dist.barrier()
    assert store.check(come)


@on_processes(1, 2, 4)
def test_a_group_is_made_once_and_can_be_made_again():
    rank, n = dist.get_rank(), dist.get_world_size()
    group = torch_dist.group.WORLD
    dist.init_process_group()
    assert torch_dist.group.WORLD is group, "a second call must do nothing"
    for destroy in (dist.cleanup, torch_dist.destroy_process_group):
        destroy()
        dist.cleanup()
        assert not dist.is_dist_avail_and_initialized()
        dist.init_process_group(0, n)  # as if each were the only process of its machine: RANK decides
        assert dist.is_dist_avail_and_initialized() == (n > 1)
        dist.init_process_group(even_alone=True)
        assert torch_dist.get_world_size() == n and torch_dist.get_backend() == "gloo"
        assert dist.all_reduce(torch.tensor(1)) == n, "another group, in the first one's store"
        assert (dist.get_rank(), dist.get_local_rank(), dist.is_primary()) == (rank, rank, rank == 0)
    assert n > 1 or not dist.is_launched(), "a later `launch` still starts its processes"


def test_torchs_own_spelling_of_the_backend_is_an_error(monkeypatch):
    """Taken for the rank, it would make no group, and each process would train alone."""
    with pytest.raises(AssertionError, match=r"init_process_group\(backend='gloo'\)"):
        dist.init_process_group("gloo")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(AssertionError, match=r"init_process_group\(backend='nccl'\)"):
        dist.init_process_group("nccl")


def test_print_primary_before_and_after_init(monkeypatch, capsys):
    dist.print_primary("alone", end="!")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    dist.print_primary("not me")
    assert capsys.readouterr().out == "alone!"


def test_a_collective_without_its_group_is_an_error(monkeypatch):
    """Not silently the identity: that would be one rank's value taken for everybody's."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        dist.reduce(torch.ones(1))


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_device_is_the_local_rank_and_must_exist(kind, gpus, monkeypatch):
    for name, value in {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    for number, device in ((0, torch.device("cpu")), (2, torch.device(kind, 1))):
        gpus(number)
        assert dist.get_device() == device
    gpus(1)
    with pytest.raises(dist.DistributedError, match="local rank 1 has no GPU: 1 seen "):
        dist.get_device()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert dist.get_device() == torch.device("cpu"), "Apple's GPU"
