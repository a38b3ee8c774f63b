"""min_DiLoCo.py: equal to copies that one process trains in turn, and to DDP where it should be."""

import functools
import re

import pytest
import torch
import torch.distributed as torch_dist
from conftest import run, torchrun
from torch.nn import functional as F
from transformer import (
    arguments,
    assert_equal,
    float64,
    full_parameters,
    make_model,
    make_optimizer,
    reference,
    run_in_namespace,
    sent_per_step,
    small_text,
)

import distributed as dist
import gpt
import min_DiLoCo

CASES = {
    "AdamW": ("AdamW", {"sync_every": 4}),
    "SGD, and a short last round": ("SGD", {"sync_every": 6}),
    "clipped, no momentum": ("AdamW", {"sync_every": 5, "outer_momentum": 0.0, "outer_lr": 0.8, "clip": 0.5}),
    "averaged every step": ("SGD", {"sync_every": 1, "outer_momentum": 0.0, "outer_lr": 1.0}),
    "averaged every step, AdamW": ("AdamW", {"sync_every": 1, "outer_momentum": 0.0, "outer_lr": 1.0}),
}


def case_arguments(changes):
    return arguments(**{"layers": 1, "log_every": 20, "outer_lr": 0.7, "outer_momentum": 0.9, **changes})


def worker(local_rank, world_size, cases, folder):
    dist.init_process_group()
    torch.set_num_threads(1)  # sums of products depend on it
    sent, all_reduce = [], torch_dist.all_reduce

    def counted(tensor, *op):
        sent.append(tensor.nbytes)
        all_reduce(tensor, *op)

    torch_dist.all_reduce = counted
    with float64():
        for name in cases:
            optimizer_name, changes = CASES[name]
            args = case_arguments(changes)
            model = make_model(args)
            optimizer = make_optimizer(optimizer_name, model.parameters(), args.lr)
            sent.clear()
            losses = min_DiLoCo.train(model, optimizer, *small_text(), args)
            # What reports, not the training, sends is tiny: it does not count.
            rounds = [size for size in sent if size > 1000]
            torch.save((losses, full_parameters(model), rounds), f"{folder}/{name} {world_size} {dist.get_rank()}")


def simulate(n, optimizer_name, args):
    """Every step's loss, and the parameters by name, of `n` copies that one process trains in turn."""
    models = [make_model(args) for _ in range(n)]
    optimizers = [make_optimizer(optimizer_name, model.parameters(), args.lr) for model in models]
    start = full_parameters(models[0])
    velocity = {name: torch.zeros_like(value) for name, value in start.items()}
    losses = torch.zeros(args.steps, n)
    for step in range(args.steps):
        x, y = gpt.batch(small_text()[0], step, args.batch_size, args.length, args.seed)
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            own = slice(rank * args.batch_size // n, (rank + 1) * args.batch_size // n)
            loss = F.cross_entropy(model(x[own]).flatten(0, 1), y[own].flatten())
            optimizer.zero_grad()
            loss.backward()
            if args.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            losses[step, rank] = loss.detach()
        if step % args.sync_every == args.sync_every - 1 or step == args.steps - 1:
            copies = [full_parameters(model) for model in models]
            for name, value in start.items():
                moved = sum(value - copy[name] for copy in copies) / n
                velocity[name] = velocity[name].mul(args.outer_momentum).add(moved)
                ahead = moved.add(velocity[name], alpha=args.outer_momentum)  # rounds once, as a * b + c does not
                start[name] = value.add(ahead, alpha=-args.outer_lr)
            for model in models:
                model.load_state_dict(start)
    return losses.sum(1) / n, start


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("n", "cases"), [(2, tuple(CASES)), (4, ("AdamW", "SGD, and a short last round"))])
def test_processes_do_what_one_does_with_a_copy_after_the_other(n, cases, tmp_path, one_thread):
    dist.launch(worker, cases, str(tmp_path), nprocs=n)
    results = {
        name: [torch.load(tmp_path / f"{name} {n} {rank}", weights_only=True) for rank in range(n)] for name in cases
    }
    for name, per_rank in results.items():
        optimizer_name, changes = CASES[name]
        args = case_arguments(changes)
        with float64():
            expected = simulate(n, optimizer_name, args)
        for losses, parameters, sent in per_rank:
            # Two numbers have one sum, in whatever order; four have several. AdamW makes a direction of that difference
            # where the gradient is 0 but for rounding, as that of the keys' biases, which all keys share.
            assert_equal(losses, parameters, expected, 0 if n == 2 else 1e-12 if optimizer_name == "SGD" else 1e-9)
            rounds = -(-args.steps // args.sync_every)
            assert sent == [8 * sum(value.numel() for value in parameters.values())] * rounds
    if n == 2:
        # The mean of SGD's steps is the step along the mean gradient, but AdamW's is not.
        losses, parameters, _ = results["averaged every step"][0]
        assert_equal(losses, parameters, reference("SGD", layers=1), 1e-12)
        losses, _, _ = results["averaged every step, AdamW"][0]
        assert (losses - reference("AdamW", layers=1)[0]).abs().max() > 1e-3


def count_bytes():
    dist.launch(count_bytes_worker, nprocs=2)


def count_bytes_worker(local_rank, world_size):
    dist.init_process_group()
    for sync_every in (1, 2):
        args = case_arguments({"width": 64, "sync_every": sync_every})
        model = make_model(args)
        optimizer = make_optimizer("AdamW", model.parameters(), args.lr)
        train = functools.partial(min_DiLoCo.train, model, optimizer, *small_text())
        sent, said = args.steps * sent_per_step(train, args), min_DiLoCo.report_sent(model, args)
        dist.print_primary("sent", sent, said)


@pytest.mark.slow
def test_bytes_sent_are_those_that_it_prints():
    stdout = run_in_namespace("test_min_DiLoCo", "count_bytes")
    lines = re.findall(r"^sent ([\d.]+) ([\d.]+)$", stdout, re.M)
    assert len(lines) == 2
    for sent, said in lines:
        assert float(sent) == pytest.approx(float(said), rel=0.03)


SMALL = ("--layers", 1, "--width", 16, "--heads", 2, "--length", 16, "--batch-size", 4)


@pytest.mark.slow
def test_says_what_it_sends_under_torchrun():
    status, stdout, stderr = torchrun(2, "min_DiLoCo.py", *SMALL, "--steps", 7, "--sync-every", 3, "--log-every", 3)
    assert status == 0, stderr
    lines = stdout.splitlines()
    assert [line.split(" | ")[0] for line in lines[:-1]] == ["step 3", "step 6", "step 7"]
    n_params = sum(param.numel() for param in gpt.GPT(1, 16, 2, 16).parameters())
    sent, ddp = (4 * n_params * count / 1e6 for count in (3, 7))  # half of it twice
    assert lines[-1] == f"sent by each process: {sent:.1f} MB in 3 outer steps (DDP: {ddp:.1f} MB)"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--sync-every 0", "argument --sync-every: '0' is not a whole number of at least 1"),
        ("--outer-lr 0", "argument --outer-lr: '0' is not a finite number above 0"),
        ("--outer-momentum 1", "argument --outer-momentum: 1.0 is not a number from 0 to below 1"),
        ("--outer-momentum nan", "argument --outer-momentum: nan is not a number from 0 to below 1"),
        ("--outer-momentum much", "argument --outer-momentum: invalid float value: 'much'"),
        ("--nproc 3", "argument --batch-size: 16 is not a multiple of the 3 processes"),
    ],
)
def test_bad_input_is_one_line(arguments, line, main_of, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", functools.partial(int, 0))
    status, stderr = main_of("min_DiLoCo.py", *arguments.split())
    assert status == 2
    assert re.fullmatch(rf"\S+: error: {re.escape(line)}\n", stderr), stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_learns_more_than_pairs_of_bytes():
    status, stdout, stderr = run("min_DiLoCo.py", "--nproc", 2, timeout=900)
    assert status == 0, stderr
    last = stdout.splitlines()[-2]
    held_out, bigram = (float(re.search(rf"{name} ([\d.]+)", last)[1]) for name in ("held-out", "bigram"))
    assert held_out < bigram, last
