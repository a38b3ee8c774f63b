"""min_FSDP_TP.py: what is computed again is not kept.

test_equal.py has what all scripts that train the GPT promise.
"""

import transformer
from conftest import on_processes

import gpt
import min_FSDP_TP


@on_processes(1)
def test_a_block_that_is_computed_again_keeps_only_its_input():
    kept = {}
    for again in (False, True):
        args = transformer.arguments(length=512, recompute=again, replicate=1, shard=1, tensor=1)
        model = transformer.make_model(args)
        min_FSDP_TP.parallelize(model, args)
        kept[again] = transformer.saved_bytes(gpt.model_loss, model, args)
    features = 4 * args.length * args.width  # bytes, of one sequence
    assert kept[True] < kept[False] - args.layers * 10 * features
