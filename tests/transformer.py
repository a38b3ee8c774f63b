"""What the tests of all transformer scripts share: a small case, and what one process of plain PyTorch makes of it."""

import argparse
import contextlib
import functools
import io
import re
from unittest import mock

import torch
from conftest import float64, whole
from torch.nn import functional as F

import distributed as dist
import gpt

SAME_DROPOUT = ("min_FSDP_TP", "min_PP_FSDP_TP", "min_TP")  # tensor neighbours work on the same sequences
# The last part of parameters, of rows and of a ring is shorter on 2, 3 and 4 processes.
ODD = {"layers": 2, "width": 35, "heads": 5, "length": 15, "global_batch_size": 24}
BIGRAM = 2.46  # the held-out loss of guesses by the byte before, in nats
LINE = re.compile(
    r"step (?P<step>\d+)/\d+ \| loss (?P<loss>\d+\.\d{4}) \| held-out (?P<held_out>\d+\.\d{4}) \| "
    r"(?P<speed>[\d,]+) tokens/s \| (?P<memory>\d+) MB"
)


def arguments(nprocs=1, **changes):
    """As a script's parse_args would give them: 4 layers and heads of little width, so that 4 ranks can share them.

    An evaluation after the fourth step must not change the fifth.
    """
    values = {
        **{"layers": 4, "width": 32, "heads": 4, "length": 32, "global_batch_size": 8, "steps": 6, "log_every": 4},
        **{"lr": 0.01, "clip": 0.0, "seed": 3, "nproc": nprocs, "bf16": False, "keep": None, "tie": False},
    }
    return argparse.Namespace(**{**values, **changes})


@functools.cache
def small_text():
    """200 kB to train on and 20 kB held out, as load_text gives them: counted within milliseconds."""
    text, held_out = gpt.load_text()
    return text[:200_000], held_out[:20_000]


def on_small_text():
    """A patch that gives the small text to a script."""
    text = small_text()
    return mock.patch.object(gpt, "load_text", lambda: text)


def small_data(args, share=None):
    """gpt.Data of the small text."""
    with on_small_text():
        return gpt.Data(args, share)


def make_optimizer(name, params, lr):
    """AdamW, or SGD, which shows a gradient of the wrong size as Adam does not. It has no fused form for DTensors."""
    if name == "SGD":
        return torch.optim.SGD(params, lr=10 * lr, momentum=0.5)
    return torch.optim.AdamW(params, lr=lr, fused=True)


def make_model(args):
    """The weights with which the reference starts."""
    model = gpt.GPT(gpt.Config.from_args(args), args.seed)
    if args.tie:
        model.head.weight = model.token.weight
    return model


# ---- one process of plain PyTorch -----------------------------------------------------------------------------------


def plain_loss(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def take_step(model, optimizer, loss, clip=None):
    """Returns the loss, and whether the gradients were clipped."""
    optimizer.zero_grad()
    loss.backward()
    norm = torch.stack([param.grad.norm() for param in model.parameters() if param.grad is not None]).norm()
    if clip:
        for param in model.parameters():
            param.grad *= min(1, clip / (norm + 1e-6))
    optimizer.step()
    return loss.detach(), clip and norm > clip


def train_alone(model, optimizer, args, loss_of=plain_loss, part_of=lambda step, x, y: (x, y)):
    """Every step's loss, (steps,), and the trained parameters by name, without any of the helpers."""
    with float64():
        before, steps = full_parameters(model), []
        if isinstance(optimizer, str):
            optimizer = make_optimizer(optimizer, model.parameters(), args.lr)
        for step in range(args.steps):
            x, y = gpt.batch(small_text()[0], step, args.global_batch_size, args.length, args.seed)
            steps.append(take_step(model, optimizer, loss_of(model, *part_of(step, x, y)), args.clip))
        losses, clipped = zip(*steps, strict=True)
        after = full_parameters(model)
    assert losses[-1] < losses[0] - 0.5, "the reference must learn, or equality means little"
    assert not args.clip or sum(clipped) > args.steps / 4
    still = [name for name in before if (after[name] - before[name]).abs().max() <= 1e-4]
    may = (".experts.", ".mlp.bias")
    assert all(any(part in name for part in may) for name in still), "all but experts without tokens, and their biases"
    return torch.stack(losses), after


def reference(optimizer="AdamW", **changes):
    """`train_alone` of a GPT, once for each case. `changes` go to `arguments`, and `optimizer` to make_optimizer."""
    return _reference(optimizer, tuple(sorted(changes.items())))


@functools.cache
def _reference(optimizer, changes):
    args = arguments(**dict(changes))
    with float64():
        model = make_model(args)
    return train_alone(model, optimizer, args)


def held_out_loss(model, parameters, args, loss_of=plain_loss):
    """The held-out loss of one process with these parameters."""
    with float64(), torch.no_grad():
        model.double().load_state_dict(parameters)
        batches = small_data(args, (0, 1)).held_out_batches()
        return torch.stack([loss_of(model, x, y) for x, y in batches]).mean().item()


def without_keys_biases(parameters, heads):
    """Without those whose gradients are 0 but for rounding, because all keys of a softmax share them."""
    found = {}
    for name, value in parameters.items():
        found[name] = value
        if name.endswith("qkv.bias"):
            found[name] = value.unflatten(0, (heads, 3, -1))[:, [0, 2]]
    return found


# ---- a script's own training ----------------------------------------------------------------------------------------


def train_on(nprocs, train, cases, folder):
    """What a script's training, `train(*case)`, gives in float64 on each rank: a list of all cases for each."""
    dist.launch(_train_worker, train, cases, str(folder), nprocs=nprocs)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(nprocs)]


def _train_worker(local_rank, world_size, train, cases, folder):
    dist.init_process_group()
    with float64():
        results = [train(*case) for case in cases]
    torch.save(results, f"{folder}/{local_rank}.pt")


def run_main_worker(script, args, optimizer, train=None):
    """Run a script's main_worker on the small text.

    Returns what it trained, its optimizer, its data, the losses and what it printed. If `optimizer` is "SGD", the
    script gets make_optimizer's optimizer instead of AdamW. `train` may replace the script's own.
    """
    result = argparse.Namespace()
    train = train or script.train

    def recorded_train(model, optimizer, *rest):
        result.model = model
        result.optimizer = optimizer
        result.data = next((each for each in rest if isinstance(each, gpt.Data)), None)
        result.losses = train(model, optimizer, *rest)
        return result.losses

    def make(params, lr, fused):
        return make_optimizer(optimizer, params, lr)

    left = []  # does a block still have gradients of the step before, which take memory in this step's forward?
    one_forward = "micro_batches" not in args and vars(args).get("accumulate", 1) == 1
    clears = one_forward and script.__name__ != "min_FSDP_scratch"  # whose parameters have no memory between steps

    def note_gradients(module, inputs):
        if isinstance(module, gpt.Block) and torch.is_grad_enabled() and clears:
            left.extend(local(param.grad).any() for param in module.parameters() if param.grad is not None)

    with (
        on_small_text(),
        torch.nn.modules.module.register_module_forward_pre_hook(note_gradients),
        mock.patch.object(script, "train", recorded_train),
        mock.patch("torch.optim.AdamW", make) if optimizer == "SGD" else contextlib.nullcontext(),
        contextlib.redirect_stdout(io.StringIO()) as stdout,
    ):
        script.main_worker(dist.get_local_rank(), dist.get_world_size(), args)
    assert not any(left), "zero_grad must come before the forward"
    result.stdout = stdout.getvalue()
    if script.__name__ not in SAME_DROPOUT:
        assert torch.initial_seed() == args.seed + dist.get_rank(), "or dropout in a copy is the same on all ranks"
    return result


def saves_of(script, args):
    """The steps that a script's main_worker gives to checkpoint.save, in one process."""
    steps = []

    def record(path, model, optimizer, step, *parts, **more):
        steps.append(step)

    with mock.patch("checkpoint.save", record), on_small_text():
        dist.launch(script.main_worker, args, nprocs=1)
    return steps


def local(tensor):
    """What this process holds of a tensor or DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full_parameters(model):
    """By name, each one whole on every rank, whether it was a tensor or a DTensor: all ranks must call it."""
    model = getattr(model, "module", model)
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: whole(tensor).detach().clone() for name, tensor in named}


def assert_equal(losses, parameters, expected, tolerance=1e-9):
    """Losses and parameters equal `expected`, the result of `reference`."""
    expected_losses, expected_parameters = expected
    assert losses.shape == expected_losses.shape and losses.dtype == torch.float64
    assert (losses - expected_losses).abs().max() <= tolerance, losses - expected_losses
    assert parameters.keys() == expected_parameters.keys()
    for name, value in expected_parameters.items():
        assert parameters[name].dtype == torch.float64 and parameters[name].shape == value.shape, name
        assert (parameters[name] - value).abs().max() <= tolerance, name


def progress_lines(stdout):
    """What each line of a script's progress says, as numbers by name."""
    lines = [LINE.fullmatch(line).groupdict() for line in stdout.splitlines() if line.startswith("step ")]
    return [{name: float(value.replace(",", "")) for name, value in line.items()} for line in lines]


def saved_bytes(loss_of, model, args):
    """What `loss_of`, a script's loss, saves of one sequence in this process for its backward, parameters aside."""
    storages = {}

    def pack(tensor):
        storage = local(tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    x, y = gpt.batch(small_text()[0], 0, 1, args.length)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model, x, y)  # alive, as are its saved tensors: no address is used again
    for param in model.parameters():
        storages.pop(local(param).untyped_storage().data_ptr(), None)
    loss.backward()
    return sum(storages.values())
