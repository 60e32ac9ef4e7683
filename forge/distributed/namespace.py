"""Meeting in a store that outlives its ranks.

The elastic agent keeps one store for all lives of a job. Process groups of a new life would read the addresses that
the last one left there, and try to reach the dead. So the ranks of a life first agree on a part of it that is theirs.
"""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from forge.errors import ForgeError

POLL = 0.02
"""Seconds between two looks."""


def fresh(store: Store, rank: int, world: int, timeout: timedelta) -> Store:
    """A part of the store that only the ranks of this life know.

    Every rank shows a sign; rank 0 reads all of them and calls them out, as often as one changes, until each rank has
    found its own among them. A sign of the last life can be read, but nobody will answer to it.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    store.set(f"forge/sign/{rank}", own)
    while time.monotonic() < end:
        if rank == 0 and _all_there(store, world):
            store.set("forge/called", json.dumps(_read(store, world)))
        called = json.loads(store.get("forge/called")) if store.check(["forge/called"]) else []
        if len(called) == world and called[rank] == own:
            name = uuid.uuid5(uuid.NAMESPACE_OID, " ".join(called)).hex
            store.set(f"forge/{name}/{rank}", "here")
            if store.check([f"forge/{name}/{other}" for other in range(world)]):
                return PrefixStore(f"forge/{name}", store)
        time.sleep(POLL)
    raise ForgeError(
        f"Rank {rank} of {world} waited {timeout.total_seconds():g} seconds for the others to come to this run's store."
    )


def _all_there(store: Store, world: int) -> bool:
    return store.check([f"forge/sign/{rank}" for rank in range(world)])


def _read(store: Store, world: int) -> list[str]:
    return [sign.decode() for sign in store.multi_get([f"forge/sign/{rank}" for rank in range(world)])]
