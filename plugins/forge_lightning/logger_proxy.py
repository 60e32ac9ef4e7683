"""`self.logger` of a LightningModule under forge, and its `experiment`: both pass values to every sink of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from forge.contract.run import Run
from forge.errors import TaskError
from forge.metrics.media import Histogram, Image, Text


class HasRun(Protocol):
    """A task that may be in a run."""

    trainer: Run | None
    is_built: bool


class MissingAttribute(TaskError, AttributeError):
    """An attribute of Lightning's Trainer or logger that forge does not provide."""


class LoggerProxy:
    """`self.logger`: passes numbers to every sink of the run."""

    name, version, prefix = "forge", 0, ""

    def __init__(self, adapter: HasRun):
        self._adapter = adapter
        self.experiment = ExperimentProxy(adapter)

    def __getattr__(self, name: str) -> Any:
        raise MissingAttribute(
            f"self.logger.{name}: forge runs this LightningModule, and has sinks in its stack instead of a logger. "
            "self.log and self.logger.log_metrics reach them all; a picture goes through "
            "self.trainer.forge.publish({name: forge.Image(...)})."
        )

    @property
    def save_dir(self) -> str | None:
        """The run folder."""
        run = self._adapter.trainer
        return None if run is None or run.run_dir is None else str(run.run_dir)

    log_dir = root_dir = save_dir

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Publish numbers to every sink at this update; `step` is ignored."""
        publish(self._adapter, dict(metrics))

    def log_hyperparams(self, params: Any, *arguments: Any, **named: Any) -> None:
        """Publish hyperparameters to the sinks as text."""
        values = params if isinstance(params, Mapping) else vars(params)
        table = "\n".join(f"- {name}: {value}" for name, value in values.items())
        publish(self._adapter, {"hyperparameters": Text(table)})

    def log_graph(self, *arguments: Any, **named: Any) -> None:
        """Do nothing: no sink shows graphs."""

    save = finalize = after_save_checkpoint = log_graph


class ExperimentProxy:
    """`self.logger.experiment` with TensorBoard's methods for numbers, pictures, texts and histograms."""

    def __init__(self, adapter: HasRun):
        self._adapter = adapter

    def __getattr__(self, name: str) -> Any:
        raise MissingAttribute(
            f"self.logger.experiment.{name}: forge passes add_scalar, add_scalars, add_image, add_figure, add_text and "
            "add_histogram to the sinks of the run. For others, write a plugin with forge_log."
        )

    def add_scalar(self, tag: str, scalar_value: Any, *arguments: Any, **named: Any) -> None:
        """Publish a number."""
        publish(self._adapter, {tag: float(scalar_value)})

    def add_scalars(self, main_tag: str, tag_scalar_dict: Mapping[str, Any], *arguments: Any, **named: Any) -> None:
        """Publish several numbers below one name."""
        publish(self._adapter, {f"{main_tag}/{name}": float(value) for name, value in tag_scalar_dict.items()})

    def add_image(self, tag: str, img_tensor: Any, *arguments: Any, **named: Any) -> None:
        """Publish a picture of (channels, height, width)."""
        publish(self._adapter, {tag: Image(img_tensor)})

    def add_figure(self, tag: str, figure: Any, *arguments: Any, **named: Any) -> None:
        """Publish a figure of matplotlib's as a picture."""
        import torch

        for one in figure if isinstance(figure, (list, tuple)) else [figure]:
            one.canvas.draw()
            pixels = torch.tensor(bytearray(one.canvas.buffer_rgba()), dtype=torch.uint8)
            width, height = one.canvas.get_width_height(physical=True)
            publish(self._adapter, {tag: Image(pixels.view(height, width, 4)[..., :3].permute(2, 0, 1).contiguous())})

    def add_text(self, tag: str, text_string: str, *arguments: Any, **named: Any) -> None:
        """Publish a text."""
        publish(self._adapter, {tag: Text(text_string)})

    def add_histogram(self, tag: str, values: Any, *arguments: Any, **named: Any) -> None:
        """Publish a histogram."""
        import torch

        publish(self._adapter, {tag: Histogram.of(torch.as_tensor(values))})

    def flush(self) -> None:
        """Do nothing: sinks flush themselves."""


def publish(adapter: HasRun, values: dict[str, Any]) -> None:
    """Hand values to every sink of the run, if one is in progress."""
    if adapter.trainer is not None and adapter.is_built:
        adapter.trainer.publish(values)
