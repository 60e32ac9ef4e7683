"""Core: the default of every action, itself a plugin. This is what runs when nobody owns an action."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from forge import checks, evaluation
from forge.env import Env
from forge.hooks import hookimpl
from forge.optimizers import Optimizers
from forge.plugin import Plugin
from forge.step import Step

if TYPE_CHECKING:
    from forge.trainer import Trainer

default = hookimpl(trylast=True)


class Core(Plugin):
    """The Trainer's own way of doing things."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_at: set[str | None] = set()
        "Optimizer names whose first batch has been checked."

    @default
    def forge_setup_env(self, trainer: Trainer) -> Env:
        return Env(trainer.device)

    @default
    def forge_build_loader(self, trainer: Trainer, stage: str) -> Any:
        given = trainer.given_loaders.get(stage)
        for loader in given.values() if isinstance(given, dict) else [given]:
            hand_on = getattr(loader, "set_default_seed", None)
            if hand_on is not None and trainer.seed is not None:
                hand_on(trainer.seed)
        return given

    @default
    def forge_build_optimizers(self, trainer: Trainer) -> Optimizers:
        return Optimizers.from_task(checks.configured(trainer.task), trainer.task)

    @default
    def forge_plan_step(self, trainer: Trainer) -> int:
        return 1

    @default
    def forge_train_step(self, step: Step) -> bool:
        checks.not_finished(step)
        step.run_window()
        step.finish()
        return True

    @default
    def forge_prepare_batch(self, step: Step, batch: Any) -> Any:
        return step.trainer.env.move(batch)

    @default
    def forge_micro_step(self, step: Step, batch: Any) -> bool:
        hooks = step.trainer.hooks
        if step.name in self.looked_at:
            output = hooks.forge_forward(step, batch)
        else:
            output = checks.first_forward(step, batch)
            self.looked_at.add(step.name)
        loss = record(step, output)
        hooks.forge_backward(step, step.weigh(loss))
        return True

    @default
    def forge_forward(self, step: Step, batch: Any) -> Any:
        return step.trainer.model(batch, step.stage, step.name)

    @default
    def forge_backward(self, step: Step, loss: Tensor) -> bool:
        loss.backward()
        return True

    @default
    def forge_optimizer_step(self, step: Step) -> bool:
        entry = step.trainer.optimizers.entries[step.name]
        if entry.needs_closure:
            entry.optimizer.step(step.closure())  # pyright: ignore[reportCallIssue, reportArgumentType]
        else:
            entry.optimizer.step()
        return True

    @default
    def forge_evaluate(self, trainer: Trainer, stage: str) -> Any:
        return evaluation.run(trainer, stage)


def record(step: Step, output: Any) -> Tensor:
    """Count a training step's metrics in their means, weighted by items, and return its loss."""
    prefix = "train/" if step.name is None else f"train/{step.name}/"
    metrics = {"loss": output} if isinstance(output, Tensor) else output
    if step._record:
        means, weight = step.trainer.means, step.items[step.micro]
        for name, value in metrics.items():
            means.add(prefix + name, value, weight)
    return metrics["loss"]
