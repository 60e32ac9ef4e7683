"""Checks for NaN and infinity, shared by `guard` and `anomaly`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

import forge
from forge.checkpoint import Checkpoints
from forge.snapshot.sandbox import Owned
from forge_plugins._sharded import local


def all_finite(tensors: list[Tensor]) -> bool:
    """Whether no entry of this rank's parts is NaN or infinite. Reads the device once for all tensors."""
    if not tensors:
        return True
    tensors = [local(tensor) for tensor in tensors]
    device = tensors[0].device
    if device.type == "cuda" and all(tensor.device == device for tensor in tensors):
        flag = torch.zeros((), device=device)
        mark_bad(tensors, flag, torch.ones((), device=device))
        return not flag.item()
    if device.type != "cpu":
        return bool(torch.stack([_finite(tensor).to(device) for tensor in tensors]).all())
    try:
        if math.isfinite(sum([tensor.sum().item() for tensor in tensors])):
            return True
    except (RuntimeError, TypeError):  # sparse and complex gradients
        pass
    # the sum is the cheapest check, but large finite numbers can overflow in it, so only an exact check may report
    # a problem
    return all(bool(_finite(tensor)) for tensor in tensors)


def mark_bad(tensors: list[Tensor], flag: Tensor, one: Tensor) -> None:
    """Set `flag` to 1 on the device if any entry is NaN or infinite: one kernel per dtype, without a read.

    It uses torch's kernel for unscaling gradients, with a scale of 1, which leaves the tensors unchanged.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        values = values_of(tensor)
        by_dtype.setdefault(values.dtype, []).append(values)
    for alike in by_dtype.values():
        torch._amp_foreach_non_finite_check_and_unscale_(alike, flag, one)


def not_finite(named: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    """Return the names of the tensors with a NaN or an infinity."""
    return [name for name, tensor in named if tensor is not None and not bool(_finite(tensor))]


def values_of(tensor: Tensor) -> Tensor:
    """Return the real values to check: this rank's part, a sparse tensor's entries, both parts of complex numbers."""
    tensor = local(tensor)
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _finite(tensor: Tensor) -> Tensor:
    return torch.isfinite(values_of(tensor.detach())).all()


def gradients(step: forge.Step) -> list[Tensor]:
    """Return the gradients of the current optimizer's parameters."""
    groups = step.optimizer.param_groups
    return [gradient for group in groups for p in group["params"] if (gradient := p.grad) is not None]


def gradients_are_scaled(trainer: forge.Run) -> bool:
    """Whether a plugin owns the backward pass, as a loss scaler does: it then handles gradients that overflow."""
    return any(call.role == "own" for call in trainer.stack.calls()["forge_backward"])


def bad_gradients(step: forge.Step) -> list[str]:
    """Return the names of the current optimizer's parameters whose gradients are not finite."""
    own = {id(parameter) for parameter in step.parameters()}
    return not_finite((name, p.grad) for name, p in step.trainer.task.named_parameters() if id(p) in own)


def moving_buffers(task: torch.nn.Module) -> list[Owned]:
    """Return the owners of buffers that a forward may change: floats, and counters such as BatchNorm's."""
    return [
        (module._buffers, name)
        for module in task.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and (buffer.is_floating_point() or buffer.ndim == 0)
    ]


def last_checkpoint(trainer: forge.Run) -> Path | None:
    """Return the newest checkpoint of the run, if any."""
    if trainer.run_dir is None:
        return None
    there = Checkpoints(trainer.run_dir / "checkpoints").all()
    return there[-1] if there else None
