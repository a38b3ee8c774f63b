"""Three dimensions: a pipeline of stages, each sharded by FSDP and split by tensor parallelism, on one DeviceMesh.

Pipeline and training loop are min_PP.py's, and the split of the layers is min_TP.py's. Every process has a place in a
mesh of stages x shard x tensor processes. With 2 x 2 x 2 these are the ranks:

                    4 ------- 5
                  / |       / |
                6 ------- 7   |        --tensor   0-1  2-3  4-5  6-7    split the work of each layer (min_TP.py)
                |   |     |   |        --shard    0-2  1-3  4-6  5-7    split the batch and the parameters (min_FSDP.py)
                |   0 ----|-- 1        --stages   0-4  1-5  2-6  3-7    split the model by layers (min_PP.py)
                | /       | /
                2 ------- 3            rank = (stage · 2 + shard) · 2 + tensor

The batch is cut into --shard shares, and each share into M micro-batches. In each step a process gathers its layers (G)
before its first forward and reduces their gradients (R) after its last backward. With M = 2 and 1F1B:

    ranks 0 to 3   G F0 F1  .  . B0  . B1  R
    ranks 4 to 7   .  .  G F0 B0 F1 B1  R  .

Tensor neighbours exchange activations eight times per block and micro-batch, so they belong in one machine. Neighbours
along shard exchange every parameter and gradient once per step. A stage sends one activation per micro-batch, which
needs the least bandwidth, so the stages are outermost: with shard x tensor GPUs per machine, each machine is a stage.

Choose it when the processes of min_FSDP_TP.py cannot hold the model, or would gather it over slow links.
Cost per process, for P float32 parameters and the a = 4·batch·length·width/shard bytes that leave a block:
    memory    16·P/(stages·shard·tensor) bytes between steps, during one up to 8·P/(stages·tensor) more
    sent      2·(shard-1)/shard · 4·P/(stages·tensor) bytes per step along shard, 8·(tensor-1)/tensor · a per block of
              its stage along tensor, and a/tensor to each neighbour along stages, or twice as much with Interleaved1F1B

    python min_PP_FSDP_TP.py --nproc 8 --checkpoint-dir runs/3d                # 2 x 2 x 2 processes
    python min_PP_FSDP_TP.py --nproc 1 --checkpoint-dir runs/3d --steps 800    # resumes on another mesh, of 1
"""

import functools
import warnings

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate

import checkpoint_sharded
import distributed as dist
import gpt
import options
from min_FSDP_TP import silence_false_alarms
from min_PP import Pipeline, check_stages, train
from min_TP import split_layers

# ---- a stage, split and sharded -----------------------------------------------------------------------------------


def parallelize(stage, mesh, args):
    """Split the layers of a `stage` along "tensor", and shard what this process then holds along "shard"."""
    if mesh["tensor"].size() > 1:
        # Between the split layers a process has only its part of the sequence, so it also sends only that part to the
        # next stage.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Parallelize plan key")  # a stage lacks layers of the plan
            split_layers(stage, mesh["tensor"], logits=Replicate())
    policy = MixedPrecisionPolicy()
    if args.bf16:  # activations travel in bfloat16 too
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # Each unit is gathered in the first forward of a step, and stays gathered. In the backwards the schedule turns off
    # FSDP's reductions and resharding. It reduces and reshards once, after the last micro-batch.
    for block in stage.blocks.values():
        fully_shard(block, mesh=mesh["shard"], mp_policy=policy, reshard_after_forward=False)
    # The rest: embeddings, or last norm and head.
    fully_shard(stage, mesh=mesh["shard"], mp_policy=policy, reshard_after_forward=False)


def make_pipeline(model, args):
    """`model`, with shapes but without memory, as min_PP.py's pipeline of stages that are split further."""
    shape = (args.stages, args.shard, args.tensor)
    mesh = init_device_mesh(dist.get_device().type, shape, mesh_dim_names=("stage", "shard", "tensor"))
    return Pipeline(model, args, mesh, functools.partial(parallelize, mesh=mesh, args=args))


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = gpt.make_parser(__doc__)
    schedule_help = "order of forwards and backwards; Interleaved1F1B has two stages per process and a smaller bubble"
    micro_help = "parts of a pipeline's batch (default: 8, or what fits)"
    stages_help = "processes of a pipeline (default: 2 if possible)"
    shard_help = "processes that shard a stage and the batch (default: all remaining processes)"
    tensor_help = "processes that split the work of each layer (default: 2 if possible)"
    schedules = ("1F1B", "Interleaved1F1B")
    parser.add_argument("--schedule", choices=schedules, default="1F1B", help=schedule_help)
    parser.add_argument("--micro-batches", type=options.whole_number(1), help=micro_help)
    parser.add_argument("--stages", type=options.whole_number(1), help=stages_help)
    parser.add_argument("--shard", type=options.whole_number(1), help=shard_help)
    parser.add_argument("--tensor", type=options.whole_number(1), help=tensor_help)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, keep parameters in float32")
    parser.add_checkpoints()
    parser.set_defaults(steps=600, layers=None)  # 4 blocks, or one per stage
    args = parser.parse_args()
    check_options(parser, args)
    return args


def check_options(parser, args):
    """End the program with one line if the options do not fit. Fill in the options that were not given."""
    given = (args.stages or 1) * (args.shard or 1) * (args.tensor or 1)
    remaining = max(1, args.nproc // given)
    if args.stages is None:
        args.stages = 2 if remaining % 2 == 0 else 1
        remaining //= args.stages
    if args.tensor is None:
        args.tensor = 2 if remaining % 2 == 0 else 1
        remaining //= args.tensor
    if args.shard is None:
        args.shard = remaining
    if args.stages * args.shard * args.tensor != args.nproc:
        mesh = f"--stages {args.stages} x --shard {args.shard} x --tensor {args.tensor}"
        parser.error(f"argument --nproc: {args.nproc} is not {mesh}")
    check_stages(parser, args, args.stages)
    shares = (args.micro_batches * args.shard, "--micro-batches x --shard")
    parts = (args.tensor, "--tensor")
    gpt.check_model_options(parser, args, batch=shares, heads=parts, length=parts)
    if args.checkpoint_dir is not None:
        checkpoint_sharded.check_folder("--checkpoint-dir", args.checkpoint_dir)


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    # Tensor neighbours, and the stages of a pipeline, take the same share of the batch.
    share = dist.get_rank() // args.tensor % args.shard
    gpt.start(args, share)
    silence_false_alarms()
    mesh = f"stages {args.stages} x shard {args.shard} x tensor {args.tensor}"
    dist.print_primary(f"Training on {world_size} x {dist.get_device().type}: {mesh}, {args.schedule}")
    model = gpt.make_meta_model(gpt.Config.from_args(args))  # shapes without memory: no process holds it whole
    n_params = sum(param.numel() for param in model.parameters())
    pipeline = make_pipeline(model, args)
    gpt.report_held(model.parameters(), n_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    data = gpt.Data(args, share=(share, args.shard))
    saver = checkpoint_sharded.Saver(model, optimizer, args, data.settings())
    # FSDP averages the gradients over the shares of the batch, and the schedule over the micro-batches.
    train(pipeline, optimizer, data, args, saver.first_step, saver.save_if_due)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
