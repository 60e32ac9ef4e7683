"""torch.compile, in place, with a report."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

import forge
from forge.contract.task import Build
from forge.errors import RecipeError
from forge.util.patterns import MANY, as_list, chosen, listed
from forge_plugins.compile import compiler, messages
from forge_plugins.compile.comparison import compare
from forge_plugins.compile.compile_watch import CompileWatch
from forge_plugins.compile.generations import Generations
from forge_plugins.compile.regions import Regions

logger = logging.getLogger("forge")

CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes that replay CUDA graphs, on CUDA."""


class Compile(forge.Plugin):
    """Compile the task with torch.compile, in place, and report graphs, graph breaks and recompiles.

    By default the whole step is compiled as one: `training_step` with the loss, and the evaluation steps. `blocks`
    names modules, by class (`TransformerBlock`) or by name (`encoder.layers.*`), that are compiled separately:
    identical blocks share one graph, so a deep model compiles in the time of one block. Names in checkpoints do not
    change, and at the end of a run the task is restored.

    When to use it: once the model is correct, not before. `mode` sets the effort: `default`; `reduce-overhead`, which
    replays CUDA graphs, for small batches on CUDA; `max-autotune`, which measures kernels first and takes minutes.

    What you see: after the first update, the number of graphs, and the line and reason of each graph break; later, each
    recompile with its reason. `compile/graphs`, `compile/breaks` and `compile/recompiles` are logged when they change.
    Graphs for evaluation, for another optimizer's turn and for unfrozen parameters do not count as recompiles. A new
    shape is a recompile, after which the graph takes other sizes too; with `dynamic=false` each new shape is one, until
    torch gives up on a stream of shapes, which gives a warning with the remedy: a run that is resumed after that does
    not end in the bits of an uninterrupted one. If nothing was compiled at all, a warning says so.

    Compiled arithmetic differs from eager arithmetic: fused kernels round differently, and inductor draws other random
    numbers for dropout. The backends `eager` and `aot_eager` generate no code and give the bits of eager on the CPU,
    unless an operation is decomposed. `compare` runs the first batch compiled and uncompiled before training, in
    training mode, with the same random numbers, and reports the largest difference of loss and gradients. If it is too
    large, the message names torch's own minifier, which finds the operations. Too large means more than 0.001 of a
    tensor's largest entry in float32, 0.01 with float16 or TF32, 0.05 with bfloat16. `compare` does not affect the run,
    and costs one more compilation.

    Together with: for `cuda_graph` keep `mode=default`. For `fsdp` name the same blocks in both. PyTorch hooks on a
    compiled module run outside its graph; hooks on modules inside become part of the graph, and torch may not notice
    hooks that are added later.

    ::

        forge fit quickstart -p compile compile.backend=aot_eager
        forge fit quickstart -p compile compile.backend=aot_eager compile.blocks=Sequential compile.compare=true
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
        "Effort of inductor: default, reduce-overhead (CUDA graphs) or max-autotune (measured kernels)."
        backend: str = "inductor"
        "The compiler; aot_eager traces graphs without generating code, for tests."
        dynamic: bool | None = None
        "Whether sizes may vary within one graph; null: from the first recompile for a size on, as torch does."
        fullgraph: bool = False
        "Raise an error on graph breaks instead of continuing without a graph."
        blocks: str | list[str] | None = None
        "Compile these modules separately: classes or patterns of module names; null: the whole step."
        compare: bool = False
        "Before training, run one batch eagerly and compiled, and report the largest difference."

    config: Config
    provides = ("compile", "compiled_code")
    cures = {"host": "-p {name}, which makes few calls of many", "compute": "-p {name}, which fuses operators"}

    def __init__(self, *first: str, **values: Any):
        super().__init__(*first, **values)
        config = self.config
        if config.backend != "inductor" and config.mode != "default":
            raise RecipeError(f"compile.mode={config.mode} is for inductor; the backend is {config.backend!r}.")
        if config.blocks is not None and not as_list(config.blocks):
            raise RecipeError(
                "compile.blocks is an empty list. Name some modules, or leave it out to compile the whole."
            )
        if config.mode in CUDA_GRAPHS:
            self.provides = ("compile", "compiled_code", "compiled_graphs")
        if not config.compare:
            self.forge_train_step = None  # pyright: ignore[reportAttributeAccessIssue]
        self._begin()

    def _begin(self) -> None:
        """Reset the state of one run."""
        self._regions: Regions | None = None
        self._shell: nn.Module | None = None
        self._watch = CompileWatch(graphs=None)
        self._looked = False
        self._reported = self._recorded = (0, 0, 0)
        self._warned: set[str] = set()
        self._compared: set[str | None] = set()
        self._flags = ExitStack()

    @property
    def _options(self) -> dict[str, Any]:
        config = self.config
        options: dict[str, Any] = {
            "backend": config.backend,
            "dynamic": config.dynamic,
            "fullgraph": config.fullgraph,
        }
        return {**options, "mode": config.mode} if config.backend == "inductor" else options

    # -- a run --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_build_model(self, trainer: forge.Run, build: Build, phase: str) -> None:
        if phase != "compile":
            return
        self._begin()
        compiler.check_backend(self.config.backend, trainer.env.device)
        patterns = as_list(self.config.blocks)
        modules = chosen(build.task, patterns, "compile.blocks") if patterns else {"": build.model}
        self._regions, self._shell = Regions(modules, whole=not patterns), build.model
        self._flags.enter_context(compiler.checking_parameters())
        self._flags.enter_context(compiler.without_torchs_account())
        self._flags.enter_context(compiler.without_breaks_for_messages())
        self._watch = CompileWatch()
        self._regions.install(self._options, after=self._watch.look)  # torch keeps its records for a while only
        if self.config.mode in CUDA_GRAPHS:
            self._replay_graphs(trainer, build)
        if patterns:
            logger.info("compile: compiled separately: %s.", listed(modules, MANY))

    def _replay_graphs(self, trainer: forge.Run, build: Build) -> None:
        model = build.model
        if trainer.env.device.type == "cuda":
            model._compiled_call_impl = Generations(model._compiled_call_impl or model._call_impl, build.task)
        else:
            logger.info(
                "compile.mode=%s: CUDA graphs need CUDA; on %s none are used.", self.config.mode, trainer.env.device
            )

    @forge.hookimpl(wrapper=True)
    def forge_train_step(self, step: forge.Step) -> Generator[None, Any, Any]:
        """With `compare` only: compare before the first update of each optimizer."""
        if step.name not in self._compared:
            self._compared.add(step.name)
            self._compare(step)
        return (yield)

    @forge.hookimpl
    def forge_step_end(self, step: forge.Step) -> None:
        if self._looked and not step.ends_interval:
            return
        self._look()
        counts = self._watch.counts
        if step.ends_interval and counts != self._recorded:
            self._recorded = counts
            for name, count in zip(("graphs", "breaks", "recompiles"), counts, strict=True):
                step.record(f"compile/{name}", count)
        if not self._looked:
            self._looked = True
            self._warn_of_nothing()

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        if self._regions is None or self._shell is None:
            return
        try:
            self._look()
            if trainer.verb != "fit":
                self._warn_of_nothing()
        finally:
            self._regions.remove()
            self._shell._compiled_call_impl = None
            self._flags.close()
            torch.compiler.reset()  # drop this run's graphs, their memory and torch's count of recompiles
            self._begin()

    # -- reports ------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Log what was compiled since the last check, if anything."""
        watch, reported = self._watch, self._reported
        watch.look()
        self._reported = watch.counts
        if watch.graphs != 0 and watch.counts != reported:
            logger.log(*messages.summary(watch, reported))
        if watch.limits:
            self._warn("limit", messages.limit(watch.limits, self.config.dynamic))

    def _warn_of_nothing(self) -> None:
        regions = self._regions
        assert regions is not None
        if self._watch.graphs == 0:
            self._warn("nothing", messages.nothing(self._watch))
        elif not regions.whole and (empty := regions.empty()):
            self._warn("empty", messages.without(empty))

    def _warn(self, kind: str, text: str) -> None:
        """Warn once per run."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", text)

    # -- against eager ------------------------------------------------------------------------------------------------

    def _compare(self, step: forge.Step) -> None:
        assert self._regions is not None
        self._watch.look()
        trial = CompileWatch()
        try:
            agrees, found = compare(step, self._regions, self._options)
        finally:
            trial.look()
            if trial.breaks or trial.graphs is None:
                # beyond a break torch compiles the user's functions, and graphs compiled for this comparison must not
                # be used by the run
                torch.compiler.reset()
            self._watch.skip()
        turn = "" if step.name is None else f" ({step.name})"
        logger.log(logging.INFO if agrees else logging.WARNING, "compile%s: %s", turn, found)
