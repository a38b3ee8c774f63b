"""min_FSDP_scratch.py: at most two blocks in memory, any parameters, and errors where it would be silently wrong.

test_equal.py has what all scripts that train the GPT promise.
"""

import copy
import functools
import io
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformer
from conftest import guards, slow
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import distributed as dist
import gpt
import min_FSDP_scratch

ODD = {**transformer.ODD, "layers": 3}  # no number of processes above 1 divides the parameters of a block


def whole_parameters(zero):
    """By name, as they would be gathered."""
    for unit in zero.units:
        unit.wait()
    parameters = {name: param.detach().clone() for name, param in zero.model.named_parameters()}
    for unit in zero.units:
        unit.free()
    return parameters


def hold_and_send():
    """What this rank holds after a run of the script's main_worker, and the sizes of its units."""
    args = transformer.arguments(dist.get_world_size(), **{**ODD, "steps": 1})
    zero = transformer.run_main_worker(min_FSDP_scratch, args, "AdamW").model
    held = sum(piece.numel() for piece in zero.pieces())
    memory = sum(unit.own.numel() + unit.full.untyped_storage().nbytes() for unit in zero.units)
    return held, memory, [len(unit.full) for unit in zero.units]


@pytest.mark.parametrize("nprocs", [2, *slow(1, 3, 4)])
def test_it_holds_its_part(nprocs, tmp_path):
    total = sum(param.numel() for param in small_model(gpt.GPT)[0].parameters())
    for ((held, memory, sizes),) in transformer.train_on(nprocs, hold_and_send, [()], tmp_path):
        padded = sum(sizes)
        assert total <= padded < total + nprocs * len(sizes)
        assert held <= padded // nprocs == memory, "nothing else has memory"


# ---- what is in memory at the same time -----------------------------------------------------------------------------


def gathered_units(steps=2):
    """How many blocks had memory after each gather, or gradients in flight; the order of gathers and reductions."""
    args = transformer.arguments(dist.get_world_size(), **{**ODD, "layers": 5})
    zero = min_FSDP_scratch.ZeRO3(transformer.make_model(args))
    *blocks, _ = zero.units
    in_memory, in_flight, events = [], [], []
    gather, reduce = min_FSDP_scratch.Unit.gather, min_FSDP_scratch.Unit.reduce

    def noted_gather(unit):
        starts = unit.full.untyped_storage().nbytes() == 0
        gather(unit)
        if starts and unit in blocks:
            in_memory.append(sum(block.full.untyped_storage().nbytes() > 0 for block in blocks))
            events.append(f"gather {blocks.index(unit)}")

    def noted_reduce(unit):
        if unit in blocks:
            events.append(f"reduce {blocks.index(unit)}")
        reduce(unit)
        in_flight.append(sum(block.reducing is not None for block in blocks))

    for number, block in enumerate(zero.model.blocks):
        block.mlp.register_forward_pre_hook(lambda *_, number=number: events.append(f"compute {number}"))
    share = (dist.get_rank(), dist.get_world_size())
    x, y = gpt.batch(transformer.small_text()[0], 0, args.global_batch_size, args.length, share=share)
    with (
        mock.patch("min_FSDP_scratch.Unit.gather", noted_gather),
        mock.patch("min_FSDP_scratch.Unit.reduce", noted_reduce),
    ):
        gpt.loss_fn(zero(x), y).backward()
        zero.finish_backward()
    return in_memory, in_flight, events


def test_two_blocks_have_memory_and_the_next_one_is_gathered_before_it_is_needed(tmp_path):
    ((in_memory, in_flight, events),) = transformer.train_on(2, gathered_units, [()], tmp_path)[0]
    assert max(in_memory) == 2
    assert max(in_flight) == 1, "whole gradients, beside those of the block that computes"
    forward = ["gather 0"]
    for number in range(4):
        forward += [f"gather {number + 1}", f"compute {number}"]
    forward.append("compute 4")
    backward = ["gather 4", "gather 3", "reduce 4", "gather 2", "reduce 3", "gather 1", "reduce 2"]
    assert events == [*forward, *backward, "gather 0", "reduce 1", "reduce 0"]


def bytes_in_memory(name):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return 1024 * int(line.split()[1])


def peak_of_the_root():
    """Bytes per byte of the root, from the forward to the end of `finish_backward`, beside those between two steps."""
    dist.init_process_group(even_alone=True)
    zero = min_FSDP_scratch.ZeRO3(gpt.GPT(gpt.Config(1, 64, 2, 100_000)))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    peaks = []
    for _ in range(4):
        before = bytes_in_memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak, VmHWM, begins anew
        gpt.loss_fn(zero(tokens), tokens).backward()
        zero.finish_backward()
        peaks.append((bytes_in_memory("VmHWM") - before) / zero.root.full.nbytes)
    return peaks


@pytest.mark.guard
@pytest.mark.slow
def test_the_root_takes_three_times_its_bytes_while_gloo_reduces_a_copy_of_its_gradients(tmp_path):
    ((peaks,),) = transformer.train_on(1, peak_of_the_root, [()], tmp_path)
    assert 2.9 < max(peaks[1:]) < 3.3  # not the first, and the allocator may keep something for the next step


# ---- tied weights, and parameters without a gradient ----------------------------------------------------------------


class Tied(gpt.GPT):
    """The head has the embedding's weight, and two frozen layers are never used: weight decay must not change them."""

    def __init__(self, config):
        super().__init__(config)
        self.head.weight = self.token.weight
        self.unused = nn.Linear(3, 5)
        self.blocks[0].unused = nn.Linear(2, 7)
        for layer in (self.unused, self.blocks[0].unused):
            layer.requires_grad_(False)
        gpt.fill(self.named_parameters(), seed=0)


def small_model(model_class):
    args = transformer.arguments(dist.get_world_size(), **ODD)
    return model_class(gpt.Config.from_args(args)), args


def train_like_plain(model, args, optimizer_class=torch.optim.SGD):
    """Train `model` beside a copy of it in one process. Their parameters must stay equal."""
    plain = copy.deepcopy(model)
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
    expected = dict(plain.named_parameters())
    actual = whole_parameters(zero)
    assert actual.keys() == expected.keys()
    for name, param in expected.items():
        # Adam enlarges the rounding of gradients that are 0, as those of the keys' biases are.
        atol = 1e-12 if optimizer_class is torch.optim.SGD else 1e-9
        torch.testing.assert_close(actual[name], param.detach(), rtol=0, atol=atol)
    return True


class OneRank(gpt.GPT):
    """Only rank 0's half of the batch, the even rows, uses the first MLP, and only rank 1's half the second one."""

    def __init__(self, config):
        super().__init__(config)
        for uses in range(2):
            mlp = self.blocks[uses].mlp
            mlp.forward = functools.partial(self.use_for_half, mlp.forward, uses)

    def use_for_half(self, forward, uses, x):
        if len(x) == transformer.arguments(**ODD).global_batch_size:  # one process has all rows
            is_used = torch.arange(len(x)) % 2 == uses
            return forward(x) * is_used[:, None, None]
        return forward(x) if dist.get_rank() == uses else 0 * x


def train_special(model_class, optimizer_class):
    return train_like_plain(*small_model(model_class), optimizer_class)


def test_tied_weights_frozen_layers_and_parameters_that_one_rank_uses(tmp_path):
    cases = [(model, optimizer) for model in (Tied, OneRank) for optimizer in (torch.optim.AdamW, torch.optim.SGD)]
    assert transformer.train_on(2, train_special, cases, tmp_path) == [[True] * 4] * 2


def train_frozen(optimizer_class, frozen):
    """The input of block 0 needs no gradient, if the embeddings are frozen."""
    dist.init_process_group(even_alone=True)
    model, args = small_model(gpt.GPT)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    return train_like_plain(model, args, optimizer_class)


class Recomputing(gpt.GPT):
    def __init__(self, config):
        super().__init__(config)
        for block in self.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def train_recomputing(optimizer_class, frozen):
    dist.init_process_group(even_alone=True)
    model, args = small_model(gpt.GPT)
    recomputing, _ = small_model(Recomputing)
    zero = min_FSDP_scratch.ZeRO3(recomputing)
    x, y = gpt.batch(transformer.small_text()[0], 0, args.global_batch_size, args.length)
    for forward in (zero, model):
        gpt.loss_fn(forward(x), y).backward()
    zero.finish_backward()
    for unit, block in zip(zero.units, model.blocks, strict=False):
        expected = torch.cat([param.grad.flatten() for param in block.parameters()])
        expected = F.pad(expected, (0, len(unit.padding))).chunk(dist.get_world_size())[dist.get_rank()]
        torch.testing.assert_close(unit.own_grad, expected, rtol=0, atol=1e-12)
    return True


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_block_whose_input_needs_no_gradient_is_trained_and_a_block_may_recompute(nprocs, tmp_path):
    cases = []
    for frozen in (("token", "position"), ("token", "position", "blocks.0", "blocks.2"), ("blocks.1", "head")):
        cases += [(torch.optim.AdamW, frozen), (torch.optim.SGD, frozen)]
    assert transformer.train_on(nprocs, train_frozen, cases, tmp_path) == [[True] * 6] * nprocs
    assert transformer.train_on(nprocs, train_recomputing, [(None, None)], tmp_path) == [[True]] * nprocs


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


def backward_twice(zero, x, y):
    loss = gpt.loss_fn(zero(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    zero.finish_backward()


def backward_after_finish(zero, x, y):
    loss = gpt.loss_fn(zero(x), y)
    loss.backward(retain_graph=True)
    zero.finish_backward()
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


def one_step(zero, x, y):
    gpt.loss_fn(zero(x), y).backward()
    zero.finish_backward()


def penalize(zero, x, y):
    (gpt.loss_fn(zero(x), y) + sum(param.square().sum() for param in zero.model.parameters())).backward()


def between_steps(use):
    """`use(model)` after a step: it would read from address 0, or silently do nothing."""

    def step(zero, x, y):
        one_step(zero, x, y)
        use(zero.model)

    return step


WRONG = {
    "a block twice": (in_order(0, 1, 1, 2), one_step),
    "all blocks twice": (in_order(0, 1, 2, 0, 1, 2), one_step),
    "without the first block": (in_order(1, 2), one_step),
    "without a block": (in_order(0, 2), one_step),
    "without the last block": (in_order(0, 1), one_step),
    "another order": (in_order(0, 2, 1), one_step),
    "reversed": (in_order(2, 1, 0), one_step),
    "recomputed around blocks": (in_order(0, 1, 2, call=functools.partial(checkpoint, use_reentrant=False)), one_step),
    "recomputed, reentrant": (in_order(0, 1, 2, call=functools.partial(checkpoint, use_reentrant=True)), one_step),
    "without a gradient": (in_order(0, 1, 2, call=without_gradient), one_step),
    "evaluated without a block": (in_order(0, 2), evaluate),
    "backward twice": (gpt.GPT.forward, backward_twice),
    "backward after finish_backward": (gpt.GPT.forward, backward_after_finish),
    "two forwards": (gpt.GPT.forward, two_losses),
    "without finish_backward": (gpt.GPT.forward, without_finish),
}
FREED = {
    "a penalty": penalize,
    "saved": between_steps(lambda model: torch.save(model.state_dict(), io.BytesIO())),
    "loaded": between_steps(lambda model: model.load_state_dict(small_model(gpt.GPT)[0].state_dict())),
    "copied": between_steps(copy.deepcopy),
    "pickled": between_steps(lambda model: torch.save(model, io.BytesIO())),
    "moved": between_steps(nn.Module.float),
    "wrapped twice": between_steps(min_FSDP_scratch.ZeRO3),
    "the plain model is evaluated": between_steps(lambda model: model(torch.zeros(1, 2, dtype=torch.long))),
    "the optimizer has the plain parameters": between_steps(lambda model: torch.optim.AdamW(model.parameters())),
    "transposed": between_steps(lambda model: model.head.weight.T),
    "compared": between_steps(dist.check_in_sync),
}
WRONG.update({name: (gpt.GPT.forward, step) for name, step in FREED.items()})


def error_of(name):
    dist.init_process_group(even_alone=True)
    forward, step = WRONG[name]
    model, args = small_model(gpt.GPT)
    zero = min_FSDP_scratch.ZeRO3(model)
    x, y = gpt.batch(transformer.small_text()[0], 0, args.global_batch_size, args.length)
    with mock.patch.object(gpt.GPT, "forward", forward):
        try:
            step(zero, x, y)
        except (dist.DistributedError, ValueError) as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("nprocs", [2, *guards(1)])
def test_a_unit_that_is_not_gathered_and_reduced_exactly_once_is_an_error(nprocs, tmp_path):
    for errors in transformer.train_on(nprocs, error_of, [(name,) for name in WRONG], tmp_path):
        for name, error in zip(WRONG, errors, strict=True):
            if name in FREED:
                assert "a parameter has no memory until its unit computes" in error, (name, error)
            else:
                assert "must compute once" in error or "finish_backward must follow" in error, (name, error)


def same_block(model):
    model.blocks[2] = model.blocks[0]


def same_parameter(model):
    model.blocks[2].mlp.up.weight = model.blocks[0].mlp.up.weight


def block_in_root(model):
    model.last_norm = model.blocks[1].norm1


@pytest.mark.parametrize("share", [same_block, same_parameter, block_in_root])
def test_a_parameter_in_two_units_is_refused(share):
    model, _ = small_model(gpt.GPT)
    share(model)
    with pytest.raises(ValueError, match="must not share"):
        min_FSDP_scratch.ZeRO3(model)


def test_a_unit_of_several_types_is_refused_and_a_block_may_be_frozen_later():
    dist.init_process_group(even_alone=True)
    model, args = small_model(gpt.GPT)
    model.blocks[1].mlp.bfloat16()
    with pytest.raises(ValueError, match="several types"):
        min_FSDP_scratch.ZeRO3(model)
    model, _ = small_model(gpt.GPT)
    zero = min_FSDP_scratch.ZeRO3(model)
    x, y = gpt.batch(transformer.small_text()[0], 0, args.global_batch_size, args.length)
    one_step(zero, x, y)
    model.blocks[1].requires_grad_(False)
    one_step(zero, x, y)
    for number, unit in enumerate(zero.units):
        assert [piece.grad is None for piece in unit.pieces] == [number == 1] * len(unit.pieces)
    dist.cleanup()
