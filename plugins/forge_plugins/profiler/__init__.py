"""What only torch's profiler can tell: operators, kernels, memory, collectives, and a trace to look at."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from pluggy import HookImpl
from torch.autograd.profiler import emit_nvtx
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule, supported_activities

import forge
from forge.contract.dispatch import Instrument
from forge.contract.stack import CORE, ONE_BY_ONE
from forge.errors import RecipeError
from forge.spans.record import PHASES
from forge.torch_internals import profiler_enabled
from forge.util.oom import is_out_of_memory
from forge_plugins.profiler import memory
from forge_plugins.profiler.recording_report import Report, conclude, publish, quiet

logger = logging.getLogger("forge")

RECORDS = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


RANGES = {**PHASES, "forge_train_step": "update", "forge_evaluate": "evaluate"}
"""Names of what core does; what a plugin does is named after it and its hook."""


class Profiler(forge.Plugin):
    """Record updates with torch's profiler: the operators that take the time, what takes the memory, and a trace.

    After `wait` updates and `warmup` more, `active` updates are recorded, `repeat` times. The log then has tables, and
    all sinks get the same as the text `profile`: ranges (`update`, in it `to_device`, `forward`, `backward` and
    `optimizer`, before it `data`, the wait for the loader, what plugins do, as in `clip.edit_grads`, and every
    `torch.profiler.record_function` of your own), operators with their own time on host and device, kernels, and with
    `memory` the peak by purpose: weights, gradients, optimizer, activations and all else. A validation in the window is
    recorded like the rest.

    On several ranks a table has the time of collectives by kind, divided into exposed (nothing is computed at the same
    time) and overlapped: on CUDA from NCCL's kernels and all other kernels, on a CPU from gloo's work and the operators
    of all threads. Waiting for a slower rank counts as communication. Each rank writes its trace; the report is that of
    rank 0.

    RUN/profile holds the trace, for https://ui.perfetto.dev, chrome://tracing and TensorBoard (with torch-tb-profiler),
    and all numbers as `summary.md` and `summary.json`. With `memory` on CUDA it also holds a snapshot of all
    allocations, for https://pytorch.org/memory_viz (a pickle that torch writes for that page; forge never reads it).
    Without a run folder only the log is written.

    When CUDA memory runs out, the error lists what occupies it, the lines that allocated the most, and remedies; a
    snapshot is in RUN/profile.

    With `nvtx`, nothing is recorded: all ranges and operators of all updates are NVTX ranges instead, for Nsight
    Systems: `nsys profile -t cuda,nvtx python -m forge fit ... -p profiler profiler.nvtx=true`.

    The weights are bit for bit the same with and without it. Recording makes updates slower. While it waits it costs
    some 50 µs per update, after its last recording hardly any; on CUDA about 2 µs per allocation, whose line is kept.
    torch has only one profiler: while another one records, this one waits.

    ::

        forge fit quickstart -p profiler trainer.max_epochs=1
        forge fit quickstart -p profiler profiler.memory=true profiler.active=3 trainer.max_epochs=1
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        wait: int = 5
        "Updates before each recording."
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
        memory: bool = False
        "Record allocations: memory by purpose and by operator; on CUDA also a snapshot of them."
        nvtx: bool = False
        "On CUDA, record nothing, and mark ranges and operators of all updates for Nsight Systems."

    config: Config
    provides = ("profiler",)
    observer = True
    effects = ("files",)
    capturable = True

    def __init__(self, *first: int, **values: Any):
        super().__init__(*first, **values)
        for name, least in (("wait", 1), ("warmup", 0), ("active", 1), ("repeat", 1), ("top", 1)):
            value = getattr(self.config, name)
            if value < least:
                why = ": the first update of a run is like no other" if name == "wait" else ""
                raise RecipeError(f"profiler.{name} is {value}; it must be at least {least}{why}.")
        if not self.config.memory:
            self.forge_inspect_grads = None  # pyright: ignore[reportAttributeAccessIssue]
        self._inner: Instrument | None = None
        "What else replaces implementations."
        self._forget()

    def _forget(self) -> None:
        """Reset the state of one run."""
        self.reports: list[Report] = []
        "The reports of the last run."
        self._profile: profile | None = None
        "torch's profiler, until all is recorded."
        self._expects = False
        "Whether a report is to come, or a word why none did."
        self._updates = 0
        "Updates recorded so far."
        self._parts: dict[str, int] = {}
        "Bytes by purpose in the last of them, while it had its gradients."
        self._names = False
        "Whether ranges are opened."
        self._waiting = ExitStack()
        "The range of the wait for data."
        self._until_end = ExitStack()
        "What torch keeps for the run: a history of allocations, or NVTX ranges."

    def due(self, step: forge.Step) -> bool:
        """Never: a captured step is recorded unchanged."""
        return False

    @forge.hookimpl
    def forge_configure(self, trainer: forge.Run) -> None:
        self._inner, trainer.instrument = trainer.instrument, self._instrument

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        self._forget()
        config, device = self.config, trainer.env.device
        self._until_end.enter_context(memory.history(device))
        if config.nvtx and device.type == "cuda":
            self._until_end.enter_context(emit_nvtx())
            self._names = True
        elif config.nvtx:
            logger.warning("profiler: NVTX ranges need a CUDA device; profiler.nvtx does nothing on this one.")
        elif trainer.verb == "fit":
            self._record(trainer)

    def _record(self, trainer: forge.Run) -> None:
        """Have torch's profiler wait, warm up and record."""
        config, device = self.config, trainer.env.device
        kinds = (ProfilerActivity.CPU, getattr(ProfilerActivity, device.type.upper(), None))
        with quiet(device):
            self._profile = profile(
                activities=[kind for kind in supported_activities() if kind in kinds],
                schedule=schedule(wait=config.wait, warmup=config.warmup, active=config.active, repeat=config.repeat),
                on_trace_ready=lambda recorded: self._conclude(trainer, recorded),
                record_shapes=config.record_shapes,
                profile_memory=config.memory,
                with_stack=config.with_stack,
            )
            self._profile.start()
        self._expects = True

    # -- ranges and memory ---------------------------------------------------------------------------------------------

    def _instrument(self, hook: str, impl: HookImpl) -> Callable[..., Any]:
        """Return an implementation that opens a range, where ranges are opened."""
        function = impl.function if self._inner is None else self._inner(hook, impl)
        of_plugin = f"{impl.plugin_name}.{hook.removeprefix('forge_')}"
        name = "data" if hook == "forge_plan_step" else RANGES.get(hook) if impl.plugin_name == CORE else of_plugin
        if name is None or impl.wrapper or impl.plugin is self or hook in ONE_BY_ONE:
            return function

        def call(*args: Any) -> Any:
            if not self._names:
                return function(*args)
            self._waiting.close()
            if name == "data":  # the loop asks for the next window, and then waits for it
                self._waiting.enter_context(record_function(name))
                return function(*args)
            with record_function(name):
                return function(*args)

        return call

    @forge.hookimpl
    def forge_inspect_grads(self, step: forge.Step) -> None:
        if self._names:
            self._parts = memory.parts(step.trainer)

    # -- the cycle ----------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_boundary(self, trainer: forge.Run) -> None:
        """Tell torch's profiler that an update is over: it waits, warms up, records or concludes."""
        recorder = self._profile
        if recorder is None:  # mostly
            return
        before, records = len(self.reports), recorder.current_action in RECORDS
        if profiler_enabled() is not records:
            if records:
                self._give_up("another torch profiler was started, which ended this one.")
            return  # wait until the other one is done
        self._updates += records
        is_last = trainer.progress.update == trainer.planned_updates or "stop" in trainer.requests.open
        if recorder.current_action is ProfilerAction.WARMUP:
            trainer.env.synchronize()  # finish the work of earlier updates first
        with quiet(trainer.env.device):
            recorder.stop() if is_last else recorder.step()
        if is_last or len(self.reports) == self.config.repeat:
            self._profile = None
        self._names = self._profile is not None and recorder.current_action in RECORDS
        if len(self.reports) > before and trainer.env.is_main:
            trainer.publish({"profile": forge.Text(self.reports[-1].markdown(self.config.top))})

    def _give_up(self, why: str) -> None:
        self._profile, self._names, self._expects = None, False, False
        logger.warning("profiler: nothing more is recorded: %s", why)

    def _conclude(self, trainer: forge.Run, recorded: profile) -> None:
        """Report a recording. It is not worth a run: errors here are logged."""
        updates, self._updates = self._updates, 0
        if not updates or not self._expects:
            return
        try:
            self.reports.append(conclude(trainer, recorded, updates, self._parts))
            if trainer.env.is_main:
                publish(trainer, self.reports, self.config.top)
        except Exception as error:
            self._give_up(f"the report failed: {type(error).__name__}: {error}")

    @forge.hookimpl
    def forge_exception(self, trainer: forge.Run, error: BaseException) -> None:
        self._expects = False
        if is_out_of_memory(error) and getattr(trainer, "env", None) is not None:
            memory.explain(trainer, error)

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        trainer.instrument, self._inner = self._inner, None
        self._waiting.close()
        recorder, self._profile, self._names = self._profile, None, False
        try:
            if recorder is not None and profiler_enabled() is (recorder.current_action in RECORDS):
                with quiet(trainer.env.device):
                    recorder.stop()
        finally:
            self._until_end.close()
            if self._expects and not self.reports:
                wait, warmup = self.config.wait, self.config.warmup
                text = (
                    "profiler: nothing was recorded in the updates that profiler.wait=%d and profiler.warmup=%d skip. "
                )
                logger.warning(text + "Set profiler.wait=1 profiler.warmup=0, or train longer.", wait, warmup)
            self._expects = False
