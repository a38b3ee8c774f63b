"""Mistakes of docs/mistakes.md that no script here makes: each is made on two processes, beside the right way."""

import contextlib
import copy
import datetime
import functools
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, Watch, float64, on_processes, whole
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import checkpoint_sharded
import distributed as dist

X = torch.randn(12, 4, dtype=torch.float64, generator=torch.manual_seed(0))
Y = torch.arange(12) % 4


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def shard(*modules):
    """Returns the last one."""
    for module in modules:
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module


def share(*tensors):
    """This rank's share of X and Y, or of others."""
    return [tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in tensors]


def gradients(model):
    return torch.cat([whole(param.grad).flatten() for param in model.parameters()])


def weights(model):
    return torch.cat([whole(param.detach()).flatten() for param in model.parameters()])


def gap(found, expected):
    return (found - expected).abs().max().item()


def gradients_of_one_process():
    model = make_model()
    F.cross_entropy(model(X), Y).backward()
    return gradients(model)


# ---- how far the ranks are from right, with and without the mistake --------------------------------------------------


def mistake(gap_of):
    """Make a test of a function that all ranks call: it returns a gap if the mistake is made, and none if it is not."""

    @functools.wraps(gap_of)
    @pytest.mark.parametrize("wrong", [True, False])
    def check(wrong):
        with float64():
            found = gap_of(wrong)
        assert found > 1e-3 if wrong else found < 1e-12

    return on_processes(2)(check)


@mistake
def test_no_sync_after_the_forward_sends_every_micro_batch(wrong):
    """The gradients are right all the same, so nothing but the number of all-reduces shows it."""
    model = dist.prepare_ddp_model(make_model())
    x, y = share(X, Y)
    with Watch() as watch:
        for number, (micro_x, micro_y) in enumerate(zip(x.chunk(3), y.chunk(3), strict=True), 1):
            sync = model.no_sync() if number < 3 else contextlib.nullcontext()
            if wrong:
                loss = F.cross_entropy(model(micro_x), micro_y) / 3
                with sync:
                    loss.backward()
            else:
                with sync:
                    (F.cross_entropy(model(micro_x), micro_y) / 3).backward()
    assert gap(gradients(model), gradients_of_one_process()) < 1e-12
    return watch.counts["c10d.allreduce_"] - 1


@mistake
def test_names_of_the_wrapped_model_begin_with_module(wrong):
    """So the group of the last layer is empty, which is no error, and that layer gets the other learning rate."""

    def last_layer_after_a_step(model, ddp_model, named, x, y):
        head = [param for name, param in named.named_parameters() if name.startswith("2.")]
        others = [param for param in model.parameters() if all(param is not each for each in head)]
        optimizer = torch.optim.SGD([{"params": head, "lr": 1.0}, {"params": others}], lr=0.1)
        F.cross_entropy(ddp_model(x), y).backward()
        optimizer.step()
        return model[2].weight.detach()

    alone, model = make_model(), make_model()
    expected = last_layer_after_a_step(alone, alone, alone, X, Y)
    ddp_model = dist.prepare_ddp_model(model)
    return gap(last_layer_after_a_step(model, ddp_model, ddp_model if wrong else model, *share(X, Y)), expected)


@mistake
def test_a_scheduler_that_steps_per_micro_batch_is_too_fast(wrong):
    """Of four steps of three micro-batches, of a schedule that falls to 0 in four steps."""
    model = make_model()
    ddp_model = dist.prepare_ddp_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, 1 - step / 4))
    rates = []
    for _ in range(4):
        optimizer.zero_grad()
        for number in range(1, 4):
            (F.cross_entropy(ddp_model(X), Y) / 3).backward()
            if number == 3:
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
            if wrong or number == 3:
                scheduler.step()
    return gap(torch.tensor(rates), torch.tensor([1, 0.75, 0.5, 0.25]))


@mistake
def test_rank_0_alone_saves_its_own_shard_of_the_optimizer_only(wrong):
    """And without an error: all other ranks resume with rank 0's moments."""

    def moments(optimizer):
        """Of all ranks, on every rank."""
        states = [optimizer.state[param] for param in optimizer.param_groups[0]["params"]]
        return torch.cat(dist.gather(torch.cat([state["exp_avg"].to_local().flatten() for state in states])))

    model = shard(make_model())
    optimizer = torch.optim.Adam(model.parameters())
    x, y = share(X, Y)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    fresh = torch.optim.Adam(model.parameters())
    if wrong:
        if dist.is_primary():
            torch.save(optimizer.state_dict(), "optimizer.pt")
        dist.barrier()
        fresh.load_state_dict(torch.load("optimizer.pt", weights_only=False))
    else:
        checkpoint_sharded.save("runs", model, optimizer, 1)
        checkpoint_sharded.load("runs", model, fresh)
    return gap(moments(fresh), moments(optimizer))


@mistake
def test_a_norm_is_a_number_after_full_tensor_only(wrong):
    model = shard(make_model())
    x, y = share(X, Y)
    F.cross_entropy(model(x), y).backward()
    norm = nn.utils.get_total_norm([param.grad for param in model.parameters()])
    with pytest.raises(TypeError, match=r"unsupported format string passed to DTensor.__format__"):
        f"{norm:.4f}"
    if wrong:
        return gap(model[0].weight.grad.norm().to_local(), model[0].weight.grad.norm().full_tensor())
    return gap(norm.full_tensor(), gradients_of_one_process().norm())


@mistake
def test_a_sharded_model_does_not_clear_gradients_between_forward_and_backward(wrong):
    """Its parameters are then gathered copies, so the gradients of two steps add up."""
    model = shard(make_model())
    optimizer = torch.optim.SGD(model.parameters())
    x, y = share(X, Y)
    for _ in range(2):
        loss = F.cross_entropy(model(x), y)
        if wrong:
            model.zero_grad()
        else:
            optimizer.zero_grad()
        loss.backward()
    return gap(gradients(model), gradients_of_one_process())


@mistake
def test_all_ranks_skip_a_batch_or_none(wrong):
    """Each rank has one with a NaN. Both take as many steps, so nobody waits: gradients of two batches are averaged."""
    batches = [X, X.clone(), X.clone(), X + 1]
    batches[1][-1] = torch.nan  # on rank 1
    batches[2][0] = torch.nan

    def train(model, ddp_model, batches, is_finite):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for x, y in batches:
            loss = F.cross_entropy(ddp_model(x), y)
            if is_finite(loss.detach()):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return weights(model)

    def is_finite_on_all(loss):
        return dist.reduce(loss.isfinite().int(), op="min").item() == 1

    alone, model = make_model(), make_model()
    expected = train(alone, alone, [(x, Y) for x in batches], torch.isfinite)
    shares = [share(x, Y) for x in batches]
    found = train(model, dist.prepare_ddp_model(model), shares, torch.isfinite if wrong else is_finite_on_all)
    return gap(found, expected)


@mistake
def test_a_second_backward_of_one_forward_is_not_averaged(wrong):
    def backward(model, x, y):
        logits = model(x)
        losses = F.cross_entropy(logits, y), logits.square().mean()
        if wrong:
            losses[0].backward(retain_graph=True)
            losses[1].backward()
        else:
            sum(losses).backward()

    alone, model = make_model(), make_model()
    backward(alone, X, Y)
    backward(dist.prepare_ddp_model(model), *share(X, Y))
    return gap(gradients(model), gradients(alone))


@mistake
def test_an_embedding_with_a_largest_norm_changes_the_rows_of_its_own_rank(wrong):
    """Each rank looks up its own."""
    torch.manual_seed(1)
    embedding = nn.Embedding(12, 4, max_norm=0.5 if wrong else None)
    ddp_model = dist.prepare_ddp_model(embedding)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    ddp_model(*share(torch.arange(12))).sum().backward()
    optimizer.step()
    if not wrong:
        with torch.no_grad():
            embedding.weight.copy_(embedding.weight.renorm(2, 0, 0.5))  # all rows, on all ranks
        assert embedding.weight.norm(dim=1).max() < 0.5001
    first, second = dist.gather(embedding.weight.detach())
    return gap(first, second)


class Hidden:
    def __init__(self, logits):
        self.logits = logits


class OwnBlock(nn.Module):
    """It passes its output on in a list, or in an object of a class of its own."""

    def __init__(self, wrap):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.wrap = wrap

    def forward(self, hidden):
        return self.wrap(self.linear(hidden.logits if self.wrap is Hidden else hidden[0]))


@mistake
def test_fsdp_finds_tensors_in_known_objects_only(wrong):
    wrap = Hidden if wrong else lambda logits: [logits]
    torch.manual_seed(1)
    model = nn.Sequential(OwnBlock(wrap), OwnBlock(wrap))
    alone = copy.deepcopy(model)
    shard(*model, model)

    def backward(model, x, y):
        output = model(wrap(x))
        F.cross_entropy(output.logits if wrong else output[0], y).backward()

    backward(alone, X, Y)
    if not wrong:
        backward(model, *share(X, Y))
        return gap(gradients(model), gradients(alone))
    with pytest.raises(RuntimeError, match="storage"):
        backward(model, *share(X, Y))
    return 1


class TwoHeads(nn.Module):
    """Each rank uses the head of its task, and with `also` the other one, without an effect."""

    def __init__(self, also):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.also = also

    def forward(self, x):
        task = self.task
        return x + self.heads[task](x) + (0 * self.heads[1 - task](x) if self.also else 0)


def use_other_heads(shard, also=False):
    """How far the weights are from right after a step in which each rank uses another head of a block."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), TwoHeads(also))
    alone = copy.deepcopy(model)
    tasks = (0, 1)
    model[1].task = tasks[dist.get_rank()]
    shard(model)
    model(*share(X)).square().mean().backward()
    for task, part in zip(tasks, X.chunk(2), strict=True):
        alone[1].task = task
        (alone(part).square().mean() / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    torch.optim.SGD(alone.parameters(), lr=0.5).step()
    return gap(weights(model), weights(alone))


def shard_and_fill_in_zeros(model, **units):
    dist.prepare_fsdp_model(model, **units)
    if torch.__version__ >= "2.14":
        model.set_reduce_scatter_unused_params(True)


@mistake
def test_under_fsdp_ranks_use_the_same_parameters(wrong):
    """Without an error a shard receives another parameter's gradient. From torch 2.14 on FSDP can fill in zeros."""
    if not wrong and torch.__version__ >= "2.14":
        assert use_other_heads(functools.partial(shard_and_fill_in_zeros, blocks=(TwoHeads,))) < 1e-12
    return use_other_heads(lambda model: shard(model[1], model), also=not wrong)


@on_processes(2)
def test_under_fsdp_a_unit_computes_on_all_ranks():
    """Or the weights that are gathered are halves of two heads, with torch 2.14 too. Entries of a list are units."""
    with float64():
        assert use_other_heads(shard_and_fill_in_zeros) > 1e-3


# ---- jobs that end, and facts without a job -------------------------------------------------------------------------


def test_sends_and_receives_are_batched():
    """gloo accepts separate calls, so the scripts are read: each send and receive is a P2POp of batch_isend_irecv."""
    batched = 0
    for path in ROOT.glob("*.py"):
        source = path.read_text()
        assert not re.search(r"\b(isend|irecv)\(", source), path.name
        batched += "batch_isend_irecv(" in source
    assert batched > 0


def search_along_a_line(local_rank, world_size, averaged):
    """Two steps of L-BFGS, which looks at the loss to choose its steps."""
    dist.init_process_group(timeout=datetime.timedelta(seconds=5))

    def train(model, ddp_model, x, y, loss_for_search):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp_model(x), y)
            loss.backward()
            return loss_for_search(loss.detach())

        for _ in range(2):
            optimizer.step(closure)
        return weights(model)

    with float64():
        alone, model = make_model(), make_model()
        expected = train(alone, alone, X, Y, lambda loss: loss)
        loss_for_search = dist.reduce if averaged else lambda loss: loss
        found = train(model, dist.prepare_ddp_model(model), *share(X, Y), loss_for_search)
    assert gap(found, expected) < 1e-9


def reduce_unequal_lengths(local_rank, world_size, equal):
    dist.init_process_group(timeout=datetime.timedelta(seconds=5))
    counts = torch.bincount(torch.arange(10 - local_rank), minlength=10 if equal else 0)
    assert dist.reduce(counts, "sum").tolist() == [2] * 9 + [1]


def reduce_in_join(local_rank, world_size, after):
    dist.init_process_group(timeout=datetime.timedelta(seconds=5))
    model = dist.prepare_ddp_model(make_model())
    losses = []
    with Join([model]):
        for _ in range(3 + 2 * local_rank):
            loss = F.cross_entropy(model(X.float()), Y)
            loss.backward()
            losses.append(loss.detach() if after else dist.reduce(loss.detach()))
    sums = dist.all_reduce(torch.stack([torch.stack(losses).sum(), torch.tensor(float(len(losses)))]))
    assert sums[1] == 8


def check_job(worker, right):
    """The ranks end with other results, or one waits for the other, unless they do it right."""
    with contextlib.nullcontext() if right else pytest.raises(Exception, match="rank"):
        dist.launch(worker, right, nprocs=2)


@pytest.mark.parametrize("averaged", [True, False])
def test_a_line_search_needs_the_loss_of_all_ranks(averaged):
    check_job(search_along_a_line, averaged)


@pytest.mark.parametrize("equal", [True, False])
def test_tensors_of_unequal_lengths_cannot_be_reduced(equal):
    check_job(reduce_unequal_lengths, equal)


@pytest.mark.parametrize("after", [True, False])
def test_collectives_of_ones_own_do_not_belong_into_join(after):
    """A rank whose data have ended takes part in DDP's collectives only."""
    check_job(reduce_in_join, after)


def test_a_set_has_another_order_in_each_process():
    orders = set()
    for seed in "123":  # Python draws one for each process, unless it is set
        command = [sys.executable, "-c", "print({'cat', 'dog', 'bird', 'fish'})"]
        orders.add(subprocess.check_output(command, env={"PYTHONHASHSEED": seed}, timeout=60))
    assert len(orders) > 1
