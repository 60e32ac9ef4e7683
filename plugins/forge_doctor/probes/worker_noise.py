"""A probe of the workers of a loader: whether two of them draw the same random numbers."""

from __future__ import annotations

import functools
import hashlib
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from forge.data.iterable import Streams
from forge.data.sample_seeding import Draw, Failure, Seeded
from forge.torch_internals import pytree
from forge.util.generators import find_generators, generator_state
from forge.util.walk import GENERATORS
from forge_doctor.findings import Finding
from forge_doctor.patient import NotApplicable, Patient
from forge_doctor.stored import Sample, leaves

READINGS = 3
"""How often each of a few samples is read."""
SECONDS = 60
"""That a worker may take for them."""
SHARED = {"numpy.random": np.random.mtrand._rand, "random": random._inst, "torch": torch.default_generator}  # pyright: ignore[reportAttributeAccessIssue]
"""The generators that all code of a process shares."""


def workers(patient: Patient) -> Iterator[Finding]:
    """Let two workers read the same samples with seeds of their own: what they draw must differ.

    It is read as the fit reads it: by forge's loader, which seeds per sample, or by the user's own.
    """
    loader = _inner(patient.trainer.loaders["train"][None])
    if loader is None or loader.num_workers < 2 or isinstance(loader.dataset, (IterableDataset, Streams)):
        raise NotApplicable
    first, second = _readings(loader)
    same = [name for name, state in first.drawn.items() if second.drawn.get(name) == state]
    if same and first.varies and second.varies:
        text = (
            f"Two workers draw the same random numbers from {' and '.join(same)}: each of {loader.num_workers} workers "
            "has a copy of it, and the copies begin alike."
        )
        yield Finding("workers_repeat_noise", text, same[0], {"workers": loader.num_workers, "generators": same})


def _inner(loader: Any) -> DataLoader[Any] | None:
    """The DataLoader that a loader is, or holds."""
    seen: set[int] = set()
    while not isinstance(loader, DataLoader) and id(loader) not in seen:
        seen.add(id(loader))
        held = getattr(loader, "__dict__", {})
        loader = held.get("loader", next((x for x in held.values() if isinstance(x, DataLoader)), loader))
    return loader if isinstance(loader, DataLoader) else None


def _readings(loader: DataLoader[Any]) -> list[WorkerReadings]:
    """What two new workers read."""
    count = len(own_dataset(loader.dataset))
    own = loader.worker_init_fn
    own = getattr(own, "then", own)  # forge's own function watches for signals, then calls the user's
    run = DataLoader(
        ReadsAgain(loader.dataset, sorted({0, count // 2, count - 1})),
        batch_size=None,
        num_workers=2,
        collate_fn=_unchanged,
        worker_init_fn=None if own is None else functools.partial(_begin, own),
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator().manual_seed(0),
        timeout=SECONDS,
    )
    return list(run)


def own_dataset(source: Any) -> Any:
    """The user's dataset inside forge's, or the dataset itself."""
    return source.dataset if isinstance(source, Seeded) else source


def _begin(own: Callable[[int], None], worker: int) -> None:
    """Call the user's function, which may look for its dataset."""
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.source)
    own(worker)


def _unchanged(item: Any) -> Any:
    return item


class WorkerReadings:
    """What a worker saw."""

    def __init__(self) -> None:
        self.varies = False
        "Whether a sample that is read again is another."
        self.drawn: dict[str, bytes] = {}
        "The generators that were drawn from, and their states at the end."


class ReadsAgain(Dataset[WorkerReadings]):
    """Item k is what worker k reads: a few samples, a few times each."""

    def __init__(self, source: Any, indices: list[int]):
        self.source, self.indices = source, indices

    def __len__(self) -> int:
        return 2

    def __getitem__(self, worker: int) -> WorkerReadings:
        found = WorkerReadings()
        begun = self._read_all(READINGS * worker)
        before = self._states()  # those that the first reading has made are there now
        for number in range(1, READINGS):
            samples = self._read_all(READINGS * worker + number)
            found.varies |= not all(_are_equal(x, y) for x, y in zip(begun, samples, strict=True))
        found.drawn = {name: state for name, state in self._states().items() if before.get(name, state) != state}
        return found

    def _read_all(self, number: int) -> list[Sample]:
        return [self._read(index, number) for index in self.indices]

    def _read(self, index: int, number: int) -> Sample:
        if not isinstance(self.source, Seeded):
            return leaves(self.source[index])
        batch = self.source.__getitems__(Draw(0, 0, [index], [number + 1]))
        if isinstance(batch, Failure):
            batch.reraise()
        return leaves(batch)

    def _states(self) -> dict[str, bytes]:
        """The states of all generators that can be found, by name."""
        found = SHARED | {f"{name}.{key}": value for name, module in _modules() for key, value in _kept_in(module)}
        roots = {"dataset": own_dataset(self.source), "collate_fn": getattr(self.source, "collate", None)}
        known = {id(generator) for generator in found.values()}
        found |= {path: value for path, value in find_generators(roots).items() if id(value) not in known}
        return {name: _digest(generator_state(generator)) for name, generator in found.items()}


def _digest(state: Any) -> bytes:
    parts = [
        leaf.numpy().tobytes() if isinstance(leaf, Tensor) else repr(leaf).encode()
        for leaf in pytree.tree_leaves(state)
    ]
    return hashlib.blake2b(b" ".join(parts), digest_size=12).digest()


def _modules() -> list[tuple[str, Any]]:
    """The modules of users: libraries keep generators of their own."""
    paths = ("site-packages", "dist-packages", sysconfig.get_paths()["stdlib"])
    return [
        (name, module)
        for name, module in list(sys.modules.items())
        if (file := getattr(module, "__file__", None)) and not any(path in file for path in paths)
    ]


def _kept_in(module: Any) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in list(vars(module).items()) if isinstance(value, GENERATORS)]


def _are_equal(a: Sample, b: Sample) -> bool:
    return len(a) == len(b) and all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))
