"""Hugging Face's format, read into the shards of FSDP and written from them; LoRA, by PEFT; a frozen model in 4 bits.

    types = dist.broadcast_object(types_of_rank_0)  # llm_hub.types_of(whole)
    with torch.device("meta"):
        model = llm_hub.build_model(config, torch.float32)  # shapes without memory
        model = llm_hub.add_lora(model, rank=16, alpha=32)  # leave it out to train all parameters
    llm_hub.hold_as_loaded(model, types)
    for layer in reversed(llm_hub.layers_of(model)):  # inner ones first
        fully_shard(layer)
    fully_shard(model)
    llm_hub.fill(model, whole)                     # rank 0 has the `whole` model; the other ranks pass None
                                                   # with add_lora above, `whole` needs add_lora too
    llm_hub.begin("folder", base, is_whole=True)   # on rank 0; `base` is the folder from which `whole` was loaded
    ...
    llm_hub.save(model, whole, types, "folder")    # transformers.AutoModelForCausalLM.from_pretrained("folder")
                                                   # adapters: peft.AutoPeftModelForCausalLM.from_pretrained("folder")

Only rank 0 reads and writes files. It needs one whole model in the CPU's memory to write it. To read one it needs less,
because safetensors maps the files into memory, and no rank ever holds a whole model on its device.
"""

import copy
import json
import os
import shutil
import warnings
from pathlib import Path

import huggingface_hub
import peft
import tokenizers
import torch
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

import distributed as dist
import llm_documents

# ---- errors on every rank -----------------------------------------------------------------------------------------


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
    """The layers of a model of transformers: what FSDP gathers at a time. Some models have layers inside of layers.

    The outer one comes first.
    """
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def build_model(config, dtype):
    """An untrained model. Under torch.device("meta") it needs no memory. Its attention is the one of `config`."""
    config = copy.deepcopy(config)  # from_config writes the type into it
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model.tie_weights()  # transformers 5.0 does not tie weights on "meta"
    return model


# Files with weights, which a result does not take from the model that was loaded.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".index.json")


def folder_of(name):
    """The folder `name`, or the one of a snapshot of the Hub, which is downloaded with its weights in safetensors."""
    if Path(name).is_dir():
        return Path(name)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:  # a name on the Hub has another form
        raise ValueError("there is no such folder")
    others = [f"*{suffix}" for suffix in WEIGHTS[1:-1]]
    return Path(huggingface_hub.snapshot_download(name, ignore_patterns=["*/*", "consolidated*", *others]))


def load_tokenizer_and_config(folder, attention):
    """`attention` is a name that transformers knows: "sdpa", "eager", "flex_attention", "flash_attention_2"."""
    config = transformers.AutoConfig.from_pretrained(folder, attn_implementation=attention, trust_remote_code=False)
    if getattr(config, "quantization_config", None):
        raise ValueError("its config.json has a quantization_config: quantized weights cannot be trained")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise ValueError("its tokenizer is not a fast one, which knows at which character a token starts")
    file = Path(folder, "tokenizer.json")
    if file.exists() and parts_of(tokenizers.Tokenizer.from_file(str(file))) != parts_of(tokenizer.backend_tokenizer):
        print(f"transformers builds another tokenizer than {file} has: the one of the file is taken", flush=True)
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer, config


def parts_of(tokenizer):
    """What decides how a tokenizer divides a text."""
    parts = json.loads(tokenizer.to_str())
    return [parts[name] for name in ("normalizer", "pre_tokenizer", "model")]


def load_model(name, folder, config):
    """The whole model of a folder on the CPU, in the type that `config` names. Adapters will name `name`."""
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True, "trust_remote_code": False}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype="auto", **options)
    for problem in ("missing", "unexpected", "mismatched"):
        names = info[f"{problem}_keys"]
        if names:
            line = f"{len(names)} {problem} weights, such as {min(names)}"
            raise ValueError(f"its files have, for its config.json, {line}")
    model.name_or_path = os.path.abspath(name) if Path(name).is_dir() else name
    if not model.all_tied_weights_keys:
        model.config.tie_word_embeddings = False  # transformers unties weights that differ in the files
    return model


def types_of(whole):
    """The type of each weight and buffer by name, as it was loaded. Some models hold routers in float32."""
    return {name: tensor.dtype for name, tensor in [*whole.state_dict().items(), *whole.named_buffers()]}


def hold_as_loaded(model, types):
    """Give what is not trained the type in which it was loaded. `model` is on "meta"."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.requires_grad:
            tensor.data = tensor.data.to(types[name])


def fill(model, whole):
    """Give the sharded `model`, made on "meta", the values of rank 0's `whole` model. The others pass None.

    Rank 0 sends one tensor after the other, and each rank keeps its shards. Every rank must call it. Raises
    RuntimeError if `whole` and `model` differ in their names or shapes.
    """
    model.to_empty(device=dist.get_device())
    weights = {}
    if dist.is_primary():
        weights = whole.state_dict()
        # Some buffers are in no state_dict, such as the frequencies of rotary positions.
        for buffer, source in zip(model.buffers(), whole.buffers(), strict=True):
            buffer.copy_(source)
    dist.sync_params(model.buffers())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)


# ---- use ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_rows(model, length, pad):
    """Raise DistributedError if a document would have other logits in a row than alone, or if it sees later tokens.

    Models that ignore restarting positions, such as recurrent ones, would mix documents. Models like BERT would see
    their targets. Neither would be an error.
    """
    vocab_size = model.config.get_text_config().vocab_size
    tokens = torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(0))
    n = min(24, length // 2)
    document, others = tokens[:n], tokens[n:]
    other_end = document.clone()
    other_end[-1] = (document[-1] + 1) % vocab_size
    rows = [[others, document], [*others.flip(0).split(n), document]]  # behind one document, and behind many
    advice = ": use --pad"
    if pad:
        rows, advice = [[document]], ""
    model.eval()
    with llm_documents.one_line(type(model).__name__.removeprefix("FSDP")):
        alone, with_other_end = [
            model(each[None].to(dist.get_device()), use_cache=False).logits[0] for each in (document, other_end)
        ]
        in_rows = [logits_in_row(model, documents, length) for documents in rows]
        size = (alone - alone.mean(dim=0)).double().norm()
        nothing, rounding = 1e-5, 0.01  # experts may round otherwise, and kernels of other shapes: TF32 gives 0.001
        if alone.dtype.itemsize == 2:
            nothing, rounding = 0.002, 0.1

        def differ(first, second, tolerance):
            return not (first - second).double().norm() <= tolerance * size  # also if it is no number

        if differ(with_other_end[:-1], alone[:-1], nothing):
            raise ValueError("it is not causal: a token sees those after it, and so its target")
        if differ(in_rows[0], alone, rounding) or differ(in_rows[-1], in_rows[0], nothing):
            raise ValueError(f"a document has other logits in a row of --length {length} than alone{advice}")
    model.train()
    model.reshard()  # the root stays gathered after forward, and would hide weights that are loaded now


def logits_in_row(model, documents, length):
    """The logits of the last one of `documents`, which share a row."""
    pairs = [(tokens, llm_documents.IGNORED) for tokens in documents[:-1]]
    pairs.append((documents[-1], documents[-1]))  # each token is a target: its place is kept
    row = llm_documents.on_device(llm_documents.make_rows([pairs], length)[0])
    logits = model(row.tokens, position_ids=row.positions, logits_to_keep=row.places, use_cache=False).logits[0]
    if len(logits) != len(row.places):
        raise ValueError("its output does not have the places that logits_to_keep names")
    return logits


# ---- LoRA ---------------------------------------------------------------------------------------------------------


def add_lora(model, rank, alpha):
    """The model as PEFT wraps it: frozen, with alpha / rank * B(A(x)) added to each linear layer but the last.

    A (rank, inputs) and B (outputs, rank) are trained. B starts at 0. https://arxiv.org/abs/2106.09685
    """
    head = model.get_output_embeddings()
    linears = {
        name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        target_modules=linears,  # "all-linear" would name experts too, which are no linear layers
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # of GPT-2: transposed weights
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other layers than these, which are refused below
        model = peft.get_peft_model(model, config)
    adapted = {name for name, module in model.get_base_model().named_modules() if hasattr(module, "lora_A")}
    if adapted != linears:
        raise ValueError(f"PEFT would adapt other layers than the linear ones, such as {min(adapted ^ linears)}")
    return model


# ---- 4 bits -------------------------------------------------------------------------------------------------------

# The 16 quantiles of a normal distribution, scaled to [-1, 1]. https://arxiv.org/abs/2305.14314, appendix E
LEVELS = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635]
LEVELS += [-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725]
LEVELS += [0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
BLOCK = 64  # numbers that share a scale, as in bitsandbytes


def pack_frozen(model):
    """Replace the frozen linear layers beside adapters by ones in 4 bits, one after the other."""
    for module in list(model.modules()):
        if hasattr(module, "lora_A"):
            layer = module.base_layer
            if not isinstance(layer, nn.Linear) or layer.in_features % BLOCK:
                raise ValueError(f"--nf4 needs linear layers whose inputs are a multiple of {BLOCK}: {layer} is none")
            module.base_layer = LinearNF4(layer)


class LinearNF4(nn.Module):
    """A frozen linear layer in 4.5 bits per weight, NF4. FSDP cuts it between rows, which are whole blocks.

    `packed`, uint8 (outputs, inputs / 2), has two weights in a byte. `scales`, uint8 (outputs, inputs / 16), has the
    bytes of the float32 scales of the blocks: FSDP would gather floating-point numbers in bfloat16.
    """

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        levels = torch.tensor(LEVELS, dtype=torch.float32, device=linear.weight.device)
        blocks = linear.weight.detach().float().unflatten(1, (-1, BLOCK))
        scales = blocks.abs().amax(dim=2)
        between = (levels[1:] + levels[:-1]) / 2
        codes = torch.bucketize(blocks / scales.clamp(min=1e-30)[..., None], between, out_int32=True)
        codes = codes.flatten(1).to(torch.uint8)
        self.packed = nn.Parameter(codes[:, ::2] << 4 | codes[:, 1::2], requires_grad=False)
        self.scales = nn.Parameter(scales.view(torch.uint8), requires_grad=False)
        self.register_buffer("levels_of_byte", torch.cartesian_prod(levels, levels), persistent=False)

    def forward(self, inputs):
        """The weight is computed again in backward: neither it nor the product is kept."""
        output = recompute(self.product, inputs, use_reentrant=False, preserve_rng_state=False)
        return output if self.bias is None else output + self.bias

    def product(self, inputs):
        weight = unpacked(self.packed, self.scales, self.levels_of_byte)
        return F.linear(inputs, weight.to(inputs.dtype))


def unpacked(packed, scales, levels_of_byte):
    """The weight (outputs, inputs) in float32."""
    values = F.embedding(packed.int(), levels_of_byte)  # (outputs, inputs / 2, 2)
    blocks = values.view(len(packed), -1, BLOCK)
    return blocks.mul_(scales.view(torch.float32)[..., None]).flatten(1)


# ---- the loss in chunks -------------------------------------------------------------------------------------------


def compute_loss_in_chunks(model, size, loss_of):
    """Make `model(..., targets=targets)` return the sum of loss_of(logits, targets) over chunks of `size` targets.

    The logits of a chunk are computed again in backward. Call it before fully_shard: so all chunks are computed within
    one forward of the model, for which FSDP gathers the output layer once.
    """
    body = (model.get_base_model() if isinstance(model, peft.PeftModel) else model).base_model
    forward, forward_of_body = model.forward, body.forward

    def of_chunk(output, hidden, targets):
        """What follows the body, such as the output layer and a cap of the logits, for some of its output."""
        chunk = type(output)({**output, "last_hidden_state": hidden[None]})
        body.forward = lambda *args, **kwargs: chunk
        try:
            return loss_of(forward(hidden.new_zeros(1, 1, dtype=torch.long), use_cache=False).logits[0], targets)
        finally:
            body.forward = forward_of_body

    def forward_in_chunks(tokens, targets=None, logits_to_keep=0, **options):
        if targets is None:
            return forward(tokens, logits_to_keep=logits_to_keep, **options)
        output = body(tokens, **options)
        hidden = output.last_hidden_state[0, logits_to_keep]
        chunks = zip(hidden.split(size), targets.split(size), strict=True)
        return sum(recompute(of_chunk, output, *chunk, use_reentrant=False) for chunk in chunks)

    model.forward = forward_in_chunks
    model.loss_in_chunks = True


# ---- write --------------------------------------------------------------------------------------------------------


def incomplete(folder):
    """Where a result is written until it is complete."""
    return Path(f"{folder}.incomplete")


def temporary(folder):
    """Where files lie until then that are not part of the result."""
    return incomplete(folder) / "temporary"


def begin(folder, base, is_whole):
    """Before training, on rank 0: copy the files of the folder `base` to the result in progress, except for weights.

    Adapters are no whole model, so they get no config.json. What a killed run has left there is deleted. Returns the
    path of the result in progress.
    """
    with llm_documents.one_line(f"cannot write {folder}"):
        shutil.rmtree(incomplete(folder), ignore_errors=True)
        temporary(folder).mkdir(parents=True)
        for file in Path(base).iterdir() if base else ():
            if file.is_file() and not file.name.endswith(WEIGHTS) and (is_whole or file.name != "config.json"):
                shutil.copyfile(file, incomplete(folder) / file.name)
    return incomplete(folder)


def save(model, whole, types, folder):
    """Complete what `begin` has begun, so that `from_pretrained` of transformers, or of PEFT, loads it.

    `whole` is rank 0's model, which may have moved to "meta". Rank 0 collects the weights in the CPU's memory, each in
    the type in which it was loaded, or the adapters alone. Raises DistributedError on every rank if it cannot write.
    """
    weights = {}
    for name, tensor in model.state_dict().items():
        is_frozen = isinstance(model, peft.PeftModel) and ".lora_" not in name
        if name in model.all_tied_weights_keys or is_frozen:  # from_pretrained ties again
            continue
        tensor = tensor.to(types[name])
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        if dist.is_primary():
            weights[name] = tensor.cpu()
    on_rank_0(complete, folder, whole, weights)


def complete(folder, whole, weights):
    """Write `weights` into the result in progress, and give it its name. So a kill leaves a whole result or none."""
    with llm_documents.one_line(f"cannot write {folder}"):
        # PEFT would ask the Hub whether the model had other embeddings there.
        whole.save_pretrained(temporary(folder), state_dict=weights, save_embedding_layers=False)
        for file in temporary(folder).iterdir():  # without configurations and PEFT's README.md
            if file.name.endswith(WEIGHTS) or file.name == "adapter_config.json":
                os.replace(file, incomplete(folder) / file.name)
        shutil.rmtree(temporary(folder))
        os.rename(incomplete(folder), folder)
