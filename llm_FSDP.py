"""The file to start from for language models: fine-tune or pretrain any causal LM of Hugging Face, sharded by FSDP.

Four places say CHANGE HERE: the loss, the model, the optimizer, the data. Each step takes one global batch of rows. A
row holds several documents, and a document does not see the others. Each of N ranks computes every N-th row, and each
row is a micro-batch: one forward and one backward. A rank holds 1/N of each layer: of the parameters, the gradients and
Adam's state. A step is, on every rank at the same time:

    forward of each row       layer by layer: gather the layer --- compute --- free the gathered copy, keep 1/N
    backward of each row      the last layer first: gather --- compute --- sum the gradients of all ranks, keep 1/N
    after the last row        clip by the norm of all gradients --- AdamW on the shards of this rank

    loss = (sum of the losses of all targets of all ranks and rows) / (number of all these targets)

A target is a token that is in the loss: a label other than -100. So the number of processes changes the speed and not
the result, except for rounding and dropout. min_FSDP.py explains FSDP. No process holds the whole model on its device,
unless you ask for it by --gather-once: it is built on the meta device, which has shapes without memory, then sharded,
then filled by rank 0, which alone reads files. With --lora the model is frozen, and small matrices beside its linear
layers are trained. The result is a folder that `from_pretrained` of transformers, or of PEFT, loads. Checkpoints resume
on any number of processes.

In the words of TRL, --length is max_length, --global-batch-size is per_device_train_batch_size ·
gradient_accumulation_steps · N, and packing and assistant_only_loss are on. Not offered: a base in 4 bits, code from
the Hub, tokenizers that are not fast, the router's loss of a mixture of experts. --lora adapts linear layers, but not
experts that are stored as one 3-D tensor, which PEFT adapts too.

Choose mnist_DDP.py for images, and min_FSDP.py or min_Packing.py to learn one of the ideas.

Cost per process for P parameters on N processes: 16·P/N bytes between two steps (float32 parameters 4, gradients 4,
Adam 8), with --lora 2·P/N (bfloat16). Rank 0 also needs the CPU's memory for one model, 2·P bytes in bfloat16, while it
writes the result. With bfloat16 each row sends up to (N-1)/N · 8·P bytes: it gathers the parameters twice, 2·P each,
and reduces float32 gradients, 4·P; with --lora (N-1)/N · 4·P. The activations of one row and the logits of its targets
come on top: they are what runs out of memory, and --recompute keeps only each layer's input. With --gather-once a step
sends (N-1)/N · 6·P bytes, for any number of rows, and holds 6·P more: the gathered model and its whole gradients. It is
faster for a small model.

    python llm_FSDP.py --nproc 2                                               # no network: a small Llama, from scratch
    python llm_FSDP.py --model Qwen/Qwen3-8B --data chats.jsonl --lora 16      # all GPUs of this machine
    python llm_FSDP.py --model folder --data chats.jsonl --checkpoint-dir runs/a   # the same command again resumes
    torchrun --nnodes 2 --nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint HOST:29400 llm_FSDP.py \
        --model Qwen/Qwen3-0.6B --from-scratch --data books/*.jsonl            # two machines

The data are .jsonl files, up to 1 GB together, as `Dataset.to_json` of Hugging Face writes them: {"messages": [...]} or
{"text": ...}. In a conversation only the assistant's words are in the loss. It prints `step 20/370 | loss 6.2499 | norm
1.64 | lr 4.0e-03 | 3,892 targets/s | 7,686 tokens/s | 656 MB`. Neither speed counts padding. On a known GPU the line
ends with the model FLOPs utilization (MFU). Every --eval-every steps it prints `step 100/370 | held-out 4.2481`, the
mean loss of the documents that are not trained on.
"""

import contextlib
import importlib.util
import math
import os
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as torch_dist
import transformers
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

import checkpoint
import distributed as dist
import documents
import hub
import options
import tracking

# ---- the step -----------------------------------------------------------------------------------------------------


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


def sum_of_losses(model, row):
    # In a conversation, the targets are what the assistant says: documents.texts_of finds it.
    # Positions that start at 0 again keep documents apart, but only without a cache and without an attention mask.
    # transformers looks for them at the start of each forward, and waits for the device there.
    # Logits are computed for the targets of one row at a time: a large vocabulary makes them large.
    output = model(row.tokens, position_ids=row.positions, use_cache=False, logits_to_keep=row.places)
    logits = output.logits[0].to(torch.get_default_dtype())  # bfloat16 has too few digits for a sum of losses
    # CHANGE HERE, 1 of 4: the loss. A sum over targets, not a mean, since rows have unequal numbers of them.
    return F.cross_entropy(logits, row.targets, reduction="sum")


def reduce_only_after(model, is_last):
    """Until the backward of the last row, layers stay gathered and gradients stay whole.

    In an evaluation layers stay gathered after forward too, until the next step's last backward.
    """
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(is_last)
    model.set_requires_gradient_sync(is_last)


# ---- model and optimizer ------------------------------------------------------------------------------------------


def make_model(whole, config, args):
    """This rank's shards of the model, with the values of rank 0's `whole` model. The other ranks pass None."""
    device = dist.get_device()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtype = torch.get_default_dtype()  # float32
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    if args.precision == "mixed":
        # Parameters are gathered in bfloat16. The shards of trained weights, and Adam's state, stay float32.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):  # shapes without memory
        # CHANGE HERE, 2 of 4: the model. Freeze parameters here, on every rank, before they are sharded.
        if args.lora:
            model = hub.build_model(config, config.dtype, args.attention)  # frozen, so it keeps the type of its files
            hub.add_lora(model, args.lora, args.lora_alpha)
        else:
            model = hub.build_model(config, dtype, args.attention)
    for layer in hub.layers_of(model):
        if args.recompute:
            recompute_in_backward(layer)
        if args.compile:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)  # a unit, which is gathered and freed by itself
    embedding = model.get_input_embeddings()
    if embedding.weight is not model.get_output_embeddings().weight:  # a tied one belongs to the root
        fully_shard(embedding, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # the rest
    hub.fill(model, whole)
    return model


def recompute_in_backward(layer):
    """Save only the layer's input for backward, which computes the rest again."""
    forward = layer.forward

    def forward_without_saving(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return recompute(forward, *args, use_reentrant=False, **kwargs)

    layer.forward = forward_without_saving


def make_optimizer(model, steps, args):
    """The optimizer of the trained weights, and a scheduler that is stepped after each of `steps` steps."""
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": [param for param in trained if param.dim() >= 2], "weight_decay": args.weight_decay}]
    vectors = [param for param in trained if param.dim() < 2]
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    # CHANGE HERE, 3 of 4: the optimizer. It is built after sharding, because it steps the shards.
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)

    warmup = args.warmup
    if warmup is None:
        warmup = min(10, steps // 10)

    def factor(step):
        """The learning rate of `step`, as a fraction of --lr: it rises to 1, then falls to 0.1 along a cosine."""
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = (step - warmup) / max(1, steps - warmup)
        return 0.55 + 0.45 * math.cos(math.pi * progress)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


# ---- data ---------------------------------------------------------------------------------------------------------


def load_documents(tokenizer, length, args):
    """Documents to train on, and documents held out: lists of pairs of arrays, tokens and targets. Rank 0 calls it."""
    # CHANGE HERE, 4 of 4: the data. See documents.py for the pairs, and its `texts_of` for the tokens in the loss.
    if not args.data:
        lines = documents.read(documents.lines_of_library(), tokenizer, length)
    else:
        lines = documents.read(documents.lines_of(args.data), tokenizer, length, args.cut)
    lines = [found for found in lines if found]  # without those that are too long
    if args.eval_data:
        held_out = documents.read(documents.lines_of(args.eval_data), tokenizer, length, args.cut)
    else:
        every = max(20, len(lines) // 500)
        held_out = lines[::every]
        del lines[::every]
    return [document for line in lines for document in line], [document for line in held_out for document in line]


def make_rows(tokenizer, length, args):
    """Rows (n, 3, length) to train on, and rows held out. Rank 0 calls it."""
    training, held_out = load_documents(tokenizer, length, args)
    if training and args.eval_data and not held_out:
        raise dist.DistributedError(f"--eval-data: no document fits into --length {length}")
    if not training or not held_out:
        raise dist.DistributedError(f"--data: too few documents fit into --length {length} to train and to hold out")
    rows = rows_of(training, length, args)
    held_out_rows = rows_of(held_out, length, args)
    n_targets = (rows[:, documents.TARGETS] != documents.IGNORED).sum().item()
    padding = (rows[:, documents.TOKENS] == documents.PADDING).double().mean().item()
    print(
        f"{len(rows):,} rows of {length} tokens, {n_targets:,} targets, {padding:.1%} padding; "
        f"{len(held_out):,} documents are held out",
        flush=True,
    )
    before, in_loss = documents.text_around_loss(training[0], tokenizer)
    print(f"in the loss, for example: {in_loss!r} after {before!r}", flush=True)
    return rows, held_out_rows


def rows_of(found, length, args):
    lists = [[document] for document in found]
    if not args.pad:
        lists = documents.pack(found, length)
    return documents.make_rows(lists, length)


# ---- training -----------------------------------------------------------------------------------------------------


class Trainer:
    def __init__(self, model, rows, held_out, args):
        self.model = model
        self.rows = rows
        self.held_out = held_out
        self.args = args
        self.steps = math.ceil(args.epochs * len(rows) / args.global_batch_size)
        self.optimizer, self.scheduler = make_optimizer(model, self.steps, args)
        self.trained = [param for param in model.parameters() if param.requires_grad]
        self.tracker = tracking.Tracker("llm_FSDP", args.wandb, args.tensorboard)
        self.preemption = None
        if args.checkpoint_dir:
            self.preemption = checkpoint.Preemption()
            self.checksum = checksum_of_weights(model)  # a checkpoint overwrites them, or leaves frozen ones out
        self.speed = Speed(model, args)

    def train(self):
        """Returns the loss of every step of this run, over all processes, and whether all steps are done."""
        first_step = self.resume()
        if first_step > self.steps:
            line = f"the checkpoint has {first_step} steps, more than the {self.steps} that --epochs gives"
            raise dist.DistributedError(line, on_all_ranks=True)
        self.tracker.start(None, self.args, first_step * self.args.global_batch_size)
        if first_step == 0:
            self.evaluate(0)
        # This rank's shares of the losses; on the device, to avoid a sync every step.
        losses = torch.zeros(self.steps, device=dist.get_device())
        last_line = first_step
        preempted = False
        done = first_step
        while done < self.steps and not preempted:
            share, norm, lr = self.train_step(done)
            losses[done] = share
            done += 1
            preempted = self.preemption is not None and self.preemption.agreed()
            is_last = done == self.steps
            saves = bool(self.args.checkpoint_dir) and (done % self.args.save_every == 0 or is_last or preempted)
            # The line and the evaluation come first. They end a diverged run before it saves.
            if done % self.args.log_every == 0 or is_last or preempted or saves:
                self.print_line(done, losses[last_line:done], norm, lr)
                last_line = done
            if (done % self.args.eval_every == 0 and not preempted) or is_last:
                self.evaluate(done)
            if saves:
                self.save(done)
        self.tracker.close()
        return dist.all_reduce(losses[first_step:done]), done == self.steps

    def train_step(self, step):
        """Returns this rank's share of the loss, the norm of all gradients, and the learning rate of the step."""
        batch = documents.global_batch(len(self.rows), self.args.global_batch_size, step, self.args.seed)
        own_rows = list(documents.share_of(self.rows, batch))
        torch.manual_seed(seed_of(self.args.seed, step, dist.get_rank()))  # of dropout: the same after a resume
        self.optimizer.zero_grad()
        share = backward(self.model, own_rows, self.args.gather_once)
        norm = nn.utils.clip_grad_norm_(self.trained, self.args.clip)  # of DTensors: the norm over all shards
        self.optimizer.step()
        lr = self.scheduler.get_last_lr()[0]
        self.scheduler.step()
        self.speed.add(own_rows)
        return share, norm, lr

    def print_line(self, done, shares, norm, lr):
        loss = dist.all_reduce(shares.clone()).mean().item()
        refuse_nan("loss", loss)
        norm = norm.full_tensor().item()
        refuse_nan("gradient norm", norm)
        line = f"step {done}/{self.steps} | loss {loss:.4f} | norm {norm:.2f} | lr {lr:.1e} | {self.speed.describe()}"
        dist.print_primary(line, flush=True)
        self.tracker.log(done * self.args.global_batch_size, loss=loss, lr=lr, norm=norm)

    @torch.no_grad()
    def evaluate(self, done):
        """Print the mean loss of all held-out targets, and return it."""
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=dist.get_device())
        with self.speed.paused():
            for row in documents.share_of(self.held_out, range(len(self.held_out))):
                sums[0] += sum_of_losses(self.model, row)
                sums[1] += len(row.targets)
            loss_sum, n_targets = dist.all_reduce(sums).tolist()
        self.model.train()
        loss = loss_sum / n_targets
        refuse_nan("held-out loss", loss)
        dist.print_primary(f"step {done}/{self.steps} | held-out {loss:.4f}", flush=True)
        self.tracker.log(done * self.args.global_batch_size, held_out=loss)
        return loss

    def resume(self):
        """Load the newest checkpoint, if there is one. Returns the step to run next."""
        if not self.args.checkpoint_dir:
            return 0
        parts = self.checkpoint_parts()
        return checkpoint.load_sharded(self.args.checkpoint_dir, self.model, self.optimizer, **parts)

    def save(self, done):
        parts = self.checkpoint_parts()
        with self.speed.paused():
            where = {"step": done, "keep": self.args.keep}
            checkpoint.save_sharded(self.args.checkpoint_dir, self.model, self.optimizer, **where, **parts)

    def checkpoint_parts(self):
        """What a checkpoint holds beside the model and the optimizer. It leaves frozen weights out."""
        args = self.args
        values = {"rows": len(self.rows), "--length": args.length, "--seed": args.seed, "--lr": args.lr}
        values["--data of the checksum"] = zlib.crc32(self.rows.numpy())
        values["--weight-decay"] = args.weight_decay
        values["--global-batch-size"] = args.global_batch_size
        values["--lora"] = args.lora
        values["--lora-alpha"] = args.lora_alpha
        values["a --model of the checksum"] = self.checksum
        both = Both(self.scheduler, self.tracker)
        return {"scheduler": both, "settings": checkpoint.Settings(values), "frozen": False}


class Both:
    """The state of the scheduler and of the tracker."""

    def __init__(self, scheduler, tracker):
        self.scheduler = scheduler
        self.tracker = tracker

    def state_dict(self):
        return {"scheduler": self.scheduler.state_dict(), "tracker": self.tracker.state_dict()}

    def load_state_dict(self, state):
        self.scheduler.load_state_dict(state["scheduler"])
        self.tracker.load_state_dict(state["tracker"])


def checksum_of_weights(model):
    """The sum of the bits of all weights, as whole numbers. It does not depend on the number of ranks."""
    whole_numbers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = torch.zeros((), dtype=torch.int64, device=dist.get_device())
    for param in model.parameters():
        shard = param.detach().to_local()
        total += shard.view(whole_numbers[shard.element_size()]).sum(dtype=torch.int64)
    return dist.all_reduce(total).item()


def refuse_nan(name, loss):
    """Before a checkpoint or a result replaces a good one. `loss` is the same on all ranks."""
    if not math.isfinite(loss):
        raise dist.DistributedError(f"the {name} is {loss}: training has diverged, try a lower --lr", on_all_ranks=True)


def seed_of(*numbers):
    """A random seed that depends on all these whole numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


# ---- speed --------------------------------------------------------------------------------------------------------

# Dense bfloat16 operations per second. https://www.nvidia.com/en-us/data-center/
PEAKS = {"A100": 312e12, "H100": 989.5e12, "H200": 989.5e12, "B200": 2250e12}


class Speed:
    """Targets and tokens per second since the line before, without padding, evaluations and saves."""

    def __init__(self, model, args):
        self.device = dist.get_device()
        self.peak = None
        is_dense = all(param.dim() < 3 for param in model.parameters())  # the experts of a layer are one 3-D tensor
        if self.device.type == "cuda" and args.precision == "mixed" and is_dense:
            name = torch.cuda.get_device_name()
            self.peak = next((peak for gpu, peak in PEAKS.items() if gpu in name), None)
        # Two operations per element of a matrix: in forward, for the gradient of the input, and for the gradient of the
        # matrix. A frozen matrix has no gradient. Attention and recomputed layers do not count.
        operations = 4 if args.lora else 6
        layers = hub.layers_of(model)
        matrices = [param for layer in layers for param in layer.parameters() if param.dim() == 2]
        self.per_token = operations * sum(param.numel() for param in matrices)
        self.per_target = operations * model.get_output_embeddings().weight.numel()
        self.begin()

    def begin(self):
        self.n_targets = 0
        self.n_tokens = 0
        self.start = time.perf_counter()

    def add(self, rows):
        self.n_targets += sum(len(row.targets) for row in rows)
        self.n_tokens += sum(row.n_tokens for row in rows)

    @contextlib.contextmanager
    def paused(self):
        start = time.perf_counter()
        yield
        self.start += time.perf_counter() - start

    def describe(self):
        """Read the clock after something has waited for the device."""
        seconds = time.perf_counter() - self.start
        counts = torch.tensor([self.n_targets, self.n_tokens], dtype=torch.float64, device=self.device)
        targets, tokens = (dist.all_reduce(counts) / seconds).tolist()
        memory = torch.tensor(float(dist.peak_memory(self.device)), device=self.device)
        memory = dist.all_reduce(memory, op="max").item()
        text = f"{targets:,.0f} targets/s | {tokens:,.0f} tokens/s | {memory / 1e6:,.0f} MB"
        if self.peak:
            operations = tokens * self.per_token + targets * self.per_target
            text += f" | MFU {operations / (self.peak * dist.get_world_size()):.1%}"
        self.begin()
        return text


# ---- options ------------------------------------------------------------------------------------------------------


def parse_args(argv=None):
    count = options.whole_number(1)
    parser = options.ArgumentParser(__doc__)
    add = parser.add_argument
    add("--model", help="folder, or name on the Hugging Face Hub (default: a small Llama, untrained)")
    add("--from-scratch", action="store_true", help="take the configuration and the tokenizer of --model, no weights")
    add("--data", type=Path, nargs="+", help=".jsonl files (default: functions of Python's library)")
    add(
        "--eval-data",
        type=Path,
        nargs="+",
        help=".jsonl files to evaluate on (default: one line in 20 of --data, or about 500 lines if it is large)",
    )
    add("--chat-template", type=Path, help="file with a chat template (default: the one of the tokenizer)")
    add("--output-dir", default="runs/llm", help="folder for the trained model, or for its adapters")
    add("--checkpoint-dir", type=options.path, help="save checkpoints here, and resume from the newest one")
    add("--save-every", type=count, default=500, help="save a checkpoint every N steps, and at the end", metavar="N")
    add(
        "--lora",
        type=count,
        metavar="RANK",
        help="freeze the model and train adapters of this rank (default: train the model)",
    )
    add("--lora-alpha", type=options.positive_number, help="scale adapters by this / RANK (default: twice RANK)")
    add("--merge", action="store_true", help="with --lora: also write the merged model, to OUTPUT_DIR/merged")
    length = options.whole_number(2)
    add("--length", type=length, help="tokens per row (default: 256 without --model, else 2048, or the model's limit)")
    add("--pad", action="store_true", help="do not pack: one document in each row, filled with padding")
    add("--cut", action="store_true", help="cut conversations that are too long, instead of leaving them out")
    add("--global-batch-size", type=count, default=8, help="rows per step, over all processes")
    add("--epochs", type=options.positive_number, default=3.0, help="passes over the training data")
    lr_help = "largest learning rate (default: 2e-5; 2e-4 with --lora, 3e-4 from scratch, 4e-3 without --model)"
    add("--lr", type=options.positive_number, help=lr_help)
    warmup_help = "steps in which the learning rate rises to --lr (default: 10, at most a tenth of all steps)"
    add("--warmup", type=options.whole_number(0), help=warmup_help, metavar="N")
    add("--weight-decay", type=options.number(0), default=0.0, help="weight decay of the matrices")
    add("--clip", type=options.positive_number, default=1.0, help="clip the global gradient norm to this value")
    precision_help = "mixed: compute in bfloat16, trained weights in float32 (default: mixed on GPUs, else float32)"
    add("--precision", type=options.one_of("mixed", "float32"), help=precision_help)
    attention = options.one_of("sdpa", "eager", "flex_attention", "flash_attention_2")
    add("--attention", type=attention, default="sdpa", help="sdpa, eager, flex_attention or flash_attention_2")
    add("--gather-once", action="store_true", help="gather the layers once per step, not for each row: less is sent")
    add("--recompute", action="store_true", help="recompute the layers in backward, to save memory")
    add("--compile", action="store_true", help="compile each layer with torch.compile")
    add("--keep", type=count, help="keep only the newest N checkpoints (default: all)", metavar="N")
    add("--log-every", type=count, default=20, help="print every N steps", metavar="N")
    add("--eval-every", type=count, default=100, help="evaluate every N steps, and at the end", metavar="N")
    add("--prompt", help="what the trained model answers at the end (default: nothing with --model)")
    add("--seed", type=options.seed_number, default=0, help="random seed")
    add("--wandb", action="store_true", help="track with Weights & Biases")
    add("--tensorboard", default="", help="track with TensorBoard, in this folder", metavar="FOLDER")
    parser.add_nproc()
    args = parser.parse_args(argv)
    check_together(parser, args)
    parser.refuse_without(args, "checkpoint_dir", "save_every", "keep")
    set_defaults(args)
    checkpoint.check_writable("--output-dir", args.output_dir)
    problem = hub.mixture_problem(args.output_dir, adapters=bool(args.lora))
    if problem:
        parser.error(f"argument --output-dir: {problem}")
    if args.checkpoint_dir:
        checkpoint.check_writable("--checkpoint-dir", args.checkpoint_dir)
    return args


def check_together(parser, args):
    """Leave with one line if an option needs another one."""
    if args.model and not args.data:
        parser.error("argument --data: name the .jsonl files on which --model is trained")
    if args.cut and not args.data:
        parser.error("argument --cut: it cuts conversations of --data, which is not given")
    if args.chat_template and not args.model:
        parser.error("argument --chat-template: it is for the tokenizer of --model, which is not given")
    if args.from_scratch and not args.model:
        parser.error("argument --from-scratch: name the --model whose configuration and tokenizer are taken")
    if args.lora and (args.from_scratch or not args.model):
        parser.error("argument --lora: adapters need a --model with weights")
    if args.lora_alpha and not args.lora:
        parser.error("argument --lora-alpha: it scales adapters, so it needs --lora")
    if args.merge and not args.lora:
        parser.error("argument --merge: it merges adapters, so it needs --lora")
    if args.wandb:
        check_installed("wandb")
    if args.tensorboard:
        check_installed("tensorboard")
        checkpoint.check_writable("--tensorboard", args.tensorboard)


def check_installed(package):
    spec = importlib.util.find_spec(package)
    is_folder = spec is not None and spec.origin is None  # W&B makes a folder `wandb`, which Python takes for a package
    if spec is None or is_folder:
        sys.exit(f"--{package}: {package} is not installed: pip install -r requirements-tracking.txt")


def set_defaults(args):
    if args.lora and not args.lora_alpha:
        args.lora_alpha = 2.0 * args.lora
    if not args.precision:
        args.precision = "mixed" if torch.cuda.is_available() else "float32"
    if not args.lr:
        if not args.model:
            args.lr = 4e-3
        elif args.from_scratch:
            args.lr = 3e-4
        elif args.lora:
            args.lr = 2e-4
        else:
            args.lr = 2e-5


# ---- start --------------------------------------------------------------------------------------------------------


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
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )


def load_tokenizer_and_config(args):
    """Sets args.length too, if it is not given."""
    if not args.model:
        args.length = args.length or 256
        tokenizer = documents.library_tokenizer()
        return tokenizer, small_llama(tokenizer, args.length)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    if not tokenizer.is_fast:
        raise ValueError("its tokenizer is not a fast one, which knows at which character a token starts")
    config = transformers.AutoConfig.from_pretrained(args.model)
    if args.chat_template:
        tokenizer.chat_template = read_template(args.chat_template)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or 2048
    args.length = args.length or min(2048, longest)
    if args.length > longest:
        raise ValueError(f"--length {args.length} is more than its {longest} positions")
    return tokenizer, config


def read_template(path):
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        raise dist.DistributedError(f"--chat-template {path}: {failure}") from None


def load_whole_model(config, args):
    """The model to begin with, on the CPU. Rank 0 calls it."""
    torch.manual_seed(args.seed)
    if args.model and not args.from_scratch:
        whole = hub.load_model(args.model, config, args.attention)
    else:
        whole = hub.build_model(config, torch.get_default_dtype(), args.attention)
    config.dtype = whole.dtype  # in which the result is written
    if args.lora:
        hub.add_lora(whole, args.lora, args.lora_alpha)
    return whole


def prepare(args):
    """Tokenizer and whole model on rank 0, None on the others; configuration and rows on all. Only rank 0 reads files.

    Raises DistributedError on every rank if something cannot be read.
    """
    tokenizer = whole = config = rows = held_out = error = None
    if dist.is_primary():
        try:
            tokenizer, config = load_tokenizer_and_config(args)
            rows, held_out = make_rows(tokenizer, args.length, args)
            whole = load_whole_model(config, args)
            warn_if_answers_do_not_end(whole.generation_config, rows, tokenizer)
        except (ImportError, OSError, ValueError, SafetensorError) as failure:
            cause = str(failure).strip().partition("\n")[0]
            error = f"--model {args.model}: {cause}"
        except dist.DistributedError as failure:
            error = str(failure)
    group = dist.patient_group()  # a download may take longer than NCCL waits
    dist.raise_on_all(error, group)
    config, args.length = dist.broadcast_object((config, args.length), group=group)
    return tokenizer, whole, config, documents.broadcast_rows(rows), documents.broadcast_rows(held_out)


def warn_if_answers_do_not_end(generation_config, rows, tokenizer):
    """Print a line if no token that ends generation is in the loss: then `generate` runs on."""
    ends = generation_config.eos_token_id  # a number, a list or None
    if ends is None:
        print("generation_config names no token that ends generation: `generate` runs on after an answer", flush=True)
        return
    targets = rows[:, documents.TARGETS]
    if not torch.isin(targets, torch.tensor(ends)).any():
        line = "which is in no answer of the data: `generate` runs on after an answer"
        print(f"generation_config ends generation at {tokenizer.decode(ends)!r}, {line}", flush=True)


def init_process_group():
    """A group of one process too: fully_shard needs it for mixed precision."""
    dist.init_process_group()
    if not dist.is_dist_avail_and_initialized():
        backend = "nccl" if dist.get_device().type == "cuda" else "gloo"
        torch_dist.init_process_group(backend, store=torch_dist.HashStore(), rank=0, world_size=1)


def main_worker(local_rank, world_size, args):
    init_process_group()
    if args.global_batch_size < world_size:
        line = f"--global-batch-size {args.global_batch_size} is less than {world_size}, the number of processes"
        raise dist.DistributedError(line, on_all_ranks=True)
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs: far faster matrix products, with 10 bits of mantissa
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer, whole, config, rows, held_out = prepare(args)
    model = make_model(whole, config, args)
    del whole
    n_params = sum(param.numel() for param in model.parameters())
    n_trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    line = f"Training {n_trained:,} of {n_params:,} parameters on {world_size} x {dist.get_device().type}"
    dist.print_primary(line, flush=True)
    if not args.pad:
        hub.check_packing(model, args.length)
    if not args.model:
        guess = documents.bigram_loss(rows, held_out, config.vocab_size)
        dist.print_primary(f"loss in nats per token; guessing by bigrams {guess:.4f}", flush=True)
    trainer = Trainer(model, rows, held_out, args)
    _, finished = trainer.train()
    if not finished:
        trainer.preemption.leave()
    write_results(model, tokenizer, config, args)
    prompt = args.prompt
    if not prompt and not args.model:
        prompt = 'def is_empty(self):\n    """Return True if the queue is empty."""\n'
    if prompt:
        text = hub.answer(model, tokenizer, prompt)
        dist.print_primary(f"{prompt}--->\n{text}", flush=True)


def write_results(model, tokenizer, config, args):
    if args.lora:
        hub.save_adapters(model, tokenizer, args.output_dir, args.model)
    else:
        hub.save_model(model, tokenizer, config, args.output_dir)
    if args.merge:
        hub.save_model(model, tokenizer, config, os.path.join(args.output_dir, "merged"))
    dist.print_primary(f"Written to {args.output_dir}")


if __name__ == "__main__":
    cli_args = parse_args()
    dist.launch(main_worker, cli_args, nprocs=cli_args.nproc)
