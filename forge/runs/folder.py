"""Read a run folder: what ran, how it went and what it left.

Nothing in it is trusted: files may be missing, torn by a kill, or written by a stranger. Unreadable parts are skipped;
only regular files are read, links inside the folder are not followed, and sizes are bounded.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from forge.errors import RecipeError
from forge.progress import Counters
from forge.runs.lock import is_held
from forge.util.files import is_regular, read_regular, regular_only
from forge.version import newer

STATUSES = ("running", "finished", "interrupted", "failed", "killed", "unknown")
ATTEMPTS = "lives.json"
"""Exists once a run has been resumed: see forge/runs/attempts.py."""
JOB = "FORGE_JOB"
"""The variable in which a launcher names the job that a run is part of: slurm:1234."""
FORMAT = {"format": "forge-run", "version": 1}
"""In the card: the version of the whole folder, so of metrics.jsonl, end.json and the other files beside it too."""
GROUP = "group.json"
"""In a folder of runs that belong together: see forge/runs/group.py."""
COUNTERS = ("update", "epoch", "sample", "time")
MOST_BYTES = 64 * 2**20
"""The largest file that is read as a whole."""
MOST_LOG_BYTES = 512 * 2**20
"""As much of a log is read; a line has at most MOST_BYTES."""
DEEPEST = 50
"""Levels of nesting; forge writes far fewer."""


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint found by its name, not verified."""

    name: str
    update: int
    bytes: int
    marks: tuple[str, ...]
    "Links to it: latest, best."


@dataclass(frozen=True)
class BestMetric:
    """The metric that the checkpoint `best` was kept for."""

    monitor: str
    mode: str
    update: int
    value: float


class RunFolder:
    """One run, read lazily."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    @property
    def name(self) -> str:
        """The folder with its group: quickstart/20260101-120000-abcd."""
        return "/".join(self.path.absolute().parts[-2:])

    # -- files --------------------------------------------------------------------------------------------------------

    @cached_property
    def card(self) -> dict[str, Any]:
        found = read_object(self.path / "card.json")
        if line := newer(found.get("version"), FORMAT["version"], str(self.path)):
            warnings.warn(line, stacklevel=3)
        return found

    @cached_property
    def end(self) -> dict[str, Any]:
        """The record of the last attempt's end; empty while it runs, and after a kill."""
        found = read_object(self.path / "end.json")
        of_earlier_attempt = self.card and found.get("started") not in (None, self.card.get("started"))
        return {} if of_earlier_attempt else found

    @cached_property
    def attempts(self) -> list[dict[str, Any]]:
        """The records of its attempts; empty if the run was never resumed."""
        found = _list(read_object(self.path / ATTEMPTS).get("lives"))
        return [record for record in found if isinstance(record, dict)]

    @cached_property
    def spans(self) -> dict[str, Any]:
        """Where its time went: see forge/spans."""
        return read_object(self.path / "spans.json")

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The complete lines of metrics.jsonl."""
        return [line for line in _read_lines(self.path / "metrics.jsonl") if _whole(line, "update")]

    @cached_property
    def texts(self) -> list[dict[str, Any]]:
        found = _read_lines(self.path / "texts.jsonl")
        return [line for line in found if isinstance(line.get("name"), str) and isinstance(line.get("text"), str)]

    @cached_property
    def recipe_text(self) -> str:
        return _read_text(self.path / "config.yaml")

    # -- what ran -----------------------------------------------------------------------------------------------------

    @property
    def recipe(self) -> str:
        return _word(self.card.get("recipe"))

    @property
    def task(self) -> str:
        return _word(as_dict(self.card.get("task")).get("class"))

    @property
    def subject(self) -> str:
        """The recipe, or the task if the recipe names no task."""
        names_task = self.card.get("group") in (None, self.recipe)
        return (self.recipe if names_task else "") or self.task or self.recipe

    @property
    def stack(self) -> list[dict[str, Any]]:
        """The plugins, outermost first."""
        return [plugin for plugin in _list(self.card.get("stack")) if isinstance(plugin, dict)]

    @property
    def costs(self) -> list[dict[str, Any]]:
        """The rows of what plugins cost, one per hook."""
        return [row for row in _list(as_dict(self.spans.get("hooks")).get("rows")) if isinstance(row, dict)]

    @property
    def resume(self) -> str | None:
        """What is known of resuming it: "rehearsed, exact", "differs: ..."; None if nothing."""
        return _word(self.card.get("resume")) or None

    @property
    def planned(self) -> int | None:
        return self.card["planned_updates"] if _whole(self.card, "planned_updates") else None

    @cached_property
    def started(self) -> float:
        """Start of the last attempt, in seconds since 1970."""
        try:
            return datetime.strptime(str(self.card.get("started")), "%Y-%m-%d %H:%M:%S %z").timestamp()
        except (ValueError, OverflowError):
            return _changed(self.path / "card.json") or _changed(self.path / "metrics.jsonl") or 0.0

    # -- how it went --------------------------------------------------------------------------------------------------

    @cached_property
    def status(self) -> str:
        """One of STATUSES; "killed" if no process holds the run and its end was not recorded."""
        held = is_held(self.path)
        if held:
            return "running"
        recorded = self.end.get("status")
        if recorded in STATUSES:
            return str(recorded)
        if held is None:
            return "unknown"
        weights, card = _changed(self.path / "weights.safetensors"), _changed(self.path / "card.json")
        return "finished" if weights and weights >= card else "killed"

    @property
    def reason(self) -> str:
        return _word(self.end.get("reason"))

    @property
    def updates(self) -> int:
        return self._count("updates", "update")

    @property
    def epochs(self) -> int:
        return self._count("epochs", "epoch")

    @property
    def samples(self) -> int:
        return self._count("samples", "sample")

    @property
    def counters(self) -> Counters:
        """How far its training has come."""
        return Counters(update=self.updates, epoch=self.epochs, sample=self.samples)

    def _count(self, at_end: str, in_line: str) -> int:
        if _whole(self.end, at_end):
            return self.end[at_end]
        return max((line[in_line] for line in self.records if _whole(line, in_line)), default=0)

    @cached_property
    def seconds(self) -> float:
        """Training time over all attempts, each of which starts its clock at zero."""
        at_end = _seconds(self.end.get("seconds")) or 0.0
        if at_end and self.resumed_from is None:
            return at_end  # one attempt: no line needs to be read
        total = last = 0.0
        for line in self.records:
            now = _seconds(line.get("time"))
            if now is not None:
                if now < last:
                    total += last
                last = now
        return total + (max(last, at_end) if self._own_lines else last + at_end)

    @property
    def resumed_from(self) -> int | None:
        """The update that the last attempt resumed from; None for a first attempt."""
        return self.card["resumed_from"] if _whole(self.card, "resumed_from") else None

    @property
    def _own_lines(self) -> list[dict[str, Any]]:
        """The lines of the last attempt so far."""
        return [line for line in self.records if line["update"] > (self.resumed_from or 0)]

    @property
    def rate(self) -> float | None:
        """Samples per second overall; None if no time was recorded."""
        return self.samples / self.seconds if self.seconds else None

    @cached_property
    def series(self) -> dict[str, list[tuple[int, float]]]:
        """(update, value) of every metric; NaN for values that were not finite."""
        return _series(self.records)

    @cached_property
    def final(self) -> dict[str, float]:
        """The latest value of every metric that the last attempt still logged, from end.json if possible: that spares
        reading every line."""
        ended = self.end.get("metrics")
        if not isinstance(ended, dict):
            latest = {name: points[-1][1] for name, points in self.series.items()}
            return current_metrics(latest, _series(self._own_lines)) if self.resumed_from else latest
        found = {name: _number(value) for name, value in ended.items() if _is_number(value)}
        if _changed(self.path / "metrics.jsonl") >= _changed(self.path / "end.json"):  # a test may have followed
            found = {name: points[-1][1] for name, points in _series(self._later_lines).items()} | found
        return found

    @property
    def _later_lines(self) -> list[dict[str, Any]]:
        """The lines of the last update, a test after the fit included."""
        return list(takewhile(lambda line: line["update"] == self.updates, reversed(self.records)))[::-1]

    # -- what it left -------------------------------------------------------------------------------------------------

    @cached_property
    def checkpoints(self) -> list[ListedCheckpoint]:
        """The checkpoints, oldest first."""
        folder, found, marks = self.path / "checkpoints", [], {}
        for entry in _entries(folder):
            if entry.is_symlink():
                marks.setdefault(os.readlink(entry), []).append(entry.name)
            elif entry.name.startswith("update-") and entry.name[7:].isdecimal() and entry.is_dir():
                found.append(entry.name)
        return [
            ListedCheckpoint(name, int(name[7:]), _size(folder / name), tuple(sorted(marks.get(name, ()))))
            for name in sorted(found, key=lambda name: int(name[7:]))
        ]

    @cached_property
    def best(self) -> BestMetric | None:
        """The metric recorded in the checkpoint `best`, a link to another checkpoint of this run."""
        marked = [checkpoint.name for checkpoint in self.checkpoints if "best" in checkpoint.marks]
        if not marked:
            return None
        plugins = as_dict(read_object(self.path / "checkpoints" / marked[0] / "state.json").get("plugins"))
        for state in plugins.values():
            match state:
                case {
                    "monitor": str(metric),
                    "mode": str(mode),
                    "best": [{"update": int(at), "value": float(best)}, *_],
                }:
                    return BestMetric(metric, mode, at, best)
        return None


def recipe_section(run: RunFolder, name: str) -> dict[str, Any]:
    """Return a section of the recipe in config.yaml, with the values that were given; empty if it cannot be read."""
    from forge.config.guard import parse

    with suppress(RecipeError):
        return as_dict(as_dict(parse(run.recipe_text, "config.yaml").values).get(name))
    return {}


def is_run(path: Path) -> bool:
    """Whether a folder holds a card or metrics."""
    return any(is_regular(path / name) for name in ("card.json", "metrics.jsonl"))


def is_group(path: Path) -> bool:
    """Whether a folder holds runs that belong together."""
    return is_regular(path / GROUP) and not is_run(path)


def find_runs(folder: Path, depth: int = 4, follow: bool = True) -> Iterator[Path]:
    """Yield every run folder in a folder, itself included; runs are not nested.

    A link may lead to a run, or to a folder of runs on another disk, but not further: it could lead anywhere.
    """
    if is_run(folder):
        yield folder
    elif depth:
        for entry in sorted(_entries(folder), key=lambda entry: entry.name):
            is_link = entry.is_symlink()
            if entry.name.startswith(".") or (is_link and not follow) or not _is_folder(entry):
                continue
            yield from find_runs(Path(entry.path), 1 if is_link else depth - 1, follow and not is_link)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _read_text(path: Path) -> str:
    try:
        return read_regular(path, MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def read_object(path: Path) -> dict[str, Any]:
    try:
        found = as_dict(json.loads(_read_text(path)))
    except (ValueError, RecursionError):
        return {}
    return found if is_modest(found) else {}


def is_modest(tree: Any, most: int = MOST_BYTES) -> bool:
    """Whether a tree has at most `most` parts and DEEPEST levels: YAML can contain itself, or repeat a part."""
    level, count = [tree], 0
    for _ in range(DEEPEST):
        count += len(level)
        if count > most:
            return False
        inside = (part for parent in level if isinstance(parent, (dict, list)) for part in _parts(parent))
        level = list(islice(inside, most))
        if not level:
            return True
    return False


def _read_lines(path: Path) -> list[dict[str, Any]]:
    found, left = [], MOST_LOG_BYTES
    try:
        with open(path, "rb", opener=regular_only) as file:
            while left > 0 and (line := file.readline(min(left, MOST_BYTES))):
                left -= len(line)
                try:
                    found.append(as_dict(json.loads(line.decode("utf-8", "replace"))))
                except (ValueError, RecursionError):
                    continue
    except OSError:
        pass
    return found


def _series(lines: Iterable[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name not in COUNTERS and _is_number(value):
                found.setdefault(name, []).append((line["update"], _number(value)))
    return found


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _changed(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _size(folder: Path) -> int:
    return sum(entry.stat(follow_symlinks=False).st_size for entry in _entries(folder))


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _parts(parent: dict[str, Any] | list[Any]) -> list[Any]:
    return list(parent.values()) if isinstance(parent, dict) else parent


def _seconds(value: Any) -> float | None:
    """A plausible time, from a millisecond to a few thousand years; None for others."""
    seconds = _number(value) if isinstance(value, (int, float)) else math.nan
    return (seconds if seconds >= 1e-3 else 0.0) if 0 <= seconds < 1e11 else None


def _word(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _whole(line: dict[str, Any], name: str) -> bool:
    return type(line.get(name)) is int and 0 <= line[name] < 2**53


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (int, float))


def _number(value: Any) -> float:
    """Return a float; null stands for a value that was not finite."""
    try:
        return math.nan if value is None else float(value)
    except OverflowError:
        return math.nan


EVALUATIONS = ("val", "test")


def current_metrics(latest: Mapping[str, Any], logged: Collection[str]) -> dict[str, Any]:
    """Return the metrics without those that are no longer logged.

    A resumed run keeps all of them, so that it ends like one that was never interrupted; its records need not. A name
    that this attempt has not logged is dropped if others of its kind were logged: its plugin was removed, say. Before
    the first validation of an attempt, the values of the last one still hold.
    """
    seen = {kind_of(name) for name in logged}
    return {name: value for name, value in latest.items() if name in logged or kind_of(name) not in seen}


def kind_of(name: str) -> str:
    """Return the log a metric belongs to: val, test, or train for everything logged with updates."""
    head = name.partition("/")[0]
    return head if head in EVALUATIONS else "train"
