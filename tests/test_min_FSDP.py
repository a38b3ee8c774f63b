"""min_FSDP.py: sharded from the start, and each block gathered by itself, in bfloat16 if asked for.

test_equal.py has what all scripts that train the GPT promise.
"""

import resource
import sys

import pytest
import torch
import transformer
from conftest import Watch
from torch.distributed.tensor import DTensor

import distributed as dist
import gpt
import min_FSDP

BLOCKS = 2
OPTIONS = {"layers": BLOCKS, "checkpoint_dir": None, "save_every": 100, "log_every": 4}


# ---- what is sent, gathered and held ------------------------------------------------------------------------------


def unsharded(model):
    """How many parameters are whole on this rank at this moment."""
    return sum(param.numel() for param in model.parameters() if not isinstance(param, DTensor))


def look_inside(bf16):
    """One step, looked at: collectives, whole parameters and types within forward and backward."""
    torch.set_default_dtype(torch.float32)
    args = transformer.arguments(dist.get_world_size(), **OPTIONS)
    torch.manual_seed(args.seed)
    model = min_FSDP.make_sharded_model(args, bf16)
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
    """The weights with which ranks start that would draw different ones."""
    args = transformer.arguments(**OPTIONS, seed=dist.get_rank())
    return transformer.full_parameters(min_FSDP.make_sharded_model(args))


def call(name, *args):
    return globals()[name](*args)


@pytest.fixture(scope="module")
def looks(tmp_path_factory):
    """What rank 0 sees of a step in float32, of a step in bfloat16, and of the weights at the start."""
    cases = [("look_inside", False), ("look_inside", True), ("start_weights",)]
    return transformer.train_on(2, call, cases, tmp_path_factory.mktemp("job"))[0]


@pytest.mark.guard
@pytest.mark.slow
def test_all_ranks_start_from_rank_0s_weights(looks):
    *_, weights = looks
    with transformer.float64():
        expected = dict(transformer.make_model(transformer.arguments(**OPTIONS, seed=0)).named_parameters())
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


@pytest.mark.guard
@pytest.mark.slow
def test_each_block_is_gathered_by_itself_and_freed(looks):
    plain, *_ = looks
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
def test_mixed_precision_gathers_and_computes_in_bfloat16_and_keeps_float32(looks):
    _, mixed, _ = looks
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
