PYTHON ?= python3
BIN := .venv/bin

MINUTES ?= 30
N ?= 60
SEED ?= 0
# Three files of tests at a time, on two cores: they wait more than they compute. conftest.py orders the files.
SIDE_BY_SIDE := -n 3 --dist loadfile --no-loadscope-reorder

# Where this is set, every worker of a test compiles the project's modules anew. Images of Python set it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo sim test test-slow test-guard test-gpu test-versions soak mutants lint bench plots clean

demo: .venv/installed  ## train the minimal example
	$(BIN)/python min_DDP.py

sim: .venv/installed  ## build the simulated GPUs into .sim/; tests that need them skip if g++ is missing
	-@$(BIN)/python tools/sim/build.py

test: .venv/installed-dev sim  ## the quick tests
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

test-slow: .venv/installed-dev sim  ## the tests that need minutes: says how long by the log of the last run
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -p tests.slow_log -m slow

test-guard: .venv/installed-dev sim  ## the slow tests that CI runs
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "slow and guard"

test-gpu: .venv/installed-dev  ## what needs a GPU
	$(BIN)/python -m pytest -m gpu

test-versions:  ## the quick tests on every version of torch from 2.11 on
	$(PYTHON) -m tools.versions

soak: .venv/installed-dev  ## random jobs under load, for MINUTES
	$(BIN)/python -m tools.soak --minutes $(MINUTES)

mutants: .venv/installed-dev  ## do the tests notice N random changes?
	$(BIN)/python -m tools.mutants -n $(N) --seed $(SEED)

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: .venv/installed-bench  ## measure most, in less than ten minutes on two idle cores
	$(BIN)/python -m benchmarks.launch --rounds 1
	$(BIN)/python -m benchmarks.throughput
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.data_path --rounds 3
	$(BIN)/python -m benchmarks.fsdp_memory
	$(BIN)/python -m benchmarks.snapshot_stall --repeats 3
	$(BIN)/python -m benchmarks.param_server --rounds 3
	$(BIN)/python -m benchmarks.scaling

plots: .venv/installed-bench  ## draw what was measured
	$(BIN)/python -m benchmarks.plots

clean:
	rm -rf .venv .sim

$(BIN)/python:
	$(PYTHON) -m venv .venv

.venv/installed: requirements.txt | $(BIN)/python
	$(BIN)/pip install --quiet -r requirements.txt
	touch $@

.venv/installed-dev: requirements-dev.txt requirements-flyte.txt requirements-llm.txt requirements-tracking.txt .venv/installed
	$(BIN)/pip install --quiet -r requirements-dev.txt
	touch $@

.venv/installed-bench: requirements-bench.txt .venv/installed
	$(BIN)/pip install --quiet -r requirements-bench.txt
	touch $@
