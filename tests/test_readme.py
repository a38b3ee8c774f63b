"""Every command of README.md, of docs/*.md and of a script's docstring runs, and prints lines of the quoted form."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import ROOT, float64, free_port, guards, slow

import distributed as dist
import gpt

README, AGENTS, DOCS = ROOT / "README.md", ROOT / "AGENTS.md", sorted((ROOT / "docs").glob("*.md"))
SCRIPTS_PAGE = ROOT / "docs" / "scripts.md"
PAGES = {path: path.read_text() for path in (README, AGENTS, *DOCS)}
SCRIPTS = {path.name: path.read_text() for path in ROOT.glob("*.py")}
FOUNDATION = {name for name, source in SCRIPTS.items() if "\nif __name__ == " not in source}  # imported, not run
TEST = r"\[`(test_\w+)`\]\((.*?)\)"
DIFF = re.search(r"^```diff\n(.*?)^```", PAGES[README], re.M | re.S)[1]


def blocks(language, pages=PAGES):
    return [block for path in pages for block in re.findall(rf"^```{language}\n(.*?)^```", PAGES[path], re.M | re.S)]


def sessions(block):
    """(command, lines that it prints) for each `$ command` of a block."""
    parts = re.split(r"^\$ ", block.replace("\\\n", ""), flags=re.M)[1:]
    return [(lines[0], lines[1:]) for lines in map(str.splitlines, parts)]


def inline_sessions(page):
    """The same for `$ command` → `line` in the text; not all have a line."""
    found = re.findall(r"`\$ ([^`]+)`(?:\s+→\s+`([^`]+)`)?", page)
    return [(" ".join(command.split()), [line] if line else []) for command, line in found]


def docstring_commands(source):
    docstring = (ast.get_docstring(ast.parse(source)) or "").replace("\\\n", "")
    found = re.findall(r"^    ((?:\w+=\S+ +)*(?:python|torchrun) .*)$", docstring, re.M)
    # Left out are models of the Hub, and folders that are not there.
    found = [command for command in found if " --model " not in command or " --model model.pt" in command]
    return [command for command in found if "--data mnist" not in command or "MNIST_ROOT" in os.environ]


QUOTED, PLAIN = {}, {}  # commands whose output is shown; lists of commands that are run one after the other
for session in [*map(sessions, blocks("console")), *([found] for found in inline_sessions(PAGES[SCRIPTS_PAGE]))]:
    QUOTED |= {command: lines for command, lines in session if lines}
    silent = [command for command, lines in session if not lines]
    if silent:
        PLAIN[silent[0].partition("  #")[0].strip()] = silent
PLAIN |= {name: lines for name, source in SCRIPTS.items() if (lines := docstring_commands(source))}

# The same on a machine without GPUs, or in less time.
SMALLER = {
    "_node gpu": "_node 2",
    "-node gpu": "-node 2",
    "-node auto": "-node 2",
    "--model deep": "--model simple",
    "--data mnist": f"--data mnist --data-dir {os.environ.get('MNIST_ROOT', 'data')}",
    "--nnodes 1:4": "--nnodes 1:4 --rdzv-conf last_call_timeout=1",
    "diff ": "! diff ",  # which exits with status 1 if there is a difference
    "python parity.py other.py": "! python parity.py other.py",  # so does this
}


def smaller(command):
    command = command.partition("  #")[0]
    script = next((name for name in SCRIPTS if f" {name}" in command), None)
    source = SCRIPTS.get(script, "")
    if script in ("min_GRPO.py", "min_GRPO_async.py"):
        command += " --steps 4 --imitation-steps 4"
    elif "\nimport gpt\n" in source and script != "min_Generate.py":
        command += " --steps 4 --log-every 1 --width 64 --length 64" + " --least 1" * (script == "min_Join.py")
    elif '"--updates"' in source:
        command += " --updates 10"
    elif re.search(r'"--epochs"|^import mnist_DDP', source, re.M) and "epochs" not in command:
        command += " --epochs 1"
    for text, replacement in SMALLER.items():
        command = command.replace(text, replacement)
    command = re.sub(r"HOST:\w+", f"localhost:{free_port()}", command)
    nodes = re.search(r"--nnodes (\d) ", command)
    if nodes:  # on all "machines" at once, and all must succeed
        # By their ids: `wait -n` knows nothing of a job that has ended while it waited for another.
        jobs = f"{command} & pids+=($!)\n" * int(nodes[1])
        command = f'pids=()\n{jobs}for pid in "${{pids[@]}}"; do wait "$pid"; done'
    return command


def bash(script, folder, timeout):
    """Run as typed into a shell, in a folder that holds nothing but the scripts; returns the output."""
    for name in SCRIPTS:
        shutil.copy(ROOT / name, folder)
    apply_diff(folder)
    (folder / "shards").mkdir(exist_ok=True)  # which min_Stream.py is told to read
    (folder / "shards" / "0.jsonl").write_text(100 * '{"text": "a document"}\n')
    if "--output model.pt" not in script:
        sizes = {"layers": 1, "width": 16, "heads": 2, "length": 19}  # what min_Generate.py is told to load
        torch.save({"sizes": sizes, "model": gpt.GPT(gpt.Config(**sizes)).state_dict()}, folder / "model.pt")
    (folder / "prompts.jsonl").write_text(100 * '{"prompt": "31524="}\n')
    return shell(script, folder, timeout)


def shell(script, folder, timeout=200):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": "", "HOME": str(folder)}  # where Flyte keeps its cache
    # `timeout` signals everything that the shell has started: torchrun then ends its workers.
    command = ["timeout", "--kill-after=35", str(timeout), "bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"status {done.returncode} of {script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def apply_diff(folder):
    """Write the plain script of README.md's diff as plain.py, and changed by `patch` as train.py; other.py is wrong."""
    lines = DIFF.splitlines(keepends=True)[3:]  # after the names of the files, and the numbers of the lines
    plain = "".join(line[1:] for line in lines if line[0] in " -")
    for name in ("plain.py", "train.py"):
        (folder / name).write_text(plain)
    subprocess.run(["patch", "--quiet", "--strip=0"], input=DIFF, cwd=folder, text=True, check=True)
    right = (folder / "train.py").read_text()
    (folder / "other.py").write_text(right.replace("batch_size=64 // world_size", "batch_size=64"))
    (folder / "package").mkdir(exist_ok=True)
    (folder / "package" / "train.py").write_text(right)


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
@pytest.mark.timeout(1800)  # seven trainings of mnist_DDP.py, beside other tests on a slow day
@pytest.mark.parametrize("name", PLAIN)
def test_commands(name, tmp_path):
    start_anew = f"\nrm -f {tmp_path}/snapshot.pt\n"  # where the command before ended
    script = start_anew.join(map(smaller, PLAIN[name]))
    bash(f"cd {ROOT}\n{script}" if "make" in script else script, tmp_path, 1750)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and `ip`")
def test_two_machines_on_one(tmp_path):
    """Until both nodes have trained: three epochs."""
    recipe, cleanup = blocks("bash", [ROOT / "docs" / "two_machines.md"])
    script = recipe.replace("1000 1", "3 1").replace("/tmp/", f"{tmp_path}/")
    output = bash("\n".join([f"trap '{cleanup.strip()}' EXIT", script, "wait"]), tmp_path, 150)
    assert "| Epoch 2 |" in output
    assert (tmp_path / "a" / "snapshot.pt").exists() and (tmp_path / "b" / "snapshot.pt").exists()


@pytest.fixture
def run_in(tmp_path, monkeypatch, capfd):
    """Run a function of a script in `nprocs` processes, or without `launch` if that is 0; returns what they print."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def run(name, source, function, nprocs):
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        with float64():  # which a script may change
            worker = getattr(importlib.import_module(name), function)
            if nprocs:
                dist.launch(worker, nprocs=nprocs)
            else:
                worker()
        return capfd.readouterr().out

    return run


@pytest.mark.parametrize("optimizer", ["AdamW(model.parameters(), lr=0.02)", "SGD(model.parameters(), lr=0.5)"])
def test_the_diff_makes_a_plain_script_distributed(optimizer, tmp_path, run_in):
    """Two processes end where the plain script does; shuffled, where one process does."""
    apply_diff(tmp_path)

    def train(nprocs, shuffle):
        """What is printed, and the trained model. 0 processes are the plain script."""
        source = (tmp_path / ("train.py" if nprocs else "plain.py")).read_text()
        for old, new in (
            ("AdamW(model.parameters(), lr=0.02)", optimizer),
            ("shuffle=True", f"shuffle={shuffle}"),
            ("import torch\n", "import torch\n\ntorch.set_default_dtype(torch.float64)\n"),
        ):
            assert source.count(old) == 1
            source = source.replace(old, new)
        output = run_in(f"trained_{nprocs}_{shuffle}_{optimizer[:3]}", source, "main", nprocs)
        return output, torch.load("model.pt", weights_only=True)

    plain, one, two = (train(nprocs, shuffle=False) for nprocs in (0, 1, 2))
    shuffled_one, shuffled_two = (train(nprocs, shuffle=True) for nprocs in (1, 2))
    assert plain[0] == one[0], "one process prints the loss of the whole last batch"
    assert shuffled_one[0] == shuffled_two[0] != one[0], "shuffling changes the order"
    for (_, found), (_, expected) in ((one, plain), (two, plain), (shuffled_two, shuffled_one)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    losses = [float(loss) for loss in re.findall(r"loss (.*)", shuffled_two[0])]
    assert len(losses) == 5 and losses[-1] < losses[0] / 2


def test_a_number_of_processes_that_does_not_divide_the_batch_is_refused_after_the_diff(tmp_path, run_in):
    apply_diff(tmp_path)
    with pytest.raises(Exception, match="64 % world_size"):
        run_in("of_three", (tmp_path / "train.py").read_text(), "main", 3)


@pytest.mark.parametrize("nprocs", [1, 2])
def test_the_example_in_the_helper(nprocs, run_in):
    """It learns, and prints once."""
    docstring = ast.get_docstring(ast.parse(SCRIPTS["distributed.py"]))
    (example,) = re.findall(r"^    import torch\n.*^        dist\.launch\(main_worker\)\n", docstring, re.M | re.S)
    output = run_in(f"example_{nprocs}", textwrap.dedent(example), "main_worker", nprocs)
    first, second, third = map(float, re.findall(r"^epoch \d: loss (.*)$", output, re.M))
    assert third < second < first and third < 2


def test_the_front_page_names_every_script_and_page_and_every_named_test_exists():
    for name in SCRIPTS.keys() - FOUNDATION:
        assert f"[`{name}`]({name})" in PAGES[README]
        for page in (SCRIPTS_PAGE, ROOT / "docs" / "costs.md"):
            assert f"[`{name}`](../{name})" in PAGES[page] or name == "parity.py"
    for page in DOCS:
        assert f"](docs/{page.name})" in PAGES[README]
    named = [(page.parent / path, name) for page in PAGES for name, path in re.findall(TEST, PAGES[page])]
    assert len(named) > 20 and not [name for path, name in named if f"\ndef {name}(" not in path.read_text()]


def in_a_package(command):
    """`python script.py --option` as `python -m mypackage.script --option`."""
    command = re.sub(r"python (\w+)\.py", r"python -m mypackage.\1", command)
    return re.sub(r"(torchrun .*?)(\w+)\.py", r"\1-m mypackage.\2", command)


GUARDS = ["min_FSDP.py", "min_DDP.py"]
ALONE = PLAIN.keys() & SCRIPTS.keys() - {"min_Generate.py", "plan.py", "parity.py", *GUARDS}


@pytest.mark.timeout(1100)
@pytest.mark.parametrize("name", [*guards(*GUARDS), *slow(*sorted(ALONE))])
def test_a_script_alone_in_a_folder_and_in_a_package(name, tmp_path):
    """With the files that AGENTS.md names, and without anything else of this project, its first command runs."""
    (needed,) = re.findall(rf"^\| `{name}` \| (.*?) ?\| \d+ \|$", PAGES[AGENTS], re.M)
    files = [name, *re.findall(r"`(.*?)`", needed)]
    command = smaller(docstring_commands(SCRIPTS[name])[0])
    for folder in ("folder", "mypackage"):
        (tmp_path / folder).mkdir()
        for file in files:
            shutil.copy(ROOT / file, tmp_path / folder)
    shell(command, tmp_path / "folder", timeout=500)
    (lines,) = (block for block in blocks("python") if "sys.path.append" in block)
    (tmp_path / "mypackage" / "__init__.py").write_text(lines)
    shell(in_a_package(command), tmp_path, timeout=500)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_linked_file_and_heading_exists(page):
    for link in re.findall(r"\]\(([^):]+)\)", PAGES[page]):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", PAGES[target], re.M)
            assert anchor in [re.sub(r"[^\w -]", "", text).strip().lower().replace(" ", "-") for text in headings], link
