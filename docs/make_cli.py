"""Write docs/cli.md: every command of `forge` with its arguments and options, from the parsers themselves.

    python docs/make_cli.py

tests/docs/test_pages.py fails when the page is out of date.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from forge.cli import module_of, target
from forge.cli import verbs as all_verbs

PAGE = Path(__file__).parent / "cli.md"
INTRODUCTION = """\
# Command-line reference

Every command with its arguments and options. `forge COMMAND --help` prints the same. For a guide by task, see
[recipes and the command line](recipes-and-cli.md)."""
COMMON = """\
## Recipe arguments

Every command that works on a recipe takes these:"""
EXIT_CODES = """\
## Exit codes

| code | meaning |
|---|---|
| 0 | success |
| 1 | a crash, with its traceback, or a negative verdict: `--at-least`, `verify-resume`, `ckpt` |
| 2 | a mistake in the input; the message explains it |
| 85 | stopped by a signal; the run can be [resumed](surviving.md#signals) |"""


def heading(verb: str) -> str:
    """The heading of a command; of one that adds to a verb by an option, without its dashes, which no link can have."""
    return f"forge {verb.replace(' --', ' with ')}"


def page() -> str:
    """Return the whole page."""
    verbs = [f"| [`forge {verb}`](#{heading(verb).replace(' ', '-')}) | {text} |" for verb, text in all_verbs().items()]
    overview = "\n".join(["| command | what it does |", "|---|---|", *verbs])
    parts = [INTRODUCTION, overview, COMMON, table(common()), *map(section, all_verbs()), EXIT_CODES]
    return "\n\n".join(parts) + "\n"


def common() -> list[argparse.Action]:
    """Return the arguments of every command that works on a recipe."""
    parser = argparse.ArgumentParser(add_help=False)
    target.add_arguments(parser)
    return parser._actions


def table(actions: list[argparse.Action]) -> str:
    rows = [f"| {name(action)} | {what(action)} |" for action in actions if not is_verbs(action)]
    return "\n".join(["| argument | meaning |", "|---|---|", *rows])


def section(verb: str) -> str:
    """Return one command: description, usage, arguments and options, examples."""
    parser = module_of(verb).parser()
    return "\n\n".join([f"## {heading(verb)}", *described(parser)])


def described(parser: argparse.ArgumentParser, title: str = "") -> Iterator[str]:
    """Yield a parser as Markdown, followed by the parsers of its subcommands."""
    if title:
        yield title
    yield escaped(parser.description or "")
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    yield f"```text\n{usage(parser, shown)}\n```"
    known = {(action.dest, action.help) for action in common()}
    own = [action for action in shown if (action.dest, action.help) not in known and not is_verbs(action)]
    if len(own) + len(known) <= len(shown):
        yield "Takes the [recipe arguments](#recipe-arguments)" + (", and:" if own else ".")
    if own:
        yield table(own)
    for part in (parser.epilog or "").strip().split("\n\n"):
        heading, _, lines = part.partition("\n")
        if lines.startswith("  "):
            below = "\n".join(line.removeprefix("  ") for line in lines.splitlines())
            yield f"{heading.capitalize()}\n\n```text\n{below}\n```"
        elif part:
            yield escaped(" ".join(part.split()))
    for action in shown:
        if isinstance(action, argparse._SubParsersAction):
            for verb, below in action.choices.items():
                yield from described(below, f"### {parser.prog} {verb}")


def is_verbs(action: argparse.Action) -> bool:
    return isinstance(action, argparse._SubParsersAction)


def usage(parser: argparse.ArgumentParser, shown: list[argparse.Action]) -> str:
    """Return the usage line of --help. argparse would break it by the width of the terminal."""
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
    """Return the placeholder of an option's value, or of an argument."""
    if action.nargs == 0:
        return ""
    metavar = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    word = str(metavar) if not isinstance(metavar, tuple) else " ".join(metavar)
    if " " in word and action.nargs == "*":  # a whole usage, which says itself what is repeated
        return f"[{word}]"
    return {"*": f"[{word} ...]", "+": f"{word} [{word} ...]", "?": f"[{word}]"}.get(str(action.nargs), word)


def name(action: argparse.Action) -> str:
    """Return an argument's cell in the table."""
    word = values(action)
    if not action.option_strings:
        return f"`{word}`".replace("|", "\\|")
    return ", ".join(f"`{option}{' ' + word if word else ''}`" for option in action.option_strings).replace("|", "\\|")


def what(action: argparse.Action) -> str:
    text = (action.help or "") % {"default": action.default, "prog": "forge", "choices": action.choices}
    return escaped(text).replace("|", "\\|")


def escaped(text: str) -> str:
    """Escape angle brackets, stars and underscores."""
    return text.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


if __name__ == "__main__":
    PAGE.write_text(page())
