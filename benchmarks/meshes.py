"""Which mesh for which model on which cluster: a projection by the formulas of the docstrings, not a measurement.

    python -m benchmarks.meshes

Each way to split N GPUs into S shards of the data (FSDP, min_FSDP.py) x T tensor (min_TP.py, sequence parallel) x C
context (min_CP.py, Ulysses) x K pipeline stages (min_PP.py), for a transformer of P parameters in L layers of width D,
on sequences of B tokens, 8192 tokens per GPU and step, in bfloat16. Its seconds of a step are the sum of

    compute    (6·P + 6·L·D·B) operations per token, at 40 % of the published 989·10¹² per second
    bubble     compute · (K-1)/M, for M sequences per pipeline, one to a micro-batch
    tensor     4·L/K all-reduces of the activations of all tokens of the T ranks
    context    8·L/K all-to-alls of a rank's q, k, v or output
    data       parameters gathered twice and gradients reduced, 3·(n-1)/n · 2·P/(T·K) bytes, over n = S·C ranks
    latency    5 microseconds for each message inside a machine, 10 beyond it: assumed

Nothing overlaps, which is unfair to FSDP above all: it hides most of what it sends. A mesh fits if 16·P/N' bytes of
state on its N' = S·C·T·K GPUs, 2·D bytes per token and layer (what is recomputed is not kept) and one layer whole stay
below 72 of 80 GB. Groups lie inside machines of 8 H100 where they can, tensor first, then context, stages and data:
there a GPU sends 450 GB/s (NVLink); beyond, the members of a group that share a machine send 50 GB/s (InfiniBand) each.
https://www.nvidia.com/en-us/data-center/h100/
https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html
"""

import itertools

from benchmarks import common

MODELS = {  # P, L, D, B; the shapes of https://arxiv.org/abs/2407.21783, and one of a billion
    "1 B, 4 k tokens": (1.2e9, 16, 2048, 4096),
    "8 B, 8 k tokens": (8e9, 32, 4096, 8192),
    "8 B, 128 k tokens": (8e9, 32, 4096, 131072),
    "70 B, 8 k tokens": (70e9, 80, 8192, 8192),
    "405 B, 8 k tokens": (405e9, 126, 16384, 8192),
}
CLUSTERS = (8, 64, 256, 1024)
TOKENS, FLOPS, MACHINE, MEMORY = 8192, 0.4 * 989e12, 8, 72e9
NVLINK, INFINIBAND, LATENCY = 450e9, 50e9, (5e-6, 10e-6)


def sending(size, inner, n_bytes, messages):
    """Seconds to send `n_bytes` per GPU in `messages`, in a group of `size`; `inner` GPUs lie between neighbours."""
    if size == 1:
        return 0.0
    if size * inner <= MACHINE:
        return n_bytes / NVLINK + messages * LATENCY[0]
    members = max(1, MACHINE // inner)  # of the group that share a machine
    return n_bytes / min(NVLINK, members * INFINIBAND) + messages * LATENCY[1]


def step(model, data, tensor, context, stages):
    """Seconds of a step on a mesh of data x tensor x context x stages GPUs; None if it does not fit or divide."""
    params, layers, width, length = model
    n = data * tensor * context * stages
    sequences = TOKENS * tensor * context * stages / length  # of a pipeline
    tokens = sequences * length / context / stages  # of the T ranks that share them, per stage's turn
    activations = 2 * width * TOKENS * layers
    if sequences < 1 or stages > layers or tensor > 64 or 16 * params / n + activations + 2 * params / layers > MEMORY:
        return None
    compute = TOKENS * (6 * params + 6 * layers * width * length) / FLOPS
    bubble = compute * (stages - 1) / sequences
    rounds, kept = layers / stages, 2 * width * tokens * stages  # bytes of all micro-batches
    reduced = rounds * 4 * sending(tensor, 1, 2 * (tensor - 1) / tensor * kept, 2 * (tensor - 1) * sequences)
    part = (context - 1) / context * kept / tensor
    exchanged = rounds * 8 * sending(context, tensor, part, (context - 1) * sequences)
    shards = data * context
    gathered = 3 * (shards - 1) / shards * 2 * params / (tensor * stages)
    data_time = sending(shards, tensor * stages if context == 1 else tensor, gathered, 3 * rounds * (shards - 1))
    return compute + bubble + reduced + exchanged + data_time


def meshes(n):
    """All (data, tensor, context, stages) of powers of two whose product is n."""
    powers = [2**i for i in range(n.bit_length())]
    return [(n // (t * c * k), t, c, k) for t, c, k in itertools.product(powers, repeat=3) if n % (t * c * k) == 0]


def projection():
    """The quickest mesh that fits, and pure FSDP beside it, for every model and cluster."""
    rows = {}
    for name, model in MODELS.items():
        for n in CLUSTERS:
            times = {mesh: seconds for mesh in meshes(n) if (seconds := step(model, *mesh))}
            best = min(times, key=times.get, default=None)
            compute = TOKENS * (6 * model[0] + 6 * model[1] * model[2] * model[3]) / FLOPS
            rows[f"{name} on {n}"] = best and {
                "mesh": dict(zip(("data", "tensor", "context", "stages"), best, strict=True)),
                "seconds": times[best],
                "efficiency": compute / times[best],
                "efficiency of FSDP alone": compute / times[n, 1, 1, 1] if (n, 1, 1, 1) in times else None,
            }
    return rows


def main():
    rows = projection()
    print("PROJECTED, not measured. The quickest mesh that fits; efficiency, and that of FSDP alone")
    for name, row in rows.items():
        if row is None:
            print(f"{name:28} no mesh fits, or a sequence has more tokens than all GPUs may hold")
            continue
        mesh = " x ".join(f"{size} {kind}" for kind, size in row["mesh"].items() if size > 1)
        alone = row["efficiency of FSDP alone"]
        print(f"{name:28} {mesh:45} {row['efficiency']:.0%}  {f'{alone:.0%}' if alone else 'does not fit'}")
    note = "a projection by formulas, not a measurement"
    common.write("meshes", {"unit": "seconds per step", "note": note, "results": rows})


if __name__ == "__main__":
    main()
