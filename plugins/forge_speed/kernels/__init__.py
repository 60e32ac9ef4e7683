"""Faster kernels in place of torch's functions."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import forge
from forge.contract.task import Build
from forge.errors import ForgeError, RecipeError, StackError, did_you_mean
from forge.snapshot.sandbox import without_side_effects
from forge_kernels import discovery, patch
from forge_kernels.caching import Cache, default_folder, key_of, step_key
from forge_kernels.call_pattern import RecordedCall, pattern_of
from forge_kernels.contract import INTERPRETED, Functional, Kernel, Module, Subgraph
from forge_kernels.graph_rewriting import GraphRewriting
from forge_kernels.patch import StandIns, SwappedModules
from forge_kernels.selection import Candidate, KernelChoice, choose, without_counting
from forge_kernels.timing import Stopwatch
from forge_plugins.common.patterns import MANY, as_list, listed
from forge_speed.kernels.choice_table import table
from forge_speed.kernels.judgement import StepTrial, StepVerdict, judge
from forge_speed.kernels.observation import ObservedCalls, observe_calls
from forge_speed.kernels.variants import StepVariants, rewriting_graphs

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
    is then measured on this device with its shapes, forward and backward, against what it replaces. A kernel that is at
    least 3 % faster, and computes the same within its tolerance, is proposed for calls of exactly this kind. In a step
    that `compile` compiles, single calls are proposed only where torch.compile would not fuse them with their
    neighbours (attention); instead, whole patterns are looked for in the graph of your step: the last linear layer with
    its cross-entropy, and two linear layers with an activation between them, however the model writes them.

    Then **the whole step is the judge**: forward and backward of the first batch are measured with and without what
    is proposed, in turns and without effect on the run. Kernels are used if the step is at least 2 % faster and
    takes no more memory (`memory`), or is no slower and takes a tenth less; otherwise everything runs as written.
    The result is kept on disk for the next run, and in checkpoints: a resumed run uses the same kernels, because
    others would round differently. On several ranks nothing is measured: they use what a run of one process with
    the same shapes has measured before. `use` can also name kernels, or be `all`: then nothing is measured, and
    they take every call that they support.

    What you see: a table of the measurements in the log, and the step's time and memory with and without.

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
    provides = ("kernels", "swapped_modules")
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
        self._stand_ins = StandIns()
        self._modules = SwappedModules()
        self._looked: list[str | None] = []
        "The optimizers whose first batch was observed."
        self._choices: list[KernelChoice] = []
        self._in_graphs: list[str] = []
        "Kernels that replace patterns in compiled graphs."
        self._rewriting = ExitStack()

    # -- a run --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_build_model(self, trainer: forge.Run, build: Build, phase: str) -> None:
        if phase != "surgery":
            return
        self._rewriting.close()
        self._begin()
        device = trainer.env.device
        candidates = self._load() if self._named or self._acts_on(device) else []  # names are refused on any device
        if not self._acts_on(device):
            logger.info("kernels: nothing is swapped: they run on CUDA, and this run is on %s.", device.type)
            return
        self._candidates = candidates
        patch.build_dynamo_table(soon=_compiler(trainer) is not None)
        if self.config.use == AUTO:
            self._measures = trainer.verb == "fit"
            if not self._measures:
                logger.info(
                    "kernels.use=auto measures the first training batch: %s runs as written. Name kernels to use them.",
                    trainer.verb,
                )
            return
        self._swap_all(build, _compiler(trainer) is not None)

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
        choices = [choice.as_data() for choice in self._choices]
        return {"looked": list(self._looked), "choices": choices, "in_graphs": list(self._in_graphs)}

    @forge.hookimpl
    def forge_load_state_dict(self, trainer: forge.Run, state: dict[str, Any]) -> None:
        if self.config.use != AUTO or not state["looked"]:
            return
        choices, before = [KernelChoice.from_data(data) for data in state["choices"]], self._choices
        graphs, graphs_before = list(state.get("in_graphs", [])), self._in_graphs
        self._looked, self._choices, self._in_graphs = list(state["looked"]), choices, graphs
        if self._measures and (choices != before or graphs != graphs_before):  # unchanged at a rewind
            self._refuse_missing()
            self._apply(trainer)

    @forge.hookimpl
    def forge_end(self) -> None:
        self._modules.restore()
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

    def _swap_all(self, build: Build, compiled: bool) -> None:
        """Use every candidate where it is supported, without measuring."""
        functions: dict[str, Any] = {}
        takers: dict[str, str] = {}
        for candidate in self._candidates:
            name, target = candidate.kernel.name, candidate.target
            if isinstance(candidate.replaces, Subgraph):
                if compiled and name not in self._in_graphs:
                    self._in_graphs.append(name)
                elif self._named and not compiled and _only_in_graphs(candidate.kernel):
                    raise RecipeError(
                        f"kernels.use names {name!r}, which replaces several calls of a compiled step: add -p compile. "
                        f"Or call forge.kernels.{name} in your task."
                    )
                continue
            if target in takers and not self._named:  # the first by name
                continue
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
        self._rewrite_graphs()
        if functions:
            replaced = (f"{target.rpartition('.')[2]} ({takers[target]})" for target in functions)
            logger.info("kernels: replaced functions of torch: %s.", ", ".join(replaced))

    # -- auto ---------------------------------------------------------------------------------------------------------

    def _decide(self, step: forge.Step) -> None:
        """Observe the first batch, measure its calls and then the whole step, and use what makes it faster."""
        trainer, compiler = step.trainer, _compiler(step.trainer)
        self._looked.append(step.name)
        candidates = [c for c in self._candidates if _is_offered(c, compiler is not None)]
        seen = observe_calls(step, candidates, compiler is not None)
        # shares of a batch may differ by a sample, so the first rank decides on the calls of all ranks
        everywhere = trainer.env.gather([call.as_data() for call in seen.calls.values() if not call.module])
        others = (RecordedCall.from_data(data) for there in everywhere for data in there)
        calls = {**{call.kind: call for call in others}, **seen.calls}
        patterns = sorted({c.kernel.name for c in self._candidates if isinstance(c.replaces, Subgraph)})
        with trainer.env.no_timeout():
            made = trainer.env.from_first(
                lambda: self._measure(step, candidates, list(calls.values()), seen, patterns if compiler else [])
            )
        verdict = StepVerdict.from_data(made["verdict"])
        choices = [_judged(KernelChoice.from_data(data), verdict) for data in made["choices"]]
        known = {choice.call.kind for choice in self._choices}
        self._choices += [choice for choice in choices if choice.call.kind not in known]
        self._in_graphs += [name for name in patterns if name in verdict.kept and name not in self._in_graphs]
        self._apply(trainer)
        if trainer.env.is_main:
            self._log_choices(trainer, choices, seen, made["measured"], verdict)

    def _measure(
        self,
        step: forge.Step,
        candidates: list[Candidate],
        calls: Sequence[RecordedCall],
        seen: ObservedCalls,
        patterns: list[str],
    ) -> dict[str, Any]:
        """On the first rank: read known choices from disk, measure the others, and judge the step."""
        trainer = step.trainer
        device, compiled, alone = trainer.env.device, _compiler(trainer) is not None, trainer.env.world == 1
        cache = Cache(self._folder())
        stopwatch: Stopwatch | None = None
        choices: list[KernelChoice] = []
        measured = 0
        keys = []
        with without_side_effects(trainer):
            for call in calls:
                rivals = [candidate for candidate in candidates if candidate.target == call.target]
                paths = seen.modules.get(call.kind, [])
                keys.append(key_of(call, rivals, device, compiled))
                choice = cache.get(keys[-1], call)
                if choice is None and alone:
                    stopwatch = stopwatch or Stopwatch(device, quick=True)
                    module = trainer.task.get_submodule(paths[0]) if paths else None
                    choice = choose(call, rivals, device, stopwatch, compiled, module)
                    cache.put(keys[-1], choice)
                    measured += 1
                choice = choice or KernelChoice(call, None, why="not measured on several ranks")
                choices.append(replace(choice, paths=tuple(paths)))
        del stopwatch
        verdict = self._verdict(step, cache, keys, choices, patterns, alone)
        cache.write()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the measurements used other sizes than the run
        return {
            "choices": [choice.as_data() for choice in choices],
            "measured": measured,
            "verdict": verdict.as_data(),
        }

    def _verdict(
        self,
        step: forge.Step,
        cache: Cache,
        keys: list[str],
        choices: Sequence[KernelChoice],
        patterns: list[str],
        alone: bool,
    ) -> StepVerdict:
        """Judge the whole step, or read the verdict of an earlier run."""
        proposed = {choice.kernel for choice in choices if choice.kernel is not None}
        if not proposed and not patterns:
            return StepVerdict()
        named = [discovery.load(name) for name in patterns]
        key = step_key(keys, named, step.trainer.task, step.trainer.env.device, self.config.memory)
        known = cache.verdict(key)
        if known is not None:
            return StepVerdict.from_data(known)
        if not alone:
            logger.info(
                "kernels.use=auto: a step of several ranks is not measured. Run once with one process and the same "
                "shapes, or name the kernels."
            )
            return StepVerdict()
        variants = StepVariants(step.trainer, self._candidates, choices, _compiler(step.trainer))
        with without_counting():
            trial = StepTrial(step)
            found = variants.found(trial, patterns)
            verdict = judge(
                sorted(proposed | found),
                lambda sets: trial.measure([variants.get(names) for names in sets]),
                self.config.memory,
            )
        cache.put_verdict(key, verdict.as_data())
        return verdict

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
                elif isinstance(candidate.replaces, Module):
                    self._modules.replace(trainer.task, paths, candidate.replaces.swap, candidate.kernel.name)
        patch.build_dynamo_table()
        self._stand_ins = StandIns({target: patch.where_chosen(target, entries) for target, entries in chosen.items()})
        self._rewrite_graphs()

    def _rewrite_graphs(self) -> None:
        """Put the chosen kernels into every graph that is compiled from now on."""
        self._rewriting.close()
        if self._in_graphs:
            kernels = [discovery.load(name) for name in self._in_graphs]
            self._rewriting.enter_context(rewriting_graphs(GraphRewriting(kernels)))

    def _log_choices(
        self,
        trainer: forge.Run,
        choices: Sequence[KernelChoice],
        seen: ObservedCalls,
        measured: int,
        verdict: StepVerdict,
    ) -> None:
        if not choices and not verdict.costs:
            logger.info("kernels: the first batch calls nothing that an installed kernel replaces.")
            return
        device = trainer.env.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        if choices:
            logger.info("%s", table(choices, seen.counts, measured, _compiler(trainer) is not None, name))
        if verdict.costs:
            logger.info("kernels: forward and backward of the first batch: %s.", verdict)

    def _refuse_missing(self) -> None:
        """Refuse to resume a run without a kernel that it used: it could not continue exactly."""
        there = {candidate.kernel.name for candidate in self._candidates}
        missing = sorted({choice.kernel for choice in self._choices if choice.kernel} - there)
        if missing:
            raise StackError(
                f"The resumed run used the kernel {missing[0]!r}, which is not available now. Install its package "
                "again, or remove it from kernels.leave_out; kernels.use=all continues with the available kernels."
            )


def _compiler(trainer: forge.Run) -> Any:
    """Return the plugin that compiles the step, if there is one."""
    return next((plugin for plugin in trainer.stack if "compile" in plugin.provides), None)


def _is_offered(candidate: Candidate, compiled: bool) -> bool:
    """Whether single calls are measured for a candidate: not those that torch.compile would fuse."""
    if isinstance(candidate.replaces, Subgraph):
        return False
    return not compiled or (isinstance(candidate.replaces, Functional) and not candidate.replaces.fuses)


def _only_in_graphs(kernel: Kernel) -> bool:
    return all(isinstance(replaces, Subgraph) for replaces in kernel.replaces)


def _judged(choice: KernelChoice, verdict: StepVerdict) -> KernelChoice:
    """Return a choice without a kernel that the whole step does not keep."""
    if choice.kernel is None or choice.kernel in verdict.kept:
        return choice
    return replace(choice, kernel=None, why=f"{choice.kernel} does not make the whole step faster")
