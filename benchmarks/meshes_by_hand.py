"""Meshes by hand: torch's own FSDP2, DTensor, pipelining and ring attention, combined as a mesh says.

On the network and data of `benchmarks.scale`: `tensor` divides the MLPs of blocks, `pipe` the blocks, `context` the
positions, `shard` weights and samples (with `context`, weights along both), `data` samples.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.cases import Batch
from benchmarks.scale_by_hand import (
    LENGTH,
    MAX_NORM,
    PARTS,
    WINDOW,
    Batches,
    HalfByHand,
    Hand,
    divided_by_hand,
    inside_and_shared,
    loss,
    make_network,
    part_loss,
    sum_over,
)

PLAN = {"linear1": "column", "linear2": "row"}
"""What is divided of a block."""


@functools.cache
def grid(sizes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    """Return the ranks of a mesh; made once, since it makes process groups."""
    return init_device_mesh("cpu", tuple(size for _, size in sizes), mesh_dim_names=tuple(axis for axis, _ in sizes))


@functools.cache
def part(sizes: tuple[tuple[str, int], ...], axes: tuple[str, ...]) -> Any:
    """Return some axes of a mesh as one; None for none."""
    mesh = grid(sizes)
    return mesh[axes]._flatten() if len(axes) > 1 else mesh[axes[0]] if axes else None


def mesh_by_hand(batches: Batches, mesh: Mapping[str, int]) -> Hand:
    """Train on a mesh."""
    sizes = tuple(mesh.items())
    whole = grid(sizes)
    samples = part(sizes, tuple(axis for axis in mesh if axis in ("data", "shard")))
    if "pipe" in mesh:
        return _staged(batches, sizes, whole, samples)
    return _layered(batches, sizes, whole, samples)


def _layered(batches: Batches, sizes: Any, whole: DeviceMesh, samples: Any) -> Hand:
    network = make_network()
    _cut(network, whole)
    model: Any = _sharded(network.blocks.layers, network, sizes)
    mine = None
    around: Any = None
    if "context" in dict(sizes):
        ring = whole["context"]
        pieces = torch.arange(LENGTH).chunk(2 * ring.size())
        mine = torch.cat([pieces[ring.get_local_rank()], pieces[-1 - ring.get_local_rank()]])
        around = functools.partial(divided_by_hand, mine, ring.get_group())
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for index, batch in enumerate(batches, 1):
        last = index % WINDOW == 0
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        x, y = _own(batch, samples)
        if mine is None:
            (loss(model, (x, y)) / WINDOW).backward()
        else:
            with around():
                (loss(model, (x[:, mine], y[:, mine])) / WINDOW).backward()
        if last:
            _clip(list(network.parameters()), [])
            optimizer.step()
            optimizer.zero_grad()
            yield list(network.parameters())


def _staged(batches: Batches, sizes: Any, whole: DeviceMesh, samples: Any) -> Hand:
    pipe = whole["pipe"]
    stage, shards = pipe.get_local_rank(), dict(sizes).get("shard", 1) > 1
    half = HalfByHand(stage)
    network = half.network
    _cut(network, whole)
    if shards:
        _sharded(network.blocks.layers, half, sizes, reshard_after_forward=False)
    inside, shared = inside_and_shared(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    made = PipelineStage(half, stage, pipe.size(), torch.device("cpu"), group=pipe.get_group())
    schedule = Schedule1F1B(made, PARTS, loss_fn=part_loss, scale_grads=False)
    for index, batch in enumerate(batches, 1):
        last = index % WINDOW == 0
        x, y = _own(batch, samples)
        given: dict[str, Any] = {"target": y} if stage else {}
        schedule.step(*() if stage else (x,), **given, return_outputs=False, finalize_gradients=last)
        if last:
            sum_over(shared, pipe.get_group())
            if not shards and samples is not None:
                sum_over([*inside, *shared], samples.get_group(), samples.size())
            _clip(inside, shared, pipe.get_group())
            optimizer.step()
            optimizer.zero_grad()
            yield list(network.parameters())


def _cut(network: Any, whole: DeviceMesh) -> None:
    """Divide the MLPs of the blocks among the ranks of `tensor`."""
    if "tensor" in (whole.mesh_dim_names or ()):
        styles = {"column": ColwiseParallel, "row": RowwiseParallel}
        for layer in network.blocks.layers:
            parallelize_module(layer, whole["tensor"], {name: styles[kind]() for name, kind in PLAN.items()})


def _sharded(layers: Iterable[nn.Module], root: nn.Module, sizes: Any, **options: Any) -> Any:
    """Divide weights along `shard` and `context`, and copy them along `data`."""
    axes = [axis for axis, _ in sizes]
    rows = part(sizes, tuple(axis for axis in axes if axis in ("shard", "context")))
    mesh = grid(sizes)[("data", *rows.mesh_dim_names)] if "data" in axes else rows
    for layer in layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(root, mesh=mesh, **options)


def _own(batch: Batch, samples: Any) -> Batch:
    if samples is None:
        return batch
    x, y = (tensor.chunk(samples.size())[samples.get_local_rank()] for tensor in batch)
    return x, y


def _clip(own: list[nn.Parameter], shared: list[nn.Parameter], pipe: Any = None) -> None:
    """Clip by the norm of all gradients: those of own blocks are summed over the ranks of a pipeline."""
    square = _square(own)
    if pipe is not None:
        dist.all_reduce(square, group=pipe)
        square = square + _square(shared)
    for same in _by_mesh([*own, *shared]):
        clip_grads_with_norm_(same, MAX_NORM, square.sqrt().float())


def _square(parameters: list[nn.Parameter]) -> Tensor:
    norms = [get_total_norm([parameter.grad for parameter in same]) for same in _by_mesh(parameters)]  # pyright: ignore
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.stack([norm.double() for norm in whole]).square().sum()


def _by_mesh(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters with gradients that are divided alike: torch takes one norm of no others."""
    found: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            found.setdefault(mesh, []).append(parameter)
    yield from found.values()
