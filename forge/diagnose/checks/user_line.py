"""Errors and warnings that name the user's own line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

from forge.errors import TaskError
from forge.util.frames import libraries

_said: ContextVar[set[str] | None] = ContextVar("said", default=None)


class FindingWarning(UserWarning):
    """A warning of a fit that is a finding."""

    def __init__(self, message: str, finding: str = ""):
        super().__init__(message)
        self.finding = finding


@contextmanager
def saying(names: set[str]) -> Iterator[None]:
    """Warn of each finding once, and of none of these; the names are added to."""
    token = _said.set(names)
    try:
        yield
    finally:
        _said.reset(token)


def _is_said(finding: str) -> bool:
    said = _said.get()
    if not finding or said is None:
        return False
    known = finding in said
    said.add(finding)
    return known


def refuse(message: str, finding: str = "") -> None:
    """Raise a TaskError that begins with the user's current line; `finding` is the name of what was found."""
    frame = users_frame()
    error = TaskError(f"{frame.f_code.co_filename}:{frame.f_lineno}: {message}" if frame is not None else message)
    error.finding = finding
    raise error


def warn(message: str, finding: str = "") -> None:
    """Warn at the user's current line."""
    if _is_said(finding):
        return
    frame = users_frame()
    given = FindingWarning(message, finding)
    if frame is None:
        warnings.warn(given, stacklevel=2)
        return
    about = frame.f_globals
    seen = about.setdefault("__warningregistry__", {})
    warnings.warn_explicit(given, FindingWarning, frame.f_code.co_filename, frame.f_lineno, about.get("__name__"), seen)


def warn_of(function: Any, message: str, finding: str = "") -> None:
    """Warn at the first line of a user's function."""
    if _is_said(finding):
        return
    code = getattr(function, "__code__", None)
    given = FindingWarning(message, finding)
    if code is None:
        warnings.warn(given, stacklevel=3)
    else:
        warnings.warn_explicit(given, FindingWarning, code.co_filename, code.co_firstlineno)


def users_frame() -> FrameType | None:
    """Return the innermost frame outside torch and forge."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in libraries():
            return frame
        frame = frame.f_back
    return None
