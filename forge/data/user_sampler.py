"""A user's own sampler: draw an epoch's indices at its start, under their own seed, and check them on resume."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from forge.data.accumulation_windows import is_stateful
from forge.data.sample_rng import restored_generators, seed_generators
from forge.data.sample_seeding import Draw, Seeded, number_of
from forge.data.sharding import Portion, cut
from forge.data.workers import Pool
from forge.errors import DataError
from forge.rng import combine_seeds, fold


class SampledLoader:
    """A torch DataLoader with a sampler or a batch sampler of the user's own, made resumable.

    Before an epoch all of its indices are drawn, with every generator on the host seeded from (seed, epoch) and
    restored after. The state holds their checksum: if a resumed sampler draws others, the run is refused.
    """

    def __init__(self, given: DataLoader[Any], data_timeout: float, **options: Any):
        self.dataset, self.batch_size = given.dataset, given.batch_size
        self._batched = given.batch_sampler is not None
        self._sampler: Any = given.batch_sampler if self._batched else given.sampler
        self._generators = {id(g): (g, g.initial_seed()) for part in self.samplers if (g := _generator_of(part))}
        source = Seeded(given.dataset, given.collate_fn, None, self._batched)
        self._pool = Pool(source, type(given.dataset).__name__, given.num_workers, data_timeout, **options)
        self.loader = self._pool.loader
        self.seed = 0
        self._epoch: int | None = None
        self._given = 0
        "Batches of the current epoch that were yielded."
        self._drawn: dict[str, Any] = {"epoch": 0, "order": None, "samplers": []}
        self._resume: Mapping[str, Any] | None = None

    def set_default_seed(self, seed: int) -> None:
        """Set the seed of the order and of augmentation; the Trainer passes its seed."""
        self.seed = seed

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass this epoch."""
        self._epoch = epoch

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be equal for a run to resume with this loader."""
        return {"order": type(self._sampler).__name__, "batches": len(self), "seed": self.seed}

    def state_dict(self) -> dict[str, Any]:
        """Return how many batches of the epoch were yielded, and the checksum of its order."""
        return {**self._drawn, "batches": self._given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there in the next pass, or with the next epoch if that was the end of one."""
        self._resume = dict(state)
        if state["batches"] < len(self):
            self._epoch = state["epoch"]

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        return self._fetch(self._begin())

    def peek(self, places: Sequence[int]) -> Iterator[Any]:
        """Yield these samples of the dataset, each as a batch of one; the sampler is not asked."""
        return self._pool.run(iter([Draw(self.seed, 0, [place]) for place in places]), self.seed)

    @property
    def drawn_order(self) -> str | None:
        """The checksum of the order that was drawn last."""
        return self._drawn["order"]

    def iter_rank(self, data_rank: int, data_world: int) -> Iterator[Portion]:
        """Iterate over one rank's part of every batch; the samples of other ranks are not read."""
        indices = self._begin()
        if not self._batched:
            raise DataError(
                f"A DataLoader with batch_size=None yields samples of {type(self.dataset).__name__}, which cannot be "
                "divided among ranks. Pass a batch_size."
            )
        places = [cut(0, len(batch), data_rank, data_world) for batch in indices]
        counts = [(place.samples, len(batch)) for place, batch in zip(places, indices, strict=True)]
        own = [batch[place.begin : place.end] for place, batch in zip(places, indices, strict=True)]
        return (Portion(batch, *count) for batch, count in zip(self._fetch(own), counts[self._given :], strict=True))

    def _begin(self) -> list[list[Any]]:
        """Return the batches of the epoch as indices; the first `_given` of them are consumed."""
        resume, self._resume = self._resume, None
        indices, self._given = None, 0
        if resume is not None and resume["order"] is not None:
            indices = self._draw_again(resume)
            if resume["batches"] < len(self) if self._epoch is None else resume["epoch"] == self._epoch:
                self._given = resume["batches"]
            else:
                indices = None  # its epoch was over; drawing it again has advanced the sampler
        if indices is None:
            indices = self._draw(self._epoch or 0)
        return indices

    def _fetch(self, indices: list[list[Any]]) -> Iterator[Any]:
        epoch = self._drawn["epoch"]
        return self._counted(self._pool.run(_draws(indices, self._given, self.seed, epoch), self.seed + epoch))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._given += 1
            yield batch

    def _draw(self, epoch: int) -> list[list[Any]]:
        before = [copy.deepcopy(part.state_dict()) if is_stateful(part) else None for part in self.samplers]
        indices = self._indices(epoch)
        self._drawn = {"epoch": epoch, "order": _checksum(indices), "samplers": before}
        return indices

    def _draw_again(self, resume: Mapping[str, Any]) -> list[list[Any]]:
        """Return the order of a saved epoch; refuse another one than was saved."""
        for part, state in zip(self.samplers, resume["samplers"], strict=False):
            if state is not None and is_stateful(part):
                part.load_state_dict(state)
        indices = self._draw(resume["epoch"])
        if self._drawn["order"] != resume["order"]:
            raise DataError(
                f"{type(self._sampler).__name__} drew another order for epoch {resume['epoch']} than it did before the "
                "run was interrupted, so the run cannot be continued exactly. It keeps something that is not in the "
                "checkpoint: give it state_dict and load_state_dict, have it draw from set_epoch(epoch) alone, or use "
                "forge.data.Loader with forge.data.Weighted or forge.data.Bucketed."
            )
        return indices

    def _indices(self, epoch: int) -> list[list[Any]]:
        """Return the sampler's indices for this epoch, with every generator that it may draw from seeded."""
        word = combine_seeds(self.seed, epoch)
        with restored_generators():
            seed_generators(word)
            for generator, own in self._generators.values():
                generator.manual_seed(fold(word, own) >> 1)
            for part in self.samplers:
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
            return [list(batch) if self._batched else [batch] for batch in self._sampler]

    @property
    def samplers(self) -> list[Any]:
        """The sampler, and the one inside a batch sampler."""
        inner = getattr(self._sampler, "sampler", None)
        return [self._sampler] if inner is None else [self._sampler, inner]


def _draws(indices: list[list[Any]], start: int, seed: int, epoch: int) -> Iterator[Draw]:
    seen = Counter[int]()
    for place, batch in enumerate(indices):
        again = []
        for number in map(number_of, batch):
            again.append(seen[number])
            seen[number] += 1
        if place >= start:
            yield Draw(seed, epoch, batch, again)


def _generator_of(sampler: Any) -> torch.Generator | None:
    generator = getattr(sampler, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _checksum(indices: list[list[Any]]) -> str:
    return hashlib.sha256(repr(indices).encode()).hexdigest()[:32]
