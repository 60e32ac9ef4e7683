"""Every plugin has its page, made from its own docstrings, and what the page says to type works."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from forge import cli, registry
from forge.cli import plugin_page
from tests.conftest import PROFILE, REPO
from tests.support.docs_pages import load_script

OURS = sorted(name for name, entry in registry.installed("plugin").items() if entry.value.startswith("forge_"))
CHEAP = {
    "compile": ["compile.backend=aot_eager"],
}
"""What an example leaves out so that it reads well, and a test adds: no C++ compiler, and little time."""


def test_the_pages_are_what_the_plugins_say() -> None:
    folder = REPO / "docs" / "plugins"
    made = load_script("make_pages").pages()
    assert {path.name for path in folder.iterdir()} == made.keys()
    stale = [name for name, text in made.items() if (folder / name).read_text() != text]
    assert not stale, f"python docs/make_pages.py writes {', '.join(stale)} again"


def test_every_plugin_has_a_page() -> None:
    groups = load_script("make_pages").GROUPS
    assert sorted(name for names in groups.values() for name in names) == OURS


QUICK = ("clip", "freeze")
"""Whose examples the quick profile runs; the page of commands and the plugins' own tests stand for the others."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in OURS])
def test_the_example_of_a_page_runs(
    name: str, empty_folder: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in ("mlflow", "torchft", "wandb"):
        pytest.importorskip(name)
    if name == "torchft":
        from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]

        house = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"http://127.0.0.1:{house.address().rsplit(':', 1)[1]}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (empty_folder / "store").as_uri())
    lines = plugin_page.examples(plugin_page.plugin_class(name))
    assert lines, f"{name}: end its docstring with a command line to try"
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        if words[0] == "fit":
            words += [f"trainer.max_updates={12 if PROFILE == 'full' else 4}", *CHEAP.get(name, [])]
            words += ["-p", "no:first_look"] if PROFILE == "quick" and name != "first_look" else []
        assert cli.main(words) == 0, line
