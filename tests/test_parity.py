"""parity.py: it finds planted mistakes, names their causes, and says nothing of right scripts."""

import multiprocessing
import os
import re
import sys

import pytest
from conftest import ROOT, run_under_launcher

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
    "batch_divided_twice": "the global batch has 8 samples, and 16 on one process",
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
    "clipped_each_time": "the same before clipping, but not after: clip once in a step",
    "summed": "is 2 times that of one process: it is summed",
    "loss_is_a_sum": "is 1/2 times that of one process: it is averaged, but the loss is a sum",
    "loss_divided_by_n": "divided by the number of processes",
    "mean_over_unequal_counts": "a mean over shares of unequal weight",
    "labels_of_other_rows": "are the labels",
    "batch_norm": "BatchNorm (norm)",
    "learning_rate_times_n": "the optimizer's lr is 0.02 on rank 0, and 0.01 on one process",
    "scheduled_n_times": "the optimizer's lr is 0.0025 on rank 0, and 0.005 on one process",
    "weight_decay_times_n": "the optimizer's weight_decay is 0.2",
    "optimizer_first": "was the optimizer built before the model was sharded?",
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


@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["torch", "helper"])
@pytest.mark.parametrize("case", MISTAKES)
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
