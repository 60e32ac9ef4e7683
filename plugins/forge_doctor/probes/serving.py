"""Probes of how samples are served: noise that repeats, data that reading changes, pictures that are turned."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from forge_doctor.findings import Finding
from forge_doctor.patient import SEED, Patient
from forge_doctor.probes.data import stacked
from forge_doctor.stored import (
    Array,
    Sample,
    arrays,
    copied,
    count_of,
    differs,
    indexed,
    is_fixed,
    put_back,
    read,
    whole,
)

TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "flipped left to right": lambda x: x.flip(-1),
    "flipped upside down": lambda x: x.flip(-2),
    "turned by half": lambda x: x.flip(-1, -2),
    "turned by a quarter": lambda x: x.rot90(1, (-2, -1)),
}
READS = 10
"""How often each of a few samples is read, to see how it is changed."""


def noise(patient: Patient) -> Iterator[Finding]:
    """Two tensors of a sample that differ by the same noise in all samples."""
    found = {place: x.float() for place, x in stacked(patient, patient.samples[:200]).items() if x.is_floating_point()}
    for a, x in found.items():
        for b, y in found.items():
            if a < b and x.shape == y.shape and len(x) >= 8 and x[0].numel() >= 8 and _is_one_noise(x, y):
                yield Finding(
                    "repeated_noise",
                    f"Tensors {a} and {b} of a sample differ by the same noise in all of {len(x)} samples: a model "
                    "learns to subtract it.",
                    "train",
                    {"samples": len(x), "tensors": [a, b]},
                )
                return


def _is_one_noise(x: Tensor, y: Tensor) -> bool:
    """Whether differences are multiples of one pattern without order, and the samples themselves are not."""
    apart = (x - y).flatten(1)
    size = apart.norm(dim=1)
    pattern = apart[int(size.argmax())]
    is_varied = len(pattern.unique()) > 0.9 * len(pattern) and float(pattern.std() / pattern.pow(2).mean().sqrt()) > 0.5
    if (
        not is_varied
        or _alike(pattern[1:], pattern[:-1]) > 0.5
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
                yield Finding(
                    "dataset_changed",
                    f"Reading a sample again changes it in the dataset: row {rows[1][0]} of {store} is another after "
                    "the second reading, so every epoch trains on other data.",
                    name,
                    {"array": store, "rows": [places[0] for places in rows]},
                )
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
            yield Finding(
                "reseeded",
                f"{what} sets the seed of {' and '.join(same)}: each time it begins with the same random numbers, and "
                "so does what comes after it.",
                "train" if "sample" in what else what,
                {"generators": same},
            )
            return


def _generator_states() -> dict[str, Any]:
    numpy: Any = np.random.get_state()
    return {
        "torch": torch.random.get_rng_state().numpy().tobytes(),
        "numpy": (numpy[1].tobytes(), numpy[2]),
        "python": random.getstate(),
    }


def turned(patient: Patient) -> Iterator[Finding]:
    """Pictures that are turned at random, though a turned picture is one of another class."""
    place = patient.label_position
    if place is None or not is_fixed(patient.loaders["val"]):
        return
    labels = patient.labels_of(patient.val_samples)
    pictures = next((p for p, x in enumerate(patient.samples[0]) if x.ndim == 3 and x.is_floating_point()), None)
    val = stacked(patient, patient.val_samples).get(pictures) if pictures is not None else None
    if labels is None or val is None or pictures is None or len(val) < 40:
        return
    for name in {*_turns(patient.train, pictures, place), *_turns_in_step(patient)}:
        pair = _exchanged(val.float(), labels, TURNS[name])
        if pair is not None:
            yield Finding(
                "augmentation_changes_label",
                f"Training pictures are {name} at random and keep their labels, but in val a picture of class "
                f"{pair[0]} that is {name} is nearest to class {pair[1]}, and the reverse.",
                "train",
                {"classes": list(pair), "turn": name},
            )
            return


class TurnWatch(TorchFunctionMode):
    """Notes how pictures without a graph are turned while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        x = args[0] if args else None
        is_turn = getattr(func, "__name__", "") in ("flip", "fliplr", "flipud", "rot90")
        if is_turn and isinstance(x, Tensor) and x.ndim == 4 and x.is_floating_point() and not x.requires_grad:
            self.turns |= {name for name, turn in TURNS.items() if len(x) and _is_equal(turn(x), result)}
        return result


def _is_equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x, y)


def _turns_in_step(patient: Patient) -> set[str]:
    """How a training step turns pictures."""
    with TurnWatch() as watch:
        for seed in range(4):
            patient.run(patient.clone(), patient.batches[0], seed=SEED + seed)
    return watch.turns


def _turns(loader: Any, pictures: int, place: int) -> list[str]:
    """How the same picture is turned from one reading to the next."""
    count: dict[str, int] = {}
    total = count_of(loader)
    for i in range(0, total, max(1, total // 12)):
        served = [read(loader, i, SEED + k) for k in range(READS)]
        if any(len(s) <= max(pictures, place) or s[pictures].shape != served[0][pictures].shape for s in served):
            return []
        for name in {_turn(served[0], other, pictures, place) for other in served[1:]} - {""}:
            count[name] = count.get(name, 0) + 1
    return [name for name, seen in count.items() if seen >= 3]


def _turn(one: Sample, other: Sample, pictures: int, place: int) -> str:
    """The turn that makes one reading of a picture much like another, if the label stays."""
    x, y = one[pictures].float(), other[pictures].float()
    if not torch.equal(one[place], other[place]):
        return ""
    plain = _alike(x, y)
    likeness = {name: _alike(turn(x), y) for name, turn in TURNS.items() if turn(x).shape == y.shape}
    best = max(likeness, key=lambda name: likeness[name])
    return best if likeness[best] > max(0.8, plain + 0.3) else ""


def _alike(x: Tensor, y: Tensor) -> float:
    both = torch.stack([x.flatten(), y.flatten()])
    return float(torch.corrcoef(both)[0, 1]) if bool((both.std(1) > 1e-9).all()) else 1.0


def _exchanged(val: Tensor, labels: Tensor, turn: Callable[[Tensor], Tensor]) -> tuple[int, int] | None:
    """Two classes that a turn makes out of each other, by nearest neighbours among the other samples."""
    x = val[:1000].flatten(1)
    labels = labels[:1000]
    itself = torch.eye(len(x)).bool()
    own = labels[torch.cdist(x, x).masked_fill(itself, torch.inf).argmin(1)]
    after = labels[torch.cdist(turn(val[:1000]).flatten(1), x).masked_fill(itself, torch.inf).argmin(1)]
    goes: dict[int, int] = {}
    for label in labels.unique().tolist():
        mine = labels == label
        if int(mine.sum()) < 8 or float((own[mine] == label).float().mean()) < 0.8:
            continue
        other = int(after[mine].mode().values)
        if other != label and float((after[mine] == other).float().mean()) >= 0.8:
            goes[label] = other
    return next(((a, b) for a, b in goes.items() if goes.get(b) == a), None)
