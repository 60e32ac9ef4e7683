"""Witness: record every tensor of training in the order of its computation.

`compare` finds the first tensor in which the records of two runs differ, and about how much. Each tensor is recorded as
a digest, to compare bit for bit, and as a sketch of a few numbers, to estimate distances. Both are computed on the
tensor's device, so that large tensors are not copied.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.run import Run
from forge.contract.step import Step
from forge.rng import RNGState
from forge.snapshot.evidence import Line, digest, unsaved
from forge.torch_internals import pytree

KINDS = {
    "first parameter": "the initial parameter {}",
    "first buffer": "the initial buffer {}",
    "batch": "the batch ({})",
    "rng before": "the state of {}'s random numbers before the forward pass",
    "output": "the output of {}",
    "loss": "the loss ({})",
    "gradient": "the gradient of {}",
    "parameter": "the parameter {} after the update",
    "buffer": "the buffer {} after the update",
    "optimizer": "the state of {}",
    "rng": "the state of {}'s random numbers after the update",
    "order": "the next value ({})",
}
"""The kinds of values that are recorded, with their description."""
PERIOD, BUCKETS, CHUNK = 4096, 16, 1 << 22
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


class Witness(Plugin):
    """Write one line per update with all its tensors; stop the run after `updates`."""

    observer = True

    def __init__(self, path: str | Path, updates: int):
        super().__init__()
        self.name = "forge_doctor.witness"
        self.path, self.updates = Path(path), updates
        self.events: list[list[Any]] = []
        self.arrived: dict[str, None] = {}
        "Parameters in the order in which their gradients arrived."
        self.watching = False
        self.hooks: list[Any] = []

    def note(self, kind: str, name: str, value: Any) -> None:
        """Record one value; only tensors have a sketch."""
        self.events.append([kind, name, *(fingerprint(value) if isinstance(value, Tensor) else (digest(value), []))])

    @hookimpl
    def forge_start(self, trainer: Run) -> None:
        self.events, self.watching = [], False
        self._note_weights(trainer.task, "first ")
        self._write(trainer)
        for name, module in eager_modules(trainer):
            self.hooks.append(module.register_forward_hook(self._saw_output(f"{name} ({type(module).__name__})")))
        for name, parameter in trainer.task.named_parameters():
            if parameter.requires_grad:
                self.hooks.append(parameter.register_post_accumulate_grad_hook(self._saw_gradient(name)))

    @hookimpl(wrapper=True)
    def forge_train_step(self, step: Step) -> Generator[None, Any, Any]:
        if not self.events:  # with several optimizers this hook is called once for each
            for place, part in _parts(step.window):
                self.note("batch", place, part)
        self._note_rng(step.trainer, "rng before")
        self.arrived.clear()
        self.watching = True
        result = yield
        self.watching = False
        return result

    @hookimpl(wrapper=True)
    def forge_backward(self, step: Step, loss: Tensor) -> Generator[None, Any, Any]:
        turn = f"{step.name}, " if step.name else ""
        self.note("loss", f"{turn}micro-batch {step.micro}", loss)
        return (yield)

    @hookimpl
    def forge_inspect_grads(self, step: Step) -> None:
        known = {name: p.grad for name, p in step.trainer.task.named_parameters() if p.grad is not None}
        for name in [*self.arrived, *(name for name in known if name not in self.arrived)]:
            if name in known:
                self.note("gradient", name, known[name])

    @hookimpl
    def forge_boundary(self, trainer: Run) -> None:
        self._note_weights(trainer.task)
        for name, state in trainer.optimizers.state_dict(trainer.task).items():
            self.note("optimizer", f"the optimizer {name}" if name else "the optimizer", state)
        self._note_rng(trainer, "rng")
        self._write(trainer)
        if trainer.progress.update >= self.updates:
            trainer.request_stop(f"{self.updates} updates were recorded", by=self.name)

    @hookimpl
    def forge_end(self) -> None:
        for handle in self.hooks:
            handle.remove()
        self.hooks = []

    def _note_weights(self, task: nn.Module, when: str = "") -> None:
        for name, parameter in task.named_parameters():
            self.note(f"{when}parameter", name, parameter)
        for name, buffer in task.named_buffers():
            self.note(f"{when}buffer", name, buffer)

    def _note_rng(self, trainer: Run, kind: str) -> None:
        for source, state in RNGState.capture(trainer.env.device).as_tree().items():
            self.note(kind, source, state)

    def _saw_output(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.watching:
                for i, value in enumerate(pytree.tree_leaves(output)):
                    if isinstance(value, Tensor):
                        self.note("output", f"{name}[{i}]" if i else name, value)

        return hook

    def _saw_gradient(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            self.arrived[name] = None

        return hook

    def _write(self, trainer: Run) -> None:
        line = {
            "update": trainer.progress.update,
            "device": trainer.env.device.type,
            "events": self.events,
            "hidden": dict(unsaved(trainer)),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.events = []


def eager_modules(trainer: Run) -> Iterator[tuple[str, nn.Module]]:
    """Yield the task's modules by name, without compiled ones: hooks on these would change the compiled code."""
    shells = [
        module
        for module in trainer.model.modules()
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
    ]
    compiled = {id(part) for shell in shells for part in shell.modules()}
    for name, module in trainer.task.named_modules():
        if name and id(module) not in compiled:
            yield name, module


# -- comparison -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The first tensor in which two runs differ."""

    update: int
    kind: str
    name: str
    one: list[float]
    other: list[float]
    equal: int
    "The number of equal values before it."
    hidden: list[str]
    "Attributes of the task outside its state that differ as well after that update."
    shapes: str = ""
    "Both types and shapes, if those differ."

    @property
    def share(self) -> float:
        """Estimate the difference as a share of the tensor's norm; NaN if unknown."""
        if not self.one or len(self.one) != len(self.other):
            return math.nan
        size = max(math.hypot(*self.one), math.hypot(*self.other))
        apart = math.hypot(*(a - b for a, b in zip(self.one, self.other, strict=True)))
        return apart / size if size else 0.0

    def __str__(self) -> str:
        what = KINDS[self.kind].format(self.name)
        when = "before the first update" if self.update == 0 else f"at update {self.update}"
        return f"{when}, {what} is the first value that differs{self._size()}"

    def _size(self) -> str:
        if self.shapes:
            return f": {self.shapes}"
        if len(self.one) == len(self.other) == 1:
            return f": {self.one[0]!r} and {self.other[0]!r}"
        if math.isnan(self.share):
            return ""
        return f", by about {self.share:.1g} of its norm" if self.share else ", in bits that do not change its value"


def compare(one: Iterable[Line], other: Iterable[Line]) -> TensorDifference | None:
    """Return the first difference between the records of two runs; None if all values are equal."""
    equal = 0
    for ours, theirs in zip_longest(one, other):
        if ours is None or theirs is None:
            longer: Line = ours or theirs or {}
            return TensorDifference(longer["update"], "order", "one of the runs ended before it", [], [], equal, [])
        hidden = [name for name in ours["hidden"] if ours["hidden"][name] != theirs["hidden"].get(name)]
        for a, b in zip_longest(ours["events"], theirs["events"]):
            if a is None or b is None or a[:2] != b[:2]:
                names = " against ".join("nothing" if e is None else KINDS[e[0]].format(e[1]) for e in (a, b))
                return TensorDifference(ours["update"], "order", names, [], [], equal, hidden)
            if a[2] != b[2]:
                return TensorDifference(ours["update"], a[0], a[1], a[3], b[3], equal, hidden, _shapes(a[2], b[2]))
            equal += 1
    return None


def _shapes(one: str, other: str) -> str:
    kinds = [digest.rpartition(" ")[0] for digest in (one, other)]
    return " and ".join(kinds) if kinds[0] != kinds[1] else ""


# -- digests and sketches ---------------------------------------------------------------------------------------------


def fingerprint(tensor: Tensor) -> tuple[str, list[float]]:
    """Return (digest, sketch). Tensors of equal bits have equal digests; others differ, but for a chance of 2**-32.

    The sketch sums the entries with random signs into a few buckets, so that the distance of two sketches approximates
    that of their tensors. The sketch of a single number is that number.
    """
    plain = tensor.detach()
    plain = plain if plain.layout is torch.strided else plain.to_dense()
    plain = plain.cpu() if plain.device.type == "mps" else plain  # MPS has no float64
    kind = f"{plain.dtype}{tuple(plain.shape)}".removeprefix("torch.")
    flat = (torch.view_as_real(plain) if plain.is_complex() else plain).reshape(-1)
    weights, signs = _tables(flat.device)
    rows, buckets = [], torch.zeros(PERIOD, dtype=torch.float64, device=flat.device)
    for chunk in flat.split(CHUNK):
        rows.append(_row_sums(chunk.view(BITS[chunk.element_size()]).to(torch.int64), weights))
        buckets += (_in_rows(chunk.to(torch.float64)) * signs).sum(0)
    left = torch.cat(rows)
    while len(left) > 1:
        left = _row_sums(left, weights)
    sketch = flat.to(torch.float64) if len(flat) == 1 else buckets.view(-1, BUCKETS).sum(0)
    return f"{kind} {int(left.sum()) % 2**64:016x}", sketch.tolist()


def _row_sums(numbers: Tensor, weights: Tensor) -> Tensor:
    """Sum each row of PERIOD integers, modulo 2**64; integer sums do not depend on the order."""
    return (_in_rows(numbers) * weights).sum(1)


def _in_rows(flat: Tensor) -> Tensor:
    return F.pad(flat, (0, -len(flat) % PERIOD)).view(-1, PERIOD)


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random odd weights and random signs, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**62), 2**62, (PERIOD,), generator=generator) * 2 + 1
    signs = torch.randint(2, (PERIOD,), generator=generator).double() * 2 - 1
    return weights.to(device), signs.to(device)


def _parts(window: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) of every tensor and other value in every micro-batch."""
    for i, batch in enumerate(window):
        for path, part in pytree.tree_flatten_with_path(batch)[0]:
            yield f"micro-batch {i}{', batch' if path else ''}{pytree.keystr(path)}", part
