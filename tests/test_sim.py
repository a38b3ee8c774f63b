"""The simulated GPUs of tools/sim: each mistake of sim_cases.py is named, and each right use raises no alarm."""

import functools
import json
import re
import subprocess
import sys
import time

import gpu_job
import pytest
import sim_cases
from conftest import ROOT, run, simulated_gpus

from tools.sim import build

GUARD = [pytest.mark.slow, pytest.mark.guard]


@functools.cache
def results(which):
    """By rank, a dict of all cases."""
    status, stdout, stderr = run("-m", "tests.sim_cases", which, env=simulated_gpus(2), timeout=200)
    assert (status, stderr) == (0, "")
    return json.loads(stdout)


def check(name, words, found):
    for of_rank in found:
        if words is None:
            assert of_rank[name] is None
        else:
            assert re.search(words, of_rank[name] or "no error", re.S), of_rank[name]


@pytest.mark.parametrize("name", [*sim_cases.MISTAKES, *sim_cases.RIGHT])
def test_one_process(name):
    check(name, (sim_cases.MISTAKES | sim_cases.RIGHT)[name][1], results("one"))


@pytest.mark.slow
@pytest.mark.guard
@pytest.mark.parametrize("name", [*sim_cases.RANKS_MISTAKES, *sim_cases.RANKS_RIGHT])
def test_two_ranks(name):
    check(name, (sim_cases.RANKS_MISTAKES | sim_cases.RANKS_RIGHT)[name][1], results("ranks"))


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_a_timeout():
    status, stdout, stderr = run("-m", "tests.sim_cases", "late", env=simulated_gpus(2), timeout=120)
    assert status == 0, stderr
    assert re.search("simccl: ALLREDUCE: .*Timed out waiting 3000ms", stdout, re.S), stdout


@pytest.mark.slow
def test_two_ranks_on_one_device_are_told():
    status, stdout, stderr = run("-m", "tests.sim_cases", "one_device", env=simulated_gpus(2), timeout=120)
    assert status == 0, stderr
    assert "Duplicate GPU detected : rank 0 and rank 1 both on sim:0" in json.loads(stdout), stdout


@pytest.mark.slow
def test_a_killed_rank_ends_the_job():
    begin = time.perf_counter()
    status, _, stderr = run("-m", "tests.sim_cases", "killed", env=simulated_gpus(2), timeout=200)
    assert status != 0 and "SIGKILL" in stderr
    assert time.perf_counter() - begin < 120


@pytest.mark.slow
def test_a_failed_rank_is_named():
    status, _, stderr = run(gpu_job.__file__, "fail", env=simulated_gpus(2), timeout=200)
    assert status == 1 and "ZeroDivisionError: the cause" in stderr


PAGE = (ROOT / "docs" / "sim.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```\n`(.*?)`$", PAGE, re.M | re.S)
JOIN = """
import os, torch
torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("i", range(len(EXAMPLES)))
def test_the_examples_of_the_page(i, tmp_path):
    code, line = EXAMPLES[i]
    path = tmp_path / "train.py"
    if "all_reduce" in code:
        path.write_text(JOIN + code)
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "auto", path)
        status, _, stderr = run(*torchrun, env={**simulated_gpus(2), "OMP_NUM_THREADS": "1"}, timeout=200)
    else:
        path.write_text("import torch\n" + code)
        status, _, stderr = run(path, env=simulated_gpus(2))
    assert status != 0 and line in stderr, stderr


@pytest.mark.slow
def test_a_compiler_that_makes_code_for_gpus_is_an_error():
    code = "import torch; torch.compile(lambda x: x * 2)(torch.ones(3, device='sim'))"
    status, _, stderr = run("-c", code, env=simulated_gpus(2), timeout=200)
    assert status == 1 and "InductorError" in stderr, stderr


def test_the_page_is_short_and_has_an_example_of_each_kind():
    assert len(EXAMPLES) == 4 and len(PAGE.splitlines()) <= 85


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("SIM_DEVICES", "200", "0 to 64"),
        ("SIM_DEVICES", "two", "0 to 64"),
        ("SIM_DEVICES", "-1", "0 to 64"),
        ("SIM_MEMORY_MB", "0", "1 to 16777216"),
        ("SIM_MEMORY_MB", "1GB", "1 to 16777216"),
    ],
)
def test_a_wrong_setting_is_a_line(name, value, allowed):
    line = f"{name} is {value}: it must be an integer from {allowed}\n"
    assert run("-c", "import torch", env={**simulated_gpus(2), name: value}) == (1, "", line)


@pytest.mark.slow
def test_without_the_variable_there_is_no_device():
    env = {**simulated_gpus(0), "CUDA_VISIBLE_DEVICES": ""}
    code = "import sys, torch; print(torch.accelerator.is_available(), 'simgpu._C' in sys.modules)"
    assert run("-c", code, env=env) == (0, "False False\n", "")


def test_it_is_built_once_and_a_missing_compiler_is_a_line(tmp_path, monkeypatch):
    simulated_gpus(1)
    library = build.FOLDER / "simgpu" / "_C.so"
    before = library.stat().st_mtime_ns
    build.build()
    assert library.stat().st_mtime_ns == before
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.why_not() == "simulated GPUs need g++ (apt-get install g++)"
    command = [sys.executable, ROOT / "tools" / "sim" / "build.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, f"not built: {build.why_not()}\n")
    monkeypatch.undo()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.11.0")
    assert build.why_not() == "simulated GPUs need torch 2.14, and this is 2.11.0"
