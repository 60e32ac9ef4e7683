"""Activation checkpointing: memory for compute."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

import forge
from forge.errors import RecipeError
from forge.util.blocks import repeated
from forge.util.patterns import MANY, as_list, chosen, listed
from forge_plugins.remat.block import install, remove

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
    work. For a plain chain of N layers without blocks the usual choice is √N segments of √N layers: group them into
    nn.Sequential and name those.

    What you see: the log names the blocks.

    Together with: `compile` works, and sees the same blocks. Evaluation is not affected. At the end of a run the task's
    own forwards are restored; names in checkpoints do not change.

    ::

        forge fit quickstart -p remat remat.modules=net
        forge fit quickstart -p remat remat.modules='net.*' remat.every=2
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        modules: str | list[str] | None = None
        "Which blocks: classes or patterns of module names; null: the repeated blocks of the task."
        every: int = 1
        "Take every k-th block."

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
        self._begin()

    @classmethod
    def for_plan(cls, given: Mapping[str, Any], task: nn.Module | None) -> Mapping[str, Any] | str:
        """A task without repeated blocks needs the names of some."""
        if not given and task is not None and not repeated(task):
            return "The task has no repeated blocks for {name}; to plan with it: -p {name} {name}.modules=NAME."
        return given

    def _begin(self) -> None:
        """Reset the state of one run."""
        self._blocks: dict[str, nn.Module] = {}
        "Blocks that may be recomputed."
        self._installed: dict[str, Any] = {}
        "Blocks that are recomputed, with the forward that was in their `__dict__`."

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
        else:
            names = list(self._blocks)[:: self.config.every]
            self._install(names)
            logger.info("remat computes %s again in backward: %s.", self._counted(names), listed(names, MANY))

    @forge.hookimpl
    def forge_end(self) -> None:
        for name, own in self._installed.items():
            remove(self._blocks[name], own)
        self._begin()

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
