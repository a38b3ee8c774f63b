"""min_CP.py: activations are split.

test_equal.py has what all scripts that train the GPT promise.
"""

import transformer
from conftest import on_processes, slow

import distributed as dist
import gpt
import min_CP


@on_processes(2, *slow(4))
def test_activations_are_split():
    args = transformer.arguments(layers=2, width=64, length=2048)
    plain = transformer.saved_bytes(gpt.model_loss, transformer.make_model(args), args)
    saved = {}
    for kind in ("ulysses", "all-gather"):
        model = min_CP.parallelize(transformer.make_model(args), kind)
        saved[kind] = transformer.saved_bytes(min_CP.local_loss, model, args)
    assert saved["ulysses"] <= {2: 0.55, 4: 0.3}[dist.get_world_size()] * plain
    assert saved["all-gather"] >= saved["ulysses"] > 1e6, "its keys and values are not split"
