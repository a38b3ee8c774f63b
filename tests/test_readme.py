"""Every command of README.md, of docs/*.md and of a script's docstring runs; what is quoted is what is printed."""

import ast
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

README, DOCS = ROOT / "README.md", sorted((ROOT / "docs").glob("*.md"))
PAGES = {path: path.read_text() for path in (README, *DOCS)}
SCRIPTS = {path.name: path.read_text() for path in ROOT.glob("*.py")}


def blocks(language):
    return [block for page in PAGES.values() for block in re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)]


def commands(block):
    """The commands of a block as they are typed, without the lines that they print."""
    return re.findall(r"^\$ (.*)$", block.replace("\\\n", ""), re.M)


def docstring_commands(source):
    docstring = (ast.get_docstring(ast.parse(source)) or "").replace("\\\n", "")
    found = re.findall(r"^    ((?:\w+=\S+ +)*(?:python|torchrun) .*)$", docstring, re.M)
    return [command for command in found if "--data mnist" not in command or "MNIST_ROOT" in os.environ]


# A block shows what one command prints, or commands alone.
QUOTED = {commands(block)[0]: block.splitlines()[1:] for block in blocks("console") if block.count("$ ") == 1}
QUOTED = {command: lines for command, lines in QUOTED.items() if lines}
PLAIN = [commands(block) for block in blocks("console") if commands(block)[0] not in QUOTED]
PLAIN = {lines[0].partition("  #")[0].strip(): lines for lines in PLAIN}
PLAIN |= {name: lines for name, source in SCRIPTS.items() if (lines := docstring_commands(source))}

# The same on a machine without GPUs, or in less time.
SMALLER = {
    "make test": "make --dry-run test",
    "_node gpu": "_node 2",
    "--model deep": "--model simple",
    "--data mnist": f"--data mnist --data-dir {os.environ.get('MNIST_ROOT', 'data')}",
    "--nnodes 1:4": "--nnodes 1:4 --rdzv-conf last_call_timeout=1",
    "diff ": "! diff ",  # which exits with status 1 if there is a difference
}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def smaller(command):
    command = command.partition("  #")[0]
    script = next((name for name in SCRIPTS if f" {name}" in command), None)
    if script and "\nimport gpt\n" in SCRIPTS[script]:
        command += " --steps 4 --log-every 1 --width 64 --length 64" + " --least 1" * (script == "min_Join.py")
    elif script and re.match("min_FSDP|mnist_DDP|rpc_|flyte_", script) and "epochs" not in command:
        command += " --epochs 1"
    for text, replacement in SMALLER.items():
        command = command.replace(text, replacement)
    command = re.sub(r"HOST:\w+", f"localhost:{free_port()}", command)
    if nodes := re.search(r"--nnodes (\d) ", command):  # on all "machines" at once, and all must succeed
        # By their ids: `wait -n` knows nothing of a job that has ended while it waited for another.
        jobs = f"{command} & pids+=($!)\n" * int(nodes[1])
        command = f'pids=()\n{jobs}for pid in "${{pids[@]}}"; do wait "$pid"; done'
    return command


def bash(script, folder, timeout):
    """Run as typed into a shell, in a folder that holds nothing but the scripts; returns what is printed."""
    for name in SCRIPTS:
        shutil.copy(ROOT / name, folder)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": "", "HOME": str(folder)}  # where Flyte keeps its cache
    # `timeout` signals everything that the shell has started: torchrun then ends its workers.
    command = ["timeout", "--kill-after=35", str(timeout), "bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"status {done.returncode} of {script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def shape(line):
    return re.sub(r"\d[\d,.]*\d|\d", "#", line)


def matches(quoted, printed):
    """But for numbers, which may be others on another machine. A line by itself may stand anywhere, … is any lines."""
    quoted = ["…", *quoted, "…"] if len(quoted) == 1 else quoted
    pattern = "".join(r"(?:.*\n)*" if line == "…" else re.escape(shape(line)) + r"\n" for line in quoted)
    return re.fullmatch(pattern, shape(printed))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", QUOTED)
def test_quoted_output(command, tmp_path):
    stdout = bash(smaller(command), tmp_path, 250)
    assert matches(QUOTED[command], stdout), stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PLAIN)
def test_commands(name, tmp_path):
    start_anew = f"\nrm -f {tmp_path}/snapshot.pt\n"  # where the command before ended
    script = start_anew.join(map(smaller, PLAIN[name]))
    bash(f"cd {ROOT}\n{script}" if "make" in script else script, tmp_path, 850)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and `ip`")
def test_two_machines_on_one(tmp_path):
    """Until both nodes have trained: three epochs."""
    (recipe,) = blocks("bash")
    script = recipe.replace("1000 1", "3 1").replace("/tmp/", f"{tmp_path}/")
    *lines, cleanup = script.strip().splitlines()
    output = bash("\n".join([f"trap '{cleanup}' EXIT", *lines, "wait"]), tmp_path, 150)
    assert "| Epoch 2 |" in output
    assert (tmp_path / "a" / "snapshot.pt").exists() and (tmp_path / "b" / "snapshot.pt").exists()


def test_the_python_of_the_readme(tmp_path):
    main_worker, example = blocks("python")
    assert f"\n{main_worker}\n" in SCRIPTS["min_DDP.py"], "the README does not show main_worker as it is"
    script = """import torch
from torch.utils.data import DataLoader

dataset = torch.arange(64.0)[:, None]

def Net():
    return torch.nn.Linear(1, 1)

def train(model, loader, optimizer):
    assert type(model).__name__ == "DistributedDataParallel"
    return torch.cat(list(loader)).mean()

""" + example.replace("(main_worker)", "(main_worker, nprocs=2)")
    (tmp_path / "example.py").write_text(script)
    assert bash("python example.py", tmp_path, 60) == "".join(f"epoch {epoch}: 31.5000\n" for epoch in range(10))


@pytest.mark.slow
def test_the_advice_on_logs(tmp_path):
    (options,) = re.findall(r"`torchrun (--log-dir .*?) …`", PAGES[README])
    stdout = bash(f"torchrun --standalone --nproc-per-node 2 {options} multigpu_torchrun.py 1 1", tmp_path, 90)
    assert "[default0]:[CPU] Epoch 0 " in stdout
    assert list(tmp_path.glob("logs/*/attempt_0/1/stderr.log")), "as the README says"


@pytest.mark.parametrize(
    "old, new, most",
    [("single_gpu.py", "multigpu_torchrun.py", 100), ("multigpu_torchrun.py", "multinode_torchrun.py", 205)],
)
def test_the_rungs_of_the_ladder_are_close(old, new, most):
    changes = subprocess.run(["diff", old, new], cwd=ROOT, capture_output=True, text=True).stdout
    assert 0 < len(re.findall("^[<>]", changes, re.M)) <= most


def test_results_are_those_that_are_stored():
    stored = {path.stem: json.loads(path.read_text()) for path in (ROOT / "benchmarks/results").glob("*.json")}

    def ratios(name, *keys):
        return [f"{stored[name]['ratios'][key]['median']:.2f}" for key in keys]

    def seconds(processes, *cases):
        return [f"{stored['launch']['results'][case][processes]['median']:.1f} s" for case in cases]

    def speeds(*cases):
        return ratios("throughput", *(f"{model}: ours / {case}" for model in ("tiny", "small") for case in cases))

    def tokens(size, *cases):
        one, two = (stored["transformer"]["results"][f"{size}: {case}"]["tokens/s"]["median"] for case in cases)
        return f"{one / two:.2f}"

    steps = [row["median"] for row in stored["scaling"]["ratios"].values()]
    expected = {
        "Starting 8": seconds("8", "launch", "torchrun", "accelerate", "spawn"),
        "Starting 16": seconds("16", "launch", "torchrun", "accelerate", "spawn", "import torch"),
        "Samples per second": speeds("hand-written", "hand-written, fused", "Accelerate in memory", "Fabric in memory"),
        "The same / the usual loop": speeds("tutorial", "Accelerate", "Fabric"),
        "Time of a step": ratios("overhead", "with distributed.py / plain torch"),
        "Speed of reading": [f"{stored['data_path']['ratio']:.0f}"],
        "Time of a snapshot": [f"{stored[f'snapshot_stall_{size}MB']['ratio']:.2f}" for size in (1130, 300)],
        "Speed of HogWild": ratios(
            "param_server", *(f"hogwild / {case}" for case in ("usual", "usual, same", "usual, same, 2 threads", "DDP"))
        ),
        "DeepNet's peak": ratios("fsdp_memory", *(f"N = {n}: peak of fsdp / of ddp" for n in (2, 4))),
        "Tokens/s": [
            *(tokens(f"width {width}", "TP", "DDP") for width in (128, 1024)),
            *(tokens(f"length {length}", "CP", "one process") for length in (512, 8192)),
        ],
        "Steps by ZeRO": ratios(
            "sharing_state", *(f"width 512: step of {case} / of DDP" for case in ("ZeRO", "ZeRO --library", "FSDP"))
        ),
        "Held-out loss": [
            f"{stored['sharing_talk']['results'][case]['held-out']:.2f}"
            for case in ("DDP, rate 0.001", *(f"H {h}: DiLoCo, rate 0.001" for h in (1, 5, 20, 50)))
        ],
        "Step time": [f"{min(steps):.2f}", f"{max(steps):.2f}"],
    }
    results = PAGES[README].partition("\n## Results\n")[2].partition("\n## ")[0]
    rows = [re.sub(r"\(.*?\)", "", row).split("|")[1:-1] for row in re.findall(r"^\|.*\d.*", results, re.M)]
    rows = {what.strip(): re.findall(r"\d[\d.]*(?: s\b)?", measured) for what, measured in rows}
    assert len(rows) == len(expected)
    for start, numbers in expected.items():
        assert [actual for what, actual in rows.items() if what.startswith(start)] == [numbers], start
    for strategy in ("fsdp", "ddp"):
        memory = stored["fsdp_memory"]["results"][strategy]["2"]
        row = f"| `--strategy {strategy}` | {memory['held']:.0f} MB | {memory['peak']:.0f} MB |\n"
        assert row in PAGES[ROOT / "docs" / "results.md"]
    steps = stored["step"]["results"].values()
    for case in {case for row in steps for case in row}:
        medians = [row[case]["median"] if case in row else None for row in steps]
        cells = ["" if ms is None else f" {ms:.2f}" if ms < 10 else f" {ms:.0f}" for ms in medians]
        assert f"| {case} |{' |'.join(cells)} |\n" in PAGES[ROOT / "docs" / "results.md"]
    assert ", ".join(f"{accuracy:.4f}" for accuracy in stored["mnist_accuracy"]["accuracies"]) in PAGES[README]


def test_every_script_and_page_is_named_and_every_named_test_exists():
    assert not [name for name in SCRIPTS if f"[`{name}`]({name})" not in PAGES[README]]
    assert not [path.name for path in DOCS if f"](docs/{path.name})" not in PAGES[README]]
    named = SCRIPTS.keys() - {"distributed.py"}
    assert not [name for name in named if not (ROOT / "tests" / f"test_{name}").exists()]
    named = re.findall(r"\[`(test_\w+)`\]\((.*?)\)", PAGES[README])
    assert named and not [name for name, path in named if f"\ndef {name}(" not in (ROOT / path).read_text()]
    assert PAGES[README].count("\n") <= 350 and "<!--" not in "".join(PAGES.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_linked_file_and_heading_exists(page):
    headings = re.findall(r"^#+ (.*)$", PAGES[page], re.M)
    headings = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
    links = re.findall(r"\]\(([^):]+)\)", PAGES[page])
    assert not [link for link in links if not (link.startswith("#") or (page.parent / link).exists())]
    assert not [link for link in links if link.startswith("#") and link[1:] not in headings]
