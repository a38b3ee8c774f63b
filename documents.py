"""Documents for language models: from .jsonl files to tokens and targets, and from these to rows of equal length.

Each line of a file is a conversation or a text:

    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4."}]}
    {"text": "Once upon a time"}

A document is a pair of int32 arrays of equal length: tokens and targets. The target of a token is the token after it,
or IGNORED where that one is not in the loss. In a conversation only what the assistant says is in the loss, with the
tokens that end its turn.

    lines = documents.read(documents.lines_of(paths), tokenizer, length=1024)  # a list of documents for each line
    everything = [document for found in lines for document in found]
    rows = documents.make_rows(documents.pack(everything, 1024), 1024)  # (rows, 3, 1024)
"""

import ast
import collections
import functools
import itertools
import json
import os
import sysconfig
from pathlib import Path

import jinja2
import numpy as np
import torch
import torch.distributed as torch_dist
import transformers

import distributed as dist

IGNORED = -100  # a target that is not in the loss
PADDING = -1  # the token of a position that no document uses
TOKENS, POSITIONS, TARGETS = range(3)  # the second dimension of a tensor of rows
LINES_AT_A_TIME = 1000  # the tokenizer's threads share them
MOST_BYTES = 10**9  # rank 0 reads all files, and every rank holds 12 bytes per token

# ---- lines of files -----------------------------------------------------------------------------------------------


def lines_of(paths):
    """Pairs of a place, like "chats.jsonl: line 7", and the bytes of that line.

    Raises DistributedError if a file cannot be read, or if all are too large to be held in memory.
    """
    try:
        n_bytes = sum(os.path.getsize(path) for path in paths)
        if n_bytes > MOST_BYTES:
            size = f"{n_bytes / 1e9:.1f} GB, more than the {MOST_BYTES / 1e9:.0f} GB that this script holds in memory"
            raise dist.DistributedError(f"--data has {size}: take a part, or stream it as min_Stream.py does")
        for path in paths:
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{path}: line {number}", line
    except OSError as error:
        raise dist.DistributedError(f"--data: cannot read {error.filename}: {error.strerror}") from None


def read(lines, tokenizer, length, cut=False):
    """A list of documents for each of `lines`, pairs of a place and bytes. No document is longer than `length`.

    A text that is too long becomes several documents. A conversation that is too long is left out, or cut at its end if
    `cut`, and their number is printed. Raises DistributedError, which names the place, for a line that is neither.
    """
    lines = iter(lines)
    found = []
    n_too_long = 0
    n_without_answer = 0
    while True:
        some_lines = list(itertools.islice(lines, LINES_AT_A_TIME))
        if not some_lines:
            break
        texts = []  # (number of the line, text, spans of what the assistant says, or None)
        for place, line in some_lines:
            for text, spans in texts_of(place, line, tokenizer):
                texts.append((len(found), text, spans))
            found.append([])
        for (number, _, spans), tokens, characters in encode(texts, tokenizer):
            if spans is None:
                found[number] += pieces(tokens, tokenizer, length)
                continue
            n_too_long += len(tokens) > length + 1
            if cut:
                tokens = tokens[: length + 1]
                characters = characters[: length + 1]
            document = tokens_and_targets(tokens, characters, spans)
            if len(tokens) <= length + 1 and has_targets(document):
                found[number].append(document)
            elif cut:
                n_without_answer += 1
    if n_too_long:
        how = "cut" if cut else "left out"
        print(f"{n_too_long:,} conversations have more than --length {length} tokens and are {how}", flush=True)
    if n_without_answer:
        print(f"{n_without_answer:,} of them have no answer before the cut and are left out", flush=True)
    return found


def encode(texts, tokenizer):
    """For each of `texts`: itself, its tokens, and for each token its first character and the one after its last."""
    # The chat template has written all special tokens.
    encoded = tokenizer([text for _, text, _ in texts], add_special_tokens=False, return_offsets_mapping=True)
    for text, tokens, offsets in zip(texts, encoded.input_ids, encoded.offset_mapping, strict=True):
        yield text, np.array(tokens, dtype=np.int32), np.array(offsets, dtype=np.int64).reshape(-1, 2)


def tokens_and_targets(tokens, characters, spans):
    in_loss = np.zeros(len(tokens), dtype=bool)
    starts, ends = characters.T
    for first, end in spans:
        # The first token of an answer may begin before it, with the space that ends the prompt.
        in_loss |= (first < ends) & (starts < end)
    targets = np.where(in_loss, tokens, IGNORED)
    return tokens[:-1], targets[1:]


def pieces(tokens, tokenizer, length):
    """Documents of a text: one, or several if it is long. Each token is the target of the one before it."""
    end = tokenizer.eos_token_id
    start = [token for token in tokenizer("").input_ids if token != end]  # some tokenizers begin a text with a token
    ends = [] if end is None else [end]
    tokens = np.concatenate([start, tokens, ends]).astype(np.int32)
    found = []
    for first in range(0, len(tokens) - 1, length):
        piece = tokens[first : first + length + 1]
        found.append((piece[:-1], piece[1:]))
    return found


def has_targets(document):
    _, targets = document
    return bool((targets != IGNORED).any())


def text_around_loss(document, tokenizer, n_tokens=20):
    """Of the first targets of a document that lie together, the text of up to `n_tokens`, and the text before them."""
    tokens, targets = document
    in_loss = targets != IGNORED
    first = int(in_loss.argmax())
    end = first
    while end < min(len(targets), first + n_tokens) and in_loss[end]:
        end += 1
    before = tokens[max(0, first + 1 - n_tokens) : first + 1]
    return tokenizer.decode(before), tokenizer.decode(targets[first:end])


# ---- conversations ------------------------------------------------------------------------------------------------


def texts_of(place, line, tokenizer):
    """Pairs of a text and the spans of its characters that the assistant says; None for a text without turns."""
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError("it is no JSON object")
        if "messages" in record:
            return conversation(record, tokenizer)
        if "text" not in record:
            raise ValueError(f"it has neither, but {', '.join(record) or 'nothing'}")
        if not isinstance(record["text"], str):
            raise TypeError("its text is no string")
        return [(record["text"], None)]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, jinja2.TemplateError) as failure:
        cause = str(failure).partition("\n")[0][:200]
        if type(failure) is not ValueError:  # ours say what is wrong
            cause = f"{type(failure).__name__}: {cause}"
        message = f'{place} is no {{"messages": [...]}} or {{"text": "..."}} that this model can read ({cause})'
        raise dist.DistributedError(message) from None


def conversation(record, tokenizer):
    """Pairs of a text and the spans of its characters that the assistant says.

    The assistant's turn is the text after the prompt with which the model is asked for it. So any chat template will
    do, also one without {% generation %}. Some templates show an earlier turn in another way, for example without its
    thoughts. Then each turn becomes a text of its own.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: give one by --chat-template, or use texts")
    render = functools.partial(tokenizer.apply_chat_template, tokenize=False, tools=record.get("tools"))
    messages = record["messages"]
    found = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if number == 0:
            raise ValueError("its first message is the assistant's, and answers nothing")
        text = render(messages[: number + 1])
        prompt = render(messages[:number], add_generation_prompt=True)
        start = n_common(text, prompt)  # not the whole prompt, if that also opens a thought
        if start < len(render(messages[:number])):
            line = "the chat template shows the messages before an answer in another way once the answer follows"
            raise ValueError(f"{line}, so the answer cannot be located")
        spans = []
        if found and text.startswith(found[-1][0]):
            _, spans = found.pop()  # this text contains the one before
        found.append((text, [*spans, (start, len(text))]))
    if not found:
        raise ValueError("the assistant says nothing in it")
    return found


def n_common(first, second):
    """The number of characters with which both begin."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


# ---- rows ---------------------------------------------------------------------------------------------------------


def pack(documents, length):
    """Lists of documents that share a row. Each, the longest first, goes to the fullest row that has room for it."""
    lists = []
    with_room = [[] for _ in range(length + 1)]  # with_room[n]: the numbers of the lists with n free positions
    for document in sorted(documents, key=n_positions, reverse=True):
        needed = n_positions(document)
        room = needed
        while room < length and not with_room[room]:
            room += 1
        if not with_room[room]:
            with_room[room].append(len(lists))
            lists.append([])
        number = with_room[room].pop()
        lists[number].append(document)
        with_room[room - needed].append(number)
    return lists


def n_positions(document):
    tokens, _ = document
    return len(tokens)


def make_rows(lists, length):
    """(rows, 3, length), int32: tokens, positions, targets. Each list of documents is a row.

    The positions of each document start at 0. Padding is one more document, without targets.
    """
    rows = torch.empty(len(lists), 3, length, dtype=torch.int32)
    rows[:, TOKENS] = PADDING
    rows[:, TARGETS] = IGNORED
    for row, documents in zip(rows.numpy(), lists, strict=True):
        start = 0
        for tokens, targets in documents:
            end = start + len(tokens)
            row[TOKENS, start:end] = tokens
            row[POSITIONS, start:end] = np.arange(len(tokens))
            row[TARGETS, start:end] = targets
            start = end
        row[POSITIONS, start:] = np.arange(length - start)
    return rows


def bigram_loss(rows, held_out, vocab_size):
    """Nats per target of `held_out` if each one is guessed from the token before it, as `rows` have them."""

    def pairs_of(rows):
        in_loss = rows[:, TARGETS] != IGNORED
        return rows[:, TOKENS][in_loss].long() * vocab_size + rows[:, TARGETS][in_loss]

    counts = torch.bincount(pairs_of(rows), minlength=vocab_size**2).view(vocab_size, vocab_size)
    unigrams = counts.sum(0) + 1
    # A bigram that was not seen is guessed from its second token alone.
    prior = 100 * unigrams / unigrams.sum()
    probability = (counts + prior) / (counts.sum(1, keepdim=True) + 100)
    return -probability.flatten()[pairs_of(held_out)].log().mean().item()


# ---- the rows of a rank -------------------------------------------------------------------------------------------


def broadcast_rows(rows):
    """Rank 0's rows on every rank, in the CPU's memory."""
    group = dist.patient_group()
    shape = dist.broadcast_object(None if rows is None else rows.shape, group=group)
    if rows is None:
        rows = torch.empty(shape, dtype=torch.int32)
    torch_dist.broadcast(rows, src=0, group=group)
    return rows


Row = collections.namedtuple("Row", "tokens positions places targets n_tokens")


def on_device(row, in_loss=True):
    """A row (3, length) as the model takes it; `places` are the positions of the targets. The host does not wait."""
    tokens, positions, targets = row.long()
    n_tokens = (tokens != PADDING).sum().item()
    if not in_loss:
        n_tokens = 0
        targets = torch.full_like(targets, IGNORED)
    places = (targets != IGNORED).nonzero()[:, 0]
    tensors = tokens.clamp(min=0)[None], positions[None], places, targets[places]
    device = dist.get_device()
    if device.type == "cuda":
        tensors = [tensor.pin_memory() for tensor in tensors]
    return Row(*(tensor.to(device, non_blocking=True) for tensor in tensors), n_tokens)


def share_of(rows, numbers):
    """This rank's share of the rows `numbers`, one at a time.

    Each rank gets equally many, since each forward is a collective. The last ones may be without targets.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    for first in range(0, len(numbers), world_size):
        group = numbers[first : first + world_size]
        if rank < len(group):
            yield on_device(rows[group[rank]])
        else:
            yield on_device(rows[group[0]], in_loss=False)


def global_batch(n_rows, batch_size, step, seed):
    """The numbers of the rows of a step. They do not depend on the number of ranks."""
    numbers = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, place = divmod(position, n_rows)
        numbers.append(order_of(n_rows, seed, epoch)[place])
    return numbers


@functools.lru_cache(maxsize=2)
def order_of(n_rows, seed, epoch):
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(n_rows, generator=generator).tolist()


# ---- conversations that need no network ---------------------------------------------------------------------------

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
CHAT_TEMPLATE = """{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def lines_of_library():
    """As `lines_of`: the user sends a signature and docstring of Python's library, the assistant answers the body."""
    for path in sorted(LIBRARY.glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        lines = source.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
                end_of_docstring = node.body[0].end_lineno
                question = {"role": "user", "content": "".join(lines[node.lineno - 1 : end_of_docstring])}
                answer = {"role": "assistant", "content": "".join(lines[end_of_docstring : node.end_lineno])}
                yield f"{path}: line {node.lineno}", json.dumps({"messages": [question, answer]})


def library_tokenizer(vocab_size=2048):
    """Pairs of bytes that are frequent in Python's library become tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    paths = [str(path) for path in sorted(LIBRARY.glob("*.py"))]
    if not paths:
        raise dist.DistributedError(f"no text to train on: {LIBRARY} has no *.py files: give --model and --data")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(paths, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
