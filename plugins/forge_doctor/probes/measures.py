"""Probes of how metrics are used: which direction is better, and how batches are weighed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from forge.progress import Interval
from forge.runs.directions import mode_of
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient


def modes(patient: Patient) -> Iterator[Finding]:
    """Schedules and plugins that take a larger loss, or a smaller accuracy, for the better one."""
    for entry in patient.trainer.optimizers.entries.values():
        for scheduled in entry.schedules:
            if isinstance(scheduled.schedule, ReduceLROnPlateau) and scheduled.monitor is not None:
                yield from _judge(patient, "ReduceLROnPlateau", scheduled.monitor, scheduled.schedule.mode)
    for plugin in patient.plugins:
        for path, config in _configs(plugin):
            monitor, mode = _get(config, "monitor"), _get(config, "mode")
            if isinstance(monitor, str) and isinstance(mode, str):
                yield from _judge(patient, path, monitor, mode)


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


def _judge(patient: Patient, where: str, monitor: str, mode: str) -> Iterator[Finding]:
    right = mode_of(monitor) or patient.directions.get(monitor)
    if right is not None and mode in ("min", "max") and mode != right:
        better = "larger" if mode == "max" else "smaller"
        text = f"{where} watches {monitor} with mode={mode}: it takes a {better} one for the better one."
        yield Finding("wrong_mode", text, where, {"monitor": monitor, "mode": mode}, cure=f"Set mode={right}.")


def _configs(plugin: Any) -> Iterator[tuple[str, Any]]:
    """A plugin's settings, and the groups of settings in them."""
    config = getattr(plugin, "config", None)
    if config is None:
        return
    yield plugin.name, config
    keys = (
        list(config)
        if isinstance(config, Mapping)
        else [x.name for x in fields(config)]
        if is_dataclass(config)
        else []
    )
    for key in keys:
        value = _get(config, key)
        if isinstance(value, Mapping) or hasattr(value, "monitor"):
            yield f"{plugin.name}.{key}", value


def _get(config: Any, key: str) -> Any:
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
