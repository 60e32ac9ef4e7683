"""Read a graph of torch functions: linear layers, activations, and what lies between them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from forge_kernels.contract import INTERPRETED

LINEAR: Any = F.linear
GELU_NEW = (0.7978845608028654, 0.044715)
"""The constants of the tanh form of GELU, as models write it out."""


@dataclass(frozen=True, slots=True)
class LinearCall:
    """A linear layer in a graph: x @ weight.T + bias."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool = False
    "Whether the weight is stored as (inputs, outputs), as transformers' Conv1D does."
    nodes: tuple[fx.Node, ...] = ()
    "The calls that make it, the last one first."

    def weight_of(self, graph: fx.Graph) -> fx.Node:
        """Return the weight in nn.Linear's layout."""
        if not self.transposed:
            return self.weight
        node = graph.call_method("t", (self.weight,))
        node.meta["example_value"] = example(self.weight).t()
        return node


def example(node: fx.Node) -> Tensor:
    """Return the fake tensor that stands for a node's value."""
    return node.meta["example_value"]


def has_example(*nodes: Any) -> bool:
    """Whether every node stands for a tensor of known shape."""
    return all(isinstance(node, fx.Node) and isinstance(node.meta.get("example_value"), Tensor) for node in nodes)


def linear_call(node: Any) -> LinearCall | None:
    """Return the linear layer whose result a node is, if it is one."""
    if not has_example(node):
        return None
    if node.op == "call_function" and node.target is LINEAR:
        x, weight, *rest = node.args
        bias = rest[0] if rest else node.kwargs.get("bias")
        if not has_example(x, weight) or not (bias is None or has_example(bias)):
            return None
        return LinearCall(x, weight, bias, nodes=(node,))
    call: Any = node
    if is_call(call, "view", "reshape") and is_function(call.args[0], torch.addmm):  # Conv1D of transformers
        product: Any = call.args[0]
        if len(product.args) != 3 or product.kwargs or not only_used_by(product, node):
            return None
        bias, rows, weight = product.args
        if not is_call(rows, "view", "reshape"):
            return None
        x = rows.args[0]
        if not has_example(bias, rows, weight, x):
            return None
        if example(x).shape[:-1] != example(node).shape[:-1] or example(rows).shape[-1] != example(x).shape[-1]:
            return None
        return LinearCall(x, weight, bias, transposed=True, nodes=(node, product, rows))
    return None


def is_call(node: Any, *methods: str) -> bool:
    """Whether a node is a call of one of these methods of a tensor."""
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target in methods


def is_function(node: Any, *functions: Callable[..., Any]) -> bool:
    """Whether a node is a call of one of these functions."""
    return isinstance(node, fx.Node) and node.op == "call_function" and any(node.target is f for f in functions)


def only_used_by(node: fx.Node, user: fx.Node) -> bool:
    """Whether nothing else reads a node's value."""
    return set(node.users) == {user}


def before_idle_dropout(node: Any) -> tuple[Any, list[fx.Node]]:
    """Return what a dropout that drops nothing is given, and the dropouts on the way."""
    passed: list[fx.Node] = []
    while is_function(node, F.dropout):
        names = ("input", "p", "training", "inplace")
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        if given.get("p", 0.5) not in (0, 0.0) and given.get("training", True) is not False:
            break
        passed.append(node)
        node = given["input"]
    return node, passed


def activation_call(node: Any) -> tuple[str, Any, tuple[fx.Node, ...]] | None:
    """Return the name of an activation that `forge.kernels.mlp` has, its input, and the calls that make it, the last
    one first."""
    if not isinstance(node, fx.Node) or not node.args:
        return None
    value: Any = node.args[0]
    if is_function(node, F.gelu):
        approximate = node.kwargs.get("approximate", node.args[1] if len(node.args) > 1 else "none")
        return ("gelu" if approximate == "tanh" else "gelu_erf"), value, (node,)
    for name, functions, method in (("relu", (F.relu, torch.relu), "relu"), ("silu", (F.silu,), "silu")):
        in_place = node.kwargs.get("inplace") or any(value is True for value in node.args[1:])
        if (is_function(node, *functions) and not in_place) or is_call(node, method):
            return name, value, (node,)
    return _written_out_gelu(node)


def _written_out_gelu(node: Any) -> tuple[str, Any, tuple[fx.Node, ...]] | None:
    """Find 0.5 * x * (1 + tanh(√(2/π) * (x + 0.044715 * x³))), as transformers' NewGELUActivation writes it."""
    factor, constant = GELU_NEW
    half, one = _product(node)
    if half is None:
        return None
    for half, one in ((half, one), (one, half)):  # noqa: B020
        x = _times(half, 0.5)
        tanh = _plus(one, 1.0)
        if x is None or tanh is None or not (is_function(tanh, torch.tanh) or is_call(tanh, "tanh")):
            continue
        inner = _times(tanh.args[0], factor)
        if inner is None or not is_function(inner, operator.add, torch.add) or inner.args[0] is not x:
            continue
        cube = _times(inner.args[1], constant)
        power = isinstance(cube, fx.Node) and (is_function(cube, torch.pow, operator.pow) or is_call(cube, "pow"))
        if power and cube.args[0] is x and cube.args[1] == 3:
            scaled = tanh.args[0]
            nodes = (node, one, tanh, scaled, inner, inner.args[1], cube, half)
            inside = set(nodes)
            # nothing else may read what lies between
            if all(set(part.users) <= inside for part in nodes[1:]) and set(x.users) <= inside:
                return "gelu", x, nodes
    return None


def _product(node: Any) -> tuple[Any, Any]:
    if is_function(node, operator.mul, torch.mul) or is_call(node, "mul"):
        return node.args[0], node.args[1]
    return None, None


def _times(node: Any, number: float) -> Any:
    """Return what a node multiplies by this number, or None."""
    a, b = _product(node)
    return _other(a, b, number)


def _plus(node: Any, number: float) -> Any:
    if not (is_function(node, operator.add, torch.add) or is_call(node, "add")):
        return None
    return _other(node.args[0], node.args[1], number)


def _other(a: Any, b: Any, number: float) -> Any:
    for value, other in ((a, b), (b, a)):
        if isinstance(value, (int, float)) and abs(value - number) < 1e-6 and isinstance(other, fx.Node):
            return other
    return None


def runs_in(x: fx.Node) -> tuple[torch.dtype, str]:
    """Return the dtype of a product of this node under the present autocast, and why no kernel runs there, or ""."""
    kind = example(x).device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else example(x).dtype
    runs = kind == "cuda" or (INTERPRETED and kind == "cpu")
    return dtype, "" if runs else f"it runs on CUDA, not on {kind}"


def erase(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Erase calls that nothing reads any more, the last one first."""
    for node in dict.fromkeys(nodes):
        if not node.users:
            graph.erase_node(node)
