"""Keep what was measured on disk, as JSON, for the next run."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge.util.files import atomic_write

FORM = 2
"""Format version of the files; a file of another version is ignored."""


class JsonCache:
    """Plain data by key in one file; always empty without a folder."""

    def __init__(self, folder: Path | None, file: str):
        self.path = None if folder is None else folder / file

    def get(self, key: str) -> Any:
        """Return what is known under a key, or None."""
        return self._read().get(key)

    def put(self, key: str, data: Any) -> None:
        """Add an entry to the file, which another run may have changed; ignore errors such as a full disk."""
        if self.path is None:
            return
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.path) as beside:
                beside.write_text(json.dumps({"form": FORM, "known": {**self._read(), key: data}}, indent=1))

    def _read(self) -> dict[str, Any]:
        """Read the file; a missing, damaged or incompatible one counts as empty."""
        if self.path is None:
            return {}
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        known = found.get("known") if isinstance(found, dict) and found.get("form") == FORM else None
        return known if isinstance(known, dict) else {}


def cache_folder(cache: bool | str) -> Path | None:
    """Return the folder of an option `cache`: true is $XDG_CACHE_HOME/forge or ~/.cache/forge."""
    if isinstance(cache, str):
        return Path(cache).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "forge" if cache else None
