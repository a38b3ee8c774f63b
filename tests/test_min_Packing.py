"""Packed documents train as the same documents do alone, whatever the numbers of processes and micro-batches."""

import collections
import functools
import random
import re
from unittest import mock

import pytest
import torch
import transformer
from conftest import exit_message, float64, slow, slow_clock
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F

import distributed as dist
import gpt
import min_Packing

STEPS = 6
LENGTH = 48
CASES = [("SGD", 1, {}), ("SGD", 3, {}), ("AdamW", 1, {}), ("AdamW", 3, {"clip": 0.3}), ("SGD", 3, {"pad": True})]


@functools.cache
def small_documents():
    """80 pairs, whose answers have 1 to 30 bytes: means of means are far from the mean."""
    draw = random.Random(0)
    documents = []
    for number in range(80):
        prompt = bytes(draw.choices(b"abcd", k=draw.randint(1, 12)))
        answer = bytes(draw.choices(b"xyz", k=draw.choice((1, 2, 3, 30))))
        documents.append((prompt + bytes([number]), answer))
    return documents


def arguments(nprocs, accumulate=1, **changes):
    sizes = {"layers": 2, "width": 16, "heads": 2, "length": LENGTH, "global_batch_size": 12, "steps": STEPS}
    return transformer.arguments(nprocs, accumulate=accumulate, **{"pad": False, **sizes, **changes})


# ---- one process of plain PyTorch, one document to a row ------------------------------------------------------------


def padded(documents):
    """Inputs and targets (documents, length). Each document stands at the beginning of a row."""
    tokens = torch.zeros(len(documents), LENGTH, dtype=torch.long)
    targets = torch.full((len(documents), LENGTH), -100)
    for row, (prompt, answer) in enumerate(documents):
        for place, byte in enumerate((prompt + answer)[:-1]):
            tokens[row, place] = byte
        for place, byte in enumerate(answer):
            targets[row, len(prompt) - 1 + place] = byte
    return tokens, targets


def documents_of(step, args):
    """The documents in the rows of a step's global batch."""
    lists = min_Packing.pack(small_documents()[:-4], LENGTH)  # the last 4 are held out
    if args.pad:
        lists = [[document] for document in small_documents()[:-4]]
    chosen = random.Random(f"{args.seed} {step}").choices(lists, k=12)
    return [document for documents in chosen for document in documents]


@functools.cache
def reference(optimizer, **changes):
    """Every step's loss, and the parameters."""
    args = arguments(1, **changes)
    with float64():
        model = transformer.make_model(args)
        before = transformer.full_parameters(model)
        optimizer = transformer.make_optimizer(optimizer, model.parameters(), args.lr)
        losses = []
        for step in range(STEPS):
            tokens, targets = padded(documents_of(step, args))
            summed = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
            loss, clipped = transformer.take_step(model, optimizer, summed / (targets != -100).sum(), args.clip)
            assert clipped or not args.clip
            losses.append(loss)
        assert losses[-1] < losses[0] - 0.5, "the reference must learn, or equality means little"
        after = transformer.full_parameters(model)
        assert all((after[name] - before[name]).abs().max() > 1e-4 for name in before)
    return torch.stack(losses), after


# ---- the script -----------------------------------------------------------------------------------------------------


def count_sends(counter):
    """dist.prepare_ddp_model with a hook that counts the buckets that it reduces."""
    prepare = dist.prepare_ddp_model

    def hook(state, bucket):
        counter["sends"] += 1
        return allreduce_hook(state, bucket)

    def prepare_counting(model, **options):
        model = prepare(model, **options)
        if dist.get_world_size() > 1:
            model.register_comm_hook(None, hook)
        return model

    return mock.patch.object(dist, "prepare_ddp_model", prepare_counting)


def train(optimizer, accumulate, changes):
    """What the script's main_worker trains: losses, parameters, the number of reductions."""
    counter = collections.Counter()
    args = arguments(dist.get_world_size(), accumulate, **changes)
    with mock.patch.object(min_Packing, "load_documents", small_documents), count_sends(counter):
        result = transformer.run_main_worker(min_Packing, args, optimizer)
    return result.losses, transformer.full_parameters(result.model), counter["sends"]


@pytest.mark.parametrize("nprocs", [2, *slow(1, 4)])
def test_equals_one_process_and_documents_one_to_a_row(nprocs, tmp_path):
    cases = CASES if nprocs > 1 else CASES[1:3]
    ranks = transformer.train_on(nprocs, train, cases, tmp_path)
    for number, (optimizer, accumulate, changes) in enumerate(cases):
        print(nprocs, optimizer, accumulate, changes)
        for results in ranks:
            losses, parameters, sends = results[number]
            transformer.assert_equal(losses, parameters, reference(optimizer, **changes))
            assert sends == (STEPS if nprocs > 1 else 0), "gradients are reduced once per step"


def test_a_line_has_the_mean_loss_and_counts_the_tokens_that_are_no_padding(monkeypatch, capsys):
    train_all_steps, losses = min_Packing.train, []
    monkeypatch.setattr(min_Packing, "train", lambda *args: losses.extend(train_all_steps(*args).tolist()))
    monkeypatch.setattr(min_Packing, "time", slow_clock())
    monkeypatch.setattr(min_Packing, "load_documents", small_documents)
    args = arguments(1, steps=5, log_every=3)
    min_Packing.main_worker(0, 1, args)
    per_step = []
    for step in range(5):
        per_step.append(sum(len(prompt + answer) - 1 for prompt, answer in documents_of(step, args)))
    out = capsys.readouterr().out
    means = [sum(losses[:3]) / 3, sum(losses[3:]) / 2]
    assert [float(loss) for loss in re.findall(r"\| loss (\d\.\d{4})", out)] == pytest.approx(means, abs=1e-4)
    speeds = re.findall(r" ([\d,]+) tokens/s", out)
    assert speeds == [f"{sum(per_step[:3]) / 2:,.0f}", f"{sum(per_step[3:]) / 2:,.0f}"]


def test_held_out_rows_count_once():
    documents = small_documents()[:20]
    args = arguments(1)
    with float64():
        model = transformer.make_model(args)
        tokens, targets = padded(documents)
        expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item()
        packing = min_Packing.PackedGPT(gpt.Config.from_args(args), args.seed)
        packing.load_state_dict(model.state_dict())
        rows = min_Packing.fill_rows([[document] for document in documents], LENGTH)
        assert min_Packing.evaluate(packing, rows) == pytest.approx(expected, rel=1e-12)


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_rows_hold_each_document_once():
    documents = small_documents()
    lists = min_Packing.pack(documents, LENGTH)
    assert sorted(document for row in lists for document in row) == sorted(documents)
    rows = min_Packing.fill_rows(lists, LENGTH)
    tokens, positions, owners, targets = rows.unbind(1)
    for row, packed in enumerate(lists):
        for number, (prompt, answer) in enumerate(packed):
            mine = owners[row] == number
            text = list(prompt + answer)
            assert tokens[row][mine].tolist() == text[:-1]
            assert positions[row][mine].tolist() == list(range(len(text) - 1))
            assert targets[row][mine].tolist() == [-100] * (len(prompt) - 1) + list(answer)
        unused = owners[row] == min_Packing.PADDING
        assert (targets[row][unused] == -100).all()
    alone = min_Packing.fill_rows([[document] for document in documents], LENGTH)
    assert min_Packing.wasted(rows) < 0.1 < 0.5 < min_Packing.wasted(alone)


def test_without_a_prompt_all_bytes_but_the_first_are_targets():
    """And the targets of the document before are its own."""
    (row,) = min_Packing.fill_rows([[(b"ab", b"cd"), (b"", b"xyz"), (b"", b"e")]], 8)
    assert row[min_Packing.TARGETS].tolist() == [-100, *b"cd", *b"yz", -100, -100, -100]


def test_functions_become_documents():
    source = b'''
class A:
    @decorated
    def method(self, x):
        """Says
        what."""
        y = x
        return y

    def without(self):
        return 1

    def only(self):
        """A docstring."""

def short(): "One line."; return 2
'''
    documents = list(min_Packing.functions_in(source))
    assert documents == [
        (
            b'    def method(self, x):\n        """Says\n        what."""\n',
            b"        y = x\n        return y\n\0",
        )
    ]


def test_length_must_fit_documents():
    args = arguments(1, length=2)
    assert exit_message(min_Packing.prepare_rows, small_documents(), args).startswith(
        "--length 2: only 4 documents fit"
    )


# ---- leaks ----------------------------------------------------------------------------------------------------------


def probe(mask_of=min_Packing.mask_of):
    """For each position of a row of 3 documents: has its logit changed, since a byte of the second one did?"""
    documents = sorted(small_documents(), key=min_Packing.n_positions)[40:43]
    rows = min_Packing.fill_rows([documents], LENGTH)
    tokens, positions, owners, _ = rows.unbind(1)
    second = owners == 1
    with float64(), torch.no_grad(), mock.patch.object(min_Packing, "mask_of", mask_of):
        model = min_Packing.PackedGPT(gpt.Config(2, 16, 2, LENGTH))
        before = model(tokens, positions, owners)
        changed = tokens.clone()
        changed[0, second[0].nonzero()[0]] += 1
        after = model(changed, positions, owners)
    return (before != after).any(-1), owners, second


def test_a_changed_byte_changes_its_own_document_only():
    changed, _, second = probe()
    assert torch.equal(changed, second)


def test_without_the_mask_it_changes_all_that_follows():
    changed, owners, _ = probe(lambda owners: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
    assert torch.equal(changed, owners != 0)
    assert changed.double().mean() > 0.5


# ---- the whole command ----------------------------------------------------------------------------------------------
