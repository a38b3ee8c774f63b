"""Lose a process without a restart: the minimum working example of fault-tolerant data parallelism.

torchrun restarts all processes when one is lost. Here the others repeat the step without it, and a new process joins
them later. The processes that train together are a quorum. They split the same global batch, however many they are, so
a step computes the same in every quorum, up to rounding.

Every step ends with a vote. A member votes when it has the sum of all gradients. Then either all members take the
optimizer step, or none of them does:

    A     step 7 | step 8 fails   | step 8   step 9 | step 10, sends its state | step 11
    B     step 7 | step 8 fails   | step 8   step 9 | step 10                  | step 11
    C     step 7 | step 8, killed |
    D                                  starts, asks | step 10, is healed       | step 11
           quorum 0: A B C          quorum 1: A B     quorum 2: A B D

A heals D: it sends D its parameters and the optimizer's state. The store is a small server of keys and values in the
launcher's process, so it outlives every process that trains. It has one key for each quorum: the number of committed
steps. A quorum that has lost a member is closed, and commits no further step. Processes change the key by
compare_set(key, expected, new). It writes the new value only if the key still holds the expected one. If two processes
do so at once, one of them succeeds, and the other reads what has happened. Steps count from 0 in the key and above, and
from 1 in printed lines:

    "8"  ->  "9"           by the last voter: step 8 is committed
    "8"  ->  "9 closed"    by the last voter if a new process waits: step 8 is committed, and the quorum ends
    "8"  ->  "8 closed"    by anyone who sees a failure: step 8 is not committed, and the quorum ends

This value decides, not what a process has seen itself. A member can die before its vote, after it, or between the
decision and the optimizer step: the others read the same value. A closed quorum stays closed. So a process that was
stopped and wakes later can change nothing. It joins the next quorum as a new member.

The next quorum begins with the number of steps in this value. One member that has taken them sends its parameters and
the optimizer's state to the new members, while all others compute. In this step the new members have no share of the
batch: they add zeros to the sum of the gradients. If the step is committed, they are healed, and take it too.

Every process of the launcher is a supervisor, which uses no GPU. It starts one process that trains. If that is killed,
or its GPU fails, the supervisor closes the quorum and starts another. An exception in your own code ends the job.

Choose it over multinode_torchrun.py when restarts cost too much time, as on hundreds of GPUs. It was tested with gloo
on CPUs alone. Under nccl a killed process may be noticed only after --timeout seconds. It saves no snapshots: if all
members are lost, so are the parameters. If the launcher that holds the store is lost, the job ends. --timeout must be
longer than one step and the healing of a new member. A process that hangs is dropped after at most twice that time.

Cost per process, for P float32 parameters on N processes: 16·P bytes (parameters 4, gradients 4, AdamW 8). Each step
sends 2·(N-1)/N · 4·P bytes (a ring all-reduce), which are not hidden behind the backward pass. The vote is three round
trips to the store, and six for the last voter. To heal a new member, another one sends 12·P bytes.

    python min_FaultTolerant.py --nproc 4        # then kill -9 one of the processes whose ids it prints
    torchrun --standalone --nproc-per-node gpu min_FaultTolerant.py

    # Several machines: one torchrun on each. None of them restarts the others. The one on HOST holds the store.
    torchrun --nnodes 1 --nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-id $(hostname) \
        min_FaultTolerant.py --store HOST:29400

After a kill it prints `quorum 1: 3 members, 0 of them new | step 58 took 0.15 s`. For large jobs see torchft, which has
the same idea: https://docs.pytorch.org/torchft
"""

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from datetime import timedelta

import torch
import torch.distributed as torch_dist
from torch import nn

import distributed as dist
import gpt
import options
import spawn

POLL = 0.02  # seconds between two looks into the store while a quorum forms
MOST_FRUITLESS = 10  # quorums in a row without a committed step, before the job ends
LAUNCHER_SECONDS = 5  # so late may the launcher of another machine notice that all of its processes have ended
SAME_OPTIONS = ("layers", "width", "heads", "length", "global_batch_size", "steps", "lr", "clip", "seed")


def log(line):
    print(f"{line}\n", end="", flush=True)  # one write, so that lines of several processes do not mix


def parse_args():
    parser = options.ArgumentParser(__doc__)
    gpt.add_model_options(parser)
    count = options.whole_number(1)
    parser.add_argument("--min-members", type=count, default=1, help="wait while there are fewer processes than this")
    parser.add_argument("--timeout", type=count, default=30, help="seconds until a process that hangs is left behind")
    parser.add_argument("--wait", type=count, default=600, help="seconds to wait for --min-members, or at the end")
    restarts = options.whole_number(0)
    parser.add_argument("--max-restarts", type=restarts, default=100, help="how often each process may be replaced")
    parser.add_argument(
        "--store", type=host_and_port, metavar="HOST:PORT", help="address of the store (default: the launcher's)"
    )
    args = parser.parse_args()
    gpt.check_model_options(parser, args)
    return args


def host_and_port(text):
    """An argparse `type`: the text HOST:PORT as a tuple."""
    host, _, port = text.rpartition(":")
    if host and port.isdecimal() and 0 < int(port) < 65536:
        return host, int(port)
    raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")


# ---- one quorum ---------------------------------------------------------------------------------------------------


class PeerLost(Exception):
    """Another member is lost. The message is torch's, if a collective has failed or timed out."""


@contextlib.contextmanager
def communication():
    """torch raises RuntimeError for what fails in a collective; raise PeerLost instead."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error)) from None


class Quorum:
    """The members that train together, by rank. The first `n_holders` have the parameters before `first_step`."""

    def __init__(self, store, number, rank, members, n_holders, first_step, timeout):
        self.store = store
        self.number = number
        self.rank = rank
        self.members = members
        self.n_holders = n_holders
        self.first_step = first_step
        self.timeout = timedelta(seconds=timeout)

    def vote(self, step):
        """Vote for `step`, and wait for the decision. Returns the number of committed steps, and if it is closed."""
        votes = self.store.add(f"{self.number} votes", 1)
        if votes == (step - self.first_step + 1) * len(self.members):
            self.commit(step)
        else:
            try:
                self.store.wait([f"{self.number} bell {step}"], self.timeout)
            except torch_dist.DistStoreError:  # a member hangs
                close(self.store, self.number)
        return committed_steps(self.store, self.number)

    def commit(self, step):
        """Called by the last voter. It changes nothing if another process has closed the quorum before."""
        value = str(step + 1)
        if self.store.check([f"{self.number + 1} joining"]):
            value += " closed"
        self.store.compare_set(f"{self.number} steps", str(step), value)
        self.store.set(f"{self.number} bell {step}", "")  # wakes those who wait for the decision
        self.store.delete_key(f"{self.number} bell {step - 1}")  # all have heard it, or they could not have voted

    def connect(self):
        """Wait until all members are here, and make their process group. Raises PeerLost."""
        if lost_processes(self.store).intersection(self.members):
            raise PeerLost
        bell = f"{self.number} bell {self.first_step - 1}"
        if self.store.add(f"{self.number} here", 1) == len(self.members):
            self.store.set(bell, "")
        with communication():
            self.store.wait([bell], self.timeout)
        _, closed = committed_steps(self.store, self.number)
        if closed:
            raise PeerLost
        device = dist.get_device()
        with communication():
            torch_dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=torch_dist.PrefixStore(f"{self.number} group", self.store),
                rank=self.rank,
                world_size=len(self.members),
                timeout=self.timeout,
                device_id=device if device.type == "cuda" else None,
            )

    def leave(self):
        """Close all connections at once, so that no other member waits for this one."""
        if dist.is_dist_avail_and_initialized():
            if torch_dist.get_backend() == "nccl":
                torch_dist.group.WORLD.abort()  # a collective may still wait on the GPU
        else:
            # It failed to connect. Then torch has counted a group that does not exist, and would look for the next one
            # under another name than the other members. To destroy a group sets the count to zero.
            torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
        torch_dist.destroy_process_group()

    def share(self, step, batch):
        """This member's rows of a global batch. There may be none. A new member has none in its first step."""
        n_shares = self.n_holders if step == self.first_step else len(self.members)
        if self.rank >= n_shares:
            return batch[:0]
        return batch[self.rank :: n_shares]

    def has_newcomers(self):
        return self.n_holders < len(self.members)

    def start_healing(self, tensors):
        """The first holder sends `tensors` to the new members, while all compute. Returns the works to wait for."""
        transfers = []
        for newcomer in range(self.n_holders, len(self.members)):
            for tensor in tensors:
                if self.rank == 0:
                    transfers.append(torch_dist.P2POp(torch_dist.isend, tensor, newcomer))
                elif self.rank == newcomer:
                    transfers.append(torch_dist.P2POp(torch_dist.irecv, tensor, 0))
        return torch_dist.batch_isend_irecv(transfers) if transfers else []


def committed_steps(store, number):
    """The number of steps that are committed in quorum `number` or before it, and whether the quorum is closed."""
    steps, _, closed = store.get(f"{number} steps").decode().partition(" ")
    return int(steps), bool(closed)


def close(store, number):
    """End a quorum. A step that is not committed by now will be repeated by the next one."""
    steps, closed = committed_steps(store, number)
    while not closed:
        store.compare_set(f"{number} steps", str(steps), f"{steps} closed")
        steps, closed = committed_steps(store, number)
    # The process that was to ring may have died: the last voter, the last to arrive, or another one that has closed it.
    for step in (steps - 1, steps):
        store.set(f"{number} bell {step}", "")


# ---- the next quorum ----------------------------------------------------------------------------------------------


def lost_processes(store):
    """The names of all processes that their supervisors have seen die."""
    return set(store.get("lost").decode().split())


def newest_quorum(store):
    """The number of the newest quorum, or -1."""
    number = int(store.compare_set("newest", "", "-1"))
    while store.check([f"{number + 1} members"]):
        number += 1
    store.set("newest", str(number))  # where the next search begins; a slow process may set it too low
    return number


def read_quorum(store, number):
    """The names of the holders and of the new members of a quorum, and its first step.

    Raises DistributedError if it has been agreed that the job cannot continue.
    """
    quorum = json.loads(store.get(f"{number} members"))
    if "error" in quorum:
        raise dist.DistributedError(quorum["error"])
    store.compare_set(f"{number} steps", "", str(quorum["step"]))  # only the first of these changes anything
    return quorum["holders"], quorum["newcomers"], quorum["step"]


def members_of(store, number):
    holders, newcomers, _ = read_quorum(store, number)
    return holders + newcomers


def meet(store, name, own_step, n_expected, args):
    """Join the next quorum with the parameters of `own_step`. Returns None if all steps are committed.

    Raises DistributedError if there are too few members, or none that has the newest parameters.
    """
    number = newest_quorum(store)
    while True:
        number += 1
        store.append(f"{number} joining", f"{name} {own_step}\n")
        start = time.monotonic()
        while not store.check([f"{number} members"]):
            if number > 0 and is_finished(store, number - 1, args):
                return None
            waited = time.monotonic() - start
            proposal = propose(store, number, n_expected, waited, args)
            if proposal is None:
                time.sleep(POLL)
            else:
                store.compare_set(f"{number} members", "", json.dumps(proposal))  # the first proposal is the quorum
        holders, newcomers, step = read_quorum(store, number)
        members = holders + newcomers
        if name in members:  # else it came too late
            return Quorum(store, number, members.index(name), members, len(holders), step, args.timeout)


def is_finished(store, number, args):
    """Have all steps been committed by quorum `number`?"""
    read_quorum(store, number)
    return committed_steps(store, number)[0] == args.steps


def propose(store, number, n_expected, waited, args):
    """The members of quorum `number`, or an error that ends the job, or None if it is too early to decide."""
    lost = lost_processes(store)
    step = 0
    previous = []
    if number > 0:
        previous = members_of(store, number - 1)
        if lost.issuperset(previous):
            close(store, number - 1)
        step, closed = committed_steps(store, number - 1)
        if not closed and waited > args.wait:
            return {"error": f"the members have not finished step {step} within --wait {args.wait} s"}
        if not closed:
            return None

    holders = []
    newcomers = []
    for line in store.get(f"{number} joining").decode().splitlines():
        name, own_step = line.split()
        if name not in lost and int(own_step) == step:
            holders.append(name)
        elif name not in lost:
            newcomers.append(name)
    n_present = len(holders) + len(newcomers)
    all_are_here = lost.union(holders, newcomers).issuperset(previous)
    if number == 0:
        all_are_here = n_present >= n_expected
    waited_enough = waited > args.timeout
    # A process that an earlier quorum has left behind may have the newest parameters, and still be on its way.
    if step > 0 and not holders and all_are_here and waited_enough:
        return {"error": f"all processes with the parameters of step {step} are lost: start again"}
    can_train = bool(holders) and n_present >= args.min_members
    if can_train and (all_are_here or waited_enough):
        return {"step": step, "holders": holders, "newcomers": newcomers}
    if waited > args.wait:
        here = f"{n_present} members, {len(holders)} of them with the parameters of step {step}"
        return {"error": f"{here}, after --wait {args.wait} s: --min-members is {args.min_members}"}
    return None


# ---- training -----------------------------------------------------------------------------------------------------


class Trainer:
    """Model, optimizer, and `step`: the parameters here are those before this step."""

    def __init__(self, args):
        torch.set_float32_matmul_precision("high")  # TF32 on GPUs: far faster matrix products, with 10 bits of mantissa
        device = dist.get_device()
        torch.manual_seed(args.seed)  # the same weights in every process
        self.model = gpt.GPT(args.layers, args.width, args.heads, args.length).to(device)
        torch.seed()  # this model has no dropout; in yours, each process draws its own
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, fused=True)
        self.gradients = make_gradients(self.model)
        self.losses = torch.zeros(args.steps, device=device)
        self.step = 0
        self.timed_step = 0  # the speed is measured since this step, which began at `start`
        self.start = self.last_commit = time.perf_counter()
        self.text, _ = gpt.load_text()
        self.last_error = "a member is lost"  # or torch's message, once a collective has failed
        self.args = args

    def train_in(self, quorum):
        """Train until the quorum is closed, or all steps are committed."""
        if self.step != quorum.first_step:  # a new member
            self.timed_step = quorum.first_step
            self.start = time.perf_counter()
        try:
            quorum.connect()
            step = quorum.first_step
            closed = False
            while not closed and step < self.args.steps:
                self.sum_gradients(quorum, step)
                committed, closed = quorum.vote(step)
                if committed == step + 1:
                    self.take_step(step)
                    self.report(quorum)
                step = committed
        except PeerLost as error:
            self.last_error = str(error) or self.last_error
            close(quorum.store, quorum.number)
        quorum.leave()

    def sum_gradients(self, quorum, step):
        """Compute the gradients and the loss of the global batch. Raises PeerLost."""
        self.gradients.zero_()
        transfers = []
        if step == quorum.first_step and quorum.has_newcomers():
            if step != self.step:
                self.optimizer.step()  # with zeros as gradients: it creates the state that is received now
            with communication():
                transfers = quorum.start_healing(self.state_tensors())
        args = self.args
        x, y = gpt.batch(self.text, step, args.global_batch_size, args.length, args.seed, dist.get_device())
        own_x = quorum.share(step, x)
        own_y = quorum.share(step, y)
        if len(own_x) > 0:
            loss = gpt.loss_fn(self.model(own_x), own_y) * (len(own_x) / len(x))  # summed, it is the mean over the rows
            loss.backward()
            self.gradients[-1] = loss.detach()
        with communication():
            for transfer in transfers:
                transfer.wait(quorum.timeout)
            torch_dist.all_reduce(self.gradients, async_op=True).wait(quorum.timeout)  # it blocks, under nccl too

    def take_step(self, step):
        self.losses[step] = self.gradients[-1]
        if self.args.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.optimizer.step()
        self.step = step + 1

    def state_tensors(self):
        """All that a new member needs, in the same order in every process."""
        tensors = [*self.model.parameters(), *self.model.buffers(), self.losses]
        for param in self.model.parameters():
            for value in self.optimizer.state[param].values():
                if torch.is_tensor(value):
                    tensors.append(value)
        return [tensor.detach() for tensor in tensors]

    def report(self, quorum):
        """Rank 0 of the quorum prints its first step, and a line every --log-every steps."""
        now = time.perf_counter()
        if quorum.rank == 0 and quorum.number > 0 and self.step == quorum.first_step + 1:
            n_new = len(quorum.members) - quorum.n_holders
            line = f"quorum {quorum.number}: {len(quorum.members)} members, {n_new} of them new"
            log(f"{line} | step {self.step} took {now - self.last_commit:.2f} s")
        self.last_commit = now
        if self.step % self.args.log_every == 0 or self.step == self.args.steps:
            first = (self.step - 1) // self.args.log_every * self.args.log_every
            loss = self.losses[first : self.step].mean().item()  # waits for the device, so the clock is read after it
            tokens = (self.step - self.timed_step) * self.args.global_batch_size * self.args.length
            speed = tokens / (time.perf_counter() - self.start)
            if quorum.rank == 0:
                line = f"step {self.step} | loss {loss:.4f} | {len(quorum.members)} members"
                log(f"{line} | {speed:,.0f} tokens/s")
            self.timed_step = self.step
            self.start = time.perf_counter()


def make_gradients(model):
    """All gradients as one vector, which one all-reduce sums, and after them a place for the loss."""
    params = list(model.parameters())
    gradients = torch.zeros(sum(param.numel() for param in params) + 1, device=params[0].device)
    offset = 0
    for param in params:
        param.grad = gradients[offset : offset + param.numel()].view_as(param)
        offset += param.numel()
    return gradients


def train(store, name, n_expected, args):
    """Returns the trainer after all steps, or None if the others finished without this process."""
    trainer = Trainer(args)
    check_alike(store, trainer)
    n_fruitless = 0
    while trainer.step < args.steps:
        quorum = meet(store, name, trainer.step, n_expected, args)
        if quorum is None:
            return None
        trainer.train_in(quorum)
        committed, _ = committed_steps(store, quorum.number)
        n_fruitless = 0 if committed > quorum.first_step else n_fruitless + 1
        if n_fruitless == MOST_FRUITLESS:
            line = f"{n_fruitless} quorums in a row have committed no step; the last error: {trainer.last_error}"
            raise dist.DistributedError(line)
    return trainer


def check_alike(store, trainer):
    """Raises DistributedError if this process would train another model than the first one, or on another text."""
    own = {option: getattr(trainer.args, option) for option in SAME_OPTIONS}
    own["the text (of the standard library)"] = checksum([trainer.text])
    own["the first weights"] = checksum(trainer.model.parameters())
    first = json.loads(store.compare_set("alike", "", json.dumps(own)))
    different = [what for what in own if own[what] != first[what]]
    if different:
        raise dist.DistributedError(f"two processes have different values of: {', '.join(different)}")


def checksum(tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


# ---- supervisor ---------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    """Keep one process training, until the job is finished or cannot continue. This process itself does not train."""
    try:
        store, address = connect_to_store(args)
        store.append("lost", "")
        supervise(local_rank, world_size, store, address, args)
    except torch_dist.DistNetworkError:
        raise dist.DistributedError("the store is lost, or cannot be reached") from None


def supervise(local_rank, world_size, store, address, args):
    context = multiprocessing.get_context("fork")  # a copy of this process starts at once: it has imported torch
    for _ in range(args.max_restarts + 1):
        name = f"{socket.gethostname()}-{local_rank}-{uuid.uuid4().hex[:8]}"
        reasons = context.SimpleQueue()
        process = context.Process(target=run_trainer, args=(address, name, world_size, args, reasons))
        process.start()
        log(f"process {process.pid} trains as {name}")
        wait_for(process, name, store, args)
        last_members = members_at_the_end(store, args)
        was_left_behind = last_members is not None and name not in last_members
        if process.exitcode == 0 or (process.exitcode < 0 and was_left_behind):
            leave_last(store, name, last_members, args)
            return
        report_loss(store, name)
        if process.exitcode > 0 and reasons.empty():
            raise dist.DistributedError(f"{name} raised an exception: see its traceback above")
        if process.exitcode > 0:
            raise dist.DistributedError(reasons.get())
        line = f"{name} was killed by {signal.Signals(-process.exitcode).name}"
        if last_members is not None:  # a new process would not do what this one did after the last step
            leave_last(store, name, last_members, args)
            raise dist.DistributedError(f"{line} after the last step: if it was saving, its files are incomplete")
        log(line)
    raise dist.DistributedError(f"{name} is not replaced: --max-restarts is {args.max_restarts}")


def connect_to_store(args):
    """The store of the job, and its host and port. One process without a launcher holds it itself."""
    if args.store:
        address = args.store
    elif dist.is_launched():
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", spawn.loopback())
        server = spawn.start_store()
        return torch_dist.PrefixStore("quorums", server), ("127.0.0.1", server.port)
    return connect(address), address


def connect(address):
    host, port = address
    return torch_dist.PrefixStore("quorums", torch_dist.TCPStore(host, port, is_master=False))


def members_at_the_end(store, args):
    """The members of the quorum that has committed the last step, or None before that."""
    number = newest_quorum(store)
    if number < 0 or not is_finished(store, number, args):
        return None
    return members_of(store, number)


def wait_for(process, name, store, args):
    """Wait until the process has ended.

    When all steps are committed, a process that does not end is killed, since it may be stopped forever: after
    --timeout seconds if it was left behind, and after --wait seconds if it has finished and may be saving.
    """
    end = None
    while process.is_alive():
        process.join(1)
        last_members = members_at_the_end(store, args)
        if last_members is not None and end is None:
            end = time.monotonic() + (args.wait if name in last_members else args.timeout)
        if end is not None and time.monotonic() > end:
            log(f"{name} has not ended in time after the last step: it is killed")
            process.kill()
            process.join()


def leave_last(store, name, last_members, args):
    """On the machine of --store, wait until the members on all machines have ended, because the store ends with it."""
    store.append("ended", f"{name} ")
    if not args.store or not is_on_this_machine(args.store):
        return  # a launcher waits for all of its own processes
    end = time.monotonic() + args.wait
    while time.monotonic() < end:
        ended = store.get("ended").decode().split()
        if lost_processes(store).union(ended).issuperset(last_members):
            break
        time.sleep(POLL)
    time.sleep(LAUNCHER_SECONDS)  # a torchrun that loses the store before it has noticed would report a failure


def is_on_this_machine(address):
    """A connection to another machine has another address at each end."""
    with socket.create_connection(address) as connection:
        return connection.getsockname()[0] == connection.getpeername()[0]


def report_loss(store, name):
    """Tell the others that a process has died, and end its quorum, so that nobody waits for its vote."""
    store.append("lost", f"{name} ")
    number = newest_quorum(store)
    if number >= 0 and name in members_of(store, number):
        close(store, number)


def run_trainer(address, name, n_expected, args, reasons):
    """In the started process: train, and put the line into `reasons` if the job cannot continue."""
    threading.Thread(target=end_with_supervisor, daemon=True).start()
    os.environ.pop("RANK", None)  # its rank is another one in each quorum
    os.environ.pop("WORLD_SIZE", None)
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # or NCCL would end this process after the timeout
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(args.timeout))  # seconds to wait for the others
    try:
        if torch.cuda.is_available():
            torch.cuda.set_device(dist.get_device())
        train(connect(address), name, n_expected, args)
        # Save here what you need. The store stays until all members have ended.
    except dist.DistributedError as error:
        reasons.put(str(error))
        sys.exit(1)
    except torch_dist.DistNetworkError:
        reasons.put("the store is lost")
        sys.exit(1)
    except torch.AcceleratorError:  # the GPU has failed, and this process with it
        traceback.print_exc()
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_supervisor():
    multiprocessing.parent_process().join()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc, tolerate_killed=True)
