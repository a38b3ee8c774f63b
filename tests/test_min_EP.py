"""min_EP.py: experts on several processes are those of one, in which every expert sees every token."""

import functools
import re

import pytest
import torch
from conftest import run
from torch.nn import functional as F
from transformer import (
    arguments,
    assert_equal,
    float64,
    full_parameters,
    make_model,
    make_optimizer,
    run_in_namespace,
    sent_per_step,
    small_text,
)

import distributed as dist
import gpt
import min_EP

IDLE = (0, 6, 7)  # of 8: of 4 ranks, the last has no token and the first has some
CASES = {
    "AdamW": ("AdamW", {}),
    "SGD": ("SGD", {"top": 3}),
    "SGD, clipped": ("SGD", {"clip": 0.3}),
    "AdamW, idle experts": ("AdamW", {"idle": IDLE, "clip": 0.3}),
}


def case_arguments(changes):
    return arguments(**{"layers": 2, "log_every": 20, "experts": 8, "top": 2, "balance": 0.1, "idle": (), **changes})


def leave_idle(model, idle):
    """Let the router find no token for these experts: normalized features, plus 1, have a sum far above 0."""
    if idle:
        with torch.no_grad():
            for block in model.blocks:
                block.norm2.bias.fill_(1)
                block.mlp.router.weight[list(idle)] = -1


def worker(local_rank, world_size, folder):
    dist.init_process_group()
    with float64():
        for name, (optimizer_name, changes) in CASES.items():
            args = case_arguments(changes)
            model = min_EP.add_experts(make_model(args), args)
            leave_idle(model, args.idle)
            optimizer = make_optimizer(optimizer_name, model.parameters(), args.lr)
            losses = min_EP.train(model, optimizer, *small_text(), args)
            tokens = [block.mlp.tokens for block in model.blocks]
            torch.save((losses, full_parameters(model), tokens), f"{folder}/{name} {world_size} {dist.get_rank()}")


class DenseExperts(torch.nn.Module):
    """All experts see all tokens; the weights of those that are not chosen are 0."""

    def __init__(self, width, count, top):
        super().__init__()
        self.top = top
        self.router = torch.nn.Linear(width, count, bias=False)
        self.experts = torch.nn.ModuleList(gpt.MLP(width) for _ in range(count))

    def forward(self, x):
        probs = F.softmax(self.router(x), -1)
        least = probs.sort(-1, descending=True).values[..., self.top - 1 : self.top]
        chosen = (probs >= least).double()
        self.share = chosen.mean((0, 1)) / self.top
        self.balance = len(self.experts) * (self.share * probs.mean((0, 1))).sum()
        results = torch.stack([expert(x) for expert in self.experts], -1)
        return (results * (chosen * probs)[..., None, :]).sum(-1)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other long, for such small products, where other programs run
    yield
    torch.set_num_threads(before)


@functools.cache
def expected(name):
    """Every step's loss, and the parameters by name, of one process without any of the helpers."""
    optimizer_name, changes = CASES[name]
    args = case_arguments(changes)
    with float64():
        model = make_model(args)
        for block in model.blocks:
            block.mlp = DenseExperts(args.width, args.experts, args.top)
        leave_idle(model, args.idle)
        start, clipped, losses = full_parameters(model), 0, []
        optimizer = make_optimizer(optimizer_name, model.parameters(), args.lr)
        for step in range(args.steps):
            x, y = gpt.batch(small_text()[0], step, args.batch_size, args.length, args.seed)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss = loss + args.balance * sum(block.mlp.balance for block in model.blocks)
            optimizer.zero_grad()
            loss.backward()
            if args.clip:
                clipped += torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip) > args.clip
            optimizer.step()
            losses.append(loss.detach())
            for block in model.blocks:
                assert all(block.mlp.share[list(args.idle)] == 0)
        assert losses[-1] < losses[0] - 0.5, "the reference must learn, or equality means little"
        assert not args.clip or clipped > args.steps / 2
        for key, value in full_parameters(model).items():
            assert ".experts." in key or not torch.equal(value, start[key]), "all that is shared must move"
    return torch.stack(losses), full_parameters(model)


@pytest.mark.parametrize("n", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_do_what_one_does(n, tmp_path):
    dist.launch(worker, str(tmp_path), nprocs=n)
    for name, (_, changes) in CASES.items():
        args = case_arguments(changes)
        per_rank = [torch.load(tmp_path / f"{name} {n} {rank}", weights_only=True) for rank in range(n)]
        whole = {}
        for rank, (_, parameters, tokens) in enumerate(per_rank):
            held = {int(key.split(".")[4]) for key in parameters if ".experts." in key}
            assert held == set(range(rank * 8 // n, (rank + 1) * 8 // n))
            for key in whole.keys() & parameters.keys():
                assert torch.equal(whole[key], parameters[key]), f"{key} differs from rank to rank"
            whole.update(parameters)
            for counts in tokens:
                assert sum(counts.tolist()) == args.top * args.batch_size * args.length
                assert all(counts[list(args.idle)] == 0)
        for losses, _, _ in per_rank:
            assert_equal(losses, whole, expected(name))


def count_bytes():
    dist.launch(count_bytes_worker, nprocs=2)


def count_bytes_worker(local_rank, world_size):
    dist.init_process_group()
    args = case_arguments({"width": 64, "experts": 2})  # the top 2 of 2: used evenly
    model = min_EP.add_experts(make_model(args), args)
    optimizer = make_optimizer("AdamW", model.parameters(), args.lr)
    train = functools.partial(min_EP.train, model, optimizer, *small_text())
    shared, _ = min_EP.split_params(model)
    dist.print_primary("sent", sum(param.nbytes for param in shared), sent_per_step(train, args))


@pytest.mark.slow
def test_bytes_sent_are_those_of_the_docstring():
    stdout = run_in_namespace("test_min_EP", "count_bytes")
    (line,) = (line.split()[1:] for line in stdout.splitlines() if line.startswith("sent "))
    shared, sent = map(float, line)
    n, layers, top, width, batch, length = 2, 2, 2, 64, 8, 32
    tokens = (n - 1) / n * 16 * layers * top * width * batch * length / n
    assert sent == pytest.approx(2 * (n - 1) / n * shared + tokens, rel=0.03)


@pytest.mark.slow
def test_prints_the_tokens_of_each_expert():
    small = ("--layers", 2, "--width", 16, "--heads", 2, "--length", 16, "--batch-size", 4, "--experts", 4)
    status, stdout, stderr = run("min_EP.py", *small, "--nproc", 2, "--steps", 3, "--log-every", 2, "--clip", 1)
    assert status == 0, stderr
    first, *lines = stdout.splitlines()
    shared, expert = (sum(p.numel() for p in model.parameters()) for model in (gpt.GPT(2, 16, 2, 16), gpt.MLP(16)))
    shared += 2 * (16 * 4 - expert)  # routers, in place of MLPs
    total, held = shared + 2 * 4 * expert, shared + 2 * 2 * expert
    assert first == f"parameters held: {held:,} of {total:,} ({held / total:.3f})"
    tokens = "    tokens per expert:"
    assert [re.split(r" [|\[]", line)[0] for line in lines] == ["step 2", tokens, "step 3", tokens]
    for line in lines[1::2]:
        blocks = [[int(count) for count in counts.split(", ")] for counts in re.findall(r"\[([\d, ]+)]", line)]
        assert [len(counts) for counts in blocks] == [4, 4]
        assert [sum(counts) for counts in blocks] == [2 * 4 * 16] * 2


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--experts 0", "argument --experts: '0' is not a whole number of at least 1"),
        ("--nproc 2 --experts 5", "argument --experts: 5 is not a multiple of the 2 processes"),
        ("--nproc 2 --top 9", "argument --top: 9 is more than the 8 experts"),
        ("--top 0", "argument --top: '0' is not a whole number of at least 1"),
        ("--balance -1", "argument --balance: '-1' is not a finite number above 0"),
        ("--nproc 3 --experts 6", "argument --batch-size: 16 is not a multiple of the 3 processes"),
    ],
)
def test_bad_input_is_one_line(arguments, line, main_of, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", functools.partial(int, 0))
    status, stderr = main_of("min_EP.py", *arguments.split())
    assert status == 2
    assert re.fullmatch(rf"\S+: error: {re.escape(line)}\n", stderr), stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_learns_more_than_pairs_of_bytes():
    status, stdout, stderr = run("min_EP.py", "--nproc", 2, timeout=900)
    assert status == 0, stderr
    last = [line for line in stdout.splitlines() if line.startswith("step")][-1]
    held_out, bigram = (float(re.search(rf"{name} ([\d.]+)", last)[1]) for name in ("held-out", "bigram"))
    assert held_out < bigram, last
