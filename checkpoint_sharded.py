"""Save and resume a sharded model by torch.distributed.checkpoint (dcp): a folder to which every rank writes its part.

    checkpoint_sharded.check_folder("--checkpoint-dir", folder)                 # before training
    first_step = checkpoint_sharded.load(folder, model, optimizer)              # 0 if there is no checkpoint
    checkpoint_sharded.save(folder, model, optimizer, step + 1, keep=3)         # every rank calls it

    first_step, best = checkpoint_sharded.load(folder, model, optimizer, best=math.inf)    # other values too
    checkpoint_sharded.save(folder, model, optimizer, step + 1, best=best)

A `Saver` loads and saves for a script with the options --checkpoint-dir, --save-every and --keep.

The model may be sharded by fully_shard, split by tensor parallelism, a stage of a pipeline, wrapped in DDP, or plain.
Each checkpoint is a folder `step-N`, which all machines must share. Any number of processes can load what any number
has saved. Its index, `.metadata`, is written last, and a folder without it is ignored. So a kill at any moment leaves
the old checkpoint. But `save` first deletes a checkpoint of the same step. Two jobs must not use one folder at a time:
their parts would mix.

No random state is saved: derive randomness from the step and the rank. There are no checksums: changed bits are not
noticed. Parts of a checkpoint are pickles, so load only folders that you trust.
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import functools
import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_model_state_dict

import distributed as dist


class Saver:
    """Loads the newest checkpoint of --checkpoint-dir, and saves one every --save-every steps and after the last one.

    `first_step` is the next step to run. Without --checkpoint-dir nothing is loaded and nothing is saved.
    """

    def __init__(self, model, optimizer, args, settings):
        self.model = model
        self.optimizer = optimizer
        self.args = args
        self.settings = settings
        self.first_step = 0
        if args.checkpoint_dir:
            self.first_step = load(args.checkpoint_dir, model, optimizer, settings=settings)

    def save_if_due(self, done):
        """Every rank must call it when `done` steps are complete."""
        args = self.args
        if args.checkpoint_dir and (done % args.save_every == 0 or done == args.steps):
            save(args.checkpoint_dir, self.model, self.optimizer, done, settings=self.settings, keep=args.keep)


def check_folder(option, folder):
    """Make `folder`, before any training, and try a save. Raises SystemExit, naming `option`, if that fails."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as path:
            _run("save", Path(path), dcp.save, {"step": 0}, storage_writer=_Writer(path), no_dist=True)
    except (OSError, dist.DistributedError) as error:
        line = f"{option}: cannot write to {folder or repr('')}: {getattr(error, 'strerror', error)}"
        raise SystemExit(line) from None


def save(folder, model, optimizer, step, scheduler=None, settings=None, keep=None, frozen=True, group=None, **more):
    """Write `folder`/step-N, where N is `step`, the next step to run, at least 1. Every rank must call it.

    `optimizer` is an optimizer, or a list of optimizers of different parameters. `settings` is a dict of options that a
    resumed run must share. With frozen=False, parameters that are not trained are left out: load with frozen=False too,
    into a model whose frozen parameters are in place. Once the checkpoint is complete, only it and the newest of the
    others are kept, `keep` in all; None keeps all of them. `more` names further values: numbers, strings, tensors,
    lists and dicts of these. The buffers become rank 0's on all ranks, as in DDP. Raises DistributedError on every rank
    if what should be equal differs between ranks, if a rank cannot write, or if machines do not share the folder. What
    a failed save has written is deleted.

    With `group`, a gloo group of all ranks that nothing else uses, it returns once the state is copied to the CPU, and
    threads write behind the next steps. It returns a function that waits until the checkpoint is complete. Call that on
    every rank, before the next save and at the end: it raises what went wrong. A kill before leaves the old checkpoint.
    """
    if step < 1 or (keep is not None and keep < 1):
        raise ValueError(f"step, the next one to run, and keep must be at least 1, got {step} and {keep}")
    json.dumps(settings)  # raises TypeError for what `load` could not compare
    equal = {"settings": settings, "scheduler": scheduler and scheduler.state_dict()}
    equal |= {f"the value {name}": value for name, value in more.items()}  # a parameter may have this name too
    dist.check_in_sync(model, *_as_list(optimizer), **equal)
    names = [name for name, _ in model.named_buffers()]
    if all(names == others for others in dist.gather_objects(names)):  # the stages of a pipeline have different ones
        dist.sync_params(model.buffers())
    path = Path(folder).absolute() / f"step-{step}"
    if dist.is_primary():
        _delete(path)
    dist.barrier()
    state = _state(model, optimizer, scheduler, settings, frozen, more)

    def complete(function, *args, **kwargs):
        _run("save", path, function, *args, **kwargs)
        error = f"rank {dist.get_rank()} does not see {path}, as rank 0 does: all machines must share the folder"
        dist.raise_on_all(None if (path / ".metadata").exists() else error)
        if keep is not None and dist.is_primary():
            others = [other for other in _steps(folder) if other != step]  # may be higher ones, of an earlier run
            for other in [*others, step][:-keep]:
                _delete(path.with_name(f"step-{other}"))

    if group is None:
        return complete(dcp.save, state, checkpoint_id=path, storage_writer=_Writer(path))
    written = dcp.async_save(state, checkpoint_id=path, storage_writer=_Writer(path), process_group=group)
    return functools.partial(complete, written.result)


def load(folder, model, optimizer, scheduler=None, settings=None, frozen=True, **more):
    """Restore the newest complete checkpoint on every rank. Returns its step, the next one to run.

    With `more` it returns the step and the saved values of these names, in this order. Give it dicts with the same
    keys, and tensors of the same shapes, which are filled. Without a checkpoint it changes nothing, and returns 0 and
    the given values. Every rank must call it, with arguments as in `save`. The optimizer
    gets the learning rate and all other options of the checkpoint. Raises DistributedError on every rank if the
    checkpoint cannot be read, is incomplete, has other `settings`, or does not match the model, its types, the
    optimizer and the scheduler.
    """
    newest = max(dist.gather_objects(max(_steps(folder), default=0)))
    if newest == 0:
        return (0, *more.values()) if more else 0
    path = Path(folder).absolute() / f"step-{newest}"
    saved = _read_index(path)
    _make_optimizer_state(model, optimizer, saved)
    state = _state(model, optimizer, scheduler, settings, frozen, more)
    groups = state["groups"]
    _compare_settings(path, state["settings"][0])
    _compare_types(path, saved, state["model"])
    planner = dcp.DefaultLoadPlanner()
    _run("load", path, dcp.load, state, checkpoint_id=path, planner=planner)  # into the tensors of both
    _refuse_unknown(path, set(saved), planner.state_dict)
    if state["groups"] != groups:
        line = f"{path} was saved with other parameters in a group of the optimizer"
        raise dist.DistributedError(f"{line}: build the same groups in the same order")
    set_model_state_dict(dist.unwrapped(model), state["model"], options=StateDictOptions(strict=False))
    groups = [group for each in _as_list(optimizer) for group in each.param_groups]
    for group, saved_options in zip(groups, state["optimizer"]["param_groups"], strict=True):
        group.update(saved_options)
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"][0])
    dist.print_primary(f"Resuming from {path}")
    return (newest, *state["more"].values()) if more else newest


def _state(model, optimizer, scheduler, settings, frozen, more):
    """What dcp saves, and what it loads into. It saves a dict and a list key by key, and a tuple as a whole."""
    model = dist.unwrapped(model)
    weights, optimizer_state = get_state_dict(model, optimizer)
    if not frozen:
        for name, param in model.named_parameters(remove_duplicate=False):
            if not param.requires_grad:
                weights.pop(name.replace("_orig_mod.", ""))  # a prefix of torch.compile
    # AdamW would take the state and the options of Adam without an error, and lose its weight decay.
    classes = [type(each).__name__ for each in _as_list(optimizer)]
    settings = {"optimizer class": " and ".join(classes), **(settings or {})}
    # By their number the groups would take each other's options. The stages of a pipeline have different names in them.
    names = dist.gather_objects([group.pop("params") for group in optimizer_state["param_groups"]])
    groups = [sorted(set().union(*of_ranks)) for of_ranks in zip(*names, strict=True)]
    state = {"model": weights, "optimizer": optimizer_state, "settings": (settings,), "more": more, "groups": (groups,)}
    if scheduler is not None:
        state["scheduler"] = (scheduler.state_dict(),)
    return state


class _Writer(dcp.FileSystemWriter):
    """Says that a disk is full, which torch.save says only in the context of another error."""

    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except RuntimeError as failure:
            raise (failure.__context__ or failure) from None


def _run(verb, path, function, *args, **kwargs):
    """Call a function of dcp on every rank, to "save" or "load". If it fails, raises DistributedError on every rank."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in one process, where it is right
            function(*args, **kwargs)
    except CheckpointException as failure:
        if verb == "save" and dist.is_primary():
            _delete(path)  # all ranks have ended their part
        cause, _ = failure.failures[min(failure.failures)]
        cause = " ".join(f"{type(cause).__name__}: {cause}".split())[:300]
        raise dist.DistributedError(f"cannot {verb} {path}: {cause}") from None


def _read_index(path):
    """{name: type and shape} of all that was saved: "model.norm.weight", "optimizer.state.norm.weight.exp_avg"."""
    index, error = {}, None
    try:
        index = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as failure:  # whatever unpickling raises on bytes that are no index
        error = f"cannot load {path}: its .metadata is damaged, or not on a shared disk ({type(failure).__name__})"
    dist.raise_on_all(error)
    return index


def _compare_types(path, saved, weights):
    """Raise DistributedError if a weight was saved in another type: dcp would convert it."""
    error = None
    for name, weight in weights.items():
        properties = getattr(saved.get(f"model.{name}"), "properties", None)  # of a tensor
        if properties and properties.dtype != weight.dtype:
            error = f"{path} was saved from another model: {name} was {properties.dtype}, and is {weight.dtype}"
    dist.raise_on_all(error)


def _compare_settings(path, settings):
    state = {"settings": ()}
    _run("load", path, dcp.load, state, checkpoint_id=path)
    saved = state["settings"][0]
    for name in saved | settings:
        old, new = saved.get(name), settings.get(name)
        if old != new and json.dumps(old) != json.dumps(new):  # as text, NaN is equal to NaN
            line = f"{path} was saved with {name} {saved.get(name)}, not {settings.get(name)}"
            raise dist.DistributedError(f"{line}: use the same, or another folder")


def _make_optimizer_state(model, optimizer, saved):
    """Make the optimizer's state, because dcp loads into tensors that exist: for the parameters whose state was saved.

    A parameter that had no gradient before the save has no state in the checkpoint.
    """
    model = dist.unwrapped(model)
    model.zero_grad()  # get_state_dict makes no state if there are gradients
    get_state_dict(model, optimizer)  # makes a state for each parameter
    with_state = {name.rpartition(".")[0] for name in saved}
    for name, param in model.named_parameters():
        # Without the prefix of torch.compile.
        if f"optimizer.state.{name.replace('_orig_mod.', '')}" not in with_state:
            for each in _as_list(optimizer):
                each.state.pop(param, None)


def _as_list(optimizer):
    return optimizer if isinstance(optimizer, list | tuple) else [optimizer]


def _refuse_unknown(path, saved, loaded):
    """Raise DistributedError if no rank has loaded a name that is in the checkpoint: dcp would leave it out silently.

    `loaded` has this rank's names. The stages of a pipeline load different ones.
    """
    unknown = saved.difference(*dist.gather_objects(set(loaded)))
    if unknown:
        line = f"{path} has {min(unknown)}, which is not in this model, optimizer or scheduler"
        raise dist.DistributedError(f"{line}: build what was saved, or use another folder")


# ---- folders ------------------------------------------------------------------------------------------------------


def _steps(folder):
    """The steps of all complete checkpoints, the newest last."""
    complete = [path.parent.name.removeprefix("step-") for path in Path(folder).glob("step-*/.metadata")]
    # A copy may be called step-4.bak or step-04.
    return sorted(int(name) for name in complete if name.isdecimal() and name == str(int(name)))


def _delete(path):
    if (path / ".metadata").exists():
        (path / ".metadata").unlink()  # first, because it marks a complete checkpoint
    shutil.rmtree(path, ignore_errors=True)
