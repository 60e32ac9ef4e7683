"""Frozen parameters, for the whole run or a part of it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

import forge
from forge.contract import modes
from forge.contract.run_lengths import moment, reached
from forge.errors import CheckpointError, RecipeError, StackError, TaskError
from forge.runs.wording import counted
from forge.util.patterns import as_list, covers, listed, names_of_parameters, parts, unknown

logger = logging.getLogger("forge")


class Freeze(forge.Plugin):
    """Freeze parameters by name, for the whole run or until they are thawed: for fine-tuning parts of a task.

    Patterns are matched against the names of parameters and of the modules around them: `backbone` and `backbone.*`
    are all of the backbone, `encoder.layers.[0-3]` the first four layers, `*.bias` every bias. `*` stands for any text,
    dots included. Parameters that also match `keep` stay trained. A pattern without a match is refused.

    A frozen parameter has `requires_grad` off: no gradient, no step, no weight decay, no optimizer state. A frozen
    BatchNorm stays in evaluation mode, so that its statistics stay fixed too, unless `norm` is false; dropout is
    unchanged. A frozen module that the task had put into evaluation mode stays there until it thaws. If a frozen
    BatchNorm is switched to training mode during the run, it is switched back after that update, with a warning.

    `thaw` sets when frozen parts begin to train: one moment for all, or moments by pattern, for gradual unfreezing from
    the top. A parameter that matches several patterns thaws at the earliest of their moments; one that matches none
    stays frozen. Parameters to be thawed must be in an optimizer from the start: pass it all of `self.parameters()`;
    parameters without a gradient are skipped. The learning rate at the thaw is the schedule's at that update.

    It acts in `fit` only, and restores the task's flags at the end. Thawed parameters are saved with the run, so a
    resume is exact; `thaw` may be changed for parts that are still frozen.

    ::

        forge fit quickstart -p freeze freeze.modules=net.1 freeze.thaw='2 epochs'
        forge fit quickstart -p freeze freeze.modules='net.*' freeze.keep='net.7.*'
        forge fit quickstart -p freeze "freeze.modules='*.bias'" "freeze.thaw={net.7: 1 epoch, net.4: 2 epochs}"
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        modules: str | list[str]
        "Patterns of modules or parameters to freeze, such as backbone.* or '*.bias' (quoted, for YAML)."
        keep: str | list[str] = field(default_factory=list)
        "Patterns of modules or parameters that stay trained."
        thaw: str | dict[str, str] | None = None
        "When to thaw: '3 epochs', '500 updates', or moments by pattern; null: never."
        norm: bool = True
        "Keep frozen BatchNorm, and other modules with running statistics, in evaluation mode."

    config: Config

    def __init__(self, *first: str | list[str], **values: Any):
        super().__init__(*first, **values)
        config = self.config
        self._patterns, self._keep = as_list(config.modules), as_list(config.keep)
        if not self._patterns:
            raise RecipeError("freeze.modules is empty, so nothing is frozen. Name some, such as backbone.*.")
        thaw = {"*": config.thaw} if isinstance(config.thaw, str) else config.thaw or {}
        self._thaw = {pattern: moment(text, "freeze.thaw") for pattern, text in thaw.items()}
        if not self._thaw and not config.norm:
            self.forge_step_end = None  # pyright: ignore[reportAttributeAccessIssue]
        self._begin()

    def _begin(self) -> None:
        """Reset the state of one run."""
        self._chosen: dict[str, list[forge.Interval]] = {}
        "Parameters and norms changed in the task, by name, with the moments at which they thaw."
        self._thawed: set[str] = set()
        self._ahead: list[forge.Interval] = []
        "Moments not reached yet."
        self._frozen_norms: list[nn.Module] = []
        "The norms that are kept in evaluation mode."
        self._untouched: modes.Asleep = {}
        "The modules that are in evaluation mode in any case."
        self._warned = False

    # -- a run --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_build_model(self, trainer: forge.Run, phase: str) -> None:
        if phase == "surgery" and trainer.verb == "fit":
            self._begin()
            self._chosen = self._choose(trainer.task)
            self._untouched = modes.asleep(trainer.task)
            self._apply(trainer.task)
            self._refuse_all(trainer.task)
            self._log_frozen(trainer.task)

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        if trainer.verb == "fit":
            self._refuse_undone(trainer.task)
            self._refuse_untrained(trainer)
            self._warn_of_never(trainer)

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        for module in self._frozen_norms:
            if module.training:
                self._restore_eval(step)
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
        """Return the trained parameters and norms to freeze, with the moments at which they thaw."""
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
                f"freeze.modules={self.config.modules!r} freezes every parameter of {type(task).__name__}. Name fewer, "
                f"or keep some trained, for example with freeze.keep={last!r}."
            )

    def _refuse_undone(self, task: nn.Module) -> None:
        """Refuse a run in which another plugin replaced frozen layers by trained ones."""
        there = {**dict(task.named_modules()), **dict(task.named_parameters())}
        undone = [name for name in self._chosen if name not in there or is_on(there[name])]
        if undone:
            raise StackError(
                f"freeze froze {listed(undone)}, but a later plugin has replaced them or made them trainable. Move "
                "that plugin before freeze in the stack."
            )

    def _refuse_untrained(self, trainer: forge.Run) -> None:
        """Refuse a thaw of parameters that no optimizer has: they cannot be added later."""
        task, trained = trainer.task, {id(parameter) for parameter in trainer.optimizers.parameters(None)}
        lost = [n for n, parameter in task.named_parameters() if self._chosen.get(n) and id(parameter) not in trained]
        if lost:
            raise TaskError(
                f"freeze.thaw is to train {listed(lost)} later, but {type(task).__name__}.configure_optimizers leaves "
                f"{'it' if len(lost) == 1 else 'them'} out. Give the optimizer all parameters, not only those with "
                "requires_grad; it skips parameters without a gradient."
            )

    def _warn_of_never(self, trainer: forge.Run) -> None:
        limits = {"update": trainer.planned_updates, "epoch": trainer.max_epochs}
        for at in self._ahead:
            limit = limits.get(at.unit)
            if limit is not None and at.count >= limit:
                text = "freeze.thaw: this run ends after %d %ss, so parameters that thaw at %s never train."
                logger.warning(text, limit, at.unit, at)

    def _log_frozen(self, task: nn.Module) -> None:
        parameters = dict(task.named_parameters())
        frozen = [name for name in self._chosen if name in parameters]
        if not frozen:
            logger.warning("freeze: everything that freeze.modules matches was frozen already.")
            return
        norms = len(self._chosen) - len(frozen)
        values, total = (sum(parameters[name].numel() for name in names) for names in (frozen, parameters))
        also = f", and the statistics of {counted(norms, 'module')}" if norms else ""
        text = f"freeze: froze {len(frozen)} of {len(parameters)} parameters, {values:,} of {total:,} values{also}"
        logger.info("%s: %s.", text, listed(frozen))

    # -- during the run -----------------------------------------------------------------------------------------------

    def _thaw_now(self, come: list[forge.Interval], step: forge.Step) -> None:
        self._ahead = [at for at in self._ahead if at not in come]
        due = {name for name, moments in self._chosen.items() if not set(come).isdisjoint(moments)} - self._thawed
        if due:
            self._thawed |= due
            switch(step.trainer.task, due, on=True)
            thawed = {name: p for name, p in step.trainer.task.named_parameters() if name in due}
            self._wake(step.trainer.task, thawed.values())
            self._frozen_norms = self._norms(step.trainer.task)
            for module in self._frozen_norms:
                module.training = False
            many, values = counted(len(thawed), "parameter"), sum(each.numel() for each in thawed.values())
            text = "freeze: thawed %s after update %d, %s values: %s."
            logger.info(text, many, step.index + 1, f"{values:,}", listed(thawed))

    def _wake(self, task: nn.Module, thawed: Iterable[nn.Parameter]) -> None:
        """Set what was in evaluation mode only because it was frozen, and holds thawed parameters, to training mode."""
        slept = {key: module for key, module in modes.asleep(task).items() if key not in self._untouched}
        stay = {id(module) for module in modes.staying(task, slept, thawed)}
        for key, module in slept.items():
            module.training = key not in stay

    def _restore_eval(self, step: forge.Step) -> None:
        """Switch frozen norms back to evaluation mode after some `train()` call."""
        task, astray = step.trainer.task, {id(module) for module in self._frozen_norms if module.training}
        for module in self._frozen_norms:
            module.training = False
        if not self._warned:
            self._warned = True
            names = listed(name for name, module in task.named_modules() if id(module) in astray)
            text = "freeze: something called train() on %s in or after update %d, so frozen statistics may have moved; "
            text += "freeze switches them back to eval() after each update. To let them move, set freeze.norm=false."
            logger.warning(text, names, step.index)

    def _apply(self, task: nn.Module) -> None:
        """Set every flag for the current state."""
        switch(task, self._chosen.keys() - self._thawed, on=False)
        switch(task, self._thawed, on=True)
        self._frozen_norms = self._norms(task)
        self._ahead = list(dict.fromkeys(at for moments in self._chosen.values() for at in moments))

    def _norms(self, task: nn.Module) -> list[nn.Module]:
        frozen = self._chosen.keys() - self._thawed
        return [module for name, module in task.named_modules() if name in frozen]

    # -- state --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        return {"frozen": sorted(self._chosen), "thawed": sorted(self._thawed)}

    @forge.hookimpl
    def forge_load_state_dict(self, trainer: forge.Run, state: dict[str, Any]) -> None:
        then = set(state["frozen"])
        if then != self._chosen.keys() and not trainer.allow_inexact:
            raise CheckpointError(
                "freeze: the run to be resumed froze other parts than freeze.modules and freeze.keep name "
                f"now; they differ in {listed(sorted(then ^ self._chosen.keys()))}. Use the same (freeze.thaw may "
                "change), start a new run from its weights, or set allow_inexact=True "
                "(trainer.allow_inexact=true on the command line)."
            )
        switch(trainer.task, then - self._chosen.keys(), on=True)
        self._thawed = self._chosen.keys() & set(state["thawed"])
        self._apply(trainer.task)


def switch(task: nn.Module, names: Collection[str], on: bool) -> None:
    """Switch training of these parameters, and of these modules' statistics, on or off."""
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
    """Yield BatchNorm and similar modules by name: every module with a buffer `running_...` of its own."""
    for name, module in task.named_modules():
        if any(key.startswith("running_") and buffer is not None for key, buffer in module._buffers.items()):
            yield name, module
