"""Checks for NaN and infinity, shared by `guard` and `anomaly`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from forge.checkpoint import Checkpoints
from forge.contract.run import Run
from forge.contract.step import Step
from forge.optim.sharded import local
from forge.snapshot.finite import may_be_infinite, not_finite, values_of
from forge.snapshot.sandbox import Owned
from forge.torch_internals import mark_non_finite

PLAIN = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
"""Dtypes that torch's kernel looks at as they are."""


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
    return not not_finite(("", tensor) for tensor in tensors)


class FiniteCheck:
    """`all_finite` on a CUDA device, with memory that is kept: one kernel per dtype and one read."""

    def __init__(self, device: torch.device):
        self._device = device
        self._flag, self._one = torch.zeros((), device=device), torch.ones((), device=device)

    def __call__(self, tensors: list[Tensor]) -> bool:
        if any(tensor.device != self._device for tensor in tensors):
            return all_finite(tensors)
        mark_bad(tensors, self._flag, self._one)
        bad = bool(self._flag.item())
        if bad:
            self._flag.zero_()
        return not bad


def mark_bad(tensors: list[Tensor], flag: Tensor, one: Tensor) -> None:
    """Set `flag` to 1 on the device if any entry is NaN or infinite: one kernel per dtype, without a read.

    It uses torch's kernel for unscaling gradients, with a scale of 1, which leaves the tensors unchanged.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        values = (
            tensor if type(tensor) is Tensor and tensor.dtype in PLAIN and not tensor.is_sparse else values_of(tensor)
        )
        by_dtype.setdefault(values.dtype, []).append(values)
    for alike in by_dtype.values():
        mark_non_finite(alike, flag, one)


def gradients(step: Step) -> list[Tensor]:
    """Return the gradients of the current optimizer's parameters."""
    groups = step.optimizer.param_groups
    return [gradient for group in groups for p in group["params"] if (gradient := p.grad) is not None]


def trained_weights(step: Step, left_out: Collection[int] = ()) -> list[Tensor]:
    """Return the current optimizer's parameters that have a gradient, less those `left_out` by id."""
    groups = step.optimizer.param_groups
    return [p.data for group in groups for p in group["params"] if p.grad is not None and id(p) not in left_out]


def bad_weights(task: torch.nn.Module) -> list[str]:
    """Return the names of the parameters with a NaN, or an infinity that was not there when the fit began."""
    named = {name: p for name, p in task.named_parameters() if p.requires_grad and not is_lazy(p)}
    if all_finite([parameter.data for parameter in named.values()]):
        return []
    found = not_finite(named.items())
    return [name for name in found if not may_be_infinite(task, name) or bool(values_of(named[name]).isnan().any())]


def gradients_are_scaled(trainer: Run) -> bool:
    """Whether a plugin owns the backward pass, as a loss scaler does: it then handles gradients that overflow."""
    return any(call.role == "own" for call in trainer.stack.calls()["forge_backward"])


def bad_gradients(step: Step) -> list[str]:
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


def last_checkpoint(trainer: Run) -> Path | None:
    """Return the newest checkpoint of the run, if any."""
    if trainer.run_dir is None:
        return None
    there = Checkpoints(trainer.run_dir / "checkpoints").all()
    return there[-1] if there else None
