"""Core: the default of every action, itself a plugin. This is what runs when nobody owns an action."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from forge.checkpoint import save_weights
from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.step import Step
from forge.contract.task import direct_call
from forge.data.adapt import adopt
from forge.data.sharding import SharedLoader
from forge.data.windows import check_loader
from forge.diagnose import checks
from forge.engine import evaluation
from forge.env import Env
from forge.optim.optimizers import Optimizers, drop_gradients

if TYPE_CHECKING:
    from forge.engine.trainer import Trainer

default = hookimpl(trylast=True)


@dataclass(frozen=True, slots=True)
class Direct:
    """How the written-out step does each action: None where it is core's own, and written out too."""

    call: Callable[[Any], Any]
    "The model on a batch: the task's own training_step, where nothing stands around the task."
    prepare: Callable[..., Any] | None
    forward: Callable[..., Any] | None
    backward: Callable[..., Any] | None
    update: Callable[..., Any] | None


class Core(Plugin):
    """The Trainer's own way of doing things."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_at: set[str | None] = set()
        "Optimizer names whose first batch has been checked."
        self.direct: Direct | None = None
        "How to run the step written out, once it is known that it can be."

    @default
    def forge_setup_env(self, trainer: Trainer) -> Env:
        return Env(trainer.device)

    @default
    def forge_build_loader(self, trainer: Trainer, stage: str) -> Any:
        given = trainer.given_loaders.get(stage)
        if isinstance(given, dict):
            return {name: self._adopted(trainer, loader, stage) for name, loader in given.items()}
        return None if given is None else self._adopted(trainer, given, stage)

    def _adopted(self, trainer: Trainer, given: Any, stage: str) -> Any:
        """The loader as one that can be continued exactly, where that is possible, with the Trainer's seed."""
        check_loader(given, stage)
        loader = adopt(given, stage, trainer.allow_inexact)
        hand_on = getattr(loader, "set_default_seed", None)
        if hand_on is not None and trainer.seed is not None:
            hand_on(trainer.seed)
        env = trainer.env
        return loader if env.shares == 1 else SharedLoader(loader, env.share, env.shares, stage, env.agree)

    @default
    def forge_build_optimizers(self, trainer: Trainer) -> Optimizers:
        return Optimizers.from_task(checks.configured(trainer.task), trainer.task)

    @default
    def forge_plan_step(self, trainer: Trainer) -> int:
        return 1

    @default
    def forge_train_step(self, step: Step) -> bool:
        direct = self.direct
        if direct is None:
            if step._finished:
                raise RuntimeError(checks.OWNER_RETURNED_NONE)
            step.run_window()
            step.finish()
            self.direct = self._direct(step.trainer)
            return True
        # The same two halves with core's own actions written out: between two calls of ours torch evicts the caches, so
        # every function, object and attribute touched costs. A test holds both paths equal, bit for bit.
        trainer = step.trainer
        hooks, means, move = trainer.hooks, trainer.means, trainer.env.move
        call, prepare, forward, backward = direct.call, direct.prepare, direct.forward, direct.backward
        for micro, raw in enumerate(step.window):
            step.micro = micro
            batch = move(raw) if prepare is None else prepare(step, raw)
            output = call(batch) if forward is None else forward(step, batch)
            metrics = {"loss": output} if isinstance(output, Tensor) else output
            try:
                loss = metrics["loss"]
                means.add_all("train/", metrics, step.items[micro])
            except (TypeError, KeyError):
                checks.check_training_output(output, trainer.task)
                raise
            if step._factors is not None:
                loss = loss * step._factors[micro]
            elif step._divisor != 1:
                loss = loss / step._divisor
            if backward is None:
                loss.backward()
            else:
                backward(step, loss)
        if hooks.forge_finalize_grads is not None:
            hooks.forge_finalize_grads(step)
        if hooks.forge_inspect_grads is not None:
            hooks.forge_inspect_grads(step)
        optimizer = trainer.optimizers.entries[None].optimizer
        if step.skip_reason is None and hooks.forge_edit_grads is not None:
            hooks.forge_edit_grads(step)
        if step.skip_reason is None:  # whoever edits gradients may still have asked for it
            if direct.update is None:
                optimizer.step()
                step.updated = True
            else:
                step.updated = bool(direct.update(step))
        drop_gradients(optimizer)
        return True

    def _direct(self, trainer: Trainer) -> Direct | None:
        """The step can run written out where the micro-step is core's own, one optimizer trains and nothing replays."""
        if self._other(trainer, "forge_micro_step") or trainer.keep_batches or trainer.optimizers.named:
            return None
        return Direct(
            direct_call(trainer.model),
            self._other(trainer, "forge_prepare_batch"),
            self._other(trainer, "forge_forward"),
            self._other(trainer, "forge_backward"),
            self._other(trainer, "forge_optimizer_step"),
        )

    def _other(self, trainer: Trainer, hook: str) -> Callable[..., Any] | None:
        """The hook, where somebody owns or wraps it; None where it is core's own."""
        frozen = getattr(trainer.hooks, hook)
        return None if frozen == getattr(self, hook) else frozen

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
        try:
            loss = metrics["loss"]
            if step._record:
                step.trainer.means.add_all(step.prefix, metrics, step.items[step.micro])
        except (TypeError, KeyError):
            checks.check_training_output(output, step.trainer.task)
            raise
        hooks.forge_backward(step, step.weigh(loss))
        return True

    @default
    def forge_forward(self, step: Step, batch: Any) -> Any:
        if self.direct is not None and step.stage == "train":
            return self.direct.call(batch)
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

    @default
    def forge_export(self, trainer: Trainer, path: Path) -> bool:
        save_weights(trainer.task, path, main=trainer.env.is_main)
        return True
