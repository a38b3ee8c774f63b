"""Pass keys and values around a ring: the minimum working example of ring attention, a form of context parallelism.

Every process has the whole model and its share, T/N bytes, of every sequence of the batch. Only attention needs the
other shares. Each process keeps its queries. Keys and values travel from rank to rank, and are sent on while attention
to them is computed. On rank r of N = 4:

    step          0                 1                  2                  3
    compute       own keys          keys of r-1        keys of r-2        keys of r-3
    meanwhile     own -> r+1        r-1's -> r+1       r-2's -> r+1

Attention to one block of keys gives a result and, per query, the log-sum-exp (lse) of its scores. Two blocks a and b
merge into attention to both:

    lse = log(exp(lse_a) + exp(lse_b))        out = out_a + sigmoid(lse_b - lse_a) · (out_b - out_a)

Under the causal mask later queries see more keys. So a sequence is cut into 2·N pieces, and rank r has pieces r and
2·N-1-r (a zigzag). Then all ranks have the same work in every step. With N = 2:

                         keys of rank 0    keys of rank 1
                           0       3         1       2
    queries          0     c       .         .       .       c  the same piece: causal mask
    of rank 0        3     x       c         x       x       x  an earlier piece: no mask
                                                             .  a later piece: skipped
    queries          1     x       .         c       .
    of rank 1        2     x       .         x       c

The backward pass needs only the final out and lse, so a process saves nothing of other shares. It sends keys and values
around again, followed by their gradients.

Choose this script over min_CP.py if there are more processes than heads, or if sending takes long: the computation
that hides it grows with T² and the bytes with T. With enough heads and fast links choose Ulysses in min_CP.py, which
sends fewer bytes.

Cost per process, for P float32 parameters, L layers of width D, B sequences of T bytes, N processes: 16·P bytes, as
with DDP, and 1/N of the activations. Each step sends DDP's 2·(N-1)/N · 4·P bytes. In each layer keys and values make
N-1 hops in forward and in backward, and their gradients N hops. So attention sends (3·N-2) · 8·L·B·T·D/N bytes, where
Ulysses sends (N-1)/N · 32·L·B·T·D/N.

    python min_CP_ring.py --length 8192         # one process per visible GPU, or one on the CPU
    python min_CP_ring.py --nproc 2             # two processes
    python min_CP_ring.py --nproc 4 --heads 1   # more processes than heads

It prints lines of loss, speed and memory: `step 400/400 | loss 2.2035 | held-out 2.2545 | …`.
"""

import functools
import math

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import distributed as dist
import gpt
import options


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries to the keys and values of all ranks.

    q, k and v cover this rank's share: (batch, heads, positions, head width). The result has the same shape. `group`
    is a group of all ranks. For 16-bit types, sum `out`, `lse` and the gradients in float32.
    """

    @staticmethod
    def forward(ctx, q, k, v, group):
        ctx.group = group
        for step, (block_k, block_v) in enumerate(around_the_ring(torch.stack([k, v]), group)):
            queries, keys = unmasked(step, q.shape[2])
            block_out, block_lse = attend_to_block(
                q[:, :, queries], block_k[:, :, keys], block_v[:, :, keys], causal=step == 0
            )
            if step == 0:  # its own keys, which all queries see
                out, lse = block_out, block_lse
            else:
                merge(out[:, :, queries], lse[:, :, queries], block_out, block_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        kv = torch.stack([k, v])
        grad_q = torch.zeros_like(q)
        grad_kv = torch.zeros_like(kv)
        grad_hop = None  # the first step has no transfer to wait for: no rank has added anything yet
        for step, (block_k, block_v) in enumerate(around_the_ring(kv, ctx.group)):
            queries, keys = unmasked(step, q.shape[2])
            block_grad_q, block_grad_k, block_grad_v = gradients_of_block(
                grad[:, :, queries],
                q[:, :, queries],
                block_k[:, :, keys],
                block_v[:, :, keys],
                out[:, :, queries],
                lse[:, :, queries],
                causal=step == 0,
            )
            grad_q[:, :, queries] += block_grad_q
            if grad_hop:
                grad_kv = finish_hop(grad_hop)  # what earlier ranks have added for the same keys and values
            grad_kv[:, :, :, keys] += torch.stack([block_grad_k, block_grad_v])
            grad_hop = start_hop(grad_kv, ctx.group)  # travels while the next block is computed
        grad_k, grad_v = finish_hop(grad_hop)  # after N hops each gradient is with its owner
        return grad_q, grad_k, grad_v, None


def around_the_ring(kv, group):
    """Yields keys and values of the ranks r, r-1, r-2, … The next ones travel while the caller computes."""
    for _ in range(dist.get_world_size() - 1):
        hop = start_hop(kv, group)
        yield kv
        kv = finish_hop(hop)
    yield kv


def start_hop(tensor, group):
    """Start to send `tensor` to the next rank and to receive the previous rank's. `finish_hop` waits for both."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    send = torch_dist.P2POp(torch_dist.isend, tensor, (rank + 1) % world_size, group)
    receive = torch_dist.P2POp(torch_dist.irecv, received, (rank - 1) % world_size, group)
    return received, torch_dist.batch_isend_irecv([send, receive])


def finish_hop(hop):
    """Wait for the transfers of `start_hop`; returns what the previous rank has sent."""
    received, transfers = hop
    for transfer in transfers:
        transfer.wait()
    return received


def unmasked(step, length):
    """Which of this rank's queries see which keys of rank r - step. Both ranks have `length` positions, two pieces."""
    everything = slice(None)
    first_piece = slice(0, length // 2)
    second_piece = slice(length // 2, None)
    if step == 0:  # its own keys: position i sees the positions up to i
        return everything, everything
    if step <= dist.get_rank():  # an earlier rank: its pieces lie before and after both of this rank's
        return everything, first_piece
    return second_piece, everything  # a later rank: its pieces lie between this rank's


def merge(out, lse, block_out, block_lse):
    """Add attention to this block's keys to out and lse, in place. No exponential can overflow."""
    weight = torch.sigmoid(block_lse - lse)
    out += weight[..., None] * (block_out - out)
    lse.copy_(torch.logaddexp(lse, block_lse))


# ---- attention to one block of keys -------------------------------------------------------------------------------
# F.scaled_dot_product_attention does not give the lse, so its kernels are called here. Not yet tried on a GPU.


def attend_to_block(q, k, v, causal):
    """Returns out, and lse (batch, heads, queries)."""
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
    *grads, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad,
        q,
        k,
        v,
        attn_bias=None,
        out=out,
        logsumexp=F.pad(lse, (0, padding), value=math.inf).contiguous(),
        philox_seed=no_dropout,
        philox_offset=no_dropout,
        dropout_p=0.0,
        grad_input_mask=[True, True, True, False],
        is_causal=causal,
    )
    return grads


# ---- training -----------------------------------------------------------------------------------------------------


def parallelize(model):
    """Let attention reach all shares, and let DDP average the gradients. In one process the model stays as it is."""
    if dist.get_world_size() > 1:
        # In the job's own group each hop would wait in line behind the gradients that DDP reduces meanwhile.
        group = torch_dist.new_group()

        def attend(q, k, v):
            return RingAttention.apply(q, k, v, group)

        for block in model.blocks:
            block.attention.attend = attend
    return dist.prepare_ddp_model(model, gradient_as_bucket_view=True)  # needs no copy of the gradients


def local_positions(length, device):
    """The positions of this rank's share in a sequence of `length`: two of 2·N pieces, dealt in a zigzag."""
    pieces = torch.arange(length, device=device).chunk(2 * dist.get_world_size())
    first = dist.get_rank()
    return torch.cat([pieces[first], pieces[-1 - first]])


def local_loss(model, x, y):
    """The loss of this process's share. Shares are equally long, so the mean over processes is the batch's loss."""
    positions = local_positions(x.shape[1], x.device)
    return gpt.loss_fn(model(x[:, positions], positions), y[:, positions])


def train(model, optimizer, text, held_out, args):
    """Returns the loss of every step over the whole batch, (steps,)."""
    progress = gpt.Progress(functools.partial(local_loss, model), text, held_out, args)
    for step in range(args.steps):
        x, y = gpt.batch(text, step, args.global_batch_size, args.length, args.seed, dist.get_device())
        optimizer.zero_grad()
        loss = local_loss(model, x, y)
        loss.backward()
        if args.clip:  # DDP has averaged the gradients, so every rank finds the same norm
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        progress(loss)
    return progress.losses


def parse_args():
    parser = options.ArgumentParser(__doc__)
    gpt.add_model_options(parser)
    args = parser.parse_args()
    gpt.check_model_options(parser, args, length=(2 * args.nproc, "twice the number of processes"))
    return args


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs: far faster matrix products, with 10 bits of mantissa
    text, held_out = gpt.load_text()
    torch.manual_seed(args.seed)
    model = gpt.GPT(args.layers, args.width, args.heads, args.length).to(dist.get_device())
    gpt.report_held(model.parameters(), sum(param.numel() for param in model.parameters()))
    model = parallelize(model)
    torch.manual_seed(args.seed + dist.get_rank())  # this model has no dropout; in yours, each process draws its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, text, held_out, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
