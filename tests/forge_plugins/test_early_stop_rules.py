"""early_stop and checkpoint.best by training metrics and several rules; the best weights by their name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import forge
from forge.checkpoint import Checkpoints, StoredCheckpoint
from forge.errors import CheckpointError, RecipeError, StackError
from forge.testing import TinyTask, assert_same_weights, tiny_batches
from forge_plugins import Checkpoint, EarlyStop
from tests.forge.snapshot.test_resume import die, live
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


@pytest.mark.slow
def test_a_run_stopped_by_a_training_metric_resumes(tmp_path: Path) -> None:
    plugins = lambda: [EarlyStop("train/score", patience=2), Checkpoint("1 updates", background=False)]  # noqa: E731
    long = {"max_epochs": 9, "log_every": 100}
    straight, expected = live(tmp_path / "straight", plugins(), task=Losing(), **long)
    for update in (7, 16):
        die(tmp_path / "cut", plugins(), update, task=Losing(), **long)
    resumed, result = live(tmp_path / "cut", plugins(), task=Losing(), **long)
    assert (result.epochs, result.stop_reason) == (expected.epochs, expected.stop_reason)
    assert_same_weights(resumed, straight)
    assert live(tmp_path / "cut", plugins(), task=Losing(), **long)[1].updates == result.updates


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


def test_a_rule_takes_the_other_options_from_the_plugin() -> None:
    found = [rule.config for rule in both(min_delta=0.5)._rules]
    assert [(c.monitor, c.patience, c.mode, c.min_delta) for c in found] == [
        ("val/loss", 2, None, 0.5),
        ("val/other", 4, "max", 0.5),
    ]


def test_an_unknown_option_of_a_rule_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"early_stop\.rules\[0\].*patience"):
        EarlyStop(rules=[{"patiens": 3}])


@pytest.mark.slow
def test_rules_resume(tmp_path: Path) -> None:
    plugins = lambda: [both(), Checkpoint("1 updates", background=False)]  # noqa: E731
    new = lambda: Scripted([9.0, 8.0, 7.0, 6.0, 5.0, 4.0])  # noqa: E731
    _, expected = live(tmp_path / "straight", plugins(), task=new(), max_epochs=9)
    die(tmp_path / "cut", plugins(), 17, task=new(), max_epochs=9)
    _, result = live(tmp_path / "cut", plugins(), task=new(), max_epochs=9)
    assert (result.updates, result.stop_reason) == (expected.updates, expected.stop_reason)


# -- checkpoints ------------------------------------------------------------------------------------------------------

BEST = {"monitor": "train/score", "mode": "min"}


def test_the_best_checkpoint_by_a_training_metric(tmp_path: Path) -> None:
    fit(Losing([3.0, 1.0, 2.0]), Checkpoint("1 epoch", keep=1, best=BEST), max_epochs=3, run_dir=tmp_path)
    folder = Checkpoints(tmp_path / "checkpoints")
    assert [StoredCheckpoint(path).update for path in folder.all()] == [10, 15]
    assert (folder.folder / "best").resolve().name == "update-00000010"


def test_a_validation_metric_still_needs_a_val_loader(tmp_path: Path) -> None:
    best = {"monitor": "val/loss", "mode": "min"}
    with pytest.raises(StackError, match="watch a training metric"):
        fit(Losing(), Checkpoint(best=best), run_dir=tmp_path)


def test_all_checkpoints_can_be_kept(tmp_path: Path) -> None:
    fit(Losing(), Checkpoint("2 updates", keep="all"), max_epochs=2, run_dir=tmp_path)
    there = [StoredCheckpoint(path).update for path in Checkpoints(tmp_path / "checkpoints").all()]
    assert there == [2, 4, 6, 8, 10]


def test_the_best_weights_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"seed": 0, "device": "cpu", "plugins": [Checkpoint(keep="all", best=BEST)]}
    trainer = forge.Trainer(max_epochs=3, **options)
    trainer.fit(Losing([3.0, 1.0, 2.0]), tiny_batches())
    run = trainer.run_dir
    assert run is not None
    (expected := TinyTask()).load_state_dict(StoredCheckpoint(run / "checkpoints/update-00000010").load()["model"])
    for again in (trainer, forge.Trainer(**options)):
        task = Losing()
        again.validate(task, tiny_batches(), weights="best")
        assert_same_weights(task, expected)


def test_without_a_best_checkpoint_the_fix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"no run is in runs/tiny_task.*checkpoint\.best="):
        forge.Trainer(plugins=[]).validate(TinyTask(), tiny_batches(), weights="best")
    trainer = forge.Trainer(plugins=[Checkpoint()], max_epochs=1, run_dir="here")
    trainer.fit(TinyTask(), tiny_batches())
    with pytest.raises(CheckpointError, match="here has no best checkpoint"):
        trainer.test(TinyTask(), tiny_batches(), weights="best")
