"""documents.py: what is in the loss, what is left out, what is cut, and where each document lies in its row."""

import json
import math

import language
import numpy as np
import pytest
import torch
import transformers
from conftest import exit_message
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import documents

TURNS = [("user", "Hi."), ("assistant", "Hello!\n"), ("user", "2+2?"), ("assistant", "4.")]
CHAT = {"messages": [{"role": role, "content": content} for role, content in TURNS]}
WITHOUT_THOUGHTS = """{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and not loop.last %}\
{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}\
{% if add_generation_prompt %}[assistant]{% endif %}"""
OPENS_A_THOUGHT = """{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}\
{% if add_generation_prompt %}[assistant]<think>{% endif %}"""
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


def read(tokenizer, *records, length=200, **options):
    lines = [(f"data.jsonl: line {number}", json.dumps(record)) for number, record in enumerate(records, 1)]
    return documents.read(lines, tokenizer, length, **options)


def said(tokenizer, document):
    """The runs of targets that are in the loss, as text."""
    _, targets = document
    runs, previous = [], documents.IGNORED
    for target in targets.tolist():
        if target != documents.IGNORED:
            if previous == documents.IGNORED:
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
    in_loss = targets != documents.IGNORED
    assert targets[in_loss].tolist() == np.array(everything[1:])[in_loss].tolist(), "the token after each"
    assert tokens.dtype == targets.dtype == np.int32


def test_several_bytes_of_a_character(tokenizer):
    record = {"messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "ü→"}]}
    ((document,),) = read(tokenizer, record)
    assert said(tokenizer, document) == ["ü→<|end|>"]


def test_a_template_that_shows_earlier_turns_otherwise_gives_a_text_for_each_turn():
    tokenizer = with_template(WITHOUT_THOUGHTS)
    turns = [("user", "a"), ("assistant", "t</think>b"), ("user", "c"), ("assistant", "u</think>d")]
    record = {"messages": [{"role": role, "content": content} for role, content in turns]}
    (found,) = read(tokenizer, record)
    assert [said(tokenizer, document) for document in found] == [["t</think>b<|end|>"], ["u</think>d<|end|>"]]
    assert "t</think>" not in tokenizer.decode(found[1][0])


def test_a_prompt_that_opens_a_thought():
    tokenizer = with_template(OPENS_A_THOUGHT)
    ((document,),) = read(tokenizer, CHAT)
    assert said(tokenizer, document) == ["Hello!\n<|end|>", "4.<|end|>"]


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
    assert document[1].tolist() == [documents.IGNORED, documents.IGNORED, 3, 4, 5]


def test_the_text_around_the_loss(tokenizer):
    ((document,),) = read(tokenizer, CHAT)
    before, in_loss = documents.text_around_loss(document, tokenizer, n_tokens=4)
    assert (before, in_loss) == ("i.<|end|><|assistant|>", "Hell")
    ((document,),) = read(tokenizer, {"text": "abc"})
    assert documents.text_around_loss(document, tokenizer) == ("a", "bc<|end|>")


def test_a_text_is_cut_and_each_of_its_tokens_is_a_target_once(tokenizer):
    text = "abcdefghij"
    for length in (2, 3, 10, 11, 50):
        (found,) = read(tokenizer, {"text": text}, length=length)
        tokens = np.concatenate([tokens for tokens, _ in found])
        targets = np.concatenate([targets for _, targets in found])
        assert tokenizer.decode(tokens) == text
        assert tokenizer.decode(targets) == text[1:] + "<|end|>"
        assert max(len(tokens) for tokens, _ in found) == min(length, 10)


def test_the_first_token_of_a_tokenizer_that_has_one():
    tokenizer = language.byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|user|>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|user|> $A", pair=None, special_tokens=[("<|user|>", 257)]
    )
    ((document,),) = read(tokenizer, {"text": "ab"})
    assert tokenizer.decode(document[0]) == "<|user|>ab"
    ((document,),) = read(tokenizer, CHAT)
    assert tokenizer.decode(document[0]).count("<|user|>") == 2, "the template writes them"


def test_too_long_conversations_are_left_out_or_cut_and_counted(tokenizer, capsys):
    short = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    ((exact,),) = read(tokenizer, short)
    n = len(exact[0])
    found = read(tokenizer, short, CHAT, short, length=n)
    assert [len(documents) for documents in found] == [1, 0, 1]
    assert capsys.readouterr().out == f"1 conversations have more than --length {n} tokens and are left out\n"
    found = read(tokenizer, short, CHAT, short, length=10, cut=True)
    assert [len(documents) for documents in found] == [1, 1, 1]
    assert said(tokenizer, found[1][0]) == ["Hello"]
    assert capsys.readouterr().out == "1 conversations have more than --length 10 tokens and are cut\n"
    assert read(tokenizer, CHAT, length=4, cut=True) == [[]], "nothing that the assistant says is left"
    assert capsys.readouterr().out.endswith("\n1 of them have no answer before the cut and are left out\n")


def test_many_lines(tokenizer, monkeypatch):
    monkeypatch.setattr(documents, "LINES_AT_A_TIME", 7)
    records = list(language.records(30))
    together = read(tokenizer, *records)
    alone = [read(tokenizer, record)[0] for record in records]
    assert len(together) == 30
    for a, b in zip(together, alone, strict=True):
        assert [tokens.tolist() for tokens, _ in a] == [tokens.tolist() for tokens, _ in b]


def test_documents_share_rows_and_none_is_lost(tokenizer):
    length = 48
    found = [document for line in read(tokenizer, *language.records(80), length=length) for document in line]
    lists = documents.pack(found, length)
    assert sorted(id(document) for row in lists for document in row) == sorted(map(id, found))
    n_tokens = sum(len(tokens) for tokens, _ in found)
    assert len(lists) <= math.ceil(n_tokens / length) + 2, "hardly anything is wasted"
    rows = documents.make_rows(lists, length)
    assert rows.shape == (len(lists), 3, length) and rows.dtype == torch.int32
    for row, inside in zip(rows, lists, strict=True):
        starts = [place for place, position in enumerate(row[documents.POSITIONS].tolist()) if position == 0]
        ends = [*starts[1:], length]
        pieces = [row[:, start:end] for start, end in zip(starts, ends, strict=True)]
        for piece, (tokens, targets) in zip(pieces, inside, strict=False):
            assert torch.equal(piece, torch.tensor(np.stack([tokens, np.arange(len(tokens)), targets])))
        padding = pieces[len(inside) :]
        assert len(padding) <= 1
        for piece in padding:
            assert (piece[documents.TOKENS] == documents.PADDING).all()
            assert (piece[documents.TARGETS] == documents.IGNORED).all()


BAD = [
    ("{", "JSONDecodeError"),
    ("[]", "it is no JSON object"),
    ('"text"', "it is no JSON object"),
    ("{}", "it has neither, but nothing"),
    ('{"prompt": "x", "completion": "y"}', "it has neither, but prompt, completion"),
    ('{"text": 3}', "its text is no string"),
    ('{"messages": "x"}', "TypeError"),
    ('{"messages": [{"role": "user"}]}', "the assistant says nothing in it"),
    ('{"messages": [{"content": "x"}]}', "KeyError: 'role'"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}', "its first message is the assistant's"),
    (b'{"text": "\xff"}', "UnicodeDecodeError"),
]


@pytest.mark.parametrize("line, cause", BAD)
def test_a_bad_line_is_named(line, cause, tokenizer, tmp_path):
    path = tmp_path / "chats.jsonl"
    content = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b'{"text": "good"}\n\n' + content + b"\n")
    message = exit_message(documents.read, documents.lines_of([path]), tokenizer, 50)
    start = f'{path}: line 3 is no {{"messages": [...]}} or {{"text": "..."}} that this model can read ('
    assert message.startswith(start)
    assert any(name in message for name in cause.split("|")), message


@pytest.mark.parametrize(
    "template, cause",
    [
        (None, "the tokenizer has no chat template: give one by --chat-template, or use texts"),
        (REFUSES, "System role not supported"),
        (CHANGES_THE_QUESTION, "the chat template shows the messages before an answer in another way once the answer"),
        ("{{ messages[0].content", "TemplateSyntaxError"),
    ],
)
def test_a_template_that_cannot_be_used(template, cause):
    record = {"messages": [{"role": "system", "content": "Be kind."}, *CHAT["messages"]]}
    assert cause in exit_message(read, with_template(template), record)


def test_files_that_are_too_large_or_missing(tmp_path):
    path = tmp_path / "large.jsonl"
    path.touch()
    path.open("r+").truncate(3 * 10**9)  # a sparse file
    large = "--data has 3.0 GB, more than the 1 GB that this script holds in memory"
    assert exit_message(list, documents.lines_of([path])).startswith(large)
    message = exit_message(list, documents.lines_of([tmp_path / "none.jsonl"]))
    assert message == f"--data: cannot read {tmp_path}/none.jsonl: No such file or directory"
    assert "Is a directory" in exit_message(list, documents.lines_of([tmp_path]))


def test_guesses_by_bigrams():
    """By hand: after 1, the tokens 2 and 2 have been seen; 3 follows 2."""
    rows = torch.tensor([[[1, 1, 2], [0, 1, 2], [2, 2, 3]]], dtype=torch.int32)
    prior = 100 * torch.tensor([1, 1, 3, 2]) / 7
    held_out = torch.tensor([[[1, 2, 3], [0, 1, 2], [2, -100, 3]]], dtype=torch.int32)
    expected = -(torch.log((2 + prior[2]) / 102) + torch.log(prior[3] / 100)) / 2
    assert documents.bigram_loss(rows, held_out, 4) == pytest.approx(expected.item(), abs=1e-6)


def test_conversations_of_the_library(monkeypatch, tmp_path):
    (tmp_path / "a.py").write_text('def f(x):\n    """Twice."""\n    return 2 * x\n\n\ndef g():\n    return 1\n')
    monkeypatch.setattr(documents, "LIBRARY", tmp_path)
    ((place, line),) = documents.lines_of_library()
    question, answer = json.loads(line)["messages"]
    assert question == {"role": "user", "content": 'def f(x):\n    """Twice."""\n'}
    assert answer == {"role": "assistant", "content": "    return 2 * x\n"}
    assert place == f"{tmp_path}/a.py: line 1"
    monkeypatch.setattr(documents, "LIBRARY", tmp_path / "empty")
    assert "has no *.py files" in exit_message(documents.library_tokenizer)
