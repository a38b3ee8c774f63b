"""plan.py: the formulas of the scripts, the fastest mesh first, commands that the scripts take, errors of one line."""

import dataclasses
import importlib
import re
import shlex

import pytest
import transformer
from conftest import ROOT, run

import plan

COSTS = (ROOT / "docs" / "costs.md").read_text().replace("\N{MINUS SIGN}", "-")
H100 = plan.GPUS["h100"]
N, B = 4, 8  # GPUs and sequences per step
MODEL = plan.Model(layers=8, width=1024, heads=16, kv_heads=16, hidden=4096, matrices=2, vocabulary=512, length=256)
P = MODEL.parameters
A = 4 * B * MODEL.length * MODEL.width
RING = 2 * (N - 1) / N * 4 * P
NUMBERS = 4 * MODEL.length * MODEL.width  # bytes of a block's input, of one sequence
LOGITS = 4 * MODEL.length * MODEL.vocabulary
LLAMA = plan.MODELS["llama3-8b"]


def mesh(script="min_FSDP.py", **sizes):
    return plan.Mesh(script, **{"number_bytes": 4, **sizes})


def of_a_block(part, layout, **wider):
    """What one more block on each GPU, or a wider one, adds to a part of the memory."""
    other = dataclasses.replace(MODEL, **(wider or {"layers": MODEL.layers + layout.stages}))
    return plan.memory(other, layout)[part] - plan.memory(MODEL, layout)[part]


@pytest.fixture
def answer(typed, capsys, tmp_path, monkeypatch):
    """What plan.py prints. Beside it, llm_FSDP.py may make a folder for its result."""
    monkeypatch.chdir(tmp_path)

    def call(*options):
        typed("plan.py", *options)
        plan.main()
        return capsys.readouterr().out

    return call


def commands(out):
    """The words of each printed command."""
    return [shlex.split(line.split(maxsplit=1)[1]) for line in re.findall(r"^ +start.*", out, re.M)]


# ---- the formulas of docs/costs.md and of the docstrings ------------------------------------------------------------


def cell(script, column):
    """A cell of the table of all scripts."""
    row = re.search(rf"^\| \[`{script}`\].*$", COSTS, re.M)[0]
    return row.strip("| ").split(" | ")[column]


def value(formula, **numbers):
    """What a formula of the table gives, for example 8·P + 8·P/N."""
    formula = formula.replace("·", "*").partition(",")[0].removeprefix("about ")
    return eval(formula, {"P": P, "N": N, "A": A, "b": MODEL.layers, "ring": RING, **numbers})


@pytest.mark.parametrize(
    "script, sizes",
    [
        ("min_DDP.py", {"replicate": N}),
        ("min_ZeRO.py", {"replicate": N}),
        ("min_FSDP.py", {"shard": N}),
        ("min_TP.py", {"tensor": N}),
        ("min_CP.py", {"context": N}),
        ("min_FSDP_TP.py", {"replicate": 3, "shard": 4, "tensor": 2}),
        ("min_PP.py", {"stages": N}),
        ("min_PP_FSDP_TP.py", {"stages": 2, "shard": 2, "tensor": 2}),
    ],
)
def test_memory_is_that_of_the_docs(script, sizes):
    """The stages of a pipeline hold about as much as each other."""
    held = plan.memory(MODEL, mesh(script, **sizes))
    state = held["parameters"] + held["gradients"] + held["Adam"]
    assert state == pytest.approx(value(cell(script, 2), **sizes), rel=0.02 if "stages" in sizes else 1e-6)


def test_what_is_gathered_is_that_of_the_docs():
    """In bfloat16 half of 20 bytes per parameter of a block; in a pipeline 8 of a stage, with 2 for parameters."""
    added = of_a_block("gathered", mesh(shard=N, tensor=2, number_bytes=2), hidden=2 * MODEL.hidden)
    assert added == pytest.approx(10 * MODEL.width * 2 * MODEL.hidden / 2)
    stages = mesh("min_PP_FSDP_TP.py", stages=N, tensor=2, number_bytes=2)
    assert plan.memory(MODEL, stages)["gathered"] == pytest.approx((2 + 4) * P / (N * 2), rel=0.05)


CP = value(cell("min_CP.py", 3)) - RING
TP = value(cell("min_TP.py", 3)) + (N - 1) / N * B * LOGITS
MESH = {"shard": 4, "tensor": 2}


@pytest.mark.parametrize(
    "script, sizes, axis, expected",
    [
        ("min_DDP.py", {"replicate": N}, "replicate", value(cell("min_DDP.py", 3))),
        ("min_FSDP.py", {"shard": N}, "shard", 1.5 * RING),
        ("min_TP.py", {"tensor": N, "sequences": B}, "tensor", TP),
        ("min_CP.py", {"context": N, "sequences": B}, "replicate", RING),
        ("min_CP.py", {"context": N, "sequences": B}, "context", CP),
        ("min_PP.py", {"stages": N, "micro_batches": B}, "stages", 2 * A),
        ("min_FSDP_TP.py", MESH, "shard", 3 * 3 / 4 * 4 * P / 2),
        ("min_FSDP_TP.py", MESH, "tensor", 1 / 2 * ((8 * 8 + 4) * NUMBERS + LOGITS)),
        ("min_FSDP_TP.py", {**MESH, "recompute": True}, "tensor", 1 / 2 * ((11 * 8 + 4) * NUMBERS + LOGITS)),
        # In a pipeline once per step.
        ("min_PP_FSDP_TP.py", {**MESH, "stages": 2, "micro_batches": 8}, "shard", 2 * 3 / 4 * 4 * P / (2 * 2)),
        ("llm_FSDP.py", {"shard": N, "number_bytes": 2, "micro_batches": 3}, "shard", 3 * (N - 1) / N * 8 * P),
    ],
)
def test_bytes_sent_are_those_of_the_docs(script, sizes, axis, expected):
    assert plan.sent_bytes(MODEL, mesh(script, **sizes))[axis] == pytest.approx(expected)


@pytest.mark.parametrize(
    "script, column, text",
    [
        ("min_FSDP.py", 2, "up to 20·block"),
        ("min_FSDP.py", 3, "up to 1.5 ring"),
        ("min_PP_FSDP_TP.py", 2, "up to 8·P/(stages · tensor) in a step"),
        ("min_FSDP_TP.py", 3, "3·(shard-1)/shard · 4·P/tensor, "),
        ("min_PP_FSDP_TP.py", 3, "2·(shard-1)/shard · 4·P/(stages · tensor), "),
    ],
)
def test_the_docs_have_the_numbers_that_stand_above(script, column, text):
    assert text in cell(script, column)


@pytest.mark.parametrize("nf4", [False, True])
def test_lora_holds_and_sends_what_the_docstring_of_llm_fsdp_says(nf4):
    layout = mesh("llm_FSDP.py", shard=N, number_bytes=2, lora=4, nf4=nf4, micro_batches=3)
    held = plan.memory(MODEL, layout)
    frozen = (9 / 16 if nf4 else 2) * (P - MODEL.root) + 2 * MODEL.root
    assert held["frozen"] == pytest.approx(frozen / N)
    adapters = 8 * 4 * (4 * 2 * 1024 + 2 * (1024 + 4096))  # the rank times inputs and outputs of each matrix
    assert held["parameters"] + held["gradients"] + held["Adam"] == 16 * adapters / N
    assert plan.sent_bytes(MODEL, layout)["shard"] == pytest.approx(3 * (N - 1) / N * (2 * frozen + 8 * adapters))
    longer = dataclasses.replace(MODEL, length=4096)
    assert plan.memory(longer, layout)["logits"] == 12 * 1024 * MODEL.vocabulary, "of 1,024 targets at a time"


def test_the_activations_of_a_block_are_what_torch_keeps():
    sizes = {"width": 256, "heads": 4, "length": 64}
    model = dataclasses.replace(MODEL, **sizes, kv_heads=4, hidden=1024)
    kept = []
    planned = []
    for layers in (1, 2):
        args = transformer.arguments(layers=layers, **sizes)
        kept.append(transformer.saved_bytes(transformer.plain_loss, transformer.make_model(args), args))
        planned.append(plan.memory(dataclasses.replace(model, layers=layers), mesh())["activations"])
    assert planned[1] - planned[0] == pytest.approx(kept[1] - kept[0], rel=0.1)


@pytest.mark.parametrize(
    "sizes, inputs",
    [
        ({"sequences": 3}, 3 * 16),
        ({"recompute": True}, 1),
        ({"context": 2}, 8),
        ({"tensor": 2}, 8 + 1),  # and half of two gathered inputs
        ({"stages": 4, "micro_batches": 8}, 4 * 16),  # of four micro-batches
        ({"stages": 4, "micro_batches": 2}, 2 * 16),
    ],
)
def test_activations_of_other_layouts(sizes, inputs):
    """Of a block, in numbers of its inputs."""
    assert of_a_block("activations", mesh("min_PP_FSDP_TP.py", **sizes)) == pytest.approx(inputs * NUMBERS)


@pytest.mark.parametrize("sizes, times", [({"number_bytes": 2}, 1 / 2), ({"lora": 4}, 2 / 3), ({"stages": 3}, 3 / 8)])
def test_computing_takes_longer_in_float32_without_lora_and_on_fewer_stages(sizes, times):
    """Three stages have eight layers: the slowest one has three."""
    one, other = (plan.seconds(MODEL, mesh(**each), H100)["compute"] for each in ({}, sizes))
    assert other == pytest.approx(times * one)


def test_the_bubble_is_that_of_the_docs():
    """(N-1)/(M+N-1) of a step."""
    parts = plan.seconds(MODEL, mesh("min_PP.py", stages=N, micro_batches=B), H100._replace(inside=1e30))
    assert parts["bubble"] / sum(parts.values()) == pytest.approx((N - 1) / (B + N - 1))


def test_what_shard_and_replicate_send_is_hidden_as_far_as_computing_lasts():
    layout = mesh(shard=N, sequences=1)
    slow = H100._replace(inside=1e9)
    parts = plan.seconds(MODEL, layout, slow)
    total = plan.sent_bytes(MODEL, layout)["shard"] / 1e9
    assert sum(parts.values()) == pytest.approx(total) and parts["compute"] < total
    assert plan.seconds(MODEL, layout, slow._replace(inside=1e15))["shard and replicate"] == 0
    zero = plan.seconds(MODEL, mesh("min_ZeRO.py", replicate=N), slow)
    assert zero["shard and replicate"] == pytest.approx(RING / 1e9), "it sends after backward"


# ---- the ten published runs of docs/costs.md ------------------------------------------------------------------------

PUBLISHED = [  # model, length, GPU, mesh, tokens/s per GPU; in the order of the table
    ("llama3-8b", 8192, "h100", {"shard": 8, "sequences": 2}, 6667),
    ("llama3-8b", 8192, "h100", {"shard": 128, "sequences": 2}, 6514),
    ("llama3-8b", 8192, "h100", {"shard": 8, "tensor": 8, "sequences": 12}, 4378),
    ("llama3-70b", 8192, "h100", {"shard": 32, "tensor": 8, "sequences": 16, "recompute": True}, 597),
    ("llama3-405b", 8192, "h100", {"shard": 16, "tensor": 8, "sequences": 2, "recompute": True}, 109),
    ("llama2-7b", 2048, "h100", {"replicate": 4, "tensor": 4, "stages": 4, "sequences": 4, "micro_batches": 32}, 8765),
    ("llama2-7b", 4096, "h100", {"shard": 96, "sequences": 2}, 9600),
    ("llama2-7b", 4096, "a100", {"shard": 128, "sequences": 2}, 4550),
    ("llama2-13b", 4096, "a100", {"shard": 64, "sequences": 2}, 2162),
    ("llama2-70b", 4096, "a100", {"shard": 64, "sequences": 2, "recompute": True}, 353),
]


def test_the_page_says_how_far_the_rough_time_is_from_published_runs():
    rows = [row.split(" | ")[-3:] for row in re.findall(r"^\| \[.*\(https://.*(?= \|$)", COSTS, re.M)]
    expected = []
    for name, length, gpu, sizes, published in PUBLISHED:
        model = dataclasses.replace(plan.MODELS[name], length=length)
        layout = plan.Mesh("", **sizes)
        groups = layout.replicate * layout.shard * layout.micro_batches * layout.sequences
        speed = groups * length / layout.n_gpus / sum(plan.seconds(model, layout, plan.GPUS[gpu]).values())
        expected.append([f"{published:,}", f"{speed:,.0f}", f"{100 * (speed / published - 1):+.0f} %"])
    assert rows == expected


# ---- the answer -----------------------------------------------------------------------------------------------------


def test_results_fit_and_are_in_the_order_of_speed_and_of_another_kind_each():
    fitting, others = plan.plan(LLAMA, H100, 64, 8, 64)
    steps = [sum(plan.seconds(LLAMA, found, H100).values()) for found in fitting]
    needs = [sum(plan.memory(LLAMA, found).values()) / 2**30 for found in (*fitting, *others)]
    assert steps == sorted(steps) and max(needs[: len(fitting)]) <= 0.95 * H100.memory < min(needs[len(fitting) :])
    kinds = [tuple(found.axes) for found in (*fitting, *others)]
    assert len(kinds) == len(set(kinds)) > 8


def test_every_mesh_keeps_the_batch_and_divides_the_model():
    found = list(plan.meshes(LLAMA, 48, 8, 96))
    assert {each.script for each in found} == {*plan.SCRIPTS} - {"min_CP.py", "min_PP.py"}, "for 32 heads and 32 layers"
    for each in found:
        assert each.n_gpus == 48 and each.tensor in (1, 2, 4, 8)
        assert each.replicate * each.shard * each.micro_batches * each.sequences == 96
        assert each.stages <= min(LLAMA.layers, each.micro_batches)
        assert each.recompute is False or each.script in ("llm_FSDP.py", "min_FSDP_TP.py")


@pytest.mark.parametrize("n_gpus", [1, 4, 8])
def test_each_script_takes_the_command_of_each_mesh(n_gpus, typed):
    model = plan.Model(layers=8, width=64, heads=8, kv_heads=8, hidden=256, matrices=2, vocabulary=256, length=64)
    scripts = set()
    for layout in plan.meshes(model, n_gpus, 8, 16):
        python, script, *words = shlex.split(plan.command(model, layout, 8, 16))
        typed(script, *words)
        args = importlib.import_module(script.removesuffix(".py")).parse_args()
        assert python == "python" and (args.nproc, args.global_batch_size) == (n_gpus, 16)
        assert (args.layers, args.width, args.heads, args.length) == (8, 64, 8, 64)
        for name in ("replicate", "shard", "tensor", "stages", "recompute"):
            assert getattr(args, name, getattr(layout, name)) == getattr(layout, name)
        assert getattr(args, "bf16", False) == (layout.number_bytes == 2)
        scripts.add(script)
    assert n_gpus == 1 or scripts == {*plan.SCRIPTS} - {"llm_FSDP.py"}


CARD = ("--gpus", "8", "--gpu", "rtx4090", "--lora", "16")


@pytest.mark.parametrize(
    "options, expected",
    [
        (("llama3-8b", "--gpus", "4"), {"recompute": True, "nproc": 4, "length": 8192, "global_batch_size": 4}),
        (("llama3-8b", *CARD), {"lora": 16, "nf4": False, "loss_chunk": 1024}),
        (("llama3-70b", *CARD, "--nf4", "--length", "4096"), {"lora": 16, "nf4": True, "loss_chunk": 1024}),
    ],
)
def test_llm_fsdp_takes_the_command_of_a_model_of_the_hub(options, expected, answer):
    (words,) = [words for _, script, *words in commands(answer(*options)) if script == "llm_FSDP.py"]
    args = vars(importlib.import_module("llm_FSDP").parse_args(words))
    assert args["model"] == plan.MODELS[options[0]].hub
    assert {name: args[name] for name in expected} == expected


def test_on_several_machines_it_is_a_command_of_torchrun(answer):
    first, *_ = commands(answer("llama3-8b", "--gpus", "64", "--gpus-per-node", "4"))
    assert first[:5] == ["torchrun", "--nnodes", "16", "--nproc-per-node", "4"] and "--nproc" not in first


def test_it_prints_the_memory_and_a_time_that_it_calls_rough(answer):
    first, second, *_, last = answer("llama3-8b").split("\n\n")
    assert first == "Rough projection of 8.03 billion parameters on 8 x h100, 8 sequences of 8,192 tokens per step"
    layout = plan.plan(LLAMA, H100, 8, 8, 8)[0][0]
    assert f"{layout.name}: roughly" in second
    held = plan.memory(LLAMA, layout)
    assert f"{sum(held.values()) / 2**30:.1f} of 79.2 GiB" in second
    assert all(f" {name} {size / 2**30:.1f}" in second for name, size in held.items() if size)
    assert last.startswith("Does not fit: ") and "DDP 8, recomputing (141 GiB)" in last


@pytest.mark.parametrize(
    "options",
    [
        ("llama3-405b", "--gpus", "8"),
        ("llama3-8b", *CARD[:4]),  # without adapters
        ("llama3-70b", *CARD, "--length", "4096"),  # without 4 bits
    ],
)
def test_what_fits_nowhere_exits_with_advice(options, answer):
    with pytest.raises(SystemExit, match=r"fits nowhere.*--gpus"):
        answer(*options)


def test_a_step_has_about_8192_tokens_per_gpu(answer):
    assert "64 sequences of 1,024 tokens" in answer("gpt2")


def test_a_changed_shape_is_not_the_hubs_model(answer):
    out = answer("llama3-8b", "--layers", "4")
    assert "llm_FSDP.py" not in out and "--layers 4 --width 4096 --heads 32" in out


@pytest.mark.parametrize(
    "options, names",
    [
        (("llama9",), ("llama9", "llama3-8b")),
        ((), ("MODEL",)),
        (("gpt2", "--width", "100", "--heads", "3"), ("--width", "100", "3")),
        (("gpt2", "--kv-heads", "5"), ("--heads", "12", "5")),
        (("gpt2", "--gpus", "0"), ("--gpus", "0", "at least 1")),
        (("gpt2", "--gpus", "12"), ("--gpus", "12", "8")),
        (("gpt2", "--nf4"), ("--nf4", "--lora")),
        (("gpt2", "--layers", "3", "--lora", "2"), ("--lora", "llm_FSDP.py")),
        (("gpt2", "--gpu", "v100"), ("--gpu", "v100", "h100")),
        (("gpt2", "--length", "70000"), ("--length", "70000", "65536")),
        (("gpt2", "--global-batch-size", "1.5"), ("--global-batch-size", "1.5")),
    ],
)
def test_bad_input_is_one_line(options, names, main_of):
    status, line = main_of("plan.py", *options)
    assert status == 2 and len(line.splitlines()) == 1
    for name in names:
        assert name in line


def test_it_needs_only_the_standard_library():
    status, out, err = run("-S", "plan.py", "llama3-8b")
    assert (status, err) == (0, "") and "1. FSDP 8: " in out
