"""Frozen parameters, for good or for a while."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

import forge
from forge.errors import CheckpointError, RecipeError, StackError, TaskError
from forge_plugins._patterns import as_list, covers, listed, names_of_parameters, parts, unknown
from forge_plugins._run_lengths import moment, reached

logger = logging.getLogger("forge")


class Freeze(forge.Plugin):
    """Train only a part of the task: parameters chosen by name keep their values, for good or until they are thawed.

    A pattern is matched against the names of parameters and of the modules that they are in: `backbone` and
    `backbone.*` are all of it, `encoder.layers.[0-3]` the first four layers, `*.bias` every bias. `*` stands for any
    text, dots too. What also matches `keep` stays trained. A pattern that matches nothing is refused.

    A frozen parameter has `requires_grad` off: no gradient, no step, no weight decay, no optimizer state. A frozen
    BatchNorm stays in evaluation mode, so that its statistics rest with its weights, unless `norm` is false; dropout
    goes on as it was. A module that somebody puts back into training mode on the way is put right after that update,
    with a warning.

    `thaw` is when training of the frozen parts begins: one moment for all, or moments by pattern, for gradual
    unfreezing from the top. A parameter that several patterns match thaws at the first of their moments, one that none
    matches stays frozen. What is to be thawed must be in an optimizer from the start: pass it all of
    `self.parameters()`, because parameters without a gradient are passed over. The learning rate at the thaw is what
    the schedule says then.

    It acts in `fit` alone, and hands the task back at the end with the flags that it had. What has been thawed is saved
    with the run, so a resume goes on exactly; `thaw` may change for what is still frozen then.

    ::

        forge fit quickstart -p freeze freeze.modules=net.1 freeze.thaw='2 epochs'
        forge fit quickstart -p freeze freeze.modules='net.*' freeze.keep='net.7.*'
        forge fit quickstart -p freeze "freeze.modules='*.bias'" "freeze.thaw={net.7: 1 epoch, net.4: 2 epochs}"
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        modules: str | list[str]
        "What to freeze: patterns of module or parameter names, as in backbone.*, or '*.bias' (quoted, for YAML)."
        keep: str | list[str] = field(default_factory=list)
        "What stays trained all the same: patterns too."
        thaw: str | dict[str, str] | None = None
        "When to train it after all: '3 epochs', '500 updates', or moments by pattern; null: never."
        norm: bool = True
        "Keep frozen BatchNorm, and whatever else has running statistics, in evaluation mode."

    config: Config

    def __init__(self, *first: str | list[str], **values: Any):
        super().__init__(*first, **values)
        config = self.config
        self._patterns, self._keep = as_list(config.modules), as_list(config.keep)
        if not self._patterns:
            raise RecipeError("freeze.modules is empty: there is nothing to freeze. Name some, as in backbone.*.")
        thaw = {"*": config.thaw} if isinstance(config.thaw, str) else config.thaw or {}
        self._thaw = {pattern: moment(text, "freeze.thaw") for pattern, text in thaw.items()}
        if not self._thaw and not config.norm:
            self.forge_step_end = None  # pyright: ignore[reportAttributeAccessIssue]
        self._begin()

    def _begin(self) -> None:
        """What belongs to one run."""
        self._chosen: dict[str, list[forge.Interval]] = {}
        "Parameters and norms by name, with the moments at which they thaw: all that was changed in the task."
        self._thawed: set[str] = set()
        self._ahead: list[forge.Interval] = []
        "Moments that have not come yet."
        self._resting: list[nn.Module] = []
        "The norms that are kept in evaluation mode."
        self._told = False

    # -- a run --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_build_model(self, trainer: forge.Run, phase: str) -> None:
        if phase == "surgery" and trainer.verb == "fit":
            self._begin()
            self._chosen = self._choose(trainer.task)
            self._apply(trainer.task)
            self._refuse_all(trainer.task)
            self._tell(trainer.task)

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        if trainer.verb == "fit":
            self._refuse_undone(trainer.task)
            self._refuse_untrained(trainer)
            self._warn_of_never(trainer)

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        for module in self._resting:
            if module.training:
                self._put_right(step)
        if self._ahead:
            epochs, samples = step.epoch + step.ends_epoch, step.samples_before + step.samples
            come = [at for at in self._ahead if reached(at, updates=step.index + 1, epochs=epochs, samples=samples)]
            if come:
                self._thaw_now(come, step)

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        switch(trainer.task, self._chosen, on=True)
        self._begin()

    # -- what to freeze -----------------------------------------------------------------------------------------------

    def _choose(self, task: nn.Module) -> dict[str, list[forge.Interval]]:
        """What is trained now and shall not be, with the moments at which it shall again."""
        names = names_of_parameters(task)
        norms = {name: module for name, module in with_statistics(task) if name} if self.config.norm else {}
        there = [*(name for every in names.values() for name in every), *norms]
        for option, patterns in (("modules", self._patterns), ("keep", self._keep), ("thaw", self._thaw)):
            for pattern in patterns:
                if not covers([pattern], there):
                    raise unknown(pattern, f"freeze.{option}", task)
        matched = {key for key, every in names.items() if self._matches(every)}
        chosen = {
            name: names[id(parameter)]
            for name, parameter in task.named_parameters()
            if id(parameter) in matched and parameter.requires_grad
        }
        for name, module in norms.items():
            own = [id(parameter) for parameter in module.parameters(recurse=False)]
            if module.training and (matched.issuperset(own) if own else self._matches([name])):
                chosen[name] = [alias for key in own for alias in names[key]] or [name]
        for pattern in self._thaw:
            if chosen and not any(covers([pattern], every) for every in chosen.values()):
                raise RecipeError(f"freeze.thaw: {pattern!r} matches nothing that freeze.modules freezes.")
        return {
            name: [at for pattern, at in self._thaw.items() if covers([pattern], every)]
            for name, every in chosen.items()
        }

    def _matches(self, names: list[str]) -> bool:
        return covers(self._patterns, names) and not covers(self._keep, names)

    def _refuse_all(self, task: nn.Module) -> None:
        if self._chosen and not any(parameter.requires_grad for parameter in task.parameters()):
            last = parts(task)[-1]
            raise RecipeError(
                f"freeze.modules={self.config.modules!r} leaves {type(task).__name__} nothing to train: all of its "
                f"parameters are frozen. Name fewer, or say what stays trained, as in freeze.keep={last!r}."
            )

    def _refuse_undone(self, task: nn.Module) -> None:
        """Whoever changed layers after they were frozen has put trained ones in their place."""
        there = {**dict(task.named_modules()), **dict(task.named_parameters())}
        undone = [name for name in self._chosen if name not in there or is_on(there[name])]
        if undone:
            raise StackError(
                f"freeze froze {listed(undone)}, but a plugin that came later has replaced or switched on what was "
                "frozen. Let that plugin stand before freeze in the stack."
            )

    def _refuse_untrained(self, trainer: forge.Run) -> None:
        """What is thawed later has to be in an optimizer by now: nobody would add it then."""
        task, trained = trainer.task, {id(parameter) for parameter in trainer.optimizers.parameters(None)}
        lost = [n for n, parameter in task.named_parameters() if self._chosen.get(n) and id(parameter) not in trained]
        if lost:
            raise TaskError(
                f"freeze.thaw is to train {listed(lost)} later, but {type(task).__name__}.configure_optimizers leaves "
                f"{'it' if len(lost) == 1 else 'them'} out. Give the optimizer all parameters, not only those with "
                "requires_grad: what has no gradient it passes over."
            )

    def _warn_of_never(self, trainer: forge.Run) -> None:
        limits = {"update": trainer.planned_updates, "epoch": trainer.max_epochs}
        for at in self._ahead:
            limit = limits.get(at.unit)
            if limit is not None and at.count >= limit:
                logger.warning(
                    "freeze.thaw: this run is over after %d %ss, so what thaws at %s never trains.", limit, at.unit, at
                )

    def _tell(self, task: nn.Module) -> None:
        parameters = dict(task.named_parameters())
        frozen = [name for name in self._chosen if name in parameters]
        if not frozen:
            logger.warning("freeze: what freeze.modules matches was not trained before either.")
            return
        norms = len(self._chosen) - len(frozen)
        logger.info(
            "freeze holds %d of %d parameters, %s of %s values%s: %s.",
            len(frozen),
            len(parameters),
            f"{sum(parameters[name].numel() for name in frozen):,}",
            f"{sum(parameter.numel() for parameter in parameters.values()):,}",
            f", and the statistics of {norms} module{'s' if norms > 1 else ''}" if norms else "",
            listed(frozen),
        )

    # -- on the way ---------------------------------------------------------------------------------------------------

    def _thaw_now(self, come: list[forge.Interval], step: forge.Step) -> None:
        self._ahead = [at for at in self._ahead if at not in come]
        due = {name for name, moments in self._chosen.items() if not set(come).isdisjoint(moments)} - self._thawed
        if due:
            self._thawed |= due
            switch(step.trainer.task, due, on=True)
            self._resting = self._norms(step.trainer.task)
            thawed = {name: p for name, p in step.trainer.task.named_parameters() if name in due}
            logger.info(
                "freeze thaws %d parameter%s after update %d, %s values: %s.",
                len(thawed),
                "" if len(thawed) == 1 else "s",
                step.index + 1,
                f"{sum(parameter.numel() for parameter in thawed.values()):,}",
                listed(list(thawed)),
            )

    def _put_right(self, step: forge.Step) -> None:
        """Somebody's `train()` has reached frozen norms."""
        task, astray = step.trainer.task, {id(module) for module in self._resting if module.training}
        for module in self._resting:
            module.training = False
        if not self._told:
            self._told = True
            logger.warning(
                "freeze: something called train() on %s in or after update %d, so frozen statistics may have moved; "
                "freeze puts them back into eval() after each update. To have them move, set freeze.norm=false.",
                listed([name for name, module in task.named_modules() if id(module) in astray]),
                step.index,
            )

    def _apply(self, task: nn.Module) -> None:
        """Every flag as it is to be now."""
        switch(task, self._chosen.keys() - self._thawed, on=False)
        switch(task, self._thawed, on=True)
        self._resting = self._norms(task)
        self._ahead = list(dict.fromkeys(at for moments in self._chosen.values() for at in moments))

    def _norms(self, task: nn.Module) -> list[nn.Module]:
        resting = self._chosen.keys() - self._thawed
        return [module for name, module in task.named_modules() if name in resting]

    # -- state --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        return {"frozen": sorted(self._chosen), "thawed": sorted(self._thawed)}

    @forge.hookimpl
    def forge_load_state_dict(self, trainer: forge.Run, state: dict[str, Any]) -> None:
        then = set(state["frozen"])
        if then != self._chosen.keys() and not trainer.allow_inexact:
            raise CheckpointError(
                "freeze: the run that is to be continued froze other parts than freeze.modules and freeze.keep say "
                f"now: they differ in {listed(sorted(then ^ self._chosen.keys()))}. Use the same (freeze.thaw may "
                "change), start a new run from its weights, or say allow_inexact=True "
                "(trainer.allow_inexact=true on the command line)."
            )
        switch(trainer.task, then - self._chosen.keys(), on=True)
        self._thawed = self._chosen.keys() & set(state["thawed"])
        self._apply(trainer.task)


def switch(task: nn.Module, names: Collection[str], on: bool) -> None:
    """Train these parameters, and these modules' statistics, or leave them as they are."""
    for name, parameter in task.named_parameters():
        if name in names:
            parameter.requires_grad_(on)
    for name, module in task.named_modules():
        if name in names:
            module.training = on


def is_on(thing: nn.Parameter | nn.Module) -> bool:
    """Whether a parameter, or a module's statistics, are trained."""
    return thing.requires_grad if isinstance(thing, nn.Parameter) else thing.training


def with_statistics(task: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """BatchNorm and its kin, by name: every module with a buffer `running_...` of its own."""
    for name, module in task.named_modules():
        if any(key.startswith("running_") and buffer is not None for key, buffer in module._buffers.items()):
            yield name, module
