"""Documents for language models: from .jsonl files to tokens and targets, and from these to rows of equal length.

Each line of a file is a conversation or a text:

    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4."}]}
    {"text": "Once upon a time"}

A conversation may also have `tools`, and in `chat_template_kwargs` variables of the chat template. A message with
"weight": 0 is not in the loss. Other fields are refused, since other trainers obey some of them. A field of a line or
of a message that is null, "", [] or {} is none. Below them a null is none either, since Arrow and parquet write one
where an object of a column lacks a field.

A document is a pair of int32 arrays of equal length: tokens and targets. The target of a token is the token after it,
or IGNORED where that one is not in the loss. In a conversation only what the assistant says is in the loss, with the
tokens that end its turn.

    lines = llm_documents.read(llm_documents.lines_of(paths), tokenizer, length=1024)  # a list for each line
    everything = [document for found in lines for document in found]
    rows = llm_documents.make_rows(llm_documents.pack(everything, 1024), 1024)  # (rows, 3, 1024)
"""

import ast
import bisect
import collections
import contextlib
import copy
import functools
import json
import os
import re
import sysconfig
import time
from pathlib import Path

import jinja2
import numpy as np
import tokenizers
import torch
import torch.distributed as torch_dist
import transformers

import distributed as dist

IGNORED = -100  # a target that is not in the loss
PADDING = -1  # the token of a position that no document uses
TOKENS, POSITIONS, TARGETS = range(3)  # the second dimension of a tensor of rows
BYTES_AT_A_TIME = 10**6  # the tokenizer's threads share them; while it works on them, a token needs 200 bytes
MOST_BYTES = 10**9  # rank 0 reads all files, and every rank holds 12 bytes per token

# ---- lines of files -----------------------------------------------------------------------------------------------


def lines_of(paths, option="--data"):
    """Pairs of a place, like "chats.jsonl: line 7", and the bytes of that line.

    Raises DistributedError, naming `option`, if a file cannot be read, or if all are too large to be held in memory.
    """
    try:
        n_bytes = sum(os.path.getsize(path) for path in paths)
        if n_bytes > MOST_BYTES:
            size = f"{n_bytes / 1e9:.1f} GB, more than the {MOST_BYTES / 1e9:.0f} GB that this script holds in memory"
            raise dist.DistributedError(f"{option} has {size}: take a part, or stream it as min_Stream.py does")
        for path in paths:
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{path}: line {number}", line
    except OSError as error:
        raise dist.DistributedError(f"{option}: cannot read {error.filename}: {error.strerror}") from None


def read(lines, tokenizer, length):
    """A list of documents for each of `lines`, pairs of a place and bytes. No document is longer than `length`.

    A text that is too long becomes several documents. Conversations that are too long are left out, and their number is
    printed. Every half minute it prints how far it is. Raises DistributedError, which names the place, for a line that
    is neither.
    """
    found = []
    n_too_long = 0
    last_told = time.monotonic()
    for some_lines in in_parts(lines):
        texts = []  # (number of the line, text, spans of what the assistant says, or None)
        for place, line in some_lines:
            for text, spans in texts_of(place, line, tokenizer):
                texts.append((len(found), text, spans))
            found.append([])
            if time.monotonic() > last_told + 30:
                last_told = time.monotonic()
                print(f"{len(found):,} lines are read, up to {place}", flush=True)
        # The chat template has written all special tokens, and `pieces` adds those of a text.
        encoded = tokenizer([text for _, text, _ in texts], add_special_tokens=False)
        for (number, text, spans), tokens, encoding in zip(texts, encoded.input_ids, encoded.encodings, strict=True):
            if spans is None:
                found[number] += pieces(text, tokens, tokenizer, length)
            elif len(tokens) <= length + 1:
                found[number].append(tokens_and_targets(tokens, encoding.offsets, spans))
            else:
                n_too_long += 1
    if n_too_long:
        print(f"{n_too_long:,} conversations have more than --length {length} tokens and are left out", flush=True)
    return found


def in_parts(lines):
    """Lists of lines that have BYTES_AT_A_TIME together, or more. No line is divided."""
    part, n_bytes = [], 0
    for place, line in lines:
        part.append((place, line))
        n_bytes += len(line)
        if n_bytes >= BYTES_AT_A_TIME:
            yield part
            part, n_bytes = [], 0
    if part:
        yield part


def tokens_and_targets(tokens, offsets, spans):
    """A document of a conversation. The offsets are, for each token, its first character and the one after its last."""
    tokens = np.array(tokens, dtype=np.int32)
    starts, ends = np.array(offsets).reshape(-1, 2).T
    in_loss = np.zeros(len(tokens), dtype=bool)
    for first, end in spans:
        # The first token of an answer may begin before it, with the space that ends the prompt.
        in_loss |= (first < ends) & (starts < end)
    targets = np.where(in_loss, tokens, IGNORED)
    return tokens[:-1], targets[1:]


def pieces(text, tokens, tokenizer, length):
    """Documents of a text: one, or several if it is long. Each token is the target of the one before it.

    It begins and ends as `tokenizer(text)` does, and ends with the EOS token. A text may have these tokens already.
    """
    start, end = tokens_around(tokenizer)
    if text.lstrip().startswith(tokenizer.decode(start)):
        start = []
    if text.rstrip().endswith(tokenizer.decode(end)):
        end = []
    tokens = np.concatenate([start, tokens, end]).astype(np.int32)
    found = []
    for first in range(0, len(tokens) - 1, length):
        piece = tokens[first : first + length + 1]
        found.append((piece[:-1], piece[1:]))
    return found


@functools.lru_cache(maxsize=1)
def tokens_around(tokenizer):
    """The tokens with which a text begins, and those with which it ends."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    is_added = encoded.special_tokens_mask
    first = [*is_added, 0].index(0)  # of the text
    start = encoded.input_ids[:first]
    end = encoded.input_ids[first + is_added.count(0) :]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in end:
        end = [*end, tokenizer.eos_token_id]
    return start, end


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

NOT_SHOWN = ("role", "name", "tool_call_id")  # by some chat templates
ROLES = ("system", "developer", "user", "assistant", "tool")
USER = {"role": "user", "content": "Hi."}
ANSWER = {"role": "assistant", "content": "Hi."}
CALL = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": {}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "SAID", "name": "f", "tool_call_id": CALL["id"]}


def texts_of(place, line, tokenizer):
    """Pairs of a text and the spans of its characters that are in the loss; None for a text without turns.

    Raises DistributedError, which names the place, if the line cannot be read, or if a part of it would be ignored.
    """
    try:
        record = json.loads(line, object_pairs_hook=without_nulls)
        if not isinstance(record, dict):
            raise ValueError("it is no JSON object")
        given = without_nothing(record)
        if "messages" in given:
            refuse_ignored(given, {"messages", "tools", "chat_template_kwargs"})
            found = conversation(given, tokenizer)
        elif "text" in record:  # may be ""
            refuse_ignored(given, {"text"})
            if not isinstance(record["text"], str):
                raise ValueError("its text is no string")
            found = [(record["text"], None)]
        else:
            fields = ", ".join(given) or "nothing"
            raise ValueError(f"it has neither, but {fields}: write each text as a message with a role and a content")
        for text, _ in found:
            text.encode()  # JSON may contain half of a surrogate pair, which is no character
        return found
    except Exception as failure:  # a chat template is a program, and may raise anything
        cause = str(failure).partition("\n")[0][:300]
        if type(failure) is not ValueError:  # ours say what is wrong
            cause = f"{type(failure).__name__}: {cause}"
        message = f'{place} is no {{"messages": [...]}} or {{"text": "..."}} that this model can read ({cause})'
        raise dist.DistributedError(message) from None


def object_of(pairs):
    """A JSON object as a dict. JSON allows a key twice, and Python would take the last one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = max(keys, key=keys.count)
        raise ValueError(f"an object of it has the key {twice} twice")
    return found


def without_nulls(pairs):
    """As `object_of`. Arrow gives all objects of a column the same fields, and writes null where one has none."""
    return {key: value for key, value in object_of(pairs).items() if value is not None}


def without_nothing(record):
    """The fields of a line or a message that say something."""
    return {field: value for field, value in record.items() if value not in (None, "", [], {})}


def refuse_ignored(record, used):
    """Other trainers obey fields that are not used here, such as `weight`, and nobody knows all of their names."""
    ignored = [field for field in record if field not in used]
    if ignored:
        allowed = ", ".join(sorted(used))
        line = f"{', '.join(ignored)} would be ignored"
        raise ValueError(f"{line}: write the data anew with no other fields than {allowed}")


def conversation(record, tokenizer):
    """Pairs of a text and the spans of its characters that are in the loss. Raises ValueError if a part is ignored."""
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: give one by --chat-template, or use texts")
    options = parsed(record.get("chat_template_kwargs")) or {}
    tools = [parsed(tool) for tool in parsed(record.get("tools")) or []]
    if tools:
        options["tools"] = tools
    refuse_unread(options, "the line", tokenizer)
    render = functools.partial(tokenizer.apply_chat_template, tokenize=False, **options)
    messages = parsed(record["messages"])
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("its messages are no list of objects")
    pairs = [normalized(message, tokenizer) for message in messages]
    messages = [message for message, _ in pairs]
    trained = [number for number, (_, is_trained) in enumerate(pairs) if is_trained]  # they are in the loss
    if not trained:
        raise ValueError("the assistant says nothing in it that is in the loss")
    try:
        return turns(messages, trained, render, special_tokens(tokenizer))
    except jinja2.TemplateError as failure:
        roles = ", ".join(role for role in ROLES if is_shown(role, render))
        raise ValueError(f"{failure}; the chat template shows the roles {roles or None}") from None


def parsed(value):
    """Some files have JSON inside of JSON."""
    if isinstance(value, str) and value:
        return json.loads(value, object_pairs_hook=object_of)
    return value


def normalized(message, tokenizer):
    """The message as chat templates expect it, and whether its words are in the loss."""
    message = without_nothing(message)
    role = message["role"]
    is_trained = role == "assistant"
    for name in ("weight", "train"):  # in the formats of OpenAI and of axolotl
        value = message.pop(name, is_trained)
        if value not in (0, 1) or value > is_trained:
            raise ValueError(f"{name} {value} of the role {role}: it may be 0, or 1 for the assistant")
        is_trained = bool(value)
    refuse_unread(message.keys() - {"content", *NOT_SHOWN}, f"the role {role}", tokenizer)
    content = message.get("content", "")  # a message with calls may have none, but some chat templates need it
    if isinstance(content, list):
        for part in content:
            if part["type"] != "text":
                raise ValueError(f"its content has a part of the type {part['type']}, but only text is trained on")
        content = "".join(part["text"] for part in content)
    message["content"] = content
    if not isinstance(content, str):
        raise ValueError(f"the content of the role {role} is no string")
    if "tool_calls" in message:
        message["tool_calls"] = parsed(message["tool_calls"])
    for call in message.get("tool_calls", []):
        function = call.get("function", call)
        function["arguments"] = parsed(function.get("arguments")) or {}
        if not isinstance(function["arguments"], dict):
            raise ValueError(f"the arguments of the tool call {function['name']} are no JSON object")
    return message, is_trained


def refuse_unread(names, place, tokenizer):
    """Raise ValueError if the chat template does not contain one of the names. `place` is what the error calls it."""
    for name in names:
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise ValueError(f"the chat template ignores {name} of {place}")


def refuse_hidden(messages, first, end, trained, render):
    """Raise TemplateError if the chat template does not show all that messages[first:end] say, after those before.

    Each part gets a mark, which must be in the text. `trained` are the numbers of the answers that are in the loss.
    """
    marked = copy.deepcopy(messages[first:end])
    parts = []
    for number, message in enumerate(marked, first):
        if message["role"] == "assistant" and number not in trained:
            continue  # its thoughts may be hidden once another turn follows
        for name in message.keys() - NOT_SHOWN:
            if isinstance(message[name], str) and message[name].strip():
                message[name] += f"(mark {len(parts)})"
                parts.append(f"{name} of the role {message['role']}")
        for call in message.get("tool_calls", []):
            function = call.get("function", call)
            if function["arguments"]:
                function["arguments"]["x"] = f"(mark {len(parts)})"
                parts.append(f"the arguments of the tool call {function['name']}")
            function["name"] += f"(mark {len(parts)})"
            parts.append("the name of a tool call")
    shown = render([*messages[:first], *marked])
    for number, part in enumerate(parts):
        if f"(mark {number})" not in shown:
            raise jinja2.TemplateError(f"the chat template does not show {part}")


def is_shown(role, render):
    """Does the chat template show what this role says, where it usually stands?"""
    message = {**RESULT, "role": role}
    usual = {"user": [message], "assistant": [USER, message], "tool": [USER, CALLING, message]}
    with contextlib.suppress(Exception):
        return "SAID" in render(usual.get(role, [message, USER]))
    return False


def turns(messages, trained, render, special):
    """Pairs of a text and the spans of its characters that are in the loss.

    The assistant's turn is the text after the prompt with which the model is asked for it. So any chat template will
    do, also one without {% generation %}. Some templates show an earlier turn in another way, for example without its
    thoughts. Then each turn becomes a text of its own.
    """
    found = {}  # by the number of the last answer
    open_text = ""  # the text before, without what ends a conversation
    for number in trained:
        if number == 0:
            raise ValueError("its first message is the assistant's, and answers nothing")
        text = render(messages[: number + 1], add_generation_prompt=False)
        prompt = render(messages[:number], add_generation_prompt=True)
        if number == trained[0]:
            before = render(messages[:number], add_generation_prompt=False)
            closing = end_of_conversation(before, prompt, text, special)
        start = n_common(text, prompt)  # not the whole prompt, if that also opens a thought
        if start < len(prompt) or words_not_in(text[start:], messages[number]):
            before = render(messages[:number], add_generation_prompt=False).removesuffix(closing)
            if start < len(before):
                line = "the chat template shows the messages before an answer in another way once the answer follows"
                raise ValueError(f"{line}, so the answer cannot be located")
            words = words_not_in(text[len(before) :], messages[number])
            if words:
                raise ValueError(f"the chat template does not show all that the assistant says: {words[:50]!r}")
        if not text.rstrip().endswith(special):
            text += end_of_answer(messages[number], render, special)
        spans = []
        if found and text.startswith(open_text):
            _, (_, spans) = found.popitem()  # this text contains the one before
            spans[-1] = spans[-1][0], len(open_text)
        found[number] = text, [*spans, (start, len(text))]
        open_text = text
        if text.removesuffix(closing).rstrip().endswith(special):  # the turn has an end of its own
            open_text = text.removesuffix(closing)
    first = 0
    for number in found:
        refuse_hidden(messages, first, number + 1, trained, render)
        first = number + 1
    return list(found.values())


def end_of_conversation(before, prompt, text, special):
    """What the chat template writes after the last turn, unless it asks for an answer: in some the EOS token."""
    if not prompt.startswith(before):
        for token in special:
            closing = before[before.rfind(token) :]
            if closing.strip() == token and text.endswith(closing):
                return closing
    return ""


def words_not_in(shown, message):
    """Something that the assistant says and the chat template does not show, or None. It may change white space."""
    shown = "".join(shown.split())
    for name in message.keys() - NOT_SHOWN:
        words = message[name]
        if isinstance(words, str) and "".join(words.split()) not in shown:
            return words
    return None


def end_of_answer(message, render, special):
    """What follows an answer, up to a special token; "" if another text follows it.

    Some chat templates end a turn only by the token with which the next one begins. Others leave out the end of the
    last turn.
    """
    answer, following = ANSWER, USER
    if "tool_calls" in message:
        answer, following = CALLING, RESULT
    text = render([USER, answer], add_generation_prompt=False)
    longer = render([USER, answer, following], add_generation_prompt=False)
    added = longer[n_common(text, longer) :]
    for token in special:
        if added.lstrip().startswith(token):
            return added[: added.index(token) + len(token)]
    return ""


def n_common(first, second):
    """The number of characters with which both begin, by bisection: long texts are compared often."""
    lengths = range(1, min(len(first), len(second)) + 1)
    return bisect.bisect(lengths, False, key=lambda length: first[:length] != second[:length])


@functools.lru_cache(maxsize=1)
def special_tokens(tokenizer):
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(sorted(tokens, key=len, reverse=True))  # one may begin with another one


# ---- rows ---------------------------------------------------------------------------------------------------------


def pack(documents, length):
    """Lists of documents that share a row. Each, the longest first, goes to the fullest row that has room for it."""
    lists = []
    with_room = [[] for _ in range(length + 1)]  # with_room[n]: the numbers of the lists with n free positions
    for document in sorted(documents, key=lambda document: len(document[0]), reverse=True):
        needed = len(document[0])
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


def make_rows(lists, length):
    """(rows, 3, length), int32: tokens, positions, targets. Each list of documents is a row.

    The positions of each document start at 0. Each token of padding is a document of its own, without targets: some
    models take other rotary factors if any position is large.
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
        row[POSITIONS, start:] = 0
    return rows


# ---- the rows of a rank -------------------------------------------------------------------------------------------


def broadcast_rows(rows):
    """Rank 0's rows on every rank, in the CPU's memory."""
    shape = dist.broadcast_object(None if rows is None else rows.shape)
    if rows is None:
        rows = torch.empty(shape, dtype=torch.int32)
    torch_dist.broadcast(rows, src=0)
    return rows


Row = collections.namedtuple("Row", "tokens positions places targets n_tokens")


def on_device(row):
    """A row (3, length) as the model takes it; `places` are the positions of the targets. The host does not wait."""
    tokens, positions, targets = row.long()
    n_tokens = (tokens != PADDING).sum().item()
    places = (targets != IGNORED).nonzero()[:, 0]
    tensors = tokens.clamp(min=0)[None], positions[None], places, targets[places]
    device = dist.get_device()
    if device.type != "cpu":
        tensors = [tensor.pin_memory() for tensor in tensors]
    return Row(*(tensor.to(device, non_blocking=True) for tensor in tensors), n_tokens)


def share_of(rows, numbers):
    """This rank's share of the rows `numbers`, one at a time.

    Each rank gets equally many, since each forward is a collective. The last ones may be padding alone.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    padding = make_rows([[]], rows.shape[2])[0]
    for first in range(0, len(numbers), world_size):
        group = numbers[first : first + world_size]
        if rank < len(group):
            yield on_device(rows[group[rank]])
        else:
            yield on_device(padding)


def order_of(n_rows, n, seed):
    """The numbers of the next `n` rows: epoch after epoch, each in an order of its own, on any number of ranks."""
    numbers = []
    while len(numbers) < n:
        generator = torch.Generator().manual_seed(seed + len(numbers) // n_rows)
        numbers += torch.randperm(n_rows, generator=generator).tolist()
    return numbers[:n]


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
    paths = [str(path) for path in sorted(LIBRARY.glob("*.py"))]
    if not paths:
        raise dist.DistributedError(f"no text to train on: {LIBRARY} has no *.py files: give --model and --data")
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train(paths, vocab_size, special_tokens=special, show_progress=False)
    trained = tokenizers.Tokenizer.from_str(trained.to_str())  # the class that transformers takes
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
