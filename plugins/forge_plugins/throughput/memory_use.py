"""Memory use in bytes: parameters, gradients, optimizer and activations."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import graph
from torch.utils._pytree import tree_leaves

import forge
from forge.util.text import format_bytes


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The parts of memory at its peak; they add up to it."""

    parameters: int
    "Parameters and buffers."
    gradients: int
    optimizer: int
    activations: int | None
    "Tensors kept for backward, and on CUDA all others that live within a step; None if unknown."
    other: int
    "On CUDA: everything else held between steps, such as batches and averages of the weights."

    @property
    def peak(self) -> int:
        return self.parameters + self.gradients + self.optimizer + (self.activations or 0) + self.other

    def parts(self) -> dict[str, int]:
        named = {"parameters": self.parameters, "gradients": self.gradients, "optimizer": self.optimizer}
        if self.activations is not None:
            named["activations"] = self.activations
        return {**named, "other": self.other} if self.other else named


class Saved:
    """Measures the most bytes kept for backward at one time, inside the `with`. The tensors are unchanged.

    torch.func refuses to run under such hooks; then they are removed, and `peak` is None.
    """

    def __init__(self, task: torch.nn.Module):
        self.peak: int | None = 0
        self._now = 0
        self._held: dict[int, list[int]] = {}
        "Held storages: reference count and size."
        self._own = {_key(tensor) for tensor in (*task.parameters(), *task.buffers())}
        self._hooks = graph.saved_tensors_hooks(self._pack, _unpack)
        self._disable = graph.disable_saved_tensors_hooks
        self._entered = False

    def __enter__(self) -> Saved:
        self._hooks.__enter__()
        self._entered = True
        graph.disable_saved_tensors_hooks = self._step_aside
        return self

    def __exit__(self, *error: object) -> None:
        graph.disable_saved_tensors_hooks = self._disable
        if self._entered:
            self._entered = False
            self._hooks.__exit__(*error)

    @contextmanager
    def _step_aside(self, error_message: str) -> Generator[None]:
        on_top = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
        if self._entered and on_top is not None and on_top[0] == self._pack:
            self.__exit__(None, None, None)
            self.peak = None
        with self._disable(error_message):
            yield

    def _pack(self, tensor: Tensor) -> _Held:
        key = _key(tensor)
        if key is None or key in self._own:
            return _Held(tensor, None, self)
        held = self._held.setdefault(key, [0, tensor.untyped_storage().nbytes()])
        held[0] += 1
        if held[0] == 1:
            self._now += held[1]
            self.peak = max(self.peak or 0, self._now)
        return _Held(tensor, key, self)

    def drop(self, key: int) -> None:
        held = self._held[key]
        held[0] -= 1
        if not held[0]:
            self._now -= held[1]
            del self._held[key]


class _Held:
    """A tensor kept by the graph; uncounted when the graph drops it."""

    __slots__ = ("_key", "_saved", "tensor")

    def __init__(self, tensor: Tensor, key: int | None, saved: Saved):
        self.tensor, self._key, self._saved = tensor, key, saved

    def __del__(self) -> None:
        if self._key is not None:
            self._saved.drop(self._key)


def _unpack(held: _Held) -> Tensor:
    return held.tensor


def on_cuda(trainer: forge.Run) -> Breakdown:
    """Return the memory at the end of a step by the allocator's counters, without waiting."""
    device = trainer.env.device
    parameters, gradients, optimizer = _parameters(trainer), _gradients(trainer), _optimizer(trainer)
    peak, between_steps = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    other = max(0, min(between_steps, peak - gradients) - parameters - optimizer)
    return Breakdown(parameters, gradients, optimizer, max(0, peak - parameters - gradients - optimizer - other), other)


def on_host(trainer: forge.Run, activations: int | None) -> Breakdown:
    """Return the memory by known tensors: the host has no counters of an allocator."""
    return Breakdown(_parameters(trainer), _gradients(trainer), _optimizer(trainer), activations, 0)


def as_text(breakdown: Breakdown, device: str) -> str:
    """Return one line: the peak and its parts."""
    parts = ", ".join(f"{name} {format_bytes(number)}" for name, number in breakdown.parts().items())
    unseen = ", activations unknown (compiled code and torch.func hide them)" if breakdown.activations is None else ""
    return f"{format_bytes(breakdown.peak)} at the peak on {device}: {parts}{unseen}"


def as_markdown(breakdown: Breakdown) -> str:
    """Return a Markdown table."""
    rows = [
        f"| {name} | {format_bytes(number)} | {number / max(breakdown.peak, 1):.1%} |"
        for name, number in _rows(breakdown)
    ]
    return "\n".join(["| memory | | share |", "|---|---:|---:|", *rows])


def _rows(breakdown: Breakdown) -> list[tuple[str, int]]:
    return [*breakdown.parts().items(), ("peak", breakdown.peak)]


def _parameters(trainer: forge.Run) -> int:
    return _bytes((*trainer.task.parameters(), *trainer.task.buffers()), trainer.env.device)


def _gradients(trainer: forge.Run) -> int:
    """Return the largest of the optimizers' gradients: each has them in its own turn only."""
    return max(
        _bytes((p for p in trainer.optimizers.parameters(name) if p.requires_grad), trainer.env.device)
        for name in trainer.optimizers
    )


def _optimizer(trainer: forge.Run) -> int:
    states = [dict(optimizer.state) for optimizer in trainer.optimizers.values()]
    return _bytes((leaf for leaf in tree_leaves(states) if isinstance(leaf, Tensor)), trainer.env.device)


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Return the bytes of the tensors on the device, each counted once."""
    found = {id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors if tensor.device == device}
    return sum(found.values())


def _key(tensor: Tensor) -> int | None:
    """Return the storage of a tensor; None for tensors without one."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
