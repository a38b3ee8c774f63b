"""min_PP_FSDP_TP.py: one gather and one reduction per step, and meshes that fit.

test_equal.py has what all scripts that train the GPT promise.
"""

import math
import sys

import pytest
import transformer
from conftest import Watch, guards, slow

import min_PP_FSDP_TP

PP_FSDP, FSDP_TP, ALL = (2, 2, 1), (1, 2, 2), (2, 2, 2)
INTERLEAVED = {"schedule": "Interleaved1F1B"}
TWO_BLOCKS = {"layers": 2}
MICRO_BATCHES = 4


def arguments(mesh, **changes):
    """As parse_args would give them on stages x shard x tensor processes."""
    stages, shard, tensor = mesh
    layout = {"stages": stages, "shard": shard, "tensor": tensor, "nproc": stages * shard * tensor}
    options = {"schedule": "1F1B", "micro_batches": MICRO_BATCHES, "checkpoint_dir": None, "save_every": 100}
    return transformer.arguments(**{**layout, **options, "log_every": 4, **changes})


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
