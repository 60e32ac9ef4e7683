"""Find data: in the recipe's folder, in $FORGE_DATA, or in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path


def data_root(root: str | None, folder: str) -> Path:
    """Return the path of `folder`: in `root` (the recipe's `data.root`) if given, in $FORGE_DATA if it exists there,
    else in the cache for downloads."""
    if root is not None:
        return Path(root).expanduser() / folder
    given = os.environ.get("FORGE_DATA")
    if given and (place := Path(given).expanduser() / folder).is_dir():
        return place
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "forge" / folder
