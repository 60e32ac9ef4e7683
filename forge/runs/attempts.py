"""The lives of a run: the processes that made it, one after the other, each with its command and where it began.

A run's first life is told by its card alone. From the second one on RUN/lives.json has them all, because every life
writes the card anew. It is replaced before the card is, so a kill at any moment leaves the lives that were there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from forge.runs.folder import LIVES, Run
from forge.util.files import atomic_write

MOST_SHOWN = 10
"""A run that was resumed more often shows its first life and its last ones."""


@dataclass(frozen=True)
class Life:
    """One process, or group of ranks, that trained a run."""

    started: str
    command: str
    update: int
    "After which update it began: 0, or that of the checkpoint which it continued."
    setup: dict[str, str]
    "Versions, device and number of ranks."

    @classmethod
    def of_card(cls, card: Mapping[str, Any]) -> Life:
        """The life that wrote a run card."""
        versions = card.get("versions")
        setup = {**(versions if isinstance(versions, dict) else {}), "device": card.get("device")}
        told = {"started": card.get("started"), "command": card.get("command"), "update": card.get("resumed_from")}
        return cls.of({**told, "setup": {**setup, "ranks": card.get("world")}})

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Life:
        """A life as it was written down, perhaps by a stranger."""
        update, setup = record.get("update"), record.get("setup")
        named = setup.items() if isinstance(setup, dict) else ()
        return cls(
            _text(record.get("started")),
            _text(record.get("command")),
            update if type(update) is int and 0 <= update < 2**53 else 0,
            {str(name): _text(value) for name, value in named if value is not None},
        )

    def changes(self, before: Life) -> list[str]:
        """What is not as it was in the life before: ["torch 2.10.0 → 2.11.0"]."""
        both = [name for name in self.setup if name in before.setup]
        return [
            f"{name} {before.setup[name]} → {self.setup[name]}"
            for name in both
            if before.setup[name] != self.setup[name]
        ]


def lives_of(run: Run) -> list[Life]:
    """All that is known of, first to last; one where nothing but a card is there."""
    written = [Life.of(record) for record in run.lives]
    return written or ([Life.of_card(run.card)] if run.card else [])


def begin(card: Mapping[str, Any], folder: Path, continues: bool) -> list[Life]:
    """Write down that a life begins which this card tells of; one that continues nothing is the first."""
    file = folder / LIVES
    if not continues:
        file.unlink(missing_ok=True)
        return [Life.of_card(card)]
    lives = [*lives_of(Run(folder)), Life.of_card(card)]
    with atomic_write(file) as beside:
        beside.write_text(json.dumps({"lives": [asdict(life) for life in lives]}, indent=2) + "\n")
    return lives


# -- as people read them ----------------------------------------------------------------------------------------------


def as_markdown(lives: Sequence[Life]) -> str:
    """A section for the run card; a run of one life needs none."""
    if len(lives) < 2:
        return ""
    lines = ["## Lives, first to last", ""]
    for number, life, changed in shown(lives):
        more = f" ({', '.join(changed)})" if changed else ""
        lines.append(f"{number}. {life.started}, from update {life.update}: `{life.command}`{more}")
    return "\n".join([*lines, *([f"\n{left}"] if (left := left_out(lives)) else []), ""])


def shown(lives: Sequence[Life]) -> Iterator[tuple[int, Life, list[str]]]:
    """(number, life, what changed since the one before) of the first and the last lives."""
    changes = [[], *(life.changes(before) for before, life in pairwise(lives))]
    for number, (life, changed) in enumerate(zip(lives, changes, strict=True), 1):
        if number == 1 or number > len(lives) - MOST_SHOWN + 1:
            yield number, life, changed


def left_out(lives: Sequence[Life]) -> str:
    """What `shown` does not show, in words; empty where it shows all."""
    more = len(lives) - MOST_SHOWN
    return f"{more} more in {LIVES}." if more > 0 else ""


def commands(lives: Sequence[Life]) -> str:
    """The commands in one line: "forge fit mine; from update 30: forge fit mine --resume"."""
    told = []
    for command, group in groupby(lives, lambda life: life.command):
        same = list(group)
        often = f" ({len(same)} times)" if len(same) > 1 else ""
        where = f"from update {same[0].update}: " if same[0].update or told else ""
        told.append(f"{where}{command}{often}")
    return "; ".join(told)


def changed_setup(lives: Sequence[Life]) -> dict[str, str]:
    """What did not stay the same over all lives, by name: {"torch": "2.10.0, then 2.11.0"}."""
    names = dict.fromkeys(name for life in lives for name in life.setup)
    values = {name: [value for value, _ in groupby(_values(lives, name))] for name in names}
    return {name: ", then ".join(found) for name, found in values.items() if len(found) > 1}


def _values(lives: Sequence[Life], name: str) -> list[str]:
    return [life.setup[name] for life in lives if name in life.setup]


def _text(value: Any) -> str:
    return str(value) if isinstance(value, (str, int, float)) else ""
