"""Torch's own functions with the arguments of forge's kernels, to compare speed. Errors are measured against a
kernel's reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forge_kernels.contract import Kernel


def eager(kernel: Kernel) -> Callable[..., Any]:
    """Return torch's own function for a kernel, else the kernel's reference."""
    return TORCHS_OWN.get(kernel.name, kernel.reference)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _softmax(x: Tensor) -> Tensor:
    return F.softmax(x, dim=-1)


@torch.no_grad()
def _clip_adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    step: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    max_norm: float,
) -> Tensor:
    """clip_grad_norm_, which changes gradients in place, and the fused AdamW."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    step += 1
    torch._fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step] * len(params),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    return norm


TORCHS_OWN: dict[str, Callable[..., Any]] = {
    "clip_adamw": _clip_adamw,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "softmax": _softmax,
}
"""By kernel name, where the reference is not torch's own function: it may compute in a wider dtype or unfused."""
