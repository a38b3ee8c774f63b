"""torch.sim: the functions that torch and scripts look for in torch.cuda."""

import contextlib
import sys
import types

import torch

from . import _C

memory = torch.accelerator.memory


def index_of(device=None):
    """The index of a device, given as torch.cuda takes it."""
    if device is None:
        return _C.current_device()
    if isinstance(device, int):
        return device if device >= 0 else _C.current_device()
    device = torch.device(device)
    if device.type != "sim":
        raise ValueError(f"Expected a sim device, but got: {device}")
    return _C.current_device() if device.index is None else device.index


# ---- devices --------------------------------------------------------------------------------------------------------


def set_device(device):
    torch.accelerator.set_device_index(index_of(device))


class DeviceContext:
    """torch.sim.device(1), for `with`"""

    def __init__(self, device):
        self.index = index_of(device)

    def __enter__(self):
        self.before = _C.current_device()
        set_device(self.index)

    def __exit__(self, *_):
        set_device(self.before)


def get_device_properties(device=None):
    total = memory.get_memory_info(index_of(device))[1]
    return types.SimpleNamespace(name="simulated", total_memory=total, major=9, minor=0, multi_processor_count=1)


SYNC_DEBUG_MODES = ("default", "warn", "error")


def set_sync_debug_mode(mode):
    """What happens when an operation makes the host wait: nothing, a warning or an error, as in torch.cuda."""
    _C.set_sync_debug_mode(mode if isinstance(mode, int) else SYNC_DEBUG_MODES.index(mode))


# ---- streams and events ---------------------------------------------------------------------------------------------


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **kwargs):
        return torch.Stream(torch.device("sim", index_of(device)), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return torch.Event("sim", enable_timing=True)


@contextlib.contextmanager
def stream(stream):
    if stream is None:
        yield
        return
    with stream:
        yield stream


def default_stream(device=None):
    return torch.Stream(stream_id=0, device_index=index_of(device), device_type=20)  # 20 is PrivateUse1


# ---- random numbers -------------------------------------------------------------------------------------------------


def generator(device=None):
    return _C.default_generator(index_of(device))


def manual_seed(seed):
    generator().manual_seed(int(seed))


def manual_seed_all(seed):
    for i in range(_C.device_count()):
        generator(i).manual_seed(int(seed))


def get_rng_state(device="sim"):
    return generator(device).get_state()


def set_rng_state(state, device="sim"):
    generator(device).set_state(state.cpu())


def get_rng_state_all():
    return [get_rng_state(i) for i in range(_C.device_count())]


def set_rng_state_all(states):
    for i, state in enumerate(states):
        set_rng_state(state, i)


# ---- the module -----------------------------------------------------------------------------------------------------


def module():
    """torch.sim"""
    made = types.ModuleType("torch.sim", "The simulated accelerator, as torch.cuda is of GPUs.")
    own = (
        set_device,
        get_device_properties,
        set_sync_debug_mode,
        Stream,
        Event,
        stream,
        default_stream,
        generator,
        manual_seed,
    )
    own += (manual_seed_all, get_rng_state, set_rng_state, get_rng_state_all, set_rng_state_all)
    vars(made).update({function.__name__: function for function in own})
    of_memory = ("memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    of_memory += ("reset_peak_memory_stats", "reset_accumulated_memory_stats")
    for name in of_memory:
        setattr(made, name, lambda device=None, name=name: getattr(memory, name)(index_of(device)))
    vars(made).update(
        device=DeviceContext,
        current_device=_C.current_device,
        device_count=_C.device_count,
        is_available=lambda: _C.device_count() > 0,
        is_initialized=_C.is_used,
        init=_C.use,
        _lazy_init=_C.use,
        _is_in_bad_fork=lambda: False,  # what uses a device notices a fork
        get_device_name=lambda device=None: "simulated",
        get_device_capability=lambda device=None: (9, 0),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_bf16_supported=lambda *_, **__: True,
        can_device_access_peer=lambda a, b: True,
        set_stream=torch.accelerator.set_stream,
        current_stream=lambda device=None: torch.accelerator.current_stream(index_of(device)),
        synchronize=lambda device=None: torch.accelerator.synchronize(index_of(device)),
        seed_all=lambda: manual_seed_all(torch.seed()),
        initial_seed=lambda: generator().initial_seed(),
        empty_cache=lambda: None,
        ipc_collect=lambda: None,
        mem_get_info=lambda device=None: memory.get_memory_info(index_of(device)),
    )
    sys.modules["torch.sim"] = made
    return made
