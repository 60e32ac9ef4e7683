"""The outcome of a case, and the checks that all kinds share."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forge
from benchmarks.fault_kinds.victim import HANG, Attempt, Run, spawn
from forge.checkpoint import Checkpoints, StoredCheckpoint
from forge.snapshot.evidence import attempts_apart, read_traces

PLACES = (tempfile.gettempdir(), "/dev/shm")
KINDS = ("exact", "torn", "lost", "inexact", "crashed", "hang", "missed")
"""How a case can end; all but the first are errors."""


@dataclass(slots=True)
class Outcome:
    """The result of a case; `wrong` describes an error."""

    case: str
    row: str
    wrong: str = ""
    kind: str = "exact"
    "One of KINDS."
    deaths: int = 0


@dataclass(slots=True)
class Straight:
    """Uninterrupted runs, and the recorded ones, each made once."""

    folder: Path
    done: dict[Run, Path] = field(default_factory=dict)
    recordings: dict[tuple[Run, int], Any] = field(default_factory=dict)

    def of(self, run: Run) -> Path:
        if run not in self.done:
            path = self.folder / f"straight-{run.precision}-{run.seed}"
            path.mkdir(parents=True)
            code = spawn(Attempt("0 workers"), path, run)
            if code != 0:
                raise RuntimeError(f"the straight run failed ({code}):\n{(path / 'stderr.log').read_text()}")
            self.done[run] = path
        return self.done[run]


def new_folder(dice: random.Random) -> Path:
    """Make a folder for a run, in memory or in the temporary folder."""
    return Path(tempfile.mkdtemp(prefix="forge-faults-", dir=dice.choice(PLACES))).resolve()


def wrong(outcome: Outcome, kind: str, what: str) -> Outcome:
    outcome.kind, outcome.wrong = kind, outcome.wrong or what
    return outcome


def failed(outcome: Outcome, code: int, folder: Path, when: str = "") -> Outcome:
    """Note an attempt that ended as it must not."""
    kind = "hang" if code == HANG else "crashed"
    return wrong(outcome, kind, f"{when}exit code {code}\n{(folder / 'stderr.log').read_text()}")


def check_folder(folder: Path, outcome: Outcome) -> None:
    """Check that every checkpoint under a final name verifies, and that the newest published one still exists."""
    there = Checkpoints(folder / "run" / "checkpoints").all()
    for path in there:
        try:
            StoredCheckpoint(path).verify()
        except forge.CheckpointError as error:
            wrong(outcome, "torn", str(error))
    noted = folder / "published"
    published = noted.read_text().split() if noted.exists() else []
    last = there[-1].name if there else ""
    if published and max(published) > last:
        wrong(outcome, "lost", f"{max(published)} was published, but the newest is {last or 'none'}")


def finish(attempt: Attempt, folder: Path, run: Run, expected: Path, outcome: Outcome) -> None:
    """Run the last attempt, and compare every update of all attempts and the weights with the straight run."""
    code = spawn(attempt, folder, run)
    if code != 0:
        failed(outcome, code, folder, "the last attempt: ")
        return
    difference = attempts_apart(read_traces(expected)[0], read_traces(folder))
    if difference is not None:
        wrong(outcome, "inexact", str(difference))
        return
    ends = [(path / "run" / "weights.safetensors").read_bytes() for path in (expected, folder)]
    if ends[0] != ends[1]:
        wrong(outcome, "inexact", "the final weights differ")
