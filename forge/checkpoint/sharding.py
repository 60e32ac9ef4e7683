"""Decide which rank writes which tensors, so that all ranks write at once and nothing is written twice.

The assignment follows from the tree and the rank numbers, without communication: each shard of a DTensor goes to the
least loaded rank that holds it, and whole tensors are distributed by size. A tensor that only some ranks hold
(`Holders`) is written by one of them; the others have a tensor of its shape without values.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from forge.checkpoint.hashing import new_hash
from forge.checkpoint.slices import TensorSlice, piece_name

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Named = dict[str, dict[str, Tensor]]
"""Tensors by file ("model" or "state") and name."""

Run = tuple[int, int]
"""Consecutive entries along one dimension: the first, and their number."""


MARK = "_forge_held"


@dataclass(frozen=True, slots=True)
class Holders:
    """Which ranks hold a tensor that others do not: the parameters of a pipeline's stage, say."""

    ranks: tuple[int, ...]
    place: str
    "A key of its memory, equal on all ranks, and equal for tensors that share it."


def held_by(tensor: Tensor) -> Holders | None:
    """Return which ranks hold a tensor, or None if all do."""
    return getattr(tensor, MARK, None)


def mark_held(tensor: Tensor, held: Holders) -> Tensor:
    """Return an alias of a tensor, with the note that only these ranks hold it."""
    alias = tensor.detach()
    setattr(alias, MARK, held)
    return alias


def is_distributed(tensor: Any) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, without importing DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_cut(tensor: Tensor) -> bool:
    """Whether no rank holds the whole tensor."""
    if not is_distributed(tensor) or not tensor.numel():
        return False
    return any(_is_shard(p) and n > 1 for p, n in zip(tensor.placements, tensor.device_mesh.shape, strict=True))


def obstacle(tensor: DTensor) -> str | None:
    """Return why a DTensor cannot be saved, or None."""
    if any(not _is_shard(placement) and not placement.is_replicate() for placement in tensor.placements):
        return "is a DTensor of partial sums; redistribute it to Shard or Replicate"
    if tensor.device_mesh.get_coordinate() is None:
        return "is a DTensor on a mesh that this rank is not part of"
    local = tuple(tensor.to_local().shape)
    expected = tuple(sum(count for _, count in runs) for runs in runs_of(tensor))
    return None if local == expected else f"is a DTensor whose shard is {local}; its placements require {expected}"


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key of a tensor's memory, equal for tensors that share it. A shard may be empty, its storage is not."""
    held = held_by(tensor)
    if held is not None:
        return (held.place, tensor.dtype, tensor.shape, tensor.stride())
    if not is_distributed(tensor):
        memory = (tensor.device, tensor.data_ptr(), tensor.is_conj(), tensor.is_neg())
    else:
        local = tensor.to_local()
        memory = (local.device, local.untyped_storage()._cdata, local.storage_offset(), local.is_conj(), local.is_neg())
    return (*memory, tensor.dtype, tensor.shape, tensor.stride())


def on_one_rank(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, else the tensor."""
    return tensor.to_local() if is_distributed(tensor) else tensor


# -- assignment -----------------------------------------------------------------------------------------------------


def share(tensors: Named, rank: int, world: int) -> Named:
    """Return the tensors that one of several ranks writes: whole ones by name, pieces by name and offset."""
    dealt = _deal(tensors, world)
    replicas: dict[tuple[Any, ...], list[int]] = {}
    found: Named = {}
    for file, named in tensors.items():
        found[file] = {}
        for name, tensor in named.items():
            if not is_distributed(tensor):
                if dealt[file, name] == rank:
                    found[file][name] = tensor
            elif _is_ours(tensor, replicas):
                if is_cut(tensor):
                    found[file] |= {piece_name(name, part): piece for part, piece in pieces(tensor)}
                else:
                    local = tensor.to_local()
                    found[file][name] = local if tensor.numel() else local.new_empty(tensor.shape)
    return found


def layout(tensors: Named) -> str:
    """Return a digest of names, dtypes, shapes and placements: ranks whose digests differ save different states."""
    lines: list[list[Any]] = []
    for file, named in tensors.items():
        for name, tensor in named.items():
            mesh = [tensor.device_mesh.shape, [*map(repr, tensor.placements)]] if is_distributed(tensor) else []
            lines.append([file, name, str(tensor.dtype), *tensor.shape, *mesh])
    return new_hash(json.dumps(lines).encode()).hexdigest()


def _deal(tensors: Named, world: int) -> dict[tuple[str, str], int]:
    """Assign whole tensors to ranks: first those that few ranks hold, then the others, the largest first, each to the
    least loaded rank that holds it."""
    whole = {
        (file, name): tensor
        for file, named in tensors.items()
        for name, tensor in named.items()
        if not is_distributed(tensor)
    }
    sizes = {key: tensor.nbytes for key, tensor in whole.items()}
    largest_first = sorted(sizes, key=lambda key: -sizes[key])
    held = {key: found.ranks for key, tensor in whole.items() if (found := held_by(tensor)) is not None}
    loads, dealt = _deal_held([key for key in largest_first if key in held], held, sizes, world)
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for key in largest_first:
        if key not in held:
            load, rank = heap[0]
            dealt[key] = rank
            heapq.heapreplace(heap, (load + sizes[key], rank))
    return dealt


def _deal_held(keys: Sequence[Any], held: dict[Any, tuple[int, ...]], sizes: dict[Any, int], world: int) -> Any:
    """Return the bytes of each rank, and the rank that writes each tensor of those that only some ranks hold."""
    loads, dealt = [0] * world, {}
    for key in keys:
        dealt[key] = min(held[key], key=lambda rank: (loads[rank], rank))
        loads[dealt[key]] += sizes[key]
    return loads, dealt


def _is_ours(tensor: DTensor, replicas: dict[tuple[Any, ...], list[int]]) -> bool:
    """Whether this rank writes its shard. `replicas` counts the bytes assigned so far to ranks with equal shards.

    Of several meshes with equal content (tensor parallelism inside DDP), the one with rank 0 writes, or with the first
    rank that holds the tensor.
    """
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    cuts = [d for d, placement in enumerate(tensor.placements) if _is_shard(placement)]
    same = [d for d in range(mesh.ndim) if d not in cuts]
    loads = replicas.setdefault((mesh.shape, *same), [0] * math.prod(mesh.shape[d] for d in same))
    chosen = loads.index(min(loads))
    loads[chosen] += tensor.nbytes
    number = 0
    for d in same:
        number = number * mesh.shape[d] + coordinate[d]
    if number != chosen or (not is_cut(tensor) and any(coordinate[d] for d in cuts)):
        return False
    held = held_by(tensor)
    return bool((mesh.mesh == (0 if held is None else held.ranks[0])).any())


# -- the shard of this rank -------------------------------------------------------------------------------------------


def pieces(tensor: DTensor) -> Iterator[tuple[TensorSlice, Tensor]]:
    """Yield this rank's shard as slices of the whole tensor: one, unless a strided shard of uneven parts has gaps."""
    local = tensor.to_local()
    for part, here in slices_of(tensor):
        yield part, local[here.as_index]


def slices_of(tensor: DTensor) -> Iterator[tuple[TensorSlice, TensorSlice]]:
    """Yield each slice of this rank's shard, relative to the whole tensor and relative to the shard."""
    dimensions = []
    for runs in runs_of(tensor):
        starts = itertools.accumulate((count for _, count in runs), initial=0)
        dimensions.append([(first, start, count) for (first, count), start in zip(runs, starts, strict=False)])
    for combination in itertools.product(*dimensions):
        size = tuple(count for _, _, count in combination)
        yield TensorSlice(tuple(c[0] for c in combination), size), TensorSlice(tuple(c[1] for c in combination), size)


def runs_of(tensor: DTensor) -> list[list[Run]]:
    """Return the entries of this rank per dimension; no run if its shard is empty."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    found = []
    for dimension, size in enumerate(tensor.shape):
        cuts = [
            (mesh.shape[d], coordinate[d], getattr(placement, "split_factor", None))
            for d, placement in enumerate(tensor.placements)
            if _is_shard(placement) and placement.dim % tensor.ndim == dimension  # pyright: ignore[reportAttributeAccessIssue]
        ]
        found.append(list(_runs(size, tuple(cuts))))
    return found


@lru_cache(maxsize=4096)
def _runs(size: int, cuts: tuple[tuple[int, int, int | None], ...]) -> tuple[Run, ...]:
    """Return the entries that remain of a dimension after each mesh dimension cuts it, as torch does."""
    from torch.distributed.tensor.placement_types import Shard

    from forge.torch_internals import StridedShard

    left = torch.arange(size)
    for parts, ours, factor in cuts:
        placement = Shard(0) if factor is None else StridedShard(0, split_factor=factor)
        left = placement._split_tensor(left, parts, with_padding=False, contiguous=False)[0][ours]
    if not len(left):
        return ()
    breaks = (left.diff() != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), len(left)]
    return tuple((int(left[a]), b - a) for a, b in itertools.pairwise(edges))


def _is_shard(placement: Any) -> bool:
    from torch.distributed.tensor.placement_types import Shard

    from forge.torch_internals import StridedShard

    return isinstance(placement, (Shard, StridedShard))


def whole(value: DTensor) -> Tensor:
    """Gather a DTensor on the device of its mesh: a collective, called on all its ranks."""
    local, mesh = value.to_local().detach(), value.device_mesh
    if local.device.type != mesh.device_type:  # stored on the host, gathered on the device of the mesh
        value = type(value).from_local(
            local.to(mesh.device_type),
            mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    return value.full_tensor().detach()
