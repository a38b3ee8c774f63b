"""min_GRPO_async.py: each shard arrives bit for bit, no byte too many is sent, and it learns as min_GRPO.py does."""

import contextlib
import functools
import io
import math
import re

import pytest
import torch
import torch.distributed as torch_dist
from conftest import exit_message, float64, guards, on_processes, slow
from test_min_GRPO import CASES, arguments, partial_reward, reference, small, with_optimizer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformer import local

import distributed as dist
import min_GRPO_async

LINE = re.compile(
    r"step (\d+)/\d+ \| reward (\d\.\d{3}) \| mismatch (\de[+-]\d\d) \| "
    r"clipped (\d\.\d{3}) \| age (\d) \| [\d,]+ answers/s"
)


# ---- the move -------------------------------------------------------------------------------------------------------


def make_network():
    """Sizes that 2, 3 and 4 do not divide, and a norm of 2 numbers: of 3 or 4 ranks some get none."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 10), nn.Linear(10, 5), nn.Linear(5, 2), nn.LayerNorm(2))


TRAINERS = {2: [1], 3: [2, 1], 4: [2], 5: [3], 6: [2]}  # of so many processes, the others generate


@on_processes(3, 5, *guards(2, 4, 6))
def test_every_shard_arrives_bit_for_bit_and_nothing_else_is_sent():
    ranks = list(range(dist.get_world_size()))
    for n_trainers in TRAINERS[len(ranks)]:
        trainers, generators = DeviceMesh("cpu", ranks[:n_trainers]), DeviceMesh("cpu", ranks[n_trainers:])
        model, whole = make_network(), make_network()
        is_trainer = dist.get_rank() < n_trainers
        if is_trainer:
            fully_shard(model[0], mesh=trainers)
            fully_shard(model, mesh=trainers)
        elif len(ranks) - n_trainers > 1:
            parallelize_module(model, generators, {"0": ColwiseParallel(), "1": RowwiseParallel()})
            model[2].weight = nn.Parameter(distribute_tensor(model[2].weight.data, generators, [Shard(1)]))
        own = [local(param.detach()) for param in model.parameters()]
        if not is_trainer:
            for tensor in own:
                tensor.fill_(-1)
        move = min_GRPO_async.Move(model.named_parameters(), ranks[:n_trainers], ranks[n_trainers:])
        for factor in (1, 2):  # the second move brings what the optimizer has changed since
            move()
            move.wait()
            for tensor, (name, expected) in zip(own, whole.named_parameters(), strict=True):
                for dim, (begin, size) in enumerate(zip(*move.boxes[name], strict=True)):
                    expected = expected.narrow(dim, begin, size)
                assert torch.equal(tensor, factor * expected), f"{name} on rank {dist.get_rank()}"
                if is_trainer:
                    tensor *= 2
        received = [math.prod(sizes) for _, _, receiver, (_, sizes) in move.parts if receiver == dist.get_rank()]
        assert sum(received) == (0 if is_trainer else sum(tensor.numel() for tensor in own)), "what it holds, once"
        n_empty = sum(dist.gather_objects(sum(tensor.numel() == 0 for tensor in own)))
        assert (n_empty > 0) == (len(ranks) > 4), "some ranks hold nothing of a tensor"


@on_processes(2)
def test_models_that_differ_are_refused():
    first = {"a": torch.zeros(4), "b": torch.zeros(4)}
    mistakes = [
        {"b": torch.zeros(4), "a": torch.zeros(4)},
        {**first, "a": torch.zeros(4).double()},
        {**first, "a": torch.zeros(5)},
        {"a": torch.zeros(4)},
        {**first, "c": torch.zeros(4)},
    ]
    for other in mistakes:
        params = other if dist.get_rank() == 1 else first
        line = exit_message(min_GRPO_async.Move, params.items(), [0], [1])
        assert line.startswith("the list of parameters of rank 1 differs from rank 0's")


def test_the_intersection_of_two_boxes():
    assert min_GRPO_async.intersection(([2, 0], [2, 4]), ([0, 2], [6, 2])) == ([2, 2], [2, 2])
    assert min_GRPO_async.intersection(([2], [2]), ([4], [3])) is None, "they touch"
    assert min_GRPO_async.intersection(([2, 0], [0, 4]), ([0, 0], [6, 4])) is None, "one is empty"
    assert min_GRPO_async.intersection(([], []), ([], [])) == ([], []), "a single number"


@on_processes(*guards(3))
def test_no_trainer_waits_for_another_one_or_for_the_generator():
    """The generator takes its weights when rank 1 tells it to, which it does after its own part of the move."""
    rank = dist.get_rank()
    trainers = DeviceMesh("cpu", [0, 1])
    DeviceMesh("cpu", [2])  # every rank makes both
    model = make_network()
    if rank < 2:
        fully_shard(model, mesh=trainers)
    move = min_GRPO_async.Move(model.named_parameters(), [0, 1], [2])
    go = torch.zeros(1)
    if rank == 2:
        torch_dist.recv(go, 1, tag=1)
    move()
    if rank == 1:
        torch_dist.send(go, 2, tag=1)
    move.wait()


# ---- training -------------------------------------------------------------------------------------------------------


def check_equal(case, generators, staleness):
    """main_worker saves the parameters of one process. Returns the numbers that rank 0 prints, as text."""
    optimizer_name, sparse, changes = CASES[case]
    args = arguments(**changes, generators=generators, staleness=staleness, output="model.pt")
    expected, rewards, *_ = reference(case, delay=staleness)
    with (
        small(reward=functools.partial(partial_reward, sparse)),
        with_optimizer(optimizer_name),
        contextlib.redirect_stdout(io.StringIO()) as stdout,
    ):
        min_GRPO_async.main_worker(dist.get_local_rank(), dist.get_world_size(), args)
    dist.barrier()  # until it is saved
    parameters = torch.load("model.pt", weights_only=True)["model"]
    for name, value in expected.items():
        assert parameters[name].dtype == torch.float64
        assert (parameters[name] - value).abs().max() <= 1e-9, name
    of_ranks = dist.gather_objects(stdout.getvalue())
    assert not any(of_ranks[1:])
    numbers = [LINE.fullmatch(line).groups() for line in of_ranks[0].splitlines()]
    assert [line[0] for line in numbers] == ["1", "2", "3"]
    assert [float(line[1]) for line in numbers] == pytest.approx(rewards, abs=0.0006)
    return numbers


@on_processes(*guards(2, 4))
@pytest.mark.parametrize("case", range(len(CASES)))
@float64()
def test_without_staleness_it_equals_one_answer_at_a_time(case):
    numbers = check_equal(case, generators=dist.get_world_size() // 2, staleness=0)
    assert all(float(line[2]) < 1e-12 for line in numbers) and {line[4] for line in numbers} == {"0"}


@on_processes(*guards(3), *slow(5))
@pytest.mark.parametrize("case", [0, 2])  # SGD, and AdamW with two inner steps
@float64()
def test_with_staleness_it_equals_one_process_with_the_same_delay(case):
    numbers = check_equal(case, generators=dist.get_world_size() // 2, staleness=1)
    assert [line[4] for line in numbers] == ["0", "1", "1"]
    assert float(numbers[0][2]) < 1e-12 < 1e-6 < float(numbers[2][2]), "the generators' probabilities are in the ratio"
    (delayed, *_), (undelayed, *_) = reference(case, delay=1), reference(case)
    assert max((delayed[name] - undelayed[name]).abs().max() for name in delayed) > 1e-5


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
    lines = job_of("min_GRPO_async.py", "--nproc", 2).splitlines()
    rewards = [float(LINE.fullmatch(line)[2]) for line in lines]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.1
