"""min_TP.py: equal to one process, split for real, and as many bytes as it says."""

import functools
import math

import pytest
import torch
import transformer
from conftest import finish, start
from torch.distributed.tensor.parallel import loss_parallel

import distributed as dist
import gpt
import min_TP

KINDS = {
    "plain": {"sequence_parallel": False, "loss_parallel": False},
    "sequence": {"sequence_parallel": True, "loss_parallel": False},
    "sequence and loss": {"sequence_parallel": True, "loss_parallel": True},
}
CASES = [(kind, *how) for kind in KINDS for how in (("AdamW", None), ("SGD", 1.5))]  # clips about half of SGD's steps
SMALL = {"layers": 1, "log_every": 20}


def train_worker(local_rank, world_size, path):
    """All cases: losses and whole parameters of each; and what this process holds of a model with the default sizes."""
    dist.init_process_group()
    results = {}
    with transformer.float64():
        for kind, optimizer, clip in CASES:
            args = transformer.arguments(world_size, clip=clip, **SMALL, **KINDS[kind])
            model = min_TP.parallelize(transformer.make_model(args), args)
            optimizer_ = transformer.make_optimizer(optimizer, model.parameters(), args.lr)
            losses = min_TP.train(model, optimizer_, *transformer.small_text(), args)
            results[kind, optimizer, clip] = losses, transformer.full_parameters(model)
    for kind in KINDS:
        results[kind] = held_fractions(world_size, KINDS[kind])
    if local_rank == world_size - 1:
        torch.save(results, path)


def held_fractions(world_size, kind):
    """Of parameters, gradients and Adam's state, with the default sizes."""
    args = transformer.arguments(world_size, layers=2, width=128, heads=4, length=128, **kind)
    model = transformer.make_model(args)
    total = sum(param.numel() for param in model.parameters())
    model = min_TP.parallelize(model, args)
    optimizer = transformer.make_optimizer("AdamW", model.parameters(), args.lr)
    with loss_parallel():
        min_TP.local_loss(model, *gpt.batch(transformer.small_text()[0], 0, 1, args.length)).backward()
    optimizer.step()
    gradients = sum(transformer.local(param.grad).numel() for param in model.parameters())
    moments = [values[name] for values in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    state = sum(transformer.local(moment).numel() for moment in moments)
    return gpt.report_held(model.parameters(), total) / total, gradients / total, state / (2 * total)


@pytest.mark.parametrize("nprocs", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_equal_to_one_process_and_split_for_real(nprocs, tmp_path):
    dist.launch(train_worker, str(tmp_path / "results.pt"), nprocs=nprocs)
    results = torch.load(tmp_path / "results.pt", weights_only=True)
    for case in CASES:
        _, optimizer, clip = case
        transformer.assert_equal(*results[case], transformer.reference(optimizer, clip=clip, **SMALL))
    most = {1: 1, 2: 0.52, 4: 0.27}[nprocs]
    assert all(1 / nprocs <= fraction <= most for kind in KINDS for fraction in results[kind]), results


# ---- bytes sent ---------------------------------------------------------------------------------------------------


def count_bytes():
    dist.launch(count_bytes_worker, nprocs=2)


def count_bytes_worker(local_rank, world_size):
    dist.init_process_group()
    for kind in (
        {"sequence_parallel": False, "loss_parallel": False},
        {"sequence_parallel": False, "loss_parallel": True},
    ):
        args = transformer.arguments(world_size, layers=2, length=128, width=64, **kind)
        model = min_TP.parallelize(transformer.make_model(args), args)
        optimizer = transformer.make_optimizer("AdamW", model.parameters(), args.lr)
        train = functools.partial(min_TP.train, model, optimizer, *transformer.small_text())
        dist.print_primary("sent", transformer.sent_per_step(train, args))


@pytest.mark.slow
def test_bytes_sent_are_those_of_the_docstring():
    stdout = transformer.run_in_namespace("test_min_TP", "count_bytes")
    plain, loss_parallel = (float(line.split()[1]) for line in stdout.splitlines() if line.startswith("sent "))
    n, layers, batch, length, width = 2, 2, 8, 128, 64
    layers_bytes = (n - 1) / n * ((8 * layers + 3) * batch + 1) * 4 * length * width
    logits_bytes = (n - 1) / n * 4 * batch * length * 256
    assert plain == pytest.approx(layers_bytes + logits_bytes, rel=0.03)
    assert loss_parallel == pytest.approx(layers_bytes, rel=0.03)


# ---- the command --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_trains_and_prints():
    command = ("min_TP.py", "--sequence-parallel", "--loss_parallel", "--steps", 3, "--log-every", 2, "--clip", 1)
    jobs = [start(*command, *args) for args in ((), ("--nproc", 1))]
    outputs = []
    for job, most in zip(jobs, (0.52, 1), strict=True):
        status, stdout, stderr = finish(job)
        assert (status, stderr) == (0, "")
        held, lines = transformer.HELD.match(stdout), transformer.progress_lines(stdout)
        assert most - 0.02 < float(held[3]) <= most and [line["step"] for line in lines] == [2, 3]
        outputs.append(lines)
    for split, plain in zip(*outputs, strict=True):
        for name in ("loss", "held_out", "bigram", "trigram"):
            assert math.isclose(split[name], plain[name], abs_tol=0.001), "one device trains the same, unsplit"


@pytest.mark.slow
@pytest.mark.parametrize("args", [(), ("--sequence-parallel", "--loss-parallel")])
def test_learns(args):
    transformer.assert_learns("min_TP.py", *args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--nproc", "3"), "argument --heads: 4 is not a multiple of the 3 processes"),
        (("--nproc", "8"), "argument --heads: 4 is not a multiple of the 8 processes"),
        (("--sequence-parallel", "--length", "9"), "argument --length: 9 is not a multiple of the 2 processes"),
    ],
)
def test_bad_options_are_one_line(main_of, args, message):
    assert main_of("min_TP.py", *args) == (2, f"min_TP.py: error: {message}\n")
