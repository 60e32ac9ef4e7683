"""Probes of how samples are served: noise that repeats, data that reading changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from forge_doctor.experiments.pairs import alike
from forge_doctor.findings import Finding
from forge_doctor.patient import SEED, Patient
from forge_doctor.probes.data import stacked
from forge_doctor.stored import Array, arrays, copied, count_of, differs, indexed, put_back, read

TIMES = 4
"""How often each of a few samples is read again."""


def noise(patient: Patient) -> Iterator[Finding]:
    """Two tensors of a sample that differ by the same noise in all samples."""
    found = {place: x.float() for place, x in stacked(patient, patient.samples[:200]).items() if x.is_floating_point()}
    for a, x in found.items():
        for b, y in found.items():
            if a < b and x.shape == y.shape and len(x) >= 8 and x[0].numel() >= 8 and _is_one_noise(x, y):
                text = (
                    f"Tensors {a} and {b} of a sample differ by the same noise in all of {len(x)} samples: a model "
                    "learns to subtract it."
                )
                yield Finding("repeated_noise", text, "train", {"samples": len(x), "tensors": [a, b]})
                return


def _is_one_noise(x: Tensor, y: Tensor) -> bool:
    """Whether differences are multiples of one pattern without order, and the samples themselves are not."""
    apart = (x - y).flatten(1)
    size = apart.norm(dim=1)
    pattern = apart[int(size.argmax())]
    is_varied = len(pattern.unique()) > 0.9 * len(pattern) and float(pattern.std() / pattern.pow(2).mean().sqrt()) > 0.5
    if (
        not is_varied
        or alike(pattern[1:], pattern[:-1]) > 0.5
        or float(size.min()) < 1e-3 * float(y.flatten(1).norm(dim=1).mean())
    ):
        return False
    return _are_parallel(apart) and not _are_parallel(x.flatten(1)) and not _are_parallel(y.flatten(1))


def _are_parallel(rows: Tensor) -> bool:
    rows = rows.double()
    cosines = torch.cosine_similarity(rows[1:], rows[:1], dim=1).abs()
    return float(cosines.min()) > 0.9999


def changed(loaders: dict[str, Any]) -> Iterator[Finding]:
    """Read samples again: where that changes the dataset, put it back, and see whether the sample is another."""
    for name, loader in loaders.items():
        count = count_of(loader) if indexed(loader) is not None else 0
        held = arrays(loader) if count >= 8 else {}
        first, touched, times = {path: copied(value) for path, value in held.items()}, set[str](), 0
        for index in (0, count // 2, count - 1) if held else ():
            read(loader, index, SEED)  # which may fill a cache
            before = {path: copied(value) for path, value in held.items()}
            for seed in range(1, 1 + TIMES):  # what changes may be drawn
                read(loader, index, SEED + seed)
                others = _changed(held, before)  # before the next reading, which may turn it back
                later = [x.clone() for x in read(loader, index, SEED)]
                _put_back(held, before)
                clean = read(loader, index, SEED)
                if others and not all(torch.equal(x, y) for x, y in zip(later, clean, strict=True)):
                    touched, times = touched | others, times + 1
                _put_back(held, before)
        _put_back(held, first)
        if times > 1:
            text = f"Reading a sample again changes it in the dataset, in {min(touched)}: each epoch has other data."
            yield Finding("dataset_changed", text, name, {"array": min(touched)})
            return


def _changed(held: dict[str, Array], before: dict[str, Array]) -> set[str]:
    """The arrays that are no longer what they were."""
    return {path for path, value in held.items() if differs(value, before[path]) is not None}


def _put_back(held: dict[str, Array], before: dict[str, Array]) -> None:
    for path in _changed(held, before):
        put_back(held[path], before[path])
