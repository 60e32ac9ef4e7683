"""Where data lies: in a folder that the recipe names, in $FORGE_DATA, or in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path


def data_root(root: str | None, folder: str) -> Path:
    """The place of `folder`: in `root` (the recipe's `data.root`) where one is given, in $FORGE_DATA where it is there,
    else in the cache, where downloads go."""
    if root is not None:
        return Path(root).expanduser() / folder
    given = os.environ.get("FORGE_DATA")
    if given and (place := Path(given).expanduser() / folder).is_dir():
        return place
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "forge" / folder
