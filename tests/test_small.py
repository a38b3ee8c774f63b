"""The helper stays small: what it may hold, what each script carries, and the table of AGENTS.md that says so.

`python -m tests.test_small` writes the table anew.
"""

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

HELPERS = ("checkpoint", "distributed", "gpt_generate", "gpt", "mnist", "options", "rpc_remote", "checkpoint_sharded")
HELPERS += ("spawn",)
ALL_HELPERS = {*HELPERS, "llm_documents", "llm_hub", "parity_why", "tracking", "watch"}
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py") if path.stem not in ALL_HELPERS)
PUBLIC = {
    *("DistributedError", "is_launched", "get_rank", "get_local_rank", "get_world_size", "is_primary", "print_primary"),
    *("device_count", "get_device", "init_process_group", "is_dist_avail_and_initialized", "cleanup", "barrier"),
    "wait_for_everyone",
    *("data_sampler", "prepare_ddp_model", "prepare_fsdp_model", "sync_params", "check_in_sync", "unwrapped"),
    *("reduce", "all_reduce", "gather", "gather_objects", "broadcast_object", "raise_on_all", "launch"),
}
MOST = {
    "distributed": 277,
    "spawn": 147,
    "checkpoint": 222,
    "checkpoint_sharded": 163,
    "watch": 96,
    "options": 50,
}  # lines of code
TABLE = re.compile(r"^\| script \| copy with it .*?(?=\n\n)", re.M | re.S)


@functools.cache
def source(name):
    return (ROOT / f"{name}.py").read_text()


@functools.cache
def tree(name):
    return ast.parse(source(name))


@functools.cache
def code_lines(name):
    """The lines that are neither blank, nor a comment, nor in a docstring."""
    lines = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source(name)).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def modules_of(nodes):
    """What these statements import."""
    modules = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
    return modules


@functools.cache
def imports(name):
    """The project's files that `name` imports itself; those of a function are needed too."""
    return {module for module in modules_of(ast.walk(tree(name))) if module in ALL_HELPERS or module in SCRIPTS}


@functools.cache
def carried(name):
    """The files that must lie beside `name`. A job of torchrun starts no process, so it does without spawn.py."""
    found, new = set(), imports(name)
    while new:
        found |= new
        new = set().union(*map(imports, new)) - found
    if name in ("multigpu_torchrun", "multinode_torchrun"):
        found.discard("spawn")
    return sorted(found - {name})


def public_names(name):
    names = []
    for node in tree(name).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [each for each in names if not each.startswith("_")]


# ---- rules ----------------------------------------------------------------------------------------------------------


def test_the_helper_has_the_names_of_the_list_and_no_others():
    assert set(public_names("distributed")) == PUBLIC


@pytest.mark.parametrize("name", ["distributed", "spawn", "checkpoint", "watch"])
def test_importing_it_needs_only_torch(name):
    packages = {module.partition(".")[0] for module in modules_of(tree(name).body)}
    assert packages <= sys.stdlib_module_names | {"torch", "distributed"}


def test_the_helpers_stay_small():
    sizes = {name: code_lines(name) for name in MOST}
    assert all(sizes[name] <= most for name, most in MOST.items()), sizes


STARTS_OR_STAYS = {"atexit", "multiprocessing", "resource", "signal", "socket", "subprocess", "threading", "weakref"}


def test_the_helper_has_no_thread_no_exit_handler_and_no_private_names():
    nodes = list(ast.walk(tree("distributed")))
    assert not modules_of(nodes) & STARTS_OR_STAYS
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert {name for name in attributes if name.startswith("_")} == {"_exit"}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
    assert {text for text in texts if str(text).startswith("_")} == {"_orig_mod"}


IMPORT = """
import gc, os, random, signal, sys, threading
import torch, torch.distributed.nn.functional

def state():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    seeds = torch.initial_seed(), torch.get_rng_state().tolist(), random.getstate()
    return dict(os.environ), handlers, seeds, threading.active_count(), gc.get_freeze_count(), torch.get_num_threads()

before = state()
import distributed
assert state() == before
assert "spawn" not in sys.modules
"""


@pytest.mark.guard
@pytest.mark.slow
def test_importing_the_helper_changes_nothing():
    subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, check=True, timeout=240)


def test_what_a_script_needs_beside_it():
    assert carried("min_DDP") == ["distributed", "spawn"]
    for name in ("multigpu_torchrun", "multinode_torchrun"):
        assert carried(name) == ["checkpoint", "distributed", "watch"]
    assert carried("min_FSDP") == ["checkpoint_sharded", "distributed", "gpt", "options", "spawn"]
    assert carried("single_gpu") == carried("plan") == carried("watch") == []


def test_nothing_is_defined_for_one_caller_in_a_shared_file():
    for helper in HELPERS:
        others = [name for name in (*SCRIPTS, *ALL_HELPERS) if name != helper]
        for name in public_names(helper):
            if helper == "distributed" and name in PUBLIC:
                continue
            users = [
                other for other in others if re.search(rf"\b{helper}\.{name}\b|import .*\b{name}\b", source(other))
            ]
            within = len(re.findall(rf"\b{name}\b", source(helper))) > 1
            assert len(users) > 1 or within, f"{helper}.{name} is for {users}"


# ---- the table of AGENTS.md -----------------------------------------------------------------------------------------


def table(page):
    """The table with each row's files as they are, in the order of the page, and new scripts at its end."""
    known = re.findall(r"^\| `(\w+)\.py` \|", page, re.M)
    lines = ["| script | copy with it | lines of code of all |", "|---|---|---|"]
    for script in dict.fromkeys([*known, *SCRIPTS]):
        if script in SCRIPTS:
            names = " ".join(f"`{name}.py`" for name in carried(script))
            lines.append(f"| `{script}.py` | {names} | {sum(map(code_lines, [script, *carried(script)]))} |")
    return "\n".join(lines)


def test_agents_says_what_each_script_carries():
    page = (ROOT / "AGENTS.md").read_text()
    assert TABLE.search(page)[0] == table(page), "run `python -m tests.test_small`"
    rows = (ROOT / "tests" / "test_equal.py").read_text()
    for script in SCRIPTS:
        assert (ROOT / "tests" / f"test_{script}.py").exists() or f'"{script}"' in rows


def test_the_front_page_is_short_and_every_docstring_too():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    long = {name: len(ast.get_docstring(tree(name)).splitlines()) for name in SCRIPTS if name.startswith("min_")}
    assert not {name: n for name, n in long.items() if n > 32}


if __name__ == "__main__":
    agents = ROOT / "AGENTS.md"
    text = agents.read_text()
    agents.write_text(TABLE.sub(lambda match: table(text), text))
