"""Run scripts as a user would, bounded in time and with nothing left behind."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def pytest_addoption(parser):
    parser.addoption("--torchrun-jobs", type=int, default=150, help="jobs of the stress test of the end of a job")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Tests start as a user's shell does: under no launcher."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def start(*command, cwd=ROOT, env=None):
    """Start a Python command line; `env` is added to the environment. stdout and stderr are read through pipes."""
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, timeout=90):
    """Wait for a started command; returns (exit status, stdout, stderr)."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its workers on SIGTERM, and leaves them on SIGKILL
        try:
            stdout, stderr = process.communicate(timeout=35)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        pytest.fail(f"{process.args} did not end within {timeout} s\n{stdout}\n{stderr}")
    return process.returncode, stdout, stderr


def run(*command, timeout=90, **kwargs):
    """Run a Python command line to its end; returns (exit status, stdout, stderr)."""
    return finish(start(*command, **kwargs), timeout)


def torchrun(nproc, script, *args, **kwargs):
    """Run a script under the real torchrun on this machine; returns (exit status, stdout, stderr)."""
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", nproc, script, *args)
    return run(*command, **kwargs)


@pytest.fixture
def main_of(monkeypatch, capsys):
    """Run a script's `__main__` in this process, which must exit; returns (exit status, stderr). Starts no process."""
    import distributed

    def launch_is_not_reached(*args, **kwargs):
        raise AssertionError("launch was called")

    def call(script, *args):
        monkeypatch.setattr(sys, "argv", [script, *args])
        monkeypatch.setattr(distributed, "launch", launch_is_not_reached)
        with pytest.raises(SystemExit) as exit_info:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        return exit_info.value.code, capsys.readouterr().err

    return call
