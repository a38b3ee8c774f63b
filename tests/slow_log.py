"""The log of the slow tests, benchmarks/results/slow_tests.json: when each last ran, how long it took, and its outcome.

`make test-slow` says by it how long it will take, and writes it. `pytest -p tests.slow_log -m slow FILES` does the same
for some tests. The rows of the others stay, also of tests that are gone: delete the log before a run of all.
"""

import datetime
import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOG = ROOT / "benchmarks" / "results" / "slow_tests.json"
SIDE_BY_SIDE = 3  # tests at a time, as in the Makefile

this_run = {}  # by test, what this run adds to the log


def read():
    """By the name of each test: date, commit, seconds, outcome."""
    return json.loads(LOG.read_text()) if LOG.exists() else {}


def pytest_report_header():
    log = read()
    if log:
        minutes = sum(row["seconds"] for row in log.values()) / SIDE_BY_SIDE / 60
        failed = [name for name, row in log.items() if row["outcome"] == "failed"]
        return [
            f"the {len(log)} slow tests of the log took {minutes:.0f} minutes, three at a time",
            f"failed when they last ran: {failed or 'none'}",
        ]


def pytest_runtest_logreport(report):
    if "slow" not in report.keywords:
        return
    row = this_run.setdefault(report.nodeid, {"seconds": 0, "outcome": "passed"})
    row["seconds"] += report.duration
    if report.outcome != "passed":
        row["outcome"] = report.outcome


def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput"):  # a process of pytest-xdist
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    date = datetime.date.today().isoformat()
    log = read()
    for name, row in this_run.items():
        log[name] = {"date": date, "commit": commit, "seconds": round(row["seconds"], 1), "outcome": row["outcome"]}
    lines = [f"{json.dumps(name)}: {json.dumps(log[name])}" for name in sorted(log)]
    LOG.write_text("{\n" + ",\n".join(lines) + "\n}\n")
