"""Intervene: name the tensors of a batch, exchange one of them, and run the task's own step on a copy."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from forge.util.walk import walk
from forge_doctor.experiments.answers import layer_calls
from forge_doctor.patient import SEED, Patient, numbers, tensors
from forge_doctor.watch import CallWatch

Calls = dict[tuple[str, int], list[Tensor]]
"""The tensors that each call of a layer returned."""


def parts(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch of any kind, by where they stand in it."""
    return {path.removeprefix("batch") or "batch": x for path, x in walk({"batch": batch}) if isinstance(x, Tensor)}


def replaced(batch: Any, changes: Mapping[int, Tensor]) -> Any:
    """A copy of a batch of any kind in which some tensors, by their ids, are others."""
    memo: dict[int, Any] = dict(changes)
    return copy.deepcopy(batch, memo)


def exchanged(batch: Any, old: Tensor, change: Callable[[Tensor], Tensor]) -> Any:
    return replaced(batch, {id(old): change(old.detach().clone())})


def with_rows_changed(batch: Any, size: int, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a batch in which all tensors with a sample in each row are changed."""
    whole = {id(x): change(x.detach().clone()) for x in parts(batch).values() if x.ndim and len(x) == size}
    return replaced(batch, whole)


def named(path: str, patient: Patient) -> str:
    """How to speak of a tensor of a batch: by its key, or by its place."""
    key = re.search(r"\['?([A-Za-z_]\w*)'?\]$|\.(\w+)$", path)
    if key:
        return f"'{key.group(1) or key.group(2)}' of the batch"
    return "the batch" if path == "batch" else f"batch{path}"


def says(
    patient: Patient, batch: Any, stage: str = "val", *, training: bool = False, seed: int = SEED
) -> dict[str, float]:
    """What a step on a fresh copy returns for a batch."""
    task = patient.clone()
    if not training:
        task.eval()
    with torch.no_grad():
        return numbers(patient.run(task, batch, stage, seed=seed))


def is_random(patient: Patient, stage: str, batch: Any) -> bool:
    """Whether a step in evaluation mode says something else with other random numbers."""
    one, other = (says(patient, batch, stage, seed=seed) for seed in (SEED, SEED + 1))
    return any(one[name] != other.get(name) and one[name] == one[name] for name in one)


def calls_of(
    patient: Patient, batch: Any, stage: str, *, seed: int = SEED, every: bool = False
) -> tuple[Calls, dict[str, float]]:
    """What each layer with weights, or each module, returned in a step, in order, and what the step returned."""
    task = patient.clone().eval()
    found: Calls = {}

    def noted(path: str, number: int, output: Any) -> Any:
        found[path, number] = [x.detach() for x in tensors(output) if x.is_floating_point()]
        return output

    with torch.no_grad(), layer_calls(task, noted, every):
        result = patient.run(task, batch, stage, seed=seed)
    return found, numbers(result)


@contextmanager
def doubled() -> Iterator[None]:
    """New tensors are made in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_double(batch: Any) -> Any:
    return replaced(batch, {id(x): x.detach().double() for x in parts(batch).values() if x.is_floating_point()})


def apart(x: float, y: float) -> float:
    """The difference of two numbers, as a share of the larger one."""
    size = max(abs(x), abs(y))
    return abs(x - y) / size if size else 0.0


DRAWS = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "normal_"}
DRAWS |= {"uniform_", "bernoulli", "bernoulli_", "multinomial", "exponential_", "random_", "poisson", "cauchy_"}


class RandomDraws(CallWatch):
    """Notes what is drawn at random, but for dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []

    def after(self, name: str, args: Any, kwargs: Any, result: Any, noted: Any) -> None:
        if name in DRAWS and isinstance(result, Tensor) and result.numel():
            self.drawn.append(result.detach().clone())


def draws(patient: Patient, stage: str, batch: Any, seed: int = SEED, task: Any = None) -> list[Tensor]:
    """What a step in the mode of its stage draws at random."""
    task = (patient.clone() if stage == "train" else patient.clone().eval()) if task is None else task
    with torch.no_grad(), RandomDraws() as watch:
        patient.run(task, batch, stage, seed=seed)
    return watch.drawn
