"""Reinforcement learning from rewards that a program computes (GRPO): draw answers, check them, prefer the right ones.

The task is to sort digits: the model should continue `62615=` by `12566` and the end of the line. First it imitates a
teacher who makes a mistake in most examples. Then it sees no more examples. In each step it draws a group of
completions of each prompt. A program rewards each with 1 or 0. A completion is good if it beats the mean of its group:

    prompt     completions (a group)   reward   advantage A = reward - mean of the group's rewards
    62615=     12566                     1        0.75
               12656                     0       -0.25
               15266                     0       -0.25
               1266                      0       -0.25

A group is on one rank, so advantages need no communication. Nor does generation, which uses the plain model. The random
numbers depend on seed, step and prompt alone: the number of processes changes completions only by rounding. Let p be
the probability of a byte, and r = p / (p when it was drawn). The loss is one fraction over all bytes of all ranks:

    loss = Σ -min(r·A, clip(r, 1 - low, 1 + high)·A) / (number of bytes)

A mean of the ranks' means would give some bytes a larger weight than others, and no error would be raised. Later
--inner-steps use the same completions again: then clipping limits how far they move the model. Groups and their mean
are from arXiv:2402.03300. As in arXiv:2503.14476, the denominator counts all bytes, and the loss has no KL divergence
from the first model. As in arXiv:2503.20783, A is not divided by the deviation of its group.

Choose it if a program can check answers, and the model is right sometimes. If you have right answers, imitate them
(min_Packing.py). To train a large model, whose answers an inference engine draws, use TRL or verl. Cost per process:
DDP's, and while R rows of up to T bytes are drawn, a KV cache of 8·layers·width·R·T bytes.

    python min_GRPO.py --nproc 2                                     # two processes; without --nproc, all GPUs
    python min_GRPO.py --nproc 2 --inner-steps 2 --output model.pt   # saved for min_Generate.py; rerun it to resume
    torchrun --standalone --nproc-per-node 2 min_GRPO.py
"""

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


def train(model, optimizer, first_step, args):
    for step in range(first_step, args.steps):
        start = time.perf_counter()
        # Tokens, completion mask, log-probabilities: each (completions, length). Rewards: (completions,).
        tokens, mask, old, rewards = draw_completions(dist.unwrapped(model), step, own(range(args.prompts)), args)
        advantages = advantages_of(rewards, args.group_size)
        sums = update(model, optimizer, tokens, mask, old, advantages, args)
        if is_due(step, args):
            print_line(step, sums, rewards, advantages, time.perf_counter() - start, model, args)
            if args.output:
                checkpoint.save(args.output, model, optimizer, step=step + 1, **state_of(args))


def is_due(step, args):
    """Is a line printed, and the model saved, after this step?"""
    return (step + 1) % args.log_every == 0 or step + 1 == args.steps


def draw_completions(model, step, numbers, args, choose=gpt_generate.choose):
    """Draw completions of the prompts of the step that have these numbers.

    Returns what `gpt_generate.generate` returns, and rewards on the CPU.
    """
    of_step = make_prompts(f"step {step}", args.prompts, args.seed)
    prompts = [of_step[number] for number in numbers]
    drawn = [gpt_generate.uniform(f"{args.seed} {step} {number}", args.group_size, LONGEST) for number in numbers]
    drawn = gpt.to_device(torch.cat(drawn), dist.get_device())
    tokens, mask, log_probabilities = gpt_generate.generate(
        model, prompts, drawn, STOP, args.temperature, args.group_size, choose
    )
    completions = gpt_generate.generated_bytes(tokens, mask)
    rewards = [float(reward(prompts[row // args.group_size], each)) for row, each in enumerate(completions)]
    return tokens, mask, log_probabilities, torch.tensor(rewards)


def advantages_of(rewards, group_size):
    """How much better than the mean of its group each completion is: (completions,). NaN gives 0."""
    groups = rewards.view(-1, group_size)
    advantages = groups - groups.nanmean(dim=1, keepdim=True)
    return advantages.nan_to_num(0, posinf=0, neginf=0).flatten()


def policy_loss(ratio, advantages, low, high):
    """The loss of each byte. It has no gradient where A > 0 and r > 1 + high, or A < 0 and r < 1 - low."""
    clipped = ratio.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def update(model, optimizer, tokens, mask, old, advantages, args, group=None):
    """Take --inner-steps optimizer steps on the completions of all ranks of `group`, by default of all ranks.

    `tokens`, `mask` and `old`, (completions, length), come from gpt_generate.generate. `advantages`,
    (completions,), are on the CPU. Returns sums over this process's bytes, (3,): |ratio - 1| at the first inner step,
    the bytes whose ratio is clipped at the last one, and the bytes.
    """
    n_bytes = mask.sum()
    torch_dist.all_reduce(n_bytes, group=group)  # so that each byte weighs the same
    advantages = gpt.to_device(advantages, tokens.device)[:, None]
    in_loss = mask[:, 1:]  # byte t + 1 is predicted from the bytes up to t
    old = old[:, 1:]
    for inner_step in range(args.inner_steps):
        new = log_probabilities_of(model, tokens, mask, args.temperature)
        ratio = (new - old).exp()
        losses = policy_loss(ratio, advantages, args.clip_low, args.clip_high)
        loss = (losses * in_loss).sum() / n_bytes
        optimizer.zero_grad()
        (loss * torch_dist.get_world_size(group)).backward()  # DDP divides by the number of ranks, so multiply by it
        optimizer.step()
        if inner_step == 0:
            mismatch = ((ratio.detach() - 1).abs() * in_loss).sum()
    too_high = (ratio > 1 + args.clip_high) & (advantages > 0)
    too_low = (ratio < 1 - args.clip_low) & (advantages < 0)
    clipped = ((too_high | too_low) & in_loss).sum()
    return torch.stack([mismatch, clipped, in_loss.sum()]).double()


def log_probabilities_of(model, tokens, mask, temperature):
    """Log-probabilities of the completions' bytes, given those before them, and 0 elsewhere: (rows, length - 1).

    Give the temperature with which they were drawn. With another one the ratio is not 1, although the model is the
    same.
    """
    logits = model(tokens[:, :-1]) / temperature
    next_tokens = tokens[:, 1:]
    log_probabilities = logits.log_softmax(-1).gather(-1, next_tokens[..., None]).squeeze(-1)
    return torch.where(mask[:, 1:], log_probabilities, 0)


def own(values, group=None):
    """This rank's share of what all ranks of `group` know. By default the group is all ranks."""
    return values[torch_dist.get_rank(group) :: torch_dist.get_world_size(group)]


# ---- the task -----------------------------------------------------------------------------------------------------


def reward(prompt, completion):
    """Any program that checks a completion will do. It returns a number.

    An exception ends the job, and min_GRPO.py resumes from --output. If yours asks a judge that may fail, catch that
    and return NaN: the completion then has no advantage, and the others of its group are compared without it.
    """
    return completion == bytes(sorted(prompt[:-1])) + bytes([STOP])


def make_prompts(name, number, seed):
    """`number` prompts, bytes, that depend on `name` and the seed alone."""
    draw = random.Random(f"{seed} {name}")
    prompts = []
    for _ in range(number):
        digits = draw.choices(b"0123456789", k=draw.randint(DIGITS // 2 + 1, DIGITS))
        prompts.append(bytes(digits) + b"=")
    return prompts


# ---- imitation ----------------------------------------------------------------------------------------------------


def imitate(model, args, group=None):
    """Train on the answers of the teacher."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=IMITATION_LR, fused=True)
    for step in range(args.imitation_steps):
        # More prompts than in a step of reinforcement learning, since each has one answer only.
        prompts = make_prompts(f"imitate {step}", 2 * args.prompts, args.seed)
        answers = teacher_answers(prompts, f"{args.seed} teacher {step}")
        tokens, mask = pad_answers(own(prompts, group), own(answers, group))
        n_bytes = mask.sum()
        torch_dist.all_reduce(n_bytes, group=group)
        loss = -log_probabilities_of(model, tokens, mask, 1.0).sum() / n_bytes
        optimizer.zero_grad()
        (loss * torch_dist.get_world_size(group)).backward()
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
    """Tokens (rows, length), padded on the right, and the completion mask: where the answers are."""
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    masks = [len(prompt) * [False] + len(answer) * [True] for prompt, answer in zip(prompts, answers, strict=True)]
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(list(text)) for text in texts], batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.tensor(mask) for mask in masks], batch_first=True)
    return gpt.to_device(tokens, dist.get_device()), gpt.to_device(mask, dist.get_device())


# ---- progress -----------------------------------------------------------------------------------------------------


def evaluate(model, args):
    """The share of held-out prompts that the model solves if it always takes the most probable byte."""
    prompts = own(make_prompts("held-out", HELD_OUT, args.seed))
    unused = torch.zeros(len(prompts), LONGEST, dtype=torch.double, device=dist.get_device())
    tokens, mask, _ = gpt_generate.generate(dist.unwrapped(model), prompts, unused, STOP, temperature=0)
    completions = gpt_generate.generated_bytes(tokens, mask)
    rewards = [float(reward(prompt, each)) for prompt, each in zip(prompts, completions, strict=True)]
    solved = torch.tensor(rewards, device=dist.get_device()).nansum()
    return dist.all_reduce(solved).item() / HELD_OUT


def print_line(step, sums, rewards, advantages, seconds, model, args):
    """Print what this step gave, over all processes.

    "No signal" is the share of groups whose completions are all equally good, which teach nothing. Mismatch is the mean
    of |r - 1| at the first inner step: above 1e-5 on the CPU, the model that is trained differs from the model that
    drew, by a temperature, a type, a mask or dropout. Clipped is the share of bytes whose ratio is clipped at the last.
    """
    mismatch, clipped, n_bytes = dist.all_reduce(sums).tolist()
    no_signal = (advantages.view(-1, args.group_size).abs() < 1e-6).all(dim=1).sum()
    rewarded, no_signal = dist.all_reduce(torch.stack([rewards.nansum(), no_signal])).tolist()
    n_completions = args.prompts * args.group_size
    held_out = evaluate(model, args)
    dist.print_primary(
        f"step {step + 1}/{args.steps} | reward {rewarded / n_completions:.3f} | held-out {held_out:.3f} | "
        f"no signal {no_signal / args.prompts:.2f} | mismatch {mismatch / n_bytes:.0e} | "
        f"clipped {clipped / n_bytes:.3f} | {n_completions / seconds:,.0f} answers/s",
        flush=True,
    )


def state_of(args):
    """What a snapshot holds beside model and optimizer. min_Generate.py needs the sizes."""
    names = ("imitation_steps", "prompts", "group_size", "temperature", "inner_steps", "lr", "seed")
    return {"settings": {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}, "sizes": SIZES}


# ---- options ------------------------------------------------------------------------------------------------------


def add_options(parser):
    """Add the options that min_GRPO_async.py has too."""
    parser.add_argument("--imitation-steps", type=options.whole_number(0), default=300, help="steps of imitation")
    parser.add_argument("--steps", type=options.whole_number(1), default=100, help="steps to train")
    parser.add_argument("--log-every", type=options.whole_number(1), default=10, help="steps between lines and saves")
    parser.add_argument("--prompts", type=options.whole_number(1), default=32, help="prompts per step of all processes")
    parser.add_argument("--group-size", type=options.whole_number(2), default=8, help="completions of each prompt")
    parser.add_argument("--temperature", type=options.number(0.01), default=1.0, help="temperature of completions")
    inner_help = "optimizer steps on the same completions"
    parser.add_argument("--inner-steps", type=options.whole_number(1), default=1, help=inner_help)
    parser.add_argument("--clip-low", type=options.number(0), default=0.2, help="clip the ratio at 1 minus this")
    parser.add_argument("--clip-high", type=options.number(0), default=0.28, help="clip the ratio at 1 plus this")
    parser.add_argument("--lr", type=options.positive_number, default=0.0003, help="learning rate")
    parser.add_argument("--seed", type=options.whole_number(0), default=0, help="random seed")
    parser.add_argument("--output", help="save the model to this file, for min_Generate.py")
    parser.add_nproc()


def parse_args():
    parser = options.ArgumentParser(__doc__)
    add_options(parser)
    args = parser.parse_args()
    if args.prompts < args.nproc:
        parser.error(f"argument --prompts: {args.prompts} is less than {args.nproc}, the number of processes")
    checkpoint.check_writable("--output", args.output)
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    gpt.start(args)
    model = gpt.GPT(gpt.Config(**SIZES), args.seed).to(dist.get_device())
    model = dist.prepare_ddp_model(model, gradient_as_bucket_view=True)  # needs no copy of the gradients
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    tokens = torch.zeros(1, SIZES["length"], dtype=torch.long, device=dist.get_device())
    checkpoint.rebuild_buckets(model, lambda: model(tokens).sum())  # else a resumed run differs in the last bit
    step = 0
    if args.output:
        _, step, _ = checkpoint.load(args.output, model, optimizer, **state_of(args))
    if step == 0:
        imitate(model, args)
    held_out = evaluate(model, args)
    dist.print_primary(f"after {args.imitation_steps} steps of imitation and {step} more | held-out {held_out:.3f}")
    train(model, optimizer, step, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
