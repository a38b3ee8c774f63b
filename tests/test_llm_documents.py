"""llm_documents.py: what is in the loss, what is left out, what is cut, and where each document lies in its row."""

import gzip
import itertools
import json
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


def said(tokenizer, targets):
    """The runs of targets that are in the loss, as text."""
    runs = itertools.groupby(targets.tolist(), lambda target: target != llm_documents.IGNORED)
    return [tokenizer.decode(list(run)) for is_in_loss, run in runs if is_in_loss]


# ---- tokens and targets ---------------------------------------------------------------------------------------------


def test_only_what_the_assistant_says_is_in_the_loss_with_its_end(tokenizer):
    (((tokens, targets),),) = read(tokenizer, CHAT)
    text = "<|user|>Hi.<|end|><|assistant|>Hello!\n<|end|><|user|>2+2?<|end|><|assistant|>4.<|end|>"
    everything = tokenizer(text, add_special_tokens=False).input_ids
    assert tokens.tolist() == everything[:-1], "special tokens stand once"
    assert said(tokenizer, targets) == ["Hello!\n<|end|>", "4.<|end|>"]
    in_loss = targets != llm_documents.IGNORED
    assert targets[in_loss].tolist() == np.array(everything[1:])[in_loss].tolist(), "the token after each"
    assert tokens.dtype == targets.dtype == np.int32
    example = llm_documents.text_around_loss((tokens, None, targets), tokenizer, 4)
    assert example == ("i.<|end|><|assistant|>", "Hell")


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


def test_special_tokens_among_words_are_text(tokenizer):
    """They are split into bytes like other words, and those of the chat template stay."""
    words = "a<|end|>b<|user|>"
    (((tokens, targets),),) = read(tokenizer, {"messages": [{"role": "user", "content": words}, says(words)]})
    tokens = [*tokens, targets[-1]]
    assert tokenizer.decode(tokens) == f"<|user|>{words}<|end|><|assistant|>{words}<|end|>"
    assert [token for token in tokens if token > 255] == [257, 256, 258, 256]
    assert said(tokenizer, targets) == [f"{words}<|end|>"] and len(tokens) == 4 + 2 * len(words)


def test_a_text_is_cut_and_each_of_its_tokens_is_a_target_once(tokenizer):
    text = "abcdefghij"
    for length in (2, 3, 10, 11, 50):
        (found,) = read(tokenizer, {"text": text}, length=length)
        tokens, targets = [np.concatenate(parts) for parts in zip(*found, strict=True)]
        assert tokenizer.decode(tokens) == text
        assert tokenizer.decode(targets) == text[1:] + "<|end|>"
        assert max(len(tokens) for tokens, _ in found) == min(length, 10)


SPECIAL = [("<|end|>", 256), ("<|user|>", 257), ("<|assistant|>", 258)]
AROUND = [  # how a tokenizer begins and ends a text, its EOS token, and a document of "ab"
    ("$A", "<|end|>", "ab<|end|>"),
    ("$A", None, "ab"),
    ("<|user|> <|assistant|> $A", "<|end|>", "<|user|><|assistant|>ab<|end|>"),  # of GLM-4
    ("<|end|> $A", "<|end|>", "<|end|>ab<|end|>"),  # of OPT and XGLM
    ("<|user|> $A <|end|>", "<|end|>", "<|user|>ab<|end|>"),
    ("<|user|> $A <|assistant|>", "<|end|>", "<|user|>ab<|assistant|><|end|>"),  # of BERT, if it has an EOS token
]


@pytest.mark.parametrize("template, eos_token, expected", AROUND)
def test_a_text_begins_and_ends_as_the_tokenizer_has_it_and_with_one_end(template, eos_token, expected):
    tokenizer = language.byte_tokenizer()
    tokenizer.eos_token = eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair=None, special_tokens=SPECIAL
    )
    tokenizer.backend_tokenizer.enable_truncation(3)  # as some tokenizer.json say
    for text, whole in (("ab", expected), (expected, expected), (f"{expected}\n", f"{expected}\n")):
        (((tokens, targets),),) = read(tokenizer, {"text": text})  # the last two were rendered by hand
        assert tokenizer.decode([*tokens, targets[-1]]) == whole, text
        assert tokens[1:].tolist() == targets[:-1].tolist()
    (((tokens, _),),) = read(tokenizer, CHAT)
    assert tokenizer.decode(tokens).count("<|user|>") == 2, "the chat template writes them"


# ---- lines of files -------------------------------------------------------------------------------------------------


def test_many_lines_are_read_in_parts_and_what_is_too_long_is_counted(tokenizer, monkeypatch, capsys):
    """While a text is tokenized, it takes far more memory than afterwards. The documents are those of lines alone."""
    monkeypatch.setattr(llm_documents, "BYTES_AT_A_TIME", 1000)
    n = len(read(tokenizer, CHAT)[0][0][0])
    records = [*[{"text": 600 * "a"}] * 5, {"text": 5000 * "b"}, {"text": "c"}, *language.records(30), CHAT]
    found = list(llm_documents.documents_of(lines(*records), tokenizer, n - 1))
    alone = [document for record in records for document in read(tokenizer, record, length=n - 1)[0]]
    fitting = [document for document in alone if len(document[0]) < n]
    assert [tokens.tolist() for tokens, _ in found] == [tokens.tolist() for tokens, _ in fitting]
    line = f"{len(alone) - len(fitting)} conversations have more than --length {n - 1} tokens and are left out\n"
    assert capsys.readouterr().out == line
    source = iter(lines(*records))
    next(llm_documents.documents_of(source, tokenizer, n - 1))
    assert len(list(source)) == len(records) - 2, "it reads as it goes"


def test_held_out_lines_are_drawn_at_random_and_equal_lines_are_on_one_side():
    records = [{"text": f"kind {number % 20} number {number % 900}"} for number in range(1000)]

    def split(n=1000, seed=0):
        return [[line for _, line in side] for side in llm_documents.split(lambda: iter(lines(*records[:n])), seed)]

    training, held_out = split()
    assert len(training) + len(held_out) == 1000 and len(set(held_out)) == 45 and not set(training) & set(held_out)
    for side, n_kinds in ((training, 20), (held_out, 14)):
        assert len({line.split()[2] for line in side}) >= n_kinds
    assert split() == [training, held_out] and split(seed=1)[1] != held_out
    assert [len(side) for side in split(12)] == [11, 1]


def test_files_that_are_compressed_or_cannot_be_read(tmp_path, monkeypatch):
    content = b'{"text": "a"}\n\n{"text": "b"}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content)[:20])
    (tmp_path / "c.parquet").write_bytes(b"PAR1 and more")
    place = f"{tmp_path}/a.jsonl.gz"
    found = list(llm_documents.lines_of([place]))
    assert found == [(f"{place}: line 1", b'{"text": "a"}\n'), (f"{place}: line 3", b'{"text": "b"}\n')]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name, cause in (
        ("none.jsonl", "FileNotFoundError: [Errno 2] No such file or directory"),
        ("b.jsonl.gz", "EOFError: Compressed file ended before"),
        ("c.parquet", "a parquet file needs `pip install pyarrow`: "),
        ("", "IsADirectoryError: [Errno 21] Is a directory"),
    ):
        message = exit_message(list, llm_documents.lines_of([tmp_path / name], "--eval-data"))
        assert message.startswith(f"--eval-data: cannot read {tmp_path / name}: {cause}")
    rows = SimpleNamespace(to_pylist=lambda: [{"text": "a"}, {"text": None}])
    parquet = SimpleNamespace(ParquetFile=lambda path: SimpleNamespace(iter_batches=lambda n: [rows]))
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=parquet))
    found = [line for _, line in llm_documents.lines_of([tmp_path / "c.parquet"])]
    assert found == [b'{"text": "a"}', b'{"text": null}']


def test_the_page_converts_prompts_and_completions(tokenizer, tmp_path, monkeypatch):
    """Of each line, these two fields are taken, and others left out."""
    monkeypatch.chdir(tmp_path)
    language.write_jsonl(Path("completions.jsonl"), [{"id": 1, "prompt": "2+2?", "completion": "4."}])
    block, *_ = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    exec(compile(block, PAGE, "exec"))
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4."}]
    assert json.loads(Path("chats.jsonl").read_text()) == {"messages": messages}
    assert llm_documents.read(list(llm_documents.lines_of(["chats.jsonl"])), tokenizer, 200)


BAD = [  # a line, and what is said
    (b"{", "an object has several lines: write each one in one line"),
    (b"[1]", "the file is a JSON array: write one object per line"),
    (b'{"text": "a"},', "the line ends with a comma: remove it"),
    (b"prompt,completion", "the file is no .jsonl: load it by `datasets.load_dataset`, and write it by `to_json`"),
    (b"\xff\xfe{\0", "the file is UTF-16: save it as UTF-8"),
    (b"\0\0\0", "the file is damaged: it has zeros instead of text"),
    (b'{"text": "\xff"}', "it is no JSON object: 'utf-8' codec can't decode byte 0xff"),
    (b'{"text"', "it is no JSON object: Expecting ':' delimiter"),
    (b'{"prompt": "x", "completion": "y"}', "prompt, completion would be ignored: write the data anew with text alone"),
    (b'{"text": 3}', "'int' object has no attribute 'encode'"),
    (b'{"messages": "x"}', "AttributeError"),
    (b'{"messages": [{"role": "user", "content": "x"}]}', "the assistant says nothing in it"),
    (b'{"messages": [{"content": "x"}]}', "KeyError: 'role'"),
    (b'{"messages": [{"role": "assistant", "content": "x"}]}', "its first message is the assistant's"),
    # JSON allows it, and UTF-8 does not: half of a surrogate pair, in a text and in what a template shows
    (rb'{"text": "cut \ud83d"}', "UnicodeEncodeError"),
    (rb'{"messages": [{"role": "user", "content": "\udc00"}, {"role": "assistant", "content": "x"}]}', "UnicodeEncode"),
    (b'{"text": ' + 100_000 * b"[", "RecursionError"),
]


@pytest.mark.parametrize("line, cause", BAD)
def test_a_bad_line_is_named(line, cause, tokenizer, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    message = exit_message(llm_documents.read, list(llm_documents.lines_of([path])), tokenizer, 50)
    start = f'{path}: line 3 is no {{"messages": [...]}} or {{"text": "..."}} that this model can read: '
    assert message.startswith(start)
    assert cause in message, message


# ---- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [False, True])
def test_rows_in_a_file_are_the_documents_and_are_counted(pad, tokenizer, tmp_path, monkeypatch, capsys):
    """None is lost, and hardly anything is wasted. Padding has no targets."""
    monkeypatch.setattr(llm_documents, "TOKENS_AT_A_TIME", 300)
    path, length = tmp_path / "rows.npy", 48
    documents = list(llm_documents.documents_of(lines(*language.records(80)), tokenizer, length))
    every_token, every_target = [np.concatenate(kind) for kind in zip(*documents, strict=True)]
    largest = llm_documents.write_rows(path, iter(documents), length, pad)
    assert largest == max(every_token.max(), every_target.max())
    rows = llm_documents.mapped(path)
    assert rows.shape[1:] == (3, length) and rows.dtype == np.int32
    assert (len(rows) == len(documents)) == pad
    assert len(llm_documents.pack(documents, length)) <= len(every_token) / length + 2
    found = []
    for tokens, positions, targets in rows:
        n = (tokens != llm_documents.PADDING).sum()
        assert (tokens[n:] == llm_documents.PADDING).all() and (targets[n:] == llm_documents.IGNORED).all()
        assert (positions[n:] == 0).all(), "some models take other factors beyond a position"
        for first, end in itertools.pairwise([*np.flatnonzero(positions[:n] == 0), n]):
            assert positions[first:end].tolist() == list(range(end - first))
            found.append([tokens[first:end].tolist(), targets[first:end].tolist()])
    assert sorted(found) == sorted(np.stack(document).tolist() for document in documents)
    padding = 1 - len(every_token) / len(rows) / length
    numbers = f"{len(rows)} rows of {length} tokens, {(every_target >= 0).sum():,} targets, {padding:.1%} padding"
    assert capsys.readouterr().out.endswith(f"{path}: {numbers}\n")


def test_files_of_rows_that_cannot_be_used(tmp_path):
    path = tmp_path / "rows.npy"
    assert llm_documents.write_rows(path, [(np.array([1]), np.array([9]))], 48) == 9, "the last target is no token"
    np.save(tmp_path / "other.npy", np.zeros(3))
    for name, line in (("other.npy", "it has float64 of the shape (3,)"), ("none.npy", "cannot read the rows of ")):
        assert line in exit_message(llm_documents.mapped, tmp_path / name)


def test_the_last_rows_of_a_batch_may_be_without_targets(tmp_path, monkeypatch):
    row = torch.tensor([[7, 8, llm_documents.PADDING], [0, 1, 0], [8, 9, llm_documents.IGNORED]], dtype=torch.int32)
    np.save(tmp_path / "rows.npy", torch.stack([row, row]).numpy())
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    ours, empty = llm_documents.share_of(tmp_path / "rows.npy", [0, 1, 0])
    assert ours.tokens.tolist() == [[7, 8, 0]] and ours.positions.tolist() == [[0, 1, 0]]
    assert ours.places.tolist() == [0, 1] and ours.targets.tolist() == [8, 9] and ours.n_tokens == 2
    assert empty.tokens.tolist() == [[0, 0, 0]] and empty.positions.tolist() == [[0, 0, 0]]
    assert len(empty.places) == len(empty.targets) == empty.n_tokens == 0


def test_every_row_is_taken_once_in_an_epoch_in_another_order_in_the_next():
    numbers = llm_documents.order_of(10, 25, seed=1)
    assert len(numbers) == 25
    assert sorted(numbers[:10]) == sorted(numbers[10:20]) == list(range(10))
    assert numbers[:10] != numbers[10:20] != list(range(10))
    assert numbers[:4] != llm_documents.order_of(10, 4, seed=2)
    assert numbers[:7] == llm_documents.order_of(10, 7, seed=1)


# ---- chat templates -------------------------------------------------------------------------------------------------

ASKS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


def template(turn, asks=ASKS):
    return "{% for m in messages %}" + turn + "{% endfor %}" + asks


PLAIN = llm_documents.CHAT_TEMPLATE
BEGIN = "<|{{ m.role }}|>"
NAME = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
CALLS = NAME.replace("{% endfor %}", "{{ c.function.arguments | tojson }}{% endfor %}")
TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
WITH_TOOLS = TOOLS + template(BEGIN + "{{ m.content }}" + CALLS + "<|end|>")
STRINGS = WITH_TOOLS.replace("name }}{{ c.function.arguments | tojson }}", "name + ' ' + c.function.arguments }}")
SHOWS_SOME = template(
    BEGIN + "{% if m.role == 'assistant' %}{{ m.reasoning_content }}{% endif %}{{ m.content }}" + NAME + "<|end|>"
)
HIDES_THOUGHTS = SHOWS_SOME.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
DROPS_THOUGHTS = template(BEGIN + "{{ m.content.split('</think>')[-1].strip() }}<|end|>")
DROPS_CALLS = template(BEGIN + "{% if m.content %}{{ m.content }}{% else %}" + NAME + "{% endif %}<|end|>")
NEXT_ROLE_ENDS = template("{% if m.role == 'tool' %}<|end|>{% else %}" + BEGIN + "{% endif %}{{ m.content }}" + NAME)
NO_END_AT_THE_END = template(
    BEGIN + "{{ m.content }}{% if not loop.last %}<|end|>{% endif %}",
    ASKS.replace("<|assistant|>", "<|end|><|assistant|>"),
)
PHI3 = template(BEGIN + "{{ m.content }}<|end|>\n", ASKS.replace("{% endif", "{% else %}</s>{% endif"))
MERGES_SYSTEM = template(
    """{% if m.role == 'user' %}[INST] {% if loop.index0 == 1 and messages[0].role == 'system' %}\
{{ messages[0].content }}\n\n{% endif %}{{ m.content }} [/INST]\
{% elif m.role == 'assistant' %} {{ m.content | trim }}<|end|>{% endif %}""",
    "",
)
NO_SPECIAL = template("{{ m.role }}: {{ m.content }}\n", ASKS.replace("<|assistant|>", "assistant: "))
# Of agents: an answer has thoughts, words and calls, and goes on after results.
THOUGHT = "<think>{{ m.reasoning_content }}</think>"
ANSWER = THOUGHT + "{{ m.content }}" + CALLS + "<|end|>"
WITH_THOUGHTS = template(
    "{% if m.role == 'assistant' %}<|assistant|>" + ANSWER + "{% else %}" + BEGIN + "{{ m.content }}<|end|>{% endif %}"
)
OPENS_A_THOUGHT = WITH_THOUGHTS.replace("<|assistant|>{% endif", "<|assistant|><think>{% endif")
LAST_QUESTION = """{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}\
{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"""
AFTER_IT = "{% if loop.index0 > ns.last %}" + THOUGHT + "{% endif %}"
IN_A_TURN = """{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|user|>{% endif %}[{{ m.content }}]\
{% if loop.last or loop.nextitem.role != 'tool' %}<|end|>{% endif %}{% else %}"""
GOES_ON = template(
    "{% if m.role == 'assistant' %}{% if loop.previtem.role != 'tool' %}<|assistant|>{% endif %}"
    + ANSWER.replace("<|end|>", "{% if m.tool_calls %}<|user|>{% else %}<|end|>{% endif %}")
    + "{% elif m.role == 'tool' %}[{{ m.content }}]{% else %}"
    + BEGIN
    + "{{ m.content }}<|end|>{% endif %}",
    "{% if messages[-1].role != 'tool' %}" + ASKS + "{% endif %}",
)

# ---- conversations --------------------------------------------------------------------------------------------------

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
SYSTEM = {"messages": [{"role": "system", "content": "Be kind."}, *CHAT["messages"]]}
THOUGHTFUL = says("4.", reasoning_content="2+2=4")
AGENT = chat(
    says("Wait.", reasoning_content="It is long.", tool_calls=[call({"a": 2}), call({"a": 3})]),
    RESULT,
    {**RESULT, "content": "9"},
    says("9.", reasoning_content="Done."),
    USER,
    says("Yes.", reasoning_content="I am."),
)
WAIT = '<think>It is long.</think>Wait.add{"a": 2}add{"a": 3}<|end|>'
DONE = "<think>Done.</think>9.<|end|>"
YES = "<think>I am.</think>Yes.<|end|>"
BOTH = ["Hello!\n<|end|>", "4.<|end|>"]
SHOWN = [  # a chat template, a line, and what is in the loss in each of its documents
    (PLAIN, CHAT, [BOTH]),
    (PLAIN, chat(says("no", weight=0), {**USER, "weight": 0}, says("4.", weight=1)), [["4.<|end|>"]]),
    (PLAIN, chat(says(), USER, says("no", weight=0)), [["4.<|end|>"]]),
    (PLAIN, chat(says(), chat_template_kwargs={"add_generation_prompt": True}), [["4.<|end|>"]]),
    (PLAIN, {"text": "abc", "messages": None, "id": []}, [["bc<|end|>"]]),
    (PLAIN, {"text": ""}, []),
    (PLAIN, {}, []),
    # Arguments and tools may be JSON in JSON, and templates may join arguments to strings.
    (WITH_TOOLS, chat(calling({"a": 2}), RESULT, says(), tools=[TOOL]), [['add{"a": 2}<|end|>', "4.<|end|>"]]),
    (WITH_TOOLS, chat(calling('{"a": 2}'), says(), tools=json.dumps([TOOL])), [['add{"a": 2}<|end|>', "4.<|end|>"]]),
    (STRINGS, chat(calling('{"a":2}')), [['add {"a":2}<|end|>']]),
    (STRINGS, chat(calling({"a": "é"})), [['add {"a": "é"}<|end|>']]),
    (STRINGS, chat(calling(None)), [["add {}<|end|>"]]),
    *[(WITH_TOOLS, chat(calling(nothing)), [["add{}<|end|>"]]) for nothing in ("", "{}", {}, None)],
    (WITH_TOOLS.replace("m.content", "'' + m.content"), chat(calling({}, content=None)), [["add{}<|end|>"]]),
    # Arrow gives all objects of a column the same fields. In JSON inside of JSON, which it keeps, a null may stay.
    (WITH_TOOLS, chat(calling({"a": 2, **NULLS}, **NULLS), tools=[{**TOOL, **NULLS}]), [['add{"a": 2}<|end|>']]),
    (WITH_TOOLS, chat(calling('{"a": null}')), [['add{"a": null}<|end|>']]),
    (PLAIN.replace("content", "content | tojson"), chat(says('"b"')), [['"\\"b\\""<|end|>']]),  # words as JSON
    # White space may change, and thoughts of an earlier turn may be hidden.
    (DROPS_THOUGHTS, chat(says("  2 +\n2 ")), [["2 +\n2<|end|>"]]),
    (HIDES_THOUGHTS, chat({**THOUGHTFUL, "weight": 0}, USER, THOUGHTFUL), [["2+2=44.<|end|>"]]),
    (HIDES_THOUGHTS, chat(THOUGHTFUL, USER, THOUGHTFUL), [["2+2=44.<|end|>"], ["2+2=44.<|end|>"]]),
    # Answers that think, call tools and go on.
    (WITH_THOUGHTS, AGENT, [[WAIT, DONE, YES]]),
    (LAST_QUESTION + WITH_THOUGHTS.replace(THOUGHT, AFTER_IT), AGENT, [[WAIT, DONE], [YES]]),
    (WITH_THOUGHTS.replace("{% else %}", IN_A_TURN), AGENT, [[WAIT, DONE, YES]]),
    (GOES_ON, AGENT, [[WAIT.replace("<|end|>", "<|user|>"), DONE, YES]]),
    (OPENS_A_THOUGHT, AGENT, [[answer.removeprefix("<think>") for answer in (WAIT, DONE, YES)]]),
    # The token that ends a turn.
    (NEXT_ROLE_ENDS, CHAT, [["Hello!\n<|user|>", "4.<|user|>"]]),
    (NEXT_ROLE_ENDS, chat(calling({}), RESULT, says()), [["add<|end|>", "4.<|user|>"]]),
    (NEXT_ROLE_ENDS, chat(calling({})), [["add<|end|>"]]),
    (NO_END_AT_THE_END, CHAT, [BOTH]),
    (PHI3, CHAT, [["Hello!\n<|end|>\n</s>"], ["4.<|end|>\n</s>"]]),
    (PHI3.replace("<|end|>", ""), CHAT, [["Hello!\n\n</s>"], ["4.\n</s>"]]),
    (NO_SPECIAL, CHAT, [["Hello!\n\n", "4.\n"]]),
    (MERGES_SYSTEM, SYSTEM, [[" Hello!<|end|>", " 4.<|end|>"]]),
]
for nothing in (None, "", [], {}):  # a field that says nothing is no field
    fields = dict.fromkeys(("tool_calls", "annotations", "reasoning_content", "name"), nothing)
    SHOWN.append((PLAIN, chat(says(**fields)), [["4.<|end|>"]]))
    fields = dict.fromkeys(("text", "prompt", "tools", "chat_template_kwargs"), nothing)
    SHOWN.append((PLAIN, chat(says(), **fields), [["4.<|end|>"]]))


@pytest.mark.parametrize("template, record, expected", SHOWN)
def test_what_is_in_the_loss_of_a_line(template, record, expected):
    tokenizer = with_template(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["</s>"]})
    (found,) = read(tokenizer, record, length=500)
    assert [said(tokenizer, targets) for _, targets in found] == expected


ENUM = {"parameters": {"a": {"enum": [None, 2]}, **NULLS}, **NULLS}
STARTS = [  # a chat template, a line, and how its document begins
    (PLAIN, chat(says("no", weight=0), USER, says()), "<|user|>Hi.<|end|><|assistant|>no<|end|><|user|>Hi."),
    ("{{ mood }}" + PLAIN, chat(says(), chat_template_kwargs={"mood": "kind"}), "kind<|user|>"),
    (WITH_TOOLS, chat(calling({}), tools=[ENUM]), '{"parameters": {"a": {"enum": [null, 2]}}}<|user|>'),
    (WITH_TOOLS, chat(calling({}), tools=json.dumps([TOOL])), json.dumps(TOOL) + "<|user|>"),
    (HIDES_THOUGHTS, chat({**THOUGHTFUL, "weight": 0}, USER, says()), "<|user|>Hi.<|end|><|assistant|>4.<|end|>"),
]


@pytest.mark.parametrize("template, record, start", STARTS)
def test_what_stands_before_an_answer_is_shown_and_not_in_the_loss(template, record, start):
    tokenizer = with_template(template)
    (((tokens, _),),) = read(tokenizer, record, length=500)
    assert tokenizer.decode(tokens).startswith(start)


# ---- what would be ignored ------------------------------------------------------------------------------------------

HINT = {"role": "user", "content": "2+2?", "reasoning_content": "a hint"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Hi."}]}
MINOR = says("no", weight=0)
HIDDEN = "the chat template does not show "
IGNORES = "the chat template ignores "
MOVED = "the prompt for an answer ends with "
OPENS = PLAIN.replace("<|assistant|>{% endif", "<|assistant|><think>{% endif")
CHANGES_THE_QUESTION = template("{% if m.role == 'user' and loop.last %}Q:{% endif %}{{ m.content }}<|end|>", "")
LEAVES = "{% if not (m.tool_calls and messages[-1].content == '9.') %}" + THOUGHT + "{% endif %}"
KNOWS = template("{% if m.role in ('system', 'user', 'assistant') %}" + BEGIN + "{{ m.content }}<|end|>{% endif %}")
RAISES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
REFUSED = [  # a chat template, a line, and what is said
    (None, SYSTEM, "the tokenizer has no chat template: give one by --chat-template, or use texts"),
    ("{{ messages[0].content", SYSTEM, "unexpected end of template"),
    (RAISES, SYSTEM, "no system"),
    (CHANGES_THE_QUESTION, SYSTEM, MOVED),
    (WITH_THOUGHTS.replace(THOUGHT, LEAVES), AGENT, MOVED),
    (OPENS, chat(says()), f"{MOVED}'<think>', and the answer does not follow it: add the thoughts of the answer"),
    (PLAIN, chat(PARTS, says()), "content of the role user is no"),
    (PLAIN, chat(says(weight=0)), "says nothing in it that is in the loss"),
    (PLAIN, chat(says(weight=0.5)), "weight 0.5 "),
    (PLAIN, chat(says(weight="0")), "weight 0 "),
    (PLAIN, chat(says(train=False)), f"{IGNORES}train of the role assistant"),
    (PLAIN, chat({**USER, "weight": 1}, says()), "weight 1 of the role user: it may be 0, or 1 for the assistant"),
    (PLAIN, chat(says(), tools=[{"name": "add"}]), f"{IGNORES}tools of the line"),
    (PLAIN, chat(says(), chat_template_kwargs={"mood": "kind"}), f"{IGNORES}mood of the line"),
    (WITH_TOOLS, chat(calling("a=2")), "JSONDecodeError"),
    (DROPS_THOUGHTS, chat(says("<think>why</think>4.")), f"{HIDDEN}'<think>why</think>4.' of the role assistant"),
    (DROPS_CALLS, chat(calling({}, content="Wait.")), f"{HIDDEN}'add' of the role assistant"),
    # The template contains the name of the field, and shows what it holds: in another message.
    *[(SHOWS_SOME, chat(*first, HINT, THOUGHTFUL), f"{HIDDEN}'a hint'") for first in ((), (THOUGHTFUL,), (MINOR,))],
    (KNOWS, chat({"role": "tool", "content": "important"}, says()), f"{HIDDEN}'important' of the role tool"),
    *[(PLAIN, chat(says(empty), USER, says()), "an answer of the assistant is empty") for empty in ("", None, " ")],
    (PLAIN, chat(says(), USER, {"role": "gpt", "content": "d"}), f"{IGNORES}gpt of the roles"),
]
for field in ("reasoning_content", "function_call", "refusal", "tool_calls"):
    REFUSED.append((PLAIN, chat(says(**{field: [{"x": 1}]})), f"{IGNORES}{field} of the role assistant"))
# Other trainers obey some of them. By its name alone, a field does not say that it means nothing.
for field in ("system", "weight", "loss_mask", "id"):
    line = f": {field}, source would be ignored: write the data anew with "
    for record in (chat(says()), {"text": "x"}):
        REFUSED.append((PLAIN, {**record, field: 0, "source": "web", "score": None}, line))


@pytest.mark.parametrize("template, record, cause", REFUSED)
def test_what_would_be_ignored_or_cannot_be_shown_is_refused(template, record, cause):
    assert cause in exit_message(read, with_template(template), record)
