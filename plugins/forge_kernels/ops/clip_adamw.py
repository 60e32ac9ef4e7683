"""clip_adamw: gradient clipping and AdamW over a list of tensors, in one pass for the norm and one for the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.library import custom_op

from forge.errors import KernelError
from forge_kernels.contract import PLAIN, Case, Cost, Kernel, dtype_name, falls_back, plain, triton_module, unusable
from forge_kernels.ops.clip_adamw_tables import Lists, matching_order, new_plan, order_in_memory, plan_for

ops = triton_module("clip_adamw")

Tensors = Sequence[Tensor]


def clip_adamw(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    step: Tensor | Tensors,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    max_norm: float | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """Clip gradients by their global norm as `torch.nn.utils.clip_grad_norm_` does, update parameters and moments in
    place as `torch.optim.AdamW(fused=True)` does, and return the norm before clipping.

    `step` counts the updates so far, in float32: one tensor for all parameters or one for each; it is incremented here.
    Gradients are not changed. If `found_inf` is 1 nothing is changed, as in torch's fused optimizers. `lr`, `step` and
    `found_inf` stay on the device, so that a CUDA graph can capture the call. max_norm=None clips nothing.
    """
    _check_numbers(lr, betas, eps, weight_decay, max_norm)
    steps = [step] if isinstance(step, Tensor) else list(step)
    there = lr if isinstance(lr, Tensor) else None
    options = (there, math.nan if isinstance(lr, Tensor) else lr, *betas, eps, weight_decay, max_norm, found_inf)
    if torch.compiler.is_compiling():
        _check(params, grads, exp_avgs, exp_avg_sqs, steps)
        with torch.no_grad():
            return clip_adamw_op(list(params), list(grads), list(exp_avgs), list(exp_avg_sqs), steps, *options)
    return _clip_adamw(params, grads, exp_avgs, exp_avg_sqs, steps, *options)


def _clip_adamw(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    lr_there: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    max_norm: float | None,
    found_inf: Tensor | None,
) -> Tensor:
    rate = lr if lr_there is None else lr_there
    counters = list(steps) * len(params) if len(steps) == 1 else steps
    options = {"lr": rate, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
    options |= {"max_norm": max_norm, "found_inf": found_inf}
    lists = Lists(params, grads, exp_avgs, exp_avg_sqs, counters)
    plan = plan_for(lists) if plain() else None
    if plan is None:
        _check(params, grads, exp_avgs, exp_avg_sqs, steps)
        if falls_back("clip_adamw", supports(*lists, **options)):
            return clip_adamw_reference(params, grads, exp_avgs, exp_avg_sqs, steps, **options)
        lists = matching_order(lists)  # kept alive until the launches are queued
        plan = plan_for(lists) or new_plan(lists)
    elif falls_back("clip_adamw", unreadable(params[0].device, rate, found_inf)):
        return clip_adamw_reference(params, grads, exp_avgs, exp_avg_sqs, steps, **options)
    norm = ops.run(plan, [(rate, beta1, beta2, eps, weight_decay)], max_norm, found_inf)
    increment_version([*params, *exp_avgs, *exp_avg_sqs, *steps])  # autograd does not see what a kernel writes
    return norm


@custom_op("forge::clip_adamw", mutates_args=("params", "exp_avgs", "exp_avg_sqs", "steps"))
def clip_adamw_op(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    lr_there: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    max_norm: float | None,
    found_inf: Tensor | None,
) -> Tensor:
    lists = (params, grads, exp_avgs, exp_avg_sqs, steps)
    return _clip_adamw(*lists, lr_there, lr, beta1, beta2, eps, weight_decay, max_norm, found_inf)


@clip_adamw_op.register_fake
def _(params: list[Tensor], grads: list[Tensor], *others: Any) -> Tensor:
    return grads[0].new_empty((), dtype=_wide(grads)) if grads else _zero_norm()


def clip_adamw_reference(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    step: Tensor | Tensors,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    max_norm: float | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    steps = [step] if isinstance(step, Tensor) else list(step)
    with torch.no_grad():
        norm = total_norm(grads)
        coefficient = 1.0 if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
        skip = torch.zeros((), dtype=torch.bool, device="cpu") if found_inf is None else found_inf == 1
        for counter in {id(counter): counter for counter in steps}.values():
            counter.add_(~skip.to(counter.device))
        counters = steps * len(params) if len(steps) == 1 else steps
        for param, grad, exp_avg, exp_avg_sq, counter in zip(
            params, grads, exp_avgs, exp_avg_sqs, counters, strict=True
        ):
            wide = _wide([param])
            g = grad.to(wide) * coefficient
            m = betas[0] * exp_avg.to(wide) + (1 - betas[0]) * g
            v = betas[1] * exp_avg_sq.to(wide) + (1 - betas[1]) * g * g
            # 1 - beta ** step, without the loss of digits where beta is near 1
            correction1, correction2 = (-torch.expm1(counter * _log(beta)) for beta in betas)
            denominator = (v / correction2).sqrt() + eps
            p = param.to(wide) * (1 - lr * weight_decay) - lr / correction1 * m / denominator
            for old, new in ((param, p), (exp_avg, m), (exp_avg_sq, v)):
                old.copy_(torch.where(skip.to(old.device), old, new.to(old.dtype)))
    return norm


def total_norm(tensors: Tensors) -> Tensor:
    """Return the norm of all entries, in float32 or wider."""
    if not tensors:
        return _zero_norm()
    wide = _wide(tensors)
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t, dtype=wide) for t in tensors]))


def supports(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    step: Tensor | Tensors,
    *,
    lr: float | Tensor,
    found_inf: Tensor | None = None,
    **options: Any,
) -> str | None:
    if not params:
        return "no parameters were given"
    steps = [step] if isinstance(step, Tensor) else step
    tensors = [*params, *grads, *exp_avgs, *exp_avg_sqs]
    if not plain():
        return "it supports neither torch.func nor forward-mode differentiation"
    odd = [t for t in (*tensors, *steps) if type(t) not in PLAIN or t.layout is not torch.strided]
    if odd:
        name = "sparse tensors" if type(odd[0]) is Tensor else type(odd[0]).__name__
        return f"it does not support {name}"
    if reason := unusable(*tensors):
        return reason
    device = params[0].device
    if any(t.device != device for t in (*tensors, *steps)):
        return "the tensors are on several devices"
    if any(t.dtype != torch.float32 for t in steps):
        return "a step counter is not float32"
    if any(m.dtype != v.dtype for m, v in zip(exp_avgs, exp_avg_sqs, strict=True)):
        return "the two moments differ in dtype"
    for param, *moments in zip(params, exp_avgs, exp_avg_sqs, strict=True):
        if not _dense(param) or any(order_in_memory(m) != order_in_memory(param) for m in moments):
            return "a parameter has gaps in memory, or another memory order than its moments"
    return unreadable(device, lr, found_inf)


def cost(params: Tensors, grads: Tensors, exp_avgs: Tensors, *others: Any, **options: Any) -> Cost:
    # gradients are read twice, since the global norm comes before the first update and no cache holds them meanwhile;
    # parameters and both moments are read and written
    sizes = [
        p.numel() * (2 * g.itemsize + 2 * p.itemsize + 4 * m.itemsize)
        for p, g, m in zip(params, grads, exp_avgs, strict=True)
    ]
    return Cost(flops=18 * sum(p.numel() for p in params), bytes=sum(sizes))


def unreadable(device: torch.device, lr: float | Tensor, *flags: Tensor | None) -> str | None:
    """Return why the kernel cannot read the learning rate or the flags, or None."""
    if isinstance(lr, Tensor) and lr.device.type != "cpu" and (lr.device != device or lr.dtype != torch.float32):
        return "the learning rate is a tensor on another device, or not float32"
    if any(flag is not None and flag.device != device for flag in flags):
        return "found_inf is on another device"
    return None


def _check(params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, steps: Tensors) -> None:
    lengths = [len(params), len(grads), len(exp_avgs), len(exp_avg_sqs)]
    if len(set(lengths)) > 1 or len(steps) not in (1, len(params)):
        raise KernelError(
            "forge.kernels.clip_adamw needs as many gradients and moments as parameters, and one step counter or as "
            f"many; it got {lengths[0]} parameters, {lengths[1]} gradients, {lengths[2]} and {lengths[3]} moments, "
            f"{len(steps)} step counters."
        )
    for name, tensors in (("parameter", params), ("gradient", grads), ("moment", exp_avgs), ("moment", exp_avg_sqs)):
        _check_floating(name, tensors)
    _check_floating("step counter", steps)
    for place, four in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        if len({tuple(t.shape) for t in four}) > 1:
            shapes = ", ".join(str(tuple(t.shape)) for t in four)
            raise KernelError(
                f"forge.kernels.clip_adamw: parameter {place}, its gradient and its moments have the shapes {shapes}; "
                "they must be the same."
            )
    updated = [*params, *exp_avgs, *exp_avg_sqs]
    if len(set(updated)) < len(updated):
        raise KernelError(
            "forge.kernels.clip_adamw got the same tensor twice among parameters and moments; each is updated once."
        )


def _check_floating(name: str, tensors: Tensors) -> None:
    for place, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            found = dtype_name(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise KernelError(
                f"forge.kernels.clip_adamw: {name} {place} is {found}; it must be a floating-point tensor."
            )


def _check_numbers(
    lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float, max_norm: float | None
) -> None:
    if not all(0 <= beta < 1 for beta in betas):
        raise KernelError(f"forge.kernels.clip_adamw: betas are {betas}; each must be at least 0 and below 1.")
    rate = 0.0 if isinstance(lr, Tensor) else lr  # reading a tensor would synchronize
    for name, value in (("lr", rate), ("eps", eps), ("weight_decay", weight_decay), ("max_norm", max_norm)):
        if value is not None and not value >= 0:  # also refuses NaN
            raise KernelError(f"forge.kernels.clip_adamw: {name} is {value}; it must be 0 or more.")


def _zero_norm() -> Tensor:
    return torch.zeros((), dtype=torch.float32, device="cpu")


def _wide(tensors: Tensors) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


def _dense(tensor: Tensor) -> bool:
    """Whether a tensor has no gaps or overlaps: only then does torch give a new tensor the same strides."""
    return not tensor.numel() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _make(layers: int, width: int, vocabulary: int, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    """Make the tensors of a GPT with tied embeddings."""
    block = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    shapes = [(vocabulary, width), (1024, width), *block * layers, (width,), (width,)]
    full = {"dtype": torch.float32, "device": device}
    params = [torch.randn(shape, **full).to(dtype) for shape in shapes]
    grads = [torch.randn(shape, **full).to(dtype) for shape in shapes]
    exp_avgs = [torch.randn(shape, **full) for shape in shapes]
    exp_avg_sqs = [torch.rand(shape, **full) for shape in shapes]
    return params, grads, exp_avgs, exp_avg_sqs, torch.ones((), **full)


_OPTIONS = {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "max_norm": 1.0}

CLIP_ADAMW = Kernel(
    name="clip_adamw",
    summary="gradient clipping and AdamW over a list of tensors",
    function=clip_adamw,
    reference=clip_adamw_reference,
    supports=supports,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3},
    cost=cost,
    cases=(
        Case("124M in 148 tensors", partial(_make, 12, 768, 50257), _OPTIONS),
        Case("1.3B in 292 tensors", partial(_make, 24, 2048, 50304), _OPTIONS),
    ),
)
