"""parity.py finds planted mistakes and says nothing of right scripts, and parity_why.py names the causes."""

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import ROOT, finish, free_port, guards, run, run_under_launcher, slow, start, wait_for, wait_until

import parity
import parity_why

PLANTED = ROOT / "tests" / "planted.py"


# ---- run it --------------------------------------------------------------------------------------------------------


def run_rank(command, environment, log):
    """What `start` of parity.py does, in a fork of the fork server, which has imported torch."""
    os.setsid()
    file = os.open(log, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    torch.seed()  # a new process has a seed of its own
    torch._dynamo.config.disable = True  # TORCH_COMPILE_DISABLE, which the fork server has read before it was set
    sys.path.insert(0, "")  # which parity.py replaces by the script's folder
    sys.path.append(str(ROOT))
    run_under_launcher(0, 1, *command[1:])


class Forked:
    """As much of subprocess.Popen as parity.py uses."""

    def __init__(self, command, environment, log):
        log.touch()
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=run_rank, args=(command, environment, log))
        self.process.start()
        self.pid = self.process.pid

    def poll(self):
        return self.process.exitcode

    def wait(self):
        self.process.kill()  # it may not yet lead its group
        self.process.join()


@pytest.fixture
def judge(monkeypatch, capsys):
    """Do what `python parity.py arguments` does; returns the exit status and what is printed."""
    monkeypatch.setattr(parity, "start", Forked)

    def call(*args):
        status = parity.main([str(arg) for arg in args])
        return status, capsys.readouterr().out

    return call


# ---- planted mistakes ----------------------------------------------------------------------------------------------

MISTAKES = {
    "kept_batch_size": "the global batch has 32 samples, and 16 on one process",
    "no_sampler": "all ranks have the same samples",
    "data_of_each_rank": "the global batch has other samples",
    "noise_of_each_rank": "the argument x is the same, but noise is not: if it is drawn at random",
    "plain_model": "is the plain model trained",
    "wrapper_not_kept": "Nothing averages them",
    "penalty_by_the_plain_model": "rank 1 has another gradient",
    "parameter_outside": "is it outside of the wrapped model",
    "unfrozen_later": "unfrozen after wrapping",
    "clipped_each_time": "when they are clipped: average them first",
    "clipped_at_n_times": "the same before clipping, but not after: clip once in a step",
    "summed": "is 2 times that of one process: it is summed",
    "loss_is_a_sum": "is 1/2 times that of one process: it is averaged, but the loss is a sum",
    "mean_over_unequal_counts": "a mean over shares of unequal weight",
    "buckets_rebuilt_before": "the samples are the same, and the gradient of",
    "batch_norm": "BatchNorm (norm)",
    "learning_rate_times_n": "the optimizer's lr is 0.02 on rank 0, and 0.01 on one process",
    "weight_decay_times_n": "the optimizer's weight_decay is 0.02 on rank 0, and 0.01 on one process",
    "optimizer_first": "the optimizer was built before the model was sharded",
    "drawn_after_wrapping": "on rank 1 than on one process",
    "loaded_on_one_rank": "are weights loaded before it is wrapped",
    "fewer_steps": "3 steps, and one process takes 6",
    "some_ranks_use": "there is a parameter that only some ranks use",
    "no_process_group": "each of them trains alone: no process group is made",
}
RIGHT = ["gan", "accumulated", "frozen", "recompute", "compiled", "clipped", "closure", "by_hand"]
RIGHT += ["zero_redundancy", "sharded", "average_of_the_owner", "noise_for_the_batch", "wrapped_inside", "sparse"]
RIGHT += ["redirected", "evaluates", "sync_batch_norm", "no_seed"]

CASES = (*MISTAKES, *RIGHT)
PAGE = (ROOT / "docs" / "mistakes.md").read_text()
PROVEN_HERE_ALONE = re.findall(r"\[`(\w+)`\]\(\.\./tests/planted\.py\)", PAGE)
GUARDS = ("kept_batch_size", "no_sampler", "loss_is_a_sum")


def test_the_page_of_mistakes_quotes_what_is_said():
    quotes = re.findall(r'`parity\.py` says "(.*?)"', PAGE)
    assert len(quotes) >= 14 and set(quotes) <= set(MISTAKES.values()) and set(PROVEN_HERE_ALONE) <= set(MISTAKES)


def check(case, judged, nproc=2, limit=r"1e-10\), judged in float64"):
    """A cause has other numbers on four processes, and with a smaller rate."""
    status, printed = judged
    assert status == (1 if case in MISTAKES else 0), printed
    if case in RIGHT:
        line = rf"equal on 1 and {nproc} processes for 5 steps, up to \S+ \(allowed: {limit}"
        assert re.search(line, printed), printed
    else:
        assert without_numbers(MISTAKES[case]) in without_numbers(printed)


def without_numbers(text):
    return re.sub(r"\d[\d.e/-]*", "#", text)


@pytest.mark.parametrize("flavour", ["torch", "helper"])
@pytest.mark.parametrize("case", [*guards(*GUARDS), *slow(*[case for case in CASES if case not in GUARDS])])
def test_planted_cases_in_float64(case, flavour, judge):
    status, printed = judge(PLANTED, case, flavour)
    check(case, (status, printed))
    assert case in RIGHT or MISTAKES[case] in printed


PAIRS = [(case, number_type) for number_type in ("float32", "bfloat16") for case in CASES]
GUARD_PAIRS = [(case, "bfloat16") for case in GUARDS]
LIMITS = {"float32": r"0.001\), judged in float32\n", "bfloat16": r"0.1\), judged in bfloat16"}


@pytest.mark.parametrize("pair", [*guards(*GUARD_PAIRS), *slow(*[pair for pair in PAIRS if pair not in GUARD_PAIRS])])
def test_planted_cases_in_low_types_with_a_small_rate(pair, judge, capsys):
    """On 2 and on 4 processes, which are compared with the same run of one process."""
    case, number_type = pair
    args = parity.parse_args(["--float32", str(PLANTED), case, "torch", number_type])
    [one], failure = parity.run(args, 1)
    assert not failure
    for nproc in (2, 4):
        args.nproc = nproc
        status = parity.report(args, one, *parity.run(args, nproc))
        check(case, (status, capsys.readouterr().out), nproc, LIMITS[number_type])


# ---- options, and runs that cannot be compared ----------------------------------------------------------------------

RUNS = [  # options of parity.py, arguments of planted.py, exit status, what is told
    ("--eval-norm", "batch_norm helper", 0, ""),
    ("", "clipped torch float32", 0, r"\(allowed: 1e-10\), judged in float64\n$"),
    ("", "casts torch", 0, r"\(allowed: 0.1\), judged in bfloat16 and float64"),
    ("--float32", "casts torch", 0, "judged in bfloat16 and float32"),
    ("--nproc 4 --steps 3", "sharded torch", 0, "equal on 1 and 4 processes for 3 steps"),
    ("--reference 2 --nproc 4 --steps 3", "sharded torch", 0, "rank 1:\n.* equal on 2 and 4 processes for 3 steps"),
    ("--reference 2 --nproc 4", "kept_batch_size torch", 1, "ranks 0 and 2 are compared with rank 0:\n.*32 samples"),
    ("--seed 3", "no_seed torch", 0, "equal on 1 and 2"),
    ("", "no_optimizer torch", 2, "takes no step of an optimizer"),
    ("", "not_in_float64 torch", 2, r"on one process it fails.*planted.py:\d+\).*try --float32\n$"),
    ("--timeout 0.1", "gan torch", 2, "on one process it hangs: it has not ended after 0 s. Steps of"),
    ("", "early_stop torch", 2, r"fails on rank 0: .*Without an error ends rank 1. Steps of each rank: 3 and 3"),
    # Scripts that start their own processes are told at once. If there are as many, each rank does the work of one.
    ("", "spawn torch", 2, "on one process it fails on rank 0: SystemExit|the script starts its own processes"),
    ("", "fork torch", 2, "which says last: the script starts its own processes"),
    ("", "own_processes torch", 2, "takes no step of an optimizer of torch.optim on rank 0"),
    ("", "spawn_as_many torch N", 0, ""),
    ("", "spawned_without_seed torch N", 1, "begins with other weights on rank 1 than on one process"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "words", "expected", "told"), RUNS)
def test_options_and_runs_that_cannot_be_compared(options, words, expected, told, judge, monkeypatch):
    monkeypatch.setenv("PORT", str(free_port()))
    status, printed = judge(*options.split(), PLANTED, *words.split())
    assert status == expected and re.search(told, printed), printed


def test_ranks_that_hang_are_named_with_their_steps(judge, monkeypatch):
    monkeypatch.setenv("WATCH_SECONDS", "1")
    status, printed = judge(PLANTED, "stand_still", "helper")
    places = r"rank 0 in planted.py:\d+ .* \| rank 1 in planted.py:\d+ torch_dist.barrier"
    line = rf"planted.py: on 2 processes it hangs: no progress for 1 s: {places}.*\. Steps of each rank: 3 and 3"
    assert status == 2 and re.search(line, printed), printed


def test_a_crash_on_several_processes_is_named_with_its_place_and_the_steps(judge):
    status, printed = judge(PLANTED, "crash", "torch")
    place = r"ZeroDivisionError: planted \(planted.py:\d+\). Steps of each rank: [23] and 3\n"
    assert status == 2 and re.fullmatch(f"planted.py: on 2 processes it fails on rank 1: {place}", printed), printed


@pytest.mark.slow
def test_a_copy_of_the_file_judges_a_module(tmp_path):
    """The reason needs parity_why.py."""
    copy = shutil.copy(ROOT / "parity.py", tmp_path)
    status, printed, stderr = run(copy, "-m", "planted", "summed", "torch", cwd=PLANTED.parent)
    line = r"planted: on 2 processes in step 1 the gradient of [\w.]+ differs by [\d.e+-]+\n"
    assert status == 1 and re.fullmatch(line, printed), printed + stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_it_leaves_no_process_and_no_file(number, tmp_path):
    """At its end, and after Ctrl-C, a closed terminal or a kill while the script trains. A kill leaves its files."""
    mark = f"mark of {tmp_path}"
    folder, ready = tmp_path / "temporary", tmp_path / "ready"
    folder.mkdir()
    ready.mkdir()
    env = {"TMPDIR": str(folder), "MARK": mark} | ({"FOREVER": str(ready)} if number else {})
    process = start("parity.py", PLANTED, "children", "torch", env=env)
    if number:
        wait_for(lambda: list(ready.iterdir()), process)
        process.send_signal(number)
    status, _, _ = finish(process)
    assert status == {None: 0, signal.SIGKILL: -signal.SIGKILL}.get(number, 130)
    assert number == signal.SIGKILL or list(folder.iterdir()) == []
    ps = ["ps", "-ww", "-eo", "args"]
    wait_until(lambda: mark not in subprocess.run(ps, capture_output=True, text=True, check=True).stdout)


# ---- records --------------------------------------------------------------------------------------------------------


def make_step(number=0, weight=1.0, gradient=1.0, clipped=None, inputs=None, norms=(), types=(), **settings):
    """As a Recorder writes it, of a model with two parameters. Numbers stand for tensors, and a list for samples."""

    def tensors(value):
        names = {"a": torch.arange(1.0, 4), "b": torch.ones(2, 2)}
        return {name: parity.sketch(value * tensor.double()) for name, tensor in names.items()}

    clipped = gradient if clipped is None else clipped
    step = parity.Step(number, tensors(weight), tensors(gradient), tensors(clipped))
    inputs = {"x": [1.0, 2.0]} if inputs is None else inputs
    step.clues = {"norms": list(norms), "inputs": {}}
    for name, rows in inputs.items():
        step.clues["inputs"][name] = parity_why.rows_of(torch.tensor(rows)[:, None] if rows else "no tensor")
    step.types = set(types)
    step.settings = [{"lr": "0.1", **settings}]
    step.n_collectives = 1 + number
    return step


def verdict(one, ranks, have_ended=True):
    """The first difference and its cause in words, or None."""
    difference = parity.Comparison(one, ranks).first_difference(have_ended)
    return difference and parity.in_words(difference, one, ranks)


def of_ranks(*gradients, **more):
    return [{"gradient": gradient, **more} for gradient in gradients]


def samples(*ranks, y=None):
    """Ranks with a wrong gradient, by the samples of each one."""
    return [{"gradient": 3.0, "inputs": {"x": x} | ({"y": y} if y else {})} for x in ranks]


LOW, LOWEST = {"types": ["float32"]}, {"types": ["float64", "float16"]}
LR, NAN, NORM = {"lr": "0.2"}, {"gradient": float("nan")}, {"norms": ["norm"]}
VERDICTS = [  # one process, each rank, the weights of the ranks after the step if it is known, and what is told
    ({}, [{}] * 2, (2, 2), None),
    # Samples. BatchNorm is a later cause, unless one argument is equal.
    (NORM, samples([1.0, 2.0], [3.0, 4.0]), (3, 3), "batch has 4 samples"),
    (NORM, samples([1.0, 2.0], [2.0]), (3, 3), "and 2 on one process"),
    (NORM, samples([1.0], [3.0]), (3, 3), "has other samples (x)"),
    (NORM, samples([2.0], [2.0]), (3, 3), "all ranks have the same samples (x)"),
    (NORM, samples([1.0], [2.0]), (3, 3), "BatchNorm (norm)"),
    ({**NORM, "inputs": {"x": [1.0, 2.0], "y": [5.0]}}, samples([1.0], [2.0], y=[6.0]), (3, 3), "BatchNorm (norm)"),
    ({"inputs": {"x": []}}, samples([], []), (3, 3), "the arguments hold no tensors that can be compared"),
    # Gradients on which ranks agree.
    ({}, of_ranks(3, 4, clipped=0.9), (3, 3), "when they are clipped: average them first"),
    ({}, of_ranks(2.0, 2.0), (3, 3), "the gradient of a is 2 times that of one process: it is summed"),
    ({}, of_ranks(0.5, 0.5), (3, 3), "the gradient of a is 1/2 times that of one process: it is averaged"),
    ({}, of_ranks(0.9, 0.9), (3, 3), "the gradient of a is not: are the labels"),
    ({}, of_ranks(1 + 1e-7, 1 + 1e-7), (3, 3), "as if something computes in float32: judge it with --float32"),
    ({}, [NAN] * 2, (3, 3), "is NaN or infinite on rank"),
    ({}, [{}, NAN], (2, 3), "is NaN or infinite on rank"),
    ({}, [{"clipped": 0.9}] * 2, (3, 3), "the same before clipping, but not after"),
    # Gradients on which they disagree. The owner of a parameter, or the optimizer, averages later.
    ({}, of_ranks(3, 4), (3, 4), "of a than other ranks. Nothing averages them"),
    ({}, of_ranks(8, 7), (2, 2), None),
    ({}, of_ranks(8, 7), (2.1, 2.1), "is the optimizer's state"),
    ({}, of_ranks(8, 7, **LR), (2.1, 2.1), "the optimizer's lr is 0.2 on rank 0"),
    ({}, of_ranks(8, 7), (2 + 1e-7, 2 + 1e-7), None),
    ({}, of_ranks(8, 7), (2 + 1e-5, 2 + 1e-5), "a has moved otherwise since the start"),
    ({}, of_ranks(8, 7), (2, 2 + 1e-15), "rank 1 has another gradient"),
    (LOW, of_ranks(8, 7, **LOW), (2.01, 2.01), None),
    (LOW, of_ranks(8, 7, **LOW), (2.2, 2.2), "is the optimizer's state"),
    # Adam moves weights nearly alike for other gradients of one sign.
    (LOW, of_ranks(0.5, 1.5, **LOW), (2, 2 + 1e-6), "rank 1 has another gradient"),
    # How far ranks may be apart.
    ({}, [{}] * 2, (2, 2 + 1e-12), None),
    ({}, [{}] * 2, (2, 2 + 1e-9), "a ends otherwise on rank 1"),
    (LOW, [LOW] * 2, (2, 2.005), None),
    (LOW, [LOW] * 2, (2, 2.05), "rank 1"),
    (LOW, of_ranks(1, 1.0005, **LOW), (2, 2.005), None),
    # Weights and settings. In float64 the next gradients show them. In low types rounding and Adam make other weights
    # of equal gradients.
    ({}, [LR] * 2, (2, 2), None),
    ({}, [{}] * 2, (1, 1), "the optimizer was built before the model was sharded"),
    (LOW, of_ranks(8, 7, **LOW), (1, 1), "in step 1 a has moved otherwise since the start"),
    (LOW, [{**LOW, **LR}] * 2, (2, 2), "the optimizer's lr is 0.2"),
    (LOW, [LOW] * 2, (2.5, 2.5), None),
    # The limit of the lowest type.
    ({}, of_ranks(1 + 5e-11, 1 + 5e-11), (), None),
    ({}, of_ranks(1 + 5e-10, 1 + 5e-10), (), "in step 1 the gradient of a differs by"),
    (LOW, of_ranks(1.0005, 1.0005, **LOW), (), None),
    (LOW, of_ranks(1.005, 1.005, **LOW), (), "in step 1 the gradient of a differs by"),
    (LOWEST, of_ranks(1.05, 1.05, **LOWEST), (), None),
    (LOWEST, of_ranks(1.5, 1.5, **LOWEST), (), "in step 1 the gradient of a differs by"),
    # The weights after the last step are not known.
    ({}, of_ranks(0.5, 1.5), (), None),
    (NAN, [{}] * 2, (), "nothing can be compared: on one process too, the gradient of a is NaN or infinite"),
    ({"gradient": 0.0}, [{}] * 2, (), "nothing can be compared: on one process too, nothing is trained: all gradients"),
]


@pytest.mark.parametrize(("expected", "ranks", "weights", "told"), VERDICTS)
def test_the_verdict_on_a_step(expected, ranks, weights, told):
    one, several = [make_step(**expected)], []
    for number, options in enumerate(ranks, 1):
        several.append([make_step(**{"inputs": {"x": [float(number)]}, **options})])
    if weights:
        one.append(make_step(1, 2.0, types=expected.get("types", ())))
        for steps, weight in zip(several, weights, strict=True):
            steps.append(make_step(1, weight, types=steps[0].types))
    line = verdict(one, several)
    assert told in line if told else line is None, line


def test_other_weights_and_settings_are_seen_in_the_next_gradients():
    """In float64. The cause is what was done between, and no sample."""

    def steps(weight, gradient, **settings):
        return [make_step(**settings), make_step(1, weight, gradient, **settings), make_step(2, weight, gradient)]

    told = verdict(steps(2.0, 2.0), [steps(3.0, 3.0)] * 2)
    assert "in step 2 the gradient of a differs" in told and "is the optimizer's state, and what follows" in told
    assert "lr is 0.2 on rank 0, and 0.1 on one process" in verdict(steps(2.0, 2.0), [steps(3.0, 3.0, **LR)] * 2)
    assert "are the labels" in verdict(steps(2.0, 2.0), [steps(2.0, 3.1)] * 2)


@pytest.mark.parametrize("lacking", ["one", "ranks"])
@pytest.mark.parametrize(("weight", "told"), [(2.0, None), (1.0, "in step 1 b has moved otherwise since the start")])
def test_a_gradient_that_only_one_process_or_only_ranks_have_leaves_it_to_the_weights(lacking, weight, told):
    one, *ranks = [[make_step(), make_step(1, 2.0)] for _ in range(3)]
    for steps in [one] if lacking == "one" else ranks:
        steps[1].weights["b"] = parity.sketch(torch.full((2, 2), weight, dtype=torch.float64))
        for step in steps:
            del step.gradients["b"], step.clipped["b"]
    line = verdict(one, ranks)
    assert told in line if told else line is None, line


def test_weights_are_compared_since_the_step_in_which_they_are_first_seen():
    """A module that is first called in step 2 begins and moves on the ranks as on one process."""

    def steps(*weights):
        steps = [make_step(number, 1.0 + number) for number in range(3)]
        del steps[0].weights["b"], steps[0].gradients["b"], steps[0].clipped["b"]
        for step, weight in zip(steps[1:], weights, strict=True):
            step.weights["b"] = parity.sketch(torch.full((2, 2), weight, dtype=torch.float64))
        return steps

    assert verdict(steps(2.0, 3.0), [steps(2.0, 3.0)] * 2) is None
    assert "on rank 0 than on one process (b, by" in verdict(steps(2.0, 3.0), [steps(2.5, 3.5)] * 2)
    assert "in step 2 b ends otherwise on rank 1" in verdict(steps(2.0, 3.0), [steps(2.0, 3.0), steps(2.0, 3.5)])


def test_most_of_what_is_trained_must_be_compared(capsys):
    one, ranks = [make_step(), make_step(1, 2.0)], [[make_step(), make_step(1, 2.0)] for _ in range(2)]
    for step in (*ranks[0], *ranks[1]):
        for key in ("weights", "gradients", "clipped"):
            getattr(step, key)["other"] = getattr(step, key).pop("b")  # four numbers, and a has three
    assert parity.report(parity.parse_args([str(PLANTED)]), one, ranks, None) == 2
    assert "not compared: 1 tensors that are cut, renamed or not moved, as b" in capsys.readouterr().out


@pytest.mark.parametrize(("gradients", "told"), [((1, 7), None), ((8, 7), "rank 1 has another gradient of a")])
def test_weights_that_rounding_keeps_decide_nothing(gradients, told):
    """In low types. Then a rank must have the gradient of one process, as the owner of the parameter has."""
    one, *ranks = [[make_step(number, 1.0, each, **LOW) for number in range(2)] for each in (1, *gradients)]
    line = verdict(one, ranks)
    assert told in line if told else line is None, line


def test_all_ranks_take_as_many_steps_and_communicate():
    def steps(n, n_collectives=None):
        steps = [make_step(number, 1.0 + number) for number in range(n)]
        for step in steps:
            step.n_collectives = step.n_collectives if n_collectives is None else n_collectives
        return steps

    assert verdict(steps(3), [steps(3), steps(3)]) is None
    assert verdict(steps(3), [steps(3), steps(2)]) == "the ranks take 3 and 2 steps, and one process takes 3"
    assert verdict(steps(3), [steps(3), steps(2)], have_ended=False) is None
    alone = "a rank communicates with no other rank: each of them trains alone"
    assert verdict(steps(3), [steps(3), steps(3, 7)]) == alone
    assert verdict(steps(1), [steps(1, 0), steps(1, 0)]) == f"{alone}: no process group is made"
    assert verdict(steps(3), [steps(3, 0), steps(3, 0)]) == f"{alone}: no process group is made"
    assert verdict(steps(3), [steps(3, float("nan"))] * 2) is None  # this backend does not count them


def test_the_first_rank_that_begins_with_other_weights_is_named_but_not_for_rounding():
    one, *ranks = [[make_step(0, 1 + rank * 1e-15), make_step(1, 2.0)] for rank in range(3)]
    assert verdict(one, ranks) is None
    line = verdict(one, [[make_step(0)], [make_step(0, weight=1.5)]])
    assert line.startswith("the first step begins with other weights on rank 1 than on one process (a, by")


@pytest.mark.parametrize(("halves", "part"), [((1, 1), None), ((1, 2), "which is cut)"), ((2, 2), "which is cut)")])
def test_parts_that_a_script_cuts_must_begin_as_parts_of_the_whole(halves, part):
    """They have another shape on several processes, and each rank has another one."""
    one, first, second = make_step(), make_step(), make_step()
    for step, number in ((first, halves[0]), (second, halves[1])):
        step.weights["b"] = parity.sketch(torch.full((1, 2), float(number), dtype=torch.float64))
    line = verdict([one], [[first], [second]])
    assert part in line if part else line is None


def test_seeds_that_differ_are_named():
    one = make_step(inputs={"x": [5.0, 6.0]})
    first, second = [make_step(gradient=3.0, inputs={"x": [each]}) for each in (7.0, 8.0)]
    for step, seed in ((one, 0), (first, 0), (second, 1)):
        step.clues["seed"] = seed
    told = verdict([one], [[first], [second]])
    assert told.endswith("has other samples (x): torch.initial_seed() is 0 and 1 on the ranks, and 0 on one process")


def test_a_sketch_sees_one_number_and_an_exchange():
    tensor = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def distance(other):
        return parity.distances({"a": parity.sketch(tensor)}, {"a": parity.sketch(other)})["a"]

    other = tensor.clone()
    other[500] += 1e-6
    exchanged = tensor.clone()
    exchanged[[3, 3 + 64]] = tensor[[3 + 64, 3]]  # in the same sum
    for each in (other, exchanged, -tensor):
        assert distance(each) > 1e-10
    assert distance(tensor * (1 + 1e-12)) < 1e-10
    imaginary = torch.complex(torch.ones(3), torch.ones(3))
    assert not parity.sketch(imaginary)[1].equal(parity.sketch(imaginary.conj().resolve_conj())[1])


def test_a_tensor_that_is_nothing_but_rounding_is_not_apart():
    """As the gradient of the bias of keys in attention."""
    one = {"a": parity.sketch(torch.ones(3)), "b": parity.sketch(1e-17 * torch.ones(3))}
    assert parity.distances(one, one | {"b": parity.sketch(-3e-17 * torch.ones(3))})["b"] < 1e-10


@pytest.mark.parametrize("padding", [0, -100, 9])
def test_padding_at_the_ends_of_rows_changes_nothing(padding):
    rows = [torch.arange(length) % 8 + 1 for length in (3, 8, 4, 7)]

    def padded(rows):
        together = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
        return parity_why.rows_of(together)[0]

    together = torch.cat([padded(rows[::2]), padded(rows[1::2])])
    assert parity_why.is_same(padded(rows), together)
    rows[0][0] += 1
    assert not parity_why.is_same(padded(rows), together)


def test_the_rows_of_a_step_are_those_of_its_micro_batches():
    model, x, clues = torch.nn.Linear(2, 1), torch.randn(6, 2), {}
    for _ in range(2):  # steps
        model.zero_grad()
        for micro_batch in x.split([4, 2]):
            parity_why.note(clues, "", model, [micro_batch], {})
            model(micro_batch).sum().backward()
        rows, width = clues["inputs"]["input"]
        assert torch.equal(rows, parity_why.rows_of(x)[0]) and width == 2


# ---- options and output ---------------------------------------------------------------------------------------------


def test_arguments_for_each_number_of_processes():
    assert parity.for_processes("--batch=64/N", 2) == "--batch=32"
    assert parity.for_processes("run-N.pt", 4) == "run-4.pt"
    assert parity.for_processes("NAME", 4) == "NAME"
    assert [parity.for_processes(each, 4) for each in ("-N", "--N", "--N=N")] == ["-N", "--N", "--N=4"]
    assert parity.for_processes("runs/2024/N", 4) == "runs/2024/4"
    assert parity.for_processes("0.10/N", 4) == "0.10/4"


def test_settings_are_numbers_without_rounding_and_devices():
    values = [0.1 + 0.2, torch.tensor(0.5), (0.9, 0.99), None, True]
    assert list(map(parity.setting, values)) == ["0.3", "0.5", "(0.9, 0.99)", "None", "True"]
    assert parity.setting(print) == parity.setting(len)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["missing.py"], "'missing.py'"),
        (["--steps", "5"], "name a file that ends in .py"),
        (["--nproc", "1", str(PLANTED)], "--nproc: 1 must be a multiple of 1, and more"),
        (["--reference", "2", "--nproc", "3", str(PLANTED)], "--nproc: 3 must be a multiple of 2, and more"),
        (["--steps", "0", str(PLANTED)], "--steps: 0 must be at least 1"),
        (["--nproc", "3", str(PLANTED), "--batch=64/N"], "64 is not a multiple of 3"),
    ],
)
def test_a_wrong_option_is_one_line_and_status_2(words, part, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parity.parse_args(words)
    assert exit_info.value.code == 2
    assert part in capsys.readouterr().err.splitlines()[-1]


def test_the_scripts_own_options_stay_with_it():
    args = parity.parse_args(["--nproc", "3", str(PLANTED), "--steps", "7", "other.py"])
    assert (args.nproc, args.steps, args.args) == (3, 5, ["--steps", "7", "other.py"])


TRACEBACK = "Traceback (most recent call last):\n"
LOGS = [  # what a script prints, and the line that says why it ends
    (f"Resize: 32\n[rank1]: {TRACEBACK}[rank1]:   File\n[rank1]: ValueError: odd\n", "ValueError: odd"),
    (f'{TRACEBACK}  File "/a/train.py", line 7\n    f()\nKeyError: 1\nframe #0\n1%|#', "KeyError: 1 (train.py:7)"),
    ("usage: train.py\ntrain.py: error: --data is needed\n\n", "train.py: error: --data is needed"),
    ("", ""),
]


@pytest.mark.parametrize(("text", "line"), LOGS)
def test_the_line_that_says_why_a_script_ends(text, line, tmp_path):
    (tmp_path / "log").write_text(text)
    assert parity.last_line(tmp_path / "log") == line


def test_the_rank_that_was_silent_first_has_failed_first(tmp_path):
    logs = []
    for rank, text in enumerate(("RuntimeError: Connection closed by peer", f"{TRACEBACK}KeyError: 1")):
        logs.append(Path(tmp_path, f"printed {rank}"))
        logs[rank].write_text(text)
        os.utime(logs[rank], (0, 10 - rank))
    failed, running = mock.Mock(poll=lambda: 1), mock.Mock(poll=lambda: None)
    assert parity.wait([failed, failed], tmp_path, logs, 9) == "fails on rank 1: KeyError: 1"
    assert parity.wait([failed, running], tmp_path, logs, 9).endswith("Connection closed by peer")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("no progress for 0.5 s: rank 0 in a.py:7 f()", "hangs: no progress for 0.5 s"),
        ("no progress for 2 epochs", None),
    ],
)
def test_a_job_hangs_if_watch_says_so_and_not_if_the_script_prints_the_words(line, told, tmp_path):
    log = tmp_path / "printed 0"
    log.write_text(f"{line}\n")
    failure = parity.wait([mock.Mock(poll=lambda: 0)], tmp_path, [log], 9)
    assert failure.startswith(told) if told else failure is None


def test_dropout_of_an_rnn_and_stochastic_depth_are_off():
    rnn, drop_path = torch.nn.LSTM(8, 8, num_layers=2, dropout=0.5), type("DropPath", (torch.nn.Module,), {})()
    parity.switch_off_random_layers(torch.nn.Sequential(rnn, drop_path), eval_norm=False)
    assert rnn.dropout == 0.0 and not drop_path.training


def test_a_gradient_that_was_not_finite_is_recorded_anew(tmp_path, monkeypatch):
    """A GradScaler skips such a step, and no new step begins."""
    monkeypatch.setenv("RANK", "0")
    recorder, param = parity.Recorder(tmp_path, None), torch.nn.Parameter(torch.ones(2))
    recorder.names[param] = "a"
    for value in (float("inf"), 1.0, 5.0):
        param.grad = torch.full((2,), value)
        recorder.record("gradients")
    assert recorder.step.gradients["a"][2] == 2.0


# ---- the scripts of this project ------------------------------------------------------------------------------------

COMMANDS = re.findall(r"^\| `python parity\.py (.*?)` \|", (ROOT / "docs" / "parity.md").read_text(), re.M)
# test_equal.py proves more of these scripts, and other commands show parity.py all that they use.
PROVEN = {"min_FSDP.py", "min_FSDP_TP.py", "min_CP.py"}
ROWS = re.findall(r"(\w+)\*?\.py", (ROOT / "docs" / "parity.md").read_text().partition("## The scripts of")[2])


def test_the_table_has_every_script():
    scripts = {path.stem for path in ROOT.glob("*.py") if "\nif __name__ == " in path.read_text()}
    trains = {script for script in scripts - {"parity", "plan", "flyte_workflow"} if not script.startswith("rpc_")}
    assert trains <= set(ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in COMMANDS if not PROVEN & set(command.split())])
def test_scripts_of_this_project_are_equal(command, judge, tmp_path, monkeypatch):
    words = command.split()
    script = next(word for word in words if word.endswith(".py"))
    source = (ROOT / script).read_text()
    words[words.index(script)] = str(ROOT / script)
    if "\nimport gpt\n" in source and "gpt.make_parser" in source:
        words += ["--width", "64", "--length", "64", "--steps", "6", "--log-every", "3"]
    monkeypatch.chdir(tmp_path)
    status, printed = judge(*words)
    assert status == 0, printed
