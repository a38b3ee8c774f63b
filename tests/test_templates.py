"""What a user may swap in: models, batches, optimizers and sizes that no script here has, on two ranks as on one."""

import copy
import functools

import pytest
import torch
from conftest import float64, on_processes
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from transformer import full_parameters

import distributed as dist
import mnist

# ---- models and batches ---------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """The output layer is the embedding; a ModuleList, attention, a buffer, extra state. From a dict to a tuple."""

    def __init__(self):
        super().__init__()
        self.embedding, self.body = nn.Embedding(11, 160), nn.Linear(160, 160)
        layer = {"d_model": 160, "nhead": 2, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(2))
        self.head = nn.Linear(160, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(1))

    def get_extra_state(self):
        return {"scale of 8-bit floats": torch.ones(3)}

    def set_extra_state(self, state):
        assert state["scale of 8-bit floats"].sum() == 3

    def forward(self, input_ids, labels):
        hidden = self.body(self.embedding(input_ids)).tanh()
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1) * (1 + self.scale), labels.flatten()), hidden


class Unused(Tied):
    """Has a layer that never gets a gradient, as BERT's pooler."""

    def __init__(self):
        super().__init__()
        self.pooler = nn.Linear(160, 160)


SIZES = {
    "BERT": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 16},
    "Llama": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
}
SIZES["BERT"] |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SIZES["GPT2"] |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SIZES["Llama"] |= {"num_key_value_heads": 2, "tie_word_embeddings": True}


def make(name):
    """A model of this file, or one of transformers with random weights."""
    import transformers

    classes = {
        "BERT": (transformers.BertForMaskedLM, transformers.BertConfig),
        "GPT2": (transformers.GPT2LMHeadModel, transformers.GPT2Config),
        "Llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
    }
    if name not in classes:
        return {"tied": Tied, "unused": Unused}[name]()
    model_class, config_class = classes[name]
    return model_class(config_class(vocab_size=11, **SIZES[name]))


# ---- equal to one process -------------------------------------------------------------------------------------------


def train(model, optimizer_class, rank=0, world_size=1):
    """Losses over all ranks, and parameters, of a loop with all that people use; `model` is wrapped already."""
    slow = [param for name, param in model.named_parameters() if "embed" in name or "wte" in name]
    rest = [param for param in model.parameters() if all(param is not other for other in slow)]
    optimizer = optimizer_class([{"params": slow, "lr": 1e-3}, {"params": rest}], lr=1e-2)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(11, (8, 12), generator=generator)[rank::world_size].contiguous()
        output = model(**{"input_ids": ids, "labels": ids})
        loss = output[0] if isinstance(output, tuple) else output.loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        scheduler.step()
        losses.append(dist.reduce(loss.detach()))
    return torch.stack(losses), full_parameters(model)


WRAPPERS = {
    "DDP": functools.partial(dist.prepare_ddp_model, find_unused_parameters=True),
    "compiled DDP": lambda model: torch.compile(dist.prepare_ddp_model(model), backend="eager"),
    "FSDP": dist.prepare_fsdp_model,
}
CASES = [(name, kind) for name in ("tied", "unused", *SIZES) for kind in ("DDP", "FSDP")]
CASES += [("tied", "compiled DDP")]


@pytest.mark.guard
@pytest.mark.slow
@on_processes(2)
@pytest.mark.parametrize("name, kind", CASES)
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_tied_and_unused_parameters_groups_schedules_clipping_tuples_and_dicts(name, kind, optimizer_class):
    """Of models of this file and of transformers."""
    with float64():
        torch.manual_seed(0)
        expected_losses, expected = train(make(name), optimizer_class)
        torch.manual_seed(dist.get_rank())  # rank 0's weights are taken
        model = WRAPPERS[kind](make(name))
        losses, params = train(model, optimizer_class, dist.get_rank(), 2)
    tolerance = 1e-6 if name in SIZES else 1e-12  # their losses are float32
    assert (losses - expected_losses).abs().max() <= tolerance
    assert params.keys() == expected.keys()
    for key, param in params.items():
        assert (param - expected[key]).abs().max() <= tolerance, key
    if (name, kind) == ("tied", "FSDP"):
        assert units_of(model) == {"", "blocks.0", "blocks.1"}
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert model.head.weight is model.embedding.weight


# ---- units ----------------------------------------------------------------------------------------------------------


def units_of(model):
    """The names of the modules that are sharded by themselves; the root's is empty."""
    return {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}


class WithoutList(nn.Module):
    """Its table has no forward, and is read outside."""

    def __init__(self, tied):
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        self.body = nn.Linear(64, 320)
        self.back = nn.Linear(320, 64)
        self.head = nn.Linear(64, 500, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.tables = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(30_000))})

    def forward(self, tokens):
        hidden = self.back(self.body(self.embedding(tokens)).relu())
        return self.head(hidden) + self.tables["bias"][:500]


def encoder():
    """Attention of 16,640 parameters, and feed-forward layers of 16,640."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True), 2)


def cases_of_units():
    """Models, what chooses their units, and the names of all units but the root."""
    import transformers

    sizes = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4}
    # 16,384 parameters in attention, 33,792 in the rest
    small = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, **sizes))
    decoders = {f"model.layers.{i}.mlp" for i in range(2)}
    parts = {f"layers.{i}.{name}" for i in range(2) for name in ("self_attn", "linear1", "linear2")}
    nested = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    by_size = {"min_num_params": 20_000}
    linear = nn.Linear(200, 200)
    halves = nn.Sequential(nn.Sequential(linear, nn.ReLU()), linear)
    return [
        (nested, {}, {"0", "2", "2.0", "2.1"}),
        (nn.Sequential(nn.Linear(8, 8), nn.Conv1d(8, 8, 1)), {"blocks": (nn.Conv1d,)}, {"1"}),
        (mnist.SimpleCNN(), {"min_num_params": 18_496}, {"conv2", "fc"}),  # there is no list
        (mnist.SimpleCNN(), {"min_num_params": 18_497}, {"fc"}),
        (encoder(), {}, {"layers.0", "layers.1"}),
        (encoder(), {"min_num_params": 1_000}, parts),  # not out_proj, whose weights attention reads itself
        (copy.deepcopy(small), {}, {"model.layers.0", "model.layers.1"}),
        (small, by_size, {*decoders, "model.embed_tokens", "lm_head", "model"}),
        (WithoutList(tied=False), {}, {"embedding", "body", "back", "head"}),
        (WithoutList(tied=True), {}, {"body", "back"}),  # embedding and head belong to the root
        (nn.Sequential(WithoutList(tied=True), nn.Linear(500, 60)), by_size, {"0", "0.body", "0.back", "1"}),
        (halves, by_size, set()),  # not the first one, whose linear the second one has too
    ]


def outputs_of(model):
    """In training and in evaluation, where TransformerEncoder would read the weights of its layers without a call.

    Only the models of this file, TransformerEncoder and SimpleCNN are called.
    """
    generator = torch.Generator().manual_seed(0)
    if isinstance(model, mnist.SimpleCNN):
        inputs = torch.rand(2, 1, 28, 28, generator=generator)
    elif isinstance(model, nn.TransformerEncoder):
        inputs = torch.rand(2, 5, 64, generator=generator)
    elif any(isinstance(module, WithoutList) for module in model.modules()):
        inputs = torch.randint(500, (2, 5), generator=generator)
    else:
        return torch.zeros(0)
    output = model(inputs)
    output.square().sum().backward()
    with torch.no_grad():
        return torch.stack([output, model.eval()(inputs)])


@on_processes(2)
def test_a_unit_is_a_block_or_is_chosen_by_size():
    torch.manual_seed(dist.get_rank())  # rank 0's weights are taken
    for model, chosen, names in cases_of_units():
        total = sum(param.numel() for param in model.parameters())
        alone = copy.deepcopy(model)
        dist.sync_params([*alone.parameters(), *alone.buffers()])
        weights = full_parameters(alone)
        dist.prepare_fsdp_model(model, **chosen)
        assert units_of(model) == {"", *names}, (type(model).__name__, chosen)
        assert sum(param.to_local().numel() for param in model.parameters()) <= 0.51 * total
        assert all(torch.equal(param, weights[name]) for name, param in full_parameters(model).items())
        torch.testing.assert_close(outputs_of(model), outputs_of(alone))


@on_processes(2)
def test_models_that_cannot_be_sharded_are_refused():
    tied = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9, bias=False))
    tied[1].weight = tied[0].weight
    with pytest.raises(dist.DistributedError, match="two blocks share a parameter"):
        dist.prepare_fsdp_model(tied)
    with pytest.raises(dist.DistributedError, match='a shard, nor a tensor on "meta"'):
        dist.prepare_fsdp_model(nn.Sequential(nn.Linear(2, 2, device="meta")))
    with pytest.raises(AssertionError, match="not both"):
        dist.prepare_fsdp_model(nn.Linear(2, 2), blocks=(nn.Linear,), min_num_params=1)
