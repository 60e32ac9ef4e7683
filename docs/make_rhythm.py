"""Write docs/pictures/rhythm.svg: every hook in its place, drawn from the docstring of forge/contract/hooks.py.

    python docs/make_rhythm.py

tests/docs/test_hooks.py fails when the picture is out of date.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from forge.contract import hooks
from forge.contract.stack import ACTIONS

PICTURE = Path(__file__).parent / "pictures" / "rhythm.svg"
WIDTH, ROW, GAP, INDENT = 940, 26, 7, 22
LEFT, NOTES = 22, 330
"""Left edges of the outermost boxes, and of the notes."""
STYLE = """
  .paper { fill: #ffffff; }
  text { font: 13px ui-sans-serif, system-ui, sans-serif; fill: #1f2933; }
  .name { font: 600 13px ui-monospace, monospace; }
  .note { fill: #52606d; }
  .group { fill: none; stroke: #9aa5b1; stroke-width: 1.2; }
  .loop { stroke-dasharray: 5 4; }
  .label { font-style: italic; fill: #52606d; }
  .action { fill: #d9e8fb; stroke: #2f6fbf; }
  .event { fill: #fdebd3; stroke: #c9771a; }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #1b1f27; }
    text { fill: #e4e7eb; }
    .note, .label { fill: #a3b0bd; }
    .group { stroke: #6b7885; }
    .action { fill: #1d3a5f; stroke: #6ea8ec; }
    .event { fill: #4a3415; stroke: #e8a850; }
  }
"""


@dataclass(slots=True)
class Node:
    """A line of the rhythm: a hook or a heading, with the lines below it."""

    text: str
    note: str = ""
    below: list[Node] = field(default_factory=list)

    @property
    def is_hook(self) -> bool:
        return self.text.startswith("forge_")


def rhythm() -> list[Node]:
    """Return the rhythm as a tree, by the indentation of the docstring."""
    text = (inspect.getdoc(hooks) or "").partition("in its place::\n\n")[2]
    top: list[Node] = []
    around: list[tuple[int, list[Node]]] = [(-1, top)]
    for line in text.partition("\n\n")[0].splitlines():
        depth, words = len(line) - len(line.lstrip()), line.strip()
        if "->" in words:
            names = [part.strip() for part in words.split("->") if part.strip()]
            once = around[0][1][0] if top else Node("once, for every verb")
            if not top:
                top.append(once)
            once.below += [Node(name.split()[0], name.partition(" (")[2].rstrip(")")) for name in names]
            continue
        while around[-1][0] >= depth:
            around.pop()
        for node in _nodes(words):
            around[-1][1].append(node)
            if not node.is_hook or node.text == words.split()[0]:
                around.append((depth, node.below))
    return top


def _nodes(words: str) -> Iterator[Node]:
    """Yield the hooks of a line, each with its note; a line that ends in a colon is a heading."""
    if words.endswith(":"):
        yield Node(words.removesuffix(":"))
    elif words.startswith("forge_"):
        name, _, note = words.partition(" ")
        yield Node(name, note.strip())
    else:  # on error: forge_exception      always: forge_end
        for when, name in re.findall(r"(\w[\w ]*?): (forge_\w+)", words):
            yield Node(name, when)


def what(node: Node) -> str:
    """Return the note of a hook; if that is short, with the first sentence of the hook's docstring."""
    text = " ".join((inspect.getdoc(getattr(hooks, node.text)) or "").split()).partition(" ")[2]
    condition, *more = re.split(r"(?<=[.;]) ", text)
    if condition[0].islower() and ":" not in condition and more:  # a condition alone says too little
        condition = f"{condition.rstrip('.;')}: {more[0][0].lower()}{more[0][1:]}"
    sentence = re.sub(r" \([^)]*\)", "", condition).rstrip(".;")
    if (node.below and not node.note) or len(node.note) > 12:
        text = node.note or sentence
    elif node.note in ("on error", "always"):
        text = f"{node.note}: {sentence[0].lower()}{sentence[1:]}"
    else:
        text = sentence
    return (text[0].upper() + text[1:]).replace("forge_", "").replace("`", "")


def drawn(nodes: list[Node], y: int, depth: int) -> tuple[list[str], int]:
    """Return the lines of SVG for these nodes, from `y` down, and the `y` where they end."""
    x, out = LEFT + depth * INDENT, list[str]()
    for node in nodes:
        if node.is_hook:
            kind = "action" if node.text in ACTIONS else "event"
            name = node.text.removeprefix("forge_")
            out.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{len(name) * 8 + 22}" height="{ROW}" rx="6"/>')
            out.append(f'<text class="name" x="{x + 11}" y="{y + 18}">{escape(name)}</text>')
            out.append(f'<text class="note" x="{NOTES}" y="{y + 18}">{escape(what(node))}</text>')
        else:
            out.append(f'<text class="label" x="{x}" y="{y + 18}">{escape(node.text)}</text>')
        y += ROW + GAP
        if node.below:
            top = y - GAP // 2
            inner, y = drawn(node.below, y + 2, depth + 1)
            kind = "group" if node.is_hook or node.text.startswith("once") else "group loop"
            size = f'width="{WIDTH - LEFT - x - 8 - depth * 6}" height="{y - top - 2}"'
            frame = f'x="{x + INDENT // 2 - 4}" y="{top}" {size}'
            out += [f'<rect class="{kind}" {frame} rx="8"/>', *inner]
            y += GAP
    return out, y


def svg() -> str:
    """Return the whole picture."""
    body, height = drawn(rhythm(), 56, 0)
    legend = [
        '<rect class="action" x="22" y="16" width="60" height="22" rx="6"/>',
        '<text x="32" y="31">action</text>',
        '<text class="note" x="92" y="31">runs once: own it, or wrap it</text>',
        f'<rect class="event" x="{NOTES}" y="16" width="56" height="22" rx="6"/>',
        f'<text x="{NOTES + 10}" y="31">event</text>',
        f'<text class="note" x="{NOTES + 66}" y="31">calls every plugin, in the order of the stack</text>',
    ]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height + 8}" width="{WIDTH}" '
        f'height="{height + 8}" role="img">',
        "<title>The rhythm of a run, with every hook in its place</title>",
        f"<style>{STYLE}</style>",
        '<rect class="paper" width="100%" height="100%" rx="10"/>',
        *legend,
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(svg(), encoding="utf-8")
