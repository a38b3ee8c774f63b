"""min_Muon.py: equal to torch.optim.Muon in one process, with each matrix and its momentum on one rank."""

import re
import sys
from unittest import mock

import pytest
import torch
import transformer
from conftest import exit_message, run, torchrun
from torch.utils._python_dispatch import TorchDispatchMode

import distributed as dist
import gpt
import min_Muon

# Two matrices of each shape, 43,560 elements, and 5,379 parameters in the rest: nothing divides by 2 or 4.
ODD = {"layers": 2, "width": 33, "heads": 3, "length": 31, "global_batch_size": 12, "clip": 0.5}
OPTIONS = {"muon_lr": 0.02, "snapshot_path": None, "log_every": 20}
SIZES = sorted(2 * [3 * 33 * 33, 33 * 33, 4 * 33 * 33, 4 * 33 * 33], reverse=True)
GROUPS = ({"lr": 0.05, "weight_decay": 0.9}, {"momentum": 0.5})  # of two matrices and of one
WARMUP = 5
CASES = ["AdamW", "SGD", "groups"]


def arguments(nprocs=1, **changes):
    return transformer.arguments(nprocs, **{**ODD, **OPTIONS, **changes})


def matrices_of(model):
    """By name, so that neither an embedding nor the head is among them."""
    pattern = r"blocks\.\d\.(attention\.qkv|attention\.out|mlp\.up|mlp\.down)\.weight"
    return [param for name, param in model.named_parameters() if re.fullmatch(pattern, name)]


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
    args = arguments()
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
        adamw = transformer.make_optimizer(case, rest, args.lr)
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
    """The elements of each momentum that this rank holds."""
    return [state["momentum_buffer"].numel() for state in muon.state.values()]


def train(case, **changes):
    """Losses, parameters by name, and the momentum that this rank holds, by the main_worker."""
    args = arguments(dist.get_world_size(), **changes)
    report, held = min_Muon.report_state, []
    manual_seed = torch.manual_seed

    def recorded_report(muon):
        held.extend(momentum_held(muon))
        report(muon)

    def seed_of_this_rank(seed):
        if seed == args.seed:
            seed += dist.get_rank()  # other weights on each rank; rank 0's count
        return manual_seed(seed)

    with (
        mock.patch.object(min_Muon, "report_state", recorded_report),
        mock.patch("torch.manual_seed", seed_of_this_rank),
    ):
        result = transformer.run_main_worker(min_Muon, args, case)
    if dist.is_primary():
        total = 8 * sum(SIZES)  # in float64
        most = 8 * sum(held)  # the first rank is dealt the first matrix
        assert result.stdout.endswith(f"momentum held: {most:,} of {total:,} bytes ({most / total:.3f})\n")
    return result.losses, transformer.full_parameters(result.model), held


def train_groups():
    """The same with groups of three matrices in all, and a scheduler for each optimizer."""
    args = arguments(dist.get_world_size())
    model = transformer.make_model(args)
    groups, rest = groups_of(model)
    muon = min_Muon.Muon(groups, lr=args.muon_lr)
    adamw = torch.optim.AdamW(rest, lr=args.lr, fused=True)
    for optimizer in (muon, adamw):
        schedule(optimizer)
    losses = min_Muon.train(model, (muon, adamw), *transformer.small_text(), args)
    return losses, transformer.full_parameters(model), momentum_held(muon)


def schedule(optimizer):
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARMUP))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())


# ---- what is sent ---------------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Counts the bytes that a rank sends in a ring, and how often the host reads a value of the device."""

    def __init__(self):
        super().__init__()
        self.sent = 0
        self.host_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        ring = (dist.get_world_size() - 1) / dist.get_world_size()
        if "_allgather_base_" in name:
            self.sent += ring * args[0].nbytes
        elif "_reduce_scatter_base_" in name:
            self.sent += ring * args[1].nbytes
        elif "allreduce_" in name:
            self.sent += 2 * ring * sum(tensor.nbytes for tensor in args[0])
        elif name.startswith("c10d::"):
            raise AssertionError(f"{name} was not expected")
        elif "_local_scalar_dense" in name:
            self.host_reads += 1
        return func(*args, **(kwargs or {}))


def watch_steps():
    """Bytes that this rank sends in a step of float32, but for the norm; the host's reads; the elements of a part."""
    torch.set_default_dtype(torch.float32)
    args = arguments(dist.get_world_size(), steps=2)
    model = transformer.make_model(args)
    matrices, rest = min_Muon.split_params(model)
    muon = min_Muon.Muon(matrices, lr=args.muon_lr)
    adamw = torch.optim.AdamW(rest, lr=args.lr, fused=True)
    with mock.patch("gpt.Progress"), Watch() as watch:
        min_Muon.train(model, (muon, adamw), *transformer.small_text(), args)
    torch.set_default_dtype(torch.float64)
    norm = 2 * (dist.get_world_size() - 1) / dist.get_world_size() * 4
    return watch.sent / args.steps - norm, watch.host_reads, len(muon.own)


# ---- all of it in one job of each number of ranks -------------------------------------------------------------------


def call(case):
    if case == "watch_steps":
        return watch_steps()
    return train_groups() if case == "groups" else train(case)


@pytest.mark.parametrize("nprocs", [1, 2, *(pytest.param(nprocs, marks=pytest.mark.slow) for nprocs in (3, 4))])
def test_it_gives_what_one_process_gives_and_holds_its_share_of_the_momentum(references, tmp_path, nprocs):
    ranks = transformer.train_on(nprocs, call, [(case,) for case in [*CASES, "watch_steps"]], tmp_path)
    for number, case in enumerate(CASES):
        losses, parameters, _ = ranks[0][number]
        transformer.assert_equal(losses, parameters, references[case])
        for other in ranks[1:]:  # equal in every bit, not only nearly
            assert all(torch.equal(other[number][1][name], value) for name, value in parameters.items())
        held = [results[number][2] for results in ranks]
        sizes = SIZES if case != "groups" else sorted([SIZES[0], SIZES[0], SIZES[-3]], reverse=True)
        all_held = sorted((size for sizes_of_rank in held for size in sizes_of_rank), reverse=True)
        assert all_held == sizes, "each matrix has one owner, which holds its momentum whole"
        assert max(map(sum, held)) <= sum(sizes) / nprocs + sizes[0]
        if case == "groups":
            assert [] in held or nprocs < 4, "a rank without any matrix works too"

    n_params = sum(value.numel() for value in parameters.values())
    for *_, (sent, host_reads, part) in ranks:
        formula = 8 * (nprocs - 1) * part + 8 * (nprocs - 1) / nprocs * (n_params - sum(SIZES))
        assert sent == pytest.approx(formula), "bytes of the docstring"
        assert sum(SIZES) / nprocs <= part <= sum(SIZES) / nprocs + SIZES[0]
        assert host_reads == 0, "the loop never waits for the device"


RUNS = [  # ranks, and the step at which they stop
    [(1, 2), (2, 4), (1, 6)],
    pytest.param([(1, 2), (4, 3), (3, 5), (2, 6)], marks=pytest.mark.slow),
]


def train_segment(stop, path):
    """Losses, parameters by name, and the most momentum that this rank has held in a step."""
    held = []

    def recorded_step(muon, *rest):
        held.append(sum(momentum_held(muon)))
        take_step(muon, *rest)

    with mock.patch.object(min_Muon, "take_step", recorded_step):
        losses, parameters, _ = train("AdamW", steps=stop, snapshot_path=path, log_every=1)
    return losses, parameters, max(held)


take_step = min_Muon.take_step


@pytest.mark.parametrize("segments", RUNS)
def test_a_run_that_changes_its_number_of_ranks_equals_the_uninterrupted_one(references, tmp_path, segments):
    path = str(tmp_path / "run.pt")
    losses = []
    for nprocs, stop in segments:
        results = transformer.train_on(nprocs, train_segment, [(stop, path)], tmp_path)
        losses.append(results[0][0][0])
        assert sum(held for ((_, _, held),) in results) == sum(SIZES), "its own, after a load and after a save"
        snapshot = torch.load(path, weights_only=True)
        assert snapshot["step"] == stop
        saved = {number: state["momentum_buffer"].shape for number, state in snapshot["muon"]["state"].items()}
        assert saved == {number: matrix.shape for number, matrix in enumerate(matrices_of(gpt.GPT(2, 33, 3, 31)))}
    transformer.assert_equal(torch.cat(losses), results[0][0][1], references["AdamW"])


def test_a_frozen_matrix_is_left_out():
    model = gpt.GPT(2, 16, 2, 8)
    model.blocks[0].requires_grad_(False)
    matrices, rest = min_Muon.split_params(model)
    assert len(matrices) == 4 and all(param.requires_grad for param in [*matrices, *rest])
    frozen = model.blocks[0].mlp.up.weight
    before = frozen.clone()
    muon = min_Muon.Muon([*matrices, frozen], lr=0.1)
    muon.step()
    assert torch.equal(frozen, before) and frozen.grad is None and frozen not in muon.state
    with pytest.raises(ValueError, match="the matrices have several types"):
        min_Muon.Muon([matrices[0], torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))], lr=0.1)


def test_what_no_shape_shows_must_not_change(tmp_path):
    path = str(tmp_path / "snapshot.pt")

    def run(**changes):
        args = {"steps": 2, "layers": 1, "snapshot_path": path, **changes}
        return min_Muon.main_worker(0, 1, arguments(**args))

    run()
    for changes, line in (
        ({"heads": 1}, "--heads 3, not 1"),
        ({"seed": 5}, f"--seed {arguments().seed}, not 5"),
        ({"muon_lr": 0.5}, f"--muon-lr {arguments().muon_lr}, not 0.5"),
    ):
        assert exit_message(run, steps=3, **changes).startswith(f"{path} was saved with {line}: use the same")


def test_it_saves_with_each_line_of_progress(tmp_path):
    args = arguments(steps=5, layers=1, log_every=2, snapshot_path=str(tmp_path / "snapshot.pt"))
    assert transformer.saves_of(min_Muon, args) == [2, 4, 5]


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


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("layers", [1, 2, 12])
def test_whole_matrices_are_dealt_evenly(world_size, layers):
    with torch.device("meta"):
        matrices, rest = min_Muon.split_params(gpt.GPT(layers, 32, 4, 16))
    parts = min_Muon.deal(matrices, world_size)
    dealt = [matrix for part in parts for matrix in part]
    assert len(parts) == world_size and len(dealt) == len(matrices) and set(dealt) == set(matrices)
    sizes = [sum(matrix.numel() for matrix in part) for part in parts]
    largest = max(matrix.numel() for matrix in matrices)
    assert max(sizes) <= sum(sizes) / world_size + largest
    assert max(sizes) - min(sizes) <= largest
    if (layers, world_size) == (2, 3):
        assert max(sizes) == min(sizes), "the largest must be dealt first"
    assert len(matrices) == 4 * layers and len(rest) == 8 * layers + 5


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
    message, stderr = main_of("min_Muon.py", "--snapshot-path", str(tmp_path / "file" / "run.pt"))
    assert message.startswith("--snapshot-path: cannot write to ") and message.count("\n") == 0 and stderr == ""


def test_the_defaults_fit_any_number_of_processes(monkeypatch):
    for nprocs in (*range(1, 9), 16):
        monkeypatch.setattr(sys, "argv", ["min_Muon.py", "--nproc", str(nprocs)])
        args = min_Muon.parse_args()
        assert args.global_batch_size % nprocs == 0 and 16 <= args.global_batch_size < 16 + nprocs


@pytest.mark.slow
def test_the_script_prints_what_it_holds_and_resumes_however_it_is_started(tmp_path):
    options = ("--clip", 1, "--global-batch-size", 2, "--snapshot-path", tmp_path / "run.pt")
    env = {"OMP_NUM_THREADS": "1"}  # or torchrun says that it sets it
    outputs = []
    for start, command, steps in ((torchrun, (2, "min_Muon.py"), 2), (run, ("min_Muon.py", "--nproc", 2), 4)):
        status, stdout, stderr = start(*command, "--steps", steps, *options, env=env)
        assert (status, stderr) == (0, "")
        outputs.append(stdout)
        assert stdout.splitlines()[-1] == "momentum held: 786,432 of 1,572,864 bytes (0.500)"
    assert [line["step"] for output in outputs for line in transformer.progress_lines(output)] == [2, 4]
    assert ["Resuming at step 2\n" in output for output in outputs] == [False, True]
