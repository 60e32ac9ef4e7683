"""Names of metrics: `val_loss` in a LightningModule is `val/loss` in forge."""

from __future__ import annotations

import re

WORDS = {"train": "train|training", "val": "val|valid|validation", "test": "test"}
"""Usual prefixes of metric names, by stage."""


def short(name: str, stage: str) -> str:
    """Return the name without its stage prefix: `val_loss`, `val/loss` and `loss` all give `loss`."""
    match = re.fullmatch(rf"(?:{WORDS.get(stage, stage)})[_/.-](.+)", name)
    return match[1] if match else name
