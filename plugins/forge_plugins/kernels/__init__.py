"""Faster kernels in place of torch's functions."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import forge
from forge.contract.task import Build
from forge.errors import ForgeError, RecipeError, StackError, did_you_mean
from forge.snapshot.sandbox import without_side_effects
from forge_kernels import discovery, patch
from forge_kernels.caching import Cache, default_folder, key_of
from forge_kernels.call_pattern import RecordedCall, pattern_of
from forge_kernels.contract import INTERPRETED, Functional
from forge_kernels.patch import StandIns, SwappedModules
from forge_kernels.selection import Candidate, KernelChoice, choose
from forge_kernels.timing import Stopwatch
from forge_plugins._patterns import MANY, as_list, listed
from forge_plugins.kernels.choice_table import table
from forge_plugins.kernels.observation import ObservedCalls, observe_calls

logger = logging.getLogger("forge")

AUTO, ALL = "auto", "all"


class Kernels(forge.Plugin):
    """Run forge's kernels in place of torch's functions and modules, where they are faster.

    The code of the task does not change. While it trains or evaluates, functions such as
    `torch.nn.functional.layer_norm` are replaced by a kernel, for `F.layer_norm` and `nn.LayerNorm` alike, but not for
    a name that was imported directly (`from torch.nn.functional import layer_norm`). Between updates, and at the end of
    the run, torch's own functions are restored. `forge kernels` lists the installed kernels, including those of other
    packages, and what each replaces.

    When to use it: on CUDA, for models that are limited by memory traffic. On other devices nothing is replaced, the
    run is bit for bit the same, and the log says so.

    With `use: auto` the first training batch runs forward once, without effect on the run, to find the calls. Each call
    is then measured on this device with its shapes, forward and backward, against what it replaces; if the stack
    compiles, against what torch.compile makes of it. A kernel that is at least 3 % faster, and computes the same within
    its tolerance, is used for calls of exactly this kind; all others run as written. The result is kept on disk for the
    next run, and in checkpoints: a resumed run uses the same kernels, because others would round differently. On
    several ranks the first one measures for all. `use` can also name kernels, or be `all`: then nothing is measured,
    and they take every call that they support.

    What you see: a table of the measurements in the log.

    Together with: `compile` may fuse a call with its neighbours, which a kernel prevents. Single calls are measured,
    but the whole step counts: compare both, and exclude a kernel with `leave_out`.

    ::

        forge fit quickstart -p kernels
        forge fit quickstart -p kernels kernels.use=all
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        use: str | list[str] = AUTO
        "Which kernels: auto (those that are faster, by measurement), all, or names."
        leave_out: str | list[str] | None = None
        "Kernels to exclude."
        cache: bool | str = True
        "Where to keep measurements for the next run: true is the user's cache, a path is a folder, false is nowhere."

    config: Config
    provides = ("kernels",)
    capturable = True

    def __init__(self, *first: str | list[str], **values: Any):
        super().__init__(*first, **values)
        config, known = self.config, discovery.names()
        named = [] if config.use in (AUTO, ALL) else as_list(config.use)
        if config.use == []:
            raise RecipeError("kernels.use is an empty list. Name some kernels, or write auto or all.")
        for option, names in (("use", named), ("leave_out", as_list(config.leave_out))):
            for name in names:
                if name not in known:
                    also = [AUTO, ALL] if option == "use" else []
                    raise RecipeError(
                        f"kernels.{option} names {name!r}, but no kernel has that name."
                        f"{did_you_mean(name, [*known, *also])}"
                    )
        self._named = named
        self._begin()

    def _begin(self) -> None:
        """Reset the state of one run."""
        self._candidates: list[Candidate] = []
        self._measures = False
        self._stand_ins = StandIns()
        self._modules = SwappedModules()
        self._looked: list[str | None] = []
        "The optimizers whose first batch was observed."
        self._choices: list[KernelChoice] = []

    # -- a run --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_build_model(self, trainer: forge.Run, build: Build, phase: str) -> None:
        if phase != "surgery":
            return
        self._begin()
        device = trainer.env.device
        candidates = self._load() if self._named or self._acts_on(device) else []  # names are refused on any device
        if not self._acts_on(device):
            logger.info("kernels: nothing is swapped: they run on CUDA, and this run is on %s.", device.type)
            return
        self._candidates = candidates
        patch.build_dynamo_table(soon=_compiles(trainer))
        if self.config.use == AUTO:
            self._measures = trainer.verb == "fit"
            if not self._measures:
                logger.info(
                    "kernels.use=auto measures the first training batch: %s runs as written. Name kernels to use them.",
                    trainer.verb,
                )
            return
        self._swap_all(build)

    def _acts_on(self, device: torch.device) -> bool:
        return device.type == "cuda" or (INTERPRETED and device.type == "cpu" and bool(self._named))

    @forge.hookimpl(wrapper=True)
    def forge_train_step(self, step: forge.Step) -> Generator[None, Any, Any]:
        if self._measures and step.name not in self._looked:
            self._decide(step)
        with self._stand_ins:
            return (yield)

    @forge.hookimpl(wrapper=True)
    def forge_evaluate(self) -> Generator[None, Any, Any]:
        with self._stand_ins:
            return (yield)

    @forge.hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        return {"looked": list(self._looked), "choices": [choice.as_data() for choice in self._choices]}

    @forge.hookimpl
    def forge_load_state_dict(self, trainer: forge.Run, state: dict[str, Any]) -> None:
        if self.config.use != AUTO or not state["looked"]:
            return
        choices, before = [KernelChoice.from_data(data) for data in state["choices"]], self._choices
        self._looked, self._choices = list(state["looked"]), choices
        if self._measures and choices != before:  # unchanged at a rewind
            self._refuse_missing()
            self._apply(trainer)

    @forge.hookimpl
    def forge_end(self) -> None:
        self._modules.restore()
        self._begin()

    # -- which kernels ------------------------------------------------------------------------------------------------

    def _load(self) -> list[Candidate]:
        """Return the kernels to use or choose from, with what they replace. A broken package fails only if named."""
        left_out, found = as_list(self.config.leave_out), []
        for name in self._named or discovery.names():
            if name in left_out:
                continue
            try:
                kernel = discovery.load(name)
                for replaces in kernel.replaces:
                    patch.refuse_unknown(replaces.target, name)
            except ForgeError as error:
                if self._named:
                    raise
                logger.warning("kernels: %s", error)
                continue
            if self._named and not kernel.replaces:
                raise RecipeError(
                    f"kernels.use names {name!r}, which replaces no torch function. Call forge.kernels.{name} in your "
                    "task instead."
                )
            found += [Candidate(kernel, replaces) for replaces in kernel.replaces]
        return found

    def _swap_all(self, build: Build) -> None:
        """Use every candidate where it is supported, without measuring."""
        functions: dict[str, Any] = {}
        takers: dict[str, str] = {}
        for candidate in self._candidates:
            name, target = candidate.kernel.name, candidate.target
            if target in takers:
                raise RecipeError(
                    f"kernels.use: {takers[target]!r} and {name!r} both replace {target}. Exclude one of them: "
                    f"kernels.leave_out={name}"
                )
            takers[target] = name
            if isinstance(candidate.replaces, Functional):
                functions[target] = patch.always(target, candidate.replaces.call)
            else:
                paths = patch.modules_of(build.task, target)
                done = self._modules.replace(build.task, paths, candidate.replaces.swap, name)
                if done:
                    logger.info("kernels: %s replaces %s.", name, listed(done, MANY))
        self._stand_ins = StandIns(functions)
        if functions:
            replaced = (f"{target.rpartition('.')[2]} ({takers[target]})" for target in functions)
            logger.info("kernels: replaced functions of torch: %s.", ", ".join(replaced))

    # -- auto ---------------------------------------------------------------------------------------------------------

    def _decide(self, step: forge.Step) -> None:
        """Observe the first batch, measure its calls, and use the faster kernels."""
        trainer = step.trainer
        self._looked.append(step.name)
        seen = observe_calls(step, self._candidates, _compiles(trainer))
        # shares of a batch may differ by a sample, so the first rank measures the calls of all ranks
        everywhere = trainer.env.gather([call.as_data() for call in seen.calls.values() if not call.module])
        others = (RecordedCall.from_data(data) for there in everywhere for data in there)
        calls = {**{call.kind: call for call in others}, **seen.calls}
        with trainer.env.no_timeout():
            made = trainer.env.from_first(lambda: self._measure(trainer, list(calls.values()), seen))
        choices = [KernelChoice.from_data(data) for data in made["choices"]]
        known = {choice.call.kind for choice in self._choices}
        self._choices += [choice for choice in choices if choice.call.kind not in known]
        self._apply(trainer)
        if trainer.env.is_main:
            self._log_choices(trainer, choices, seen, made["measured"])

    def _measure(self, trainer: forge.Run, calls: Sequence[RecordedCall], seen: ObservedCalls) -> dict[str, Any]:
        """On the first rank: read known choices from disk, and measure the others."""
        device, compiled = trainer.env.device, _compiles(trainer)
        cache = Cache(self._folder())
        stopwatch: Stopwatch | None = None
        choices, measured = [], 0
        with without_side_effects(trainer):
            for call in calls:
                rivals = [candidate for candidate in self._candidates if candidate.target == call.target]
                paths = seen.modules.get(call.kind, [])
                key = key_of(call, rivals, device, compiled)
                choice = cache.get(key, call)
                if choice is None:
                    stopwatch = stopwatch or Stopwatch(device, quick=True)
                    module = trainer.task.get_submodule(paths[0]) if paths else None
                    choice = choose(call, rivals, device, stopwatch, compiled, module)
                    cache.put(key, choice)
                    measured += 1
                choices.append(replace(choice, paths=tuple(paths)).as_data())
        cache.write()
        del stopwatch
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the measurements used other sizes than the run
        return {"choices": choices, "measured": measured}

    def _folder(self) -> Path | None:
        cache = self.config.cache
        if isinstance(cache, str):
            return Path(cache).expanduser()
        return default_folder() if cache else None

    def _apply(self, trainer: forge.Run) -> None:
        """Use the chosen kernels from now on."""
        chosen: dict[str, list[patch.Chosen]] = {}
        decided: set[str] = set()
        self._modules.restore()
        for choice in self._choices:
            paths = [path for path in choice.paths if path not in decided]
            decided |= set(paths)  # a module called in several ways is decided by the first
            for candidate in self._candidates:
                if candidate.kernel.name != choice.kernel or candidate.target != choice.call.target:
                    continue
                if isinstance(candidate.replaces, Functional):
                    entry = pattern_of(choice.call), candidate.replaces.call
                    chosen.setdefault(candidate.target, []).append(entry)
                else:
                    self._modules.replace(trainer.task, paths, candidate.replaces.swap, candidate.kernel.name)
        patch.build_dynamo_table()
        self._stand_ins = StandIns({target: patch.where_chosen(target, entries) for target, entries in chosen.items()})

    def _log_choices(
        self, trainer: forge.Run, choices: Sequence[KernelChoice], seen: ObservedCalls, measured: int
    ) -> None:
        if not choices:
            logger.info("kernels: the first batch calls nothing that an installed kernel replaces.")
            return
        device = trainer.env.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        logger.info("%s", table(choices, seen.counts, measured, _compiles(trainer), name))

    def _refuse_missing(self) -> None:
        """Refuse to resume a run without a kernel that it used: it could not continue exactly."""
        there = {candidate.kernel.name for candidate in self._candidates}
        missing = sorted({choice.kernel for choice in self._choices if choice.kernel} - there)
        if missing:
            raise StackError(
                f"The resumed run used the kernel {missing[0]!r}, which is not available now. Install its package "
                "again, or remove it from kernels.leave_out; kernels.use=all continues with the available kernels."
            )


def _compiles(trainer: forge.Run) -> bool:
    return any("compile" in plugin.provides for plugin in trainer.stack)
