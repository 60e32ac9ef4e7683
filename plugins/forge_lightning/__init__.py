"""LightningAdapter: run an unchanged LightningModule as a task."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Generator
from typing import Any

from forge.checkpoint.sharding import is_distributed, whole
from forge.contract.hooks import hookimpl
from forge.contract.run import Run
from forge.contract.step import Step
from forge.errors import TaskError
from forge.rng import seed_all
from forge.torch_internals import pytree
from forge_lightning import compatibility
from forge_lightning.data_draws import moved_since
from forge_lightning.evaluating import WORDS, Evaluates
from forge_lightning.log_calls import EpochMeans
from forge_lightning.manual import TrainsManually


class LightningAdapter(TrainsManually, Evaluates):
    """Runs an unchanged LightningModule under forge::

        task = forge.LightningAdapter(MyLightningModule())
        forge.Trainer(max_epochs=3).fit(task)

    Loaders that are not passed to `fit`, `validate`, `test` and `predict` are those of the module or of `datamodule`,
    made inside the run.
    The task shares the module's parameters under the same names: `module.load_state_dict` loads forge's weights, and
    `forge.load_weights(task, "x.ckpt")` Lightning's. `LightningAdapter.from_checkpoint(path,
    module=MyLightningModule())` needs the module as an argument.

    `datamodule` is a LightningDataModule that provides loaders; `callbacks` are Lightning's, and run with those of the
    module's configure_callbacks. A value logged with `self.log("val_loss")` is named
    `val/loss`: the stage becomes the prefix, and a prefix that names the stage is removed. Lightning need
    not be installed if the module does not need it.

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
        self._refuse_missing_steps(trainer)
        if trainer.verb == "fit" and "fit" not in ready and trainer.seed is not None:
            seed_all(trainer.seed)  # layers made in setup are drawn from the run's seed, as under Lightning
        self._set_up(trainer.verb)
        self._set_up_callbacks(trainer.verb)

    def _refuse_missing_steps(self, trainer: Run) -> None:
        """Refuse a loader for a stage without a step; in fit, warn and go without validation, as Lightning does."""
        name = type(self.module).__name__
        for stage in trainer.given_loaders:
            word = WORDS.get(stage)
            given = trainer.given_loaders[stage] is not None
            if not given or word is None or stage == "predict" or self._defines(f"{word}_step"):
                continue
            if trainer.verb != "fit":
                raise TaskError(f"{name} defines no {word}_step; leave the {stage} loader out.")
            warnings.warn(f"{name} defines no {word}_step: the {stage} loader is not used.", stacklevel=2)

    @hookimpl(wrapper=True)
    def forge_build_loader(self, trainer: Run, stage: str) -> Generator[None, Any, Any]:
        """Make a loader that was not given, with the Trainer alive; leave out validation without a step."""
        optional = trainer.verb == "fit" and stage == "val"
        skipped = optional and not self._defines("validation_step")
        if trainer.given_loaders[stage] is None and not skipped and (self.makes(stage) or not optional):
            trainer.given_loaders[stage] = self.own_loader(stage)
        loader = yield
        return None if skipped else loader

    @hookimpl
    def forge_build_model(self, trainer: Run, phase: str) -> None:
        if phase == "surgery":
            self.is_built = True  # the Env is known from now on
            self._attach()

    @hookimpl
    def forge_start(self, trainer: Run) -> None:
        compatibility.refuse_removed(self._proxy)
        self.callbacks.call("setup", self._proxy, self.module, trainer.verb, writing=True)
        if trainer.env.world == 1:
            vars(self)["num_items"] = self._count_as_one
        if trainer.verb == "fit":
            self._refuse_with(trainer)
            self._epoch = EpochMeans(trainer)
            self._call("on_fit_start")
            if trainer.seed is not None and trainer.env.world == 1:
                self._rng = moved_since(trainer.seed, trainer.env.device)

    @hookimpl
    def forge_exception(self, error: BaseException) -> None:
        self._failed = True
        self.callbacks.call("on_exception", self._proxy, self.module, error)
        if compatibility.defines(self.datamodule, "on_exception"):
            self.datamodule.on_exception(error)

    @hookimpl
    def forge_end(self, trainer: Run) -> None:
        self.is_over = True
        try:
            if not self._failed:
                if self._started:
                    self._call("on_train_end")
                if trainer.verb == "fit":
                    self._call("on_fit_end")
            if compatibility.defines(self.datamodule, "teardown"):
                self.datamodule.teardown(trainer.verb)
            self._call("teardown", trainer.verb)
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
        state = {"epoch": epoch, "names": dict(self.names), "metrics": metrics, "checkpoint": own}
        if self._epoch is not None and (reduced := self._epoch.reductions.state_dict()):
            state["reduced"] = reduced
        if callbacks := self.callbacks.state_dict():
            state["callbacks"] = callbacks
        if self.is_manual:
            state["own_steps"] = self.own_steps
        if self.latest:
            state["latest"] = dict(self.latest)
        return state

    def _own_state(self, trainer: Run) -> dict[str, Any]:
        """Return the entries that the module's on_save_checkpoint adds to a Lightning checkpoint."""
        if not self._hears("on_save_checkpoint") and not self.callbacks:
            return {}
        given = self._as_lightning(trainer)
        checkpoint = {**given, "state_dict": dict(given["state_dict"])}
        self._call("on_save_checkpoint", checkpoint)
        if checkpoint["state_dict"].keys() != given["state_dict"].keys():
            raise TaskError(
                f"{type(self.module).__name__}.on_save_checkpoint changes checkpoint['state_dict'], but forge saves "
                "state_dict() itself. Override state_dict instead, and set strict_loading = False."
            )
        return {key: value for key, value in checkpoint.items() if key not in given}

    def _as_lightning(self, trainer: Run) -> dict[str, Any]:
        progress = trainer.progress
        steps = self.own_steps if self.is_manual else progress.update
        return {"epoch": progress.epoch, "global_step": steps, "state_dict": self.module.state_dict()}

    def lightning_checkpoint(self, weights_only: bool) -> dict[str, Any]:
        assert self.trainer is not None
        state = {**self._as_lightning(self.trainer), "epoch": self._proxy.current_epoch}
        version = importlib.metadata.version("lightning") if self._proxy.packages else "2.0.0"
        state |= {"pytorch-lightning_version": version, "loops": {}}
        if getattr(self.module, "hparams", None):
            state |= {"hparams_name": self.module._hparams_name, "hyper_parameters": dict(self.module.hparams)}
        if not weights_only:
            state["callbacks"] = self.callbacks.state_dict()
            if self._has_whole_optimizers():
                state["optimizer_states"] = [optimizer.state_dict() for optimizer in self.own_optimizers]
            state["lr_schedulers"] = [config.scheduler.state_dict() for config in self.scheduler_configs]
        if any(map(is_distributed, self.parameters())):
            state = pytree.tree_map(lambda value: whole(value) if is_distributed(value) else value, state)
        if not weights_only:
            self.callbacks.call("on_save_checkpoint", self._proxy, self.module, state)
        self._call_module("on_save_checkpoint", state)
        return state

    def _has_whole_optimizers(self) -> bool:
        """Whether this rank has the optimizer's state of every parameter, if only its shard of each."""
        assert self.trainer is not None
        held = self.trainer.env.holds
        complete = all(held(("optimizers", "state", name)) for name, _ in self.named_parameters())
        if not complete:
            warnings.warn(
                "Checkpoints of Lightning's form are without the optimizer's state, of which each rank has a part. "
                "forge's own checkpoints have all of it.",
                stacklevel=2,
            )
        return complete

    @hookimpl
    def forge_load_state_dict(self, trainer: Run, state: dict[str, Any]) -> None:
        self._done = self._before = trainer.feed.batches
        self._ran, self._open = (trainer.progress.update - 1, 1 << 30), None
        self.names |= state["names"]
        metrics = state.get("metrics", {"returned": [], "epoch": {}})
        self.returned_metrics.clear()
        self.returned_metrics.update(metrics["returned"])
        self._rng, self.own_steps = None, state.get("own_steps", 0)
        self.latest = dict(state.get("latest", {}))
        self.callbacks.load_state_dict(state.get("callbacks", {}))
        if self._epoch is not None:
            self._epoch.reductions.load_state_dict(state.get("reduced", {}))
            self._epoch.means.load_state_dict(state["epoch"])
            self._epoch.metrics.names = {path: list(names) for path, names in metrics["epoch"].items()}
        if self._hears("on_load_checkpoint") or self.callbacks:
            self._call("on_load_checkpoint", {**self._as_lightning(trainer), **state["checkpoint"]})
