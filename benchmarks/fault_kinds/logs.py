"""Damaged logs between two attempts: the run resumes, and keeps every line that can be read."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

from benchmarks.fault_kinds.outcomes import Outcome, Straight, check_folder, failed, finish, new_folder, wrong
from benchmarks.fault_kinds.victim import UPDATES, WORKERS, Attempt, drawn, spawn
from forge.checkpoint import Checkpoints
from forge_plugins.jsonl import METRICS, TEXTS

HOW = ("bad byte", "torn line", "deep line", "garbage", "cut end", "no file")
"""The last one replaces the log by a link, a pipe or a folder."""
DEEP = 100_000


def damaged_log(number: int, straight: Straight) -> Outcome:
    """Kill a run, damage its logs, and let it finish."""
    dice = random.Random(f"log:{number}")
    run, how = drawn(number, dice), HOW[number % len(HOW)]
    outcome = Outcome(f"log:{number}", f"log, {how}")
    expected, folder = straight.of(run), new_folder(dice)
    try:
        code = spawn(Attempt(dice.choice(WORKERS), "micro-batch", dice.randint(18, UPDATES * 4)), folder, run)
        if code != -signal.SIGKILL:
            return failed(outcome, code, folder)
        outcome.deaths += 1
        names = dice.choice(([METRICS], [TEXTS], [METRICS, TEXTS]))
        for name in names:
            damage_log(folder / "run" / name, how, dice)
        wanted = {name: lines_to_keep(name, expected, folder) for name in (METRICS, TEXTS)}
        check_folder(folder, outcome)
        finish(Attempt(dice.choice(WORKERS)), folder, run, expected, outcome)
        for name in [] if outcome.wrong or how == "no file" else (METRICS, TEXTS):
            if lines_of(folder / "run" / name) != wanted[name]:
                wrong(outcome, "lost", f"{how} in {', '.join(names)}: {name} has other lines than those that were good")
        return outcome
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def damage_log(path: Path, how: str, dice: random.Random) -> None:
    """Damage a log, if the run has written it."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    at = dice.randrange(len(lines))
    if how == "bad byte":
        lines[at] = _with(lines[at], dice.randrange(len(lines[at]) - 1), dice.choice((b"\xff", b"\x80", b"\x00")))
    elif how == "torn line":
        del_from = dice.randrange(1, len(lines[at]) - 2)
        lines[at] = lines[at][:del_from] + b"\n" * dice.randint(0, 1)
    elif how == "deep line":
        lines.insert(at, dice.choice((b"[" * DEEP, b'{"update":' * DEEP, b'{"update": 1, "x": ' + b"[" * DEEP)) + b"\n")
    elif how == "garbage":
        lines.insert(at, dice.randbytes(dice.randint(1, 5000)) + b"\xfe\n")
    elif how == "cut end":
        lines[-1] = lines[-1][: dice.randrange(1, len(lines[-1]) - 1)]
    else:
        _replace(path, dice)
        return
    path.write_bytes(b"".join(lines))


def _with(line: bytes, at: int, byte: bytes) -> bytes:
    return line[:at] + byte + line[at + 1 :]


def _replace(path: Path, dice: random.Random) -> None:
    path.unlink()
    kind = dice.choice(("link", "pipe", "folder"))
    if kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


def lines_to_keep(name: str, expected: Path, folder: Path) -> list[dict[str, Any]]:
    """Return what the log must hold at the end: its good lines up to the checkpoint, then those of the straight run."""
    found = Checkpoints(folder / "run" / "checkpoints").newest_valid()
    update = 0 if found is None else found.update
    right = lines_of(expected / "run" / name)
    good = [line for line in lines_of(folder / "run" / name, strict=False) if line in right]
    return [line for line in good if line["update"] <= update] + [line for line in right if line["update"] > update]


def lines_of(path: Path, strict: bool = True) -> list[dict[str, Any]]:
    """Return the lines of a log without their times; damaged ones are errors if `strict`."""
    found = []
    for line in path.read_bytes().split(b"\n") if path.is_file() and not path.is_symlink() else ():
        try:
            if line:
                found.append({key: value for key, value in json.loads(line.decode()).items() if key != "time"})
        except (ValueError, RecursionError, AttributeError):
            if strict:
                return []
    return found
