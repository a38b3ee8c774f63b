"""min_PP.py: a process holds its stages alone, and computes one micro-batch after the other.

test_equal.py has what all scripts that train the GPT promise.
"""

import gc

import pytest
import torch
import transformer
from conftest import on_processes
from torch import nn

import distributed as dist
import gpt
import min_PP

V_SHAPED = "ZBVZeroBubble" if torch.__version__ >= "2.12" else "InterleavedZeroBubble"


@on_processes(2)
@pytest.mark.parametrize("schedule", ["GPipe", V_SHAPED])
def test_a_process_holds_only_its_stages_and_logits_of_a_micro_batch(schedule):
    args = transformer.arguments(dist.get_world_size(), schedule=schedule, micro_batches=4)
    gc.collect()
    before = [each for each in gc.get_objects() if isinstance(each, nn.Parameter)]
    others = {id(each) for each in before}
    model = gpt.make_meta_model(gpt.Config.from_args(args))
    pipeline = min_PP.make_pipeline(model, args)
    gc.collect()
    alive = [each for each in gc.get_objects() if isinstance(each, nn.Parameter) and id(each) not in others]
    held = {id(param) for param in model.parameters()}
    assert {id(each) for each in alive if not each.is_meta} == held

    rows = set()
    if model.head is not None:
        model.head.register_forward_hook(lambda layer, inputs, logits: rows.add(len(logits)))
    pipeline.step(*transformer.small_data(args, (0, 1)).batch(0))
    assert rows == ({args.global_batch_size // 4} if model.head is not None else set())
