"""Run the tests on every version of torch that the project promises, one after the other: `make test-versions`.

    python -m tools.versions                             # all versions
    python -m tools.versions 2.11.0 2.15.0               # these ones
    python -m tools.versions 2.11.0 -- tests/test_gpt.py -m ''    # what follows -- goes to pytest, instead of its runs

Each version gets a virtual environment in .versions/, which needs some gigabytes and is kept for the next time. A
version that cannot be installed, or a test that fails, does not stop the others. At the end it prints a table, ready
for docs/results.md, and exits with 1 unless all versions have passed.
"""

import datetime
import platform
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
SPLIT_MODELS = ["tests/test_equal.py", "tests/test_min_PP.py"]
SPLIT_ROWS = "min_PP- or min_TP- or min_FSDP_TP- or test_min_PP.py"
RUNS = {
    "quick tests": [],
    # Pipelines and clipping differ between the versions.
    "slow tests of split models": ["-m", "slow", "-k", SPLIT_ROWS, *SPLIT_MODELS],
}


def main(args):
    versions, options = args, None
    if "--" in args:
        versions = args[: args.index("--")]
        options = args[args.index("--") + 1 :]
    runs = RUNS
    if options:
        runs = {" ".join(options): options}

    rows = []
    for version in versions or VERSIONS:
        python = ROOT / ".versions" / version / "bin" / "python"
        problem = install(version, python)
        if problem:
            rows.append((version, "all", f"not installable: {problem}"))
            continue
        for name, run_options in runs.items():
            rows.append((version, name, run_tests(python, run_options)))

    print(f"\n{datetime.date.today()}, Python {platform.python_version()}, {platform.machine()}\n")
    print("| torch | tests | result |\n|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return all(result.startswith("passed") for _, _, result in rows)


def install(version, python):
    """Make the environment, or complete it. Returns why that is impossible, in a line, or None."""
    print(f"\n==== torch {version}", flush=True)
    if not python.exists():
        venv.create(python.parent.parent, with_pip=True)
    # Three equals signs: another build of the same version, such as 2.13.0+cpu, may not go with any torchvision.
    pip = [python, "-m", "pip", "install", "--quiet", "-r", ROOT / "requirements-dev.txt", f"torch==={version}"]
    for command in (pip, [python, "-c", "import torch, torchvision"]):
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("[notice]")]
            return lines[-1].strip() if lines else f"status {done.returncode}"
    return None


def run_tests(python, options):
    """Run pytest and show what it prints. Returns its result and its last line."""
    command = [python, "-m", "pytest", "-q", *options]
    last_line = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            last_line = line.strip() or last_line
    result = "failed"
    if process.returncode == 0:
        result = "passed"
    return f"{result}: {last_line.strip('= ')}"


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:]) else 1)
