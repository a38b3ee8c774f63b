"""Metrics over all ranks are exact: reduce, gather and the sampler, on 1, 2 and 4 processes."""

import threading
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist

import distributed as dist


def check_reduce(rank, n):
    ranks = torch.arange(n)
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

    scalar = dist.reduce(torch.tensor(float(rank)))
    assert scalar.shape == () and scalar == ranks.float().mean()
    integers = dist.all_reduce(torch.tensor([rank, 2**40]), op="sum")
    assert integers.dtype == torch.int64 and integers.tolist() == [ranks.sum().item(), n * 2**40]
    # 256 + 1 is 256 in bf16: whichever rank is summed first, one of these sums would lose the ones.
    half = torch.ones(n, dtype=torch.bfloat16)
    half[rank] = 256
    assert torch.equal(dist.reduce(half, "sum"), torch.full((n,), 255.0 + n).bfloat16())
    assert dist.all_reduce(half) is half
    assert torch.equal(half, torch.full((n,), 255.0 + n).bfloat16())
    transposed = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(dist.reduce(transposed), transposed)
    dist.all_reduce(transposed)
    assert torch.equal(transposed, n * torch.arange(6.0).reshape(2, 3).t())
    rows = torch.ones(3, 2)
    dist.all_reduce(rows[1])
    assert rows.tolist() == [[1, 1], [n, n], [1, 1]], "of a view, the tensor that it views is changed"
    needs_grad = torch.ones(2, requires_grad=True) * 2
    for function in (dist.reduce, dist.all_reduce, dist.gather):
        with pytest.raises(ValueError, match="no gradient flows through reduce, all_reduce and gather: pass"):
            function(needs_grad)
        with torch.no_grad():
            function(needs_grad)
    assert not dist.reduce(needs_grad.detach()).requires_grad
    leaf = torch.ones(2, requires_grad=True)  # as in the recomputation of a checkpointed block
    with pytest.raises(ValueError, match="no gradient flows through"):
        dist.gather(leaf)
    assert len(dist.gather(torch.nn.Parameter(torch.ones(2)))) == n, "one may look at weights"

    for op in ("mean", "AVG", None):
        with pytest.raises(ValueError, match="op must be one of avg, sum, min, max, got "):
            dist.reduce(value, op)
    with pytest.raises(ValueError, match=r"the average of torch\.int64 would be rounded"):
        dist.reduce(torch.tensor(rank))
    assert dist.all_reduce(torch.tensor(rank == 0), "max").item() is True
    for op in ("min", "max"):
        for bad in range(n):
            number = torch.tensor([float("nan") if rank == bad else 1.0 + rank, rank])
            assert dist.reduce(number, op).isnan().tolist() == [True, False], "on each rank, whichever has it"
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32):
        with pytest.raises(ValueError, match=f"the sum of {dtype} may overflow"):
            dist.all_reduce(torch.tensor(100).to(dtype))
    assert dist.all_reduce(torch.tensor(100, dtype=torch.uint8), "min") == 100
    largest = dist.reduce(torch.tensor([rank, -rank], dtype=torch.int16), "max")
    assert largest.dtype == torch.int16 and largest.tolist() == [n - 1, 0]


def check_gather(rank, n):
    kept = torch.zeros(1)
    dist.gather(kept)[rank].add_(1)
    assert kept == 0, "the parts are new tensors"
    rows = dist.gather(torch.full((rank, 2), rank))  # rank 0 has none
    assert [r.shape for r in rows] == [(r, 2) for r in range(n)]
    assert all((part == r).all() for r, part in enumerate(rows))
    assert [part.item() for part in dist.gather(torch.tensor(rank))] == list(range(n))
    flags = torch.cat(dist.gather(torch.tensor([rank == 0, True])))
    assert flags.dtype == torch.bool and flags.tolist() == [r == 0 or i == 1 for r in range(n) for i in range(2)]
    assert all(part.shape == (0, 3) for part in dist.gather(torch.empty(0, 3)))
    columns = dist.gather(torch.arange(6.0).reshape(2, 3).t())
    assert all(torch.equal(part, torch.arange(6.0).reshape(2, 3).t()) for part in columns)
    for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bfloat16, torch.complex64):
        values = dist.gather(torch.tensor([[rank, 2]]).to(dtype))
        assert [(part.dtype, part.real.float().tolist()) for part in values] == [(dtype, [[r, 2]]) for r in range(n)]
        value = torch.tensor(rank + 1.0).to(dtype)
        dist.sync_params([value], src=n - 1)
        assert value.real.float() == n
    own = torch.ones(rank, 2, rank, dtype=torch.int64 if rank else torch.float64)
    assert [(part.shape, part.dtype) for part in dist.gather(own)] == [
        ((r, 2, r), torch.int64 if r else torch.float64) for r in range(n)
    ]
    assert dist.broadcast_object({"rank": rank}, src=n - 1) == {"rank": n - 1}
    # What comes from a GPU does not go to the GPU of the sender: here there is none, and torch would raise an error.
    with mock.patch("torch.serialization.location_tag", lambda storage: f"cuda:{rank}"):
        values = dist.gather_objects({"scores": [torch.tensor([rank, 5])]})
        first = dist.broadcast_object((torch.tensor(rank + 3.0), "text"))
    assert [value["scores"][0].tolist() for value in values] == [[r, 5] for r in range(n)]
    assert (first[0].item(), first[1]) == (3.0, "text")


def check_sampler(rank, n):
    for length in (10, 2, 9_999):
        exact = dist.data_sampler(range(length), True, shuffle=False, pad=False)
        indices = list(exact)
        assert len(indices) == len(exact)
        seen = torch.cat(dist.gather(torch.tensor(indices, dtype=torch.long)))
        assert sorted(seen.tolist()) == list(range(length))
    with pytest.raises(AssertionError, match="pad=False is for evaluation, and does not shuffle"):
        dist.data_sampler(range(10), True, shuffle=True, pad=False)
    padded = dist.data_sampler(range(10), True, shuffle=True, seed=5)
    first = list(padded)
    assert len(first) == -(-10 // n)
    padded.set_epoch(1)
    assert list(padded) != first
    others = dist.data_sampler(range(10), True, shuffle=True, seed=6)
    assert list(others) != first
    assert dist.data_sampler(range(10), False, shuffle=True) is None


def check_identity(rank, n):
    params = [torch.full((3,), float(rank)), torch.nn.Parameter(torch.full((2, 2), float(rank)))]
    dist.sync_params(params)
    assert all((param == 0).all() for param in params)
    if n > 1:
        shard = torch_dist.tensor.zeros(4, device_mesh=torch_dist.init_device_mesh("cpu", (n,)))
        for tensor in (shard, torch.ones(2, device="meta")):
            with pytest.raises(dist.DistributedError, match='a shard, nor a tensor on "meta"'):
                dist.sync_params([tensor])
    assert (dist.get_rank(), dist.get_world_size(), dist.is_primary()) == (rank, n, rank == 0)
    assert dist.get_local_rank() == rank
    assert dist.is_dist_avail_and_initialized() == (n > 1)
    model = torch.nn.Linear(2, 2)
    wrapped = dist.prepare_ddp_model(model, device_ids=[rank])  # ignored for a model on the CPU
    assert (wrapped is model) == (n == 1)
    kept = [gradient_of(wrapped, model, scale) for scale in (1.0, 3.0)]
    assert [gradient.tolist() for gradient in kept] == [[[1.0, 1.0]] * 2, [[3.0, 3.0]] * 2], "a kept one is not changed"
    dist.barrier()
    assert [len(value) for value in dist.gather_objects(bytes(rank << 23))] == [r << 23 for r in range(n)], (
        "of any size"
    )


def check_barrier(rank, n):
    if n == 1:
        dist.barrier()
        return
    store = torch_dist.distributed_c10d._get_default_store()
    if rank > 0:
        store.wait(["rank 0 waits"])
    waiting = threading.Thread(target=dist.barrier)
    waiting.start()
    if rank == 0:
        waiting.join(0.2)
        assert waiting.is_alive(), "the others have not come"
        store.set("rank 0 waits", "")
    waiting.join()


def gradient_of(wrapped, model, scale):
    model.zero_grad()
    (scale * wrapped(torch.ones(1, 2))).sum().backward()
    return model.weight.grad


def check_everything(local_rank, world_size):
    dist.init_process_group(0, world_size)  # as if each were the only process of its machine: RANK decides
    group = torch_dist.group.WORLD
    dist.init_process_group()
    assert torch_dist.group.WORLD is group, "a second call must do nothing"
    torch.manual_seed(local_rank)
    for check in (check_reduce, check_gather, check_sampler, check_identity, check_barrier):
        check(local_rank, world_size)
    dist.cleanup()
    dist.cleanup()
    assert not dist.is_dist_avail_and_initialized()
    for destroy in (torch_dist.destroy_process_group, dist.cleanup):
        dist.init_process_group()
        assert dist.all_reduce(torch.tensor(1)) == world_size, "another group, in the first one's store"
        if world_size > 1:
            destroy()


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_helpers(nprocs):
    dist.launch(check_everything, nprocs=nprocs)


def test_torchs_own_spelling_of_the_backend_is_an_error(monkeypatch):
    """Taken for the rank, it would make no group, and each process would train alone."""
    with pytest.raises(AssertionError, match=r"init_process_group\(backend='gloo'\)"):
        dist.init_process_group("gloo")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(AssertionError, match=r"init_process_group\(backend='nccl'\)"):
        dist.init_process_group("nccl")


def test_a_group_of_one_process_if_it_is_asked_for():
    dist.init_process_group(0, 1)
    assert not dist.is_dist_avail_and_initialized()
    dist.init_process_group(even_alone=True)
    assert torch_dist.get_world_size() == 1 and torch_dist.get_backend() == "gloo"
    torch_dist.barrier()
    dist.cleanup()
    assert not dist.is_launched(), "a later `launch` still starts its processes"


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


@pytest.mark.parametrize("kind, backend", [("cuda", "nccl"), ("xpu", "xccl")])
def test_device_is_the_local_rank_and_must_exist(kind, backend, gpus, monkeypatch):
    for name, value in {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    gpus(0)
    assert dist.get_device() == torch.device("cpu")
    device, init, choose = torch.device(kind, 1), mock.Mock(), mock.Mock()
    of_torch = {"init_process_group": init, "barrier": mock.Mock(), "rendezvous": lambda *args: iter([(None,) * 3])}
    with (
        mock.patch.multiple(torch.accelerator, current_accelerator=lambda: torch.device(kind), set_device_index=choose),
        mock.patch.multiple(torch_dist, PrefixStore=mock.Mock(), **of_torch),
    ):
        gpus(2)
        assert dist.get_device() == device
        for given, used, bound in ((None, f"cpu:gloo,{kind}:{backend}", device), ("gloo", "gloo", None)):
            dist.init_process_group(backend=given)
            assert init.call_args.args == (used,) and init.call_args.kwargs["device_id"] == bound
            choose.assert_called_with(device)
        with mock.patch.object(torch.backends.mps, "is_available", lambda: True):
            assert (dist.device_count(), dist.get_device()) == (0, torch.device("cpu")), "Apple's GPU"
        gpus(1)
        with pytest.raises(dist.DistributedError, match="local rank 1 has no GPU: 1 seen "):
            dist.get_device()
