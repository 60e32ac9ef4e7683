"""The README and the documentation as tests see them: pages, fenced blocks, and the commands in them."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType

from tests.conftest import REPO

DOCS = REPO / "docs"
GENERATED = tuple(f"docs/{page}" for page in ("plugins/", "hooks.md"))
"""Pages that scripts write from docstrings; tests of their own hold them current and run their examples."""


def _pages() -> list[str]:
    found = sorted(str(path.relative_to(REPO)) for path in DOCS.rglob("*.md"))
    return ["README.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", *found]


ALL_PAGES = _pages()
PAGES = [page for page in ALL_PAGES if not page.startswith(GENERATED)]
"""Pages that people write."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, its text and the line it begins on."""

    language: str
    text: str
    line: int


def read(page: str) -> str:
    return (REPO / page).read_text()


def all_blocks(page: str) -> list[Block]:
    """Every fenced block of a page; in a list a fence may be indented."""
    text = read(page)
    found = re.finditer(r"^([ ]*)```([^\n]*)\n(.*?)^\1```[ ]*$", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(m[2].strip(), _dedent(m[3], m[1]), text.count("\n", 0, m.start()) + 2) for m in found]


def blocks(page: str, language: str) -> list[Block]:
    return [block for block in all_blocks(page) if block.language == language]


def with_blocks(language: str) -> list[str]:
    return [page for page in PAGES if blocks(page, language)]


def prose(page: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^[ ]*```.*?^[ ]*```[ ]*$", "", read(page), flags=re.MULTILINE | re.DOTALL)


def _dedent(text: str, indent: str) -> str:
    return "\n".join(line.removeprefix(indent) for line in text.split("\n"))


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a shell block: its words, and what it sets in its environment."""

    words: list[str]
    page: str
    line: int
    env: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


def commands(page: str) -> Iterator[Command]:
    """Every command of a page's bash blocks; `&&` parts two, a backslash continues a line, `>` and `|` end one."""
    for block in blocks(page, "bash"):
        text = re.sub(r"\\\n", "  ", block.text)
        for number, line in enumerate(text.splitlines()):
            for part in parts(line):
                env = {}
                while part and re.match(r"[A-Z_]+=", part[0]):
                    name, _, value = part.pop(0).partition("=")
                    env[name] = os.path.expandvars(value)
                if part:
                    yield Command(part, page, block.line + number, env)


def parts(line: str) -> Iterator[list[str]]:
    """The commands of one line, as words."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    part: list[str] = []
    passed = False
    for word in lexer:
        if word in ("&&", ";", "|"):
            yield part
            part, passed = [], False
        elif word in (">", ">>"):
            passed = True
        elif not passed:
            part.append(word)
    yield part


def load_script(name: str) -> ModuleType:
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
