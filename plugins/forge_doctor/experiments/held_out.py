"""Held out: does what a copy learns from some batches of train hold for others of train, and for those of val?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from forge.contract.task import TaskModule
from forge.torch_internals import pytree
from forge_doctor.experiments.answers import answers
from forge_doctor.experiments.intervene import numbers
from forge_doctor.experiments.reading import predicts
from forge_doctor.experiments.short_fit import begun, short_fit
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient, first

ROUNDS, MOST_BATCHES = (100, 500), 60
"""Updates of a fit that must hold for other samples, more where the first do not teach enough; and its batches."""
LEARNT = 0.15
"""The share of the loss of held-out samples that a fit takes away which has learnt enough to be compared."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A fit on some batches of train, and its losses before and after on those held out, and on those of val."""

    task: TaskModule
    updates: int
    held: tuple[float, float]
    val: tuple[float, float]

    @property
    def gains(self) -> tuple[float, float]:
        """The shares of the losses that are gone."""
        held, val = ((before - after) / max(abs(before), 1e-12) for before, after in (self.held, self.val))
        return held, val


def generalises(patient: Patient) -> Iterator[Finding]:
    """Train on some batches of train: others of train that were held out must not be much easier than those of val."""
    if not patient.can_validate or len(patient.names) > 1:
        return
    served = patient.trainer.env.move(first(patient.train, MOST_BATCHES))
    if len(served) < 5:
        return
    size = max(1, len(served) // 5)
    kept, given = served[-size:], served[:-size]
    fit = _fitted(patient, given, kept)
    is_told = patient.is_supervised or predicts(patient, patient.batches[0])
    yield from islice(chain(_nothing_held(patient, fit, kept) if is_told else (), _val_disagrees(fit)), 1)


def _fitted(patient: Patient, given: list[Any], kept: list[Any]) -> Fit:
    """Train until enough is learnt of what was held out."""
    splits = kept, patient.val_batches
    start = [_validated(patient, begun(patient), batches) for batches in splits]
    for updates in ROUNDS:
        task = short_fit(patient, [given[i % len(given)] for i in range(updates)])
        held, val = ((was, _validated(patient, task, batches)) for was, batches in zip(start, splits, strict=True))
        fit = Fit(task, updates, held, val)
        if fit.gains[0] > LEARNT or updates == ROUNDS[-1]:
            return fit
    raise AssertionError


def _nothing_held(patient: Patient, fit: Fit, kept: list[Any]) -> Iterator[Finding]:
    """The loss of what was held out must fall, and below that of one answer for all samples."""
    before, after = fit.held
    alike = _constant(patient, fit.task, kept[:8]) if predicts(patient, patient.batches[0]) else None
    if fit.gains[0] < 0.01 or (alike is not None and alike[0] > alike[1]):
        best = "" if alike is None else f"; one answer for all of these samples reaches {alike[1]:.4g}"
        text = (
            f"{fit.updates} updates on other batches of train take the loss of held-out ones from {before:.4g} to "
            f"{after:.4g}{best}: nothing else that holds for them was learnt."
        )
        yield Finding("labels_no_easier", text, "train", {"before": before, "after": after})


def _val_disagrees(fit: Fit) -> Iterator[Finding]:
    """What holds for train must hold for val."""
    held, val = fit.held, fit.val
    if fit.gains[0] > LEARNT and fit.gains[1] < 0.1 * fit.gains[0] and val[1] - held[1] > 0.5 * (held[0] - held[1]):
        yield Finding(
            "splits_disagree",
            f"{fit.updates} updates take the validation loss of batches of train that were held out from {held[0]:.4g} "
            f"to {held[1]:.4g}, and that of val from {val[0]:.4g} to {val[1]:.4g}: what holds for train does not hold "
            "for val. Labels, words, columns or scales are encoded in another way there.",
            "val",
            {"train, held out": [*held], "val": [*val]},
        )


def _constant(patient: Patient, task: TaskModule, batches: list[Any]) -> tuple[float, float] | None:
    """The training loss of some batches together, in evaluation mode, and the lowest of one answer for all samples."""
    with suppress(Exception):  # batches that cannot be put together
        whole = pytree.tree_map(lambda *given: torch.cat(given) if isinstance(given[0], Tensor) else given[0], *batches)
        held = answers(patient, whole)
        reached = float(patient.loss(task.eval(), whole).detach())
        return (reached, held.best(constant=True)[0]) if held is not None else None
    return None


def _validated(patient: Patient, task: TaskModule, batches: list[Any]) -> float:
    """The loss of validation over a few batches; that of training, in evaluation mode, where it returns none."""
    task.trainer = patient.trainer
    task.eval()
    with torch.no_grad():
        found = [
            numbers(patient.run(task, batch, "val")).get("loss") or float(patient.loss(task, batch))
            for batch in batches[:4]
        ]
    return sum(found) / len(found)
