"""The jobs of all tests share a fork server, which `launch` would otherwise start and end with each job.

A job that a test starts in its own process runs spawn.py as it is shipped, but for this: its workers print where the
test's process prints, and the fork server stays when the job ends. These two places are shown by the tests that start a
command: in test_launch.py all from the fixture `command` on, and the quick test of test_on_devices.py.
"""

import functools
import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.connection import Connection

import spawn

run_worker, guard = spawn._worker, spawn._guard


class Worker:
    """Instead of spawn._worker: it uses the launcher's stdout and stderr of the moment, not those of the server."""

    def __reduce__(self):
        self.outputs = [Connection(os.dup(fd), readable=False) for fd in (1, 2)]  # open until they have been sent
        return functools.partial, (run_with_outputs, self.outputs)


def run_with_outputs(outputs, *args):
    for fd, output in enumerate(outputs, start=1):
        os.dup2(output.fileno(), fd)
    run_worker(*args)


def end_workers(pids):
    """Instead of spawn._guard: it does not end the fork server, which the other jobs of the tests need."""
    os.kill = lambda pid, number: None
    guard(pids)


def join_children():
    """Instead of waiting for the end of the fork server: wait for all processes of a job."""
    for process in multiprocessing.active_children():
        if not process.daemon:
            process.join()


spawn._worker = Worker()
spawn._guard = end_workers
forkserver._forkserver._stop = join_children
