"""min_FaultTolerant.py: whoever is killed, and whenever, the others train on, to the parameters of one process."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
import transformer
from transformer import full_parameters, make_optimizer, reference, small_text

import distributed as dist
import gpt
import min_FaultTolerant
from min_FaultTolerant import Quorum, Trainer

N = 3
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
# In which step, where in it, and which rank of the quorum is killed or stopped. The step before ends when all new
# processes wait. So each finds three members, and the step after it begins with a new one, which is healed.
FEW = [
    (3, "in forward", 1, KILL),
    (6, "when the others have voted", 2, KILL),
    (9, "in the all-reduce", 0, KILL),
    (10, "while it sends the state", 0, KILL),
    (13, "after the decision", 1, KILL),
]
MANY = [
    *FEW,
    (16, "in backward", 0, KILL),
    (19, "in the all-reduce", 2, KILL),
    (22, "after its vote", 2, KILL),
    (25, "after the last vote", 0, KILL),
    (28, "before the optimizer's step", 0, KILL),
    (31, "in the all-reduce", 0, KILL),  # two at once
    (31, "in the all-reduce", 2, KILL),
    (34, "in forward", 1, KILL),
    (35, "while it receives the state", 2, KILL),
    (38, "in forward", 1, KILL),
    (38, "after it has joined", 0, KILL),
    (41, "in forward", 1, KILL),
    (41, "when it is a member", 0, KILL),
    (44, "in forward", 1, KILL),
    (44, "while it connects", 0, KILL),  # here the others wait until the timeout
    (47, "in forward", 0, STOP),  # and here, until it is left behind
    (50, "in the all-reduce", 1, STOP),
    (53, "when the others have voted", 2, STOP),
    (56, "after the last vote", 1, STOP),
    (59, "after the decision", 0, STOP),
]


def arguments(**changes):
    values = {"layers": 1, "log_every": 10, "min_members": 1, "timeout": 3, "wait": 60}
    return transformer.arguments(**{**values, "max_restarts": 99, "store": None, **changes})


class Hooks:
    """What the script's functions do besides in a test: the process kills or stops itself as planned, once each."""

    def __init__(self, plan, folder):
        self.plan = plan
        self.folder = Path(folder)
        self.step = self.rank = None

    def planned(self, point):
        """The signal that is still to come here, or None."""
        for step, where, rank, number in self.plan:
            if (step, where, rank) == (self.step, point, self.rank) and not self.marker(rank).exists():
                return number
        return None

    def marker(self, rank):
        return self.folder / f"step {self.step}, rank {rank}"

    def at(self, point):
        number = self.planned(point)
        if number is not None:
            self.marker(self.rank).write_text(f"{os.getpid()} {number.name}")
            os.kill(os.getpid(), number)

    def wake(self):
        for marker in self.folder.glob("step*"):
            pid, name = marker.read_text().split()
            if name == "SIGSTOP":
                marker.write_text(f"{pid} SIGCONT")
                os.kill(int(pid), signal.SIGCONT)

    @contextlib.contextmanager
    def patched(self):
        with contextlib.ExitStack() as stack:
            for owner, name in (
                (gpt, "loss_fn"),
                (torch_dist, "all_reduce"),
                (torch_dist, "init_process_group"),
                (torch_dist, "batch_isend_irecv"),
                (Quorum, "connect"),
                (Quorum, "vote"),
                (Quorum, "commit"),
                (Trainer, "sum_gradients"),
                (Trainer, "take_step"),
                (min_FaultTolerant, "propose"),
                (min_FaultTolerant, "connect"),
            ):
                original = getattr(owner, name)
                hook = getattr(self, f"{owner.__name__}_{name}".replace("torch.", "").replace(".", "_"))
                stack.enter_context(mock.patch.object(owner, name, self.bound(hook, original)))
            yield

    def bound(self, hook, original):
        def call(*args, **kwargs):
            return hook(original, *args, **kwargs)

        return call

    def gpt_loss_fn(self, original, *args):
        self.at("in forward")
        loss = original(*args)
        loss.register_hook(lambda gradient: self.at("in backward"))
        return loss

    def distributed_all_reduce(self, original, *args, **kwargs):
        work = original(*args, **kwargs)
        self.at("in the all-reduce")
        return work

    def distributed_batch_isend_irecv(self, original, transfers):
        works = original(transfers)
        self.at("while it sends the state")
        self.at("while it receives the state")
        return works

    def Quorum_connect(self, original, quorum):
        self.step, self.rank = quorum.first_step, quorum.rank
        self.at("when it is a member")
        original(quorum)

    def distributed_init_process_group(self, original, *args, **kwargs):
        self.at("while it connects")
        original(*args, **kwargs)

    def Trainer_sum_gradients(self, original, trainer, quorum, step):
        self.step, self.rank = step, quorum.rank
        original(trainer, quorum, step)

    def Quorum_vote(self, original, quorum, step):
        before = len(quorum.members) * (step - quorum.first_step)  # votes for the steps before

        def n_votes():
            return quorum.store.add(f"{quorum.number} votes", 0) - before

        if any(map(self.planned, ("when the others have voted", "after the last vote", "after the decision"))):
            wait_until(lambda: n_votes() == len(quorum.members) - 1)
        early = [rank for place, point, rank, _ in self.plan if place == step and point == "after its vote"]
        if early and self.rank not in early and not self.marker(early[0]).exists():
            wait_until(lambda: n_votes() > 0)
        self.at("when the others have voted")
        return original(quorum, step)

    def Quorum_commit(self, original, quorum, step):
        if len(quorum.members) < N and step < self.plan[-1][0] + 3:
            self.wake()
            wait_until(lambda: len(quorum.members) + n_waiting(quorum) == N)
        original(quorum, step)

    def Trainer_take_step(self, original, trainer, step):
        self.at("before the optimizer's step")
        original(trainer, step)

    def min_FaultTolerant_propose(self, original, *args):
        self.at("after it has joined")
        return original(*args)

    def min_FaultTolerant_connect(self, original, address):
        host, port = address
        store = Store("quorums", torch_dist.TCPStore(host, port, is_master=False))
        store.hooks = self
        return store


class Store(torch_dist.PrefixStore):
    def wait(self, keys, timeout):
        self.hooks.at("after its vote")
        super().wait(keys, timeout)

    def compare_set(self, key, expected, desired):
        decides = key.endswith(" steps") and expected != ""
        if decides:
            self.hooks.at("after the last vote")
        value = super().compare_set(key, expected, desired)
        if decides:
            self.hooks.at("after the decision")
        return value


def n_waiting(quorum):
    """How many living processes wait for the next quorum."""
    key = f"{quorum.number + 1} joining"
    if not quorum.store.check([key]):
        return 0
    names = {line.split()[0] for line in quorum.store.get(key).decode().splitlines()}
    return len(names - min_FaultTolerant.lost_processes(quorum.store))


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.005)


def worker(local_rank, world_size, args, optimizer, plan, folder):
    """The script's own, in float64 on the small text. Each process that finishes saves what it has trained."""
    train = min_FaultTolerant.train

    def recorded_train(store, name, n_expected, args):
        text = small_text()
        with transformer.float64(), mock.patch.object(gpt, "load_text", lambda: text):
            trainer = train(store, name, n_expected, args)
        result = {"losses": trainer.losses, "parameters": full_parameters(trainer.model)}
        torch.save(result, f"{folder}/{name}.pt")

    def make(params, lr, fused):
        return make_optimizer(optimizer, params, lr)

    with (
        mock.patch.object(min_FaultTolerant, "train", recorded_train),
        mock.patch("torch.optim.AdamW", make if optimizer == "SGD" else torch.optim.AdamW),
        Hooks(plan, folder).patched(),
    ):
        min_FaultTolerant.main_worker(local_rank, world_size, args)


def check(plan, optimizer, folder, capfd, **changes):
    changes["steps"] = plan[-1][0] + 4
    dist.launch(worker, arguments(nprocs=N, **changes), optimizer, plan, folder, nprocs=N)
    out, err = capfd.readouterr()
    print(out, err)
    n_kills = sum(number == KILL for *_, number in plan)
    assert len(list(folder.glob("step*"))) == len(plan), "all have happened"
    assert out.count(" was killed by SIGKILL\n") == n_kills, "no other process has ended"
    assert len(re.findall(r"^process \d+ trains as ", out, re.M)) == N + n_kills
    expected = reference(optimizer, layers=1, **changes)
    results = list(folder.glob("*.pt"))
    assert len(results) == N
    tolerance = 1e-9 if optimizer == "AdamW" else 1e-12  # AdamW enlarges the rounding of gradients near 0
    for path in results:
        result = torch.load(path, weights_only=True)
        transformer.assert_equal(result["losses"], result["parameters"], expected, tolerance)
    return out, err


def test_killed_in_a_few_places_they_end_as_one_process(tmp_path, capfd):
    _, err = check(FEW, "SGD", tmp_path, capfd, clip=0.5)
    assert err == ""


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_killed_or_stopped_anywhere_they_end_as_one_process(optimizer, tmp_path, capfd):
    check(MANY, optimizer, tmp_path, capfd)
