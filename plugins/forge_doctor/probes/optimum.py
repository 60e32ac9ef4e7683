"""Probes of where a loss is lowest: spreads beside a mean, quantiles, and penalties with the wrong sign."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from forge_doctor.findings import Finding
from forge_doctor.free_output import FreeOutput, Supervised, supervised
from forge_doctor.patient import Patient
from forge_doctor.probes.graph import nodes

QUANTILE_NAMES = re.compile(r"quant|tau|levels|^qs?$", re.I)
STEPS = 60


def spread(patient: Patient) -> Iterator[Finding]:
    """Hold the errors of a mean: the number beside it must have a best value that grows or shrinks with them."""
    whole = supervised(patient, patient.batches[0])
    if whole is None or not whole.target.is_floating_point() or whole.target.numel() < 8:
        return
    for build, second in _pairs(whole):
        try:
            losses = _by_error(whole, build, second)
        except ValueError:  # a deviation that is not positive
            continue
        if losses is None:
            continue
        ends = {_end(row) for row in losses}
        gains = (losses[:, 0] - losses[:, -1]).abs()
        if len(ends) == 1 and ends <= {"low", "high"} and float(gains.max() - gains.min()) > 0.01 * float(gains.max()):
            end = ends.pop()
            yield Finding(
                "loss_misaligned",
                f"The loss falls for ever as the second output, which weighs the errors, gets {end}er, whether errors "
                "are 0.3 or 3 deviations of the target: no value of it is best.",
                f"{type(patient.task).__name__}.training_step",
                {"errors": [0.3, 1, 3], "losses": [[float(row[0]), float(row[-1])] for row in losses]},
            )
            return


Build = Callable[[Tensor, Tensor], list[Tensor]]


def _pairs(whole: Supervised) -> Iterator[tuple[Build, Tensor]]:
    """Ways to read the prediction as a mean and another number of the target's shape, with that other number."""
    raw, y = [x.detach() for x in whole.free.raw], whole.target
    same = [i for i, x in enumerate(raw) if x.squeeze().shape == y.squeeze().shape]
    if len(raw) == 2 and len(same) == 2:
        for mean in (0, 1):
            shape = (raw[0].shape, raw[1].shape)
            yield _of_two(mean, shape), raw[1 - mean].reshape(y.shape)
    if len(raw) == 1 and raw[0].ndim == 2 and raw[0].shape[1] == 2 and y.numel() == len(y) == len(raw[0]):
        for mean in (0, 1):
            yield _of_columns(mean), raw[0][:, 1 - mean].reshape(y.shape)


def _of_two(mean: int, shapes: Any) -> Build:
    def build(centre: Tensor, other: Tensor) -> list[Tensor]:
        both = (centre, other) if mean == 0 else (other, centre)
        return [x.reshape(shape) for x, shape in zip(both, shapes, strict=True)]

    return build


def _of_columns(mean: int) -> Build:
    def build(centre: Tensor, other: Tensor) -> list[Tensor]:
        both = (centre, other) if mean == 0 else (other, centre)
        return [torch.stack([x.flatten() for x in both], 1)]

    return build


def _by_error(whole: Supervised, build: Build, second: Tensor) -> Tensor | None:
    """Losses by size of error and by value of the second number; None where the first is no mean."""
    y, scale = whole.target, float(whole.target.std())
    sign = torch.where(torch.arange(y.numel(), device=y.device).reshape(y.shape) % 2 == 0, 1.0, -1.0).to(y)
    loss = lambda centre, other: float(whole.free.loss(build(centre, other)))  # noqa: E731
    with torch.no_grad():
        if not loss(y, second) < loss(y + scale * sign, second) < loss(y + 3 * scale * sign, second):
            return None
        powers = torch.arange(-8.0, 9.0)
        is_positive = bool((second > 0).all())
        middle = second.median()
        values = [middle * 2.0**p if is_positive else middle + p for p in powers.tolist()]
        rows = [
            [loss(y + error * scale * sign, torch.ones_like(y) * value) for value in values]
            for error in (0.3, 1.0, 3.0)
        ]
    found = torch.tensor(rows)
    return found if bool(torch.isfinite(found).all()) else None


def _end(row: Tensor) -> str:
    """At which end a row of losses is lowest: "low" and "high" where it falls all the way."""
    steps = row.diff()
    return "low" if bool((steps > 0).all()) else "high" if bool((steps < 0).all()) else "inside"


def likelihood(patient: Patient) -> Iterator[Finding]:
    """A mean with a spread beside it: the loss must grow with the errors of one of the two outputs."""
    whole = supervised(patient, patient.batches[0])
    if whole is None or not whole.target.is_floating_point() or whole.target.numel() < 8:
        return
    if not bool((whole.target < 0).any()) or not bool((whole.target > 0).any()):
        return
    found: list[list[float]] = []
    for build, second in _pairs(whole):
        y = whole.target
        sign = torch.where(torch.arange(y.numel(), device=y.device).reshape(y.shape) % 2 == 0, 1.0, -1.0).to(y)
        with torch.no_grad(), suppress(ValueError):
            errors = [factor * y.std() * sign for factor in (0.0, 1.0, 3.0)]
            found.append([float(whole.free.loss(build(y + error, second))) for error in errors])
    rises = [row for row in found if row[0] < row[1] < row[2]]
    falls = [row for row in found if row[0] > row[1] > row[2]]
    if falls and not rises:
        row = falls[0]
        yield Finding(
            "loss_misaligned",
            f"The loss is {row[0]:.4g} where the predictions are the targets, {row[1]:.4g} where they are one "
            f"deviation away, and {row[2]:.4g} at three: it rewards errors.",
            f"{type(patient.task).__name__}.training_step",
            {"losses": row},
        )


def divergence(patient: Patient) -> Iterator[Finding]:
    """The divergence of a Gaussian from the standard one, 1 + log_var - mean**2 - exp(log_var), and its sign."""
    task = patient.clone()
    for name in patient.names:
        loss = patient.loss(task, patient.batches[0], name)
        for expression in _divergences(loss):
            slopes = _slopes(loss, expression)
            if slopes and max(slopes) < 0:
                yield Finding(
                    "loss_misaligned",
                    "The loss falls as the divergence of the latent Gaussian grows (mean**2 and exp(log_var) enter "
                    "with a negative sign): it drives the code away from the prior.",
                    f"{type(patient.task).__name__}.training_step",
                    cure="Add -0.5 * (1 + log_var - mean**2 - log_var.exp()), summed over the code, to the loss.",
                )
                return


def _divergences(loss: Tensor) -> Iterator[list[Any]]:
    """Sums that hold log_var, exp(log_var) and a square: the nodes of the last two."""
    for node in nodes(loss):
        if _name(node) not in ("Sum", "Mean"):
            continue
        parts = list(_summands(node.next_functions[0][0]))
        exps = [part for part in parts if _name(part) == "Exp" and part.next_functions[0][0] in parts]
        squares = [part for part in parts if _name(part) == "Pow"]
        if len(exps) == 1 and len(squares) == 1:
            yield [exps[0], squares[0]]


def _summands(node: Any) -> Iterator[Any]:
    """The nodes that a sum is made of, past additions, signs and factors."""
    todo = [node]
    while todo:
        node = todo.pop()
        if node is None:
            continue
        children = [child for child, _ in node.next_functions if child is not None]
        plain = _name(node) in ("Add", "Sub", "Rsub", "Neg") or (
            _name(node) in ("Mul", "Div", "Sum") and len(children) == 1
        )
        if plain:
            todo.extend(children)
        else:
            yield node


def _slopes(loss: Tensor, found: list[Any]) -> list[float]:
    """By how much the loss grows with the outputs of nodes, on the whole."""
    slopes: list[float] = []
    handles = [node.register_prehook(lambda gradients: slopes.append(float(gradients[0].sum()))) for node in found]
    loss.backward(retain_graph=True)
    for handle in handles:
        handle.remove()
    return slopes


def quantiles(patient: Patient) -> Iterator[Finding]:
    """The best constants of a loss of quantiles: as many targets must be below each as its quantile says."""
    whole = supervised(patient, patient.batches[0])
    if (
        whole is None
        or not whole.target.is_floating_point()
        or whole.target.numel() != len(whole.target)
        or len(whole.target) < 16
    ):
        return
    raw = whole.free.raw
    if len(raw) != 1 or raw[0].ndim != 2 or raw[0].shape[1] < 2:
        return
    wanted = _quantiles_of(patient, raw[0].shape[1])
    if wanted is None:
        return
    below = _shares_below(whole.free, whole.target.flatten(), raw[0].shape[1])
    outer = [(q, share) for q, share in zip(wanted, below, strict=True) if abs(q - 0.5) > 0.15]
    if outer and all(abs(share - (1 - q)) < 0.15 and abs(share - q) > 0.25 for q, share in outer):
        q, share = outer[0]
        yield Finding(
            "loss_misaligned",
            f"The best constant for the quantile {q:g} has {share:.0%} of the targets below it: the sides of the loss "
            "are exchanged.",
            f"{type(patient.task).__name__}.training_step",
            {"quantiles": wanted, "below": below},
        )


def _shares_below(free: FreeOutput, y: Tensor, columns: int) -> list[float]:
    best = y.mean().repeat(columns).requires_grad_()
    adam = torch.optim.Adam([best], 0.1 * float(y.std()))
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(adam, STEPS)
    for _ in range(STEPS):
        adam.zero_grad()
        free.loss([best.expand(len(y), -1)]).backward()
        adam.step()
        slower.step()
    return [float((y < value).float().mean()) for value in best.detach()]


def _quantiles_of(patient: Patient, count: int) -> list[float] | None:
    """The quantiles that the task, or its file, holds under such a name."""
    step = getattr(type(patient.task).training_step, "__globals__", {})
    for place in (vars(patient.task), dict(patient.task.named_buffers()), step):
        for name, value in place.items():
            found = value.flatten().tolist() if isinstance(value, Tensor) and value.numel() == count else value
            if not isinstance(found, Sequence) or isinstance(found, str) or len(found) != count:
                continue
            if QUANTILE_NAMES.search(name) and all(isinstance(q, float) and 0 < q < 1 for q in found):
                return [float(q) for q in found]
    return None


def penalties(patient: Patient) -> Iterator[Finding]:
    """Penalties of roughness and of weights that are subtracted from the loss."""
    for term, line in patient.watched.subtracted:
        what = _penalty(term)
        if what:
            yield Finding(
                "loss_misaligned", f"The loss subtracts a penalty, {what}: it rewards what it should punish.", line
            )
            return


def _penalty(term: Tensor) -> str:
    """What a scalar is the mean square of: differences of neighbours, or weights; nothing where it is another."""
    node = _past(term.grad_fn, ("Mul", "Div", "Mean", "Sum", "Sqrt"))
    if node is None or _name(node) not in ("Pow", "Abs", "LinalgVectorNorm"):
        return ""
    inner = _past(node.next_functions[0][0], ())
    if inner is None:
        return ""
    if _name(inner) == "Sub":
        parts = [child for child, _ in inner.next_functions]
        parents = [part.next_functions[0][0] if part is not None and _name(part) == "Slice" else None for part in parts]
        if len(parents) == 2 and parents[0] is not None and _root(parents[0]) is _root(parents[1]):
            return "the mean square of the differences of neighbouring outputs"
    if isinstance(getattr(inner, "variable", None), nn.Parameter):
        return "the size of weights"
    return ""


def _root(node: Any) -> Any:
    """The node before slices."""
    while node is not None and _name(node) == "Slice":
        node = node.next_functions[0][0]
    return node


def _past(node: Any, names: Sequence[str]) -> Any:
    while node is not None and _name(node) in (*names, "View", "UnsafeView", "Squeeze", "Unsqueeze", "ToCopy"):
        node = next((child for child, _ in node.next_functions if child is not None), None)
    return node


def _name(node: Any) -> str:
    return type(node).__name__.rstrip("0123456789").removesuffix("Backward")
