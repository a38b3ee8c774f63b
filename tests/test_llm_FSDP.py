"""llm_FSDP.py: equal to a plain loop over transformers in one process, exact on resume, and its results load."""

import contextlib
import functools
import io
import json
import re
import signal
from pathlib import Path
from unittest import mock

import language
import peft
import pytest
import torch
import transformers
from conftest import exit_message, float64
from torch.nn import functional as F

import distributed as dist
import documents
import hub
import llm_FSDP

LENGTH = 64
BATCH = 6
STEPS = 5
IDS = torch.randint(0, 250, (2, 40), generator=torch.Generator().manual_seed(0))
ADAMW = {"lr": 0.003, "weight_decay": 0.1, "clip": 0.5, "warmup": 2}
SGD = {"lr": 0.05, "clip": 1e9, "warmup": 0}
CLIPPED = {"lr": 0.05, "clip": 1.0, "warmup": 0}
LORA = {"lora": 4, "lora_alpha": 6.0}
CASES = {  # name: (model, optimizer, options)
    "llama": ("llama", "SGD", SGD),
    "tied": ("llama_tied", "AdamW", ADAMW),
    "tied, clipped": ("llama_tied", "SGD", CLIPPED),
    "uneven": ("llama", "SGD", {**SGD, "global_batch_size": 7}),
    "padded": ("gpt2", "SGD", {**SGD, "pad": True}),
    "recomputed": ("qwen3", "AdamW", {**ADAMW, "recompute": True}),
    "gemma3": ("gemma3", "SGD", SGD),
    "qwen3_moe": ("qwen3_moe", "SGD", SGD),
    "lora": ("llama_tied", "SGD", {**SGD, **LORA, "lr": 0.5}),
    "lora, AdamW": ("llama", "AdamW", {**ADAMW, **LORA}),
    "lora, gpt2": ("gpt2", "SGD", {**SGD, **LORA, "lr": 0.5}),
    "lora, qwen3": ("qwen3", "SGD", {**SGD, **LORA, "lr": 0.5}),
    "lora, gemma3": ("gemma3", "SGD", {**SGD, **LORA, "lr": 0.5}),
    "lora, qwen3_moe": ("qwen3_moe", "SGD", {**SGD, **LORA, "lr": 0.5}),
}
ON = {1: ["llama", "tied", "lora"], 2: list(CASES), 3: ["llama", "tied", "uneven", "lora, AdamW"]}


def arguments(folder, model, output="out", **changes):
    """As parse_args would give them."""
    command = ["--model", str(folder / model), "--data", str(folder / "data.jsonl"), "--length", str(LENGTH)]
    command += ["--output-dir", str(folder / output), "--nproc", "1", "--log-every", "2", "--eval-every", "1000"]
    args = llm_FSDP.parse_args(command)
    args.global_batch_size = BATCH
    args.steps = STEPS
    vars(args).update(changes)
    return args


def float64_everywhere():
    """Experts too: their fast kernel on the CPU takes no float64."""
    stack = contextlib.ExitStack()
    stack.enter_context(float64())
    stack.enter_context(mock.patch("transformers.integrations.moe._can_use_grouped_mm", lambda *args: False))
    return stack


def make_sgd(params, lr, **kwargs):
    return torch.optim.SGD(params, lr=lr)


# ---- one process of plain transformers, one document at a time ------------------------------------------------------


def documents_of(args):
    """The documents of each row, and the numbers of the rows of each step."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    found, _ = llm_FSDP.load_documents(tokenizer, LENGTH, args)
    lists = documents.pack(found, LENGTH)
    if args.pad:
        lists = [[document] for document in found]
    return lists, [llm_FSDP.global_batch(len(lists), step, args) for step in range(STEPS)]


def plain_model(args, lora_A):
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float64)
    if args.lora:
        targets = "all-linear"
        if "moe" in args.model:  # PEFT also adapts experts, whose weights are no linear layers
            targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        config = peft.LoraConfig(r=args.lora, lora_alpha=args.lora_alpha, target_modules=targets)
        model = peft.get_peft_model(model, config).double()
        for name, param in model.named_parameters():
            if "lora_A" in name:
                param.data = lora_A[plain_name(name)].double().clone()
    return model


def plain_name(name):
    return name.removeprefix("base_model.model.").replace(".default", "").replace(".base_layer", "")


def train_alone(args, optimizer, lora_A):
    """Every step's loss, and the parameters by name."""
    model = plain_model(args, lora_A)
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": args.weight_decay},
        {"params": [param for param in trained if param.dim() < 2], "weight_decay": 0.0},
    ]
    if optimizer == "SGD":
        optimizer = torch.optim.SGD(trained)
    else:
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    lists, batches = documents_of(args)
    losses, norms = [], []
    for step, batch in enumerate(batches):
        found = [document for number in batch for document in lists[number]]
        n_targets = sum((targets != -100).sum() for _, targets in found)
        optimizer.zero_grad()
        total = 0
        for tokens, targets in found:
            logits = model(torch.tensor(tokens, dtype=torch.long)[None]).logits[0]
            loss = F.cross_entropy(logits, torch.tensor(targets, dtype=torch.long), reduction="sum") / n_targets
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(trained, args.clip).item())
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate(step, args)
        optimizer.step()
    assert (max(norms) > args.clip) == (args.clip < 100), "clipped where it should be"
    return torch.tensor(losses), {plain_name(name): param.detach() for name, param in model.named_parameters()}


def rate(step, args):
    """Up to 1 in equal steps, then along half a cosine to 0.1, which it would reach at STEPS."""
    if step < args.warmup:
        return (1, 2)[step] / 3
    return 0.1 + 0.9 * (1 + torch.cos(torch.pi * torch.tensor((step - args.warmup) / (STEPS - args.warmup)))).item() / 2


# ---- the script's own training --------------------------------------------------------------------------------------


def whole_parameters(model):
    return {name: hub.gathered(param).clone() for name, param in model.named_parameters()}


@torch.no_grad()
def logits_of(model):
    model.eval()
    with float64_everywhere():
        logits = model(IDS, use_cache=False).logits.clone()
    model.train()
    return logits


def train(folder, name, output="out", **changes):
    """What the script's functions make of a case: parameters before and after, losses, logits and an answer."""
    model_name, optimizer, options = CASES[name]
    args = arguments(folder, model_name, output, **{**options, **changes})
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if optimizer == "SGD":
            stack.enter_context(mock.patch("torch.optim.AdamW", make_sgd))
        tokenizer, whole, config, rows, held_out = llm_FSDP.prepare(args)
        model = llm_FSDP.make_model(whole, config, args)
        llm_FSDP.check_packing(model, args)
        before = whole_parameters(model)
        args.epochs = STEPS * args.global_batch_size / len(rows)
        trainer = llm_FSDP.Trainer(model, rows, held_out, args)
        losses, finished = trainer.train()
        result = {"before": before, "losses": losses, "finished": finished, "logits": logits_of(model)}
        result["answer"] = llm_FSDP.answer(model, tokenizer, "abc", n_tokens=8)
        result["parameters"] = whole_parameters(model)
        args.merge = bool(args.lora)
        llm_FSDP.write_results(model, tokenizer, config, args)
    return result


def work(local_rank, world_size, folder):
    folder = Path(folder)
    llm_FSDP.init_process_group()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    results = {}
    with float64_everywhere():
        for name in ON[world_size]:
            results[name] = train(folder, name, f"{name} {world_size}")
    torch.save(results, folder / f"{world_size} {local_rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, data, and what 1, 2 and 3 processes make of them."""
    folder = tmp_path_factory.mktemp("llm")
    for name in language.CONFIGS:
        language.make_folder(name, folder / name)
    language.write_jsonl(folder / "data.jsonl", language.records())
    return folder


@functools.cache
def job(folder, world_size):
    """Rank 0's results by case; those of the other ranks are the same."""
    dist.launch(work, str(folder), nprocs=world_size)
    results = [torch.load(folder / f"{world_size} {rank}.pt") for rank in range(world_size)]
    for other in results[1:]:
        for name, result in other.items():
            assert torch.equal(result["losses"], results[0][name]["losses"])
            assert torch.equal(result["logits"], results[0][name]["logits"])
    return results[0]


@pytest.mark.parametrize("name, world_size", [(name, world_size) for world_size in ON for name in ON[world_size]])
def test_equals_one_process(folder, name, world_size):
    """A plain loop over the documents, one at a time. In float64, but transformers' norms compute in float32."""
    result = job(folder, world_size)[name]
    model_name, optimizer, options = CASES[name]
    args = arguments(folder, model_name, **options)
    with float64_everywhere():
        losses, parameters = train_alone(args, optimizer, result["before"])
    assert losses[-1] < losses[0] - 0.02
    assert result["losses"].dtype == torch.float64
    assert (result["losses"] - losses).abs().max() < 1e-7
    assert result["parameters"].keys() == parameters.keys()
    for key, value in parameters.items():
        trained = ".lora_" in key if args.lora else True
        moved = (result["parameters"][key] - result["before"][key]).abs().max()
        assert (moved > 1e-5) == trained, key
        assert (result["parameters"][key] - value).abs().max() < 1e-6, key


@pytest.mark.parametrize("name", ON[2])
def test_results_load(folder, name):
    """With the trained model's logits: what transformers loads, what PEFT loads, and what is merged."""
    result = job(folder, 2)[name]
    model_name, _, options = CASES[name]
    output = folder / f"{name} 2"
    merged = output
    if "lora" in options:
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / model_name)
        adapted = peft.PeftModel.from_pretrained(base, output).double()
        assert (logits_of(adapted) - result["logits"]).abs().max() < 1e-5
        assert not list(output.glob("model*"))
        merged = output / "merged"
    model = transformers.AutoModelForCausalLM.from_pretrained(merged)
    assert model.dtype == torch.float32, "as in the files that were loaded"
    assert (logits_of(model.double()) - result["logits"]).abs().max() < 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "abc"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|user|>abc<|end|><|assistant|>"
    tokens = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    with float64_everywhere():
        answer = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(answer[0, tokens.shape[1] :]) == result["answer"]
    assert json.loads((merged / "generation_config.json").read_text())["eos_token_id"] == 256
    config = json.loads((merged / "config.json").read_text())
    assert config["architectures"] == json.loads((folder / model_name / "config.json").read_text())["architectures"]
    assert not list(output.glob(".incomplete"))
