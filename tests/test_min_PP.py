"""Every schedule trains as one process does, and a process holds its stages alone."""

import contextlib
import gc
import io
import sys
from unittest import mock

import pytest
import torch
import transformer
from conftest import SLOW_GUARD
from torch import nn

import distributed as dist
import gpt
import min_PP

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
V_SHAPED = "ZBVZeroBubble"
IN_ONE_PROCESS = ("ZBVZeroBubble", "DualPipeV")
if torch.__version__ < "2.12":  # there the script refuses two stages in a row on one process
    SCHEDULES = SCHEDULES[:4]
    V_SHAPED = "InterleavedZeroBubble"
    IN_ONE_PROCESS = ("1F1B", "GPipe")
CLIP = 0.5


def case(optimizer, schedule, micro_batches=4, **changes):
    return optimizer, {"schedule": schedule, "micro_batches": micro_batches}, changes


CASES = {
    1: [case("AdamW", "1F1B"), case("SGD", IN_ONE_PROCESS[0], clip=CLIP), case("SGD", IN_ONE_PROCESS[1])],
    2: [
        case("AdamW", V_SHAPED),
        *[case("SGD", schedule, clip=CLIP) for schedule in SCHEDULES],
        case("SGD", "1F1B", 2, layers=5),  # stages of two and three blocks
        case("SGD", "GPipe", 1),  # not clipped, which would hide a wrong scale
        case("SGD", "GPipe", 8, clip=CLIP),
    ],
    3: [case("SGD", schedule, 6, layers=6, global_batch_size=12, clip=CLIP) for schedule in SCHEDULES],
    4: [
        case("AdamW", "1F1B"),
        case("SGD", "1F1B", clip=CLIP),
        case("SGD", "GPipe", 2),  # fewer than stages
        *[case("SGD", schedule, 8, clip=CLIP, layers=8) for schedule in SCHEDULES[2:]],
    ],
}


def whole_model(pipeline):
    """All parameters by name, of which no two stages hold the same one."""
    own = {name: param.detach() for stage in pipeline.stages.values() for name, param in stage.named_parameters()}
    assert sum(param.numel() for param in own.values()) == sum(param.numel() for param in pipeline.model.parameters())
    everyone = dist.gather_objects(own)
    assert sum(map(len, everyone)) == len(set().union(*everyone)), "each once"
    return {name: param for theirs in everyone for name, param in theirs.items()}


def train(optimizer, own, changes):
    """Losses, parameters, the held-out loss, and what was printed."""
    args = transformer.arguments(**own, **changes)
    run = transformer.run_main_worker(min_PP, args, optimizer)
    batches = transformer.small_data(args, (0, 1)).held_out_batches()
    with torch.no_grad(), mock.patch.object(gpt, "loss_fn", wraps=gpt.loss_fn) as loss_fn:
        held_out = dist.reduce(torch.stack([run.model.evaluate(x, y) for x, y in batches]).mean()).item()
    rows = {len(call.args[0]) for call in loss_fn.call_args_list}  # of logits in memory
    assert rows <= {args.global_batch_size // args.micro_batches}
    return run.losses, whole_model(run.model), held_out, run.stdout


@pytest.mark.timeout(300)  # seconds alone; minutes among many other processes
@pytest.mark.parametrize(
    "nprocs, cases",
    [
        (2, CASES[2][-2:-1]),
        *[pytest.param(n, CASES[n], marks=SLOW_GUARD if n == 2 else pytest.mark.slow) for n in CASES],
    ],
)
def test_equals_one_process(nprocs, cases, tmp_path):
    results = transformer.train_on(nprocs, train, cases, tmp_path)[0]
    for (optimizer, own, changes), (losses, parameters, held_out, stdout) in zip(cases, results, strict=True):
        print(nprocs, optimizer, own, changes)
        transformer.assert_equal(losses, parameters, transformer.reference(optimizer, **changes))
        expected = transformer.held_out_loss(parameters, transformer.arguments(**changes))
        assert abs(held_out - expected) <= 1e-9
        last = stdout.splitlines()[-1]
        assert last.startswith(f"step {len(losses)}/{len(losses)} | ") and f" | held-out {expected:.4f} | " in last


# ---- what a process holds -----------------------------------------------------------------------------------------


def hold_worker(local_rank, world_size, args):
    """What report_held was given, and the sizes of all parameters that are alive in this process then."""
    held = []

    def report_held(params, total):
        gc.collect()
        alive = [thing for thing in gc.get_objects() if isinstance(thing, nn.Parameter) and not thing.is_meta]
        sizes = [sum(param.numel() for param in params) for params in (params, alive)]
        held.extend(dist.gather_objects([*sizes, total]))

    dist.init_process_group()
    texts = transformer.small_text()
    gpt.report_held, gpt.load_text = report_held, lambda: texts
    with contextlib.redirect_stdout(io.StringIO()):
        min_PP.main_worker(local_rank, world_size, args)
    return held


@pytest.mark.parametrize("nprocs, schedule", [(2, "1F1B"), (4, "GPipe"), (2, V_SHAPED)])
def test_the_stages_add_up_to_the_model_and_nothing_else_is_held(nprocs, schedule):
    args = transformer.arguments(nprocs, schedule=schedule, micro_batches=4, steps=1)
    held = dist.launch(hold_worker, args, nprocs=nprocs)
    total = sum(param.numel() for param in transformer.make_model(args).parameters())
    assert sum(own for own, _, _ in held) == total and all(own == alive for own, alive, _ in held)
    assert all(of == total for _, _, of in held)
    assert max(own for own, _, _ in held) <= 1.5 * total / nprocs, "narrow embeddings are a large part here"


# ---- options and output -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nprocs", [*range(1, 9), 16])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_defaults_fit_any_number_of_processes(nprocs, schedule, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["min_PP.py", "--schedule", schedule, "--nproc", str(nprocs)])
    refused = torch.__version__ < "2.12" and schedule in min_PP.INTERLEAVED and nprocs == 1
    if not refused:
        args = min_PP.parse_args()
        assert args.layers >= len(min_PP.stage_ranks(schedule, nprocs))
        assert args.global_batch_size % args.micro_batches == 0
