"""Influence: whether the loss depends on each weight and each part of the input, and whether a gradient arrives.

A weight is moved a little, and the change of the loss is compared with what autograd says. Dependence without a
gradient is a way that is cut; a gradient that is not the slope of the loss is a way that is cut in part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from forge.contract.task import TaskModule
from forge.data.accumulation_windows import batch_size
from forge.data.combined import Combined
from forge_doctor.experiments.answers import Answers, answers
from forge_doctor.experiments.intervene import (
    calls_of,
    doubled,
    exchanged,
    in_double,
    named,
    parts,
    says,
)
from forge_doctor.experiments.regroup import group_of
from forge_doctor.findings import LEVELS, Finding
from forge_doctor.patient import Patient, are_samples
from forge_doctor.patient import named as listed
from forge_doctor.probes.graph import trained
from forge_doctor.watch import CallWatch, where

MOST_GROUPS = 24
MOST_SLICES = 32
NEAR = 0.05
"""A slope and a gradient that differ by less, as a share, are the same."""


class CutWatch(CallWatch):
    """Notes the lines at which a value with a graph loses it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, str] = {}

    def after(self, name: str, args: Any, kwargs: Any, result: Any, noted: Any) -> None:
        if name == "grad" and not kwargs.get("create_graph"):
            self._note("autograd.grad() without create_graph")
        given = [x for x in args if isinstance(x, Tensor)]
        had = any(x.requires_grad and x.grad_fn is not None for x in given)
        if not had or name in ("__get__", "backward", "size", "dim", "requires_grad_", "__repr__"):
            if name == "__get__" and had and isinstance(result, Tensor) and not result.requires_grad:
                self._note("a .data or an attribute without a graph")
            return
        if name in ("detach", "item", "tolist", "numpy", "argmax", "sign", "round", "floor", "__float__", "__int__"):
            self._note(f"{name.strip('_')}()")
        elif not torch.is_grad_enabled():
            self._note("torch.no_grad()")

    def _note(self, what: str) -> None:
        line = where()
        if line:
            self.lines.setdefault(line, what)


def weights(patient: Patient) -> Iterator[Finding]:
    """Move each group of trained weights, and compare the slope of the loss with the gradient."""
    known = trained(patient)
    for name in patient.names:
        found = slopes(patient, name, known)
        if found is None:
            continue
        groups, watch = found
        cut = list(_cut(groups, watch))
        if groups and not any(group.gradient or group.slope for group in groups):
            text = (
                f"No weight has a gradient, and moving {listed([group.name for group in groups])} one by one changes "
                "no loss: what stands between them and the loss is 0, or constant."
            )
            cure = "Begin with one factor of a product at 0 at most; look at masks, clamps and factors before the loss."
            yield Finding("no_gradient", text, groups[0].name, cure=cure)
        elif cut:
            patient.cut.add(name)
            yield from cut


def later_weights(patient: Patient) -> Iterator[Finding]:
    """After a few updates, which make steep what began flat: the same, and weights on which the loss does not depend
    though they take part in it."""
    known = trained(patient)
    for name in patient.names:
        found = slopes(patient, name, known)
        if found is None:
            continue
        groups, watch = found
        if name not in patient.cut:
            yield from _cut(groups, watch)
        still = [group for group in groups if group.reached and not group.gradient and not group.slope]
        if still and len(still) < len(groups) and len(patient.names) == 1:
            yield Finding(
                "no_gradient",
                f"After {patient.updates} updates the loss does not change with "
                f"{listed([group.name for group in still])}, and their gradient is 0: on the way stands a step "
                "without a slope, a clamp that is always at its bound, or a product of which both factors are 0.",
                still[0].name,
                {"groups": [group.name for group in still][:8]},
                cure="Pass the gradient straight through, x + (round(x) - x).detach(), widen the clamp, or begin with "
                "one factor of a product at 0 at most.",
            )


def _cut(groups: list[WeightGroup], watch: CutWatch) -> Iterator[Finding]:
    """What depends without a gradient, or on more than the gradient says."""
    cut = [group for group in groups if not group.gradient and group.slope > 0]
    part = [group for group in groups if group.gradient and not group.agrees]
    at = cuts(watch)
    if cut:
        text = (
            f"The loss depends on {listed([group.name for group in cut])}, but no gradient arrives: moving these "
            f"weights changes the loss (slope {max(g.slope for g in cut):.2g}), and their gradient is 0{at}."
        )
        yield Finding("no_gradient", text, cut[0].name, {"groups": [group.name for group in cut][:8]})
    elif part:
        worst = max(part, key=lambda group: group.off)
        yield Finding(
            "gradient_is_cut",
            f"The gradient of {listed([group.name for group in part])} is not the slope of the loss: along a "
            f"direction of {worst.name} autograd says {worst.said:.4g}, and the loss changes by {worst.seen:.4g}. "
            f"Part of the way from these weights to the loss is cut off, or has a backward of its own{at}.",
            worst.name,
            {"gradient": worst.said, "slope": worst.seen, "groups": [group.name for group in part][:8]},
        )


def cuts(watch: CutWatch) -> str:
    some = [f"{what} at {line}" for line, what in list(watch.lines.items())[:3]]
    return f" ({', '.join(some)})" if some else ""


class WeightGroup:
    """Weights that are moved together."""

    def __init__(self, name: str, weights: list[nn.Parameter]):
        self.name, self.weights = name, weights
        self.gradient = self.reached = False
        self.slope = self.off = self.said = self.seen = 0.0
        self.agrees = True


def _grouped(task: nn.Module, known: set[str]) -> list[WeightGroup]:
    """Weights by the module that has them, or by one around it where these are many."""
    own = {name: p for name, p in task.named_parameters() if name in known and p.requires_grad}
    for depth in (8, 4, 3, 2, 1):
        found: dict[str, list[nn.Parameter]] = {}
        for name, p in own.items():
            found.setdefault(".".join(name.split(".")[:-1][:depth]) or name, []).append(p)
        if len(found) <= MOST_GROUPS or depth == 1:
            return [WeightGroup(name, weights) for name, weights in found.items()][:MOST_GROUPS]
    return []


def slopes(patient: Patient, name: str | None, known: set[str]) -> tuple[list[WeightGroup], CutWatch] | None:
    """The slope of the loss along a few directions of each group, beside the gradient, in float64 where that works."""
    known = trained(patient, name) if len(patient.names) > 1 else known
    for double in (True, False):
        with suppress(Exception):
            if double:
                with doubled():
                    return _measured(
                        patient, patient.clone().double(), in_double(patient.batches[0]), name, known, 1e-6
                    )
            return _measured(patient, patient.clone(), patient.batches[0], name, known, 1e-3)
    return None


def _measured(
    patient: Patient, task: TaskModule, batch: Any, name: str | None, known: set[str], step: float
) -> tuple[list[WeightGroup], CutWatch]:
    groups = _grouped(task, known)
    held = {path: b.clone() for path, b in task.named_buffers()}

    def again() -> Tensor:
        with torch.no_grad():
            for path, b in task.named_buffers():
                if path in held:
                    b.copy_(held[path])
        return patient.loss(task, batch, name)

    with CutWatch() as watch:
        loss = again()
    weights = [p for group in groups for p in group.weights]
    found = torch.autograd.grad(loss, weights, allow_unused=True)  # before another step writes into buffers
    if float(again().detach()) != float(loss.detach()):
        raise ArithmeticError("the step keeps a state of its own")
    gradients = {id(p): g for p, g in zip(weights, found, strict=True)}
    total = math.sqrt(sum(float(g.pow(2).sum()) for g in found if g is not None)) or 1e-12
    unseen = 8 * torch.finfo(loss.dtype).eps * abs(float(loss.detach())) / step
    generator = torch.Generator().manual_seed(0)
    for group in groups:
        given = [gradients[id(p)] for p in group.weights]
        group.gradient = any(g is not None and bool(g.any()) for g in given)
        group.reached = any(g is not None for g in given)
        ways = [[_drawn(p, generator) for p in group.weights] for _ in range(2)]
        if group.gradient:
            ways.append(
                [torch.zeros_like(p) if g is None else g.detach() for p, g in zip(group.weights, given, strict=True)]
            )
        for way in ways:
            _compare(again, group, way, given, step, total, unseen)
    return groups, watch


def _drawn(p: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)


def _compare(
    again: Callable[[], Tensor],
    group: WeightGroup,
    way: list[Tensor],
    given: Sequence[Tensor | None],
    step: float,
    total: float,
    unseen: float,
) -> None:
    """Compare one slope with the gradient; below `unseen` it is that of rounding."""
    size = math.sqrt(sum(float(d.pow(2).sum()) for d in way)) or 1.0
    way = [d / size for d in way]
    said = sum(float((g * d).sum()) for g, d in zip(given, way, strict=True) if g is not None)
    seen = []
    for length in (step, 10 * step):
        ends = []
        for sign in (1.0, -1.0):
            _move(group.weights, way, sign * length)
            with torch.no_grad():
                ends.append(float(again().detach()))
            _move(group.weights, way, -sign * length)
        seen.append((ends[0] - ends[1]) / (2 * length))
    if not any(seen) and group.gradient and step < 1e-4:
        raise ArithmeticError("the loss is computed in float32")
    rough = abs(seen[0] - seen[1]) > 0.02 * max(abs(seen[0]), abs(seen[1]), 1e-9 * total)
    if rough or not all(map(math.isfinite, seen)):
        return
    if abs(seen[0]) > 1e-4 * total:
        group.slope = max(group.slope, abs(seen[0]))
    off = abs(said - seen[0]) / max(abs(said), abs(seen[0]), 1e-12)
    if off > NEAR and abs(said - seen[0]) > max(0.01 * total, unseen) and off > group.off:
        group.agrees, group.off, group.said, group.seen = False, off, said, seen[0]


def _move(weights: list[nn.Parameter], way: list[Tensor], length: float) -> None:
    with torch.no_grad():
        for p, d in zip(weights, way, strict=True):
            p.add_(d, alpha=length)


def inputs(patient: Patient) -> Iterator[Finding]:
    """Exchange each tensor of the batch between samples: the loss must change, unless it is not there for the loss."""
    ignored, given = list[tuple[str, str]](), list[tuple[str, str]]()
    read, labels = set[str](), set[str]()
    for stage, batches in patient.stages:
        batch = max(batches, key=lambda batch: sum(x.ndim > 0 and _varies(x) for x in parts(batch).values()))
        if (batch_size(batch) or 0) < 4:
            continue
        whole = {path: x for path, x in parts(batch).items() if x.ndim and len(x) >= 4 and _varies(x)}
        given += [(path, stage) for path in whole]
        base, other = says(patient, batch, stage), dict[str, dict[str, float]]()
        for path, x in whole.items():
            with suppress(Exception):  # one that the step refuses when it is another is read
                other[path] = says(patient, exchanged(batch, x, _alike), stage)
        matter = [path for path in whole if not _same(base, other.get(path, {}))]
        read |= set(matter)
        labels |= {path for path, x in whole.items() if x.numel() == len(x) and not x.is_floating_point()}
        several = stage == "train" and isinstance(patient.train, Combined)  # whose samples are no pairs
        is_paired = (
            "loss" in base and len({id(whole[path]) for path in matter}) > 1 and are_samples(batch) and not several
        )
        unpaired: list[Finding] = []
        for path, x in whole.items():
            with suppress(Exception):
                moved = exchanged(batch, x, lambda x: x.roll(1, 0))
                rolled = says(patient, moved, stage)
                if not _same(base, rolled):
                    continue
                if stage == "train":  # a fresh model in evaluation mode may give one answer to all samples
                    trains = [says(patient, given, stage, training=True) for given in (batch, moved)]
                    if not _same(*trains):
                        continue
                if path not in matter:
                    ignored.append((path, stage))
                elif is_paired and _is_plain(base, other.get(path, base)) and not _is_name(patient, batch, x, stage):
                    unpaired.append(
                        Finding(
                            "broadcast_loss",
                            f"The loss of {stage} is the same, {base['loss']:.6g}, when {named(path, patient)} "
                            f"({_kind(x)}) is exchanged between samples, and another when all samples get one value: "
                            "the loss does not see which of them belongs to which sample. It compares each with each, "
                            "or pairs the wrong rows.",
                            patient.place(),
                            {"loss": base["loss"], "exchanged": rolled["loss"], "all alike": other[path]["loss"]},
                            level="error" if _is_target(patient, batch, x) else "note",  # others may need no pairs
                        )
                    )
        yield from sorted(unpaired, key=lambda finding: LEVELS.index(finding.level))[:1]
    for path, stage in ignored:
        if path in labels and len(read) == 1:
            continue  # of a model that learns from its input alone
        if stage == "train" and all(item in ignored for item in given if item[0] == path):
            text = (
                f"{named(path, patient)} changes nothing in any step: each sample may have that of another, and every "
                "number that is returned stays."
            )
            yield Finding("tensor_ignored", text, patient.place())


def _is_name(patient: Patient, batch: Any, x: Tensor, stage: str) -> bool:
    """Whether the step reads of numbers only which of them are equal: others in their place change nothing."""
    with suppress(Exception):  # numbers that it cannot read are more than names
        others = exchanged(batch, x, lambda x: (x - x.min() + 1) ** 3)
        return _same(says(patient, batch, stage), says(patient, others, stage))
    return False


def _is_plain(base: dict[str, float], alike: dict[str, float]) -> bool:
    """Whether a tensor moves the loss by more than an untrained model, which hardly reads it, lets it."""
    return abs(alike["loss"] - base["loss"]) > 1e-3 * abs(base["loss"])


def _is_target(patient: Patient, batch: Any, x: Tensor) -> bool:
    """Whether a tensor is what answers are compared with, and no answer depends on it: it must be paired."""
    other = exchanged(batch, x, _alike)
    held, now = answers(patient, batch), answers(patient, other)
    if held is None or now is None:
        return held is None
    stays = all(torch.equal(a, b) for a, b in zip(held.values, now.values, strict=True))
    pairs = zip(held.slopes(), held.slopes(batch=other), strict=True)
    return stays and any(not torch.allclose(a, b) for a, b in pairs)


def unread(patient: Patient) -> Iterator[Finding]:
    """Give all samples of a batch what the first one has: some answer must change."""
    group = group_of(patient)
    if group is None or group.size < 4:
        return
    batch = group.take(range(group.size))
    if not any(x.ndim and _varies(x) for x in parts(batch).values()):
        return
    held, other = answers(patient, batch), answers(patient, group.take([0] * group.size))
    if held is None or other is None or _are_targets(held):
        return
    pairs = list(zip(held.values, other.values, strict=False))
    if pairs and all(x.shape == y.shape and torch.equal(x, y) for x, y in pairs):
        text = (
            f"What {listed(held.paths)} gives for a batch stays when all samples get the inputs of the first: the "
            "model does not read them."
        )
        yield Finding("input_ignored", text, held.paths[-1], {"loss": held.loss})


def _are_targets(held: Answers) -> bool:
    """Whether the loss of given answers depends on all tensors of a batch: it says which answers are asked for."""
    slopes = held.slopes()
    for x in parts(held.batch).values():
        if x.ndim and _varies(x):
            other = held.slopes(batch=exchanged(held.batch, x, _alike))
            if all(torch.equal(a, b) for a, b in zip(slopes, other, strict=True)):
                return False
    return True


def _alike(x: Tensor) -> Tensor:
    """All samples get what the first one has."""
    return x[:1].expand_as(x).clone()


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def _varies(x: Tensor) -> bool:
    return x.numel() > 0 and not torch.equal(x, x.roll(1, 0))


def _same(a: dict[str, float], b: dict[str, float]) -> bool:
    return a.keys() == b.keys() and all(abs(a[k] - b[k]) <= 1e-6 * max(1e-6, abs(a[k])) or a[k] != a[k] for k in a)


def slices(patient: Patient) -> Iterator[Finding]:
    """Exchange single columns, channels or steps of the inputs between samples: some answer must change."""
    stage, (batch, *_) = patient.stages[-1]
    size = batch_size(batch)
    if size is None or size < 4:
        return
    base, said = calls_of(patient, batch, stage)
    if not base:
        return
    last = list(base)[-1]

    def matters(x: Tensor, dim: int, i: int) -> bool:
        def change(x: Tensor) -> Tensor:
            x.select(dim, i).copy_(x.select(dim, i).roll(1, 0).clone())
            return x

        after, now = calls_of(patient, exchanged(batch, x, change), stage)
        pairs = zip(base[last], after.get(last, []), strict=False)
        return not _same(said, now) or any(a.shape != b.shape or not torch.equal(a, b) for a, b in pairs)

    for path, x in parts(batch).items():
        if x.ndim < 2 or len(x) != size or x.dtype == torch.bool:
            continue
        for dim in range(1, min(x.ndim, 3)):
            count = x.shape[dim]
            if not 3 <= count <= MOST_SLICES:
                continue
            varied = [i for i in range(count) if _varies(x.select(dim, i))]
            with suppress(Exception):
                read = [i for i in varied if matters(x, dim, i)]
                if 0 < len(read) < len(varied) and len(varied) >= 3:
                    deaf = [i for i in varied if i not in read]
                    alone = len(read) == 1 and len(varied) >= 4
                    lost = f"all but index {read[0]}" if alone else f"index {listed(list(map(str, deaf)), 6)}"
                    yield Finding(
                        "positions_ignored" if alone else "part_ignored",
                        f"Of {named(path, patient)}, {_kind(x)}, {lost} of dimension {dim} never reaches the answers: "
                        "exchanged between samples, nothing changes.",
                        type(patient.task).__name__,
                        {"dimension": dim, "read": read[:16], "ignored": deaf[:16]},
                    )
                    return
