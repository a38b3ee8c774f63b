"""min_FSDP_TP.py: on any mesh equal to one process, and from mesh to mesh by its checkpoints."""

import pytest
import torch
import transformer
from conftest import guards
from torch.distributed.tensor import DTensor

import gpt
import min_FSDP_TP

HSDP = (2, 2, 1)
FSDP_TP = (1, 2, 2)
CLIP = 0.5
SMALL = {"layers": 1}
TWO_BLOCKS = {"layers": 2}


def train(mesh, optimizer, changes):
    """Losses, and whole parameters by name, of the script's main_worker on replicate x shard x tensor processes."""
    replicate, shard, tensor = mesh
    layout = {"replicate": replicate, "shard": shard, "tensor": tensor, "nproc": replicate * shard * tensor}
    options = {"recompute": False, "checkpoint_dir": None, "save_every": 100, "log_every": 4}
    args = transformer.arguments(**{**layout, **options, **SMALL, **changes})
    result = transformer.run_main_worker(min_FSDP_TP, args, optimizer)
    if layout["nproc"] > 1:
        sharded = [param for param in result.model.parameters() if isinstance(param, DTensor)]  # some may be gathered
        dims = {name for param in sharded for name in param.device_mesh.mesh_dim_names}
        assert sharded
        assert ("replicate" in dims) == (replicate > 1), "gradients of one replica are reduced over a group of one"
    return result.losses, transformer.full_parameters(result.model)


def check(losses, parameters, mesh, optimizer, changes):
    """That they are what one process of plain PyTorch gives."""
    alike = {name: changes[name] for name in ("clip", "global_batch_size", "layers") if name in changes}
    print(mesh, optimizer, changes)
    sizes_and_options = {**SMALL, **alike}
    transformer.assert_equal(losses, parameters, transformer.reference(optimizer, **sizes_and_options))


def check_all(folder, nprocs, cases):
    """The same for case after case, in one job of `nprocs` processes."""
    for case, result in zip(cases, transformer.train_on(nprocs, train, cases, folder)[0], strict=True):
        check(*result, *case)


@pytest.mark.parametrize("nprocs", [2, *guards(1)])
def test_a_point_or_a_line_of_processes_gives_what_one_process_gives(tmp_path, nprocs):
    meshes = [(1, 1, 1)] if nprocs == 1 else [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
    check_all(tmp_path, nprocs, [(mesh, "SGD", {"clip": CLIP}) for mesh in meshes])


@pytest.mark.guard
@pytest.mark.slow
def test_two_dimensions_give_what_one_process_gives(tmp_path):
    cases = [
        (HSDP, "AdamW", TWO_BLOCKS),
        (HSDP, "SGD", {**TWO_BLOCKS, "clip": CLIP}),
        (FSDP_TP, "AdamW", {**TWO_BLOCKS, "clip": CLIP}),
        (FSDP_TP, "SGD", TWO_BLOCKS),
        (FSDP_TP, "SGD", {**TWO_BLOCKS, "clip": CLIP, "recompute": True}),
    ]
    check_all(tmp_path, 4, cases)


def test_it_saves_every_so_many_steps_and_at_the_end(tmp_path):
    layout = {"replicate": 1, "shard": 1, "tensor": 1, "recompute": False}
    args = transformer.arguments(**layout, steps=5, save_every=2, checkpoint_dir=str(tmp_path))
    assert transformer.saves_of(min_FSDP_TP, args) == [2, 4, 5]


def test_a_block_that_is_computed_again_keeps_only_its_input():
    kept = {}
    for again in (False, True):
        args = transformer.arguments(recompute=again)
        model = transformer.make_model(args)
        min_FSDP_TP.parallelize(model, args)
        x, y = gpt.batch(transformer.small_text()[0], 0, args.global_batch_size, args.length)
        sizes = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, s=sizes: s.update({t.data_ptr(): t.nbytes}) or t, lambda t: t
        ):
            gpt.loss_fn(model(x), y)
        kept[again] = sum(sizes.values())
    features = 4 * args.global_batch_size * args.length * args.width
    assert kept[True] < kept[False] - args.layers * 10 * features


@pytest.mark.slow
def test_three_dimensions_and_uneven_ones_give_what_one_process_gives(tmp_path):
    everything = {**TWO_BLOCKS, "clip": CLIP, "recompute": True}
    check_all(tmp_path, 8, [((2, 2, 2), name, everything) for name in ("AdamW", "SGD")])
    # 32 features are no multiple of 3, and 256 bytes none of 3 or 6.
    check_all(tmp_path, 6, [((1, 3, 2), "SGD", {**TWO_BLOCKS, "clip": CLIP, "global_batch_size": 6})])


# ---- checkpoints --------------------------------------------------------------------------------------------------

MESHES = [FSDP_TP, HSDP]


@pytest.mark.guard
@pytest.mark.slow
def test_a_run_goes_from_mesh_to_mesh_and_from_and_to_one_process_as_if_it_had_not_stopped(tmp_path):
    options = {"checkpoint_dir": f"{tmp_path}/runs", "clip": CLIP}
    cases = [(mesh, "AdamW", {**options, "steps": number + 2}) for number, mesh in enumerate(MESHES)]
    with transformer.float64():
        first, _ = train((1, 1, 1), "AdamW", {**options, "steps": 1})
        between = [losses for losses, _ in transformer.train_on(4, train, cases, tmp_path)[0]]
        last, parameters = train((1, 1, 1), "AdamW", {**options, "save_every": 1})
    check(torch.cat([first, *between, last]), parameters, MESHES, "AdamW", options)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {f"step-{step}" for step in range(1, 7)}
