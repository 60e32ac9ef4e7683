"""The stacks of threads, as lines that name the user's code and forge's."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType

import forge

FORGE = str(Path(forge.__file__).parent)
STDLIB = sysconfig.get_path("stdlib")


def place() -> str:
    """Return the main thread's innermost frame that is neither torch's nor Python's, as one line."""
    # the stack is read at once, because that thread runs on: a frame of Python 3.11 must not be read when it has ended
    frames = walked(sys._current_frames().get(threading.main_thread().ident or 0))
    return next((_line(frame) for frame in reversed(frames) if not _is_library(frame)), "")


def lines(frame: FrameType | None) -> list[str]:
    """Return one line per frame, outermost first; of consecutive frames of torch or Python only the last."""
    frames = walked(frame)
    found = []
    for here, following in zip(frames, [*frames[1:], None], strict=True):
        if following is None or not (_is_library(here) and _is_library(following)):
            found.append(_line(here))
    return found


def walked(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of a stack, the outermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _is_library(frame: FrameType) -> bool:
    """Whether a frame is torch's or Python's; forge's own are shown, since they locate the place in a run."""
    path = frame.f_code.co_filename
    return not path.startswith(FORGE) and ("site-packages" in path or path.startswith((STDLIB, "<")))


def _line(frame: FrameType) -> str:
    """ "forge/engine/default_actions.py:120 forge_micro_step: loss.backward()"."""
    path = frame.f_code.co_filename
    number: int = frame.f_lineno or frame.f_code.co_firstlineno  # None where an instruction belongs to no line
    source = linecache.getline(path, number).strip()
    if path.startswith(FORGE):
        path = f"forge{path.removeprefix(FORGE)}"
    path = path.rpartition("site-packages/")[2]
    return f"{path}:{number} {frame.f_code.co_name}{': ' + source if source else ''}"
