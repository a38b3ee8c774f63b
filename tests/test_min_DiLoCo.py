"""min_DiLoCo.py: all start from rank 0's weights.

test_equal.py has what all scripts that train the GPT promise.
"""

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
