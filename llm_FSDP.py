"""The file to start from for language models: fine-tune or pretrain any causal LM of Hugging Face, sharded by FSDP.

What you change stands first, under CHANGE HERE: data, model, loss and optimizer. Then read `make_model`, `train` and
`backward`. Each step takes one global batch of rows. A row holds several documents, and a document does not see the
others. Each of N ranks computes every N-th row, and each row is a micro-batch: one forward and one backward. A rank
holds 1/N of each layer: of the parameters, the gradients and Adam's state. A step is, on every rank at the same time:

    forward of each row       layer by layer: gather the layer --- compute --- free the gathered copy, keep 1/N
    backward of each row      the last layer first: gather --- compute --- sum the gradients of all ranks, keep 1/N
    after the last row        clip by the norm of all gradients --- AdamW on the shards of this rank

    loss = (sum of the losses of all targets of all ranks and rows) / (number of all these targets)

A target is a token that is in the loss: a label other than -100. So the number of processes changes the speed and not
the result, except for rounding and dropout. min_FSDP.py explains FSDP. No process holds the whole model on its device,
unless you ask for it by --gather-once: it is built on the meta device, which has shapes without memory, then sharded,
then filled by rank 0, which alone reads the model and the data. With --lora the model is frozen, and small matrices
beside its linear layers are trained.

The result is a new folder: the files of --model, byte for byte, with the trained weights. `from_pretrained` of
transformers, or of PEFT, loads it. Checkpoints resume on any number of processes. Rows are made at the first start, and
lie beside the checkpoints. docs/language_models.md has more: which models are refused, other data, and recipes.

Cost per process for P parameters on N processes: 16·P/N bytes between two steps (float32 parameters 4, gradients 4,
Adam 8), with --lora 2·P/N (bfloat16), with --nf4 0.56·P/N for the layers that are packed. With --bf16 each row sends up
to (N-1)/N · 8·P bytes: it gathers the parameters twice, 2·P each, and reduces float32 gradients, 4·P; with --lora
(N-1)/N · 4·P. The activations of one row and the logits of its targets come on top: --recompute keeps only each
layer's input, and --loss-chunk the logits of some targets. With --gather-once a step sends (N-1)/N · 6·P bytes, for any
number of rows, and holds 6·P more: the gathered model and its whole gradients. It is faster for a small model.

    python llm_FSDP.py --nproc 2                                               # no network: a small Llama, from scratch
    python llm_FSDP.py --model Qwen/Qwen3-8B --data chats.jsonl --lora 16      # all GPUs of this machine
    python llm_FSDP.py --model folder --data chats.jsonl --checkpoint-dir runs/a   # the same command again resumes
    torchrun --nnodes 2 --nproc-per-node auto --rdzv-backend c10d --rdzv-endpoint HOST:29400 llm_FSDP.py \
        --model Qwen/Qwen3-0.6B --from-scratch --data books/*.jsonl            # two machines, which share a folder

Each line of the data is {"messages": [...]} or {"text": ...}. It prints `step 20/370 | loss 6.2700 | norm 1.45 | lr
4.0e-03 | 6,588 tokens/s | 620 MB`, where padding does not count. Every --eval-every steps it prints `step 100/370 |
held-out 4.3362`, the mean loss of the documents that are not trained on.
"""

import argparse
import datetime
import functools
import math
import os
import random
import resource
import shutil
import time
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

import checkpoint
import checkpoint_sharded
import distributed as dist
import llm_documents
import llm_hub
import options
import tracking
import watch

# ---- CHANGE HERE: data, model, loss and metric, optimizer -----------------------------------------------------------


def load_documents(tokenizer, data, eval_data, length, seed=0):
    """The data, read by rank 0 at the first start: documents to train on, and documents held out.

    Both are generators of pairs of arrays, tokens and targets, as llm_documents.py makes them. Its `turns` finds the
    tokens that are in the loss. Documents have up to `length` tokens.
    """
    training = functools.partial(llm_documents.lines_of, data) if data else llm_documents.lines_of_library
    if eval_data:
        lines = training(), llm_documents.lines_of(eval_data, "--eval-data")
    else:
        lines = llm_documents.split(training, seed)
    return [llm_documents.documents_of(each, tokenizer, length) for each in lines]


def change_model(model, lora, lora_alpha, nf4=False):
    """The model to train: here adapters beside a frozen model, or all of it. Freeze parameters and replace layers here.

    Every rank calls it on a model without memory, before that is sharded. Rank 0 calls it on the whole model too, whose
    values then fill the shards.
    """
    if lora:
        model = llm_hub.add_lora(model, lora, lora_alpha or 2.0 * lora)
    if nf4:
        llm_hub.pack_frozen(model)
    return model


def loss_of(logits, targets):
    """The loss, and the metric of held-out rows. In a conversation the targets are what the assistant says.

    It is a sum and not a mean, since rows have unequal numbers of targets.
    """
    logits = logits.to(torch.get_default_dtype())  # bfloat16 has too few digits for a sum of losses
    return F.cross_entropy(logits, targets, reduction="sum")


def sum_of_losses(model, row):
    """The loss of a row."""
    # Positions that start at 0 again keep documents apart, but only without a cache and without an attention mask.
    # transformers looks for them at the start of each forward, and waits for the device there.
    # Logits are computed for the targets of one row at a time: a large vocabulary makes them large.
    options = {"position_ids": row.positions, "use_cache": False, "logits_to_keep": row.places}
    if getattr(model, "loss_in_chunks", False):  # by --loss-chunk
        return model(row.tokens, targets=row.targets, **options)
    return loss_of(model(row.tokens, **options).logits[0], row.targets)


def make_optimizer(model, steps, lr, warmup, weight_decay):
    """The optimizer of the trained weights, and a scheduler that is stepped after each of `steps` steps.

    They are made after sharding, because the optimizer steps the shards.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.dim() >= 2], "weight_decay": weight_decay},
        {"params": [param for param in trained if param.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)

    if warmup is None:
        warmup = min(10, steps // 10)

    def factor(step):
        """The learning rate of `step`, as a fraction of --lr: it rises to 1, then falls to 0.1 along a cosine."""
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = (step - warmup) / max(1, steps - warmup)
        return 0.55 + 0.45 * math.cos(math.pi * progress)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


# ---- the model and its shards -------------------------------------------------------------------------------------


def make_model(whole, config, types, args):
    """This rank's shards of the model, with the values of rank 0's `whole` model. The other ranks pass None.

    `types` has the type of each weight and buffer of `whole`.
    """
    device = dist.get_device()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtype = torch.get_default_dtype()  # float32; leave it so, because trained weights and losses need its digits
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    if args.bf16:
        # Parameters are gathered in bfloat16. The shards of trained weights, and Adam's state, stay float32.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):  # shapes without memory
        model = change_model(llm_hub.build_model(config, dtype), args.lora, args.lora_alpha, args.nf4)
    llm_hub.hold_as_loaded(model, types)  # what is frozen
    for layer in reversed(llm_hub.layers_of(model)):  # if one contains others, these come first
        if args.recompute:  # keep the layer's input alone; FSDP's hooks are called around `forward`
            layer.forward = functools.partial(recompute, layer.forward, use_reentrant=False)
        if args.compile:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)  # a unit, which is gathered and freed by itself
    if args.loss_chunk:
        llm_hub.compute_loss_in_chunks(model, args.loss_chunk, loss_of)
    embedding = model.get_input_embeddings()
    if embedding.weight is not model.get_output_embeddings().weight:  # a tied one belongs to the root
        fully_shard(embedding, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # the rest
    llm_hub.fill(model, whole)
    return model


# ---- training -----------------------------------------------------------------------------------------------------


def train(model, rows, held_out, args):
    """Take all steps that the newest checkpoint has not done. `rows` and `held_out` are paths of files."""
    n_rows = len(llm_documents.mapped(rows))
    steps = math.ceil(args.epochs * n_rows / args.global_batch_size)
    optimizer, scheduler = make_optimizer(model, steps, args.lr, args.warmup, args.weight_decay)
    trained = [param for param in model.parameters() if param.requires_grad]
    order = llm_documents.order_of(n_rows, steps * args.global_batch_size, args.seed)
    first_step = 0
    # Frozen weights are left out of a checkpoint: they are those of --model.
    parts = {"scheduler": scheduler, "settings": settings_of(model, args), "frozen": False}
    parts |= {"steps": steps, "run_id": None}
    if args.checkpoint_dir:
        preemption = checkpoint.Preemption()
        saved = checkpoint_sharded.load(args.checkpoint_dir, model, optimizer, **parts)
        first_step, saved_steps, parts["run_id"] = saved
        if saved_steps != steps and first_step < min(steps, saved_steps):
            line = f"argument --epochs: it gives {steps} steps, and the checkpoint is of {saved_steps}"
            raise dist.DistributedError(f"{line}: the learning rate would jump: finish these {saved_steps} steps first")
    if first_step >= steps:
        dist.print_primary(f"no steps are left: the checkpoint has {first_step} steps, and --epochs gives {steps}")
    elif args.warmup and args.warmup >= steps:
        raise dist.DistributedError(f"argument --warmup: {args.warmup} is not less than {steps}, the number of steps")
    samples = first_step * args.global_batch_size
    tracker = tracking.Tracker("llm_FSDP", args, samples, parts["run_id"])
    parts["run_id"] = tracker.run_id
    evaluate(model, held_out, f"step {first_step}/{steps}", samples, tracker)
    taken, start = [], time.perf_counter()
    for step in range(first_step, steps):
        batch = order[step * args.global_batch_size : (step + 1) * args.global_batch_size]
        own_rows = list(llm_documents.share_of(rows, batch))
        torch.manual_seed(random.Random(f"{args.seed} {step} {dist.get_rank()}").getrandbits(63))  # of dropout
        optimizer.zero_grad()
        share = backward(model, own_rows, args.gather_once)
        # Of DTensors: the norm over all shards.
        norm = nn.utils.clip_grad_norm_(trained, args.clip or math.inf)
        lr = scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
        taken.append((share, sum(row.n_tokens for row in own_rows)))

        done = step + 1
        preempted = bool(args.checkpoint_dir) and preemption.agreed()
        saves = bool(args.checkpoint_dir) and (done % args.save_every == 0 or done == steps or preempted)
        evaluates = (done % args.eval_every == 0 or done == steps) and not preempted
        if done % args.log_every == 0 or saves or evaluates:
            # The line and the evaluation come first. They end a diverged run before it saves.
            samples = done * args.global_batch_size
            report(f"step {done}/{steps}", samples, taken, start, norm, lr, tracker)
            if evaluates:
                evaluate(model, held_out, f"step {done}/{steps}", samples, tracker)
            if saves:
                checkpoint_sharded.save(args.checkpoint_dir, model, optimizer, done, keep=args.keep, **parts)
            taken, start = [], time.perf_counter()  # an evaluation and a save do not count
        if preempted and done < steps:
            tracker.close()
            preemption.leave()
    tracker.close()


def backward(model, own_rows, gather_once=False):
    """Leave the gradients of the global batch on the shards. Returns this process's share of its loss."""
    n_targets = torch.full((), sum(len(row.targets) for row in own_rows), device=dist.get_device())
    n_targets = dist.all_reduce(n_targets)  # of all ranks and rows
    share = 0
    for row in own_rows:  # a micro-batch
        if gather_once:
            reduce_only_after(model, row is own_rows[-1])
        loss = sum_of_losses(model, row) / n_targets
        # FSDP averages over the ranks: multiply by their number to sum. The gradients of the rows add up on the shards.
        (loss * dist.get_world_size()).backward()
        share += loss.detach()
    return share


def reduce_only_after(model, is_last):
    """Until the backward of the last row, layers stay gathered and gradients stay whole.

    They also stay gathered after the forward of an evaluation, until the backward of the next step's last row.
    """
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(is_last)
    model.set_requires_gradient_sync(is_last)


@torch.no_grad()
def evaluate(model, held_out, step, samples, tracker):
    """Print and track the mean loss of all held-out targets."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=dist.get_device())
    for row in llm_documents.share_of(held_out, range(len(llm_documents.mapped(held_out)))):
        sums[0] += sum_of_losses(model, row)
        sums[1] += len(row.targets)
    loss_sum, n_targets = dist.all_reduce(sums).tolist()
    model.train()
    loss = loss_sum / n_targets
    refuse_nan("held-out loss", loss)
    dist.print_primary(f"{step} | held-out {loss:.4f}", flush=True)
    tracker.log(samples, held_out=loss)


def settings_of(model, args):
    """What a resumed run must share: else it would continue another training, silently."""
    names = ("seed", "lr", "warmup", "weight_decay", "clip", "bf16", "global_batch_size", "lora", "lora_alpha", "nf4")
    settings = {f"--{name.replace('_', '-')}": getattr(args, name) for name in (*names, "pad", "length")}
    settings["--data"] = [path.name for path in args.data or []]
    for name, value in model.config.to_diff_dict().items():
        if name != "transformers_version":
            settings[f"config.json: {name}"] = value
    if not args.from_scratch:
        settings["--model (checksum)"] = checksum_of_weights(model)
    return settings


def checksum_of_weights(model):
    """The memory of all weights of files, read as 16-bit integers and summed. It does not depend on the ranks.

    Adapters are left out: random numbers are others on another kind of CPU.
    """
    shards = [param.detach().to_local() for name, param in model.named_parameters() if ".lora_" not in name]
    total = sum(shard.view(torch.int16).sum(dtype=torch.int64) for shard in shards)
    return dist.all_reduce(total).item()


def refuse_nan(name, value):
    """Before a checkpoint or a result replaces a good one. `value` is the same on all ranks."""
    if not math.isfinite(value):
        raise dist.DistributedError(f"the {name} is {value}: training has diverged, try a lower --lr")


def report(step, samples, taken, start, norm, lr, tracker):
    """Print and track the mean loss of the steps `taken`, their speed since `start`, and the largest memory."""
    shares, n_tokens = zip(*taken, strict=True)
    loss = dist.all_reduce(torch.stack(shares)).mean().item()
    refuse_nan("loss", loss)
    norm = norm.full_tensor().item()
    refuse_nan("gradient norm", norm)
    seconds = time.perf_counter() - start  # after something has waited for the device
    tokens = dist.all_reduce(torch.tensor(sum(n_tokens))).item() / seconds
    memory = dist.all_reduce(torch.tensor(peak_memory()), op="max").item()  # of any process
    speed = f"{tokens:,.0f} tokens/s | {memory / 1e6:,.0f} MB"
    dist.print_primary(f"{step} | loss {loss:.4f} | norm {norm:.2f} | lr {lr:.1e} | {speed}", flush=True)
    tracker.log(samples, loss=loss, norm=norm, lr=lr, tokens_per_second=tokens)


def peak_memory():
    """Bytes: the most that this process has had allocated on its GPU, or resident in memory on the CPU."""
    if dist.get_device().type != "cpu":
        return torch.accelerator.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# ---- data ---------------------------------------------------------------------------------------------------------


def prepare(args):
    """The whole model on rank 0, None on the others. On all: its configuration and types, and the files of the rows.

    Only rank 0 reads the model and the data. Raises DistributedError on every rank if something cannot be read.
    """
    try:
        whole, shared = llm_hub.on_rank_0(read_all, args) or (None, None)
    except dist.DistributedError:
        shutil.rmtree(llm_hub.incomplete(args.output), ignore_errors=True)
        raise
    return whole, *dist.broadcast_object(shared)


def read_all(args):
    """The whole model, and what `prepare` gives to all ranks. Begins the result."""
    with llm_documents.one_line(f"--model {args.model}"):  # what transformers raises becomes one line
        base = llm_hub.folder_of(args.model) if args.model else None
    folder = llm_hub.begin(args.output, base, is_whole=not args.lora)
    if not base:
        base = folder
        tokenizer = llm_documents.library_tokenizer()
        tokenizer.save_pretrained(base)
        small_llama(tokenizer, args.length or 256).save_pretrained(base)
    with llm_documents.one_line(f"--model {args.model}"):
        tokenizer, config = llm_hub.load_tokenizer_and_config(base, args.attention)
        torch.manual_seed(args.seed)
        if args.from_scratch:
            whole = llm_hub.build_model(config, config.dtype or torch.get_default_dtype())
        else:
            whole = llm_hub.load_model(args.model, base, config)
        whole = change_model(whole, args.lora, args.lora_alpha, args.nf4)
    if args.chat_template:
        with llm_documents.one_line(f"--chat-template {args.chat_template}"):
            tokenizer.chat_template = args.chat_template.read_text(encoding="utf-8")
            # transformers takes this file before the others that have a template.
            Path(folder, "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
    files = files_of_rows(tokenizer, whole, args)
    before, in_loss = llm_documents.text_around_loss(llm_documents.mapped(files[0])[0], tokenizer)
    print(f"in the loss, for example: {in_loss!r} after {before!r}", flush=True)
    return whole, (whole.config, llm_hub.types_of(whole), *files)


def small_llama(tokenizer, length):
    """The configuration of the model that is trained without --model."""
    return transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )


def files_of_rows(tokenizer, whole, args):
    """The paths of the rows to train on and of those held out. A resume takes those that the first start has made."""
    folder = args.checkpoint_dir or llm_hub.temporary(args.output)
    paths = [Path(folder, name).absolute() for name in ("rows.npy", "held-out.npy")]
    longest = getattr(whole.config.get_text_config(), "max_position_embeddings", None) or 2048
    length = args.length or min(2048, longest)
    if has_rows(args.data):
        paths = [args.data[0].absolute(), args.eval_data[0].absolute()]
        length = llm_documents.mapped(paths[0]).shape[2]
    if length > longest:
        raise dist.DistributedError(f"--model {args.model}: --length {length} is more than its {longest} positions")
    if has_rows(args.data) or any(Path(folder).glob("step-*/.metadata")):
        return paths
    documents = load_documents(tokenizer, args.data, args.eval_data, length, args.seed)
    for path, some in zip(paths, documents, strict=True):
        last = llm_documents.write_rows(path, some, length, args.pad)
        if last >= whole.get_input_embeddings().num_embeddings:
            line = f"token {last}, {tokenizer.decode(last)!r}, of the data has no embedding"
            raise dist.DistributedError(f"--model {args.model}: {line}: resize them first, by resize_token_embeddings")
    return paths


def has_rows(data):
    """Is --data a file of rows that another run has made?"""
    return bool(data) and data[0].suffix == ".npy"


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args(argv=None):
    parser = options.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--model", help="folder, or name on the Hugging Face Hub (default: a small Llama, untrained)")
    add("--from-scratch", action="store_true", help="take the configuration and the tokenizer of --model, no weights")
    add("--data", type=Path, nargs="+", help=".jsonl files, or rows.npy of another run (default: Python's library)")
    add("--eval-data", type=Path, nargs="+", help="files to evaluate on (default: a twentieth of --data)")
    add("--chat-template", type=Path, help="file with a chat template (default: the one of the tokenizer)")
    output = f"runs/llm-{datetime.datetime.now():%Y-%m-%d-%H%M%S}"
    add("--output", default=output, help="new folder for the model or its adapters (default: runs/llm-DATE-TIME)")
    parser.add_checkpoints(save_every=500)
    add("--lora", type=options.whole_number(1), help="freeze the model, train adapters of this rank (default: no)")
    add("--lora-alpha", type=options.positive_number, help="scale adapters by this / rank (default: twice the rank)")
    add("--nf4", action="store_true", help="hold the frozen linear layers of --lora in 4 bits")
    add("--length", type=options.whole_number(2), help="tokens per row (default: up to 2048, 256 without --model)")
    add("--pad", action="store_true", help="do not pack: one document in each row, filled with padding")
    add("--global-batch-size", type=options.whole_number(1), default=8, help="rows per step, over all processes")
    add("--epochs", type=options.positive_number, default=3.0, help="passes over the data")
    add("--lr", type=options.positive_number, help="learning rate (default: 2e-5, --lora 2e-4, --from-scratch 3e-4)")
    add("--warmup", type=options.whole_number(0), help="warm-up steps (default: 10, or a tenth of all)")
    add("--weight-decay", type=options.number(0), default=0.0, help="weight decay of the matrices")
    add("--clip", type=options.number(0), default=1.0, help="largest norm of the gradient; 0 does not clip")
    bf16_help = "compute in bfloat16, keep parameters in float32 (default: on GPUs)"
    add("--bf16", action=argparse.BooleanOptionalAction, default=dist.device_count() > 0, help=bf16_help)
    kernels = ("sdpa", "eager", "flex_attention", "flash_attention_2")
    add("--attention", choices=kernels, default="sdpa", help="kernel of attention; some models have no sdpa")
    add("--gather-once", action="store_true", help="gather the layers once per step, not for each row: less is sent")
    add("--recompute", action="store_true", help="recompute activations in backward, to save memory")
    add("--loss-chunk", type=options.whole_number(1), help="targets whose logits are computed at a time (default: all)")
    add("--compile", action="store_true", help="compile each layer with torch.compile")
    add("--log-every", type=options.whole_number(1), default=20, help="steps between lines of progress")
    add("--eval-every", type=options.whole_number(1), default=100, help="steps between evaluations")
    add("--wandb", action="store_true", help="track with Weights & Biases")
    add("--tensorboard", help="track with TensorBoard, in this folder")
    add("--seed", type=options.whole_number(0, 2**32 - 1), default=0, help="random seed")
    parser.add_nproc()
    args = parser.parse_args(argv)
    check_together(parser, args)
    args.lr = args.lr or default_lr(args)
    args.from_scratch = args.from_scratch or not args.model
    tracking.check_installed(args)
    checkpoint.check_writable("--output", args.output)
    for option in ("checkpoint_dir", "tensorboard"):
        if getattr(args, option) is not None:
            checkpoint_sharded.check_folder(f"--{option.replace('_', '-')}", getattr(args, option))
    return args


def check_together(parser, args):
    """Leave with one line if an option needs another one."""
    needs = {"model": "data", "chat_template": "model", "from_scratch": "model", "lora_alpha": "lora", "nf4": "lora"}
    for option, other in needs.items():
        if getattr(args, option) and not getattr(args, other):
            parser.error(f"argument --{option.replace('_', '-')}: it needs --{other}")
    if args.lora and (args.from_scratch or not args.model):
        parser.error("argument --lora: adapters need a --model with weights")
    if args.nf4 and torch.__version__ < "2.12":  # a TorchVersion, for which "2.9" is less
        parser.error("argument --nf4: before torch 2.12, fully_shard takes no parameters of bytes")
    if has_rows(args.data) and (len(args.data) > 1 or not has_rows(args.eval_data) or args.pad or args.length):
        parser.error("argument --data: one file of rows needs --eval-data held-out.npy, and no --pad and no --length")
    if os.path.exists(args.output):
        parser.error(f"argument --output: {args.output} exists: name a new folder")


def default_lr(args):
    if not args.model:
        return 4e-3
    if args.from_scratch:
        return 3e-4
    if args.lora:
        return 2e-4
    return 2e-5


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    # While rank 0 downloads and writes, the others wait. fully_shard needs a group of one process for mixed precision.
    dist.init_process_group(timeout=datetime.timedelta(hours=4), even_alone=True)
    watch.start()  # if the job hangs, one line says where each rank stands
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs: far faster matrix products, with 10 bits of mantissa
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    whole, config, types, rows, held_out = prepare(args)
    model = make_model(whole, config, types, args)
    if dist.is_primary():
        whole.to("meta")  # its values are in the shards now
    line = f"Training {model.num_parameters(only_trainable=True):,} of {model.num_parameters():,} parameters"
    dist.print_primary(f"{line} on {world_size} x {dist.get_device().type}", flush=True)
    llm_hub.check_rows(model, llm_documents.mapped(rows).shape[2], args.pad)
    train(model, rows, held_out, args)
    llm_hub.save(model, whole, types, args.output)
    dist.print_primary(f"Wrote {args.output}")


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
