"""What a step costs beside the computing, and what DDP's and FSDP2's options change about it.

    python -m benchmarks.step                        # on all GPUs, or two CPU processes
    python -m benchmarks.step --rounds 3 --model tiny

Forward, backward and a step of fused Adam on a batch that stays; all cases in turn, in the same processes, the slowest
rank's time. "no reduction" trains every rank's model alone: no way to train can be faster.

- tiny (0.1 M parameters, batch 256): DDP as `prepare_ddp_model` makes it or with one option changed, torch.compile, and
  "flat": no DDP, but gradients that are views of one tensor, reduced after backward by one call.
- deep (94 M, batch 8): DDP and FSDP2, with units of other sizes, with parameters that stay gathered from forward to
  backward, and with torch's default Adam; and the collectives of one step alone: what FSDP2 gathers and scatters, what
  DDP reduces. On the CPU all of that first with pages of 4 KB, then with huge pages (THP_MEM_ALLOC_ENABLE), as `launch`
  has it.
"""

import functools
import os

import torch
import torch.distributed as torch_dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F

import distributed as dist
import mnist
import options
from benchmarks import common
from benchmarks.throughput import TinyNet

MODELS = {"tiny": (TinyNet, 256, 40), "deep": (mnist.DeepNet, 8, 2)}  # with batch per process, steps of a round


def ddp(model, compiled=False, hook=None, **options):
    model = dist.prepare_ddp_model(torch.compile(model) if compiled else model, **options)
    if hook:
        model.register_comm_hook(None, hook)
    return model


def flat(model):
    params = list(model.parameters())
    grads = params[0].new_zeros(sum(param.numel() for param in params))
    for param, grad in zip(params, grads.split([param.numel() for param in params]), strict=True):
        param.grad = grad.view_as(param)
    return model, grads


TINY = {
    "no reduction": lambda model: model,
    "DDP": ddp,
    "static_graph": functools.partial(ddp, static_graph=True),
    "bucket_cap_mb=1": functools.partial(ddp, bucket_cap_mb=1),
    "gradient_as_bucket_view=False": functools.partial(ddp, gradient_as_bucket_view=False),
    "allreduce_hook": functools.partial(ddp, hook=default_hooks.allreduce_hook),
    "torch.compile": functools.partial(ddp, compiled=True),
    "flat": flat,
}
DEEP = {
    "no reduction": lambda model: model,
    "DDP": ddp,
    "FSDP2": dist.prepare_fsdp_model,
    "reshard_after_forward=False": functools.partial(dist.prepare_fsdp_model, reshard_after_forward=False),
    "DDP, Adam not fused": ddp,
    "FSDP2, Adam not fused": dist.prepare_fsdp_model,
}


def stepper(case, make, model, batch_size, steps, device):
    made = make(model)
    grads = None
    if isinstance(made, tuple):
        made, grads = made
    model = made
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, fused=not case.endswith("not fused"))
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(batch_size, 1, 28, 28, generator=generator).to(device)
    y = torch.randint(10, (batch_size,), generator=generator).to(device)

    def train(number):
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=grads is None)
            F.cross_entropy(model(x), y).backward()
            if grads is not None:
                torch_dist.all_reduce(grads)
                grads.div_(dist.get_world_size())
            optimizer.step()

    return train


def collectives(n_params, steps, device):
    whole = torch.zeros(n_params // dist.get_world_size() * dist.get_world_size(), device=device)
    part = whole.chunk(dist.get_world_size())[dist.get_rank()].clone()

    def repeat(function, number):
        for _ in range(steps):
            function()

    alone = {
        "all-gather, twice, alone": lambda: [torch_dist.all_gather_into_tensor(whole, part) for _ in range(2)],
        "reduce-scatter alone": lambda: torch_dist.reduce_scatter_tensor(part, whole),
        "all-reduce alone": lambda: torch_dist.all_reduce(whole),
    }
    return {name: functools.partial(repeat, function) for name, function in alone.items()}


def main_worker(local_rank, world_size, name, rounds, report):
    dist.init_process_group()
    device, (model_class, batch_size, steps) = dist.get_device(), MODELS[name]
    cases = {}
    for case, make in (TINY if name == "tiny" else DEEP).items():
        torch.manual_seed(0)
        cases[case] = stepper(case, make, model_class().to(device), batch_size, steps, device)
    if name == "deep":
        cases |= collectives(sum(param.numel() for param in model_class().parameters()), steps, device)
    times = common.alternate_ranks(cases, rounds, device)
    report({case: [1000 * seconds / steps for seconds in values] for case, values in times.items()})


def main():
    parser = options.ArgumentParser(__doc__)
    parser.add_argument("--model", choices=tuple(MODELS), nargs="+", default=list(MODELS), help="which to train")
    parser.add_argument("--rounds", type=options.whole_number(1), default=10, help="of all cases")
    parser.add_argument(
        "--nproc", type=options.whole_number(2), default=torch.cuda.device_count() or 2, help="processes"
    )
    args = parser.parse_args()
    results, ratios = {}, {}
    kinds = [None] if torch.cuda.device_count() else ["4 KB pages", "huge pages"]
    for name, pages in [("tiny", None), *(("deep", pages) for pages in kinds)]:
        if name not in args.model:
            continue
        os.environ["THP_MEM_ALLOC_ENABLE"] = str(int(pages != "4 KB pages"))  # each rank reads it when it starts
        title = f"{name}, {pages}" if pages else name
        times = common.launch(main_worker, name, args.rounds, nprocs=args.nproc)
        results[title] = {case: common.summary(values) for case, values in times.items()}
        for case, row in results[title].items():
            print(f"{title:17} {case:30} {row['median']:8.2f} ms ({row['min']:.2f} to {row['max']:.2f})")
        for case in (case for case in times if case != "DDP"):
            ratios[f"{title}: {case} / DDP"] = common.ratio(times[case], times["DDP"], "none")
    common.show(ratios)
    common.write("step", {"unit": "ms", "processes": args.nproc, "results": results, "ratios": ratios})


if __name__ == "__main__":
    main()
