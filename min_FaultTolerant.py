"""Lose a process without a restart: the minimum working example of fault-tolerant data parallelism.

torchrun restarts all processes when one is lost. Here the others repeat the step without it, and a new process joins
them later. This file is long because a consensus is: begin at `Trainer`, then read `Quorum` and `meet`. The processes
that train together are a quorum. They split the same global batch, however many they are. Every step ends with a vote,
after the sum of all gradients. Then either all members take the optimizer step, or none of them does:

    A     step 7 | step 8 fails   | step 8   step 9 | sends its state | step 10   step 11
    B     step 7 | step 8 fails   | step 8   step 9 |                 | step 10   step 11
    C     step 7 | step 8, killed |
    D                                 starts, waits | is healed       | step 10   step 11
           quorum 0: A B C          quorum 1: A B     quorum 2: A B D

The store, in the launcher's process, has one key for each quorum: the number of committed steps, from 0. Processes
change it by compare_set(key, expected, new), which writes only if the key holds the expected value. So one of them
wins:

    "8"  ->  "9"           by the last voter: step 8 is committed
    "8"  ->  "9 closed"    by the last voter: the same, and the quorum ends, because a new process waits or all is done
    "8"  ->  "8 closed"    by anyone who sees a failure: step 8 is not committed, and the quorum ends

This value decides, whenever a member dies. The next quorum begins at the step that it names, with at least one member
that has taken all steps before it. Every process of the launcher is a supervisor: it starts a process that trains, and
replaces it when it is killed. One that hangs is left behind after at most 2.5 times --timeout seconds, and killed.

Choose it over multigpu_torchrun.py when restarts cost too much time. It is for one machine, saves no snapshots, uses
gloo, and was run on CPUs only. torchft adds many machines, NCCL, FSDP and DiLoCo (https://docs.pytorch.org/torchft).
Cost per process: 16·P bytes. Each step sends 2·(N-1)/N · 4·P bytes, not hidden behind backward; healing sends 12·P.

    python min_FaultTolerant.py --nproc 4        # then kill -9 one of the processes whose ids it prints
    torchrun --standalone --nproc-per-node 4 min_FaultTolerant.py
"""

import contextlib
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as torch_dist
from torch import nn

import distributed as dist
import gpt
import options
import spawn

POLL = 0.001  # seconds between two looks into the store
# Members notice a kill at once. But gloo sometimes misses that a connection has closed, and waits for --timeout: once
# in about 150 kills on a busy machine. A kill while a quorum connects stops the others for up to half of --timeout.
GLOO_PATIENCE = 5  # gloo waits for a connection five times as long as its timeout says
MOST_FRUITLESS = 10  # quorums in a row in which a process takes no step, before it ends the job


# ---- training in a quorum -----------------------------------------------------------------------------------------


class Trainer:
    """Model, optimizer, and `step`: the parameters here are the parameters before this step."""

    def __init__(self, args):
        torch.set_float32_matmul_precision("high")  # as gpt.start
        torch.manual_seed(args.seed + os.getpid())  # not its rank, which changes
        device = dist.get_device()
        self.model = gpt.GPT(gpt.Config.from_args(args), args.seed).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, fused=True)
        self.gradients = make_gradients(self.model)
        self.step = 0
        self.last_commit = time.perf_counter()
        self.last_error = "a process was killed"
        self.data = gpt.Data(args, share=(0, 1))  # the whole batch, of which each member takes its rows
        self.args = args

    def train_in(self, quorum):
        """Train until the quorum is closed: a member is lost, a new process waits, or all steps are committed."""
        step = quorum.first_step
        closed = False
        try:
            quorum.connect()
            if quorum.n_holders < len(quorum.members):
                self.heal(quorum)
            while not closed:
                self.sum_gradients(quorum, step)
                committed, closed = quorum.vote(step)
                if committed == step + 1:
                    self.take_step(step)
                    self.report(quorum)
                step = committed
        except PeerLost as error:
            self.last_error = str(error)  # its text only: the exception would keep the connections open
            close(quorum.store, quorum.number)
        # Closes all connections, so that no other member waits for this one. shutdown() and abort() close none.
        quorum.group = None

    def heal(self, quorum):
        """Receive all that a new member needs from rank 0. The members that have it receive the same values again."""
        if self.step != quorum.first_step:
            self.gradients.zero_()
            self.optimizer.step()  # it creates the state that is received now
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for param in self.model.parameters():
            tensors.extend(self.optimizer.state[param].values())  # all are tensors, as AdamW has them
        with communication():
            for tensor in tensors:
                quorum.group.broadcast(tensor.detach(), root=0).wait()

    def sum_gradients(self, quorum, step):
        """Compute the gradients and the loss of the global batch, each member from its own rows."""
        self.gradients.zero_()
        x, y = self.data.batch(step)
        own_x = x[quorum.rank :: len(quorum.members)]
        own_y = y[quorum.rank :: len(quorum.members)]
        if len(own_x) > 0:
            loss = gpt.loss_fn(self.model(own_x), own_y) * (len(own_x) / len(x))  # summed, it is the mean over the rows
            loss.backward()
            self.gradients[-1] = loss.detach()
        with communication():
            quorum.group.allreduce(self.gradients).wait()

    def take_step(self, step):
        if self.args.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.optimizer.step()
        self.step = step + 1

    def report(self, quorum):
        """Rank 0 prints the first step of each quorum but the first one, and a line every --log-every steps."""
        now = time.perf_counter()
        if quorum.rank == 0 and quorum.number > 0 and self.step == quorum.first_step + 1:
            n_new = len(quorum.members) - quorum.n_holders
            line = f"quorum {quorum.number}: {len(quorum.members)} members, {n_new} of them new"
            log(f"{line} | step {self.step} took {now - self.last_commit:.2f} s")
        self.last_commit = now
        if quorum.rank == 0 and (self.step % self.args.log_every == 0 or self.step == self.args.steps):
            loss = self.gradients[-1].item()
            log(f"step {self.step}/{self.args.steps} | loss {loss:.4f} | {len(quorum.members)} members")


def make_gradients(model):
    """All gradients as one vector, which one all-reduce sums, and after them a place for the loss.

    Each `grad` is a view of it. So clear gradients by `zero_` of the vector. After optimizer.zero_grad() backward would
    make new gradients outside of it, and each process would train alone, without an error. Freeze parameters before.
    """
    params = [param for param in model.parameters() if param.requires_grad]  # weight decay would change a frozen one
    gradients = torch.zeros(sum(param.numel() for param in params) + 1, device=params[0].device)
    offset = 0
    for param in params:
        param.grad = gradients[offset : offset + param.numel()].view_as(param)
        offset += param.numel()
    return gradients


# ---- one quorum ---------------------------------------------------------------------------------------------------


class PeerLost(Exception):
    """Another member is lost. The message is torch's."""


@contextlib.contextmanager
def communication():
    """torch raises RuntimeError for what fails in a collective; raise PeerLost instead."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error)) from None


class Quorum:
    """The members that train together, by rank. The first `n_holders` have the parameters before `first_step`."""

    def __init__(self, store, number, first_step, holders, newcomers, name, args):
        self.store = store
        self.number = number
        self.first_step = first_step
        self.members = holders + newcomers
        self.n_holders = len(holders)
        self.rank = self.members.index(name)
        self.args = args

    def connect(self):
        """Make a process group that lives as long as the quorum. Raises PeerLost."""
        store = torch_dist.PrefixStore(f"{self.number} group", self.store)
        timeout = timedelta(seconds=self.args.timeout)
        with communication():
            # Wait half of --timeout for the connections.
            connecting = timeout / 2 / GLOO_PATIENCE
            self.group = torch_dist.ProcessGroupGloo(store, self.rank, len(self.members), connecting)
        self.group.set_timeout(timeout)

    def vote(self, step):
        """Vote for `step`, and wait for the decision. Returns the number of committed steps, and if it is closed."""
        votes = self.store.add(f"{self.number} votes", 1)
        if votes == (step - self.first_step + 1) * len(self.members):  # the last vote for this step
            value = str(step + 1)
            if step + 1 == self.args.steps or self.store.check([f"{self.number + 1} waiting"]):
                value += " closed"
            self.store.compare_set(f"{self.number} steps", str(step), value)  # unless another process has closed it
        return wait_for_decision(self.store, self.number, step, self.args.timeout)


def wait_for_decision(store, number, step, timeout):
    """Wait until `step` is committed, or quorum `number` is closed. Returns what `committed_steps` does.

    Give math.inf as `step` to wait until it is closed: that step never comes. If the wait takes longer than `timeout`
    seconds, a member hangs. Then close the quorum.
    """
    start = time.monotonic()
    steps, closed = committed_steps(store, number)
    while steps <= step and not closed:
        time.sleep(POLL)
        if time.monotonic() - start > timeout:
            close(store, number)
        steps, closed = committed_steps(store, number)
    return steps, closed


def close(store, number):
    """End a quorum. A step that is not committed by now will be repeated by the next one."""
    steps, closed = committed_steps(store, number)
    while not closed:
        store.compare_set(f"{number} steps", str(steps), f"{steps} closed")
        steps, closed = committed_steps(store, number)


def committed_steps(store, number):
    """The number of steps that are committed in quorum `number` or before it, and whether the quorum is closed."""
    steps, _, closed = store.get(f"{number} steps").decode().partition(" ")
    return int(steps), bool(closed)


# ---- the next quorum ----------------------------------------------------------------------------------------------
#
# The key "quorum" holds the newest quorum as JSON. The next one replaces it by compare_set, so all read the same one.


def meet(store, name, own_step, args):
    """Join the next quorum with the parameters of `own_step`. Returns None if all steps are committed.

    Raises DistributedError if no process has the newest parameters.
    """
    while True:
        newest = store.get("quorum").decode()
        previous = json.loads(newest)
        number = previous["number"] + 1
        store.append(f"{number} waiting", f"{name} {own_step}\n")
        # Wait until it is closed. Its last voter closes it as soon as a process waits for the next one.
        step, _ = wait_for_decision(store, number - 1, math.inf, args.timeout)
        if step == args.steps:
            return None
        start = time.monotonic()
        while store.get("quorum").decode() == newest:
            # A member for which gloo misses a closed connection comes after --timeout. It has what the others need.
            is_late = time.monotonic() - start > 1.5 * args.timeout
            proposal = propose(store, previous, step, is_late, args)
            if proposal is None:
                time.sleep(POLL)
            else:
                store.compare_set(f"{number} steps", "", str(step))  # first: who reads the quorum needs this key
                store.compare_set("quorum", newest, json.dumps(proposal))
        quorum = json.loads(store.get("quorum"))
        if name in quorum["holders"] + quorum["newcomers"]:  # else it came too late
            return Quorum(store, **quorum, name=name, args=args)


def propose(store, previous, step, is_late, args):
    """The quorum after the quorum `previous`, or None if it is too early to decide.

    It is too early while a member of `previous` is missing, unless it `is_late`. Then the member hangs. It is written
    down as lost, and its supervisor kills it. If the first quorum is late, it begins with fewer than --nproc members.
    """
    number = previous["number"] + 1
    lost = store.get("lost").decode().split()
    holders = []
    newcomers = []
    for line in store.get(f"{number} waiting").decode().splitlines():
        name, own_step = line.split()
        if name not in lost and int(own_step) == step:
            holders.append(name)
        elif name not in lost:
            newcomers.append(name)
    known = lost + holders + newcomers
    missing = [name for name in previous["holders"] + previous["newcomers"] if name not in known]
    if is_late:
        for name in missing:
            store.append("lost", f"{name} ")
    elif missing or (number == 0 and len(holders) < args.nproc):
        return None
    if not holders:
        raise dist.DistributedError(f"all processes with the parameters of step {step} are lost: start again")
    return {"number": number, "first_step": step, "holders": holders, "newcomers": newcomers}


def train(store, name, args):
    """Train until all steps are committed. Returns the trainer, which may have come too late for the last of them."""
    trainer = Trainer(args)
    n_fruitless = 0
    while n_fruitless < MOST_FRUITLESS:
        quorum = meet(store, name, trainer.step, args)
        if quorum is None:
            return trainer
        step = trainer.step
        trainer.train_in(quorum)
        n_fruitless = 0 if trainer.step > step else n_fruitless + 1
    line = f"{MOST_FRUITLESS} quorums in a row have committed no step"
    raise dist.DistributedError(f"{line}; the last error: {trainer.last_error}")


# ---- a process that trains, and its supervisor --------------------------------------------------------------------


def connect():
    """A connection to the launcher's store."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps its store when it restarts all
    return torch_dist.PrefixStore(f"restart {restart}", torch_dist.TCPStore(host, port, is_master=False))


def report_lost(store, name):
    """Tell the others that a process is lost, and end its quorum, so that nobody waits for its vote."""
    store.append("lost", f"{name} ")
    quorum = json.loads(store.get("quorum"))
    if name in quorum["holders"] + quorum["newcomers"]:
        close(store, quorum["number"])


def run_trainer(args):
    """In the started process: train, and leave a line in the store if the job cannot continue."""
    threading.Thread(target=end_with_supervisor, daemon=True).start()
    # Its rank is another one in each quorum. Without RANK, distributed.py sees a job of one process: it does not
    # communicate, and dist.is_primary() is True in each process.
    os.environ.pop("RANK", None)
    store = connect()
    try:
        train(store, str(os.getpid()), args)
        # Here you may save the model of the trainer that `train` returns, in one of the processes: where
        # store.add("saved", 1) returns 1. If the trainer's step is less than args.steps, it came too late. A process
        # that is killed meanwhile is not noticed by the others.
    except dist.DistributedError as error:
        store.set("error", str(error))
        sys.exit(1)


def end_with_supervisor():
    multiprocessing.parent_process().join()
    os.kill(os.getpid(), signal.SIGKILL)


def log(line):
    print(f"{line}\n", end="", flush=True)  # one write, so that lines of several processes do not mix


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = gpt.make_parser(__doc__)
    timeout_help = "seconds until a process that hangs is left behind"
    restarts_help = "how often each process may be replaced"
    parser.add_argument("--timeout", type=options.whole_number(1), default=30, help=timeout_help)
    parser.add_argument("--max-restarts", type=options.whole_number(0), default=100, help=restarts_help)
    args = parser.parse_args()
    gpt.check_model_options(parser, args)
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    """Keep one process training until the job is finished. This process is its supervisor, and does not train."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) != world_size:
        raise dist.DistributedError("this script is for one machine: start it with one launcher there")
    if not dist.is_launched():  # one process alone, for which no launcher has started a store
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME") or "lo"
        server = spawn.start_store()  # lives as long as this variable
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(server.port))
    store = connect()
    store.append("lost", "")  # makes the key: `get` would wait for one that does not exist
    # A quorum of nobody, which is closed, comes before the first one.
    store.set("-1 steps", "0 closed")
    nobody = {"number": -1, "first_step": -1, "holders": [], "newcomers": []}
    store.compare_set("quorum", "", json.dumps(nobody))
    context = multiprocessing.get_context("fork")  # a copy of this process starts at once: it has imported torch
    for _ in range(args.max_restarts + 1):
        process = context.Process(target=run_trainer, args=(args,))
        process.start()
        name = str(process.pid)
        log(f"process {name} trains")
        while process.is_alive():
            process.join(1)
            if name in store.get("lost").decode().split():  # it hangs, and the others have left it behind
                process.kill()
        if process.exitcode == 0:
            return
        if process.exitcode > 0 and store.check(["error"]):
            raise dist.DistributedError(store.get("error").decode())
        if process.exitcode > 0:
            raise dist.DistributedError(f"process {name} raised an exception: see its traceback above")
        report_lost(store, name)
        log(f"process {name} was killed by {signal.Signals(-process.exitcode).name}")
    raise dist.DistributedError(f"process {name} is not replaced: --max-restarts is {args.max_restarts}")


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc, tolerate_killed=True)
