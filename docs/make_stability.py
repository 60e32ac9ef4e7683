"""Write what the version number promises: docs/stability.md, and tests/truth/public.txt, the whole list for programs.

    python docs/make_stability.py

A line of the list is a fact that users rely on (tests/truth/surface.py), after the word `stable` or `provisional`. It
is stable if it was there when tests/truth/surface.txt was recorded. Where the list changes, the changelog must have
changed too since this script was last run: it refuses otherwise, and tests/truth fails until the list is that of the
code and of the changelog.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.truth import surface

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs" / "stability.md"
LIST = REPO / "tests" / "truth" / "public.txt"
RECORDED = REPO / "tests" / "truth" / "surface.txt"
DROPPED = REPO / "tests" / "truth" / "dropped.txt"
CHANGELOG = REPO / "CHANGELOG.md"
ALWAYS = ("exit", "format")
"""Kinds that are stable from their first day: scripts and files outlive a version."""
SHOWN = {
    "name": "Public names",
    "hook": "Hooks",
    "verb": "Verbs",
    "plugin": "Plugins",
    "recipe": "Recipes",
    "group": "Groups of entry points",
    "fixture": "Fixtures of pytest",
}
COUNTED = {
    "argument": "arguments of public functions and classes",
    "member": "documented methods and attributes",
    "option": "options of plugins, tasks and data",
    "flag": "flags of verbs",
    "positional": "arguments of verbs",
    "choice": "words that an argument of a verb takes",
    "setting": "settings of recipes",
    "task": "tasks",
    "data": "data sets",
    "kernel": "kernels",
}
FORMATS = {
    "forge-run": (
        "`card.json`",
        "read, with a warning; `metrics.jsonl`, `end.json` and all beside it go by it",
    ),
    "forge-group": ("`group.json`", "read, with a warning"),
    "forge-checkpoint": ("`manifest.json`", "refused"),
    "forge-export": ("`FILE.export.json`", "refused"),
    "forge-conformance": ("`conformance.json`", "not read by forge"),
}
TEXT = """\
# What a version promises

forge follows [semantic versioning](https://semver.org/spec/v2.0.0.html), from version 1.0 on, for what is listed
here.

- **Stable**: works until the next major version.
- **Provisional**: is new since the last recorded version. It may change in a minor version, with a line in [the
  changelog](../CHANGELOG.md).
- **All else is internal**: modules that are not in [the API reference](api.md), names that begin with `_`, the words
  of messages.

Numbers may change in their last bits with any version of torch. With the same version of forge, torch and device, a
run ends in the same bits.

The list below is generated from the code. Every single argument, option and flag is in
[tests/truth/public.txt](../tests/truth/public.txt), with its stability, and a test fails if one changes without that
file and the changelog."""


def main() -> None:
    kinds, errors = collected()
    if errors:
        raise SystemExit("Install everything first; these could not be looked at:\n" + "\n".join(errors))
    now, then = listed(kinds), LIST.read_text(encoding="utf-8").splitlines() if LIST.exists() else []
    told = digest([CHANGELOG.read_text(encoding="utf-8")])
    if now != then[1:] and then and f" {told} " in f"{then[0]} ":
        changed = [f"- {line}" for line in then[1:] if line not in now]
        changed += [f"+ {line}" for line in now if line not in then]
        raise SystemExit(
            "\n".join(changed) + "\nThe public surface changes, and the changelog has not since it was last "
            "written. Say in CHANGELOG.md what users will see, then run this again."
        )
    LIST.write_text("\n".join([head(now, told), *now]) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


def collected() -> tuple[dict[str, set[str]], list[str]]:
    """Return what can be named now. What was recorded is looked for even where no list has it."""
    gone = {line.partition("  # ")[0] for line in DROPPED.read_text(encoding="utf-8").splitlines()}
    return surface.collect(set(RECORDED.read_text(encoding="utf-8").splitlines()) - gone)


def listed(kinds: dict[str, set[str]]) -> list[str]:
    """Return the lines of the list, each with its stability."""
    known = {subject(line) for line in RECORDED.read_text(encoding="utf-8").splitlines()}
    lines = sorted(line for kind, lines in kinds.items() if kind != "import" for line in lines)
    return [
        f"{'stable' if subject(line) in known or line.startswith(ALWAYS) else 'provisional'} {line}" for line in lines
    ]


def subject(line: str) -> str:
    """Return what a line is about, without default, type and arguments of a hook: these may change compatibly."""
    return line.partition(" = ")[0].partition(": ")[0].partition("(")[0]


def head(lines: Iterable[str], told: str) -> str:
    return f"# Written by docs/make_stability.py: lines {digest(lines)} , changelog {told} ."


def digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def page() -> str:
    """Return the whole page, from the list."""
    by_kind: dict[str, dict[str, list[str]]] = {}
    for line in LIST.read_text(encoding="utf-8").splitlines()[1:]:
        stability, kind, rest = line.split(" ", 2)
        by_kind.setdefault(kind, {"stable": [], "provisional": []})[stability].append(rest)
    parts = [TEXT]
    for kind, title in SHOWN.items():
        parts.append(f"## {title}")
        parts += [
            f"{stability.capitalize()}: {', '.join(f'`{shown(rest)}`' for rest in rests)}."
            for stability, rests in by_kind[kind].items()
            if rests
        ]
    counts = [f"| {text} | {len(found['stable'])} | {len(found['provisional'])} |" for text, found in counted(by_kind)]
    parts += ["## Arguments, options and settings", "\n".join(["| | stable | provisional |", "|---|---|---|", *counts])]
    codes = [f"| {code} | {meaning} |" for code, meaning in surface.exit_codes().items()]
    parts += ["## Exit codes", "\n".join(["| code | meaning |", "|---|---|", *codes])]
    versions = [
        f"| `{name}` | {version} | {' | '.join(FORMATS[name])} |" for name, version in surface.formats().items()
    ]
    rows = ["| format | version | where it says so | a newer one is |", "|---|---|---|---|", *versions]
    parts += ["## File formats", FORMATS_TEXT, "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


FORMATS_TEXT = """\
A version grows only where an older forge would misread a file; what is added beside does not count. Files of every
earlier version are read, also those from before there were versions."""


def shown(rest: str) -> str:
    return rest.partition("(")[0]


def counted(by_kind: dict[str, dict[str, list[str]]]) -> Iterator[tuple[str, dict[str, list[str]]]]:
    yield from ((text, by_kind[kind]) for kind, text in COUNTED.items())


if __name__ == "__main__":
    sys.exit(main())
