"""Pass keys and values around a ring: ring attention, a form of context parallelism, for rows of packed documents.

Every process has the whole model and its share, 1/N, of every row of the batch. Only attention needs the other shares.
Each process keeps its queries. In step s it computes attention to the keys of the rank s places before it, which that
rank sends to it directly. Meanwhile the keys and values of the next step travel. On rank r of N = 4:

    step          0                 1                  2                  3
    compute       own keys          keys of r-1        keys of r-2        keys of r-3
    meanwhile     own -> r+1        own -> r+2         own -> r+3

Attention to one block of keys gives a result and, per query, the log-sum-exp (lse) of its scores. Two blocks a and b
merge into attention to both:

    lse = log(exp(lse_a) + exp(lse_b))        out = out_a + sigmoid(lse_b - lse_a) · (out_b - out_a)

Under the causal mask later queries see more keys. So a row is cut into 2·N pieces, and rank r has pieces r and 2·N-1-r
(a zigzag). Then all ranks have the same work in every step, if one document fills the row. With N = 2:

                         keys of rank 0    keys of rank 1
                           0       3         1       2
    queries          0     c       .         .       .
    of rank 0        3     x       c         x       x

    queries          1     x       .         c       .
    of rank 1        2     x       .         x       c

    c: the same piece, causal mask    x: an earlier piece, no mask    .: a later piece, skipped

A row may pack several documents, and no document sees another: see "packed rows" below.

The backward pass needs only the final out and lse, so a process saves nothing of other shares. It receives the same
keys and values again, and returns their gradients to the owner. The ring of the paper (arXiv:2310.01889) hands all keys
on from neighbour to neighbour. Here each rank sends its keys to each rank that needs them.

Choose this script over min_CP.py if there are more processes than heads, if rows pack documents, or if sending takes
long: the computation that hides it grows with T² and the bytes with T. With enough heads and fast links choose Ulysses
in min_CP.py, which sends fewer bytes of one long document.

Cost per process, for P float32 parameters, L layers of width D, B rows of T bytes, N processes: 16·P bytes, as with
DDP, and 1/N of the activations. Each step sends DDP's 2·(N-1)/N · 4·P bytes. Attention sends up to
3·(N-1) · 8·L·B·T·D/N bytes: keys and values in forward and in backward, and their gradients, to all other ranks that
share a document. Ulysses sends (N-1)/N · 32·L·B·T·D/N. A document no longer than a piece is on at most two ranks. Each
document of a row is a call of the kernel by itself, unless all rows are alike: many short ones cost GPUs time.

    python min_CP_ring.py --length 8192         # one process per visible GPU, or one on the CPU
    python min_CP_ring.py --nproc 2             # two processes
    python min_CP_ring.py --nproc 4 --heads 1   # more processes than heads
    python min_CP_ring.py --nproc 2 --whole     # one document per row, to compare

It prints the loss, tokens per second and memory every --log-every steps, finally
`step 400/400 | loss 2.2068 | held-out 2.1964 | …`.
"""

import dataclasses
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

PADDING = -1  # the owner of a position that no document uses, as in min_Packing.py

# ---- the ring -----------------------------------------------------------------------------------------------------


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries to the keys and values of all ranks, within each document.

    q, k and v cover this rank's share: (rows, heads, positions, head width). The result has the same shape. `plan`
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
        lse = torch.full_like(q[..., 0], -math.inf)  # (rows, heads, positions)
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
        hop = None
        for step, (step_k, step_v) in enumerate(around_the_ring(torch.stack([k, v]), ctx.plan, ctx.group)):
            step_grad = torch.zeros_like(grad_kv)
            for mine, theirs in ctx.plan[step].blocks:
                block_grad_q, block_grad_k, block_grad_v = gradients_of_block(
                    grad[mine], q[mine], step_k[theirs], step_v[theirs], out[mine], lse[mine], causal=step == 0
                )
                grad_q[mine] += block_grad_q
                step_grad[0][theirs] += block_grad_k
                step_grad[1][theirs] += block_grad_v
            if hop:
                grad_kv += finish_hop(hop)  # it has travelled while this step was computed
            if step == 0:
                grad_kv += step_grad  # of this rank's own keys and values
            else:  # back to their owner
                hop = start_hop(step_grad, -step, ctx.plan[step].receives, ctx.plan[step].sends, ctx.group)
        if hop:
            grad_kv += finish_hop(hop)
        grad_k, grad_v = grad_kv
        return grad_q, grad_k, grad_v, None, None


def around_the_ring(kv, plan, group):
    """Yields own keys and values, then those of ranks r-1, r-2, … The next ones travel while the caller computes.

    Each is as `kv`: (2, rows, heads, positions, head width).
    """
    step_kv = kv
    for step in range(1, len(plan)):
        hop = start_hop(kv, step, plan[step].sends, plan[step].receives, group)
        yield step_kv
        step_kv = finish_hop(hop)
    yield step_kv


def start_hop(tensor, distance, sends, receives, group):
    """Start to send `tensor` to the rank `distance` places on, and to receive from the rank as many places before.

    What a rank `sends` the other one `receives`: if nobody needs it, both leave it out. `finish_hop` waits for both.
    """
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
    """Returns out, (rows, heads, queries, head width), and lse, (rows, heads, queries)."""
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


# ---- packed rows: who sees what (skip it on a first reading) ------------------------------------------------------
#
# A row packs documents of any lengths, and no document sees another. Here rows are cut from one long text, and a
# document ends with a blank line. Rows of min_Packing.py work too: `make_plan` needs their OWNERS. Two different pieces
# share at most one document: the one that covers all between them. All its queries in the later piece see all its keys
# in the earlier one, so attention needs no mask. Here documents A to E fill a row of 16 positions:
#
#     piece            0       | 1       | 2       | 3                 keys seen on the other rank
#     row              A A A B | B B B C | C C D D | D D D E
#     share of rank 0  A A A B |         |         | D D D E           D sees D
#     share of rank 1          | B B B C | C C D D |                   B sees B
#
# If two ranks share no document in any row, nothing is sent between them. If they share one, the whole share of all
# rows is sent. Every rank knows where the documents of all shares lie, so sender and receiver agree without a message.


@dataclasses.dataclass
class Step:
    """What this rank does in one step of the ring."""

    blocks: list  # pairs of indices (rows, heads, positions): these queries see these keys, with all heads
    sends: bool  # does the rank `step` places on need this rank's keys?
    receives: bool  # does this rank need the keys of the rank `step` places before?


def make_plan(owners):
    """The steps of this rank. `owners`, (rows, length), on the CPU, numbers the document of each position."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    documents = find_documents(owners)
    piece = gpt.own_share(owners, (rank, 2 * world_size)).shape[1]  # positions
    plan = []
    for step in range(world_size):
        blocks = visible(documents, piece, rank, (rank - step) % world_size)
        blocks_of_receiver = visible(documents, piece, (rank + step) % world_size, rank)
        plan.append(Step(blocks, sends=bool(blocks_of_receiver), receives=bool(blocks)))
    return plan


def find_documents(owners):
    """Pairs: a slice of rows that are packed alike, and the (start, end) of each of their documents.

    If all rows are alike, as with one document in each, attention computes them together.
    """
    spans = [find_spans(row) for row in owners]
    if all(others == spans[0] for others in spans):
        return [(slice(None), spans[0])]
    return [(slice(row, row + 1), of_row) for row, of_row in enumerate(spans)]


def find_spans(owners):
    """The (start, end) of each document of a row."""
    numbers, lengths = owners.unique_consecutive(return_counts=True)
    ends = lengths.cumsum(0)
    spans = torch.stack([numbers, ends - lengths, ends], dim=1).tolist()
    return [(start, end) for number, start, end in spans if number != PADDING]


def visible(documents, piece, reader, owner):
    """Which queries of rank `reader` see which keys of rank `owner`: pairs of indices (rows, heads, positions).

    All these queries see all these keys, except that a mask is needed if reader and owner are the same rank. A share is
    two pieces of `piece` positions.
    """
    blocks = []
    for rows, spans in documents:
        for start, end in spans:
            first_query, last_query = place(start, piece, reader), place(end, piece, reader)
            first_key, last_key = place(start, piece, owner), place(end, piece, owner)
            if owner < reader:
                last_key = min(last_key, piece)  # the owner's second piece comes after both of the reader's
            if owner > reader:
                first_query = max(first_query, piece)  # the reader's first piece comes before both of the owner's
            if first_query < last_query and first_key < last_key:
                mine = (rows, slice(None), slice(first_query, last_query))
                theirs = (rows, slice(None), slice(first_key, last_key))
                blocks.append((mine, theirs))
    return blocks


def place(position, piece, rank):
    """How many positions of a rank's share come before `position` of the row."""
    start_of_first = rank * piece
    start_of_second = (2 * dist.get_world_size() - 1 - rank) * piece
    in_first = min(max(position - start_of_first, 0), piece)
    in_second = min(max(position - start_of_second, 0), piece)
    return in_first + in_second


# ---- training -----------------------------------------------------------------------------------------------------


class RingGPT(gpt.GPT):
    """A GPT on this rank's share of each row. `positions` count from the start of each document."""

    group = None  # set by `parallelize`

    def forward(self, tokens, positions, plan):
        def attend(q, k, v):
            return RingAttention.apply(q, k, v, plan, self.group)

        for block in self.blocks:
            block.attention.attend = attend
        return super().forward(tokens, positions)


def parallelize(model):
    """Give attention a group of its own, and let DDP average the gradients."""
    if dist.get_world_size() > 1:
        # In the job's own group each hop would wait in line behind the gradients that DDP reduces meanwhile.
        model.group = torch_dist.new_group()
        # All ranks must take part in the first call of a group of NCCL, and not all take part in each hop.
        torch_dist.all_reduce(torch.zeros(1, device=dist.get_device()), group=model.group)
    return dist.prepare_ddp_model(model, gradient_as_bucket_view=True)  # needs no copy of the gradients


def local_positions(length):
    """The positions of this rank's share in a row of `length`: two of 2·N pieces, dealt in a zigzag."""
    positions = torch.arange(length)
    first, n_pieces = dist.get_rank(), 2 * dist.get_world_size()
    pieces = [gpt.own_share(positions, (piece, n_pieces)) for piece in (first, n_pieces - 1 - first)]
    return torch.cat(pieces)


def local_loss(model, x, y, whole=False):
    """The loss of this process's share. Shares are equally long, so the mean over processes is the batch's loss.

    If shares have unequal numbers of targets, compute the fraction of min_Packing.py instead.
    """
    x, y = x.cpu(), y.cpu()  # the plan is made there. Training's batches are there already, so nothing waits
    owners = number_documents(x, whole)
    rows = torch.stack([x, y, torch.arange(x.shape[1]) - owners])  # (3, rows, length)
    tokens, targets, positions = gpt.to_device(rows[:, :, local_positions(x.shape[1])], dist.get_device())
    return gpt.loss_fn(model(tokens, positions, make_plan(owners)), targets)


def number_documents(x, whole=False):
    """For each byte the place where its document begins, which serves as the document's number: (rows, length).

    A blank line ends a document, unless rows are `whole`. The last byte of a document predicts the first byte of the
    next one, which follows it in the text. min_Packing.py, whose documents are unrelated, leaves this target out.
    """
    begins = torch.zeros_like(x)
    if not whole:
        newline = x == ord("\n")
        begins[:, 2:] = newline[:, :-2] & newline[:, 1:-1]
    return (torch.arange(x.shape[1]) * begins).cummax(dim=1).values


def train(model, optimizer, data, args):
    """Returns the loss of every step over all processes, (steps,)."""
    progress = gpt.Progress(model, data, args, loss_of=functools.partial(local_loss, whole=args.whole))
    for step in range(args.steps):
        x, y = data.batch(step)
        optimizer.zero_grad()
        loss = local_loss(model, x, y, args.whole)
        loss.backward()
        if args.clip:  # DDP has averaged the gradients, so every rank finds the same norm
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        progress(step, loss)
    return progress.losses


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = options.ArgumentParser(__doc__)
    gpt.add_model_options(parser)
    parser.add_argument("--whole", action="store_true", help="let each row be one document, instead of paragraphs")
    args = parser.parse_args()
    gpt.check_model_options(parser, args, length=(2 * args.nproc, "twice the number of processes"))
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    gpt.start(args)
    data = gpt.Data(args, share=(0, 1), device="cpu")  # the whole batch; each process takes its share of each row
    model = RingGPT(gpt.Config.from_args(args), args.seed).to(dist.get_device())
    gpt.report_held(model.parameters())
    model = parallelize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, data, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
