"""Every script that trains, on simulated GPUs (tools/sim): its weights are those of CPU processes, and no stream races.

An operator raises where streams race, where tensors of two devices meet, and where a collective gets what NCCL refuses.
The host cannot read what a copy has not filled. Kernels and numbers are the CPU's.
"""

import functools
import json
import re

import pytest
import torch
from conftest import ROOT, finish, guards, run, simulated_gpus, slow, start, wait_for

import distributed as dist
import gpt
from tests import on_devices

STEPS = ("--steps", 3, "--log-every", 3, "--clip", 1, "--width", 32, "--layers", 1)
IMAGES = ("--epochs", 1, "--test-batch-size", 20)
DIGITS = ("mnist_DDP", *IMAGES, "--global-batch-size", 64)
GRPO = ("--steps", 3, "--prompts", 4, "--imitation-steps", 3)
LLM = ("llm_FSDP", "--data", "../documents-0.jsonl", "--epochs", 0.5, "--length", 64, "--warmup", 1, "--log-every", 2)
QUICK = [
    ("min_DDP", "--epochs", 1),
    ("min_FSDP_scratch", *STEPS, "--layers", 2),
]
MAIN = [
    ("min_DDP_scratch", *STEPS, "--bucket-mb", 0.01),
    ("min_CP_ring", *STEPS, "--length", 40),  # 20 positions per rank: no multiple of 32
    ("min_CP_packed", *STEPS, "--length", 40),
    ("min_FSDP", *STEPS, "--layers", 2),
    ("min_ZeRO", *STEPS),
    ("min_TP", *STEPS),
    ("min_PP", *STEPS, "--layers", 2),
    (*DIGITS, "--accumulate", 2, "--clip", 1, "--num-workers", 1),
    (*LLM, "--no-bf16", "--output", "../llm"),
    (*LLM, "--no-bf16", "--model", "../llm", "--lora", 2),
]
MORE = [
    ("min_Bitwise", *STEPS, "--clip", 1),
    ("min_Join", *STEPS, "--least", 3),
    ("mnist_FSDP", *IMAGES, "--batch-size", 32),
    ("min_FSDP", *STEPS, "--bf16"),
    ("min_FSDP", *STEPS, "--checkpoint-dir", "../fsdp"),
    ("min_FSDP", *STEPS, "--steps", 6, "--checkpoint-dir", "../fsdp"),  # resumes
    ("min_CP", *STEPS),
    ("min_CP", *STEPS, "--attention", "all-gather"),
    ("min_DiLoCo", *STEPS, "--sync-every", 2),
    ("min_EP", *STEPS),
    ("min_GRPO", *GRPO, "--output", "model.pt"),
    ("min_Muon", *STEPS, "--layers", 2),
    ("min_PP", *STEPS, "--layers", 4, "--schedule", "ZBVZeroBubble"),
    ("min_Packing", *STEPS, "--accumulate", 2),
    ("min_Stream", *STEPS, "--num-workers", 1, "--snapshot-path", "../stream.pt"),
    ("min_Stream", *STEPS, "--steps", 6, "--num-workers", 0, "--snapshot-path", "../stream.pt"),  # resumes
    (*DIGITS, "--bf16"),
    ("multigpu_torchrun", 2, 1, "--batch-size", 256),
    ("multinode_torchrun", 2, 1, "--num-workers", 1),
    (*LLM, "--bf16", "--recompute", "--gather-once"),
]
FOUR = [
    ("min_FSDP_TP", *STEPS, "--tensor", 2),
    ("min_FSDP_TP", *STEPS, "--replicate", 2, "--recompute"),
    ("min_PP_FSDP_TP", *STEPS, "--layers", 4, "--micro-batches", 2, "--schedule", "Interleaved1F1B"),
    ("min_EP_FSDP", *STEPS),
    ("min_GRPO_async", *GRPO),
]
LARGE = ("--steps", 2, "--width", 128, "--layers", 4, "--heads", 4, "--length", 16, "--global-batch-size", 2)
MEMORY = [(script, *LARGE) for script in ("min_FSDP", "min_FSDP_scratch", "min_ZeRO", "min_Muon", "min_TP")]
MEMORY += [("min_DDP_scratch", *LARGE)]
JOBS = {"quick": (2, QUICK), "main": (2, MAIN), "more": (2, MORE), "four": (4, FOUR), "memory": (2, MEMORY)}
CASES = [(job, i) for job, (_, cases) in JOBS.items() if job != "memory" for i in range(len(cases))]
# Rounding grows with the steps of generation. In bfloat16 it may change the sign of a small gradient, and with it a
# step of Adam.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 0.05}
GENERATES = 1e-9


def marked(case):
    if case[0] == "quick":
        return [case]
    return guards(case) if case[0] == "main" else slow(case)


def name(case):
    return " ".join(map(str, JOBS[case[0]][1][case[1]]))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    @functools.cache
    def of(job):
        """What the processes of all cases have trained, on devices and on CPUs, and what was said about errors."""
        n, cases = JOBS[job]
        folder = tmp_path_factory.mktemp(job)
        command = ("-m", "tests.on_devices", folder / "devices", json.dumps(cases))
        _, _, stderr = run(*command, env=simulated_gpus(n), timeout=550)
        dist.launch(on_devices.train, cases, str(folder / "cpus"), nprocs=n)
        return *[on_devices.read(folder / where, cases, n) for where in ("devices", "cpus")], stderr

    return of


@pytest.mark.parametrize("case", [param for case in CASES for param in marked(case)], ids=name)
def test_a_script_trains_as_on_cpus(case, trained):
    job, i = case
    on_gpus, on_cpus, stderr = trained(job)
    assert on_gpus[i], stderr
    assert all(each["peak"] for each in on_gpus[i])
    have_trained = [bool(each["params"]) for each in on_gpus[i]]
    assert all(have_trained) or ("GRPO_async" in name(case) and any(have_trained))  # its generators train nothing
    generates = "GRPO" in name(case)
    for ours, expected in zip(on_gpus[i], on_cpus[i], strict=True):
        for a, b in zip(ours["params"], expected["params"], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=GENERATES if generates else TOLERANCE[a.dtype])


SIX = ("--steps", 6, "--log-every", 6, "--width", 32, "--layers", 2)
# Not min_EP.py, which waits for the number of tokens of each expert, nor min_Join.py, where DDP waits for the number of
# ranks that have batches left.
WITHOUT_WAITS = [(f"min_{name}", *SIX) for name in ("FSDP", "FSDP_scratch", "DDP_scratch", "ZeRO", "Muon", "TP", "PP")]
WITHOUT_WAITS += [
    (f"min_{name}", *SIX, "--clip", 1) for name in ("CP", "CP_ring", "CP_packed", "DiLoCo", "Packing", "Stream")
]
WITHOUT_WAITS += [("min_DDP", "--epochs", 1, "--batch-size", 2), ("multigpu_torchrun", 1, 1, "--batch-size", 64)]
WITHOUT_WAITS += [("mnist_DDP", *IMAGES, "--global-batch-size", 8), ("mnist_FSDP", *IMAGES, "--batch-size", 4)]


@pytest.mark.slow
def test_no_step_waits_for_the_device(tmp_path):
    command = ("-m", "tests.on_devices", tmp_path, json.dumps(WITHOUT_WAITS), "without_waits")
    status, _, stderr = run(*command, env=simulated_gpus(2), timeout=550)
    assert status == 0, stderr


def formula(script, n):
    """From the script's docstring: the numbers of 4 bytes between two steps, and at most in a step. N is `n`."""
    model = gpt.GPT(gpt.Config(4, 128, 4, 16))
    every = sum(param.numel() for param in model.parameters())
    block = sum(param.numel() for param in model.blocks[0].parameters())
    root = every - 4 * block
    matrices = [param.numel() for param in model.blocks.parameters() if param.dim() == 2]
    kept, more = {
        "min_FSDP": (4 * every / n, 5 * block + 2 * root),
        "min_FSDP_scratch": (4 * every / n, 4 * block + 2 * root),
        "min_ZeRO": (2 * every + 2 * every / n, 0),
        "min_Muon": ((4 * every - sum(matrices)) / n, max(5 * block + 2 * root, 7.5 * max(matrices))),
        "min_TP": (4 * every / n, 0),
        "min_DDP_scratch": (4 * every, 0),
    }[script]
    return kept, kept + more


@pytest.mark.slow
@pytest.mark.parametrize("i", range(len(MEMORY)), ids=[case[0] for case in MEMORY])
def test_the_peak_of_memory_is_that_of_the_docstring(i, trained):
    """The activations of two short sequences, the buffers of a ring and rounded sizes come on top."""
    on_gpus, _, stderr = trained("memory")
    assert on_gpus[i], stderr
    least, most = formula(MEMORY[i][0], 2)
    for of_rank in on_gpus[i]:
        numbers = of_rank["peak"] / 8  # float64
        assert 0.98 * least < numbers < 1.15 * most, (numbers, least, most)


@pytest.mark.slow
def test_parity_compares_devices():
    command = (ROOT / "parity.py", "--steps", 3, ROOT / "min_ZeRO.py", "--width", 32, "--layers", 1)
    status, stdout, stderr = run(*command, env=simulated_gpus(2), timeout=400)
    assert status == 0 and "equal on 1 and 2 processes for 3 steps" in stdout, stdout + stderr


@pytest.mark.slow
def test_watch_tells_that_a_rank_waits_for_its_device(tmp_path):
    log = tmp_path / "log"
    process = start("-m", "tests.sim_cases", "watched", env={**simulated_gpus(2), "WATCH_SECONDS": "2"}, log=log)
    places = r"rank 0 in sim_cases.py:\d+ x.sum\(\).item\(\) \| rank 1 in sim_cases.py:\d+ "
    wait_for(lambda: re.search(rf"no progress for \d+ s: {places}", log.read_text()), process)
    process.terminate()
    finish(process)
