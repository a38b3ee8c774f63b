"""Train on ranks with unequal amounts of data: no batch is dropped, none is repeated, and no rank waits forever.

In every step DDP averages the gradients of all ranks. Let rank 0 have 4 batches (b) and rank 1 only 2. If each rank
just stops after its last batch, rank 0 waits for gradients that never come:

    step                       1    2    3    4
    rank 0                     b    b    b          waits in backward of step 3
    rank 1                     b    b               has left the loop

There are two ways out.

--method join    torch's Join lets a rank without batches answer DDP's all-reduce with zeros. With the option used here,
    which is not the default, DDP divides the gradients by the number of ranks that still have a batch. The loop stays
    as it is. All batches must be equally large. A rank that leaves early receives the final weights, but not the
    optimizer's state: send that too before a second pass over the data.

    rank 0                     b    b    b    b
    rank 1                     b    b    0    0     answers with zeros, inside of Join
    gradients divided by       2    2    1    1

--method weights    A rank without batches takes empty ones, and every rank divides the sum of its losses by the number
    of samples on all ranks. It suits batches of any size and any number of passes. If a module refuses an empty batch,
    take a batch of one sequence and multiply its loss by zero.

Both give the mean over all samples of a step. If you can redistribute the data, do that instead (dist.data_sampler).

Cost per process, for P float32 parameters on N processes: as with DDP, 16·P bytes with AdamW, and 2·(N-1)/N · 4·P bytes
sent in each step. After each --log-every steps `join` also broadcasts the parameters, 4·P bytes.

    python min_Join.py --nproc 2                        # two processes with 400 and 300 batches
    torchrun --standalone --nproc-per-node 2 min_Join.py --method weights
"""

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F

import distributed as dist
import gpt
import options

# ---- two ways out -------------------------------------------------------------------------------------------------


def train_with_join(model, optimizer, batches, sums, clip):
    """Row i of `sums` receives the sum of step i's losses over this process's bytes, and the number of these bytes."""
    with Join([model], divide_by_initial_world_size=False):  # no collective but DDP's may be called inside
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            loss = gpt.loss_fn(model(x), y)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            sums[step, 0] = loss.detach() * y.numel()
            sums[step, 1] = y.numel()


def train_with_weights(model, optimizer, batches, sums, clip):
    """The same, but every process takes every step (a row of `sums`), with an empty batch if it has no other."""
    empty = torch.empty(0, 1, dtype=torch.long, device=sums.device)
    for step in range(len(sums)):
        x = y = empty
        if step < len(batches):
            x, y = batches[step]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        sums[step, 0] = loss.detach()
        sums[step, 1] = y.numel()
        mean = loss / dist.reduce(sums[step, 1], op="sum")
        (mean * dist.get_world_size()).backward()  # DDP divides by the number of processes
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


# ---- training -----------------------------------------------------------------------------------------------------


def number_of_batches(args):
    """--steps on the first process, --least on the last, evenly spaced between: 400, 350 and 300 on three."""
    last_rank = max(1, dist.get_world_size() - 1)
    missing = (args.steps - args.least) * dist.get_rank() // last_rank
    return args.steps - missing


def train(model, optimizer, data, args):
    """Returns the loss of every step over all processes, (steps,).

    Printing a line needs collectives, which Join does not allow inside. So training is cut into rounds of --log-every
    steps. A process that has run out of batches has none in all later rounds.
    """
    n_batches = number_of_batches(args)
    all_n_batches = dist.gather_objects(n_batches)
    dist.print_primary(f"batches of each process: {all_n_batches}")
    progress = gpt.Progress(dist.unwrapped(model), data, args)
    for start in range(0, args.steps, args.log_every):
        stop = min(start + args.log_every, args.steps)
        batches = []
        for step in range(start, min(stop, n_batches)):
            batch = data.batch(step)
            batches.append(batch)
        sums = torch.zeros(stop - start, 2, device=dist.get_device())
        if args.method == "join" and dist.get_world_size() > 1:  # a single process has no DDP model to join
            train_with_join(model, optimizer, batches, sums, args.clip)
        else:
            train_with_weights(model, optimizer, batches, sums, args.clip)
        losses, sizes = dist.all_reduce(sums).unbind(1)
        for step, loss in enumerate(losses / sizes, start):
            progress(step, loss)
    return progress.losses


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = gpt.make_parser(__doc__)
    method_help = "how processes without data take part"
    parser.add_argument("--method", choices=("join", "weights"), default="join", help=method_help)
    least_help = "batches of the last process; the first has --steps (default: three quarters of --steps)"
    parser.add_argument("--least", type=options.whole_number(0), help=least_help)
    args = parser.parse_args()
    if args.least is None:
        args.least = args.steps * 3 // 4
    if args.least > args.steps:
        parser.error(f"argument --least: {args.least} is not a whole number from 0 to {args.steps}, the --steps")
    gpt.check_model_options(parser, args, batch=(args.nproc, "the number of processes"))
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    gpt.start(args)
    data = gpt.Data(args)  # this process's share of each global batch
    model = gpt.GPT(gpt.Config.from_args(args), args.seed).to(dist.get_device())
    model = dist.prepare_ddp_model(model, gradient_as_bucket_view=True)  # needs no copy of the gradients
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, data, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
