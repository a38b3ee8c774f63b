"""Plan a training run: which of these scripts, on which mesh, for your model on your GPUs. It projects, from formulas.

    time of a step  =  compute + bubble + communication that is not overlapped with compute + optimizer

Communication that is overlapped slows the compute, and counts by 15 %. It needs no GPU and no torch. It tries all
splits of the model by powers of two that fit into memory. It recommends the simplest mesh within 5 % of the fastest:
its command, the memory of a GPU by part, and the seconds of a step by part. It names the fastest and the runner-up too.
docs/plan.md holds the same formulas against published measurements, publishers that were not fitted among them, so you
can see how far to trust them.

    replicate   every GPU holds the model, gradients are averaged        (DDP, min_FSDP_TP.py; ZeRO-1, min_ZeRO.py)
    shard       parameters are gathered when a block computes            (FSDP, min_FSDP.py)
    these two   each machine holds one copy, sharded over its GPUs       (HSDP, min_FSDP_TP.py)
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

Begin at the two sums, `memory` and `seconds`. The formula of each part follows, then the search, then the options.
"""

import argparse
import itertools
import json
import math
import os
import sys
from dataclasses import asdict, dataclass, fields, replace

# ---- the two sums ---------------------------------------------------------------------------------------------------


def memory(model, layout):
    """{part: bytes} of the GPU that holds most, at the peak."""
    return {
        **state_bytes(model, layout),
        "gathered": gathered_bytes(model, layout),
        "activations": kept_bytes(model, layout),
        "logits and a block": logits_bytes(model, layout) + working_bytes(model, layout),
    }


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


def tokens_per_second(model, layout, parts):
    """Tokens per second per GPU, of a step whose seconds are `parts`."""
    sequences = layout.replicate * layout.shard * layout.micro * layout.count
    return sequences * model.sequence / layout.n_gpus / sum(parts.values())


# ---- what they take: a model, a layout, a cluster -------------------------------------------------------------------


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
    hub: str | None = None  # its name on the Hugging Face Hub, for llm_FSDP.py

    @property
    def kv_width(self):
        return self.width * self.kv_heads // self.heads


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
    chunks: int = 1  # stages that each GPU has: 2 with the schedule Interleaved1F1B
    recompute: str = "none"  # or "selective", every second large matrix, or "full", whole blocks
    precision: str = "bfloat16"  # or "float32"
    fused: bool = False  # element-wise operations are fused, by torch.compile
    logit_bytes: int = 12  # at the peak: float32 logits, their softmax and their gradient
    reduce_bytes: int = 4  # gradients travel in float32; in 2 bytes in some runs of docs/plan.md
    lora: int = 0  # rank of the adapters that are trained beside a frozen model in bfloat16
    shard_context: bool = True  # FSDP shards over the ranks of `context` too; in min_CP.py they hold replicas

    @property
    def n_gpus(self):
        return self.replicate * self.shard * self.context * self.tensor * self.stages

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


@dataclass(frozen=True)
class Cluster:
    """Speeds of one GPU and of its links, in bytes and operations per second. Latencies are in seconds."""

    name: str
    memory: float  # bytes that torch reports, which are less than the maker says
    flops: float  # of dense matrices in bfloat16, as its maker promises
    bandwidth: float  # of its memory
    inside: float  # sent by one GPU to others in its machine
    between: float  # sent by one GPU to other machines
    gpus_per_node: int = 8
    reachable: float = 0.8  # of `flops`, by large matrices alone
    flash: float = 0.33  # of `flops`, by FlashAttention-2, which torch's attention is on GPUs, forward and backward
    efficiency: float = 0.76  # speed of kernels in training / their speed alone: fitted to the rows of docs/plan.md
    has_rows: bool = True  # docs/plan.md has runs of this GPU, or it was measured
    # Of a hop in a ring over NVLink, and over the network, with NCCL's protocol for large messages:
    # hwLatencies in https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc, see `transfer_seconds`.
    latency_inside: float = 3.4e-6
    latency_between: float = 14e-6
    reachable_link: float = 0.8  # of `inside` and `between`, by large messages: usual in nccl-tests
    overlaps: bool = True  # links work while the GPU computes
    float32: float = 0.5  # speed of float32 matrices (TF32) in relation to bfloat16
    narrow: float | None = None  # matrices of this width run at half of their speed (None: not measured)


# ---- parameters and operations ------------------------------------------------------------------------------------


def block_params(model):
    """Parameters of one block: q and output, k and v, the MLP. Norms and biases are less than 0.1 %."""
    return model.width * (2 * model.width + 2 * model.kv_width + model.matrices * model.hidden)


def embedding_params(model):
    """Parameters of the embedding and the head."""
    return model.vocabulary * model.width * (1 if model.tied else 2)


def total_params(model):
    return model.layers * block_params(model) + embedding_params(model)


def local_params(model, layout):
    """Parameters that a GPU computes with: tensor and stages split them. Embedding and head are spread evenly."""
    return total_params(model) / layout.tensor / layout.stages


def adapter_params(model, layout):
    """Parameters of LoRA's two matrices beside each matrix of all blocks: rank·(inputs + outputs). arXiv:2106.09685"""
    attention = 2 * (model.width + model.width) + 2 * (model.width + model.kv_width)
    mlp = model.matrices * (model.width + model.hidden)
    return model.layers * layout.lora * (attention + mlp)


def trained_params(model, layout):
    """Parameters that have gradients on a GPU, before FSDP shards them."""
    return adapter_params(model, layout) if layout.lora else local_params(model, layout)


def tokens_of_micro_batch(model, layout):
    """Tokens of one micro-batch, for all GPUs of `tensor` together."""
    return layout.micro * model.sequence / layout.context


def model_flops(model, lora=0):
    """Operations per token, as MFU counts them: 6 per parameter of the matrices, 12·layers·width·length for attention.

    With `lora` it is 4 per parameter, since a frozen matrix needs no gradient. The embedding is no matrix product.
    Attention counts twice what a causal one needs. https://arxiv.org/abs/2204.02311
    """
    matrices = model.layers * block_params(model) + model.vocabulary * model.width
    per_parameter = 4 if lora else 6
    return per_parameter * matrices + 12 * model.layers * model.width * model.sequence


def recomputed_share(model, layout):
    """The share of a block's forward pass that backward computes again."""
    # Of the seven matrices q, k, v, out, gate, up and down, torchtitan multiplies by k, out and up again.
    selective = model.width * (model.kv_width + model.width + model.hidden) / block_params(model)
    return {"none": 0.0, "selective": selective, "full": 1.0}[layout.recompute]


# ---- memory: the parts ----------------------------------------------------------------------------------------------


def state_bytes(model, layout):
    """{part: bytes} of parameters, gradients and Adam's state: 16 per parameter in float32, as docs/costs.md has it.

    In bfloat16 FSDP shards the same 16 bytes, and gathers copies. A replicated model also holds 2 bytes per parameter
    for copies, and 2 for gradients, if these are summed in float32. ZeRO shards the float32 parameters too: 8 bytes on
    each GPU, 12 shared by all. (arXiv:1910.02054 sums gradients in 2 bytes.) With LoRA the model has 2 bytes, and only
    the adapters have 16.
    """
    params = trained_params(model, layout) / layout.shards
    sharers = layout.copies if layout.zero else 1
    held = {"parameters": 4 * params, "gradients": 4 * params, "Adam's state": 8 * params / sharers}
    if layout.lora:
        held["parameters"] += 2 * total_params(model) / layout.shards
    elif layout.precision == "bfloat16":
        held["parameters"] /= sharers
        if layout.shards == 1:
            held["parameters"] += 2 * params
            held["gradients"] = 6 * params if layout.reduce_bytes == 4 else 2 * params
    return held


def gathered_bytes(model, layout):
    """Parameters that FSDP has gathered, and their gradients, at the peak: see min_FSDP.py and docs/costs.md.

    While a block computes: the block, the next one, its gradients, and the buffers that are sent. In float32 that is 20
    bytes per parameter. The embedding and the head stay gathered from forward to backward. In a pipeline
    everything stays gathered for the step, and float32 gradients are summed unsharded: see min_PP_FSDP_TP.py.
    """
    if layout.shards == 1:
        return 0.0
    size = layout.number_bytes
    if layout.stages > 1:
        return (size + 4) * local_params(model, layout)
    if layout.lora:  # frozen: this block and the next one, and no gradients
        return 2 * size * block_params(model) + size * embedding_params(model)
    block = 5 * size * block_params(model)
    ends = size * embedding_params(model) + (size + 4) * model.vocabulary * model.width
    return (block + ends) / layout.tensor


UNFUSED = 1.4  # activations that kernels keep, and move, without torch.compile (torchtitan with and without)


def activation_bytes(model, layout, recompute):
    """Bytes per token that a block keeps for backward, before tensor parallelism splits them.

    none: the inputs of both norms and of all matrices, q, k, v, and the output of attention: 32·width for GPT's shape.
    (arXiv:2205.05198 has 34 with the masks of dropout.) Kernels that are not fused keep more.
    selective: the block's input and the outputs of q, v, attention, gate and down. full: the block's input.
    """
    every = 6 * model.width + 2 * model.kv_width + model.matrices * model.hidden
    unfused = 1 if layout.fused else UNFUSED
    selected = 4 * model.width + model.kv_width + model.hidden
    numbers = {"none": unfused * every, "selective": selected, "full": model.width}
    return layout.number_bytes * numbers[recompute]


def micro_batches_in_flight(layout):
    """Micro-batches whose activations the first stage keeps: as many as there are stages in 1F1B.

    Interleaved, it keeps the activations of (stages - 1)/chunks micro-batches more. (arXiv:2205.05198, section 4.2.3)
    """
    more = 0 if layout.chunks == 1 else (layout.stages - 1) / layout.chunks
    return min(layout.count, layout.stages + more)


def kept_bytes(model, layout):
    """Activations of all blocks of a stage, for all micro-batches in flight.

    Tensor parallelism splits them, except the gathered inputs of attention and of the MLP: see min_TP.py.
    """
    tokens = tokens_of_micro_batch(model, layout)
    block = activation_bytes(model, layout, layout.recompute) * tokens / layout.tensor
    if layout.recompute == "none":
        block += 2 * (1 - 1 / layout.tensor) * layout.number_bytes * model.width * tokens
    return block * math.ceil(model.layers / layout.stages) * micro_batches_in_flight(layout)


def whole_input_bytes(model, layout):
    """With tensor parallelism, the gathered input of a matrix and its gradient: both are as wide as without it."""
    return 2 * layout.number_bytes * model.width * tokens_of_micro_batch(model, layout) if layout.tensor > 1 else 0.0


def logits_bytes(model, layout):
    """The logits when backward begins. Tensor parallelism splits them, and gathers the head's input and its gradient.

    In a pipeline only the last stage has logits. It keeps the activations of one micro-batch, so its logits count as
    far as they exceed the others that the first stage keeps.
    """
    logits = layout.logit_bytes * model.vocabulary * tokens_of_micro_batch(model, layout) / layout.tensor
    others = kept_bytes(model, layout) * (1 - 1 / micro_batches_in_flight(layout))
    return max(0.0, logits + whole_input_bytes(model, layout) - others)


def working_bytes(model, layout):
    """A block's gradients in backward, and its activations if they are recomputed.

    The gradients count half of the activations. torch keeps the memory of the logits, so both count.
    """
    tokens = tokens_of_micro_batch(model, layout)
    share = 0.5 if layout.recompute == "none" else 1.5
    block = share * activation_bytes(model, layout, "none") * tokens / layout.tensor
    return block + whole_input_bytes(model, layout)


# ---- time: computing ----------------------------------------------------------------------------------------------

FORWARD = 0.17  # the share of a block's time that recomputing all of it adds, fitted. Of the operations it is a third.
SHORT = 300  # tokens of a sequence with which attention reaches half of its speed: arXiv:2407.08608, causal
NARROW_HEADS = 0.9  # speed of attention with 64 features per head in relation to 128: the same figures
PASSES = 4  # kernels besides matrix products write and read each kept activation once, and its gradient too


def matrix_rate(model, layout, cluster):
    """Operations per second of a block's matrices. It falls with few tokens, and with narrow slices of the layers.

    A product of M x K by K x N in bfloat16 has 2·M·K·N operations and moves 2·(K·N + M·K + M·N) bytes. As in the
    roofline model (https://doi.org/10.1145/1498765.1498785), moving them takes ridge/M + ridge/K + ridge/N times as
    long as computing, where the ridge is operations per byte of memory. M are the tokens. Of K and N the narrower
    counts, which is width / tensor. The two times add up.
    """
    reachable = cluster.flops * cluster.reachable
    ridge = reachable / cluster.bandwidth
    narrow = ridge if cluster.narrow is None else cluster.narrow
    moving = ridge / tokens_of_micro_batch(model, layout) + narrow * layout.tensor / model.width
    speed = cluster.float32 if layout.precision == "float32" else 1.0
    return reachable * speed / (1 + moving)


def attention_rate(model, layout, cluster):
    """Operations per second of causal attention. It is not the matrices' rate: kernels and GPUs differ."""
    speed = cluster.float32 if layout.precision == "float32" else 1.0
    fullness = model.sequence / (model.sequence + SHORT)
    if model.width // model.heads <= 64:
        fullness *= NARROW_HEADS
    return cluster.flops * cluster.flash * speed * fullness


def block_seconds(model, layout, cluster):
    """Forward and backward of one block and one micro-batch: matrices, attention, and memory traffic of the rest."""
    tokens = tokens_of_micro_batch(model, layout) / layout.tensor
    slowdown = 1 + recomputed_share(model, layout) * FORWARD
    operations = 6 * slowdown - (2 if layout.lora else 0)  # a frozen matrix needs no gradient
    matrices = operations * block_params(model) * tokens / matrix_rate(model, layout, cluster)

    # Causal: 2·width·length operations per token forward, two and a half times as many backward. (arXiv:2307.08691)
    passes = 4.5 if layout.recompute == "full" else 3.5
    attention = passes * 2 * model.width * model.sequence * tokens / attention_rate(model, layout, cluster)

    traffic = PASSES * activation_bytes(model, layout, "none") * tokens * slowdown / cluster.bandwidth
    return matrices + attention + traffic


def head_seconds(model, layout, cluster):
    """Forward and backward of the head and of the loss, for one micro-batch: matrices, and two passes of logits."""
    tokens = tokens_of_micro_batch(model, layout) / layout.tensor
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


def optimizer_seconds(model, layout, cluster):
    """Adam reads parameter, gradient and two moments, and writes three: 28 bytes per parameter."""
    owners = layout.shards * layout.copies if layout.zero else layout.shards
    return 28 * trained_params(model, layout) / owners / cluster.bandwidth


# ---- time: communication ------------------------------------------------------------------------------------------

HIDDEN_COST = 0.15  # each second of hidden communication adds this to compute: NCCL takes 16 to 24 of 132 cores
TENSORS = 9  # messages of a block, one per parameter tensor: q, k, v, output, gate, up, down, two norms


def transfer_seconds(size, stride, n_bytes, messages, cluster, window=0.0, tree=False):
    """Seconds that are added if each of `size` GPUs sends `n_bytes` in a ring, beside `window` seconds of computing.

    Neighbours are `stride` GPUs apart. Inside a machine a GPU sends over NVLink. Beyond it, all members of the group in
    one machine share its network ports: a ring for each of them. Each message passes `size` - 1 hops, one of them over
    the network for each machine but one. In a `tree` it passes as many machines as their number has doublings. Latency
    is never hidden, unlike the bytes: see `exposed`. The hops are NCCL's own model, `latencies` in src/graph/tuning.cc.
    """
    members = min(size, max(1, cluster.gpus_per_node // stride))  # in one machine
    machines = math.ceil(size / members)
    bandwidth = cluster.inside if machines == 1 else min(cluster.inside, members * cluster.between)
    hops_inside, hops_between = size - machines, machines - 1
    if tree:
        hops_inside, hops_between = members - 1, math.log2(machines)
    latency = hops_inside * cluster.latency_inside + hops_between * cluster.latency_between
    return exposed(n_bytes / (bandwidth * cluster.reachable_link), window, cluster) + messages * latency


def exposed(seconds, window, cluster):
    """Seconds by which communication of `seconds` prolongs the computing of `window` seconds that hides it."""
    hidden = min(seconds, window) if cluster.overlaps else 0.0
    return seconds - hidden + HIDDEN_COST * hidden


def tensor_messages(model, layout):
    """All-gathers and reduce-scatters of one micro-batch, each of a whole activation: see min_TP.py and docs/costs.md.

    A block has four pairs of them, embedding and head two. Recomputing a block adds 3. min_TP.py gathers the logits
    besides. Here each rank keeps its part of the vocabulary.
    """
    per_block = 11 if layout.recompute == "full" else 8
    return (per_block * model.layers + 4) / layout.stages


def tensor_bytes(model, layout):
    """Sent by a GPU for one micro-batch: (T-1)/T of an activation for each message."""
    activation = layout.number_bytes * tokens_of_micro_batch(model, layout) * model.width
    return (layout.tensor - 1) / layout.tensor * activation * tensor_messages(model, layout)


def tensor_seconds(model, layout, cluster):
    """Seconds of one micro-batch. All of them are exposed in min_TP.py."""
    return transfer_seconds(layout.tensor, 1, tensor_bytes(model, layout), tensor_messages(model, layout), cluster)


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
    return transfer_seconds(layout.context, layout.tensor, n_bytes, messages, cluster)


def stage_bytes(model, layout):
    """Sent by a GPU to the next stage and back, for one micro-batch: its activations and their gradients."""
    tokens = tokens_of_micro_batch(model, layout) / layout.tensor
    return 2 * layout.number_bytes * tokens * model.width * layout.chunks


def stage_seconds(model, layout, window, cluster):
    """What sending activations between stages adds to a micro-batch. It is hidden behind the next micro-batch."""
    if layout.stages == 1:
        return 0.0
    stride = 1 if layout.n_gpus <= cluster.gpus_per_node else cluster.gpus_per_node
    return transfer_seconds(2, stride, stage_bytes(model, layout), 2 * layout.chunks, cluster, window)


def shard_bytes(model, layout):
    """(gathered, reduced): sent by a GPU in one gathering of all its parameters, and in one reduction of gradients.

    (S-1)/S of the parameters each: see min_FSDP.py. With LoRA only the adapters have gradients.
    """
    split = (layout.shards - 1) / layout.shards
    gathered = split * layout.number_bytes * local_params(model, layout)
    return gathered, split * layout.reduce_bytes * trained_params(model, layout)


def shard_seconds(model, layout, window, cluster):
    """FSDP's communication in a step that `window` seconds of computing per micro-batch do not hide."""
    # A pipeline keeps all gathered, see gathered_bytes.
    gatherings, rounds = (1, 1) if layout.stages > 1 else (2, layout.count)
    gathered, reduced = shard_bytes(model, layout)
    messages = (gatherings + 1) * model.layers / layout.stages
    n_bytes = gatherings * gathered + reduced
    return rounds * transfer_seconds(layout.shards, layout.tensor, n_bytes, messages, cluster, window)


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
    tensor, and it gathers parameters after the optimizer's step, when nothing computes.
    """
    stride = layout.tensor * layout.shards
    messages = model.layers / layout.stages
    if layout.chunks > 1:
        window *= min(layout.stages, layout.count)
    reduced, gathered = replicate_bytes(model, layout)
    backward = window * 2 / 3
    if not layout.zero:
        return transfer_seconds(layout.copies, stride, reduced + gathered, 2 * messages, cluster, backward, tree=True)
    reducing = transfer_seconds(layout.copies, stride, reduced, TENSORS * messages, cluster, backward)
    return reducing + transfer_seconds(layout.copies, stride, gathered, TENSORS * messages, cluster)


# ---- how sure it is -----------------------------------------------------------------------------------------------

# 8 of 10 published runs of publishers that were not fitted were within these factors: see docs/plan.md.
SURE = 1.2  # up to 8,192 tokens and 128 GPUs
PER_DOUBLED_LENGTH = 1.05  # for each doubling beyond 8,192 tokens
PER_DOUBLED_GPUS = 1.08  # for each doubling beyond 128 GPUs
NO_ROWS = 1.7  # for a GPU without published runs there, and for LoRA


def doubt(model, layout, cluster):
    """The factor within which 8 of 10 measured speeds are expected."""
    longer = max(0.0, math.log2(model.sequence / 8192))
    larger = max(0.0, math.log2(layout.n_gpus / 128))
    known = cluster.has_rows and not layout.lora
    return SURE * PER_DOUBLED_LENGTH**longer * PER_DOUBLED_GPUS**larger * (1 if known else NO_ROWS)


# ---- all layouts, and the one to recommend ------------------------------------------------------------------------

RECOMPUTE = ("none", "selective", "full")
MESH = {"replicate": "DDP", "shard": "FSDP", "tensor": "TP", "context": "CP", "stages": "PP"}  # axes and their names
SHORTEST_PIECE = 8192  # tokens of a sequence per rank of `context`: Llama 3 has 8,192, torchtitan's runs 32,768
SHARE_OF_MEMORY = 0.95  # The rest is for CUDA, NCCL and fragments. Of the runs of docs/plan.md, 1 in 20 needs more.
WITHIN = 0.95  # of the fastest: a simpler mesh may be worth so much of the speed


@dataclass(frozen=True)
class Job:
    """What the layouts have in common."""

    model: Model
    cluster: Cluster
    n_gpus: int
    batch: int  # sequences of a step, over all GPUs
    name: str = "your model"
    recompute: tuple = RECOMPUTE
    base: Layout = Layout()
    mesh: dict | None = None  # {axis: size} that is given; otherwise all are tried
    micro: int | None = None  # sequences of a micro-batch, if they are given


def powers_of_two(largest):
    return [2**i for i in range(int(math.log2(largest)) + 1)]


def misfits(model, layout):
    """Why a model could not be split so, as phrases."""
    tensor, both, pieces = layout.tensor, layout.tensor * layout.context, layout.stages * layout.chunks
    rules = [
        (model.kv_heads % tensor == 0, f"tensor={tensor} does not divide the {model.kv_heads} KV heads"),
        # min_CP.py's all-to-all needs a head for each rank of `context`.
        (model.heads % both == 0, f"tensor x context is {both}, it does not divide {model.heads} heads"),
        (model.sequence % both == 0, f"tensor x context is {both}, it does not divide {model.sequence} tokens"),
        (pieces <= model.layers, f"stages={layout.stages} with its chunks is more than the {model.layers} layers"),
        (layout.chunks == 1 or layout.stages > 1, f"chunks={layout.chunks} needs stages"),
        (layout.chunks <= 2, f"chunks={layout.chunks} is more than the 2 of the scripts"),
        (layout.zero <= 1, f"zero={layout.zero}: there is only ZeRO-1"),
        (not layout.zero or layout.replicate > 1, "zero=1 needs replicate"),
    ]
    return [why for holds, why in rules if not holds]


def meshes(job):
    """The mesh that is given, or all that divide the GPUs and the model. Tensor parallelism stays inside a machine."""
    mesh = {"shard": job.n_gpus} if job.base.lora and not job.mesh else job.mesh  # llm_FSDP.py has one axis
    if mesh:
        names_shard = "shard" in mesh  # shard=1 too: with context=8, FSDP then shards over the 8 ranks of context
        yield replace(job.base, shard_context=names_shard, **mesh)
        return
    per_node = job.cluster.gpus_per_node
    tensors = [tensor for tensor in powers_of_two(per_node) if per_node % tensor == 0]
    contexts = powers_of_two(max(1, job.model.sequence // SHORTEST_PIECE))
    for tensor, context, stages, chunks in itertools.product(tensors, contexts, powers_of_two(job.n_gpus), (1, 2)):
        split = replace(job.base, tensor=tensor, context=context, stages=stages, chunks=chunks)
        if chunks <= stages and job.n_gpus % split.n_gpus == 0 and not misfits(job.model, split):
            yield from shardings(job, split)


def shardings(job, split):
    """The layouts of the GPUs that `split` leaves: DDP, ZeRO-1, FSDP, or FSDP in each machine (HSDP)."""
    data = job.n_gpus // split.n_gpus
    yield replace(split, replicate=data, shard_context=False)
    if data > 1 and split.n_gpus == 1:
        yield replace(split, replicate=data, zero=True)
    if data * split.context > 1:
        yield replace(split, shard=data)
    in_machine = job.cluster.gpus_per_node // split.tensor
    if split.stages * split.context == 1 and 1 < in_machine < data and data % in_machine == 0:
        yield replace(split, replicate=data // in_machine, shard=in_machine)


def layouts(job):
    """Every layout of the global batch. A pipeline has a micro-batch per stage or more, interleaved a multiple."""
    for mesh in meshes(job):
        groups = mesh.replicate * mesh.shard
        micros = [job.micro] if job.micro else powers_of_two(max(1, job.batch // groups))
        for micro, recompute in itertools.product(micros, job.recompute):
            count, rest = divmod(job.batch, groups * micro)
            whole = rest == 0 and (mesh.chunks == 1 or count % mesh.stages == 0)
            if whole and count >= mesh.stages:
                yield replace(mesh, micro=micro, count=count, recompute=recompute)


def axes(layout):
    """The kind of a mesh, as a set of names."""
    names = {name for name in MESH if getattr(layout, name) > 1}
    if layout.shards > 1:
        names.add("shard")
    if layout.zero:
        names.add("zero")
    return frozenset(names)


def complexity(layout):
    """How much there is to understand and to go wrong: a weight for each axis, then for recomputing and chunks.

    A mesh that no script here has is more work than another axis.
    """
    weights = {"replicate": 1, "zero": 1, "shard": 2, "tensor": 4, "context": 4, "stages": 6}
    total = sum(weights[name] for name in axes(layout))
    without_script = 5 if script(layout)[0] is None else 0
    return total + without_script, layout.chunks, RECOMPUTE.index(layout.recompute)


def needed_bytes(found):
    return sum(found["memory"].values())


def search(job):
    """(reports of the layouts that fit, the fastest first; the report of the one that needs least memory, or None)."""
    reports = [report(job, layout) for layout in layouts(job)]
    reports.sort(key=lambda found: -found["tokens/s per GPU"])
    fitting = [found for found in reports if needed_bytes(found) <= SHARE_OF_MEMORY * job.cluster.memory]
    return fitting, min(reports, key=needed_bytes, default=None)


def choice(results):
    """{"recommended", "fastest", "runner-up": report} of reports in the order of speed.

    Recommended is the simplest of those within 5 % of the fastest. Of equally simple ones, it is the fastest. The
    runner-up is the fastest of another kind of mesh than both.
    """
    fastest = results[0]
    close = [found for found in results if found["tokens/s per GPU"] >= WITHIN * fastest["tokens/s per GPU"]]
    chosen = {"recommended": min(close, key=lambda found: complexity(found["layout"])), "fastest": fastest}
    kinds = [axes(found["layout"]) for found in chosen.values()]
    others = [found for found in results if axes(found["layout"]) not in kinds]
    if others:
        chosen["runner-up"] = others[0]
    return chosen


# ---- what would make it fit ---------------------------------------------------------------------------------------


def ways_to_fit(job):
    """Changes with which a layout fits, as phrases: more GPUs, in whole machines, or shorter sequences."""
    for factor in powers_of_two(64)[1:]:
        more = replace(job, n_gpus=factor * job.n_gpus, batch=factor * job.batch)
        if more.n_gpus > job.cluster.gpus_per_node and more.n_gpus % job.cluster.gpus_per_node:
            continue
        if not job.mesh and search(more)[0]:  # a mesh that is given has its GPUs
            yield f"on {more.n_gpus} GPUs, with --global-batch-size {more.batch}"
            break
    for factor in powers_of_two(max(1, job.model.sequence // 512))[1:]:
        model = replace(job.model, sequence=job.model.sequence // factor)
        shorter = replace(job, model=model, batch=factor * job.batch)
        if search(shorter)[0]:
            yield f"with shorter sequences: --sequence {model.sequence} --global-batch-size {shorter.batch}"
            break


def why_no_layout(job):
    """Why the GPUs cannot share the batch, and the next larger batch that they can share."""
    split = f"tensor x context splits a sequence by at most the {job.model.heads} heads"
    rules = f"replicate x shard must divide them, {split}, and stages need as many micro-batches"
    larger = range(job.batch + 1, job.batch + 2 * job.n_gpus)
    batch = next((batch for batch in larger if any(layouts(replace(job, batch=batch)))), None)
    micro = f" in micro-batches of {job.micro}" if job.micro else ""
    why = f"{counted(job.batch, 'sequence')} cannot be shared by {job.n_gpus} GPUs{micro}: {rules}."
    return {"why": why, "advice": f"Take --global-batch-size {batch}." if batch else "Take another mesh."}


# ---- the command --------------------------------------------------------------------------------------------------


NO_SCRIPT = "no script here has this mesh: combine those that have its axes"


def script(layout, hub=None):
    """(the first script that has this mesh, its options), or (None, ""). `hub` is the model's name on the Hub."""
    kinds, replicas = axes(layout), layout.replicate
    full, bfloat16 = layout.recompute == "full", layout.precision == "bfloat16"
    # The scripts with FSDP refuse --bf16 for one process.
    bf16 = "--bf16" if bfloat16 and layout.n_gpus > 1 else ""
    again = "--checkpoint-activations" if full else ""
    mesh = f"--shard {layout.shard} --tensor {layout.tensor}"
    pipeline = f"--micro-batches {layout.count} --schedule {'Interleaved1F1B' if layout.chunks > 1 else '1F1B'}"
    llm = []
    if layout.lora:
        llm.append(f"--lora {layout.lora}")
    if full:
        llm.append("--recompute")
    if layout.fused:
        llm.append("--compile")
    if not bfloat16:
        llm.append("--precision float32")
    by_llm = layout.lora or (hub and kinds == {"shard"} and layout.recompute != "selective")
    scripts = [
        (by_llm, "llm_FSDP.py", " ".join(llm)),
        (kinds == {"replicate", "zero"}, "min_ZeRO.py", ""),
        (kinds == {"tensor"}, "min_TP.py", ""),
        (kinds == {"context"}, "min_CP.py", ""),
        (kinds == {"shard"} and layout.recompute == "none", "min_FSDP.py", bf16),
        (kinds <= {"replicate", "shard", "tensor"}, "min_FSDP_TP.py", f"{bf16} --replicate {replicas} {mesh} {again}"),
        (kinds <= {"stages", "replicate"}, "min_PP.py", f"--data-parallel {replicas} {pipeline}"),
        (
            kinds <= {"stages", "shard", "tensor"},
            "min_PP_FSDP_TP.py",
            f"{bf16} --stages {layout.stages} {mesh} {pipeline}",
        ),
    ]
    for has_mesh, name, options in scripts:
        if has_mesh:
            return name, options
    return None, ""


def command(job, layout):
    """The command that starts the model, or gpt.py's model of its shape, on this mesh, or None.

    On several machines: on each one.
    """
    model, per_node = job.model, job.cluster.gpus_per_node
    name, options = script(layout, model.hub)
    if name is None:
        return None
    start = f"python {name} --nproc {job.n_gpus}"
    if job.n_gpus > per_node:
        nodes = f"--nnodes {job.n_gpus // per_node} --nproc-per-node {per_node}"
        start = f"torchrun {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29400 {name}"
    shape = f"--layers {model.layers} --width {model.width} --heads {model.heads}"
    if name == "llm_FSDP.py":
        shape = f"--model {model.hub or 'NAME'} --data DATA.jsonl"
    words = f"{start} {options} {shape} --length {model.sequence} --global-batch-size {job.batch}".split()
    return " ".join(words)


def missing(job, layout):
    """What the plan assumes and the script does not do, as phrases."""
    name, options = script(layout, job.model.hub)
    by_llm = name == "llm_FSDP.py"
    lacks_bfloat16 = layout.precision == "bfloat16" and name and not by_llm and "--bf16" not in options
    recomputes = "--recompute" in options or "--checkpoint-activations" in options
    accumulates = layout.stages == 1 and layout.count > 1
    gaps = [
        (lacks_bfloat16, "bfloat16"),
        (layout.fused and not by_llm, "torch.compile"),
        (layout.logit_bytes == 0, "a chunked cross-entropy"),
        (layout.logit_bytes == 4, "a fused cross-entropy"),
        (layout.recompute != "none" and not recomputes, f"{layout.recompute} recomputation"),
        (by_llm and layout.micro > 1, f"micro-batches of {layout.micro} sequences"),
        (not by_llm and job.model.sequence > 65536, "sequences of more than 65,536 tokens"),
        (not by_llm and accumulates, f"gradient accumulation over {layout.count} micro-batches"),
    ]
    return [phrase for lacks, phrase in gaps if lacks]


# ---- printing -----------------------------------------------------------------------------------------------------


def mesh_name(layout):
    """For example FSDP 8 x TP 4."""
    labels = MESH | {"replicate": "ZeRO-1" if layout.zero else "DDP"}
    names = [f"{labels[axis]} {getattr(layout, axis)}" for axis in MESH if getattr(layout, axis) > 1]
    if layout.shard == 1 and layout.shards > 1:
        names.insert(0, "FSDP over CP's GPUs")
    interleaved = ", interleaved" if layout.chunks > 1 else ""
    return (" x ".join(names) or "one GPU") + interleaved


def counted(number, name, plural="s"):
    """For example 1 sequence, or 2 sequences."""
    return f"{number} {name}" if number == 1 else f"{number} {name}{plural}"


def describe(layout):
    batches = f"{counted(layout.count, 'micro-batch', 'es')} of {counted(layout.micro, 'sequence')}"
    return f"{mesh_name(layout)}, recompute {layout.recompute}, {batches}"


def report(job, layout):
    """What a layout needs and reaches, in bytes and seconds.

    MFU counts useful operations, as a share of the GPU's speed. HFU adds what is recomputed, as if the head were too.
    """
    times = seconds(job.model, layout, job.cluster)
    speed = tokens_per_second(job.model, layout, times)
    factor = doubt(job.model, layout, job.cluster)
    mfu = speed * model_flops(job.model, layout.lora) / job.cluster.flops
    return {
        "mesh": mesh_name(layout),
        "description": describe(layout),
        "layout": layout,
        "command": command(job, layout),
        "not in the script": missing(job, layout),
        "memory": memory(job.model, layout),
        "seconds": times,
        "tokens/s per GPU": speed,
        "expect": (speed / factor, speed * factor),
        "MFU": mfu,
        "HFU": mfu * (1 + recomputed_share(job.model, layout) / (2 if layout.lora else 3)),
    }


def answer(job):
    """All that is found, for programs. "projection" tells them that it is calculated, and not measured."""
    results, smallest = search(job)
    found = {"projection": True, "fits": bool(results), "gpus": job.n_gpus, "global batch": job.batch}
    if results:
        return found | choice(results)
    if smallest:
        return found | {"smallest": smallest, "would fit": list(ways_to_fit(job))}
    return found | why_no_layout(job)


def print_answer(job, found):
    size = f"{total_params(job.model) / 1e9:.2f} billion parameters"
    batch = f"{counted(job.batch, 'sequence')} of {job.model.sequence:,} tokens"
    lora = f", LoRA of rank {job.base.lora}" if job.base.lora else ""
    gpus = f"{job.n_gpus} x {job.cluster.name}"
    print(f"PROJECTION    {job.name} of {size} on {gpus}, {batch}, {job.base.precision}{lora}")
    if "recommended" in found:
        print_result(job, found["recommended"])
        print_alternatives(found)
    elif "smallest" in found:
        used = needed_bytes(found["smallest"])
        excess = (used - SHARE_OF_MEMORY * job.cluster.memory) / GIB
        print(f"does not fit  the smallest layout needs {used / GIB:.1f} GiB, {excess:.1f} GiB too much")
        print(f"              {found['smallest']['description']}")
        for way in found["would fit"]:
            print(f"would fit     {way}")
    else:
        print(f"no layout     {found['why']}\n              {found['advice']}")


def print_result(job, result):
    print(f"{'your mesh  ' if job.mesh else 'recommended'}   {result['description']}")
    print(f"start         {result['command'] or NO_SCRIPT}")
    if "min_" in (result["command"] or ""):
        print("              It trains gpt.py's model in this shape: of bytes, with plain MLPs and a KV head per head.")
    if result["command"] and result["not in the script"]:
        lacking = ", ".join(result["not in the script"])
        print(f"              The projection also assumes what the script lacks: {lacking}.")
        print("              Without it, the run may be slower, or need more memory.")
    print(f"\nmemory of a GPU, GiB  {needed_bytes(result) / GIB:.1f} of {job.cluster.memory / GIB:.1f}")
    reserve = (1 - SHARE_OF_MEMORY) * job.cluster.memory
    print_bars({**result["memory"], "reserve": reserve}, job.cluster.memory, "6.1f", unit=GIB)
    print(f"  A logit counts {job.base.logit_bytes} bytes. With --cross-entropy fused it counts 4, with chunked 0.")
    total = sum(result["seconds"].values())
    print(f"\nseconds of a step     {total:.3f}")
    print_bars(result["seconds"], total, "6.3f")
    used = f"MFU {result['MFU']:.0%}, HFU {result['HFU']:.0%}"
    print(f"\ntokens/s per GPU      {result['tokens/s per GPU']:,.0f}, {used}")
    low, high = result["expect"]
    known = "8 of 10 published runs were within such a range, see docs/plan.md"
    if job.base.lora or not job.cluster.has_rows:
        known = f"a wide range, since docs/plan.md has no run {'with LoRA' if job.base.lora else 'of such a GPU'}"
    print(f"expect                {low:,.0f} to {high:,.0f}: {known}")


def print_bars(parts, whole, form, unit=1):
    for part, value in parts.items():
        if value > 0:
            print(f"  {part:19} {value / unit:{form}}  {'#' * round(40 * value / whole)}")


def print_alternatives(found):
    winner = found["recommended"]
    for name in ("fastest", "runner-up"):
        other = found.get(name, winner)
        difference = other["tokens/s per GPU"] / winner["tokens/s per GPU"] - 1
        if other["description"] != winner["description"]:
            compared = f"{abs(difference):.1%} {'slower' if difference < 0 else 'faster'}"
            print(f"\n{name:14}{other['description']}: {compared}")
            if name == "fastest":
                print(f"start         {other['command'] or NO_SCRIPT}")


# ---- models and GPUs ------------------------------------------------------------------------------------------------

MODELS = {  # layers, width, heads, KV heads, hidden, matrices, vocabulary
    "llama2-7b": Model(32, 4096, 32, 32, 11008, 3, 32000, sequence=4096, hub="meta-llama/Llama-2-7b-hf"),
    "llama2-13b": Model(40, 5120, 40, 40, 13824, 3, 32000, sequence=4096, hub="meta-llama/Llama-2-13b-hf"),
    "llama2-70b": Model(80, 8192, 64, 8, 28672, 3, 32000, sequence=4096, hub="meta-llama/Llama-2-70b-hf"),
    # The model cards of Llama 3.2
    "llama3-1b": Model(16, 2048, 32, 8, 8192, 3, 128256, tied=True, hub="meta-llama/Llama-3.2-1B"),
    "llama3-3b": Model(28, 3072, 24, 8, 8192, 3, 128256, tied=True, hub="meta-llama/Llama-3.2-3B"),
    "llama3-8b": Model(32, 4096, 32, 8, 14336, 3, 128256, hub="meta-llama/Llama-3.1-8B"),
    "llama3-70b": Model(80, 8192, 64, 8, 28672, 3, 128256, hub="meta-llama/Llama-3.1-70B"),
    "llama3-405b": Model(126, 16384, 128, 8, 53248, 3, 128256, hub="meta-llama/Llama-3.1-405B"),
    "gpt2": Model(12, 768, 12, 12, 3072, 2, 50257, tied=True, sequence=1024),
    "gpt3-175b": Model(96, 12288, 96, 96, 49152, 2, 50257, tied=True, sequence=2048),
}

GIB = 2**30

# Memory is what torch.cuda.get_device_properties reports. `flops`, `bandwidth` and links are the makers' numbers, dense
# and in one direction, from the pages named beside them.
# `reachable`: "Maximum Achievable Matmul FLOPS" in https://github.com/stas00/ml-engineering, compute/accelerator.
# `flash`: 189 of 312 TFLOP/s on A100 (arXiv:2307.08691), 335 forward and 322 backward of 989 on H100 (2407.08608).
# `between` is the network of the usual machine: 8 x 200 Gb/s with A100, 8 x 400 Gb/s with H100 and newer ones, 100 Gb/s
# for a whole machine of cards. Cards have no NVLink. They send over PCIe, the RTX 4090 through the host's memory.
GPUS = {
    # nvidia.com/en-us/data-center/ a100, h100, h200, dgx-b200
    "a100": Cluster("a100", 79.25 * GIB, 312e12, 2.04e12, 300e9, 25e9, reachable=271.2 / 312, flash=0.6),
    "a100-40": Cluster("a100-40", 39.5 * GIB, 312e12, 1.555e12, 300e9, 25e9, reachable=271.2 / 312, flash=0.6),
    "h100": Cluster("h100", 79.25 * GIB, 989.5e12, 3.35e12, 450e9, 50e9, reachable=794.5 / 989),
    "h200": Cluster("h200", 139.8 * GIB, 989.5e12, 4.8e12, 450e9, 50e9, reachable=794.5 / 989),
    "b200": Cluster("b200", 178 * GIB, 2250e12, 8e12, 900e9, 50e9, reachable=1745 / 2250, has_rows=False),
    # h100 again: NVLink joins pairs only, the others are joined by PCIe 5
    "h100-nvl": Cluster("h100-nvl", 93 * GIB, 835e12, 3.9e12, 64e9, 50e9, has_rows=False),
    # amd.com/en/products/accelerators/instinct/mi300/mi300x.html
    "mi300x": Cluster("mi300x", 191.5 * GIB, 1307e12, 5.3e12, 448e9, 50e9, reachable=668.4 / 1307, has_rows=False),
    # nvidia.com/en-us/data-center/ l40s, l4; aws.amazon.com/ec2/instance-types/g5; NVIDIA's paper on Ada
    "l40s": Cluster("l40s", 44.4 * GIB, 362e12, 864e9, 32e9, 1.6e9, flash=0.6, has_rows=False),
    "l4": Cluster("l4", 22 * GIB, 121e12, 300e9, 32e9, 1.6e9, flash=0.6, has_rows=False),
    "a10g": Cluster("a10g", 22 * GIB, 70e12, 600e9, 32e9, 1.6e9, flash=0.6, has_rows=False),
    "rtx4090": Cluster("rtx4090", 23.5 * GIB, 165e12, 1.008e12, 16e9, 1.6e9, flash=0.6, has_rows=False),
}

# ---- options ------------------------------------------------------------------------------------------------------

LOGIT_BYTES = {"plain": 12, "fused": 4, "chunked": 0}
NOT_PLANNED = """It does not plan mixtures of experts (min_EP.py trains them), ring attention (min_CP_ring.py), DiLoCo,
quantized weights, offloading to the CPU, images, failures or slow machines."""


class ArgumentParser(argparse.ArgumentParser):
    """Errors are one line. options.py has more, but needs torch."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def whole_number(text):
    """An argparse `type`: a whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def numbers_of(text, names, kind=float):
    """{name: number} of a text like "memory=80 flops=989"."""
    form = " ".join(f"{name}=NUMBER" for name in names)
    mistake = argparse.ArgumentTypeError(f"{text!r} is not like {form!r}")
    try:
        numbers = {name: kind(value) for name, value in (word.split("=") for word in text.split())}
    except ValueError:
        raise mistake from None
    if not numbers.keys() <= set(names) or not all(0 < number < math.inf for number in numbers.values()):
        raise mistake
    return numbers


def gpu(text):
    """One of GPUS, or one like "memory=48 flops=362". Its memory is as fast in relation to `flops` as an H100's.

    Links that are not known are infinitely fast. `mistakes` asks for them.
    """
    if text in GPUS:
        return GPUS[text]
    if "memory=" not in text or "flops=" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} has no memory and flops, and is not one of {', '.join(GPUS)}")
    numbers = numbers_of(text, ("memory", "flops", "bandwidth"))
    h100, flops = GPUS["h100"], 1e12 * numbers["flops"]
    bandwidth = 1e9 * numbers.get("bandwidth", 0) or h100.bandwidth * flops / h100.flops
    return Cluster("your GPU", 1e9 * numbers["memory"], flops, bandwidth, math.inf, math.inf, has_rows=False)


def links(text):
    return {name: value * 1e9 for name, value in numbers_of(text, ("inside", "between")).items()}


def mesh(text):
    return numbers_of(text, (*MESH, "chunks", "zero"), whole_number)


def cluster_file(path):
    """(Cluster, number of GPUs) of a file of benchmarks/check_cluster.py."""
    try:
        with open(path) as file:
            found = json.load(file)
        n_gpus = found.pop("gpus")
        cluster = Cluster(**found)
        other_fields = ("name", "has_rows", "overlaps", "narrow")
        numbers = [value for name, value in vars(cluster).items() if name not in other_fields]
        if not all(0 < number < math.inf for number in (n_gpus, *numbers)):
            raise ValueError("a number in it is not positive")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{path} is not a file of benchmarks/check_cluster.py: {error}") from None
    return cluster, n_gpus


def make_parser():
    parser = ArgumentParser(prog="plan.py", description=__doc__.partition("\n")[0], epilog=NOT_PLANNED)
    add = parser.add_argument
    add("--model", choices=MODELS, metavar="NAME", help=f"one of {', '.join(MODELS)}")
    add("--layers", type=whole_number, help="blocks of attention and MLP")
    add("--width", type=whole_number, help="features per token")
    add("--heads", type=whole_number, help="attention heads per block")
    add("--kv-heads", type=whole_number, help="heads of keys and values (default: as many as heads)")
    add("--hidden", type=whole_number, help="features inside an MLP (default: 4 x width)")
    add("--vocabulary", type=whole_number, help="number of different tokens (default: 50257)")
    add("--sequence", type=whole_number, help="tokens per sequence (default: the model's, or 8192)")
    add("--gated", dest="matrices", action="store_const", const=3, help="MLPs have three matrices")
    add("--global-batch-size", type=whole_number, help="sequences per step (default: about 8192 tokens per GPU)")
    add("--gpus", type=whole_number, help="number of GPUs (default: those of --mesh or --cluster, or 8)")
    numbers = '"memory=GB flops=TFLOP/s", with bandwidth=GB/s of the memory if known'
    add("--gpu", type=gpu, default="h100", help=f"one of {', '.join(GPUS)}, or {numbers} (default: h100)")
    add("--gpus-per-node", type=whole_number, help="GPUs of a machine (default: 8)")
    add("--links", type=links, metavar='"inside=GB/s between=GB/s"', help="sent by one GPU, within and beyond it")
    add("--cluster", type=cluster_file, metavar="FILE", help="instead of --gpu: a file of benchmarks/check_cluster.py")
    axes = ", ".join(MESH)
    mesh_help = f"of {axes}; chunks=2: interleaved; zero=1: ZeRO-1; shard=1 context=8: FSDP over CP's GPUs"
    add("--mesh", type=mesh, metavar='"shard=32 tensor=2"', help=mesh_help)
    add("--micro-batch-size", type=whole_number, help="sequences of a micro-batch (default: try all)")
    add("--precision", choices=("float32", "bfloat16"), default="bfloat16", help="of matrices (default: bfloat16)")
    add("--recompute", choices=("auto", *RECOMPUTE), default="auto", help="in backward (default: auto, try all)")
    logit = "bytes of a logit: plain 12 (default, as torch's), fused 4 (in place), chunked 0 (never all at once)"
    add("--cross-entropy", choices=LOGIT_BYTES, default="plain", help=logit)
    add("--compile", action="store_true", help="count the fused kernels of torch.compile")
    add("--lora", type=whole_number, default=0, metavar="RANK", help="adapters beside a frozen model, llm_FSDP.py")
    add("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(links={}, mesh={})
    return parser


def parse_args(argv=None):
    parser = make_parser()
    args = parser.parse_args(argv)
    model = parse_model(parser, args)
    cluster, measured = args.cluster or (args.gpu, 8)
    cluster = replace(cluster, gpus_per_node=args.gpus_per_node or cluster.gpus_per_node, **args.links)
    n_gpus = args.gpus or (Layout(**args.mesh).n_gpus if args.mesh else measured)
    logit_bytes = LOGIT_BYTES[args.cross_entropy]
    base = Layout(precision=args.precision, fused=args.compile, logit_bytes=logit_bytes, lora=args.lora)
    micro = args.micro_batch_size
    batch = args.global_batch_size or default_batch(n_gpus, model.sequence, args.mesh, micro or 1)
    recompute = RECOMPUTE if args.recompute == "auto" else (args.recompute,)
    job = Job(model, cluster, n_gpus, batch, args.model or "your model", recompute, base, args.mesh, micro)
    for mistake in mistakes(job):
        parser.error(f"argument {mistake}")
    return args, job


def parse_model(parser, args):
    """--model, changed by the options of its shape, or a shape from these options alone."""
    names = [field.name for field in fields(Model)]
    given = {name: value for name, value in vars(args).items() if name in names and value}
    if args.model:
        model = replace(MODELS[args.model], **given)
        is_same = replace(model, sequence=MODELS[args.model].sequence) == MODELS[args.model]
        return model if is_same else replace(model, hub=None)
    for name in ("layers", "width", "heads"):
        if name not in given:
            parser.error(f"argument --{name}: needed if there is no --model")
    return Model(**{"kv_heads": args.heads, "hidden": 4 * args.width, "matrices": 2, "vocabulary": 50257, **given})


def mistakes(job):
    """What is wrong with options that do not go together, as phrases. Machines are used as a whole."""
    model, cluster, layout = job.model, job.cluster, Layout(**job.mesh)
    n_gpus, per_node = job.n_gpus, cluster.gpus_per_node
    inside_is_known = cluster.inside < math.inf
    between_is_known = cluster.between < math.inf
    alone = "llm_FSDP.py trains adapters with FSDP alone, so --mesh may name shard alone"
    usual = "inside is 450 with an H100's NVLink and 25 with PCIe 4, between is 50 with 400 Gb/s per GPU"
    heads, kv_heads = model.heads, model.kv_heads
    rules = [
        (model.width % heads == 0, f"--width: {model.width} is not a multiple of {heads}, the number of heads"),
        (heads % kv_heads == 0, f"--heads: {heads} is not a multiple of {kv_heads}, the KV heads"),
        (n_gpus <= per_node or n_gpus % per_node == 0, f"--gpus: {n_gpus} is not a multiple of a machine's {per_node}"),
        (n_gpus == 1 or inside_is_known, f"--links: a --gpu of numbers needs inside=GB/s: {usual}"),
        (n_gpus <= per_node or between_is_known, f"--links: a --gpu of numbers needs between=GB/s: {usual}"),
        (not job.base.lora or job.mesh.keys() <= {"shard"}, f"--lora: {alone}"),
        (not job.mesh or layout.n_gpus == n_gpus, f"--mesh: it has {layout.n_gpus} GPUs, --gpus has {n_gpus}"),
    ]
    return [mistake for holds, mistake in rules if not holds] + [f"--mesh: {why}" for why in misfits(model, layout)]


def default_batch(n_gpus, sequence, mesh, micro):
    """Sequences of about 8,192 tokens per GPU. A longer sequence is shared by a power of two of GPUs.

    A mesh that is given has as many for each of its groups, and in a pipeline one micro-batch for each stage at least.
    """
    layout = Layout(**mesh)
    sharing = 2 ** max(0, round(math.log2(sequence / 8192)))  # GPUs that share a long sequence
    groups = layout.replicate * layout.shard if mesh else max(1, n_gpus // sharing)
    return groups * micro * max(layout.stages, 8192 * n_gpus // (groups * sequence * micro))


def main(argv=None):
    args, job = parse_args(argv)
    found = answer(job)
    if args.json:
        print(json.dumps(found, indent=1, default=asdict))  # a layout is a dataclass
    else:
        print_answer(job, found)
    if not found["fits"]:
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # as in `python plan.py | head`: https://docs.python.org/3/library/signal.html
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
