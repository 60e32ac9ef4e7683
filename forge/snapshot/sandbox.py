"""Run part of a step in advance, or again, without side effects on the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from forge.checkpoint import sharding
from forge.contract.run import Run
from forge.metrics.torchmetrics import restored_after as kept_metrics
from forge.rng import RNGState
from forge.torch_internals import dynamo_is_loaded, foreach_copy_
from forge.util.frozen import every_module
from forge.util.generators import find_generators, generator_state, set_generator_state

Owned = tuple[dict[str, Tensor | None], str]
"""A buffer as (owning dictionary, name): a forward may replace the tensor."""


@contextmanager
def without_side_effects(trainer: Run, more: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Restore the RNG, the generators of the task and of `more` objects, its buffers and its metrics afterwards."""
    device = trainer.env.device
    rng = RNGState.capture(device)
    roots = {"task": trainer.task, **(more or {})}
    own = [(found, generator_state(found)) for found in find_generators(roots).values()]
    try:
        with kept_buffers(trainer.task), kept_metrics(trainer.task):
            yield
    finally:
        rng.restore(device)
        for generator, state in own:
            set_generator_state(generator, state)


def kept_buffers(module: nn.Module) -> AbstractContextManager[None]:
    """Restore every buffer afterwards, including one that a forward replaced by another tensor."""
    return kept((), [(m._buffers, n) for m in every_module(module) for n, b in m._buffers.items() if b is not None])


@contextmanager
def kept(tensors: Sequence[Tensor], buffers: Sequence[Owned] = ()) -> Iterator[None]:
    """Restore the bits of these tensors afterwards; one kernel per dtype."""
    own: list[Any] = [owner[name] for owner, name in buffers]
    groups = _alike([*map(_part, tensors), *own])
    copies = [_copied(group) for group in groups]
    try:
        yield
    finally:
        for (owner, name), buffer in zip(buffers, own, strict=True):
            owner[name] = buffer
        for group, copy in zip(groups, copies, strict=True):
            # a buffer that a forward replaced during an evaluation is an inference tensor
            with torch.inference_mode() if any(tensor.is_inference() for tensor in group) else torch.no_grad():
                foreach_copy_(group, copy)


def uncompiled() -> AbstractContextManager[Any]:
    """Disable torch.compile, if it is in use: a single call is not worth compiling or recompiling."""
    return torch.compiler.set_stance("force_eager") if dynamo_is_loaded() else nullcontext()


def _part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, sharing its memory."""
    with torch.no_grad():
        return sharding.on_one_rank(tensor)


def _alike(tensors: list[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.dtype, torch.layout], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.layout), []).append(tensor)
    return list(groups.values())


@torch.no_grad()
def _copied(group: list[Tensor]) -> list[Tensor]:
    if group[0].layout is not torch.strided:
        return [tensor.clone() for tensor in group]
    copies = [torch.empty_like(tensor) for tensor in group]
    foreach_copy_(copies, group)
    return copies
