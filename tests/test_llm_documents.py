"""llm_documents.py: what is in the loss, what is left out, what is cut, and where each document lies in its row."""

import gzip
import itertools
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import language
import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, exit_message
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import llm_documents

PAGE = ROOT / "docs" / "language_models.md"
TURNS = [("user", "Hi."), ("assistant", "Hello!\n"), ("user", "2+2?"), ("assistant", "4.")]
CHAT = {"messages": [{"role": role, "content": content} for role, content in TURNS]}
REFUSES = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}\
{% endif %}{{ m.content }}<|end|>{% endfor %}"""
CHANGES_THE_QUESTION = """{% for m in messages %}{% if m.role == 'user' and loop.last %}Q:{% endif %}{{ m.content }}\
<|end|>{% endfor %}"""


@pytest.fixture(scope="module")
def tokenizer():
    return language.byte_tokenizer()


def with_template(template):
    tokenizer = language.byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def lines(*records):
    return [(f"data.jsonl: line {number}", json.dumps(record).encode()) for number, record in enumerate(records, 1)]


def read(tokenizer, *records, length=200):
    return llm_documents.read(lines(*records), tokenizer, length)


def said(tokenizer, document):
    """The runs of targets that are in the loss, as text."""
    _, targets = document
    runs, previous = [], llm_documents.IGNORED
    for target in targets.tolist():
        if target != llm_documents.IGNORED:
            if previous == llm_documents.IGNORED:
                runs.append([])
            runs[-1].append(target)
        previous = target
    return [tokenizer.decode(run) for run in runs]


def test_only_what_the_assistant_says_is_in_the_loss_with_its_end(tokenizer):
    ((document,),) = read(tokenizer, CHAT)
    tokens, targets = document
    text = "<|user|>Hi.<|end|><|assistant|>Hello!\n<|end|><|user|>2+2?<|end|><|assistant|>4.<|end|>"
    everything = tokenizer(text, add_special_tokens=False).input_ids
    assert tokens.tolist() == everything[:-1], "special tokens stand once"
    assert said(tokenizer, document) == ["Hello!\n<|end|>", "4.<|end|>"]
    in_loss = targets != llm_documents.IGNORED
    assert targets[in_loss].tolist() == np.array(everything[1:])[in_loss].tolist(), "the token after each"
    assert tokens.dtype == targets.dtype == np.int32


def test_a_token_that_begins_with_the_end_of_the_prompt():
    """The space that ends the prompt and the first word of the answer are one token."""
    tokenizer = Tokenizer(models.WordLevel({"USER:": 0, " a": 1, " ASSISTANT:": 2, " self": 3, " is": 4, "<|end|>": 5}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    tokenizer.chat_template = """{% for m in messages %}{{ m.role.upper() }}: {{ m.content }}\
{% if m.role == 'assistant' %}<|end|>{% else %} {% endif %}{% endfor %}\
{% if add_generation_prompt %}ASSISTANT: {% endif %}"""
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "self is"}]}
    ((document,),) = read(tokenizer, record)
    assert document[1].tolist() == [llm_documents.IGNORED, llm_documents.IGNORED, 3, 4, 5]


def test_the_text_around_the_loss(tokenizer):
    text = {"text": "abc"}
    for record, n_tokens, expected in ((CHAT, 4, ("i.<|end|><|assistant|>", "Hell")), (text, 20, ("a", "bc<|end|>"))):
        (row,) = llm_documents.make_rows(read(tokenizer, record), 200)
        assert llm_documents.text_around_loss(row.numpy(), tokenizer, n_tokens) == expected


def test_a_text_is_cut_and_each_of_its_tokens_is_a_target_once(tokenizer):
    text = "abcdefghij"
    for length in (2, 3, 10, 11, 50):
        (found,) = read(tokenizer, {"text": text}, length=length)
        tokens = np.concatenate([tokens for tokens, _ in found])
        targets = np.concatenate([targets for _, targets in found])
        assert tokenizer.decode(tokens) == text
        assert tokenizer.decode(targets) == text[1:] + "<|end|>"
        assert max(len(tokens) for tokens, _ in found) == min(length, 10)


SPECIAL = [("<|end|>", 256), ("<|user|>", 257), ("<|assistant|>", 258)]
AROUND = {  # how a tokenizer begins and ends a text: a document of "ab", with the EOS token <|end|>
    "$A": "ab<|end|>",
    "<|user|> <|assistant|> $A": "<|user|><|assistant|>ab<|end|>",
    "<|end|> $A": "<|end|>ab<|end|>",  # of OPT and XGLM
    "<|user|> $A <|end|>": "<|user|>ab<|end|>",
    "$A <|end|> <|user|>": "ab<|end|><|user|>",  # of mBART
    "<|user|> $A <|assistant|>": "<|user|>ab<|assistant|><|end|>",  # of BERT, if it has an EOS token
}


@pytest.mark.parametrize("template", AROUND)
def test_a_text_begins_and_ends_as_the_tokenizer_has_it_and_with_one_end(template):
    tokenizer = language.byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair=None, special_tokens=SPECIAL
    )
    expected = AROUND[template]
    for text in ("ab", expected):  # the second one was rendered by hand
        ((document,),) = read(tokenizer, {"text": text})
        tokens = [*document[0], document[1][-1]]
        assert tokenizer.decode(tokens) == expected, text
        assert tokens[1:] == document[1].tolist()
    (((tokens, targets),),) = read(tokenizer, {"text": f"{expected}\n"})
    assert tokenizer.decode([*tokens, targets[-1]]) == f"{expected}\n"
    ((document,),) = read(tokenizer, CHAT)
    assert tokenizer.decode(document[0]).count("<|user|>") == 2, "the chat template writes them"


def test_without_an_eos_token_a_text_ends_as_the_tokenizer_has_it():
    tokenizer = language.byte_tokenizer()
    tokenizer.eos_token = None
    ((document,),) = read(tokenizer, {"text": "abc"})
    assert [tokenizer.decode(part) for part in document] == ["ab", "bc"]


def test_many_lines_are_read_in_parts_and_what_is_too_long_is_counted(tokenizer, monkeypatch, capsys):
    """While a text is tokenized, it takes far more memory than afterwards. The documents are those of lines alone."""
    n = len(read(tokenizer, CHAT)[0][0][0])
    sizes = []
    function = llm_documents.read
    monkeypatch.setattr(llm_documents, "read", lambda part, *rest: sizes.append(len(part)) or function(part, *rest))
    monkeypatch.setattr(llm_documents, "BYTES_AT_A_TIME", 1000)
    now = iter([0, 1, 31.5, 31.5, *[40] * 99])
    monkeypatch.setattr(llm_documents, "time", SimpleNamespace(monotonic=lambda: next(now)))
    records = [*[{"text": 600 * "a"}] * 5, {"text": 5000 * "b"}, {"text": "c"}, *language.records(30), CHAT]
    found = list(llm_documents.documents_of(lines(*records), tokenizer, n - 1))
    assert sizes[:3] == [2, 2, 2] and sum(sizes) == len(records)
    alone = [document for record in records[:-1] for document in read(tokenizer, record, length=n - 1)[0]]
    fitting = [document for document in alone if len(document[0]) < n]
    assert [tokens.tolist() for tokens, _ in found] == [tokens.tolist() for tokens, _ in fitting]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "4 lines are read, up to data.jsonl: line 4"
    n_left_out = len(alone) - len(fitting) + 1
    assert said[1:] == [f"{n_left_out} conversations have more than --length {n - 1} tokens and are left out"]


@pytest.mark.parametrize("pad", [False, True])
def test_rows_in_a_file_are_the_documents_and_are_counted(pad, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(llm_documents, "TOKENS_AT_A_TIME", 300)
    documents = list(llm_documents.documents_of(lines(*language.records(40)), tokenizer, 48))
    n_rows = llm_documents.write_rows(tmp_path / "rows.npy", iter(documents), 48, pad)
    rows = llm_documents.mapped(tmp_path / "rows.npy")
    assert rows.shape == (n_rows, 3, 48) and rows.dtype == np.int32 and (not pad or n_rows == len(documents))
    found = []
    for row in rows:
        is_used = row[0] != llm_documents.PADDING
        starts = [*np.flatnonzero((row[1] == 0) & is_used), is_used.sum()]
        found += [row[[0, 2], first:end].tolist() for first, end in itertools.pairwise(starts)]
    assert sorted(found) == sorted(np.stack(document).tolist() for document in documents)
    tokens, targets, of_chats, n_positions = llm_documents.count(tmp_path / "rows.npy")
    chats = [document for document in documents if llm_documents.IGNORED in document[1]]
    for counts, kind, some in ((tokens, 0, documents), (targets, 1, documents), (of_chats, 1, chats)):
        every = np.concatenate([document[kind] for document in some])
        assert counts.tolist() == np.bincount(every[every >= 0], minlength=len(counts)).tolist()
    assert n_positions == rows.shape[0] * 48 and of_chats.sum() > 0
    np.save(tmp_path / "other.npy", np.zeros(3))
    for name, line in (("other.npy", "has no rows of llm_FSDP.py"), ("none.npy", "cannot read the rows of ")):
        assert line in exit_message(llm_documents.mapped, tmp_path / name)


def test_held_out_lines_are_drawn_at_random_and_equal_lines_are_on_one_side():
    records = [{"text": f"kind {number % 20} number {number % 900}"} for number in range(1000)]
    sides = [[line for _, line in side] for side in llm_documents.split(lambda: iter(lines(*records)), 0)]
    training, held_out = sides
    assert len(training) + len(held_out) == 1000 and len(set(held_out)) == 45 and not set(training) & set(held_out)
    for side, n_kinds in ((training, 20), (held_out, 14)):
        assert len({line.split()[2] for line in side}) >= n_kinds
    again, other = [
        [line for _, line in llm_documents.split(lambda: iter(lines(*records)), seed)[1]] for seed in (0, 1)
    ]
    assert again == held_out != other
    assert [len(list(side)) for side in llm_documents.split(lambda: iter(lines(*records[:12])), 0)] == [11, 1]


def test_documents_share_rows_and_none_is_lost(tokenizer):
    length = 48
    found = list(llm_documents.documents_of(lines(*language.records(80)), tokenizer, length))
    lists = llm_documents.pack(found, length)
    assert sorted(id(document) for row in lists for document in row) == sorted(map(id, found))
    n_tokens = sum(len(tokens) for tokens, _ in found)
    assert len(lists) <= math.ceil(n_tokens / length) + 2, "hardly anything is wasted"
    rows = llm_documents.make_rows(lists, length)
    assert rows.shape == (len(lists), 3, length) and rows.dtype == torch.int32
    for row, inside in zip(rows, lists, strict=True):
        starts = [place for place, position in enumerate(row[llm_documents.POSITIONS].tolist()) if position == 0]
        starts = starts[: len(inside) + 1]  # each position of padding is 0
        ends = [*starts[1:], length]
        pieces = [row[:, start:end] for start, end in zip(starts, ends, strict=True)]
        for piece, (tokens, targets) in zip(pieces, inside, strict=False):
            assert torch.equal(piece, torch.tensor(np.stack([tokens, np.arange(len(tokens)), targets])))
        padding = pieces[len(inside) :]
        assert len(padding) <= 1
        for piece in padding:
            assert (piece[llm_documents.POSITIONS] == 0).all(), "some models take other factors beyond a position"
            assert (piece[llm_documents.TOKENS] == llm_documents.PADDING).all()
            assert (piece[llm_documents.TARGETS] == llm_documents.IGNORED).all()


BAD = [
    ("{", "an object has several lines: write each one in one line"),
    ('"text"', "the file is no .jsonl: load it by `datasets.load_dataset`"),
    ("[1]", "the file is a JSON array: write one object per line"),
    ('{"text": "a"},', "the line ends with a comma"),
    ("prompt,completion", "the file is no .jsonl"),
    (b"\xff\xfe{\0", "the file is UTF-16: save it as UTF-8"),
    (b"\0\0\0", "the file is damaged: it has zeros"),
    ('{"text": }', "JSONDecodeError"),
    ("{}", "it has neither, but nothing"),
    ('{"prompt": "x", "completion": "y"}', "it has neither, but prompt, completion: write each text as a"),
    ('{"text": 3}', "its text is no string"),
    ('{"text": "a", "text": "b"}', "an object of it has the key text twice"),
    ('{"messages": [1], "tools": "[{\\"a\\": 1, \\"a\\": 2}]"}', "an object of it has the key a twice"),
    ('{"messages": "x"}', "JSONDecodeError"),
    ('{"messages": "{}"}', "its messages are no list of objects"),
    ('{"messages": ["x"]}', "its messages are no list of objects"),
    ('{"messages": [{"role": "user", "content": "x"}]}', "the assistant says nothing in it"),
    ('{"messages": [{"content": "x"}]}', "KeyError: 'role'"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}', "its first message is the assistant's"),
    (b'{"text": "\xff"}', "UnicodeDecodeError"),
    # JSON allows it, and UTF-8 does not: half of a surrogate pair, in a text and in what a template shows
    (r'{"text": "cut \ud83d"}', "UnicodeEncodeError"),
    (r'{"messages": [{"role": "user", "content": "\udc00"}, {"role": "assistant", "content": "x"}]}', "UnicodeEncode"),
    ('{"text": ' + 100_000 * "[", "RecursionError"),
]


@pytest.mark.parametrize("line, cause", BAD)
def test_a_bad_line_is_named(line, cause, tokenizer, tmp_path):
    path = tmp_path / "chats.jsonl"
    content = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b'{"text": "good"}\n\n' + content + b"\n")
    message = exit_message(llm_documents.read, list(llm_documents.lines_of([path])), tokenizer, 50)
    start = f'{path}: line 3 is no {{"messages": [...]}} or {{"text": "..."}} that this model can read ('
    assert message.startswith(start)
    assert cause in message, message


def test_special_tokens_among_words_are_text(tokenizer):
    """They are split into bytes like other words, and those of the chat template stay."""
    words = "a<|end|>b<|user|>"
    ((document,),) = read(tokenizer, {"messages": [{"role": "user", "content": words}, says(words)]})
    tokens = [*document[0], document[1][-1]]
    assert tokenizer.decode(tokens) == f"<|user|>{words}<|end|><|assistant|>{words}<|end|>"
    assert [token for token in tokens if token > 255] == [257, 256, 258, 256]
    assert said(tokenizer, document) == [f"{words}<|end|>"] and len(tokens) == 4 + 2 * len(words)


STRINGS = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}\
{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}<|end|>{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.mark.parametrize(
    ("given", "shown"), [('{"a":2}', '{"a":2}'), ({"a": "é"}, '{"a": "é"}'), ({}, "{}"), (None, "{}")]
)
def test_a_template_may_want_arguments_as_strings(given, shown):
    tokenizer = with_template(STRINGS)
    ((document,),) = read(tokenizer, chat(says("", tool_calls=[call(given)])))
    assert said(tokenizer, document) == [f"add {shown}<|end|>"]


# ---- what a line may say -------------------------------------------------------------------------------------------


def test_in_a_conversation_of_many_answers_each_answer_is_rendered_twice(tokenizer):
    """The conversation up to each answer, with and without the answer."""
    n_messages = []

    def render(messages, add_generation_prompt=False):
        n_messages.append(len(messages))
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)

    n, messages = 30, []
    for number in range(n):
        messages += [{"role": "user", "content": f"q {number}"}, says(f"a {number}")]
    special = llm_documents.special_tokens(tokenizer)
    ((text, spans),) = llm_documents.turns(messages, range(1, 2 * n, 2), render, special)
    assert [text[first:end] for first, end in spans] == [f"a {number}<|end|>" for number in range(n)]
    assert sorted(n_messages) == sorted([1, *range(1, 2 * n), 2 * n])


USER = {"role": "user", "content": "Hi."}


def chat(*messages, **fields):
    """A question, then `messages`."""
    return {"messages": [USER, *messages], **fields}


def says(content="4.", **fields):
    return {"role": "assistant", "content": content, **fields}


def test_parts_of_text_are_joined(tokenizer):
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    record = {"messages": [{"role": "user", "content": parts}, says([{"type": "text", "text": "4."}])]}
    plain = {"messages": [{"role": "user", "content": "2+2?"}, says("4.")]}
    (((tokens, targets),),), (((expected_tokens, expected_targets),),) = read(tokenizer, record), read(tokenizer, plain)
    assert tokens.tolist() == expected_tokens.tolist() and targets.tolist() == expected_targets.tolist()


WITH_TOOLS = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>\
{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}\
{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def call(arguments):
    return {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}


def test_arguments_and_tools_may_be_json_in_json():
    tokenizer = with_template(WITH_TOOLS)
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    result = {"role": "tool", "tool_call_id": "1", "content": "4"}
    for arguments, tools in (({"a": 2}, [tool]), (json.dumps({"a": 2}), json.dumps([tool]))):
        record = chat(says("", tool_calls=[call(arguments)]), result, says(), tools=tools)
        ((document,),) = read(tokenizer, record)
        assert said(tokenizer, document) == ['add{"a": 2}<|end|>', "4.<|end|>"]
        assert tokenizer.decode(document[0]).startswith(json.dumps(tool) + "<|user|>")
    for nothing in ("", "{}", None):
        ((document,),) = read(tokenizer, chat(says("", tool_calls=[call(nothing)])))
        assert said(tokenizer, document) == ["add{}<|end|>"]
    without_content = {"role": "assistant", "content": None, "tool_calls": [call({})]}
    ((document,),) = read(with_template(WITH_TOOLS.replace("m.content", "'' + m.content")), chat(without_content))
    assert said(tokenizer, document) == ["add{}<|end|>"]


def test_null_in_an_object_is_no_field():
    """Arrow gives all objects of a column the same fields. In JSON inside of JSON, which it keeps, a null may stay."""
    tokenizer = with_template(WITH_TOOLS)
    expected = 'add{"a": 2}<|end|>'
    for nulls in ({}, {"b": None, "c": None}):
        parameters = {"type": "object", "properties": {"a": {"type": "number", "enum": [None, 2]}, **nulls}}
        tool = {"type": "function", "function": {"name": "add", "parameters": parameters, **nulls}}
        record = chat(says(None, tool_calls=[{**call({"a": 2, **nulls}), **nulls}]), tools=[tool], **nulls)
        ((document,),) = read(tokenizer, record, length=500)
        assert said(tokenizer, document) == [expected]
        prompt = tokenizer.decode(document[0])
        assert prompt.count("null") == 1 and '"enum": [null, 2]' in prompt, "an element of a list is no field"
    record = chat(says("", tool_calls=[call(json.dumps({"a": None}))]), tools=[json.dumps(tool)])
    ((document,),) = read(tokenizer, record, length=500)
    assert said(tokenizer, document) == ['add{"a": null}<|end|>'] and '"b": null' in tokenizer.decode(document[0])


@pytest.mark.parametrize("nothing", [None, "", [], {}])
def test_a_field_that_says_nothing_is_no_field(nothing, tokenizer):
    expected = read(tokenizer, chat(says()))[0][0][0].tolist()
    for record in (
        chat(says(tool_calls=nothing, annotations=nothing, reasoning_content=nothing, weight=nothing, name=nothing)),
        chat(says(), text=nothing, prompt=nothing, tools=nothing, chat_template_kwargs=nothing),
        chat(says(), tools="[]", chat_template_kwargs="[]"),
        {"messages": json.dumps([USER, says(refusal=nothing)])},
    ):
        assert read(tokenizer, record)[0][0][0].tolist() == expected
    assert len(read(tokenizer, {"text": "abc", "messages": nothing, "id": nothing})[0]) == 1
    ((document,),) = read(with_template(WITH_TOOLS), chat(says(nothing, tool_calls=json.dumps([call({})]))))
    assert said(tokenizer, document) == ["add{}<|end|>"]
    assert "it has neither, but nothing" in exit_message(read, tokenizer, {"messages": nothing})
    assert read(tokenizer, {"text": ""}) == [[]], "a text may be empty"


@pytest.mark.parametrize("field", [{"weight": 0}, {"train": False}])
def test_a_turn_may_be_left_out_of_the_loss(field, tokenizer):
    record = chat(says("no", **field), {"role": "user", "content": "2+2?", "weight": 0}, says("4.", train=True))
    ((document,),) = read(tokenizer, record)
    assert said(tokenizer, document) == ["4.<|end|>"] and "no<|end|>" in tokenizer.decode(document[0])
    ((document,),) = read(tokenizer, chat(says("4.", weight=1), {"role": "user", "content": "a"}, says("no", **field)))
    assert said(tokenizer, document) == ["4.<|end|>"]


def test_variables_of_the_template_may_stand_in_a_line():
    tokenizer = with_template("{{ mood }}" + llm_documents.CHAT_TEMPLATE)
    for options in ({"mood": "kind"}, json.dumps({"mood": "kind"})):
        ((document,),) = read(tokenizer, chat(says(), chat_template_kwargs=options))
        assert tokenizer.decode(document[0]).startswith("kind<|user|>")
        assert said(tokenizer, document) == ["4.<|end|>"]


def test_a_template_cannot_be_told_to_ask_for_an_answer(tokenizer):
    ((document,),) = read(tokenizer, chat(says(), chat_template_kwargs={"add_generation_prompt": True}))
    assert tokenizer.decode(document[0]) == "<|user|>Hi.<|end|><|assistant|>4."


DROPS_THOUGHTS = """{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1].strip() }}<|end|>\
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
DROPS_CALLS = """{% for m in messages %}<|{{ m.role }}|>{% if m.content or not m.tool_calls %}{{ m.content }}{% else %}\
{{ m.tool_calls[0].function.name }}{% endif %}<|end|>{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


SHOWS_SOME = """{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{{ m.reasoning_content }}\
{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}{% if loop.first and m.all %}\
{{ call.function.arguments | tojson }}{% endif %}{% endfor %}<|end|>{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def test_thoughts_of_an_earlier_turn_may_be_hidden():
    tokenizer = with_template(SHOWS_SOME.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last"))
    for weight in (0, 1):
        first = says("Hi.", reasoning_content="a greeting", weight=weight)
        found = read(tokenizer, chat(first, USER, says("4.", reasoning_content="2+2=4")))[0]
        assert said(tokenizer, found[-1]) == ["2+2=44.<|end|>"] and "greeting" not in tokenizer.decode(found[-1][0])


KNOWS = """{% for m in messages %}{% if m.role == 'system' or m.role == 'user' %}<|user|>{{ m.content }}<|end|>\
{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}<|end|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
KNOWS_AND_RAISES = KNOWS.replace("{% endif %}{% endfor", "{% else %}{{ raise_exception('what?') }}{% endif %}{% endfor")
ALTERNATES = """{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}\
{% for m in messages %}{% if (m.role == 'user') == loop.index0 % 2 %}{{ raise_exception('no turns') }}{% endif %}\
<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


# ---- kinds of templates --------------------------------------------------------------------------------------------

NEXT_ROLE_ENDS = """[gMASK]{% for m in messages %}{% if m.role == 'user' %}\
{% if loop.first or messages[loop.index0 - 1].role != 'observer' %}<|user|>{% endif %}\
{{ m.content }}{% elif m.role == 'assistant' %}<|assistant|>\
{% if loop.last and '</think>' in m.content %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}\
{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% else %}<|end|>{{ m.content }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
NO_END_AT_THE_END = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if not loop.last %}<|end|>{% endif %}\
{% endfor %}{% if add_generation_prompt %}<|end|><|assistant|>{% endif %}"""
TWO_ENDS = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% else %}</s>{% endif %}"""
MERGES_SYSTEM = """{% for m in messages %}{% if m.role == 'user' %}[INST] {% if loop.index0 == 1 and \
messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}{{ m.content }} [/INST]\
{% elif m.role == 'assistant' %} {{ m.content | trim }}<|end|>{% endif %}{% endfor %}"""
FINAL_DIFFERS = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' and loop.last and \
not add_generation_prompt %}<|end|>{% else %}<|user|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
NO_SPECIAL = """{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}\
{% if add_generation_prompt %}assistant: {% endif %}"""
# What is in the loss of the two answers of CHAT.
KINDS = {
    "the next role ends a turn": (NEXT_ROLE_ENDS, [["Hello!\n<|user|>", "4.<|user|>"]]),
    "the last turn has no end": (NO_END_AT_THE_END, [["Hello!\n<|end|>", "4.<|end|>"]]),
    "a token ends the whole": (TWO_ENDS, [["Hello!\n<|end|>\n</s>"], ["4.<|end|>\n</s>"]]),
    "the last turn ends otherwise": (FINAL_DIFFERS, [["Hello!\n<|end|>"], ["4.<|end|>"]]),
    "no token ends a turn": (NO_SPECIAL, [["Hello!\n\n", "4.\n"]]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_words_in_the_loss_and_the_token_that_ends_them(kind):
    template, expected = KINDS[kind]
    tokenizer = with_template(template)
    (found,) = read(tokenizer, CHAT)
    assert [said(tokenizer, document) for document in found] == expected


PHI3 = """{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}\
{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"""


@pytest.mark.parametrize("eos_token", ["</s>", "<|this is the end of the whole text|>"])
@pytest.mark.parametrize("template", [PHI3, PHI3.replace("|>\n", "|>"), PHI3.replace("eos_token }}", "eos_token }}\n")])
def test_a_template_that_ends_with_eos_unless_it_asks_for_an_answer(template, eos_token):
    """As that of Phi-3. The answers and their ends are in the loss, and the EOS token once, after the last one."""
    tokenizer = with_template(template)
    tokenizer.add_special_tokens({"eos_token": eos_token})
    ((document,),) = read(tokenizer, CHAT, length=500)
    answers = [words.replace("\n", "") for words in said(tokenizer, document)]
    assert answers == ["Hello!<|end|>", f"4.<|end|>{eos_token}"]
    assert tokenizer.decode(document[0]).count("<|user|>") == 2


def test_such_a_template_without_an_end_of_a_turn_gives_a_text_for_each_turn():
    """Else the model would not learn to end the first answer."""
    tokenizer = with_template(PHI3.replace("<|end|>", ""))
    tokenizer.add_special_tokens({"eos_token": "<|this is the end of the whole text|>"})
    (found,) = read(tokenizer, CHAT, length=500)
    last = [said(tokenizer, document)[-1] for document in found]
    assert last == [f"{answer}\n<|this is the end of the whole text|>" for answer in ("Hello!\n", "4.")]


# Templates that mark what is generated, of the kinds that other trainers have. The marks cover the end of a turn.
CALLS_TWICE = says("Wait.", reasoning_content="It is long.", tool_calls=[call({"a": 2}), call({"a": 3})])
RESULTS = [{"role": "tool", "tool_call_id": "1", "content": number} for number in ("5", "9")]
MORE = [
    says("9.", reasoning_content="Done."),
    {"role": "user", "content": "Sure?"},
    says("Yes.", reasoning_content="I am."),
]
AGENT = [{"role": "system", "content": "Be kind."}, USER, CALLS_TWICE, *RESULTS, *MORE]
THOUGHT = "<think>{{ m.reasoning_content }}</think>"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
ANSWERS = "{% for m in messages %}{% if m.role == 'assistant' %}"
OTHERS = "{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
ASKS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
MARKS = "{% generation %}" + THOUGHT + "{{ m.content }}" + CALLS + "<|end|>{% endgeneration %}"
WITH_THOUGHTS = ANSWERS + "<|assistant|>" + MARKS + OTHERS + ASKS
LAST_QUESTION = """{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}\
{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"""
AFTER_IT = "{% if loop.index0 > ns.last %}" + THOUGHT + "{% endif %}"
IN_A_TURN = """{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|user|>{% endif %}[{{ m.content }}]\
{% if loop.last or loop.nextitem.role != 'tool' %}<|end|>{% endif %}{% else %}"""
NEXT_ROLE = "{% if m.tool_calls %}<|end|>{% else %}<|user|>{% endif %}{% endgeneration %}"
MARKED_AGENTS = {
    "all thoughts stay": WITH_THOUGHTS,
    "thoughts before the last question go": LAST_QUESTION + WITH_THOUGHTS.replace(THOUGHT, AFTER_IT),
    "the prompt opens a thought": WITH_THOUGHTS.replace(ASKS, ASKS.replace("<|assistant|>", "<|assistant|><think>")),
    "the marks cover the prompt": ANSWERS + MARKS.replace(THOUGHT, "<|assistant|>" + THOUGHT) + OTHERS + ASKS,
    "results stand in one turn of the user": WITH_THOUGHTS.replace("{% else %}", IN_A_TURN),
    "an answer is several messages": WITH_THOUGHTS.replace(THOUGHT, THOUGHT + "<|end|><|assistant|>"),
    "an answer goes on after a result": ANSWERS
    + "{% if loop.previtem.role != 'tool' %}<|assistant|>{% endif %}"
    + MARKS.replace("<|end|>", "{% if m.tool_calls %}<|user|>{% else %}<|end|>{% endif %}")
    + "{% elif m.role == 'tool' %}[{{ m.content }}]"
    + OTHERS
    + "{% if messages[-1].role != 'tool' %}"
    + ASKS
    + "{% endif %}",
    "the token of the next role ends a turn": ANSWERS
    + "<|assistant|>"
    + MARKS.replace("<|end|>{% endgeneration %}", NEXT_ROLE)
    + "{% else %}{% if m.role == 'user' and loop.previtem.role != 'assistant' %}<|user|>{% endif %}{{ m.content }}"
    + "{% endif %}{% endfor %}"
    + ASKS,
}
# What these mark beside the words is the end of the prompt.
PROMPTS = {"the prompt opens a thought": "<think>", "the marks cover the prompt": "<|assistant|>"}


@pytest.mark.parametrize("kind", MARKED_AGENTS)
def test_the_words_in_the_loss_are_those_that_a_template_marks(kind):
    """For trainers that read the marks. Here the template needs none."""
    template, messages = MARKED_AGENTS[kind], AGENT
    marked = with_template(template)
    tokenizer = with_template(re.sub("{% (end)?generation %}", "", template))
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = marked.apply_chat_template(messages[: number + 1], **options)
        targets = np.where(found["assistant_masks"], found["input_ids"], llm_documents.IGNORED)
        expected = said(tokenizer, (None, targets))[-1]
        assert expected.startswith(PROMPTS.get(kind, ""))
        expected = expected.removeprefix(PROMPTS.get(kind, ""))
        assert message["content"].strip() in expected and message.get("reasoning_content", "") in expected
        for tokenizer_of_kind in (tokenizer, marked):
            ((*_, document),) = read(tokenizer_of_kind, {"messages": messages[: number + 1]}, length=500)
            assert said(tokenizer, document)[-1] == expected


def test_a_system_message_that_another_message_shows():
    tokenizer = with_template(MERGES_SYSTEM)
    ((document,),) = read(tokenizer, {"messages": [{"role": "system", "content": "Be kind."}, *CHAT["messages"]]})
    assert said(tokenizer, document) == [" Hello!<|end|>", " 4.<|end|>"]


def test_the_role_that_ends_a_turn_with_thoughts_and_with_a_call():
    """Thoughts of earlier turns are not shown, so each turn is a text of its own. A call ends with another token."""
    tokenizer = with_template(NEXT_ROLE_ENDS)
    more = [{"role": "user", "content": "a"}, says("u</think>d")]
    (found,) = read(tokenizer, chat(says("t</think>b"), *more))
    assert [said(tokenizer, document) for document in found] == [["t</think>b<|user|>"], ["u</think>d<|user|>"]]
    result = {"role": "observer", "content": "4"}
    ((document,),) = read(tokenizer, chat(says("", tool_calls=[call({})]), result, says()))
    assert said(tokenizer, document) == ["add<|end|>", "4.<|user|>"]
    ((document,),) = read(tokenizer, chat(says("", tool_calls=[call({})])))
    assert said(tokenizer, document) == ["add<|end|>"]


# ---- what would be ignored -----------------------------------------------------------------------------------------

PLAIN = llm_documents.CHAT_TEMPLATE
SYSTEM = {"messages": [{"role": "system", "content": "Be kind."}, *CHAT["messages"]]}
HINT = {"role": "user", "content": "2+2?", "reasoning_content": "a hint"}
THOUGHTFUL = says("4.", reasoning_content="2+2=4")
NOT_SHOWN = "the chat template does not show"
NOT_THE_HINT = f"{NOT_SHOWN} 'a hint' of the role user;"
NO_LOSS = "says nothing in it that is in the loss"
ROLES = "the chat template shows the roles system, user, assistant)"
LEAVES = "{% if not (m.tool_calls and messages[-1].content == '9.') %}" + THOUGHT + "{% endif %}"
OPENS = PLAIN.replace("<|assistant|>{% endif", "<|assistant|><think>{% endif")
THOUGHT_LEAVES = WITH_THOUGHTS.replace(THOUGHT, LEAVES)
REFUSED = [  # a chat template, a line, and what is said
    (None, SYSTEM, "the tokenizer has no chat template: give one by --chat-template, or use texts"),
    ("{{ messages[0].content", SYSTEM, "unexpected end of template"),
    (REFUSES, SYSTEM, "System role not supported"),
    (CHANGES_THE_QUESTION, SYSTEM, "shows the messages before an answer in another way once the answer"),
    (THOUGHT_LEAVES, {"messages": AGENT[:6]}, "in another way once the answer follows"),
    (PLAIN, chat({"role": "user", "content": [{"type": "image_url"}]}), "a part of the type image_url"),
    (PLAIN, chat({"role": "user", "content": {"a": 1}}, says()), "content of the role user is no string"),
    (PLAIN, chat(says(weight=0)), NO_LOSS),
    (PLAIN, chat(says(train=False)), NO_LOSS),
    (PLAIN, chat(says(weight=0.5)), "weight 0.5 "),
    (PLAIN, chat(says(weight="0")), "weight 0 "),
    (PLAIN, chat(says(train=[0])), "train [0] "),
    (PLAIN, chat({**USER, "train": True}, says()), "train True of the role user: it may be 0, or 1 for the assistant"),
    (PLAIN, chat(says(), tools=[{"name": "add"}]), "the chat template ignores tools of the line"),
    (PLAIN, chat(says(), chat_template_kwargs={"mood": "kind"}), "the chat template ignores mood of the line"),
    (WITH_TOOLS, chat(says("", tool_calls=[call("[1]")])), "the arguments of the tool call add are no JSON object"),
    (WITH_TOOLS, chat(says("", tool_calls=[call("a=2")])), "JSONDecodeError"),
    (DROPS_THOUGHTS, chat(says("<think>why</think>4.")), f"{NOT_SHOWN} all that the assistant says: '<think>why</thi"),
    (DROPS_CALLS, chat(says("Wait.", tool_calls=[call({})])), f"{NOT_SHOWN} all that the assistant says: 'add'"),
    # The template contains the name of the field, and shows what it holds: in another message, or of another call.
    (SHOWS_SOME, {"messages": [HINT, THOUGHTFUL]}, NOT_THE_HINT),
    (SHOWS_SOME, chat(THOUGHTFUL, HINT, THOUGHTFUL), NOT_THE_HINT),
    (SHOWS_SOME, chat(says("no", weight=0), HINT, THOUGHTFUL), NOT_THE_HINT),
    (SHOWS_SOME, chat(says("", tool_calls=[call({"a": "two"})])), f"{NOT_SHOWN} all that the assistant says: 'two'"),
    (SHOWS_SOME, chat(says("", all=True, tool_calls=[call({"a": 2}), call({"a": 3})])), "assistant says: '3'"),
    (OPENS, chat(says()), "the prompt for an answer ends with '<think>', and the chat template shows it without that"),
    (PLAIN, chat(says(""), USER, says()), "an answer of the assistant is empty: leave it out"),
    (PLAIN, chat(says(None)), "an answer of the assistant is empty"),
    (PLAIN, chat(says("  ")), "an answer of the assistant is empty"),
    (PLAIN, chat(says(), USER, {"role": "gpt", "content": "d"}), "the chat template ignores gpt of the roles"),
    (ALTERNATES, SYSTEM, "(no system; the chat template shows the roles user, assistant)"),
]
for field in ("reasoning_content", "function_call", "refusal", "tool_calls"):
    line = f"the chat template ignores {field} of the role assistant"
    REFUSED.append((PLAIN, chat(says(**{field: [{"x": 1}]})), line))
# Other trainers obey some of them. By its name alone, a field does not say that it means nothing.
for field in ("system", "weight", "train", "images", "loss_mask", "id"):
    line = f"({field}, source would be ignored: write the data anew with no other fields than "
    for record in (chat(says()), {"text": "x"}):
        REFUSED.append((PLAIN, {**record, field: 0, "source": "web", "score": None}, line))
for role in ("human", "tool"):
    record = chat({"role": role, "content": "important"}, says())
    REFUSED.append((KNOWS, record, f"{NOT_SHOWN} 'important' of the role {role}; {ROLES}"))
    REFUSED.append((KNOWS_AND_RAISES, record, f"(what?; {ROLES}"))


@pytest.mark.parametrize(("template", "record", "cause"), REFUSED)
def test_what_would_be_ignored_or_cannot_be_shown_is_refused(template, record, cause):
    assert cause in exit_message(read, with_template(template), record)


def test_what_is_shown_somehow_is_not_refused():
    """White space may change. Nothing is missing of a call without arguments."""
    ((document,),) = read(with_template(DROPS_THOUGHTS), chat(says("  2 +\n2 ")))
    assert said(with_template(DROPS_THOUGHTS), document) == ["2 +\n2<|end|>"]
    ((document,),) = read(with_template(PLAIN), chat({"role": "human", "content": "important"}, says()))
    assert "important" in with_template(PLAIN).decode(document[0]), "it shows any role"
    assert read(with_template(SHOWS_SOME), chat(THOUGHTFUL))
    assert read(with_template(SHOWS_SOME), chat(says("", all=True, tool_calls=[call({"a": 2}), call({})])))
    assert read(with_template(THOUGHT_LEAVES), {"messages": AGENT[:5]})


# ---- files, and the conversations of the library ----------------------------------------------------------


def test_files_that_are_compressed_or_cannot_be_read(tmp_path, monkeypatch):
    content = b'{"text": "a"}\n\n{"text": "b"}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content)[:20])
    (tmp_path / "c.parquet").write_bytes(b"PAR1 and more")
    place = f"{tmp_path}/a.jsonl.gz"
    found = list(llm_documents.lines_of([place]))
    assert found == [(f"{place}: line 1", b'{"text": "a"}\n'), (f"{place}: line 3", b'{"text": "b"}\n')]
    for name, cause in (
        ("none.jsonl", "No such file or directory"),
        ("b.jsonl.gz", "Compressed file ended before"),
        ("c.parquet", "a parquet file needs `pip install pyarrow`"),
        ("", f"it is a folder: name its files, such as {tmp_path}/"),
    ):
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        message = exit_message(list, llm_documents.lines_of([tmp_path / name], "--eval-data"))
        assert message.startswith(f"--eval-data: cannot read {tmp_path / name}: {cause}")
    rows = SimpleNamespace(to_pylist=lambda: [{"text": "a"}, {"text": None}])
    parquet = SimpleNamespace(ParquetFile=lambda path: SimpleNamespace(iter_batches=lambda n: [rows]))
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=parquet))
    assert [line for _, line in llm_documents.lines_of([tmp_path / "c.parquet"])] == [
        b'{"text": "a"}',
        b'{"text": null}',
    ]


def test_conversations_of_the_library(monkeypatch, tmp_path):
    (tmp_path / "a.py").write_text('def f(x):\n    """Twice."""\n    return 2 * x\n\n\ndef g():\n    return 1\n')
    monkeypatch.setattr(llm_documents, "LIBRARY", tmp_path)
    ((place, line),) = llm_documents.lines_of_library()
    question, answer = json.loads(line)["messages"]
    assert question == {"role": "user", "content": 'def f(x):\n    """Twice."""\n'}
    assert answer == {"role": "assistant", "content": "    return 2 * x\n"}
    assert place == f"{tmp_path}/a.py: line 1"
    monkeypatch.setattr(llm_documents, "LIBRARY", tmp_path / "empty")
    assert "has no *.py files" in exit_message(llm_documents.library_tokenizer)


def test_the_page_converts_prompts_and_completions(tokenizer, tmp_path, monkeypatch):
    """Of each line, these two fields are taken, and others left out."""
    monkeypatch.chdir(tmp_path)
    language.write_jsonl(Path("completions.jsonl"), [{"id": 1, "prompt": "2+2?", "completion": "4."}])
    block, *_ = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    exec(compile(block, PAGE, "exec"))
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4."}]
    assert json.loads(Path("chats.jsonl").read_text()) == {"messages": messages}
    assert llm_documents.read(list(llm_documents.lines_of(["chats.jsonl"])), tokenizer, 200)
