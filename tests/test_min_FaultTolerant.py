"""min_FaultTolerant.py: whoever is killed, and whenever, the others train on, to the parameters of one process."""

import contextlib
import json
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as torch_dist
import transformer
from conftest import LAUNCHER_VARIABLES, ROOT, finish, free_port, start, wait_for, without_name_server
from transformer import full_parameters, make_optimizer, reference, small_text

import distributed as dist
import gpt
import min_FaultTolerant
import spawn
from min_FaultTolerant import Quorum, Trainer

N = 3
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
RAISE, ORPHAN = signal.SIGUSR1, signal.SIGUSR2  # stand for an exception, and for a kill of the supervisor
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

    def __init__(self, plan, n, folder):
        self.plan = plan
        self.n = n
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
            if number == RAISE:
                raise ZeroDivisionError("a mistake")
            if number == ORPHAN:
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(60)
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
        if len(quorum.members) < self.n and self.plan and step < self.plan[-1][0] + 3:
            self.wake()
            wait_until(lambda: len(quorum.members) + n_waiting(quorum) == self.n)
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
        Hooks(plan, world_size, folder).patched(),
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
    out, err = check(FEW, "SGD", tmp_path, capfd, clip=0.5)
    assert re.findall(r"^step (\d+) \| loss \d\.\d{4} \| \d members \| [\d,]+ tokens/s$", out, re.M) == ["10", "17"]
    # gloo itself says so if a process is lost while all connect.
    lines = without_name_server(err).splitlines()
    assert [line for line in lines if line and "Gloo connectFullMesh failed" not in line] == []


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_killed_or_stopped_anywhere_they_end_as_one_process(optimizer, tmp_path, capfd):
    check(MANY, optimizer, tmp_path, capfd)


# ---- the ends of a job ----------------------------------------------------------------------------------------------


def failure(plan, folder, nprocs=2, **changes):
    """The line with which a job ends."""
    folder.mkdir()
    with pytest.raises(SystemExit) as exit_info:
        dist.launch(worker, arguments(nprocs=nprocs, **changes), "SGD", plan, folder, nprocs=nprocs)
    return str(exit_info.value)


def fail_alone(plan, folder, line):
    """In a new process without a launcher: one that has computed gradients cannot be forked."""
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    assert failure(plan, folder, nprocs=1) == line


def test_what_ends_a_job_is_one_line(tmp_path, capfd):
    too_few = "2 members, 2 of them with the parameters of step 0, after --wait 1 s: --min-members is 3"
    assert failure([], tmp_path / "a", min_members=3, wait=1) == too_few
    both = [(3, "in forward", 0, KILL), (3, "in forward", 1, KILL)]
    all_lost = "all processes with the parameters of step 3 are lost: start again"
    assert failure(both, tmp_path / "b") == all_lost
    spawn.run_processes(fail_alone, (both[:1], tmp_path / "c", all_lost), 1)
    assert re.fullmatch(r"\S+ is not replaced: --max-restarts is 0", failure(both[:1], tmp_path / "d", max_restarts=0))
    assert without_name_server(capfd.readouterr().err) == ""
    exception = [(3, "in forward", 0, RAISE)]
    assert re.fullmatch(r"\S+ raised an exception: see its traceback above", failure(exception, tmp_path / "e"))
    assert "ZeroDivisionError: a mistake" in capfd.readouterr().err


def unconnected_worker(local_rank, world_size, args):
    connect = torch_dist.init_process_group

    def fail(*values, world_size, **options):
        if world_size > 1:
            raise RuntimeError("no route to host")
        connect(*values, world_size=world_size, **options)

    with mock.patch.object(torch_dist, "init_process_group", fail):
        min_FaultTolerant.main_worker(local_rank, world_size, args)


def test_members_that_can_never_connect_do_not_try_forever(capfd):
    with pytest.raises(SystemExit) as exit_info:
        dist.launch(unconnected_worker, arguments(nprocs=2), nprocs=2)
    line = "10 quorums in a row have committed no step; the last error: no route to host"
    assert str(exit_info.value) == line
    assert without_name_server(capfd.readouterr().err) == ""


def at_the_end_worker(local_rank, world_size, args, what, folder):
    """After the last step rank 1's process does something before it ends, as one that saves may."""
    train = min_FaultTolerant.train

    def train_and_more(*values):
        train(*values)
        if local_rank == 1 and what == "raises":
            raise OSError("no space left")
        if local_rank == 1 and what == "is killed":
            os.kill(os.getpid(), KILL)
        if local_rank == 1 and what == "stops":
            os.kill(os.getpid(), STOP)
        if local_rank == 1 and what == "saves":
            time.sleep(2)
            Path(folder, "saved").touch()
        Path(folder, f"{local_rank} ended").touch()

    args.store = ("127.0.0.1", int(os.environ["MASTER_PORT"])) if what == "saves" else None
    with (
        mock.patch.object(min_FaultTolerant, "train", train_and_more),
        mock.patch.object(min_FaultTolerant, "LAUNCHER_SECONDS", 0),
    ):
        min_FaultTolerant.main_worker(local_rank, world_size, args)
    assert what != "saves" or Path(folder, "saved").exists(), "the one with the store has left before"


def test_what_happens_after_the_last_step_is_waited_for_and_known(tmp_path, capfd):
    lost = r"\S+ was killed by SIGKILL after the last step: if it was saving, its files are incomplete"
    raised = r"\S+ raised an exception: see its traceback above"
    ends = {"saves": "", "raises": raised, "is killed": lost, "stops": lost}
    for what, line in ends.items():
        folder = tmp_path / what
        folder.mkdir()
        values = arguments(nprocs=2, steps=2, wait=4), what, str(folder)
        if line:
            with pytest.raises(SystemExit) as exit_info:
                dist.launch(at_the_end_worker, *values, nprocs=2)
            assert re.fullmatch(line, str(exit_info.value))
        else:
            dist.launch(at_the_end_worker, *values, nprocs=2)
        out, err = capfd.readouterr()
        assert (folder / "0 ended").exists()
        assert ("OSError: no space left" in err) == (what == "raises")
        assert (" has not ended in time after the last step: it is killed\n" in out) == (what == "stops")


def test_to_close_a_quorum_rings_for_one_that_has_closed_it_and_died():
    store = torch_dist.HashStore()
    store.set("4 steps", "9 closed")
    min_FaultTolerant.close(store, 4)
    store.wait(["4 bell 8"], timedelta(seconds=1))
    assert store.get("4 steps") == b"9 closed"


def test_a_member_left_behind_may_hold_the_newest_parameters():
    """Process a had them, and missed quorum 4. There b died before it could heal c."""
    store, args = torch_dist.HashStore(), arguments()
    store.set("4 members", json.dumps({"step": 9, "holders": ["b"], "newcomers": ["c"]}))
    store.set("4 steps", "9 closed")
    store.set("lost", "b ")
    store.set("5 joining", "c 0\n")
    assert min_FaultTolerant.propose(store, 5, 3, args.timeout - 1, args) is None
    error = "all processes with the parameters of step 9 are lost: start again"
    assert min_FaultTolerant.propose(store, 5, 3, args.timeout + 1, args) == {"error": error}
    store.set("5 joining", "c 0\na 9\n")
    quorum = {"step": 9, "holders": ["a"], "newcomers": ["c"]}
    assert min_FaultTolerant.propose(store, 5, 3, args.timeout - 1, args) == quorum


def test_processes_that_would_train_differently_are_refused():
    text, other = small_text()

    def check(text, **changes):
        with mock.patch.object(gpt, "load_text", lambda: (text, None)):
            min_FaultTolerant.check_alike(store, Trainer(arguments(**changes)))

    store = torch_dist.HashStore()
    check(text)
    check(text.clone(), log_every=3, timeout=7)
    for values, line in (
        ({"lr": 0.5}, "lr$"),
        ({"clip": 1.0}, "clip$"),
        ({"global_batch_size": 6}, "global_batch_size$"),
        ({"seed": 1, "steps": 99}, "steps, seed, the first weights$"),
    ):
        with pytest.raises(dist.DistributedError, match=f"^two processes have different values of: {line}"):
            check(text, **values)
    with pytest.raises(dist.DistributedError, match=r"different values of: the text \(of the standard library\)$"):
        check(other)


def test_a_supervisor_that_is_killed_takes_its_process_with_it(tmp_path, capfd):
    """Nobody tells the others, so these wait until the timeout, and nobody replaces it."""
    dist.launch(orphan_worker, arguments(steps=9, timeout=1), tmp_path, nprocs=2, tolerate_killed=True)
    out, _ = capfd.readouterr()
    assert re.findall(r"^quorum .* members", out, re.M) == ["quorum 1: 1 members"]
    losses, parameters = reference("SGD", layers=1, steps=9)
    (path,) = tmp_path.glob("*.pt")
    result = torch.load(path, weights_only=True)
    transformer.assert_equal(result["losses"], result["parameters"], (losses, parameters), 1e-12)


def orphan_worker(local_rank, world_size, args, folder):
    plan = [(5, "in forward", rank, ORPHAN) for rank in range(2)] if local_rank == 1 else []
    worker(local_rank, world_size, args, "SGD", plan, folder)


# ---- under torchrun -------------------------------------------------------------------------------------------------

SMALL = ("--layers", 1, "--width", 32, "--heads", 2, "--length", 32, "--log-every", 100)


def trainers(log):
    return [int(pid) for pid in re.findall(r"^process (\d+) trains as ", log.read_text(), re.M)]


@pytest.mark.slow
def test_torchrun_does_not_notice(tmp_path):
    log = tmp_path / "log"
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, ROOT / "min_FaultTolerant.py")
    job = start(*command, *SMALL, "--steps", 3000, log=log, env={"OMP_NUM_THREADS": "1"})
    for number in (1, 3):
        wait_for(lambda number=number: f"step {number}00 " in log.read_text(), job)
        os.kill(trainers(log)[-1], KILL)
        wait_for(lambda number=number: f"\nquorum {number + 1}: 2 members, 1 of them new" in log.read_text(), job)
    assert finish(job)[0] == 0, log.read_text()
    lines = log.read_text().splitlines()
    others = [line for line in lines if not re.match(r"process \d+ trains|\S+ was killed|quorum \d|step \d", line)]
    assert not others and lines[-1].startswith("step 3000 ")


def start_agent(number, port, log, *options):
    """A torchrun of its own, as on a machine of its own. Number 0 holds the store."""
    script = ROOT / "min_FaultTolerant.py"
    return start_torchrun(number, f"localhost:{port}", spawn.loopback(), script, *options, log=log)


def start_torchrun(number, endpoint, interface, script, *options, env=None, **kwargs):
    command = ("-m", "torch.distributed.run", "--nnodes", 1, "--nproc-per-node", 1, "--rdzv-backend", "c10d")
    command += ("--rdzv-endpoint", endpoint, "--rdzv-id", f"machine-{number}")
    command += ("--rdzv-conf", f"is_host={'false' if number else 'true'}", script)
    command += ("--store", endpoint, *SMALL, *options)
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface, **(env or {})}
    return start(*command, env=env, **kwargs)


def kill_machine(agent):
    """End all processes of an agent at once, so that none can tell the others."""
    processes = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
    for process in processes:
        process.send_signal(STOP)
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, timeout=10)


@pytest.mark.slow
def test_two_machines_of_which_one_is_lost_and_comes_back(tmp_path):
    logs = [tmp_path / name for name in ("0", "1", "1 again")]
    port = free_port()

    def seen(text):
        return text in "".join(log.read_text() for log in logs if log.exists())

    options = ("--steps", 10**6, "--timeout", 3)
    here = start_agent(0, port, logs[0], *options)
    wait_for(lambda: seen("step 100 "), here)
    there = start_agent(1, port, logs[1], *options)
    wait_for(lambda: seen("quorum 1: 2 members, 1 of them new"), here)
    kill_machine(there)
    wait_for(lambda: seen("quorum 2: 1 members, 0 of them new"), here)
    there = start_agent(1, port, logs[2], *options)
    wait_for(lambda: seen("quorum 3: 2 members, 1 of them new"), here)
    assert len(trainers(logs[0])) == 1, "the survivor has not been restarted"
    kill_machine(here)  # and with it the store
    assert finish(there, timeout=60)[0] != 0
    assert not any(psutil.pid_exists(pid) for pid in trainers(logs[2]))


SLOW_SAVE = """
import os, time
from pathlib import Path
import distributed as dist
import min_FaultTolerant

train = min_FaultTolerant.train

def train_and_save(*values):
    train(*values)
    if "SAVED" in os.environ:
        time.sleep(3)
        Path(os.environ["SAVED"]).touch()

if __name__ == "__main__":
    min_FaultTolerant.train = train_and_save
    dist.launch(min_FaultTolerant.main_worker, min_FaultTolerant.parse_args())
"""


@pytest.mark.slow
def test_two_machines_end_together(machines, tmp_path):
    """The one without the store saves for long. The torchrun of neither says that it has lost the other."""
    script, saved = tmp_path / "script.py", tmp_path / "saved"
    script.write_text(SLOW_SAVE)
    logs, jobs = [], []
    for number, (machine, cable) in enumerate(machines):
        log = tmp_path / str(number)
        kwargs = {
            "log": log,
            "prefix": ("ip", "netns", "exec", machine),
            "env": {"SAVED": str(saved)} if number else {},
        }
        options = ("--steps", 300, "--min-members", 2)
        jobs.append(start_torchrun(number, "10.9.0.1:29400", cable, script, *options, **kwargs))
        wait_for(lambda log=log: trainers(log), jobs[-1])
        logs.append(log)
    for job, log in zip(jobs, logs, strict=True):
        assert finish(job)[0] == 0, log.read_text()
    printed = logs[0].read_text() + logs[1].read_text()
    assert "step 300 " in printed and "Error" not in printed, printed
    assert saved.exists()
