"""TensorBoard logging."""

from __future__ import annotations

import logging
import re
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import forge
from forge.errors import RecipeError
from forge.runs.card import card_as_markdown, make_card
from forge_plugins.tensorboard import layout, projector
from forge_plugins.tensorboard.events import (
    add_histogram,
    add_image,
    add_restart,
    add_scalars,
    add_text,
    new_file,
)
from forge_plugins.tensorboard.hyperparameters import add_end_of_session, add_hyperparameters

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger("forge")


class Tensorboard(forge.Plugin):
    """Write metrics to RUN/tensorboard; view them with `forge board`.

    Scalars (including learning rates), `forge.Image`, `forge.Text` and `forge.Histogram` are shown over updates. The
    run card is the first entry under TEXT. CUSTOM SCALARS shows training against validation for every metric that both
    have, the learning rate, and the charts declared by plugins. Hyperparameters (the options of the task, of the data,
    of the Trainer and of every plugin that can change the run) are under HPARAMS, with the latest value of every
    metric, and with success if the fit reached its end. The latest `forge.Embedding` of each name is under PROJECTOR.
    `forge board` also shows a trace in RUN/profile (`*.pt.trace.json`) if torch-tb-profiler is installed.

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
    observer = True
    cures = {"board": "-p {name}"}

    def __init__(self, *first: int, **values: Any):
        super().__init__(*first, **values)
        if self.config.flush_seconds < 0:
            raise RecipeError(f"tensorboard.flush_seconds is {self.config.flush_seconds}; it must be at least 0.")
        self._begin()

    def _begin(self) -> None:
        """Reset the state of one run."""
        self._writer: SummaryWriter | None = None
        self._failed = self._gave_up = False
        self._restores = 0
        self._card_at = 0
        self._tags: set[str] = set()
        self._layout: layout.Layout = {}
        "As it was written last."

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        self._begin()
        if _writes(trainer):
            import torch.utils.tensorboard  # noqa: F401 (slow: now rather than at the first log)

    @forge.hookimpl
    def forge_log(self, trainer: forge.Run, update: int, metrics: dict[str, Any]) -> None:
        if _writes(trainer) and not self._gave_up:
            with self._going_on():
                self._log(trainer, update, metrics)

    def _log(self, trainer: forge.Run, update: int, metrics: dict[str, Any]) -> None:
        writer = self._writer or self._open(trainer)
        if self._restores != trainer.restores:
            self._take_back(writer, trainer)
        scalars = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        if scalars:
            add_scalars(writer, scalars, update)
            if trainer.verb == "fit" and not self._tags.issuperset(scalars):
                self._tags.update(scalars)
                self._lay_out(writer, trainer, update)
        if len(scalars) == len(metrics):
            return
        for name, value in metrics.items():
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

    @forge.hookimpl
    def forge_exception(self) -> None:
        self._failed = True

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        if self._writer is None:
            return
        with self._going_on():
            try:
                if trainer.verb == "fit" and not self._failed:
                    add_end_of_session(self._writer)
            finally:
                writer, self._writer = self._writer, None
                writer.close()

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        """Return the names in use, for the layout; flush, so that points reach the disk before the checkpoint."""
        if self._writer is not None:
            with self._going_on():
                self._writer.flush()
        return {"tags": sorted(self._tags)}

    @forge.hookimpl
    def forge_load_state_dict(self, state: dict[str, Any]) -> None:
        self._tags = set(state.get("tags", ()))

    @contextmanager
    def _going_on(self) -> Generator[None]:
        """Log the first OSError and stop writing: metrics are not worth a run."""
        try:
            yield
        except OSError as error:
            self._gave_up = True
            writer, self._writer = self._writer, None
            with suppress(OSError):
                if writer is not None:
                    writer.close()
            logger.error("tensorboard: its folder cannot be written: %s. The run continues without it.", error)

    def _open(self, trainer: forge.Run) -> SummaryWriter:
        """Open a new file, which removes points of earlier files for updates that run again."""
        assert trainer.run_dir is not None
        writer = self._writer = new_file(
            trainer.run_dir / "tensorboard", first_made(trainer), self.config.flush_seconds
        )
        self._restores = trainer.restores
        if trainer.verb == "fit":
            self._add_card(writer, trainer)
            add_hyperparameters(writer, trainer.hyperparameters)
            self._begin_again(writer, trainer)
        return writer

    def _take_back(self, writer: SummaryWriter, trainer: forge.Run) -> None:
        """After a rewind, remove the points since the checkpoint."""
        self._restores, first = trainer.restores, first_made(trainer)
        assert first is not None
        add_restart(writer, first)
        if self._card_at >= first:
            self._add_card(writer, trainer)
        self._begin_again(writer, trainer)

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
        add_text(writer, "card", run_card(trainer), self._card_at)


def _writes(trainer: forge.Run) -> bool:
    return trainer.run_dir is not None and trainer.env.is_main


def first_made(trainer: forge.Run) -> int | None:
    """Return the first update that this fit makes; 0 for a new run, None for an evaluation.

    TensorBoard gets it even for a new run: it takes the first such event as the start of the run, and only later ones
    as restarts.
    """
    if trainer.verb != "fit":
        return None
    return trainer.resumed_from + 1 if trainer.resumed_from else 0


def run_card(trainer: forge.Run) -> str:
    """Return the run card as Markdown, its table as a list: TensorBoard squeezes a table's first column."""
    assert trainer.run_dir is not None
    file = trainer.run_dir / "card.md"
    card = file.read_text() if file.exists() else card_as_markdown(make_card(trainer))
    return re.sub(r"^\| (.*?) \| (.*) \|$", r"- **\1**: \2", card.replace("| | |\n|---|---|\n", ""), flags=re.MULTILINE)
