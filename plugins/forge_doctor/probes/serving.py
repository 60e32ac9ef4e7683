"""Probes of how samples are served: noise that repeats, data that reading changes, seeds."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge_doctor.experiments.pairs import alike
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient
from forge_doctor.probes.data import stacked
from forge_doctor.stored import Array, arrays, copied, count_of, differs, indexed, put_back, read, whole


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
    """Reading a sample for the second time changes it in the dataset."""
    for name, loader in loaders.items():
        dataset = indexed(loader)
        if dataset is None or len(dataset) < 8:
            continue
        held = _stores(arrays(loader), len(whole(dataset)))
        before = {path: copied(value) for path, value in held.items()}
        try:
            touched = _touched(dataset, (0, len(dataset) // 2, len(dataset) - 1), held)
        finally:
            for path, value in held.items():
                if differs(value, before[path]) is not None:
                    put_back(value, before[path])
        for store in touched[0]:
            rows = [places.get(store, []) for places in touched]
            if all(len(places) == 1 for places in rows) and len({places[0] for places in rows}) == 3:
                text = (
                    f"Reading a sample again changes it in the dataset: row {rows[1][0]} of {store} is another after "
                    "the second reading, so every epoch trains on other data."
                )
                yield Finding("dataset_changed", text, name, {"array": store, "rows": [places[0] for places in rows]})
                return


def _stores(found: dict[str, Array], count: int) -> dict[str, Array]:
    """The arrays with a row of numbers for each sample, and those in lists of several."""
    lists = Counter(_list_of(path)[0] for path in found)
    return {
        path: value
        for path, value in found.items()
        if (value.ndim > 1 and len(value) == count) or (value.ndim and lists[_list_of(path)[0]] >= 8)
    }


def _list_of(path: str) -> tuple[str, int]:
    """The path of the list that holds an item, and the item's place; the path itself and -1 if there is none."""
    match = re.fullmatch(r"(.*)\[(\d+)\](\[\d+\])?", path)
    return (match.group(1), int(match.group(2))) if match else (path, -1)


def _touched(dataset: Any, indices: tuple[int, ...], held: dict[str, Array]) -> list[dict[str, list[int]]]:
    """The rows, by store, that the second reading of each sample changes. The first may fill a cache."""
    for index in indices:
        dataset[index]
    before = {path: copied(value) for path, value in held.items()}
    found: list[dict[str, list[int]]] = []
    for index in indices:
        dataset[index]
        found.append({})
        for path, value in held.items():
            changes = differs(value, before[path])
            if changes is not None:
                store, place = _list_of(path)
                rows = changes.flatten(1).any(1).nonzero().flatten().tolist() if place < 0 else [place]
                earlier = {row for places in found[:-1] for row in places.get(store, [])}
                found[-1].setdefault(store, []).extend(row for row in rows if row not in earlier)
    return found


def reseeded(patient: Patient) -> Iterator[Finding]:
    """Random numbers that begin again, with one seed, in each step or whenever a sample is read."""
    task, batch = patient.clone(), patient.batches[0]
    actions: dict[str, Callable[[int], Any]] = {"training_step": lambda k: patient.run(task, batch, seed=k)}
    if count_of(patient.train) > 1:
        actions["reading a sample"] = lambda k: read(patient.train, k, seed=k)
    for what, act in actions.items():
        states: list[dict[str, Any]] = []
        for seed in range(2):
            act(seed)
            states.append(_generator_states())
        same = [name for name, state in states[0].items() if state == states[1][name]]
        if same:
            text = (
                f"{what} sets the seed of {' and '.join(same)}: each time it begins with the same random numbers, and "
                "so does what comes after it."
            )
            yield Finding("reseeded", text, "train" if "sample" in what else what, {"generators": same})
            return


def _generator_states() -> dict[str, Any]:
    numpy: Any = np.random.get_state()
    return {
        "torch": torch.random.get_rng_state().numpy().tobytes(),
        "numpy": (numpy[1].tobytes(), numpy[2]),
        "python": random.getstate(),
    }
