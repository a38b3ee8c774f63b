"""Split the model by layers: pipeline parallelism (PP), with the schedules of torch.distributed.pipelining.

Each process holds some consecutive blocks, a stage. The batch is cut into M micro-batches, so that all stages can work
at the same time. A stage sends its activations to the next stage, and their gradients to the previous one. With N = 3
processes and M = 4, F1 is the forward of micro-batch 1, B1 its backward, and the dots are the bubble:

    GPipe    rank 0   F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3
             rank 1    . F0 F1 F2 F3  .  . B0 B1 B2 B3  .
             rank 2    .  . F0 F1 F2 F3 B0 B1 B2 B3  .  .

    1F1B     rank 0   F0 F1 F2  .  . B0 F3 B1  . B2  . B3
             rank 1    . F0 F1  . B0 F2 B1 F3 B2  . B3  .
             rank 2    .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .

Both are idle for (N-1)/(M+N-1) of a step. GPipe keeps activations of all M micro-batches, 1F1B of at most N. The
other schedules have two stages in each process and a smaller bubble. A backward has two parts. The previous stage waits
for the gradient of the activations. Nothing waits for the gradients of the weights, until the optimizer's step. So the
last three schedules compute these later, in the bubble. With N = 3, the six stages are on these ranks:

    Interleaved1F1B        0 1 2 0 1 2   idle for (N-1)/(2·M+N-1) of a step, since a stage takes half as long
    InterleavedZeroBubble  0 1 2 0 1 2   the same order, and gradients of weights in the bubble
    ZBVZeroBubble          0 1 2 2 1 0   a V: a micro-batch ends on the rank on which it began
    DualPipeV              0 1 2 2 1 0   a V, and one micro-batch's forward runs together with another's backward

Choose it when one device cannot hold the model and links are slow: only neighbours communicate, and they send little.
Over fast links FSDP (min_FSDP.py) has no bubble. Cost, for P float32 parameters, and the A = 4·batch·length·width bytes
that leave a block: 16·P/N bytes per process, and embeddings or the head. All processes together send in each step
2·A·(N-1) bytes with one stage per process, 2·A·(2·N-1) with Interleaved…, 4·A·(N-1) with ZBVZeroBubble and DualPipeV.

    python min_PP.py --nproc 2 --schedule ZBVZeroBubble     # two processes; without --nproc, all GPUs
"""

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

import distributed as dist
import gpt
import options

ONE_STAGE = ("GPipe", "1F1B")
INTERLEAVED = ("Interleaved1F1B", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


# ---- stages and their schedule ------------------------------------------------------------------------------------


class Stage(nn.Module):
    """Blocks `first` to `last` - 1 of a GPT. The first stage has its embeddings too, the last one its head."""

    def __init__(self, model, first, last):
        super().__init__()
        self.is_first = first == 0
        self.is_last = last == len(model.blocks)
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(first, last)})  # names as in the GPT
        if self.is_first:
            self.token = model.token
            self.position = model.position
        if self.is_last:
            self.norm = model.norm
            self.head = model.head

    def forward(self, x):
        if self.is_first:
            x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        if self.is_last:
            x = self.head(self.norm(x))
        return x


class Pipeline:
    """This process's stages of a GPT, and the schedule that runs them with the other processes of the pipeline.

    `model` is the GPT with shapes but without memory. Afterwards it has memory, for this process's layers alone. `mesh`
    has a dimension "stage". `parallelize(stage)` may split a stage further, before it has memory. With `tie` the head
    has the embedding's weight, as in GPT-2: see `tie_embedding`.
    """

    def __init__(self, model, args, mesh, parallelize=None, tie=False):
        self.model = model
        self.mesh = mesh
        self.group = mesh.get_group("stage")
        ranks = stage_ranks(args.schedule, self.group.size())
        n_stages = len(ranks)
        device = dist.get_device()
        self.stages = {}
        parts = []  # torch's PipelineStage around each stage: it sends and receives
        for i in range(n_stages):
            if ranks[i] == self.group.rank():
                stage = Stage(model, i * args.layers // n_stages, (i + 1) * args.layers // n_stages)
                if parallelize:
                    parallelize(stage)
                self.stages[i] = stage.to_empty(device=device)
                parts.append(pipelining.PipelineStage(stage, i, n_stages, device, group=self.group))
        remove_layers_without_memory(model)
        gpt.fill(model.named_parameters(), args.seed)
        self.copies = []  # of a tied weight, in this process
        if tie:
            self.tie_embedding(ranks[0], ranks[-1], args.seed)

        schedule_class = getattr(pipelining, f"Schedule{args.schedule}")
        if args.schedule in ONE_STAGE:
            self.schedule = schedule_class(parts[0], args.micro_batches, gpt.loss_fn)
        else:
            self.schedule = schedule_class(parts, args.micro_batches, gpt.loss_fn)

    def tie_embedding(self, first, last, seed):
        """Let the head of rank `last` begin with the weight of rank `first`'s embedding.

        Each is a parameter of its own. They stay equal, because `step` gives both the sum of their gradients. One
        shared parameter would be wrong where one rank has both stages: each stage divides its gradients by M.
        """
        self.tied_ranks = torch_dist.new_group(sorted({first, last}))
        for rank, layer in ((first, self.model.token), (last, self.model.head)):
            if self.group.rank() == rank:
                gpt.fill([("token.weight", layer.weight)], seed)
                self.copies.append(layer.weight)

    def sum_tied_gradients(self):
        if self.copies:
            total = sum(copy.grad for copy in self.copies)
            torch_dist.all_reduce(total, group=self.tied_ranks)
            for copy in self.copies:
                copy.grad.copy_(total)

    def step(self, x, y):
        """All forwards and backwards. All processes of the pipeline pass the same (x, y), to be cut into equal parts.

        Returns a loss whose mean over all processes is the loss of the global batch.
        """
        inputs = []
        if 0 in self.stages:
            inputs.append(x)  # the other stages receive activations instead
        losses = []  # filled by the last stage, one per micro-batch
        # The schedule sums the micro-batches' gradients and divides by their number: right, because the loss is a mean.
        self.schedule.step(*inputs, target=y, losses=losses, return_outputs=False)
        self.sum_tied_gradients()
        if not losses:
            return torch.zeros((), device=y.device)
        return torch.stack(losses).mean() * self.group.size()

    @torch.enable_grad()
    def evaluate(self, x, y):
        """Runs `step`, with its backward: the next `zero_grad` discards the gradients.

        The schedules have an `eval`, but it fails if two stages in a row share a process (torch 2.15).
        """
        return self.step(x, y)


def stage_ranks(schedule, n_ranks):
    """The rank of each stage in its pipeline. With 3 ranks it is 0 1 2, or 0 1 2 0 1 2, or 0 1 2 2 1 0."""
    ranks = list(range(n_ranks))
    if schedule in INTERLEAVED:
        return ranks + ranks
    if schedule in V_SHAPED:
        return ranks + ranks[::-1]
    return ranks


def remove_layers_without_memory(model):
    """Remove the layers of other processes. The remaining layers keep their names, so a checkpoint fits every mesh."""
    for parent in (model.blocks, model):
        for name, child in list(parent.named_children()):
            if all(param.is_meta for param in child.parameters()):
                setattr(parent, name, None)


def make_pipeline(model, args):
    mesh = init_device_mesh(dist.get_device().type, (dist.get_world_size(),), mesh_dim_names=("stage",))
    return Pipeline(model, args, mesh, tie=args.tie)


# ---- training -----------------------------------------------------------------------------------------------------


def train(pipeline, optimizer, data, args, first_step=0, after_step=None):
    """Returns the loss of every step of this run over all processes, (steps,).

    min_PP_FSDP_TP.py resumes at `first_step`, and saves in `after_step(done)`.
    """
    progress = gpt.Progress(pipeline, data, args, first_step, Pipeline.evaluate)
    for step in range(first_step, args.steps):
        x, y = data.batch(step)
        optimizer.zero_grad()
        loss = pipeline.step(x, y)
        if args.clip:
            clip_gradients(pipeline, args.clip)
        optimizer.step()
        progress(step, loss)
        if after_step:
            after_step(step + 1)
    return progress.losses


def clip_gradients(pipeline, max_norm):
    """As nn.utils.clip_grad_norm_, by the norm over all stages. It counts a tied weight once."""
    params = list(pipeline.model.parameters())
    counted = dict.fromkeys(params)  # an ordered set
    if pipeline.copies and pipeline.model.head is not None:
        del counted[pipeline.model.head.weight]
    norm = nn.utils.get_total_norm([param.grad for param in counted if param.grad is not None])
    if hasattr(norm, "full_tensor"):  # in min_PP_FSDP_TP.py gradients are DTensors: the sum over a stage's processes
        norm = norm.full_tensor()
    squares = norm.to(dist.get_device()) ** 2  # if all is frozen, it was on the CPU
    torch_dist.all_reduce(squares, group=pipeline.group)
    nn.utils.clip_grads_with_norm_(params, max_norm, squares.sqrt())


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    schedules = ONE_STAGE + INTERLEAVED + V_SHAPED
    # torch.__version__ is a TorchVersion, for which "2.9" is less than "2.12".
    if torch.__version__ < "2.12":
        schedules = ONE_STAGE + INTERLEAVED  # with gloo, 2.11 fails if two stages in a row share a process
    parser = gpt.make_parser(__doc__)
    parser.add_argument("--schedule", choices=schedules, default="1F1B", help="order of forwards and backwards")
    parser.add_argument("--tie", action="store_true", help="let the head have the embedding's weight, as GPT-2 does")
    micro_help = "parts of a pipeline's batch (default: 8, or what fits)"
    parser.add_argument("--micro-batches", type=options.whole_number(1), help=micro_help)
    parser.set_defaults(steps=600, layers=None)  # 4 blocks, or one per stage
    args = parser.parse_args()
    check_stages(parser, args, args.nproc)
    gpt.check_model_options(parser, args, batch=(args.micro_batches, "--micro-batches"))
    return args


def check_stages(parser, args, n_ranks):
    """Check the options of a pipeline of `n_ranks` processes, and fill in the options that were not given."""
    if torch.__version__ < "2.12" and args.schedule in INTERLEAVED and n_ranks == 1:
        line = f"{args.schedule} needs at least two processes in a pipeline before torch 2.12"
        parser.error(f"argument --schedule: {line}")
    n_stages = len(stage_ranks(args.schedule, n_ranks))
    stages = f"{n_stages}, the stages of {args.schedule}"
    if args.layers is None:
        args.layers = max(4, n_stages)
    if args.layers < n_stages:
        parser.error(f"argument --layers: {args.layers} is less than {stages}")
    divisor = n_ranks if args.schedule in INTERLEAVED else 1
    fitting = max(8, n_stages)
    gpt.require_multiple(parser, args, "micro_batches", divisor, "the processes of a pipeline", default=fitting)
    if args.micro_batches < n_stages and args.schedule in ("1F1B", "DualPipeV"):
        parser.error(f"argument --micro-batches: {args.micro_batches} is less than {stages}")


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    gpt.start(args)
    model = gpt.make_meta_model(gpt.Config.from_args(args))  # shapes without memory: no process holds it whole
    n_params = sum(param.numel() for param in model.parameters())
    if args.tie:
        n_params -= model.head.weight.numel()
    pipeline = make_pipeline(model, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    dist.print_primary(f"Training on {world_size} x {dist.get_device().type}: {args.schedule}")
    gpt.report_held(model.parameters(), n_params)
    data = gpt.Data(args, share=(0, 1))  # the whole batch, which the schedule cuts into micro-batches
    train(pipeline, optimizer, data, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
