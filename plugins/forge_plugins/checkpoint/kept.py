"""What is kept of a run's checkpoints: the latest of its course, and the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forge.checkpoint import Checkpoints
from forge.env import Env
from forge.errors import RecipeError, did_you_mean


@dataclass(kw_only=True, slots=True)
class Best:
    """The best checkpoints, kept whatever their age."""

    monitor: str
    "The metric to compare by, by its logged name: val/accuracy, train/loss_epoch."
    mode: Literal["max", "min"]
    "Whether a larger or a smaller value is better."
    keep: int = 1
    "Number of best checkpoints to keep."


def watched(best: Best | str | None) -> Best | None:
    """Return the option `best`; refuse a metric alone, which leaves open whether larger is better."""
    if isinstance(best, str):
        mode = "min" if "loss" in best else "max"
        raise RecipeError(
            f"checkpoint.best is {best!r}, but it needs a metric and a mode: max if larger is better, else min. "
            f"Write best: {{monitor: {best}, mode: {mode}}}, or checkpoint.best.monitor={best} "
            f"checkpoint.best.mode={mode}."
        )
    return best


def ranking(values: Mapping[int, float], mode: str) -> list[int]:
    """Return updates by value, best first; of equal values the earlier first."""
    sign = -1.0 if mode == "max" else 1.0
    return sorted(values, key=lambda update: (sign * values[update], update))


class Kept:
    """The checkpoints of one run, by their updates, and the values by which they are compared."""

    def __init__(self, latest: int | Literal["all"], best: Best | None) -> None:
        self.watched = best
        self.first_kept = 0 if latest == "all" else -latest
        "The first of the course, which is in order, that is kept for its age."
        self.written: set[int] = set()
        "Saved since the run began, or was last restored."
        self.inherited: set[int] | None = set()
        "Saved before that and still on disk; None until rank 0 has listed them."
        self.writing: int | None = None
        "Saved last, possibly not on disk yet."
        self.values: dict[int, float] = {}
        "The monitored value by update, of the checkpoints that exist."
        self.compared = False
        "Whether a finite value was compared, in this attempt or an earlier one."
        self.why_none = None if best is None or best.monitor.startswith("val/") else f"{best.monitor} was never logged."
        "Why nothing was compared, where it is known."

    def best(self) -> list[int]:
        """Return the updates to keep for their value, best first."""
        return ranking(self.values, self.watched.mode)[: self.watched.keep] if self.watched is not None else []

    def forget_gone(self, folder: Checkpoints, env: Env) -> None:
        """Forget values whose checkpoint does not exist, alike on all ranks; a new run folder has none of the state's.

        Only rank 0 lists the folder, and only once, since its writer removes old checkpoints meanwhile.
        """
        if self.inherited is None:
            there = folder.updates() if env.is_main else []
            self.inherited = set(there if env.world == 1 else env.broadcast(there))
        saved = {*self.written, *self.inherited, self.writing}
        self.values = {update: value for update, value in self.values.items() if update in saved}

    def compare(self, update: int, metrics: Mapping[str, Any]) -> str | None:
        """Note the value of an update; return why to save it, if it is among the best."""
        assert self.watched is not None
        name = self.watched.monitor
        numbers = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
        if name not in numbers:
            raise RecipeError(
                f"checkpoint.best.monitor is {name!r}, which this validation does not give."
                f"{did_you_mean(name, numbers)} Metrics: {', '.join(sorted(numbers)) or 'none'}."
            )
        value = float(numbers[name])
        if not math.isfinite(value):
            self.why_none = f"{name} was never a finite number, so there is no best checkpoint."
            return None
        self.compared, self.values[update] = True, value
        return f"{name} = {value:.5g} is among the best" if update in self.best() else None

    def after(self, update: int, folder: Checkpoints, resumed_from: int | None) -> set[int]:
        """Return what to keep once this update is saved."""
        before = -1 if resumed_from is None else resumed_from
        # checkpoints neither of this attempt nor from before its restore belong to an abandoned course
        earlier = [u for u in folder.updates() if u < update and (u in self.written or u <= before)]
        course = [*earlier, update]
        return {*course[self.first_kept :], *self.best()}

    def forget_last(self) -> int | None:
        """Forget the update saved last, whose write has failed, and return it."""
        update, self.writing = self.writing, None
        if update is not None:
            self.written.discard(update)
            self.values.pop(update, None)
        return update

    def state_dict(self) -> dict[str, Any]:
        if self.watched is None:
            return {}
        entries = [{"update": update, "value": self.values[update]} for update in self.best()]
        return {"monitor": self.watched.monitor, "mode": self.watched.mode, "best": entries}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, with the values of the same metric."""
        self.written, self.inherited, self.values = set(), None, {}
        best = self.watched
        if best is not None and (state.get("monitor"), state.get("mode")) == (best.monitor, best.mode):
            self.values = {entry["update"]: entry["value"] for entry in state["best"]}
            self.compared |= bool(self.values)
