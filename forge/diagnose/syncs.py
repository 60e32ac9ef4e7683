"""Find where the host waits for the CUDA device."""

from __future__ import annotations

import functools
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from forge.util.frames import is_library
from forge.util.text import short_path

SYNC = "called a synchronizing CUDA operation"
"""Part of the warning of torch's sync debug mode."""
ERROR = 2
"""torch's number for the mode in which a wait is an error."""


class Listener:
    """Listens to torch's sync debug mode. torch warns from inside each synchronizing call, so the Python stack still
    shows the call: `hear` gets the innermost frame."""

    def __init__(self, hear: Callable[[FrameType], None]):
        self._hear = hear
        self.listening = False
        self._before: tuple[int, Callable[..., Any]] | None = None
        self._filter: Any = None
        self._synchronize: tuple[Any, Any] | None = None
        "torch.cuda.synchronize, for which torch does not warn, and its replacement."

    def start(self) -> None:
        """Make torch warn of every wait, and listen. Does nothing where a wait is an error already."""
        mode = torch.cuda.get_sync_debug_mode()
        if mode == ERROR or self.listening:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once that the mode itself is a prototype
            torch.cuda.set_sync_debug_mode("warn")
        self.listen(mode)

    def listen(self, mode: int = 0) -> None:
        """Receive torch's warnings. Other warnings, and all of them if another Listener is active, are passed on."""
        self._before, self.listening = (mode, warnings.showwarning), True
        warnings.filterwarnings("always", message=SYNC, category=UserWarning)
        self._filter = warnings.filters[0]
        warnings.showwarning = self._show
        self._synchronize = (torch.cuda.synchronize, self._heard(torch.cuda.synchronize))
        torch.cuda.synchronize = self._synchronize[1]

    def _heard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._hear(sys._getframe(1))
            return function(*args, **kwargs)

        return call

    def stop(self) -> None:
        """Restore warnings, torch.cuda.synchronize and the debug mode."""
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

    def _show(self, message: Warning | str, *where: Any, **more: Any) -> None:
        """Take the place of `warnings.showwarning`."""
        heard = SYNC in str(message)
        if heard:
            self._hear(sys._getframe(1))
        show = None if self._before is None else self._before[1]
        if show is not None and (not heard or isinstance(getattr(show, "__self__", None), Listener)):
            show(message, *where, **more)


@contextmanager
def reads_of_the_device() -> Iterator[list[str]]:
    """Collect the lines where the host waits for the device inside the `with`: `model.py:12 (loss.item())`."""
    found: list[str] = []
    listener = Listener(lambda frame: found.append(own_line(traceback.extract_stack(frame))))
    listener.start()
    try:
        yield found
    finally:
        listener.stop()


def own_line(frames: traceback.StackSummary) -> str:
    """The innermost line of the user's own, as `file:line (code)`; else the innermost of all."""
    own = [frame for frame in frames if not is_library(frame.filename) and frame.filename != warnings.__file__]
    frame = (own or list(frames))[-1]
    return f"{short_path(frame.filename)}:{frame.lineno} ({frame.line})"
