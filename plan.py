"""Plan a training run: which of these scripts, on which mesh, for your model on your GPUs. It projects, from formulas.

    time of a step  =  compute + bubble + communication that is not overlapped with compute + optimizer

It needs no GPU and no torch. It tries all splits by powers of two that fit into memory. It recommends the simplest mesh
within 5 % of the fastest: its command, the memory of a GPU by part, and the seconds of a step by part. It names the
fastest and the runner-up too. docs/plan.md holds the same formulas against published measurements, publishers that
were not fitted among them, so you can see how far to trust them.

    replicate   every GPU holds the model, gradients are averaged        (DDP, min_2D.py; ZeRO-1, min_ZeRO.py)
    shard       parameters are gathered when a block computes            (FSDP, min_FSDP.py)
    both        each machine holds one copy, sharded over its GPUs       (HSDP, min_2D.py)
    tensor      the work of each layer is split, inside a machine        (TP, min_TP.py)
    context     each sequence is split                                   (CP, min_CP.py)
    stages      the layers are split, micro-batches follow each other    (PP, min_PP.py)

Use it before you write or rent anything. When you have the machines, `python -m benchmarks.check_cluster` measures them
and --cluster takes its file.

    python plan.py --model llama3-8b --gpus 64
    python plan.py --model llama3-70b --gpus 256 --gpu h200 --global-batch-size 512
    python plan.py --layers 24 --width 2048 --heads 16 --gpus 8 --gpu "memory=48 flops=362" --links "inside=25"
    python plan.py --model llama3-70b --mesh "shard=32 tensor=2" --recompute full      # a mesh that you already have
    python plan.py --model llama3-70b --gpus 8 --lora 16
    python plan.py --model llama3-405b --gpus 512 --json

The first prints `recommended   FSDP 64, recompute none, 1 micro-batch of 1 sequence`.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
from dataclasses import dataclass

# It is said in --help too.
NOT_PLANNED = (
    "It does not plan mixtures of experts (min_EP.py trains them), ring attention (min_Ring.py), DiLoCo, "
    "quantized weights, offloading to the CPU, images, failures or slow machines."
)

# ---- the two sums ---------------------------------------------------------------------------------------------------


def seconds(model, layout, cluster):
    """{part: seconds} of a step. In the bubble of (stages - 1)/chunks micro-batches a stage waits for others."""
    computing = compute_seconds(model, layout, cluster)
    tensor = tensor_seconds(model, layout, cluster)
    context = context_seconds(model, layout, cluster)
    window = computing + tensor + context
    stage = stage_seconds(model, layout, window, cluster)
    return {
        "compute": layout.count * computing,
        "bubble": (layout.stages - 1) / layout.chunks * (window + stage),
        "tensor": layout.count * tensor,
        "context": layout.count * context,
        "stages": layout.count * stage,
        "shard": shard_seconds(model, layout, window, cluster),
        "replicate": replicate_seconds(model, layout, window, cluster),
        "optimizer": optimizer_seconds(model, layout, cluster),
    }


def tokens_per_second(model, layout, cluster):
    """Tokens per second per GPU."""
    tokens = layout.data * layout.micro * layout.count * model.sequence
    return tokens / layout.n_gpus / sum(seconds(model, layout, cluster).values())


def memory(model, layout):
    """{part: bytes} of the GPU that holds most, at the peak."""
    return {
        **state_bytes(model, layout),
        "gathered": gathered_bytes(model, layout),
        "activations": kept_bytes(model, layout),
        "logits and a block": logits_bytes(model, layout) + working_bytes(model, layout),
    }


# ---- the inputs: a model, a cluster, a layout ---------------------------------------------------------------------


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
    sequence: int = 8192

    @property
    def kv_width(self):
        return self.width * self.kv_heads // self.heads


MODELS = {  # name: layers, width, heads, KV heads, hidden, matrices, vocabulary
    "llama2-7b": Model(32, 4096, 32, 32, 11008, 3, 32000, sequence=4096),
    "llama2-13b": Model(40, 5120, 40, 40, 13824, 3, 32000, sequence=4096),
    "llama2-70b": Model(80, 8192, 64, 8, 28672, 3, 32000, sequence=4096),
    "llama3-1b": Model(16, 2048, 32, 8, 8192, 3, 128256, tied=True),  # the model cards of Llama 3.2
    "llama3-3b": Model(28, 3072, 24, 8, 8192, 3, 128256, tied=True),
    "llama3-8b": Model(32, 4096, 32, 8, 14336, 3, 128256),
    "llama3-70b": Model(80, 8192, 64, 8, 28672, 3, 128256),
    "llama3-405b": Model(126, 16384, 128, 8, 53248, 3, 128256),
    "gpt2": Model(12, 768, 12, 12, 3072, 2, 50257, tied=True, sequence=1024),
    "gpt3-175b": Model(96, 12288, 96, 96, 49152, 2, 50257, tied=True, sequence=2048),
}

HUB = {  # their names on the Hugging Face Hub, for llm_FSDP.py
    "llama2-7b": "meta-llama/Llama-2-7b-hf",
    "llama2-13b": "meta-llama/Llama-2-13b-hf",
    "llama2-70b": "meta-llama/Llama-2-70b-hf",
    "llama3-1b": "meta-llama/Llama-3.2-1B",
    "llama3-3b": "meta-llama/Llama-3.2-3B",
    "llama3-8b": "meta-llama/Llama-3.1-8B",
    "llama3-70b": "meta-llama/Llama-3.1-70B",
    "llama3-405b": "meta-llama/Llama-3.1-405B",
}

GIB = 2**30
EFFICIENCY = 0.76  # fitted to the rows of docs/plan.md: see `compute_seconds`


@dataclass(frozen=True)
class Cluster:
    """Speeds of one GPU and of its links, in bytes and operations per second. Latencies are in seconds."""

    name: str
    memory: float  # bytes that torch reports, less than what stands on the box
    flops: float  # of dense matrices in bfloat16, as its maker promises
    bandwidth: float  # of its memory
    inside: float  # sent by one GPU to others in its machine
    between: float  # sent by one GPU to other machines
    gpus_per_node: int = 8
    reachable: float = 0.8  # of `flops`, by large matrices alone
    flash: float = 0.33  # of `flops`, by FlashAttention-2, forward and backward
    efficiency: float = EFFICIENCY  # of what kernels reach alone, in training: see `compute_seconds`
    has_rows: bool = True  # docs/plan.md has runs of this GPU, or it was measured
    # Of a hop in a ring over NVLink, and over the network, with NCCL's protocol for large messages:
    # hwLatencies in https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc, see `transfer_seconds`.
    latency_inside: float = 3.4e-6
    latency_between: float = 14e-6
    reachable_link: float = 0.8  # of `inside` and `between`, by large messages: usual in nccl-tests
    overlaps: bool = True  # links work while the GPU computes
    float32: float = 0.5  # speed of float32 matrices (TF32) in relation to bfloat16
    few_tokens: float | None = None  # matrices of so many tokens run at half of their speed: see `matrix_rate`
    narrow: float | None = None  # so do matrices of this width
    reduce_scatter: float = 1.0  # its time in relation to an all-gather's: gloo's is an all-reduce
    device: str = "GPU"


# Memory is what torch.cuda.get_device_properties reports. `flops`, `bandwidth` and links are the makers' numbers, dense
# and in one direction, from the pages named beside them.
# `reachable`: "Maximum Achievable Matmul FLOPS" in https://github.com/stas00/ml-engineering, compute/accelerator.
# `flash`: 189 of 312 TFLOP/s on A100 (arXiv:2307.08691), 335 forward and 322 backward of 989 on H100 (2407.08608).
# `between` is the network of the usual machine: 8 x 200 Gb/s with A100, 8 x 400 Gb/s with H100 and newer ones, 100 Gb/s
# for a whole machine of cards. Cards have no NVLink. They send over PCIe, the RTX 4090 through the host's memory.
A100 = {"reachable": 271.2 / 312, "flash": 0.6}
H100 = {"reachable": 794.5 / 989, "flash": 0.33}
CARD = {"flash": 0.6, "has_rows": False}
GPUS = {
    # nvidia.com/en-us/data-center/ a100, h100, h200, dgx-b200
    "a100": Cluster("a100", 79.25 * GIB, 312e12, 2.04e12, 300e9, 25e9, **A100),
    "a100-40": Cluster("a100-40", 39.5 * GIB, 312e12, 1.555e12, 300e9, 25e9, **A100),
    "h100": Cluster("h100", 79.25 * GIB, 989.5e12, 3.35e12, 450e9, 50e9, **H100),
    "h200": Cluster("h200", 139.8 * GIB, 989.5e12, 4.8e12, 450e9, 50e9, **H100),
    "b200": Cluster("b200", 178 * GIB, 2250e12, 8e12, 900e9, 50e9, reachable=1745 / 2250, has_rows=False),
    # h100 again: NVLink joins pairs only, the others are joined by PCIe 5
    "h100-nvl": Cluster("h100-nvl", 93 * GIB, 835e12, 3.9e12, 64e9, 50e9, has_rows=False),
    # amd.com/en/products/accelerators/instinct/mi300/mi300x.html
    "mi300x": Cluster("mi300x", 191.5 * GIB, 1307e12, 5.3e12, 448e9, 50e9, reachable=668.4 / 1307, has_rows=False),
    # nvidia.com/en-us/data-center/ l40s, l4; aws.amazon.com/ec2/instance-types/g5; NVIDIA's paper on Ada
    "l40s": Cluster("l40s", 44.4 * GIB, 362e12, 864e9, 32e9, 1.6e9, **CARD),
    "l4": Cluster("l4", 22 * GIB, 121e12, 300e9, 32e9, 1.6e9, **CARD),
    "a10g": Cluster("a10g", 22 * GIB, 70e12, 600e9, 32e9, 1.6e9, **CARD),
    "rtx4090": Cluster("rtx4090", 23.5 * GIB, 165e12, 1.008e12, 16e9, 1.6e9, **CARD),
}
SHARE_OF_MEMORY = 0.95  # The rest is for CUDA, NCCL and fragments. Of the runs of docs/plan.md, 1 in 20 needs more.


@dataclass(frozen=True)
class Layout:
    """How the work is split, and what the framework does. The GPUs are replicate x shard x context x tensor x stages.

    The defaults of the framework are what most published runs have. What the scripts here do is `SCRIPTS`.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    context: int = 1
    stages: int = 1
    zero: bool = False  # replicas share the optimizer's state
    micro: int = 1  # sequences of a micro-batch
    count: int = 1  # micro-batches of a step
    chunks: int = 1  # stages that each GPU has, interleaved
    recompute: str = "none"  # or "selective", every second large matrix, or "full", whole blocks
    precision: str = "bfloat16"  # or "float8" in the blocks' matrices, or "float32"
    attention: str = "unknown"  # the kernel, one of KERNELS
    fused: bool = True  # element-wise operations are fused, as by torch.compile
    fused_loss: bool = True  # the loss works on the logits in place: 4 bytes each, otherwise 12
    chunked_loss: bool = False  # the loss takes a few tokens at a time, so there are never all logits
    adam_bytes: float = 8.0  # of the optimizer's state, per parameter
    lora: int = 0  # rank of the adapters that are trained beside a frozen model in bfloat16
    async_tensor: bool = False  # tensor parallelism communicates while it computes
    regather: bool = False  # backward gathers the inputs of tensor parallelism's matrices again
    balanced: bool = True  # every rank of `context` has the same share of attention
    shard_context: bool = True  # FSDP shards over the ranks of `context` too; in min_CP.py they hold replicas
    keep_gathered: bool = False  # shards are gathered once per micro-batch
    overlap_gather: bool = False  # ZeRO sends few large messages, and gathers while the next forward computes
    reduce_bytes: int = 4  # gradients travel in float32

    @property
    def n_gpus(self):
        return self.replicate * self.shard * self.context * self.tensor * self.stages

    @property
    def data(self):
        """Groups of GPUs that take different sequences."""
        return self.replicate * self.shard

    @property
    def shards(self):
        """GPUs that share parameters by FSDP."""
        return self.shard * self.context if self.shard_context else self.shard

    @property
    def copies(self):
        """GPUs that hold the same parameters, and average their gradients."""
        return self.replicate if self.shard_context else self.replicate * self.context

    @property
    def number_bytes(self):
        """Bytes of one number of an activation or of a gathered parameter."""
        return 4 if self.precision == "float32" else 2


# The scripts call torch's attention, which is FlashAttention-2 on these GPUs, its cross-entropy, and no torch.compile.
SCRIPTS = Layout(attention="flash2", fused=False, fused_loss=False)


# ---- parameters and operations ------------------------------------------------------------------------------------


def block_params(model):
    """Parameters of one block: q and output, k and v, the MLP. Norms and biases are less than 0.1 %."""
    attention = 2 * model.width**2 + 2 * model.width * model.kv_width
    return attention + model.matrices * model.width * model.hidden


def embedding_params(model):
    """Parameters of the embedding and the head."""
    if model.tied:
        return model.vocabulary * model.width
    return 2 * model.vocabulary * model.width


def total_params(model):
    return model.layers * block_params(model) + embedding_params(model)


def local_params(model, layout):
    """Parameters that a GPU computes with: tensor and stages split them. Embedding and head are spread evenly."""
    return total_params(model) / layout.tensor / layout.stages


def model_flops(model):
    """Operations per token, as MFU counts them: 6 per parameter of the matrices, 12·layers·width·length for attention.

    The embedding is no matrix product. Attention counts twice what a causal one needs. https://arxiv.org/abs/2204.02311
    """
    matrices = model.layers * block_params(model) + model.vocabulary * model.width
    return 6 * matrices + 12 * model.layers * model.width * model.sequence


def recomputed_share(model, layout):
    """The share of a block's forward pass that backward computes again."""
    if layout.recompute == "full":
        return 1.0
    if layout.recompute == "selective":  # of q k v o gate up down, torchtitan recomputes k, o and up
        again = model.width * (model.kv_width + model.width + model.hidden)
        return again / block_params(model)
    return 0.0


def adapter_params(model, layout):
    """Parameters of LoRA's two matrices beside each matrix of all blocks: rank·(inputs + outputs). arXiv:2106.09685"""
    attention = 2 * (model.width + model.width) + 2 * (model.width + model.kv_width)
    mlp = model.matrices * (model.width + model.hidden)
    return model.layers * layout.lora * (attention + mlp)


def tokens_of_micro_batch(model, layout):
    """Tokens of one micro-batch, for all GPUs of `tensor` together."""
    return layout.micro * model.sequence / layout.context


# ---- memory: the parts ----------------------------------------------------------------------------------------------


def state_bytes(model, layout):
    """{part: bytes} of parameters, gradients and Adam's state: 16 per parameter in float32, as docs/costs.md has it.

    In bfloat16 FSDP shards the same 16 bytes, and gathers copies. A replicated model also holds 2 bytes per parameter
    for copies, and 2 for gradients, if these are summed in float32. ZeRO shards the float32 parameters too: 8 bytes on
    each GPU, 12 shared by all. (arXiv:1910.02054 sums gradients in 2 bytes.) With LoRA the model has 2 bytes, and only
    the adapters have 16.
    """
    if layout.lora:
        adapters = adapter_params(model, layout) / layout.shards
        params = total_params(model) / layout.shards
        adam = layout.adam_bytes * adapters
        return {"parameters": 2 * params + 4 * adapters, "gradients": 4 * adapters, "Adam's state": adam}
    params = local_params(model, layout) / layout.shards
    held = {"parameters": 4 * params, "gradients": 4 * params, "Adam's state": layout.adam_bytes * params}
    low_precision = layout.precision != "float32"
    if layout.zero:
        held["Adam's state"] /= layout.copies
        if low_precision:
            held["parameters"] /= layout.copies
    if low_precision and layout.shards == 1:
        held["parameters"] += 2 * params
        held["gradients"] = layout.reduce_bytes * params
        if layout.reduce_bytes == 4:
            held["gradients"] += 2 * params
    return held


def gathered_bytes(model, layout):
    """Parameters that FSDP has gathered, and their gradients, at the peak: see min_FSDP.py and docs/costs.md.

    While a block computes: the block, the next one, its gradients, and the float32 buffers that are sent. In float32
    that is 20 bytes per parameter. The embedding and the head stay gathered from forward to backward. In a pipeline
    everything stays gathered for the step, and float32 gradients are summed unsharded: see min_3D.py.
    """
    if layout.shards == 1:
        return 0.0
    size = layout.number_bytes
    if layout.stages > 1:
        return (size + 4) * local_params(model, layout)
    if layout.lora:  # frozen: this block and the next one, and no gradients
        return 2 * size * block_params(model) + size * embedding_params(model)
    buffers = 8 if size == 4 else 4
    per_param = 3 * size + buffers
    block = per_param * block_params(model)
    ends = size * embedding_params(model) + (size + 4) * model.vocabulary * model.width
    return (block + ends) / layout.tensor


UNFUSED = 1.4  # activations that kernels keep, and move, without torch.compile (torchtitan with and without)


def activation_bytes(model, layout):
    """Bytes per token that a block keeps for backward, before tensor parallelism splits them.

    none: the inputs of both norms and of all matrices, q, k, v, and the output of attention: 32·width for GPT's shape.
    (arXiv:2205.05198 has 34 with the masks of dropout.) Kernels that are not fused keep more.
    selective: the block's input and the outputs of q, v, attention, gate and down. full: the block's input.
    """
    if layout.recompute == "full":
        numbers = model.width
    elif layout.recompute == "selective":
        numbers = 4 * model.width + model.kv_width + model.hidden
    else:
        numbers = 6 * model.width + 2 * model.kv_width + model.matrices * model.hidden
        if not layout.fused:
            numbers *= UNFUSED
    return layout.number_bytes * numbers


def micro_batches_in_flight(layout):
    """Micro-batches whose activations the first stage keeps: as many as there are stages in 1F1B.

    Interleaved, it keeps the activations of (stages - 1)/chunks micro-batches more. (arXiv:2205.05198, section 4.2.3)
    """
    if layout.stages == 1:
        return 1
    more = 0 if layout.chunks == 1 else (layout.stages - 1) / layout.chunks
    return min(layout.count, layout.stages + more)


def kept_bytes(model, layout):
    """Activations of all blocks of a stage, for all micro-batches in flight.

    Tensor parallelism splits them, except the gathered inputs of attention and of the MLP: see min_TP.py.
    """
    tokens = tokens_of_micro_batch(model, layout)
    block = activation_bytes(model, layout) * tokens / layout.tensor
    if layout.recompute == "none" and not layout.regather:
        block += 2 * (1 - 1 / layout.tensor) * layout.number_bytes * model.width * tokens
    blocks = math.ceil(model.layers / layout.stages)
    return block * blocks * micro_batches_in_flight(layout)


def bytes_per_logit(layout):
    """12 for torch's cross-entropy: float32 logits, their softmax, their gradient. 4 if it is fused, 0 if chunked."""
    if layout.chunked_loss:
        return 0
    return 4 if layout.fused_loss else 12


def logits_bytes(model, layout):
    """The logits when backward begins. Tensor parallelism splits them, and gathers the head's input and its gradient.

    In a pipeline only the last stage has logits. It keeps the activations of one micro-batch, so its logits count as
    far as they exceed the others that the first stage keeps.
    """
    tokens = tokens_of_micro_batch(model, layout)
    logits = bytes_per_logit(layout) * model.vocabulary * tokens / layout.tensor
    if layout.tensor > 1:
        logits += 2 * layout.number_bytes * model.width * tokens
    if layout.stages > 1:
        others = kept_bytes(model, layout) * (1 - 1 / micro_batches_in_flight(layout))
        logits = max(0.0, logits - others)
    return logits


def working_bytes(model, layout):
    """A block's gradients in backward, and its activations if they are recomputed.

    The gradients count half of the activations. torch keeps the memory of the logits, so both count.
    """
    tokens = tokens_of_micro_batch(model, layout)
    whole = dataclasses.replace(layout, recompute="none")
    share = 0.5 if layout.recompute == "none" else 1.5
    block = share * activation_bytes(model, whole) * tokens / layout.tensor
    if layout.tensor > 1:
        block += 2 * layout.number_bytes * model.width * tokens
    return block


# ---- time: computing ----------------------------------------------------------------------------------------------

# Fitted to the rows of docs/plan.md, like EFFICIENCY:
FORWARD = 0.17  # the share of a block's time that recomputing all of it adds. Of the operations it is a third.
TRITON = 0.74  # speed of Triton's older attention in relation to FlashAttention-2

FLOAT8 = 1402.6 / 794.5  # speed of matrices in float8 in relation to bfloat16: the source of `reachable`, for an H100
# The speed of attention in relation to FlashAttention-2's. FlashAttention-3: arXiv:2407.08608, figures 5 and 6.
# An unknown kernel is taken as between FlashAttention-2 and Triton's: most runs of docs/plan.md have one of them.
KERNELS = {"flash2": 1.0, "flash3": 1.7, "triton": TRITON, "unknown": math.sqrt(TRITON)}
SHORT = 300  # tokens of a sequence with which attention reaches half of its speed: the same figures, causal
NARROW_HEADS = 0.9  # speed of attention with 64 features per head in relation to 128: the same figures
PASSES = 4  # each kept activation is written once and read once by other kernels than matrices, as is its gradient


def matrix_rate(model, layout, cluster):
    """Operations per second of a block's matrices. It falls with few tokens, and with narrow slices of the layers.

    A product of M x K by K x N in bfloat16 has 2·M·K·N operations and moves 2·(K·N + M·K + M·N) bytes. As in the
    roofline model (https://doi.org/10.1145/1498765.1498785), moving them takes ridge/M + ridge/K + ridge/N times as
    long as computing, where the ridge is operations per byte of memory. M are the tokens. Of K and N the narrower
    counts, which is width / tensor. The two times add up.
    """
    speed = {"bfloat16": 1.0, "float8": FLOAT8, "float32": cluster.float32}[layout.precision]
    ridge = cluster.flops * cluster.reachable / cluster.bandwidth
    few_tokens = ridge if cluster.few_tokens is None else cluster.few_tokens
    narrow = ridge if cluster.narrow is None else cluster.narrow
    moving = few_tokens / tokens_of_micro_batch(model, layout) + narrow * layout.tensor / model.width
    if layout.precision == "float8":  # the matrices are faster, the memory is not
        moving *= speed
    return cluster.flops * cluster.reachable * speed / (1 + moving)


def attention_rate(model, layout, cluster):
    """Operations per second of causal attention. It is not the matrices' rate: kernels and GPUs differ."""
    speed = cluster.float32 if layout.precision == "float32" else 1.0
    fullness = model.sequence / (model.sequence + SHORT)
    if model.width // model.heads <= 64:
        fullness *= NARROW_HEADS
    return cluster.flops * cluster.flash * KERNELS[layout.attention] * speed * fullness


def block_seconds(model, layout, cluster):
    """Forward and backward of one block and one micro-batch: matrices, attention, and memory traffic of the rest."""
    tokens = tokens_of_micro_batch(model, layout) / layout.tensor
    slowdown = 1 + recomputed_share(model, layout) * FORWARD
    operations = 6 * slowdown
    if layout.lora:
        operations -= 2  # a frozen matrix needs no gradient
    matrices = operations * block_params(model) * tokens / matrix_rate(model, layout, cluster)

    # Causal: 2·width·length operations per token forward, two and a half times as many backward. (arXiv:2307.08691)
    passes = 4.5 if layout.recompute == "full" else 3.5
    imbalance = 1 if layout.balanced else 2 - 1 / layout.context  # the last of equal pieces attends to all others
    products = 2 * model.width * model.sequence * tokens * passes * imbalance
    attention = products / attention_rate(model, layout, cluster)

    whole = dataclasses.replace(layout, recompute="none")
    traffic = PASSES * activation_bytes(model, whole) * tokens * slowdown / cluster.bandwidth
    return matrices + attention + traffic


def head_seconds(model, layout, cluster):
    """Forward and backward of the head and of the loss, for one micro-batch: matrices, and two passes of logits."""
    tokens = tokens_of_micro_batch(model, layout) / layout.tensor
    if layout.precision == "float8":  # the head computes in bfloat16
        layout = dataclasses.replace(layout, precision="bfloat16")
    operations = 4 if layout.lora else 6
    product = operations * model.vocabulary * model.width * tokens / matrix_rate(model, layout, cluster)
    return product + 24 * model.vocabulary * tokens / cluster.bandwidth


def compute_seconds(model, layout, cluster):
    """Seconds of one micro-batch in the slowest stage. Stages are as even as whole blocks allow.

    `cluster.efficiency` divides it all: in a long run clocks fall, and kernels follow each other with gaps.
    """
    block = block_seconds(model, layout, cluster)
    even = (model.layers * block + head_seconds(model, layout, cluster)) / layout.stages
    slowest = math.ceil(model.layers / layout.stages) * block
    return max(even, slowest) / cluster.efficiency


# ---- time: communication ------------------------------------------------------------------------------------------

ASYNC_HIDES = 0.5  # of tensor parallelism's communication, where a framework overlaps it with matrices: about half
HIDDEN_COST = 0.15  # each second of hidden communication adds this to compute: NCCL takes 16 to 24 of 132 cores
TENSORS = 9  # messages of a block, one per parameter tensor: q, k, v, output, gate, up, down, two norms


def transfer_seconds(size, stride, n_bytes, messages, cluster, tree=False):
    """(seconds of the bytes, seconds of latency) that each of `size` GPUs needs to send `n_bytes` in a ring.

    Neighbours are `stride` GPUs apart. Inside a machine a GPU sends over NVLink. Beyond it, all members of the group in
    one machine share its network ports: a ring for each of them. Each message passes `size` - 1 hops, one of them over
    the network for each machine but one. In a `tree` it passes as many machines as their number has doublings. Latency
    is never hidden. The hops are NCCL's own model, `latencies` in src/graph/tuning.cc.
    """
    if size == 1:
        return 0.0, 0.0
    if size * stride <= cluster.gpus_per_node:
        latency = (size - 1) * cluster.latency_inside
        return n_bytes / (cluster.inside * cluster.reachable_link), messages * latency
    members = max(1, cluster.gpus_per_node // stride)
    machines = math.ceil(size / members)
    bandwidth = min(cluster.inside, members * cluster.between) * cluster.reachable_link
    if tree:
        latency = (members - 1) * cluster.latency_inside + math.log2(machines) * cluster.latency_between
    else:
        latency = (size - machines) * cluster.latency_inside + (machines - 1) * cluster.latency_between
    return n_bytes / bandwidth, messages * latency


def exposed(seconds, window, cluster):
    """Seconds by which communication of `seconds` prolongs the computing of `window` seconds that hides it."""
    if not cluster.overlaps:
        return seconds
    hidden = min(seconds, window)
    return seconds - hidden + HIDDEN_COST * hidden


def tensor_messages(model, layout):
    """All-gathers and reduce-scatters of one micro-batch, each of a whole activation: see min_TP.py and docs/costs.md.

    A block has four pairs of them, embedding and head two. Recomputing a block adds 3, and `regather` 2.
    min_TP.py gathers the logits besides. Here each rank keeps its part of the vocabulary.
    """
    per_block = 11 if layout.recompute == "full" else 8
    if layout.regather:
        per_block += 2
    return (per_block * model.layers + 4) / layout.stages


def tensor_bytes(model, layout):
    """Sent by a GPU for one micro-batch: (T-1)/T of an activation for each message."""
    tokens = tokens_of_micro_batch(model, layout)
    split = (layout.tensor - 1) / layout.tensor
    return split * tensor_messages(model, layout) * layout.number_bytes * tokens * model.width


def tensor_seconds(model, layout, cluster):
    """Seconds of one micro-batch, all exposed unless the framework overlaps it."""
    messages = tensor_messages(model, layout)
    half_reduced = (1 + cluster.reduce_scatter) / 2  # of each pair, one is a reduce-scatter
    n_bytes = half_reduced * tensor_bytes(model, layout)
    seconds, latency = transfer_seconds(layout.tensor, 1, n_bytes, messages, cluster)
    if layout.async_tensor:
        return (1 - ASYNC_HIDES) * (seconds + latency)
    return seconds + latency


def context_bytes(model, layout):
    """Sent by a GPU for one micro-batch by min_CP.py's all-to-alls: 8·(C-1)/C activations of its piece for each block.

    They are q, k, v and the output, forward and backward. Fewer KV heads make k and v smaller.
    """
    tokens = tokens_of_micro_batch(model, layout) / layout.tensor
    split = (layout.context - 1) / layout.context
    per_block = 2 * split * layout.number_bytes * tokens * (2 * model.width + 2 * model.kv_width)
    return per_block * model.layers / layout.stages


def context_seconds(model, layout, cluster):
    """Seconds of one micro-batch. Recomputing a block sends what forward sends, which is half, a second time."""
    again = 1.5 if layout.recompute == "full" else 1.0
    messages = 4 * again * model.layers / layout.stages
    n_bytes = again * context_bytes(model, layout)
    return sum(transfer_seconds(layout.context, layout.tensor, n_bytes, messages, cluster))


def shard_bytes(model, layout):
    """(gathered, reduced): sent by a GPU in one gathering of all its parameters, and in one reduction of gradients.

    (S-1)/S of the parameters each: see min_FSDP.py. In float8 parameters are gathered in one byte. With LoRA only the
    adapters have gradients.
    """
    split = (layout.shards - 1) / layout.shards
    params = split * local_params(model, layout)
    gathered = 1 if layout.precision == "float8" else layout.number_bytes
    trained = split * adapter_params(model, layout) if layout.lora else params
    return gathered * params, layout.reduce_bytes * trained


def shard_seconds(model, layout, window, cluster):
    """FSDP's communication in a step that `window` seconds of computing per micro-batch do not hide."""
    gatherings = 1 if layout.keep_gathered or layout.stages > 1 else 2
    rounds = 1 if layout.stages > 1 else layout.count  # a pipeline keeps all gathered, see gathered_bytes
    gathered, reduced = shard_bytes(model, layout)
    messages = (gatherings + 1) * model.layers / layout.stages
    n_bytes = gatherings * gathered + cluster.reduce_scatter * reduced
    seconds, latency = transfer_seconds(layout.shards, layout.tensor, n_bytes, messages, cluster)
    return rounds * (exposed(seconds, window, cluster) + latency)


def replicate_bytes(model, layout):
    """Sent by a GPU to reduce gradients, and to gather again: (R-1)/R of its gradients, and as many again.

    DDP's all-reduce is both, see min_DDP.py. ZeRO gathers parameters instead, see min_ZeRO.py.
    """
    params = (layout.copies - 1) / layout.copies * local_params(model, layout) / layout.shards
    gathered = layout.number_bytes if layout.zero else layout.reduce_bytes
    return layout.reduce_bytes * params, gathered * params


def replicate_seconds(model, layout, window, cluster):
    """What DDP or ZeRO adds to a step. Only backward of the last micro-batch, two thirds of `window`, hides gradients.

    Interleaved, a chunk's gradients are complete when the last micro-batches, one per stage, have left the chunk. So
    these hide them. DDP's buckets, about one per block, go through NCCL's tree. ZeRO's messages pass a ring, one per
    tensor, and it gathers parameters after the optimizer's step, when nothing computes. `overlap_gather` is better.
    """
    stride = layout.tensor * layout.shards
    messages = model.layers / layout.stages
    if layout.chunks > 1:
        window *= min(layout.stages, layout.count)
    reduced, gathered = replicate_bytes(model, layout)
    if not layout.zero:
        seconds, latency = transfer_seconds(layout.copies, stride, reduced + gathered, 2 * messages, cluster, tree=True)
        return exposed(seconds, window * 2 / 3, cluster) + latency
    if not layout.overlap_gather:
        messages *= TENSORS
    n_bytes = cluster.reduce_scatter * reduced
    reducing, latency = transfer_seconds(layout.copies, stride, n_bytes, messages, cluster)
    gathering, _ = transfer_seconds(layout.copies, stride, gathered, messages, cluster)
    if layout.overlap_gather:
        gathering = exposed(gathering, window / 3, cluster)
    return exposed(reducing, window * 2 / 3, cluster) + gathering + 2 * latency


def optimizer_seconds(model, layout, cluster):
    """Adam reads parameter, gradient and two moments, and writes three: 28 bytes per parameter."""
    params = adapter_params(model, layout) if layout.lora else local_params(model, layout)
    params /= layout.shards
    if layout.zero:
        params /= layout.copies
    return 28 * params / cluster.bandwidth


def stage_bytes(model, layout):
    """Sent by a GPU to the next stage and back, for one micro-batch: its activations and their gradients."""
    tokens = tokens_of_micro_batch(model, layout) / layout.tensor
    return 2 * layout.number_bytes * tokens * model.width * layout.chunks


def stage_seconds(model, layout, window, cluster):
    """What sending activations between stages adds to a micro-batch. It is hidden behind the next micro-batch."""
    if layout.stages == 1:
        return 0.0
    inside = layout.n_gpus <= cluster.gpus_per_node
    bandwidth = cluster.inside if inside else cluster.between
    latency = cluster.latency_inside if inside else cluster.latency_between
    sending = stage_bytes(model, layout) / (bandwidth * cluster.reachable_link)
    return exposed(sending, window, cluster) + 2 * layout.chunks * latency


# ---- how sure it is -----------------------------------------------------------------------------------------------

# 8 of 10 published runs of publishers that were not fitted were within these factors: see docs/plan.md.
SURE = 1.2  # up to 8,192 tokens and 128 GPUs
PER_DOUBLED_LENGTH = 1.05  # for each doubling beyond 8,192 tokens
PER_DOUBLED_GPUS = 1.08  # for each doubling beyond 128 GPUs
NO_ROWS = 1.7  # for a GPU without published runs there, and for LoRA


def doubt(model, layout, cluster):
    """The factor within which 8 of 10 measured speeds are expected."""
    factor = SURE
    factor *= PER_DOUBLED_LENGTH ** max(0.0, math.log2(model.sequence / 8192))
    factor *= PER_DOUBLED_GPUS ** max(0.0, math.log2(layout.n_gpus / 128))
    if layout.lora or not cluster.has_rows:
        factor *= NO_ROWS
    return factor


def expected_range(model, layout, cluster):
    """(low, high) tokens per second and GPU. If the attention kernel is unknown, from the slowest to the fastest."""
    kernels = [layout.attention]
    if layout.attention == "unknown":
        kernels = list(KERNELS)
    speeds = [tokens_per_second(model, dataclasses.replace(layout, attention=kernel), cluster) for kernel in kernels]
    factor = doubt(model, layout, cluster)
    return min(speeds) / factor, max(speeds) * factor


# ---- all layouts, and the one to recommend ------------------------------------------------------------------------

RECOMPUTE = ("none", "selective", "full")
SHORTEST_PIECE = 8192  # tokens of a sequence per rank of `context`: Llama 3 has 8,192, torchtitan's runs 32,768
WITHIN = 0.95  # of the fastest: a simpler mesh may be worth so much of the speed
MESH = ("replicate", "shard", "tensor", "context", "stages")


@dataclass(frozen=True)
class Job:
    """What the layouts have in common."""

    model: Model
    cluster: Cluster
    n_gpus: int
    batch: int  # sequences of a step, over all GPUs
    name: str | None = None  # of `model`, one of MODELS
    recompute: tuple = RECOMPUTE
    framework: Layout = SCRIPTS
    mesh: tuple = ()  # (axis, size) of a mesh that is given; otherwise all are tried
    micro: int | None = None  # sequences of a micro-batch, if they are given


def powers_of_two(largest):
    powers = []
    power = 1
    while power <= largest:
        powers.append(power)
        power *= 2
    return powers


def splits(job):
    """All (tensor, context, stages) that divide the GPUs, the heads and the layers.

    Tensor parallelism stays inside a machine, and each of its ranks has at least one KV head. min_CP.py's all-to-all
    needs a head for each rank of `context`.
    """
    model = job.model
    for tensor in powers_of_two(min(job.cluster.gpus_per_node, model.kv_heads)):
        for stages in powers_of_two(min(model.layers, job.n_gpus)):
            longest = max(1, model.sequence // SHORTEST_PIECE)
            for context in powers_of_two(min(longest, model.heads // tensor)):
                fits = job.n_gpus % (tensor * stages * context) == 0
                divides = model.kv_heads % tensor == 0 and model.heads % (tensor * context) == 0
                if fits and divides and model.sequence % (tensor * context) == 0:
                    yield tensor, context, stages


def shardings(job, tensor, context, stages):
    """The layouts of the remaining GPUs: DDP, ZeRO-1, FSDP, or FSDP in each machine (HSDP)."""
    data = job.n_gpus // (tensor * context * stages)
    split = dataclasses.replace(job.framework, tensor=tensor, context=context, stages=stages)
    yield dataclasses.replace(split, replicate=data, shard_context=False)
    if data > 1 and tensor * context * stages == 1:
        yield dataclasses.replace(split, replicate=data, zero=True)
    if data * context > 1:
        yield dataclasses.replace(split, shard=data)
    in_machine = job.cluster.gpus_per_node // tensor
    if stages * context == 1 and 1 < in_machine < data and data % in_machine == 0:
        yield dataclasses.replace(split, replicate=data // in_machine, shard=in_machine)


def meshes(job):
    """The mesh that is given, or all."""
    if job.mesh:
        sizes = dict(job.mesh)
        yield dataclasses.replace(job.framework, shard_context=sizes.get("shard", 1) > 1, **sizes)
        return
    if job.framework.lora:  # llm_FSDP.py
        yield dataclasses.replace(job.framework, shard=job.n_gpus)
        return
    for tensor, context, stages in splits(job):
        yield from shardings(job, tensor, context, stages)


def layouts(job):
    """Every layout of the global batch. A pipeline has at least as many micro-batches as stages."""
    for mesh in meshes(job):
        if job.batch % mesh.data:
            continue
        sequences = job.batch // mesh.data
        micros = [job.micro] if job.micro else powers_of_two(sequences)
        for micro in micros:
            count = sequences // micro
            if sequences % micro or count < mesh.stages:
                continue
            chunk_counts = [mesh.chunks]
            if not job.mesh and 1 < mesh.stages <= job.model.layers // 2 and count % mesh.stages == 0:
                chunk_counts = [1, 2]  # 2 are interleaved
            for chunks in chunk_counts:
                for recompute in job.recompute:
                    yield dataclasses.replace(mesh, micro=micro, count=count, chunks=chunks, recompute=recompute)


def axes(layout):
    """The kind of a mesh, as a set of names."""
    names = {name for name in ("tensor", "context", "stages") if getattr(layout, name) > 1}
    if layout.replicate > 1:
        names.add("replicate")
    if layout.zero:
        names.add("zero")
    if layout.shards > 1 and layout.shard_context:
        names.add("shard")
    return frozenset(names)


def complexity(layout):
    """How much there is to understand and to go wrong: a weight for each axis, then for recomputing and chunks.

    A mesh that no script here has is more work than another axis.
    """
    weights = {"replicate": 1, "zero": 1, "shard": 2, "tensor": 4, "context": 4, "stages": 6}
    total = sum(weights[name] for name in axes(layout))
    name, _ = script(layout)
    if name is None:
        total += 5
    return total, layout.chunks, RECOMPUTE.index(layout.recompute)


@dataclass(frozen=True)
class Result:
    layout: Layout
    speed: float  # tokens per second and GPU
    memory: dict
    seconds: dict


def evaluate(job, layout):
    parts = seconds(job.model, layout, job.cluster)
    speed = job.batch * job.model.sequence / job.n_gpus / sum(parts.values())
    return Result(layout, speed, memory(job.model, layout), parts)


def search(job, kinds=None):
    """(results that fit, the result that needs least memory). `kinds` limits the search to some `axes`."""
    fitting = []
    smallest = None
    for layout in layouts(job):
        if kinds and axes(layout) not in kinds:
            continue
        needed = sum(memory(job.model, layout).values())
        if needed <= SHARE_OF_MEMORY * job.cluster.memory:
            fitting.append(evaluate(job, layout))
        if smallest is None or needed < sum(smallest.memory.values()):
            smallest = evaluate(job, layout)
    return fitting, smallest


def fastest(results):
    return max(results, key=lambda result: result.speed)


def simplest(results):
    """The simplest of those within 5 % of the fastest. Of equally simple ones, the fastest."""
    best = fastest(results).speed
    close = [result for result in results if result.speed >= WITHIN * best]
    return min(close, key=lambda result: (complexity(result.layout), -result.speed))


def runner_up(results, others):
    """The fastest result of a kind of mesh that none of `others` has, or None."""
    kinds = {axes(result.layout) for result in others}
    rest = [result for result in results if axes(result.layout) not in kinds]
    if not rest:
        return None
    return fastest(rest)


def what_would_change_it(job, winner, other):
    """The first of some changes with which `other`'s kind of mesh would be faster than `winner`'s, or None."""
    kinds = (axes(winner.layout), axes(other.layout))
    for name, changed in changes(job):
        results, _ = search(changed, kinds)
        if results and axes(fastest(results).layout) == kinds[1]:
            return name
    return None


def changes(job):
    """(what changes, the job then), the smaller changes first."""
    for factor in (2, 4, 8, 16):
        cluster = dataclasses.replace(job.cluster, between=job.cluster.between / factor)
        yield f"links between machines {factor} times slower", dataclasses.replace(job, cluster=cluster)
        cluster = dataclasses.replace(job.cluster, between=job.cluster.between * factor)
        yield f"links between machines {factor} times faster", dataclasses.replace(job, cluster=cluster)
        cluster = dataclasses.replace(job.cluster, memory=job.cluster.memory / factor)
        yield f"1/{factor} of the memory", dataclasses.replace(job, cluster=cluster)
        cluster = dataclasses.replace(job.cluster, memory=job.cluster.memory * factor)
        yield f"{factor} times the memory", dataclasses.replace(job, cluster=cluster)
        if job.batch % factor == 0:
            yield f"1/{factor} of the global batch", dataclasses.replace(job, batch=job.batch // factor)
        yield f"{factor} times the global batch", dataclasses.replace(job, batch=job.batch * factor)


# ---- what would make it fit ---------------------------------------------------------------------------------------


def ways_to_fit(job):
    """Changes with which a layout fits, as phrases. The scripts do what the first ones say."""
    ways = []
    if set(job.recompute) != set(RECOMPUTE) and fits(dataclasses.replace(job, recompute=RECOMPUTE)):
        ways.append("with --recompute auto")
    more = None if job.mesh else with_more_gpus(job)
    if more:
        ways.append(more)
    sequence = job.model.sequence // 2
    while sequence >= 512:
        model = dataclasses.replace(job.model, sequence=sequence)
        if fits(dataclasses.replace(job, model=model, batch=job.batch * (job.model.sequence // sequence))):
            ways.append(f"with shorter sequences: --sequence {sequence}")
            break
        sequence //= 2
    for name, adam_bytes in (("8-bit Adam", 2), ("Adam's state offloaded to the CPU, which is slower", 0)):
        framework = dataclasses.replace(job.framework, adam_bytes=adam_bytes)
        if fits(dataclasses.replace(job, framework=framework)):
            ways.append(f"with {name}, which no script here has")
    return ways


def with_more_gpus(job):
    """The first multiple of the GPUs on which it fits, and how, or None."""
    for factor in (2, 4, 8, 16, 32, 64):
        more = dataclasses.replace(job, n_gpus=factor * job.n_gpus, batch=factor * job.batch)
        results, _ = search(more)
        if results:
            return f"on {more.n_gpus} {job.cluster.device}s: {describe(simplest(results).layout)}"
    return None


def fits(job):
    results, _ = search(job)
    return bool(results)


def can_be_shared(job):
    """Whether there is a layout, which may be too large."""
    return next(layouts(job), None) is not None


def why_no_layout(job):
    """Two sentences: why the GPUs cannot share the batch, and the next larger batch or fewer GPUs that can."""
    device = job.cluster.device
    why = f"tensor x context splits a sequence by at most the {job.model.heads} heads"
    if job.mesh:
        why = "replicate x shard of this mesh must divide them"
    ways = []
    for batch in range(job.batch + 1, 2 * job.n_gpus + job.batch):
        if can_be_shared(dataclasses.replace(job, batch=batch)):
            ways.append(f"--global-batch-size {batch}")
            break
    fewer = job.n_gpus // 2
    while fewer and not job.mesh:
        if can_be_shared(dataclasses.replace(job, n_gpus=fewer)):
            ways.append(counted(fewer, device))
            break
        fewer //= 2
    sequences = counted(job.batch, "sequence")
    cannot = f"{sequences} cannot be shared by {job.n_gpus} {device}s: {why}, and stages need as many micro-batches."
    return cannot, f"Take {' or '.join(ways) or 'another mesh'}."


# ---- the command --------------------------------------------------------------------------------------------------


def mesh_name(layout):
    """For example FSDP 8 x TP 4."""
    names = []
    if layout.replicate > 1 and layout.zero:
        names.append(f"ZeRO-1 {layout.replicate}")
    elif layout.replicate > 1:
        names.append(f"DDP {layout.replicate}")
    if layout.shard > 1 and layout.shard_context:
        names.append(f"FSDP {layout.shard}")
    elif layout.shards > 1 and layout.shard_context:
        names.append("FSDP over CP's GPUs")
    if layout.tensor > 1:
        names.append(f"TP {layout.tensor}")
    if layout.context > 1:
        names.append(f"CP {layout.context}")
    if layout.stages > 1 and layout.chunks > 1:
        names.append(f"PP {layout.stages}, interleaved")
    elif layout.stages > 1:
        names.append(f"PP {layout.stages}")
    if not names:
        return "one GPU"
    return " x ".join(names)


def script(layout, model_name=None):
    """(the script that has this mesh, its options for it), or (None, advice)."""
    kinds = axes(layout)
    replicate, shard, tensor = layout.replicate, layout.shard, layout.tensor
    schedule = "Interleaved1F1B" if layout.chunks > 1 else "1F1B"
    if is_for_llm(layout, model_name):
        return "llm_FSDP.py", llm_options(layout)
    if "context" in kinds:
        if kinds == {"context"} and not layout.shard_context:
            return "min_CP.py", []
        return None, "no script here has this mesh: attention as in min_CP.py, the rest as in the script for the others"
    if kinds == {"zero", "replicate"}:
        return "min_ZeRO.py", []
    if kinds == {"tensor"}:
        return "min_TP.py", []
    if kinds in ({"stages"}, {"stages", "replicate"}):
        micro_batches = ["--micro-batches", layout.count, "--data-parallel", replicate]
        return "min_PP.py", [*micro_batches, "--schedule", schedule]
    if "stages" in kinds:
        if "replicate" in kinds:
            return None, "no script here has this mesh: min_3D.py shards instead of replicating"
        mesh = ["--stages", layout.stages, "--shard", shard, "--tensor", tensor]
        return "min_3D.py", [*mesh, "--micro-batches", layout.count, "--schedule", schedule]
    if kinds == {"shard"} and layout.recompute == "none":
        return "min_FSDP.py", []
    mesh = ["--replicate", replicate, "--shard", shard, "--tensor", tensor]
    if layout.recompute == "full":
        mesh.append("--checkpoint-activations")
    return "min_2D.py", mesh


def is_for_llm(layout, model_name):
    """Whether llm_FSDP.py trains it: a model of the Hub, sharded by FSDP."""
    if layout.lora:
        return True
    return model_name in HUB and axes(layout) == {"shard"} and layout.recompute != "selective"


def llm_options(layout):
    options = ["--lora", layout.lora] if layout.lora else []
    if layout.recompute == "full":
        options.append("--recompute")
    if layout.fused:
        options.append("--compile")
    if layout.precision == "float32":
        options += ["--precision", "float32"]
    return options


def has_bf16(name, layout):
    """Whether the script has --bf16. The scripts with FSDP refuse it for one process."""
    return name not in ("llm_FSDP.py", "min_PP.py", "min_TP.py") and layout.n_gpus > 1


def command(job, layout):
    """The command that starts the model, or gpt.py's model of its shape, on this mesh, or None.

    On several machines: on each one.
    """
    name, options = script(layout, job.name)
    if name is None:
        return None
    model = job.model
    n_machines = math.ceil(job.n_gpus / job.cluster.gpus_per_node)
    if name == "llm_FSDP.py":
        shape = ["--model", HUB.get(job.name, "NAME"), "--data", "DATA.jsonl"]
    else:
        shape = ["--layers", model.layers, "--width", model.width, "--heads", model.heads]
        if layout.precision != "float32" and has_bf16(name, layout):
            options = ["--bf16", *options]
    words = [name, *options, *shape, "--length", model.sequence, "--global-batch-size", job.batch]
    if n_machines == 1:
        start = ["python", name, "--nproc", job.n_gpus]
    else:
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29400"]
        start = ["torchrun", "--nnodes", n_machines, "--nproc-per-node", job.cluster.gpus_per_node, *rendezvous, name]
    return " ".join(str(word) for word in start + words[1:])


def how_to_start(job, layout):
    """The command, or advice if no script here has this mesh."""
    line = command(job, layout)
    if line is None:
        _, line = script(layout, job.name)
    return line


def missing(job, layout):
    """What the plan assumes and the script does not do, as phrases."""
    name, _ = script(layout, job.name)
    found = []
    if layout.precision == "bfloat16" and name != "llm_FSDP.py" and not has_bf16(name, layout):
        found.append("bfloat16")
    if layout.precision == "float8":
        found.append("float8")
    if layout.fused and name != "llm_FSDP.py":
        found.append("torch.compile")
    if layout.chunked_loss:
        found.append("a chunked cross-entropy")
    elif layout.fused_loss:
        found.append("a fused cross-entropy")
    if layout.attention != "flash2":
        found.append(f"{layout.attention} attention")
    if name == "llm_FSDP.py":
        if layout.micro > 1:
            found.append(f"micro-batches of {layout.micro} sequences")
        return found
    if layout.recompute == "selective" or (layout.recompute == "full" and name != "min_2D.py"):
        found.append(f"{layout.recompute} recomputation")
    if layout.count > 1 and layout.stages == 1:
        found.append(f"gradient accumulation over {layout.count} micro-batches")
    if job.model.matrices == 3:
        found.append("gated MLPs")
    if job.model.kv_heads < job.model.heads:
        found.append("grouped KV heads")
    if job.model.vocabulary != 256:
        found.append(f"a vocabulary of {job.model.vocabulary:,}")
    if job.model.sequence > 2**16:
        found.append("sequences of more than 65,536 bytes")
    return found


# ---- printing -----------------------------------------------------------------------------------------------------


def bar(value, whole, width=40):
    return "#" * round(width * value / whole)


def counted(number, name):
    """For example 1 sequence, or 2 sequences."""
    if number == 1:
        return f"1 {name}"
    return f"{number} {name}s"


def describe(layout):
    batches = "1 micro-batch" if layout.count == 1 else f"{layout.count} micro-batches"
    return f"{mesh_name(layout)}, recompute {layout.recompute}, {batches} of {counted(layout.micro, 'sequence')}"


def utilisation(job, result):
    """(MFU, HFU): useful operations, and those with everything that is recomputed, as shares of the GPU's speed."""
    useful = result.speed * model_flops(job.model) / job.cluster.flops
    again = recomputed_share(job.model, result.layout)
    return useful, useful * (1 + again / 3)


def print_plan(job, results, smallest):
    model = job.model
    lora = f", LoRA of rank {job.framework.lora}" if job.framework.lora else ""
    print(
        f"PROJECTION    {job.name or 'your model'} of {total_params(model) / 1e9:.2f} billion parameters on "
        f"{job.n_gpus} x {job.cluster.name}, {counted(job.batch, 'sequence')} of {model.sequence:,} tokens, "
        f"{job.framework.precision}{lora}"
    )
    if results:
        print_result(job, simplest(results))
        print_alternatives(job, results)
    elif smallest is None:
        why, advice = why_no_layout(job)
        print(f"no layout     {why}\n              {advice}")
    else:
        print_no_fit(job, smallest)


def print_result(job, result):
    layout = result.layout
    lacking = missing(job, layout)
    print(f"{'your mesh  ' if job.mesh else 'recommended'}   {describe(layout)}")
    print(f"start         {how_to_start(job, layout)}")
    if not is_for_llm(layout, job.name):
        print("              It trains gpt.py's model in this shape.")
    if lacking:
        print(f"              The projection also assumes what the script lacks: {', '.join(lacking)}.")
    used = sum(result.memory.values())
    print(f"\nmemory of a {job.cluster.device}, GiB  {used / GIB:.1f} of {job.cluster.memory / GIB:.1f}")
    for part, n_bytes in result.memory.items():
        if n_bytes > 0:
            print(f"  {part:19} {n_bytes / GIB:6.1f}  {bar(n_bytes, job.cluster.memory)}")
    reserve = (1 - SHARE_OF_MEMORY) * job.cluster.memory
    print(f"  {'reserve':19} {reserve / GIB:6.1f}  {bar(reserve, job.cluster.memory)}")
    print(f"  A logit counts {bytes_per_logit(layout)} bytes. With --cross-entropy fused it counts 4, with chunked 0.")
    total = sum(result.seconds.values())
    print(f"\nseconds of a step     {total:.3f}")
    for part, time in result.seconds.items():
        if time > 0:
            print(f"  {part:19} {time:6.3f}  {bar(time, total)}")
    mfu, hfu = utilisation(job, result)
    low, high = expected_range(job.model, layout, job.cluster)
    print(f"\ntokens/s per {job.cluster.device}      {result.speed:,.0f}, MFU {mfu:.0%}, HFU {hfu:.0%}")
    known = "8 of 10 published runs were within such a range, see docs/plan.md"
    if layout.lora or not job.cluster.has_rows:
        known = f"a wide range, since docs/plan.md has no run {'with LoRA' if layout.lora else 'of such a GPU'}"
    print(f"expect                {low:,.0f} to {high:,.0f}: {known}")


def print_alternatives(job, results):
    winner, best = simplest(results), fastest(results)
    if best.layout != winner.layout:
        print(f"\nfastest       {describe(best.layout)}: {compared(best, winner)}")
        print(f"start         {how_to_start(job, best.layout)}")
    other = runner_up(results, (winner, best))
    if other is not None:
        print(f"\nrunner-up     {describe(other.layout)}: {compared(other, winner)}")
        change = what_would_change_it(job, winner, other)
        if change and other.speed < winner.speed:
            print(f"              It would be faster with {change}.")


def compared(result, winner):
    ratio = result.speed / winner.speed
    if ratio >= 1:
        return f"{ratio - 1:.1%} faster"
    return f"{1 - ratio:.1%} slower"


def print_no_fit(job, smallest):
    """By how much it does not fit, and the changes that would make it fit."""
    limit = SHARE_OF_MEMORY * job.cluster.memory
    needed = sum(smallest.memory.values())
    print(f"does not fit  the smallest layout needs {needed / GIB:.1f} GiB, {(needed - limit) / GIB:.1f} GiB too much")
    print(f"              {describe(smallest.layout)}")
    ways = ways_to_fit(job)
    for way in ways:
        print(f"would fit     {way}")
    if not ways:
        print(
            "              It does not fit on 64 times as many GPUs either, nor with shorter sequences or 8-bit Adam."
        )


def as_json(job, results, smallest):
    """For programs: the same numbers in bytes and seconds."""
    report = {"projection": True, "fits": bool(results), "gpus": job.n_gpus, "global batch": job.batch}
    if not results and smallest is None:
        why, advice = why_no_layout(job)
        return {**report, "why": why, "advice": advice}
    if not results:
        return {**report, "smallest": result_as_json(job, smallest), "would fit": ways_to_fit(job)}
    winner, best = simplest(results), fastest(results)
    other = runner_up(results, (winner, best))
    report["recommended"] = result_as_json(job, winner)
    report["fastest"] = result_as_json(job, best)
    if other:
        report["runner-up"] = result_as_json(job, other)
    return report


def result_as_json(job, result):
    mfu, hfu = utilisation(job, result)
    return {
        "mesh": mesh_name(result.layout),
        "layout": dataclasses.asdict(result.layout),
        "command": command(job, result.layout),
        "not in the script": missing(job, result.layout),
        "memory": result.memory,
        "seconds": result.seconds,
        "tokens/s per GPU": result.speed,
        "expect": expected_range(job.model, result.layout, job.cluster),
        "MFU": mfu,
        "HFU": hfu,
    }


# ---- options ------------------------------------------------------------------------------------------------------


class ArgumentParser(argparse.ArgumentParser):
    """Errors are one line. options.py has more, but needs torch."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def whole_number(text):
    """An argparse `type`: a whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def make_parser():
    parser = ArgumentParser(
        prog="plan.py",
        description=__doc__.partition("\n")[0],
        epilog=NOT_PLANNED,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    models = ", ".join(MODELS)
    parser.add_argument("--model", choices=MODELS, metavar="NAME", help=f"one of {models}")
    for name, text in (
        ("layers", "blocks of attention and MLP"),
        ("width", "features per token"),
        ("heads", "attention heads per block"),
        ("kv-heads", "heads of keys and values (default: as many as heads)"),
        ("hidden", "features inside an MLP (default: 4 x width)"),
        ("vocabulary", "number of different tokens (default: 50257)"),
        ("sequence", "tokens per sequence (default: the model's, or 8192)"),
        ("global-batch-size", "sequences per step, over all GPUs (default: about 8192 tokens per GPU)"),
    ):
        parser.add_argument(f"--{name}", type=whole_number, default=argparse.SUPPRESS, help=text)
    parser.add_argument("--gated", action="store_true", help="MLPs have three matrices")
    parser.add_argument(
        "--gpus", type=whole_number, help="number of GPUs (default: those of --mesh or --cluster, or 8)"
    )
    gpu_help = f'one of {", ".join(GPUS)}, or "memory=GB flops=TFLOP/s", with bandwidth=GB/s of the memory if known'
    parser.add_argument("--gpu", default="h100", help=gpu_help)
    parser.add_argument("--gpus-per-node", type=whole_number, help="GPUs of a machine (default: 8)")
    parser.add_argument("--links", metavar='"inside=GB/s between=GB/s"', help="sent by one GPU, within and beyond it")
    parser.add_argument("--cluster", metavar="FILE", help="what benchmarks/check_cluster.py has measured, for --gpu")
    parser.add_argument(
        "--mesh", metavar='"shard=32 tensor=2"', help=f"a mesh to project, of {', '.join(MESH)} (default: try all)"
    )
    parser.add_argument("--micro-batch-size", type=whole_number, help="sequences of a micro-batch (default: try all)")
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16", "float8"), default="bfloat16", help="of matrices"
    )
    parser.add_argument(
        "--recompute", choices=("auto", *RECOMPUTE), default="auto", help="what backward computes again"
    )
    parser.add_argument(
        "--cross-entropy",
        choices=("plain", "fused", "chunked"),
        default="plain",
        help="memory of a logit: 12 bytes, as torch's and the scripts', 4, or none",
    )
    known = [name for name in KERNELS if name != "unknown"]
    parser.add_argument("--attention", choices=known, default="flash2", help="kernel; torch's own is flash2")
    parser.add_argument("--compile", action="store_true", help="count the fused kernels of torch.compile")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--lora", type=whole_number, metavar="RANK", help="adapters beside a frozen model, llm_FSDP.py")
    parser.add_argument("--experts", nargs="?", const=True, help=argparse.SUPPRESS)
    return parser


def parse_args(argv=None):
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.experts:
        parser.error(f"argument --experts: {NOT_PLANNED}")
    model = parse_model(parser, args)
    mesh = parse_mesh(parser, args)
    if args.lora and mesh.keys() - {"shard"}:
        parser.error("argument --lora: llm_FSDP.py trains adapters with FSDP alone, so --mesh may name shard alone")
    cluster, measured = parse_cluster(parser, args)
    mesh_gpus = math.prod(mesh.get(name, 1) for name in MESH) if mesh else None
    n_gpus = args.gpus or mesh_gpus or measured or 8
    if mesh and mesh_gpus != n_gpus:
        parser.error(f"argument --mesh: {args.mesh!r} has {mesh_gpus} GPUs, --gpus has {n_gpus}")
    if n_gpus > cluster.gpus_per_node and n_gpus % cluster.gpus_per_node:
        parser.error(f"argument --gpus: {n_gpus} is not a multiple of {cluster.gpus_per_node}, the GPUs of a machine")
    check_links(parser, args, n_gpus, cluster)
    check_mesh(parser, args, mesh, model)
    batch = getattr(args, "global_batch_size", None)
    if batch is None:
        batch = default_batch(n_gpus, model.sequence, mesh, args.micro_batch_size or 1)
    framework = dataclasses.replace(
        SCRIPTS,
        precision=args.precision,
        attention=args.attention,
        fused=args.compile,
        fused_loss=args.cross_entropy == "fused",
        chunked_loss=args.cross_entropy == "chunked",
        lora=args.lora or 0,
    )
    recompute = RECOMPUTE if args.recompute == "auto" else (args.recompute,)
    mesh = tuple(mesh.items())
    job = Job(model, cluster, n_gpus, batch, args.model, recompute, framework, mesh, args.micro_batch_size)
    return args, job


def default_batch(n_gpus, sequence, mesh, micro):
    """Sequences of about 8,192 tokens per GPU: as many for each GPU, or one for each power of two of GPUs.

    A mesh that is given has as many for each of its groups, and in a pipeline one micro-batch for each stage at least.
    """
    if mesh:
        groups = mesh.get("replicate", 1) * mesh.get("shard", 1)
        least = micro * mesh.get("stages", 1)
        return groups * max(least, micro * (8192 * n_gpus // (groups * sequence * micro)))
    if sequence <= 8192:
        return n_gpus * max(micro, 8192 // sequence // micro * micro)
    sharing = 2 ** round(math.log2(sequence / 8192))
    return max(1, n_gpus // sharing) * micro


def parse_model(parser, args):
    """--model, changed by the options of its shape, or a shape from these options alone."""
    names = {field.name for field in dataclasses.fields(Model)}
    given = {name: value for name, value in vars(args).items() if name in names}
    if args.gated:
        given["matrices"] = 3
    if args.model is None:
        for name in ("layers", "width", "heads"):
            if name not in given:
                parser.error(f"argument --{name}: needed if there is no --model")
        defaults = {"kv_heads": given["heads"], "hidden": 4 * given["width"], "matrices": 2, "vocabulary": 50257}
        defaults.update(given)
        model = Model(**defaults)
    else:
        model = dataclasses.replace(MODELS[args.model], **given)
    for name, value, divisor, why in (
        ("width", model.width, model.heads, "the number of heads"),
        ("heads", model.heads, model.kv_heads, "the number of KV heads"),
    ):
        if value % divisor:
            parser.error(f"argument --{name}: {value} is not a multiple of {divisor}, {why}")
    return model


def parse_mesh(parser, args):
    """{axis: size} of --mesh, and maybe zero=1 or chunks=N."""
    if args.mesh is None:
        return {}
    numbers = parse_numbers(parser, "--mesh", args.mesh, (*MESH, "chunks", "zero"), "empty")
    for name, size in numbers.items():
        if size != int(size):
            parser.error(f"argument --mesh: {name}={size} is not a whole number")
    sizes = {name: int(size) for name, size in numbers.items()}
    if "zero" in sizes:
        sizes["zero"] = True
    return sizes


def check_mesh(parser, args, mesh, model):
    """The limits of each axis."""
    tensor, context, stages = (mesh.get(name, 1) for name in ("tensor", "context", "stages"))
    if model.kv_heads % tensor:
        parser.error(f"argument --mesh: tensor={tensor} does not divide the {model.kv_heads} KV heads")
    if model.heads % (tensor * context):
        parser.error(f"argument --mesh: tensor x context is {tensor * context}, it does not divide {model.heads} heads")
    if stages * mesh.get("chunks", 1) > model.layers:
        parser.error(f"argument --mesh: stages={stages} with its chunks is more than the {model.layers} layers")


def check_links(parser, args, n_gpus, cluster):
    """A GPU that is given by numbers has the links that are given, too."""
    if args.cluster or args.gpu in GPUS or n_gpus == 1:
        return
    words = args.links or ""
    needed = ["inside"]
    if n_gpus > cluster.gpus_per_node:
        needed.append("between")
    for name in needed:
        if f"{name}=" not in words:
            parser.error(
                f"argument --links: {name}=GB/s is needed beside a --gpu of numbers: inside is 450 with an H100's "
                "NVLink and 25 with PCIe 4, between is 50 with 400 Gb/s per GPU"
            )


def parse_cluster(parser, args):
    """(the cluster, the number of GPUs that were measured or None)."""
    measured = None
    if args.cluster:
        try:
            with open(args.cluster) as file:
                found = json.load(file)
            measured = found.pop("gpus")
            cluster = Cluster(**found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            parser.error(f"argument --cluster: {args.cluster} is not a file of benchmarks/check_cluster.py: {error}")
    elif args.gpu in GPUS:
        cluster = GPUS[args.gpu]
    else:
        cluster = cluster_of_numbers(parser, args.gpu)
    if args.gpus_per_node:
        cluster = dataclasses.replace(cluster, gpus_per_node=args.gpus_per_node)
    if args.links:
        links = parse_numbers(parser, "--links", args.links, ("inside", "between"), "numbers")
        cluster = dataclasses.replace(cluster, **{name: value * 1e9 for name, value in links.items()})
    return cluster, measured


def cluster_of_numbers(parser, text):
    """A GPU like "memory=48 flops=362". Its memory's bandwidth is in proportion to an H100's, if it is not given."""
    names = ("memory", "flops", "bandwidth")
    numbers = parse_numbers(parser, "--gpu", text, names, f"one of {', '.join(GPUS)}")
    if not {"memory", "flops"} <= numbers.keys():
        parser.error(f"argument --gpu: {text!r} must name memory and flops")
    h100 = GPUS["h100"]
    flops = numbers["flops"] * 1e12
    bandwidth = h100.bandwidth * flops / h100.flops
    if "bandwidth" in numbers:
        bandwidth = numbers["bandwidth"] * 1e9
    return Cluster("your GPU", numbers["memory"] * 1e9, flops, bandwidth, h100.inside, h100.between, has_rows=False)


def parse_numbers(parser, option, text, names, alternative):
    """{name: number} of a text like "memory=80 flops=989"."""
    numbers = {}
    for word in text.split():
        name, _, value = word.partition("=")
        try:
            numbers[name] = float(value)
        except ValueError:
            numbers[name] = math.nan
        if name not in names or not 0 < numbers[name] < math.inf:
            forms = " ".join(f"{name}=NUMBER" for name in names)
            parser.error(f"argument {option}: {text!r} is neither {alternative} nor like {forms!r}")
    return numbers


def main(argv=None):
    args, job = parse_args(argv)
    results, smallest = search(job)
    if args.json:
        print(json.dumps(as_json(job, results, smallest), indent=1))
    else:
        print_plan(job, results, smallest)
    if not results:
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # as in `python plan.py | head`: https://docs.python.org/3/library/signal.html
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
