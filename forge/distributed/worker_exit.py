"""Exit codes of workers that ended by a signal or with a verdict, passed to the `forge … --nproc` that started them.

The elastic agent treats every exit code but 0 as a failure: it would end the other ranks, perhaps while they save, and
restart all of them. So such a worker exits with 0 and writes its true code to a file.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from forge.errors import Interrupted

FOLDER = "FORGE_OUTCOME"
"""The environment variable that names the folder, set for workers of `forge … --nproc` only."""


def exit_code(code: int, message: str = "", final: bool = False) -> int:
    """Return the exit code for this process: `code`, or 0 with the code in a file if the agent must not see it, as
    after a signal, or for a `final` result of all ranks that a restart would only repeat."""
    folder = os.environ.get(FOLDER)
    if folder is None or not (final or code == Interrupted.EXIT_CODE or code > 128):
        return code
    name = f"rank-{os.environ.get('RANK', '0')}.json"
    (Path(folder) / name).write_text(json.dumps({"code": code, "message": message}))
    return 0


def read_exit_code(folder: Path) -> int | None:
    """Return the exit code of workers that have left one, or None."""
    codes = [json.loads(path.read_text())["code"] for path in sorted(folder.glob("rank-*.json"))]
    return min(codes, default=None)


def is_first_to_fail() -> bool:
    """Whether this worker is the first of its host to fail, so that one of several prints a common mistake.

    Works before the ranks have joined: the elastic agent gives all its workers one folder for their errors.
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
