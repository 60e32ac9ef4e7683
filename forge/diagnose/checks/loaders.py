"""Checks of the loaders of a fit, once they are built."""

from __future__ import annotations

import logging
from typing import Any

from forge import registry
from forge.contract.run import Run
from forge.data.adapt import has_single_position, resumable_reason
from forge.errors import DataError, ForgeError, TaskError

logger = logging.getLogger("forge")


def refuse_endless(trainer: Run) -> None:
    """Refuse a fit that nothing would end."""
    endless = trainer.max_epochs is None and trainer.max_updates is None
    if endless and not any("endless" in plugin.cures for plugin in trainer.stack):
        raise ForgeError(
            "Neither max_epochs nor max_updates is set: say how long to train."
            + registry.advice("endless", " With another end, such as {}, neither is needed.")
        )


def refuse_unusable_loaders(trainer: Run) -> None:
    """Refuse several training loaders, and one loader for training and validation that cannot serve both."""
    train = trainer.loaders["train"]
    if None not in train:  # of a plugin that builds loaders: those of a user are combined
        raise DataError(f"train is a dict of loaders ({', '.join(map(str, train))}); training takes one loader.")
    inner = _innermost(train[None])
    shared = any(_innermost(loader) is inner for loader in trainer.loaders.get("val", {}).values())
    if shared and getattr(inner, "persistent_workers", False):
        raise DataError(
            "train and val are one loader with persistent workers: beginning a validation would end the training "
            "epoch. Make a loader for each."
        )
    given = trainer.given_loaders
    val = given["val"]
    each = val.values() if isinstance(val, dict) else val if isinstance(val, (list, tuple)) else ()
    if any(loader is given["train"] for loader in (val, *each)) and has_single_position(train[None]):
        raise DataError(
            f"train and val are one {type(train[None]).__name__}, which keeps its position: a validation would advance "
            "training. Make a loader for each."
        )


def tell_of_inexact_data(trainer: Run) -> None:
    """Say now, rather than after the first crash, that a saved run could not be resumed exactly on these data."""
    reason = None if trainer.hooks.forge_save is None else resumable_reason(trainer.feed.loader)
    if reason is not None and not trainer.allow_inexact and trainer.env.is_main:
        logger.warning(
            "A run over this loader cannot be continued exactly: %s Without that, one that is killed begins again, or "
            "reads its data again (allow_inexact=True, trainer.allow_inexact=true on the command line).",
            reason,
        )


def refuse_inexact_data(trainer: Run) -> None:
    """Refuse to continue a run on data that cannot be."""
    reason = resumable_reason(trainer.feed.loader)
    if reason is not None and not trainer.allow_inexact:
        raise DataError(
            f"This run cannot be continued exactly: {reason} Or set allow_inexact=True (trainer.allow_inexact=true on "
            "the command line), or begin a new run (from these weights: --weights, or fit(..., weights=...))."
        )


def refuse_plateau_without_val(trainer: Run) -> None:
    """Refuse a schedule that watches a validation metric in a fit without validation."""
    watching = any(item.monitor for entry in trainer.optimizers.entries.values() for item in entry.schedules)
    if watching and "val" not in trainer.loaders:
        raise TaskError("A ReduceLROnPlateau steps after each validation, but this fit has no val loader. Pass one.")


def _innermost(loader: Any) -> Any:
    """Return the loader inside all wrappers."""
    while hasattr(loader, "loader"):
        loader = loader.loader
    return loader
