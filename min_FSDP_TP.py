"""Several dimensions at once, on one DeviceMesh: hybrid sharding (HSDP), and FSDP with tensor parallelism.

Every process has a place in a mesh of replicate x shard x tensor processes. With 2 x 2 x 2 these are the ranks:

                    4 ------- 5
                  / |       / |
                6 ------- 7   |        --tensor     0-1  2-3  4-5  6-7    split the work of each layer (min_TP.py)
                |   |     |   |        --shard      0-2  1-3  4-6  5-7    split the parameters (min_FSDP.py)
                |   0 ----|-- 1        --replicate  0-4  1-5  2-6  3-7    average gradients, as DDP does
                | /       | /
                2 ------- 3

Tensor neighbours take the same sequences, communicate most often, and have consecutive ranks, so they are on the
fastest links. Neighbours along `shard` hold different parts of the model. Replicas communicate once per step.

- replicate x shard (HSDP): choose it when the processes of one machine hold the model easily. Machines then exchange
  only the gradients of a shard, once per step. min_FSDP.py over all machines would gather every layer across them.
- shard x tensor: choose it when you have more processes than the batch has sequences, or when the activations of one
  sequence do not fit. On many machines, add replicas. The training loop is min_FSDP.py's, whatever the mesh is.

Cost per process, for P float32 parameters, and the a = 4·batch·length·width/(replicate·shard) bytes that leave a block:
    between two steps       16·P/(shard·tensor) bytes (parameters 4, gradients 4, AdamW 8; tensor does not split norms)
    while a block computes  up to 20/tensor bytes more for each of its parameters, as in min_FSDP.py
    until backward          activations; with --recompute (activation checkpointing) a/tensor per block, for more work
    sent along shard        3·(shard-1)/shard · 4·P/tensor a step: parameters are gathered twice, gradients reduced
    sent along replicate    2·(replicate-1)/replicate · 4·P/(shard·tensor): an all-reduce of its shard of the gradients
    sent along tensor       8·(tensor-1)/tensor · a per block: gathers and reductions (11 instead of 8 with --recompute)

    python min_FSDP_TP.py --nproc 4 --replicate 2                            # HSDP: 2 replicas of 2 shards
    python min_FSDP_TP.py --nproc 4 --tensor 2 --checkpoint-dir runs/2d      # FSDP x TP: 2 shards of layers split in 2
    python min_FSDP_TP.py --nproc 1 --checkpoint-dir runs/2d --steps 600     # resumes on another mesh, of 1
"""

import functools
import logging
import warnings

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.utils.checkpoint import checkpoint as recompute

import checkpoint_sharded
import distributed as dist
import gpt
import options
from min_FSDP import shard, train
from min_TP import split_layers

# ---- one mesh for all dimensions ----------------------------------------------------------------------------------


def parallelize(model, args):
    """Split `model` in place. Freeze parameters and build the optimizer afterwards: see `split_layers`."""
    if args.recompute:
        for block in model.blocks:  # each keeps only its input for backward, and recomputes everything else there
            block.forward = functools.partial(recompute, block.forward, use_reentrant=False)
    shape = (args.replicate, args.shard, args.tensor)
    mesh = init_device_mesh(dist.get_device().type, shape, mesh_dim_names=("replicate", "shard", "tensor"))
    if args.tensor > 1:
        split_layers(model, mesh["tensor"], logits=Replicate())
        silence_false_alarms()
    fsdp_mesh = mesh["shard"]
    if args.replicate > 1:
        fsdp_mesh = mesh["replicate", "shard"]  # HSDP: all-reduce along the first dimension, shard along the second
    shard(model, fsdp_mesh, args.bf16)  # only this rank's part of the split layers


def silence_false_alarms():
    """Silence two warnings that torch 2.15 gives when FSDP and tensor parallelism meet. Neither applies here."""
    # The logits are a view. To edit them in place would be wrong, and nothing here does.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    # The norm of all gradients is one number, summed in one all-reduce per mesh dimension, where one could do.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = gpt.make_parser(__doc__)
    shard_help = "processes that shard each replica (default: all remaining processes)"
    tensor_help = "processes that split the work of each layer"
    parser.add_argument("--replicate", type=options.whole_number(1), default=1, help="replicas of the model")
    parser.add_argument("--shard", type=options.whole_number(1), help=shard_help)
    parser.add_argument("--tensor", type=options.whole_number(1), default=1, help=tensor_help)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, keep parameters in float32")
    parser.add_argument("--recompute", action="store_true", help="recompute activations in backward, to save memory")
    parser.add_checkpoints()
    args = parser.parse_args()
    if args.shard is None:
        args.shard = max(1, args.nproc // (args.replicate * args.tensor))
    if args.replicate * args.shard * args.tensor != args.nproc:
        mesh = f"--replicate {args.replicate} x --shard {args.shard} x --tensor {args.tensor}"
        parser.error(f"argument --nproc: {args.nproc} is not {mesh}")
    shares = (args.replicate * args.shard, "--replicate x --shard")
    parts = (args.tensor, "--tensor")
    gpt.check_model_options(parser, args, batch=shares, heads=parts, length=parts)
    if args.checkpoint_dir is not None:
        checkpoint_sharded.check_folder("--checkpoint-dir", args.checkpoint_dir)
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    share = dist.get_rank() // args.tensor  # tensor neighbours, whose ranks are consecutive, take the same one
    gpt.start(args, share)  # a seed for each share, so tensor neighbours draw the same
    data = gpt.Data(args, share=(share, args.replicate * args.shard))
    mesh = f"replicate {args.replicate} x shard {args.shard} x tensor {args.tensor}"
    dist.print_primary(f"Training on {world_size} x {dist.get_device().type}: {mesh}")
    model = gpt.make_meta_model(gpt.Config.from_args(args))  # shapes without memory: no process holds it whole
    parallelize(model, args)
    model.to_empty(device=dist.get_device())  # memory for this process's part
    gpt.fill(model.named_parameters(), args.seed)
    gpt.report_held(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, data, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
