"""Replay: a buffer of what was collected, from which each update draws."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_convert

from forge.data.live import Collect, Live, rows_of
from forge.data.sharding import Portion
from forge.env import map_items
from forge.errors import DataError

LARGE = 2**30
"""Bytes of a tensor above which it is kept in a file that is mapped into memory."""


class Replay(Live):
    """A buffer of `capacity` samples; each batch is drawn from it, with replacement.

    ::

        replay = Replay(10_000, collect, batch_size=128, every=4, warmup=1_000)
        trainer.fit(task, replay)

    `collect(task)` returns samples to add: a tensor, or a dict or tuple of tensors, one row per sample; the oldest make
    room. It is called before the first draw, until there are `warmup` samples, and then before every `every`-th draw.
    Without it, fill the buffer with `add`, before fit and in the step.

    `epoch` draws are an epoch of the run. With `alpha` above 0 a sample is drawn in proportion to its priority to the
    power of `alpha`; batches, which must be dicts then, get `index`, and `weight`, the correction to the power of
    `beta`, at most 1. Tell the buffer what was learned: `replay.prioritise(batch["index"], errors)`.

    The buffer, its priorities and the environments are in every checkpoint. On several ranks each has its own buffer
    and draws its share of `batch_size`.
    """

    def __init__(
        self,
        capacity: int,
        collect: Collect | None = None,
        *,
        batch_size: int,
        every: int = 1,
        warmup: int = 1,
        epoch: int = 1_000,
        alpha: float = 0.0,
        beta: float = 0.4,
    ):
        at_least_1 = {"capacity": capacity, "batch_size": batch_size, "every": every, "warmup": warmup, "epoch": epoch}
        for name, value in at_least_1.items():
            if value < 1:
                raise DataError(f"Replay: {name} is {value}; it must be at least 1.")
        if warmup > capacity:
            raise DataError(f"Replay: warmup={warmup} never comes: the buffer holds {capacity}.")
        self.capacity, self.collect, self.batch_size, self.every = capacity, collect, batch_size, every
        self.warmup, self.epoch, self.alpha, self.beta = warmup, epoch, alpha, beta
        self.rows = 0
        "Samples in the buffer."
        self._next = self._drawn = self._given = 0
        self._store: Any = None
        self._kept: list[Any] = []
        "Batches of the first pass, if they are to be given again."
        self._priorities = torch.zeros(capacity if alpha else 0, dtype=torch.float64)

    def add(self, batch: Any) -> None:
        """Add samples; the oldest make room. They have the highest priority that was seen."""
        batch = default_convert(batch)
        count = rows_of(batch)
        if self._store is None:
            self._store = _mapped(batch, self._allocated)
        start = max(0, count - self.capacity)
        places = torch.arange(self._next + start, self._next + count) % self.capacity
        _write(self._store, batch, places, start, "")
        if self.alpha:
            self._priorities[places] = max(1.0, float(self._priorities.max()))
        self._next = (self._next + count) % self.capacity
        self.rows = min(self.capacity, self.rows + count)

    def draw(self, size: int) -> Any:
        """Return a batch of samples that are drawn by priority, or all alike."""
        if not self.rows:
            raise DataError("The replay buffer is empty: give it collect=, or add samples before fit.")
        if not self.alpha:
            at = torch.randint(self.rows, (size,))
            return _mapped(self._store, lambda x: x[at])
        if not isinstance(self._store, dict):
            raise DataError("Replay with alpha adds `index` and `weight` to a batch: collect dicts of tensors.")
        weights = self._priorities[: self.rows] ** self.alpha
        edges = weights.cumsum(0)
        at = torch.searchsorted(edges, torch.rand(size, dtype=torch.float64) * edges[-1]).clamp(max=self.rows - 1)
        correction = (self.rows * weights[at] / edges[-1]) ** -self.beta
        drawn = {name: _mapped(x, lambda x: x[at]) for name, x in self._store.items()}
        return {**drawn, "index": at, "weight": (correction / correction.max()).float()}

    def prioritise(self, index: Tensor, priorities: Tensor) -> None:
        """Set the priorities of samples, such as the sizes of their errors; a small constant keeps each in the draw."""
        self._priorities[index.cpu()] = priorities.detach().reshape(-1).abs().double().cpu() + 1e-6

    def __len__(self) -> int:
        return self.epoch

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self.batch_size)

    def iter_rank(self, data_rank: int, data_world: int) -> Iterator[Portion]:
        """Yield this rank's share of each batch, from its own buffer."""
        size = self._per_rank(self.batch_size, data_world)
        return (Portion(batch, size, self.batch_size) for batch in self._batches(size))

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be equal for a run to resume with this loader."""
        names = ("capacity", "batch_size", "every", "warmup", "epoch", "alpha", "beta")
        ranks = 1 if self._rank_env is None else self._rank_env.world
        return {"order": "replay", **{name: getattr(self, name) for name in names}, "ranks": ranks}

    def state_dict(self) -> dict[str, Any]:
        """Return the samples, their priorities, the position, and the state of what collects."""
        given = 0 if self._given == self.epoch else self._given
        position = {"rows": self.rows, "next": self._next, "drawn": self._drawn, "given": given, "kept": self._kept}
        store = None if self._store is None else _mapped(self._store, lambda x: x[: self.rows])
        kept = {"store": store, "priorities": self._priorities[: self.rows] if self.alpha else None}
        return {**position, **kept, "parts": self._states_of_parts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with these samples."""
        self.rows, self._next, self._drawn, self._given = (state[k] for k in ("rows", "next", "drawn", "given"))
        self._kept = list(state.get("kept", ()))
        self._store = None
        if state["store"] is not None:
            self._store = _mapped(state["store"], self._allocated)
            _write(self._store, state["store"], torch.arange(self.rows), 0, "")
        if self.alpha:
            self._priorities.zero_()
            self._priorities[: self.rows] = state["priorities"]
        self._load_parts(state["parts"])

    def _batches(self, size: int) -> Iterator[Any]:
        resumes, self._resumes = self._resumes, False
        self._given = self._given if resumes and self._given < self.epoch else 0
        return self._drawn_batches(size)

    def _drawn_batches(self, size: int) -> Iterator[Any]:
        while self._given < self.epoch:
            self._given += 1
            if not self.again or self._given > len(self._kept):
                self._fill()
                self._drawn += 1
                drawn = self.draw(size)
                self._kept += [drawn] if self.again else []
                yield drawn
            else:
                yield self._kept[self._given - 1]

    def _fill(self) -> None:
        """Collect, if it is time."""
        if self.collect is None:
            return
        if self._drawn % self.every == 0:
            self.add(self._collected())
        while self.rows < self.warmup:
            self.add(self._collected())

    def _allocated(self, sample: Tensor) -> Tensor:
        """Return memory for a tensor of every sample; in a file without a name where it is large."""
        shape = (self.capacity, *sample.shape[1:])
        size = self.capacity * sample[:1].numel() * sample.element_size()
        if size < LARGE:
            return torch.empty(shape, dtype=sample.dtype)
        with tempfile.NamedTemporaryFile() as file:
            file.truncate(size)
            flat = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
        return flat.view(sample.dtype).view(shape)


def _mapped(value: Any, function: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    mapped = map_items(value, lambda item: _mapped(item, function))
    if mapped is None:
        raise DataError(f"A replay buffer holds tensors, and dicts and tuples of them, not a {type(value).__name__}.")
    return mapped


def _write(store: Any, batch: Any, places: Tensor, start: int, path: str) -> None:
    """Copy the rows of a batch from `start` on into the store."""
    if isinstance(store, Tensor):
        if not isinstance(batch, Tensor) or batch.shape[1:] != store.shape[1:] or batch.dtype != store.dtype:
            got = f"{batch.dtype} {tuple(batch.shape[1:])}" if isinstance(batch, Tensor) else type(batch).__name__
            raise DataError(
                f"The replay buffer holds {store.dtype} {tuple(store.shape[1:])} per sample{path and f' at {path}'}, "
                f"and was given {got}. Collect the same each time."
            )
        store[places] = batch[start:].to(store.device)
        return
    pairs = store.items() if isinstance(store, Mapping) else enumerate(store)
    for key, part in pairs:
        _write(part, batch[key], places, start, f"{path}[{key!r}]")
