"""Protocols: what forge asks of a loader, whoever wrote it. `forge.testing.check_loader` says whether one keeps them.

A loader is anything with `__iter__`. One of these makes it more, and the names beside them are asked for where a loader
has them: `set_epoch(epoch)`, and of a `Seekable` `position(epoch, batches)`, `fingerprint()`, `sample_indices(epoch,
start, stop)` and `peek(places)`, as `Indexed` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class Seekable(Protocol):
    """A loader that can begin anywhere in an epoch: a run over it resumes exactly, by a position in samples."""

    def __iter__(self) -> Iterator[Any]: ...

    def seek(self, epoch: int, samples: int) -> None:
        """Start the next pass at sample number `samples` of this epoch; later passes are whole."""
        ...


@runtime_checkable
class Indexed(Seekable, Protocol):
    """A seekable loader over a known number of samples: messages can name them, and ranks can compare them."""

    def position(self, epoch: int, batches: int) -> int:
        """Return how many samples the first `batches` batches of an epoch hold."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be equal for a run to resume."""
        ...

    def sample_indices(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the indices in the dataset of the samples at these places of an epoch."""
        ...

    def peek(self, places: Iterable[int]) -> Iterator[Any]:
        """Yield the samples at these places of the first epoch, each as a batch of one."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A loader with a state of its own: a run over it resumes exactly, from the state after the last batch."""

    def state_dict(self) -> Any:
        """Return where the next batch comes from."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Go on from a state with the next pass."""
        ...


@runtime_checkable
class LiveLoader(Protocol):
    """A loader that makes its batches with the task while the run trains: nothing of it is read ahead.

    It has its length from the moment that a pass begins.
    """

    live: Literal[True]

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...

    def attach(self, task: nn.Module, call: Callable[[Callable[[Any], Any]], Any] | None = None) -> None:
        """Make batches with this task from now on; `call` runs a function of it inside the plugins of a run."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return the data that are not used up, and what is needed to make more."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state with the next pass."""
        ...


def is_seekable(loader: Any) -> bool:
    """Whether a loader, or the one that it wraps, can begin anywhere in an epoch."""
    return hasattr(loader, "seek")  # a wrapper passes names on, which isinstance does not ask for


def is_live(loader: Any) -> bool:
    """Whether a loader makes its batches with the task."""
    return getattr(loader, "live", False)
