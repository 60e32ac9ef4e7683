"""A LightningModule's training: its step and the hooks around it, in Lightning's order."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from forge.errors import TaskError
from forge.hooks import hookimpl
from forge.lightning import carried, optimizing
from forge.lightning.answers import Answers
from forge.lightning.logged import Logged, in_training, is_the_loss, split
from forge.lightning.names import short
from forge.optimizers import Optimizers, drop_gradients
from forge.step import Step

if TYPE_CHECKING:
    from forge.trainer import Trainer


class Trains(Answers):
    """What forge asks of a task in fit."""

    def configure_optimizers(self) -> Any:
        where = f"{type(self.module).__name__}.configure_optimizers"
        optimizer, configs = optimizing.read(self.module.configure_optimizers(), where)
        self._schedules = [
            optimizing.schedule_of(config, where, lambda: self._before, self._stepped) for config in configs
        ]
        return optimizer

    @hookimpl(wrapper=True)
    def forge_build_optimizers(self) -> Generator[None, Optimizers, Optimizers]:
        optimizers = yield
        for schedule in self._schedules:
            optimizers.add_schedule(None, schedule)
        return optimizers

    def _stepped(self, scheduler: Any) -> Any:
        if not carried.defines(self.module, "lr_scheduler_step"):
            return scheduler
        return optimizing.OwnStep(scheduler, self.module.lr_scheduler_step)

    def _begin_batch(self, step: Step) -> None:
        """Lightning's hooks before a batch of training; what is run again has had them."""
        if step is not step.trainer.step or (step.index, step.micro) <= self._ran:
            return
        if not self._started:
            self._started = True
            self._call("on_train_start")
        self._end_batch()
        if self._done + step.micro == 0:
            self._call("on_train_epoch_start")

    def training_step(self, batch: Any) -> Any:
        assert self.trainer is not None
        step = self.trainer.step
        assert step is not None
        index, first = self._done + step.micro, (step.index, step.micro) > self._ran
        self._forget_nothing()
        if first:
            self._begin_step(step, batch, index)
        output, calls = self._listening(step.items[step.micro], self.module.training_step, batch, index)
        if output is None:
            self._open = (None, batch, index) if self._defines("on_train_batch_end") else None
            return self._nothing(step)
        self._all_none = False
        loss, extra = split(output)
        if not isinstance(loss, Tensor):
            return output  # which forge refuses by name
        if not first:
            return loss
        self._call("on_before_backward", loss)
        if self._defines("on_train_batch_end"):
            whole = dict(output) if isinstance(output, Mapping) else {}
            self._open = ({**whole, "loss": loss.detach()}, batch, index)
        taken = {short(call.name, "train") for call in calls}
        extra = {name: value for name, value in extra.items() if short(name, "train") not in taken}
        return {**extra, **self._count(calls, loss), "loss": loss}

    def _begin_step(self, step: Step, batch: Any, index: int) -> None:
        self._ran = (step.index, step.micro)
        self._all_none = self._all_none or step.micro == 0
        if self._call("on_train_batch_start", batch, index) == -1:
            raise TaskError(
                f"{type(self.module).__name__}.on_train_batch_start returned -1 to skip the rest of the epoch, which "
                "forge does not do. Set trainer.should_stop, or give the loader fewer batches."
            )

    def _count(self, calls: list[Logged], loss: Tensor | None) -> dict[str, Any]:
        """Count what a training step logged: its metrics that accumulate are returned, under their names."""
        returned: dict[str, Any] = {}
        for call in calls:
            name = in_training(call.name)
            if isinstance(call.value, nn.Module):
                self.names[call.name] = name
                returned[short(call.name, "train")] = call.value
            elif name != "train/loss":
                self._add_in_training(name, call)
            elif is_the_loss(call.value, loss):  # which forge logs already
                self.names[call.name] = name
                self._add_in_training(name, call._replace(on_step=False))
            else:
                self._add_in_training("train/train_loss", call)
        return returned

    def _add_in_training(self, name: str, call: Logged) -> None:
        assert self.trainer is not None
        weight = self._weigh(call)
        if call.on_step:
            self.names[call.name] = name
            self.trainer.means.add(name, call.value, weight)
        if call.on_epoch and self._epoch is not None:
            self.names.setdefault(call.name, f"{name}_epoch")
            self.names[f"{call.name}_epoch"] = f"{name}_epoch"
            self._epoch.means.add(f"{name}_epoch", call.value, weight)

    def _nothing(self, step: Step) -> Tensor:
        """The module returned None: this batch is passed over. Its loss of 0 is in no mean and has no gradient."""
        trainer = step.trainer
        if trainer.env.world > 1:
            raise TaskError(
                f"{type(self.module).__name__}.training_step returned None to pass over a batch; on several ranks all "
                "must train on every batch. Return a loss of weight 0 instead: (loss * 0)."
            )
        self._mark = trainer.means.mark()
        first = next(parameter for parameter in self.parameters() if parameter.requires_grad)
        return first.flatten()[:0].sum()

    def _forget_nothing(self) -> None:
        """Take the loss of a batch that was passed over out of the means again."""
        if self._mark is not None and self.trainer is not None:
            self.trainer.means.back_to(self._mark)
            self._mark = None

    @hookimpl(wrapper=True)
    def forge_backward(self) -> Generator[None, Any, Any]:
        done = yield
        self._call("on_after_backward")
        return done

    @hookimpl
    def forge_finalize_grads(self, step: Step) -> None:
        self._forget_nothing()
        if self._all_none:  # as in Lightning: the optimizer steps over parameters without a gradient
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
    def forge_boundary(self, trainer: Trainer, step: Step) -> None:
        """The end of an epoch, after the validation that belongs to it."""
        if step.ends_epoch:
            self._call("on_train_epoch_end")
            means = self._epoch.read() if self._epoch is not None else {}
            if means:
                trainer.publish(means)
