"""Results of a recording: files in the run folder, and a report in the log."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import forge
from forge.contract.plugin import plugin_options
from forge.util.text import short_path
from forge_plugins.profiler import memory, timeline
from forge_plugins.profiler.recording import Recording
from forge_plugins.profiler.recording_report import Report
from forge_plugins.profiler.trace import Trace, analyse
from forge_plugins.profiler.verdict import Setup, judge, measured, provided

logger = logging.getLogger("forge")

KINDS = {".json": "trace", ".pickle": "memory snapshot, for https://pytorch.org/memory_viz", ".svg": "memory timeline"}


def conclude(trainer: forge.Run, recording: Recording, unrecorded: float | None, wanted: Any) -> Report:
    """Write the trace and its files, and return the report. `unrecorded`: seconds of an update without recording;
    `wanted`: the options of the profiler."""
    device = trainer.env.device
    own = None if trainer.run_dir is None else trainer.run_dir / "profile"
    if own is not None:
        own.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() if own is None else nullcontext(own) as place:  # a trace is a file
        folder = Path(place)
        stem = f"rank{trainer.env.rank}.{recording.first}"  # WORKER.NUMBER is how TensorBoard reads such names
        if wanted.memory and device.type == "cuda":
            memory.dump(folder / f"{stem}.memory-snapshot.pickle")
        file = folder / f"{stem}.pt.trace.json"
        document = recording.write(file)
        trace = analyse(document["traceEvents"], recording.data_waits)
        points = timeline.points_of(trace, device.type, device.index)
        if wanted.memory and points:
            _draw_memory(points, trace, document, file, str(device))
        kept = sorted(folder.glob(f"{stem}.*")) if own is not None else []
    found = verdict = None
    if device.type in ("cpu", "cuda"):
        found = measured(trace, device.type, recording.updates, unrecorded, recording.ran)
        verdict = judge(found, setup_of(trainer, trace))
    return Report(
        device=str(device) if device.type != "cuda" else f"{device} ({torch.cuda.get_device_name(device)})",
        first=recording.first,
        updates=recording.updates,
        trace=trace,
        measured=found,
        verdict=verdict,
        top=wanted.top,
        peak=max((size for _, size in points), default=None),
        files=tuple(f"{KINDS[path.suffix]}: {short_path(path)}" for path in kept),
    )


def _draw_memory(points: timeline.Points, trace: Trace, document: dict[str, Any], file: Path, device: str) -> None:
    """Add memory use over time as a track of the trace, and write a picture beside it."""
    name = f"memory in use on {device}"
    document["traceEvents"] += timeline.counters(points, document["traceEvents"], trace.begin, name)
    file.write_text(json.dumps(document))
    title = f"{name}, more than when the recording began" if device == "cpu" else name
    picture = file.with_name(file.name.replace(".pt.trace.json", ".memory-timeline.svg"))
    picture.write_text(timeline.picture(points, trace.ranges, title))


def publish(trainer: forge.Run, reports: list[Report]) -> None:
    """Log the newest report, and write all of them to the run folder."""
    show(reports[-1].text())
    if trainer.run_dir is not None:
        folder = trainer.run_dir / "profile"
        (folder / "summary.md").write_text("\n".join(report.markdown() for report in reports))
        plain = {"recordings": [report.plain() for report in reports]}
        (folder / "summary.json").write_text(json.dumps(plain, indent=1) + "\n")


def show(text: str) -> None:
    """Log the report, or print it to stderr if the log is off: it is the purpose of the plugin."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", text)
    else:
        print(text, file=sys.stderr)


def explain(trainer: forge.Run, error: BaseException) -> None:
    """Explain an out-of-memory error by a note on it and a file in the run folder."""
    text = memory.usage(trainer)
    error.add_note(text)  # before anything that may fail
    if trainer.run_dir is None:
        return
    folder = trainer.run_dir / "profile"
    file = folder / f"rank{trainer.env.rank}.out-of-memory.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n\n{error}\n")
        error.add_note(f"This report, with torch's message: {short_path(file)}")
        if trainer.env.device.type == "cuda":
            memory.dump(file.with_suffix(".pickle"))
            error.add_note(f"{KINDS['.pickle'].capitalize()}: {short_path(file.with_suffix('.pickle'))}")
    except Exception as failed:  # a snapshot needs memory itself
        error.add_note(f"Not everything could be written to {short_path(folder)}: {type(failed).__name__}: {failed}")


def setup_of(trainer: forge.Run, trace: Trace) -> Setup:
    """Return the settings of the run that the verdict considers."""
    strategy = next((plugin for plugin in trainer.stack if "strategy" in plugin.provides), None)
    groups = [group for optimizer in trainer.optimizers.values() for group in optimizer.param_groups]
    loader: Any = trainer.feed.loader
    while hasattr(loader, "loader"):
        loader = loader.loader
    return Setup(
        provided=provided(trainer.stack),
        workers=getattr(loader, "num_workers", None),
        fused=all(group.get("fused") for group in groups),
        convolutions=any(operator.name == "aten::convolution" for operator in trace.operators),
        full_float32=trainer.env.device.type == "cuda" and torch.get_float32_matmul_precision() == "highest",
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        strategy="" if strategy is None else strategy.name,
        options={} if strategy is None else plugin_options(strategy),
    )
