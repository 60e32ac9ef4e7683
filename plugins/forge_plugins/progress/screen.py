"""stderr as the screen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console


class Screen:
    """stderr, until its first failure; then nothing more is written, since a run is worth more."""

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
            except (OSError, ValueError, AttributeError):  # failed, closed, or missing
                self.gone = True


def on_terminal() -> bool:
    """Whether stderr is a terminal that can redraw; a forced colour does not make a file one."""
    return is_terminal(sys.stderr) and not Console(stderr=True).is_dumb_terminal


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; it may be None or closed."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False
