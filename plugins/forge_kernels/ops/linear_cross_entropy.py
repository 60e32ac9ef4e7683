"""linear_cross_entropy: the head of a language model and its loss, without storing all logits."""

from __future__ import annotations

import inspect
import operator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from forge.errors import KernelError
from forge_kernels.contract import (
    Case,
    Cost,
    Kernel,
    Subgraph,
    dtype_name,
    falls_back,
    triton_module,
    unusable,
)
from forge_kernels.graph_reading import (
    LinearCall,
    erase,
    example,
    has_example,
    is_call,
    is_function,
    linear_call,
    only_used_by,
    runs_in,
)
from forge_kernels.ops.cross_entropy import MOST_CLASSES, check_loss
from forge_kernels.ops.cross_entropy import reference as loss_of_logits

ops = triton_module("linear_cross_entropy")

LOGITS = 2**29
"""Default bytes of logits per chunk: half a GiB keeps the matrix products at full speed."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk: int | None = None,
) -> Tensor:
    """Return cross_entropy(hidden @ weight.T + bias, target) in float32, with the logits of `chunk` tokens at a time.

    `hidden` is (..., width), `weight` (classes, width), `target` (...). Gradients are computed with the loss, chunk by
    chunk, so that peak memory depends on `chunk` × classes and not on the number of tokens. By default a chunk has half
    a GiB of logits; smaller ones save memory, and below 1024 tokens cost speed.

    Activations may be bfloat16 with a float32 weight, as under autocast: the weight is cast once, and its gradient
    accumulates in float32. The gradient of a bfloat16 weight accumulates in bfloat16, rounded once per chunk: over n
    chunks it is off by up to about √n roundings. Under autocast the activations are cast first, as by `F.linear`.
    float16, whose gradient must be scaled first, and `reduction="none"` run as plain torch. A second derivative is an
    error.
    """
    _check(hidden, weight, target, bias, label_smoothing, z_loss, reduction, chunk)
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    if falls_back("linear_cross_entropy", supports(hidden, weight, target, bias, reduction=reduction)):
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
        return reference(hidden, weight, target, bias, reduction=reduction, **options)
    learns = torch.is_grad_enabled()
    wanted = [learns and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)]
    return ops.linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        target.reshape(-1),
        ignore_index,
        label_smoothing,
        z_loss,
        reduction == "mean",
        _chunk(weight.shape[0] * hidden.itemsize) if chunk is None else chunk,
        wanted,
    )[0]


def _chunk(bytes_per_token: int) -> int:
    """Return the largest power of two of tokens whose logits fit: whole tiles, and the same for every batch."""
    return max(256, 1 << (LOGITS // bytes_per_token).bit_length() - 1)


def reference(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, chunk: int | None = None, **options: Any
) -> Tensor:
    logits = F.linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))
    return loss_of_logits(logits, target, **options)


def supports(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, reduction: str = "mean", **options: Any
) -> str | None:
    if reduction == "none":
        return "reduction='none' needs the gradient of every loss before the weight's"
    if weight.shape[0] > MOST_CLASSES:
        return f"it supports at most {MOST_CLASSES:,} classes"
    if weight.dtype not in (hidden.dtype, torch.float32):
        return "it needs hidden and weight of one dtype, or a float32 weight"
    return unusable(hidden, weight, bias, dtypes=(torch.bfloat16, torch.float32))


def cost(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: object) -> Cost:
    products = 1 + hidden.requires_grad + weight.requires_grad
    tensors = hidden.numel() * hidden.itemsize + weight.numel() * weight.itemsize
    return Cost(flops=2 * products * hidden.numel() * weight.shape[0], bytes=2 * tensors)


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    chunk: int | None,
) -> None:
    name = "forge.kernels.linear_cross_entropy"
    if (
        hidden.dim() < 2
        or weight.dim() != 2
        or hidden.shape[-1] != weight.shape[1]
        or weight.shape[0] == 0
        or not (hidden.is_floating_point() and weight.is_floating_point())
    ):
        raise KernelError(
            f"{name} needs floating-point hidden (..., width) and weight (classes, width); it got "
            f"{tuple(hidden.shape)} {hidden.dtype} and {tuple(weight.shape)} {weight.dtype}."
        )
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
        raise KernelError(
            f"{name} needs a floating-point bias of {tuple(weight.shape[:1])}; it got {tuple(bias.shape)} {bias.dtype}."
        )
    if weight.device != hidden.device or (bias is not None and bias.device != hidden.device):
        raise KernelError(f"{name} needs all its tensors on one device.")
    if chunk is not None and chunk < 1:
        raise KernelError(f"{name} needs a chunk of at least 1 token; it got {chunk}.")
    check_loss(name, "hidden", hidden, target, label_smoothing, z_loss, reduction)


def _make(
    tokens: int, width: int, classes: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(classes, width, device=device) * width**-0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(classes, (tokens,), device=device)


# -- in a compiled step -----------------------------------------------------------------------------------------------


def _fused(*args: Any, dtype: torch.dtype, **options: Any) -> Tensor:
    return linear_cross_entropy(*args, **options).to(dtype)


def rewrite(graph: fx.Graph, loss: fx.Node) -> str | None:
    """Replace a linear layer and the cross-entropy of its result. Between them the logits may be cast, sliced along
    other dimensions than the classes, and reshaped to rows."""
    try:
        given = inspect.signature(F.cross_entropy).bind(*loss.args, **loss.kwargs)
    except TypeError:
        return ""
    given.apply_defaults()
    options = given.arguments
    logits, target = options["input"], options["target"]
    if not has_example(loss, logits, target):
        return ""
    if options["weight"] is not None or options["size_average"] is not None or options["reduce"] is not None:
        return "the loss has weights, or old options"
    if options["reduction"] not in ("mean", "sum"):
        return "the loss is not reduced"
    if example(target).dtype != torch.int64:
        return "the targets are not class numbers"
    found = _path_to_linear(logits, loss)
    if isinstance(found, str):
        return found
    layer, path = found
    dtype, why_not = runs_in(layer.x)
    of_weight = example(layer.weight).dtype
    if why_not or dtype not in (torch.bfloat16, torch.float32) or of_weight not in (dtype, torch.float32):
        return why_not or f"it does not support {dtype_name(dtype)} with a weight of {dtype_name(of_weight)}"
    if example(layer.nodes[0]).shape[-1] > MOST_CLASSES:
        return f"it supports at most {MOST_CLASSES:,} classes"
    with graph.inserting_before(loss):
        hidden = layer.x
        for node in reversed(path):
            index: Any = node.args[1] if len(node.args) > 1 else None
            if is_function(node, operator.getitem):  # the same positions of the layer's input
                value = example(hidden)[index]
                hidden = graph.call_function(operator.getitem, (hidden, index))
                hidden.meta["example_value"] = value
        rows = graph.call_method("reshape", (hidden, -1, example(layer.x).shape[-1]))
        labels = graph.call_method("reshape", (target, -1))
        kept = {name: options[name] for name in ("ignore_index", "label_smoothing", "reduction")}
        args = (rows, layer.weight_of(graph), labels, layer.bias)
        new = graph.call_function(_fused, args, {**kept, "dtype": example(loss).dtype})
    new.meta.update(loss.meta)
    loss.replace_all_uses_with(new)
    erase(graph, [loss, *path, *layer.nodes])
    return None


def _path_to_linear(logits: fx.Node, loss: fx.Node) -> tuple[LinearCall, list[fx.Node]] | str:
    """Return the linear layer that makes the logits, and the calls between it and the loss, the last one first."""
    node: Any = logits
    user, path = loss, []
    if example(node).dim() == 3:  # (batch, classes, positions), from (batch, positions, classes)
        if not (is_call(node, "transpose") and set(node.args[1:]) in ({1, 2}, {-1, -2}, {1, -1}, {-2, 2})):
            return "the logits are neither rows nor transposed rows"
    elif example(node).dim() != 2:
        return "the logits are neither rows nor transposed rows"
    while True:
        if not only_used_by(node, user):
            return "the logits are used elsewhere too"
        layer = linear_call(node)
        if layer is not None:
            return layer, path
        if not _keeps_classes(node, first=not path):
            return ""
        path.append(node)
        node, user = node.args[0], node


def _keeps_classes(node: Any, first: bool) -> bool:
    """Whether a call leaves the order of rows and the last dimension, the classes, alone."""
    if not node.args or not has_example(node, node.args[0]):
        return False
    before, after = example(node.args[0]), example(node)
    if is_call(node, "transpose"):
        return first and before.dim() == 3
    if before.shape[-1] != after.shape[-1]:
        return False
    if is_call(node, "float", "contiguous", "to", "view", "reshape", "flatten") or is_function(node, torch.flatten):
        return before.numel() == after.numel()
    return is_function(node, operator.getitem) and _slices_rows(node.args[1], before.dim())


def _slices_rows(index: Any, dimensions: int) -> bool:
    """Whether an index takes slices, and all of the last dimension."""
    items = index if isinstance(index, tuple) else (index,)
    if not all(item is Ellipsis or isinstance(item, slice) for item in items):
        return False
    if any(isinstance(bound, fx.Node) for item in items if item is not Ellipsis for bound in (item.start, item.stop)):
        return False
    reaches_last = Ellipsis in items or len(items) == dimensions
    return not reaches_last or items[-1] is Ellipsis or items[-1] == slice(None)


LINEAR_CROSS_ENTROPY = Kernel(
    name="linear_cross_entropy",
    summary="cross_entropy(hidden @ weight.T + bias) over chunks of tokens",
    function=linear_cross_entropy,
    reference=reference,
    supports=supports,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1.2e-2},
    cost=cost,
    cases=(
        Case("T8192 D4096 V128256", partial(_make, 8192, 4096, 128256)),
        Case("T65536 D768 V50304", partial(_make, 65536, 768, 50304)),
    ),
    replaces=(Subgraph("torch.nn.functional.cross_entropy", rewrite),),
)
