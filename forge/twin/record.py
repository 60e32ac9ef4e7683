"""A record: what a program had at named points, in their order, as digests and sketches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forge.util.digest import digest, form, sketch
from forge.util.tensors import tensors_in

OUTPUTS, GRADIENTS = "the outputs", "the gradients"
"""What `Record.watch` and `mark_gradients` mark."""
NOT_KEPT: Any = ...
"""What a mark holds whose value was not kept."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One value at a named point of a program."""

    update: int | None
    path: str
    digest: str
    sketch: list[float]
    "A few numbers, about as far from another's as the two tensors are apart; none of what is no number."
    kind: str = ""
    aside: bool = False
    "Whether the value may differ alone; it is the likely cause of what differs after it in the same update."
    value: Any = NOT_KEPT


class Record:
    """The marks of a program. Compare two with `first_difference`, or give the programs to `twin`.

    ::

        record = Record()
        record.mark("loss", loss, update=3)
        record.watch(model, optimizer)      # marks outputs, gradients, weights and the optimizer's state

    `path` is a file to which each mark is added as it is made, so that a process that is killed leaves what it had;
    `Record.read` reads it. With `keep`, values are kept in the place of digests: a difference has an exact size.
    """

    def __init__(self, path: str | Path | None = None, *, keep: bool = False):
        assert path is None or not keep, "a file holds no values: keep them, or give a path"
        self.marks: list[Mark] = []
        self.update: int | None = None
        "The update that marks belong to which name none."
        self.keep = keep
        self._file: IO[str] | None = None if path is None else open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._hooks: list[Any] = []

    @classmethod
    def of(cls, marks: Iterable[Mark]) -> Record:
        """Return a record of these marks."""
        record = cls()
        record.marks = [*marks]
        return record

    @classmethod
    def read(cls, path: str | Path) -> Record:
        """Return the record in a file; a mark cut short by a kill is left out."""
        marks: list[Mark] = []
        with suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
            for line in file:
                with suppress(ValueError):
                    marks.append(Mark(*json.loads(line)))
        return cls.of(marks)

    def mark(self, path: str, value: Any, update: int | None = None, kind: str = "", aside: bool = False) -> None:
        """Note a value at a named point; of a module or a nested value every part. `kind` says what several are."""
        self.update = self.update if update is None else update
        for place, part in parts(value, path):
            if self.keep:
                self.marks.append(Mark(self.update, place, "", [], kind, aside, _copied(part)))
                continue
            mark = Mark(self.update, place, seal(part), numbers(part), kind, aside)
            self.marks.append(mark)
            if self._file is not None:
                self._file.write(json.dumps([mark.update, place, mark.digest, mark.sketch, kind, aside]) + "\n")

    @property
    def updates(self) -> list[int]:
        """The updates that have marks, in the order of their first."""
        return [*dict.fromkeys(mark.update for mark in self.marks if mark.update is not None)]

    def where(self, wanted: Callable[[Mark], bool]) -> Record:
        """Return a record of these marks alone."""
        return Record.of(filter(wanted, self.marks))

    def watch(self, model: nn.Module, optimizer: Optimizer | None = None, *, outputs: bool = True) -> None:
        """Mark what a module computes and what its optimizer makes of it, by hooks, until `unwatch`.

        At first its state; then the outputs of its modules, but not in an evaluation (without gradients), nor with
        `outputs=False`: hooks change what is compiled; at each step of the optimizer the gradients before it, and the
        weights and the optimizer's state after it. Each step ends an update.
        """
        self.mark("", model, update=0, kind="the weights")
        self.update = 1
        if outputs:
            for name, module in model.named_modules():
                self._hooks.append(module.register_forward_hook(self._saw_output(name or type(module).__name__)))
        if optimizer is not None:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self.mark_gradients(model)))
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.mark_update(model, [optimizer])))

    def mark_gradients(self, model: nn.Module) -> None:
        """Mark the gradient of every parameter that has one, the last first, about as a backward pass makes them."""
        for name, parameter in reversed([*model.named_parameters()]):
            if parameter.grad is not None:
                self.mark(name, parameter.grad, kind=GRADIENTS)

    def mark_update(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Mark the weights, buffers and optimizers' state after an update, and begin the next."""
        self.mark("", model, kind="the weights")
        for optimizer in optimizers:
            self.mark("", optimizer.state_dict(), kind="the optimizer's state")
        self.update = (self.update or 0) + 1

    def unwatch(self) -> None:
        """Take the hooks of `watch` away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def close(self) -> None:
        """Take the hooks away, and close the file."""
        self.unwatch()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _saw_output(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in tensors_in(output) if torch.is_grad_enabled() else ():
                self.mark(name, tensor, kind=OUTPUTS)

        return hook


def parts(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, part) of a module's state, of nested mappings and of lists; an empty one is a part."""
    if isinstance(value, nn.Module):
        value = value.state_dict()
    if not isinstance(value, (Mapping, list, tuple)) or not value:
        yield path, value
        return
    for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from parts(inner, f"{path}.{key}" if path and key != "" else path or str(key))


def seal(value: Any) -> str:
    """Return the digest of a value; of a tensor with its dtype and shape in words."""
    return f"{form(value)} {digest(value)}" if isinstance(value, Tensor) else digest(value)


def numbers(value: Any) -> list[float]:
    """Return the sketch of a tensor or a number; of anything else nothing."""
    if isinstance(value, Tensor):
        return sketch(value)
    return [value] if isinstance(value, (int, float)) else []


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
