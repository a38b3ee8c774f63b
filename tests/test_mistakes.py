"""Mistakes of docs/mistakes.md that no script here makes: each is made on two processes, beside the right way."""

import contextlib
import copy
import dataclasses
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
import min_FSDP_scratch

X = torch.randn(12, 4, dtype=torch.float64, generator=torch.manual_seed(0))
Y = torch.arange(12) % 4


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def make_sharded_model():
    return fully_shard(make_model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def share(*tensors):
    """This rank's share of X and Y, or of others."""
    return [tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in tensors]


def gradients(model):
    return torch.cat([whole(param.grad).flatten() for param in model.parameters()])


def weights(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def gap(found, expected):
    return (found - expected).abs().max().item()


def gradients_of_one_process():
    model = make_model()
    F.cross_entropy(model(X), Y).backward()
    return gradients(model)


def train(model, ddp_model, batches):
    """The weights after a step of SGD on each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(ddp_model(x), y).backward()
        optimizer.step()
    return weights(model)


# ---- each beside the right way ---------------------------------------------------------------------------------------


def mistake(check):
    return on_processes(2)(float64()(check))


def check(function, wrong, right):
    """A gap with the argument `wrong`, and none with `right`."""
    assert function(wrong) > 1e-3
    assert function(right) < 1e-12


@mistake
def test_no_sync_after_the_forward_sends_every_micro_batch():
    """The gradients are right all the same, so nothing but the number of all-reduces shows it."""
    for no_sync_around_forward, expected in ((False, 3), (True, 1)):
        model = dist.prepare_ddp_model(make_model())
        x, y = share(X, Y)
        with Watch() as counter:
            for number, (micro_x, micro_y) in enumerate(zip(x.chunk(3), y.chunk(3), strict=True), 1):
                sync = model.no_sync() if number < 3 else contextlib.nullcontext()
                if no_sync_around_forward:
                    with sync:
                        (F.cross_entropy(model(micro_x), micro_y) / 3).backward()
                else:
                    loss = F.cross_entropy(model(micro_x), micro_y) / 3
                    with sync:
                        loss.backward()
        assert counter.counts["c10d.allreduce_"] == expected
        assert gap(gradients(model), gradients_of_one_process()) < 1e-12


@mistake
def test_names_of_the_wrapped_model_begin_with_module():
    """So the group of the last layer is empty, which is no error, and that layer gets the other learning rate."""

    def step(model, ddp_model, named, x, y):
        head = [param for name, param in named.named_parameters() if name.startswith("2.")]
        others = [param for param in model.parameters() if all(param is not each for each in head)]
        optimizer = torch.optim.SGD([{"params": head, "lr": 1.0}, {"params": others}], lr=0.1)
        F.cross_entropy(ddp_model(x), y).backward()
        optimizer.step()
        return len(head), model[2].weight.detach()

    alone, wrong, right = make_model(), make_model(), make_model()
    _, expected = step(alone, alone, alone, X, Y)
    ddp_model = dist.prepare_ddp_model(wrong)
    n_head, weight = step(wrong, ddp_model, ddp_model, *share(X, Y))
    assert n_head == 0 and gap(weight, expected) > 0.01
    n_head, weight = step(right, dist.prepare_ddp_model(right), right, *share(X, Y))
    assert n_head == 2 and gap(weight, expected) < 1e-12


@mistake
def test_a_scheduler_that_steps_per_micro_batch_is_too_fast():
    """Of four steps of three micro-batches, of a schedule that falls to 0 in four steps."""
    for per_micro_batch, expected in ((True, [0.5, 0, 0, 0]), (False, [1, 0.75, 0.5, 0.25])):
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
                if per_micro_batch or number == 3:
                    scheduler.step()
        assert rates == expected


@mistake
def test_rank_0_alone_saves_its_own_shard_of_the_optimizer_only():
    """And without an error: all other ranks resume with rank 0's moments."""
    model = make_sharded_model()
    optimizer = torch.optim.Adam(model.parameters())
    x, y = share(X, Y)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    saved = moments(optimizer)
    if dist.is_primary():
        torch.save(optimizer.state_dict(), "optimizer.pt")
    checkpoint_sharded.save("runs", model, optimizer, 1)

    fresh = torch.optim.Adam(model.parameters())
    fresh.load_state_dict(torch.load("optimizer.pt", weights_only=False))
    assert gap(moments(fresh), saved) > 1e-4
    fresh = torch.optim.Adam(model.parameters())
    checkpoint_sharded.load("runs", model, fresh)
    assert gap(moments(fresh), saved) == 0


def moments(optimizer):
    """Of all ranks, on every rank."""
    states = [optimizer.state[param] for param in optimizer.param_groups[0]["params"]]
    local = torch.cat([state["exp_avg"].to_local().flatten() for state in states])
    return torch.cat(dist.gather(local))


@mistake
def test_a_norm_is_a_number_after_full_tensor_only():
    model = make_sharded_model()
    x, y = share(X, Y)
    F.cross_entropy(model(x), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1e9)
    with pytest.raises(TypeError, match=r"unsupported format string passed to DTensor.__format__"):
        f"{norm:.4f}"
    assert str(norm).startswith("DTensor(")
    assert abs(norm.full_tensor() - gradients_of_one_process().norm()) < 1e-12
    one_gradient = model[0].weight.grad.norm()
    local, full = one_gradient.to_local(), one_gradient.full_tensor()
    assert local < 0.99 * full
    first, second = dist.gather(local)
    assert first != second and len(set(dist.gather_objects(full.item()))) == 1


@mistake
def test_a_sharded_model_does_not_clear_gradients_between_forward_and_backward():
    """Its parameters are then gathered copies, so the gradients of two steps add up."""

    def train(by_optimizer):
        model = make_sharded_model()
        optimizer = torch.optim.SGD(model.parameters())
        x, y = share(X, Y)
        for _ in range(2):
            loss = F.cross_entropy(model(x), y)
            if by_optimizer:
                optimizer.zero_grad()
            else:
                model.zero_grad()
            loss.backward()
        return gap(gradients(model), gradients_of_one_process())

    check(train, False, True)


@mistake
def test_a_hook_sees_the_gradient_of_its_own_rank():
    model, own = make_model(), make_model()
    seen = []
    model[2].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    x, y = share(X, Y)
    F.cross_entropy(own(x), y).backward()
    ddp_model = dist.prepare_ddp_model(model)
    F.cross_entropy(ddp_model(x), y).backward()
    (hooked,) = seen
    assert gap(hooked, model[2].weight.grad) > 1e-3
    assert gap(hooked, own[2].weight.grad) < 1e-12


@dataclasses.dataclass
class Output:
    logits: torch.Tensor


class Hidden:
    def __init__(self, logits):
        self.logits = logits


class WithUnusedLayer(nn.Module):
    """Its output is what `wrap` makes of the logits."""

    def __init__(self, wrap):
        super().__init__()
        self.used = make_model()
        self.unused = nn.Linear(4, 4)
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(self.used(x))


@mistake
def test_the_search_for_unused_parameters_finds_tensors_in_known_outputs_only():
    kinds = {
        "tensor": (lambda logits: logits, lambda output: output),
        "dict": (lambda logits: {"logits": logits}, lambda output: output["logits"]),
        "tuple": (lambda logits: (logits,), lambda output: output[0]),
        "dataclass": (Output, lambda output: output.logits),
        "another class": (Hidden, lambda output: output.logits),
    }
    for kind, (wrap, logits_of) in kinds.items():
        model = WithUnusedLayer(wrap)
        ddp_model = dist.prepare_ddp_model(model, find_unused_parameters=True)
        x, y = share(X, Y)
        refused = contextlib.nullcontext()
        if kind == "another class":
            refused = pytest.raises(RuntimeError, match="Expected to mark a variable ready only once")  # as on the page
        with refused:
            for _ in range(2):
                model.zero_grad()
                F.cross_entropy(logits_of(ddp_model(x)), y).backward()
            assert gap(gradients(model.used), gradients_of_one_process()) < 1e-12, kind


@mistake
def test_all_ranks_skip_a_batch_or_none():
    """Each rank has one with a NaN. Both take as many steps, so nobody waits: gradients of two batches are averaged."""
    batches = [X, X.clone(), X.clone(), X + 1]
    batches[1][-1] = torch.nan  # on rank 1
    batches[2][0] = torch.nan

    def is_finite(loss, agree):
        finite = loss.detach().isfinite()
        return dist.reduce(finite.int(), op="min").item() == 1 if agree else finite

    def skip(agree):
        alone, model = make_model(), make_model()
        expected = train(alone, alone, [(x, Y) for x in batches if x.isfinite().all()])
        ddp_model = dist.prepare_ddp_model(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for batch in batches:
            x, y = share(batch, Y)
            loss = F.cross_entropy(ddp_model(x), y)
            if is_finite(loss, agree):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return gap(weights(model), expected)

    check(skip, False, True)


@mistake
def test_a_second_backward_of_one_forward_is_not_averaged():
    def backward(model, x, y, once):
        logits = model(x)
        losses = F.cross_entropy(logits, y), logits.square().mean()
        if once:
            sum(losses).backward()
        else:
            losses[0].backward(retain_graph=True)
            losses[1].backward()

    def compare(once):
        alone, model = make_model(), make_model()
        backward(alone, X, Y, once)
        backward(dist.prepare_ddp_model(model), *share(X, Y), once)
        return gap(gradients(model), gradients(alone))

    check(compare, False, True)


@mistake
def test_an_embedding_with_a_largest_norm_changes_the_rows_of_its_own_rank():
    """Each rank looks up its own."""

    def look_up(in_forward):
        torch.manual_seed(1)
        embedding = nn.Embedding(12, 4, max_norm=0.5 if in_forward else None)
        ddp_model = dist.prepare_ddp_model(embedding)
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        ddp_model(*share(torch.arange(12))).sum().backward()
        optimizer.step()
        if not in_forward:
            with torch.no_grad():
                embedding.weight.copy_(embedding.weight.renorm(2, 0, 0.5))  # all rows, on all ranks
            assert embedding.weight.norm(dim=1).max() < 0.5001
        first, second = dist.gather(embedding.weight.detach())
        return gap(first, second)

    check(look_up, True, False)


class OwnBlock(nn.Module):
    """Takes and returns what `wrap` makes of a tensor."""

    def __init__(self, wrap):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.wrap = wrap

    def forward(self, hidden):
        return self.wrap(self.linear(hidden.logits))


def pass_objects_between_shards(wrap):
    """How far the gradients are from right if FSDP's units pass such objects on."""
    torch.manual_seed(1)
    model = nn.Sequential(OwnBlock(wrap), OwnBlock(wrap))
    alone = copy.deepcopy(model)
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    x, y = share(X, Y)
    F.cross_entropy(alone(wrap(X)).logits, Y).backward()
    F.cross_entropy(model(wrap(x)).logits, y).backward()
    return gap(gradients(model), gradients(alone))


@mistake
def test_fsdp_finds_tensors_in_known_objects_only():
    if torch.__version__ >= "2.14":
        assert pass_objects_between_shards(Output) < 1e-12
    with pytest.raises(RuntimeError, match="storage"):
        pass_objects_between_shards(Hidden)


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
    model = nn.Sequential()
    model.add_module("first", nn.Linear(4, 4))
    model.add_module("blocks", nn.Sequential(TwoHeads(also)))
    alone = copy.deepcopy(model)
    tasks = (1, 0)  # rank 0, which holds the first head in min_FSDP_scratch.py, uses the second one
    model.blocks[0].task = tasks[dist.get_rank()]
    sharded, params = shard(model)
    (x,) = share(X)
    sharded(x).square().mean().backward()
    loss = 0
    for task, part in zip(tasks, X.chunk(2), strict=True):
        alone.blocks[0].task = task
        loss += alone(part).square().mean() / 2
    loss.backward()
    if hasattr(sharded, "finish_backward"):
        sharded.finish_backward()
    torch.optim.SGD(params, lr=0.5).step()
    torch.optim.SGD(alone.parameters(), lr=0.5).step()
    if hasattr(sharded, "units"):
        for unit in sharded.units:
            unit.wait()
    return gap(torch.cat([whole(param.detach()).flatten() for param in model.parameters()]), weights(alone))


def shard_by_hand(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model, model.parameters()


def shard_by_the_helper(model, zeros=False, **units):
    dist.prepare_fsdp_model(model, **units)
    if zeros and torch.__version__ >= "2.14":
        model.set_reduce_scatter_unused_params(True)
    return model, model.parameters()


def shard_from_scratch(model):
    zero = min_FSDP_scratch.ZeRO3(model)
    return zero, zero.pieces()


@mistake
def test_under_fsdp_ranks_use_the_same_parameters():
    """Without an error a shard receives another parameter's gradient. From torch 2.14 on FSDP can fill in zeros."""
    check(functools.partial(use_other_heads, shard_by_hand), False, True)
    assert use_other_heads(shard_from_scratch) < 1e-12
    if torch.__version__ >= "2.14":
        assert use_other_heads(functools.partial(shard_by_the_helper, zeros=True, blocks=(TwoHeads,))) < 1e-12


@mistake
def test_under_fsdp_a_unit_computes_on_all_ranks():
    """Or the weights that are gathered are halves of two heads, with torch 2.14 too. Entries of a list are units."""
    assert use_other_heads(functools.partial(shard_by_the_helper, zeros=True)) > 1e-3


# ---- jobs that end, and facts without a job -------------------------------------------------------------------------


def test_sends_and_receives_are_batched():
    """gloo accepts separate calls, so the scripts are read: each send and receive is a P2POp of batch_isend_irecv."""
    batched = 0
    for path in ROOT.glob("*.py"):
        source = path.read_text()
        assert not re.search(r"\b(isend|irecv)\(", source), path.name
        batched += "batch_isend_irecv(" in source
    assert batched > 0


def search_along_a_line(averaged):
    """How far the weights are from right after two steps of L-BFGS, which looks at the loss to choose its steps."""

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

    alone, model = make_model(), make_model()
    expected = train(alone, alone, X, Y, lambda loss: loss)
    loss_for_search = dist.reduce if averaged else lambda loss: loss
    found = train(model, dist.prepare_ddp_model(model), *share(X, Y), loss_for_search)
    return gap(found, expected)


def search_job(local_rank, world_size, averaged):
    dist.init_process_group(timeout=datetime.timedelta(seconds=5))
    with float64():
        assert search_along_a_line(averaged) < 1e-9


@pytest.mark.parametrize("averaged", [True, False])
def test_a_line_search_needs_the_loss_of_all_ranks(averaged):
    """With losses of their own the ranks end at other weights, or one of them waits for the other."""
    with contextlib.nullcontext() if averaged else pytest.raises(Exception, match="rank"):
        dist.launch(search_job, averaged, nprocs=2)


def test_a_set_has_another_order_in_each_process():
    orders = set()
    for seed in "123":  # Python draws one for each process, unless it is set
        command = [sys.executable, "-c", "print({'cat', 'dog', 'bird', 'fish'})"]
        orders.add(subprocess.check_output(command, env={"PYTHONHASHSEED": seed}, timeout=60))
    assert len(orders) > 1


def reduce_unequal_lengths(local_rank, world_size):
    dist.init_process_group(timeout=datetime.timedelta(seconds=5))
    counts = torch.bincount(torch.arange(10 - local_rank))
    assert [len(each) for each in dist.gather(counts)] == [10, 9]
    assert dist.reduce(torch.bincount(torch.arange(10 - local_rank), minlength=10), "sum").tolist() == [2] * 9 + [1]
    dist.reduce(counts, "sum")


def test_tensors_of_unequal_lengths_cannot_be_reduced():
    with pytest.raises(Exception, match="rank"):
        dist.launch(reduce_unequal_lengths, nprocs=2)


def reduce_in_join(local_rank, world_size, inside):
    dist.init_process_group(timeout=datetime.timedelta(seconds=5))
    model = dist.prepare_ddp_model(make_model())
    losses = []
    with Join([model]):
        for _ in range(3 + 2 * local_rank):
            loss = F.cross_entropy(model(X.float()), Y)
            loss.backward()
            losses.append(dist.reduce(loss.detach()) if inside else loss.detach())
    sums = dist.all_reduce(torch.stack([torch.stack(losses).sum(), torch.tensor(float(len(losses)))]))
    assert sums[1] == 8


@pytest.mark.parametrize("inside", [True, False])
def test_collectives_of_ones_own_do_not_belong_into_join(inside):
    """A rank whose data have ended takes part in DDP's collectives only."""
    with pytest.raises(Exception, match="rank") if inside else contextlib.nullcontext():
        dist.launch(reduce_in_join, inside, nprocs=2)
