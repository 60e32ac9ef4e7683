"""Memory use in bytes: parameters, gradients, optimizer and activations."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph

import forge
from forge.torch_internals import pytree
from forge.util.tables import piped
from forge.util.tensors import storage_key
from forge.util.text import format_bytes
from forge_plugins.torch_internals import saved_tensors_hooks


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The parts of memory at its peak; they add up to it."""

    parameters: int
    "Parameters and buffers."
    gradients: int
    optimizer: int
    activations: int | None
    "Tensors kept for backward, and on CUDA all others that live within a step; None if unknown."
    other: int = 0
    "On CUDA: everything else held between steps, such as batches and averages of the weights."

    @classmethod
    def of(cls, trainer: forge.Run, activations: int | None) -> Breakdown:
        """Return the memory at the end of a step: on CUDA by the allocator's counters, without waiting, else by known
        tensors, since the host has no such counters."""
        device, optimizers = trainer.env.device, trainer.optimizers
        parameters = _bytes((*trainer.task.parameters(), *trainer.task.buffers()), device)
        # each optimizer has its gradients in its own turn only
        gradients = max(_bytes((p for p in optimizers.parameters(o) if p.requires_grad), device) for o in optimizers)
        optimizer = _bytes(pytree.tree_leaves([dict(optimizer.state) for optimizer in optimizers.values()]), device)
        if device.type != "cuda":
            return cls(parameters, gradients, optimizer, activations)
        peak, between_steps = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        other = max(0, min(between_steps, peak - gradients) - parameters - optimizer)
        rest = max(0, peak - parameters - gradients - optimizer - other)
        return cls(parameters, gradients, optimizer, rest, other)

    @property
    def peak(self) -> int:
        return self.parameters + self.gradients + self.optimizer + (self.activations or 0) + self.other

    def rows(self) -> dict[str, int]:
        """Return the parts that are known, and the peak."""
        named = {"parameters": self.parameters, "gradients": self.gradients, "optimizer": self.optimizer}
        named |= {} if self.activations is None else {"activations": self.activations}
        return named | ({"other": self.other} if self.other else {}) | {"peak": self.peak}

    def text(self, device: str) -> str:
        """Return one line: the peak and its parts."""
        parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in self.rows().items() if name != "peak")
        unseen = ", activations unknown (compiled code and torch.func hide them)" if self.activations is None else ""
        return f"{format_bytes(self.peak)} at the peak on {device}: {parts}{unseen}"

    def markdown(self) -> str:
        """Return a Markdown table."""
        whole = max(self.peak, 1)
        rows = [(name, format_bytes(n), f"{n / whole:.1%}") for name, n in self.rows().items()]
        return "\n".join(piped([("memory", "", "share"), *rows]))


class Saved:
    """Measures the most bytes kept for backward at one time, inside the `with`. The tensors are unchanged.

    torch.func refuses to run under such hooks; then they are removed, and `peak` is None.
    """

    def __init__(self, task: torch.nn.Module):
        self.peak: int | None = 0
        self._now = 0
        self._held: dict[int, list[int]] = {}
        "Held storages: reference count and size."
        self._own = {storage_key(tensor) for tensor in (*task.parameters(), *task.buffers())}
        self._hooks = graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)
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
        on_top = saved_tensors_hooks(False)
        if self._entered and on_top is not None and on_top[0] == self._pack:
            self.__exit__(None, None, None)
            self.peak = None
        with self._disable(error_message):
            yield

    def _pack(self, tensor: Tensor) -> _KeptTensor:
        key = storage_key(tensor)
        if key is None or key in self._own:
            return _KeptTensor(tensor, None, self)
        held = self._held.setdefault(key, [0, tensor.untyped_storage().nbytes()])
        held[0] += 1
        if held[0] == 1:
            self._now += held[1]
            self.peak = max(self.peak or 0, self._now)
        return _KeptTensor(tensor, key, self)

    def drop(self, key: int) -> None:
        held = self._held[key]
        held[0] -= 1
        if not held[0]:
            self._now -= held[1]
            del self._held[key]


class _KeptTensor:
    """A tensor kept by the graph; uncounted when the graph drops it."""

    __slots__ = ("_key", "_saved", "tensor")

    def __init__(self, tensor: Tensor, key: int | None, saved: Saved):
        self.tensor, self._key, self._saved = tensor, key, saved

    def __del__(self) -> None:
        if self._key is not None:
            self._saved.drop(self._key)


def _bytes(tensors: Iterable[Any], device: torch.device) -> int:
    """Return the bytes of the tensors on the device, each counted once."""
    found = {id(t): t for t in tensors if isinstance(t, Tensor) and t.device == device}
    return sum(tensor.numel() * tensor.element_size() for tensor in found.values())
