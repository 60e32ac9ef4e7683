"""`self.trainer` of a LightningModule under forge: the supported attributes, and an error that names any other."""

from __future__ import annotations

import importlib
import inspect
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from forge.data.accumulation_windows import length_of
from forge.distributed.rank_info import RankInfo
from forge.env import Env
from forge.errors import TaskError
from forge.util.files import atomic_write
from forge_lightning.logger_proxy import LoggerProxy, MissingAttribute
from forge_lightning.strategy_proxy import FitLoopProxy, StateProxy, StrategyProxy, packages_of

if TYPE_CHECKING:
    from forge.contract.run import Run
    from forge_lightning.module_task import ModuleTask


class TrainerProxy:
    """What modules and callbacks read of Lightning's Trainer: what a run knows, and what Lightning derives from it."""

    barebones = fast_dev_run = received_sigterm = interrupted = False
    limit_train_batches = limit_val_batches = limit_test_batches = limit_predict_batches = 1.0
    overfit_batches = 0.0
    num_sanity_val_steps = reload_dataloaders_every_n_epochs = node_rank = 0
    num_nodes = 1
    min_epochs = min_steps = ckpt_path = gradient_clip_val = gradient_clip_algorithm = None
    enable_validation = use_distributed_sampler = True
    precision = "32-true"

    def __init__(self, adapter: ModuleTask):
        self.adapter = adapter
        self.logger = LoggerProxy(adapter)
        self.loggers = [self.logger]
        self.state = StateProxy(self)
        self.strategy = StrategyProxy(self)
        self.fit_loop = FitLoopProxy(self)
        self.packages = packages_of(adapter.module)
        self.profiler = SimpleNamespace(profile=lambda name: nullcontext(), describe=lambda: None)
        self.precision_plugin = SimpleNamespace(precision=self.precision, scaler=None)
        self.ckpt_path = None

    def __getattr__(self, name: str) -> Any:
        """Answer by Lightning's own definition, which asks for attributes that are here; else name what is missing."""
        for package in self.packages if name != "packages" else ():
            own = inspect.getattr_static(importlib.import_module(package).Trainer, name, None)
            if isinstance(own, property) and own.fget is not None:
                return own.fget(self)
        raise MissingAttribute(
            f"self.trainer.{name}: forge runs this LightningModule, and its Trainer has no {name}. It has "
            f"{', '.join(sorted({*dir(type(self)), *vars(self)} - {n for n in dir(type(self)) if n[0] == '_'}))}; "
            "forge's own Trainer is self.trainer.forge."
        )

    @property
    def forge(self) -> Run:
        """The Trainer that runs the module."""
        if self.adapter.trainer is None:
            raise TaskError("self.trainer: no run is in progress, so the Trainer has no values yet.")
        return self.adapter.trainer

    @property
    def verb(self) -> str | None:
        """fit, validate, test or predict, while it runs."""
        return None if self.adapter.trainer is None else self.adapter.trainer.verb

    @property
    def stage(self) -> str | None:
        """The evaluation in progress: val, test or predict."""
        return self.adapter.stage

    @property
    def sanity_checking(self) -> bool:
        """Whether this is a validation before the first update."""
        return self.verb == "fit" and self.stage == "val" and self.forge.progress.update == 0

    @property
    def _env(self) -> Env | RankInfo:
        trainer = self.adapter.trainer
        return RankInfo.read() if trainer is None or not self.adapter.is_built else trainer.env

    # -- progress -----------------------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        trainer = self.adapter.trainer
        if trainer is None:
            return 0
        step = None if self.adapter.is_over else trainer.step
        return trainer.progress.epoch + self.adapter.cut_short if step is None else step.epoch

    @property
    def global_step(self) -> int:
        trainer = self.adapter.trainer
        if trainer is None:
            return 0
        return self.adapter.own_steps if self.adapter.is_manual else trainer.progress.update

    @property
    def total_batches(self) -> int:
        """Batches trained on before this one, over all epochs."""
        step = self.forge.step
        inside = 0 if step is None or step.index < self.forge.progress.update else step.micro
        return self.forge.progress.micro + inside

    @property
    def is_last_batch(self) -> bool:
        step = self.forge.step
        return step is not None and step.ends_epoch and step.is_last_micro

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """The latest values, under the module's names as in Lightning, and under forge's."""
        adapter = self.adapter
        latest = {} if adapter.trainer is None else {**self.forge.metrics, **adapter.fresh}
        values = {name: torch.tensor(value) for name, value in latest.items() if isinstance(value, float)}
        return values | {name: torch.as_tensor(value) for name, value in adapter.latest.items()}

    logged_metrics = progress_bar_metrics = callback_metrics

    # -- duration -----------------------------------------------------------------------------------------------------

    max_epochs = property(lambda self: self.forge.max_epochs or -1)
    max_steps = property(lambda self: self.forge.max_updates or -1)
    max_time = property(lambda self: None)

    @property
    def estimated_stepping_batches(self) -> int | float:
        planned = self.forge.planned_updates
        return math.inf if planned is None else planned

    @property
    def num_training_batches(self) -> int | float:
        loader = self.forge.given_loaders.get("train")
        length = None if loader is None else length_of(loader)
        return math.inf if length is None else length

    num_val_batches = property(lambda self: self._lengths("val"))
    num_test_batches = property(lambda self: self._lengths("test"))
    num_predict_batches = property(lambda self: self._lengths("predict"))

    def _lengths(self, stage: str) -> list[int | float]:
        lengths = [length_of(loader) for loader in self._loaders(stage)]
        return [math.inf if length is None else length for length in lengths]

    def _loaders(self, stage: str) -> list[Any]:
        given = self.forge.given_loaders.get(stage)
        return [] if given is None else list(given.values()) if isinstance(given, dict) else [given]

    accumulate_grad_batches = property(lambda self: self.forge.window)

    @property
    def check_val_every_n_epoch(self) -> int | None:
        every = self.forge.validate_every
        return int(every.count) if every is not None and every.unit == "epoch" else None

    @property
    def val_check_interval(self) -> int | float:
        every = self.forge.validate_every
        return int(every.count) if every is not None and every.unit == "update" else 1.0

    @property
    def val_check_batch(self) -> int | float:
        interval = self.val_check_interval
        return interval if isinstance(interval, int) else self.num_training_batches

    log_every_n_steps = property(lambda self: self.forge.log_every)

    @property
    def should_stop(self) -> bool:
        return self.adapter.trainer is not None and "stop" in self.forge.requests.open

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        if stop and not self.should_stop:
            self.adapter.stop("trainer.should_stop was set")

    # -- stage --------------------------------------------------------------------------------------------------------

    training = property(lambda self: self.verb == "fit" and self.stage is None)
    validating = property(lambda self: self.stage == "val")
    testing = property(lambda self: self.stage == "test")
    predicting = property(lambda self: self.stage == "predict")
    evaluating = property(lambda self: self.stage in ("val", "test"))

    # -- environment --------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the run."""
        env = self._env
        return env.device if isinstance(env, Env) else torch.device("cpu")

    world_size = property(lambda self: self._env.world)
    global_rank = property(lambda self: self._env.rank)
    local_rank = property(lambda self: self._env.local_rank)
    is_global_zero = property(lambda self: self._env.rank == 0)
    num_devices = property(lambda self: self._env.world)
    device_ids = property(lambda self: [self._env.local_rank])
    distributed_sampler_kwargs = property(lambda self: {"num_replicas": self._env.world, "rank": self._env.rank})

    @property
    def accelerator(self) -> Any:
        return SimpleNamespace(name=lambda: self.device.type, auto_device_count=lambda: self._env.world)

    default_root_dir = property(lambda self: self.log_dir or str(Path.cwd()))

    @property
    def log_dir(self) -> str | None:
        run = self.adapter.trainer
        return None if run is None or run.run_dir is None else str(run.run_dir)

    # -- parts of the run ---------------------------------------------------------------------------------------------

    lightning_module = property(lambda self: self.adapter.module)
    model = property(lambda self: self.adapter.module)
    datamodule = property(lambda self: self.adapter.datamodule)
    optimizers = property(lambda self: self.adapter.own_optimizers)
    lr_scheduler_configs = property(lambda self: self.adapter.scheduler_configs)
    callbacks = property(lambda self: self.adapter.callbacks.all)
    train_dataloader = property(lambda self: self.forge.given_loaders.get("train"))
    val_dataloaders = property(lambda self: self._as_given("val"))
    test_dataloaders = property(lambda self: self._as_given("test"))
    predict_dataloaders = property(lambda self: self._as_given("predict"))

    def _as_given(self, stage: str) -> Any:
        given = self.forge.given_loaders.get(stage)
        return list(given.values()) if isinstance(given, dict) else given

    @property
    def _logger_connector(self) -> Any:
        every = self.forge.log_every
        due = self.forge.progress.update % every == 0
        return SimpleNamespace(should_update_logs=due, log_metrics=self.logger.log_metrics)

    # -- checkpoints of Lightning's form ------------------------------------------------------------------------------

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = False, storage_options: Any = None) -> None:
        """Write a checkpoint of Lightning's form, which `load_from_checkpoint` and Lightning's Trainer read.

        As under Lightning, all ranks call it: tensors of which each has a part are gathered."""
        state = self.adapter.lightning_checkpoint(bool(weights_only))
        if not self.is_global_zero:
            return
        path = Path(filepath)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            torch.save(state, temporary)

    def print(self, *arguments: Any, **named: Any) -> None:
        """Print on the first rank."""
        if self.is_global_zero:
            print(*arguments, **named)
