"""`RUN:best` on the command line: export, bench and serve take the best checkpoint, not the last weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge.cli import main
from forge_plugins import Checkpoint
from forge_ship.open_engine import open_engine
from tests.conftest import REPO
from tests.support.profiles import some
from tests.support.ships import Classifier, batches, trained_run

SHIPS = REPO / "tests" / "support" / "ships.py"
NAMED = ["--task", f"{SHIPS}:Classifier", "--data", f"{SHIPS}:data"]
BEST = "run:best"


@pytest.fixture(autouse=True)
def run(empty_folder: Path) -> torch.Tensor:
    """Train a run whose best checkpoint, that of the largest loss, is its first; return what it answers."""
    kept = Checkpoint(every="2 updates", best={"monitor": "val/loss", "mode": "max"})
    trained_run("run", kept, validate_every="2 updates")
    best = Classifier.from_checkpoint("run:best").eval()
    last = Classifier.from_checkpoint("run/weights.safetensors").eval()
    (images, _), *_ = batches()
    with torch.no_grad():
        expected = best(images)
        assert not torch.equal(expected, last(images))
    return expected


def test_an_engine_has_the_best_weights(run: torch.Tensor) -> None:
    engine = open_engine(BEST, task=Classifier, data=batches())
    (found,) = engine({"images": batches()[0][0]}).values()
    assert torch.allclose(found, run, atol=1e-5)


@pytest.mark.parametrize("words", some([["export", "--to", "pt2"], ["bench"], ["serve", "--port", "0"]], quick=1))
def test_a_run_without_a_best_checkpoint_says_how_to_keep_one(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trained_run("plain", Checkpoint(every="2 updates"))
    assert main([words[0], "plain:best", *words[1:], *NAMED]) == 2
    assert "checkpoint.best={monitor:" in capsys.readouterr().err
