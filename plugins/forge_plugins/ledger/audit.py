"""Attribute waits of the host for the CUDA device to plugins and lines."""

from __future__ import annotations

import inspect
import linecache
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from pluggy import HookImpl
from torch.optim import Optimizer

import forge
from forge.contract.plugin import Callback
from forge.contract.stack import CORE, TASK
from forge.contract.task import TaskModule
from forge.diagnose import syncs as _syncs
from forge.diagnose.explain import NAMED_METHODS
from forge.diagnose.syncs import Listener
from forge.metrics.means import Means, PendingMeans
from forge.optim.optimizers import Optimizers
from forge.snapshot.capture import capture
from forge.snapshot.finite import note_start
from forge.snapshot.restore import load_for, restore
from forge.util.frames import folder_of, is_library
from forge.util.text import short_path

EXPECTED_HOOKS = {
    "forge_evaluate": "validating",
    "forge_state_dict": "saving",
    "forge_save": "saving",
    "forge_export": "saving",
    "forge_end": "ending",
}
EXPECTED_FUNCTIONS: dict[Callable[..., Any], str] = {
    Means.read: "logging",
    PendingMeans.result: "logging",
    forge.Run.log_metrics: "logging",
    Optimizers.after_validation: "validating",
    capture: "saving",
    note_start: "starting",
    load_for: "rewinding",
    restore: "rewinding",
}
"""Where a run reads the device by design: once per log interval, validation or checkpoint, not in the updates."""
LISTENING = (warnings.__file__, __file__, _syncs.__file__)
"""Files through which a sync is heard."""


@dataclass(frozen=True, slots=True)
class SyncPlace:
    """The origin of a sync."""

    who: str
    file: str
    line: int
    expected: str = ""
    "The activity that reads the device by design, if any."


class Audit(Listener):
    """Attributes every wait for the device to the code that was running."""

    def __init__(self) -> None:
        super().__init__(lambda frame: self.found.update([self.place(frame)]))
        self.found: Counter[SyncPlace] = Counter()
        self._owners: dict[CodeType, list[tuple[Any, str, str]]] = {}
        self._expected = {function.__code__: reason for function, reason in EXPECTED_FUNCTIONS.items()}

    def know(self, hook: str, impl: HookImpl) -> None:
        """Register the owner of a hook implementation's code."""
        function = impl.plugin.function if isinstance(impl.plugin, Callback) else impl.function
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is not None and impl.plugin_name == CORE:
            self._expected[code] = EXPECTED_HOOKS.get(hook, "")
        elif code is not None:
            self._owners.setdefault(code, []).append((impl.plugin, impl.plugin_name, hook))

    def start(self) -> None:
        """Make torch warn of every wait, and listen. Does nothing if the debug mode is set already."""
        if torch.cuda.get_sync_debug_mode() == 0:
            super().start()

    # -- attribution -------------------------------------------------------------------------------------------------

    def place(self, innermost: FrameType) -> SyncPlace:
        """Return the line outside of torch that waits, and the hook or method that it runs in."""
        at: tuple[str, int] | None = None
        who = expected = ""
        frame: FrameType | None = innermost
        while frame is not None:
            code = frame.f_code
            if at is None and code.co_filename not in LISTENING and not is_library(code.co_filename, ("torch",)):
                at = (code.co_filename, frame.f_lineno)
            found, reason = self._read(frame)
            who, expected = who or found, expected or reason
            frame = frame.f_back
        if not who:
            # autograd runs the backward of a device in its own thread, without a hook on the stack
            who = "forge itself" if threading.current_thread() is threading.main_thread() else "the backward pass"
        return SyncPlace(who, *(at or ("torch", 0)), expected)

    def _read(self, frame: FrameType) -> tuple[str, str]:
        """Return (who, expected activity) as far as this frame shows."""
        code = frame.f_code
        for plugin, name, hook in self._owners.get(code, ()):
            if isinstance(plugin, Callback) or frame.f_locals.get("self", plugin) is plugin:
                who = f"the task in {hook}" if name == TASK else f"plugin {name!r} in {hook}"
                return who, EXPECTED_HOOKS.get(hook, "")
        if code in self._expected:
            return "", self._expected[code]
        if not code.co_varnames or code.co_varnames[0] != "self":
            return "", ""
        me = frame.f_locals.get("self")
        if isinstance(me, TaskModule) and code.co_name in NAMED_METHODS:
            return f"the task's {code.co_name}", ""
        if isinstance(me, Optimizer) and code.co_name == "step":
            return f"the optimizer {type(me).__name__}", ""
        if code.co_filename.startswith(folder_of("forge")) and code.co_name == "epoch":
            return "the data loader", ""
        return "", ""

    # -- results ------------------------------------------------------------------------------------------------------

    def unexpected(self) -> int:
        """Return the number of unexpected waits so far."""
        return sum(count for place, count in self.found.items() if not place.expected)

    def rows(self, updates: int) -> list[dict[str, Any]]:
        """Return every place as plain data, the most frequent first."""
        return [
            {
                "who": place.who,
                "file": short_path(place.file),
                "line": place.line,
                "code": linecache.getline(place.file, place.line).strip(),
                "count": count,
                "per_update": count / max(updates, 1),
                "expected": place.expected,
            }
            for place, count in self.found.most_common()
        ]
