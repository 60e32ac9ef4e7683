"""mlp: two linear layers with an activation between them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from forge.errors import KernelError
from forge_kernels.contract import (
    HALF_TO_FULL,
    Case,
    Cost,
    Kernel,
    Subgraph,
    as_autocast,
    dtype_name,
    falls_back,
    triton_module,
    unusable,
)
from forge_kernels.graph_reading import (
    activation_call,
    before_idle_dropout,
    erase,
    is_function,
    linear_call,
    only_used_by,
    runs_in,
)
from forge_kernels.ops.matmul import ACTIVATIONS, autocast_is_on, check_activation, check_dtypes, wants_grad

ops = triton_module("mlp")
products = triton_module("matmul")


def mlp(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str | None = "gelu"
) -> Tensor:
    """Return activation(x @ w1ᵀ + b1) @ w2ᵀ + b2, with weights in nn.Linear's layout.

    x is of (..., D), w1 of (H, D), w2 of (D', H); biases may be None. The activation is gelu (the tanh form), gelu_erf,
    relu, silu or None. Under autocast all arguments are cast as nn.Linear would, and gradients come in the dtype of the
    parameters; without it, float32 runs as plain torch.
    """
    check_activation("mlp", activation)
    _check(x, w1, b1, w2, b2)
    if autocast_is_on(x):
        x, w1, w2 = as_autocast(x), as_autocast(w1), as_autocast(w2)
        b1, b2 = as_autocast(b1), as_autocast(b2)
    check_dtypes("mlp", x=x, w1=w1, b1=b1, w2=w2, b2=b2)
    if falls_back("mlp", supports(x, w1, b1, w2, b2, activation)):
        return mlp_reference(x, w1, b1, w2, b2, activation)
    kind = activation or "none"
    if not wants_grad(x, w1, b1, w2, b2):
        hidden, _ = products.matmul(x, w1.t(), b1, kind, False)
        return F.linear(hidden, w2, b2)
    pre, hidden = ops.first(x, w1, b1, kind)
    out = ops.Second.apply(pre, hidden, b1, w2, b2, kind)
    return out.view(*x.shape[:-1], w2.shape[0])


def mlp_reference(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str | None = "gelu"
) -> Tensor:
    return F.linear(ACTIVATIONS[activation](F.linear(x, w1, b1)), w2, b2)


def supports(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str | None = "gelu"
) -> str | None:
    # float32 does not use the matrix units, so little is gained over torch's own products
    dtypes = HALF_TO_FULL if autocast_is_on(x) else (torch.bfloat16, torch.float16)
    return unusable(x, w1, b1, w2, b2, dtypes=dtypes)


def cost(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str | None = "gelu"
) -> Cost:
    rows = x.numel() // max(1, x.shape[-1])
    ends, hidden = rows * (x.shape[-1] + w2.shape[0]), rows * w1.shape[0]
    weights = w1.numel() + w2.numel()
    # inputs and outputs once, forward and backward; of the hidden tensor only the input of the activation
    size = (2 * ends + x.numel() + 2 * hidden + 3 * weights) * x.itemsize
    return Cost(flops=6 * rows * weights, bytes=size)


def rewrite(graph: fx.Graph, second: fx.Node) -> str | None:
    """Replace two linear layers with an activation between them, whose results nothing else reads."""
    if is_function(second, torch.addmm) and len(second.users) == 1:  # a Conv1D of transformers ends in a view
        second = next(iter(second.users))
    after = linear_call(second)
    if after is None:
        return ""
    activated, idle = before_idle_dropout(after.x)
    found = activation_call(activated)
    first = None if found is None else linear_call(found[1])
    if found is None or first is None:
        return ""
    name, before, between = found
    readers = [after.nodes[-1], *idle]
    if not all(only_used_by(node, reader) for node, reader in zip([*idle, activated], readers, strict=True)) or not set(
        before.users
    ) <= set(between):
        return "the values between the layers are used elsewhere too"
    dtype, why_not = runs_in(first.x)
    if why_not or dtype not in (torch.bfloat16, torch.float16):
        return why_not or f"it does not support {dtype_name(dtype)}"
    with graph.inserting_before(second):
        w1, w2 = first.weight_of(graph), after.weight_of(graph)
        new = graph.call_function(mlp, (first.x, w1, first.bias, w2, after.bias, name))
    new.meta.update(second.meta)
    second.replace_all_uses_with(new)
    erase(graph, [*after.nodes, *idle, *between, *first.nodes])
    return None


def _check(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> None:
    fits = (
        x.dim() >= 1 and w1.dim() == 2 and w2.dim() == 2 and x.shape[-1] == w1.shape[1] and w1.shape[0] == w2.shape[1]
    )
    for bias, weight in ((b1, w1), (b2, w2)):
        fits = fits and (bias is None or bias.shape == weight.shape[:1])
    if not fits:
        shapes = ", ".join("None" if t is None else str(tuple(t.shape)) for t in (x, w1, b1, w2, b2))
        raise KernelError(
            "forge.kernels.mlp needs x of (..., D), w1 of (H, D), b1 of (H,) or None, w2 of (D', H) and b2 of (D',) or "
            f"None; it got {shapes}."
        )


def _make(rows: int, width: int, hidden: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    def new(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device) * scale).to(dtype).requires_grad_()

    w1, w2 = new(hidden, width, scale=width**-0.5), new(width, hidden, scale=hidden**-0.5)
    return new(rows, width), w1, new(hidden), w2, new(width)


MLP = Kernel(
    name="mlp",
    summary="activation(x @ w1ᵀ + b1) @ w2ᵀ + b2",
    function=mlp,
    reference=mlp_reference,
    supports=supports,
    tolerance={torch.bfloat16: 1e-2, torch.float16: 2e-3},
    cost=cost,
    cases=(
        Case("768→3072→768, T=16384", partial(_make, 16384, 768, 3072)),
        Case("4096→16384→4096, T=8192", partial(_make, 8192, 4096, 16384)),
        Case("768→3072→768, T=65536", partial(_make, 65536, 768, 3072)),
    ),
    replaces=(
        Subgraph("torch.nn.functional.linear", rewrite),
        Subgraph("torch.addmm", rewrite),
    ),
)
