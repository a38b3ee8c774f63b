"""llm_FSDP.py: equal to a plain loop over transformers in one process, exact on resume, and its results load."""

import contextlib
import copy
import io
import itertools
import json
import math
import os
import random
import re
import shutil
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
import wandb
from conftest import ROOT, Left, Watch, exit_message, float64, leaving_is_an_error, on_processes, run, start, wait_for
from conftest import whole as full
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import distributed as dist
import llm_documents
import llm_FSDP
import llm_hub

SCRIPT = ROOT / "llm_FSDP.py"
LENGTH = 64
BATCH = 6
STEPS = 3
IDS = torch.randint(0, 250, (2, 40), generator=torch.Generator().manual_seed(0))
ADAMW = "--lr 0.003 --weight-decay 0.1 --clip 0.5 --warmup 2"
SGD = "--lr 0.05 --clip 0 --warmup 0"  # a clip of 0 does not clip
CLIPPED = "--lr 0.05 --clip 1 --warmup 0"
LORA = "--lora 4 --lora-alpha 6"


def not_refused(*rows):
    """Without those that llm_FSDP.py refuses before torch 2.12."""
    return [row for row in rows if "--nf4" not in str(row) or torch.__version__ >= "2.12"]


CASES = {  # name: (model, optimizer, options)
    "llama": ("llama", "SGD", SGD),
    "tied": ("llama_tied", "AdamW", ADAMW),
    "tied, clipped": ("llama_tied", "SGD", CLIPPED),
    "uneven": ("llama", "SGD", f"{SGD} --global-batch-size 7"),
    "gathered once": ("llama_tied", "SGD", f"{CLIPPED} --gather-once"),
    "replicas": ("llama_tied", "SGD", CLIPPED),
    "padded": ("gpt2", "SGD", f"{SGD} --pad"),
    "in chunks": ("llama_tied", "SGD", f"{CLIPPED} --loss-chunk 5"),
    "recomputed": ("qwen3", "AdamW", f"{ADAMW} --recompute"),
    "gemma3": ("gemma3", "SGD", SGD),
    "qwen3_moe": ("qwen3_moe", "SGD", SGD),
    "lora": ("llama_tied", "SGD", f"{SGD} {LORA} --lr 0.5"),
    "lora, AdamW": ("llama", "AdamW", f"{ADAMW} {LORA} --lr 0.03"),
    "lora, 4 bits": ("wide", "SGD", f"{SGD} {LORA} --lr 0.5 --nf4 --loss-chunk 5 --recompute"),
    "lora, gpt2": ("gpt2", "SGD", f"{SGD} {LORA} --lr 0.5"),
    "lora, qwen3": ("qwen3", "SGD", f"{SGD} {LORA} --lr 0.5"),
    "lora, gemma3": ("gemma3", "SGD", f"{SGD} {LORA} --lr 1"),
    "lora, qwen3_moe": ("qwen3_moe", "SGD", f"{SGD} {LORA} --lr 0.5"),
}


@contextlib.contextmanager
def float64_everywhere():
    """Experts too: their fast kernel on the CPU takes no float64."""
    with float64(), mock.patch("transformers.integrations.moe._can_use_grouped_mm", lambda *args: False):
        yield


def make_inputs(model="llama", dtype=torch.float32):
    """A model and data in the working folder."""
    if dist.is_primary():
        language.make_folder(model, Path(model), dtype)
        language.write_jsonl(Path("data.jsonl"), language.records())
    dist.barrier()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a small Llama and data, and a process group of this process alone."""
    monkeypatch.chdir(tmp_path)
    dist.init_process_group(even_alone=True)
    make_inputs()
    return tmp_path


def arguments(model="llama", options="", length=LENGTH):
    """Of the command that trains a model of the working folder. Later options replace earlier ones."""
    command = f"--model ./{model} --data data.jsonl --output out --nproc 1 --global-batch-size {BATCH} --log-every 1"
    if length:
        command += f" --length {length}"
    return llm_FSDP.parse_args(f"{command} {options}".split())


class Job:
    """What main_worker does, part by part. All parts print into `stdout`."""

    def __init__(self, model="llama", options="", length=LENGTH):
        self.args = arguments(model, options, length)
        self.stdout = io.StringIO()
        with contextlib.redirect_stdout(self.stdout):
            self.whole, config, self.types, self.rows, self.held_out = llm_FSDP.prepare(self.args)
            self.model = llm_FSDP.make_model(self.whole, config, self.types, self.args)
        self.n_rows = len(llm_documents.mapped(self.rows))

    def train(self, steps):
        """Returns all that is printed."""
        self.args.epochs = (steps - 0.5) * self.args.global_batch_size / self.n_rows
        with contextlib.redirect_stdout(self.stdout):
            llm_FSDP.train(self.model, self.rows, self.held_out, self.args)
        return self.stdout.getvalue()

    def save(self):
        llm_hub.save(self.model, self.whole, self.types, self.args.output)


def plain_name(name):
    return name.removeprefix("base_model.model.").replace(".default", "").replace(".base_layer", "")


def whole_parameters(model, part=""):
    """The parameters with `part` in their names, each whole on every rank."""
    found = {plain_name(name): full(param.detach()) for name, param in model.named_parameters() if part in name}
    return {name: value.clone() for name, value in found.items()}


@torch.no_grad()
def logits_of(model):
    return model.eval()(IDS, use_cache=False).logits


def blocks_of_page(page, heading, **names):
    """What the blocks of Python under a heading define, with `names`."""
    section = (ROOT / "docs" / page).read_text().partition(heading)[2].partition("\n##")[0]
    for block in re.findall(r"```python\n(.*?)^```", section, re.M | re.S):
        exec(block, names)
    return names


# ---- one process of plain transformers, one document at a time ------------------------------------------------------


def documents_of(args):
    """The documents of each row."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    found = list(llm_FSDP.load_documents(tokenizer, args.data, args.eval_data, LENGTH)[0])
    return [[document] for document in found] if args.pad else llm_documents.pack(found, LENGTH)


def batches_of(n_rows, args):
    """The numbers of the rows of each step."""
    size = args.global_batch_size
    order = llm_documents.order_of(n_rows, STEPS * size, args.seed)
    return [order[step * size : (step + 1) * size] for step in range(STEPS)]


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
                param.data = lora_A[plain_name(name)].clone()
    return model


def rounded_to_nf4(weight):
    """The definition: in each block of 64 the nearest of 16 levels, times the largest absolute number."""
    blocks = weight.float().reshape(-1, 64)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    levels = torch.tensor(llm_hub.LEVELS, dtype=torch.float32)
    nearest = (blocks[..., None] / scales[..., None] - levels).abs().argmin(dim=2)
    return (levels[nearest] * scales).view_as(weight).to(weight.dtype)


def train_alone(args, optimizer, lora_A):
    """Every step's loss, and the parameters by name, before and after."""
    model = plain_model(args, lora_A)
    before = whole_parameters(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": args.weight_decay},
        {"params": [param for param in trained if param.dim() < 2], "weight_decay": 0.0},
    ]
    optimizers = {"SGD": torch.optim.SGD(trained), "AdamW": torch.optim.AdamW(groups, betas=(0.9, 0.95))}
    optimizer = optimizers[optimizer]
    lists = documents_of(args)
    losses, norms = [], []
    for step, batch in enumerate(batches_of(len(lists), args)):
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
    return losses, before, whole_parameters(model)


def rate(step, args):
    """Up to 1 in equal steps, then along half a cosine to 0.1, which it would reach at STEPS."""
    if step < args.warmup:
        return (1, 2)[step] / 3
    return 0.1 + 0.9 * (1 + math.cos(math.pi * (step - args.warmup) / (STEPS - args.warmup))) / 2


# ---- equal to it, and to itself when it is resumed ------------------------------------------------------------------


def make_sgd(params, lr, **kwargs):
    return torch.optim.SGD(params, lr=lr)


def mesh_of_the_recipe(*sizes):
    """Of machines with one process each."""
    names = {"dist": dist, "device": dist.get_device(), "init_device_mesh": init_device_mesh}
    block = blocks_of_page("recipes.md", "### How do I shard within a machine and replicate between machines?", **names)
    n = dist.get_world_size()
    mesh = block["make_mesh"](n)
    assert (mesh.mesh_dim_names, mesh.shape) == (("replicate", "shard"), (n, 1))
    return mesh


@contextlib.contextmanager
def changed_script(name):
    """In float64, with the optimizer and the mesh of a case."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(float64_everywhere())
        if CASES[name][1] == "SGD":
            stack.enter_context(mock.patch("torch.optim.AdamW", make_sgd))
        if name == "replicas":
            stack.enter_context(mock.patch("llm_FSDP.init_device_mesh", mesh_of_the_recipe))
        yield


@pytest.mark.guard
@pytest.mark.slow
@on_processes(2, 3)
@pytest.mark.parametrize("name", [name for name, _ in not_refused(*CASES.items())])
def test_equals_one_process(name):
    """A plain loop over the documents, one at a time. In float64, but transformers' norms compute in float32."""
    model, optimizer, options = CASES[name]
    with changed_script(name):
        make_inputs(model, torch.float64)
        job = Job(model, options)
        llm_hub.check_rows(job.model, LENGTH, pad=False)
        lora_A = whole_parameters(job.model, "lora_A")
        with mock.patch("tracking.Tracker.log") as log:
            job.train(STEPS)
        tracked = [call.kwargs["loss"] for call in log.call_args_list if "loss" in call.kwargs]
        after = whole_parameters(job.model)
    with float64_everywhere():
        losses, before, expected = train_alone(job.args, optimizer, lora_A)
    assert losses[-1] < losses[0] - 0.02
    assert tracked == pytest.approx(losses, rel=0, abs=1e-7)
    if job.args.nf4:
        expected = {key: value for key, value in expected.items() if key in after}
        after = {key: value for key, value in after.items() if not key.endswith(("packed", "scales"))}
    assert after.keys() == expected.keys()
    for key, value in expected.items():
        assert ((after[key] - before[key]).abs().max() > 1e-5) == (".lora_" in key or not job.args.lora), key
        assert (after[key] - value).abs().max() < 1e-6, key


def train_part(local_rank, world_size, name, checkpoints, leaves):
    """Train a case, or leave after its first step, as after SIGTERM. Returns the parameters."""
    dist.init_process_group(even_alone=True)
    model, _, options = CASES[name]
    with changed_script(name), leaving_is_an_error(agreed=lambda preemption: leaves):
        job = Job(model, f"{options} --checkpoint-dir {checkpoints}")
        with contextlib.suppress(Left):
            job.train(STEPS)
    return whole_parameters(job.model)


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "lora"])
def test_resumes_inside_an_epoch_on_any_number_of_processes(name, folder):
    """It left on two processes, and ends as if it had not; on two, bit for bit. Two steps are left.

    A scheduler that starts anew shows in the second one.
    """
    make_inputs(CASES[name][0], torch.float64)
    whole = dist.launch(train_part, name, "whole", False, nprocs=2)
    dist.launch(train_part, name, "left", True, nprocs=2)
    assert {path.name for path in Path("left").iterdir()} == {"step-1", "rows.npy", "held-out.npy"}
    for nprocs in (1, 2, 3):
        checkpoints = f"resumed-on-{nprocs}"
        shutil.copytree("left", checkpoints)
        resumed = dist.launch(train_part, name, checkpoints, False, nprocs=nprocs)
        for key, value in whole.items():
            assert (resumed[key] - value).abs().max() <= (0 if nprocs == 2 else 1e-6), key
        assert Path(checkpoints, "step-3").exists()
    metadata = torch.distributed.checkpoint.FileSystemReader("left/step-1").read_metadata()
    names = [key for key in metadata.state_dict_metadata if key.startswith("model.")]
    if name == "lora":
        assert len(names) == 2 * 7 * 2 and all(".lora_" in key for key in names), "the model is left out"


# ---- the script as it is run ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1560)
def test_without_a_model_and_a_network_it_learns_and_answers(tmp_path):
    env = {"HF_HOME": str(tmp_path / "empty"), "HF_HUB_OFFLINE": "1"}
    env["WATCH_SECONDS"] = "600"  # on a slow machine the tokenizer takes more than the 30 s after which it would tell
    status, stdout, stderr = run(SCRIPT, "--nproc", "2", "--output", tmp_path / "out", env=env, timeout=1500)
    assert (status, stderr) == (0, "")
    held_out = [float(loss) for loss in re.findall(r"held-out (.*)", stdout)]
    assert held_out[0] > 7 and held_out[-1] < 3.6
    line = r"^step 20/370 \| loss \d\.\d{4} \| norm \d\.\d\d \| lr \d\.\de-03 \| [\d,]+ tokens/s \| [\d,]+ MB$"
    assert re.search(line, stdout, re.M)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").num_parameters() == 664_192


def small_run(output, n_rows):
    """A command of 200 steps, which saves every tenth, and prints every step."""
    command = [SCRIPT, "--model", "llama", "--data", "data.jsonl", "--length", LENGTH, "--lr", 0.01]
    command += ["--epochs", (200 * BATCH - 3) / n_rows, "--global-batch-size", BATCH, "--log-every", 1]
    return [*command, "--output", output, "--checkpoint-dir", f"checkpoints of {output}", "--save-every", 10]


def steps_in(log):
    """The last step that is printed, or 0."""
    found = re.findall(r"^step (\d+)/", log.read_text(), re.M)
    return int(found[-1]) if found else 0


def is_incomplete(checkpoints):
    """Is a checkpoint being written at this moment?"""
    return any(not (path / ".metadata").exists() for path in checkpoints.glob("step-*"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_and_sigterm_change_nothing(folder):
    """Killed at any moment and once in a save, stopped by SIGTERM; each time resumed by another number of processes."""
    n_rows = Job().n_rows
    status, stdout, stderr = run(*small_run("whole", n_rows), "--nproc", 2, cwd=folder)
    assert (status, stderr) == (0, "") and "step 200/200 | loss" in stdout
    command = small_run("killed", n_rows)
    checkpoints = folder / "checkpoints of killed"
    log = folder / "log"
    log.touch()
    draw = random.Random(0)
    for number, nproc in enumerate((2, 3, 1, 2), 1):
        process = start(*command, "--nproc", nproc, log=log, cwd=folder)
        aim = 30 * number + draw.randint(0, 10)
        if number == 3:
            wait_for(lambda aim=aim: steps_in(log) >= aim and is_incomplete(checkpoints), process)
        else:
            wait_for(lambda aim=aim: steps_in(log) >= aim, process)
        process.kill()
        process.wait()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    process = start(*torchrun, *command, log=log, cwd=folder, env={"OMP_NUM_THREADS": "1"})
    wait_for(lambda: steps_in(log) >= 135, process)
    process.terminate()
    process.wait(timeout=100)
    stopped_at = steps_in(log)
    assert stopped_at < 200 and (checkpoints / f"step-{stopped_at}" / ".metadata").exists(), "it saved at once"
    status, stdout, stderr = run(*command, "--nproc", 2, cwd=folder)
    assert (status, stderr) == (0, "")
    assert re.findall(r"^step (\d+)/200 \| loss", stdout, re.M)[0] == str(stopped_at + 1)
    expected = transformers.AutoModelForCausalLM.from_pretrained("whole").state_dict()
    for name, value in transformers.AutoModelForCausalLM.from_pretrained("killed").state_dict().items():
        assert (value - expected[name]).abs().max() < 1e-3, name


# ---- what is held and sent ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watch_peak(peaks):
    """Append by how much the memory of this process grows while the block runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_bytes()
    yield
    peaks.append(peak_bytes() - before)


def peak_bytes():
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def measure_memory(local_rank, world_size):
    dist.init_process_group(even_alone=True)
    args = arguments("large", f"--output out-{world_size}")
    peaks = []
    whole, config, types, *_ = llm_FSDP.prepare(args)
    if local_rank == 0:
        sum(param.sum() for param in whole.parameters())  # its files are in memory before
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
    make_inputs("large")
    n_bytes = sum(file.stat().st_size for file in Path("large").glob("*.safetensors"))
    largest = 4 * 16000 * 1024
    assert 400e6 < n_bytes < 420e6
    for world_size in (1, 2, 4):
        loading, saving = zip(*dist.launch(measure_memory, nprocs=world_size), strict=True)
        print(world_size, [[round(n / 1e6) for n in part] for part in (loading, saving)], flush=True)
        assert 0.8 * n_bytes < sum(loading) < 1.1 * n_bytes + 3 * world_size * largest
        assert 0.8 * n_bytes * (world_size > 1) <= sum(saving) < 1.2 * n_bytes + 3 * world_size * largest
        for rank in range(1, world_size):
            assert loading[rank] < n_bytes / world_size + 4 * largest and saving[rank] < 4 * largest
        shutil.rmtree(f"out-{world_size}")


@pytest.mark.guard
@pytest.mark.slow
@on_processes(2)
@pytest.mark.parametrize(
    "model, options",
    not_refused(("llama", ""), ("llama", "--gather-once"), ("llama", "--lora 4"), ("wide", "--lora 4 --nf4")),
)
def test_bytes_that_are_held_and_types_that_are_sent_are_those_of_the_docstring(model, options):
    """Per row: two layers twice, and embedding and root; of the adapters only those two layers are reduced."""
    make_inputs(model, torch.bfloat16)
    job = Job(model, f"{options} --bf16")
    trained = [param for param in job.model.parameters() if param.requires_grad]
    optimizer, _ = llm_FSDP.make_optimizer(job.model, STEPS, lr=1e-5, warmup=0, weight_decay=0.0)
    for first in (0, BATCH):
        own_rows = list(llm_documents.share_of(job.rows, range(first, first + BATCH)))
        with Watch() as watch:  # the second step
            optimizer.zero_grad()
            llm_FSDP.backward(job.model, own_rows, job.args.gather_once)
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
    numbers, held = {True: 0, False: 0}, {True: 0, False: 0}  # by whether they are trained
    for param in job.model.parameters():
        state = [value for value in optimizer.state.get(param, {}).values() if value.dim()]
        tensors = [tensor for tensor in (param, param.grad, *state) if tensor is not None]
        numbers[param.requires_grad] += param.numel()
        held[param.requires_grad] += sum(tensor.to_local().nbytes for tensor in tensors)
    frozen = 2 * numbers[False]
    if job.args.nf4:
        frozen = 9 / 16 * 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 64) + 2 * (2 * 259 + 5) * 64
    assert {param.dtype for param in trained} == {torch.float32}
    assert held[True] == pytest.approx(16 * numbers[True] / 2, rel=0.01)
    assert held[False] == pytest.approx(frozen / 2, rel=0.01)
    gathered, times = watch.types_of("gather"), BATCH // 2
    if job.args.gather_once:
        times = 1
        assert len(gathered) == 4
    assert set(gathered) == {"torch.bfloat16"} | ({"torch.uint8"} if job.args.nf4 else set())
    assert watch.types_of("reduce") == ["torch.float32"] * (2 if job.args.lora else 4) * times
    assert watch.host_reads == BATCH // 2, "in each forward transformers looks for packed positions"


def test_of_a_layer_in_4_bits_no_weight_is_saved_for_backward():
    layer, saved = llm_hub.LinearNF4(nn.Linear(128, 64)), []
    inputs = torch.randn(3, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        layer(inputs).sum().backward()
    kept = {tensor.data_ptr() for tensor in saved if tensor.nbytes}
    assert kept == {inputs.data_ptr()}, "which the adapter beside it keeps too; the layer has its 4 bits"
    weight = llm_hub.unpacked(layer.packed, layer.scales, layer.levels_of_byte)
    assert (inputs.grad - weight.sum(dim=0)).abs().max() < 1e-6
    zeros = nn.Linear(64, 1)
    nn.init.zeros_(zeros.weight)
    layer = llm_hub.LinearNF4(zeros)
    assert not llm_hub.unpacked(layer.packed, layer.scales, layer.levels_of_byte).any()


@pytest.mark.parametrize("lora", [None, 2])
@pytest.mark.parametrize("name", [*language.FIVE, "gemma2"])
def test_the_loss_in_chunks_equals_that_of_a_row_and_has_the_logits_of_one_chunk(name, lora):
    """In float64, and the gradients too. Gemma 2 caps its logits behind the output layer."""
    tokens = torch.randint(250, (1, 50))
    row = SimpleNamespace(tokens=tokens, positions=torch.arange(50)[None] % 20, places=torch.arange(3, 40))
    row.targets = tokens[0, 4:41]
    row_without_targets = SimpleNamespace(**vars(row) | {"places": row.places[:0], "targets": row.targets[:0]})
    found = []
    with float64_everywhere():
        torch.manual_seed(0)
        model = llm_hub.build_model(language.CONFIGS[name](), torch.float64)
        model = llm_FSDP.change_model(model, lora, 4.0)
        for size in (None, 7, 100):
            each, sizes = copy.deepcopy(model), []
            each.get_output_embeddings().register_forward_hook(lambda *args, to=sizes: to.append(args[2].shape[1]))
            if size:
                llm_hub.compute_loss_in_chunks(each, size, llm_FSDP.loss_of)
            loss = llm_FSDP.sum_of_losses(each, row)
            loss.backward()
            assert max(sizes) == min(size or 37, 37)
            trained = [param for param in each.parameters() if param.requires_grad]
            found.append((loss.detach(), *[param.grad for param in trained]))
            assert llm_FSDP.sum_of_losses(each, row_without_targets) == 0
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert (one - other).abs().max() <= 1e-12


@pytest.mark.parametrize(("options", "runs"), [("", 1), ("--recompute", 2)])
def test_with_recompute_a_layer_runs_again_in_backward(options, runs, folder):
    model, calls = Job(options=options).model, []
    llm_hub.layers_of(model)[0].mlp.register_forward_pre_hook(lambda *_: calls.append(None))
    model(torch.arange(8)[None]).logits.sum().backward()
    assert len(calls) == runs


# ---- another loss ---------------------------------------------------------------------------------------------------

PAIRS = [("2+2?", "4.", "it is five"), ("Hi.", "Hello!", "no")]  # a question, the chosen answer and the rejected one


def conversation(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.mark.guard
@pytest.mark.slow
@on_processes(1, 2)
def test_dpo_of_the_page_equals_its_definition():
    """-log sigmoid(beta (gain of the chosen answer - gain of the rejected one)), one conversation at a time."""
    page = blocks_of_page("language_models.md", "(DPO)?\n", torch=torch, F=F)
    tokenizer = language.byte_tokenizer()
    with float64_everywhere():
        make_inputs("llama", torch.float64)
        if dist.is_primary():
            lines = []
            for question, *answers in PAIRS:
                chosen, rejected = (conversation(question, answer) for answer in answers)
                lines.append(("a line", json.dumps({"chosen": chosen, "rejected": rejected})))
            page["write_pairs"]("pairs.npy", lines, tokenizer, LENGTH)
        dist.barrier()
        job = Job("llama", "--data pairs.npy --eval-data pairs.npy --lora 2 --lora-alpha 4", length=None)
        llm_hub.check_rows(job.model, LENGTH, pad=False)
        for name, param in job.model.named_parameters():
            if "lora_B" in name:
                nn.init.constant_(param, 0.05)
        own_rows = list(llm_documents.share_of(job.rows, [0, 1]))
        loss = sum(page["sum_of_losses"](job.model, row) for row in own_rows)
        (loss * dist.get_world_size()).backward()
        padding = llm_documents.on_device(llm_documents.make_rows([[]], LENGTH)[0])
        assert page["sum_of_losses"](job.model, padding) == 0
        gradients = {plain_name(name): param.grad for name, param in job.model.named_parameters()}
        values = whole_parameters(job.model)
        # The definition.
        model = plain_model(job.args, values)
        for name, param in model.named_parameters():
            param.data = values[plain_name(name)].clone()
        total = 0
        for question, *answers in PAIRS:
            gains = []
            for answer in answers:
                line = json.dumps({"messages": conversation(question, answer)})
                (((tokens, targets),),) = llm_documents.read([("", line)], tokenizer, LENGTH)
                tokens, targets = torch.tensor(tokens).long()[None], torch.tensor(targets).long()
                losses = [F.cross_entropy(model(tokens).logits[0], targets, reduction="sum")]
                with model.disable_adapter():
                    losses.append(F.cross_entropy(model(tokens).logits[0], targets, reduction="sum"))
                gains.append(losses[1].detach() - losses[0])
            total = total - F.logsigmoid(0.1 * (gains[0] - gains[1]))
        total.backward()
    assert (dist.all_reduce(loss.detach()) - total.detach()).abs() < 1e-8
    for name, param in model.named_parameters():
        if ".lora_" in name:
            assert (full(gradients[plain_name(name)]) - param.grad).abs().max() < 1e-7, name


# ---- results --------------------------------------------------------------------------------------------------------


def write(path, files):
    for name, content in files.items():
        (path / name).write_text(content)


def configure(path, changes, name="config.json"):
    write(path, {name: json.dumps(json.loads((path / name).read_text()) | changes)})


def weights_of(path):
    found = {}
    for file in path.glob("*.safetensors"):
        found |= safetensors.torch.load_file(file)
    return found


def other_files_of(path):
    """All files without weights, and their bytes."""
    ends = ("safetensors", "safetensors.index.json", ".bin")
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file() and not file.name.endswith(ends)}


TIED = {"tie_word_embeddings": True}
TEMPLATE = "{# other #}" + llm_documents.CHAT_TEMPLATE
WRITTEN = [  # a model, its type, changes of its configuration, and options
    *[(name, torch.float32, {}, options) for name in language.FIVE for options in ("", LORA)],
    *[("llama_tied", torch.float32, {}, options) for options in ("", LORA)],
    ("llama", torch.float32, TIED, ""),  # and the files do not tie them
    ("llama", torch.float32, {}, "--chat-template template"),
    ("wide", torch.float32, {}, f"{LORA} --nf4"),
    ("llama", torch.bfloat16, {}, "--bf16"),
    ("llama", torch.bfloat16, {}, f"{LORA} --bf16"),
    # Routers in float32.
    ("glm4_moe", torch.bfloat16, {}, ""),
    ("mimo_v2", torch.bfloat16, {}, f"{LORA} --attention eager"),
]


@pytest.mark.guard
@pytest.mark.slow
@on_processes(2)
@pytest.mark.parametrize("name, dtype, changes, options", not_refused(*WRITTEN))
def test_results_load(name, dtype, changes, options):
    """By transformers or PEFT, with the values that were trained, in the types of the base.

    The base's other files are copied before training. Frozen weights are held as they were loaded.
    """
    make_inputs(name, dtype)
    base = Path(name)
    if dist.is_primary():
        configure(base, changes)
        write(base, {"LICENSE": "mine", "preprocessor_config.json": '{"size": 224}\n', "pytorch_model.bin": "weights"})
        write(Path(), {"template": TEMPLATE})
    dist.barrier()
    job = Job(name, options)
    before, others = weights_of(base), other_files_of(base)
    if job.args.lora:
        del others["config.json"]
    if job.args.chat_template:
        others["chat_template.jinja"] = TEMPLATE.encode()
    assert other_files_of(Path("out.incomplete")) == others
    for key, tensor in [*job.model.named_parameters(), *job.model.named_buffers()]:
        if tensor.requires_grad:
            assert tensor.dtype == torch.float32
            nn.init.normal_(tensor, std=0.1)  # as after training
        elif plain_name(key) in before:
            assert tensor.dtype == before[plain_name(key)].dtype, key
    logits = logits_of(job.model)
    state = {plain_name(key): full(value) for key, value in job.model.state_dict().items()}
    job.save()
    if not dist.is_primary():
        return
    assert not Path("out.incomplete").exists()
    if job.args.lora:
        new = {"adapter_model.safetensors", "adapter_config.json"}
        loaded = peft.AutoPeftModelForCausalLM.from_pretrained("out", dtype="auto")
    else:
        new = {"model.safetensors"}
        loaded = transformers.AutoModelForCausalLM.from_pretrained("out")
        types = {key: value.dtype for key, value in weights_of(Path("out")).items()}
        assert types == {key: value.dtype for key, value in before.items()}
    assert set(os.listdir("out")) == {*others, *new}
    assert others.items() <= other_files_of(Path("out")).items()
    for key, value in loaded.state_dict().items():
        if not (job.args.nf4 and "base_layer" in key):
            assert torch.equal(state[plain_name(key)].to(value.dtype), value), key
    if job.args.nf4:  # PEFT puts the adapters beside the weights in full precision
        for module in loaded.modules():
            if hasattr(module, "lora_A"):
                module.base_layer.weight.data = rounded_to_nf4(module.base_layer.weight.data)
    if dtype == torch.float32:
        assert (logits_of(loaded) - logits).abs().max() < 1e-5 * logits.abs().max()


@pytest.mark.parametrize("options", ["", "--lora 2"])
def test_a_kill_while_a_result_is_written_leaves_a_whole_one_or_none(options, folder):
    """The next run needs nothing to be deleted."""
    for step in ("os.replace", "shutil.rmtree", "os.rename"):
        job = Job(options=options)
        with mock.patch(step, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            job.save()
        assert not Path("out").exists()
    job = Job(options=options)
    job.save()
    assert not Path("out.incomplete").exists()
    kind = peft.AutoPeftModelForCausalLM if options else transformers.AutoModelForCausalLM
    assert (logits_of(kind.from_pretrained("out")) - logits_of(job.model)).abs().max() < 1e-5


def test_a_model_on_the_hub_is_read_as_a_folder_is(folder, monkeypatch):
    """Its adapters name it as it is called there, and those of a folder name the folder from its root."""
    download = mock.Mock(return_value="llama")
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for name, base in (("nobody/nothing", "nobody/nothing"), ("./llama", str(folder / "llama"))):
        job = Job(options=f"--model {name} --lora 2 --output {name[:3]}")
        job.save()
        written = json.loads(Path(job.args.output, "adapter_config.json").read_text())
        assert written["base_model_name_or_path"] == base
    assert download.call_count == 1 and download.call_args.args == ("nobody/nothing",)
    ignored = download.call_args.kwargs["ignore_patterns"]
    assert {"*/*", "*.bin", "*.gguf"} <= set(ignored) and "*.safetensors" not in ignored


@pytest.mark.parametrize(("part", "value"), [("pre_tokenizer", None), ("normalizer", {"type": "Lowercase"})])
def test_the_tokenizer_is_the_one_of_the_file(part, value, folder, capsys):
    """Qwen2Tokenizer would put in its own."""
    configure(Path("llama"), {part: value}, "tokenizer.json")
    configure(Path("llama"), {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]})
    configure(Path("llama"), {"tokenizer_class": "Qwen2Tokenizer"}, "tokenizer_config.json")
    tokenizer, _ = llm_hub.load_tokenizer_and_config("llama", "sdpa")
    right = Tokenizer.from_file("llama/tokenizer.json")
    assert tokenizer("12 ABC", add_special_tokens=False).input_ids == right.encode("12 ABC").ids
    assert "transformers builds another tokenizer than" in capsys.readouterr().out


# ---- errors ---------------------------------------------------------------------------------------------------------


def move(path, name):
    path.rename(path.with_name(name))


def remove(path, pattern):
    for file in path.glob(pattern):
        file.unlink()


def cut_in_half(path, name):
    os.truncate(path / name, (path / name).stat().st_size // 2)


def configure_tokenizer(path, changes):
    configure(path, changes, "tokenizer_config.json")


def change_weights(path, changes):
    """Of the first file. None removes a weight."""
    file = sorted(path.glob("*.safetensors"))[0]
    weights = safetensors.torch.load_file(file) | changes
    weights = {name: value for name, value in weights.items() if value is not None}
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})


def take(path, name):
    """Another model."""
    shutil.rmtree(path)
    language.make_folder(name, path)


def add_token(path, name):
    """To the tokenizer, and to a file of data, but not to the model."""
    tokenizer = language.byte_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(path)
    language.write_jsonl(Path("a.jsonl"), [{"text": "nothing new"}])
    language.write_jsonl(Path("b.jsonl"), [{"text": "nothing new"}, {"text": "a <new> b"}])


CONVERSATIONS = [record for record in language.records() if "messages" in record]
LONG_CHAT = {"messages": conversation(100 * "a", "b")}
OWN_CODE = ".*custom code.*"
WITH_CODE = [
    (configure, {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}),
    (configure, {"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "code.Model"}}),
    (configure_tokenizer, {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.Mine", None]}}),
]
OTHER_LAYERS = "PEFT would adapt other layers than the linear ones, such as .*"  # also when it loads adapters
NO_BLOCKS = "--nf4 needs linear layers whose inputs are a multiple of 64.*"
NO_EMBEDDING = "token 259, '<new>', of the data has no embedding.*"
REFUSED = [  # how the folder of the model is changed, options, and what is said after --model ./llama:
    (move, "elsewhere", "", "there is no such folder"),
    (cut_in_half, "model-00001-of-00003.safetensors", "", ".*incomplete.*"),
    (remove, "tokenizer*", "", ".*backend tokenizer.*sentencepiece.*"),
    (remove, "model*", "", ".*no file named model.safetensors.*"),
    (configure, {"vocab_size": 300}, "", r".* for its config.json, 2 mismatched weights, .*\(\[300, 32\]\)\)"),
    (configure, {"quantization_config": {"quant_method": "mxfp4"}}, "", ".* quantized weights cannot be trained"),
    *[(*change, options, OWN_CODE) for change in WITH_CODE for options in ("", "--from-scratch")],
    (change_weights, {"model.embed_tokens.weight": None}, "", ".* 1 missing weights, such as .*embed_tokens.weight"),
    (change_weights, {"up_proj.bias": torch.zeros(64)}, "", ".* 1 unexpected weights, such as up_proj.bias"),
    (write, {}, "--length 257", "--length 257 is more than its 256 positions"),
    (write, {}, "--attention flash_attention_2", ".*[Ff]lash.*"),
    (take, "mamba", "", ".*eager.*"),  # it has no sdpa
    (take, "gpt2", f"{LORA} --nf4", NO_BLOCKS),
    (take, "llama", f"{LORA} --nf4", NO_BLOCKS),
    (take, "glm4_moe", LORA, OTHER_LAYERS),
    (add_token, None, "--data a.jsonl --eval-data b.jsonl", NO_EMBEDDING),
    (add_token, None, "--data b.jsonl --eval-data a.jsonl", NO_EMBEDDING),
]


@pytest.mark.parametrize("change, value, options, cause", not_refused(*REFUSED))
def test_a_model_that_cannot_be_used_is_one_line(change, value, options, cause, folder, monkeypatch):
    ask = mock.Mock(return_value="n")
    monkeypatch.setattr("builtins.input", ask)  # transformers asks whether code may run
    change(Path("llama"), value)
    assert re.fullmatch(f"--model ./llama: {cause}", exit_message(Job, options=options))
    assert not Path("out.incomplete").exists(), "nothing is left of a run that could not begin"
    assert not ask.called


def test_before_torch_2_12_nf4_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0"))
    with pytest.raises(SystemExit):
        arguments(options="--lora 4 --nf4")
    assert "argument --nf4: before torch 2.12" in capsys.readouterr().err


def test_other_mistakes_are_one_line(folder):
    (folder / "a file").touch()
    language.write_jsonl(Path("long.jsonl"), [LONG_CHAT])
    for records, options, cause in (
        (CONVERSATIONS, "--length 4", "too few lines fit into --length 4 "),
        ([{"text": 900 * "a"}], "", "name --eval-data"),  # one long document is one line
        (CONVERSATIONS, "--eval-data long.jsonl", "too few lines fit into --length 64 "),
        (CONVERSATIONS, "--chat-template none.jinja", "--chat-template none.jinja: FileNotFoundError: "),
    ):
        language.write_jsonl(Path("data.jsonl"), records)
        assert cause in exit_message(Job, options=options)
    assert exit_message(Job(options="--warmup 500").train, 2).startswith("argument --warmup: 500 is not less than 2")
    with pytest.raises(dist.DistributedError, match=r"^cannot write a file/out: NotADirectoryError"):
        llm_hub.begin("a file/out", Path("llama"), is_whole=True)


@pytest.mark.slow
def test_without_network_a_name_that_is_not_cached_is_one_line(folder):
    env = {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    command = [SCRIPT, "--model", "nobody/nothing", "--data", "data.jsonl", "--output", "out", "--nproc", 2]
    status, stdout, stderr = run(*command, env=env, cwd=folder)
    assert (status, stdout) == (1, "")
    assert stderr.startswith("--model nobody/nothing: ") and stderr.count("\n") == 1


# ---- checkpoints and epochs -----------------------------------------------------------------------------------------

OTHERS = [  # options of a run that would go on, and what is said of the checkpoint
    ("--seed 1", "--seed 0, not 1"),
    ("--data other.jsonl", "--data ['data.jsonl'], not ['other.jsonl']"),
    ("--pad", "--pad False, not True"),
    ("--length 32", "--length 64, not 32"),
    ("--weight-decay 0.5", "--weight-decay 0.0, not 0.5"),
    ("--lr 0.5", "--lr 1e-05, not 0.5"),
    ("--warmup 3", "--warmup 0, not 3"),
    ("--clip 2", "--clip 1.0, not 2.0"),
    ("--bf16", "--bf16 False, not True"),
    ("--lora 3", "--lora "),
    ("--model ./other-weights", "--model (checksum) "),
    ("--model ./other-config", "config.json: rope_parameters "),
]


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["", "--lora 2"])
def test_a_checkpoint_of_other_options_or_weights_is_refused(lora, folder):
    shutil.copy("data.jsonl", "other.jsonl")
    for copied in ("other-weights", "other-config"):
        shutil.copytree("llama", copied)
    change_weights(Path("other-weights"), {"model.embed_tokens.weight": torch.ones(259, 32)})
    configure(Path("other-config"), {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}})
    options = f"{lora} --lr 1e-5 --warmup 0 --checkpoint-dir saved"
    Job(options=options).train(1)
    for change, line in OTHERS:
        message = exit_message(Job(options=f"{options} {change}").train, 1)
        assert f"was saved with {line}" in message, message


def test_a_resume_reads_no_documents(folder):
    """Rows of the first start are taken once there is a checkpoint, and not before: then the options may change."""
    Job(options="--checkpoint-dir saved", length=32)
    job = Job(options="--checkpoint-dir saved")
    rows = llm_documents.mapped(job.rows)
    assert rows.shape[2] == LENGTH
    job.train(1)
    Path("data.jsonl").unlink()
    for options in ("--checkpoint-dir saved", "--data saved/rows.npy --eval-data saved/held-out.npy"):
        assert (llm_documents.mapped(Job(options=options, length=None).rows) == rows).all()
    llm_documents.write_rows("long.npy", [2 * [np.ones(300, dtype=np.int32)]], 300)
    line = "--model ./llama: --length 300 is more than its 256 positions"
    assert exit_message(Job, options="--data long.npy --eval-data long.npy", length=None) == line


@pytest.mark.guard
@pytest.mark.slow
def test_a_result_is_written_from_a_checkpoint_that_has_all_steps_or_more(folder):
    options = "--checkpoint-dir saved --save-every 2 --eval-every 2 --lr 0.01"
    job = Job(options=options)
    held_out = dict(re.findall(r"^step (\d)/5 \| held-out (\S+)", job.train(5), re.M))
    assert list(held_out) == ["0", "2", "4", "5"]
    expected = whole_parameters(job.model)
    for steps in (5, 1):
        job = Job(options=options)
        line = f"no steps are left: the checkpoint has 5 steps, and --epochs gives {steps}\n"
        assert job.train(steps).endswith(f"{line}step 5/{steps} | held-out {held_out['5']}\n")
        assert all(torch.equal(value, expected[name]) for name, value in whole_parameters(job.model).items())
    shutil.rmtree("saved/step-5")  # the result of an older checkpoint
    assert Job(options=options).train(1).endswith(f"step 4/1 | held-out {held_out['4']}\n")


@pytest.mark.guard
@pytest.mark.slow
def test_other_epochs_are_refused_while_steps_are_left_and_allowed_after_the_last_one(folder):
    def train(steps, is_preempted=False):
        with leaving_is_an_error(agreed=lambda preemption: is_preempted):
            Job(options="--checkpoint-dir saved").train(steps)

    with pytest.raises(Left):
        train(5, is_preempted=True)
    for other in (3, 4, 8):
        line = f"argument --epochs: it gives {other} steps, and the checkpoint is of 5: the learning rate would jump"
        assert exit_message(train, other).startswith(line)
    train(1)  # no steps are left: it only writes the result
    train(5)
    with pytest.raises(Left):
        train(8, is_preempted=True)
    assert "is of 8" in exit_message(train, 9), "the run of 8 is the one to finish now"
    train(6)
    with pytest.raises(Left):
        train(8, is_preempted=True)
    train(8, is_preempted=True)  # a SIGTERM during the last step does not keep the result from being written


@pytest.mark.parametrize("name", ["loss", "gradient norm"])
def test_a_run_that_diverges_saves_nothing(name, folder):
    """However rarely it prints. A norm can be no number while the loss before the step still is one."""
    options = {"loss": "--lr 1e30 --save-every 2", "gradient norm": "--lr 1e-5 --save-every 1"}[name]
    job = Job(options=f"{options} --log-every 1000 --checkpoint-dir saved")
    if name == "gradient norm":
        head = job.model.get_output_embeddings()
        head.register_full_backward_hook(lambda module, inputs, outputs: (math.nan * inputs[0],))
    message = exit_message(job.train, 4)
    assert re.fullmatch(rf"the {name} is (nan|inf): training has diverged, try a lower --lr", message)
    assert not list(Path("saved").glob("step-*"))


# ---- what is printed and tracked ------------------------------------------------------------------------------------


def test_what_is_printed_is_of_the_steps_alone(folder, monkeypatch):
    """A row takes a second; evaluations and saves take far longer. Padding does not count. The loss is a mean."""
    options = "--eval-every 3 --lr 0.01 --warmup 4"
    losses = re.findall(r"\| loss (\S+)", Job(options=f"{options} --output other").train(6))  # of each step
    clock = SimpleNamespace(now=0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(llm_FSDP, "time", clock)

    def pass_time(seconds):
        clock.now += seconds

    monkeypatch.setattr("checkpoint_sharded.save", lambda *_, **__: pass_time(1000))
    job = Job(options=f"{options} --log-every 2 --checkpoint-dir saved --save-every 3")
    job.model.register_forward_pre_hook(lambda model, _: pass_time(1 if model.training else 100))
    printed = job.train(6)
    order = llm_documents.order_of(job.n_rows, 6 * BATCH, 0)
    n_tokens = (llm_documents.mapped(job.rows)[order, llm_documents.TOKENS] >= 0).sum(axis=1)
    first = 0
    for done, lr in ((2, "4.0e-03"), (3, "6.0e-03"), (4, "8.0e-03"), (6, ".*")):
        tokens = n_tokens[first * BATCH : done * BATCH].mean()
        line = rf"^step {done}/6 \| loss (\S+) .* \| lr {lr} \| {tokens:,.0f} tokens/s"
        (loss,) = re.findall(line, printed, re.M)
        assert float(loss) == pytest.approx(np.mean([float(each) for each in losses[first:done]]), abs=1e-4)
        first = done


def test_an_example_of_the_loss_is_printed_before_training(folder):
    language.write_jsonl(Path("data.jsonl"), 2 * [{"messages": conversation("Hi.", "x")}])
    stdout = Job(options="--eval-data data.jsonl").stdout.getvalue()
    assert stdout.endswith("in the loss, for example: 'x<|end|>' after '<|user|>Hi.<|end|><|assistant|>'\n")


@pytest.mark.guard
@pytest.mark.slow
def test_a_run_and_its_resumed_end_are_one_run_of_the_tracker(folder, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("DIR", "DATA_DIR", "CACHE_DIR", "CONFIG_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(folder))
    agreed = iter([False, True])
    with leaving_is_an_error(agreed=lambda preemption: next(agreed, False)):
        first, second = (Job(options="--wandb --tensorboard runs --checkpoint-dir saved") for _ in range(2))
        with pytest.raises(Left):
            first.train(4)
        second.train(4)
    assert len({path.name.rpartition("-")[2] for path in folder.glob("wandb/offline-run-*")}) == 1
    assert wandb.run is None, "it is closed"
    events = EventAccumulator("runs").Reload()
    assert {*events.Tags()["scalars"]} == {"loss", "lr", "norm", "tokens_per_second", "held_out"}
    printed = re.findall(r"^step (\d)/4 \| loss (\S+)", first.stdout.getvalue() + second.stdout.getvalue(), re.M)
    assert [(str(event.step // BATCH), f"{event.value:.4f}") for event in events.Scalars("loss")] == printed
    assert [event.step // BATCH for event in events.Scalars("held_out")] == [0, 2, 4], "the start, the resume, the end"


def test_defaults_that_depend_on_other_options(folder):
    with_model = "--model m --data d"
    rates = {
        "": 4e-3,
        with_model: 2e-5,
        f"{with_model} --from-scratch": 3e-4,
        f"{with_model} --lora 4": 2e-4,
        f"{with_model} --lora 4 --lr 0.5": 0.5,
    }
    assert {options: llm_FSDP.parse_args(options.split()).lr for options in rates} == rates
    for steps, warmup in ((3, 0), (50, 5), (1000, 10)):
        _, scheduler = llm_FSDP.make_optimizer(nn.Linear(2, 2), steps, lr=1.0, warmup=None, weight_decay=0.0)
        rates = [scheduler.lr_lambdas[0](step) for step in range(steps)]
        assert rates.index(max(rates)) == warmup and max(rates) == pytest.approx(1)


# ---- documents that share a row -------------------------------------------------------------------------------------

ATTENTIONS = itertools.product(language.FIVE, ["sdpa", "eager", "flex_attention"])
OFFERED = [pair for pair in ATTENTIONS if pair != ("gpt2", "flex_attention")]  # which transformers refuses


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("name, attention", OFFERED)
def test_packed_documents_do_not_see_each_other(name, attention, folder):
    """The loss of a row equals the sum of those of its documents: in float64, and in float32 by flex_attention."""
    dtype = torch.float32 if attention == "flex_attention" else torch.float64
    make_inputs(name, dtype)
    with float64_everywhere(), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation=attention)
        row = max(documents_of(arguments(name)), key=len)
        assert len(row) >= 3
        rows = llm_documents.make_rows([row, *([document] for document in row)], LENGTH)
        packed, *alone = [llm_FSDP.sum_of_losses(model, llm_documents.on_device(each)).item() for each in rows]
    assert packed == pytest.approx(sum(alone), rel=1e-5)


LFM2 = {**language.SMALL, "hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False}
LFM2 |= {"layer_types": ["conv", "full_attention"]}
BERT = {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
DECODER = {**BERT, "is_decoder": True}
WHISPER = {"vocab_size": 259, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WHISPER |= {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 8.0, 32.0]}
PHI3 = {**language.SMALL, "pad_token_id": 0, "original_max_position_embeddings": 32, "rope_parameters": LONGROPE}
MIXED = "a document has other logits in a row of --length .* than alone: use --pad"
AHEAD = "it is not causal: a token sees those after it, and so its target"
PLACES = "logits_to_keep"
ROWS = [  # a model, its attention, the length, and what is said of packed and of padded rows
    *((name, {}, "sdpa", 64, None, None) for name in language.FIVE),
    # The convolutions of an untrained Lfm2 move the next document's logits by less than a hundredth.
    ("Lfm2", LFM2, "sdpa", 64, MIXED, None),
    ("Bert", BERT, "sdpa", 64, AHEAD, AHEAD),  # a little
    ("Bert", DECODER, "sdpa", 64, MIXED, None),
    # Its rotary factors depend on the longest document of a row.
    ("Phi3", PHI3, "sdpa", 32, None, None),
    ("Phi3", PHI3, "sdpa", 60, MIXED, None),
    ("Roberta", DECODER, "eager", 64, "row of --length 64", "row of --length 64 than alone$"),  # positions from 2
    ("Whisper", WHISPER, "eager", 64, PLACES, PLACES),  # which it does not take
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name, sizes, attention, length, packed, padded", ROWS)
def test_rows_that_mix_documents_or_show_the_future_are_refused(name, sizes, attention, length, packed, padded, dtype):
    make_config = language.CONFIGS.get(name) or getattr(transformers, f"{name}Config")
    config = make_config(**copy.deepcopy(sizes))
    config._attn_implementation = attention
    with float64_everywhere() if dtype == torch.float64 else contextlib.nullcontext():
        torch.manual_seed(0)
        model = llm_hub.build_model(config, dtype)
        model.reshard = lambda: None
        for pad, expected in ((False, packed), (True, padded)):
            if expected:
                with pytest.raises(dist.DistributedError, match=expected):
                    llm_hub.check_rows(model, length, pad)
            else:
                llm_hub.check_rows(model, length, pad)
                assert model.training


@pytest.mark.slow
@on_processes(1)
def test_the_script_refuses_a_model_that_mixes_documents_and_trains_it_with_pad():
    make_inputs("mamba")
    options = "--attention eager --epochs 0.5"
    assert "use --pad" in exit_message(llm_FSDP.main_worker, 0, 1, arguments("mamba", options))
    llm_FSDP.main_worker(0, 1, arguments("mamba", f"{options} --pad"))
    written, before = (transformers.AutoModelForCausalLM.from_pretrained(path) for path in ("out", "mamba"))
    assert not torch.equal(logits_of(written), logits_of(before))
