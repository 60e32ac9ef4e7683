"""A little Markdown as HTML: paragraphs, **bold**, `code`, fences. Everything is escaped before anything else."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

FENCE = re.compile(r"^```[^\n]*\n(.*?)(?:^```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
BOLD = re.compile(r"\*\*(?=\S)(.+?)(?<=\S)\*\*")
CODE = re.compile(r"`([^`\n]+)`")


def as_html(text: str) -> str:
    """A text that a run has logged; lines stay lines, since it may be a poem."""
    return "".join(_blocks(html.escape(text, quote=True)))


def _blocks(escaped: str) -> Iterator[str]:
    for i, part in enumerate(FENCE.split(escaped)):
        if i % 2:
            yield f"<pre>{part.rstrip()}</pre>"
            continue
        for block in re.split(r"\n\s*\n", part.strip("\n")):
            if block.lstrip().startswith("|"):  # a table is read better as it was written
                yield f"<pre>{block}</pre>"
            elif block.strip():
                yield f"<p class='t'>{_inline(block)}</p>"


def _inline(escaped: str) -> str:
    """Between pieces of code what is bold; neither reaches into the other, so that tags are never crossed."""
    parts = CODE.split(escaped)
    return "".join(f"<code>{part}</code>" if i % 2 else BOLD.sub(r"<b>\1</b>", part) for i, part in enumerate(parts))
