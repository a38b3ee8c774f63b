"""Every command of the README runs, its quoted output is what is printed, and its diffs are those of the files."""

import difflib
import itertools
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

README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def commands(block):
    """The commands of a block as they are typed, without the lines that they print."""
    return re.findall(r"^\$ ((?:.*\\\n)*.*)$", block, re.M)


# A block shows what one command prints, or commands alone.
QUOTED = {commands(block)[0]: block.splitlines()[1:] for block in blocks("console") if not block.count("\n$ ")}
QUOTED = {command: lines for command, lines in QUOTED.items() if lines and not command.endswith("\\")}
PLAIN = {block for block in blocks("console") if commands(block)[0] not in QUOTED}

# The same on a machine without GPUs, or in less time.
SMALLER = {
    "make test": "make --dry-run test",
    "make bench": "make --dry-run bench",
    "make plots": "make --dry-run plots",
    "_node gpu": "_node 2",
    "--model deep": "--model deep --batch-size 2500",
    "--data mnist": f"--data mnist --data-dir {os.environ.get('MNIST_ROOT', 'data')}",
    "--nnodes 1:4": "--nnodes 1:4 --rdzv-conf last_call_timeout=1",
    "10.0.0.1": "127.0.0.1",
}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def bash(script, folder, timeout):
    """Run as typed into a shell, in a folder that holds nothing but the scripts; returns what is printed."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": "", "HOME": str(folder)}  # where Flyte keeps its cache
    # `timeout` signals everything that the shell has started: torchrun then ends its workers.
    command = ["timeout", "--kill-after=35", str(timeout), "bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"status {done.returncode} of {script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def one_epoch(command):
    if "--epochs" in command or not re.search(r"(python|per-node \d|PORT) (min_FSDP|mnist_DDP|rpc_|flyte_)", command):
        return command
    return command.partition("  #")[0] + " --epochs 1"


def shape(text):
    return re.sub(r"\d+", "#", re.sub(r" on \S+\]", " on HOST]", text))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", QUOTED)
def test_quoted_output(command, tmp_path):
    """Numbers may differ on another machine."""
    stdout = bash(command, tmp_path, 250)
    assert [shape(line) for line in stdout.splitlines()] == [shape(line) for line in QUOTED[command]]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", sorted(PLAIN), ids=lambda block: commands(block)[0].partition("  ")[0])
def test_commands(block, tmp_path):
    if "--data mnist" in block and "MNIST_ROOT" not in os.environ:
        pytest.skip("MNIST_ROOT is not set, and the block has a command that needs the real MNIST")
    lines = [one_epoch(line) for line in commands(block)]
    if "--rank 0" in block:  # roles of one job: at once, and all must succeed
        lines = [f"{line} & jobs+=($!)" for line in lines] + ['for job in "${jobs[@]}"; do wait $job; done']
    if "--nnodes 2" in block:  # on both "machines", and both must succeed
        lines = [f"{line} & {line}; wait $!" for line in lines]
    script = "\n".join(lines)
    if "make" in script:
        script = f"cd {ROOT}\n{script}"
    for text, smaller in SMALLER.items():
        script = script.replace(text, smaller)
    script = script.replace("HOST:PORT", f"localhost:{free_port()}").replace("29500", str(free_port()))
    bash(script, tmp_path, 850)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and `ip`"
)
def test_two_machines_on_one(tmp_path):
    """Until both nodes have trained: three epochs."""
    (recipe,) = blocks("bash")
    script = recipe.replace("1000 1", "3 1").replace("/tmp/", f"{tmp_path}/")
    *lines, cleanup = script.strip().splitlines()
    output = bash("\n".join([f"trap '{cleanup}' EXIT", *lines, "wait"]), tmp_path, 150)
    assert "| Epoch 2 |" in output
    assert (tmp_path / "a" / "snapshot.pt").exists() and (tmp_path / "b" / "snapshot.pt").exists()


def test_the_helpers_example(tmp_path):
    (example,) = blocks("python")
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


def test_the_advice_on_logs(tmp_path):
    (options,) = re.findall(r"`torchrun (--log-dir .*?) …`", README)
    stdout = bash(f"torchrun --standalone --nproc-per-node 2 {options} multigpu_torchrun.py 1 1", tmp_path, 90)
    assert "[default0]:[CPU] Epoch 0 " in stdout
    assert list(tmp_path.glob("logs/*/attempt_0/1/stderr.log")), "as the README says"


def test_diffs():
    ladder = ["single_gpu.py", "multigpu_torchrun.py", "multinode_torchrun.py"]
    expected = []
    for names in itertools.pairwise(ladder):
        old, new = ((ROOT / name).read_text().splitlines() for name in names)
        expected.append("\n".join(difflib.unified_diff(old, new, *names, lineterm="")) + "\n")
    actual = blocks("diff")
    assert actual[:2] == expected, "the README does not show the diffs of the files as they are"
    typed = {" ".join(line.partition("  #")[0].split()) for block in blocks("console") for line in commands(block)}
    for block in actual[2:]:
        for command in re.split(r"^[-+](?=\w)", block, flags=re.M)[1:]:
            assert " ".join(command.replace("\n+", "\n").split()) in typed


def test_results_are_those_that_are_stored():
    stored = {path.stem: json.loads(path.read_text()) for path in (ROOT / "benchmarks/results").glob("*.json")}

    def ratios(name, *keys):
        return [f"{stored[name]['ratios'][key]['median']:.2f}" for key in keys]

    def seconds(processes, *cases):
        return [f"{stored['launch']['results'][case][processes]['median']:.1f} s" for case in cases]

    def speeds(*cases):
        return ratios("throughput", *(f"{model}: ours / {case}" for model in ("tiny", "small") for case in cases))

    steps = [row["median"] for row in stored["scaling"]["ratios"].values()]
    starters = ("launch", "torchrun", "accelerate", "spawn")
    expected = {
        "Starting 8": seconds("8", *starters),
        "Starting 16": seconds("16", *starters, "import torch"),
        "DDP written by hand": speeds("hand-written"),
        "Accelerate and Fabric": speeds("Accelerate in memory", "Fabric in memory"),
        "the usual loop": speeds("tutorial", "Accelerate", "Fabric"),
        "Time of a step": ratios("overhead", "with distributed.py / plain torch"),
        "Speed of reading": [f"{stored['data_path']['ratio']:.0f}"],
        "Time of a snapshot": [f"{stored[f'snapshot_stall_{size}MB']['ratio']:.2f}" for size in (1130, 300)],
        "Speed of HogWild": ratios(
            "param_server", *(f"hogwild / {case}" for case in ("usual", "usual, same", "usual, same, 2 threads", "DDP"))
        ),
        "DeepNet's peak": ratios("fsdp_memory", *(f"N = {n}: peak of fsdp / of ddp" for n in (2, 4))),
        "Step time": [f"{min(steps):.2f}", f"{max(steps):.2f}"],
    }
    results = README.partition("\n## Results\n")[2].partition("\n## ")[0]
    rows = [re.sub(r"\(.*?\)", "", row).split("|")[1:-1] for row in re.findall(r"^\|.*\d.*", results, re.M)]
    rows = {what.strip(): re.findall(r"\d[\d.]*(?: s\b)?", " ".join(cells)) for what, *cells in rows if what.strip()}
    assert len(rows) == len(expected)
    for strategy in ("fsdp", "ddp"):
        memory = stored["fsdp_memory"]["results"][strategy]["2"]
        assert f"| `--strategy {strategy}` | {memory['held']:.0f} MB | {memory['peak']:.0f} MB |\n" in README
    for start, numbers in expected.items():
        assert [actual for what, actual in rows.items() if what.startswith(start)] == [numbers], start


def test_every_script_is_mentioned():
    assert not [path.name for path in ROOT.glob("*.py") if f"`{path.name}`" not in README]


def test_every_linked_file_and_heading_exists():
    headings = {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", README, re.M)
    }
    links = re.findall(r"\]\(([^):]+)\)", README)
    assert links and not [link for link in links if not (link.startswith("#") or (ROOT / link).exists())]
    assert not [link for link in links if link.startswith("#") and link[1:] not in headings]


def test_every_named_test_exists():
    tests = "".join(path.read_text() for path in ROOT.glob("tests/test_*.py"))
    named = re.findall(r"`(test_\w+)`", "".join(re.findall(r"^\|.*", README, re.M)))
    assert named and not [name for name in named if f"def {name}(" not in tests]
