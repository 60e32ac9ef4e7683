"""Find the origin of a NaN: module, operation, line and samples."""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import forge
from forge.errors import NonFiniteError, RecipeError
from forge.snapshot.non_finite import all_finite, gradients, gradients_are_scaled
from forge_plugins.anomaly.analysis import Analysis, Before
from forge_plugins.anomaly.report import headline, report

logger = logging.getLogger("forge.anomaly")


class Anomaly(forge.Plugin):
    """Find the operation that produced a NaN or an infinity: its line, its module and its samples.

    When a loss or gradient is not finite, the window runs again with the same random numbers, weights and buffers, and
    every operation of the forward and backward pass is checked. Training continues as if the window had run only once.

    When to use it: for debugging, after `guard` has stopped a run: `forge fit RECIPE --resume -p anomaly`. It reads the
    device once per update, and keeps the random number state of every window.

    What you see: a report that names the first non-finite value: an operation, or a parameter, buffer or batch that was
    already bad. It is logged, or added to the error that ends the run. If no other plugin skips the bad update, anomaly
    raises a NonFiniteError before the weights change. Since a resume is exact, a run resumed with a breakpoint in the
    step stops in the same window.

    ::

        forge fit quickstart -p anomaly
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        max_reports: int = 3
        "Windows that are analysed in one run; later ones only stop the run, unless they are skipped."

    config: Config
    provides = ("anomaly",)
    observer = True

    def __init__(self, *first: int, **values: Any):
        super().__init__(*first, **values)
        if self.config.max_reports < 1:
            raise RecipeError(f"anomaly.max_reports is {self.config.max_reports}; it must be at least 1.")
        self.findings: list[dict[str, Any]] = []
        "The findings of the last run, as plain data."
        self._before: Before | None = None
        self._analysis: Analysis | None = None
        self._losses: list[Tensor] = []
        self._bad = self._only_loss = False
        self._fresh = False

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        self.findings, self._fresh, self._analysis = [], False, None
        if trainer.verb != "fit":
            return
        self._before, self._only_loss = Before.of(trainer.task), gradients_are_scaled(trainer)
        if trainer.env.device.type != "cpu":
            logger.info("anomaly reads the device once per update: training is slower with it.")

    @forge.hookimpl(wrapper=True)
    def forge_train_step(self, step: forge.Step) -> Generator[None, Any, Any]:
        assert self._before is not None
        self._before.keep(step)
        self._losses, self._bad = [], False
        try:
            result = yield
            if self._bad:  # the update was skipped before gradients were edited
                self._analyse(step)
                self._log()
            return result
        except NonFiniteError as error:
            if not getattr(error, "__forge_analysed__", False):
                if self._bad or not self._is_finite(step):
                    self._analyse(step)
                self._note(error)
            raise
        finally:
            self._losses = []

    @forge.hookimpl(wrapper=True)
    def forge_backward(self, step: forge.Step, loss: Tensor) -> Generator[None, Any, Any]:
        (self._losses if self._analysis is None else self._analysis.losses).append(loss.detach())
        return (yield)

    @forge.hookimpl(wrapper=True)
    def forge_inspect_grads(self, step: forge.Step) -> Generator[None, Any, Any]:
        """Act after all others: only then is it known whether the update is skipped."""
        self._bad = not self._is_finite(step)
        result = yield
        if self._bad:
            self._report(step)
        return result

    def _report(self, step: forge.Step) -> None:
        self._analyse(step)
        self._bad = False
        # an optimizer with found_inf skips the update itself, and the plugin that set it will report
        if step.skip_reason is None and getattr(step.optimizer, "found_inf", None) is None:
            said = headline(self.findings[-1]) if self._fresh else f"update {step.index} is not finite."
            error = NonFiniteError(f"{said[0].upper()}{said[1:]} The weights are unchanged.")
            self._note(error)
            raise error
        self._log()

    def _is_finite(self, step: forge.Step) -> bool:
        losses = self._losses[-len(step.window) :]  # a closure runs the window several times
        return all_finite(losses if self._only_loss else [*losses, *gradients(step)])

    def _analyse(self, step: forge.Step) -> None:
        self._fresh = len(self.findings) < self.config.max_reports
        if not self._fresh:
            return
        assert self._before is not None
        self._analysis = Analysis(step, self._before)
        try:
            finding = self._analysis.run()
        finally:
            self._analysis = None
        self.findings.append(finding)

    def _log(self) -> None:
        if self._fresh:
            logger.warning("%s", report(self.findings[-1]))

    def _note(self, error: NonFiniteError) -> None:
        error.__forge_analysed__ = True  # pyright: ignore[reportAttributeAccessIssue]
        if self._fresh:
            error.add_note(report(self.findings[-1], title="Where it came from:"))
