"""Hugging Face's format, read into the shards of FSDP and written from them; and LoRA.

    with torch.device("meta"):
        model = hub.build_model(config, torch.float32)  # shapes without memory
        hub.add_lora(model, rank=16, alpha=32)          # leave it out to train all parameters
    for layer in hub.layers_of(model):
        fully_shard(layer)
    fully_shard(model)
    hub.fill(model, whole)                              # rank 0 has the `whole` model; the other ranks pass None
                                                        # with add_lora above, `whole` needs add_lora too
    hub.begin("folder", tokenizer, frame)               # the `frame` is the model without weights; None for adapters
    ...
    hub.save_model(model, frame, "folder")              # transformers.AutoModelForCausalLM.from_pretrained("folder")
    hub.save_adapters(model, "folder", base="Qwen/Qwen3-8B")  # peft.PeftModel.from_pretrained(base, …)

Only rank 0 reads and writes files. It needs one whole model in the CPU's memory to write it. To read one it needs less,
because safetensors maps the files into memory, and no rank ever holds a whole model on its device.
"""

import contextlib
import copy
import json
import os
import shutil
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

import distributed as dist

# ---- errors of one line --------------------------------------------------------------------------------------------

ADVICE = {  # on errors of transformers that name an argument of its own
    "attn_implementation": "use --attention eager",
    "trust_remote_code": "this script runs no code from a model's folder",
}


@contextlib.contextmanager
def one_line(what):
    """Turn what transformers raises, which may be anything, into a DistributedError."""
    try:
        yield
    except dist.DistributedError:
        raise
    except Exception as failure:
        cause = str(failure).strip().partition("\n")[0] or type(failure).__name__
        for argument, advice in ADVICE.items():
            if argument in str(failure):
                cause = f"{cause.partition('. ')[0]}: {advice}"
        raise dist.DistributedError(f"{what}: {cause}") from None


def on_rank_0(function, *args):
    """Call `function` on rank 0, and return its result there. A DistributedError is raised on every rank."""
    result = error = None
    if dist.is_primary():
        try:
            result = function(*args)
        except dist.DistributedError as failure:
            error = str(failure)
    dist.raise_on_all(error)
    return result


# ---- read ---------------------------------------------------------------------------------------------------------


def layers_of(model):
    """The layers of a model of transformers, in their order: what FSDP gathers at a time.

    Raises DistributedError if the model has none that transformers marks as such.
    """
    layers = []
    inside = set()  # some models have layers inside of layers
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module not in inside:
            layers.append(module)
            inside.update(module.modules())
    if not layers:
        raise dist.DistributedError(f"{type(model).__name__} has no layers that transformers marks as such")
    return layers


def build_model(config, dtype):
    """An untrained model. Under torch.device("meta") it needs no memory. Its attention is the one of `config`."""
    config = copy.deepcopy(config)  # from_config writes the type into it
    vars(config).pop("quantization_config", None)  # what is built and written here is not quantized
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model.tie_weights()  # transformers 5.0 does not tie weights on "meta"
    return model


def load_tokenizer_and_config(name, attention):
    """Of a folder, or of a name on the Hub.

    `attention` is a name that transformers knows: "sdpa", "eager", "flex_attention", "flash_attention_2".
    """
    if Path(name, "adapter_config.json").exists():
        raise ValueError("it holds adapters: merge them into their model first, by merge_and_unload of PEFT")
    config = transformers.AutoConfig.from_pretrained(name, attn_implementation=attention, trust_remote_code=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise ValueError("its tokenizer is not a fast one, which knows at which character a token starts")
    return tokenizer, config


def load_model(name, config):
    """The whole model of a folder, or of a name on the Hub, on the CPU, in the type of its files."""
    for file in sorted(Path(name).glob("*.safetensors")):
        with one_line(f"--model {file}"):
            safe_open(file, framework="pt")  # raises if a part of the file is missing
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        name, config=copy.deepcopy(config), dtype="auto", output_loading_info=True, trust_remote_code=False
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(f"its files lack {len(missing)} weights, such as {missing[0]}")
    if getattr(model, "is_quantized", False):
        raise ValueError("its weights are quantized, and cannot be trained")
    return model


def fill(model, whole):
    """Give the sharded `model`, made on "meta", the values of rank 0's `whole` model. The others pass None.

    Rank 0 sends one tensor after the other, and each rank keeps its shards. Every rank must call it. Raises
    RuntimeError if `whole` and `model` differ in their names or shapes.
    """
    model.to_empty(device=dist.get_device())
    weights = {}
    if dist.is_primary():
        weights = whole.state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    # Some buffers are in no state_dict, such as the frequencies of rotary positions.
    if dist.is_primary():
        for buffer, source in zip(model.buffers(), whole.buffers(), strict=True):
            buffer.copy_(source)
    dist.sync_params(model.buffers())


# ---- use ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_packing(model, length):
    """Raise DistributedError if a document's logits depend on the document before it in the row.

    Models that know nothing of restarting positions, such as recurrent ones, would mix documents without an error.
    """
    length = min(24, length // 2)  # of each of two documents
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.get_text_config().vocab_size, (1, 2 * length), generator=generator)
    positions = torch.arange(length).repeat(2)[None]
    other = tokens.clone()
    other[:, :length] = tokens[:, :length].flip(1)  # another first document

    def logits_of(tokens, positions):
        tokens, positions = tokens.to(dist.get_device()), positions.to(dist.get_device())
        return model(tokens, position_ids=positions, use_cache=False).logits[0, -length:].float()

    model.eval()
    packed = logits_of(tokens, positions)
    behind_other = logits_of(other, positions)
    alone = logits_of(tokens[:, length:], positions[:, length:])
    model.train()
    model.reshard()  # the root stays gathered after forward, and would hide weights that are loaded now
    size = (alone - alone.mean(dim=0)).norm()
    leak = (packed - behind_other).norm() / size  # nothing, but experts may round otherwise
    shift = (packed - alone).norm() / size  # rounding in bfloat16 gives 0.01
    if not (leak < 0.002 and shift < 0.1):
        name = type(model).__name__.removeprefix("FSDP")
        attention = model.config._attn_implementation
        line = f"{name} with --attention {attention} does not keep packed documents apart: use --pad"
        raise dist.DistributedError(line)


@torch.no_grad()
def answer(model, tokenizer, prompt, n_tokens=100):
    """On rank 0, what the model finds most likely after `prompt`. Every forward needs all ranks, so all generate."""
    tokens = None
    if dist.is_primary():
        is_chat = bool(tokenizer.chat_template)
        if is_chat:
            turn = {"role": "user", "content": prompt}
            prompt = tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(prompt, add_special_tokens=not is_chat, return_tensors="pt").input_ids
    tokens = dist.broadcast_object(tokens).to(dist.get_device())
    model.eval()
    found = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=n_tokens,
        do_sample=False,
        synced_gpus=True,  # a rank that has finished continues until all have
    )
    if dist.is_primary():
        return tokenizer.decode(found[0, tokens.shape[1] :])
    return None


# ---- LoRA ---------------------------------------------------------------------------------------------------------


def add_lora(model, rank, alpha):
    """Freeze the model, and add alpha / rank * B(A(x)) to each linear layer of its blocks. B starts at 0.

    The adapters A (rank, inputs) and B (outputs, rank) become parts of their linear layer. So the model's own
    parameters keep their names. The layers are those that PEFT calls "all-linear". https://arxiv.org/abs/2106.09685
    """
    model.requires_grad_(False)
    dtype = torch.get_default_dtype()
    linears = []
    for layer in layers_of(model):
        linears.extend(module for module in layer.modules() if isinstance(module, nn.Linear | Conv1D))
    linears = list(dict.fromkeys(linears))  # some models share one between layers
    if not linears:
        raise dist.DistributedError(f"--lora: the layers of {type(model).__name__} have no nn.Linear to adapt")
    for linear in linears:
        n_outputs, n_inputs = linear.weight.shape
        if isinstance(linear, Conv1D):  # GPT-2's linear layer, whose weight is transposed
            n_inputs, n_outputs = linear.weight.shape
        linear.lora_A = nn.Linear(n_inputs, rank, bias=False, dtype=dtype)
        linear.lora_B = nn.Linear(rank, n_outputs, bias=False, dtype=dtype)
        nn.init.zeros_(linear.lora_B.weight)
        linear.lora_scale = alpha / rank
        linear.register_forward_hook(add_adapted)


def add_adapted(linear, inputs, output):
    x = inputs[0].to(linear.lora_A.weight.dtype)
    return output + linear.lora_scale * linear.lora_B(linear.lora_A(x)).to(output.dtype)


def adapted_layers(model):
    """The linear layers that have adapters, by their names."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_scale")}


@contextlib.contextmanager
def without_adapters(model):
    """Inside the block the model computes what it computed before `add_lora`."""
    adapted = adapted_layers(model).values()
    if not adapted:
        raise dist.DistributedError("the model has no adapters to leave out: see add_lora")
    scales = [linear.lora_scale for linear in adapted]
    for linear in adapted:
        linear.lora_scale = 0.0
    try:
        yield
    finally:
        for linear, scale in zip(adapted, scales, strict=True):
            linear.lora_scale = scale


# ---- write --------------------------------------------------------------------------------------------------------


def gathered(tensor):
    """The whole of a sharded tensor, on every rank, which must all call it."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor


def begin(folder, tokenizer, frame=None):
    """Before training, write a result without its weights to `folder`/.incomplete: what cannot be written fails here.

    `frame` is the model to be written, on "meta" and in the type of the result; None for adapters. Every rank must call
    it, and rank 0 alone needs the tokenizer. Raises DistributedError on every rank if it cannot write, or if `folder`
    has a result of the other kind, which would be loaded together with this one.
    """

    def write():
        if frame is None and Path(folder, "config.json").exists():
            raise dist.DistributedError(f"{folder} holds a whole model: choose another folder for the adapters")
        if frame is not None and Path(folder, "adapter_config.json").exists():
            line = f"{folder} holds adapters, which would be added to the model: choose another folder"
            raise dist.DistributedError(line)
        temporary = Path(folder, ".incomplete")
        with one_line(f"cannot write {folder}"):
            shutil.rmtree(temporary, ignore_errors=True)
            tokenizer.save_pretrained(temporary)
            if frame is not None:
                frame.save_pretrained(temporary, state_dict={})

    on_rank_0(write)


def save_model(model, frame, folder):
    """Complete what `begin` has begun, so that `from_pretrained` of transformers loads it. Adapters are merged.

    Rank 0 collects the weights in the CPU's memory, in the type of `frame`. Raises DistributedError on every rank if it
    cannot write.
    """
    modules = dict(model.named_modules())
    weights = {}
    seen = set()
    for name, param in model.state_dict(keep_vars=True).items():
        if ".lora_" in name or id(param) in seen:
            continue  # the second name of a tied weight: from_pretrained ties it again
        seen.add(id(param))
        tensor = param.detach()
        if tensor.is_floating_point():  # a buffer may hold whole numbers
            tensor = tensor.to(frame.dtype)
        tensor = gathered(tensor)
        module = modules[name.rpartition(".")[0]]
        if hasattr(module, "lora_scale") and param is module.weight:
            change = module.lora_scale * gathered(module.lora_B.weight) @ gathered(module.lora_A.weight)
            if isinstance(module, Conv1D):
                change = change.T
            tensor = (tensor + change).to(frame.dtype)
        if dist.is_primary():
            weights[name] = tensor.cpu()

    def write(temporary):
        frame.save_pretrained(temporary, state_dict=weights, max_shard_size="5GB")

    on_rank_0(complete, folder, write, "model*.safetensors*", "config.json")


def save_adapters(model, folder, base):
    """Complete what `begin` has begun, as PEFT loads it beside the model that is named `base`. See `save_model`."""
    adapted = adapted_layers(model)
    linear = next(iter(adapted.values()))
    rank = linear.lora_A.out_features
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": linear.lora_scale * rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in adapted}),
        "fan_in_fan_out": isinstance(linear, Conv1D),
    }
    weights = {}
    for name, param in model.state_dict(keep_vars=True).items():
        if ".lora_" in name:
            weights[f"base_model.model.{name}"] = gathered(param).cpu().contiguous()

    def write(temporary):
        save_file(weights, Path(temporary, "adapter_model.safetensors"), metadata={"format": "pt"})
        Path(temporary, "adapter_config.json").write_text(json.dumps(adapter_config, indent=2) + "\n")

    on_rank_0(complete, folder, write, "adapter_model*.safetensors*", "adapter_config.json")


def complete(folder, write, weights, last):
    """Call `write(path)` with the folder that `begin` has made, and move all of its files to `folder`.

    The file named `last` is removed first and moved last. Nothing loads the folder without it, so a kill at any moment
    leaves a complete result or none. The weights and the chat template of an older result are removed.
    """
    temporary = Path(folder, ".incomplete")
    with one_line(f"cannot write {folder}"):
        write(temporary)
        Path(folder, last).unlink(missing_ok=True)
        for path in [*Path(folder).glob(weights), *Path(folder).glob("chat_template*")]:
            path.unlink()  # the tokenizer may have no chat template now
        for path in sorted(temporary.iterdir(), key=lambda path: path.name == last):
            target = Path(folder, path.name)
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(path, target)
        temporary.rmdir()
