"""How far compiled tensors differ from eager ones, and the first module that does: compiled one at a time, in order."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import forge
from forge.snapshot.sandbox import without_side_effects
from forge.torch_internals import pytree
from forge.util.patterns import parents
from forge_plugins.compile.regions import Regions

TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Tolerance relative to the largest entry of a tensor, by the least precise dtype used."""

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class CompiledDifference:
    """The difference of one tensor, absolute and relative to its size."""

    name: str
    absolute: float
    relative: float

    def __str__(self) -> str:
        return f"{self.absolute:.3g} in {self.name}, {self.relative:.3g} of its size"


def furthest(ours: Tensors, theirs: Tensors, tolerance: float) -> CompiledDifference:
    """Return the largest relative difference of two sets of tensors; a tensor missing in one of them counts as 0.

    A gradient is compared with its own largest entry, or `tolerance` of the largest gradient if that is more: one that
    should be 0, as before a BatchNorm, is noise in both.
    """
    gradients = [_largest(tensor) for name, tensor in theirs.items() if name.startswith("the gradient")]
    floor = tolerance * max(gradients, default=0.0)
    found = []
    for name in dict.fromkeys([*theirs, *ours]):
        zero = torch.zeros_like(ours[name] if name in ours else theirs[name])
        found.append(_apart(name, ours.get(name, zero), theirs.get(name, zero), floor))
    return max(found, key=lambda difference: difference.relative)


def _apart(name: str, ours: Tensor, theirs: Tensor, floor: float) -> CompiledDifference:
    if ours.shape != theirs.shape:
        return CompiledDifference(name, math.inf, math.inf)
    if ours.numel() == 0:
        return CompiledDifference(name, 0.0, 0.0)
    a, b = _exact(ours), _exact(theirs)
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    absolute = math.inf if bool(gap.isnan().any()) else float(gap.max())
    scale = max(_largest(theirs), floor if name.startswith("the gradient") else 0.0)
    return CompiledDifference(name, absolute, absolute / scale if scale > 0 else (math.inf if absolute else 0.0))


def _exact(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.abs() if tensor.is_complex() else tensor.to(torch.float64)


def _largest(tensor: Tensor) -> float:
    if tensor.numel() == 0:
        return 0.0
    finite = torch.nan_to_num(_exact(tensor), nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.abs().max())


def tolerance_for(dtype: torch.dtype, device: torch.device) -> float:
    """Return the allowed difference of two tensors, relative to their size."""
    if dtype is torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return TOLERANCES[torch.float16]  # TF32 has the mantissa of float16
    return TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16])


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """The first call of a module: its inputs, grad mode and autocast."""

    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    grad: bool
    autocast: tuple[str, torch.dtype, bool]


class ForwardRecorder:
    """Records dtypes and inputs of a task's modules in one forward."""

    def __init__(self, task: nn.Module):
        self.task = task
        self.calls: dict[str, ModuleCall] = {}
        "The first call of each module, in order."
        self._dtypes: set[torch.dtype] = {p.dtype for p in task.parameters() if p.is_floating_point()}

    @contextmanager
    def dtypes(self) -> Iterator[None]:
        """Record the dtypes of outputs inside the `with`."""

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._dtypes |= {tensor.dtype for tensor in _tensors(output)}

        with ExitStack() as stack:
            for _, module in self._inner():
                stack.callback(module.register_forward_hook(leave).remove)
            yield

    @contextmanager
    def inputs(self) -> Iterator[None]:
        """Record the inputs of modules inside the `with`."""

        def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            if name not in self.calls:
                args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
                self.calls[name] = ModuleCall(module, args, kwargs, torch.is_grad_enabled(), _autocast(module))

        with ExitStack() as stack:
            for name, module in self._inner():
                handle = module.register_forward_pre_hook(functools.partial(enter, name), with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def coarsest(self) -> torch.dtype:
        """Return the least precise dtype used."""
        known = [dtype for dtype in self._dtypes if dtype in TOLERANCES]
        return max(known, key=lambda dtype: TOLERANCES[dtype], default=torch.float32)

    def _inner(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, module) for name, module in self.task.named_modules() if name)


def _autocast(module: nn.Module) -> tuple[str, torch.dtype, bool]:
    kind = next((parameter.device.type for parameter in module.parameters()), "cpu")
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


@dataclass(frozen=True, slots=True)
class Search:
    """Compiles modules one at a time, in call order, and descends into the first that differs."""

    trainer: forge.Run
    seen: ForwardRecorder
    options: Mapping[str, Any]
    tolerance: float

    def first(self, inside: Iterable[str] | None = None) -> str | None:
        """Return a sentence about the innermost module that differs by itself; `inside`: search only these."""
        names = self._outermost(self.seen.calls) if inside is None else [n for n in self.seen.calls if n in set(inside)]
        found: tuple[str, CompiledDifference] | None = None
        while True:
            deeper = next(((name, d) for name in names if (d := self._difference(name)) is not None), None)
            if deeper is None:
                break
            found = deeper
            names = self._outermost([name for name in self.seen.calls if name.startswith(f"{found[0]}.")])
        if found is None:
            return None
        name, difference = found
        kind = type(self.seen.calls[name].module).__name__
        return f"The first module that differs when compiled by itself is {name} ({kind}): {difference}."

    def _outermost(self, names: Iterable[str]) -> list[str]:
        names = list(names)
        return [name for name in names if not any(around in names for around in parents(name))]

    def _difference(self, name: str) -> CompiledDifference | None:
        call = self.seen.calls[name]
        eager = self._replayed(call)
        regions = Regions({name: call.module}, whole=False)
        with regions.instead(regions.make(self.options)):
            compiled = self._replayed(call)
        worst = furthest(compiled, eager, self.tolerance)
        return worst if worst.relative > self.tolerance else None

    def _replayed(self, call: ModuleCall) -> dict[str, Tensor]:
        """Return the outputs, and the gradients of a weighted sum of them."""
        kind, dtype, enabled = call.autocast
        wanted = {f"the gradient of {n}": p for n, p in call.module.named_parameters() if p.requires_grad}
        with (
            without_side_effects(self.trainer),
            torch.set_grad_enabled(call.grad),
            torch.autocast(kind, dtype, enabled),
        ):
            leaves: list[Tensor] = []
            args, kwargs = pytree.tree_map_only(Tensor, functools.partial(_given, leaves), (call.args, call.kwargs))
            wanted |= {f"the gradient of input {i}": leaf for i, leaf in enumerate(leaves)}
            outputs = list(_tensors(call.module(*args, **kwargs)))
            found = {f"output {i}" if i else "its output": tensor.detach() for i, tensor in enumerate(outputs)}
            differentiable = [tensor for tensor in outputs if tensor.requires_grad]
            if differentiable and wanted:
                weights = [_weights(tensor) for tensor in differentiable]
                made = torch.autograd.grad(differentiable, list(wanted.values()), weights, allow_unused=True)
                found |= {name: g for name, g in zip(wanted, made, strict=True) if g is not None}
        return found


def _given(leaves: list[Tensor], tensor: Tensor) -> Tensor:
    """Return a copy of an input that can be changed in place, with a leaf behind it."""
    leaf = tensor.clone()
    if leaf.is_floating_point() and torch.is_grad_enabled():
        leaves.append(leaf.requires_grad_())
    return leaf.clone()


def _weights(tensor: Tensor) -> Tensor:
    """Return distinct weights for all entries, without random numbers."""
    return torch.linspace(-1, 1, tensor.numel(), device=tensor.device, dtype=tensor.dtype).view(tensor.shape)


def _tensors(value: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield leaf
