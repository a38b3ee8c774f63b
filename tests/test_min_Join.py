"""min_Join.py: batches of any size, and how many each process has.

test_equal.py has what all scripts that train the GPT promise.
"""

import torch
import transformer

import distributed as dist
import gpt
import min_Join


def arguments(nprocs, method="join"):
    return transformer.arguments(nprocs, method=method, least=4, steps=10, layers=1)


def uneven_batches(rank):
    """Batches of a process that has as many, and as large ones, as no other: 4, 4 and 3 sequences, or 2."""
    sizes = [(4, 4, 3), (2,)][rank]
    return [gpt.batch(transformer.small_text()[0], 10 * rank + step, size, 32) for step, size in enumerate(sizes)]


def train_uneven():
    """Losses and parameters of train_with_weights on uneven batches, and what main_worker prints."""
    args = arguments(2)
    model = dist.prepare_ddp_model(transformer.make_model(args))
    optimizer = transformer.make_optimizer("SGD", model.parameters(), args.lr)
    sums = torch.zeros(3, 2)
    min_Join.train_with_weights(model, optimizer, uneven_batches(dist.get_rank()), sums, args.clip)
    sums = dist.all_reduce(sums)
    stdout = transformer.run_main_worker(min_Join, args, "SGD").stdout
    return sums[:, 0] / sums[:, 1], transformer.full_parameters(model), stdout


def test_weights_suit_batches_of_any_size(tmp_path):
    (losses, parameters, stdout), _ = [results[0] for results in transformer.train_on(2, train_uneven, [()], tmp_path)]
    assert stdout.startswith("batches of each process: [10, 4]\n")
    with transformer.float64():
        args = arguments(2)
        model = transformer.make_model(args)
        optimizer = transformer.make_optimizer("SGD", model.parameters(), args.lr)
        first, second = uneven_batches(0), uneven_batches(1)
        steps = [[torch.cat(pair) for pair in zip(first[0], second[0], strict=True)], *first[1:]]
        made = [transformer.take_step(model, optimizer, transformer.plain_loss(model, *batch))[0] for batch in steps]
        transformer.assert_equal(losses, parameters, (torch.stack(made), transformer.full_parameters(model)))


def test_processes_have_evenly_spaced_numbers_of_batches(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    for rank, number in enumerate([10, 7, 4]):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        assert min_Join.number_of_batches(arguments(3)) == number
