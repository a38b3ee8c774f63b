"""The first of three trainers: plain PyTorch on one device. It saves checkpoints, but does not resume.

This is the training loop that the next two distribute. Choose it when one device is fast enough and the model fits
into it. multigpu_torchrun.py is the same file for several GPUs, and `diff single_gpu.py multigpu_torchrun.py` shows
what changes.

Cost, for P float32 parameters trained by SGD: 4·P bytes of parameters and 4·P of gradients. Nothing is sent.

    python single_gpu.py 50 10                           # train 50 epochs, save every 10 epochs
    python single_gpu.py 50 10 --batch-size 64
    CUDA_VISIBLE_DEVICES=2 python single_gpu.py 50 10    # train on GPU 2

It prints the average loss of each epoch, `[CPU] Epoch 0 | Batchsize: 32 | Steps: 64 | Loss: 12.0531`, and a line for
each checkpoint. Without a GPU it trains on the CPU.
"""

import argparse
import os
import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

# ---- training -----------------------------------------------------------------------------------------------------


class Trainer:
    def __init__(self, model, loader, optimizer, device, save_every):
        self.model = model
        self.loader = loader
        self.optimizer = optimizer
        self.device = device
        self.name = "GPU0" if device.type != "cpu" else "CPU"
        self.save_every = save_every

    def run_epoch(self, epoch):
        total_loss = torch.zeros((), device=self.device)  # stays on the GPU, so no step waits for it
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = self.compute_loss(x, y)
            loss.backward()
            self.optimizer.step()
            total_loss += loss.detach() * len(x)
        loss = total_loss.item() / len(self.loader.dataset)
        line = f"Epoch {epoch} | Batchsize: {self.loader.batch_size} | Steps: {len(self.loader)} | Loss: {loss:.4f}"
        print(f"[{self.name}] {line}")

    def compute_loss(self, x, y):
        x = x.to(self.device, non_blocking=True)
        y = y.to(self.device, non_blocking=True)
        return F.mse_loss(self.model(x), y)

    def train(self, total_epochs):
        for epoch in range(total_epochs):
            self.run_epoch(epoch)
            if (epoch + 1) % self.save_every == 0 or epoch + 1 == total_epochs:
                self.save_checkpoint(epoch)

    def save_checkpoint(self, epoch):
        checkpoint = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": epoch + 1,  # the next epoch to run
        }
        save_atomically(checkpoint, "checkpoint.pt")
        print(f"Epoch {epoch} | Checkpoint saved at checkpoint.pt")


def save_atomically(checkpoint, path):
    """A kill or a power cut at any moment leaves the old file or the new one."""
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        if os.path.exists(temporary):
            os.remove(temporary)
        if isinstance(error, RuntimeError):
            error = error.__context__ or error  # torch.save raises it after the OSError of a full disk
        sys.exit(f"cannot save {os.path.abspath(path)}: {error}")


# ---- data ---------------------------------------------------------------------------------------------------------


class ToyDataset(TensorDataset):
    """2048 samples of 20 features. The target is a fixed linear function of the features plus a little noise."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2048, 20, generator=generator)
        weights = torch.randn(20, 1, generator=generator)
        super().__init__(x, x @ weights + 0.1 * torch.randn(2048, 1, generator=generator))


# ---- options ------------------------------------------------------------------------------------------------------


def positive_int(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parse_args():
    # Without a usage, an error is one line.
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], usage=argparse.SUPPRESS)
    parser.add_argument("total_epochs", type=positive_int, help="passes over the data")
    parser.add_argument("save_every", type=positive_int, help="epochs between checkpoints")
    batch_help = "samples per process (default: %(default)s)"
    parser.add_argument("--batch-size", "--batch_size", type=positive_int, default=32, help=batch_help)
    return parser.parse_args()


# ---- start --------------------------------------------------------------------------------------------------------


def main(args):
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    dataset = ToyDataset()
    loader = DataLoader(
        dataset,
        args.batch_size,
        shuffle=True,
        pin_memory=device.type != "cpu",
    )
    model = torch.nn.Linear(20, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3, fused=True)
    trainer = Trainer(model, loader, optimizer, device, args.save_every)
    trainer.train(args.total_epochs)


if __name__ == "__main__":
    main(parse_args())
