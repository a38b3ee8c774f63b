"""min_CP.py: activations are split.

test_equal.py has what all scripts that train the GPT promise.
"""

import pytest
import torch
import transformer
from conftest import slow

import distributed as dist
import gpt
import min_CP


def saved_bytes(kind):
    """That a loss on one sequence of 2048 bytes saves in this process for its backward, parameters aside."""
    args = transformer.arguments(layers=2, width=64, length=2048)
    model = transformer.make_model(args).float()
    if kind == "plain":
        return transformer.saved_bytes(gpt.model_loss, model, args)
    return transformer.saved_bytes(min_CP.local_loss, min_CP.parallelize(model, kind), args)


@pytest.fixture(scope="module")
def plain_saved_bytes():
    return saved_bytes("plain")


def test_a_length_that_the_ranks_cannot_share_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    rows = torch.zeros(1, 5, dtype=torch.long)
    with pytest.raises(dist.DistributedError, match=r"^5 is not a multiple of 2, the number of equal shares$"):
        min_CP.local_loss(None, rows, rows)


@pytest.mark.parametrize("nprocs", [2, *slow(4)])
def test_activations_are_split(nprocs, tmp_path, plain_saved_bytes):
    ranks = transformer.train_on(nprocs, saved_bytes, [("ulysses",), ("all-gather",)], tmp_path)
    ulysses, all_gather = zip(*ranks, strict=True)
    assert max(ulysses) <= {2: 0.55, 4: 0.3}[nprocs] * plain_saved_bytes
    assert min(all_gather) >= max(ulysses) > 1e6, "its keys and values are not split"
