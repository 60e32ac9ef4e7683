"""Limited: the first batches of a loader, for short runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from forge.data.accumulation_windows import is_stateful, length_of, set_epoch
from forge.data.protocols import is_live, is_seekable
from forge.data.sample_rng import restored_generators
from forge.errors import DataError


class Limited:
    """A loader whose passes end after `batches` batches; all other attributes are the inner loader's.

    With `again`, every epoch is the first one: the same batches in the same order.
    """

    def __init__(self, loader: Any, batches: int, again: bool = False):
        self.loader, self.batches, self.again = loader, batches, again
        if again and is_live(loader):
            loader.give_again()
        self._start = 0
        "Batches of the next pass that were given before a resume."
        self._given = 0
        "Batches given in this pass, where the inner loader has a state."
        self._ended = False
        "Whether a state was loaded of a pass that the limit had ended."

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass this epoch, from its beginning."""
        self._start = 0
        set_epoch(self.loader, 0 if self.again else epoch)

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be equal for a run to resume: that of the inner loader, and the limit."""
        inner = self.loader.fingerprint() if hasattr(self.loader, "fingerprint") else {"batches": length_of(self)}
        return {**inner, "limit": self.batches, "overfit": self.again}

    def __len__(self) -> int:
        return min(self.batches, len(self.loader))

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, 0
        if self._ended:  # begin the pass that the limit had ended, which advances samplers, and leave it
            self._ended = False
            with restored_generators():
                iter(self.loader)
        batches = iter(self.loader)
        if is_seekable(self.loader) or not is_stateful(self.loader):
            return itertools.islice(batches, self.batches - start)
        self._given = start
        return self._counted(batches)

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in itertools.islice(batches, self.batches - self._given):
            self._given += 1
            yield batch
        if self._given < self.batches:
            self._given = 0  # the loader ended the pass, and its own state says so

    def __getattr__(self, name: str) -> Any:
        """Return the inner loader's attribute, so that `seek` or `state_dict` exist exactly if the inner has them."""
        if name in ("loader", "__setstate__"):  # read by copy and pickle, before the inner loader is set
            raise AttributeError(name)
        value = getattr(self.loader, name)
        own = {"seek": self._seek, "state_dict": self._state, "load_state_dict": self._load_state}
        return own.get(name, value)

    def _seek(self, epoch: int, samples: int) -> None:
        """Start the next pass at this sample of an epoch, which must be the first of a batch."""
        epoch = 0 if self.again else epoch
        if samples and not hasattr(self.loader, "position"):
            raise DataError(
                f"A limited {type(self.loader).__name__} cannot be continued within an epoch: give it "
                "position(epoch, batches), which returns the samples in that many batches."
            )
        edges = range(self.batches + 1) if samples else range(1)
        self._start = next((n for n in edges if not samples or self.loader.position(epoch, n) == samples), 0)
        self.loader.seek(epoch, samples)

    def _state(self) -> dict[str, Any]:
        return {"given": self._given, "loader": self.loader.state_dict()}

    def _load_state(self, state: dict[str, Any]) -> None:
        ended = state["given"] >= self.batches
        self._start = self._given = 0 if ended else state["given"]
        self._ended = ended
        self.loader.load_state_dict(state["loader"])
