"""Change the code at random places, one at a time, and see whether the tests notice.

    make mutants N=60 SEED=1                                    # or: python -m tools.mutants -n 60 --seed 1
    python -m tools.mutants -n 20 --files min_EP.py spawn.py    # places in these files only
    python -m tools.mutants -n 20 --quick                       # without the slow tests

A mutant is a copy of the project with one change in a function of a top-level file: another operator, comparison,
number or flag, a call deleted, or a condition made false. Options, printed text and `raise` are left out. The
quick tests of the changed file run on it, and the slow ones if the quick ones pass. A mutant that passes all of them
survives. It shows a promise without a test, a line that nobody needs, or a change without effect.

The survivors are printed and stored in benchmarks/results/mutants.json. There one may write a reason beside a survivor
that has no effect. It is kept when the same survivor is found again.
"""

import ast
import concurrent.futures
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import options
from benchmarks import common

ROOT = Path(__file__).parent.parent
TESTS = {  # of the files that have no test file of their own name, or more than that one
    "distributed": ["metrics", "launch", "min_DDP", "mistakes", "equal_images", "drift", "templates"],
    "spawn": ["launch"],
    "checkpoint": ["checkpoint", "equal_images"],
    "rpc_remote": ["rpc_param_server", "rpc_model_parallel"],
    "tracking": ["mnist_DDP"],
    "llm_hub": ["llm_FSDP"],
    "llm_documents": ["llm_documents", "llm_FSDP"],
    "min_EP": ["min_EP_FSDP"],
    "mnist": ["mnist", "mnist_DDP", "equal_images"],
    **{name: [name, "equal_images"] for name in ("mnist_DDP", "mnist_FSDP", "multigpu_torchrun", "multinode_torchrun")},
}
EQUAL = [
    f"min_{name}"
    for name in ("CP", "CP_ring", "CP_packed", "DDP_scratch", "DiLoCo", "EP", "EP_FSDP", "FSDP", "FSDP_TP")
]
EQUAL += [f"min_{name}" for name in ("FSDP_scratch", "Join", "Muon", "PP", "PP_FSDP_TP", "TP", "ZeRO")]
ROWS = {name: [name] for name in EQUAL}  # of tests/test_equal.py, which begin with these names
ROWS["gpt"] = ["min_TP", "min_FSDP_TP"]
ROWS["min_PP"] += ["min_PP_FSDP_TP"]  # which imports it
ROWS["min_FSDP_TP"] += ["min_PP_FSDP_TP"]
LONGEST = 1500  # seconds for the tests of one mutant


# ---- where a file can be changed, and how -------------------------------------------------------------------------

COMPARISONS = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
NO_FUNCTIONS = {"parse_args", "make_parser", "check_model_options", "add_nproc"}  # of options
NO_CALLS = {"print", "print_primary", "error", "add_argument", "exit"}  # text


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    function: str
    before: str
    after: str
    start: int  # the offsets of `before` in the file, in bytes
    end: int


def mutants_of(path):
    """All changes of one file."""
    source = path.read_bytes()
    starts = [0]  # the offset of each line
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for function, node in nodes_in_functions(ast.parse(source)):
        after = change_of(node)
        if after is None:
            continue
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            node = node.test  # the rest stays
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = source[start:end].decode()
        found.append(Mutant(path.name, node.lineno, function, before, after, start, end))
    return found


def nodes_in_functions(tree):
    """(the function's name, a node of its body), without the nodes that `is_left_out`."""
    for outer in ast.walk(tree):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef) and outer.name not in NO_FUNCTIONS:
            remaining = list(outer.body)
            while remaining:
                node = remaining.pop()
                if is_left_out(node):
                    continue
                yield outer.name, node
                remaining.extend(ast.iter_child_nodes(node))


def is_left_out(node):
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return True  # its functions have their own turn
    call = node.value if isinstance(node, ast.Expr) else node
    return isinstance(call, ast.Call) and name_of(call.func) in NO_CALLS


def name_of(function):
    if isinstance(function, ast.Attribute):
        return function.attr
    return getattr(function, "id", None)


def change_of(node):
    """The text that replaces this node, or its condition if it has one. None if it stays."""
    changed = copy.deepcopy(node)
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        return "False"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return "pass"
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        changed.ops = [COMPARISONS[type(node.ops[0])]()]
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        changed.op = OPERATORS[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        changed = changed.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        changed.value = other_value(node.value)
    else:
        return None
    text = ast.unparse(changed)
    return f"({text})" if isinstance(node, ast.expr) else text


def other_value(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return 2 * value or 1.0


# ---- the tests of a mutant ----------------------------------------------------------------------------------------


def tests_of(file):
    """The test files that must notice a change in this file, without tests/test_equal.py."""
    name = Path(file).stem
    names = list(TESTS.get(name, [name]))
    paths = [f"tests/test_{name}.py" for name in names]
    return [path for path in paths if (ROOT / path).exists()]


def rows_of(file):
    """pytest's options for the rows of tests/test_equal.py that must notice it, beside all tests of `tests_of`."""
    rows = ROWS.get(Path(file).stem)
    if not rows:
        return []
    chosen = [Path(path).name for path in tests_of(file)]
    for name in rows:
        chosen += [f"{name}-", f"{name}]"]
    return ["tests/test_equal.py", "-k", " or ".join(chosen)]


def run_tests(folder, file, slow):
    """None if they pass, or else the test that failed first."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests_of(file), *rows_of(file)]
    if slow:
        command += ["-m", "slow"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"too slow for {LONGEST} s"
    if process.returncode in (0, 5):  # 5: no test is slow
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return failed.group(1) if failed else f"pytest's status {process.returncode}"


def copy_project(folder):
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    for name in names.strip("\0").split("\0"):
        target = Path(folder, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)


def judge(mutant, quick):
    """What notices this mutant: ("quick tests" or "slow tests", the test), or (None, None)."""
    with tempfile.TemporaryDirectory() as folder:
        copy_project(folder)
        path = Path(folder, mutant.file)
        source = path.read_bytes()
        path.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
        test = run_tests(folder, mutant.file, slow=False)
        if test:
            return "quick tests", test
        if not quick:
            test = run_tests(folder, mutant.file, slow=True)
            if test:
                return "slow tests", test
    return None, None


# ---- the run ------------------------------------------------------------------------------------------------------


def main():
    parser = options.ArgumentParser(__doc__)
    parser.add_argument("-n", type=options.whole_number(1), default=60, help="number of mutants")
    parser.add_argument("--seed", type=options.whole_number(0), default=0, help="random seed of the places")
    parser.add_argument("--files", nargs="*", default=[], metavar="FILE", help="top-level files (default: all)")
    parser.add_argument("--quick", action="store_true", help="leave out the slow tests")
    parser.add_argument("--jobs", type=options.whole_number(1), default=2, help="mutants side by side")
    parser.add_argument("--list", action="store_true", help="print the mutants, and test none")
    args = parser.parse_args()

    chosen = choose(parser, args)
    if args.list:
        for mutant in chosen:
            show(mutant)
        return
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        check_unchanged(chosen, pool)
        verdicts = list(pool.map(lambda mutant: judge_and_show(mutant, args.quick), chosen))
    store(args, chosen, verdicts)
    survivors = [mutant for mutant, verdict in zip(chosen, verdicts, strict=True) if verdict is None]
    print(f"\n{len(survivors)} of {len(chosen)} survive")
    for mutant in survivors:
        show(mutant)


def choose(parser, args):
    paths = sorted(ROOT.glob("*.py"))
    names = {path.name for path in paths}
    for file in args.files:
        if file not in names:
            parser.error(f"argument --files: {file} is not a file at the top level")
    everything = []
    for path in paths:
        if not args.files or path.name in args.files:
            everything.extend(mutants_of(path))
    return random.Random(args.seed).sample(everything, min(args.n, len(everything)))


def check_unchanged(chosen, pool):
    """A test that fails without any change would catch every mutant."""
    with tempfile.TemporaryDirectory() as folder:
        copy_project(folder)
        files = sorted({mutant.file for mutant in chosen})
        failed = [test for test in pool.map(lambda file: run_tests(folder, file, slow=False), files) if test]
    if failed:
        sys.exit(f"without any change these tests fail: {', '.join(failed)}")


def judge_and_show(mutant, quick):
    begin = time.monotonic()
    verdict, test = judge(mutant, quick)
    print(f"{verdict or 'SURVIVES':12} {time.monotonic() - begin:5.0f} s  {test or ''}\n    ", end="")
    show(mutant)
    return verdict


def show(mutant):
    before, after = (" ".join(text.split()) for text in (mutant.before, mutant.after))
    print(f"{mutant.file}:{mutant.line} {mutant.function}: {before[:80]}  ->  {after[:80]}", flush=True)


def store(args, chosen, verdicts):
    """Add this run to the stored ones. A reason given for a survivor is kept."""
    path = common.RESULTS / "mutants.json"
    stored = {"results": [], "survivors": []}
    if path.exists():
        stored = json.loads(path.read_text())
    run = {"mutants": len(chosen), "seed": args.seed, "files": args.files, "quick tests only": args.quick}
    run["caught by the quick tests"] = verdicts.count("quick tests")
    run["caught by the slow tests"] = verdicts.count("slow tests")
    survivors = list(stored["survivors"])
    known = {(entry["file"], entry["function"], entry["before"], entry["after"]) for entry in survivors}
    for mutant, verdict in zip(chosen, verdicts, strict=True):
        entry = {"file": mutant.file, "function": mutant.function, "before": mutant.before, "after": mutant.after}
        if verdict is None and tuple(entry.values()) not in known:
            survivors.append({**entry, "reason": ""})
    common.write("mutants", {"unit": "mutants", "results": [*stored["results"], run], "survivors": survivors})


if __name__ == "__main__":
    main()
