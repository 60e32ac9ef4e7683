"""Metrics: means that stay on the device until somebody reads them.

On the CPU a value is read at once (that is cheaper than keeping it). On an accelerator values are kept as they are and
reduced, packed and copied to the host together, once per log interval, without waiting: nothing in a step reads the
device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge.errors import TaskError

FOLD_AFTER = 1024
"""Kept values per metric before they are folded into one, so that memory stays flat however rarely one reads."""


@dataclass(frozen=True, slots=True)
class Image:
    """A picture to log: a tensor (3 or 1, H, W) or (H, W), floats in [0, 1] or uint8."""

    data: Tensor
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A text to log, as Markdown."""

    text: str


class Means:
    """Weighted means of scalars by name."""

    def __init__(self, device: torch.device):
        self.device = device
        self.on_host = device.type == "cpu"
        self._sums: dict[str, list[float]] = {}  # on the host: name -> [sum of value * weight, sum of weights]
        self._kept: dict[str, tuple[list[Tensor | float], list[Tensor | float]]] = {}  # on a device: values, weights

    def add(self, name: str, value: Any, weight: int | Tensor = 1) -> None:
        """Count `value` in the mean of `name`."""
        if self.on_host:
            if isinstance(value, Tensor):
                value = _item(name, value)
            if isinstance(weight, Tensor):
                weight = int(weight)
            sums = self._sums.get(name)
            if sums is None:
                self._sums[name] = [value * weight, weight]
            else:
                sums[0] += value * weight
                sums[1] += weight
            return
        values, weights = self._kept.setdefault(name, ([], []))
        values.append(_keep(name, value) if isinstance(value, Tensor) else float(value))
        weights.append(weight)
        if len(values) >= FOLD_AFTER:
            total, mass = self._reduce(values, weights)
            self._kept[name] = ([total / mass], [mass])

    def read(self) -> PendingMeans:
        """Start afresh, and hand out the means so far; on an accelerator they are on their way, not here yet."""
        if self.on_host:
            pending = PendingMeans({name: total / mass for name, (total, mass) in self._sums.items() if mass})
            self._sums = {}
            return pending
        names = list(self._kept)
        pairs = [self._reduce(*self._kept[name]) for name in names]
        self._kept = {}
        if not names:
            return PendingMeans({})
        packed = torch.stack([part for pair in pairs for part in pair])
        return PendingMeans.on_its_way(names, packed)

    def _reduce(self, values: list[Any], weights: list[Any]) -> tuple[Tensor, Tensor]:
        value, weight = self._vector(values), self._vector(weights)
        # a weight of 0 drops its value, NaN or not
        return torch.where(weight == 0, 0, value * weight).sum(), weight.sum()

    def _vector(self, items: list[Any]) -> Tensor:
        if not any(isinstance(item, Tensor) for item in items):
            return torch.tensor(items, dtype=torch.float32).to(self.device, non_blocking=True)
        scalars = [i if isinstance(i, Tensor) else torch.tensor(float(i)) for i in items]
        return torch.stack([s.to(self.device, torch.float32, non_blocking=True).reshape(()) for s in scalars])


class PendingMeans:
    """Means that have been asked for: `result()` waits for them if it must."""

    def __init__(self, values: dict[str, float]):
        self._values: dict[str, float] | None = values

    @classmethod
    def on_its_way(cls, names: list[str], packed: Tensor) -> PendingMeans:
        pending = cls({})
        pending._values = None
        pending._names = names
        cuda = packed.device.type == "cuda"
        pending._packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True) if cuda else packed
        pending._event = None
        if cuda:
            pending._packed.copy_(packed, non_blocking=True)
            pending._event = torch.cuda.Event()
            pending._event.record()
        return pending

    _names: list[str]
    _packed: Tensor
    _event: torch.cuda.Event | None

    @property
    def here(self) -> bool:
        """Whether the values are on the host without any waiting."""
        return self._values is not None

    def result(self) -> dict[str, float]:
        if self._values is None:
            if self._event is not None:
                self._event.synchronize()
            flat = self._packed.tolist()
            pairs = zip(self._names, flat[::2], flat[1::2], strict=True)
            self._values = {name: total / mass for name, total, mass in pairs if mass}
        return self._values


def check_scalars(metrics: Mapping[str, Any], where: str) -> None:
    """Refuse what cannot be averaged, by name."""
    for name, value in metrics.items():
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise TaskError(
                    f"{where} returned the metric {name!r} with shape {tuple(value.shape)}; a metric is a scalar. "
                    "Reduce it with .mean() or .sum()."
                )
        elif not isinstance(value, (int, float)):
            raise TaskError(
                f"{where} returned {type(value).__name__} for the metric {name!r}; return a number or a scalar tensor."
            )


def _item(name: str, value: Tensor) -> float:
    try:
        return value.item()
    except RuntimeError as error:
        raise TaskError(
            f"The metric {name!r} has shape {tuple(value.shape)}; a metric is a scalar. Reduce it with .mean()."
        ) from error


def _keep(name: str, value: Tensor) -> Tensor:
    """The value without its graph, safe against later changes in place (a parameter, a buffer, a view of one)."""
    if value.numel() != 1:
        _item(name, value)
    value_is_fresh = value.grad_fn is not None and not value._is_view()
    return value.detach() if value_is_fresh else value.detach().clone()
