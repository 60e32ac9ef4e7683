"""The attempts of a run: the processes that trained it, one after the other, each with its command and first update.

The card alone describes a run's first attempt. Every later attempt replaces the card, so from the second one on
RUN/lives.json lists them all. It is written before the card: a kill at any moment loses no earlier attempt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from forge.runs.folder import ATTEMPTS, RunFolder
from forge.util.files import atomic_write

MOST_SHOWN = 10
"""Of more attempts than this, the first and the last ones are shown."""


@dataclass(frozen=True)
class Attempt:
    """One process, or group of ranks, that trained a run."""

    started: str
    command: str
    update: int
    "The update of the checkpoint it resumed from, or 0."
    setup: dict[str, str]
    "Versions, device and number of ranks."

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> Attempt:
        """Return the attempt that wrote a run card."""
        versions = card.get("versions")
        setup = {**(versions if isinstance(versions, dict) else {}), "device": card.get("device")}
        record = {"started": card.get("started"), "command": card.get("command"), "update": card.get("resumed_from")}
        return cls.from_record({**record, "setup": {**setup, "ranks": card.get("world"), "job": card.get("job")}})

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Attempt:
        """Read a record of lives.json, which is not trusted."""
        update, setup = record.get("update"), record.get("setup")
        named = setup.items() if isinstance(setup, dict) else ()
        return cls(
            _text(record.get("started")),
            _text(record.get("command")),
            update if type(update) is int and 0 <= update < 2**53 else 0,
            {str(name): _text(value) for name, value in named if value is not None},
        )

    def changes(self, before: Attempt) -> list[str]:
        """Return the changes since the previous attempt: ["torch 2.10.0 → 2.11.0"]."""
        both = [(name, before.setup[name], now) for name, now in self.setup.items() if name in before.setup]
        return [f"{name} {then} → {now}" for name, then, now in both if then != now]


def attempts_of(run: RunFolder) -> list[Attempt]:
    """Return all known attempts, first to last; only the last one if the run has nothing but a card."""
    written = [Attempt.from_record(record) for record in run.attempts]
    return written or ([Attempt.from_card(run.card)] if run.card else [])


def begin(card: Mapping[str, Any], folder: Path, continues: bool) -> list[Attempt]:
    """Record the attempt that this card describes, and return all; one that continues nothing is the first."""
    file = folder / ATTEMPTS
    if not continues:
        file.unlink(missing_ok=True)
        return [Attempt.from_card(card)]
    attempts = [*attempts_of(RunFolder(folder)), Attempt.from_card(card)]
    with atomic_write(file) as beside:
        beside.write_text(json.dumps({"lives": [asdict(attempt) for attempt in attempts]}, indent=2) + "\n")
    return attempts


# -- as people read them ----------------------------------------------------------------------------------------------


def as_markdown(attempts: Sequence[Attempt]) -> str:
    """Return a section for the run card; empty for a single attempt."""
    if len(attempts) < 2:
        return ""
    lines = ["## Attempts, first to last", ""]
    for number, attempt, changed in shown(attempts):
        more = f" ({', '.join(changed)})" if changed else ""
        lines.append(f"{number}. {attempt.started}, from update {attempt.update}: `{attempt.command}`{more}")
    return "\n".join([*lines, *([f"\n{note}"] if (note := omitted(attempts)) else []), ""])


def shown(attempts: Sequence[Attempt]) -> Iterator[tuple[int, Attempt, list[str]]]:
    """Yield (number, attempt, changes since the previous one) of the first and the last attempts."""
    changes = [[], *(attempt.changes(before) for before, attempt in pairwise(attempts))]
    for number, (attempt, changed) in enumerate(zip(attempts, changes, strict=True), 1):
        if number == 1 or number > len(attempts) - MOST_SHOWN + 1:
            yield number, attempt, changed


def omitted(attempts: Sequence[Attempt]) -> str:
    """Return a note about the attempts that `shown` skips; empty if it skips none."""
    more = len(attempts) - MOST_SHOWN
    return f"{more} more in {ATTEMPTS}." if more > 0 else ""


def commands(attempts: Sequence[Attempt]) -> str:
    """Return all commands in one line: "forge fit mine; from update 30: forge fit mine --resume"."""
    parts = []
    for command, group in groupby(attempts, lambda attempt: attempt.command):
        same = list(group)
        often = f" ({len(same)} times)" if len(same) > 1 else ""
        where = f"from update {same[0].update}: " if same[0].update or parts else ""
        parts.append(f"{where}{command}{often}")
    return "; ".join(parts)


def changed_setup(attempts: Sequence[Attempt]) -> dict[str, str]:
    """Return the setup that changed between attempts, by name: {"torch": "2.10.0, then 2.11.0"}."""
    names = dict.fromkeys(name for attempt in attempts for name in attempt.setup)
    values = {name: [a.setup[name] for a in attempts if name in a.setup] for name in names}
    distinct = {name: [value for value, _ in groupby(found)] for name, found in values.items()}
    return {name: ", then ".join(found) for name, found in distinct.items() if len(found) > 1}


def _text(value: Any) -> str:
    return str(value) if isinstance(value, (str, int, float)) else ""
