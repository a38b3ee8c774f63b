"""min_Generate.py gives what a loop gives that continues one prompt at a time, on any mesh, and after any kill."""

import contextlib
import functools
import json
import os
import random
import re
from pathlib import Path

import pytest
import torch
from conftest import Bomb, Watch, exit_message, guards, killed_in, on_processes, slow
from test_gpt_generate import continue_alone, peaked_model
from torch.multiprocessing import ProcessExitedException

import distributed as dist
import gpt
import gpt_generate
import min_Generate

SIZES = {"layers": 2, "width": 36, "heads": 6, "length": 80}
NEW_BYTES, TEMPERATURE, SEED = 30, 0.7, 4
FILES = ("--model", "model.pt", "--prompts", "prompts.jsonl")
OPTIONS = ("--new-bytes", NEW_BYTES, "--temperature", TEMPERATURE, "--seed", SEED, "--batch-size", 5)
LAST_LINE = re.compile(r"24 answers \| ([\d,]+) new bytes")
DRAW = random.Random(0)
RECORDS = []  # 24 prompts of 1 to 46 bytes, one of them twice
for number in range(23):
    RECORDS.append({"id": f"q{number}", "prompt": "".join(DRAW.choices("abcdefgh ÄÖß\u2028", k=DRAW.randint(1, 30)))})
RECORDS.append({**RECORDS[5], "id": "again"})


def make_model():
    """Some of its answers end before NEW_BYTES."""
    return peaked_model(SIZES["width"], SIZES["heads"], SIZES["length"], seed=6)


@functools.cache
def reference():
    """The bytes that continue each prompt, without cache, batch and padding, with the stop byte."""
    model, answers = make_model(), []
    for number, record in enumerate(RECORDS):
        prompt = record["prompt"].encode()
        (drawn,) = gpt_generate.uniform(f"{SEED} {number}", 1, NEW_BYTES)
        text, _ = continue_alone(model, prompt, drawn, ord("\n"), TEMPERATURE)
        answers.append(text.removeprefix(prompt))
    assert len({len(answer) for answer in answers}) > 5 and answers[5] != answers[-1], "and stops"
    return answers


def check_answers(folder):
    """`cat folder/*.jsonl` has all answers in the order of the prompts."""
    lines = "".join(path.read_text() for path in sorted(Path(folder).glob("*.jsonl"))).splitlines()
    texts = [answer.removesuffix(b"\n").decode(errors="replace") for answer in reference()]
    expected = [{**record, "answer": text} for record, text in zip(RECORDS, texts, strict=True)]
    assert [json.loads(line) for line in lines] == expected
    assert sorted(os.listdir(folder)) == [*(f"{first:08}.jsonl" for first in range(0, 24, 5)), "job.json"]


def n_new_bytes(stdout):
    return int(LAST_LINE.fullmatch(stdout.splitlines()[-1])[1].replace(",", ""))


@pytest.fixture
def args_of(tmp_path, monkeypatch, typed):
    """What the script's parse_args gives for these options and OPTIONS, in a folder with model and prompts."""
    monkeypatch.chdir(tmp_path)
    torch.save({"sizes": SIZES, "model": make_model().state_dict()}, "model.pt")
    Path("prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))

    def parse(*options):
        typed("min_Generate.py", *FILES, *OPTIONS, *options)
        return min_Generate.parse_args()

    return parse


def launch(args):
    dist.launch(min_Generate.main_worker, args, nprocs=args.nproc)


# ---- equality -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [(2, 1), *guards((1, 1), (2, 2), (4, 2)), *slow((3, 1), (3, 3), (8, 2))])
def test_equals_one_prompt_at_a_time(mesh, args_of, capfd):
    nproc, tensor = mesh
    launch(args_of("--nproc", nproc, "--tensor", tensor))
    check_answers("answers")
    stdout = capfd.readouterr().out
    assert n_new_bytes(stdout) == sum(map(len, reference())), "no prompt is answered twice"
    assert stdout.count("rank 0 has written") == len(range(0, 5, nproc // tensor)), "its share of five batches"


@on_processes(2)
def test_a_half_holds_half_of_the_cache_and_communicates_as_the_docstring_says():
    model = make_model()
    n_before = sum(param.numel() for param in model.blocks.parameters())
    choose = functools.partial(gpt_generate.choose_alike, min_Generate.split_layers(model, 2))
    assert sum(param.numel() for param in model.blocks.parameters()) < 0.55 * n_before
    drawn = gpt_generate.uniform("", 3, NEW_BYTES)
    with Watch() as watch:
        gpt_generate.generate(model, [b"a", b"bc", b"def"], drawn, choose=choose)
    sums = 2 * SIZES["layers"] * NEW_BYTES
    assert watch.counts == {"c10d.allreduce_": sums, "c10d.broadcast_": NEW_BYTES}
    bytes_per_row = 8 * SIZES["width"]  # in float64
    assert watch.sent["all-reduce"] == 2 * SIZES["layers"] * (3 * 3 + 3 * (NEW_BYTES - 1)) * bytes_per_row
    with torch.no_grad(), gpt_generate.KVCache(model, length=4) as cache:
        cache.forward(torch.zeros(3, 1, dtype=torch.long), torch.zeros(3, 1, dtype=torch.long), end=1)
    n_stored = sum(stored.numel() for stored in cache.stored.values())
    assert n_stored == 2 * SIZES["layers"] * SIZES["width"] * 3 * 4 / 2


def one_with_other_logits(local_rank, world_size, args):
    args.model = ("model.pt", "other.pt")[local_rank]
    min_Generate.main_worker(local_rank, world_size, args)


@pytest.mark.guard
@pytest.mark.slow
def test_a_rank_with_other_logits_does_not_fall_out_of_step(args_of):
    """Rank 1 would choose other bytes, and its rows would end at other times."""
    args = args_of("--nproc", 2, "--tensor", 2)
    model = make_model()
    model.head.weight.data.normal_()
    torch.save({"sizes": SIZES, "model": model.state_dict()}, "other.pt")
    dist.launch(one_with_other_logits, args, nprocs=2)
    check_answers("answers")


# ---- kills ----------------------------------------------------------------------------------------------------------

KILLS = [  # in a function, in which call of it, and whether at its end; --nproc and --tensor before and after
    ("min_Generate.answer_missing", 1, False, (2, 1), (3, 3)),
    ("gpt_generate.generate", 1, False, (2, 2), (1, 1)),
    ("gpt_generate.generate", 2, False, (2, 1), (2, 2)),
    ("min_Generate.write", 1, False, (4, 2), (2, 1)),
    ("min_Generate.write", 1, True, (4, 2), (1, 1)),
    ("min_Generate.write", 2, False, (2, 2), (3, 1)),
    ("checkpoint.os.replace", 1, False, (3, 1), (2, 2)),
    ("checkpoint.os.replace", 1, True, (3, 3), (3, 1)),
    ("checkpoint.os.replace", 2, False, (2, 1), (4, 2)),
    ("json.dumps", 3, False, (3, 1), (2, 1)),
]


def killed_worker(local_rank, world_size, args, victim, moment):
    with killed_in(*moment) if local_rank == victim else contextlib.nullcontext():
        min_Generate.main_worker(local_rank, world_size, args)


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize(("target", "call", "at_its_end", "before", "after"), KILLS)
def test_killed_and_resumed_by_other_numbers_of_processes(target, call, at_its_end, before, after, args_of, capfd):
    """No answer is generated twice, and all equal those of an undisturbed run."""
    nproc, tensor = before
    victim = nproc - tensor if call == 1 else 0  # a rank that writes, and that often
    args = args_of("--nproc", nproc, "--tensor", tensor)
    with pytest.raises(ProcessExitedException):
        dist.launch(killed_worker, args, victim, (target, call, at_its_end), nprocs=nproc)
    kept = [int(path.stem) for path in Path("answers").glob("*.jsonl")]
    missing = [answer for row, answer in enumerate(reference()) if row // 5 * 5 not in kept]
    capfd.readouterr()
    nproc, tensor = after
    launch(args_of("--nproc", nproc, "--tensor", tensor))
    assert n_new_bytes(capfd.readouterr().out) == sum(map(len, missing))
    for path in Path("answers").glob("*.tmp"):
        path.unlink()  # what a killed save has left
    check_answers("answers")


def test_a_folder_of_another_job_is_refused(args_of):
    """Another model, prompts or options would give other answers. Processes and --tensor do not."""
    launch(args_of("--nproc", 1))
    before = {path: path.read_bytes() for path in Path("answers").iterdir()}
    Path("other.jsonl").write_text(Path("prompts.jsonl").read_text())
    line = "--output: answers/job.json names another job: choose another folder"
    changes = [("new-bytes", 29), ("temperature", 0.5), ("seed", 5), ("batch-size", 4), ("prompts", "other.jsonl")]
    for name, value in changes:
        assert exit_message(launch, args_of(f"--{name}", value)) == line, name
    os.utime("model.pt", (1, 1))  # the same name, but another file
    assert exit_message(launch, args_of()) == line
    assert {path: path.read_bytes() for path in Path("answers").iterdir()} == before


# ---- what is refused ------------------------------------------------------------------------------------------------

WRONG_LINES = ["{", "[]", '"prompt"', "null", "{}", '{"prompt": 3}', '{"prompt": ""}', "", '{"prompt": "\\ud800"}']
WRONG_LINES += ["\udcff", '{"prompt": "a"', json.dumps({"prompt": 51 * "a"}), '{"prompt": ' + 100_000 * "["]


def test_wrong_prompts_are_one_line_before_anything_is_written(args_of):
    for line in WRONG_LINES:
        Path("prompts.jsonl").write_bytes(b'{"prompt": "a"}\n' + line.encode(errors="surrogateescape") + b"\n")
        message = exit_message(launch, args_of("--nproc", 1))
        assert message.startswith("prompts.jsonl, line 2: ") and "1 to 50 bytes" in message, line[:50]
    assert os.listdir("answers") == []


def test_wrong_models_are_one_line(args_of):
    assert exit_message(launch, args_of("--nproc", 4, "--tensor", 4)).startswith("--tensor 4 does not divide")
    weights = torch.load("model.pt", weights_only=True)["model"]
    wrong = [torch.ones(3), {}, {"model": weights}, {"sizes": SIZES}, Bomb("exploded"), {"sizes": SIZES, "model": {}}]
    for sizes in ({}, {**SIZES, "width": 12}, {**SIZES, "heads": 0}, None):
        wrong.append({"sizes": sizes, "model": weights})
    args = args_of("--model", "other.pt")
    for content in wrong:
        torch.save(content, "other.pt")
        assert exit_message(launch, args).startswith("--model: other.pt is not a file that min_GRPO.py"), content
    Path("other.pt").write_bytes(Path("model.pt").read_bytes()[:20_000])
    assert exit_message(launch, args).startswith("--model: other.pt is not a file that min_GRPO.py")
    assert not Path("exploded").exists() and os.listdir("answers") == []


def test_mistakes_are_one_line(main_of, args_of):
    for option, value, words in (("--prompts", "", "''"), ("--nproc", "3", "3 is not a multiple of 2, --tensor")):
        status, line = main_of("min_Generate.py", *FILES, "--tensor", "2", option, value)
        assert status == 2 and f" argument {option}: " in line and words in line and line.count("\n") == 1
    assert main_of("min_Generate.py")[1].endswith("required: --model, --prompts\n")
    Path("file").write_text("in the way")
    assert main_of("min_Generate.py", *FILES, "--output", "file")[0].startswith("--output: ")


def test_a_model_of_min_GRPO_and_greedy_answers(args_of, job_of):
    """The file of min_GRPO.py --output is one that this script loads."""
    options = ("--imitation-steps", 2, "--steps", 1, "--prompts", 4, "--group-size", 2, "--output", "grpo.pt")
    job_of("min_GRPO.py", "--nproc", 1, *options)
    Path("digits.jsonl").write_text('{"prompt": "31524=", "answer": "old"}\n{"prompt": "31524="}\n')
    job_of("min_Generate.py", "--model", "grpo.pt", "--prompts", "digits.jsonl", "--nproc", 1, "--temperature", 0)
    first, second = (json.loads(line)["answer"] for line in Path("answers/00000000.jsonl").read_text().splitlines())
    saved = torch.load("grpo.pt", weights_only=True)
    model, text = gpt.GPT(gpt.Config(**saved["sizes"])), list(b"31524=")
    model.load_state_dict(saved["model"])
    for _ in range(10):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert first == second == bytes(text[6:]).partition(b"\n")[0].decode(errors="replace")
