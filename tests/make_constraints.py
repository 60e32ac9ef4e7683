"""Write tests/constraints.txt: the version of every package that forge requires, as installed here.

    python tests/make_constraints.py

Packages of an extra that is not installed here keep the line that they have.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parent.parent
PACKAGES = sorted((REPO / "plugins").glob("forge_*/pyproject.toml"))
FILE = Path(__file__).with_name("constraints.txt")
HEAD = """\
# The versions that the tests ran with: pip install -e . -c tests/constraints.txt
# Written by `python tests/make_constraints.py`.
"""


def project() -> dict[str, Any]:
    """Return the table `project` of pyproject.toml."""
    return tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


def projects() -> list[dict[str, Any]]:
    """Return the table `project` of the core and of every package around it."""
    return [tomllib.loads(path.read_text())["project"] for path in [REPO / "pyproject.toml", *PACKAGES]]


def asked() -> dict[str, Requirement]:
    """Return what forge and its packages require, extras included, by name; but peers, which benchmarks alone run."""
    found: list[Requirement] = []
    for one in projects():
        extras = one.get("optional-dependencies", {})
        lists = [one["dependencies"], *(extras[extra] for extra in extras if extra != "bench")]
        found += [Requirement(text) for texts in lists for text in texts]
    ours = {one["name"] for one in projects()}
    return {canonicalize_name(one.name): one for one in found if one.name not in ours}


def pinned() -> dict[str, str]:
    """Return the versions of constraints.txt by name."""
    text = FILE.read_text() if FILE.exists() else ""
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, flags=re.MULTILINE))


def installed(wanted: Iterable[Requirement]) -> dict[str, str]:
    """Return the installed versions of what is wanted, and of what that requires in turn."""
    found: dict[str, str] = {}
    waiting = [(canonicalize_name(one.name), frozenset(one.extras)) for one in wanted]
    seen = set(waiting)
    while waiting:
        name, extras = waiting.pop()
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
        for text in requires(name) or []:
            one = Requirement(text)
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                following = canonicalize_name(one.name), frozenset(one.extras)
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
    return found


if __name__ == "__main__":
    here = installed(asked().values())
    kept = {name: number for name, number in pinned().items() if name in asked()}
    lines = sorted(f"{name}=={number.partition('+')[0]}" for name, number in {**kept, **here}.items())
    FILE.write_text(HEAD + "\n".join(lines) + "\n")
    print(f"{FILE}: {len(lines)} packages. Not here: {', '.join(sorted(asked().keys() - here.keys())) or 'none'}")
