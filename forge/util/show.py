"""Output of the command line: one console, plain tables, errors on stderr; and the parser of a verb."""

from __future__ import annotations

import logging
import os
import re
import sys
import textwrap
import warnings
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from forge.util import text as places
from forge.util.text import command as command
from forge.util.text import visible


def new_parser(verb: str, description: str, epilog: str = "") -> ArgumentParser:
    """Return the parser of a verb; examples go into the epilog."""
    return _VerbParser(prog=f"forge {verb}", description=description, epilog=epilog, formatter_class=_Help)


class _Help(RawDescriptionHelpFormatter):
    """Fills paragraphs to the width of the terminal. An indented line, which may be copied, stays whole; what is said
    behind it goes below where there is no room."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for is_prose, block in groupby(text.splitlines(), lambda line: line[:1].strip() != ""):
            if is_prose:
                lines.append(wrapped(" ".join(block), width))
                continue
            for line in block:
                whole, *said = re.split(r"(?<=\S) {2,}", line, maxsplit=1) if len(line) > width else [line]
                lines += [whole, *(wrapped(f"{'':6}{text}", width) for text in said)]
        return "".join(f"{indent}{line}\n" for line in lines)


class _VerbParser(ArgumentParser):
    """Says in one line which arguments a verb misses, and what they are."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required: "):
            missing = message.partition(": ")[2].split(", ")
            names = [("/".join(a.option_strings) or a.metavar or a.dest, a) for a in self._actions if a.nargs != "*"]
            wants = "; ".join(f"{name}, {action.help}" for name, action in names if name in missing)
            message = f"it wants {wants}. `{self.prog} --help` shows all options"
        self.exit(2, f"{self.prog}: {message}.\n".replace("..", "."))


def console(stderr: bool = False) -> Console:
    """Return a console on the current stdout or stderr; 120 columns wide in a pipe or file.

    It prints text as it is: names from outside are no markup, and their control characters are visible.
    """
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else 120
    made = Console(file=stream, highlight=False, markup=False, emoji=False, width=width)
    made.push_render_hook(_VisibleText())
    return made


class _VisibleText(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Visible(renderable) for renderable in renderables]


class _Visible:
    """Render another object with the control characters of its text visible; styles and controls of rich stay."""

    def __init__(self, renderable: ConsoleRenderable):
        self.renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self.renderable, options):
            yield Segment(text if control else visible(text), style, control)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.renderable)


def table(*columns: str, wrap: Sequence[str] = ()) -> Table:
    """Return a table without borders; only the columns in `wrap` fold when space is short, or any if there are none."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        grid.add_column(column, no_wrap=bool(wrap) and column not in wrap, overflow="fold")
    return grid


def wrapped(text: str, columns: int, hanging: int = 0) -> str:
    """Fold lines between words, `hanging` spaces before what follows. What stands in backticks stays whole."""
    kept = re.sub(r"`[^`\n]*`", lambda match: match[0].replace(" ", "\0"), text)
    folded = [
        textwrap.fill(
            line,
            max(columns, 40),
            subsequent_indent=" " * (hanging or len(line) - len(line.lstrip())),
            break_long_words=False,
            break_on_hyphens=False,
        )
        if len(line) > columns
        else line
        for line in kept.split("\n")
    ]
    return "\n".join(folded).replace("\0", " ")


def error(text: str) -> None:
    """Print one message on stderr."""
    _print(text, "", ("error: ", "bold red"))


def warning(text: str) -> None:
    _print(text, "", ("warning: ", "bold yellow"))


def message(text: str, style: str = "") -> None:
    """Print a line on stderr that is neither result nor error."""
    _print(text, style)


def _print(text: str, style: str, title: tuple[str, str] = ("", "")) -> None:
    """Print on stderr, or nothing if it is gone (Ctrl-C ends `| tee log` too): the exit code must still be right."""
    with suppress(OSError, SystemExit):  # rich leaves by SystemExit when a pipe breaks
        there = console(stderr=True)
        said = title[0] + text
        if there.is_terminal:  # elsewhere a message is one line, for grep
            said = wrapped(said, there.width)
        there.print(Text.assemble(title, (said[len(title[0]) :], style)), soft_wrap=True)


def near(path: Path) -> Path:
    """Return the short form of a path."""
    return Path(places.short_path(path))


@contextmanager
def plain_messages() -> Iterator[None]:
    """Print forge's log, every UserWarning and every finding as one line each, without its source line."""
    logger, handler = logging.getLogger("forge"), _OneLine()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            other = warnings.showwarning
            warnings.showwarning = lambda text, kind, *rest: (
                warning(str(text)) if kind is UserWarning or hasattr(text, "finding") else other(text, kind, *rest)
            )
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _OneLine(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            warning(record.getMessage())
        else:
            message(record.getMessage(), "dim")


def heading(text: str) -> Text:
    return Text(text, "bold")


def metrics(values: Mapping[str, Any]) -> Table:
    """Return a table of the numbers among metrics, by name."""
    grid = table("metric", "value")
    for name, value in sorted(values.items()):
        if isinstance(value, (int, float)):
            grid.add_row(name, number(value))
    return grid


def number(value: float) -> str:
    """Format an integer in full, another number with five significant digits."""
    return str(value) if isinstance(value, int) else f"{value:.5g}"
