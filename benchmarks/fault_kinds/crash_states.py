"""Crashes of the machine: a run folder rebuilt after any prefix of its recorded changes, less what was not flushed."""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from benchmarks.fault_kinds.outcomes import Outcome, Straight, check_folder, finish, new_folder
from benchmarks.fault_kinds.replay import DATA, MOVE, SYNC, Change, Kept, Replay, read_log
from benchmarks.fault_kinds.victim import UPDATES, WORKERS, Attempt, Run, drawn, spawn

CRASHES = ("nothing lost", "writes lost", "renames lost", "both lost", "some lost")
"""What is lost of the changes that were not flushed. "some": any write, and the last names of every folder."""


def crash_state(number: int, straight: Straight) -> Outcome:
    """Rebuild the folder of a recorded run as one crash may leave it, check it, and let the run finish."""
    dice = random.Random(f"crash:{number}")
    run, crash = drawn(number, dice), CRASHES[number % len(CRASHES)]
    attempts = 1 + run.seed % 2
    outcome = Outcome(f"crash:{number}", f"crash, {crash}", deaths=1)
    expected, (root, changes) = straight.of(run), recording(run, attempts, straight)
    count = dice.randint(0, len(changes))
    folder = new_folder(dice)
    try:
        rebuild(folder, root, changes[:count], crash, dice)
        (folder / "published").write_text("\n".join(flushed_checkpoints(changes[:count])))
        check_folder(folder, outcome)
        if not outcome.wrong:
            finish(Attempt(dice.choice(WORKERS)), folder, run, expected, outcome)
        if outcome.wrong:
            outcome.wrong = f"{crash} after {count} of {len(changes)} changes in {attempts} attempts: {outcome.wrong}"
        return outcome
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def recording(run: Run, attempts: int, straight: Straight) -> tuple[Path, list[Change]]:
    """Return the folder and the changes of a run: of one attempt, which saves in the background, or of two."""
    if (run, attempts) not in straight.recordings:
        folder = straight.folder / f"recorded-{run.precision}-{run.seed}-{attempts}"
        folder.mkdir(parents=True)
        plan = [Attempt("0 workers", records=True, background=attempts == 1)]
        if attempts == 2:  # killed while nothing is written: what has happened is recorded
            after = random.Random(str(run)).randint(8, UPDATES * 4)
            plan.insert(0, Attempt("0 workers", "micro-batch", after, records=True, background=False))
        codes = [spawn(attempt, folder, run) for attempt in plan]
        if codes[-1] != 0:
            raise RuntimeError(f"the recorded run failed ({codes}):\n{(folder / 'stderr.log').read_text()}")
        changes = [change for change in read_log(folder / "changes.log") if is_of_run(change, folder)]
        check_recording(folder.resolve(), changes)
        straight.recordings[run, attempts] = folder.resolve(), changes
    return straight.recordings[run, attempts]


def check_recording(folder: Path, changes: Sequence[Change]) -> None:
    """Raise unless all changes, replayed, give the folder that the run left: no change is missing."""
    with tempfile.TemporaryDirectory() as again:
        rebuild(Path(again), folder, changes, "nothing lost", random.Random(0), whole=True)
        ours, theirs = (_contents(root / "run") for root in (Path(again), folder))
        if ours != theirs:
            odd = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            raise RuntimeError(f"the recording of {folder} misses changes of {', '.join(odd)}")


def _contents(folder: Path) -> dict[str, bytes | str | None]:
    """Return every file, link and folder by its relative path."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else (None if path.is_dir() else path.read_bytes())
        for path in folder.rglob("*")
    }


def is_of_run(change: Change, folder: Path) -> bool:
    """Whether a change is one of the run folder, or flushes its parent."""
    parts = change.path.relative_to(folder.resolve()).parts
    return parts[0] == "run" if parts else change.what == SYNC


def rebuild(
    folder: Path, root: Path, changes: Sequence[Change], crash: str, dice: random.Random, whole: bool = False
) -> None:
    """Write what a crash after these changes leaves; of a write as the last one a part, unless `whole`."""
    replay = Replay(root)
    for change in changes[:-1]:
        replay.apply(change)
    for last in changes[-1:]:
        replay.apply(last.cut(dice.randint(0, len(last.data))) if last.what == DATA and not whole else last)
    names, data = _kept(crash, dice)
    replay.rebuild(folder, names, data)


def _kept(crash: str, dice: random.Random) -> tuple[Kept, Kept]:
    """Return what is kept of the names in a folder, and of the data in a file."""

    def everything(flushed: int, count: int) -> Sequence[int]:
        return range(count)

    def nothing_more(flushed: int, count: int) -> Sequence[int]:
        return range(flushed)

    def first_ones(flushed: int, count: int) -> Sequence[int]:
        return range(dice.randint(flushed, count))

    def any_of_them(flushed: int, count: int) -> Sequence[int]:
        return [*range(flushed), *(number for number in range(flushed, count) if dice.random() < 0.5)]

    if crash == "some lost":
        return first_ones, any_of_them
    names = nothing_more if crash in ("renames lost", "both lost") else everything
    return names, nothing_more if crash in ("writes lost", "both lost") else everything


def flushed_checkpoints(changes: Sequence[Change]) -> list[str]:
    """Return the checkpoints that were given their final name, which was then flushed."""
    waiting, found = [], []
    for change in changes:
        if change.what == MOVE and re.fullmatch(r"update-\d+", name := PurePosixPath(change.other).name):
            waiting.append(name)
        elif change.what == SYNC and change.path.name == "checkpoints":
            found += waiting
            waiting = []
    return found
