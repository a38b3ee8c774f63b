"""Both ways train on all data of all ranks, and on nothing else, as one process does."""

import pytest
import torch
import transformer
from conftest import slow

import distributed as dist
import gpt
import min_Join

STEPS = 10
BATCH = {1: 8, 2: 8, 3: 9}
COUNTS = {(1, 4): [10], (2, 4): [10, 4], (2, 0): [10, 0], (3, 4): [10, 7, 4]}  # by processes and --least
CASES = [(method, *rest) for rest in (("AdamW", 4, None), ("SGD", 4, 0.5)) for method in ("join", "weights")]
MORE = [("join", "SGD", 0, None), ("weights", "SGD", 0, None)]
UNEVEN = [("uneven", "SGD")]


def arguments(nprocs, method="join", least=4, clip=None):
    sizes = {"steps": STEPS, "log_every": 4, "global_batch_size": BATCH[nprocs], "layers": 1}
    return transformer.arguments(nprocs, method=method, least=least, clip=clip, **sizes)


def reference(nprocs, optimizer, least, clip):
    """One process of plain PyTorch, on the parts of each batch that belong to a rank which still has data."""
    args = arguments(nprocs, clip=clip)

    def part_of(step, *batch):
        ranks = [rank for rank, count in enumerate(COUNTS[nprocs, least]) if step < count]
        return (torch.cat([part.chunk(nprocs)[rank] for rank in ranks]) for part in batch)

    with transformer.float64():
        model = transformer.make_model(args)
    return transformer.train_alone(model, optimizer, args, part_of=part_of)


def uneven_batches(rank):
    """Batches of a process that has as many, and as large ones, as no other: 4, 4 and 3 sequences, or 2."""
    sizes = [(4, 4, 3), (2,)][rank]
    return [gpt.batch(transformer.small_text()[0], 10 * rank + step, size, 32) for step, size in enumerate(sizes)]


def train(method, optimizer, least=4, clip=None):
    """Losses, parameters, and what was printed, of the script's main_worker."""
    args = arguments(dist.get_world_size(), method, least, clip)
    if method == "uneven":
        return train_uneven(optimizer, args)
    result = transformer.run_main_worker(min_Join, args, optimizer)
    return result.losses, transformer.full_parameters(result.model), result.stdout


def train_uneven(optimizer, args):
    """The same of train_with_weights on uneven batches."""
    model = dist.prepare_ddp_model(transformer.make_model(args))
    optimizer = transformer.make_optimizer(optimizer, model.parameters(), args.lr)
    sums = torch.zeros(3, 2)
    min_Join.train_with_weights(model, optimizer, uneven_batches(dist.get_rank()), sums, args.clip)
    sums = dist.all_reduce(sums)
    return sums[:, 0] / sums[:, 1], transformer.full_parameters(model), ""


@pytest.mark.parametrize("nprocs", [2, *slow(1, 3)])
def test_both_ways_equal_one_process(nprocs, tmp_path):
    cases = [*CASES, *MORE] if nprocs == 2 else CASES
    ranks = transformer.train_on(nprocs, train, cases + UNEVEN * (nprocs == 2), tmp_path)
    for number, (method, optimizer, least, clip) in enumerate(cases):
        print(nprocs, method, optimizer, least, clip)
        losses, parameters, stdout = ranks[0][number]
        transformer.assert_equal(losses, parameters, reference(nprocs, optimizer, least, clip))
        for others in ranks[1:]:
            assert all(torch.equal(others[number][1][name], value) for name, value in parameters.items())
            assert others[number][2] == "", "only the primary rank prints"
        assert stdout.startswith(f"batches of each process: {COUNTS[nprocs, least]}\n")
        lines = transformer.progress_lines(stdout)
        assert [line["step"] for line in lines] == [4, 8, 10]
        held_out = transformer.held_out_loss(parameters, arguments(nprocs))
        assert lines[-1]["held_out"] == pytest.approx(held_out, abs=6e-5)
    if nprocs == 2:
        check_uneven(*ranks[0][-1])


def check_uneven(losses, parameters, _):
    """Weights suit batches of any size."""
    with transformer.float64():
        args = arguments(2)
        model = transformer.make_model(args)
        optimizer = transformer.make_optimizer("SGD", model.parameters(), args.lr)
        first, second = uneven_batches(0), uneven_batches(1)
        steps = [[torch.cat(pair) for pair in zip(first[0], second[0], strict=True)], *first[1:]]
        made = [transformer.take_step(model, optimizer, transformer.plain_loss(model, *batch))[0] for batch in steps]
        transformer.assert_equal(losses, parameters, (torch.stack(made), transformer.full_parameters(model)))
