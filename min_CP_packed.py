"""Ring attention for packed rows: min_CP_ring.py where a row holds several documents, and no document sees another.

Rows are cut from one long text here, and a document ends with a blank line. A row is cut into 2·N pieces, and rank r
has pieces r and 2·N-1-r. A document in two pieces fills every piece between them, so two pieces share at most one. Its
queries in the later piece see all its keys in the earlier piece: between two ranks attention needs no mask. Documents
A to E in a row of 16 positions:

    piece            0       | 1       | 2       | 3                 needs from the other rank
    row              A A A B | B B B C | C C D D | D D D E
    share of rank 0  A A A B |         |         | D D D E           keys of D in piece 2
    share of rank 1          | B B B C | C C D D |                   keys of B in piece 0

A rank sends its keys and values to another rank only if a query there sees one of them. Then it sends its whole share
of all rows, and their gradients come back in backward. Every rank knows where the documents of all shares lie, so
sender and receiver agree without a message.

Choose it if rows pack documents and one row does not fit on a device. If a row fits, choose min_Packing.py, whose
documents need no communication.

Cost per process: memory as min_CP_ring.py, and at most its bytes. If no document is longer than a piece, a rank gets
keys of at most two others. The kernel is called once for each document of each row. If all rows have the same
boundaries, one call serves all rows. Many short documents cost time.

    python min_CP_packed.py --nproc 2             # two processes; without --nproc, all GPUs
    torchrun --standalone --nproc-per-node 2 min_CP_packed.py
"""

import torch
import torch.distributed as torch_dist

import distributed as dist
import gpt
from min_CP import train
from min_CP_ring import RingAttention, Step, local_positions

PADDING = -1  # the document of a position that no document uses, as in min_Packing.py

# ---- who sees what ------------------------------------------------------------------------------------------------


def make_plan(owners):
    """The steps of this rank's ring. `owners`, (rows, length), on the CPU, numbers the document of each position."""
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


class PackedRingGPT(gpt.GPT):
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
    model.group = torch_dist.new_group()
    # All ranks must take part in the first call of a group of NCCL, and not all take part in each hop.
    torch_dist.all_reduce(torch.zeros(1, device=dist.get_device()), group=model.group)
    return dist.prepare_ddp_model(model, gradient_as_bucket_view=True)  # needs no copy of the gradients


def local_loss(model, x, y):
    """The loss of this process's share. Shares are equally long, so the mean over processes is the batch's loss.

    If shares have unequal numbers of targets, divide by the targets of all ranks, as min_Packing.py does.
    """
    x, y = x.cpu(), y.cpu()  # the plan is made there. `gpt.Data` has put them there, so nothing waits
    owners = number_documents(x)
    rows = torch.stack([x, y, torch.arange(x.shape[1]) - owners])  # (3, rows, length)
    tokens, targets, positions = gpt.to_device(rows[:, :, local_positions(x.shape[1])], dist.get_device())
    return gpt.loss_fn(model(tokens, positions, make_plan(owners)), targets)


def number_documents(x):
    """For each byte the place where its document begins, which serves as the document's number: (rows, length).

    A blank line ends a document. The last byte of a document predicts the first byte of the next one, which follows it
    in the text. min_Packing.py, whose documents are unrelated, leaves this target out.
    """
    begins = torch.zeros_like(x)
    newline = x == ord("\n")
    begins[:, 2:] = newline[:, :-2] & newline[:, 1:-1]
    return (torch.arange(x.shape[1]) * begins).cummax(dim=1).values


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = gpt.make_parser(__doc__)
    args = parser.parse_args()
    gpt.check_model_options(parser, args, length=(2 * args.nproc, "twice the number of processes"))
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    gpt.start(args)
    data = gpt.Data(args, share=(0, 1), device="cpu")  # the whole batch; each process takes its share of each row
    model = PackedRingGPT(gpt.Config.from_args(args), args.seed).to(dist.get_device())
    model = parallelize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    train(model, optimizer, data, args, local_loss)


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
