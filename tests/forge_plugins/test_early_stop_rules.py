"""early_stop and checkpoint.best by training metrics and several rules; the best weights by their name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import forge
from forge.checkpoint import Checkpoints, StoredCheckpoint
from forge.errors import RecipeError
from forge.testing import TinyTask, tiny_batches
from forge_plugins import Checkpoint, EarlyStop
from tests.forge_plugins.test_early_stop import Scripted


class Losing(TinyTask):
    """Logs these training metrics, one per epoch, and the last one ever after."""

    def __init__(self, values: Any = (3.0, 2.0, 2.5, 2.25, 1.0)):
        super().__init__()
        self.values = list(values)

    def training_step(self, batch: Any) -> Any:
        assert self.trainer is not None
        epoch = min(self.trainer.progress.epoch, len(self.values) - 1)
        return {**super().training_step(batch), "score": torch.tensor(self.values[epoch])}


def fit(task: TinyTask, *plugins: forge.Plugin, val: Any = None, **options: Any) -> forge.FitResult:
    settings = {"max_epochs": 9, "seed": 0, "run_dir": False, "device": "cpu", "log_every": 100, **options}
    return forge.Trainer(plugins=list(plugins), **settings).fit(task, tiny_batches(), val)


# -- training metrics -------------------------------------------------------------------------------------------------


def test_a_training_metric_needs_no_validation() -> None:
    result = fit(Losing(), EarlyStop("train/score", patience=2))
    assert result.epochs == 4
    assert result.stop_reason == "early_stop: train/score has not improved on 2 (update 10) for 2 logs"


def test_a_training_metric_that_is_not_logged_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"which this run does not log\. Did you mean 'train/score'"):
        fit(Losing(), EarlyStop("train/scor"))


def test_a_name_without_its_stage_is_refused() -> None:
    for name in ("score", "val_score", "training/score"):
        with pytest.raises(RecipeError, match="Write val/score, or train/score"):
            EarlyStop(name)


# -- divergence -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "mode", "threshold", "epochs"),
    [
        ([1.0, 4.0, 6.0], "min", 5.0, 3),
        ([1.0, 5.0, 5.0], "min", 5.0, 6),
        ([1.0, math.nan], "min", 5.0, 2),
        ([0.5, 0.4, 0.1], "max", 0.2, 3),
    ],
)
def test_a_diverged_run_stops(values: list[float], mode: str, threshold: float, epochs: int) -> None:
    stop = EarlyStop(mode=mode, divergence_threshold=threshold, patience=5)
    result = fit(Scripted(values), stop, val=tiny_batches([4]))
    assert result.epochs == epochs
    assert ("divergence threshold" in result.stop_reason) == (epochs < 6)


# -- several rules ----------------------------------------------------------------------------------------------------


def both(**options: Any) -> EarlyStop:
    rules = [{"monitor": "val/loss"}, {"monitor": "val/other", "mode": "max", "patience": 4}]
    return EarlyStop(patience=2, rules=rules, **options)


@pytest.mark.parametrize(
    ("values", "epochs", "blamed"), [([3.0, 2.0, 2.0], 4, "val/loss"), ([9.0, 8.0, 7.0, 6.0, 5.0, 4.0], 5, "val/other")]
)
def test_the_first_rule_that_is_due_stops_the_run(values: list[float], epochs: int, blamed: str) -> None:
    result = fit(Scripted(values), both(), val=tiny_batches([4]))  # val/other is 1 in every validation
    assert (result.epochs, result.stop_reason.split()[1]) == (epochs, blamed)


# -- checkpoints ------------------------------------------------------------------------------------------------------

BEST = {"monitor": "train/score", "mode": "min"}


def test_the_best_checkpoint_by_a_training_metric(tmp_path: Path) -> None:
    fit(Losing([3.0, 1.0, 2.0]), Checkpoint("1 epoch", keep=1, best=BEST), max_epochs=3, run_dir=tmp_path)
    folder = Checkpoints(tmp_path / "checkpoints")
    assert [StoredCheckpoint(path).update for path in folder.all()] == [10, 15]
    assert (folder.folder / "best").resolve().name == "update-00000010"


def test_all_checkpoints_can_be_kept(tmp_path: Path) -> None:
    fit(Losing(), Checkpoint("2 updates", keep="all"), max_epochs=2, run_dir=tmp_path)
    there = [StoredCheckpoint(path).update for path in Checkpoints(tmp_path / "checkpoints").all()]
    assert there == [2, 4, 6, 8, 10]
