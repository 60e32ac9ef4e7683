"""Refusal of a task that cannot be planned from shapes alone, with the line that needs values."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forge import registry
from forge.errors import ForgeError, TaskError
from forge.torch_internals import fake_tensors
from forge.util.frames import is_library

READS = (fake_tensors.DataDependentOutputException, fake_tensors.DynamicOutputShapeException)
UNKNOWN = (
    fake_tensors.UnsupportedFakeTensorException,
    fake_tensors.UnsupportedOperatorException,
    NotImplementedError,
)


@contextmanager
def explained() -> Iterator[None]:
    """Turn any error of a dry run into a TaskError that names the line."""
    try:
        yield
    except ForgeError:
        raise
    except Exception as error:
        where, code = culprit(error)
        at = f"{where} ({code})" if code else where
        if isinstance(error, READS):
            why = "reads a value of a tensor, or makes a shape that depends on values"
        elif isinstance(error, UNKNOWN):
            why = f"runs an operation that needs values ({_first_line(error)})"
        elif any(word in str(error) for word in ("FakeTensor", "data pointer", "tensor subclass", "numpy")):
            why = f"needs a tensor's values ({_first_line(error)})"
        else:
            why = f"failed in a dry run without values: {type(error).__name__}: {_first_line(error)}"
        measured = registry.advice("measure", ", with {},")
        raise TaskError(
            f"{at} {why}. It cannot be planned without running it. Measure it on the device instead{measured} or find "
            "the largest batch with forge tune."
        ) from error


def culprit(error: BaseException) -> tuple[str, str]:
    """Return the innermost line outside torch and forge as "file:line", and its code."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [place for place in places if not is_library(place[0])]
    own = own or [place for place in places if not is_library(place[0], ("forge", "torch"))]  # a built-in plugin
    if not own:
        return "The task", ""
    file, line = own[-1]
    return f"{Path(file).name}:{line}", linecache.getline(file, line).strip()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")[:200]
