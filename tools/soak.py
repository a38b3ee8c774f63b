"""Random jobs beside a load generator, for as long as one likes: what passes once must pass a thousand times.

    make soak MINUTES=30                         # or: python -m tools.soak --minutes 30 --seed 7
    python -m tools.soak --replay launch:1234    # one trial again, as it was drawn

- launch: 2 to 16 workers. All leave at once, or one fails, is killed, exits, or prints a long message. The first cause
  is reported, and the children of the workers end with them.
- torchrun: multigpu_torchrun.py with kills of random ranks and of the agent at random moments, and with snapshots
  damaged or removed between starts. The last snapshot equals the undisturbed run's bit for bit.
- sharded: min_FSDP.py saves after every step, and is killed, mostly inside save_sharded. Then it ends with the same
  bits.
- stream: the same with min_Stream.py and its state.
- finetune: the same with llm_FSDP.py, full or LoRA, and its exported model.
- generate: min_Generate.py is killed, and resumed by other numbers of processes. It ends with the same file.
- server: rpc_param_server.py with a killed trainer. The job continues to its end, once all have joined.
- survivors: min_FaultTolerant.py with processes that are killed or stopped at random moments. The others never end, and
  all end with the parameters of one process, in float64. A process that is killed after the last step is not missed.
- table: rpc_ddp.py with a killed server or trainer. All end, and the last line names who is lost.

After each, nothing is left running or listening, and no temporary file. A trial depends on its seed alone, but for the
scheduling of the machine. At the end, or after Ctrl-C, it prints a table and adds it to benchmarks/results/soak.json;
it exits with 1 after a failure.
"""

import argparse
import contextlib
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import psutil
import torch

import distributed as dist
import options
from benchmarks import common

ROOT = Path(__file__).parent.parent
MARK = "SOAK_MARK"  # in the environment of all that a trial starts
EPOCHS = 12


# ---- launch ---------------------------------------------------------------------------------------------------------


def worker(local_rank, world_size, how, victim):
    dist.init_process_group()
    if how == "leave":
        return
    model = dist.prepare_ddp_model(torch.nn.Linear(4, 1))
    model(torch.ones(4)).sum().backward()
    if local_rank == victim:
        subprocess.Popen(["sleep", "600"])
        if how == "fail":
            raise ValueError(f"the cause {'語' * 30_000}")
        if how == "message":
            sys.exit(f"the cause {'x' * 100_000}")
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(4)).sum().backward()  # waits for the victim
    dist.cleanup()


def launch_trial(rng, folder, kills):
    nprocs = rng.randint(2, 16)
    how, victim = rng.choice(["leave", "end", "fail", "message", "exit", "kill"]), rng.randrange(nprocs)
    causes = {"fail": f"rank {victim} raised", "message": "the cause", "exit": f"rank {victim} exited with status 3"}
    expected = {**causes, "kill": f"rank {victim} was killed by SIGKILL"}.get(how, "")
    try:
        dist.launch(worker, how, victim, nprocs=nprocs)
        message = ""
    except (Exception, SystemExit) as failure:
        message = str(failure)
    if how == "kill":
        kills.append(victim)
    assert message.startswith(expected) and bool(message) == bool(expected), f"{how}: {message[:300]!r}"


# ---- torchrun -------------------------------------------------------------------------------------------------------


def start_torchrun(nprocs, snapshot, log):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", nprocs, "--max-restarts", 2]
    command += [ROOT / "multigpu_torchrun.py", EPOCHS, 1, "--snapshot-path", snapshot]
    return subprocess.Popen([sys.executable, *map(str, command)], stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def ranks_of(process):
    """torchrun's workers."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in psutil.Process(process.pid).children() if "multigpu_torchrun" in str(cmdline(child))]
    return []


def cmdline(process):
    with contextlib.suppress(psutil.Error):
        return process.cmdline()


@functools.cache
def undisturbed(nprocs):
    """The snapshot's tensors at the end."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as log:
        assert start_torchrun(nprocs, f"{folder}/snapshot.pt", log).wait(300) == 0
        return torch.load(f"{folder}/snapshot.pt", weights_only=True)["model"]


def torchrun_trial(rng, folder, kills):
    nprocs, snapshot = rng.randint(2, 3), folder / "snapshot.pt"
    expected = undisturbed(nprocs)
    with open(folder.parent / "log", "w+") as log:
        for attempt in range(rng.randint(1, 3)):
            if attempt and snapshot.exists() and rng.random() < 0.4:
                disturb_snapshot(rng, snapshot, nprocs, log)
            process = start_torchrun(nprocs, snapshot, log)
            for _ in range(rng.randint(1, 2)):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(rng.uniform(0, 8))  # a random moment: of the start, of the training, or after it
                ranks = ranks_of(process)
                if rng.random() < 0.6 and ranks:
                    kill(rng.choice(ranks), kills)
            if rng.random() < 0.5:
                kill_agent(process, rng.choice([signal.SIGKILL, signal.SIGTERM]), kills)
            process.wait(300)
            log.flush()
        process = start_torchrun(nprocs, snapshot, log)
        assert process.wait(300) == 0, log_of(log)
        actual = torch.load(snapshot, weights_only=True)["model"]
        assert all(torch.equal(actual[name], expected[name]) for name in expected), "another result"
    assert os.listdir(folder) == ["snapshot.pt"], os.listdir(folder)


def disturb_snapshot(rng, snapshot, nprocs, log):
    """Remove it, or damage it: then a start is refused, with a line that names it, until it is moved away."""
    if rng.random() < 0.5:
        data = bytearray(snapshot.read_bytes())
        snapshot.write_bytes(data[: rng.randrange(len(data))])
        begin = log.tell()
        assert start_torchrun(nprocs, snapshot, log).wait(300) == 1
        log.seek(begin)
        assert f"{snapshot} on " in log.read()
    snapshot.unlink()


def kill(process, kills):
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
        kills.append(process.pid)


def kill_agent(process, number, kills):
    if process.poll() is None:
        process.send_signal(number)
        kills.append(process.pid)
    process.wait(90)
    if number == signal.SIGKILL:  # then it leaves its workers, also those that it was just starting
        for rank in marked(os.environ[MARK]):
            kill(rank, [])


def log_of(log):
    log.seek(0)
    return log.read()[-3000:]


# ---- jobs of `launch` that save often -------------------------------------------------------------------------------

SMALL = ["--layers", 1, "--width", 32, "--heads", 2, "--length", 32, "--global-batch-size", 4]
SMALL += ["--steps", 40, "--log-every", 40, "--save-every", 1]
TUNING = ["--length", 64, "--global-batch-size", 6, "--epochs", 7, "--lr", 0.01, "--save-every", 1]
ANSWERING = ["--new-bytes", 60, "--stop", "", "--batch-size", 2]


@functools.cache
def inputs():
    """A folder with a model and data for llm_FSDP.py, and a model and prompts for min_Generate.py."""
    import gpt
    from tests import language  # it imports transformers, and `worker` needs none of it

    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name)
    language.make_folder("llama", path / "llama")
    language.write_jsonl(path / "data.jsonl", language.records())
    sizes = {"layers": 2, "width": 36, "heads": 6, "length": 80}
    model = gpt.GPT(gpt.Config(**sizes), seed=1)
    torch.save({"sizes": sizes, "model": model.double().state_dict()}, path / "model.pt")
    prompts = [json.dumps({"prompt": f"{number}+{number * number}="}) + "\n" for number in range(400)]
    (path / "prompts.jsonl").write_text("".join(prompts))
    return folder


def start_saving(kind, nproc, folder, log):
    if kind == "sharded":
        command = ["min_FSDP.py", *SMALL, "--checkpoint-dir", folder / "state"]
    elif kind == "stream":
        command = ["min_Stream.py", *SMALL, "--buffer", 16, "--snapshot-path", folder / "state"]
    elif kind == "generate":
        path = Path(inputs().name)
        command = ["min_Generate.py", *ANSWERING, "--model", path / "model.pt", "--prompts", path / "prompts.jsonl"]
        command += ["--output", folder / "answers.jsonl"]
    else:
        path = Path(inputs().name)
        command = ["llm_FSDP.py", *TUNING, "--model", path / "llama", "--data", path / "data.jsonl"]
        command += ["--checkpoint-dir", folder / "state", "--output", folder / "trained"]
        command += ["--lora", 4] if kind == "finetune with LoRA" else []
    options = {"cwd": ROOT, "stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, *map(str, command), "--nproc", str(nproc)], **options)


def saved(kind, folder):
    """The trained parameters by name, or the bytes of the answers."""
    path = folder / "state"
    if kind == "generate":
        return {"answers": torch.tensor(list((folder / "answers.jsonl").read_bytes()))}
    if kind.startswith("finetune"):
        from safetensors.torch import load_file

        name = "adapter_model.safetensors" if "LoRA" in kind else "model.safetensors"
        return load_file(folder / "trained" / name)
    if kind == "sharded":
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # slow, and `worker` needs none of it

        path = folder.parent / "whole.pt"
        dcp_to_torch_save(folder / "state" / "step-40", path)
    return torch.load(path, weights_only=True)["model"]


@functools.cache
def undisturbed_result(kind):
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as log:
        inner = Path(folder) / "work"
        inner.mkdir()
        assert start_saving(kind, 2, inner, log).wait(300) == 0
        return saved(kind, inner)


def saving_trial(kind, rng, folder, kills, nprocs=(2,)):
    expected = undisturbed_result(kind)
    with open(folder.parent / "log", "w+") as log:
        for _ in range(rng.randint(1, 3)):
            process = start_saving(kind, rng.choice(nprocs), folder, log)
            before = newest_change(folder)
            while process.poll() is None and newest_change(folder) == before:
                time.sleep(0.01)  # until this start has saved
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0, 3))
            if process.poll() is None:
                workers = psutil.Process(process.pid).children(recursive=True)
                kill(rng.choice([psutil.Process(process.pid), *workers]), kills)
            process.wait(300)
            wait_for_the_others()
        if not (folder / "answers.jsonl").exists():  # or it was done before the kill
            process = start_saving(kind, rng.choice(nprocs), folder, log)
            assert process.wait(300) == 0, log_of(log)
        actual = saved(kind, folder)
        assert all(torch.equal(actual[name], expected[name]) for name in expected), "another result"


def newest_change(folder):
    """A number that changes whenever the job saves."""
    times = [folder.stat().st_mtime_ns]
    for path in (*folder.glob("state/step-*"), *folder.glob("answers.jsonl.parts-*/*")):
        with contextlib.suppress(FileNotFoundError):  # it has just been renamed
            times.append(path.stat().st_mtime_ns)
    return max(times)


def wait_for_the_others():
    """Until no process of a killed job is left: they end with it, but not in the same moment."""
    end = time.monotonic() + 60
    while marked(os.environ[MARK]) and time.monotonic() < end:
        time.sleep(0.05)


def sharded_trial(rng, folder, kills):
    saving_trial("sharded", rng, folder, kills)


def stream_trial(rng, folder, kills):
    saving_trial("stream", rng, folder, kills)


def finetune_trial(rng, folder, kills):
    saving_trial(rng.choice(["finetune", "finetune with LoRA"]), rng, folder, kills)


def generate_trial(rng, folder, kills):
    saving_trial("generate", rng, folder, kills, nprocs=(1, 2, 3))


# ---- the parameter server -------------------------------------------------------------------------------------------


def server_trial(rng, folder, kills):
    mode, trainers = rng.choice(["hogwild", "sync"]), rng.randint(2, 3)
    command = ["rpc_param_server.py", "--trainers", trainers, "--mode", mode, "--epochs", 1, "--batch-size", 128]
    with open(folder.parent / "log", "w+") as log:
        options = {"cwd": ROOT, "stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen([sys.executable, *map(str, command)], **options)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(3, 15))
        children = psutil.Process(process.pid).children(recursive=True) if process.returncode is None else []
        workers = [child for child in children if re.search("forkserver", str(cmdline(child)))]
        workers = sorted(workers, key=lambda p: p.pid)[2:]  # without the fork server itself and the server, rank 0
        if workers:
            kill(rng.choice(workers), kills)
        status = process.wait(300)
        text = log_of(log)
        if "Training on" in text:
            assert status == 0 and "Finished: " in text, text
        else:  # it was killed before all had joined: the job ends, and says so
            assert status and re.search(r"not all \d processes have joined within", text), text


def table_trial(rng, folder, kills):
    servers, trainers = rng.randint(1, 2), rng.randint(1, 2)
    command = ["rpc_ddp.py", "--servers", servers, "--trainers", trainers, "--rows", 1000, "--steps", 100_000]
    with open(folder.parent / "log", "w+") as log:
        options = {"cwd": ROOT, "stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen([sys.executable, *map(str, command), "--log-every", "1"], **options)
        while process.poll() is None and "step " not in log_of(log):
            time.sleep(0.05)
        time.sleep(rng.uniform(0, 2))
        workers = []
        for child in psutil.Process(process.pid).children(recursive=True):
            if child.ppid() != process.pid:  # a child of the fork server
                workers.append(child)
        kill(rng.choice(workers), kills)
        status = process.wait(300)
        text = log_of(log)
        assert status == 1 and re.search(r"(server|trainer)\d is lost: rank \d was killed by SIGKILL\n$", text), text


# ---- the survivors of min_FaultTolerant.py --------------------------------------------------------------------------

FAULTS = {"layers": 1, "width": 32, "heads": 4, "length": 32, "global_batch_size": 8, "steps": 1000, "log_every": 1000}
FAULTS |= {"lr": 0.001, "clip": 0.5, "seed": 3, "timeout": 5, "max_restarts": 10**6}
KILLS = 20  # in a trial


def survivor_worker(local_rank, world_size, folder):
    """The script's own, by SGD in float64. Each process writes the newest step that it has taken."""
    import min_FaultTolerant

    train, take_step = min_FaultTolerant.train, min_FaultTolerant.Trainer.take_step

    losses = {}  # by step, of the steps that this process takes

    def recorded_step(trainer, step):
        losses[step] = trainer.gradients[-1].clone()
        take_step(trainer, step)
        (folder / f"{os.getpid()}.step").write_text(str(step))
        os.rename(folder / f"{os.getpid()}.step", folder / f"{os.getpid()}.trainer")  # nobody reads a part of it

    def recorded_train(store, name, args):
        (folder / f"{os.getpid()}.trainer").touch()
        torch.set_default_dtype(torch.float64)
        torch.optim.AdamW = sgd
        trainer = train(store, name, args)
        if trainer.step == args.steps:
            state = {"losses": losses, "model": trainer.model.state_dict()}
            torch.save(state, folder / f"{name}.unfinished")
            os.rename(folder / f"{name}.unfinished", folder / f"{name}.pt")

    min_FaultTolerant.train, min_FaultTolerant.Trainer.take_step = recorded_train, recorded_step
    min_FaultTolerant.main_worker(local_rank, world_size, argparse.Namespace(**FAULTS, nproc=world_size))


def sgd(params, lr, fused=True):
    return torch.optim.SGD(params, lr=10 * lr, momentum=0.5)


@functools.cache
def one_process():
    """The losses and parameters of plain training."""
    import gpt

    args = argparse.Namespace(**FAULTS)
    torch.set_num_threads(1)  # beside the load generator, threads would wait for each other
    torch.set_default_dtype(torch.float64)
    model = gpt.GPT(gpt.Config.from_args(args), args.seed)
    optimizer, losses, (text, _) = sgd(model.parameters(), args.lr), [], gpt.load_text()
    for step in range(args.steps):
        x, y = gpt.batch(text, step, args.global_batch_size, args.length, args.seed)
        loss = gpt.loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        losses.append(loss.detach())
    torch.set_default_dtype(torch.float32)
    return torch.stack(losses), model.state_dict()


def survivors_trial(rng, folder, kills):
    expected_losses, expected = one_process()
    nprocs, ended, stopped = rng.randint(2, 4), threading.Event(), []
    killer = threading.Thread(target=kill_some, args=(rng, folder, kills, stopped, ended))
    killer.start()
    try:
        dist.launch(survivor_worker, folder, nprocs=nprocs)
    finally:
        ended.set()
        killer.join()
    results = [torch.load(path, weights_only=True) for path in folder.glob("*.pt")]
    assert results
    for result in results:
        error = max(abs(loss - expected_losses[step]).item() for step, loss in result["losses"].items())
        error = max(error, *((result["model"][name] - expected[name]).abs().max().item() for name in expected))
        assert error < 1e-10, f"another result, by {error}"
    n_started = len(list(folder.glob("*.trainer")))
    most = nprocs + len(kills) + len(stopped)
    assert n_started <= most, f"{n_started} processes were started, {len(kills)} killed, {len(stopped)} stopped"


def kill_some(rng, folder, kills, stopped, ended):
    """Kill one or two processes at random moments, or stop one for a while. One with the newest step is left.

    The others may leave a stopped one behind. Then its supervisor kills it, so it does not count as one that is left.
    """
    while len(kills) < KILLS and not ended.wait(rng.choice([rng.uniform(0, 0.1), rng.uniform(0, 1)])):
        steps = {}
        for path in folder.glob("*.trainer"):
            pid = int(path.stem)
            if pid not in kills and pid not in stopped:  # one that was killed just now may still be there
                steps[pid] = int(path.read_text() or -1)
        victims = rng.sample(sorted(steps), k=min(len(steps), rng.choice([1, 1, 1, 2])))
        left = [step for pid, step in steps.items() if pid not in victims]
        if not left or max(left) < max(steps.values()) or max(left) == -1:
            continue
        if rng.random() < 0.1:
            stopped.append(victims[0])
            with contextlib.suppress(ProcessLookupError):
                os.kill(victims[0], signal.SIGSTOP)
                ended.wait(rng.uniform(0, 3 * FAULTS["timeout"]))
                os.kill(victims[0], signal.SIGCONT)
        else:
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):  # it has finished
                    os.kill(pid, signal.SIGKILL)
                    kills.append(pid)


# ---- put together ---------------------------------------------------------------------------------------------------

TRIALS = {  # and how often
    "launch": (launch_trial, 20),
    "torchrun": (torchrun_trial, 3),
    "sharded": (sharded_trial, 2),
    "stream": (stream_trial, 2),
    "finetune": (finetune_trial, 2),
    "generate": (generate_trial, 3),
    "server": (server_trial, 1),
    "survivors": (survivors_trial, 3),
    "table": (table_trial, 1),
}


def marked(mark, before=None):
    """Processes that the trial started, and that are still there; with `before`, other new children too."""
    children, found = psutil.Process().children(recursive=True), []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_new = before is not None and process in children and process not in before
            if (is_new or process.environ().get(MARK) == mark) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def run_trial(kind, seed):
    """What went wrong, or None, and how many processes were killed."""
    os.environ[MARK] = mark = f"{kind}:{seed}:{time.time()}"
    before, kills = psutil.Process().children(recursive=True), []
    try:
        with tempfile.TemporaryDirectory() as folder:
            inner = Path(folder) / "work"
            inner.mkdir()
            TRIALS[kind][0](random.Random(f"{kind} {seed}"), inner, kills)
        end = time.monotonic() + 15  # the fork server of a command ends a moment after it
        left = marked(mark, before)
        while left and time.monotonic() < end:
            time.sleep(0.05)
            left = marked(mark, before)
        assert not left, f"left running: {[(process.pid, str(cmdline(process))[:150]) for process in left]}"
        listening = [c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
        assert not listening, f"left listening: {listening}"
        return None, len(kills)
    except Exception:
        return traceback.format_exc()[-3000:], len(kills)
    finally:
        del os.environ[MARK]


def main():
    parser = options.ArgumentParser(__doc__)
    parser.add_argument("--minutes", type=options.positive_number, default=30, help="how long")
    parser.add_argument(
        "--seed", type=options.whole_number(0), default=0, help="of the first trial; each next has one more"
    )
    parser.add_argument(
        "--load", type=options.whole_number(0), default=os.cpu_count(), help="processes that only compute"
    )
    parser.add_argument("--only", choices=tuple(TRIALS), help="trials of one kind")
    parser.add_argument("--replay", metavar="KIND:SEED", help="one trial again")
    args = parser.parse_args()
    if args.replay:
        kind, _, seed = args.replay.partition(":")
        sys.exit(run_trial(kind, int(seed))[0])
    dist.launch(worker, "end", 0, nprocs=2)  # starts the fork server, which stays
    results = {kind: {"trials": 0, "kills": 0, "seeds of failures": []} for kind in TRIALS}
    drawing = random.Random(args.seed)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.load)]
    end, seed = time.monotonic() + 60 * args.minutes, args.seed
    try:
        while time.monotonic() < end:
            weights = [often for _, often in TRIALS.values()]
            kind = args.only or drawing.choices(list(TRIALS), weights)[0]
            failure, kills = run_trial(kind, seed)
            results[kind]["trials"] += 1
            results[kind]["kills"] += kills
            if failure:
                results[kind]["seeds of failures"].append(seed)
                print(f"{kind}:{seed} failed\n{failure}", flush=True)
            seed += 1
    except KeyboardInterrupt:
        print(f"interrupted in the trial of seed {seed}")
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(f"{'kind':10} {'trials':>6} {'kills':>6} {'failures':>8}  seeds")
    for kind, row in results.items():
        failed = row["seeds of failures"]
        print(f"{kind:10} {row['trials']:6} {row['kills']:6} {len(failed):8}  {failed or ''}")
    minutes = args.minutes + (time.monotonic() - end) / 60
    what = {"minutes": minutes, "load": args.load, "seeds": [args.seed, seed - 1], "only": args.only}
    what["torch"] = torch.__version__
    path = common.RESULTS / "soak.json"
    earlier = json.loads(path.read_text())["results"] if path.exists() else []
    common.write("soak", {"unit": "trials", "results": [*earlier, {**what, **results}]})
    sys.exit(any(row["seeds of failures"] for row in results.values()))


if __name__ == "__main__":
    main()
