"""Early stopping."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import forge
from forge.diagnose.validations import warn_of_none_planned, warn_of_nothing_compared
from forge.errors import StackError
from forge_plugins.early_stop.stop_rule import StopRule


class EarlyStop(forge.Plugin):
    """Stop the run when a metric has not improved for a while, has reached a target, or has diverged.

    After every validation of a fit the metric is compared with the best value so far; it has improved if it is better
    by more than `min_delta`. After `patience` validations in a row without improvement the run stops. NaN and infinity
    never count as an improvement. A metric that the validation does not return is refused, with a list of those that it
    does.

    A training metric can be watched too, and needs no validation: `monitor=train/loss_epoch` compares the mean of every
    epoch, `train/loss` every log. `patience` counts what is compared.

    Several metrics take several plugins, each with a name of its own after an @: `early_stop@accuracy`. The first that
    is due stops the run.

    `divergence_threshold` stops the run as soon as the metric is worse than it, or not finite.

    When to use it: if you do not know how many epochs a run needs. The weights at the end are those of the last update;
    to keep those of the best validation, set `checkpoint.best`.

    What you see: the reason in the log and in `FitResult.stop_reason`. The state is saved as at every stop.

    Together with: with `ema` or `swa` the averaged weights are validated, and so watched. The best value and the count
    are saved with the run. A stopped run that is resumed does not train further, unless it gets a larger `patience` or
    another `target`.

    ::

        forge fit quickstart -p early_stop
        forge fit quickstart -p early_stop early_stop.monitor=train/loss_epoch early_stop.divergence_threshold=10
        forge fit quickstart -p early_stop early_stop.monitor=val/accuracy early_stop.mode=max early_stop.patience=5
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        monitor: str = "val/loss"
        "The metric to monitor, by its logged name: val/loss, train/loss_epoch."
        mode: Literal["min", "max"] | None = None
        "Whether smaller (min) or larger (max) is better. null: min, refused for a name such as accuracy."
        patience: int = 3
        "Comparisons in a row without improvement after which the run stops."
        min_delta: float = 0.0
        "Smallest difference from the best value that counts as an improvement."
        target: float | None = None
        "Stop as soon as the metric reaches this value."
        divergence_threshold: float | None = None
        "Stop as soon as the metric is worse than this value, or not finite."
        after: str | None = None
        "Ignore what comes before this point: 1000 updates, 2 epochs."

    config: Config
    cures = {"endless": "the plugin {name}"}

    def __init__(self, *first: str, **values: Any):
        super().__init__(*first, **values)
        self._rule = StopRule(self.config)
        if self._rule.of_validation:
            self.forge_log = None  # pyright: ignore[reportAttributeAccessIssue]
        self._failed = False

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        self._failed = False
        self._rule.begin()
        if trainer.verb != "fit" or not self._rule.of_validation:
            return
        if "val" not in trainer.loaders:
            raise StackError(
                f"{self.name} watches {self.config.monitor!r}, but this fit has no val loader. Pass one, watch a "
                f"training metric such as train/loss_epoch, or remove {self.name}."
            )
        warn_of_none_planned(trainer, self.name)

    @forge.hookimpl(wrapper=True)
    def forge_evaluate(self, trainer: forge.Run, stage: str) -> Generator[None, Any, Any]:
        metrics = yield
        if trainer.verb == "fit" and stage == "val" and self._rule.of_validation:
            self._rule.compare(trainer, metrics)
            self._stop_if_due(trainer)
        return metrics

    @forge.hookimpl
    def forge_log(self, trainer: forge.Run, metrics: Mapping[str, Any]) -> None:
        if trainer.verb != "fit":
            return
        if self.config.monitor in metrics:
            self._rule.compare(trainer, metrics)
            self._stop_if_due(trainer)
        elif trainer.progress.epoch > 1:
            self._rule.refuse_unknown(trainer.metrics)

    def _stop_if_due(self, trainer: forge.Run) -> None:
        """Request a stop; the metrics are equal on all ranks."""
        reason = self._rule.reason()
        if reason:
            trainer.request_stop(reason, everywhere=True, by=self.name)

    @forge.hookimpl
    def forge_exception(self) -> None:
        self._failed = True

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        if trainer.verb == "fit" and not self._failed and self._rule.last is None:
            warn_of_nothing_compared(trainer, self.name, self._rule.why_nothing())

    # -- state --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        return self._rule.state_dict()

    @forge.hookimpl
    def forge_load_state_dict(self, trainer: forge.Run, state: dict[str, Any]) -> None:
        self._rule.begin()
        self._rule.load_state_dict(state)
        self._stop_if_due(trainer)
