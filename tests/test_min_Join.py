"""min_Join.py: batches of any size, and how many each process has.

test_equal.py has what all scripts that train the GPT promise.
"""

import pytest
import torch
import transformer
from conftest import float64, on_processes

import distributed as dist
import gpt
import min_Join


def uneven_batches(rank):
    """Batches of a process that has as many, and as large ones, as no other: 4, 4 and 3 sequences, or 2."""
    sizes = [(4, 4, 3), (2,)][rank]
    return [gpt.batch(transformer.small_text()[0], 10 * rank + step, size, 32) for step, size in enumerate(sizes)]


@on_processes(2)
@float64()
def test_weights_suit_batches_of_any_size():
    args = transformer.arguments(layers=1)
    model = dist.prepare_ddp_model(transformer.make_model(args))
    optimizer = transformer.make_optimizer("SGD", model.parameters(), args.lr)
    sums = torch.zeros(3, 2)
    min_Join.train_with_weights(model, optimizer, uneven_batches(dist.get_rank()), sums, args.clip)
    sums = dist.all_reduce(sums)

    alone = transformer.make_model(args)
    optimizer = transformer.make_optimizer("SGD", alone.parameters(), args.lr)
    first, second = uneven_batches(0), uneven_batches(1)
    steps = [[torch.cat(pair) for pair in zip(first[0], second[0], strict=True)], *first[1:]]
    made = [transformer.take_step(alone, optimizer, transformer.plain_loss(alone, *batch))[0] for batch in steps]
    expected = torch.stack(made), transformer.full_parameters(alone)
    transformer.assert_equal(sums[:, 0] / sums[:, 1], transformer.full_parameters(model), expected)


@pytest.mark.parametrize(("rank", "number"), [(0, 10), (1, 7), (2, 4)])
def test_processes_have_evenly_spaced_numbers_of_batches(rank, number, monkeypatch):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert min_Join.number_of_batches(transformer.arguments(3, least=4, steps=10)) == number
