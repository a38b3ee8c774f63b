"""Train and generate at the same time, on other processes (asynchronous GRPO): weights move between two meshes.

min_GRPO.py draws completions and learns from them in turn, on the same processes. Here the first ranks train, with the
model sharded by FSDP, and the last ranks generate, with the model split by tensor parallelism (TP). So most tensors are
cut in two ways. After a step the new weights must get from the trainers to the generators. This is `Move`:

    one matrix, held by 3 trainers (FSDP cuts rows)          and by 2 generators (RowwiseParallel cuts columns)

        rank 0   a a a a                                          a a | a a
        rank 1   b b b b             the move                     b b | b b      The letter says which trainer
        rank 2   c c c c     ------------------------>            c c | c c      had the number.
                                                               rank 3   rank 4

Each rank knows its box in every tensor: where its part begins, and how large it is. The ranks tell each other their
boxes once. Then each trainer sends to each generator the intersection of their boxes. No rank gathers a tensor in a
move, and none receives a byte that it does not keep. With --staleness 1 completions are drawn with the weights of the
step before, so both halves work at once. Weights 1 are those after step 0:

    trainers     wait   | step 0, completions 0  |  step 1, completions 1  |  step 2, completions 2  |
                                               weights 1                 weights 2
    generators   draw 0 | draw 1 with weights 0  |  draw 2 with weights 1  |  draw 3 with weights 2  |

The denominator of the ratio in the loss of min_GRPO.py is the probability under the weights that have drawn, so the
ratio corrects for their age. Older weights would need a larger correction. With --staleness 0 the halves wait for each
other, and the result equals min_GRPO.py's, up to rounding. Choose it if generation takes about as long as training. For
models of many billions of parameters, use TRL or verl. Cost: each of N trainers holds 16·P/N + 20·block bytes, and each
of G generators 4·P/G and a KV cache. A move sends 4 bytes per parameter, and 4·G if each generator has it whole, as
norms, embeddings and two biases of a block. --output saves the weights alone: a run cannot be resumed.

    python min_GRPO_async.py --nproc 4 --generators 2         # two trainers, and two generators with half of the heads
    torchrun --standalone --nproc-per-node 3 min_GRPO_async.py --staleness 0 --output model.pt    # take turns; save
"""

import functools
import math
import time

import torch
import torch.distributed as torch_dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import checkpoint
import distributed as dist
import gpt
import gpt_generate
import min_GRPO
import options

# ---- the move: from the boxes of one mesh to those of another -----------------------------------------------------


def box_of(param):
    """This rank's part of a tensor: where it begins in each dimension, and its sizes. Its mesh has one dimension."""
    offsets = [0] * param.ndim
    sizes = list(param.shape)
    if isinstance(param, DTensor):
        (placement,) = param.placements  # an error if the mesh has two dimensions
        if placement.is_shard():
            dim = placement.dim
            # As torch.chunk: the last parts may be smaller, or empty.
            full = math.ceil(sizes[dim] / param.device_mesh.size())
            begin = min(param.device_mesh.get_local_rank() * full, sizes[dim])
            offsets[dim] = begin
            sizes[dim] = min(full, sizes[dim] - begin)
    return offsets, sizes


def intersection(first, second):
    """The box that is in both boxes, or None."""
    offsets = []
    sizes = []
    for begin, size, other_begin, other_size in zip(*first, *second, strict=True):
        common_begin = max(begin, other_begin)
        common_end = min(begin + size, other_begin + other_size)
        if common_end <= common_begin:
            return None
        offsets.append(common_begin)
        sizes.append(common_end - common_begin)
    return offsets, sizes


class Move:
    """Copies parameters from the ranks `senders`, which hold different parts, to the ranks `receivers`.

    Every rank makes one when its parameters have memory, and calls it. `params` are this rank's, with their names.
    Raises DistributedError if their names, order, types or shapes differ between ranks. Buffers are not moved.
    Between a call and `wait` a sender must not change its parameters, and a receiver must not read them. On a GPU
    `wait` makes the work wait that is queued after it, and not the CPU. `parts` lists what is sent, alike on all ranks:
    name, sender, receiver, box.
    """

    def __init__(self, params, senders, receivers):
        self.tensors = {}
        self.boxes = {}
        kinds = []
        for name, param in params:
            param = param.detach()
            self.tensors[name] = param.to_local() if isinstance(param, DTensor) else param
            self.boxes[name] = box_of(param)
            kinds.append(f"{name} ({param.dtype}, {tuple(param.shape)})")
        dist.check_in_sync(None, **{"the list of parameters": kinds})
        boxes = dist.gather_objects(self.boxes)
        self.works = []  # in progress
        self.parts = []
        for name in self.boxes:
            for sender in senders:
                for receiver in receivers:
                    box = intersection(boxes[sender][name], boxes[receiver][name])
                    if box:
                        self.parts.append((name, sender, receiver, box))

    def __call__(self):
        rank = dist.get_rank()
        transfers = []
        for name, sender, receiver, box in self.parts:
            if rank == sender:
                # If the part is not contiguous, this copies it. The receiver's place is contiguous, because FSDP cuts
                # rows only.
                sent = self.place(name, box).contiguous()
                transfers.append(torch_dist.P2POp(torch_dist.isend, sent, receiver))
            elif rank == receiver:
                transfers.append(torch_dist.P2POp(torch_dist.irecv, self.place(name, box), sender))
        self.transfers = transfers  # they hold the copies until `wait`
        self.works = torch_dist.batch_isend_irecv(transfers) if transfers else []

    def place(self, name, box):
        """The part of this rank's memory that holds the box."""
        tensor = self.tensors[name]
        for dim, (own_begin, begin, size) in enumerate(zip(self.boxes[name][0], *box, strict=True)):
            tensor = tensor.narrow(dim, begin - own_begin, size)
        return tensor

    def wait(self):
        for work in self.works:
            work.wait()
        self.works = []  # `train` may wait again, and gloo would do so for ever
        self.transfers = []


# ---- training, on the first ranks ---------------------------------------------------------------------------------


def train(model, optimizer, move, group, args):
    """Learn from the completions that the generators send. `group` has the ranks that train."""
    for step in range(args.steps):
        start = time.perf_counter()
        if step == 0 or step + args.staleness < args.steps:  # after the last draw they need no weights
            move()  # the weights before this step
        tokens, mask, old, rewards = receive_completions(group, args)
        move.wait()  # the update changes the weights
        advantages = min_GRPO.advantages_of(rewards, args.group_size)
        sums = min_GRPO.update(model, optimizer, tokens, mask, old, advantages, args, group)
        if min_GRPO.is_due(step, args):
            print_line(step, sums, rewards, time.perf_counter() - start, group, args)
            if args.output:
                save(model, args)


def save(model, args):
    """Write the whole model. Every trainer calls it, because `full_tensor` gathers the shards."""
    weights = {name: param.full_tensor().cpu() for name, param in model.named_parameters()}
    if dist.is_primary():
        with checkpoint.atomic(args.output) as file:
            torch.save({"sizes": min_GRPO.SIZES, "model": weights}, file)


# ---- generation, on the last ranks --------------------------------------------------------------------------------


def generate(model, move, choose, n_trainers, args):
    """Draw and check the completions of each step, with weights that are --staleness steps old, and send them."""
    for step in range(args.steps):
        if step == 0 or step > args.staleness:
            move()  # the weights before step - args.staleness
            move.wait()
        completions = min_GRPO.draw_completions(model, step, range(args.prompts), args, choose)
        if dist.get_rank() == n_trainers:  # the first generator; the others have drawn the same
            send_completions(completions, n_trainers, args)


# ---- completions: one message on the CPU for each trainer and step ------------------------------------------------


def send_completions(completions, n_trainers, args):
    """Send each trainer the completions of its prompts, as `min_GRPO.own` shares the prompts.

    float64 holds all of it exactly. It waits until the trainer receives. So the generators are never further ahead than
    --staleness.
    """
    *parts, rewards = completions
    padding = (0, min_GRPO.SIZES["length"] - parts[0].shape[1])
    parts = [F.pad(part.double(), padding).cpu() for part in parts]
    rows = torch.cat([*parts, rewards[:, None].double()], dim=1)
    of_prompts = rows.view(args.prompts, args.group_size, -1)
    for trainer in range(n_trainers):
        torch_dist.send(of_prompts[trainer::n_trainers].contiguous(), trainer)


def receive_completions(group, args):
    """What `min_GRPO.draw_completions` returns, for this trainer's prompts. Waits until they are drawn."""
    n_rows = len(min_GRPO.own(range(args.prompts), group)) * args.group_size
    rows = torch.empty(n_rows, 3 * min_GRPO.SIZES["length"] + 1, dtype=torch.double)
    torch_dist.recv(rows, group.size())  # from the first generator
    rewards = rows[:, -1].to(torch.get_default_dtype())
    tokens, mask, log_probabilities = gpt.to_device(rows[:, :-1], dist.get_device()).chunk(3, dim=1)
    return tokens.long(), mask.bool(), log_probabilities.to(torch.get_default_dtype()), rewards


# ---- the model on two meshes --------------------------------------------------------------------------------------


def shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def split_layers(model, mesh):
    """Whole heads and columns for each generator, as in min_TP.py, but every rank has the whole sequence."""
    plan = {
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


# ---- progress -----------------------------------------------------------------------------------------------------


def print_line(step, sums, rewards, seconds, group, args):
    """Print what this step gave, over all trainers. Age says how many steps old the weights were that drew."""
    sums = torch.cat([sums, gpt.to_device(rewards.nansum()[None], sums.device)])
    torch_dist.all_reduce(sums, group=group)
    mismatch, clipped, n_bytes, rewarded = sums.tolist()
    n_completions = args.prompts * args.group_size
    dist.print_primary(
        f"step {step + 1}/{args.steps} | reward {rewarded / n_completions:.3f} | mismatch {mismatch / n_bytes:.0e} | "
        f"clipped {clipped / n_bytes:.3f} | age {min(step, args.staleness)} | {n_completions / seconds:,.0f} answers/s",
        flush=True,
    )


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = options.ArgumentParser(__doc__)
    min_GRPO.add_options(parser)
    parser.add_argument("--generators", type=options.whole_number(1), default=1, help="processes that generate")
    staleness_help = "age of the generators' weights, in steps"
    parser.add_argument("--staleness", type=int, choices=(0, 1), default=1, help=staleness_help)
    args = parser.parse_args()
    n_trainers = args.nproc - args.generators
    if n_trainers < 1:
        parser.error(f"argument --nproc: {args.nproc} is less than {args.generators + 1}, a trainer and --generators")
    if args.prompts < n_trainers:
        parser.error(f"argument --prompts: {args.prompts} is less than {n_trainers}, the number of trainers")
    heads = min_GRPO.SIZES["heads"]
    if heads % args.generators:
        parser.error(f"argument --generators: {args.generators} does not divide the {heads} heads of the model")
    checkpoint.check_writable("--output", args.output)
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    gpt.start(args)
    ranks = list(range(world_size))
    n_trainers = world_size - args.generators
    # Every rank makes both meshes, since each of them makes a process group.
    trainers = DeviceMesh(dist.get_device().type, ranks[:n_trainers])
    generators = DeviceMesh(dist.get_device().type, ranks[n_trainers:])
    if dist.get_rank() < n_trainers:
        be_trainer(trainers, ranks, args)
    else:
        be_generator(generators, ranks, args)


def be_trainer(mesh, ranks, args):
    n_trainers = mesh.size()
    model = gpt.make_meta_model(gpt.Config(**min_GRPO.SIZES))  # shapes without memory
    shard(model, mesh)
    model.to_empty(device=dist.get_device())  # memory for this rank's shards
    gpt.fill(model.named_parameters(), args.seed)
    move = Move(model.named_parameters(), ranks[:n_trainers], ranks[n_trainers:])
    min_GRPO.imitate(model, args, mesh.get_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, move, mesh.get_group(), args)


def be_generator(mesh, ranks, args):
    n_trainers = len(ranks) - mesh.size()
    model = gpt.make_meta_model(gpt.Config(**min_GRPO.SIZES))
    if mesh.size() > 1:
        split_layers(model, mesh)
    model.to_empty(device=dist.get_device())  # memory for this rank's part, which the first move fills
    move = Move(model.named_parameters(), ranks[:n_trainers], ranks[n_trainers:])
    choose = functools.partial(gpt_generate.choose_alike, mesh.get_group())  # all generators choose the same bytes
    generate(model, move, choose, n_trainers, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
