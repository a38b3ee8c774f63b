"""Answer the prompts of a file on several processes: share the prompts, split the model, or both.

The idea is that an answer needs no other prompt. So processes answer their own prompts and do not communicate. Only if
the model does not fit on one device, several processes compute each answer together:

    --nproc 4 --tensor 1     each of 4 processes holds the whole model and answers a quarter of the prompts
    --nproc 4 --tensor 2     ranks 0 and 1 hold half a model each and answer one half, ranks 2 and 3 the other half

    prefill    all bytes of the prompts at once              -> logits of the first new byte
    decode     one new byte per row, and the KV cache        -> logits of the next byte, until all rows have ended

The KV cache holds the keys and values of all earlier positions, so a new byte costs the forward of one position instead
of all. Prompts of unequal lengths share a batch: each row has positions of its own. A row that has ended is removed
from the batch. This loop is `generate` in gpt.py.

With tensor parallelism (--tensor T) the T processes of a group split the weights of each block. Each caches the keys
and values of its own heads only. Two all-reduces per block sum the partial outputs, so the group takes every step
together. Rounding may differ between its processes. Then they could choose different bytes and continue different
texts, and no error would be raised. So the first process of the group chooses, and sends the bytes to the others.

The random numbers of an answer depend on the seed and on its prompt's index in the file alone. So the number of
processes and the rows beside it do not change it. Only rounding may tip a choice, and with it the rest of that answer:
rarely in float32, more often with the TF32 of GPUs. Each process appends its answers to a file of its own in the folder
OUTPUT.parts. At the end rank 0 writes OUTPUT in the order of the prompts. If the job is killed at any moment, run the
same command again, with any --nproc and --tensor: it generates only the missing answers.

Choose --tensor 1 if the model fits on one device, and more only if it does not, because tensor parallelism needs fast
links. To serve many users, or models from the Hugging Face hub, choose vLLM or SGLang. They also admit new prompts
while others are being answered.

Cost per process, for P float32 parameters, L layers of width D, and R rows of up to B bytes: 4·P/T bytes of parameters
(embeddings, norms and the head are whole) and 8·L·D·R·B/T bytes of keys and values. For each new byte of R rows, tensor
parallelism makes 2·L all-reduces of 4·D·R bytes and a broadcast of 8·R bytes, one after the other. In the prefill
each all-reduce is of 4·D·R bytes for each byte of the longest prompt.

    python min_Generate.py --nproc 2 --model model.pt --prompts prompts.jsonl
    python min_Generate.py --nproc 2 --tensor 2 --model model.pt --prompts prompts.jsonl --output b.jsonl
    torchrun --standalone --nproc-per-node 2 min_Generate.py --model model.pt --prompts prompts.jsonl --output c.jsonl

`python min_GRPO.py --save model.pt` makes a model that sorts digits, within a minute. A line of prompts.jsonl is a JSON
object with a "prompt", like {"prompt": "31524="}. OUTPUT, by default answers.jsonl, has the same objects with an
"answer", which replaces an older one. Bytes that are not UTF-8 become U+FFFD in it. All machines must share the folders
of these files. The last line that is printed is like `500 answers | 3,778 new bytes | 14,428 bytes/s`.
"""

import functools
import hashlib
import json
import mmap
import os
import pickle
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.tensor import init_device_mesh

import checkpoint
import distributed as dist
import generate
import gpt
import options


def parse_args():
    parser = options.ArgumentParser(__doc__)
    count = options.whole_number(1)
    parser.add_argument("--model", metavar="FILE", help="a model that min_GRPO.py --save has written")
    parser.add_argument("--prompts", metavar="FILE", help='a file of lines like {"prompt": "31524="}')
    parser.add_argument("--output", metavar="FILE", default="answers.jsonl", help="write the answers to this file")
    parser.add_argument("--tensor", type=count, default=1, metavar="T", help="processes that split one model")
    parser.add_argument("--batch-size", type=count, default=32, help="prompts that one model answers at once")
    parser.add_argument(
        "--new-bytes", type=count, help="most bytes of an answer (default: what the model has positions for)"
    )
    parser.add_argument("--stop", default="\n", help="byte that ends an answer; '' for none (default: end of the line)")
    parser.add_argument("--temperature", type=options.number(0), default=1.0, help="0 takes the most probable byte")
    parser.add_argument("--seed", type=options.whole_number(0, 2**32 - 1), default=0, help="random seed of the answers")
    parser.add_argument("--log-every", type=count, default=20, help="print every N batches", metavar="N")
    parser.add_nproc()
    args = parser.parse_args()
    if not args.model:
        parser.error("argument --model: give a model's file; `python min_GRPO.py --save model.pt` makes one")
    if not args.prompts:
        parser.error('argument --prompts: give a file of lines like {"prompt": "31524="}')
    for option, path in (("--model", args.model), ("--prompts", args.prompts)):
        if not os.path.isfile(path):
            parser.error(f"argument {option}: there is no file {path}")
    if len(args.stop.encode()) > 1:
        parser.error(f"argument --stop: {args.stop!r} is not one byte")
    if args.nproc % args.tensor:
        parser.error(f"argument --nproc: {args.nproc} is not a multiple of {args.tensor}, --tensor")
    checkpoint.check_writable("--output", args.output)
    return args


# ---- answer the prompts -------------------------------------------------------------------------------------------


def answer_missing(model, prompts, answers, group, file, args):
    """Answer this process's share of the prompts that are not in `answers`, and append the answers to `file`.

    Returns the number of new bytes.
    """
    choose = generate.choose
    if args.tensor > 1:
        choose = functools.partial(choose_together, group)
    share = dist.get_rank() // args.tensor
    n_shares = dist.get_world_size() // args.tensor
    is_first_of_group = dist.get_rank() % args.tensor == 0
    missing = [number for number in range(len(prompts)) if number not in answers]
    # Prompts of similar lengths share a batch, so there is little padding. The longest come first, since these may need
    # more memory than there is.
    missing.sort(key=lambda number: len(prompts[number]), reverse=True)
    own = missing[share::n_shares]
    stop = ord(args.stop) if args.stop else None
    n_new = 0
    for first in range(0, len(own), args.batch_size):
        numbers = own[first : first + args.batch_size]
        # An answer's random numbers depend on the seed and on its prompt's index alone.
        drawn = torch.cat([generate.uniform(f"{args.seed} {number}", 1, args.new_bytes) for number in numbers])
        drawn = gpt.to_device(drawn, dist.get_device())
        batch = [prompts[number] for number in numbers]
        tokens, generated, _ = generate.generate(model, batch, drawn, stop, args.temperature, choose=choose)
        new = generate.generated_bytes(tokens, generated)
        if is_first_of_group:  # the others have the same answers
            append(file, numbers, [answer.removesuffix(args.stop.encode()) for answer in new])
            n_new += sum(len(answer) for answer in new)
        if (first // args.batch_size + 1) % args.log_every == 0:
            dist.print_primary(f"rank 0 has answered {first + len(numbers):,} of its {len(own):,} prompts", flush=True)
    return n_new


def choose_together(group, logits, drawn, temperature):
    """The first process of the group chooses. The others could choose otherwise, if their rounding differs.

    Only the bytes are sent. Each process returns its own log-probabilities, which this script does not use.
    """
    chosen, log_probabilities = generate.choose(logits, drawn, temperature)
    torch_dist.broadcast(chosen, group=group, group_src=0)
    return chosen, log_probabilities


# ---- split the model ----------------------------------------------------------------------------------------------


def make_tensor_group(args):
    """The group of the processes that split a model with this one; None if models are whole."""
    if args.tensor == 1:
        return None
    shape = (dist.get_world_size() // args.tensor, args.tensor)
    mesh = init_device_mesh(dist.get_device().type, shape, mesh_dim_names=("data", "tensor"))
    return mesh.get_group("tensor")


def split_layers(model, group, args):
    """Keep this process's part of each block: Y = f(X A) B = Σ_i f(X A_i) B_i, as in min_TP.py.

    The sums are made by hand, because DTensor takes several times as long for a step of one byte.
    """
    part = dist.get_rank() % args.tensor

    def keep_outputs(linear):
        linear.weight = own_part(linear.weight, 0)
        linear.bias = own_part(linear.bias, 0)

    def keep_inputs(linear):
        linear.weight = own_part(linear.weight, 1)
        if part > 0:
            linear.bias = None  # the sum must contain it once
        linear.register_forward_hook(sum_over_group)

    def own_part(param, dim):
        return nn.Parameter(param.chunk(args.tensor, dim)[part].clone())

    def sum_over_group(linear, inputs, output):
        torch_dist.all_reduce(output, group=group)
        return output

    for block in model.blocks:
        keep_outputs(block.attention.qkv)  # whole heads, see gpt.Attention; so the cache has only these
        keep_inputs(block.attention.out)
        keep_outputs(block.mlp.up)
        keep_inputs(block.mlp.down)


def load_model(args):
    """The model of --model. Its weights stay in the file until they are used, so no process needs memory for all.

    Raises DistributedError on every rank if the file is damaged, or if --tensor does not divide the heads.
    """
    model, error = None, None
    try:
        saved = torch.load(args.model, map_location="cpu", mmap=True, weights_only=True)
        with torch.device("meta"):
            model = gpt.GPT(**saved["sizes"])
        model.load_state_dict(saved["model"], assign=True)
        n_heads = saved["sizes"]["heads"]
        if n_heads % args.tensor:
            error = f"--tensor {args.tensor} does not divide the model's {n_heads} heads"
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError):
        error = f"{args.model} is not a file that min_GRPO.py --save has written, or it is damaged"
    dist.raise_on_all(error)
    return model.eval()  # this model has no dropout; yours may have


# ---- files --------------------------------------------------------------------------------------------------------


def on_rank_0(function, *args):
    """Call `function(*args)` on rank 0 only. Every rank gets its result, or its DistributedError.

    Every rank must call `on_rank_0`.
    """
    result, error = None, None
    if dist.is_primary():
        try:
            result = function(*args)
        except (OSError, dist.DistributedError) as failure:
            error = str(failure)
    dist.raise_on_all(error)
    return dist.broadcast_object(result)


def prepare(n_positions, digest, folder, args):
    """Returns the objects of --prompts, the number of new bytes, and the answers by number that `folder` has already.

    The answers are None if all was done before. Raises DistributedError if `folder` has answers with other options.
    """
    records = read_prompts(args.prompts)
    longest = max(len(record["prompt"].encode()) for record in records)
    new_bytes = args.new_bytes or n_positions - longest
    if new_bytes < 1 or longest + new_bytes > n_positions:
        raise dist.DistributedError(
            f"the model has {n_positions} positions, which are too few for the longest prompt of {longest} bytes and "
            f"--new-bytes {max(new_bytes, 1)}"
        )
    used = {"new-bytes": new_bytes, "stop": args.stop, "temperature": args.temperature, "seed": args.seed}
    used["model"] = digest
    used["prompts"] = hashlib.sha256(json.dumps(records).encode()).hexdigest()
    compare_options(folder, used)
    if os.path.exists(args.output):
        exists = dist.DistributedError(f"{args.output} exists already: move it, or choose another --output")
        is_of_these_options = (folder / "options.json").exists()
        if is_of_these_options and not has_all_answers(args.output, records):
            raise exists
        if folder.exists():  # the job was killed after it had written the output
            delete_parts(folder)
        if not is_of_these_options:
            raise exists
        return records, new_bytes, None
    folder.mkdir(exist_ok=True)
    with checkpoint.atomic(folder / "options.json") as file:
        file.write(json.dumps(used).encode())
    return records, new_bytes, read_parts(folder)


def read_prompts(path):
    records = []
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                is_record = isinstance(record, dict) and len(record["prompt"].encode()) > 0
            except (ValueError, KeyError, AttributeError):
                is_record = False
            if not is_record:
                raise dist.DistributedError(f'{path}, line {number}: not a JSON object with a "prompt" that has text')
            records.append(record)
    if not records:
        raise dist.DistributedError(f"{path} has no prompts")
    return records


def digest_of(path):
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return hashlib.sha256(content).hexdigest()


def digest_on_all_machines(path):
    """The digest of a file. Raises DistributedError on every rank if the machines do not have the same file."""
    digest = digest_of(path) if dist.get_local_rank() == 0 else None
    digests = [digest for digest in dist.gather_objects(digest) if digest]
    if len(set(digests)) > 1:
        raise dist.DistributedError(f"{path} differs between machines: copy one file to all", on_all_ranks=True)
    return digests[0]


def compare_options(folder, used):
    path = folder / "options.json"
    if not path.exists():
        return
    before = json.loads(path.read_bytes())
    for name, value in used.items():
        if before.get(name) != value:
            raise dist.DistributedError(
                f"{folder} has answers with another --{name}: use the same one, delete the folder, or change --output"
            )


def repair_part(path):
    """Remove the last line if a kill has torn it."""
    path.touch()
    whole_lines, newline, _ = path.read_bytes().rpartition(b"\n")
    os.truncate(path, len(whole_lines + newline))


def append(file, numbers, answers):
    """Write a line [number, answer] for each answer. Written lines survive a kill."""
    lines = b""
    for number, answer in zip(numbers, answers, strict=True):
        lines += json.dumps([number, answer.decode(errors="replace")]).encode() + b"\n"
    try:
        is_complete = file.write(lines) == len(lines)
        reason = "the disk is full"
    except OSError as error:
        is_complete = False
        reason = error.strerror
    if not is_complete:
        raise dist.DistributedError(f"cannot write {file.name}: {reason}: make room, and run the same command again")


def read_parts(folder):
    """The answers that all processes of all runs have written, by their number."""
    answers = {}
    for path in sorted(folder.glob("*.jsonl")):
        whole_lines, _, _ = path.read_bytes().rpartition(b"\n")  # without a line that a kill has torn
        for line in whole_lines.splitlines():
            try:
                number, answer = json.loads(line)
            except ValueError:
                raise dist.DistributedError(f"{path} is damaged: delete it, and run the same command again") from None
            answers[number] = answer
    return answers


def merge(records, folder, args):
    """Write all answers in the order of the prompts, and delete the parts."""
    answers = read_parts(folder)
    n_missing = len(records) - len(answers)
    if n_missing:
        raise dist.DistributedError(f"{folder} lacks {n_missing} answers: all machines must share this folder")
    with checkpoint.atomic(args.output) as file:
        for number, record in enumerate(records):
            file.write(json.dumps({**record, "answer": answers[number]}).encode() + b"\n")
    delete_parts(folder)


def has_all_answers(path, records):
    """Is this what `merge` writes for these prompts?"""
    lines = Path(path).read_bytes().splitlines()
    if len(lines) != len(records):
        return False
    for line, record in zip(lines, records, strict=True):
        try:
            answer = json.loads(line)["answer"]
        except (ValueError, KeyError, TypeError):
            return False
        if json.dumps({**record, "answer": answer}).encode() != line:
            return False
    return True


def delete_parts(folder):
    """Delete options.json last: until then a job that is started after a kill can compare its options with these."""
    for path in folder.glob("*.jsonl"):
        path.unlink()
    shutil.rmtree(folder)


# ---- the job ------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs: far faster matrix products, with 10 bits of mantissa
    folder = Path(f"{args.output}.parts")
    model = load_model(args)
    n_positions = model.position.num_embeddings
    digest = digest_on_all_machines(args.model)
    records, new_bytes, answers = on_rank_0(prepare, n_positions, digest, folder, args)
    args.new_bytes = new_bytes  # the default depends on the prompts
    if answers is None:
        dist.print_primary(f"{args.output} was complete already")
        return
    n_params = sum(param.numel() for param in model.parameters())
    group = make_tensor_group(args)
    if args.tensor > 1:
        split_layers(model, group, args)
    model.to(dist.get_device())  # after it is split, so no GPU holds the whole model
    gpt.report_held(model.parameters(), n_params)

    prompts = [record["prompt"].encode() for record in records]
    start = time.perf_counter()
    folder.mkdir(exist_ok=True)
    part = folder / f"{dist.get_rank()}.jsonl"
    repair_part(part)
    with open(part, "ab", buffering=0) as file:
        n_new = answer_missing(model, prompts, answers, group, file, args)
    seconds = time.perf_counter() - start
    dist.gather_objects(None)  # all ranks have written all; some may need longer
    on_rank_0(merge, records, folder, args)
    device = dist.get_device()
    n_new = dist.all_reduce(torch.tensor(n_new, device=device)).item()
    seconds = dist.all_reduce(torch.tensor(seconds, device=device), "max").item()
    dist.print_primary(f"{len(records):,} answers | {n_new:,} new bytes | {n_new / seconds:,.0f} bytes/s")


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
