"""Simple models that show what samples say about their targets: ridge regression and nearest neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_doctor.patient import Patient
from forge_doctor.probes.data import Sample, is_target

MOST_COLUMNS = 256
"""Columns of each tensor that a simple model gets."""
WORDS = 512
"""Different words that are counted; more share a count."""
MOST_ROWS = 1000
MOST_CLASSES = 100
NEIGHBOURS = 10

Model = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Table:
    """Samples as rows of numbers, with one target each: one column of a number, or one column per class."""

    x: Tensor
    y: Tensor
    has_classes: bool

    def __len__(self) -> int:
        return len(self.x)


def table(patient: Patient, samples: list[Sample], most: int = MOST_ROWS) -> Table | None:
    """Make a table of samples; None where they have no target of one number."""
    samples = samples[:most]
    place = patient.label_position if patient.class_loss is not None else _number_position(patient)
    if place is None or not samples or place >= len(patient.samples[0]):
        return None
    if any(len(sample) != len(patient.samples[0]) for sample in samples):
        return None
    y = [sample[place] for sample in samples]
    inputs = [_columns([s[other] for s in samples]) for other in range(len(samples[0])) if other != place]
    found = [columns for columns in inputs if columns is not None]
    if any(value.numel() != 1 for value in y) or not found:
        return None
    x, target = torch.cat(found, 1), torch.stack([value.flatten() for value in y])
    has_classes = patient.class_loss is not None
    y = _one_hot(target, _classes(patient)) if has_classes else target.float()
    return Table(x, y, has_classes) if y is not None and bool(x.isfinite().all()) else None


def _number_position(patient: Patient) -> int | None:
    """The place of a target of one number among the tensors of a sample."""
    first = patient.samples[0] if patient.samples else ()
    places = [i for i, x in enumerate(first) if x.is_floating_point() and x.numel() == 1 and is_target(patient, i)]
    return places[0] if places else None


def _classes(patient: Patient) -> int:
    """The number of classes in both splits."""
    found = [patient.labels_of(samples) for samples in (patient.samples, patient.val_samples)]
    return max((int(labels.max()) + 1 for labels in found if labels is not None), default=0)


def _one_hot(labels: Tensor, classes: int) -> Tensor | None:
    """One column per class; None if there are too many, or labels that are none."""
    labels = labels.flatten().long()
    is_right = classes <= MOST_CLASSES and int(labels.min()) >= 0 and int(labels.max()) < classes
    return F.one_hot(labels, classes).float() if is_right else None


def _columns(rows: list[Tensor]) -> Tensor | None:
    """Numbers as they are, ids and words as counts; None if they cannot be laid side by side."""
    if rows[0].is_floating_point():
        if len({row.shape for row in rows}) > 1:
            return None
        if not rows[0].numel():
            return None
        flat = torch.stack(rows).reshape(len(rows), -1).float()
        return flat[:, :: -(-flat.shape[1] // MOST_COLUMNS)]
    if rows[0].is_complex() or any(row.ndim > 1 for row in rows):
        return None
    words = [row.flatten().long() % WORDS for row in rows]
    return torch.stack([torch.bincount(row, minlength=WORDS) for row in words]).float()


def ridge(x: Tensor, y: Tensor, asked: Tensor) -> Tensor:
    """Fit a linear model with a penalty, and return its answers."""
    centre, spread = x.mean(0), x.std(0)
    scale = torch.where(spread > 1e-6, 1 / spread.clamp_min(1e-6), 0.0)
    x, asked = ((z - centre) * scale for z in (x, asked))
    mean = y.mean(0)
    penalty = 0.1 * len(x)
    if len(x) < x.shape[1]:
        weights = x.T @ torch.linalg.solve(x @ x.T + penalty * torch.eye(len(x)), y - mean)
    else:
        weights = torch.linalg.solve(x.T @ x + penalty * torch.eye(x.shape[1]), x.T @ (y - mean))
    return asked @ weights + mean


def neighbours(x: Tensor, y: Tensor, asked: Tensor) -> Tensor:
    """Return the mean target of the nearest rows."""
    centre, spread = x.mean(0), x.std(0)
    scale = torch.where(spread > 1e-6, 1 / spread.clamp_min(1e-6), 0.0)
    distances = torch.cdist((asked - centre) * scale, (x - centre) * scale)
    return y[distances.topk(min(NEIGHBOURS, len(x)), largest=False).indices].mean(1)


MODELS: dict[str, Model] = {"a linear model": ridge, "nearest neighbours": neighbours}


def skill(answers: Tensor, y: Tensor, has_classes: bool) -> float:
    """How good answers are: 1 is perfect, 0 is as good as an answer that looks at nothing."""
    if has_classes:
        chance = float(y.mean(0).max())
        right = float((answers.argmax(1) == y.argmax(1)).float().mean())
        return (right - chance) / max(1e-6, 1 - chance)
    both = torch.cat([answers, y], 1)
    related = float(torch.corrcoef(both.T)[0, 1]) if bool((both.std(0) > 1e-9).all()) else 0.0
    return related * abs(related)


def crossed(model: Model, rows: Table) -> float:
    """The skill of a model on one half of the rows, fitted on the other; both ways."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    halves = order[: len(rows) // 2], order[len(rows) // 2 :]
    return sum(
        skill(model(rows.x[a], rows.y[a], rows.x[b]), rows.y[b], rows.has_classes) / 2
        for a, b in (halves, halves[::-1])
    )
