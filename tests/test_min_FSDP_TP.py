"""min_FSDP_TP.py: what is computed again is not kept.

test_equal.py has what all scripts that train the GPT promise.
"""

import torch
import transformer

import distributed as dist
import gpt
import min_FSDP_TP


def test_a_block_that_is_computed_again_keeps_only_its_input():
    dist.init_process_group(even_alone=True)
    kept = {}
    for again in (False, True):
        args = transformer.arguments(recompute=again, replicate=1, shard=1, tensor=1)
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
