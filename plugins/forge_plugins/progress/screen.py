"""Where it is shown: stderr, and what every way of showing can do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from rich.console import Console

import forge


class View(Protocol):
    """A way to show a Status."""

    def look(self, step: forge.Step) -> float:
        """An update has ended. Show what is due, and return when (on the monotonic clock) to be asked again."""
        ...

    def refresh(self) -> None:
        """Something else has changed."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class Screen:
    """stderr, until it fails for the first time; then nothing more is written, because a run is worth more."""

    def __init__(self) -> None:
        self.stream, self.gone = sys.stderr, False

    def write(self, text: str) -> int:
        self._try(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda: self.stream.flush())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _try(self, action: Callable[[], Any]) -> None:
        if not self.gone:
            try:
                action()
            except (OSError, ValueError, AttributeError):  # it fails, somebody has closed it, or there is none
                self.gone = True


def on_terminal() -> bool:
    """Whether stderr is a terminal that can redraw; a forced colour does not make a file one."""
    return is_terminal(sys.stderr) and not Console(stderr=True).is_dumb_terminal


def is_terminal(stream: Any) -> bool:
    """Whether somebody looks at this stream; there may be none, and it may be closed."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False
