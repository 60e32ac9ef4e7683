"""Places: paths and programs as the user would type them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def near(path: str | Path) -> str:
    """A path from where the user stands where it is below the current folder, else as it is."""
    relative = os.path.relpath(path)
    return str(path) if Path(relative).parts[:1] == ("..",) else relative


def command(name: str) -> str:
    """How to call a program of this environment: by name where the shell finds this very one, else by its path."""
    here = Path(sys.executable).parent / name
    found = shutil.which(name)
    if not here.exists() or (found and Path(found).resolve() == here.resolve()):
        return name
    return near(here)
