"""A training script with one planted mistake, or an unusual but right one: planted.py NAME torch|helper [TYPE].

TYPE is that of weights and inputs, float32 or bfloat16, with a rate as fine-tuning has. The comments say what is wrong.
`torch` uses torch's own DDP and gloo, and `helper` uses distributed.py. On one process every case is a plain loop.
tests/test_parity.py lists what parity.py must say of each.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CASE, FLAVOUR = sys.argv[1:3]
TYPE = getattr(torch, sys.argv[3], None) if len(sys.argv) > 3 else None
RATE = 1e-5 if TYPE else 0.01
STEPS = 6
BATCH = 16
if FLAVOUR == "helper":
    import distributed as dist


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.dropout = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(12) if CASE in ("batch_norm", "sync_batch_norm") else nn.LayerNorm(12)
        self.last = nn.Linear(12, 3)

    def forward(self, x, noise=None):
        hidden = checkpoint(self.first, x, use_reentrant=False) if CASE == "recompute" else self.first(x)
        hidden = self.norm(torch.tanh(hidden))
        hidden = F.relu(hidden, inplace=True) if CASE == "sync_batch_norm" else hidden
        if noise is not None:
            hidden = hidden + noise
        return self.last(self.dropout(hidden))


class Heads(nn.Module):
    """Rows of an even number use one head, and the others another one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def forward(self, x, numbers):
        hidden = torch.tanh(self.first(x))
        return torch.cat([self.heads[number](hidden[numbers == number]) for number in numbers.unique().tolist()])


class Casts(Net):
    """It computes in bfloat16, with weights and a result of another type."""

    def forward(self, x):
        weight, bias = self.first.weight.to(torch.bfloat16), self.first.bias.to(torch.bfloat16)
        return self.last(self.norm(torch.tanh(F.linear(x.bfloat16(), weight, bias)).to(x.dtype)))


UNWRAPPED = ("summed", "by_hand", "average_of_the_owner", "spawned_without_seed")


# ---- start, wrap and average: with torch, or with the helper -------------------------------------------------------


def start():
    if CASE == "no_process_group":
        return 0, 1
    if FLAVOUR == "helper":
        dist.init_process_group()
    else:
        torch_dist.init_process_group("gloo")
    return torch_dist.get_rank(), torch_dist.get_world_size()


def wrap(model):
    if CASE == "no_process_group":
        return model
    return dist.prepare_ddp_model(model) if FLAVOUR == "helper" else DistributedDataParallel(model)


def shard(model):
    if FLAVOUR == "helper":
        return dist.prepare_fsdp_model(model)
    mesh = init_device_mesh("cpu", (torch_dist.get_world_size(),))
    return fully_shard(model, mesh=mesh) if CASE != "optimizer_first" or mesh.size() > 1 else model


def sampler_of(dataset):
    if CASE == "no_process_group":
        return DistributedSampler(dataset, num_replicas=1, rank=0)
    if FLAVOUR == "helper":
        return dist.data_sampler(dataset, distributed=True, shuffle=True)
    return DistributedSampler(dataset, shuffle=True)


def average_by_hand(params, divide=True):
    all_reduce = dist.all_reduce if FLAVOUR == "helper" else torch_dist.all_reduce
    for param in params:
        all_reduce(param.grad)
        if divide:
            param.grad /= torch_dist.get_world_size()


# ---- the loop that most cases share --------------------------------------------------------------------------------


def batches(rank, world_size):
    """Inputs and labels of each step, (share of the batch, 8) and (share of the batch,)."""
    generator = torch.Generator().manual_seed(rank if CASE == "data_of_each_rank" else 0)
    points = torch.randn(96, 8, generator=generator)
    labels = points[:, :3].argmax(dim=1)
    dataset = TensorDataset(points, labels)
    batch_size = BATCH // world_size
    if CASE == "kept_batch_size":
        batch_size = BATCH
    torch.manual_seed(5)
    if CASE == "no_sampler":
        loader = DataLoader(dataset, batch_size, shuffle=True)
    else:
        loader = DataLoader(dataset, batch_size, sampler=sampler_of(dataset))
    n_steps = STEPS // world_size if CASE == "fewer_steps" else STEPS
    for _, (x, y) in zip(range(n_steps), loader, strict=False):
        yield x.to(TYPE), y


def inputs_of(step, x, rank, world_size):
    """Further arguments of the model: noise that is drawn by each rank, or for the batch."""
    if CASE == "noise_of_each_rank":
        torch.manual_seed(100 * step + rank)
        return {"noise": torch.randn(len(x), 12).to(TYPE)}
    if CASE == "noise_for_the_batch":
        torch.manual_seed(100 * step)
        return {"noise": torch.randn(BATCH, 12)[rank::world_size].to(TYPE)}  # as the sampler gives rows
    return {}


def loss_of(logits, y, rank, world_size):
    logits = logits.float() if TYPE else logits
    if CASE == "loss_is_a_sum":
        return F.cross_entropy(logits, y, reduction="sum")
    if CASE in ("mean_over_unequal_counts", "buckets_rebuilt_before"):
        return F.cross_entropy(logits, y.masked_fill(y == 1, -100))
    return F.cross_entropy(logits, y)


def make_model(rank, world_size):
    if CASE not in ("no_seed", "spawned_without_seed"):
        torch.manual_seed(1)
    model = (Casts() if CASE == "casts" else Net()).to(TYPE)
    if CASE == "sync_batch_norm":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if CASE in ("unfrozen_later", "frozen"):
        model.first.requires_grad_(False)
    return model


def make_optimizer(model, params, world_size):
    if CASE == "learning_rate_times_n":
        return torch.optim.AdamW(params, lr=RATE * world_size)
    if CASE == "zero_redundancy":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=RATE)
    if CASE == "closure":
        return torch.optim.SGD(params, lr=10 * RATE, momentum=0.9)
    if CASE == "loss_is_a_sum":
        return torch.optim.RMSprop(params, lr=RATE)
    return torch.optim.AdamW(params, lr=RATE)


def train(rank, world_size):
    model = make_model(rank, world_size)
    optimizer = None
    if CASE == "optimizer_first":  # it keeps parameters that nobody uses
        optimizer = make_optimizer(model, list(model.parameters()), world_size)
    if CASE in ("optimizer_first", "sharded", "clipped_shards"):
        wrapped = shard(model)
    elif CASE in UNWRAPPED:
        wrapped = model
    elif CASE == "wrapper_not_kept":
        wrapped = lambda *args, **kwargs: wrap(model)(*args, **kwargs)  # noqa: E731
    else:
        wrapped = wrap(model)
    if CASE == "unfrozen_later":
        model.first.requires_grad_(True)
    if CASE == "drawn_after_wrapping":
        torch.manual_seed(rank)
        nn.init.normal_(model.last.weight)
    if CASE == "loaded_on_one_rank" and rank == world_size - 1:
        model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()})
    if CASE == "compiled":
        wrapped = torch.compile(wrapped, backend="eager", fullgraph=True)
    if CASE == "wrapped_inside":
        wrapped = nn.Sequential(wrapped)  # timm has such an outermost module, with the loss
    temperature = nn.Parameter(torch.ones((), dtype=TYPE))
    params = [*model.parameters()] + ([temperature] if CASE == "parameter_outside" else [])
    if optimizer is None:
        optimizer = make_optimizer(model, params, world_size)
    if CASE == "buckets_rebuilt_before" and world_size > 1:  # as checkpoint.rebuild_buckets does
        loss_of(wrapped(torch.ones(4, 8).to(TYPE)), torch.arange(4) % 3, rank, world_size).backward()
        model.zero_grad()
    for step, (x, y) in enumerate(batches(rank, world_size)):

        def forward_and_backward(x=x, y=y, step=step):
            optimizer.zero_grad()
            called = model if CASE == "plain_model" else wrapped
            logits = called(x, **inputs_of(step, x, rank, world_size))
            if CASE == "parameter_outside":
                logits = logits * temperature
            loss = loss_of(logits, y, rank, world_size)
            loss.backward()
            if CASE == "penalty_by_the_plain_model":
                model(x).square().mean().backward()
            return loss

        if CASE == "closure":
            optimizer.step(forward_and_backward)
            continue
        if CASE in ("accumulated", "clipped_each_time"):
            accumulate(model, wrapped, optimizer, x, y)
        else:
            forward_and_backward()
        average_and_clip(model, rank, world_size)
        optimizer.step()
        if CASE == "average_of_the_owner":
            for number, param in enumerate(model.parameters()):
                torch_dist.broadcast(param.data, number % world_size)
        if CASE == "weight_decay_times_n":
            optimizer.param_groups[0]["weight_decay"] *= world_size
        if CASE == "evaluates":  # all ranks look at all of it, with gradients off and on, and cast it
            with torch.no_grad():
                model(torch.ones(24, 8, dtype=TYPE or torch.float32).to(x.device))
            F.binary_cross_entropy(model(torch.ones(24, 8).to(TYPE)).sigmoid().to(torch.float32), torch.ones(24, 3))


def accumulate(model, wrapped, optimizer, x, y):
    """Two micro-batches. Only the last all-reduces."""
    optimizer.zero_grad()
    for number, (micro_x, micro_y) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
        with wrapped.no_sync() if number == 0 and hasattr(wrapped, "no_sync") else contextlib.nullcontext():
            (F.cross_entropy(wrapped(micro_x), micro_y) / 2).backward()
        if CASE == "clipped_each_time":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def average_and_clip(model, rank, world_size):
    params = list(model.parameters())
    if CASE == "summed":
        average_by_hand(params, divide=False)
    elif CASE in ("by_hand", "spawned_without_seed"):
        average_by_hand(params)
    elif CASE == "average_of_the_owner":  # ZeRO: the others keep their own gradient, and get the weights later
        for number, param in enumerate(params):
            torch_dist.reduce(param.grad, number % world_size)
            param.grad /= world_size
    elif CASE == "clipped_at_n_times":
        nn.utils.clip_grad_norm_(params, 0.05 * world_size)
    elif CASE in ("clipped", "loss_is_a_sum"):
        nn.utils.clip_grad_norm_(params, 0.05)


# ---- loops of their own --------------------------------------------------------------------------------------------


def descend(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def gan(rank, world_size):
    torch.manual_seed(1)
    generator = wrap(nn.Linear(4, 8).to(TYPE))
    critic = wrap(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).to(TYPE))
    of_generator, of_critic = (torch.optim.Adam(model.parameters(), lr=RATE) for model in (generator, critic))
    for x, _ in batches(rank, world_size):
        z = torch.randn(BATCH, 4).chunk(world_size)[rank].to(TYPE)
        of_critic.zero_grad()
        (F.softplus(critic(generator(z).detach())).mean() + F.softplus(-critic(x)).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        F.softplus(-critic(generator(z))).mean().backward()
        of_generator.step()


def redirected(rank, world_size):
    """As Lightning: the outermost module is the model on one process, and on several the task that holds it."""
    torch.manual_seed(1)
    task = nn.Sequential(nn.Linear(8, 1).to(TYPE))
    called = wrap(task) if world_size > 1 else task[0]
    optimizer = torch.optim.Adam(task.parameters(), lr=RATE)
    for x, _ in batches(rank, world_size):
        descend(optimizer, called(x).square().mean())


def some_ranks_use(rank, world_size):
    """FSDP2 averages what has a gradient, in the order of parameters: here one head with the other."""
    torch.manual_seed(1)
    model = Heads().to(TYPE)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    numbers = torch.arange(BATCH) % 2
    for _ in range(STEPS):
        x = torch.randn(BATCH, 8).to(TYPE)[rank::world_size]
        descend(optimizer, model(x, numbers[rank::world_size]).square().mean())


def sparse(rank, world_size):
    torch.manual_seed(1)
    model = wrap(nn.Embedding(10, 3, sparse=True).to(TYPE))
    optimizer = torch.optim.SGD(model.parameters(), lr=10 * RATE)
    for _ in range(STEPS):
        words = torch.randint(10, (BATCH,))[rank::world_size]
        descend(optimizer, model(words).square().mean())


def stopped(rank, world_size):
    """In step 3 rank 1 ends, raises an error, or waits for the other one."""
    torch.manual_seed(1)
    model = wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(batches(rank, world_size)):
        if step == 3 and rank == 1:
            if CASE == "early_stop":
                break
            if CASE == "crash":
                raise ZeroDivisionError("planted")
            torch_dist.barrier()
        descend(optimizer, F.cross_entropy(model(x), y))


def not_in_float64(rank, world_size):
    F.binary_cross_entropy(
        wrap(nn.Linear(2, 1))(torch.ones(2, 2)).sigmoid(), torch.ones(2, 1, dtype=torch.float32)
    ).backward()


def no_optimizer(rank, world_size):
    model = wrap(nn.Linear(2, 1))
    for _ in range(STEPS):
        model(torch.ones(2, 2)).sum().backward()


def children(rank, world_size):
    """Starts a process, makes a file, trains, and stands still on several processes if FOREVER is set."""
    tempfile.mkdtemp()
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", os.environ["MARK"]])
    if "FOREVER" in os.environ:
        Path(os.environ["FOREVER"], str(rank)).touch()
        threading.Event().wait()
    train(rank, world_size)


LOOPS = {loop.__name__: loop for loop in (gan, redirected, some_ranks_use, sparse, not_in_float64)}
LOOPS |= {"no_optimizer": no_optimizer, "children": children}
LOOPS |= dict.fromkeys(("early_stop", "crash", "stand_still"), stopped)


def spawned(rank, world_size):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": os.environ["PORT"]}
    torch_dist.init_process_group("gloo", rank=rank, world_size=world_size)
    train(rank, world_size)


def main(local_rank=None, world_size=None):
    rank, world_size = start()
    LOOPS.get(CASE, train)(rank, world_size)
    if FLAVOUR == "torch" and torch_dist.is_initialized():
        torch_dist.destroy_process_group()


if __name__ == "__main__":
    if FLAVOUR == "helper":
        dist.launch(main)
    elif CASE in ("spawn", "spawn_as_many", "spawned_without_seed"):
        torch.manual_seed(1)  # a fresh process does not inherit it
        n_processes = 2 if CASE == "spawn" else int(sys.argv[3])
        torch.multiprocessing.spawn(spawned, args=(n_processes,), nprocs=n_processes)
    elif CASE in ("fork", "own_processes"):
        method = "fork" if CASE == "fork" else "spawn"
        process = torch.multiprocessing.get_context(method).Process(target=spawned, args=(0, 1))
        process.start()
        process.join()
    else:
        main()
