"""A LightningModule as a task: its parameters, loaders and hooks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from forge.contract.step import Step
from forge.contract.task import TaskModule
from forge.errors import DataError
from forge.metrics.means import Means
from forge.metrics.torchmetrics import TaskMetrics
from forge.optim.schedule_stepping import ScheduledLR
from forge_lightning import compatibility
from forge_lightning.log_calls import EpochMeans, LogCall
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

    def __init__(self, module: Any, datamodule: Any = None):
        super().__init__()
        compatibility.check(module)
        for registry in REGISTRIES:
            vars(self)[registry] = vars(module)[registry]
        vars(self).update(module=module, datamodule=datamodule)  # as an attribute torch would register it
        self.names: dict[str, str] = {}
        "forge's names of logged values, by the module's names."
        self.returned_metrics: set[str] = set()
        "Attributes of logged metrics. forge leaves all other metrics to the module."
        self._forget()
        for hook, method in (
            ("forge_backward", "on_after_backward"),
            ("forge_inspect_grads", "on_before_optimizer_step"),
            ("forge_edit_grads", "configure_gradient_clipping"),
        ):
            if not compatibility.defines(module, method):
                vars(self)[hook] = None  # no cost for hooks that the module does not define

    def _forget(self) -> None:
        """Reset the state of one run."""
        self.is_built = False
        self.stage: str | None = None
        "The current evaluation: val, test or predict."
        self._ready: set[str] = set()
        self._schedules: list[ScheduledLR] = []
        self._epoch: EpochMeans | None = None
        self._eval_means: Means | None = None
        self._eval_metrics: TaskMetrics | None = None
        "Metrics logged in this evaluation."
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

    # -- the module itself --------------------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if "module" in vars(self):  # torch sets it earlier
            self.module.training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        self.module.to(*args, **kwargs)  # the module records its device
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.module._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        strict = strict and getattr(self.module, "strict_loading", True)
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    # -- data ---------------------------------------------------------------------------------------------------------

    def train_loader(self) -> Any:
        """Return the `train_dataloader` of the datamodule or the module, after prepare_data and setup."""
        loader = self._made("train_dataloader", "fit")
        if isinstance(loader, (list, tuple, dict)):
            raise DataError(f"{self._source('train_dataloader')} returned several loaders; training accepts one.")
        return loader

    def val_loader(self) -> Any:
        """Return the loader of `val_dataloader`; several as a dict by number, as `fit` and `validate` accept."""
        return self._made("val_dataloader", "fit" if "fit" in self._ready else "validate")

    def test_loader(self) -> Any:
        """Return the loader of `test_dataloader`."""
        return self._made("test_dataloader", "test")

    def predict_loader(self) -> Any:
        """Return the loader of `predict_dataloader`."""
        return self._made("predict_dataloader", "predict")

    def _made(self, method: str, stage: str) -> Any:
        self._set_up(stage)
        source = self.datamodule if compatibility.defines(self.datamodule, method) else self.module
        if not compatibility.defines(source, method):
            raise DataError(f"{self._source(method)} defines no {method}; pass the Trainer a loader.")
        with self._attached():
            loader = getattr(source, method)()
        if isinstance(loader, (list, tuple)) and method != "train_dataloader":
            return loader[0] if len(loader) == 1 else {str(i): each for i, each in enumerate(loader)}
        return loader

    def _source(self, method: str) -> str:
        return type(self.datamodule if compatibility.defines(self.datamodule, method) else self.module).__name__

    def _set_up(self, stage: str) -> None:
        """Call prepare_data and setup of datamodule and module, then configure_model, once per run and stage."""
        if stage in self._ready:
            return
        with self._attached():
            for thing in (self.datamodule, self.module):
                if compatibility.defines(thing, "prepare_data"):
                    with _one_process_at_a_time(thing):
                        thing.prepare_data()
            for thing in (self.datamodule, self.module):
                if compatibility.defines(thing, "setup"):
                    thing.setup(stage)
            if compatibility.defines(self.module, "configure_model"):
                self.module.configure_model()
        self._ready.add(stage)

    # -- hooks and replaced methods ----------------------------------------------------------------------------------

    @contextmanager
    def _attached(self) -> Iterator[None]:
        """Attach the module's Trainer and replaced methods for a call outside a run."""
        before = any(name in vars(self.module) for name in REPLACED)
        self._attach()
        try:
            yield
        finally:
            if not before:
                self._detach()

    def _attach(self) -> None:
        self.module.trainer = TrainerProxy(self)
        if self.datamodule is not None:
            self.datamodule.trainer = self.module.trainer
        for name in REPLACED:
            vars(self.module)[name] = getattr(self, f"_module_{name}")

    def _detach(self) -> None:
        self.module.trainer = None
        if self.datamodule is not None:
            self.datamodule.trainer = None
        for name in REPLACED:
            vars(self.module).pop(name, None)

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a hook of the module, if it defines it."""
        return compatibility.call(getattr(self.module, method), *arguments) if self._defines(method) else None

    def _defines(self, method: str) -> bool:
        return compatibility.defines(self.module, method)


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
