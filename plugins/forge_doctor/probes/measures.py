"""Probes of how metrics are used: which direction is better, and how batches are weighed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from forge.progress import Interval
from forge.runs.directions import mode_of
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient


def modes(patient: Patient) -> Iterator[Finding]:
    """Schedules and plugins that take a larger loss, or a smaller accuracy, for the better one."""
    for where, monitor, mode in _watching(patient):
        right = mode_of(monitor) if isinstance(monitor, str) else None
        if right is not None and mode in ("min", "max") and mode != right:
            better = "larger" if mode == "max" else "smaller"
            text = f"{where} watches {monitor} with mode={mode}: it takes a {better} one for the better one."
            yield Finding("wrong_mode", text, where, {"monitor": monitor, "mode": mode}, cure=f"Set mode={right}.")


def _watching(patient: Patient) -> Iterator[tuple[str, Any, Any]]:
    """What watches a metric, the metric and the mode; a plugin's settings may hold a group of them."""
    for entry in patient.trainer.optimizers.entries.values():
        for scheduled in entry.schedules:
            if isinstance(scheduled.schedule, ReduceLROnPlateau):
                yield "ReduceLROnPlateau", scheduled.monitor, scheduled.schedule.mode
    for plugin in patient.plugins:
        config = getattr(plugin, "config", None) or {}
        settings = config if isinstance(config, Mapping) else asdict(config)
        inner = {f"{plugin.name}.{key}": value for key, value in settings.items() if isinstance(value, Mapping)}
        for where, group in ({plugin.name: settings} | inner).items():
            yield where, group.get("monitor"), group.get("mode")


def validation(patient: Patient) -> Iterator[Finding]:
    """A run without validation, or with validations that are planned for after its end."""
    trainer = patient.trainer
    if patient.val is None:
        yield Finding("no_validation", "Nothing is validated on: no samples are held out.", "val")
        return
    every = Interval(patient.validate_every) if patient.validate_every else trainer.validate_every
    planned = trainer.planned_updates
    if every is None or planned is None:
        return
    updates = every.count if every.unit == "update" else every.count * (trainer.updates_per_epoch or 0)
    is_default = (every.count, every.unit) == (1, "epoch")  # a trial of a few updates
    if every.unit in ("update", "epoch") and updates > planned and not is_default:
        yield Finding(
            "never_validates",
            f"validate_every is {every}, but the run ends after {planned} updates: it never validates.",
            "trainer.validate_every",
            {"validate_every": str(every), "planned": planned},
        )
