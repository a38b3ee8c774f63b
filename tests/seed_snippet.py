"""The `main_worker` of a script written for this helper, completed with a data set and a model."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import distributed as dist


def data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(24, 4, generator=generator), torch.randint(3, (24,), generator=generator))


def build_model():
    torch.manual_seed(2)
    return torch.nn.Linear(4, 3)


def main_worker(gpu, world_size):
    is_distributed = world_size > 1
    if is_distributed:
        dist.init_process_group(gpu, world_size)
    dataset = data()
    sampler = dist.data_sampler(dataset, is_distributed, shuffle=False)
    loader = DataLoader(dataset, batch_size=24 // world_size, shuffle=False, sampler=sampler)
    model = dist.prepare_ddp_model(build_model().to(dist.get_device()), device_ids=[gpu])
    for x, y in loader:
        output = model(x.to(dist.get_device()))
        loss = torch.nn.functional.cross_entropy(output, y.to(dist.get_device()))
        correct = output.argmax(dim=1) == y.to(dist.get_device())
        loss = dist.reduce(loss.detach())  # average loss
        correct = torch.cat(dist.gather(correct.detach()))  # all correct predictions
        dist.print_primary(f"{loss.item():.6f} {correct.sum().item()}/{len(correct)}", flush=True)
    dist.wait_for_everyone()
    dist.cleanup()


if __name__ == "__main__":
    dist.launch(main_worker)
