"""Metrics for TensorBoard."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forge
from forge.errors import RecipeError
from forge.run import card_as_markdown, make_card, plain, plugin_options

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger("forge")

Hyperparameter = bool | int | float | str
PATIENCE = 16
"""How often to try for a file name that sorts last, an eighth of a second apart."""


class Tensorboard(forge.Plugin):
    """Write metrics to RUN/tensorboard, to be looked at with `tensorboard --logdir runs`.

    Scalars (learning rates among them), `forge.Image`, `forge.Text` and `forge.Histogram` are drawn over updates. The
    run card is under TEXT. Hyperparameters (the options of the task, of the data, of the Trainer and of every plugin
    that can change the run) are under HPARAMS with the latest value of every metric, and with success where the fit
    reached its end. A trace in RUN/profile (`*.pt.trace.json`) is found by the same command where the package
    torch-tb-profiler is installed.

    A run that is resumed or rewound goes on in the same curves: what it had drawn after the checkpoint is taken back,
    because it is made again, and what was drawn before it is on disk before the checkpoint is. TensorBoard keeps the
    first hyperparameters of a run; the run card is written again by every process that continues it.

    One log is one event, whatever the number of scalars, written by a thread. Only the main process writes, and
    without a run folder nobody does. Where the folder cannot be written (a full disk), that is logged as an error,
    once, and the run goes on without it.

    ::

        forge fit quickstart -p tensorboard trainer.log_every=5 trainer.max_epochs=3
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        flush_seconds: int = 10
        "How often what was logged reaches the disk; a killed run loses no more than this, a resumed one nothing."

    config: Config
    observer = True

    def __init__(self, *first: int, **values: Any):
        super().__init__(*first, **values)
        if self.config.flush_seconds < 0:
            raise RecipeError(f"tensorboard.flush_seconds is {self.config.flush_seconds}; it must be at least 0.")
        self._begin()

    def _begin(self) -> None:
        """What belongs to one run."""
        self._writer: SummaryWriter | None = None
        self._failed = self._gave_up = False
        self._restores = 0
        self._card_at = 0

    @forge.hookimpl
    def forge_start(self, trainer: forge.Trainer) -> None:
        self._begin()
        if _writes(trainer):
            import torch.utils.tensorboard  # noqa: F401 (slow: now rather than at the first log)

    @forge.hookimpl
    def forge_log(self, trainer: forge.Trainer, update: int, metrics: dict[str, Any]) -> None:
        if _writes(trainer) and not self._gave_up:
            with self._going_on():
                self._log(trainer, update, metrics)

    def _log(self, trainer: forge.Trainer, update: int, metrics: dict[str, Any]) -> None:
        writer = self._writer or self._open(trainer)
        if self._restores != trainer.restores:
            self._take_back(writer, trainer)
        scalars = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        if scalars:
            add_scalars(writer, scalars, update)
        if len(scalars) == len(metrics):
            return
        for name, value in metrics.items():
            if isinstance(value, forge.Image):
                add_image(writer, name, value, update)
            elif isinstance(value, forge.Text):
                add_text(writer, name, value.text, update)
            elif isinstance(value, forge.Histogram):
                add_histogram(writer, name, value, update)

    @forge.hookimpl
    def forge_exception(self) -> None:
        self._failed = True

    @forge.hookimpl
    def forge_end(self, trainer: forge.Trainer) -> None:
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
        """Nothing to keep; but what was drawn up to a checkpoint is on disk before the checkpoint is."""
        if self._writer is not None:
            with self._going_on():
                self._writer.flush()
        return {}

    @forge.hookimpl
    def forge_load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing was kept."""

    @contextmanager
    def _going_on(self) -> Generator[None]:
        """Metrics are not worth a run: the first OSError is logged, and ends the writing."""
        try:
            yield
        except OSError as error:
            self._gave_up = True
            writer, self._writer = self._writer, None
            with suppress(OSError):
                if writer is not None:
                    writer.close()
            logger.error("tensorboard: its folder cannot be written: %s. The run goes on, without it.", error)

    def _open(self, trainer: forge.Trainer) -> SummaryWriter:
        """A file of this process's own, which takes back what earlier ones drew of updates that are made again."""
        assert trainer.run_dir is not None
        writer = self._writer = new_file(
            trainer.run_dir / "tensorboard", first_made(trainer), self.config.flush_seconds
        )
        self._restores = trainer.restores
        if trainer.verb == "fit":
            self._add_card(writer, trainer)
            add_hyperparameters(writer, hyperparameters(trainer))
        return writer

    def _take_back(self, writer: SummaryWriter, trainer: forge.Trainer) -> None:
        """After a rewind: what was drawn since the checkpoint is made again."""
        self._restores, first = trainer.restores, first_made(trainer)
        assert first is not None
        add_restart(writer, first)
        if self._card_at >= first:
            self._add_card(writer, trainer)

    def _add_card(self, writer: SummaryWriter, trainer: forge.Trainer) -> None:
        """At the first update of this process, so that the next one to continue from there takes it back."""
        self._card_at = first_made(trainer) or 0
        add_text(writer, "run card", run_card(trainer), self._card_at)


def _writes(trainer: forge.Trainer) -> bool:
    return trainer.run_dir is not None and trainer.env.is_main


def first_made(trainer: forge.Trainer) -> int | None:
    """The first update that this fit makes, again where it was restored; 0 where nothing is continued.

    TensorBoard is told of it even then: it takes the first such word for the start of a run, and only what follows for
    a restart. An evaluation makes none.
    """
    if trainer.verb != "fit":
        return None
    return trainer.resumed_from + 1 if trainer.resumed_from else 0


def run_card(trainer: forge.Trainer) -> str:
    """The card of this run as Markdown."""
    assert trainer.run_dir is not None
    file = trainer.run_dir / "card.md"
    return file.read_text() if file.exists() else card_as_markdown(make_card(trainer))


def new_file(folder: Path, first: int | None, flush_seconds: int) -> SummaryWriter:
    """A writer to a new file, which takes back everything from update `first` on.

    TensorBoard reads files in the order of their names, and a name begins with the second that it was made in.
    """
    from torch.utils.tensorboard import SummaryWriter

    tries = PATIENCE
    while True:
        there = set(folder.glob("*tfevents*"))
        writer = SummaryWriter(str(folder), max_queue=1000, flush_secs=flush_seconds, purge_step=first)
        made = set(folder.glob("*tfevents*")) - there
        if not there or not made or max(made) > max(there):
            return writer
        if not tries:
            logger.warning(
                "tensorboard: %s is newer than this machine's clock: updates may be drawn twice.", max(there)
            )
            return writer
        tries -= 1
        writer.close()
        for file in made:
            file.unlink()
        time.sleep(1 / 8)  # until the next second


def add_restart(writer: SummaryWriter, first: int) -> None:
    """Have TensorBoard forget everything from update `first` on."""
    from tensorboard.compat.proto import event_pb2

    log: Any = event_pb2  # whose classes are made as it is imported
    _file(writer).add_event(log.Event(session_log=log.SessionLog(status=log.SessionLog.START)), first)


def add_scalars(writer: SummaryWriter, scalars: Mapping[str, float], update: int) -> None:
    """All scalars of a log in one event: add_scalar makes, queues and checksums one for each."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

    values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
    _file(writer).add_summary(Summary(value=values), update)


def add_image(writer: SummaryWriter, name: str, image: forge.Image, update: int) -> None:
    """A picture, and its caption as a text of its own."""
    data = image.data.detach().cpu()
    data = data.float() if data.is_floating_point() else data
    writer.add_image(name, data, update, dataformats="HW" if data.ndim == 2 else "CHW")
    if image.caption:
        add_text(writer, f"{name}/caption", image.caption, update)


def add_histogram(writer: SummaryWriter, name: str, histogram: forge.Histogram, update: int) -> None:
    """A distribution; in its sums every value counts as the middle of its bin."""
    counts, edges = histogram.counts.detach().cpu().double(), histogram.edges.detach().cpu().double()
    left, right = edges[:-1], edges[1:]
    middle = (left + right) / 2
    filled = counts.nonzero().flatten().tolist() or [0]
    writer.add_histogram_raw(
        name,
        min=left[filled[0]].item(),
        max=right[filled[-1]].item(),
        num=counts.sum().item(),
        sum=(counts * middle).sum().item(),
        sum_squares=(counts * middle**2).sum().item(),
        bucket_limits=right.tolist(),
        bucket_counts=counts.tolist(),
        global_step=update,
    )


def add_text(writer: SummaryWriter, name: str, markdown: str, update: int) -> None:
    """A text under its own name; the writer's add_text would put "/text_summary" behind it."""
    from torch.utils.tensorboard.summary import text

    summary = text(name, markdown)
    summary.value[0].tag = name
    _file(writer).add_summary(summary, update)


def hyperparameters(trainer: forge.Trainer) -> dict[str, Hyperparameter]:
    """What can be varied between runs: options by the names they have in a recipe."""
    found: dict[str, Any] = {f"task.{key}": value for key, value in trainer.task.init_args.items()}
    data = trainer.recipe.config.get("data") if trainer.recipe is not None else None
    found |= {f"data.{key}": value for key, value in (data or {}).items()}
    found |= {f"trainer.{key}": value for key, value in trainer.settings.items()}
    for plugin in trainer.stack:
        if not plugin.observer:
            found |= {f"{plugin.name}.{key}": value for key, value in plugin_options(plugin).items()}
    return {key: _plain(value) for key, value in found.items() if value is not None}


def add_hyperparameters(writer: SummaryWriter, values: dict[str, Hyperparameter]) -> None:
    """What TensorBoard's HPARAMS page reads, in this run's own file; add_hparams would make a second run of it.

    The page finds its columns in the runs: every hyperparameter of any of them, and every scalar. A list of columns in
    one run, as add_hparams writes it, would hide those of all others.
    """
    from torch.utils.tensorboard.summary import hparams

    _, start, _ = hparams(values, {})
    _file(writer).add_summary(start)


def add_end_of_session(writer: SummaryWriter) -> None:
    """The run was a success. TensorBoard keeps the first end it reads, so one that may be resumed has none."""
    from torch.utils.tensorboard.summary import hparams

    _, _, end = hparams({}, {})
    _file(writer).add_summary(end)


def _file(writer: SummaryWriter) -> Any:
    return writer._get_file_writer()


def _plain(value: Any) -> Hyperparameter:
    value = plain(value)
    return value if isinstance(value, (bool, int, float, str)) else str(value)
