"""Trace: digests of every update of a run, to compare two runs bit for bit.

`Recorder` writes a trace; `compare` names the first part in which a second trace differs, causes before effects: the
batch, the random numbers, the loss, the weights, the optimizer. What no checkpoint holds as a part of the task's state
is recorded too: its generators, attributes and objects, globals of its module, the dataset. One of them that differs
together with another part is the likely cause; one that differs alone has not shown yet.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.step import Step
from forge.engine.trainer import Trainer
from forge.rng import RNGState
from forge.snapshot import hidden

Line = dict[str, Any]

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


class Recorder(Plugin):
    """Write one line per update with digests of everything that a resumed run must repeat."""

    observer = True

    def __init__(self, path: str | Path, kill_at: int | None = None):
        super().__init__()
        self.name = "forge.testing.recorder"
        self.path, self.kill_at = Path(path), kill_at

    @hookimpl
    def forge_boundary(self, trainer: Trainer, step: Step) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line_of(trainer, step)) + "\n")
        if self.kill_at is not None and trainer.progress.update >= self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class TraceDifference:
    """The first difference of a trace from the one it should repeat."""

    update: int
    part: str
    detail: str
    shown: bool = True
    "Whether it has shown in a part that must be equal; what is hidden may differ alone."

    def __str__(self) -> str:
        what = PARTS.get(self.part, "an attribute outside the task's state")
        return f"at update {self.update}, in {what} ({self.detail})"


def read_trace(path: Path) -> list[Line]:
    """Read the lines of a trace; a line cut short by a kill is skipped."""
    lines: list[Line] = []
    for text in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            lines.append(json.loads(text))
    return lines


def compare(straight: Iterable[Line], other: Iterable[Line]) -> TraceDifference | None:
    """Return the first difference of `other`, which may repeat updates, from the uninterrupted run.

    A difference in what is hidden counts alone only if every other part of all updates is equal.
    """
    expected, drift = {line["update"]: line for line in straight}, None
    for line in other:
        right = expected.get(line["update"])
        if right is None:
            return TraceDifference(line["update"], "batch", "the uninterrupted run has no such update")
        part = next((part for part in PARTS if line[part] != right[part]), None)
        if part is not None:
            if part != "batch" and line[HIDDEN] != right[HIDDEN]:
                part = HIDDEN
            return TraceDifference(line["update"], part, _detail(line[part], right[part]))
        if drift is None and line[HIDDEN] != right[HIDDEN]:
            drift = TraceDifference(line["update"], HIDDEN, _detail(line[HIDDEN], right[HIDDEN]), shown=False)
    return drift


def line_of(trainer: Trainer, step: Step) -> Line:
    """Return the digests of one update; counters are in `means`, under their own names."""
    rng = RNGState.capture(trainer.env.device).as_tree()
    return {
        "update": trainer.progress.update,
        "batch": dict(_batches(step.window)),
        "means": {name: _exact(value) for name, value in _means(trainer)},
        "weights": {name: digest(value) for name, value in trainer.task.state_dict().items()},
        "optimizer": {
            name or "optimizer": digest(state) for name, state in trainer.optimizers.state_dict(trainer.task).items()
        },
        "rng": {kind: digest(state) for kind, state in rng.items()},
        "hidden": dict(all_hidden(trainer)),
    }


def digest(value: Any) -> str:
    """Return a short digest of nested tensors, arrays, plain values and objects.

    Objects without a value or attributes (a generator, an open file) count by their type alone.
    """
    return _Digests().of(value)


def all_hidden(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """Yield (path, digest) of generators, attributes and objects of the task, its module's globals, and the data."""
    for path, state in hidden.generator_states(trainer).get(hidden.HIDDEN, {}).items():
        yield path.removeprefix("task."), digest(state)
    roots = hidden.value_roots(trainer, copied=True) | {
        f"global {type(trainer.task).__module__}": _globals_of(trainer.task)
    }
    for path, value in hidden.fingerprints(roots, hidden.saved_tensors(trainer.task), _sampled, _sampled):
        if not hidden.is_a_librarys(trainer, path):
            yield path.removeprefix("task."), value


def _globals_of(task: nn.Module) -> dict[str, Any]:
    """Return the globals of the module of a task, less imports, classes and functions."""
    module = sys.modules.get(type(task).__module__)
    skipped = (type, ModuleType, FunctionType, BuiltinFunctionType)
    named = vars(module).items() if module is not None else ()
    return {name: value for name, value in named if not name.startswith("__") and not isinstance(value, skipped)}


def _sampled(value: Any) -> str:
    """Return a digest of a tensor or an array; of a large one, of every n-th entry."""
    size = value.numel() if isinstance(value, Tensor) else value.size
    return digest(value if size <= MAX_ENTRIES else value.reshape(-1)[:: size // MAX_ENTRIES])


def hidden_state(task: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (name, digest) of plain attributes and buffers of the task's modules that `state_dict` does not hold."""
    saved = set(task.state_dict())
    for path, module in task.named_modules():
        prefix = f"{path}." if path else ""
        for name, buffer in module._buffers.items():
            if buffer is not None and prefix + name not in saved:
                yield prefix + name, digest(buffer)
        for name, value in vars(module).items():
            if name.startswith("_") or name in ("training", "init_args", "trainer"):
                continue
            if isinstance(value, (bool, int, float, str)):
                yield prefix + name, _exact(value)
            elif isinstance(value, (Tensor, np.ndarray, list, tuple, Mapping, Set)) or _is_record(value):
                yield prefix + name, digest(value)


def _batches(window: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yield (position, digest) of every part of every micro-batch."""
    for i, batch in enumerate(window):
        if isinstance(batch, (Mapping, list, tuple)):
            for key, part in batch.items() if isinstance(batch, Mapping) else enumerate(batch):
                yield f"micro-batch {i}, part {key!r}", digest(part)
        else:
            yield f"micro-batch {i}", digest(batch)


def _means(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    state = trainer.means.state_dict()
    yield from state["sums"].items()
    yield from ((name, [part.tolist() for part in value]) for name, value in state["kept"].items())
    for name in ("micro", "update", "sample", "epoch", "skipped"):
        yield f"progress.{name}", getattr(trainer.progress, name)


def _exact(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(_exact(item) for item in value)
    return value.hex() if isinstance(value, float) else str(value)


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

    def _pieces(self, value: Any) -> Iterator[bytes]:
        if isinstance(value, Tensor):
            plain = value.detach().cpu().contiguous()
            yield f"{plain.dtype}{tuple(plain.shape)}".encode()
            # a dimension of no or one entry may have any stride, which a view as bytes refuses
            flat = plain.reshape(-1).as_strided((plain.numel(),), (1,))
            yield flat.view(torch.uint8).numpy().tobytes()
        elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            yield f"{value.dtype.str}{value.shape}".encode()
            yield value.tobytes()
        elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            yield repr(value).encode()
        elif id(value) in self.open:
            yield b"<itself>"
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
    if _is_record(value):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    if isinstance(value, nn.Module):
        return value.state_dict().items()
    return getattr(value, "__dict__", {}).items()


def _kind(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "list"
    return "mapping" if isinstance(value, Mapping) else type(value).__qualname__


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _detail(ours: Any, theirs: Any) -> str:
    if not isinstance(ours, Mapping):
        return "another digest"
    names = [name for name in theirs if ours.get(name) != theirs[name]] or [name for name in ours if name not in theirs]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
