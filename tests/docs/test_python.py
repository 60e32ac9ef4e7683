"""The Python of the README and of every page runs, from top to bottom, as one module."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import forge.testing
from forge.testing import check_plugin, mend_interpreter
from tests.conftest import PROFILE
from tests.support.docs_pages import blocks, with_blocks
from tests.support.plugin_kit import PLAINEST

QUICK = ("README.md", "docs/start.md", "docs/task.md", "docs/surviving.md")
"""Pages that the quick profile runs; the others must be Python."""


@pytest.mark.parametrize("page", with_blocks("python"))
def test_the_python_on_a_page_can_be_compiled(page: str) -> None:
    for block in blocks(page, "python"):
        compile(block.text, f"{page}:{block.line}", "exec")


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page not in QUICK)) for page in with_blocks("python")]
)
def test_the_python_on_a_page_runs_from_top_to_bottom(
    page: str,
    empty_folder: Path,
    small_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if not torch.cuda.is_available():
        mend_interpreter()  # kernels on a page run in Triton's interpreter here
    if PROFILE == "quick":
        monkeypatch.setattr(forge.testing, "check_plugin", check_in_part)
    module = page_as_module(page, empty_folder)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)
    for name, value in list(vars(module).items()):
        if name.startswith("test_"):  # with the fixtures that it asks for
            value(**{fixture: request.getfixturevalue(fixture) for fixture in inspect.signature(value).parameters})


OTHERS = ["leaks", "files", "graphs", "exceptions", "order"]
"""Checks that the full profile has."""


def check_in_part(plugin: Any, leave_out: Iterable[str] = (), **given: Any) -> tuple[str, ...]:
    """`check_plugin` as the quick profile has it: a page checks a dozen plugins, which takes a second each."""
    return check_plugin(plugin, leave_out=[*leave_out, *PLAINEST, *OTHERS], **given)


def page_as_module(page: str, folder: Path) -> ModuleType:
    """The Python of a page as one module, each line where it stands on the page, so that tracebacks point there."""
    lines: list[str] = []
    for block in blocks(page, "python"):
        lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    path = folder / f"{Path(page).stem.replace('-', '_').lower()}.py"
    path.write_text("\n".join(lines) + "\n")
    spec = importlib.util.spec_from_file_location(f"page_{path.stem}", path)
    assert spec is not None
    return importlib.util.module_from_spec(spec)
