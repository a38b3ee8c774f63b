"""gpt_generate.py: the same bytes as a loop without cache, batch and padding, drawn with their probabilities."""

import math

import pytest
import torch
from conftest import exit_message, float64

import gpt
import gpt_generate

PROMPTS = [b"a", b"hello", b"abcdefghijk", b"xy"]


def peaked_model(width=32, heads=4, length=64, seed=72):
    """In float64, with large weights: what was read before decides what comes, so a wrong position changes it.

    With this seed some rows of the tests below end early.
    """
    with float64():
        model = gpt.GPT(gpt.Config(2, width, heads, length), seed)
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
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("stop", [None, 10, 200])
def test_generation_equals_a_loop_without_cache_batch_and_padding(stop, samples, temperature):
    model = peaked_model()
    drawn = torch.rand(samples * len(PROMPTS), 20, dtype=torch.double, generator=torch.Generator().manual_seed(5))
    tokens, generated, log_probabilities = gpt_generate.generate(model, PROMPTS, drawn, stop, temperature, samples)
    answers = gpt_generate.generated_bytes(tokens, generated)
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


def test_a_new_byte_costs_one_position_and_rows_that_have_ended_cost_nothing():
    model = peaked_model()
    drawn = torch.rand(12, 30, dtype=torch.double, generator=torch.Generator().manual_seed(5))
    shapes = []
    model.token.register_forward_pre_hook(lambda layer, inputs: shapes.append(tuple(inputs[0].shape)))
    _, generated, _ = gpt_generate.generate(model, PROMPTS, drawn, 10, 0.7, samples=3)
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
        gpt_generate.generate(model, PROMPTS, torch.zeros(4, 3, dtype=torch.double), choose=lambda *args: 1 / 0)
    assert torch.equal(model(x), before)


def test_a_byte_is_drawn_with_its_probability():
    """Also by the smallest and the largest number, in float32, and where the last bytes have none."""
    logits = torch.full((1, 256), -torch.inf)
    logits[0, 3:6] = torch.tensor([0.1, 0.2, 0.7]).log()
    drawn = torch.arange(0, 1, 1e-4, dtype=torch.double)
    chosen, logs = gpt_generate.choose(logits.expand(len(drawn), -1), drawn)
    assert chosen.bincount()[3:].tolist() == pytest.approx([1000, 2000, 7000], abs=2)
    assert torch.allclose(logs, logits[0, chosen])
    edges = torch.tensor([0, 1 - 2**-53], dtype=torch.double)
    assert gpt_generate.choose(logits.expand(2, -1), edges)[0].tolist() == [3, 5]
    assert gpt_generate.choose(torch.randn(200, 256), edges[1:].expand(200))[0].max() < 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-7])
def test_the_smallest_temperatures_take_the_most_probable_byte(temperature, dtype):
    logits = torch.randn(50, 256).mul(20).to(dtype)
    logits[0, :128] = -torch.inf
    for number in (0.0, 0.5, 1 - 2**-53):
        chosen, logs = gpt_generate.choose(logits, torch.full((50,), number, dtype=torch.double), temperature)
        logits_of_chosen = logits.gather(1, chosen[:, None])[:, 0]
        assert torch.equal(logits_of_chosen, logits.amax(1)), "in bfloat16 several may be the largest"
        assert logs.dtype == dtype and (logs >= -math.log(8)).all()


def test_numbers_depend_on_their_name_alone():
    torch.manual_seed(1)
    first = gpt_generate.uniform("0 7 3", 2, 5)
    torch.manual_seed(2)
    assert torch.equal(gpt_generate.uniform("0 7 3", 2, 5), first) and first.dtype == torch.double
    assert not torch.equal(gpt_generate.uniform("0 7 4", 2, 5), first)
    assert len(first.unique()) == 10 and first.min() >= 0 and first.max() < 1


def test_what_cannot_be_continued():
    model = peaked_model()
    drawn = torch.zeros(2, 10, dtype=torch.double)
    with pytest.raises(ValueError, match=r"^a prompt is empty: the model needs at least one byte$"):
        gpt_generate.generate(model, [b"a", b""], drawn)
    gpt_generate.generate(model, [b"a", 54 * b"b"], drawn)
    with pytest.raises(ValueError, match=r"^a prompt of 55 bytes and 10 new ones exceed the model's 64 positions$"):
        gpt_generate.generate(model, [b"a", 55 * b"b"], drawn)
    model.head.weight.data[0, 0] = torch.nan
    for temperature in (1.0, 0):
        assert exit_message(gpt_generate.generate, model, [b"a", b"b"], drawn, temperature=temperature) == (
            "the model's logits are NaN, so no byte can be drawn: its training has diverged"
        )
