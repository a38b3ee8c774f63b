"""A training script with one planted mistake, or an unusual but right one: planted.py NAME torch|helper [TYPE].

TYPE is that of weights and inputs, float32 or bfloat16, with a rate as fine-tuning has. The comments say what is wrong.
`torch` uses torch's own DDP and gloo, and `helper` uses distributed.py. On one process every case is a plain loop.
tests/test_parity.py lists what parity.py must say of each.
"""

import contextlib
import copy
import os
import subprocess
import sys
import tempfile
import threading
import types
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
        has_batch_norm = CASE in ("batch_norm", "sync_batch_norm", "dice_with_norm")
        self.norm = nn.BatchNorm1d(12) if has_batch_norm else nn.LayerNorm(12)
        self.last = nn.Linear(12, 3)

    def forward(self, x, noise=None, mask=None):
        hidden = self.norm(torch.tanh(self.first(x)))
        hidden = F.relu(hidden, inplace=True) if CASE == "sync_batch_norm" else hidden
        if noise is not None:
            hidden = hidden + noise
        if mask is not None:
            hidden = hidden * mask
        return self.last(self.dropout(hidden))


class DropPath(nn.Module):
    """As timm has it: a sample skips the layer."""

    def forward(self, x):
        return x * torch.rand(len(x), 1).round() if self.training else x


class Special(nn.Module):
    """Models of right scripts: an RNN with dropout, recomputed layers, tied weights, a dict as input, random depth."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 3)
        if CASE == "rnn":
            self.rnn = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)
            return
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.path = DropPath() if CASE == "random_depth" else nn.Identity()
        if CASE == "tied":
            self.second.weight = self.first.weight

    def forward(self, inputs):
        x = inputs["x"] if CASE == "dict" else inputs
        if CASE == "recompute":
            x = checkpoint(self.first, x, use_reentrant=False)
            return self.last(checkpoint(self.second, x, use_reentrant=False))
        if CASE == "rnn":
            x, _ = self.rnn(x.unsqueeze(1).expand(-1, 3, -1))
            return self.last(x[:, -1])
        return self.last(self.path(self.second(torch.tanh(self.first(x)))))


class Task(nn.Module):
    """The outermost module, which holds a wrapped one and the loss. timm has such."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


class Heads(nn.Module):
    """Rows of an even number use one head, and the others another one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def forward(self, x, numbers):
        hidden = torch.tanh(self.first(x))
        return torch.cat([self.heads[number](hidden[numbers == number]) for number in numbers.unique().tolist()])


class Attention(nn.Module):
    """Softmax ignores the bias of keys, so its gradient is nothing but rounding."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        x = x.view(len(x), 2, 4).repeat(1, 1, 2)
        return self.last(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Graphs(nn.Module):
    """The first dimension of its edges, (2, n), is no batch. Without BatchNorm it would be right."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x, edges):
        messages = torch.zeros_like(x).index_add(0, edges[1], self.first(x)[edges[0]])
        return self.last(self.norm(messages).relu())


class Opaque(Net):
    """It gets an object in which nobody sees tensors."""

    def forward(self, batch):
        return super().forward(batch.x)


class Casts(Net):
    """It computes in bfloat16, with weights and a result of another type."""

    def forward(self, x):
        weight, bias = self.first.weight.to(torch.bfloat16), self.first.bias.to(torch.bfloat16)
        return self.last(self.norm(torch.tanh(F.linear(x.bfloat16(), weight, bias)).to(x.dtype)))


class Signs(torch.optim.SGD):
    def step(self):
        for param in self.param_groups[0]["params"]:
            param.grad.sign_()
        super().step()


class Averaging(torch.optim.SGD):
    """It averages gradients itself. That N processes decay N times is wrong."""

    @torch.no_grad()
    def step(self):
        average_by_hand(self.param_groups[0]["params"])
        for param in self.param_groups[0]["params"]:
            param.mul_(0.7 ** torch_dist.get_world_size())
        super().step()


UNWRAPPED = ("summed", "clipped_before_average", "one_forgotten", "by_hand", "average_of_the_owner")
UNWRAPPED += ("optimizer_averages",)
MODELS = {"key_bias": Attention, "signs": Attention, "graphs": Graphs, "batch_in_an_object": Opaque, "casts": Casts}
MODELS |= dict.fromkeys(("tied", "dict", "recompute", "rnn", "random_depth"), Special)


# ---- start, wrap and average: with torch, or with the helper -------------------------------------------------------


def start():
    if CASE == "no_process_group":
        return 0, 1
    if FLAVOUR == "helper":
        dist.init_process_group()
    else:
        torch_dist.init_process_group("gloo")
    return (0, 1) if CASE == "copies" else (torch_dist.get_rank(), torch_dist.get_world_size())


def wrap(model, **options):
    if CASE in ("no_process_group", "copies"):
        return model
    return (
        dist.prepare_ddp_model(model, **options) if FLAVOUR == "helper" else DistributedDataParallel(model, **options)
    )


def shard(model):
    if FLAVOUR == "helper":
        return dist.prepare_fsdp_model(model)
    mesh = init_device_mesh("cpu", (torch_dist.get_world_size(),))
    return fully_shard(model, mesh=mesh) if CASE != "optimizer_first" or mesh.size() > 1 else model


def sampler_of(dataset):
    if CASE in ("no_process_group", "copies"):
        return DistributedSampler(dataset, num_replicas=1, rank=0)
    if FLAVOUR == "helper":
        return dist.data_sampler(dataset, distributed=True, shuffle=True)
    return DistributedSampler(dataset, shuffle=True)


def sum_over_ranks(tensor):
    return dist.all_reduce(tensor) if FLAVOUR == "helper" else torch_dist.all_reduce(tensor)


def average_by_hand(params, divide=True):
    for param in params:
        sum_over_ranks(param.grad)
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
    if CASE == "divided_twice":
        batch_size //= world_size
    torch.manual_seed(5)
    if CASE == "no_sampler":
        loader = DataLoader(dataset, batch_size, shuffle=True)
    else:
        loader = DataLoader(dataset, batch_size, sampler=sampler_of(dataset))
    n_steps = STEPS // world_size if CASE == "fewer_steps" else STEPS
    for _, (x, y) in zip(range(n_steps), loader, strict=False):
        yield x.to(TYPE), y.roll(rank) if CASE in ("labels_of_other_rows", "batch_in_an_object") else y


def inputs_of(step, x, rank, world_size):
    """Further arguments of the model: noise that is drawn by each rank, or for the batch; a mask on one rank."""
    if CASE == "noise_of_each_rank":
        torch.manual_seed(100 * step + rank)
        return {"noise": torch.randn(len(x), 12).to(TYPE)}
    if CASE == "noise_for_the_batch":
        torch.manual_seed(100 * step)
        return {"noise": torch.randn(BATCH, 12)[rank::world_size].to(TYPE)}  # as the sampler gives rows
    if CASE == "mask_on_one_rank":
        return {"mask": torch.full((len(x), 12), 0.5, dtype=TYPE) if rank == 0 else None}
    if CASE == "keywords":
        return {"mask": torch.full((len(x), 12), 0.5, dtype=TYPE)}
    if CASE == "graphs":
        return {"edges": torch.stack([torch.arange(len(x)), torch.arange(len(x)).roll(1)])}
    return {}


def loss_of(logits, y, rank, world_size):
    logits = logits.float() if TYPE else logits
    if CASE == "loss_is_a_sum":
        return F.cross_entropy(logits, y, reduction="sum")
    if CASE == "loss_divided_by_n":
        return F.cross_entropy(logits, y) / world_size
    if CASE == "mean_over_unequal_counts":
        return F.cross_entropy(logits, y.masked_fill(y == 1, -100))
    if CASE == "sum_over_the_count":  # right: fairseq does so
        count = torch.tensor(len(y))
        sum_over_ranks(count)
        return F.cross_entropy(logits, y, reduction="sum") / count * world_size
    if CASE in ("dice_with_norm", "dice_rebuilds"):  # that of each rank's share
        p, is_first = logits.softmax(1)[:, 0], (y == 0).to(logits.dtype)
        return 1 - 2 * (p * is_first).sum() / (p.sum() + is_first.sum())
    return F.cross_entropy(logits, y)


def make_model(rank, world_size):
    if CASE != "no_seed":
        torch.manual_seed(world_size if CASE == "seed_of_the_model" else 1)
    model = MODELS.get(CASE, Net)().to(TYPE)
    if CASE == "sync_batch_norm":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if CASE in ("unfrozen_later", "frozen"):
        model.first.requires_grad_(False)
    return model


def make_optimizer(model, params, world_size):
    if CASE == "learning_rate_times_n":
        return torch.optim.AdamW(params, lr=RATE * world_size)
    if CASE == "weight_decay_times_n":
        return torch.optim.AdamW(params, lr=RATE, weight_decay=0.1 * world_size)
    if CASE == "zero_redundancy":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=RATE)
    if CASE == "key_bias":
        return torch.optim.AdamW(params, lr=RATE, eps=1e-10)
    if CASE == "signs":
        return Signs(params, lr=RATE)
    if CASE == "optimizer_averages":
        return Averaging(params, lr=10 * RATE)
    if CASE == "closure":
        return torch.optim.SGD(params, lr=10 * RATE, momentum=0.9)
    if CASE == "lbfgs":
        return torch.optim.LBFGS(params, lr=10 * RATE, max_iter=4, tolerance_change=0, tolerance_grad=0)
    if CASE in ("loss_is_a_sum", "rmsprop"):
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
        wrapped = Task(wrapped)
    average = copy.deepcopy(model) if CASE == "ema" else None
    temperature = nn.Parameter(torch.ones((), dtype=TYPE))
    params = [*model.parameters()] + ([temperature] if CASE == "parameter_outside" else [])
    if optimizer is None:
        optimizer = make_optimizer(model, params, world_size)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) if CASE == "scheduled_n_times" else None
    if CASE == "dice_rebuilds" and world_size > 1:  # as checkpoint.rebuild_buckets does
        loss_of(wrapped(torch.ones(4, 8).to(TYPE)), torch.arange(4) % 3, rank, world_size).backward()
        model.zero_grad()
    for step, (x, y) in enumerate(batches(rank, world_size)):

        def forward_and_backward(x=x, y=y, step=step):
            optimizer.zero_grad()
            inputs = {"x": x} if CASE == "dict" else x
            if CASE == "batch_in_an_object":
                inputs = types.SimpleNamespace(x=x)
            called = model if CASE == "plain_model" else wrapped
            logits = called(inputs, **inputs_of(step, x, rank, world_size))
            if CASE == "parameter_outside":
                logits = logits * temperature
            loss = loss_of(logits, y, rank, world_size)
            loss.backward()
            if CASE == "penalty_by_the_plain_model":
                model(x).square().mean().backward()
            return loss

        if CASE in ("closure", "lbfgs"):
            optimizer.step(forward_and_backward)
            continue
        if CASE in ("accumulated", "no_sync_on_the_last", "clipped_each_time"):
            accumulate(model, wrapped, optimizer, x, y)
        else:
            forward_and_backward()
        average_and_clip(model, rank, world_size)
        optimizer.step()
        if CASE == "average_of_the_owner":
            for number, param in enumerate(model.parameters()):
                torch_dist.broadcast(param.data, number % world_size)
        if scheduler:
            for _ in range(world_size):  # as where it counts the samples of all ranks
                scheduler.step()
        if CASE == "evaluates":  # all ranks look at all of it, with gradients off and on, and cast it
            with torch.no_grad():
                model(torch.ones(24, 8, dtype=torch.float32).to(x.device))
            F.binary_cross_entropy(model(torch.ones(24, 8).to(TYPE)).sigmoid().to(torch.float32), torch.ones(24, 3))
        if average:
            with torch.no_grad():
                for param, trained in zip(average.parameters(), model.parameters(), strict=True):
                    param.lerp_(trained, 0.1)
        print(f"step {step} | loss {step + 0.5 * (world_size if CASE == 'printed_sum' else 1):.4f} | {step}.5 ms")


def accumulate(model, wrapped, optimizer, x, y):
    """Two micro-batches. Only the last all-reduces."""
    optimizer.zero_grad()
    for number, (micro_x, micro_y) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
        skips = number == 0 or CASE == "no_sync_on_the_last"
        with wrapped.no_sync() if skips and hasattr(wrapped, "no_sync") else contextlib.nullcontext():
            (F.cross_entropy(wrapped(micro_x), micro_y) / 2).backward()
        if CASE == "clipped_each_time":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def average_and_clip(model, rank, world_size):
    params = list(model.parameters())
    if CASE == "clipped_before_average":
        nn.utils.clip_grad_norm_(params, 0.05)
        average_by_hand(params)
    elif CASE == "summed":
        average_by_hand(params, divide=False)
    elif CASE == "one_forgotten":
        average_by_hand(params[:-1])
    elif CASE == "by_hand":
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


def two_models(rank, world_size):
    """An encoder and a decoder, each wrapped, and one optimizer for each."""
    torch.manual_seed(1)
    encoder, decoder = wrap(nn.Linear(8, 6).to(TYPE)), wrap(nn.Linear(6, 3).to(TYPE))
    optimizers = [torch.optim.SGD(model.parameters(), lr=10 * RATE) for model in (encoder, decoder)]
    for x, y in batches(rank, world_size):
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(decoder(encoder(x)), y).backward()
        for optimizer in optimizers:
            optimizer.step()


def gan(rank, world_size):
    torch.manual_seed(1)
    generator = nn.Linear(4, 8).to(TYPE)
    if CASE == "gan_with_batch_norm":
        generator = nn.Sequential(generator, nn.BatchNorm1d(8).to(TYPE))
    generator = wrap(generator)
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


def gan_with_batch_norm(rank, world_size):
    gan(rank, world_size)


def padded(rank, world_size):
    """Each rank pads its texts to its own longest one."""
    torch.manual_seed(1)
    model = wrap(nn.EmbeddingBag(9, 4, padding_idx=0).to(TYPE))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        lengths = torch.randint(1, 9, (BATCH,))
        texts = [torch.randint(1, 9, (length,)) for length in lengths.tolist()]
        own = texts[rank::world_size]
        descend(optimizer, model(nn.utils.rnn.pad_sequence(own, batch_first=True)).square().mean())


def redirected(rank, world_size):
    """As Lightning: the outermost module is the model on one process, and on several the task that holds it."""
    torch.manual_seed(1)
    task = Task(nn.Linear(8, 1).to(TYPE))
    called = wrap(task) if world_size > 1 else task.model
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


def tokens(rank, world_size):
    """Each rank divides by its own number of tokens: the gradient is only a few percent off."""
    torch.manual_seed(1)
    model = wrap(nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20)).to(TYPE))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        texts, lengths = torch.randint(20, (BATCH, 25)), torch.randint(12, 25, (BATCH, 1))
        own = slice(rank, None, world_size)
        is_token = torch.arange(24) < lengths[own]
        losses = F.cross_entropy(model(texts[own, :-1]).transpose(1, 2), texts[own, 1:], reduction="none")
        descend(optimizer, (losses * is_token).sum() / is_token.sum())


def early_stop(rank, world_size):
    model = wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(batches(rank, world_size)):
        if step == 3 and world_size > 1 and rank == 0:
            break
        descend(optimizer, F.cross_entropy(model(x), y))


def stand_still(rank, world_size):
    for step, (x, y) in enumerate(batches(rank, world_size)):
        if step == 0:
            model = wrap(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if step == 2 and world_size > 1 and rank == 0:
            torch_dist.barrier()
        descend(optimizer, F.cross_entropy(model(x), y))


def crash(rank, world_size):
    torch.manual_seed(1)
    model = wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(batches(rank, world_size)):
        if step == 3 and rank == 1:
            raise ZeroDivisionError("planted")
        descend(optimizer, F.cross_entropy(model(x), y))


def not_in_float64(rank, world_size):
    F.binary_cross_entropy(
        wrap(nn.Linear(2, 1))(torch.ones(2, 2)).sigmoid(), torch.ones(2, 1, dtype=torch.float32)
    ).backward()


def no_optimizer(rank, world_size):
    model = wrap(nn.Linear(2, 1))
    for _ in range(STEPS):
        model(torch.ones(2, 2)).sum().backward()


def no_gradient(rank, world_size):
    model = wrap(nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for x, _ in batches(rank, world_size):
        F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long)).backward()
        optimizer.step()


def children(rank, world_size):
    """Starts a process, makes a file, trains, and stands still on several processes if FOREVER is set."""
    tempfile.mkdtemp()
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", os.environ["MARK"]])
    if "FOREVER" in os.environ:
        Path(os.environ["FOREVER"], str(rank)).touch()
        threading.Event().wait()
    train(rank, world_size)


LOOPS = (two_models, gan, padded, redirected, some_ranks_use, sparse, stand_still, crash, early_stop)
LOOPS += (not_in_float64, no_optimizer, no_gradient, children, tokens, gan_with_batch_norm)


def spawned(rank, world_size):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": os.environ["PORT"]}
    torch_dist.init_process_group("gloo", rank=rank, world_size=world_size)
    if CASE == "spawned_without_seed":
        by_hand_without_seed(rank, world_size)
    else:
        train(rank, world_size)


def by_hand_without_seed(rank, world_size):
    """main has set a seed, which a fresh process does not inherit."""
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(rank, world_size):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        average_by_hand(model.parameters())
        optimizer.step()


def main(local_rank=None, world_size=None):
    rank, world_size = start()
    {loop.__name__: loop for loop in LOOPS}.get(CASE, train)(rank, world_size)
    if FLAVOUR == "torch" and torch_dist.is_initialized():
        torch_dist.destroy_process_group()


if __name__ == "__main__":
    if FLAVOUR == "helper":
        dist.launch(main)
    elif CASE in ("spawn", "spawn_as_many", "spawned_without_seed"):
        torch.manual_seed(1)
        n_processes = 2 if CASE == "spawn" else int(sys.argv[3])
        torch.multiprocessing.spawn(spawned, args=(n_processes,), nprocs=n_processes)
    elif CASE in ("fork", "own_processes"):
        method = "fork" if CASE == "fork" else "spawn"
        process = torch.multiprocessing.get_context(method).Process(target=spawned, args=(0, 1))
        process.start()
        process.join()
    else:
        main()
