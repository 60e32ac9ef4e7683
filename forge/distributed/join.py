"""Joining the other processes: once, for as long as this process lives; every verb after the first finds them there."""

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
from torch.torch_version import TorchVersion

from forge.distributed.namespace import fresh
from forge.distributed.rank_info import RankInfo
from forge.errors import ForgeError

BACKENDS = {"cuda": "nccl"}
"""What moves gradients on which device; gloo on all others."""
FLIGHT_RECORDER = (
    "TORCH_FR_BUFFER_SIZE" if TorchVersion(torch.__version__) >= "2.11" else "TORCH_NCCL_TRACE_BUFFER_SIZE"
)
"""How many collectives torch remembers."""
JOIN_TIMEOUT = timedelta(seconds=300)
"""So long a process waits for the others to come."""
PATIENT = timedelta(days=1)
"""So long a collective may take; who stalls is found by the watch, which also says why."""


@dataclass(slots=True)
class Membership:
    """The default process group, and what forge made beside it."""

    world: ProcessGroup
    control: ProcessGroup
    "A gloo group between hosts: what is said over it never waits for a device."
    store: Store
    runs: int = 0
    "How many runs this membership has served; every rank counts the same."
    meshes: dict[tuple[Any, ...], DeviceMesh] = field(default_factory=dict)

    def mesh(self, device: str, shape: dict[str, int]) -> DeviceMesh:
        """The processes in this shape; one mesh serves all runs, since each has groups of its own."""
        key = (device, *shape.items())
        if key not in self.meshes:
            self.meshes[key] = init_device_mesh(device, tuple(shape.values()), mesh_dim_names=tuple(shape))
        return self.meshes[key]


_current: Membership | None = None


def join(info: RankInfo, device: torch.device, backend: str | None) -> Membership:
    """Meet the others, unless we are among them already: by an earlier run, or because the user's script did it."""
    global _current
    if not dist.is_initialized():
        _init(info, device, backend or BACKENDS.get(device.type, "gloo"))
        atexit.unregister(_leave)
        atexit.register(_leave)
    world = dist.distributed_c10d._get_default_group()
    if _current is None or _current.world is not world:
        control = dist.new_group(backend="gloo", timeout=PATIENT, group_desc="control")
        assert control is not None
        assert not isinstance(control, int)
        _current = Membership(world, control, dist.distributed_c10d._get_default_store())
    _current.runs += 1
    return _current


def _init(info: RankInfo, device: torch.device, backend: str) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "nccl" in backend:
        os.environ.setdefault(FLIGHT_RECORDER, "2000")  # it is read after a stall
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    options |= {"rank": info.rank, "world_size": info.world, "timeout": PATIENT}
    try:
        dist.init_process_group(backend, store=_store(info), **options)
    except (RuntimeError, ValueError) as error:
        raise ForgeError(
            f"Rank {info.rank} of {info.world} could not join the others at {info.address}:{info.port} "
            f"over {backend}: {error}"
        ) from error


def _store(info: RankInfo) -> Store:
    """The elastic agent keeps one for all lives of a job; else rank 0 does. One process alone needs no port."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        store = next(dist.rendezvous("env://", timeout=JOIN_TIMEOUT))[0]
        return fresh(store, info.rank, info.world, JOIN_TIMEOUT)
    if info.address is None:
        return HashStore()
    return TCPStore(info.address, info.port, info.world, is_master=info.rank == 0, timeout=JOIN_TIMEOUT)


def _leave() -> None:
    """At the end of a process that went well; one that failed leaves without a word (`abandon`)."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abandon() -> None:
    """After an error the others may not answer: nothing is said to them any more."""
    atexit.unregister(_leave)
