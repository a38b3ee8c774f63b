"""Muon on FSDP's shards: an optimizer that needs whole matrices, where no process holds a whole matrix.

Muon makes a step of equal size in all singular directions of a weight matrix W (rows x columns), which has the gradient
G and the momentum M:

    M ← μ M + (1-μ) G                               the average of the last gradients
    U S Vᵀ = (1-μ) G + μ M                          the singular value decomposition (with Nesterov's momentum)
    W ← (1 - η λ) W - η √max(1, rows/columns) U Vᵀ  with the learning rate η and the weight decay λ

`orthogonalize` computes about U Vᵀ, each element of which depends on the whole matrix. But fully_shard has split W, G
and M by rows. So N matrices are stepped together: each process makes one of them whole and orthogonalizes it. With
N = 2, | separates the rows of process 0 from the rows of process 1 in A and B:

                                    process 0                   process 1
    (1-μ) G + μ M, on shards        a0 and b0                   a1 and b1
    all-to-all: matrix i to rank i  A = a0 | a1                 B = b0 | b1
    orthogonalize a whole matrix    U Vᵀ of A                   U Vᵀ of B
    all-to-all back: its own rows   of both updates             of both updates
    step W, on shards               its rows of A and of B      its rows of A and of B

To orthogonalize each shard by itself raises no error, but the first update is off by 51 % of its norm with N = 2.
AdamW steps the rest: embeddings, norms, biases and the head.
Choose it over AdamW (min_FSDP.py) for a lower loss in as many steps. Muon needs a learning rate of its own. The Muon of
dion (https://github.com/microsoft/dion) sends matrices while it orthogonalizes others, which this script does not.

Cost per process, for P float32 parameters, X of them in the matrices: (12·X + 16·(P-X))/N bytes between two steps. In
forward and backward up to 20 bytes per parameter of a block more, and in Muon's step about 30 per element of the
largest matrix. Beside FSDP's bytes Muon sends 8·(N-1)/N² · X on average in each step. It adds at most 5·m/(B·T) to the
work of forward and backward, for matrices whose smaller side is m, and batches of B sequences of T tokens.

    python min_Muon.py --nproc 2 --checkpoint-dir runs/muon      # save; run again to resume, with any --nproc
"""

import math

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import checkpoint_sharded
import distributed as dist
import gpt
import options
from min_FSDP import make_sharded_model

# ---- Muon: shards to whole matrices and back ----------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Muon for `matrices`: parameters of two dimensions, or groups of them, as torch.optim takes them.

    fully_shard must have split their rows over all processes. All processes must call `step`, and a matrix must have a
    gradient on all of them, or on none.
    """

    def __init__(self, matrices, lr, momentum=0.95, weight_decay=0.01):
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            for matrix in group["params"]:
                is_split = isinstance(matrix, DTensor) and matrix.placements == (Shard(0),)
                if not is_split or matrix.ndim != 2 or matrix.device_mesh.size() != dist.get_world_size():
                    raise ValueError("Muon needs matrices whose rows fully_shard has split over all processes")

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None, "a closure is not supported"  # torch passes None when it saves or loads the state
        n = dist.get_world_size()
        for group in self.param_groups:
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            matrices.sort(key=torch.numel, reverse=True)  # so that N neighbours take about the same time
            for start in range(0, len(matrices), n):
                self.step_together(matrices[start : start + n], group)

    def step_together(self, matrices, group):
        """Step up to N matrices. Rank i orthogonalizes matrix i."""
        directions = [self.direction(matrix, group["momentum"]) for matrix in matrices]  # shards
        updates = orthogonalize_sharded(directions, [matrix.shape for matrix in matrices])
        for matrix, update in zip(matrices, updates, strict=True):
            rows, columns = matrix.shape
            shard = matrix.to_local()
            shard.mul_(1 - group["lr"] * group["weight_decay"])
            shard.sub_(update, alpha=group["lr"] * max(1, rows / columns) ** 0.5)

    def direction(self, matrix, momentum):
        """Add the gradient to M. Returns this process's shard of (1-μ) G + μ M: (about rows/N, columns)."""
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)  # sharded as the matrix is, in checkpoints too
        buffer = state["momentum_buffer"].to_local()
        grad = matrix.grad.to_local()
        buffer.lerp_(grad, 1 - momentum)  # μ M + (1-μ) G
        return grad.lerp(buffer, momentum)


def orthogonalize_sharded(shards, shapes):
    """`shards` are this process's rows of up to N matrices of these `shapes`. Returns its rows of their U Vᵀ.

    A shape is (rows, columns), and a shard of it about (rows/N, columns).
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    sent_sizes = [shard.numel() for shard in shards]  # shard i to rank i
    sent_sizes += [0] * (n - len(shards))
    received_sizes = [0] * n
    owns_one = rank < len(shapes)
    if owns_one:
        rows, columns = shapes[rank]
        received_sizes = [size * columns for size in shard_sizes(rows)]
    received = all_to_all(torch.cat([shard.flatten() for shard in shards]), sent_sizes, received_sizes)
    if owns_one:
        # (rows · columns,): shards arrive in the order of ranks, which is the order of rows.
        received = orthogonalize(received.view(rows, columns)).flatten()
    updates = all_to_all(received, received_sizes, sent_sizes).split(sent_sizes[: len(shards)])
    return [update.view_as(shard) for update, shard in zip(updates, shards, strict=True)]


def shard_sizes(rows):
    """How many rows each process holds: all the same number, but the last ones fewer, or none."""
    most = math.ceil(rows / dist.get_world_size())
    return [min(most, max(0, rows - rank * most)) for rank in range(dist.get_world_size())]


def all_to_all(flat, sent_sizes, received_sizes):
    """Send the first sent_sizes[0] elements to rank 0, the next ones to rank 1, … Rank r sends received_sizes[r]."""
    result = flat.new_empty(sum(received_sizes))
    torch_dist.all_to_all_single(result, flat, received_sizes, sent_sizes)
    return result


def orthogonalize(matrix):
    """About U Vᵀ for U S Vᵀ: five steps bring singular values above 0.003 of the Frobenius norm between 0.68 and 1.2.

    The coefficients are Keller Jordan's: https://kellerjordan.github.io/posts/muon/. The polynomial is steep at 0, so
    few steps suffice, but it does not converge to 1. torch.optim.Muon computes it in bfloat16, which is faster on GPUs.
    Here it has the matrix's own type, because it magnifies rounding about a hundredfold: in bfloat16 the updates of N
    processes and of one would differ by up to 1 %.
    """
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalize(matrix.T).T  # so that x xᵀ is small
    x = matrix / matrix.norm().clamp(min=1e-7)  # all singular values are at most 1
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


# ---- training -----------------------------------------------------------------------------------------------------


def make_optimizers(model, lr, muon_lr):
    """Muon for the blocks' matrices, and AdamW for the rest, with embeddings and the head among them."""
    matrices, rest = split_params(model)
    return Muon(matrices, lr=muon_lr), torch.optim.AdamW(rest, lr=lr, fused=True)


def split_params(model):
    """Two lists of parameters to train: the blocks' matrices, and the rest."""
    matrices = [param for param in model.blocks.parameters() if param.ndim == 2 and param.requires_grad]
    chosen = set(matrices)
    rest = [param for param in model.parameters() if param not in chosen and param.requires_grad]
    return matrices, rest


def train(model, optimizers, data, args):
    """Returns the loss of every step of this run over all processes, (steps,)."""
    muon, adamw = optimizers
    saver = checkpoint_sharded.Saver(model, optimizers, args, {**data.settings(), "--muon-lr": args.muon_lr})
    progress = gpt.Progress(model, data, args, saver.first_step)
    for step in range(saver.first_step, args.steps):
        x, y = data.batch(step)
        for optimizer in optimizers:
            # After an evaluation the root is still gathered, and model.zero_grad() would miss its shards.
            optimizer.zero_grad()
        loss = gpt.loss_fn(model(x), y)
        loss.backward()
        if args.clip:
            # The gradients are DTensors, so this is the norm over all processes.
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        muon.step()
        adamw.step()
        progress(step, loss)
        saver.save_if_due(step + 1)
    return progress.losses


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = gpt.make_parser(__doc__)
    parser.add_argument("--muon-lr", type=options.positive_number, default=0.02, help="learning rate of the matrices")
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
    model = make_sharded_model(args)
    gpt.report_held(model.parameters())
    train(model, make_optimizers(model, args.lr, args.muon_lr), data, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
