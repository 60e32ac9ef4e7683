"""Tags and a note that the user gives a run, or a group of runs: RUN/notes.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from forge.errors import ForgeError
from forge.runs.folder import NOTES, RunFolder, read_object
from forge.util.files import atomic_write

TAG = re.compile(r"[^\s,]{1,100}")


def tag(run: RunFolder, tags: Iterable[str]) -> list[str]:
    """Add tags to a run; return all that it has."""
    tags = list(tags)
    odd = [word for word in tags if not TAG.fullmatch(word)]
    if odd:
        raise ForgeError(f"{odd[0][:100]!r} is no tag: a tag is one word of at most 100 letters, without commas.")
    return _write(run, tags=list(dict.fromkeys([*_own(run), *tags])))


def untag(run: RunFolder, tags: Iterable[str]) -> list[str]:
    """Remove tags from a run; return those that are left."""
    tags, own = list(tags), _own(run)
    missing = [word for word in tags if word not in own]
    if missing:
        raise ForgeError(f"{run.name} has no tag {missing[0]!r}; it has {', '.join(own) or 'none'}.")
    return _write(run, tags=[word for word in own if word not in tags])


def note(run: RunFolder, text: str) -> None:
    """Set the note of a run; an empty text removes it."""
    _write(run, note=text)


def _own(run: RunFolder) -> list[str]:
    return RunFolder(run.path).tags  # a group has those of its runs too


def _write(run: RunFolder, **changed: str | list[str]) -> list[str]:
    found = {**read_object(run.path / NOTES), **changed}
    with atomic_write(run.path / NOTES) as beside:
        beside.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return RunFolder(run.path).tags
