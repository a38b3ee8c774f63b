"""min_PP_FSDP_TP.py: on any mesh equal to one process, one gather and one reduction per step, and from mesh to mesh."""

import math
import sys
from unittest import mock

import pytest
import torch
import transformer
from conftest import Watch, guards, slow
from torch.distributed.tensor import DTensor

import distributed as dist
import gpt
import min_FSDP_TP
import min_PP_FSDP_TP

PP_FSDP, PP_TP, FSDP_TP, ALL = (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)
INTERLEAVED = {"schedule": "Interleaved1F1B"}
CLIP = {"clip": 0.5}
TWO_BLOCKS = {"layers": 2}
MICRO_BATCHES = 4


def arguments(mesh, **changes):
    """As parse_args would give them on stages x shard x tensor processes."""
    stages, shard, tensor = mesh
    layout = {"stages": stages, "shard": shard, "tensor": tensor, "nproc": stages * shard * tensor}
    options = {"schedule": "1F1B", "micro_batches": MICRO_BATCHES, "checkpoint_dir": None, "save_every": 100}
    return transformer.arguments(**{**layout, **options, "log_every": 4, **changes})


def whole_parameters(pipeline):
    """By name, each whole, on every rank: all ranks must call it."""
    assert all(isinstance(param, DTensor) for param in pipeline.model.parameters()), "some are still gathered"
    own = transformer.full_parameters(pipeline.model)
    everyone = dist.gather_objects(own)
    stages, shard, tensor = pipeline.mesh.shape
    neighbours = shard * tensor
    for rank, theirs in enumerate(everyone):  # which hold the same stage
        first = everyone[rank - rank % neighbours]
        assert theirs.keys() == first.keys() and all(torch.equal(theirs[name], first[name]) for name in theirs)
    stages = everyone[::neighbours]
    assert sum(map(len, stages)) == len(set().union(*stages)), "each parameter in one stage"
    return {name: param for theirs in stages for name, param in theirs.items()}


def train(mesh, optimizer, changes):
    """Losses and whole parameters of the script's main_worker, and its held-out loss."""
    args = arguments(mesh, **changes)
    result = transformer.run_main_worker(min_PP_FSDP_TP, args, optimizer)
    batches = transformer.small_data(args, (result.model.mesh.get_local_rank("shard"), args.shard)).held_out_batches()[
        :2
    ]
    with torch.no_grad(), mock.patch.object(gpt, "loss_fn", wraps=gpt.loss_fn) as loss_fn:
        held_out = dist.reduce(torch.stack([result.model.evaluate(x, y) for x, y in batches]).mean()).item()
    rows = {len(call.args[0]) for call in loss_fn.call_args_list}  # of logits in memory
    assert rows <= {args.global_batch_size // args.shard // args.micro_batches}
    return result.losses, whole_parameters(result.model), held_out


def check(losses, parameters, mesh, optimizer, changes):
    """That they are what one process of plain PyTorch gives."""
    alike = {name: changes[name] for name in ("clip", "global_batch_size", "layers") if name in changes}
    print(mesh, optimizer, changes)
    transformer.assert_equal(losses, parameters, transformer.reference(optimizer, **alike))


def check_all(folder, nprocs, cases):
    """The same for case after case, in one job of `nprocs` processes."""
    for case, result in zip(cases, transformer.train_on(nprocs, train, cases, folder)[0], strict=True):
        losses, parameters, held_out = result
        check(losses, parameters, *case)
        args = arguments(case[0], **case[2])
        with transformer.float64(), torch.no_grad():
            model = transformer.make_model(args)
            model.load_state_dict(parameters)
            batches = transformer.small_data(args, (0, 1)).held_out_batches()[:2]
            expected = torch.stack([transformer.plain_loss(model, x, y) for x, y in batches]).mean().item()
        assert abs(held_out - expected) <= 1e-9


@pytest.mark.guard
@pytest.mark.slow
def test_one_process_gives_what_plain_pytorch_gives(tmp_path):
    cases = [((1, 1, 1), "SGD", {**CLIP, **TWO_BLOCKS})]
    if torch.__version__ >= "2.12":  # with two stages in a row on one process
        cases.append(((1, 1, 1), "SGD", {**INTERLEAVED, **CLIP}))
    check_all(tmp_path, 1, cases)


@pytest.mark.guard
@pytest.mark.slow
def test_stages_and_shards_give_what_one_process_gives(tmp_path):
    check_all(tmp_path, 4, [(PP_FSDP, "SGD", {**CLIP, **TWO_BLOCKS}), (PP_FSDP, "AdamW", INTERLEAVED)])


FOUR = [
    (PP_FSDP, "SGD", {}),  # not clipped, which would hide a wrong scale
    (PP_FSDP, "SGD", {**INTERLEAVED, **CLIP}),
    (PP_FSDP, "AdamW", CLIP),
    (PP_TP, "SGD", CLIP),
    (PP_TP, "AdamW", {**INTERLEAVED, **CLIP}),
    (FSDP_TP, "SGD", CLIP),
    (FSDP_TP, "AdamW", CLIP),
    ((4, 1, 1), "SGD", {**CLIP, "layers": 5}),  # three stages of one block and one of two
]
EIGHT = [(ALL, "SGD", CLIP), (ALL, "AdamW", CLIP), (ALL, "SGD", INTERLEAVED)]
EIGHT.append((ALL, "SGD", {**CLIP, "micro_batches": 2}))  # two sequences in each
SIX = [((2, 3, 1), "SGD", {**CLIP, "global_batch_size": 12})]  # 32 features are no multiple of 3


@pytest.mark.slow
@pytest.mark.parametrize("nprocs, cases", [(4, FOUR), (6, SIX), (8, EIGHT)])
def test_other_meshes_give_what_one_process_gives(nprocs, cases, tmp_path):
    check_all(tmp_path, nprocs, cases)


# ---- what is sent, and what is held ---------------------------------------------------------------------------------


def count_collectives(mesh, changes):
    """For each step the gathers and reductions of FSDP and of tensor parallelism, and how many FSDP must do."""
    steps = []

    def count_each_step(pipeline):
        step = pipeline.schedule.step

        def counted(*args, **kwargs):
            with Watch() as counter:
                step(*args, **kwargs)
            steps.append(dict(counter.counts))

        pipeline.schedule.step = counted

    args = arguments(mesh, steps=2, **changes)
    pipeline = transformer.run_main_worker(min_PP_FSDP_TP, args, "SGD", count_each_step).model
    blocks = sum(len(stage.blocks) for stage in pipeline.stages.values())
    units = blocks + sum(stage.is_first or stage.is_last for stage in pipeline.stages.values())
    return steps, blocks, units


@pytest.mark.parametrize("mesh", [*guards(PP_FSDP), *slow(FSDP_TP, ALL)])
def test_parameters_are_gathered_once_and_gradients_reduced_once_per_step(mesh, tmp_path):
    schedules = [TWO_BLOCKS, {**TWO_BLOCKS, "micro_batches": 2}]
    if mesh[0] > 1:
        schedules.append(INTERLEAVED)
    nprocs = math.prod(mesh)
    ranks = transformer.train_on(nprocs, count_collectives, [(mesh, changes) for changes in schedules], tmp_path)
    for changes, *results in zip(schedules, *ranks, strict=True):
        micro_batches = changes.get("micro_batches", MICRO_BATCHES)
        for steps, blocks, units in results:
            first, *later = steps
            print(mesh, changes, blocks, later)
            assert first["c10d._allgather_base_"] <= 2 * units, "once more, to learn the shapes that stages exchange"
            for counts in later:
                assert counts["c10d._allgather_base_"] == counts["c10d._reduce_scatter_base_"] == units
                if mesh[2] > 1:  # the docstring's eight per block and micro-batch; embeddings and head have some too
                    exchanges = counts["_c10d_functional.all_gather_into_tensor"]
                    exchanges += counts["_c10d_functional.reduce_scatter_tensor"]
                    assert 8 * blocks * micro_batches <= exchanges <= (8 * blocks + 8) * micro_batches


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def resume(script, mesh, changes):
    """Losses and whole parameters, as the script resumes and trains."""
    args = arguments(mesh, **changes)
    if script == "min_FSDP_TP":
        args.replicate, args.recompute = 1, False
        result = transformer.run_main_worker(min_FSDP_TP, args, "AdamW")
        return result.losses, transformer.full_parameters(result.model)
    result = transformer.run_main_worker(min_PP_FSDP_TP, args, "AdamW")
    return result.losses, whole_parameters(result.model)


QUICK_WAY = [(PP_FSDP, INTERLEAVED)]
LONG_WAY = [(PP_FSDP, {}), (PP_TP, INTERLEAVED), (FSDP_TP, {}), (PP_FSDP, {})]


@pytest.mark.parametrize("between", [*guards(QUICK_WAY), *slow(LONG_WAY)])
def test_a_run_goes_from_mesh_to_mesh_and_from_and_to_one_process_as_if_it_had_not_stopped(between, tmp_path):
    options = {"checkpoint_dir": f"{tmp_path}/runs", **CLIP}
    one = (1, 1, 1)
    total = len(between) + 5
    cases = []
    for number, (mesh, schedule) in enumerate(between):
        cases.append(("min_PP_FSDP_TP", mesh, {**options, **schedule, "steps": number + 3}))
    ((first, _),) = transformer.train_on(1, resume, [("min_PP_FSDP_TP", one, {**options, "steps": 2})], tmp_path)[0]
    middle = [losses for losses, _ in transformer.train_on(4, resume, cases, tmp_path)[0]]
    last = [("min_PP_FSDP_TP", one, {**options, "steps": total - 1})]
    last.append(("min_FSDP_TP", one, {**options, "steps": total}))  # it has a GPT of one piece
    (more, _), (rest, parameters) = transformer.train_on(1, resume, last, tmp_path)[0]
    losses = torch.cat([first, *middle, more, rest])
    transformer.assert_equal(losses, parameters, transformer.reference("AdamW", **CLIP, steps=total))
    saved = {*range(2, total - 2), total - 1, total}
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {f"step-{step}" for step in saved}


@pytest.mark.guard
@pytest.mark.slow
def test_it_saves_every_so_many_steps_and_at_the_end(tmp_path):
    args = arguments((1, 1, 1), steps=5, save_every=2, checkpoint_dir=str(tmp_path))
    assert transformer.saves_of(min_PP_FSDP_TP, args) == [2, 4, 5]


# ---- options and output ---------------------------------------------------------------------------------------------


def parse(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["min_PP_FSDP_TP.py", *map(str, options)])
    return min_PP_FSDP_TP.parse_args()


@pytest.mark.parametrize("nprocs", [*range(1, 9), 16])
def test_defaults_fit_any_number_of_processes(nprocs, monkeypatch):
    for given in [(), ("--stages", nprocs), ("--shard", nprocs), ("--tensor", nprocs), ("--stages", 1)]:
        args = parse(monkeypatch, "--nproc", nprocs, *given)
        assert args.stages * args.shard * args.tensor == nprocs
        assert args.layers >= args.stages and args.micro_batches >= args.stages
        assert args.global_batch_size % (args.micro_batches * args.shard) == 0
        assert args.heads % args.tensor == args.length % args.tensor == 0
    mesh = {1: (1, 1, 1), 2: (2, 1, 1), 3: (1, 3, 1), 4: (2, 1, 2), 6: (2, 3, 1), 8: (2, 2, 2), 16: (2, 4, 2)}
    args = parse(monkeypatch, "--nproc", nprocs)
    assert (args.stages, args.shard, args.tensor) == mesh.get(nprocs, (1, nprocs, 1))
    if args.stages > 1:
        args = parse(monkeypatch, "--nproc", nprocs, "--schedule", "Interleaved1F1B")
        assert args.layers >= 2 * args.stages and args.micro_batches % args.stages == 0


REFUSED = {
    "--nproc 8 --stages 3": "--nproc",
    "--nproc 4 --stages 2 --tensor 4": "--nproc",
    "--nproc 8 --stages 2 --shard 2 --tensor 1": "--nproc",
    "--nproc 4 --stages 4 --layers 3": "--layers",
    "--nproc 4 --stages 2 --layers 3 --schedule Interleaved1F1B": "--layers",
    "--nproc 4 --stages 4 --micro-batches 3": "--micro-batches",
    "--nproc 2 --schedule Interleaved1F1B --micro-batches 5": "--micro-batches",
    "--nproc 3 --tensor 3 --heads 4": "--heads",
    "--nproc 2 --tensor 2 --length 31": "--length",
    "--nproc 4 --shard 2 --micro-batches 4 --global-batch-size 12": "--global-batch-size",
}


def test_a_mistake_is_one_line(main_of):
    for typed, option in REFUSED.items():
        status, line = main_of("min_PP_FSDP_TP.py", *typed.split())
        assert status == 2 and line.startswith(
            f"min_PP_FSDP_TP.py: error: argument {option}: {typed.split(f'{option} ')[-1].split()[0]}"
        )
        assert line.count("\n") == 1
