"""parity.py: it finds planted mistakes, names their causes, and says nothing of right scripts."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, finish, guards, run_under_launcher, slow, start, wait_for, wait_until

import parity

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

    def call(*args):
        monkeypatch.setattr(parity, "start", Forked)
        status = parity.main([str(arg) for arg in args])
        return status, capsys.readouterr().out

    return call


# ---- planted mistakes ----------------------------------------------------------------------------------------------

MISTAKES = {
    "kept_batch_size": "the global batch has 32 samples, and 16 on one process",
    "divided_twice": "the global batch has 8 samples, and 16 on one process",
    "no_sampler": "all ranks have the same samples",
    "data_of_each_rank": "the global batch has other samples",
    "noise_of_each_rank": "the argument x is the same, but noise is not: if it is drawn at random",
    "mask_on_one_rank": "the argument mask is None, or missing",
    "plain_model": "is the plain model trained",
    "wrapper_not_kept": "Nothing averages them",
    "no_sync_on_the_last": "Nothing averages them",
    "penalty_by_the_plain_model": "rank 1 has another gradient",
    "parameter_outside": "is it outside of the wrapped model",
    "unfrozen_later": "unfrozen after wrapping",
    "one_forgotten": "last.bias than other ranks: is it outside",
    "clipped_before_average": "when they are clipped: average them first",
    "clipped_each_time": "when they are clipped: average them first",
    "clipped_at_n_times": "the same before clipping, but not after: clip once in a step",
    "summed": "is 2 times that of one process: it is summed",
    "loss_is_a_sum": "is 1/2 times that of one process: it is averaged, but the loss is a sum",
    "loss_divided_by_n": "divided by the number of processes",
    "mean_over_unequal_counts": "a mean over shares of unequal weight",
    "labels_of_other_rows": "are the labels",
    "batch_norm": "BatchNorm (norm)",
    "learning_rate_times_n": "the optimizer's lr is 0.02 on rank 0, and 0.01 on one process",
    "scheduled_n_times": "the optimizer's lr is 0.0025 on rank 0, and 0.005 on one process",
    "weight_decay_times_n": "the optimizer's weight_decay is 0.2",
    "optimizer_first": "the optimizer was built before the model was sharded",
    "seed_of_the_model": "is the same seed set before the model is built",
    "drawn_after_wrapping": "on rank 1 than on other ranks",
    "loaded_on_one_rank": "are weights loaded before it is wrapped",
    "fewer_steps": "the ranks take 3 and 3 steps, and one process takes 6",
}
RIGHT = [
    *(
        "two_models",
        "gan",
        "padded",
        "accumulated",
        "frozen",
        "tied",
        "dict",
        "recompute",
        "rnn",
        "keywords",
        "compiled",
    ),
    *("clipped", "closure", "lbfgs", "rmsprop", "ema", "zero_redundancy", "by_hand", "average_of_the_owner", "sharded"),
    *("noise_for_the_batch", "sum_over_the_count"),
]

PAGE = (ROOT / "docs" / "mistakes.md").read_text()
PROVEN_HERE_ALONE = re.findall(r"\[`(\w+)`\]\(\.\./tests/planted\.py\)", PAGE)
GUARDS = ("kept_batch_size", "no_sampler", "loss_is_a_sum")


def test_the_page_of_mistakes_quotes_what_is_said():
    quotes = re.findall(r'`parity\.py` says "(.*?)"', PAGE)
    assert len(quotes) >= 14 and set(quotes) <= set(MISTAKES.values()) and set(PROVEN_HERE_ALONE) <= set(MISTAKES)


@pytest.mark.parametrize("flavour", ["torch", "helper"])
@pytest.mark.parametrize("case", [*guards(*GUARDS), *slow(*[case for case in MISTAKES if case not in GUARDS])])
def test_a_planted_mistake_is_found_and_named(case, flavour, judge):
    status, printed = judge(PLANTED, case, flavour)
    assert status == 1, printed
    assert MISTAKES[case] in printed


@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["torch", "helper"])
@pytest.mark.parametrize("case", RIGHT)
def test_an_unusual_but_right_script_is_equal(case, flavour, judge):
    status, printed = judge(PLANTED, case, flavour)
    assert status == 0, printed
    assert re.search(r"equal on 1 and 2 processes for 5 steps, up to \S+ \(allowed: 1e-10\)\n$", printed)


# ---- runs that cannot be compared -----------------------------------------------------------------------------------


def test_ranks_that_stand_still_are_named_with_their_steps(judge, monkeypatch):
    monkeypatch.setenv("WATCH_SECONDS", "1")
    status, printed = judge(PLANTED, "stand_still", "helper")
    assert status == 2
    line = (
        r"planted.py: on 2 processes it stands still: no progress for 1 s: rank 0 in planted.py:\d+ torch_dist.barrier"
    )
    assert re.search(line + r".* \| rank 1 in planted.py:\d+ .*\. Steps of each rank: 2 and 2", printed), printed


def test_a_crash_on_several_processes_is_named_with_the_steps(judge):
    status, printed = judge(PLANTED, "crash", "torch")
    assert status == 2
    line = (
        r"planted.py: on 2 processes it fails on rank 1: ZeroDivisionError: planted. Steps of each rank: [23] and 3\n"
    )
    assert re.fullmatch(line, printed), printed


def test_a_run_that_takes_too_long_is_ended(judge):
    status, printed = judge("--timeout", 0.1, PLANTED, "two_models", "torch")
    assert status == 2
    assert "on one process it stands still: it has not ended after 0 s. Steps of each rank:" in printed


@pytest.mark.slow
def test_scripts_that_do_not_train_or_fail_in_float64(judge):
    status, printed = judge(PLANTED, "no_optimizer", "torch")
    assert status == 2 and "takes no step of an optimizer" in printed
    status, printed = judge(PLANTED, "no_gradient", "torch")
    assert status == 1 and "nothing is trained, on one process too" in printed
    status, printed = judge(PLANTED, "not_in_float64", "torch")
    assert status == 2 and "on one process it fails" in printed and printed.endswith("try --float32\n")


@pytest.mark.slow
def test_options(judge):
    """BatchNorm with its running statistics; several numbers of processes; numbers that are printed."""
    status, printed = judge("--eval-norm", PLANTED, "batch_norm", "helper")
    assert status == 0, printed
    status, printed = judge("--nproc", 2, 4, "--steps", 3, PLANTED, "printed_sum", "torch")
    assert status == 0
    assert re.findall("equal on 1 and (.) processes for 3 steps", printed) == ["2", "4"]
    assert "printed by 1 process: step 0 | loss 0.5000 | 0.5 ms\nprinted by 2 processes: step 0 | loss 1.0" in printed
    status, printed = judge("--float32", PLANTED, "clipped", "torch")
    assert status == 0 and "(allowed: 0.001)" in printed


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


def make_record(number=0, weight=1.0, gradient=1.0, clipped=None, rows=(1.0, 2.0), norms=(), **settings):
    """As a Recorder writes it, of a model with two parameters. Numbers stand for tensors."""

    def tensors(value):
        names = {"a": torch.arange(1.0, 4), "b": torch.ones(2, 2)}
        return {name: parity.sketch(value * tensor.double()) for name, tensor in names.items()}

    return {
        **{"number": number, "weights": tensors(weight), "gradients": tensors(gradient)},
        **{"clipped": tensors(gradient if clipped is None else clipped), "norms": list(norms)},
        **{"inputs": {"x": (torch.tensor(rows, dtype=torch.float64), 3)}, "settings": [{"lr": "0.1", **settings}]},
    }


def test_equal_records_are_equal():
    one = [make_record(0), make_record(1, weight=2.0)]
    ranks = [
        [make_record(0, rows=[1.0]), make_record(1, weight=2.0)],
        [make_record(0, rows=[2.0]), make_record(1, 2.0)],
    ]
    assert parity.compare(one, ranks) == (None, 1, 0.0)


@pytest.mark.parametrize(
    ("ranks", "cause"),
    [
        ([{"rows": [1.0, 2.0]}, {"rows": [3.0, 4.0]}], "the global batch has 4 samples, and 2 on one process"),
        ([{"rows": [1.0, 2.0]}, {"rows": [2.0]}], "and 2 on one process. The sampler repeats some"),
        ([{"rows": [1.0]}, {"rows": [3.0]}], "the global batch has other samples (x)"),
        ([{"rows": [2.0]}, {"rows": [2.0]}], "all ranks have the same samples (x)"),
    ],
)
def test_samples_are_the_first_cause(ranks, cause):
    """Though the gradients differ between ranks too, and BatchNorm is there."""
    got = [make_record(gradient=number + 2, **options) for number, options in enumerate(ranks)]
    assert cause in parity.why(make_record(norms=["norm"]), got)


@pytest.mark.parametrize(
    ("expected", "ranks", "cause"),
    [
        (
            {},
            [{"gradient": 3.0}, {"gradient": 4.0}],
            "rank 1 has another gradient of a than other ranks. Nothing",
        ),
        (
            {},
            [{"gradient": 3, "clipped": 1}, {"gradient": 4, "clipped": 1}],
            "when they are clipped: average them first",
        ),
        ({}, [{"gradient": 2.0}] * 2, "the gradient of a is 2 times that of one process: it is summed"),
        ({}, [{"gradient": 0.5}] * 2, "the gradient of a is 1/2 times that of one process: it is averaged"),
        ({"norms": ["norm"]}, [{"gradient": 0.9}] * 2, "BatchNorm (norm)"),
        ({}, [{"gradient": 0.9}] * 2, "the gradient of a is not: are the labels"),
        ({}, [{"clipped": 0.9}] * 2, "the same before clipping, but not after"),
        ({}, [{"lr": "0.2"}] * 2, "the optimizer's lr is 0.2 on rank 0, and 0.1 on one process"),
        ({}, [{}] * 2, "is the optimizer's state"),
    ],
)
def test_other_causes_with_the_same_samples(expected, ranks, cause):
    got = [make_record(rows=[number], **options) for number, options in zip((1.0, 2.0), ranks, strict=True)]
    assert cause in parity.why(make_record(**expected), got)


def test_a_gradient_that_one_rank_has_right_is_right():
    """Scripts that split the optimizer average each gradient for its owner only."""
    owner = make_record(rows=[1.0])
    other = make_record(rows=[2.0], gradient=7.0)
    assert parity.wrong_gradients(make_record(), [owner, other]) == []


def test_a_factor_is_told_though_the_weights_agree():
    steps = [make_record(0, gradient=0.5), make_record(1, weight=2.0, gradient=0.5)]
    one = [make_record(0), make_record(1, weight=2.0)]
    line, _, _ = parity.compare(one, [steps, steps])
    assert line.startswith("the weights agree, but in step 1 the gradient of a is 1/2 times")
    for record in steps:
        record["settings"] = [{"lr": "0.2"}]  # which makes up for it
    assert parity.compare(one, [steps, steps])[0] is None


def test_the_first_rank_with_other_weights_is_named():
    one = [make_record(0), make_record(1, weight=2.0)]
    line, _, _ = parity.compare(one, [[make_record(0)], [make_record(0, weight=1.5)]])
    assert line.startswith("the first step begins with other weights on rank 1 than on other ranks (a)")


def test_parts_that_a_script_cuts_are_not_compared():
    """They have another shape on several processes, and each rank has another one."""
    one, first, second = make_record(), make_record(), make_record()
    for record, number in ((first, 1.0), (second, 2.0)):
        record["weights"]["b"] = parity.sketch(torch.full((1, 2), number, dtype=torch.float64))
    assert parity.other_weights(one, [first, second]) is None


def test_a_sketch_sees_one_number_and_an_exchange():
    tensor = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = {"a": parity.sketch(tensor)}
    other = tensor.clone()
    other[500] += 1e-6
    exchanged = tensor.clone()
    exchanged[[3, 3 + 64]] = tensor[[3 + 64, 3]]  # in the same sum
    for each in (other, exchanged, -tensor):
        assert parity.differing(expected, {"a": parity.sketch(each)}) == ["a"]
    assert parity.differing(expected, {"a": parity.sketch(tensor * (1 + 1e-12))}) == []


def test_padding_at_the_end_of_a_row_changes_nothing():
    row = torch.arange(1.0, 40)[None]
    short, _ = parity.rows_of(row)
    long, width = parity.rows_of(torch.nn.functional.pad(row, (0, 60)))
    assert torch.allclose(short, long) and width == 99


# ---- options and output ---------------------------------------------------------------------------------------------


def test_arguments_for_each_number_of_processes():
    assert parity.for_processes("--batch=64/N", 2) == "--batch=32"
    assert parity.for_processes("run-N.pt", 4) == "run-4.pt"
    assert parity.for_processes("NAME", 4) == "NAME"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["missing.py"], "'missing.py'"),
        (["--steps", "5"], "name a file that ends in .py"),
        (["--nproc", "1", str(PLANTED)], "--nproc: 1 must be at least 2"),
        (["--steps", "0", str(PLANTED)], "--steps: 0 must be at least 1"),
        (["--nproc", "2", "3", str(PLANTED), "--batch=64/N"], "64 is not a multiple of 3"),
    ],
)
def test_a_wrong_option_is_one_line_and_status_2(words, part, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parity.parse_args(words)
    assert exit_info.value.code == 2
    assert part in capsys.readouterr().err.splitlines()[-1]


def test_the_scripts_own_options_stay_with_it():
    args = parity.parse_args(["--nproc", "2", "3", str(PLANTED), "--steps", "7", "other.py"])
    assert (args.nproc, args.steps, args.args) == ([2, 3], 5, ["--steps", "7", "other.py"])


def test_printed_numbers_but_not_times_and_speeds():
    one = "epoch 1 | loss 0.50 | 2.5 s | 1,234.5 tokens/s | 12:30:01.5\nsamples 32\nlr 0.1"
    same = one.replace("2.5 s", "9.5 s").replace("1,234.5", "99.0").replace("12:30:01.5", "13:00:00.0")
    assert parity.other_prints(one, same.replace("32", "16")) == []
    other = same.replace("0.50", "1.00")
    assert parity.other_prints(one, other) == [(one.splitlines()[0], other.splitlines()[0])]


def test_the_rank_that_was_silent_first_has_failed_first(tmp_path):
    logs = []
    for rank, text in enumerate(("RuntimeError: Connection closed by peer", "Traceback\nZeroDivisionError: planted\n")):
        logs.append(Path(tmp_path, str(rank)))
        logs[rank].write_text(text)
        os.utime(logs[rank], (0, 10 - rank))
    assert parity.describe_failure([1, 1], logs) == "fails on rank 1: ZeroDivisionError: planted"
    assert parity.describe_failure([1, 0], logs).endswith("Connection closed by peer")


# ---- the scripts of this project ------------------------------------------------------------------------------------

COMMANDS = re.findall(r"^\| `python parity\.py (.*?)` \|", (ROOT / "docs" / "parity.md").read_text(), re.M)
ROWS = re.findall(r"(\w+)\*?\.py", (ROOT / "docs" / "parity.md").read_text().partition("## The scripts of")[2])


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_scripts_of_this_project_are_equal(command, judge, tmp_path, monkeypatch):
    words = command.split()
    script = next(word for word in words if word.endswith(".py"))
    source = (ROOT / script).read_text()
    words[words.index(script)] = str(ROOT / script)
    if "\nimport gpt\n" in source and "add_model_options" in source:
        words += ["--width", "64", "--length", "64", "--steps", "6", "--log-every", "3"]
    monkeypatch.chdir(tmp_path)
    status, printed = judge(*words)
    print(printed)
    assert status == 0, printed


def test_the_table_has_every_script():
    scripts = {path.stem for path in ROOT.glob("*.py") if "\nif __name__ == " in path.read_text()}
    trains = {script for script in scripts if script not in ("parity", "plan", "flyte_workflow")}
    assert {script for script in trains if script not in ROWS and not script.startswith("rpc_")} == set()
