"""The same experiment as the task of an orchestrator: mnist_DDP.py under Flyte.

Flyte runs a task in a container with the GPUs and the memory that the task requests. It retries a task that failed,
from the first epoch on, and keeps what the task returns. It returns the cached result if neither the inputs nor the
code have changed. Choose it over `python mnist_DDP.py` when training is one step of several, or when the machines
belong to a cluster. Install requirements-flyte.txt first.

`pytorch_mnist_task` starts one process per GPU of its container, by `distributed.launch`. Memory per process and bytes
sent are the same as in mnist_DDP.py. `pytorch_mnist_elastic_task` trains on several machines: the kfpytorch plugin runs
torchrun's elastic agent on each of them, and the gradients cross the network.

    python flyte_workflow.py                            # the workflow on this machine, without a cluster
    python flyte_workflow.py --data mnist --epochs 1    # with options of mnist_DDP.py
    pyflyte run flyte_workflow.py pytorch_training_wf --hp '{"data": "mnist", "epochs": 1}'
    pyflyte run --remote --image IMAGE flyte_workflow.py pytorch_training_wf              # on a cluster
    pyflyte run --remote --image IMAGE flyte_workflow.py pytorch_mnist_elastic_task       # on NODES of its machines

It prints what mnist_DDP.py prints, and then the outputs: the accuracy after each epoch, and the path of the weights.
A local execution writes the weights to a temporary folder. When that folder is gone, `pyflyte local-cache clear` makes
Flyte train again.
"""

import hashlib
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from flytekit import Resources, current_context, task, workflow
from flytekit.types.file import FlyteFile
from flytekitplugins.kfpytorch import Elastic

import distributed as dist
import mnist_DDP

# pyflyte removes this folder from sys.path after it has imported this file, but the started processes need it.
sys.path.append(str(Path(__file__).resolve().parent))

NODES = 2  # machines of the elastic task
GPUS = 2  # GPUs per machine, with one process each


def version_of(folder):
    """The cache version. It changes with any script in `folder`, so stale results are never reused."""
    code = b"".join(source.read_bytes() for source in sorted(folder.glob("*.py")))
    return hashlib.sha256(code).hexdigest()[:16]


VERSION = version_of(Path(__file__).parent)

DEFAULTS = {}  # options of mnist_DDP.py that differ from its own defaults
REQUESTS = {
    "requests": Resources(cpu="4", mem="8Gi", gpu=str(GPUS)),
    "limits": Resources(mem="16Gi", gpu=str(GPUS)),
    "shared_memory": True,  # NCCL needs it between the processes of a container
    "retries": 2,
    "cache": True,
    "cache_version": VERSION,
}


class TrainingOutputs(NamedTuple):
    epoch_accuracies: list[float]  # on the test set, after each epoch
    model_state: FlyteFile  # load it with torch.load(..., weights_only=True)["model"] and load_state_dict


def train(hp):
    """Train in one process per GPU, or in GPUS processes if there is no GPU. `hp` has options of mnist_DDP.py."""
    folder = current_context().working_directory
    words = []
    if not dist.is_launched():  # the elastic agent has not started processes
        words += ["--nproc", str(torch.cuda.device_count() or GPUS)]
    for name, value in hp.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        else:
            words.append(f"{option}={value}")
    args = mnist_DDP.parse_args([*words, "--output-dir", str(folder)])
    dist.launch(mnist_DDP.main_worker, args, nprocs=args.nproc)
    if not dist.is_primary():  # under the elastic agent every process comes here, and rank 0 returns the outputs
        return None
    path = Path(folder, "mnist_cnn.pt")
    accuracies = torch.load(path, weights_only=True)["accuracies"]
    return TrainingOutputs(accuracies, FlyteFile(str(path)))


@task(**REQUESTS)
def pytorch_mnist_task(hp: dict) -> TrainingOutputs:
    return train(hp)


# Each round of restarts gets a store of its own, as distributed.py demands on several machines.
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@task(task_config=Elastic(nnodes=NODES, nproc_per_node=GPUS, max_restarts=2), environment=ENVIRONMENT, **REQUESTS)
def pytorch_mnist_elastic_task(hp: dict) -> TrainingOutputs:
    return train(hp)


@workflow
def pytorch_training_wf(hp: dict = DEFAULTS) -> TrainingOutputs:
    return pytorch_mnist_task(hp=hp)


if __name__ == "__main__":
    parser = mnist_DDP.make_parser(__doc__)
    defaults = vars(parser.parse_args([]))
    changed = {name: value for name, value in vars(parser.parse_args()).items() if value != defaults[name]}
    outputs = pytorch_training_wf(hp=changed)
    path = outputs.model_state.path
    if not Path(path).exists():  # the cached result of a local execution is in a temporary folder
        sys.exit(f"{path}, which an earlier run saved, is gone: run `pyflyte local-cache clear`, then start again")
    print(f"epoch_accuracies: {outputs.epoch_accuracies}")
    print(f"model_state: {path}")
