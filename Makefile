PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow lint clean

demo: .venv/installed  ## train the minimal example
	$(BIN)/python min_DDP.py

test: .venv/installed-dev  ## the quick tests
	$(BIN)/python -m pytest

test-slow: .venv/installed-dev  ## the tests that need minutes
	$(BIN)/python -m pytest -m slow

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf .venv

$(BIN)/python:
	$(PYTHON) -m venv .venv

.venv/installed: requirements.txt | $(BIN)/python
	$(BIN)/pip install --quiet -r requirements.txt
	touch $@

.venv/installed-dev: requirements-dev.txt requirements-flyte.txt requirements-tracking.txt .venv/installed
	$(BIN)/pip install --quiet -r requirements-dev.txt
	touch $@
