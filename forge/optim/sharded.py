"""Sharded tensors (DTensors): the local part, the whole tensor, and norms over all ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from forge.checkpoint import sharding
from forge.checkpoint.sharding import is_distributed
from forge.env import Env

__all__ = [
    "clip_norm_",
    "divided_along",
    "is_distributed",
    "local",
    "settle_gradients",
    "sum_gradients",
    "total_norm",
    "whole",
]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory: the tensor itself unless it is a DTensor."""
    if not is_distributed(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor gathered from all ranks, on the device of the local part. A collective call."""
    if not is_distributed(tensor):
        return tensor
    return sharding.whole(tensor).to(local(tensor).device)


def divided_along(parameters: Iterable[Any], axes: Collection[str]) -> list[Any]:
    """Return the parameters that are divided along one of these axes of the mesh. Where gradients are averaged along
    it, as for experts, those of these parameters are sums already: who has divided them averages them."""
    return [p for p in parameters if is_distributed(p) and not {*(p.device_mesh.mesh_dim_names or ())}.isdisjoint(axes)]


def settle_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give gradients of divided layers the placement of their parameters: they may be partial sums."""
    for parameter in parameters:
        gradient = parameter.grad
        if is_distributed(parameter) and is_distributed(gradient) and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def sum_gradients(parameters: list[nn.Parameter], group: Any, scale: float = 1.0) -> None:
    """Sum gradients over the ranks of a group; a missing one counts as zero. One message per dtype."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        by_dtype.setdefault(parameter.grad.dtype, []).append(parameter)
    for alike in by_dtype.values():
        gradients = [local(parameter.grad) for parameter in alike if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        flat.mul_(scale)
        for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view(gradient.shape))


def total_norm(tensors: Iterable[Tensor], norm_type: float = 2.0, env: Env | None = None) -> Tensor:
    """`get_total_norm` over all ranks, for tensors on several meshes too, as with tensor parallelism, and for ranks
    that hold different tensors (`env.parts`)."""
    parts = None if env is None else env.parts
    if env is None or parts is None:
        return _own_norm(tensors, norm_type)
    every = list(tensors)
    same = {id(parameter.grad) for parameter in env.shared}
    norm, common = (_own_norm([t for t in every if (id(t) in same) is s], norm_type) for s in (False, True))
    wide = norm.to(env.device, torch.float64)  # a rank without gradients does not know their type
    if norm_type == math.inf:
        dist.all_reduce(wide, dist.ReduceOp.MAX, group=parts)
    else:
        wide = wide**norm_type
        dist.all_reduce(wide, group=parts)
        wide = wide ** (1 / norm_type)
    wide = torch.linalg.vector_norm(torch.stack([wide, common.to(wide)]), norm_type)
    return wide.to(every[0].dtype if every else norm.dtype)


def _own_norm(tensors: Iterable[Tensor], norm_type: float) -> Tensor:
    groups = sorted(_by_mesh(tensors).items(), key=lambda each: each[0] is None)
    norms = [_norm_on(mesh, group, norm_type) for mesh, group in groups]
    if len(norms) < 2:
        return norms[0] if norms else torch.zeros(())
    # on the device of the shards, perhaps the host: what is there can be multiplied by no other device's number
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)


def _norm_on(mesh: Any, tensors: list[Any], norm_type: float) -> Tensor:
    if mesh is None or norm_type != math.inf:
        norm = get_total_norm(tensors, norm_type)
        return norm.full_tensor() if is_distributed(norm) else norm
    parts = [part for part in map(local, tensors) if part.numel()]  # torch refuses the largest of nothing
    norm = get_total_norm(parts, norm_type) if parts else local(tensors[0]).new_zeros(())
    norm = norm.to(mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    return norm


def clip_norm_(parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float, env: Env | None = None) -> Tensor:
    """`clip_grad_norm_` for parameters on several meshes or ranks too; returns the norm over all ranks."""
    is_divided = env is not None and env.parts is not None
    if not is_divided and not any(type(p) is not nn.Parameter and is_distributed(p) for p in parameters):
        return clip_grad_norm_(parameters, max_norm, norm_type)
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    norm = total_norm([p.grad for p in trained if p.grad is not None], norm_type, env)
    for group in _by_mesh(trained).values():
        clip_grads_with_norm_(group, max_norm, norm)
    return norm


def _by_mesh(tensors: Iterable[Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if is_distributed(tensor) else None, []).append(tensor)
    return groups
