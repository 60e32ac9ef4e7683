"""Input tensors at fixed addresses, filled while the device runs the previous step."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.torch_internals import foreach_copy_

SLOTS = 2
"""Batches in flight: one is copied in while another is read."""
SMALL = 2**20
"""Bytes up to which inputs are copied on the compute stream: a separate stream would cost more than it saves."""


class Inputs:
    """The input memory of a graph.

    A batch in host memory is copied from pinned memory on a side stream into one of two slots, during the previous
    replay, and from there into the graph's memory on the compute stream, which takes a few microseconds. A small batch
    is copied directly.
    """

    def __init__(self, tensors: list[Tensor], device: torch.device):
        self.device = device
        self.tensors = [torch.empty_like(tensor, device=device) for tensor in tensors]
        self._small = sum(tensor.nbytes for tensor in self.tensors) <= SMALL
        self._stream = torch.cuda.Stream(device)
        self._slots: list[Slot] = []
        self._next = 0

    def load(self, tensors: list[Tensor]) -> None:
        """Copy tensors into the graph's memory, without waiting."""
        if self._small:
            for there, here in zip(self.tensors, tensors, strict=True):
                there.copy_(_pinned(here), non_blocking=True)
        else:
            here = [tensor.is_cpu for tensor in tensors]
            there = [own for own, is_here in zip(self.tensors, here, strict=True) if not is_here]
            if there:  # written on the compute stream, so read there too
                foreach_copy_(there, [t for t, is_here in zip(tensors, here, strict=True) if not is_here])
            if any(here):
                self._load_beside(
                    [own for own, is_here in zip(self.tensors, here, strict=True) if is_here],
                    [tensor for tensor in tensors if tensor.is_cpu],
                )

    def _load_beside(self, own: list[Tensor], tensors: list[Tensor]) -> None:
        compute = torch.cuda.current_stream(self.device)
        slot = self._slot(own)
        self._stream.wait_event(slot.free)
        with torch.cuda.stream(self._stream):
            for there, here in zip(slot.tensors, tensors, strict=True):
                there.copy_(_pinned(here), non_blocking=True)
            slot.full.record(self._stream)
        compute.wait_event(slot.full)
        foreach_copy_(own, slot.tensors)
        slot.free.record(compute)

    def _slot(self, like: list[Tensor]) -> Slot:
        if len(self._slots) < SLOTS:
            self._slots.append(Slot(like))
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._next = (self._next + 1) % len(self._slots)
        return self._slots[self._next]


class Slot:
    """Memory for one batch, with events: `full` once it is copied in, `free` once it is copied on."""

    def __init__(self, like: list[Tensor]):
        self.tensors = [torch.empty_like(tensor) for tensor in like]
        self.full, self.free = torch.cuda.Event(), torch.cuda.Event()
        self.free.record()


def _pinned(tensor: Tensor) -> Tensor:
    """Return the tensor in pinned memory, from which copies do not block the host."""
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()
