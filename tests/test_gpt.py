"""gpt.py: real text, batches from seed and step alone, a causal model, and the progress that scripts print."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import transformer
from conftest import slow_clock

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


def test_a_process_reads_only_its_share(monkeypatch):
    moved = []
    monkeypatch.setattr(gpt, "to_device", lambda rows, device: moved.append(rows.shape) or rows)
    args = transformer.arguments(global_batch_size=12, length=5)
    whole = transformer.small_data(args).batch(3)
    shares = [transformer.small_data(args, (i, 4)).batch(3) for i in range(4)]
    for part, wholes in zip(zip(*shares, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(part), wholes)
    assert moved == [(12, 6), *[(3, 6)] * 4]
    whole = transformer.small_data(args).held_out_batches()
    shares = [transformer.small_data(args, (i, 2)).held_out_batches() for i in range(2)]
    assert len(whole) == 8
    for number, batch in enumerate(whole):
        for which, wholes in enumerate(batch):
            assert torch.equal(torch.cat([share[number][which] for share in shares]), wholes)


def test_sizes_that_do_not_fit_are_one_line():
    text, _ = transformer.small_text()
    with pytest.raises(dist.DistributedError, match=r"^5 is not a multiple of 2, the number of equal shares$"):
        gpt.batch(text, 0, 5, 8, share=(0, 2))
    with pytest.raises(dist.DistributedError, match=r"^8 is not a multiple of 3, the number of equal shares$"):
        transformer.small_data(transformer.arguments(), (0, 3)).held_out_batches()
    with pytest.raises(AssertionError, match=r"^a width of 10 is not a multiple of 4 heads$"):
        gpt.GPT(gpt.Config(1, 10, 4, 8))  # would have 5 heads


def test_a_checkpoint_beyond_the_last_step_is_refused():
    args = transformer.arguments(steps=4)
    gpt.Progress(None, transformer.small_data(args), args, first_step=4)
    with pytest.raises(dist.DistributedError, match=r"^the checkpoint has 5 steps, more than --steps 4$"):
        gpt.Progress(None, transformer.small_data(args), args, first_step=5)


def load_another_text(local_rank, world_size, folder):
    dist.init_process_group()
    if local_rank == 1:
        gpt.LIBRARY = Path(folder)
    gpt.load_text()


def test_ranks_with_different_texts_are_one_line(tmp_path):
    (tmp_path / "abc.py").write_text("import this\n")
    with pytest.raises(SystemExit, match=r"^Python's standard library of rank 1 differs from rank 0's: "):
        dist.launch(load_another_text, str(tmp_path), nprocs=2)


# ---- model --------------------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    return gpt.GPT(gpt.Config(layers=2, width=32, heads=4, length=16), seed=2)


def test_the_model_guesses_at_first_and_looks_at_no_later_byte(model):
    x, y = gpt.batch(transformer.small_text()[0], 0, 8, 16)
    logits = model(x)
    assert logits.shape == (8, 16, 256)
    assert abs(gpt.loss_fn(logits, y).item() - math.log(256)) < 0.3
    changed = x.clone()
    changed[:, 9] = (x[:, 9] + 1) % 256
    differs = (model(changed) != logits).flatten(2).any(2).any(0)
    assert differs.tolist() == [False] * 9 + [True] * 7, "each later byte looks at it, no earlier one"


def test_positions_are_learnt_and_may_be_given(model):
    x, _ = gpt.batch(transformer.small_text()[0], 0, 8, 16)
    assert torch.equal(model(x, torch.arange(16)), model(x))
    assert not torch.equal(model(x[:, :8], torch.arange(8, 16)), model(x[:, :8]))


def test_a_slice_of_the_rows_of_qkv_is_whole_heads(model):
    attention, half = model.blocks[0].attention, gpt.Attention(gpt.Config(1, 32, 4, 16))
    x = torch.randn(2, 16, 32)
    seen = []
    for rows in (slice(None), slice(48, 96)):
        half.qkv.weight.data, half.qkv.bias.data = attention.qkv.weight[rows].data, attention.qkv.bias[rows].data
        half.attend = lambda *qkv: seen.append(qkv) or torch.zeros(2, 4, 16, 8)
        half(x)
    for whole, part in zip(*seen, strict=True):
        assert torch.allclose(whole[:, 2:], part, atol=1e-6)


def test_a_part_is_filled_as_the_whole_model_is_made():
    config = gpt.Config(layers=2, width=32, heads=4, length=16)
    whole = gpt.GPT(config, seed=5)
    longer = gpt.make_meta_model(dataclasses.replace(config, layers=3)).blocks.to_empty(device="cpu")
    torch.manual_seed(7)
    gpt.fill(reversed([(f"blocks.{name}", param) for name, param in longer.named_parameters()]), seed=5)
    for param, expected in zip(longer[:2].parameters(), whole.blocks.parameters(), strict=True):
        assert torch.equal(param, expected), "in any order, and beside any others"
    drawn = [param for param in [*whole.parameters(), *gpt.GPT(config, seed=6).parameters()] if param.ndim == 2]
    assert len({param.sum().item() for param in drawn}) == len(drawn), "each name and each seed has other ones"


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


def test_held_parameters(model, capsys):
    total = sum(param.numel() for param in model.parameters())
    assert gpt.report_held(model.blocks.parameters(), total) == total - 32 * (256 + 16 + 256) - 64
    held, of, fraction = transformer.HELD.fullmatch(capsys.readouterr().out.strip()).groups()
    assert int(held.replace(",", "")) / int(of.replace(",", "")) == pytest.approx(float(fraction), abs=0.001)
