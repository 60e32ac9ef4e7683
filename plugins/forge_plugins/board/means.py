"""The mean of a group of runs, as one more run for TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from forge.runs.folder import is_group
from forge.runs.group import RunGroup


def groups_of(runs: Iterable[Path]) -> list[RunGroup]:
    """Return the groups of which all runs are shown, and finished: before, a mean of the past still changes."""
    shown = set(runs)
    groups = [RunGroup(home) for home in sorted({run.parent for run in shown}) if is_group(home)]
    whole = [group for group in groups if len(group.runs) > 1 and shown >= {run.path for run in group.runs}]
    return [group for group in whole if group.status == "finished"]


def write_mean(group: RunGroup, folder: Path) -> None:
    """Write the mean curve of every metric, and its deviation, into a folder as event files."""
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    event, summary = (getattr(module, name) for module, name in ((event_pb2, "Event"), (summary_pb2, "Summary")))
    writer: Any = EventFileWriter(str(folder))
    for name, (points, band) in group.curves.items():
        curves = {name: points, f"{name} (deviation)": [(x, (high - low) / 2) for x, low, high in band]}
        for tag, curve in curves.items():
            for x, y in curve:
                if math.isfinite(y):
                    value = summary.Value(tag=tag, simple_value=y)
                    writer.add_event(event(wall_time=group.started, step=int(x), summary=summary(value=[value])))
    writer.close()
