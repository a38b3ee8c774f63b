"""Track a run with Weights & Biases and TensorBoard. Rank 0 writes.

Every rank makes the same calls, except `log_predictions`, which only rank 0 needs to make:

    tracker = tracking.Tracker("my project", wandb=True, tensorboard="runs")
    epoch, step, run_id = checkpoint.load(path, model, optimizer, run_id=None)
    tracker.start(vars(args), samples, run_id)  # a resumed run continues its W&B run
    tracker.log(samples, loss=0.5)
    checkpoint.save(path, model, optimizer, epoch=epoch, run_id=tracker.run_id)
    tracker.close()

Needs requirements-tracking.txt; without --wandb and --tensorboard, neither package is imported.
"""

import distributed as dist


class Tracker:
    def __init__(self, project, wandb=False, tensorboard=None):
        """`tensorboard` is the folder to write to. Without `wandb` and without a folder nothing is tracked."""
        self.project = project
        self.wandb = wandb
        self.tensorboard = tensorboard
        self.run = None
        self.run_id = None
        self.writer = None

    def is_active(self):
        """Does this rank write anything?"""
        return self.run is not None or self.writer is not None

    def start(self, settings, samples, run_id=None):
        """Begin to track after `samples` samples. Raises DistributedError on every rank if W&B refuses.

        `settings` is a dict of all options. `run_id` is the W&B run to continue, from the snapshot.
        """
        error = None
        if dist.is_primary():
            if self.wandb:
                error = self.start_wandb(settings, run_id)
            if self.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                # Remove what an interrupted run has written after its last snapshot, at `purge_step` or later.
                self.writer = SummaryWriter(self.tensorboard, purge_step=samples + 1)
        dist.raise_on_all(error)
        self.run_id = dist.broadcast_object(self.run_id)  # each node saves it in its snapshot

    def start_wandb(self, settings, run_id):
        """Returns an error line, or None."""
        import wandb

        try:
            self.run = wandb.init(project=self.project, config=settings, id=run_id, resume="allow")
        except wandb.Error as error:
            reason = str(error).partition("\n")[0]
            return f"--wandb: {reason}: `wandb login` once, or set WANDB_MODE=offline"
        self.run_id = self.run.id
        self.run.define_metric("*", step_metric="samples")
        return None

    def log(self, samples, **scalars):
        """Log numbers that are known after `samples` samples of training."""
        if self.run is not None:
            self.run.log({"samples": samples, **scalars})
        if self.writer is not None:
            for name, value in scalars.items():
                self.writer.add_scalar(name, value, samples)

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
            self.writer.add_images("test_images", images, samples)

    def close(self):
        """End the tracking, on every rank."""
        if self.run is not None:
            self.run.finish()
        if self.writer is not None:
            self.writer.close()
        dist.barrier()  # rank 0 may upload for minutes
