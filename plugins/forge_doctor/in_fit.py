"""What a plain fit sees at no cost: class labels in a regression, and values that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from forge.data.accumulation_windows import batch_size
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient, tensors
from forge_doctor.watch import REGRESSION, origin

BOUNDED = ("Sigmoid", "Softmax")
"""What makes probabilities: their squared error is the Brier score, and meant."""


def class_targets(patient: Patient) -> Iterator[Finding]:
    """Class labels of the batch, as numbers or as rows with a single one, in a loss of numbers."""
    size, given = batch_size(patient.batches[0]), tensors(patient.batches[0])
    labels = [x for x in given if x.ndim and len(x) == x.numel() == size and _is_whole(x)]
    for call in patient.watched.losses:
        x, y = call.input, call.target
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            continue
        is_given = any(y.shape == z.shape and torch.equal(y, z.to(y)) for z in given)
        if call.name == "cross_entropy" and is_given and _is_one_hot(y):
            text = f"cross_entropy gets rows of {y.shape[1]} with a single one as targets: they are numbers of classes."
            cure = "Pass y.argmax(1), unless some samples have several classes: weights and ignore_index ask for it."
            yield Finding("class_ids_in_regression", text, call.where, cure=cure, level="note")
        if call.name not in REGRESSION or origin(x) in BOUNDED:
            continue
        what = _numbers_of_classes(y) or _two_classes(y, given) or _rows_of_classes(y, labels, is_given)
        if what:
            text = f"{call.name} gets {what} as targets: they are labels of classes."
            yield Finding("class_ids_in_regression", text, call.where)


def _is_whole(x: Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex()


def _numbers_of_classes(y: Tensor) -> str:
    """The whole numbers from 0 on, each several times."""
    values = y.detach().float().unique()
    count = len(values)
    several = 3 <= count <= 50 and y.numel() >= 3 * count
    return f"the whole numbers 0 to {count - 1}" if several and values.tolist() == list(range(count)) else ""


def _two_classes(y: Tensor, given: list[Tensor]) -> str:
    """The two values of a label that the batch holds, one for each sample."""
    same = any(
        y.numel() == len(x) == x.numel() and bool((y.flatten() == x.flatten().to(y)).all()) for x in given if x.ndim
    )
    return "0 and 1" if same and y.detach().unique().tolist() == [0, 1] else ""


def _rows_of_classes(y: Tensor, labels: list[Tensor], is_given: bool) -> str:
    """Rows of zeros with a one, as the batch holds them, or at the place of a label that it holds."""
    if not _is_one_hot(y):
        return ""
    place = y.argmax(1)
    same = is_given or any(len(x) == len(y) and bool((place == x.flatten().to(place)).all()) for x in labels)
    return f"rows of {y.shape[1]} with a single one" if same else ""


def _is_one_hot(y: Tensor) -> bool:
    """Whether all rows are of zeros with a single one, not always at the same place."""
    if y.ndim != 2 or y.shape[1] < 2 or not y.is_floating_point() or not bool(((y == 0) | (y == 1)).all()):
        return False
    return bool((y.sum(1) == 1).all()) and len(y.argmax(1).unique()) > 1


class FiniteWatch:
    """Notes which tensors of an evaluation's batches are not finite where the step's results are not either.

    A flag for each place in a batch stays on the device until the evaluation is over.
    """

    def __init__(self) -> None:
        self.flags: dict[int, Tensor] = {}

    def add(self, batch: Any, output: Any) -> None:
        results = [x.detach() for x in tensors(output) if x.is_floating_point()]
        if not results:
            return
        spoilt = torch.stack([~x.isfinite().all() for x in results]).any()
        for place, x in enumerate(tensors(batch)):
            if x.is_floating_point() and x.layout is torch.strided:
                flag = spoilt & ~x.isfinite().all()
                self.flags[place] = self.flags[place] + flag if place in self.flags else flag.long()

    def found(self, stage: str) -> Iterator[Finding]:
        bad = {place: int(flag) for place, flag in self.flags.items() if bool(flag)}
        for place, count in bad.items():
            text = (
                f"Tensor {place} of {count} {'batch' if count == 1 else 'batches'} of {stage} holds NaN or infinite "
                "values, and so do the results of the step."
            )
            yield Finding("bad_values", text, stage, {"batches": count})
