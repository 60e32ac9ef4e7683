"""Placing: a checkpoint's tensors as the run that loads them has its own, so that each rank reads only its shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge.checkpoint import sharding
from forge.checkpoint.checkpoint import Keys, Place, Read, TensorInfo

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def placed_like(live: Mapping[str, Any]) -> Place:
    """What `Checkpoint.load(place=...)` needs to give back DTensors on the meshes and with the placements of `live`.

    `live` are a task's tensors by name (`task.state_dict()`, say). A tensor belongs to one if the last key that leads
    to it is its name (`model.<name>`, `plugins.ema.weights.<name>`), or the last but one (an optimizer's
    `state.<name>.exp_avg`), and if it has its shape; or if it is tied to one that came before it. All others come back
    whole, on the CPU.
    """
    known = {name: tensor for name, tensor in live.items() if sharding.is_distributed(tensor)}

    done: dict[str, Tensor] = {}

    def place(path: Keys, info: TensorInfo, read: Read) -> Tensor:
        if info.place in done:
            return done[info.place]
        for key in reversed(path[-2:]):
            model = known.get(key) if isinstance(key, str) else None
            if model is not None and tuple(model.shape) == info.shape and info.shape:
                return done.setdefault(info.place, _placed(model, info, read))
        return read()

    return place


def _placed(model: DTensor, info: TensorInfo, read: Read) -> Tensor:
    """A DTensor laid out like another one, out of this rank's slice of what is stored."""
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
    """What this rank has of a tensor that is laid out like `model`; nothing is read where its shard is empty."""
    boxes = list(sharding.boxes_of(model))
    if len(boxes) == 1:
        return read(boxes[0][0])
    shape = tuple(sum(count for _, count in runs) for runs in sharding.runs_of(model))
    found = [(here, read(box)) for box, here in boxes]
    made = torch.empty(shape, dtype=getattr(torch, info.dtype))
    for here, piece in found:
        made[here.slices] = piece
    return made
