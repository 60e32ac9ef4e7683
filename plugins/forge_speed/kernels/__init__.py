"""Faster kernels in place of torch's functions."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

import forge
from forge.contract.task import Build
from forge.errors import ForgeError, RecipeError, StackError, did_you_mean
from forge.util.patterns import as_list
from forge_kernels import discovery, patch
from forge_kernels.contract import INTERPRETED, Functional, Kernel, Subgraph
from forge_kernels.graph_rewriting import GraphRewriting
from forge_kernels.torch_internals import build_dynamo_table, rewriting_graphs, without_counting
from forge_speed.json_cache import JsonCache, cache_folder
from forge_speed.kernels.judgement import StepTrial, StepVerdict, judge
from forge_speed.kernels.observation import Candidate, ObservedCalls, observe_calls
from forge_speed.kernels.step_key import step_key
from forge_speed.kernels.variants import StepVariants, in_graphs, stand_ins

logger = logging.getLogger("forge")

AUTO, ALL = "auto", "all"
FILE = "kernels.json"
"""Where verdicts are kept, in the folder of the option `cache`."""


class Kernels(forge.Plugin):
    """Run forge's kernels in place of torch's functions, where they are faster.

    The code of the task does not change. While it trains or evaluates, functions such as
    `torch.nn.functional.layer_norm` are replaced by a kernel, for `F.layer_norm` and `nn.LayerNorm` alike, but not for
    a name that was imported directly (`from torch.nn.functional import layer_norm`). Between updates, and at the end of
    the run, torch's own functions are restored. In a step that `compile` compiles, whole patterns are replaced in its
    graph: the last linear layer with its cross-entropy, and two linear layers with an activation between them, however
    the model writes them. `forge kernels` lists the installed kernels, including those of other packages, and what each
    replaces.

    When to use it: on CUDA, for models that are limited by memory traffic. On other devices nothing is replaced, the
    run is bit for bit the same, and the log says so.

    With `use: auto` the first training batch runs forward once, without effect on the run, to find the calls that a
    kernel takes; its results and gradients must be those of torch within its tolerance. In a compiled step, single
    calls are only replaced where torch.compile would not fuse them with their neighbours (attention).

    Then **the whole step is the judge**: forward and backward of the first batch are measured with and without these
    kernels, together and one by one, in turns and without effect on the run. Kernels are used if the step is at least
    2 % faster and takes no more memory (`memory`), or is no slower and takes a tenth less; otherwise everything runs as
    written. The result is kept on disk for the next run, and in checkpoints: a resumed run uses the same kernels,
    because others would round differently. On several ranks nothing is measured: they use what a run of one process
    with the same shapes has measured before. `use` can also name kernels, or be `all`: then nothing is measured, and
    they take every call that they support.

    What you see: the kernels that take calls, and the step's time and memory with and without.

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
        memory: float = 1.0
        "auto: the most memory that the step may take with kernels, as a multiple of what it takes without."
        cache: bool | str = True
        "Where to keep measurements for the next run: true is the user's cache, a path is a folder, false is nowhere."

    config: Config
    provides = ("kernels",)
    capturable = True

    def __init__(self, *first: str | list[str], **values: Any):
        super().__init__(*first, **values)
        config, known = self.config, discovery.names()
        named = [] if config.use in (AUTO, ALL) else as_list(config.use)
        if config.memory <= 0:
            raise RecipeError(
                f"kernels.memory is {config.memory}; it must be above 0, and 1 means no more than without."
            )
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
        self._stand_ins = patch.StandIns()
        self._looked: list[str | None] = []
        "The optimizers whose first batch was observed."
        self._used: list[str] = []
        "Kernels in use."
        self._rewriting = ExitStack()

    # -- a run --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_build_model(self, trainer: forge.Run, build: Build, phase: str) -> None:
        if phase != "surgery":
            return
        self._rewriting.close()
        self._begin()
        device, compiled = trainer.env.device, _compiler(trainer) is not None
        candidates = self._load() if self._named or self._acts_on(device) else []  # names are refused on any device
        if not self._acts_on(device):
            logger.info("kernels: nothing is swapped: they run on CUDA, and this run is on %s.", device.type)
            return
        build_dynamo_table(soon=compiled)
        if self.config.use == AUTO:
            self._candidates = [candidate for candidate in candidates if _is_offered(candidate, compiled)]
            self._measures = trainer.verb == "fit"
            if not self._measures:
                logger.info(
                    "kernels.use=auto measures the first training batch: %s runs as written. Name kernels to use them.",
                    trainer.verb,
                )
            return
        self._candidates = [c for c in candidates if compiled or isinstance(c.replaces, Functional)]
        if self._named:
            self._check_named(candidates, compiled)
        self._used = sorted({candidate.kernel.name for candidate in self._candidates})
        self._apply()
        if self._used:
            logger.info("kernels: %s run where they support a call.", ", ".join(self._used))

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
        return {"looked": list(self._looked), "used": list(self._used)}

    @forge.hookimpl
    def forge_load_state_dict(self, state: dict[str, Any]) -> None:
        if self.config.use != AUTO or not state["looked"]:
            return
        before, self._looked, self._used = self._used, list(state["looked"]), list(state["used"])
        if self._measures and self._used != before:  # unchanged at a rewind
            self._refuse_missing()
            self._apply()

    @forge.hookimpl
    def forge_end(self) -> None:
        self._rewriting.close()
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

    def _check_named(self, candidates: list[Candidate], compiled: bool) -> None:
        """Refuse names that cannot be used together; warn of those that do nothing in this run."""
        takers: dict[str, str] = {}
        idle: list[str] = []
        for candidate in candidates:
            name, target = candidate.kernel.name, candidate.target
            if isinstance(candidate.replaces, Subgraph):
                if not compiled and name not in idle and _only_in_graphs(candidate.kernel):
                    idle.append(name)
                    logger.warning(
                        "kernels.use names %r, which replaces several calls of a compiled step, and does nothing here: "
                        "add -p compile, or call forge.kernels.%s in your task.",
                        name,
                        name,
                    )
            elif takers.setdefault(target, name) != name:
                raise RecipeError(
                    f"kernels.use: {takers[target]!r} and {name!r} both replace {target}. Exclude one of them: "
                    f"kernels.leave_out={name}"
                )

    def _apply(self) -> None:
        """Use the chosen kernels from now on: in place of functions, and in every graph that is compiled."""
        self._stand_ins = stand_ins(self._candidates, self._used)
        self._rewriting.close()
        patterns = in_graphs(self._candidates, self._used)
        if patterns:
            self._rewriting.enter_context(rewriting_graphs(GraphRewriting(patterns)))

    # -- auto ---------------------------------------------------------------------------------------------------------

    def _decide(self, step: forge.Step) -> None:
        """Observe the first batch, measure the whole step, and use what makes it faster."""
        trainer, compiled = step.trainer, _compiler(step.trainer) is not None
        self._looked.append(step.name)
        functions = [candidate for candidate in self._candidates if isinstance(candidate.replaces, Functional)]
        seen = observe_calls(step, functions, compiled)
        with trainer.env.no_timeout():
            decided = trainer.env.from_first(lambda: self._verdict(step, seen).as_data())
        verdict = StepVerdict.from_data(decided) or StepVerdict()
        self._used += [name for name in verdict.kept if name not in self._used]
        build_dynamo_table()
        self._apply()
        if trainer.env.is_main:
            _log(seen, verdict)

    def _verdict(self, step: forge.Step, seen: ObservedCalls) -> StepVerdict:
        """Judge the whole step, or read the verdict of an earlier run."""
        trainer, compiler = step.trainer, _compiler(step.trainer)
        offered = {c.kernel.name: c.kernel for c in self._candidates if c.kernel.name in seen.taken or compiler}
        if not offered or not seen.kinds:
            return StepVerdict()
        device, cache = trainer.env.device, JsonCache(cache_folder(self.config.cache), FILE)
        key = step_key(seen.kinds, offered.values(), trainer.task, device, compiler is not None, self.config.memory)
        known = StepVerdict.from_data(cache.get(key))
        if known is not None:
            logger.info("kernels: this step is known from an earlier run.")
            return known
        if trainer.env.world > 1:
            logger.info(
                "kernels.use=auto: a step of several ranks is not measured. Run once with one process and the same "
                "shapes, or name the kernels."
            )
            return StepVerdict()
        variants = StepVariants(self._candidates, compiler)
        with without_counting():
            trial = StepTrial(step)
            names = seen.taken.keys() | variants.found(trial, set(seen.taken))
            verdict = judge(
                sorted(names), lambda sets: trial.measure([variants.get(each) for each in sets]), self.config.memory
            )
        cache.put(key, verdict.as_data())
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the trials used other sizes than the run
        return verdict

    def _refuse_missing(self) -> None:
        """Refuse to resume a run without a kernel that it used: it could not continue exactly."""
        there = {candidate.kernel.name for candidate in self._candidates}
        missing = sorted(set(self._used) - there)
        if missing:
            raise StackError(
                f"The resumed run used the kernel {missing[0]!r}, which is not available now. Install its package "
                "again, or remove it from kernels.leave_out; kernels.use=all continues with the available kernels."
            )


def _compiler(trainer: forge.Run) -> Any:
    """Return the plugin that compiles the step, if there is one."""
    return next((plugin for plugin in trainer.stack if "compile" in plugin.provides), None)


def _is_offered(candidate: Candidate, compiled: bool) -> bool:
    """Whether auto tries a candidate: in a compiled step patterns, and functions that torch.compile would not fuse;
    else functions."""
    if isinstance(candidate.replaces, Subgraph):
        return compiled
    return not (compiled and candidate.replaces.fuses)


def _only_in_graphs(kernel: Kernel) -> bool:
    return all(isinstance(replaces, Subgraph) for replaces in kernel.replaces)


def _log(seen: ObservedCalls, verdict: StepVerdict) -> None:
    taken = [f"{name} takes {count} call{'s' if count > 1 else ''}" for name, count in sorted(seen.taken.items())]
    refused = [f"{name}: {why}" for name, why in sorted(seen.why_not.items())]
    if taken or refused:
        logger.info("kernels: in the first batch %s.", "; ".join(taken + refused))
    elif not verdict.costs:
        logger.info("kernels: the first batch calls nothing that an installed kernel replaces.")
    if verdict.costs:
        logger.info("kernels: forward and backward of the first batch: %s.", verdict)
