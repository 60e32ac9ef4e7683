"""Write docs/cli.md: every verb of the command line with everything it takes, from the parsers themselves.

    python docs/make_cli.py

tests/docs/test_pages.py says so when the page is not what the parsers say any more.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from forge.cli import module_of, target
from forge.cli import verbs as all_verbs

PAGE = Path(__file__).parent / "cli.md"
INTRODUCTION = """\
# Command line

Every verb, and everything it takes. `forge VERB --help` prints the same. What they are for, in the order in which one
meets them: [recipes and the command line](recipes-and-cli.md)."""
COMMON = """\
## RECIPE and what goes with it

Every verb that works on a recipe takes these:"""
EXIT_CODES = """\
## Exit codes

| code | meaning |
|---|---|
| 0 | well |
| 1 | a crash, with its traceback |
| 2 | a mistake that the message explains |
| 85 | a signal after which the run can be resumed: [surviving](surviving.md) |"""


def page() -> str:
    """The whole page."""
    verbs = [f"| [`forge {verb}`](#forge-{verb}) | {text} |" for verb, text in all_verbs().items()]
    overview = "\n".join(["| verb | what it does |", "|---|---|", *verbs])
    parts = [INTRODUCTION, overview, COMMON, table(common()), *map(section, all_verbs()), EXIT_CODES]
    return "\n\n".join(parts) + "\n"


def common() -> list[argparse.Action]:
    """The arguments of every verb that works on a recipe."""
    parser = argparse.ArgumentParser(add_help=False)
    target.add_arguments(parser)
    return parser._actions


def table(actions: list[argparse.Action]) -> str:
    rows = [f"| {name(action)} | {what(action)} |" for action in actions if not is_verbs(action)]
    return "\n".join(["| argument | what it is |", "|---|---|", *rows])


def section(verb: str) -> str:
    """One verb: what it does, how it is called, its arguments and options, examples."""
    parser = module_of(verb).parser()
    return "\n\n".join([f"## forge {verb}", *described(parser)])


def described(parser: argparse.ArgumentParser, title: str = "") -> Iterator[str]:
    """A parser as Markdown; the parsers of its own verbs come after it."""
    if title:
        yield title
    yield escaped(parser.description or "")
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    yield f"```text\n{usage(parser, shown)}\n```"
    known = {(action.dest, action.help) for action in common()}
    own = [action for action in shown if (action.dest, action.help) not in known and not is_verbs(action)]
    if len(own) + len(known) <= len(shown):
        yield "Takes [RECIPE and what goes with it](#recipe-and-what-goes-with-it)" + (", and:" if own else ".")
    if own:
        yield table(own)
    if parser.epilog:
        heading, _, lines = parser.epilog.strip().partition("\n")
        examples = "\n".join(line.removeprefix("  ") for line in lines.splitlines())
        yield f"{heading.capitalize()}\n\n```text\n{examples}\n```"
    for action in shown:
        if isinstance(action, argparse._SubParsersAction):
            for verb, below in action.choices.items():
                yield from described(below, f"### {parser.prog} {verb}")


def is_verbs(action: argparse.Action) -> bool:
    return isinstance(action, argparse._SubParsersAction)


def usage(parser: argparse.ArgumentParser, shown: list[argparse.Action]) -> str:
    """The first line of --help, written here because argparse breaks lines by the width of the terminal."""
    words = [parser.prog]
    for action in sorted(shown, key=lambda action: bool(action.option_strings)):
        word = " ".join([*action.option_strings[:1], *filter(None, [values(action)])])
        optional = action.option_strings and not action.required
        words.append(f"[{word}]" if optional else word)
    lines, room = [words[0]], 84
    for word in words[1:]:
        if len(lines[-1]) + len(word) >= room:
            lines.append(" " * len(parser.prog))
        lines[-1] += f" {word}"
    return "\n".join(lines)


def values(action: argparse.Action) -> str:
    """What follows an option, or stands for an argument."""
    if action.nargs == 0:
        return ""
    metavar = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    word = str(metavar) if not isinstance(metavar, tuple) else " ".join(metavar)
    return {"*": f"[{word} ...]", "+": f"{word} [{word} ...]", "?": f"[{word}]"}.get(str(action.nargs), word)


def name(action: argparse.Action) -> str:
    """An argument as a table shows it."""
    word = values(action)
    if not action.option_strings:
        return f"`{word}`".replace("|", "\\|")
    return ", ".join(f"`{option}{' ' + word if word else ''}`" for option in action.option_strings).replace("|", "\\|")


def what(action: argparse.Action) -> str:
    text = (action.help or "") % {"default": action.default, "prog": "forge", "choices": action.choices}
    return escaped(text).replace("|", "\\|")


def escaped(text: str) -> str:
    """Text that shows its angle brackets, stars and underscores."""
    return text.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


if __name__ == "__main__":
    PAGE.write_text(page())
