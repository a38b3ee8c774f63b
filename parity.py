"""Does a script train on N processes as on one? Run it on both, compare, and name the first thing that differs.

    python parity.py train.py                          # on 1 and on 2 processes, on GPUs or on the CPU
    python parity.py --nproc 4 --steps 10 train.py --epochs 1
    python parity.py train.py --batch-size 64/N        # 64, and 32 on two processes: the global batch must stay
    python parity.py train.py --snapshot-path run-N.pt # a lone N becomes the number of processes
    python parity.py --seed 0 -m package.train         # a module, and a seed for a script that sets none

    train.py: equal on 1 and 2 processes for 5 steps, up to 7.4e-16 (allowed: 1e-10), judged in float64
    other.py: on 2 processes in step 1 the gradient of weight differs by 4.2e-01: the global batch has 128 samples, and
    64 on one process. It must be divided by the number of processes, once, and no sample may be repeated

It works for every script that torchrun can start, also for one that uses nothing of this project. It needs only torch,
and it does not change the script: hooks look at the outermost module that is trained, at clipping and at the optimizer.
Numbers are float64 where the script allows it, and dropout is off, so what should be equal is equal up to about 1e-12.

The verdict follows from one rule. A gradient on which all ranks agree must equal the gradient of one process. Where the
ranks disagree, the weights after the step decide: they must be the same on all ranks, and those of one process. The
limit belongs to the lowest type that computes: see `LIMITS`. docs/parity.md says what cannot be seen.
The exit status is 0 if the runs are equal, 1 if they are not, and 2 if they could not be compared.

`Recorder` writes the steps of each rank into a file, and `first_difference` gives the verdict. This file is complete.
If parity_why.py lies beside it, the likely cause is named too. With watch.py, a job that hangs is ended early.
"""

import argparse
import contextlib
import dataclasses
import functools
import inspect
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
from torch.utils.data import DataLoader


class Limits(NamedTuple):
    """The largest relative differences that are allowed."""

    gradients: float  # from one process
    ranks: float  # from another rank, of gradients and of weights
    weights: float  # from one process, of how far they have moved. Adam amplifies the rounding of a gradient


# By the number of bytes of the lowest type that computes. Right scripts were at most 7e-12, 1e-5 and 0.03 apart.
LIMITS = {8: Limits(1e-10, 1e-10, 1e-6), 4: Limits(1e-3, 0.01, 0.1), 2: Limits(0.1, 0.01, 0.1)}
ROUNDING = 1e-15  # of all gradients: an element that is smaller, and not 0, is nothing but rounding
ALONE = "each of them trains alone"
WORDS = {  # by kind of difference. In a step they are asked in this order
    "group": f"no process group is made: {ALONE}",
    "collectives": f"a rank communicates with no other rank: {ALONE}",
    "nan": "nothing can be compared: the gradient of {name} is NaN or infinite on one process too",
    "zero": "nothing is trained, on one process too: all gradients are 0, or no parameter has one",
    "still": "nothing is trained, on one process too: no weight moves",
    "cut": "the first step begins with other weights than on one process ({name}, which is cut)",
    "begin on a rank": "the first step begins with other weights on rank {rank} than on other ranks ({name})",
    "begin": "the first step begins with other weights than on one process ({name} differs by {size:.1e})",
    "ranks": "in step {step} {name} ends otherwise on rank {rank} than on other ranks, by {size:.1e}",
    "gradients": "in step {step} the gradient of {name} differs by {size:.1e}",
    "clipped": "in step {step} the gradient of {name} differs by {size:.1e} when the optimizer gets it",
    "unmoved": "in step {step} no weight moves",
    "weights": "in step {step} {name} has moved otherwise since the start, by {size:.1e}",
    "settings": "in step {step} the optimizer's {name} is another one on rank {rank} than on one process",
    "undecided": "in step {step} rank {rank} has another gradient of {name} than other ranks, and no weight moves",
    "steps": "the ranks take {name} steps, and one process takes {size}",
}
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # SyncBatchNorm is none of these
DROPOUT = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
CASTS = ("to", "type", "half", "bfloat16", "float")
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # as they are named in modules
OWN_PROCESSES = "the script starts its own processes: start it so that torchrun could, with one process for each rank"
IN_RANK = "--in-a-rank"


def main(argv):
    args = parse_args(argv)
    reference, failure = run(args, args.reference)
    if failure:
        print(f"{Path(args.script).name}: on {processes_of(args)} it {failure}")
        return 2
    return report(args, reference, *run(args, args.nproc))


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


def report(args, reference, ranks, failure):
    """Compare the ranks with one process, or each with its rank of the reference. Returns the exit status."""
    name = f"{Path(args.script).name}:"
    difference, largest = None, 0.0
    for number, one in enumerate(reference):
        got = ranks[number :: args.reference]
        if not all(got):
            break
        difference = first_difference(one, got, have_ended=not failure)
        if difference:
            line = in_words(difference, one, got)
            if args.reference > 1:
                line = line.replace("one process", processes_of(args))
                line += f". Ranks {listed(range(number, args.nproc, args.reference))} are compared with rank {number}"
            print(f"{name} on {args.nproc} processes {line}")
            break
        found = comparisons(one, got)
        largest = max(largest, *[each.largest for each in found])
        sizes = {name: math.prod(shape) for step in one for name, (shape, *_) in step.gradients.items()}
        left_out = [each for each in sizes if not any(each in step.compared for step in found)]
        if left_out:
            print(f"{name} not compared: {len(left_out)} tensors that the script cuts or names anew, as {left_out[0]}")
        if not failure and 2 * sum(sizes[each] for each in left_out) > sum(sizes.values()):
            failure = "holds most weights that are trained under other names, or in parts (as under FSDP1)"
    if failure:
        print(f"{name} on {args.nproc} processes it {failure}")
        return 2
    if difference:
        return 1
    steps = [step for each in (*reference, *ranks) for step in each]
    n_steps = min(map(len, (*reference, *ranks))) - 1  # the last one begins with the result of the last but one
    line = f"{name} equal on {args.reference} and {args.nproc} processes for {max(n_steps, 1)} steps"
    limits, types = limits_of(steps), listed(sorted(types_of(steps)))
    allowed = limits.gradients if largest <= limits.gradients else limits.weights
    print(f"{line}, up to {largest:.1e} (allowed: {allowed:g}), judged in {types}")
    return 0


def in_words(difference, one, ranks):
    """The difference, and its likely cause if parity_why.py is beside this file."""
    words = WORDS[difference.kind].format(**vars(difference))
    if not Path(__file__).with_name("parity_why.py").exists():
        return words
    import parity_why

    cause = parity_why.cause(difference, one, ranks)
    return f"{words}: {cause}" if cause else words


def processes_of(args):
    return "one process" if args.reference == 1 else f"{args.reference} processes"


def listed(values):
    return " and ".join(", ".join(map(str, values)).rsplit(", ", 1))


# ---- start and end of the ranks ------------------------------------------------------------------------------------


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
            ended = [rank for rank, log in enumerate(logs) if statuses[rank] == 0 or marker(log, "ended").exists()]
            before = f". Without an error ends rank {listed(ended)}" if ended else ""
            return f"fails on rank {rank}: {last_line(logs[rank]) or f'exit status {statuses[rank]}'}{before}"
        done = [marker(log, "done").exists() for log in logs]
        if all(is_done or status == 0 for is_done, status in zip(done, statuses, strict=True)):
            return None
        if any(done):
            timeout = min(timeout, 2 * (time.monotonic() - begin) + 10)  # for the others: they may never come
        for line in re.findall("no progress for .*", "".join(log.read_text(errors="replace") for log in logs)):
            if "computing, or ended" not in line:
                return f"stands still: {line}"
        time.sleep(0.05)
    return f"stands still: it has not ended after {timeout:.0f} s"


def marker(log, event):
    """The file that a rank makes when it is `done` with all steps, or when the script has `ended`."""
    return log.with_name(log.name.replace("printed", event))


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


def read_steps(path):
    """Of each step the last record. A process may have been killed while it wrote."""
    steps = {}
    with contextlib.suppress(FileNotFoundError, EOFError, pickle.UnpicklingError), open(path, "rb") as file:
        while True:
            step = Step(**pickle.load(file))
            steps[step.number] = step
    return list(steps.values())


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
    replicated: set = dataclasses.field(default_factory=set)  # names of the parameters under DDP
    inputs: dict = dataclasses.field(default_factory=dict)  # (rows_of each call, width of a row), by name
    clues: dict = dataclasses.field(default_factory=dict)  # BatchNorms, seeds and samplers, for the cause
    is_alone: bool = False  # though several processes were started
    n_collectives: int = 0  # since the start of the process


@dataclasses.dataclass
class Difference:
    """The first one of a run. `kind` is a key of WORDS, and `size` is relative to the size of the tensor."""

    step: int  # counted from 1
    kind: str
    name: str = ""
    size: float = 0.0
    rank: int | None = None


def first_difference(one, ranks, have_ended=True):
    """Compare the steps of one process with those of each rank. Returns a Difference, or None if all is equal.

    If all `have_ended`, they must have taken as many steps.
    """
    return next(differences(one, ranks, have_ended), None)


def differences(one, ranks, have_ended):
    for name in not_finite(*one):
        yield Difference(1, "nan", name)
    begin, end = one[0].weights, one[-1].weights
    if not any(sums.any() for step in one for _, sums, *_ in step.gradients.values()):
        yield Difference(1, "zero")
    has_moved = any(not begin[name][1].equal(end[name][1]) for name in begin.keys() & end.keys())
    if len(one) > 1 and not has_moved and limits_of(one) == LIMITS[8]:  # rounding may undo small changes
        yield Difference(1, "still")
    if any(steps[0].is_alone for steps in ranks):
        yield Difference(1, "group")
    for name in cut_otherwise(one[0], *[steps[0] for steps in ranks]):
        yield Difference(1, "cut", name)
    found = comparisons(one, ranks)
    for number, comparison in enumerate(found, 1):
        for kind in WORDS:
            for name, (size, rank) in comparison.wrong.get(kind, {}).items():
                yield Difference(number, kind, name, size, rank)
    moved = set().union(*[each.moved for each in found])
    for number, comparison in enumerate(found, 1):
        for name, (size, rank) in undecided(comparison, moved):
            yield Difference(number, "undecided", name, size, rank)
    counts = list(map(len, ranks))
    if have_ended and set(counts) != {len(one)}:
        yield Difference(min(counts), "steps", listed(counts), len(one))
    is_silent = any(steps[-1].n_collectives == steps[0].n_collectives for steps in ranks)
    if min(counts) > 1 and is_silent and all(n_samples(steps[0]) == n_samples(one[0]) for steps in ranks):
        yield Difference(min(counts), "collectives")


def undecided(found, moved):
    """Yield (name, (size, rank)) of gradients on which ranks disagree in low types, though rounding undoes all moves.

    If one rank has that of one process, it is the owner of the parameter.
    """
    for key in ("gradients", "clipped"):
        whole = getattr(found.one, key)
        far = [distances(whole, getattr(rank, key)) for rank in found.ranks]
        for name, apart_by in found.apart[key].items():
            nearest = min([each[name] for each in far if name in each], default=0.0)
            if found.limits != LIMITS[8] and name not in moved and nearest > found.limits.gradients:
                yield name, apart_by


def not_finite(*steps):
    return [name for step in steps for name, (_, sums, *_) in step.gradients.items() if not sums.isfinite().all()]


def n_samples(step):
    return {name: len(rows) for name, (rows, _) in step.inputs.items()}


def cut_otherwise(one, *ranks):
    """The names of tensors whose parts, one for each rank, do not add up to the whole one at the start."""
    for name, (shape, _, total, _) in one.weights.items():
        parts = [each.weights[name] for each in ranks if name in each.weights]
        are_all = len(parts) > 1 and sum(math.prod(part[0]) for part in parts) == math.prod(shape)
        if are_all and not math.isclose(sum(part[2] for part in parts), total, rel_tol=1e-6, abs_tol=1e-9):
            yield name


def types_of(steps):
    return set().union(*[step.types for step in steps])


def limits_of(steps):
    sizes = [getattr(torch, name).to_real().itemsize for name in types_of(steps)]
    return LIMITS[max(2, min(sizes, default=8))]


def comparisons(one, ranks):
    """One Comparison for each step that all have recorded."""
    limits = limits_of(step for steps in (one, *ranks) for step in steps)
    recorded = list(zip(one, *ranks, strict=False))
    steps = [[aligned(step[0], each) for each in step] for step in recorded]
    begin, noise, found = {}, set(), []
    for number, step in enumerate(steps):
        noise = noise.union(*map(rounded, recorded[number]))
        new = step[0].weights.keys() - begin.keys()
        begin = step[0].weights | begin
        after = steps[number + 1] if number + 1 < len(steps) else None  # the result of the last step is not known
        found.append(Comparison(step, after, begin, new, noise, limits))
    return found


def aligned(one, step):
    """The step with the sums of those tensors that one process has in the same shape. Others are cut, or renamed."""
    tensors = {}
    for key in ("weights", "gradients", "clipped"):
        whole = getattr(one, key)
        named = getattr(step, key).items()
        tensors[key] = {name: sums for name, (shape, sums, *_) in named if name in whole and whole[name][0] == shape}
    return dataclasses.replace(step, **tensors)


def rounded(step):
    """The names of gradients with elements that are nothing but rounding, as softmax ignores the bias of keys.

    Adam and signs amplify them, so the weights say nothing.
    """
    size = math.hypot(*[sums.norm() for _, sums, *_ in step.clipped.values()])
    return {name for name, (*_, least) in step.clipped.items() if least < ROUNDING * size}


class Comparison:
    """One step of all ranks against that of one process: `step` and `after` are [of one process, of rank 0, …].

    `apart` has by key the names on which ranks disagree, and `wrong` by kind what decides, each with its size.
    """

    def __init__(self, step, after, begin, new, noise, limits):
        self.one, *self.ranks = step
        self.limits, self.compared, self.moved, self.largest = limits, set(), set(), 0.0
        self.settings = list(other_settings(self.one, self.ranks))
        self.exact = set().union(*[each.replicated for each in self.ranks])
        starts = [{name: each.weights[name] for name in new & each.weights.keys()} for each in step]
        self.apart = {}
        self.wrong = {"begin on a rank": apart(starts[1:], limits.ranks), "begin": apart(starts, limits.ranks)}
        self.compare_gradients("gradients")
        self.compare_gradients("clipped")
        if after:
            self.compare_weights(*[moves(begin, each) for each in after], noise=noise)
        elif self.settings:  # they may make up for other gradients, which is not known
            self.wrong["gradients"], self.wrong["clipped"], self.settings = {}, {}, []
        if self.settings and limits != LIMITS[8]:  # rounding hides much of what they do
            key, rank, *_ = self.settings[0]
            self.wrong["settings"] = {key: (0.0, rank)}

    def compare_gradients(self, key):
        """Those on which all ranks agree must equal those of one process."""
        tensors = [getattr(each, key) for each in self.ranks]
        self.apart[key] = apart(tensors, min(self.limits.gradients, self.limits.ranks), self.exact)
        far = farthest(getattr(self.one, key), tensors)
        agreed = {name: size for name, size in far.items() if name not in self.apart[key]}
        self.compared |= agreed.keys()
        self.wrong[key] = too_far(agreed, self.limits.gradients)
        right = [size for name, size in agreed.items() if name not in self.wrong[key]]
        self.largest = max([self.largest, *right])

    def compare_weights(self, one, *ranks, noise):
        """Those whose gradients differ between ranks decide, and in float64 all others, too."""
        disagreeing = self.apart["gradients"].keys() | self.apart["clipped"].keys()
        self.wrong["ranks"] = apart(ranks, self.limits.ranks, self.exact | disagreeing)
        far = farthest(one, ranks)
        self.moved = {name for each in ranks for name, change in each.items() if change.any()}
        if not self.moved and any(change.any() for change in one.values()):
            self.wrong["unmoved"] = {"": (0.0, None)}
        are_equal = self.moved and not too_far(far, self.limits.weights)
        if self.settings and are_equal and (self.wrong["gradients"] or self.wrong["clipped"]):
            self.wrong["gradients"], self.wrong["clipped"], self.settings = {}, {}, []  # another rate makes up for them
        judged = disagreeing | (far.keys() - noise if self.limits == LIMITS[8] else set())
        self.wrong["weights"] = too_far({name: far[name] for name in far if name in judged}, self.limits.weights)
        self.compared |= self.moved.intersection(judged)
        decided = [far[name] for name in disagreeing & far.keys() if name not in self.wrong["weights"]]
        self.largest = max([self.largest, *decided])


def too_far(far, limit):
    """As `apart` has it, without a rank."""
    return {name: (size, None) for name, size in far.items() if not size <= limit}


def moves(begin, step):
    """How far the weights have moved since the start."""
    return {name: sums - begin[name] for name, sums in step.weights.items() if name in begin}


def distances(whole, tensors):
    """By name, the farthest first.

    They are relative to the size of the tensor and a tenth of all tensors, as small ones may be nothing but rounding.
    """
    far = {name: whole[name].dist(tensors[name]).item() for name in whole if name in tensors}
    sizes = {name: whole[name].norm().item() for name in far}
    tenth = 0.1 * math.hypot(*sizes.values()) + 1e-300
    return {name: far[name] / (sizes[name] + tenth) for name in sorted(far, key=far.get, reverse=True)}


def farthest(whole, ranks):
    """By name, the distance of the farthest rank."""
    found = {}
    for tensors in ranks:
        for name, distance in distances(whole, tensors).items():
            if not distance <= found.get(name, -1):
                found[name] = distance
    return found


def apart(ranks, limit, exact=()):
    """By name, (distance, rank) of the first rank that is too far from the first one that holds the tensor.

    Those with names in `exact` must agree in each bit.
    """
    first, found = {}, {}
    for tensors in reversed(ranks):
        first |= tensors
    for rank, tensors in enumerate(ranks):
        for name, distance in distances(first, tensors).items():
            if not distance <= (0 if name in exact else limit):
                found.setdefault(name, (distance, rank))
    return found


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
        self.called = {}  # inputs of the outermost call that is running
        self.is_model = False  # has the outermost module that is called something to train?
        self.made = []  # what such modules have returned in this step
        self.depth = 0  # of calls of modules, and of backward, which calls modules to recompute activations
        self.step = Step(0)

    def install(self):
        nn.Module.__call__ = self.watched(nn.Module.__call__, self.before_module, self.after_module)
        torch.autograd.backward = self.watched(torch.autograd.backward)  # recomputing activations is no new step
        for name in CLIPPING:
            watched = self.watched(getattr(nn.utils, name), lambda args, kwargs: self.record("gradients"))
            setattr(nn.utils, name, watched)
            setattr(nn.utils.clip_grad, name, watched)
        DataLoader.__iter__ = self.watched(DataLoader.__iter__, self.before_loading)
        DistributedDataParallel.__init__ = self.watched(DistributedDataParallel.__init__, self.before_ddp)
        for name in CASTS:
            setattr(torch.Tensor, name, self.cast(getattr(torch.Tensor, name)))
        register_optimizer_step_pre_hook(self.before_optimizer)
        register_optimizer_step_post_hook(self.after_optimizer)

    def watched(self, function, before=lambda args, kwargs: None, after=lambda result: None):
        """The function between `before(args, kwargs)`, which may return other arguments, and `after(result)`."""

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

        return call

    def cast(self, function):
        """A method that casts a tensor: float32 becomes float64, and lower types are noted where the model computes."""

        @functools.wraps(function)
        def call(tensor, *args, **kwargs):
            result = function(tensor, *args, **kwargs)
            is_cast = torch.is_tensor(result) and (result.dtype != tensor.dtype or function.__name__ == "float")
            if is_cast and result.is_floating_point():
                if result.dtype == torch.float32 and not self.args.float32:
                    return tensor.double().to(result.device)
                for each in (tensor, result):
                    if each.is_floating_point() and (self.depth or result.requires_grad):
                        self.note_type(each)
            return result

        return call

    def note_type(self, tensor):
        self.step.types.add(str(tensor.dtype).removeprefix("torch."))

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
        if is_random_depth or (self.args.eval_norm and isinstance(module, (*BATCH_NORM, nn.SyncBatchNorm))):
            module.training = False
        if self.depth > 0:
            return None
        self.is_model = any(param.requires_grad for param in module.parameters())
        if not self.is_model or not torch.is_grad_enabled():
            return None
        if self.stepped:
            self.begin_step()
        root = unwrapped(module)
        if root not in self.roots:
            if root is module:  # no wrapper of the script's own, which may hold parts of its parameters
                self.make_float64(root)
            self.roots.append(root)
        self.record("weights")
        self.note_inputs(root, inputs, kwargs)
        if next(root.parameters()).dtype == torch.float64:
            return pytree.tree_map(as_float64, (args, kwargs))
        return None

    def after_module(self, result):
        leaves = [each for each in pytree.tree_leaves(result) if torch.is_tensor(each)]
        tensors = [each for each in leaves if each.requires_grad]
        for each in tensors:
            self.note_type(each)
        if self.depth == 0 and self.is_model:
            self.made += leaves
        if self.depth == 0 and self.called:
            inputs, self.called = self.called, {}
            for each in tensors:
                each.register_hook(lambda gradient: self.count(inputs))
            if not tensors:  # the result is an object that holds tensors
                self.count(inputs)

    def begin_step(self):
        self.stepped, self.made = [], []
        self.step = Step(self.step.number + 1)

    def make_float64(self, module):
        """Convert a model of float32, unless the script may hold parts of its parameters: see `is_untouched`."""
        tensors = [each for each in (*module.parameters(), *module.buffers()) if each.dtype.is_floating_point]
        is_float = all(each.dtype in (torch.float32, torch.float64) for each in tensors)
        if is_float and not self.args.float32 and all(map(is_untouched, tensors)):
            module.double()

    def note_inputs(self, root, args, kwargs):
        """Keep what the call gets until its result gets a gradient. So an evaluation does not count."""
        norms = [(name, each) for name, each in root.named_modules() if isinstance(each, BATCH_NORM) and each.training]
        known = self.step.clues.setdefault("norms", [])
        known += [without_wrappers(name) for name, _ in norms if not self.args.eval_norm]
        made = set(map(memory_of, self.made))
        inputs = inspect.signature(root.forward).bind(*args, **kwargs).arguments
        for path, value in pytree.tree_flatten_with_path(dict(inputs))[0]:
            name = re.sub(r"\W+", ".", pytree.keystr(path)).strip(".")  # as batch.labels for ['batch']['labels']
            if not torch.is_tensor(value) or (value.grad_fn is None and memory_of(value) not in made):
                self.called[self.prefix(root) + name] = rows_of(value)  # what another model has made is no sample
        if all(param.grad is None for param in root.parameters()):  # what earlier backwards added is thrown away
            for name in self.called:
                self.step.inputs.pop(name, None)

    def count(self, inputs):
        """The samples of a call count once, when its result gets a gradient."""
        for name, (rows, width) in inputs.items():
            before, _ = self.step.inputs.get(name, (rows[:0], width))
            self.step.inputs[name] = (torch.cat([before, rows]), width)
        inputs.clear()

    def before_optimizer(self, optimizer, args, kwargs):
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        if optimizer in self.stepped:  # no module was called since
            self.begin_step()
        self.record("weights")
        self.record("gradients")  # a closure computes others later: they are recorded in the next step
        self.record("clipped")
        for group in optimizer.param_groups:
            self.step.settings.append({key: repr(value) for key, value in group.items() if key != "params"})

    def after_optimizer(self, optimizer, args, kwargs):
        self.stepped.append(optimizer)
        self.write_step()  # once more after each further optimizer: the last one counts
        # Counted from 0: it begins with the result of the last step to compare.
        if self.step.number == self.args.steps:
            sys.stdout.flush()
            self.done.touch()
            threading.Event().wait()  # until this process is killed, since other ranks may still need it

    def write_step(self):
        step = self.step
        step.clues |= {"torch.initial_seed()": torch.initial_seed(), "the DataLoader's sampler": listed(self.samplers)}
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
                self.note_type(tensor)

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
        return f"model {number} ({type(root).__name__})." if number > 1 else ""


# ---- sketches ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def random_weights(n):
    """The first n numbers of one sequence, each between 0.5 and 1, of either sign."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(n, generator=generator, dtype=torch.float64, device="cpu") - 0.5
    return numbers + 0.5 * numbers.sign()


def sketch(tensor):
    """The shape of a tensor, 64 sums, the plain sum, and the size of the smallest element that is not 0.

    The sums have random signs. Their distance is about that of two tensors. All ranks that hold a part of a DTensor
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
    least = flat.abs().masked_fill(flat == 0, math.inf).min().item() if len(flat) else math.inf
    return tuple(tensor.shape), products.view(-1, 64).sum(dim=0), flat.sum().item(), least


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
    return memory_of(tensor) is None or tensor.untyped_storage().nbytes() >= tensor.nbytes


def memory_of(tensor):
    """The address, which views share, or None of a DTensor or a sparse tensor."""
    has_storage = tensor.layout == torch.strided and not hasattr(tensor, "full_tensor")
    return tensor.untyped_storage().data_ptr() if has_storage else None


def count_collectives():
    """The collectives of this process, in all its groups. NaN, which equals no number, if a backend does not count."""
    try:
        groups = list(torch.distributed.distributed_c10d._world.pg_map)
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
    switch_off_dropout()
    compile = torch.compile  # it is off, by TORCH_COMPILE_DISABLE, with which it refuses `fullgraph`
    torch.compile = lambda *args, fullgraph=False, **kwargs: compile(*args, **kwargs)
    nn.SyncBatchNorm.forward = synchronized(nn.SyncBatchNorm.forward)
    DistributedDataParallel._passing_sync_batchnorm_handle = lambda ddp, module: None  # it refuses it on the CPU
    look_at_process_group(args.seed)
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
    Path(folder, f"ended {os.environ['RANK']}").touch()


def end_with_parent(parent):
    """End this rank and all that it has started, if parity.py is killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def for_processes(arg, nproc):
    arg = re.sub(r"\b(\d+)/N\b", lambda found: str(int(found[1]) // nproc), arg)
    return re.sub(r"(?<!^-)\bN\b", str(nproc), arg)  # -N is an option of the script


def set_seeds(seed):
    """Those of a script that sets none differ between ranks. So do these."""
    torch.manual_seed(seed)
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed)


def switch_off_dropout():
    functional = nn.functional
    for name in DROPOUT:
        setattr(functional, name, lambda input, *args, **kwargs: input)
    attention = functional.scaled_dot_product_attention

    def without_dropout(query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
        return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    functional.scaled_dot_product_attention = without_dropout


class AllGather(torch.autograd.Function):
    """The tensors of all ranks, one after the other. Each rank gets back the sum of the gradients of its own."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        tensors = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(tensors, tensor.contiguous(), group=group)
        return torch.cat(tensors)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return share(gradient, ctx.group), None


def share(tensor, group):
    parts = tensor.chunk(torch.distributed.get_world_size(group))
    return parts[torch.distributed.get_rank(group)].clone()  # a layer that follows may change it in place


def synchronized(forward):
    """SyncBatchNorm.forward, also on the CPU, which torch refuses: there each rank computes for the whole batch."""

    def call(norm, x):
        if x.device.type != "cpu" or not norm.training or not torch.distributed.is_initialized():
            return forward(norm, x)
        group = norm.process_group or torch.distributed.group.WORLD
        return share(nn.modules.batchnorm._BatchNorm.forward(norm, AllGather.apply(x, group)), group)

    return call


def look_at_process_group(seed):
    """Start watch.py, if it is beside this file, when the script makes its group, and refuse its own processes."""
    pid = os.getpid()
    init_process_group = torch.distributed.init_process_group
    start_process = multiprocessing.process.BaseProcess.start
    watch = None
    if Path(__file__).with_name("watch.py").exists():
        import watch

    def init_and_watch(*args, **kwargs):
        if os.getpid() != pid:  # a fork
            sys.exit(OWN_PROCESSES)
        init_process_group(*args, **kwargs)
        if watch:
            watch.start()

    def start_other(process):
        """A fresh process is refused by gloo when it makes a group, with the name of the interface in the message."""
        with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME=OWN_PROCESSES):
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
            start_process(process)

    def run_here(function, args=(), nprocs=1, join=True, daemon=False, start_method="spawn"):
        """Instead of torch.multiprocessing.spawn. A fresh process inherits no seed."""
        if nprocs != int(os.environ["WORLD_SIZE"]):
            sys.exit(OWN_PROCESSES)
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # the script has chosen a port of its own
        rank = int(os.environ["RANK"])
        if start_method != "fork":
            set_seeds(random.SystemRandom().getrandbits(32) if seed is None else seed + rank)
        function(rank, *args)

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
