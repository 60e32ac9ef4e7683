"""What the verbs share that run a recipe in processes of their own and compare what those did."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from forge.errors import ForgeError


@contextmanager
def folder_for(keep: str | None, verb: str) -> Iterator[Path]:
    """An empty folder: the one to keep, which must not be in use, or one that is removed at the end."""
    if keep is None:
        folder = Path(tempfile.mkdtemp(prefix=f"forge-{verb}-"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    folder = Path(keep)
    if folder.exists() and not folder.is_dir():
        raise ForgeError(f"--keep: {keep!r} is a file; name a new or an empty folder.")
    if folder.is_dir() and any(folder.iterdir()):
        raise ForgeError(f"--keep: the folder {keep!r} is not empty; name a new or an empty one.")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def run_verb(
    verb: str, args: Namespace, words: Sequence[str], environment: Mapping[str, str], expected: int = 0
) -> None:
    """Run the verb on the same target in a process of its own; another end than the expected one is an error here."""
    command = [sys.executable, "-m", "forge", verb, *same_target(args), *words]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode != expected:
        said = re.sub("^error: ", "", (done.stderr or done.stdout).strip(), flags=re.MULTILINE)
        raise ForgeError(f"This run ended with exit code {done.returncode}:\n{said}")


def same_target(args: Namespace) -> list[str]:
    """The arguments that name the same recipe, task, data and stack again."""
    named = [("--recipe", args.recipe), ("--data", args.data), *(("-p", name) for name in args.plugins)]
    return [args.target, *args.overrides, *(word for flag, value in named if value for word in (flag, value))]
