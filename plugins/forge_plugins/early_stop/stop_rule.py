"""The rule of `early_stop`: a metric, its best value so far, and when it ends the run."""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import forge
from forge.contract.run_lengths import moment, reached
from forge.errors import RecipeError
from forge.runs.directions import mode_of

logger = logging.getLogger("forge")


class StopRule:
    """Compares a metric with its best value; `config` is an `EarlyStop.Config`."""

    def __init__(self, config: Any):
        self.config = config
        if config.patience < 1:
            raise RecipeError(f"early_stop.patience is {config.patience}; it must be at least 1.")
        if not 0 <= config.min_delta < math.inf:
            raise RecipeError(f"early_stop.min_delta is {config.min_delta:g}; it must be a number of at least 0.")
        for name in ("target", "divergence_threshold"):
            value = getattr(config, name)
            if value is not None and not math.isfinite(value):
                raise RecipeError(f"early_stop.{name} is {value:g}; it must be a finite number.")
        self._after = moment(config.after, "early_stop.after") if config.after is not None else None
        check_monitor(config.monitor)
        self.of_validation = config.monitor.startswith("val/")
        "Whether a validation gives the metric, rather than a log of training metrics."
        self._sign = sign(config.monitor, config.mode)
        self.begin()

    def begin(self) -> None:
        """Reset the state of one run."""
        self._best: float | None = None
        self._best_at = 0
        "The update of the best value."
        self._waited = 0
        "Comparisons since then."
        self.last: float | None = None
        "The value that was compared last."
        self._early = False
        "Whether there was a value before `after`."

    def compare(self, trainer: forge.Run, metrics: Mapping[str, Any]) -> None:
        """Compare a new value with the best so far."""
        self.refuse_unknown(metrics)
        config, progress, value = self.config, trainer.progress, float(metrics[self.config.monitor])
        done = {"updates": progress.update, "epochs": progress.epoch, "samples": progress.sample}
        if not progress.update:
            return  # before training: validate_first
        if self._after is not None and not reached(self._after, **done):
            self._early = True
            return
        self.last = value
        better = self._best is None or self._sign * (value - self._best) > config.min_delta
        if better and math.isfinite(value):
            self._best, self._best_at, self._waited = value, progress.update, 0
        else:
            self._waited += 1
            if not math.isfinite(value):
                logger.warning("early_stop: %s is %s at update %d.", config.monitor, value, progress.update)

    def refuse_unknown(self, metrics: Mapping[str, Any]) -> None:
        """Raise if the metric is not among these."""
        monitor, numbers = self.config.monitor, [n for n, v in metrics.items() if isinstance(v, (int, float))]
        if monitor in numbers:
            return
        near = difflib.get_close_matches(monitor, numbers, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        source = "this validation does not give" if self.of_validation else "this run does not log"
        raise RecipeError(
            f"early_stop.monitor is {monitor!r}, which {source}.{meant} Metrics: "
            f"{', '.join(sorted(numbers)) or 'none'}."
        )

    def _beyond(self) -> str:
        return "below" if self._sign > 0 else "above"

    def reason(self) -> str:
        """Return why the run is to stop now, "" if it is not."""
        config, value = self.config, self.last
        if value is None:
            return ""
        if config.target is not None and math.isfinite(value) and self._sign * (value - config.target) >= 0:
            return f"{config.monitor} is {value:.5g}, and the target was {config.target:g}"
        worst = config.divergence_threshold
        if worst is not None and not (math.isfinite(value) and self._sign * (value - worst) >= 0):
            return f"{config.monitor} is {value:.5g}, {self._beyond()} the divergence threshold of {worst:g}"
        if self._waited < config.patience:
            return ""
        noun = "validation" if self.of_validation else "log"
        span = f"{self._waited} {noun}{'' if self._waited == 1 else 's'}"
        if self._best is None:
            return f"{config.monitor} has not been a finite number for {span}"
        return f"{config.monitor} has not improved on {self._best:.5g} (update {self._best_at}) for {span}"

    def why_nothing(self) -> str | None:
        """Return why nothing was compared, where it is not for want of a validation."""
        if self._early:
            what = "every validation" if self.of_validation else "every log"
            return f"early_stop.after is {self.config.after!r}, and {what} of this run ran before it."
        return None if self.of_validation else f"{self.config.monitor} was never logged."

    def state_dict(self) -> dict[str, Any]:
        watched = {"monitor": self.config.monitor, "mode": "max" if self._sign > 0 else "min"}
        standing = {"best": self._best, "best_at": self._best_at, "waited": self._waited, "last": self.last}
        return {**watched, **standing}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of the same metric and mode."""
        if (state.get("monitor"), state.get("mode")) == (self.config.monitor, "max" if self._sign > 0 else "min"):
            self._best, self._best_at = state["best"], state["best_at"]
            self._waited, self.last = state["waited"], state["last"]


def check_monitor(monitor: str) -> None:
    """Refuse a name that no log has: without its stage, or with another word for it."""
    stage, slash, _ = monitor.partition("/")
    if not slash or stage in ("valid", "validation", "training", "test"):
        name = re.sub(r"^(val|valid|validation|train|training|test)[/_](?=.)", "", monitor)
        raise RecipeError(
            f"early_stop.monitor is {monitor!r}, but a metric is named with its stage. Write val/{name}, or "
            f"train/{name} to compare training metrics."
        )


def sign(monitor: str, mode: str | None) -> float:
    """Return 1.0 if a larger value is better, else -1.0; refuse to guess for names such as accuracy."""
    if mode is None and mode_of(monitor) == "max":
        raise RecipeError(
            f"early_stop.monitor is {monitor!r}, where larger seems better, but early_stop.mode is not set. "
            "Write early_stop.mode=max, or early_stop.mode=min if smaller is better."
        )
    return 1.0 if mode == "max" else -1.0
