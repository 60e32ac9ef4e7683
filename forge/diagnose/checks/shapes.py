"""Checks of shapes: predictions and targets that broadcasting would pair by mistake."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.diagnose.checks.user_line import refuse, warn


def look_at_equal_shapes(loss: str, scores: Tensor, target: Tensor) -> None:
    """Refuse any difference of shapes, with a clearer message than torch's own."""
    if scores.shape != target.shape:
        fix = "y.expand_as(prediction)" if target.numel() == 1 else _one_shape(scores, target)
        refuse(f"{_got(loss, scores, target)}; they must have one shape. Use {fix}.")


def look_at_shapes(loss: str, scores: Tensor, target: Tensor) -> None:
    """Refuse predictions and targets that would be compared each with each; warn if one is repeated to fit the other,
    which may be intended. A target of one element is for all."""
    if scores.shape == target.shape or target.numel() == 1:
        return
    fix = _one_shape(scores, target)
    try:
        together = torch.broadcast_shapes(scores.shape, target.shape)
    except RuntimeError:
        refuse(f"{_got(loss, scores, target)}; they must have one shape. Use {fix}.", "broadcast_loss")
        return
    if together != scores.shape and together != target.shape:
        refuse(
            f"{_got(loss, scores, target)}: broadcasting would compare everything with everything. Give them one "
            f"shape, for instance with {fix}.",
            "broadcast_loss",
        )
    repeated, other = ("target", "prediction") if together == scores.shape else ("prediction", "target")
    warn(
        f"{_got(loss, scores, target)}: the {repeated}s are repeated to fit. If that is intended, write "
        f"{repeated}.expand_as({other}). If not, each prediction needs a target of its own.",
        "broadcast_loss",
    )


def _got(loss: str, scores: Tensor, target: Tensor) -> str:
    return f"{loss} got predictions of shape {tuple(scores.shape)} and targets of shape {tuple(target.shape)}"


def _one_shape(scores: Tensor, target: Tensor) -> str:
    if scores.shape == (*target.shape, 1):
        return "y.unsqueeze(1)" if target.ndim == 1 else "y.unsqueeze(-1)"
    return "y.view_as(prediction)" if scores.numel() == target.numel() else "targets of the predictions' shape"
