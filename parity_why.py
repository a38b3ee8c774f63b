"""Why does a script train otherwise on N processes? parity.py, which says whether, asks this file if it lies beside it.

`CAUSES` has for each kind of difference the functions that are asked, in this order. Each gets the first difference,
the steps of one process and the steps of each rank. It returns a likely cause in words, or None. A cause is a guess: it
decides nothing.
"""

import torch

import parity

SEEDS = (
    "is the same seed set before the model is built, and are weights loaded before it is wrapped, or on all ranks, "
    "and drawn before it is sharded? Processes that a script spawns inherit no seed. If the script sets none: --seed 0"
)
STALE = "the optimizer was built before the model was sharded, and holds parameters that nobody uses"
SUM = "it is summed over the ranks, and not averaged"
DIVIDED = "it is averaged, but the loss is a sum over the samples, or has been divided by the number of processes"
DIVIDE = "It must be divided by the number of processes, once, and no sample may be repeated"
DRAWN = "if it is drawn at random, draw it for the global batch, and give each rank its share"
UNAVERAGED = "is the plain model trained, or is the last backward inside of no_sync()?"
AT_RANDOM = "are the data and their order the same on all ranks, and is nothing drawn at random, as augmentation is?"
OTHER_GRADIENT = (
    "are the labels, are random numbers drawn in the model, is it a mean over shares of unequal weight, "
    "or does the loss compare samples with each other?"
)


def cause(difference, one, ranks):
    """The likeliest reason in words, or None."""
    answers = (ask(difference, one, ranks) for ask in CAUSES.get(difference.kind, ()))
    return next((answer for answer in answers if answer), None)


# ---- what the causes look at ---------------------------------------------------------------------------------------


def compared(difference, one, ranks):
    """The comparison of the step that differs."""
    return parity.comparisons(one, ranks)[difference.step - 1]


def arguments(difference, one, ranks):
    """Yield (name, rows, rows of each rank) of each argument, by place if no name is common.

    Sequences of which each rank has a piece are left out: they cannot be compared.
    """
    named = [steps[difference.step - 1].inputs for steps in (one, *ranks)]
    if not named[0].keys() & named[1].keys():
        named = [{f"number {place}": each for place, each in enumerate(inputs.values(), 1)} for inputs in named]
    for name, (rows, width) in named[0].items():
        of_ranks = [inputs.get(name, (rows[:0], width)) for inputs in named[1:]]
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


def drawn_otherwise(difference, one, ranks):
    return SEEDS


def cut_otherwise(difference, one, ranks):
    return "is it drawn whole, and then cut?"


def stale(difference, one, ranks):
    return STALE if difference.kind == "unmoved" else f"is the rate 0, or the loss constant? Or {STALE}"


def rounding(difference, one, ranks):
    is_float64 = compared(difference, one, ranks).limits == parity.LIMITS[8]
    as_in = "as if something computes in float32: judge it with --float32"
    return as_in if is_float64 and difference.size < 1e-5 else None


def not_finite(difference, one, ranks):
    for rank, steps in enumerate(ranks):
        for name in parity.not_finite(steps[difference.step - 1]):
            return f"the gradient of {name} is NaN or infinite on rank {rank}"
    return None


def partly_used(difference, one, ranks):
    """A parameter that all ranks hold has a gradient on some of them. If that is so of all, each has one owner."""
    steps = [steps[difference.step - 1] for steps in ranks]
    held = set.intersection(*[set(step.weights) for step in steps])
    gradients = [held.intersection(step.gradients) for step in steps]
    used_by_all = set.intersection(*gradients)
    partly = set.union(*gradients) - used_by_all
    if used_by_all and partly.issuperset(compared(difference, one, ranks).wrong[difference.kind]):
        name = difference.name
        return f"there is a parameter that only some ranks use ({name}), and others have no gradient to average"
    return None


def unaveraged(difference, one, ranks):
    found = compared(difference, one, ranks)
    for name, (_, rank) in found.apart["gradients"].items():
        line = f"rank {rank} has another gradient of {name} than other ranks"
        if difference.kind == "weights" and name not in found.exact:  # outside of DDP the optimizer may average
            continue
        if len(found.apart["gradients"]) < len(found.ranks[rank].gradients):
            return f"{line}: is it outside of the wrapped model, or was it unfrozen after wrapping?"
        return (
            f"{line}. Nothing averages them: is the plain model trained, or is the last backward inside of no_sync()?"
        )
    return None


def clipped_before_average(difference, one, ranks):
    found = compared(difference, one, ranks)
    for name, (_, rank) in found.apart["gradients"].items():
        if name not in found.apart["clipped"]:
            line = f"rank {rank} has another gradient of {name} than other ranks"
            return f"{line} when they are clipped: average them first"
    return None


def clipped_otherwise(difference, one, ranks):
    line = "is the same before clipping, but not after: clip once in a step, at its end"
    return f"the gradient of {difference.name} {line}"


def missing_argument(*run):
    for name, rows, parts in arguments(*run):
        is_missing = [len(each) == 0 for each in (rows, *parts)]
        if any(is_missing) and not all(is_missing):
            return f"the argument {name} is None, or missing, on one process or on some ranks only"
    return None


def number_of_samples(*run):
    """An argument is no evidence if another one has the same rows: its first dimension may not be the batch."""
    for name, rows, parts in arguments(*run) if not equal_arguments(*run) else ():
        n_rows = sum(map(len, parts))
        if len(parts) > 1 and is_whole(parts[0], parts) and n_rows:
            return f"all ranks have the same samples ({name}): is there a sampler that gives each rank its share?"
        if n_rows != len(rows):
            return f"the global batch has {n_rows} samples, and {len(rows)} on one process. {DIVIDE}"
    return None


def factor(difference, one, ranks):
    """Wrong gradients are N or 1/N times those of one process."""
    found, n = compared(difference, one, ranks), len(ranks)
    whole = [name for name, rows, parts in arguments(difference, one, ranks) if len(rows) and is_whole(rows, parts)]
    added = f"{SUM}, or all ranks have the same samples ({whole[0]}), and the loss is a sum" if whole else SUM
    for number, words, advice in ((n, f"{n}", added), (1 / n, f"1/{n}", DIVIDED)):
        times = {name: number * found.one.gradients[name] for name in found.wrong["gradients"]}
        far = parity.farthest(times, [rank.gradients for rank in found.ranks])
        if not parity.too_far(far, found.limits.gradients):
            return f"the gradient of {difference.name} is {words} times that of one process: {advice}"
    return None


def batch_norm(difference, one, ranks):
    """It is named before other samples: those of a further model may be what a model with BatchNorm has made."""
    for name in one[difference.step - 1].clues.get("norms", ()):
        if equal_arguments(difference, one, ranks):
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


def how_drawn(difference, one, ranks):
    """Why samples may be other ones, from what is known of random draws."""
    reasons = []
    for key, of_one in one[difference.step - 1].clues.items():
        of_ranks = [steps[difference.step - 1].clues[key] for steps in ranks]
        if key != "norms" and set(of_ranks) != {of_one}:
            reasons.append(f"{key} is {parity.listed(of_ranks)} on the ranks, and {of_one} on one process")
    return ". And ".join(reasons) or AT_RANDOM


def other_gradient(*run):
    if not any(len(rows) for _, rows, _ in arguments(*run)):
        return "the arguments hold no tensors that can be compared: are the samples the same?"
    return f"the samples are the same, and the gradient of {run[0].name} is not: {OTHER_GRADIENT}"


def other_setting(*run):
    for key, rank, value, of_one in compared(*run).settings:
        return f"the optimizer's {key} is {value} on rank {rank}, and {of_one} on one process"
    return None


def what_follows(difference, one, ranks):
    return "samples, gradients and settings are the same: is the optimizer's state, and what follows its step?"


CAUSES = {
    "zero": [stale],
    "still": [stale],
    "cut": [cut_otherwise],
    "begin on a rank": [drawn_otherwise],
    "begin": [drawn_otherwise],
    "ranks": [not_finite, partly_used, unaveraged, other_setting, what_follows],
    "gradients": [rounding, not_finite, partly_used, missing_argument, number_of_samples, factor, batch_norm],
    "clipped": [rounding, clipped_before_average, clipped_otherwise],
    "unmoved": [stale],
    "weights": [not_finite, partly_used, unaveraged, other_setting, what_follows],
    "settings": [other_setting],
    "undecided": [clipped_before_average, unaveraged],
}
CAUSES["gradients"] += [other_samples, other_gradient]
