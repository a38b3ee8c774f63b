"""min_CP.py: equal to one process, and activations split for real."""

import pytest
import torch
import transformer
from torch.nn import functional as F

import distributed as dist
import min_CP

CASES = [(kind, *how) for kind in min_CP.ATTENTIONS for how in (("AdamW", None), ("SGD", 1.5))]
SMALL = {"layers": 2, "log_every": 100}


def train(kind, optimizer, clip):
    """Losses and parameters of the script's main_worker, and what a loss on a long sequence saves for its backward."""
    args = transformer.arguments(clip=clip, attention=kind, **SMALL)
    result = transformer.run_main_worker(min_CP, args, optimizer)
    assert grouped_query_errors(kind) < 1e-12
    saved = saved_bytes(kind) if optimizer == "AdamW" else None
    return result.losses, transformer.full_parameters(result.model), saved


def grouped_query_errors(kind):
    """The largest errors of the result and the gradients where two heads of q share a head of k and v."""
    generator = torch.Generator().manual_seed(0)
    length = 8 * dist.get_world_size()
    q, k, v, grad = [torch.randn(2, n, length, 16, generator=generator) for n in (8, 4, 4, 8)]

    def attend_alone(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    attend = attend_alone if dist.get_world_size() == 1 else min_CP.ATTENTIONS[kind]
    results = []
    for attention, own in ((attend_alone, slice(None)), (attend, slice(8 * dist.get_rank(), 8 * dist.get_rank() + 8))):
        leaves = [tensor[:, :, own].clone().requires_grad_() for tensor in (q, k, v)]
        result = attention(*leaves)
        result.backward(grad[:, :, own])
        results.append([result.detach(), *(leaf.grad for leaf in leaves)])
    whole, part = results
    return max((one[:, :, own] - ours).abs().max().item() for one, ours in zip(whole, part, strict=True))


def saved_bytes(kind):
    """That a loss on one sequence of 4096 bytes saves in this process for its backward, parameters aside."""
    args = transformer.arguments(layers=2, width=64, length=4096)
    model = min_CP.parallelize(transformer.make_model(args).float(), kind)
    return transformer.saved_bytes(min_CP, model, args)


@pytest.fixture(scope="module")
def plain_saved_bytes():
    return saved_bytes("ulysses")


@pytest.mark.parametrize("nprocs", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_equal_to_one_process_and_activations_split(nprocs, tmp_path, plain_saved_bytes):
    ranks = transformer.train_on(nprocs, train, CASES, tmp_path)
    for (_, optimizer, clip), (losses, parameters, _) in zip(CASES, ranks[-1], strict=True):
        transformer.assert_equal(losses, parameters, transformer.reference(optimizer, clip=clip, **SMALL))
    ulysses, all_gather = ([results[i][2] for results in ranks] for i in (0, 2))
    assert max(ulysses) <= {1: 1, 2: 0.55, 4: 0.3}[nprocs] * plain_saved_bytes
    assert min(all_gather) >= max(ulysses) > 1e6, "its keys and values are not split"


@pytest.mark.slow
def test_prints_what_it_holds_and_how_it_learns(job_of):
    stdout = job_of(
        "min_CP.py", "--attention", "all-gather", "--steps", 3, "--log_every", 2, "--heads", 1, "--nproc", 2
    )
    assert stdout.startswith("parameters held: 478,720 of 478,720 (1.000)\n")
    assert [line["step"] for line in transformer.progress_lines(stdout)] == [2, 3]
