"""mnist_FSDP.py: equal to one process, sharded for real, checkpoints that any number of ranks can read."""

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import MNIST_ROOT, Watch, exit_message, guards, killed_in, needs_mnist, on_two_processes, slow, slow_clock
from images import (
    OPTIMIZERS,
    Net,
    Normed,
    Plain,
    Pooled,
    assert_equal_states,
    digits,
    few_digits,
    result_of,
    train_alone,
)
from test_checkpoint_sharded import KILLS
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.multiprocessing import ProcessExitedException
from torch.nn import functional as F
from torch.utils.data import Subset

import checkpoint_sharded
import distributed as dist
import mnist
import mnist_FSDP

GLOBAL_BATCH, EPOCHS, SIZES, LR = 24, 2, (240, 250), 0.002  # 250 is no multiple of 3, 4 or a batch
STEPS = SIZES[0] // GLOBAL_BATCH  # of an epoch
EPOCH_LINE = (
    r"epoch (\d+)/\d+ \| loss ([\d.]+) \| held-out ([\d.]+) \| accuracy ([\d.]+) \((\d+)/(\d+)\) "
    r"\| (\d+) MB \| ([\d,]+) samples/s"
)


def train(local_rank, world_size, folder, name="run", optimizer="adam", model=Net, kind=lambda whole: whole, **changes):
    """The script's own main_worker, in a worker; leaves NAME.pt, the result, and what each rank has printed and drawn.

    `changes` are of parse_args. Every rank's peak of memory is another, and every epoch of training takes 10 seconds.
    """
    Net.drawn.clear()
    values = {
        **{"strategy": "fsdp", "model": "simple", "epochs": EPOCHS, "batch_size": GLOBAL_BATCH // world_size},
        **{"test_batch_size": 21, "lr": LR, "bf16": False, "data": "synthetic", "min_num_params": 1000},
        **{"data_dir": "data", "checkpoint_dir": None, "output": f"{folder}/{name}.pt", "seed": 3, "log_every": 7},
    }
    args = argparse.Namespace(**{**values, **changes})
    clock = slow_clock(step=10)

    with (
        few_digits(*SIZES, kind=kind, dtype=torch.float32 if args.bf16 else torch.float64),
        mock.patch.dict(mnist.MODELS, simple=model),
        mock.patch("mnist_FSDP.time", clock),
        mock.patch("mnist_FSDP.peak_memory", lambda device: (7 + local_rank) * 1_000_000),
        mock.patch("torch.optim.Adam", OPTIMIZERS[optimizer]) if optimizer != "adam" else contextlib.nullcontext(),
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", UserWarning)  # what a user would see at each checkpoint
        warnings.filterwarnings("ignore", "CUDA|cuda|TypedStorage")
        mnist_FSDP.main_worker(local_rank, world_size, args)
    Path(f"{folder}/{name}-{local_rank}.json").write_text(json.dumps([stdout.getvalue(), list(map(float, Net.drawn))]))


def trained(folder, name="run"):
    """Of what `train` has left: (state_dict, epoch lines, output, what was drawn on each rank)."""
    state = torch.load(f"{folder}/{name}.pt", weights_only=True)
    ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob(f"{name}-?.json"))]
    assert not any(output for output, _ in ranks[1:]), "rank 0 alone prints"
    return state, re.findall(EPOCH_LINE, ranks[0][0]), ranks[0][0], [drawn for _, drawn in ranks]


def assert_equal_lines(lines, expected, nprocs, first_epoch=0):
    """What was printed is what the reference has measured."""
    _, losses, tests = expected
    steps = len(losses) // len(tests)
    for i, line in enumerate(lines, first_epoch):
        epoch, train_loss, test_loss, accuracy, hits, n, memory, speed = line
        of_epoch = losses[i * steps : (i + 1) * steps]
        assert int(epoch) == i + 1
        mean = sum(loss * count for loss, count in of_epoch) / sum(count for _, count in of_epoch)
        assert float(train_loss) == pytest.approx(mean, abs=6e-5)
        assert float(test_loss) == pytest.approx(tests[i][0], abs=6e-5)
        assert (int(hits), int(n)) == tests[i][1:], "every test sample once, for any number of ranks"
        assert accuracy == f"{tests[i][1] / tests[i][2]:.4f}"
        assert (int(memory), int(speed)) == (7 + nprocs - 1, SIZES[0] // 10)
    assert len(lines) == len(tests) - first_epoch


# ---- equal to one process -----------------------------------------------------------------------------------------

RATES = {"sgd": 0.01, "adam": LR, "layerwise": LR}
MODELS = {"sgd": Net, "adam": Net, "layerwise": Pooled}
CASES = {
    "fsdp sgd": ("fsdp", "sgd"),
    "ddp sgd": ("ddp", "sgd"),
    "ddp adam": ("ddp", "adam"),
    "layerwise": ("fsdp", "layerwise"),
    "plain data": ("fsdp", "adam"),
}


@pytest.fixture(scope="module")
def references():
    """Plain PyTorch, without the helper, with each optimizer."""
    return {
        name: train_alone(make, [RATES[name]] * 2, SIZES, GLOBAL_BATCH, model=MODELS[name])
        for name, make in OPTIMIZERS.items()
    }


def expected_steps(reference):
    """What is printed every 7 of 20 steps, the mean loss of the epoch so far."""
    losses = [loss for loss, _ in reference[1]]
    lines = []
    for step in (7, 14):
        of_epoch = losses[(step - 1) // STEPS * STEPS : step]
        lines.append(f"{step}/20 | loss {sum(of_epoch) / len(of_epoch):.4f}")
    return lines


def cases_worker(local_rank, world_size, folder):
    for case, (strategy, name) in CASES.items():
        changes = {"strategy": strategy, "lr": RATES[name], "model": MODELS[name]}
        if case == "plain data":
            changes |= {"kind": Plain, "checkpoint_dir": f"{folder}/checkpoints"}
        if world_size == 1 and strategy == "ddp":
            changes["strategy"] = "local"
        train(local_rank, world_size, folder, case, name, **changes)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Three ranks train all cases, one of them with a checkpoint after each of its two epochs."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    dist.launch(cases_worker, str(folder), nprocs=3)
    return folder


@pytest.mark.guard
@pytest.mark.parametrize("nprocs", [1, *guards(2, 3, 4)])
def test_equals_one_process(nprocs, references, tmp_path, request):
    folder = request.getfixturevalue("uninterrupted") if nprocs == 3 else tmp_path
    if nprocs != 3:
        dist.launch(cases_worker, str(folder), nprocs=nprocs)
    for case, (strategy, name) in CASES.items():
        state, lines, output, drawn = trained(folder, case)
        assert_equal_states(state, references[name][0])
        assert_equal_lines(lines, references[name], nprocs)
        strategy = "local" if nprocs == 1 and strategy == "ddp" else strategy
        assert output.startswith(f"Training on {nprocs} x cpu: {strategy}\n")
        steps = [number for numbers in drawn for number in numbers]
        assert len(steps) == nprocs * EPOCHS * STEPS
        assert len(set(steps)) == len(steps), "dropout differs between ranks and between steps"
        assert re.findall(r"^step (.*)$", output, re.M) == expected_steps(references[name])
        n_params = sum(tensor.numel() for tensor in state.values())
        n_trained = sum(tensor.numel() for name, tensor in state.items() if not name.startswith("pooler"))
        share = 8 / nprocs if strategy == "fsdp" else 8  # bytes of a float64
        expected = [share * n_params, share * n_trained, share * n_trained * (1 if name == "sgd" else 2)]
        held = re.search(r"bytes: parameters (\S+) \| gradients (\S+) \| optimizer state (\S+) \| in all", output)
        held = [int(number.replace(",", "")) for number in held.groups()]
        assert held == pytest.approx(expected, rel=0.02)
        assert f"Model simple: {n_params:,} parameters\n" in output


def test_prepare_fsdp_model_in_one_process(monkeypatch):
    model = nn.Linear(3, 2)
    assert dist.prepare_fsdp_model(model) is model and type(model) is nn.Linear
    monkeypatch.setattr(dist, "get_device", lambda: torch.device("meta"))
    assert dist.prepare_fsdp_model(model).weight.device.type == "meta", "moved there, as when it is sharded"


def normed_worker(local_rank, world_size, folder):
    train(local_rank, world_size, folder, model=Normed, checkpoint_dir=folder)


@pytest.mark.guard
@pytest.mark.slow
def test_batch_norm(tmp_path):
    """What was evaluated is what was exported and saved, on every rank."""
    dist.launch(normed_worker, str(tmp_path), nprocs=2)
    state, lines, *_ = trained(tmp_path)
    with few_digits(*SIZES):
        net = Normed()
        net.load_state_dict(state)
        loss, hits, n = result_of(net, mnist.load_data(train=False, seed=3))
    assert (int(lines[-1][4]), int(lines[-1][5])) == (hits, n)
    assert float(lines[-1][2]) == pytest.approx(loss, abs=6e-5)
    dcp_to_torch_save(tmp_path / "step-2", tmp_path / "saved.pt")
    assert_equal_states(torch.load(tmp_path / "saved.pt", weights_only=True)["model"], state, 0)


# ---- batches ------------------------------------------------------------------------------------------------------


def loaders(train_set, test_set=None):
    args = argparse.Namespace(data="name", data_dir="folder", seed=3, batch_size=64, test_batch_size=20)
    with mock.patch("mnist.load_data", side_effect=[train_set, test_set or train_set]) as load_data:
        both = mnist_FSDP.make_loaders(args, torch.device("cpu"))
    assert load_data.mock_calls == [mock.call("name", "folder", train=half, seed=3) for half in (True, False)]
    return both


def test_batches_are_whole():
    whole = digits(10_000)
    loader, _ = loaders(whole)
    fetch = mock.Mock(wraps=whole.__getitems__)
    with mock.patch("mnist.Digits.__getitems__", fetch):
        list(loader)
    assert [len(call.args[0]) for call in fetch.call_args_list] == [64] * 156 + [16]


def test_any_dataset_gives_the_same_batches():
    whole = digits(90)
    for dataset in (Plain(whole), Subset(whole, range(90)), Subset(Plain(whole), range(90))):
        for expected, actual in zip(loaders(whole), loaders(dataset), strict=True):
            for one, other in zip(expected, actual, strict=True):
                assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


# ---- forward and evaluation ---------------------------------------------------------------------------------------


def test_forward_computes_in_bfloat16_if_told_to():
    images, labels = digits(8).__getitems__(range(8))
    net = mnist.SimpleCNN()
    expected = F.cross_entropy(net(mnist.normalize(images)), labels, reduction="none")
    for mixed, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        outputs, same, losses = mnist_FSDP.forward(net, images, labels, torch.device("cpu"), mixed)
        assert (outputs.dtype, losses.dtype, losses.shape) == (dtype, torch.float32, (8,)) and same is labels
        assert torch.allclose(losses, expected, rtol=0.05 if mixed else 1e-6)


def evaluate_worker(local_rank, world_size):
    dist.init_process_group()
    results = []
    with few_digits(1, 1):
        for size in (101, 60, 2, 1):
            for sharded in (False, True):
                torch.manual_seed(4)
                model = dist.prepare_fsdp_model(Net(), (torch.nn.Linear, torch.nn.Conv2d)) if sharded else Net()
                results.append(mnist_FSDP.evaluate(model, loaders(digits(size))[1], dist.get_device(), False))
        torch.manual_seed(4)
        net = Normed()
        net.layers[2].running_mean.fill_(local_rank)  # as it is after training, each rank with its own
        results.append(mnist_FSDP.evaluate(net, loaders(digits(101))[1], dist.get_device(), False))
    return dist.gather_objects(results)


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_any_number_of_ranks_evaluates_as_one_process(nprocs):
    """Also fewer samples than ranks, and a sharded model, which no rank may leave early."""
    expected = []
    with few_digits(1, 1):
        for size in (101, 60, 2, 1):
            torch.manual_seed(4)
            expected += [result_of(Net(), digits(size))] * 2
        torch.manual_seed(4)
        expected.append(result_of(Normed(), digits(101)))
    for results in dist.launch(evaluate_worker, nprocs=nprocs):
        assert [counts for _, *counts in results] == [counts for _, *counts in expected]
        assert [loss for loss, *_ in results] == pytest.approx([loss for loss, *_ in expected], rel=1e-12)


# ---- sharded for real ---------------------------------------------------------------------------------------------


def two_steps(model, mixed):
    """By the script's own functions; returns the optimizer."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    loader = torch.utils.data.DataLoader(mnist._draw_digits(16, dist.get_rank()), 8, collate_fn=mnist.collate)
    mnist_FSDP.train_epoch(model, loader, optimizer, dist.get_device(), mixed)
    return optimizer


@pytest.mark.guard
@pytest.mark.slow
@on_two_processes
def test_each_rank_computes_in_bfloat16_if_told_to():
    gathered, computed = set(), set()
    for strategy in ("fsdp", "ddp"):
        model = mnist_FSDP.wrap(mnist.ShallowNet(), strategy, dist.get_device(), True)
        layer = (model if strategy == "fsdp" else model.module).fc1
        layer.register_forward_pre_hook(lambda fc, _: gathered.add(fc.weight.dtype))
        layer.register_forward_hook(lambda _, inputs, output: computed.add(output.dtype))
        with Watch() as watch:
            optimizer = two_steps(model, True)
        kept = [*model.parameters(), *(tensor for values in optimizer.state.values() for tensor in values.values())]
        assert {tensor.dtype for tensor in kept} == {torch.float32}
        assert computed == {torch.bfloat16}
        assert set(watch.types_of("reduce")) == ({"torch.float32"} if strategy == "fsdp" else set())
        assert gathered == {torch.bfloat16 if strategy == "fsdp" else torch.float32}
        gathered.clear()
        computed.clear()


def test_mixed_precision_is_for_training_and_evaluation(tmp_path):
    seen, forward = [], mnist_FSDP.forward
    with mock.patch("mnist_FSDP.forward", lambda *args: seen.append(args[4]) or forward(*args)):
        train(0, 1, tmp_path, epochs=1, bf16=True)
    assert seen == [True] * (STEPS + 12)


# ---- checkpoints --------------------------------------------------------------------------------------------------


def first_epoch_of(uninterrupted, folder):
    """A checkpoint folder as it is after the first epoch."""
    shutil.copytree(uninterrupted / "checkpoints" / "step-1", Path(folder) / "step-1")
    return str(folder)


def again_worker(local_rank, world_size, folder, **changes):
    train(local_rank, world_size, folder, checkpoint_dir=folder, **changes)


class Smaller(Net):
    """All that it has is in a checkpoint of Net."""

    def __init__(self):
        super().__init__()
        del self.second


def resume_worker(local_rank, world_size, folder):
    """Resume after the first epoch: from the same state, to the same end, with other models, and with other options."""
    dist.init_process_group()
    for strategy in ("fsdp", "ddp"):
        train(local_rank, world_size, folder, strategy, strategy=strategy, checkpoint_dir=f"{folder}/{strategy}")

    # A checkpoint after an epoch of one run, gone on with by another, for each number of ranks.
    here = f"{folder}/layerwise"
    for part, epochs in {"half": 1, "whole": 2}.items():
        changes = {"model": Pooled, "epochs": epochs, "checkpoint_dir": here}
        train(local_rank, world_size, folder, part, "layerwise", **changes)

    for another in ({"model": mnist.ShallowNet}, {"model": Smaller}, {"lr": 0.3}, {"bf16": True}, {"seed": 4}):
        message = exit_message(again_worker, local_rank, world_size, f"{folder}/other", **another)
        assert f"{folder}/other/step-1" in message


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("nprocs", [1, 2, *slow(3)])
def test_resume_on_another_number_of_ranks(nprocs, uninterrupted, references, tmp_path):
    for name in ("fsdp", "ddp", "other"):
        first_epoch_of(uninterrupted, tmp_path / name)
    dist.launch(resume_worker, str(tmp_path), nprocs=nprocs)

    *_, drawn_before = trained(uninterrupted, "plain data")
    for strategy in ("fsdp", "ddp"):
        state, lines, output, drawn = trained(tmp_path, strategy)
        assert_equal_states(state, references["adam"][0])
        assert_equal_lines(lines, references["adam"], nprocs, first_epoch=1)
        assert f"Resuming from {tmp_path / strategy / 'step-1'}\n" in output
        assert drawn == [numbers[STEPS:] for numbers in drawn_before[:nprocs]], "as if it had not been interrupted"
    state, lines, *_ = trained(tmp_path, "whole")
    assert_equal_states(state, references["layerwise"][0])
    assert_equal_lines(lines, references["layerwise"], nprocs, first_epoch=1)
    assert sorted(os.listdir(tmp_path / "layerwise")) == ["step-1", "step-2"]


def killed_worker(local_rank, world_size, folder, rank, how):
    save = checkpoint_sharded.save

    def save_or_die(folder, model, optimizer, epoch, **settings):
        with killed_in(*how) if (epoch, local_rank) == (2, rank) else contextlib.nullcontext():
            save(folder, model, optimizer, epoch, **settings)

    with mock.patch("checkpoint_sharded.save", save_or_die):
        again_worker(local_rank, world_size, folder)


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("moment", [moment for moment in KILLS if "older ones" not in moment])
def test_kill_in_a_save(moment, uninterrupted, references, tmp_path):
    (rank, how, epoch), folder = KILLS[moment], first_epoch_of(uninterrupted, tmp_path)
    with pytest.raises(ProcessExitedException, match=f"rank {rank} was killed by SIGKILL"):
        dist.launch(killed_worker, folder, rank, how, nprocs=2)
    assert (tmp_path / "step-2").is_dir()
    dist.launch(again_worker, folder, nprocs=2)
    state, lines, output, _ = trained(tmp_path)
    assert f"Resuming from {tmp_path / f'step-{epoch}'}" in output and len(lines) == 2 - epoch
    assert_equal_states(state, references["adam"][0])
    dcp_to_torch_save(tmp_path / "step-2", tmp_path / "saved.pt")  # and it was completed
    assert_equal_states(torch.load(tmp_path / "saved.pt", weights_only=True)["model"], references["adam"][0])


def test_an_export_on_a_full_disk_leaves_the_old_file(tmp_path):
    (tmp_path / "run.pt").write_text("old")
    (tmp_path / "run.pt.0.tmp").symlink_to("/dev/full")
    message = exit_message(train, 0, 1, tmp_path, epochs=1)
    assert message.startswith(f"cannot save {tmp_path}/run.pt") and "No space left on device" in message
    assert (tmp_path / "run.pt").read_text() == "old"


# ---- progress -----------------------------------------------------------------------------------------------------


def test_no_step_waits_for_the_loss(tmp_path, monkeypatch):
    """The device is asked for it every --log-every steps."""
    waits = []
    for name in ("item", "tolist"):
        function = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, f=function: waits.append(None) or f(self))
    counts = []
    for log_every in (1, 5, 100):
        waits.clear()
        train(0, 1, tmp_path, epochs=1, log_every=log_every)
        counts.append(len(waits))
    assert counts[0] - counts[2] == STEPS and counts[1] - counts[2] == STEPS // 5


# ---- the command --------------------------------------------------------------------------------------------------


@needs_mnist
@pytest.mark.slow
@pytest.mark.guard
def test_shallow_net_on_real_mnist_in_two_units_equals_local(tmp_path):
    dist.launch(real_worker, "fsdp", str(tmp_path), nprocs=2)
    dist.launch(real_worker, "local", str(tmp_path), nprocs=1)
    output, alone = ((tmp_path / f"{strategy}.txt").read_text() for strategy in ("fsdp", "local"))
    assert re.findall(r"(loss.*\)) ", output) == re.findall(r"(loss.*\)) ", alone)
    sharded, whole = (torch.load(tmp_path / f"{strategy}.pt", weights_only=True) for strategy in ("fsdp", "local"))
    assert_equal_states(sharded, whole)


def real_worker(local_rank, world_size, strategy, folder):
    """600 real digits in float64, without dropout, whose masks differ between numbers of processes."""
    words = ["--strategy", strategy, "--model", "shallow", "--epochs", "1", "--batch-size", str(64 // world_size)]
    words += ["--data", "mnist", "--data-dir", MNIST_ROOT, "--output", f"{folder}/{strategy}.pt"]
    load_data = mnist.load_data

    def some(*args, **kwargs):
        whole = load_data(*args, **kwargs)
        return mnist.Digits(whole.images[:600], whole.labels[:600])

    torch.set_default_dtype(torch.float64)
    with (
        mock.patch("mnist.load_data", some),
        mock.patch("torch.nn.functional.dropout", lambda x, *_: x),
        mock.patch("sys.argv", ["mnist_FSDP.py", *words]),
        contextlib.redirect_stdout(io.StringIO()) as stdout,
    ):
        mnist_FSDP.main_worker(local_rank, world_size, mnist_FSDP.parse_args())
    torch.set_default_dtype(torch.float32)
    if local_rank == 0:
        Path(f"{folder}/{strategy}.txt").write_text(stdout.getvalue())
