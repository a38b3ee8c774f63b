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
ring reduces a bucket as soon as its last gradient is there, while backward computes the gradients of earlier layers:

    backward      | block 3 | block 2 | block 1 | block 0 |
    ring                    | bucket 0 | bucket 1 | bucket 2 | bucket 3 |    step
                                                            '-- wait ---'

Each hop must wait for the hop before. On the CPU a thread does this waiting. On a GPU the hops are enqueued on a second
stream, and the host does not wait. PyTorch's DDP does the same in C++ (arXiv:2006.15704): its reducer starts one
asynchronous all-reduce per bucket. NCCL runs it on a stream of its own, and gloo in threads of its own. The default
size of DDP's buckets is 25 MB. Here it is 0.5 MB, because all gradients of this small model take 1.9 MB.

Read this script to learn what DDP does. To train, choose min_DDP.py: DDP needs no wait() in the loop, and it also keeps
buffers equal, such as BatchNorm's. `--library` trains with PyTorch's DDP, to compare. `--compress bf16` sends gradients
as bfloat16, and rounds a chunk in each of N-1 hops, so the error grows with N. With `--library`, `--compress powersgd`
sends them as low-rank matrices (arXiv:1905.13727).

Cost per process, for P float32 parameters on N processes: 16·P bytes (parameters 4, buckets of gradients 4, AdamW 8),
and during backward the gradients of a bucket that is not complete yet. With `--accumulate` these are all gradients,
4·P bytes more. Each step sends 2·(N-1)/N · 4·P bytes, and half as many with `--compress bf16`.

    python min_AllReduce.py --nproc 2                                  # two processes; without --nproc, all GPUs
    python min_AllReduce.py --nproc 2 --bucket-mb 0                    # each parameter is a bucket of its own
    python min_AllReduce.py --nproc 2 --library --compress powersgd    # PyTorch's DDP with compressed gradients

The last line of the first command is `sent per step: 1,914,880 bytes, 1.000 of the gradients | buckets: 4 |
communication: 24.8 ms, 51 % of it in backward`. If a process waits in a hop for a slower one, this counts as
communication.
"""

import collections
import contextlib
import functools
import queue
import threading
import time
import weakref

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import distributed as dist
import gpt
import options


def parse_args():
    parser = options.ArgumentParser(__doc__)
    gpt.add_model_options(parser)
    parser.add_argument(
        "--bucket-mb", type=options.number(0), default=0.5, help="megabytes of gradients that are reduced together"
    )
    parser.add_argument("--accumulate", type=options.whole_number(1), default=1, help="micro-batches per step")
    parser.add_argument(
        "--compress",
        type=options.one_of("none", "bf16", "powersgd"),
        default="none",
        help="send gradients as bfloat16, or as low-rank matrices (with --library): none, bf16 or powersgd",
    )
    parser.add_argument("--library", action="store_true", help="train with PyTorch's DDP instead, to compare")
    args = parser.parse_args()
    if args.compress == "powersgd" and not args.library:
        parser.error("argument --compress: powersgd is a hook of PyTorch's DDP, add --library")
    if args.library and args.nproc == 1:
        parser.error("argument --library: one process sends nothing, use at least 2 (--nproc 2)")
    shares = args.nproc * args.accumulate
    gpt.check_model_options(parser, args, batch=(shares, "the number of processes times --accumulate"))
    return args


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

    A bucket is full when it has `bucket_bytes`. Gradients are sent as `dtype`, by default as they are. With
    `find_unused` a parameter may be unused. If some processes have used it, the others count as zeros. If none has, it
    keeps no gradient. Without `find_unused`, `wait` raises DistributedError for it; then the job ends on all processes.
    """

    def __init__(self, module, bucket_bytes, dtype=None, find_unused=False):
        super().__init__()
        self.module = module
        self.dtype = dtype
        self.find_unused = find_unused
        self.sync = True
        dist.sync_params([*module.parameters(), *module.buffers()])  # start from rank 0's weights
        self.names = {param: name for name, param in module.named_parameters() if param.requires_grad}
        self.buckets = make_buckets(reversed(self.names), bucket_bytes)
        for bucket in self.buckets:
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(functools.partial(self.on_gradient, bucket))
        self.n_started = 0
        device = next(module.parameters()).device
        if device.type == "cuda":
            self.background = BackgroundStream(device)
        else:
            self.background = BackgroundThread()
        self.n_bytes = 0  # sent by this process so far

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self):
        """Backward passes inside it only accumulate gradients. The next one outside it reduces the sum."""
        self.sync = False
        try:
            yield
        finally:
            self.sync = True

    def on_gradient(self, bucket, param):
        """Called by backward when the gradient of `param` is complete, once even if `param` is used in two places."""
        if param not in bucket.missing:  # its bucket may be on its way
            raise dist.DistributedError(f"a second gradient of {self.names[param]} before wait(): see no_sync()")
        if not self.sync:
            return
        bucket.missing.remove(param)
        # Buckets start in one order, the same on all processes, even if gradients arrive in another.
        while self.n_started < len(self.buckets) and not self.buckets[self.n_started].missing:
            self.start_next()

    def start_next(self):
        bucket = self.buckets[self.n_started]
        bucket.collect()
        self.background.start(functools.partial(self.average, bucket))
        self.n_started += 1

    def average(self, bucket):
        """Runs in the background. With `dtype` every hop rounds its sums, and all processes receive the same ones."""
        bucket.flat /= dist.get_world_size()
        sent = bucket.flat.to(self.dtype or bucket.flat.dtype)
        self.n_bytes += ring_all_reduce(sent)
        bucket.flat.copy_(sent)

    @torch.no_grad()
    def wait(self):
        """Wait until all gradients are averages over all processes."""
        for name, param in self.module.named_parameters():
            if param.requires_grad and param not in self.names:
                raise dist.DistributedError(f"{name} was frozen when RingDDP was made: unfreeze it before")
        without_gradient = {param for param in self.names if param.grad is None}
        if without_gradient and not self.find_unused:
            names = ", ".join(self.names[param] for param in self.names if param in without_gradient)
            raise dist.DistributedError(f"no gradient of {names}: freeze it before RingDDP, or pass find_unused=True")
        while self.n_started < len(self.buckets):  # the hook has not seen all gradients of the bucket
            self.start_next()
        self.background.wait()
        self.n_started = 0
        for bucket in self.buckets:
            bucket.missing = set(bucket.params)
        if self.find_unused:
            self.share_unused(without_gradient)

    def share_unused(self, without_gradient):
        """If another process has used a parameter, it takes the average here too. If none has, it keeps no gradient."""
        used_here = [param not in without_gradient for param in self.names]
        used = dist.all_reduce(torch.tensor(used_here, dtype=torch.int, device=dist.get_device()), "max")
        if without_gradient:  # only then must the host wait for the answer
            used_anywhere = dict(zip(self.names, used.tolist(), strict=True))
            for bucket in self.buckets:
                for param, view in zip(bucket.params, bucket.views, strict=True):
                    if param in without_gradient and used_anywhere[param]:
                        param.grad = view


class Bucket:
    """Parameters whose gradients are sent together. `flat`, (elements,), has a view for each of them."""

    def __init__(self, params):
        self.params = params
        self.missing = set(params)  # whose gradients of this step have not arrived yet
        sizes = [param.numel() for param in params]
        self.flat = torch.zeros(sum(sizes), dtype=params[0].dtype, device=params[0].device)
        pieces = self.flat.split(sizes)
        self.views = [piece.view_as(param) for piece, param in zip(pieces, params, strict=True)]

    @torch.no_grad()
    def collect(self):
        """Copy the gradients into `flat`. From then on they are views of it, so the average needs no copy back."""
        for param, view in zip(self.params, self.views, strict=True):
            if param.grad is None:
                view.zero_()
            elif param.grad is not view:
                view.copy_(param.grad)
                param.grad = view


def make_buckets(params, bucket_bytes):
    """A bucket ends when it has `bucket_bytes`, or when the type of the parameters changes."""
    buckets = []
    group = []
    for param in params:
        is_full = sum(other.nbytes for other in group) >= bucket_bytes
        if group and (is_full or param.dtype != group[0].dtype):
            buckets.append(Bucket(group))
            group = []
        group.append(param)
    if group:
        buckets.append(Bucket(group))
    return buckets


# ---- communication while backward computes ------------------------------------------------------------------------


class BackgroundThread:
    """Runs functions in a thread, one after the other, while the caller continues."""

    def __init__(self):
        self.jobs = queue.SimpleQueue()
        self.results = queue.SimpleQueue()
        self.n_started = 0  # since the last `wait`
        self.n_steps = 0
        self.busy = 0.0  # seconds in which a function ran, over all steps
        self.waited = 0.0  # seconds in which the caller waited
        # A daemon: a process whose backward fails must not wait for a hop that the others never make.
        threading.Thread(target=run_jobs, args=(self.jobs, self.results), daemon=True).start()
        weakref.finalize(self, self.jobs.put, None)  # the thread ends with this object

    def start(self, function):
        self.jobs.put(function)
        self.n_started += 1

    def wait(self):
        """Wait until all functions that were started have ended. Raises the error of one that failed."""
        begin = time.perf_counter()
        while self.n_started:
            seconds, error = self.results.get()
            self.n_started -= 1
            if error is not None:
                raise error
            self.busy += seconds
        self.waited += time.perf_counter() - begin
        self.n_steps += 1

    def seconds_per_step(self):
        """Seconds of the functions, and seconds in which the caller waited for them."""
        return self.busy / self.n_steps, self.waited / self.n_steps


def run_jobs(jobs, results):
    """Call the functions in the queue `jobs` until it holds None. Puts (seconds, error) of each into `results`."""
    while True:
        function = jobs.get()
        if function is None:
            return
        error = None
        begin = time.perf_counter()
        try:
            function()
        except BaseException as failure:
            error = failure  # `wait` raises it
        results.put((time.perf_counter() - begin, error))
        del function, error  # or they would keep the model alive


class BackgroundStream:
    """The same on a GPU, on a second stream. `wait` lets the current stream wait for it, and not the host."""

    def __init__(self, device):
        self.stream = torch.cuda.Stream(device)
        self.functions = []  # pairs of events, the begin and the end of each function since the last `wait`
        self.steps = collections.deque(maxlen=50)  # for each of the last steps: its functions, and its `wait`

    def start(self, function):
        self.stream.wait_stream(torch.cuda.current_stream())  # which computes the gradients
        with torch.cuda.stream(self.stream):
            begin = recorded_event()
            function()
            self.functions.append((begin, recorded_event()))

    def wait(self):
        begin = recorded_event()
        torch.cuda.current_stream().wait_stream(self.stream)
        self.steps.append((self.functions, (begin, recorded_event())))
        self.functions = []

    def seconds_per_step(self):
        torch.cuda.synchronize()
        busy = 0.0
        waited = 0.0
        for functions, (begin, end) in self.steps:
            waited += begin.elapsed_time(end) / 1000
            for function_begin, function_end in functions:
                busy += function_begin.elapsed_time(function_end) / 1000
        return busy / len(self.steps), waited / len(self.steps)


def recorded_event():
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


# ---- training -----------------------------------------------------------------------------------------------------


def parallelize(model, args):
    """The model in RingDDP, or with --library in PyTorch's DDP, which takes compression as a hook."""
    bucket_bytes = args.bucket_mb * 1e6
    if not args.library:
        dtype = torch.bfloat16 if args.compress == "bf16" else None
        return RingDDP(model, bucket_bytes, dtype)
    if args.compress == "powersgd" and dist.get_device().type == "cpu":
        # PowerSGD's all-reduces follow each other in callbacks. With several buckets gloo may run these in another
        # order on each process, and aborts. So all gradients are one bucket.
        bucket_bytes = sum(param.nbytes for param in model.parameters())
    ddp = dist.prepare_ddp_model(model, bucket_cap_mb=bucket_bytes / 2**20)
    if args.compress == "bf16":
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif args.compress == "powersgd":
        # The first steps, in which gradients change most, are not compressed.
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return ddp


def local_loss(model, x, y):
    """The loss on this process's share. Shares are equal, so the mean over processes is the loss of the batch."""
    return gpt.loss_fn(model(x), y)


def train_step(model, optimizer, x, y, args):
    """Returns the loss on this process's sequences."""
    optimizer.zero_grad()
    losses = []
    micro_batches = zip(x.chunk(args.accumulate), y.chunk(args.accumulate), strict=True)
    for number, (micro_x, micro_y) in enumerate(micro_batches, 1):
        sync = contextlib.nullcontext()
        if number < args.accumulate:
            sync = model.no_sync()  # only the last micro-batch's backward reduces the accumulated gradients
        with sync:
            loss = local_loss(model, micro_x, micro_y) / args.accumulate
            loss.backward()
        losses.append(loss.detach())
    if not args.library:
        model.wait()  # PyTorch's DDP waits at the end of backward
    if args.clip:
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    return torch.stack(losses).sum()


def train(model, optimizer, text, held_out, args):
    """Returns the loss of every step over all processes, (steps,)."""
    share = (dist.get_rank(), dist.get_world_size())
    progress = gpt.Progress(functools.partial(local_loss, model), text, held_out, args, share=share)
    for step in range(args.steps):
        x, y = gpt.batch(text, step, args.global_batch_size, args.length, args.seed, dist.get_device(), share)
        loss = train_step(model, optimizer, x, y, args)
        progress(loss)
    return progress.losses


def report_communication(model, args):
    """Print what a process sends in a step, and which share of the time for it is hidden: it passes during backward."""
    gradients = sum(param.nbytes for param in model.names)
    busy, waited = model.background.seconds_per_step()
    numbers = torch.tensor([model.n_bytes / args.steps, busy, waited], dtype=torch.float64, device=dist.get_device())
    sent, busy, waited = dist.reduce(numbers).tolist()
    hidden = max(0, 1 - waited / busy) if busy else 0
    dist.print_primary(
        f"sent per step: {sent:,.0f} bytes, {sent / gradients:.3f} of the gradients | buckets: {len(model.buckets)} | "
        f"communication: {1000 * busy:.1f} ms, {100 * hidden:.0f} % of it in backward"
    )


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs: far faster matrix products, with 10 bits of mantissa
    text, held_out = gpt.load_text()
    torch.manual_seed(args.seed)
    model = gpt.GPT(args.layers, args.width, args.heads, args.length).to(dist.get_device())
    model = parallelize(model, args)
    torch.manual_seed(args.seed + dist.get_rank())  # this model has no dropout; in yours, each process draws its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, text, held_out, args)
    if not args.library:
        report_communication(model, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
