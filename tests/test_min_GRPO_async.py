"""min_GRPO_async.py: each shard arrives bit for bit, no byte too many is sent, and it learns as min_GRPO.py does."""

import contextlib
import copy
import datetime
import functools
import io
import re
import time
from unittest import mock

import pytest
import test_min_GRPO as synchronous
import torch
import torch.distributed as torch_dist
import transformer
from conftest import float64, guards, slow
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import distributed as dist
import min_GRPO
import min_GRPO_async

MESHES = [(2, 1), (3, 2)]  # trainers and generators
MESHES += guards((1, 1), (1, 2), (2, 2), (2, 4))
LINE = re.compile(
    r"step (\d+)/\d+ \| reward (\d\.\d{3}) \| mismatch (\de[+-]\d\d) \| "
    r"clipped (\d\.\d{3}) \| age (\d) \| [\d,]+ answers/s"
)


# ---- the move -------------------------------------------------------------------------------------------------------


def make_network():
    """Sizes that 2, 3 and 4 do not divide, and a norm of 2 numbers: of 3 or 4 ranks some get none."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 10), nn.Linear(10, 5), nn.Linear(5, 2), nn.LayerNorm(2))


def move_between(n_trainers, folder):
    """What this rank has received, what it should have, and the bytes that it has sent and received."""
    dist.init_process_group()
    ranks = list(range(dist.get_world_size()))
    trainers, generators = DeviceMesh("cpu", ranks[:n_trainers]), DeviceMesh("cpu", ranks[n_trainers:])
    model, whole = make_network(), make_network()
    is_trainer = dist.get_rank() < n_trainers
    if is_trainer:
        fully_shard(model[0], mesh=trainers)
        fully_shard(model, mesh=trainers)
    elif len(ranks) - n_trainers > 1:
        parallelize_module(model, generators, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        model[2].weight = nn.Parameter(distribute_tensor(model[2].weight.data, generators, [Shard(1)]))
    if not is_trainer:
        with torch.no_grad():
            for param in model.parameters():
                transformer.local(param).fill_(-1)
    sent = {"isend": 0, "irecv": 0}
    own_op = torch_dist.P2POp

    def counted(function, tensor, peer):
        assert tensor.is_contiguous()
        sent[function.__name__] += tensor.nbytes
        return own_op(function, tensor, peer)

    move = min_GRPO_async.Move(model.named_parameters(), ranks[:n_trainers], ranks[n_trainers:])
    with mock.patch.object(torch_dist, "P2POp", counted):
        for factor in (1, 2):  # the second move brings what the optimizer has changed since
            move()
            move.wait()
            with torch.no_grad():
                for (name, param), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
                    own, expected = transformer.local(param), factor * expected
                    for dim, (begin, size) in enumerate(zip(*move.boxes[name], strict=True)):
                        expected = expected.narrow(dim, begin, size)
                    assert torch.equal(own, expected), f"{name} on rank {dist.get_rank()}"
                    if is_trainer:
                        own *= 2
    held = sum(transformer.local(param).nbytes for param in model.parameters())
    assert sent["irecv"] == (0 if is_trainer else 2 * held), "each byte that is held, once"
    total = dist.all_reduce(torch.tensor([sent["isend"], sent["irecv"]]))
    assert total[0] == total[1]
    n_empty = sum(transformer.local(param).numel() == 0 for param in model.parameters())
    torch.save(n_empty, f"{folder}/{dist.get_rank()}.pt")


def _move_between(local_rank, world_size, n_trainers, folder):
    move_between(n_trainers, folder)


@pytest.mark.parametrize("mesh", MESHES)
def test_every_shard_arrives_bit_for_bit_and_nothing_else_is_sent(mesh, tmp_path):
    n_trainers, n_generators = mesh
    dist.launch(_move_between, n_trainers, str(tmp_path), nprocs=n_trainers + n_generators)
    empty = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(n_trainers + n_generators)]
    assert (sum(empty) > 0) == (mesh in [(3, 2), (2, 4)]), "some ranks hold nothing of a tensor"


def refuse_models_that_differ(local_rank, world_size):
    dist.init_process_group()
    first = {"a": torch.zeros(4), "b": torch.zeros(4)}
    mistakes = [
        {"b": torch.zeros(4), "a": torch.zeros(4)},
        {**first, "a": torch.zeros(4).double()},
        {**first, "a": torch.zeros(5)},
        {"a": torch.zeros(4)},
        {**first, "c": torch.zeros(4)},
    ]
    for other in mistakes:
        params = first if local_rank == 0 else other
        with pytest.raises(dist.DistributedError, match="the list of parameters of rank 1 differs from rank 0's"):
            min_GRPO_async.Move(params.items(), [0], [1])


def test_models_that_differ_are_refused():
    dist.launch(refuse_models_that_differ, nprocs=2)


def test_the_intersection_of_two_boxes():
    assert min_GRPO_async.intersection(([2, 0], [2, 4]), ([0, 2], [6, 2])) == ([2, 2], [2, 2])
    assert min_GRPO_async.intersection(([2], [2]), ([4], [3])) is None, "they touch"
    assert min_GRPO_async.intersection(([2, 0], [0, 4]), ([0, 0], [6, 4])) is None, "one is empty"
    assert min_GRPO_async.intersection(([], []), ([], [])) == ([], []), "a single number"


def gather_and_send(by_boxes, folder):
    """Two trainers and a generator, which takes its weights when rank 1 tells it to. Saves what stops each rank."""
    dist.init_process_group(timeout=datetime.timedelta(seconds=4))
    rank = dist.get_rank()
    trainers = DeviceMesh("cpu", [0, 1])
    DeviceMesh("cpu", [2])  # every rank makes both
    model = make_network()
    if rank < 2:
        fully_shard(model, mesh=trainers)
    move = min_GRPO_async.Move(model.named_parameters(), [0, 1], [2])
    go = torch.zeros(1)
    error = ""
    try:
        if rank == 2:
            torch_dist.recv(go, 1, tag=1)
        if by_boxes:
            move()
        else:
            for param in model.parameters():
                whole = param.full_tensor() if rank < 2 else param.detach()
                if rank == 0:
                    torch_dist.send(whole.contiguous(), 2)
                elif rank == 2:
                    torch_dist.recv(whole, 0)
        if rank == 1:
            torch_dist.send(go, 2, tag=1)
        move.wait()
    except RuntimeError as failure:
        error = str(failure)
    torch.save(error, f"{folder}/{rank}.pt")


def _gather_and_send(local_rank, world_size, by_boxes, folder):
    gather_and_send(by_boxes, folder)


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("by_boxes", [True, False])
def test_rank_0_must_not_send_between_two_gathers(by_boxes, tmp_path):
    """Rank 0 waits for the generator, the generator for rank 1, and rank 1 for rank 0, in the next gather."""
    with contextlib.nullcontext() if by_boxes else contextlib.suppress(Exception):
        dist.launch(_gather_and_send, by_boxes, str(tmp_path), nprocs=3)
    errors = [torch.load(path, weights_only=True) for path in sorted(tmp_path.glob("*.pt"))]
    assert len(errors) == 3 if by_boxes else len(errors) > 0
    assert all(("timed out" in error.lower() or "closed" in error.lower()) != by_boxes for error in errors), errors


# ---- training -------------------------------------------------------------------------------------------------------


def train(case, generators, staleness):
    """What the script's main_worker trains on this rank, and prints."""
    optimizer_name, sparse, changes = synchronous.CASES[case]
    args = synchronous.arguments(**changes, generators=generators, staleness=staleness, log_every=1)
    result = {}
    adamw, own_train = torch.optim.AdamW, min_GRPO_async.train

    def recorded_train(model, *rest):
        own_train(model, *rest)
        # By hand, because the mesh has the trainers alone, and a model of one has no need to gather.
        result["parameters"] = transformer.full_parameters(model)

    stdout = io.StringIO()
    with (
        mock.patch.object(min_GRPO, "reward", functools.partial(synchronous.partial_reward, sparse)),
        mock.patch.object(min_GRPO_async, "train", recorded_train),
        synchronous.small(),
        mock.patch(
            "torch.optim.AdamW",
            lambda params, lr, fused: synchronous.make_optimizer(optimizer_name, adamw, params, lr),
        ),
        contextlib.redirect_stdout(stdout),
    ):
        min_GRPO_async.main_worker(dist.get_local_rank(), dist.get_world_size(), args)
    result["stdout"] = stdout.getvalue()
    return result


def check_equal(results, expected, n_trainers):
    for rank, result in enumerate(results):
        assert ("parameters" in result) == (rank < n_trainers)
        for name, value in result.get("parameters", {}).items():
            assert value.dtype == torch.float64
            assert (value - expected[name]).abs().max() <= 1e-9, name


@pytest.mark.slow
@pytest.mark.guard
@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)])
def test_without_staleness_it_equals_one_answer_at_a_time(mesh, tmp_path):
    n_trainers, n_generators = mesh
    cases = range(len(synchronous.CASES))
    runs = [(case, n_generators, 0) for case in cases]
    by_rank = transformer.train_on(sum(mesh), train, runs, tmp_path)
    for number, case in enumerate(cases):
        parameters, _, rewards, _ = synchronous.reference(case)
        check_equal([results[number] for results in by_rank], parameters, n_trainers)
        lines = by_rank[0][number]["stdout"].splitlines()
        numbers = [LINE.fullmatch(line).groups() for line in lines]
        assert [line[0] for line in numbers] == ["1", "2", "3"]
        assert [float(line[1]) for line in numbers] == pytest.approx(rewards, abs=0.0006)
        assert all(float(line[2]) < 1e-12 for line in numbers) and {line[4] for line in numbers} == {"0"}
        assert not any(results[number]["stdout"] for results in by_rank[1:])


@functools.cache
def delayed_reference(case):
    """One process, one answer at a time: the answers of a step are drawn by the weights before the step before it."""
    optimizer_name, sparse, changes = synchronous.CASES[case]
    args = synchronous.arguments(**changes)
    model = copy.deepcopy(synchronous.imitator())
    history, rewards = [], []
    with float64(), synchronous.small():
        optimizer = synchronous.make_optimizer(optimizer_name, torch.optim.AdamW, model.parameters(), args.lr)
        for step in range(args.steps):
            history.append(copy.deepcopy(model))
            drawing = history[max(step - 1, 0)]
            batch, of_step = synchronous.draw_all(drawing, step, sparse, args)
            n_bytes = sum(len(answer) for _, answer, *_ in batch)
            for _ in range(args.inner_steps):
                loss = sum(synchronous.loss_of_answer(model, args, *answer) for answer in batch) / n_bytes
                transformer.take_step(model, optimizer, loss)
            rewards.append(sum(of_step) / len(of_step))
    return transformer.full_parameters(model), rewards


@pytest.mark.parametrize("mesh", [*guards((2, 1)), *slow((3, 2))])
def test_with_staleness_it_equals_one_process_with_the_same_delay(mesh, tmp_path):
    n_trainers, n_generators = mesh
    cases = [0, 2]  # SGD, and AdamW with two inner steps
    by_rank = transformer.train_on(sum(mesh), train, [(case, n_generators, 1) for case in cases], tmp_path)
    for number, case in enumerate(cases):
        parameters, rewards = delayed_reference(case)
        undelayed, *_ = synchronous.reference(case)
        assert max((parameters[name] - undelayed[name]).abs().max() for name in parameters) > 1e-5
        check_equal([results[number] for results in by_rank], parameters, n_trainers)
        lines = by_rank[0][number]["stdout"].splitlines()
        numbers = [LINE.fullmatch(line).groups() for line in lines]
        assert [line[4] for line in numbers] == ["0", "1", "1"]
        assert [float(line[1]) for line in numbers] == pytest.approx(rewards, abs=0.0006)
        assert float(numbers[0][2]) < 1e-12 < 1e-6 < float(numbers[2][2]), (
            "the generators' probabilities are in the ratio"
        )


# ---- at the same time -----------------------------------------------------------------------------------------------


def train_with_a_slow_half(local_rank, world_size, staleness, slow_half, folder):
    """Five steps in which one half is slow. Saves the seconds that this rank has waited for the others."""
    args = synchronous.arguments(imitation_steps=1, steps=5, generators=1, staleness=staleness, log_every=1)
    module, name = (min_GRPO_async, "receive_completions")
    own = getattr(module, name)
    own_draw = min_GRPO.draw_completions
    events = []

    def receive(*args):
        if slow_half == "trainers":
            time.sleep(0.3)
        answers = own(*args)
        events.append("answers")
        return answers

    def draw(*args):
        if slow_half == "generators":
            time.sleep(0.3)
        return own_draw(*args)

    with (
        synchronous.small(),
        mock.patch.object(module, name, receive),
        mock.patch.object(min_GRPO, "draw_completions", draw),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        min_GRPO_async.main_worker(local_rank, world_size, args)
    torch.save(len(events), f"{folder}/{local_rank}.pt")


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("slow_half", ["trainers", "generators"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_slow_half_makes_the_other_wait_and_all_answers_are_learned(staleness, slow_half, tmp_path):
    dist.launch(train_with_a_slow_half, staleness, slow_half, str(tmp_path), nprocs=3)
    assert [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(3)] == [5, 5, 0]


def die(local_rank, world_size, dying):
    args = synchronous.arguments(imitation_steps=1, generators=1, staleness=1, log_every=1)

    def fail(*args):
        raise ZeroDivisionError(f"rank {local_rank} fails")

    name = "send_completions" if dying == 2 else "receive_completions"
    patch = mock.patch.object(min_GRPO_async, name, fail) if local_rank == dying else contextlib.nullcontext()
    with synchronous.small(), patch:
        min_GRPO_async.main_worker(local_rank, world_size, args)


@pytest.mark.slow
@pytest.mark.parametrize("dying", [1, 2])
def test_a_rank_that_fails_ends_the_job(dying, capfd):
    with pytest.raises(Exception, match=f"rank {dying} fails"):
        dist.launch(die, dying, nprocs=3)


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (["--nproc", "1"], "--nproc: 1 is less than 2"),
        (["--nproc", "4", "--generators", "4"], "--nproc: 4 is less than 5"),
        (["--nproc", "4", "--generators", "3"], "--generators: 3 does not divide the 4 heads"),
        (["--nproc", "4", "--prompts", "2"], "--prompts: 2 is less than 3"),
        (["--nproc", "2", "--staleness", "2"], "--staleness: invalid choice: 2"),
    ],
)
def test_options_that_do_not_fit(options, words, main_of):
    status, stderr = main_of("min_GRPO_async.py", *options)
    assert status == 2 and words in stderr and stderr.count("\n") == 1


@pytest.mark.slow
def test_it_learns(job_of):
    first, *lines, last = job_of("min_GRPO_async.py", "--nproc", 2, "--steps", 60).splitlines()
    numbers = [LINE.fullmatch(line).groups() for line in lines]
    assert float(numbers[0][1]) + 0.2 < float(numbers[-1][1]), "the reward"
    assert float(first.split()[-1]) + 0.02 < float(last.split()[-1]), "held-out prompts"
