"""Probes of how metrics are used: which direction is better, and how batches are weighed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from forge.contract.task import defines
from forge.data.accumulation_windows import batch_size
from forge.progress import Interval
from forge.runs.directions import mode_of
from forge.torch_internals import pytree
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient, tensors, with_rows

MOST_BATCHES = 24


def modes(patient: Patient) -> Iterator[Finding]:
    """Schedules and plugins that take a larger loss, or a smaller accuracy, for the better one."""
    for entry in patient.trainer.optimizers.entries.values():
        for scheduled in entry.schedules:
            if isinstance(scheduled.schedule, ReduceLROnPlateau) and scheduled.monitor is not None:
                yield from _judge("ReduceLROnPlateau", scheduled.monitor, scheduled.schedule.mode)
    for plugin in patient.plugins:
        for path, config in _configs(plugin):
            monitor, mode = _get(config, "monitor"), _get(config, "mode")
            if isinstance(monitor, str) and isinstance(mode, str):
                yield from _judge(path, monitor, mode)


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


def _judge(where: str, monitor: str, mode: str) -> Iterator[Finding]:
    right = mode_of(monitor)
    if right is not None and mode in ("min", "max") and mode != right:
        better = "larger" if mode == "max" else "smaller"
        yield Finding(
            "wrong_mode",
            f"{where} watches {monitor} with mode={mode}: it takes a {better} one for the better one.",
            where,
            {"monitor": monitor, "mode": mode},
            cure=f"Set mode={right}.",
        )


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


def weights(patient: Patient) -> Iterator[Finding]:
    """Means over tokens that are averaged as if all batches had as many tokens."""
    if not patient.can_validate or defines(patient.task, "num_items") or defines(patient.task, "evaluation_end"):
        return
    batches = [_on(patient, batch) for batch in itertools.islice(iter(_loader(patient.val)), MOST_BATCHES)]
    counts = [_tokens(batch) for batch in batches]
    if len(batches) < 3 or any(count is None for count in counts):
        return
    tokens = [float(count.sum()) for count in counts if count is not None]
    sizes = [float(batch_size(batch) or 0) for batch in batches]
    each = [t / n for t, n in zip(tokens, sizes, strict=True) if n]
    if not each or max(each) < 3 * max(1e-9, min(each)):
        return
    found = [_metrics(patient, batch) for batch in batches]
    worst = max(found[0], key=lambda name: _off(name, found, sizes, tokens), default="")
    off = _off(worst, found, sizes, tokens)
    if off > 0.001 and _is_over_tokens(patient, batches, worst):
        values = [metrics[worst] for metrics in found]
        by_sample, by_token = _mean(values, sizes), _mean(values, tokens)
        yield Finding(
            "metric_by_batch",
            f"{worst} is a mean over tokens, and batches of {min(tokens):.0f} to {max(tokens):.0f} tokens count alike: "
            f"validation says {by_sample:.4g}, and the mean over all tokens is {by_token:.4g}.",
            f"{type(patient.task).__name__}.validation_step",
            {"by batch": by_sample, "by token": by_token, "fewest": min(tokens), "most": max(tokens)},
            cure="Define num_items(self, batch): the number of tokens that count.",
            level="warning" if off > 0.005 and max(each) > 5 * min(each) else "note",
        )


def _off(name: str, found: list[dict[str, float]], sizes: list[float], tokens: list[float]) -> float:
    """By how much the mean of a metric over batches is off, as a share of the mean over tokens."""
    values = [metrics.get(name, float("nan")) for metrics in found]
    by_token = _mean(values, tokens)
    off = abs(_mean(values, sizes) - by_token) / max(abs(by_token), 1e-9)
    return off if off == off else 0.0


def _loader(val: Any) -> Any:
    return next(iter(val.values())) if isinstance(val, dict) else val


def _on(patient: Patient, batch: Any) -> Any:
    return pytree.tree_map(lambda x: x.to(patient.device) if isinstance(x, Tensor) else x, batch)


def _tokens(batch: Any) -> Tensor | None:
    """How many labels of each row count: those that are not negative, where others are."""
    for x in tensors(batch):
        if x.ndim == 2 and x.dtype == torch.long and int(x.min()) in (-1, -100):
            return (x >= 0).sum(1)
    rows = [x for x in tensors(batch) if x.ndim == 2 and x.dtype == torch.long]
    return torch.full((len(rows[-1]),), rows[-1].shape[1]) if rows else None


def _metrics(patient: Patient, batch: Any) -> dict[str, float]:
    with torch.no_grad():
        result = patient.run(patient.clone().eval(), batch, "val")
    items = result.items() if isinstance(result, Mapping) else {"loss": result}.items()
    return {str(name): float(value) for name, value in items if isinstance(value, Tensor) and value.numel() == 1}


def _mean(values: list[float], weights: list[float]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / max(1e-9, sum(weights))


def _is_over_tokens(patient: Patient, batches: list[Any], name: str) -> bool:
    """Whether a batch's value is the mean of its halves by tokens, where they have different numbers of them."""
    checked = 0
    for batch in batches:
        count, size = _tokens(batch), batch_size(batch)
        if count is None or size is None or size < 4 or len(count) != size:
            continue
        order = count.argsort()
        halves = [order[: size // 2], order[size // 2 :]]
        parts = [with_rows(batch, size, lambda x, rows=rows: x[rows]) for rows in halves]
        values = [_metrics(patient, part)[name] for part in (batch, *parts)]
        by_token = _mean(values[1:], [float(count[rows].sum()) for rows in halves])
        by_sample = _mean(values[1:], [float(len(rows)) for rows in halves])
        if abs(by_token - by_sample) > 1e-3 * abs(by_token):
            checked += 1
            if abs(values[0] - by_token) > 1e-4 * max(1e-9, abs(by_token)):
                return False
    return checked > 0
