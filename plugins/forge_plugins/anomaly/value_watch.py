"""Record every operation of a window, forward and backward, with a NaN or an infinity in its output.

A TorchDispatchMode between the user's code and torch's kernels sees each operation with its inputs. It records a
BadOperation for each bad output, with the origins of its bad inputs, so that `origin` can walk from a bad loss or
gradient back to its origin. Deliberate infinities (an attention mask) are recorded too; no walk reaches them.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import forge
from forge.snapshot.non_finite import values_of
from forge.torch_internals import TorchDispatchMode
from forge.util.frames import is_library
from forge.util.tensors import storage_key, tensors_in
from forge_plugins.torch_internals import current_autograd_node, sequence_nr

STANDARD = os.path.dirname(os.path.abspath(contextlib.__file__)) + os.sep
COPIES = frozenset({"aten.clone", "aten._to_copy", "aten.copy_"})
ENGINE = os.path.join("torch", "autograd", "graph.py")


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of the user's code."""

    file: str
    line: int
    function: str
    code: str


Context = tuple[str, str, CodeLine | None]
"""The module of an operation, its class, and the line."""


@dataclass(frozen=True, slots=True)
class BadInput:
    """A bad input: made by an earlier operation, or existing before the window (`source`, if it has a name)."""

    nan: bool
    inf: bool
    event: BadOperation | None
    source: str | None

    @property
    def age(self) -> int:
        return self.event.number if self.event is not None else -1


@dataclass(slots=True)
class BadOperation:
    """One operation with a NaN or an infinity in its output."""

    number: int
    op: str
    node: str | None
    "In backward: the name of the autograd node, such as SqrtBackward0."
    micro: int
    context: Context
    nan: bool
    inf: bool
    causes: list[BadInput]
    inputs: list[dict[str, Any]] = field(default_factory=list)
    output: dict[str, Any] = field(default_factory=dict)
    bad_rows: list[int] | None = None
    "Indices along the first dimension where the output is not finite."
    length: int = 0
    "The size of that dimension."
    moves: bool = False
    "Whether it only passes its input on: a view, a copy."


class ValueWatch(TorchDispatchMode):
    """Records bad operations while it is active. `sources` names tensors that exist before the window."""

    def __init__(self, step: forge.Step, sources: list[tuple[str, Tensor]]):
        super().__init__()
        self.step, self.task = step, step.trainer.task
        self.events = 0
        self._modules = [("", type(self.task).__name__)]
        self._contexts: dict[int, Context] = {}
        self._made_by: dict[int, BadOperation] = {}
        self._alive: list[Any] = []  # storages of bad tensors, kept so that no other gets their address
        self._sources: dict[int, str] = {}
        for name, tensor in sources:
            if (key := storage_key(tensor)) is not None:
                self._sources.setdefault(key, name)

    def cause(self, tensor: Tensor) -> BadInput | None:
        """Return the origin of a bad tensor, or None for a finite one."""
        nan, inf = badness(tensor)
        if not (nan or inf):
            return None
        key = storage_key(tensor)
        if key is None:
            return BadInput(nan, inf, None, None)
        return BadInput(nan, inf, self._made_by.get(key), self._sources.get(key))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        node = current_autograd_node()
        context = self._here() if node is None else self._of_node(node)
        inputs = list(tensors_in((args, kwargs)))
        causes = [cause for tensor in inputs if (cause := self.cause(tensor)) is not None]
        described = [describe(tensor) for tensor in inputs] if func._schema.is_mutable else None
        out = func(*args, **kwargs)
        name = func._schema.name.replace("::", ".")
        if "empty" in name or "resize" in name:  # uninitialised memory
            return out
        made = [(tensor, *badness(tensor)) for tensor in tensors_in(out)]
        bad = [(tensor, nan, inf) for tensor, nan, inf in made if nan or inf]
        if bad:
            event = BadOperation(
                self.events,
                name,
                node.name() if node is not None else None,
                self.step.micro,
                context,
                any(nan for _, nan, _ in bad),
                any(inf for _, _, inf in bad),
                causes,
            )
            self.events += 1
            shares = storage_key(bad[0][0]) in {*map(storage_key, inputs)} - {None}
            event.moves = (shares and not func._schema.is_mutable) or name in COPIES
            if not any(cause.nan for cause in causes) and (event.nan or not causes):
                event.inputs = described or [describe(tensor) for tensor in inputs]
                event.output = describe(bad[0][0])
                event.bad_rows, event.length = bad_rows(bad[0][0])
            for tensor, _, _ in bad:
                if (key := storage_key(tensor)) is not None:
                    self._made_by[key] = event
                    self._alive.append(tensor.untyped_storage())
        return out

    # -- modules and lines --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def following_modules(self) -> Iterator[None]:
        """Track which module is running, by forward hooks on all modules."""
        handles = []
        for path, module in self.task.named_modules():
            entry = (path, type(module).__name__)
            handles.append(module.register_forward_pre_hook(lambda *_, entry=entry: self._modules.append(entry)))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _leave(self, *_: Any) -> None:
        self._modules.pop()

    def _here(self) -> Context:
        context = (*self._modules[-1], user_place(sys._getframe(2)))
        # the autograd node just made for this operation has the latest sequence number; the first operation seen with
        # that number is its own
        self._contexts.setdefault(_last_node(), context)
        return context

    def _of_node(self, node: Any) -> Context:
        """Return the context of a node's forward operation, with the line of a custom backward if any."""
        known = self._contexts.get(node._sequence_nr(), ("", type(self.task).__name__, None))
        own = user_place(sys._getframe(2), until=ENGINE)
        return known if own is None else (*known[:2], own)


def _last_node() -> int:
    """Return the sequence number of the last autograd node."""
    return sequence_nr() - 1


def badness(tensor: Tensor) -> tuple[bool, bool]:
    """Return whether a tensor has a NaN, and whether it has an infinity."""
    values = values_of(tensor.detach()) if _has_values(tensor) else None
    if values is None or bool(torch.isfinite(values).all()):
        return False, False
    return bool(torch.isnan(values).any()), bool(torch.isinf(values).any())


def _has_values(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_meta


def describe(tensor: Tensor) -> dict[str, Any]:
    """Summarise a tensor: type, shape, range of finite values, and counts of the others."""
    described: dict[str, Any] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    if not _has_values(tensor) or not tensor.numel():
        return described
    values = values_of(tensor.detach())
    finite = values[torch.isfinite(values)].double()
    described |= {"nan": int(torch.isnan(values).sum()), "inf": int(torch.isinf(values).sum())}
    if finite.numel():
        described |= {"min": float(finite.min()), "max": float(finite.max()), "zeros": int((finite == 0).sum())}
    return described


def bad_rows(tensor: Tensor) -> tuple[list[int] | None, int]:
    """Return the indices along the first dimension with a bad value, and that dimension's size."""
    if tensor.ndim == 0 or tensor.layout is not torch.strided:
        return None, 0
    bad = ~torch.isfinite(tensor.detach())
    return bad.reshape(tensor.shape[0], -1).any(1).nonzero().flatten().tolist(), tensor.shape[0]


def user_place(frame: FrameType | None, until: str = "") -> CodeLine | None:
    """Return the innermost line of the user's code; with `until`, stop at a file of that name."""
    while frame is not None:
        file = frame.f_code.co_filename
        if until and file.endswith(until):
            return None
        if not is_library(file) and not (file.startswith(STANDARD) and "site-packages" not in file):
            code = linecache.getline(file, frame.f_lineno).strip()
            return CodeLine(file, frame.f_lineno, frame.f_code.co_name, code)
        frame = frame.f_back
    return None
