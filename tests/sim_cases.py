"""Small programs on simulated GPUs: mistakes that must be named, and right but unusual uses that must raise no alarm.

    SIM_DEVICES=2 python -m tests.sim_cases one      # those of one process
    SIM_DEVICES=2 python -m tests.sim_cases ranks    # those of two ranks
    SIM_DEVICES=2 python -m tests.sim_cases late     # a rank that does not come; also `killed` and `watched`

`one` and `ranks` print a dict in JSON for each rank: by name, the error of each case or None.
"""

import contextlib
import copy
import ctypes
import datetime
import io
import json
import os
import signal
import sys
import threading
import warnings

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import distributed as dist
import watch

MISTAKES, RIGHT = {}, {}  # of one process: by name, the function, with what the error of a mistake says
RANKS_MISTAKES, RANKS_RIGHT = {}, {}
DEVICES = "Expected all tensors to be on the same device"


def mistake(words, table=MISTAKES):
    def add(function):
        table[function.__name__] = (function, words)
        return function

    return add


def right(function):
    RIGHT[function.__name__] = (function, None)


def right_on_ranks(function):
    RANKS_RIGHT[function.__name__] = (function, None)


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


@mistake(f"{DEVICES}.*sim:0 and sim:1")
def tensors_of_two_devices():
    ones(3) + ones(3, on="sim:1")


@mistake(f"{DEVICES}.*cpu")
def a_device_and_the_cpu():
    ones(3) * torch.ones(3)


@mistake(DEVICES)
def a_model_that_stays_on_the_cpu():
    nn.Linear(2, 2)(ones(1, 2))


@mistake(DEVICES)
def token_ids_on_the_cpu():
    nn.Embedding(4, 2, device=device())(torch.tensor([1]))


@mistake(DEVICES)
def a_mask_made_on_the_cpu():
    ones(3, 3).masked_fill(torch.ones(3, 3, dtype=torch.bool), 0.0)


@mistake(DEVICES)
def a_cpu_tensor_in_cat():
    torch.cat([ones(2), torch.ones(2)])


@mistake(DEVICES)
def a_result_on_the_cpu():
    torch.add(ones(2), 1, out=torch.empty(2))


@mistake("indices should be either on cpu or on the same device")
def a_cpu_tensor_indexed_by_the_device():
    torch.ones(3)[torch.tensor([0, 1], device=device())]


@mistake("two devices")
def a_convolution_of_two_devices():
    F.conv2d(ones(1, 1, 4, 4), ones(1, 1, 2, 2, on="sim:1"))


@mistake("can't convert sim:0 device type tensor to numpy")
def numpy_of_a_device():
    ones(2).numpy()


@mistake("Expected a 'sim' device type for generator")
def a_generator_of_the_cpu():
    torch.rand(2, device=device(), generator=torch.Generator())


@mistake("invalid device ordinal 2")
def a_device_that_is_not_there():
    ones(1, on="sim:2")


@mistake("sim out of memory. Tried to allocate")
def more_memory_than_there_is():
    torch.empty(2**40, device=device())


@mistake("Cannot re-initialize sim in forked subprocess")
def a_device_in_a_forked_process():
    ones(1)
    in_child(lambda: ones(1))


@mistake("SIGSEGV: sim: the host touches memory of sim:0")
def a_pointer_of_the_device_on_the_host():
    address = ones(1).data_ptr()
    in_child(lambda: ctypes.string_at(address, 4))


# ---- mistakes with streams and pinned memory ------------------------------------------------------------------------


@mistake(r"race: aten::sum on stream \d+ of sim:0 reads a tensor that aten::mul on stream 0 of sim:0 writes")
def a_side_stream_that_does_not_wait():
    x = ones(3) * 2
    with side_stream():
        x.sum()


@mistake(r"race: aten::sum on stream 0 of sim:0 reads a tensor that aten::mul on stream \d+ of sim:0 writes")
def a_result_of_a_side_stream_read_too_early():
    side = side_stream()
    with side:
        x = ones(3) * 2
    x.sum()


@mistake(r"race: aten::zero_ on stream 0 of sim:0 writes a tensor that aten::sum on stream \d+ of sim:0 reads")
def a_tensor_overwritten_while_a_side_stream_reads_it():
    side, x = side_stream(), ones(3)
    side.wait_stream(main_stream())
    with side:
        x.sum()
    x.zero_()


@mistake(r"race: aten::fill_ on stream \d+ of sim:0 writes a tensor that aten::zero_ on stream \d+ of sim:0 writes")
def two_side_streams_that_write():
    first, second, x = side_stream(), side_stream(), ones(3)
    for side in (first, second):
        side.wait_stream(main_stream())
    with first:
        x.zero_()
    with second:
        x.fill_(1)


@mistake("aten::neg on stream 0")
def an_event_recorded_too_early():
    side, x = side_stream(), ones(3)
    event = main_stream().record_event()
    y = x.neg()
    side.wait_event(event)
    with side:
        y.sum()


@mistake("aten::sum")
def the_wrong_stream_waits():
    side, x = side_stream(), ones(3)
    main_stream().wait_stream(side)
    with side:
        x.sum()


@mistake(r"aten::mul on stream \d+ of sim:0 used before its memory was freed \(without record_stream\)")
def memory_freed_without_record_stream():
    side, x = side_stream(), ones(1000)
    side.wait_stream(main_stream())
    with side:
        x * 2
    del x
    torch.zeros(1000, device=device())


@mistake(r"copy_ on stream \d+ of sim:0")
def a_prefetched_batch_used_too_early():
    side = side_stream()
    with side:
        x = torch.ones(3).pin_memory().to(device(), non_blocking=True)
    x + 1


@mistake("SIGSEGV: sim race: the host writes pinned memory that copy_ on stream 0 of sim:0 reads")
def a_pinned_buffer_refilled_too_early():
    staging = torch.ones(3).pin_memory()
    staging.to(device(), non_blocking=True).sum()  # it runs, but the host has not waited
    in_child(lambda: staging.fill_(2))


@mistake("the host writes pinned memory that copy_ on stream 0 of sim:0 reads")
def a_slot_of_a_pinned_buffer_refilled_too_early():
    staging = torch.ones(2, 3).pin_memory()
    x = staging[0].to(device(), non_blocking=True)
    staging[0] = 2
    x.sum()


@mistake("SIGSEGV: sim race: the host touches pinned memory that copy_ on stream 0 of sim:0 writes")
def a_copy_read_by_the_host_too_early():
    x = ones(3).to("cpu", non_blocking=True)
    ones(3).sum()  # the copy runs, but the host has not waited
    in_child(x.tolist)


@mistake("race: aten::mul on stream 0 .* aten::fill_ on stream")
def slices_of_one_buffer_that_overlap():
    side, x = side_stream(), torch.zeros(10, device=device())
    side.wait_stream(main_stream())
    with side:
        x[3:6].fill_(1)
    x[5:] * 2


@mistake("used before its memory was freed")
def a_second_owner_of_memory_that_another_stream_uses():
    side, x = side_stream(), torch.zeros(1000, device=device())
    side.wait_stream(main_stream())
    with side:
        x * 2
    del x
    y = torch.empty(500, device=device())  # half of it
    del y
    torch.zeros(500, device=device())


@mistake("found at least two devices")
def a_bias_on_the_host():
    layer = torch.nn.Conv1d(1, 1, 1)
    torch.nn.functional.conv1d(ones(1, 1, 3), layer.weight.to(device()), layer.bias)


@mistake("aten::mul on stream")
def a_gradient_hook_on_a_side_stream_that_does_not_wait():
    side, weight = side_stream(), ones(3).requires_grad_()

    def double(param):
        with side:
            param.grad = param.grad * 2

    weight.register_post_accumulate_grad_hook(double)
    (weight * 3).sum().backward()


@mistake("called a synchronizing sim operation: aten::_local_scalar_dense")
def a_number_read_where_waits_are_errors():
    x = ones(1)
    torch.sim.set_sync_debug_mode("error")
    try:
        x.item()
    finally:
        torch.sim.set_sync_debug_mode("default")


@mistake("called a synchronizing sim operation: aten::nonzero")
def a_mask_as_index_where_waits_are_errors():
    x, mask = ones(3), ones(3) > 0
    torch.sim.set_sync_debug_mode("error")
    try:
        x[mask]
    finally:
        torch.sim.set_sync_debug_mode("default")


def in_child(function):
    """Run it in a forked process. Raises what happened there."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write_end, 2)
        try:
            function()
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
def streams_that_wait_for_each_other():
    side, x = side_stream(), ones(3) * 2
    side.wait_stream(main_stream())
    with side:
        y = x + 1
    main_stream().wait_stream(side)
    check(x * y, 6)


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
def a_number_that_the_host_has_read():
    x = ones(3) * 2
    x.sum().item()
    with side_stream():
        check(x, 2)


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
def memory_freed_after_its_stream_has_waited():
    side, x = side_stream(), ones(1000)
    side.wait_stream(main_stream())
    with side:
        x * 2
    main_stream().wait_stream(side)
    del x
    check(torch.zeros(1000, device=device()), 0)


@right
def a_pinned_batch_that_is_dropped_at_once():
    batches = [torch.full((100,), float(i)).pin_memory().to(device(), non_blocking=True) for i in range(5)]
    for i, x in enumerate(batches):
        check(x, i)


@right
def a_pinned_buffer_refilled_after_an_event():
    staging = torch.ones(3).pin_memory()
    x = staging.to(device(), non_blocking=True)
    event = main_stream().record_event()
    event.synchronize()
    staging.fill_(2)
    check(x, 1)


@right
def slots_of_one_pinned_buffer():
    ring = torch.zeros(4, 8).pin_memory()
    xs = []
    for i in range(4):
        ring[i] = i
        xs.append(ring[i].to(device(), non_blocking=True))
    for i, x in enumerate(xs):
        check(x, i)


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
def a_buffer_that_two_streams_fill():
    side, x = side_stream(), torch.zeros(10, device=device())
    side.wait_stream(main_stream())
    with side:
        x[:5].fill_(1)
    x[5:].fill_(1)
    main_stream().wait_stream(side)
    check(x, 1)


@right
def a_result_that_is_copied_and_freed():
    x = torch.ones(500_000, device=device())
    y = (x * 2).to("cpu", non_blocking=True)
    torch.empty_like(x)
    torch.accelerator.synchronize()
    check(y, 2)


@right
def pinned_memory_that_the_device_has_filled_is_its_source():
    staging = torch.zeros(3).pin_memory()
    staging.copy_(ones(3) * 3, non_blocking=True)
    check(staging.to(device()), 3)


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
    torch.sim.set_sync_debug_mode("error")
    try:
        (x.to(device(), non_blocking=True) @ weight).sum().backward()
        optimizer.step()
        total = weight.detach().sum().to("cpu", non_blocking=True)
    finally:
        torch.sim.set_sync_debug_mode("default")
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
def a_gradient_hook_on_a_side_stream():
    side, weight = side_stream(), ones(3).requires_grad_()

    def double(param):
        side.wait_stream(main_stream())
        with side:
            param.grad.mul_(2)

    weight.register_post_accumulate_grad_hook(double)
    (weight * 3).sum().backward()
    main_stream().wait_stream(side)
    check(weight.grad, 6)


@right
def a_forward_on_a_side_stream():
    """torch runs the backward there too, and makes the current stream wait at its end."""
    side, weight = side_stream(), ones(3).requires_grad_()
    side.wait_stream(main_stream())
    with side:
        loss = (weight * 3).sum()
    main_stream().wait_stream(side)
    loss.backward()
    check(weight.grad, 3)


@right
def two_threads_with_a_stream_each():
    x, results = ones(3) * 2, []
    event = main_stream().record_event()

    def work():
        side = side_stream()
        side.wait_event(event)
        with side:
            y = x + 1
        side.synchronize()
        results.append(y)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(sum(results), 6)


@right
def a_copy_between_devices():
    x = ones(3) * 2
    y = x.to("sim:1")
    check(y + y, 4)
    x.zero_()
    check(y, 2)


@right
def memory_resized_to_nothing_and_back():
    """As FSDP frees and gathers a parameter."""
    x = ones(1000)
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(4000)
    check(x.isnan(), True)
    x.fill_(3)
    check(x, 3)


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
    expected = model(torch.ones(1, 3))
    expected.sum().backward()
    grad = params[0].grad
    model.zero_grad()
    model.to(device())
    assert [id(param) for param in params] == [id(param) for param in model.parameters()]
    assert model[1].weight is model[0].weight and params[0].device == device()
    model(ones(1, 3)).sum().backward()
    check(params[0].grad, grad)
    param = nn.Parameter(torch.ones(2))
    param.data = param.data.to(device())
    check(param * 2, 2)


@right
def an_lstm():
    torch.manual_seed(0)
    model, x = nn.LSTM(3, 4, num_layers=2), torch.randn(5, 2, 3)
    other = copy.deepcopy(model).to(device())
    for net, inputs in ((model, x), (other, x.to(device()))):
        output, (hidden, cell) = net(inputs)
        (output.square().sum() + cell.sum() + hidden.sum()).backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad.cpu())


@right
def convolutions_and_attention_equal_the_cpu():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 32))
    x = torch.randn(4, 1, 8, 8)
    other = copy.deepcopy(model).to(device())
    for net, inputs in ((model, x), (other, x.to(device()))):
        q = net(inputs).view(1, 2, 2, 32)
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        check(b.grad, a.grad)


@right
def a_loss_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(F.mse_loss(ones(3, 1), ones(3, 1) * 3), 4)


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
def a_file_loaded_to_another_device():
    file = io.BytesIO()
    torch.save({"x": ones(3) * 2}, file)
    file.seek(0)
    x = torch.load(file, map_location="sim:1", weights_only=True)["x"]
    assert x.device == torch.device("sim:1")
    check(copy.deepcopy(x), 2)


@right
def pinned_batches_of_loader_processes():
    loader = DataLoader(torch.arange(12.0).view(12, 1), batch_size=4, num_workers=2, pin_memory=True)
    sums = [batch.to(device(), non_blocking=True).sum() for batch in loader]
    check(torch.stack(sums), [6, 22, 38])


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
    """Not an error, but seen: the pages are shut only where a copy fills all of a buffer."""
    ring = torch.zeros(2, 4).pin_memory()
    ring[0].copy_(ones(4), non_blocking=True)
    assert ring[0].isnan().all() and not ring[1].any()
    torch.accelerator.synchronize()
    check(ring[0], 1)


# ---- mistakes of two ranks ------------------------------------------------------------------------------------------


@mistake("race: aten::mul on stream 0 .* ALLREDUCE on stream", RANKS_MISTAKES)
def a_result_read_before_wait():
    x = ones(3)
    work = torch_dist.all_reduce(x, async_op=True)
    try:
        x * 2
    finally:
        work.wait()


@mistake("race: aten::zero_ on stream 0 .* _ALLGATHER_BASE on stream", RANKS_MISTAKES)
def an_input_overwritten_before_wait():
    x, y = ones(3), ones(6)
    work = torch_dist.all_gather_single(y, x, async_op=True)
    try:
        x.zero_()
    finally:
        work.wait()


@mistake("RECV on stream", RANKS_MISTAKES)
def a_received_tensor_read_before_wait():
    other = 1 - dist.get_rank()
    x, y = ones(3), ones(3)
    ops = [torch_dist.P2POp(torch_dist.isend, x, other), torch_dist.P2POp(torch_dist.irecv, y, other)]
    works = torch_dist.batch_isend_irecv(ops)
    try:
        y.sum()
    finally:
        for work in works:
            work.wait()


@mistake("SEND on stream", RANKS_MISTAKES)
def a_sent_tensor_overwritten_before_wait():
    other = 1 - dist.get_rank()
    x, y = ones(3), ones(3)
    ops = [torch_dist.P2POp(torch_dist.isend, x, other), torch_dist.P2POp(torch_dist.irecv, y, other)]
    works = torch_dist.batch_isend_irecv(ops)
    try:
        x.zero_()
    finally:
        for work in works:
            work.wait()


@mistake(r"aten::sum on stream 0 of sim:\d reads a tensor that ALLREDUCE", RANKS_MISTAKES)
def a_collective_of_a_side_stream_used_on_another():
    side, x = side_stream(), ones(3)
    side.wait_stream(main_stream())
    with side:
        torch_dist.all_reduce(x)
    x.sum()


@mistake("tensor not on device passed to init_process_group", RANKS_MISTAKES)
def the_device_of_another_rank():
    torch_dist.all_reduce(ones(3, on=f"sim:{1 - dist.get_rank()}"))


@mistake("must be contiguous", RANKS_MISTAKES)
def a_column():
    torch_dist.all_reduce(ones(4, 4)[:, 1])


@mistake("must be contiguous", RANKS_MISTAKES)
def an_expanded_tensor():
    torch_dist.broadcast(ones(1).expand(4), 0)


@mistake("no support for Short", RANKS_MISTAKES)
def a_type_that_nccl_lacks():
    torch_dist.all_reduce(ones(2, dtype=torch.int16))


@mistake("must hold world size times the input", RANKS_MISTAKES)
def an_output_of_the_wrong_size():
    torch_dist.all_gather_single(ones(3), ones(3))


@mistake("must hold world size times the output", RANKS_MISTAKES)
def an_input_of_the_wrong_size():
    torch_dist.reduce_scatter_single(ones(2), ones(3))


@mistake("No backend type associated with device type cpu", RANKS_MISTAKES)
def a_cpu_tensor_for_a_group_of_devices():
    group = torch_dist.new_group(backend="sim:simccl")
    torch_dist.all_reduce(torch.ones(2), group=group)


# ---- right uses of two ranks ----------------------------------------------------------------------------------------


@right_on_ranks
def every_collective():
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    x = ones(3) * (rank + 1)
    for op, expected in (("AVG", 1.5), ("SUM", 3), ("MAX", 2), ("MIN", 1), ("PRODUCT", 2)):
        y = x.clone()
        torch_dist.all_reduce(y, getattr(torch_dist.ReduceOp, op))
        check(y, expected)
    y = torch.empty(6, device=device())
    torch_dist.all_gather_single(y, x)
    check(y, [1, 1, 1, 2, 2, 2])
    parts = [torch.empty(3, device=device()) for _ in range(2)]
    torch_dist.all_gather(parts, x)
    check(torch.cat(parts), [1, 1, 1, 2, 2, 2])
    y = torch.empty(2, device=device())
    torch_dist.reduce_scatter_single(y, torch.arange(4.0, device=device()), torch_dist.ReduceOp.AVG)
    check(y, [2.0 * rank, 2 * rank + 1])
    torch_dist.reduce_scatter(y, [ones(2), ones(2) * 2])
    check(y, 2 * (rank + 1))
    y = torch.empty(2, device=device())
    torch_dist.all_to_all_single(y, torch.arange(2.0, device=device()) + 10 * rank)
    check(y, [rank, 10 + rank])
    y = torch.empty(rank + 1, 2, device=device())
    torch_dist.all_to_all_single(y, x.new_full((1, 2), float(rank)), [rank, 1], [rank, other]) if rank == 0 else None
    torch_dist.all_to_all_single(y, x.new_full((1, 2), float(rank)), [rank, 1], [0, 1]) if rank == 1 else None
    lists = [torch.empty(rank + 1, device=device()) for _ in range(2)]
    torch_dist.all_to_all(lists, [x.new_full((i + 1,), float(rank)) for i in range(2)])
    check(lists[1], 1)
    y = x.clone()
    torch_dist.broadcast(y, 1)
    check(y, 2)
    torch_dist.reduce(y, 0)
    if rank == 0:
        check(y, 4)
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
    torch_dist.barrier()


@right_on_ranks
def a_send_that_nobody_waits_for():
    if dist.get_rank() == 0:
        torch_dist.isend(ones(3) * 7, 1)
        torch.zeros(3, device=device())  # not in the memory that is sent
    else:
        y = ones(3)
        torch_dist.recv(y, 0)
        check(y, 7)


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
def work_between_a_collective_and_its_wait():
    x, y = ones(3), ones(3)
    work = torch_dist.all_reduce(x, async_op=True)
    y.mul_(3)
    work.wait()
    check(x + y, 5)
    assert work.is_completed()


@right_on_ranks
def a_collective_whose_input_is_dropped():
    y = torch.empty(2000, device=device())
    work = torch_dist.all_gather_single(y, ones(1000), async_op=True)
    check(torch.zeros(1000, device=device()), 0)
    work.wait()
    check(y, 1)


@right_on_ranks
def a_side_stream_for_collectives():
    side, x = side_stream(), ones(3)
    side.wait_stream(main_stream())
    with side:
        torch_dist.all_reduce(x)
    main_stream().wait_stream(side)
    check(x, 2)


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
def objects_and_cpu_tensors_by_gloo():
    assert dist.gather_objects(dist.get_rank()) == [0, 1]
    x = torch.ones(2)
    torch_dist.all_reduce(x)
    check(x, 2)


@right_on_ranks
def groups_of_groups():
    for group in (torch_dist.new_group([0, 1]), torch_dist.split_group(split_ranks=[[0, 1]])):
        x = ones(2)
        torch_dist.all_reduce(x, group=group)
        check(x, 2)


@right_on_ranks
def ddp_with_a_compressing_hook():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    torch.manual_seed(0)
    model = dist.prepare_ddp_model(nn.Linear(3, 1).to(device()), device_ids=[dist.get_local_rank()])
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    model(ones(1, 3) * (1 + 2 * dist.get_rank())).sum().backward()
    check(model.module.weight.grad, 2)


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


def killed(local_rank, world_size):
    dist.init_process_group()
    x = ones(3)
    torch_dist.all_reduce(x)
    x.sum().item()
    if local_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch_dist.all_reduce(x)
    x.sum().item()


class Told:
    """stderr, which says in the job's store that watch.py has told where the ranks stand."""

    def __init__(self, store):
        self.store = store

    def write(self, text):
        sys.__stderr__.write(text)
        if "no progress" in text:
            self.store.set("told", "")

    def flush(self):
        sys.__stderr__.flush()


def watched(local_rank, world_size):
    """Rank 0 waits for its device, whose collective waits for rank 1."""
    dist.init_process_group()
    store = torch_dist.distributed_c10d._get_default_store()
    sys.stderr = Told(store)
    watch.start()
    x = ones(3)
    if local_rank == 1:
        store.wait(["told"], datetime.timedelta(seconds=100))
    torch_dist.all_reduce(x)
    x.sum().item()
    sys.stderr = sys.__stderr__


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
