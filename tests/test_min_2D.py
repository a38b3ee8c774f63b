import re

import pytest
import torch
import transformer
from conftest import run, torchrun

import distributed as dist
import gpt
import min_2D

HSDP, FSDP_TP, CLIP = (2, 2, 1), (1, 2, 2), 0.5


def trained(mesh, optimizer="AdamW", **changes):
    """Losses, and whole parameters by name, of the script's own training on replicate x shard x tensor processes."""
    replicate, shard, tensor = mesh
    layout = {"replicate": replicate, "shard": shard, "tensor": tensor, "nproc": replicate * shard * tensor}
    options = {"checkpoint_activations": False, "checkpoint_dir": None, "save_every": 100, "log_every": 20, "layers": 2}
    args = transformer.arguments(**{**layout, **options, **changes})
    with transformer.float64():
        model = min_2D.parallelize(transformer.make_model(args), args)
        optimizer = transformer.make_optimizer(optimizer, model.parameters(), args.lr)
        losses = min_2D.train(model, optimizer, *transformer.small_text(), args)
        return losses, transformer.full_parameters(model)


def train_all(local_rank, world_size, folder, cases):
    dist.init_process_group()
    for number, (mesh, optimizer, changes) in enumerate(cases):
        result = trained(mesh, optimizer, **changes)
        if dist.is_primary():
            torch.save(result, f"{folder}/{number}.pt")


def check(losses, parameters, mesh, optimizer, changes):
    """That the last steps' losses, and the parameters, are what one process of plain PyTorch gives in one go."""
    batches = {name: changes[name] for name in ("clip", "batch_size") if name in changes}
    expected_losses, expected = transformer.reference(optimizer, layers=2, **batches)
    try:
        transformer.assert_equal(losses, parameters, (expected_losses[-len(losses) :], expected))
    except AssertionError as error:
        raise AssertionError(f"{mesh} {optimizer} {changes}: {error}") from None


def check_all(folder, nprocs, cases):
    """The same for case after case, in one job of `nprocs` processes."""
    dist.launch(train_all, str(folder), cases, nprocs=nprocs)
    for number, case in enumerate(cases):
        losses, parameters = torch.load(folder / f"{number}.pt", weights_only=True)
        assert len(losses) == 20
        check(losses, parameters, *case)


@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_point_or_a_line_of_processes_gives_what_one_process_gives(tmp_path, nprocs):
    meshes = [(1, 1, 1)] if nprocs == 1 else [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
    check_all(tmp_path, nprocs, [(mesh, "SGD", {"clip": CLIP}) for mesh in meshes])


def test_two_dimensions_give_what_one_process_gives(tmp_path):
    cases = [
        (HSDP, "AdamW", {}),
        (HSDP, "SGD", {"clip": CLIP}),
        (FSDP_TP, "AdamW", {"clip": CLIP}),
        (FSDP_TP, "SGD", {"clip": CLIP, "checkpoint_activations": True}),
    ]
    check_all(tmp_path, 4, cases)


def test_a_block_that_is_computed_again_keeps_only_its_input():
    kept = {}
    for again in (False, True):
        args = transformer.arguments(checkpoint_activations=again)
        model = min_2D.parallelize(transformer.make_model(args), args)
        x, y = gpt.batch(transformer.small_text()[0], 0, args.batch_size, args.length)
        sizes = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, s=sizes: s.update({t.data_ptr(): t.nbytes}) or t, lambda t: t
        ):
            gpt.loss_fn(model(x), y)
        kept[again] = sum(sizes.values())
    features = 4 * args.batch_size * args.length * args.width
    assert kept[True] < kept[False] - args.layers * 10 * features


@pytest.mark.slow
def test_three_dimensions_and_uneven_ones_give_what_one_process_gives(tmp_path):
    everything = {"clip": CLIP, "checkpoint_activations": True}
    check_all(tmp_path, 8, [((2, 2, 2), name, everything) for name in ("AdamW", "SGD")])
    # 32 features are no multiple of 3, and 256 bytes none of 3 or 6.
    check_all(tmp_path, 6, [((1, 3, 2), "SGD", {"clip": CLIP, "batch_size": 6})])


# ---- checkpoints --------------------------------------------------------------------------------------------------

MESHES = [FSDP_TP, HSDP, FSDP_TP]


def train_on(local_rank, world_size, folder):
    dist.init_process_group()
    for number, mesh in enumerate(MESHES):
        losses, _ = trained(mesh, checkpoint_dir=f"{folder}/runs", steps=4 * (number + 2), clip=CLIP)
        if dist.is_primary():
            torch.save(losses, f"{folder}/{number}.pt")


def test_a_run_goes_from_mesh_to_mesh_and_from_and_to_one_process_as_if_it_had_not_stopped(tmp_path):
    options = {"checkpoint_dir": f"{tmp_path}/runs", "clip": CLIP}
    first, _ = trained((1, 1, 1), steps=4, **options)
    dist.launch(train_on, str(tmp_path), nprocs=4)
    last, parameters = trained((1, 1, 1), save_every=2, **options)
    between = [torch.load(tmp_path / f"{number}.pt", weights_only=True) for number in range(len(MESHES))]
    check(torch.cat([first, *between, last]), parameters, MESHES, "AdamW", options)
    saved = {4, 8, 12, 16, 18, 20}
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {f"epoch-{step}" for step in saved}


# ---- command line -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_holds_a_quarter_and_goes_on_under_torchrun_on_another_mesh(tmp_path):
    options = ("--checkpoint-dir", tmp_path / "runs", "--batch-size", 4)
    status, stdout, stderr = run("min_2D.py", "--nproc", 4, "--tensor", 2, "--steps", 2, *options)
    assert (status, stderr) == (0, "")
    mesh, held, step = stdout.splitlines()
    assert mesh == "Training on 4 x cpu: replicate 1 x shard 2 x tensor 2"
    held, total = re.fullmatch(r"parameters held: ([\d,]+) of ([\d,]+) \(0.25\d\)", held).groups()
    assert int(held.replace(",", "")) <= 0.26 * int(total.replace(",", ""))
    assert step.startswith("step 2 | loss 5.")
    status, stdout, stderr = torchrun(2, "min_2D.py", "--replicate", 2, "--steps", 4, *options)
    assert status == 0, stderr
    mesh, held, going_on, step = stdout.splitlines()
    assert mesh == "Training on 2 x cpu: replicate 2 x shard 1 x tensor 1"
    assert held.endswith("(1.000)")
    assert going_on == f"Going on from {tmp_path}/runs/epoch-2"
    assert step.startswith("step 4 | loss ")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 1), (1, 2), (1, 1)])
def test_it_learns_with_its_defaults(mesh):
    status, stdout, stderr = run("min_2D.py", "--nproc", 2, "--replicate", mesh[0], "--tensor", mesh[1], timeout=600)
    assert status == 0, stderr
    held_out, bigram = re.findall(r"held-out ([\d.]+) nats per byte \(bigram ([\d.]+)", stdout)[-1]
    assert float(held_out) < float(bigram)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--shard 0", "argument --shard: '0' is not a whole number of at least 1"),
        ("--save-every x", "argument --save-every: 'x' is not a whole number of at least 1"),
        (
            "--nproc 4 --replicate 2 --shard 4",
            "argument --shard: replicate 2 x shard 4 x tensor 1 is not the number of processes, 4",
        ),
        (
            "--nproc 3 --tensor 2",
            "argument --shard: replicate 1 x shard 1 x tensor 2 is not the number of processes, 3",
        ),
        (
            "--nproc 2 --tensor 4",
            "argument --shard: replicate 1 x shard 1 x tensor 4 is not the number of processes, 2",
        ),
        ("--nproc 3", "argument --batch-size: 16 is not a multiple of replicate x shard, 3"),
        ("--nproc 3 --tensor 3", "argument --heads: 4 is not a multiple of --tensor 3"),
        ("--nproc 2 --tensor 2 --length 31", "argument --length: 31 is not a multiple of --tensor 2"),
    ],
)
def test_bad_options_are_one_line(main_of, args, message):
    assert main_of("min_2D.py", *args.split()) == (2, f"min_2D.py: error: {message}\n")


def test_a_folder_that_cannot_be_written_is_one_line(main_of, tmp_path):
    (tmp_path / "file").touch()
    status, stderr = main_of("min_2D.py", "--checkpoint-dir", str(tmp_path / "file"))
    assert re.fullmatch(r"--checkpoint-dir: cannot write to .*/file: \w.*", f"{stderr}{status}".strip())
