"""Hyperparameters: a row of TensorBoard's HPARAMS page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import forge
from forge.contract.plugin import plugin_options
from forge.options import plain
from forge_plugins.tensorboard.events import file_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Hyperparameter = bool | int | float | str


def hyperparameters(trainer: forge.Run) -> dict[str, Hyperparameter]:
    """Return the options that can vary between runs, by their names in a recipe."""
    found: dict[str, Any] = {f"task.{key}": value for key, value in trainer.task.init_args.items()}
    data = trainer.recipe.config.get("data") if trainer.recipe is not None else None
    found |= {f"data.{key}": value for key, value in (data or {}).items()}
    found |= {f"trainer.{key}": value for key, value in trainer.settings.items()}
    for plugin in trainer.stack:
        if not plugin.observer:
            found |= {f"{plugin.name}.{key}": value for key, value in plugin_options(plugin).items()}
    return {key: _plain(value) for key, value in found.items() if value is not None}


def add_hyperparameters(writer: SummaryWriter, values: dict[str, Hyperparameter]) -> None:
    """Write hyperparameters for the HPARAMS page to this run's file; add_hparams would create a second run.

    The page finds its columns in the runs: every hyperparameter of any of them, and every scalar. A list of columns in
    one run, as add_hparams writes it, would hide those of all others.
    """
    from torch.utils.tensorboard.summary import hparams

    _, start, _ = hparams(values, {})
    file_of(writer).add_summary(start)


def add_end_of_session(writer: SummaryWriter) -> None:
    """Mark the run as a success. TensorBoard keeps the first end, so a run that may be resumed has none."""
    from torch.utils.tensorboard.summary import hparams

    _, _, end = hparams({}, {})
    file_of(writer).add_summary(end)


def _plain(value: Any) -> Hyperparameter:
    value = plain(value)
    return value if isinstance(value, (bool, int, float, str)) else str(value)
