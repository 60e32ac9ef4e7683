"""RecordedCall: one call of a function, with shapes, strides and dtypes of tensors and other arguments by value.

It can be matched against another call (also inside torch.compile), serialized, and reproduced with random numbers for
measuring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from forge_kernels.contract import dtype_name

Plain = None | bool | int | float | str | torch.dtype
TENSOR, VALUE, DTYPE = "tensor", "value", "dtype"


MARKED = 0.1
"""The share of negative values among drawn integers, where the call had some."""


class Unrecordable(Exception):
    """An argument cannot be recorded; its call is not replaced."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    "Whether it requires a gradient."
    low: int = 0
    high: int = 0
    "Range of an integer tensor, to draw random values from."

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            raise Unrecordable(type(tensor).__name__)
        low = high = 0
        if not tensor.is_floating_point() and tensor.dtype != torch.bool and tensor.numel():
            low, high = (int(bound) for bound in tensor.detach().aminmax())
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return cls(shape, stride, tensor.dtype, tensor.requires_grad, low, high)

    def make(self, device: torch.device) -> Tensor:
        """Return a new tensor of this spec with random values."""
        sizes = [1 if stride == 0 else size for size, stride in zip(self.shape, self.stride, strict=True)]
        tensor = torch.empty_strided(sizes, self.stride, dtype=self.dtype, device=device)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            tensor.normal_()
        elif self.dtype == torch.bool:
            tensor.fill_(True)
        elif self.low < 0 <= self.high:  # numbers of classes or rows, and a mark such as an ignored label's -100
            tensor.random_(0, self.high + 1)
            tensor.masked_fill_(torch.rand(sizes, device=device) < MARKED, self.low)
        else:
            tensor.random_(self.low, self.high + 1)
        return tensor.expand(self.shape).requires_grad_(self.grad)

    def __str__(self) -> str:
        return f"{'×'.join(map(str, self.shape)) or 'scalar'} {dtype_name(self.dtype)}"


Argument = TensorSpec | Plain | tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of `target`."""

    target: str
    args: tuple[Argument, ...]
    options: tuple[tuple[str, Argument], ...] = ()
    autocast: torch.dtype | None = None
    "The autocast dtype during the call."
    module: str = ""
    "The called module's repr; empty for a function."

    @classmethod
    def of(cls, target: str, args: Sequence[Any], options: Mapping[str, Any], module: str = "") -> RecordedCall:
        """Record a call; raise Unrecordable if an argument cannot be recorded."""
        tensors = [value for value in [*args, *options.values()] if isinstance(value, Tensor)]
        kind = tensors[0].device.type if tensors else "cpu"
        if any(tensor.device.type != kind for tensor in tensors):
            raise Unrecordable("tensors on several devices")
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        named = tuple((name, _noted(value)) for name, value in options.items())
        return cls(target, tuple(_noted(value) for value in args), named, autocast, module)

    @property
    def kind(self) -> RecordedCall:
        """The call without ranges of integers: equal for calls that share a measurement."""
        return replace(
            self,
            args=tuple(map(_without_range, self.args)),
            options=tuple((name, _without_range(value)) for name, value in self.options),
        )

    def make(self, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
        """Return arguments of the same specs with random values."""
        args = [_made(value, device) for value in self.args]
        return args, {name: _made(value, device) for name, value in self.options}

    @property
    def tensors(self) -> list[TensorSpec]:
        """Specs of the tensors among the arguments."""
        values = [*self.args, *(value for _, value in self.options)]
        return [value for value in values if isinstance(value, TensorSpec)]

    def as_data(self) -> dict[str, Any]:
        """Return the call as plain data, for JSON."""
        return {
            "target": self.target,
            "args": [_as_data(value) for value in self.args],
            "options": {name: _as_data(value) for name, value in self.options},
            "autocast": None if self.autocast is None else dtype_name(self.autocast),
            "module": self.module,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> RecordedCall:
        return cls(
            data["target"],
            tuple(map(_from_data, data["args"])),
            tuple((name, _from_data(value)) for name, value in data["options"].items()),
            None if data["autocast"] is None else getattr(torch, data["autocast"]),
            data["module"],
        )

    def __str__(self) -> str:
        name = self.target.rpartition(".")[2]
        return f"{name} {', '.join(map(str, self.tensors))}"


# ---------------------------------------------------------------------------------------------------------------------
# Matching. torch.compile traces this, so it uses plain tuples and functions only.

Pattern = tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""Positional and named arguments; a tensor is (shape, dtype, stride), with stride None if contiguous."""


def pattern_of(call: RecordedCall) -> Pattern:
    """Return the pattern that `fits` compares a call with."""
    named = tuple((name, _pattern(value)) for name, value in call.options)
    return tuple(_pattern(value) for value in call.args), named


def fits(known: Pattern, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether a call matches a pattern. requires_grad is ignored: evaluation uses the kernels of training."""
    positional, named = known
    if len(args) != len(positional) or len(options) != len(named):
        return False
    for place in range(len(args)):
        if not _is_like(positional[place], args[place]):
            return False
    return all(name in options and _is_like(value, options[name]) for name, value in named)


def _pattern(value: Argument) -> tuple[Any, ...]:
    if isinstance(value, TensorSpec):
        stride = None if _is_contiguous(value) else value.stride
        return TENSOR, value.shape, value.dtype, stride
    return VALUE, value


def _is_like(known: tuple[Any, ...], given: Any) -> bool:
    if isinstance(given, Tensor):
        if known[0] != TENSOR or given.dtype != known[2] or tuple(given.shape) != known[1]:
            return False
        return given.is_contiguous() if known[3] is None else tuple(given.stride()) == known[3]
    if known[0] != VALUE:
        return False
    return (tuple(given) if isinstance(given, (list, tuple)) else given) == known[1]


def _is_contiguous(like: TensorSpec) -> bool:
    expected = 1
    for size, stride in zip(reversed(like.shape), reversed(like.stride), strict=True):
        if size != 1 and stride != expected:
            return 0 in like.shape
        expected *= size
    return True


# ---------------------------------------------------------------------------------------------------------------------
# One argument


def _noted(value: Any) -> Argument:
    if isinstance(value, Tensor):
        return TensorSpec.of(value)
    if isinstance(value, (list, tuple)):
        items = tuple(value)
        if all(type(item) in (int, float, bool, str) for item in items):
            return items
    elif value is None or type(value) in (bool, int, float, str) or isinstance(value, torch.dtype):
        return value
    raise Unrecordable(type(value).__name__)


def _without_range(value: Argument) -> Argument:
    return replace(value, low=0, high=0) if isinstance(value, TensorSpec) else value


def _made(value: Argument, device: torch.device) -> Any:
    return value.make(device) if isinstance(value, TensorSpec) else value


def _as_data(value: Argument) -> Any:
    if isinstance(value, TensorSpec):
        shape, stride, bounds = list(value.shape), list(value.stride), [value.low, value.high]
        return {"kind": TENSOR, "is": [shape, stride, dtype_name(value.dtype), value.grad, bounds]}
    if isinstance(value, torch.dtype):
        return {"kind": DTYPE, "is": dtype_name(value)}
    return {"kind": VALUE, "is": list(value) if isinstance(value, tuple) else value}


def _from_data(data: Mapping[str, Any]) -> Argument:
    value = data["is"]
    if data["kind"] == TENSOR:
        shape, stride, dtype, grad, (low, high) = value
        return TensorSpec(tuple(shape), tuple(stride), getattr(torch, dtype), grad, low, high)
    if data["kind"] == DTYPE:
        return getattr(torch, value)
    return tuple(value) if isinstance(value, list) else value
