"""Track a run with Weights & Biases and TensorBoard. Rank 0 writes, and every rank makes the same calls:

    epoch, step, run_id = checkpoint.load(path, model, optimizer, run_id=None)
    tracker = tracking.Tracker("my project", args, samples, run_id)  # a resumed run continues its W&B run
    tracker.log(samples, loss=0.5)
    checkpoint.save(path, model, optimizer, epoch=epoch, run_id=tracker.run_id)
    tracker.close()

If the disk is full, one line says so, and training goes on without the tracker.
Needs requirements-tracking.txt; without --wandb and --tensorboard, neither package is imported.
"""

import contextlib
import importlib.util
import sys

import distributed as dist


def check_installed(args):
    """Leave with one line if the package of --wandb or --tensorboard is missing, and the option is used."""
    for package, value in (("wandb", args.wandb), ("tensorboard", args.tensorboard)):
        spec = importlib.util.find_spec(package)
        is_missing = spec is None or spec.origin is None  # W&B makes a folder `wandb`, a package without an origin
        if is_missing and value not in (None, False):
            sys.exit(f"--{package}: {package} is not installed: pip install -r requirements-tracking.txt")


class Tracker:
    def __init__(self, project, args, samples=0, run_id=None):
        """Begin to track after `samples` samples. Raises DistributedError on every rank if W&B refuses.

        `args` has all options, among them `wandb`, and `tensorboard`, the folder to write to or None. `run_id` is the
        W&B run to continue, from the snapshot.
        """
        self.run = None
        self.writer = None
        error = None
        if dist.is_primary() and args.wandb:
            import wandb

            try:
                self.run = wandb.init(project=project, config=vars(args), id=run_id, resume="allow")
                self.run.define_metric("*", step_metric="samples")
                run_id = self.run.id
            except wandb.Error as failure:
                reason = str(failure).partition("\n")[0]
                error = f"--wandb: {reason}: `wandb login` once, or set WANDB_MODE=offline"
        dist.raise_on_all(error)
        self.run_id = dist.broadcast_object(run_id)  # each node saves it in its snapshot
        if dist.is_primary() and args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # Remove what an interrupted run has written after its last snapshot, at `purge_step` or later.
            self.writer = SummaryWriter(args.tensorboard, purge_step=samples + 1)

    @contextlib.contextmanager
    def _going_on(self, tracker):
        """Say once that `tracker`, "run" or "writer", cannot write, as on a full disk, and train on without it."""
        try:
            yield
        except OSError as error:
            name = {"run": "W&B", "writer": "TensorBoard"}[tracker]
            line = f"{name} cannot write ({error.strerror or error}): training goes on without it"
            print(line, file=sys.stderr, flush=True)
            setattr(self, tracker, None)

    def log(self, samples, **scalars):
        """Log numbers that are known after `samples` samples of training."""
        if self.run is not None:
            with self._going_on("run"):
                self.run.log({"samples": samples, **scalars})
        if self.writer is not None:
            with self._going_on("writer"):
                for name, value in scalars.items():
                    self.writer.add_scalar(name, value, samples)

    def close(self):
        """Rank 0 may upload for minutes, and the others do not wait for it."""
        if self.run is not None:
            self.run.finish()
        if self.writer is not None:
            with self._going_on("writer"):
                self.writer.close()
