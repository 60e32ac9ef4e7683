"""Lines: what each line of a step computes, over several batches and several sets of weights.

A line whose result never changes, though what it is given does, computes nothing. Nor does one that returns what it was
given: a mask that masks nothing, a factor of one. Neither is wrong for certain; both are worth a look.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from forge.data.accumulation_windows import batch_size
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient, tensors
from forge_doctor.watch import CallWatch, where

MAKERS = {"zero_", "fill_", "copy_", "size", "numel", "__get__", "__set__", "zeros", "ones", "empty", "full"}
"""Functions that are there to give a constant, or a tensor's shape; and those of names that end in _like."""
GUARDS = {"isfinite", "isnan", "isinf", "any", "all", "equal", "allclose", "__bool__", "item", "dropout"}
"""Functions that ask whether something is in order: the answer is nearly always the same."""
PICKS = {"__getitem__", "select", "unbind", "split"}
"""Functions that take one number out of others: a length, a flag."""
MOST = 3
NOISE = 0.3
"""The deviation of what is added to weights, so that no result rests on zeros that a layer begins with."""

Place = tuple[str, str, int]
"""The line, the function, and which of its calls on this line."""


class LineWatch(CallWatch):
    """Notes of each call whether its result is one value, or what it was given."""

    def __init__(self, size: int | None) -> None:
        super().__init__()
        self.size = size
        self.values: dict[Place, float | None] = {}
        self.idle: dict[Place, bool] = {}
        self.alike: dict[Place, bool] = {}
        self._seen: dict[tuple[str, str], int] = {}

    def after(self, name: str, args: Any, kwargs: Any, result: Any, noted: Any) -> None:
        given = tensors((args, kwargs))
        if not isinstance(result, Tensor) or not given or not result.numel() or result.is_complex():
            return
        if name in MAKERS | GUARDS or name.endswith("_like") or name.startswith("new_"):
            return
        line = where()
        number = self._seen[line, name] = self._seen.get((line, name), -1) + 1
        if not line:
            return
        place = (line, name.strip("_"), number)
        varies = any(_is_many(x) for x in given)
        self.values[place] = None if _is_many(result) else float(result.flatten()[0])
        is_picked = result.numel() == 1 and name in PICKS
        if not varies or is_picked:
            del self.values[place]
        source = given[0]
        if len(given) > 1 and result is not source:
            self.idle[place] = source.shape == result.shape and source.dtype == result.dtype and _same(source, result)
        if self.size and result.is_floating_point() and result.ndim > 1 and len(result) == self.size > 3:
            rows = [x for x in given if x.ndim > 1 and len(x) == self.size and x.is_floating_point()]
            if any(_rows_vary(x) for x in rows):
                self.alike[place] = not _rows_vary(result)


def _is_many(x: Tensor) -> bool:
    x = x.detach()
    return x.numel() > 0 and bool((x != x.flatten()[0]).any())


def _same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.detach(), y.detach()) and _is_many(y)


def _rows_vary(x: Tensor) -> bool:
    x = x.detach()
    return not torch.allclose(x, x[:1].expand_as(x), rtol=1e-4, atol=1e-6)


def results(patient: Patient) -> Iterator[Finding]:
    """Run each step on several batches, with the weights as they are and with others, and see what never changes."""
    for stage, batches in patient.stages:
        rounds = [watch for batch in batches[:2] for watch in _rounds(patient, stage, batch)]
        if len(rounds) < 4:
            continue
        yield from _findings(patient, stage, rounds)


def _rounds(patient: Patient, stage: str, batch: Any) -> Iterator[LineWatch]:
    for noise in (0.0, NOISE, 3 * NOISE):
        task = patient.clone() if stage == "train" else patient.clone().eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in task.parameters():
                if p.requires_grad and p.is_floating_point():
                    p.add_(noise * torch.randn(p.shape, generator=generator).to(p))
        for name in patient.names if stage == "train" else [None]:
            with torch.set_grad_enabled(stage == "train"), LineWatch(batch_size(batch)) as watch:
                patient.run(task, batch, stage, name)
            yield watch


def _findings(patient: Patient, stage: str, rounds: list[LineWatch]) -> Iterator[Finding]:
    steady: dict[str, str] = {}
    for place in rounds[0].values:
        seen = {watch.values.get(place) for watch in rounds if place in watch.values}
        if len(seen) == 1 and None not in seen:
            steady.setdefault(place[0], f"{place[1]} gives {seen.pop():g}")
    idle = {place[0]: f"{place[1]} returns what it was given" for place in _always(rounds, "idle")}
    alike = {place[0]: f"{place[1]} gives every sample of a batch the same" for place in _always(rounds, "alike")}
    what = "for every number of every batch, whatever the weights"
    for name, found in (("line_is_constant", {**alike, **steady}), ("line_does_nothing", idle)):
        own = [item for item in found.items() if "-packages/" not in item[0]]  # nobody's to mend here
        for line, said in own[:MOST]:
            yield Finding(name, f"In {stage}, {said} at {line}, {what}, though what it is given varies.", line)


def _always(rounds: list[LineWatch], kind: str) -> list[Place]:
    """Calls of which something holds in every round that has them."""
    first = getattr(rounds[0], kind)
    return [place for place in first if all(getattr(watch, kind).get(place, True) for watch in rounds)]
