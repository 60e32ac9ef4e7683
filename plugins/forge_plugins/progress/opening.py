"""The first line of a fit: where it runs, what it trains, in which precision, and how many samples at a time."""

from __future__ import annotations

from typing import Any

from torch.nn.parameter import is_lazy

import forge
from forge.data import batch_size
from forge.runs.card import device_name
from forge.runs.wording import count, counted


def opening(trainer: forge.Run) -> str:
    """ "cpu (x86_64), 85,002 parameters trained, 0 frozen, float32, batch of 64"."""
    world = trainer.env.world
    device = device_name(trainer.env.device) + (f" and {counted(world - 1, 'other rank')}" if world > 1 else "")
    return ", ".join(filter(None, [device, _parameters(trainer), _precision(trainer), _batch(trainer)]))


def _parameters(trainer: forge.Run) -> str:
    known = [p for p in trainer.task.parameters() if not is_lazy(p)]
    frozen = sum(p.numel() for p in known if not p.requires_grad)
    return f"{count(sum(p.numel() for p in known) - frozen)} parameters trained, {count(frozen)} frozen"


def _precision(trainer: forge.Run) -> str:
    """The types of the weights, and what plugins compute in."""
    kinds = {str(p.dtype).removeprefix("torch."): None for p in trainer.task.parameters() if p.is_floating_point()}
    others = [f"{kind} by {plugin}" for plugin, kind in trainer.env.computes_in.items()]
    return " and ".join(filter(None, ["/".join(kinds), *others]))


def _batch(trainer: forge.Run) -> str:
    """The loader's batch and how many make an update; empty where it does not say."""
    loader: Any = trainer.given_loaders.get("train")
    size = getattr(loader, "batch_size", None)
    if size is None and isinstance(loader, (list, tuple)) and loader:
        size = batch_size(loader[0])
    if not isinstance(size, int):
        return ""
    return f"batch of {size}" if trainer.window == 1 else f"{trainer.window} batches of {size} an update"
