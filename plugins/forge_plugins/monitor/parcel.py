"""Copy numbers from the device to the host as one packed tensor, without waiting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

Contents = dict[str, list[float]]
"""The numbers of each tensor, flat."""


class Parcel:
    """Many small named tensors of several senders, in one copy."""

    def __init__(self, senders: Sequence[Mapping[str, Tensor]], device: torch.device):
        self._names = [[(name, tensor.numel()) for name, tensor in sender.items()] for sender in senders]
        parts = [tensor for sender in senders for tensor in sender.values()]
        self._packed = torch.cat([_flat(part, device) for part in parts]) if parts else torch.empty(0)
        self._arrived: torch.cuda.Event | None = None
        if self._packed.is_cuda:
            pinned = torch.empty(self._packed.shape, dtype=torch.float32, pin_memory=True)
            pinned.copy_(self._packed, non_blocking=True)
            self._packed, self._arrived = pinned, torch.cuda.Event()
            self._arrived.record()
        self.here = self._arrived is None and self._packed.is_cpu
        "Whether `open` does not wait."

    def open(self) -> list[Contents]:
        """Return the contents of every sender."""
        if self._arrived is not None:
            self._arrived.synchronize()
        flat, at = self._packed.tolist(), 0
        contents: list[Contents] = []
        for names in self._names:
            contents.append({})
            for name, count in names:
                contents[-1][name] = flat[at : at + count]
                at += count
        return contents


def stacked(scalars: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return scalars of any device as one vector."""
    return torch.cat([_flat(scalar, device) for scalar in scalars])


def _flat(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.reshape(-1).to(device, torch.float32, non_blocking=True)
