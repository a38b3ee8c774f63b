"""mnist_FSDP.py: equal to one process, sharded for real, checkpoints that any number of ranks can read."""

import argparse
import contextlib
import io
import os
import re
import shutil
import warnings
from unittest import mock

import pytest
import torch
from conftest import (
    MNIST_ROOT,
    Watch,
    exit_message,
    float64,
    guards,
    needs_mnist,
    on_processes,
    slow,
    slow_clock,
    whole,
)
from images import (
    OPTIMIZERS,
    Net,
    Normed,
    Plain,
    Pooled,
    Typed,
    assert_equal_states,
    check_forward,
    check_full_disk,
    digits,
    halves,
    host_reads,
    result_of,
    train_alone,
    write_mnist,
)
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import Subset

import distributed as dist
import mnist
import mnist_FSDP

GLOBAL_BATCH, EPOCHS, SIZES, LR = 24, 2, (240, 250), 0.002  # 250 is no multiple of 3, 4 or a batch
STEPS = SIZES[0] // GLOBAL_BATCH  # of an epoch


def memory_of_this_rank(device):
    return (7 + dist.get_rank()) * 1_000_000


def train(optimizer="adam", model=Net, kind=lambda data: data, data=None, exact=True, **changes):
    """What the script's own `run` gives and prints on this rank. `changes` are of parse_args.

    It computes in float64 if it is `exact`. Every epoch of training takes 10 seconds, and more memory on a higher rank.
    """
    dist.init_process_group()
    Net.drawn.clear()
    values = {
        **{
            "strategy": "fsdp",
            "model": "simple",
            "epochs": EPOCHS,
            "batch_size": GLOBAL_BATCH // dist.get_world_size(),
        },
        **{"test_batch_size": 21, "lr": LR, "bf16": False, "min_num_params": 1000},
        **{"checkpoint_dir": None, "output": None, "seed": 3, "log_every": 7},
    }
    args = argparse.Namespace(**{**values, **changes})
    with (
        float64() if exact and not args.bf16 else contextlib.nullcontext(),
        mock.patch.multiple(mnist_FSDP, time=slow_clock(step=10), peak_memory=memory_of_this_rank),
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", UserWarning)  # what a user would see at each checkpoint
        warnings.filterwarnings("ignore", "CUDA|cuda|TypedStorage")
        trained, results = mnist_FSDP.run(args, data or halves(*SIZES, kind), model, OPTIMIZERS[optimizer])
        state = {name: whole(value).clone() for name, value in dist.unwrapped(trained).state_dict().items()}
    return {"state": state, "results": results, "stdout": stdout.getvalue(), "drawn": [*map(float, Net.drawn)]}


def assert_equal_results(ranks, expected, first_epoch=0):
    """Each rank's model and results are the reference's, and rank 0 alone has printed the results."""
    state, losses, tests = expected
    steps = len(losses) // len(tests)
    lines = ""
    for epoch, (loss, test_loss, hits, n) in enumerate(ranks[0]["results"], first_epoch):
        of_epoch = losses[epoch * steps : (epoch + 1) * steps]
        mean = sum(each * count for each, count in of_epoch) / sum(count for _, count in of_epoch)
        assert (loss, test_loss) == pytest.approx((mean, tests[epoch][0]), abs=1e-9)
        assert (hits, n) == tests[epoch][1:], "every test sample once, for any number of ranks"
        lines += f"epoch {epoch + 1}/{len(tests)} | loss {loss:.4f} | held-out {test_loss:.4f} | "
        lines += f"accuracy {hits / n:.4f} ({hits}/{n}) | {6 + len(ranks)} MB | {SIZES[0] // 10} samples/s\n"
    printed = re.findall(r"^epoch .*\n", ranks[0]["stdout"], re.M)
    assert "".join(printed) == lines
    assert len(printed) == len(tests) - first_epoch
    for rank in ranks:
        assert_equal_states(rank["state"], state)
        assert rank["results"] == ranks[0]["results"]
        assert rank is ranks[0] or not rank["stdout"], "rank 0 alone prints"


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
    """Of every rank, what each case gives, and the largest of some numbers."""
    given = {}
    for case, (strategy, name) in CASES.items():
        changes = {"strategy": strategy, "lr": RATES[name], "model": MODELS[name]}
        if case == "plain data":
            changes |= {"kind": Plain, "checkpoint_dir": f"{folder}/checkpoints", "output": f"{folder}/model.pt"}
        if world_size == 1 and strategy == "ddp":
            changes["strategy"] = "local"
        given[case] = train(name, **changes)
    assert mnist_FSDP.largest([local_rank, -local_rank], torch.device("cpu")) == [world_size - 1, 0]
    return dist.gather_objects(given)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Three ranks train all cases, one of them with a checkpoint after each of its two epochs."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return folder, dist.launch(cases_worker, str(folder), nprocs=3)


@pytest.mark.guard
@pytest.mark.parametrize("nprocs", [1, *guards(2, 3, 4)])
def test_equals_one_process(nprocs, references, tmp_path, request):
    if nprocs == 3:
        folder, job = request.getfixturevalue("uninterrupted")
    else:
        folder, job = tmp_path, dist.launch(cases_worker, str(tmp_path), nprocs=nprocs)
    for case, (strategy, name) in CASES.items():
        ranks = [given[case] for given in job]
        assert_equal_results(ranks, references[name])
        state, output = ranks[0]["state"], ranks[0]["stdout"]
        strategy = "local" if nprocs == 1 and strategy == "ddp" else strategy
        drawn = [number for rank in ranks for number in rank["drawn"]]
        assert len(drawn) == nprocs * EPOCHS * STEPS
        assert len(set(drawn)) == len(drawn), "dropout differs between ranks and between steps"
        assert re.findall(r"^step (.*)$", output, re.M) == expected_steps(references[name])
        n_params = sum(tensor.numel() for tensor in state.values())
        n_trained = sum(tensor.numel() for name, tensor in state.items() if not name.startswith("pooler"))
        share = 8 / nprocs if strategy == "fsdp" else 8  # bytes of a float64
        expected = [share * n_params, share * n_trained, share * n_trained * (1 if name == "sgd" else 2)]
        held = re.search(r"bytes: parameters (\S+) \| gradients (\S+) \| optimizer state (\S+) \| in all", output)
        held = [int(number.replace(",", "")) for number in held.groups()]
        assert held == pytest.approx(expected, rel=0.02)
        assert f"Model simple: {n_params:,} parameters\n" in output
    assert_equal_states(torch.load(folder / "model.pt", weights_only=True), job[0]["plain data"]["state"], 0)


def test_prepare_fsdp_model_in_one_process():
    model = nn.Linear(3, 2)
    assert dist.prepare_fsdp_model(model) is model and type(model) is nn.Linear
    with pytest.raises(NotImplementedError, match="meta"):  # it is moved to the device, as when it is sharded
        dist.prepare_fsdp_model(nn.Linear(3, 2, device="meta"))


def normed_worker(local_rank, world_size, folder):
    return train(model=Normed, checkpoint_dir=folder)


@pytest.mark.guard
@pytest.mark.slow
def test_batch_norm(tmp_path):
    """What was evaluated is what was saved, on every rank."""
    trained = dist.launch(normed_worker, str(tmp_path), nprocs=2)
    with float64():
        net = Normed()
        net.load_state_dict(trained["state"])
        loss, hits, n = result_of(net, halves(*SIZES)[1])
    assert trained["results"][-1][2:] == (hits, n)
    assert trained["results"][-1][1] == pytest.approx(loss, abs=1e-9)
    dcp_to_torch_save(tmp_path / "step-2", tmp_path / "saved.pt")
    assert_equal_states(torch.load(tmp_path / "saved.pt", weights_only=True)["model"], trained["state"], 0)


# ---- batches ------------------------------------------------------------------------------------------------------


def loaders(train_set, test_set=None):
    args = argparse.Namespace(seed=3, batch_size=64, test_batch_size=20)
    return mnist_FSDP.make_loaders(train_set, test_set or train_set, args, torch.device("cpu"))


class Counted(mnist.Digits):
    """Notes how many samples are asked for at a time."""

    def __getitems__(self, indices):
        self.asked.append(len(indices))
        return super().__getitems__(indices)


def test_batches_are_whole():
    given = digits(10_000)
    counted = Counted(given.images, given.labels)
    counted.asked = []
    list(loaders(counted)[0])
    assert counted.asked == [64] * 156 + [16]


def test_any_dataset_gives_the_same_batches():
    given = digits(90)
    for dataset in (Plain(given), Subset(given, range(90)), Subset(Plain(given), range(90))):
        for expected, actual in zip(loaders(given), loaders(dataset), strict=True):
            for one, other in zip(expected, actual, strict=True):
                assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


# ---- forward and evaluation ---------------------------------------------------------------------------------------


@float64()
def evaluate_worker(local_rank, world_size):
    dist.init_process_group()
    results = []
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
    with float64():
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
@on_processes(2)
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


def test_mixed_precision_is_for_training_and_evaluation():
    check_forward(mnist_FSDP.forward)
    Typed.types.clear()
    train(model=Typed, epochs=1, bf16=True)
    assert Typed.types == [torch.bfloat16] * (STEPS + 12)


# ---- checkpoints --------------------------------------------------------------------------------------------------


class Smaller(Net):
    """All that it has is in a checkpoint of Net."""

    def __init__(self):
        super().__init__()
        del self.second


OTHERS = [{"model": mnist.ShallowNet}, {"model": Smaller}, {"lr": 0.3}, {"bf16": True}, {"seed": 4}]


def resume_worker(local_rank, world_size, folder):
    """Resume after the first epoch: from the same state, to the same end, with other models, and with other options."""
    given = {}
    for strategy in ("fsdp", "ddp"):
        given[strategy] = train(strategy=strategy, checkpoint_dir=f"{folder}/{strategy}")

    # A checkpoint after an epoch of one run, gone on with by another, for each number of ranks.
    for part, epochs in {"half": 1, "layerwise": 2}.items():
        given[part] = train("layerwise", model=Pooled, epochs=epochs, checkpoint_dir=f"{folder}/layerwise")

    for another in (*OTHERS, {"data": halves(230, 250)}):
        message = exit_message(train, checkpoint_dir=f"{folder}/other", **another)
        assert f"{folder}/other/step-1" in message
    return dist.gather_objects(given)


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("nprocs", [1, 2, *slow(3)])
def test_resume_on_another_number_of_ranks(nprocs, uninterrupted, references, tmp_path):
    folder, job = uninterrupted
    for name in ("fsdp", "ddp", "other"):
        shutil.copytree(folder / "checkpoints" / "step-1", tmp_path / name / "step-1")
    resumed = dist.launch(resume_worker, str(tmp_path), nprocs=nprocs)
    for name, reference in {"fsdp": "adam", "ddp": "adam", "layerwise": "layerwise"}.items():
        ranks = [given[name] for given in resumed]
        assert_equal_results(ranks, references[reference], first_epoch=1)
        assert f"Resuming from {tmp_path / name / 'step-1'}\n" in ranks[0]["stdout"]
        if reference == "adam":
            before = [given["plain data"]["drawn"] for given in job[:nprocs]]
            assert [rank["drawn"] for rank in ranks] == [numbers[STEPS:] for numbers in before], "as not interrupted"
    assert sorted(os.listdir(tmp_path / "layerwise")) == ["step-1", "step-2"]


def test_an_export_on_a_full_disk_leaves_the_old_file(tmp_path):
    check_full_disk(tmp_path / "run.pt", train, epochs=1, output=tmp_path / "run.pt")


# ---- the command --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Found GPU")
def test_the_command_trains_the_model_and_the_data_of_its_options(job_of, tmp_path):
    write_mnist(tmp_path, 320, 101)
    words = ("--data", "mnist", "--data-dir", tmp_path, "--model", "shallow", "--epochs", 1, "--seed", 3)
    with mock.patch("mnist.load_data", wraps=mnist.load_data) as load_data:
        stdout = job_of("mnist_FSDP.py", *words, "--output", tmp_path / "command.pt")
    halves_of_mnist = [mock.call("mnist", str(tmp_path), train=half, seed=3) for half in (True, False)]
    assert load_data.mock_calls == halves_of_mnist
    assert stdout.startswith("Training on 1 x cpu: fsdp\nModel shallow: 1,199,882 parameters\n")
    options = {"epochs": 1, "batch_size": 64, "test_batch_size": 1000, "lr": 0.001}
    given = train(model=mnist.ShallowNet, data=halves(320, 101), exact=False, **options)
    assert_equal_states(torch.load(tmp_path / "command.pt", weights_only=True), given["state"], 0)


# ---- progress -----------------------------------------------------------------------------------------------------


def test_no_step_waits_for_the_loss():
    """The device is asked for it every --log-every steps."""
    counts = []
    for log_every in (1, 5, 100):
        with host_reads() as reads:
            train(epochs=1, log_every=log_every)
        counts.append(len(reads))
    assert counts[0] - counts[2] == STEPS and counts[1] - counts[2] == STEPS // 5


# ---- real digits --------------------------------------------------------------------------------------------------


def without_dropout():
    """Its masks would differ between numbers of processes."""
    net = mnist.ShallowNet()
    net.dropout1.p = net.dropout2.p = 0
    return net


def real_worker(local_rank, world_size, strategy):
    dist.init_process_group()
    data = [mnist.load_data("mnist", MNIST_ROOT, half) for half in (True, False)]
    some = [mnist.Digits(each.images[:600], each.labels[:600]) for each in data]
    options = {"strategy": strategy, "epochs": 1, "batch_size": 64 // world_size, "min_num_params": 20_000}
    return train(model=without_dropout, data=some, **options)


@needs_mnist
@pytest.mark.slow
@pytest.mark.guard
def test_shallow_net_on_real_mnist_in_two_units_equals_local():
    sharded = dist.launch(real_worker, "fsdp", nprocs=2)
    alone = dist.launch(real_worker, "local", nprocs=1)
    assert sharded["results"][0][2:] == alone["results"][0][2:]
    assert sharded["results"][0][:2] == pytest.approx(alone["results"][0][:2], abs=1e-9)
    assert_equal_states(sharded["state"], alone["state"])
