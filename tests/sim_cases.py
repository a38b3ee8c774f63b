"""Small programs on simulated GPUs: mistakes that must be named, and right but unusual uses that must raise no alarm.

    SIM_DEVICES=2 python -m tests.sim_cases one      # those of one process
    SIM_DEVICES=2 python -m tests.sim_cases ranks    # those of two ranks
    SIM_DEVICES=2 python -m tests.sim_cases late     # ranks that fail; also `watched`, `one_device`

`one` and `ranks` print a dict in JSON for each rank: by name, the error of each case or None.
"""

import contextlib
import ctypes
import datetime
import gc
import json
import os
import signal
import sys
import threading
import warnings

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import distributed as dist
import watch

MISTAKES, RIGHT = {}, {}  # of one process: by name, the function, with what the error of a mistake says
RANKS_MISTAKES, RANKS_RIGHT = {}, {}


def case(words, table=MISTAKES):
    def add(function):
        table[function.__name__] = (function, words)
        return function

    return add


right, right_on_ranks = case(None, RIGHT), case(None, RANKS_RIGHT)


def device():
    return torch.device("sim", torch.accelerator.current_device_index())


def ones(*shape, on=None, **kwargs):
    return torch.ones(*shape, device=on or device(), **kwargs)


def side_stream():
    return torch.Stream(device())


def main_stream():
    return torch.accelerator.current_stream()


def check(tensor, expected):
    expected = torch.as_tensor(expected, dtype=tensor.dtype)
    assert torch.equal(tensor.cpu(), expected.expand(tensor.shape)), f"{tensor.cpu()} instead of {expected}"


# ---- mistakes with devices ------------------------------------------------------------------------------------------


def among_others(function):
    """`function` of a device's matrix, its rows 0 and 1, and the same on the CPU."""
    rows = torch.tensor([0, 1])
    return lambda: function(ones(4, 4), rows.to(device()), torch.ones(4, 4), rows)


for name, function in {
    "add": lambda x, rows, c, c_rows: x + c,
    "a model": lambda x, rows, c, c_rows: nn.Linear(4, 2)(x),
    "token ids": lambda x, rows, c, c_rows: F.embedding(c_rows, x),
    "labels": lambda x, rows, c, c_rows: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
    "keys": lambda x, rows, c, c_rows: F.scaled_dot_product_attention(x[None, None], c[None, None], x[None, None]),
    "one in cat": lambda x, rows, c, c_rows: torch.cat([x, c]),
    "out": lambda x, rows, c, c_rows: torch.add(x, 1, out=torch.empty(4, 4)),
    "rows written by index": lambda x, rows, c, c_rows: x.__setitem__(rows, c[:2]),
    "an index without a dimension": lambda x, rows, c, c_rows: x[0].index_select(0, c_rows[0]),
    "a number that is written": lambda x, rows, c, c_rows: c[0].add_(x[0]),
}.items():
    MISTAKES[f"on the cpu: {name}"] = (among_others(function), "device")

for words, function in {
    "found at least two devices, sim:0 and sim:1!": lambda: F.conv1d(ones(1, 1, 4), ones(1, 1, 2, on="sim:1")),
    "Expected a 'sim' device type for generator": lambda: torch.rand(2, device="sim", generator=torch.Generator()),
    "invalid device ordinal 2": lambda: ones(1, on="sim:2"),
    "sim out of memory. Tried to allocate": lambda: torch.empty(2**40, device=device()),
    "RNG state is wrong size": lambda: torch.sim.set_rng_state(torch.get_rng_state()),
    "written-to tensor refer to a single memory": lambda: (lambda x: x[1:].copy_(x[:-1]))(ones(3)),
    "has no tensors of Sparse": lambda: ones(3).to_sparse(),
    # What a forked process may not do.
    "Cannot re-initialize sim in forked subprocess": lambda: list(DataLoader([ones(())], num_workers=1)),
    "ended: Cannot re-initialize sim in forked subprocess": lambda: in_child(ones(1).add_, 1),
}.items():
    MISTAKES[words] = (function, words)


@case("SIGSEGV: sim: the host touches memory of sim:0")
def a_pointer_of_the_device_on_the_host():
    address = ones(1).data_ptr()
    in_child(lambda: ctypes.string_at(address, 4))


# ---- mistakes with streams and pinned memory ------------------------------------------------------------------------


@case(r"race: aten::sum on stream \d+ of sim:0 reads a tensor that aten::mul on stream 0 of sim:0 writes")
def a_side_stream_that_does_not_wait():
    x = ones(3) * 2
    with side_stream():
        x.sum()


@case(r"race: aten::zero_ on stream 0 of sim:0 writes a tensor that aten::sum on stream \d+ of sim:0 reads")
def a_tensor_overwritten_while_a_side_stream_reads_it():
    side, x = side_stream(), ones(3)
    side.wait_stream(main_stream())
    with side:
        x.sum()
    x.zero_()


@case("aten::neg on stream 0")
def an_event_recorded_too_early():
    side, x = side_stream(), ones(3)
    event = main_stream().record_event()
    y = x.neg()
    side.wait_event(event)
    with side:
        y.sum()


@case(r"aten::mul on stream \d+ of sim:0 used before its memory was freed \(without record_stream\)")
def memory_freed_without_record_stream():
    side, x = side_stream(), ones(1000)
    side.wait_stream(main_stream())
    with side:
        x * 2
    del x
    torch.empty(1000, device=device())  # the first of two that get this memory
    torch.zeros(1000, device=device())


@case(r"copy_ on stream \d+ of sim:0")
def a_prefetched_batch_used_too_early():
    side = side_stream()
    with side:
        x = torch.ones(3).pin_memory().to(device(), non_blocking=True)
    x + 1


def pinned(*shape):
    return torch.ones(*shape).pin_memory()


def refilled(source, *to, kernel=False):
    """The host refills what is copied, before it has waited."""
    y = source.to(device(), *to, non_blocking=True)
    if kernel:
        y.sum()  # the copy runs, but the host has not waited
    if source.nbytes == source.untyped_storage().nbytes():  # it has its pages for itself
        in_child(source.fill_, 5)
    source.fill_(5)
    torch.accelerator.synchronize()


def read_early(target, x):
    """The host reads what a copy is to fill, before it has waited."""
    target = x.to("cpu", target, non_blocking=True) if isinstance(target, torch.dtype) else target.copy_(x, True)
    ones(3).sum()  # the copy runs, but the host has not waited
    in_child(target.tolist)


WRITES = "race: the host writes pinned memory that copy_ on stream 0 of sim:0 reads.*sim_cases.py:.* in refilled"
TOUCHES = "SIGSEGV: sim race: the host touches pinned memory that copy_ on stream 0 of sim:0 writes.*sim_cases.py:"
for name, (function, words) in {
    "a buffer": (lambda: refilled(pinned(100)), f"SIGSEGV: sim {WRITES}"),
    "a buffer that is converted": (lambda: refilled(pinned(100), torch.bfloat16), f"SIGSEGV: sim {WRITES}"),
    "a slot": (lambda: refilled(pinned(2, 100)[0]), WRITES),
    "a slot after a kernel": (lambda: refilled(pinned(2, 100)[0], kernel=True), WRITES),
    "a copy": (lambda: read_early(pinned(100), ones(100)), TOUCHES),
    "a copy by `to`": (lambda: read_early(torch.float32, ones(100).bfloat16()), TOUCHES),
    "a large slot": (lambda: read_early(pinned(2, 4096)[1], ones(4096)), TOUCHES),
}.items():
    MISTAKES[f"too early: {name}"] = (function, words)


@case("SIGSEGV: sim race: the host touches")
def an_event_recorded_before_the_copy():
    x = ones(100)
    event = main_stream().record_event()
    y = x.to("cpu", non_blocking=True)
    event.synchronize()
    in_child(y.tolist)


@case("aten::resize_ on stream 0|resize_ on stream 0 .* aten::fill_ on stream")
def a_tensor_resized_while_a_side_stream_writes_it():
    side, x = side_stream(), torch.zeros(10, device=device())
    side.wait_stream(main_stream())
    with side:
        x.fill_(1)
    x.resize_(20)


@case(r"\n  aten::sum: .*sim_cases.py:\d+ in places_of_both\n  aten::mul: .*sim_cases.py:\d+ in twice")
def places_of_both():
    x = twice(ones(3))
    with side_stream():
        x.sum()


def twice(x):
    return x.mul_(2)


@case("race: aten::mul on stream 0 .* aten::fill_ on stream")
def a_column_with_an_element_of_a_side_stream():
    side, x = side_stream(), torch.zeros(4, 4, device=device())
    side.wait_stream(main_stream())
    with side:
        x[2, 1].fill_(1)
    x[:, 0].fill_(1)  # another one
    x[:, 1].mul_(2)


@contextlib.contextmanager
def sync_debug_mode(mode):
    torch.sim.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.sim.set_sync_debug_mode("default")


def where_waits_are_errors(function):
    def run():
        x, n = torch.arange(6.0, device=device()), torch.tensor([1, 2, 3], device=device())
        with sync_debug_mode("error"):
            function(x, n, x > 2)

    return run


for name, function in {
    "item": lambda x, n, mask: x[0].item(),
    "to the host": lambda x, n, mask: x.cpu(),
    "from the host": lambda x, n, mask: torch.ones(3).to(device()),
    "a mask": lambda x, n, mask: x[mask],
    "values written at a mask": lambda x, n, mask: x.__setitem__(mask, x[3:] + 1),
    "masked_select": lambda x, n, mask: x.masked_select(mask),
    "unique": lambda x, n, mask: x.unique(),
    "bincount": lambda x, n, mask: n.bincount(),
    "repeat_interleave": lambda x, n, mask: n.repeat_interleave(n),
    "equal": lambda x, n, mask: torch.equal(x, x),
    "svd": lambda x, n, mask: torch.linalg.svd(x.view(2, 3)),
    "multinomial": lambda x, n, mask: torch.multinomial(x + 1, 2),
}.items():
    MISTAKES[f"waits: {name}"] = (where_waits_are_errors(function), "called a synchronizing sim operation")


def in_child(function, *args):
    """Run it in a forked process. Raises what happened there."""
    gc.collect()  # or the child would end the loader processes of a case before
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write_end, 2)
        try:
            function(*args)
        except BaseException as error:
            print(error, file=sys.stderr)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, errors="replace") as file:
        said = file.read()
    status = os.waitpid(child, 0)[1]
    name = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "ended"
    raise RuntimeError(f"{name}: {said}")


# ---- right, and unusual ---------------------------------------------------------------------------------------------


@right
def events_between_three_streams():
    first, second, x = side_stream(), side_stream(), ones(3)
    first.wait_event(main_stream().record_event())
    with first:
        x.mul_(5)
        event = first.record_event()
    second.wait_event(event)
    with second:
        x.add_(1)
    main_stream().wait_event(second.record_event())
    check(x, 6)


@right
def a_host_that_waits_for_an_event():
    side, x = side_stream(), ones(3) * 2
    event = main_stream().record_event()
    event.synchronize()
    with side:
        y = x + 1
    side.synchronize()
    check(x + y, 5)


@right
def a_shape_that_the_host_needs():
    x = torch.arange(4, device=device())
    rows = (x > 1).nonzero()
    with side_stream():
        check(rows.flatten(), [2, 3])


@right
def memory_freed_after_record_stream():
    side, x = side_stream(), ones(1000)
    side.wait_stream(main_stream())
    with side:
        y = x * 2
    x.record_stream(side)
    del x
    check(torch.zeros(1000, device=device()), 0)
    main_stream().wait_stream(side)
    check(y, 2)


@right
def a_pinned_buffer_refilled_after_an_event():
    staging = torch.ones(3).pin_memory()
    x = staging.to(device(), non_blocking=True)
    event = main_stream().record_event()
    event.synchronize()
    staging.fill_(2)
    check(x, 1)


@right
def a_slot_that_is_filled_and_read_in_one_stream():
    ring, x = torch.zeros(2, 3).pin_memory(), ones(3) * 5
    ring[0].copy_(x, non_blocking=True)
    y = ring[0].to(device(), non_blocking=True)
    ring[0].copy_(x * 2, non_blocking=True)
    z = ring[0].to(device(), non_blocking=True)
    check(y, 5)
    check(z, 10)


@right
def parts_of_a_matrix_filled_by_two_streams():
    for part in (
        lambda x, i: x[:, i],
        lambda x, i: (x.view(torch.complex64).real, x.view(torch.complex64).imag)[i],
    ):
        side, x = side_stream(), torch.zeros(4, 6, device=device())
        side.wait_stream(main_stream())
        for _ in range(2):
            with side:
                part(x, 0).fill_(1)
            part(x, 1).fill_(2)
        main_stream().wait_stream(side)
        check(x.sum(), 3.0 * part(x, 0).numel())


@right
def views_that_conjugate_and_negate():
    on_cpu = torch.view_as_complex(torch.arange(8.0).view(4, 2))
    z = on_cpu.to(device())
    for function in (
        lambda z: z.conj().imag,
        lambda z: z.outer(z.conj()).sum(0),
        lambda z: z.clone().conj().mul_(2),
        lambda z: torch.zeros_like(z).conj().copy_(z),
    ):
        check(function(z), function(on_cpu))
    host = torch.zeros_like(on_cpu).pin_memory().copy_(z.conj(), non_blocking=True)
    torch.accelerator.synchronize()
    check(host, on_cpu.conj())


@right
def a_question_comes_before_the_answer():
    """A script that goes on without the work meets it here, as on a GPU that is still busy."""
    x = ones(4) * 2
    assert not main_stream().query() and main_stream().query()
    x.sum().item()
    assert main_stream().query()


@right
def streams_of_a_script_come_in_turn():
    assert len({side_stream().stream_id for _ in range(100)}) == 32


@right
def a_copy_read_after_a_question():
    side, x = side_stream(), ones(3)
    side.wait_stream(main_stream())
    with side:
        y = x.to("cpu", non_blocking=True)
        event = side.record_event()
    while not event.query():
        pass
    assert y.tolist() == [1, 1, 1]


@right
def a_pinned_buffer_there_and_back():
    staging = torch.ones(3).pin_memory()
    for _ in range(3):
        x = staging.to(device(), non_blocking=True) * 2
        staging.copy_(x, non_blocking=True)
    torch.accelerator.synchronize()
    check(staging, 8)


@right
def a_step_without_waits():
    weight, x = ones(3, 3).requires_grad_(), torch.ones(2, 3).pin_memory()
    optimizer = torch.optim.AdamW([weight], fused=True)
    with sync_debug_mode("error"):
        (x.to(device(), non_blocking=True) @ weight).sum().backward()
        optimizer.step()
        total = weight.detach().sum().to("cpu", non_blocking=True)
        x[x[:, 0] > 2] = 0.0  # as masked_fill
        n = ones(3, dtype=torch.long)
        n.repeat_interleave(n, output_size=3)
        torch.multinomial(ones(3), 5, replacement=True)
        torch.histc(ones(3), min=0, max=2)
    torch.accelerator.synchronize()
    assert total.isfinite()


@right
def a_prefetcher():
    side, held = side_stream(), None
    for i in range(5):
        with side:
            after = torch.full((50,), float(i)).pin_memory().to(device(), non_blocking=True)
            event = side.record_event()
        if held is not None:
            x, ready = held
            main_stream().wait_event(ready)
            x.record_stream(main_stream())
            check(x + 1, i)
        held = after, event


@right
def a_copy_between_devices():
    x = ones(3) * 2
    y = x.to("sim:1")
    check(y + y, 4)
    x.zero_()
    check(y, 2)


@right
def numbers_and_indices_of_the_cpu():
    x = ones(3)
    check(x * torch.tensor(2.0), 2)
    check(x[torch.tensor([0, 1])], 1)
    check(ones(2, 3)[:, torch.tensor([0, 2], device=device())], 1)
    x[torch.tensor([True, False, False])] = 5
    check(torch.where(x > 2, torch.tensor(7.0), x), [7, 1, 1])


@right
def a_parameter_moved_by_data():
    """As FSDP moves it, and Module.to: it stays the same object, and tied ones stay tied."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    params = list(model.parameters())
    model.to(device())
    assert [id(param) for param in params] == [id(param) for param in model.parameters()]
    assert model[1].weight is model[0].weight and params[0].device == device()
    model(ones(1, 3)).sum().backward()
    assert params[0].grad.device == device()


@right
def random_numbers_equal_the_cpu():
    torch.manual_seed(3)
    on_device = torch.randn(5, device=device())
    torch.manual_seed(3)
    check(on_device, torch.randn(5))
    expected = torch.rand(2, generator=torch.Generator().manual_seed(1))
    check(torch.rand(2, device=device(), generator=torch.Generator(device()).manual_seed(1)), expected)


@right
def recomputed_dropout_under_autocast():
    x = ones(64, 64).requires_grad_()
    weight = ones(64, 64)
    with torch.autocast("sim", torch.bfloat16):
        y = checkpoint(lambda x: F.dropout(x @ weight), x, use_reentrant=False)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.count_nonzero().item() > 0


@right
def new_memory_is_nan_and_counted():
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    x = torch.empty(1000, device=device())
    y = torch.empty(1000, device=device())
    assert x.isnan().all().item() and torch.empty(8, pin_memory=True).isnan().all()
    del y
    assert torch.accelerator.memory_allocated() - before == 4096  # rounded up to 512 bytes
    assert torch.accelerator.max_memory_allocated() - before >= 8192


@right
def a_part_of_a_pinned_buffer_read_too_early_is_nan():
    """Not an error, but seen: only pages that hold nothing else are shut."""
    for ring, bad in ((torch.zeros(2, 4).pin_memory(), float("nan")), (torch.zeros(2, 4).long().pin_memory(), -1)):
        ring[1].copy_(ones(4, dtype=ring.dtype), non_blocking=True)
        ones(3).sum()  # the copy runs, but the host has not waited
        torch.testing.assert_close(ring[1], torch.full_like(ring[1], bad), equal_nan=True)
        assert not ring[0].any()
        torch.accelerator.synchronize()
        check(ring[1], 1)


@right
def host_memory_that_may_be_used_at_once():
    pageable, target = torch.ones(100), torch.empty(100)
    x = pageable.to(device(), non_blocking=True)
    pageable.fill_(5)
    columns = pinned(100, 2)
    y = columns[:, 0].to(device(), non_blocking=True)  # made contiguous in pageable memory
    columns.fill_(5)
    target.copy_(x, non_blocking=True)
    assert target.sum() == 100
    check(y, 1)


@right
def waits_that_are_counted():
    with warnings.catch_warnings(record=True) as found, sync_debug_mode("warn"):
        warnings.simplefilter("always")
        for _ in range(3):
            ones(1).item()
        assert torch.sim.get_sync_debug_mode() == 1
    assert len(found) == 3 and "called a synchronizing sim operation: aten::_local" in str(found[0].message), found


@right
def draws_of_the_device():
    """The CPU's numbers stay as they were, and a state goes on where it was taken."""
    for draw in (
        lambda: F.dropout(ones(64)),
        lambda: torch.rand(700, device=device()),
        lambda: torch.randn(7, device=device()),
        lambda: F.rrelu(-ones(64), training=True),
        lambda: F.scaled_dot_product_attention(*[ones(1, 1, 8, 8)] * 3, dropout_p=0.5),
    ):
        torch.manual_seed(0)
        expected = torch.rand(1)
        torch.manual_seed(0)
        before = [draw() for _ in range(2)]
        check(torch.rand(1), expected)
        state = torch.sim.get_rng_state()
        after = draw()
        torch.sim.manual_seed(5)
        draw()
        torch.sim.set_rng_state(state)
        check(draw(), after.cpu())
        assert state.numel() == 16 and not torch.equal(before[0], before[1])


# ---- mistakes of two ranks ------------------------------------------------------------------------------------------


def used_before_wait(use, *works):
    try:
        use()
    finally:
        for work in works:
            work.wait()


@case("race: aten::mul on stream 0 .* ALLREDUCE on stream", RANKS_MISTAKES)
def a_result_read_before_wait():
    x = ones(3)
    used_before_wait(lambda: x * 2, torch_dist.all_reduce(x, async_op=True))


@case("race: aten::zero_ on stream 0 .* _ALLGATHER_BASE on stream", RANKS_MISTAKES)
def an_input_overwritten_before_wait():
    x, y = ones(3), ones(6)
    used_before_wait(x.zero_, torch_dist.all_gather_single(y, x, async_op=True))


@case("RECV on stream", RANKS_MISTAKES)
def a_received_tensor_read_before_wait():
    other = 1 - dist.get_rank()
    x, y = ones(3), ones(3)
    ops = [torch_dist.P2POp(torch_dist.isend, x, other), torch_dist.P2POp(torch_dist.irecv, y, other)]
    used_before_wait(y.sum, *torch_dist.batch_isend_irecv(ops))


def gather(n_outputs, output_type=torch.float32):
    torch_dist.all_gather_single(ones(n_outputs, dtype=output_type), ones(3))


all_reduce, ReduceOp = torch_dist.all_reduce, torch_dist.ReduceOp
for name, (words, function) in {
    "another rank's device": (
        "tensor not on device passed to init_process_group",
        lambda: all_reduce(ones(3, on=f"sim:{1 - dist.get_rank()}")),
    ),
    "a CPU tensor": (
        "No backend type associated with device type cpu",
        lambda: all_reduce(torch.ones(2), group=torch_dist.new_group(backend="sim:simccl")),
    ),
    "a column": ("must be contiguous", lambda: all_reduce(ones(4, 4)[:, 1])),
    "a sent column": ("must be contiguous", lambda: torch_dist.isend(ones(4, 4)[:, 1], 1 - dist.get_rank())),
    "a transposed matrix": ("must be contiguous", lambda: all_reduce(ones(2, 3).t())),
    "a smaller output": ("must hold world size times the input", lambda: gather(3)),
    "a larger input": (
        "must hold world size times the output",
        lambda: torch_dist.reduce_scatter_single(ones(2), ones(3)),
    ),
    "an output of another type": ("must have one type", lambda: gather(6, torch.bfloat16)),
    "booleans": ("Cannot use ReduceOp.AVG with boolean inputs", lambda: all_reduce(ones(2).bool(), ReduceOp.AVG)),
    "BAND": ("NCCL has no bitwise ReduceOp", lambda: all_reduce(ones(2).int(), ReduceOp.BAND)),
    "int16": ("no support for", lambda: all_reduce(ones(2).short())),
    "sums of float8": ("no support for", lambda: all_reduce(ones(2).to(torch.float8_e4m3fn))),
}.items():
    RANKS_MISTAKES[f"NCCL refuses {name}"] = (function, words)


# ---- right uses of two ranks ----------------------------------------------------------------------------------------


@right_on_ranks
def every_collective_that_reduces():
    rank = dist.get_rank()
    x = ones(3) * (rank + 1)
    for op, expected in (("AVG", 1.5), ("SUM", 3), ("MAX", 2), ("MIN", 1), ("PRODUCT", 2)):
        y = x.clone()
        torch_dist.all_reduce(y, getattr(ReduceOp, op))
        check(y, expected)
    y = torch.empty(2, device=device())
    torch_dist.reduce_scatter_single(y, torch.arange(4.0, device=device()), ReduceOp.AVG)
    check(y, [2.0 * rank, 2 * rank + 1])
    y = torch.empty(rank + 1, device=device())
    torch_dist.reduce_scatter(y, [ones(1), ones(2)])  # of unequal sizes
    check(y, 2)
    torch_dist.reduce(x, 0)
    check(x, 3 if rank == 0 else 2)


@right_on_ranks
def every_collective_that_moves():
    rank = dist.get_rank()
    x = ones(3) * (rank + 1)
    y = torch.empty(6, device=device())
    torch_dist.all_gather_single(y, x)
    check(y, [1, 1, 1, 2, 2, 2])
    parts = [torch.empty(i + 1, device=device()) for i in range(2)]  # of unequal sizes
    torch_dist.all_gather(parts, ones(rank + 1))
    check(torch.cat(parts), 1)
    y = torch.empty(2, device=device())
    torch_dist.all_to_all_single(y, torch.arange(2.0, device=device()) + 10 * rank)
    check(y, [rank, 10 + rank])
    y = torch.empty(2 - 2 * rank, 2, device=device())
    torch_dist.all_to_all_single(y, ones(1, 2), [1, 1] if rank == 0 else [0, 0], [1, 0])  # all rows go to rank 0
    check(y, 1)
    parts = [torch.empty(rank + 1, device=device()) for _ in range(2)]
    torch_dist.all_to_all(parts, [ones(i + 1) * rank for i in range(2)])
    check(parts[1], 1)
    y = torch.empty(1, device=device())
    torch_dist.scatter(y, [ones(1) * 5, ones(1) * 6] if rank == 0 else None)
    check(y, 5 + rank)
    parts = [torch.empty(1, device=device()) for _ in range(2)] if rank == 0 else None
    torch_dist.gather(y, parts)
    if rank == 0:
        check(torch.cat(parts), [5, 6])
        torch_dist.send(y, 1)
    else:
        torch_dist.recv(y, 0)
        check(y, 5)
    torch_dist.broadcast(x, 1)
    check(x, 2)
    torch_dist.barrier()


@right_on_ranks
def every_type():
    for dtype in (torch.bool, torch.int8, torch.uint8, torch.int64, torch.half, torch.bfloat16, torch.complex64):
        x = torch.ones(2).to(dtype).to(device())
        torch_dist.all_reduce(x)
        check(x, 1 if dtype == torch.bool else 2)
    for dtype in (torch.bool, torch.float8_e4m3fn, torch.complex64):
        x = torch.full((2,), float(dist.get_rank())).to(dtype).to(device())
        torch_dist.broadcast(x, 1)
        check(x.cpu().to(torch.complex64), 1)
    x = torch.arange(16.0, device=device()).view(1, 2, 2, 4).to(memory_format=torch.channels_last)
    torch_dist.all_reduce(x)
    check(x.flatten(), torch.arange(0.0, 32, 2))


@right_on_ranks
def a_dtensor_that_is_drawn():
    mesh = init_device_mesh("sim", (2,))
    torch.manual_seed(0)
    rows = F.dropout(distribute_tensor(ones(4, 64), mesh, [Shard(0)])).full_tensor()
    assert not torch.equal(rows[:2], rows[2:])


@right_on_ranks
def a_result_used_elsewhere_after_the_host_has_waited():
    side, x, y = side_stream(), ones(3), ones(3)
    torch_dist.all_reduce(x, async_op=True).wait(datetime.timedelta(seconds=60))
    work = torch_dist.all_reduce(y, async_op=True)
    while not work.is_completed():
        pass
    with side:
        check(x + y, 4)


@right_on_ranks
def a_result_whose_memory_is_given_back_after_wait():
    x = ones(3)
    torch_dist.all_reduce(x, async_op=True).wait()
    x.untyped_storage().resize_(0)
    check(ones(3), 1)


@right_on_ranks
def a_future_and_its_callback():
    x = ones(3)
    work = torch_dist.all_reduce(x, async_op=True)
    half = work.get_future().then(lambda future: future.value()[0] / 2)
    check(half.wait(), 1)


@right_on_ranks
def coalesced_collectives():
    from torch.distributed._functional_collectives import all_gather_single_coalesced  # torch 2.11 lacks it

    x, y = ones(3), ones(2)
    with torch_dist._coalescing_manager(device=device(), async_ops=True) as manager:
        torch_dist.all_reduce(x)
        torch_dist.all_reduce(y)
    manager.wait()
    check(x, 2)
    check(y, 2)
    parts = all_gather_single_coalesced([ones(1), ones(2)], torch_dist.group.WORLD)
    check(torch.cat(list(parts)), 1)


@right_on_ranks
def many_messages_in_a_batch():
    other = 1 - dist.get_rank()
    received = [torch.empty(4, device=device()) for _ in range(3)]
    ops = [torch_dist.P2POp(torch_dist.isend, ones(4) * i, other) for i in range(3)]
    ops += [torch_dist.P2POp(torch_dist.irecv, part, other) for part in received]
    works = torch_dist.batch_isend_irecv(ops)
    assert len(works) == 1, "as with NCCL"
    for work in works:
        work.wait()
    for i, part in enumerate(received):
        check(part, i)


@right_on_ranks
def groups_of_groups():
    for group in (torch_dist.new_group([0, 1]), torch_dist.split_group(split_ranks=[[0, 1]])):
        x = ones(2)
        torch_dist.all_reduce(x, group=group)
        check(x, 2)


# ---- ranks that do not come -----------------------------------------------------------------------------------------


def late(local_rank, world_size):
    """The collective's timeout ends the wait of rank 0, and its error names the collective."""
    dist.init_process_group(timeout=datetime.timedelta(seconds=3))
    store = torch_dist.distributed_c10d._get_default_store()
    if local_rank == 1:
        store.wait(["rank 0 has failed"], datetime.timedelta(seconds=60))
        return None
    x = ones(3)
    torch_dist.all_reduce(x)
    try:
        x.sum().item()
    except torch_dist.DistBackendError as error:
        store.set("rank 0 has failed", "")
        return str(error)


def one_device(local_rank, world_size):
    """Nobody has called set_device. The first collective says so."""
    torch_dist.init_process_group(timeout=datetime.timedelta(seconds=60))
    try:
        torch_dist.all_reduce(torch.ones(3, device="sim"))
    except torch_dist.DistBackendError as error:
        return str(error)


def watched(local_rank, world_size):
    """Rank 0 waits for its device, whose collective waits for rank 1."""
    dist.init_process_group()
    watch.start()
    if local_rank == 1:
        threading.Event().wait()
    x = ones(3)
    torch_dist.all_reduce(x)
    x.sum().item()


# ---- run them -------------------------------------------------------------------------------------------------------


def run(cases):
    results = {}
    for name, (function, _) in cases.items():
        results[name] = None
        try:
            function()
            synchronize()
        except Exception as error:
            results[name] = str(error)
            with contextlib.suppress(RuntimeError):  # the rest of a queue after a failed copy
                synchronize()
    return results


def synchronize():
    for i in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(i)


def ranks(local_rank, world_size):
    dist.init_process_group()
    return dist.gather_objects(run(RANKS_MISTAKES | RANKS_RIGHT))


if __name__ == "__main__":
    found = [run(MISTAKES | RIGHT)] if sys.argv[1] == "one" else dist.launch(globals()[sys.argv[1]], nprocs=2)
    print(json.dumps(found))
