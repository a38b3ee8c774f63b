"""The same experiment as the task of an orchestrator: mnist_DDP.py under Flyte.

Flyte runs a task in a container with the GPUs and the memory that it asks for, tries it again after a failure, keeps
what it returns, and answers from there when it is called again with the same inputs and the same code. Choose it over
`python mnist_DDP.py` when training is one step of several, or the machines are a cluster's. Needs
requirements-flyte.txt.

Inside `pytorch_mnist_task` there is one process per GPU of its container, started by `distributed.launch`; it costs
per process, and sends, what mnist_DDP.py does. `pytorch_mnist_elastic_task` is the same on several machines, where the
kfpytorch plugin runs torchrun's elastic agent on each; then gradients cross the network between them.

    python flyte_workflow.py                            # the workflow, here, without a cluster
    python flyte_workflow.py --data mnist --epochs 1    # with options of mnist_DDP.py
    pyflyte run flyte_workflow.py pytorch_training_wf --hp '{"data": "mnist", "epochs": 1}'
    pyflyte run --remote --image IMAGE flyte_workflow.py pytorch_training_wf              # on a cluster
    pyflyte run --remote --image IMAGE flyte_workflow.py pytorch_mnist_elastic_task       # on NODES machines of it

It prints what mnist_DDP.py prints, and last the outputs: the accuracy after each epoch, and where the weights are. A
local execution keeps them in a temporary folder: when that is gone, `pyflyte local-cache clear` makes it train again.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from dataclasses_json import Undefined, dataclass_json
from flytekit import Resources, current_context, task, workflow
from flytekit.types.file import FlyteFile
from flytekitplugins.kfpytorch import Elastic

import checkpoint
import distributed as dist
import mnist
import options
import mnist_DDP
from mnist_DDP import Hyperparameters

sys.path.append(str(Path(__file__).resolve().parent))  # for the workers: pyflyte removes it after this import
dataclass_json(Hyperparameters, undefined=Undefined.RAISE)  # or pyflyte ignores an option that does not exist

NODES, GPUS = 2, 2  # machines of the elastic task; GPUs, and processes, per machine of both

SOURCES = (__file__, mnist_DDP.__file__, mnist.__file__, checkpoint.__file__, dist.__file__)


def version_of(sources):
    """Of a cache: changed code has another, so that no result of the code before is taken for one of its own."""
    return hashlib.sha256(b"".join(Path(source).read_bytes() for source in sources)).hexdigest()[:16]


VERSION = version_of(SOURCES)

DEFAULTS = Hyperparameters()
REQUESTS = {
    "requests": Resources(cpu="4", mem="8Gi", gpu=str(GPUS)),
    "limits": Resources(mem="16Gi", gpu=str(GPUS)),
    "shared_memory": True,  # for NCCL between the processes of a container
    "retries": 2,
    "cache": True,
    "cache_version": VERSION,
}


class TrainingOutputs(NamedTuple):
    epoch_accuracies: list[float]  # of all test samples, after each epoch
    model_state: FlyteFile  # for torch.load(..., weights_only=True) and load_state_dict


def train(hp):
    """Train in one process per GPU, or in GPUS of them where there is none, so that the global batch is the same."""
    folder = Path(current_context().working_directory)
    dist.launch(mnist_DDP.train_mnist, hp, str(folder), nprocs=torch.cuda.device_count() or GPUS)
    if dist.is_primary():  # under the elastic agent every process comes here, and rank 0's outputs count
        accuracies = json.loads((folder / "mnist_cnn_accuracies.json").read_text())
        return TrainingOutputs(accuracies, FlyteFile(str(folder / "mnist_cnn.pt")))


@task(**REQUESTS)
def pytorch_mnist_task(hp: Hyperparameters) -> TrainingOutputs:
    return train(hp)


@task(task_config=Elastic(nnodes=NODES, nproc_per_node=GPUS, max_restarts=2), **REQUESTS)
def pytorch_mnist_elastic_task(hp: Hyperparameters) -> TrainingOutputs:
    return train(hp)


@workflow
def pytorch_training_wf(hp: Hyperparameters = DEFAULTS) -> TrainingOutputs:
    return pytorch_mnist_task(hp=hp)


if __name__ == "__main__":
    cli_hp, _ = mnist_DDP.parse_hyperparameters(options.ArgumentParser(__doc__))
    outputs = pytorch_training_wf(hp=cli_hp)
    if not Path(outputs.model_state.path).exists():  # it is in a temporary folder
        path = outputs.model_state.path
        sys.exit(f"{path}, kept from an earlier run, is gone: `pyflyte local-cache clear`, and again")
    print(f"epoch_accuracies: {outputs.epoch_accuracies}")
    print(f"model_state: {outputs.model_state.path}")
