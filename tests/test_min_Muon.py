"""min_Muon.py: groups, schedulers and frozen matrices, its peak of memory, and one matrix.

test_equal.py has what all scripts that train the GPT promise.
"""

import pytest
import references
import torch
import transformer
from conftest import exit_message, float64, guards, on_processes, slow
from torch.distributed.tensor import DTensor

import distributed as dist
import gpt
import min_Muon

# Two matrices of each shape, tall and wide, whose rows do not divide by 2 or 4.
OPTIONS = {**transformer.ODD, "clip": 0.5, "muon_lr": 0.02, "checkpoint_dir": None, "save_every": 100}
GROUPS = ({"lr": 0.05, "weight_decay": 0.9}, {"momentum": 0.5})  # of two matrices and of one
WARMUP = 5


def matrices_of(model):
    return [param for name, param in model.named_parameters() if references.is_matrix(name)]


def schedule(optimizer):
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARMUP))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())


def optimizers_in_groups(muon_class, args, model):
    """Two groups of three matrices, fewer than four ranks, and AdamW for the rest."""
    first, second, third = matrices_of(model)[2:5]
    groups = [{"params": [first, second], **GROUPS[0]}, {"params": [third], **GROUPS[1]}]
    rest = [param for param in model.parameters() if all(param is not each for each in (first, second, third))]
    muon = muon_class(groups, lr=args.muon_lr, momentum=0.95, weight_decay=0.01)
    optimizers = (muon, transformer.make_optimizer("AdamW", rest, args.lr))
    for optimizer in optimizers:
        schedule(optimizer)
    return optimizers


@on_processes(*guards(2), *slow(1, 3, 4))
@float64()
def test_groups_and_schedulers_equal_one_process():
    args = transformer.arguments(dist.get_world_size(), **OPTIONS)
    model = min_Muon.make_sharded_model(args)
    muon, adamw = optimizers_in_groups(min_Muon.Muon, args, model)
    losses = min_Muon.train(model, (muon, adamw), transformer.small_data(args), args)
    parameters = transformer.full_parameters(model)
    expected = references.train_with_muon(
        lambda plain: references.Both(*optimizers_in_groups(torch.optim.Muon, args, plain)), args
    )
    transformer.assert_equal(losses, parameters, expected)
    assert all(isinstance(state["momentum_buffer"], DTensor) for state in muon.state.values()), "or it is not resharded"


# ---- memory ---------------------------------------------------------------------------------------------------------


def peak_of(function):
    """The most bytes that are allocated in `function`, more than before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = most = 0
    for _, n_bytes in changes:
        held += n_bytes
        most = max(most, held)
    return most


@on_processes(*guards(2), *slow(1, 4))
def test_a_step_takes_about_30_bytes_per_element_of_the_largest_matrix():
    """gloo frees what it has sent at some later time."""
    args = transformer.arguments(dist.get_world_size(), **{**OPTIONS, "width": 192, "heads": 3, "steps": 2})
    model = min_Muon.make_sharded_model(args)
    muon, adamw = min_Muon.make_optimizers(model, args.lr, args.muon_lr)
    min_Muon.train(model, (muon, adamw), transformer.small_data(args), args)
    largest = max(matrix.numel() for matrix in matrices_of(model))
    assert 24 * largest <= peak_of(muon.step) <= 45 * largest


# ---- what it takes --------------------------------------------------------------------------------------------------


@on_processes(1)
def test_a_frozen_matrix_is_left_out():
    model = min_Muon.make_sharded_model(transformer.arguments(layers=2))
    model.blocks[0].requires_grad_(False)
    matrices, rest = min_Muon.split_params(model)
    assert len(matrices) == 4 and all(param.requires_grad for param in [*matrices, *rest])
    frozen = model.blocks[0].mlp.up.weight
    before = frozen.full_tensor().clone()
    muon = min_Muon.Muon([*matrices, frozen], lr=0.1)
    for matrix in matrices:
        matrix.grad = torch.ones_like(matrix)
    muon.step()
    assert torch.equal(frozen.full_tensor(), before) and frozen not in muon.state and len(muon.state) == 4


def test_matrices_that_are_not_sharded_are_refused():
    with pytest.raises(ValueError, match="whose rows fully_shard has split"):
        min_Muon.Muon([torch.nn.Parameter(torch.ones(4, 4))], lr=0.1)


def test_what_no_shape_shows_must_not_change(tmp_path):
    def run(**changes):
        args = {**OPTIONS, "steps": 2, "layers": 1, "checkpoint_dir": str(tmp_path), **changes}
        return dist.launch(min_Muon.main_worker, transformer.arguments(**args), nprocs=1)

    with transformer.on_small_text():
        run()
        for changes in ({"heads": 1}, {"seed": 5}, {"lr": 0.5}, {"clip": 0.25}, {"muon_lr": 0.5}):
            ((name, value),) = changes.items()
            line = exit_message(run, steps=3, **changes)
            assert f"--{name.replace('_', '-')} " in line and f", not {value}: use the same" in line
    assert f"{tmp_path}/step-2 was saved with text (checksum) " in exit_message(run, steps=3)


# ---- the mistake beside it ------------------------------------------------------------------------------------------


def first_gradients():
    """Of the blocks' matrices of the model that `python min_Muon.py` trains, in its first step."""
    args = transformer.arguments(layers=2, width=128, length=128, global_batch_size=16, seed=0)
    model = transformer.make_model(args)
    x, y = gpt.batch(gpt.load_text()[0], 0, args.global_batch_size, args.length, args.seed)
    gpt.loss_fn(model(x), y).backward()
    return [matrix.grad for matrix in min_Muon.split_params(model)[0]]


def test_to_orthogonalize_each_shard_by_itself_gives_another_update():
    """By how much, as the docstring and docs/mistakes.md say."""
    for n, percent in ((2, 51), (4, 103)):
        difference = norm = 0
        for grad in first_gradients():
            scale = max(1, grad.shape[0] / grad.shape[1])
            whole = min_Muon.orthogonalize(grad)
            per_shard = torch.cat([min_Muon.orthogonalize(shard) for shard in grad.chunk(n)])
            difference += scale * (per_shard - whole).square().sum()
            norm += scale * whole.square().sum()
        assert 100 * (difference / norm).sqrt() == pytest.approx(percent, abs=3)


# ---- one matrix -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (12, 12), (1, 5), (5, 1)])
def test_orthogonalize(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    result = min_Muon.orthogonalize(matrix)
    assert (result - references.by_singular_values(matrix)).abs().max() <= 1e-12
    in_bfloat16 = torch.optim._muon._zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert (result - in_bfloat16).abs().max() <= 0.05
    singular_values = torch.linalg.svdvals(result)
    assert singular_values.min() > 0.65 and singular_values.max() < 1.21
    assert torch.equal(min_Muon.orthogonalize(torch.zeros(shape)), torch.zeros(shape))
