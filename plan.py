"""Plan a training run: which of these scripts, on which mesh, for your model on your GPUs. It needs no torch.

It tries each script that splits a transformer on each mesh that it can have. It prints the meshes that fit into memory,
the fastest first: the memory of a GPU by part, a rough time of a step, and the command.

    memory of a GPU  =  parameters + gradients + Adam's state + what FSDP gathers + activations + logits
    time of a step   =  max(compute + bubble, bytes of shard and replicate / bandwidth) + other bytes / bandwidth
    compute          =  operations / (operations per second of the GPU · efficiency)

Memory follows the docstrings of the scripts, and docs/costs.md. The time is rough: each GPU has one efficiency, and
latencies, kernels and slow machines are not in it. docs/costs.md compares it with ten published runs.

    replicate   every GPU holds the model, gradients are averaged        (min_FSDP_TP.py; ZeRO-1, min_ZeRO.py)
    shard       parameters are gathered when a block computes            (FSDP, min_FSDP.py and llm_FSDP.py)
    these two   each machine holds one copy, sharded over its GPUs       (HSDP, min_FSDP_TP.py)
    tensor      the work of each layer is split, inside a machine        (TP, min_FSDP_TP.py)
    context     each sequence is split                                   (CP, min_CP.py)
    stages      the layers are split, micro-batches follow each other    (PP, min_PP.py, min_PP_FSDP_TP.py)

    python plan.py llama3-8b --gpus 8 --gpu h100
    python plan.py llama3-70b --gpus 256 --gpu h200 --global-batch-size 512
    python plan.py llama3-70b --gpus 8 --gpu rtx4090 --lora 16 --nf4 --length 4096
    python plan.py gpt2 --layers 24 --width 2048 --heads 16 --hidden 8192 --gpus 4 --gpu a100    # another shape

The first prints `1. FSDP 8: roughly 1.07 s per step, 7,690 tokens/s per GPU`, and seven other meshes.

llm_FSDP.py trains the model itself. The other commands train gpt.py's model, which has as many layers, heads and
features, but bytes as tokens. Replace it by yours. Of scripts with the same mesh the fastest is named. With
--lora a plan has llm_FSDP.py alone, which then computes 1,024 logits at a time. Not planned: mixtures of experts, ring
attention, DiLoCo.
"""

import argparse
import collections
import itertools
import math
from dataclasses import dataclass, replace

# ---- what is planned: a model, a GPU, a mesh ------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A decoder of `layers` blocks. `hidden` is the width inside an MLP of `matrices` matrices: 3 if it is gated."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    matrices: int
    vocabulary: int
    tied: bool = False  # embedding and head share one matrix
    length: int = 8192  # tokens of a sequence
    hub: str | None = None  # its name on the Hugging Face Hub, for llm_FSDP.py

    @property
    def kv_width(self):
        return self.width * self.kv_heads // self.heads

    @property
    def block(self):
        """Parameters of one block: q and output, k and v, the MLP. Norms and biases are less than 0.1 %."""
        return self.width * (2 * self.width + 2 * self.kv_width + self.matrices * self.hidden)

    @property
    def inputs_and_outputs(self):
        """Of all matrices of a block, added up: so many parameters have its adapters of rank 1."""
        return 6 * self.width + 2 * self.kv_width + self.matrices * (self.width + self.hidden)

    @property
    def root(self):
        """Parameters outside the blocks: embedding and head."""
        return self.vocabulary * self.width * (1 if self.tied else 2)

    @property
    def parameters(self):
        return self.layers * self.block + self.root


# `memory` is what torch reports, in GiB. `flops` are operations per second of dense matrices in bfloat16, as the maker
# promises, and `efficiency` is the share of them that training reaches in useful operations. A GPU sends `inside` bytes
# per second to others in its machine, and `between` to other machines.
GPU = collections.namedtuple("GPU", "memory flops inside between efficiency")

# The axes of a mesh. Neighbours along the first ones have near ranks.
AXES = {"tensor": "TP", "context": "CP", "shard": "FSDP", "replicate": "DDP", "stages": "PP"}


@dataclass(frozen=True)
class Mesh:
    """A script and how it splits the work. The GPUs are replicate x shard x context x tensor x stages."""

    script: str
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    stages: int = 1
    micro_batches: int = 1  # of a step, on each GPU
    sequences: int = 1  # of a micro-batch
    recompute: bool = False
    number_bytes: int = 2  # bfloat16, or 4: float32, whose matrix products run in TF32 at half of the speed
    lora: int = 0  # the rank of adapters beside frozen parameters; 0 trains all
    nf4: bool = False  # hold the frozen matrices of the blocks in 4 bits

    @property
    def n_gpus(self):
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def axes(self):
        """{name: size} of the axes that split something."""
        names = AXES | {"replicate": "ZeRO-1" if self.script == "min_ZeRO.py" else "DDP"}
        return {names[axis]: getattr(self, axis) for axis in reversed(names) if getattr(self, axis) > 1}

    @property
    def name(self):
        """For example FSDP 8 x TP 4, recomputing."""
        name = " x ".join(f"{axis} {size}" for axis, size in self.axes.items()) or "one GPU"
        name += ", LoRA" if self.lora else ""
        name += ", recomputing" if self.recompute else ""
        name += ", float32" if self.number_bytes == 4 else ""
        return name


# ---- memory ---------------------------------------------------------------------------------------------------------


def memory(model, mesh):
    """{part: bytes} of the GPU that holds most, at the peak."""
    blocks = math.ceil(model.layers / mesh.stages)
    root = model.root if mesh.stages == 1 else model.vocabulary * model.width  # the first stage, or the last one
    computed = (blocks * model.block + root) / mesh.tensor  # parameters that it computes with
    held = computed / mesh.shard
    sharers = mesh.replicate if mesh.script == "min_ZeRO.py" else 1
    activations, logits = activation_bytes(model, mesh)
    trained, frozen = held, 0
    if mesh.lora:
        trained = adapter_parameters(model, mesh) / mesh.shard
        frozen = frozen_bytes(model, mesh) / mesh.shard
    return {
        "frozen": frozen,
        "parameters": 4 * trained,
        "gradients": 4 * trained,
        "Adam": 8 * trained / sharers,
        "gathered": gathered_bytes(model, mesh, computed),
        "activations": activations,
        "logits": logits,
    }


def adapter_parameters(model, mesh):
    return model.layers * mesh.lora * model.inputs_and_outputs


def bytes_of_block(model, mesh):
    """Of a frozen block. 64 numbers in 4 bits share a scale of 4 bytes."""
    return (0.5 + 4 / 64 if mesh.nf4 else 2) * model.block


def frozen_bytes(model, mesh):
    return model.layers * bytes_of_block(model, mesh) + 2 * model.root


def gathered_bytes(model, mesh, computed):
    """What FSDP holds besides its shards while a block computes: see min_FSDP.py, min_FSDP_TP.py, min_PP_FSDP_TP.py.

    A number takes `size` bytes, 2 in bfloat16. These are the block and its gradients, the next block, and the
    buffers that are sent; outside the blocks, the parameters and their gradients. In a pipeline all layers stay
    gathered for the step, and their gradients are summed in float32. Frozen parameters have no gradients.
    """
    size = mesh.number_bytes
    if mesh.lora:
        unpacked = 6 * model.width * model.hidden if mesh.nf4 else 0  # the largest matrix in float32 and bfloat16
        head = 2 * model.vocabulary * model.width  # the embedding is freed before the first block
        return 2 * bytes_of_block(model, mesh) + head + unpacked
    if size == 4:  # scripts without FSDP
        return 0
    if mesh.stages > 1:
        return (size + 4) * computed
    return size * (5 * model.block + 2 * model.root) / mesh.tensor


def activation_bytes(model, mesh):
    """(activations, logits): bytes that are kept for backward, in the stage where they take most together.

    Of a block these are the inputs of norms and matrices, q, k, v, the output of attention, and what lies between the
    matrices of the MLP: 16·width numbers per token for GPT's shape. With `recompute` it is the block's input, and one
    block is computed again. The gradients of a block in backward count as half of its activations.

    Tensor parallelism splits them, except the gathered inputs of attention and of the MLP, and the logits, which its
    scripts gather: see min_TP.py. The first of K stages keeps the activations of K micro-batches, the last one of one.
    """
    size, width = mesh.number_bytes, model.width
    tokens = mesh.sequences * model.length / mesh.context
    between = (4 if model.matrices == 3 else 2) * model.hidden
    whole_block = size * tokens * (6 * width + 2 * model.kv_width + between) / mesh.tensor
    whole_block += size * tokens * 2 * width * (1 - 1 / mesh.tensor)
    kept, working = whole_block, 0.5 * whole_block
    if mesh.recompute:
        kept, working = size * tokens * width / mesh.tensor, 1.5 * whole_block
    kept *= math.ceil(model.layers / mesh.stages)
    n_logits = min(tokens, LOSS_CHUNK) if mesh.lora else tokens
    last_stage = (kept + working, 12 * n_logits * model.vocabulary)  # float32 logits, their softmax and their gradient
    first_stage = (kept * min(mesh.micro_batches, mesh.stages) + working, 0)
    return max(first_stage, last_stage, key=sum)


# ---- time -----------------------------------------------------------------------------------------------------------


def operations(model):
    """Useful operations per token: 6 per parameter of the matrices, and causal attention. Embedding is a look-up."""
    matrices = model.layers * model.block + model.vocabulary * model.width
    return 6 * matrices + 6 * model.layers * model.width * model.length


def seconds(model, mesh, gpu, per_node=8):
    """{part: seconds} of a step. What shard and replicate send is hidden behind the computation, as far as it lasts."""
    tokens = mesh.micro_batches * mesh.sequences * model.length / mesh.context / mesh.tensor
    # Forward is a third of the operations, as are the gradients of inputs, and of the parameters.
    again = (3 - bool(mesh.lora) + mesh.recompute) / 3
    uneven = math.ceil(model.layers / mesh.stages) / model.layers
    speed = gpu.flops * gpu.efficiency * 2 / mesh.number_bytes
    compute = again * uneven * operations(model) * tokens / speed
    bubble = compute * (mesh.stages - 1) / mesh.micro_batches
    sent = sent_bytes(model, mesh)
    sent = {axis: sent[axis] / bandwidth(mesh, axis, gpu, per_node) for axis in AXES}
    hidden = compute + bubble if mesh.script != "min_ZeRO.py" else 0  # ZeRO sends after backward
    behind = max(0, sent.pop("shard") + sent.pop("replicate") - hidden)
    return {"compute": compute, "bubble": bubble, **sent, "shard and replicate": behind}


def sent_bytes(model, mesh):
    """{axis: bytes} that a GPU sends in a step, as the docstrings of the scripts have them."""
    size, width = mesh.number_bytes, model.width
    blocks = model.layers / mesh.stages
    computed = model.parameters / mesh.stages / mesh.tensor
    sequence_tokens = mesh.micro_batches * mesh.sequences * model.length / mesh.context
    tokens = sequence_tokens / mesh.tensor
    split = {axis: 1 - 1 / getattr(mesh, axis) for axis in AXES}
    # FSDP gathers twice for each micro-batch and reduces float32 gradients, in a pipeline once per step.
    rounds, gathers = (mesh.micro_batches, 2) if mesh.stages == 1 else (1, 1)
    activations = (11 if mesh.recompute else 8) * blocks + 4  # all-gathers and reduce-scatters
    logits = 4 * sequence_tokens * model.vocabulary
    if mesh.lora:
        per_round = 2 * frozen_bytes(model, mesh) + (2 * size + 4) * adapter_parameters(model, mesh)
        return dict.fromkeys(AXES, 0) | {"shard": split["shard"] * mesh.micro_batches * per_round}
    return {
        "shard": split["shard"] * rounds * (gathers * size + 4) * computed,
        "replicate": 2 * 4 * computed * (split["replicate"] / mesh.shard + split["context"]),
        "tensor": split["tensor"] * (activations * size * sequence_tokens * width + logits),
        "context": split["context"] * 4 * size * blocks * tokens * (width + model.kv_width),
        "stages": 2 * size * tokens * width if mesh.stages > 1 else 0,
    }


def bandwidth(mesh, axis, gpu, per_node):
    """Bytes per second that a GPU sends along an axis.

    Beyond a machine, all members of a group in one machine share its network ports: a ring for each of them.
    """
    nearer = itertools.takewhile(lambda other: other != axis, AXES)
    stride = math.prod(getattr(mesh, other) for other in nearer)
    if stride * getattr(mesh, axis) <= per_node:
        return gpu.inside
    return min(gpu.inside, max(1, per_node // stride) * gpu.between)


# ---- the meshes of the scripts --------------------------------------------------------------------------------------

SCRIPTS = {  # the axes of each, and its options for them
    "llm_FSDP.py": (("shard",), ""),
    "min_FSDP.py": (("shard",), ""),
    "min_ZeRO.py": (("replicate",), ""),
    "min_CP.py": (("context",), ""),
    "min_PP.py": (("stages",), ""),
    "min_FSDP_TP.py": (("replicate", "shard", "tensor"), "--replicate {replicate} --shard {shard} --tensor {tensor}"),
    "min_PP_FSDP_TP.py": (("stages", "shard", "tensor"), "--stages {stages} --shard {shard} --tensor {tensor}"),
}
FLOAT32 = ("min_ZeRO.py", "min_CP.py", "min_PP.py")  # they have no --bf16
LOSS_CHUNK = 1024  # targets whose logits llm_FSDP.py computes at a time
SHARE_OF_MEMORY = 0.95  # the rest is for CUDA, NCCL and fragments


def meshes(model, n_gpus, per_node, batch, lora=0, nf4=False):
    """All meshes of all scripts on which the model and the batch can be split."""
    divisors = [size for size in range(1, n_gpus + 1) if n_gpus % size == 0]
    for script, (axes, _) in SCRIPTS.items():
        if lora and script != "llm_FSDP.py":
            continue
        number_bytes = 4 if script in FLOAT32 else 2
        for sizes in itertools.product(divisors, repeat=len(axes)):
            mesh = Mesh(script, **dict(zip(axes, sizes, strict=True)), number_bytes=number_bytes, lora=lora, nf4=nf4)
            share, rest = divmod(batch, mesh.replicate * mesh.shard)
            if mesh.n_gpus != n_gpus or rest or mesh.stages > share or not can_split(model, mesh, per_node):
                continue
            # llm_FSDP.py and pipelines compute one sequence after the other. The others compute their share at once.
            if script == "llm_FSDP.py" or mesh.stages > 1:
                mesh = replace(mesh, micro_batches=share)
            else:
                mesh = replace(mesh, sequences=share)
            yield mesh
            if script in ("llm_FSDP.py", "min_FSDP_TP.py"):
                yield replace(mesh, recompute=True)


def can_split(model, mesh, per_node):
    """Whether the script has the model, and can split it so. Tensor parallelism stays inside a machine."""
    parts = mesh.tensor * mesh.context
    has_model = mesh.script != "llm_FSDP.py" or model.hub
    is_pipeline = mesh.stages > 1 or "stages" not in SCRIPTS[mesh.script][0]
    has_heads = model.heads % parts == 0 and model.kv_heads % mesh.tensor == 0 and model.length % parts == 0
    return has_model and is_pipeline and has_heads and mesh.stages <= model.layers and per_node % mesh.tensor == 0


def command(model, mesh, per_node, batch):
    """The command that starts it. On several machines: on each one."""
    words = [f"python {mesh.script} --nproc {mesh.n_gpus}"]
    if mesh.n_gpus > per_node:
        nodes = f"--nnodes {mesh.n_gpus // per_node} --nproc-per-node {per_node}"
        words = [f"torchrun {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29400 {mesh.script}"]
    words.append(SCRIPTS[mesh.script][1].format(**vars(mesh)))
    if mesh.stages > 1:
        words.append(f"--micro-batches {mesh.micro_batches}")
    if mesh.recompute:
        words.append("--recompute")
    if mesh.script == "llm_FSDP.py":
        words.append(f"--model {model.hub} --data DATA.jsonl")  # --bf16 is its default on GPUs
        if mesh.lora:
            words.append(f"--lora {mesh.lora} --loss-chunk {LOSS_CHUNK}" + (" --nf4" if mesh.nf4 else ""))
    else:
        words.append("--bf16" if mesh.number_bytes == 2 else "")
        words.append(f"--layers {model.layers} --width {model.width} --heads {model.heads}")
    words.append(f"--length {model.length} --global-batch-size {batch}")
    return " ".join(filter(None, words))


# ---- the answer -----------------------------------------------------------------------------------------------------


def plan(model, gpu, n_gpus, per_node, batch, lora=0, nf4=False):
    """(meshes that fit, the fastest first; others, the smallest first): the best one of each combination of axes."""
    best = {}
    for mesh in meshes(model, n_gpus, per_node, batch, lora, nf4):
        needed = sum(memory(model, mesh).values())
        step = round(sum(seconds(model, mesh, gpu, per_node).values()), 6)  # microseconds decide nothing
        fits = needed <= SHARE_OF_MEMORY * gpu.memory * GIB
        rank = (not fits, step if fits else needed, len(mesh.axes), mesh.recompute, needed)
        kind = tuple(mesh.axes)
        if kind not in best or rank < best[kind][0]:
            best[kind] = (rank, mesh)
    found = sorted(best.values(), key=lambda found: found[0])
    return [mesh for rank, mesh in found if not rank[0]], [mesh for rank, mesh in found if rank[0]]


def show(number, model, mesh, gpu, per_node, batch):
    held = memory(model, mesh)
    step = seconds(model, mesh, gpu, per_node)
    total = sum(step.values())
    speed = batch * model.length / mesh.n_gpus / total
    print(f"\n{number}. {mesh.name}: roughly {total:.3g} s per step, {speed:,.0f} tokens/s per GPU")
    print(f"   start   {command(model, mesh, per_node, batch)}")
    print(f"   memory  {sum(held.values()) / GIB:.1f} of {gpu.memory:.1f} GiB:", end="")
    print(" +".join(f" {name} {n_bytes / GIB:.1f}" for name, n_bytes in held.items() if n_bytes))
    print("   time   " + " +".join(f" {name} {part:.3g}" for name, part in step.items() if part > 0.005 * total))


# ---- models and GPUs ------------------------------------------------------------------------------------------------

MODELS = {  # layers, width, heads, KV heads, hidden, matrices, vocabulary
    "llama2-7b": Model(32, 4096, 32, 32, 11008, 3, 32000, length=4096, hub="meta-llama/Llama-2-7b-hf"),
    "llama2-13b": Model(40, 5120, 40, 40, 13824, 3, 32000, length=4096, hub="meta-llama/Llama-2-13b-hf"),
    "llama2-70b": Model(80, 8192, 64, 8, 28672, 3, 32000, length=4096, hub="meta-llama/Llama-2-70b-hf"),
    "llama3-1b": Model(16, 2048, 32, 8, 8192, 3, 128256, tied=True, hub="meta-llama/Llama-3.2-1B"),
    "llama3-8b": Model(32, 4096, 32, 8, 14336, 3, 128256, hub="meta-llama/Llama-3.1-8B"),
    "llama3-70b": Model(80, 8192, 64, 8, 28672, 3, 128256, hub="meta-llama/Llama-3.1-70B"),
    "llama3-405b": Model(126, 16384, 128, 8, 53248, 3, 128256, hub="meta-llama/Llama-3.1-405B"),
    "gpt2": Model(12, 768, 12, 12, 3072, 2, 50257, tied=True, length=1024, hub="openai-community/gpt2"),
}

GIB = 2**30

# `flops` and links are the makers' numbers, dense and in one direction. `between` is the network of the usual machine:
# 8 x 200 Gb/s with A100, 8 x 400 Gb/s with H100 and newer ones, 100 Gb/s for a whole machine of cards. Cards have no
# NVLink. For A100 and H100 `efficiency` lies between published runs (docs/costs.md). For others it is a guess.
GPUS = {
    "a100": GPU(79.25, 312e12, 300e9, 25e9, 0.6),
    "h100": GPU(79.25, 989.5e12, 450e9, 50e9, 0.4),
    "h200": GPU(139.8, 989.5e12, 450e9, 50e9, 0.4),
    "b200": GPU(178, 2250e12, 900e9, 50e9, 0.4),
    "mi300x": GPU(191.5, 1307e12, 448e9, 50e9, 0.3),
    "l40s": GPU(44.4, 362e12, 32e9, 1.6e9, 0.4),
    "rtx4090": GPU(23.5, 165e12, 16e9, 1.6e9, 0.4),
}

# ---- options --------------------------------------------------------------------------------------------------------

SHAPE = ("layers", "width", "heads", "kv_heads", "hidden", "vocabulary")


def whole_number(text):
    """An argparse `type`: a whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parse_args():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("model", choices=MODELS, metavar="MODEL", help=f"one of {', '.join(MODELS)}")
    add("--gpus", type=whole_number, default=8, help="number of GPUs (default: %(default)s)")
    add("--gpu", choices=GPUS, default="h100", metavar="NAME", help=f"one of {', '.join(GPUS)} (default: h100)")
    add("--gpus-per-node", type=whole_number, default=8, help="GPUs of a machine (default: %(default)s)")
    add("--length", type=whole_number, help="tokens per sequence, up to 65536 (default: the model's)")
    add("--global-batch-size", type=whole_number, help="sequences per step (default: about 8192 tokens per GPU)")
    lora_help = "train adapters of this rank beside a frozen model"
    add("--lora", type=whole_number, default=0, metavar="RANK", help=lora_help)
    add("--nf4", action="store_true", help="hold the frozen model in 4 bits")
    for name in SHAPE:
        add(f"--{name.replace('_', '-')}", type=whole_number, help="of a model of another shape (default: MODEL's)")
    args = parser.parse_args()

    model = MODELS[args.model]
    shape = {name: getattr(args, name) for name in SHAPE if getattr(args, name)}
    if shape:
        shape.setdefault("kv_heads", args.heads or model.kv_heads)
        model = replace(model, hub=None, **shape)
    args.model = replace(model, length=args.length or model.length)
    args.global_batch_size = args.global_batch_size or args.gpus * max(1, 8192 // args.model.length)
    check_options(parser, args)
    return args


def check_options(parser, args):
    """End the program with one line if options do not go together."""
    model, per_node = args.model, args.gpus_per_node
    if args.lora and not model.hub:
        parser.error("argument --lora: llm_FSDP.py trains MODEL itself, and not another shape")
    if args.nf4 and not args.lora:
        parser.error("argument --nf4: weights in 4 bits are not trained, so it needs --lora")
    if model.width % model.heads:
        parser.error(f"argument --width: {model.width} is not a multiple of --heads {model.heads}")
    if model.heads % model.kv_heads:
        parser.error(f"argument --heads: {model.heads} is not a multiple of --kv-heads {model.kv_heads}")
    if not 2 <= model.length <= 65536:
        parser.error(f"argument --length: {model.length} is not between 2 and 65536")
    if args.gpus > per_node and args.gpus % per_node:
        parser.error(f"argument --gpus: {args.gpus} is not a multiple of --gpus-per-node {per_node}")


def main():
    args = parse_args()
    model, gpu, batch, per_node = args.model, GPUS[args.gpu], args.global_batch_size, args.gpus_per_node
    fitting, others = plan(model, gpu, args.gpus, per_node, batch, args.lora, args.nf4)
    where = f"{model.parameters / 1e9:.2f} billion parameters on {args.gpus} x {args.gpu}"
    print(f"Rough projection of {where}, {batch} sequences of {model.length:,} tokens per step")
    for number, mesh in enumerate(fitting, start=1):
        show(number, model, mesh, gpu, per_node, batch)
    if others:
        needs = [f"{mesh.name} ({sum(memory(model, mesh).values()) / GIB:.0f} GiB)" for mesh in others]
        print(f"\nDoes not fit: {', '.join(needs)}")
    if not fitting:
        raise SystemExit("It fits nowhere. Try more --gpus, or another --length or --global-batch-size.")


if __name__ == "__main__":
    main()
