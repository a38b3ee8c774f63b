"""Observers and a learner: as one process that steps all environments; one forward pass a step; observers may die."""

import argparse
import contextlib
import math
import random
import re

import pytest
import torch
from conftest import ROOT, float64, killed_in, run
from test_rpc_param_server import own_lines, without_a_late_answer
from torch import nn
from torch.multiprocessing import ProcessExitedException
from torch.nn.modules.module import register_module_forward_pre_hook

import distributed as dist
import rpc_actor_learner

SCRIPT = ROOT / "rpc_actor_learner.py"
SEED, HIDDEN, LR, UPDATES = 3, 16, 0.02, 10
LINE = re.compile(r"update (\d+)/\d+ \| (\d+) episodes \| mean return ([\d.]+) \| [\d,]+ actions/s")


def arguments(updates=UPDATES, timeout=60):
    sizes = {"hidden": HIDDEN, "lr": LR, "seed": SEED, "log_every": 5}
    return argparse.Namespace(updates=updates, timeout=timeout, **sizes)


# ---- equal to one process -------------------------------------------------------------------------------------------


def learn_and_record(local_rank, world_size):
    """The learner's returns and parameters, and the size of each batch."""
    batches = []

    def record(module, inputs):
        if isinstance(module, nn.Sequential):  # the policy
            batches.append(len(inputs[0]))

    with float64(), register_module_forward_pre_hook(record):
        rpc_actor_learner.main_worker(local_rank, world_size, arguments())
    if local_rank == 0:
        learner = rpc_actor_learner.learner
        return learner.returns, [param.detach() for param in learner.policy.parameters()], batches


def pushed(state, action):
    """Barto, Sutton and Anderson's equations."""
    x, x_dot, theta, theta_dot = state
    force = 10.0 if action else -10.0
    temp = (force + 0.05 * theta_dot**2 * math.sin(theta)) / 1.1
    theta_acc = (9.8 * math.sin(theta) - math.cos(theta) * temp) / (0.5 * (4 / 3 - 0.1 * math.cos(theta) ** 2 / 1.1))
    x_acc = temp - 0.05 * theta_acc * math.cos(theta) / 1.1
    return x + 0.02 * x_dot, x_dot + 0.02 * x_acc, theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc


@float64()
def learn_alone(n):
    """One process that steps n environments, and one backward pass through the steps of all."""
    torch.manual_seed(SEED)
    policy = nn.Sequential(nn.Linear(4, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    optimizer = torch.optim.Adam(policy.parameters(), lr=LR)
    all_returns, batches = [], []
    for episode in range(UPDATES):
        states = {}
        for i in range(1, n + 1):
            draw = random.Random(f"{SEED} {i} {episode}").uniform
            states[i] = [draw(-0.05, 0.05) for _ in range(4)]
        chosen, lengths = {i: [] for i in states}, dict.fromkeys(states, 0)
        for step in range(200):
            if not states:
                break
            batches.append(len(states))
            logits = policy(torch.tensor(list(states.values())))
            log_probabilities = nn.functional.logsigmoid(torch.cat([-logits, logits], dim=1))
            for (i, state), row in zip(list(states.items()), log_probabilities, strict=True):
                action = int(random.Random(f"{SEED} {i} {episode} {step}").random() < row[1].exp().item())
                chosen[i].append(row[action])
                lengths[i] += 1
                states[i] = pushed(state, action)
                if abs(states[i][0]) > 2.4 or abs(states[i][2]) > 12 * 2 * math.pi / 360:
                    del states[i]
        batches.append(sum(lengths.values()))
        gains = []
        for length in lengths.values():
            gains += [sum(0.99**k for k in range(length - t)) for t in range(length)]
        gains = torch.tensor(gains)
        gains = (gains - gains.mean()) / (gains.std() + 1e-6)
        loss = -(gains * torch.stack([term for i in chosen for term in chosen[i]])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        all_returns += lengths.values()
    return all_returns, [param.detach() for param in policy.parameters()], batches


@pytest.mark.parametrize("observers", [1, 3])
def test_it_equals_one_process_and_each_step_is_one_forward_pass(observers, capfd):
    returns, parameters, batches = learn_alone(observers)
    own_returns, own_parameters, own_batches = dist.launch(learn_and_record, nprocs=observers + 1)
    stdout, stderr = capfd.readouterr()
    assert without_a_late_answer(stderr) == ""
    assert [match[:2] for match in LINE.findall(stdout)] == [(str(n), str(n * observers)) for n in (5, 10)]
    mean = sum(returns[-100:]) / min(100, len(returns))
    assert stdout.splitlines()[-1] == f"Finished: 10 updates, mean return {mean:.1f}, no observer lost"
    assert own_returns == returns and own_batches == batches
    for actual, expected in zip(own_parameters, parameters, strict=True):
        assert (actual - expected).abs().max() <= 1e-9


# ---- the learner's state --------------------------------------------------------------------------------------------


@pytest.fixture
def learner(monkeypatch):
    """A learner of four observers in this process."""
    own = rpc_actor_learner.Learner([1, 2, 3, 4], torch.device("cpu"), arguments())
    monkeypatch.setattr(rpc_actor_learner, "learner", own)
    return own


def test_nobody_waits_for_a_lost_observer_and_its_late_calls_change_nothing(learner):
    state, episode = [0.0] * 4, (torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64))
    rpc_actor_learner.act(3, state)
    answers = [rpc_actor_learner.act(1, state)]
    rpc_actor_learner.lose(3)  # which has asked
    answers += [rpc_actor_learner.act(observer, state) for observer in (2, 4)]
    assert all(answer.done() for answer in answers)
    rpc_actor_learner.act(3, state)
    answers = [rpc_actor_learner.act(observer, state) for observer in (1, 2)]
    assert not any(answer.done() for answer in answers)
    rpc_actor_learner.lose(4)  # which has not
    assert all(answer.done() for answer in answers)
    rpc_actor_learner.finish_episode(3, *episode)
    updated = rpc_actor_learner.finish_episode(1, *episode)
    assert not updated.done()
    rpc_actor_learner.lose(2)  # in its episode
    assert updated.done() and learner.returns == [5]


def test_it_has_done_when_the_last_100_episodes_reach_the_goal(learner):
    learner.args.updates = 1000
    learner.returns = [200] * 96
    learner.observers = {1, 2}
    for returns, play_another in (((200, 200), True), ((200, 60), False)):
        learner.episodes = {i: (torch.zeros(n, 4), torch.zeros(n)) for i, n in enumerate(returns, 1)}
        updated = learner.updated
        rpc_actor_learner.update_if_all_have_finished()
        assert updated.wait() is play_another


# ---- loss of a process ----------------------------------------------------------------------------------------------


def lose_one(local_rank, world_size, victim, updates):
    """`victim` is killed in its 30th step, or when the learner has answered 30 times."""
    target = "rpc_remote.call" if local_rank else "rpc_actor_learner.answer_if_all_have_asked"
    with killed_in(target, call=30) if local_rank == victim else contextlib.nullcontext():
        rpc_actor_learner.main_worker(local_rank, world_size, arguments(updates))
    print(f"rank {local_rank} ends well")


def test_the_others_go_on_without_a_lost_observer(capfd):
    dist.launch(lose_one, 2, 5, nprocs=4, tolerate_killed=True)
    stdout, stderr = capfd.readouterr()
    assert own_lines(stderr) == [] and stdout.count("observer 2 is lost\n") == 1
    assert re.search(r"^Finished: 5 updates, mean return [\d.]+, observer 2 lost$", stdout, re.M)
    assert sorted(re.findall(r"rank (\d) ends well", stdout)) == ["0", "1", "3"]


def test_a_job_that_cannot_go_on_ends_with_one_line(capfd):
    with pytest.raises(ProcessExitedException, match=r"^rank 0 was killed by SIGKILL$"):
        dist.launch(lose_one, 0, 5, nprocs=3, tolerate_killed=True)
    with pytest.raises(SystemExit, match=r"^every observer is lost, after \d updates$"):
        dist.launch(lose_one, 1, 50, nprocs=2, tolerate_killed=True)
    assert "ends well" not in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("seed", range(5))
def test_it_learns(seed):
    status, stdout, stderr = run(SCRIPT, "--seed", seed, timeout=900)
    assert (status, stderr) == (0, "")
    last = re.search(r"\nFinished: \d+ updates, mean return ([\d.]+), no observer lost\n$", stdout)
    assert float(last[1]) >= 195
