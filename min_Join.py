"""Train on ranks with unequal amounts of data: none is dropped, none is repeated, and no rank waits for ever.

If each rank just stops after its last batch, the others wait: DDP's backward needs every rank. They wait until a
timeout ends the job, or until the next collective of a rank that has gone on, a metric's, pairs with their gradients.
Two ways are right, where the loss of a step is the mean over its samples, not over ranks:
    --method join     `Join` takes part with zeros for a rank without batches, and with the option used here, which is
                      not the default, DDP divides by the ranks that have one: the mean, if all batches are of one size.
                      For DDP and ZeroRedundancyOptimizer. A rank that leaves early gets the final weights, but not the
                      optimizer's state: send that too before another pass over the data.
    --method weights  A rank without batches takes an empty one, and every rank divides the sum of its losses by the
                      samples of all: for any sizes, any way of sharding, any number of passes. A module that takes no
                      empty batch (16-bit attention on GPUs) needs another, its loss times zero.
Where data can be dealt out anew, as `dist.data_sampler` does, do that: a rank without data does nothing useful.

Cost per process as DDP's, for P float32 parameters on N processes: 16·P bytes with AdamW, and 2·(N-1)/N · 4·P bytes
sent in each step, by a rank without data too; and one number more, for which `join` waits.

    python min_Join.py                                         # all visible GPUs, or two CPU processes
    CUDA_VISIBLE_DEVICES=0,1 python min_Join.py --least 0      # the last process has no data at all
    torchrun --standalone --nproc-per-node 2 min_Join.py --method weights

It prints the number of batches of each process, and every 50 steps loss, held-out loss, speed and memory:
`step 400 | loss 2.2886 | held-out 2.3419 nats per byte (bigram 2.4810, trigram 1.9042) | …`.
"""

import contextlib

import torch
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F

import distributed as dist
import gpt
import options


def parse_args():
    parser = options.ArgumentParser(__doc__)
    gpt.add_model_options(parser)
    parser.add_argument("--method", choices=("join", "weights"), default="join", help="how ranks without data go on")
    parser.add_argument("--least", type=options.whole_number(0), default=300, help="batches of the last process")
    args = parser.parse_args()
    gpt.check_model_options(parser, args)
    if args.least > args.steps:
        parser.error(f"argument --least: {args.least} is more than --steps {args.steps}, the batches of the first one")
    if args.global_batch_size % args.nproc:
        parser.error(
            f"argument --batch-size: {args.global_batch_size} is not a multiple of the processes, {args.nproc}"
        )
    return args


def part_of(batch):
    """This process's sequences of a global batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def joined(model, batches, sums):
    """Yields each step's loss. `sums`, (steps, 2), get its sum over this process's bytes, and their number."""
    with Join([model], divide_by_initial_world_size=False) if dist.get_world_size() > 1 else contextlib.nullcontext():
        for own, (x, y) in zip(sums, batches, strict=False):
            loss = gpt.loss_fn(model(x), y)
            own[0], own[1] = loss.detach() * y.numel(), y.numel()
            yield loss


def weighted(model, batches, sums):
    """The same, but in every step of `sums`, in which a process may have no batch."""
    empty = torch.zeros(2, 0, 1, dtype=torch.long, device=sums.device)
    for own in sums:
        x, y = next(batches, empty)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        own[0], own[1] = loss.detach(), y.numel()
        yield loss * dist.get_world_size() / dist.all_reduce(own[1])  # DDP divides by the processes


def train(model, optimizer, text, held_out, args):
    """Every step's loss, over all samples. After --log-every steps all processes meet, as after an epoch elsewhere."""
    plain = getattr(model, "module", model)  # which sends nothing
    progress = gpt.Progress(lambda x, y: gpt.loss_fn(plain(part_of(x)), part_of(y)), text, held_out, args)
    own_steps = args.steps - (args.steps - args.least) * dist.get_rank() // max(1, dist.get_world_size() - 1)
    dist.print_primary(f"batches of each process: {dist.gather_objects(own_steps)}")
    for start in range(0, args.steps, args.log_every):
        end = min(start + args.log_every, args.steps)
        sums, steps = torch.zeros(end - start, 2, device=dist.get_device()), range(start, min(end, own_steps))
        shape = (args.global_batch_size, args.length, args.seed, dist.get_device())
        batches = (map(part_of, gpt.batch(text, step, *shape)) for step in steps)
        for loss in (joined if args.method == "join" else weighted)(model, batches, sums):
            optimizer.zero_grad()
            loss.backward()
            if args.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
        losses, sizes = dist.all_reduce(sums).unbind(1)
        for loss in losses / sizes:
            progress(loss)
    return progress.losses


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    text, held_out = gpt.load_text()
    torch.manual_seed(args.seed)
    model = gpt.GPT(args.layers, args.width, args.heads, args.length).to(dist.get_device())
    model = dist.prepare_ddp_model(model, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    gpt.report_held(model.parameters(), sum(param.numel() for param in model.parameters()))
    train(model, optimizer, text, held_out, args)
    dist.cleanup()


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
