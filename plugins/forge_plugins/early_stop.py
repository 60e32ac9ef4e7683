"""Early stopping."""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import forge
from forge.errors import NegativeVerdict, RecipeError, StackError
from forge_plugins._run_lengths import moment, reached
from forge_plugins._validations import warn_of_none_planned, warn_of_nothing_compared

logger = logging.getLogger("forge")

MORE_IS_BETTER = frozenset(
    {"acc", "accuracy", "ap", "auc", "auroc", "bleu", "dice", "f1", "iou", "map", "miou", "precision", "r2", "recall"}
)
"""Words in the name of a metric of which more is better."""
LESS_IS_BETTER = frozenset({"loss", "error", "err"})
"""Words in the name of a metric of which less is better; they take precedence."""


class EarlyStop(forge.Plugin):
    """Stop the run when a validation metric has not improved for a while, has reached a target, or has collapsed.

    After every validation of a fit the metric is compared with the best value so far; it has improved if it is better
    by more than `min_delta`. After `patience` validations in a row without improvement the run stops. NaN and infinity
    never count as an improvement. A metric that the validation does not return is refused, with a list of those that it
    does.

    `floor` is for pipelines: a metric that falls below it ends the run as failed, with exit code 1, right after that
    validation; nothing more is saved or exported. It is a number that the metric must keep once it has reached it, or a
    share of the run's own best: with `floor=20%` an accuracy may be a fifth below the best so far, and a loss a fifth
    above it. NaN and infinity are below every floor. A run that ends below a number, without having reached it, has
    failed too; with `after`, every validation from that point on must reach it.

    When to use it: if you do not know how many epochs a run needs. The weights at the end are those of the last update;
    to keep those of the best validation, set `checkpoint.best`.

    What you see: the reason in the log and in `FitResult.stop_reason`. The state is saved as at every stop.

    Together with: with `ema` or `swa` the averaged weights are validated, and so watched. The best value and the count
    are saved with the run. A stopped run that is resumed does not train further, unless it gets a larger `patience` or
    another `target`.

    ::

        forge fit quickstart -p early_stop
        forge fit quickstart -p early_stop early_stop.monitor=val/accuracy early_stop.mode=max early_stop.patience=5
        forge fit quickstart -p early_stop early_stop.floor=50%
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        monitor: str = "val/loss"
        "The validation metric to monitor, by its logged name."
        mode: Literal["min", "max"] | None = None
        "Whether smaller (min) or larger (max) is better. null: min, refused for a name such as accuracy."
        patience: int = 3
        "Validations in a row without improvement after which the run stops."
        min_delta: float = 0.0
        "Smallest difference from the best value that counts as an improvement."
        target: float | None = None
        "Stop as soon as the metric reaches this value."
        floor: float | str | None = None
        "Fail with exit code 1 if the metric falls below this value, or by this share of its best: 0.8, 20%."
        after: str | None = None
        "Ignore validations before this point: 1000 updates, 2 epochs."

    config: Config
    provides = ("early_stop",)

    def __init__(self, *first: str, **values: Any):
        super().__init__(*first, **values)
        config = self.config
        if config.patience < 1:
            raise RecipeError(f"early_stop.patience is {config.patience}; it must be at least 1.")
        if not 0 <= config.min_delta < math.inf:
            raise RecipeError(f"early_stop.min_delta is {config.min_delta:g}; it must be a number of at least 0.")
        if config.target is not None and not math.isfinite(config.target):
            raise RecipeError(f"early_stop.target is {config.target:g}; it must be a finite number.")
        self._floor, self._share = floor_of(config.floor)
        if config.floor is None:
            self.forge_boundary = None  # pyright: ignore[reportAttributeAccessIssue]
        self._after = moment(config.after, "early_stop.after") if config.after is not None else None
        check_monitor(config.monitor)
        self._sign = sign(config.monitor, config.mode)
        self._begin()

    def _begin(self) -> None:
        """Reset the state of one run."""
        self._best: float | None = None
        self._best_at = 0
        "The update of the best value."
        self._waited = 0
        "Validations since then."
        self._last: float | None = None
        "The value of the last validation that was compared."
        self._early, self._failed = False, False
        "Whether a validation ran before `after`; whether the run has failed."
        self._reached, self._verdict = self._after is not None or self._share is not None, ""
        "Whether the floor holds by now; how the last validation broke it."

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        self._begin()
        if trainer.verb != "fit":
            return
        if "val" not in trainer.loaders:
            raise StackError(
                f"early_stop watches {self.config.monitor!r}, but this fit has no val loader. Pass one, or "
                "remove early_stop."
            )
        warn_of_none_planned(trainer, "early_stop")

    @forge.hookimpl(wrapper=True)
    def forge_evaluate(self, trainer: forge.Run, stage: str) -> Generator[None, Any, Any]:
        metrics = yield
        if trainer.verb == "fit" and stage == "val":
            self._compare(trainer, metrics)
        return metrics

    def _compare(self, trainer: forge.Run, metrics: Mapping[str, Any]) -> None:
        """Compare one validation with the best so far, and request a stop if due."""
        config, progress, value = self.config, trainer.progress, self._value(metrics)
        done = {"updates": progress.update, "epochs": progress.epoch, "samples": progress.sample}
        if self._after is not None and not reached(self._after, **done):
            self._early = True
            return
        self._last, self._verdict = value, self._broken_floor(value, progress.update)
        if self._improves(value):
            self._best, self._best_at, self._waited = value, progress.update, 0
        else:
            self._waited += 1
            if not math.isfinite(value):
                logger.warning("early_stop: %s is %s at update %d.", config.monitor, value, progress.update)
        self._stop_if_due(trainer)

    def _broken_floor(self, value: float, update: int) -> str:
        """Return how a value breaks the floor, "" if it does not. A number holds from the value that reaches it on."""
        config, best = self.config, self._best
        floor = self._floor
        if self._share is not None:
            floor = None if best is None else best - self._sign * self._share * abs(best)
        below = floor is not None and self._sign * (value - floor) < 0
        self._reached |= floor is not None and not below
        if config.floor is None or (math.isfinite(value) and not (below and self._reached)):
            return ""
        known = "" if best is None else f"; the best was {best:.5g} at update {self._best_at}"
        beyond = f"{self._beyond()} early_stop.floor={config.floor}"
        return f"{config.monitor} is {value:.5g} at update {update}, {beyond}{known}"

    def _beyond(self) -> str:
        return "below" if self._sign > 0 else "above"

    @forge.hookimpl
    def forge_boundary(self) -> None:
        if self._verdict:  # only now, so that the validation is logged
            raise NegativeVerdict(f"{self._verdict}. The run ends as failed; nothing more is saved.")

    def _stop_if_due(self, trainer: forge.Run) -> None:
        config, value = self.config, self._last
        if value is None:
            return
        if config.target is not None and math.isfinite(value) and self._sign * (value - config.target) >= 0:
            reason = f"{config.monitor} is {value:.5g}, and the target was {config.target:g}"
        elif self._waited >= config.patience:
            reason = self._reason()
        else:
            return
        # the metrics of a validation are equal on all ranks
        trainer.request_stop(reason, everywhere=True, by=self.name)

    def _value(self, metrics: Mapping[str, Any]) -> float:
        monitor = self.config.monitor
        numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        if monitor in numbers:
            return float(numbers[monitor])
        near = difflib.get_close_matches(monitor, numbers, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise RecipeError(
            f"early_stop.monitor is {monitor!r}, which this validation does not give.{meant} Metrics: "
            f"{', '.join(sorted(numbers)) or 'none'}."
        )

    def _improves(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        return self._best is None or self._sign * (value - self._best) > self.config.min_delta

    def _reason(self) -> str:
        span = "1 validation" if self._waited == 1 else f"{self._waited} validations"
        if self._best is None:
            return f"{self.config.monitor} has not been a finite number for {span}"
        return f"{self.config.monitor} has not improved on {self._best:.5g} (update {self._best_at}) for {span}"

    # -- the end ------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_exception(self) -> None:
        self._failed = True

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        if trainer.verb != "fit" or self._failed:
            return
        if self._last is not None:
            if self._floor is not None and self._sign * (self._last - self._floor) < 0:
                raise NegativeVerdict(
                    f"{self.config.monitor} is {self._last:.5g} at the end of the run, {self._beyond()} "
                    f"early_stop.floor={self.config.floor}."
                )
            return
        after = f"early_stop.after is {self.config.after!r}, and every validation of this run ran before it."
        warn_of_nothing_compared(trainer, "early_stop", after if self._early else None)

    # -- state --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        watched = {"monitor": self.config.monitor, "mode": "max" if self._sign > 0 else "min"}
        reached = {"reached": True} if self._floor is not None and self._reached else {}
        standing = {"best": self._best, "best_at": self._best_at, "waited": self._waited, "last": self._last}
        return {**watched, **standing, **reached}

    @forge.hookimpl
    def forge_load_state_dict(self, trainer: forge.Run, state: dict[str, Any]) -> None:
        self._begin()
        if (state["monitor"], state["mode"]) == (self.config.monitor, "max" if self._sign > 0 else "min"):
            self._best, self._best_at = state["best"], state["best_at"]
            self._waited, self._last = state["waited"], state["last"]
            self._reached |= state.get("reached", False)
            self._stop_if_due(trainer)


def check_monitor(monitor: str) -> None:
    """Refuse a metric that is not of a validation."""
    if not monitor.startswith("val/"):
        name = re.sub(r"^(val|valid|validation|train|training|test)[/_](?=.)", "", monitor)
        raise RecipeError(
            f"early_stop.monitor is {monitor!r}, but only validation metrics are compared. Write val/{name}."
        )


def floor_of(floor: float | str | None) -> tuple[float | None, float | None]:
    """Return the option `floor` as (a number, None) or (None, a share of the best)."""
    if floor is None:
        return None, None
    text = str(floor).strip()
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    share = text.endswith("%")
    if not math.isfinite(value) or (share and value <= 0):
        raise RecipeError(f"early_stop.floor is {floor!r}; it must be a number, or a share of the best such as 20%.")
    return (None, value / 100) if share else (value, None)


def sign(monitor: str, mode: str | None) -> float:
    """Return 1.0 if a larger value is better, else -1.0; refuse to guess for names such as accuracy."""
    words = re.split(r"[^a-z0-9]+", monitor.rsplit("/", 1)[-1].lower())
    if mode is None and not MORE_IS_BETTER.isdisjoint(words) and LESS_IS_BETTER.isdisjoint(words):
        raise RecipeError(
            f"early_stop.monitor is {monitor!r}, where larger seems better, but early_stop.mode is not set. "
            "Write early_stop.mode=max, or early_stop.mode=min if smaller is better."
        )
    return 1.0 if mode == "max" else -1.0
