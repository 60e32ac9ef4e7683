"""Running a verb again in a process of its own, for verbs that compare runs."""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from forge.cli import target
from forge.errors import ForgeError


@contextmanager
def folder_for(keep: str | None, verb: str) -> Iterator[Path]:
    """Yield an empty folder: `keep`, or a temporary one."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix=f"forge-{verb}-", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
        return
    folder = Path(keep)
    if folder.exists() and not folder.is_dir():
        raise ForgeError(f"--keep: {keep!r} is a file; name a new or an empty folder.")
    if folder.is_dir() and any(folder.iterdir()):
        raise ForgeError(f"--keep: the folder {keep!r} is not empty; name a new or an empty one.")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def run_verb(
    verb: str, args: Namespace, words: Sequence[str], environment: Mapping[str, str] | None = None, expected: int = 0
) -> None:
    """Run the verb on the same target in a process of its own; raise on another exit code than expected."""
    from forge.twin.start import command

    command([sys.executable, "-m", "forge", verb, *target.same_target(args), *words], environment, expected)
