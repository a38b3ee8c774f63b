"""The experiment as a task: local executions, what it returns, what it asks of a cluster, and when it is run again."""

import dataclasses
import importlib
import os
import re
import shutil
import sys

import images
import pytest
import torch
from conftest import ROOT, finish, free_port, run, start

import mnist
import mnist_DDP

SCRIPT = "flyte_workflow.py"
pytestmark = pytest.mark.slow  # to import Flyte takes seconds
SIZES = (320, 101)


@pytest.fixture(scope="module")
def flyte_workflow():
    """The script. Processes that collect these tests need not import it."""
    return importlib.import_module("flyte_workflow")


@pytest.fixture
def data(tmp_path):
    """Few images, for a short training."""
    images.write_mnist(tmp_path, *SIZES)
    return str(tmp_path)


def check_outputs(accuracies, path):
    """The accuracy of the last epoch is that of a plain load without the script's functions."""
    net = mnist.SimpleCNN()
    net.load_state_dict(torch.load(path, weights_only=True))
    _, hits, n = images.result_of(net, images.halves(*SIZES)[1])
    assert hits / n == accuracies[-1]


def outputs_of(stdout):
    (accuracies,) = re.findall(r"^epoch_accuracies: \[(.*)\]$", stdout, re.M)
    (path,) = re.findall(r"^model_state: (/.*mnist_cnn\.pt)$", stdout, re.M)
    return [float(accuracy) for accuracy in accuracies.split(", ")], path


def test_a_local_execution_and_its_cache(data, tmp_path, tmp_path_factory):
    short = tmp_path_factory.mktemp("t")  # for a socket, whose path has at most 107 characters
    home = {"HOME": str(tmp_path), "TMPDIR": str(short)}  # of Flyte's cache, and of all files
    command = (SCRIPT, "--data", "mnist", "--data-dir", data, "--epochs", 1)
    status, stdout, stderr = run(*command, env=home)
    assert status == 0, stderr
    assert stdout.startswith("Training on 2 x cpu, global batch 128\n")
    outputs = outputs_of(stdout)
    check_outputs(*outputs)

    status, stdout, stderr = run(*command, env=home)
    assert (status, outputs_of(stdout)) == (0, outputs), stderr
    assert "loss" not in stdout

    os.remove(outputs[1])
    status, stdout, stderr = run(*command, env=home)
    assert status == 1 and outputs[1] in "".join(stderr.split()), "which Flyte breaks into lines"
    assert "epoch_accuracies" not in stdout, "no path to a file that is gone"


def elastic(data):
    """The task for several machines on two agents; run as a script, by the test below."""
    flyte_workflow = importlib.import_module("flyte_workflow")
    task = flyte_workflow.pytorch_mnist_elastic_task
    task.min_nodes = task.max_nodes = 2
    task.task_config.nproc_per_node = 1
    outputs = task(hp=flyte_workflow.Hyperparameters(data="mnist", data_dir=data, epochs=1))
    print(f"epoch_accuracies: {outputs.epoch_accuracies}\nmodel_state: {outputs.model_state.path}")


@pytest.mark.timeout(400)
def test_the_elastic_task_on_two(flyte_workflow, data, tmp_path):
    """Two agents, as the operator starts one in each pod; the second has nothing to return."""
    port, agents = free_port(), []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        folder = str(tmp_path / name)
        operator = {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": f"localhost:{port}", "OMP_NUM_THREADS": "1"}
        operator.update(HOME=folder, TMPDIR=folder)
        operator.update(flyte_workflow.ENVIRONMENT)  # which Flyte sets in the pods
        agents.append(start(__file__, data, env=operator))
    results = [finish(agent, 300) for agent in agents]
    assert sorted(status for status, *_ in results) == [0, 1], results
    (stdout,) = (stdout for status, stdout, _ in results if status == 0)
    (stderr,) = (stderr for status, _, stderr in results if status == 1)
    assert "IgnoreOutputs" in stderr
    assert any("Training on 2 x cpu" in stdout for _, stdout, _ in results)
    check_outputs(*outputs_of(stdout))


@pytest.mark.guard
@pytest.mark.parametrize(("visible", "nprocs"), [(0, 2), (3, 3)])
def test_a_task_trains_in_a_process_per_gpu_of_its_container(visible, nprocs, flyte_workflow, gpus, data, capfd):
    """With all options, typed as words or not."""
    gpus(visible)
    options = {"data": "mnist", "data_dir": data, "epochs": 2, "bf16": True, "global_batch_size": 32}
    accuracies, model_state = flyte_workflow.train(flyte_workflow.Hyperparameters(**options))
    assert capfd.readouterr().out.startswith(f"Training on {nprocs} x cpu, global batch 32\n")
    assert len(accuracies) == 2
    assert torch.load(model_state.path, weights_only=True)["fc.bias"].shape == (10,)


@pytest.mark.guard
@pytest.mark.parametrize("name", ["pytorch_mnist_task", "pytorch_mnist_elastic_task", "pytorch_training_wf"])
def test_hyperparameters_have_types_and_defaults(name, flyte_workflow):
    """In the interface, which Flyte shows in a form, and those of the script."""
    task = getattr(flyte_workflow, name)
    kind, default = task.python_interface.inputs_with_defaults["hp"]
    assert kind is flyte_workflow.Hyperparameters and default == kind()
    options = vars(mnist_DDP.make_parser("").parse_args([]))
    assert dataclasses.asdict(default) == options
    for field in dataclasses.fields(kind):
        assert isinstance(options[field.name], field.type), field.name
    if name.endswith("_task"):
        assert task.resources.requests.gpu == str(flyte_workflow.GPUS) and task.metadata.retries == 2
        assert task.metadata.cache_version == flyte_workflow.VERSION
        assert task.shared_memory and task.resources.limits.gpu == task.resources.requests.gpu


@pytest.mark.guard
def test_another_code_is_another_version(flyte_workflow, tmp_path):
    """A result of another code is not reused. Any script may be in the image."""
    versions = set()
    for name in (SCRIPT, "mnist_DDP.py"):
        shutil.copy(ROOT / name, tmp_path)
        versions.add(flyte_workflow.version_of(tmp_path))
        (tmp_path / name).write_text((ROOT / name).read_text() + "# changed")
        versions.add(flyte_workflow.version_of(tmp_path))
    assert len(versions) == 4
    assert flyte_workflow.version_of(ROOT) == flyte_workflow.VERSION


if __name__ == "__main__":
    elastic(*sys.argv[1:])
