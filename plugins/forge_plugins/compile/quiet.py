"""Suppress torch's long message about a graph break; the report has one line for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

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


class _Quiet(logging.Filter):
    """One object per run, so that removing it keeps another run's."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).lstrip().startswith(NOISE)
