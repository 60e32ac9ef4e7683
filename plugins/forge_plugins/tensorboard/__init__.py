"""TensorBoard logging."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forge
from forge.errors import RecipeError
from forge.runs.card import card_as_markdown, make_card
from forge.runs.sinks import Sink, scalars_of, writes
from forge_plugins.tensorboard import layout, projector
from forge_plugins.tensorboard.events import (
    add_end_of_session,
    add_histogram,
    add_hyperparameters,
    add_image,
    add_restart,
    add_scalars,
    add_text,
    new_file,
)

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Tensorboard(Sink):
    """Write metrics to RUN/tensorboard; view them with `tensorboard --logdir RUN`.

    Scalars (including learning rates), `forge.Image`, `forge.Text` and `forge.Histogram` are shown over updates. The
    run card is the first entry under TEXT. CUSTOM SCALARS shows training against validation for every metric that both
    have, the learning rate, and the charts declared by plugins. Hyperparameters (the options of the task, of the data,
    of the Trainer and of every plugin that can change the run) are under HPARAMS, with the latest value of every
    metric, and with success if the fit reached its end. The latest `forge.Embedding` of each name is under PROJECTOR.

    A resumed or rewound run continues the same curves: points after the checkpoint are removed, because those updates
    run again, and points before it reach the disk before the checkpoint does. TensorBoard keeps the first
    hyperparameters of a run; the run card is written again by every process that continues it.

    One log is one event, whatever the number of scalars, written by a thread. Only the main process writes, and only
    with a run folder. If the folder cannot be written (a full disk), one error is logged, and the run continues without
    it.

    ::

        forge fit quickstart -p tensorboard trainer.log_every=5 trainer.max_epochs=3
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        flush_seconds: int = 10
        "How often events are written to disk; a killed run loses at most this much, a resumed one nothing."

    config: Config

    def __init__(self, *first: int, **values: Any):
        super().__init__(*first, **values)
        if self.config.flush_seconds < 0:
            raise RecipeError(f"tensorboard.flush_seconds is {self.config.flush_seconds}; it must be at least 0.")

    def begin(self) -> None:
        super().begin()
        self._card_at = 0
        self._tags: set[str] = set()
        self._layout: layout.Layout = {}
        "As it was written last."

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        super().forge_start(trainer)
        if writes(trainer):
            import torch.utils.tensorboard  # noqa: F401 (slow: now rather than at the first log)

    def log(self, trainer: forge.Run, update: int, metrics: dict[str, Any]) -> None:
        writer, scalars = self.ready(trainer), scalars_of(metrics)
        if scalars:
            add_scalars(writer, scalars, update)
            if trainer.verb == "fit" and not self._tags.issuperset(scalars):
                self._tags.update(scalars)
                self._lay_out(writer, trainer, update)
        for name, value in metrics.items() if len(scalars) < len(metrics) else ():
            if isinstance(value, forge.Image):
                add_image(writer, name, value, update)
            elif isinstance(value, forge.Text):
                add_text(writer, name, value.text, update)
            elif isinstance(value, forge.Histogram):
                add_histogram(writer, name, value, update)
            elif isinstance(value, forge.Embedding):
                projector.write(writer.log_dir, name, value)
                add_text(writer, name, projector.as_text(value), update)

    def _lay_out(self, writer: SummaryWriter, trainer: forge.Run, update: int) -> None:
        """Write the layout if the known names change it."""
        charts = layout.make(self._tags, trainer.stack)
        if charts != self._layout:
            self._layout = charts
            layout.add(writer, charts, update)

    def close(self, trainer: forge.Run) -> None:
        try:
            if trainer.verb == "fit" and self.error is None:
                add_end_of_session(self.opened)
        finally:
            self.opened.close()

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        """Return the names in use, for the layout; flush, so that points reach the disk before the checkpoint."""
        if self.opened is not None and not self.given_up:
            with self.surviving():
                self.opened.flush()
        return {"tags": sorted(self._tags)}

    @forge.hookimpl
    def forge_load_state_dict(self, state: dict[str, Any]) -> None:
        self._tags = set(state.get("tags", ()))

    def open(self, trainer: forge.Run) -> SummaryWriter:
        """Open a new file, which removes points of earlier files for updates that run again."""
        writer = new_file(self.folder / "tensorboard", first_made(trainer), self.config.flush_seconds)
        if trainer.verb == "fit":
            self._add_card(writer, trainer)
            add_hyperparameters(writer, trainer.hyperparameters)
            self._begin_again(writer, trainer)
        return writer

    def reopen(self, trainer: forge.Run) -> SummaryWriter:
        """After a rewind, remove the points since the checkpoint."""
        writer, first = self.opened, first_made(trainer)
        assert first is not None
        add_restart(writer, first)
        if self._card_at >= first:
            self._add_card(writer, trainer)
        self._begin_again(writer, trainer)
        return writer

    def _begin_again(self, writer: SummaryWriter, trainer: forge.Run) -> None:
        """Write the layout again, and clear the projector if the fit starts from its beginning."""
        first = first_made(trainer) or 0
        self._layout = {}
        if self._tags:
            self._lay_out(writer, trainer, first)
        if not first:
            projector.clear(writer.log_dir)

    def _add_card(self, writer: SummaryWriter, trainer: forge.Run) -> None:
        """Write the card at the first update of this process, so that a process that continues there replaces it."""
        self._card_at = first_made(trainer) or 0
        add_text(writer, "card", run_card(trainer, self.folder / "card.md"), self._card_at)


def first_made(trainer: forge.Run) -> int | None:
    """Return the first update that this fit makes; 0 for a new run, None for an evaluation.

    TensorBoard gets it even for a new run: it takes the first such event as the start of the run, and only later ones
    as restarts.
    """
    if trainer.verb != "fit":
        return None
    return trainer.resumed_from + 1 if trainer.resumed_from else 0


def run_card(trainer: forge.Run, file: Path) -> str:
    """Return the run card as Markdown, its table as a list: TensorBoard squeezes a table's first column."""
    card = file.read_text() if file.exists() else card_as_markdown(make_card(trainer))
    return re.sub(r"^\| (.*?) \| (.*) \|$", r"- **\1**: \2", card.replace("| | |\n|---|---|\n", ""), flags=re.MULTILINE)
