"""The simulated GPUs of tools/sim: each mistake of sim_cases.py is named, and each right use raises no alarm."""

import functools
import json
import os
import re

import gpu_job
import pytest
import sim_cases
from conftest import ROOT, run, simulated_gpus

from tools.sim import build


@functools.cache
def results(which):
    """By rank, a dict of all cases."""
    status, stdout, stderr = run("-m", "tests.sim_cases", which, env=simulated_gpus(2), timeout=200)
    assert (status, stderr) == (0, "")
    return json.loads(stdout)


def check(cases, name, which):
    """A mistake is told in these words on each rank, and of a right use nothing is said."""
    _, words = cases[name]
    for of_rank in results(which):
        said = "no error" if of_rank[name] is None else of_rank[name]
        assert re.search(words or "^no error$", said, re.S), said


@pytest.mark.parametrize("name", [*sim_cases.MISTAKES, *sim_cases.RIGHT])
def test_one_process(name):
    check(sim_cases.MISTAKES | sim_cases.RIGHT, name, "one")


@pytest.mark.slow
@pytest.mark.guard
@pytest.mark.parametrize("name", [*sim_cases.RANKS_MISTAKES, *sim_cases.RANKS_RIGHT])
def test_two_ranks(name):
    check(sim_cases.RANKS_MISTAKES | sim_cases.RANKS_RIGHT, name, "ranks")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("late", "simccl: ALLREDUCE: .*Timed out waiting 3000ms"),
        ("one_device", "Duplicate GPU detected : rank 0 and rank 1 both on sim:0"),
    ],
)
def test_ranks_that_do_not_meet_are_told(case, words):
    status, stdout, stderr = run("-m", "tests.sim_cases", case, env=simulated_gpus(2), timeout=120)
    assert status == 0 and re.search(words, stdout, re.S), stdout + stderr


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
@pytest.mark.parametrize("i", range(4))
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "SIM_DEVICES is 200: it must be an integer from 0 to 64\n",
        "SIM_DEVICES is two: it must be an integer from 0 to 64\n",
        "SIM_MEMORY_MB is 0: it must be an integer from 1 to 16777216\n",
    ],
)
def test_a_wrong_setting_is_a_line(line):
    name, _, value = line.partition(":")[0].split()
    assert run("-c", "import torch", env={**simulated_gpus(2), name: value}) == (1, "", line)


@pytest.mark.slow
def test_without_the_variable_there_is_no_device():
    env = {**simulated_gpus(0), "CUDA_VISIBLE_DEVICES": ""}
    code = "import sys, torch; print(torch.accelerator.is_available(), 'simgpu._C' in sys.modules)"
    assert run("-c", code, env=env) == (0, "False False\n", "")


def test_it_is_built_once():
    simulated_gpus(1)
    library = build.FOLDER / "simgpu" / "_C.so"
    before = library.stat().st_mtime_ns
    build.build()
    assert library.stat().st_mtime_ns == before


def test_what_it_lacks_is_a_line(tmp_path):
    """In a folder without g++, or with an older torch."""
    for version, path, line in (
        ("2.14.0", str(tmp_path), "not built: simulated GPUs need g++ (apt-get install g++)\n"),
        ("2.11.0", os.environ["PATH"], "not built: simulated GPUs need torch 2.14, and this is 2.11.0\n"),
    ):
        metadata = tmp_path / f"torch {version}" / "torch.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        environment = {"PATH": path, "PYTHONPATH": str(metadata.parent)}
        assert run("tools/sim/build.py", env=environment) == (1, "", line)
