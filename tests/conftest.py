"""Run scripts as a user would, bounded in time and with nothing left behind."""

import collections
import contextlib
import datetime
import functools
import gc
import importlib
import inspect
import itertools
import multiprocessing
import os
import pkgutil
import re
import resource
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
import distributed
import tests.shared_server  # noqa: F401
from tools.sim import build as sim

ROOT = Path(__file__).parent.parent
PRELOADED = ["torch._dynamo", "torch.distributed.nn.functional", "torchvision", "torch.distributed.checkpoint"]
PRELOADED += [f"torch.distributed.{name}" for name in ("fsdp", "pipelining", "rpc", "tensor.parallel")]
PRELOADED += ["transformers.modeling_layers", "pytest", "psutil"]
PRELOADED += ["torch.distributed.checkpoint.state_dict", "torch.distributed.algorithms.ddp_comm_hooks"]
PRELOADED += ["tests.before_forks"]  # last, since it moves the memory of all the others
MNIST_ROOT = os.environ.get("MNIST_ROOT")
needs_mnist = pytest.mark.skipif(not MNIST_ROOT, reason="MNIST_ROOT does not say where MNIST is")
SLOW_GUARD = [pytest.mark.slow, pytest.mark.guard]
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def slow(*values):
    """Values of a parameter for which a test is slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def guards(*values):
    """Values of a parameter for which a test is slow, and a guard."""
    return [pytest.param(value, marks=SLOW_GUARD) for value in values]


def pytest_configure(config):
    # Tests run on the CPU, except those that need a GPU: two ranks may not share one under NCCL.
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gc.disable()  # until all tests are imported
    # Two threads that wait for each other take a hundred times as long as one where other processes compute too.
    torch.set_num_threads(1)
    if hasattr(config, "workerinput") and sys.version_info < (3, 14):
        share_fork_server(config.workerinput["fork_server"])
        return
    # All workers are forked from one server, which has what any script imports: none of them spends a second on that.
    forkserver.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ):
        os.environ.pop("PYTHONUNBUFFERED", None)  # it would hide what a worker does not flush
        forkserver.ensure_running()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Tell a process of pytest-xdist the address of the fork server, before it starts."""
    node.workerinput["fork_server"] = forkserver._forkserver._forkserver_address


def share_fork_server(address):
    """Use the fork server of pytest's first process. To start another one would take ten seconds of a core.

    multiprocessing has no public function for this. Before Python 3.14, which asks for a key, the address is enough.
    """
    server = forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # pytest's first process keeps the server alive
    server.ensure_running = forkserver.ensure_running = resource_tracker.ensure_running


# They need most time, and run first. The last file to be run would otherwise run alone.
LONGEST = ["test_equal.py"]
LONGEST += [f"test_{name}.py" for name in ("equal_images", "launch", "llm_FSDP", "readme", "mnist_DDP", "templates")]
LONGEST += [f"test_min_{name}.py" for name in ("FSDP", "PP_FSDP_TP", "DDP_scratch", "Stream", "GRPO")]
LONGEST += ["test_rpc_param_server.py", "test_multigpu_torchrun.py", "test_gpt.py"]
LONGEST += [f"test_{name}.py" for name in ("multinode_torchrun", "on_devices", "slurm")]  # the guards


def pytest_collection_finish():
    """Each visit of the garbage collector to all that has been imported would take 0.3 s."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONGEST)


STARTED = []  # all that `start` has started


def pytest_sessionfinish():
    """End the commands that a failed test has left running."""
    for process in STARTED:
        if process.poll() is None:
            process.terminate()


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Tests start as a user's shell does: under no launcher."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True, scope="module")
def no_group():
    """The tests of a file do not see a process group of the file before."""
    yield
    distributed.cleanup()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def float64():
    """Where rounding cannot hide a mistake."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def whole(tensor):
    """A tensor, or all of a DTensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def slow_clock(step=2):
    """Instead of the module `time`: each look at perf_counter is `step` seconds after the one before."""
    return mock.Mock(perf_counter=itertools.count(step=step).__next__)


def start(*command, cwd=ROOT, env=None, log=None, prefix=()):
    """Start a Python command line; `env` is added to the environment.

    stdout and stderr go to pipes, or both into the file `log`, which can be watched. `prefix` comes before Python.
    """
    with open(log or os.devnull, "a") as file:
        process = subprocess.Popen(
            [*prefix, sys.executable, *map(str, command)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=file if log else subprocess.PIPE,
            stderr=subprocess.STDOUT if log else subprocess.PIPE,
            text=True,
        )
    STARTED.append(process)
    return process


def without_name_server(stderr):
    """stderr without the lines in which torch's store says that the name server did not answer.

    The store asks for the name of each process that connects, but does not need it.
    """
    return re.sub(r"\[W.*\[c10d\] The hostname of the client socket cannot be retrieved.*\n", "", stderr)


def finish(process, timeout=240):
    """Wait for a started command; returns (exit status, stdout, stderr without lines about the name server)."""
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
    return process.returncode, stdout, stderr and without_name_server(stderr)


def run(*command, timeout=240, **kwargs):
    """Run a Python command line to its end; returns (exit status, stdout, stderr)."""
    return finish(start(*command, **kwargs), timeout)


def torchrun(nproc, script, *args, env=None, **kwargs):
    """Run a script under the real torchrun on this machine; returns (exit status, stdout, stderr)."""
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", nproc, script, *args)
    environment = {"OMP_NUM_THREADS": "1"}  # or torchrun says that it sets it
    environment.update(env or {})
    return run(*command, env=environment, **kwargs)


def simulated_gpus(n):
    """The environment of a command with `n` simulated GPUs. Skips the test where they cannot be built."""
    if reason := sim.why_not():
        pytest.skip(reason)
    return {"SIM_DEVICES": str(n), "PYTHONPATH": f"{sim.build()}:{ROOT}"}


def exit_message(function, *args, **kwargs):
    """The one line with which `function` leaves, or which `launch` would print."""
    with pytest.raises((SystemExit, distributed.DistributedError)) as exit_info:
        function(*args, **kwargs)
    line = str(exit_info.value)
    assert len(line.splitlines()) == 1
    return line


def agreed_message(function, *args, **kwargs):
    """The line with which all ranks leave `function`, the same on each of them."""
    message = exit_message(function, *args, **kwargs)
    assert set(distributed.gather_objects(message)) == {message}
    return message


def killed_in(target, call=1, at_its_end=False, how=signal.SIGKILL):
    """A patch with which this process gets the signal `how` in its `call`-th call of the function `target`."""
    function, calls = pkgutil.resolve_name(target), []

    def count(*args, **kwargs):
        calls.append(None)
        result = None
        if len(calls) < call or at_its_end:
            result = function(*args, **kwargs)
        if len(calls) == call:
            os.kill(os.getpid(), how)
        return result

    return mock.patch(target, count)


@contextlib.contextmanager
def full_disk():
    """No file of this process may become larger than 2 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Left(Exception):
    """Instead of the end of a preempted process."""


@contextlib.contextmanager
def leaving_is_an_error(agreed=checkpoint.Preemption.agreed):
    """`Preemption.leave` raises Left, and SIGTERM is handled afterwards as before. All ranks leave where `agreed` says.

    By default that is after a SIGTERM. A test that sends none gives another function.
    """
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with mock.patch.multiple("checkpoint.Preemption", agreed=agreed, leave=mock.Mock(side_effect=Left)):
            yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def wait_for(condition, process, timeout=240):
    """Poll `condition` until it is true, and return its value; fail if `process` ends before, or after `timeout` s."""
    end = time.monotonic() + timeout
    value = condition()
    while not value:
        assert status_of(process) is None, f"{process} ended with status {status_of(process)}"
        assert time.monotonic() < end, f"not within {timeout} s"
        time.sleep(0.001)
        value = condition()
    return value


def wait_until(condition, seconds=120):
    """Poll `condition` until it is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.005)


@pytest.fixture
def typed(monkeypatch):
    """Gives a script and options to whatever reads the command line of this process."""

    def put(script, *options):
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, options)])

    return put


@pytest.fixture
def gpus(monkeypatch):
    """Lets this process see another number of GPUs."""

    def see(number):
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: number)

    return see


@pytest.fixture
def launched(monkeypatch, typed):
    """With which arguments a script calls `launch`, which starts nothing."""

    def call(script, *options):
        typed(script, *options)
        launch = mock.Mock()
        with monkeypatch.context() as patch:
            patch.setattr(distributed, "launch", launch)
            runpy.run_path(str(ROOT / script), run_name="__main__")
        return launch.call_args

    return call


@pytest.fixture
def main_of(launched, capsys):
    """Run a script's `__main__` in this process, which must exit; returns (exit status, stderr). Starts no process."""

    def call(script, *options):
        with pytest.raises(SystemExit) as exit_info:
            launched(script, *options)
            raise AssertionError("launch was called")
        return exit_info.value.code, capsys.readouterr().err

    return call


@pytest.fixture
def job_of(typed, capfd):
    """Do what `python script options` does, in this process, which has torch and a fork server already.

    Returns its stdout. Nothing may be printed on stderr.
    """

    def call(script, *options):
        typed(script, *options)
        runpy.run_path(str(ROOT / script), run_name="__main__")
        stdout, stderr = capfd.readouterr()
        assert without_name_server(stderr) == ""
        return stdout

    return call


def run_under_launcher(local_rank, world_size, script, *options):
    """Run a script as torchrun would on this rank. Give it to `launch`, which sets the same variables as torchrun."""
    sys.argv = [str(script), *map(str, options)]
    runpy.run_path(str(ROOT / script), run_name="__main__")


def _run_forked(log, script, options, env):
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.update(env)
    run_under_launcher(0, 1, script, *options)


def start_forked(log, script, *options, env=None):
    """Run `python script options` as a fork of the fork server. Its stdout and stderr go to the file `log`.

    It is a daemon, so it ends with this process if a test fails.
    """
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run_forked, args=(log, script, options, env or {}), daemon=True)
    process.start()
    return process


def status_of(process):
    """The exit status of a command or of a process of multiprocessing. It is None while the process runs."""
    return process.exitcode if isinstance(process, multiprocessing.process.BaseProcess) else process.poll()


def on_processes(*numbers):
    """Make a test of a function that all ranks call, in one process group, each time in a folder of its own.

    The test has a row for each number of processes, and more with pytest.mark.parametrize below this decorator. All
    rows of a file that are selected and have the same number run in one job. Those after one that fails do not run, and
    fail with its traceback.
    """

    def decorate(check):
        def test(request, jobs, n_processes, **values):
            ended, error = jobs(n_processes)
            assert request.node.name in ended, error

        names = ["request", "jobs", "n_processes", *inspect.signature(check).parameters]
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature(parameters)
        test.__name__ = check.__name__
        test.__doc__ = check.__doc__
        test.pytestmark = getattr(check, "pytestmark", [])
        test.check = check
        return pytest.mark.parametrize("n_processes", numbers)(test)

    return decorate


@pytest.fixture(scope="module")
def jobs(request, tmp_path_factory):
    """By number of processes: the rows that have ended on all ranks, and the traceback of one that has failed."""

    @functools.cache
    def job(n_processes):
        selected = [item for item in request.session.items if item.path == request.path]
        checks = {}
        for item in selected:
            if hasattr(item.function, "check") and item.callspec.params["n_processes"] == n_processes:
                checks[item.name] = (item.originalname, item.callspec.params)
        folder = tmp_path_factory.mktemp("job")
        error = ""
        try:
            arguments = (request.module.__name__, list(checks.values()), str(folder))
            distributed.launch(run_checks, *arguments, nprocs=n_processes)
        except Exception:
            error = traceback.format_exc()
        ended = [len(list(folder.glob(f"{number}/ended on rank *"))) == n_processes for number in range(len(checks))]
        return set(itertools.compress(checks, ended)), error

    return job


def run_checks(local_rank, world_size, module, checks, folder):
    before = os.getcwd()
    try:
        for number, (name, values) in enumerate(checks):
            own = Path(folder, str(number))
            own.mkdir(exist_ok=True)
            os.chdir(own)
            run_check(getattr(importlib.import_module(module), name).check, values, f"{name} on rank {local_rank}")
            (own / f"ended on rank {local_rank}").touch()
    finally:
        os.chdir(before)  # one process is the one of pytest


def run_check(check, values, about):
    distributed.init_process_group(timeout=datetime.timedelta(seconds=60), even_alone=True)
    torch.manual_seed(0)
    values = {key: value for key, value in values.items() if key != "n_processes"}
    try:
        check(**values)
    except (Exception, pytest.fail.Exception) as error:
        raise RuntimeError(f"{about}: {values}") from error


class Watch(TorchDispatchMode):
    """Notes the collectives of this process, and counts how often the host reads a value, as item(), if and print do.

    torch's CommDebugMode fails in pipelines, and with DDP in 2.11.
    """

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()  # of all collectives by name
        self.collectives = []  # FSDP's: (name, type, elements)
        self.sent = collections.Counter()  # bytes: to others in a ring or all to all, and all of what is all-reduced
        self.host_reads = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # first let it become operations on what this process holds
        name = function._schema.name.split("::")[1]
        if function.namespace in ("c10d", "_c10d_functional"):
            self.counts[f"{function.namespace}.{name}"] += 1
            self.note(name, args)
        elif name == "_local_scalar_dense":
            self.host_reads += 1
        return function(*args, **(kwargs or {}))

    def note(self, name, args):
        if name == "_allgather_base_":
            whole, part, *_ = args
            self.collectives.append(("gather", str(whole.dtype), whole.numel()))
            self.sent["gather"] += whole.nbytes - part.nbytes
        elif name == "_reduce_scatter_base_":
            part, whole, *_ = args
            self.collectives.append(("reduce", str(whole.dtype), whole.numel()))
            self.sent["reduce"] += whole.nbytes - part.nbytes
        elif name == "alltoall_base_":
            _, rows, group, _, n_sent, *_ = args
            if n_sent:  # or all processes get as much
                others = sum(n_sent) - n_sent[torch.distributed.ProcessGroup.unbox(group).rank()]
                self.sent["all to all"] += others * rows[:1].nbytes
        elif name == "allreduce_":
            self.sent["all-reduce"] += sum(tensor.nbytes for tensor in args[0])

    def types_of(self, kind):
        return [dtype for each, dtype, _ in self.collectives if each == kind]


class Bomb:
    """Unpickled, it would make a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mknod, (self.target,)
