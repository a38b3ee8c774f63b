"""The jobs of all tests share a fork server, which has imported what any script imports.

A job that a test starts in its own process runs spawn.py as it is shipped, but for `start_server`. That one is shown by
the tests that start a command: in test_launch.py all from the fixture `command` on, and the quick test of
test_on_devices.py.
"""

import multiprocessing
import os
from multiprocessing.connection import Connection

import torch

import spawn


def start_server(environment, *ends):
    """Instead of spawn.start_server: a fork of the tests' server, which prints where the test's process prints."""
    outputs = [Connection(os.dup(fd), readable=False) for fd in (1, 2)]
    server = multiprocessing.get_context("forkserver").Process(target=serve, args=(environment, outputs, ends))
    server.start()
    for end in (*outputs, *ends):
        end.close()
    server.wait = server.join
    return server


def serve(environment, outputs, ends):
    for fd, output in enumerate(outputs, start=1):
        os.dup2(output.fileno(), fd)
        output.close()
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # as in a new process
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # torch has read the variable before
    spawn._serve(*[end.fileno() for end in ends])


spawn.start_server = start_server
