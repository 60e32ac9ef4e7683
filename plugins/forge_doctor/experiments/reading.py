"""Reading: find the target that answers are compared with, and see where the loss and the metrics lead them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.data.accumulation_windows import batch_size
from forge_doctor.experiments.answers import Answers, answers, held_of
from forge_doctor.experiments.intervene import exchanged, parts
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient, tensors
from forge_doctor.probes.data import is_target

GROWS = (1.0, 10.0, 100.0, 1000.0)
"""By how much answers are enlarged, to see whether the loss falls without end."""


class Reading:
    """Answers with the one tensor of the batch that the loss compares them with."""

    def __init__(self, held: Answers, leaf: int, target: Tensor, classes: int | None):
        self.held, self.leaf, self.target, self.classes = held, leaf, target, classes

    @property
    def kind(self) -> str:
        if self.classes is not None:
            return "classes"
        return "sides" if _is_binary(self.target) else "numbers"

    @property
    def raw(self) -> Tensor:
        return self.held.values[self.leaf]


def sides(held: Answers) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of a batch that answers depend on; and those that do no more than the loss of given answers."""
    size, batch = batch_size(held.batch), held.batch
    slopes, asked, told = held.slopes(), [], []
    for x in parts(batch).values():
        if not x.ndim or len(x) != size or torch.equal(x, x.roll(1, 0)):
            continue
        other = exchanged(batch, x, lambda x: x.roll(1, 0))
        with suppress(Exception):  # the step refuses it: a length or an offset, no target
            now = answers(held.patient, other, stage=held.stage)
            if now is None:
                continue
            if not all(torch.equal(a, b) for a, b in zip(held.values, now.values, strict=True)):
                asked.append(x)
            elif not all(torch.allclose(a, b) for a, b in zip(slopes, held.slopes(batch=other), strict=True)):
                told.append(x)
    return asked, told


def target_of(held: Answers) -> Tensor | None:
    """The one tensor of a batch that answers are compared with; a mask is none."""
    _, found = sides(held)
    marks = [x for x in found if any(x is not y and _marks(x, y) for y in found)]
    left = [x for x in found if all(x is not y for y in marks)]
    return left[0] if len(left) == 1 else None


def places(patient: Patient) -> tuple[set[int], set[int]]:
    """The places of the tensors of a batch that answers depend on, and of those that they are compared with."""
    batch = patient.batches[0]
    count = range(len(tensors(batch)))
    told = {i for i in count if is_target(patient, i)}
    asked = set(count) - told
    with suppress(Exception):
        held = held_of(patient, batch)
        if held is not None and held.values[0].isfinite().all():
            one, other = ({id(x) for x in found} for found in sides(held))
            given = [id(x) for x in tensors(batch)]
            asked, told = {i for i in asked if given[i] in one}, told | {i for i in count if given[i] in other}
    return asked, told


def _marks(x: Tensor, y: Tensor) -> bool:
    """Whether a tensor holds the lengths of another, or marks its positions."""
    if y.ndim < 2:
        return False
    if x.ndim == 1 and not x.is_floating_point():
        return int(x.min()) >= 1 and 2 < int(x.max()) <= y.shape[1]
    return x.shape == y.shape[:2] and bool(((x == 0) | (x == 1)).all())


def read(patient: Patient, batch: Any) -> Reading | None:
    """The answers to a batch, where they are a prediction of one target."""
    with suppress(Exception):
        return _read(held_of(patient, batch)) if (batch_size(batch) or 0) >= 4 else None


def _read(held: Answers | None) -> Reading | None:
    y = target_of(held) if held is not None else None
    if held is None or y is None or not _is_by_sample(held, y):
        return None
    same = [i for i, x in enumerate(held.values) if _squeezed(x) == _squeezed(y)]
    if len(same) == 1 and (y.is_floating_point() or _is_binary(y)):
        return Reading(held, same[0], y, None)
    fits = {i: dims for i, x in enumerate(held.values) if (dims := _class_dimensions(x, y))}
    if y.is_floating_point() or len(fits) != 1:
        return None
    ((leaf, dims),) = fits.items()
    rise = -held.slopes([torch.zeros_like(x) for x in held.values])[leaf]
    return Reading(held, leaf, y, max(dims, key=lambda dim: float((rise.argmax(dim) == y).float().mean())))


def _is_by_sample(held: Answers, y: Tensor) -> bool:
    """Whether the gradient at a sample's answer depends on its own target, not on those of the others."""
    half = len(y) // 2
    other = exchanged(held.batch, y, lambda x: torch.cat([x[:half], x[-1:].expand_as(x[half:])]))
    rows = lambda slopes: torch.cat([g[:half].flatten() for g in slopes if g.ndim and len(g) == len(y)])  # noqa: E731
    mine, theirs = rows(held.slopes()).double(), rows(held.slopes(batch=other)).double()
    return bool(F.cosine_similarity(mine, theirs, dim=0) > 0.98)


def _is_binary(y: Tensor) -> bool:
    return y.unique().tolist() in ([0, 1], [-1, 1], [False, True])


def _squeezed(x: Tensor) -> list[int]:
    return [n for n in x.shape if n != 1]


def _class_dimensions(x: Tensor, y: Tensor) -> list[int]:
    """Dimensions of an answer that hold scores of classes, the last one first."""
    if x.ndim != y.ndim + 1 or y.ndim < 1:
        return []
    dims = [d for d in dict.fromkeys((x.ndim - 1, 1)) if [n for i, n in enumerate(x.shape) if i != d] == list(y.shape)]
    return [d for d in dims if x.shape[d] > max(1, int(y.max()))]


def leads(patient: Patient) -> Iterator[Finding]:
    """Minimise the loss over the answers: they must come to the target."""
    found = read(patient, patient.batches[0])
    if found is None or found.kind == "numbers":  # of which `errors` says it
        return
    said = (_classes if found.kind == "classes" else _sides)(found, found.held.best()[1][found.leaf])
    if said is not None:
        yield Finding("loss_misaligned", said[0], patient.place(), said[1])


Said = tuple[str, dict[str, Any]] | None


def _classes(read: Reading, x: Tensor) -> Said:
    """Whether the score of a label's own class ends up as the lowest."""
    assert read.classes is not None
    scores, y = x.movedim(read.classes, -1).flatten(0, -2), read.target.flatten()
    keep = (y >= 0) & (y < scores.shape[1])
    scores, y = scores[keep], y[keep]
    if len(y) < 4 or len(y.unique()) < 2 or scores.shape[1] < 2:
        return None
    own = scores.gather(1, y[:, None].long()).squeeze(1)
    others = scores.scatter(1, y[:, None].long(), float("inf")).min(1).values
    spread = scores.max(1).values - scores.min(1).values
    share = float((own < others - 0.1 * spread).float().mean())
    if share < 0.9:
        return None
    text = (
        f"Minimising the loss over the scores themselves makes that of the right class the lowest in {share:.0%} of "
        "the samples: the loss rewards wrong answers."
    )
    return text, {"lowest": share}


def _sides(read: Reading, x: Tensor) -> Said:
    y = read.target.flatten() > 0
    if min(int(y.sum()), int((~y).sum())) < 4:
        return None
    right = float(((x.flatten() > 0) == y).float().mean())
    if right < 0.1:
        text = (
            f"Minimising the loss over the answers themselves brings {1 - right:.0%} of them to the wrong side of the "
            "target: the loss rewards wrong answers."
        )
        return text, {"right": right}
    return _one_sided(read, x.flatten() > 0, y)


def _one_sided(read: Reading, best: Tensor, y: Tensor) -> Said:
    """Whether only one of two classes gives gradients, wherever the answers are, and all of one direction."""
    if read.raw.numel() != len(read.raw):
        return None  # of several columns one may stand for the others
    found: list[bool] = []
    for value in (-3.0, 0.0, 3.0):
        given = [torch.full_like(x, value) if i == read.leaf else x for i, x in enumerate(read.held.values)]
        size = read.held.slopes(given)[read.leaf].abs().flatten()
        without = [side for side in (False, True) if float(size[y == side].max()) == 0]
        if len(without) != 1:
            return None
        found += without
    silent = found[0]
    if len(set(found)) > 1 or float((best[y != silent] != silent).float().mean()) < 0.95:
        return None  # a mask, not a target
    share = float((y == silent).float().mean())
    text = (
        f"The loss does not depend on the answers for samples with target {int(silent)} ({share:.0%} of all): "
        f"answering {int(not silent)} for every sample is best."
    )
    return text, {"share": share}


def errors(patient: Patient) -> Iterator[Finding]:
    """Put an answer beside the target, one deviation away and three: the loss must rise, in one way of reading it."""
    found = held_of(patient, patient.batches[0])
    y = target_of(found) if found is not None else None
    if found is None or y is None or not y.is_floating_point() or y.numel() < 8:
        return
    if not bool((y < 0).any()) or not bool((y > 0).any()):
        return
    sign = torch.where(torch.arange(y.numel(), device=y.device).reshape(y.shape) % 2 == 0, 1.0, -1.0).to(y)
    rows = []
    for leaf, x in enumerate(found.values):
        for column in _columns(x, y):
            given = [_with(x, column, y + far * y.std() * sign) for far in (0.0, 1.0, 3.0)]
            with suppress(ValueError):
                rows.append([found.value_at([*found.values[:leaf], z, *found.values[leaf + 1 :]]) for z in given])
    rises = [row for row in rows if row[0] < row[1] < row[2]]
    falls = [row for row in rows if row[0] > row[1] > row[2]]
    if falls and not rises:
        text = (
            "The loss is {:.4g} where the answers are the targets, {:.4g} where they are one deviation away, and "
            "{:.4g} at three: it rewards errors."
        )
        yield Finding("loss_misaligned", text.format(*falls[0]), patient.place(), {"losses": falls[0]})


def _columns(x: Tensor, y: Tensor) -> Sequence[int | None]:
    """The columns of an answer that can be read as the target; None stands for all of it."""
    if x.numel() == y.numel():
        return [None]
    per = x.numel() // y.numel() if x.numel() % y.numel() == 0 else 0
    return range(per) if 2 <= per <= 8 and x.shape[-1] == per else []


def _with(x: Tensor, column: int | None, value: Tensor) -> Tensor:
    if column is None:
        return value.reshape(x.shape).to(x)
    other = x.clone()
    other[..., column] = value.reshape(x.shape[:-1]).to(x)
    return other


def endless(patient: Patient) -> Iterator[Finding]:
    """Enlarge answers, or weights: the loss must not fall ever faster."""
    held = held_of(patient, patient.batches[0])
    if held is None:
        return
    for i in range(len(held.values)):
        falls = [held.value_at([y * s if i == j else y for j, y in enumerate(held.values)]) for s in GROWS]
        if _is_endless(falls):
            yield _endless(f"the output of {list(held.given)[i][0]} grows", falls, list(held.given)[i][0])
            return
    falls = []
    for size in GROWS:
        for p in held.task.parameters():
            p.data.mul_(size)
        falls.append(held.value_at(held.values))
        for p in held.task.parameters():
            p.data.div_(size)
    if _is_endless(falls):
        yield _endless("the weights grow, with the same answers", falls, type(patient.task).__name__)


def _endless(what: str, falls: list[float], where: str) -> Finding:
    text = (
        f"The loss falls ever faster as {what} ({', '.join(f'{x:.3g}' for x in falls)} at 1, 10, 100 and 1000 times "
        "the size): a term that should keep it small has the wrong sign."
    )
    return Finding("loss_misaligned", text, where, {"losses": falls})


def _is_endless(losses: list[float]) -> bool:
    steps = [b - a for a, b in itertools.pairwise(losses[1:])]
    return all(step < 0 for step in steps) and losses[1] < losses[0] and steps[1] < 30 * steps[0]
