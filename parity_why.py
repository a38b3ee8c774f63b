"""Why does a script train otherwise on N processes? parity.py, which says whether, asks this file if it lies beside it.

`CAUSES` has for each kind of difference the functions that are asked, in this order. Each gets the first difference,
the steps of one process and the steps of each rank. It returns a likely cause in words, or None. A cause is a guess: it
decides nothing. `note` is called in each rank: it records what only the causes need.
"""

import inspect
import re

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import parity

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # SyncBatchNorm is none of these
SEEDS = (
    "is the same seed set before the model is built, and are weights loaded before it is wrapped, or on all ranks, "
    "and drawn before it is sharded? Processes that a script spawns inherit no seed"
)
STALE = "the optimizer was built before the model was sharded, and holds parameters that nobody uses"
SUM = "it is summed over the ranks, and not averaged"
DIVIDED = "it is averaged, but the loss is a sum over the samples, or has been divided by the number of processes"
DIVIDE = "It must be divided by the number of processes, once, and no sample may be repeated"
DRAWN = "if it is drawn at random, draw it for the global batch, and give each rank its share"
UNAVERAGED = "Nothing averages them: is the plain model trained, or is the last backward inside of no_sync()?"
OUTSIDE = "is it outside of the wrapped model, or was it unfrozen after wrapping?"
AT_RANDOM = "are the data and their order the same on all ranks, and is nothing drawn at random, as augmentation is?"
OTHER_GRADIENT = (
    "are the labels, are random numbers drawn in the model, is it a mean over shares of unequal weight, "
    "or does the loss compare samples with each other?"
)
FOLLOWS = "samples, gradients and settings are the same: is the optimizer's state, and what follows its step?"


def cause(*run):
    """The likeliest reason of (difference, one, ranks) in words, or None."""
    answers = (ask(*run) for ask in CAUSES[run[0].kind])
    return next((answer for answer in answers if answer), None)


# ---- in each rank --------------------------------------------------------------------------------------------------


def note(clues, prefix, module, args, kwargs):
    """Add the arguments of a call of the outermost module to the clues of the step, if it is trained."""
    if not module.training:
        return
    root = parity.unwrapped(module)
    norms = [name for name, each in root.named_modules() if isinstance(each, NORMS) and each.training]
    clues["norms"] = clues.get("norms", []) + list(map(parity.without_wrappers, norms))
    clues["is DDP"] = isinstance(module, DistributedDataParallel)
    clues["seed"] = torch.initial_seed()
    inputs = clues.setdefault("inputs", {})
    is_first = all(param.grad is None for param in root.parameters())  # what earlier backwards added is thrown away
    bound = inspect.signature(root.forward).bind(*args, **kwargs).arguments
    for path, value in pytree.tree_flatten_with_path(dict(bound))[0]:
        name = prefix + re.sub(r"\W+", ".", pytree.keystr(path)).strip(".")  # as batch.x for ['batch']['x']
        rows, width = rows_of(value)
        if not is_first and name in inputs:
            rows = torch.cat([inputs[name][0], rows])
        inputs[name] = (rows, width)


def rows_of(value):
    """Two numbers for each row of an argument, and the length of a row.

    They are weighted sums of the row, with and without the repetitions of its last number, which may be padding. What
    is no tensor has no rows, nor has what another model returns.
    """
    is_tensor = torch.is_tensor(value) and value.layout == torch.strided and not hasattr(value, "full_tensor")
    if not is_tensor or value.numel() == 0 or value.grad_fn is not None:
        return torch.zeros(0, 2, dtype=torch.float64), 0
    rows = value.detach().cpu().double()
    rows = rows.reshape(len(rows), -1) if rows.dim() else rows.view(1, 1)
    weights = parity.random_weights(rows.shape[1])
    is_last = (rows == rows[:, -1:]).flip(1).cumprod(1).flip(1).bool()
    is_last[:, 0] = False
    return torch.stack([rows @ weights, rows.masked_fill(is_last, 0) @ weights], dim=1), rows.shape[1]


# ---- what the causes look at ---------------------------------------------------------------------------------------


def limits_of(one, ranks):
    return parity.Comparison(one, ranks).limits


def in_step(difference, one, ranks):
    """The step that differs, of one process and of each rank."""
    return one[difference.step - 1], [steps[difference.step - 1] for steps in ranks]


def apart(kind, *run):
    """By name, the rank of the gradients on which ranks disagree."""
    one, ranks = in_step(*run)
    far = parity.between(getattr(one, kind), [getattr(each, kind) for each in ranks])
    limit = min(limits_of(*run[1:])[:2])
    return {each.name: each.rank for each in parity.too_far(0, kind, far, limit)}


def arguments(*run):
    """Yield (name, rows, rows of each rank) of each argument, but those of which each rank has a piece of each row."""
    one, ranks = in_step(*run)
    for name, (rows, width) in one.clues.get("inputs", {}).items():
        of_ranks = [each.clues.get("inputs", {}).get(name, (rows[:0], width)) for each in ranks]
        parts = [part for part, _ in of_ranks]
        least = min(width for _, width in of_ranks)
        if least == width or least * sum(map(len, parts)) != width * len(rows):
            yield name, rows, parts


def is_same(rows, others):
    """Are they the same samples, in any order? Two rows are the same with or without what may be padding."""
    rows, others = [[{f"{number:.6g}" for number in row} for row in each.tolist()] for each in (rows, others)]
    every, every_other = set().union(*rows), set().union(*others)
    is_known = all(row & every_other for row in rows) and all(row & every for row in others)
    return len(rows) == len(others) and is_known


def is_whole(rows, parts):
    """Does each rank have all of these samples?"""
    return all(is_same(part, rows) for part in parts)


def equal_arguments(*run):
    found = [each for each in arguments(*run) if len(each[1])]
    return [name for name, rows, parts in found if is_same(torch.cat(parts), rows) or is_whole(rows, parts)]


# ---- causes --------------------------------------------------------------------------------------------------------


def no_group(difference, one, ranks):
    is_alone = any(steps[-1].n_collectives == 0 for steps in ranks)
    return "no process group is made" if is_alone else None


def drawn_otherwise(difference, one, ranks):
    return SEEDS


def cut_otherwise(difference, one, ranks):
    return "is it drawn whole, and then cut?"


def still(difference, one, ranks):
    return None if "NaN" in difference.name else f"is the rate 0, or the loss constant? Or {STALE}"


def stale(difference, one, ranks):
    begin, end = ranks[0][0].weights, ranks[0][difference.step].weights
    return None if parity.moved(parity.moves(begin, end)) else STALE


def rounding(difference, one, ranks):
    as_in = "as if something computes in float32: judge it with --float32"
    return as_in if limits_of(one, ranks) == parity.LIMITS[8] and difference.size < 1e-5 else None


def not_finite(*run):
    name = run[0].name
    for rank, step in enumerate(in_step(*run)[1]):
        if name in step.gradients and not step.gradients[name][1].isfinite().all():
            return f"the gradient of {name} is NaN or infinite on rank {rank}"
    return None


def partly_used(difference, one, ranks):
    """A parameter that all ranks hold has a gradient on some of them. If that is so of all, each has one owner."""
    _, steps = in_step(difference, one, ranks)
    name = difference.name
    with_gradient = [step for step in steps if name in step.gradients]
    used_by_all = set.intersection(*[set(step.gradients) for step in steps])
    if used_by_all and 0 < len(with_gradient) < len(steps) and all(name in step.weights for step in steps):
        return f"there is a parameter that only some ranks use ({name}), and others have no gradient to average"
    return None


def unaveraged(*run):
    found = apart("gradients", *run)
    may_average = run[0].kind == "weights" and not in_step(*run)[1][0].clues.get("is DDP")  # in the optimizer
    if may_average or run[0].name not in found:
        return None
    line = f"rank {found[run[0].name]} has another gradient of {run[0].name} than other ranks"
    is_part = len(found) < len(in_step(*run)[0].gradients)
    return f"{line}: {OUTSIDE}" if is_part else f"{line}. {UNAVERAGED}"


def clipped_before_average(*run):
    clipped = apart("clipped", *run)
    for name, rank in apart("gradients", *run).items():
        if name not in clipped:
            line = f"rank {rank} has another gradient of {name} than other ranks"
            return f"{line} when they are clipped: average them first"
    return None


def clipped_otherwise(difference, one, ranks):
    line = "is the same before clipping, but not after: clip once in a step, at its end"
    return f"the gradient of {difference.name} {line}"


def stepped_otherwise(difference, one, ranks):
    """The step begins with other weights."""
    of_one, *of_ranks = [parity.moves(one[0].weights, steps[difference.step - 1].weights) for steps in (one, *ranks)]
    far = parity.farthest(of_one, of_ranks)
    if not parity.too_far(0, "weights", far, limits_of(one, ranks).weights):
        return None
    return other_setting(difference, one, ranks) or FOLLOWS


def number_of_samples(*run):
    """An argument is no evidence if another one has the same rows: its first dimension may not be the batch."""
    for name, rows, parts in arguments(*run) if not equal_arguments(*run) else ():
        n_rows = sum(map(len, parts))
        if is_whole(parts[0], parts) and n_rows:
            return f"all ranks have the same samples ({name}): is there a sampler that gives each rank its share?"
        if n_rows != len(rows):
            return f"the global batch has {n_rows} samples, and {len(rows)} on one process. {DIVIDE}"
    return None


def factor(difference, one, ranks):
    name, n = difference.name, len(ranks)
    step, steps = in_step(difference, one, ranks)
    for number, words, advice in ((n, f"{n}", SUM), (1 / n, f"1/{n}", DIVIDED)):
        shape, sums, *_ = step.gradients[name]
        far = parity.farthest({name: (shape, number * sums)}, [each.gradients for each in steps])
        if not parity.too_far(0, "gradients", far, limits_of(one, ranks).gradients):
            return f"the gradient of {name} is {words} times that of one process: {advice}"
    return None


def batch_norm(*run):
    """It is named before other samples: those of a further model may be what a model with BatchNorm has made."""
    for name in in_step(*run)[0].clues.get("norms", ()):
        if equal_arguments(*run):
            line = f"the samples are the same, but BatchNorm ({name}) uses the mean of each rank's alone"
            return f"{line}. To judge the rest of the script: --eval-norm"
    return None


def other_samples(*run):
    equal = equal_arguments(*run)
    for name, rows, _ in arguments(*run):
        if len(rows) and name not in equal:
            if equal:
                return f"the argument {equal[0]} is the same, but {name} is not: {DRAWN}"
            return f"the global batch has other samples ({name}): {how_drawn(*run)}"
    return None


def how_drawn(*run):
    """Why samples may be other ones, from what is known of random draws."""
    one, ranks = in_step(*run)
    seed, *seeds = [step.clues.get("seed") for step in (one, *ranks)]
    if set(seeds) != {seed}:
        return f"torch.initial_seed() is {parity.listed(seeds)} on the ranks, and {seed} on one process"
    return AT_RANDOM


def other_gradient(*run):
    if not any(len(rows) for _, rows, _ in arguments(*run)):
        return "the arguments hold no tensors that can be compared: are the samples the same?"
    return f"the samples are the same, and the gradient of {run[0].name} is not: {OTHER_GRADIENT}"


def other_setting(difference, one, ranks):
    for step, *steps in zip(one[: difference.step], *ranks, strict=False):
        for key, rank, value, of_one in parity.other_settings(step, steps):
            return f"the optimizer's {key} is {value} on rank {rank}, and {of_one} on one process"
    return None


def what_follows(difference, one, ranks):
    return FOLLOWS


SAMPLES = [number_of_samples, other_samples]
BY_SAMPLES = [number_of_samples, factor, batch_norm, other_samples, other_gradient]
CAUSES = {
    "useless": [still],
    "cut": [cut_otherwise],
    "begin": [no_group, drawn_otherwise],
    "ranks": [no_group, not_finite, partly_used, unaveraged, *SAMPLES, other_setting, what_follows],
    "weights": [stale, not_finite, partly_used, unaveraged, *SAMPLES, other_setting, what_follows],
    "settings": [other_setting],
    "gradients": [no_group, rounding, not_finite, stepped_otherwise, partly_used, *BY_SAMPLES],
    "clipped": [rounding, stepped_otherwise, clipped_before_average, clipped_otherwise],
    "undecided": [clipped_before_average, unaveraged],
    "steps": [],
    "alone": [no_group],
}
