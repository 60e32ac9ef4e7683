"""`self.trainer` and `self.logger` of a LightningModule under forge: the supported attributes, and an error that names
any other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forge.distributed.rank_info import RankInfo
from forge.env import Env
from forge.errors import TaskError
from forge.metrics.media import Text

if TYPE_CHECKING:
    from forge.contract.run import Run
    from forge_lightning.module_task import ModuleTask


class MissingAttribute(TaskError, AttributeError):
    """An attribute of Lightning's Trainer or logger that forge does not provide."""


class TrainerProxy:
    """The attributes of Lightning's Trainer that modules use."""

    barebones = sanity_checking = fast_dev_run = False
    checkpoint_callback = early_stopping_callback = progress_bar_callback = None
    callbacks: tuple[Any, ...] = ()
    num_sanity_val_steps = 0

    def __init__(self, adapter: ModuleTask):
        self._adapter = adapter
        self.logger = LoggerProxy(adapter)
        self.loggers = [self.logger]

    def __getattr__(self, name: str) -> Any:
        raise MissingAttribute(
            f"self.trainer.{name}: forge runs this LightningModule, and its Trainer has no {name}. It has "
            f"{', '.join(sorted(n for n in dir(type(self)) if not n.startswith('_')))}; forge's own Trainer is "
            "self.trainer.forge."
        )

    @property
    def forge(self) -> Run:
        """The Trainer that runs the module."""
        if self._adapter.trainer is None:
            raise TaskError("self.trainer: no run is in progress, so the Trainer has no values yet.")
        return self._adapter.trainer

    @property
    def _env(self) -> Env | RankInfo:
        trainer = self._adapter.trainer
        return RankInfo.read() if trainer is None or not self._adapter.is_built else trainer.env

    # -- progress -----------------------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        trainer = self._adapter.trainer
        if trainer is None:
            return 0
        return trainer.progress.epoch if trainer.step is None else trainer.step.epoch

    @property
    def global_step(self) -> int:
        trainer = self._adapter.trainer
        return 0 if trainer is None else trainer.progress.update

    @property
    def is_last_batch(self) -> bool:
        step = self.forge.step
        return step is not None and step.ends_epoch and step.is_last_micro

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """The latest values, under the module's names and forge's.

        From the end of an epoch to the next batch, a name logged by step and by epoch has the epoch's value.
        """
        adapter = self._adapter
        latest = {**self.forge.metrics, **adapter.fresh}
        values = {name: torch.tensor(value) for name, value in latest.items() if isinstance(value, float)}
        own = {name: values[known] for name, known in adapter.names.items() if known in values}
        if adapter.epoch_is_over:
            own |= {name: own[f"{name}_epoch"] for name in adapter.names if f"{name}_epoch" in own}
        return {**values, **own}

    logged_metrics = callback_metrics

    # -- duration -----------------------------------------------------------------------------------------------------

    @property
    def max_epochs(self) -> int:
        return self.forge.max_epochs or -1

    @property
    def max_steps(self) -> int:
        return self.forge.max_updates or -1

    @property
    def estimated_stepping_batches(self) -> int | float:
        planned = self.forge.planned_updates
        return math.inf if planned is None else planned

    @property
    def num_training_batches(self) -> int | float:
        length = self.forge.feed.length
        return math.inf if length is None else length

    @property
    def accumulate_grad_batches(self) -> int:
        return self.forge.window

    @property
    def log_every_n_steps(self) -> int:
        return self.forge.log_every

    @property
    def should_stop(self) -> bool:
        return "stop" in self.forge.requests.open

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        if stop:
            self.forge.request_stop("trainer.should_stop was set", by=type(self.forge.task).__name__)

    # -- stage --------------------------------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        return self.forge.verb == "fit" and self._adapter.stage is None

    @property
    def validating(self) -> bool:
        return self._adapter.stage == "val"

    @property
    def testing(self) -> bool:
        return self._adapter.stage == "test"

    @property
    def predicting(self) -> bool:
        return self._adapter.stage == "predict"

    # -- environment --------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return self._env.world

    @property
    def global_rank(self) -> int:
        return self._env.rank

    @property
    def local_rank(self) -> int:
        return self._env.local_rank

    @property
    def is_global_zero(self) -> bool:
        return self._env.rank == 0

    @property
    def default_root_dir(self) -> str:
        return str(self.forge.run_dir or Path.cwd())

    @property
    def log_dir(self) -> str | None:
        return None if self.forge.run_dir is None else str(self.forge.run_dir)

    # -- parts of the run ---------------------------------------------------------------------------------------------

    @property
    def lightning_module(self) -> Any:
        return self._adapter.module

    @property
    def model(self) -> Any:
        return self._adapter.module

    @property
    def datamodule(self) -> Any:
        return self._adapter.datamodule

    @property
    def optimizers(self) -> list[Any]:
        return list(self.forge.optimizers.values())

    @property
    def train_dataloader(self) -> Any:
        return self.forge.given_loaders.get("train")

    @property
    def val_dataloaders(self) -> Any:
        return self.forge.given_loaders.get("val")


class LoggerProxy:
    """`self.logger`: passes numbers to every sink of the run."""

    def __init__(self, adapter: ModuleTask):
        self._adapter = adapter

    def __getattr__(self, name: str) -> Any:
        raise MissingAttribute(
            f"self.logger.{name}: forge runs this LightningModule, and has sinks in its stack instead of a logger. "
            "self.log and self.logger.log_metrics reach them all; a picture goes through "
            "self.trainer.forge.publish({name: forge.Image(...)})."
        )

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Publish numbers to every sink at this update; `step` is ignored."""
        if self._adapter.trainer is not None:
            self._adapter.trainer.publish(metrics)

    def log_hyperparams(self, params: Any, *arguments: Any, **named: Any) -> None:
        """Publish hyperparameters to the sinks as text."""
        values = params if isinstance(params, Mapping) else vars(params)
        if self._adapter.trainer is not None:
            table = "\n".join(f"- {name}: {value}" for name, value in values.items())
            self._adapter.trainer.publish({"hyperparameters": Text(table)})
