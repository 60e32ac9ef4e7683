"""Activation checkpointing: memory for compute."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

import forge
from forge.errors import RecipeError
from forge.snapshot.sandbox import uncompiled, without_side_effects
from forge.util.blocks import repeated
from forge.util.patterns import MANY, as_list, chosen, listed
from forge.util.text import format_bytes
from forge_plugins.remat.block import install, remove
from forge_plugins.remat.budget import Meter, size_in_bytes

logger = logging.getLogger("forge")


class Remat(forge.Plugin):
    """Drop the activations of chosen blocks after forward and recompute them in backward: less memory, more work.

    Only the inputs of a block are kept. In the backward pass the block runs once more, with the same random numbers and
    under the same autocast. Weights, metrics and buffers are the same as without it, bit for bit: BatchNorm counts a
    batch once. Side effects of a block, such as counting its calls in a Python attribute, and PyTorch hooks on its
    modules happen twice. Caches of keys and values, which models of transformers fill in training too, are left as they
    were.

    When to use it: if activations do not fit into memory. Recomputing every block costs about one more forward pass, a
    third of a step.

    `modules` names the blocks, by class (`TransformerBlock`) or by name (`encoder.layers.*`); a list such as
    `encoder.layers` stands for its members. By default the repeated blocks are chosen: modules of one class, with
    layers in them, in one ModuleList or Sequential. `every=2` takes every second block: half the saving for half the
    work. `budget` takes as few blocks as needed to keep activations within a share (0.5) of their size, or within a
    size (`2 GB`); it is measured on the first batch. For a plain chain of N layers without blocks the usual choice is
    √N segments of √N layers: group them into nn.Sequential and name those.

    What you see: the log names the blocks, and with `budget` the measurement.

    Together with: `compile` works, and sees the same blocks. Evaluation is not affected. At the end of a run the task's
    own forwards are restored; names in checkpoints do not change.

    ::

        forge fit quickstart -p remat remat.modules=net
        forge fit quickstart -p remat remat.modules='net.*' remat.budget=0.7
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        modules: str | list[str] | None = None
        "Which blocks: classes or patterns of module names; null: the repeated blocks of the task."
        every: int = 1
        "Take every k-th block."
        budget: float | str | None = None
        "Take as few blocks as keep activations within a share (0.5) or a size (2 GB); null: all."

    config: Config
    provides = ("activation_checkpointing",)
    cures = {"activations": "-p {name}, which computes activations again in backward"}

    def __init__(self, *first: str | list[str] | None, **values: Any):
        super().__init__(*first, **values)
        config = self.config
        if config.every < 1:
            raise RecipeError(f"remat.every is {config.every}; it must be at least 1.")
        if config.modules is not None and not as_list(config.modules):
            raise RecipeError("remat.modules is an empty list. Name some blocks, or leave it out to have them found.")
        self._limit = _limit(config.budget)
        if self._limit is None:
            self.forge_train_step = None  # pyright: ignore[reportAttributeAccessIssue]
        elif config.every > 1:
            raise RecipeError("remat.every and remat.budget both say how many blocks to take. Set one of them.")
        self._begin()

    @classmethod
    def for_plan(cls, given: Mapping[str, Any], task: nn.Module | None) -> Mapping[str, Any] | str:
        """A budget is met by measuring, so every block is planned as recomputed."""
        if not given and task is not None and not repeated(task):
            return "The task has no repeated blocks for {name}; to plan with it: -p {name} {name}.modules=NAME."
        return {key: value for key, value in given.items() if key != "budget"}

    def _begin(self) -> None:
        """Reset the state of one run."""
        self._blocks: dict[str, nn.Module] = {}
        "Blocks that may be recomputed."
        self._installed: dict[str, Any] = {}
        "Blocks that are recomputed, with the forward that was in their `__dict__`."
        self._measured: set[str | None] = set()

    # -- a run --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_build_model(self, trainer: forge.Run, phase: str) -> None:
        if phase != "remat":
            return
        self._begin()
        if trainer.verb != "fit":  # no backward
            return
        task, patterns = trainer.task, as_list(self.config.modules)
        self._blocks = chosen(task, patterns, "remat.modules") if patterns else repeated(task)
        if not self._blocks:
            logger.log(
                logging.WARNING if trainer.env.is_main else logging.DEBUG,
                "remat does nothing: %s repeats no blocks. Name some, by class or by name: remat.modules=%s",
                type(task).__name__,
                _example(task),
            )
        elif self._limit is None:
            names = list(self._blocks)[:: self.config.every]
            self._install(names)
            logger.info("remat computes %s again in backward: %s.", self._counted(names), listed(names, MANY))

    @forge.hookimpl(wrapper=True)
    def forge_train_step(self, step: forge.Step) -> Generator[None, Any, Any]:
        """With a budget only: measure the first batch of each optimizer."""
        if step.name not in self._measured:
            self._measured.add(step.name)
            if self._blocks:
                self._fit_budget(step)
        return (yield)

    @forge.hookimpl
    def forge_end(self) -> None:
        for name, own in self._installed.items():
            remove(self._blocks[name], own)
        self._begin()

    # -- the budget ---------------------------------------------------------------------------------------------------

    def _fit_budget(self, step: forge.Step) -> None:
        assert self._limit is not None
        meter = self._measure(step)
        before = meter.kept()
        limit = self._limit if isinstance(self._limit, int) else self._limit * before
        picked = meter.choose(limit, self._installed)
        self._install([name for name in picked if name not in self._installed])
        after = meter.kept(picked)
        turn = "" if step.name is None else f" of {step.name}"
        share = f"{format_bytes(after)} of {format_bytes(before)} ({after / max(before, 1):.0%})"
        kept = f"activations{turn} kept: {share}, by the first batch"
        again = f"{self._counted(picked)} again in backward: {listed(picked, MANY)}" if picked else "nothing again"
        logger.info("remat computes %s; %s.", again, kept)
        if after > limit:
            text = "remat.budget=%s cannot be met: %s%s are kept with every block that helps. The rest is outside of "
            text += "the blocks, or is their input. Name larger blocks, or reduce the batch size."
            logger.warning(text, self.config.budget, format_bytes(after), turn)

    def _measure(self, step: forge.Step) -> Meter:
        """Measure one forward of the first batch without recomputation and without side effects."""
        trainer, installed = step.trainer, dict(self._installed)
        meter = Meter(trainer.task, self._blocks)
        for name, own in installed.items():
            remove(self._blocks[name], own)
        try:
            with without_side_effects(trainer), uncompiled():
                batch = trainer.hooks.forge_prepare_batch(step, step.window[0])
                with meter.measuring():
                    output = trainer.hooks.forge_forward(step, batch)
                del output
        finally:
            self._install(installed)
        return meter

    def _counted(self, names: list[str]) -> str:
        """ "8 blocks (Block)", "4 of 8 blocks (Block, Attention)"."""
        kinds = list(dict.fromkeys(type(block).__name__ for block in self._blocks.values()))
        count = f"{len(names)} of {len(self._blocks)}" if len(names) < len(self._blocks) else f"{len(names)}"
        return f"{count} block{'s' if len(self._blocks) > 1 else ''} ({listed(kinds, MANY)})"

    def _install(self, names: Iterable[str]) -> None:
        for name in names:
            self._installed[name] = vars(self._blocks[name]).get("forward")
            install(self._blocks[name])


def _example(task: nn.Module) -> str:
    children = [name for name, child in task.named_children() if next(child.parameters(), None) is not None]
    return children[0] if children else type(task).__name__


def _limit(budget: float | str | None) -> int | float | None:
    """Return a share as a float, a size as an int."""
    if isinstance(budget, str):
        size = size_in_bytes(budget)
        if size is None:
            raise RecipeError(f"remat.budget is {budget!r}; write a share, as in 0.5, or a size, as in '2 GB'.")
        return size
    if budget is not None and not 0 <= budget <= 1:
        raise RecipeError(f"remat.budget is {budget:g}; a share is between 0 and 1. For a size write '2 GB'.")
    return budget
