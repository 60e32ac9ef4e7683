"""cross_entropy: the loss of logits, and its gradient in the same pass."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from forge.errors import KernelError
from forge_kernels.contract import Kernel, falls_back, plain, triton_module, unusable

ops = triton_module("cross_entropy")

REDUCTIONS = ("mean", "sum", "none")
MOST_CLASSES = 2**18


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Return the cross-entropy of logits (..., classes) and integer targets (...), in float32.

    `mean` divides by the number of targets that are not `ignore_index`, counted on the device; with none it is NaN, as
    in torch. A target that is neither a class nor `ignore_index` makes its loss and the gradient of its row NaN (torch
    stops the device instead).

    The gradient is computed with the loss, reading the logits once; `linear_cross_entropy` stores no logits at all. A
    second derivative is an error. Rows that start at multiples of 16 bytes are fastest: pad the classes to a multiple
    of 8. Where no gradient is needed, within torch.compile, which fuses the loss itself, with `reduction="none"`, and
    for float16, whose gradient must be scaled first, plain torch runs.
    """
    _check(logits, target, label_smoothing, reduction)
    learns = torch.is_grad_enabled() and logits.requires_grad
    if not learns or torch.compiler.is_compiling() or falls_back("cross_entropy", supports(logits, target, reduction)):
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        return reference(logits, target, reduction=reduction, **options)
    rows, labels = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    return ops.CrossEntropy.apply(rows, labels, ignore_index, label_smoothing, reduction == "mean")


def reference(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    rows = logits.reshape(-1, logits.shape[-1])
    rows = rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
    labels = target.reshape(-1).long()
    losses = F.cross_entropy(rows, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")
    counted = labels != ignore_index
    if reduction == "none":
        return losses.reshape(target.shape)
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


def supports(logits: Tensor, target: Tensor, reduction: str = "mean", **options: object) -> str | None:
    if reduction == "none":
        return "reduction='none' needs the gradient of every loss first"
    if logits.shape[-1] > MOST_CLASSES:
        return f"it supports at most {MOST_CLASSES:,} classes"
    return unusable(logits, dtypes=(torch.bfloat16, torch.float32))


def _check(logits: Tensor, target: Tensor, label_smoothing: float, reduction: str) -> None:
    name = "forge.kernels.cross_entropy"
    if logits.dim() < 2 or logits.shape[-1] == 0 or not logits.is_floating_point():
        raise KernelError(
            f"{name} needs floating-point logits (..., classes); it got {tuple(logits.shape)} {logits.dtype}."
        )
    check_loss(name, "logits", logits, target, label_smoothing, reduction)


def check_loss(name: str, what: str, rows: Tensor, target: Tensor, label_smoothing: float, reduction: str) -> None:
    """Raise KernelError unless targets match the rows of `what` and the options are valid."""
    if target.dtype not in (torch.int64, torch.int32):
        raise KernelError(f"{name} needs targets of int64 or int32: class numbers; it got {target.dtype}.")
    if target.shape != rows.shape[:-1] or target.device != rows.device:
        raise KernelError(
            f"{name} needs one target for every row of {what}, on the same device: {tuple(rows.shape[:-1])} on "
            f"{rows.device}; it got {tuple(target.shape)} on {target.device}."
        )
    if reduction not in REDUCTIONS:
        raise KernelError(f"{name} has the reductions {', '.join(REDUCTIONS)}; it got {reduction!r}.")
    if not 0 <= label_smoothing <= 1:
        raise KernelError(f"{name} needs label_smoothing between 0 and 1; it got {label_smoothing}.")


def _stand_in(
    original,
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
):
    if (
        not plain(input, target)
        or not isinstance(input, Tensor)
        or not isinstance(target, Tensor)
        or input.dim() != 2
        or input.shape[1] == 0
        or target.dtype != torch.int64
        or target.shape != input.shape[:1]
        or target.device != input.device
        or weight is not None
        or size_average is not None
        or reduce is not None
        or reduction not in REDUCTIONS
        or not 0 <= label_smoothing <= 1
        or not (torch.is_grad_enabled() and input.requires_grad)
        or supports(input, target, reduction) is not None
    ):
        return original(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    loss = cross_entropy(input, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction)
    # under autocast the original returns float32 for any logits
    return loss if torch.is_autocast_enabled(input.device.type) else loss.to(input.dtype)


CROSS_ENTROPY = Kernel(
    name="cross_entropy",
    function=cross_entropy,
    reference=reference,
    supports=supports,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 8e-3},
    replaces={"torch.nn.functional.cross_entropy": _stand_in},
)
