"""Damaged checkpoints, which must be detected before use."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from benchmarks.fault_kinds.outcomes import Outcome, Straight, new_folder, wrong
from benchmarks.fault_kinds.victim import drawn
from forge.checkpoint import Checkpoints


def damaged_file(number: int, straight: Straight) -> Outcome:
    """Damage the newest checkpoint of a finished run: it must be detected, and the previous one used."""
    dice = random.Random(f"damage:{number}")
    expected = straight.of(drawn(number, dice))
    folder = new_folder(dice)
    try:
        shutil.copytree(expected / "run" / "checkpoints", folder / "checkpoints", symlinks=True)
        before, newest = Checkpoints(folder / "checkpoints").all()[-2:]
        victim = dice.choice(sorted(path for path in newest.iterdir()))
        how = dice.choice(("flip", "truncate", "zero", "delete"))
        outcome = Outcome(f"damage:{number}", f"{how}")
        damage(victim, how, dice)
        found = Checkpoints(folder / "checkpoints").newest_valid()
        if found is None or found.path.name != before.name:
            return wrong(outcome, "missed", f"{how} of {victim.name}: took {found and found.path.name}")
        return outcome
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def damage(path: Path, how: str, dice: random.Random) -> None:
    """Damage a file so that its content certainly changes."""
    if how == "delete":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif how == "truncate":
        del data[dice.randrange(len(data)) :]
    else:
        filled = [i for i, byte in enumerate(data) if byte]
        start = dice.choice(filled)
        stop = min(start + dice.randint(1, 4096), len(data))
        data[start:stop] = bytes(stop - start)
    path.write_bytes(bytes(data))
