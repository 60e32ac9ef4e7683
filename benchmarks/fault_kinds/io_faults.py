"""Calls that fail: the n-th open, read, write, rename or fsync below the run folder, once or from then on for good."""

from __future__ import annotations

import errno
import random
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from benchmarks.fault_kinds.outcomes import Outcome, Straight, check_folder, failed, finish, new_folder
from benchmarks.fault_kinds.preload import Fault
from benchmarks.fault_kinds.victim import HANG, UPDATES, WORKERS, Attempt, Run, drawn, spawn

MOST = {"open": 140, "read": 60, "write": 400, "rename": 45, "fsync": 70, "entry": 80, "disk": 700}
"""About as many calls of each kind has a whole run."""

TEMPORARY = re.compile(r"\.(?:tmp\w{6}|(.+)\.(?:(?:tmp|old)-)?\d+-[0-9a-f]+)")
"""A temporary name of forge, or of safetensors."""


def failing_call(number: int, straight: Straight) -> Outcome:
    """Let a call fail in a new or in a resumed run; it ends, or names the file, and then finishes without faults."""
    dice = random.Random(f"io:{number}")
    run, kind = drawn(number, dice), list(MOST)[number % len(MOST)]
    outcome, expected = Outcome(f"io:{number}", f"failing {kind}"), straight.of(run)
    while not outcome.deaths and not outcome.wrong:  # repeat if no call failed
        folder = new_folder(dice)
        try:
            _fail_and_finish(kind, dice, folder, run, expected, outcome)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _fail_and_finish(kind: str, dice: random.Random, folder: Path, run: Run, expected: Path, outcome: Outcome) -> None:
    resumes = dice.random() < (0.9 if kind == "read" else 0.4)
    if resumes:
        code = spawn(Attempt("0 workers", "micro-batch", dice.randint(8, UPDATES * 4)), folder, run)
        if code != -signal.SIGKILL:
            failed(outcome, code, folder, "before any fault: ")
            return
    fault = Fault(kind, _nth(kind, dice), dice.choice((errno.EIO, errno.ENOSPC)), dice.random() < 0.5)
    attempt = Attempt(
        dice.choice(WORKERS), fault=fault, background=dice.random() < 0.7, on_failure=dice.choice(("stop", "warn"))
    )
    log = folder / "stderr.log"
    before = log.stat().st_size if log.exists() else 0
    code = spawn(attempt, folder, run)
    paths = (folder / "failed").read_text().splitlines()
    if not paths:
        return
    outcome.deaths += 1
    said = log.read_bytes()[before:].decode("utf-8", "replace")
    if code == HANG or (code != 0 and not (code == 1 and names_file(said, paths, folder / "run"))):
        failed(outcome, code, folder, f"{fault} on {paths[0]}: ")
        return
    check_folder(folder, outcome)
    if not outcome.wrong:
        finish(Attempt(dice.choice(WORKERS)), folder, run, expected, outcome)
    if outcome.wrong:
        outcome.wrong = f"{fault} on {paths[0]}: {outcome.wrong}"


def _nth(kind: str, dice: random.Random) -> int:
    """Draw the number of the call that fails: often one of the first, which open and lock the run."""
    return dice.randint(1, dice.choice((10, MOST[kind])))


def names_file(said: str, paths: list[str], run: Path) -> bool:
    """Whether the message of the last error, below its traceback, names a failed file, or its checkpoint."""
    message = said.rpartition('\n  File "')[2]
    return any(str(named) in message for path in paths for named in _names(Path(path), run))


def _names(path: Path, run: Path) -> Iterator[Path]:
    """Yield a path, the final one if it is temporary, and the folder of checkpoints if it is in there."""
    yield path
    if match := TEMPORARY.fullmatch(path.name):
        yield path.with_name(match[1] or "weights.safetensors")
    if path.relative_to(run).parts[:1] == ("checkpoints",):
        yield run / "checkpoints"
