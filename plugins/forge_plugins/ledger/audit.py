"""Audit: who made the host wait for the CUDA device, and on which line."""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TextIO

import torch
from pluggy import HookImpl
from torch.optim import Optimizer

import forge
from forge.failure import NAMED_METHODS
from forge.places import near
from forge.plugin import Callback
from forge.stack import CORE, TASK
from forge.task import TaskModule

SYNC = "called a synchronizing CUDA operation"
"""What torch's sync debug mode says."""
EXPECTED_HOOKS = {"forge_state_dict": "saving", "forge_end": "ending"}
EXPECTED_IN_TRAINER = {
    "_log": "logging",
    "_deliver_log": "logging",
    "_publish": "logging",
    "_validate": "validating",
    "_save": "saving",
    "_finish": "saving",
    "_rewind": "rewinding",
}
"""Where a run reads the device by design: once per log interval, validation or checkpoint, not in the updates."""
KERNEL, TORCH = str(Path(forge.__file__).parent), str(Path(torch.__file__).parent)
INSIDE = (TORCH, warnings.__file__, __file__, "<")
"""Files that are never the line to look at."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sync came from."""

    who: str
    file: str
    line: int
    expected: str = ""
    "What the run was doing that reads the device by design, if it was."


class Audit:
    """Listens to torch's sync debug mode: every wait is put down to whoever's code was running.

    torch warns of each synchronizing call from inside that call, so the Python stack still shows where it is.
    """

    def __init__(self) -> None:
        self.found: Counter[Place] = Counter()
        self.listening = False
        self._owners: dict[CodeType, list[tuple[Any, str, str]]] = {}
        self._before: tuple[int, Callable[..., Any]] | None = None
        self._filter: Any = None
        self._synchronize: tuple[Any, Any] | None = None
        "torch.cuda.synchronize, of which torch does not warn, and what is in its place."

    def know(self, hook: str, impl: HookImpl) -> None:
        """Remember whose code a hook's implementation is."""
        function = impl.plugin.function if isinstance(impl.plugin, Callback) else impl.function
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is not None and impl.plugin_name != CORE:
            self._owners.setdefault(code, []).append((impl.plugin, impl.plugin_name, hook))

    # -- listening ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Have torch warn of every wait, and hear it; what listens already, or makes it an error, is left alone."""
        mode = torch.cuda.get_sync_debug_mode()
        if mode == 0 and not self.listening:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns once that the mode itself is young
                torch.cuda.set_sync_debug_mode("warn")
            self.listen(mode)

    def listen(self, mode: int = 0) -> None:
        """Hear torch's warnings; others go where they went."""
        self._before, self.listening = (mode, warnings.showwarning), True
        warnings.filterwarnings("always", message=SYNC, category=UserWarning)
        self._filter = warnings.filters[0]
        warnings.showwarning = self._show
        self._synchronize = (torch.cuda.synchronize, self._heard(torch.cuda.synchronize))
        torch.cuda.synchronize = self._synchronize[1]

    def _heard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.found[self.place(sys._getframe(1))] += 1
            return function(*args, **kwargs)

        return call

    def stop(self) -> None:
        """Put everything back."""
        if self._before is None:
            return
        (mode, show), self._before, self.listening = self._before, None, False
        if warnings.showwarning == self._show:
            warnings.showwarning = show
        if self._synchronize is not None and torch.cuda.synchronize is self._synchronize[1]:
            torch.cuda.synchronize = self._synchronize[0]
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # pyright: ignore[reportAttributeAccessIssue]
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode(mode)

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if SYNC in str(message):
            self.found[self.place(sys._getframe(1))] += 1
        elif self._before is not None:
            self._before[1](message, category, filename, lineno, file, line)

    # -- whose it is --------------------------------------------------------------------------------------------------

    def place(self, innermost: FrameType) -> Place:
        """The line outside of torch that waits, and whose hook or method it runs in."""
        at: tuple[str, int] | None = None
        who = expected = ""
        frame: FrameType | None = innermost
        while frame is not None:
            code = frame.f_code
            if at is None and not code.co_filename.startswith(INSIDE):
                at = (code.co_filename, frame.f_lineno)
            found, reason = self._read(frame)
            who, expected = who or found, expected or reason
            frame = frame.f_back
        if not who:
            # autograd runs backward passes of a device in a thread of its own, where no hook is on the stack
            who = "forge itself" if threading.current_thread() is threading.main_thread() else "the backward pass"
        return Place(who, *(at or ("torch", 0)), expected)

    def _read(self, frame: FrameType) -> tuple[str, str]:
        """(who, what is expected) as far as one frame tells."""
        code = frame.f_code
        for plugin, name, hook in self._owners.get(code, ()):
            if isinstance(plugin, Callback) or frame.f_locals.get("self", plugin) is plugin:
                who = f"the task in {hook}" if name == TASK else f"plugin {name!r} in {hook}"
                return who, EXPECTED_HOOKS.get(hook, "")
        if not code.co_varnames or code.co_varnames[0] != "self":
            return "", ""
        me = frame.f_locals.get("self")
        if isinstance(me, TaskModule) and code.co_name in NAMED_METHODS:
            return f"the task's {code.co_name}", ""
        if isinstance(me, Optimizer) and code.co_name == "step":
            return f"the optimizer {type(me).__name__}", ""
        if isinstance(me, forge.Trainer):
            return "", EXPECTED_IN_TRAINER.get(code.co_name, "")
        if code.co_filename.startswith(KERNEL) and code.co_name == "epoch":
            return "the data loader", ""
        return "", ""

    # -- what was found -----------------------------------------------------------------------------------------------

    def unexpected(self) -> int:
        """Waits so far that the run was not designed to have."""
        return sum(count for place, count in self.found.items() if not place.expected)

    def rows(self, updates: int) -> list[dict[str, Any]]:
        """Every place as plain data, the most frequent first."""
        return [
            {
                "who": place.who,
                "file": near(place.file),
                "line": place.line,
                "code": linecache.getline(place.file, place.line).strip(),
                "count": count,
                "per_update": count / max(updates, 1),
                "expected": place.expected,
            }
            for place, count in self.found.most_common()
        ]
