"""Reading: find the target that answers are compared with, and see where the loss and the metrics lead them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.data.accumulation_windows import batch_size
from forge_doctor.experiments.answers import Answers, answers
from forge_doctor.experiments.intervene import exchanged, numbers, parts
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient

WHOLE = {"accuracy", "acc", "top1", "r2"}
"""Names of metrics that a perfect answer brings to 1, or 100 per cent, whatever classes a batch has."""
BETTER = {*WHOLE, "f1", "iou", "miou", "dice", "auc", "auroc", "precision", "recall", "jaccard"}
"""Names of metrics whose best value is 1, or 100 per cent."""
WORSE = {"error", "mae", "mse", "rmse", "mape", "wer", "cer"}
"""Names of metrics whose best value is 0."""
NOT_PLAIN = {"macro", "balanced", "class", "mean", "weighted", "adversarial", "robust", "top5", "top3", "k"}
GROWS = (10.0, 100.0, 1000.0)
"""By how much answers are enlarged, to see whether the loss falls without end."""


class Reading:
    """Answers with the one tensor of the batch that the loss compares them with."""

    def __init__(self, held: Answers, leaf: int, target: Tensor, classes: int | None):
        self.held, self.leaf, self.target, self.classes = held, leaf, target, classes
        self.scale = float(target.float().std()) or 1.0 if self.kind == "numbers" else 1.0

    @property
    def kind(self) -> str:
        if self.classes is not None:
            return "classes"
        return "sides" if _is_binary(self.target) else "numbers"

    @property
    def raw(self) -> Tensor:
        return self.held.values[self.leaf]

    def is_perfect(self, x: Tensor) -> bool:
        """Whether an answer agrees with the target everywhere."""
        y = self.target
        if self.kind == "classes":
            keep = y >= 0
            return bool((x.argmax(self.classes) == y)[keep].all()) and bool(keep.any())
        if self.kind == "sides":
            return bool(((x.flatten() > 0) == (y.flatten() > 0)).all())
        return float((x.flatten() - y.flatten()).abs().max()) < 0.1 * self.scale


def target_of(held: Answers) -> Tensor | None:
    """The one tensor of a batch that the loss of given answers depends on, and no answer does; a mask is none."""
    size, batch = batch_size(held.batch), held.batch
    slopes, found = held.slopes(), []
    for x in parts(batch).values():
        if not x.ndim or len(x) != size or torch.equal(x, x.roll(1, 0)):
            continue
        other = exchanged(batch, x, lambda x: x.roll(1, 0))
        if all(torch.allclose(a, b) for a, b in zip(slopes, held.slopes(batch=other), strict=True)):
            continue
        now = answers(held.patient, other)
        if now is not None and all(torch.equal(a, b) for a, b in zip(held.values, now.values, strict=True)):
            found.append(x)
    marks = [x for x in found if any(x is not y and _marks(x, y) for y in found)]
    left = [x for x in found if all(x is not y for y in marks)]
    return left[0] if len(left) == 1 else None


def _marks(x: Tensor, y: Tensor) -> bool:
    """Whether a tensor holds the lengths of another, or marks its positions."""
    if y.ndim < 2:
        return False
    if x.ndim == 1 and not x.is_floating_point():
        return int(x.min()) >= 1 and 2 < int(x.max()) <= y.shape[1]
    return x.shape == y.shape[:2] and bool(((x == 0) | (x == 1)).all())


def read(patient: Patient, batch: Any) -> Reading | None:
    """The answers to a batch, where they are a prediction of one target; computed once."""
    if id(batch) not in patient.supervised:
        with suppress(Exception):
            patient.supervised[id(batch)] = _read(patient, batch)
    return patient.supervised.get(id(batch))


def _read(patient: Patient, batch: Any) -> Reading | None:
    size = batch_size(batch)
    held = answers(patient, batch) if size is not None and size >= 4 and len(patient.names) == 1 else None
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
    said = None
    if found is not None:
        best = found.held.best()[1][found.leaf]
        judge = {"classes": _classes, "sides": _sides, "numbers": _numbers}[found.kind]
        said = _untrained(found) or judge(found, best)
    if said is not None:
        yield Finding("loss_misaligned", said[0], f"{type(patient.task).__name__}.training_step", said[1])


Said = tuple[str, dict[str, Any]] | None


def _untrained(read: Reading) -> Said:
    """Real positions without any gradient, where padded ones have one."""
    real = next((mark for x in parts(read.held.batch).values() if (mark := _real(x, read.target)) is not None), None)
    size = read.held.slopes()[read.leaf].abs()
    if real is None or size.ndim < 2:
        return None
    size = size.movedim(1, -1) if size.ndim == 3 and read.classes == 1 else size
    if size.shape[:2] != real.shape or len(read.target[~real].unique()) > 1:
        return None
    size = size.flatten(2).sum(-1) if size.ndim > 2 else size
    if float(size[real].max()) > 0 or not float(size[~real].mean()) > 0:
        return None
    share = float(real.float().mean())
    text = (
        f"The loss does not depend on the answers at real positions ({share:.0%} of all), but on those at padded "
        "ones: the mask is inverted."
    )
    return text, {"real": share}


def _real(x: Tensor, target: Tensor) -> Tensor | None:
    """What a tensor of lengths, or a mask that begins with one value and ends with the other, says about padding."""
    if target.ndim < 2 or x is target or len(x) != len(target) or not _marks(x, target):
        return None
    if x.ndim == 1:
        return torch.arange(target.shape[1], device=x.device) < x.unsqueeze(1)
    same = x == x[:1, :1]
    begins = bool(same[:, 0].all()) and bool((same.long().diff(dim=1) <= 0).all()) and not bool(same.all())
    return same if begins else None


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


def _numbers(read: Reading, x: Tensor) -> Said:
    y = read.target.flatten().double()
    if min(float((y < 0).double().mean()), float((y > 0).double().mean())) < 0.2 or len(y) < 8:
        return None  # times, rates and counts have answers of other scales
    moved = x.flatten().double() - read.raw.flatten().double()
    if float(moved.std()) < 1e-6:
        return None
    wanted = y - read.raw.flatten().double()
    together = float(torch.corrcoef(torch.stack([moved, wanted]))[0, 1])
    if together > -0.6:
        return None
    text = (
        "Minimising the loss over the answers themselves takes them away from the targets (correlation "
        f"{together:.2f}): the loss rewards wrong answers."
    )
    return text, {"correlation": together}


def errors(patient: Patient) -> Iterator[Finding]:
    """Put an answer beside the target, one deviation away and three: the loss must rise, in one way of reading it."""
    found = answers(patient, patient.batches[0]) if len(patient.names) == 1 else None
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
            with torch.no_grad(), suppress(ValueError):
                rows.append([float(found.loss_at([*found.values[:leaf], z, *found.values[leaf + 1 :]])) for z in given])
    rises = [row for row in rows if row[0] < row[1] < row[2]]
    falls = [row for row in rows if row[0] > row[1] > row[2]]
    if falls and not rises:
        row = falls[0]
        yield Finding(
            "loss_misaligned",
            f"The loss is {row[0]:.4g} where the answers are the targets, {row[1]:.4g} where they are one deviation "
            f"away, and {row[2]:.4g} at three: it rewards errors.",
            f"{type(patient.task).__name__}.training_step",
            {"losses": row},
        )


def spread(patient: Patient) -> Iterator[Finding]:
    """Hold the errors of a mean: the number beside it must have a best value, which depends on them."""
    found = answers(patient, patient.batches[0]) if len(patient.names) == 1 else None
    y = target_of(found) if found is not None else None
    if found is None or y is None or not y.is_floating_point() or y.numel() < 8:
        return
    sign = torch.where(torch.arange(y.numel(), device=y.device).reshape(y.shape) % 2 == 0, 1.0, -1.0).to(y)
    for mean, other, second in _pairs(found, y):

        def loss(far: float, value: Tensor, mean: Any = mean, other: Any = other) -> float:
            values = list(found.values)
            for (leaf, column), given in ((mean, y + far * y.std() * sign), (other, value)):
                values[leaf] = _with(values[leaf], column, given)
            return _at(found, values)

        with suppress(ValueError):  # a deviation that is not positive
            if not loss(0, second) < loss(1, second) < loss(3, second):
                continue
            middle, positive = second.median(), bool((second > 0).all())
            grid = [middle * 2.0**p if positive else middle + p for p in range(-8, 9)]
            rows = torch.tensor([[loss(far, torch.ones_like(y) * value) for value in grid] for far in (0.3, 1.0, 3.0)])
            falls = [bool((row.diff() < 0).all()) - bool((row.diff() > 0).all()) for row in rows]
            gains = (rows[:, 0] - rows[:, -1]).abs()
            if (
                bool(rows.isfinite().all())
                and abs(sum(falls)) == 3
                and float(gains.max() - gains.min()) > 0.01 * float(gains.max())
            ):
                yield Finding(
                    "loss_misaligned",
                    "The loss falls for ever as the second output, which weighs the errors, gets "
                    f"{'high' if falls[0] > 0 else 'low'}er, "
                    "whether errors are 0.3 or 3 deviations of the target: no value of it is best.",
                    f"{type(patient.task).__name__}.training_step",
                    {"losses": rows[:, [0, -1]].tolist()},
                )
                return


def _pairs(held: Answers, y: Tensor) -> Iterator[tuple[Any, Any, Tensor]]:
    """Ways to read the answers as a mean and another number of the target's shape: both places, and that number."""
    places = [(leaf, column) for leaf, x in enumerate(held.values) for column in _columns(x, y)]
    if len(places) == 2:
        for mean, other in (places, places[::-1]):
            x = held.values[other[0]]
            yield mean, other, (x if other[1] is None else x[..., other[1]]).reshape(y.shape)


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
    if len(patient.names) > 1:
        return
    held = answers(patient, patient.batches[0])
    if held is None:
        return
    for i in range(len(held.values)):
        falls = [_at(held, [y * s if i == j else y for j, y in enumerate(held.values)]) for s in (1.0, *GROWS)]
        if _is_endless(falls):
            path = list(held.given)[i][0]
            yield Finding(
                "loss_misaligned",
                f"The loss falls ever faster as the output of {path} grows: {falls[0]:.3g}, and {falls[1]:.3g}, "
                f"{falls[2]:.3g}, {falls[3]:.3g} at 10, 100 and 1000 times its size. A term that should keep it small "
                "has the wrong sign.",
                path,
                {"losses": falls},
            )
            return
    falls = []
    for size in (1.0, *GROWS):
        for p in held.task.parameters():
            p.data.mul_(size)
        falls.append(_at(held, held.values))
        for p in held.task.parameters():
            p.data.div_(size)
    if _is_endless(falls):
        yield Finding(
            "loss_misaligned",
            "The loss falls ever faster as the weights grow, with the same answers "
            f"({', '.join(f'{x:.3g}' for x in falls)}): a "
            "penalty of the weights has the wrong sign.",
            type(patient.task).__name__,
            {"losses": falls},
        )


def _at(held: Answers, values: list[Tensor]) -> float:
    with torch.no_grad():
        return float(held.loss_at(values))


def _is_endless(losses: list[float]) -> bool:
    steps = [b - a for a, b in itertools.pairwise(losses[1:])]
    return all(step < 0 for step in steps) and losses[1] < losses[0] and steps[1] < 30 * steps[0]


def metrics(patient: Patient) -> Iterator[Finding]:
    """Validate perfect answers: what is called accuracy must be 1, and no error larger than before."""
    found = read(patient, patient.val_batches[0]) if patient.can_validate else None
    if found is None:
        return
    held = found.held
    best = held.best()[1]
    if found.kind == "numbers":
        exact = [found.target.reshape(x.shape).to(x) if i == found.leaf else x for i, x in enumerate(best)]
        best = exact if _at(held, exact) <= _at(held, best) else best
    if not found.is_perfect(best[found.leaf]):
        return
    with torch.no_grad(), suppress(LookupError):
        perfect = numbers(held.step(best, stage="val"))
        if held.used != {place[:2] for place in held.given}:
            return  # validation asks other layers
        untrained = numbers(held.step(held.values, stage="val"))
        for name, value in perfect.items():
            wrong = _is_wrong(name, value, untrained.get(name, value), found)
            if wrong:
                yield Finding(
                    "metric_wrong",
                    f"{name} of perfect answers is {value:.4g}{wrong}",
                    f"{type(patient.task).__name__}.validation_step",
                    {"metric": name, "perfect": value, "untrained": untrained.get(name)},
                )
                return


def _is_wrong(name: str, value: float, untrained: float, read: Reading) -> str:
    """What is wrong with a metric of perfect answers, or nothing."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if words & NOT_PLAIN or value != value:
        return ""
    fits = (read.kind == "numbers") == ("r2" in words)
    if words & BETTER and fits and value > 1.01 and abs(value - 100) > 0.5:
        return ": it cannot be above 1."
    if words & WHOLE and fits and value < 0.9:
        return f" ({untrained:.4g} for the untrained model), and should be 1."
    worse = words & WORSE and value > untrained + 0.05 * abs(untrained)
    if (words & BETTER and fits and value < untrained - 0.05) or worse:
        return f", and {untrained:.4g} for the untrained model: it should be better."
    return ""


def quantiles(patient: Patient) -> Iterator[Finding]:
    """The best constants of a loss of quantiles: as many targets must be below each as its quantile says."""
    held = answers(patient, patient.batches[0]) if len(patient.names) == 1 else None
    y = target_of(held) if held is not None else None
    if held is None or y is None or not y.is_floating_point() or len(held.values) != 1 or y.numel() < 16:
        return
    x = held.values[0]
    if x.ndim < 2 or x.shape[-1] < 2 or x.numel() != y.numel() * x.shape[-1]:
        return
    wanted = _levels(patient, x.shape[-1])
    if wanted is None:
        return
    best = held.best(constant=True)[1][0].reshape(-1, x.shape[-1])
    below = [float((y.flatten() < column).float().mean()) for column in best.T]
    outer = [(q, share) for q, share in zip(wanted, below, strict=True) if abs(q - 0.5) > 0.15]
    if outer and all(abs(share - q) > 0.25 for q, share in outer):
        q, share = outer[0]
        yield Finding(
            "loss_misaligned",
            f"The best constant for the quantile {q:g} has {share:.0%} of the targets below it: the sides of the loss "
            "are exchanged.",
            f"{type(patient.task).__name__}.training_step",
            {"quantiles": wanted, "below": below},
        )


def _levels(patient: Patient, count: int) -> list[float] | None:
    """The shares between 0 and 1, in rising order, that the task or its file holds, as many as there are answers."""
    step = getattr(type(patient.task).training_step, "__globals__", {})
    for place in (vars(patient.task), dict(patient.task.named_buffers()), step):
        for value in place.values():
            found = value.flatten().tolist() if isinstance(value, Tensor) and value.numel() == count else value
            if not isinstance(found, (list, tuple)) or len(found) != count or not all(type(q) is float for q in found):
                continue
            if all(0 < a < b < 1 for a, b in itertools.pairwise(found)):
                return list(found)
    return None
