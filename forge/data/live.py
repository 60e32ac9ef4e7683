"""Data that the model makes: a live loader calls a function of the task while the run trains.

A live loader has `live = True`, `attach`, a length from the moment that a pass begins, and a state. Nothing of it is
read ahead. Its state holds the data that are not used up, and the state of every object that its function reaches and
that has `state_dict()` and `load_state_dict(state)`: environments, running statistics. So a run that is killed anywhere
ends in the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate, default_convert

from forge.data.accumulation_windows import batch_size, is_stateful
from forge.data.order import epoch_order
from forge.data.sample_rng import OwnSeed
from forge.data.sharding import Portion
from forge.env import Env, map_items
from forge.errors import DataError
from forge.util.walk import walk

Collect = Callable[[Any], Any]
"""Makes data with the task: `collect(task)`."""


class Live(OwnSeed):
    """What live loaders share: the task that they collect with, and the objects whose state is saved with theirs."""

    live = True
    collect: Collect | None
    _rank_env: Env | None = None
    again = False
    "Whether every pass gives what the first one gave."
    _resumes = False
    "Whether the next pass goes on where a restored state was."
    _task: Any = None
    _call: Callable[[Collect], Any] | None = None

    def __bool__(self) -> bool:
        return True  # whether or not the next pass has a length yet

    def attach(self, task: nn.Module, call: Callable[[Collect], Any] | None = None) -> None:
        """Collect with this task from now on. A Trainer says how to `call` a function of it, inside its plugins."""
        self._task, self._call = task, call or (lambda function: _alone(task, function))
        self.again = False

    def give_again(self) -> None:
        """Give in every pass what the first one gave: for a model that is to learn some batches by heart."""
        self.again = True

    def _collected(self) -> Any:
        """Return what the function makes with the task as it is now."""
        if self._call is None:
            raise DataError(
                f"{type(self).__name__} collects with a task and has none yet: pass it to fit(task, ...), or call "
                "attach(task) to read it yourself."
            )
        assert self.collect is not None
        self._share_out()
        return self._call(self.collect)

    def _parts(self) -> dict[str, Any]:
        """Return the objects with a state that the function or the task reaches, by path; modules have their own."""

        def keeps_state(value: Any) -> bool:
            return not isinstance(value, type) and is_stateful(value)

        reached = walk({"collect": self.collect, "task": self._task}, lambda path, value: not keeps_state(value))
        found = {path: value for path, value in reached if keeps_state(value)}
        return {path: x for path, x in found.items() if x is not self and not isinstance(x, (nn.Module, Live))}

    def _share_out(self) -> None:
        """Tell parts that divide themselves among ranks, as `forge.data.Environments` do, which share is ours."""
        env = self._rank_env
        if env is not None:
            for part in self._parts().values():
                if hasattr(part, "share"):
                    part.share(env.data_rank, env.data_world)

    def _states_of_parts(self) -> dict[str, Any]:
        return {path: part.state_dict() for path, part in self._parts().items()}

    def _load_parts(self, states: Mapping[str, Any]) -> None:
        self._resumes = True
        self._share_out()
        found = self._parts()
        missing = states.keys() - found.keys()
        if missing:
            raise DataError(
                f"The checkpoint has the state of {min(missing)}, which {type(self).__name__} does not reach here: "
                "make it before fit begins, as the run did."
            )
        for path, state in states.items():
            found[path].load_state_dict(state)

    def _per_rank(self, batch_size: int, world: int) -> int:
        if batch_size % world:
            raise DataError(
                f"{type(self).__name__}: batch_size={batch_size} counts the samples of all ranks, and {world} ranks "
                "cannot share it evenly. Use a multiple of the ranks."
            )
        return batch_size // world


class Rollouts(Live):
    """Batches of what `collect(task)` returns; it is called again when its data are used up.

    ::

        def collect(task):
            return {"prompt": prompts, "answer": task.model.generate(prompts)}

        trainer.fit(task, Rollouts(collect, batch_size=64, epochs=4))

    A collection is one *batch* (a tensor, or a dict, tuple or dataclass of tensors, one row per sample), a *data set*
    (a list of samples, or a Dataset), or an *iterable of batches*. `batch_size` cuts a batch or a data set into
    minibatches, shuffled anew in each of `epochs` passes; without it a batch is used whole. One collection is an epoch
    of the run: `max_epochs` counts collections. With `every=n` it is one of n batches, however many the data make.

    `collect` runs in evaluation mode without gradients, on the run's device, inside its plugins (autocast too), and
    draws from the run's generators. On several ranks each collects its share, and `batch_size` counts all of them.
    """

    def __init__(
        self,
        collect: Collect,
        *,
        batch_size: int | None = None,
        epochs: int = 1,
        every: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int | None = None,
    ):
        if not callable(collect):
            raise DataError(f"Rollouts takes a function of the task, not a {type(collect).__name__}.")
        for name, value in {"batch_size": batch_size, "epochs": epochs, "every": every}.items():
            if value is not None and value < 1:
                raise DataError(f"Rollouts: {name} is {value}; it must be at least 1.")
        self.collect, self.batch_size, self.epochs, self.every = collect, batch_size, epochs, every
        self.shuffle, self.drop_last, self.own_seed = shuffle, drop_last, seed
        self._passes = self._given = 0
        "Passes over earlier collections, and batches given of this one."
        self._data: _Collection | None = None
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))

    def __len__(self) -> int:
        if self._data is None:
            raise TypeError("The number of batches is not known before a collection is made.")
        return self.every or self.epochs * self._batches_of_a_pass()

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        return self._batches()

    def iter_rank(self, data_rank: int, data_world: int) -> Iterator[Portion]:
        """Yield this rank's batches of its own collection; a rank with fewer than others repeats one at weight 0."""
        self._begin()
        assert self._rank_env is not None
        own = [self._size(number) for number in range(self._given, len(self))]
        sizes = self._rank_env.gather(own)[:: self._rank_env.world // data_world]
        totals = [sum(part) for part in itertools.zip_longest(*sizes, fillvalue=0)]
        batches = itertools.chain(self._batches(), itertools.repeat(self._batch(0), len(totals) - len(own)))
        pairs = itertools.zip_longest(own, totals, fillvalue=0)
        return (Portion(batch, *counts) for batch, counts in zip(batches, pairs, strict=True))

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be equal for a run to resume with this loader."""
        return {
            "order": "rollouts",
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "every": self.every,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "seed": self.seed,
            "ranks": 1 if self._rank_env is None else self._rank_env.world,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the collection that is in use, what was given of it, and the state of what collects."""
        used_up = self._data is None or (self._given >= len(self) and not self.again)
        data = None if self._data is None or used_up else {"kind": self._data.kind, "of": self._data.data}
        given = 0 if used_up else self._given
        passes = self._passes + self._passes_of_this() if used_up else self._passes
        return {"passes": passes, "given": given, "data": data, "parts": self._states_of_parts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with that collection, at that batch."""
        self._passes, self._given, data = state["passes"], state["given"], state["data"]
        self._data = None if data is None else _Collection(data["kind"], data["of"])
        self._order = (-1, torch.empty(0))
        self._load_parts(state["parts"])

    def _begin(self) -> None:
        """Collect, unless a restored collection is not used up."""
        resumes, self._resumes = self._resumes, False
        if self._data is not None and self.again:
            self._given = self._given if resumes and self._given < len(self) else 0
        elif self._data is None or self._given >= len(self) or not resumes:
            self._passes += self._passes_of_this()
            self._data = _Collection.of(self._collected())
            self._given, self._order = 0, (-1, torch.empty(0))
            if not self._batches_of_a_pass():
                raise DataError(
                    f"collect(task) returned {self._data.rows} samples, which make no batch of {self._size_here()}. "
                    "Return more, or use a smaller batch_size."
                )

    def _batches(self) -> Iterator[Any]:
        while self._given < len(self):
            self._given += 1
            yield self._batch(self._given - 1)

    def _size_here(self) -> int | None:
        """Return the samples of a batch on this rank; None for all that there are."""
        if self.batch_size is None or self._rank_env is None:
            return self.batch_size
        return self._per_rank(self.batch_size, self._rank_env.data_world)

    def _batches_of_a_pass(self) -> int:
        assert self._data is not None
        size = self._size_here()
        if self._data.kind == "batches" or size is None:
            return self._data.rows if self._data.kind == "batches" else min(1, self._data.rows)
        return self._data.rows // size if self.drop_last else -(-self._data.rows // size)

    def _passes_of_this(self) -> int:
        return 0 if self._data is None else -(-len(self) // self._batches_of_a_pass())

    def _rows_of(self, number: int) -> tuple[int, int, int]:
        """Return the pass of a batch, and its place in the pass."""
        assert self._data is not None
        turn, index = divmod(number, self._batches_of_a_pass())
        size = 1 if self._data.kind == "batches" else self._size_here() or self._data.rows
        return turn, index * size, min(self._data.rows, (index + 1) * size)

    def _size(self, number: int) -> int:
        assert self._data is not None
        _, begin, end = self._rows_of(number)
        return end - begin if self._data.kind != "batches" else self._data.size_of(begin)

    def _batch(self, number: int) -> Any:
        assert self._data is not None
        turn, begin, end = self._rows_of(number)
        if self._data.kind == "batches" or self._size_here() is None or not self.shuffle:
            return self._data.range(begin, end)
        if self._order[0] != turn:
            self._order = turn, epoch_order(self._data.rows, self.seed, self._passes + turn)
        return self._data.rows_at(self._order[1][begin:end])


class _Collection:
    """What was collected, in a form that a checkpoint can hold: a batch, samples or batches."""

    def __init__(self, kind: str, data: Any):
        self.kind, self.data = kind, data
        self.rows = len(data) if kind != "batch" else rows_of(data)

    @classmethod
    def of(cls, given: Any) -> _Collection:
        """Return a collection of what `collect` returned."""
        if isinstance(given, (Tensor, tuple, Mapping)) or hasattr(given, "__dataclass_fields__"):
            return cls("batch", default_convert(given))
        if isinstance(given, list):
            return cls("samples", default_convert(given))
        if isinstance(given, Dataset) and hasattr(given, "__len__"):
            return cls("samples", [default_convert(given[i]) for i in range(len(given))])  # pyright: ignore[reportArgumentType]
        if isinstance(given, Iterable):
            return cls("batches", [default_convert(batch) for batch in given])
        raise DataError(
            f"collect(task) returned a {type(given).__name__}. Return a batch (a tensor, or a dict or tuple of them), "
            "a data set or an iterable of batches."
        )

    def size_of(self, number: int) -> int:
        """Return the samples of one of several batches."""
        return rows_of(self.data[number])

    def range(self, begin: int, end: int) -> Any:
        """Return the samples from `begin` to `end` as a batch."""
        if self.kind == "batches":
            return self.data[begin]
        if self.kind == "samples":
            return default_collate(self.data[begin:end])
        whole = begin == 0 and end == self.rows
        return self.data if whole else taken(self.data, slice(begin, end), self.rows)

    def rows_at(self, indices: Tensor) -> Any:
        """Return these samples as a batch."""
        if self.kind == "samples":
            return default_collate([self.data[i] for i in indices.tolist()])
        return taken(self.data, indices, self.rows)


def rows_of(batch: Any) -> int:
    """Return the samples of a batch; refuse one that does not say."""
    size = batch_size(batch)
    if size is None:
        raise DataError(f"collect(task) returned a {type(batch).__name__} without a tensor that has a row per sample.")
    return size


def taken(value: Any, rows: slice | Tensor, size: int) -> Any:
    """Return these rows of a batch: of what has one entry per sample; the rest as it is."""
    if isinstance(value, Tensor):
        if not value.ndim or value.size(0) != size:
            return value
        return value[rows if isinstance(rows, slice) else rows.to(value.device)]
    if isinstance(value, list) and len(value) == size and batch_size(value) != size:
        return value[rows] if isinstance(rows, slice) else [value[i] for i in rows.tolist()]
    part = map_items(value, lambda item: taken(item, rows, size))
    return value if part is None else part


@contextmanager
def resting(task: nn.Module) -> Iterator[None]:
    """Keep a task in evaluation mode, without gradients; restore the mode of each module afterwards."""
    modes = [(module, module.training) for module in task.modules()]
    task.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _alone(task: nn.Module, function: Collect) -> Any:
    """Call a function of a task outside of a run."""
    with resting(task):
        return function(task)
