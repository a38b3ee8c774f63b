"""Split the model by layers: pipeline parallelism (PP), with the schedules of torch.distributed.pipelining.

Every process holds some consecutive blocks, a stage. The batch is cut into M micro-batches, so that all stages have
work: activations go on to the next stage, their gradients come back, and the mean of the micro-batches' gradients is
the batch's. Little is sent, and only to neighbours: choose it for a model that one device cannot hold, over slow
connections, as between machines. Over fast ones, min_FSDP.py has no bubble and nothing to balance.

Cost per process, for P float32 parameters on N processes: 16·P/N bytes of parameters, gradients and AdamW state (more
on the first and the last, for embeddings and head). With A = 4 · batch size · length · width, the bytes that leave one
block, a step sends 2·A·(N-1) bytes, over all processes, and each waits for (N-1)/(M+N-1) of it, the bubble:
    GPipe                  all forwards, then all backwards: keeps the activations of M micro-batches
    1F1B                   each backward as soon as it can be: the same bubble, but keeps those of N at most
    Interleaved1F1B        two stages in each process, N apart: bubble (N-1)/(2·M+N-1), sends 2·A·(2·N-1)
    InterleavedZeroBubble  the same, and gradients of weights, for which nobody waits, fill the rest of the bubble
    ZBVZeroBubble          the same, but there and back (process 0 has the first and the last stage): sends 4·A·(N-1)
    DualPipeV              the same, and a forward beside a backward, for stages that themselves wait for others
`--data-parallel D` makes D pipelines of N/D processes, each with its part of the batch. Three lines of `train` average
their gradients; all processes together send 2·(D-1)·4·P bytes more, and not while backward runs, as DDP would.

    python min_PP.py                                               # all visible GPUs, or two CPU processes
    CUDA_VISIBLE_DEVICES=0,1 python min_PP.py --schedule GPipe     # GPUs 0 and 1
    python min_PP.py --nproc 1                                     # the plain model, one micro-batch after another
    python min_PP.py --nproc 4 --data-parallel 2                   # two pipelines of two processes
    torchrun --standalone --nproc-per-node 2 min_PP.py --schedule ZBVZeroBubble

It prints how many parameters the fullest process holds, and every 50 steps loss, held-out loss, speed and memory:
`step 600 | loss 2.2643 | held-out 2.3043 nats per byte (bigram 2.4810, trigram 1.9042) | …`.
"""

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed import pipelining

import distributed as dist
import gpt
import options

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def stage_ranks(schedule, processes):
    """Which process of a pipeline has each stage."""
    ranks = list(range(processes))
    second = {"GPipe": [], "1F1B": [], "ZBVZeroBubble": ranks[::-1], "DualPipeV": ranks[::-1]}
    return ranks + second.get(schedule, ranks)


def parse_args():
    parser = options.ArgumentParser(__doc__)
    gpt.add_model_options(parser)
    parser.set_defaults(layers=max(4, parser.get_default("nproc")), steps=600)
    # Those that this torch has; 2.11 fails with gloo where two stages that follow each other share a process.
    missing = ("ZBVZeroBubble", "DualPipeV") if torch.__version__ < "2.12" else ()
    choices = [name for name in SCHEDULES if hasattr(pipelining, f"Schedule{name}") and name not in missing]
    parser.add_argument("--schedule", choices=choices, default="1F1B", help="order of forwards and backwards")
    parser.add_argument(
        "--micro-batches", type=options.whole_number(1), default=8, help="parts of each pipeline's batch"
    )
    parser.add_argument("--data-parallel", type=options.whole_number(1), default=1, help="pipelines beside each other")
    args = parser.parse_args()
    gpt.check_model_options(parser, args)
    schedule, micro, replicas = args.schedule, args.micro_batches, args.data_parallel
    processes, parts = args.nproc // replicas, micro * replicas
    stages = len(stage_ranks(schedule, processes))
    least = stages if schedule in ("1F1B", "DualPipeV") else 1
    group = processes if schedule.startswith("Interleaved") else 1
    for option, wrong, problem in (
        ("data-parallel", args.nproc % replicas, f"not a divisor of the number of processes, {args.nproc}"),
        ("layers", args.layers < stages, f"less than {stages}, the stages of --schedule {schedule}"),
        ("batch-size", args.global_batch_size % parts, f"not a multiple of {parts}, --micro-batches x --data-parallel"),
        ("micro-batches", micro < least, f"less than {stages}, the stages of --schedule {schedule}"),
        ("micro-batches", group and micro % group, f"not a multiple of {group}, the processes of a pipeline"),
    ):
        if wrong:
            parser.error(f"argument --{option}: {vars(args)[option.replace('-', '_')]} is {problem}")
    return args


class Stage(nn.Module):
    """Blocks `first` to `last` - 1 of a GPT, under their names in it, and the embeddings or the head beside them."""

    def __init__(self, model, first, last):
        super().__init__()
        self.token, self.position = (model.token, model.position) if first == 0 else (None, None)
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(first, last)})
        self.norm, self.head = (model.norm, model.head) if last == len(model.blocks) else (None, None)

    def forward(self, x):
        if self.token:
            x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.head else x


class Pipeline:
    """This process's stages of `model`, which run together with those of the other processes of its pipeline."""

    def __init__(self, model, args):
        if not dist.is_dist_avail_and_initialized():  # PipelineStage asks for a process group, in one process too
            torch_dist.init_process_group(store=torch_dist.HashStore(), rank=0, world_size=1)
        device, shape = dist.get_device(), (args.data_parallel, dist.get_world_size() // args.data_parallel)
        self.mesh = torch_dist.init_device_mesh(device.type, shape, mesh_dim_names=("replica", "stage"))
        self.rank, self.group, self.width = self.mesh.get_local_rank("stage"), self.mesh.get_group("stage"), args.width
        self.ranks = stage_ranks(args.schedule, shape[1])
        mine, n = [i for i, rank in enumerate(self.ranks) if rank == self.rank], len(self.ranks)
        self.stages = {i: Stage(model, i * args.layers // n, (i + 1) * args.layers // n).to(device) for i in mine}
        self.params = [param for stage in self.stages.values() for param in stage.parameters()]
        parts = [pipelining.PipelineStage(self.stages[i], i, n, device, group=self.group) for i in mine]
        # The micro-batches' gradients are summed; scale_grads, the default, divides them: right as the loss is a mean.
        schedule = getattr(pipelining, f"Schedule{args.schedule}")
        self.schedule = schedule(parts if len(parts) > 1 else parts[0], args.micro_batches, gpt.loss_fn)

    def loss(self, x, y, backward=False):
        """This process's loss, and gradients if `backward`: the mean over all is that of the global batch (x, y)."""
        replicas, processes = self.mesh.shape
        x, y = (part.chunk(replicas)[self.mesh.get_local_rank("replica")] for part in (x, y))
        losses = []
        if backward:
            self.schedule.step(*([x] if 0 in self.stages else []), target=y, losses=losses, return_outputs=False)
        else:  # one batch follows the other; the schedule's own `eval` fails where neighbours share a process (2.15)
            for i, stage in self.stages.items():
                if i > 0 and self.ranks[i - 1] != self.rank:
                    x = torch.empty(*x.shape[:2], self.width, device=x.device)
                    torch_dist.recv(x, group=self.group, group_src=self.ranks[i - 1])
                x = stage(x)
                if i + 1 < len(self.ranks) and self.ranks[i + 1] != self.rank:
                    torch_dist.send(x, group=self.group, group_dst=self.ranks[i + 1])
            losses += [gpt.loss_fn(x, y)] if stage.head else []
        # One process of each pipeline has losses, and stands for all of its processes.
        return torch.stack(losses).mean() * processes if losses else torch.zeros((), device=y.device)


def train(pipeline, optimizer, text, held_out, args):
    """Every step's loss, over all processes."""
    progress = gpt.Progress(pipeline.loss, text, held_out, args)
    for step in range(args.steps):
        x, y = gpt.batch(text, step, args.global_batch_size, args.length, args.seed, dist.get_device())
        optimizer.zero_grad()
        loss = pipeline.loss(x, y, backward=True)
        for param in pipeline.params:  # the average over the pipelines
            torch_dist.all_reduce(param.grad, group=pipeline.mesh.get_group("replica"))
            param.grad /= args.data_parallel
        if args.clip:  # by the norm of all stages together
            squares = nn.utils.get_total_norm([param.grad for param in pipeline.params]) ** 2
            torch_dist.all_reduce(squares, group=pipeline.group)
            nn.utils.clip_grads_with_norm_(pipeline.params, args.clip, squares.sqrt())
        optimizer.step()
        progress(loss)
    return progress.losses


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    text, held_out = gpt.load_text()
    torch.manual_seed(args.seed)
    model = gpt.GPT(args.layers, args.width, args.heads, args.length)  # whole, for a moment, in the CPU's memory
    total = sum(param.numel() for param in model.parameters())
    pipeline = Pipeline(model, args)
    del model  # all but this process's stages
    optimizer = torch.optim.AdamW(pipeline.params, lr=args.lr, fused=True)
    dist.print_primary(f"Training on {world_size} x {dist.get_device().type}: {args.schedule}")
    gpt.report_held(pipeline.params, total)
    train(pipeline, optimizer, text, held_out, args)
    dist.cleanup()


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
