"""Suppress torch's long message about a graph break, and breaks for messages of a library."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SOURCE = "torch._dynamo.variables.tensor"
"""The logger of the message; a filter sees only records of its own logger."""
ONCE = ("warning_once", "info_once")
"""Functions of transformers that log a message once."""
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
    """Compile across the one-time warnings of transformers, which would break the graph between a head and its loss.

    They are not shown from compiled code; the first eager pass shows them.
    """
    import torch._dynamo

    ignored: Any = getattr(torch._dynamo.config, "ignore_logging_functions", None)
    library: Any = sys.modules.get("transformers.utils.logging")
    found = [getattr(library, name, None) for name in ONCE] if isinstance(ignored, set) else []
    added = {function for function in found if function is not None and function not in ignored}
    if added:
        ignored.update(added)
    try:
        yield
    finally:
        if added:
            ignored.difference_update(added)


class _Quiet(logging.Filter):
    """One object per run, so that removing it keeps another run's."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).lstrip().startswith(NOISE)
