"""Pictures of a classifier's evaluation: predictions, its worst mistakes, and the confusion matrix.

Everything stays on the device until the evaluation ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import forge
from forge.env import Env
from forge.metrics import drawing


class Looks:
    """Collects every batch of an evaluation in `add`, and draws at its end in `finish`."""

    def __init__(self, names: Sequence[str], mean: float = 0.0, std: float = 1.0, shown: int = 24, points: int = 200):
        self.names, self.mean, self.std = tuple(names), mean, std
        self.shown, self.points = shown, points
        self._counts: Tensor | None = None
        self._first: tuple[Tensor, ...] = ()
        self._worst: tuple[Tensor, ...] = ()
        self._begun = False

    @torch.compiler.disable()
    def begins(self) -> bool:
        """Return whether this is an evaluation's first batch, whose hidden layer is shown; on all ranks alike."""
        first, self._begun = not self._begun, True
        return first

    @torch.compiler.disable()  # small operations that change this object gain nothing from a graph
    def add(self, images: Tensor, labels: Tensor, logits: Tensor, hidden: Tensor | None) -> None:
        """Add a batch; `hidden` is the input of the last layer for its first images. Nothing is read from the
        device."""
        classes = len(self.names)
        sure, said = logits.float().softmax(1).max(1)
        if self._counts is None:
            self._counts = labels.new_zeros(classes * classes)
            shown = hidden.flatten(1) if hidden is not None else logits
            self._first = tuple(t[: self.points].clone() for t in (images, labels, said, shown))
        self._counts.index_add_(0, labels * classes + said, torch.ones_like(labels))
        found = (torch.where(said == labels, -1.0, sure), images, labels, said)
        if self._worst:
            found = tuple(torch.cat(pair) for pair in zip(self._worst, found, strict=True))
        worst = found[0].topk(min(self.shown, len(found[0]))).indices
        self._worst = tuple(t[worst] for t in found)

    def finish(self, env: Env) -> dict[str, Any]:
        """Return pictures and an embedding by name, and reset."""
        self._begun = False
        classes = len(self.names)
        own = (
            torch.zeros(classes * classes, dtype=torch.long, device=env.device)
            if self._counts is None
            else self._counts
        )
        counts = env.sum(own).reshape(classes, classes).cpu()
        if self._counts is None:  # a rank without batches
            return {}
        images, labels, said, hidden = (t.cpu() for t in self._first)
        sure, *mistakes = (t.cpu() for t in self._worst)
        wrong = sure >= 0
        self._counts, self._first, self._worst = None, (), ()
        names = [self.names[i] for i in labels.tolist()]
        seen: dict[str, Any] = {"embedding": forge.Embedding(hidden.float(), names, self._pixels(images))}
        if find_spec("torchvision") is None:  # missing pictures must not end a run
            return seen
        shown = slice(self.shown)
        seen["predictions"] = self._grid(images[shown], labels[shown], said[shown])
        seen["confusion"] = drawing.confusion(counts, self.names)
        if wrong.any():
            seen["mistakes"] = self._grid(*(t[wrong] for t in mistakes))
        return seen

    def _grid(self, images: Tensor, labels: Tensor, said: Tensor) -> forge.Image:
        pairs = zip(labels.tolist(), said.tolist(), strict=True)
        captions = [self.names[a] if a == b else f"{self.names[a]}\nnot {self.names[b]}" for a, b in pairs]
        return drawing.grid(self._pixels(images), captions)

    def _pixels(self, images: Tensor) -> Tensor:
        """Undo the normalisation of images."""
        return (images.float() * self.std + self.mean).clamp(0, 1)
