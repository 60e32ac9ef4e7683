"""Training of a LightningModule: its step and the hooks around it, in Lightning's order."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from forge.contract.hooks import hookimpl
from forge.contract.step import Step
from forge.errors import TaskError
from forge.metrics.torchmetrics import is_metric
from forge.optim.optimizers import Optimizers, drop_gradients
from forge_lightning import compatibility, optimizer_config
from forge_lightning.log_calls import LogCall, in_training, is_the_loss, of_this_batch, split
from forge_lightning.module_methods import ModuleMethods
from forge_lightning.names import short

if TYPE_CHECKING:
    from forge.contract.run import Run

OTHER_LOSS = "train/train_loss"
"""The name of a value that is logged as the loss but is not the returned one."""


class Trains(ModuleMethods):
    """The task's methods for fit."""

    def configure_optimizers(self) -> Any:
        where = f"{type(self.module).__name__}.configure_optimizers"
        optimizer, configs = optimizer_config.read(self.module.configure_optimizers(), where)
        self._schedules = [
            optimizer_config.schedule_of(config, where, lambda: self._before, self._own_step) for config in configs
        ]
        return optimizer

    @hookimpl(wrapper=True)
    def forge_build_optimizers(self) -> Generator[None, Optimizers, Optimizers]:
        optimizers = yield
        for schedule in self._schedules:
            optimizers.add_schedule(None, schedule)
        return optimizers

    def _own_step(self, scheduler: Any) -> Any:
        if not compatibility.defines(self.module, "lr_scheduler_step"):
            return scheduler
        return optimizer_config.OwnStep(scheduler, self.module.lr_scheduler_step)

    def _begin_batch(self, step: Step) -> None:
        """Call Lightning's hooks before a training batch, except for a batch that is run again."""
        if step is not step.trainer.step or (step.index, step.micro) <= self._ran:
            return
        if not self._started:
            self._started = True
            self._call("on_train_start")
        self._end_batch()
        self._weight, self.epoch_is_over = 1, False
        if self._done + step.micro == 0:
            self._call("on_train_epoch_start")

    def training_step(self, batch: Any) -> Any:
        assert self.trainer is not None
        step = self.trainer.step
        assert step is not None
        index, first = self._done + step.micro, (step.index, step.micro) > self._ran
        self._forget_skipped()
        if first:
            self._begin_step(step, batch, index)
        output, calls = self._run_and_collect(step.items[step.micro], self.module.training_step, batch, index)
        if output is None:
            self._open = (None, batch, index) if self._defines("on_train_batch_end") else None
            return self._skipped_loss(step)
        self._all_none = False
        loss, extra = split(output)
        if not isinstance(loss, Tensor):
            return output  # forge raises an error about it
        if not first:
            return loss
        self._call("on_before_backward", loss)
        if self._defines("on_train_batch_end"):
            whole = dict(output) if isinstance(output, Mapping) else {}
            self._open = ({**whole, "loss": loss.detach()}, batch, index)
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

    def _count(self, calls: list[LogCall], loss: Tensor) -> None:
        """Add the values that a training step logged."""
        for call in calls:
            name = in_training(call.name)
            if name != "train/loss" or isinstance(call.value, nn.Module):
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
        self._add_in_training("train/loss", call._replace(on_step=False))

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
        if self._epoch is None:
            return
        if accumulates:
            self._epoch.metrics.claim(call.name, call.value)
        if call.on_epoch:
            self.names.setdefault(call.name, f"{name}_epoch")
            self.names[f"{call.name}_epoch"] = f"{name}_epoch"
            if accumulates:
                self._epoch.metrics.add_name(f"{name}_epoch", call.value)
            else:
                self._epoch.means.add(f"{name}_epoch", call.value, weight)

    def _skipped_loss(self, step: Step) -> Tensor:
        """Return a loss for a batch that the module skips by returning None: 0, without gradient, in no mean."""
        trainer = step.trainer
        if trainer.env.world > 1:
            raise TaskError(
                f"{type(self.module).__name__}.training_step returned None to skip a batch; on several ranks all must "
                "train on every batch. Return a loss of weight 0 instead: (loss * 0)."
            )
        self._mark = trainer.means.savepoint()
        first = next(parameter for parameter in self.parameters() if parameter.requires_grad)
        return first.flatten()[:0].sum()

    def _forget_skipped(self) -> None:
        """Remove the loss of a skipped batch from the means."""
        if self._mark is not None and self.trainer is not None:
            self.trainer.means.rollback(self._mark)
            self._mark = None

    @hookimpl(wrapper=True)
    def forge_backward(self) -> Generator[None, Any, Any]:
        done = yield
        self._call("on_after_backward")
        return done

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

    @hookimpl
    def forge_boundary(self, trainer: Run, step: Step) -> None:
        """End an epoch, after its validation: call the module's hook, which can read the epoch's values, and publish
        them with the values that it logs."""
        if not step.ends_epoch or self._epoch is None:
            return
        if (metrics := trainer.means.task_metrics) is not None:
            metrics.computed.update(metrics.updated())  # before the module resets its own
        self.fresh, self._weight, self.epoch_is_over = self._epoch.read(), 1, True
        self._call("on_train_epoch_end")
        values, self.fresh = {**self.fresh, **self._epoch.read()}, {}
        self._epoch.end()
        if values:
            trainer.publish(values)
