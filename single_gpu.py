"""Rung 0 of the ladder: plain PyTorch on one device, with checkpoints.

The starting point. Choose it when one device is fast enough and the model fits into it; multigpu_torchrun.py is the
same file for several GPUs. Cost, for P float32 parameters trained by SGD: 4·P bytes of parameters and 4·P of
gradients; nothing is sent.

    python single_gpu.py 50 10                           # 50 epochs, checkpoint.pt at every 10th and at the last
    python single_gpu.py 50 10 --batch-size 64
    CUDA_VISIBLE_DEVICES=2 python single_gpu.py 50 10    # GPU 2; the CPU where there is no GPU

It prints a line per epoch, `[GPU0] Epoch 0 | Batchsize: 32 | Steps: 64 | Loss: 17.2381`, with the average loss of the
epoch's samples, and says when it has saved.
"""

import argparse
import os
import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


def positive_int(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], usage=argparse.SUPPRESS)  # one-line errors
    parser.add_argument("total_epochs", type=positive_int, help="epochs to train")
    parser.add_argument("save_every", type=positive_int, help="epochs between checkpoints")
    parser.add_argument("--batch-size", "--batch_size", type=positive_int, default=32, help="of a step (%(default)s)")
    return parser.parse_args()


class ToyDataset(Dataset):
    """2048 samples of 20 features; the target is a fixed linear function of them plus a little noise."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(2048, 20, generator=generator)
        weights = torch.randn(20, 1, generator=generator)
        self.y = self.x @ weights + 0.1 * torch.randn(2048, 1, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitems__(self, indices):
        return self.x[indices], self.y[indices]  # a whole batch at once


class Trainer:
    def __init__(self, model, loader, optimizer, device, save_every):
        self.model = model.to(device)
        self.loader = loader
        self.optimizer = optimizer
        self.device = device
        self.save_every = save_every

    def train(self, total_epochs):
        for epoch in range(total_epochs):
            self.run_epoch(epoch)
            if (epoch + 1) % self.save_every == 0 or epoch + 1 == total_epochs:
                self.save_checkpoint(epoch)

    def run_epoch(self, epoch):
        total_loss = torch.zeros((), device=self.device)  # stays on the device: no wait for it in the loop
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = self.compute_loss(x, y)
            loss.backward()
            self.optimizer.step()
            total_loss += loss.detach() * len(x)
        loss = total_loss.item() / len(self.loader.dataset)
        name = f"GPU{self.device.index}" if self.device.type == "cuda" else "CPU"
        batch_size, steps = self.loader.batch_size, len(self.loader)
        print(f"[{name}] Epoch {epoch} | Batchsize: {batch_size} | Steps: {steps} | Loss: {loss:.4f}")

    def compute_loss(self, x, y):
        x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
        return F.mse_loss(self.model(x), y)

    def save_checkpoint(self, epoch, path="checkpoint.pt"):
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        temporary = f"{path}.tmp"
        try:
            with open(temporary, "wb") as file:
                torch.save({**parts, "epoch": epoch + 1}, file)  # the next to run
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)  # atomic: a kill leaves the old checkpoint or the new one
        except (OSError, RuntimeError) as error:
            if os.path.exists(temporary):
                os.remove(temporary)
            # torch.save turns the OSError of a full disk into a RuntimeError.
            reason = error if isinstance(error, OSError) else error.__context__ or error
            sys.exit(f"cannot save {os.path.abspath(path)}: {reason}")
        print(f"Epoch {epoch} | Checkpoint saved at {path}")


def main(args):
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    dataset = ToyDataset()
    # collate_fn: __getitems__ has made the batch already
    loader = DataLoader(dataset, args.batch_size, shuffle=True, collate_fn=tuple, pin_memory=device.type == "cuda")
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3, fused=True)
    Trainer(model, loader, optimizer, device, args.save_every).train(args.total_epochs)


if __name__ == "__main__":
    main(parse_args())
