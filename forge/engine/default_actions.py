"""Defaults: what runs for an action that no plugin owns. They are a plugin themselves, `core`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from forge.checkpoint import save_weights
from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.run import Run
from forge.contract.step import Step
from forge.data.accumulation_windows import check_loader
from forge.data.adapt import adopt, by_name
from forge.data.protocols import is_live
from forge.data.sharding import RankLoader
from forge.diagnose import checks
from forge.engine import evaluation
from forge.env import Env
from forge.optim.optimizers import Optimizers
from forge.snapshot.finite import refuse_non_finite

default = hookimpl(trylast=True)


class Core(Plugin):
    """The default of every action."""

    def __init__(self) -> None:
        super().__init__()
        self.checked: set[str | None] = set()
        "Optimizers whose first batch was checked."

    @default
    def forge_setup_env(self, trainer: Run) -> Env:
        return Env(trainer.device)

    @default
    def forge_build_loader(self, trainer: Run, stage: str) -> Any:
        given = by_name(trainer.given_loaders.get(stage), stage)
        if isinstance(given, dict):
            return {name: self._adopted(trainer, loader, stage) for name, loader in given.items()}
        return None if given is None else self._adopted(trainer, given, stage)

    def _adopted(self, trainer: Run, given: Any, stage: str) -> Any:
        """The loader as one that can be continued exactly, where that is possible, with the Trainer's seed."""
        check_loader(given, stage)
        loader = adopt(given, stage, trainer.allow_inexact)
        hand_on = getattr(loader, "set_default_seed", None)
        if hand_on is not None and trainer.seed is not None:
            hand_on(trainer.seed)
        if is_live(loader):
            loader.attach(trainer.task, partial(evaluation.collect, trainer))
        env = trainer.env
        return loader if env.data_world == 1 else RankLoader(loader, env.data_rank, env.data_world, stage, env)

    @default
    def forge_build_optimizers(self, trainer: Run) -> Optimizers:
        return Optimizers.from_task(checks.configured(trainer.task), trainer.task)

    @default
    def forge_plan_step(self, trainer: Run) -> int:
        return 1

    @default
    def forge_train_step(self, step: Step) -> bool:
        if step.finished:
            raise RuntimeError(checks.OWNER_RETURNED_NONE)
        step.run_window()
        step.finish()
        return True

    @default
    def forge_prepare_batch(self, step: Step, batch: Any) -> Any:
        return step.trainer.env.move(batch)

    @default
    def forge_micro_step(self, step: Step, batch: Any) -> bool:
        trainer, hooks = step.trainer, step.trainer.hooks
        if step.name not in self.checked:
            self.checked.add(step.name)
            output = checks.first_forward(step, batch)
        else:
            output = hooks.forge_forward(step, batch)
        metrics = {"loss": output} if isinstance(output, Tensor) else output
        try:
            loss = metrics["loss"]
            if step.recording:
                trainer.means.add_all(step.prefix, metrics, step.items[step.micro])
        except (TypeError, KeyError):
            checks.check_training_output(output, trainer.task)
            raise
        if step.divisor != 1 or step.factors is not None or step.prepared is not None:
            loss = step.weigh(loss)
        hooks.forge_backward(step, loss)
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
            entry.step()
        return True

    @default
    def forge_evaluate(self, trainer: Run, stage: str) -> Any:
        return evaluation.run(trainer, stage)

    @default
    def forge_export(self, trainer: Run, path: Path) -> bool:
        with trainer.optimizers.evaluating():
            refuse_non_finite(trainer, trainer.task.state_dict())
            save_weights(trainer.task, path, main=trainer.env.is_main)
        return True
