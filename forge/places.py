"""Places: paths as the user would type them."""

from __future__ import annotations

import os
from pathlib import Path


def near(path: str | Path) -> str:
    """A path from where the user stands where it is below the current folder, else as it is."""
    relative = os.path.relpath(path)
    return str(path) if Path(relative).parts[:1] == ("..",) else relative
