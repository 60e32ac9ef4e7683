"""Suppress torch's long message about a graph break, and breaks for messages of a library."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forge_plugins import torch_internals as internals

SOURCE = "torch._dynamo.variables.tensor"
"""The logger of the message; a filter sees only records of its own logger."""
NOISE = "Graph break from `Tensor.item()`"


@contextmanager
def without_torchs_account() -> Iterator[None]:
    """Suppress torch's message that `.item()` broke a graph, unless TORCH_LOGS is set."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    source, quiet = logging.getLogger(SOURCE), _Quiet()
    source.addFilter(quiet)
    try:
        yield
    finally:
        source.removeFilter(quiet)


@contextmanager
def without_breaks_for_messages() -> Iterator[None]:
    """Compile across `warning_once` of transformers, which would break the graph between a head and its loss.

    Compiled code does not show such a warning.
    """
    ignored: Any = getattr(internals.dynamo_config, "ignore_logging_functions", None)
    once: Any = getattr(sys.modules.get("transformers.utils.logging"), "warning_once", None)
    if isinstance(ignored, set) and once is not None:
        with internals.dynamo_config.patch(ignore_logging_functions=_Ignored((*ignored, once))):
            yield
    else:
        yield


class _Ignored(set[Any]):
    """Functions that the compiler skips; a copy holds their names, for torch 2.11 writes a copy as JSON."""

    def __deepcopy__(self, memo: dict[int, Any]) -> set[str]:
        return {getattr(function, "__qualname__", repr(function)) for function in self}


class _Quiet(logging.Filter):
    """One object per run, so that removing it keeps another run's."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).lstrip().startswith(NOISE)
