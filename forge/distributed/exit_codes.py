"""Outcome: how a worker tells the `forge … --nproc` that started it that it left because of a signal.

The elastic agent takes every exit code but 0 for a failure: it would end the other ranks, in the middle of their saving
perhaps, and start all of them again. So a worker that a signal has ended leaves with 0, and its true code in a file.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from forge.errors import Interrupted

FOLDER = "FORGE_OUTCOME"
"""The environment variable that names the folder; it is set for workers of `forge … --nproc` only."""


def exit_code(code: int, message: str = "") -> int:
    """The exit code of this process: as given, unless forge's own agent must not see it."""
    folder = os.environ.get(FOLDER)
    if folder is None or not (code == Interrupted.EXIT_CODE or code > 128):
        return code
    name = f"rank-{os.environ.get('RANK', '0')}.json"
    (Path(folder) / name).write_text(json.dumps({"code": code, "message": message}))
    return 0


def read_exit_code(folder: Path) -> int | None:
    """The code that workers left with because of a signal; None where none did."""
    codes = [json.loads(path.read_text())["code"] for path in sorted(folder.glob("rank-*.json"))]
    return min(codes, default=None)


def is_first_to_fail() -> bool:
    """Whether this worker is the first of its host to fail; of several that make one mistake, one prints it.

    For what goes wrong before ranks can talk: the elastic agent gives all its workers one folder for their errors.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    with suppress(OSError):
        folder = Path(file).parent.parent
        folder.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(folder / "forge-first", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
    return True
