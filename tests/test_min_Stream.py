"""Whatever the numbers of processes, and wherever a run was killed: every document once, in the same order."""

import contextlib
import functools
import itertools
import json
import os
import random
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformer
from conftest import (
    Left,
    agreed_message,
    exit_message,
    float64,
    killed_in,
    leaving_is_an_error,
    on_processes,
    slow,
)

import distributed as dist
import min_Stream
import spawn

BATCH = 12
BUFFER = 16
STEPS = 12
LENGTH = 16
SIZES = {"many": (9, 0, 30, 1, 17), "single": (50,)}  # documents of each shard: fewer shards than processes
CASES = [("SGD", 0, "many"), ("AdamW", 1, "many"), ("SGD", 2, "many"), ("SGD", 2, "single")]


def text_of(number):
    """Begins with its number, and has 7 to 26 bytes: some are shorter than a row."""
    draw = random.Random(number)
    return f"{number:03}" + "".join(draw.choices("abc", k=draw.randint(4, 23)))


def write_shards(name, sizes=SIZES["many"]):
    """Documents 0, 1, 2, …; some shards have blank lines, or end without a line end."""
    folder = Path(name).absolute()
    if dist.is_primary():
        folder.mkdir()
        numbers = itertools.count()
        for shard, size in enumerate(sizes):
            lines = []
            for number in itertools.islice(numbers, size):
                document = {"text": text_of(number), "source": "é"}
                lines.append(json.dumps(document, ensure_ascii=shard % 2 == 0))
            if shard == 2:
                lines.insert(3, "")
            end = "\n" if shard != 4 and lines else ""
            (folder / f"{shard}.jsonl").write_text("\n".join(lines) + end)
    dist.barrier()
    return folder


def shards_of(folder):
    return min_Stream.open_shards(sorted(folder.glob("*.jsonl")))


def arguments(folder, nprocs=1, num_workers=0, **changes):
    values = {"layers": 1, "width": 16, "heads": 2, "length": LENGTH, "global_batch_size": BATCH, "steps": STEPS}
    values |= {"data_dir": folder, "buffer": BUFFER, "snapshot_path": None, "save_every": 3, "num_workers": num_workers}
    return transformer.arguments(nprocs, **{**values, **changes})


# ---- one process of plain PyTorch, all documents in memory ----------------------------------------------------------


def expected_order(sizes, n, seed=3):
    """The numbers of the first n documents."""
    result = []
    for epoch in range(n // sum(sizes) + 1):
        shards, first = [], 0
        for size in sizes:
            shards.append(list(range(first, first + size)))
            first += size
        random.Random(repr((seed, epoch))).shuffle(shards)
        documents = [number for shard in shards for number in shard]
        for block in range(0, len(documents), BUFFER):
            part = documents[block : block + BUFFER]
            random.Random(repr((seed, epoch, block // BUFFER))).shuffle(part)
            result += part
    return result[:n]


@functools.cache
def reference(optimizer, name, steps=STEPS):
    """Every step's loss, and the parameters."""
    args = arguments(None, steps=steps)
    order = expected_order(SIZES[name], steps * BATCH)

    def batch(step, *_):
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        targets = torch.full((BATCH, LENGTH), -100)
        for row, number in enumerate(order[step * BATCH : (step + 1) * BATCH]):
            text = text_of(number).encode()[: LENGTH + 1]
            for place in range(len(text) - 1):
                tokens[row, place], targets[row, place] = text[place], text[place + 1]
        return tokens, targets

    with float64():
        model = transformer.make_model(args)
    return transformer.train_alone(model, optimizer, args, part_of=batch)


# ---- the script -----------------------------------------------------------------------------------------------------


@on_processes(2, *slow(1, 3, 4))
@pytest.mark.parametrize(("optimizer", "num_workers", "name"), CASES)
@float64()
def test_the_order_depends_on_neither_ranks_nor_loader_processes(optimizer, num_workers, name):
    """All steps would differ if one trained on another document."""
    args = arguments(write_shards(name, SIZES[name]), dist.get_world_size(), num_workers)
    result = transformer.run_main_worker(min_Stream, args, optimizer)
    parameters = transformer.full_parameters(result.model)
    transformer.assert_equal(result.losses, parameters, reference(optimizer, name))


# ---- kills ----------------------------------------------------------------------------------------------------------


def killed_worker(local_rank, world_size, args, victim, n_steps):
    """The script in float64; rank `victim` is killed in its step number `n_steps`."""
    is_killed = local_rank == victim
    with float64(), killed_in("min_Stream.sum_of_losses", n_steps) if is_killed else contextlib.nullcontext():
        min_Stream.main_worker(local_rank, world_size, args)


def train_until_killed(args, victim, n_steps):
    with contextlib.nullcontext() if victim is None else pytest.raises(spawn.ProcessExitedException):
        dist.launch(killed_worker, args, victim, n_steps, nprocs=args.nproc)
    return torch.load(args.snapshot_path, weights_only=True) if os.path.exists(args.snapshot_path) else {"step": 0}


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("kills, steps", [(2, 30), pytest.param(10, 60, marks=pytest.mark.timeout(400))])
def test_killed_and_resumed_by_other_numbers_of_processes(kills, steps, tmp_path, capfd):
    folder = write_shards(tmp_path / "many")
    draw = random.Random(kills)
    positions = [0]
    for run in range(kills + 1):
        nprocs, num_workers = draw.choice([2, 3, 4]), draw.choice([0, 1, 2])
        args = arguments(folder, nprocs, num_workers, steps=steps, snapshot_path=str(tmp_path / "snapshot.pt"))
        victim, n_steps = draw.randrange(nprocs), draw.randint(2, 3 * steps // (2 * kills))
        snapshot = train_until_killed(args, None if run == kills else victim, n_steps)
        resumed = re.search(r"Resuming at document ([\d,]+)\n", capfd.readouterr().out)
        assert (int(resumed[1].replace(",", "")) if resumed else 0) == positions[-1]
        positions.append(snapshot["step"])
    print(positions)
    assert 0 < positions[-2] < positions[-1] == steps * BATCH
    assert all(position % (3 * BATCH) == 0 for position in positions)
    for name, value in reference("AdamW", "many", steps)[1].items():
        assert (snapshot["model"][name] - value).abs().max() <= 1e-9, name


def test_killed_and_resumed_by_as_many_processes_it_ends_bit_for_bit_alike(tmp_path):
    folder = write_shards(tmp_path / "many")
    models = []
    for name, victims in (("whole", [None]), ("killed", [1, None])):
        args = arguments(folder, 3, 1, snapshot_path=str(tmp_path / f"{name}.pt"))
        for victim in victims:
            snapshot = train_until_killed(args, victim, n_steps=8)
        models.append(snapshot["model"])
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


# ---- reading --------------------------------------------------------------------------------------------------------


def bytes_read():
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def test_resuming_far_in_reads_less_than_a_shard(tmp_path):
    for shard, n_documents in enumerate((3000, 4000, 2000)):
        lines = [json.dumps({"text": f"{number:03}" + 500 * "x"}) + "\n" for number in range(n_documents)]
        (tmp_path / f"{shard}.jsonl").write_text("".join(lines))
    shards = shards_of(tmp_path)
    args = arguments(None, steps=10**9, buffer=1000)
    for position in (0, 1_234_567 * BATCH):
        before = bytes_read()
        next(iter(min_Stream.make_loader(min_Stream.Stream(shards, args), position, args)))
        assert bytes_read() - before < min(path.stat().st_size for path, _ in shards) / 5


@on_processes(3)
def test_at_the_start_each_shard_is_read_by_one_rank():
    folder = write_shards("many")
    if dist.is_primary():
        (folder / "large.jsonl").write_text('{"text": ""}\n' + 10**6 * " ")
    dist.barrier()
    alone = [(path, min_Stream.find_documents(path)) for path in sorted(folder.glob("*.jsonl"))]
    assert [len(places) - 1 for _, places in alone] == [*SIZES["many"], 1]
    before = bytes_read()
    shards = shards_of(folder)
    assert (bytes_read() - before > 10**6) == (dist.get_rank() == 2), "the sixth of six"
    assert shards == alone
    assert sorted(folder.iterdir()) == [path for path, _ in shards], "nothing is written beside the shards"


def test_a_document_is_read_as_it_stands(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = ['\n{"text": "\\u00e9\\ud800"}', "", '  {"text": ""}  ', '{"text": "last", "other": [1]}']
    path.write_text("\n".join(lines))
    [(path_there, places)] = shards_of(tmp_path)
    assert path_there == path and len(places) == 4
    texts = [min_Stream.read_document(path, start, end) for start, end in itertools.pairwise(places)]
    assert texts == ["é?".encode(), b"", b"last"]
    tokens, targets = min_Stream.pad_texts([*texts, b"abcdef"], 3)
    assert tokens.tolist() == [[0xC3, 0xA9, ord("?")], [0, 0, 0], [*b"las"], [*b"abc"]]
    assert targets.tolist() == [[0xA9, ord("?"), -100], [-100, -100, -100], [*b"ast"], [*b"bcd"]]


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_a_line_that_is_no_document(tmp_path):
    """It ends the job when it is read, and names the file."""
    path = tmp_path / "0.jsonl"
    for line in ('{"text": "abc', '{"txt": "abc"}', '{"text": 1}', '["text"]', "abc"):
        path.write_text('{"text": "abc"}\n' + line)
        _, start, end = min_Stream.find_documents(path)
        message = exit_message(min_Stream.read_document, path, start, end)
        assert message.startswith(f"{path}: at byte 16 is no JSON object")


def test_shards_without_documents(tmp_path):
    expected = f"--data-dir: {tmp_path} has no .jsonl file with a document"
    assert exit_message(min_Stream.main_worker, 0, 1, arguments(tmp_path)) == expected
    (tmp_path / "a.jsonl").write_text("\n\n")
    assert exit_message(min_Stream.main_worker, 0, 1, arguments(tmp_path)) == expected


def test_it_saves_every_so_many_steps_and_at_the_end(tmp_path):
    folder = write_shards(tmp_path / "many")
    args = arguments(folder, steps=5, save_every=2, snapshot_path=str(tmp_path / "snapshot.pt"))
    assert transformer.saves_of(min_Stream, args) == [2 * BATCH, 4 * BATCH, 5 * BATCH]


def test_what_the_order_depends_on_must_not_change(tmp_path):
    folder = write_shards(tmp_path / "many")
    path = str(tmp_path / "snapshot.pt")
    args = arguments(folder, steps=3, snapshot_path=path)
    min_Stream.main_worker(0, 1, args)

    def resume(**changes):
        """Which setting is refused."""
        changed = arguments(folder, steps=4, snapshot_path=path, **changes)
        line = exit_message(min_Stream.main_worker, 0, 1, changed)
        return re.match(rf"{re.escape(path)} was saved with (.*?): ", line)[1]

    checksum = r"shards \(checksum\) \d+, not \d+"
    assert resume(seed=4) == "--seed 3, not 4"
    assert resume(clip=0.25) == f"--clip {args.clip}, not 0.25"
    assert resume(buffer=8) == "--buffer 16, not 8"
    (folder / "5.jsonl").write_text('{"text": "new"}')
    assert resume() == "documents 57, not 58"
    (folder / "5.jsonl").unlink()
    shard = (folder / "2.jsonl").read_text()
    (folder / "2.jsonl").write_text(shard + " ")
    assert re.fullmatch(checksum, resume())
    (folder / "2.jsonl").rename(folder / "6.jsonl")
    (folder / "6.jsonl").write_text(shard)
    assert re.fullmatch(checksum, resume())


def test_resumes_with_another_batch_size(tmp_path, capsys):
    folder = write_shards(tmp_path / "many")
    with mock.patch.object(min_Stream, "make_loader", wraps=min_Stream.make_loader) as loader:
        for sizes in ({"steps": 2}, {"steps": 7, "global_batch_size": 5}, {"steps": 7, "global_batch_size": 5}):
            min_Stream.main_worker(0, 1, arguments(folder, snapshot_path=str(tmp_path / "snapshot.pt"), **sizes))
    assert [call.args[1] for call in loader.call_args_list] == [0, 2 * BATCH, 2 * BATCH + 15], "it begins to read there"
    positions = re.findall(r"^Resuming at document (\d+)$", capsys.readouterr().out, re.M)
    assert positions == [str(2 * BATCH), str(2 * BATCH + 15)], "the last batch begins before 7 * 5"


def test_a_sigterm_during_the_last_step_does_not_stop_the_job(tmp_path):
    args = arguments(write_shards(tmp_path / "many"), snapshot_path=str(tmp_path / "snapshot.pt"), steps=1)
    with leaving_is_an_error(agreed=lambda preemption: True):
        min_Stream.main_worker(0, 1, args)
        args.steps = 3
        with pytest.raises(Left):
            min_Stream.main_worker(0, 1, args)
    assert torch.load(args.snapshot_path, weights_only=True)["step"] == 2 * BATCH


@on_processes(2)
def test_ranks_that_see_other_shards():
    """Fewer of them, or another file of the same name."""
    many, fewer, longer = write_shards("many"), write_shards("fewer", SIZES["many"][:-1]), write_shards("longer")
    with open(longer / "3.jsonl", "a") as shard:
        shard.write("\n")
    for other in (fewer, longer):
        folder = other if dist.get_rank() == 1 else many
        message = agreed_message(shards_of, folder)
        assert message.startswith("the list of shards of rank 1 differs from rank 0's")


# ---- the standard library -------------------------------------------------------------------------------------------


def test_without_a_folder_each_class_and_function_of_the_library_is_a_document(tmp_path, capsys):
    documents = [b"class A:\n    def f(self):\n        pass\n\n\nA.b = 1\n\n", b"def g():\n    pass\n\xff\n"]
    (tmp_path / "a.py").write_bytes(b"import x\n\n\n" + b"".join(documents))
    (tmp_path / "b.py").write_text("x = 1\n")
    (path, places), (_, none) = min_Stream.open_shards(sorted(tmp_path.glob("*.py")))
    assert [min_Stream.read_document(path, *pair) for pair in itertools.pairwise(places)] == documents
    assert len(none) == 1, "the end of the file alone"
    min_Stream.main_worker(0, 1, arguments(None, steps=1))
    n_shards, n_documents = re.match(r"([\d,]+) shards of ([\d,]+) documents\n", capsys.readouterr().out).groups()
    assert int(n_shards) > 100 and int(n_documents.replace(",", "")) > 1000
