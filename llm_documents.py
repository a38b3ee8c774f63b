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
import os
import re
import sysconfig
import time
from pathlib import Path

import jinja2
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
# Other bytes than those of a JSON object, at the start of a line or at its end, and what to do about them.
FORMATS = {
    r"\xff\xfe|\xfe\xff": "the file is UTF-16: save it as UTF-8",
    r"\0": "the file is damaged: it has zeros instead of text",
    r"\s*\[": "the file is a JSON array: write one object per line, as `to_json` of a Dataset of Hugging Face does",
    r"\s*\{\s*$": "an object has several lines: write each one in one line, as `to_json` of a Dataset does",
    r"(?s:.*)\},\s*$": "the line ends with a comma: remove it",
    r"[^{]": "the file is no .jsonl: load it by `datasets.load_dataset`, and write it by `to_json`",
}

# ---- lines of files -----------------------------------------------------------------------------------------------


def lines_of(paths, option="--data"):
    """Pairs of a place, like "chats.jsonl: line 7", and the bytes of that line.

    Raises DistributedError, naming `option`, if a file cannot be read.
    """
    for path in paths:
        try:
            if os.path.isdir(path):
                raise ValueError(f"it is a folder: name its files, such as {path}/*.jsonl")
            with open(path, "rb") as file:
                start = file.read(4)
            opened = lines_of_parquet(path) if start == b"PAR1" else lines_of_text(path, start)
            for number, line in enumerate(opened, 1):
                if line.strip():
                    yield f"{path}: line {number}", line
        except (OSError, EOFError, ImportError, ValueError) as error:  # of gzip and pyarrow too
            cause = getattr(error, "strerror", None) or error
            raise dist.DistributedError(f"{option}: cannot read {path}: {cause}") from None


def lines_of_text(path, start):
    """The lines of a file, which may be compressed. `start` has its first bytes."""
    opener = gzip.open if start.startswith(b"\x1f\x8b") else open
    with opener(path, "rb") as file:
        yield from file


def lines_of_parquet(path):
    try:
        from pyarrow import parquet
    except ImportError:
        raise ImportError("a parquet file needs `pip install pyarrow`") from None
    for batch in parquet.ParquetFile(path).iter_batches(1000):
        for record in batch.to_pylist():
            yield json.dumps(record, default=str).encode()


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
    printed. Every half minute it prints how far it is. Raises DistributedError, which names the place, for a line that
    is neither.
    """
    n_lines = n_too_long = 0
    last_told = time.monotonic()
    for part in in_parts(lines):
        for found in read(part, tokenizer, length):
            fitting = [document for document in found if len(document[0]) <= length]
            n_too_long += len(found) - len(fitting)
            yield from fitting
        n_lines += len(part)
        if time.monotonic() > last_told + 30:
            last_told = time.monotonic()
            print(f"{n_lines:,} lines are read, up to {part[-1][0]}", flush=True)
    if n_too_long:
        print(f"{n_too_long:,} conversations have more than --length {length} tokens and are left out", flush=True)


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


def read(lines, tokenizer, length):
    """A list of documents for each of `lines`. Texts are cut to `length`; conversations may be longer."""
    found = []
    texts = []  # (number of the line, text, spans of what the assistant says, or None)
    for place, line in lines:
        for text, spans in texts_of(place, line, tokenizer):
            texts.append((len(found), text, spans))
        found.append([])
    # The chat template has written all special tokens, and `pieces` adds those of a text.
    encode = tokenizer
    if any(BREAK in text for _, text, _ in texts):
        encode = without_breaks(tokenizer)
    encoded = encode([text for _, text, _ in texts], add_special_tokens=False)
    for (number, text, spans), tokens, encoding in zip(texts, encoded.input_ids, encoded.encodings, strict=True):
        if spans is None:
            found[number] += pieces(text, tokens, tokenizer, length)
        else:
            found[number].append(tokens_and_targets(tokens, encoding.offsets, spans))
    return found


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


def text_around_loss(row, tokenizer, n_tokens=20):
    """Of the first targets of a row that lie together, the text of up to `n_tokens`, and the text before them."""
    tokens, _, targets = row
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
BREAK = "\ufdd0"  # Unicode promises that it is no character: it breaks up special tokens among the words


def texts_of(place, line, tokenizer):
    """Pairs of a text and the spans of its characters that are in the loss; None for a text without turns.

    Raises DistributedError, which names the place, if the line cannot be read, or if a part of it would be ignored.
    """
    try:
        record = record_of(line)
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


def record_of(line):
    """The JSON object of a line. Raises ValueError, which says what to do if the file has another format."""
    failure = ValueError("it is no JSON object")
    try:
        record = json.loads(line, object_pairs_hook=without_nulls)
        if isinstance(record, dict):
            return record
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        failure = error
    text = line if isinstance(line, str) else line.decode("latin-1")
    for pattern, advice in FORMATS.items():
        if re.match(pattern, text):
            raise ValueError(advice)
    raise failure


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


def conversation(record, tokenizer, as_strings=False):
    """Pairs of a text and the spans of its characters that are in the loss. Raises ValueError if a part is ignored.

    The arguments of tool calls are objects for the chat template, or `as_strings` if it joins them to others.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: give one by --chat-template, or use texts")
    special = special_tokens(tokenizer)
    options = parsed(record.get("chat_template_kwargs")) or {}
    tools = [parsed(tool) for tool in parsed(record.get("tools")) or []]
    if tools:
        options["tools"] = as_words(tools, special)
    refuse_unread(options, "the line", tokenizer)
    render = functools.partial(tokenizer.apply_chat_template, tokenize=False, **options)
    given = parsed(record["messages"])
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise ValueError("its messages are no list of objects")
    pairs = [normalized(as_words(message, special), tokenizer, as_strings) for message in given]
    trained = [number for number, (_, is_trained) in enumerate(pairs) if is_trained]  # they are in the loss
    if not trained:
        raise ValueError("the assistant says nothing in it that is in the loss")
    messages = [message for message, _ in pairs[: trained[-1] + 1]]
    for message, _ in pairs[len(messages) :]:  # they follow the last answer, and nobody sees them
        if message["role"] not in ROLES:
            refuse_unread([message["role"]], "the roles", tokenizer)
    try:
        return turns(messages, trained, render, special)
    except TypeError:
        if as_strings:
            raise
        return conversation(record, tokenizer, as_strings=True)
    except jinja2.TemplateError as failure:
        roles = ", ".join(role for role in ROLES if is_shown(role, render))
        raise ValueError(f"{failure}; the chat template shows the roles {roles or None}") from None


def as_words(value, special):
    """The value with special tokens in its strings broken up: `without_breaks` reads them as text."""
    if isinstance(value, str):
        for token in special:
            value = value.replace(token, token[0] + BREAK + token[1:])
    if isinstance(value, list):
        return [as_words(item, special) for item in value]
    if isinstance(value, dict):
        return {name: as_words(item, special) for name, item in value.items()}
    return value


@functools.lru_cache(maxsize=1)
def without_breaks(tokenizer):
    """A tokenizer that removes BREAK after it has looked for special tokens, and before it looks for all others."""
    tokenizer = copy.deepcopy(tokenizer)
    backend = tokenizer.backend_tokenizer
    remove = normalizers.Replace(BREAK, "")
    backend.normalizer = normalizers.Sequence([remove, *([backend.normalizer] if backend.normalizer else [])])
    return tokenizer


def parsed(value):
    """Some files have JSON inside of JSON."""
    if isinstance(value, str) and value:
        return json.loads(value, object_pairs_hook=object_of)
    return value


def normalized(message, tokenizer, as_strings):
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
        given = function.get("arguments")
        function["arguments"] = parsed(given) or {}
        if not isinstance(function["arguments"], dict):
            raise ValueError(f"the arguments of the tool call {function['name']} are no JSON object")
        if as_strings:
            function["arguments"] = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
    if is_trained and not any(words.strip() for words in words_of(message)):
        raise ValueError('an answer of the assistant is empty: leave it out, or give it "weight": 0')
    return message, is_trained


def refuse_unread(names, place, tokenizer):
    """Raise ValueError if the chat template does not contain one of the names. `place` is what the error calls it."""
    for name in names:
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise ValueError(f"the chat template ignores {name} of {place}")


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
        start = n_common(text, prompt)
        if start < len(prompt.rstrip()):  # white space at its end may be changed
            before = render(messages[:number], add_generation_prompt=False).removesuffix(closing)
            if start < len(before):
                line = "the chat template shows the messages before an answer in another way once the answer follows"
                raise ValueError(f"{line}, so the answer cannot be located")
            line = f"the prompt for an answer ends with {prompt[start:]!r}, and the chat template shows it without that"
            raise ValueError(f"{line}: add the thoughts of the answer, or give another --chat-template")
        if words_not_in(text[start:], messages[number]):  # the prompt may begin what the message says
            before = render(messages[:number], add_generation_prompt=False).removesuffix(closing)
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
    for number, (text, _) in found.items():
        for message in messages[first:number]:
            if message["role"] == "assistant":
                continue  # thoughts may be hidden if they are not in the loss
            words = words_not_in(text, message)
            if words:
                what = f"{words[:50]!r} of the role {message['role']}"
                raise jinja2.TemplateError(f"the chat template does not show {what}")
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


def words_of(message):
    """All strings that a message says, with the names and the arguments of its tool calls."""
    calls = [call.get("function", call) for call in message.get("tool_calls", [])]
    said = {name: words for name, words in message.items() if name not in ("tool_calls", *NOT_SHOWN)}
    return [*strings_in(list(said.values())), *strings_in([[call["name"], call["arguments"]] for call in calls])]


def strings_in(value):
    """The strings and numbers inside of lists and objects, as strings."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [string for item in value for string in strings_in(item)]
    return [] if value is None or isinstance(value, bool) else [str(value)]


def words_not_in(shown, message):
    """Something that a message says and the chat template does not show, or None.

    The template may change white space, and may write words as JSON has them.
    """
    shown = "".join(shown.split())
    for words in words_of(message):
        as_json = json.dumps(words, ensure_ascii=False)[1:-1]
        if "".join(words.split()) not in shown and "".join(as_json.split()) not in shown:
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


# ---- files of rows ------------------------------------------------------------------------------------------------


def write_rows(path, documents, length, pad=False):
    """Write an array (rows, 3, length) of numpy to `path`, and return the number of rows.

    With `pad`, each document has a row of its own. TOKENS_AT_A_TIME are in memory, and are packed together. Raises
    DistributedError if the disk is full.
    """
    n_rows = n_tokens = 0
    part = []
    with checkpoint.atomic(path) as file:
        write_header(file, n_rows, length)
        for document in itertools.chain(documents, [None]):
            if document:
                part.append(document)
                n_tokens += len(document[0])
            if n_tokens >= TOKENS_AT_A_TIME or not document:
                rows = make_rows([[each] for each in part] if pad else pack(part, length), length)
                file.write(rows.numpy())
                n_rows += len(rows)
                part, n_tokens = [], 0
        file.seek(0)
        write_header(file, n_rows, length)
    return n_rows


def write_header(file, n_rows, length):
    """Numpy leaves room in a header for the number of rows, which is known at the end."""
    header = {"descr": "<i4", "fortran_order": False, "shape": (n_rows, 3, length)}
    np.lib.format.write_array_header_1_0(file, header)


def mapped(path):
    """The rows of a file, mapped into memory. Map them anew for each use, because what is read of a map stays in it."""
    try:
        rows = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise dist.DistributedError(f"cannot read the rows of {path}: {error}") from None
    if rows.dtype != np.int32 or rows.ndim != 3 or rows.shape[1] != 3:
        raise dist.DistributedError(f"{path} has no rows of llm_FSDP.py, but {rows.dtype} of the shape {rows.shape}")
    return rows


def count(path):
    """What the rows of a file have: how often each token is a token, a target, and a target in a conversation.

    Three arrays, whose index is the token; and the number of positions.
    """
    counts = np.zeros((3, 1), dtype=np.int64)
    n_rows, _, length = mapped(path).shape
    for first in range(0, n_rows, 500):
        tokens, positions, targets = mapped(path)[first : first + 500].swapaxes(0, 1).reshape(3, -1)
        is_token, is_target = tokens != PADDING, targets != IGNORED
        document = np.cumsum(positions == 0) - 1  # its number, for each position
        is_chat = np.bincount(document, is_token & ~is_target) > 0  # in a text, each token is a target
        for kind, found in enumerate((tokens[is_token], targets[is_target], targets[is_target & is_chat[document]])):
            n = max(counts.shape[1], found.max(initial=0) + 1)
            counts = np.pad(counts, ((0, 0), (0, n - counts.shape[1])))
            counts[kind] += np.bincount(found, minlength=n)
    return *counts, n_rows * length


# ---- the rows of a rank -------------------------------------------------------------------------------------------

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


def share_of(path, numbers):
    """This rank's share of the rows `numbers` of a file, one at a time.

    Each rank gets equally many, since each forward is a collective. The last ones may be padding alone.
    """
    rows = mapped(path)
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    padding = make_rows([[]], rows.shape[2])[0]
    for first in range(0, len(numbers), world_size):
        group = numbers[first : first + world_size]
        if rank < len(group):
            yield on_device(torch.from_numpy(rows[group[rank]].copy()))
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
                yield f"{path}: line {node.lineno}", json.dumps({"messages": [question, answer]}).encode()


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
