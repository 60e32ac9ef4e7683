"""Several ranks that read one checkpoint: each hashes a share of its files; damage found by one is raised by all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from forge.errors import CheckpointError


class HasRank(Protocol):
    """What a run's environment knows of its ranks."""

    rank: int
    world: int
    store: Any
    "A torch.distributed Store, if there is one."

    def gather(self, value: Any) -> list[Any]: ...


@dataclass(frozen=True, slots=True)
class Readers:
    """The ranks that open a checkpoint at the same time, seen from one of them."""

    rank: int = 0
    world: int = 1
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    "Returns every rank's value, in the order of ranks; called by all ranks."

    @classmethod
    def of(cls, env: HasRank) -> Readers:
        return cls(env.rank, env.world, env.gather)

    def share(self, sizes: Mapping[str, int]) -> set[str]:
        """Return the files that this rank hashes: the largest go first, each to the rank with the fewest bytes."""
        loads, own = [0] * self.world, set()
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            rank = loads.index(min(loads))
            loads[rank] += sizes[name]
            if rank == self.rank:
                own.add(name)
        return own

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Raise on every rank the error that any rank meets inside."""
        found: Exception | None = None
        try:
            yield
        except (CheckpointError, OSError) as error:
            found = error
        said = self.gather(None if found is None else str(found))
        if found is not None:
            raise found
        if problem := next(filter(None, said), None):
            raise CheckpointError(problem)

    def from_first(self, make: Callable[[], Any]) -> Any:
        """Call `make` on rank 0 and return its result on every rank."""
        return self.gather(make() if self.rank == 0 else None)[0]


ALONE = Readers()
