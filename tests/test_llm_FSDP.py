"""llm_FSDP.py: equal to a plain loop over transformers in one process, exact on resume, and its results load."""

import contextlib
import copy
import functools
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import language
import numpy as np
import peft
import pytest
import safetensors.torch
import torch
import transformers
from conftest import ROOT, Watch, exit_message, float64, run, start, wait_for
from conftest import whole as full
from test_recipes import blocks_of, execute
from tokenizers import Tokenizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import distributed as dist
import llm_documents
import llm_FSDP
import llm_hub

LENGTH = 64
BATCH = 6
STEPS = 3
N_ROWS = 28  # of the data that --seed 1 trains on
IDS = torch.randint(0, 250, (2, 40), generator=torch.Generator().manual_seed(0))
ADAMW = {"lr": 0.003, "weight_decay": 0.1, "clip": 0.5, "warmup": 2}
SGD = {"lr": 0.05, "clip": 0.0, "warmup": 0}  # a clip of 0 does not clip
CLIPPED = {"lr": 0.05, "clip": 1.0, "warmup": 0}
LORA = {"lora": 4, "lora_alpha": 6.0}
IN_4_BITS = {"nf4": True, "loss_chunk": 5, "recompute": True}
DPO = (ROOT / "docs" / "language_models.md").read_text().partition("(DPO)?\n")[2]
SLIDING = {**language.SMALL, "head_dim": 8, "sliding_window": 32}
CASES = {  # name: (model, optimizer, options)
    "llama": ("llama", "SGD", SGD),
    "tied": ("llama_tied", "AdamW", ADAMW),
    "tied, clipped": ("llama_tied", "SGD", CLIPPED),
    "uneven": ("llama", "SGD", {**SGD, "global_batch_size": 7}),
    "gathered once": ("llama_tied", "SGD", {**CLIPPED, "gather_once": True}),
    "replicas": ("llama_tied", "SGD", CLIPPED),
    "padded": ("gpt2", "SGD", {**SGD, "pad": True}),
    "in chunks": ("llama_tied", "SGD", {**CLIPPED, "loss_chunk": 5}),
    "recomputed": ("qwen3", "AdamW", {**ADAMW, "recompute": True}),
    "gemma3": ("gemma3", "SGD", SGD),
    "qwen3_moe": ("qwen3_moe", "SGD", SGD),
    "lora": ("llama_tied_float64", "SGD", {**SGD, **LORA, "lr": 0.5}),
    "lora, AdamW": ("llama_float64", "AdamW", {**ADAMW, **LORA, "lr": 0.03}),
    "lora, 4 bits": ("wide_float64", "SGD", {**SGD, **LORA, **IN_4_BITS, "lr": 0.5}),
    "lora, gpt2": ("gpt2_float64", "SGD", {**SGD, **LORA, "lr": 0.5}),
    "lora, qwen3": ("qwen3_float64", "SGD", {**SGD, **LORA, "lr": 0.5}),
    "lora, gemma3": ("gemma3_float64", "SGD", {**SGD, **LORA, "lr": 1.0}),
    "lora, qwen3_moe": ("qwen3_moe_float64", "SGD", {**SGD, **LORA, "lr": 0.5}),
}
ON = {1: ["llama", "tied", "lora"], 2: list(CASES), 3: ["tied", "uneven", "in chunks", "lora, 4 bits"]}
RESUMED = ["tied", "lora"]
# On two processes they stop after this step. Two steps are left. A scheduler that starts anew shows in the second.
STOP = 1


def arguments(folder, model, output="out", **changes):
    """As parse_args would give them."""
    command = ["--model", str(folder / model), "--data", str(folder / "data.jsonl"), "--length", str(LENGTH)]
    command += ["--output", str(folder / output), "--nproc", "1", "--log-every", "2", "--eval-every", "1000"]
    args = llm_FSDP.parse_args(command)
    args.global_batch_size = BATCH
    vars(args).update(changes)
    if args.checkpoint_dir:
        os.makedirs(args.checkpoint_dir, exist_ok=True)  # as parse_args does
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
    found, _ = llm_FSDP.load_documents(tokenizer, args.data, args.eval_data, LENGTH)
    found = list(found)
    lists = llm_documents.pack(found, LENGTH)
    if args.pad:
        lists = [[document] for document in found]
    return lists, batches_of(lists, args)


def batches_of(rows, args):
    """The numbers of the rows of each step."""
    order = llm_documents.order_of(len(rows), STEPS * args.global_batch_size, args.seed)
    return [order[step * args.global_batch_size : (step + 1) * args.global_batch_size] for step in range(STEPS)]


def plain_model(args, lora_A):
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float64)
    if args.nf4:
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and name != "lm_head":
                layer.weight.data = rounded_to_nf4(layer.weight.data)
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


def rounded_to_nf4(weight):
    """The definition: in each block of 64 the nearest of 16 levels, times the largest absolute number."""
    blocks = weight.float().reshape(-1, 64)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    levels = torch.tensor(llm_hub.LEVELS, dtype=torch.float32)
    nearest = (blocks[..., None] / scales[..., None] - levels).abs().argmin(dim=2)
    return (levels[nearest] * scales).view_as(weight).double()


def plain_name(name):
    return name.removeprefix("base_model.model.").replace(".default", "").replace(".base_layer", "")


def train_alone(args, optimizer, lora_A):
    """Every step's loss, and the parameters by name, before and after."""
    model = plain_model(args, lora_A)
    before = {plain_name(name): param.detach().clone() for name, param in model.named_parameters()}
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": args.weight_decay},
        {"params": [param for param in trained if param.dim() < 2], "weight_decay": 0.0},
    ]
    optimizers = {"SGD": torch.optim.SGD(trained), "AdamW": torch.optim.AdamW(groups, betas=(0.9, 0.95))}
    optimizer = optimizers[optimizer]
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
        norms.append(torch.nn.utils.clip_grad_norm_(trained, args.clip or math.inf).item())
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate(step, args)
        optimizer.step()
    assert max(norms) > args.clip, "clipped where it should be"
    after = {plain_name(name): param.detach() for name, param in model.named_parameters()}
    return torch.tensor(losses), before, after


def rate(step, args):
    """Up to 1 in equal steps, then along half a cosine to 0.1, which it would reach at STEPS."""
    if step < args.warmup:
        return (1, 2)[step] / 3
    return 0.1 + 0.9 * (1 + torch.cos(torch.pi * torch.tensor((step - args.warmup) / (STEPS - args.warmup)))).item() / 2


# ---- the script's own training --------------------------------------------------------------------------------------


def whole_parameters(model, part=""):
    """The parameters with `part` in their names, each whole on every rank."""
    found = {}
    for name, param in model.named_parameters():
        if part in name:
            value = full(param.detach())
            found[plain_name(name)] = value.clone()
    return found


@torch.no_grad()
def logits_of(model):
    model.eval()
    with float64_everywhere():
        logits = model(IDS, use_cache=False).logits.clone()
    model.train()
    return logits


class Stopped(Exception):
    """Instead of the exit of a process that has received SIGTERM."""


@contextlib.contextmanager
def preempted(agreed):
    """As after SIGTERM, wherever `agreed` returns True."""
    with (
        mock.patch("checkpoint.Preemption.agreed", lambda preemption: agreed()),
        mock.patch("checkpoint.Preemption.leave", mock.Mock(side_effect=Stopped)),
    ):
        yield


def train(folder, name, output=None, **changes):
    """What the script's functions make of a case: losses, parameters, logits, and the adapters' random lora_A.

    With a folder `output`, the model is also written to it.
    """
    model_name, optimizer, options = CASES[name]
    args = arguments(folder, model_name, output or "out", **{**options, **changes})
    shares, finished = [], True
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(mock.patch("checkpoint.Preemption.leave", mock.Mock(side_effect=Stopped)))
        if optimizer == "SGD":
            stack.enter_context(mock.patch("torch.optim.AdamW", make_sgd))
        if name == "replicas":
            stack.enter_context(mock.patch("llm_FSDP.init_device_mesh", mesh_of_the_recipe))
        model, whole, types, rows, held_out = made(args)
        llm_hub.check_rows(model, args.length, pad=False)
        lora_A = whole_parameters(model, "lora_A")
        args.epochs = STEPS * args.global_batch_size / len(llm_documents.mapped(rows))
        with mock.patch.object(llm_FSDP, "backward", recording(llm_FSDP.backward, shares)):
            try:
                llm_FSDP.train(model, rows, held_out, args)
            except Stopped:
                finished = False
        losses = dist.all_reduce(torch.stack(shares))
        result = {"lora_A": lora_A, "losses": losses, "finished": finished, "logits": logits_of(model)}
        result["parameters"] = whole_parameters(model)
        if output:
            llm_hub.save(model, whole, types, args.output)
    return result


def mesh_of_the_recipe(*sizes):
    """Of two machines with one process each."""
    (block,) = blocks_of("How do I shard within a machine and replicate between machines?")
    mesh = execute(block, init_device_mesh=init_device_mesh).make_mesh(2)
    assert (mesh.mesh_dim_names, mesh.shape) == (("replicate", "shard"), (2, 1))
    return mesh


def recording(function, results):
    def record(*args):
        results.append(function(*args))
        return results[-1]

    return record


def work(local_rank, world_size, folder):
    folder = Path(folder)
    dist.init_process_group(even_alone=True)
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    results = {}
    with float64_everywhere():
        for name in ON[world_size]:
            results[name] = train(folder, name, f"{name} 2" if world_size == 2 else None)
        for name in RESUMED:
            stopped = {"checkpoint_dir": str(folder / f"{name} stopped")}
            resumed = {"checkpoint_dir": str(folder / f"{name} resumed {world_size}")}
            if world_size == 2:
                with mock.patch("checkpoint.Preemption.agreed", mock.Mock(return_value=True)):
                    results[f"{name} stopped"] = train(folder, name, **stopped)
                if local_rank == 0:
                    for number in ON:
                        shutil.copytree(stopped["checkpoint_dir"], folder / f"{name} resumed {number}")
                dist.barrier()
            results[f"{name} resumed"] = train(folder, name, **resumed)
    return dist.gather_objects(results)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, data, and what 1, 2 and 3 processes make of them."""
    folder = tmp_path_factory.mktemp("llm")
    for name in language.CONFIGS:
        language.make_folder(name, folder / name)
        language.make_folder(name, folder / f"{name}_float64", torch.float64)
    language.write_jsonl(folder / "data.jsonl", language.records())
    return folder


@functools.cache
def job(folder, world_size):
    """Rank 0's results by case. The other ranks have the same."""
    if world_size != 2:
        job(folder, 2)  # saves the checkpoints that are resumed here
    results = dist.launch(work, str(folder), nprocs=world_size)
    for other in results[1:]:
        for name, result in other.items():
            assert torch.equal(result["losses"], results[0][name]["losses"])
            assert torch.equal(result["logits"], results[0][name]["logits"])
    return results[0]


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("name, world_size", [(name, world_size) for world_size in ON for name in ON[world_size]])
def test_equals_one_process(folder, name, world_size):
    """A plain loop over the documents, one at a time. In float64, but transformers' norms compute in float32."""
    result = job(folder, world_size)[name]
    model_name, optimizer, options = CASES[name]
    args = arguments(folder, model_name, **options)
    with float64_everywhere():
        losses, before, parameters = train_alone(args, optimizer, result["lora_A"])
    assert losses[-1] < losses[0] - 0.02
    assert result["losses"].dtype == torch.float64
    assert (result["losses"] - losses).abs().max() < 1e-7
    trained = {key: value for key, value in result["parameters"].items() if not key.endswith(("packed", "scales"))}
    parameters = {key: value for key, value in parameters.items() if key in trained or not args.nf4}
    assert trained.keys() == parameters.keys()
    for key, value in parameters.items():
        moved = (result["parameters"][key] - before[key]).abs().max()
        assert (moved > 1e-5) == (".lora_" in key or not args.lora), key
        assert (result["parameters"][key] - value).abs().max() < 1e-6, key


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("name", ON[2])
def test_results_load(folder, name):
    """The saved model gives the trained model's logits: loaded by transformers, or by PEFT."""
    result = job(folder, 2)[name]
    model_name, _, options = CASES[name]
    output = folder / f"{name} 2"
    if "lora" in options:
        model = peft.AutoPeftModelForCausalLM.from_pretrained(output, dtype="auto")
        assert not list(output.glob("model*")) and not (output / "config.json").exists()
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(output)
        assert model.dtype == torch.float32, "as in the files that were loaded"
    for file in (folder / model_name).iterdir():
        if "safetensors" not in file.name and not ("lora" in options and file.name == "config.json"):
            assert (output / file.name).read_bytes() == file.read_bytes(), "the base's own file"
    if "nf4" in options:  # PEFT puts the adapters beside the weights in full precision
        for module in model.modules():
            if hasattr(module, "lora_A"):
                module.base_layer.weight.data = rounded_to_nf4(module.base_layer.weight.data).float()
    assert (logits_of(model.double()) - result["logits"]).abs().max() < 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "abc"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|user|>abc<|end|><|assistant|>"
    assert not Path(f"{output}.incomplete").exists() and not (output / "temporary").exists()


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("name, world_size", [(name, world_size) for name in RESUMED for world_size in ON])
def test_resumes_inside_an_epoch_on_any_number_of_processes(folder, name, world_size):
    """It stopped on two processes, as after SIGTERM, and ends as if it had not; on two, bit for bit."""
    whole = job(folder, 2)[name]
    stopped = job(folder, 2)[f"{name} stopped"]
    resumed = job(folder, world_size)[f"{name} resumed"]
    assert whole["finished"] and resumed["finished"] and not stopped["finished"]
    assert torch.equal(stopped["losses"], whole["losses"][:STOP])
    assert len(resumed["losses"]) == STEPS - STOP
    tolerance = 0 if world_size == 2 else 1e-6
    assert (resumed["losses"] - whole["losses"][STOP:]).abs().max() <= tolerance
    for key, value in whole["parameters"].items():
        assert (resumed["parameters"][key] - value).abs().max() <= tolerance, key
    checkpoints = folder / f"{name} resumed {world_size}"
    assert {path.name for path in checkpoints.iterdir()} == {
        *(f"step-{STOP}", f"step-{STEPS}", "rows.npy", "held-out.npy")
    }
    metadata = torch.distributed.checkpoint.FileSystemReader(checkpoints / f"step-{STOP}").read_metadata()
    names = [key for key in metadata.state_dict_metadata if key.startswith("model.")]
    if name == "lora":
        assert len(names) == 2 * 7 * 2 and all(".lora_" in key for key in names), "the model is left out"


# ---- the script as it is run ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1560)
def test_without_a_model_and_a_network_it_learns_and_answers(tmp_path):
    env = {"HF_HOME": str(tmp_path / "empty"), "HF_HUB_OFFLINE": "1"}
    status, stdout, stderr = run("llm_FSDP.py", "--nproc", "2", "--output", tmp_path / "out", env=env, timeout=1500)
    assert (status, stderr) == (0, "")
    held_out = [float(loss) for loss in re.findall(r"held-out (.*)", stdout)]
    assert held_out[0] > 7 and held_out[-1] < 3.6
    line = r"^step 20/370 \| loss \d\.\d{4} \| norm \d\.\d\d \| lr \d\.\de-03 \| [\d,]+ tokens/s \| [\d,]+ MB$"
    assert re.search(line, stdout, re.M)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").num_parameters() == 664_192


def small_run(folder, output, nproc):
    """The options of a run of 200 steps, which saves every tenth, and prints every step."""
    command = ["--model", folder / "llama", "--data", folder / "data.jsonl", "--length", LENGTH, "--seed", 1]
    command += ["--epochs", (200 * 6 - 3) / N_ROWS, "--global-batch-size", 6, "--lr", 0.01]
    command += ["--log-every", 1, "--save-every", 10]
    return [*command, "--output", output, "--checkpoint-dir", f"{output} checkpoints", "--nproc", nproc]


def steps_in(log):
    """The last step that is printed, or 0."""
    found = re.findall(r"^step (\d+)/", log.read_text(), re.M)
    return int(found[-1]) if found else 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_and_sigterm_change_nothing(folder, tmp_path):
    """Killed at any moment and once in a save, stopped by SIGTERM; each time resumed by another number of processes."""
    status, stdout, stderr = run("llm_FSDP.py", *small_run(folder, tmp_path / "whole", 2))
    assert (status, stderr) == (0, "") and "step 200/200 | loss" in stdout
    output = tmp_path / "killed"
    checkpoints = Path(f"{output} checkpoints")
    log = tmp_path / "log"
    log.touch()
    draw = random.Random(0)
    for number, nproc in enumerate((2, 3, 1, 2), 1):
        process = start("llm_FSDP.py", *small_run(folder, output, nproc), log=log)
        aim = 30 * number + draw.randint(0, 10)
        if number == 3:
            wait_for(lambda aim=aim: steps_in(log) >= aim and is_incomplete(checkpoints), process)
        else:
            wait_for(lambda aim=aim: steps_in(log) >= aim, process)
        process.kill()
        process.wait()
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    options = small_run(folder, output, 2)[:-2]  # without --nproc, which torchrun would take for an option of its own
    process = start(*command, "llm_FSDP.py", *options, log=log, env={"OMP_NUM_THREADS": "1"})
    wait_for(lambda: steps_in(log) >= 135, process)
    process.terminate()
    process.wait(timeout=100)
    stopped_at = steps_in(log)
    assert stopped_at < 200 and (checkpoints / f"step-{stopped_at}" / ".metadata").exists(), "it saved at once"
    status, stdout, stderr = run("llm_FSDP.py", *small_run(folder, output, 2))
    assert (status, stderr) == (0, "")
    assert re.findall(r"^step (\d+)/200 \| loss", stdout, re.M)[0] == str(stopped_at + 1)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
    for name, value in transformers.AutoModelForCausalLM.from_pretrained(output).state_dict().items():
        assert (value - expected[name]).abs().max() < 1e-3, name


def is_incomplete(checkpoints):
    """Is a checkpoint being written at this moment?"""
    return any(not (path / ".metadata").exists() for path in checkpoints.glob("step-*"))


# ---- the CPU's memory -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watch_peak(peaks):
    """Append by how much the anonymous memory of this process grows while the block runs."""
    seen = [anonymous_bytes()]
    is_done = threading.Event()

    def watch():
        while not is_done.wait(timeout=0.002):
            seen.append(anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    is_done.set()
    thread.join()
    peaks.append(max(*seen, anonymous_bytes()) - seen[0])


def anonymous_bytes():
    """Without mapped files, whose pages the system may drop at any time."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def measure_memory(local_rank, world_size, folder):
    dist.init_process_group(even_alone=True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    args = arguments(Path(folder), "large", f"large {world_size}")
    peaks = []
    with contextlib.redirect_stdout(io.StringIO()):
        whole, config, types, *_ = llm_FSDP.prepare(args)
        with watch_peak(peaks):
            model = llm_FSDP.make_model(whole, config, types, args)
            if local_rank == 0:
                whole.to("meta")
        with watch_peak(peaks):
            llm_hub.save(model, whole, types, args.output)
    return dist.gather_objects(peaks)


@pytest.mark.slow
def test_the_cpus_hold_one_model_and_not_one_per_process(folder):
    """Loading fills the shards, one model over all ranks; saving collects one more. One tensor at a time is sent."""
    config = transformers.LlamaConfig(
        vocab_size=16000, hidden_size=1024, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=8,
        intermediate_size=2816, tie_word_embeddings=False, max_position_embeddings=256,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    n_bytes = 4 * model.num_parameters()
    largest = max(4 * param.numel() for param in model.parameters())
    assert 400e6 < n_bytes < 420e6
    model.save_pretrained(folder / "large", max_shard_size="100MB")
    language.byte_tokenizer().save_pretrained(folder / "large")
    del model
    for world_size in (1, 2, 4):
        loading, saving = zip(*dist.launch(measure_memory, str(folder), nprocs=world_size), strict=True)
        print(world_size, [[round(n / 1e6) for n in part] for part in (loading, saving)], flush=True)
        # The lower bounds say that the peak was seen. They leave room for freed memory that is used again.
        assert 0.8 * n_bytes < sum(loading) < 1.1 * n_bytes + 3 * world_size * largest
        assert 0.8 * n_bytes * (world_size > 1) < sum(saving) < 1.2 * n_bytes + 3 * world_size * largest
        for rank in range(1, world_size):
            assert loading[rank] < n_bytes / world_size + 4 * largest and saving[rank] < 4 * largest
        shutil.rmtree(folder / f"large {world_size}")


# ---- bfloat16, memory and collectives -------------------------------------------------------------------------------


def held_bytes(model, optimizer):
    """Of the parameters, of their gradients, and of the optimizer's state, by whether they are trained."""
    held = {True: 0, False: 0}
    for param in model.parameters():
        state = [value for value in optimizer.state.get(param, {}).values() if value.dim()]
        for tensor in [param, param.grad, *state]:
            if tensor is not None:
                held[param.requires_grad] += tensor.to_local().nbytes
    return held


def mix(folder, output, model="bfloat16", **changes):
    """A model in bfloat16 is loaded, trained by mixed precision for a step, and written."""
    args = arguments(folder, model, output, bf16=True, **changes)
    with contextlib.redirect_stdout(io.StringIO()):
        model, whole, types, rows, _ = made(args)
        n_params = {True: 0, False: 0}
        for param in model.parameters():
            n_params[param.requires_grad] += param.numel()
        optimizer, _ = llm_FSDP.make_optimizer(model, STEPS, args.lr, args.warmup, args.weight_decay)
        trained = [param for param in model.parameters() if param.requires_grad]
        first_rows, own_rows, _ = [
            list(llm_documents.share_of(rows, batch)) for batch in batches_of(llm_documents.mapped(rows), args)
        ]
        step(model, first_rows, optimizer, trained, args)
        with Watch() as watch:
            step(model, own_rows, optimizer, trained, args)
        held_types = {str(param.dtype) for param in trained}
        result = {"params": n_params, "held": held_bytes(model, optimizer), "types": held_types}
        result |= {
            "gathered": watch.types_of("gather"),
            "reduced": watch.types_of("reduce"),
            "host reads": watch.host_reads,
        }
        result["logits"] = logits_of(model)
        llm_hub.save(model, whole, types, args.output)
    return result


def step(model, own_rows, optimizer, trained, args):
    optimizer.zero_grad()
    llm_FSDP.backward(model, own_rows, args.gather_once)
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()


def work_mixed(local_rank, world_size, folder):
    folder = Path(folder)
    dist.init_process_group(even_alone=True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    results = {"full": mix(folder, "mixed"), "lora": mix(folder, "mixed lora", lora=4, lora_alpha=8.0)}
    results["once"] = mix(folder, "mixed once", gather_once=True)
    results["nf4"] = mix(folder, "mixed nf4", "bfloat16 wide", lora=4, lora_alpha=8.0, nf4=True)
    return dist.gather_objects(results)


@pytest.fixture(scope="module")
def mixed(folder):
    language.make_folder("llama", folder / "bfloat16", torch.bfloat16)
    language.make_folder("wide", folder / "bfloat16 wide", torch.bfloat16)
    return dist.launch(work_mixed, str(folder), nprocs=2)


@pytest.mark.guard
@pytest.mark.slow
def test_bytes_that_are_held_and_types_that_are_sent_are_those_of_the_docstring(mixed):
    """Per row: two layers twice, and embedding and root; of the adapters only those two layers are reduced."""
    for result in mixed:
        full, lora, once = result["full"], result["lora"], result["once"]
        assert full["held"][True] == pytest.approx(16 * full["params"][True] / 2, rel=0.01)
        assert lora["held"][False] == pytest.approx(2 * lora["params"][False] / 2, rel=0.01)
        assert lora["held"][True] == pytest.approx(16 * lora["params"][True] / 2, rel=0.01)
        assert lora["params"][False] == full["params"][True]
        for each, n_reduced in ((full, 4), (lora, 2)):
            assert each["types"] == {"torch.float32"}
            assert set(each["gathered"]) == {"torch.bfloat16"}
            assert each["reduced"] == ["torch.float32"] * n_reduced * (BATCH // 2)
            assert each["host reads"] == BATCH // 2, "in each forward transformers looks for packed positions"
        assert once["gathered"] == ["torch.bfloat16"] * 4 and once["reduced"] == ["torch.float32"] * 4, "once per step"
        assert once["held"] == full["held"], "after the step, the shards alone are left"
        n_packed = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 64)
        n_others = (2 * 259 + 5) * 64  # embedding, head and norms
        assert result["nf4"]["held"][False] == pytest.approx((9 / 16 * n_packed + 2 * n_others) / 2, rel=0.01)
        assert "torch.float32" not in result["nf4"]["gathered"]


@pytest.mark.guard
@pytest.mark.slow
def test_results_of_mixed_precision_are_bfloat16_and_bit_for_bit_what_was_trained(folder, mixed):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "mixed")
    assert model.dtype == torch.bfloat16
    assert torch.equal(logits_of_bfloat16(model), mixed[0]["full"]["logits"])
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "bfloat16")
    adapted = peft.PeftModel.from_pretrained(base, folder / "mixed lora")
    expected = mixed[0]["lora"]["logits"]
    assert (logits_of_bfloat16(adapted) - expected).abs().max() < 0.05 * expected.std()


PAIRS = [[[("user", "2+2?"), ("assistant", "4.")], [("user", "2+2?"), ("assistant", "it is five")]]]
PAIRS += [[[("user", "Hi."), ("assistant", "Hello!")], [("user", "Hi."), ("assistant", "no")]]]


def work_dpo(local_rank, world_size, folder):
    """The loss, and the gradient of all adapters, of two pairs and a row of padding."""
    dist.init_process_group(even_alone=True)
    transformers.utils.logging.set_verbosity_error()
    folder = Path(folder)
    to_rows, loss = re.findall(r"```python\n(.*?)^```", DPO, re.M | re.S)
    names = {"torch": torch, "F": F}
    exec(to_rows + loss, names)
    with float64_everywhere(), contextlib.redirect_stdout(io.StringIO()):
        if local_rank == 0:
            lines = []
            for pair in PAIRS:
                sides = [[{"role": role, "content": words} for role, words in side] for side in pair]
                lines.append(("a line", json.dumps(dict(zip(("chosen", "rejected"), sides, strict=True)))))
            names["write_pairs"](folder / "pairs.npy", lines, language.byte_tokenizer(), LENGTH)
        dist.barrier()
        pairs = folder / "pairs.npy"
        options = {"lora": 2, "lora_alpha": 4.0, "data": [pairs], "eval_data": [pairs], "length": None}
        args = arguments(folder, "llama_float64", f"dpo {world_size}", **options)
        model, _, _, rows, _ = made(args)
        llm_hub.check_rows(model, LENGTH, pad=False)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_B" in name:
                    param.copy_(0.05 * torch.ones_like(param))
        own_rows = list(llm_documents.share_of(rows, [0, 1]))
        with mock.patch.object(llm_FSDP, "sum_of_losses", names["sum_of_losses"]):
            share = llm_FSDP.backward(model, own_rows)
            padding = llm_documents.on_device(llm_documents.make_rows([[]], LENGTH)[0])
            assert names["sum_of_losses"](model, padding) == 0
        found = {plain_name(name): full(param.grad) for name, param in model.named_parameters() if param.requires_grad}
        values = {plain_name(name): full(param.detach()) for name, param in model.named_parameters()}
    return dist.gather_objects((dist.all_reduce(share.detach()), found, values))


@pytest.mark.guard
@pytest.mark.slow
def test_dpo_of_the_page_equals_its_definition(folder):
    """-log sigmoid(beta (gain of the chosen answer - gain of the rejected one)), one conversation at a time."""
    results = {n: dist.launch(work_dpo, str(folder), nprocs=n)[0] for n in (1, 2)}
    args = arguments(folder, "llama_float64", lora=2, lora_alpha=4.0, output="no folder")
    _, _, values = results[1]
    with float64_everywhere():
        model = plain_model(args, values)
        for name, param in model.named_parameters():
            param.data = values[plain_name(name)].clone()
        total, n_targets = 0, 0
        for pair in PAIRS:
            gains = []
            for side in pair:
                record = {"messages": [{"role": role, "content": words} for role, words in side]}
                (((tokens, targets),),) = llm_documents.read(
                    [("", json.dumps(record))], language.byte_tokenizer(), LENGTH
                )
                tokens, targets = torch.tensor(tokens).long()[None], torch.tensor(targets).long()
                n_targets += (targets >= 0).sum()
                losses = [F.cross_entropy(model(tokens).logits[0], targets, reduction="sum")]
                with model.disable_adapter():
                    losses.append(F.cross_entropy(model(tokens).logits[0], targets, reduction="sum"))
                gains.append(losses[1].detach() - losses[0])
            total = total - F.logsigmoid(0.1 * (gains[0] - gains[1]))
        (total / n_targets).backward()
    for loss, gradients, _ in results.values():
        assert (loss - total.detach() / n_targets).abs() < 1e-9
        for name, param in model.named_parameters():
            if ".lora_" in name:
                assert (gradients[plain_name(name)] - param.grad).abs().max() < 1e-8, name


def test_of_a_layer_in_4_bits_no_weight_is_saved_for_backward():
    layer, saved = llm_hub.LinearNF4(nn.Linear(128, 64)), []
    inputs = torch.randn(3, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        layer(inputs).sum().backward()
    kept = {tensor.data_ptr() for tensor in saved}
    assert kept == {inputs.data_ptr()}, "which the adapter beside it keeps too; the layer has its 4 bits"
    weight = llm_hub.unpacked(layer.packed, layer.scales, layer.levels_of_byte)
    assert (inputs.grad - weight.sum(dim=0)).abs().max() < 1e-6
    zeros = nn.Linear(64, 1)
    nn.init.zeros_(zeros.weight)
    layer = llm_hub.LinearNF4(zeros)
    assert not llm_hub.unpacked(layer.packed, layer.scales, layer.levels_of_byte).any()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_4_bits_are_refused_for_layers_that_are_not_whole_blocks(name, folder, group):
    args = arguments(folder, name, lora=2, lora_alpha=4.0, nf4=True)
    assert "needs linear layers whose inputs are a multiple of 64" in exit_message(llm_FSDP.prepare, args)


class LargestLogits(TorchDispatchMode):
    """The most bytes of a tensor (1, targets, vocabulary)."""

    n_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 3 and tensor.shape[-1] == 259:
                self.n_bytes = max(self.n_bytes, tensor.nbytes)
        return output


@pytest.mark.parametrize("lora", [None, 2])
@pytest.mark.parametrize("name", [*language.FIVE, "capped"])
def test_the_loss_in_chunks_equals_that_of_a_row_and_has_the_logits_of_one_chunk(name, lora):
    """In float64, and the gradients too. Gemma 2 caps its logits behind the output layer."""
    capped = functools.partial(transformers.Gemma2Config, **SLIDING, final_logit_softcapping=0.5)
    found = []
    with float64_everywhere():
        torch.manual_seed(0)
        model = llm_hub.build_model(language.CONFIGS.get(name, capped)(), torch.float64)
        model = llm_FSDP.change_model(model, lora, 4.0)
        tokens = torch.randint(250, (1, 50))
        row = SimpleNamespace(tokens=tokens, positions=torch.arange(50)[None] % 20, places=torch.arange(3, 40))
        row.targets = tokens[0, 4:41]
        for size in (None, 7, 100):
            each = copy.deepcopy(model)
            if size:
                llm_hub.compute_loss_in_chunks(each, size, llm_FSDP.loss_of)
            with LargestLogits() as largest:
                loss = llm_FSDP.sum_of_losses(each, row)
            loss.backward()
            trained = [param for param in each.parameters() if param.requires_grad]
            found.append((loss.detach(), *[param.grad for param in trained]))
            assert largest.n_bytes == 8 * 259 * min(size or 37, 37)
            row_without_targets = SimpleNamespace(**vars(row) | {"places": row.places[:0], "targets": row.targets[:0]})
            assert llm_FSDP.sum_of_losses(each, row_without_targets) == 0
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert (one - other).abs().max() <= 1e-12


@torch.no_grad()
def logits_of_bfloat16(model):
    return model.eval()(IDS, use_cache=False).logits


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def group():
    """Of this process alone."""
    dist.init_process_group(even_alone=True)
    transformers.utils.logging.set_verbosity_error()
    yield
    dist.cleanup()


def copy_of(folder, tmp_path):
    shutil.copytree(folder / "llama", tmp_path / "llama")
    shutil.copy(folder / "data.jsonl", tmp_path)
    return tmp_path / "llama"


def remove(path, pattern):
    for file in path.glob(pattern):
        file.unlink()


def write(path, files):
    for name, content in files.items():
        (path / name).write_text(content)


def configure(path, changes, name="config.json"):
    write(path, {name: json.dumps(json.loads((path / name).read_text()) | changes)})


def configure_tokenizer(path, changes):
    configure(path, changes, "tokenizer_config.json")


def move(path, name):
    path.rename(path.with_name(name))


def cut_in_half(path, name):
    os.truncate(path / name, (path / name).stat().st_size // 2)


def change_weights(path, changes):
    """Of the first file. None removes a weight."""
    file = sorted(path.glob("*.safetensors"))[0]
    weights = safetensors.torch.load_file(file) | changes
    weights = {name: value for name, value in weights.items() if value is not None}
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})


OWN_CODE = ".*custom code.*"
SPOILED = [  # how a folder is spoiled, and the line that says so
    (move, "elsewhere", "there is no such folder"),
    (cut_in_half, "model-00001-of-00003.safetensors", ".*incomplete.*"),
    (remove, "tokenizer*", ".*backend tokenizer.*"),
    (remove, "model*", ".*no file named model.safetensors.*"),
    (configure, {"vocab_size": 300}, r".* for its config.json, 2 mismatched weights, such as .*\(\[300, 32\]\)\)"),
    (configure, {"quantization_config": {"quant_method": "mxfp4"}}, ".* quantized weights cannot be trained"),
    (configure, {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}, OWN_CODE),
    (configure, {"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "code.Model"}}, OWN_CODE),
    (configure_tokenizer, {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.Mine", None]}}, OWN_CODE),
    (change_weights, {"model.embed_tokens.weight": None}, ".* 1 missing weights, such as .*embed_tokens.weight"),
    (change_weights, {"up_proj.bias": torch.zeros(64)}, ".* 1 unexpected weights, such as up_proj.bias"),
]


@pytest.mark.parametrize("spoil, change, cause", SPOILED)
def test_a_folder_that_cannot_be_used(spoil, change, cause, folder, tmp_path, group, monkeypatch):
    ask = mock.Mock(return_value="n")
    monkeypatch.setattr("builtins.input", ask)  # transformers asks whether code may run
    spoil(copy_of(folder, tmp_path), change)
    for options in ({}, {"from_scratch": True}) if cause == OWN_CODE else ({},):
        message = exit_message(llm_FSDP.prepare, arguments(tmp_path, "llama", **options))
        assert re.fullmatch(f"--model {tmp_path}/llama: {cause}", message)
        assert not (tmp_path / "out.incomplete").exists(), "nothing is left of a run that could not begin"
    assert not ask.called


LONG_CHAT = {"messages": [{"role": "user", "content": 100 * "a"}, {"role": "assistant", "content": "b"}]}


def test_what_does_not_fit(folder, tmp_path, group):
    args = arguments(folder, "llama", length=257)
    assert exit_message(llm_FSDP.prepare, args).endswith("llama: --length 257 is more than its 256 positions")
    conversations = [record for record in language.records() if "messages" in record]
    args = arguments(folder, "llama", length=4, data=[language.write_jsonl(tmp_path / "chats.jsonl", conversations)])
    line = "too few lines fit into --length {} "
    assert exit_message(llm_FSDP.prepare, args).startswith(line.format(4))
    args = arguments(folder, "llama", data=[language.write_jsonl(tmp_path / "one.jsonl", [{"text": 900 * "a"}])])
    assert exit_message(llm_FSDP.prepare, args).endswith("or name --eval-data"), "one long document is one line"
    args = arguments(folder, "llama", length=64, eval_data=[language.write_jsonl(tmp_path / "long.jsonl", [LONG_CHAT])])
    assert exit_message(llm_FSDP.prepare, args).startswith(line.format(64))
    args = arguments(folder, "llama", chat_template=tmp_path / "none.jinja")
    assert "No such file" in exit_message(llm_FSDP.prepare, args)
    args = arguments(folder, "llama", attention="flash_attention_2")
    assert "flash" in exit_message(llm_FSDP.prepare, args).lower()


def test_a_cause_that_goes_on_in_the_next_line_is_told_with_it():
    line = "^weights: sizes differ: a is 3$"
    with pytest.raises(dist.DistributedError, match=line), llm_documents.one_line("weights"):
        raise ValueError("sizes differ:\n\n\ta is 3")


@pytest.mark.slow
def test_without_network_a_name_that_is_not_cached_is_one_line(folder, tmp_path):
    env = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = ["llm_FSDP.py", "--model", "nobody/nothing", "--data", folder / "data.jsonl"]
    command += ["--output", tmp_path / "out"]
    status, stdout, stderr = run(*command, "--nproc", "2", env=env)
    assert (status, stdout) == (1, "")
    assert stderr.startswith("--model nobody/nothing: ") and stderr.count("\n") == 1


def made(args):
    """The sharded model, with what `prepare` gives for it."""
    whole, config, types, rows, held_out = llm_FSDP.prepare(args)
    return llm_FSDP.make_model(whole, config, types, args), whole, types, rows, held_out


def write_result(args):
    """Write the model as it was loaded, and return it."""
    model, whole, types, _, _ = made(args)
    llm_hub.save(model, whole, types, args.output)
    return model


def begin_training(folder, name="llama", another=0, base=None, **changes):
    """What main_worker does before `train`. With `another` the model has another weight; `base` is another --model."""
    args = arguments(folder, name, **{"epochs": 1, **changes})
    args.model = base or args.model
    whole, config, types, rows, held_out = llm_FSDP.prepare(args)
    with torch.no_grad():
        whole.get_input_embeddings().weight[0, 0] += another
    return llm_FSDP.make_model(whole, config, types, args), rows, held_out, args


@pytest.mark.guard
@pytest.mark.slow
def test_a_sigterm_during_the_last_step_does_not_keep_the_result_from_being_written(folder, group, tmp_path):
    model, rows, held_out, args = begin_training(folder, checkpoint_dir=str(tmp_path))
    args.epochs = 2 * args.global_batch_size / len(llm_documents.mapped(rows))
    with (
        mock.patch("checkpoint.Preemption.agreed", lambda preemption: True),
        mock.patch("checkpoint.Preemption.leave") as leave,
    ):
        llm_FSDP.train(model, rows, held_out, args)
    assert leave.call_count == 1, "after the first of two steps, as a process that has not ended goes on here"


@pytest.mark.slow
def test_a_checkpoint_of_other_options_or_weights_is_refused(folder, group, tmp_path):
    other = language.write_jsonl(tmp_path / "other.jsonl", language.records())
    shutil.copytree(folder / "llama", tmp_path / "llama")
    configure(tmp_path / "llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}})
    for kind in ({}, {"lora": 2, "lora_alpha": 4.0}):
        kind["checkpoint_dir"] = str(tmp_path / f"checkpoints of {len(kind)}")
        llm_FSDP.train(*begin_training(folder, **kind))
        for changes, line in (
            ({"seed": 1}, "--seed 0, not 1"),
            ({"data": [other]}, "--data ['data.jsonl'], not ['other.jsonl']"),
            ({"pad": True}, "--pad False, not True"),
            ({"length": 32}, "--length 64, not 32"),
            ({"weight_decay": 0.5}, "--weight-decay 0.0, not 0.5"),
            ({"lr": 0.5}, "--lr 2e-05, not 0.5"),
            ({"warmup": 3}, "--warmup None, not 3"),
            ({"clip": 2.0}, "--clip 1.0, not 2.0"),
            ({"bf16": True}, "--bf16 False, not True"),
            ({"lora": 4, "lora_alpha": 4.0}, f"--lora {kind.get('lora')}, not 4"),
            ({"another": 1.0}, "--model (checksum) "),
            ({"base": str(tmp_path / "llama")}, "config.json: rope_parameters "),
        ):
            message = exit_message(llm_FSDP.train, *begin_training(folder, **{**kind, **changes}))
            assert f"was saved with {line}" in message, message


def test_a_resume_reads_no_documents(folder, group, tmp_path):
    """Rows of the first start are taken once there is a checkpoint, and not before: then the options may change."""
    checkpoints = tmp_path / "checkpoints"
    begin_training(folder, checkpoint_dir=str(checkpoints), length=32)
    training = begin_training(folder, checkpoint_dir=str(checkpoints))
    rows = llm_documents.mapped(training[1])
    assert rows.shape[2] == 64
    training[-1].epochs = BATCH / len(rows)
    llm_FSDP.train(*training)
    with mock.patch.object(llm_documents, "lines_of", mock.Mock(side_effect=AssertionError("it reads"))):
        again = begin_training(folder, checkpoint_dir=str(checkpoints), length=None)
        others = begin_training(folder, data=[training[1]], eval_data=[training[2]], length=None)
    for each in (again, others):
        assert (llm_documents.mapped(each[1]) == rows).all()
    too_long = tmp_path / "rows.npy"
    llm_documents.write_rows(too_long, [2 * [np.ones(300, dtype=np.int32)]], 300)
    line = f"--model {folder}/llama: --length 300 is more than its 256 positions"
    assert exit_message(begin_training, folder, data=[too_long], eval_data=[too_long], length=None) == line


@pytest.mark.guard
@pytest.mark.slow
def test_a_result_is_written_from_a_checkpoint_that_has_all_steps_or_more(folder, group, tmp_path, capsys):
    checkpoints = str(tmp_path / "checkpoints")
    options = {"checkpoint_dir": checkpoints, "save_every": 2, "eval_every": 2, "lr": 0.01}
    model, rows, held_out, args = begin_training(folder, **options)
    with mock.patch.object(llm_FSDP, "evaluate", wraps=llm_FSDP.evaluate) as evaluations:
        llm_FSDP.train(model, rows, held_out, args)
    trained = capsys.readouterr().out
    steps = math.ceil(len(llm_documents.mapped(rows)) / BATCH)
    expected = whole_parameters(model)
    evaluated = [*range(0, steps, 2), steps]
    assert [call.args[2] for call in evaluations.call_args_list] == [f"step {step}/{steps}" for step in evaluated]
    for epochs, n in ((1, steps), (0.01, 1)):
        capsys.readouterr()
        model, *rest = begin_training(folder, checkpoint_dir=checkpoints, epochs=epochs, lr=0.01)
        with mock.patch.object(llm_FSDP, "backward", mock.Mock(side_effect=AssertionError("it trains"))):
            llm_FSDP.train(model, *rest)
        assert all(torch.equal(value, expected[name]) for name, value in whole_parameters(model).items())
        line = f"no steps are left: the checkpoint has {steps} steps, and --epochs gives {n}\n"
        assert f"{line}step {steps}/{n} | held-out " in capsys.readouterr().out
    shutil.rmtree(f"{checkpoints}/step-{steps}")  # the result of an older checkpoint
    model, *rest = begin_training(folder, checkpoint_dir=checkpoints, epochs=0.01, lr=0.01)
    llm_FSDP.train(model, *rest)
    said = capsys.readouterr().out
    assert f"the checkpoint has {evaluated[-2]} steps" in said
    line = rf"step {evaluated[-2]}/\d+ \| held-out (\S+)"
    assert re.findall(line, said) == re.findall(line, trained), "while it trained, and when it is written"


@pytest.mark.guard
@pytest.mark.slow
def test_other_epochs_are_refused_while_steps_are_left_and_allowed_after_the_last_one(folder, group, tmp_path):
    checkpoints = str(tmp_path / "checkpoints")
    n = len(llm_documents.mapped(begin_training(folder)[1]))

    def run_epochs(n_steps, stop=False):
        epochs = (n_steps - 0.5) * BATCH / n
        training = begin_training(folder, checkpoint_dir=checkpoints, epochs=epochs, save_every=2)
        with preempted(lambda: stop), contextlib.suppress(Stopped):
            llm_FSDP.train(*training)

    run_epochs(5, stop=True)
    for other in (3, 4, 8):
        message = exit_message(run_epochs, other)
        line = f"argument --epochs: it gives {other} steps, and the checkpoint is of 5: "
        assert message.startswith(line) and "learning rate would jump" in message
    run_epochs(1)  # no steps are left: it only writes the result
    run_epochs(5)
    run_epochs(8, stop=True)
    assert "is of 8" in exit_message(run_epochs, 9), "the run of 8 is the one to finish now"


@pytest.mark.parametrize(("lr", "save_every", "name"), [(1e30, 2, "loss"), (1e-5, 1, "gradient norm")])
def test_a_run_that_diverges_saves_nothing(lr, save_every, name, folder, group, tmp_path):
    """However rarely it prints. A norm can be no number while the loss before the step still is one."""
    options = {"checkpoint_dir": str(tmp_path), "lr": lr, "log_every": 1000, "save_every": save_every}
    model, *rest = begin_training(folder, **options)
    backward = llm_FSDP.backward

    def spoiled_backward(*values):
        share = backward(*values)
        if name == "gradient norm":
            model.get_input_embeddings().weight.grad *= math.nan
        return share

    with mock.patch.object(llm_FSDP, "backward", spoiled_backward):
        message = exit_message(llm_FSDP.train, model, *rest)
    assert re.fullmatch(rf"the {name} is (nan|inf): training has diverged, try a lower --lr", message)
    assert not list(tmp_path.glob("step-*"))


def test_what_is_printed_is_of_the_steps_alone(folder, group, tmp_path, monkeypatch, capsys):
    """A step takes 2 s, and an evaluation and a save much longer. The first of 4 of warm-up has a fifth of --lr."""
    clock = SimpleNamespace(now=0)
    counts, shares, rates = [], [], []
    make_optimizer = llm_FSDP.make_optimizer

    def watched_optimizer(*args):
        optimizer, scheduler = make_optimizer(*args)
        optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
        return optimizer, scheduler

    def slow(function, seconds):
        def slower(*args, **kwargs):
            clock.now += seconds
            return function(*args, **kwargs)

        return slower

    def backward(model, own_rows, gather_once, function=llm_FSDP.backward):
        counts.append(sum(row.n_tokens for row in own_rows))
        shares.append(function(model, own_rows).item())
        clock.now += 2
        return torch.tensor(shares[-1])

    monkeypatch.setattr(llm_FSDP, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    options = {"checkpoint_dir": str(tmp_path), "log_every": 2, "save_every": 4, "eval_every": 3}
    training = begin_training(folder, **options, lr=0.01, warmup=4)
    monkeypatch.setattr(llm_FSDP, "make_optimizer", watched_optimizer)
    monkeypatch.setattr(llm_FSDP, "backward", backward)
    monkeypatch.setattr(llm_FSDP, "evaluate", slow(llm_FSDP.evaluate, 100))
    monkeypatch.setattr("checkpoint_sharded.save", slow(llm_FSDP.checkpoint_sharded.save, 1000))
    llm_FSDP.train(*training)
    line = r"step (\d+)/\d+ \| loss (\S+) .* \| lr (\S+) \| ([\d,]+) tok"
    found = re.findall(line, capsys.readouterr().out)
    first = 0
    for done, loss, lr, tokens in found:
        n = int(done) - first
        assert tokens == f"{sum(counts[first : int(done)]) / (2 * n):,.0f}"
        assert lr == f"{rates[int(done) - 1]:.1e}"
        assert float(loss) == pytest.approx(sum(shares[first : int(done)]) / n, abs=1e-4)
        first = int(done)
    assert [int(done) for done, *_ in found][:4] == [2, 3, 4, 6] and rates[0] == pytest.approx(0.002)


# ---- what is kept in float32 ----------------------------------------------------------------------------------------

MOE = {**language.SMALL, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
MOE |= {"topk_group": 1, "first_k_dense_replace": 1}


@pytest.mark.parametrize("lora", [None, 2])
def test_routers_in_float32_are_held_and_written_as_they_were_loaded(lora, folder, group, tmp_path):
    torch.manual_seed(0)
    config = transformers.Glm4MoeConfig(**MOE, head_dim=8)
    if lora:  # which is refused for the other one
        config = transformers.MiMoV2FlashConfig(**MOE, head_dim=8)
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for key, tensor in [*base.named_parameters(), *base.named_buffers()]:
            if "gate.weight" in key or "e_score" in key:
                tensor.copy_(11 + 0.01 * torch.randn(tensor.shape))
    base.save_pretrained(tmp_path / "llama")
    language.byte_tokenizer().save_pretrained(tmp_path / "llama")
    shutil.copy(folder / "data.jsonl", tmp_path)
    args = arguments(tmp_path, "llama", lora=lora, lora_alpha=4.0, attention="eager", output=str(tmp_path / "out"))
    model = write_result(args)
    expected = base.state_dict()
    assert {str(value.dtype) for value in expected.values()} == {"torch.bfloat16", "torch.float32"}
    held = {plain_name(key): value for key, value in model.state_dict().items() if ".lora_" not in key}
    assert held.keys() == expected.keys()
    for key, value in expected.items():
        is_trained = not lora and "e_score" not in key
        assert held[key].dtype == (torch.float32 if is_trained else value.dtype), key
        assert torch.equal(full(held[key]), value.to(held[key].dtype)), key
    if not lora:
        written = {}
        for file in Path(args.output).glob("*.safetensors"):
            written |= safetensors.torch.load_file(file)
        before = safetensors.torch.load_file(tmp_path / "llama" / "model.safetensors")
        assert written.keys() == before.keys()
        for key, value in written.items():
            assert value.dtype == before[key].dtype and torch.equal(value, before[key]), key


@pytest.mark.parametrize(("recompute", "runs"), [(False, 1), (True, 2)])
def test_with_recompute_a_layer_runs_again_in_backward(recompute, runs, folder, group):
    args, calls = arguments(folder, "llama", recompute=recompute), []
    model, *_ = made(args)
    llm_hub.layers_of(model)[0].mlp.register_forward_pre_hook(lambda *_: calls.append(None))
    model(torch.arange(8)[None]).logits.sum().backward()
    assert len(calls) == runs


LFM2 = {**language.SMALL, "hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False}
LFM2_LAYERS = {"layer_types": ["conv", "full_attention"]}
BERT = {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SMALL = {"vocab_size": 259, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WHISPER = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 8.0, 32.0]}
PHI3 = {**language.SMALL, "pad_token_id": 0, "original_max_position_embeddings": 32, "rope_parameters": LONGROPE}
MIXED = "a document has other logits in a row of --length .* than alone: use --pad"
AHEAD = "it is not causal: a token sees those after it, and so its target"
EAGERLY = {"attention": "eager"}
ROWS = [  # a model, how it is used, and what is said of packed and of padded rows
    *((name, {}, {}, None, None) for name in language.FIVE),
    # The convolutions of an untrained Lfm2 move the next document's logits by less than a hundredth.
    ("Lfm2", LFM2 | LFM2_LAYERS, {}, MIXED, None),
    ("Bert", BERT, {}, AHEAD, AHEAD),  # a little
    ("Bert", {**BERT, "is_decoder": True}, {}, MIXED, None),
    ("RoFormer", BERT, EAGERLY, AHEAD, AHEAD),
    ("RoFormer", {**BERT, "is_decoder": True}, EAGERLY, MIXED, None),
    # Its rotary factors depend on the longest document of a row.
    ("Phi3", PHI3, {"length": 30}, None, None),
    ("Phi3", PHI3, {"length": 32}, None, None),
    ("Phi3", PHI3, {"length": 60}, MIXED, None),
    ("Phi3", PHI3, {"length": 200}, MIXED, None),
    (
        "Roberta",
        {**BERT, "is_decoder": True},
        EAGERLY,
        "row of --length 64",
        "row of --length 64 than alone$",
    ),  # positions from 2
    ("Whisper", SMALL | WHISPER, EAGERLY, "logits_to_keep", "logits_to_keep"),  # which it does not take
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("name", "sizes", "options", "packed", "padded"), ROWS)
def test_rows_that_mix_documents_or_show_the_future_are_refused(name, sizes, options, packed, padded, dtype):
    make_config = language.CONFIGS.get(name) or getattr(transformers, f"{name}Config")
    config = make_config(**copy.deepcopy(sizes))
    config._attn_implementation = options.get("attention", "sdpa")
    with float64_everywhere() if dtype == torch.float64 else contextlib.nullcontext():
        torch.manual_seed(0)
        model = llm_hub.build_model(config, dtype)
        model.reshard = lambda: None
        for pad, expected in ((False, packed), (True, padded)):
            refused = contextlib.nullcontext()
            if expected:
                refused = pytest.raises(dist.DistributedError, match=expected)
            with refused:
                llm_hub.check_rows(model, options.get("length", 64), pad)
                assert model.training


def test_an_example_of_the_loss_is_printed_before_training(folder, group, tmp_path, capsys):
    conversation = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "x"}]}
    data = [language.write_jsonl(tmp_path / "data.jsonl", 2 * [conversation])]
    llm_FSDP.prepare(arguments(folder, "llama", data=data, eval_data=data, output=str(tmp_path / "out")))
    example = "in the loss, for example: 'x<|end|>' after '<|user|>Hi.<|end|><|assistant|>'"
    assert capsys.readouterr().out.splitlines()[-1] == example


def test_a_token_without_an_embedding_is_one_line(folder, group, tmp_path):
    """As with a tokenizer to which tokens were added, and a model whose embeddings were not resized."""
    path = copy_of(folder, tmp_path)
    tokenizer = language.byte_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(path)
    records = [{"text": "nothing new"}, {"text": "a <new> b"}]
    for name, others in (("data", "eval_data"), ("eval_data", "data")):
        files = {name: [language.write_jsonl(tmp_path / "1.jsonl", records)]}
        files[others] = [language.write_jsonl(tmp_path / "2.jsonl", records[:1])]
        message = exit_message(llm_FSDP.prepare, arguments(tmp_path, "llama", **files))
        assert message.startswith(f"--model {path}: token 259, '<new>', of the data has no embedding")


# Models for which transformers has no scaled_dot_product_attention.
TINY = {"vocab_size": 259, "hidden_size": 32}
EAGER = {
    "Gemma2": SLIDING,
    "GptOss": {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Bloom": {**TINY, "n_layer": 2, "n_head": 4},
    "GPTNeo": {**TINY, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    "VaultGemma": SLIDING,
    "Mamba": {**TINY, "num_hidden_layers": 2, "state_size": 8},
}


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("name", EAGER)
def test_a_model_without_sdpa_is_trained_and_written(name, folder, group, tmp_path, capsys):
    config = getattr(transformers, f"{name}Config")(**EAGER[name])
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
    language.byte_tokenizer().save_pretrained(tmp_path / name)
    shutil.copy(folder / "data.jsonl", tmp_path)
    message = exit_message(llm_FSDP.prepare, arguments(tmp_path, name))
    assert message.startswith(f"--model {tmp_path}/{name}: ") and "eager" in message
    options = {"attention": "eager", "epochs": 0.5, "output": str(tmp_path / "out"), "lr": 0.01}
    options["pad"] = "Gemma" not in name  # the others do not keep packed documents apart
    with mock.patch("torch.set_float32_matmul_precision"):
        llm_FSDP.main_worker(0, 1, arguments(tmp_path, name, **options))
    assert f"Wrote {tmp_path}/out\n" in capsys.readouterr().out
    written = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
    assert type(written) is type(before)
    moved = [not torch.equal(*pair) for pair in zip(written.parameters(), before.parameters(), strict=True)]
    assert sum(moved) > len(moved) / 2


@pytest.mark.parametrize("lora", [None, 2])
def test_what_can_be_written_before_training_is_written_before(lora, folder, group, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    monkeypatch.setattr(llm_FSDP, "train", mock.Mock(side_effect=dist.DistributedError("it trains")))
    output = tmp_path / "out"
    options = {"lora": lora, "lora_alpha": 2.0, "output": str(output)}
    assert exit_message(llm_FSDP.main_worker, 0, 1, arguments(folder, "llama", **options)) == "it trains"
    expected = {"tokenizer.json", "chat_template.jinja", "generation_config.json"} | (
        {"config.json"} if not lora else set()
    )
    assert expected <= set(os.listdir(f"{output}.incomplete"))
    for target in ("shutil.copyfile", "pathlib.Path.mkdir"):
        with mock.patch(target, side_effect=OSError(28, "No space left on device")):
            message = exit_message(llm_FSDP.main_worker, 0, 1, arguments(folder, "llama", **options))
        assert message == f"cannot write {output}: OSError: [Errno 28] No space left on device"


def test_weights_that_the_configuration_ties_and_the_files_do_not(folder, group, tmp_path):
    path = copy_of(folder, tmp_path)
    configure(path, {"tie_word_embeddings": True})
    args = arguments(tmp_path, "llama", output=str(tmp_path / "out"))
    model = write_result(args)
    expected = logits_of(transformers.AutoModelForCausalLM.from_pretrained(folder / "llama"))
    assert torch.equal(logits_of(model), expected)
    assert torch.equal(logits_of(transformers.AutoModelForCausalLM.from_pretrained(args.output)), expected)


def test_a_model_on_the_hub_is_read_as_a_folder_is(folder, group, tmp_path):
    """Its adapters name it as it is called there, and those of a folder name the folder from its root."""
    download = mock.Mock(return_value=str(folder / "llama"))
    for name, base in (
        ("nobody/nothing", "nobody/nothing"),
        (os.path.relpath(folder / "llama"), str(folder / "llama")),
    ):
        args = arguments(folder, "llama", output=str(tmp_path / base[-5:]), lora=2, lora_alpha=4.0)
        args.model = name
        with mock.patch("huggingface_hub.snapshot_download", download):
            write_result(args)
        written = json.loads(Path(args.output, "adapter_config.json").read_text())
        assert written["base_model_name_or_path"] == base
    assert download.call_count == 1 and download.call_args.args == ("nobody/nothing",)
    ignored = download.call_args.kwargs["ignore_patterns"]
    assert {"*/*", "*.bin", "*.gguf"} <= set(ignored) and "*.safetensors" not in ignored


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_lora_is_refused_where_peft_would_adapt_experts(name, group):
    """PEFT takes the names of linear layers that end in gate_proj for those of experts, also when it loads adapters."""
    mla = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    config = {
        "glm4_moe": transformers.Glm4MoeConfig(**MOE, head_dim=8, n_shared_experts=1),
        "deepseek_v3": transformers.DeepseekV3Config(
            **MOE | {"num_key_value_heads": 4}, **mla, topk_method="noaux_tc", n_shared_experts=1
        ),
    }[name]
    with torch.device("meta"):
        model = llm_hub.build_model(config, torch.float32)
    with pytest.raises(ValueError, match="PEFT would adapt other layers than the linear ones, such as "):
        llm_hub.add_lora(model, 2, 4.0)


@pytest.mark.parametrize(("part", "value"), [("pre_tokenizer", None), ("normalizer", {"type": "Lowercase"})])
def test_the_tokenizer_is_the_one_of_the_file(part, value, folder, group, tmp_path, capsys):
    """Qwen2Tokenizer would put in its own. The result has the file as it was."""
    path = copy_of(folder, tmp_path)
    content = json.loads((path / "tokenizer.json").read_text()) | {part: value}
    write(path, {"tokenizer.json": json.dumps(content)})
    configure(path, {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]})
    configure_tokenizer(path, {"tokenizer_class": "Qwen2Tokenizer"})
    tokenizer, _ = llm_hub.load_tokenizer_and_config(path, "sdpa")
    right = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert tokenizer("12 ABC", add_special_tokens=False).input_ids == right.encode("12 ABC").ids
    assert "transformers builds another tokenizer than" in capsys.readouterr().out


def test_a_warm_up_that_does_not_end_is_refused(folder, group):
    training = begin_training(folder, warmup=500)
    assert re.fullmatch(r"argument --warmup: 500 is not less than \d, .*", exit_message(llm_FSDP.train, *training))


def test_few_steps_warm_up_over_a_tenth_of_them():
    model = torch.nn.Linear(2, 2)
    for steps, warmup in ((3, 0), (50, 5), (1000, 10)):
        optimizer, scheduler = llm_FSDP.make_optimizer(model, steps, lr=1.0, warmup=None, weight_decay=0.0)
        rates = []
        for _ in range(steps):
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        assert rates.index(max(rates)) == warmup and max(rates) == pytest.approx(1)


def test_the_script_makes_this_check_of_the_rows_that_it_trains_on(folder, group, monkeypatch):
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    check_rows = mock.Mock(side_effect=dist.DistributedError("it mixes documents"))
    monkeypatch.setattr(llm_hub, "check_rows", check_rows)
    for pad in (False, True):
        args = arguments(folder, "llama", pad=pad, epochs=1)
        assert exit_message(llm_FSDP.main_worker, 0, 1, args) == "it mixes documents"
        assert check_rows.call_args.args[1:] == (LENGTH, pad)


WITH_MODEL = "--model m --data d"


def test_options_that_go_together_and_the_defaults_that_depend_on_them(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rates = {
        "--nproc 3 --global-batch-size 3": 4e-3,
        WITH_MODEL: 2e-5,
        f"{WITH_MODEL} --from-scratch": 3e-4,
        f"{WITH_MODEL} --chat-template t --lora 4 --no-bf16": 2e-4,
        f"{WITH_MODEL} --lora 4 --lora-alpha 2 --lr 0.5": 0.5,
    }
    found = {options: llm_FSDP.parse_args(options.split()) for options in rates}
    assert {options: args.lr for options, args in found.items()} == rates
    assert [args.lora_alpha for args in found.values()] == [None, None, None, None, 2.0]
    assert (found[WITH_MODEL].clip, found[WITH_MODEL].bf16) == (1.0, torch.accelerator.is_available())
    assert llm_FSDP.parse_args(["--bf16"]).bf16 and not llm_FSDP.parse_args(["--no_bf16"]).bf16


@pytest.mark.guard
@pytest.mark.slow
def test_a_run_and_its_resumed_end_are_one_run_of_the_trackers(folder, group, tmp_path, monkeypatch, capsys):
    """W&B offline and TensorBoard have the numbers that are printed. The second call resumes the run."""
    import wandb
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("DIR", "DATA_DIR", "CACHE_DIR", "CONFIG_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    options = {"wandb": True, "tensorboard": str(tmp_path / "runs"), "checkpoint_dir": str(tmp_path / "checkpoints")}
    options |= {"log_every": 1, "lr": 0.01}
    agreed = iter([False, True])
    with preempted(lambda: next(agreed, False)):
        with pytest.raises(Stopped):
            llm_FSDP.train(*begin_training(folder, **options))
        llm_FSDP.train(*begin_training(folder, **options))
    assert wandb.run is None, "closed: W&B uploads what is left"
    printed = capsys.readouterr().out
    ids = {path.name.rpartition("-")[2] for path in tmp_path.glob("wandb/offline-run-*")}
    assert len(ids) == 1
    events = EventAccumulator(str(tmp_path / "runs")).Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "lr", "norm", "tokens_per_second", "held_out"}
    steps = re.findall(r"step (\d+)/\d+ \| loss (\S+) \| norm (\S+) \|", printed)
    assert [scalar.step for scalar in events.Scalars("loss")] == [BATCH * int(step) for step, _, _ in steps]
    assert [f"{scalar.value:.4f}" for scalar in events.Scalars("loss")] == [loss for _, loss, _ in steps]
    assert [f"{scalar.value:.2f}" for scalar in events.Scalars("norm")] == [norm for _, _, norm in steps]
    held_out = re.findall(r"held-out (\S+)", printed)
    assert f"{events.Scalars('held_out')[-1].value:.4f}" == held_out[-1]


# ---- packed rows, and what is sent to the device --------------------------------------------------------------------


ATTENTIONS = itertools.product(language.CONFIGS, ["sdpa", "eager", "flex_attention"])
OFFERED = [pair for pair in ATTENTIONS if pair != ("gpt2", "flex_attention")]  # which transformers refuses


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("name, attention", OFFERED)
def test_packed_documents_do_not_see_each_other(name, attention, folder):
    """Losses and gradients equal those of each document alone. On the CPU, flex_attention has no gradients."""
    is_flex = attention == "flex_attention"
    with float64_everywhere(), torch.set_grad_enabled(not is_flex), torch.compiler.set_stance("force_eager"):
        dtype = torch.float64
        if is_flex:
            dtype = torch.float32
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / name, dtype=dtype, attn_implementation=attention
        )
        lists, _ = documents_of(arguments(folder, name))
        row = max(lists, key=len)
        assert len(row) >= 3
        results = []
        for lists in ([row], [[document] for document in row]):
            model.zero_grad()
            losses = []
            for packed in llm_documents.make_rows(lists, LENGTH):
                loss = llm_FSDP.sum_of_losses(model, llm_documents.on_device(packed))
                if not is_flex:
                    loss.backward()
                losses.append(loss.detach())
            gradients = [param.grad for param in model.parameters() if param.grad is not None]
            results.append([torch.stack(losses).sum(), *gradients])
    for packed, alone in zip(*results, strict=True):
        assert (packed - alone).abs().max() <= 1e-5 * alone.abs().max().clamp(min=1)


def test_the_last_rows_of_a_batch_may_be_without_targets(tmp_path):
    row = torch.tensor([[7, 8, llm_documents.PADDING], [0, 1, 0], [8, 9, llm_documents.IGNORED]], dtype=torch.int32)
    there = llm_documents.on_device(row)
    assert there.tokens.tolist() == [[7, 8, 0]] and there.positions.tolist() == [[0, 1, 0]]
    assert there.places.tolist() == [0, 1] and there.targets.tolist() == [8, 9] and there.n_tokens == 2
    with mock.patch("distributed.get_world_size", lambda: 2), mock.patch("distributed.get_rank", lambda: 1):
        np.save(tmp_path / "rows.npy", torch.stack([row, row]).numpy())
        ours, empty = llm_documents.share_of(tmp_path / "rows.npy", [0, 1, 0])
    assert ours.places.tolist() == [0, 1]
    assert empty.tokens.tolist() == [[0, 0, 0]] and empty.positions.tolist() == [[0, 0, 0]]
    assert len(empty.places) == len(empty.targets) == empty.n_tokens == 0


def test_every_row_is_taken_once_in_an_epoch_in_another_order_in_the_next():
    numbers = llm_documents.order_of(10, 25, seed=1)
    assert len(numbers) == 25
    assert sorted(numbers[:10]) == sorted(numbers[10:20]) == list(range(10))
    assert numbers[:10] != numbers[10:20] != list(range(10))
    assert numbers[:4] != llm_documents.order_of(10, 4, seed=2)
    assert numbers[:7] == llm_documents.order_of(10, 7, seed=1)


# ---- results are complete or absent ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, 2])
def test_a_kill_while_a_result_is_written_leaves_a_whole_one_or_none(lora, folder, group, tmp_path):
    """Whatever call on files it hits. The next run needs nothing to be deleted."""
    output = tmp_path / "out"
    args = arguments(folder, "llama", lora=lora, lora_alpha=4.0, output=str(output))
    n_calls = []

    def counting(function, last_call):
        def call(*args, **kwargs):
            n_calls.append(None)
            if len(n_calls) == last_call:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return call

    for last_call in range(1, 99):
        model, whole, types, _, _ = made(args)
        n_calls.clear()
        with contextlib.ExitStack() as stack:
            for name in ("replace", "rename", "unlink", "rmdir"):
                stack.enter_context(mock.patch.object(os, name, counting(getattr(os, name), last_call)))
            stack.enter_context(contextlib.suppress(KeyboardInterrupt))
            llm_hub.save(model, whole, types, args.output)
            break
        assert not output.exists()
    assert last_call > 3 and set(os.listdir(tmp_path)) == {"out"}
    kind = peft.AutoPeftModelForCausalLM if lora else transformers.AutoModelForCausalLM
    assert (logits_of(kind.from_pretrained(output)) - logits_of(model)).abs().max() < 1e-5
    expected = {"chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    expected |= {"adapter_config.json", "adapter_model.safetensors"} if lora else {"config.json", "model.safetensors"}
    assert set(os.listdir(output)) == expected


def test_a_result_has_the_other_files_of_the_base_and_the_given_template(folder, group, tmp_path):
    path = copy_of(folder, tmp_path)
    others = {"preprocessor_config.json": '{"size": 224}\n', "LICENSE": "mine", "pytorch_model.bin": "weights"}
    write(path, others)
    write(tmp_path, {"template": "{# other #}" + llm_documents.CHAT_TEMPLATE})
    args = arguments(tmp_path, "llama", output=str(tmp_path / "out"), chat_template=tmp_path / "template")
    write_result(args)
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json", "LICENSE"):
        assert (tmp_path / "out" / name).read_bytes() == (path / name).read_bytes()
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()
    template = transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert template == (tmp_path / "template").read_text()
