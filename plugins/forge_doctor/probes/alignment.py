"""Probes of the loss and the metrics alone: predictions are free tensors, and must go where the target is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from forge_doctor.findings import Finding
from forge_doctor.free_output import FreeOutput, Shape, Supervised, optimised, shape_of, supervised
from forge_doctor.patient import Patient

BETTER = {
    "accuracy",
    "acc",
    "top1",
    "f1",
    "iou",
    "miou",
    "dice",
    "r2",
    "auc",
    "auroc",
    "precision",
    "recall",
    "jaccard",
}
"""Names of metrics whose best value is 1, or 100 per cent."""
WHOLE = {"accuracy", "acc", "top1", "r2"}
"""Those that a perfect prediction brings to 1 whatever classes a batch has."""
WORSE = {"error", "mae", "mse", "rmse", "mape", "wer", "cer"}
"""Names of metrics whose best value is 0."""
NOT_PLAIN = {"macro", "balanced", "class", "mean", "weighted", "adversarial", "robust", "top5", "top3", "k"}


def loss(patient: Patient) -> Iterator[Finding]:
    """Minimise the loss over the prediction itself: it must come to the target."""
    whole = supervised(patient, patient.batches[0])
    if whole is None:
        return
    read = Reading.of(whole)
    text = read.verdict() if read is not None else None
    if read is None or text is None:
        return
    message, evidence = text
    yield Finding("loss_misaligned", message, f"{type(patient.task).__name__}.training_step", evidence)


class Reading:
    """A prediction of a known kind, with what its optimum says."""

    def __init__(self, whole: Supervised, leaf: int, target: Tensor, classes: int | None):
        self.whole, self.leaf, self.target, self.classes = whole, leaf, target, classes
        self.scale = float(target.float().std()) or 1.0 if self.kind == "numbers" else 1.0

    @classmethod
    def of(cls, whole: Supervised) -> Reading | None:
        """Find the one prediction that has the shape of the target."""
        raw, y = whole.free.raw, whole.target
        found = [i for i, x in enumerate(raw) if _squeezed(x) == _squeezed(y)]
        if len(found) == 1 and (y.is_floating_point() or _is_binary(y)):
            return cls(whole, found[0], y, None)
        fits = {i: dims for i, x in enumerate(raw) if (dims := _class_dimensions(x, y))}
        if y.is_floating_point() or len(fits) != 1:
            return None
        ((leaf, dims),) = fits.items()
        return cls(whole, leaf, y, dims[0] if len(dims) == 1 else _nearer(whole, leaf, dims))

    @property
    def kind(self) -> str:
        if self.classes is not None:
            return "classes"
        return "sides" if _is_binary(self.target) else "numbers"

    def shapes(self) -> list[Shape]:
        raw = self.whole.free.raw
        return [shape_of(x, self.classes if i == self.leaf else _last(x), self.scale) for i, x in enumerate(raw)]

    def optimum(self, batch: Any = None) -> tuple[Tensor, list[Tensor], list[Shape]] | None:
        """The best prediction, of the shape of the target, all predictions, and their shapes."""
        shapes = self.shapes()
        found = optimised(self.whole.free, shapes, 0.1 * self.scale, batch)
        return None if found is None else (found[self.leaf], found, shapes)

    def verdict(self) -> tuple[str, dict[str, Any]] | None:
        untrained = self._untrained()
        if untrained is not None:
            return untrained
        best = self.optimum()
        if best is None:
            return None
        x, _, shapes = best
        middle = shapes[self.leaf].middle
        if self.classes is not None:
            return self._classes(x, self.classes)
        if self.kind == "sides":
            return self._sides(x, middle)
        return self._numbers(x, shapes[self.leaf])

    def _untrained(self) -> tuple[str, dict[str, Any]] | None:
        """Real positions without any gradient, where padded ones have one."""
        real = self.whole.real
        if real is None:
            return None
        size = self.whole.free.gradients(self.whole.free.raw)[self.leaf].abs()
        if size.ndim == 3 and self.classes == 1:
            size = size.movedim(1, -1)
        if size.shape[:2] != real.shape or len(self.target[~real].unique()) > 1:
            return None
        size = size.flatten(2).sum(-1) if size.ndim > 2 else size
        if float(size[real].max()) == 0 and float(size[~real].mean()) > 0:
            share = float(real.float().mean())
            return (
                f"The loss does not depend on the predictions at real positions ({share:.0%} of all), but on those at "
                "padded ones: the mask is inverted.",
                {"real": share},
            )
        return None

    def _classes(self, x: Tensor, dim: int) -> tuple[str, dict[str, Any]] | None:
        """Whether the score of a label's own class ends up as the lowest."""
        scores, y = x.movedim(dim, -1).flatten(0, -2), self.target.flatten()
        keep = (y >= 0) & (y < scores.shape[1])
        scores, y = scores[keep], y[keep]
        if len(y) < 4 or len(y.unique()) < 2 or scores.shape[1] < 2:
            return None
        own = scores.gather(1, y[:, None]).squeeze(1)
        others = scores.scatter(1, y[:, None], float("inf")).min(1).values
        spread = scores.max(1).values - scores.min(1).values
        share = float((own < others - 0.1 * spread).float().mean())
        if share > 0.9:
            return (
                f"Minimising the loss over the scores themselves makes that of the right class the lowest in "
                f"{share:.0%} of the samples: the loss rewards wrong answers.",
                {"lowest": share},
            )
        return None

    def _sides(self, x: Tensor, middle: float) -> tuple[str, dict[str, Any]] | None:
        raw, y = self.whole.free.raw[self.leaf].detach(), self.target.flatten() > 0
        if not (middle or (bool((raw < 0).any()) and bool((raw > 0).any()))) or min(int(y.sum()), int((~y).sum())) < 4:
            return None
        right = float(((x.flatten() > middle) == y).float().mean())
        if right < 0.1:
            return (
                f"Minimising the loss over the predictions themselves brings {1 - right:.0%} of them to the wrong side "
                "of the target: the loss rewards wrong answers.",
                {"right": right},
            )
        return self._one_sided(x.flatten() > middle, y, middle)

    def _one_sided(self, best: Tensor, y: Tensor, middle: float) -> tuple[str, dict[str, Any]] | None:
        """Whether only one of two classes gives gradients, wherever the predictions are, and all of one direction."""
        raw = self.whole.free.raw
        if raw[self.leaf].numel() != len(raw[self.leaf]):
            return None  # of several columns one may stand for the others
        found: list[bool] = []
        for value in (0.1, 0.5, 0.9) if middle else (-3.0, 0.0, 3.0):
            given = [torch.full_like(x, value) if i == self.leaf else x for i, x in enumerate(raw)]
            size = self.whole.free.gradients(given)[self.leaf].abs().flatten()
            without = [side for side in (False, True) if float(size[y == side].max()) == 0]
            if len(without) != 1:
                return None
            found += without
        silent = found[0]
        if len(set(found)) > 1 or float((best[y != silent] != silent).float().mean()) < 0.95:
            return None  # a mask, not a target
        share = float((y == silent).float().mean())
        return (
            f"The loss does not depend on the predictions for samples with target {int(silent)} ({share:.0%} of "
            f"all): predicting {int(not silent)} for every sample is best.",
            {"share": share},
        )

    def _numbers(self, x: Tensor, shape: Shape) -> tuple[str, dict[str, Any]] | None:
        y = self.target.flatten().double()
        both = float((y < 0).double().mean()), float((y > 0).double().mean())
        if min(both) < 0.2 or len(y) < 8 or bool((self.whole.free.raw[self.leaf] >= 0).all()):
            return None
        moved = x.flatten().double() - shape.of(shape.start).flatten().double()
        if float(moved.std()) < 1e-6:
            return None
        together = float(torch.corrcoef(torch.stack([moved, y - y.mean()]))[0, 1])
        if together < -0.6:
            return (
                "Minimising the loss over the predictions themselves takes them away from the targets (correlation "
                f"{together:.2f}): the loss rewards wrong answers.",
                {"correlation": together},
            )
        return None

    def is_perfect(self, x: Tensor, middle: float) -> bool:
        """Whether a prediction agrees with the target everywhere."""
        y = self.target
        if self.kind == "classes":
            keep = y >= 0
            return bool((x.argmax(self.classes) == y)[keep].all()) and bool(keep.any())
        if self.kind == "sides":
            return bool(((x.flatten() > middle) == (y.flatten() > 0)).all())
        return float((x.flatten() - y.flatten()).abs().max()) < 0.1 * self.scale


def _nearer(whole: Supervised, leaf: int, dims: list[int]) -> int:
    """Of two dimensions of one size, the one along which the loss raises the scores of the labels."""
    flat = [torch.zeros_like(x) for x in whole.free.raw]
    rise = -whole.free.gradients(flat)[leaf]
    return max(dims, key=lambda dim: float((rise.argmax(dim) == whole.target).float().mean()))


def _is_binary(y: Tensor) -> bool:
    values = y.unique()
    return len(values) == 2 and values.tolist() in ([0, 1], [-1, 1], [False, True])


def _squeezed(x: Tensor) -> list[int]:
    return [n for n in x.shape if n != 1]


def _class_dimensions(x: Tensor, y: Tensor) -> list[int]:
    """Dimensions of a prediction that hold scores of classes, the last one first."""
    if x.ndim != y.ndim + 1 or y.ndim < 1:
        return []
    top = int(y.max())
    dims = [d for d in dict.fromkeys((x.ndim - 1, 1)) if [n for i, n in enumerate(x.shape) if i != d] == list(y.shape)]
    return [d for d in dims if x.shape[d] > max(1, top)]


def _last(x: Tensor) -> int | None:
    return x.ndim - 1 if x.ndim > 1 else None


def metrics(patient: Patient) -> Iterator[Finding]:
    """Validate a perfect prediction: what is called accuracy must be 1, and no error larger than before."""
    if not patient.can_validate:
        return
    whole = supervised(patient, patient.val_batches[0])
    read = Reading.of(whole) if whole is not None else None
    best = read.optimum() if read is not None else None
    if read is None or best is None or not read.is_perfect(best[0], best[2][read.leaf].middle):
        return
    perfect, untrained = (
        _validated(read.whole.free, _exact(read, best[1])),
        _validated(read.whole.free, read.whole.free.raw),
    )
    for name, value in perfect.items():
        wrong = _is_wrong(name, value, untrained.get(name, value), read)
        if wrong:
            yield Finding(
                "metric_wrong",
                f"{name} of a perfect prediction is {value:.4g}{wrong}",
                f"{type(patient.task).__name__}.validation_step",
                {"metric": name, "perfect": value, "untrained": untrained.get(name)},
            )
            return


def _exact(read: Reading, values: list[Tensor]) -> list[Tensor]:
    """The target itself in place of a prediction that is near it, where the loss is lower there."""
    if read.kind != "numbers":
        return values
    exact = [read.target.reshape(x.shape).to(x) if i == read.leaf else x for i, x in enumerate(values)]
    with torch.no_grad():
        return exact if float(read.whole.free.loss(exact)) <= float(read.whole.free.loss(values)) else values


def _validated(free: FreeOutput, values: list[Tensor]) -> dict[str, float]:
    """The metrics of given predictions; none where validation does not use the modules in the same way."""
    with torch.no_grad():
        result, made = free.run([x.detach() for x in values], stage="val")
    paths = [call.path for call in made]
    if not isinstance(result, dict) or any(paths.count(call.path) != 1 for call in free.calls):
        return {}
    numbers = {
        k: v
        for k, v in result.items()
        if isinstance(v, (Tensor, float)) and (not isinstance(v, Tensor) or v.numel() == 1)
    }
    return {str(name): float(value) for name, value in numbers.items()}


def _is_wrong(name: str, value: float, untrained: float, read: Reading) -> str:
    """What is wrong with a metric of a perfect prediction, or nothing."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if words & NOT_PLAIN or value != value:
        return ""
    fits = (read.kind == "numbers") == ("r2" in words)
    if words & BETTER and fits and value > 1.01 and abs(value - 100) > 0.5:
        return ": it cannot be above 1."
    if words & WHOLE and fits and value < 0.9:
        return f" ({untrained:.4g} for the untrained model), and should be 1."
    if (words & BETTER and fits and value < untrained - 0.05) or (
        words & WORSE and value > untrained + 0.05 * abs(untrained)
    ):
        return f", and {untrained:.4g} for the untrained model: it should be better."
    return ""
