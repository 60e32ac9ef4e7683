"""RunGroup: runs that belong together (other seeds, other folds of the data), in one folder, read as one run."""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from forge.errors import CheckpointError, ForgeError
from forge.runs.directions import mode_of
from forge.runs.folder import GROUP, ListedCheckpoint, RunFolder, as_dict, find_runs, is_group, is_run, read_object
from forge.runs.spread import Point, Spread, mean_curve
from forge.util.files import atomic_write, make_folder
from forge.util.text import short_path
from forge.version import newer

FORMAT = {"format": "forge-group", "version": 1}

SEED, FOLD, FOLDS = "trainer.seed", "data.fold", "data.folds"


def members(seeds: Iterable[int] = (), folds: int | None = None) -> dict[str, dict[str, int]]:
    """Return the runs of a group by name, each with the options that tell it from the others."""
    if folds is not None and folds < 2:
        raise ForgeError(f"folds is {folds}: cross-validation takes two folds or more.")
    by_seed = {f"seed-{seed}": {SEED: seed} for seed in seeds} or {"": {}}
    by_fold = {"": {}} if folds is None else {f"fold-{i}": {FOLD: i, FOLDS: folds} for i in range(folds)}
    found = {
        "-".join(filter(None, (one, other))): {**seeded, **folded}
        for one, seeded in by_seed.items()
        for other, folded in by_fold.items()
    }
    if found == {"": {}}:
        raise ForgeError("A group has seeds, or folds, or both: name some.")
    return found


class RunGroup(RunFolder):
    """A group of runs: what they have in common, and their results over all runs that are finished."""

    @cached_property
    def record(self) -> dict[str, Any]:
        """What group.json says: the command, the job, and the runs by name."""
        found = read_object(self.path / GROUP)
        if line := newer(found.get("version"), FORMAT["version"], str(self.path)):
            warnings.warn(line, stacklevel=3)
        return found

    @property
    def members(self) -> dict[str, dict[str, int]]:
        """The runs that belong to the group, also those that have not begun; a stranger's file is not trusted."""
        named = as_dict(self.record.get("runs"))
        return {
            name: {key: value for key, value in as_dict(options).items() if type(value) is int}
            for name, options in named.items()
            if name == Path(name).name and not name.startswith(".")
        }

    @cached_property
    def runs(self) -> list[RunFolder]:
        """The runs that have begun, in the order of the group."""
        order = list(self.members)
        found = {path.name: RunFolder(path) for path in find_runs(self.path, depth=1)}
        return [found[name] for name in sorted(found, key=lambda name: order.index(name) if name in order else -1)]

    @cached_property
    def finished(self) -> list[RunFolder]:
        return [run for run in self.runs if run.status == "finished"]

    # -- the face of a run --------------------------------------------------------------------------------------------

    @cached_property
    def card(self) -> dict[str, Any]:
        """The card of its first run, with the group's command."""
        found = dict(self.runs[0].card) if self.runs else {}
        found |= {"seed": merged([{"seed": run.card.get("seed")} for run in self.runs]).get("seed")} if found else {}
        return found | ({"command": self.record.get("command")} if self.record.get("command") else {})

    @cached_property
    def end(self) -> dict[str, Any]:
        return {}

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        return []

    @cached_property
    def status(self) -> str:
        """Running, finished if every run is; else how the first that is not ended."""
        states = [run.status for run in self.runs]
        if "running" in states or (len(self.finished) >= len(self.members) and states):
            return "running" if "running" in states else "finished"
        return next((state for state in states if state != "finished"), "interrupted")

    @property
    def progress(self) -> str:
        """ "3 finished", "2 finished, 1 failed of 5"."""
        counts = Counter(run.status for run in self.runs)
        missing = max(0, len(self.members) - len(self.runs))
        words = ", ".join(f"{count} {state}" for state, count in counts.items()) or "none begun"
        return f"{words} of {len(self.members)}" if missing or len(counts) > 1 else words

    @property
    def reason(self) -> str:
        return next((run.reason for run in self.runs if run.status != "finished"), "")

    @cached_property
    def started(self) -> float:
        return max((run.started for run in self.runs), default=0.0)

    @property
    def updates(self) -> int:
        return max((run.updates for run in self.runs), default=0)

    @property
    def epochs(self) -> int:
        return max((run.epochs for run in self.runs), default=0)

    @property
    def samples(self) -> int:
        return sum(run.samples for run in self.runs)

    @cached_property
    def seconds(self) -> float:
        return math.fsum(run.seconds for run in self.runs)

    @property
    def resumed_from(self) -> int | None:
        return None

    @cached_property
    def final(self) -> dict[str, float]:
        """The mean of every metric over the runs that are finished, as a `Spread`."""
        return spreads({run.path.name: run.final for run in self.finished})

    @cached_property
    def curves(self) -> dict[str, tuple[list[Point], list[tuple[float, float, float]]]]:
        """The mean curve of every metric, with its band, over the runs that have begun."""
        names = dict.fromkeys(name for run in self.runs for name in run.series)
        return {name: mean_curve([run.series.get(name, []) for run in self.runs]) for name in names}

    @cached_property
    def series(self) -> dict[str, list[tuple[int, float]]]:
        return {name: [(int(x), y) for x, y in points] for name, (points, _) in self.curves.items()}

    @cached_property
    def checkpoints(self) -> list[ListedCheckpoint]:
        return []


def spreads(by_run: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return each metric of some runs as a `Spread`."""
    names = dict.fromkeys(name for values in by_run.values() for name in values)
    return {
        name: Spread({run: values[name] for run, values in by_run.items() if name in values}, mode_of(name))
        for name in names
    }


def merged(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return values by name: the one that all have, or the list of those that differ."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for values in several for name in values):
        values = [values.get(name) for values in several]
        found[name] = values[0] if all(value == values[0] for value in values) else values
    return found


# -- written ----------------------------------------------------------------------------------------------------------


def open_group(home: Path, command: str, job: Sequence[str], runs: Mapping[str, Mapping[str, int]]) -> RunGroup:
    """Return the group in a folder with these runs in it, beside those that it has; refuse a folder of other runs."""
    group, job = RunGroup(home), list(job)
    if is_run(home):
        raise CheckpointError(f"{short_path(home)} is the folder of one run. Name another folder for a group.")
    then = group.record.get("job", job)
    if then != job:
        words = [word for word in (*then, *job) if (word in then) != (word in job)]
        raise CheckpointError(
            f"{short_path(home)} holds a group of other runs: {', '.join(map(str, words)) or 'the order of the words'} "
            "is not in both commands. Give the same command, or name another folder."
        )
    made = {**FORMAT, "command": group.record.get("command") or command, "job": job, "runs": {**group.members, **runs}}
    make_folder(home)
    with atomic_write(home / GROUP) as beside:
        beside.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    return RunGroup(home)


def newest_group(folder: Path, job: Sequence[str]) -> Path | None:
    """Return the newest group of the same job in a folder."""
    groups = [RunGroup(path) for path in (folder.iterdir() if folder.is_dir() else ()) if is_group(path)]
    same = [group for group in groups if group.record.get("job") == list(job)]
    return max(same, key=lambda group: (group.started, group.path.name)).path if same else None
