"""Documents for language models: from files to tokens and targets, and from these to rows of equal length in a file.

Each line of a .jsonl file is a conversation or a text:

    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4."}]}
    {"text": "Once upon a time"}

Files may be compressed by gzip. A parquet file has such a row for each line, if pyarrow is installed. A conversation
may also have `tools`, and in `chat_template_kwargs` variables of the chat template. A message with "weight": 0 is not
in the loss. Other fields are refused, since other trainers obey some of them. A field of a line or of a message that is
null, "", [] or {} is none. Below them a null is none either, since Arrow and parquet write one where an object of a
column lacks a field. A special token among the words of a conversation is text. In a {"text": ...} it is the token,
because texts may be conversations that another program has written with a chat template.

A document is a pair of int32 arrays of equal length: tokens and targets. The target of a token is the token after it,
or IGNORED where that one is not in the loss. In a conversation only what the assistant says is in the loss, with the
tokens that end its turn.

    documents = llm_documents.documents_of(llm_documents.lines_of(paths), tokenizer, length=1024)
    llm_documents.write_rows("rows.npy", documents, length=1024)  # an array of numpy: (rows, 3, 1024), int32

Rows are made once, and each rank maps the file into its memory for the rows that it takes.
"""

import ast
import bisect
import collections
import contextlib
import copy
import functools
import gzip
import hashlib
import itertools
import json
import math
import re
import sysconfig
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import normalizers

import checkpoint
import distributed as dist

IGNORED = -100  # a target that is not in the loss
PADDING = -1  # the token of a position that no document uses
TOKENS, POSITIONS, TARGETS = range(3)  # the second dimension of an array of rows
BYTES_AT_A_TIME = 10**6  # the tokenizer's threads share them; while it works on them, a token needs 200 bytes
TOKENS_AT_A_TIME = 4 * 10**6  # that are packed together

FORMATS = {  # how a line of another format begins or ends, and what to do
    rb"\xff\xfe|\xfe\xff": "the file is UTF-16: save it as UTF-8",
    rb"\0": "the file is damaged: it has zeros instead of text",
    rb"\s*\[": "the file is a JSON array: write one object per line, as `to_json` of a Dataset of Hugging Face does",
    rb"\s*\{\s*$": "an object has several lines: write each one in one line, as `to_json` of a Dataset does",
    rb"(?s:.*)\},\s*$": "the line ends with a comma: remove it",
    rb"[^{]": "the file is no .jsonl: load it by `datasets.load_dataset`, and write it by `to_json`",
}

# ---- lines of files -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_line(what):
    """Turn what is raised, which may be anything, into a DistributedError of one line that begins with `what`."""
    try:
        yield
    except Exception as failure:
        cause = " ".join(str(failure).split())[:400]
        if type(failure) not in (ValueError, dist.DistributedError):  # ours say what is wrong
            cause = f"{type(failure).__name__}: {cause}"
        raise dist.DistributedError(f"{what}: {cause}") from None


def lines_of(paths, option="--data"):
    """Pairs of a place, like "chats.jsonl: line 7", and the bytes of that line.

    Raises DistributedError, naming `option`, if a file cannot be read.
    """
    for path in paths:
        with one_line(f"{option}: cannot read {path}"):
            for number, line in enumerate(lines_in(path), 1):
                if line.strip():
                    yield f"{path}: line {number}", line


def lines_in(path):
    """The lines of a file. A row of a parquet file becomes a line of JSON."""
    with open(path, "rb") as file:
        start = file.read(4)
    if start == b"PAR1":
        with one_line("a parquet file needs `pip install pyarrow`"):
            from pyarrow import parquet
        for batch in parquet.ParquetFile(path).iter_batches(1000):
            yield from (json.dumps(record, default=str).encode() for record in batch.to_pylist())
    else:
        opener = gzip.open if start.startswith(b"\x1f\x8b") else open
        with opener(path, "rb") as file:
            yield from file


def split(read_lines, seed):
    """Lines to train on, and lines held out: a twentieth, but at most 500, drawn at random by `seed`.

    Equal lines are on one side. `read_lines()` gives the lines from their start, and is called three times.
    """

    def number_of(line):
        return int.from_bytes(hashlib.sha256(b"%d %s" % (seed, line.strip())).digest()[:8])

    numbers = np.unique(np.fromiter((number_of(line) for _, line in read_lines()), dtype=np.uint64))
    n_held_out = min(500, max(1, len(numbers) // 20))
    held_out = set(numbers[:n_held_out].tolist())
    return (
        (pair for pair in read_lines() if number_of(pair[1]) not in held_out),
        (pair for pair in read_lines() if number_of(pair[1]) in held_out),
    )


def documents_of(lines, tokenizer, length):
    """The documents of `lines`, pairs of a place and bytes, one after the other. None is longer than `length`.

    A text that is too long becomes several documents. Conversations that are too long are left out, and their number is
    printed. Raises DistributedError, which names the place, for a line that is neither.
    """
    n_too_long = 0
    for part in parts_of(lines, BYTES_AT_A_TIME, lambda pair: len(pair[1])):
        for document in itertools.chain(*read(part, tokenizer, length)):
            if len(document[0]) <= length:
                yield document
            else:
                n_too_long += 1
    if n_too_long:
        print(f"{n_too_long:,} conversations have more than --length {length} tokens and are left out", flush=True)


def parts_of(items, size, size_of):
    """Lists of items, whose sizes add up to `size` or more. The last list may be smaller."""
    part, n = [], 0
    for item in items:
        part.append(item)
        n += size_of(item)
        if n >= size:
            yield part
            part, n = [], 0
    if part:
        yield part


def read(lines, tokenizer, length):
    """A list of documents for each of `lines`. Texts are cut to `length`; conversations may be longer."""
    texts_of_lines = [texts_of(place, line, tokenizer) for place, line in lines]
    # The chat template has written all special tokens, and `pieces` adds those of a text.
    encode = without_breaks(tokenizer)
    encoded = encode([text for texts in texts_of_lines for text, _ in texts], add_special_tokens=False)
    encodings = iter(encoded.encodings)
    found = []
    for texts in texts_of_lines:
        found.append([])
        for text, spans in texts:
            if spans is None:
                found[-1] += pieces(text, next(encodings), encode, length)
            else:
                found[-1].append(tokens_and_targets(next(encodings), spans))
    return found


def tokens_and_targets(encoding, spans):
    """A document of a conversation. In the loss are the tokens of `spans`, pairs of a first character and an end."""
    tokens = np.array(encoding.ids, dtype=np.int32)
    starts, ends = np.array(encoding.offsets).reshape(-1, 2).T  # the first character of each token, and its end
    in_loss = np.zeros(len(tokens), dtype=bool)
    for first, end in spans:
        # The first token of an answer may begin before it, with the space that ends the prompt.
        in_loss |= (first < ends) & (starts < end)
    targets = np.where(in_loss, tokens, IGNORED)
    return tokens[:-1], targets[1:]


def pieces(text, encoding, tokenizer, length):
    """Documents of a text: one, or several if it is long. Each token is the target of the one before it.

    It begins as `tokenizer(text)` does, and ends with the EOS token. A text may have these tokens already.
    """
    tokens = tokenizer.backend_tokenizer.post_process(encoding).ids
    if text.lstrip().startswith(tokenizer.decode(tokens[:1])):
        tokens = encoding.ids
    ends = tokenizer.eos_token_id in (None, *tokens[-1:]) or text.rstrip().endswith(tokenizer.eos_token)
    if not ends:
        tokens = [*tokens, tokenizer.eos_token_id]
    tokens = np.array(tokens, dtype=np.int32)
    found = [tokens[first : first + length + 1] for first in range(0, len(tokens) - 1, length)]
    return [(piece[:-1], piece[1:]) for piece in found]


def text_around_loss(row, tokenizer, n_tokens=20):
    """Of the first targets of a row that lie together, the text of up to `n_tokens`, and the text before them."""
    tokens, _, targets = row
    first = (targets != IGNORED).argmax()
    before = tokens[max(0, first + 1 - n_tokens) : first + 1]
    in_loss = itertools.takewhile(lambda target: target != IGNORED, targets[first : first + n_tokens])
    return tokenizer.decode(before), tokenizer.decode(list(in_loss))


# ---- conversations ------------------------------------------------------------------------------------------------

FIELDS = ("messages", "tools", "chat_template_kwargs")  # of a conversation
NOT_SHOWN = {"role", "name", "tool_call_id"}  # fields of a message that some chat templates do not need
ROLES = {"system", "developer", "user", "assistant", "tool"}
USER = {"role": "user", "content": "Hi."}
ANSWER = {"role": "assistant", "content": "Hi."}
CALL = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": {}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "4", "name": "f", "tool_call_id": CALL["id"]}
BREAK = "\ufdd0"  # Unicode promises that it is no character: it breaks up special tokens among the words


def texts_of(place, line, tokenizer):
    """Pairs of a text and the spans of its characters that are in the loss; None for a text without turns.

    Raises DistributedError, which names the place, if the line cannot be read, or if a part of it would be ignored.
    """
    with one_line(f'{place} is no {{"messages": [...]}} or {{"text": "..."}} that this model can read'):
        record = without_nothing(record_of(line))
        is_chat = "messages" in record
        used = FIELDS if is_chat else ("text",)
        ignored = ", ".join(field for field in record if field not in used)
        if ignored:  # other trainers obey some fields, such as `weight`
            raise ValueError(f"{ignored} would be ignored: write the data anew with {', '.join(used)} alone")
        if is_chat:
            return conversation(record, tokenizer)
        text = record.get("text", "")
        text.encode()  # raises if it is no string, or has half of a surrogate pair
        return [(text, None)]


def record_of(line):
    """The JSON object of a line, without the fields that are null, at any depth."""
    try:
        return dict(json.loads(line, object_pairs_hook=without_nulls))
    except (ValueError, TypeError) as error:
        for pattern, advice in FORMATS.items():
            if re.match(pattern, line):
                raise ValueError(advice) from None
        raise ValueError(f"it is no JSON object: {error}") from None


def without_nulls(pairs):
    return {name: value for name, value in pairs if value is not None}


def without_nothing(record):
    """The fields of a line or a message that say something."""
    return {field: value for field, value in record.items() if value not in (None, "", [], {})}


def conversation(record, tokenizer, as_strings=False):
    """Pairs of a text and the spans of its characters that are in the loss. Raises ValueError if a part is ignored.

    The arguments of tool calls are objects for the chat template, or `as_strings` if it joins them to others.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: give one by --chat-template, or use texts")
    special = special_tokens(tokenizer)
    given = as_words(record, special)
    options = without_nothing({**given.get("chat_template_kwargs", {}), "tools": parsed(given.get("tools"))})
    refuse_unread(options, "the line", tokenizer)
    render = functools.partial(tokenizer.apply_chat_template, tokenize=False, **options)
    messages = [normalized(message, tokenizer, as_strings) for message in given["messages"]]
    trained = [number for number, message in enumerate(messages) if message.pop("weight")]
    if not trained:
        raise ValueError("the assistant says nothing in it that is in the loss")
    try:
        return turns(messages, trained, render, special)
    except TypeError:
        if as_strings:
            raise
        return conversation(record, tokenizer, as_strings=True)


def as_words(record, special):
    """The record with special tokens in its strings broken up: `without_breaks` reads them as text."""
    text = json.dumps(record, ensure_ascii=False)
    text.encode()  # raises if it has half of a surrogate pair, which JSON allows and UTF-8 does not
    for token in special:
        text = text.replace(token, token[0] + BREAK + token[1:])
    return json.loads(text)


@functools.lru_cache(maxsize=1)
def without_breaks(tokenizer):
    """A tokenizer that removes BREAK after it has looked for special tokens, and before it looks for all others."""
    tokenizer = copy.deepcopy(tokenizer)
    backend = tokenizer.backend_tokenizer
    others = [backend.normalizer] if backend.normalizer else []
    backend.normalizer = normalizers.Sequence([normalizers.Replace(BREAK, ""), *others])
    return tokenizer


def parsed(value):
    """Some files have JSON inside of JSON."""
    return json.loads(value) if isinstance(value, str) else value


def normalized(message, tokenizer, as_strings):
    """The message as chat templates expect it. Its weight says whether it is in the loss."""
    message = {"content": "", **without_nothing(message)}  # some chat templates need a content, beside calls too
    role = message["role"]
    is_answer = role == "assistant"
    weight = message.setdefault("weight", is_answer)
    if weight not in (0, is_answer):
        raise ValueError(f"weight {weight} of the role {role}: it may be 0, or 1 for the assistant")
    refuse_unread({role} - ROLES, "the roles", tokenizer)
    refuse_unread(message.keys() - {"content", "weight"} - NOT_SHOWN, f"the role {role}", tokenizer)
    if not isinstance(message["content"], str):
        raise ValueError(f"the content of the role {role} is no string")
    for call in message.get("tool_calls", []):
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        if not as_strings:
            arguments = parsed(arguments)
        elif not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function["arguments"] = arguments
    if weight and not any(words.strip() for words in words_of(message)):
        raise ValueError('an answer of the assistant is empty: leave it out, or give it "weight": 0')
    return message


def refuse_unread(names, place, tokenizer):
    """Raise ValueError if the chat template does not contain one of the names. `place` is what the error calls it."""
    for name in names:
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise ValueError(f"the chat template ignores {name} of {place}")


def turns(messages, trained, render, special):
    """Pairs of a text and the spans of its characters that are in the loss: the answers whose numbers are `trained`.

    The assistant's turn is the text after the prompt with which the model is asked for it. So any chat template will
    do, also one without {% generation %}. A text holds all answers up to one, unless the template shows an earlier turn
    in another way once a later one follows, for example without its thoughts. Then each turn becomes a text of its own.
    """
    found = []
    first = 0
    for number in trained:
        if number == 0:
            raise ValueError("its first message is the assistant's, and answers nothing")
        prompt = render(messages[:number], add_generation_prompt=True)
        text = render(messages[: number + 1], add_generation_prompt=False)
        start = n_common(prompt, text)
        if start < len(prompt.rstrip()):  # white space at its end may be changed
            line = f"the prompt for an answer ends with {prompt[start:][:50]!r}, and the answer does not follow it"
            raise ValueError(f"{line}: add the thoughts of the answer, or give another --chat-template")
        for message in messages[first : number + 1]:
            if message["role"] != "assistant" or message is messages[number]:  # others may be hidden
                refuse_hidden(message, text)
        if not text.rstrip().endswith(special):
            text += end_of_answer(messages[number], render, special)
        spans = [(start, len(text))]
        if found and text.startswith(found[-1][0]):
            _, earlier = found.pop()
            spans = [*earlier, *spans]
        found.append((text, spans))
        first = number + 1
    return found


def refuse_hidden(message, text):
    """Raise ValueError if a text does not show what a message says. White space may differ, or words be JSON in it."""
    shown = "".join(text.split())
    for words in words_of(message):
        as_json = json.dumps(words, ensure_ascii=False)[1:-1]
        if "".join(words.split()) not in shown and "".join(as_json.split()) not in shown:
            raise ValueError(f"the chat template does not show {words[:50]!r} of the role {message['role']}")


def words_of(message):
    """What a message says, and the names of the tools that it calls."""
    said = [value for name, value in message.items() if isinstance(value, str) and name not in NOT_SHOWN]
    return said + [call.get("function", call)["name"] for call in message.get("tool_calls", [])]


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
    rooms = []  # sorted pairs of the free positions of a list, and its number
    for document in sorted(documents, key=lambda document: len(document[0]), reverse=True):
        needed = len(document[0])
        place = bisect.bisect_left(rooms, (needed, 0))
        if place == len(rooms):
            rooms.append((length, len(lists)))
            lists.append([])
        room, number = rooms.pop(place)
        lists[number].append(document)
        bisect.insort(rooms, (room - needed, number))
    return lists


def make_rows(lists, length):
    """(rows, 3, length), int32: tokens, positions, targets. Each list of documents is a row.

    The positions of each document start at 0. Each token of padding is a document of its own, without targets: some
    models take other rotary factors if any position is large.
    """
    rows = torch.zeros(len(lists), 3, length, dtype=torch.int32)
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
    return rows


# ---- files of rows ------------------------------------------------------------------------------------------------


def write_rows(path, documents, length, pad=False):
    """Write an array (rows, 3, length) of numpy to `path`. Print its size, and return the largest token.

    With `pad`, each document has a row of its own. TOKENS_AT_A_TIME are in memory, and are packed together. Raises
    DistributedError if there are no documents, or if the disk is full.
    """
    n_rows = n_targets = n_padding = largest = 0
    with checkpoint.atomic(path) as file:
        write_header(file, n_rows, length)
        for part in parts_of(documents, TOKENS_AT_A_TIME, lambda document: len(document[0])):
            lists = [[document] for document in part] if pad else pack(part, length)
            rows = make_rows(lists, length).numpy()
            file.write(rows)
            n_rows += len(rows)
            n_targets += np.count_nonzero(rows[:, TARGETS] != IGNORED)
            n_padding += np.count_nonzero(rows[:, TOKENS] == PADDING)
            largest = max(largest, rows[:, TOKENS].max(), rows[:, TARGETS].max())
        file.seek(0)
        write_header(file, n_rows, length)
    if not n_rows:
        line = f"too few lines fit into --length {length} to train on and to hold out: give more, or name --eval-data"
        raise dist.DistributedError(line)
    padding = f"{n_padding / n_rows / length:.1%} padding"
    print(f"{path}: {n_rows:,} rows of {length} tokens, {n_targets:,} targets, {padding}", flush=True)
    return largest


def write_header(file, n_rows, length):
    """Numpy leaves room in a header for the number of rows, which is known at the end."""
    header = {"descr": "<i4", "fortran_order": False, "shape": (n_rows, 3, length)}
    np.lib.format.write_array_header_1_0(file, header)


def mapped(path):
    """The rows of a file, mapped into memory. Map them anew for each use, because what is read of a map stays in it."""
    with one_line(f"cannot read the rows of {path}"):
        rows = np.load(path, mmap_mode="r")
        if rows.dtype != np.int32 or rows.ndim != 3 or rows.shape[1] != 3:
            raise ValueError(f"it has {rows.dtype} of the shape {rows.shape}, not int32 of (rows, 3, length)")
        return rows


# ---- the rows of a rank -------------------------------------------------------------------------------------------

Row = collections.namedtuple("Row", "tokens positions places targets n_tokens")


def on_device(row):
    """A row (3, length) as the model takes it; `places` are the positions of the targets."""
    tokens, positions, targets = row.long()
    n_tokens = (tokens != PADDING).sum().item()
    places = (targets != IGNORED).nonzero()[:, 0]
    tensors = tokens.clamp(min=0)[None], positions[None], places, targets[places]
    return Row(*(tensor.to(dist.get_device()) for tensor in tensors), n_tokens)


def share_of(path, numbers):
    """This rank's share of the rows `numbers` of a file, one at a time.

    Each rank gets equally many, since each forward is a collective. The last ones may be padding alone.
    """
    rows = mapped(path)
    world_size = dist.get_world_size()
    own = numbers[dist.get_rank() :: world_size]
    for number in own:
        yield on_device(torch.from_numpy(rows[number].copy()))
    if len(own) < math.ceil(len(numbers) / world_size):
        yield on_device(make_rows([[]], rows.shape[2])[0])


def order_of(n_rows, n, seed):
    """The numbers of the next `n` rows: epoch after epoch, each in an order of its own, on any number of ranks."""
    generators = [torch.Generator().manual_seed(seed + epoch) for epoch in range(math.ceil(n / n_rows))]
    epochs = [torch.randperm(n_rows, generator=generator) for generator in generators]
    return torch.cat(epochs)[:n].tolist()


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
                yield f"{path}: line {node.lineno}", json.dumps({"messages": [question, answer]}).encode()


def library_tokenizer():
    """Pairs of bytes that are frequent in Python's library become tokens."""
    paths = [str(path) for path in sorted(LIBRARY.glob("*.py"))]
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train(paths, 2048, special_tokens=special, show_progress=False)
    trained = tokenizers.Tokenizer.from_str(trained.to_str())  # the class that transformers takes
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
