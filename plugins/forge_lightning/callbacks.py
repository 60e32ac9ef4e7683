"""Lightning's callbacks: those given to the adapter and those of the module's configure_callbacks, in its order."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from forge.errors import TaskError
from forge_lightning.compatibility import PACKAGES

REFUSED_CALLBACKS = {
    "StochasticWeightAveraging": "Use the plugin swa (docs/from-lightning.md says where they differ).",
    "GradientAccumulationScheduler": "Use the plugin accumulate.",
    "BatchSizeFinder": "Use `forge tune batch`.",
    "LearningRateFinder": "Use `forge tune lr`.",
}
"""Callbacks that rewrite Lightning's own loops."""
DROPPED = {"ProgressBar": "the plugin progress shows one", "DeviceStatsMonitor": "the plugin monitor logs the device"}
"""Callbacks that only show something, and read Lightning's loops for it."""


class Callbacks:
    """The callbacks of a run."""

    def __init__(self, given: Iterable[Any] | Any = ()):
        given = list(given) if isinstance(given, Iterable) else [given]
        self._given = self._checked(given)
        self.all: list[Any] = _ordered(self._given)
        "The callbacks in the order in which they are called."

    def __bool__(self) -> bool:
        return bool(self.all)

    def define(self, hook: str) -> bool:
        """Whether one of the callbacks given to the adapter defines a hook."""
        return any(_defines(callback, hook) for callback in self._given)

    def attach(self, returned: Any) -> None:
        """Add what configure_callbacks returned; it replaces given callbacks of the same class."""
        own = self._checked(list(returned) if isinstance(returned, Sequence) else [returned] if returned else [])
        kept = [one for one in self._given if not any(_replaces(other, one) for other in own)]
        self.all = _ordered([*kept, *own])

    def call(
        self,
        hook: str,
        trainer: Any,
        module: Any,
        *arguments: Any,
        monitoring: bool | None = None,
        writing: bool | None = None,
    ) -> None:
        """Call a hook of every callback. `monitoring` chooses those that monitor a metric, or the others; `writing`
        those that write checkpoints, or the others."""
        for callback in self.all:
            chosen = monitoring is None or is_monitoring(callback) is monitoring
            chosen = chosen and (writing is None or ("Checkpoint" in _class_names(callback)) is writing)
            if chosen and callable(method := getattr(callback, hook, None)) and _defines(callback, hook):
                method(trainer, module, *arguments)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the callbacks that have one, by Lightning's key."""
        states = {_key(callback): callback.state_dict() for callback in self.all if hasattr(callback, "state_dict")}
        return {key: dict(state) for key, state in states.items() if state}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Give each callback its state."""
        for callback in self.all:
            if (state := states.get(_key(callback))) is not None:
                callback.load_state_dict(state)

    @staticmethod
    def _checked(callbacks: list[Any]) -> list[Any]:
        kept = []
        for callback in callbacks:
            names = _class_names(callback)
            for name in names & REFUSED_CALLBACKS.keys():
                raise TaskError(f"The callback {name} rewrites Lightning's loops. {REFUSED_CALLBACKS[name]}")
            for name in names & DROPPED.keys():
                warnings.warn(f"The callback {type(callback).__name__} is not run: {DROPPED[name]}.", stacklevel=5)
            if not names & DROPPED.keys():
                kept.append(callback)
        return kept


def is_monitoring(callback: Any) -> bool:
    """Whether Lightning calls its on_train_epoch_end after the module's: it may watch what the module logs there."""
    return bool(_class_names(callback) & {"EarlyStopping", "Checkpoint"})


def _ordered(callbacks: list[Any]) -> list[Any]:
    return sorted(callbacks, key=lambda callback: "Checkpoint" in _class_names(callback))


def _replaces(other: Any, one: Any) -> bool:
    return issubclass(type(other), type(one)) and type(one).__name__ != "Callback"


def _class_names(callback: Any) -> set[str]:
    """Return the names of Lightning's classes that a callback is one of."""
    return {cls.__name__ for cls in type(callback).__mro__ if cls.__module__.partition(".")[0] in PACKAGES}


def _key(callback: Any) -> str:
    return str(getattr(callback, "state_key", type(callback).__qualname__))


def _defines(callback: Any, hook: str) -> bool:
    """Whether a callback defines a hook itself, rather than Lightning's base class."""
    if hook in vars(callback):
        return True
    kind = next((cls for cls in type(callback).__mro__ if hook in vars(cls)), None)
    is_base = kind is not None and kind.__name__ == "Callback" and kind.__module__.partition(".")[0] in PACKAGES
    return kind is not None and not is_base
