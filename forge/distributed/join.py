"""Join the other processes: once per process; every later run reuses the process groups."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from forge.distributed import flight_recorder
from forge.distributed.address import resolvable
from forge.distributed.namespace import fresh_store
from forge.distributed.rank_info import RankInfo
from forge.errors import ForgeError
from forge.torch_internals import default_store

BACKENDS = {"cuda": "nccl"}
"""The backend by device type; gloo on all others."""
JOIN_TIMEOUT = timedelta(seconds=300)
COLLECTIVE_TIMEOUT = timedelta(days=1)
"""Practically none: the heartbeat finds stalls, and reports the cause."""


@dataclass(slots=True)
class Membership:
    """The default process group, and forge's own group, store and meshes beside it."""

    world: ProcessGroup
    control: ProcessGroup
    "A gloo group between hosts: its collectives never wait for a device."
    store: Store
    runs: int = 0
    "Runs served so far; the same number on every rank."
    meshes: dict[tuple[Any, ...], DeviceMesh] = field(default_factory=dict)

    def mesh(self, device: str, shape: dict[str, int]) -> DeviceMesh:
        """Return the processes in this shape; a mesh is made once and reused, since each makes process groups."""
        key = (device, *shape.items())
        if key not in self.meshes:
            self.meshes[key] = init_device_mesh(device, tuple(shape.values()), mesh_dim_names=tuple(shape))
        return self.meshes[key]


_current: Membership | None = None


def join(info: RankInfo, device: torch.device, backend: str | None) -> Membership:
    """Initialise the process groups, unless an earlier run or the user's script has."""
    global _current
    if not dist.is_initialized():
        _init(info, device, backend or BACKENDS.get(device.type, "gloo"))
        atexit.unregister(_leave)
        atexit.register(_leave)
    world = dist.group.WORLD
    assert world is not None
    if _current is None or _current.world is not world:
        control = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT, group_desc="control")
        assert control is not None
        assert not isinstance(control, int)
        _current = Membership(world, control, default_store())
    _current.runs += 1
    return _current


def _init(info: RankInfo, device: torch.device, backend: str) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    flight_recorder.switch_on()  # read after a stall
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    options |= {"rank": info.rank, "world_size": info.world, "timeout": COLLECTIVE_TIMEOUT}
    try:
        dist.init_process_group(backend, store=_store(info), **options)
    except ForgeError:
        raise
    except (RuntimeError, ValueError) as error:
        raise ForgeError(
            f"Rank {info.rank} of {info.world} could not join the others at {info.address}:{info.port} "
            f"over {backend}: {error}"
        ) from error


def _store(info: RankInfo) -> Store:
    """Return the elastic agent's store, which serves all attempts of a job, or rank 0's; one process needs no port."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        store = next(dist.rendezvous("env://", timeout=JOIN_TIMEOUT))[0]
        return fresh_store(store, info.rank, info.world, JOIN_TIMEOUT)
    if info.address is None:
        return HashStore()
    address = resolvable(info.address)
    return TCPStore(address, info.port, info.world, is_master=info.rank == 0, timeout=JOIN_TIMEOUT)


def _leave() -> None:
    """Destroy the process groups at exit; after a failure `abandon` unregisters this."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abandon() -> None:
    """After an error, exit without another collective: the other ranks may not answer."""
    atexit.unregister(_leave)
