"""Metrics for TensorBoard."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import forge
from forge.run import card_as_markdown, make_card, plain, plugin_options

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger("forge")

Hyperparameter = bool | int | float | str


class Tensorboard(forge.Plugin):
    """Write metrics to RUN/tensorboard, to be looked at with `tensorboard --logdir runs`.

    Scalars, `forge.Image` and `forge.Text` are drawn over updates. The run card is under TEXT. At the end of a fit its
    hyperparameters (the options of the task, of the data, of the Trainer and of every plugin that can change the run)
    join the final metrics under HPARAMS, in the same run. Without a run folder nothing is written. Where its
    folder cannot be written (a full disk), that is logged as an error, once, and the run goes on without it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        flush_seconds: int = 10
        "How often what was logged reaches the disk; a killed run loses no more than this."

    config: Config
    observer = True

    def __init__(self, *first: int, **values: Any):
        super().__init__(*first, **values)
        self._writer: SummaryWriter | None = None
        self._failed = False
        self._gave_up = False
        self._restores = 0

    @forge.hookimpl
    def forge_start(self, trainer: forge.Trainer) -> None:
        self._failed = self._gave_up = False
        if _writes(trainer):
            import torch.utils.tensorboard  # noqa: F401 (slow: now rather than at the first log)

    @forge.hookimpl
    def forge_log(self, trainer: forge.Trainer, update: int, metrics: dict[str, Any]) -> None:
        if _writes(trainer) and not self._gave_up:
            with self._going_on():
                self._log(trainer, update, metrics)

    def _log(self, trainer: forge.Trainer, update: int, metrics: dict[str, Any]) -> None:
        if self._writer is not None and self._restores != trainer.restores:
            self._writer.close()
            self._writer = None
        writer = self._writer or self._open(trainer)
        scalars = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        if scalars:
            add_scalars(writer, scalars, update)
        for name, value in metrics.items():
            if isinstance(value, forge.Image):
                add_image(writer, name, value, update)
            elif isinstance(value, forge.Text):
                add_text(writer, name, value.text, update)

    @forge.hookimpl
    def forge_exception(self) -> None:
        self._failed = True

    @forge.hookimpl
    def forge_end(self, trainer: forge.Trainer) -> None:
        if self._writer is None:
            return
        with self._going_on():
            try:
                if trainer.verb == "fit":
                    values = hyperparameters(trainer)
                    add_hyperparameters(self._writer, values, trainer.metrics, finished=not self._failed)
            finally:
                writer, self._writer = self._writer, None
                writer.close()

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
        from torch.utils.tensorboard import SummaryWriter

        assert trainer.run_dir is not None
        again = trainer.resumed_from
        self._restores = trainer.restores
        self._writer = SummaryWriter(
            str(trainer.run_dir / "tensorboard"),
            max_queue=1000,
            flush_secs=self.config.flush_seconds,
            purge_step=None if again is None else again + 1,  # what came after the checkpoint is made again
        )
        if trainer.verb == "fit":
            add_text(self._writer, "run card", run_card(trainer), 0)
        return self._writer


def _writes(trainer: forge.Trainer) -> bool:
    return trainer.run_dir is not None and trainer.env.is_main


def run_card(trainer: forge.Trainer) -> str:
    """The card of this run as Markdown."""
    assert trainer.run_dir is not None
    file = trainer.run_dir / "card.md"
    return file.read_text() if file.exists() else card_as_markdown(make_card(trainer))


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


def add_hyperparameters(
    writer: SummaryWriter, values: dict[str, Hyperparameter], metrics: dict[str, Any], finished: bool
) -> None:
    """What TensorBoard's HPARAMS page reads, in this run's own file; add_hparams would make a second run of it.

    The page takes each metric's value from the scalars of that name.
    """
    from torch.utils.tensorboard.summary import hparams

    scalars = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
    experiment, start, end = hparams(values, scalars)
    for summary in (experiment, start, end) if finished else (experiment, start):
        _file(writer).add_summary(summary)


def _file(writer: SummaryWriter) -> Any:
    return writer._get_file_writer()


def _plain(value: Any) -> Hyperparameter:
    value = plain(value)
    return value if isinstance(value, (bool, int, float, str)) else str(value)
