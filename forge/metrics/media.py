"""Loggable objects beside numbers: images, histograms, texts and embeddings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from forge.errors import TaskError


@dataclass(frozen=True, slots=True)
class Image:
    """A picture to log: a tensor (3 or 1, H, W) or (H, W), floats in [0, 1] or uint8."""

    data: Tensor
    caption: str = ""

    def __repr__(self) -> str:
        return f"Image({tuple(self.data.shape)}, {str(self.data.dtype).removeprefix('torch.')}, {self.caption!r})"

    def _repr_png_(self) -> bytes:
        """The picture, for notebooks."""
        from forge.metrics.drawing import png

        return png(self)


@dataclass(frozen=True, slots=True)
class Histogram:
    """A distribution to log: `counts[i]` values lie between `edges[i]` and `edges[i + 1]`."""

    counts: Tensor
    edges: Tensor

    @classmethod
    def of(cls, values: Tensor, bins: int = 64) -> Histogram:
        """Return the histogram of a tensor's finite values, on its device and without synchronisation."""
        flat = values.detach().flatten().float()
        finite = torch.isfinite(flat)
        low = torch.where(finite, flat, torch.inf).amin() if flat.numel() else flat.new_zeros(())
        high = torch.where(finite, flat, -torch.inf).amax() if flat.numel() else flat.new_zeros(())
        nothing = low > high
        low, high = torch.where(nothing, 0.0, low), torch.where(nothing, 0.0, high)
        width = torch.where(high > low, (high - low) / bins, torch.ones_like(low) / bins)
        places = ((flat - low) / width).floor().clamp(0, bins - 1)
        places = torch.where(finite, places, float(bins)).long()
        counts = places.new_zeros(bins + 1).index_add_(0, places, torch.ones_like(places))[:bins]
        return cls(counts, low + width * torch.arange(bins + 1, device=flat.device))


@dataclass(frozen=True, slots=True)
class Text:
    """A text to log, as Markdown."""

    text: str


@dataclass(frozen=True, slots=True)
class Embedding:
    """Points to log: `vectors` (N, D), shown in two or three dimensions.

    `labels` has a word for each point, `images` (N, 3 or 1, H, W) a small picture: floats in [0, 1] or uint8.
    """

    vectors: Tensor
    labels: Sequence[str] = ()
    images: Tensor | None = None

    def __post_init__(self) -> None:
        if self.vectors.ndim != 2 or not self.vectors.numel():
            raise TaskError(f"forge.Embedding has vectors of shape {tuple(self.vectors.shape)}; it takes (N, D).")
        count = len(self.vectors)
        if len(self.labels) not in (0, count):
            raise TaskError(f"forge.Embedding has {count} vectors but {len(self.labels)} labels; pass one for each.")
        images = self.images
        if images is not None and (images.ndim != 4 or len(images) != count or images.shape[1] not in (1, 3)):
            raise TaskError(
                f"forge.Embedding has {count} vectors and images of shape {tuple(images.shape)}; "
                f"it takes ({count}, 3 or 1, H, W)."
            )


DRAWN = (Image, Text, Histogram, Embedding)
"""Objects for sinks that draw; all others skip them."""


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among metrics, without what is there to look at."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}


def publishable(name: str, value: Any) -> Any:
    """Return a number or one of `DRAWN` for the sinks; a tensor of one number is read."""
    if isinstance(value, DRAWN):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Real):
        return value if isinstance(value, (int, float)) else float(value)
    raise TaskError(
        f"trainer.publish got {name!r} as a {type(value).__name__}; it takes numbers, forge.Image, forge.Text, "
        "forge.Histogram and forge.Embedding."
    )


def is_diagnostic(name: str, plugins: Collection[str]) -> bool:
    """Whether a metric is under a plugin's name (`monitor/...`): for charts, not for a line on the screen."""
    head, slash, _ = name.partition("/")
    return bool(slash) and any(head == plugin.partition("@")[0] for plugin in plugins)
