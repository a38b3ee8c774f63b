"""min_Generate.py gives what a loop gives that continues one prompt at a time, on any mesh, and after any kill."""

import contextlib
import functools
import json
import os
import random
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import Bomb, Watch, exit_message, guards, killed_in, slow
from test_gpt_generate import continue_alone, peaked_model
from torch.multiprocessing import ProcessExitedException

import distributed as dist
import gpt
import gpt_generate
import min_Generate

SIZES = {"layers": 2, "width": 36, "heads": 6, "length": 80}
NEW_BYTES, STOP, TEMPERATURE, SEED = 30, b"B", 0.7, 4
FILES = ("--model", "model.pt", "--prompts", "prompts.jsonl")
OPTIONS = ("--new-bytes", NEW_BYTES, "--temperature", TEMPERATURE, "--seed", SEED, "--batch-size", 5)
LAST_LINE = re.compile(r"24 answers \| ([\d,]+) new bytes")
DRAW = random.Random(0)
RECORDS = []  # 24 prompts of 1 to 46 bytes, one of them twice
for number in range(23):
    RECORDS.append({"id": f"q{number}", "prompt": "".join(DRAW.choices("abcdefgh ÄÖß\u2028", k=DRAW.randint(1, 30)))})
RECORDS.append({**RECORDS[5], "id": "again"})


@functools.cache
def reference():
    """The bytes that continue each prompt, without cache, batch and padding, with the stop byte."""
    model, answers = peaked_model(SIZES["width"], SIZES["heads"], SIZES["length"], seed=5), []
    for number, record in enumerate(RECORDS):
        prompt = record["prompt"].encode()
        (drawn,) = gpt_generate.uniform(f"{SEED} {number}", 1, NEW_BYTES)
        text, _ = continue_alone(model, prompt, drawn, STOP[0], TEMPERATURE)
        answers.append(text.removeprefix(prompt))
    assert len({len(answer) for answer in answers}) > 5 and answers[5] != answers[-1], "and stops"
    return answers


def check_answers(folder):
    """`cat folder/*.jsonl` has all answers in the order of the prompts."""
    lines = "".join(path.read_text() for path in sorted(Path(folder).glob("*.jsonl"))).splitlines()
    texts = [answer.removesuffix(STOP).decode(errors="replace") for answer in reference()]
    expected = [{**record, "answer": text} for record, text in zip(RECORDS, texts, strict=True)]
    assert [json.loads(line) for line in lines] == expected
    assert sorted(os.listdir(folder)) == [*(f"{first:08}.jsonl" for first in range(0, 24, 5)), "job.json"]


@pytest.fixture
def args_of(tmp_path, monkeypatch):
    """What the script's parse_args gives for these options and OPTIONS, in a folder with model and prompts."""
    monkeypatch.chdir(tmp_path)
    model = peaked_model(SIZES["width"], SIZES["heads"], SIZES["length"], seed=5)
    torch.save({"sizes": SIZES, "model": model.state_dict()}, "model.pt")
    Path("prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))

    def parse(*options):
        monkeypatch.setattr(sys, "argv", ["min_Generate.py", *map(str, (*FILES, *OPTIONS, *options))])
        return min_Generate.parse_args()

    return parse


def worker(local_rank, world_size, args, patches=(), rank=0):
    """The script's own, with another stop byte. `patches` are of rank `rank` alone."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(min_Generate, "STOP", STOP[0]))
        if local_rank == rank:
            for patch, how in patches:
                stack.enter_context(patch(**how))
        min_Generate.main_worker(local_rank, world_size, args)


def launch(args, *more, worker=worker):
    dist.launch(worker, args, *more, nprocs=args.nproc)


# ---- equality -------------------------------------------------------------------------------------------------------


def watched_worker(local_rank, world_size, args):
    """Returns the heads that the cache holds, the forwards, the prompts, and what is communicated meanwhile."""
    notes = {"heads": set(), "forwards": 0, "prompts": 0}
    generate, forward, counter = gpt_generate.generate, gpt_generate.KVCache.forward, Watch()

    def noted_forward(cache, *rest):
        notes["forwards"] += 1
        logits = forward(cache, *rest)
        notes["heads"] |= {stored.shape[2] for stored in cache.stored.values()}
        return logits

    def noted_generate(model, prompts, *rest, **kwargs):
        notes["prompts"] += len(prompts)
        with counter:
            return generate(model, prompts, *rest, **kwargs)

    with (
        mock.patch.object(gpt_generate.KVCache, "forward", noted_forward),
        mock.patch.object(gpt_generate, "generate", noted_generate),
    ):
        worker(local_rank, world_size, args)
    return dist.gather_objects({**notes, "communicated": dict(counter.counts)})


@pytest.mark.parametrize("mesh", [(2, 1), *guards((1, 1), (2, 2), (4, 2)), *slow((3, 1), (3, 3), (8, 2))])
def test_equals_one_prompt_at_a_time(mesh, args_of):
    nproc, tensor = mesh
    args = args_of("--nproc", nproc, "--tensor", tensor)
    ranks = dist.launch(watched_worker, args, nprocs=nproc)
    check_answers("answers")
    for notes in ranks:
        assert notes["heads"] == {SIZES["heads"] // tensor}
        sums = 2 * SIZES["layers"] * notes["forwards"]
        expected = {"c10d.allreduce_": sums, "c10d.broadcast_": notes["forwards"]}
        assert notes["communicated"] == {name: n for name, n in expected.items() if n and tensor > 1}
    shares = [notes["prompts"] for notes in ranks[::tensor]]
    assert sum(shares) == 24 and max(shares) - min(shares) <= 5, "a batch more or less"


@pytest.mark.guard
@pytest.mark.slow
def test_a_rank_with_other_logits_does_not_fall_out_of_step(args_of):
    """Rank 1 computes other logits: other bytes would be chosen, and rows would end at other times."""
    other = (mock.patch, {"target": "gpt_generate.choose", "new": choose_otherwise})
    launch(args_of("--nproc", 2, "--tensor", 2), [other], 1)
    check_answers("answers")


CHOOSE = gpt_generate.choose


def choose_otherwise(logits, drawn, temperature):
    return CHOOSE(torch.randn_like(logits), drawn, temperature)


# ---- kills ----------------------------------------------------------------------------------------------------------

MOMENTS = [  # when a rank is killed: in a function, in which call of it, and whether at its end
    *[("min_Generate.answer_missing", 1, False), ("gpt_generate.generate", 1, False), ("min_Generate.write", 1, False)],
    *[("checkpoint.os.replace", 1, False), ("checkpoint.os.replace", 2, False), ("checkpoint.os.replace", 1, True)],
    *[("gpt_generate.generate", 2, False), ("min_Generate.write", 1, True), ("min_Generate.write", 2, False)],
    ("json.dumps", 3, False),
]


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_at_ten_moments_and_resumed_by_other_numbers_of_processes(args_of, capfd):
    """No answer is generated twice, and all equal those of an undisturbed run."""
    draw, n_kept = random.Random(0), 0
    meshes = [(2, 1), (2, 2), (3, 1), (3, 3), (4, 2)]
    for number, (target, call, at_its_end) in enumerate(MOMENTS):
        nproc, tensor = draw.choice(meshes)
        rank = draw.randrange(nproc // tensor) * tensor if call == 1 else 0  # a rank that writes, and that often
        kill = (killed_in, {"target": target, "call": call, "at_its_end": at_its_end})
        print(target, call, at_its_end, nproc, tensor, rank)
        with pytest.raises(ProcessExitedException):
            launch(args_of("--nproc", nproc, "--tensor", tensor, "--output", number), [kill], rank)
        kept = [int(path.stem) for path in Path(str(number)).glob("*.jsonl")]
        n_kept += 0 < len(kept) < 5
        capfd.readouterr()
        nproc, tensor = draw.choice([(1, 1), *meshes])
        launch(args_of("--nproc", nproc, "--tensor", tensor, "--output", number))
        n_bytes = sum(len(answer) for row, answer in enumerate(reference()) if row // 5 * 5 not in kept)
        last = capfd.readouterr().out.splitlines()[-1]
        assert int(LAST_LINE.fullmatch(last)[1].replace(",", "")) == n_bytes
        for path in Path(str(number)).glob("*.tmp"):
            path.unlink()  # what a killed save has left
        check_answers(str(number))
    assert n_kept >= 3, "some answers were kept, others were missing"


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
    without_heads = {name: value for name, value in SIZES.items() if name != "heads"}
    wrong_sizes = [without_heads, {**SIZES, "width": 12}, {**SIZES, "heads": 5}, {**SIZES, "heads": 0}, [1], 3, None]
    wrong_weights = [{}, [1], None, torch.ones(3), {5: torch.ones(3)}, {name: 1 for name in weights}]
    wrong = [torch.ones(3), [1], {}, {"model": weights}, {"sizes": SIZES}, Bomb("exploded")]
    wrong += [{"sizes": sizes, "model": weights} for sizes in wrong_sizes]
    wrong += [{"sizes": SIZES, "model": each} for each in wrong_weights]
    args = args_of("--model", "other.pt")
    for content in wrong:
        torch.save(content, "other.pt")
        assert exit_message(launch, args).startswith("--model: other.pt is not a file that min_GRPO.py"), content
    for content in (b"", b"text", Path("model.pt").read_bytes()[:20_000]):
        Path("other.pt").write_bytes(content)
        assert exit_message(launch, args).startswith("--model: other.pt is not a file that min_GRPO.py")
    assert not Path("exploded").exists() and os.listdir("answers") == []


def test_mistakes_are_one_line(main_of, args_of):
    for option, value, words in (
        ("--prompts", "", "''"),
        ("--nproc", "3", "3 is not a multiple of 2, --tensor"),
    ):
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
