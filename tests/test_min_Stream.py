"""Whatever the numbers of processes, and wherever a run was killed: every document once, in the same order."""

import functools
import itertools
import json
import os
import random
import re
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformer
from conftest import exit_message, float64, slow, slow_clock
from torch.nn import functional as F

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


def write_shards(folder, sizes):
    """Documents 0, 1, 2, …; some shards have blank lines, or end without a line end."""
    folder.mkdir()
    number = 0
    for shard, size in enumerate(sizes):
        lines = []
        for _ in range(size):
            lines.append(json.dumps({"text": text_of(number), "source": "é"}, ensure_ascii=shard % 2 == 0))
            number += 1
        if shard == 2:
            lines.insert(3, "")
        end = "\n" if shard != 4 and lines else ""
        (folder / f"{shard}.jsonl").write_text("\n".join(lines) + end)
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
    args = arguments(None)
    order = expected_order(SIZES[name], steps * BATCH)
    with float64():
        model = transformer.make_model(args)
        before = transformer.full_parameters(model)
        optimizer = transformer.make_optimizer(optimizer, model.parameters(), args.lr)
        losses = []
        for step in range(steps):
            tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
            targets = torch.full((BATCH, LENGTH), -100)
            for row, number in enumerate(order[step * BATCH : (step + 1) * BATCH]):
                text = text_of(number).encode()[: LENGTH + 1]
                for place in range(len(text) - 1):
                    tokens[row, place], targets[row, place] = text[place], text[place + 1]
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            losses.append(transformer.take_step(model, optimizer, loss)[0])
        assert losses[-1] < losses[0] - 0.5, "the reference must learn, or equality means little"
        after = transformer.full_parameters(model)
        moved = [(after[name] - before[name]).abs().max() > 1e-4 for name in before]
        assert all(moved)
    return torch.stack(losses), after


# ---- the script -----------------------------------------------------------------------------------------------------


def watched(on_batch):
    """A patch that calls on_batch(numbers) with the documents of each local batch on which the script trains."""
    own_sum = min_Stream.sum_of_losses

    def sum_of_losses(model, tokens, targets):
        on_batch([int(bytes(row[:3].tolist())) for row in tokens])
        return own_sum(model, tokens, targets)

    return mock.patch.object(min_Stream, "sum_of_losses", sum_of_losses)


def train(optimizer, num_workers, folder):
    """Losses, parameters, and the documents that this rank has trained on, step by step."""
    batches = []
    args = arguments(Path(folder), dist.get_world_size(), num_workers)
    with watched(batches.append):
        result = transformer.run_main_worker(min_Stream, args, optimizer)
    return result.losses, transformer.full_parameters(result.model), batches


@pytest.mark.parametrize("nprocs", [2, *slow(1, 3, 4)])
def test_the_order_depends_on_neither_ranks_nor_loader_processes(nprocs, tmp_path):
    for name, sizes in SIZES.items():
        write_shards(tmp_path / name, sizes)
    cases = [(optimizer, num_workers, str(tmp_path / name)) for optimizer, num_workers, name in CASES]
    ranks = transformer.train_on(nprocs, train, cases, tmp_path)
    for case, (optimizer, num_workers, name) in enumerate(CASES):
        print(nprocs, optimizer, num_workers, name)
        steps = zip(*(results[case][2] for results in ranks), strict=True)
        order = [number for shares in steps for share in shares for number in share]
        assert order == expected_order(SIZES[name], STEPS * BATCH)
        for results in ranks:
            losses, parameters, _ = results[case]
            transformer.assert_equal(losses, parameters, reference(optimizer, name))


def test_each_epoch_has_every_document_once_in_another_order(tmp_path):
    stream = min_Stream.Stream(shards_of(write_shards(tmp_path / "many", SIZES["many"])), arguments(None))
    n = sum(SIZES["many"])
    every = [(shard, line) for shard, size in enumerate(SIZES["many"]) for line in range(size)]
    epochs = []
    for epoch in range(3):
        epochs.append([stream.locate(epoch * n + place) for place in range(n)])
        assert sorted(epochs[-1]) == every
    assert epochs[0] != epochs[1] != epochs[2]
    assert [stream.locate(place) for place in range(n)] == epochs[0], "to go back is possible too"


# ---- kills ----------------------------------------------------------------------------------------------------------


def killed_worker(local_rank, world_size, args, log, victim, n_steps):
    """The script in float64; rank `victim` is killed in its step number `n_steps`."""
    n_batches = 0

    def on_batch(numbers):
        nonlocal n_batches
        n_batches += 1
        if local_rank == victim and n_batches == n_steps:
            os.kill(os.getpid(), signal.SIGKILL)
        with open(f"{log}.{local_rank}", "a") as file:
            print(*numbers, file=file)

    with float64(), watched(on_batch):
        min_Stream.main_worker(local_rank, world_size, args)


def run_until_killed(args, log, victim=None, n_steps=None):
    """Returns the documents of each whole step."""
    if victim is None:
        dist.launch(killed_worker, args, log, victim, n_steps, nprocs=args.nproc)
    else:
        with pytest.raises(spawn.ProcessExitedException):
            dist.launch(killed_worker, args, log, victim, n_steps, nprocs=args.nproc)
    shares = []
    for rank in range(args.nproc):
        path = Path(f"{log}.{rank}")
        lines = path.read_text().splitlines() if path.exists() else []
        shares.append([[int(number) for number in line.split()] for line in lines])
    return [[number for share in step for number in share] for step in zip(*shares, strict=False)]


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("kills, steps", [(2, 30), pytest.param(10, 60, marks=pytest.mark.timeout(400))])
def test_killed_and_resumed_by_other_numbers_of_processes(kills, steps, tmp_path, capfd):
    folder = write_shards(tmp_path / "many", SIZES["many"])
    draw = random.Random(kills)
    trained, runs = [], []
    for run in range(kills + 1):
        nprocs, num_workers = draw.choice([2, 3, 4]), draw.choice([0, 1, 2])
        args = arguments(folder, nprocs, num_workers, steps=steps, snapshot_path=str(tmp_path / "snapshot.pt"))
        victim, n_steps = draw.randrange(nprocs), draw.randint(2, 3 * steps // (2 * kills))
        if run == kills:
            victim = n_steps = None
        batches = run_until_killed(args, tmp_path / str(run), victim, n_steps)
        resumed = re.search(r"Resuming at document ([\d,]+)\n", capfd.readouterr().out)
        position = int(resumed[1].replace(",", "")) if resumed else 0
        assert position % (3 * BATCH) == 0 and position <= len(trained)
        runs.append((nprocs, num_workers, position, n_steps))
        del trained[position:]  # what was trained since the last snapshot was lost with the killed run
        trained += [number for batch in batches for number in batch]
    print(runs)
    assert runs[-1][2] > 0
    assert trained == expected_order(SIZES["many"], steps * BATCH)
    snapshot = torch.load(tmp_path / "snapshot.pt", weights_only=True)
    assert snapshot["step"] == steps * BATCH
    for name, value in reference("AdamW", "many", steps)[1].items():
        assert (snapshot["model"][name] - value).abs().max() <= 1e-9, name


def test_killed_and_resumed_by_as_many_processes_it_ends_bit_for_bit_alike(tmp_path):
    folder = write_shards(tmp_path / "many", SIZES["many"])
    models = []
    for name, victim in (("whole", None), ("killed", 1)):
        args = arguments(folder, 3, 1, snapshot_path=str(tmp_path / f"{name}.pt"))
        if victim is not None:
            run_until_killed(args, tmp_path / name, victim, n_steps=8)
        run_until_killed(args, tmp_path / name)
        models.append(torch.load(args.snapshot_path, weights_only=True)["model"])
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


# ---- reading --------------------------------------------------------------------------------------------------------


def bytes_read():
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="counts what a process reads as Linux does")
def test_resuming_far_in_reads_less_than_a_shard(tmp_path):
    for shard, n_documents in enumerate((3000, 4000, 2000)):
        lines = [json.dumps({"text": f"{number:03}" + 500 * "x"}) + "\n" for number in range(n_documents)]
        (tmp_path / f"{shard}.jsonl").write_text("".join(lines))
    shards = shards_of(tmp_path)
    args = arguments(None, steps=10**9, buffer=1000)
    for position in (0, 1_234_567 * BATCH):
        before, start = bytes_read(), time.perf_counter()
        next(iter(min_Stream.make_loader(min_Stream.Stream(shards, args), position, args)))
        read = bytes_read() - before
        print(f"position {position}: {read} bytes, {1000 * (time.perf_counter() - start):.1f} ms")
        assert read < min(path.stat().st_size for path, _ in shards) / 5


def count_read(folder):
    """The names of the shards that this rank reads at the start, and what it knows of all of them."""
    names = []
    own_find = min_Stream.find_documents

    def find(path):
        names.append(path.name)
        return own_find(path)

    with mock.patch.object(min_Stream, "find_documents", find):
        shards = shards_of(Path(folder))
    return names, [(path.name, places.tolist()) for path, places in shards]


def test_at_the_start_each_shard_is_read_by_one_rank(tmp_path):
    folder = write_shards(tmp_path / "many", SIZES["many"])
    ranks = transformer.train_on(3, count_read, [(str(folder),)], tmp_path)
    names = [result[0][0] for result in ranks]
    assert names == [["0.jsonl", "3.jsonl"], ["1.jsonl", "4.jsonl"], ["2.jsonl"]]
    _, alone = count_read(folder)
    assert [result[0][1] for result in ranks] == [alone] * 3
    assert [len(places) - 1 for _, places in alone] == list(SIZES["many"])
    assert sorted(os.listdir(folder)) == [name for name, _ in alone], "nothing is written beside the shards"


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
    folder = write_shards(tmp_path / "many", SIZES["many"])
    before = (folder / "0.jsonl").read_text()
    for last_line in ('{"text": "abc', '{"txt": "abc"}', '{"text": 1}', '["text"]', "abc"):
        (folder / "0.jsonl").write_text(before + last_line)
        assert exit_message(shards_of, folder).startswith(f"{folder}/0.jsonl: line 10 is not a JSON object")


def read_broken_share(folder):
    path = Path(folder) / "2.jsonl"
    if dist.get_rank() == 0:
        path.write_text(path.read_text() + "abc")
    dist.barrier()
    return exit_message(shards_of, Path(folder))


def test_a_line_that_is_no_document_ends_the_ranks_that_did_not_read_it(tmp_path):
    folder = write_shards(tmp_path / "many", SIZES["many"])
    for (message,) in transformer.train_on(2, read_broken_share, [(str(folder),)], tmp_path):
        assert message.startswith(f"{folder}/2.jsonl: line 32 is not a JSON object")


def test_a_shard_that_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "a.jsonl").mkdir()
    assert exit_message(shards_of, tmp_path) == f"cannot read {tmp_path}/a.jsonl: Is a directory"
    (tmp_path / "a.jsonl").rmdir()
    (tmp_path / "b.jsonl").symlink_to("nowhere")
    assert exit_message(shards_of, tmp_path) == f"cannot read {tmp_path}/b.jsonl: No such file or directory"


def test_a_shard_that_changes_after_the_start_is_one_line(tmp_path):
    path = tmp_path / "0.jsonl"
    path.write_text('{"text": "abc"}\n')
    places = min_Stream.find_documents(path)
    assert min_Stream.read_document(path, *places) == b"abc"
    path.write_text("not a document\n")
    message = exit_message(min_Stream.read_document, path, *places)
    assert message.startswith(f"{path}: what begins at byte 0 is not a JSON object")


def test_shards_without_documents(tmp_path):
    expected = f"--data-dir: {tmp_path} has no .jsonl file with a document"
    assert exit_message(min_Stream.main_worker, 0, 1, arguments(tmp_path)) == expected
    (tmp_path / "a.jsonl").write_text("\n\n")
    assert exit_message(min_Stream.main_worker, 0, 1, arguments(tmp_path)) == expected


def test_it_saves_every_so_many_steps_and_at_the_end(tmp_path):
    folder = write_shards(tmp_path / "many", SIZES["many"])
    args = arguments(folder, steps=5, save_every=2, snapshot_path=str(tmp_path / "snapshot.pt"))
    assert transformer.saves_of(min_Stream, args) == [2 * BATCH, 4 * BATCH, 5 * BATCH]


def test_the_speed_counts_documents(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(min_Stream, "time", slow_clock())
    folder = write_shards(tmp_path / "many", SIZES["many"])
    min_Stream.main_worker(0, 1, arguments(folder, steps=5, log_every=3))
    speeds = re.findall(r" ([\d,]+) documents/s", capsys.readouterr().out)
    assert speeds == [f"{3 * BATCH / 2:,.0f}", f"{2 * BATCH / 2:,.0f}"]


def test_a_batch_that_the_ranks_cannot_share_is_refused(tmp_path, monkeypatch):
    """Its last documents would be left out."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with pytest.raises(dist.DistributedError, match=r"^10 is not a multiple of 4, the number of equal shares$"):
        min_Stream.Stream([], arguments(tmp_path, global_batch_size=10))


def test_what_the_order_depends_on_must_not_change(tmp_path):
    folder = write_shards(tmp_path / "many", SIZES["many"])
    path = str(tmp_path / "snapshot.pt")
    args = arguments(folder, steps=3, snapshot_path=path)
    min_Stream.main_worker(0, 1, args)

    def resume(**changes):
        """Which setting is refused."""
        changed = arguments(folder, steps=4, snapshot_path=path, **changes)
        line = exit_message(min_Stream.main_worker, 0, 1, changed)
        return re.match(rf"{re.escape(path)} was saved with (.*?): ", line)[1]

    digest = r"digest of the shards [0-9a-f]{12}, not [0-9a-f]{12}"
    assert resume(seed=4) == "--seed 3, not 4"
    assert resume(clip=0.25) == f"--clip {args.clip}, not 0.25"
    assert resume(buffer=8) == "--buffer 16, not 8"
    (folder / "5.jsonl").write_text('{"text": "new"}')
    assert resume() == "documents 57, not 58"
    (folder / "5.jsonl").unlink()
    shard = (folder / "2.jsonl").read_text()
    (folder / "2.jsonl").write_text(shard + " ")
    assert re.fullmatch(digest, resume())
    (folder / "2.jsonl").rename(folder / "6.jsonl")
    (folder / "6.jsonl").write_text(shard)
    assert re.fullmatch(digest, resume())


def test_resumes_with_another_batch_size(tmp_path):
    folder = write_shards(tmp_path / "many", SIZES["many"])
    trained = []
    with watched(trained.extend):
        for sizes in ({"steps": 2}, {"steps": 7, "global_batch_size": 5}, {"steps": 7, "global_batch_size": 5}):
            args = arguments(folder, snapshot_path=str(tmp_path / "snapshot.pt"), **sizes)
            min_Stream.main_worker(0, 1, args)
    assert trained == expected_order(SIZES["many"], 2 * BATCH + 15)  # the last batch begins before 7 * 5
    args = arguments(folder, snapshot_path=str(tmp_path / "snapshot.pt"), global_batch_size=5, steps=4)
    line = exit_message(min_Stream.main_worker, 0, 1, args)
    assert line == f"{tmp_path}/snapshot.pt is at document {2 * BATCH + 15}, beyond --steps 4"


def test_a_sigterm_during_the_last_step_does_not_stop_the_job(tmp_path, monkeypatch):
    leave = mock.Mock()
    monkeypatch.setattr("checkpoint.Preemption.agreed", lambda preemption: True)
    monkeypatch.setattr("checkpoint.Preemption.leave", leave)
    folder = write_shards(tmp_path / "many", SIZES["many"])
    min_Stream.main_worker(0, 1, arguments(folder, snapshot_path=str(tmp_path / "snapshot.pt"), steps=2))
    assert leave.call_count == 1, "after the first step, as a process that has not ended goes on here"


def see_other_data(first, second):
    folder = Path(second if dist.get_rank() == 1 else first)
    args = arguments(folder, dist.get_world_size())
    return exit_message(min_Stream.main_worker, dist.get_local_rank(), dist.get_world_size(), args)


def test_ranks_that_see_other_shards(tmp_path):
    """Whichever rank sees fewer of them, or another file of the same name."""
    write_shards(tmp_path / "many", SIZES["many"])
    write_shards(tmp_path / "fewer", SIZES["many"][:-1])
    write_shards(tmp_path / "longer", SIZES["many"])
    with open(tmp_path / "longer" / "3.jsonl", "a") as shard:
        shard.write("\n")
    for other, rank in (("fewer", 1), ("longer", 0)):  # rank 1 reads shard 3 of many, as it reads 1.jsonl and 3.jsonl
        folders = [str(tmp_path / "many"), str(tmp_path / other)]
        ranks = transformer.train_on(2, see_other_data, [folders, folders[::-1]], tmp_path)
        line = "rank {} does not see the shards that other ranks have read"
        assert [messages[0] for messages in ranks] == 2 * [line.format(rank)]
        assert len({messages[1] for messages in ranks}) == 1 and ranks[0][1].startswith("rank ")


# ---- the standard library -------------------------------------------------------------------------------------------


def test_without_a_folder_each_class_and_function_of_the_library_is_a_document(tmp_path, monkeypatch):
    source = b"import x\n\n\nclass A:\n    def f(self):\n        pass\n\n\nA.b = 1\n\ndef g():\n    pass\n\xff\n"
    (tmp_path / "a.py").write_bytes(source)
    (tmp_path / "b.py").write_text("x = 1\n")
    (tmp_path / "c.py").write_text("def h(): pass")
    monkeypatch.setattr(min_Stream.gpt, "LIBRARY", tmp_path)
    read = []
    own_read = min_Stream.read_document

    def read_document(*args):
        read.append(own_read(*args))
        return read[-1]

    with mock.patch.object(min_Stream, "read_document", read_document):
        min_Stream.main_worker(0, 1, arguments(None, steps=3, global_batch_size=3))
    class_a, g = source[source.index(b"class A") : source.index(b"def g")], source[source.index(b"def g") :]
    epochs = [sorted(read[first : first + 3]) for first in range(0, len(read), 3)]
    assert len(epochs) >= 3 and all(epoch == [class_a, g, b"def h(): pass"] for epoch in epochs)
    assert sorted(os.listdir(tmp_path)) == ["a.py", "b.py", "c.py"], "nothing is written"
