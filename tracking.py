"""Track a run with Weights & Biases and TensorBoard. Rank 0 writes.

Every rank makes the same calls, except `log_predictions`, which only rank 0 needs to make:

    tracker = tracking.Tracker("my project", wandb=True, tensorboard="runs")
    epoch, step = checkpoint.load(path, model, optimizer, tracker=tracker)  # a resumed run continues its W&B run
    tracker.start(net, hyperparameters, samples)
    tracker.log(samples, loss=0.5)
    tracker.accuracies.append(0.9)
    checkpoint.save(path, model, optimizer, epoch=epoch, tracker=tracker)
    tracker.close()

Needs requirements-tracking.txt; without --wandb and --tensorboard, neither package is imported.
"""

import os
import threading

import distributed as dist


class Tracker:
    """The record of a run. `accuracies` is a list that a snapshot keeps, on every rank.

    With `watch_gradients` W&B gets a histogram of the gradients of every parameter. Each one waits for the device and
    takes milliseconds, so leave it out where speed counts.
    """

    def __init__(self, project, wandb, tensorboard, watch_gradients=False):
        self.project = project
        self.wandb = wandb
        self.tensorboard = tensorboard
        self.watch_gradients = watch_gradients
        self.accuracies = []
        self.run = None
        self.run_id = None
        self.writer = None
        self.error = None

    def state_dict(self):
        return {"accuracies": self.accuracies, "run_id": self.run_id}

    def load_state_dict(self, state):
        self.accuracies = state["accuracies"]
        self.run_id = state["run_id"]

    def is_active(self):
        """Does this rank write anything?"""
        return self.run is not None or self.writer is not None

    def start(self, net, hyperparameters, samples):
        """Begin to track `net` after `samples` samples. Raises DistributedError on every rank if it cannot.

        `hyperparameters` is a dataclass or a namespace. With `watch_gradients` it needs the fields `log_interval`, in
        steps, and `grad_accumulation`, the backwards per step. Call it when a snapshot, if any, has been loaded.
        """
        if dist.is_primary():
            if self.wandb:
                self.start_wandb(net, hyperparameters)
            if self.tensorboard:
                self.start_tensorboard(samples)
        dist.raise_on_all(self.error)
        self.run_id = dist.broadcast_object(self.run_id)  # each node saves it in its snapshot

    def start_wandb(self, net, hyperparameters):
        import wandb

        settings = {}
        if self.run_id is not None:
            settings = {"id": self.run_id, "resume": "allow"}
        try:
            self.run = wandb.init(project=self.project, config=dict(vars(hyperparameters)), **settings)
        except wandb.Error as error:
            reason = str(error).partition("\n")[0]
            self.error = f"--wandb: {reason}: `wandb login` once, or set WANDB_MODE=offline"
            return
        self.run_id = self.run.id
        self.run.define_metric("*", step_metric="samples")
        if self.watch_gradients:
            backwards = hyperparameters.log_interval * hyperparameters.grad_accumulation
            self.run.watch(net, log="gradients", log_freq=backwards)

    def start_tensorboard(self, samples):
        from torch.utils.tensorboard import SummaryWriter

        hide_errors_of_tensorboards_thread()
        try:
            # Remove what an interrupted run has written after its last snapshot, at `purge_step` or later.
            self.writer = SummaryWriter(self.tensorboard, purge_step=samples + 1)
        except OSError as error:
            self.fail(error)

    def log(self, samples, **scalars):
        """Log numbers that are known after `samples` samples of training."""
        if self.run is not None:
            self.run.log({"samples": samples, **scalars})
        if self.writer is not None:
            try:
                for name, value in scalars.items():
                    self.writer.add_scalar(name, value, samples)
            except OSError as error:
                self.fail(error)

    def log_predictions(self, samples, images, labels, scores):
        """Log `images` (n, 1, height, width) as bytes, with their labels (n,) and scores (n, classes)."""
        if self.run is not None:
            import wandb

            classes = scores.shape[1]
            table = wandb.Table(columns=["image", "guess", "truth", *(f"score_{i}" for i in range(classes))])
            for image, label, row in zip(images, labels.tolist(), scores, strict=True):
                table.add_data(wandb.Image(image[0].numpy()), row.argmax().item(), label, *row.tolist())
            self.run.log({"samples": samples, "test_predictions": table})
        if self.writer is not None:
            try:
                self.writer.add_images("test_images", images, samples)
            except OSError as error:
                self.fail(error)

    def fail(self, error):
        """Stop TensorBoard after `error`, an OSError. The training continues, and `close` reports the error."""
        self.error = f"--tensorboard: cannot write to {os.path.abspath(self.tensorboard)}: {error.strerror}"
        self.writer = None

    def close(self):
        """End the tracking. Raises DistributedError on every rank if not everything could be written."""
        if self.run is not None:
            self.run.finish()
        if self.writer is not None:
            try:
                self.writer.close()
            except OSError as error:
                self.fail(error)
        dist.raise_on_all(self.error)  # rank 0 may upload for minutes


def hide_errors_of_tensorboards_thread():
    """Print no traceback when TensorBoard's thread cannot write: its next call raises the same error in this thread."""
    print_traceback = threading.excepthook

    def hook(failure):
        if type(failure.thread).__name__ != "_AsyncWriterThread":
            print_traceback(failure)

    threading.excepthook = hook
