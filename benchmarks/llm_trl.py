"""Tokens per second of llm_FSDP.py and of TRL's SFTTrainer: the same model, data and number of CPU processes.

    pip install trl datasets accelerate
    python -m benchmarks.llm_trl

Both train all parameters of the same small Llama in float32 on the same texts, in full rows, with AdamW. TRL packs by
its strategy "wrapped", in which documents see each other; llm_FSDP.py keeps them apart. On CPUs accelerate has DDP and
no FSDP, so with two processes TRL sends gradients once a step. llm_FSDP.py sends weights and gradients for each row,
and with --gather-once once a step. TRL runs with one row at a time, as llm_FSDP.py does, and with four. The first line
of a run, its warm-up, is not counted.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers

import llm_documents
import llm_FSDP
import options
from benchmarks import common

ROOT = Path(__file__).parent.parent
LENGTH, GLOBAL_BATCH, STEPS, LOG_EVERY = 512, 8, 30, 10
PROMISE = "at least 1"
SFT = """
import sys, time, torch, transformers
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

folder, rows, length, per_process, n_processes, steps, warmup = sys.argv[1], *map(int, sys.argv[2:])

class Clock(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == warmup:
            self.start = time.perf_counter()
        if state.global_step == steps and state.is_world_process_zero:
            seconds = time.perf_counter() - self.start
            print(f"{(steps - warmup) * per_process * n_processes * length / seconds:.1f} tokens/s", flush=True)

config = SFTConfig(
    output_dir=folder + "/trl", max_length=length, packing=True, packing_strategy="wrapped", max_steps=steps,
    per_device_train_batch_size=rows, gradient_accumulation_steps=per_process // rows, learning_rate=2e-5,
    gradient_checkpointing=False, bf16=False, fp16=False, use_cpu=True, report_to=[], save_strategy="no",
    logging_steps=steps, disable_tqdm=True, dataset_text_field="text", model_init_kwargs={"dtype": torch.float32},
)
data = load_dataset("json", data_files=folder + "/texts.jsonl", split="train")
SFTTrainer(model=folder + "/llama", args=config, train_dataset=data, callbacks=[Clock()]).train()
"""


def make_files(folder):
    tokenizer = llm_documents.library_tokenizer()
    tokenizer.save_pretrained(folder / "llama")
    config = llm_FSDP.small_llama(tokenizer, LENGTH)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads = 256, 704, 4, 4
    config.num_key_value_heads, config.head_dim = 4, 64
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "llama")
    room = 4 * STEPS * GLOBAL_BATCH * LENGTH  # bytes; a token has about three
    with open(folder / "texts.jsonl", "w") as file:
        for path in sorted(llm_documents.LIBRARY.glob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            if len(text) < room:
                file.write(json.dumps({"text": text}) + "\n")
                room -= len(text)


def ours(folder, nproc, *more):
    command = [sys.executable, "llm_FSDP.py", "--nproc", nproc, "--model", folder / "llama", "--no-bf16"]
    command += ["--data", folder / "texts.jsonl", "--length", LENGTH, "--global-batch-size", GLOBAL_BATCH]
    command += ["--epochs", "1", "--log-every", LOG_EVERY, "--eval-every", 10**6]
    command += ["--output", Path(tempfile.mkdtemp(dir=folder), "ours"), *more]
    speeds = [float(found.replace(",", "")) for found in re.findall(r"([\d,]+) tokens/s", output_of(command))]
    return statistics.mean(speeds[1 : STEPS // LOG_EVERY])


def trl(folder, rows, nproc):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", nproc]
    launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command = [*launcher, folder / "sft.py", folder, rows, LENGTH, GLOBAL_BATCH // nproc, nproc, STEPS, LOG_EVERY]
    return float(re.search(r"([\d.]+) tokens/s", output_of(command))[1])


def output_of(command):
    job = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, timeout=900)
    if job.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{job.stdout}\n{job.stderr}")
    return job.stdout


def cases(folder, nproc):
    """Functions by label. Each trains, and returns tokens per second."""
    one = {"llm_FSDP.py": lambda: ours(folder, nproc)}
    if nproc > 1:
        one["llm_FSDP.py --gather-once"] = lambda: ours(folder, nproc, "--gather-once")
    one["TRL, one row at a time"] = lambda: trl(folder, 1, nproc)
    one["TRL, four rows at a time"] = lambda: trl(folder, 4, nproc)
    return {f"{label}, N = {nproc}": run for label, run in one.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=options.whole_number(1), default=3, help="runs of each")
    args = parser.parse_args()
    common.require("trl", "datasets", "accelerate")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder)
        (folder / "sft.py").write_text(SFT)
        runs = cases(folder, 1) | cases(folder, 2)
        speeds = {label: [] for label in runs}
        for _ in range(args.rounds):
            for label, run in runs.items():
                speeds[label].append(run())
                print(f"{label:34} {speeds[label][-1]:,.0f} tokens/s", flush=True)
    ratios = {}
    for best, nproc in (("llm_FSDP.py", 1), ("llm_FSDP.py --gather-once", 2)):
        for rows in ("one row", "four rows"):
            pair = f"{best}, N = {nproc}", f"TRL, {rows} at a time, N = {nproc}"
            ratios[" / ".join(pair)] = common.ratio(speeds[pair[0]], speeds[pair[1]], PROMISE)
    common.show(ratios)
    results = {label: common.summary(values) for label, values in speeds.items()}
    common.write("llm_trl", {"unit": "tokens per second", "results": results, "ratios": ratios})


if __name__ == "__main__":
    main()
