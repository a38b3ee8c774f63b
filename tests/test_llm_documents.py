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


def test_a_text_is_cut_and_each_of_its_tokens_is_a_target_once():
    tokenizer = language.byte_tokenizer()
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
    "<|user|> <|assistant|> $A": "<|user|><|assistant|>ab<|end|>",  # of GLM-4
    "<|end|> $A": "<|end|>ab<|end|>",  # of OPT and XGLM
    "<|user|> $A <|end|>": "<|user|>ab<|end|>",
    "<|user|> $A <|assistant|>": "<|user|>ab<|assistant|><|end|>",  # of BERT, if it has an EOS token
}


@pytest.mark.parametrize("template", AROUND)
def test_a_text_begins_and_ends_as_the_tokenizer_has_it_and_with_one_end(template):
    tokenizer = language.byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair=None, special_tokens=SPECIAL
    )
    tokenizer.backend_tokenizer.enable_truncation(3)  # as some tokenizer.json say
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
    records = [*[{"text": 600 * "a"}] * 5, {"text": 5000 * "b"}, {"text": "c"}, *language.records(30), CHAT]
    found = list(llm_documents.documents_of(lines(*records), tokenizer, n - 1))
    assert sizes[:3] == [2, 2, 2] and sum(sizes) == len(records)
    alone = [document for record in records for document in function(lines(record), tokenizer, n - 1)[0]]
    fitting = [document for document in alone if len(document[0]) < n]
    assert [tokens.tolist() for tokens, _ in found] == [tokens.tolist() for tokens, _ in fitting]
    line = f"{len(alone) - len(fitting)} conversations have more than --length {n - 1} tokens and are left out\n"
    assert capsys.readouterr().out == line


@pytest.mark.parametrize("pad", [False, True])
def test_rows_in_a_file_are_the_documents_and_are_counted(pad, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(llm_documents, "TOKENS_AT_A_TIME", 300)
    documents = list(llm_documents.documents_of(lines(*language.records(40)), tokenizer, 48))
    path = tmp_path / "rows.npy"
    largest = llm_documents.write_rows(path, iter(documents), 48, pad)
    rows = llm_documents.mapped(path)
    assert rows.shape[1:] == (3, 48) and rows.dtype == np.int32 and (not pad or len(rows) == len(documents))
    found = []
    for row in rows:
        is_used = row[0] != llm_documents.PADDING
        starts = [*np.flatnonzero((row[1] == 0) & is_used), is_used.sum()]
        found += [row[[0, 2], first:end].tolist() for first, end in itertools.pairwise(starts)]
    assert sorted(found) == sorted(np.stack(document).tolist() for document in documents)
    every_token, every_target = [np.concatenate(kind) for kind in zip(*documents, strict=True)]
    assert largest == max(every_token.max(), every_target.max())
    padding = 1 - len(every_token) / len(rows) / 48
    numbers = f"{len(rows)} rows of 48 tokens, {(every_target >= 0).sum():,} targets, {padding:.1%} padding"
    assert capsys.readouterr().out.endswith(f"{path}: {numbers}\n")
    assert llm_documents.write_rows(path, [(np.array([1]), np.array([9]))], 48) == 9, "the last target is no token"
    assert "too few lines fit into --length 48" in exit_message(llm_documents.write_rows, path, [], 48)
    np.save(tmp_path / "other.npy", np.zeros(3))
    for name, line in (("other.npy", "it has float64 of the shape (3,)"), ("none.npy", "cannot read the rows of ")):
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


NO_JSONL = "the file is no .jsonl: load it by `datasets.load_dataset`, and write it by `to_json`"
BAD = [  # a line, and what is said
    ("{", "an object has several lines: write each one in one line"),
    ('"text"', NO_JSONL),
    ("[1]", "the file is a JSON array: write one object per line"),
    ('{"text": "a"},', "the line ends with a comma: remove it"),
    ("prompt,completion", NO_JSONL),
    (b"\xff\xfe{\0", "the file is UTF-16: save it as UTF-8"),
    (b"\0\0\0", "the file is damaged: it has zeros instead of text"),
    (b'{"text": "\xff"}', "it is no JSON object: 'utf-8' codec can't decode byte 0xff"),
    ('{"text"', "it is no JSON object: Expecting ':' delimiter"),
    ('{"prompt": "x", "completion": "y"}', "prompt, completion would be ignored: write the data anew with text alone"),
    ('{"text": 3}', "'int' object has no attribute 'encode'"),
    ('{"messages": "x"}', "AttributeError"),
    ('{"messages": ["x"]}', "AttributeError"),
    ('{"messages": [{"role": "user", "content": "x"}]}', "the assistant says nothing in it"),
    ('{"messages": [{"content": "x"}]}', "KeyError: 'role'"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}', "its first message is the assistant's"),
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
    start = f'{path}: line 3 is no {{"messages": [...]}} or {{"text": "..."}} that this model can read: '
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


# ---- what a line may say, and what chat templates make of it -------------------------------------------------------

PLAIN = llm_documents.CHAT_TEMPLATE
USER = {"role": "user", "content": "Hi."}


def chat(*messages, **fields):
    """A question, then `messages`."""
    return {"messages": [USER, *messages], **fields}


def says(content="4.", **fields):
    return {"role": "assistant", "content": content, **fields}


def call(arguments):
    return {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}


def calling(arguments, content="", **fields):
    return says(content, tool_calls=[call(arguments)], **fields)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"enum": [None, 2]}}}
NULLS = {"b": None, "c": None}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "4"}
END = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
WITH_TOOLS = (
    """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>\
{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}\
{% endfor %}<|end|>{% endfor %}"""
    + END
)
STRINGS = (
    """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}\
{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}<|end|>{% endfor %}"""
    + END
)
SHOWS_SOME = (
    """{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{{ m.reasoning_content }}\
{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}<|end|>{% endfor %}\
"""
    + END
)
HIDES_THOUGHTS = SHOWS_SOME.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
DROPS_THOUGHTS = (
    """{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1].strip() }}<|end|>\
{% endfor %}"""
    + END
)
DROPS_CALLS = (
    """{% for m in messages %}<|{{ m.role }}|>{% if m.content or not m.tool_calls %}{{ m.content }}{% else %}\
{{ m.tool_calls[0].function.name }}{% endif %}<|end|>{% endfor %}"""
    + END
)
NEXT_ROLE_ENDS = (
    """[gMASK]{% for m in messages %}{% if m.role == 'user' %}\
{% if loop.first or messages[loop.index0 - 1].role != 'observer' %}<|user|>{% endif %}\
{{ m.content }}{% elif m.role == 'assistant' %}<|assistant|>\
{% if loop.last and '</think>' in m.content %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}\
{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% else %}<|end|>{{ m.content }}{% endif %}\
{% endfor %}"""
    + END
)
OBSERVER = {"role": "observer", "content": "4"}
NO_END_AT_THE_END = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if not loop.last %}<|end|>{% endif %}\
{% endfor %}{% if add_generation_prompt %}<|end|><|assistant|>{% endif %}"""
PHI3 = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% else %}</s>{% endif %}"""
MERGES_SYSTEM = """{% for m in messages %}{% if m.role == 'user' %}[INST] {% if loop.index0 == 1 and \
messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}{{ m.content }} [/INST]\
{% elif m.role == 'assistant' %} {{ m.content | trim }}<|end|>{% endif %}{% endfor %}"""
FINAL_DIFFERS = (
    """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' and loop.last and \
not add_generation_prompt %}<|end|>{% else %}<|user|>{% endif %}{% endfor %}"""
    + END
)
NO_SPECIAL = """{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}\
{% if add_generation_prompt %}assistant: {% endif %}"""
SYSTEM = {"messages": [{"role": "system", "content": "Be kind."}, *CHAT["messages"]]}
THOUGHTFUL = says("4.", reasoning_content="2+2=4")
SHOWN = [  # a chat template, a line, and what is in the loss in each of its documents
    (PLAIN, CHAT, [["Hello!\n<|end|>", "4.<|end|>"]]),
    (PLAIN, chat(says("no", weight=0), {**USER, "weight": 0}, says("4.", weight=1)), [["4.<|end|>"]]),
    (PLAIN, chat(says(), USER, says("no", weight=0)), [["4.<|end|>"]]),
    (PLAIN, chat(says(), chat_template_kwargs={"add_generation_prompt": True}), [["4.<|end|>"]]),
    ("{{ mood }}" + PLAIN, chat(says(), chat_template_kwargs={"mood": "kind"}), [["4.<|end|>"]]),
    (PLAIN, {"text": "abc", "messages": None, "id": []}, [["bc<|end|>"]]),
    (PLAIN, {"text": ""}, []),
    (PLAIN, {}, []),
    # Arguments and tools may be JSON in JSON, and templates may join arguments to strings.
    (WITH_TOOLS, chat(calling({"a": 2}), RESULT, says(), tools=[TOOL]), [['add{"a": 2}<|end|>', "4.<|end|>"]]),
    (
        WITH_TOOLS,
        chat(calling('{"a": 2}'), RESULT, says(), tools=json.dumps([TOOL])),
        [['add{"a": 2}<|end|>', "4.<|end|>"]],
    ),
    (STRINGS, chat(calling('{"a":2}')), [['add {"a":2}<|end|>']]),
    (STRINGS, chat(calling({"a": "é"})), [['add {"a": "é"}<|end|>']]),
    (STRINGS, chat(calling(None)), [["add {}<|end|>"]]),
    *[(WITH_TOOLS, chat(calling(nothing)), [["add{}<|end|>"]]) for nothing in ("", "{}", {}, None)],
    (WITH_TOOLS.replace("m.content", "'' + m.content"), chat(calling({}, content=None)), [["add{}<|end|>"]]),
    # Arrow gives all objects of a column the same fields. In JSON inside of JSON, which it keeps, a null may stay.
    (
        WITH_TOOLS,
        chat(calling({"a": 2, **NULLS}, **NULLS), tools=[{**TOOL, **NULLS}], **NULLS),
        [['add{"a": 2}<|end|>']],
    ),
    (WITH_TOOLS, chat(calling('{"a": null}')), [['add{"a": null}<|end|>']]),
    (PLAIN.replace("content", "content | tojson"), chat(says('"b"')), [['"\\"b\\""<|end|>']]),  # words as JSON
    # White space may change, and thoughts of an earlier turn may be hidden.
    (DROPS_THOUGHTS, chat(says("  2 +\n2 ")), [["2 +\n2<|end|>"]]),
    (HIDES_THOUGHTS, chat({**THOUGHTFUL, "weight": 0}, USER, THOUGHTFUL), [["2+2=44.<|end|>"]]),
    (HIDES_THOUGHTS, chat(THOUGHTFUL, USER, THOUGHTFUL), [["2+2=44.<|end|>"], ["2+2=44.<|end|>"]]),
    # The token that ends a turn.
    (NEXT_ROLE_ENDS, CHAT, [["Hello!\n<|user|>", "4.<|user|>"]]),
    (
        NEXT_ROLE_ENDS,
        chat(says("t</think>b"), USER, says("u</think>d")),
        [["t</think>b<|user|>"], ["u</think>d<|user|>"]],
    ),
    (NEXT_ROLE_ENDS, chat(calling({}), OBSERVER, says()), [["add<|end|>", "4.<|user|>"]]),
    (NEXT_ROLE_ENDS, chat(calling({})), [["add<|end|>"]]),
    (NO_END_AT_THE_END, CHAT, [["Hello!\n<|end|>", "4.<|end|>"]]),
    (PHI3, CHAT, [["Hello!\n<|end|>\n</s>"], ["4.<|end|>\n</s>"]]),
    (PHI3.replace("<|end|>", ""), CHAT, [["Hello!\n\n</s>"], ["4.\n</s>"]]),
    (FINAL_DIFFERS, CHAT, [["Hello!\n<|end|>"], ["4.<|end|>"]]),
    (NO_SPECIAL, CHAT, [["Hello!\n\n", "4.\n"]]),
    (MERGES_SYSTEM, SYSTEM, [[" Hello!<|end|>", " 4.<|end|>"]]),
]
NOTHING = [None, "", [], {}]  # a field that says nothing is no field
for nothing in NOTHING:
    fields = dict.fromkeys(("tool_calls", "annotations", "reasoning_content", "name"), nothing)
    SHOWN.append((PLAIN, chat(says(**fields)), [["4.<|end|>"]]))
    fields = dict.fromkeys(("text", "prompt", "tools", "chat_template_kwargs"), nothing)
    SHOWN.append((PLAIN, chat(says(), **fields), [["4.<|end|>"]]))


@pytest.mark.parametrize(("template", "record", "expected"), SHOWN)
def test_what_is_in_the_loss_of_a_line(template, record, expected):
    tokenizer = with_template(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["</s>"]})
    (found,) = read(tokenizer, record, length=500)
    assert [said(tokenizer, document) for document in found] == expected


def test_what_stands_before_an_answer_is_shown_and_not_in_the_loss():
    nulls = {"parameters": {"a": {"enum": [None, 2]}, **NULLS}, **NULLS}
    for template, record, start in (
        (PLAIN, chat(says("no", weight=0), USER, says()), "<|user|>Hi.<|end|><|assistant|>no<|end|><|user|>Hi."),
        ("{{ mood }}" + PLAIN, chat(says(), chat_template_kwargs={"mood": "kind"}), "kind<|user|>"),
        (WITH_TOOLS, chat(calling({}), tools=[nulls]), '{"parameters": {"a": {"enum": [null, 2]}}}<|user|>'),
        (WITH_TOOLS, chat(calling({}), tools=json.dumps([TOOL])), json.dumps(TOOL) + "<|user|>"),
        (HIDES_THOUGHTS, chat({**THOUGHTFUL, "weight": 0}, USER, says()), "<|user|>Hi.<|end|><|assistant|>4.<|end|>"),
    ):
        tokenizer = with_template(template)
        ((document,),) = read(tokenizer, record, length=500)
        assert tokenizer.decode(document[0]).startswith(start)


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


# ---- what would be ignored -----------------------------------------------------------------------------------------

HINT = {"role": "user", "content": "2+2?", "reasoning_content": "a hint"}
HIDDEN = "the chat template does not show "
NO_LOSS = "says nothing in it that is in the loss"
MOVED = "the prompt for an answer ends with "
OPENS = PLAIN.replace("<|assistant|>{% endif", "<|assistant|><think>{% endif")
CHANGES_THE_QUESTION = """{% for m in messages %}{% if m.role == 'user' and loop.last %}Q:{% endif %}{{ m.content }}\
<|end|>{% endfor %}"""
LEAVES = "{% if not (m.tool_calls and messages[-1].content == '9.') %}" + THOUGHT + "{% endif %}"
THOUGHT_LEAVES = WITH_THOUGHTS.replace(THOUGHT, LEAVES)
KNOWS = (
    """{% for m in messages %}{% if m.role == 'system' or m.role == 'user' %}<|user|>{{ m.content }}<|end|>\
{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}<|end|>{% endif %}{% endfor %}"""
    + END
)
RAISES = """{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}""" + PLAIN
REFUSED = [  # a chat template, a line, and what is said
    (None, SYSTEM, "the tokenizer has no chat template: give one by --chat-template, or use texts"),
    ("{{ messages[0].content", SYSTEM, "unexpected end of template"),
    (RAISES, SYSTEM, "no system"),
    (CHANGES_THE_QUESTION, SYSTEM, MOVED),
    (THOUGHT_LEAVES, {"messages": AGENT[:6]}, MOVED),
    (OPENS, chat(says()), f"{MOVED}'<think>', and the answer does not follow it: add the thoughts of the answer"),
    (
        PLAIN,
        chat({"role": "user", "content": [{"type": "text", "text": "Hi."}]}, says()),
        "content of the role user is no",
    ),
    (PLAIN, chat(says(weight=0)), NO_LOSS),
    (PLAIN, chat(says(weight=0.5)), "weight 0.5 "),
    (PLAIN, chat(says(weight="0")), "weight 0 "),
    (PLAIN, chat(says(train=False)), "the chat template ignores train of the role assistant"),
    (PLAIN, chat({**USER, "weight": 1}, says()), "weight 1 of the role user: it may be 0, or 1 for the assistant"),
    (PLAIN, chat(says(), tools=[{"name": "add"}]), "the chat template ignores tools of the line"),
    (PLAIN, chat(says(), chat_template_kwargs={"mood": "kind"}), "the chat template ignores mood of the line"),
    (WITH_TOOLS, chat(calling("a=2")), "JSONDecodeError"),
    (DROPS_THOUGHTS, chat(says("<think>why</think>4.")), f"{HIDDEN}'<think>why</think>4.' of the role assistant"),
    (DROPS_CALLS, chat(calling({}, content="Wait.")), f"{HIDDEN}'add' of the role assistant"),
    # The template contains the name of the field, and shows what it holds: in another message.
    (SHOWS_SOME, {"messages": [HINT, THOUGHTFUL]}, f"{HIDDEN}'a hint' of the role user"),
    (SHOWS_SOME, chat(THOUGHTFUL, HINT, THOUGHTFUL), f"{HIDDEN}'a hint' of the role user"),
    (SHOWS_SOME, chat(says("no", weight=0), HINT, THOUGHTFUL), f"{HIDDEN}'a hint' of the role user"),
    (KNOWS, chat({"role": "tool", "content": "important"}, says()), f"{HIDDEN}'important' of the role tool"),
    *[
        (PLAIN, chat(says(empty), USER, says()), "an answer of the assistant is empty: leave")
        for empty in ("", None, " ")
    ],
    (PLAIN, chat(says(), USER, {"role": "gpt", "content": "d"}), "the chat template ignores gpt of the roles"),
]
for field in ("reasoning_content", "function_call", "refusal", "tool_calls"):
    line = f"the chat template ignores {field} of the role assistant"
    REFUSED.append((PLAIN, chat(says(**{field: [{"x": 1}]})), line))
# Other trainers obey some of them. By its name alone, a field does not say that it means nothing.
for field in ("system", "weight", "loss_mask", "id"):
    line = f": {field}, source would be ignored: write the data anew with "
    for record in (chat(says()), {"text": "x"}):
        REFUSED.append((PLAIN, {**record, field: 0, "source": "web", "score": None}, line))


@pytest.mark.parametrize(("template", "record", "cause"), REFUSED)
def test_what_would_be_ignored_or_cannot_be_shown_is_refused(template, record, cause):
    assert cause in exit_message(read, with_template(template), record)


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
        ("none.jsonl", "FileNotFoundError: [Errno 2] No such file or directory"),
        ("b.jsonl.gz", "EOFError: Compressed file ended before"),
        ("c.parquet", "a parquet file needs `pip install pyarrow`: "),
        ("", "IsADirectoryError: [Errno 21] Is a directory"),
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


def test_the_page_converts_prompts_and_completions(tokenizer, tmp_path, monkeypatch):
    """Of each line, these two fields are taken, and others left out."""
    monkeypatch.chdir(tmp_path)
    language.write_jsonl(Path("completions.jsonl"), [{"id": 1, "prompt": "2+2?", "completion": "4."}])
    block, *_ = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    exec(compile(block, PAGE, "exec"))
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4."}]
    assert json.loads(Path("chats.jsonl").read_text()) == {"messages": messages}
    assert llm_documents.read(list(llm_documents.lines_of(["chats.jsonl"])), tokenizer, 200)
