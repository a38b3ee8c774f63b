"""What takes minutes, of the transformer scripts: they learn, and send as many bytes as their docstrings say."""

import contextlib
import io
import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, finish, run, start
from torch.distributed.device_mesh import init_device_mesh
from transformer import BIGRAM, arguments, make_model, make_optimizer, n_shares, progress_lines, small_data

import distributed as dist
import gpt
import min_CP
import min_CP_ring
import min_DDP_scratch
import min_DiLoCo
import min_EP
import min_EP_FSDP
import min_FSDP
import min_Muon
import min_PP
import min_PP_FSDP_TP
import min_TP
import min_ZeRO

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "script",
    [
        *("min_FSDP_TP", "min_PP_FSDP_TP", "min_DDP_scratch", "min_CP", "min_DiLoCo", "min_EP", "min_FSDP"),
        *("min_EP_FSDP", "min_Join", "min_Muon", "min_PP", "min_CP_ring", "min_TP", "min_ZeRO"),
    ],
)
def test_it_learns_more_than_pairs_of_bytes_within_minutes(script):
    seconds = 240  # on two cores, beside another test
    if script == "min_PP_FSDP_TP":
        seconds = 360  # FSDP on one shard copies for nothing
    status, stdout, stderr = run(f"{script}.py", "--nproc", 2, timeout=560)
    assert (status, stderr) == (0, "")
    first, *_, last = lines = progress_lines(stdout)
    assert last["held_out"] < BIGRAM < first["held_out"], stdout
    needed = [line for line in lines if line["held_out"] > BIGRAM]
    tokens = 50 * 16 * 128  # between two lines
    assert sum(tokens / line["speed"] for line in [*needed, last]) < seconds


# ---- bytes sent, counted where nobody else sends any ---------------------------------------------------------------

N, LAYERS, BATCH, LENGTH, WIDTH, LR = 2, 2, 8, 128, 64, 0.01  # of all cases but the pipelines
PIPELINES = [("1F1B", 2), ("GPipe", 2), ("InterleavedZeroBubble", 6)]  # and, by the docstring, what is sent, / A
if torch.__version__ >= "2.12":  # min_PP.py refuses it before
    PIPELINES.append(("ZBVZeroBubble", 4))


def sent_on_loopback():
    """Bytes that all processes of this network namespace have sent, headers included; all ranks must call it."""
    dist.barrier()
    with open("/proc/net/dev") as file:
        return next(int(line.split()[9]) for line in file if line.strip().startswith("lo:"))


def prepare(script, model, args):
    """The model as a script splits it, and its optimizer."""
    if script is min_ZeRO:
        return model, min_ZeRO.ZeRO(model.parameters(), torch.optim.SGD, lr=LR)
    if script in (min_PP, min_PP_FSDP_TP):
        pipeline = script.make_pipeline(gpt.make_meta_model(args), args)
        return pipeline, make_optimizer("SGD", pipeline.model.parameters(), LR)
    if script is min_Muon:
        model = min_Muon.make_sharded_model(args)
        matrices, rest = min_Muon.split_params(model)
        return model, (min_Muon.Muon(matrices, lr=LR), make_optimizer("SGD", rest, LR))
    if script is min_FSDP:
        min_FSDP.shard(model, args)
    elif script is min_TP:
        min_TP.split_layers(model, init_device_mesh("cpu", (N,)))
    elif script is min_CP:
        model = min_CP.parallelize(model, args.attention)
    elif script is min_DDP_scratch:
        model = min_DDP_scratch.parallelize(model, args)
    elif script is min_CP_ring:
        ring = min_CP_ring.RingGPT(args.layers, args.width, args.heads, args.length)
        ring.load_state_dict(model.state_dict())
        model = min_CP_ring.parallelize(ring)
    elif script is min_EP:
        min_EP.add_experts(model, args)
    elif script is min_EP_FSDP:
        min_EP_FSDP.parallelize(model, args)
        shared, experts = min_EP.split_params(model)
        return model, make_optimizer("SGD", [{"params": shared}, {"params": experts}], LR)
    return model, make_optimizer("SGD", model.parameters(), LR)


def report(script, expected, **changes):
    """Print the bytes that one rank sends per step: 6 steps less 2 steps, which leaves out the set-up.

    The smaller one of two runs counts: on a busy machine TCP sends more packets.
    """
    sizes, totals = {"layers": LAYERS, "length": LENGTH, "width": WIDTH, "log_every": 100}, []
    args = arguments(dist.get_world_size(), **{**sizes, **changes})
    model, optimizer = prepare(script, make_model(args), args)
    data = small_data(args, (0, 1) if n_shares(script, args) == 1 else None)
    for steps in (2, 2, 6, 2, 6):  # the first one also sets up things once
        before, args.steps = sent_on_loopback(), steps
        with contextlib.redirect_stdout(io.StringIO()):
            script.train(model, optimizer, data, args)
        totals.append(sent_on_loopback() - before)
    sent = (min(totals[2::2]) - min(totals[1::2])) / 4 / dist.get_world_size()
    dist.print_primary(json.dumps([f"{script.__name__} {changes}", sent, expected]))


def count_worker(local_rank, world_size):
    dist.init_process_group()
    for schedule, passes in PIPELINES:
        sizes = {"layers": 4, "width": 128, "length": 128, "global_batch_size": 16, "clip": 1.0}
        report(min_PP, passes * 4 * 16 * 128 * 128 / N, micro_batches=4, schedule=schedule, **sizes)
    features = (N - 1) / N * 4 * LENGTH * WIDTH
    logits = (N - 1) / N * 4 * BATCH * LENGTH * 256
    report(min_TP, ((12 * LAYERS + 5) * BATCH + 1) * features + logits)  # 8 L + 4, with gloo's reduce-scatter
    model = make_model(arguments(layers=2, length=LENGTH, width=WIDTH))
    n_params = sum(param.numel() for param in model.parameters())
    ddp, on_gloo = 2 * (N - 1) / N * 4 * n_params, 1.5  # whose reduce-scatter is an all-reduce
    for attention, times in (("ulysses", 2 / N), ("all-gather", 1)):
        report(min_CP, ddp + times * 4 * LAYERS * BATCH * features, attention=attention)
    report(min_CP_ring, ddp + 3 * (N - 1) / N * 8 * LAYERS * BATCH * LENGTH * WIDTH, whole=True)
    blocks = sum(param.numel() for param in make_model(arguments(layers=2, width=WIDTH)).blocks.parameters())
    whole = {"checkpoint_dir": None}
    # Blocks are gathered twice and the rest once, and all is reduced, which takes twice as much on gloo.
    fsdp = (N - 1) / N * 4 * (4 * blocks + 3 * (n_params - blocks))
    report(min_FSDP, fsdp, **whole)
    report(min_ZeRO, on_gloo * ddp)
    report(min_DDP_scratch, ddp, bucket_mb=0.05, compress="none", accumulate=2)
    matrices, _ = min_Muon.split_params(model)
    muon = fsdp + 8 * (N - 1) / N**2 * sum(matrix.numel() for matrix in matrices)
    report(min_Muon, muon, muon_lr=LR, **whole)
    mesh = {"micro_batches": 4, "schedule": "1F1B", "checkpoint_dir": None}
    report(min_PP_FSDP_TP, 4 * BATCH * LENGTH * WIDTH, **mesh, stages=2, shard=1, tensor=1)
    report(min_PP_FSDP_TP, on_gloo * ddp, **mesh, stages=1, shard=2, tensor=1)
    for every in (1, 2):
        report(min_DiLoCo, ddp / every, sync_every=every, outer_lr=0.7, outer_momentum=0.9)
    experts = {"experts": N, "top": 2, "balance": 0.01}  # both, so that all are used evenly
    args = arguments(layers=LAYERS, length=LENGTH, width=WIDTH, **experts)
    model = make_model(args)
    min_EP.add_experts(model, args)
    shared = 2 * (N - 1) / N * sum(param.nbytes for param in min_EP.split_params(model)[0])
    tokens = 4 * LAYERS * 2 * BATCH * features / N
    report(min_EP, shared + tokens, **experts)
    mlps = sum(param.numel() for name, param in model.blocks.named_parameters() if ".experts." in name)
    in_blocks = sum(param.numel() for param in model.blocks.parameters()) - mlps
    n_shared = sum(param.numel() for param in min_EP.split_params(model)[0])
    fsdp = (N - 1) / N * 4 * (4 * in_blocks + 3 * (n_shared - in_blocks))
    report(min_EP_FSDP, fsdp + tokens, expert_parallel=N, **experts)
    report(min_EP_FSDP, fsdp + (N - 1) / N * 4 * 4 * N * mlps, expert_parallel=1, **experts)


def count():
    """Run in a network namespace of its own."""
    dist.launch(count_worker, nprocs=N)


@pytest.mark.guard
@pytest.mark.timeout(400)
def test_bytes_sent_are_those_of_the_docstrings():
    unshare = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    if sys.platform != "linux" or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("network namespaces need Linux and root")
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    job = start("-c", "import test_transformers; test_transformers.count()", prefix=unshare, env=env)
    status, stdout, stderr = finish(job, timeout=360)
    assert status == 0, stderr
    lines = [json.loads(line) for line in stdout.splitlines()]
    assert len(lines) == len(PIPELINES) + 15
    for name, sent, expected in lines:
        print(f"{name}: {sent:,.0f} bytes, {sent / expected:.4f} of the formula")
        assert sent == pytest.approx(expected, rel=0.03)
