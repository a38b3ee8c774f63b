"""Split the experts and shard everything: expert parallelism (EP) x FSDP, for a mixture of experts.

Layers and training loop are min_EP.py's: each token is routed to --top experts, wherever they are. The processes form a
mesh of dp x ep. The experts of a block are split over ep, and fully_shard shards each of them over dp. It shards all
other parameters over all N = dp · ep ranks. With 2 x 2 processes and 4 experts:

             ep 0                                 ep 1
    dp 0     rank 0   half of experts 0 and 1     rank 1   half of experts 2 and 3      each rank also holds
    dp 1     rank 2   half of experts 0 and 1     rank 3   half of experts 2 and 3      1/4 of all else

    along ep     0-1  2-3       tokens travel to their experts and back (all-to-all, as in min_EP.py)
    along dp     0-2  1-3       experts are gathered before they compute, their gradients are reduced (fully_shard)
    over all     0-1-2-3        the same for all else; routed tokens are counted, for the loss or bias that balances

The loss is the mean over all N ranks, so all gradients are sums over N ranks, divided by N:

    all else     fully_shard sums over N ranks, and divides by N
    experts      backward sums over the ep ranks whose tokens an expert has seen. fully_shard sums over dp ranks, and
                 divides by dp. This script divides by ep

Choose it when min_EP.py does not fit: there each device holds all shared parameters with Adam's state. Let ep be the
processes of one machine: tokens travel in each block. min_FSDP.py gathers all experts of a block instead.

Cost per process, for S shared float32 parameters, R of them outside the blocks, and X of experts: 16·(S + X)/N bytes
between two steps. While a block computes that has s shared parameters and x of experts, up to 20·(s + x/ep) more, and
4·R. Sent in each step: (N-1)/N · 4·(3·S - R) bytes, 3·(dp-1)/dp · 4·X/ep for the experts, and tokens as in min_EP.py,
with (ep-1)/ep for (N-1)/N. gloo's reduce-scatter sends twice as much as it should.

    python min_EP_FSDP.py --nproc 4 --expert-parallel 2          # 2 x 2 processes; without --nproc, all GPUs
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distributed as dist
import gpt
import options
from min_EP import add_experts, add_options, check_options, gradients, split_params, train

# ---- the mesh -----------------------------------------------------------------------------------------------------


def parallelize(model, args):
    """Split the experts and shard everything. Build the optimizer after it."""
    device = dist.get_device().type
    n = dist.get_world_size()
    # The neighbours along the last dimension have consecutive ranks: tokens need the fastest links.
    mesh = init_device_mesh(device, (n // args.expert_parallel, args.expert_parallel), mesh_dim_names=("dp", "ep"))
    everyone = init_device_mesh(device, (n,))
    neighbours = mesh["ep"].mesh.tolist()  # the ranks with which this one splits the experts
    add_experts(model, args, neighbours, mesh["ep"].get_group())
    for block in model.blocks:
        fully_shard(block.mlp.experts, mesh=mesh["dp"])
        fully_shard(block, mesh=everyone)  # all but the experts
    fully_shard(model, mesh=everyone)  # the rest: embeddings, last norm and head


# ---- gradients ----------------------------------------------------------------------------------------------------


def backward(model, loss):
    """The gradients of the mean of all ranks' losses. Call it once per step.

    For several micro-batches, call `loss.backward()` for each, and divide the experts' gradients after the last one.
    """
    loss.backward()
    _, experts = split_params(model)
    for grad in gradients(experts):
        # fully_shard could do it (set_gradient_divide_factor), but torch 2.14 divides twice on gloo if dp is 1.
        grad /= len(model.blocks[0].mlp.ranks)  # ep


def clip_gradients(model, max_norm):
    """As nn.utils.clip_grad_norm_. Each element of a gradient is on one rank, so the norm is one sum over all ranks."""
    shards = [grad.to_local() for grad in gradients(model.parameters())]
    norm = dist.all_reduce(nn.utils.get_total_norm(shards) ** 2).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)
    for shard in shards:
        shard *= factor


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = gpt.make_parser(__doc__)
    add_options(parser)
    parallel_help = "processes that split the experts (default: 2, or 1 if the number of processes is odd)"
    parser.add_argument("--expert-parallel", type=options.whole_number(1), help=parallel_help)
    args = parser.parse_args()
    if args.expert_parallel is None:
        args.expert_parallel = 1 if args.nproc % 2 else 2
    if args.nproc % args.expert_parallel:
        line = f"{args.expert_parallel} does not divide {args.nproc}, the number of processes"
        parser.error(f"argument --expert-parallel: {line}")
    check_options(parser, args, args.expert_parallel, "--expert-parallel")
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    gpt.start(args)
    data = gpt.Data(args)  # this process's share of each global batch
    model = gpt.make_meta_model(gpt.Config.from_args(args))  # shapes without memory: no process holds it whole
    parallelize(model, args)
    model.to_empty(device=dist.get_device())  # memory for this process's part
    gpt.fill([*model.named_parameters(), *model.named_buffers()], args.seed)
    shared, experts = split_params(model)
    # A DTensor counts as the whole tensor.
    n_params = sum(param.numel() for param in shared) + args.expert_parallel * sum(param.numel() for param in experts)
    gpt.report_held(model.parameters(), n_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, data, args, backward, clip_gradients)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
