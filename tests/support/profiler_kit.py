"""What the tests of profiler share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forge.testing import TinyTask

SHORT: dict[str, Any] = {"wait": 2, "warmup": 1, "active": 2}
"""Updates 3 and 4 are recorded."""


def traces(folder: Path) -> list[Path]:
    return sorted((folder / "profile").glob("*.pt.trace.json"))


def events_of(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())["traceEvents"]


def ranges(file: Path) -> list[tuple[str, float, float]]:
    """(name, start, end) of every range that is not torch's own, in order."""
    found = [event for event in events_of(file) if event.get("cat") == "user_annotation"]
    own = [e for e in found if not e["name"].startswith("Optimizer.")]
    return sorted(((e["name"], e["ts"], e["ts"] + e["dur"]) for e in own), key=lambda r: (r[1], -r[2]))


def summary(folder: Path) -> dict[str, Any]:
    """What was recorded last."""
    return json.loads((folder / "profile" / "summary.json").read_text())["recordings"][-1]


class Breaks(TinyTask):
    """Training fails at an update."""

    def __init__(self, at: int, error: BaseException | None = None):
        super().__init__()
        self.at, self.error = at, error or ZeroDivisionError("broken")

    def training_step(self, batch: Any) -> Any:
        assert self.trainer is not None
        if self.trainer.progress.update == self.at:
            raise self.error
        return super().training_step(batch)


def span(cat: str, name: str, start: float, end: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    """An event of a trace written by hand, in microseconds."""
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "pid": 1, "tid": tid, "args": args}


def micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)
