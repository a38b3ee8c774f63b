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
from conftest import ROOT, Watch, float64
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
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
    from torch.distributed.fsdp import fully_shard

    return fully_shard(make_model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def share(*tensors):
    """This rank's share of X and Y, or of others."""
    return [tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in tensors]


def gradients(model):
    return torch.cat([whole(param.grad).flatten() for param in model.parameters()])


def weights(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


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


# ---- the mistakes ---------------------------------------------------------------------------------------------------


def accumulate(no_sync_around_forward):
    """The all-reduces of a step of three micro-batches, and whether the gradients are right."""
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
    all_reduces = counter.counts["c10d.allreduce_"]
    return all_reduces, gap(gradients(model), gradients_of_one_process())


def choose_by_name(wrapped):
    """The parameters in the group of the last layer, and how far its weight is from right after one step."""

    def step(model, ddp_model, named, x, y):
        head = [param for name, param in named.named_parameters() if name.startswith("2.")]
        others = [param for param in model.parameters() if all(param is not each for each in head)]
        optimizer = torch.optim.SGD([{"params": head, "lr": 1.0}, {"params": others}], lr=0.1)
        F.cross_entropy(ddp_model(x), y).backward()
        optimizer.step()
        return len(head), model[2].weight.detach()

    alone, model = make_model(), make_model()
    _, expected = step(alone, alone, alone, X, Y)
    ddp_model = dist.prepare_ddp_model(model)
    x, y = share(X, Y)
    n_head, weight = step(model, ddp_model, ddp_model if wrapped else model, x, y)
    return n_head, gap(weight, expected)


def schedule(per_micro_batch):
    """The learning rates of four steps of three micro-batches, of a schedule that falls to 0 in four steps."""
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
    return rates


def resume_from_rank_0(folder):
    """How far Adam's first moments are from the saved ones: if rank 0 alone saves, and if all ranks save."""
    model = make_sharded_model()
    optimizer = torch.optim.Adam(model.parameters())
    x, y = share(X, Y)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    saved = moments(optimizer)
    if dist.is_primary():
        torch.save(optimizer.state_dict(), f"{folder}/optimizer.pt")
    checkpoint_sharded.save(folder, model, optimizer, 1)

    fresh = torch.optim.Adam(model.parameters())
    fresh.load_state_dict(torch.load(f"{folder}/optimizer.pt", weights_only=False))
    wrong = gap(moments(fresh), saved)
    fresh = torch.optim.Adam(model.parameters())
    checkpoint_sharded.load(folder, model, fresh)
    return wrong, gap(moments(fresh), saved)


def moments(optimizer):
    """Of all ranks, on every rank."""
    states = [optimizer.state[param] for param in optimizer.param_groups[0]["params"]]
    local = torch.cat([state["exp_avg"].to_local().flatten() for state in states])
    return torch.cat(dist.gather(local))


def log_norm():
    """What a log would show of the gradients' norm, and what it is."""
    model = make_sharded_model()
    x, y = share(X, Y)
    F.cross_entropy(model(x), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1e9)
    try:
        formatted = f"{norm:.4f}"
    except TypeError as error:
        formatted = str(error)
    one_gradient = model[0].weight.grad.norm()
    return {
        "formatted": formatted,
        "printed": str(norm),
        "full": norm.full_tensor().item(),
        "right": gradients_of_one_process().norm().item(),
        "one gradient, local": one_gradient.to_local().item(),
        "one gradient, full": one_gradient.full_tensor().item(),
    }


def clear_between_forward_and_backward(by_optimizer):
    """How far the gradients are from right, if old ones are cleared after the forward of a sharded model."""
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


def hook_a_tensor():
    """How far a hook's gradient of the last layer's weight is from the one of all ranks, and from this rank's own."""
    model = make_model()
    seen = []
    model[2].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    x, y = share(X, Y)
    own = make_model()
    F.cross_entropy(own(x), y).backward()
    ddp_model = dist.prepare_ddp_model(model)
    F.cross_entropy(ddp_model(x), y).backward()
    (hooked,) = seen
    return gap(hooked, model[2].weight.grad), gap(hooked, own[2].weight.grad)


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


def hide_the_output(wrap, logits_of):
    """How far the gradients are from right with find_unused_parameters, or the error of the second step."""
    model = WithUnusedLayer(wrap)
    ddp_model = dist.prepare_ddp_model(model, find_unused_parameters=True)
    x, y = share(X, Y)
    try:
        for _ in range(2):
            model.zero_grad()
            F.cross_entropy(logits_of(ddp_model(x)), y).backward()
    except RuntimeError as error:
        return str(error)
    return gap(gradients(model.used), gradients_of_one_process())


def skip_a_batch(agree):
    """How far the weights are from those of one process that leaves out each batch with a NaN. Each rank has one."""
    batches = [X, X.clone(), X.clone(), X + 1]
    batches[1][-1] = torch.nan  # on rank 1
    batches[2][0] = torch.nan

    def is_finite(loss):
        finite = loss.detach().isfinite()
        return dist.reduce(finite.int(), op="min").item() == 1 if agree else finite

    alone, model = make_model(), make_model()
    expected = train(alone, alone, [(x, Y) for x in batches if x.isfinite().all()])
    ddp_model = dist.prepare_ddp_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in batches:
        x, y = share(batch, Y)
        loss = F.cross_entropy(ddp_model(x), y)
        if is_finite(loss):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return gap(weights(model), expected)


def two_losses(one_backward):
    """How far the gradients of two losses of one forward are from right."""

    def backward(model, x, y):
        logits = model(x)
        losses = F.cross_entropy(logits, y), logits.square().mean()
        if one_backward:
            sum(losses).backward()
        else:
            losses[0].backward(retain_graph=True)
            losses[1].backward()

    alone, model = make_model(), make_model()
    backward(alone, X, Y)
    ddp_model = dist.prepare_ddp_model(model)
    backward(ddp_model, *share(X, Y))
    return gap(gradients(model), gradients(alone))


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


def look_up_with_a_largest_norm(in_forward):
    """How far the rows of an embedding differ between the ranks, after each has looked up its own."""
    torch.manual_seed(1)
    embedding = nn.Embedding(12, 4, max_norm=0.5 if in_forward else None)
    ddp_model = dist.prepare_ddp_model(embedding)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    ddp_model(*share(torch.arange(12))).sum().backward()
    optimizer.step()
    if not in_forward:
        with torch.no_grad():
            embedding.weight.copy_(embedding.weight.renorm(2, 0, 0.5))  # all rows, on all ranks
    assert in_forward or embedding.weight.norm(dim=1).max() < 0.5001
    first, second = dist.gather(embedding.weight.detach())
    return gap(first, second)


class OwnBlock(nn.Module):
    """Takes and returns what `wrap` makes of a tensor."""

    def __init__(self, wrap):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.wrap = wrap

    def forward(self, hidden):
        return self.wrap(self.linear(hidden.logits))


def pass_objects_between_shards(wrap):
    """How far the gradients are from right if FSDP's units pass such objects on, or the error."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = nn.Sequential(OwnBlock(wrap), OwnBlock(wrap))
    alone = copy.deepcopy(model)
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    x, y = share(X, Y)
    F.cross_entropy(alone(wrap(X)).logits, Y).backward()
    try:
        F.cross_entropy(model(wrap(x)).logits, y).backward()
    except RuntimeError as error:
        return str(error)
    return gap(gradients(model), gradients(alone))


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
    from torch.distributed.fsdp import fully_shard

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


def worker(local_rank, world_size, folder):
    dist.init_process_group()
    with float64():
        results = {
            "no_sync around backward only": accumulate(no_sync_around_forward=False),
            "no_sync around both": accumulate(no_sync_around_forward=True),
            "names of the wrapped model": choose_by_name(wrapped=True),
            "names of the plain model": choose_by_name(wrapped=False),
            "scheduled per micro-batch": schedule(per_micro_batch=True),
            "scheduled per step": schedule(per_micro_batch=False),
            "resume": resume_from_rank_0(folder),
            "norm": log_norm(),
            "cleared by the model": clear_between_forward_and_backward(by_optimizer=False),
            "cleared by the optimizer": clear_between_forward_and_backward(by_optimizer=True),
            "hook": hook_a_tensor(),
            "tensor": hide_the_output(lambda logits: logits, lambda output: output),
            "dict": hide_the_output(lambda logits: {"logits": logits}, lambda output: output["logits"]),
            "tuple": hide_the_output(lambda logits: (logits,), lambda output: output[0]),
            "dataclass": hide_the_output(Output, lambda output: output.logits),
            "another class": hide_the_output(Hidden, lambda output: output.logits),
            "skipped by one rank": skip_a_batch(agree=False),
            "skipped by all ranks": skip_a_batch(agree=True),
            "two backwards": two_losses(one_backward=False),
            "one backward": two_losses(one_backward=True),
            "norms in forward": look_up_with_a_largest_norm(in_forward=True),
            "norms after the step": look_up_with_a_largest_norm(in_forward=False),
            "a dataclass between shards": pass_objects_between_shards(Output),
            "an own class between shards": pass_objects_between_shards(Hidden),
            "other heads, by hand": use_other_heads(shard_by_hand),
            "other heads, from scratch": use_other_heads(shard_from_scratch),
            "other heads, by the helper": use_other_heads(
                functools.partial(shard_by_the_helper, zeros=True, blocks=(TwoHeads,))
            ),
            "all heads, by hand": use_other_heads(shard_by_hand, also=True),
            "all heads, from scratch": use_other_heads(shard_from_scratch, also=True),
            "heads are units": use_other_heads(functools.partial(shard_by_the_helper, zeros=True)),
        }
    torch.save(results, f"{folder}/{local_rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of both ranks."""
    folder = tmp_path_factory.mktemp("mistakes")
    dist.launch(worker, str(folder), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


# ---- what they lead to ----------------------------------------------------------------------------------------------


def check(results, wrong, right):
    """The mistake makes a difference on both ranks, and the right way none."""
    for result in results:
        assert result[wrong] > 1e-3 and result[right] < 1e-12


def test_no_sync_after_the_forward_sends_every_micro_batch(results):
    """The gradients are right all the same, so nothing but the number of all-reduces shows it."""
    for result in results:
        for name, expected in (("no_sync around backward only", 3), ("no_sync around both", 1)):
            sent, difference = result[name]
            assert sent == expected and difference < 1e-12


def test_names_of_the_wrapped_model_begin_with_module(results):
    """So the group of the last layer is empty, which is no error, and that layer gets the other learning rate."""
    for result in results:
        (none, wrong), (both, right) = result["names of the wrapped model"], result["names of the plain model"]
        assert (none, both) == (0, 2) and wrong > 0.01 and right < 1e-12


def test_a_scheduler_that_steps_per_micro_batch_is_too_fast(results):
    for result in results:
        assert result["scheduled per micro-batch"] == [0.5, 0, 0, 0]
        assert result["scheduled per step"] == [1, 0.75, 0.5, 0.25]


def test_rank_0_alone_saves_its_own_shard_of_the_optimizer_only(results):
    """And without an error: all other ranks resume with rank 0's moments."""
    for result in results:
        rank_0_alone, all_ranks = result["resume"]
        assert rank_0_alone > 1e-4
        assert all_ranks == 0


def test_a_norm_is_a_number_after_full_tensor_only(results):
    for result in results:
        norm = result["norm"]
        assert abs(norm["full"] - norm["right"]) < 1e-12
        assert norm["formatted"] == "unsupported format string passed to DTensor.__format__"
        assert norm["printed"].startswith("DTensor(")
        assert norm["one gradient, local"] < 0.99 * norm["one gradient, full"]
    first, second = (result["norm"] for result in results)
    assert first["one gradient, local"] != second["one gradient, local"]
    assert first["one gradient, full"] == second["one gradient, full"]


def test_a_sharded_model_does_not_clear_gradients_between_forward_and_backward(results):
    """Its parameters are then gathered copies, so the gradients of two steps add up."""
    check(results, "cleared by the model", "cleared by the optimizer")


def test_a_hook_sees_the_gradient_of_its_own_rank(results):
    for result in results:
        from_mean, from_own = result["hook"]
        assert from_mean > 1e-3 and from_own < 1e-12


def test_the_search_for_unused_parameters_finds_tensors_in_known_outputs_only(results):
    for result in results:
        assert all(result[kind] < 1e-12 for kind in ("tensor", "dict", "tuple", "dataclass"))
        assert "Expected to mark a variable ready only once" in result["another class"], "as the page says"


def test_sends_and_receives_are_batched():
    """gloo accepts separate calls, so the scripts are read: each send and receive is a P2POp of batch_isend_irecv."""
    batched = 0
    for path in ROOT.glob("*.py"):
        source = path.read_text()
        assert not re.search(r"\b(isend|irecv)\(", source), path.name
        batched += "batch_isend_irecv(" in source
    assert batched > 0


def test_all_ranks_skip_a_batch_or_none(results):
    """Both ranks take as many steps here, so nobody waits: the gradients of two batches are averaged."""
    check(results, "skipped by one rank", "skipped by all ranks")


def test_a_second_backward_of_one_forward_is_not_averaged(results):
    check(results, "two backwards", "one backward")


def search_job(local_rank, world_size, averaged):
    dist.init_process_group(timeout=datetime.timedelta(seconds=5))
    with float64():
        assert search_along_a_line(averaged) < 1e-9


@pytest.mark.parametrize("averaged", [True, False])
def test_a_line_search_needs_the_loss_of_all_ranks(averaged):
    """With losses of their own the ranks end at other weights, or one of them waits for the other."""
    with contextlib.nullcontext() if averaged else pytest.raises(Exception, match="rank"):
        dist.launch(search_job, averaged, nprocs=2)


def test_an_embedding_with_a_largest_norm_changes_the_rows_of_its_own_rank(results):
    check(results, "norms in forward", "norms after the step")


def test_fsdp_finds_tensors_in_known_objects_only(results):
    for result in results:
        if torch.__version__ >= "2.14":
            assert result["a dataclass between shards"] < 1e-12
        assert "storage" in result["an own class between shards"]


def test_under_fsdp_ranks_use_the_same_parameters(results):
    """Without an error a shard receives another parameter's gradient. From torch 2.14 on FSDP can fill in zeros."""
    check(results, "other heads, by hand", "all heads, by hand")
    check(results, "other heads, from scratch", "all heads, from scratch")
    if torch.__version__ >= "2.14":
        assert all(result["other heads, by the helper"] < 1e-12 for result in results)


def test_under_fsdp_a_unit_computes_on_all_ranks(results):
    """Or the weights that are gathered are halves of two heads, with torch 2.14 too. Entries of a list are units."""
    assert all(result["heads are units"] > 1e-3 for result in results)


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
