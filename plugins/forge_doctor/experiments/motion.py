"""Motion: what a few updates move, beside what they should: weights with a gradient, averages, statistics, metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from forge.runs.directions import mode_of
from forge_doctor.experiments.intervene import draws, numbers, says
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient
from forge_doctor.patient import named as listed
from forge_doctor.probes.graph import trained

CLOSE = 0.5
"""The share of the way to the trained weights, in every update, from which an average is no average."""


class Track:
    """All weights before and after each update, of which the last few are kept."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.with_gradient: set[str] = set()

    def note(self, task: nn.Module) -> None:
        self.weights = [*self.weights[-3:], {name: p.detach().clone() for name, p in task.named_parameters()}]


def still(patient: Patient) -> Iterator[Finding]:
    """Weights that got a gradient in every update, are in an optimizer, and never moved."""
    track, known = patient.track, trained(patient)
    if track is None or len(track.weights) < 3:
        return
    first, last = track.weights[0], track.weights[-1]
    stuck = [
        name
        for name in track.with_gradient & known & first.keys() & last.keys()
        if torch.equal(first[name], last[name])
    ]
    if stuck and len(stuck) < len(known):
        text = (
            f"{len(stuck)} weights get a gradient and are in an optimizer, and no update moves them: "
            f"{listed(sorted(stuck))}."
        )
        yield Finding("weights_stand_still", text, sorted(stuck)[0], {"weights": sorted(stuck)[:8]})


def averages(patient: Patient) -> Iterator[Finding]:
    """Weights outside all optimizers that follow trained ones: how far they go in an update, and whether at all."""
    track, known = patient.track, trained(patient)
    if track is None or len(track.weights) < 3:
        return
    before, after = track.weights[-2], track.weights[-1]
    others = [name for name in after if name not in known and name in before]
    rates: dict[str, float] = {}
    for name in others:
        own = _twin(name, known, after)
        if own is None or name not in before or own not in after:
            continue
        # an average is taken after an update, or in the step before it
        ways = [float((weights[own] - before[name]).norm()) for weights in (before, after)]
        if max(ways) > 0:
            rates[name] = float((after[name] - before[name]).norm()) / min(way for way in ways if way > 0)
    moving = {name: rate for name, rate in rates.items() if rate > 0}
    if moving and min(moving.values()) > CLOSE and _moved_always(track, list(moving)):
        name, rate = min(moving.items(), key=lambda item: item[1])
        text = (
            f"{name} goes {rate:.0%} of the way to the weights that are trained in every update: it is a copy of them "
            "rather than an average of the past."
        )
        yield Finding("average_too_close", text, name, {"share": rate})
    elif rates and not moving and len(rates) >= 2:
        text = (
            f"{len(rates)} weights that are in no optimizer have the names and shapes of trained ones and never move: "
            f"{listed(sorted(rates))}. If they are to follow the trained ones, nothing updates them."
        )
        yield Finding("average_stands_still", text, sorted(rates)[0], {"weights": sorted(rates)[:8]})


def _twin(name: str, known: set[str], weights: dict[str, Tensor]) -> str | None:
    """The trained weight of which this may be the average: the same name inside another module, and the same shape."""
    ends = [name.split(".", n)[n] for n in range(1, name.count(".") + 1)]
    for end in ends:
        found = [other for other in known if other.endswith("." + end) and weights[other].shape == weights[name].shape]
        if len(found) == 1:
            return found[0]
    return None


def _moved_always(track: Track, names: list[str]) -> bool:
    pairs = zip(track.weights[:-1], track.weights[1:], strict=True)
    return all(not torch.equal(a[names[0]], b[names[0]]) for a, b in pairs)


def learnt(patient: Patient, task: Any, batch: Any, start: float, reached: float) -> Iterator[Finding]:
    """After one batch was learnt: what validation says of the same batch, in evaluation mode."""
    if not patient.can_validate or not reached < 0.25 * start or start <= 0:
        return
    with suppress(Exception):  # validation may take other batches
        if draws(patient, "train", batch) or draws(patient, "val", batch):
            return  # what was learnt are these random numbers
        task.to(patient.device).trainer = patient.trainer
        before = says(patient, batch)
        task.eval()
        with torch.no_grad():
            after = numbers(patient.run(task, batch, "val"))
        loss = after.get("loss", math.nan)
        lost = loss > 0.9 * before.get("loss", math.inf)
        worse = [
            name
            for name in after
            if mode_of(name) is not None
            and name in before
            and name != "loss"
            and _is_worse(name, before[name], after[name])
        ]
        if lost or worse:
            name = "loss" if lost else worse[0]
            yield Finding(
                "learnt_not_validated",
                f"Updates on one batch took its training loss from {start:.4g} to {reached:.4g}, but validation_step "
                f"says {name} = {after[name]:.4g} of the same samples ({before[name]:.4g} before): validation "
                "computes something else than what is trained.",
                patient.place("val"),
                {"before": before[name], "after": after[name], "metric": name},
                level="warning" if lost else "note",
            )


def _is_worse(name: str, before: float, after: float) -> bool:
    gain = after - before if mode_of(name) == "max" else before - after
    return gain < 0.02 * max(abs(before), 1e-3)
