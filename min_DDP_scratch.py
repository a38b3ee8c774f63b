"""Average the gradients by hand: DistributedDataParallel (DDP) from scratch, over sends and receives.

Every process holds the whole model and computes the gradients of its share of the batch. Then all processes need the
average g = (1/N) · sum_r g_r. A ring all-reduce computes it. Each process cuts its gradients into N chunks. It sends
only to the next process, and receives only from the previous one. With N = 4, the letters below say whose gradients a
chunk contains, and > marks the chunk that is sent in the next hop:

                 before hop 1            before hop 2            before hop 3            after hop 3
    process a   >a    a    a    a        a    a    a   >da       a    a   >cda  da       a   [bcda] cda  da
    process b    b   >b    b    b       >ab   b    b    b        ab   b    b   >dab      ab   b   [cdab] dab
    process c    c    c   >c    c        c   >bc   c    c       >abc  bc   c    c        abc  bc   c   [dabc]
    process d    d    d    d   >d        d    d   >cd   d        d   >bcd  cd   d       [abcd] bcd  cd   d

These N-1 hops are a reduce-scatter: each process has one complete chunk, in brackets. In N-1 more hops, an all-gather,
the complete chunks go around the ring.

Backward computes the gradients of the last layers first. So parameters are put into buckets in reverse order, and the
ring reduces a bucket as soon as its gradients are there, while backward computes the gradients of earlier layers:

    backward      | block 3 | block 2 | block 1 | block 0 |
    ring                    | bucket 0 | bucket 1 | bucket 2 | bucket 3 |  step

Read this script to learn what DDP does (arXiv:2006.15704). To train, choose min_DDP.py: DDP needs no `wait` in the
loop, and sends rank 0's buffers. Here each parameter needs a gradient in each step, and all have one dtype.

Cost per process, for P float32 parameters on N processes: 16·P bytes (parameters 4, gradients 4, AdamW 8), and a bucket
more while its gradients are copied. Each step sends 2·(N-1)/N · 4·P bytes, so less than twice the gradients for any N.

    python min_DDP_scratch.py --nproc 2                    # two processes; without --nproc, all GPUs
    python min_DDP_scratch.py --nproc 2 --bucket-mb 0      # each parameter is a bucket of its own
    torchrun --standalone --nproc-per-node 2 min_DDP_scratch.py
"""

from concurrent import futures

import torch
import torch.distributed as torch_dist
from torch import nn

import distributed as dist
import gpt
import options

# ---- the ring -----------------------------------------------------------------------------------------------------


def ring_all_reduce(vector):
    """Sum `vector`, (elements,), over all processes, in place.

    Chunks differ by at most one element if N does not divide the vector.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = vector.tensor_split(world_size)
    for hop in range(2 * (world_size - 1)):
        to_send = chunks[(rank - hop) % world_size]
        own = chunks[(rank - hop - 1) % world_size]
        received = torch.empty_like(own)
        send_and_receive(to_send, received)
        if hop < world_size - 1:  # reduce-scatter: one more process is in the sum
            own += received
        else:  # all-gather: the received chunk is complete
            own.copy_(received)


def send_and_receive(to_send, received):
    """One hop: send to the next process while receiving from the previous one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    send = torch_dist.P2POp(torch_dist.isend, to_send, (rank + 1) % world_size)
    receive = torch_dist.P2POp(torch_dist.irecv, received, (rank - 1) % world_size)
    for transfer in torch_dist.batch_isend_irecv([send, receive]):
        transfer.wait()


# ---- buckets, and when they are reduced ---------------------------------------------------------------------------


class Reducer:
    """Averages the gradients of `model` over all processes during backward. Call `wait` before the optimizer's step.

    A bucket is full when it has `bucket_bytes`. DDP's have 25 MB. Freeze what is not used before you make the reducer.
    While `sync` is False, backward only accumulates gradients, as in DDP's `no_sync`. The first backward with `sync`
    True reduces their sum. If a backward fails, the job must end.
    """

    def __init__(self, model, bucket_bytes):
        self.sync = True
        dist.sync_params([*model.parameters(), *model.buffers()])  # start from rank 0's weights
        in_backward = reversed(list(model.named_parameters()))
        self.names = {param: name for name, param in in_backward if param.requires_grad}
        self.buckets = make_buckets(self.names, bucket_bytes)
        for param in self.names:
            param.register_post_accumulate_grad_hook(self.on_gradient)
        self.background = BackgroundStream() if dist.get_device().type != "cpu" else BackgroundThread()
        self.begin_step()

    def begin_step(self):
        self.missing = dict(self.names)  # parameters whose gradients have not arrived yet
        self.to_start = list(self.buckets)

    def on_gradient(self, param):
        """Called by backward when the gradient of `param` is complete, once even if `param` is used in two places."""
        if param not in self.missing:  # its bucket may be on its way
            raise dist.DistributedError(f"a second gradient of {self.names[param]} before wait(): see `sync`")
        if not self.sync:
            return
        del self.missing[param]
        # Buckets start in one order, the same on all processes, even if gradients arrive in another.
        while self.to_start and self.missing.keys().isdisjoint(self.to_start[0]):
            flat = flatten_gradients(self.to_start.pop(0))
            flat /= dist.get_world_size()
            self.background.start(ring_all_reduce, flat)

    def wait(self):
        """Wait until all gradients are averages over all processes. Raises DistributedError if one is missing."""
        if self.missing:
            raise dist.DistributedError(f"backward has failed, or has not used {', '.join(self.missing.values())}")
        self.background.wait()
        self.begin_step()


def make_buckets(params, bucket_bytes):
    """Lists of parameters whose gradients are sent together."""
    buckets = [[]]
    for param in params:
        if buckets[-1] and sum(other.nbytes for other in buckets[-1]) >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(param)
    return buckets


def flatten_gradients(params):
    """One vector of all gradients, (elements,). They become views of it, so the average needs no copy back."""
    flat = torch.cat([param.grad.flatten() for param in params])
    pieces = flat.split([param.numel() for param in params])
    for param, piece in zip(params, pieces, strict=True):
        param.grad = piece.view_as(param)
    return flat


# ---- communication while backward computes ------------------------------------------------------------------------


class BackgroundThread:
    """Calls functions in a thread, one after the other, while the caller continues: a hop waits for the hop before it.

    Python waits for the thread at its end. If backward has failed, the thread may wait for a hop that the others never
    make. Under `launch` and torchrun such a process ends at once. If you start processes otherwise, end by os._exit.
    """

    def __init__(self):
        self.executor = futures.ThreadPoolExecutor(max_workers=1)
        self.calls = []

    def start(self, function, *args):
        self.calls.append(self.executor.submit(function, *args))

    def wait(self):
        """Wait until all functions that were started have ended. Raises the error of one that failed."""
        for call in self.calls:
            call.result()
        self.calls = []


class BackgroundStream:
    """The same on a GPU, on a second stream. `wait` makes the current stream wait, and the host continues."""

    def __init__(self):
        self.stream = torch.Stream(dist.get_device())

    def start(self, function, *args):
        self.stream.wait_stream(torch.accelerator.current_stream())  # the current stream computes the gradients
        with self.stream:
            function(*args)

    def wait(self):
        torch.accelerator.current_stream().wait_stream(self.stream)


# ---- training -----------------------------------------------------------------------------------------------------


def train(model, optimizer, reducer, data, args):
    """Returns the loss of every step over all processes, (steps,)."""
    progress = gpt.Progress(model, data, args)
    for step in range(args.steps):
        x, y = data.batch(step)
        optimizer.zero_grad()
        loss = backward(model, reducer, x, y, args.accumulate)
        reducer.wait()
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        progress(step, loss)
    return progress.losses


def backward(model, reducer, x, y, n_parts):
    """The gradients of `n_parts` equal micro-batches, and their mean loss."""
    total = 0
    parts = (n_parts, -1)  # torch raises an error if the rows do not divide evenly
    for number, (micro_x, micro_y) in enumerate(zip(x.unflatten(0, parts), y.unflatten(0, parts), strict=True), 1):
        reducer.sync = number == n_parts  # the last backward reduces the accumulated gradients
        loss = gpt.loss_fn(model(micro_x), micro_y) / n_parts
        loss.backward()
        total += loss.detach()
    return total


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = gpt.make_parser(__doc__)
    parser.add_argument("--bucket-mb", type=options.number(0), default=0.5, help="megabytes of gradients in a bucket")
    parser.add_argument("--accumulate", type=options.whole_number(1), default=1, help="micro-batches per step")
    args = parser.parse_args()
    gpt.check_model_options(parser, args, batch=(args.nproc * args.accumulate, "the processes times --accumulate"))
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    gpt.start(args)
    data = gpt.Data(args)  # this process's share of each global batch
    model = gpt.GPT(gpt.Config.from_args(args), args.seed).to(dist.get_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, Reducer(model, args.bucket_mb * 1e6), data, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
