"""Short tracebacks: the frames of the user's own files, and the call that failed."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from types import FrameType, TracebackType

from forge.errors import ForgeError
from forge.util.frames import folder_of, is_library
from forge.util.text import short_path

FULL = "FORGE_TRACEBACK"
"""With "full" in this variable of the environment every frame is shown."""
NOTEBOOKS = ("<stdin>", "<ipython-input-", "<python-input-")
"""Code that a person typed, in no file."""
INNER = ("pluggy", "torch")
"""Libraries whose frames say nothing to the user, also where they raised the error."""
BETWEEN = ("__torch_function__", "__torch_dispatch__")
"""Functions between a caller and torch's operation."""
ENTRY = re.compile(r'  File "(?P<file>.+?)", line \d+.*\n(?:    .*\n?)*')
"""A frame in the text of a traceback."""


def shows_all() -> bool:
    """Whether the user asked for full tracebacks."""
    return os.environ.get(FULL, "").lower() == "full"


def is_users(file: str) -> bool:
    """Return whether a source file is the user's: neither forge's, nor an installed library's, nor Python's."""
    return file.startswith(NOTEBOOKS) or not (is_library(file) or _is_installed(file))


def is_users_frame(frame: FrameType) -> bool:
    """Like `is_users`; `python -c` runs code without a file."""
    file = frame.f_code.co_filename
    return is_users(file) or (file == "<string>" and frame.f_globals.get("__name__") == "__main__")


def shorten(error: BaseException | None) -> None:
    """Leave the frames of libraries out of an error's traceback, and out of those of its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen and not shows_all():
        seen.add(id(error))
        entries = list(walk(error.__traceback__))
        error.__traceback__ = _joined(_kept(entries, isinstance(error, ForgeError)))
        _shorten_worker(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def shortened_text(text: str) -> str:
    """Leave the frames of libraries out of a traceback that is text; all stay where none is the user's."""
    own = [entry for entry in ENTRY.finditer(text) if is_users(entry["file"])]
    if shows_all() or not own:
        return text
    return ENTRY.sub(lambda entry: entry[0] if is_users(entry["file"]) else "", text)


def as_text(error: BaseException) -> str:
    """Return the traceback with notes and causes, as Python prints it."""
    return "".join(traceback.format_exception(error))


def users_line(error: BaseException) -> str:
    """Return the innermost line of the user's in a traceback, as file:line; "" if there is none."""
    own = [entry for entry in walk(error.__traceback__) if is_users_frame(entry.tb_frame)]
    return f"{short_path(_file(own[-1]))}:{own[-1].tb_lineno}" if own else ""


def walk(trace: TracebackType | None) -> list[TracebackType]:
    """Return the entries of a traceback, outermost first."""
    entries: list[TracebackType] = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    return entries


def _kept(entries: list[TracebackType], is_explained: bool) -> list[TracebackType]:
    """Return the user's frames, and the innermost of another library that is not torch."""
    own = [i for i, entry in enumerate(entries) if is_users_frame(entry.tb_frame)]
    if own:
        behind = [entry for entry in entries[own[-1] + 1 :] if _tells(entry)]
        return [entries[i] for i in own] + behind[-1:]
    if is_explained:
        return entries[-1:]
    forges = [i for i, entry in enumerate(entries) if _file(entry).startswith(folder_of("forge"))]
    if not forges or not _is_inner(_file(entries[-1])):
        return entries  # an error of forge's own, or of a plugin's: every frame counts
    return [entries[forges[-1]], *entries[forges[-1] + 1 :][-1:]]


def _tells(entry: TracebackType) -> bool:
    file, name = _file(entry), entry.tb_frame.f_code.co_name
    return not _is_inner(file) and not file.startswith(("<", _standard())) and name not in BETWEEN


def _is_inner(file: str) -> bool:
    return is_library(file, INNER)


def _joined(entries: list[TracebackType]) -> TracebackType | None:
    joined: TracebackType | None = None
    for entry in reversed(entries):
        joined = TracebackType(joined, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return joined


def _shorten_worker(error: BaseException) -> None:
    """Shorten the traceback that torch puts into the message of an error from a worker of a DataLoader."""
    if len(error.args) == 1 and isinstance(error.args[0], str) and "Original Traceback" in error.args[0]:
        kind, text = type(error.args[0]), shortened_text(error.args[0])
        error.args = (kind(text) if text != error.args[0] else error.args[0],)


def _file(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename


def _standard() -> str:
    return sysconfig.get_path("stdlib") + os.sep


def _is_installed(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    places = tuple(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "purelib", "platlib"))
    return file.startswith(places) or f"{os.sep}site-packages{os.sep}" in file
