"""Split the sequence: the minimum working example of context parallelism.

Every process has the whole model and one piece, 1/N, of every sequence of the batch. Embeddings, norms, linear layers
and the loss treat each position by itself, so only attention needs communication. DDP averages the gradients.

--attention ulysses (DeepSpeed Ulysses, arXiv:2309.14509) exchanges positions for heads. Before attention an all-to-all
gives each process the whole sequence of some heads, and after attention another all-to-all reverses the exchange. With
N = 4, these are the processes that hold the q, k and v of each head at each piece of the sequence:

                 before and after: all heads                  during attention: one head
                 of one piece per process                     of all pieces per process

                 piece 0    1    2    3                       piece 0    1    2    3
        head 0         0    1    2    3                             0    0    0    0
        head 1         0    1    2    3      all-to-all             1    1    1    1
        head 2         0    1    2    3      <-------->             2    2    2    2
        head 3         0    1    2    3                             3    3    3    3

There can be no more processes than heads.
--attention all-gather (Llama 3, arXiv:2407.21783) gathers the keys and values of all pieces on every process. It works
for any number of processes, but the process with the last piece has the most work: its queries attend to all pieces.

Choose this script when one sequence with its activations does not fit on one device. With more processes than heads, or
slow links and long sequences, choose min_CP_ring.py. It sends more bytes, but while attention computes.

Cost per process, for P float32 parameters, L layers of width D, B sequences of T bytes, N processes: 16·P bytes, as
with DDP, and 1/N of the activations. Each step sends DDP's 2·(N-1)/N · 4·P bytes. Attention, forward and backward,
sends (N-1)/N · 32·L·B·T·D/N bytes, with all-gather (N-1)/N · 16·L·B·T·D.

    python min_CP.py --nproc 2                           # two processes; without --nproc, all GPUs
    python min_CP.py --nproc 4 --attention all-gather    # four processes, which gather keys and values
"""

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

import distributed as dist
import gpt

# ---- attention over all pieces ------------------------------------------------------------------------------------
#
# q, k and v are (batch, heads, piece, head width), and so is the result.


def ulysses(q, k, v):
    qkv = torch.stack([q, k, v])  # (3, batch, heads, piece, head width)
    q, k, v = exchange(qkv, split=2, join=3)  # all heads of my piece -> my heads of all pieces
    result = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads/N, length, head width)
    return exchange(result, split=2, join=1)  # my heads of all pieces -> all heads of my piece


def exchange(x, split, join):
    """Cut x along dimension `split`, send part r to rank r, and join the received parts along dimension `join`."""
    sent = torch.stack(x.chunk(dist.get_world_size(), split))  # (ranks, …)
    received = AllToAll.apply(sent)
    return torch.cat(received.unbind(), join)


class AllToAll(torch.autograd.Function):
    """Send row r of x to rank r. Row r of the result comes from rank r. Gradients take the same way back."""

    @staticmethod
    def forward(ctx, x):
        result = torch.empty_like(x)
        torch_dist.all_to_all_single(result, x)
        return result

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad.contiguous())


def all_gather(q, k, v):
    kv = torch.stack([k, v])  # (2, batch, heads, piece, head width)
    sent = kv.expand(dist.get_world_size(), *kv.shape).contiguous()  # one copy per rank; backward sums their gradients
    pieces = AllToAll.apply(sent)  # keys and values of all ranks: (ranks, 2, batch, heads, piece, head width)
    k, v = torch.cat(pieces.unbind(), dim=3)  # each (batch, heads, length, head width), in the order of the sequence
    piece = q.shape[2]
    end = (dist.get_rank() + 1) * piece  # where my piece ends in the whole sequence: no query may see further
    mask = causal_lower_right(piece, end)  # (piece, end)
    return F.scaled_dot_product_attention(q, k[:, :, :end], v[:, :, :end], attn_mask=mask)


ATTENTIONS = {"ulysses": ulysses, "all-gather": all_gather}


def parallelize(model, attention):
    """Let attention reach all pieces, and let DDP average the gradients."""
    for block in model.blocks:
        block.attention.attend = ATTENTIONS[attention]
    return dist.prepare_ddp_model(model, gradient_as_bucket_view=True)  # needs no copy of the gradients


# ---- training -----------------------------------------------------------------------------------------------------


def local_loss(model, x, y):
    """The loss of this process's piece. Pieces are equally long, so the mean over processes is the batch's loss."""
    positions = torch.arange(x.shape[1], device=x.device)
    piece = gpt.own_share(positions, (dist.get_rank(), dist.get_world_size()))
    logits = model(x[:, piece], piece)  # positions count from the start of the whole sequence
    return gpt.loss_fn(logits, y[:, piece])


def train(model, optimizer, data, args, loss_of=local_loss):
    """Returns the loss of every step over all processes, (steps,). min_CP_ring.py has another `loss_of`."""
    progress = gpt.Progress(model, data, args, loss_of=loss_of)
    for step in range(args.steps):
        x, y = data.batch(step)
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        if args.clip:  # DDP has averaged the gradients, so every rank finds the same norm
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        progress(step, loss)
    return progress.losses


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = gpt.make_parser(__doc__)
    parser.add_argument("--attention", choices=ATTENTIONS, default="ulysses", help="what the processes exchange")
    args = parser.parse_args()
    processes = (args.nproc, "the number of processes")
    heads = processes if args.attention == "ulysses" else (1, "1")
    gpt.check_model_options(parser, args, heads=heads, length=processes)
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    gpt.start(args)
    data = gpt.Data(args, share=(0, 1))  # the whole batch; each process takes its piece of each sequence
    model = gpt.GPT(gpt.Config.from_args(args), args.seed).to(dist.get_device())
    model = parallelize(model, args.attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, data, args)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
