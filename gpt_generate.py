"""Generation with a KV cache, for min_Generate.py, min_GRPO.py and min_GRPO_async.py.

drawn = gpt_generate.uniform(f"{seed} {number}", 1, new_bytes)                 # (1, new bytes), from the name alone
tokens, generated, log_probabilities = gpt_generate.generate(model, [b"1+1="], drawn, stop)
answers = gpt_generate.generated_bytes(tokens, generated)                      # one bytes object per row
"""

import functools
import random

import torch
import torch.distributed as torch_dist
from torch.nn import functional as F

import distributed as dist
import gpt

# ---- the cache ----------------------------------------------------------------------------------------------------


class KVCache:
    """Keys and values of all earlier positions. Inside `with`, the model's attention extends and reads them.

    So a new byte needs the forward of one position. Each row has positions of its own: prompts of unequal lengths all
    start at position 0 and are padded on the right. The padding is later than a row's last byte, so the row does not
    see it, and new bytes overwrite it. The cache takes 2 · layers · rows · length · width numbers.
    """

    def __init__(self, model, length):
        self.model = model
        self.attentions = [block.attention for block in model.blocks]
        self.length = length  # positions of the longest row
        self.stored = {}  # by layer: keys and values (2, rows, heads, length, head width)

    def __enter__(self):
        for layer, attention in enumerate(self.attentions):
            attention.attend = functools.partial(self.attend, layer)
        return self

    def __exit__(self, *error):
        for attention in self.attentions:
            del attention.attend  # now the class's own is found again

    def forward(self, tokens, positions, end):
        """Logits (rows, new, 256) of `tokens` at `positions`, both (rows, new). All positions are below `end`."""
        self.positions = positions
        self.end = end
        return self.model(tokens, positions)

    def attend(self, layer, q, k, v):
        if layer not in self.stored:
            n_rows, n_heads, _, head_width = k.shape  # if heads are split over processes, this process's
            self.stored[layer] = k.new_zeros(2, n_rows, n_heads, self.length, head_width)
        keys, values = self.stored[layer]
        rows = torch.arange(len(k), device=k.device)[:, None]
        keys[rows, :, self.positions] = k.transpose(1, 2)
        values[rows, :, self.positions] = v.transpose(1, 2)
        seen = torch.arange(self.end, device=k.device) <= self.positions[:, None, :, None]
        return F.scaled_dot_product_attention(q, keys[:, :, : self.end], values[:, :, : self.end], attn_mask=seen)

    def keep(self, rows):
        """Keep only these rows, in this order. A row may occur several times."""
        for layer, stored in self.stored.items():
            self.stored[layer] = stored[:, rows]


# ---- generation ---------------------------------------------------------------------------------------------------


def choose(logits, drawn, temperature=1.0):
    """One byte for each row of `logits` (rows, 256), and its log-probability, both (rows,).

    The byte is the first one whose cumulative probability exceeds `drawn` (rows,), float64 numbers from [0, 1). So the
    same numbers draw the same bytes. At temperature 0 it is the most probable byte. It is 256 if the logits are NaN.
    """
    if temperature == 0:
        chosen = logits.argmax(-1, keepdim=True).masked_fill(logits.isnan().any(-1, keepdim=True), 256)
        log_probabilities = logits.log_softmax(-1)
    else:
        # Without its maximum, and in float64, a row does not become NaN, however small the temperature is. In float32
        # the last sum might be below `drawn`.
        scaled = (logits - logits.amax(-1, keepdim=True)).double() / temperature
        log_probabilities = scaled.log_softmax(-1)
        cumulative = log_probabilities.exp().cumsum(-1)
        chosen = torch.searchsorted(cumulative, drawn[:, None] * cumulative[:, -1:], right=True)
    chosen_log_probabilities = log_probabilities.gather(-1, chosen.clamp(max=255))
    return chosen[:, 0], chosen_log_probabilities[:, 0].to(logits.dtype)


def choose_alike(group, logits, drawn, temperature):
    """As `choose`, for processes that split a model: the first of `group` chooses, since rounding may differ."""
    chosen, log_probabilities = choose(logits, drawn, temperature)
    torch_dist.broadcast(chosen, group=group, group_src=0)
    return chosen, log_probabilities


@torch.no_grad()  # not inference_mode: its tensors cannot take part in a loss
def generate(model, prompts, drawn, stop=None, temperature=1.0, samples=1, choose=choose):
    """Continue each of `prompts`, a list of bytes, `samples` times: by n bytes, or up to and with the byte `stop`.

    `drawn` (prompts · samples, n), float64 on the model's device, are numbers from [0, 1), as `uniform` gives them. A
    row's numbers alone decide what it draws, whatever rows are beside it. At temperature 0 only their shape is used.
    Pass the plain model, because a DDP model communicates in forward. `choose` may be replaced, as by `choose_alike`.

    Returns tokens, generated and log-probabilities, all (prompts · samples, length). A row of `tokens` is a prompt, its
    continuation, and zeros. `generated` is True where a byte was generated, and log-probabilities are 0 elsewhere.

    Raises ValueError for an empty prompt, and for one that is too long for the model's positions. Raises
    DistributedError if the logits are NaN.
    """
    n_new = drawn.shape[1]
    device = drawn.device
    tokens, lengths, longest = pad_prompts(prompts, n_new, model.position.num_embeddings)
    tokens, lengths = gpt.to_device(tokens, device), gpt.to_device(lengths, device)
    with KVCache(model, longest + n_new) as cache:
        # Prefill: all bytes of the prompts at once. The samples of a prompt share it.
        row_numbers = torch.arange(len(prompts), device=device)
        positions = torch.arange(longest, device=device).expand(len(prompts), -1)
        logits = cache.forward(tokens[:, :longest], positions, longest)
        logits = logits[row_numbers, lengths - 1]  # after the last byte of each prompt
        repeated = row_numbers.repeat_interleave(samples)
        cache.keep(repeated)
        tokens, lengths, logits = tokens[repeated], lengths[repeated], logits[repeated]

        # Decode: one byte per row. Rows that have ended leave the batch.
        generated = torch.zeros_like(tokens, dtype=torch.bool)
        log_probabilities = logits.new_zeros(tokens.shape)
        rows = torch.arange(len(tokens), device=device)
        for number in range(n_new):
            chosen, chosen_log_probabilities = choose(logits, drawn[rows, number], temperature)
            positions = lengths[rows] + number
            tokens[rows, positions] = chosen
            generated[rows, positions] = True
            log_probabilities[rows, positions] = chosen_log_probabilities
            end = longest + number + 1
            unfinished = rows_without(stop, chosen)
            if len(unfinished) == 0 or number == n_new - 1:
                break
            if len(unfinished) < len(rows):
                unfinished = gpt.to_device(unfinished, device)
                rows, chosen, positions = rows[unfinished], chosen[unfinished], positions[unfinished]
                cache.keep(unfinished)
            logits = cache.forward(chosen[:, None], positions[:, None], end)[:, 0]
    return tokens[:, :end], generated[:, :end], log_probabilities[:, :end]


def pad_prompts(prompts, n_new, most):
    """Tokens (prompts, longest + n_new), zeros behind each prompt; the lengths (prompts,); and the longest of them."""
    lengths = [len(prompt) for prompt in prompts]
    if min(lengths) == 0:
        raise ValueError("a prompt is empty: the model needs at least one byte")
    longest = max(lengths)
    if longest + n_new > most:
        raise ValueError(f"a prompt of {longest} bytes and {n_new} new ones exceed the model's {most} positions")
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(list(prompt)) for prompt in prompts], batch_first=True)
    return F.pad(tokens, (0, n_new)), torch.tensor(lengths), longest


def rows_without(stop, chosen):
    """The numbers of the rows that continue, as a tensor on the CPU. This waits for the device, once per byte."""
    chosen = chosen.cpu()
    if (chosen > 255).any():
        raise dist.DistributedError("the model's logits are NaN, so no byte can be drawn: its training has diverged")
    if stop is None:
        return torch.arange(len(chosen))
    return (chosen != stop).nonzero()[:, 0]


def generated_bytes(tokens, generated):
    """The bytes that `generate` has generated: one bytes object per row."""
    return [bytes(row[mask].tolist()) for row, mask in zip(tokens.cpu(), generated.cpu(), strict=True)]


def uniform(name, rows, columns):
    """float64 numbers from [0, 1), (rows, columns), that depend on `name` alone.

    Make the name of the seed, the step and the prompt's number. Then neither the rank nor the number of processes
    changes the numbers.
    """
    generator = torch.Generator().manual_seed(random.Random(name).getrandbits(63))
    return torch.rand(rows, columns, dtype=torch.double, generator=generator)
