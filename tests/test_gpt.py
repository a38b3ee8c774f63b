"""gpt.py: real text, batches from seed and step alone, a causal model, and the progress that scripts print."""

import collections
import contextlib
import ctypes
import importlib
import io
import math
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformer
from conftest import exit_message, float64, slow_clock
from torch.utils._python_dispatch import TorchDispatchMode

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
    text, held_out = transformer.small_text()
    moved = []
    monkeypatch.setattr(gpt, "to_device", lambda rows, device: moved.append(rows.shape) or rows)
    whole = gpt.batch(text, 3, 12, 5)
    shares = [gpt.batch(text, 3, 12, 5, share=(i, 4)) for i in range(4)]
    for part, wholes in zip(zip(*shares, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(part), wholes)
    assert moved == [(12, 6), *[(3, 6)] * 4]
    args = transformer.arguments()
    whole = gpt.Progress(None, text, held_out, args).batches
    shares = [gpt.Progress(None, text, held_out, args, share=(i, 2)).batches for i in range(2)]
    assert len(whole) == 8
    for number, batch in enumerate(whole):
        for which, wholes in enumerate(batch):
            assert torch.equal(torch.cat([share[number][which] for share in shares]), wholes)


def test_a_checkpoint_beyond_the_last_step_is_refused():
    args = transformer.arguments(steps=4)
    gpt.Progress(None, *transformer.small_text(), args, first_step=4)
    with pytest.raises(dist.DistributedError, match=r"^the checkpoint has 5 steps, more than --steps 4$"):
        gpt.Progress(None, *transformer.small_text(), args, first_step=5)


def load_another_text(local_rank, world_size, folder):
    dist.init_process_group()
    if local_rank == 1:
        gpt.LIBRARY = Path(folder)
    gpt.load_text()


def test_ranks_with_different_texts_are_one_line(tmp_path):
    (tmp_path / "abc.py").write_text("import this\n")
    message = "the standard libraries of rank 1 and rank 0 differ: use one version of Python everywhere"
    with pytest.raises(SystemExit) as error:
        dist.launch(load_another_text, str(tmp_path), nprocs=2)
    assert error.value.code == message


# ---- model --------------------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    torch.manual_seed(0)
    return gpt.GPT(layers=2, width=32, heads=4, length=16)


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
    attention, half = model.blocks[0].attention, gpt.Attention(32, 4)
    x = torch.randn(2, 16, 32)
    seen = []
    for rows in (slice(None), slice(48, 96)):
        half.qkv.weight.data, half.qkv.bias.data = attention.qkv.weight[rows].data, attention.qkv.bias[rows].data
        half.attend = lambda *qkv: seen.append(qkv) or torch.zeros(2, 4, 16, 8)
        half(x)
    for whole, part in zip(*seen, strict=True):
        assert torch.allclose(whole[:, 2:], part, atol=1e-6)


def test_a_part_is_filled_as_the_whole_model_is_made():
    args = transformer.arguments()
    whole = transformer.make_model(args)
    after = torch.rand(1)
    part = gpt.make_meta_model(args).blocks[1].to_empty(device="cpu")
    torch.manual_seed(7)
    gpt.fill([(f"blocks.1.{name}", param) for name, param in part.named_parameters()], args)
    for param, expected in zip(part.parameters(), whole.blocks[1].parameters(), strict=True):
        assert torch.equal(param, expected)
    assert torch.equal(torch.rand(1), after), "and so do the random numbers that follow"


# ---- bfloat16 -----------------------------------------------------------------------------------------------------

IN_BFLOAT16 = {
    "min_CP": {"attention": "ulysses"},
    "min_DiLoCo": {"sync_every": 3, "outer_lr": 0.7, "outer_momentum": 0.0},
    "min_EP": {"experts": 4, "top": 2, "balance": 0.01},
    "min_Join": {"method": "weights", "least": 20},
    "min_Muon": {"muon_lr": 0.02, "momentum": 0.9, "snapshot_path": None, "save_every": 100},
    "min_Ring": {},
    "min_ZeRO": {},
}


class Products(TorchDispatchMode):
    """The types of the results of linear layers, in forward and backward."""

    def __init__(self):
        super().__init__()
        self.types = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            self.types.add(result.dtype)
        return result


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_bf16_computes_in_bfloat16_and_learns_alike(name):
    script = importlib.import_module(name)
    losses = {}
    for bf16 in (False, True):
        args = transformer.arguments(**IN_BFLOAT16[name], layers=1, steps=4, bf16=bf16)
        with Products() as products:
            result = transformer.run_main_worker(script, args, "AdamW")
        losses[bf16] = result.losses
        expected = {torch.bfloat16 if bf16 else torch.float32}
        if name == "min_Muon":
            expected.add(torch.float32)  # the optimizer's own products
        assert products.types == expected
        assert {param.dtype for param in result.model.parameters()} == {torch.float32}
        assert result.losses.dtype == torch.float32
    difference = (losses[True] - losses[False]).abs().max()
    assert 0 < difference < 0.1


# ---- no process holds the whole model -----------------------------------------------------------------------------

LARGE = {"layers": 4, "width": 1024, "length": 16}  # 204 MB; the largest layer has 17 MB
SPLIT = {"checkpoint_dir": None, "checkpoint_activations": False, "micro_batches": 2, "schedule": "1F1B"}
PARTS = [
    ("min_TP", {}),
    ("min_2D", {"replicate": 1, "shard": 2, "tensor": 1}),
    ("min_2D", {"replicate": 1, "shard": 1, "tensor": 2}),
    ("min_PP", {"data_parallel": 1}),
    ("min_3D", {"stages": 2, "shard": 1, "tensor": 1}),
    ("min_3D", {"stages": 1, "shard": 2, "tensor": 1}),
]


def peak_worker(local_rank, world_size, script, args, folder):
    """Save the bytes by which memory has grown at its peak, when training begins."""
    m_mmap_threshold = -3
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 2**16)  # a freed tensor goes back to the system
    dist.init_process_group()
    texts = transformer.small_text()
    module = importlib.import_module(script)
    before = dist.peak_memory(dist.get_device())

    def train(*args):
        Path(f"{folder}/{local_rank}").write_text(str(dist.peak_memory(dist.get_device()) - before))

    gpt.load_text = lambda: texts
    module.train = train
    with contextlib.redirect_stdout(io.StringIO()):
        module.main_worker(local_rank, world_size, args)


@pytest.mark.slow
@pytest.mark.parametrize("script, mesh", PARTS, ids=lambda value: value if isinstance(value, str) else str(value))
def test_no_process_holds_the_whole_model(script, mesh, tmp_path):
    args = transformer.arguments(2, **LARGE, **SPLIT, **mesh)
    n_bytes = sum(param.nbytes for param in gpt.make_meta_model(args).parameters())
    dist.launch(peak_worker, script, args, str(tmp_path), nprocs=2)
    peaks = [int((tmp_path / f"{rank}").read_text()) / n_bytes for rank in range(2)]
    print(script, mesh, peaks)
    assert min(peaks) > 0.4 and max(peaks) < 0.8, "its half, and a layer or two"


# ---- generation ---------------------------------------------------------------------------------------------------

PROMPTS = [b"a", b"hello", b"abcdefghijk", b"xy"]


def peaked_model(width=32, heads=4, length=64):
    """In float64, with large weights: what was read before decides what comes, so a wrong position changes it."""
    with float64():
        torch.manual_seed(0)
        model = gpt.GPT(2, width, heads, length)
    with torch.no_grad():
        for param in model.parameters():
            param *= 3
    return model


@torch.no_grad()
def continue_alone(model, prompt, drawn, stop, temperature):
    """One row after the other, without cache, batch and padding: the text, and each new byte's log-probability."""
    text, logs = list(prompt), []
    for number in drawn.tolist():
        logits = model(torch.tensor([text]))[0, -1]
        if temperature == 0:
            log_probabilities = logits.log_softmax(-1)
            byte = int(logits.argmax())
        else:
            log_probabilities = (logits / temperature).log_softmax(-1)
            byte, total = 0, log_probabilities[0].exp()
            while total <= number:
                byte += 1
                total = total + log_probabilities[byte].exp()
        text.append(byte)
        logs.append(log_probabilities[byte])
        if byte == stop:
            break
    return bytes(text), torch.stack(logs)


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("stop", [None, 10, 200])
def test_generation_equals_a_loop_without_cache_batch_and_padding(stop, samples, temperature):
    model = peaked_model()
    drawn = torch.rand(samples * len(PROMPTS), 30, dtype=torch.double, generator=torch.Generator().manual_seed(5))
    tokens, generated, log_probabilities = gpt.generate(model, PROMPTS, drawn, stop, temperature, samples)
    answers = gpt.generated_bytes(tokens, generated)
    lengths = set()
    for row, answer in enumerate(answers):
        prompt = PROMPTS[row // samples]
        text, logs = continue_alone(model, prompt, drawn[row], stop, temperature)
        end = len(text)
        assert bytes(tokens[row, :end].tolist()) == text and prompt + answer == text
        assert generated[row].nonzero()[:, 0].tolist() == list(range(len(prompt), end))
        assert (log_probabilities[row, len(prompt) : end] - logs).abs().max() < 1e-12
        assert not tokens[row, end:].any()
        assert not log_probabilities[row, : len(prompt)].any() and not log_probabilities[row, end:].any()
        lengths.add(len(answer))
    assert tokens.shape[1] <= 11 + max(lengths)
    assert len(lengths) > 1 or stop is None or temperature == 0


def test_a_new_byte_costs_one_position_and_rows_that_have_ended_cost_nothing(monkeypatch):
    model = peaked_model()
    drawn = torch.rand(12, 30, dtype=torch.double, generator=torch.Generator().manual_seed(5))
    shapes = []
    forward = gpt.GPT.forward
    monkeypatch.setattr(gpt.GPT, "forward", lambda self, x, at: shapes.append(tuple(x.shape)) or forward(self, x, at))
    _, generated, _ = gpt.generate(model, PROMPTS, drawn, 10, 0.7, samples=3)
    lengths = generated.sum(1)
    assert lengths.min() < 30, "rows must end at different times"
    expected = [(4, 11)] + [(int((lengths > number).sum()), 1) for number in range(1, 30)]
    # A row whose last byte is the stop leaves after it.
    assert shapes == [shape for shape in expected if shape[0]]


def test_generating_leaves_the_model_as_it_was():
    model = peaked_model()
    x = torch.arange(16)[None]
    before = model(x)
    with pytest.raises(ZeroDivisionError):
        gpt.generate(model, PROMPTS, torch.zeros(4, 3, dtype=torch.double), choose=lambda *args: 1 / 0)
    gpt.generate(model, PROMPTS, torch.zeros(4, 3, dtype=torch.double))
    assert torch.equal(model(x), before)
    assert all("attend" not in vars(block.attention) for block in model.blocks)
    model.blocks[0].attention.attend = replaced = mock.Mock()  # as context parallelism does
    gpt.generate(model, PROMPTS, torch.zeros(4, 3, dtype=torch.double))
    assert model.blocks[0].attention.attend is replaced


def test_a_parameter_without_weights_is_an_error():
    args = transformer.arguments(layers=1)
    model = gpt.make_meta_model(args).to_empty(device="cpu")
    gpt.fill(model.named_parameters(), args)
    model.scale = torch.nn.Parameter(torch.empty(1))
    with pytest.raises(ValueError, match="there are no weights for scale"):
        gpt.fill(model.named_parameters(), args)


def test_log_probabilities_may_take_part_in_a_loss():
    model = peaked_model()
    drawn = torch.full((4, 3), 0.5, dtype=torch.double)
    _, _, log_probabilities = gpt.generate(model, PROMPTS, drawn)
    parameter = torch.ones((), requires_grad=True)
    (parameter * log_probabilities).sum().backward()
    assert parameter.grad < 0


def test_a_byte_is_drawn_with_its_probability():
    """Also by the smallest and the largest number, in float32, and where the last bytes have none."""
    logits = torch.full((1, 256), -torch.inf)
    logits[0, 3:6] = torch.tensor([0.1, 0.2, 0.7]).log()
    drawn = torch.arange(0, 1, 1e-4, dtype=torch.double)
    chosen, logs = gpt.choose(logits.expand(len(drawn), -1), drawn)
    assert chosen.bincount()[3:].tolist() == pytest.approx([1000, 2000, 7000], abs=2)
    assert torch.allclose(logs, logits[0, chosen])
    edges = torch.tensor([0, 1 - 2**-53], dtype=torch.double)
    assert gpt.choose(logits.expand(2, -1), edges)[0].tolist() == [3, 5]
    assert gpt.choose(torch.randn(200, 256), edges[1:].expand(200))[0].max() < 256


def test_temperature_sharpens():
    logits = torch.tensor([[0.0, 1.0]])
    for temperature in (0.5, 1, 2):
        _, log_probability = gpt.choose(logits, torch.zeros(1, dtype=torch.double), temperature)
        assert log_probability.item() == pytest.approx(-math.log(1 + math.exp(1 / temperature)))


def test_numbers_depend_on_their_name_alone():
    torch.manual_seed(1)
    first = gpt.uniform("0 7 3", 2, 5)
    torch.manual_seed(2)
    assert torch.equal(gpt.uniform("0 7 3", 2, 5), first) and first.dtype == torch.double
    assert not torch.equal(gpt.uniform("0 7 4", 2, 5), first)
    assert len(first.unique()) == 10 and first.min() >= 0 and first.max() < 1


def test_what_cannot_be_continued():
    model = peaked_model()
    drawn = torch.zeros(2, 10, dtype=torch.double)
    with pytest.raises(ValueError, match=r"^a prompt is empty: the model needs at least one byte$"):
        gpt.generate(model, [b"a", b""], drawn)
    gpt.generate(model, [b"a", 54 * b"b"], drawn)
    with pytest.raises(ValueError, match=r"^a prompt of 55 bytes and 10 new ones exceed the model's 64 positions$"):
        gpt.generate(model, [b"a", 55 * b"b"], drawn)
    model.head.weight.data[0, 0] = torch.nan
    for temperature in (1.0, 0):
        assert exit_message(gpt.generate, model, [b"a", b"b"], drawn, temperature=temperature) == (
            "the model's logits are NaN, so no byte can be drawn: its training has diverged"
        )


# ---- progress -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3])
def test_ngrams_are_counted_right(n):
    text, rows = transformer.small_text()[0][:5000], transformer.small_text()[0][5000:6000].view(20, 50)
    count = collections.Counter(tuple(text[i : i + n].tolist()) for i in range(len(text) - n + 1))
    contexts = collections.Counter()
    for gram, times in count.items():
        contexts[gram[:-1]] += times
    grams = [tuple(row[i : i + n].tolist()) for row in rows for i in range(50 - n + 1)]
    losses = [-math.log((count[gram] + 0.01) / (contexts[gram[:-1]] + 2.56)) for gram in grams]
    assert abs(gpt.ngram_loss(text, rows, n) - sum(losses) / len(losses)) < 1e-5


def test_progress_prints_at_its_interval_and_after_the_last_step(capsys, monkeypatch):
    monkeypatch.setattr(gpt, "time", slow_clock())
    text, held_out = transformer.small_text()
    args = transformer.arguments(steps=5, log_every=2)
    seen = []

    def local_loss(x, y):
        seen.append(torch.cat([x, y[:, -1:]], 1))
        return torch.tensor(float(len(seen)))

    progress = gpt.Progress(local_loss, text, held_out, args)
    for step in range(5):
        progress(torch.tensor(float(step), requires_grad=True))
    lines = transformer.progress_lines(capsys.readouterr().out)
    assert [line["step"] for line in lines] == [2, 4, 5]
    assert [line["loss"] for line in lines] == [0.5, 2.5, 4.0], "the mean since the line before"
    assert [line["held_out"] for line in lines] == [4.5, 12.5, 20.5] and len(seen) == 24, "of 8 batches"
    assert lines[0]["bigram"] > lines[0]["trigram"] > 0
    per_step = args.global_batch_size * args.length
    assert [line["speed"] for line in lines] == [2 * per_step / 2, 2 * per_step / 2, per_step / 2], "each in 2 seconds"
    assert torch.equal(progress.losses, torch.arange(5.0))
    rows = torch.cat(seen[:8])
    assert torch.equal(rows[0], held_out[: args.length + 1].long())
    assert torch.equal(rows[-1], held_out[-args.length - 1 :].long()), "from its first byte to its last"
    assert lines[0]["bigram"] == round(gpt.ngram_loss(text, rows.to(torch.uint8), 2), 4)


def test_held_parameters(model, capsys):
    total = sum(param.numel() for param in model.parameters())
    assert gpt.report_held(model.blocks.parameters(), total) == total - 32 * (256 + 16 + 256) - 64
    held, of, fraction = transformer.HELD.fullmatch(capsys.readouterr().out.strip()).groups()
    assert int(held.replace(",", "")) / int(of.replace(",", "")) == pytest.approx(float(fraction), abs=0.001)
