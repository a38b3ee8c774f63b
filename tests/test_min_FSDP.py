"""min_FSDP.py: equal to one process, sharded for real from the start, resumed on another number of ranks."""

import resource
import sys
from unittest import mock

import pytest
import torch
import transformer
from conftest import Watch
from torch.distributed.tensor import DTensor

import distributed as dist
import gpt
import min_FSDP

CLIP = 0.5
BLOCKS = 2
OPTIONS = {"layers": BLOCKS, "checkpoint_dir": None, "save_every": 100, "log_every": 4}
CASES = [("AdamW", {}), ("SGD", {"clip": CLIP})]
SEGMENTS = [(1, 2), (4, 3), (2, 5), (1, 6)]  # ranks, and the step at which they stop: one run, resumed three times


def train(optimizer, changes):
    """Losses, whole parameters by name, and the output of the script's own main_worker."""
    args = transformer.arguments(dist.get_world_size(), **{**OPTIONS, **changes})
    result = transformer.run_main_worker(min_FSDP, args, optimizer)
    return result.losses, transformer.full_parameters(result.model), result.stdout


# ---- what is sent, gathered and held ------------------------------------------------------------------------------


def unsharded(model):
    """How many parameters are whole on this rank at this moment."""
    return sum(param.numel() for param in model.parameters() if not isinstance(param, DTensor))


def look_inside(bf16):
    """One step, looked at: collectives, whole parameters and types within forward and backward."""
    torch.set_default_dtype(torch.float32)
    args = transformer.arguments(dist.get_world_size(), **{**OPTIONS, "bf16": bf16})
    torch.manual_seed(args.seed)
    model = min_FSDP.make_sharded_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    seen = {"whole in forward": [], "whole in backward": [], "computed": set()}

    def note_backward(gradient):
        seen["whole in backward"].append(unsharded(model))

    def note_forward(module, inputs, output):
        seen["whole in forward"].append(unsharded(model))
        seen["computed"] |= {str(tensor.dtype) for tensor in (module.weight, *inputs, output)}
        output.register_hook(note_backward)

    for block in model.blocks:
        block.mlp.up.register_forward_hook(note_forward)
    share = (dist.get_rank(), dist.get_world_size())
    x, y = gpt.batch(transformer.small_text()[0], 0, args.global_batch_size, args.length, args.seed, share=share)
    with Watch() as forward:
        loss = gpt.loss_fn(model(x), y)
    with Watch() as backward:
        loss.backward()
    optimizer.step()
    kept = [*model.parameters(), *(param.grad for param in model.parameters())]
    for state in optimizer.state.values():
        kept.extend(state.values())
    torch.set_default_dtype(torch.float64)
    return {
        **seen,
        "forward": forward.collectives,
        "backward": backward.collectives,
        "computed": sorted(seen["computed"]),
        "loss": str(loss.dtype),
        "kept": sorted({str(tensor.dtype) for tensor in kept}),
        "all sharded": all(isinstance(tensor, DTensor) for tensor in kept if tensor.dim()),
    }


def start_weights():
    """The weights with which ranks start that draw different ones."""
    torch.manual_seed(100 + dist.get_rank())
    return transformer.full_parameters(min_FSDP.make_sharded_model(transformer.arguments(**OPTIONS)))


def host_reads():
    """How often two steps read a value from the device, as a print or an if would; and how often they reduce."""
    args = transformer.arguments(dist.get_world_size(), **{**OPTIONS, "clip": CLIP, "steps": 2})
    model = min_FSDP.make_sharded_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    data = transformer.small_data(args)
    with mock.patch("gpt.Progress"), Watch() as watch:
        min_FSDP.train(model, optimizer, data, args)
    return watch.host_reads, len(watch.types_of("reduce"))


# ---- all of it in one job of each number of ranks -----------------------------------------------------------------


def call(name, *args):
    return globals()[name](*args)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """By number of ranks, the results of `CASES` and of what else is tried there; and of each of `SEGMENTS`."""
    folder = tmp_path_factory.mktemp("jobs")
    results, segments = {}, []
    for nprocs, steps in SEGMENTS:
        resumed = {"clip": CLIP, "steps": steps, "save_every": 2, "checkpoint_dir": f"{folder}/runs"}
        cases = [("train", "AdamW", resumed)]
        if nprocs not in results:
            cases += [("train", *case) for case in CASES]
        if nprocs == 2:
            cases += [("look_inside", False), ("look_inside", True), ("start_weights",), ("host_reads",)]
        # In a single process `launch` trains in this one.
        segment, *results_of_cases = transformer.train_on(nprocs, call, cases, folder)[0]
        segments.append(segment)
        results.setdefault(nprocs, results_of_cases)
    saved = {path.name for path in (folder / "runs").iterdir()}
    return results, segments, saved


def assert_held(stdout, nprocs):
    held, total, _ = transformer.HELD.search(stdout).groups()
    held = int(held.replace(",", ""))
    total = int(total.replace(",", ""))
    assert total == sum(
        param.numel() for param in transformer.make_model(transformer.arguments(**OPTIONS)).parameters()
    )
    assert total / nprocs <= held <= 1.01 * total / nprocs


def test_two_processes_give_what_one_process_gives(tmp_path):
    optimizer, changes = CASES[1]
    losses, parameters, _ = transformer.train_on(2, train, [(optimizer, changes)], tmp_path)[0][0]
    transformer.assert_equal(losses, parameters, transformer.reference(optimizer, layers=BLOCKS, **changes))


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_it_gives_what_one_process_gives_and_holds_its_share(jobs, nprocs):
    for (optimizer, changes), (losses, parameters, stdout) in zip(CASES, jobs[0][nprocs], strict=False):
        transformer.assert_equal(losses, parameters, transformer.reference(optimizer, layers=BLOCKS, **changes))
        assert stdout.startswith(f"Training on {nprocs} x cpu\n")
        assert_held(stdout, nprocs)


@pytest.mark.slow
def test_it_gives_what_one_process_gives_where_nothing_divides_evenly(tmp_path):
    changes = {"global_batch_size": 6, "clip": CLIP}
    ((losses, parameters, _),) = transformer.train_on(3, train, [("SGD", changes)], tmp_path)[0]
    transformer.assert_equal(losses, parameters, transformer.reference("SGD", layers=BLOCKS, **changes))


@pytest.mark.guard
@pytest.mark.slow
def test_a_run_that_changes_its_number_of_ranks_equals_the_uninterrupted_one(jobs):
    _, segments, saved = jobs
    losses = torch.cat([losses for losses, *_ in segments])
    transformer.assert_equal(losses, segments[-1][1], transformer.reference("AdamW", layers=BLOCKS, clip=CLIP))
    assert saved == {f"step-{step}" for step in (2, 3, 4, 5, 6)}


def test_it_saves_every_so_many_steps_and_at_the_end(tmp_path):
    args = transformer.arguments(**{**OPTIONS, "steps": 5, "save_every": 2, "checkpoint_dir": str(tmp_path)})
    assert transformer.saves_of(min_FSDP, args) == [2, 4, 5]


@pytest.mark.guard
@pytest.mark.slow
def test_all_ranks_start_from_rank_0s_weights(jobs):
    *_, weights, _ = jobs[0][2]
    with transformer.float64():
        expected = dict(transformer.make_model(transformer.arguments(**OPTIONS, seed=100)).named_parameters())
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


@pytest.mark.guard
@pytest.mark.slow
def test_the_loop_never_waits_for_the_device(jobs):
    *_, (reads, reductions) = jobs[0][2]
    assert reads == 0
    assert reductions == 2 * (BLOCKS + 1), "each step reduces each block once, and the rest once"


@pytest.mark.guard
@pytest.mark.slow
def test_each_block_is_gathered_by_itself_and_freed(jobs):
    _, _, plain, *_ = jobs[0][2]
    model = transformer.make_model(transformer.arguments(**OPTIONS))
    block = sum(param.numel() for param in model.blocks[0].parameters())
    rest = sum(param.numel() for param in model.parameters()) - BLOCKS * block
    sent_whole = [("gather", "torch.float32", rest)] + BLOCKS * [("gather", "torch.float32", block)]
    assert plain["forward"] == sent_whole
    gathered = [n for kind, _, n in plain["backward"] if kind == "gather"]
    reduced = [n for kind, _, n in plain["backward"] if kind == "reduce"]
    assert (gathered, reduced) == (BLOCKS * [block], BLOCKS * [block] + [rest])  # at most 3 times the model is sent
    for direction in ("forward", "backward"):
        assert plain[f"whole in {direction}"] == BLOCKS * [rest + block], "the blocks before it are freed"
    assert plain["all sharded"]
    for types in ("computed", "kept"):
        assert plain[types] == ["torch.float32"]


@pytest.mark.guard
@pytest.mark.slow
def test_mixed_precision_gathers_and_computes_in_bfloat16_and_keeps_float32(jobs):
    _, _, _, mixed, *_ = jobs[0][2]
    gathered = {dtype for kind, dtype, _ in mixed["forward"] + mixed["backward"] if kind == "gather"}
    reduced = {dtype for kind, dtype, _ in mixed["forward"] + mixed["backward"] if kind == "reduce"}
    assert (gathered, reduced) == ({"torch.bfloat16"}, {"torch.float32"})
    assert mixed["computed"] == ["torch.bfloat16"]
    assert mixed["kept"] == ["torch.float32"] and mixed["loss"] == "torch.float32"
    assert mixed["all sharded"]


# ---- memory at the start ------------------------------------------------------------------------------------------


def peak_worker(local_rank, world_size):
    """How far the peak of resident memory rises while the model is made, in bytes."""
    dist.init_process_group()
    small = transformer.arguments(**OPTIONS)
    min_FSDP.make_sharded_model(small)  # imports, and memory that is allocated once
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = min_FSDP.make_sharded_model(transformer.arguments(width=1024, **{**OPTIONS, "layers": 4}))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    whole = 4 * sum(param.numel() for param in model.parameters())
    return dist.gather_objects(unit * (after - before) / whole)


def test_no_rank_but_rank_0_ever_holds_the_whole_model():
    """The model has 203 MB, and its largest tensor 17 MB.

    Rank 1 holds its shard and a few tensors at a time: 0.65 to 0.85 of the model. Rank 0 holds the model as well.
    """
    first, second = dist.launch(peak_worker, nprocs=2)
    assert second < 0.95, "half of the model, and a few tensors that are sent"
    assert first < 1.75, "the model too"


# ---- the command --------------------------------------------------------------------------------------------------
