"""`self.trainer.strategy`, `.state` and the loops of a LightningModule's Trainer under forge, as far as modules and
callbacks read them."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from forge.errors import TaskError
from forge_lightning.compatibility import PACKAGES
from forge_lightning.logger_proxy import MissingAttribute

VERBS = {"fit": "FITTING", "validate": "VALIDATING", "test": "TESTING", "predict": "PREDICTING"}
STAGES = {None: "TRAINING", "val": "VALIDATING", "test": "TESTING", "predict": "PREDICTING"}


class Named:
    """A part of Lightning's Trainer: an attribute that it lacks is named in full."""

    _path = ""

    def __init__(self, trainer: Any):
        self._trainer = trainer  # a TrainerProxy

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(sorted(n for n in dir(type(self)) if not n.startswith("_")))
        raise MissingAttribute(
            f"self.trainer.{self._path}.{name}: forge runs this LightningModule, and its stand-in of Lightning's "
            f"{self._path} has no {name}. It has {known}; forge's own Trainer is self.trainer.forge."
        )


class StateProxy(Named):
    """`self.trainer.state`: which function of the Trainer runs, and in which stage it is."""

    _path = "state"

    @property
    def fn(self) -> Any:
        verb = self._trainer.verb
        return None if verb is None else self._member("TrainerFn", VERBS[verb], verb)

    @property
    def stage(self) -> Any:
        if self._trainer.verb is None:
            return None
        stage = self._trainer.stage
        return self._member("RunningStage", STAGES[stage], {None: "train", "val": "validate"}.get(stage, stage))

    @property
    def status(self) -> Any:
        running = self._trainer.verb is not None
        return self._member("TrainerStatus", "RUNNING" if running else "FINISHED", "running" if running else "finished")

    finished = property(lambda self: self._trainer.verb is None)
    stopped = property(lambda self: self._trainer.verb is None)

    def _member(self, enum: str, member: str, plain: Any) -> Any:
        """Return Lightning's own member where Lightning is installed, else its string."""
        for package in self._trainer.packages:
            states = importlib.import_module(f"{package}.trainer.states")
            return getattr(getattr(states, enum), member)
        return plain


def packages_of(module: Any) -> tuple[str, ...]:
    """Return the package of Lightning's that a module's class comes from; empty for none."""
    for cls in type(module).__mro__:
        root = cls.__module__.partition(".")[0]
        if root in PACKAGES and cls.__name__ == "LightningModule":
            return ("lightning.pytorch" if root == "lightning" else root,)
    return ()


class StrategyProxy(Named):
    """`self.trainer.strategy`: device, ranks, reductions and the backward pass of manual optimization."""

    _path = "strategy"
    handles_gradient_accumulation = False
    restore_checkpoint_after_setup = False
    launcher = None
    cluster_environment = None
    parallel_devices = None

    root_device = property(lambda self: self._trainer.device)
    lightning_module = property(lambda self: self._trainer.lightning_module)
    model = property(lambda self: self._trainer.lightning_module)
    optimizers = property(lambda self: self._trainer.optimizers)
    _lightning_optimizers = property(lambda self: self._trainer.adapter.optimizer_proxies())
    lr_scheduler_configs = property(lambda self: self._trainer.lr_scheduler_configs)
    precision_plugin = property(lambda self: self._trainer.precision_plugin)
    world_size = property(lambda self: self._trainer.world_size)
    global_rank = property(lambda self: self._trainer.global_rank)
    local_rank = property(lambda self: self._trainer.local_rank)
    node_rank = property(lambda self: self._trainer.node_rank)
    is_global_zero = property(lambda self: self._trainer.is_global_zero)
    is_distributed = property(lambda self: self._trainer.world_size > 1)

    def backward(self, loss: torch.Tensor, optimizer: Any = None, *arguments: Any, **named: Any) -> torch.Tensor:
        return self._trainer.adapter.manual_backward(loss, *arguments, **named)

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        return self._trainer.forge.env.move(batch)

    def barrier(self, name: str | None = None) -> None:
        if self._trainer.world_size > 1:
            self._trainer.forge.env.gather(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._trainer.world_size == 1 else self._trainer.forge.env.gather(obj)[src]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self._trainer.world_size == 1 or not isinstance(tensor, torch.Tensor):
            return tensor
        whole = self._trainer.forge.env.sum(tensor.clone())
        return whole if str(reduce_op).lower().endswith("sum") else whole / self._trainer.world_size

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        return self._trainer.adapter._module_all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._trainer.world_size == 1:
            return decision
        each = self._trainer.forge.env.gather(bool(decision))
        return sum(each) == len(each) if all else sum(each) > 0

    def remove_checkpoint(self, filepath: Any) -> None:
        path = Path(filepath)
        if self._trainer.is_global_zero and path.exists():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._trainer.lightning_module.state_dict()


class BatchProgress(Named):
    """Counters of batches, as of `fit_loop.epoch_loop.batch_progress`."""

    _path = "fit_loop.epoch_loop.batch_progress"

    is_last_batch = property(lambda self: self._trainer.is_last_batch)

    @property
    def current(self) -> Any:
        done = self._trainer.adapter.batch_index
        return SimpleNamespace(ready=done + 1, started=done + 1, processed=done, completed=done)

    @property
    def total(self) -> Any:
        done = self._trainer.total_batches
        return SimpleNamespace(ready=done + 1, started=done + 1, processed=done, completed=done)


class DataSource(Named):
    """`_data_source` of a loop: where its loader comes from."""

    _path = "fit_loop._data_source"

    def __init__(self, trainer: Any, stage: str):
        super().__init__(trainer)
        self._stage = stage

    instance = property(lambda self: self._trainer.forge.given_loaders.get(self._stage))

    def is_defined(self) -> bool:
        return self.instance is not None

    def is_module(self) -> bool:
        return False

    def dataloader(self) -> Any:
        return self.instance


class ValLoopProxy(Named):
    """`self.trainer.fit_loop.epoch_loop.val_loop`."""

    _path = "fit_loop.epoch_loop.val_loop"

    _has_run = property(lambda self: self._trainer.adapter.validations > 0)
    num_dataloaders = property(lambda self: len(self._trainer.num_val_batches))
    max_batches = property(lambda self: self._trainer.num_val_batches)
    _data_source = property(lambda self: DataSource(self._trainer, "val"))


class EpochLoopProxy(Named):
    """`self.trainer.fit_loop.epoch_loop`."""

    _path = "fit_loop.epoch_loop"

    batch_progress = property(lambda self: BatchProgress(self._trainer))
    global_step = property(lambda self: self._trainer.global_step)
    batch_idx = property(lambda self: self._trainer.adapter.batch_index)
    total_batch_idx = property(lambda self: self._trainer.total_batches)
    _batches_that_stepped = property(lambda self: self._trainer.forge.progress.update)
    val_loop = property(lambda self: ValLoopProxy(self._trainer))


class FitLoopProxy(Named):
    """`self.trainer.fit_loop`."""

    _path = "fit_loop"
    min_epochs = min_steps = None
    _skip_backward = False

    epoch_loop = property(lambda self: EpochLoopProxy(self._trainer))
    _data_source = property(lambda self: DataSource(self._trainer, "train"))

    @property
    def epoch_progress(self) -> Any:
        epoch = self._trainer.current_epoch
        counted = SimpleNamespace(ready=epoch + 1, started=epoch + 1, processed=epoch, completed=epoch)
        return SimpleNamespace(current=counted, total=counted)

    @property
    def max_epochs(self) -> int:
        return self._trainer.max_epochs

    @max_epochs.setter
    def max_epochs(self, epochs: int) -> None:
        raise TaskError(f"self.trainer.fit_loop.max_epochs = {epochs}: set Trainer(max_epochs=...) before the run.")

    max_steps = property(lambda self: self._trainer.max_steps)
    max_batches = property(lambda self: self._trainer.num_training_batches)
    batch_idx = property(lambda self: self._trainer.adapter.batch_index)
    total_batch_idx = property(lambda self: self._trainer.total_batches)
    restarting = property(lambda self: bool(self._trainer.forge.resumed_from))

    def _should_accumulate(self) -> bool:
        step = self._trainer.forge.step
        return step is not None and not step.is_last_micro
