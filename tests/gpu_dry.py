"""GPUs that are not there: run one rank of a script on one of them, and record what it would ask of GPU and NCCL.

Tensors on the CPU are real. Tensors on the device have a shape and a type, but no memory and no values. The device is
called "gpu", because torch lets programs add a device under any name but "cuda": every "cuda" in a script is read as
"gpu". Collectives go to torch's fake process groups, which send nothing. So ranks need not meet, and each one is a
process of its own that may run alone.
"""

import collections
import importlib
import importlib.machinery
import io
import os
import pickle
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as torch_dist
from torch._subclasses import fake_tensor
from torch.distributed._tools import fake_collectives
from torch.distributed.algorithms.join import Join
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import distributed as ddp
from torch.testing._internal.distributed.fake_pg import _create_fake_pg
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

ROOT = Path(__file__).parent.parent
GPUS = 8  # on each machine
aten, c10d = torch.ops.aten, torch.ops.c10d
Result = collections.namedtuple("Result", "n_calls sent_by_rank_0 error")


# ---- the device -----------------------------------------------------------------------------------------------------


class Stream:
    """A stream, an event, and the context of a stream: nothing ever runs, so nothing waits."""

    device, device_index, device_type, stream_id = None, 0, 0, 0

    def __init__(self, *args, **kwargs):
        pass

    def nothing(self, *args, **kwargs):
        return self

    wait_stream = wait_event = record = record_event = wait = __enter__ = nothing

    def __exit__(self, *args):
        pass

    def query(self):
        return True

    def elapsed_time(self, end):
        return 1.0


class DeviceModule:
    """torch.gpu, as torch.cuda"""

    Stream = Event = StreamContext = Stream

    def __init__(self, local_rank):
        self.local_rank = local_rank

    def device_count(self):
        return GPUS

    def current_device(self):
        return self.local_rank

    def set_device(self, device):
        if torch.device(device).index != self.local_rank:
            raise RuntimeError(f"local rank {self.local_rank} uses {device}")

    def is_available(self):
        return True

    is_initialized = is_bf16_supported = is_available

    def _is_in_bad_fork(self):
        return False

    is_current_stream_capturing = _is_in_bad_fork

    def current_stream(self, *args):
        return Stream()

    default_stream = stream = current_stream

    def manual_seed(self, *args):
        pass

    synchronize = manual_seed_all = empty_cache = set_rng_state = reset_peak_memory_stats = manual_seed

    def max_memory_allocated(self, *args):
        return 10**9

    def get_rng_state(self, *args):
        return torch.zeros(16, dtype=torch.uint8)

    def get_device_name(self, *args):
        return "a GPU that is not there"

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]


class Scripts(importlib.machinery.SourceFileLoader):
    """Imports the project's modules with "gpu" for every "cuda"."""

    def get_code(self, name):
        return compile(Path(self.path).read_text().replace("cuda", "gpu"), self.path, "exec")


# ---- what is recorded -----------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Runs operations on the CPU as they are and those on the device on fake tensors."""

    def __init__(self, rank, host_value):
        super().__init__()
        self.fake = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
        self.device = torch.device("gpu", rank % GPUS)
        self.host_value = host_value  # what every number is that comes from the device
        self.gloo_groups = set()
        self.n_calls = 0  # of collectives
        self.sent_by_rank_0 = []
        # Operations for which fake tensors are not enough. These functions may return NotImplemented where they are.
        self.on_device = {
            aten.is_pinned.default: self.is_pinned,
            aten._pin_memory.default: self.pin_memory,
            aten._local_scalar_dense.default: self.number,
            aten._to_copy.default: self.to_copy,
            aten.copy_.default: self.copy,
            aten._fused_sgd_.default: self.fused_sgd,
            aten._fused_sgd_.tensor_lr: self.fused_sgd,
        }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if any(kind not in (torch.Tensor, torch.nn.Parameter, fake_tensor.FakeTensor) for kind in types):
            return NotImplemented  # a DTensor calls the operation again, for its local tensor
        makes_on_device = is_gpu(kwargs.get("device"))
        if makes_on_device and torch.device(kwargs["device"]).index is None:
            kwargs["device"] = self.device
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if func in fake_collectives.collective_ops:
            self.check_devices(func, args, tensors)
        if func in self.on_device:
            result = self.on_device[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        if makes_on_device or func in fake_collectives.functional_collectives or any(map(is_fake, tensors)):
            with self.fake:
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def is_pinned(self, tensor, device=None):
        return False

    def pin_memory(self, tensor, device=None):
        return tensor.clone()

    def number(self, tensor):
        if not is_fake(tensor):
            return NotImplemented
        return torch.tensor(self.host_value, dtype=tensor.dtype).item()

    def to_copy(self, tensor, device=None, dtype=None, non_blocking=False, **kwargs):
        to_device = is_gpu(device or tensor.device)
        if is_fake(tensor) == to_device:
            return NotImplemented
        if is_fake(tensor):
            return torch.full(tensor.shape, self.host_value, dtype=dtype or tensor.dtype)
        with self.fake:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=device)

    def copy(self, target, source, non_blocking=False):
        return NotImplemented if is_fake(target) == is_fake(source) else target

    def fused_sgd(self, params, grads, *args, **kwargs):
        """It has no kernel for fake tensors."""
        if not is_fake(params[0]):
            return NotImplemented
        devices = {tensor.device for tensor in params + grads}
        if devices != {self.device}:
            raise RuntimeError(f"fused SGD of tensors on {devices}")
        return None

    def check_devices(self, func, args, tensors):
        if func in fake_collectives.sync_ops and func is not c10d.barrier.default:
            return
        group = fake_collectives.CollectiveOp.get_process_group(func, args)
        # The job's group sends tensors of the CPU by gloo, and those of this rank's GPU by nccl.
        allowed = {torch.device("cpu")} if group.group_name in self.gloo_groups else {torch.device("cpu"), self.device}
        devices = {tensor.device for tensor in tensors}
        if func is not c10d.barrier.default and (len(devices) > 1 or not devices <= allowed):
            raise RuntimeError(f"{func} of tensors on {devices} in a group for {allowed}")
        for tensor in tensors:
            if tensor.device.type == "gpu" and not tensor.is_contiguous():
                raise RuntimeError(f"{func}: NCCL takes contiguous tensors only")
        self.n_calls += 1


def is_fake(tensor):
    return isinstance(tensor, fake_tensor.FakeTensor)


def is_gpu(device):
    return device is not None and torch.device(device).type == "gpu"


# ---- one rank -------------------------------------------------------------------------------------------------------


def run(pipe, script, options, rank, world_size, sent_by_rank_0=(), host_value=1):
    """Run a script's main_worker as `rank`, in a process that has not imported the project yet.

    Sends to `pipe` what it recorded. `error` is the traceback of a failure, or None.
    """
    sys.argv = [script, *map(str, options)]
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % GPUS), WORLD_SIZE=str(world_size))
    sys.path.insert(0, str(ROOT))
    sys.path_importer_cache[str(ROOT)] = importlib.machinery.FileFinder(str(ROOT), (Scripts, [".py"]))
    recorder = pretend_device(rank, host_value)
    recorder.sent_by_rank_0 = list(sent_by_rank_0)
    error = None
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            pretend_groups(recorder)
            pretend_ddp()
            module = importlib.import_module(script)
            # It compares numbers, which are made up here.
            sys.modules["distributed"].check_in_sync = lambda model, *others, **values: None
            if "checkpoint" in sys.modules:  # the ranks run one after the other, and have no common store
                sys.modules["checkpoint"].Preemption.agreed = lambda self: False
            if "watch" in sys.modules:
                sys.modules["watch"].start = lambda: None
            args = module.parse_args()
            change(module, args)
            with recorder:
                module.main_worker(rank % GPUS, world_size, args)
    except BaseException:
        error = traceback.format_exc()
    result = Result(recorder.n_calls, recorder.sent_by_rank_0, error)
    pipe.send_bytes(pickle.dumps(result))  # pipe.send would share the memory of tensors, and this process ends now
    pipe.close()
    os._exit(0)


def pretend_device(rank, host_value):
    """Add the device "gpu" to torch; returns the recorder of what is done on it."""
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)  # the recorder belongs to this thread
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(1, device="gpu") is then a copy from the CPU
    module = DeviceModule(rank % GPUS)
    _setup_privateuseone_for_python_backend("gpu", backend_module=module)
    recorder = Recorder(rank, host_value)

    def new_tensor(tensor, data, dtype=None):
        return torch.tensor(data, dtype=dtype or tensor.dtype, device=tensor.device)

    move = torch.Tensor.to

    def to(tensor, *args, **kwargs):
        if args and args[0] == "gpu":  # distribute_tensor
            args = (torch.device("gpu", rank % GPUS), *args[1:])
        return move(tensor, *args, **kwargs)

    torch.Tensor.new_tensor = new_tensor  # torch's takes the current device, which is always number 0 here
    torch.Tensor.to = to  # and so does this

    return recorder


def pretend_groups(recorder):
    """Let torch.distributed make fake groups, and give each rank what rank 0, which runs first, has sent as objects."""
    torch_dist.Backend.register_backend("dry", _create_fake_pg, extended_api=True, devices=["cpu", "gpu"])
    init_process_group, new_group = torch_dist.init_process_group, torch_dist.new_group

    def rendezvous(url, rank, world_size, **kwargs):
        yield torch_dist.HashStore(), rank, world_size

    def init_dry(backend, device_id=None, **kwargs):
        if (backend, device_id) != ("cpu:gloo,gpu:nccl", recorder.device):
            raise RuntimeError(f"process group for {backend} on {device_id}")
        init_process_group("dry", **kwargs)

    def new_dry(ranks=None, timeout=None, backend=None, *args, **kwargs):
        if backend not in (None, "gloo", "nccl"):
            raise RuntimeError(f"a group of {backend}")
        group = new_group(ranks, timeout, "dry")
        if backend == "gloo":
            recorder.gloo_groups.add(group.group_name)
        return group

    def get_backend(group=None):
        name = (group or torch_dist.group.WORLD).group_name
        return "gloo" if name in recorder.gloo_groups else "nccl"

    def from_rank_0(value):
        """Rank 0's `value`."""
        if torch_dist.get_rank() == 0:
            recorder.sent_by_rank_0.append(pickle.dumps(value))  # now, since the caller may change it
            return value
        return pickle.loads(recorder.sent_by_rank_0.pop(0))

    def all_gather_object(objects, value, group=None):
        objects[:] = [from_rank_0(value)] + [value] * (len(objects) - 1)

    def broadcast_object_list(objects, src=0, group=None):
        objects[:] = from_rank_0(list(objects))

    torch_dist.rendezvous, torch_dist.init_process_group = rendezvous, init_dry
    torch_dist.get_backend = get_backend
    torch_dist.all_gather_object, torch_dist.broadcast_object_list = all_gather_object, broadcast_object_list
    for module in (torch_dist, torch_dist.distributed_c10d, torch_dist.device_mesh):
        module.new_group = new_dry


def pretend_ddp():
    """DDP checks the parameters by a collective of its own, and its reducer wants results, which fake work has not."""
    ddp._verify_param_shape_across_processes = lambda *args: True
    init = ddp.DistributedDataParallel.__init__

    def init_with_hook(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.register_comm_hook(None, reduce_bucket)

    ddp.DistributedDataParallel.__init__ = init_with_hook
    notify = Join.notify_join_context

    def notify_without_result(joinable):
        notify(joinable)

    Join.notify_join_context = notify_without_result


def reduce_bucket(state, bucket: torch_dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    torch_dist.all_reduce(bucket.buffer())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def pipeline_stage(args):
    """PipelineStage, told of all shapes, which the stages would send to each other as objects."""
    pipelines = getattr(args, "shard", 1)  # of min_PP_FSDP_TP
    rows = args.global_batch_size // args.micro_batches // pipelines
    piece = args.length // getattr(args, "tensor", 1)

    def stage(module, index, n_stages, device, group):
        tokens = torch.empty(rows, args.length, dtype=torch.long, device="meta")
        between = torch.empty(rows, piece, args.width, device="meta", requires_grad=True)
        logits = torch.empty(rows, args.length, 256, device="meta", requires_grad=True)
        inputs = tokens if index == 0 else between
        outputs = logits if index == n_stages - 1 else between
        return PipelineStage(module, index, n_stages, device, input_args=inputs, output_args=outputs, group=group)

    return stage


def change(module, args):
    """Replace what fake tensors and fake groups cannot do, and make the data small."""
    if "gpt" in sys.modules:
        sys.modules["gpt"].LIBRARY /= "email"
    if module.__name__ in ("min_PP", "min_PP_FSDP_TP"):
        sys.modules["min_PP"].pipelining.PipelineStage = pipeline_stage(args)
    if module.__name__ == "min_Stream":  # no other rank tells what it has found, so each one reads all shards
        module.open_shards = lambda paths: [(path, module.find_documents(path)) for path in paths]
    if module.__name__ == "min_CP":  # a CausalBias cannot be made of a fake tensor
        module.causal_lower_right = lambda rows, columns: torch.ones(rows, columns, dtype=torch.bool, device="gpu")
    if module.__name__ == "mnist_FSDP":  # FSDP moves a module by `.data`, which a fake tensor cannot take
        wrap = module.wrap
        module.wrap = lambda model, *args: wrap(model.to(sys.modules["distributed"].get_device()), *args)
    if module.__name__ == "min_EP_FSDP":  # the same
        shard = module.fully_shard
        module.fully_shard = lambda part, mesh: shard(part.to(sys.modules["distributed"].get_device()), mesh=mesh)
    if "mnist" in sys.modules:
        draw_digits = sys.modules["mnist"]._draw_digits
        sys.modules["mnist"]._draw_digits = lambda n, seed: draw_digits(n // 100, seed)
    if "checkpoint" in sys.modules:
        torch_save = torch.save
        torch.save = lambda value, file: torch_save(value, file) if isinstance(file, io.BytesIO) else None
        sys.modules["checkpoint"]._refuse_unloadable = lambda file, path: None  # the file is empty
