"""N processes compute what one process computes: the same parameters after the same global batches, in float64."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distributed as dist

GLOBAL_BATCH, EPOCHS, SEED = 16, 4, 3  # 4 epochs of 112 / 16 = 7 steps


def dataset():
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(112, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def model():
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1)).double()


def train_alone():
    """Plain PyTorch, without the helper: the reference."""
    torch.manual_seed(SEED)
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    x, y = dataset().tensors
    losses = []
    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED + epoch))
        for batch in order.split(GLOBAL_BATCH):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return [*net.parameters(), torch.stack(losses)]


def train_worker(local_rank, world_size, folder):
    dist.init_process_group()
    torch.manual_seed(SEED + dist.get_rank())  # DDP must start every rank from rank 0's weights
    net = dist.prepare_ddp_model(model().to(dist.get_device()), device_ids=[local_rank])
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    sampler = dist.data_sampler(dataset(), True, shuffle=True, seed=SEED)
    loader = DataLoader(dataset(), GLOBAL_BATCH // world_size, sampler=sampler)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(dist.reduce(loss))
    torch.save([*(p.detach() for p in net.parameters()), torch.stack(losses)], f"{folder}/{dist.get_rank()}.pt")
    dist.cleanup()


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_ddp_equals_one_process(nprocs, tmp_path):
    expected = train_alone()
    assert expected[-1][-1] < expected[-1][0] / 2, "the reference must learn, or equality means little"
    dist.launch(train_worker, str(tmp_path), nprocs=nprocs)
    for rank in range(nprocs):
        for actual, reference in zip(torch.load(tmp_path / f"{rank}.pt", weights_only=True), expected, strict=True):
            assert (actual - reference).abs().max() <= 1e-9
