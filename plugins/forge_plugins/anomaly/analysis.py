"""Run a window again under the same conditions, watch every operation, and restore everything."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import forge
from forge.data.accumulation_windows import Feed, batch_size
from forge.rng import RNGState
from forge.snapshot.non_finite import bad_gradients, moving_buffers, not_finite
from forge.snapshot.sandbox import Owned, uncompiled, without_side_effects
from forge.torch_internals import foreach_copy_, writes
from forge.util.tensors import tensors_in
from forge_plugins.anomaly.origin import find
from forge_plugins.anomaly.value_watch import ValueWatch, bad_rows, describe


@dataclass(slots=True)
class Before:
    """The state before a window: random state, buffers, counters. Kept for every window, in the same memory."""

    buffers: list[Owned]
    copies: list[Tensor]
    rng: RNGState | None = None
    versions: list[int] = field(default_factory=list)
    had_batches: bool = False

    @classmethod
    def of(cls, task: torch.nn.Module) -> Before:
        before = cls(moving_buffers(task), [])
        before.copies = [buffer.detach().clone() for buffer in before.now]
        return before

    @property
    def now(self) -> list[Any]:
        return [owner[name] for owner, name in self.buffers]

    def keep(self, step: forge.Step) -> None:
        self.rng = RNGState.capture(step.trainer.env.device)
        if self.copies:
            foreach_copy_(self.copies, self.now)
        self.versions = versions(step.window)
        self.had_batches = step.prepared is not None

    def restore(self, device: torch.device) -> None:
        assert self.rng is not None
        self.rng.restore(device)
        if self.copies:
            with torch.no_grad():
                foreach_copy_(self.now, self.copies)


class Analysis:
    """The second run of one window. The plugin's wrapper around forge_backward fills `losses`."""

    def __init__(self, step: forge.Step, before: Before):
        self.step, self.before = step, before
        task = step.trainer.task
        sources = [(f"parameter {name}", p) for name, p in task.named_parameters()]
        sources += [(f"buffer {name}", b) for name, b in task.named_buffers()]
        sources += [(f"batch {name}", t) for micro in step.window for name, t in named_tensors(micro, "batch")]
        self.watch = ValueWatch(step, sources)
        self.losses: list[Tensor] = []
        self.edges = sample_edges(step)

    def run(self) -> dict[str, Any]:
        """Return the finding as plain data."""
        step, task = self.step, self.step.trainer.task
        finding: dict[str, Any] = {
            "update": step.index,
            "epoch": step.epoch,
            "optimizer": step.name,
            "micros": len(step.window),
            "weights": not_finite(task.named_parameters()),
            "data": [found for micro, batch in enumerate(step.window) for found in self._bad_data(micro, batch)],
        }
        with self._as_before():
            try:
                # in compiled code neither operations nor the user's lines are visible
                with self.watch.following_modules(), torch.enable_grad(), uncompiled(), self.watch:
                    step.run_window(record=False)
            except Exception as error:  # report what was found before the error
                finding["error"] = f"{type(error).__name__}: {error}"
            own = step.parameters()
            finding["losses"] = [float(loss) for loss in self.losses]
            finding["gradients"] = bad_gradients(step)
            finding["parameters"] = len(own)
            bad = [cause for loss in self.losses if (cause := self.watch.cause(loss)) is not None]
            if not bad:
                grads = [p.grad for p in own if p.grad is not None]
                bad = [cause for grad in grads if (cause := self.watch.cause(grad)) is not None]
            finding |= find(bad)
        self._name_samples(finding)
        finding["batch_changed"] = versions(step.window) != self.before.versions
        return finding

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Restore the state before the window; afterwards the state after it."""
        step, trainer = self.step, self.step.trainer
        gradients = [(p, p.grad) for p in trainer.task.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            # batches are prepared again, with the same random numbers, unless they were prepared before the window
            with without_side_effects(trainer), step.restored_after(prepare_again=not self.before.had_batches):
                self.before.restore(trainer.env.device)
                yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    # -- samples ------------------------------------------------------------------------------------------------------

    def _bad_data(self, micro: int, batch: Any) -> Iterator[dict[str, Any]]:
        """Yield the tensors of the raw batch that are not finite."""
        for name, tensor in named_tensors(batch, "batch"):
            values = describe(tensor)
            if values.get("nan") or values.get("inf"):
                rows, length = bad_rows(tensor)
                found = {"name": name, "micro": micro, **values}
                if rows is not None and length == self._size(micro):
                    found |= {"rows": rows, "samples": self._indices(micro, rows)}
                yield found

    def _name_samples(self, finding: dict[str, Any]) -> None:
        """Convert indices of a tensor to rows of the batch, if its first dimension is the batch's."""
        rows, length = finding.pop("bad_rows", None), finding.pop("length", 0)
        if finding["kind"] == "batch":
            met = next((found for found in finding["data"] if found["name"] == finding["name"]), None)
            if met is not None:
                finding |= {key: met[key] for key in ("micro", "rows", "samples") if key in met}
            finding["of"] = self._size(finding.get("micro", 0))
            return
        size = self._size(finding["micro"]) if "micro" in finding else None
        if not rows or not size or length % size:
            return
        if length != size != batch_size(self.step.window[finding["micro"]]):
            return  # samples are not the first dimension of this batch, so rows cannot be assigned
        each = length // size  # tokens of one sample are adjacent
        samples = sorted({row // each for row in rows})
        finding |= {"rows": samples, "of": size, "samples": self._indices(finding["micro"], samples)}

    def _size(self, micro: int) -> int | None:
        """Return the samples in a micro-batch: by the loader if it knows, else by the batch's shape."""
        if self.edges is None:
            return batch_size(self.step.window[micro])
        return self.edges[micro + 1] - self.edges[micro]

    def _indices(self, micro: int, rows: list[int]) -> list[int] | None:
        """Return the dataset indices of these rows, if the loader knows them."""
        ask = getattr(self.step.trainer.feed.loader, "sample_indices", None)
        if ask is None or self.edges is None:
            return None
        indices = ask(self.step.epoch, self.edges[micro], self.edges[micro + 1])
        return [int(indices[row]) for row in rows]


def named_tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch with their expressions: batch[0], batch['image']."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from named_tensors(item, f"{path}[{i}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from named_tensors(item, f"{path}[{key!r}]")


def versions(window: Any) -> list[int]:
    """Return how often each tensor of a window was written."""
    return [writes(tensor) for tensor in tensors_in(list(window))]


def sample_edges(step: forge.Step) -> list[int] | None:
    """Return the samples of the epoch before each batch of this window, and after the last; None if unknown.

    The loader's `position` comes before the shapes of its batches, whose first dimension may be time.
    """
    feed = step.trainer.feed
    if not hasattr(feed.loader, "sample_indices"):
        return None
    if (position := getattr(feed.loader, "position", None)) is not None:
        after = feed.length if step.ends_epoch else feed.batches  # at its end the feed is at the next epoch already
        if after is None:
            return None
        return [position(step.epoch, after - left) for left in range(len(step.window), -1, -1)]
    start, sizes = _counted_start(feed, step), [batch_size(batch) for batch in step.window]
    if start is None or None in sizes:
        return None
    return list(itertools.accumulate((size or 0 for size in sizes), initial=start))


def _counted_start(feed: Feed, step: forge.Step) -> int | None:
    """Return the samples of the epoch before this window, as the Trainer counted them."""
    if not step.ends_epoch:
        return feed.samples - step.samples
    known = feed.fingerprint()  # the feed is at the next epoch already
    if not {"samples", "batch_size", "drop_last"} <= known.keys():
        return None
    samples, size = known["samples"], known["batch_size"]
    return (samples // size * size if known["drop_last"] else samples) - step.samples
