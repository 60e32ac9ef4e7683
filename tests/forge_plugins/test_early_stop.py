"""early_stop: a run ends when its validations have stopped getting better, and the reason says so."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import forge
from forge.checkpoint import Checkpoints, StoredCheckpoint
from forge.errors import RecipeError, StackError
from forge.testing import TinyTask, tiny_batches
from forge_plugins import Checkpoint, EarlyStop
from tests.forge.snapshot.test_resume import PowerCut, cut_at
from tests.support.profiles import few


class Scripted(TinyTask):
    """Gives these values in its validations, one per epoch, and the last one ever after."""

    def __init__(self, values: Iterable[float] = (1.0,), metric: str = "loss"):
        super().__init__()
        self.values, self.metric = list(values), metric

    def validation_step(self, batch: Any) -> Any:
        return {self.metric: 0.0, "other": 1.0}

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        assert self.trainer is not None
        epoch = min(self.trainer.progress.epoch, len(self.values))
        return {self.metric: self.values[epoch - 1], "notes": forge.Text("not a number")}


def fit(plugins: list[Any], values: Iterable[float] = (1.0,), **options: Any) -> forge.FitResult:
    """Up to ten epochs of two updates."""
    task = options.pop("task", None) or Scripted(values, options.pop("metric", "loss"))
    settings = {"max_epochs": 10, "seed": 0, "run_dir": False, "device": "cpu", **options}
    val = settings.pop("val", tiny_batches([4]))
    return forge.Trainer(plugins=plugins, **settings).fit(task, tiny_batches([4, 4]), val)


def epoch_of_stop(values: list[float], mode: str, patience: int, min_delta: float) -> int | None:
    """As one writes it by hand in a training loop: the epoch, from 1, after which to break."""
    best, waited = None, 0
    for epoch, value in enumerate(values, start=1):
        better = best is None or (value < best - min_delta if mode == "min" else value > best + min_delta)
        if math.isfinite(value) and better:
            best, waited = value, 0
        else:
            waited += 1
        if waited == patience:
            return epoch
    return None


VALUES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, math.nan, math.inf, -math.inf]), min_size=1, max_size=8)
MODES = st.sampled_from(["min", "max"])
PATIENCES = st.integers(1, 4)
DELTAS = st.sampled_from([0.0, 0.25, 1.0])


# -- when it stops ----------------------------------------------------------------------------------------------------


def test_it_stops_after_as_long_as_patience_says() -> None:
    result = fit([EarlyStop(patience=3)], [0.9, 0.12345678, 0.2, 0.13, 0.12345678, 0.0])
    assert result.epochs == 5
    assert result.stop_reason == "early_stop: val/loss has not improved on 0.12346 (update 4) for 3 validations"


@given(values=VALUES, mode=MODES, patience=PATIENCES, min_delta=DELTAS)
def test_it_stops_where_a_hand_written_loop_breaks(
    values: list[float], mode: Literal["min", "max"], patience: int, min_delta: float
) -> None:
    early = EarlyStop(mode=mode, patience=patience, min_delta=min_delta)
    result = fit([early], values, max_epochs=len(values))
    expected = epoch_of_stop(values, mode, patience, min_delta)
    assert result.epochs == (expected or len(values))
    assert result.stop_reason.startswith("early_stop" if expected else "max_epochs")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_never_improves_and_is_told(value: float, caplog: pytest.LogCaptureFixture) -> None:
    result = fit([EarlyStop(patience=2)], [value, value, 0.0])
    assert result.epochs == 2
    assert result.stop_reason == "early_stop: val/loss has not been a finite number for 2 validations"
    assert f"early_stop: val/loss is {value} at update 2" in caplog.text


def test_a_target_that_is_reached_stops_the_run_at_once() -> None:
    low = fit([EarlyStop(target=0.5)], [0.9, 0.6, 0.5])
    assert (low.epochs, low.stop_reason) == (3, "early_stop: val/loss is 0.5, and the target was 0.5")
    high = fit([EarlyStop("val/f1", mode="max", target=0.5)], [0.4, 0.6], metric="f1")
    assert (high.epochs, high.stop_reason) == (2, "early_stop: val/f1 is 0.6, and the target was 0.5")
    assert fit([EarlyStop(target=0.5, patience=9)], [math.nan, 0.9], max_epochs=3).stop_reason == "max_epochs"


@pytest.mark.parametrize(
    ("after", "epochs"), [(None, 3), ("3 epochs", 5), ("4 epochs", 6), ("5 updates", 5), ("33 samples", 7)]
)
def test_validations_before_after_are_not_compared(after: str | None, epochs: int) -> None:
    """An epoch has 2 updates of 4 samples; the value of the first epoch would never be beaten."""
    result = fit([EarlyStop(patience=2, after=after)], [0.0, 1.0])
    assert result.epochs == epochs


def test_the_metric_of_one_of_several_loaders_can_be_watched() -> None:
    val = {"clean": tiny_batches([4]), "hard": tiny_batches([4], seed=1)}
    early = EarlyStop("val/hard/loss", patience=1, min_delta=9.0)
    assert fit([early], task=TinyTask(), val=val).epochs == 2


# -- resume -----------------------------------------------------------------------------------------------------------


def saving() -> Checkpoint:
    return Checkpoint(every="1 updates", background=False)


@few
@given(values=VALUES, mode=MODES, patience=PATIENCES, min_delta=DELTAS, deaths=st.lists(st.integers(1, 16), max_size=3))
def test_a_run_that_was_cut_off_stops_where_it_would_have(
    values: list[float],
    mode: Literal["min", "max"],
    patience: int,
    min_delta: float,
    deaths: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("run")

    def live(*more: Any, **options: Any) -> forge.FitResult:
        early = EarlyStop(mode=mode, patience=patience, min_delta=min_delta, after="2 epochs")
        return fit([early, *more], values, max_epochs=len(values), **options)

    straight = live()
    for update in sorted(deaths):
        if update < straight.updates:
            with pytest.raises(PowerCut):
                live(saving(), cut_at(update), run_dir=folder, resume="auto")
    result = live(saving(), run_dir=folder, resume="auto")
    assert (result.updates, result.stop_reason) == (straight.updates, straight.stop_reason)
    assert repr(result.metrics) == repr(straight.metrics)  # in which NaN equals NaN


@pytest.mark.slow
def test_a_stopped_run_is_over_unless_it_gets_more_patience(tmp_path: Path) -> None:
    def live(patience: int, values: list[float]) -> forge.FitResult:
        plugins = [EarlyStop(patience=patience), saving()]
        return fit(plugins, values, run_dir=tmp_path, resume="auto", allow_inexact=True)

    first = live(2, [0.5, 1.0, 1.0])
    again = live(2, [0.5, 1.0, 1.0, 1.0])
    assert first.epochs == again.epochs == 3
    assert first.stop_reason == again.stop_reason
    longer = live(5, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert (longer.epochs, longer.stop_reason.endswith("for 5 validations")) == (6, True)
    better = live(6, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.25])
    assert (better.epochs, better.stop_reason) == (10, "max_epochs")


# -- what it refuses --------------------------------------------------------------------------------------------------


def test_an_absent_metric_is_refused_with_what_there_is() -> None:
    with pytest.raises(RecipeError) as caught:
        fit([EarlyStop("val/los")])
    assert str(caught.value) == (
        "early_stop.monitor is 'val/los', which this validation does not give. Did you mean 'val/loss'? Metrics: "
        "val/loss, val/other."
    )
    with pytest.raises(RecipeError, match=r"does not give\. Metrics: val/loss, val/other\."):
        fit([EarlyStop("val/perplexity", after="9 epochs")])


def test_a_fit_without_validation_data_is_refused() -> None:
    with pytest.raises(StackError, match="early_stop watches 'val/loss', but this fit has no val loader"):
        fit([EarlyStop()], val=None)


def test_a_fit_that_never_validates_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    fit([EarlyStop()], validate_every=None, max_epochs=1)
    assert "early_stop: validate_every is null" in caplog.text


COMPARED_NOTHING = "early_stop compared nothing: this run ended before its first validation."


def test_a_fit_that_ends_before_its_first_validation_says_so(caplog: pytest.LogCaptureFixture) -> None:
    early = EarlyStop()
    fit([early], max_updates=1, validate_every="1 epoch")
    assert COMPARED_NOTHING in caplog.text
    caplog.clear()
    fit([early], max_epochs=1)
    assert "compared nothing" not in caplog.text


@pytest.mark.parametrize("monitor", ["val/accuracy", "val/hard/F1", "val/top-5 acc", "val/mAP@50"])
def test_a_metric_that_should_grow_needs_its_mode(monitor: str) -> None:
    with pytest.raises(RecipeError, match=r"larger seems better, .* Write early_stop\.mode=max, or"):
        EarlyStop(monitor)
    EarlyStop(monitor, mode="max")
    EarlyStop(monitor, mode="min")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": 0}, r"early_stop\.patience is 0; it must be at least 1"),
        ({"min_delta": -0.1}, r"early_stop\.min_delta is -0.1; it must be a number of at least 0"),
        ({"min_delta": math.nan}, r"early_stop\.min_delta is nan"),
        ({"target": math.inf}, r"early_stop\.target is inf; it must be a finite number"),
        ({"after": "10 min"}, r"early_stop\.after is '10 min': write it in updates, epochs or samples"),
        ({"after": "soon"}, r"early_stop\.after: 'soon' is not an interval"),
        ({"monitor": "loss"}, r"early_stop\.monitor is 'loss', .* Write val/loss, or train/loss "),
        ({"monitor": "val_loss"}, r"early_stop\.monitor is 'val_loss', .* Write val/loss, or train/loss "),
        ({"monitor": "train_loss"}, r"Write val/loss, or train/loss "),
        ({"monitor": "valid/hard/loss"}, r"Write val/hard/loss, or"),
        ({"monitor": "value"}, r"Write val/value, or"),
        ({"mode": "smallest"}, "mode"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        EarlyStop(**options)


def test_the_first_of_several_that_is_due_stops_the_run() -> None:
    other = EarlyStop("val/other", mode="max", patience=4)
    other.name = "early_stop@other"
    result = fit([EarlyStop(patience=2), other], [9.0, 8.0, 7.0, 6.0, 5.0, 4.0])
    assert (result.epochs, result.stop_reason.split()[1]) == (5, "val/other")


class Losing(TinyTask):
    """Logs these training metrics, one per epoch, and the last one ever after."""

    def __init__(self, values: Any = (3.0, 2.0, 2.5, 2.25, 1.0)):
        super().__init__()
        self.values = list(values)

    def training_step(self, batch: Any) -> Any:
        assert self.trainer is not None
        epoch = min(self.trainer.progress.epoch, len(self.values) - 1)
        return {**super().training_step(batch), "score": torch.tensor(self.values[epoch])}


# -- training metrics -------------------------------------------------------------------------------------------------


def test_a_training_metric_needs_no_validation() -> None:
    result = fit([EarlyStop("train/score", mode="min", patience=2)], task=Losing(), val=None)
    assert result.epochs == 4
    assert result.stop_reason == "early_stop: train/score has not improved on 2 (update 4) for 2 logs"


def test_a_training_metric_that_is_not_logged_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"which this run does not log\. Did you mean 'train/score'"):
        fit([EarlyStop("train/scor")], task=Losing(), val=None)


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
    result = fit([stop], values, max_epochs=9)
    assert result.epochs == epochs
    assert ("divergence threshold" in result.stop_reason) == (epochs < 6)


# -- checkpoints ------------------------------------------------------------------------------------------------------

BEST = {"monitor": "train/score", "mode": "min"}


def test_the_best_checkpoint_by_a_training_metric(tmp_path: Path) -> None:
    fit([Checkpoint("1 epoch", keep=1, best=BEST)], task=Losing([3.0, 1.0, 2.0]), max_epochs=3, run_dir=tmp_path)
    folder = Checkpoints(tmp_path / "checkpoints")
    assert [StoredCheckpoint(path).update for path in folder.all()] == [4, 6]
    assert (folder.folder / "best").resolve().name == "update-00000004"


def test_all_checkpoints_can_be_kept(tmp_path: Path) -> None:
    fit([Checkpoint("2 updates", keep="all")], task=Losing(), max_epochs=2, run_dir=tmp_path)
    there = [StoredCheckpoint(path).update for path in Checkpoints(tmp_path / "checkpoints").all()]
    assert there == [2, 4]
