"""min_Generate.py gives what a loop gives that continues one prompt at a time, on any mesh, and after any kill."""

import contextlib
import errno
import functools
import json
import os
import random
import re
import shutil
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import Bomb, Watch, exit_message, killed_in
from test_gpt_generate import continue_alone, peaked_model
from torch.multiprocessing import ProcessExitedException

import distributed as dist
import gpt
import gpt_generate
import min_Generate

SIZES = {"layers": 2, "width": 36, "heads": 6, "length": 80}
NEW_BYTES, STOP, TEMPERATURE, SEED = 30, "(", 0.7, 4
OPTIONS = ("--new-bytes", NEW_BYTES, "--stop", STOP, "--temperature", TEMPERATURE, "--seed", SEED, "--batch-size", 5)
LAST_LINE = re.compile(r"(\d+) answers \| ([\d,]+) new bytes \| ([\d,]+) bytes/s")


def make_model():
    return peaked_model(SIZES["width"], SIZES["heads"], SIZES["length"], seed=14)


def make_records():
    """24 prompts of 1 to 46 bytes, one of them twice."""
    draw = random.Random(0)
    records = []
    for number in range(23):
        text = "".join(draw.choices("abcdefgh ÄÖß\u2028", k=draw.randint(1, 30)))
        records.append({"id": f"q{number}", "prompt": text})
    return [*records, {**records[5], "id": "again"}]


@functools.cache
def reference():
    """The bytes that continue each prompt, without cache, batch and padding, with the stop byte."""
    model, answers = make_model(), []
    for number, record in enumerate(make_records()):
        prompt = record["prompt"].encode()
        (drawn,) = gpt_generate.uniform(f"{SEED} {number}", 1, NEW_BYTES)
        text, _ = continue_alone(model, prompt, drawn, ord(STOP), TEMPERATURE)
        answers.append(text.removeprefix(prompt))
    assert len({len(answer) for answer in answers}) > 5 and answers[5] != answers[-1], "and stops"
    return answers


def expected_output():
    lines = []
    for record, answer in zip(make_records(), reference(), strict=True):
        text = answer.removesuffix(STOP.encode()).decode(errors="replace")
        lines.append({**record, "answer": text})
    return lines


def lines_of(path):
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def parts_of(output="answers.jsonl"):
    """The folder of parts, of which there is at most one; "none" if there is none."""
    (folder,) = list(Path().glob(f"{output}.parts-*")) or [Path("none")]
    return folder


def numbers_in(folder):
    """The numbers of the prompts whose answers are in the parts. None is in two of them."""
    numbers = [number for path in folder.glob("*.json") for number, _ in json.loads(path.read_text())]
    assert len(numbers) == len(set(numbers))
    return set(numbers)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With model.pt and prompts.jsonl."""
    monkeypatch.chdir(tmp_path)
    torch.save({"sizes": SIZES, "model": make_model().state_dict()}, "model.pt")
    lines = [json.dumps(record, ensure_ascii=number % 2 == 0) + "\n" for number, record in enumerate(make_records())]
    Path("prompts.jsonl").write_text("".join(lines))
    return tmp_path


@pytest.fixture
def args_of(folder, monkeypatch):
    """What the script's parse_args gives for these options and OPTIONS."""

    def parse(*options):
        given = ("--model", "model.pt", "--prompts", "prompts.jsonl", *OPTIONS, *options)
        monkeypatch.setattr(sys, "argv", ["min_Generate.py", *map(str, given)])
        return min_Generate.parse_args()

    return parse


def launch(args, *more, worker=min_Generate.main_worker):
    dist.launch(worker, args, *more, nprocs=args.nproc)


# ---- equality -------------------------------------------------------------------------------------------------------


def watched_worker(local_rank, world_size, args, folder):
    """Notes on each rank the heads that the cache holds, the forwards, and what is communicated meanwhile."""
    notes = {"heads": set(), "forwards": 0, "rows": 0}
    own_exit, own_forward, own_generate = gpt_generate.KVCache.__exit__, gpt.GPT.forward, gpt_generate.generate
    counter = Watch()

    def at_exit(cache, *error):
        for stored in cache.stored.values():
            notes["heads"].add(stored.shape[2])
        own_exit(cache, *error)

    def forward(model, tokens, positions=None):
        if tokens.device.type != "meta":
            notes["forwards"] += 1
        return own_forward(model, tokens, positions)

    def noted_generate(model, prompts, *rest, **kwargs):
        notes["rows"] += len(prompts)
        with counter:
            return own_generate(model, prompts, *rest, **kwargs)

    with (
        mock.patch.object(gpt_generate.KVCache, "__exit__", at_exit),
        mock.patch.object(gpt.GPT, "forward", forward),
        mock.patch.object(gpt_generate, "generate", noted_generate),
    ):
        min_Generate.main_worker(local_rank, world_size, args)
    notes["heads"] = sorted(notes["heads"])
    notes["communicated"] = counter.counts
    Path(folder, f"notes {dist.get_rank()}.json").write_text(json.dumps(notes))


def check(args, folder):
    launch(args, str(folder), worker=watched_worker)
    output = Path(args.output)
    assert lines_of(output) == expected_output()
    output.unlink()
    rows = []
    for rank in range(args.nproc):
        notes = json.loads((folder / f"notes {rank}.json").read_text())
        assert notes["heads"] == [SIZES["heads"] // args.tensor]
        expected = {}
        if args.tensor > 1:
            sums = 2 * SIZES["layers"] * notes["forwards"]
            expected = {"c10d.allreduce_": sums, "c10d.broadcast_": notes["forwards"]}
        assert notes["communicated"] == expected
        rows.append(notes["rows"])
    shares = rows[:: args.tensor]
    assert rows == [share for share in shares for _ in range(args.tensor)] and sum(shares) == 24
    assert max(shares) - min(shares) <= 1
    assert sorted(path.name for path in folder.glob("answers*")) == []


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize(("nproc", "tensor"), [(1, 1), (2, 2), (3, 1), (4, 2)])
def test_equals_one_prompt_at_a_time(nproc, tensor, args_of, folder):
    check(args_of("--nproc", nproc, "--tensor", tensor), folder)


@pytest.mark.slow
@pytest.mark.parametrize(("nproc", "tensor"), [(2, 1), (3, 3), (8, 2)])
def test_other_meshes_too(nproc, tensor, args_of, folder):
    check(args_of("--nproc", nproc, "--tensor", tensor), folder)


def stubborn_worker(local_rank, world_size, args):
    """Rank 1 computes other logits: other bytes would be chosen, and rows would end at other times."""
    choose = gpt_generate.choose

    def choose_otherwise(logits, drawn, temperature):
        return choose(torch.randn_like(logits), drawn, temperature)

    changed = mock.patch.object(gpt_generate, "choose", choose_otherwise)
    with changed if local_rank == 1 else contextlib.nullcontext():
        min_Generate.main_worker(local_rank, world_size, args)


@pytest.mark.guard
@pytest.mark.slow
def test_a_rank_with_other_logits_does_not_fall_out_of_step(args_of):
    launch(args_of("--nproc", 2, "--tensor", 2), worker=stubborn_worker)
    assert lines_of(Path("answers.jsonl")) == expected_output()


@pytest.mark.guard
@pytest.mark.slow
def test_what_it_prints(folder, job_of):
    options = ("--model", "model.pt", "--prompts", "prompts.jsonl", "--nproc", 1, *OPTIONS, "--batch-size", 1)
    held, *progress, last = job_of("min_Generate.py", *options).splitlines()
    assert re.fullmatch(r"parameters held: ([\d,]+) of \1 \(1\.000\)", held)
    assert progress == ["rank 0 has answered 20 of its 24 prompts"]
    n_answers, n_new, _ = LAST_LINE.fullmatch(last).groups()
    assert (int(n_answers), int(n_new)) == (24, sum(map(len, reference())))


def test_greedy_answers_without_a_stop_fill_all_positions(folder, job_of):
    Path("prompts.jsonl").write_text('{"prompt": "abc", "answer": "old"}\n{"prompt": "abc"}\n{"prompt": "abcdef"}\n')
    options = ("--model", "model.pt", "--prompts", "prompts.jsonl", "--nproc", 1, "--temperature", 0, "--stop", "")
    last = job_of("min_Generate.py", *options).splitlines()[-1]
    assert LAST_LINE.fullmatch(last).groups()[:2] == ("3", str(3 * (80 - 6)))
    first, second, third = (line["answer"] for line in lines_of(Path("answers.jsonl")))
    assert first == second != third
    model, text = make_model(), list(b"abcdef")
    for _ in range(74):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert third == bytes(text[6:]).decode(errors="replace")


# ---- kills ----------------------------------------------------------------------------------------------------------


def killed_before_its_name(name):
    """The process is killed before the file of that name appears."""
    replace = os.replace

    def kill(temporary, path):
        if path.endswith(name):
            os.kill(os.getpid(), signal.SIGKILL)
        replace(temporary, path)

    return mock.patch("checkpoint.os.replace", kill)


def killed_while_deleting(folder):
    next(Path(folder).iterdir()).unlink()
    os.kill(os.getpid(), signal.SIGKILL)


MOMENTS = {
    "before the folder is there": lambda: killed_in("min_Generate.Path.mkdir"),
    "generating": lambda: killed_in("gpt_generate.generate"),
    "before a write": lambda: killed_in("min_Generate.write_part"),
    "before a part has its name": lambda: killed_before_its_name(".json"),
    "in the second batch": lambda: killed_in("gpt_generate.generate", call=2),
    "after a write": lambda: killed_in("min_Generate.write_part", at_its_end=True),
    "before the merge": lambda: killed_in("min_Generate.merge"),
    "before the output has its name": lambda: killed_before_its_name("answers.jsonl"),
    "before the parts are deleted": lambda: killed_in("min_Generate.shutil.rmtree"),
    "while the parts are deleted": lambda: mock.patch("min_Generate.shutil.rmtree", killed_while_deleting),
}
ON_RANK_0 = ("before the folder", "before the merge", "before the output", "before the parts", "while the parts")
FILES = ("--model", "model.pt", "--prompts", "prompts.jsonl")
EXISTS = "answers.jsonl exists already: use it, or move it and run the same command again"


def killed_worker(local_rank, world_size, args, moment, rank):
    kill = contextlib.nullcontext()
    if local_rank == rank:
        kill = MOMENTS[moment]()
    with kill:
        min_Generate.main_worker(local_rank, world_size, args)


@pytest.mark.guard
@pytest.mark.slow
def test_killed_at_ten_moments_and_resumed_by_other_numbers_of_processes(args_of, capfd):
    """Nothing is generated twice, and the output equals that of an undisturbed run."""
    draw = random.Random(0)
    meshes = [(2, 1), (2, 2), (3, 1), (3, 3), (4, 2)]
    n_kept = 0
    for moment in MOMENTS:
        nproc, tensor = draw.choice(meshes)
        rank = draw.randrange(nproc) // tensor * tensor  # a rank that writes
        if moment.startswith(ON_RANK_0):
            rank = 0
        print(moment, nproc, tensor, rank)
        with pytest.raises(ProcessExitedException):
            launch(args_of("--nproc", nproc, "--tensor", tensor), moment, rank, worker=killed_worker)
        kept = numbers_in(parts_of())
        n_kept += 0 < len(kept) < 24
        if Path("answers.jsonl").exists():
            assert moment.startswith(("before the parts", "while the parts"))
            assert lines_of(Path("answers.jsonl")) == expected_output()
        if moment.startswith(("before the merge", "before the output", "before the parts")):
            assert len(kept) == 24
        capfd.readouterr()
        nproc, tensor = draw.choice([(1, 1), *meshes])
        args = args_of("--nproc", nproc, "--tensor", tensor)
        if moment == "while the parts are deleted":  # so the output cannot be compared with them
            assert exit_message(launch, args) == EXISTS
            shutil.rmtree(parts_of())
        else:
            launch(args)
            last = capfd.readouterr().out.splitlines()[-1]
            n_new = sum(len(answer) for number, answer in enumerate(reference()) if number not in kept)
            assert int(LAST_LINE.fullmatch(last)[2].replace(",", "")) == n_new
        assert lines_of(Path("answers.jsonl")) == expected_output()
        assert [path.name for path in Path().glob("answers*")] == ["answers.jsonl"]
        Path("answers.jsonl").unlink()
    assert n_kept >= 2, "some answers were kept, others were missing"


def test_the_longest_prompts_come_first_with_others_of_their_length(args_of):
    """So they share little padding, and too little memory shows at once."""
    lengths = []
    own_generate = gpt_generate.generate

    def recorded(model, prompts, *args, **kwargs):
        lengths.extend(map(len, prompts))
        return own_generate(model, prompts, *args, **kwargs)

    with mock.patch.object(gpt_generate, "generate", recorded):
        launch(args_of("--nproc", 1))
    assert len(lengths) == 24 and lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1]


# ---- parts ----------------------------------------------------------------------------------------------------------


def started_job(args_of, *options):
    """A job that was killed: 10 answers are there."""
    with mock.patch.object(min_Generate, "merge"):
        launch(args_of("--nproc", 1, *options))
    parts = parts_of()
    for path in list(parts.iterdir())[2:]:
        path.unlink()
    return parts


def n_missing_bytes(kept):
    return sum(len(answer) for number, answer in enumerate(reference()) if number not in kept)


def test_a_job_with_another_model_prompts_or_options_uses_no_part_of_this_one(args_of, capfd):
    parts = started_job(args_of)
    torch.save({"sizes": SIZES, "model": gpt.GPT(gpt.Config(**SIZES)).double().state_dict()}, "other.pt")
    Path("other.jsonl").write_text(Path("prompts.jsonl").read_text().replace("q3", "q4"))
    changes = [("new-bytes", 29), ("stop", "a"), ("stop", ""), ("temperature", 0.5), ("seed", 5), ("seed", 44)]
    changes += [("model", "other.pt"), ("prompts", "other.jsonl")]
    folders = [parts]
    for name, value in changes:
        *_, folder, answers = min_Generate.prepare(SIZES["length"], args_of(f"--{name}", value))
        assert answers == {}
        folders.append(folder)
    assert len(set(folders)) == len(folders)
    for folder in folders[1:]:
        folder.rmdir()
    kept = numbers_in(parts)
    assert 0 < len(kept) < 24, "they are still there"
    launch(args_of("--nproc", 1, "--batch-size", 7))
    assert lines_of(Path("answers.jsonl")) == expected_output()
    last = capfd.readouterr().out.splitlines()[-1]
    assert int(LAST_LINE.fullmatch(last)[2]) == n_missing_bytes(kept), "nothing is generated twice"


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_parts", "spoil"), [("no", "mine"), ("some", "nothing"), ("all", "shorter"), ("all", "another answer")]
)
def test_an_output_that_is_not_of_this_job_is_neither_overwritten_nor_taken_for_it(n_parts, spoil, args_of):
    if n_parts != "no":
        started_job(args_of)
    if n_parts == "all":
        with mock.patch.object(min_Generate, "merge"):
            launch(args_of("--nproc", 1))
    lines = [json.dumps(line) + "\n" for line in expected_output()]
    if spoil == "another answer":
        lines[3] = lines[4]
    texts = {"mine": "mine", "shorter": "".join(lines[:-1]), "another answer": "".join(lines), "nothing": ""}
    Path("answers.jsonl").write_text(texts[spoil])
    with mock.patch.object(gpt_generate, "generate", side_effect=AssertionError):  # nothing is computed
        assert exit_message(launch, args_of("--nproc", 1)) == EXISTS
    assert Path("answers.jsonl").read_text() == texts[spoil]
    assert n_parts == "no" or numbers_in(parts_of()), "they are still there"
    Path("answers.jsonl").unlink()
    launch(args_of("--nproc", 1))
    assert lines_of(Path("answers.jsonl")) == expected_output()


def test_an_output_that_appears_during_the_job_is_not_overwritten(args_of, capfd):
    def answer(*args):
        Path("answers.jsonl").write_text("mine")
        return answer_missing(*args)

    answer_missing = min_Generate.answer_missing
    with mock.patch.object(min_Generate, "answer_missing", answer):
        assert exit_message(launch, args_of("--nproc", 1)) == EXISTS
    assert Path("answers.jsonl").read_text() == "mine"
    Path("answers.jsonl").unlink()
    launch(args_of("--nproc", 1))
    assert lines_of(Path("answers.jsonl")) == expected_output()
    assert LAST_LINE.fullmatch(capfd.readouterr().out.splitlines()[-1])[2] == "0", "nothing is generated twice"


def test_lost_parts_are_one_line(args_of):
    parts = started_job(args_of)
    with mock.patch.object(min_Generate, "answer_missing", lambda *args: 0):
        line = f"{parts} lacks {24 - len(numbers_in(parts))} answers: all machines must share this folder"
        assert exit_message(launch, args_of("--nproc", 1)) == line


DAMAGED = ["", "5", "null", '"ab"', "{}x", '[999, "x"]', '[[999, "x"]]', '[[-1, "x"]]', "[[1, 2]]", '[[1, "x"', "[[]]"]
DAMAGED += ['[["1", "x"]]', '[[[], "x"]]', "[1]", 5000 * "[", "\udcff"]


@pytest.mark.guard
@pytest.mark.slow
def test_a_damaged_part_is_one_line_before_anything_is_computed(args_of):
    *_, folder, _ = min_Generate.prepare(SIZES["length"], args_of("--nproc", 1))
    for text in DAMAGED:
        (folder / "3.json").write_bytes(text.encode(errors="surrogateescape"))
        with mock.patch.object(gpt_generate, "generate", side_effect=AssertionError):
            message = exit_message(launch, args_of("--nproc", 1))
        assert message.startswith(f"{folder}/3.json is damaged"), text[:20]


def test_what_cannot_be_the_folder_or_a_part_is_one_line(args_of):
    *_, folder, _ = min_Generate.prepare(SIZES["length"], args_of("--nproc", 1))
    (folder / "3.json").mkdir()
    assert exit_message(launch, args_of("--nproc", 2)) == f"cannot use {folder}/3.json: Is a directory"
    shutil.rmtree(folder)
    folder.write_text("a file")
    assert exit_message(launch, args_of("--nproc", 1)) == f"cannot use {folder}: File exists"


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("name", ["answers.jsonl", ".json"])
def test_a_full_disk_is_one_line_that_names_no_other_path(name, args_of, capfd):
    """With another --output all would be generated again."""
    fsync = os.fsync

    def full(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"{name}.0.tmp"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with mock.patch("checkpoint.os.fsync", full):
        message = exit_message(launch, args_of("--nproc", 1))
    assert re.fullmatch(rf"cannot save /\S+{name}: No space left on device", message)
    kept = numbers_in(parts_of())
    assert len(kept) == (24 if name == "answers.jsonl" else 0) and not Path("answers.jsonl").exists()
    launch(args_of("--nproc", 1))
    assert lines_of(Path("answers.jsonl")) == expected_output()
    last = capfd.readouterr().out.splitlines()[-1]
    assert int(LAST_LINE.fullmatch(last)[2]) == n_missing_bytes(kept), "nothing is generated twice"


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_wrong_prompts_are_one_line(args_of):
    deep = '{"prompt": "a", "more": ' + 100_000 * "[" + 100_000 * "]" + "}"
    lines = [
        "{",
        "[]",
        '"prompt"',
        "null",
        "{}",
        '{"prompt": 3}',
        '{"prompt": ""}',
        "",
        '{"prompt": "\\ud800"}',
        "\udcff",
    ]
    for line in (*lines, deep, '{"prompt": "a"'):
        Path("prompts.jsonl").write_bytes(b'{"prompt": "a"}\n' + line.encode(errors="surrogateescape") + b"\n")
        assert exit_message(launch, args_of("--nproc", 1)).startswith("prompts.jsonl, line 2: "), line[:50]
    Path("prompts.jsonl").write_text("")
    assert exit_message(launch, args_of("--nproc", 1)) == "prompts.jsonl has no prompts"
    Path("prompts.jsonl").write_text(json.dumps({"prompt": 51 * "a"}) + "\n")
    message = exit_message(launch, args_of("--nproc", 1))
    assert all(words in message for words in ("80 positions", "51 bytes", "--new-bytes 30"))
    assert parts_of() == Path("none")


def test_prompts_may_begin_with_a_byte_order_mark_and_end_lines_as_windows_does(args_of):
    lines = Path("prompts.jsonl").read_bytes()
    Path("prompts.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n"))
    launch(args_of("--nproc", 1))
    assert lines_of(Path("answers.jsonl")) == expected_output()


def test_wrong_models_are_one_line(args_of):
    assert exit_message(launch, args_of("--nproc", 4, "--tensor", 4)).startswith("--tensor 4 does not divide")
    message = "other.pt is not a file that min_GRPO.py --output has written, or it is damaged"
    weights = make_model().state_dict()
    without_heads = {name: value for name, value in SIZES.items() if name != "heads"}
    wrong_sizes = [without_heads, {**SIZES, "width": 12}, {**SIZES, "heads": 5}, {**SIZES, "heads": 0}, [1], 3, None]
    wrong_sizes += [{**SIZES, "heads": 6.0}, {**SIZES, "heads": "6"}, {**SIZES, 5: 5}, {**SIZES, "layers": 1}]
    wrong_weights = [{}, [1], None, torch.ones(3), {5: torch.ones(3)}, {**weights, 5: torch.ones(3)}]
    wrong_weights += [{name: 1 for name in weights}, {name: value.long() for name, value in weights.items()}]
    wrong = [torch.ones(3), [1], {}, {5: 5}, {"model": weights}, {"sizes": SIZES}]
    wrong += [{"sizes": sizes, "model": weights} for sizes in wrong_sizes]
    wrong += [{"sizes": SIZES, "model": each} for each in wrong_weights]
    args = args_of("--nproc", 1)
    args.model = "other.pt"
    for content in wrong:
        torch.save(content, "other.pt")
        line = exit_message(launch, args)
        assert line.startswith(f"{message} (") and "\n" not in line, content
    for content in (b"", b"text", Path("model.pt").read_bytes()[:20_000], Path("prompts.jsonl").read_bytes()):
        Path("other.pt").write_bytes(content)
        assert exit_message(launch, args).startswith(message)
    args = args_of("--nproc", 2)
    args.model = "other.pt"
    assert exit_message(launch, args).startswith(message)
    torch.save(Bomb("exploded"), "other.pt")
    assert exit_message(launch, args_of("--nproc", 1, "--model", "other.pt")).startswith(message)
    assert not Path("exploded").exists()


@pytest.mark.parametrize("output", ["", "folder/", "file/answers.jsonl"])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_loaded(output, main_of, folder):
    Path("folder").mkdir()
    Path("file").write_text("in the way")
    message, stderr = main_of("min_Generate.py", *FILES, "--output", output)
    assert message.startswith("--output: ") and stderr == "" and Path("file").read_text() == "in the way"


def test_mistakes_are_one_line(main_of, folder):
    for option, value, words in (
        ("--model", "no.pt", "'no.pt'"),
        ("--prompts", "", "''"),
        ("--stop", "ab", "'ab'"),
        ("--stop", "Ä", "'Ä'"),
        ("--nproc", "3", "3 is not a multiple of 2, --tensor"),
    ):
        status, line = main_of("min_Generate.py", *FILES, "--tensor", "2", option, value)
        assert status == 2 and f" argument {option}: " in line and words in line and line.count("\n") == 1
    assert main_of("min_Generate.py")[1].endswith("required: --model, --prompts\n")
