"""min_TP.py: equal to one process, and split for real."""

import pytest
import transformer
from torch.distributed.tensor.parallel import loss_parallel

import gpt
import min_TP

KINDS = {
    "plain": {"sequence_parallel": False, "loss_parallel": False},
    "sequence": {"sequence_parallel": True, "loss_parallel": False},
    "sequence and loss": {"sequence_parallel": True, "loss_parallel": True},
}
CASES = [(kind, *how) for kind in KINDS for how in (("AdamW", None), ("SGD", 1.5))]  # clips about half of SGD's steps
SMALL = {"layers": 1, "log_every": 100}


def train(kind, optimizer, clip):
    args = transformer.arguments(clip=clip, **SMALL, **KINDS[kind])
    model = min_TP.parallelize(transformer.make_model(args), args)
    made = transformer.make_optimizer(optimizer, model.parameters(), args.lr)
    losses = min_TP.train(model, made, *transformer.small_text(), args)
    return losses, transformer.full_parameters(model), held_fractions(kind) if optimizer == "AdamW" else []


def held_fractions(kind):
    """Of parameters, gradients and Adam's state, that this process holds with the default sizes."""
    args = transformer.arguments(layers=2, width=128, heads=4, length=128, **KINDS[kind])
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
    most = {1: 1, 2: 0.52, 4: 0.27}[nprocs]
    results = transformer.train_on(nprocs, train, CASES, tmp_path)[-1]
    for (_, optimizer, clip), (losses, parameters, held) in zip(CASES, results, strict=True):
        transformer.assert_equal(losses, parameters, transformer.reference(optimizer, clip=clip, **SMALL))
        assert all(1 / nprocs <= fraction <= most for fraction in held), held


@pytest.mark.slow
def test_the_command_trains_and_prints(job_of):
    options = ("--sequence-parallel", "--loss_parallel", "--steps", 3, "--log-every", 2, "--clip", 1)
    outputs = []
    for nprocs, most in ((2, 0.52), (1, 1)):
        stdout = job_of("min_TP.py", *options, "--nproc", nprocs)
        held, lines = transformer.HELD.match(stdout), transformer.progress_lines(stdout)
        assert most - 0.02 < float(held[3]) <= most and [line["step"] for line in lines] == [2, 3]
        outputs.append(lines)
    for split, plain in zip(*outputs, strict=True):
        for name in ("loss", "held_out", "bigram", "trigram"):
            assert split[name] == pytest.approx(plain[name], abs=0.001), "one device trains the same, unsplit"
