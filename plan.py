"""Plan a training run: which of these scripts, on which mesh, for your model on your GPUs. It projects, from formulas.

    time of a step  =  compute + bubble + communication that is not overlapped with compute + optimizer

It needs no GPU and no torch. It tries all splits by powers of two that fit into memory, and recommends the fastest: its
command, the memory of a GPU by part, and the seconds of a step by part. It also prints the simplest mesh within 5 % of
that, and the runner-up. docs/plan.md compares the same formulas with published measurements, so you can see how far to
trust them.

    replicate   every GPU holds the model, gradients are averaged        (DDP, min_2D.py; ZeRO-1, min_ZeRO.py)
    shard       parameters are gathered when a block computes            (FSDP, min_FSDP.py)
    both        each machine holds one copy, sharded over its GPUs       (HSDP, min_2D.py)
    tensor      the work of each layer is split, inside a machine        (TP, min_TP.py)
    context     each sequence is split                                   (CP, min_CP.py)
    stages      the layers are split, micro-batches follow each other    (PP, min_PP.py)

Use it before you write or rent anything. When you have the machines, `python -m benchmarks.check_cluster` measures them
and --cluster takes its file. Mixture-of-experts models, ring attention and CPU offloading are not in it.

    python plan.py --model llama3-8b --gpus 64
    python plan.py --model llama3-70b --gpus 256 --gpu h200 --global-batch-size 512
    python plan.py --layers 24 --width 2048 --heads 16 --gpus 8 --gpu "memory=48 flops=362 bandwidth=864"
    python plan.py --model llama3-405b --gpus 512 --json

The first prints `recommended   FSDP 64, recompute none, 1 micro-batch of 1 sequence`.
"""

import argparse
import dataclasses
import json
import math
import sys
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Cluster:
    """Speeds of one GPU and of its links, in bytes and operations per second. Latencies are in seconds."""

    name: str
    memory: float
    flops: float  # of dense matrices in bfloat16
    bandwidth: float  # of its memory
    inside: float  # sent by one GPU to others in its machine
    between: float  # sent by one GPU to other machines
    gpus_per_node: int = 8
    efficiency: float = 0.77  # the median of the H100 sources of docs/plan.md, see `compute_seconds`
    latency_inside: float = 1e-6
    latency_between: float = 3e-6
    overlaps: bool = True  # links work while the GPU computes
    float32: float = 0.5  # speed of float32 matrices (TF32) in relation to bfloat16
    reachable: float = 794.5 / 989  # of `flops`, by large matrices: github.com/stas00/ml-engineering, accelerator
    reachable_link: float = 0.8  # of `inside` and `between`, by large messages: usual in nccl-tests
    # These two, like latency_between, were fitted by hand to the measurements in docs/plan.md.
    few_tokens: int = 300  # a micro-batch with this many tokens runs at half of the speed
    narrow: int = 250  # so do matrices, if their width / tensor is this
    reduce_scatter: float = 1.0  # its time in relation to an all-gather's: gloo's is an all-reduce
    device: str = "GPU"


GPUS = {  # https://www.nvidia.com/en-us/data-center/ (H100, H200, A100, B200): dense, one direction of NVLink
    "a100": Cluster("a100", 80e9, 312e12, 2.04e12, 300e9, 25e9, efficiency=0.99),  # of the A100 sources
    "h100": Cluster("h100", 80e9, 989.5e12, 3.35e12, 450e9, 50e9),
    "h200": Cluster("h200", 141e9, 989.5e12, 4.8e12, 450e9, 50e9),
    # No published run of a B200 is in docs/plan.md: its efficiency is an H100's.
    "b200": Cluster("b200", 180e9, 2250e12, 8e12, 900e9, 50e9),
}
# The rest is for CUDA, NCCL and fragments: 8 of 10 peaks in docs/plan.md are at most 1/0.9 of the projected ones.
SHARE_OF_MEMORY = 0.9
TRUTH = (0.82, 1.13)  # measured / projected speed in docs/plan.md, from the 10th to the 90th percentile of its rows


@dataclass(frozen=True)
class Layout:
    """How the work is split. The GPUs are replicate x shard x context x tensor x stages."""

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
    # What the scripts here do. Published measurements come from frameworks that do otherwise.
    fused: bool = True  # element-wise operations are fused, as by torch.compile
    fused_loss: bool = False  # the loss works on the logits in place
    async_tensor: bool = False  # tensor parallelism communicates while it computes
    regather: bool = False  # backward gathers the inputs of tensor parallelism's matrices again
    balanced: bool = True  # every rank of `context` has the same share of attention
    shard_context: bool = True  # FSDP shards over the ranks of `context` too; in min_CP.py they hold replicas
    keep_gathered: bool = False  # shards are gathered once per micro-batch
    overlap_gather: bool = False  # ZeRO gathers parameters while the next forward computes
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


# ---- memory: the parts ----------------------------------------------------------------------------------------------


def state_bytes(model, layout):
    """{part: bytes} of parameters, gradients and Adam's state: 16 per parameter in float32, as docs/costs.md has it.

    In bfloat16 FSDP shards the same 16 bytes, and gathers copies. A replicated model also holds 2 bytes per parameter
    for copies, and 2 for gradients, which are summed in float32. ZeRO shards the float32 parameters too: 8 bytes on
    each GPU, 12 shared by all. (arXiv:1910.02054 sums gradients in 2 bytes.)
    """
    params = local_params(model, layout) / layout.shards
    held = {"parameters": 4 * params, "gradients": 4 * params, "Adam's state": 8 * params}
    low_precision = layout.precision != "float32"
    if layout.zero:
        held["Adam's state"] /= layout.copies
        if low_precision:
            held["parameters"] /= layout.copies
    if low_precision and layout.shards == 1:
        held["parameters"] += 2 * params
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
    buffers = 8 if size == 4 else 4
    per_param = 3 * size + buffers
    block = per_param * block_params(model)
    ends = size * embedding_params(model) + (size + 4) * model.vocabulary * model.width
    return (block + ends) / layout.tensor


def activation_bytes(model, layout):
    """Bytes per token that a block keeps for backward, before tensor parallelism splits them.

    none: the inputs of both norms and of all matrices, q, k, v, and the output of attention: 32·width for GPT's shape.
    (arXiv:2205.05198 has 34 with the masks of dropout.) Kernels that are not fused keep about 1.4 times as much.
    selective: the block's input and the outputs of q, v, attention, gate and down. full: the block's input.
    """
    if layout.recompute == "full":
        numbers = model.width
    elif layout.recompute == "selective":
        numbers = 4 * model.width + model.kv_width + model.hidden
    else:
        numbers = 6 * model.width + 2 * model.kv_width + model.matrices * model.hidden
        if not layout.fused:
            numbers *= 1.4
    return layout.number_bytes * numbers


def tokens_of_micro_batch(model, layout):
    """Tokens of one micro-batch, for all GPUs of `tensor` together."""
    return layout.micro * model.sequence / layout.context


def micro_batches_in_flight(layout):
    """Micro-batches whose activations the first stage keeps: as many as there are stages in 1F1B.

    Interleaved, a GPU holds the activations of (chunks - 1)/chunks · (stages - 1) micro-batches more.
    (arXiv:2104.04473)
    """
    if layout.stages == 1:
        return 1
    more = (layout.stages - 1) * (layout.chunks - 1) / layout.chunks
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


def logits_bytes(model, layout):
    """The logits when backward begins: 12 bytes for the softmax, its gradient and the loss's, in float32.

    If the loss is fused they take 4. Tensor parallelism splits them by the vocabulary, and gathers the head's input,
    and its gradient. In a pipeline only the last stage has logits. It keeps the activations of one micro-batch, so its
    logits count as far as they exceed the others that the first stage keeps.
    """
    tokens = tokens_of_micro_batch(model, layout)
    logits = (4 if layout.fused_loss else 12) * model.vocabulary * tokens / layout.tensor
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


# ---- time: the parts ------------------------------------------------------------------------------------------------

FLOAT8 = 1.6  # speed of blocks in float8, with all casts
ATTENTION = 0.5  # speed of attention's products, in parts of the GPU's speed (FlashAttention-2 on H100)
FORWARD = 0.25  # forward's share of a step: less than its third of the operations, since its kernels are faster
PASSES = 6  # how often memory moves each kept activation: 1 write and 2 reads, and as many of its gradient
HIDDEN_COST = 0.3  # each second of overlapped communication adds this many seconds of compute
ASYNC_HIDES = 0.6  # of tensor parallelism's communication, where a framework overlaps it with matrices


def matrix_rate(model, layout, cluster):
    """Operations per second of a block's matrices. It falls with few tokens, and with narrow slices of the layers."""
    tokens = tokens_of_micro_batch(model, layout)
    width = model.width / layout.tensor
    speed = {"bfloat16": 1.0, "float8": FLOAT8, "float32": cluster.float32}[layout.precision]
    fullness = tokens / (tokens + cluster.few_tokens) * width / (width + cluster.narrow)
    return cluster.flops * cluster.reachable * speed * fullness


def block_seconds(model, layout, cluster):
    """Forward and backward of one block and one micro-batch: matrices, attention, and memory traffic of the rest."""
    tokens = tokens_of_micro_batch(model, layout) / layout.tensor
    again = recomputed_share(model, layout)
    slowdown = 1 + again * FORWARD
    matrices = 6 * block_params(model) * tokens * slowdown / matrix_rate(model, layout, cluster)

    # Causal: 2·width·length operations per token forward, two and a half times as many backward.
    passes = 4.5 if layout.recompute == "full" else 3.5
    imbalance = 1 if layout.balanced else 2 - 1 / layout.context  # the last of equal pieces attends to all others
    speed = cluster.float32 if layout.precision == "float32" else 1.0
    attention = 2 * model.width * model.sequence * tokens * passes * imbalance / (ATTENTION * cluster.flops * speed)

    whole = dataclasses.replace(layout, recompute="none")
    traffic = PASSES * activation_bytes(model, whole) * tokens * slowdown / cluster.bandwidth
    return matrices + attention + traffic


def head_seconds(model, layout, cluster):
    """Forward and backward of the head and of the loss, for one micro-batch: 6 operations, and two passes of logits."""
    tokens = tokens_of_micro_batch(model, layout) / layout.tensor
    if layout.precision == "float8":  # the head computes in bfloat16
        layout = dataclasses.replace(layout, precision="bfloat16")
    product = 6 * model.vocabulary * model.width * tokens / matrix_rate(model, layout, cluster)
    return product + 24 * model.vocabulary * tokens / cluster.bandwidth


def compute_seconds(model, layout, cluster):
    """Seconds of one micro-batch in the slowest stage. Stages are as even as whole blocks allow.

    `cluster.efficiency` divides it all: kernels, power limits and frameworks differ. It is the only number that differs
    between the sources of docs/plan.md. There it is fitted to one row of each.
    """
    block = block_seconds(model, layout, cluster)
    even = (model.layers * block + head_seconds(model, layout, cluster)) / layout.stages
    slowest = math.ceil(model.layers / layout.stages) * block
    return max(even, slowest) / cluster.efficiency


def transfer_seconds(size, stride, n_bytes, messages, cluster):
    """(seconds of the bytes, seconds of latency) that each of `size` GPUs needs to send `n_bytes` in a ring.

    Neighbours are `stride` GPUs apart. Inside a machine a GPU sends over NVLink. Beyond it, all members of the group in
    one machine share its network ports: a ring for each of them. Each message passes `size` - 1 hops, and stragglers
    make it wait; this is never hidden.
    """
    if size == 1:
        return 0.0, 0.0
    if size * stride <= cluster.gpus_per_node:
        return n_bytes / (cluster.inside * cluster.reachable_link), messages * (size - 1) * cluster.latency_inside
    members = max(1, cluster.gpus_per_node // stride)
    bandwidth = min(cluster.inside, members * cluster.between) * cluster.reachable_link
    return n_bytes / bandwidth, messages * (size - 1) * cluster.latency_between


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

    (S-1)/S of the parameters each: see min_FSDP.py. In float8 parameters are gathered in one byte.
    """
    params = (layout.shards - 1) / layout.shards * local_params(model, layout)
    gathered = 1 if layout.precision == "float8" else layout.number_bytes
    return gathered * params, layout.reduce_bytes * params


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

    ZeRO gathers parameters after the optimizer's step, when nothing computes, unless the framework overlaps it.
    """
    stride = layout.tensor * layout.shards
    messages = model.layers / layout.stages
    reduced, gathered = replicate_bytes(model, layout)
    if layout.zero:  # DDP's reduction is half of an all-reduce
        reduced *= cluster.reduce_scatter
    reducing, latency = transfer_seconds(layout.copies, stride, reduced, messages, cluster)
    gathering, _ = transfer_seconds(layout.copies, stride, gathered, messages, cluster)
    if not layout.zero:
        return exposed(reducing + gathering, window * 2 / 3, cluster) + 2 * latency
    if layout.overlap_gather:
        gathering = exposed(gathering, window / 3, cluster)
    return exposed(reducing, window * 2 / 3, cluster) + gathering + 2 * latency


def optimizer_seconds(model, layout, cluster):
    """Adam reads parameter, gradient and two moments, and writes three: 28 bytes per parameter."""
    params = local_params(model, layout) / layout.shards
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


# ---- all layouts, and the one to recommend ------------------------------------------------------------------------

RECOMPUTE = ("none", "selective", "full")
SHORTEST_PIECE = 8192  # tokens of a sequence per rank of `context`: Llama 3 has 8,192, torchtitan's runs 32,768
WITHIN = 0.95  # of the fastest: a simpler mesh may be worth so much of the speed


@dataclass(frozen=True)
class Job:
    """What the layouts have in common."""

    model: Model
    cluster: Cluster
    n_gpus: int
    batch: int  # sequences of a step, over all GPUs
    precision: str = "bfloat16"
    recompute: tuple = RECOMPUTE


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
    split = Layout(tensor=tensor, context=context, stages=stages, precision=job.precision)
    yield dataclasses.replace(split, replicate=data, shard_context=False)
    if data > 1 and tensor * context * stages == 1:
        yield dataclasses.replace(split, replicate=data, zero=True)
    if data * context > 1:
        yield dataclasses.replace(split, shard=data)
    in_machine = job.cluster.gpus_per_node // tensor
    if stages * context == 1 and 1 < in_machine < data and data % in_machine == 0:
        yield dataclasses.replace(split, replicate=data // in_machine, shard=in_machine)


def layouts(job):
    """Every layout of the global batch. A pipeline has at least as many micro-batches as stages."""
    for tensor, context, stages in splits(job):
        data = job.n_gpus // (tensor * context * stages)
        if job.batch % data:
            continue
        sequences = job.batch // data
        for micro in powers_of_two(sequences):
            count = sequences // micro
            if sequences % micro or count < stages:
                continue
            chunk_counts = [1]
            if 1 < stages <= job.model.layers // 2 and count % stages == 0:
                chunk_counts.append(2)  # interleaved
            for layout in shardings(job, tensor, context, stages):
                for chunks in chunk_counts:
                    for recompute in job.recompute:
                        yield dataclasses.replace(layout, micro=micro, count=count, chunks=chunks, recompute=recompute)


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
    """How much there is to understand and to go wrong: a weight for each axis, then for recomputing and chunks."""
    weights = {"replicate": 1, "zero": 1, "shard": 2, "tensor": 4, "context": 4, "stages": 6}
    total = sum(weights[name] for name in axes(layout))
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


def runner_up(results, winner):
    """The fastest of another kind of mesh, or None."""
    others = [result for result in results if axes(result.layout) != axes(winner.layout)]
    if not others:
        return None
    return fastest(others)


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


def script(layout):
    """(the script that has this mesh, its options), or (None, advice)."""
    kinds = axes(layout)
    replicate, shard, tensor = layout.replicate, layout.shard, layout.tensor
    schedule = "Interleaved1F1B" if layout.chunks > 1 else "1F1B"
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
        if layout.precision == "float32":
            return "min_FSDP.py", []
        return "min_FSDP.py", ["--mixed-precision"]
    mesh = ["--replicate", replicate, "--shard", shard, "--tensor", tensor]
    if layout.recompute == "full":
        mesh.append("--checkpoint-activations")
    return "min_2D.py", mesh


def command(job, layout):
    """The command that starts gpt.py's model of this shape on this mesh, or None. On several machines: on each one."""
    name, mesh = script(layout)
    if name is None:
        return None
    model = job.model
    n_machines = math.ceil(job.n_gpus / job.cluster.gpus_per_node)
    shape = ["--layers", model.layers, "--width", model.width, "--heads", model.heads, "--length", model.sequence]
    words = [name, *mesh, *shape, "--global-batch-size", job.batch]
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
        _, line = script(layout)
    return line


def missing(job, layout):
    """What the plan assumes and the script does not do, as phrases."""
    name, _ = script(layout)
    found = []
    if layout.precision == "bfloat16" and name != "min_FSDP.py":
        found.append("bfloat16")
    if layout.precision == "float8":
        found.append("float8")
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

GIB = 2**30


def bar(value, whole, width=40):
    return "#" * round(width * value / whole)


def describe(layout):
    batches = "1 micro-batch" if layout.count == 1 else f"{layout.count} micro-batches"
    sequences = "1 sequence" if layout.micro == 1 else f"{layout.micro} sequences"
    return f"{mesh_name(layout)}, recompute {layout.recompute}, {batches} of {sequences}"


def utilisation(job, result):
    """(MFU, HFU): useful operations, and those with everything that is recomputed, as shares of the GPU's speed."""
    useful = result.speed * model_flops(job.model) / job.cluster.flops
    again = recomputed_share(job.model, result.layout)
    return useful, useful * (1 + again / 3)


def print_plan(job, name, results, smallest):
    model = job.model
    print(
        f"PROJECTION    {name} of {total_params(model) / 1e9:.2f} billion parameters on "
        f"{job.n_gpus} x {job.cluster.name}, {job.batch} sequences of {model.sequence:,} tokens, {job.precision}"
    )
    if results:
        winner = fastest(results)
        print_result(job, winner)
        print_alternatives(job, winner, results)
    else:
        print_no_fit(job, smallest)


def print_result(job, result):
    lacking = missing(job, result.layout)
    print(f"recommended   {describe(result.layout)}")
    print(f"start         {how_to_start(job, result.layout)}")
    if lacking:
        print(
            "              It trains gpt.py's model in this shape. The projection also assumes what the script lacks:"
        )
        print(f"              {', '.join(lacking)}.")
    used = sum(result.memory.values())
    print(f"\nmemory of a {job.cluster.device}, GiB  {used / GIB:.1f} of {job.cluster.memory / GIB:.1f}")
    for part, n_bytes in result.memory.items():
        if n_bytes > 0:
            print(f"  {part:19} {n_bytes / GIB:6.1f}  {bar(n_bytes, job.cluster.memory)}")
    reserve = (1 - SHARE_OF_MEMORY) * job.cluster.memory
    print(f"  {'reserve':19} {reserve / GIB:6.1f}  {bar(reserve, job.cluster.memory)}")
    total = sum(result.seconds.values())
    print(f"\nseconds of a step     {total:.3f}")
    for part, time in result.seconds.items():
        if time > 0:
            print(f"  {part:19} {time:6.3f}  {bar(time, total)}")
    mfu, hfu = utilisation(job, result)
    low, high = (result.speed * factor for factor in TRUTH)
    print(f"\ntokens/s per {job.cluster.device}      {result.speed:,.0f}, MFU {mfu:.0%}, HFU {hfu:.0%}")
    known = "8 of 10 published runs were within such a range, see docs/plan.md"
    print(f"expect                {low:,.0f} to {high:,.0f}: {known}")


def print_alternatives(job, winner, results):
    simple = simplest(results)
    if complexity(simple.layout) == complexity(winner.layout):
        print("\nsimplest      the recommended mesh is the simplest of those within 5% of it")
    else:
        print(f"\nsimplest      {describe(simple.layout)}: {slower(simple, winner)}")
        print(f"start         {how_to_start(job, simple.layout)}")
    other = runner_up(results, winner)
    if other is not None:
        print(f"\nrunner-up     {describe(other.layout)}: {slower(other, winner)}")
        change = what_would_change_it(job, winner, other)
        if change:
            print(f"              It would be recommended with {change}.")


def slower(result, winner):
    return f"{1 - result.speed / winner.speed:.1%} slower"


def print_no_fit(job, smallest):
    """By how much it does not fit, and the first change that would make it fit."""
    limit = SHARE_OF_MEMORY * job.cluster.memory
    if smallest is None:
        print(f"no layout     {job.batch} sequences cannot be shared by {job.n_gpus} {job.cluster.device}s")
    else:
        needed = sum(smallest.memory.values())
        print(
            f"does not fit  the smallest layout needs {needed / GIB:.1f} GiB, {(needed - limit) / GIB:.1f} GiB too much"
        )
        print(f"              {describe(smallest.layout)}")
    change = what_makes_it_fit(job, smallest)
    if change:
        print(f"would fit     {change}")
    elif smallest is None:
        print(f"              choose a multiple of {job.n_gpus} for --global-batch-size")
    else:
        print("              It does not fit on 64 times as many GPUs either.")


def what_makes_it_fit(job, smallest):
    """The first change that would make it fit, a phrase, or None. Without a `smallest` the batch cannot be shared."""
    if smallest is None:
        batch = math.ceil(job.batch / job.n_gpus) * job.n_gpus
        results, _ = search(dataclasses.replace(job, batch=batch))
        if results:
            return f"with --global-batch-size {batch}"
        return None
    if set(job.recompute) != set(RECOMPUTE):
        results, _ = search(dataclasses.replace(job, recompute=RECOMPUTE))
        if results:
            return "with --recompute auto"
    for factor in (2, 4, 8, 16, 32, 64):
        more = dataclasses.replace(job, n_gpus=factor * job.n_gpus, batch=factor * job.batch)
        results, _ = search(more)
        if results:
            return f"on {more.n_gpus} {job.cluster.device}s: {describe(fastest(results).layout)}"
    return None


def as_json(job, results, smallest):
    """For programs: the same numbers in bytes and seconds."""
    report = {"projection": True, "fits": bool(results), "gpus": job.n_gpus, "global batch": job.batch}
    if not results:
        if smallest:
            report["smallest"] = result_as_json(job, smallest)
        report["would fit"] = what_makes_it_fit(job, smallest)
        return report
    winner = fastest(results)
    other = runner_up(results, winner)
    report["recommended"] = result_as_json(job, winner)
    report["measured / projected"] = TRUTH
    report["simplest within 5 %"] = result_as_json(job, simplest(results))
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


def parse_args(argv=None):
    parser = ArgumentParser(
        prog="plan.py", description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
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
        ("global-batch-size", "sequences per step, over all GPUs (default: 8192 tokens per GPU)"),
    ):
        parser.add_argument(f"--{name}", type=whole_number, default=argparse.SUPPRESS, help=text)
    parser.add_argument("--gated", action="store_true", help="MLPs have three matrices")
    parser.add_argument("--gpus", type=whole_number, help="number of GPUs (default: all that --cluster measured, or 8)")
    gpu_help = f'one of {", ".join(GPUS)}, or "memory=GB flops=TFLOP/s", with bandwidth=GB/s of the memory if known'
    parser.add_argument("--gpu", default="h100", help=gpu_help)
    parser.add_argument("--gpus-per-node", type=whole_number, help="GPUs of a machine (default: 8)")
    parser.add_argument("--links", metavar='"inside=GB/s between=GB/s"', help="sent by one GPU, within and beyond it")
    parser.add_argument("--cluster", metavar="FILE", help="what benchmarks/check_cluster.py has measured, for --gpu")
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16", "float8"), default="bfloat16", help="of matrices"
    )
    parser.add_argument(
        "--recompute", choices=("auto", *RECOMPUTE), default="auto", help="what backward computes again"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    args = parser.parse_args(argv)
    model = parse_model(parser, args)
    cluster, measured = parse_cluster(parser, args)
    n_gpus = args.gpus or measured or 8
    if n_gpus > cluster.gpus_per_node and n_gpus % cluster.gpus_per_node:
        parser.error(f"argument --gpus: {n_gpus} is not a multiple of {cluster.gpus_per_node}, the GPUs of a machine")
    batch = getattr(args, "global_batch_size", max(1, 8192 * n_gpus // model.sequence))
    recompute = RECOMPUTE if args.recompute == "auto" else (args.recompute,)
    return args, Job(model, cluster, n_gpus, batch, args.precision, recompute)


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
        numbers = parse_numbers(
            parser, "--gpu", args.gpu, ("memory", "flops", "bandwidth"), f"one of {', '.join(GPUS)}"
        )
        if not {"memory", "flops"} <= numbers.keys():
            parser.error(f"argument --gpu: {args.gpu!r} must name memory and flops")
        h100 = GPUS["h100"]
        flops = numbers["flops"] * 1e12
        bandwidth = h100.bandwidth * flops / h100.flops
        if "bandwidth" in numbers:
            bandwidth = numbers["bandwidth"] * 1e9
        cluster = dataclasses.replace(
            h100, name="your GPU", memory=numbers["memory"] * 1e9, flops=flops, bandwidth=bandwidth
        )
    if args.gpus_per_node:
        cluster = dataclasses.replace(cluster, gpus_per_node=args.gpus_per_node)
    if args.links:
        links = parse_numbers(parser, "--links", args.links, ("inside", "between"), "numbers")
        cluster = dataclasses.replace(cluster, **{name: value * 1e9 for name, value in links.items()})
    return cluster, measured


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
        print_plan(job, args.model or "your model", results, smallest)
    if not results:
        sys.exit(1)


if __name__ == "__main__":
    main()
