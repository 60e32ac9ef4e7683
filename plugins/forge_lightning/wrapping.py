"""A LightningModule in a task's place: its parameters, its data, its hooks."""

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
from forge.optim.optimizers import ScheduledLR
from forge_lightning import carried
from forge_lightning.logged import EpochMeans, Logged
from forge_lightning.standing_in import StandIn

REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""Where torch keeps what a module consists of."""
SHADOWED = ("log", "log_dict", "optimizers", "lr_schedulers", "clip_gradients", "all_gather")
"""Methods of a LightningModule that forge answers while it runs it."""


class Wrapped(TaskModule):
    """To whoever looks at its parameters and layers, this task *is* the module."""

    module: Any
    "The LightningModule."
    datamodule: Any
    "Where loaders come from, before the module itself."

    def __init__(self, module: Any, datamodule: Any = None):
        super().__init__()
        carried.check(module)
        for registry in REGISTRIES:
            vars(self)[registry] = vars(module)[registry]
        vars(self).update(module=module, datamodule=datamodule)  # torch must not register it
        self.names: dict[str, str] = {}
        "What forge calls the values that the module logged, by the module's own names."
        self.returned_metrics: set[str] = set()
        "The metrics that the module has logged, by attribute. All others are its own: forge leaves them as they are."
        self._forget()
        for hook, method in (
            ("forge_backward", "on_after_backward"),
            ("forge_inspect_grads", "on_before_optimizer_step"),
            ("forge_edit_grads", "configure_gradient_clipping"),
        ):
            if not carried.defines(module, method):
                vars(self)[hook] = None  # nobody pays for what nobody uses

    def _forget(self) -> None:
        """What belongs to one run."""
        self.is_built = False
        self.stage: str | None = None
        "The evaluation under way: val, test or predict."
        self._ready: set[str] = set()
        self._schedules: list[ScheduledLR] = []
        self._epoch: EpochMeans | None = None
        self._evaluated: Means | None = None
        self._judged: TaskMetrics | None = None
        "The metrics that this evaluation has logged."
        self.fresh: dict[str, float] = {}
        "What an epoch or an evaluation came to, for the module's hook at its end: nothing of it is published yet."
        self.epoch_is_over = False
        self._loader = 0
        self._step: Step | None = None
        self._ran = (-1, -1)
        self._done = self._before = 0
        "Batches of this epoch that are done, and that were before the last update."
        self._open: tuple[Any, Any, int] | None = None
        self._calls: list[Logged] | None = None
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
        if "module" in vars(self):  # torch sets it before
            self.module.training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        self.module.to(*args, **kwargs)  # which notes its device
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
        """What `train_dataloader` of the datamodule or of the module returns, after prepare_data and setup."""
        loader = self._made("train_dataloader", "fit")
        if isinstance(loader, (list, tuple, dict)):
            raise DataError(f"{self._source('train_dataloader')} returned several loaders; training takes one.")
        return loader

    def val_loader(self) -> Any:
        """The loader of `val_dataloader`; several are a dict by number, as `fit` and `validate` take it."""
        return self._made("val_dataloader", "fit" if "fit" in self._ready else "validate")

    def test_loader(self) -> Any:
        """The loader of `test_dataloader`."""
        return self._made("test_dataloader", "test")

    def predict_loader(self) -> Any:
        """The loader of `predict_dataloader`."""
        return self._made("predict_dataloader", "predict")

    def _made(self, method: str, stage: str) -> Any:
        self._set_up(stage)
        source = self.datamodule if carried.defines(self.datamodule, method) else self.module
        if not carried.defines(source, method):
            raise DataError(f"{self._source(method)} defines no {method}; pass the Trainer a loader.")
        with self._attached():
            loader = getattr(source, method)()
        if isinstance(loader, (list, tuple)) and method != "train_dataloader":
            return loader[0] if len(loader) == 1 else {str(i): each for i, each in enumerate(loader)}
        return loader

    def _source(self, method: str) -> str:
        return type(self.datamodule if carried.defines(self.datamodule, method) else self.module).__name__

    def _set_up(self, stage: str) -> None:
        """prepare_data and setup of the datamodule and the module, then configure_model; once per run and stage."""
        if stage in self._ready:
            return
        with self._attached():
            for thing in (self.datamodule, self.module):
                if carried.defines(thing, "prepare_data"):
                    with _one_process_at_a_time(thing):
                        thing.prepare_data()
            for thing in (self.datamodule, self.module):
                if carried.defines(thing, "setup"):
                    thing.setup(stage)
            if carried.defines(self.module, "configure_model"):
                self.module.configure_model()
        self._ready.add(stage)

    # -- its hooks, and what it finds ---------------------------------------------------------------------------------

    @contextmanager
    def _attached(self) -> Iterator[None]:
        """The module with a Trainer and forge's answers, for a call outside of a run."""
        before = any(name in vars(self.module) for name in SHADOWED)
        self._attach()
        try:
            yield
        finally:
            if not before:
                self._detach()

    def _attach(self) -> None:
        self.module.trainer = StandIn(self)
        if self.datamodule is not None:
            self.datamodule.trainer = self.module.trainer
        for name in SHADOWED:
            vars(self.module)[name] = getattr(self, f"_answer_{name}")

    def _detach(self) -> None:
        self.module.trainer = None
        if self.datamodule is not None:
            self.datamodule.trainer = None
        for name in SHADOWED:
            vars(self.module).pop(name, None)

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a hook of the module, where it has one."""
        return carried.call(getattr(self.module, method), *arguments) if carried.defines(self.module, method) else None

    def _defines(self, method: str) -> bool:
        return carried.defines(self.module, method)


@contextmanager
def _one_process_at_a_time(thing: Any) -> Iterator[None]:
    """prepare_data downloads: the processes of a machine do it one after the other, and all but the first find it."""
    if "RANK" not in os.environ and "SLURM_PROCID" not in os.environ:
        yield
        return
    import fcntl

    name = f"forge-{os.getuid()}-{type(thing).__module__}.{type(thing).__qualname__}.lock"
    with Path(tempfile.gettempdir(), name.replace("<", "").replace(">", "")).open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield
