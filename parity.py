"""Does a script train on N processes as on one? Run it on both, compare, and name the first thing that differs.

    python parity.py train.py                          # on 1 and on 2 processes, on GPUs or on the CPU
    python parity.py --nproc 4 --steps 10 train.py --epochs 1
    python parity.py train.py --batch-size 64/N        # 64, and 32 on two processes: the global batch must stay
    python parity.py train.py --snapshot-path run-N.pt # a lone N becomes the number of processes
    python parity.py --seed 0 -m package.train         # a module, and a seed for a script that sets none

    train.py: equal on 1 and 2 processes for 5 steps, up to 7.4e-16 (allowed: 1e-10), judged in float64
    other.py: on 2 processes in step 1 the global batch has 128 samples, and 64 on one process. It must be divided by
    the number of processes, once (the gradient of weight differs by 4.2e-01)

It works for every script that torchrun can start, also for one that uses nothing of this project. It needs only torch,
and it does not change the script: hooks look at the outermost module that is trained, at clipping and at the optimizer.
Numbers are float64 where the script allows it, and dropout is off, so what should be equal is equal up to about 1e-12.

Of each step these decide: the gradients, and how far the weights have moved since the start. They may differ by 1e-10
of their size in float64, and by 10 % in lower types. Ranks that hold one parameter under DDP must agree in each bit.
In lower types, where rounding hides much, the number of samples and the optimizer's settings decide too. `Comparison`
finds what differs, `evidence` says what decides, and `causes` yields the reasons in the order in which they are asked.
docs/parity.md says what it cannot see. The exit status is 0 if the runs are equal, 1 if they are not, and 2 if they
could not be compared.
"""

import argparse
import contextlib
import dataclasses
import functools
import inspect
import json
import math
import os
import pickle
import random
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

ALLOWED = 1e-10  # the largest relative difference in float64
ALLOWED_IN_LOW_TYPES = 0.1  # right scripts were up to 0.02 there, and wrong ones at least 0.67
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # SyncBatchNorm is none of these
DROPOUT = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # as they are named in modules
OWN_PROCESSES = "the script starts its own processes: start it so that torchrun could, one process for each rank"


# ---- in each process: hooks that record every step -----------------------------------------------------------------


@dataclasses.dataclass
class Step:
    """What a step of one rank begins with, and what it uses. Tensors are sketches, by name."""

    number: int
    weights: dict = dataclasses.field(default_factory=dict)
    inputs: dict = dataclasses.field(default_factory=dict)
    gradients: dict = dataclasses.field(default_factory=dict)
    clipped: dict = dataclasses.field(default_factory=dict)
    settings: list = dataclasses.field(default_factory=list)  # of each group of parameters
    norms: list = dataclasses.field(default_factory=list)  # names of BatchNorms that use the mean of the batch
    used: set = dataclasses.field(default_factory=set)  # names of the parameters of modules that were called
    replicated: set = dataclasses.field(default_factory=set)  # names of the parameters under DDP
    samplers: list = dataclasses.field(default_factory=list)  # classes of DataLoaders' samplers
    seed: int = 0
    is_alone: bool = False  # though several processes were started
    n_collectives: int = 0  # since the start of the process


class Recorder:
    """Writes each step into a file. After the last one the process stands still.

    A step ends when, after an optimizer has stepped, a module that is trained is called or that optimizer steps again.
    """

    def __init__(self, folder, steps, eval_norm, float32):
        rank = os.environ["RANK"]
        self.file = open(Path(folder, f"records {rank}"), "wb")  # noqa: SIM115 - open until the process ends
        self.done = Path(folder, f"done {rank}")
        self.n_started = int(os.environ["WORLD_SIZE"])
        self.steps = steps
        self.eval_norm = eval_norm
        self.float32 = float32
        self.roots = []  # the outermost modules that are trained, in the order of their first calls
        self.optimizers = []  # in the order of their first steps
        self.replicated = set()  # parameters under DDP
        self.samplers = []
        self.depth = 0  # of calls of modules, and of backward, which calls modules to recompute activations
        self.optimizing = 0  # optimizers that are stepping, one inside the other
        self.begin_step(0)

    def begin_step(self, number):
        self.stepped = []  # optimizers, in this step
        self.called = set()  # ids of modules, which must not live longer because of this
        self.step = Step(number)

    def install(self):
        nn.Module.__call__ = self.watched(nn.Module.__call__, self.before_module)
        # Activations that backward recomputes are no new step.
        torch.autograd.backward = self.watched(torch.autograd.backward, lambda args, kwargs: None)
        for name in CLIPPING:
            watched = self.watched(getattr(nn.utils, name), self.before_clipping)
            setattr(nn.utils, name, watched)
            setattr(nn.utils.clip_grad, name, watched)
        DataLoader.__iter__ = self.watched(DataLoader.__iter__, self.before_loading)
        DistributedDataParallel.__init__ = self.watched_ddp(DistributedDataParallel.__init__)
        register_optimizer_step_pre_hook(self.before_optimizer)
        register_optimizer_step_post_hook(self.after_optimizer)

    def watched(self, function, before):
        """The function, which first calls `before(args, kwargs)`. That may return other arguments."""

        @functools.wraps(function)
        def call(*args, **kwargs):
            args, kwargs = before(args, kwargs) or (args, kwargs)
            self.depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1

        return call

    def watched_ddp(self, init):
        @functools.wraps(init)
        def init_and_note(ddp, module, *args, **kwargs):
            self.make_float64(module)
            init(ddp, module, *args, **kwargs)
            if ddp.process_group.size() == torch.distributed.get_world_size():
                named = module.named_parameters()
                self.replicated |= {param for name, param in named if name not in ddp.parameters_to_ignore}

        return init_and_note

    def before_loading(self, args, kwargs):
        name = type(args[0].sampler).__name__
        if name not in self.samplers:
            self.samplers.append(name)

    def before_module(self, args, kwargs):
        module, *inputs = args
        self.called.add(id(module))
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
        is_random_depth = type(module).__name__.endswith(("DropPath", "StochasticDepth"))
        if is_random_depth or (self.eval_norm and isinstance(module, BATCH_NORM)):
            module.training = False
        is_trained = torch.is_grad_enabled() and any(param.requires_grad for param in module.parameters())
        if self.depth > 0 or not is_trained:
            return None
        if self.stepped:
            self.begin_step(self.step.number + 1)
            self.called.add(id(module))
        root = unwrapped(module)
        if root not in self.roots:
            if root is module:  # no wrapper of the script's own, which may hold parts of its parameters
                self.make_float64(root)
            self.roots.append(root)
        self.record("weights")
        for name, layer in root.named_modules():
            if isinstance(layer, BATCH_NORM) and layer.training:
                self.step.norms.append(without_wrappers(name))
        self.record_inputs(root, inputs, kwargs)
        if next(root.parameters()).dtype == torch.float64:
            return pytree.tree_map(as_float64, (args, kwargs))
        return None

    def make_float64(self, module):
        """Convert a model of float32, unless the script may hold parts of its parameters: see `is_untouched`."""
        tensors = [each for each in (*module.parameters(), *module.buffers()) if each.is_floating_point()]
        is_float = all(each.dtype in (torch.float32, torch.float64) for each in tensors)
        if is_float and not self.float32 and all(map(is_untouched, tensors)):
            module.double()

    def record_inputs(self, root, args, kwargs):
        inputs = inspect.signature(root.forward).bind(*args, **kwargs).arguments
        for path, value in pytree.tree_flatten_with_path(dict(inputs))[0]:
            name = re.sub(r"\W+", ".", pytree.keystr(path)).strip(".")  # as batch.labels for ['batch']['labels']
            name = self.prefix(root) + name
            rows, width = rows_of(value)
            before, _ = self.step.inputs.get(name, (rows[:0], width))
            self.step.inputs[name] = (torch.cat([before, rows]), width)

    def before_clipping(self, args, kwargs):
        self.record("gradients")

    def before_optimizer(self, optimizer, args, kwargs):
        self.optimizing += 1
        if self.optimizing > 1:
            return
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        if optimizer in self.stepped:  # no module was called since
            self.begin_step(self.step.number + 1)
        self.record("weights")
        has_closure = any(callable(each) for each in (*args[1:], *kwargs.values()))
        if not has_closure:
            self.record("gradients")
            self.record("clipped")
        for group in optimizer.param_groups:
            self.step.settings.append({key: repr(value) for key, value in group.items() if key != "params"})

    def after_optimizer(self, optimizer, args, kwargs):
        self.optimizing -= 1
        if self.optimizing == 0:
            self.record("gradients")  # those of a closure
            self.stepped.append(optimizer)
            self.write_step()  # once more after each further optimizer: the last one counts
            if self.step.number == self.steps:  # counted from 0: it begins with the result of the last one to compare
                self.stand_still()

    def write_step(self):
        step = self.step
        step.samplers = self.samplers
        step.seed = torch.initial_seed()
        n_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        step.is_alone = n_ranks < self.n_started
        step.n_collectives = count_collectives()
        called = [module for root in self.roots for module in root.modules() if id(module) in self.called]
        used = {param for module in called for param in module.parameters(recurse=False)}
        for name, param in self.named_params().items():
            if param in used:
                step.used.add(name)
            if param in self.replicated:
                step.replicated.add(name)
        pickle.dump(vars(step), self.file)  # the class itself is not importable while the script is __main__
        self.file.flush()

    def stand_still(self):
        """Until this process is killed, since other ranks may still need it."""
        sys.stdout.flush()
        self.done.touch()
        threading.Event().wait()

    def record(self, key):
        """Record the tensors that are not yet recorded in this step, but none whose memory the script has freed."""
        sketches = getattr(self.step, key)
        for name, param in self.named_params().items():
            tensor = param if key == "weights" else param.grad
            if tensor is not None and name not in sketches and has_memory(tensor):
                sketches[name] = sketch(tensor)

    def named_params(self):
        """By name, without what all names of a model begin with: another module may be the outermost on one process."""
        named = {}
        for root in self.roots:
            names = [without_wrappers(name) for name, _ in root.named_parameters()]
            while len({name.partition(".")[0] for name in names}) == 1 and all("." in name for name in names):
                names = [name.partition(".")[2] for name in names]
            named |= {self.prefix(root) + name: param for name, param in zip(names, root.parameters(), strict=True)}
        known = set(named.values())
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        others = [param for group in groups for param in group["params"] if param not in known]
        for number, param in enumerate(others, 1):
            named[f"parameter {number} of {len(others)} outside of the model"] = param
        return named

    def prefix(self, root):
        number = self.roots.index(root) + 1
        return f"model {number}." if number > 1 else ""


def unwrapped(module):
    """The module inside wrappers, as those of torch.compile and DDP, that have no parameters of their own."""
    for name in WRAPPERS * 2:
        inner = getattr(module, name, None)
        if isinstance(inner, nn.Module) and len(list(inner.parameters())) == len(list(module.parameters())):
            module = inner
    return module


def without_wrappers(name):
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def as_float64(value):
    return value.double() if torch.is_tensor(value) and value.dtype == torch.float32 else value


def is_untouched(tensor):
    """Is it no shard, no view of a larger memory, and without hooks and a gradient or buffer in an attribute?"""
    if hasattr(tensor, "full_tensor") or tensor.untyped_storage().nbytes() != tensor.nbytes:
        return False
    has_hooks = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
    return not has_hooks and not any(map(torch.is_tensor, vars(tensor).values()))


def has_memory(tensor):
    is_whole = hasattr(tensor, "full_tensor") or tensor.layout != torch.strided
    return is_whole or tensor.untyped_storage().nbytes() >= tensor.nbytes


def count_collectives():
    """The collectives of this process, in all its groups. NaN, which equals no number, if a backend does not count."""
    count = 0
    for group in list(torch.distributed.distributed_c10d._world.pg_map):
        for device in group._device_types:
            try:
                count += group._get_backend(device)._get_sequence_number_for_group()
            except RuntimeError:
                return math.nan
    return count


@functools.lru_cache(maxsize=64)
def random_weights(n):
    """The first n numbers of one sequence, each between 0.5 and 1, of either sign."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(n, generator=generator, dtype=torch.float64, device="cpu") - 0.5
    return numbers + 0.5 * numbers.sign()


def sketch(tensor):
    """Shape, type, square and 64 sums of a tensor with random signs, whose distance is about that of two tensors.

    All ranks that hold a part of a DTensor must call it.
    """
    tensor = tensor.detach()
    is_dtensor = hasattr(tensor, "full_tensor")
    if is_dtensor:
        tensor = tensor.full_tensor()
    flat = tensor.cpu().to_dense().double().flatten()
    products = nn.functional.pad(flat * random_weights(len(flat)), (0, -len(flat) % 64))
    sums = products.view(-1, 64).sum(dim=0)
    square = flat.dot(flat).item()
    return SimpleNamespace(
        shape=tuple(tensor.shape), dtype=tensor.dtype, sums=sums, square=square, is_dtensor=is_dtensor
    )


def rows_of(value):
    """Three numbers for each row of an argument, and the length of a row.

    They are a weighted sum of the row, the same without the last number and its repetitions, which may be padding, and
    the last number. None has no rows, nor has what is no tensor.
    """
    is_tensor = torch.is_tensor(value) and value.layout == torch.strided and not hasattr(value, "full_tensor")
    if not is_tensor or value.numel() == 0:
        return torch.zeros(0, 3, dtype=torch.float64), 0
    rows = value.detach().cpu().double()
    rows = rows.reshape(len(rows), -1) if rows.dim() else rows.view(1, 1)
    weights = random_weights(rows.shape[1])
    is_last = (rows == rows[:, -1:]).flip(1).cumprod(1).flip(1).bool()
    return torch.stack([rows @ weights, rows.masked_fill(is_last, 0) @ weights, rows[:, -1]], dim=1), rows.shape[1]


# ---- in each process: prepare it, and run the script ---------------------------------------------------------------


def switch_off_dropout():
    functional = nn.functional
    for name in DROPOUT:
        setattr(functional, name, lambda input, *args, **kwargs: input)
    attention = functional.scaled_dot_product_attention

    def without_dropout(query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
        return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    functional.scaled_dot_product_attention = without_dropout


def allow_fullgraph():
    """torch.compile is off, by TORCH_COMPILE_DISABLE, with which it refuses `fullgraph`."""
    compile = torch.compile
    torch.compile = lambda *args, fullgraph=False, **kwargs: compile(*args, **kwargs)


def look_at_process_group():
    """Let watch.py, if it is beside this file, begin when the script makes its process group."""
    pid = os.getpid()
    init_process_group = torch.distributed.init_process_group
    watch = None
    if Path(__file__).with_name("watch.py").exists():
        import watch

    def init_and_watch(*args, **kwargs):
        if os.getpid() != pid:
            sys.exit(OWN_PROCESSES)
        init_process_group(*args, **kwargs)
        if watch:
            watch.start()

    def run_here(function, args=(), nprocs=1, *_, **__):
        """Instead of torch.multiprocessing.spawn."""
        if nprocs != int(os.environ["WORLD_SIZE"]):
            sys.exit(OWN_PROCESSES)
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # the script has chosen a port of its own
        function(int(os.environ["RANK"]), *args)

    torch.distributed.init_process_group = init_and_watch
    torch.multiprocessing.spawn = torch.multiprocessing.start_processes = run_here


def set_seeds(seed):
    """Those of a script that sets none differ between ranks. So do these."""
    torch.manual_seed(seed)
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed)


def end_with_parent(parent):
    """End this rank and all that it has started, if parity.py is killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def run_rank(seed, is_module, **settings):
    """Run the script that sys.argv names, in this process."""
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    if not settings["float32"]:
        torch.set_default_dtype(torch.float64)
        torch.Tensor.float = torch.Tensor.double  # or logits.float() would round them
    switch_off_dropout()
    allow_fullgraph()
    look_at_process_group()
    Recorder(**settings).install()
    if seed is not None:
        set_seeds(seed + int(os.environ["RANK"]))
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


# ---- compare the steps: `expected` is one process's, `got` are those of all ranks ----------------------------------


def common(expected, tensors):
    """The names of tensors that both have in one shape."""
    return [name for name, each in expected.items() if name in tensors and tensors[name].shape == each.shape]


def distances(expected, ranks, each=False):
    """Yield (name, rank, distance) of each tensor that a rank has in the expected shape, the farthest first.

    A distance is relative to the size of the tensor and a tenth of all tensors, as small ones may be nothing but
    rounding. In low types it is relative to all, or to the tensor and a thousandth of all if `each` is asked.
    """
    for rank, tensors in enumerate(ranks):
        names = common(expected, tensors)
        far = {name: (tensors[name].sums - expected[name].sums).norm().item() for name in names}
        size = {name: expected[name].sums.norm().item() + 1e-300 for name in names}
        size_of_all = math.hypot(*size.values())
        for name in sorted(names, key=far.get, reverse=True):
            scale = size[name] + 0.1 * size_of_all
            if is_low(name, expected, tensors):
                scale = size[name] + 1e-3 * size_of_all if each else size_of_all
            yield name, rank, far[name] / scale


def is_low(name, *tensors):
    return any(each[name].dtype != torch.float64 for each in tensors if name in each)


def allowed(name, *tensors):
    return ALLOWED_IN_LOW_TYPES if is_low(name, *tensors) else ALLOWED


def nearest(expected, ranks):
    """By name, the distance of the nearest rank, and for tensors of low types the distance of all of them together.

    One rank that has a gradient is enough: scripts that split the optimizer reduce each gradient to its owner only.
    """
    found = {}
    for name, _, distance in distances(expected, ranks):
        found[name] = min(distance, found.get(name, math.inf))
    low = [name for name in found if is_low(name, expected, *ranks)]
    return found | dict.fromkeys(low, math.hypot(*[found[name] for name in low]))


def apart(step, key):
    """Yield (name, rank, distance) of tensors that a rank holds otherwise than the first rank that holds them.

    A tensor of another shape or name than on one process is a part that the script has cut, so ranks hold other parts.
    """
    whole, *ranks = [getattr(each, key) for each in step]
    first = {}
    for tensors in reversed(ranks):
        first |= {name: tensors[name] for name in common(whole, tensors)}
    for name, rank, distance in distances(first, ranks, each=True):
        limit = 0 if name in step[1 + rank].replicated else allowed(name, first)
        if not distance <= limit:
            yield name, rank, distance


def with_sums(sketch, sums):
    return SimpleNamespace(**vars(sketch) | {"sums": sums})


def changes(start, later):
    """How far the weights have moved, as sketches."""
    before, now = start.weights, later.weights
    return {name: with_sums(now[name], now[name].sums - before[name].sums) for name in common(before, now)}


class Comparison:
    """What differs in one step. Steps are (Step of one process, Step of rank 0, Step of rank 1, …)."""

    def __init__(self, start, step, later):
        self.expected, *self.got = step
        self.tensors = {key: [getattr(each, key) for each in step] for key in ("gradients", "clipped")}
        self.tensors["changes"] = list(map(changes, start, later))
        self.distances = {key: nearest(whole, ranks) for key, (whole, *ranks) in self.tensors.items()}
        whole, *ranks = self.tensors["gradients"]
        self.owned = {
            name for name, _, far in distances(whole, ranks, each=True) if far <= allowed(name, whole, *ranks)
        }
        self.drifted = list(apart(later, "weights"))
        self.unaveraged = list(apart(step, "gradients"))
        self.are_low = any(is_low(name, each.weights) for each in step for name in each.weights)
        # Gradients may differ between ranks where the weights move on all alike: then the optimizer averages them, or
        # the owner of a parameter sends it to the others.
        self.moved = {
            name for each in self.tensors["changes"][1:] for name, change in each.items() if change.sums.any()
        }
        self.averaged_later = self.moved - {name for name, _, _ in self.drifted}

    def wrong(self, key, share=1.0):
        """The names of tensors of which no rank is near enough to one process: within a share of what is allowed."""
        limits = {name: share * allowed(name, *self.tensors[key]) for name in self.distances[key]}
        return [name for name, distance in self.distances[key].items() if not distance <= limits[name]]

    def largest(self):
        """The largest distance of what is not wrong."""
        right = {key: self.distances[key].keys() - self.wrong(key) for key in self.distances}
        return max((self.distances[key][name] for key in right for name in right[key]), default=0.0)


def evidence(found):
    """Yield in words what decides that a step is not equal."""
    for name, rank, _ in found.drifted:
        yield f"it ends with another {name} on rank {rank} than on other ranks"
    differing = {name for name, _, _ in found.unaveraged}
    for name, rank, distance in found.unaveraged:
        is_owned = name in found.owned and name not in found.got[rank].replicated
        if not is_owned and name not in found.averaged_later:
            yield f"the gradient of {name} differs by {distance:.1e} between ranks"
    # Another number of groups may be right: scripts that split the optimizer have other groups.
    settings = [line for line in other_settings(found.expected, found.got) if line.startswith("the optimizer's ")]
    changed = found.wrong("changes")
    has_other_rate = any(" lr is " in line for line in settings)  # which may make up for a gradient times N
    is_made_up_for = has_other_rate and found.averaged_later and not changed
    for key in ("gradients", "clipped"):
        for name in found.wrong(key):
            if not is_made_up_for and not (name in differing and name in found.averaged_later):
                yield f"the gradient of {name} differs by {found.distances[key][name]:.1e}"
    for name in changed:
        yield f"{name} has moved otherwise since the start, by {found.distances['changes'][name]:.1e}"
    numbers = [line for line in other_samples(found.expected, found.got) if N_SAMPLES in line]
    if found.are_low and (numbers or (settings and not found.wrong("gradients"))):
        yield "rounding may hide what it does"


def compare(one, ranks, have_ended=True):
    """Compare the steps of one process with those of each rank, and their number if all `have_ended`.

    Returns a line about the first difference, or None; the number of equal steps, or 0 if nothing that is trained could
    be compared; and the largest difference.
    """
    steps = list(zip(one, *ranks, strict=False))
    start, end = steps[0], steps[-1]
    for line in (*without_training(one[: len(steps)]), *other_start(*start)):
        return line, 0, 0.0
    largest = 0.0
    is_compared = False
    excused = set()
    for number, step in enumerate(steps):
        found = Comparison(start, step, steps[min(number + 1, len(steps) - 1)])
        if step is end:  # its result is not known: only what was averaged later in the step before may be so again
            found.averaged_later &= excused
        excused = found.averaged_later.intersection(name for name, _, _ in found.unaveraged)
        for words in evidence(found):
            return f"in step {number + 1} {next(causes(found))} ({words})", number, largest
        largest = max(largest, found.largest())
        is_compared |= bool(found.distances["gradients"] or found.moved & found.distances["changes"].keys())
    counts = list(map(len, ranks))
    if have_ended and set(counts) != {len(one)}:
        return f"the ranks take {listed(counts)} steps, and one process takes {len(one)}", len(steps) - 1, largest
    n_collectives = [now.n_collectives - before.n_collectives for before, now in zip(start[1:], end[1:], strict=True)]
    if len(steps) > 1 and 0 in n_collectives:
        return f"a rank communicates with no other rank: {ALONE}", 0, largest
    return None, is_compared * max(len(steps) - 1, 1), largest


def listed(values):
    return " and ".join(", ".join(map(str, values)).rsplit(", ", 1))


# ---- name the cause ------------------------------------------------------------------------------------------------

ALONE = "each of them trains alone"
N_SAMPLES = "samples, and"
SEEDS = "is the same seed set before the model is built, and are weights loaded before it is wrapped, or on all ranks?"
DRAWN_AS_SHARDS = (
    "they are sharded (DTensor): are they drawn after sharding? Draw or load them before. On the CPU all ranks draw "
    "the same numbers for their shards"
)
STALE = "the optimizer was built before the model was sharded, and holds parameters that nobody uses"
SUM = "it is summed over the ranks, and not averaged"
DIVIDED = "it is averaged, but the loss is a sum over the samples, or has been divided by the number of processes"
OTHER_GRADIENT = (
    "are the labels, are random numbers drawn in the model, is it a mean over shares of unequal weight, "
    "or does the loss compare samples with each other?"
)


def without_training(one):
    """Yield why the steps of one process show nothing."""
    for name in not_finite(*one):
        yield f"nothing can be compared: the gradient of {name} is NaN or infinite on one process too"
    has_changed = any(each.sums.any() for each in changes(one[0], one[-1]).values())
    are_low = any(is_low(name, one[0].weights) for name in one[0].weights)  # then rounding may undo small changes
    if not any(each.sums.any() for each in one[0].gradients.values()):
        reason = "all gradients are 0" if one[0].gradients else STALE
        yield f"nothing is trained, on one process too: {reason}"
    elif len(one) > 1 and not (has_changed or are_low):
        yield f"nothing is trained, on one process too: the rate is 0, or {STALE}"


def not_finite(*steps):
    return [name for step in steps for name, each in step.gradients.items() if not each.sums.isfinite().all()]


def other_start(expected, *got):
    """Yield why the first step begins otherwise."""
    if any(each.is_alone for each in got):
        yield f"no process group is made: {ALONE}"
    begins = "the first step begins with other weights"
    for name, rank, _ in apart((expected, *got), "weights"):
        yield f"{begins} on rank {rank} than on other ranks ({name}): {SEEDS}"
    for name, rank, distance in distances(expected.weights, [each.weights for each in got], each=True):
        if not distance <= allowed(name, expected.weights, got[rank].weights):
            advice = (
                DRAWN_AS_SHARDS if got[rank].weights[name].is_dtensor else f"{SEEDS} If the script sets none: --seed 0"
            )
            yield f"{begins} than on one process ({name} differs by {distance:.1e}): {advice}"
    cut_otherwise = []
    for name, whole in expected.weights.items():
        parts = [each.weights[name] for each in got if name in each.weights]
        is_cut = len(parts) > 1 and sum(math.prod(part.shape) for part in parts) == math.prod(whole.shape)
        if is_cut and not abs(sum(part.square for part in parts) - whole.square) <= 1e-6 * whole.square:
            are_copies = all(part.square == parts[0].square for part in parts)
            cut_otherwise.append((not are_copies, name))
    for are_different, name in sorted(cut_otherwise):
        how = "is cut" if are_different else "is cut, and of which all ranks hold the same part"
        yield f"{begins} than on one process ({name}, which {how}): is it drawn whole, and then cut?"


def causes(found):
    """Yield the likely reasons why a step is not equal, the likeliest first."""
    expected, got = found.expected, found.got
    wrong = found.wrong("gradients", share=0.2)
    for rank, each in enumerate(got):
        for name in not_finite(each):
            yield f"the gradient of {name} is NaN or infinite on rank {rank}"
    partly_used = set.union(*[each.used for each in got]) - set.intersection(*[each.used for each in got])
    suspects = (
        [name for name in wrong if name not in found.owned]
        or [name for name, _, _ in found.drifted]
        or found.wrong("changes")
    )
    if suspects and partly_used.issuperset(suspects):
        yield f"there is a parameter that only some ranks use ({suspects[0]}), and others have no gradient to average"
    if found.drifted:
        yield from unaveraged(found)
    for line in other_samples(expected, got):
        if wrong or N_SAMPLES in line:
            yield line
    if wrong:
        yield from factor(found, wrong)
        yield from unaveraged(found)
        for name in expected.norms:
            line = f"the samples are the same, but BatchNorm ({name}) uses the mean of each rank's alone"
            yield f"{line}. To judge the rest of the script: --eval-norm"
        yield f"the samples are the same, and the gradient of {wrong[0]} is not: {OTHER_GRADIENT}"
    for name in found.wrong("clipped"):
        yield f"the gradient of {name} is the same before clipping, but not after: clip once in a step, at its end"
    yield from other_settings(expected, got)
    if len(got[0].weights) > len(expected.weights):
        yield f"rank 0 has parameters outside of the model: {STALE}"
    yield from unaveraged(found)
    yield "samples, gradients and settings are the same: is the optimizer's state, and what follows its step?"


def unaveraged(found):
    """Yield why gradients differ between ranks."""
    for _, rank, _ in found.unaveraged:
        names = [name for name, each, _ in found.unaveraged if each == rank]
        line = f"rank {rank} has another gradient of {names[0]} than other ranks"
        if len(names) < len(found.got[rank].gradients):
            yield f"{line}: is it outside of the wrapped model, or was it unfrozen after wrapping?"
        if not list(apart((found.expected, *found.got), "clipped")):
            yield f"{line} when they are clipped: average them first"
        yield f"{line}. Nothing averages them: is the plain model trained, or is the last backward inside of no_sync()?"


def arguments(expected, got):
    """Yield (name, rows, width, rows of each rank, their widths) of each argument, by place if no name is common."""
    named = [each.inputs for each in (expected, *got)]
    if not named[0].keys() & named[1].keys():
        named = [{f"number {place}": each for place, each in enumerate(inputs.values(), 1)} for inputs in named]
    for name, (rows, width) in named[0].items():
        of_ranks = [inputs.get(name, (rows[:0], width)) for inputs in named[1:]]
        yield name, rows, width, [part for part, _ in of_ranks], {each for _, each in of_ranks}


def other_samples(expected, got):
    """Yield how the global batch differs. The rows of an argument may be in any order."""
    equal = []
    for name, rows, width, parts, widths in arguments(expected, got):
        together = torch.cat(parts)
        are_pieces = widths != {width} and len(together) * min(widths) == len(rows) * width
        if is_same(together, rows) or all(is_same(part, rows) for part in parts):
            equal.append(name)
        elif not len(rows) or not all(map(len, parts)):
            yield f"the argument {name} is None, or missing, on one process or on some ranks only"
        elif are_pieces:  # of a sequence, which cannot be compared
            return
        elif len(parts) > 1 and all(is_same(part, parts[0]) for part in parts):
            yield f"all ranks have the same samples ({name}): is there a sampler that gives each rank its share?"
        elif len(together) != len(rows):
            advice = "It must be divided by the number of processes, once"
            if 0 < len(together) - len(rows) < len(parts):
                advice = "The sampler repeats some to make shares equal: drop the last batch, or weight it"
            yield f"the global batch has {len(together)} {N_SAMPLES} {len(rows)} on one process. {advice}"
        elif equal:
            advice = "if it is drawn at random, draw it for the global batch, and give each rank its share"
            yield f"the argument {equal[0]} is the same, but {name} is not: {advice}"
        else:
            yield f"the global batch has other samples ({name}): {how_drawn(expected, got)}"


def how_drawn(expected, got):
    """Why samples may be other ones, from what is known of random draws."""
    reasons = []
    samplers, samplers_of_one = listed(got[0].samplers), listed(expected.samplers)
    if samplers != samplers_of_one:
        reasons.append(f"their order is drawn by {samplers}, and by {samplers_of_one} on one process")
    if len({each.seed for each in got}) > 1:
        reasons.append("each rank has a seed of its own (torch.initial_seed())")
    elif got[0].seed != expected.seed:
        reasons.append("the seed is another one than on one process: set it, or use --seed")
    generic = "are the data and their order the same on all ranks, and is nothing drawn at random, as augmentation is?"
    return ". And ".join(reasons) or generic


def is_same(rows, others):
    """Are they the same samples, in any order? Numbers that are repeated at the ends of rows may be padding."""
    if len(rows) != len(others) or not len(rows):
        return len(rows) == len(others)
    last, counts = torch.cat([rows, others])[:, 2].unique(return_counts=True)
    frequent = last[counts.argsort(descending=True)][:4]
    for padding in (math.nan, *frequent.tolist()):
        sums, expected = [torch.where(each[:, 2] == padding, each[:, 1], each[:, 0]) for each in (rows, others)]
        if torch.allclose(sums.sort()[0], expected.sort()[0], rtol=1e-6, atol=1e-6 * expected.abs().max().item()):
            return True
    return False


def factor(found, wrong):
    """Yield that gradients are N or 1/N times those of one process."""
    whole, *ranks = found.tensors["gradients"]
    n = len(ranks)
    added = SUM
    for name, rows, _, parts, _ in arguments(found.expected, found.got):
        if all(is_same(part, rows) for part in parts):
            added = f"{SUM}, or all ranks have the same samples ({name}), and the loss is a sum"
    for number, words, advice in ((n, f"{n}", added), (1 / n, f"1/{n}", DIVIDED)):
        times = {name: with_sums(whole[name], number * whole[name].sums) for name in wrong}
        far = [(name, each) for rank in ranks for name, each in nearest(times, [rank]).items()]
        if all(each <= allowed(name, times, *ranks) for name, each in far):
            yield f"the gradient of {wrong[0]} is {words} times that of one process: {advice}"


def other_settings(expected, got):
    """Yield another learning rate, for example."""
    for rank, each in enumerate(got):
        if len(each.settings) != len(expected.settings):
            yield f"rank {rank} has another number of optimizers, or of groups of parameters, than one process"
            continue
        for settings, expected_settings in zip(each.settings, expected.settings, strict=True):
            for key, value in expected_settings.items():
                if settings.get(key) != value:
                    yield f"the optimizer's {key} is {settings.get(key)} on rank {rank}, and {value} on one process"


# ---- start the processes -------------------------------------------------------------------------------------------


def run(args, nproc):
    """Returns each rank's steps, and in one line what went wrong, or None."""
    print(f"running on {nproc} {'process' if nproc == 1 else 'processes'}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        settings = {"folder": folder, "steps": args.steps, "float32": args.float32, "eval_norm": args.eval_norm}
        settings |= {"seed": args.seed, "is_module": args.is_module}
        command = [sys.executable, __file__, IN_RANK, json.dumps(settings), args.script]
        command += [for_processes(arg, nproc) for arg in args.args]
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        job |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc), "TORCHELASTIC_RUN_ID": "parity"}
        job |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCH_COMPILE_DISABLE": "1"}  # as torchrun does
        job |= {"TMPDIR": folder}  # the script's temporary files end with ours
        environment = {"OMP_NUM_THREADS": "1", "WATCH_SECONDS": "20"} | os.environ | job
        logs = [Path(folder, f"printed {rank}") for rank in range(nproc)]
        processes = []
        try:
            for rank, log in enumerate(logs):
                processes.append(start(command, environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, log))
            failure = wait(processes, logs, args.timeout)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        ranks = [read_steps(Path(folder, f"records {rank}")) for rank in range(nproc)]
        if failure:
            failure += f". Steps of each rank: {listed(map(len, ranks))}"
            if re.search("dtype|Float|Double|data size", failure) and not args.float32:
                failure += ". If it runs without parity.py, try --float32"
        elif not all(ranks):
            rank = ranks.index([])
            failure = f"takes no step of an optimizer of torch.optim on rank {rank}"
            failure += f", which says last: {last_line(logs[rank]) or 'nothing'}"
    return ranks, failure


def for_processes(arg, nproc):
    arg = re.sub(r"\b(\d+)/N\b", lambda found: str(int(found[1]) // nproc), arg)
    return re.sub(r"(?<!^-)\bN\b", str(nproc), arg)  # -N is an option of the script


def start(command, environment, log):
    """Start one rank, in a group with all processes that it will start. What it prints goes to the file `log`."""
    files = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with open(log, "w") as file:
        return subprocess.Popen(command, env=environment, stdout=file, start_new_session=True, **files)


def wait(processes, logs, timeout):
    """Wait until each rank has ended, or stands still after its last step. Returns what went wrong, or None."""
    begin = time.monotonic()
    while time.monotonic() < begin + timeout:
        statuses = [process.poll() for process in processes]
        if any(statuses):
            # The one that has failed first is silent for longest.
            rank = min(
                (rank for rank, status in enumerate(statuses) if status), key=lambda rank: logs[rank].stat().st_mtime
            )
            print(*logs[rank].read_text(errors="replace").splitlines()[-20:], sep="\n", file=sys.stderr)
            return f"fails on rank {rank}: {last_line(logs[rank]) or f'exit status {statuses[rank]}'}"
        done = [log.with_name(log.name.replace("printed", "done")).exists() for log in logs]
        if all(is_done or status == 0 for is_done, status in zip(done, statuses, strict=True)):
            return None
        if any(done):
            timeout = min(timeout, 2 * (time.monotonic() - begin) + 10)  # for the others: they may never come
        told = re.findall("no progress for .*", "".join(log.read_text(errors="replace") for log in logs))
        for line in told:
            if "computing, or ended" not in line:
                return f"stands still: {line}"
        time.sleep(0.05)
    return f"stands still: it has not ended after {timeout:.0f} s"


def last_line(log):
    """The error behind the last traceback, where frames are indented, or the last line."""
    lines = [
        re.sub(r"^\[rank\d+\]: ?|^ *what\(\): *", "", line) for line in log.read_text(errors="replace").splitlines()
    ]
    lines = [line for line in lines if line.strip()]
    tracebacks = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    errors = [line for line in lines[tracebacks[-1] + 1 :] if not line.startswith(" ")] if tracebacks else lines[-1:]
    return "".join(errors[:1])


def read_steps(path):
    """Of each step the last record. A process may have been killed while it wrote."""
    steps = {}
    with contextlib.suppress(FileNotFoundError, EOFError, pickle.UnpicklingError), open(path, "rb") as file:
        while True:
            step = Step(**pickle.load(file))
            steps[step.number] = step
    return list(steps.values())


# ---- report --------------------------------------------------------------------------------------------------------

IN_RANK = "--in-a-rank"


def report(args, reference, ranks, failure):
    """Compare the ranks with one process, or each with its rank of the reference. Returns the exit status."""
    name = f"{Path(args.script).name}:"
    words = "one process" if args.reference == 1 else f"{args.reference} processes"
    line, types, left_out = None, set(), []
    n_steps, largest = math.inf, 0.0
    for number, one in enumerate(reference):
        got = ranks[number :: args.reference]
        if not all(got):
            break
        line, n_equal, farthest = compare(one, got, have_ended=not failure)
        n_steps = min(n_steps, n_equal)
        largest = max(largest, farthest)
        begin, *begins = [steps[0].weights for steps in (one, *got)]
        compared = {name for each in begins for name in common(begin, each)}
        types |= {tensors[each].dtype for tensors in (begin, *begins) for each in compared if each in tensors}
        left_out += [each for each in begin if each not in compared]
        if line:
            break
    if line and args.reference > 1:
        line += f". Ranks {listed(range(number, args.nproc, args.reference))} are compared with rank {number}"
    if line:
        print(f"{name} on {args.nproc} processes {line.replace('one process', words)}")
    elif not failure and not n_steps:
        failure = "holds no weight that is trained under the same name and as a whole (as under FSDP1)"
    if failure:
        print(f"{name} on {args.nproc} processes it {failure}")
        return 2
    if left_out:
        print(f"{name} not compared: {len(left_out)} tensors that the script cuts or names anew, as {left_out[0]}")
    if line:
        return 1
    bound = ALLOWED if types == {torch.float64} else ALLOWED_IN_LOW_TYPES
    words = listed(sorted(str(each).removeprefix("torch.") for each in types))
    judged = f"up to {largest:.1e} (allowed: {bound:g}), judged in {words}"
    print(f"{name} equal on {args.reference} and {args.nproc} processes for {n_steps} steps, {judged}")
    return 0


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], usage="%(prog)s [options] SCRIPT.py ...")
    add = parser.add_argument
    add("--nproc", type=int, default=2, help="number of processes to compare with one")
    add("--reference", type=int, default=1, help="number of processes to compare with, instead of one")
    add("--steps", type=int, default=5, help="optimizer steps to compare")
    add("--timeout", type=float, default=300, help="seconds that a run may take")
    add("--seed", type=int, nargs="?", const=0, help="seed of rank 0, for scripts that set none. Rank 1 gets one more")
    add("--float32", action="store_true", help="leave torch's default type, and weights of float32, as they are")
    add("--eval-norm", action="store_true", help="let BatchNorm use its running statistics")
    script = next((number for number, arg in enumerate(argv) if arg == "-m" or arg.endswith(".py")), len(argv))
    args = parser.parse_args(argv[:script])
    args.is_module = argv[script : script + 1] == ["-m"]
    args.script, *args.args = argv[script + args.is_module :] or [""]
    if not args.is_module and not Path(args.script).is_file():
        parser.error(f"there is no script {args.script!r}: name a file that ends in .py, before its arguments")
    if args.is_module and not args.script:
        parser.error("-m needs the name of a module")
    if args.reference < 1 or args.nproc <= args.reference or args.nproc % args.reference:
        parser.error(f"argument --nproc: {args.nproc} must be a multiple of {args.reference}, and more")
    if args.steps < 1:
        parser.error(f"argument --steps: {args.steps} must be at least 1")
    for number in re.findall(r"\b(\d+)/N\b", " ".join(args.args)):
        if int(number) % args.nproc:
            parser.error(f"{number}/N: {number} is not a multiple of {args.nproc}, the number of processes")
    return args


def main(argv):
    args = parse_args(argv)
    reference, failure = run(args, args.reference)
    if failure:
        words = "one process" if args.reference == 1 else f"{args.reference} processes"
        print(f"{Path(args.script).name}: on {words} it {failure}")
        return 2
    return report(args, reference, *run(args, args.nproc))


if __name__ == "__main__":
    if sys.argv[1:2] == [IN_RANK]:
        settings = json.loads(sys.argv[2])
        del sys.argv[:3]
        run_rank(**settings)
    else:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)  # as Ctrl-C: all that was started is ended
        try:
            sys.exit(main(sys.argv[1:]))
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
