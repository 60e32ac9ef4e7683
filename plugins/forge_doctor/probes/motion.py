"""Probes after a few updates: how far weights moved, gradients by layer, and what a run keeps."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import torch
from torch import Tensor, nn

from forge_doctor.findings import Finding
from forge_doctor.patient import NotApplicable, Patient, parameters

SLOW = 0.005
"""Seconds that a batch may take in any case."""
NEVER, HARDLY, FEWEST_NORMS = 1e4, 1e-6, 4
"""By how much a clip is above each norm if it is said to do nothing; the norm and the number of updates to judge by."""


def rates(patient: Patient) -> Iterator[Finding]:
    """Updates against weights."""
    ratios = [value for values in patient.ratios.values() for value in values[:1]]
    largest = [max(values) for values in patient.ratios.values() if values]
    if not largest:
        return
    typical = median(largest)
    if typical > 0.5 and not patient.shrinks:
        text = f"One update changes half of the matrices by {typical:.2g} times their size or more."
        yield Finding("learning_rate_high", text, "configure_optimizers", {"ratio": typical})
    elif max(largest) * patient.headroom < 2e-6 and ratios and (max(largest) > 0 or _are_at_rest(patient)):
        text = f"No update changes a matrix by more than {max(largest):.2g} of its size in {patient.updates} updates."
        yield Finding("learning_rate_low", text, "configure_optimizers", {"ratio": max(largest)})
    for entry in patient.trainer.optimizers.entries.values():
        still = [group for group in entry.optimizer.param_groups if float(group.get("initial_lr", group["lr"])) == 0]
        if still and len(still) < len(entry.optimizer.param_groups):
            text = f"{len(still)} of {len(entry.optimizer.param_groups)} parameter groups have a learning rate of 0."
            yield Finding("learning_rate_low", text, "configure_optimizers")


def _are_at_rest(patient: Patient) -> bool:
    """Whether no optimizer has a rate above 0; otherwise weights without a gradient stand still, which others say."""
    groups = [group for entry in patient.trainer.optimizers.entries.values() for group in entry.optimizer.param_groups]
    return all(float(group["lr"]) == 0 for group in groups)


def gradients(patient: Patient) -> Iterator[Finding]:
    """Gradients of the first layers against those of the last, relative to their weights."""
    task = patient.clone()
    patient.loss(task, patient.batches[0]).backward()
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    found: list[tuple[str, float]] = []
    for path, module in task.named_modules():
        weight = getattr(module, "weight", None)
        if (
            isinstance(module, kinds)
            and isinstance(weight, Tensor)
            and weight.grad is not None
            and weight.requires_grad
        ):
            size = float(weight.detach().double().norm())
            if size > 0:
                found.append((path, float(weight.grad.double().norm()) / size))
    if len(found) < 5:
        return
    third = max(1, len(found) // 3)
    start, end = [value for _, value in found[:third]], [value for _, value in found[-third:]]
    low, high = median(start), median(end)
    if low < 1e-6 * high and high > 0:  # a layer scale of 1e-5 learns all the same
        text = (
            f"Gradients shrink on their way back: relative to its weights {found[0][0]} gets {low:.2g}, "
            f"{found[-1][0]} {high:.2g}."
        )
        yield Finding("vanishing_gradient", text, found[0][0], {"first": low, "last": high})
    elif low > 1e4 * max(high, 1e-30) or max(value for _, value in found) > 1e4:
        text = (
            f"Gradients grow on their way back: relative to its weights {found[0][0]} gets {low:.2g}, "
            f"{found[-1][0]} {high:.2g}."
        )
        yield Finding("exploding_gradient", text, found[0][0], {"first": low, "last": high})


def clipping(patient: Patient) -> Iterator[Finding]:
    """A clip that decides each update, or that is far from every gradient."""
    clip = next((plugin for plugin in patient.trainer.stack if plugin.name == "clip"), None)
    if clip is None:
        raise NotApplicable
    limit, value = (getattr(getattr(clip, "config", None), name, None) for name in ("max_norm", "max_value"))
    if limit:
        task = patient.clone()
        patient.loss(task, patient.batches[0]).backward()
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters(task).values() if p.grad is not None]))
        if norm > 1000 * float(limit):
            text = f"Gradients have a norm of {norm:.3g}, and clip.max_norm is {float(limit):g}."
            yield Finding("clips_always", text, "clip.max_norm", {"norm": norm, "max_norm": float(limit)})
    yield from _idle_clip(patient, limit, value)


def _idle_clip(patient: Patient, limit: float | None, value: float | None) -> Iterator[Finding]:
    """A clip by norm, or by value, that is far above all gradients of the first updates.

    No entry of a gradient is larger than its norm. A gradient that is hardly there is another matter.
    """
    norm = max(patient.norms, default=0.0)
    name, bound = ("max_norm", limit) if limit is not None else ("max_value", value)
    lowest = min((float(given) for given in (limit, value) if given is not None), default=0.0)
    if len(patient.norms) >= FEWEST_NORMS and norm > HARDLY and lowest > NEVER * norm:
        text = (
            f"The largest norm of {len(patient.norms)} gradients is {norm:.3g}, and clip.{name} is {bound:g}: the clip "
            "never acts."
        )
        yield Finding("clips_never", text, f"clip.{name}", {"norm": norm, name: bound, "updates": len(patient.norms)})


def losses(patient: Patient) -> Iterator[Finding]:
    """Losses that leave all bounds within a few updates."""
    found = patient.losses
    if len(found) > 3 and (any(loss != loss for loss in found) or found[-1] > 10 * abs(found[0]) + 10):
        text = f"The loss goes from {found[0]:.4g} to {found[-1]:.4g} within {len(found)} updates."
        yield Finding("diverges", text, type(patient.task).__name__, {"losses": found[:10]})


def waits(patient: Patient) -> Iterator[Finding]:
    """Batches that take longer than the steps on them."""
    later = patient.times[2:]
    if len(later) < 6:
        return
    wait, step = median(wait for wait, _ in later), median(step for _, step in later)
    if wait > 2 * step and wait > SLOW:
        text = f"An update waits {1e3 * wait:.3g} ms for its batch and takes {1e3 * step:.3g} ms."
        yield Finding("slow_loader", text, "train", {"waits": wait, "takes": step})
