"""min_GRPO.py equals a loop that draws and trains one answer at a time, without cache, batch, padding and DDP."""

import argparse
import contextlib
import copy
import functools
import io
import re
from unittest import mock

import pytest
import torch
import transformer
from conftest import float64, guards, on_processes, slow, slow_clock
from test_gpt_generate import continue_alone

import distributed as dist
import gpt
import gpt_generate
import min_GRPO

TRAINING = {"imitation_steps": 12, "steps": 3, "prompts": 7, "group_size": 3, "temperature": 0.8, "inner_steps": 1}
TRAINING |= {"clip_low": 0.05, "clip_high": 0.08, "lr": 0.0025, "seed": 3, "log_every": 1, "output": None}
DIGITS, LONGEST = 5, 7
IMITATION_LR = 0.01
SIZES = {"layers": 2, "width": 16, "heads": 4, "length": DIGITS + 1 + LONGEST}
HELD_OUT = 13  # no number of processes here divides it, or the number of prompts
CASES = [  # the optimizer, is there a signal in few groups only, and options
    ("SGD", False, {}),
    ("SGD", False, {"inner_steps": 3}),
    ("AdamW", False, {"inner_steps": 2}),
    ("SGD", True, {"inner_steps": 2}),
]
LINE = re.compile(
    r"step (\d+)/\d+ \| reward (\d\.\d{3}) \| held-out (\d\.\d{3}) \| no signal (\d\.\d\d) \| "
    r"mismatch (\de[+-]\d\d) \| clipped (\d\.\d{3}) \| ([\d,]+) answers/s"
)


def arguments(**changes):
    return argparse.Namespace(**{**TRAINING, **changes})


def small(module=min_GRPO, **changes):
    """A patch of the script's constants, and of what else a user replaces. Each step takes two seconds."""
    constants = {"DIGITS": DIGITS, "LONGEST": LONGEST, "FLAWED": 0.5, "IMITATION_LR": IMITATION_LR, "SIZES": SIZES}
    return mock.patch.multiple(module, **constants, HELD_OUT=HELD_OUT, time=slow_clock(), **changes)


def partial_reward(sparse, prompt, answer):
    """The share of bytes in the right place, so that nearly all groups have a signal; if `sparse`, few have one."""
    if sparse and prompt[0] > ord("1"):
        return 0.0
    right = bytes(sorted(prompt[:-1])) + b"\n"
    return sum(a == b for a, b in zip(right, answer, strict=False)) / max(len(right), len(answer))


ADAMW = torch.optim.AdamW


def make_optimizer(name, params, lr, fused=False):
    """SGD instead of AdamW, but not for imitation."""
    if name == "SGD" and lr != IMITATION_LR:
        return torch.optim.SGD(params, lr=100 * lr)
    return ADAMW(params, lr=lr)


def with_optimizer(name):
    return mock.patch("torch.optim.AdamW", functools.partial(make_optimizer, name))


# ---- one answer at a time -------------------------------------------------------------------------------------------


def continued(model, prompt, numbers, temperature):
    text, _ = continue_alone(model, prompt, numbers, ord("\n"), temperature)
    return text.removeprefix(prompt)


def log_probabilities(model, prompt, answer, temperature):
    """Of each byte of the answer."""
    logits = model(torch.tensor([list((prompt + answer)[:-1])]))[0, len(prompt) - 1 :] / temperature
    return logits.log_softmax(-1)[torch.arange(len(answer)), list(answer)]


def loss_of_answer(model, args, prompt, answer, advantage, old):
    """And how many of its bytes have no gradient, because their ratio is clipped."""
    new = log_probabilities(model, prompt, answer, args.temperature)
    ratio = (new - old).exp()
    total, n_clipped = 0, 0
    for r in ratio:
        clipped = max(1 - args.clip_low, min(1 + args.clip_high, r))
        total = total - min(r * advantage, clipped * advantage)
        n_clipped += int(clipped * advantage < r * advantage)
    return total, n_clipped


def draw_all(model, step, sparse, args):
    """The answers of all groups, the batch for their losses, and their rewards."""
    batch, rewards = [], []
    for number, prompt in enumerate(min_GRPO.make_prompts(f"step {step}", args.prompts, args.seed)):
        drawn = gpt_generate.uniform(f"{args.seed} {step} {number}", args.group_size, LONGEST)
        answers = [continued(model, prompt, numbers, args.temperature) for numbers in drawn]
        of_group = torch.tensor([partial_reward(sparse, prompt, answer) for answer in answers])
        advantages = of_group - of_group.mean()
        for answer, advantage in zip(answers, advantages.tolist(), strict=True):
            with torch.no_grad():
                old = log_probabilities(model, prompt, answer, args.temperature)
            batch.append((prompt, answer, advantage, old))
        rewards.append(of_group.mean().item())
    return batch, rewards


@functools.cache
def imitator():
    """The model after imitation. Every case starts from it."""
    args = arguments()
    with float64(), small():
        model = gpt.GPT(gpt.Config(**min_GRPO.SIZES), args.seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=IMITATION_LR)
        for step in range(args.imitation_steps):
            prompts = min_GRPO.make_prompts(f"imitate {step}", 2 * args.prompts, args.seed)
            answers = min_GRPO.teacher_answers(prompts, f"{args.seed} teacher {step}")
            total = 0
            for prompt, answer in zip(prompts, answers, strict=True):
                total = total - log_probabilities(model, prompt, answer, 1).sum()
            transformer.take_step(model, optimizer, total / sum(map(len, answers)))
    return model


@functools.cache
def reference(case, delay=0):
    """Parameters by name; the reward of every step, which groups have a signal, and which share of bytes is clipped at
    the last inner step; and the held-out share at last.

    The answers of a step are drawn by the weights before the step that was `delay` steps ago.
    """
    optimizer_name, sparse, changes = CASES[case]
    args = arguments(**changes)
    start_model = imitator()
    model = copy.deepcopy(start_model)
    with float64(), small():
        optimizer = make_optimizer(optimizer_name, model.parameters(), args.lr)
        lengths, rewards, signals, shares, history = set(), [], [], [], []
        for step in range(args.steps):
            history.append(copy.deepcopy(model))
            batch, of_step = draw_all(history[max(step - delay, 0)], step, sparse, args)
            lengths |= {len(answer) for _, answer, *_ in batch}
            n_bytes = sum(len(answer) for _, answer, *_ in batch)
            for _ in range(args.inner_steps):
                losses, n_clipped = zip(*(loss_of_answer(model, args, *answer) for answer in batch), strict=True)
                transformer.take_step(model, optimizer, sum(losses) / n_bytes)
            shares.append(sum(n_clipped) / n_bytes)
            rewards.append(sum(of_step) / len(of_step))
            advantages = torch.tensor([advantage for _, _, advantage, _ in batch]).view(-1, args.group_size)
            signals.append(advantages.any(dim=1).tolist())
        before, after = transformer.full_parameters(start_model), transformer.full_parameters(model)
        assert all((after[name] - before[name]).abs().max() > 1e-5 for name in before if name != "position.weight")
        assert len(lengths) > 3
        prompts = min_GRPO.make_prompts("held-out", HELD_OUT, args.seed)
        held_out = [
            partial_reward(sparse, prompt, continued(model, prompt, torch.zeros(LONGEST), 0)) for prompt in prompts
        ]
    return after, rewards, signals, shares, sum(held_out) / HELD_OUT


# ---- the script -----------------------------------------------------------------------------------------------------


def train(case, module=min_GRPO):
    """The parameters that the script's main_worker saves, and what it prints on this rank."""
    optimizer_name, sparse, changes = CASES[case]
    args = arguments(**changes, output="model.pt")
    reward = functools.partial(partial_reward, sparse)
    with (
        small(module, reward=reward),
        with_optimizer(optimizer_name),
        contextlib.redirect_stdout(io.StringIO()) as stdout,
    ):
        module.main_worker(dist.get_local_rank(), dist.get_world_size(), args)
    assert torch.initial_seed() == args.seed + dist.get_rank(), "or dropout in a copy is the same on all ranks"
    return torch.load("model.pt", weights_only=True)["model"], stdout.getvalue()


@on_processes(*guards(2), *slow(1, 3, 4))
@pytest.mark.parametrize("case", range(len(CASES)))
@float64()
def test_equals_one_answer_at_a_time(case):
    _, sparse, changes = CASES[case]
    expected, rewards, signals, shares, held_out = reference(case)
    parameters, stdout = train(case)
    for name, value in expected.items():
        assert (parameters[name] - value).abs().max() <= 1e-9, name
    n = dist.get_world_size()
    if sparse and n > 1:
        assert not all(any(of_step[rank::n]) for of_step in signals for rank in range(n)), "some have no signal"
    if dist.get_rank() > 0:
        assert stdout == ""
        return
    numbers = [LINE.fullmatch(line).groups() for line in stdout.splitlines()[1:]]
    assert [number[0] for number in numbers] == ["1", "2", "3"]
    assert [float(number[1]) for number in numbers] == pytest.approx(rewards, abs=0.0006)
    assert float(numbers[-1][2]) == pytest.approx(held_out, abs=0.0006)
    no_signal = [of_step.count(False) / len(of_step) for of_step in signals]
    assert [float(number[3]) for number in numbers] == pytest.approx(no_signal, abs=0.006)
    assert all(float(number[4]) < 1e-12 for number in numbers), "the ratio is 1 at the first inner step"
    assert [float(number[5]) for number in numbers] == pytest.approx(shares, abs=0.0006)
    assert sparse or any(shares) == ("inner_steps" in changes)
    assert {number[6] for number in numbers} == {"10"}, "21 answers in two seconds"


# ---- learning -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_learns_what_the_teacher_did_not_show(job_of):
    first, *lines = job_of("min_GRPO.py", "--nproc", 1).splitlines()
    numbers = [LINE.fullmatch(line).groups() for line in lines]
    assert float(numbers[0][1]) < 0.8 < 0.85 < float(numbers[-1][1]), "the reward, of step 10 and of step 100"
    assert float(first.split()[-1]) < 0.95 < float(numbers[-1][2]), "held-out prompts"
    assert all(float(number[4]) < 1e-5 for number in numbers), "the sampler is the model that is trained"


@pytest.mark.parametrize("nprocs", [1, *guards(3)])
def test_an_exception_in_the_reward_loses_no_saved_step(nprocs, tmp_path):
    """The job that resumes ends bit for bit as an undisturbed one."""
    states = []
    for name, fails_at in (("whole.pt", None), ("failed.pt", 3)):
        args = arguments(steps=5, log_every=2, imitation_steps=2, prompts=6, output=str(tmp_path / name))
        if fails_at is not None:
            with pytest.raises(Exception, match="the judge did not answer"):
                dist.launch(failing_worker, args, fails_at, nprocs=nprocs)
            assert torch.load(args.output, weights_only=True)["step"] == 2
        dist.launch(failing_worker, args, None, nprocs=nprocs)
        states.append(torch.load(args.output, weights_only=True))
    assert states[0]["step"] == 5 and states[0]["sizes"] == SIZES
    assert all(torch.equal(states[0]["model"][name], states[1]["model"][name]) for name in states[0]["model"])


def failing_worker(local_rank, world_size, args, fails_at):
    def judge(prompt, answer):
        if prompt in min_GRPO.make_prompts(f"step {fails_at}", args.prompts, args.seed):
            raise TimeoutError("the judge did not answer")
        return partial_reward(False, prompt, answer)

    with small(reward=judge):
        min_GRPO.main_worker(local_rank, world_size, args)


def test_advantages_compare_with_the_group():
    nan, inf = float("nan"), float("inf")
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1, 1, nan, 0, nan, nan, nan, nan, nan, 1, inf, 0, 0])
    expected = [0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0, 0.5, 0, -0.5, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert min_GRPO.advantages_of(rewards, 4).tolist() == expected, "one without a reward has no advantage"


def test_the_divergence_and_its_gradient_are_exact_in_expectation():
    """Summed over all bytes, weighted by the probability with which each was drawn."""
    with float64():
        torch.manual_seed(0)
        logits = torch.randn(10, requires_grad=True)
        old, reference_log = torch.randn(2, 10).log_softmax(-1)
        new = logits.log_softmax(-1)
        (exact,) = torch.autograd.grad((new.exp() * (new - reference_log)).sum(), logits, retain_graph=True)
        ratio = (new - old).exp()
        difference = reference_log - new
        wrong = (old.exp() * (difference.exp() - 1 - difference)).sum()
        estimate = (old.exp() * ratio * (difference.exp() - 1 - difference)).sum()
        assert estimate.item() == pytest.approx((new.exp() * (new - reference_log)).sum().item())
        assert (torch.autograd.grad(wrong, logits, retain_graph=True)[0] - exact).abs().max() > 1e-3
        assert (torch.autograd.grad(estimate, logits)[0] - exact).abs().max() < 1e-12


@pytest.mark.parametrize("value", [True, 1, torch.tensor(1)])
def test_rewards_are_floats_whatever_the_program_returns(value):
    """On a rank where all are whole numbers too, since ranks must reduce one type."""
    dist.init_process_group(even_alone=True)
    with small(reward=lambda prompt, answer: value):
        model = gpt.GPT(gpt.Config(**SIZES))
        *_, rewards = min_GRPO.draw_completions(model, 0, [0, 1], arguments())
        assert rewards.dtype == torch.get_default_dtype() and rewards.tolist() == [1] * 6
        assert min_GRPO.evaluate(model, arguments()) == 1.0


def test_the_task():
    prompts = min_GRPO.make_prompts("any", 400, 0)
    assert prompts == min_GRPO.make_prompts("any", 400, 0) != min_GRPO.make_prompts("other", 400, 0)
    assert prompts != min_GRPO.make_prompts("any", 400, 1)
    assert min_GRPO.reward(b"62615=", b"12566\n") == 1
    assert [min_GRPO.reward(b"62615=", wrong) for wrong in (b"12566", b"12656\n", b"1256\n", b"")] == [0, 0, 0, 0]
    answers = min_GRPO.teacher_answers(prompts, "a seed")
    rewards = [min_GRPO.reward(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    assert 0.2 < sum(rewards) / 400 < 0.5, "exchanged neighbours may be equal"
