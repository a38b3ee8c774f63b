"""The helper stays small: what it may hold, what each script carries, and the table of AGENTS.md that says so.

`python -m tests.test_small` writes the table anew.
"""

import ast
import functools
import io
import re
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

SOURCES = {path.stem: path.read_text() for path in ROOT.glob("*.py")}
SCRIPTS = sorted(name for name, source in SOURCES.items() if "\nif __name__ == " in source)
MOST = {"distributed": 277, "spawn": 147, "checkpoint": 222, "checkpoint_sharded": 163, "watch": 96, "options": 50}
TABLE = re.compile(r"^\| script \| copy with it .*?(?=\n\n)", re.M | re.S)


@functools.cache
def tree(name):
    return ast.parse(SOURCES[name])


@functools.cache
def code_lines(name):
    """The lines that are neither blank, nor a comment, nor in a docstring."""
    lines = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(SOURCES[name]).readline):
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
    return {module for module in modules_of(ast.walk(tree(name))) if module in SOURCES}


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


# ---- rules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["distributed", "spawn", "checkpoint", "watch"])
def test_importing_it_needs_only_torch(name):
    packages = {module.partition(".")[0] for module in modules_of(tree(name).body)}
    assert packages <= sys.stdlib_module_names | {"torch", "distributed"}


@pytest.mark.parametrize("name", MOST)
def test_the_helpers_stay_small(name):
    assert code_lines(name) <= MOST[name]


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
