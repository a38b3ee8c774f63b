"""What processes share out: the optimizer's state (ZeRO), their talk (DiLoCo), tokens among experts (EP).

    python -m benchmarks.sharing                 # on all GPUs, or two CPU processes, in about six minutes
    python -m benchmarks.sharing --only talk

All is trained by the scripts' own functions, each case in processes of its own.

- state: Adam's state that a process holds, the time of a step and the largest process's peak memory (resident, or
  allocated on the GPU), of min_ZeRO.py, torch's ZeroRedundancyOptimizer, DDP and FSDP2, by the model's width. Rounds of
  all cases alternate; the first two steps are not timed.
- talk: held-out loss after as many tokens, and bytes sent, of DiLoCo by H and of DDP, with AdamW's rate of DiLoCo's
  processes and with the other scripts' default.
- tokens: which share of a step's tokens each expert gets, over the steps, with the auxiliary loss and without.
"""

import argparse
import functools
import math

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

import distributed as dist
import gpt
import min_DiLoCo
import min_EP
import min_ZeRO
import options
from benchmarks import common, transformer

WIDTHS, CASES, STATE_STEPS, ROUNDS = (256, 512), ("DDP", "ZeRO", "ZeroRedundancyOptimizer", "FSDP"), 8, 2
PERIODS, MARKS = (1, 5, 20, 50), (1, 10, 25, 50, 100, 200, 400)


def make_args(nproc, steps, **changes):
    """The default model and training of the scripts."""
    shape = {"layers": 2, "width": 128, "heads": 4, "length": 128, "global_batch_size": 8 * nproc}
    training = {"steps": steps, "log_every": steps, "lr": 0.003, "clip": None, "seed": 0}
    return argparse.Namespace(**{**shape, **training, **changes})


def make_model(args):
    return gpt.GPT(gpt.Config.from_args(args), args.seed)


def held_out_loss(local_loss, args):
    """Over all processes."""
    batches = gpt.Data(args, share=(0, 1)).held_out_batches()
    with torch.no_grad():
        return dist.reduce(torch.stack([local_loss(x, y) for x, y in batches]).mean()).item()


# ---- state --------------------------------------------------------------------------------------------------------


def prepare(case, args):
    """Model and optimizer, which min_ZeRO.py's loop trains whoever shards what."""
    model, how = make_model(args).to(dist.get_device()), {"lr": args.lr, "fused": True}
    if case == "ZeRO":
        return model, min_ZeRO.ZeRO(model.parameters(), torch.optim.AdamW, **how)
    if case == "FSDP":
        model = dist.prepare_fsdp_model(model)
        return model, torch.optim.AdamW(model.parameters(), **how)
    model = dist.prepare_ddp_model(model, gradient_as_bucket_view=True)
    if case == "ZeroRedundancyOptimizer":
        how = {**how, "optimizer_class": torch.optim.AdamW, "parameters_as_bucket_view": True}
        return model, ZeroRedundancyOptimizer(model.parameters(), **how)
    return model, torch.optim.AdamW(model.parameters(), **how)


def state_worker(local_rank, world_size, case, args, report):
    gpt.Progress = transformer.Clock
    dist.init_process_group()
    model, optimizer = prepare(case, args)
    times = min_ZeRO.train(model, optimizer, gpt.Data(args), args)
    seconds = (times[-1] - times[transformer.WARM_UP - 1]) / (len(times) - transformer.WARM_UP)
    numbers = [state_bytes(optimizer) / 1e6, seconds * 1e3, gpt.peak_memory(dist.get_device()) / 1e6]
    largest = dist.all_reduce(torch.tensor(numbers, dtype=torch.float64, device=dist.get_device()), "max")
    report([round(number, 1) for number in largest.tolist()])


def state_bytes(optimizer):
    """What this process holds."""
    states = getattr(optimizer, "optim", optimizer).state.values()
    values = [value for state in states for value in state.values() if value.dim()]
    return sum((value.to_local() if hasattr(value, "to_local") else value).nbytes for value in values)


def measure_state(nproc, small):
    shape = {"layers": transformer.LAYERS, "length": transformer.LENGTH, "global_batch_size": 4 * nproc}
    cases = [(width, case) for width in WIDTHS[: 1 if small else None] for case in CASES]
    rows = {f"width {width}: {case}": [] for width, case in cases}
    for _ in range(1 if small else ROUNDS):
        for width, case in cases:
            args = make_args(nproc, STATE_STEPS, width=width, **shape)
            rows[f"width {width}: {case}"].append(common.launch(state_worker, case, args, nprocs=nproc))
    columns = ("state MB", "ms of a step", "peak MB")
    rows = {name: dict(zip(columns, zip(*row, strict=True), strict=True)) for name, row in rows.items()}
    ratios = {}
    for width, case in cases:
        one, ddp = rows[f"width {width}: {case}"], rows[f"width {width}: DDP"]
        if case != "DDP":
            name = f"width {width}: {{}} of {case} / of DDP"
            ratios[name.format("state")] = common.ratio(one["state MB"], ddp["state MB"], f"about 1/{nproc}")
            ratios[name.format("step")] = common.ratio(one["ms of a step"], ddp["ms of a step"], "none")
    results = {
        name: {what: common.summary(values) for what, values in columns.items()} for name, columns in rows.items()
    }
    for name, row in results.items():
        print(f"{name:27}", *(f"{value['median']:8,.1f} {what}" for what, value in row.items()))
    common.show(ratios)
    record = {"unit": "MB, ms", "processes": nproc, "results": results, "ratios": ratios}
    common.write("sharing_state", {**record, "layers": transformer.LAYERS, "tokens of a step": 1024 * nproc})


# ---- talk ---------------------------------------------------------------------------------------------------------


def talk_worker(local_rank, world_size, train, args, report):
    dist.init_process_group()
    model = make_model(args).to(dist.get_device())
    if train is min_ZeRO.train:
        model = dist.prepare_ddp_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, gpt.Data(args), args)
    # By a ring all-reduce of all parameters in each outer step. With DDP each step is one.
    outer_steps = math.ceil(args.steps / args.sync_every)
    n_bytes = sum(param.nbytes for param in model.parameters())
    sent = outer_steps * 2 * (dist.get_world_size() - 1) / dist.get_world_size() * n_bytes
    loss = held_out_loss(lambda x, y: gpt.loss_fn(model(x), y), args)
    report({"held-out": loss, "sent MB": sent / 1e6})


def measure_talk(nproc, small):
    outer = {"outer_lr": 0.7, "outer_momentum": 0.9}  # min_DiLoCo.py's defaults
    steps = 10 if small else 400
    periods = PERIODS[:2] if small else PERIODS
    make = functools.partial(make_args, nproc, steps, **outer)
    cases = {f"DDP, rate {lr}": (min_ZeRO.train, make(lr=lr, sync_every=1)) for lr in (0.001, 0.003)}
    cases |= {f"H {h}: DiLoCo, rate 0.001": (min_DiLoCo.train, make(lr=0.001, sync_every=h)) for h in periods}
    results = {name: common.launch(talk_worker, *case, nprocs=nproc) for name, case in cases.items()}
    for name, row in results.items():
        print(f"{name:27} held-out {row['held-out']:.4f}, each process has sent {row['sent MB']:.1f} MB")
    common.write("sharing_talk", {"unit": "nats per byte, MB", "processes": nproc, "steps": steps, "results": results})


# ---- tokens -------------------------------------------------------------------------------------------------------


def tokens_worker(local_rank, world_size, args, report):
    dist.init_process_group()
    model = gpt.make_meta_model(gpt.Config.from_args(args))
    min_EP.add_experts(model, args)
    model.to_empty(device=dist.get_device())
    gpt.fill([*model.named_parameters(), *model.named_buffers()], args.seed)
    shares = [{} for _ in model.blocks]

    class Counting(gpt.Progress):
        def __call__(self, step, loss):
            if step + 1 in MARKS:
                for block, rows in zip(model.blocks, shares, strict=True):
                    tokens = block.mlp.tokens_per_expert
                    rows[step + 1] = (tokens / tokens.sum()).tolist()
            super().__call__(step, loss)

    gpt.Progress = Counting
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    min_EP.train(model, optimizer, gpt.Data(args), args)
    report([held_out_loss(lambda x, y: gpt.loss_fn(model(x), y), args), *shares])


def measure_tokens(nproc, small):
    experts = {"experts": 4 * nproc, "top": 2}
    results, losses = {}, {}
    for balance in (0.01, 0):
        args = make_args(nproc, MARKS[1 if small else -1], balance="loss", balance_weight=balance, **experts)
        losses[f"balance {balance}"], *blocks = common.launch(tokens_worker, args, nprocs=nproc)
        results |= {f"balance {balance}: block {i + 1}": shares for i, shares in enumerate(blocks)}
    for name, shares in results.items():
        print(f"{name}, the busiest expert's share:", *(f"{step}: {max(row):.3f} " for step, row in shares.items()))
    print("held-out:", *(f"{loss:.4f} with {name} " for name, loss in losses.items()))
    record = {"unit": "share of a step's tokens", "processes": nproc, "results": results, "held-out": losses}
    common.write("sharing_tokens", {**record, **experts})


PARTS = {"state": measure_state, "talk": measure_talk, "tokens": measure_tokens}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=PARTS, help="one part of three")
    parser.add_argument(
        "--nproc", type=options.whole_number(2), default=torch.cuda.device_count() or 2, help="processes"
    )
    parser.add_argument("--small", action="store_true", help="little of each, to see that it runs")
    args = parser.parse_args()
    for name, measure in PARTS.items():
        if args.only in (None, name):
            measure(args.nproc, args.small)


if __name__ == "__main__":
    main()
