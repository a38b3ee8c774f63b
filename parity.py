"""Does a script train on N processes as on one? Run it on both, compare, and name the first thing that differs.

    python parity.py train.py                          # on 1 and on 2 processes, on GPUs or on the CPU
    python parity.py --nproc 4 --steps 10 train.py --epochs 1
    python parity.py train.py --batch-size 64/N        # 64, and 32 on two processes: the global batch must stay
    python parity.py train.py --snapshot-path run-N.pt # a lone N becomes the number of processes
    python parity.py --seed 1 -m package.train         # a module, and another seed for a script that sets none

    train.py: equal on 1 and 2 processes for 5 steps, up to 7.4e-16 (allowed: 1e-10), judged in float64
    other.py: on 2 processes in step 1 the gradient of weight differs by 4.2e-01: the global batch has 128 samples, and
    64 on one process. It must be divided by the number of processes, once, and no sample may be repeated

It works for every script that torchrun can start, also for one that uses nothing of this project. It needs only torch,
and it does not change the script: hooks look at the outermost module that is trained, at clipping and at the optimizer.
Numbers are float64 where the script allows it, dropout is off, and rank r begins with the seed `--seed` + r. So what
should be equal is equal up to about 1e-12.

The verdict follows from one rule. A gradient on which all ranks agree must equal the gradient of one process. Where the
ranks disagree, the weights after the step decide: they must be the same on all ranks, and those of one process. The
limit belongs to the lowest type that computes: see `LIMITS`. docs/parity.md says what cannot be seen.
The exit status is 0 if the runs are equal, 1 if they are not, and 2 if they could not be compared.

`Recorder` writes the steps of each rank into files, and `Comparison` gives the verdict. This file is complete.
If parity_why.py lies beside it, the likely cause is named too. With watch.py, a job that hangs is ended early.
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import multiprocessing
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
from typing import NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree


class Limits(NamedTuple):
    """The largest relative differences that are allowed."""

    gradients: float  # from one process
    ranks: float  # from another rank, of gradients and of weights
    weights: float  # from one process, of how far they have moved


# By the number of bytes of the lowest type that computes. Right scripts were at most 5e-11, 1e-5 and 0.03 apart.
LIMITS = {8: Limits(1e-10, 1e-10, 1e-6), 4: Limits(1e-3, 0.01, 0.1), 2: Limits(0.1, 0.01, 0.1)}
WORDS = {  # by kind of difference
    "useless": "nothing can be compared: on one process too, {name}",
    "cut": "the first step begins with other weights than on one process ({name}, which is cut)",
    "begin": "the first step begins with other weights on rank {rank} than on one process ({name}, by {size:.1e})",
    "ranks": "in step {step} {name} ends otherwise on rank {rank} than on other ranks, by {size:.1e}",
    "weights": "in step {step} {name} has moved otherwise since the start, by {size:.1e}",
    "settings": "in step {step} the optimizer's {name} is another one on rank {rank} than on one process",
    "gradients": "in step {step} the gradient of {name} differs by {size:.1e}",
    "clipped": "in step {step} the gradient of {name} differs by {size:.1e} when the optimizer gets it",
    "undecided": "in step {step} rank {rank} has another gradient of {name} than other ranks, and no weight moves",
    "steps": "the ranks take {name} steps, and one process takes {size}",
    "alone": "a rank communicates with no other rank: each of them trains alone",
}
DROPOUT = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
CASTS = ("to", "type", "half", "bfloat16", "float")
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # their names in modules
OWN_PROCESSES = "the script starts its own processes: start it so that torchrun could, with one process for each rank"
SHARE = r"(?<![\w./])(\d+)/N\b"  # as in 64/N, but not in a path, and not in 0.5/N
IN_RANK = "--in-a-rank"


def main(argv):
    args = parse_args(argv)
    references, failure = run(args, args.reference)
    if failure:
        print(f"{Path(args.script).name}: on {processes_of(args.reference)} it {failure}")
        return 2
    ranks, failure = run(args, args.nproc)
    for rank, one in enumerate(references):
        if args.reference > 1:
            print(f"ranks {listed(range(rank, args.nproc, args.reference))} are compared with rank {rank}:")
        status = report(args, one, ranks[rank :: args.reference], failure)
        if status:
            break
    return status


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], usage="%(prog)s [options] SCRIPT.py ...")
    add = parser.add_argument
    add("--nproc", type=int, default=2, help="number of processes to compare with one")
    add("--reference", type=int, default=1, help="number of processes to compare with, instead of one")
    add("--steps", type=int, default=5, help="optimizer steps to compare")
    add("--timeout", type=float, default=300, help="seconds that a run may take")
    add("--seed", type=int, nargs="?", default=0, const=0, help="seed of rank 0, until the script sets one")
    add("--float32", action="store_true", help="leave torch's default type, and weights of float32, as they are")
    add("--eval-norm", action="store_true", help="let BatchNorm use its running statistics")
    script = next((number for number, arg in enumerate(argv) if arg == "-m" or arg.endswith(".py")), len(argv))
    args = parser.parse_args(argv[:script])
    args.argv = argv
    args.is_module = argv[script : script + 1] == ["-m"]
    args.script, *args.args = argv[script + args.is_module :] or [""]
    if not args.is_module and not Path(args.script).is_file():
        parser.error(f"there is no script {args.script!r}: name a file that ends in .py, before its arguments")
    if args.reference < 1 or args.nproc <= args.reference or args.nproc % args.reference:
        parser.error(f"argument --nproc: {args.nproc} must be a multiple of {args.reference}, and more")
    if args.steps < 1:
        parser.error(f"argument --steps: {args.steps} must be at least 1")
    for number in re.findall(SHARE, " ".join(args.args)):
        if int(number) % args.nproc:
            parser.error(f"{number}/N: {number} is not a multiple of {args.nproc}, the number of processes")
    return args


def report(args, one, ranks, failure):
    """Compare the ranks with one process, and print the verdict. Returns the exit status."""
    start, difference = f"{Path(args.script).name}:", None
    if all(ranks):
        comparison = Comparison(one, ranks)
        difference = comparison.first_difference(have_ended=not failure)
    if difference:
        print(f"{start} on {args.nproc} processes {in_words(difference, one, ranks)}")
    elif all(ranks):
        sizes = {name: math.prod(shape) for step in one for name, (shape, *_) in step.gradients.items()}
        left_out = [name for name in sizes if name not in comparison.compared]
        if left_out:
            print(f"{start} not compared: {len(left_out)} tensors that are cut, renamed or not moved, as {left_out[0]}")
        if 2 * sum(sizes[name] for name in left_out) > sum(sizes.values()) and not failure:
            failure = "holds most weights that are trained under other names, or in parts (as under FSDP1)"
    if failure:
        print(f"{start} on {args.nproc} processes it {failure}")
        return 2
    if difference:
        return 1
    largest, limits = max(comparison.compared.values()), comparison.limits
    n_results = max(1, min(map(len, (one, *ranks))) - 1)  # the last step begins with the result of the last but one
    allowed = limits.gradients if largest <= limits.gradients else limits.weights
    line = f"{start} equal on {args.reference} and {args.nproc} processes for {n_results} steps, up to {largest:.1e}"
    print(f"{line} (allowed: {allowed:g}), judged in {listed(sorted(comparison.types))}")
    return 0


def in_words(difference, one, ranks):
    """The difference, and its likely cause if parity_why.py is beside this file."""
    words = WORDS[difference.kind].format(**difference._asdict())
    if not is_beside("parity_why.py"):
        return words
    import parity_why

    cause = parity_why.cause(difference, one, ranks)
    return f"{words}: {cause}" if cause else words


def is_beside(name):
    return Path(__file__).with_name(name).exists()


def processes_of(number):
    return "one process" if number == 1 else f"{number} processes"


def listed(values):
    return " and ".join(", ".join(map(str, values)).rsplit(", ", 1))


# ---- start and end of the ranks ------------------------------------------------------------------------------------


def run(args, nproc):
    """Returns each rank's steps, and in one line what went wrong, or None."""
    print(f"running on {processes_of(nproc)}", file=sys.stderr)
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
            failure = wait(processes, folder, logs, args.timeout)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        ranks = [read_steps(folder, rank) for rank in range(nproc)]
        if not failure and not all(ranks):
            rank = ranks.index([])
            failure = f"takes no step of an optimizer of torch.optim on rank {rank}"
            failure += f", which says last: {last_line(logs[rank]) or 'nothing'}. Or {OWN_PROCESSES}"
    if failure:
        failure += f". Steps of each rank: {listed(map(len, ranks))}"
        if re.search("dtype|Float|Double|data size", failure) and not args.float32:
            failure += ". If it runs without parity.py, try --float32"
    return ranks, failure


def start(command, environment, log):
    """Start one rank, in a group with all processes that it will start. What it prints goes to the file `log`."""
    files = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with open(log, "w") as file:
        return subprocess.Popen(command, env=environment, stdout=file, start_new_session=True, **files)


def wait(processes, folder, logs, timeout):
    """Wait until each rank has ended, or has taken all steps. Returns what went wrong, or None."""
    end = time.monotonic() + timeout
    done = [False]
    while not all(done):
        statuses = [process.poll() for process in processes]
        done = [status == 0 or Path(folder, f"done {rank}").exists() for rank, status in enumerate(statuses)]
        failed = [rank for rank, status in enumerate(statuses) if status]
        if failed:
            rank = min(failed, key=lambda rank: logs[rank].stat().st_mtime)  # the first one is silent for longest
            print(*logs[rank].read_text(errors="replace").splitlines()[-20:], sep="\n", file=sys.stderr)
            others = [other for other, is_done in enumerate(done) if is_done]
            before = f". Without an error ends rank {listed(others)}" if others else ""
            return f"fails on rank {rank}: {last_line(logs[rank]) or f'exit status {statuses[rank]}'}{before}"
        printed = "".join(log.read_text(errors="replace") for log in logs)
        place = re.search(r"no progress for \S+ s: (?!.*computing, or ended).*", printed)  # of each rank, by watch.py
        if place or time.monotonic() > end:
            return f"hangs: {place[0] if place else f'it has not ended after {timeout:.0f} s'}"
        time.sleep(0.05)
    return None


def last_line(log):
    """The error behind the last traceback, where frames are indented, and its place in the script. Or the last line."""
    text = re.sub(r"(?m)^\[rank\d+\]: ?|^ *what\(\): *", "", log.read_text(errors="replace"))
    _, traceback, text = text.rpartition("Traceback (most recent call last):\n")
    lines = [line for line in text.splitlines() if line.strip(" ^~") and not line.startswith(" ")] or [""]
    places = [place for place in re.findall(r'(?m)^  File "(.*?)", line (\d+)', text) if not is_installed(place[0])]
    if not traceback:
        return lines[-1]
    return lines[0] + "".join(f" ({Path(path).name}:{number})" for path, number in places[-1:])


def is_installed(path):
    return path == __file__ or re.search(r"^<frozen|/(site|dist)-packages/|/lib/python3", path) is not None


def read_steps(folder, rank):
    return [Step(**pickle.loads(path.read_bytes())) for path in sorted(Path(folder).glob(f"step {rank} *"))]


# ---- the comparison ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Step:
    """What a step of one rank begins with, and what it uses. Tensors are sketches, by name."""

    number: int
    weights: dict = dataclasses.field(default_factory=dict)
    gradients: dict = dataclasses.field(default_factory=dict)  # before they are clipped
    clipped: dict = dataclasses.field(default_factory=dict)  # as the optimizer gets them
    settings: list = dataclasses.field(default_factory=list)  # of each group of parameters
    types: set = dataclasses.field(default_factory=set)  # of weights, gradients and results of modules
    clues: dict = dataclasses.field(default_factory=dict)  # what parity_why.py has noted
    n_collectives: int = 0  # since the start of the process


class Difference(NamedTuple):
    """`kind` is a key of WORDS, and `size` is relative to the size of the tensor."""

    step: int  # counted from 1
    kind: str
    name: str = ""
    size: float = 0.0
    rank: int | None = None


class Comparison:
    """The steps of one process, and of each rank. After `first_difference`, `compared` has what is right, by name."""

    def __init__(self, one, ranks):
        self.runs = [one, *ranks]
        self.types = set().union(*[step.types for steps in self.runs for step in steps])
        self.limits = LIMITS[max(2, min([getattr(torch, each).to_real().itemsize for each in self.types], default=8))]
        self.begin = {}  # weights of one process, in the step in which they are first seen
        self.apart = set()  # names of gradients on which ranks have disagreed
        self.moved = set()  # names of weights that have moved on a rank
        self.undecided = []  # Differences that matter if the weight has not moved
        self.compared = {}  # the largest distance

    def first_difference(self, have_ended=True):
        """Returns a Difference, or None if all is equal. If all `have_ended`, they must have taken as many steps."""
        return next(self.differences(have_ended), None)

    def differences(self, have_ended):
        one, *ranks = self.runs
        for reason in self.useless(one):
            yield Difference(1, "useless", reason)
        for name in cut_otherwise(one[0].weights, [steps[0].weights for steps in ranks]):
            yield Difference(1, "cut", name)
        n_steps = min(map(len, self.runs))
        for number, step in enumerate(zip(*self.runs, strict=False), 1):
            yield from self.compare_weights(number, *step)
            yield from self.compare_gradients(number, *step)
        yield from (each for each in self.undecided if each.name not in self.moved)
        if have_ended and any(len(steps) != len(one) for steps in ranks):
            yield Difference(n_steps, "steps", listed(map(len, ranks)), len(one))
        before = [steps[0].n_collectives if n_steps > 1 else 0 for steps in ranks]
        if any(steps[-1].n_collectives == number for steps, number in zip(ranks, before, strict=True)):
            yield Difference(n_steps, "alone")

    def useless(self, one):
        """Yield why the run of one process is no reference."""
        for step in one:
            for name, (_, sums, _) in step.gradients.items():
                if not sums.isfinite().all():
                    yield f"the gradient of {name} is NaN or infinite"
        if not any(moved(step.gradients) for step in one):
            yield "nothing is trained: all gradients are 0, or no parameter has one"
        may_round = self.limits != LIMITS[8]  # which may undo small changes
        if len(one) > 1 and not may_round and not moved(moves(one[0].weights, one[-1].weights)):
            yield "nothing is trained: no weight moves"

    def compare_weights(self, number, one, *ranks):
        """Those with which a step begins: the result of the step before. They decide where gradients were apart."""
        of_one, *of_ranks = [moves(self.begin, each.weights) for each in (one, *ranks)]
        new = {name: weight for name, weight in one.weights.items() if name not in self.begin}
        self.begin |= new
        yield from too_far(number, "begin", farthest(new, [each.weights for each in ranks]), self.limits.ranks)
        yield from too_far(number - 1, "ranks", between(of_one, of_ranks), self.limits.ranks, exact=self.apart)
        self.moved = set().union(*map(moved, of_ranks))
        judged = self.moved | moved(of_one)
        if self.moved:  # otherwise the optimizer trains nothing on the ranks
            judged &= self.apart
        far = {name: each for name, each in farthest(of_one, of_ranks).items() if name in judged}
        yield from self.judge(number - 1, "weights", far, self.limits.weights)

    def compare_gradients(self, number, one, *ranks):
        """Those on which all ranks agree must equal those of one process. Rounding hides much of other settings."""
        limits = self.limits
        if limits != LIMITS[8]:
            yield from (Difference(number, "settings", key, 0.0, rank) for key, rank, *_ in other_settings(one, ranks))
        for kind in ("gradients", "clipped"):
            whole, parts = getattr(one, kind), [getattr(each, kind) for each in ranks]
            apart = too_far(number, "undecided", between(whole, parts), min(limits.gradients, limits.ranks))
            names = {each.name for each in apart}
            far = {name: each for name, each in farthest(whole, parts).items() if name not in names}
            yield from self.judge(number, kind, far, limits.gradients)
            if limits != LIMITS[8]:  # rounding may undo each move. The owner, at least, must have the right gradient
                near = [distances(whole, each) for each in parts]
                for each in apart:
                    if min(far[each.name] for far in near if each.name in far) > limits.gradients:
                        self.undecided.append(each)
        lacking = set(one.gradients) ^ set().union(*[each.gradients for each in ranks])
        self.apart |= names | lacking

    def judge(self, number, kind, far, limit):
        for name, (distance, _) in far.items():
            self.compared[name] = max(distance, self.compared.get(name, 0.0))
        return too_far(number, kind, far, limit)


def too_far(number, kind, far, limit, exact=()):
    """The Differences of a step, the largest one first. Names in `exact` must agree in each bit."""
    found = [(distance, name, rank) for name, (distance, rank) in far.items() if distance > limit * (name not in exact)]
    return [Difference(number, kind, name, distance, rank) for distance, name, rank in sorted(found, reverse=True)]


def between(whole, ranks):
    """As `farthest`, from the first rank that holds the tensor in the shape of `whole`."""
    first = {}
    for tensors in reversed(ranks):
        first |= aligned(whole, tensors)
    return farthest(first, ranks)


def farthest(whole, ranks):
    """By name, the largest distance of a rank, and the rank."""
    found = {}
    for rank, tensors in enumerate(ranks):
        for name, distance in distances(whole, tensors).items():
            if distance > found.get(name, (-1, 0))[0]:
                found[name] = (distance, rank)
    return found


def distances(whole, tensors):
    """By name, relative to the size of the tensor and a tenth of all: small ones may be nothing but rounding."""
    tensors = aligned(whole, tensors)
    sizes = {name: whole[name][1].norm().item() for name in tensors}
    tenth = 0.1 * math.hypot(*sizes.values()) + 1e-300
    far = {name: whole[name][1].dist(sums).item() / (sizes[name] + tenth) for name, (_, sums, *_) in tensors.items()}
    return {name: math.inf if math.isnan(distance) else distance for name, distance in far.items()}


def aligned(whole, tensors):
    """Those which `whole` has in the same shape. Others are cut, or named anew."""
    return {name: each for name, each in tensors.items() if name in whole and whole[name][0] == each[0]}


def moves(begin, weights):
    """How far the weights have moved since the start."""
    return {name: (shape, sums - begin[name][1]) for name, (shape, sums, _) in aligned(begin, weights).items()}


def moved(changes):
    return {name for name, (_, sums, *_) in changes.items() if sums.any()}


def cut_otherwise(one, ranks):
    """The names of tensors whose parts, one for each rank, do not add up to the whole one."""
    for name, (shape, _, total) in one.items():
        parts = [each[name] for each in ranks if name in each]
        are_all = len(parts) > 1 and sum(math.prod(part[0]) for part in parts) == math.prod(shape)
        if are_all and not math.isclose(sum(part[2] for part in parts), total, rel_tol=1e-6, abs_tol=1e-9):
            yield name


def other_settings(one, ranks):
    """Yield (key, rank, value, value of one process). A script that splits the optimizer may have other groups."""
    for rank, step in enumerate(ranks):
        if len(step.settings) == len(one.settings):
            for settings, settings_of_one in zip(step.settings, one.settings, strict=True):
                for key, value in settings_of_one.items():
                    if settings.get(key) != value:
                        yield key, rank, settings.get(key), value


# ---- in each rank: hooks that record every step --------------------------------------------------------------------


class Recorder:
    """Writes each step into a file. After the last one the process waits.

    A step ends when, after an optimizer has stepped, a module that is trained is called or that optimizer steps again.
    """

    def __init__(self, folder, args):
        self.folder, self.rank, self.args = Path(folder), os.environ["RANK"], args
        self.why = None
        if is_beside("parity_why.py"):
            import parity_why

            self.why = parity_why
        self.roots = {}  # the outermost modules that are trained, each with what the names of its parameters begin with
        self.names = {}  # of parameters, in the order in which they are first seen
        self.stepped = []  # optimizers, in this step
        self.depth = 0  # of calls of modules, and of backward, which calls modules to recompute activations
        self.step = Step(0)

    def install(self):
        self.hook(nn.Module, "__call__", self.before_module, self.after_module)
        self.hook(torch.autograd, "backward")
        for name in CLIPPING:
            self.hook(nn.utils, name, lambda args, kwargs: self.record("gradients"))
            setattr(nn.utils.clip_grad, name, getattr(nn.utils, name))
        self.hook(DistributedDataParallel, "__init__", self.before_ddp)
        for name in CASTS:
            setattr(torch.Tensor, name, self.cast(getattr(torch.Tensor, name)))
        register_optimizer_step_pre_hook(self.before_optimizer)
        register_optimizer_step_post_hook(self.after_optimizer)

    def hook(self, owner, name, before=lambda args, kwargs: None, after=lambda result: None):
        """Call `before(args, kwargs)`, which may return other arguments, the function itself, and `after(result)`."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def call(*args, **kwargs):
            args, kwargs = before(args, kwargs) or (args, kwargs)
            self.depth += 1
            try:
                result = function(*args, **kwargs)
            finally:
                self.depth -= 1
            after(result)
            return result

        setattr(owner, name, call)

    def cast(self, function):
        """A method that casts a tensor: float32 becomes float64, and the type is noted where the model computes."""

        @functools.wraps(function)
        def call(tensor, *args, **kwargs):
            result = function(tensor, *args, **kwargs)
            is_cast = torch.is_tensor(result) and (result.dtype != tensor.dtype or function.__name__ == "float")
            if is_cast and result.dtype == torch.float32 and not self.args.float32:
                return tensor.double().to(result.device)
            if is_cast and (self.depth or result.requires_grad):
                self.note_type(result)
            return result

        return call

    def note_type(self, tensor):
        if tensor.is_floating_point() or tensor.is_complex():
            self.step.types.add(str(tensor.dtype).removeprefix("torch."))

    def before_ddp(self, args, kwargs):
        self.make_float64(args[1] if len(args) > 1 else kwargs["module"])

    def before_module(self, args, kwargs):
        module, *inputs = args
        if self.depth > 0:
            return None
        switch_off_random_layers(module, self.args.eval_norm)
        if torch.is_grad_enabled() and any(param.requires_grad for param in module.parameters()):
            self.before_trained(module, inputs, kwargs)
        if any(param.dtype == torch.float64 for param in module.parameters()):
            return pytree.tree_map(as_float64, (args, kwargs))
        return None

    def before_trained(self, module, inputs, kwargs):
        if self.stepped:
            self.begin_step()
        root = unwrapped(module)
        if root not in self.roots:
            self.make_float64(root)
            self.name_parameters(root)
        self.record("weights")
        if self.why:
            with contextlib.suppress(Exception):  # what only a cause needs must not end the run
                self.why.note(self.step.clues, self.roots[root], module, inputs, kwargs)

    def after_module(self, result):
        for each in pytree.tree_leaves(result):
            if torch.is_tensor(each) and each.requires_grad:
                self.note_type(each)

    def begin_step(self):
        self.stepped = []
        self.step = Step(self.step.number + 1)

    def make_float64(self, module):
        """Convert a model of float32, unless the script may hold parts of its parameters: see `is_untouched`."""
        tensors = [each for each in (*module.parameters(), *module.buffers()) if each.dtype.is_floating_point]
        is_float = all(each.dtype in (torch.float32, torch.float64) for each in tensors)
        if is_float and not self.args.float32 and all(map(is_untouched, tensors)):
            module.double()

    def name_parameters(self, root):
        """Name them without what all names begin with: another module may be the outermost on one process."""
        self.roots[root] = f"model {len(self.roots) + 1} ({type(root).__name__})." if self.roots else ""
        named = [(without_wrappers(name).split("."), param) for name, param in root.named_parameters()]
        while len({path[0] for path, _ in named}) == 1 and all(len(path) > 1 for path, _ in named):
            named = [(path[1:], param) for path, param in named]
        for path, param in named:
            self.names.setdefault(param, self.roots[root] + ".".join(path))

    def record(self, key):
        """Record the tensors that are not yet recorded in this step, but none whose memory the script has freed.

        A gradient that was not finite is recorded anew: a GradScaler skips the step, and the step goes on.
        """
        sketches = getattr(self.step, key)
        for param, name in self.names.items():
            tensor = param if key == "weights" else param.grad
            is_known = name in sketches and bool(sketches[name][1].isfinite().all())
            if tensor is not None and not is_known and has_memory(tensor):
                sketches[name] = sketch(tensor)
                self.note_type(tensor)

    def before_optimizer(self, optimizer, args, kwargs):
        if optimizer in self.stepped:  # no module was called since
            self.begin_step()
        for group in optimizer.param_groups:
            self.step.settings.append({key: setting(value) for key, value in group.items() if key != "params"})
            for param in group["params"]:
                self.names.setdefault(param, f"parameter {len(self.names)} outside of the model")
        self.record("weights")
        self.record("gradients")  # a closure computes others later: they are recorded in the next step
        self.record("clipped")

    def after_optimizer(self, optimizer, args, kwargs):
        self.stepped.append(optimizer)
        self.step.n_collectives = count_collectives()
        written = self.folder / f"written {self.rank}"  # it gets its name when it is complete
        written.write_bytes(pickle.dumps(vars(self.step)))  # the class is not importable while the script is __main__
        written.rename(self.folder / f"step {self.rank} {self.step.number:06}")
        if self.step.number == self.args.steps:  # counted from 0: it begins with the result of the last step to compare
            sys.stdout.flush()
            (self.folder / f"done {self.rank}").touch()
            threading.Event().wait()  # until this process is killed, since other ranks may still need it


# ---- sketches ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def random_weights(n):
    """The first n numbers of one sequence, each between 0.5 and 1, of either sign."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(n, generator=generator, dtype=torch.float64, device="cpu") - 0.5
    return numbers + 0.5 * numbers.sign()


def sketch(tensor):
    """The shape of a tensor, 64 sums, and the plain sum.

    The 64 sums have random signs. Their distance is about that of two tensors. All ranks that hold a part of a DTensor
    must call it.
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


def setting(value):
    """A number in 12 digits, since it may be computed in another order, and the type of an object without a value."""
    if torch.is_tensor(value) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float):
        return f"{value:.12g}"
    return repr(value) if isinstance(value, int | str | tuple | list | None) else type(value).__name__


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
    """Is it no shard, no view of a larger memory, and without hooks of the script's own?"""
    is_whole = not hasattr(tensor, "full_tensor") and tensor.untyped_storage().nbytes() == tensor.nbytes
    return is_whole and not tensor._backward_hooks and not getattr(tensor, "_post_accumulate_grad_hooks", None)


def has_memory(tensor):
    is_plain = tensor.layout == torch.strided and not hasattr(tensor, "full_tensor")
    return not is_plain or tensor.untyped_storage().nbytes() >= tensor.nbytes


def count_collectives():
    """The collectives of this process, in all groups of several. NaN, which equals no number, if none are counted."""
    try:
        groups = [group for group in torch.distributed.distributed_c10d._world.pg_map if group.size() > 1]
        backends = [group._get_backend(device) for group in groups for device in group._device_types]
        return sum(backend._get_sequence_number_for_group() for backend in backends)
    except RuntimeError:
        return math.nan


# ---- in each rank: prepare it, and run the script ------------------------------------------------------------------


def run_rank(folder, args):
    """Run the script in this process, and record it into files in the folder."""
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    if not args.float32:
        torch.set_default_dtype(torch.float64)
    for name in DROPOUT:
        setattr(nn.functional, name, lambda input, *args, **kwargs: input)
    nn.functional.scaled_dot_product_attention = without_dropout(nn.functional.scaled_dot_product_attention)
    compile = torch.compile  # it is off, by TORCH_COMPILE_DISABLE, with which it refuses `fullgraph`
    torch.compile = lambda *args, fullgraph=False, **kwargs: compile(*args, **kwargs)
    nn.SyncBatchNorm.forward = on_cpu_too(nn.SyncBatchNorm.forward)
    DistributedDataParallel._passing_sync_batchnorm_handle = lambda ddp, module: None  # it refuses it on the CPU
    look_at_processes(args.seed)
    Recorder(folder, args).install()
    set_seeds(args.seed + int(os.environ["RANK"]))
    sys.argv = [args.script, *[for_processes(arg, int(os.environ["WORLD_SIZE"])) for arg in args.args]]
    sys.path[0] = os.getcwd() if args.is_module else str(Path(args.script).resolve().parent)
    try:
        if args.is_module:
            runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(args.script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    Path(folder, f"done {os.environ['RANK']}").touch()


def end_with_parent(parent):
    """End this rank and all that it has started, if parity.py is killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def for_processes(arg, nproc):
    arg = re.sub(SHARE, lambda found: str(int(found[1]) // nproc), arg)
    return re.sub(r"(?<!^-)(?<!^--)\bN\b", str(nproc), arg)  # -N is an option of the script


def set_seeds(seed):
    """Another one on each rank, since the ranks of a script that sets no seed draw different numbers, too."""
    torch.manual_seed(seed)
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed)


def without_dropout(attention):
    def call(query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
        return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    return call


def switch_off_random_layers(module, eval_norm):
    for each in module.modules():
        if isinstance(each, nn.RNNBase):
            each.dropout = 0.0
        is_random_depth = type(each).__name__.endswith(("DropPath", "StochasticDepth"))
        if is_random_depth or (eval_norm and isinstance(each, nn.modules.batchnorm._BatchNorm)):
            each.training = False


def on_cpu_too(forward):
    """SyncBatchNorm.forward, also on the CPU, which torch refuses: there each rank computes for the whole batch."""

    def call(norm, x):
        if x.device.type != "cpu" or not norm.training or not torch.distributed.is_initialized():
            return forward(norm, x)
        from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Shard

        mesh = DeviceMesh.from_group(norm.process_group or torch.distributed.group.WORLD, "cpu")
        whole = DTensor.from_local(x, mesh, [Shard(0)]).full_tensor(grad_placements=[Partial()])
        result = nn.modules.batchnorm._BatchNorm.forward(norm, whole)
        return result.chunk(mesh.size())[mesh.get_local_rank()].clone()  # the next layer may change it in place

    return call


def look_at_processes(seed):
    """When the script makes its group, start watch.py if it is beside this file. Call here what it would spawn."""
    pid = os.getpid()
    init_process_group = torch.distributed.init_process_group
    start_process = multiprocessing.process.BaseProcess.start
    watch = None
    if is_beside("watch.py"):
        import watch

    def init_and_watch(*args, **kwargs):
        if os.getpid() != pid:
            sys.exit(OWN_PROCESSES)
        init_process_group(*args, **kwargs)
        if watch:
            watch.start()

    def start_other(process):
        with mock.patch.dict(os.environ):
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # with it, it would wait as a rank of this job
            start_process(process)

    def run_here(function, args=(), nprocs=1, start_method="spawn", **ignored):
        """Instead of torch.multiprocessing.spawn."""
        if nprocs != int(os.environ["WORLD_SIZE"]):
            sys.exit(OWN_PROCESSES)
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the script has chosen a port of its own
        if start_method != "fork":
            set_seeds(seed + int(os.environ["RANK"]))  # a fresh process inherits no seed
        function(int(os.environ["RANK"]), *args)

    torch.distributed.init_process_group = init_and_watch
    multiprocessing.process.BaseProcess.start = start_other
    torch.multiprocessing.spawn = torch.multiprocessing.start_processes = run_here


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
