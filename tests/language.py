"""What the tests of llm_FSDP.py and llm_hub.py share: tiny models of random weights, a tokenizer of bytes, texts."""

import json
import random

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import llm_documents

SMALL = {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 256}
LARGE = {"vocab_size": 16000, "hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16}
LARGE |= {"num_key_value_heads": 8, "intermediate_size": 2816}
SLIDING = {"head_dim": 8, "sliding_window": 32}
NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
MOE = {**SMALL, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
MOE |= {"topk_group": 1, "first_k_dense_replace": 1}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama_tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "wide": lambda: transformers.LlamaConfig(**SMALL | {"hidden_size": 64}),
    "large": lambda: transformers.LlamaConfig(**SMALL | LARGE),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=8),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=259, n_embd=32, n_layer=2, n_head=4, n_positions=256, **NO_DROPOUT
    ),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, **SLIDING, final_logit_softcapping=0.5),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, **SLIDING),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    ),
    # With routers in float32.
    "glm4_moe": lambda: transformers.Glm4MoeConfig(**MOE, head_dim=8),
    "mimo_v2": lambda: transformers.MiMoV2FlashConfig(**MOE, head_dim=8),
    "mamba": lambda: transformers.MambaConfig(vocab_size=259, hidden_size=32, num_hidden_layers=2, state_size=8),
}
FIVE = ("llama", "qwen3", "gpt2", "gemma3", "qwen3_moe")


def byte_tokenizer():
    """259 tokens: the bytes, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    tokenizer.chat_template = llm_documents.CHAT_TEMPLATE
    return tokenizer


def make_folder(name, folder, dtype=torch.float32):
    """Write a model with random weights in at least two files, and the tokenizer."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(0.1 * torch.randn_like(tensor))  # all are 1 or 0 in a norm or a bias
    model.generation_config.eos_token_id = 256
    n_bytes = sum(param.nbytes for param in model.parameters())
    model.save_pretrained(folder, max_shard_size=n_bytes // 2)
    assert len(list(folder.glob("*.safetensors"))) >= 2
    byte_tokenizer().save_pretrained(folder)
    return folder


def records(n=60, seed=0):
    """Conversations and texts. Answers have 1 to 30 bytes, so that means of means are far from the mean."""
    draw = random.Random(seed)
    for number in range(n):
        if number % 4 == 3:
            yield {"text": "".join(draw.choices("xyz .", k=draw.choice((5, 40, 200))))}
            continue
        messages = []
        for _ in range(draw.choice((1, 1, 2, 3))):
            question = "".join(draw.choices("abcdefgh ", k=draw.randint(3, 15)))
            answer = "s" + "".join(draw.choices("stuvw ", k=draw.randint(0, draw.choice((1, 2, 29)))))
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        yield {"messages": messages}


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
