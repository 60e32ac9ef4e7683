"""LightningAdapter: run an unchanged LightningModule as a task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge.contract.hooks import hookimpl
from forge.contract.step import Step
from forge.errors import TaskError
from forge_lightning import compatibility
from forge_lightning.evaluating import Evaluates
from forge_lightning.log_calls import EpochMeans
from forge_lightning.training import Trains

if TYPE_CHECKING:
    from forge.contract.run import Run


class LightningAdapter(Trains, Evaluates):
    """Runs an unchanged LightningModule under forge::

        task = forge.LightningAdapter(MyLightningModule())
        forge.Trainer(max_epochs=3).fit(task, task.train_loader(), task.val_loader())

    The task shares the module's parameters under the same names: `module.load_state_dict` loads forge's weights, and
    `forge.load_weights(task, "x.ckpt")` Lightning's. `LightningAdapter.from_checkpoint(path,
    module=MyLightningModule())` needs the module as an argument.

    `datamodule` is a LightningDataModule that provides loaders. A value logged with `self.log("val_loss")` is named
    `val/loss`: the stage becomes the prefix, and a prefix that names the stage is removed. Unsupported methods are
    refused or warned about by name. Lightning need not be installed if the module does not need it.

    For the command line, which creates tasks from their class, write a subclass of the adapter whose `__init__` creates
    the module (see docs/from-lightning.md).
    """

    logs_epochs = False  # as under Lightning: only what is logged with on_epoch=True

    @property
    def task_name(self) -> str:
        """The name of runs: the module's class, or that of a subclass of the adapter."""
        return type(self.module if type(self) is LightningAdapter else self).__name__

    # -- the run ------------------------------------------------------------------------------------------------------

    @hookimpl
    def forge_configure(self, trainer: Run) -> None:
        ready = self._ready
        self._forget()
        self._ready = ready
        assert trainer.verb is not None
        self._set_up(trainer.verb)

    @hookimpl
    def forge_build_model(self, trainer: Run, phase: str) -> None:
        if phase == "surgery":
            self.is_built = True  # the Env is known from now on
            self._attach()

    @hookimpl
    def forge_start(self, trainer: Run) -> None:
        if trainer.verb == "fit":
            self._epoch = EpochMeans(trainer)
            self._call("on_fit_start")

    @hookimpl
    def forge_exception(self) -> None:
        self._failed = True

    @hookimpl
    def forge_end(self, trainer: Run) -> None:
        try:
            if not self._failed:
                if self._started:
                    self._call("on_train_end")
                if trainer.verb == "fit":
                    self._call("on_fit_end")
            for thing in (self.datamodule, self.module):
                if compatibility.defines(thing, "teardown"):
                    thing.teardown(trainer.verb)
        finally:
            self._detach()
            self._forget()

    # -- a batch ------------------------------------------------------------------------------------------------------

    @hookimpl
    def forge_prepare_batch(self, step: Step, batch: Any) -> Any:
        self._step = step
        if step.stage == "train":
            self._begin_batch(step)
        elif step.micro == 0:
            self._begin_loader()
        batch = self._handed_on("on_before_batch_transfer", batch)
        for thing in (self.datamodule, self.module):
            if compatibility.defines(thing, "transfer_batch_to_device"):
                batch = thing.transfer_batch_to_device(batch, step.trainer.env.device, self._loader)
                break
        else:
            batch = step.trainer.env.move(batch)
        return self._handed_on("on_after_batch_transfer", batch)

    def _handed_on(self, method: str, batch: Any) -> Any:
        for thing in (self.datamodule, self.module):
            if compatibility.defines(thing, method):
                return getattr(thing, method)(batch, self._loader)
        return batch

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @hookimpl
    def forge_state_dict(self, trainer: Run) -> dict[str, Any]:
        epoch = self._epoch.state_dict() if self._epoch is not None else {}
        computed = (
            {} if self._epoch is None else {path: list(names) for path, names in self._epoch.metrics.names.items()}
        )
        metrics = {"returned": sorted(self.returned_metrics), "epoch": computed}
        own = self._own_state(trainer)
        return {"epoch": epoch, "names": dict(self.names), "metrics": metrics, "checkpoint": own}

    def _own_state(self, trainer: Run) -> dict[str, Any]:
        """Return the entries that the module's on_save_checkpoint adds to a Lightning checkpoint."""
        if not self._defines("on_save_checkpoint"):
            return {}
        given = self._as_lightning(trainer)
        checkpoint = {**given, "state_dict": dict(given["state_dict"])}
        self.module.on_save_checkpoint(checkpoint)
        if checkpoint["state_dict"].keys() != given["state_dict"].keys():
            raise TaskError(
                f"{type(self.module).__name__}.on_save_checkpoint changes checkpoint['state_dict'], but forge saves "
                "state_dict() itself. Override state_dict instead, and set strict_loading = False."
            )
        return {key: value for key, value in checkpoint.items() if key not in given}

    def _as_lightning(self, trainer: Run) -> dict[str, Any]:
        progress = trainer.progress
        return {"epoch": progress.epoch, "global_step": progress.update, "state_dict": self.module.state_dict()}

    @hookimpl
    def forge_load_state_dict(self, trainer: Run, state: dict[str, Any]) -> None:
        self._done = self._before = trainer.feed.batches
        self._ran, self._open = (trainer.progress.update - 1, 1 << 30), None
        self.names |= state["names"]
        metrics = state.get("metrics", {"returned": [], "epoch": {}})
        self.returned_metrics.clear()
        self.returned_metrics.update(metrics["returned"])
        if self._epoch is not None:
            self._epoch.means.load_state_dict(state["epoch"])
            self._epoch.metrics.names = {path: list(names) for path, names in metrics["epoch"].items()}
        if self._defines("on_load_checkpoint"):
            self.module.on_load_checkpoint({**self._as_lightning(trainer), **state["checkpoint"]})
