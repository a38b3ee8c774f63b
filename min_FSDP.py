"""Shard parameters, gradients and optimizer state over all processes: fully sharded data parallelism (FSDP2).

Each process computes its share of the batch, as with DDP, but holds only 1/N of the model. Each block is a unit. Its
parameters are gathered from all processes just before it computes, and freed afterwards. In backward they are gathered
again. Then each process receives its shard of the gradients, averaged over all processes, and AdamW updates the shard.

    network    gather 1 | gather 2  |           | gather 2 | gather 1   | reduce 2   | reduce 1 |
    compute             | forward 1 | forward 2 |          | backward 2 | backward 1 |          | AdamW on the shards
    free                            | 1         | 2        |            | 2          | 1        |

On GPUs the network works while the previous block computes, as drawn. On the CPU each block waits for its parameters.

Choose it if parameters, gradients and Adam's state do not fit into one device. If they fit, choose min_DDP.py, which
sends a third less. If only Adam's state does not fit, min_ZeRO.py shards just that and sends as little as DDP.
min_FSDP_scratch.py shows what `fully_shard` does inside.

Cost per process, for P float32 parameters on N processes: 16·P/N bytes between two steps (parameters 4, gradients 4,
AdamW 8); with DDP 16·P. While a block computes, up to 20 bytes more for each of its parameters: the block and its
gradients, the next block, and the buffers that are sent. The parameters outside the blocks stay gathered from forward
to backward, and after an evaluation until the next backward. Each step sends up to 3·(N-1)/N · 4·P bytes, for two
gathers and one reduce-scatter. On gloo it sends up to 4·(N-1)/N · 4·P bytes, because gloo's reduce-scatter is an
all-reduce.

    python min_FSDP.py --nproc 2                                     # two processes; without --nproc, all GPUs
    python min_FSDP.py --nproc 2 --bf16                              # gather and compute in bfloat16
    python min_FSDP.py --nproc 2 --checkpoint-dir runs/fsdp          # save; the same command resumes, with any --nproc
    torchrun --standalone --nproc-per-node 2 min_FSDP.py             # torchrun starts the processes

All machines must share --checkpoint-dir. Load only checkpoints that you trust, because parts of them are pickles.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import checkpoint_sharded
import distributed as dist
import gpt

# ---- the shards ---------------------------------------------------------------------------------------------------


def shard(model, mesh, bf16):
    """Make each block a unit, which is gathered and freed by itself. Build the optimizer afterwards."""
    policy = MixedPrecisionPolicy()
    if bf16:
        # Gathered parameters and activations are bfloat16. Shards, reduced gradients and AdamW's state stay float32.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # the rest: embeddings, last norm and head


def make_model(args):
    return gpt.GPT(gpt.Config.from_args(args), args.seed)


def make_sharded_model(args, bf16=False):
    """A sharded model with rank 0's weights. Only rank 0 ever holds the whole model, and only in the CPU's memory."""
    with torch.device("meta"):
        model = make_model(args)  # shapes without memory
    mesh = init_device_mesh(dist.get_device().type, (dist.get_world_size(),))
    shard(model, mesh, bf16)
    model.to_empty(device=dist.get_device())  # memory for this rank's shards, not yet filled

    weights = {}
    if dist.is_primary():
        weights = make_model(args).state_dict()  # a pretrained model would be loaded here
    # Rank 0 sends one tensor after the other, and each rank keeps its shard. Buffers that are not in the state_dict
    # are not sent: fill them by hand, if your model has any.
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


# ---- training -----------------------------------------------------------------------------------------------------


def train(model, optimizer, data, args):
    """Returns the loss of every step of this run over all processes, (steps,)."""
    saver = checkpoint_sharded.Saver(model, optimizer, args, data.settings())
    progress = gpt.Progress(model, data, args, saver.first_step)
    for step in range(saver.first_step, args.steps):
        x, y = data.batch(step)
        optimizer.zero_grad()
        loss = gpt.loss_fn(model(x), y)
        loss.backward()
        if args.clip:
            # The gradients are DTensors, so this is the norm over all processes.
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        progress(step, loss)
        saver.save_if_due(step + 1)
    return progress.losses


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = gpt.make_parser(__doc__)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, keep parameters in float32")
    parser.add_checkpoints()
    args = parser.parse_args()
    gpt.check_model_options(parser, args, batch=(args.nproc, "the number of processes"))
    if args.checkpoint_dir is not None:
        checkpoint_sharded.check_folder("--checkpoint-dir", args.checkpoint_dir)
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    gpt.start(args)
    data = gpt.Data(args)  # this process's share of each global batch
    dist.print_primary(f"Training on {world_size} x {dist.get_device().type}")
    model = make_sharded_model(args, args.bf16)
    gpt.report_held(model.parameters())
    # Built after sharding, because it steps the shards.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, data, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
