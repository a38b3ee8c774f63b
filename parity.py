"""Does a script train on N processes as on one? Run it on both, compare, and name the first thing that differs.

    python parity.py train.py                          # on 1 and on 2 processes, on GPUs or on the CPU
    python parity.py --nproc 4 --steps 10 train.py --epochs 1
    python parity.py train.py --batch-size 64/N        # 64, and 32 on two processes: the global batch must stay
    python parity.py train.py --snapshot-path run-N.pt # a lone N becomes the number of processes
    python parity.py --seed 0 -m package.train         # a module, and a seed for a script that sets none

    train.py: equal on 1 and 2 processes for 5 steps, up to 7.4e-16 (allowed: 1e-10), judged in float64
    other.py: on 2 processes in step 1 the global batch has 128 samples, and 64 on one process. It must be divided by
    the number of processes, once, and no sample may be repeated (the gradient of weight differs by 4.2e-01)

It works for every script that torchrun can start, also for one that uses nothing of this project. It needs only torch,
and it does not change the script: hooks look at the outermost module that is trained, at clipping and at the optimizer.
Numbers are float64 where the script allows it, and dropout is off, so what should be equal is equal up to about 1e-12.

Of each step these decide: the gradients, and how far the weights have moved since the start. They may differ by 1e-10
of their size in float64, and by 10 % in lower types. Ranks that hold one parameter must agree: in each bit under DDP,
and otherwise up to 1e-10, or 1 % in lower types. There, where rounding hides much, the number of samples and the
optimizer's settings decide too. docs/parity.md says what it cannot see. The exit status is 0 if the runs are equal, 1
if they are not, and 2 if they could not be compared.

`Recorder` writes the steps of each rank into a file. `differences` goes through the steps of all processes. For each
step `Comparison` measures what differs, `evidence` says what decides, and `causes` yields the reasons in the order in
which they are asked.
"""

import argparse
import contextlib
import dataclasses
import functools
import inspect
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
ALLOWED_IN_LOW_TYPES = 0.1  # of all tensors together: right scripts were up to 0.03, and wrong ones at least 0.67
ALLOWED_BETWEEN_RANKS = 0.01  # of each tensor, in low types
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # SyncBatchNorm is none of these
DROPOUT = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # as they are named in modules
OWN_PROCESSES = "the script starts its own processes: start it so that torchrun could, one process for each rank"
IN_RANK = "--in-a-rank"


# ---- in each process: hooks that record every step -----------------------------------------------------------------


@dataclasses.dataclass
class Step:
    """What a step of one rank begins with, and what it uses. Tensors are sketches, by name."""

    number: int
    weights: dict = dataclasses.field(default_factory=dict)
    inputs: dict = dataclasses.field(default_factory=dict)  # (rows_of each call, width of a row), by name
    gradients: dict = dataclasses.field(default_factory=dict)
    clipped: dict = dataclasses.field(default_factory=dict)
    types: set = dataclasses.field(default_factory=set)  # of weights and gradients
    settings: list = dataclasses.field(default_factory=list)  # of each group of parameters
    norms: list = dataclasses.field(default_factory=list)  # names of BatchNorms that use the mean of the batch
    replicated: set = dataclasses.field(default_factory=set)  # names of the parameters under DDP
    draws: dict = dataclasses.field(default_factory=dict)  # what decides the order of samples, in words
    is_alone: bool = False  # though several processes were started
    n_collectives: int = 0  # since the start of the process


class Recorder:
    """Writes each step into a file. After the last one the process stands still.

    A step ends when, after an optimizer has stepped, a module that is trained is called or that optimizer steps again.
    """

    def __init__(self, folder, args):
        rank = os.environ["RANK"]
        self.file = open(Path(folder, f"records {rank}"), "wb")  # noqa: SIM115 - open until the process ends
        self.done = Path(folder, f"done {rank}")
        self.args = args
        self.roots = []  # the outermost modules that are trained, in the order of their first calls
        self.optimizers = []  # in the order of their first steps
        self.stepped = []  # optimizers, in this step
        self.replicated = set()  # parameters under DDP
        self.samplers = {}  # names of classes, in the order of their first use
        self.depth = 0  # of calls of modules, and of backward, which calls modules to recompute activations
        self.optimizing = 0  # optimizers that are stepping, one inside the other
        self.step = Step(0)

    def install(self):
        nn.Module.__call__ = self.watched(nn.Module.__call__, self.before_module)
        # Activations that backward recomputes are no new step.
        torch.autograd.backward = self.watched(torch.autograd.backward, lambda args, kwargs: None)
        for name in CLIPPING:
            watched = self.watched(getattr(nn.utils, name), lambda args, kwargs: self.record("gradients"))
            setattr(nn.utils, name, watched)
            setattr(nn.utils.clip_grad, name, watched)
        DataLoader.__iter__ = self.watched(DataLoader.__iter__, self.before_loading)
        DistributedDataParallel.__init__ = self.watched(DistributedDataParallel.__init__, self.before_ddp)
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

    def before_loading(self, args, kwargs):
        self.samplers[type(args[0].sampler).__name__] = None

    def before_ddp(self, args, kwargs):
        module = args[1] if len(args) > 1 else kwargs["module"]
        self.make_float64(module)
        if not kwargs.get("process_group") and not kwargs.get("device_mesh"):
            self.replicated |= set(module.parameters())

    def before_module(self, args, kwargs):
        module, *inputs = args
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
        is_random_depth = type(module).__name__.endswith(("DropPath", "StochasticDepth"))
        if is_random_depth or (self.args.eval_norm and isinstance(module, BATCH_NORM)):
            module.training = False
        is_trained = torch.is_grad_enabled() and any(param.requires_grad for param in module.parameters())
        if self.depth > 0 or not is_trained:
            return None
        if self.stepped:
            self.begin_step()
        root = unwrapped(module)
        if root not in self.roots:
            if root is module:  # no wrapper of the script's own, which may hold parts of its parameters
                self.make_float64(root)
            self.roots.append(root)
        self.record("weights")
        norms = {name: each for name, each in root.named_modules() if isinstance(each, BATCH_NORM)}
        self.step.norms += [without_wrappers(name) for name, each in norms.items() if each.training]
        self.record_inputs(root, inputs, kwargs)
        if next(root.parameters()).dtype == torch.float64:
            return pytree.tree_map(as_float64, (args, kwargs))
        return None

    def begin_step(self):
        self.stepped = []
        self.step = Step(self.step.number + 1)

    def make_float64(self, module):
        """Convert a model of float32, unless the script may hold parts of its parameters: see `is_untouched`."""
        tensors = [each for each in (*module.parameters(), *module.buffers()) if each.dtype.is_floating_point]
        is_float = all(each.dtype in (torch.float32, torch.float64) for each in tensors)
        if is_float and not self.args.float32 and all(map(is_untouched, tensors)):
            module.double()

    def record_inputs(self, root, args, kwargs):
        inputs = inspect.signature(root.forward).bind(*args, **kwargs).arguments
        for path, value in pytree.tree_flatten_with_path(dict(inputs))[0]:
            name = re.sub(r"\W+", ".", pytree.keystr(path)).strip(".")  # as batch.labels for ['batch']['labels']
            rows, width = rows_of(value)
            before, _ = self.step.inputs.get(self.prefix(root) + name, (rows[:0], width))
            self.step.inputs[self.prefix(root) + name] = (torch.cat([before, rows]), width)

    def before_optimizer(self, optimizer, args, kwargs):
        self.optimizing += 1
        if self.optimizing > 1:
            return
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        if optimizer in self.stepped:  # no module was called since
            self.begin_step()
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
            # Counted from 0: it begins with the result of the last step to compare.
            if self.step.number == self.args.steps:
                sys.stdout.flush()
                self.done.touch()
                threading.Event().wait()  # until this process is killed, since other ranks may still need it

    def write_step(self):
        step = self.step
        step.draws = {"torch.initial_seed()": torch.initial_seed(), "the DataLoader's sampler": listed(self.samplers)}
        n_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        step.is_alone = n_ranks < int(os.environ["WORLD_SIZE"])
        step.n_collectives = count_collectives()
        step.replicated = {name for name, param in self.named_params().items() if param in self.replicated}
        pickle.dump(vars(step), self.file)  # the class itself is not importable while the script is __main__
        self.file.flush()

    def record(self, key):
        """Record the tensors that are not yet recorded in this step, but none whose memory the script has freed."""
        sketches = getattr(self.step, key)
        for name, param in self.named_params().items():
            tensor = param if key == "weights" else param.grad
            if tensor is not None and name not in sketches and has_memory(tensor):
                sketches[name] = sketch(tensor)
                self.step.types.add(str(tensor.dtype).removeprefix("torch."))

    def named_params(self):
        """By name, without what all names of a model begin with: another module may be the outermost on one process."""
        named = {}
        for root in self.roots:
            full_names = [name for name, _ in root.named_parameters()]
            names = [without_wrappers(name) for name in full_names]
            while len({name.partition(".")[0] for name in names}) == 1 and all("." in name for name in names):
                names = [name.partition(".")[2] for name in names]
            if len(set(names)) < len(names):  # a module of the script has the name of a wrapper
                names = full_names
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
    """The shape of a tensor, 64 sums with random signs, whose distance is about that of two tensors, and the plain sum.

    All ranks that hold a part of a DTensor must call it.
    """
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    numbers = tensor.cpu().to_dense()
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers)
    flat = numbers.double().flatten()
    products = nn.functional.pad(flat * random_weights(len(flat)), (0, -len(flat) % 64))
    return tuple(tensor.shape), products.view(-1, 64).sum(dim=0), flat.sum().item()


def rows_of(value):
    """Two numbers for each row of an argument, and the length of a row.

    They are weighted sums of the row, with and without the repetitions of its last number, which may be padding. None
    has no rows, nor has anything else that is no tensor.
    """
    is_tensor = torch.is_tensor(value) and value.layout == torch.strided and not hasattr(value, "full_tensor")
    if not is_tensor or value.numel() == 0:
        return torch.zeros(0, 2, dtype=torch.float64), 0
    rows = value.detach().cpu().double()
    rows = rows.reshape(len(rows), -1) if rows.dim() else rows.view(1, 1)
    weights = random_weights(rows.shape[1])
    is_last = (rows == rows[:, -1:]).flip(1).cumprod(1).flip(1).bool()
    is_last[:, 0] = False
    return torch.stack([rows @ weights, rows.masked_fill(is_last, 0) @ weights], dim=1), rows.shape[1]


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


def run_rank(folder, args):
    """Run the script in this process, and record it into files in the folder."""
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    if not args.float32:
        torch.set_default_dtype(torch.float64)
        torch.Tensor.float = torch.Tensor.double  # or logits.float() would round them
    switch_off_dropout()
    allow_fullgraph()
    look_at_process_group()
    Recorder(folder, args).install()
    if args.seed is not None:
        set_seeds(args.seed + int(os.environ["RANK"]))
    sys.argv = [args.script, *[for_processes(arg, int(os.environ["WORLD_SIZE"])) for arg in args.args]]
    if args.is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(args.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(args.script).resolve().parent)
        runpy.run_path(args.script, run_name="__main__")


# ---- compare the steps: `expected` is that of one process, `got` are those of all ranks ------------------------------


def aligned(expected, step):
    """The step with the sums of those tensors that one process has in the same shape. Others are cut, or renamed."""
    tensors = {}
    for key in ("weights", "gradients", "clipped"):
        whole = getattr(expected, key)
        named = getattr(step, key).items()
        tensors[key] = {name: sums for name, (shape, sums, _) in named if name in whole and whole[name][0] == shape}
    return dataclasses.replace(step, **tensors)


def distances(expected, tensors):
    """By name, the farthest first.

    They are relative to the size of the tensor and a tenth of all tensors, as small ones may be nothing but rounding.
    """
    far = {name: expected[name].dist(tensors[name]).item() for name in expected if name in tensors}
    sizes = {name: expected[name].norm().item() for name in far}
    tenth = 0.1 * math.hypot(*sizes.values()) + 1e-300
    return {name: far[name] / (sizes[name] + tenth) for name in sorted(far, key=far.get, reverse=True)}


def judge(expected, ranks, are_low):
    """Returns the distance of each tensor to that of one process, the names of the wrong ones, and the largest distance
    of the others.

    The nearest rank counts: scripts that split the optimizer reduce each gradient to its owner only. In low types a
    tensor may be nothing but rounding, so all of them together decide.
    """
    found = {}
    for name, whole in expected.items():
        held = [tensors[name] for tensors in ranks if name in tensors]
        if held:
            found[name] = min(held, key=whole.dist)
    far = distances(expected, found)
    if not are_low or not far:
        wrong = [name for name, distance in far.items() if not distance <= ALLOWED]
        return far, wrong, max([far[name] for name in far if name not in wrong], default=0.0)
    whole, of_ranks = [torch.cat([tensors[name] for name in far]) for tensors in (expected, found)]
    distance = whole.dist(of_ranks).item() / (whole.norm().item() + 1e-300)
    if distance <= ALLOWED_IN_LOW_TYPES:
        return far, [], distance
    return far, [name for name in far if not far[name] <= ALLOWED_IN_LOW_TYPES] or list(far), 0.0


def apart(ranks, are_low, exact=()):
    """Yield (name, rank, distance) of tensors that a rank holds otherwise than the first rank that holds them.

    Those with names in `exact` must agree in each bit.
    """
    first = {}
    for tensors in reversed(ranks):
        first |= tensors
    for rank, tensors in enumerate(ranks):
        for name, distance in distances(first, tensors).items():
            allowed = ALLOWED_BETWEEN_RANKS if are_low else ALLOWED
            if not distance <= (0 if name in exact else allowed):
                yield name, rank, distance


class Comparison:
    """What differs in one step: `step` and `later` are (Step of one process, Step of rank 0, Step of rank 1, …)."""

    def __init__(self, step, later, begin, are_low):
        self.expected, *self.got = step
        self.are_low = are_low
        tensors = {"gradients": [each.gradients for each in step], "clipped": [each.clipped for each in step]}
        tensors["changes"] = [changes(begin, each) for each in later]
        replicated = set().union(*[each.replicated for each in self.got])
        self.far, self.wrong, self.largest, self.apart = {}, {}, {}, {}
        for key, (whole, *ranks) in tensors.items():
            self.far[key], self.wrong[key], self.largest[key] = judge(whole, ranks, are_low)
            self.apart[key] = list(apart(ranks, are_low, replicated))
        # An owner has the gradient of all samples.
        self.reduced = {name for name, distance in self.far["gradients"].items() if distance <= ALLOWED_BETWEEN_RANKS}
        self.moved = {name for each in tensors["changes"][1:] for name, change in each.items() if change.any()}
        # Ranks may have other gradients and the same weights: the optimizer averages, or the owner sends its weights.
        # Then weights are the same in each bit. Adam moves them nearly alike if all gradients have one sign.
        moved_apart = names_of(apart(tensors["changes"][1:], are_low, exact=begin))
        self.averaged_later = names_of(self.apart["gradients"]) - moved_apart
        self.settings = list(other_settings(self.expected, self.got))


def names_of(tensors):
    return {name for name, _, _ in tensors}


def changes(begin, step):
    """How far the weights have moved since the start."""
    return {name: sums - begin[name] for name, sums in step.weights.items() if name in begin}


def evidence(found):
    """Yield in words what decides that a step is not equal."""
    for name, rank, _ in found.apart["changes"]:
        yield f"it ends with another {name} on rank {rank} than on other ranks"
    for name, _, distance in found.apart["gradients"]:
        if name not in found.averaged_later:
            yield f"the gradient of {name} differs by {distance:.1e} between ranks"
    is_made_up_for = found.settings and found.moved and found.wrong["gradients"] and not found.wrong["changes"]
    for key in ("gradients", "clipped"):
        for name in found.wrong[key]:
            if not is_made_up_for and name not in found.averaged_later & names_of(found.apart[key]):
                yield f"the gradient of {name} differs by {found.far[key][name]:.1e}"
    for name in found.wrong["changes"]:
        yield f"{name} has moved otherwise since the start, by {found.far['changes'][name]:.1e}"
    if found.are_low:
        has_other_number = any(N_SAMPLES in line for line in other_samples(found.expected, found.got))
        if has_other_number or (found.settings and not is_made_up_for):
            yield "rounding may hide what it does"


def differences(one, ranks, have_ended, result):
    """Yield in words what differs between one process and the ranks, the first difference first.

    If all `have_ended`, they must have taken as many steps. `result` gets the names of the tensors that were trained
    and compared, and the largest difference of those that are equal.
    """
    recorded = list(zip(one, *ranks, strict=False))
    steps = [[aligned(step[0], each) for each in step] for step in recorded]
    are_low = is_low(each for step in steps for each in step)
    yield from without_training([step[0] for step in steps], are_low)
    if any(each.is_alone for each in steps[0]):
        yield f"no process group is made: {ALONE}"
    yield from cut_otherwise(*recorded[0])
    begin, averaged_later = {}, set()
    for number, step in enumerate(steps):
        new = {name: sums for name, sums in step[0].weights.items() if name not in begin}
        yield from other_start(new, step[1:], are_low)
        begin |= new
        is_last = number == len(steps) - 1
        found = Comparison(step, step if is_last else steps[number + 1], begin, are_low)
        if is_last:  # its result is not known: only what was averaged later before may be so again
            found.averaged_later &= averaged_later & (found.moved | found.reduced)
        averaged_later |= found.averaged_later
        for words in evidence(found):
            yield f"in step {number + 1} {next(causes(found))} ({words})"
        result.largest = max(result.largest, *found.largest.values())
        result.compared |= found.far["gradients"].keys() | (found.far["changes"].keys() & found.moved)
    counts = list(map(len, ranks))
    if have_ended and set(counts) != {len(one)}:
        yield f"the ranks take {listed(counts)} steps, and one process takes {len(one)}"
    n_collectives = [now.n_collectives - before.n_collectives for before, now in zip(steps[0], steps[-1], strict=True)]
    does_all = all(is_whole(rows, parts) for _, rows, parts in arguments(*steps[0]))
    if len(steps) > 1 and 0 in n_collectives[1:] and does_all:
        yield f"a rank communicates with no other rank: {ALONE}"


def is_low(steps):
    """Is any type lower than float64? Then rounding shows in all tensors."""
    return not set().union(*[step.types for step in steps]) <= {"float64", "complex128"}


def listed(values):
    return " and ".join(", ".join(map(str, values)).rsplit(", ", 1))


# ---- name the cause ------------------------------------------------------------------------------------------------

ALONE = "each of them trains alone"
N_SAMPLES = "samples, and"
BEGINS = "the first step begins with other weights"
SEEDS = (
    "is the same seed set before the model is built, and are weights loaded before it is wrapped, or on all ranks, "
    "and drawn before it is sharded? If the script sets none: --seed 0"
)
STALE = "the optimizer was built before the model was sharded, and holds parameters that nobody uses"
SUM = "it is summed over the ranks, and not averaged"
DIVIDED = "it is averaged, but the loss is a sum over the samples, or has been divided by the number of processes"
OTHER_GRADIENT = (
    "are the labels, are random numbers drawn in the model, is it a mean over shares of unequal weight, "
    "or does the loss compare samples with each other?"
)


def without_training(one, are_low):
    """Yield why the steps of one process show nothing."""
    for name in not_finite(*one):
        yield f"nothing can be compared: the gradient of {name} is NaN or infinite on one process too"
    if not any(sums.any() for sums in one[0].gradients.values()):
        reason = "all gradients are 0" if one[0].gradients else STALE
        yield f"nothing is trained, on one process too: {reason}"
    has_moved = any(sums.any() for sums in changes(one[0].weights, one[-1]).values())
    if len(one) > 1 and not (has_moved or are_low):  # in low types rounding may undo small changes
        yield f"nothing is trained, on one process too: the rate is 0, or {STALE}"


def not_finite(*steps):
    return [name for step in steps for name, sums in step.gradients.items() if not sums.isfinite().all()]


def cut_otherwise(expected, *got):
    """Yield that the parts of a tensor, one for each rank, do not add up to the whole one at the start."""
    for name, (shape, _, total) in expected.weights.items():
        parts = [each.weights[name] for each in got if name in each.weights]
        are_all = len(parts) > 1 and sum(math.prod(part) for part, _, _ in parts) == math.prod(shape)
        if are_all and not math.isclose(sum(part for _, _, part in parts), total, rel_tol=1e-6, abs_tol=1e-9):
            yield f"{BEGINS} than on one process ({name}, which is cut): is it drawn whole, and then cut?"


def other_start(weights, got, are_low):
    """Yield how some weights of one process begin otherwise on the ranks."""
    ranks = [{name: each.weights[name] for name in weights if name in each.weights} for each in got]
    for name, rank, _ in apart(ranks, are_low):
        yield f"{BEGINS} on rank {rank} than on other ranks ({name}): {SEEDS}"
    for name, _, distance in apart([weights, *ranks], are_low):
        yield f"{BEGINS} than on one process ({name} differs by {distance:.1e}): {SEEDS}"


def causes(found):
    """Yield the likely reasons why a step is not equal, the likeliest first."""
    wrong = found.wrong["gradients"]
    if found.largest["gradients"] > 0.2 * ALLOWED_IN_LOW_TYPES:  # enough to move the weights otherwise
        wrong = list(found.far["gradients"])
    drifted = [name for name, _, _ in found.apart["changes"]]
    for rank, step in enumerate(found.got):
        for name in not_finite(step):
            yield f"the gradient of {name} is NaN or infinite on rank {rank}"
    suspects = wrong or drifted or found.wrong["changes"]
    if suspects and partly_used(found.got).issuperset(suspects):
        yield f"there is a parameter that only some ranks use ({suspects[0]}), and others have no gradient to average"
    if drifted:
        yield from unaveraged(found)
    for line in other_samples(found.expected, found.got):
        if wrong or N_SAMPLES in line:
            yield line
    if wrong:
        yield from factor(found, wrong)
        yield from unaveraged(found)
        for name in found.expected.norms:
            line = f"the samples are the same, but BatchNorm ({name}) uses the mean of each rank's alone"
            yield f"{line}. To judge the rest of the script: --eval-norm"
        yield f"the samples are the same, and the gradient of {wrong[0]} is not: {OTHER_GRADIENT}"
    for name in found.wrong["clipped"]:
        yield f"the gradient of {name} is the same before clipping, but not after: clip once in a step, at its end"
    yield from found.settings
    if not found.moved:
        yield f"no weight moves: {STALE}"
    yield from unaveraged(found)
    yield "samples, gradients and settings are the same: is the optimizer's state, and what follows its step?"


def partly_used(got):
    """The names of parameters that all ranks hold, and of which only some have a gradient."""
    held = set.intersection(*[set(each.weights) for each in got])
    gradients = [held.intersection(each.gradients) for each in got]
    used_by_all = set.intersection(*gradients)
    return set.union(*gradients) - used_by_all if used_by_all else set()  # if none: each has one owner, as in ZeRO


def unaveraged(found):
    """Yield why gradients differ between ranks."""
    for _, rank, _ in found.apart["gradients"]:
        names = [name for name, each, _ in found.apart["gradients"] if each == rank]
        line = f"rank {rank} has another gradient of {names[0]} than other ranks"
        if len(names) < len(found.got[rank].gradients):
            yield f"{line}: is it outside of the wrapped model, or was it unfrozen after wrapping?"
        if not found.apart["clipped"]:
            yield f"{line} when they are clipped: average them first"
        yield f"{line}. Nothing averages them: is the plain model trained, or is the last backward inside of no_sync()?"


def arguments(expected, *got):
    """Yield (name, rows, rows of each rank) of each argument, by place if no name is common.

    Sequences of which each rank has a piece are left out: they cannot be compared.
    """
    named = [each.inputs for each in (expected, *got)]
    if not named[0].keys() & named[1].keys():
        named = [{f"number {place}": each for place, each in enumerate(inputs.values(), 1)} for inputs in named]
    for name, (rows, width) in named[0].items():
        of_ranks = [inputs.get(name, (rows[:0], width)) for inputs in named[1:]]
        parts = [part for part, _ in of_ranks]
        least = min(width for _, width in of_ranks)
        if least == width or least * sum(map(len, parts)) != width * len(rows):
            yield name, rows, parts


def other_samples(expected, got):
    """Yield how the global batch differs. The rows of an argument may be in any order."""
    equal = []
    for name, rows, parts in arguments(expected, *got):
        n_rows = sum(map(len, parts))
        if is_same(torch.cat(parts), rows) or is_whole(rows, parts):
            equal.append(name)
        elif not len(rows) or not all(map(len, parts)):
            yield f"the argument {name} is None, or missing, on one process or on some ranks only"
        elif len(parts) > 1 and is_whole(parts[0], parts):
            yield f"all ranks have the same samples ({name}): is there a sampler that gives each rank its share?"
        elif n_rows != len(rows):
            advice = "It must be divided by the number of processes, once, and no sample may be repeated"
            yield f"the global batch has {n_rows} {N_SAMPLES} {len(rows)} on one process. {advice}"
        elif equal:
            advice = "if it is drawn at random, draw it for the global batch, and give each rank its share"
            yield f"the argument {equal[0]} is the same, but {name} is not: {advice}"
        else:
            yield f"the global batch has other samples ({name}): {how_drawn(expected, got)}"


def how_drawn(expected, got):
    """Why samples may be other ones, from what is known of random draws."""
    reasons = []
    for key, of_one in expected.draws.items():
        of_ranks = [step.draws[key] for step in got]
        if set(of_ranks) != {of_one}:
            reasons.append(f"{key} is {listed(of_ranks)} on the ranks, and {of_one} on one process")
    generic = "are the data and their order the same on all ranks, and is nothing drawn at random, as augmentation is?"
    return ". And ".join(reasons) or generic


def is_same(rows, others):
    """Are they the same samples, in any order? Two rows are the same with or without what may be padding."""
    rows, others = [[{f"{number:.6g}" for number in row} for row in each.tolist()] for each in (rows, others)]
    every, every_other = set().union(*rows), set().union(*others)
    is_known = all(row & every_other for row in rows) and all(row & every for row in others)
    return len(rows) == len(others) and is_known


def is_whole(rows, parts):
    """Does each rank have all of these samples?"""
    return all(is_same(part, rows) for part in parts)


def factor(found, wrong):
    """Yield that wrong gradients are N or 1/N times those of one process."""
    n = len(found.got)
    added = SUM
    for name, rows, parts in arguments(found.expected, *found.got):
        if is_whole(rows, parts):
            added = f"{SUM}, or all ranks have the same samples ({name}), and the loss is a sum"
    for number, words, advice in ((n, f"{n}", added), (1 / n, f"1/{n}", DIVIDED)):
        times = {name: number * found.expected.gradients[name] for name in wrong}
        if not any(judge(times, [each.gradients], found.are_low)[1] for each in found.got):
            yield f"the gradient of {wrong[0]} is {words} times that of one process: {advice}"


def other_settings(expected, got):
    """Yield another learning rate, for example. A script that splits the optimizer may have other groups."""
    for rank, step in enumerate(got):
        if len(step.settings) == len(expected.settings):
            for settings, settings_of_one in zip(step.settings, expected.settings, strict=True):
                for key, value in settings_of_one.items():
                    if settings.get(key) != value:
                        yield f"the optimizer's {key} is {settings.get(key)} on rank {rank}, and {value} on one process"


# ---- start the processes -------------------------------------------------------------------------------------------


def run(args, nproc):
    """Returns each rank's steps, and in one line what went wrong, or None."""
    print(f"running on {nproc} {'process' if nproc == 1 else 'processes'}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        command = [sys.executable, __file__, IN_RANK, folder, *args.argv]
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
        failed = [rank for rank, status in enumerate(statuses) if status]
        if failed:
            rank = min(failed, key=lambda rank: logs[rank].stat().st_mtime)  # the first one is silent for longest
            print(*logs[rank].read_text(errors="replace").splitlines()[-20:], sep="\n", file=sys.stderr)
            return f"fails on rank {rank}: {last_line(logs[rank]) or f'exit status {statuses[rank]}'}"
        done = [log.with_name(log.name.replace("printed", "done")).exists() for log in logs]
        if all(is_done or status == 0 for is_done, status in zip(done, statuses, strict=True)):
            return None
        if any(done):
            timeout = min(timeout, 2 * (time.monotonic() - begin) + 10)  # for the others: they may never come
        for line in re.findall("no progress for .*", "".join(log.read_text(errors="replace") for log in logs)):
            if "computing, or ended" not in line:
                return f"stands still: {line}"
        time.sleep(0.05)
    return f"stands still: it has not ended after {timeout:.0f} s"


def last_line(log):
    """The error behind the last traceback, where frames are indented, or the last line."""
    text = re.sub(r"(?m)^\[rank\d+\]: ?|^ *what\(\): *", "", log.read_text(errors="replace"))
    _, traceback, text = text.rpartition("Traceback (most recent call last):\n")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(" ")] or [""]
    return lines[0] if traceback else lines[-1]


def read_steps(path):
    """Of each step the last record. A process may have been killed while it wrote."""
    steps = {}
    with contextlib.suppress(FileNotFoundError, EOFError, pickle.UnpicklingError), open(path, "rb") as file:
        while True:
            step = Step(**pickle.load(file))
            steps[step.number] = step
    return list(steps.values())


# ---- report --------------------------------------------------------------------------------------------------------


def report(args, reference, ranks, failure):
    """Compare the ranks with one process, or each with its rank of the reference. Returns the exit status."""
    name = f"{Path(args.script).name}:"
    line, result = None, SimpleNamespace(largest=0.0, compared=set())
    for number, one in enumerate(reference):
        got = ranks[number :: args.reference]
        if not all(got):
            break
        line = next(differences(one, got, not failure, result), None)
        if line:
            if args.reference > 1:
                line = line.replace("one process", processes_of(args))
                line += f". Ranks {listed(range(number, args.nproc, args.reference))} are compared with rank {number}"
            print(f"{name} on {args.nproc} processes {line}")
            break
        sizes = {name: math.prod(shape) for step in one for name, (shape, _, _) in step.gradients.items()}
        left_out = [each for each in sizes if each not in result.compared]
        if left_out:
            print(f"{name} not compared: {len(left_out)} tensors that the script cuts or names anew, as {left_out[0]}")
        if not failure and 2 * sum(sizes[each] for each in left_out) > sum(sizes.values()):
            failure = "holds most weights that are trained under other names, or in parts (as under FSDP1)"
    if failure:
        print(f"{name} on {args.nproc} processes it {failure}")
        return 2
    if line:
        return 1
    steps = [step for each in (*reference, *ranks) for step in each]
    n_steps = min(map(len, (*reference, *ranks))) - 1  # the last one begins with the result of the last but one
    types = listed(sorted(set().union(*[step.types for step in steps])))
    allowed = ALLOWED_IN_LOW_TYPES if is_low(steps) else ALLOWED
    line = f"{name} equal on {args.reference} and {args.nproc} processes for {max(n_steps, 1)} steps"
    print(f"{line}, up to {result.largest:.1e} (allowed: {allowed:g}), judged in {types}")
    return 0


def processes_of(args):
    return "one process" if args.reference == 1 else f"{args.reference} processes"


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
    args.argv = argv
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
        print(f"{Path(args.script).name}: on {processes_of(args)} it {failure}")
        return 2
    return report(args, reference, *run(args, args.nproc))


if __name__ == "__main__":
    if sys.argv[1:2] == [IN_RANK]:
        run_rank(sys.argv[2], parse_args(sys.argv[3:]))
    else:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)  # as Ctrl-C: all that was started is ended
        try:
            sys.exit(main(sys.argv[1:]))
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
