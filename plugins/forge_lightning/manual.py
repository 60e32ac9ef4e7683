"""Manual optimization: the module runs backward passes and steps its optimizers itself."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from forge.contract.hooks import hookimpl
from forge.contract.step import Step
from forge.errors import TaskError
from forge_lightning.log_calls import LogCall, split
from forge_lightning.module_optimizers import OptimizerProxy
from forge_lightning.training import Trains


class TrainsManually(Trains):
    """The task's methods for a module with `automatic_optimization = False`."""

    @hookimpl
    def forge_train_step(self, step: Step) -> bool:
        """Run the window; the module makes the update."""
        before = self.own_steps
        step.run_window()
        step.updated, step.finished = self.own_steps > before, True
        return True

    @hookimpl
    def forge_micro_step(self, step: Step, batch: Any) -> bool:
        trainer = step.trainer
        output = trainer.hooks.forge_forward(step, batch)
        if step.recording and output:
            trainer.means.add_all(step.prefix, output, step.items[step.micro])
        return True

    def _end_manual_step(self, output: Any, calls: list[LogCall], batch: Any, index: int) -> dict[str, Any]:
        """Return what a manual training step's output logs: a loss is only for the log, and may be missing."""
        loss, extra = split(output)
        loss = loss if isinstance(loss, Tensor) and loss.numel() == 1 else None
        self._open = (output if output is not None else {}, batch, index)
        if isinstance(output, Tensor):
            self._open = ({"loss": output.detach()}, batch, index)
        self._count(calls, loss)
        return extra if loss is None else {**extra, "loss": loss.detach()}

    def optimizer_proxies(self) -> list[OptimizerProxy]:
        if len(self._proxies) != len(self.own_optimizers):
            self._proxies = [
                OptimizerProxy(optimizer, self.module, self._before_own_step, self._after_own_step)
                for optimizer in self.own_optimizers
            ]
        return self._proxies

    def _before_own_step(self, optimizer: Any) -> None:
        if not self._quiet:
            self._call("on_before_optimizer_step", optimizer)

    def _after_own_step(self) -> None:
        self.own_steps += 1

    def manual_backward(self, loss: Tensor, *arguments: Any, **named: Any) -> Tensor:
        self._call("on_before_backward", loss)
        if self._defines("backward"):
            self.module.backward(loss, *arguments, **named)
        else:
            loss.backward(*arguments, **named)
        self._call("on_after_backward")
        return loss

    def _refuse_with(self, trainer: Any) -> None:
        """Raise TaskError for what cannot be combined with manual optimization."""
        if not self.is_manual:
            return
        name = type(self.module).__name__
        if trainer.env.world > 1:
            raise TaskError(f"{name} has automatic_optimization = False, which forge runs in one process only.")
        for call in trainer.stack.calls()["forge_inspect_grads"]:
            if call.plugin not in ("core", "task"):
                warnings.warn(f"{name} makes its updates itself: {call.plugin} sees no gradients of it.", stacklevel=2)
        editors = {"forge_edit_grads", "forge_finalize_grads", "forge_optimizer_step", "forge_backward"}
        for hook in sorted(editors):
            for call in trainer.stack.calls()[hook]:
                if call.plugin not in ("core", "task") and not getattr(trainer.stack[call.plugin], "observer", False):
                    raise TaskError(
                        f"{name} has automatic_optimization = False, so the plugin {call.plugin}, which changes "
                        f"gradients or the update ({hook}), would do nothing. Remove it, and do it in training_step."
                    )
