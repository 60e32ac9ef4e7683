"""Trace: what a run did at every update, small enough to write down, exact enough to compare two runs bit for bit.

`Recorder` writes a trace; `compare` names the first thing in which a second one differs, causes before effects: the
batch, the random numbers, the loss, the weights, the optimizer. Attributes of the task that no checkpoint holds are
written down too: where one of them differs together with something else, it is the likely cause.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forge.hooks import hookimpl
from forge.plugin import Plugin
from forge.seeding import RNGState
from forge.step import Step
from forge.trainer import Trainer

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
class Difference:
    """Where a trace leaves the one it should repeat."""

    update: int
    part: str
    detail: str

    def __str__(self) -> str:
        what = PARTS.get(self.part, "something that is no part of the task's state")
        return f"at update {self.update}: {what} differs ({self.detail})"


def read_trace(path: Path) -> list[Line]:
    """The lines of a trace; one that a kill has cut short is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def compare(straight: Iterable[Line], other: Iterable[Line]) -> Difference | None:
    """The first difference of `other`, whose updates may come again and again, from the straight run."""
    expected = {line["update"]: line for line in straight}
    for line in other:
        right = expected.get(line["update"])
        if right is None:
            return Difference(line["update"], "batch", "the straight run has no such update")
        odd = next((part for part in PARTS if line[part] != right[part]), None)
        if odd is not None:
            if odd != "batch" and line[HIDDEN] != right[HIDDEN]:
                odd = HIDDEN
            return Difference(line["update"], odd, _detail(line[odd], right[odd]))
    return None


def line_of(trainer: Trainer, step: Step) -> Line:
    """One update in digests; counters are in `means`, under their own names."""
    rng = RNGState.capture(trainer.env.device).as_tree()
    return {
        "update": trainer.progress.update,
        "batch": digest(step.window),
        "means": {name: _exact(value) for name, value in _means(trainer)},
        "weights": {name: digest(value) for name, value in trainer.task.state_dict().items()},
        "optimizer": {
            name or "optimizer": digest(state) for name, state in trainer.optimizers.state_dict(trainer.task).items()
        },
        "rng": {kind: digest(state) for kind, state in rng.items()},
        "hidden": dict(hidden_state(trainer.task)),
    }


def digest(value: Any) -> str:
    """A short name for a nest of tensors, numbers and strings that another nest does not share."""
    summary = hashlib.sha256()
    _feed(summary, value)
    return summary.hexdigest()[:16]


def hidden_state(task: nn.Module) -> Iterator[tuple[str, str]]:
    """Plain attributes and buffers of the task's modules that `state_dict` does not hold."""
    saved = set(task.state_dict())
    for path, module in task.named_modules():
        prefix = f"{path}." if path else ""
        for name, buffer in module._buffers.items():
            if buffer is not None and prefix + name not in saved:
                yield prefix + name, digest(buffer)
        for name, value in vars(module).items():
            if name.startswith("_") or name in ("training", "init_args", "trainer"):
                continue
            if isinstance(value, (bool, int, float, str, Tensor)):
                yield prefix + name, _exact(value) if not isinstance(value, Tensor) else digest(value)
            elif isinstance(value, (list, dict)):
                yield prefix + name, digest(value)


def _means(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    for name, value in trainer.means.state_dict()["sums"].items():
        yield name, value
    for name, value in trainer.means.state_dict()["kept"].items():
        yield name, [part.tolist() for part in value]
    for name in ("micro", "update", "sample", "epoch", "skipped"):
        yield f"progress.{name}", getattr(trainer.progress, name)


def _exact(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(_exact(item) for item in value)
    return value.hex() if isinstance(value, float) else str(value)


def _feed(summary: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        summary.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        summary.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            summary.update(repr(key).encode())
            _feed(summary, item)
    elif isinstance(value, (list, tuple)):
        summary.update(b"[")
        for item in value:
            _feed(summary, item)
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        summary.update(repr(value).encode())


def _detail(ours: Any, theirs: Any) -> str:
    if not isinstance(ours, Mapping):
        return "another digest"
    names = [name for name in theirs if ours.get(name) != theirs[name]] or [name for name in ours if name not in theirs]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
