"""A fresh namespace in a store that outlives its ranks.

The elastic agent keeps one store for all attempts of a job. Process groups of a new attempt would read the addresses of
the last one and try to reach dead processes. So the ranks of an attempt first agree on a prefix of their own.
"""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from forge.errors import ForgeError

POLL = 0.02
"""Seconds between two polls."""


def fresh_store(store: Store, rank: int, world: int, timeout: timedelta) -> Store:
    """Return the part of the store under a prefix that only the ranks of this attempt know.

    Every rank writes a token; rank 0 reads and publishes all of them, until each rank has found its own among them. A
    token of the last attempt may be published too, but no rank confirms that list.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    tokens = [f"forge/token/{other}" for other in range(world)]
    store.set(tokens[rank], own)
    while time.monotonic() < end:
        if rank == 0 and store.check(tokens):
            store.set("forge/published", json.dumps([token.decode() for token in store.multi_get(tokens)]))
        published = json.loads(store.get("forge/published")) if store.check(["forge/published"]) else []
        if len(published) == world and published[rank] == own:
            name = uuid.uuid5(uuid.NAMESPACE_OID, " ".join(published)).hex
            store.set(f"forge/{name}/{rank}", "here")
            if store.check([f"forge/{name}/{other}" for other in range(world)]):
                return PrefixStore(f"forge/{name}", store)
        time.sleep(POLL)
    raise ForgeError(
        f"Rank {rank} of {world} waited {timeout.total_seconds():g} seconds for the others to reach this run's store. "
        "Check that all ranks were started and can connect to its host."
    )
