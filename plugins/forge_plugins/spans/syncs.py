"""Name the lines that make the host wait for the CUDA device in an update, and the plugin or task that they run for."""

from __future__ import annotations

import linecache
import threading
import warnings
from collections import Counter
from types import FrameType
from typing import Any

from forge.contract.stack import CORE, TASK
from forge.diagnose import syncs
from forge.spans import record
from forge.util.frames import folder_of, is_library
from forge.util.text import short_path

LISTENING = (warnings.__file__, syncs.__file__, __file__)
"""Files through which a wait is heard."""


class NamedSyncs(syncs.Listener):
    """Counts waits by (who, file, line). What a validation, a log or a checkpoint reads is its work, and so is what
    forge reads between updates."""

    def __init__(self) -> None:
        super().__init__(self._count)
        self.found: Counter[tuple[str, str, int]] = Counter()

    def _count(self, frame: FrameType | None) -> None:
        file, line, total = "", 0, None
        while frame is not None and total is None:
            code = frame.f_code
            if not file and code.co_filename not in LISTENING and not is_library(code.co_filename, ("torch",)):
                file, line = code.co_filename, frame.f_lineno
            if code.co_filename == record.__file__:
                total = record.total_of(frame)
            frame = frame.f_back
        if total is None and threading.current_thread() is not threading.main_thread():
            self.found["the backward pass", file, line] += 1  # autograd runs it in a thread of its own
        elif total is None and not file.startswith(folder_of("forge")):
            self.found["the data", file, line] += 1
        elif total is not None and not total.aside:
            name = {CORE: "the task", TASK: "the task"}.get(total.plugin, f"plugin {total.plugin!r}")
            self.found[f"{name} in {total.hook.removeprefix('forge_')}", file, line] += 1

    def rows(self, updates: int) -> list[dict[str, Any]]:
        """Return every place as plain data, the most frequent first."""
        return [
            {
                "who": who,
                "file": short_path(file),
                "line": line,
                "code": linecache.getline(file, line).strip(),
                "per_update": count / max(updates, 1),
            }
            for (who, file, line), count in self.found.most_common()
        ]
