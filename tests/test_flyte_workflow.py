"""The experiment as a task: local executions, what it returns, what it asks of a cluster, and when it is run again."""

import dataclasses
import importlib
import os
import re
import shutil
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import ROOT, finish, free_port, run, start
from images import result_of

import mnist
import mnist_DDP

SCRIPT = "flyte_workflow.py"
OPTIONS = '{"epochs": 1, "lr": 0.04}'


@pytest.fixture(scope="module")
def flyte_workflow():
    """The script. Flyte takes seconds to import, which processes that collect these tests need not spend."""
    return importlib.import_module("flyte_workflow")


@pytest.fixture
def home(tmp_path, tmp_path_factory):
    """Variables that keep Flyte's cache, and all files of a local execution, in folders of the test."""
    short = tmp_path_factory.mktemp("t")  # for a socket, whose path has at most 107 characters
    return {"HOME": str(tmp_path), "TMPDIR": str(short)}


def check_outputs(stdout):
    """The epoch's accuracy, which one process has too, by a plain load without the script's functions, and the path."""
    accuracy = float(re.search(r"epoch_accuracies[:=] ?\[(.*?)\]", stdout).group(1))
    path = re.search(r"(/\S+mnist_cnn\.pt)", stdout).group(1)
    net = mnist.SimpleCNN()
    net.load_state_dict(torch.load(path, weights_only=True))
    _, hits, n = result_of(net, mnist.load_data("synthetic", "", train=False))
    assert hits / n == accuracy > 0.95
    return accuracy, path


@pytest.mark.slow
def test_a_local_execution_and_its_cache(home):
    status, stdout, stderr = run(SCRIPT, "--epochs", 1, env=home)
    assert status == 0, stderr
    assert stdout.startswith("Training on 2 x cpu, global batch 128\nstep 100/156 | loss ")
    accuracy, path = check_outputs(stdout)

    status, stdout, stderr = run(SCRIPT, "--epochs", 1, env=home)
    assert (status, check_outputs(stdout)) == (0, (accuracy, path)), stderr
    assert "loss" not in stdout

    os.remove(path)
    status, stdout, stderr = run(SCRIPT, "--epochs", 1, env=home)
    assert status == 1 and path in "".join(stderr.split()), "which Flyte breaks into lines"
    assert "epoch_accuracies" not in stdout, "no path to a file that is gone"


def elastic(nodes, processes):
    """The task for several machines on as many agents; run as a script, by the tests below."""
    flyte_workflow = importlib.import_module("flyte_workflow")
    task = flyte_workflow.pytorch_mnist_elastic_task
    task.min_nodes = task.max_nodes = nodes
    task.task_config.nproc_per_node = processes
    outputs = task(hp=flyte_workflow.Hyperparameters(epochs=1))
    print(f"epoch_accuracies: {outputs.epoch_accuracies}\nmodel_state: {outputs.model_state.path}")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_elastic_task_on_two(flyte_workflow, tmp_path):
    """Two agents, as the operator starts one in each pod; the second has nothing to return."""
    port = free_port()
    agents = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        folder = str(tmp_path / name)
        operator = {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": f"localhost:{port}", "OMP_NUM_THREADS": "1"}
        operator.update(HOME=folder, TMPDIR=folder)
        operator.update(flyte_workflow.ENVIRONMENT)  # which Flyte sets in the pods
        agents.append(start(__file__, 2, 1, env=operator))
    results = [finish(agent, 300) for agent in agents]
    assert sorted(status for status, *_ in results) == [0, 1], results
    (stdout,) = (stdout for status, stdout, _ in results if status == 0)
    (stderr,) = (stderr for status, _, stderr in results if status == 1)
    assert "IgnoreOutputs" in stderr
    assert any("Training on 2 x cpu" in stdout for _, stdout, _ in results)
    check_outputs(stdout)


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("name", ["pytorch_mnist_task", "pytorch_mnist_elastic_task", "pytorch_training_wf"])
def test_hyperparameters_have_types_and_defaults(name, flyte_workflow):
    """In the interface, which Flyte shows in a form, and those of the script."""
    interface = getattr(flyte_workflow, name).python_interface
    kind, default = interface.inputs_with_defaults["hp"]
    assert kind is flyte_workflow.Hyperparameters and default == kind()
    options = vars(mnist_DDP.make_parser("").parse_args([]))
    assert dataclasses.asdict(default) == options
    for field in dataclasses.fields(kind):
        assert isinstance(options[field.name], field.type), field.name


@pytest.mark.guard
@pytest.mark.slow
@pytest.mark.parametrize("name", ["pytorch_mnist_task", "pytorch_mnist_elastic_task"])
def test_what_a_task_asks_for(name, flyte_workflow):
    task = getattr(flyte_workflow, name)
    assert task.resources.requests.gpu == task.resources.limits.gpu == str(flyte_workflow.GPUS)
    assert task.resources.requests.mem == "8Gi"
    assert task.metadata.retries == 2 and task.shared_memory
    assert task.metadata.cache and task.metadata.cache_version == flyte_workflow.VERSION


@pytest.mark.guard
@pytest.mark.slow
def test_another_code_is_another_version(flyte_workflow, tmp_path):
    names = (SCRIPT, "mnist_DDP.py", "mnist.py", "tracking.py", "checkpoint.py", "distributed.py", "spawn.py")
    names += ("options.py", "watch.py")
    for name in names:
        shutil.copy(ROOT / name, tmp_path)
    versions = {flyte_workflow.version_of(tmp_path)}
    for name in names:
        (tmp_path / name).write_text((ROOT / name).read_text() + "# changed")
        versions.add(flyte_workflow.version_of(tmp_path))
    assert len(versions) == 1 + len(names)
    assert flyte_workflow.version_of(ROOT) == flyte_workflow.VERSION


@pytest.mark.guard
@pytest.mark.slow
def test_a_task_trains_in_a_process_per_gpu_of_its_container(flyte_workflow, gpus, monkeypatch, tmp_path):
    monkeypatch.setattr(flyte_workflow, "current_context", lambda: SimpleNamespace(working_directory=tmp_path))
    monkeypatch.setattr("distributed.launch", launch := mock.Mock())
    (tmp_path / "mnist_cnn_accuracies.json").write_text("[0.5]")
    for visible, nprocs in ((0, flyte_workflow.GPUS), (3, 3)):
        gpus(visible)
        outputs = flyte_workflow.train(flyte_workflow.Hyperparameters(epochs=7, bf16=True))
        (worker, args), kwargs = launch.call_args
        assert worker == mnist_DDP.main_worker and kwargs == {"nprocs": nprocs}
        expected = {"epochs": 7, "bf16": True, "compile": False, "lr": 0.05, "tensorboard": None}
        expected["output"] = str(tmp_path / "mnist_cnn.pt")
        assert vars(args).items() >= expected.items()
        assert (outputs.epoch_accuracies, outputs.model_state.path) == ([0.5], str(tmp_path / "mnist_cnn.pt"))


if __name__ == "__main__":
    elastic(*map(int, sys.argv[1:]))
