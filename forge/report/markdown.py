"""Render logged Markdown as HTML in which nothing is raw, linked or loaded."""

from __future__ import annotations

from markdown import markdown
from markupsafe import Markup

LONGEST = 20_000
"""A longer text is shown unformatted: the time to render hostile text grows faster than its length."""
HIDDEN = {"\ufdd0": "<", "\ufdd1": "&", "\ufdd2": "["}
"""Stand-ins, which no text may hold, for the characters that begin tags, entities, links and images. Markdown never
sees these, so that no version of it can pass HTML or an address through."""


def as_html(text: str) -> Markup:
    """Render Markdown safely: raw HTML, entities, links and images stay visible as text."""
    if len(text) > LONGEST:
        return Markup("<pre>%s</pre>") % text
    hidden = text.translate({ord(shown): stand_in for stand_in, shown in HIDDEN.items()})
    try:
        rendered = markdown(hidden, extensions=["fenced_code", "tables"], output_format="html")
    except RecursionError:  # lists nested too deep
        return Markup("<pre>%s</pre>") % text
    for stand_in, shown in HIDDEN.items():
        rendered = rendered.replace(stand_in, Markup.escape(shown))
    return Markup(f"<div class='text'>{rendered}</div>")
