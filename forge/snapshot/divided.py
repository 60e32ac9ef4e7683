"""Describe the state of all ranks together, where ranks hold different whole tensors.

Under a pipeline a rank has the parameters of its stage, or only it has the optimizer state of its parameters. All ranks
exchange outlines of what they have. Then each has the whole tree: where a tensor is held elsewhere, it stands without
values (on the meta device), with a note of the ranks that hold it (`forge.checkpoint.sharding.Holders`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge.checkpoint import sharding
from forge.checkpoint.sharding import Holders
from forge.env import Env


class _Missing:
    """Stands for a value that a rank does not have."""


@dataclass(frozen=True, slots=True)
class TensorOutline:
    """A tensor of one rank, without its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    here: bool
    "Whether the rank has its values."
    memory: int
    "The number of its memory: tied tensors have the same."
    cut: tuple[tuple[str, ...], tuple[Any, ...]] | None = None
    "Of a DTensor: the axes of its mesh, and its placements."


def together(tree: Any, env: Env) -> Any:
    """Return the tree with the values of all ranks; a collective call. Plain values are those of the lowest rank."""
    outlines = env.gather(_outline(tree, {}))
    return _merged(tree, outlines, env)


def _outline(value: Any, memories: dict[Any, int]) -> Any:
    if isinstance(value, Tensor):
        cut = None
        if sharding.is_distributed(value):
            cut = (value.device_mesh.mesh_dim_names or (), value.placements)
        memory = memories.setdefault(id(value) if value.is_meta else sharding.place_of(value), len(memories))
        return TensorOutline(tuple(value.shape), value.stride(), value.dtype, not value.is_meta, memory, cut)
    if isinstance(value, dict):
        return {key: _outline(item, memories) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_outline(item, memories) for item in value)
    return value


def _merged(own: Any, outlines: Sequence[Any], env: Env) -> Any:
    """Return this rank's value with what other ranks have beside it."""
    first = next(outline for outline in outlines if outline is not _Missing)
    if isinstance(first, TensorOutline):
        return _merged_tensor(own, outlines, env)
    if isinstance(first, dict):
        there = [outline for outline in outlines if outline is not _Missing]
        keys = dict.fromkeys(key for outline in there for key in outline)
        mine = {} if own is _Missing else own
        return {key: _merged(mine.get(key, _Missing), [_item(o, key) for o in outlines], env) for key in keys}
    if type(first) in (list, tuple):
        # ranks may know more items than others: the tags of a logger, which writes on the main rank
        parts = itertools.zip_longest(*(() if o is _Missing else o for o in outlines), fillvalue=_Missing)
        mine = itertools.chain(() if own is _Missing else own, itertools.repeat(_Missing))
        return type(first)(_merged(item, part, env) for item, part in zip(mine, parts, strict=False))
    return first


def _item(outline: Any, key: Any) -> Any:
    return _Missing if outline is _Missing else outline.get(key, _Missing)


def _merged_tensor(own: Any, outlines: Sequence[Any], env: Env) -> Any:
    ranks = tuple(rank for rank, o in enumerate(outlines) if o is not _Missing and o.here)
    if len(ranks) == len(outlines) or not ranks:
        return own
    outline = outlines[ranks[0]]
    held = Holders(ranks, f"{ranks[0]}:{outline.memory}")
    if own is not _Missing and not own.is_meta:
        return sharding.mark_held(own, held)
    made = torch.empty_strided(outline.shape, outline.strides, dtype=outline.dtype, device="meta")
    if outline.cut is not None:
        from torch.distributed.tensor import distribute_tensor

        axes, placements = outline.cut
        assert env.mesh is not None
        made = distribute_tensor(made, env.mesh[axes], placements, src_data_rank=None)
    return sharding.mark_held(made, held)
