"""min_DiLoCo.py: all start from rank 0's weights, and when it equals DDP.

test_equal.py has what all scripts that train the GPT promise.
"""

import references
import torch
import transformer
from conftest import on_processes

import distributed as dist
import min_DiLoCo


@on_processes(2)
def test_all_start_from_rank_0s_weights():
    model = transformer.make_model(transformer.arguments(layers=1))
    initial = transformer.full_parameters(model)
    with torch.no_grad():
        for param in model.parameters():
            param += dist.get_rank()
    min_DiLoCo.Outer(model, 0.7, 0.9)
    assert all(torch.equal(param, initial[name]) for name, param in model.named_parameters())


def test_averaged_after_each_step_sgd_is_ddp_and_adamw_is_not():
    """The mean of SGD's steps is the step along the mean gradient."""
    args = transformer.arguments(2, layers=1, steps=14, sync_every=1, outer_momentum=0.0, outer_lr=1.0)
    losses, parameters = references.copies("SGD", args)
    transformer.assert_equal(losses, parameters, transformer.reference("SGD", layers=1, steps=14), 1e-12)
    losses, _ = references.copies("AdamW", args)
    assert (losses - transformer.reference("AdamW", layers=1, steps=14)[0]).abs().max() > 1e-3
