"""Reinforcement learning from rewards that a program computes (GRPO): draw answers, check them, prefer the right ones.

The task is to sort digits: the model should continue `62615=` by `12566` and the end of the line. First it imitates a
teacher who makes a mistake in most examples. From then on it sees no more examples. In each step it draws a group of
answers to each prompt. A program rewards each answer with 1 or 0. An answer is good if it beats the mean of its group:

    prompt     answers (a group)   reward   advantage = reward - mean of the group's rewards
    62615=     12566                 1        0.75
               12656                 0       -0.25
               15266                 0       -0.25
               1266                  0       -0.25

    rank 0     prompts 0, 2, 4, …    draw, check, compare ──┐
                                                            ├──► one step of DDP on the answers of all ranks
    rank 1     prompts 1, 3, 5, …    draw, check, compare ──┘

The answers of a group are on one rank, so advantages need no communication. Generation uses the model without its DDP
wrapper, so it needs none either, and ranks may finish at different times. The update makes them wait for each other.
The random numbers depend on the seed, the step and the prompt's index alone, so the number of processes changes the
answers only by rounding.

Let A be the advantage of an answer, p the probability that the model gives to one of its bytes, and r = p / (p when the
byte was drawn). The loss of a step is one fraction over the bytes of all answers of all ranks:

    loss = Σ -min(r·A, clip(r, 1 - low, 1 + high)·A) / (number of bytes)

A mean of the ranks' means would give some bytes a larger weight than others, and no error would be raised. At the first
of the --inner-steps r is 1, and the gradient equals REINFORCE's with the group's mean as its baseline. Later inner
steps use the same answers again. Clipping then limits how far they move the model. With --kl each byte adds to the sum

    kl · r·(exp(d) - 1 - d),    d = log(p of the model after imitation) - log p

which is an estimate of the KL divergence. Averaged over the bytes that may follow a text, its gradient equals the
gradient of the divergence. Without the factor r it would not. Groups and their mean are from arXiv:2402.03300, the
denominator is from arXiv:2503.14476. As in arXiv:2503.20783, the advantage is not divided by the deviation of its
group: that would favour prompts that are nearly always or nearly never solved.

Choose it if a program can check answers, nobody can write enough right ones, and the model is right sometimes: a task
that it never solves is not learnt in this way. If you have right answers, imitate them (min_Packing.py). If you want to
train a large model, whose answers an inference engine draws on other GPUs, use TRL or verl.

Cost per process, for P float32 parameters on N processes: 16·P bytes with AdamW, and 4·P more with --kl. Each inner
step sends 2·(N-1)/N · 4·P bytes, as DDP does. While R answers are drawn that have up to T bytes with their prompts, the
keys and values take 8·layers·width·R·T bytes.

    python min_GRPO.py --nproc 2                                     # two processes; without --nproc, all GPUs
    python min_GRPO.py --nproc 2 --inner-steps 2 --output model.pt   # answers used twice; saved for min_Generate.py
    torchrun --standalone --nproc-per-node 2 min_GRPO.py

It prints after the first step, every --log-every steps and the last, a line like
`step 100/100 | reward 0.920 | held-out 0.996 | no signal 0.63 | mismatch 7e-08 | clipped 0.000 | 6,902 answers/s`. The
reward is the mean over the answers since the last line. Held-out is the share of 256 further prompts that the model
solves if it always takes the most probable byte. By chance, 2 of these 256 also occur in training. "No signal" is the
share of groups whose answers are all equally good, which teach nothing. Mismatch is the mean of |r - 1| over all bytes
at the first inner step: if it is above 1e-5 on the CPU, the model that is trained differs from the model that drew, by
a temperature, a type, a mask or dropout. Clipped is the share of all bytes whose ratio is clipped at the last inner
step.
"""

import copy
import math
import random
import time

import torch
import torch.distributed as torch_dist
from torch import nn

import checkpoint
import distributed as dist
import gpt
import gpt_generate
import options

DIGITS = 8  # most in a prompt
LONGEST = DIGITS + 2  # bytes of an answer, which may have a digit too many
SIZES = {"layers": 2, "width": 64, "heads": 4, "length": DIGITS + 1 + LONGEST}  # of the model
STOP = ord("\n")  # ends each answer
FLAWED = 0.8  # the share of the teacher's answers in which two neighbours are exchanged: a mistake, unless equal
IMITATION_LR = 0.002
HELD_OUT = 256  # prompts


# ---- reinforcement learning ---------------------------------------------------------------------------------------


def train(model, args):
    reference = None
    if args.kl:
        reference = copy.deepcopy(dist.unwrapped(model)).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    recent = []  # this process's sums of each step since the last line
    start = time.perf_counter()
    for step in range(args.steps):
        # Tokens, where they are answers, and their log-probabilities: each (answers, length). Rewards: (answers,).
        tokens, answered, old, rewards = draw_answers(dist.unwrapped(model), step, own(range(args.prompts)), args)
        advantages = advantages_of(rewards, args.samples)
        sums = update(model, optimizer, reference, tokens, answered, old, advantages, args)
        recent.append(add_rewards(sums, rewards, advantages, args.samples))
        if step == 0 or (step + 1) % args.log_every == 0 or step + 1 == args.steps:
            print_line(step, recent, start, model, args)
            recent = []
            start = time.perf_counter()


def draw_answers(model, step, numbers, args, choose=gpt_generate.choose):
    """Draw answers to the prompts of the step that have these numbers.

    Returns what `gpt_generate.generate` returns, and rewards on the CPU.
    """
    of_step = make_prompts(f"step {step}", args.prompts, args.seed)
    prompts = [of_step[number] for number in numbers]
    drawn = [gpt_generate.uniform(f"{args.seed} {step} {number}", args.samples, LONGEST) for number in numbers]
    drawn = gpt.to_device(torch.cat(drawn), dist.get_device())
    tokens, answered, log_probabilities = gpt_generate.generate(
        model, prompts, drawn, STOP, args.temperature, args.samples, choose
    )
    rewards = []
    for row, answer in enumerate(gpt_generate.generated_bytes(tokens, answered)):
        rewards.append(checked_reward(prompts[row // args.samples], answer))
    return tokens, answered, log_probabilities, torch.tensor(rewards)


def advantages_of(rewards, samples):
    """How much better than the mean of its group each answer is: (answers,)."""
    groups = rewards.view(-1, samples)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    all_equal = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    return advantages.masked_fill(all_equal, 0).flatten()  # the mean of equal rewards may be rounded


def policy_loss(ratio, advantages, low, high):
    """The loss of each byte. It has no gradient where A > 0 and r > 1 + high, or A < 0 and r < 1 - low."""
    clipped = ratio.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def divergence(new, reference, ratio):
    """For each byte, an estimate of the KL divergence from the reference: right on average, and so is its gradient."""
    difference = reference - new
    return ratio * (difference.exp() - 1 - difference)


def update(model, optimizer, reference, tokens, answered, old, advantages, args, group=None):
    """Take --inner-steps optimizer steps on the answers of all ranks of `group`, by default of all ranks.

    `tokens`, `answered` and `old`, (answers, length), are those that gpt_generate.generate returns. `advantages`,
    (answers,), are on the CPU. Returns sums over this process's bytes, (4,): |ratio - 1| and the ratio at the first
    inner step, the bytes that are clipped at the last one, and the bytes.
    """
    n_bytes = sum_over(group, answered.sum())  # so that each byte weighs the same
    advantages = gpt.to_device(advantages, tokens.device)[:, None]
    in_loss = answered[:, 1:]  # byte t + 1 is predicted from the bytes up to t
    old = old[:, 1:]
    if reference is not None:
        with torch.no_grad():
            reference_log = log_probabilities_of(reference, tokens, answered, args.temperature)
    for inner_step in range(args.inner_steps):
        new = log_probabilities_of(model, tokens, answered, args.temperature)
        ratio = (new - old).exp()
        losses = policy_loss(ratio, advantages, args.low, args.high)
        if reference is not None:
            losses = losses + args.kl * divergence(new, reference_log, ratio)
        loss = (losses * in_loss).sum() / n_bytes
        optimizer.zero_grad()
        (loss * size_of(group)).backward()  # DDP divides by the number of ranks, so multiply by it
        optimizer.step()
        if inner_step == 0:
            mismatch = ((ratio.detach() - 1).abs() * in_loss).sum()
            ratio_sum = (ratio.detach() * in_loss).sum()
    too_high = (ratio > 1 + args.high) & (advantages > 0)
    too_low = (ratio < 1 - args.low) & (advantages < 0)
    clipped = ((too_high | too_low) & in_loss).sum()
    return torch.stack([mismatch, ratio_sum, clipped, in_loss.sum()]).double()


def log_probabilities_of(model, tokens, answered, temperature):
    """Log-probabilities of the answers' bytes, given those before them, and 0 elsewhere: (rows, length - 1).

    Give the temperature with which the answers were drawn. With another one the ratio is not 1, although the model is
    the same.
    """
    logits = model(tokens[:, :-1]) / temperature
    next_tokens = tokens[:, 1:]
    log_probabilities = logits.log_softmax(-1).gather(-1, next_tokens[..., None]).squeeze(-1)
    return torch.where(answered[:, 1:], log_probabilities, 0)


# ---- the task -----------------------------------------------------------------------------------------------------


def reward(prompt, answer):
    """Any program that checks an answer will do. It returns a finite number, or a bool."""
    return answer == bytes(sorted(prompt[:-1])) + bytes([STOP])


def checked_reward(prompt, answer):
    """A float, so that all ranks compute with one type. Raises DistributedError if it is not finite."""
    value = float(reward(prompt, answer))
    if not math.isfinite(value):
        raise dist.DistributedError(f"the reward of the answer {answer} to the prompt {prompt} is {value}")
    return value


def make_prompts(name, number, seed):
    """`number` prompts, bytes, that depend on `name` and the seed alone."""
    draw = random.Random(f"{seed} {name}")
    prompts = []
    for _ in range(number):
        digits = draw.choices(b"0123456789", k=draw.randint(DIGITS // 2 + 1, DIGITS))
        prompts.append(bytes(digits) + b"=")
    return prompts


# ---- the ranks that train -----------------------------------------------------------------------------------------


def own(values, group=None):
    """This rank's share of what all ranks of `group` know. By default the group is all ranks."""
    rank = dist.get_rank() if group is None else group.rank()
    return values[rank :: size_of(group)]


def size_of(group):
    return dist.get_world_size() if group is None else group.size()


def sum_over(group, tensor):
    """Change `tensor` into its sum over the ranks of `group`. Returns it."""
    if size_of(group) > 1:
        torch_dist.all_reduce(tensor, group=group)
    return tensor


# ---- imitation ----------------------------------------------------------------------------------------------------


def imitate(model, args, group=None):
    """Train on the answers of the teacher."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=IMITATION_LR, fused=True)
    for step in range(args.imitation_steps):
        # More prompts than in a step of reinforcement learning, since each has one answer only.
        prompts = make_prompts(f"imitate {step}", 2 * args.prompts, args.seed)
        answers = teacher_answers(prompts, f"{args.seed} teacher {step}")
        tokens, answered = pad_answers(own(prompts, group), own(answers, group))
        n_bytes = sum_over(group, answered.sum())
        loss = -log_probabilities_of(model, tokens, answered, 1.0).sum() / n_bytes
        optimizer.zero_grad()
        (loss * size_of(group)).backward()
        optimizer.step()


def teacher_answers(prompts, name):
    """Sorted digits. In a share of FLAWED two neighbours are exchanged."""
    draw = random.Random(name)
    answers = []
    for prompt in prompts:
        digits = sorted(prompt[:-1])
        place = draw.randrange(len(digits) - 1)
        if draw.random() < FLAWED:
            digits[place], digits[place + 1] = digits[place + 1], digits[place]
        answers.append(bytes(digits) + bytes([STOP]))
    return answers


def pad_answers(prompts, answers):
    """Tokens (rows, length), padded on the right, and where the answers are."""
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(list(text)) for text in texts], batch_first=True)
    starts = torch.tensor([len(prompt) for prompt in prompts])
    ends = torch.tensor([len(text) for text in texts])
    positions = torch.arange(tokens.shape[1])
    answered = (starts[:, None] <= positions) & (positions < ends[:, None])
    return gpt.to_device(tokens, dist.get_device()), gpt.to_device(answered, dist.get_device())


# ---- progress -----------------------------------------------------------------------------------------------------


def evaluate(model, seed):
    """The share of held-out prompts that greedy decoding solves."""
    solved = count_solved(dist.unwrapped(model), own(make_prompts("held-out", HELD_OUT, seed)))
    return dist.all_reduce(torch.tensor(solved, device=dist.get_device())).item() / HELD_OUT


def count_solved(model, prompts, choose=gpt_generate.choose):
    """How many prompts the model solves if it always takes the most probable byte."""
    unused = torch.zeros(len(prompts), LONGEST, dtype=torch.double, device=dist.get_device())
    tokens, answered, _ = gpt_generate.generate(model, prompts, unused, STOP, temperature=0, choose=choose)
    answers = gpt_generate.generated_bytes(tokens, answered)
    return sum(checked_reward(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True))


def add_rewards(sums, rewards, advantages, samples):
    """The `sums` of `update`, then the sum of the rewards and the number of groups without signal: (6,)."""
    no_signal = (advantages.view(-1, samples) == 0).all(dim=1)
    checked = torch.stack([rewards.sum(), no_signal.sum()])  # on the CPU
    return torch.cat([sums, gpt.to_device(checked, sums.device)])


def print_line(step, recent, start, model, args):
    """Print what the steps since `start` gave. `recent` has what `add_rewards` gave for each of them."""
    mismatch, _, clipped, n_bytes, rewarded, no_signal = dist.all_reduce(torch.stack(recent).sum(dim=0)).tolist()
    n_groups = len(recent) * args.prompts
    n_answers = n_groups * args.samples
    speed = n_answers / (time.perf_counter() - start)
    held_out = evaluate(model, args.seed)
    dist.print_primary(
        f"step {step + 1}/{args.steps} | reward {rewarded / n_answers:.3f} | held-out {held_out:.3f} | "
        f"no signal {no_signal / n_groups:.2f} | mismatch {mismatch / n_bytes:.0e} | clipped {clipped / n_bytes:.3f} | "
        f"{speed:,.0f} answers/s",
        flush=True,
    )


# ---- options ------------------------------------------------------------------------------------------------------


def add_options(parser):
    """Add the options that min_GRPO_async.py has too."""
    prompts_help = "prompts per step, over all processes"
    inner_help = "optimizer steps on the answers of one step"
    parser.add_argument("--imitation-steps", type=options.whole_number(0), default=300, help="steps of imitation")
    parser.add_argument("--steps", type=options.whole_number(1), default=100, help="steps to train")
    parser.add_argument("--log-every", type=options.whole_number(1), default=10, help="steps between lines of progress")
    parser.add_argument("--prompts", type=options.whole_number(1), default=32, help=prompts_help)
    parser.add_argument("--samples", type=options.whole_number(2), default=8, help="answers to each prompt, a group")
    parser.add_argument("--temperature", type=options.number(0.01), default=1.0, help="temperature of drawn answers")
    parser.add_argument("--inner-steps", type=options.whole_number(1), default=1, help=inner_help)
    parser.add_argument("--low", type=options.number(0), default=0.2, help="clip the ratio at 1 minus this")
    parser.add_argument("--high", type=options.number(0), default=0.28, help="clip the ratio at 1 plus this")
    parser.add_argument("--lr", type=options.positive_number, default=0.0003, help="learning rate")
    parser.add_argument("--seed", type=options.whole_number(0), default=0, help="random seed")
    parser.add_nproc()


def parse_args():
    parser = options.ArgumentParser(__doc__)
    add_options(parser)
    parser.add_argument("--kl", type=options.number(0), default=0.0, help="weight of the KL divergence")
    parser.add_argument("--output", help="write the trained model to this file, for min_Generate.py")
    args = parser.parse_args()
    if args.prompts < args.nproc:
        parser.error(f"argument --prompts: {args.prompts} is less than {args.nproc}, the number of processes")
    if args.output is not None:
        checkpoint.check_writable("--output", args.output)
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    gpt.start(args)
    model = gpt.GPT(gpt.Config(**SIZES), args.seed).to(dist.get_device())
    model = dist.prepare_ddp_model(model, gradient_as_bucket_view=True)  # needs no copy of the gradients
    imitate(model, args)
    held_out = evaluate(model, args.seed)
    dist.print_primary(f"after {args.imitation_steps} steps of imitation | held-out {held_out:.3f}", flush=True)
    train(model, args)
    if args.output and dist.is_primary():
        weights = {name: value.cpu() for name, value in dist.unwrapped(model).state_dict().items()}
        with checkpoint.atomic(args.output) as file:
            torch.save({"sizes": SIZES, "model": weights}, file)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
