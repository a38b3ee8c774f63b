"""The device "sim", as torch.sim, and its process group "simccl". `import torch` calls `autoload`: see ../README.md.

Without SIM_DEVICES nothing happens.
"""

import faulthandler
import importlib.metadata
import os
import sys

import torch


def autoload():
    """The entry point in the group torch.backends."""
    n = setting("SIM_DEVICES", 0, range(65))
    setting("SIM_MEMORY_MB", 16384, range(1, 2**25 // max(n, 1) + 1))
    if not n:
        return
    built_for = importlib.metadata.version("simgpu")
    if built_for != torch.__version__.partition("+")[0]:
        raise RuntimeError(f"simulated GPUs are built for torch {built_for}, not {torch.__version__}: run `make sim`")
    faulthandler.enable()  # a touch of a device's memory then shows the line of Python
    torch.utils.rename_privateuse1_backend("sim")
    import torch.distributed as torch_dist  # before _C, whose Group is a Backend of it

    from . import device

    torch._register_device_module("sim", device)
    sys.modules["torch.sim"] = device
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    from . import cuda_ops  # noqa: F401

    torch_dist.Backend.register_backend("simccl", _make_group, devices=["sim"])


def setting(name, default, allowed):
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or int(text) not in allowed:
        sys.exit(f"{name} is {text}: it must be an integer from {allowed[0]} to {allowed[-1]}")
    return int(text)


def _make_gloo(store, rank, size, timeout):
    store = torch.distributed.PrefixStore("gloo of simccl", store)
    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)


def _make_group(store, rank, size, timeout):
    from . import _C

    return _C.Group(_make_gloo(store, rank, size, timeout), rank, size, _make_gloo, timeout)
