"""Hold plan.py's projections against published measurements, and write docs/plan.md.

    python -m benchmarks.published

benchmarks/published.json has the measurements, with the layout of each run. `Framework` is what the frameworks of these
runs do and no script here does: their formulas are here, all others are plan.py's. Three constants are fitted to the
rows. Each row is also projected with constants that were fitted without any row of its publisher. These held-out errors
are what you may expect of a run that is not in the table.
"""

import contextlib
import dataclasses
import io
import json
import math
import shlex
import statistics
from pathlib import Path

import torch

import plan

FILE = Path(__file__).parent / "published.json"
MEASURED = Path(__file__).parent / "results" / "check_cluster.json"
PAGE = Path(__file__).parent.parent / "docs" / "plan.md"


# ---- the rows -----------------------------------------------------------------------------------------------------


def load():
    return json.loads(FILE.read_text())


def model_of(row, models):
    """The shape of a model that plan.py knows, or one of published.json."""
    name = row["model"]
    model = plan.MODELS[name] if name in plan.MODELS else plan.Model(**models[name])
    return dataclasses.replace(model, sequence=row["sequence"])


def published_speed(row, model, gpu):
    """Tokens per second and GPU. MFU (%) and TFLOP/s are converted by plan.model_flops, as these sources count."""
    if row["unit"] == "MFU":
        return row["value"] / 100 * plan.GPUS[gpu].flops / plan.model_flops(model)
    if row["unit"] == "TFLOP/s":
        return row["value"] * 1e12 / plan.model_flops(model)
    return row["value"]


@dataclasses.dataclass
class Framework:
    """What a framework does and no script here does. The defaults are what most published runs have."""

    fused_loss: bool = True  # the loss works on the logits in place: 4 bytes each instead of 12
    attention: str = "unknown"  # the kernel, one of KERNELS
    precision: str = "bfloat16"  # or "float8" in the blocks' matrices
    async_tensor: bool = False  # tensor parallelism communicates while it computes
    regather: bool = False  # backward gathers the inputs of tensor parallelism's matrices again
    keep_gathered: bool = False  # FSDP gathers shards once per micro-batch
    overlap_gather: bool = False  # ZeRO sends few large messages, and gathers while the next forward computes


@dataclasses.dataclass
class Run:
    """A row of published.json as plan.py takes it, and its framework."""

    row: dict
    source: dict
    model: plan.Model
    layout: plan.Layout
    framework: Framework
    cluster: plan.Cluster
    speed: float  # measured tokens per second and GPU

    @property
    def short(self):
        """Up to 8,192 tokens and 128 GPUs, where most rows are."""
        return self.model.sequence <= 8192 and self.layout.n_gpus <= 128


def layout_of(row):
    """(plan.Layout, Framework) of a row. Most runs have fused kernels, as by torch.compile."""
    given = {"fused": True, **row["layout"]}
    names = [field.name for field in dataclasses.fields(Framework) if field.name in given]
    framework = Framework(**{name: given.pop(name) for name in names})
    return plan.Layout(**given, logit_bytes=4 if framework.fused_loss else 12), framework


def load_runs():
    data = load()
    runs = []
    for source in data["sources"]:
        cluster = dataclasses.replace(plan.GPUS[source["gpu"]], **source["cluster"])
        for row in source["rows"]:
            model = model_of(row, data["models"])
            layout, framework = layout_of(row)
            speed = published_speed(row, model, source["gpu"])
            runs.append(Run(row, source, model, layout, framework, cluster, speed))
    return runs


# ---- what the frameworks do, and no script here -------------------------------------------------------------------

TRITON = 0.74  # fitted to the rows: speed of Triton's older attention in relation to FlashAttention-2
# The speed of attention in relation to FlashAttention-2's. FlashAttention-3: arXiv:2407.08608, figures 5 and 6.
# An unknown kernel is taken as between FlashAttention-2 and Triton's: most runs have one of them.
KERNELS = {"flash2": 1.0, "flash3": 1.7, "triton": TRITON, "unknown": math.sqrt(TRITON)}
# Speed of matrices in float8 in relation to bfloat16, on an H100: "Maximum Achievable Matmul FLOPS" in
# https://github.com/stas00/ml-engineering, compute/accelerator.
FLOAT8 = 1402.6 / 794.5
ASYNC_HIDES = 0.5  # of tensor parallelism's communication, where a framework overlaps it with matrices: about half


def tensor_exposed(model, layout, framework):
    """Tensor parallelism's time in relation to min_TP.py's. Gathering again is two messages more for each block."""
    share = 1 - ASYNC_HIDES if framework.async_tensor else 1.0
    if framework.regather:
        share *= 1 + 2 * model.layers / layout.stages / plan.tensor_messages(model, layout)
    return share


def cluster_with(run, values):
    """The cluster with the constants `values`, as fast as the run's attention and precision make it."""
    kernels = {**KERNELS, "triton": values["TRITON"]}
    flash = run.cluster.flash * kernels[run.framework.attention]
    cluster = dataclasses.replace(run.cluster, efficiency=values["EFFICIENCY"], flash=flash)
    if run.framework.precision == "bfloat16":
        return cluster
    float8 = dataclasses.replace(cluster, reachable=FLOAT8 * cluster.reachable)
    # The head computes in bfloat16.
    blocks = run.model.layers * plan.block_seconds(run.model, run.layout, float8)
    even = (blocks + plan.head_seconds(run.model, run.layout, cluster)) / run.layout.stages / cluster.efficiency
    computing = plan.compute_seconds(run.model, run.layout, float8)
    return dataclasses.replace(float8, efficiency=cluster.efficiency * computing / max(computing, even))


def seconds(run, cluster):
    """{part: seconds} of a step: plan.py's sum, with the parts that the framework does otherwise."""
    model, layout, framework = run.model, run.layout, run.framework
    computing = plan.compute_seconds(model, layout, cluster)
    tensor = tensor_exposed(model, layout, framework) * plan.tensor_seconds(model, layout, cluster)
    window = computing + tensor + plan.context_seconds(model, layout, cluster)
    stage = plan.stage_seconds(model, layout, window, cluster)
    parts = plan.seconds(model, layout, cluster)
    parts |= {
        "bubble": (layout.stages - 1) / layout.chunks * (window + stage),
        "tensor": layout.count * tensor,
        "stages": layout.count * stage,
        "shard": plan.shard_seconds(model, layout, window, cluster),
        "replicate": plan.replicate_seconds(model, layout, window, cluster),
    }
    if framework.keep_gathered or framework.precision == "float8":
        parts["shard"] = shard_seconds(run, window, cluster)
    if framework.overlap_gather:
        parts["replicate"] = replicate_seconds(run, window, cluster)
    return parts


def shard_seconds(run, window, cluster):
    """plan.shard_seconds with parameters that are gathered once, or in one byte."""
    layout = run.layout
    pipeline = layout.stages > 1
    gatherings = 1 if pipeline or run.framework.keep_gathered else 2
    gathered, reduced = plan.shard_bytes(run.model, layout)
    if run.framework.precision == "float8":
        gathered /= 2
    messages = (gatherings + 1) * run.model.layers / layout.stages
    n_bytes = gatherings * gathered + reduced
    rounds = 1 if pipeline else layout.count
    return rounds * plan.transfer_seconds(layout.shards, layout.tensor, n_bytes, messages, cluster, window)


def replicate_seconds(run, window, cluster):
    """ZeRO's part of plan.replicate_seconds with a message per block. The next forward hides the gathering."""
    layout = run.layout
    stride = layout.tensor * layout.shards
    messages = run.model.layers / layout.stages
    if layout.chunks > 1:
        window *= min(layout.stages, layout.count)
    reduced, gathered = plan.replicate_bytes(run.model, layout)
    reducing = plan.transfer_seconds(layout.copies, stride, reduced, messages, cluster, window * 2 / 3)
    return reducing + plan.transfer_seconds(layout.copies, stride, gathered, messages, cluster, window / 3)


def gathered_inputs(run, model):
    """Bytes that plan.kept_bytes counts and the framework does not keep, since backward gathers them again."""
    layout = run.layout
    if not run.framework.regather or layout.recompute != "none":
        return 0.0
    split = (layout.tensor - 1) / layout.tensor
    block = 2 * split * layout.number_bytes * model.width * plan.tokens_of_micro_batch(model, layout)
    return block * math.ceil(model.layers / layout.stages) * plan.micro_batches_in_flight(layout)


# ---- the fit ------------------------------------------------------------------------------------------------------

# The fitted constants, with their values as known without these rows. The fit departs from these values.
KNOWN = {
    "EFFICIENCY": 0.85,  # a guess
    "FORWARD": 1 / 3,  # forward's share of the operations
    "TRITON": 1 / 1.8,  # FlashAttention-2 is 1.3 to 2.5 times as fast: arXiv:2307.08691
}
TRUST = 0.1  # in KNOWN. A departure by a factor e weighs as much as an error by a factor e**TRUST of one row.
OUTLIER = 0.08  # errors beyond this weigh less: the loss is sqrt(1 + (error/OUTLIER)**2)


@contextlib.contextmanager
def forward_share(value):
    """plan.py with another FORWARD."""
    before = plan.FORWARD
    plan.FORWARD = value
    try:
        yield
    finally:
        plan.FORWARD = before


def project(runs, values):
    """Tokens per second and GPU of each run."""
    speeds = []
    with forward_share(values["FORWARD"]):
        for run in runs:
            parts = seconds(run, cluster_with(run, values))
            speeds.append(plan.tokens_per_second(run.model, run.layout, parts))
    return speeds


def log_errors(runs, logs):
    """log(projected / measured) of each run, with the constants exp(`logs`): a vector."""
    values = dict(zip(KNOWN, logs.exp().tolist(), strict=True))
    ratios = [speed / run.speed for speed, run in zip(project(runs, values), runs, strict=True)]
    return torch.tensor(ratios, dtype=torch.float64).log()


def fit(runs):
    """{constant: value} with the smallest errors. All publishers together weigh by the square root of their rows.

    Least squares with weights that make outliers count less, by Gauss-Newton in the logarithms of the constants.
    """
    start = torch.tensor(list(KNOWN.values()), dtype=torch.float64).log()
    names = [run.source["publisher"] for run in runs]
    weights = torch.tensor([names.count(name) ** -0.5 for name in names], dtype=torch.float64)
    weights /= weights.mean()
    logs = start.clone()
    step = 1e-4
    for _ in range(20):
        errors = log_errors(runs, logs)
        columns = [(log_errors(runs, logs + step * unit) - errors) / step for unit in torch.eye(len(logs))]
        slopes = torch.stack(columns, dim=1)
        robust = (weights / (1 + (errors / OUTLIER) ** 2) ** 0.25)[:, None]
        prior = TRUST * torch.eye(len(logs), dtype=torch.float64)
        left = torch.cat([robust * slopes, prior])
        right = torch.cat([-robust[:, 0] * errors, TRUST * (start - logs)])
        change = torch.linalg.lstsq(left, right[:, None]).solution[:, 0].clamp(-0.3, 0.3)
        logs = logs + change
        if change.abs().max() < 1e-3:
            break
    return dict(zip(KNOWN, logs.exp().tolist(), strict=True))


def current():
    """The constants as they stand in plan.py and above."""
    return {"EFFICIENCY": plan.Cluster.efficiency, "FORWARD": plan.FORWARD, "TRITON": TRITON}


# ---- held against the rows ----------------------------------------------------------------------------------------


def blocks_of_first_stage(model, stages):
    """Blocks that nanotron gives to the first stage: it adds blocks until they exceed the stage's share of parameters.

    The head counts as parameters, the embedding does not. (`build_model` in nanotron's models/base.py)
    """
    share = (model.layers * plan.block_params(model) + model.vocabulary * model.width) / stages
    return math.floor(share / plan.block_params(model)) + 1


def memory_of_rank_0(run):
    """Bytes of the first stage of a pipeline: its blocks and the embedding, and no logits."""
    model, layout = run.model, run.layout
    blocks = blocks_of_first_stage(model, layout.stages)
    # plan.py splits a model evenly. Each stage of this one has what nanotron's first stage has.
    layers, vocabulary = blocks * layout.stages, model.vocabulary * layout.stages
    even = dataclasses.replace(model, layers=layers, vocabulary=vocabulary, tied=True)
    state = sum(plan.state_bytes(even, layout).values())
    kept = plan.kept_bytes(even, layout) - gathered_inputs(run, even)
    return state + kept + plan.working_bytes(even, layout)


def needed_bytes(run):
    if run.source["name"] == "nanotron" and run.layout.stages > 1:
        return memory_of_rank_0(run)
    return sum(plan.memory(run.model, run.layout).values()) - gathered_inputs(run, run.model)


def compare():
    """[{"run", "fitted", "held out", "sure", "bytes", "rejected"}] of all rows.

    "fitted" and "held out" are projected / measured speed. "sure" says whether the held-out range holds.
    """
    runs = load_runs()
    fitted = project(runs, current())
    held_out = [0.0] * len(runs)
    for publisher in dict.fromkeys(run.source["publisher"] for run in runs):
        values = fit([run for run in runs if run.source["publisher"] != publisher])
        own = [i for i, run in enumerate(runs) if run.source["publisher"] == publisher]
        for i, speed in zip(own, project([runs[i] for i in own], values), strict=True):
            held_out[i] = speed
    results = []
    for run, all_rows, others in zip(runs, fitted, held_out, strict=True):
        factor = plan.doubt(run.model, run.layout, run.cluster)
        n_bytes = needed_bytes(run)
        results.append(
            {
                "run": run,
                "fitted": all_rows / run.speed,
                "held out": others / run.speed,
                "sure": 1 / factor <= run.speed / others <= factor,
                "bytes": n_bytes,
                "rejected": n_bytes > plan.SHARE_OF_MEMORY * run.cluster.memory,
            }
        )
    return results


def share(flags):
    flags = list(flags)
    return sum(flags) / len(flags)


def within(results, kind):
    """The share of rows within 15 %. `kind` is "fitted" or "held out"."""
    return share(abs(result[kind] - 1) <= 0.15 for result in results)


def alike(results, kind):
    """The same, but each publisher weighs as much as any other."""
    publishers = dict.fromkeys(result["run"].source["publisher"] for result in results)
    return statistics.mean(
        within([result for result in results if result["run"].source["publisher"] == publisher], kind)
        for publisher in publishers
    )


def groups(results):
    """{name: the results of some rows}."""
    return {
        "all": results,
        "first set": [result for result in results if result["run"].source["part"] == "first"],
        "second set": [result for result in results if result["run"].source["part"] == "second"],
        "up to 8,192 tokens and 128 GPUs": [result for result in results if result["run"].short],
        "longer than 8,192 tokens": [result for result in results if result["run"].model.sequence > 8192],
        "more than 128 GPUs": [result for result in results if result["run"].layout.n_gpus > 128],
        "replicas on more than 128 GPUs": [
            result for result in results if result["run"].layout.copies > 1 and result["run"].layout.n_gpus > 128
        ],
    }


# ---- the page -----------------------------------------------------------------------------------------------------

INTRODUCTION = """# How far to trust plan.py

[`plan.py`](../plan.py) projects the memory and the speed of a training run from formulas. This page holds it against
{n} published runs of {publishers} publishers. `python -m benchmarks.published` writes it from
[published.json](../benchmarks/published.json), and a test fails if an error grows.

The formulas have a source each, in plan.py. What only the frameworks of these runs do (other attention kernels, float8,
asynchronous tensor parallelism, ZeRO in few messages) is in
[published.py](../benchmarks/published.py). Three constants are fitted to the runs, the same for all GPUs and sources.
"Fitted" is the error of plan.py as it is. "Held out" is the error of the same formulas if the three constants are
fitted without any run of the same publisher. Expect this error for your own run. Nothing is calibrated on a row before
the row is projected. The formulas, and the few constants that plan.py calls chosen, were chosen with all these runs in
view, so a run of another kind can be further off.
"""

MISSES = """## What it misses

- **nanotron on 256 and 512 GPUs.** Its steps are 0.2 to 0.3 s longer than computing explains, for the 1.34, 3.57 and
  8.86 B models alike. The formulas have such a cost for ZeRO-1 only, and too much of it for the 3.57 B model.
- **nanotron's 80 B on 32 and 64 GPUs** is slower per GPU than on 128, which no formula explains. Both are close to
  80 GB.
- **Replicas on more than 128 GPUs** are the least certain. InternEvo's loss from 8 to 1,024 GPUs is what NCCL's own
  latencies say, if each tensor is a message of its own. Frameworks with few large messages lose less.
- **Long sequences, held out.** 32 of the 41 rows are llm-foundry's with Triton's older attention, which no other
  publisher has. Without them its speed is what a paper says, 1.8 times slower than FlashAttention-2. It is 1.35 times
  slower. So these rows are projected 19 % too slow. Ring attention of torchtitan is up to 1.3 times slower than
  projected.
- **Megatron-LM's 16 and 32 B** are projected too slow. The projection exposes more of the gradients' reduction and of
  tensor parallelism than Megatron does.
- **30 B on 8 GPUs with 8 k tokens** (llm-foundry) is projected too fast, on A100 and H100 alike. Three quarters of the
  memory hold parameters there.
- **Eager torch** is up to 1.2 times slower than projected with torchtitan, and not with nanotron or picotron.
- **GPUs without runs here** (B200, MI300X, L40S, L4, A10G, RTX 4090, H100 NVL): the range is 1.7 times as wide.
- **Memory** is within 20 % of all 46 published peaks, and within 10 % of 32. plan.py leaves a twentieth of the memory
  free. If a layout fits narrowly, try it for a few steps before you rely on it. Of the 11 runs that are said not to
  fit, 10 are of Megatron and Llama 3, whose sources name no recomputation or no micro-batch, so these are assumed.
- **LoRA** has formulas and no published run here.
- Mixtures of experts, ring attention, quantized weights, offloading, failures and slow ranks are not in it.
"""

# A question, the options that answer it, and the beginnings of the lines to show.
QUESTIONS = (
    (
        "My sequences have 6,000 tokens. Do I need a pipeline?",
        "--model llama3-8b --gpus 64 --sequence 6000",
        ("PROJECTION", "recommended", "expect"),
        "No. Without --global-batch-size each GPU gets whole sequences of about 8,192 tokens together.",
    ),
    (
        "Can I train on 1 M tokens with 64 GPUs?",
        "--model llama3-8b --gpus 64 --sequence 1048576",
        ("no layout", "              "),
        "A sequence is split by context x tensor, and each part needs a head. min_CP_ring.py has no such limit, "
        "but it is not planned.",
    ),
    (
        "My GPU is not in the list.",
        '--model llama3-1b --gpus 8 --gpu "memory=32 flops=210"',
        ("plan.py: error",),
        "Its links decide, so they are asked for. The list has A100 with 80 and 40 GB, H100, H100 NVL, H200, B200, "
        "MI300X, L40S, L4, A10G and RTX 4090.",
    ),
    (
        "I have a mesh already. What should it reach?",
        '--model llama3-70b --mesh "shard=32 tensor=2" --micro-batch-size 1 --recompute full',
        ("your mesh", "memory of", "tokens/s", "expect"),
        "--micro-batch-size and --recompute say how you run it.",
    ),
    (
        "Which mesh is recommended, the simplest or the fastest?",
        "--model llama3-70b --gpus 256",
        ("recommended", "fastest", "runner-up"),
        "The simplest of those within 5 % of the fastest. If the fastest is another one, it is named.",
    ),
    (
        "Does it plan LoRA and mixtures of experts?",
        "--model llama3-70b --gpus 8 --lora 16",
        ("recommended", "start", "memory of", "expect"),
        "LoRA, as llm_FSDP.py trains it. Not experts, as `--help` says. min_EP.py has them, "
        "and [costs.md](costs.md) has its formulas.",
    ),
    (
        "It does not fit. What can I change?",
        "--model llama3-8b --gpus 2 --sequence 32768",
        ("does not fit", "would fit"),
        "More GPUs and shorter sequences are tried.",
    ),
    (
        "Does it count torch.compile, and which cross-entropy?",
        "--model llama3-8b --gpus 8 --compile --cross-entropy chunked",
        ("recommended", "start", "              ", "memory of", "  A logit", "tokens/s"),
        "It counts what the scripts do: torch's cross-entropy, which takes 12 bytes per logit, and no torch.compile, "
        "which only llm_FSDP.py has as an option. With other options it says what the script lacks. "
        "`python plan.py --help` says what it cannot do, and `| head` may cut its output.",
    ),
)


def answer(options, beginnings):
    """The lines of `python plan.py OPTIONS` that start so."""
    output = io.StringIO()
    # An error's message is an answer, too.
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), contextlib.suppress(SystemExit):
        plan.main(shlex.split(options))
    return [line.rstrip() for line in output.getvalue().splitlines() if line.startswith(beginnings)]


def questions_section():
    lines = ["## Questions", ""]
    for question, options, beginnings, comment in QUESTIONS:
        lines += [f"**{question}** {comment}", "", "```", f"$ python plan.py {options}"]
        lines += [*answer(options, beginnings), "```", ""]
    return lines


def percent(ratio):
    return f"{100 * (ratio - 1):+.0f} %"


def shares_table(results):
    """How many rows are within 15 %, and in how many the printed range holds."""
    lines = ["| rows | number | fitted, within 15 % | held out, within 15 % | held out, in the printed range |"]
    lines.append("|---|---|---|---|---|")
    for name, some in groups(results).items():
        cells = [within(some, "fitted"), within(some, "held out"), share(result["sure"] for result in some)]
        lines.append(f"| {name} | {len(some)} | " + " | ".join(f"{100 * cell:.0f} %" for cell in cells) + " |")
    cells = [alike(results, "fitted"), alike(results, "held out")]
    lines.append("| all, publishers weighing alike | | " + " | ".join(f"{100 * cell:.0f} %" for cell in cells) + " | |")
    return lines


def rejected_line(results):
    rejected = [result for result in results if result["rejected"]]
    return f"{len(rejected)} of these {len(results)} runs, {len(rejected) / len(results):.0%}, are said not to fit."


def publishers_table(results):
    lines = ["| publisher | rows | fitted, median | within 15 % | held out, median | within 15 % |"]
    lines.append("|---|---|---|---|---|---|")
    for publisher in dict.fromkeys(result["run"].source["publisher"] for result in results):
        rows = [result for result in results if result["run"].source["publisher"] == publisher]
        cells = [f"| {publisher} | {len(rows)}"]
        for kind in ("fitted", "held out"):
            median = statistics.median(result[kind] for result in rows)
            cells += [percent(median), f"{100 * within(rows, kind):.0f} %"]
        lines.append(" | ".join(cells) + " |")
    return lines


def constants_table():
    lines = ["| constant | fitted | known without the rows |", "|---|---|---|"]
    for name, value in current().items():
        lines.append(f"| `{name}` | {value} | {KNOWN[name]:.2f} |")
    return lines


SCALING = (
    ("FSDP, 8 B, 8 to 128 GPUs (torchtitan)", "torchtitan", "8B FSDP 8, compile", "8B FSDP 128, compile"),
    ("FSDP, 1 B, 8 to 512 GPUs (llm-foundry)", "llm-foundry", "1b 8", "1b 512"),
    ("FSDP, 7 B, 8 to 512 GPUs (llm-foundry)", "llm-foundry", "7b 8", "7b 512"),
    ("ZeRO-1, 7 B, 8 to 128 GPUs (InternEvo)", "InternEvo", "7B ZeRO-1 x8", "7B ZeRO-1 x128"),
    ("ZeRO-1, 7 B, 8 to 1,024 GPUs (InternEvo)", "InternEvo", "7B ZeRO-1 x8", "7B ZeRO-1 x1024"),
    ("ZeRO-1 x TP, 7 B, 8 to 1,024 GPUs (InternEvo)", "InternEvo", "7B TP2 ZeRO-1 x8", "7B TP2 ZeRO-1 x1024"),
)


def scaling(results):
    """[(name, measured, projected)]: the speed of a GPU among many in relation to one among 8."""
    rows = {(result["run"].source["name"], result["run"].row["name"]): result for result in results}
    found = []
    for name, source, first, last in SCALING:
        few, many = rows[source, first], rows[source, last]
        measured = many["run"].speed / few["run"].speed
        found.append((name, measured, measured * many["held out"] / few["held out"]))
    return found


def scaling_table(results):
    lines = ["| more GPUs | measured | projected, held out |", "|---|---|---|"]
    for name, measured, projected in scaling(results):
        lines.append(f"| {name} | {measured:.2f} | {projected:.2f} |")
    return lines


def source_section(source, results):
    lines = [f"## {source['name']}", "", f"[Source]({source['url']}), {source['publisher']}. {source['note']}", ""]
    has_memory = any("gib" in result["run"].row for result in results)
    memory_head = " GiB | projected | error |" if has_memory else ""
    lines.append(f"| run | GPUs | tokens | tokens/s per GPU | projected | error | held out |{memory_head} why |")
    lines.append("|" + "---|" * (11 if has_memory else 8))
    for result in results:
        run = result["run"]
        projected = result["fitted"] * run.speed
        cells = [run.row["name"], f"{run.row['gpus']:,}", f"{run.model.sequence:,}", f"{run.speed:,.0f}"]
        cells += [f"{projected:,.0f}", percent(result["fitted"]), percent(result["held out"])]
        if has_memory and "gib" in run.row:
            gib = result["bytes"] / plan.GIB
            cells += [f"{run.row['gib']:.1f}", f"{gib:.1f}", percent(gib / run.row["gib"])]
        elif has_memory:
            cells += ["", "", ""]
        cells.append(run.row.get("reason", ""))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def measured_section():
    """What benchmarks/check_cluster.py --compare has measured and projected on the machine of the other benchmarks."""
    record = json.loads(MEASURED.read_text())
    lines = ["## Two processes on this project's machine", ""]
    lines += [
        "`python -m benchmarks.check_cluster --nproc 2 --compare` measures matrices, a block and the links of two CPU",
        "processes, then trains the cases of `benchmarks/transformer.py`. Nothing is calibrated on these runs. The",
        "faster of two rounds counts. The measured inputs are medians: the fastest calls promise up to 46 % more than",
        "training reaches.",
        "",
        "| case | tokens/s | projected | error |",
        "|---|---|---|---|",
    ]
    for name, row in record["results"].items():
        measured, projected = row["measured"]["max"], row["projected"]
        lines.append(f"| {name} | {measured:,.0f} | {projected:,.0f} | {percent(projected / measured)} |")
    return lines


def page(results):
    sources = {result["run"].source["name"]: result["run"].source for result in results}
    publishers = {source["publisher"] for source in sources.values()}
    lines = INTRODUCTION.format(n=len(results), publishers=len(publishers)).splitlines()
    lines += ["", "## Summary", "", *shares_table(results), "", rejected_line(results)]
    lines += ["", *publishers_table(results), "", *scaling_table(results), "", *constants_table(), ""]
    lines += [
        f"plan.py prints the factor {plan.SURE} in both directions as the range in which 8 of 10 runs are expected.",
        f"The factor grows by {plan.PER_DOUBLED_LENGTH} with each doubling beyond 8,192 tokens, by",
        f"{plan.PER_DOUBLED_GPUS} with each doubling beyond 128 GPUs, and by {plan.NO_ROWS} for a GPU without runs.",
        "",
        *questions_section(),
        *MISSES.splitlines(),
    ]
    if MEASURED.exists():
        lines += ["", *measured_section()]
    for name, source in sources.items():
        lines += ["", *source_section(source, [result for result in results if result["run"].source["name"] == name])]
    return "\n".join(lines) + "\n"


def main():
    results = compare()
    PAGE.write_text(page(results))
    print("\n".join([*shares_table(results), "", rejected_line(results), "", *publishers_table(results)]))
    print(f"written to {PAGE}")


if __name__ == "__main__":
    main()
