"""Probes of order: whether a forecast sees what it forecasts, and whether positions and their order are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from forge.data.accumulation_windows import batch_size
from forge.torch_internals import pytree
from forge_doctor.findings import Finding
from forge_doctor.patient import Patient, tensors
from forge_doctor.probes.independence import again, difference, networks

FEW = 4
"""Positions that a row must have."""
MOST = 48
"""Positions that are tried one by one."""
MOST_WORDS = 256
"""Different tokens that are counted."""


def _is_ids(x: Tensor, size: int | None) -> bool:
    """Whether a tensor holds a row of ids for each sample; positions, which are alike in all rows, are none."""
    plain = x.ndim == 2 and len(x) == size and not x.is_floating_point() and x.dtype != torch.bool
    return plain and x.shape[1] >= FEW and bool((x != x[:1]).any()) and len(x.unique()) > 2


class AttentionWatch(TorchFunctionMode):
    """Notes whether positions attend to each other."""

    def __init__(self, steps: int):
        super().__init__()
        self.steps = steps
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = getattr(func, "__name__", ""), [x for x in args if isinstance(x, Tensor)]
        if name == "scaled_dot_product_attention" and len(given) > 1:
            self.seen |= given[0].shape[-2] == given[1].shape[-2] == self.steps
        elif name in ("multi_head_attention_forward", "_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
            self.seen = True
        elif "softmax" in name and given:
            self.seen |= given[0].ndim > 2 and given[0].shape[-2:] == (self.steps, self.steps)
        return func(*args, **(kwargs or {}))


def permuted(patient: Patient) -> Iterator[Finding]:
    """Tokens that attend to each other in no order: a permutation of them must change the result."""
    batch = patient.val_batches[0] if patient.can_validate else patient.batches[0]
    size = batch_size(batch)
    task = patient.clone().eval()
    for call in networks(patient, task, batch):
        wide = [x for x in tensors((call.args, call.kwargs)) if x.ndim == 2 and len(x) == size]
        ids = [x for x in wide if _is_ids(x, size)]
        if len(ids) != 1 or any(x.shape == ids[0].shape and not bool((x != x[:1]).any()) for x in wide):
            continue
        if _repeats(ids[0]) < 0.3:  # a set has each of its items once
            continue
        steps = ids[0].shape[1]
        watch = AttentionWatch(steps)
        with watch:
            before = again(task, call, call.args, call.kwargs)
        if not watch.seen:
            continue
        order = torch.randperm(steps, generator=torch.Generator().manual_seed(1)).to(ids[0].device)
        move = lambda x, order=order, ids=ids: x[:, order] if _is_like(x, ids[0]) else x  # noqa: E731
        after = again(task, call, *pytree.tree_map(move, (call.args, call.kwargs)))
        pairs = [(x, y) for x, y in zip(before, after, strict=True) if x.is_floating_point() and x.ndim > 1]
        if pairs and all(_is_alike(x, y, order) for x, y in pairs):
            gain = _gain_of_order(patient, ids[0], batch)
            yield Finding(
                "order_ignored",
                f"The outputs of {call.path or type(task).__name__} are the same for any order of its {steps} tokens: "
                f"attention has no positions{gain[0]}.",
                call.path or type(task).__name__,
                {"tokens": steps},
                level="warning" if gain[1] > 0.15 else "note",
            )
            return


def _gain_of_order(patient: Patient, ids: Tensor, batch: Any) -> tuple[str, float]:
    """By how much places of words tell the label better than their counts do, in a linear fit, and how to say so."""
    rows = [x for x in tensors(batch) if x.ndim and len(x) == len(ids)]
    place = next((i for i, x in enumerate(rows) if x.shape == ids.shape and torch.equal(x, ids)), None)
    labels = patient.labels
    if labels is None or place is None or len(labels) < 200 or int(ids.max()) >= MOST_WORDS:
        return "", 0.0
    words = torch.stack([sample[place] for sample in patient.samples]).cpu().clamp(0, MOST_WORDS - 1)
    counts = F.one_hot(words, MOST_WORDS).float()
    when = torch.linspace(-1, 1, words.shape[1])[:, None]
    bag = _accuracy(counts.sum(1), labels)
    ordered = _accuracy(torch.cat([counts.sum(1), (counts * when).sum(1)], 1), labels)
    said = (
        f"; a linear fit to counts of tokens is right in {bag:.0%} of the samples, one to their places in {ordered:.0%}"
    )
    return said, ordered - bag


def _accuracy(features: Tensor, labels: Tensor) -> float:
    """How often a linear fit to the first 70 % of the samples is right on the others."""
    x = torch.cat([features, torch.ones(len(features), 1)], 1).double()
    y = F.one_hot(labels, int(labels.max()) + 1).double()
    cut = int(0.7 * len(x))
    weights = torch.linalg.solve(x[:cut].T @ x[:cut] + torch.eye(x.shape[1]).double(), x[:cut].T @ y[:cut])
    return float(((x[cut:] @ weights).argmax(1) == labels[cut:]).double().mean())


def _repeats(ids: Tensor) -> float:
    """The share of rows in which an id, other than the most frequent one, stands twice."""
    padding = ids.mode().values.mode().values
    rows = [row[row != padding] for row in ids]
    return sum(len(row.unique()) < len(row) for row in rows) / len(rows)


def _is_like(x: Any, ids: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == ids.shape


def _is_alike(x: Tensor, y: Tensor, order: Tensor) -> bool:
    """Whether two outputs are the same, or the same in another order."""
    if x.ndim > 2 and x.shape[1] == len(order):
        x = x[:, order]
    return x.shape == y.shape and difference(x, y) < 1e-4
