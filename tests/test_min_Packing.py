"""Packed documents train as the same documents do alone, whatever the numbers of processes and micro-batches."""

import functools
import random
from unittest import mock

import pytest
import torch
import transformer
from conftest import Watch, exit_message, float64, on_processes, slow

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


@functools.cache
def reference(optimizer, **changes):
    """Every step's loss, and the parameters."""
    args = arguments(1, **changes)
    lists = min_Packing.pack(small_documents()[:-4], LENGTH)  # the last 4 are held out
    if args.pad:
        lists = [[document] for document in small_documents()[:-4]]

    def documents_of(step, *_):
        chosen = random.Random(f"{args.seed} {step}").choices(lists, k=12)
        return padded([document for documents in chosen for document in documents])

    with float64():
        model = transformer.make_model(args)
    return transformer.train_alone(model, optimizer, args, part_of=documents_of)


# ---- the script -----------------------------------------------------------------------------------------------------


@on_processes(2, *slow(1, 4))
@pytest.mark.parametrize(("optimizer", "accumulate", "changes"), CASES)
@float64()
def test_equals_one_process_and_documents_one_to_a_row(optimizer, accumulate, changes):
    args = arguments(dist.get_world_size(), accumulate, **changes)
    with mock.patch.object(min_Packing, "load_documents", small_documents):
        result = transformer.run_main_worker(min_Packing, args, optimizer)
    parameters = transformer.full_parameters(result.model)
    transformer.assert_equal(result.losses, parameters, reference(optimizer, **changes))
    model = transformer.make_model(args)
    model.load_state_dict(parameters)
    held_out = transformer.plain_loss(model, *padded(small_documents()[-4:]))
    if dist.is_primary():
        last = transformer.progress_lines(result.stdout)[-1]
        assert last["held_out"] == pytest.approx(held_out.item(), abs=6e-5), "each held-out row counts once"


@on_processes(2)
def test_gradients_are_reduced_once_per_step():
    args = arguments(2)
    model = dist.prepare_ddp_model(min_Packing.PackedGPT(gpt.Config.from_args(args)))
    rows = min_Packing.Data(small_documents(), args).batch(0)
    with Watch() as watch:
        min_Packing.backward(model, rows.chunk(3))
    n_parameters = sum(param.numel() for param in model.parameters())
    assert watch.sent["all-reduce"] == 4 * n_parameters + 8, "and the number of targets"


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_rows_hold_each_document_once_and_little_padding():
    documents = small_documents()
    lists = min_Packing.pack(documents, LENGTH)
    assert sorted(document for row in lists for document in row) == sorted(documents)
    alone = [[document] for document in documents]
    padding = []
    for each in (lists, alone):
        document_ids = min_Packing.fill_rows(each, LENGTH)[:, min_Packing.DOCUMENT_IDS]
        padding.append((document_ids == min_Packing.PADDING).double().mean())
    assert padding[0] < 0.1 < 0.5 < padding[1]


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
    prompt, answer = source.split(b"@decorated\n")[1].split(b"\n\n")[0].split(b'what."""\n')
    assert list(min_Packing.functions_in(source)) == [(prompt + b'what."""\n', answer + b"\n\0")]


def test_length_must_fit_documents():
    args = arguments(1, length=2)
    assert exit_message(min_Packing.Data, small_documents(), args).startswith("--length 2: only 4 documents fit")


# ---- leaks ----------------------------------------------------------------------------------------------------------


@float64()
def test_a_changed_byte_changes_its_own_document_only():
    """The second one of three in a row."""
    model = min_Packing.PackedGPT(gpt.Config(2, 16, 2, LENGTH))
    documents = sorted(small_documents(), key=min_Packing.n_positions)[40:43]
    rows = min_Packing.fill_rows([documents], LENGTH)
    tokens, positions, document_ids, _ = rows.unbind(1)
    second = document_ids == 1
    changed = tokens.clone()
    changed[0, second[0].nonzero()[0]] += 1
    with torch.no_grad():
        before = model(tokens, positions, document_ids)
        after = model(changed, positions, document_ids)
    assert torch.equal((before != after).any(-1), second)
