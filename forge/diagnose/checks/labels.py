"""Checks of class labels: their type, shape and range."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.diagnose.checks.user_line import refuse


def look_at_class_labels(loss: str, scores: Tensor, target: Tensor, classes: int, ignore: int) -> None:
    """Refuse labels that are not valid class indices of the scores."""
    kind = str(target.dtype).removeprefix("torch.")
    if target.is_floating_point() or target.dtype is torch.bool:
        refuse(f"{loss} got labels of type {kind}; class labels are integers. Use y.long().")
    expected = scores.shape[:1] + scores.shape[2:] if scores.ndim > 1 else scores.shape[:0]
    if target.shape == scores.shape and scores.ndim > 1:
        refuse(f"{loss} got one-hot labels of type {kind}; pass class indices: y.argmax(1).")
    if target.shape != expected:
        refuse(
            f"{loss} got scores of shape {tuple(scores.shape)} and labels of shape {tuple(target.shape)}; the labels "
            f"must have shape {tuple(expected)}."
        )
    used = target[target != ignore]
    if used.numel():
        low, high = int(used.min()), int(used.max())
        if low < 0 or high >= classes:
            refuse(
                f"{loss} got labels from {low} to {high}, but the model has {classes} outputs: labels run from 0 to "
                f"{classes - 1}. {_advice(used, low, high)}"
            )
    if target.dtype not in (torch.int64, torch.uint8):
        refuse(f"{loss} got labels of type {kind}; they must be int64. Use y.long().")


def _advice(used: Tensor, low: int, high: int) -> str:
    if low >= 0:
        return f"Renumber them, or give the last layer {high + 1} outputs."
    marks = used[used < 0].unique()
    if len(marks) == 1:  # one negative number is often padding, or "no label"
        return f"If {low} marks labels to ignore, pass ignore_index={low}; else renumber them from 0."
    return "Renumber them from 0."
