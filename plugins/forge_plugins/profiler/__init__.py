"""Profiling of updates: time, memory and the bottleneck."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch.profiler import record_function

import forge
from forge.errors import RecipeError
from forge.util.oom import is_out_of_memory
from forge_plugins.profiler import memory, nvtx, results
from forge_plugins.profiler.recording import Recording, another_one
from forge_plugins.profiler.recording_report import Report
from forge_plugins.profiler.trace import BACKWARD, DATA, EVALUATION, FORWARD, STEP, TRANSFER, range_name

logger = logging.getLogger("forge")


def in_range(hook: str, name: str) -> Any:
    """Return a wrapper of a hook that opens a range, where ranges are opened."""

    def wrapper(self: Profiler) -> Generator[None, Any, Any]:
        if not self._active and not self._marks:
            return (yield)
        with self._open(name):
            return (yield)

    wrapper.__code__ = wrapper.__code__.replace(co_name=hook)  # an error is attributed to a hook by its code
    return forge.hookimpl(wrapper=True)(wrapper)


class Profiler(forge.Plugin):
    """Record updates with torch's profiler, and report their bottleneck: data, transfer, collectives, host or compute.

    After `wait` updates and `warmup` more, `active` updates are recorded, `repeat` times. The trace has the ranges
    `update N`, inside it `transfer`, `forward`, `backward` and `step`, and before it `data`, the wait for the loader.
    The log then shows the verdict with evidence and advice, the time of an update by phase, and the operators that take
    the most time; all sinks get the same as the text `profile`.

    On several ranks a table has the time of collectives by kind, with its share of an update, divided into exposed
    (nothing is computed at the same time) and overlapped: on CUDA from NCCL's kernels and all other kernels, on a CPU
    from gloo's work and the operators of all threads. Waiting for a slower rank counts as communication. Each rank
    writes its trace; the report is that of rank 0.

    With `nvtx`, all updates on a CUDA device are marked with the same ranges in NVTX, and hooks of plugins with ranges
    of their own. `repeat=0` leaves out torch's profiler, which cannot record while Nsight Systems does:
    `nsys profile -t cuda,nvtx python -m forge fit ... -p profiler profiler.nvtx=true profiler.repeat=0`.

    RUN/profile holds the trace, for https://ui.perfetto.dev, chrome://tracing and TensorBoard (with torch-tb-profiler),
    and all numbers as `summary.md` and `summary.json`. With `memory` it also holds a picture of memory use over time,
    which is a track of the trace too, and on CUDA a snapshot for https://pytorch.org/memory_viz (a pickle that torch
    writes for that page; forge never reads it). Without a run folder only the log is written.

    When CUDA memory runs out, the error lists what occupies it, the lines that allocated the most, and remedies; the
    details and a snapshot are in RUN/profile.

    The weights are bit for bit the same with and without it. Recording makes updates slower; the verdict corrects for
    that by comparison with the updates of `wait`. Outside of its windows it costs some 10 µs per update, and on CUDA,
    unless `oom` is off, about 2 µs per allocation. torch has only one profiler: if another is recording, this one
    records nothing and logs a warning.

    ::

        forge fit quickstart -p profiler trainer.max_epochs=1
        forge fit quickstart -p profiler profiler.memory=true profiler.active=3 trainer.max_epochs=1
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        wait: int = 5
        "Updates before each recording; they also show how long an update takes unrecorded."
        warmup: int = 2
        "Updates in which torch's profiler runs without recording, since its start takes time."
        active: int = 5
        "Updates to record."
        repeat: int = 1
        "Number of cycles of wait, warmup and recording."
        top: int = 12
        "Rows of each table."
        record_shapes: bool = False
        "Record the shapes of operators' inputs in the trace."
        with_stack: bool = False
        "Record the calling Python lines in the trace; slow."
        profile_memory: bool = False
        "Record the allocations of each operator."
        memory: bool = False
        "Draw memory use over time, as a picture and a track of the trace; on CUDA also a snapshot of all allocations."
        oom: bool = True
        "On CUDA, record which lines allocate memory, to report them when it runs out."
        nvtx: bool = False
        "On CUDA, mark phases of steps and hooks of plugins as NVTX ranges in all updates, for Nsight Systems."

    config: Config
    provides = ("profiler",)
    observer = True
    effects = ("files",)
    capturable = True

    def __init__(self, *first: int, **values: Any):
        super().__init__(*first, **values)
        fewest = 0 if self.config.nvtx else 1
        for name, least in (("wait", 1), ("warmup", 0), ("active", 1), ("repeat", fewest), ("top", 1)):
            value = getattr(self.config, name)
            if value < least:
                why = ": the first update of a run is like no other" if name == "wait" else ""
                raise RecipeError(f"profiler.{name} is {value}; it must be at least {least}{why}.")
        if self.config.nvtx:
            self.conflicts = {"ledger": "Both replace the implementations of hooks: run them one after the other."}
        self._marks = False
        "Whether NVTX ranges are opened."
        self._hook_ranges: nvtx.HookRanges | None = None
        self._forget()

    def _forget(self, reports: Sequence[Report] = ()) -> None:
        """Reset the state of one run."""
        self.reports = list(reports)
        "The reports of the last run."
        self._cycles, self._passed = 0, 0
        self._ends: list[float] = []
        "End times of the updates in this cycle's wait."
        self._recording: Recording | None = None
        self._active = False
        self._data: ExitStack | None = None
        self._history: memory.History | None = None
        self._failed = False

    def due(self, step: forge.Step) -> bool:
        """Never: a captured step is recorded unchanged."""
        return False

    @forge.hookimpl
    def forge_configure(self, trainer: forge.Run) -> None:
        self._marks = self.config.nvtx and nvtx.on_cuda(trainer)
        if self._marks:
            self._hook_ranges = nvtx.HookRanges(self, trainer.instrument)
            trainer.instrument = self._hook_ranges.instrument
        elif self.config.nvtx:
            logger.warning("profiler: NVTX ranges need a CUDA device; profiler.nvtx does nothing on this one.")

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        self._forget()
        self._history = memory.History(trainer.env.device)
        self._remember_the_last()
        if trainer.verb == "fit":
            self._cycles = self.config.repeat

    # -- ranges -------------------------------------------------------------------------------------------------------

    def _open(self, name: str) -> ExitStack:
        """Open a range in the trace, in NVTX, or in both; only where one of them is on."""
        ranges = ExitStack()
        if self._active:
            ranges.enter_context(record_function(name))
        if self._marks:
            ranges.enter_context(nvtx.nvtx_range(name))
        return ranges

    @forge.hookimpl(wrapper=True)
    def forge_plan_step(self) -> Generator[None, Any, Any]:
        if self._active or self._marks:  # the loop asks for the next window
            self._end_data()
            self._data = self._open(DATA)
        return (yield)

    @forge.hookimpl(wrapper=True)
    def forge_train_step(self, step: forge.Step) -> Generator[None, Any, Any]:
        if not self._active and not self._marks:
            return (yield)
        self._end_data()
        if self._active and self._recording is not None:
            self._recording.data_waits[step.index] = step.data_wait
        with self._open(range_name(step.index, step.name)):
            return (yield)

    forge_prepare_batch = in_range("forge_prepare_batch", TRANSFER)
    forge_forward = in_range("forge_forward", FORWARD)
    forge_backward = in_range("forge_backward", BACKWARD)
    forge_optimizer_step = in_range("forge_optimizer_step", STEP)
    forge_evaluate = in_range("forge_evaluate", EVALUATION)

    def _end_data(self) -> None:
        if self._data is not None:
            self._data.close()
            self._data = None

    # -- the cycle ----------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_boundary(self, trainer: forge.Run) -> None:
        if self._cycles:  # mostly 0
            self._passed += 1
            self._turn(trainer)

    def _turn(self, trainer: forge.Run) -> None:
        """Advance the cycle after an update: wait, warm up, record, or report."""
        config, update = self.config, trainer.progress.update
        if self._passed <= config.wait:
            self._ends.append(time.perf_counter())
        if self._active and self._recording is not None:
            self._recording.updates += 1
            is_last = update == trainer.planned_updates or "stop" in trainer.requests.open
            if self._recording.updates == config.active or is_last:
                self._finish(trainer, publish=True)
            else:
                self._recording.next()
        elif self._passed in (config.wait, config.wait + config.warmup):
            self._begin(trainer, records=self._passed == config.wait + config.warmup)
        elif self._recording is not None:
            self._recording.next()

    def _begin(self, trainer: forge.Run, records: bool) -> None:
        """Start torch's profiler, or let it record from now on."""
        if another_one():
            self._give_up("another torch profiler is recording in this process, and torch allows only one.")
            return
        config, update = self.config, trainer.progress.update
        if self._recording is None:
            options = {"record_shapes": config.record_shapes, "with_stack": config.with_stack}
            profile_memory = config.profile_memory or config.memory
            self._recording = Recording(trainer.env.device, profile_memory=profile_memory, **options)
        if not records:
            self._recording.start(update)
            return
        if config.memory and self._history is not None:
            self._history.keep(memory.WINDOW)
        trainer.env.synchronize()  # finish the work of earlier updates first
        self._recording.record(update)
        self._active = True

    def _give_up(self, why: str) -> None:
        self._recording, self._active, self._cycles = None, False, 0
        logger.warning("profiler: nothing more is recorded: %s", why)

    def _finish(self, trainer: forge.Run, publish: bool) -> None:
        """Stop recording and report. A profile is not worth a run: errors here are logged."""
        recording, ends = self._recording, self._ends
        assert recording is not None
        self._end_data()
        if not another_one():
            self._give_up("another torch profiler was started, which ended this one.")
            return
        self._recording, self._active, self._passed, self._ends = None, False, 0, []
        self._cycles -= 1
        try:
            recording.stop()
            self.reports.append(results.conclude(trainer, recording, unrecorded(ends), self.config))
            if trainer.env.is_main:
                results.publish(trainer, self.reports)
        except Exception as error:
            logger.error("profiler: the report failed: %s: %s", type(error).__name__, error)
            return
        finally:
            self._remember_the_last()
        if publish and trainer.env.is_main:
            trainer.publish({"profile": forge.Text(self.reports[-1].markdown())})

    def _remember_the_last(self) -> None:
        """Keep the latest allocations for an out-of-memory report, or none."""
        if self._history is not None:
            self._history.keep(memory.LAST if self.config.oom else 0)

    @forge.hookimpl
    def forge_exception(self, trainer: forge.Run, error: BaseException) -> None:
        self._failed = True
        if is_out_of_memory(error) and getattr(trainer, "env", None) is not None:
            results.explain(trainer, error)

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        try:
            self._end_data()
            if self._active and self._recording is not None and self._recording.updates and not self._failed:
                self._finish(trainer, publish=False)  # the sinks may be closed by now
            elif self._recording is not None and another_one() == self._active:
                self._recording.stop()
        finally:
            self._unmark(trainer)
            if self._cycles == self.config.repeat > 0 and not self._failed:
                wait, warmup = self.config.wait, self.config.warmup
                text = "profiler: nothing was recorded: the run had %d updates, and profiler.wait=%d with "
                text += "profiler.warmup=%d skips the first %d. Set profiler.wait=1 profiler.warmup=0, or train longer."
                logger.warning(text, self._passed, wait, warmup, wait + warmup)
            if self._history is not None:
                self._history.drop()
            self._forget(self.reports)

    def _unmark(self, trainer: forge.Run) -> None:
        """Open no more NVTX ranges."""
        ranges, self._hook_ranges, self._marks = self._hook_ranges, None, False
        if ranges is not None and trainer.instrument == ranges.instrument:
            trainer.instrument = ranges.inner


def unrecorded(ends: list[float]) -> float | None:
    """Return the median seconds of an update, from the end times of several; None for fewer than two."""
    between = [late - early for early, late in pairwise(ends)]
    return statistics.median(between) if between else None
