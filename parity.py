"""Does a script train on N processes as on one? Run it on both, compare, and name the first thing that differs.

    python parity.py train.py                                # on 1 and on 2 processes, on GPUs or on the CPU
    python parity.py --nproc 2 4 --steps 10 train.py --epochs 1
    python parity.py train.py --batch-size 64/N              # 64, and 32 on two processes: the global batch must stay
    python parity.py train.py --snapshot-path run-N.pt       # a lone N becomes the number of processes

    train.py: equal on 1 and 2 processes for 5 steps, up to 7.6e-16 (allowed: 1e-10)
    train.py: on 2 processes step 2 begins with other weights than on one process (weight differs by 7.7e-02). In step 1
    the global batch has 128 samples, and 64 on one process. It must be divided by the number of processes, once

It works for every script that torchrun can start, also for one that uses nothing of this project. It needs only torch,
and it does not change the script: hooks look at the outermost module that is trained, at clipping and at the optimizer.
Numbers are float64 where the script leaves torch's default type alone, and dropout is off, so what should be equal is
equal up to about 1e-12.

The weights at the start of each step decide. Only if they differ, the step before is asked for the reason: see `why`.
Gradients that are N or 1/N times those of one process are told in any case, because clipping and Adam hide them.
docs/parity.md says what it cannot see. The exit status is 0 if the runs are equal, 1 if they are not, and 2 if they
could not be compared.
"""

import argparse
import contextlib
import functools
import inspect
import json
import os
import pickle
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

ALLOWED = {torch.float64: 1e-10, torch.float32: 1e-3}  # the largest relative difference, by type
ALLOWED_IN_OTHERS = 0.05
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # SyncBatchNorm is none of these
DROPOUT = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


# ---- in each process: hooks that record every step -----------------------------------------------------------------


class Recorder:
    """Writes what each step begins with and uses into a file. After the last one the process stands still.

    A step ends when a module that is trained is called after an optimizer has stepped.
    """

    def __init__(self, folder, steps, eval_norm):
        rank = os.environ["RANK"]
        self.file = open(Path(folder, f"records {rank}"), "wb")  # noqa: SIM115 - open until the process ends
        self.done = Path(folder, f"done {rank}")
        self.steps = steps
        self.eval_norm = eval_norm
        self.roots = []  # the outermost modules that are trained, in the order of their first calls
        self.optimizers = []  # in the order of their first steps
        self.depth = 0  # of calls of modules, and of backward, which calls modules to recompute activations
        self.optimizing = 0  # optimizers that are stepping, one inside the other
        self.begin_step(0)

    def begin_step(self, number):
        self.stepped = False
        self.now = {"number": number, "settings": [], "norms": []}
        self.now |= {"weights": {}, "inputs": {}, "gradients": {}, "clipped": {}}

    def install(self):
        nn.Module.__call__ = self.watched(nn.Module.__call__, self.before_module)
        # Activations that backward recomputes are no new step.
        torch.autograd.backward = self.watched(torch.autograd.backward, lambda args, kwargs: (args, kwargs))
        for name in CLIPPING:
            setattr(nn.utils, name, self.watched(getattr(nn.utils, name), self.before_clipping))
        register_optimizer_step_pre_hook(self.before_optimizer)
        register_optimizer_step_post_hook(self.after_optimizer)

    def watched(self, function, before):
        @functools.wraps(function)
        def call(*args, **kwargs):
            args, kwargs = before(args, kwargs)
            self.depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1

        return call

    def before_module(self, args, kwargs):
        module, *inputs = args
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
        if self.eval_norm and isinstance(module, BATCH_NORM):
            module.training = False
        is_trained = torch.is_grad_enabled() and any(param.requires_grad for param in module.parameters())
        if self.depth > 0 or not is_trained:
            return args, kwargs
        if self.stepped:
            self.begin_step(self.now["number"] + 1)
        root = unwrapped(module)
        if root not in self.roots:
            self.roots.append(root)
        self.record("weights")
        for name, layer in root.named_modules():
            if isinstance(layer, BATCH_NORM) and layer.training:
                self.now["norms"].append(name)
        self.record_inputs(root, inputs, kwargs)
        if next(root.parameters()).dtype == torch.float64:
            args, kwargs = pytree.tree_map(as_double, (args, kwargs))
        return args, kwargs

    def record_inputs(self, root, args, kwargs):
        inputs = inspect.signature(root.forward).bind(*args, **kwargs).arguments
        for path, value in pytree.tree_flatten_with_path(dict(inputs))[0]:
            name = re.sub(r"\W+", ".", pytree.keystr(path)).strip(".")  # as batch.labels for ['batch']['labels']
            rows, width = rows_of(value)
            before, _ = self.now["inputs"].get(name, (rows[:0], width))
            self.now["inputs"][name] = (torch.cat([before, rows]), width)

    def before_clipping(self, args, kwargs):
        self.record("gradients")
        return args, kwargs

    def before_optimizer(self, optimizer, args, kwargs):
        self.optimizing += 1
        if self.optimizing > 1:
            return
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        self.record("weights")
        has_closure = any(callable(each) for each in (*args[1:], *kwargs.values()))
        if not has_closure:
            self.record("gradients")
            self.record("clipped")
        for group in optimizer.param_groups:
            self.now["settings"].append({key: repr(value) for key, value in group.items() if key != "params"})

    def after_optimizer(self, optimizer, args, kwargs):
        self.optimizing -= 1
        if self.optimizing == 0:
            self.record("gradients")  # those of a closure
            self.stepped = True
            pickle.dump(self.now, self.file)  # once more after each further optimizer: the last one counts
            self.file.flush()
            if self.now["number"] == self.steps:  # counted from 0: it begins with the result of the last one to compare
                self.stand_still()

    def stand_still(self):
        """Until this process is killed, since other ranks may still need it."""
        sys.stdout.flush()
        self.done.touch()
        threading.Event().wait()

    def record(self, key):
        """Record the tensors that are not yet recorded in this step, but none whose memory the script has freed."""
        for name, param in self.named_params().items():
            tensor = param if key == "weights" else param.grad
            if tensor is not None and name not in self.now[key] and has_memory(tensor):
                self.now[key][name] = sketch(tensor)

    def named_params(self):
        named = {}
        for number, root in enumerate(self.roots):
            prefix = f"model {number + 1}." if number else ""
            named |= {prefix + name: param for name, param in root.named_parameters()}
        known = set(named.values())
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        others = [param for group in groups for param in group["params"] if param not in known]
        for number, param in enumerate(others, 1):
            named[f"parameter {number} of {len(others)} outside of the model"] = param
        return named


def unwrapped(module):
    """The module inside the wrappers of torch.compile and DDP."""
    for name in ("_orig_mod", "module", "_orig_mod"):
        inner = getattr(module, name, None)
        if isinstance(inner, nn.Module):
            module = inner
    return module


def as_double(value):
    return value.double() if torch.is_tensor(value) and value.dtype == torch.float32 else value


def has_memory(tensor):
    return hasattr(tensor, "full_tensor") or tensor.untyped_storage().nbytes() >= tensor.nbytes


@functools.lru_cache(maxsize=64)
def random_weights(n):
    """The first n numbers of one sequence, each between 0.5 and 1, of either sign."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(n, generator=generator, dtype=torch.float64, device="cpu") - 0.5
    return numbers + 0.5 * numbers.sign()


def sketch(tensor):
    """Shape, type, and 64 sums of a tensor with random signs, whose distance is about that of two tensors.

    All ranks that hold a part of a DTensor must call it.
    """
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    flat = tensor.cpu().double().flatten()
    flat = nn.functional.pad(flat * random_weights(len(flat)), (0, -len(flat) % 64))
    return tuple(tensor.shape), tensor.dtype, flat.view(-1, 64).sum(dim=0)


def rows_of(value):
    """A weighted sum of each row of an argument, which zeros at its end do not change, and the length of a row.

    None has no rows, nor has what is no tensor.
    """
    if not torch.is_tensor(value) or value.layout != torch.strided or hasattr(value, "full_tensor"):
        return torch.zeros(0, dtype=torch.float64), 0
    rows = value.detach().cpu().double()
    rows = rows.reshape(len(rows), -1) if rows.dim() else rows.view(1, 1)
    return rows @ random_weights(rows.shape[1]), rows.shape[1]


def switch_off_dropout():
    functional = nn.functional
    for name in DROPOUT:
        setattr(functional, name, lambda input, *args, **kwargs: input)
    attention = functional.scaled_dot_product_attention

    def without_dropout(query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
        return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    functional.scaled_dot_product_attention = without_dropout


def watch_from_the_start():
    """Let watch.py, if it is beside this file, begin when the script makes its process group."""
    if not Path(__file__).with_name("watch.py").exists():
        return
    import watch

    init_process_group = torch.distributed.init_process_group

    def init_and_watch(*args, **kwargs):
        init_process_group(*args, **kwargs)
        watch.start()

    torch.distributed.init_process_group = init_and_watch


def end_with_parent(parent):
    """End this rank and all that it has started, if parity.py is killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def run_and_record(float32, **settings):
    """Run the script that sys.argv names, in this process."""
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    if not float32:
        torch.set_default_dtype(torch.float64)
    switch_off_dropout()
    watch_from_the_start()
    Recorder(**settings).install()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


# ---- compare the records -------------------------------------------------------------------------------------------


def compare(one, ranks, have_ended=True):
    """Compare the steps of one process with those of each rank, and their number if all `have_ended`.

    Returns a line about the first difference, or None; the number of equal steps; and the largest difference.
    """
    steps = list(zip(one, *ranks, strict=False))  # (record of one process, record of rank 0, record of rank 1, …)
    largest = 0.0
    if is_nothing_trained(one[: len(steps)]):
        return f"nothing is trained, on one process too: all gradients are 0, or {STALE}", 0, largest
    for number, (expected, *got) in enumerate(steps):
        line = other_weights(expected, got)
        if line and number == 0:
            return f"the first step begins with other weights{line}: {SEEDS}", 0, largest
        if line:
            before, *got_before = steps[number - 1]
            reason = why(before, got_before)
            return f"step {number + 1} begins with other weights{line}. In step {number} {reason}", number - 1, largest
        largest = max([largest, *distances(expected["weights"], united(got, "weights")).values()])
    for number, (expected, *got) in enumerate(steps):
        line = factor(expected, got)
        if line and not other_settings(expected, got):  # another learning rate may make up for the factor
            return f"the weights agree, but in step {number + 1} {line}. Clipping or the optimizer hides it", 0, largest
    counts = list(map(len, ranks))
    if have_ended and set(counts) != {len(one)}:
        return f"the ranks take {listed(counts)} steps, and one process takes {len(one)}", len(steps) - 1, largest
    return None, len(steps) - 1, largest


SEEDS = "is the same seed set before the model is built, and are weights loaded before it is wrapped, or on all ranks?"
STALE = "the optimizer was built before the model was sharded, and holds parameters that nobody uses"


def listed(values):
    return " and ".join(", ".join(map(str, values)).rsplit(", ", 1))


def is_nothing_trained(one):
    has_gradients = any(sums.any() for _, _, sums in one[0]["gradients"].values())
    has_changed = any(distances(one[0]["weights"], one[-1]["weights"]).values())
    return not has_gradients or (len(one) > 1 and not has_changed)


def other_weights(expected, got):
    rank, names = other_rank(expected, got, "weights")
    if names:
        return f" on rank {rank} than on other ranks ({names[0]})"
    weights = united(got, "weights")
    for name in differing(expected["weights"], weights):
        return f" than on one process ({name} differs by {distances(expected['weights'], weights)[name]:.1e})"
    return None


def other_rank(expected, got, key):
    """The first rank with other tensors than the ranks before it, and their names.

    A tensor of another shape or name than on one process is a part that the script has cut, so ranks hold other parts.
    """
    for rank in range(1, len(got)):
        names = differing(united(got[:rank], key), got[rank][key])
        names = [name for name in names if name in distances(expected[key], got[rank][key])]
        if names:
            return rank, names
    return None, []


def united(got, key):
    """The tensors of all ranks by name. Where several ranks have one, it is the first rank's."""
    tensors = {}
    for record in reversed(got):
        tensors |= record[key]
    return tensors


def distances(expected, got):
    """By name, how far apart two tensors are: relative to the first, or to a thousandth of all if that is larger.

    Tensors of unlike shapes cannot be compared.
    """
    floor = 1e-3 * sum(sums.square().sum().item() for _, _, sums in expected.values()) ** 0.5 + 1e-300
    found = {}
    for name, (shape, _, sums) in expected.items():
        if name in got and got[name][0] == shape:
            found[name] = ((got[name][2] - sums).norm() / (sums.norm() + floor)).item()
    return found


def differing(expected, got):
    """The names of the tensors that are farther apart than their type allows."""
    far = distances(expected, got)
    return [name for name, far_apart in far.items() if not far_apart <= allowed(expected[name])]


def allowed(tensor):
    return ALLOWED.get(tensor[1], ALLOWED_IN_OTHERS)


# ---- name the cause: `expected` is a record of one process, `got` are those of all ranks ---------------------------


def why(expected, got):
    """What differs first in a step whose result differs."""
    wrong = wrong_gradients(expected, got)
    if wrong:
        return (
            other_inputs(expected, got)
            or other_gradients_on_ranks(expected, got)
            or factor(expected, got)
            or batch_norm(expected)
            or f"the samples are the same, and the gradient of {wrong[0]} is not: {OTHER_GRADIENT}"
        )
    return (
        other_clipping(expected, got)
        or other_settings(expected, got)
        or stale_parameters(expected, got)
        or other_gradients_on_ranks(expected, got)
        or "samples, gradients and settings are the same: is the optimizer's state, and what follows its step?"
    )


OTHER_GRADIENT = (
    "are the labels, are random numbers drawn in the model, is it a mean over shares of unequal weight, "
    "or does the loss compare samples with each other?"
)


def wrong_gradients(expected, got, key="gradients"):
    """The names of the gradients that no rank has as one process has them.

    One rank that has it is enough: scripts that split the optimizer reduce each gradient to its owner only.
    """
    right = set()
    wrong = {}
    for record in got:
        names = differing(expected[key], record[key])
        wrong |= dict.fromkeys(names)
        right |= distances(expected[key], record[key]).keys() - set(names)
    return [name for name in wrong if name not in right]


def other_inputs(expected, got):
    """Is the global batch another one? Arguments are compared in order, and their rows in any order."""
    equal = []
    for name, (rows, width) in expected["inputs"].items():
        parts, widths = zip(*[record["inputs"].get(name, (rows[:0], width)) for record in got], strict=True)
        together = torch.cat(parts)
        if is_same(together, rows) or all(is_same(part, rows) for part in parts):
            equal.append(name)
            continue
        if not len(rows) or not all(map(len, parts)):
            return f"the argument {name} is None, or missing, on one process or on some ranks only"
        if set(widths) != {width} and len(together) * widths[0] == len(rows) * width:
            return None  # these are pieces of a sequence, which cannot be compared
        if len(together) != len(rows):
            advice = "It must be divided by the number of processes, once"
            if 0 < len(together) - len(rows) < len(parts):
                advice = "The sampler repeats some to make shares equal: drop the last batch, or weight it"
            return f"the global batch has {len(together)} samples, and {len(rows)} on one process. {advice}"
        if all(is_same(part, parts[0]) for part in parts):
            return f"all ranks have the same samples ({name}): is there a sampler that gives each rank its share?"
        if equal:
            advice = "if it is drawn at random, draw it for the global batch, and give each rank its share"
            return f"the argument {equal[0]} is the same, but {name} is not: {advice}"
        return f"the global batch has other samples ({name}): are the data and their order the same on all ranks?"
    return None


def is_same(rows, others):
    if len(rows) != len(others) or not len(rows):
        return len(rows) == len(others)
    return torch.allclose(rows.sort()[0], others.sort()[0], rtol=1e-6, atol=1e-6 * others.abs().max().item())


def other_gradients_on_ranks(expected, got):
    rank, names = other_rank(expected, got, "gradients")
    if not names:
        return None
    line = f"rank {rank} has another gradient of {names[0]} than other ranks"
    if len(names) < len(got[rank]["gradients"]):
        return f"{line}: is it outside of the wrapped model, or was it unfrozen after wrapping?"
    if not other_rank(expected, got, "clipped")[1]:
        return f"{line} when they are clipped: average them first"
    return f"{line}. Nothing averages them: is the plain model trained, or is the last backward inside of no_sync()?"


def factor(expected, got):
    """Are gradients N or 1/N times those of one process?"""
    wrong = wrong_gradients(expected, got)
    for number, words, advice in ((len(got), f"{len(got)}", SUM), (1 / len(got), f"1/{len(got)}", DIVIDED)):
        times = {name: (*expected["gradients"][name][:2], number * expected["gradients"][name][2]) for name in wrong}
        if wrong and not any(differing(times, record["gradients"]) for record in got):
            return f"the gradient of {wrong[0]} is {words} times that of one process: {advice}"
    return None


SUM = "it is summed over the ranks, and not averaged"
DIVIDED = "it is averaged, but the loss is a sum over the samples, or has been divided by the number of processes"


def batch_norm(expected):
    if not expected["norms"]:
        return None
    line = f"the samples are the same, but BatchNorm ({expected['norms'][0]}) uses the mean of each rank's alone"
    return f"{line}. To judge the rest of the script: --eval-norm"


def other_clipping(expected, got):
    for name in wrong_gradients(expected, got, "clipped"):
        return f"the gradient of {name} is the same before clipping, but not after: clip once in a step, at its end"
    return None


def other_settings(expected, got):
    """Another learning rate, for example."""
    for rank, record in enumerate(got):
        if len(record["settings"]) != len(expected["settings"]):
            return f"rank {rank} has another number of optimizers, or of groups of parameters, than one process"
        for settings, expected_settings in zip(record["settings"], expected["settings"], strict=True):
            for key, value in expected_settings.items():
                if settings.get(key) != value:
                    return f"the optimizer's {key} is {settings.get(key)} on rank {rank}, and {value} on one process"
    return None


def stale_parameters(expected, got):
    if len(got[0]["weights"]) <= len(expected["weights"]):
        return None
    return f"rank 0 has parameters outside of the model: {STALE}"


# ---- start the processes -------------------------------------------------------------------------------------------


def run(args, nproc):
    """Returns each rank's records, what rank 0 has printed, and in one line what went wrong, or None."""
    print(f"running on {nproc} {'process' if nproc == 1 else 'processes'}", file=sys.stderr)
    command = [sys.executable, __file__, args.script, *[for_processes(arg, nproc) for arg in args.args]]
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        settings = {"folder": folder, "steps": args.steps, "float32": args.float32, "eval_norm": args.eval_norm}
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        job |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc), "TORCHELASTIC_RUN_ID": "parity"}
        job |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCH_COMPILE_DISABLE": "1"}
        environment = {"OMP_NUM_THREADS": "1", "WATCH_SECONDS": "20"} | os.environ
        environment |= job  # as torchrun does
        environment |= {"PARITY": json.dumps(settings), "TMPDIR": folder}  # the script's temporary files end with ours
        processes = []
        try:
            for rank in range(nproc):
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(start(command, environment.copy(), Path(folder, f"printed {rank}")))
            failure = wait(processes, Path(folder), args.timeout)
        finally:
            for process in processes:
                end(process)
        ranks = [read_records(Path(folder, f"records {rank}")) for rank in range(nproc)]
        printed = Path(folder, "printed 0").read_text(errors="replace")
    taken = list(map(len, ranks))
    if failure:
        failure += f". Steps of each rank: {listed(taken)}"
    elif not all(taken):
        failure = "takes no step of an optimizer of torch.optim on some rank"
    return ranks, printed, failure


def for_processes(arg, nproc):
    arg = re.sub(r"\b(\d+)/N\b", lambda found: str(int(found[1]) // nproc), arg)
    return re.sub(r"\bN\b", str(nproc), arg)


def start(command, environment, log):
    """Start one rank, in a group with all processes that it will start. What it prints goes to the file `log`."""
    files = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with open(log, "w") as file:
        return subprocess.Popen(command, env=environment, stdout=file, start_new_session=True, **files)


def end(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait(processes, folder, timeout):
    """Wait until each rank has ended, or stands still after its last step. Returns what went wrong, or None."""
    begin = time.monotonic()
    logs = [folder / f"printed {rank}" for rank in range(len(processes))]
    while time.monotonic() < begin + timeout:
        statuses = [process.poll() for process in processes]
        if any(statuses):
            return describe_failure(statuses, logs)
        done = [(folder / f"done {rank}").exists() for rank in range(len(processes))]
        if all(is_done or status == 0 for is_done, status in zip(done, statuses, strict=True)):
            return None
        if any(done):
            timeout = min(timeout, 2 * (time.monotonic() - begin) + 10)  # for the others: they may never come
        told = re.findall("no progress for .*", "".join(log.read_text(errors="replace") for log in logs))
        still = [line for line in told if "computing, or ended" not in line]
        if still:
            return f"stands still: {still[0]}"
        time.sleep(0.05)
    return f"stands still: it has not ended after {timeout:.0f} s"


def describe_failure(statuses, logs):
    """Print the end of the log of the rank that has failed first, which is silent for longest. Returns its error."""
    rank = min((rank for rank, status in enumerate(statuses) if status), key=lambda rank: logs[rank].stat().st_mtime)
    lines = logs[rank].read_text(errors="replace").splitlines()
    print(*lines[-20:], sep="\n", file=sys.stderr)
    errors = [line for line in lines if re.match(r"[\w.]+: ", line)] or lines or [f"exit status {statuses[rank]}"]
    return f"fails on rank {rank}: {errors[-1]}"


def read_records(path):
    """Of each step the last record. A process may have been killed while it wrote."""
    records = {}
    with contextlib.suppress(FileNotFoundError, EOFError, pickle.UnpicklingError), open(path, "rb") as file:
        while True:
            record = pickle.load(file)
            records[record["number"]] = record
    return list(records.values())


# ---- report --------------------------------------------------------------------------------------------------------

UNITS = r"\d[\d.,]*\s?(?:s|ms|sec|min|h|[kKMG]i?B|bytes|\S+/s)\b|\d+:[\d:.,]+"  # times, speeds, memory
DECIMAL = r"-?\d+\.\d+(?:e[-+]?\d+)?"


def other_prints(printed, printed_by_ranks):
    """Pairs of lines with the same words, but other numbers with a decimal point."""
    pairs = []
    for line, other in zip(printed.splitlines(), printed_by_ranks.splitlines(), strict=False):
        text, other_text = re.sub(UNITS, "", line), re.sub(UNITS, "", other)
        numbers = zip(re.findall(DECIMAL, text), re.findall(DECIMAL, other_text), strict=False)
        is_other = any(abs(float(a) - float(b)) > 2e-3 * (abs(float(a)) + abs(float(b))) for a, b in numbers)
        if is_other and re.sub(DECIMAL, "", text) == re.sub(DECIMAL, "", other_text):
            pairs.append((line, other))
    return pairs


def report(args, nproc, one, printed):
    """Compare `nproc` processes with one. Prints the result, and returns the exit status."""
    name = f"{Path(args.script).name}:"
    ranks, printed_by_ranks, failure = run(args, nproc)
    for line, other in other_prints(printed, printed_by_ranks)[:3]:
        print(f"printed by 1 process: {line}\nprinted by {nproc} processes: {other}")
    line, n_steps, largest = compare(one, ranks, have_ended=not failure) if all(ranks) else (None, 0, 0.0)
    if line:
        print(f"{name} on {nproc} processes {line}")
    weights = one[0]["weights"]
    compared = distances(weights, united([records[0] for records in ranks if records], "weights"))
    left_out = [each for each in weights if each not in compared]
    if not (failure or line) and not (n_steps and compared):
        failure = "takes one step only, or holds no weight as a whole: nothing can be compared"
    if failure:
        print(f"{name} on {nproc} processes it {failure}")
        return 2
    if left_out:
        print(f"{name} not compared: {len(left_out)} tensors that the script cuts or names anew, as {left_out[0]}")
    if line:
        return 1
    bound = max(allowed(weights[each]) for each in compared)
    print(f"{name} equal on 1 and {nproc} processes for {n_steps} steps, up to {largest:.1e} (allowed: {bound:g})")
    return 0


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], usage="%(prog)s [options] SCRIPT.py ...")
    parser.add_argument("--nproc", type=int, nargs="+", default=[2], help="numbers of processes to compare with one")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps to compare")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that a run may take")
    parser.add_argument("--float32", action="store_true", help="leave torch's default type as it is")
    parser.add_argument("--eval-norm", action="store_true", help="let BatchNorm use its running statistics")
    script = next((number for number, arg in enumerate(argv) if arg.endswith(".py")), len(argv))
    args = parser.parse_args(argv[:script])
    args.script, *args.args = argv[script:] or [""]
    if not Path(args.script).is_file():
        parser.error(f"there is no script {args.script!r}: name a file that ends in .py, before its arguments")
    if min(args.nproc) < 2:
        parser.error(f"argument --nproc: {min(args.nproc)} must be at least 2, to be compared with one process")
    if args.steps < 1:
        parser.error(f"argument --steps: {args.steps} must be at least 1")
    for number in re.findall(r"\b(\d+)/N\b", " ".join(args.args)):
        for nproc in args.nproc:
            if int(number) % nproc:
                parser.error(f"{number}/N: {number} is not a multiple of {nproc}, the number of processes")
    return args


def main(argv):
    args = parse_args(argv)
    (one,), printed, failure = run(args, 1)
    if failure:
        is_about_types = re.search("dtype|Float|Double", failure)
        hint = ". If it runs without parity.py, try --float32" if is_about_types and not args.float32 else ""
        print(f"{Path(args.script).name}: on one process it {failure}{hint}")
        return 2
    return max([report(args, nproc, one, printed) for nproc in args.nproc])


if __name__ == "__main__":
    if "PARITY" in os.environ:
        run_and_record(**json.loads(os.environ.pop("PARITY")))
    else:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)  # as Ctrl-C: all that was started is ended
        try:
            sys.exit(main(sys.argv[1:]))
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
