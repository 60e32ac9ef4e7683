"""Stages: the same samples through training and validation, whole and in parts, once and twice, in both modes."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch

from forge.contract.task import TaskModule
from forge.engine.trainer import Trainer
from forge_doctor.experiments.intervene import apart, draws, is_random, numbers, says
from forge_doctor.experiments.regroup import group_of
from forge_doctor.findings import Finding
from forge_doctor.patient import SEED, Patient
from forge_doctor.probes.graph import awake_layers
from forge_doctor.watch import CallWatch, where

PASSES = 4
"""Calls of one dropout in a validation from which on many passes are taken on purpose."""
OFF = 0.02
"""By how much two numbers that should be one may differ, as a share."""


def whole_and_parts(patient: Patient) -> Iterator[Finding]:
    """Validate a batch as a whole and in unequal parts: a mean over samples, weighed by num_items, is the same."""
    if not patient.can_validate:
        return
    group = group_of(patient, "val")
    if group is None or group.size < 8:
        return
    size, cut = group.size, 3 * group.size // 4
    batch, pieces = group.take(range(size)), [group.take(range(cut)), group.take(range(cut, size))]
    if is_random(patient, "val", batch):
        return
    weights = [float(patient.task.num_items(piece)) for piece in pieces]
    whole, some = says(patient, batch), [says(patient, piece) for piece in pieces]
    for name, value in whole.items():
        if any(name not in piece for piece in some) or (name == "loss" and _compares(patient)):
            continue
        mean = sum(w * piece[name] for w, piece in zip(weights, some, strict=True)) / sum(weights)
        if apart(value, mean) > OFF and abs(value - mean) > 1e-4:
            yield Finding(
                "metric_by_batch",
                f"{name} of {size} validation samples is {value:.4g} in one batch, and {mean:.4g} as the mean of a "
                f"batch of {cut} and one of {size - cut}: what validation reports depends on how samples are batched.",
                patient.place("val"),
                {"whole": value, "parts": [piece[name] for piece in some], "weights": weights},
            )


def _compares(patient: Patient) -> bool:
    """Whether the loss of training compares samples with each other, or draws: samples that come twice change it."""
    group = group_of(patient)
    if group is None or len(patient.names) > 1:
        return True
    half = list(range(group.size // 2))
    once, twice = (says(patient, group.take(places), "train").get("loss", math.nan) for places in (half, half * 2))
    return not apart(once, twice) < OFF


def drawn(patient: Patient) -> Iterator[Finding]:
    """Validate one batch twice in evaluation mode, with other random numbers."""
    if not patient.can_validate:
        return
    task, results, line, passes = patient.clone().eval(), [], "", 0
    for seed in (SEED, SEED + 1):
        with torch.no_grad(), DropoutWatch() as watch, awake_layers(task) as awake:
            results.append(numbers(patient.run(task, patient.val_batches[0], "val", seed=seed)))
        if awake:  # which is a finding of its own
            return
        line, passes = line or watch.line, max(passes, watch.calls)
    if not line and draws(patient, "train", patient.batches[0]):  # a model that draws in training too, as a VAE does
        return
    first, second = results
    differing = [name for name in first if name in second and apart(first[name], second[name]) > 1e-6]
    if differing:
        name = differing[0]
        by = f": dropout is on in evaluation, at {line}" if line else ""
        yield Finding(
            "random_evaluation",
            f"Validating one batch twice gives {first[name]:.6g} and {second[name]:.6g} for {name}{by}.",
            line or f"{type(task).__name__}.validation_step",
            {"metric": name, "first": first[name], "second": second[name]},
            level="warning" if line and passes < PASSES else "note",
        )


class DropoutWatch(CallWatch):
    """Remembers the line of the first dropout that is on, and counts its calls."""

    line = ""
    calls = 0

    def after(self, name: str, args: Any, kwargs: Any, result: Any, noted: Any) -> None:
        if "dropout" in name:
            rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            if rate and kwargs.get("training", args[2] if len(args) > 2 else True):
                self.line = self.line or where()
                self.calls += self.line == where()


def evaluated_twice(patient: Patient) -> Iterator[Finding]:
    """Evaluate, change the weights, evaluate again: the second must say what a fresh copy with these weights says."""
    if not patient.can_validate or is_random(patient, "val", patient.val_batches[0]):
        return
    used, fresh = patient.clone(), patient.clone()
    _evaluate(patient, used)
    for mine, theirs in zip(used.parameters(), fresh.parameters(), strict=True):
        with torch.no_grad():
            mine.mul_(-0.7)
            theirs.copy_(mine)
    again, first = _evaluate(patient, used), _evaluate(patient, fresh)
    for name in first.keys() & again.keys():
        if apart(first[name], again[name]) > 1e-4:
            yield Finding(
                "state_between_batches",
                f"A second evaluation, with other weights, gives {name} = {again[name]:.6g}; with these weights from "
                f"the start it is {first[name]:.6g}: something is not reset between evaluations.",
                f"{type(patient.task).__name__}.evaluation_end",
                {"second": again[name], "alone": first[name]},
                level="warning",
            )
            return


def _evaluate(patient: Patient, task: TaskModule) -> dict[str, float]:
    trainer = Trainer(plugins=[], run_dir=False, seed=0, device=patient.device.type)
    return numbers(trainer.validate(task, [copy.deepcopy(batch) for batch in patient.val_batches]))


def same_draws(patient: Patient) -> Iterator[Finding]:
    """Two training steps in turn, on one task: what they draw at random must differ."""
    task = patient.clone()
    first, last = patient.batches[0], patient.batches[-1]  # what a batch seeds is another with another batch
    one, other = draws(patient, "train", first, SEED, task), draws(patient, "train", last, SEED + 1, task)
    if (
        one
        and len(one) == len(other)
        and all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(one, other, strict=True))
    ):
        text = (
            f"Every training step draws the same random numbers ({len(one)} draws, the first of shape "
            f"{tuple(one[0].shape)}), whatever the seed: a generator begins anew in each step."
        )
        yield Finding("reseeded", text, patient.place(), {"draws": len(one)})
