"""PlannedRun: the planned run, of which each step on the road runs a short piece, on copies and in a scratch folder."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from forge.config.arguments import Plugins
from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.step import Step
from forge.contract.task import TaskModule
from forge.engine.trainer import FitResult, Trainer
from forge.env import pick_device
from forge.errors import ForgeError
from forge.runs.wording import counted
from forge.snapshot.left_out import SCHEDULE, is_left_out
from forge.tuning.trial import TuningTrial
from forge.util import peak_memory
from forge_doctor.patient import copied_task, first
from forge_doctor.readiness import planned
from forge_doctor.report import DoctorReport
from forge_doctor.signals import take_signals
from forge_plugins.progress.host_limit import LONGER, PAUSES, Gpu

HELD = 8
"""Batches of a loader of val that short runs validate on."""
TRAINED, FEWEST, WARM = 100, 10, 5
"""Updates of each measurement, the fewest, and those of the first."""


class NotAffordable(Exception):
    """Raised by a step for which the budget has too little time left."""


@dataclass
class PlannedRun:
    """What the road is walked with. `settings` are the planned arguments of the Trainer, its recipe among them."""

    task: TaskModule
    loaders: dict[str, Any]
    "By split; None where there is none."
    plugins: Plugins | None
    settings: dict[str, Any]
    scratch: Path
    again: list[str] | None = None
    "The command that continues the planned run in the folder that is added to it."
    remake: Callable[[], tuple[TaskModule, Any]] | None = None
    "Makes the task and the loader of train again; without it two starts begin with copies."
    price: float | None = None
    "Of an hour of the device."
    until: float = 0.0
    "When the step must have ended, by the monotonic clock."
    examined: DoctorReport = field(default_factory=DoctorReport)
    "What the doctor found."

    @cached_property
    def plan(self) -> dict[str, Any]:
        return planned(self.settings)

    @property
    def seed(self) -> int:
        return self.plan.get("seed") or 0

    @cached_property
    def device(self) -> torch.device:
        return pick_device(self.plan.get("device") or "auto")

    @property
    def train(self) -> Any:
        return self.loaders["train"]

    def head_of(self, split: str, count: int = HELD) -> Any:
        """The first batches of a split, of each of several loaders; None where there is none."""
        given = self.loaders[split]
        if isinstance(given, dict):
            return {name: first(loader, count) for name, loader in given.items()}
        return first(given, count) or None

    @cached_property
    def stack(self) -> list[Plugin]:
        """The plugins of the planned run."""
        return list(self._make({}).stack)

    def copy(self) -> TaskModule:
        return copied_task(self.task)

    @cached_property
    def costs(self) -> tuple[float, float]:
        """Seconds of a short run without its updates, and of one update."""
        began = time.monotonic()
        each = self.pace(WARM).seconds
        return max(0.0, time.monotonic() - began - WARM * each), each

    @cached_property
    def as_planned(self) -> UpdatePace:
        """The pace of the planned stack on the planned device."""
        return self.pace(self.affords(TRAINED, FEWEST))

    def affords(self, wanted: int, least: int, runs: int = 1) -> int:
        """Return how many updates each of some runs may make in the time of this step."""
        start, each = self.costs
        left = max(0.0, self.until - time.monotonic())
        found = int((0.7 * left / runs - start) / max(each, 1e-9))
        if found < least:
            raise NotAffordable(
                f"An update takes {each:.2g} s, {counted(runs, 'run')} of {least} are needed, and this step has "
                f"{left:.0f} s of the budget"
            )
        return min(wanted, found)

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _make(self, given: dict[str, Any]) -> Trainer:
        settings: dict[str, Any] = {**self.settings, "run_dir": False, "resume": None, **given}
        return Trainer(plugins=self.plugins, **settings)

    def trainer(self, drop: Callable[[Plugin], bool], put: Sequence[Plugin] = (), **given: Any) -> Trainer:
        """Return a Trainer of the planned stack, less what is dropped, with what is put in place of or beside it."""
        made = self._make({"seed": self.seed, **given})
        names = {plugin.name for plugin in put}
        for plugin in [plugin for plugin in made.stack if drop(plugin) or plugin.name in names]:
            made.stack.remove(plugin.name)
        for plugin in (*put, LeavesAtOnce()):
            made.stack.add(plugin)
        return made

    def short(self, updates: int, **given: Any) -> Trainer:
        """Return a Trainer for some updates, without what observes, saves or stops."""
        return self.trainer(is_left_out, max_epochs=None, max_updates=updates, **given)

    def pace(
        self,
        updates: int,
        *,
        put: Sequence[Plugin] = (),
        without: Collection[str] = (),
        **given: Any,
    ) -> UpdatePace:
        """Train a copy for some updates, validate it, and measure both; `without`: what dropped plugins provide."""
        peak_memory.clean()
        measured = UpdatePace(updates)
        options = {"max_epochs": None, "max_updates": updates, "log_every": max(1, updates // 4), **given}
        options["validate_every"] = f"{updates} updates"
        dropped = lambda plugin: is_left_out(plugin, SCHEDULE, *without)  # noqa: E731
        made = self.trainer(dropped, [*put, measured], **options)
        measured.result = made.fit(self.copy(), self.train, self.head_of("val"))
        return measured


class UpdatePace(TuningTrial):
    """Times the updates of a short run after a warm-up, with what they waited for, memory and its validation."""

    def __init__(self, updates: int):
        super().__init__()
        self.name = "forge_doctor.pace"
        self.updates, self.warm = updates, max(2, updates // 5)
        self.last = updates
        self.seconds = self.waited = self.validation = 0.0
        "Of an update; of its wait for a batch; of a batch of val."
        self.samples = 0.0
        "Of an update."
        self.per_epoch: int | None = None
        self.memory: int | None = None
        self.device_seconds: float | None = None
        "Of the GPU's own work in an update."
        self.result: FitResult | None = None
        self._from = 0.0
        self._gpu: Gpu | None = None
        self._pairs: list[tuple[Any, Any]] = []
        self._mark: Any = None

    @hookimpl
    def forge_start(self, trainer: Trainer) -> None:
        super().forge_start(trainer)
        self.per_epoch = trainer.updates_per_epoch
        peak_memory.start(trainer.env.device)
        if trainer.env.device.type == "cuda" and not torch.version.hip:
            self._gpu, self.last = Gpu(trainer.env.device), self.updates + 1 + PAUSES
            trainer.max_updates = self.last

    @hookimpl
    def forge_step_end(self, step: Step) -> None:
        update = step.index + 1
        if update == self.warm:
            step.trainer.env.synchronize()
            self._from = time.perf_counter()
        elif self.warm < update <= self.updates:
            self.waited += step.data_wait / (self.updates - self.warm)
            self.samples += step.samples / (self.updates - self.warm)
        if update == self.updates:
            step.trainer.env.synchronize()
            self.seconds = (time.perf_counter() - self._from) / (self.updates - self.warm)
            self.memory = peak_memory.peak(step.trainer.env.device)
        if self._gpu is not None and update > self.updates:  # after the validation of the last timed update
            self._let_the_host_run_ahead(self._gpu)

    def _let_the_host_run_ahead(self, gpu: Gpu) -> None:
        """Have the GPU pause while the host queues a whole update: what it then takes is its own work."""
        if self._mark is not None:
            self._pairs.append((self._mark, gpu.mark()))
        gpu.pause(LONGER * self.seconds)
        self._mark = gpu.mark()

    @hookimpl(wrapper=True)
    def forge_evaluate(self, trainer: Trainer, stage: str) -> Generator[None, Any, Any]:
        began = time.perf_counter()
        metrics = yield
        trainer.env.synchronize()
        given = trainer.given_loaders["val"]
        batches = sum(map(len, given.values())) if isinstance(given, dict) else len(given)
        self.validation = (time.perf_counter() - began) / max(1, batches)
        return metrics

    @hookimpl
    def forge_end(self, trainer: Trainer) -> None:
        if self._pairs:
            trainer.env.synchronize()
            self.device_seconds = statistics.median(a.elapsed_time(b) for a, b in self._pairs) / 1e3

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def figures(self) -> dict[str, float]:
        """What the run came to: its loss first, of validation where there is one, then metrics beside it."""
        found = self.result.metrics if self.result is not None else {}
        losses = [name for name in ("val/loss", *found, "train/loss") if name.startswith("val/") and "loss" in name]
        name = next((name for name in [*losses, "train/loss"] if name in found), "")
        if not name:
            raise ForgeError("this task logs no loss")
        return {name: found[name], **{other: found[other] for other in found if other.startswith("val/")}}


class LeavesAtOnce(Plugin):
    """Ends a short run at a signal, rather than after its update: nothing of it is to be saved."""

    observer = True

    def __init__(self) -> None:
        super().__init__()
        self.name = "forge_doctor.leaves_at_once"

    @hookimpl
    def forge_start(self) -> None:
        take_signals()  # the fit puts the handlers before it back at its end
