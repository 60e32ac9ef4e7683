"""The examples of the gallery: those that take longer take their first steps, and graphs are learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import forge
from tests.support.docs_pages import blocks


@pytest.mark.slow
@pytest.mark.parametrize("page", ["sequence-to-sequence", "staged-finetuning"])
def test_a_long_example_takes_its_first_steps(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The full profile runs the page to its end."""
    trainer = forge.Trainer
    monkeypatch.setattr(forge, "Trainer", lambda run_dir, **settings: trainer(smoke=True, **settings))
    found: dict[str, Any] = {"__name__": "example"}
    exec(blocks(f"docs/examples/{page}.md", "python")[0].text, found)
    assert found["result"].metrics["train/loss"] > 0


def test_the_graphs_of_pyg_are_learned(empty_folder: Path) -> None:
    pytest.importorskip("torch_geometric")
    plain, pyg = blocks("docs/graphs.md", "python")[0], blocks("docs/graphs.md", "text")[0]
    found: dict[str, Any] = {"__name__": "example"}
    exec(plain.text, found)
    exec(pyg.text, found)
    assert found["result"].metrics["val/accuracy"] > 0.9
    assert found["result"].metrics["val/loss"] < 0.2
