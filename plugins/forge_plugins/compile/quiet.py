"""Quiet: what torch prints of a graph break at length is left to the report, which says it in a line."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

SOURCE = "torch._dynamo.variables.tensor"
"""The logger of it; a filter is asked about the records of its own logger only."""
NOISE = "Graph break from `Tensor.item()`"


@contextmanager
def without_torchs_account() -> Iterator[None]:
    """Meanwhile torch keeps to itself that `.item()` broke a graph, unless TORCH_LOGS says what it is to print."""
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
    """One object for each run: removing it leaves another run's in place."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).lstrip().startswith(NOISE)
