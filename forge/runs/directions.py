"""Whether larger values of a metric are better, judged by its name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

Mode = Literal["min", "max"]
Value = TypeVar("Value")
HEADS = ("val", "test", "train")

LESS = {"loss", "error", "err", "nll", "perplexity", "ppl", "bpc", "mse", "mae", "rmse", "wer", "cer", "fid", "entropy"}
MORE = {"accuracy", "acc", "f1", "ap", "map", "auc", "auroc", "precision", "recall", "iou", "miou", "dice", "r2"}
MORE |= {"bleu", "rouge", "score"}


def mode_of(name: str) -> Mode | None:
    """ "min" for val/loss, "max" for val/accuracy, None where the name says neither."""
    words = set(re.split(r"[^a-z0-9]+", name.rpartition("/")[2].lower()))
    if words & LESS:
        return "min"
    return "max" if words & MORE else None


def metric_rank(name: str) -> tuple[int, str]:
    """Return a sort key: validation, test, training, then other metrics."""
    head = name.partition("/")[0]
    return (HEADS.index(head) if head in HEADS else len(HEADS)), name


def told_once(rows: Mapping[str, Value]) -> dict[str, Value]:
    """Drop the mean of an epoch where it is the value of the last log, as in a run whose epochs are logs."""
    return {
        name: value for name, value in rows.items() if not (name.endswith("_epoch") and value == rows.get(name[:-6]))
    }


def best_of(points: Iterable[tuple[int, float]], mode: Mode) -> tuple[int, float] | None:
    """Return the best finite (update, value); the earliest of equals."""
    finite = [point for point in points if math.isfinite(point[1])]
    sign = 1 if mode == "min" else -1
    return min(finite, key=lambda point: sign * point[1], default=None)
