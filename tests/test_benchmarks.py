"""The benchmarks run and say what they promise; their pictures show the stored results."""

import json

import pytest
from conftest import run

from benchmarks import common, scaling


def test_ratio_is_taken_within_rounds():
    row = common.ratio([1.0, 20.0, 3.0], [2.0, 10.0, 1.0], "at least 1")
    assert row == {"n": 3, "median": 2.0, "min": 0.5, "max": 3.0, "promise": "at least 1"}


def test_model_of_the_step_time():
    predict = scaling.predicted
    assert predict(1, 0.1, 1e6, 1e9, 2) == 0.1
    assert predict(2, 0.1, 1e6, 1e9, 2) == pytest.approx(0.1 + 4e6 / 1e9)
    assert predict(8, 0.1, 1e6, 1e9, 2) == pytest.approx(4 * (0.1 + 1.75 * 4e6 / 1e9))
    assert predict(8, 0.1, 1e6, 1e9) == pytest.approx(0.1 + 1.75 * 4e6 / 1e9)  # GPUs


SMALLEST = {  # and how many ratios they give
    "launch": (0, "--no-peers", "--rounds", 1, "--sizes", 1, 2),
    "throughput": (6, "--no-peers", "--rounds", 1, "--steps", 4),
    "overhead": (1, "--rounds", 1),
    "fsdp_memory": (3, "--model", "shallow"),
    "scaling": (1, "--sizes", 1, 2, "--rounds", 1),
    "step": (7, "--model", "tiny", "--rounds", 1),
    "drift_check": (1, "--rounds", 1),
    "all_reduce": (3, "--widths", 32, "--rounds", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_benchmark_runs(name, tmp_path):
    ratios, *options = SMALLEST[name]
    status, stdout, stderr = run("-m", f"benchmarks.{name}", *options, env={"BENCHMARK_RESULTS": str(tmp_path)})
    assert status == 0, stderr
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert len(record["ratios"]) == ratios
    for ratio, row in record["ratios"].items():
        assert ratio in stdout and f"promised: {row['promise']}" in stdout
        if "held" in ratio:
            assert 0.99 <= row["median"] <= 1.02
        if row["promise"] == "under 0.01":
            assert row["median"] < 0.01


OTHERS = {
    "actor_learner": ("--rounds", 1, "--updates", 1),
    "data_path": ("--rounds", 1),
    "generation": ("--small", "--rounds", 1),
    "lost_process": ("--nproc", 2, "--kills", 1),
    "param_server": ("--rounds", 1),
    "snapshot_stall": ("--megabytes", 20, "--repeats", 1),
    "text_data": ("--rounds", 1),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", OTHERS)
def test_benchmark_runs_and_stores(name, tmp_path):
    env = {"BENCHMARK_RESULTS": str(tmp_path)}
    status, stdout, stderr = run("-m", f"benchmarks.{name}", *OTHERS[name], env=env, timeout=800)
    assert status == 0, stderr
    (path,) = tmp_path.glob(f"{name}*.json")
    assert json.loads(path.read_text())["results"] and f"written to {path}" in stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_benchmarks_of_the_transformer_scripts_run_and_are_drawn(tmp_path):
    env = {"BENCHMARK_RESULTS": str(tmp_path)}
    for command in (("transformer", "--small", "--rounds", 1, "--steps", 3), ("sharing", "--small")):
        status, _, stderr = run("-m", f"benchmarks.{command[0]}", *command[1:], env=env, timeout=400)
        assert status == 0, stderr
    records = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(records) == {"transformer", "sharing_state", "sharing_talk", "sharing_tokens"}

    assert run("-m", "benchmarks.plots", "--folder", tmp_path, env=env)[0] == 0
    assert {path.stem for path in tmp_path.glob("*.svg")} == set(records)
