"""The page "forge in one hour" and the proofs of the README, walked as a reader does: commands as processes, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PLAIN, REPO
from tests.support.docs_pages import Block, all_blocks

PAGE = "docs/hour.md"
DONE_ALREADY = ("make ", "source ", "pip ")
"""Commands that install."""
CTRL_C = "press Ctrl-C"
INTERRUPTED = 85
BUDGET = re.compile(r"--budget \d+")
"""The one limit of time on the page: a machine that is slow gets ten hours, and needs what it needs."""


def environment() -> dict[str, str]:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name != "FORGE_REHEARSE"}
    return {**kept, **PLAIN, "PATH": programs, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_the_hour_ends_with_a_trained_checked_and_exported_model(empty_folder: Path) -> None:
    said: dict[str, str] = {}
    for block in all_blocks(PAGE):
        if block.language in ("python", "yaml"):
            file_of(block).write_text(block.text)
        elif block.language == "bash":
            for line in filter(None, block.text.splitlines()):
                if not line.startswith(DONE_ALREADY):
                    said[line] = interrupted(line) if CTRL_C in line else finished(line)
    end = json.loads(Path("runs/first/end.json").read_text())
    assert end["metrics"]["val/accuracy"] > 0.8  # chance is a third
    last = list(said)[-1]
    assert said[last] in {block.text for block in all_blocks(PAGE)}, last  # the answers that the page shows
    assert Path("runs/ready/leaves/ready.html").is_file()
    assert json.loads(Path("leaves.onnx.export.json").read_text())


@pytest.mark.slow
def test_the_mistake_that_the_page_suggests_is_named(empty_folder: Path) -> None:
    for block in all_blocks(PAGE):
        if block.language in ("python", "yaml"):
            file_of(block).write_text(block.text)
    finished("python make_leaves.py")
    (wrong,) = re.findall(r"write `(return [^`]+)`", (REPO / PAGE).read_text())
    text = Path("leaves.py").read_text()
    assert "return self.net(images)\n" in text
    Path("leaves.py").write_text(text.replace("return self.net(images)\n", f"{wrong}\n"))
    done = run("forge fit leaves.py:Leaves --smoke")
    assert done.returncode != 0
    assert "softmax" in done.stderr


@pytest.mark.slow
def test_the_proofs_of_the_readme_say_what_it_quotes(empty_folder: Path) -> None:
    text = (REPO / "README.md").read_text().partition("three proofs\n")[2].partition("\n## ")[0]
    proofs = re.findall(r"```(?:bash|text)\n(.*?)```\n\n((?:> [^\n]*\n)+)", text, flags=re.DOTALL)
    assert len(proofs) == 3
    outputs: list[subprocess.CompletedProcess[str]] = []
    for commands, quoted in proofs:
        outputs = [run(line) for line in commands.splitlines()]
        said = " ".join("".join(done.stdout for done in outputs).split())
        for part in " ".join(quoted.replace("\n> ", " ").removeprefix("> ").split()).split(" … "):
            assert part in said, said
    assert [done.returncode for done in outputs] == [0, 0]


def file_of(block: Block) -> Path:
    return Path(block.text.partition("\n")[0].removeprefix("# "))


def run(line: str) -> subprocess.CompletedProcess[str]:
    line = BUDGET.sub("--budget 600", line)
    return subprocess.run(["bash", "-c", line], env=environment(), capture_output=True, text=True)


def finished(line: str) -> str:
    done = run(line)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def interrupted(line: str) -> str:
    """Press Ctrl-C in the third epoch."""
    process = subprocess.Popen(["bash", "-c", f"exec {line}"], env=environment(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for told in process.stderr:
        if re.match(r"epoch +2/", told):  # a line at an epoch's end
            process.send_signal(signal.SIGINT)
            break
    process.stderr.read()
    assert process.wait() == INTERRUPTED
    return ""
