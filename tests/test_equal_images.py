"""The image scripts and the ladder of torchrun equal one process, evaluate each sample once, and resume exactly.

A row of a test is a script and a number of processes: `test_equals_one_process[mnist_DDP-sgd-tricks-2]`. The scripts'
own tests have what they alone promise.
"""

import contextlib
import functools
import io
import multiprocessing
import os
import random
import re
import signal
from dataclasses import dataclass, field
from types import SimpleNamespace

import images
import pytest
import torch
from conftest import Left, Watch, exit_message, float64, guards, leaving_is_an_error, on_processes
from images import LINE, SIZES, STEPS, TEST_LINE, Net, Normed, Plain, Pooled, Stopped, acting, digits, halves, stop
from torch.multiprocessing import ProcessExitedException
from torch.utils.data import Subset

import distributed as dist
import mnist
import mnist_DDP
import mnist_FSDP
import spawn

IMAGES = {"mnist_DDP": mnist_DDP, "mnist_FSDP": mnist_FSDP}
each_image_script = pytest.mark.parametrize("script", IMAGES)
each_script = pytest.mark.parametrize("script", images.TRAIN)


@dataclass
class Case:
    """What a script trains. `kind` makes its data sets of those of `images.halves`."""

    script: str
    optimizer: str
    options: dict = field(default_factory=dict)
    model: type = Net
    kind: type | None = None
    about: str = ""

    def __str__(self):
        return "-".join(filter(None, [self.script, self.optimizer, self.about]))

    def train(self):
        given = halves(*SIZES, self.kind) if self.kind else None
        return images.train(self.script, self.optimizer, self.model, given, **self.options)


def subset(data):
    return Subset(data, range(len(data)))


TRICKS = {"accumulate": 3, "clip": 4.0}  # with 22 samples per step, 4 processes have unequal micro-batches
DDP = {"strategy": "ddp"}
CASES = [
    Case("mnist_DDP", "sgd"),
    Case("mnist_DDP", "sgd", TRICKS, about="tricks"),
    Case("mnist_DDP", "layerwise", TRICKS),
    Case("mnist_DDP", "sgd", {**TRICKS, "log_every": 100}, kind=Plain, about="rare lines"),
    Case("mnist_FSDP", "sgd"),
    Case("mnist_FSDP", "sgd", DDP, about="ddp"),
    Case("mnist_FSDP", "adam", {**DDP, "log_every": 7}, kind=subset, about="ddp"),
    Case("mnist_FSDP", "layerwise", model=Pooled),
    Case("mnist_FSDP", "adam", {"checkpoint_dir": "checkpoints"}, kind=Plain, about="saved"),
    Case("multigpu_torchrun", "sgd"),
    Case("multigpu_torchrun", "adam"),
    Case("multinode_torchrun", "sgd"),
    Case("multinode_torchrun", "adam"),
]

# ---- one process ----------------------------------------------------------------------------------------------------


@functools.cache
def reference(script, optimizer, model, clip, epochs, ranks):
    """Weights, (loss, samples) of every step and results of every epoch, by plain PyTorch in one process."""
    clipped, how = [], {"model": model}
    takes_whole_batches = script in ("mnist_DDP", "multinode_torchrun")

    def order_of(epoch):
        seed = epoch if script == "multinode_torchrun" else 3 + epoch
        order = torch.randperm(SIZES[0], generator=torch.Generator().manual_seed(seed))
        if takes_whole_batches:
            return order[: 22 * STEPS]
        return torch.cat([order, order[: -SIZES[0] % ranks]])  # a sampler gives all ranks equally many

    def schedule_and_clip(net, optimizer):
        for group in optimizer.param_groups:
            group.setdefault("initial", group["lr"])
            group["lr"] = group["initial"] * images.rate_of(len(clipped) / (epochs * STEPS))
        norm = sum((param.grad**2).sum() for param in net.parameters()).sqrt()
        clipped.append(bool(clip and norm > clip))
        if clipped[-1]:
            for param in net.parameters():
                param.grad *= clip / (norm + 1e-6)  # as torch adds it

    if script == "mnist_DDP":
        how["before_step"] = schedule_and_clip
    if script.endswith("_torchrun"):
        how["loss_of"] = images.squared_error
    rates, batch = [images.LR[optimizer]] * epochs, 22 if takes_whole_batches else 24
    result = images.train_alone(images.OPTIMIZERS[optimizer], rates, SIZES, batch, order_of=order_of, **how)
    assert not clip or 0 < sum(clipped) < len(clipped), "some steps are clipped"
    return result


def expected_lines(script, losses, every=1):
    """(number, mean loss) of each line about training: of so many steps, or of an epoch on the ladder."""
    lines = []
    for epoch in range(len(losses) // STEPS):
        of_epoch = losses[epoch * STEPS :][:STEPS]
        if script.endswith("_torchrun"):
            lines.append((epoch, mean(of_epoch)))
            continue
        for step in range(1, STEPS + 1):
            number = epoch * STEPS + step
            if script == "mnist_FSDP" and number % every == 0:  # of the epoch so far
                lines.append((number, mean(of_epoch[:step])))
            if script == "mnist_DDP" and (step == STEPS or every == 1):  # since the last line
                lines.append((number, mean(of_epoch[max(0, step - every) : step])))
    return lines


def mean(losses):
    return sum(loss * n for loss, n in losses) / sum(n for _, n in losses)


@on_processes(1, 2, *guards(3, 4))
@pytest.mark.parametrize("case", CASES, ids=str)
@float64()
def test_equals_one_process(case):
    """In weights, printed losses and results. Each sample of the test counts once."""
    n, args = dist.get_world_size(), SimpleNamespace(**images.OPTIONS[case.script] | case.options)
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        state, results = case.train()
    clip, drawn = getattr(args, "clip", 0), [*map(float, Net.drawn)]
    expected, losses, tests = reference(case.script, case.optimizer, case.model, clip, args.epochs, n)
    images.assert_equal_states(state, expected, 1e-12 if case.optimizer == "sgd" else 1e-9)
    lines = [(int(number), float(loss)) for number, loss in LINE.findall(stdout.getvalue())]
    tested = [(float(loss), int(hits), int(n)) for _, loss, _, hits, n in TEST_LINE.findall(stdout.getvalue())]
    of_epochs = [float(loss) for loss in re.findall(r"^epoch .*? loss (\S+)", stdout.getvalue(), re.M)]
    if dist.is_primary():
        expected = expected_lines(case.script, losses, args.log_every)
        assert lines == [(number, pytest.approx(loss, abs=6e-5)) for number, loss in expected]
        assert tested == [(pytest.approx(loss, abs=6e-5), *counts) for loss, *counts in tests if case.script in IMAGES]
        means = [mean(losses[:STEPS]), mean(losses[STEPS:])] if case.script == "mnist_FSDP" else []
        assert of_epochs == pytest.approx(means, abs=6e-5)
    else:
        assert lines == tested == [], "rank 0 alone prints"
    if case.script in IMAGES:
        assert results == [(pytest.approx(loss, abs=1e-9), hits / n) for loss, hits, n in tests]
    before = int(n > 1 and case.script != "mnist_FSDP")  # a forward pass to arrange DDP's buckets
    every = [number for numbers in dist.gather_objects(drawn) for number in numbers[before:]]
    assert len(every) == n * getattr(args, "accumulate", 1) * args.epochs * STEPS
    assert len(set(every)) == len(every), "dropout differs between ranks, steps and micro-batches"


# ---- stopped and resumed --------------------------------------------------------------------------------------------


def printed(stdout):
    """What it says about training and tests, in any order and number."""
    return {*LINE.findall(stdout.getvalue()), *TEST_LINE.findall(stdout.getvalue())}


@on_processes(1, 2, *guards(3))
@each_script
def test_stopped_and_resumed_it_ends_with_the_same_bits(script):
    """With batch norm, dropout, augmentation, which another process may do, and lines between the snapshots."""
    more = {"accumulate": 2, "clip": 4.0, "log_every": 3, "save_every": 2 if script == "mnist_DDP" else 1}

    def train(where, model=Normed, num_workers=0):
        paths = {"snapshot_path": where, "checkpoint_dir": f"{where} folder"}
        options = {**more, **paths, "output": f"{where}.pt", "num_workers": num_workers}
        train_set, test_set = halves(*SIZES)
        return images.train(script, "sgd", model, (images.Noisy(train_set), test_set), **options)

    with contextlib.redirect_stdout(io.StringIO()) as at_once:
        expected, _ = train("at once")
    with contextlib.redirect_stdout(io.StringIO()) as in_parts:
        for at in (5, 18, 8):
            torch.manual_seed(at)  # no random number from before counts
            with pytest.raises(Stopped):
                train("in parts", acting(at, stop, Normed), num_workers=int(script == "mnist_DDP"))
    with contextlib.redirect_stdout(io.StringIO()) as last:
        state, _ = train("in parts")
    images.assert_equal_states(state, expected, 0)
    assert printed(in_parts) | printed(last) == printed(at_once)
    if dist.is_primary():
        assert LINE.search(last.getvalue())[0] != LINE.search(at_once.getvalue())[0], "it went on"


@on_processes(1, 2, *guards(3))
@pytest.mark.parametrize("script", ["mnist_DDP", "multinode_torchrun"])
def test_sigterm_to_one_rank_loses_no_step(script):
    """Inside an epoch, in the last step of one, and in the last of all, after which nothing is left to do."""
    options, stdout = {"save_every": 100, "num_workers": 1}, io.StringIO()

    def terminate():
        """As torchrun and SLURM do, which signal the processes that load too."""
        for loading in multiprocessing.active_children():
            loading.terminate()
            loading.join(0.1)
            assert loading.is_alive()
        if dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    expected, _ = images.train(script, "sgd", Normed, **options, snapshot_path="at once.pt")
    done = 0
    for leaves in (7, STEPS, 2 * STEPS):
        # Several ranks leave one step later, but the first of their forward passes arranges DDP's buckets.
        model = acting(leaves - done, terminate, Normed)
        left = pytest.raises(Left) if leaves < 2 * STEPS else contextlib.nullcontext()
        with leaving_is_an_error(), left, contextlib.redirect_stdout(stdout):
            state, _ = images.train(script, "sgd", model, **options, snapshot_path="in parts.pt")
        dist.barrier()
        snapshot = torch.load("in parts.pt", weights_only=True)
        done = snapshot["step"] if script == "mnist_DDP" else STEPS * snapshot["epoch"] + snapshot["step"] // 22
        assert done == leaves, "all ranks leave after the same step"
        dist.barrier()
    images.assert_equal_states(state, expected, 0)
    if dist.is_primary() and script == "multinode_torchrun":
        assert re.findall(r"Steps: (\d+)", stdout.getvalue()) == ["7", "6", "13"]


def killed_worker(local_rank, world_size, case, at, folder):
    """The last rank is killed in its `at`-th forward pass of training."""
    os.chdir(folder)
    if at and local_rank == world_size - 1:
        case.model = acting(at, functools.partial(signal.raise_signal, signal.SIGKILL), case.model)
    with float64():
        state, _ = case.train()
    return state


SAVED = {"epochs": 3, "snapshot_path": "snapshot.pt", "checkpoint_dir": "checkpoints"}
DRAW = random.Random(1)
# In which forward passes of training the last rank is killed, and the numbers of processes before and after.
AFTER_EACH_STEP = [DRAW.randint(3, 12) for _ in range(10)], [1, 2, 3, 2, 1, 3, 3, 1, 2, 3, 2]
# Killed in the second epoch, in the third, and in that again. These numbers divide the samples: none comes twice.
AFTER_EACH_EPOCH = [16, 16, 5], [3, 1, 1, 3]
KILLED = [
    Case("mnist_DDP", "sgd", {**TRICKS, **SAVED, "accumulate": 2}),
    Case("mnist_FSDP", "layerwise", SAVED, Pooled),
    Case("mnist_FSDP", "adam", SAVED),
    Case("multigpu_torchrun", "adam", SAVED),
    Case("multinode_torchrun", "adam", SAVED),
]


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("case", KILLED, ids=str)
def test_killed_and_continued_by_other_numbers_of_processes_it_equals_one(case, tmp_path, capfd):
    """The same curve and weights as one process has that nobody kills."""
    moments, numbers = AFTER_EACH_STEP if case.script == "mnist_DDP" else AFTER_EACH_EPOCH
    for n, at in zip(numbers, [*moments, None], strict=True):
        if case.script == "mnist_FSDP":
            ends_as_ddp = not at and case.model is Net  # DDP wants a gradient of each layer
            case.options = {**case.options, "strategy": "ddp" if ends_as_ddp else "fsdp"}
        killed = pytest.raises(ProcessExitedException, match=f"^rank {n - 1} was killed by SIGKILL$")
        with killed if at else contextlib.nullcontext():
            state = spawn.run_processes(dist._run_worker, (killed_worker, case, at, str(tmp_path)), n)
    clip = case.options.get("clip", 0)
    expected, losses, _ = reference(case.script, case.optimizer, case.model, clip, 3, 1)
    images.assert_equal_states(state, expected)
    expected = dict(expected_lines(case.script, losses))
    lines = [(int(number), float(loss)) for number, loss in LINE.findall(capfd.readouterr().out)]
    assert [loss for _, loss in lines] == pytest.approx([expected[number] for number, _ in lines], abs=6e-5)
    if case.script != "multigpu_torchrun":  # whose last lines are lost in a kill
        assert {number for number, _ in lines} == expected.keys()


REFUSED = {
    "mnist_DDP": {"global_batch_size": 20, "lr": 0.5, "clip": 0.5, "bf16": True, "seed": 7},
    "mnist_FSDP": {"lr": 0.5, "bf16": True, "seed": 7},
}


@each_script
def test_a_snapshot_of_other_settings_or_samples_is_refused(script, tmp_path):
    paths = {"output": f"{tmp_path}/cnn.pt", "snapshot_path": f"{tmp_path}/saved.pt", "checkpoint_dir": tmp_path / "c"}
    train = functools.partial(images.train, script, **paths)
    train(epochs=1)
    for name, value in REFUSED.get(script, {}).items():
        message = exit_message(train, **{name: value})
        assert f"was saved with --{name.replace('_', '-')} " in message and f", not {value}: " in message
    assert "was saved with training samples 303, not 310: " in exit_message(train, data=halves(310, 101))


# ---- evaluation -----------------------------------------------------------------------------------------------------


@on_processes(1, 2, 3)
@pytest.mark.parametrize("size", [60, 2, 1])
@each_image_script
@float64()
def test_any_number_of_ranks_evaluates_as_one_process(script, size):
    """Also fewer samples than ranks, and a sharded model, which no rank may leave early."""
    net, device = Net(), dist.get_device()
    expected = images.result_of(net, digits(size))
    args = SimpleNamespace(**images.OPTIONS[script], batch_size=11)
    if script == "mnist_DDP":
        given = mnist_DDP.evaluate(net, digits(size), device, args)
    else:
        net = dist.prepare_fsdp_model(net, (torch.nn.Linear,))
        _, loader = mnist_FSDP.make_loaders(digits(size), digits(size), args, device)
        given = mnist_FSDP.evaluate(net, loader, device, False)
    assert given == (pytest.approx(expected[0], rel=1e-12), *expected[1:])


@on_processes(*guards(2))
@each_image_script
@float64()
def test_what_is_evaluated_is_what_is_written(script):
    """With batch norm, of which each rank has its own buffers."""
    _, results = images.train(script, "sgd", Normed, lr=0.01)
    dist.barrier()
    net = Normed()
    net.load_state_dict(torch.load("model.pt", weights_only=True))
    loss, hits, n = images.result_of(net, halves(*SIZES)[1])
    assert results[-1] == (pytest.approx(loss, abs=1e-9), hits / n) and hits > 0.3 * n


# ---- what is the same for all ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", [True, False])
@each_image_script
def test_bf16_is_for_training_and_evaluation_and_not_for_losses(script, bf16, tmp_path):
    dtype, seen = torch.bfloat16 if bf16 else torch.float32, []

    def build():
        net = Net()
        net.register_forward_hook(lambda net, inputs, outputs: seen.append((net.training, outputs.dtype)))
        return net

    images.train(script, "sgd", build, epochs=1, bf16=bf16, output=str(tmp_path / "model.pt"))
    assert set(seen) == {(True, dtype), (False, dtype)}
    batch, labels = digits(8).__getitems__(range(8))
    *_, losses = IMAGES[script].forward(Net(), batch, labels, torch.device("cpu"), bf16)
    assert losses.dtype == torch.float32


@each_image_script
def test_no_step_waits_for_the_device(script, tmp_path):
    """The host reads no value in a step, as a print or an if would."""
    with Watch() as watch:
        images.train(script, epochs=1, log_every=100, output=f"{tmp_path}/model.pt")
    assert watch.host_reads < STEPS


@each_image_script
def test_a_full_disk_leaves_the_old_file(script, tmp_path):
    path = tmp_path / "model.pt"
    path.write_text("old")
    path.with_name("model.pt.0.tmp").symlink_to("/dev/full")
    message = exit_message(images.train, script, epochs=1, output=str(path))
    assert message.startswith(f"cannot save {path}") and "No space left on device" in message
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"model.pt": "old"}


COMMANDS = {
    "mnist_DDP": ([], mnist.SimpleCNN, "sgd", {"global_batch_size": 128, "lr": 0.05}),
    "mnist_FSDP": (["--model", "shallow", "--batch-size", 24], mnist.ShallowNet, "adam", {"lr": 0.001}),
}


@pytest.mark.filterwarnings("ignore:Found GPU")
@each_image_script
def test_the_command_trains_the_model_and_the_data_of_its_options(script, job_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images.write_mnist(tmp_path, 320, 101)
    more, model, optimizer, options = COMMANDS[script]
    words = ("--data", "mnist", "--data-dir", tmp_path, "--epochs", 1, "--seed", 3, "--output", "command.pt", *more)
    assert job_of(f"{script}.py", *words).startswith("Training on 1 x cpu")
    state, _ = images.train(script, optimizer, model, halves(320, 101), epochs=1, **options)
    images.assert_equal_states(torch.load("command.pt", weights_only=True), state, 0)
