"""Names: a LightningModule says `val_loss`, forge `val/loss`."""

from __future__ import annotations

import re

WORDS = {"train": "train|training", "val": "val|valid|validation", "test": "test"}
"""How people begin the name of a metric, by stage."""


def short(name: str, stage: str) -> str:
    """The name without the stage, which forge puts before it: `val_loss`, `val/loss` and `loss` are all `loss`."""
    match = re.fullmatch(rf"(?:{WORDS.get(stage, stage)})[_/.-](.+)", name)
    return match[1] if match else name


def monitored(name: str) -> str | None:
    """What forge calls the metric of a validation that Lightning calls so; None for one of training."""
    if short(name, "train") != name:
        return None
    plain, _, loader = name.partition("/dataloader_idx_")
    return f"val/{loader}/{short(plain, 'val')}" if loader else f"val/{short(plain, 'val')}"
