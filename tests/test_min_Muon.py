"""min_Muon.py: equal to torch.optim.Muon in one process, with shards of matrices and of momentum on each rank."""

import math
import re
import sys
from unittest import mock

import pytest
import torch
import transformer
from conftest import exit_message, guards, run, slow, torchrun
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import distributed as dist
import gpt
import min_Muon

# Two matrices of each shape, tall and wide, whose rows do not divide by 2 or 4.
ODD = {"layers": 2, "width": 33, "heads": 3, "length": 31, "global_batch_size": 12, "clip": 0.5}
NARROW = {"width": 9, "lr": 0.05, "muon_lr": 0.1}  # of 9 rows the last of 4 ranks has none
EVEN = {"width": 192, "steps": 2}  # whose rows divide by 1, 2, 3 and 4
OPTIONS = {"muon_lr": 0.02, "checkpoint_dir": None, "save_every": 100, "log_every": 2}
GROUPS = ({"lr": 0.05, "weight_decay": 0.9}, {"momentum": 0.5})  # of two matrices and of one
WARMUP = 5
OPTIMIZERS = {"AdamW": "AdamW", "SGD": "SGD", "narrow": "AdamW", "groups": "AdamW"}  # by case, for the rest
CHANGES = {"AdamW": {}, "SGD": {}, "narrow": NARROW, "groups": {}}
CASES = list(CHANGES)


def arguments(nprocs=1, **changes):
    return transformer.arguments(nprocs, **{**ODD, **OPTIONS, **changes})


def matrices_of(model):
    """By name, so that neither an embedding nor the head is among them."""
    pattern = r"blocks\.\d\.(attention\.qkv|attention\.out|mlp\.up|mlp\.down)\.weight"
    return [param for name, param in model.named_parameters() if re.fullmatch(pattern, name)]


def shapes_of(case, width=None):
    """The shapes of the matrices that Muon steps in a case."""
    width = width or arguments(**CHANGES[case]).width
    block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    return (2 * block)[2:5] if case == "groups" else 2 * block


def groups_of(model):
    """Two groups of three matrices, fewer than four ranks, and the parameters that AdamW steps."""
    first, second, third = matrices_of(model)[2:5]
    groups = [{"params": [first, second], **GROUPS[0]}, {"params": [third], **GROUPS[1]}]
    chosen = {first, second, third}
    return groups, [param for param in model.parameters() if param not in chosen]


# ---- one process of plain PyTorch -----------------------------------------------------------------------------------


def by_singular_values(matrix, coefficients=(3.4445, -4.7750, 2.0315), steps=5, eps=1e-7):
    """What Newton-Schulz's products of matrices do to each singular value, in the matrix's own type."""
    a, b, c = coefficients
    u, s, vt = torch.linalg.svd(matrix / matrix.norm().clamp(min=eps), full_matrices=False)
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u * s @ vt


def expected(case):
    """Losses and parameters of torch.optim.Muon, which would compute in bfloat16, and of AdamW or SGD."""
    args = arguments(**CHANGES[case])
    with transformer.float64(), mock.patch("torch.optim._muon._zeropower_via_newtonschulz", by_singular_values):
        model = transformer.make_model(args)
        before = transformer.full_parameters(model)
        if case == "groups":
            matrices, rest = groups_of(model)
        else:
            matrices = matrices_of(model)
            chosen = set(matrices)
            rest = [param for param in model.parameters() if param not in chosen]
        muon = torch.optim.Muon(matrices, lr=args.muon_lr, momentum=0.95, weight_decay=0.01)
        adamw = transformer.make_optimizer(OPTIMIZERS[case], rest, args.lr)
        if case == "groups":
            schedule(muon)
            schedule(adamw)
        losses, n_clipped = [], 0
        for step in range(args.steps):
            x, y = gpt.batch(transformer.small_text()[0], step, args.global_batch_size, args.length, args.seed)
            loss = transformer.plain_loss(model, x, y)
            model.zero_grad()
            loss.backward()
            n_clipped += (torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip) > args.clip).item()
            muon.step()
            adamw.step()
            losses.append(loss.detach())
        after = transformer.full_parameters(model)
    assert losses[-1] < losses[0] - 0.5, "the reference must learn, or equality means little"
    assert n_clipped > args.steps / 4
    assert all((after[name] - before[name]).abs().max() > 1e-4 for name in before)
    return torch.stack(losses), after


@pytest.fixture(scope="module")
def references():
    return {case: expected(case) for case in CASES}


# ---- the script's own training --------------------------------------------------------------------------------------


def momentum_held(muon):
    """The shape of this rank's shard of each momentum, in the order of the matrices."""
    shapes = []
    for group in muon.param_groups:
        for matrix in group["params"]:
            buffer = muon.state[matrix]["momentum_buffer"]
            assert isinstance(buffer, DTensor) or dist.get_world_size() == 1, "a checkpoint could not be resharded"
            shapes.append(list(transformer.local(buffer).shape))
    return shapes


def train(case, **changes):
    """Losses, parameters by name, and the shapes of the momentum that this rank holds, by the main_worker."""
    args = arguments(dist.get_world_size(), **changes)
    made = []
    make_optimizers = min_Muon.make_optimizers

    def recorded_make(*args):
        made.append(make_optimizers(*args))
        return made[0]

    with mock.patch.object(min_Muon, "make_optimizers", recorded_make):
        result = transformer.run_main_worker(min_Muon, args, case)
    parameters = transformer.full_parameters(result.model)
    if dist.is_primary():
        total = sum(param.numel() for param in parameters.values())
        # The first rank holds most rows.
        held = sum(math.ceil(len(p) / dist.get_world_size()) * p[0].numel() for p in parameters.values())
        assert result.stdout.startswith(f"parameters held: {held:,} of {total:,} ({held / total:.3f})\n")
    return result.losses, parameters, momentum_held(made[0][0])


def train_groups():
    """The same with groups of three matrices in all, and a scheduler for each optimizer."""
    args = arguments(dist.get_world_size())
    model = min_Muon.make_sharded_model(args)
    groups, rest = groups_of(model)
    muon = min_Muon.Muon(groups, lr=args.muon_lr)
    adamw = torch.optim.AdamW(rest, lr=args.lr, fused=True)
    for optimizer in (muon, adamw):
        schedule(optimizer)
    losses = min_Muon.train(model, (muon, adamw), transformer.small_data(args), args)
    return losses, transformer.full_parameters(model), momentum_held(muon)


def schedule(optimizer):
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARMUP))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())


# ---- what is sent, and what is held ---------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Counts the bytes that a rank sends to others by all-to-all, other collectives, and the host's reads."""

    def __init__(self):
        super().__init__()
        self.sent = 0
        self.others = 0
        self.host_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its own operations on the shards come here next
        name = func.name()
        if "alltoall_base_" in name:
            _, flat, _, _, n_sent, *_ = args
            self.sent += flat.element_size() * (sum(n_sent) - n_sent[dist.get_rank()])
        elif "_local_scalar_dense" in name:
            self.host_reads += 1
        elif name.startswith("c10d::"):
            self.others += 1
        return func(*args, **(kwargs or {}))


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
    """In float32: bytes that this rank sends in a step of Muon, its peak memory, and the reads of the host in steps."""
    torch.set_default_dtype(torch.float32)
    args = arguments(dist.get_world_size(), **EVEN)
    model = min_Muon.make_sharded_model(args)
    muon, adamw = min_Muon.make_optimizers(model, args.lr, args.muon_lr)
    data = transformer.small_data(args)
    with mock.patch("gpt.Progress"), Watch() as training:
        min_Muon.train(model, (muon, adamw), data, args)
    with Watch() as watch:
        muon.step()
    assert watch.others == 0
    peak = peak_of(muon.step)
    torch.set_default_dtype(torch.float64)
    return watch.sent, peak, training.host_reads


# ---- all of it in one job of each number of ranks -------------------------------------------------------------------


def call(case):
    if case == "watch_step":
        return watch_step()
    if case == "groups":
        return train_groups()
    return train(OPTIMIZERS[case], **CHANGES[case])


def rows_held(rows, n, rank):
    """The rows of a matrix's shard, by torch.chunk."""
    parts = torch.arange(rows).chunk(n)
    return len(parts[rank]) if rank < len(parts) else 0


@pytest.mark.parametrize("nprocs", [*guards(2), *slow(1, 3, 4)])
def test_it_gives_what_one_process_gives_and_holds_its_share_of_the_momentum(references, tmp_path, nprocs):
    ranks = transformer.train_on(nprocs, call, [(case,) for case in [*CASES, "watch_step"]], tmp_path)
    empty = 0
    for number, case in enumerate(CASES):
        losses, parameters, _ = ranks[0][number]
        transformer.assert_equal(losses, parameters, references[case])
        for other in ranks[1:]:
            assert all(torch.equal(other[number][1][name], value) for name, value in parameters.items())
        shapes = shapes_of(case)
        for rank, results in enumerate(ranks):
            expected_shapes = [[rows_held(rows, nprocs, rank), columns] for rows, columns in shapes]
            assert results[number][2] == expected_shapes, "momentum is split as the matrix is"
            empty += sum(rows == 0 for rows, _ in expected_shapes)
    assert empty or nprocs < 4, "a rank with an empty shard is among the cases"

    matrices = [rows * columns for rows, columns in shapes_of("AdamW", EVEN["width"])]
    formula = 8 * (nprocs - 1) / nprocs**2 * sum(matrices)
    assert sum(sent for *_, (sent, _, _) in ranks) == pytest.approx(nprocs * formula), "bytes of the docstring"
    for *_, (sent, peak, host_reads) in ranks:
        assert sent <= 1.15 * formula, "with 3 ranks, 8 matrices are no full groups"
        # About 30, as the docstring says, for any number of ranks. gloo frees what it has sent at some later time.
        assert 24 * max(matrices) <= peak <= 45 * max(matrices)
        assert host_reads == 0, "the loop never waits for the device"


RUNS = [  # ranks, and the step at which they stop
    [(1, 2), (2, 4), (1, 6)],
    [(1, 2), (4, 3), (3, 5), (2, 6)],
]


@pytest.mark.slow
@pytest.mark.parametrize("segments", [RUNS[0], pytest.param(RUNS[1], marks=pytest.mark.guard)])
def test_a_run_that_changes_its_number_of_ranks_equals_the_uninterrupted_one(references, tmp_path, segments):
    losses = []
    for nprocs, stop in segments:
        changes = {"steps": stop, "checkpoint_dir": str(tmp_path / "runs"), "save_every": 1}
        results = transformer.train_on(nprocs, train_segment, [(changes,)], tmp_path)
        losses.append(results[0][0][0])
    transformer.assert_equal(torch.cat(losses), results[0][0][1], references["AdamW"])


def train_segment(changes):
    return train("AdamW", **changes)


def test_a_frozen_matrix_is_left_out():
    model = gpt.GPT(2, 16, 2, 8)
    model.blocks[0].requires_grad_(False)
    matrices, rest = min_Muon.split_params(model)
    assert len(matrices) == 4 and all(param.requires_grad for param in [*matrices, *rest])
    frozen = model.blocks[0].mlp.up.weight
    before = frozen.clone()
    muon = min_Muon.Muon([*matrices, frozen], lr=0.1)
    for matrix in matrices:
        matrix.grad = torch.ones_like(matrix)
    muon.step()
    assert torch.equal(frozen, before) and frozen not in muon.state and len(muon.state) == 4


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
        ({"heads": 1}, "--heads 3, not 1"),
        ({"seed": 5}, f"--seed {arguments().seed}, not 5"),
        ({"lr": 0.5}, f"--lr {arguments().lr}, not 0.5"),
        ({"clip": 0.25}, f"--clip {arguments().clip}, not 0.25"),
        ({"muon_lr": 0.5}, f"--muon-lr {arguments().muon_lr}, not 0.5"),
    ):
        assert f"{tmp_path}/step-2 was saved with {line}: use the same" in exit_message(run, steps=3, **changes)
    text, held_out = gpt.load_text()
    with mock.patch("gpt.load_text", lambda: (text[:-1], held_out)):
        assert f"{tmp_path}/step-2 was saved with text (checksum) " in exit_message(run, steps=3)


def test_it_saves_every_so_many_steps_and_at_the_end(tmp_path):
    args = arguments(steps=5, layers=1, save_every=2, checkpoint_dir=str(tmp_path))
    assert transformer.saves_of(min_Muon, args) == [2, 4, 5]


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
    assert (result - by_singular_values(matrix)).abs().max() <= 1e-12
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
