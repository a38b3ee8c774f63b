"""min_PP_FSDP_TP.py: one gather and one reduction per step.

test_equal.py has what all scripts that train the GPT promise.
"""

import pytest
import transformer
from conftest import Watch, guards, on_processes, slow

import distributed as dist
import gpt
import min_PP_FSDP_TP

INTERLEAVED = {"schedule": "Interleaved1F1B"}


def count_collectives(mesh, **changes):
    """In the second step. The first one also learns the shapes that stages exchange."""
    stages, shard, tensor = mesh
    options = {"schedule": "1F1B", "micro_batches": 4, "stages": stages, "shard": shard, "tensor": tensor, **changes}
    args = transformer.arguments(dist.get_world_size(), **options)
    model = gpt.make_meta_model(gpt.Config.from_args(args))
    pipeline = min_PP_FSDP_TP.make_pipeline(model, args)
    data = transformer.small_data(args, (dist.get_rank() // tensor % shard, shard))
    pipeline.step(*data.batch(0))
    with Watch() as watch:
        pipeline.step(*data.batch(1))
    blocks = sum(len(stage.blocks) for stage in pipeline.stages.values())
    units = blocks + sum(stage.is_first or stage.is_last for stage in pipeline.stages.values())
    assert watch.counts["c10d._allgather_base_"] == watch.counts["c10d._reduce_scatter_base_"] == units
    if tensor > 1:  # the docstring's eight per block and micro-batch; embeddings and head have some too
        exchanges = watch.counts["_c10d_functional.all_gather_into_tensor"]
        exchanges += watch.counts["_c10d_functional.reduce_scatter_tensor"]
        assert 8 * blocks * args.micro_batches <= exchanges <= (8 * blocks + 8) * args.micro_batches


@on_processes(*guards(4))
@pytest.mark.parametrize("changes", [{"layers": 2}, {"layers": 2, "micro_batches": 2}, INTERLEAVED])
def test_parameters_are_gathered_once_and_gradients_reduced_once_per_step(changes):
    count_collectives((2, 2, 1), **changes)


@on_processes(*slow(4, 8))
def test_tensor_neighbours_exchange_activations_eight_times_per_block_and_micro_batch():
    count_collectives({4: (1, 2, 2), 8: (2, 2, 2)}[dist.get_world_size()], layers=2)
