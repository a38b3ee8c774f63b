"""plan.py: the formulas of the scripts, the fastest mesh first, commands that the scripts take, errors of one line."""

import dataclasses
import importlib
import re
import shlex
import sys

import pytest
import torch
from conftest import ROOT, run

import gpt
import plan

COSTS = (ROOT / "docs" / "costs.md").read_text().replace("\N{MINUS SIGN}", "-")
H100 = plan.GPUS["h100"]
N, B = 4, 8  # GPUs and sequences per step
MODEL = plan.Model(layers=8, width=1024, heads=16, kv_heads=16, hidden=4096, matrices=2, vocabulary=512, length=256)
P = MODEL.parameters
A = 4 * B * MODEL.length * MODEL.width
RING = 2 * (N - 1) / N * 4 * P


def mesh(script="min_FSDP.py", **sizes):
    return plan.Mesh(script, **{"number_bytes": 4, **sizes})


def answer(capsys, monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["plan.py", *options])
    plan.main()
    return capsys.readouterr().out


# ---- the formulas of docs/costs.md and of the docstrings ------------------------------------------------------------


def cell(script, column):
    """A cell of the table of all scripts."""
    row = re.search(rf"^\| \[`{script}`\].*$", COSTS, re.M)[0]
    return row.strip("| ").split(" | ")[column]


def value(formula, **numbers):
    """What a formula of the table gives, for example 8·P + 8·P/N."""
    formula = formula.replace("·", "*").partition(",")[0].removeprefix("about ")
    return eval(formula, {"P": P, "N": N, "A": A, "b": MODEL.layers, "ring": RING, **numbers})


def state(layout):
    held = plan.memory(MODEL, layout)
    return held["parameters"] + held["gradients"] + held["Adam"]


@pytest.mark.parametrize(
    "script, sizes",
    [
        ("min_DDP.py", {"replicate": N}),
        ("min_ZeRO.py", {"replicate": N}),
        ("min_FSDP.py", {"shard": N}),
        ("min_TP.py", {"tensor": N}),
        ("min_CP.py", {"context": N}),
        ("min_FSDP_TP.py", {"replicate": 3, "shard": 4, "tensor": 2}),
    ],
)
def test_memory_is_that_of_the_docs(script, sizes):
    assert state(mesh(script, **sizes)) == pytest.approx(value(cell(script, 2), **sizes))


def test_the_stages_of_a_pipeline_hold_about_as_much():
    assert state(mesh("min_PP.py", stages=N)) == pytest.approx(value(cell("min_PP.py", 2)), rel=0.02)
    sizes = {"stages": 2, "shard": 2, "tensor": 2}
    assert state(mesh("min_PP_FSDP_TP.py", **sizes)) == pytest.approx(
        value(cell("min_PP_FSDP_TP.py", 2), **sizes), rel=0.02
    )


def test_what_is_gathered_is_that_of_the_docs():
    """In bfloat16 half of 20 bytes per parameter of a block; in a pipeline 8 of a stage, with 2 for parameters."""
    assert cell("min_FSDP.py", 2).endswith(", and up to 20·block")
    assert cell("min_PP_FSDP_TP.py", 2).endswith(", and up to 8·P/(stages · tensor) in a step")
    layout = mesh(shard=N, tensor=2, number_bytes=2)
    wider = dataclasses.replace(MODEL, hidden=2 * MODEL.hidden)
    difference = plan.memory(wider, layout)["gathered"] - plan.memory(MODEL, layout)["gathered"]
    assert difference == pytest.approx(10 * (wider.block - MODEL.block) / 2)
    stages = mesh("min_PP_FSDP_TP.py", stages=N, tensor=2, number_bytes=2)
    assert plan.memory(MODEL, stages)["gathered"] == pytest.approx((2 + 4) * P / (N * 2), rel=0.05)


def test_bytes_sent_are_those_of_the_docs():
    def sent(**sizes):
        return plan.sent_bytes(MODEL, mesh(**sizes))

    assert sent(replicate=N)["replicate"] == pytest.approx(value(cell("min_DDP.py", 3)))
    assert sent(shard=N)["shard"] == pytest.approx(1.5 * RING) and cell("min_FSDP.py", 3) == "up to 1.5 ring"
    logits = (N - 1) / N * 4 * B * MODEL.length * MODEL.vocabulary
    assert sent(tensor=N, sequences=B)["tensor"] - logits == pytest.approx(value(cell("min_TP.py", 3)))
    context = sent(context=N, sequences=B)
    assert context["context"] + context["replicate"] == pytest.approx(value(cell("min_CP.py", 3)))
    assert sent(stages=N, micro_batches=B)["stages"] * (N - 1) == pytest.approx(2 * A * (N - 1))


def test_in_two_and_three_dimensions_it_sends_what_the_docs_say():
    assert cell("min_FSDP_TP.py", 3).startswith("3·(shard-1)/shard · 4·P/tensor, ") and "11 for 8 with" in COSTS
    assert cell("min_PP_FSDP_TP.py", 3).startswith("2·(shard-1)/shard · 4·P/(stages · tensor), ")
    layout = mesh("min_FSDP_TP.py", shard=4, tensor=2)
    assert plan.sent_bytes(MODEL, layout)["shard"] == pytest.approx(3 * 3 / 4 * 4 * P / 2)
    deeper = dataclasses.replace(MODEL, layers=MODEL.layers + 1)
    for recompute, times in ((False, 8), (True, 11)):
        again = dataclasses.replace(layout, recompute=recompute)
        block = plan.sent_bytes(deeper, again)["tensor"] - plan.sent_bytes(MODEL, again)["tensor"]
        assert block == pytest.approx(times / 2 * 4 * MODEL.length * MODEL.width)
    pipeline = mesh("min_PP_FSDP_TP.py", stages=2, shard=4, tensor=2, micro_batches=8)
    assert plan.sent_bytes(MODEL, pipeline)["shard"] == pytest.approx(2 * 3 / 4 * 4 * P / (2 * 2)), "once per step"


def test_llm_fsdp_gathers_for_each_row():
    row = mesh("llm_FSDP.py", shard=N, number_bytes=2)
    rows = dataclasses.replace(row, micro_batches=3)
    assert plan.sent_bytes(MODEL, row)["shard"] == pytest.approx((N - 1) / N * 8 * P)
    assert plan.sent_bytes(MODEL, rows)["shard"] == pytest.approx(3 * (N - 1) / N * 8 * P)


@pytest.mark.parametrize("nf4", [False, True])
def test_lora_holds_and_sends_what_the_docstring_of_llm_fsdp_says(nf4):
    layout = mesh("llm_FSDP.py", shard=N, number_bytes=2, lora=4, nf4=nf4, micro_batches=3)
    held = plan.memory(MODEL, layout)
    frozen = (9 / 16 if nf4 else 2) * (P - MODEL.root) + 2 * MODEL.root
    assert held["frozen"] == pytest.approx(frozen / N)
    adapters = 8 * 4 * (4 * 2 * 1024 + 2 * (1024 + 4096))  # the rank times inputs and outputs of each matrix
    assert held["parameters"] + held["gradients"] + held["Adam"] == 16 * adapters / N
    sent = plan.sent_bytes(MODEL, layout)["shard"]
    assert sent == pytest.approx(3 * (N - 1) / N * (2 * frozen + 8 * adapters))
    whole = dataclasses.replace(layout, lora=0, nf4=False)
    assert plan.seconds(MODEL, layout, H100)["compute"] == pytest.approx(
        2 / 3 * plan.seconds(MODEL, whole, H100)["compute"]
    )


def test_the_bubble_is_that_of_the_docs():
    """(N-1)/(M+N-1) of a step."""
    assert "| 1F1B | (N-1)/(M+N-1) |" in COSTS
    parts = plan.seconds(MODEL, mesh("min_PP.py", stages=N, micro_batches=B), H100._replace(inside=1e30))
    assert parts["bubble"] / sum(parts.values()) == pytest.approx((N - 1) / (B + N - 1))


def test_the_parameters_of_gpt_py():
    """All but norms, biases and positions, which are few in wide layers."""
    model = gpt.GPT(gpt.Config(layers=2, width=512, heads=8, length=16))
    shape = plan.Model(layers=2, width=512, heads=8, kv_heads=8, hidden=2048, matrices=2, vocabulary=256)
    assert shape.parameters == pytest.approx(sum(param.numel() for param in model.parameters()), rel=0.01)


def test_the_activations_of_a_block_are_what_torch_keeps():
    block = gpt.Block(gpt.Config(1, MODEL.width, MODEL.heads, 1))
    parameters = {param.untyped_storage().data_ptr() for param in block.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # while it is held, no other has its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(torch.randn(2, MODEL.length, MODEL.width, requires_grad=True))
    measured = sum(n_bytes for n_bytes, _ in kept.values())

    deeper = dataclasses.replace(MODEL, layers=MODEL.layers + 1)
    layout = mesh(sequences=2)
    planned = plan.memory(deeper, layout)["activations"] - plan.memory(MODEL, layout)["activations"]
    assert planned == pytest.approx(measured, rel=0.1)


def test_activations_of_the_other_layouts():
    def block(**sizes):
        layout = mesh("min_PP_FSDP_TP.py", **sizes)
        deeper = dataclasses.replace(MODEL, layers=MODEL.layers + layout.stages)
        return plan.memory(deeper, layout)["activations"] - plan.memory(MODEL, layout)["activations"]

    numbers = 4 * MODEL.length * MODEL.width
    assert block(recompute=True) == pytest.approx(numbers), "a block's input"
    assert block(context=2) == pytest.approx(8 * numbers)
    assert block(tensor=2) == pytest.approx(8 * numbers + 1 * numbers), "and half of two gathered inputs"
    assert block(stages=4, micro_batches=8) == pytest.approx(4 * 16 * numbers), "of four micro-batches"
    assert block(stages=4, micro_batches=2) == pytest.approx(2 * 16 * numbers)
    assert plan.memory(MODEL, mesh(tensor=2))["logits"] == 12 * MODEL.length * MODEL.vocabulary, "on each GPU"


def test_recomputing_all_is_a_third_more_work():
    layout = mesh("min_FSDP_TP.py", shard=N)
    again = dataclasses.replace(layout, recompute=True)
    assert plan.seconds(MODEL, again, H100)["compute"] == pytest.approx(
        4 / 3 * plan.seconds(MODEL, layout, H100)["compute"]
    )


def test_float32_takes_twice_the_time_of_bfloat16_and_uneven_stages_that_of_the_longest():
    layout = mesh(shard=N)
    fast = dataclasses.replace(layout, number_bytes=2)
    compute = plan.seconds(MODEL, layout, H100)["compute"]
    assert compute == pytest.approx(2 * plan.seconds(MODEL, fast, H100)["compute"])
    thirds = mesh("min_PP.py", stages=3)
    assert plan.seconds(MODEL, thirds, H100)["compute"] == pytest.approx(compute * 3 / 8)


def test_useful_operations_are_6_per_parameter_and_causal_attention():
    tiny = dataclasses.replace(MODEL, length=2)
    assert plan.operations(tiny) == pytest.approx(6 * (P - 512 * 1024), rel=1e-3), "not of the embedding"
    longer = dataclasses.replace(MODEL, length=MODEL.length + 1)
    assert plan.operations(longer) - plan.operations(MODEL) == 6 * MODEL.layers * MODEL.width


def test_what_shard_and_replicate_send_is_hidden_as_far_as_computing_lasts():
    layout = mesh(shard=N, sequences=1)
    slow = H100._replace(inside=1e9)
    parts = plan.seconds(MODEL, layout, slow)
    total = plan.sent_bytes(MODEL, layout)["shard"] / 1e9
    assert sum(parts.values()) == pytest.approx(total) and parts["compute"] < total
    assert plan.seconds(MODEL, layout, slow._replace(inside=1e15))["shard and replicate"] == 0
    zero = plan.seconds(MODEL, mesh("min_ZeRO.py", replicate=N), slow)
    assert zero["shard and replicate"] == pytest.approx(RING / 1e9), "it sends after backward"


def test_links_between_machines_are_shared_by_the_members_of_a_group():
    gpu = H100._replace(inside=10.0, between=2.0)
    layout = mesh(tensor=2, shard=4, replicate=2, stages=2)
    speeds = {axis: plan.bandwidth(layout, axis, gpu, 8) for axis in plan.AXES}
    assert (speeds["tensor"], speeds["shard"]) == (10, 10)
    assert speeds["replicate"] == speeds["stages"] == 2, "the eight GPUs of a machine have a network port each"
    assert plan.bandwidth(mesh(shard=16), "shard", gpu, 8) == 10, "a ring may use all eight: 16, but not more than 10"
    assert plan.bandwidth(mesh(shard=16), "shard", gpu, 4) == 8


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


def test_larger_models_need_more_axes_or_recomputing():
    fitting, _ = plan.plan(plan.MODELS["llama3-405b"], H100, 512, 8, 128)
    assert fitting[0].name == "FSDP 128 x TP 4, recomputing"


def test_results_fit_and_are_in_the_order_of_speed_and_of_another_kind_each():
    model = plan.MODELS["llama3-8b"]
    fitting, others = plan.plan(model, H100, 64, 8, 64)
    steps = [sum(plan.seconds(model, found, H100).values()) for found in fitting]
    needs = [sum(plan.memory(model, found).values()) / 2**30 for found in (*fitting, *others)]
    assert steps == sorted(steps) and max(needs[: len(fitting)]) <= 0.95 * H100.memory < min(needs[len(fitting) :])
    kinds = [tuple(found.axes) for found in (*fitting, *others)]
    assert len(kinds) == len(set(kinds)) > 8


def test_every_mesh_keeps_the_batch_and_divides_the_model():
    model = plan.MODELS["llama3-8b"]
    found = list(plan.meshes(model, 48, 8, 96))
    assert {each.script for each in found} == {*plan.SCRIPTS} - {"min_CP.py", "min_PP.py"}, "for 32 heads and 32 layers"
    for each in found:
        assert each.n_gpus == 48 and each.tensor in (1, 2, 4, 8)
        assert each.replicate * each.shard * each.micro_batches * each.sequences == 96
        assert each.stages <= min(model.layers, each.micro_batches)
        assert each.recompute is False or each.script in ("llm_FSDP.py", "min_FSDP_TP.py")


SHAPE = ("--layers", "8", "--width", "64", "--heads", "4", "--hidden", "256", "--length", "64")


def commands(capsys, monkeypatch, *options):
    """The words of each printed command."""
    out = answer(capsys, monkeypatch, *options)
    return [shlex.split(line.split(maxsplit=1)[1]) for line in re.findall(r"^ +start.*", out, re.M)]


@pytest.mark.parametrize("n_gpus", [1, 4, 8])
def test_each_script_takes_its_command(n_gpus, capsys, monkeypatch):
    found = commands(capsys, monkeypatch, "gpt2", *SHAPE, "--gpus", f"{n_gpus}", "--global-batch-size", "16")
    assert n_gpus == 1 or len(found) >= 8
    for python, script, *words in found:
        monkeypatch.setattr(sys, "argv", [script, *words])
        args = importlib.import_module(script.removesuffix(".py")).parse_args()
        assert python == "python" and (args.nproc, args.global_batch_size) == (n_gpus, 16)
        assert (args.layers, args.width, args.heads, args.length) == (8, 64, 4, 64)
        has_bf16 = script in ("min_FSDP.py", "min_FSDP_TP.py", "min_PP_FSDP_TP.py")
        assert getattr(args, "bf16", False) == has_bf16


def test_min_fsdp_tp_takes_recompute(monkeypatch):
    layout = mesh("min_FSDP_TP.py", shard=2, tensor=2, recompute=True)
    _, script, *words = shlex.split(plan.command(MODEL, layout, 8, 16))
    monkeypatch.setattr(sys, "argv", [script, *words])
    args = importlib.import_module("min_FSDP_TP").parse_args()
    assert args.recompute and (args.replicate, args.shard, args.tensor) == (1, 2, 2)


def test_llm_fsdp_takes_the_command_of_a_model_of_the_hub(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it makes a folder for its result
    found = commands(capsys, monkeypatch, "llama3-8b", "--gpus", "4")
    (words,) = [words for _, script, *words in found if script == "llm_FSDP.py"]
    args = importlib.import_module("llm_FSDP").parse_args(words)
    assert args.recompute
    assert (args.model, args.nproc, args.length) == ("meta-llama/Llama-3.1-8B", 4, 8192)
    assert args.global_batch_size == 4


@pytest.mark.parametrize(("model", "options"), [("llama3-8b", ()), ("llama3-70b", ("--nf4", "--length", "4096"))])
def test_large_models_fit_on_small_gpus_by_lora(model, options, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = commands(capsys, monkeypatch, model, "--gpus", "8", "--gpu", "rtx4090", "--lora", "16", *options)
    ((_, script, *words),) = found
    args = importlib.import_module("llm_FSDP").parse_args(words)
    assert (script, args.lora, args.nf4, args.loss_chunk) == ("llm_FSDP.py", 16, bool(options), 1024)
    less = ("--lora", "16", *options[1:]) if options else ()
    with pytest.raises(SystemExit, match="fits nowhere"):
        answer(capsys, monkeypatch, model, "--gpus", "8", "--gpu", "rtx4090", *less)


def test_on_several_machines_it_is_a_command_of_torchrun(capsys, monkeypatch):
    first, *_ = commands(capsys, monkeypatch, "llama3-8b", "--gpus", "64", "--gpus-per-node", "4")
    assert first[:5] == ["torchrun", "--nnodes", "16", "--nproc-per-node", "4"] and "--nproc" not in first


def test_it_prints_memory_by_part_and_a_time_that_it_calls_rough(capsys, monkeypatch):
    out = answer(capsys, monkeypatch, "llama3-8b", "--gpus", "8", "--gpu", "h100")
    model = plan.MODELS["llama3-8b"]
    fitting, _ = plan.plan(model, H100, 8, 8, 8)
    blocks = out.split("\n\n")
    assert blocks[0] == "Rough projection of 8.03 billion parameters on 8 x h100, 8 sequences of 8,192 tokens per step"
    for layout, block in zip(fitting, blocks[1:], strict=False):
        assert f"{layout.name}: roughly" in block
        held = plan.memory(model, layout)
        assert f"{sum(held.values()) / 2**30:.1f} of 79.2 GiB" in block
        printed = {name: float(size) for name, size in re.findall(r"(\S+) (\d+\.\d)(?= \+|$)", block, re.M)}
        for name, size in held.items():
            assert size == 0 or printed[name] == pytest.approx(size / 2**30, abs=0.051)
    assert blocks[-1].startswith("Does not fit: ") and "DDP 8, recomputing (141 GiB)" in blocks[-1]


def test_what_fits_nowhere_exits_with_advice(capsys, monkeypatch):
    with pytest.raises(SystemExit, match="--gpus"):
        answer(capsys, monkeypatch, "llama3-405b", "--gpus", "8")
    assert "Does not fit: " in capsys.readouterr().out


@pytest.mark.parametrize("gpu", plan.GPUS)
def test_every_gpu_is_planned(gpu, capsys, monkeypatch):
    assert "1. FSDP 8" in answer(capsys, monkeypatch, "llama3-1b", "--gpu", gpu)


def test_a_changed_shape_is_not_the_hubs_model(capsys, monkeypatch):
    out = answer(capsys, monkeypatch, "llama3-8b", "--layers", "4")
    assert "llm_FSDP.py" not in out and "--layers 4 --width 4096 --heads 32" in out
    assert "64 sequences of 1,024 tokens" in answer(capsys, monkeypatch, "gpt2")


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
