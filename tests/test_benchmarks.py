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


OPTIONS = {
    "actor_learner": ("--rounds", 1, "--updates", 1),
    "all_reduce": ("--widths", 32, "--rounds", 1),
    "data_path": ("--rounds", 1),
    "drift_check": ("--rounds", 1),
    "fsdp_memory": ("--model", "shallow"),
    "generation": ("--small", "--rounds", 1),
    "launch": ("--no-peers", "--rounds", 1, "--sizes", 1, 2),
    "lost_process": ("--nproc", 2, "--kills", 1),
    "overhead": ("--rounds", 1),
    "param_server": ("--rounds", 1),
    "scaling": ("--sizes", 1, 2, "--rounds", 1),
    "snapshot_stall": ("--megabytes", 20, "--repeats", 1),
    "step": ("--model", "tiny", "--rounds", 1),
    "text_data": ("--rounds", 1),
    "throughput": ("--no-peers", "--rounds", 1, "--steps", 4),
}


# How many ratios with a promise they give at least.
RATIOS = {"throughput": 6, "overhead": 1, "fsdp_memory": 3, "scaling": 1, "step": 7, "drift_check": 1, "all_reduce": 3}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", OPTIONS)
def test_benchmark_runs_and_stores(name, tmp_path):
    env = {"BENCHMARK_RESULTS": str(tmp_path)}
    status, stdout, stderr = run("-m", f"benchmarks.{name}", *OPTIONS[name], env=env, timeout=800)
    assert status == 0, stderr
    (path,) = tmp_path.glob(f"{name}*.json")
    record = json.loads(path.read_text())
    assert record["results"] and f"written to {path}" in stdout
    ratios = record.get("ratios", {})
    assert len(ratios) >= RATIOS.get(name, 0)
    for ratio, row in ratios.items():
        assert ratio in stdout and f"promised: {row['promise']}" in stdout
        if "held" in ratio:
            assert 0.99 <= row["median"] <= 1.02
        if row["promise"] == "under 0.01":
            assert row["median"] < 0.01


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
