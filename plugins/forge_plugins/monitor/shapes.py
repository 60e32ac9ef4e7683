"""The model as a table: output, parameters and memory of each module, from the first micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

import forge
from forge.util.tables import aligned
from forge.util.tensors import tensors_in
from forge.util.text import format_bytes

DEPTH = 3
"""Levels of modules in the table."""
COLUMNS = ("module", "class", "output", "parameters", "weights", "activations")


@dataclass(slots=True)
class ModuleRow:
    """A module, and the number of equal neighbours."""

    name: str
    kind: str
    output: str = ""
    parameters: int = 0
    frozen: int = 0
    weights: int = 0
    "Bytes of parameters and buffers."
    activations: int = 0
    "Bytes of the output."
    parts: list[ModuleRow] = field(default_factory=list)
    times: int = 1

    def like(self) -> tuple[Any, ...]:
        """Return a key equal for modules that look the same in the table."""
        mine = (self.kind, self.output, self.parameters, self.frozen, self.weights, self.activations, self.times)
        return (*mine, tuple(part.like() for part in self.parts))


class Shapes:
    """Records the outputs of modules in the first micro-batch, without an extra forward."""

    def __init__(self, step: forge.Step):
        self._step, self._task = step, step.trainer.task
        self._outputs: dict[str, tuple[str, int]] = {}
        self._handles: list[RemovableHandle] = []

    def watch(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        """Place hooks on modules until `close`; with several optimizers, for the turn of each."""
        for name, module in modules:
            self._handles.append(module.register_forward_hook(lambda *seen, name=name: self._see(name, seen[-1])))

    def _see(self, name: str, output: Any) -> None:
        if torch.compiler.is_compiling() or self._step.micro or name in self._outputs:
            return
        tensors = list(tensors_in(output))
        shown = ", ".join("×".join(map(str, tensor.shape)) or "scalar" for tensor in tensors[:2])
        more = ", …" if len(tensors) > 2 else ""
        self._outputs[name] = (shown + more, sum(_bytes(tensor) for tensor in tensors))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def tree(self, depth: int = DEPTH, path: str = "", module: nn.Module | None = None) -> ModuleRow:
        """Return the task with its parts, down to `depth`; equal neighbours are folded into one row."""
        module = module or self._task
        parameters = [p for p in module.parameters() if not is_lazy(p)]
        buffers = [b for b in module.buffers() if not is_lazy(b)]
        output, activations = self._outputs.get(path, ("", 0))
        row = ModuleRow(
            name=path.rpartition(".")[2] or type(module).__name__,
            kind=type(module).__name__,
            output=output,
            parameters=sum(p.numel() for p in parameters),
            frozen=sum(p.numel() for p in parameters if not p.requires_grad),
            weights=sum(_bytes(tensor) for tensor in [*parameters, *buffers]),
            activations=activations,
        )
        if depth:
            parts = [self.tree(depth - 1, f"{path}.{n}".lstrip("."), child) for n, child in module.named_children()]
            row.parts = folded(parts)
        return row

    def as_text(self) -> str:
        """Return the table, and a line of totals."""
        row = self.tree()
        leaves = [name for name, module in self._task.named_modules() if not module._modules]
        outputs = sum(self._outputs[name][1] for name in leaves if name in self._outputs)
        totals = (
            f"{row.parameters:,} parameters, {row.parameters - row.frozen:,} of them trained. Weights and buffers take "
            f"{format_bytes(row.weights)}, activations {format_bytes(outputs)} for one micro-batch."
        )
        return "\n".join([*aligned([COLUMNS, *lines(row)], texts=3), totals])


def folded(rows: list[ModuleRow]) -> list[ModuleRow]:
    """Fold equal neighbours into one row: "0 to 11"."""
    found: list[ModuleRow] = []
    for _, alike in groupby(rows, key=ModuleRow.like):
        first, *others = alike
        if others:
            first.name, first.times = f"{first.name} to {others[-1].name}", 1 + len(others)
        found.append(first)
    return found


def lines(row: ModuleRow, indent: int = 0) -> Iterator[tuple[str, ...]]:
    """Yield the cells of a row and of its parts."""
    times = f" ×{row.times}" if row.times > 1 else ""
    frozen = "" if not row.frozen else " frozen" if row.frozen == row.parameters else f" ({row.frozen:,} frozen)"
    yield (
        f"{'  ' * indent}{row.name}",
        f"{row.kind}{times}",
        row.output or "–",
        f"{row.parameters:,}{frozen}" if row.parameters else "–",
        format_bytes(row.weights) if row.weights else "–",
        format_bytes(row.activations) if row.activations else "–",
    )
    for part in row.parts:
        yield from lines(part, indent + 1)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
