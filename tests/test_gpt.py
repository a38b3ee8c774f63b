"""gpt.py: real text, batches from seed and step alone, a causal model, and the progress that scripts print."""

import math
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformer
from conftest import agreed_message, on_processes, slow_clock

import distributed as dist
import gpt


def test_the_text_is_python_and_its_last_tenth_is_held_out():
    text, held_out = gpt.load_text()
    assert text.dtype == held_out.dtype == torch.uint8
    assert len(held_out) == (len(text) + len(held_out)) // 10
    files = b"".join(path.read_bytes() for path in sorted(gpt.LIBRARY.glob("*.py")))
    assert bytes(text.numpy()) + bytes(held_out.numpy()) == files
    assert len(files) > 3_000_000 and b"import os" in files


def test_batches_come_from_seed_and_step_alone():
    text = torch.arange(200, dtype=torch.uint8)
    x, y = gpt.batch(text, 2, batch_size=3, length=5, seed=1)
    torch.manual_seed(7)
    assert x.tolist() == [[first + i for i in range(5)] for first in (191, 81, 4)], "on every machine and version"
    assert torch.equal(y, x + 1) and x.dtype == y.dtype == torch.int64
    drawn = [gpt.batch(text, step, 3, 5, seed)[0].tolist() for seed in (0, 1, 2**32 - 1) for step in range(20)]
    assert len({str(rows) for rows in drawn}) == len(drawn), "each seed and each step has other ones"


def test_batches_reach_from_the_first_byte_to_the_last():
    text = torch.arange(20, dtype=torch.uint8)
    x, y = gpt.batch(text, 0, batch_size=1000, length=5)
    assert (x.min(), x.max(), y.min(), y.max()) == (0, 18, 1, 19)
    assert x[:, 0].unique().tolist() == list(range(15))


def test_a_process_reads_its_share():
    args = transformer.arguments(global_batch_size=12, length=5)
    whole = transformer.small_data(args)
    shares = [transformer.small_data(args, (i, 4)) for i in range(4)]
    batches = [data.held_out_batches() for data in shares]
    assert len(batches[0]) == 8
    with mock.patch.object(gpt, "to_device", wraps=gpt.to_device) as to_device:
        pairs = [(whole.batch(3), [data.batch(3) for data in shares])]
    assert [len(call.args[0]) for call in to_device.call_args_list] == [12, 3, 3, 3, 3], "rows that go to the device"
    pairs += zip(whole.held_out_batches(), zip(*batches, strict=True), strict=True)
    for expected, parts in pairs:
        for tensor, pieces in zip(expected, zip(*parts, strict=True), strict=True):
            assert torch.equal(torch.cat(pieces), tensor)


def test_sizes_that_do_not_fit_are_one_line():
    text, _ = transformer.small_text()
    with pytest.raises(dist.DistributedError, match=r"^5 is not a multiple of 2, the number of equal shares$"):
        gpt.batch(text, 0, 5, 8, share=(0, 2))
    with pytest.raises(AssertionError, match=r"^a width of 10 is not a multiple of 4 heads$"):
        gpt.GPT(gpt.Config(1, 10, 4, 8))  # would have 5 heads


def test_a_checkpoint_beyond_the_last_step_is_refused():
    args = transformer.arguments(steps=4)
    gpt.Progress(None, transformer.small_data(args), args, first_step=4)
    with pytest.raises(dist.DistributedError, match=r"^the checkpoint has 5 steps, more than --steps 4$"):
        gpt.Progress(None, transformer.small_data(args), args, first_step=5)


@on_processes(2)
def test_ranks_with_different_texts_are_one_line():
    library = gpt.LIBRARY
    if dist.get_rank() == 1:
        gpt.LIBRARY = Path.cwd()
        Path("abc.py").write_text("import this\n")
    message = agreed_message(gpt.load_text)
    assert message.startswith("Python's standard library of rank 1 differs from rank 0's: ")
    gpt.LIBRARY = library


# ---- model --------------------------------------------------------------------------------------------------------


def test_the_model_guesses_at_first_and_looks_at_no_later_byte():
    model = gpt.GPT(gpt.Config(layers=2, width=32, heads=4, length=16), seed=2)
    x, y = gpt.batch(transformer.small_text()[0], 0, 8, 16)
    logits = model(x)
    assert logits.shape == (8, 16, 256)
    assert abs(gpt.loss_fn(logits, y).item() - math.log(256)) < 0.3
    changed = x.clone()
    changed[:, 9] = (x[:, 9] + 1) % 256
    differs = (model(changed) != logits).flatten(2).any(2).any(0)
    assert differs.tolist() == [False] * 9 + [True] * 7, "each later byte looks at it, no earlier one"


def test_each_parameter_and_each_seed_has_its_own_weights():
    config = gpt.Config(layers=2, width=32, heads=4, length=16)
    drawn = [param for seed in (5, 6) for param in gpt.GPT(config, seed).parameters() if param.ndim == 2]
    assert len({param.sum().item() for param in drawn}) == len(drawn)


def test_a_parameter_without_weights_is_an_error():
    model = gpt.GPT(gpt.Config(1, 32, 4, 16))
    model.scale = torch.nn.Parameter(torch.empty(1))
    with pytest.raises(ValueError, match="there are no weights for scale"):
        gpt.fill(model.named_parameters(), seed=0)


# ---- progress -----------------------------------------------------------------------------------------------------


def test_progress_prints_at_its_interval_and_after_the_last_step(capsys, monkeypatch):
    monkeypatch.setattr(gpt, "time", slow_clock())
    _, held_out = transformer.small_text()
    args = transformer.arguments(steps=5, log_every=2)
    seen = []

    def loss_of(model, x, y):
        seen.append(torch.cat([x, y[:, -1:]], 1))
        return torch.tensor(float(len(seen)))

    progress = gpt.Progress(None, transformer.small_data(args), args, loss_of=loss_of)
    for step in range(5):
        progress(step, torch.tensor(float(step), requires_grad=True))
    lines = transformer.progress_lines(capsys.readouterr().out)
    assert [line["step"] for line in lines] == [2, 4, 5]
    assert [line["loss"] for line in lines] == [0.5, 2.5, 4.0], "the mean since the line before"
    assert [line["held_out"] for line in lines] == [4.5, 12.5, 20.5] and len(seen) == 24, "of 8 batches"
    per_step = args.global_batch_size * args.length
    assert [line["speed"] for line in lines] == [2 * per_step / 2, 2 * per_step / 2, per_step / 2], "each in 2 seconds"
    assert torch.equal(progress.losses, torch.arange(5.0))
    rows = torch.cat(seen[:8])
    assert torch.equal(rows[0], held_out[: args.length + 1].long())
    assert torch.equal(rows[-1], held_out[-args.length - 1 :].long()), "from its first byte to its last"
