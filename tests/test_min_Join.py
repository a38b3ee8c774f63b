"""Both ways train on all data of all ranks, and on nothing else, as one process does."""

import contextlib
import io

import pytest
import torch
import transformer
from conftest import torchrun
from torch.nn import functional as F

import distributed as dist
import gpt
import min_Join

STEPS = 25
BATCH = {1: 8, 2: 8, 3: 9}
COUNTS = {(1, 18): [25], (2, 18): [25, 18], (2, 0): [25, 0], (3, 18): [25, 22, 18]}  # by processes and --least
CASES = [(method, *rest) for rest in (("AdamW", 18, None), ("SGD", 18, 0.5)) for method in ("join", "weights")]
MORE = [("join", "SGD", 0, None), ("weights", "SGD", 0, None)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Several would only wait for each other, on matrices as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def arguments(nprocs, method="join", least=18, clip=None):
    sizes = {"steps": STEPS, "batch_size": BATCH[nprocs], "layers": 1}
    return transformer.arguments(nprocs, method=method, least=least, clip=clip, **sizes)


def cases(nprocs):
    return CASES + (MORE if nprocs == 2 else [])


def update(model, optimizer, loss, clip):
    optimizer.zero_grad()
    loss.backward()
    if clip:
        norm = torch.stack([param.grad.norm() for param in model.parameters()]).norm()
        for param in model.parameters():
            param.grad *= min(1, clip / (norm + 1e-6))
    optimizer.step()
    return loss.detach()


def plain_loss(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def reference(nprocs, optimizer, least, clip):
    """One process of plain PyTorch, on the parts of each batch that belong to a rank which still has data."""
    args = arguments(nprocs)
    with transformer.float64():
        model = transformer.make_model(args)
        optimizer = transformer.make_optimizer(optimizer, model.parameters(), args.lr)
        losses = []
        for step in range(STEPS):
            batch = gpt.batch(transformer.small_text()[0], step, args.batch_size, args.length, args.seed)
            x, y = (
                torch.cat([own for own, n in zip(part.chunk(nprocs), COUNTS[nprocs, least], strict=True) if step < n])
                for part in batch
            )
            losses.append(update(model, optimizer, plain_loss(model, x, y), clip))
    assert losses[-1] < losses[0] - 0.5, "the reference must learn, or equality means little"
    return torch.stack(losses), transformer.full_parameters(model)


def uneven_batches(rank):
    """Batches of a process that has as many, and as large ones, as no other: 4, 4 and 3 sequences, or 2."""
    sizes = [(4, 4, 3), (2,)][rank]
    return [gpt.batch(transformer.small_text()[0], 10 * rank + step, size, 32) for step, size in enumerate(sizes)]


def train_worker(local_rank, world_size, folder):
    """Each case by the script's own train, and `weighted` on uneven batches; every rank saves."""
    dist.init_process_group()
    results = []
    with transformer.float64():
        for method, optimizer, least, clip in cases(world_size):
            args = arguments(world_size, method, least, clip)
            model = dist.prepare_ddp_model(transformer.make_model(args))
            optimizer = transformer.make_optimizer(optimizer, model.parameters(), args.lr)
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                losses = min_Join.train(model, optimizer, *transformer.small_text(), args)
            results.append((losses, transformer.full_parameters(model), stdout.getvalue()))
        if world_size == 2:
            model = dist.prepare_ddp_model(transformer.make_model(args))
            optimizer = transformer.make_optimizer("SGD", model.parameters(), 0.01)
            sums = torch.zeros(3, 2)
            for loss in min_Join.weighted(model, iter(uneven_batches(local_rank)), sums):
                update(model, optimizer, loss, None)
            sums = dist.all_reduce(sums)
            results.append((sums[:, 0] / sums[:, 1], transformer.full_parameters(model), ""))
    torch.save(results, f"{folder}/{local_rank}.pt")


@pytest.fixture(scope="module", params=[1, 2, 3])
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    dist.launch(train_worker, str(folder), nprocs=request.param)
    return request.param, [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(request.param)]


def test_both_ways_equal_one_process(trained):
    nprocs, ranks = trained
    for number, (method, optimizer, least, clip) in enumerate(cases(nprocs)):
        print(nprocs, method, optimizer, least, clip)
        losses, parameters, stdout = ranks[0][number]
        transformer.assert_equal(losses, parameters, reference(nprocs, optimizer, least, clip))
        for others in ranks[1:]:
            assert all(torch.equal(others[number][1][name], value) for name, value in parameters.items())
            assert others[number][2] == "", "only the primary rank prints"
        lines = stdout.splitlines()
        assert lines[0] == f"batches of each process: {COUNTS[nprocs, least]}"
        assert [line.split(" | ")[0] for line in lines[1:]] == ["step 10", "step 20", "step 25"]
        with transformer.float64(), torch.no_grad():
            model = transformer.make_model(arguments(nprocs))
            model.load_state_dict(parameters)
            batches = gpt.Progress(None, *transformer.small_text(), arguments(nprocs)).batches
            held_out = torch.stack([plain_loss(model, x, y) for x, y in batches]).mean().item()
        assert f"| held-out {held_out:.4f} nats" in lines[-1]


def test_weights_suit_batches_of_any_size(trained):
    nprocs, ranks = trained
    if nprocs != 2:
        return
    losses, parameters, _ = ranks[0][-1]
    with transformer.float64():
        model = transformer.make_model(arguments(2))
        optimizer = transformer.make_optimizer("SGD", model.parameters(), 0.01)
        first, second = uneven_batches(0), uneven_batches(1)
        steps = [[torch.cat(pair) for pair in zip(first[0], second[0], strict=True)], *first[1:]]
        expected = torch.stack([update(model, optimizer, plain_loss(model, x, y), None) for x, y in steps])
        transformer.assert_equal(losses, parameters, (expected, transformer.full_parameters(model)))


@pytest.mark.parametrize(
    "options, message",
    [
        ("--method stop", "argument --method: invalid choice: 'stop' (choose from 'join', 'weights')"),
        ("--least -1", "argument --least: '-1' is not a whole number of at least 0"),
        ("--steps 20 --least 21", "argument --least: 21 is more than --steps 20, the batches of the first one"),
        ("--nproc 3", "argument --batch-size: 16 is not a multiple of the processes, 3"),
        ("--heads 5", "argument --heads: 5 is not a divisor of --width 128"),
    ],
)
def test_bad_options_are_one_line(options, message, main_of, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    status, error = main_of("min_Join.py", *options.split())
    quoted = error.replace("(choose from join, weights)", "(choose from 'join', 'weights')")  # Python 3.12 and later
    assert (status, quoted) == (2, f"min_Join.py: error: {message}\n")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_learns_with_the_defaults():
    transformer.assert_learns("min_Join.py", "--nproc", 2)


@pytest.mark.slow
def test_under_torchrun():
    options = ("--method", "weights", "--width", 32, "--steps", 20, "--least", 0, "--log-every", 10, "--clip", 1)
    status, stdout, stderr = torchrun(2, "min_Join.py", *options, timeout=110)
    assert status == 0, stderr
    assert "batches of each process: [20, 0]" in stdout
    assert [line["step"] for line in transformer.progress_lines(stdout)] == [10, 20]
