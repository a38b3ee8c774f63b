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

It prints what mnist_DDP.py prints, and then the outputs: the accuracy after each epoch, and the path of mnist_cnn.pt.
A local execution writes the weights to a temporary folder. When that folder is gone, `pyflyte local-cache clear` makes
Flyte train again.
"""

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from dataclasses_json import Undefined, dataclass_json
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

REQUESTS = {
    "requests": Resources(cpu="4", mem="8Gi", gpu=str(GPUS)),
    "limits": Resources(mem="16Gi", gpu=str(GPUS)),
    "shared_memory": True,  # NCCL needs it between the processes of a container
    "retries": 2,
    "cache": True,
    "cache_version": VERSION,
}


@dataclass_json(undefined=Undefined.RAISE)  # or a misspelt name would be ignored
@dataclass
class Hyperparameters:
    """The options of mnist_DDP.py, with its defaults."""

    data: str = "synthetic"
    data_dir: str = "data"
    global_batch_size: int = 128
    accumulate: int = 1
    test_batch_size: int = 1000
    num_workers: int = 0
    epochs: int = 5
    lr: float = 0.05
    clip: float = 0.0
    bf16: bool = False
    compile: bool = False
    seed: int = 0
    log_every: int = 100
    save_every: int = 500
    wandb: bool = False
    tensorboard: str | None = None


DEFAULTS = Hyperparameters()


class TrainingOutputs(NamedTuple):
    epoch_accuracies: list[float]  # on the test set, after each epoch
    model_state: FlyteFile  # model.load_state_dict(torch.load(model_state, weights_only=True))


def train(hp):
    """Train in one process per GPU, or in GPUS processes if there is no GPU."""
    folder = Path(current_context().working_directory)
    words = ["--output", str(folder / "mnist_cnn.pt")]
    if not dist.is_launched():  # the elastic agent has not started processes
        words += ["--nproc", str(dist.device_count() or GPUS)]
    for name, value in asdict(hp).items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif value is not False and value is not None:
            words.append(f"{option}={value}")
    args = mnist_DDP.parse_args(words)
    dist.launch(mnist_DDP.main_worker, args, nprocs=args.nproc)
    if not dist.is_primary():  # under the elastic agent every process comes here, and rank 0 returns the outputs
        return None
    accuracies = json.loads((folder / "mnist_cnn_accuracies.json").read_text())
    return TrainingOutputs(accuracies, FlyteFile(args.output))


@task(**REQUESTS)
def pytorch_mnist_task(hp: Hyperparameters = DEFAULTS) -> TrainingOutputs:
    return train(hp)


# Each round of restarts gets a store of its own, as distributed.py demands on several machines.
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@task(task_config=Elastic(nnodes=NODES, nproc_per_node=GPUS, max_restarts=2), environment=ENVIRONMENT, **REQUESTS)
def pytorch_mnist_elastic_task(hp: Hyperparameters = DEFAULTS) -> TrainingOutputs:
    return train(hp)


@workflow
def pytorch_training_wf(hp: Hyperparameters = DEFAULTS) -> TrainingOutputs:
    return pytorch_mnist_task(hp=hp)


if __name__ == "__main__":
    parser = mnist_DDP.make_parser(__doc__)
    outputs = pytorch_training_wf(hp=Hyperparameters(**vars(parser.parse_args())))
    path = outputs.model_state.path
    if not Path(path).exists():  # the cached result of a local execution is in a temporary folder
        sys.exit(f"{path}, which an earlier run saved, is gone: run `pyflyte local-cache clear`, then start again")
    print(f"epoch_accuracies: {outputs.epoch_accuracies}")
    print(f"model_state: {path}")
