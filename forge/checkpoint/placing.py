"""Load a checkpoint's tensors with the placements of the loading run, so that each rank reads only its shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge.checkpoint import sharding
from forge.checkpoint.checkpoint import Keys, Place, Read, TensorInfo

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def placed_like(live: Mapping[str, Any], holds: Callable[[Keys], bool] = lambda path: True) -> Place:
    """Return a `place` for `StoredCheckpoint.load` that makes DTensors with the meshes and placements of `live`.

    `live` are a task's tensors by name (`task.state_dict()`, say). A stored tensor matches one if it has its shape and
    its path ends in the name (`model.<name>`, `plugins.<plugin>.weights.<name>`) or in the name and one more key (an
    optimizer's `state.<name>.exp_avg`), or if it is tied to an earlier match. All others are loaded whole, on the
    CPU. A tensor at a path that this rank does not hold is not read: it has its shape and no values.
    """
    known = {name: tensor for name, tensor in live.items() if sharding.is_distributed(tensor)}
    done: dict[str, Tensor] = {}

    def place(path: Keys, info: TensorInfo, read: Read) -> Tensor:
        if not holds(path):
            return torch.empty(info.shape, dtype=getattr(torch, info.dtype), device="meta")
        if info.place in done:
            return done[info.place]
        for key in reversed(path[-2:]):
            model = known.get(key) if isinstance(key, str) else None
            if model is not None and tuple(model.shape) == info.shape and info.shape:
                return done.setdefault(info.place, _placed(model, info, read))
        return read()

    return place


def _placed(model: DTensor, info: TensorInfo, read: Read) -> Tensor:
    """Read this rank's part of a stored tensor as a DTensor placed like `model`."""
    from torch.distributed.tensor import DTensor

    whole = torch.empty(info.shape, device="meta")
    return DTensor.from_local(
        _slice(model, info, read),
        model.device_mesh,
        model.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _slice(model: DTensor, info: TensorInfo, read: Read) -> Tensor:
    """Read this rank's shard of a tensor placed like `model`; an empty shard reads nothing."""
    parts = list(sharding.slices_of(model))
    if len(parts) == 1:
        return read(parts[0][0])
    shape = tuple(sum(count for _, count in runs) for runs in sharding.runs_of(model))
    found = [(here, read(part)) for part, here in parts]
    made = torch.empty(shape, dtype=getattr(torch, info.dtype))
    for here, piece in found:
        made[here.as_index] = piece
    return made
