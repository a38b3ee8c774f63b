"""min_CP.py: equal to one process, activations split for real, and as many bytes as it says."""

import functools

import pytest
import torch
import transformer
from conftest import ROOT, torchrun

import distributed as dist
import gpt
import min_CP

CASES = [(kind, *how) for kind in min_CP.ATTENTIONS for how in (("AdamW", None), ("SGD", 1.5))]
SMALL = {"layers": 2, "log_every": 20}


def train_worker(local_rank, world_size, path):
    """All cases: losses and parameters of each; and the bytes that this process saves for backward with 4096 bytes."""
    dist.init_process_group()
    results = {}
    with transformer.float64():
        for kind, optimizer, clip in CASES:
            args = transformer.arguments(world_size, clip=clip, **SMALL)
            model = min_CP.parallelize(transformer.make_model(args), kind)
            optimizer_ = transformer.make_optimizer(optimizer, model.parameters(), args.lr)
            losses = min_CP.train(model, optimizer_, *transformer.small_text(), args)
            results[kind, optimizer, clip] = losses, transformer.full_parameters(model)
    for kind in min_CP.ATTENTIONS:
        results[kind] = dist.agree(saved_bytes(kind))
    if local_rank == world_size - 1:
        torch.save(results, path)


def saved_bytes(kind):
    """That a loss on one sequence of 4096 bytes saves for its backward, parameters aside."""
    args = transformer.arguments(layers=2, width=64, length=4096)
    model = min_CP.parallelize(transformer.make_model(args), kind)
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x, y = gpt.batch(transformer.small_text()[0], 0, 1, args.length)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = min_CP.local_loss(model, x, y)  # alive, as are its saved tensors: no address is used again
    for param in model.parameters():
        storages.pop(param.untyped_storage().data_ptr(), None)
    loss.backward()
    return sum(storages.values())


@pytest.fixture(scope="module")
def plain_saved_bytes():
    return saved_bytes("ulysses")


@pytest.mark.parametrize("nprocs", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_equal_to_one_process_and_activations_split(nprocs, tmp_path, plain_saved_bytes):
    dist.launch(train_worker, str(tmp_path / "results.pt"), nprocs=nprocs)
    results = torch.load(tmp_path / "results.pt", weights_only=True)
    for case in CASES:
        _, optimizer, clip = case
        transformer.assert_equal(*results[case], transformer.reference(optimizer, clip=clip, **SMALL))
    most = {1: 1, 2: 0.55, 4: 0.3}[nprocs]
    assert max(results["ulysses"]) <= most * plain_saved_bytes
    assert min(results["all-gather"]) >= max(results["ulysses"]) > 1e6, "its keys and values are not split"


# ---- bytes sent ---------------------------------------------------------------------------------------------------


def count_bytes():
    dist.launch(count_bytes_worker, nprocs=2)


def count_bytes_worker(local_rank, world_size):
    dist.init_process_group()
    for kind in min_CP.ATTENTIONS:
        args = transformer.arguments(world_size, layers=2, length=128, width=64)
        model = min_CP.parallelize(transformer.make_model(args), kind)
        optimizer = transformer.make_optimizer("AdamW", model.parameters(), args.lr)
        train = functools.partial(min_CP.train, model, optimizer, *transformer.small_text())
        dist.print_primary("sent", transformer.sent_per_step(train, args))


@pytest.mark.slow
def test_bytes_sent_are_those_of_the_docstring():
    stdout = transformer.run_in_namespace("test_min_CP", "count_bytes")
    ulysses, all_gather = (float(line.split()[1]) for line in stdout.splitlines() if line.startswith("sent "))
    n, layers, batch, length, width = 2, 2, 8, 128, 64
    params = sum(param.numel() for param in gpt.GPT(layers, width, 4, length).parameters())
    ddp = 2 * (n - 1) / n * 4 * params
    assert ulysses == pytest.approx(ddp + (n - 1) / n * 32 * layers * batch * length * width / n, rel=0.03)
    on_gloo = 1.5  # its reduce-scatter is an all-reduce
    assert all_gather == pytest.approx(ddp + on_gloo * (n - 1) / n * 16 * layers * batch * length * width, rel=0.03)


# ---- the command --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_under_torchrun():
    command = (ROOT / "min_CP.py", "--attention", "all-gather", "--steps", 3, "--log_every", 2, "--heads", 1)
    status, stdout, stderr = torchrun(2, *command)
    assert status == 0, stderr
    assert stdout.startswith("parameters held: 478,720 of 478,720 (1.000)\n")
    assert [line["step"] for line in transformer.progress_lines(stdout)] == [2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("kind", min_CP.ATTENTIONS)
def test_learns(kind):
    transformer.assert_learns("min_CP.py", "--attention", kind)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--heads", "1"), "argument --heads: 1 is not a multiple of the 2 processes"),
        (("--nproc", "3"), "argument --length: 128 is not a multiple of the 3 processes"),
        (("--attention", "ring"), "argument --attention: invalid choice: 'ring' (choose from 'ulysses', 'all-gather')"),
    ],
)
def test_bad_options_are_one_line(main_of, args, message):
    assert main_of("min_CP.py", *args) == (2, f"min_CP.py: error: {message}\n")
