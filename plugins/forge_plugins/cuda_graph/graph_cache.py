"""The graphs of one optimizer, by the kind of their windows."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from forge_plugins.cuda_graph.captured import Captured

OFTEN = 16
"""Windows of a kind without a graph after which it replaces a graph that was not used meanwhile."""


class GraphCache:
    """At most `limit` graphs. The graph that was not used for the longest time makes room for a kind of window that
    came OFTEN times meanwhile; so kinds that are equally frequent do not take turns in being captured."""

    def __init__(self, limit: int):
        self.limit = limit
        self.graphs: dict[Hashable, Captured] = {}
        self.refused: set[Hashable] = set()
        "Kinds whose capture has failed."
        self.warmed = 0
        "Updates that have run uncaptured to warm up."
        self.seen: dict[Hashable, int] = {}
        "Windows of each kind that ran uncaptured."
        self._came: dict[Hashable, deque[int]] = {}
        self._used: dict[Hashable, int] = {}
        self._now = 0

    def find(self, key: Hashable) -> Captured | None:
        """Return the graph of a kind of window, if there is one, and count its use."""
        self._now += 1
        graph = self.graphs.get(key)
        if graph is not None:
            self._used[key] = self._now
        return graph

    def count(self, key: Hashable) -> int:
        """Count a window that has no graph; return how many of its kind came before."""
        before = self.seen.get(key, 0)
        self.seen[key] = before + 1
        self._came.setdefault(key, deque(maxlen=OFTEN)).append(self._now)
        return before

    def has_room(self, key: Hashable) -> bool:
        """Whether a kind of window may get a graph, perhaps in another's place."""
        return key not in self.refused and (len(self.graphs) < self.limit or self._to_drop(key) is not None)

    def make_room(self, key: Hashable) -> None:
        """Drop the graph in whose place a new one comes, if any."""
        old = self._to_drop(key) if len(self.graphs) >= self.limit else None
        if old is not None:
            for kept in (self._used, self._came, self.graphs):
                kept.pop(old, None)

    def put(self, key: Hashable, graph: Captured) -> None:
        self.graphs[key], self._used[key] = graph, self._now

    def _to_drop(self, key: Hashable) -> Hashable | None:
        came = self._came[key]
        oldest = min(self.graphs, key=self._used.__getitem__)
        return oldest if len(came) == OFTEN and self._used[oldest] < came[0] else None
