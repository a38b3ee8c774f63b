"""What distributed scripts share: find this process's rank and device, wrap the model, split data, reduce metrics.

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import distributed as dist


    def main_worker(local_rank, world_size):  # runs in every process
        dist.init_process_group()  # nccl for GPUs, gloo for CPUs
        device = dist.get_device()  # the GPU of this process, or the CPU

        torch.manual_seed(0)  # every process draws the same data
        inputs = torch.randn(1024, 8)
        dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        sampler = dist.data_sampler(dataset, distributed=True, shuffle=True)  # gives each process its share
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)

        model = dist.prepare_ddp_model(torch.nn.Linear(8, 1).to(device))  # averages gradients over all processes
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for epoch in range(3):
            sampler.set_epoch(epoch)  # another order in each epoch
            for x, y in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
                loss.backward()
                optimizer.step()
            dist.check_in_sync(model)  # stops if the weights of two processes differ
            loss = dist.reduce(loss.detach())  # the average over all processes, on every process
            dist.print_primary(f"epoch {epoch}: loss {loss.item():.4f}")  # printed once


    if __name__ == "__main__":
        dist.launch(main_worker)

`python script.py` starts one process per visible GPU, so `CUDA_VISIBLE_DEVICES=2,3 python script.py` starts two. Under
torchrun the same file uses the processes that torchrun started. In a single process these functions work too, without
communication. Some names and arguments are those of https://github.com/joh-fischer/distributed-pytorch.
"""

import functools
import gc
import io
import itertools
import json
import os
import sys
import traceback
import zlib
from collections import Counter

import torch
import torch.distributed as torch_dist

# DDP would import this later. Import it now: at import its functions take `group.WORLD` as a default, and would keep a
# real group alive until the interpreter ends. Then gloo's threads may abort.
import torch.distributed.nn.functional
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear  # the output of nn.MultiheadAttention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler


class DistributedError(RuntimeError):
    """An expected failure, described in one line. `launch` prints the line and exits with status 1."""


# ---- rank and device ----------------------------------------------------------------------------------------------


def is_launched():
    """Did torchrun, `launch` or another launcher start this process? RANK and WORLD_SIZE must be set, and not empty."""
    return bool(os.environ.get("RANK") and os.environ.get("WORLD_SIZE"))


def get_rank():
    """This process's number in the whole job, 0 <= rank < world_size. It decides who prints and writes files."""
    if is_dist_avail_and_initialized():
        return torch_dist.get_rank()
    return int(os.environ["RANK"]) if is_launched() else 0


def get_local_rank():
    """This process's number on its machine. It decides which GPU is used."""
    if is_launched() and os.environ["WORLD_SIZE"] != "1" and not os.environ.get("LOCAL_RANK"):
        raise DistributedError("RANK is set, but LOCAL_RANK is not: set it to the number of the process on its machine")
    return int(os.environ.get("LOCAL_RANK") or 0)


def get_world_size():
    """The number of processes in the job."""
    if is_dist_avail_and_initialized():
        return torch_dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def is_primary():
    """Is this rank 0? Do not call a collective under `if is_primary()`: the others would not take part."""
    return get_rank() == 0


def print_primary(*args, **kwargs):
    """`print` on rank 0 only."""
    if is_primary():
        print(*args, **kwargs)


def device_count():
    """Visible GPUs. Apple's is not counted: it has no process group of several ranks, no float64, no pinned memory."""
    return 0 if torch.backends.mps.is_available() else torch.accelerator.device_count()


def get_device():
    """GPU number `local_rank`, or the CPU if no GPU is visible. Raises DistributedError if there are too few GPUs."""
    gpus = device_count()
    if gpus == 0:
        return torch.device("cpu")
    local_rank = get_local_rank()
    if local_rank >= gpus:
        raise DistributedError(f"local rank {local_rank} has no GPU: {gpus} seen (start fewer; srun: --gpu-bind=none)")
    return torch.device(torch.accelerator.current_accelerator().type, local_rank)


# ---- process group ------------------------------------------------------------------------------------------------


def init_process_group(rank=None, world_size=None, backend=None, timeout=None, even_alone=False):
    """Bind this process to its device and join the job's process group: nccl for GPUs, gloo for CPUs.

    Under a launcher, `rank` and `world_size` are ignored. A collective fails after `timeout`, a datetime.timedelta, by
    default torch's 30 minutes. Pass more if one rank prepares data for longer while the others wait. It does nothing if
    a group exists. In a single process without a launcher it makes none, except with `even_alone`: a pipeline and some
    functions of torch need one.
    """
    assert not isinstance(rank, str), f"pass the backend by name: init_process_group(backend={rank!r})"
    if is_dist_avail_and_initialized():
        return
    if world_size not in (None, 1) and not is_launched():  # the caller has started its processes, on one machine
        os.environ.setdefault("LOCAL_RANK", str(rank))
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))  # a DataLoader's processes look there too
    device = get_device()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    is_alone = not is_launched() or (get_world_size() == 1 and "MASTER_ADDR" not in os.environ)
    if is_alone and not even_alone:
        return
    # With GPUs, tensors on the CPU go through gloo, and so do the objects of gather_objects and broadcast_object.
    own = torch_dist.get_default_backend_for_device(device)
    backend = backend or ("gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}")
    store = torch_dist.HashStore() if is_alone else _fresh_store()
    job = {"store": store, "rank": get_rank(), "world_size": get_world_size(), "timeout": timeout}
    torch_dist.init_process_group(backend, **job, device_id=device if own in backend and own != "gloo" else None)
    torch_dist.barrier()  # until all ranks are connected: if a rank exits before that, the others fail


_group_numbers = itertools.count()  # the same on all ranks


def _fresh_store():
    """The job's store, without the addresses of earlier groups, whose processes may have ended.

    torchrun keeps its store when it restarts the processes. On one machine the number of the restart hides the old
    addresses. Several machines count their restarts differently, so torchrun must give each restart a store of its own.
    https://github.com/pytorch/pytorch/issues/135712, torch 2.11 to 2.15
    """
    keeps_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    may_restart = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if keeps_store and may_restart and os.environ["GROUP_WORLD_SIZE"] != "1":
        raise DistributedError("a restart would hang: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on each machine")
    store, _, _ = next(torch_dist.rendezvous("env://", get_rank(), get_world_size()))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if keeps_store else "0"
    return torch_dist.PrefixStore(f"restart {restart} group {next(_group_numbers)}", store)


def is_dist_avail_and_initialized():
    """Is there a process group?"""
    return torch_dist.is_initialized()


def cleanup():
    """Destroy the process group. All ranks must call it; `launch` does when `worker_fn` returns.

    It does nothing while an error is handled, as in a `finally`, so that the error is reported before its peers fail.
    """
    if is_dist_avail_and_initialized() and sys.exc_info()[1] is None:
        if _ended_groups is not None:
            _ended_groups.append(torch_dist.group.WORLD)
        torch_dist.destroy_process_group()


# While `launch` runs `worker_fn`, this is a list of the groups that `cleanup` has destroyed. The DDP models of
# `worker_fn` must not be the last that hold them: see the end of `_run_worker`.
_ended_groups = None


def barrier():
    """Wait until every rank is here."""
    if get_world_size() > 1:
        torch_dist.barrier()


wait_for_everyone = barrier


# ---- data and model -----------------------------------------------------------------------------------------------


def data_sampler(dataset, distributed, shuffle, pad=True, seed=0):
    """A sampler that gives each rank its share of `dataset`; None if not `distributed`.

    With `pad` all ranks get equally many samples, some of them twice if the length does not divide evenly: training
    needs it, since every step is a collective. Call `sampler.set_epoch(epoch)` before each epoch: the order depends on
    seed and epoch alone. With `pad=False` every sample is seen exactly once over all ranks, as a metric needs. Some
    ranks may then have fewer batches, so evaluate the plain model: a DDP model may communicate in each forward.
    """
    if not distributed:
        return None
    if pad:
        return DistributedSampler(dataset, get_world_size(), get_rank(), shuffle=shuffle, seed=seed)
    assert not shuffle, "pad=False is for evaluation, and does not shuffle"
    return range(get_rank(), len(dataset), get_world_size())


def prepare_ddp_model(model, device_ids=None, **kwargs):
    """`model`, which must be on its device, wrapped in DistributedDataParallel; `model` itself at world size 1.

    `device_ids` may be left out, and is ignored for a model on the CPU. `kwargs` go to DistributedDataParallel. If you
    pass `gradient_as_bucket_view=True`, DDP needs less memory, but the next backward overwrites a gradient you keep.
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """
    if get_world_size() == 1:
        return model
    device_ids = device_ids if any(param.device.type != "cpu" for param in model.parameters()) else None
    return DistributedDataParallel(model, device_ids=device_ids, **kwargs)


def prepare_fsdp_model(model, blocks=(), min_num_params=None, **kwargs):
    """`model`, sharded in place over all ranks by FSDP2, on this process's device. Build the optimizer afterwards.

    FSDP gathers the weights of one unit at a time: before the unit computes, and it frees them afterwards. The units
    are the modules of the classes `blocks`, for instance `(LlamaDecoderLayer,)`, or by default the entries of each
    ModuleList and Sequential. With `min_num_params`, the units are chosen by size, from the inside out: a module is a
    unit if it has at least that many parameters outside the units in it, and shares none of them with a module outside
    of it. A model without a ModuleList or Sequential is cut in this way too, with 20,000. The model itself is a unit,
    to which all other parameters belong. The weights of a unit may be read only while it computes.

    All ranks start from rank 0's weights, except those in `ignored_params`. `kwargs` go to fully_shard. At world size 1
    the model is not sharded. If ranks use different parameters in a step, call the model's
    `set_reduce_scatter_unused_params(True)` (torch 2.14): without it their gradients are mixed up. Raises
    DistributedError on every rank if the ranks have built different models or train different parameters, and if two
    blocks share a parameter, unless units are chosen by size.
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    assert not (blocks and min_num_params), "pass blocks or min_num_params, not both"
    if get_world_size() == 1:
        return model.to(get_device())
    from torch.distributed.fsdp import fully_shard  # takes 0.7 s

    ignored = set(kwargs.get("ignored_params") or ())
    named = [*model.named_parameters(), *model.named_buffers()]
    named = [(name, tensor) for name, tensor in named if tensor not in ignored]
    _compare([*named, ("the order of parameters", [name for name, _ in named])], checksum=False)
    sync_params([tensor for _, tensor in named if not hasattr(tensor, "to_local")])
    n_tensors = len(list(model.parameters()))
    for module in dict.fromkeys([*_units(model, blocks, min_num_params), model]):  # it may be among its units
        fully_shard(module, **kwargs)
    if len(list(model.parameters())) != n_tensors:
        raise DistributedError("two blocks share a parameter: name in `blocks` a class that contains both of them")
    return model


def _units(model, blocks, min_num_params):
    """The modules to gather one at a time, inner ones first: see `prepare_fsdp_model`. A ModuleList has no forward."""
    possible = [module for module in reversed(list(model.modules())) if type(module).forward is not nn.Module.forward]
    possible = [module for module in possible if not isinstance(module, NonDynamicallyQuantizableLinear)]
    chosen = {entry for each in model.modules() if isinstance(each, nn.ModuleList | nn.Sequential) for entry in each}
    if blocks:
        chosen = {module for module in possible if isinstance(module, tuple(blocks))}
    units = [module for module in possible if module in chosen and list(module.parameters())]
    if blocks or (units and not min_num_params):
        return units
    units, in_units = [], set()
    n_uses = Counter(param for _, param in model.named_parameters(remove_duplicate=False))
    for module in possible:
        rest = Counter(param for _, param in module.named_parameters(remove_duplicate=False) if param not in in_units)
        # If a parameter has fewer uses in the module than in the model, a larger module must gather it.
        if rest.items() <= n_uses.items() and sum(param.numel() for param in rest) >= (min_num_params or 20_000):
            units.append(module)
            in_units.update(rest)
    return units


def sync_params(params, src=0):
    """Copy each tensor of `params` from rank `src` to all ranks. The tensors may be on any device, and may be views.

    Raises DistributedError on every rank if their number, shapes or types differ, or which of them are trained.
    """
    params = list(params)
    if get_world_size() > 1:
        named = [(f"tensor {i} to copy", param) for i, param in enumerate(params)]
        _compare([*named, ("the number of tensors to copy", len(named))], checksum=False)
        for param in params:
            if param.is_meta or hasattr(param, "to_local"):
                raise DistributedError('rank 0 cannot send a shard, nor a tensor on "meta", which has no values')
            sent = param.detach().to(get_device()).contiguous()
            torch_dist.broadcast(_as_bytes(sent), src=src)
            param.detach().copy_(sent)


def check_in_sync(model, /, *optimizers, **values):
    """Raise DistributedError on every rank if a parameter that all ranks should hold alike differs between ranks.

    Call it on every rank, for example after each epoch, and once for each model, which may be None. With `optimizers`
    their options are compared for each parameter, such as the learning rate, and the parameters that they train outside
    `model`. Further `values` are tensors, numbers, strings, and lists and dicts of these, under names that no parameter
    has. Other types raise DistributedError too. Of each tensor a checksum is compared, its shape and type, and whether
    it is trained. Of a DTensor, the ranks of its mesh that hold the same part compare it. Buffers are not compared.
    Ranks that hold different pipeline stages may pass different models.
    """
    params = dict(unwrapped(model).named_parameters()) if model is not None else {}
    names = {param: name for name, param in params.items()}
    options, comparable = {}, int | float | str | tuple | torch.Tensor
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    trained = [(param, group) for group in groups for param in group["params"]]
    for i, (param, group) in enumerate(trained):
        name = names.get(param, f"parameter {i} of the optimizer")
        options[f"an option for {name}"] = {key: value for key, value in group.items() if isinstance(value, comparable)}
        if param not in names:
            values[name] = param
    values["the list of names"] = sorted(values)
    _compare([*params.items(), *values.items(), *options.items()])


def _compare(named, checksum=True):
    """Raise DistributedError on every rank if two ranks have different values for one name. `named`: pairs of these."""
    described = []
    for name, value in named:
        summary = functools.partial(_summary, name, checksum)
        described.append((name + _part(value), json.dumps(value, default=summary)))
    first = {}  # by name, the first rank that has it, and its value there
    for rank, of_rank in enumerate(gather_objects(described)):
        for name, value in of_rank:
            first_rank, expected = first.setdefault(name, (rank, value))
            if value != expected:
                line = f"{name} of rank {rank} differs from rank {first_rank}'s"
                raise DistributedError(f"{line}: change and train it alike on all ranks, as DDP does")


def _part(value):
    """The part of a DTensor that this rank holds, as text. It is empty if all ranks hold it, or this one alone."""
    placements = getattr(value, "placements", ())
    shards = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if len(shards) in (0, len(placements)):
        return ""
    return f", part {[value.device_mesh.get_coordinate()[dim] for dim in shards]}"


def _summary(name, checksum, tensor):
    """What json writes for a tensor. Two tensors have one CRC-32 by chance, once in 4 billion."""
    if not torch.is_tensor(tensor):
        line = f"{name} has a {type(tensor)}: pass a tensor, a string, a number as float({name}) gives,"
        raise DistributedError(f"{line} or lists and dicts of these")
    placements = getattr(tensor, "placements", ())
    summary = [tensor.shape, str(tensor.dtype), tensor.requires_grad, str(placements)]
    if checksum and (not placements or any(placement.is_replicate() for placement in placements)):
        import numpy as np  # here, because torch can be installed without it

        local = tensor.to_local() if placements else tensor
        # `.numpy()` would forbid to resize the tensor's memory for good, and FSDP frees memory by resizing it to 0.
        summary.append(zlib.crc32(np.from_dlpack(_as_bytes(local.detach().cpu().contiguous()))))
    return summary


def _as_bytes(tensor):
    """The memory of a contiguous tensor, as uint8 (bytes,). gloo, nccl and pickle do not send every type."""
    return tensor.flatten().view(torch.uint8)


def unwrapped(model):
    """The module inside the wrappers of torch.compile and DDP."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, DistributedDataParallel):
        model = model.module
    return getattr(model, "_orig_mod", model)


# ---- metrics ------------------------------------------------------------------------------------------------------


def reduce(tensor, op="avg"):
    """A new tensor on every rank, by default the average of `tensor` over all ranks. See `all_reduce`.

    The function of this name in https://github.com/joh-fischer/distributed-pytorch sums, to rank 0 alone.
    """
    return all_reduce(tensor.clone(), op)


def all_reduce(tensor, op="sum"):
    """Change `tensor` into its "sum", "avg", "min" or "max" over all ranks, on every rank; returns `tensor`.

    For metrics: no gradient flows through it. All ranks must pass the same shape and the same type: that is not
    checked, and a sum of integers and floats is meaningless. 16-bit floats are summed in float32. If a rank has NaN,
    "min" and "max" are NaN. Raises ValueError in cases that would give a wrong number: a tensor that needs a gradient,
    the average of integers, and the sum of booleans and of integers other than int64.
    """
    _refuse_gradient(tensor)
    if op not in ("sum", "avg", "min", "max"):
        raise ValueError(f"op must be one of avg, sum, min, max, got {op!r}")
    if op == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"the average of {tensor.dtype} would be rounded: use op='sum' or tensor.float()")
    if op == "sum" and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.int64):
        raise ValueError(f"the sum of {tensor.dtype} may overflow: use tensor.long()")
    if get_world_size() == 1:
        return tensor
    # gloo has no int16.
    sent_as = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.int16: torch.int32}
    result = tensor.detach().to(sent_as.get(tensor.dtype, tensor.dtype)).contiguous()
    if op in ("min", "max"):  # the backends' own drop a NaN, or do not
        parts = [torch.empty_like(result) for _ in range(get_world_size())]
        torch_dist.all_gather(parts, result)
        result = getattr(torch.stack(parts), f"a{op}")(dim=0)
    else:
        torch_dist.all_reduce(result, getattr(torch_dist.ReduceOp, op.upper()))
    tensor.detach().copy_(result)
    return tensor


def gather(tensor):
    """Every rank's `tensor`, as a list in rank order, on every rank. Their shapes may differ.

    For metrics: no gradient flows through it, and the tensors are sent from CPU to CPU. Raises ValueError for a tensor
    that needs a gradient, unless it is a parameter, as one may gather weights to look at them.
    """
    if not isinstance(tensor, nn.Parameter):
        _refuse_gradient(tensor)
    own = tensor.detach().to("cpu", copy=True)  # a view would be sent with all that it views
    return [part.to(tensor.device) for part in gather_objects(own)]


def _refuse_gradient(tensor):
    if tensor.requires_grad and torch.is_grad_enabled():
        line = "no gradient flows through reduce, all_reduce and gather: pass loss.detach().clone() for a metric"
        raise ValueError(f"{line}, and call all_reduce in forward and backward of an autograd.Function for a loss")


def gather_objects(value):
    """Every rank's `value`, any that can be pickled, as a list in rank order, on every rank.

    If there are several processes, tensors in it come on the CPU. Their GPU is the sender's.
    """
    if get_world_size() == 1:
        return [value]
    parts = [None] * get_world_size()
    torch_dist.all_gather_object(parts, _packed(value))
    return [torch.load(io.BytesIO(part), map_location="cpu", weights_only=False) for part in parts]


def broadcast_object(value, src=0):
    """Rank `src`'s `value`, any that can be pickled, on every rank. For tensors in it see `gather_objects`."""
    if get_world_size() == 1:
        return value
    parts = [_packed(value) if get_rank() == src else None]
    torch_dist.broadcast_object_list(parts, src=src)
    return torch.load(io.BytesIO(parts[0]), map_location="cpu", weights_only=False)


def _packed(value):
    file = io.BytesIO()
    torch.save(value, file)  # pickle lacks some types of tensors, and gives no choice of the device
    return file.getvalue()


def raise_on_all(error):
    """Raise DistributedError(error) on every rank if any rank passes an error message. Pass None if there is none.

    All ranks then fail together. If only one did, the others would wait for it in the next collective.
    """
    for line in gather_objects(error):
        if line is not None:
            raise DistributedError(line)


# ---- start the processes ------------------------------------------------------------------------------------------


def launch(worker_fn, *args, nprocs=None, tolerate_killed=False):
    """Run `worker_fn(local_rank, world_size, *args)` in every process of the job and wait until all are done.

    Under torchrun, or any launcher that sets RANK and WORLD_SIZE, this process is one of them. Otherwise `nprocs`
    processes are started on this machine: by default one per visible GPU, or one without a GPU. With one process,
    `worker_fn` runs in this one. Each started process imports the script, so `worker_fn` stands at the top level of a
    file. The first failure ends all processes, and is raised here: see spawn.run_processes. With `tolerate_killed` the
    others continue when a started process other than rank 0 is killed.

    Returns what `worker_fn` returns: in started processes on rank 0, any value that can be pickled, with its tensors on
    the CPU; otherwise in this process. Started processes have copies of `args`: what they append to a list is lost.
    They do not run Python's own end. So close your files in `worker_fn`, and wait there for the processes that you
    start: a file that is open in a global loses its last lines, and such processes are ended. Ctrl-C ends started
    processes at once, without `except` and `finally`. Under torchrun an error ends a process in the same way.
    """
    if is_launched() and nprocs not in (None, 1, get_world_size()):
        line = f"{nprocs} processes are asked for, but RANK and WORLD_SIZE={get_world_size()} are set"
        raise SystemExit(f"{line}: leave the number out under torchrun, or unset both variables")
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if os.environ.get(name, "") not in ("", "0", "1") and not is_launched():
            line = f"{name} is {os.environ[name]}, but RANK and WORLD_SIZE are not set, so every task would train alone"
            raise SystemExit(f"{line}: start one torchrun per node instead, as launchers/slurm.sbatch does")
    if nprocs is None:
        nprocs = max(1, device_count())
    if nprocs < 1:
        raise ValueError(f"nprocs must be at least 1, got {nprocs}")
    if is_launched() or nprocs == 1:
        return _run_worker(worker_fn, *args)
    import spawn  # a script that torchrun starts can be copied without it

    return spawn.run_processes(_run_worker, (worker_fn, *args), nprocs, tolerate_killed)


def _run_worker(worker_fn, *args):
    """Run `worker_fn` in this process. A DistributedError becomes one line and status 1."""
    global _ended_groups
    _ended_groups = []
    try:
        result = worker_fn(get_local_rank(), get_world_size(), *args)
    except Exception as error:
        is_expected = isinstance(error, DistributedError)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            sys.stdout.flush()
            print(error if is_expected else traceback.format_exc(), file=sys.stderr, flush=True)
            os._exit(1)  # at once: at Python's own end it might wait for its peers, which wait for it
        if is_expected:
            raise SystemExit(str(error)) from None
        raise
    cleanup()
    # Free the DDP models first, and then their groups. A group that is not freed has a thread of gloo: it would abort
    # the process when Python ends. https://github.com/pytorch/pytorch/issues/190489, torch 2.11 to 2.15
    # A DDP model that is the last to hold a group could wait forever for that thread while it is freed, in torch 2.11.
    gc.collect()
    _ended_groups = None
    return result
