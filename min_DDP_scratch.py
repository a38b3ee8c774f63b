"""Average the gradients by hand: DistributedDataParallel (DDP) from scratch, over sends and receives.

Every process holds the whole model and computes the gradients of its share of the batch. Then all processes need the
average g = (1/N) · sum_r g_r. A ring all-reduce computes it. Each process cuts its gradients into N chunks. It sends
only to the next process, and receives only from the previous one. With N = 4, the letters below say whose gradients a
chunk contains, and > marks the chunk that is sent in the next hop:

    1. reduce-scatter, N-1 hops. A process adds the chunk that it receives to its own, and sends the sum on.

                 before hop 1            before hop 2            before hop 3            after hop 3
    process a   >a    a    a    a        a    a    a   >da       a    a   >cda  da       a   [bcda] cda  da
    process b    b   >b    b    b       >ab   b    b    b        ab   b    b   >dab      ab   b   [cdab] dab
    process c    c    c   >c    c        c   >bc   c    c       >abc  bc   c    c        abc  bc   c   [dabc]
    process d    d    d    d   >d        d    d   >cd   d        d   >bcd  cd   d       [abcd] bcd  cd   d

    2. all-gather, N-1 hops. Each process has one complete chunk, in brackets. These chunks are passed on around the
       ring until every process has all of them.

In each phase a process sends N-1 of its N chunks. So in both it sends 2·(N-1)/N times the bytes of the gradients. That
is less than twice as many, for any N.

Backward computes the gradients of the last layers first. So the parameters are put into buckets in reverse order. The
ring reduces a bucket as soon as all of its gradients are there, and the buckets before it have started, while backward
computes the gradients of earlier layers:

    backward      | block 3 | block 2 | block 1 | block 0 |
    ring                    | bucket 0 | bucket 1 | bucket 2 | bucket 3 |    step
                                                            '-- wait ---'

Each hop must wait for the hop before. On the CPU a thread does this waiting. On a GPU the hops are enqueued on a second
stream, and the host does not wait. PyTorch's DDP does the same in C++ (arXiv:2006.15704): its reducer starts one
asynchronous all-reduce per bucket. NCCL runs it on a stream of its own, and gloo in threads of its own. The default
size of DDP's buckets is 25 MB. Here it is 0.5 MB, because all gradients of this small model take 1.9 MB.

Read this script to learn what DDP does. To train, choose min_DDP.py: DDP needs no wait() in the loop, and it also keeps
buffers equal, such as BatchNorm's. Here every parameter needs a gradient in each step, and all have one type.
`--compress bf16` sends gradients as bfloat16. It rounds them once, and each sum in N-1 hops, so the error grows with N.

Cost per process, for P float32 parameters on N processes: 16·P bytes (parameters 4, gradients 4, AdamW 8), and a bucket
more while its gradients are copied. Each step sends 2·(N-1)/N · 4·P bytes, and half as many with `--compress bf16`.

    python min_DDP_scratch.py --nproc 2                    # two processes; without --nproc, all GPUs
    python min_DDP_scratch.py --nproc 2 --bucket-mb 0      # each parameter is a bucket of its own
    torchrun --standalone --nproc-per-node 2 min_DDP_scratch.py

The last line of the first command is `sent per step: 1,914,880 bytes, 1.000 of the gradients | buckets: 4 |
communication: 24.8 ms, 51 % of it in backward`. If a process waits in a hop for a slower one, this counts as
communication. On a GPU the line ends after the number of buckets.
"""

import functools
import time
from concurrent import futures

import torch
import torch.distributed as torch_dist
from torch import nn

import distributed as dist
import gpt
import options

# ---- the ring -----------------------------------------------------------------------------------------------------


def ring_all_reduce(vector):
    """Sum `vector`, (elements,), over all processes, in place. Returns the bytes that this process has sent.

    Chunks differ by at most one element if N does not divide the vector.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = vector.tensor_split(world_size)
    n_bytes = 0
    for hop in range(world_size - 1):  # reduce-scatter
        to_send = chunks[(rank - hop) % world_size]
        own = chunks[(rank - hop - 1) % world_size]
        received = torch.empty_like(own)
        n_bytes += send_and_receive(to_send, received)
        own += received
    for hop in range(world_size - 1):  # all-gather
        to_send = chunks[(rank + 1 - hop) % world_size]
        to_replace = chunks[(rank - hop) % world_size]
        n_bytes += send_and_receive(to_send, to_replace)
    return n_bytes


def send_and_receive(to_send, received):
    """One hop: send to the next process while receiving from the previous one. Returns the bytes sent."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    send = torch_dist.P2POp(torch_dist.isend, to_send, (rank + 1) % world_size)
    receive = torch_dist.P2POp(torch_dist.irecv, received, (rank - 1) % world_size)
    for transfer in torch_dist.batch_isend_irecv([send, receive]):
        transfer.wait()
    return to_send.nbytes


# ---- buckets, and when they are reduced ---------------------------------------------------------------------------


class RingDDP(nn.Module):
    """`module`, whose gradients are averaged over all processes during backward. Call `wait` before the step.

    A bucket is full when it has `bucket_bytes`. Gradients are sent as `dtype`, by default as they are. A parameter that
    is frozen when RingDDP is made must stay frozen. While `sync` is False, backward only accumulates gradients. The
    first backward with `sync` True reduces their sum.
    """

    def __init__(self, module, bucket_bytes, dtype=None):
        super().__init__()
        self.module = module
        self.dtype = dtype
        self.sync = True
        dist.sync_params([*module.parameters(), *module.buffers()])  # start from rank 0's weights
        self.names = {param: name for name, param in module.named_parameters() if param.requires_grad}
        self.buckets = make_buckets(reversed(self.names), bucket_bytes)
        for param in self.names:
            param.register_post_accumulate_grad_hook(self.on_gradient)
        self.begin_step()
        self.background = BackgroundStream() if dist.get_device().type != "cpu" else BackgroundThread()
        self.n_bytes = 0  # sent by this process so far
        self.busy = 0.0  # seconds in which the ring ran
        self.waited = 0.0  # seconds in which `wait` waited for it

    def begin_step(self):
        self.missing = set(self.names)  # parameters whose gradients have not arrived yet
        self.to_start = list(self.buckets)

    def on_gradient(self, param):
        """Called by backward when the gradient of `param` is complete, once even if `param` is used in two places."""
        if param not in self.missing:  # its bucket may be on its way
            raise dist.DistributedError(self.why_twice(param))
        if not self.sync:
            return
        self.missing.remove(param)
        # Buckets start in one order, the same on all processes, even if gradients arrive in another.
        while self.to_start and not self.missing.intersection(self.to_start[0]):
            flat = flatten_gradients(self.to_start.pop(0))
            self.background.start(functools.partial(self.average, flat))

    def average(self, flat):
        """Runs in the background. With `dtype` every hop rounds its sums, and all processes receive the same ones."""
        begin = time.perf_counter()
        flat /= dist.get_world_size()
        if self.dtype:
            sent = flat.to(self.dtype)
            self.n_bytes += ring_all_reduce(sent)
            flat.copy_(sent)
        else:
            self.n_bytes += ring_all_reduce(flat)
        self.busy += time.perf_counter() - begin

    def wait(self):
        """Wait until all gradients are averages over all processes. Raises DistributedError if one is missing."""
        missing = [name for param, name in reversed(self.names.items()) if param in self.missing]
        if missing:
            line = f"backward has failed, or has not used {', '.join(missing)}"
            raise dist.DistributedError(f"{line}: freeze what is not used before you make RingDDP")
        begin = time.perf_counter()
        self.background.wait()
        self.waited += time.perf_counter() - begin
        self.begin_step()

    def why_twice(self, param):
        line = f"a second gradient of {self.names[param]} before wait()"
        if self.to_start:
            return f"{line}: the backward before it has failed or has not reached all parameters, so this job must end"
        return f"{line}: to accumulate, set sync = False"

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


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
    """Calls functions in a thread, one after the other, while the caller continues.

    Python waits for the thread at its end. If backward has failed, the thread may wait for a hop that the others never
    make. Under `launch` and torchrun such a process ends at once. If you start processes otherwise, end by os._exit.
    """

    def __init__(self):
        self.executor = futures.ThreadPoolExecutor(max_workers=1)
        self.calls = []

    def start(self, function):
        self.calls.append(self.executor.submit(function))

    def wait(self):
        """Wait until all functions that were started have ended. Raises the error of one that failed."""
        for call in self.calls:
            call.result()
        self.calls = []


class BackgroundStream:
    """The same on a GPU, on a second stream. `wait` lets the current stream wait for it, and not the host."""

    def __init__(self):
        self.stream = torch.Stream(dist.get_device())

    def start(self, function):
        self.stream.wait_stream(torch.accelerator.current_stream())  # which computes the gradients
        with self.stream:
            function()

    def wait(self):
        torch.accelerator.current_stream().wait_stream(self.stream)


# ---- training -----------------------------------------------------------------------------------------------------


def parallelize(model, args):
    dtype = torch.bfloat16 if args.compress == "bf16" else None
    return RingDDP(model, args.bucket_mb * 1e6, dtype)


def train_step(model, optimizer, x, y, args):
    """Returns the loss on this process's sequences."""
    optimizer.zero_grad()
    losses = []
    equal_parts = (args.accumulate, -1)  # torch raises an error if the rows do not divide evenly
    micro_batches = zip(x.unflatten(0, equal_parts), y.unflatten(0, equal_parts), strict=True)
    for number, (micro_x, micro_y) in enumerate(micro_batches, 1):
        model.sync = number == args.accumulate  # only the last micro-batch's backward reduces the accumulated gradients
        loss = gpt.loss_fn(model(micro_x), micro_y) / args.accumulate
        loss.backward()
        losses.append(loss.detach())
    model.wait()
    if args.clip:
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    return torch.stack(losses).sum()


def train(model, optimizer, data, args):
    """Returns the loss of every step over all processes, (steps,)."""
    progress = gpt.Progress(model, data, args)
    for step in range(args.steps):
        x, y = data.batch(step)
        loss = train_step(model, optimizer, x, y, args)
        progress(step, loss)
    return progress.losses


def report_communication(model, n_steps):
    """Print what a process sends in a step, and which share of the time for it passes during backward."""
    gradients = sum(param.nbytes for param in model.names)
    sent = dist.reduce(torch.tensor(model.n_bytes / n_steps, dtype=torch.float64, device=dist.get_device())).item()
    line = f"sent per step: {sent:,.0f} bytes, {sent / gradients:.3f} of the gradients | buckets: {len(model.buckets)}"
    if dist.get_device().type == "cpu":
        busy, waited = dist.reduce(torch.tensor([model.busy, model.waited])).tolist()
        hidden = max(0, 1 - waited / busy)
        line += f" | communication: {1000 * busy / n_steps:.1f} ms, {100 * hidden:.0f} % of it in backward"
    dist.print_primary(line)


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = options.ArgumentParser(__doc__)
    gpt.add_model_options(parser)
    bucket_help = "megabytes of gradients that are reduced together"
    parser.add_argument("--bucket-mb", type=options.number(0), default=0.5, help=bucket_help)
    parser.add_argument("--accumulate", type=options.whole_number(1), default=1, help="micro-batches per step")
    parser.add_argument("--compress", choices=("none", "bf16"), default="none", help="send gradients as bfloat16")
    args = parser.parse_args()
    shares = args.nproc * args.accumulate
    gpt.check_model_options(parser, args, batch=(shares, "the number of processes times --accumulate"))
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    gpt.start(args)
    data = gpt.Data(args)  # this process's share of each global batch
    model = gpt.GPT(gpt.Config.from_args(args), args.seed).to(dist.get_device())
    model = parallelize(model, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, data, args)
    report_communication(model, args.steps)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
