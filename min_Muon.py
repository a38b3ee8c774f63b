"""Shard an optimizer that needs whole matrices: Muon, with each matrix on one process.

Muon makes a step of equal size in all directions of a weight matrix W (rows x columns), which has the gradient G and
the momentum M:

    M ← μ M + (1-μ) G                               the average of the last gradients
    U S Vᵀ = (1-μ) G + μ M                          as singular values S and directions U and V (Nesterov's momentum)
    W ← (1 - η λ) W - η √max(1, rows/columns) U Vᵀ  with the learning rate η and the weight decay λ

`orthogonalize` computes about U Vᵀ by matrix products alone (Newton-Schulz). Each of its elements depends on the whole
matrix, so it cannot be computed from a shard, nor from the gradient of a part of the batch. Therefore each matrix has
an owner. Only this process receives the matrix's averaged gradient, holds its momentum and steps it. All matrices are
views of one flat vector, which is cut into N parts of equal length. Part r holds the matrices of process r. With N = 2
and two blocks, this is a step of process 1:

    gradients    | up0  up1  qkv0  out0 | down0  down1  qkv1  out1 |    computed on this process's share of the batch
                                                     |     1. reduce-scatter: part 1, averaged over all processes
                                        | down0  down1  qkv1  out1 |
                                                     |     2. Muon steps the matrices of part 1, each of them whole
                                        | down0  down1  qkv1  out1 |
                                                     |     3. all-gather: every process receives the new matrices
    matrices     | up0  up1  qkv0  out0 | down0  down1  qkv1  out1 |    the same on every process again

The rest of the parameters are embeddings, norms, biases and the head. AdamW steps them on every process, as with DDP.

Choose it over AdamW (min_DDP.py, min_ZeRO.py) to reach a lower loss in the same number of steps. To compare, run
`python min_ZeRO.py`: it trains the same model on the same batches with AdamW. Muon needs a learning rate of its own,
and a scheduler of its own. min_ZeRO.py shards optimizers that treat every element by itself. There a part may end in
the middle of a matrix, so all parts are equally long.

Cost per process, for P float32 parameters, R of them outside of the matrices, on N processes. The longest part has L
parameters, and all parts are padded to its length:
    memory    8·(N·L + R) bytes of parameters and gradients, up to 4·L of momentum, and 8·R of Adam's state. With equal
              parts L = (P-R)/N, so this is 8·P + 4·(P-R)/N + 8·R. DDP with AdamW needs 16·P. More processes than
              matrices make N·L much larger than P-R.
    sent      8·(N-1)·L bytes in each step for the matrices and 8·(N-1)/N · R for the rest. With equal parts the sum is
              what DDP sends. It is sent after backward.
    compute   Newton-Schulz adds at most 5·m/B to the work of forward and backward, for matrices whose smaller side is
              m and global batches of B tokens. The processes share it.

    python min_Muon.py --nproc 2                            # two GPUs, or two processes on the CPU
    python min_Muon.py --nproc 2 --snapshot-path run.pt     # saves; run it again with any --nproc to resume
    torchrun --standalone --nproc-per-node 2 min_Muon.py    # two processes, started by torchrun

The last line of two processes is `momentum held: 786,432 of 1,572,864 bytes (0.500)`.
"""

import torch
import torch.distributed as torch_dist
from torch import nn

import checkpoint
import distributed as dist
import gpt
import options

# Before torch 2.13 they have other names.
all_gather_single = getattr(torch_dist, "all_gather_single", torch_dist.all_gather_into_tensor)
reduce_scatter_single = getattr(torch_dist, "reduce_scatter_single", torch_dist.reduce_scatter_tensor)


def take_step(muon, adamw, clip=None):
    """Step all parameters, after backward. `clip`, if given, is the largest norm of all gradients together."""
    muon.reduce_scatter_gradients()  # 1. each process receives the gradients of its own matrices
    gpt.reduce_gradients(params_of(adamw), "avg")  # every process receives the gradients of the rest
    if clip:
        clip_gradients(muon, adamw, clip)
    muon.step()  # 2. each process steps its own matrices
    adamw.step()  # every process steps the rest
    muon.all_gather_matrices()  # 3.


class Muon(torch.optim.Optimizer):
    """Muon for `matrices`: parameters of two dimensions, or groups of them, as torch.optim takes them.

    Each process steps the matrices that it owns and holds only their momentum, except while a snapshot is saved or
    loaded. All processes must hold equal matrices.
    """

    def __init__(self, matrices, lr, momentum=0.95, weight_decay=0.01):
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        trained = [matrix for matrix in params_of(self) if matrix.requires_grad]  # weight decay would change the others
        self.parts = deal(trained, world_size)
        self.flat, self.grad = flatten(self.parts)  # all matrices and all gradients
        self.own = self.flat.chunk(world_size)[rank]  # views of this process's part
        self.own_grad = self.grad.chunk(world_size)[rank]
        self.own_matrices = set(self.parts[rank])
        for matrix in self.own_matrices:
            self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)

    def reduce_scatter_gradients(self):
        if dist.get_world_size() > 1:
            reduce_scatter_single(self.own_grad, self.grad)  # the sum over all processes
            self.own_grad /= dist.get_world_size()

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix in self.own_matrices:
                    self.step_matrix(matrix, group)

    def step_matrix(self, matrix, group):
        buffer = self.state[matrix]["momentum_buffer"]
        buffer.lerp_(matrix.grad, 1 - group["momentum"])  # μ M + (1-μ) G
        update = orthogonalize(matrix.grad.lerp(buffer, group["momentum"]))
        rows, columns = matrix.shape
        update *= max(1, rows / columns) ** 0.5
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.sub_(update, alpha=group["lr"])

    def all_gather_matrices(self):
        if dist.get_world_size() > 1:
            all_gather_single(self.flat, self.own)

    def zero_grad(self):
        self.grad.zero_()  # model.zero_grad() would set the gradients to None: they must stay views of `grad`

    def gather_state(self):
        """Give every process the momentum of all matrices, for a snapshot. What it receives is kept on the CPU."""
        for owner, matrices in enumerate(self.parts):
            for matrix in matrices:
                if owner != dist.get_rank():
                    self.state[matrix]["momentum_buffer"] = torch.empty_like(matrix, device="cpu")
                dist.sync_params([self.state[matrix]["momentum_buffer"]], src=owner)

    def drop_state(self):
        """Free the momentum of the matrices that other processes own, after a snapshot is saved or loaded."""
        for matrix in list(self.state):
            if matrix not in self.own_matrices:
                del self.state[matrix]


def orthogonalize(matrix):
    """About U Vᵀ for U S Vᵀ: five steps bring all but tiny singular values between 0.7 and 1.2.

    The coefficients are Keller Jordan's: https://kellerjordan.github.io/posts/muon/. The polynomial is steep at 0, so
    few steps suffice, but it does not converge to 1. torch.optim.Muon computes it in bfloat16, which is faster on GPUs.
    Here it has the matrix's own type, so that any number of processes gives the same result.
    """
    x = matrix / matrix.norm().clamp(min=1e-7)  # all singular values are at most 1
    is_tall = matrix.shape[0] > matrix.shape[1]
    if is_tall:
        x = x.T  # so that x xᵀ is small
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    if is_tall:
        x = x.T
    return x


# ---- who owns what ------------------------------------------------------------------------------------------------


def split_params(model):
    """Two lists of parameters to train: the blocks' matrices, and the rest, with embeddings and the head among them."""
    matrices = [param for param in model.blocks.parameters() if param.ndim == 2 and param.requires_grad]
    chosen = set(matrices)
    rest = [param for param in model.parameters() if param not in chosen and param.requires_grad]
    return matrices, rest


def deal(matrices, world_size):
    """A list of whole matrices for each process: the largest first, each to the process that has the fewest elements.

    So the longest part has at most 1/N of all elements and one matrix.
    """
    parts = [[] for _ in range(world_size)]
    sizes = [0] * world_size
    for matrix in sorted(matrices, key=lambda matrix: matrix.numel(), reverse=True):
        rank = sizes.index(min(sizes))
        parts[rank].append(matrix)
        sizes[rank] += matrix.numel()
    return parts


def flatten(parts):
    """Move the matrices into one vector and their gradients into another. Returns both, with the matrices as views.

    The matrices of process r lie in part r. Zeros pad each part to the length of the longest.
    """
    if len({matrix.dtype for part in parts for matrix in part}) > 1:
        raise ValueError("the matrices have several types, and one vector has one: use an optimizer for each type")
    part_size = max(sum(matrix.numel() for matrix in part) for part in parts)
    flat = parts[0][0].detach().new_zeros(len(parts) * part_size)
    grad = torch.zeros_like(flat)
    for rank, part in enumerate(parts):
        start = rank * part_size
        for matrix in part:
            stop = start + matrix.numel()
            flat[start:stop] = matrix.detach().flatten()
            matrix.data = flat[start:stop].view_as(matrix)
            matrix.grad = grad[start:stop].view_as(matrix)
            start = stop
    return flat, grad


# ---- gradients ----------------------------------------------------------------------------------------------------


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def clip_gradients(muon, adamw, max_norm):
    """As nn.utils.clip_grad_norm_, by the norm over the matrices of all processes and the rest, which counts once."""
    rest = params_of(adamw)
    rest_norm = nn.utils.get_total_norm([param.grad for param in rest])
    norm = (dist.all_reduce(muon.own_grad.square().sum()) + rest_norm**2).sqrt()
    nn.utils.clip_grads_with_norm_(rest, max_norm, norm)
    muon.own_grad *= (max_norm / (norm + 1e-6)).clamp(max=1)


# ---- training -----------------------------------------------------------------------------------------------------


def train(model, optimizers, text, held_out, args):
    """Returns the loss of every step of this run over all processes."""

    def local_loss(x, y):
        return gpt.loss_fn(model(x), y)  # shares are equal, so the mean over processes is the loss of the batch

    muon, adamw = optimizers
    first_step = 0
    if args.snapshot_path:
        # The snapshot has the momentum of all matrices, so any number of processes can resume from it.
        settings = {**gpt.settings_of(args), "--lr": args.lr, "--muon-lr": args.muon_lr}
        _, first_step = checkpoint.load(args.snapshot_path, model, adamw, muon=muon, settings=settings)
        muon.drop_state()
    if first_step:
        dist.print_primary(f"Resuming at step {first_step}")
    share = (dist.get_rank(), dist.get_world_size())
    progress = gpt.Progress(local_loss, text, held_out, args, first_step, share)
    for step in range(first_step, args.steps):
        x, y = gpt.batch(text, step, args.global_batch_size, args.length, args.seed, dist.get_device(), share)
        muon.zero_grad()
        adamw.zero_grad()
        loss = local_loss(x, y)
        loss.backward()
        take_step(muon, adamw, args.clip)
        progress(loss)
        if args.snapshot_path and (progress.step % args.log_every == 0 or progress.step == args.steps):
            muon.gather_state()
            checkpoint.save(args.snapshot_path, model, adamw, muon=muon, settings=settings, step=progress.step)
            muon.drop_state()
    return progress.losses[first_step:]


def report_state(muon):
    """Print the bytes of momentum on the process with the most, and the bytes of all matrices."""
    held = sum(state["momentum_buffer"].nbytes for state in muon.state.values())
    held = dist.all_reduce(torch.tensor(held, device=dist.get_device()), "max").item()
    total = sum(matrix.nbytes for matrix in params_of(muon))
    dist.print_primary(f"momentum held: {held:,} of {total:,} bytes ({held / total:.3f})")


def parse_args():
    parser = options.ArgumentParser(__doc__)
    gpt.add_model_options(parser)
    parser.add_argument("--muon-lr", type=options.positive_number, default=0.02, help="learning rate of the matrices")
    path_help = "save to this file with each line of progress, and resume from it (default: do not save)"
    parser.add_argument("--snapshot-path", help=path_help)
    args = parser.parse_args()
    gpt.check_model_options(parser, args, batch=(args.nproc, "the number of processes"))
    if args.snapshot_path is not None:
        checkpoint.check_writable("--snapshot-path", args.snapshot_path)
    return args


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs: far faster matrix products, with 10 bits of mantissa
    text, held_out = gpt.load_text()
    torch.manual_seed(args.seed)
    model = gpt.GPT(args.layers, args.width, args.heads, args.length).to(dist.get_device())
    dist.sync_params(model.parameters())  # start from rank 0's weights, as DDP does
    torch.manual_seed(args.seed + dist.get_rank())  # this model has no dropout; in yours, each process draws its own
    matrices, rest = split_params(model)
    muon = Muon(matrices, lr=args.muon_lr)
    adamw = torch.optim.AdamW(rest, lr=args.lr, fused=True)
    train(model, (muon, adamw), text, held_out, args)
    report_state(muon)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
