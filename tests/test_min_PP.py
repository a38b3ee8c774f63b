"""min_PP.py: a process holds its stages alone.

test_equal.py has what all scripts that train the GPT promise.
"""

import contextlib
import gc
import io
import sys

import pytest
import torch
import transformer
from torch import nn

import distributed as dist
import gpt
import min_PP

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
V_SHAPED = "ZBVZeroBubble"
if torch.__version__ < "2.12":  # there the script refuses two stages in a row on one process
    SCHEDULES = SCHEDULES[:4]
    V_SHAPED = "InterleavedZeroBubble"


# ---- what a process holds -----------------------------------------------------------------------------------------


def hold_worker(local_rank, world_size, args):
    """What report_held was given, and the sizes of all parameters that are alive in this process then."""
    held = []

    def report_held(params, total):
        gc.collect()
        alive = [thing for thing in gc.get_objects() if isinstance(thing, nn.Parameter) and not thing.is_meta]
        sizes = [sum(param.numel() for param in params) for params in (params, alive)]
        held.extend(dist.gather_objects(sizes))

    dist.init_process_group()
    texts = transformer.small_text()
    gpt.report_held, gpt.load_text = report_held, lambda: texts
    with contextlib.redirect_stdout(io.StringIO()):
        min_PP.main_worker(local_rank, world_size, args)
    return held


@pytest.mark.parametrize("nprocs, schedule", [(2, V_SHAPED), pytest.param(4, "GPipe", marks=pytest.mark.slow)])
def test_nothing_else_is_held(nprocs, schedule):
    args = transformer.arguments(nprocs, schedule=schedule, micro_batches=4, steps=1)
    held = dist.launch(hold_worker, args, nprocs=nprocs)
    assert all(own == alive for own, alive in held)


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
