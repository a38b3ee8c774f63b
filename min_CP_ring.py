"""Pass keys and values around a ring: ring attention, a form of context parallelism.

Every process has the whole model and its share, 1/N, of every sequence of the batch. Only attention needs the other
shares. Each process keeps its queries. In step s it computes attention to the keys of the rank s places before it,
which that rank sends to it directly. Meanwhile the keys and values of the next step travel. On rank r of N = 4:

    step          0                 1                  2                  3
    compute       own keys          keys of r-1        keys of r-2        keys of r-3
    meanwhile     own -> r+1        own -> r+2         own -> r+3

Attention to one block of keys gives a result and, per query, the log-sum-exp (lse) of its scores. Blocks a and b merge:

    lse = log(exp(lse_a) + exp(lse_b))        out = out_a + sigmoid(lse_b - lse_a) · (out_b - out_a)

Later queries see more keys. So a sequence is cut into 2·N pieces, and rank r has pieces r and 2·N-1-r (a zigzag). Then
all ranks have the same work in every step. With N = 2 (c: causal mask, x: no mask, .: a later piece, skipped):

                              keys of rank 0: 0    3      of rank 1: 1    2
    queries of rank 0:    0                   c    .                 .    .
                          3                   x    c                 x    x
    queries of rank 1:    1                   x    .                 c    .
                          2                   x    .                 x    c

Choose it over min_CP.py for more processes than heads, or where sending is slow: the computation that hides it grows
with T², the bytes with T. min_CP_packed.py packs documents. torch's context_parallel has no causal kernel on CPUs.

Cost per process, for P float32 parameters, L layers of width D, B sequences of T bytes: 16·P bytes as with DDP, and 1/N
of the activations. Each step sends DDP's 2·(N-1)/N · 4·P bytes, and 3·(N-1) · 8·L·B·T·D/N for attention.

    python min_CP_ring.py --nproc 2             # two processes; without --nproc, all GPUs
    python min_CP_ring.py --nproc 4 --heads 1   # more processes than heads
"""

import math
import typing

import torch
import torch.distributed as torch_dist
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import distributed as dist
import gpt
from min_CP import train

# ---- the ring -----------------------------------------------------------------------------------------------------


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries to the keys and values of all ranks.

    q, k and v cover this rank's share: (sequences, heads, positions, head width). The result has the same shape. `plan`
    comes from `make_plan`, and `group` is a group of all ranks. For float32 and float64 only: in 16 bits the sums would
    lose digits.
    """

    @staticmethod
    def forward(ctx, q, k, v, plan, group):
        if q.dtype not in (torch.float32, torch.float64):
            raise dist.DistributedError(f"RingAttention takes float32 and float64, not {q.dtype}: leave out autocast")
        ctx.plan = plan
        ctx.group = group
        out = torch.zeros_like(q)
        lse = torch.full_like(q[..., 0], -math.inf)  # (sequences, heads, positions)
        for step, (step_k, step_v) in enumerate(around_the_ring(torch.stack([k, v]), plan, group)):
            for mine, theirs in plan[step].blocks:
                block_out, block_lse = attend_to_block(q[mine], step_k[theirs], step_v[theirs], causal=step == 0)
                merge(out[mine], lse[mine], block_out, block_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        grad_q = torch.zeros_like(q)
        grad_kv = torch.zeros_like(torch.stack([k, v]))
        hop = torch.zeros_like(grad_kv), []  # nothing has travelled yet
        for step, (step_k, step_v) in enumerate(around_the_ring(torch.stack([k, v]), ctx.plan, ctx.group)):
            step_grad = torch.zeros_like(grad_kv)
            for mine, theirs in ctx.plan[step].blocks:
                block_grad_q, block_grad_k, block_grad_v = gradients_of_block(
                    grad[mine], q[mine], step_k[theirs], step_v[theirs], out[mine], lse[mine], causal=step == 0
                )
                grad_q[mine] += block_grad_q
                step_grad[0][theirs] += block_grad_k
                step_grad[1][theirs] += block_grad_v
            grad_kv += finish_hop(hop)  # it has travelled while this step was computed
            hop = start_hop(step_grad, -step, ctx.plan[step].receives, ctx.plan[step].sends, ctx.group)  # to the owner
        grad_kv += finish_hop(hop)
        return grad_q, *grad_kv, None, None


def around_the_ring(kv, plan, group):
    """Yields own keys and values, then the keys and values of ranks r-1, r-2, … The next ones travel meanwhile.

    Each is as `kv`: (2, sequences, heads, positions, head width).
    """
    step_kv = kv
    for step in range(1, len(plan)):
        hop = start_hop(kv, step, plan[step].sends, plan[step].receives, group)
        yield step_kv
        step_kv = finish_hop(hop)
    yield step_kv


def start_hop(tensor, distance, sends, receives, group):
    """Start to send `tensor` to the rank `distance` places on, and to receive from the rank as many places before.

    What a rank `sends` the other one `receives`: if nobody needs it, both leave it out. Give `finish_hop` the result.
    """
    if distance == 0:
        return tensor, []
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = torch.zeros_like(tensor)
    operations = []
    if sends:
        operations.append(torch_dist.P2POp(torch_dist.isend, tensor, (rank + distance) % world_size, group))
    if receives:
        operations.append(torch_dist.P2POp(torch_dist.irecv, received, (rank - distance) % world_size, group))
    transfers = torch_dist.batch_isend_irecv(operations) if operations else []
    return received, transfers


def finish_hop(hop):
    """Wait for the transfers of `start_hop`; returns what was received, or zeros."""
    received, transfers = hop
    for transfer in transfers:
        transfer.wait()
    return received


def merge(out, lse, block_out, block_lse):
    """Add attention to this block's keys to out and lse, in place. No exponential can overflow."""
    weight = torch.sigmoid(block_lse - lse)  # 1 for the first block, because lse is -inf
    out += weight[..., None] * (block_out - out)
    lse.copy_(torch.logaddexp(lse, block_lse))


# ---- attention to one block of keys -------------------------------------------------------------------------------
# F.scaled_dot_product_attention does not give the lse, so its kernels are called here.


def attend_to_block(q, k, v, causal):
    """Returns out, (sequences, heads, queries, head width), and lse, (sequences, heads, queries)."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal)
    out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_bias=None, compute_log_sumexp=True, is_causal=causal
    )
    return out, lse[:, :, : q.shape[2]]  # it is padded to a multiple of 32 queries


def gradients_of_block(grad, q, k, v, out, lse, causal):
    """The gradients of q, k and v, where `grad`, `out` and `lse` are of attention to all keys.

    So exp(scores - lse) is this block's part of the softmax over all keys.
    """
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, dropout_p=0.0, is_causal=causal
        )
    padding = -lse.shape[2] % 32  # the kernel reads lse up to a multiple of 32 queries
    no_dropout = torch.zeros((), dtype=torch.long, device=q.device)
    lse = F.pad(lse, (0, padding), value=math.inf).contiguous()
    needed = [True, True, True, False]  # no gradient of a bias, which is None
    *grads, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, lse, no_dropout, no_dropout, 0.0, needed, is_causal=causal
    )
    return grads


# ---- who sees what ------------------------------------------------------------------------------------------------


class Step(typing.NamedTuple):
    """What this rank does in one step of the ring. min_CP_packed.py has more blocks, and leaves out some transfers."""

    blocks: list  # pairs of indices (sequences, heads, positions): these queries see these keys
    sends: bool = True  # does the rank `step` places on need this rank's keys?
    receives: bool = True  # does this rank need the keys of the rank `step` places before?


def make_plan(piece):
    """The steps of this rank, whose share is two pieces of `piece` positions, in the order of the sequence."""
    everything = (slice(None), slice(None), slice(None))
    first_piece = (slice(None), slice(None), slice(piece))
    second_piece = (slice(None), slice(None), slice(piece, None))
    plan = [Step([(everything, everything)])]
    for step in range(1, dist.get_world_size()):
        if step <= dist.get_rank():  # the owner is an earlier rank: its second piece comes after both of this rank's
            plan.append(Step([(everything, first_piece)]))
        else:  # a later rank: this rank's first piece comes before both of the owner's
            plan.append(Step([(second_piece, everything)]))
    return plan


# ---- each rank's share of a sequence; the training loop is min_CP.py's ---------------------------------------------


def parallelize(model, length):
    """Let attention reach the shares of all ranks, for sequences of `length`, and let DDP average the gradients."""
    group = torch_dist.new_group()  # in the job's own group a hop would wait behind the gradients that DDP reduces
    plan = make_plan(length // (2 * dist.get_world_size()))
    for block in model.blocks:
        block.attention.attend = lambda q, k, v: RingAttention.apply(q, k, v, plan, group)
    return dist.prepare_ddp_model(model, gradient_as_bucket_view=True)  # needs no copy of the gradients


def local_positions(length):
    """The positions of this rank's share in a sequence of `length`: two of 2·N pieces, dealt in a zigzag."""
    positions = torch.arange(length)
    first, n_pieces = dist.get_rank(), 2 * dist.get_world_size()
    pieces = [gpt.own_share(positions, (piece, n_pieces)) for piece in (first, n_pieces - 1 - first)]
    return torch.cat(pieces)


def local_loss(model, x, y):
    """The loss of this process's share. Shares are equally long, so the mean over processes is the batch's loss."""
    share = gpt.to_device(local_positions(x.shape[1]), x.device)
    return gpt.loss_fn(model(x[:, share], share), y[:, share])


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = gpt.make_parser(__doc__)
    args = parser.parse_args()
    gpt.check_model_options(parser, args, length=(2 * args.nproc, "twice the number of processes"))
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    gpt.start(args)
    data = gpt.Data(args, share=(0, 1))  # the whole batch; each process takes its share of each sequence
    model = gpt.GPT(gpt.Config.from_args(args), args.seed).to(dist.get_device())
    model = parallelize(model, args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, data, args, local_loss)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
