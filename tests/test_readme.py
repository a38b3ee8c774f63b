"""What the README quotes is what the commands print."""

import re
import shutil

import pytest
from conftest import ROOT, finish, start

README = (ROOT / "README.md").read_text()
BLOCKS = [block.strip().splitlines() for block in re.findall(r"^```console\n(.*?)^```", README, re.M | re.S)]
QUOTED = {
    block[0].removeprefix("$ "): block[1:] for block in BLOCKS if len(block) > 1 and not block[1].startswith("$ ")
}


PROGRAMS = {"python": (), "torchrun": ("-m", "torch.distributed.run")}


def shape(text):
    return re.sub(r"\d+", "#", re.sub(r" on \S+\]", " on HOST]", text))


@pytest.mark.slow
@pytest.mark.parametrize("command", QUOTED)
def test_quoted_output(command, tmp_path):
    """Run in a folder that holds nothing but the scripts; numbers may differ on another machine."""
    for script in ROOT.glob("*.py"):
        shutil.copy(script, tmp_path)
    program, *arguments = command.split()
    status, stdout, stderr = finish(start(*PROGRAMS[program], *arguments, cwd=tmp_path, env={"PYTHONPATH": ""}))
    assert status == 0, stderr
    assert [shape(line) for line in stdout.splitlines()] == [shape(line) for line in QUOTED[command]]


def test_every_script_is_mentioned():
    assert not [path.name for path in ROOT.glob("*.py") if f"`{path.name}`" not in README]


def test_every_linked_file_exists():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links and not [link for link in links if not (ROOT / link).exists()]
