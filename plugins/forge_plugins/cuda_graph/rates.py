"""Learning rates on the device, for an optimizer that runs inside a graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Rates:
    """The learning rate of each parameter group as a tensor on the device.

    Groups keep plain numbers between steps, so that schedules and logs never read the device; they hold these tensors
    only during the optimizer step.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device):
        self._optimizer, self._device = optimizer, device
        self._tensors: list[Tensor] = []
        self._written: list[float] = []

    def write(self) -> None:
        """Copy changed rates to the device, without waiting."""
        groups = self._optimizer.param_groups
        for at, group in enumerate(groups):
            rate: Any = group["lr"]
            if at == len(self._tensors):
                self._tensors.append(torch.full((), float(rate), device=self._device))
                self._written.append(float(rate))
            elif isinstance(rate, Tensor):
                if rate is not self._tensors[at]:
                    self._tensors[at].copy_(rate)
            elif rate != self._written[at]:
                self._tensors[at].fill_(rate)
                self._written[at] = rate

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Hold the tensors in the groups inside the `with`."""
        if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
            self.write()
        groups = self._optimizer.param_groups
        plain = [group["lr"] for group in groups]
        for group, tensor in zip(groups, self._tensors, strict=True):
            group["lr"] = tensor
        try:
            yield
        finally:
            for group, rate in zip(groups, plain, strict=True):
                group["lr"] = rate
