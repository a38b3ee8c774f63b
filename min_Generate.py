"""Answer the prompts of a file on several processes: share the prompts, split the model, or both (batch inference).

An answer needs no other prompt. So data parallel processes answer their own prompts, and do not communicate. Only if
the model does not fit on one device, several processes compute each answer together, by tensor parallelism (TP):

    --nproc 4 --tensor 1     each of 4 processes holds the whole model and answers a quarter of the prompts
    --nproc 4 --tensor 2     ranks 0 and 1 hold half a model each and answer one half, ranks 2 and 3 the other half

    prefill    all bytes of the prompts at once              -> logits of the first new byte
    decode     one new byte per row, and the KV cache        -> logits of the next byte, until all rows have ended

The answers of a batch are a file: OUTPUT/00000064.jsonl begins with the answer to prompt 64. If a job is killed, the
same command answers the batches whose file is missing, with any --nproc and --tensor. The random numbers of an answer
depend on the seed and the prompt's number alone. So other processes give the same answers, unless rounding tips one.

Under TP, rounding may also differ between the processes of a group. Then they would continue different texts, and no
error would be raised. So the first process of the group chooses each byte, and sends it to the others.

Choose --tensor 1 if the model fits on one device, because TP needs fast links. To serve many users, or models from the
Hugging Face hub, choose vLLM or SGLang. They also admit new prompts while others are being answered.

Cost per process, for P float32 parameters, L layers of width D, and R rows of up to T bytes: 4·P/tensor bytes of
parameters (embeddings, norms and the head are whole) and 8·L·D·R·T/tensor bytes of keys and values. For each new byte
of R rows, TP makes 2·L all-reduces of 4·D·R bytes and a broadcast of 8·R bytes, one after the other.

    python min_Generate.py --nproc 2 --model model.pt --prompts prompts.jsonl             # each answers its own prompts
    python min_Generate.py --nproc 2 --tensor 2 --model model.pt --prompts prompts.jsonl --output other    # two halves
    torchrun --standalone --nproc-per-node 2 min_Generate.py --model model.pt --prompts prompts.jsonl --output third

`python min_GRPO.py --output model.pt` makes a model that sorts digits. Lines of prompts.jsonl are objects like
{"prompt": "31524="}; each gets an "answer". It prints `500 answers | 3,778 new bytes`.
"""

import datetime
import functools
import json
import os
from pathlib import Path

import torch
import torch.distributed as torch_dist
from torch import nn

import checkpoint
import distributed as dist
import gpt
import gpt_generate
import options

STOP = ord("\n")  # the byte that ends an answer

# ---- answer the prompts -------------------------------------------------------------------------------------------


def answer_missing(model, records, choose, args):
    """Answer this process's share of the batches that have no file. Returns the number of new bytes."""
    share = dist.get_rank() // args.tensor
    n_shares = dist.get_world_size() // args.tensor
    n_bytes = 0
    for first in missing_batches(len(records), args)[share::n_shares]:
        batch = records[first : first + args.batch_size]
        prompts = [record["prompt"].encode() for record in batch]
        drawn = [gpt_generate.uniform(f"{args.seed} {first + row}", 1, args.new_bytes) for row in range(len(batch))]
        drawn = gpt.to_device(torch.cat(drawn), dist.get_device())
        tokens, generated, _ = gpt_generate.generate(model, prompts, drawn, STOP, args.temperature, choose=choose)
        answers = gpt_generate.generated_bytes(tokens, generated)
        if dist.get_rank() % args.tensor == 0:  # the others of the group have the same answers
            write(path_of(first, args), batch, answers)
            n_bytes += sum(len(answer) for answer in answers)
            dist.print_primary(f"rank 0 has written {path_of(first, args)}", flush=True)
    return dist.all_reduce(torch.tensor(n_bytes)).item()


def missing_batches(n_prompts, args):
    """The first prompts of the batches without a file. All ranks see the same ones."""
    batches = range(0, n_prompts, args.batch_size)
    return dist.broadcast_object([first for first in batches if not path_of(first, args).exists()])


def path_of(first, args):
    return Path(args.output, f"{first:08}.jsonl")


def write(path, records, answers):
    """After a kill the file is whole, or it is not there. Bytes that are no UTF-8 become U+FFFD."""
    with checkpoint.atomic(path) as file:
        for record, answer in zip(records, answers, strict=True):
            text = answer.removesuffix(bytes([STOP])).decode(errors="replace")
            line = json.dumps({**record, "answer": text})
            file.write(f"{line}\n".encode())


# ---- split the model ----------------------------------------------------------------------------------------------


def split_layers(model, n_parts):
    """Keep this process's part of each block: Y = f(X V) W = Σ_i f(X V_i) W_i, as in min_TP.py. Returns the group.

    The sums are made by hand, because DTensor takes several times as long for a step of one byte.
    """
    n_heads = model.position.embedding_dim // model.blocks[0].attention.head_width
    if n_heads % n_parts:
        raise dist.DistributedError(f"--tensor {n_parts} does not divide the model's {n_heads} heads")
    group, _ = torch_dist.new_subgroups(n_parts)  # of consecutive ranks
    part = dist.get_rank() % n_parts

    def own_part(param, dim):
        return nn.Parameter(param.chunk(n_parts, dim)[part].clone())

    def sum_over_group(linear, inputs, output):
        torch_dist.all_reduce(output, group=group)
        return output

    for block in model.blocks:
        # V. gpt.py orders the rows of qkv by head, so a part has whole heads, and the cache only these. If yours are
        # all q, then all k, then all v, take a part of each.
        for linear in (block.attention.qkv, block.mlp.up):
            linear.weight = own_part(linear.weight, 0)
            linear.bias = own_part(linear.bias, 0)
        for linear in (block.attention.out, block.mlp.down):  # W
            linear.weight = own_part(linear.weight, 1)
            if part > 0:
                linear.bias = None  # the sum must contain it once
            linear.register_forward_hook(sum_over_group)
    return group


# ---- the model and the prompts ------------------------------------------------------------------------------------


def load_model(path):
    """The model of --model. Its weights stay in the file until they are used, so no process needs memory for all."""
    try:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        with torch.device("meta"):
            model = gpt.GPT(gpt.Config(**saved["sizes"]))
        model.load_state_dict(saved["model"], assign=True)
    except Exception as error:  # whatever a file leads to that is no model
        line = f"--model: {path} is not a file that min_GRPO.py --output has written ({type(error).__name__})"
        raise dist.DistributedError(line) from None
    return model.eval()


def read_prompts(longest, args):
    """The objects of all lines. Raises DistributedError if a prompt is longer than `longest` bytes."""
    records = []
    with open(args.prompts, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                if not 0 < len(record["prompt"].encode()) <= longest:
                    raise ValueError
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                problem = f'not a JSON object with a "prompt" of 1 to {longest} bytes, which --new-bytes leaves'
                raise dist.DistributedError(f"{args.prompts}, line {number}: {problem}") from None
            records.append(record)
    return records


def begin(args):
    """Make the folder --output, or check that the answers in it are of the same model, prompts and options."""
    changed_at = [os.stat(path).st_mtime for path in (args.model, args.prompts)]
    job = json.dumps({**vars(args), "nproc": None, "tensor": None, "changed_at": changed_at})
    path = Path(args.output, "job.json")
    if path.exists() and path.read_text() != job:
        raise dist.DistributedError(f"--output: {path} names another job: choose another folder")
    with checkpoint.atomic(path) as file:
        file.write(job.encode())


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = options.ArgumentParser(__doc__)
    parser.add_argument("--model", required=True, metavar="FILE", help="a model that min_GRPO.py --output has written")
    parser.add_argument("--prompts", required=True, metavar="FILE", help='lines like {"prompt": "31524="}')
    parser.add_argument("--output", metavar="FOLDER", default="answers", help="write the answers to this folder")
    parser.add_argument("--tensor", type=options.whole_number(1), default=1, help="processes that split each layer")
    parser.add_argument("--batch-size", type=options.whole_number(1), default=32, help="prompts that share a batch")
    parser.add_argument("--new-bytes", type=options.whole_number(1), default=10, help="most bytes of an answer")
    parser.add_argument("--temperature", type=options.number(0), default=1.0, help="0 takes the most probable byte")
    parser.add_argument("--seed", type=options.whole_number(0), default=0, help="random seed")
    parser.add_nproc()
    args = parser.parse_args()
    if not os.path.isfile(args.prompts):
        parser.error(f"argument --prompts: there is no file {args.prompts!r}")
    if args.nproc % args.tensor:
        parser.error(f"argument --nproc: {args.nproc} is not a multiple of {args.tensor}, --tensor")
    checkpoint.check_writable("--output", os.path.join(args.output, "job.json"))
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    # A process that has answered its share may wait for hours until the slowest one is done.
    dist.init_process_group(timeout=datetime.timedelta(days=1))
    gpt.start(args)
    model = load_model(args.model)
    records = read_prompts(model.position.num_embeddings - args.new_bytes, args)
    choose = gpt_generate.choose
    if args.tensor > 1:
        group = split_layers(model, args.tensor)
        choose = functools.partial(gpt_generate.choose_alike, group)
    model.to(dist.get_device())  # after it is split, so no GPU holds the whole model
    if dist.is_primary():
        begin(args)
    n_bytes = answer_missing(model, records, choose, args)
    dist.print_primary(f"{len(records):,} answers | {n_bytes:,} new bytes")


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
