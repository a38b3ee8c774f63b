"""min_FSDP_scratch.py: at most two blocks in memory, any parameters, and errors where it would be silently wrong.

test_equal.py has what all scripts that train the GPT promise.
"""

import copy
import functools
import io
from pathlib import Path

import pytest
import torch
import transformer
from conftest import float64, guards, on_processes
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import distributed as dist
import gpt
import min_FSDP_scratch


def small_model(model_class=gpt.GPT, layers=3):
    """No number of processes above 1 divides the parameters of a block."""
    args = transformer.arguments(dist.get_world_size(), **{**transformer.ODD, "layers": layers})
    return model_class(gpt.Config.from_args(args), args.seed), args


# ---- what is in memory at the same time -----------------------------------------------------------------------------


@on_processes(2)
def test_two_blocks_have_memory_and_the_next_one_is_gathered_before_it_is_needed():
    model, args = small_model(layers=5)
    total = sum(param.numel() for param in model.parameters())
    zero = min_FSDP_scratch.ZeRO3(model)
    *blocks, _ = zero.units
    in_memory, in_flight = [], []

    def note(gradient=None):
        """While a block computes: which blocks have memory, and gradients that are being reduced."""
        in_memory.append([unit.name for unit in blocks if unit.full.untyped_storage().nbytes() > 0])
        in_flight.append([unit.name for unit in blocks if unit.reducing is not None])

    def note_both(layer, inputs, output):
        note()
        if output.requires_grad:
            output.register_hook(note)

    for block in model.blocks:
        block.mlp.register_forward_hook(note_both)
    x, y = transformer.small_data(args).batch(0)
    gpt.loss_fn(zero(x), y).backward()
    zero.finish_backward()
    assert in_memory == [[0, 1], [1, 2], [2, 3], [3, 4], [4], [3, 4], [2, 3], [1, 2], [0, 1], [0]]
    assert in_flight == [[], [], [], [], [], [], [4], [3], [2], [1]]
    for _ in range(2):
        assert not any(unit.full.untyped_storage().nbytes() for unit in zero.units), "after a step or an evaluation"
        evaluate(zero, x, y)
    held = sum(unit.own.numel() for unit in zero.units)
    assert total <= 2 * held < total + 2 * len(zero.units), "but for what makes parts equally long"


def bytes_in_memory(name):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return 1024 * int(line.split()[1])


@on_processes(*guards(1))
def test_the_root_takes_three_times_its_bytes_while_gloo_reduces_a_copy_of_its_gradients():
    zero = min_FSDP_scratch.ZeRO3(gpt.GPT(gpt.Config(1, 64, 2, 200_000)))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    peaks = []  # bytes per byte of the root, beside those between two steps
    for _ in range(4):
        before = bytes_in_memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak, VmHWM, begins anew
        one_step(zero, tokens, tokens)
        peaks.append((bytes_in_memory("VmHWM") - before) / zero.root.full.nbytes)
    assert 2.9 < max(peaks[1:]) < 3.3  # not the first, and the allocator may keep something for the next step


# ---- tied weights, and parameters without a gradient ----------------------------------------------------------------


class Tied(gpt.GPT):
    """The head has the embedding's weight, and two frozen layers are never used: weight decay must not change them."""

    def __init__(self, config, seed):
        super().__init__(config, seed)
        self.head.weight = self.token.weight
        self.unused = nn.Linear(3, 5)
        self.blocks[0].unused = nn.Linear(2, 7)
        for layer in (self.unused, self.blocks[0].unused):
            layer.requires_grad_(False)
        gpt.fill(self.named_parameters(), seed)


class OneRank(gpt.GPT):
    """Only rank 0's half of the batch, the even rows, uses the first MLP, and only rank 1's half the second one."""

    def __init__(self, config, seed):
        super().__init__(config, seed)
        for uses in range(2):
            mlp = self.blocks[uses].mlp
            mlp.forward = functools.partial(self.use_for_half, mlp.forward, uses)

    def use_for_half(self, forward, uses, x):
        if len(x) == transformer.ODD["global_batch_size"]:  # one process has all rows
            is_used = torch.arange(len(x)) % 2 == uses
            return forward(x) * is_used[:, None, None]
        return forward(x) if dist.get_rank() == uses else 0 * x


class Recomputing(gpt.GPT):
    def __init__(self, config, seed):
        super().__init__(config, seed)
        for block in self.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def train_like_plain(optimizer_class, model_class=gpt.GPT, frozen=()):
    """Train beside one process of plain PyTorch. The parameters must stay equal."""
    plain, args = small_model(model_class)
    model, _ = small_model(model_class)
    for each in (plain, model):
        for name in frozen:
            each.get_submodule(name).requires_grad_(False)
    zero = min_FSDP_scratch.ZeRO3(model)
    optimizers = [optimizer_class(params, lr=0.01, weight_decay=0.1) for params in (zero.pieces(), plain.parameters())]
    for step in range(4):
        x, y = gpt.batch(transformer.small_text()[0], step, args.global_batch_size, args.length)
        share = slice(dist.get_rank(), None, dist.get_world_size())
        gpt.loss_fn(zero(x[share]), y[share]).backward()
        zero.finish_backward()
        plain.zero_grad()
        F.cross_entropy(plain(x).flatten(0, 1), y.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
    for unit in zero.units:
        unit.wait()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        # Adam enlarges the rounding of gradients that are 0, as those of the keys' biases are.
        atol = 1e-12 if optimizer_class is torch.optim.SGD else 1e-9
        torch.testing.assert_close(param.detach(), expected.detach(), rtol=0, atol=atol)


each_optimizer = pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])


@on_processes(2)
@pytest.mark.parametrize("model", [Tied, OneRank, Recomputing])
@each_optimizer
@float64()
def test_tied_weights_frozen_layers_and_parameters_that_one_rank_uses(model, optimizer):
    train_like_plain(optimizer, model)


@on_processes(*guards(1, 2))
@pytest.mark.parametrize("frozen", ["token position", "token position blocks.0 blocks.2", "blocks.1 head"])
@each_optimizer
@float64()
def test_a_block_whose_input_needs_no_gradient_is_trained(frozen, optimizer):
    train_like_plain(optimizer, frozen=frozen.split())


# ---- what would be silently wrong -----------------------------------------------------------------------------------


def in_order(*numbers, call=lambda block, x: block(x)):
    """A forward of a GPT whose blocks compute in another order."""

    def forward(model, tokens):
        x = model.token(tokens) + model.position.weight
        for number in numbers:
            x = call(model.blocks[number], x)
        return model.head(model.norm(x))

    return forward


def without_gradient(block, x):
    with torch.no_grad():
        return block(x)


def one_step(zero, x, y):
    gpt.loss_fn(zero(x), y).backward()
    zero.finish_backward()


def backward_twice(zero, x, y):
    loss = gpt.loss_fn(zero(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    zero.finish_backward()


def two_losses(zero, x, y):
    (gpt.loss_fn(zero(x), y) + gpt.loss_fn(zero(x), y)).backward()
    zero.finish_backward()


def without_finish(zero, x, y):
    for _ in range(2):
        gpt.loss_fn(zero(x), y).backward()


def evaluate(zero, x, y):
    with torch.no_grad():
        zero(x)


# A forward of the model, and what is done with it.
WRONG = {
    "a block twice": (in_order(0, 1, 1, 2), one_step),
    "without a block": (in_order(0, 2), one_step),
    "without the last block": (in_order(0, 1), one_step),
    "another order": (in_order(0, 2, 1), one_step),
    "recomputed around blocks": (in_order(0, 1, 2, call=functools.partial(checkpoint, use_reentrant=False)), one_step),
    "without a gradient": (in_order(0, 1, 2, call=without_gradient), one_step),
    "evaluated without a block": (in_order(0, 2), evaluate),
    "backward twice": (gpt.GPT.forward, backward_twice),
    "two forwards": (gpt.GPT.forward, two_losses),
    "without finish_backward": (gpt.GPT.forward, without_finish),
}


@on_processes(2, *guards(1))
@pytest.mark.parametrize("name", WRONG)
def test_a_unit_that_is_not_gathered_and_reduced_exactly_once_is_an_error(name):
    forward, step = WRONG[name]
    model, args = small_model()
    model.forward = functools.partial(forward, model)
    zero = min_FSDP_scratch.ZeRO3(model)
    with pytest.raises(dist.DistributedError, match=r"must compute once|finish_backward must follow"):
        step(zero, *transformer.small_data(args, (0, 1)).batch(0))


FREED = {  # between two steps it would read from address 0, or silently do nothing
    "a penalty": lambda model: sum(param.square().sum() for param in model.parameters()),
    "saved": lambda model: torch.save(model.state_dict(), io.BytesIO()),
    "loaded": lambda model: model.load_state_dict(small_model()[0].state_dict()),
    "copied": copy.deepcopy,
    "moved": nn.Module.float,
    "the plain model is evaluated": lambda model: model(torch.zeros(1, 2, dtype=torch.long)),
    "the optimizer has the plain parameters": lambda model: torch.optim.AdamW(model.parameters()),
    "compared": dist.check_in_sync,
}


@on_processes(2)
@pytest.mark.parametrize("name", FREED)
def test_a_parameter_without_memory_is_not_used(name):
    model, args = small_model()
    one_step(min_FSDP_scratch.ZeRO3(model), *transformer.small_data(args).batch(0))
    with pytest.raises(ValueError, match="a parameter has no memory until its unit computes"):
        FREED[name](model)


def same_block(model):
    model.blocks[2] = model.blocks[0]


def same_parameter(model):
    model.blocks[2].mlp.up.weight = model.blocks[0].mlp.up.weight


def block_in_root(model):
    model.last_norm = model.blocks[1].norm1


@pytest.mark.parametrize("share", [same_block, same_parameter, block_in_root])
def test_a_parameter_in_two_units_is_refused(share):
    model, _ = small_model()
    share(model)
    with pytest.raises(ValueError, match="must not share"):
        min_FSDP_scratch.ZeRO3(model)


def test_a_unit_of_several_types_is_refused():
    model, _ = small_model()
    model.blocks[1].mlp.bfloat16()
    with pytest.raises(ValueError, match="several types"):
        min_FSDP_scratch.ZeRO3(model)


@on_processes(1)
def test_a_block_may_be_frozen_later():
    model, args = small_model()
    zero = min_FSDP_scratch.ZeRO3(model)
    for _ in range(2):
        one_step(zero, *transformer.small_data(args).batch(0))
        model.blocks[1].requires_grad_(False)
    for number, unit in enumerate(zero.units):
        assert [piece.grad is None for piece in unit.pieces] == [number == 1] * len(unit.pieces)
