"""early_stop: a run ends when its validations have stopped getting better, and the reason says so."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge
from forge.errors import NegativeVerdict, RecipeError, StackError
from forge.testing import TinyTask, check_plugin, tiny_batches
from forge_plugins import Accumulate, Checkpoint, EarlyStop
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


def test_one_validation_is_not_several() -> None:
    assert fit([EarlyStop(patience=1)], [1.0, 1.0]).stop_reason.endswith("on 1 (update 2) for 1 validation")


def test_a_run_that_gets_better_reaches_its_end() -> None:
    result = fit([EarlyStop(patience=1)], [1 / n for n in range(1, 11)])
    assert (result.epochs, result.stop_reason) == (10, "max_epochs")


@given(values=VALUES, mode=MODES, patience=PATIENCES, min_delta=DELTAS)
def test_it_stops_where_a_hand_written_loop_breaks(
    values: list[float], mode: Literal["min", "max"], patience: int, min_delta: float
) -> None:
    early = EarlyStop(mode=mode, patience=patience, min_delta=min_delta)
    result = fit([early], values, max_epochs=len(values))
    expected = epoch_of_stop(values, mode, patience, min_delta)
    assert result.epochs == (expected or len(values))
    assert result.stop_reason.startswith("early_stop" if expected else "max_epochs")


def test_an_improvement_must_be_larger_than_min_delta() -> None:
    values = [1.0, 0.75, 0.5, 0.25]
    assert fit([EarlyStop(patience=2, min_delta=0.25)], values).epochs == 5  # 0.5 is the next best after 1.0
    assert fit([EarlyStop(patience=2, min_delta=0.125)], values).epochs == 6


def test_with_mode_max_more_is_better() -> None:
    early = EarlyStop("val/accuracy", mode="max", patience=2)
    result = fit([early], [0.1, 0.2, 0.2, 0.1], metric="accuracy")
    assert result.epochs == 4
    assert result.stop_reason.startswith("early_stop: val/accuracy has not improved on 0.2 (update 4)")


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


def test_each_validation_counts_however_often_there_is_one() -> None:
    result = fit([EarlyStop(patience=4), Accumulate(2)], validate_every="1 updates")
    assert result.updates == 5


def test_the_metric_of_one_of_several_loaders_can_be_watched() -> None:
    val = {"clean": tiny_batches([4]), "hard": tiny_batches([4], seed=1)}
    early = EarlyStop("val/hard/loss", patience=1, min_delta=9.0)
    assert fit([early], task=TinyTask(), val=val).epochs == 2


def test_it_leaves_validation_by_itself_alone() -> None:
    trainer = forge.Trainer(plugins=[EarlyStop("val/nothing")], device="cpu")
    assert trainer.validate(TinyTask(), tiny_batches([4])).keys() == {"val/loss", "val/accuracy"}


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


def test_a_run_at_its_target_is_over_unless_it_gets_another(tmp_path: Path) -> None:
    def live(target: float) -> forge.FitResult:
        plugins = [EarlyStop(target=target, patience=99), saving()]
        return fit(plugins, [0.5, 0.4, 0.3, 0.2, 0.1], max_epochs=5, run_dir=tmp_path, resume="auto")

    assert [live(target).epochs for target in (0.4, 0.4, 0.2)] == [2, 2, 4]


def test_another_metric_begins_anew(tmp_path: Path) -> None:
    assert fit([EarlyStop(patience=2), saving()], run_dir=tmp_path).epochs == 3
    other = EarlyStop("val/other", patience=2)
    assert fit([other, saving()], run_dir=tmp_path, resume="auto").epochs == 6


def test_the_state_at_the_stop_is_saved(tmp_path: Path) -> None:
    fit([EarlyStop(patience=1), Checkpoint(every=None)], run_dir=tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").glob("update-*")] == ["update-00000004"]


@pytest.mark.slow  # tests/forge/testing/test_conformance.py holds it to the contract in the quick profile
def test_it_keeps_the_contract() -> None:
    check_plugin(lambda: EarlyStop(patience=1, min_delta=100.0))


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


def test_a_fit_whose_validations_all_came_before_after_says_so(caplog: pytest.LogCaptureFixture) -> None:
    fit([EarlyStop(after="9 epochs")], max_epochs=2)
    assert "early_stop compared nothing: early_stop.after is '9 epochs', and every validation" in caplog.text


def test_a_fit_compared_in_another_life_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit([EarlyStop(), saving()], max_updates=2, run_dir=tmp_path)
    fit([EarlyStop(), saving()], max_updates=3, run_dir=tmp_path, resume="auto")
    with pytest.raises(PowerCut):
        fit([EarlyStop(), cut_at(1)])
    forge.Trainer(plugins=[EarlyStop()], device="cpu").validate(TinyTask(), tiny_batches([4]))
    assert "compared nothing" not in caplog.text


@pytest.mark.parametrize("monitor", ["val/accuracy", "val/hard/F1", "val/top-5 acc", "val/mAP@50"])
def test_a_metric_that_should_grow_needs_its_mode(monitor: str) -> None:
    with pytest.raises(RecipeError, match=r"larger seems better, .* Write early_stop\.mode=max, or"):
        EarlyStop(monitor)
    EarlyStop(monitor, mode="max")
    EarlyStop(monitor, mode="min")


@pytest.mark.parametrize("monitor", ["val/loss", "val/accuracy_loss", "val/perplexity", "val/macro", "val/accents"])
def test_any_other_metric_is_to_fall(monitor: str) -> None:
    assert fit([EarlyStop(monitor, patience=1)], [1.0, 2.0], metric=monitor[4:]).epochs == 2


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


def test_the_log_says_who_stopped_the_run(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="forge")
    fit([EarlyStop(patience=1)])
    assert "stop asked for by early_stop: val/loss has not improved on 1 (update 2) for 1 validation" in caplog.text


# -- the floor --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("floor", "values", "failed_after"),
    [
        (0.8, [0.1, 0.5, 0.9, 0.95, 0.3], 5),  # reached, then lost
        (0.8, [0.1, 0.5, 0.9, 0.85, 0.8], None),
        (0.8, [0.9, math.nan], 2),
        (0.8, [math.nan], 1),
        ("20%", [0.1, 0.5, 0.45, 0.41, 0.3], 5),
        ("20%", [0.1, 0.5, 0.45, 0.41, 0.9], None),
        ("20%", [0.5, math.inf], 2),
        ("20%", [0.5, 0.1], 2),
    ],
)
def test_a_collapse_below_the_floor_fails(floor: Any, values: list[float], failed_after: int | None) -> None:
    early = EarlyStop(monitor="val/score", mode="max", floor=floor, patience=100)
    task = Scripted(values, "score")
    if failed_after is None:
        assert fit([early], task=task, max_epochs=len(values)).epochs == len(values)
        return
    with pytest.raises(NegativeVerdict, match=r"val/score is .*below early_stop\.floor") as caught:
        fit([early], task=task, max_epochs=len(values) + 2)
    assert f"at update {2 * failed_after}" in str(caught.value)


def test_a_floor_of_a_loss_is_a_ceiling() -> None:
    with pytest.raises(
        NegativeVerdict, match=r"val/loss is 3 at update 6, above early_stop\.floor=50%; the best was 1 "
    ):
        fit([EarlyStop(floor="50%", patience=9)], [2.0, 1.0, 3.0])
    assert fit([EarlyStop(floor="50%", patience=9)], [2.0, 1.0, 1.4]).epochs == 10


def test_a_run_that_ends_below_its_floor_has_failed() -> None:
    early = EarlyStop(monitor="val/score", mode="max", floor=0.8)
    with pytest.raises(NegativeVerdict, match=r"0\.6 at the end of the run, below early_stop\.floor=0\.8"):
        fit([early], task=Scripted([0.1, 0.6], "score"))


def test_after_says_from_when_on_the_floor_holds() -> None:
    early = EarlyStop(monitor="val/score", mode="max", floor=0.8, after="3 epochs", patience=9)
    with pytest.raises(NegativeVerdict, match="at update 6"):
        fit([early], task=Scripted([0.1, 0.2, 0.3, 0.9], "score"))


def test_the_validation_that_fails_is_logged_and_not_saved(tmp_path: Path) -> None:
    early = EarlyStop(monitor="val/score", mode="max", floor=0.8, patience=9)
    plugins = [early, "jsonl", Checkpoint(every="1 epoch", background=False)]
    with pytest.raises(NegativeVerdict):
        fit(plugins, task=Scripted([0.9, 0.1], "score"), run_dir=tmp_path)
    assert '"val/score": 0.1' in (tmp_path / "metrics.jsonl").read_text()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir() and not path.is_symlink()] == [
        "update-00000002"
    ]
    assert not (tmp_path / "weights.safetensors").exists()
    assert json.loads((tmp_path / "end.json").read_text())["status"] == "failed"


def test_a_resumed_run_keeps_its_floor(tmp_path: Path) -> None:
    make: Any = lambda: [EarlyStop(monitor="val/score", mode="max", floor=0.8, patience=9), "checkpoint"]  # noqa: E731
    fit(make(), task=Scripted([0.9, 0.1], "score"), run_dir=tmp_path, max_epochs=1)
    with pytest.raises(NegativeVerdict, match="at update 4"):
        fit(make(), task=Scripted([0.9, 0.1], "score"), run_dir=tmp_path, resume="auto")


@pytest.mark.parametrize("floor", ["low", "%", "-5%", math.nan, "inf"])
def test_a_floor_that_is_none_is_refused(floor: Any) -> None:
    with pytest.raises(RecipeError, match=r"early_stop\.floor"):
        EarlyStop(floor=floor)
