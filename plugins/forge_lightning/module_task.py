"""A LightningModule as a task: its parameters, loaders and hooks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from forge.contract.frozen import move_frozen
from forge.contract.step import Step
from forge.contract.task import TaskModule
from forge.data.accumulation_windows import batch_size
from forge.errors import DataError
from forge.metrics.means import Means
from forge.metrics.torchmetrics import TaskMetrics
from forge.optim.schedule_stepping import ScheduledLR
from forge.rng import RNGState
from forge.util.frozen import frozen_in
from forge_lightning import compatibility
from forge_lightning.callbacks import Callbacks
from forge_lightning.combined_loader import CombinedTrainLoader
from forge_lightning.log_calls import EpochMeans, LogCall, Reductions
from forge_lightning.module_optimizers import OptimizerProxy
from forge_lightning.optimizer_config import SchedulerConfig
from forge_lightning.trainer_proxy import TrainerProxy

REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""Where torch stores a module's parameters, buffers and children."""
REPLACED = ("log", "log_dict", "optimizers", "lr_schedulers", "clip_gradients", "all_gather")
"""Methods of a LightningModule that forge replaces during a run."""


class ModuleTask(TaskModule):
    """A task that shares the parameters and layers of a LightningModule."""

    module: Any
    "The LightningModule."
    datamodule: Any
    "Provides loaders, in preference to the module; may be None."

    def __init__(self, module: Any, datamodule: Any = None, callbacks: Any = ()):
        super().__init__()
        compatibility.check(module)
        self.callbacks = Callbacks(callbacks)
        "Lightning's callbacks; with those of the module's configure_callbacks during a run."
        self.is_manual: bool = getattr(module, "automatic_optimization", True) is False
        "Whether the module calls backward and steps its optimizers itself."
        for registry in REGISTRIES:
            vars(self)[registry] = vars(module)[registry]
        vars(self).update(module=module, datamodule=datamodule)  # as an attribute torch would register it
        self.names: dict[str, str] = {}
        "forge's names of logged values, by the module's names."
        self.returned_metrics: set[str] = set()
        "Attributes of logged metrics. forge leaves all other metrics to the module."
        self._forget()
        self._proxy = TrainerProxy(self)
        adds = compatibility.defines(module, "configure_callbacks")
        for hook, method in (
            ("forge_backward", "on_after_backward"),
            ("forge_inspect_grads", "on_before_optimizer_step"),
            ("forge_edit_grads", "configure_gradient_clipping"),
        ):
            if not (self._hears(method) or (adds and method != "configure_gradient_clipping")):
                vars(self)[hook] = None  # no cost for hooks that are not defined
        for hook, used in {
            "forge_train_step": self.is_manual,
            "forge_micro_step": self.is_manual,
            "forge_optimizer_step": compatibility.defines(module, "optimizer_step"),
        }.items():
            if not used:
                vars(self)[hook] = None
        if self.is_manual:
            for hook in ("forge_backward", "forge_finalize_grads", "forge_inspect_grads", "forge_edit_grads"):
                vars(self)[hook] = None
        elif compatibility.defines(module, "backward"):
            vars(self)["forge_backward"] = self._own_backward

    def __dir__(self) -> list[str]:
        return sorted(set(super().__dir__()))  # torch lists what instance and class both have twice

    def _own_backward(self, step: Step, loss: Tensor) -> bool:
        raise NotImplementedError

    def _hears(self, hook: str) -> bool:
        """Whether the module, or a callback given to the adapter, defines a hook."""
        return compatibility.defines(self.module, hook) or self.callbacks.define(hook)

    def _forget(self) -> None:
        """Reset the state of one run."""
        self.is_built = False
        self.stage: str | None = None
        "The current evaluation: val, test or predict."
        self._ready: set[str] = set()
        self._has_callbacks = False
        self._schedules: list[ScheduledLR] = []
        self.own_optimizers: list[Any] = []
        "The module's optimizers."
        self.scheduler_configs: list[SchedulerConfig] = []
        self._proxies: list[OptimizerProxy] = []
        self.own_steps = 0
        "Steps that the module made itself, in manual optimization."
        self.validations = 0
        self.latest: dict[str, Any] = {}
        "Lightning's callback_metrics: the latest values by the module's names."
        self.is_over = False
        self._stops_early = False
        self.cut_short = False
        "Whether the run ended inside an epoch, which Lightning counts as one."
        self._rng: RNGState | None = None
        "The random numbers after the module was set up, as an update begins with them under Lightning."
        self._last_loss: Any = None
        self._quiet = False
        vars(self).pop("num_items", None)
        self._epoch: EpochMeans | None = None
        self._eval_means: Means | None = None
        self._eval_metrics: TaskMetrics | None = None
        "Metrics logged in this evaluation."
        self._eval_reductions = Reductions()
        self._logged: dict[str, str] = {}
        "forge's names of what evaluations logged, by the names in Lightning's callback_metrics."
        self._rng_after: RNGState | None = None
        self.fresh: dict[str, float] = {}
        "Results of an epoch or evaluation, unpublished, for the module's end hook."
        self.epoch_is_over = False
        self._loader = 0
        self._step: Step | None = None
        self._ran = (-1, -1)
        self._done = self._before = 0
        "Batches of this epoch done now, and before the last update."
        self._open: tuple[Any, Any, int] | None = None
        self._calls: list[LogCall] | None = None
        self._weight: int | Tensor = 1
        self._all_none = False
        self._mark: Any = None
        self._started = self._failed = False

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the adapter, also where the module has a layer of that name."""
        if isinstance(value, nn.Module):
            super().__setattr__(name, value)
        else:
            object.__setattr__(self, name, value)

    def get_submodule(self, target: str) -> nn.Module:
        return self.module.get_submodule(target)

    def get_parameter(self, target: str) -> nn.Parameter:
        return self.module.get_parameter(target)

    def get_buffer(self, target: str) -> Tensor:
        return self.module.get_buffer(target)

    # -- the module itself --------------------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if "module" in vars(self):  # torch sets it earlier
            self.module.training = mode

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all layers; as a fit begins it is left as it is: a layer in eval mode stays in it, as under
        Lightning."""
        if mode and self.trainer is not None and self.trainer.verb == "fit" and not self.is_built:
            return self
        self.module.train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        self.module.to(*args, **kwargs)  # the module records its device
        for held in frozen_in(self).values():
            held.module.to(*args, **kwargs)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.module._apply(fn, recurse)
        move_frozen(self, fn)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        strict = strict and getattr(self.module, "strict_loading", True)
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    # -- data ---------------------------------------------------------------------------------------------------------

    def train_loader(self) -> Any:
        """Return the `train_dataloader` of the datamodule or the module, after prepare_data and setup."""
        return self.own_loader("train")

    def val_loader(self) -> Any:
        """Return the loader of `val_dataloader`; several as a dict by number, as `fit` and `validate` accept."""
        return self.own_loader("val")

    def test_loader(self) -> Any:
        """Return the loader of `test_dataloader`."""
        return self.own_loader("test")

    def predict_loader(self) -> Any:
        """Return the loader of `predict_dataloader`."""
        return self.own_loader("predict")

    def makes(self, stage: str) -> bool:
        """Whether the datamodule or the module defines a loader for a stage."""
        return any(compatibility.defines(thing, f"{stage}_dataloader") for thing in (self.datamodule, self.module))

    def own_loader(self, stage: str) -> Any:
        """Return the loader that the datamodule or the module makes for a stage: inside a run, or for one to come."""
        fits = stage == "train" or (stage == "val" and "fit" in self._ready)
        self._set_up("fit" if fits else "validate" if stage == "val" else stage)
        method = f"{stage}_dataloader"
        source = self.datamodule if compatibility.defines(self.datamodule, method) else self.module
        if not compatibility.defines(source, method):
            raise DataError(f"{type(source).__name__} defines no {method}; pass the Trainer a loader.")
        with self._attached():
            loader = getattr(source, method)()
        if stage == "train":
            return CombinedTrainLoader(loader) if isinstance(loader, (list, tuple, dict)) else loader
        if isinstance(loader, (list, tuple)):
            return loader[0] if len(loader) == 1 else {str(i): each for i, each in enumerate(loader)}
        return loader

    def _set_up(self, stage: str) -> None:
        """Call prepare_data and setup of datamodule and module, then configure_model, once per run and stage."""
        if stage in self._ready:
            return
        with self._attached():
            for thing in (self.datamodule, self.module):
                if compatibility.defines(thing, "prepare_data"):
                    with _one_process_at_a_time(thing):
                        thing.prepare_data()
            if compatibility.defines(self.datamodule, "setup"):
                self.datamodule.setup(stage)
            self._set_up_callbacks(stage)
            if self._defines("setup"):
                self.module.setup(stage)
            if compatibility.defines(self.module, "configure_model"):
                self.module.configure_model()
        self._ready.add(stage)

    def _set_up_callbacks(self, stage: str) -> None:
        """Call setup of the callbacks, once per run and inside it: they read its intervals. Those that write
        checkpoints follow in forge_start, where its folder is known."""
        if self.trainer is not None and not self._has_callbacks:
            self._has_callbacks = True
            with self._attached():
                if self._defines("configure_callbacks"):
                    self.callbacks.attach(self.module.configure_callbacks())
                self.callbacks.call("setup", self._proxy, self.module, stage, writing=False)

    # -- hooks and replaced methods ----------------------------------------------------------------------------------

    @contextmanager
    def _attached(self) -> Iterator[None]:
        """Attach the module's Trainer and replaced methods for a call outside a run."""
        before = "log" in vars(self.module)
        self._attach()
        try:
            yield
        finally:
            if not before:
                self._detach()

    def _attach(self) -> None:
        self.module.trainer = self._proxy
        if self.datamodule is not None:
            self.datamodule.trainer = self._proxy
        for part in self._lightning_parts():
            for name in REPLACED:
                vars(part)[name] = getattr(self, f"_module_{name}")

    def _lightning_parts(self) -> list[Any]:
        """Return the module and the LightningModules in it, which log and read the Trainer too."""
        inner = [part for part in self.module.modules() if part is not self.module and compatibility.is_lightning(part)]
        return [self.module, *inner]

    def _detach(self) -> None:
        self.module.trainer = None
        if self.datamodule is not None:
            self.datamodule.trainer = None
        for part in self._lightning_parts():
            for name in REPLACED:
                vars(part).pop(name, None)

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a hook of the callbacks, then of the module if it defines it."""
        if self.callbacks:
            self.callbacks.call(method, self._proxy, self.module, *arguments)
        return self._call_module(method, *arguments)

    def _call_module(self, method: str, *arguments: Any) -> Any:
        """Call a hook of the module, if it defines it."""
        return compatibility.call(getattr(self.module, method), *arguments) if self._defines(method) else None

    def _defines(self, method: str) -> bool:
        return compatibility.defines(self.module, method)

    # -- for the stand-in of Lightning's Trainer ----------------------------------------------------------------------

    @property
    def batch_index(self) -> int:
        """The number of the current batch in its epoch."""
        raise NotImplementedError

    def optimizer_proxies(self) -> list[OptimizerProxy]:
        """Return the optimizers as `self.optimizers()` returns them."""
        raise NotImplementedError

    def manual_backward(self, loss: Tensor, *arguments: Any, **named: Any) -> Tensor:
        """Run a backward pass that the module asks for, with the hooks around it."""
        raise NotImplementedError

    def _module_all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        raise NotImplementedError

    def stop(self, reason: str) -> None:
        """Stop the run as Lightning does: after a validation and the end of the epoch."""
        raise NotImplementedError

    def lightning_checkpoint(self, weights_only: bool) -> dict[str, Any]:
        """Return the state of the run in the form of Lightning's checkpoints."""
        raise NotImplementedError

    def _count_as_one(self, batch: Any) -> int:
        """Return the size of a batch; 1 if unknown, as all that it weighs there are metrics."""
        size = batch_size(batch)
        if size is None and self.trainer is not None and self.trainer.window > 1:
            return int(super().num_items(batch))  # refuses, and says what to define
        return 1 if size is None else size


@contextmanager
def _one_process_at_a_time(thing: Any) -> Iterator[None]:
    """Run prepare_data in one process of a machine at a time, so that only the first downloads."""
    if "RANK" not in os.environ and "SLURM_PROCID" not in os.environ:
        yield
        return
    import fcntl

    name = f"forge-{os.getuid()}-{type(thing).__module__}.{type(thing).__qualname__}.lock"
    with Path(tempfile.gettempdir(), name.replace("<", "").replace(">", "")).open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield
