"""Evidence: digests of what a run has after an update, to compare two runs bit for bit.

The parts of it that must be equal are the batch, the random numbers, the losses, the weights and the optimizer, causes
before effects. Beside them stands what no checkpoint holds: attributes and objects of the task and the data, what their
classes, closures and globals hold. A value of these that differs together with another part is the likely cause; one
that differs alone has not shown yet.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from forge.checkpoint.hashing import tensor_pieces
from forge.contract.run import Run
from forge.contract.step import Step
from forge.rng import RNGState
from forge.snapshot import frozen_modules, hidden
from forge.util.frozen import kept_by_hash
from forge.util.text import few
from forge.util.walk import GENERATORS, frozen, is_atom, walk

Line = dict[str, Any]
"""An update, and by part {path: digest}."""

PARTS = {
    "batch": "the batch",
    "rng": "the state of the random numbers",
    "means": "the loss, a metric or a counter",
    "weights": "the weights",
    "optimizer": "the optimizer's state or its learning rate",
}
"""The parts of a line that must be equal, causes before effects."""
HIDDEN = "hidden"
MAX_ENTRIES = 2**18


def line_of(trainer: Run, step: Step) -> Line:
    """Return the digests of one update; counters are in `means`, under their own names."""
    rng = RNGState.capture(trainer.env.device).as_tree()
    own = hidden.generator_states(trainer).get(hidden.HIDDEN, {})
    return {
        "update": trainer.progress.update,
        "batch": dict(batches(step.window)),
        "means": {name: _exact(value) for name, value in _means(trainer)},
        "weights": {
            name: digest(value) for name, value in (trainer.task.state_dict() | _changed_frozen(trainer.task)).items()
        },
        "optimizer": {
            f"{name or 'optimizer'}{path}": digest(value)
            for name, state in trainer.optimizers.state_dict(trainer.task).items()
            for path, value in _branches(state)
        },
        "rng": {kind: digest(state) for kind, state in (rng | own).items()},
        HIDDEN: dict(unsaved(trainer)),
    }


# -- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a line differs from the one it should repeat."""

    update: int
    part: str
    names: tuple[str, ...] = ()
    shown: bool = True
    "Whether it has shown in a part that must be equal; what is hidden may differ alone."
    note: str = ""
    "What to say instead of names."

    @property
    def detail(self) -> str:
        return self.note or few(self.names)

    def __str__(self) -> str:
        what = PARTS.get(self.part, "a value outside the task's state")
        return f"at update {self.update}, in {what} ({self.detail})"


def difference(line: Line, right: Line) -> Difference | None:
    """Return where one line differs from the right one: the cause, if the line shows it.

    What is hidden is compared where both lines have it: which of two paths leads to a shared object may differ.
    """
    update, part = line["update"], next((part for part in PARTS if line[part] != right[part]), None)
    ours, theirs = line[HIDDEN], right[HIDDEN]
    apart = tuple(name for name in theirs if ours.get(name, theirs[name]) != theirs[name])
    if part is None:
        return Difference(update, HIDDEN, apart, shown=False) if apart else None
    if part != "batch" and apart:
        return Difference(update, HIDDEN, apart)
    return Difference(update, part, _names(line[part], right[part]))


def compare(straight: Iterable[Line], other: Iterable[Line]) -> Difference | None:
    """Return the first difference of `other`, which may repeat updates, from the uninterrupted run.

    A difference in what is hidden counts alone only if every other part of all updates is equal.
    """
    expected, drift = {line["update"]: line for line in straight}, None
    for line in other:
        right = expected.get(line["update"])
        if right is None:
            return Difference(line["update"], "batch", note="the uninterrupted run has no such update")
        found = difference(line, right)
        if found is not None and found.shown:
            return found
        drift = drift or found
    return drift


def without_noise(lines: Iterable[Line], pairs: Iterable[tuple[Line, Line]]) -> list[Line]:
    """Return lines without the hidden values that differ between processes which should not: an id, a time."""
    noise = {name for one, other in pairs for name in _names(one[HIDDEN], other[HIDDEN])}
    return [
        {**line, HIDDEN: {name: value for name, value in line[HIDDEN].items() if name not in noise}} for line in lines
    ]


def _names(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, ...]:
    """Return the paths that differ, or that only one of the two has."""
    return tuple(name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name))


# -- what no checkpoint holds -----------------------------------------------------------------------------------------


def unsaved(trainer: Run) -> Iterator[tuple[str, str]]:
    """Yield (path, digest) of every value of the user's that the task's `state_dict` does not hold."""
    frozen_tensors = [tensor for held in kept_by_hash(trainer.task).values() for tensor in held.tensors().values()]
    saved = (*trainer.task.state_dict(keep_vars=True).values(), *frozen_tensors)
    known = {id(value) for value in saved if isinstance(value, Tensor)}
    roots = hidden.roots(trainer)
    for path, value in walk(roots):
        if path in roots:
            continue
        if isinstance(value, Tensor):
            is_made = value.grad_fn is not None or value.is_inference()  # by the last forward
            if id(value) not in known and not is_made:
                yield path, _sampled(value)
        elif isinstance(value, np.ndarray):
            yield path, _sampled(value)
        elif isinstance(value, (list, dict)):
            yield path, f"{len(value)} items"
        elif isinstance(value, (type, ModuleType, *GENERATORS)):
            continue
        elif isinstance(value, Set) or is_atom(value):
            yield path, digest(value)


def _changed_frozen(task: nn.Module) -> dict[str, Tensor]:
    held = kept_by_hash(task).items()
    return {f"{path}.{name}": value for path, each in held for name, value in frozen_modules.changed(each).items()}


def batches(window: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yield (position, digest) of every part of every micro-batch."""
    for i, batch in enumerate(window):
        if isinstance(batch, (Mapping, list, tuple)):
            for key, part in batch.items() if isinstance(batch, Mapping) else enumerate(batch):
                yield f"micro-batch {i}, part {key!r}", digest(part)
        else:
            yield f"micro-batch {i}", digest(batch)


def _means(trainer: Run) -> Iterator[tuple[str, Any]]:
    state = trainer.means.state_dict()
    yield from state["sums"].items()
    yield from ((name, [part.tolist() for part in value]) for name, value in state["kept"].items())
    for name, value in trainer.metrics.items():
        if name.startswith(("train/", "val/")) and isinstance(value, (int, float)):
            yield name, value
    for name in ("micro", "update", "sample", "epoch", "skipped"):
        yield f"progress.{name}", getattr(trainer.progress, name)


def _branches(state: Any, path: str = "", depth: int = 3) -> Iterator[tuple[str, Any]]:
    if depth and isinstance(state, Mapping):
        for key, value in state.items():
            yield from _branches(value, f"{path}.{key}", depth - 1)
    else:
        yield path, state


def _exact(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(_exact(item) for item in value)
    return value.hex() if isinstance(value, float) else str(value)


# -- digests ----------------------------------------------------------------------------------------------------------


def digest(value: Any) -> str:
    """Return a short digest of nested tensors, arrays, plain values and objects.

    A value without attributes counts by its memory or as it is pickled, and by its type alone where neither is possible
    (an open file, a lock).
    """
    return _Digests().of(value)


def _sampled(value: Any) -> str:
    """Return a digest of a tensor or an array; of a large one, of every n-th entry."""
    size = value.numel() if isinstance(value, Tensor) else value.size
    return digest(value if size <= MAX_ENTRIES else value.reshape(-1)[:: size // MAX_ENTRIES])


class _Digests:
    """Digests of nested values; a shared value is digested once."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, str]] = {}
        "Digests by id; the value is kept too, so that no other value gets its id."
        self.open: set[int] = set()
        "The values being digested, outermost first."

    def of(self, value: Any) -> str:
        if id(value) not in self.known:
            summary = hashlib.sha256()
            for piece in self._pieces(value):
                summary.update(len(piece).to_bytes(8, "little"))  # [1, 23] is not [12, 3]
                summary.update(piece)
            self.known[id(value)] = value, summary.hexdigest()[:16]
        return self.known[id(value)][1]

    def _pieces(self, value: Any) -> Iterator[bytes | memoryview]:
        if isinstance(value, Tensor):
            yield from tensor_pieces(value)
        elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            yield f"{value.dtype.str}{value.shape}".encode()
            yield value.tobytes()
        elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            yield repr(value).encode()
        elif id(value) in self.open:
            yield b"<itself>"
        elif is_atom(value) and not isinstance(value, (Set, np.ndarray, type, ModuleType, FunctionType)):
            yield frozen(value) or type(value).__qualname__.encode()
        else:
            self.open.add(id(value))
            parts = [self.of(key) + self.of(item) for key, item in _items(value)]
            self.open.discard(id(value))
            yield f"{_kind(value)} of {len(parts)}".encode()
            # the order of a set differs between processes
            yield "".join(sorted(parts) if isinstance(value, Set) else parts).encode()


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return (name, part) of everything inside a value."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple, Set)):
        return ((None, item) for item in value)
    if isinstance(value, (type, ModuleType, FunctionType, BuiltinFunctionType)):
        return [("name", getattr(value, "__qualname__", value.__name__))]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    if isinstance(value, nn.Module):
        return value.state_dict().items()
    return getattr(value, "__dict__", {}).items()


def _kind(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "list"
    return "mapping" if isinstance(value, Mapping) else type(value).__qualname__
