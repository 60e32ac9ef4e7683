"""Hyperparameters: a row of TensorBoard's HPARAMS page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_plugins.tensorboard.events import file_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Hyperparameter = bool | int | float | str


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
