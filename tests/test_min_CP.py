"""min_CP.py: equal to one process, and activations split for real."""

import pytest
import torch
import transformer
from conftest import slow

import distributed as dist
import min_CP

CASES = [(kind, *how) for kind in min_CP.ATTENTIONS for how in (("AdamW", None), ("SGD", 1.5))]
SMALL = {"layers": 2, "log_every": 100}


def train(kind, optimizer, clip):
    """Losses and parameters of the script's main_worker, and what a loss on a long sequence saves for its backward."""
    args = transformer.arguments(clip=clip, attention=kind, **SMALL)
    result = transformer.run_main_worker(min_CP, args, optimizer)
    saved = saved_bytes(kind) if optimizer == "AdamW" else None
    return result.losses, transformer.full_parameters(result.model), saved


def saved_bytes(kind):
    """That a loss on one sequence of 2048 bytes saves in this process for its backward, parameters aside."""
    args = transformer.arguments(layers=2, width=64, length=2048)
    model = min_CP.parallelize(transformer.make_model(args).float(), kind)
    return transformer.saved_bytes(min_CP.local_loss, model, args)


@pytest.fixture(scope="module")
def plain_saved_bytes():
    return saved_bytes("ulysses")


def test_a_length_that_the_ranks_cannot_share_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    rows = torch.zeros(1, 5, dtype=torch.long)
    with pytest.raises(dist.DistributedError, match=r"^5 is not a multiple of 2, the number of equal shares$"):
        min_CP.local_loss(None, rows, rows)


@pytest.mark.parametrize("nprocs", [2, *slow(1, 4)])
def test_equal_to_one_process_and_activations_split(nprocs, tmp_path, plain_saved_bytes):
    cases = CASES if nprocs > 1 else CASES[:2]  # one process has the attention of the model
    ranks = transformer.train_on(nprocs, train, cases, tmp_path)
    for (_, optimizer, clip), (losses, parameters, _) in zip(cases, ranks[-1], strict=True):
        transformer.assert_equal(losses, parameters, transformer.reference(optimizer, clip=clip, **SMALL))
    if nprocs > 1:
        ulysses, all_gather = ([results[i][2] for results in ranks] for i in (0, 2))
        assert max(ulysses) <= {2: 0.55, 4: 0.3}[nprocs] * plain_saved_bytes
        assert min(all_gather) >= max(ulysses) > 1e6, "its keys and values are not split"
