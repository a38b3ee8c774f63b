import argparse
import contextlib
import io
import re
import sys
from pathlib import Path

import pytest
import seed_snippet
import torch
from conftest import ROOT, finish, start, torchrun
from torch.utils.data.distributed import DistributedSampler

import distributed as dist
import min_DDP

SNIPPET = Path(seed_snippet.__file__)
ITERATION = re.compile(r"Finish iteration \d+ - acc: (\d\.\d{4}) \((\d+)/(\d+)\) - loss: \d+\.\d{4}")


def test_the_snippet_gives_the_metrics_of_one_process_on_1_2_and_4():
    x, y = seed_snippet.data().tensors
    output = seed_snippet.build_model()(x)
    correct = (output.argmax(dim=1) == y).sum().item()
    expected = f"{torch.nn.functional.cross_entropy(output, y).item():.6f} {correct}/24\n"
    jobs = [start(SNIPPET, *args) for args in ((), (2,), (4,))]
    for job in jobs:
        assert finish(job)[:2] == (0, expected)


def check_output(stdout, epochs, iterations, global_batch):
    lines = stdout.splitlines()
    assert [line for line in lines if line.startswith("---")] == [f"------- Epoch {i + 1}" for i in range(epochs)]
    matches = [ITERATION.fullmatch(line) for line in lines if line.startswith("Finish iteration")]
    assert len(matches) == epochs * iterations
    for match in matches:
        accuracy, hits, n = match.groups()
        assert int(n) == global_batch and accuracy == f"{int(hits) / int(n):.4f}"
    accuracy, hits, n = re.fullmatch(r"Finished: accuracy (\d\.\d{4}) \((\d+)/(\d+)\)", lines[-1]).groups()
    assert n == "256" and accuracy == f"{int(hits) / int(n):.4f}"
    assert float(accuracy) > 0.95
    assert int(matches[0].group(2)) < 0.6 * global_batch, "it starts near chance"


def test_defaults_start_two_processes_and_learn():
    status, stdout, stderr = finish(start("min_DDP.py"))
    assert (status, stderr) == (0, "")
    assert stdout.startswith("Training on 2 x cpu, global batch 32\n")
    check_output(stdout, epochs=5, iterations=8, global_batch=32)


def test_the_same_file_under_torchrun():
    status, stdout, stderr = torchrun(2, ROOT / "min_DDP.py", "--batch_size", 32, "--lr", 0.02)
    assert status == 0, stderr
    check_output(stdout, epochs=5, iterations=4, global_batch=64)


def train_and_record(local_rank, world_size, folder):
    epochs = []
    set_epoch = DistributedSampler.set_epoch
    DistributedSampler.set_epoch = lambda self, epoch: (epochs.append(epoch), set_epoch(self, epoch))
    args = argparse.Namespace(epochs=2, batch_size=16, n_classes=4, data_size=250, hidden_dim=8, lr=0.01, seed=0)
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        min_DDP.main_worker(local_rank, world_size, args)
    torch.save((epochs, stdout.getvalue()), f"{folder}/{local_rank}.pt")


def test_epochs_differ_and_the_accuracy_counts_no_sample_twice(tmp_path):
    dist.launch(train_and_record, str(tmp_path), nprocs=4)  # 250 samples on 4 ranks: two would be padded
    epochs, stdout = torch.load(tmp_path / "0.pt", weights_only=True)
    assert epochs == [0, 1]
    assert re.search(r"Finished: accuracy \d\.\d{4} \(\d+/250\)\n$", stdout)
    assert torch.load(tmp_path / "3.pt", weights_only=True) == ([0, 1], ""), "only the primary rank prints"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--epochs", "0"), "argument --epochs: '0' is not a whole number of at least 1"),
        (("--batch-size", "-1"), "argument --batch-size/--batch_size: '-1' is not a whole number of at least 1"),
        (("--data_size", "0"), "argument --data-size/--data_size: '0' is not a whole number of at least 1"),
        (("--n-classes", "1"), "argument --n-classes/--n_classes: '1' is not a whole number of at least 2"),
        (("--lr", "nan"), "argument --lr: 'nan' is not a finite number above 0"),
        (("--lr", "inf"), "argument --lr: 'inf' is not a finite number above 0"),
        (("--nproc", "0"), "argument --nproc: '0' is not a whole number of at least 1"),
        (("--nproc", "x"), "argument --nproc: 'x' is not a whole number of at least 1"),
        (("--frobnicate",), "unrecognized arguments: --frobnicate"),
    ],
)
def test_bad_options_are_one_line(main_of, args, message):
    assert main_of("min_DDP.py", *args) == (2, f"min_DDP.py: error: {message}\n")


def test_more_processes_than_visible_gpus(main_of, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    message = "argument --nproc: 3 is not in the range 1 to 2, the number of visible GPUs"
    assert main_of("min_DDP.py", "--nproc", "3") == (2, f"min_DDP.py: error: {message}\n")


def test_help_shows_defaults(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["min_DDP.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        min_DDP.parse_args()
    help_text = capsys.readouterr().out
    for option in ("epochs", "batch-size", "n-classes", "data-size", "hidden-dim", "lr", "seed", "nproc"):
        assert re.search(rf"--{option}\b[^-]*(--\w+[^-]*)?\(default:\s[\d.]+\)", help_text), option


def test_the_data_are_the_same_on_every_rank_and_in_every_run():
    first, again = min_DDP.DummyDataset(50, 4, seed=1), min_DDP.DummyDataset(50, 4, seed=1)
    torch.manual_seed(7)
    assert torch.equal(first.points, again.points) and torch.equal(first.labels, again.labels)
    assert not torch.equal(first.points, min_DDP.DummyDataset(50, 4, seed=2).points)
