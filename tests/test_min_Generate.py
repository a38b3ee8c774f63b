"""min_Generate.py gives what a loop gives that continues one prompt at a time, on any mesh, and after any kill."""

import contextlib
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
from conftest import ROOT, CollectiveCounter, exit_message, float64, killed_in, start, wait_for
from torch.multiprocessing import ProcessExitedException

import distributed as dist
import generate
import gpt
import min_Generate

SIZES = {"layers": 2, "width": 36, "heads": 6, "length": 80}
NEW_BYTES, STOP, TEMPERATURE, SEED = 30, "(", 0.7, 4
OPTIONS = ("--new-bytes", NEW_BYTES, "--stop", STOP, "--temperature", TEMPERATURE, "--seed", SEED, "--batch-size", 5)
LAST_LINE = re.compile(r"(\d+) answers \| ([\d,]+) new bytes \| ([\d,]+) bytes/s")


def make_model():
    """In float64, with large weights: what was read before decides what comes, so a wrong position changes it."""
    with float64():
        torch.manual_seed(1)
        model = gpt.GPT(**SIZES)
    with torch.no_grad():
        for param in model.parameters():
            param *= 3
    return model


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
    model = make_model()
    answers = []
    for number, record in enumerate(make_records()):
        text = list(record["prompt"].encode())
        n_prompt = len(text)
        for drawn in generate.uniform(f"{SEED} {number}", 1, NEW_BYTES)[0].tolist():
            with torch.no_grad():
                shares = (model(torch.tensor([text]))[0, -1] / TEMPERATURE).softmax(-1)
            byte, total = 0, shares[0]
            while total <= drawn:
                byte += 1
                total = total + shares[byte]
            text.append(byte)
            if byte == ord(STOP):
                break
        answers.append(bytes(text[n_prompt:]))
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
    own_exit, own_forward, own_generate = generate.KVCache.__exit__, gpt.GPT.forward, generate.generate
    counter = CollectiveCounter()

    def at_exit(cache, *error):
        for stored in cache.stored.values():
            notes["heads"].add(stored.shape[2])
        own_exit(cache, *error)

    def forward(model, tokens, positions):
        notes["forwards"] += 1
        return own_forward(model, tokens, positions)

    def noted_generate(model, prompts, *rest, **kwargs):
        notes["rows"] += len(prompts)
        with counter:
            return own_generate(model, prompts, *rest, **kwargs)

    with (
        mock.patch.object(generate.KVCache, "__exit__", at_exit),
        mock.patch.object(gpt.GPT, "forward", forward),
        mock.patch.object(generate, "generate", noted_generate),
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


@pytest.mark.parametrize(("nproc", "tensor"), [(1, 1), (2, 2), (3, 1), (4, 2)])
def test_equals_one_prompt_at_a_time(nproc, tensor, args_of, folder):
    check(args_of("--nproc", nproc, "--tensor", tensor), folder)


@pytest.mark.slow
@pytest.mark.parametrize(("nproc", "tensor"), [(2, 1), (3, 3), (8, 2)])
def test_other_meshes_too(nproc, tensor, args_of, folder):
    check(args_of("--nproc", nproc, "--tensor", tensor), folder)


def stubborn_worker(local_rank, world_size, args):
    """Rank 1 computes other logits: other bytes would be chosen, and rows would end at other times."""
    choose = generate.choose

    def choose_otherwise(logits, drawn, temperature):
        return choose(torch.randn_like(logits), drawn, temperature)

    changed = mock.patch.object(generate, "choose", choose_otherwise)
    with changed if local_rank == 1 else contextlib.nullcontext():
        min_Generate.main_worker(local_rank, world_size, args)


def test_a_rank_with_other_logits_does_not_fall_out_of_step(args_of):
    launch(args_of("--nproc", 2, "--tensor", 2), worker=stubborn_worker)
    assert lines_of(Path("answers.jsonl")) == expected_output()


def test_what_it_prints(folder, job_of):
    options = ("--model", "model.pt", "--prompts", "prompts.jsonl", "--nproc", 1, *OPTIONS, "--log-every", 2)
    held, *progress, last = job_of("min_Generate.py", *options).splitlines()
    assert re.fullmatch(r"parameters held: ([\d,]+) of \1 \(1\.000\)", held)
    assert progress == [f"rank 0 has answered {n} of its 24 prompts" for n in (10, 20)]
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


def torn_write(file, numbers, answers):
    """Writes the beginning of a line."""
    file.write(b'[7, "half of an ans')
    os.kill(os.getpid(), signal.SIGKILL)


def killed_while_deleting(folder):
    next(Path(folder).iterdir()).unlink()
    os.kill(os.getpid(), signal.SIGKILL)


MOMENTS = {
    "before the options are written": lambda: killed_in("min_Generate.checkpoint.atomic"),
    "generating": lambda: killed_in("generate.generate"),
    "before a write": lambda: killed_in("min_Generate.append"),
    "in the second batch": lambda: killed_in("generate.generate", call=2),
    "after a write": lambda: killed_in("min_Generate.append", at_its_end=True),
    "within a line": lambda: mock.patch("min_Generate.append", torn_write),
    "before the merge": lambda: killed_in("min_Generate.merge"),
    "before the output has its name": lambda: killed_in("checkpoint._replace", call=2),
    "before the parts are deleted": lambda: killed_in("min_Generate.delete_parts"),
    "when the options alone are left": lambda: killed_in("min_Generate.shutil.rmtree"),
    "while the parts are deleted": lambda: mock.patch("min_Generate.shutil.rmtree", killed_while_deleting),
}
ON_RANK_0 = ("before the options", "before the merge", "before the output", "before the parts", "when the", "while the")
EXISTS = "answers.jsonl exists already: move it, or choose another --output"


def killed_worker(local_rank, world_size, args, moment, rank):
    kill = contextlib.nullcontext()
    if local_rank == rank:
        kill = MOMENTS[moment]()
    with kill:
        min_Generate.main_worker(local_rank, world_size, args)


def numbers_in(parts):
    """The numbers of the prompts whose answers are in the parts."""
    numbers = set()
    for path in parts.glob("*.jsonl"):
        numbers.update(json.loads(line)[0] for line in path.read_bytes().split(b"\n")[:-1])
    return numbers


@pytest.mark.slow
def test_killed_at_ten_moments_and_resumed_by_other_numbers_of_processes(args_of, capfd):
    """Nothing is generated twice, and the output equals that of an undisturbed run."""
    draw = random.Random(0)
    meshes = [(2, 1), (2, 2), (3, 1), (3, 3), (4, 2)]
    parts = Path("answers.jsonl.parts")
    n_kept = 0
    for moment in MOMENTS:
        nproc, tensor = draw.choice(meshes)
        rank = draw.randrange(nproc) // tensor * tensor  # a rank that writes
        if moment.startswith(ON_RANK_0):
            rank = 0
        print(moment, nproc, tensor, rank)
        with pytest.raises(ProcessExitedException):
            launch(args_of("--nproc", nproc, "--tensor", tensor), moment, rank, worker=killed_worker)
        kept = numbers_in(parts)
        n_kept += 0 < len(kept) < 24
        if Path("answers.jsonl").exists():
            assert moment.startswith(("before the parts", "when the", "while the"))
            assert lines_of(Path("answers.jsonl")) == expected_output()
        if moment.startswith(("before the merge", "before the output", "before the parts")):
            assert len(kept) == 24
        capfd.readouterr()
        nproc, tensor = draw.choice([(1, 1), *meshes])
        args = args_of("--nproc", nproc, "--tensor", tensor)
        if moment == "while the parts are deleted":  # without its options the job is done, and cannot be compared
            assert exit_message(launch, args) == EXISTS
            print("answers.jsonl was complete already")
        else:
            launch(args)
        assert lines_of(Path("answers.jsonl")) == expected_output()
        assert not parts.exists() and not list(Path().glob("*.tmp"))
        last = capfd.readouterr().out.splitlines()[-1]
        if last != "answers.jsonl was complete already":
            n_new = sum(len(answer) for number, answer in enumerate(reference()) if number not in kept)
            assert int(LAST_LINE.fullmatch(last)[2].replace(",", "")) == n_new
        Path("answers.jsonl").unlink()
    assert n_kept >= 2, "some answers were kept, others were missing"


@pytest.mark.slow
def test_the_launcher_is_killed_at_random_moments(args_of):
    """The command itself, three times, each time with another number of processes."""
    Path("prompts.jsonl").write_text(20 * Path("prompts.jsonl").read_text())
    launch(args_of("--nproc", 1, "--output", "expected.jsonl", "--batch-size", 64))
    given = ("--model", "model.pt", "--prompts", "prompts.jsonl", *OPTIONS, "--batch-size", 2)
    parts = Path("answers.jsonl.parts")
    draw = random.Random(1)
    for nproc, tensor in ((2, 1), (2, 2), (3, 1)):
        kept = numbers_in(parts)
        goal = len(kept) + draw.randint(1, 50)
        process = start(ROOT / "min_Generate.py", *given, "--nproc", nproc, "--tensor", tensor, cwd=Path.cwd())
        wait_for(lambda goal=goal: len(numbers_in(parts)) >= goal, process)
        process.kill()
        process.communicate()
        assert kept < numbers_in(parts), "and the job was not done"
    launch(args_of("--nproc", 1))
    assert Path("answers.jsonl").read_bytes() == Path("expected.jsonl").read_bytes()


def test_the_longest_prompts_come_first_with_others_of_their_length(args_of):
    """So they share little padding, and too little memory shows at once."""
    lengths = []
    own_generate = generate.generate

    def recorded(model, prompts, *args, **kwargs):
        lengths.extend(map(len, prompts))
        return own_generate(model, prompts, *args, **kwargs)

    with mock.patch.object(generate, "generate", recorded):
        launch(args_of("--nproc", 1))
    assert len(lengths) == 24 and lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1]


# ---- what is refused ------------------------------------------------------------------------------------------------


def started_job(args_of):
    """A job that was killed: some parts are there."""
    with mock.patch.object(min_Generate, "merge"):
        launch(args_of("--nproc", 1))
    parts = Path("answers.jsonl.parts")
    part = parts / "0.jsonl"
    part.write_bytes(b"".join(part.read_bytes().splitlines(keepends=True)[:10]))
    return parts


def test_parts_with_other_options_are_refused_in_one_line(args_of, capfd):
    parts = started_job(args_of)
    message = (
        "answers.jsonl.parts has answers with another --{}: use the same one, delete the folder, or change --output"
    )
    for name, value in (("new-bytes", 29), ("stop", "a"), ("temperature", 0.5), ("seed", 5)):
        assert exit_message(launch, args_of("--nproc", 1, f"--{name}", value)) == message.format(name)
    torch.save({"sizes": SIZES, "model": gpt.GPT(**SIZES).double().state_dict()}, "other.pt")
    assert exit_message(launch, args_of("--nproc", 1, "--model", "other.pt")) == message.format("model")
    Path("other.jsonl").write_text(Path("prompts.jsonl").read_text() + '{"prompt": "a"}\n')
    assert exit_message(launch, args_of("--nproc", 1, "--prompts", "other.jsonl")) == message.format("prompts")
    kept = numbers_in(parts)
    assert len(kept) == 10, "they are still there"
    launch(args_of("--nproc", 1, "--batch-size", 7))
    assert lines_of(Path("answers.jsonl")) == expected_output()
    n_new = sum(len(answer) for number, answer in enumerate(reference()) if number not in kept)
    last = capfd.readouterr().out.splitlines()[-1]
    assert int(LAST_LINE.fullmatch(last)[2]) == n_new, "nothing is generated twice"


def test_an_output_is_not_overwritten(args_of):
    Path("answers.jsonl").write_text("mine")
    assert exit_message(launch, args_of("--nproc", 1)) == EXISTS
    assert Path("answers.jsonl").read_text() == "mine"


@pytest.mark.parametrize("spoil", ["parts", "other prompts", "lines", "not JSON", "nothing"])
def test_an_output_that_somebody_else_has_written_is_not_taken_for_a_complete_one(spoil, args_of):
    """The job was killed half-way. Then someone made a file of that name."""
    parts = started_job(args_of)
    kept = lines_of(parts / "0.jsonl")
    texts = [json.dumps({**record, "answer": ""}) for record in make_records()]
    if spoil == "parts":
        texts = [json.dumps([number, ""]) for number in range(len(texts))]
    if spoil == "other prompts":
        texts[3] = json.dumps({**make_records()[4], "answer": ""})
    if spoil == "lines":
        texts = texts[:20]
    if spoil == "not JSON":
        texts[3] = "answer"
    if spoil == "nothing":
        texts = []
    Path("answers.jsonl").write_text("".join(text + "\n" for text in texts))
    assert exit_message(launch, args_of("--nproc", 1)) == EXISTS
    assert lines_of(parts / "0.jsonl") == kept, "they are still there"


def test_an_output_of_other_options_is_not_taken_for_this_one(args_of):
    """The job was killed while it deleted its parts."""
    with mock.patch.object(min_Generate.shutil, "rmtree"):
        launch(args_of("--nproc", 1))
    assert [path.name for path in Path("answers.jsonl.parts").iterdir()] == ["options.json"]
    message = exit_message(launch, args_of("--nproc", 1, "--seed", 5))
    assert message.startswith("answers.jsonl.parts has answers with another --seed")


def model_of_this_rank(local_rank, world_size, args):
    os.environ["LOCAL_RANK"] = "0"  # each rank is a machine
    args.model = ("model.pt", "other.pt")[local_rank]
    min_Generate.main_worker(local_rank, world_size, args)


def test_machines_with_different_models_are_refused(args_of):
    torch.save({"sizes": SIZES, "model": gpt.GPT(**SIZES).double().state_dict()}, "other.pt")
    message = exit_message(launch, args_of("--nproc", 2), worker=model_of_this_rank)
    assert re.fullmatch(r"(model|other)\.pt differs between machines: copy one file to all", message)


def test_lost_and_damaged_parts_are_one_line(args_of):
    parts = started_job(args_of)
    with mock.patch.object(min_Generate, "answer_missing", lambda *args: 0):
        assert exit_message(launch, args_of("--nproc", 1)) == (
            "answers.jsonl.parts lacks 14 answers: all machines must share this folder"
        )
    (parts / "3.jsonl").write_text("[1, \n")
    message = "answers.jsonl.parts/3.jsonl is damaged: delete it, and run the same command again"
    assert exit_message(launch, args_of("--nproc", 1)) == message


def test_wrong_prompts_are_one_line(args_of):
    for line in ("{", "[]", '"prompt"', "{}", '{"prompt": 3}', '{"prompt": ""}', "", '{"prompt": "\\ud800"}', b"\xff"):
        wrong = line if isinstance(line, bytes) else line.encode()
        Path("prompts.jsonl").write_bytes(b'{"prompt": "a"}\n' + wrong + b"\n")
        message = 'prompts.jsonl, line 2: not a JSON object with a "prompt" that has text'
        assert exit_message(launch, args_of("--nproc", 1)) == message, line
    Path("prompts.jsonl").write_text("")
    assert exit_message(launch, args_of("--nproc", 1)) == "prompts.jsonl has no prompts"
    Path("prompts.jsonl").write_text(json.dumps({"prompt": 51 * "a"}) + "\n")
    assert exit_message(launch, args_of("--nproc", 1)) == (
        "the model has 80 positions, which are too few for the longest prompt of 51 bytes and --new-bytes 30"
    )
    assert not Path("answers.jsonl.parts").exists()


def test_wrong_models_are_one_line(args_of):
    assert exit_message(launch, args_of("--nproc", 4, "--tensor", 4)) == (
        "--tensor 4 does not divide the model's 6 heads"
    )
    message = "other.pt is not a file that min_GRPO.py --save has written, or it is damaged"
    shutil.copy("prompts.jsonl", "other.pt")
    assert exit_message(launch, args_of("--nproc", 1, "--model", "other.pt")) == message
    for wrong in ({"model": {}}, [1], {"sizes": {**SIZES, "width": 12}, "model": make_model().state_dict()}):
        torch.save(wrong, "other.pt")
        assert exit_message(launch, args_of("--nproc", 1, "--model", "other.pt")) == message
    Path("other.pt").write_bytes(Path("model.pt").read_bytes()[:20_000])
    assert exit_message(launch, args_of("--nproc", 1, "--model", "other.pt")) == message


def test_a_full_disk_is_one_line():
    with open("/dev/full", "ab", buffering=0) as file:
        assert exit_message(min_Generate.append, file, [0], [b"a"]) == (
            "cannot write /dev/full: No space left on device: make room, and run the same command again"
        )
    short = mock.Mock()
    short.configure_mock(name="part", **{"write.return_value": 3})
    assert exit_message(min_Generate.append, short, [0], [b"a"]) == (
        "cannot write part: the disk is full: make room, and run the same command again"
    )


def test_mistakes_are_one_line(main_of, folder):
    start = "min_Generate.py: error: argument "
    files = ("--model", "model.pt", "--prompts", "prompts.jsonl")
    cases = [
        ((), "--model: give a model's file; `python min_GRPO.py --save model.pt` makes one"),
        (files[:2], '--prompts: give a file of lines like {"prompt": "31524="}'),
        (("--model", "no.pt", *files[2:]), "--model: there is no file no.pt"),
        ((*files[:2], "--prompts", "no"), "--prompts: there is no file no"),
        ((*files, "--stop", "ab"), "--stop: 'ab' is not one byte"),
        ((*files, "--stop", "Ä"), "--stop: 'Ä' is not one byte"),
        ((*files, "--nproc", "3", "--tensor", "2"), "--nproc: 3 is not a multiple of 2, --tensor"),
    ]
    for options, message in cases:
        assert main_of("min_Generate.py", *options) == (2, f"{start}{message}\n")
