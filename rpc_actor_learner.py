"""Reinforcement learning with many observers and one learner: one forward pass answers all observers.

Each observer steps an environment of its own, here a cart that balances a pole. The learner holds the policy. In each
step every observer sends its state and gets the probability of pushing the cart to the right. The learner waits until
all observers have asked, and computes all answers as one batch:

    observer 1                  learner                              observer 2
    act(state) ---------------->                   <---------------- act(state')
               <---------------- policy([state, state']) ---------->
    ...
    finish_episode(...) ------->                   <---------------- finish_episode(...)
               <---------------- update the policy ---------------->

The update is REINFORCE: with the return G of step t, the discounted sum of the rewards from t on,

    loss = - mean over all steps of (G - baseline) / deviation · log p(action | state)

where baseline and deviation are the mean and the standard deviation of G over all steps of all episodes.

A call without batching would be answered at once, but the policy would run once per observer. Batching pays where the
policy is large or on a GPU. benchmarks/actor_learner.py compares the two. Choose this script where environments are
slow or need machines of their own. If each process can hold a copy of the policy, step environments in each process
and train with DDP (min_DDP.py). PyTorch maintains torch.distributed.rpc but no longer develops it.

Cost, for P float32 parameters and N observers: the learner holds 16·P bytes (parameters, gradients, Adam), an observer
nothing. A step is one remote call per observer: a state of 4 numbers, and one number back, about a kilobyte with RPC's
own data. At the end of an episode an observer sends 24 bytes per step.

    python rpc_actor_learner.py                                      # a learner and four observers on this machine
    python rpc_actor_learner.py --observers 8 --lr 0.02
    torchrun --standalone --nproc-per-node 5 rpc_actor_learner.py    # rank 0 is the learner
    export TP_SOCKET_IFNAME=eth1 GLOO_SOCKET_IFNAME=eth1             # on each of two machines: see rpc_remote.py
    torchrun --nnodes 2 --nproc-per-node 3 --rdzv-backend c10d --rdzv-endpoint HOST:29500 rpc_actor_learner.py

All randomness comes from the seed, the observer, its episode and the step, so a run can be repeated exactly. When an
observer is killed, the others continue without it. When the learner is killed, all end.

An episode ends when the pole falls, and after 200 steps. Training ends when the mean return of the last 100 is 195.
"""

import math
import random
import threading
import time

import torch
from torch import nn
from torch.distributed import rpc
from torch.nn import functional as F

import distributed as dist
import options
import rpc_remote

MAX_STEPS = 200  # an episode ends here
GOAL = 195  # training ends at this mean return over 100 episodes
DISCOUNT = 0.99  # a reward k steps later counts DISCOUNT**k

# ---- what observers call in the learner's process, each call in a thread of RPC -----------------------------------

learner = None  # the Learner, in the learner's process; hold its lock to change anything in it


@rpc.functions.async_execution  # the observer waits for the Future, while this thread serves other calls
def act(observer, state):
    """Returns a Future of the probability to push the cart to the right."""
    answer = torch.futures.Future()
    with learner.lock:
        if observer in learner.observers:  # it may have died meanwhile
            learner.requests[observer] = (state, answer)
            answer_if_all_have_asked()
    return answer


@torch.no_grad()
def answer_if_all_have_asked():
    """One forward pass for all observers that are in an episode, if none of them is still on its way."""
    requests = learner.requests
    if not requests or requests.keys() != learner.playing():
        return
    learner.requests = {}
    observers = sorted(requests)
    states = torch.tensor([requests[observer][0] for observer in observers], device=learner.device)
    probabilities = learner.policy(states).sigmoid().flatten().tolist()
    for observer, probability in zip(observers, probabilities, strict=True):
        requests[observer][1].set_result(probability)


@rpc.functions.async_execution
def finish_episode(observer, states, actions):
    """Returns a Future. It is set after the update: True if the observer should play another episode."""
    with learner.lock:
        if observer in learner.observers:
            learner.episodes[observer] = (states, actions)
        updated = learner.updated
        answer_if_all_have_asked()  # the others wait for this observer no longer
        update_if_all_have_finished()
    return updated


# ---- an observer --------------------------------------------------------------------------------------------------


def observe(observer, seed):
    """Play episodes until the learner is done."""
    episode = 0
    play_another = True
    while play_another:
        states, actions = play(observer, episode, seed)
        play_another = rpc_remote.call("learner", finish_episode, observer, states, actions)
        episode += 1
    rpc_remote.leave("learner")


def play(observer, episode, seed):
    """Play an episode. Returns its states (steps, 4) and actions (steps,): 1 is a push to the right."""
    start = random.Random(f"{seed} {observer} {episode}")
    state = [start.uniform(-0.05, 0.05) for _ in range(4)]
    states = []
    actions = []
    for step in range(MAX_STEPS):
        probability = rpc_remote.call("learner", act, observer, state)
        action = int(random.Random(f"{seed} {observer} {episode} {step}").random() < probability)
        states.append(state)
        actions.append(action)
        state = next_state(state, action)
        if has_fallen(state):
            break
    return torch.tensor(states), torch.tensor(actions)


# ---- training -----------------------------------------------------------------------------------------------------


class Learner:
    """The policy, its optimizer, and what the observers are doing."""

    def __init__(self, observers, device, args):
        torch.manual_seed(args.seed)
        self.policy = nn.Sequential(nn.Linear(4, args.hidden), nn.Tanh(), nn.Linear(args.hidden, 1)).to(device)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=args.lr)
        self.device = device
        self.args = args
        self.lock = threading.Lock()
        self.observers = set(observers)  # those that are not lost
        self.requests = {}  # a state and the Future of its answer, by observer
        self.episodes = {}  # states and actions of a finished episode, by observer
        self.updated = torch.futures.Future()  # done after the next update
        self.returns = []  # one per episode
        self.updates = 0
        self.done = False  # has it reached the goal, or made all updates?
        self.begin = time.perf_counter()

    def playing(self):
        """The observers that are in an episode."""
        return self.observers - self.episodes.keys()

    def mean_return(self):
        """Over the last 100 episodes."""
        recent = self.returns[-100:]
        return sum(recent) / len(recent)


def update_if_all_have_finished():
    """Update the policy, and let all observers begin the next episode, if all have finished theirs."""
    if learner.playing() or not learner.episodes:
        return
    reinforce([learner.episodes[observer] for observer in sorted(learner.episodes)])
    learner.updates += 1
    reached = len(learner.returns) >= 100 and learner.mean_return() >= GOAL
    learner.done = reached or learner.updates == learner.args.updates
    if learner.updates % learner.args.log_every == 0 or learner.done:
        speed = sum(learner.returns) / (time.perf_counter() - learner.begin)
        progress = f"update {learner.updates}/{learner.args.updates} | {len(learner.returns)} episodes"
        print(f"{progress} | mean return {learner.mean_return():.1f} | {speed:,.0f} actions/s", flush=True)
    updated = learner.updated
    learner.episodes = {}
    learner.updated = torch.futures.Future()
    updated.set_result(not learner.done)


def reinforce(episodes):
    """Make actions more probable whose return was above the mean."""
    learner.returns += [len(states) for states, _ in episodes]  # the reward of each step is 1
    states = torch.cat([states for states, _ in episodes]).to(learner.device)
    actions = torch.cat([actions for _, actions in episodes]).to(learner.device)
    returns = torch.cat([discounted_returns(len(states)) for states, _ in episodes]).to(learner.device)
    advantages = (returns - returns.mean()) / (returns.std() + 1e-6)
    logits = learner.policy(states).flatten()  # for pushing to the right
    log_probabilities = F.logsigmoid(torch.where(actions == 1, logits, -logits))
    loss = -(advantages * log_probabilities).mean()
    learner.optimizer.zero_grad()
    loss.backward()
    learner.optimizer.step()


def discounted_returns(steps):
    """The return of each step of an episode in which each step is rewarded with 1."""
    from_the_end = (DISCOUNT ** torch.arange(steps)).cumsum(dim=0)
    return from_the_end.flip(0)


def lose(observer):
    """Continue without an observer that has died."""
    with learner.lock:
        print(f"observer {observer} is lost", flush=True)
        learner.observers.discard(observer)
        learner.requests.pop(observer, None)
        answer_if_all_have_asked()
        update_if_all_have_finished()


def learn(observers):
    """Answer the observers until they are done."""
    for observer in observers:
        rpc_remote.watch(f"observer{observer}", lose, observer)
    rpc_remote.end(tolerate_lost=True)
    if not learner.done:
        raise dist.DistributedError(f"every observer is lost, after {learner.updates} updates")
    lost = [f"observer {observer}" for observer in observers if observer not in learner.observers]
    result = f"{learner.updates} updates, mean return {learner.mean_return():.1f}"
    print(f"Finished: {result}, {', '.join(lost) or 'no observer'} lost")


# ---- the environment ----------------------------------------------------------------------------------------------


def next_state(state, action):
    """The cart and the pole 0.02 s later: https://coneural.org/florian/papers/05_cart_pole.pdf, without friction."""
    gravity = 9.8
    pole_mass, total_mass = 0.1, 1.1
    half_length = 0.5  # half of the pole's length
    force = 10.0 if action == 1 else -10.0

    position, speed, angle, turning = state  # the angle is 0 when the pole stands upright
    sine, cosine = math.sin(angle), math.cos(angle)
    push = (force + pole_mass * half_length * turning**2 * sine) / total_mass
    inertia = half_length * (4 / 3 - pole_mass * cosine**2 / total_mass)
    turning_acceleration = (gravity * sine - cosine * push) / inertia
    acceleration = push - pole_mass * half_length * turning_acceleration * cosine / total_mass
    return [
        position + 0.02 * speed,
        speed + 0.02 * acceleration,
        angle + 0.02 * turning,
        turning + 0.02 * turning_acceleration,
    ]


def has_fallen(state):
    """Has the cart left its track, or the pole fallen by more than 12 degrees?"""
    return abs(state[0]) > 2.4 or abs(state[2]) > math.radians(12)


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = options.ArgumentParser(__doc__)
    observers_help = "number of observers; ignored under torchrun"
    hidden_help = "width of the policy's hidden layer"
    log_help = "updates between lines of progress"
    parser.add_argument("--observers", type=options.whole_number(1), default=4, help=observers_help)
    parser.add_argument("--hidden", type=options.whole_number(1), default=64, help=hidden_help)
    parser.add_argument("--updates", type=options.whole_number(1), default=500, help="updates at most")
    parser.add_argument("--lr", type=options.positive_number, default=0.01, help="learning rate")
    parser.add_argument("--log-every", type=options.whole_number(1), default=10, help=log_help, metavar="N")
    parser.add_argument("--seed", type=options.whole_number(0), default=0, help="random seed")
    rpc_remote.add_timeout(parser)
    args = parser.parse_args()
    if dist.is_launched():
        args.observers = dist.get_world_size() - 1
    if args.observers < 1:
        parser.error("WORLD_SIZE: 1 process is too few for a learner and an observer")
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    global learner
    rank = dist.get_rank()
    observers = range(1, world_size)  # their ranks
    if rank == 0:
        device = rpc_remote.get_device()
        learner = Learner(observers, device, args)  # before it joins, because then the first call may come
        rpc_remote.join("learner", args.timeout)
        learn(observers)
    else:
        rpc_remote.join(f"observer{rank}", args.timeout)
        observe(rank, args.seed)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.observers + 1, tolerate_killed=True)
