"""One batch as written and compiled: how far apart the two are, and the first module that differs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import forge
from forge.checks import check_training_output
from forge_plugins._modules import parents
from forge_plugins._trial import untouched
from forge_plugins.compile.regions import Regions

TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far apart is too far, relative to the largest entry of a tensor, by the coarsest dtype that took part."""

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Difference:
    """The tensor that is furthest apart, relative to its size."""

    name: str
    absolute: float
    relative: float

    def __str__(self) -> str:
        return f"{self.absolute:.3g} in {self.name}, {self.relative:.3g} of its size"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one batch showed."""

    worst: Difference
    tolerance: float
    dtype: torch.dtype
    culprit: str | None = None
    "The first module that differs, with its own difference, where the worst is too large."

    @property
    def agrees(self) -> bool:
        return self.worst.relative <= self.tolerance

    def __str__(self) -> str:
        allowed = f"{self.tolerance:g} is allowed for {str(self.dtype).removeprefix('torch.')}"
        if self.worst.absolute == 0:
            return "compiled and eager agree on the first batch bit for bit."
        if self.agrees:
            return f"compiled and eager agree on the first batch: they differ by up to {self.worst}; {allowed}."
        culprit = self.culprit or (
            "No module differs when it is compiled by itself: the difference comes from the step around them, or from "
            "compiling them together."
        )
        return f"compiled and eager disagree on the first batch: they differ by {self.worst}; {allowed}. {culprit}"


def compare(step: forge.Step, regions: Regions, options: Mapping[str, Any]) -> Comparison:
    """Run the first batch both ways, in training mode and with the same random numbers; the run is left as it was.

    It is compiled for this alone, without CUDA graphs, and with torch's own random numbers where the backend draws its
    own, so that dropout drops the same.
    """
    options, seen = comparable(options), Seen(step.trainer.task)
    with untouched(step.trainer), torch_random():
        batch = step.trainer.hooks.forge_prepare_batch(step, step.window[0])
        with regions.away(), seen.dtypes():
            eager = _loss_and_gradients(step, batch)
        with regions.away(options):
            compiled = _loss_and_gradients(step, batch)
        dtype = seen.coarsest()
        tolerance = _tolerance(dtype, step.trainer.env.device)
        worst = furthest(compiled, eager, tolerance)
        if worst.relative <= tolerance:
            return Comparison(worst, tolerance, dtype)
        with regions.away():
            with seen.inputs():
                _loss_and_gradients(step, batch)
            inside = None if regions.whole else [region.name for region in regions.all]
            culprit = Search(step.trainer, seen, options, tolerance).first(inside)
    return Comparison(worst, tolerance, dtype, culprit)


def comparable(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same kernels without CUDA graphs, which would have to be recorded first."""
    modes = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
    mode = options.get("mode")
    return {**options, "mode": modes.get(mode, mode)} if isinstance(mode, str) else dict(options)


def torch_random() -> AbstractContextManager[Any]:
    """What is compiled meanwhile draws the random numbers that eager code draws."""
    try:
        from torch._inductor import config

        return config.patch(fallback_random=True)
    except (ImportError, AttributeError):
        return nullcontext()


def _loss_and_gradients(step: forge.Step, batch: Any) -> dict[str, Tensor]:
    """By name, and outside of `.grad`; random numbers and buffers are put back."""
    trainer, own = step.trainer, {id(parameter) for parameter in step.parameters()}
    named = {n: p for n, p in trainer.task.named_parameters() if id(p) in own and p.requires_grad}
    with untouched(trainer), torch.enable_grad():
        output = trainer.hooks.forge_forward(step, batch)
        check_training_output(output, trainer.task)
        loss = output if isinstance(output, Tensor) else output["loss"]
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    pairs = zip(named, gradients, strict=True)
    return {"the loss": loss.detach(), **{f"the gradient of {n}": g for n, g in pairs if g is not None}}


def furthest(ours: Tensors, theirs: Tensors, tolerance: float) -> Difference:
    """Where two sets of tensors are furthest apart; one that only one of them has is infinitely far.

    A gradient is held against its own largest entry, or `tolerance` of the largest gradient there is: one that should
    be 0, as before a BatchNorm, is noise in both.
    """
    gradients = [_largest(tensor) for name, tensor in theirs.items() if name.startswith("the gradient")]
    floor = tolerance * max(gradients, default=0.0)
    found = [_apart(name, ours.get(name), theirs.get(name), floor) for name in dict.fromkeys([*theirs, *ours])]
    return max(found, key=lambda difference: difference.relative)


def _apart(name: str, ours: Tensor | None, theirs: Tensor | None, floor: float) -> Difference:
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return Difference(name, math.inf, math.inf)
    if ours.numel() == 0:
        return Difference(name, 0.0, 0.0)
    a, b = _exact(ours), _exact(theirs)
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    absolute = math.inf if bool(gap.isnan().any()) else float(gap.max())
    scale = max(_largest(theirs), floor if name.startswith("the gradient") else 0.0)
    return Difference(name, absolute, absolute / scale if scale > 0 else (math.inf if absolute else 0.0))


def _exact(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.abs() if tensor.is_complex() else tensor.to(torch.float64)


def _largest(tensor: Tensor) -> float:
    if tensor.numel() == 0:
        return 0.0
    finite = torch.nan_to_num(_exact(tensor), nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.abs().max())


def _tolerance(dtype: torch.dtype, device: torch.device) -> float:
    if dtype is torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return TOLERANCES[torch.float16]  # TF32 has the mantissa of float16
    return TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16])


# ---------------------------------------------------------------------------------------------------------------------
# Which module


@dataclass(frozen=True, slots=True)
class Call:
    """The first call of a module: what it was given, and under which switches."""

    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    grad: bool
    autocast: tuple[str, torch.dtype, bool]


class Seen:
    """What passes through the modules of a task in one forward."""

    def __init__(self, task: nn.Module):
        self.task = task
        self.calls: dict[str, Call] = {}
        "The first call of each, in order."
        self._dtypes: set[torch.dtype] = {p.dtype for p in task.parameters() if p.is_floating_point()}

    @contextmanager
    def dtypes(self) -> Iterator[None]:
        """Look at what comes out."""

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._dtypes |= {tensor.dtype for tensor in _tensors(output)}

        with ExitStack() as stack:
            for _, module in self._inner():
                stack.callback(module.register_forward_hook(leave).remove)
            yield

    @contextmanager
    def inputs(self) -> Iterator[None]:
        """Keep what goes in."""

        def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            if name not in self.calls:
                args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
                self.calls[name] = Call(module, args, kwargs, torch.is_grad_enabled(), _autocast(module))

        with ExitStack() as stack:
            for name, module in self._inner():
                handle = module.register_forward_pre_hook(functools.partial(enter, name), with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def coarsest(self) -> torch.dtype:
        """The dtype with the least digits that took part."""
        known = [dtype for dtype in self._dtypes if dtype in TOLERANCES]
        return max(known, key=lambda dtype: TOLERANCES[dtype], default=torch.float32)

    def _inner(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, module) for name, module in self.task.named_modules() if name)


def _autocast(module: nn.Module) -> tuple[str, torch.dtype, bool]:
    kind = next((parameter.device.type for parameter in module.parameters()), "cpu")
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


@dataclass(frozen=True, slots=True)
class Search:
    """Compiles modules one at a time, in the order they were called, and goes into the first that differs."""

    trainer: forge.Trainer
    seen: Seen
    options: Mapping[str, Any]
    tolerance: float

    def first(self, inside: Iterable[str] | None = None) -> str | None:
        """The innermost module that differs by itself, in words; `inside`: only these and what is in them."""
        names = self._outermost(self.seen.calls) if inside is None else [n for n in self.seen.calls if n in set(inside)]
        found: tuple[str, Difference] | None = None
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

    def _difference(self, name: str) -> Difference | None:
        call = self.seen.calls[name]
        eager = self._replayed(call)
        with Regions({name: call.module}, whole=False).away(self.options):
            compiled = self._replayed(call)
        worst = furthest(compiled, eager, self.tolerance)
        return worst if worst.relative > self.tolerance else None

    def _replayed(self, call: Call) -> dict[str, Tensor]:
        """Outputs, and the gradients of a weighted sum of them."""
        kind, dtype, enabled = call.autocast
        wanted = {f"the gradient of {n}": p for n, p in call.module.named_parameters() if p.requires_grad}
        with untouched(self.trainer), torch.set_grad_enabled(call.grad), torch.autocast(kind, dtype, enabled):
            leaves: list[Tensor] = []
            args, kwargs = tree_map_only(Tensor, functools.partial(_given, leaves), (call.args, call.kwargs))
            wanted |= {f"the gradient of input {i}": leaf for i, leaf in enumerate(leaves)}
            outputs = list(_tensors(call.module(*args, **kwargs)))
            told = {f"output {i}" if i else "its output": tensor.detach() for i, tensor in enumerate(outputs)}
            differentiable = [tensor for tensor in outputs if tensor.requires_grad]
            if differentiable and wanted:
                weights = [_weights(tensor) for tensor in differentiable]
                found = torch.autograd.grad(differentiable, list(wanted.values()), weights, allow_unused=True)
                told |= {name: g for name, g in zip(wanted, found, strict=True) if g is not None}
        return told


def _given(leaves: list[Tensor], tensor: Tensor) -> Tensor:
    """An input as the module got it: a tensor that can be changed in place, with a leaf behind it."""
    leaf = tensor.clone()
    if leaf.is_floating_point() and torch.is_grad_enabled():
        leaves.append(leaf.requires_grad_())
    return leaf.clone()


def _weights(tensor: Tensor) -> Tensor:
    """Something that no two entries share, and that needs no random numbers."""
    return torch.linspace(-1, 1, tensor.numel(), device=tensor.device, dtype=tensor.dtype).view(tensor.shape)


def _tensors(value: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield leaf
