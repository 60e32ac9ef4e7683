"""Planted bugs, each a small change of a healthy program.

A table such as `bugs.diff` has an entry for each:

    === NAME of BASE: FINDING, FINDING
    What is wrong, in a sentence.
     a line of the base, to say where
    -a line of the base that goes
    +a line in its place

An empty line begins the next place, and a line after `|` belongs to the recipe of the case. BASE is a file of `bases/`,
with a `Task` and its `data`. Without a FINDING the program is healthy, or nothing is known to find its bug. Every place
must occur exactly once in its base, so a change that has gone stale fails.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass
class Change:
    name: str
    base: str
    findings: list[str]
    """The right findings; `note:NAME` where a note is enough."""
    sentence: str = ""
    places: list[list[str]] = field(default_factory=list)
    """Lines of a diff: each begins with a blank, `-` or `+`."""
    recipe: list[str] = field(default_factory=list)

    def program(self) -> str:
        """The source of the base with the change in it."""
        source = (HERE / "bases" / f"{self.base}.py").read_text()
        for place in self.places:
            source = replaced(source, place, f"{self.name} of {self.base}")
        return source


@functools.cache
def changes(kind: str) -> dict[str, Change]:
    """Every change of a table by its name."""
    found: dict[str, Change] = {}
    change, begins = None, True
    for number, line in enumerate((HERE / f"{kind}.diff").read_text().splitlines(), 1):
        where = f"{kind}.diff:{number}"
        if line.startswith("=== "):
            change = _begun(line, where)
            assert change.name not in found, f"{where}: there are two of {change.name}"
            found[change.name] = change
            begins = True
        elif change is None:
            raise ValueError(f"{where}: a table begins with a line such as '=== NAME of BASE: FINDING'")
        elif not change.sentence:
            change.sentence = line
        elif not line:
            begins = True
        elif line[0] == "|":
            change.recipe.append(line[1:].removeprefix(" "))
        elif line[0] in " -+":
            if begins:
                change.places.append([])
            change.places[-1].append(line)
            begins = False
        else:
            raise ValueError(f"{where}: a line of a change begins with a blank, '-', '+' or '|': {line}")
    return found


def _begun(line: str, where: str) -> Change:
    match = re.fullmatch(r"=== (\w+) of (\w+)(?:: (.+))?", line)
    if match is None:
        raise ValueError(f"{where}: write '=== NAME of BASE: FINDING, FINDING', not {line!r}")
    name, of, findings = match.groups()
    return Change(name, of, findings.split(", ") if findings else [])


def replaced(source: str, place: list[str], who: str) -> str:
    """The source with one place changed."""
    old = "".join(line[1:] + "\n" for line in place if line[0] in " -")
    new = "".join(line[1:] + "\n" for line in place if line[0] in " +")
    found = [match.start() for match in re.finditer(f"^(?={re.escape(old)})", source, re.MULTILINE)] if old else []
    if len(found) != 1:
        raise ValueError(f"{who}: this place occurs {len(found)} times in the base, and must once:\n{old or new}")
    return source[: found[0]] + new + source[found[0] + len(old) :]


def written(change: Change, folder: Path) -> Path:
    """Write the program of a change, and its recipe, into a folder."""
    path = folder / f"{change.name}.py"
    path.write_text(change.program())
    if change.recipe:
        path.with_suffix(".yaml").write_text("\n".join(change.recipe) + "\n")
    return path
