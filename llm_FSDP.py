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
then filled by rank 0, which alone reads files. With --lora the model is frozen, and small matrices beside its linear
layers are trained. The result is a folder that `from_pretrained` of transformers, or of PEFT, loads. Checkpoints resume
on any number of processes. If the newest one is the end of the training or beyond it, its result is written and nothing
is trained. To write the result of an earlier one, move the newer folders away, and choose --epochs so that it is the
end. Another --epochs is refused while steps are left, because the learning rate would jump. held-out.txt beside the
checkpoints has the losses of the evaluations. first-start.txt has the date that chat templates write as today's, so
that the rows are the same on another day. --wandb and --tensorboard track the run.

A result replaces an older one in --output, and no other files. Until it is complete it is in a folder
.incomplete-HOST-PID there. A run that is killed leaves that folder, which may be deleted.

Before training, one check compares a document alone and in a row of --length tokens. It refuses models that mix packed
documents, that see later tokens, as BERT does, or that treat long rows otherwise, as Phi-3 does: use --pad for it. The
result has each weight in the type in which it was loaded. Routers that were loaded in float32 stay so, but --bf16
gathers them in bfloat16 as all other parameters.

In the words of TRL, --length is max_length, --global-batch-size is per_device_train_batch_size ·
gradient_accumulation_steps · N, and packing and assistant_only_loss are on. Not offered: a base in 4 bits, code from
the Hub, tokenizers that are not fast, the router's loss of a mixture of experts, training adapters further. --lora
adapts linear layers, but not experts that are stored as one 3-D tensor. It refuses models for which PEFT would adapt
the experts instead, such as GLM-4.5 and DeepSeek-V3. It trains neither embeddings nor the output layer, so train a
model with new tokens without it. `AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload()` of PEFT merges
adapters into their model.

Choose mnist_DDP.py for images, and min_FSDP.py or min_Packing.py to learn one of the ideas.

Cost per process for P parameters on N processes: 16·P/N bytes between two steps (float32 parameters 4, gradients 4,
Adam 8), with --lora 2·P/N (bfloat16). Rank 0 also needs the CPU's memory for one model while it writes the result, 2·P
bytes in bfloat16, and from scratch 4·P while it starts. With --bf16 each row sends up to (N-1)/N · 8·P bytes: it
gathers the parameters twice, 2·P each, and reduces float32 gradients, 4·P; with --lora (N-1)/N · 4·P. The activations
of one row and the logits of its targets come on top: they are what runs out of memory, and --recompute keeps only each
layer's input. With --gather-once a step sends (N-1)/N · 6·P bytes, for any number of rows, and holds 6·P more: the
gathered model and its whole gradients. It is faster for a small model.

    python llm_FSDP.py --nproc 2                                               # no network: a small Llama, from scratch
    python llm_FSDP.py --model Qwen/Qwen3-8B --data chats.jsonl --lora 16      # all GPUs of this machine
    python llm_FSDP.py --model folder --data chats.jsonl --checkpoint-dir runs/a   # the same command again resumes
    torchrun --nnodes 2 --nproc-per-node auto --rdzv-backend c10d --rdzv-endpoint HOST:29400 llm_FSDP.py \
        --model Qwen/Qwen3-0.6B --from-scratch --data books/*.jsonl            # two machines

The data are .jsonl files, up to 1 GB together, as `Dataset.to_json` of Hugging Face writes them: {"messages": [...]} or
{"text": ...}. In a conversation only the assistant's words are in the loss. It prints `step 20/370 | loss 6.2499 | norm
1.64 | lr 4.0e-03 | 3,892 targets/s | 7,686 tokens/s | 656 MB`. Neither speed counts padding. Every --eval-every steps
it prints `step 100/370 | held-out 4.2481`, the mean loss of the documents that are not trained on.
"""

import argparse
import datetime
import functools
import math
import random
import resource
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute
from transformers.utils import chat_template_utils

import checkpoint
import checkpoint_sharded
import distributed as dist
import llm_documents
import llm_hub
import options
import tracking
import watch

# ---- CHANGE HERE: data, model, loss and metric, optimizer -----------------------------------------------------------


def load_documents(tokenizer, data, eval_data, length):
    """The data, read by rank 0: documents to train on, and documents held out. Rows are `length` tokens long.

    Both are lists of pairs of arrays, tokens and targets, as llm_documents.py makes them. Its `turns` finds the tokens
    that are in the loss.
    """
    lines = llm_documents.lines_of_library()
    if data:
        lines = llm_documents.lines_of(data)
    found = llm_documents.read(lines, tokenizer, length)
    training = [of_line for of_line in found if of_line]  # without those that are too long
    if eval_data:
        held_out = llm_documents.read(llm_documents.lines_of(eval_data, "--eval-data"), tokenizer, length)
    else:
        every = max(20, len(training) // 500)
        held_out = training[::every]
        del training[::every]
    training = [document for of_line in training for document in of_line]
    held_out = [document for of_line in held_out for document in of_line]
    if not training or not held_out:
        line = f"--data, --eval-data: too few lines fit into --length {length} to train on and to hold out"
        raise dist.DistributedError(f"{line}: give more, or name --eval-data")
    return training, held_out


def change_model(model, lora, lora_alpha):
    """The model to train: here adapters beside a frozen model, or all of it. Freeze parameters and replace layers here.

    Every rank calls it on a model without memory, before that is sharded. Rank 0 calls it on the whole model too, whose
    values then fill the shards.
    """
    if lora:
        return llm_hub.add_lora(model, lora, lora_alpha)
    return model


def sum_of_losses(model, row):
    """The loss of a row, and the metric of a held-out row. In a conversation the targets are what the assistant says.

    It is a sum and not a mean, since rows have unequal numbers of targets.
    """
    # Positions that start at 0 again keep documents apart, but only without a cache and without an attention mask.
    # transformers looks for them at the start of each forward, and waits for the device there.
    # Logits are computed for the targets of one row at a time: a large vocabulary makes them large.
    output = model(row.tokens, position_ids=row.positions, use_cache=False, logits_to_keep=row.places)
    logits = output.logits[0].to(torch.get_default_dtype())  # bfloat16 has too few digits for a sum of losses
    return F.cross_entropy(logits, row.targets, reduction="sum")


def make_optimizer(model, steps, lr, warmup, weight_decay):
    """The optimizer of the trained weights, and a scheduler that is stepped after each of `steps` steps.

    They are made after sharding, because the optimizer steps the shards.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": [param for param in trained if param.dim() >= 2], "weight_decay": weight_decay}]
    vectors = [param for param in trained if param.dim() < 2]
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
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
        model = change_model(llm_hub.build_model(config, dtype), args.lora, args.lora_alpha)
    llm_hub.hold_as_loaded(model, types)  # what is frozen
    for layer in reversed(llm_hub.layers_of(model)):  # if one contains others, these come first
        if args.recompute:
            recompute_in_backward(layer)
        if args.compile:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)  # a unit, which is gathered and freed by itself
    embedding = model.get_input_embeddings()
    if embedding.weight is not model.get_output_embeddings().weight:  # a tied one belongs to the root
        fully_shard(embedding, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # the rest
    llm_hub.fill(model, whole)
    return model


def recompute_in_backward(layer):
    """Save only the layer's input for backward, which calls `forward` again. FSDP's hooks are called around it."""
    layer.forward = functools.partial(recompute, layer.forward, use_reentrant=False)


# ---- training -----------------------------------------------------------------------------------------------------


def train(model, rows, held_out, args):
    """Take all steps that the newest checkpoint has not done."""
    steps = math.ceil(args.epochs * len(rows) / args.global_batch_size)
    n_epochs = steps * args.global_batch_size / len(rows)
    dist.print_primary(f"{steps:,} steps of {args.global_batch_size} rows are {n_epochs:.2f} epochs", flush=True)
    optimizer, scheduler = make_optimizer(model, steps, args.lr, args.warmup, args.weight_decay)
    scheduler.steps = steps  # is part of its state_dict
    trained = [param for param in model.parameters() if param.requires_grad]
    order = llm_documents.order_of(len(rows), steps * args.global_batch_size, args.seed)
    first_step = 0
    if args.checkpoint_dir:
        # Frozen weights are left out: they are those of --model.
        parts = {"scheduler": scheduler, "settings": settings_of(model, rows, args), "frozen": False}
        preemption = checkpoint.Preemption()
        first_step = checkpoint_sharded.load(args.checkpoint_dir, model, optimizer, **parts)
        refuse_jump(first_step, steps, scheduler)
    if first_step >= steps:
        dist.print_primary(f"no steps are left: the checkpoint has {first_step} steps, and --epochs gives {steps}")
    samples = first_step * args.global_batch_size
    tracker = make_tracker(samples, args)
    evaluate(model, held_out, f"step {first_step}/{steps}", samples, args.checkpoint_dir, tracker)
    taken, start = [], time.perf_counter()
    for step in range(first_step, steps):
        batch = order[step * args.global_batch_size : (step + 1) * args.global_batch_size]
        own_rows = list(llm_documents.share_of(rows, batch))
        torch.manual_seed(seed_of(args.seed, step, dist.get_rank()))  # of dropout: the same after a resume
        optimizer.zero_grad()
        share = backward(model, own_rows, args.gather_once)
        # Of DTensors: the norm over all shards.
        norm = nn.utils.clip_grad_norm_(trained, args.clip or math.inf)
        lr = scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
        n_targets = sum(len(row.targets) for row in own_rows)
        n_tokens = sum(row.n_tokens for row in own_rows)
        taken.append((share, n_targets, n_tokens))

        done = step + 1
        preempted = bool(args.checkpoint_dir) and preemption.agreed()
        saves = bool(args.checkpoint_dir) and (done % args.save_every == 0 or done == steps or preempted)
        evaluates = (done % args.eval_every == 0 or done == steps) and not preempted
        if done % args.log_every == 0 or saves or evaluates:
            # The line and the evaluation come first. They end a diverged run before it saves.
            samples = done * args.global_batch_size
            report(f"step {done}/{steps}", samples, taken, start, norm, lr, tracker)
            if evaluates:
                evaluate(model, held_out, f"step {done}/{steps}", samples, args.checkpoint_dir, tracker)
            if saves:
                checkpoint_sharded.save(args.checkpoint_dir, model, optimizer, done, keep=args.keep, **parts)
            taken, start = [], time.perf_counter()  # an evaluation and a save do not count
        if preempted and done < steps:
            tracker.close()
            preemption.leave()
    tracker.close()


def make_tracker(samples, args):
    """A resumed run continues its run of W&B, whose name is in a file beside the checkpoints."""
    file = Path(args.checkpoint_dir or "", "wandb-run.txt")
    run_id = None
    if args.checkpoint_dir and file.exists():
        run_id = file.read_text()
    tracker = tracking.Tracker("llm_FSDP", args, samples, run_id)
    if args.checkpoint_dir and args.wandb and dist.is_primary():
        file.write_text(tracker.run_id)
    return tracker


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


def refuse_jump(first_step, steps, scheduler):
    """Raise DistributedError if the rate of the loaded `scheduler`, a curve over all steps, would jump within a run."""
    saved_steps, scheduler.steps = scheduler.steps, steps
    if saved_steps != steps and first_step < min(steps, saved_steps):
        line = f"argument --epochs: it gives {steps} steps, and the checkpoint of step {first_step} is of {saved_steps}"
        raise dist.DistributedError(f"{line}: the learning rate would jump: finish these {saved_steps} steps first")
    if saved_steps == first_step < steps:
        line = f"the {saved_steps} steps of this run were done"
        dist.print_primary(f"{line}: the learning rate rises again, to a curve of {steps} steps", flush=True)


def reduce_only_after(model, is_last):
    """Until the backward of the last row, layers stay gathered and gradients stay whole.

    They also stay gathered after the forward of an evaluation, until the backward of the next step's last row.
    """
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(is_last)
    model.set_requires_gradient_sync(is_last)


@torch.no_grad()
def evaluate(model, held_out, step, samples, checkpoint_dir, tracker):
    """Print and track the mean loss of all held-out targets."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=dist.get_device())
    for row in llm_documents.share_of(held_out, range(len(held_out))):
        sums[0] += sum_of_losses(model, row)
        sums[1] += len(row.targets)
    loss_sum, n_targets = dist.all_reduce(sums).tolist()
    model.train()
    loss = loss_sum / n_targets
    refuse_nan("held-out loss", loss)
    line = f"{step} | held-out {loss:.4f}"
    dist.print_primary(line, flush=True)
    tracker.log(samples, held_out=loss)
    if checkpoint_dir and dist.is_primary():
        with open(Path(checkpoint_dir, "held-out.txt"), "a") as file:
            print(line, file=file)


def settings_of(model, rows, args):
    """What a resumed run must share: else it would continue another training, silently."""
    names = ("seed", "lr", "warmup", "weight_decay", "clip", "bf16", "global_batch_size", "lora", "lora_alpha")
    settings = {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
    settings["--length"] = rows.shape[2]
    settings["--data (checksum)"] = zlib.crc32(rows.numpy())
    if args.model and not args.from_scratch:
        settings["--model (checksum)"] = checksum_of_weights(model)
    return settings


def checksum_of_weights(model):
    """The memory of all weights of files, read as 16-bit integers and summed. It does not depend on the ranks.

    Adapters are left out: random numbers are others on another kind of CPU.
    """
    total = torch.zeros((), dtype=torch.int64, device=dist.get_device())
    for name, param in model.named_parameters():
        if ".lora_" not in name:
            total += param.detach().to_local().view(torch.int16).sum(dtype=torch.int64)
    return dist.all_reduce(total).item()


def refuse_nan(name, value):
    """Before a checkpoint or a result replaces a good one. `value` is the same on all ranks."""
    if not math.isfinite(value):
        line = f"the {name} is {value}: training has diverged, try a lower --lr"
        raise dist.DistributedError(line)


def seed_of(*parts):
    """A random seed that depends on all these whole numbers."""
    return random.Random(str(parts)).getrandbits(63)


def report(step, samples, taken, start, norm, lr, tracker):
    """Print and track the mean loss of the steps `taken`, their speed since `start`, and the largest memory."""
    shares, n_targets, n_tokens = zip(*taken, strict=True)
    loss = dist.all_reduce(torch.stack(shares)).mean().item()
    refuse_nan("loss", loss)
    norm = norm.full_tensor().item()
    refuse_nan("gradient norm", norm)
    seconds = time.perf_counter() - start  # after something has waited for the device
    counts = torch.tensor([sum(n_targets), sum(n_tokens)], dtype=torch.float64)
    targets, tokens = (dist.all_reduce(counts) / seconds).tolist()
    memory = dist.all_reduce(torch.tensor(peak_memory()), op="max").item()  # of any process
    speed = f"{targets:,.0f} targets/s | {tokens:,.0f} tokens/s | {memory / 1e6:,.0f} MB"
    dist.print_primary(f"{step} | loss {loss:.4f} | norm {norm:.2f} | lr {lr:.1e} | {speed}", flush=True)
    tracker.log(samples, loss=loss, norm=norm, lr=lr, tokens_per_second=tokens)


def peak_memory():
    """Bytes: the most that this process has had allocated on its GPU, or resident in memory on the CPU."""
    if dist.get_device().type != "cpu":
        return torch.accelerator.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# ---- data ---------------------------------------------------------------------------------------------------------


def prepare(args):
    """The whole model on rank 0, None on the others. On all: its configuration and types, and the rows.

    Only rank 0 reads files. Raises DistributedError on every rank if something cannot be read.
    """
    whole = rows = held_out = shared = None
    found = llm_hub.on_rank_0(read_all, args)
    if found:
        whole, rows, held_out = found
        shared = whole.config, llm_hub.types_of(whole)
    config, types = dist.broadcast_object(shared)
    return whole, config, types, llm_documents.broadcast_rows(rows), llm_documents.broadcast_rows(held_out)


def read_all(args):
    """The whole model, rows to train on, and rows held out. Begins the result."""
    with llm_hub.one_line(f"--model {args.model}"):  # what transformers raises becomes one line
        tokenizer, config, length = load_tokenizer_and_config(args)
    training, held_out = load_documents(tokenizer, args.data, args.eval_data, length)
    rows = rows_of(training, length, args.pad)
    held_out_rows = rows_of(held_out, length, args.pad)
    n_targets = (rows[:, llm_documents.TARGETS] != llm_documents.IGNORED).sum().item()
    padding = (rows[:, llm_documents.TOKENS] == llm_documents.PADDING).double().mean().item()
    print(
        f"{len(rows):,} rows of {length} tokens, {n_targets:,} targets, {padding:.1%} padding; "
        f"{len(held_out):,} documents are held out",
        flush=True,
    )
    before, in_loss = llm_documents.text_around_loss(training[0], tokenizer)
    print(f"in the loss, for example: {in_loss!r} after {before!r}", flush=True)
    with llm_hub.one_line(f"--model {args.model}"):
        name = None if args.from_scratch else args.model
        whole = change_model(load_whole_model(name, config, args.seed), args.lora, args.lora_alpha)
    refuse_unknown_tokens(training + held_out, whole, tokenizer, args.model)
    warn_if_answers_do_not_end(training, whole.generation_config, tokenizer)
    if args.lora:
        warn_if_rows_are_alike(training, whole.get_output_embeddings().weight, tokenizer)
    llm_hub.begin(args.output, tokenizer, whole)  # writes all but the weights, to see now that it can be written
    return whole, rows, held_out_rows


def rows_of(found, length, pad):
    lists = [[document] for document in found]
    if not pad:
        lists = llm_documents.pack(found, length)
    return llm_documents.make_rows(lists, length)


def load_tokenizer_and_config(args):
    """The tokenizer, the configuration, and the length of a row, whose default depends on the model."""
    if not args.model:
        length = args.length or 256
        tokenizer = llm_documents.library_tokenizer()
        return tokenizer, small_llama(tokenizer, length, args.attention), length
    tokenizer, config = llm_hub.load_tokenizer_and_config(args.model, args.attention)
    # Chat templates write today's date by strftime_now, which looks here.
    chat_template_utils.datetime = SimpleNamespace(now=functools.partial(first_start, args.checkpoint_dir))
    if args.chat_template:
        with llm_hub.one_line(f"--chat-template {args.chat_template}"):
            tokenizer.chat_template = args.chat_template.read_text(encoding="utf-8")
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or 2048
    length = args.length or min(2048, longest)
    if length > longest:
        raise ValueError(f"--length {length} is more than its {longest} positions")
    return tokenizer, config, length


def first_start(checkpoint_dir):
    """When this training was started first: texts with that date are the same after a resume on another day."""
    if not checkpoint_dir:
        return datetime.datetime.now()
    file = Path(checkpoint_dir, "first-start.txt")
    if not file.exists():
        file.write_text(datetime.datetime.now().isoformat())
    return datetime.datetime.fromisoformat(file.read_text())


def small_llama(tokenizer, length, attention="sdpa"):
    """The configuration of the model that is trained without --model."""
    return transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        attn_implementation=attention,
    )


def load_whole_model(name, config, seed):
    """The model to begin with, on the CPU: that of the folder `name`, or an untrained one."""
    torch.manual_seed(seed)
    if name:
        return llm_hub.load_model(name, config)
    return llm_hub.build_model(config, torch.get_default_dtype())


def refuse_unknown_tokens(found, whole, tokenizer, model_name):
    """Raise DistributedError if a token of the documents has no embedding."""
    n_embeddings = len(whole.get_input_embeddings().weight)
    token = 0
    for tokens, targets in found:
        token = max(token, tokens.max(initial=0), targets.max(initial=0))
    if token >= n_embeddings:
        line = f"--model {model_name}: token {token}, {tokenizer.decode(token)!r}, of the data has no embedding"
        sizes = f"the tokenizer has {len(tokenizer)} tokens, and the model {n_embeddings} embeddings"
        raise dist.DistributedError(f"{line}: {sizes}: resize them first, by resize_token_embeddings")


def warn_if_answers_do_not_end(found, generation_config, tokenizer):
    """Print a line if no token that ends generation is in the loss of conversations: then `generate` runs on."""
    answers = [targets for _, targets in found if llm_documents.IGNORED in targets]  # a plain text has only targets
    ends = generation_config.eos_token_id  # a number, a list or None
    if answers and ends is None:
        print("generation_config names no token that ends generation: `generate` runs on after an answer", flush=True)
    elif answers and not np.isin(np.concatenate(answers), ends).any():
        line = "which is in no answer of the data: `generate` runs on after an answer"
        print(f"generation_config ends generation at {tokenizer.decode(ends)!r}, {line}", flush=True)


def warn_if_rows_are_alike(found, head, tokenizer):
    """Print a line if rows of targets in the frozen `head` equal other rows, or are 0: they were never trained."""
    targets = torch.from_numpy(np.unique(np.concatenate([targets for _, targets in found]))).long()
    targets = targets[targets != llm_documents.IGNORED]
    # Rows that were trained differ in their first numbers.
    _, groups, sizes = head[:, :64].float().unique(dim=0, return_inverse=True, return_counts=True)
    alike = targets[(sizes[groups[targets]] > 1) | (head[targets] == 0).all(dim=1)]
    if len(alike):
        line = f"{len(alike)} tokens of the data, such as {tokenizer.decode(alike[:1])!r}, cannot be learned by --lora"
        print(f"{line}: their weights in the head, which stays as it is, equal those of others or are 0", flush=True)


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args(argv=None):
    parser = options.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--model", help="folder, or name on the Hugging Face Hub (default: a small Llama, untrained)")
    add("--from-scratch", action="store_true", help="take the configuration and the tokenizer of --model, no weights")
    add("--data", type=Path, nargs="+", help=".jsonl files (default: functions of Python's library)")
    add("--eval-data", type=Path, nargs="+", help="files to evaluate on (default: up to one line in 20 of --data)")
    add("--chat-template", type=Path, help="file with a chat template (default: the one of the tokenizer)")
    add("--output", default="runs/llm", help="write the trained model, or its adapters, to this folder")
    add("--checkpoint-dir", help="save in this folder, and resume from its newest checkpoint")
    add("--save-every", type=options.whole_number(1), default=500, help="steps between checkpoints")
    add("--keep", type=options.whole_number(1), help="checkpoints to keep (default: all)")
    lora_help = "freeze the model, train adapters of this rank (default: no)"
    add("--lora", type=options.whole_number(1), help=lora_help, metavar="RANK")
    add("--lora-alpha", type=options.positive_number, help="scale adapters by this / RANK (default: twice RANK)")
    add("--length", type=options.whole_number(2), help="tokens per row (default: up to 2048, 256 without --model)")
    add("--pad", action="store_true", help="do not pack: one document in each row, filled with padding")
    add("--global-batch-size", type=options.whole_number(1), default=8, help="rows per step, over all processes")
    add("--epochs", type=options.positive_number, default=3.0, help="passes over the data")
    lr_help = "learning rate (default: 2e-5; 2e-4 with --lora, 3e-4 from scratch, 4e-3 without --model)"
    add("--lr", type=options.positive_number, help=lr_help)
    add("--warmup", type=options.whole_number(0), help="warm-up steps (default: 10, or a tenth of all)")
    add("--weight-decay", type=options.number(0), default=0.0, help="weight decay of the matrices")
    add("--clip", type=options.number(0), default=1.0, help="largest norm of the gradient; 0 does not clip")
    bf16_help = "compute in bfloat16, keep parameters in float32 (default: on GPUs)"
    add("--bf16", action=argparse.BooleanOptionalAction, default=dist.device_count() > 0, help=bf16_help)
    kernels = ("sdpa", "eager", "flex_attention", "flash_attention_2")
    add("--attention", choices=kernels, default="sdpa", help="kernel of attention; some models have no sdpa")
    add("--gather-once", action="store_true", help="gather the layers once per step, not for each row: less is sent")
    add("--recompute", action="store_true", help="recompute activations in backward, to save memory")
    add("--compile", action="store_true", help="compile each layer with torch.compile")
    add("--log-every", type=options.whole_number(1), default=20, help="steps between lines of progress")
    add("--eval-every", type=options.whole_number(1), default=100, help="steps between evaluations")
    add("--wandb", action="store_true", help="track with Weights & Biases")
    add("--tensorboard", help="track with TensorBoard, in this folder")
    add("--seed", type=options.whole_number(0, 2**32 - 1), default=0, help="random seed")
    parser.add_nproc()
    args = parser.parse_args(argv)
    check_together(parser, args)
    set_defaults(args)
    if args.wandb:
        tracking.check_installed("wandb")
    if args.tensorboard is not None:
        tracking.check_installed("tensorboard")
    for option in ("output", "checkpoint_dir", "tensorboard"):
        if getattr(args, option) is not None:
            checkpoint_sharded.check_folder(f"--{option.replace('_', '-')}", getattr(args, option))
    return args


def check_together(parser, args):
    """Leave with one line if an option needs another one."""
    if args.model and not args.data:
        parser.error("argument --data: name the .jsonl files on which --model is trained")
    if args.chat_template and not args.model:
        parser.error("argument --chat-template: it is for the tokenizer of --model, which is not given")
    if args.from_scratch and not args.model:
        parser.error("argument --from-scratch: name the --model whose configuration and tokenizer are taken")
    if args.lora and (args.from_scratch or not args.model):
        parser.error("argument --lora: adapters need a --model with weights")
    if args.lora_alpha and not args.lora:
        parser.error("argument --lora-alpha: it scales adapters, so it needs --lora")
    if args.global_batch_size < args.nproc:
        line = f"{args.global_batch_size} is less than {args.nproc}, the number of processes"
        parser.error(f"argument --global-batch-size: {line}")


def set_defaults(args):
    if args.lora and not args.lora_alpha:
        args.lora_alpha = 2.0 * args.lora
    lr = 2e-5
    if args.lora:
        lr = 2e-4
    if args.from_scratch:
        lr = 3e-4
    if not args.model:
        lr = 4e-3
    args.lr = args.lr or lr


# ---- start --------------------------------------------------------------------------------------------------------


def main_worker(local_rank, world_size, args):
    # While rank 0 downloads and writes, the others wait. fully_shard needs a group of one process for mixed precision.
    dist.init_process_group(timeout=datetime.timedelta(hours=4), even_alone=True)
    watch.start()  # if the job stands still, one line says where each rank stands
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs: far faster matrix products, with 10 bits of mantissa
    if not dist.is_primary():
        transformers.utils.logging.set_verbosity_error()  # rank 0 loads, and may warn of tokens or rotary positions
    transformers.utils.logging.disable_progress_bar()
    whole, config, types, rows, held_out = prepare(args)
    model = make_model(whole, config, types, args)
    if dist.is_primary():
        whole.to("meta")  # its values are in the shards now
    line = f"Training {model.num_parameters(only_trainable=True):,} of {model.num_parameters():,} parameters"
    dist.print_primary(f"{line} on {world_size} x {dist.get_device().type}", flush=True)
    llm_hub.check_rows(model, rows.shape[2], args.pad)
    train(model, rows, held_out, args)
    llm_hub.save(model, whole, types, args.output)
    dist.print_primary(f"Wrote {args.output}")


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
