"""Tables as text and as Markdown: the first row is the heading; some columns are text, those after them numbers."""

from __future__ import annotations

from collections.abc import Sequence

Rows = Sequence[Sequence[str]]


def aligned(rows: Rows, texts: int = 1) -> list[str]:
    """Return lines with columns of equal width, text at their left and numbers at their right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ((*map(str.ljust, row[:texts], widths), *map(str.rjust, row[texts:], widths[texts:])) for row in rows)
    return ["  ".join(line).rstrip() for line in lines]


def piped(rows: Rows, texts: int = 1) -> list[str]:
    """Return the lines of a Markdown table."""
    heading, *others = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    return [heading, "|" + "---|" * texts + "---:|" * (len(rows[0]) - texts), *others]
