"""min_Muon.py: groups, schedulers and frozen matrices, shards of momentum, what is sent, and one matrix.

test_equal.py has what all scripts that train the GPT promise.
"""

import sys
from unittest import mock

import pytest
import references
import torch
import transformer
from conftest import Watch, exit_message, guards, run, slow, torchrun
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import distributed as dist
import gpt
import min_Muon

# Two matrices of each shape, tall and wide, whose rows do not divide by 2 or 4.
ODD = {**transformer.ODD, "clip": 0.5}
EVEN = {"width": 192, "heads": 3, "steps": 2}  # whose rows divide by 1, 2, 3 and 4
OPTIONS = {"muon_lr": 0.02, "checkpoint_dir": None, "save_every": 100}
GROUPS = ({"lr": 0.05, "weight_decay": 0.9}, {"momentum": 0.5})  # of two matrices and of one
WARMUP = 5


def arguments(nprocs=1, **changes):
    return transformer.arguments(nprocs, **{**ODD, **OPTIONS, **changes})


def matrices_of(model):
    return [param for name, param in model.named_parameters() if references.is_matrix(name)]


def shapes_of(width):
    """The shapes of all matrices of a model of two blocks."""
    return 2 * [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]


def groups_of(model):
    """Two groups of three matrices, fewer than four ranks, and the parameters that AdamW steps."""
    first, second, third = matrices_of(model)[2:5]
    groups = [{"params": [first, second], **GROUPS[0]}, {"params": [third], **GROUPS[1]}]
    chosen = {first, second, third}
    return groups, [param for param in model.parameters() if param not in chosen]


def schedule(optimizer):
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARMUP))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())


def optimizers_in_groups(muon_class, args, model):
    groups, rest = groups_of(model)
    muon = muon_class(groups, lr=args.muon_lr, momentum=0.95, weight_decay=0.01)
    optimizers = (muon, transformer.make_optimizer("AdamW", rest, args.lr))
    for optimizer in optimizers:
        schedule(optimizer)
    return optimizers


def momentum_held(muon):
    """The shape of this rank's shard of each momentum, in the order of the matrices."""
    shapes = []
    for group in muon.param_groups:
        for matrix in group["params"]:
            buffer = muon.state[matrix]["momentum_buffer"]
            assert isinstance(buffer, DTensor) or dist.get_world_size() == 1, "a checkpoint could not be resharded"
            shapes.append(list(transformer.local(buffer).shape))
    return shapes


def train_groups():
    """Losses, parameters, and the shapes of the momentum, with groups of three matrices in all, and schedulers."""
    args = arguments(dist.get_world_size())
    model = min_Muon.make_sharded_model(args)
    optimizers = optimizers_in_groups(min_Muon.Muon, args, model)
    losses = min_Muon.train(model, optimizers, transformer.small_data(args), args)
    return losses, transformer.full_parameters(model), momentum_held(optimizers[0])


# ---- what is sent, and what is held ---------------------------------------------------------------------------------


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


def watch_step():
    """In float32: bytes that this rank sends in a step of Muon, and its peak memory."""
    torch.set_default_dtype(torch.float32)
    args = arguments(dist.get_world_size(), **EVEN)
    model = min_Muon.make_sharded_model(args)
    muon, adamw = min_Muon.make_optimizers(model, args.lr, args.muon_lr)
    data = transformer.small_data(args)
    with mock.patch("gpt.Progress"):
        min_Muon.train(model, (muon, adamw), data, args)
    with Watch() as watch:
        muon.step()
    assert watch.counts.keys() <= {"c10d.alltoall_base_"}
    peak = peak_of(muon.step)
    torch.set_default_dtype(torch.float64)
    return watch.sent["all to all"], peak


def call(function):
    dist.init_process_group(even_alone=True)  # as main_worker does
    return function()


def rows_held(rows, n, rank):
    """The rows of a matrix's shard, by torch.chunk."""
    parts = torch.arange(rows).chunk(n)
    return len(parts[rank]) if rank < len(parts) else 0


@pytest.mark.parametrize("nprocs", [*guards(2), *slow(1, 3, 4)])
def test_groups_equal_one_process_and_momentum_memory_and_bytes_are_split(tmp_path, nprocs):
    ranks = transformer.train_on(nprocs, call, [(train_groups,), (watch_step,)], tmp_path)
    args = arguments()
    expected = references.train_with_muon(
        lambda model: references.Both(*optimizers_in_groups(torch.optim.Muon, args, model)), args
    )
    matrices = [rows * columns for rows, columns in shapes_of(EVEN["width"])]
    formula = 8 * (nprocs - 1) / nprocs**2 * sum(matrices)
    for rank, ((losses, parameters, momentum), (sent, peak)) in enumerate(ranks):
        transformer.assert_equal(losses, parameters, expected)
        assert all(torch.equal(ranks[0][0][1][name], value) for name, value in parameters.items())
        shapes = shapes_of(args.width)[2:5]
        expected_shapes = [[rows_held(rows, nprocs, rank), columns] for rows, columns in shapes]
        assert momentum == expected_shapes, "momentum is split as the matrix is"
        assert sent <= 1.15 * formula, "with 3 ranks, 8 matrices are no full groups"
        # About 30, as the docstring says, for any number of ranks. gloo frees what it has sent at some later time.
        assert 24 * max(matrices) <= peak <= 45 * max(matrices)
    assert sum(sent for _, (sent, _) in ranks) == pytest.approx(nprocs * formula), "bytes of the docstring"


def frozen_worker(local_rank, world_size):
    dist.init_process_group(even_alone=True)
    model = gpt.GPT(gpt.Config(2, 16, 2, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
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


def test_a_frozen_matrix_is_left_out():
    dist.launch(frozen_worker, nprocs=1)


def replicated_worker(local_rank, world_size):
    dist.init_process_group()
    with pytest.raises(ValueError, match="whose rows fully_shard has split"):
        min_Muon.Muon([torch.nn.Parameter(torch.ones(4, 4))], lr=0.1)


def test_matrices_that_are_not_sharded_are_refused():
    dist.launch(replicated_worker, nprocs=2)


def test_what_no_shape_shows_must_not_change(tmp_path):
    def run(**changes):
        args = {"steps": 2, "layers": 1, "checkpoint_dir": str(tmp_path), **changes}
        return dist.launch(min_Muon.main_worker, arguments(**args), nprocs=1)

    run()
    for changes, line in (
        ({"heads": 1}, f"--heads {arguments().heads}, not 1"),
        ({"seed": 5}, f"--seed {arguments().seed}, not 5"),
        ({"lr": 0.5}, f"--lr {arguments().lr}, not 0.5"),
        ({"clip": 0.25}, f"--clip {arguments().clip}, not 0.25"),
        ({"muon_lr": 0.5}, f"--muon-lr {arguments().muon_lr}, not 0.5"),
    ):
        assert f"{tmp_path}/step-2 was saved with {line}: use the same" in exit_message(run, steps=3, **changes)
    text, held_out = gpt.load_text()
    with mock.patch("gpt.load_text", lambda: (text[:-1], held_out)):
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


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("rows", [1, 2, 5, 9, 16])
def test_rows_are_counted_as_fully_shard_deals_them(world_size, rows, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    assert min_Muon.shard_sizes(rows) == [rows_held(rows, world_size, rank) for rank in range(world_size)]


# ---- the command ----------------------------------------------------------------------------------------------------


def test_a_mistake_is_one_line(main_of, tmp_path):
    refused = {
        ("--muon-lr", "0"): "argument --muon-lr: '0' is not a finite number above 0",
        ("--nproc", "3", "--global-batch-size", "16"): "argument --global-batch-size: 16 is not a multiple of 3, "
        "the number of processes",
    }
    for typed, message in refused.items():
        assert main_of("min_Muon.py", *typed) == (2, f"min_Muon.py: error: {message}\n")
    (tmp_path / "file").touch()
    message, stderr = main_of("min_Muon.py", "--checkpoint-dir", str(tmp_path / "file"))
    assert message.startswith("--checkpoint-dir: cannot write to ") and message.count("\n") == 0 and stderr == ""


def test_the_defaults_fit_any_number_of_processes(monkeypatch):
    for nprocs in (*range(1, 9), 16):
        monkeypatch.setattr(sys, "argv", ["min_Muon.py", "--nproc", str(nprocs)])
        args = min_Muon.parse_args()
        assert args.global_batch_size % nprocs == 0 and 16 <= args.global_batch_size < 16 + nprocs


@pytest.mark.slow
def test_the_script_prints_what_it_holds_and_resumes_however_it_is_started(tmp_path):
    options = ("--clip", 1, "--global-batch-size", 2, "--checkpoint-dir", tmp_path)
    env = {"OMP_NUM_THREADS": "1"}  # or torchrun says that it sets it
    outputs = []
    for start, command, steps in ((torchrun, (2, "min_Muon.py"), 2), (run, ("min_Muon.py", "--nproc", 2), 4)):
        status, stdout, stderr = start(*command, "--steps", steps, *options, env=env)
        assert (status, stderr) == (0, "")
        outputs.append(stdout)
        assert stdout.startswith("parameters held: 239,360 of 478,720 (0.500)\n")
    assert [line["step"] for output in outputs for line in transformer.progress_lines(output)] == [2, 4]
    assert [f"Resuming from {tmp_path}/step-2\n" in output for output in outputs] == [False, True]
