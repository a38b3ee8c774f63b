"""torch.sim: what torch and scripts look for in torch.cuda."""

import contextlib
import functools
import types

import torch
from torch.accelerator._utils import _get_device_index

from . import _C

accelerator = torch.accelerator
index_of = functools.partial(_get_device_index, optional=True)  # of a device, given as torch.cuda takes it
sync_debug_modes = ("default", "warn", "error")


def device(device):
    return accelerator.device_index(index_of(device))


def get_device_properties(device=None):
    total = accelerator.memory.get_memory_info(index_of(device))[1]
    return types.SimpleNamespace(name="simulated", total_memory=total, major=9, minor=0, multi_processor_count=1)


def set_sync_debug_mode(mode):
    """What happens where the host waits for a device: nothing, a warning or an error, as in torch.cuda."""
    _C.set_sync_debug_mode(mode if isinstance(mode, int) else sync_debug_modes.index(mode))


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **kwargs):
        return torch.Stream(torch.device("sim", index_of(device)), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return torch.Event("sim", enable_timing=True)


def generator(device=None):
    return _C.default_generator(index_of(device))


def manual_seed(seed):
    generator().manual_seed(int(seed))


def manual_seed_all(seed):
    for i in range(_C.device_count()):
        generator(i).manual_seed(int(seed))


def get_rng_state(device="sim"):
    """A seed and an offset, in 16 bytes."""
    return generator(device).get_state()


def set_rng_state(state, device="sim"):
    generator(device).set_state(state.cpu())


def of_index(function):
    return lambda device=None: function(index_of(device))


for name in ("memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
    globals()[name] = of_index(getattr(accelerator, name))
for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats", "current_stream", "synchronize"):
    globals()[name] = of_index(getattr(accelerator, name))
globals().update(
    set_device=of_index(accelerator.set_device_index),
    mem_get_info=of_index(accelerator.memory.get_memory_info),
    current_device=_C.current_device,
    device_count=_C.device_count,
    is_available=lambda: True,
    is_initialized=_C.is_used,
    get_sync_debug_mode=_C.get_sync_debug_mode,
    init=_C.use,
    _lazy_init=_C.use,
    _is_in_bad_fork=lambda: False,  # what uses a device notices a fork
    get_device_name=lambda device=None: "simulated",
    get_device_capability=lambda device=None: (9, 0),
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    is_bf16_supported=lambda *_, **__: True,
    set_stream=accelerator.set_stream,
    stream=lambda stream: contextlib.nullcontext() if stream is None else stream,
    seed_all=lambda: manual_seed_all(torch.seed()),
    empty_cache=lambda: None,
)
