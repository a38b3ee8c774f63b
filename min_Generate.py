"""Answer the prompts of a file on several processes: share the prompts, split the model, or both.

The idea is that an answer needs no other prompt. So processes answer their own prompts and do not communicate. Only if
the model does not fit on one device, several processes compute each answer together:

    --nproc 4 --tensor 1     each of 4 processes holds the whole model and answers a quarter of the prompts
    --nproc 4 --tensor 2     ranks 0 and 1 hold half a model each and answer one half, ranks 2 and 3 the other half

    prefill    all bytes of the prompts at once              -> logits of the first new byte
    decode     one new byte per row, and the KV cache        -> logits of the next byte, until all rows have ended

The KV cache holds the keys and values of all earlier positions, so a new byte costs the forward of one position instead
of all. Prompts of unequal lengths share a batch: each row has positions of its own. A row that has ended is removed
from the batch. This loop is `generate` in gpt_generate.py.

With tensor parallelism (--tensor) the processes of a group split the weights of each block. Each caches the keys
and values of its own heads only. Two all-reduces per block sum the partial outputs, so the group takes every step
together. Rounding may differ between its processes. Then they could choose different bytes and continue different
texts, and no error would be raised. So the first process of the group chooses, and sends the bytes to the others.

The random numbers of an answer depend on the seed and on its prompt's index in the file alone. So the number of
processes and the rows beside it do not change it. Only rounding may tip a choice, and with it the rest of that answer:
rarely in float32, more often with the TF32 of GPUs.

If the job is killed at any moment, run the same command again, with any --nproc, --tensor and --batch-size: it
generates only the missing answers. Each batch of answers is a file in the folder OUTPUT.parts-DIGEST. At the end rank 0
writes OUTPUT in the order of the prompts, and deletes the folder. The digest depends on the model, the prompts and the
options that change answers. So a job never uses the answers of another model or other options. OUTPUT appears whole. If
you give up a job, or a kill has left a folder beside OUTPUT, delete the folder.

Choose --tensor 1 if the model fits on one device, and more only if it does not, because tensor parallelism needs fast
links. To serve many users, or models from the Hugging Face hub, choose vLLM or SGLang. They also admit new prompts
while others are being answered.

Cost per process, for P float32 parameters, L layers of width D, and R rows of up to T bytes: 4·P/tensor bytes of
parameters (embeddings, norms and the head are whole) and 8·L·D·R·T/tensor bytes of keys and values. For each new byte
of R rows, tensor parallelism makes 2·L all-reduces of 4·D·R bytes and a broadcast of 8·R bytes, one after the other. In
the prefill each all-reduce is of 4·D·R bytes for each byte of the longest prompt.

    python min_Generate.py --nproc 2 --model model.pt --prompts prompts.jsonl
    python min_Generate.py --nproc 2 --tensor 2 --model model.pt --prompts prompts.jsonl --output b.jsonl
    torchrun --standalone --nproc-per-node 2 min_Generate.py --model model.pt --prompts prompts.jsonl --output c.jsonl

`python min_GRPO.py --output model.pt` makes a model that sorts digits, within a minute. A line of prompts.jsonl is a
JSON object with a "prompt", like {"prompt": "31524="}. OUTPUT, by default answers.jsonl, has the same objects with an
"answer", which replaces an older one. Bytes that are not UTF-8 become U+FFFD in it. All machines must share the folders
of these files. The last line that is printed is like `500 answers | 3,778 new bytes | 14,428 bytes/s`.
"""

import datetime
import functools
import hashlib
import json
import mmap
import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as torch_dist
from torch import nn

import checkpoint
import distributed as dist
import gpt
import gpt_generate
import options

LOG_EVERY = 20  # batches
EXISTS = "exists already: use it, or move it and run the same command again"


# ---- answer the prompts -------------------------------------------------------------------------------------------


def answer_missing(model, prompts, new_bytes, answers, group, folder, args):
    """Answer this process's share of the prompts that are not in `answers`. Each batch becomes a file in `folder`.

    Returns the number of new bytes.
    """
    choose = gpt_generate.choose if args.tensor == 1 else functools.partial(gpt_generate.choose_alike, group)
    stop = os.fsencode(args.stop)  # one byte or none, as typed: it may be no UTF-8
    stop_byte = stop[0] if stop else None
    missing = [number for number in range(len(prompts)) if number not in answers]
    # Prompts of similar lengths share a batch, so there is little padding. The longest come first: if memory is too
    # small for them, the job fails at once.
    missing.sort(key=lambda number: len(prompts[number]), reverse=True)
    share = dist.get_rank() // args.tensor
    n_shares = dist.get_world_size() // args.tensor
    own = missing[share::n_shares]
    is_first_of_group = dist.get_rank() % args.tensor == 0
    n_new = 0
    for first in range(0, len(own), args.batch_size):
        numbers = own[first : first + args.batch_size]
        # An answer's random numbers depend on the seed and on its prompt's index alone.
        drawn = torch.cat([gpt_generate.uniform(f"{args.seed} {number}", 1, new_bytes) for number in numbers])
        drawn = gpt.to_device(drawn, dist.get_device())
        batch = [prompts[number] for number in numbers]
        tokens, generated, _ = gpt_generate.generate(model, batch, drawn, stop_byte, args.temperature, choose=choose)
        new = gpt_generate.generated_bytes(tokens, generated)
        if is_first_of_group:  # the others have the same answers
            write_part(folder, numbers, [answer.removesuffix(stop) for answer in new])
            n_new += sum(len(answer) for answer in new)
        if (first // args.batch_size + 1) % LOG_EVERY == 0:
            dist.print_primary(f"rank 0 has answered {first + len(numbers):,} of its {len(own):,} prompts", flush=True)
    return n_new


# ---- split the model ----------------------------------------------------------------------------------------------


def split_layers(model, n_parts):
    """Keep this process's part of each block: Y = f(X V) W = Σ_i f(X V_i) W_i, as in min_TP.py. Returns the group.

    The sums are made by hand, because DTensor takes several times as long for a step of one byte.
    """
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


# ---- parts: nothing is generated twice ----------------------------------------------------------------------------


def write_part(folder, numbers, answers):
    """A file that is whole or missing after a kill. Its name is its first number, which no other part has."""
    texts = [answer.decode(errors="replace") for answer in answers]
    part = list(zip(numbers, texts, strict=True))
    with checkpoint.atomic(folder / f"{numbers[0]}.json") as file:
        file.write(json.dumps(part).encode())


def read_parts(folder, n_prompts):
    """The answers that all processes of all runs have written, by the number of their prompt."""
    answers = {}
    for path in folder.glob("*.json"):
        text = path.read_bytes()
        try:
            for number, answer in json.loads(text):
                if number not in range(n_prompts) or not isinstance(answer, str):
                    raise ValueError
                answers[number] = answer
        except (ValueError, TypeError, RecursionError):
            raise dist.DistributedError(f"{path} is damaged: delete it, and run the same command again") from None
    return answers


def merge(records, folder, output):
    """Write all answers in the order of the prompts, and delete the parts."""
    answers = read_parts(folder, len(records))
    n_missing = len(records) - len(answers)
    if n_missing:
        raise dist.DistributedError(f"{folder} lacks {n_missing} answers: all machines must share this folder")
    lines = [json.dumps({**record, "answer": answers[number]}) + "\n" for number, record in enumerate(records)]
    text = "".join(lines).encode()
    # It exists, and has this text, if the job was killed before it deleted a part.
    if os.path.exists(output) and Path(output).read_bytes() != text:
        raise dist.DistributedError(f"{output} {EXISTS}")
    with checkpoint.atomic(output) as file:
        file.write(text)
    shutil.rmtree(folder)


# ---- the model and the prompts ------------------------------------------------------------------------------------


def load_model(args):
    """The model of --model. Its weights stay in the file until they are used, so no process needs memory for all.

    Raises DistributedError if the file is damaged, or if --tensor does not divide the heads.
    """
    try:
        saved = torch.load(args.model, map_location="cpu", mmap=True, weights_only=True)
        with torch.device("meta"):
            model = gpt.GPT(gpt.Config(**saved["sizes"]))
            model(torch.zeros(1, 1, dtype=torch.long))  # fails if the sizes do not fit each other
        model.load_state_dict(saved["model"], assign=True)
        n_heads = saved["sizes"]["heads"]
    except Exception as error:  # whatever a file leads to that is no model
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        line = f"{args.model} is not a file that min_GRPO.py --output has written, or it is damaged ({reason})"
        raise dist.DistributedError(line) from None
    if n_heads % args.tensor:
        raise dist.DistributedError(f"--tensor {args.tensor} does not divide the model's {n_heads} heads")
    return model.eval()  # this model has no dropout; yours may have


def read_prompts(path):
    """The objects of all lines."""
    records = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                json.dumps(record)  # as `merge` will do, when it is too late to find that it cannot be written
                is_prompt = len(record["prompt"].encode()) > 0
            except Exception:  # whatever a line leads to that is no such object
                is_prompt = False
            if not is_prompt:
                raise dist.DistributedError(f'{path}, line {number}: not a JSON object with a "prompt" that has text')
            records.append(record)
    if not records:
        raise dist.DistributedError(f"{path} has no prompts")
    return records


def prepare(n_positions, args):
    """Returns the objects of --prompts, the number of new bytes, the folder of parts, and the answers in it.

    Raises DistributedError if a file cannot be used.
    """
    records = read_prompts(args.prompts)
    longest = max(len(record["prompt"].encode()) for record in records)
    new_bytes = args.new_bytes or n_positions - longest
    if new_bytes < 1 or longest + new_bytes > n_positions:
        line = f"the model has {n_positions} positions, which are too few for the longest prompt of {longest} bytes"
        raise dist.DistributedError(f"{line} and --new-bytes {max(new_bytes, 1)}")
    with open(args.model, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        model_digest = hashlib.sha256(content).hexdigest()
    used = [model_digest, records, new_bytes, args.stop, args.temperature, args.seed]
    digest = hashlib.sha256(repr(used).encode()).hexdigest()[:12]
    folder = Path(f"{args.output}.parts-{digest}")
    answers = read_parts(folder, len(records))
    if os.path.exists(args.output) and len(answers) < len(records):
        raise dist.DistributedError(f"{args.output} {EXISTS}")
    folder.mkdir(exist_ok=True)
    return records, new_bytes, folder, answers


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args():
    parser = options.ArgumentParser(__doc__)
    tensor_help = "processes that split the work of each layer"
    batch_help = "prompts that one model answers at once"
    new_bytes_help = "most bytes of an answer (default: what the model has positions for)"
    parser.add_argument("--model", required=True, metavar="FILE", help="a model that min_GRPO.py --output has written")
    parser.add_argument("--prompts", required=True, metavar="FILE", help='lines like {"prompt": "31524="}')
    parser.add_argument("--output", metavar="FILE", default="answers.jsonl", help="write the answers to this file")
    parser.add_argument("--tensor", type=options.whole_number(1), default=1, help=tensor_help)
    parser.add_argument("--batch-size", type=options.whole_number(1), default=32, help=batch_help)
    parser.add_argument("--new-bytes", type=options.whole_number(1), help=new_bytes_help)
    parser.add_argument("--stop", default="\n", help="byte that ends an answer; '' for none (default: end of the line)")
    parser.add_argument("--temperature", type=options.number(0), default=1.0, help="0 takes the most probable byte")
    parser.add_argument("--seed", type=options.whole_number(0), default=0, help="random seed")
    parser.add_nproc()
    args = parser.parse_args()
    for option, path in (("--model", args.model), ("--prompts", args.prompts)):
        if not os.path.isfile(path):
            parser.error(f"argument {option}: there is no file {path!r}")
    if len(os.fsencode(args.stop)) > 1:
        parser.error(f"argument --stop: {args.stop!r} is not one byte")
    if args.nproc % args.tensor:
        parser.error(f"argument --nproc: {args.nproc} is not a multiple of {args.tensor}, --tensor")
    checkpoint.check_writable("--output", args.output)
    return args


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    # A process that has answered its share may wait for hours until the slowest one is done.
    dist.init_process_group(timeout=datetime.timedelta(days=1))
    gpt.start(args)
    model = load_model(args)
    try:
        records, new_bytes, folder, answers = prepare(model.position.num_embeddings, args)
    except OSError as error:
        raise dist.DistributedError(f"cannot use {error.filename}: {error.strerror}") from None
    dist.barrier()  # before a process writes its first part, all must have read the same ones
    n_params = sum(param.numel() for param in model.parameters())
    group = None
    if args.tensor > 1:
        group = split_layers(model, args.tensor)
    model.to(dist.get_device())  # after it is split, so no GPU holds the whole model
    gpt.report_held(model.parameters(), n_params)

    prompts = [record["prompt"].encode() for record in records]
    start = time.perf_counter()
    n_new = answer_missing(model, prompts, new_bytes, answers, group, folder, args)
    n_new = dist.all_reduce(torch.tensor(n_new)).item()  # after it all ranks have written all of their answers
    seconds = time.perf_counter() - start
    if dist.is_primary():
        merge(records, folder, args.output)
    dist.print_primary(f"{len(records):,} answers | {n_new:,} new bytes | {n_new / seconds:,.0f} bytes/s")


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
