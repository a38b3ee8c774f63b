"""DDP with a parameter server: a large table of embeddings on servers, dense layers on every trainer.

Some models are mostly a table, and a batch uses few of its rows: recommenders with a row per user and product, here a
row per group of bytes. The table lives on a server. Trainers train the dense layers with DDP, ask for the rows that
their share of the batch needs, and send back the gradients of those rows:

    trainer, one of N                               server
    ids of the rows in its share of the batch ----> look_up
                                              <---- table[ids]
    loss = mean over its share
    loss.backward()     DDP averages the gradients of the dense layers over the trainers
    step the dense layers
    ids, gradients of the rows -------------------> push: waits for all N, then makes one update:
                                              <---- table <- step(table, 1/N · sum of all gradients)

All trainers wait for that one update, so N trainers do what one process would do with the whole batch. The usual way,
torch.distributed.autograd with DistributedOptimizer, lets each trainer step the table by itself. The table would then
be updated N times in each step. With SGD it moves N times too far.

Choose it when a table is too large for a trainer. If the whole model fits, min_DDP.py is simpler. If a large model uses
all of its parameters in each step, choose min_FSDP.py. PyTorch maintains torch.distributed.rpc but no longer develops
it.

Cost, for a table of R rows of W float32, S servers, D dense parameters, and N trainers whose batches use U rows each:
a server holds 8·R·W/S bytes (the table and Adagrad's sums), a trainer 12·D bytes and 8·U·W. A step sends U·(16 + 8·W)
bytes between a trainer and the servers: ids twice, rows, and gradients. It does not depend on R. DDP sends
2·(N-1)/N · 4·D per trainer.

    python rpc_ddp.py                                                # a server and two trainers on this machine
    python rpc_ddp.py --trainers 4 --servers 2                       # the rows are divided over two servers
    torchrun --standalone --nproc-per-node 3 rpc_ddp.py              # rank 0 is the server
    export TP_SOCKET_IFNAME=eth1 GLOO_SOCKET_IFNAME=eth1             # on each of two machines: see rpc_remote.py
    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 rpc_ddp.py --servers 2

The task is to guess the next byte of Python's standard library from the 1 to 4 bytes before it. Each group of bytes is
hashed to the number of a row. When a process is lost, the job ends with one line that names it.
"""

import math
import sys
import threading
import time

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed import rpc
from torch.multiprocessing import ProcessExitedException
from torch.nn import functional as F

import distributed as dist
import gpt
import options
import rpc_remote

ORDERS = 4  # rows that each byte looks up: for the last 1, 2, 3 and 4 bytes
MULTIPLIER = 6364136223846793005  # of Knuth's random number generator for MMIX
HIDDEN = 128  # width of the hidden dense layer
OPTIMIZERS = {"adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}  # both can step some rows of a table alone

# ---- a step of a trainer ------------------------------------------------------------------------------------------


def train_step(model, optimizer, x, y, trainer, device, args):
    """Train on this trainer's share (n, length) of a batch. Returns the loss and how many rows it used."""
    ids, places = row_ids(x, args.rows).unique(return_inverse=True)  # each row once, and where it is used
    rows = look_up_everywhere(ids, args.servers, args.width).to(device).requires_grad_()
    loss = gpt.loss_fn(model(rows[places.to(device)]), y.to(device))
    optimizer.zero_grad()
    loss.backward()  # DDP averages the gradients of the dense layers; rows.grad is this trainer's own
    optimizer.step()
    push_everywhere(trainer, ids, rows.grad.cpu(), args.servers)
    return loss.detach(), len(ids)


# ---- a server -----------------------------------------------------------------------------------------------------

table_server = None  # the TableServer, in a server's process, where the next two functions run in threads of RPC


def look_up(ids):
    """Rows of this server's table."""
    # Needs no lock: an update waits for a push of every trainer, and no trainer looks up rows during its push.
    return table_server.table[ids]


@rpc.functions.async_execution  # the trainer waits for the Future, while this thread serves other calls
def push(trainer, ids, gradients):
    """Update these rows once every trainer has pushed. Returns a Future that is done then."""
    with table_server.lock:
        table_server.pushed[trainer] = (ids, gradients)
        updated = table_server.updated
        if len(table_server.pushed) == table_server.n_trainers:
            table_server.update()
    return updated


class TableServer:
    """A share of the table's rows, and their optimizer."""

    def __init__(self, n_rows, args):
        self.table = torch.zeros(n_rows, args.width)  # an untrained row contributes nothing
        self.optimizer = OPTIMIZERS[args.optimizer]([self.table], lr=args.lr)
        self.n_trainers = args.trainers
        self.lock = threading.Lock()
        self.pushed = {}  # ids and gradients of this step, by trainer
        self.updated = torch.futures.Future()

    def update(self):
        """Step the table with the mean of the trainers' gradients, and answer all of them."""
        pushed = [self.pushed[trainer] for trainer in range(self.n_trainers)]  # so rounding is the same in each run
        ids = torch.cat([ids for ids, _ in pushed])
        gradients = torch.cat([gradients for _, gradients in pushed]) / self.n_trainers
        with torch.sparse.check_sparse_tensor_invariants():  # torch warns unless this is turned on or off
            # A row that several trainers have used is in it several times. The optimizers add up its gradients.
            self.table.grad = torch.sparse_coo_tensor(ids[None], gradients, self.table.shape)
            self.optimizer.step()
        updated = self.updated
        self.pushed = {}
        self.updated = torch.futures.Future()
        updated.set_result(None)


# ---- the rows, divided over the servers ---------------------------------------------------------------------------


def look_up_everywhere(ids, servers, width):
    """The rows `ids` (u,) of the table, (u, width). Row i is row i // S of server i % S, for S servers."""
    answers = []
    for server in range(servers):
        own = ids[ids % servers == server]
        answers.append(rpc.rpc_async(f"server{server}", look_up, (own // servers,)))
    rows = torch.empty(len(ids), width)
    for server, answer in enumerate(answers):
        rows[ids % servers == server] = rpc_remote.wait(f"server{server}", answer)
    return rows


def push_everywhere(trainer, ids, gradients, servers):
    """Send the gradients (u, width) of the rows `ids` to their servers, and wait until all have updated the table."""
    answers = []
    for server in range(servers):
        own = ids % servers == server
        answers.append(rpc.rpc_async(f"server{server}", push, (trainer, ids[own] // servers, gradients[own])))
    for server, answer in enumerate(answers):
        rpc_remote.wait(f"server{server}", answer)


# ---- training -----------------------------------------------------------------------------------------------------


def train(text, trainer, trainers_group, args):
    """Train as number `trainer` of the trainers, whose process group is `trainers_group`."""
    device = rpc_remote.get_device()
    torch.manual_seed(args.seed)
    model = Dense(args.width).to(device)
    optimizer = OPTIMIZERS[args.optimizer](model.parameters(), lr=args.lr)
    ddp_model = dist.prepare_ddp_model(model, process_group=trainers_group)
    share = (trainer, args.trainers)
    total = torch.zeros((), device=device)
    start = time.perf_counter()
    n_steps = 0
    for step in range(1, args.steps + 1):
        x, y = gpt.batch(text, step - 1, args.global_batch_size, args.length, args.seed, share=share)
        loss, n_rows = train_step(ddp_model, optimizer, x, y, trainer, device, args)
        total += loss
        n_steps += 1
        if step % args.log_every == 0 or step == args.steps:
            torch_dist.all_reduce(total, group=trainers_group)
            average = total.item() / (n_steps * args.trainers)
            speed = n_steps * args.global_batch_size * args.length / (time.perf_counter() - start)
            if trainer == 0:
                rows = f"{n_rows:,} rows of {args.rows:,}"
                print(f"step {step}/{args.steps} | loss {average:.4f} | {speed:,.0f} tokens/s | {rows}", flush=True)
            total.zero_()
            start = time.perf_counter()
            n_steps = 0


# ---- model --------------------------------------------------------------------------------------------------------


class Dense(nn.Module):
    """Logits (..., 256) for the next byte, of the rows (..., ORDERS, width) that were looked up."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(ORDERS * width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 256))

    def forward(self, rows):
        return self.layers(rows.flatten(-2))


def row_ids(x, n_rows):
    """The rows for the last 1 to ORDERS bytes at each place of `x` (n, length): (n, length, ORDERS)."""
    ids = []
    hashed = torch.zeros_like(x)
    for order in range(ORDERS):
        earlier = F.pad(x, (order, 0))[:, : x.shape[1]]  # the byte `order` places before; zeros before the first
        hashed = (hashed + earlier + 1) * MULTIPLIER  # overflows, which is well defined and mixes the bits
        ids.append((hashed >> 24) % n_rows)
    return torch.stack(ids, dim=-1)


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = options.ArgumentParser(__doc__)
    gpus = dist.device_count()
    trainers_help = "number of trainers, at most one per GPU; ignored under torchrun"
    log_help = "steps between lines of progress"
    servers_help = "processes that share the rows of the table"
    batch_help = "sequences per step, over all processes (default: 16, or the next multiple of --trainers)"
    parser.add_argument("--trainers", type=options.whole_number(1), default=min(2, gpus or 2), help=trainers_help)
    parser.add_argument("--servers", type=options.whole_number(1), default=1, help=servers_help)
    parser.add_argument("--rows", type=options.whole_number(1), default=2**20, help="rows of the table")
    parser.add_argument("--width", type=options.whole_number(1), default=16, help="numbers per row")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad", help="for the table and the dense layers")
    parser.add_argument("--lr", type=options.positive_number, default=0.1, help="learning rate")
    parser.add_argument("--global-batch-size", type=options.whole_number(1), help=batch_help)
    parser.add_argument("--length", type=options.whole_number(1, 2**16), default=128, help="bytes per sequence")
    parser.add_argument("--steps", type=options.whole_number(1), default=200, help="steps to train")
    parser.add_argument("--log-every", type=options.whole_number(1), default=50, help=log_help, metavar="N")
    parser.add_argument("--seed", type=options.whole_number(0), default=0, help="random seed")
    rpc_remote.add_timeout(parser)
    args = parser.parse_args()
    if dist.is_launched():
        args.trainers = dist.get_world_size() - args.servers
    elif gpus and args.trainers > gpus:
        parser.error(f"argument --trainers: {args.trainers} is more than the number of visible GPUs, {gpus}")
    if args.trainers < 1:
        parser.error(f"argument --servers: {args.servers} leaves no trainer of {dist.get_world_size()} processes")
    if args.global_batch_size is None:
        args.global_batch_size = math.ceil(16 / args.trainers) * args.trainers
    if args.global_batch_size % args.trainers:
        bounds = f"a multiple of {args.trainers}, the number of trainers"
        parser.error(f"argument --global-batch-size: {args.global_batch_size} is not {bounds}")
    return args


def name_of(rank, servers):
    """Servers have the first ranks."""
    return f"server{rank}" if rank < servers else f"trainer{rank - servers}"


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    global table_server
    rank = dist.get_rank()
    if rank < args.servers:
        n_rows = len(range(rank, args.rows, args.servers))  # rows rank, rank + S, rank + 2·S, ...
        table_server = TableServer(n_rows, args)  # before it joins, because then the first call may come
    rpc_remote.join(name_of(rank, args.servers), args.timeout)
    kind = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    backend = torch_dist.get_default_backend_for_device(kind)
    trainers_group = torch_dist.new_group(range(args.servers, world_size), backend=backend)  # a collective of all ranks
    text, _ = gpt.load_text()  # a collective of all ranks, too
    if rank == 0:
        for other in range(1, world_size):
            rpc_remote.watch(name_of(other, args.servers))
    if rank >= args.servers:
        try:
            train(text, rank - args.servers, trainers_group, args)
        except RuntimeError as error:
            if "gloo/transport" not in str(error):  # NCCL's errors stay as they are
                raise
            reason = str(error).partition("\n")[0]
            raise rpc_remote.failure(f"{name_of(rank, args.servers)}: another trainer is lost: {reason}") from None
    if rank == 0:
        rpc_remote.end()
    else:
        rpc_remote.leave("server0")


if __name__ == "__main__":
    cli_args = parse_args()
    try:
        dist.launch(main_worker, cli_args, nprocs=cli_args.servers + cli_args.trainers)
    except ProcessExitedException as error:
        sys.exit(f"{name_of(error.error_index, cli_args.servers)} is lost: {error}")
