"""Training of a LightningModule: its step and the hooks around it, in Lightning's order."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forge.contract.hooks import hookimpl
from forge.contract.run import Run
from forge.contract.step import Step
from forge.errors import TaskError
from forge.metrics.torchmetrics import is_metric
from forge.optim.optimizers import OptimizerEntry, Optimizers, drop_gradients
from forge.optim.schedule_stepping import ScheduledLR
from forge_lightning import compatibility, optimizer_config
from forge_lightning.data_draws import draw_as_iterators
from forge_lightning.log_calls import LogCall, in_training, is_the_loss, of_this_batch, split
from forge_lightning.module_methods import ModuleMethods
from forge_lightning.module_optimizers import ModuleOptimizers
from forge_lightning.names import short

OTHER_LOSS = "train/train_loss"
"""The name of a value that is logged as the loss but is not the returned one."""


class Trains(ModuleMethods):
    """The task's methods for fit."""

    def configure_optimizers(self) -> Any:
        where = f"{type(self.module).__name__}.configure_optimizers"
        returned = self.module.configure_optimizers() if hasattr(self.module, "configure_optimizers") else None
        self.own_optimizers, self.scheduler_configs = optimizer_config.read(returned, where, self.is_manual)
        if not self.own_optimizers:
            warnings.warn(f"{where} returned no optimizer: the run changes no weight by itself.", stacklevel=2)
        if not self.is_manual and not self._defines("lr_scheduler_step"):
            for config in self.scheduler_configs:
                optimizer_config.refuse_foreign_api(config, where)
        if self.is_manual:
            self._schedules = [ScheduledLR(c.scheduler, every=optimizer_config.Never()) for c in self.scheduler_configs]
        else:
            self._schedules = [
                optimizer_config.schedule_of(config, lambda: self._before, self._own_step)
                for config in self.scheduler_configs
            ]
        return self.own_optimizers[0] if len(self.own_optimizers) == 1 else ModuleOptimizers(self.own_optimizers)

    @hookimpl
    def forge_build_optimizers(self) -> Optimizers:
        return Optimizers({None: OptimizerEntry(self.configure_optimizers(), [*self._schedules])})

    def _own_step(self, scheduler: Any) -> Any:
        if not compatibility.defines(self.module, "lr_scheduler_step"):
            return scheduler
        return optimizer_config.OwnStep(scheduler, self.module.lr_scheduler_step)

    @property
    def batch_index(self) -> int:
        step = None if self.trainer is None else self.trainer.step
        if step is None:
            return 0
        ended = step.index < self.trainer.progress.update  # pyright: ignore[reportOptionalMemberAccess]
        return self._before + len(step.window) - 1 if ended else self._done + step.micro

    def _begin_batch(self, step: Step) -> None:
        """Call Lightning's hooks before a training batch, except for a batch that is run again."""
        if step is not step.trainer.step or (step.index, step.micro) <= self._ran:
            return
        if self._rng is not None:
            self._rng.restore(step.trainer.env.device)
            self._rng = None
        if step.micro == 0 and step.trainer.env.world == 1 and step.trainer.window > 1:
            # as Lightning weighs them: every batch the same, whatever its size and however many there are
            step.divisor, step.factors = max(step.trainer.window, len(step.window)), None
        starts_epoch = self._done + step.micro == 0
        if starts_epoch and not step.index:
            draw_as_iterators(step.trainer.given_loaders.get("train"))
        if not self._started:
            self._started = True
            self._call("on_train_start")
        self._end_batch()
        self._weight, self.epoch_is_over = 1, False
        if starts_epoch:
            self._call("on_train_epoch_start")
            if step.index:
                draw_as_iterators(step.trainer.given_loaders.get("train"))

    def training_step(self, batch: Any) -> Any:
        step = None if self.trainer is None or self.trainer.task is not self else self.trainer.step
        if step is None:
            return self._apart("train", self.module.training_step, batch)
        index, first = self._done + step.micro, (step.index, step.micro) > self._ran
        self._forget_skipped()
        if first:
            self._begin_step(step, batch, index)
        output, calls = self._run_and_collect(step.items[step.micro], self.module.training_step, batch, index)
        if self.is_manual:
            return self._end_manual_step(output, calls, batch, index)
        if first and step.micro == 0:
            self._zero_grad(step, index)
        if output is None:
            self._open = ({}, batch, index)
            self._count(calls, None)
            return self._skipped_loss(step)
        self._all_none = False
        loss, extra = split(output)
        if not isinstance(loss, Tensor):
            return output  # forge raises an error about it
        if not first:
            return loss
        self._call("on_before_backward", loss)
        self._last_loss = loss.detach()
        if self.callbacks or self._defines("on_train_batch_end"):
            whole = dict(output) if isinstance(output, Mapping) else {}
            self._open = ({**whole, "loss": self._last_loss / step.divisor}, batch, index)
        taken = {short(call.name, "train") for call in calls}
        extra = {name: value for name, value in extra.items() if short(name, "train") not in taken}
        self._count(calls, loss)
        return {**extra, "loss": loss}

    def _begin_step(self, step: Step, batch: Any, index: int) -> None:
        self._ran, self._weight = (step.index, step.micro), step.items[step.micro]
        self._all_none = self._all_none or step.micro == 0
        if self._call("on_train_batch_start", batch, index) == -1:
            raise TaskError(
                f"{type(self.module).__name__}.on_train_batch_start returned -1 to skip the rest of the epoch, which "
                "forge does not do. Set trainer.should_stop, or give the loader fewer batches."
            )

    def _zero_grad(self, step: Step, index: int) -> None:
        """Call the hooks around zero_grad where Lightning drops gradients: before the first backward of an update."""
        self._call("on_before_zero_grad", step.optimizer)
        if self._defines("optimizer_zero_grad"):
            self.module.optimizer_zero_grad(self._proxy.current_epoch, index, self.optimizer_proxies()[0])

    def _end_manual_step(self, output: Any, calls: list[LogCall], batch: Any, index: int) -> dict[str, Any]:
        raise NotImplementedError

    def _count(self, calls: list[LogCall], loss: Tensor | None) -> None:
        """Add the values that a training step logged."""
        for call in calls:
            name = in_training(call.name)
            alone = loss is None and (self.is_manual or not self.own_optimizers)  # forge logs no loss beside it
            if name != "train/loss" or isinstance(call.value, nn.Module) or alone:
                self._add_in_training(name, call)
            elif isinstance(call.value, Tensor):
                self._add_as_the_loss(call, is_the_loss(call.value, loss))
            else:
                known = self.names.get(call.name) == OTHER_LOSS  # a number that was once another value stays separate
                self._add_as_the_loss(call, not known and is_the_loss(call.value, loss), by_number=True)

    def _add_as_the_loss(self, call: LogCall, is_loss: bool, by_number: bool = False) -> None:
        """Add a value logged as the loss: the returned one, which forge logs already, or another under its own name."""
        if by_number:  # the case may differ between ranks, but names must not
            self._add_name_only("train/loss", call._replace(on_step=False))
            self._add_name_only(OTHER_LOSS, call)
        if not is_loss:
            self._add_in_training(OTHER_LOSS, call)
            return
        self._name_step(call, "train/loss")
        if call.on_step:
            self._keep_step(call, call.value)
        self._add_in_training("train/loss", call._replace(on_step=False))

    def _keep_step(self, call: LogCall, value: Any) -> None:
        """Put the value of a step into callback_metrics."""
        if value is not None:
            self.latest[call.name] = value
            if call.on_epoch:
                self.latest[f"{call.name}_step"] = value

    def _name_step(self, call: LogCall, name: str) -> None:
        self.names[call.name] = name
        if call.on_epoch:
            self.names[f"{call.name}_step"] = name

    def _add_name_only(self, name: str, call: LogCall) -> None:
        """Add a value of weight 0 under a name that other ranks may use."""
        assert self.trainer is not None
        if self.trainer.env.world == 1:
            return
        if call.on_step:
            self.trainer.means.add(name, 0.0, 0)
        if call.on_epoch and self._epoch is not None:
            self._epoch.means.add(f"{name}_epoch", 0.0, 0)

    def _add_in_training(self, name: str, call: LogCall) -> None:
        assert self.trainer is not None
        weight, accumulates = self._weigh(call), is_metric(call.value)
        if call.on_step:
            self._name_step(call, name)
            values = of_this_batch(name, call.value) if accumulates else {name: call.value}
            self.trainer.means.add_all("", values, weight)
            self._keep_step(call, values.get(name))
        if self._epoch is None:
            return
        if accumulates:
            self._epoch.metrics.claim(call.name, call.value)
        if call.on_epoch:
            self.names.setdefault(call.name, f"{name}_epoch")
            self.names[f"{call.name}_epoch"] = f"{name}_epoch"
            if accumulates:
                self._epoch.metrics.add_name(f"{name}_epoch", call.value)
            elif call.reduce == "mean":
                self._epoch.means.add(f"{name}_epoch", call.value, weight)
            else:
                self._epoch.reductions.add(f"{name}_epoch", call.reduce, call.value)

    def _skipped_loss(self, step: Step) -> Tensor:
        """Return a loss for a batch that the module skips by returning None: 0, without gradient, in no mean."""
        trainer = step.trainer
        if trainer.env.world > 1:
            raise TaskError(
                f"{type(self.module).__name__}.training_step returned None to skip a batch; on several ranks all must "
                "train on every batch. Return a loss of weight 0 instead: (loss * 0)."
            )
        self._mark = trainer.means.savepoint()
        first = next((parameter for parameter in self.parameters() if parameter.requires_grad), None)
        first = torch.zeros(1, device=trainer.env.device, requires_grad=True) if first is None else first
        return first.flatten()[:0].sum()

    def _forget_skipped(self) -> None:
        """Remove the loss of a skipped batch from the means."""
        if self._mark is not None and self.trainer is not None:
            self.trainer.means.rollback(self._mark)
            self._mark = None

    @hookimpl(wrapper=True)
    def forge_backward(self) -> Generator[None, Any, Any]:
        done = yield
        if self._mark is None:  # a skipped batch has no backward pass
            self._call("on_after_backward")
        return done

    @hookimpl
    def _own_backward(self, step: Step, loss: Tensor) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the module's own `backward`, in place of forge_backward."""
        if self._mark is None:  # a skipped batch has no backward pass
            self.module.backward(loss)
            self._call("on_after_backward")
        return True

    @hookimpl
    def forge_optimizer_step(self, step: Step) -> bool:
        """Run the module's own `optimizer_step`. Its closure has run: gradients are there, and edited."""
        entry, (proxy,), calls = step.trainer.optimizers.entries[None], self.optimizer_proxies(), [0]
        replay = step.closure() if entry.needs_closure else None

        def closure() -> Any:
            calls[0] += 1
            if replay is not None:
                return replay()
            if calls[0] > 1:
                raise TaskError(
                    f"{type(self.module).__name__}.optimizer_step calls its closure more than once, which forge does "
                    "only for optimizers whose step needs one. Use manual optimization: automatic_optimization = False."
                )
            return self._last_loss

        before = self.own_steps
        self._quiet = True  # on_before_optimizer_step has been called
        try:
            self.module.optimizer_step(self._proxy.current_epoch, self.batch_index, proxy, closure)
        finally:
            self._quiet = False
        return self.own_steps > before

    @hookimpl
    def forge_finalize_grads(self, step: Step) -> None:
        self._forget_skipped()
        if self._all_none:  # as in Lightning: the optimizer skips parameters without a gradient
            drop_gradients(step.optimizer)

    @hookimpl
    def forge_inspect_grads(self, step: Step) -> None:
        self._call("on_before_optimizer_step", step.optimizer)

    @hookimpl
    def forge_edit_grads(self, step: Step) -> None:
        self.module.configure_gradient_clipping(step.optimizer, gradient_clip_val=None, gradient_clip_algorithm=None)

    @hookimpl
    def forge_step_end(self, step: Step) -> None:
        self._end_batch()
        self._before = self._done
        self._done = 0 if step.ends_epoch else self._done + len(step.window)

    def _end_batch(self) -> None:
        if self._open is not None:
            opened, self._open = self._open, None
            self._call("on_train_batch_end", *opened)

    def stop(self, reason: str) -> None:
        assert self.trainer is not None
        self._stops_early = True
        if "val" in self.trainer.loaders and self.stage is None and not self.epoch_is_over:
            self.trainer.request_validation(reason, by=type(self.module).__name__)
        self.trainer.request_stop(reason, by=type(self.module).__name__)

    @hookimpl
    def forge_boundary(self, trainer: Run, step: Step) -> None:
        """End an epoch, after its validation: call the module's hook, which can read the epoch's values, and publish
        them with the values that it logs."""
        self._step_plateaus("step")
        self.cut_short = (self._stops_early or trainer.progress.update == trainer.max_updates) and not step.ends_epoch
        if not (step.ends_epoch or self.cut_short) or self._epoch is None:
            return
        if (metrics := trainer.means.task_metrics) is not None:
            metrics.computed.update(metrics.updated())  # before the module resets its own
        self.fresh, self._weight, self.epoch_is_over = self._epoch.read(), 1, True
        self._keep_epoch(self.fresh)
        self.callbacks.call("on_train_epoch_end", self._proxy, self.module, monitoring=False)
        self._call_module("on_train_epoch_end")
        self.callbacks.call("on_train_epoch_end", self._proxy, self.module, monitoring=True)
        values, self.fresh = {**self.fresh, **self._epoch.read()}, {}
        self._epoch.end()
        if values:
            trainer.publish(values)
        if step.ends_epoch:
            self._step_plateaus("epoch")

    def _keep_epoch(self, values: Mapping[str, float]) -> None:
        """Put the values of an epoch into callback_metrics, under the names that the module gave them."""
        for own, name in self.names.items():
            if name in values and name.endswith("_epoch"):
                self.latest[own] = values[name]
                self.latest[own.removesuffix("_epoch")] = values[name]

    def _step_plateaus(self, interval: str) -> None:
        """Step the schedulers that watch a metric, as Lightning does: after each batch's, or epoch's, validation."""
        for config, item in zip(self.scheduler_configs, self._schedules, strict=True):
            if self.is_manual or not config.reduce_on_plateau or config.interval != interval:
                continue
            index = self.batch_index if interval == "step" else self._proxy.current_epoch
            if (index + 1) % int(config.frequency):
                continue
            metric = self._proxy.callback_metrics.get(str(config.monitor))
            if metric is not None:
                item.schedule.step(metric)
                continue
            known = ", ".join(sorted(self.latest)) or "nothing"
            missing = f"A ReduceLROnPlateau watches {config.monitor!r}, which is not logged; there is {known}"
            if config.strict:
                raise TaskError(f"{missing}. Log it, or set 'strict': False in the lr_scheduler config.")
            warnings.warn(f"{missing}. The learning rate is left as it is.", stacklevel=2)
