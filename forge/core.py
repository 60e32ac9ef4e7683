"""Core: the default of every action, itself a plugin. This is what runs when nobody owns an action."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from forge import checks, evaluation
from forge.dispatch import Hooks
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
        self.alone = False
        "Whether nobody owns or wraps an action inside the train step, so that it can run written out."

    def look_around(self, hooks: Hooks) -> None:
        """Find out whether core is alone, once dispatch is frozen."""
        self.alone = all(getattr(hooks, name) == getattr(self, name) for name in INNER_ACTIONS)

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
        trainer = step.trainer
        if step._finished:
            raise RuntimeError(checks.OWNER_RETURNED_NONE)
        if not self.alone or trainer.keep_batches or step.name not in self.looked_at:
            step.run_window()
            step.finish()
            return True
        # The same two halves with core's own actions written out, which is most of what forge saves: between two calls
        # of ours torch evicts the caches, so that every function, object and attribute touched counts. A test holds
        # both paths equal, bit for bit.
        hooks, model, means, move = trainer.hooks, trainer.model, trainer.means, trainer.env.move
        for micro, raw in enumerate(step.window):
            step.micro = micro
            output = model(move(raw), "train", step.name)
            metrics = {"loss": output} if isinstance(output, Tensor) else output
            means.add_all(step.prefix, metrics, step.items[micro])
            loss = metrics["loss"]
            if step._factors is not None:
                loss = loss * step._factors[micro]
            elif step._divisor != 1:
                loss = loss / step._divisor
            loss.backward()
        if hooks.forge_finalize_grads is not None:
            hooks.forge_finalize_grads(step)
        if hooks.forge_inspect_grads is not None:
            hooks.forge_inspect_grads(step)
        if hooks.forge_edit_grads is not None:
            hooks.forge_edit_grads(step)
        optimizer = trainer.optimizers.entries[step.name].optimizer
        if step.skip_reason is None:
            optimizer.step()
            step.updated = True
        optimizer.zero_grad(set_to_none=True)
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
        metrics = {"loss": output} if isinstance(output, Tensor) else output
        if step._record:
            step.trainer.means.add_all(step.prefix, metrics, step.items[step.micro])
        hooks.forge_backward(step, step.weigh(metrics["loss"]))
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


INNER_ACTIONS = (
    "forge_prepare_batch",
    "forge_micro_step",
    "forge_forward",
    "forge_backward",
    "forge_optimizer_step",
)
