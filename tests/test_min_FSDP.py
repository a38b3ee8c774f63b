"""min_FSDP.py: each block is gathered by itself, in bfloat16 if asked for, and only rank 0 holds the whole model.

test_equal.py has what all scripts that train the GPT promise.
"""

import resource

import pytest
import torch
import transformer
from conftest import Watch, on_processes
from torch.distributed.tensor import DTensor

import distributed as dist
import gpt
import min_FSDP

BLOCKS = 2
OPTIONS = {"layers": BLOCKS, "checkpoint_dir": None, "save_every": 100}


@on_processes(2)
@pytest.mark.parametrize("bf16", [False, True])
def test_each_block_is_gathered_by_itself_and_freed_and_may_compute_in_bfloat16(bf16):
    args = transformer.arguments(dist.get_world_size(), **OPTIONS)
    plain = transformer.make_model(args)
    block = sum(param.numel() for param in plain.blocks[0].parameters())
    rest = sum(param.numel() for param in plain.parameters()) - BLOCKS * block
    model = min_FSDP.make_sharded_model(args, bf16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    whole, computed = [], set()

    def note_whole(gradient=None):
        whole.append(sum(param.numel() for param in model.parameters() if not isinstance(param, DTensor)))

    def note(layer, inputs, output):
        note_whole()
        output.register_hook(note_whole)
        computed.update({layer.weight.dtype, inputs[0].dtype, output.dtype})

    for each in model.blocks:
        each.mlp.up.register_forward_hook(note)
    x, y = transformer.small_data(args).batch(0)
    with Watch() as watch:
        loss = gpt.loss_fn(model(x), y)
        loss.backward()
    optimizer.step()

    assert whole == 2 * BLOCKS * [rest + block], "in forward and in backward"
    gathered = [n for kind, _, n in watch.collectives if kind == "gather"]
    reduced = [n for kind, _, n in watch.collectives if kind == "reduce"]
    assert (gathered, reduced) == ([rest, *(2 * BLOCKS * [block])], [*(BLOCKS * [block]), rest])
    low = torch.bfloat16 if bf16 else torch.float32
    assert computed == {low} and set(watch.types_of("gather")) == {str(low)}
    assert loss.dtype == torch.float32 and set(watch.types_of("reduce")) == {"torch.float32"}
    kept = [*model.parameters(), *(param.grad for param in model.parameters())]
    kept += [value for state in optimizer.state.values() for value in state.values()]
    assert all(tensor.dtype == torch.float32 for tensor in kept)
    assert all(isinstance(tensor, DTensor) for tensor in kept if tensor.dim())


@on_processes(2)
def test_all_ranks_start_from_rank_0s_weights():
    model = min_FSDP.make_sharded_model(transformer.arguments(**OPTIONS, seed=dist.get_rank()))
    expected = transformer.make_model(transformer.arguments(**OPTIONS, seed=0)).state_dict()
    for name, param in transformer.full_parameters(model).items():
        assert torch.equal(param, expected[name]), name


def peak_worker(local_rank, world_size):
    """How far the peak of resident memory rises while the model is made, as a part of the model's bytes."""
    dist.init_process_group()
    min_FSDP.make_sharded_model(transformer.arguments(**OPTIONS))  # imports, and memory that is allocated once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = min_FSDP.make_sharded_model(transformer.arguments(width=1024, **{**OPTIONS, "layers": 4}))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    whole = 4 * sum(param.numel() for param in model.parameters())
    return dist.gather_objects(1024 * (after - before) / whole)


def test_no_rank_but_rank_0_ever_holds_the_whole_model():
    """The model has 203 MB, and its largest tensor 17 MB.

    Rank 1 holds its shard and a few tensors at a time: 0.65 to 0.85 of the model. Rank 0 holds the model as well.
    """
    first, second = dist.launch(peak_worker, nprocs=2)
    assert second < 0.95, "half of the model, and a few tensors that are sent"
    assert first < 1.95, "the model too, which is 1 more than what the others may hold"
