"""Probes after a few updates: how far weights moved, gradients by layer, and what a run keeps."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from torch import Tensor, nn

from forge_doctor.findings import Finding
from forge_doctor.patient import NotApplicable, Patient

SLOW = 0.005
"""Seconds that a batch may take in any case."""
NEVER, ALWAYS, HARDLY, FEWEST_NORMS = 1e4, 1e3, 1e-6, 4
"""How far a clip is above each norm that never acts, and below that decides; the norm and the updates to judge by."""


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
    """A clip by norm that decides each update, or one that is far above all gradients of the first updates.

    No entry of a gradient is larger than its norm. A gradient that is hardly there is another matter.
    """
    clip = next((plugin for plugin in patient.trainer.stack if plugin.name == "clip"), None)
    if clip is None:
        raise NotApplicable
    bounds = {name: getattr(getattr(clip, "config", None), name, None) for name in ("max_norm", "max_value")}
    given = {name: float(bound) for name, bound in bounds.items() if bound is not None}
    norms = sorted(patient.norms)
    if len(norms) < FEWEST_NORMS or norms[-1] <= HARDLY or not given:
        return
    name = next(iter(given))
    evidence = {"norm": norms[-1], name: given[name], "updates": len(norms)}
    if norms[0] > ALWAYS * given.get("max_norm", norms[0]):
        text = f"Gradients have norms from {norms[0]:.3g} on, and clip.max_norm is {given['max_norm']:g}."
        yield Finding("clips_always", text, "clip.max_norm", evidence)
    elif min(given.values()) > NEVER * norms[-1]:
        text = f"The largest norm of {len(norms)} gradients is {norms[-1]:.3g}, and clip.{name} is {given[name]:g}."
        yield Finding("clips_never", f"{text} The clip never acts.", f"clip.{name}", evidence)


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
